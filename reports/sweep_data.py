"""What a sweep found, as its reports read it: points with their runs, curves, knees and the best point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import floor, isfinite
from typing import Any, NamedTuple

from windtunnel.reports.context import ReportContext
from windtunnel.reports.words import count, digits, milliseconds, percent, seconds
from windtunnel.sim.metrics.comparison import MOST_FAILED, ComparedRun, Metric, metric
from windtunnel.sim.metrics.replications import Interval, mean_interval, paired_difference
from windtunnel.sim.metrics.stability import Verdict

GIB = 2**30
PER_GPU = "_per_gpu"
COMES_FIRST = "comes first"
"""Why a point is taken that nothing tells from others."""
_MORE_METRICS = {
    "kv_cache_tokens": ("KV cache", "tokens", "higher"),
    "num_gpu_blocks": ("KV blocks", "", "higher"),
    "oom_margin_gib": ("OOM margin", "GiB", "higher"),
    "num_gpus": ("GPUs", "", "lower"),
}
LEVEL = 0.01
"""Points whose means differ by less than this share are level, whatever their noise."""


@cache
def measure(key: str) -> Metric:
    """What is known of a number of a trial: its words, unit and which way is good."""
    if key in _MORE_METRICS:
        words, unit, better = _MORE_METRICS[key]
        return Metric(key, words, unit, better)  # type: ignore[arg-type]
    if key.endswith(PER_GPU):
        base = metric(key.removesuffix(PER_GPU))
        return Metric(key, f"{base.words} per GPU", base.unit, base.better)
    return metric(key)


def say(key: str, value: float | None) -> str:
    """A number with its unit: ``87 ms``, ``4,512 tok/s``, ``12 %``."""
    if value is None:
        return "–"
    unit = measure(key).unit
    match unit:
        case "ms":
            return milliseconds(value)
        case "s":
            return seconds(value)
        case "%":
            return percent(value)
        case "GiB":
            return f"{digits(value)} GiB"
    return f"{count(value)} {unit}".strip()


def say_short(key: str, value: float | None) -> str:
    """The same where the unit stands above the column: milliseconds as a plain number."""
    if value is None:
        return "–"
    unit = measure(key).unit
    if unit == "%":
        return percent(value)
    return digits(value, 3) if abs(value) < 1000 else f"{value:,.0f}"


def fall(share: float) -> str:
    """A fall by a share as a percentage, which is only 100 % where nothing is left."""
    return percent(share) if share < 0.995 or share >= 1 else f"{min(floor(1000 * share) / 10, 99.9):.1f} %"


@dataclass(frozen=True, slots=True)
class SweptAxis:
    """A setting that was varied."""

    key: str
    text: str
    """What was asked for."""
    words: tuple[str, ...]
    """The values as people read them, each once, rising where they are numbers."""
    is_numeric: bool
    is_log: bool
    """Whether equal ratios deserve equal distances."""
    is_drawn: bool
    """Whether values were drawn from a range."""

    @property
    def span(self) -> str:
        """``0.8 to 0.98 (10 values)``."""
        if self.is_drawn:
            return f"drawn from {self.text}"
        if len(self.words) == 1:
            return self.words[0]
        if self.is_numeric:
            return f"{self.words[0]} to {self.words[-1]} ({len(self.words):,} values)"
        return ", ".join(self.words)


@dataclass(frozen=True, slots=True)
class SweptPoint:
    """One combination of values, and its runs."""

    number: int
    """From 1 on, in the order of the points."""
    settings: Mapping[str, Any]
    """The value of each axis' setting."""
    words: Mapping[str, str]
    """The same as people read it."""
    positions: Mapping[str, float | None]
    """Where it stands on each axis; None where the value is no number."""
    runs: tuple[Mapping[str, Any], ...]
    """What each replication came to, by seed; flat."""

    @property
    def infeasible(self) -> str:
        """Why it cannot run; empty if it can."""
        return next((str(run["infeasible"]) for run in self.runs if run.get("infeasible")), "")

    @property
    def name(self) -> str:
        """``gpu_memory_utilization 0.9, max_num_seqs 64``."""
        return ", ".join(f"{key} {words}" for key, words in self.words.items())

    def values(self, key: str) -> tuple[float, ...]:
        """The number in each run, by seed; empty where any run has none."""
        if self.infeasible:
            return ()
        found = [number(run, key) for run in self.runs]
        known = tuple(value for value in found if value is not None)
        return known if len(known) == len(found) else ()

    def interval(self, key: str) -> Interval | None:
        """Mean and interval of a number over the replications."""
        values = self.values(key)
        return mean_interval(values) if values else None

    def mean(self, key: str) -> float | None:
        """Mean of a number over the replications."""
        values = self.values(key)
        return sum(values) / len(values) if values else None

    @property
    def verdicts(self) -> tuple[str, ...]:
        """What the runs were judged to be, each once."""
        return tuple(dict.fromkeys(str(run.get("verdict") or "").replace("_", " ") for run in self.runs))

    @property
    def is_hopeless(self) -> bool:
        """Whether a run was overloaded: its latencies are those of its length."""
        return any(ComparedRun("", 0, run).is_hopeless for run in self.runs if not run.get("infeasible"))

    @property
    def is_overloaded(self) -> bool:
        """Whether a run was long enough to be judged so."""
        return any(verdict in (Verdict.OVERLOADED, Verdict.STALLED) for verdict in self.verdicts)

    @property
    def marked(self) -> tuple[str, ...]:
        """The verdicts, and what a reader must know besides: requests that had no answer, and unsafe memory."""
        failed = self.mean("failed_share") or 0.0
        lost = (f"{percent(failed)} failed",) if failed > MOST_FAILED else ()
        return (*self.verdicts, *lost, *(("unsafe memory",) if self.is_unsafe else ()))

    @property
    def is_unsafe(self) -> bool:
        """Whether its memory plan leaves less than its own error before the card is full."""
        return any(run.get("memory_verdict") == "unsafe" for run in self.runs)

    @property
    def num_held(self) -> int | None:
        """Replications that kept all objectives; None if there are none."""
        found = [run.get("slo_passed") for run in self.runs]
        if self.infeasible:
            return 0
        return None if any(each is None for each in found) else sum(map(bool, found))

    @property
    def missed(self) -> tuple[str, ...]:
        """The objectives that some replication missed."""
        found = [text for run in self.runs for text in str(run.get("slo_missed") or "").split(", ") if text]
        return tuple(dict.fromkeys(found))

    @property
    def holds(self) -> bool:
        """Whether all replications kept all objectives."""
        return self.num_held == len(self.runs) and not self.infeasible


