"""What is said of the recommended deployment beyond that it holds: room, failures, the profile's error, growth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from windtunnel.planning import jobs
from windtunnel.planning.load import Growth
from windtunnel.planning.question import Question, deployment_of
from windtunnel.planning.search import NUM_FLEET_REPLICATIONS, Tried, smallest_that_holds
from windtunnel.sim.cost.statement import CostStatement, statement_of
from windtunnel.sim.metrics.replications import Interval, mean_interval
from windtunnel.workers import Workers


@dataclass(slots=True)
class Analysis:
    """The recommended deployment under other circumstances than those it was chosen for."""

    num_replicas: int
    headroom: Interval
    """How many times today's load the fleet carries."""
    one_down: list[dict[str, Any]]
    """The fleet with one replica less, one result a replication; empty where there is only one."""
    crash: dict[str, Any] | None
    """The fleet of which one replica goes away in the busiest minute; None where there is only one."""
    slower_by: float | None
    """How much longer steps were made, by what the profile states of its error; None where it states none."""
    slower_fleet: dict[str, Any] | None
    """The fleet with such steps."""
    slower_replicas: float | None
    """Replicas, not rounded, that it takes then; None where no number does, or nothing was stated."""
    statement: CostStatement | None = None
    limit_rate: float | None = None
    """Requests per second that a replica does at most, whatever the latency; None if that could not be told."""
    num_simulations: int = 0
    num_requests: int = 0
    growth: list[dict[str, Any]] = field(default_factory=list)


def analyse(question: Question, chosen: Tried, workers: Workers) -> Analysis:
    """Simulate the chosen fleet with more load, with a replica less and with slower steps."""
    size = smallest_that_holds(chosen)
    assert size is not None, "only a fleet that holds is recommended"
    statement = statement_of(deployment_of(question, chosen.candidate).cost.describe())
    percent = None if statement is None else statement.p90_percent
    replications = range(min(NUM_FLEET_REPLICATIONS, question.replications))
    made = [jobs.limit_job(question, chosen.candidate)]
    made += [jobs.headroom_job(question, chosen.candidate, size, each) for each in replications]
    missing = [each for each in replications if size > 1 and (size - 1, each) not in chosen.fleets]
    made += [jobs.fleet_job(question, chosen.candidate, size - 1, each) for each in missing]
    if size > 1:
        made.append(jobs.fleet_job(question, chosen.candidate, size, 0, crashes=True))
    slower = None if percent is None else 1 + percent / 100
    if slower is not None:
        needed = chosen.num_replicas
        assert needed is not None, "only a candidate with a number of replicas is recommended"
        made.append(jobs.fleet_job(question, chosen.candidate, size, 0, slower=slower))
        made.append(
            jobs.needed_job(
                question, chosen.candidate, 0, least=0.5 * needed.mean, guess=needed.mean * slower, slower=slower
            )
        )
    limit, *results = list(workers.map(made))
    rooms, rest = results[: len(replications)], results[len(replications) :]
    for replication, result in zip(missing, rest, strict=False):
        chosen.fleets[size - 1, replication] = result
    rest = rest[len(missing) :]
    crash = rest.pop(0) if size > 1 else None
    slow = rest
    return Analysis(
        num_replicas=size,
        headroom=mean_interval([each["factor"] for each in rooms]),
        one_down=[chosen.fleets[size - 1, each] for each in replications] if size > 1 else [],
        crash=crash,
        slower_by=percent,
        slower_fleet=slow[0] if slow else None,
        slower_replicas=slow[1]["num_replicas"] if slow else None,
        statement=statement,
        limit_rate=limit["request_throughput"],
        num_simulations=sum(each.get("num_simulations", 1) for each in results),
        num_requests=sum(each.get("num_requests", 0) for each in results),
    )


def growth_of(
    growth: Growth, finalists: Sequence[Tried], chosen: Tried, analysis: Analysis, spare: int
) -> list[dict[str, Any]]:
    """Month by month: the load, how many replicas of the chosen deployment it takes, and which finalist is cheapest.

    Replicas grow with the load in proportion: the chosen fleet carries ``headroom`` times today's, others what their
    share of the requests says.
    """
    fraction = analysis.num_replicas / max(analysis.headroom.mean, 1e-9)
    rows = []
    for month in range(growth.num_months + 1):
        factor = growth.factor(month)
        size = analysis.num_replicas if month == 0 else whole(fraction * factor)
        costs = [
            (each.whole_cost(_size_at(each, factor), spare), each)
            for each in finalists
            if each is not chosen and each.calibrated is chosen.calibrated
        ]
        cheapest = min(costs, key=lambda pair: pair[0], default=None)
        own = chosen.whole_cost(size, spare)
        rows.append(
            {
                "month": month,
                "load": factor,
                "num_replicas": size + spare,
                "num_gpus": (size + spare) * chosen.shape.num_gpus,
                "cost": own,
                "cheapest": None if cheapest is None or cheapest[0] >= own else cheapest[1].candidate.label,
            }
        )
    return rows


def months_until_full(growth: Growth, analysis: Analysis) -> int | None:
    """Months for which today's fleet suffices; None where it suffices to the end."""
    for month in range(growth.num_months + 1):
        if growth.factor(month) > analysis.headroom.mean:
            return max(month - 1, 0)
    return None


def _size_at(each: Tried, factor: float) -> int:
    needed, held = each.num_replicas, smallest_that_holds(each)
    assert needed is not None, "finalists have a number of replicas"
    size = whole(needed.mean * factor)
    return size if held is None or factor < 1 else max(size, held)


def whole(num_replicas: float) -> int:
    """Replicas that can be bought."""
    return max(1, math.ceil(num_replicas - 1e-9))
