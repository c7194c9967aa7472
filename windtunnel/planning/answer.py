"""The answer of a plan as plain data: what its text, its reports and its JSON are made from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from windtunnel import __version__
from windtunnel.planning.analysis import Analysis, growth_of, months_until_full
from windtunnel.planning.candidates import Refused, Space
from windtunnel.planning.jobs import MOST_REPLICAS, TOLERANCE
from windtunnel.planning.load import Growth, rates_over_time
from windtunnel.planning.measure import strain
from windtunnel.planning.points import curves, pareto
from windtunnel.planning.question import Question, deployment_of, objectives_of, workload_of
from windtunnel.planning.rows import interval_words, recommended, row_of, shape_words
from windtunnel.planning.search import Dropped, Found, Tried, difference, room_percent, smallest_that_holds
from windtunnel.scenarios.resolve import Resolved
from windtunnel.sim.metrics.slo import Slo
from windtunnel.sim.metrics.stability import Verdict
from windtunnel.sim.metrics.words import digits, percent

SCHEMA_VERSION = 1
HOLDS, NOTHING_HOLDS, NOTHING_FITS = "holds", "nothing_holds", "nothing_fits"
SMALL_MARGIN = 0.1
"""Of an objective's limit: a fleet that comes nearer to it has little to spare."""
MIN_STAYS = 5
"""A workload that lasts less than so many times a long stay of a request (p99) says little of a steady state."""
MIN_BEYOND = 10
"""Requests beyond a percentile from which on it is told to about a third of their number (1/sqrt of it)."""
_WITH_RAMP = 1.5
"""Requests over those that are counted once the ramp is left out (``capacity.evaluate.RAMP_SHARE``)."""
MOST_EXTRAPOLATED = 0.5
"""Share of the time of the steps outside of the profile's domain from which on the answer is in doubt."""
FAR_OFF = 2
"""A whole fleet of so many times what one replica's share of the requests asks for is not its answer but chance."""


def ranking(found: Found, spare: int) -> list[Tried]:
    """Finalists whose whole fleets held, cheapest first; of equal cost vLLM's defaults, where others need no fewer
    replicas, else the one with more room.
    """
    held = [each for each in found.finalists if smallest_that_holds(each) is not None]

    def whole(each: Tried) -> tuple[bool, float]:
        return not each.calibrated, each.whole_cost(smallest_that_holds(each) or 0, spare)

    lowest: dict[tuple[bool, float], float] = {}
    for each in held:
        lowest[whole(each)] = min(each.cost, lowest.get(whole(each), math.inf))
    return sorted(
        held,
        key=lambda each: (
            *whole(each),
            each.cost > (1 + TOLERANCE) * lowest[whole(each)],
            not each.feasible.is_default,
            each.cost,
            each.candidate,
        ),
    )


def is_equal(best: Tried, other: Tried, spare: int) -> bool:
    """Whether two finalists cost the same as far as this search can tell: by their whole fleets, or by what they take
    of replicas on the same requests.
    """
    if best.calibrated is not other.calibrated:
        return False
    sizes = [smallest_that_holds(each) for each in (best, other)]
    lows = [smallest_that_holds(each, in_all=False) for each in (best, other)]
    if None in sizes or None in lows:
        return False
    costs = [each.whole_cost(size or 0, spare) for each, size in zip((best, other), sizes, strict=True)]
    if other.whole_cost(lows[1] or 0, spare) <= costs[0]:
        return True
    # whole replicas may part what takes the same: one more replica of the dearer unit is what rounding can do
    return _takes_as_much(best, other) and costs[1] - costs[0] <= max(best.unit_cost, other.unit_cost)


def _takes_as_much(best: Tried, other: Tried) -> bool:
    """Whether the costs of what two candidates take, not rounded, are the same as far as the replications can tell."""
    apart = difference(best, other)
    return abs(other.cost - best.cost) <= TOLERANCE * best.cost or (apart is not None and not apart.excludes(0))


def level_settings(tried: Sequence[Tried], chosen: Tried) -> list[dict[str, Any]]:
    """Settings of the same kind, not simulated as whole fleets, that take as many replicas as far as can be told."""
    level = [
        each
        for each in tried
        if each is not chosen
        and each.shape == chosen.shape
        and not each.fleets
        and len(each.estimates) == len(chosen.estimates) > 1
        and _takes_as_much(chosen, each)
    ]
    return [
        {**asdict(each.candidate.knobs), "replicas_needed": interval_words(each.num_replicas)}
        for each in sorted(level, key=lambda each: (each.cost, each.candidate))
    ]


