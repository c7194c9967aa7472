"""What is said of the recommended deployment beyond that it holds: room, failures, the profile's error, growth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from windtunnel.planning import jobs
from windtunnel.planning.load import Growth
from windtunnel.planning.progress import NUM_STAGES, Stage
from windtunnel.planning.question import Question, deployment_of
from windtunnel.planning.search import NUM_FLEET_REPLICATIONS, Tried, smallest_that_holds, whole
from windtunnel.sim.cost.statement import CostStatement, statement_of
from windtunnel.sim.metrics.replications import Interval, mean_interval
from windtunnel.workers import Workers


@dataclass(slots=True)
class Analysis:
    """The recommended deployment under other circumstances than those it was chosen for."""

    num_replicas: int
    headroom: Interval
    """How many times today's load the fleet carries: until an objective is missed, or until it is ``MAX_RHO`` of what
    the fleet can do at most."""
    is_full_first: bool
    """Whether it is the second."""
    one_down: list[dict[str, Any]]
    """What is bought less one replica, one result a replication; empty where there is only one."""
    crash: dict[str, Any] | None
    """What is bought, of which one replica goes away in the busiest minute; None where there is only one."""
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


def analyse(question: Question, chosen: Tried, workers: Workers, *, spare: int, stage: Stage) -> Analysis:
    """Simulate the chosen fleet with more load, with a replica less and with slower steps.

    Failures are those of all that is bought, the ``spare`` replicas included; room and slower steps are of those that
    are needed, so that they hold while the spare ones are down.
    """
    size = smallest_that_holds(chosen)
    assert size is not None, "only a fleet that holds is recommended"
    statement = statement_of(deployment_of(question, chosen.candidate).cost.describe())
    percent = None if statement is None else statement.p90_percent
    replications = range(min(NUM_FLEET_REPLICATIONS, question.replications))
    bought = size + spare
    made = [jobs.limit_job(question, chosen.candidate)]
    needed = chosen.num_replicas
    assert needed is not None, "only a candidate with a number of replicas is recommended"
    guess = max(1.0, size / needed.mean)
    made += [jobs.headroom_job(question, chosen.candidate, size, each, guess=guess) for each in replications]
    others = sorted({other for other in (size - 1, bought - 1) if other > 0})
    missing = [(other, each) for other in others for each in replications if (other, each) not in chosen.fleets]
    made += [jobs.fleet_job(question, chosen.candidate, other, each) for other, each in missing]
    if bought > 1:
        made.append(jobs.fleet_job(question, chosen.candidate, bought, 0, crashes=True))
    slower = None if percent is None else 1 + percent / 100
    if slower is not None:
        made.append(jobs.fleet_job(question, chosen.candidate, size, 0, slower=slower))
        made.append(
            jobs.needed_job(
                question, chosen.candidate, 0, least=0.5 * needed.mean, guess=needed.mean * slower, slower=slower
            )
        )
    stage.begin(NUM_STAGES, "more load, a replica down, slower steps")
    limit, *results = stage.do(made, workers)
    rooms, rest = results[: len(replications)], results[len(replications) :]
    chosen.fleets |= dict(zip(missing, rest, strict=False))
    rest = rest[len(missing) :]
    full = size / chosen.floor if chosen.floor else math.inf
    crash = rest.pop(0) if bought > 1 else None
    slow = rest
    return Analysis(
        num_replicas=size,
        headroom=mean_interval([min(each["factor"], full) for each in rooms]),
        is_full_first=all(each["factor"] >= full for each in rooms),
        one_down=[chosen.fleets[bought - 1, each] for each in replications] if bought > 1 else [],
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

    Replicas grow with the load in proportion: the chosen fleet carries ``headroom`` times today's, and how many another
    one takes stays to that as their shares of the requests say today.  Finalists of the same shape, which differ by
    less than can be told, are not compared.  More load never takes fewer replicas, nor fewer than keep up with it; of
    a month that takes more than can be simulated nothing is told but the load.
    """
    needed = chosen.num_replicas
    assert needed is not None, "only a candidate with a number of replicas is recommended"
    fraction = analysis.num_replicas / max(analysis.headroom.mean, 1e-9)
    others = [each for each in finalists if each.shape != chosen.shape and each.calibrated is chosen.calibrated]
    rows = []
    for month in range(growth.num_months + 1):
        factor = growth.factor(month)
        size = _grown(analysis.num_replicas, max(fraction, chosen.floor) * factor, factor)
        if size + spare > jobs.MOST_REPLICAS:
            rows.append({"month": month, "load": factor, **dict.fromkeys(_SIZE_KEYS)})
            continue
        costs = [(each.whole_cost(_size_at(each, factor, fraction / needed.mean), spare), each) for each in others]
        cheapest = min(costs, key=lambda pair: (pair[0], pair[1].candidate), default=None)
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


_SIZE_KEYS = ("num_replicas", "num_gpus", "cost", "cheapest")


def _grown(today: int, num_replicas: float, factor: float) -> int:
    """Whole replicas at so many times the load: no fewer than today's if it is more, no more if it is less."""
    size = whole(num_replicas)
    return max(size, today) if factor >= 1 else min(size, today)


def months_until_full(growth: Growth, analysis: Analysis) -> int | None:
    """Months for which today's fleet suffices; None where it suffices to the end."""
    for month in range(growth.num_months + 1):
        if growth.factor(month) > analysis.headroom.mean:
            return max(month - 1, 0)
    return None


def _size_at(each: Tried, factor: float, fleet_over_share: float) -> int:
    """Replicas at so many times the load; ``fleet_over_share`` is what a whole fleet takes over what a share says."""
    needed, held = each.num_replicas, smallest_that_holds(each)
    assert needed is not None, "finalists have a number of replicas"
    number = max(needed.mean * fleet_over_share, each.floor) * factor
    return whole(number) if held is None else _grown(held, number, factor)
