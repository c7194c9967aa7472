"""Samples of measured steps: how they are kept while they are measured, judged, and written as a table.

While measuring goes on, every visit to a point is a line of ``TABLE.partial.jsonl``, so that nothing is lost that was
measured.  The table is Parquet: one sample a row, the columns of ``COLUMNS``, provenance as JSON in the schema's
metadata under ``windtunnel``, and the compositions of the points under ``windtunnel_points``.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.grid import Composition
from windtunnel.sim.engine.plan import StepShape

if TYPE_CHECKING:
    import pandas as pd

    from windtunnel.calibrate.step_tables import StepTable

PROVENANCE_KEY, POINTS_KEY = b"windtunnel", b"windtunnel_points"
REFERENCE = -1
"""Number of the point that is measured again and again to see how the machine's speed moves."""
FORMAT, VERSION = "windtunnel-measured-steps", 1
OUTLIER_SIGMAS = 5.0
"""Robust standard deviations from the median of its point beyond which a sample is marked."""
_FEWEST_TO_JUDGE = 5
_LEAST_SIGMA = 0.01
"""Scatter that is taken for granted, as a share: samples that agree to a nanosecond do not make the next an outlier."""
_MAD_TO_SIGMA = 1.4826
_CONFIDENCE = 0.95
_NS = 1e-9

COLUMNS = (
    *("point", "kind", "visit", "repeat", "at_s", *StepShape._fields, "step_s", "wall_s", "cpu_s"),
    *("num_padded_tokens", "gpu_mhz", "gpu_throttled", "reference_s", "is_reference", "is_outlier"),
)


class MeasurementError(ValueError):
    """Measuring cannot begin or go on as asked; the message says why and what to do."""


class Sample(NamedTuple):
    """One execution of a step."""

    point: int
    """Its place in the grid; ``REFERENCE`` is none."""
    visit: int
    repeat: int
    """Within the visit."""
    at_s: float
    """When it began, in seconds of measuring time since the first visit."""
    step_ns: int
    """By the clock that was chosen, as the executor itself tells it."""
    wall_ns: int
    cpu_ns: int
    """Of the thread that called the executor."""
    num_padded_tokens: int
    gpu_mhz: float
    """Clock of the GPU when last looked at; NaN without one."""
    gpu_throttled: int


