"""What is said of a deployment, as plain data: a candidate's row, and all of the recommended fleet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from windtunnel.capacity.binding import MEANING
from windtunnel.planning.analysis import Analysis
from windtunnel.planning.candidates import Shape
from windtunnel.planning.jobs import MAX_RHO
from windtunnel.planning.load import Demand
from windtunnel.planning.measure import strain
from windtunnel.planning.money import Bill, bill_of
from windtunnel.planning.question import Question, deployment_of
from windtunnel.planning.search import Found, Tried, smallest_that_holds, whole
from windtunnel.sim.cost.statement import sentences
from windtunnel.sim.metrics.replications import Interval


def shape_words(shape: Shape) -> dict[str, Any]:
    """What one replica runs on."""
    told = {key: value for key, value in asdict(shape).items() if key != "names_model"}
    return {**told, "num_gpus_per_replica": shape.num_gpus, "label": shape.label}


def interval_words(interval: Interval | None) -> dict[str, Any] | None:
    """An interval as plain data."""
    return None if interval is None else interval.to_dict()


def row_of(found: Found, each: Tried, spare: int) -> dict[str, Any]:
    """One candidate: what it takes, what it costs, what it ran into."""
    needed, size = each.num_replicas, smallest_that_holds(each)
    estimate = next((result for result in each.estimates if result["at"] is not None), None)
    fleet = None if size is None else each.fleets[size, 0]
    at = fleet or (None if estimate is None else estimate["at"])
    num = size if size is not None else (None if needed is None else max(1, math.ceil(needed.mean - 1e-9)))
    return {
        **shape_words(each.shape),
        **asdict(each.candidate.knobs),
        "is_default": each.feasible.is_default,
        "calibrated": each.calibrated,
        "evidence": each.evidence,
        "profile": each.profile,
        "num_kv_tokens": each.feasible.memory.kv_cache_tokens,
        "oom_margin_bytes": each.feasible.memory.oom_margin_bytes,
        "replicas_needed": interval_words(needed),
        "num_replicas": num,
        "is_verified": size is not None,
        "num_gpus": None if num is None else (num + spare) * each.shape.num_gpus,
        "cost_per_hour": None if num is None else each.whole_cost(num, spare),
        "cost_interval": _cost_interval(each, needed, spare),
        "binding": None if estimate is None else estimate["at"]["binding"],
        "time_shares": None if estimate is None else estimate["at"]["time_shares"],
        "limit_rate": found.limits.get(each.candidate),
        "worst": None if at is None else at["worst"],
        "objectives": None if at is None else at["objectives"],
        "latency_ms": None if at is None else at["latency_ms"],
        "busy_share": None if at is None else at["busy_share"],
        "prefill_share": None if at is None else at["prefill_share"],
        "kv_usage_peak": None if at is None else at["kv_usage_peak"],
        "num_running_peak": None if at is None else at["num_running_peak"],
        "num_preemptions": None if at is None else at["num_preemptions"],
        "misses": None if needed is not None or not each.estimates else each.missed,
        "bill": None if num is None or at is None else asdict(_bill(found, each, num, spare, at)),
    }


def _cost_interval(each: Tried, needed: Interval | None, spare: int) -> dict[str, float | None] | None:
    if needed is None:
        return None
    low, high = (
        (each.whole_cost(0, spare) + max(end, 1.0) * each.unit_cost if math.isfinite(end) else None)
        for end in (needed.low, needed.high)
    )
    return {"low": low, "high": high}


def _bill(found: Found, each: Tried, num: int, spare: int, at: Mapping[str, Any]) -> Bill:
    busy = at["busy_share"] * num / (num + spare)
    num_gpus = (num + spare) * each.shape.num_gpus
    demand = _served(found.demand, at)
    return bill_of(each.offer, num_gpus, demand, prefill_share=at["prefill_share"], busy_share=busy)


def _served(demand: Demand, at: Mapping[str, Any]) -> Demand:
    """The demand in tokens that were served: not those of requests that were refused, nor what was cut off."""
    shares = at["served_shares"]
    return replace(
        demand,
        mean_prompt_tokens=demand.mean_prompt_tokens * shares["input"],
        mean_output_tokens=demand.mean_output_tokens * shares["output"],
    )


def recommended(question: Question, found: Found, chosen: Tried, analysis: Analysis, spare: int) -> dict[str, Any]:
    """All that is said of the recommended fleet."""
    size = analysis.num_replicas
    row = row_of(found, chosen, spare)
    fleets = [result for (known, _), result in sorted(chosen.fleets.items()) if known == size]
    limit = analysis.limit_rate
    rho = _rho(chosen, size)
    peak_rho = None if rho is None else rho * found.demand.peak_to_mean
    cost = deployment_of(question, chosen.candidate).cost
    described = cost.describe()
    return {
        **row,
        "overrides": {**chosen.candidate.overrides(), "data_parallel_size": size + spare},
        "refused_share": found.refused_shares.get(chosen.shape.model, 0.0),
        "fleet": fleets[0],
        "objectives_over_replications": _over_replications(fleets),
        "headroom": interval_words(analysis.headroom),
        "is_full_first": analysis.is_full_first,
        "size_within_noise": _size_within_noise(chosen, analysis),
        "limit_rate": limit,
        "rate_per_replica": _rate_per_replica(found, chosen),
        "rho": rho,
        "peak_rho": peak_rho,
        "utilisation": fleets[0]["busy_share"],
        "one_down": _one_down(chosen, analysis, spare),
        "crash": _crash(chosen, analysis, spare),
        "redundant": _redundant(found, chosen, size, spare, fleets[0]),
        "needed_alone": _with_replicas(found, chosen, size, fleets[0], size) if spare else None,
        "slower": _slower(chosen, analysis, spare),
        "peak_and_mean": _peak_and_mean(found, chosen, size, analysis),
        "statement": list(sentences(described))
        or [f"Step times are those that were given ({cost.name}); nothing is known of their error."],
        "cost_model": cost.name,
        "binding_meaning": MEANING.get(str(row["binding"]), ""),
        "fewer": _fewer(chosen, size),
    }


def _size_within_noise(chosen: Tried, analysis: Analysis) -> dict[str, int]:
    """The numbers of replicas that other draws of the same load may ask for."""
    held, size = smallest_that_holds(chosen, in_all=False), analysis.num_replicas
    low, high = analysis.headroom.low, analysis.headroom.high
    most = size if not math.isfinite(low) or low <= 0 else max(size, whole(size / low))
    least = size if not math.isfinite(high) or high <= 0 else min(size, whole(size / high))
    return {"low": max(chosen.least, least if held is None else min(held, least)), "high": most}


def _rho(chosen: Tried, num_replicas: float) -> float | None:
    """The mean load over what so many replicas can do at most; None where that is not known."""
    return MAX_RHO * chosen.floor / num_replicas if chosen.floor else None


def _over_replications(fleets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each objective over the replications: its smallest, largest and first value."""
    rows = []
    for number, objective in enumerate(fleets[0]["objectives"]):
        values = [fleet["objectives"][number]["measured"] for fleet in fleets]
        known = [value for value in values if value is not None]
        rows.append(
            {
                **objective,
                "low": min(known, default=None),
                "high": max(known, default=None),
                "num": len(known),
                "strain": max(
                    (rate for fleet in fleets if (rate := strain(fleet["objectives"][number])) is not None),
                    default=None,
                ),
            }
        )
    return rows


