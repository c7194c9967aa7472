"""The runs of a sweep, done by whoever is there, each kept as soon as it is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.rundir import OutputError
from windtunnel.sweeping.plan import PlannedPoint
from windtunnel.sweeping.starting import never_start
from windtunnel.trials.trial import trial_of
from windtunnel.workers import Done, Job, Store, Workers

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded

Tell = Callable[[Done], None]
RESULTS_FOLDER = "results"
"""Of a sweep's folder: what is kept of its runs."""
WRITTEN = (
    *("report.html", "report.md", "runs.csv", "runs.parquet"),
    *("points.csv", "sweep.json", "influences.csv", "sensitivity.json"),
)
"""Files that a sweep or a sensitivity analysis leaves in its folder."""


@dataclass(frozen=True, slots=True)
class How:
    """By whom runs are done, where they are kept, and who is told."""

    workers: Workers
    store: Store | None = None
    tell: Tell | None = None


@contextmanager
def prepared(
    jobs: int | None,
    *,
    ray: str | None = None,
    folder: Path | None = None,
    resume: bool = False,
    tell: Tell | None = None,
) -> Iterator[How]:
    """Workers and, in a folder, the place that keeps their results.

    Raises OutputError for a folder that holds a sweep already unless ``resume`` is set, or anything else; StoreInUse
    if another process works in it.
    """
    if folder is not None:
        check_folder(folder, resume=resume)
    with ExitStack() as open_things:
        store = None if folder is None else open_things.enter_context(Store(folder / RESULTS_FOLDER))
        yield How(open_things.enter_context(Workers(jobs, ray=ray)), store, tell)


def check_folder(folder: Path, *, resume: bool, what: str = "a sweep", it: str = "it") -> None:
    """Raises OutputError unless it is new, empty, or holds a sweep (or ``what`` else) that is to be resumed."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file: name a folder to write into")
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if RESULTS_FOLDER in found:
        if not resume:
            raise OutputError(f"{folder} holds {what} already: add --resume to go on with {it}, or name another folder")
    elif found:
        none = what.removeprefix("a ")
        raise OutputError(f"{folder} is not empty ({found[0]}) and holds no {none}: name another folder")


def check_is_no_part(folder: Path, path: Path, written: Sequence[str] = WRITTEN) -> None:
    """Raises OutputError if another output has the place of what is ``written`` into the folder."""
    inside = path.resolve().relative_to(folder.resolve()) if path.resolve().is_relative_to(folder.resolve()) else None
    if inside is not None and (inside.parts[:1] == (RESULTS_FOLDER,) or str(inside) in written):
        raise OutputError(f"cannot write {path}: -o {folder} writes its own there; name another file")


def run_points(points: Sequence[PlannedPoint], seeds: Sequence[int], how: How) -> list[list[dict[str, Any]]]:
    """For each point what its runs came to, by seed; the seeds are the same everywhere (common random numbers).

    Points that vLLM would not start have the reason under ``infeasible``, found out once for all seeds.  Raises as
    ``resolve`` for all else that is wrong, WorkerDied if processes die again and again; what is finished by then is
    kept.
    """
    first_jobs = [trial_of(_with_seed(point.loaded, seeds[0])) for point in points]
    stopped = [False] * len(points)
    if len(seeds) > 1:
        stopped = never_start([point.loaded for point in points], first_jobs, how.workers, how.store)
    jobs = []
    for point, first, is_stopped in zip(points, first_jobs, stopped, strict=True):
        jobs += [first, *(trial_of(_with_seed(point.loaded, seed)) for seed in ([] if is_stopped else seeds[1:]))]
    results = how.workers.map(jobs, store=how.store, tell=how.tell)
    return [
        list(_of_all_seeds(next(results), job, seeds, how.tell)) if is_stopped else list(islice(results, len(seeds)))
        for job, is_stopped in zip(first_jobs, stopped, strict=True)
    ]


def _of_all_seeds(first: dict[str, Any], job: Job, seeds: Sequence[int], tell: Tell | None) -> Iterator[dict[str, Any]]:
    """The runs of a point that does not start, of which one was tried."""
    yield first
    for place, seed in enumerate(seeds[1:], 1):
        if tell is not None:
            tell(Done(place, job, first, was_cached=False, elapsed_s=0.0))
        yield {**first, "seed": seed}


def _with_seed(loaded: Loaded, seed: int) -> Loaded:
    return replace(loaded, scenario=loaded.scenario.model_copy(update={"seed": seed}))