def median_half_width(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the median, as a share of the median; infinite below six values.

    The interval is that of the order statistics, which holds for every distribution of independent values.
    """
    count = len(values)
    rank = _interval_rank(count)
    if rank is None:
        return math.inf
    ordered = sorted(values)
    middle = float(np.median(ordered))
    return (ordered[count - 1 - rank] - ordered[rank]) / 2 / middle if middle > 0 else math.inf


def _interval_rank(count: int) -> int | None:
    """How many values may be left out at each end, so that the rest still holds the median with 95 % certainty."""
    below, rank = 0.0, None
    for k in range(count // 2):
        below += math.comb(count, k) * 0.5**count
        if below > (1 - _CONFIDENCE) / 2:
            break
        rank = k
    return rank


class VisitMedians:
    """The median step time of each visit, by point."""

    def __init__(self) -> None:
        self._medians_s: dict[int, list[float]] = defaultdict(list)

    def add(self, samples: Sequence[Sample]) -> None:
        """Count the samples of one visit."""
        self._medians_s[samples[0].point].append(float(np.median([sample.step_ns for sample in samples])) * _NS)

    def num_visits(self, point: int) -> int:
        """Visits to that point so far."""
        return len(self._medians_s[point])

    def latest_s(self, point: int) -> float:
        """Of the last visit to a point that was visited."""
        return self._medians_s[point][-1]

    def half_width(self, point: int) -> float:
        """See ``median_half_width``."""
        return median_half_width(self._medians_s[point])


# ------------------------------------------------------------------ the partial file


class PartialFile:
    """A growing file of visits: a header, then a line for each visit, on disk before the next one begins."""

    def __init__(self, path: Path, header: Mapping[str, Any], *, resume: bool) -> None:
        """``header`` says what is measured; samples of another header are not gone on with.

        Raises MeasurementError for a file that exists without ``resume``, or is of other settings or unreadable; a
        last line that was cut off is removed.
        """
        self.path = path
        self.visits: list[list[Sample]] = []
        """What was there already."""
        if resume and path.exists():
            self._read(header)
            self._file: IO[str] = path.open("a", encoding="utf-8", newline="\n")
        elif path.exists():
            raise MeasurementError(
                f"{path} holds an unfinished measurement: go on with --resume, or throw it away with --force"
            )
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("x", encoding="utf-8", newline="\n")
            self._write({"format": FORMAT, "version": VERSION, **header})
        self._is_of_use = any(visit[0].point != REFERENCE for visit in self.visits)

    def add(self, samples: Sequence[Sample]) -> None:
        """Append one visit."""
        self._is_of_use |= samples[0].point != REFERENCE
        self._write([list(sample) for sample in samples])

    def close(self) -> None:
        """Let go of the file; it stays, unless no point was visited and it would only be in the way of the next run."""
        self._file.close()
        if not self._is_of_use:
            self.path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Close and delete it: all that it held is in the table."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _write(self, value: Any) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")
        self._file.flush()

    def _read(self, header: Mapping[str, Any]) -> None:
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        lines = whole.decode("utf-8", errors="replace").splitlines()
        if not lines:
            raise MeasurementError(
                f"{self.path} was cut off within its first line, so that it holds nothing to go on with: begin anew "
                "with --force"
            )
        self._check(lines[0], header)
        for number, line in enumerate(lines[1:], 2):
            self.visits.append(self._samples(number, line))
        if len(whole) < len(raw):
            os.truncate(self.path, len(whole))

    def _check(self, line: str, header: Mapping[str, Any]) -> None:
        try:
            found = json.loads(line)
            known = found.get("format") == FORMAT and found.get("version") == VERSION
        except (ValueError, AttributeError):
            known = False
        if not known:
            raise MeasurementError(
                f"{self.path}, line 1: not the header of an unfinished measurement of this release: throw the file "
                "away with --force"
            )
        for key, value in json.loads(json.dumps(header)).items():
            if found.get(key) != value:
                raise MeasurementError(
                    f"{self.path} was measured with {key} {found.get(key)!r}, not {value!r}: resume with the same "
                    "flags on the same machine, or throw it away with --force"
                )

    def _samples(self, number: int, line: str) -> list[Sample]:
        try:
            samples = [Sample(*values) for values in json.loads(line)]
        except (ValueError, TypeError) as error:
            raise MeasurementError(
                f"{self.path}, line {number}: not a visit ({error}): use --force to begin anew"
            ) from error
        if not samples:
            raise MeasurementError(f"{self.path}, line {number}: a visit without samples: use --force to begin anew")
        return samples


# ------------------------------------------------------------------ the table


@dataclass(frozen=True, eq=False, slots=True)
class MeasuredTable:
    """What was measured: the points, the samples in the order in which they were taken, and where they come from."""

    points: tuple[Composition, ...]
    reference: Composition
    samples: tuple[Sample, ...]
    provenance: Mapping[str, Any]
    path: Path | None = None
    """Where it was written, if anywhere."""

    @property
    def num_measured(self) -> int:
        """Points with at least one sample."""
        return len({sample.point for sample in self.samples} - {REFERENCE})

    @property
    def is_complete(self) -> bool:
        """Whether every point of the grid has been measured."""
        return self.num_measured == len(self.points)

    def composition(self, point: int) -> Composition:
        """That point's composition."""
        return self.reference if point == REFERENCE else self.points[point]

    def frame(self) -> pd.DataFrame:
        """The samples, one a row, with ``COLUMNS``; of the clocks of a GPU only where there was one."""
        import pandas as pd

        columns = _sample_arrays(self.samples)
        compositions = [self.composition(point) for point in columns["point"].tolist()]
        shapes = np.array([composition.shape for composition in compositions], np.int64).reshape(
            -1, len(StepShape._fields)
        )
        columns |= dict(zip(StepShape._fields, shapes.T, strict=True))
        columns["kind"] = np.array([composition.kind for composition in compositions], dtype=object)
        columns["is_reference"] = columns["point"] == REFERENCE
        columns["is_outlier"] = outliers(columns["point"], columns["step_s"])
        columns["reference_s"] = _reference_s(columns)
        columns["gpu_throttled"] = columns["gpu_throttled"].astype(bool)
        without_gpu = np.isnan(columns["gpu_mhz"]).all()
        names = [name for name in COLUMNS if not (without_gpu and name.startswith("gpu_"))]
        return pd.DataFrame({name: columns[name] for name in names})

    def step_table(self) -> StepTable:
        """The samples as a fit takes them: without those of the reference, which is measured far too often."""
        from windtunnel.calibrate.step_tables import StepTable

        kept = [sample for sample in self.samples if sample.point != REFERENCE]
        rows = np.array([self.points[sample.point].shape for sample in kept], np.int64).reshape(
            -1, len(StepShape._fields)
        )
        step_s = np.array([sample.step_ns for sample in kept], np.float64) * _NS
        return StepTable(StepShape(*rows.T), step_s, self.provenance)

    def write(self, path: Path) -> None:
        """Write the table as Parquet, all of it or nothing."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pandas(self.frame(), preserve_index=False)
        points = [[point.kind, [list(work) for work in point.sequences]] for point in (*self.points, self.reference)]
        metadata = {
            **(table.schema.metadata or {}),
            PROVENANCE_KEY: json.dumps(self.provenance, allow_nan=False).encode(),
            POINTS_KEY: json.dumps(points, separators=(",", ":")).encode(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            pq.write_table(table.replace_schema_metadata(metadata), unfinished)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def read_provenance(path: Path) -> dict[str, Any] | None:
    """What a table says of its origin; None for a file of somebody else.

    Raises ValueError if it is no Parquet, or if what stands under our key is not what we write there.
    """
    import pyarrow.parquet as pq

    written = (pq.read_schema(path).metadata or {}).get(PROVENANCE_KEY)
    if written is None:
        return None
    try:
        told = json.loads(written, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(_DAMAGED.format(f"no JSON ({error})")) from None
    if not isinstance(told, dict):
        raise ValueError(_DAMAGED.format(f"no JSON object but {type(told).__name__}"))
    return told


_DAMAGED = (
    f"the file's metadata hold under {PROVENANCE_KEY.decode()!r} where a table comes from, and that is {{}}: measure "
    "again, or write the table anew without metadata"
)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def outliers(points: NDArray[np.int64], step_s: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which samples are further than ``OUTLIER_SIGMAS`` from the median of their point; none of fewer than five."""
    marked = np.zeros(len(step_s), bool)
    for point in np.unique(points):
        rows = np.flatnonzero(points == point)
        if len(rows) < _FEWEST_TO_JUDGE:
            continue
        away = np.abs(step_s[rows] - np.median(step_s[rows]))
        sigma = max(_MAD_TO_SIGMA * float(np.median(away)), _LEAST_SIGMA * float(np.median(step_s[rows])))
        marked[rows] = away > OUTLIER_SIGMAS * sigma
    return marked


def _sample_arrays(samples: Iterable[Sample]) -> dict[str, NDArray[Any]]:
    columns = dict(zip(Sample._fields, (np.array(values) for values in zip(*samples, strict=True)), strict=True))
    for name in ("step", "wall", "cpu"):
        columns[f"{name}_s"] = columns[f"{name}_ns"] * _NS
    return columns


def _reference_s(columns: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """What a step of the reference took at the time of each sample, between the visits before and after it."""
    of_reference = columns["is_reference"]
    if not of_reference.any():
        return np.full(len(of_reference), np.nan)
    at_s = columns["at_s"]
    found: NDArray[np.float64] = np.interp(at_s, at_s[of_reference], columns["step_s"][of_reference])
    return found


def describe_reference(reference: Composition, samples: Iterable[Sample]) -> dict[str, Any]:
    """How the machine's speed moved: the spread of the reference's visits, the slowest against the fastest."""
    visits: dict[int, list[int]] = defaultdict(list)
    for sample in samples:
        if sample.point == REFERENCE:
            visits[sample.visit].append(sample.step_ns)
    if not visits:
        return {"shape": reference.shape._asdict(), "num_visits": 0}
    medians_s = np.array([np.median(values) for values in visits.values()]) * _NS
    low, middle, high = np.quantile(medians_s, [0.05, 0.5, 0.95])
    return {
        "shape": reference.shape._asdict(),
        "num_visits": len(medians_s),
        "median_s": float(middle),
        "p5_s": float(low),
        "p95_s": float(high),
        "slowest_over_fastest": float(medians_s.max() / medians_s.min()),
    }
