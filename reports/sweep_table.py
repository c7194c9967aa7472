"""The tables of a sweep: one row a point for people, one row a run for programs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from windtunnel.reports.files import atomic_writer
from windtunnel.reports.sweep_data import Swept, SweptPoint, fall, say_short
from windtunnel.reports.words import percent
from windtunnel.sim.metrics.replications import Interval

MARKS = {"best": "best", "baseline": "baseline", "knee": "knee"}


class Row(NamedTuple):
    """One point: its settings, numbers with noise, changes from the baseline, and what is to be said of it."""

    point: SweptPoint
    settings: tuple[str, ...]
    numbers: tuple[str, ...]
    """By the shown metrics: mean and half of the interval."""
    changes: tuple[str, ...]
    """Paired differences to the baseline; empty without one, and for what does not differ beyond noise."""
    held: str
    """In how many replications the objectives were kept."""
    verdict: str
    marks: tuple[str, ...]
    """Of MARKS."""


def rows(swept: Swept) -> list[Row]:
    """The points, in their order."""
    keys = swept.shown()
    kneed = {id(knee.point) for knee in swept.knees}
    best = swept.best.point if swept.best else None
    found = []
    for point in swept.points:
        marks = [("best", point is best), ("baseline", point is swept.baseline), ("knee", id(point) in kneed)]
        found.append(
            Row(
                point,
                tuple(point.words.values()),
                tuple(_number(key, point.interval(key)) for key in keys),
                tuple(_change(swept, point, key) for key in keys),
                _held(swept, point),
                ", ".join(point.marked),
                tuple(name for name, is_so in marks if is_so),
            )
        )
    return found


def _number(key: str, interval: Interval | None) -> str:
    if interval is None:
        return "–"
    half = interval.half_width
    told = say_short(key, interval.mean)
    if not isfinite(half) or half == 0 or len(say_short(key, half)) > 12:
        return told
    return f"{told} ±{say_short(key, half)}"


def _change(swept: Swept, point: SweptPoint, key: str) -> str:
    """``+12 %``: the paired difference as a share of the baseline, if it is one beyond noise; else ``≈``."""
    if swept.baseline is None or point is swept.baseline or point.infeasible:
        return ""
    change, base = swept.difference(point, key), swept.baseline.mean(key)
    if change is None or base is None:
        return ""
    if change.mean == 0 or (isfinite(change.half_width) and not change.excludes(0)):
        return "≈"
    if base == 0:
        return f"{'+' if change.mean > 0 else '−'}{say_short(key, abs(change.mean))}"
    share = change.mean / abs(base)
    if abs(share) < 0.0005:
        return "≈"
    if share >= 9.995:
        return f"×{share + 1:,.0f}"
    return f"+{percent(share)}" if share > 0 else f"−{fall(-share)}"


def _held(swept: Swept, point: SweptPoint) -> str:
    if not swept.objectives:
        return ""
    return "–" if point.infeasible else f"{point.num_held} of {len(point.runs)}"


def heads(swept: Swept) -> list[str]:
    """Names of the shown metrics with their units."""
    return [swept.label(key) for key in swept.shown()]


# --- for programs


def run_rows(points: Sequence[SweptPoint], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One row a run: the point, its settings, the replication and all that the run came to."""
    columns = dict.fromkeys(key for point in points for run in point.runs for key in run)
    for point in points:
        for replication, (seed, run) in enumerate(zip(seeds, point.runs, strict=True), 1):
            own = {"point": point.number, **point.settings, "replication": replication, "seed": seed}
            yield {**own, **{key: run.get(key) for key in columns if key not in own}}


def point_rows(swept: Swept) -> Iterator[dict[str, Any]]:
    """One row a point: its settings, and of each shown metric mean, interval and paired difference to the baseline."""
    best = swept.best.point if swept.best else None
    for point in swept.points:
        row: dict[str, Any] = {"point": point.number, **point.settings, "replications": len(point.runs)}
        row |= {"verdict": ", ".join(point.verdicts), "infeasible": point.infeasible or None}
        row |= {"memory_verdict": next((run.get("memory_verdict") for run in point.runs), None)}
        row |= {"num_held": point.num_held if swept.objectives else None}
        row |= {"is_best": point is best, "is_baseline": point is swept.baseline}
        row |= {"knee_of": ", ".join(knee.key for knee in swept.knees if knee.point is point) or None}
        for key in swept.shown():
            row |= _columns(key, point.interval(key)) | _columns(f"{key}_change", swept.difference(point, key))
        yield row


def _columns(name: str, interval: Interval | None) -> dict[str, float | None]:
    if interval is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    is_known = isfinite(interval.half_width)
    bounds = (interval.low, interval.high) if is_known else (None, None)
    return {name: interval.mean, f"{name}_low": bounds[0], f"{name}_high": bounds[1]}


def write_table(path: str | Path, found: Sequence[dict[str, Any]]) -> None:
    """Write rows that all have the same keys, as Parquet or (any other name) as CSV.

    Raises OSError if the file cannot be written.
    """
    names = list(found[0]) if found else []
    columns = {name: _column([row[name] for row in found]) for name in names}
    if Path(path).suffix.lower() in (".parquet", ".pq"):
        import pyarrow as pa
        import pyarrow.parquet

        with _whole(Path(path)) as scratch:
            pyarrow.parquet.write_table(pa.table(columns), scratch, compression="zstd")
        return
    import csv

    with atomic_writer(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(zip(*columns.values(), strict=True))


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A name beside a file, which takes the file's place once it is complete."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _column(values: list[Any]) -> list[Any]:
    """Values of one type: numbers, true and false, or text."""
    known = [value for value in values if value is not None]
    if all(isinstance(value, bool) for value in known):
        return values
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        is_whole = all(isinstance(value, int) for value in known)
        return values if is_whole else [None if value is None else float(value) for value in values]
    return [None if value is None else str(value) for value in values]