def answer(
    question: Question,
    space: Space,
    found: Found,
    chosen: Tried | None,
    analysis: Analysis | None,
    *,
    currency: str,
    priced_elsewhere: Sequence[str] = (),
    spare: int,
    growth: Growth | None,
    notes: Sequence[str],
    warnings: Sequence[str] = (),
    reproduce: str,
) -> dict[str, Any]:
    """Everything that is said, in a fixed order.

    ``priced_elsewhere`` are cards that have a price but are not to choose from: named where those offered have none.
    """
    order = ranking(found, spare)
    verdict = HOLDS if chosen is not None else (NOTHING_HOLDS if found.tried or found.dropped else NOTHING_FITS)
    has_prices = all(offer.price_per_hour is not None for offer in space.offers)
    told = {
        "windtunnel_version": __version__,
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict,
        "currency": currency if has_prices else None,
        "has_prices": has_prices,
        "ranked_by": "cost_per_hour" if has_prices else "num_gpus",
        "spare_replicas": spare,
        "recommended": None,
        "equal": [],
        "runners_up": [],
        "nearest": None if chosen is not None else _nearest(found),
        "uncalibrated_alternative": None,
        "candidates": [],
        "refused": [_refused(each) for each in found.refused],
        "dropped": [_dropped(each) for each in found.dropped],
        "without_effect": _without_effect(found),
        "growth": None,
        "pareto": pareto(found, question, spare),
        "curves": curves(found, question),
        "demand": _demand(question, found),
        "asked": _asked(question, space, found, chosen),
        "search": {
            "num_simulations": found.num_simulations + (analysis.num_simulations if analysis else 0),
            "num_requests": found.num_requests + (analysis.num_requests if analysis else 0),
            "requests_per_simulation": question.num_requests,
            "replications": question.replications,
            "seed": question.seed,
            "tolerance": TOLERANCE,
        },
        "notes": [*notes, *([] if growth is None or chosen is None else [_GROWTH])],
        "warnings": [],
        "reproduce": reproduce,
    }
    if chosen is not None and analysis is not None:
        best = recommended(question, found, chosen, analysis, spare)
        doubts = list(_doubts(best, question, found, chosen))
        told["recommended"] = {**best, "doubts": doubts, "level_settings": level_settings(found.tried, chosen)}
        told["equal"] = [
            row_of(found, each, spare) for each in order if each is not chosen and is_equal(chosen, each, spare)
        ]
        told["runners_up"] = [
            {**row_of(found, each, spare), "why_not": _why_not(chosen, each, spare)}
            for each in order
            if each is not chosen and each.calibrated is chosen.calibrated
        ]
        others = [each for each in order if each.calibrated is not chosen.calibrated]
        told["uncalibrated_alternative"] = row_of(found, others[0], spare) if others else None
        told["growth"] = None if growth is None else _growth(growth, order, chosen, analysis, spare)
        unpriced = [] if has_prices else [_unpriced(space, priced_elsewhere)]
        told["warnings"] = [*unpriced, *_warnings(told, question, found, chosen), *warnings]
    told["candidates"] = [row_of(found, each, spare) for each in _in_order(found)]
    return told


# --- what was asked


def _demand(question: Question, found: Found) -> dict[str, Any]:
    starts, rates = rates_over_time(workload_of(question))
    return {
        **asdict(found.demand),
        "peak_rate": found.demand.peak_rate,
        "peak_to_mean": found.demand.peak_to_mean,
        "peak_window_s": found.demand.peak_window_s,
        "source": workload_of(question).source,
        "scale": question.scale,
        "over_time": {"start_s": [round(each, 3) for each in starts.tolist()], "rate": rates.round(4).tolist()},
    }


def _asked(question: Question, space: Space, found: Found, chosen: Tried | None) -> dict[str, Any]:
    slo, goodput = objectives_of(question)
    resolved = None
    if chosen is not None:
        resolved = deployment_of(question, chosen.candidate)
    return {
        "models": list(space.models),
        "objectives": [objective.text for objective in slo],
        "goodput": None if goodput is None else str(goodput),
        "gpus": [
            {
                "gpu": offer.gpu,
                "price_per_hour": offer.price_per_hour,
                "idle_watts": offer.idle_watts,
                "busy_watts": offer.busy_watts,
            }
            for offer in space.offers
        ],
        "fixed": {key: value for key, value in space.fixed.items() if value is not None},
        "engine": space.version.label,
        "router": None if resolved is None else _router(resolved),
        "num_candidates": len({each.candidate for each in found.tried}),
    }


def _router(resolved: Resolved) -> str:
    return resolved.system.router if resolved.fleet is None else resolved.fleet.routing.router