def number(run: Mapping[str, Any], key: str) -> float | None:
    """A number of a run, or one that is made from its numbers: a margin in GiB, a rate per GPU, a share that failed."""
    if key == "oom_margin_gib":
        margin = number(run, "oom_margin_bytes")
        return None if margin is None else margin / GIB
    if key.endswith(PER_GPU):
        whole, gpus = number(run, key.removesuffix(PER_GPU)), number(run, "num_gpus")
        return whole / gpus if whole is not None and gpus else None
    return ComparedRun("", 0, run).number(key)


class Curve(NamedTuple):
    """Points along the axis of the figures that share all other settings, in its order."""

    name: str
    """The other settings; empty if there are none."""
    points: tuple[SweptPoint, ...]


class Knee(NamedTuple):
    """Where a number stops to change much along the axis."""

    key: str
    curve: str
    point: SweptPoint
    before: SweptPoint
    """The first point of the curve."""
    after: SweptPoint
    """Its last."""
    distance: float
    """From the chord, as a share of the curve's range."""
    low: str
    """The first value at which a single replication has its knee."""
    high: str
    is_tested: bool
    """Whether it was told from noise by replications."""


class Best(NamedTuple):
    """The point to take."""

    point: SweptPoint
    by: str
    """The number that was made as large, or as small, as it gets."""
    is_under_slo: bool
    """Whether objectives were set, and this point keeps them."""
    level: tuple[SweptPoint, ...]
    """Others that are as good within noise."""
    tie_break: str
    """Why this one of them; empty if it is alone."""


