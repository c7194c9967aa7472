"""What is run live: on which servers, which workloads, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.live import loads, model
from benchmarks.live.model import ModelSize
from benchmarks.live.pace import Pace
from benchmarks.live.server import ServerSetup
from windtunnel.sim.cost.constant import AffineCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.simulate import run as simulate
from windtunnel.sim.workload import Workload

ROOMY = ServerSetup("roomy pool", num_gpu_blocks=2000)
SMALL = ServerSetup("small pool", num_gpu_blocks=129)
CACHING = ServerSetup("prefix caching", num_gpu_blocks=200, enable_prefix_caching=True)
START_S = 40.0
"""Of a server, for the estimate of what is left."""


class Job(NamedTuple):
    """One live run, and whether it is learned from or predicted."""

    name: str
    load: Workload
    is_learned: bool
    repeat: int = 0

    @property
    def folder(self) -> str:
        return self.name.replace(" ", "_") + (f"-{self.repeat}" if self.repeat else "")


class Stage(NamedTuple):
    """The runs of one server."""

    setup: ServerSetup
    jobs: tuple[Job, ...]


class Study(NamedTuple):
    """Servers with one kind of worker."""

    name: str
    title: str
    size: ModelSize
    pace: Pace | None
    stages: tuple[Stage, ...]
    rough_cost: AffineCost
    """For the estimate of what is left; the prediction knows nothing of it."""

    def only(self, names: list[str]) -> Study:
        """Without the predicted workloads that are not named; servers that then have nothing to predict are dropped."""
        stages = [
            stage._replace(jobs=tuple(job for job in stage.jobs if job.is_learned or job.name in names))
            for stage in self.stages
        ]
        kept = [stage for stage in stages if stage.setup == ROOMY or any(not job.is_learned for job in stage.jobs)]
        return self._replace(stages=tuple(kept))

    def expected_s(self, stage: Stage, job: Job) -> float:
        """About how long the job takes."""
        records = simulate(job.load, scheduler_config(stage.setup), self.rough_cost)
        return float(records.replicas[0].steps.end_ns[-1]) / 1e9


PREDICTED = ("moderate", "overload", "preemptions", "prefix caching")


def paced(*, quick: bool) -> Study:
    """Steps of 30 ms + 0.25 ms a token + 0.3 ms a request + 0.6 ms for 1,000 tokens of context."""
    few = 1 if quick else 2.5
    n = {"sequential": 10, "closed": 20, "burst": 60, "poisson": 60, "long": 24, "prefix": 40}
    n = {name: round(few * count) for name, count in n.items()}
    learned = _learned(n["sequential"], n["closed"], n["burst"])
    predicted = (
        Job("moderate", loads.poisson("moderate", n["poisson"], 2.1), False),
        Job("overload", loads.poisson("overload", n["poisson"], 8.0), False),
    )
    stages = (
        Stage(ROOMY, (*learned, *predicted)),
        Stage(SMALL, (Job("preemptions", loads.long_answers(n["long"]), False),)),
        Stage(CACHING, (Job("prefix caching", loads.shared_prefixes(n["prefix"], 3.0), False),)),
    )
    pace = Pace(base_ms=30.0, token_ms=0.25, seq_ms=0.3, context_ms=0.0006)
    rough = AffineCost(0.031, 0.00025, 0.0003, 0.6e-6)
    return Study("paced", "paced worker", model.PACED, pace, stages, rough)


def bare(*, quick: bool, num_repeats: int = 3) -> Study:
    """The CPU executor as it is; every predicted workload several times.

    What a core computes in a second changes by tens of percent over minutes, with what else the machine does: before
    and after each predicted run a small burst shows its speed.
    """
    few = 1 if quick else 2
    learned = _learned(6 * few, 12 * few, 25 * few)
    n = 25 * few

    def repeated(name: str, load: Workload) -> tuple[Job, ...]:
        return tuple(Job(name, load, False, repeat) for repeat in range(1, num_repeats + 1))

    moderate = repeated("moderate", loads.poisson("moderate", n, 1.2))
    overload = repeated("overload", loads.poisson("overload", n, 4.0))
    in_turn = [job for both in zip(moderate, overload, strict=True) for job in both]
    stages = (
        Stage(ROOMY, (*learned, *_with_speeds(in_turn, before=False))),
        Stage(SMALL, _with_speeds(repeated("preemptions", loads.long_answers(24)))),
        Stage(CACHING, _with_speeds(repeated("prefix caching", loads.shared_prefixes(n, 1.5)))),
    )
    return Study("bare", "bare CPU executor", model.BARE, None, stages, AffineCost(0.04, 0.0008, 0.001, 1e-6))


def _with_speeds(jobs: Sequence[Job], *, before: bool = True) -> tuple[Job, ...]:
    """The jobs with a short run that is learned from behind each, and one before the first of them."""
    load = loads.burst(24)  # batches of all sizes from 24 down to 1
    runs = [Job("speed", load, True)] if before else []
    for number, job in enumerate(jobs, 1):
        runs += [job, Job("speed", load, True, number)]
    return tuple(runs)


def scheduler_config(setup: ServerSetup) -> SchedulerConfig:
    """The limits of a server, as ours takes them."""
    return SchedulerConfig(
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        max_model_len=setup.max_model_len,
        block_size=setup.block_size,
        num_gpu_blocks=setup.num_gpu_blocks,
        enable_prefix_caching=setup.enable_prefix_caching,
    )


def _learned(num_sequential: int, num_closed: int, num_burst: int) -> tuple[Job, ...]:
    return (
        Job("sequential", loads.sequential(num_sequential), True),
        Job("closed loop", loads.closed_loop(num_closed), True),
        Job("burst", loads.burst(num_burst), True),
    )
