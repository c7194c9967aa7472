"""What a sweep is about to do: its points, each with its settings checked, its replications and what it looks at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windtunnel.comparison_plan import check_metrics, default_metrics, refusal, setting_key, summary_keys, tenants_of
from windtunnel.sweeping.axes import LISTS, Axis, make_axis
from windtunnel.sweeping.design import combinations
from windtunnel.sweeping.dials import COST, MORE_METRICS, dial_of
from windtunnel.sweeping.names import catalogue_name

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded
    from windtunnel.scenarios.schema import Scenario

DEFAULT_REPS = 5
"""Replications where each draws its own requests."""
_NOT_VARIED = ("compare", "plan", "schema_version", "name", "description", "teaches", "seed")
_JUDGING = ("objectives", "goodput", "percentiles")
"""Settings that change what is said of a run, and not the run: points that differ in them cannot be ranked."""


@dataclass(frozen=True, slots=True)
class PlannedPoint:
    """One combination of values, checked but not run."""

    settings: dict[str, Any]
    """By the axes' keys, as the scenario has them once it is checked."""
    words: dict[str, str]
    """The same as people read it."""
    positions: dict[str, float | None]
    """The same as numbers, where they are."""
    overrides: dict[str, Any]
    """All that is set in the scenario: for all points, and here."""
    loaded: Loaded
    """The scenario with these settings."""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """All runs of a sweep: each of the points with each of the seeds."""

    scenario: Any
    """As it was given."""
    base: Loaded
    axes: tuple[Axis, ...]
    points: tuple[PlannedPoint, ...]
    seeds: tuple[int, ...]
    common: dict[str, Any]
    """What is set for all points."""
    metrics: tuple[str, ...]
    trade: tuple[str, str] | None
    best_by: str | None
    """What is made as large (or small) as it gets; None leaves it to what the runs have."""
    baseline: dict[str, Any] | None
    """Settings of the point that differences are counted from; None leaves it to the scenario's own values."""
    vary: dict[str, Any]
    """As it was given."""
    is_zipped: bool
    samples: int | None
    sampling: str
    why_reps: str
    """Why there are as many replications, where nobody asked for a number."""
    notes: tuple[str, ...]
    """What names were taken as and what is looked at only once, in sentences for people."""

    @property
    def num_runs(self) -> int:
        """Simulations that the sweep takes."""
        return len(self.points) * len(self.seeds)


