"""What a simulation says of a deployment: which objectives it kept, how full it was, and what it ran into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from windtunnel.capacity.binding import binding_of, time_shares
from windtunnel.capacity.evaluate import NEVER_MS, counted_values
from windtunnel.planning.question import Question, objectives_of
from windtunnel.sim.cost.fitted import extrapolated, extrapolation_warning
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.fleet.faults import Crash
from windtunnel.sim.fleet.fleet import Fleet, Pool
from windtunnel.sim.fleet.records import Fate
from windtunnel.sim.fleet.routers import Routing
from windtunnel.sim.metrics.slo import SloResult
from windtunnel.sim.metrics.summary import Summary, percent_word, summarize
from windtunnel.sim.records import Outcome, Records
from windtunnel.sim.simulate import serve
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload

_LATENCIES = ("ttft", "tpot", "itl", "e2el")


def measured(
    question: Question,
    workload: Workload,
    served: System | Fleet,
    *,
    num_replicas: float | None = None,
    ramp: bool = True,
) -> dict[str, Any]:
    """Serve the workload; the statistics that a plan looks at, as plain data.

    ``num_replicas`` is how many replicas there are of which one was simulated: rates and counts are those of all.
    Where requests come at one rate all along, latencies and goodput that objectives are about leave the ramp out, as
    ``capacity`` does; ``ramp`` False has them over all.  What never had its answer is later than any limit, and a run
    that is overloaded holds nothing, whatever was measured.
    """
    records = serve(workload, served)
    system = served if isinstance(served, System) else served.pools[0].system
    due = workload.arrival_ns[workload.previous < 0]
    shares = time_shares(records, system, int(due.min()), max(int(due.max()), int(due.min()) + 1))
    slo, goodput = objectives_of(question)
    summary = summarize(records, workload, slo=slo, goodput=goodput, percentiles=question.percentiles)
    factor = 1.0 if num_replicas is None else num_replicas
    is_cut = ramp and question.is_steady
    counted = counted_values(records, workload, slo, goodput, ramp=is_cut) if is_cut or summary.failed else None
    objectives = [_objective(result, factor) for result in _over_counted(summary.slo, counted)]
    return {
        "num_requests": len(workload),
        "num_counted": len(workload) if counted is None else counted[1],
        "holds": all(objective["passed"] for objective in objectives) and not summary.stability.is_hopeless,
        "overloaded": summary.stability.is_hopeless,
        "objectives": objectives,
        "worst": _worst(objectives),
        "latency_ms": {name: _latency(summary, name) for name in _LATENCIES},
        "request_throughput": _scaled(summary.request_throughput, factor),
        "output_throughput": _scaled(summary.output_throughput, factor),
        "total_token_throughput": _scaled(summary.total_token_throughput, factor),
        "busy_share": summary.load.busy_share,
        "kv_usage_mean": summary.kv.usage_mean_busy,
        "kv_usage_peak": summary.kv.usage_peak,
        "num_preemptions": summary.preemption.num_preemptions,
        "num_running_mean": summary.load.num_running_mean,
        "num_running_peak": summary.load.num_running_peak,
        "num_waiting_peak": summary.load.num_waiting_peak,
        "num_step_tokens_peak": _num_step_tokens_peak(records),
        "prefill_share": prefill_share(records),
        "binding": binding_of(shares).name,
        "time_shares": shares,
        "worst_minute_ms": {metric: rolling_worst(records, 60.0, metric) for metric in ("ttft", "e2el")},
        "verdict": summary.stability.verdict.value,
        "failed": summary.failed,
        "served_shares": served_shares(records, workload),
        "num_begun_anew": num_begun_anew(records),
        "outside": extrapolation_warning(system.cost, (replica.steps for replica in records.replicas)),
        "outside_share": extrapolated(system.cost, (replica.steps for replica in records.replicas)).time_share,
    }


def _over_counted(
    results: Sequence[SloResult], counted: tuple[Sequence[float | None], int] | None
) -> Sequence[SloResult]:
    """The same with the values over the requests that are counted, failed ones among them, where there are any.

    What is missed for another reason than its value stays missed.
    """
    if counted is None:
        return results
    return [
        result
        if value is None or result.measured is None
        else replace(
            result,
            measured=None if value >= NEVER_MS / _FAR else value,
            passed=result.slo.holds(value) and (result.passed or not result.slo.holds(result.measured)),
        )
        for result, value in zip(results, counted[0], strict=True)
    ]


_FAR = 1e4
"""A latency that is so many times below ``NEVER_MS`` may still be a mean, or lie between it and a real one."""


def served_shares(records: Records, workload: Workload) -> dict[str, float]:
    """Shares of the prompt tokens and of the output tokens asked for that were served: those of answers that came."""
    table = records.requests
    done = table.outcome == Outcome.FINISHED
    asked_in, asked_out = int(workload.num_prompt_tokens.sum()), int(workload.num_output_tokens.sum())
    served_in, served_out = int(workload.num_prompt_tokens[done].sum()), int(table.num_output_tokens[done].sum())
    return {"input": served_in / max(asked_in, 1), "output": served_out / max(asked_out, 1)}


def prefill_share(records: Records) -> float | None:
    """Share of the time of all steps that their prompt chunks added; None where nothing ran or nobody priced that."""
    total, decodes = 0, 0
    for steps in (replica.steps for replica in records.replicas):
        known = steps.decode_only_ns >= 0
        total += int((steps.end_ns - steps.start_ns)[known].sum())
        decodes += int(steps.decode_only_ns[known].sum())
    return 1 - decodes / total if total else None


def _num_step_tokens_peak(records: Records) -> int:
    """Most tokens that one step computed, drafts included."""
    tables = [replica.steps for replica in records.replicas if len(replica.steps)]
    return max(
        (int((each.prefill_tokens + each.num_decode_seqs + each.num_draft_tokens).max()) for each in tables), default=0
    )


def _objective(result: SloResult, factor: float) -> dict[str, Any]:
    slo, value, passed = result.slo, result.measured, result.passed
    if value is not None and slo.unit in ("/s", "") and slo.metric != "max_preemptions_per_request":
        value *= factor
        passed = slo.holds(value) and (result.passed or not slo.holds(result.measured or 0.0))
    return {
        "text": slo.text,
        "metric": slo.metric,
        "statistic": slo.statistic,
        "operator": slo.operator,
        "limit": slo.limit,
        "unit": slo.unit,
        "measured": value,
        "passed": passed,
        "note": result.note,
    }


def strain(objective: dict[str, Any]) -> float | None:
    """How much of what an objective allows was used: 1 is the limit, 0.8 leaves a fifth; None where that says nothing.

    Of a floor (goodput>=99%) it is what was missed over what may be missed, where it is a share, else limit over value.
    """
    if objective["measured"] is None:
        return None
    value, limit = float(objective["measured"]), float(objective["limit"])
    if objective["operator"] in ("<", "<="):
        return value / limit if limit > 0 else None
    if objective["operator"] in (">", ">="):
        if objective["unit"] == "%" and limit < 100:
            return (100 - value) / (100 - limit)
        return limit / value if value > 0 else None
    return None


def _worst(objectives: Sequence[dict[str, Any]]) -> str | None:
    """The objective that is missed by most, or kept by least."""
    rated = [(strain(each), each) for each in objectives]
    missed = [(rate if rate is not None else math.inf, each["text"]) for rate, each in rated if not each["passed"]]
    if missed:
        return str(max(missed)[1])
    kept = [(rate, each["text"]) for rate, each in rated if rate is not None]
    return str(max(kept)[1]) if kept else None


def _latency(summary: Summary, name: str) -> dict[str, float | None]:
    stats = getattr(summary, name)
    values = {f"p{percent_word(percent)}": value for percent, value in stats.percentiles_ms}
    return {"mean": stats.mean_ms, **values}


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def rolling_worst(
    records: Records, window_s: float, metric: str = "ttft", percent: float = 99.0, min_requests: int = 20
) -> float | None:
    """The highest percentile of a latency (ttft or e2el) in ms among the requests sent in any one window of that
    length; None where no window has so many requests.
    """
    table = records.requests
    done = table.finish_ns >= 0
    sent = table.arrival_ns[done]
    ends = table.first_token_ns[done] if metric == "ttft" else table.finish_ns[done]
    waited_ms = (ends - sent) / 1e6
    worst: float | None = None
    numbers = (sent - sent.min()) // round(window_s * 1e9) if len(sent) else sent
    for number in np.unique(numbers):
        inside = waited_ms[numbers == number]
        if len(inside) >= min_requests:
            value = float(np.percentile(inside, percent))
            worst = value if worst is None else max(worst, value)
    return worst


class SlowerCost:
    """The same cost model with every step so many times as long: what an error of the profile would mean."""

    def __init__(self, cost: CostModel, factor: float) -> None:
        self._cost, self._factor = cost, factor
        self.name, self.calibrated = cost.name, cost.calibrated

    def step_time_s(self, shape: StepShape) -> Any:
        """Seconds of a step."""
        return self._factor * self._cost.step_time_s(shape)

    def describe(self) -> dict[str, Any]:
        """What the cost model says of itself, and the factor."""
        return {**self._cost.describe(), "slower_by": self._factor}


def slowed_system(system: System, factor: float) -> System:
    """The same with every step so many times as long; noise is left out."""
    return system if factor == 1 else replace(system, cost=SlowerCost(system.cost, factor), noise_seed=None)


def slowed(served: System | Fleet, factor: float) -> System | Fleet:
    """The same of a fleet."""
    if isinstance(served, System):
        return slowed_system(served, factor)
    pools = tuple(replace(pool, system=slowed_system(pool.system, factor)) for pool in served.pools)
    return replace(served, pools=pools)


def crashing(served: System | Fleet, at_ns: int) -> Fleet:
    """A fleet whose first replica goes away at that time and does not come back."""
    if isinstance(served, System):
        served = Fleet((Pool("all", served),), Routing(router=served.router))
    return replace(served, faults=(*served.faults, Crash(served.pools[0].name, 0, at_ns)))


def num_begun_anew(records: Records) -> int:
    """Requests that lost their replica before their answer was complete."""
    return 0 if records.fleet is None else int((records.fleet.stays.fate == Fate.LOST).sum())