@dataclass(frozen=True, slots=True)
class Swept:
    """A sweep, as all reports show it."""

    context: ReportContext
    description: str
    axes: tuple[SweptAxis, ...]
    points: tuple[SweptPoint, ...]
    seeds: tuple[int, ...]
    metrics: tuple[str, ...]
    """The numbers that tables and figures show."""
    trade: tuple[str, str] | None
    """Two numbers of which more of one costs some of the other."""
    objectives: tuple[str, ...]
    best_by: str
    baseline: SweptPoint | None
    best: Best | None
    knees: tuple[Knee, ...]
    is_deterministic: bool
    """Whether all replications of every point are the same."""
    is_fixed: bool = False
    """Whether the seed has no say: a trace is replayed, and nothing is drawn."""
    is_zipped: bool = False
    """Whether the settings go side by side, so that all points lie on one line."""
    command: str = ""
    """What repeats it."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """What held for all points."""

    @property
    def currency(self) -> str:
        """What prices are in; empty where there are none."""
        return next((str(run["currency"]) for point in self.points for run in point.runs if run.get("currency")), "")

    def label(self, key: str) -> str:
        """The name of a number with its unit, for a column."""
        known = measure(key)
        if not known.unit and "cost" in key and self.currency:
            return replace(known, unit=self.currency).label
        return known.label.replace(" (%)", "")

    @property
    def feasible(self) -> tuple[SweptPoint, ...]:
        """Points that can run."""
        return tuple(point for point in self.points if not point.infeasible)

    @property
    def x_axis(self) -> SweptAxis:
        """The axis of the figures: one of numbers if there is any, of these the one with most values."""
        return max(self.axes, key=lambda axis: (axis.is_numeric, not axis.is_drawn, len(axis.words)))

    @property
    def is_scattered(self) -> bool:
        """Whether points do not lie on lines, as they were drawn."""
        return any(axis.is_drawn for axis in self.axes)

    def curves(self) -> list[Curve]:
        """The points by what they have in common beside the axis of the figures."""
        axis, found = self.x_axis, dict[str, list[SweptPoint]]()
        for point in self.points:
            others = ", ".join(f"{key} {words}" for key, words in point.words.items() if key != axis.key)
            found.setdefault("" if self.is_scattered or self.is_zipped else others, []).append(point)
        return [Curve(name, tuple(sorted(points, key=self._order))) for name, points in found.items()]

    def _order(self, point: SweptPoint) -> float:
        position = point.positions[self.x_axis.key] if self.x_axis.is_numeric else None
        return float(point.number) if position is None else position

    def difference(self, point: SweptPoint, key: str) -> Interval | None:
        """The paired difference of a point to the baseline, seed against seed."""
        return None if self.baseline is None else paired(self.baseline, point, key)

    def shown(self, keys: Sequence[str] | None = None) -> list[str]:
        """Those of the metrics that some point has."""
        wanted = self.metrics if keys is None else keys
        found = [key for key in wanted if any(point.values(key) for point in self.points)]
        return [key for key in found if key != "num_gpu_blocks" or "kv_cache_tokens" not in found]

    def reasons(self) -> Iterator[tuple[str, list[SweptPoint]]]:
        """Why points are infeasible, each reason once, with its points."""
        found: dict[str, list[SweptPoint]] = {}
        for point in self.points:
            if point.infeasible:
                found.setdefault(point.infeasible, []).append(point)
        yield from found.items()


def paired(base: SweptPoint, point: SweptPoint, key: str) -> Interval | None:
    """What changes from one point to another in a number, seed against seed; None where either has none."""
    a, b = base.values(key), point.values(key)
    return paired_difference(a, b) if a and len(a) == len(b) else None


def are_level(first: SweptPoint, second: SweptPoint, key: str) -> bool:
    """Whether two points cannot be told apart in a number: by less than 1 %, or within the noise of their runs."""
    change = paired(first, second, key)
    base = first.mean(key)
    if change is None or base is None:
        return False
    if abs(change.mean) <= LEVEL * abs(base):
        return True
    return isfinite(change.half_width) and not change.excludes(0)
