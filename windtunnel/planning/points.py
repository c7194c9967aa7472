"""What the figures of a plan show, as plain data: who beats whom, and what money buys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from windtunnel.planning.candidates import Shape
from windtunnel.planning.measure import strain
from windtunnel.planning.question import Question, objectives_of
from windtunnel.planning.search import Found, Tried
from windtunnel.sim.metrics.slo import Slo


def _latency_key(question: Question) -> tuple[int, str]:
    """The objective that the latency axis of figures shows: the first on a latency."""
    slo, _ = objectives_of(question)
    for number, objective in enumerate(slo):
        if objective.unit == "ms":
            return number, objective.text
    return 0, slo[0].text


def curves(found: Found, question: Question) -> list[dict[str, Any]]:
    """For the best candidate of each shape: how much of the objectives so many replicas use, against what they cost."""
    slo, _ = objectives_of(question)
    best: dict[Shape, Tried] = {}
    for each in found.ranked:
        best.setdefault(each.shape, each)
    lines = []
    for each in best.values():
        tries = {
            one["num_replicas"]: max(rates)
            for estimate in each.estimates[:1]
            for one in estimate["tries"]
            if (rates := _strains(slo, one["objectives"]))
        }
        lines.append(
            {
                "label": each.candidate.label,
                "shape": each.shape.label,
                "calibrated": each.calibrated,
                "evidence": each.evidence,
                "num_replicas": sorted(tries),
                "cost_per_hour": [size * each.unit_cost for size in sorted(tries)],
                "strain": [tries[size] for size in sorted(tries)],
            }
        )
    return lines


def _strains(slo: Sequence[Slo], values: Sequence[float | None]) -> list[float]:
    told = (
        {"measured": value, "limit": each.limit, "operator": each.operator, "unit": each.unit}
        for each, value in zip(slo, values, strict=True)
    )
    return [rate for one in told if (rate := strain(one)) is not None]


def pareto(found: Found, question: Question, spare: int) -> dict[str, Any]:
    """Whole fleets that were simulated: cost with the spare replicas, latency, and the load that they carry; which of
    those that hold is not dominated.
    """
    number, text = _latency_key(question)
    points = list(_points(found, number, spare))
    for point in points:
        point["on_front"] = point["holds"] and not any(other["holds"] and _dominates(other, point) for other in points)
    slo, _ = objectives_of(question)
    return {"objective": text, "limit": slo[number].limit, "unit": slo[number].unit, "points": points}


def _points(found: Found, number: int, spare: int) -> Iterator[dict[str, Any]]:
    for each in found.finalists:
        needed = each.num_replicas
        for (size, replication), result in sorted(each.fleets.items()):
            value = result["objectives"][number]["measured"]
            if replication or value is None or needed is None:
                continue
            yield {
                "label": each.candidate.label,
                "shape": each.shape.label,
                "calibrated": each.calibrated,
                "evidence": each.evidence,
                "num_replicas": size,
                "cost_per_hour": each.whole_cost(size, spare),
                "latency": value,
                "rate": found.demand.mean_rate * size / needed.mean,
                "holds": result["holds"],
            }


def _dominates(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether a is at least as good in all three and better in one."""
    ours, others = ((each["cost_per_hour"], each["latency"], -each["rate"]) for each in (a, b))
    return ours != others and all(one <= other for one, other in zip(ours, others, strict=True))