def _rate_per_replica(found: Found, chosen: Tried) -> dict[str, Any] | None:
    """Requests per second that one replica carries with this workload's bursts, as an interval."""
    needed = chosen.num_replicas
    if needed is None:
        return None
    rate = found.demand.mean_rate
    return {
        "mean": rate / needed.mean,
        "low": rate / needed.high if math.isfinite(needed.high) else None,
        "high": rate / needed.low if math.isfinite(needed.low) and needed.low > 0 else None,
    }


def _one_down(chosen: Tried, analysis: Analysis, spare: int) -> dict[str, Any] | None:
    if not analysis.one_down:
        return None
    missed = [
        objective for result in analysis.one_down for objective in result["objectives"] if not objective["passed"]
    ]
    left = analysis.num_replicas + spare - 1
    return {
        "num_replicas": left,
        "num_held": sum(result["holds"] for result in analysis.one_down) if left >= chosen.least else 0,
        **_load_of(chosen, left, analysis.one_down),
        "num_replications": len(analysis.one_down),
        "objectives": _over_replications(analysis.one_down),
        "missed": sorted({objective["text"] for objective in missed}),
        "verdicts": sorted({result["verdict"] for result in analysis.one_down}),
    }


def _load_of(chosen: Tried, num_replicas: int, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether so many replicas cannot keep up, by what they can do at most or by what was seen."""
    overloaded = num_replicas < chosen.least or any(result["overloaded"] for result in results)
    return {"rho": _rho(chosen, num_replicas), "overloaded": overloaded}


def _crash(chosen: Tried, analysis: Analysis, spare: int) -> dict[str, Any] | None:
    """A crash is for good: those that are left have to keep up, however late in the run it comes."""
    if analysis.crash is None:
        return None
    left = analysis.num_replicas + spare - 1
    told = {key: analysis.crash[key] for key in ("objectives", "num_begun_anew", "failed", "worst_minute_ms")}
    holds = analysis.crash["holds"] and left >= chosen.least
    return {"holds": holds, "num_replicas": left, **told, **_load_of(chosen, left, [analysis.crash])}


def _redundant(found: Found, chosen: Tried, size: int, spare: int, at: Mapping[str, Any]) -> dict[str, Any]:
    """N+1: what holds while one is down; what is bought, where spare replicas are."""
    return _with_replicas(found, chosen, size + max(spare, 1), at, size)


def _with_replicas(found: Found, chosen: Tried, num: int, at: Mapping[str, Any], size: int) -> dict[str, Any]:
    """What so many replicas cost that share the load that was measured with ``size`` of them."""
    bill = bill_of(
        chosen.offer,
        num * chosen.shape.num_gpus,
        _served(found.demand, at),
        prefill_share=at["prefill_share"],
        busy_share=at["busy_share"] * size / num,
    )
    return {"num_replicas": num, "cost_per_hour": chosen.whole_cost(num, 0), "bill": asdict(bill)}


def _slower(chosen: Tried, analysis: Analysis, spare: int) -> dict[str, Any] | None:
    if analysis.slower_by is None or analysis.slower_fleet is None:
        return None
    needed, usual = analysis.slower_replicas, chosen.num_replicas
    ratio = None if needed is None or usual is None else needed / usual.mean
    least = whole(chosen.floor * (1 + analysis.slower_by / 100))
    holds = analysis.slower_fleet["holds"] and analysis.num_replicas >= least
    size = None
    if ratio is not None:
        size = max(1, math.ceil(ratio * analysis.num_replicas / max(analysis.headroom.mean, 1e-9) - 1e-9))
        size = analysis.num_replicas if holds else max(size, least, analysis.num_replicas + 1)
    return {
        "percent": analysis.slower_by,
        "holds": holds,
        "overloaded": analysis.slower_fleet["overloaded"] or analysis.num_replicas < least,
        "rho": None if (rho := _rho(chosen, analysis.num_replicas)) is None else rho * (1 + analysis.slower_by / 100),
        "objectives": analysis.slower_fleet["objectives"],
        "num_replicas": size,
        "cost_per_hour": None if size is None else chosen.whole_cost(size, spare),
    }


def _peak_and_mean(found: Found, chosen: Tried, size: int, analysis: Analysis) -> dict[str, Any]:
    """What the load's unevenness costs: replicas if it were even, and what following it exactly would save at most."""
    rate, demand = _rate_per_replica(found, chosen), found.demand
    limit = analysis.limit_rate
    return {
        "mean_rate": demand.mean_rate,
        "peak_rate": demand.peak_rate,
        "peak_to_mean": demand.peak_to_mean,
        "replicas_to_keep_up_with_mean": None if limit is None else demand.mean_rate / limit,
        "replicas_to_keep_up_with_peak": None if limit is None else demand.peak_rate / limit,
        "rate_per_replica": None if rate is None else rate["mean"],
        "num_replicas": size,
        "headroom": analysis.headroom.mean,
    }


def _fewer(chosen: Tried, size: int) -> list[dict[str, Any]]:
    """Smaller fleets that were simulated, and what they missed: why it takes so many."""
    rows = []
    for (known, replication), result in sorted(chosen.fleets.items()):
        if known < size and replication == 0:
            holds = result["holds"] and known >= chosen.least
            load = _load_of(chosen, known, [result])
            rows.append({"num_replicas": known, "holds": holds, "objectives": result["objectives"], **load})
    return rows
