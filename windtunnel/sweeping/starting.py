"""Which points of a sweep no seed gets to start, found out once for all of their runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded
    from windtunnel.workers import Job, Store, Workers

_FUNCTION = "windtunnel.sweeping.starting:stops_before_requests"


def never_start(
    points: Sequence[Loaded], first_jobs: Sequence[Job], workers: Workers, store: Store | None
) -> list[bool]:
    """Of each point whether what its first run comes to, be it a reason or an error, is what all others come to.

    ``first_jobs`` are the points' first runs: a point whose store knows that it runs is not looked at.
    """
    doubted = [place for place, job in enumerate(first_jobs) if not _is_known_to_run(job, store)]
    found = dict(zip(doubted, workers.call(_FUNCTION, [points[place] for place in doubted]), strict=True))
    return [found.get(place, False) for place in range(len(points))]


def _is_known_to_run(job: Job, store: Store | None) -> bool:
    return store is not None and (key := job.key) in store and not store.get(key)["infeasible"]


def stops_before_requests(loaded: Loaded) -> bool:
    """Whether the deployment alone, whatever it is to serve, keeps a run from starting: no seed then has a say.

    What is wrong is for a run to say, which looks at the same in the same order before it draws requests.
    """
    from windtunnel.scenarios.engine import make_engine
    from windtunnel.scenarios.fleet import pool_plans
    from windtunnel.scenarios.ledger import Ledger
    from windtunnel.scenarios.resolve import read_hardware
    from windtunnel.sim.deployment.memory import InfeasibleDeployment

    try:
        for kind in [plan.loaded for plan in pool_plans(loaded)] or [loaded]:
            ledger = Ledger(kind)
            make_engine(ledger, read_hardware(ledger))
    except (InfeasibleDeployment, ValueError, OSError):
        return True
    return False