def plan_sweep(
    scenario: Any,
    vary: Mapping[str, Any],
    *,
    is_zipped: bool = False,
    samples: int | None = None,
    sampling: str = "lhs",
    reps: int | None = None,
    seed: int | None = None,
    metrics: Iterable[str] = (),
    best_by: str | None = None,
    baseline: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> SweepPlan:
    """The runs that ``sweep`` would do.

    Raises ValueError for specifications that cannot be read and designs that are too large; ScenarioError for unknown
    settings and metrics, values out of range, and settings that are both varied and set; as ``load_scenario`` does, and
    as ``resolve`` for a GPU, model or trace that is not there.
    """
    axes = [make_axis(name, spec) for name, spec in vary.items()]
    common = renamed(overrides or {})
    base = load_base(scenario, axes, common, seed)
    first_seed = base.scenario.seed or 0
    combos = combinations(axes, is_zipped=is_zipped, samples=samples, sampling=sampling, seed=first_seed)
    points = each_once(planned_points(scenario, axes, combos, common))
    check_words(axes, points)
    number, why = replications(points[0], reps)
    dial = dial_of([axis.key for axis in axes])
    return SweepPlan(
        scenario,
        base,
        tuple(axes),
        points,
        tuple(first_seed + k for k in range(number)),
        common,
        shown_metrics(base.scenario, tuple(metrics), dial.metrics),
        dial.trade,
        best_by if best_by is None else shown_metrics(base.scenario, (best_by,), ())[0],
        None if baseline is None else _baseline(scenario, axes, baseline, points),
        dict(vary),
        is_zipped,
        samples,
        sampling,
        why,
        tuple(design_notes(axes, len(combos), len(points), is_zipped=is_zipped)),
    )


def load_base(scenario: Any, axes: Sequence[Axis], common: dict[str, Any], seed: int | None) -> Loaded:
    """The scenario with what is set for all points; where it needs what is varied, with the first values.

    ``seed`` is put among what is common.  Raises ScenarioError as ``plan_sweep`` says.
    """
    from windtunnel.scenarios.errors import ScenarioError
    from windtunnel.scenarios.load import override_path

    if not axes:
        raise refusal("nothing is varied: give --vary KEY=SPEC, such as --vary gpu_memory_utilization=0.80:0.98:0.02")
    keys = [axis.key for axis in axes]
    for place, key in enumerate(keys):
        override_path(key)
        if key in _NOT_VARIED:
            told = "replications vary it: give --reps" if key == "seed" else "it is no setting of a run"
            raise refusal(f"{key} cannot be varied: {told}")
        if key in _JUDGING:
            raise refusal(
                f"{key} cannot be varied: it says how runs are judged, not what they do; set it for all points"
            )
        if key in keys[:place]:
            raise refusal(f"{key} is varied twice: put all of its values into one specification")
        if key in common:
            raise refusal(f"{key} is varied and also set to {common[key]!r} for all points: drop one of them")
    if seed is not None:
        common["seed"] = seed
    try:
        return _load(scenario, common)
    except ScenarioError:
        return _load(scenario, common | {axis.key: axis.as_draw.at(0.0) for axis in axes})


def renamed(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the keys of the scenario file, lists as such.  Raises ScenarioError for two names of one."""
    made: dict[str, Any] = {}
    for name, value in overrides.items():
        key = setting_key(name, value)
        if key in made:
            raise refusal(f"{key} is set twice, the second time as {name}: drop one of them")
        made[key] = [value] if key in LISTS and isinstance(value, str) else value
    return made


def planned_points(
    scenario: Any, axes: Sequence[Axis], combos: Sequence[tuple[Any, ...]], common: Mapping[str, Any]
) -> tuple[PlannedPoint, ...]:
    """Combinations of values as points; each is read as a scenario, so that what is wrong is found before any run."""
    return tuple(_point(scenario, axes, combo, common) for combo in combos)


def each_once(points: Sequence[PlannedPoint]) -> tuple[PlannedPoint, ...]:
    """Points whose settings come to the same (1k and 1000, or a whole number that was drawn twice) only once."""
    found: dict[str, PlannedPoint] = {}
    for point in points:
        found.setdefault(repr(list(point.settings.values())), point)
    return tuple(found.values())


def design_notes(
    axes: Iterable[Axis], num_combinations: int, num_points: int, *, is_zipped: bool = False
) -> Iterator[str]:
    """What names were taken as, which values came twice, and how many combinations came to the same point."""
    for axis in axes:
        yield from axis.notes
        if axis.num_repeats and not is_zipped:
            count = f"{axis.num_repeats:,} of {len(axis.repeated):,} values"
            yield f"{axis.key} {axis.text}: {count} {_say_again(axis.num_repeats)}."
    number = num_combinations - num_points
    if number:
        yield f"{number:,} of {num_combinations:,} points {_say_again(number)}."


def _say_again(number: int) -> str:
    return (
        "comes to the same as another and is left out" if number == 1 else "come to the same as others and are left out"
    )


def check_words(axes: Sequence[Axis], points: Sequence[PlannedPoint]) -> None:
    """Find out before any run whether what is named by words (a GPU, a model, a trace) is there.

    One point of each such value is made ready to run.  Raises as ``resolve``; that it would not start is no mistake.
    """
    from windtunnel.trials import resolved_or_obstacle

    for key in (axis.key for axis in axes):
        named: dict[str, PlannedPoint] = {}
        for point in points:
            if isinstance(point.settings[key], str | Mapping):
                named.setdefault(point.words[key], point)
        for point in named.values():
            resolved_or_obstacle(point.loaded)


def _point(scenario: Any, axes: Sequence[Axis], combo: tuple[Any, ...], common: Mapping[str, Any]) -> PlannedPoint:
    from windtunnel.reports.values import plain

    own = {axis.key: value for axis, value in zip(axes, combo, strict=True)}
    loaded = _load(scenario, {**common, **own}, own)
    settings = {key: checked_value(loaded, key, value) for key, value in own.items()}
    words = {key: value if isinstance(value, str) else plain(value) for key, value in settings.items()}
    positions = {key: _position(value) for key, value in settings.items()}
    passed = {key: settings[key] if _position(settings[key]) is not None else own[key] for key in own}
    return PlannedPoint(settings, words, positions, {**common, **passed}, loaded)


def checked_value(loaded: Loaded, key: str, given: Any) -> Any:
    """A setting as the scenario has it once it is checked ("2k" is 2000); as given where it is no plain value there."""
    from windtunnel.scenarios.load import override_path

    value: Any = loaded.scenario
    for part in override_path(key):
        value = getattr(value, part, None)
    return value if isinstance(value, bool | int | float | str) else given


def _position(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _load(scenario: Any, overrides: Mapping[str, Any], varied: Iterable[str] = ()) -> Loaded:
    from windtunnel.scenarios.load import Override, load_scenario

    names = {key: f"--vary {key}" if key in set(varied) else f"--set {key}" for key in overrides}
    names |= {"seed": "--seed"}
    return load_scenario(scenario, {key: Override(value, names[key]) for key, value in overrides.items()})


def replications(point: PlannedPoint, asked: int | None) -> tuple[int, str]:
    """How many, and why where nobody asked.  Raises ValueError for fewer than 1."""
    if asked is not None:
        if not 1 <= asked <= 10_000:
            raise ValueError(f"replications must be 1 to 10,000, got {asked:,}")
        return asked, ""
    if is_fixed(point.loaded.scenario):
        return 1, "A trace is replayed and nothing is drawn, so that one run says it all."
    return DEFAULT_REPS, f"Each point is run {DEFAULT_REPS} times, with other requests each time (--reps)."


def is_fixed(scenario: Scenario) -> bool:
    """Whether the seed has no say: requests from a trace, no noise, no drafts, no router that draws."""
    from windtunnel.scenarios.schema import TraceWorkload

    is_noisy = bool(getattr(scenario.cost, "noise", False)) or scenario.deployment.router == "power_of_two"
    return isinstance(scenario.workload, TraceWorkload) and not is_noisy and scenario.speculative is None


def shown_metrics(scenario: Scenario, asked: tuple[str, ...], usual: Sequence[str]) -> tuple[str, ...]:
    """The numbers to show: those asked for, else the usual ones of what is varied that such runs have.

    Raises ScenarioError, naming the nearest known one, for a number that no run has.
    """
    from windtunnel.scenarios.fleet import is_fleet
    from windtunnel.scenarios.resolve import DEFAULT_PERCENTILES

    percentiles = tuple(scenario.run.percentiles or DEFAULT_PERCENTILES)
    known = [*summary_keys(percentiles, tenants_of(scenario), is_fleet(scenario)), *MORE_METRICS]
    if asked:
        check_metrics(asked, known)
        return tuple(dict.fromkeys(asked))
    found = tuple(key for key in usual if key in known) or default_metrics(known)
    return (*found, COST) if scenario.price.gpu_hour is not None else found


def _baseline(
    scenario: Any,
    axes: Sequence[Axis],
    asked: Mapping[str, Any],
    points: Sequence[PlannedPoint],
) -> dict[str, Any]:
    """The settings asked for, as the points have them.  Raises ScenarioError if no point, or several, have them."""
    own = renamed(asked)
    unknown = [key for key in own if key not in {axis.key for axis in axes}]
    if unknown:
        raise refusal(f"--baseline names {unknown[0]}, which is not varied: name a point by what is")
    loaded = _load(scenario, {**points[0].overrides, **own})
    wanted = {key: catalogue_name(key, checked_value(loaded, key, value)) for key, value in own.items()}
    found = [point for point in points if all(point.settings[key] == value for key, value in wanted.items())]
    if len(found) != 1:
        told = ", ".join(f"{key}={value}" for key, value in asked.items())
        raise refusal(f"--baseline {told} fits {len(found):,} points: name all settings of one of them")
    return found[0].settings