def _why_not(chosen: Tried, each: Tried, spare: int) -> str:
    sizes = [smallest_that_holds(one) or 0 for one in (chosen, each)]
    costs = [one.whole_cost(size, spare) for one, size in zip((chosen, each), sizes, strict=True)]
    more = costs[1] / costs[0] - 1
    if is_equal(chosen, each, spare):
        return "within noise" if abs(more) < 1e-9 else f"{100 * more:+.0f} %, within noise"
    return f"{100 * more:.0f} % dearer" if more > 1e-9 else "costs the same, with less room"


# --- what is not the answer


def _refused(each: Refused) -> dict[str, Any]:
    return {
        **shape_words(each.shape),
        "kind": each.kind,
        "reason": each.reason,
        "is_whole": each.is_whole,
        "knobs": [asdict(knobs) for knobs in each.knobs],
    }


def _dropped(each: Dropped) -> dict[str, Any]:
    return {**shape_words(each.shape), "kind": each.kind, "reason": each.reason, "bound": each.bound}


def _without_effect(found: Found) -> list[dict[str, Any]]:
    return [
        {"label": each.shape.label, "knob": each.knob, "value": each.value, "reason": each.reason}
        for each in found.without_effect
    ]


def _nearest(found: Found) -> dict[str, Any] | None:
    """Of deployments that miss an objective, whatever their number: the one that misses by least, and what."""
    missing: list[tuple[float, str, list[dict[str, Any]]]] = []
    for shape, result in found.alone.items():
        missed = [objective for objective in result["objectives"] if not objective["passed"]]
        if missed:
            missing.append((_by_how_much(missed), shape.label, missed))
    missing += [(_by_how_much(each.missed), each.candidate.label, each.missed) for each in found.tried if each.missed]
    if not missing:
        return None
    rate, label, missed = min(missing, key=lambda item: (item[0], item[1]))
    return {"label": label, "strain": rate if math.isfinite(rate) else None, "missed": missed}


def _by_how_much(missed: Sequence[dict[str, Any]]) -> float:
    return max(math.inf if (rate := strain(objective)) is None else rate for objective in missed)


def _in_order(found: Found) -> list[Tried]:
    ranked = list(found.ranked)
    return [*ranked, *(each for each in found.tried if each not in ranked)]


_GROWTH = (
    "Growth is an estimate: replicas are scaled with the load, in proportion to what today's fleet was seen to carry, "
    "and no grown load was simulated. Ask with --scale before you order for one."
)


def _growth(growth: Growth, order: Sequence[Tried], chosen: Tried, analysis: Analysis, spare: int) -> dict[str, Any]:
    return {
        "per_month": growth.per_month,
        "num_months": growth.num_months,
        "months_until_full": months_until_full(growth, analysis),
        "is_simulated": False,
        "most_replicas": MOST_REPLICAS,
        "rows": growth_of(growth, order, chosen, analysis, spare),
    }


def _with_spare(number: int, spare: int) -> str:
    """``4``, or ``5 (1 spare)``."""
    return f"{number + spare:,} ({spare:,} spare)" if spare else f"{number:,}"


# --- what a reader must know first


def _unpriced(space: Space, priced_elsewhere: Sequence[str]) -> str:
    """That cost decided nothing, and what did."""
    names = [offer.gpu for offer in space.offers]
    some = f" ([price] has {' and '.join(priced_elsewhere)} only)" if priced_elsewhere else ""
    alike = f", as if an hour of {' and one of '.join(names)} cost the same" if len(names) > 1 else ""
    return (
        f"No price of {' or '.join(names)} was given{some}: the fewest GPUs win{alike}, and no cost is told. Give "
        f"prices: {' '.join(f'--gpu {name.lower()}=PRICE' for name in names)}."
    )


def _doubts(best: Mapping[str, Any], question: Question, found: Found, chosen: Tried) -> Iterator[str]:
    """Why the answer may not be one, in the few words that stand beside it; ``_warnings`` has more."""
    if _is_too_short(best, found):
        yield "the workload is too short"
    if any(requests_to_tell(slo) > best["fleet"]["num_counted"] for slo in objectives_of(question)[0]):
        yield "it has too few requests"
    if _is_far_off(best, chosen):
        yield "the estimate is far lower"
    if best["fleet"]["outside_share"] > MOST_EXTRAPOLATED:
        yield "most step times are extrapolated"


def _long_stay_s(best: Mapping[str, Any]) -> float:
    return float(best["fleet"]["latency_ms"]["e2el"].get("p99") or 0.0) / 1000


def _is_too_short(best: Mapping[str, Any], found: Found) -> bool:
    return best["fleet"]["verdict"] == Verdict.TOO_SHORT or found.demand.span_s < MIN_STAYS * _long_stay_s(best)


def _is_far_off(best: Mapping[str, Any], chosen: Tried) -> bool:
    needed, size = chosen.num_replicas, best["num_replicas"]
    return needed is not None and size > max(FAR_OFF * needed.mean, needed.mean + 2)


def _of_chance(best: Mapping[str, Any], question: Question, chosen: Tried) -> Iterator[str]:
    """Objectives that so few requests cannot tell, and an answer that is not near its estimate."""
    num = int(best["fleet"]["num_counted"])
    short = {slo.text: wanted for slo in objectives_of(question)[0] if (wanted := requests_to_tell(slo)) > num}
    if short:
        yield (
            f"{' and '.join(short)} cannot be told from {num:,} requests that were counted, where chance decides: it "
            f"takes {max(short.values()):,} or more. Give more requests (--num-prompts, a longer trace)."
        )
    seen = [estimate["at"]["num_counted"] for estimate in chosen.estimates if estimate["at"] is not None]
    sampled = min(seen, default=0)
    rough = {slo.text: wanted for slo in objectives_of(question)[0] if (wanted := requests_to_tell(slo)) > sampled}
    if rough and not short:
        yield (
            f"Candidates were compared on {sampled:,} requests a simulation, too few for {' and '.join(rough)}, which "
            f"takes {max(rough.values()):,} or more; only the whole fleets had so many. Give --requests "
            f"{_round_up(rough)}."
        )
    needed, size = chosen.num_replicas, best["num_replicas"]
    if needed is not None and _is_far_off(best, chosen):
        yield (
            f"The fleet has {size / needed.mean:.1f} times the {digits(needed.mean, 2)} replicas that one replica's "
            "share of the requests asks for: chance decided, or the router sends too much to some of them. Simulate a "
            "longer workload before you buy so many."
        )


def _round_up(wanted: Mapping[str, int]) -> int:
    """Requests of a simulation in the search of which, but for the ramp, so many are left."""
    return math.ceil(max(wanted.values()) * _WITH_RAMP / 500) * 500


def requests_to_tell(slo: Slo) -> int:
    """Requests from which on a share of them beyond an objective's limit can be told: so many that ``MIN_BEYOND`` of
    them may be beyond it.  Gaps between tokens, of which there are many to a request, and means ask for none.
    """
    if slo.metric == "itl" or (slo.unit == "ms" and slo.percent is None and slo.statistic != "median"):
        return 0
    room = room_percent(slo)
    return math.ceil(100 * MIN_BEYOND / room - 1e-9) if 0 < room < 100 else 0


def _warnings(told: Mapping[str, Any], question: Question, found: Found, chosen: Tried) -> Iterator[str]:
    best = told["recommended"]
    if not chosen.calibrated:
        yield (
            f"Step times are uncalibrated ({best['cost_model']}): rankings are worth more than absolute numbers; "
            "measure the deployment before it is bought."
        )
    if best["refused_share"]:
        yield (
            f"{percent(best['refused_share'])} of the requests are refused, however many replicas there are: their "
            f"prompts fill max_model_len. Raise it to serve them; they count as having missed every latency."
        )
    yield from _of_chance(best, question, chosen)
    if best["fleet"].get("outside"):
        yield str(best["fleet"]["outside"])
    close = [row for row in best["objectives_over_replications"] if (row["strain"] or 0) > 1 - SMALL_MARGIN]
    if close:
        listed = " and ".join(f"{row['text']} (at {100 * row['strain']:.0f} % of its limit)" for row in close)
        yield f"Little room: {listed}. A replica more gives some."
    slower = best["slower"]
    if slower is not None and not slower["holds"]:
        yield (
            f"If steps take {slower['percent']:.0f} % longer, which is within what the profile states of its error for "
            f"nine steps of ten, it takes "
            + (
                "more replicas than were tried."
                if slower["num_replicas"] is None
                else f"about {_with_spare(slower['num_replicas'], told['spare_replicas'])} replicas."
            )
        )
    stay_s = _long_stay_s(best)
    if _is_too_short(best, found):
        yield (
            f"The workload lasts {digits(found.demand.span_s, 2)} s, too short for a steady state: a request stays up "
            f"to {digits(stay_s, 2)} s (p99), so the fleet was filling up for much of that time, and a longer run may "
            f"ask for more. Give one of {digits(max(MIN_STAYS * stay_s, 2 * found.demand.span_s), 2)} s or more."
        )
    if question.replications < 2:
        yield "One replication: there is no interval. Give --replications 3 or more."
