"""What a comparison is to run: variants, axis, metrics and baseline, checked before anything is run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.sim.metrics.comparison import DERIVED
from windtunnel.trials.obstacle import Obstacle, resolved_or_obstacle

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded, Override
    from windtunnel.scenarios.schema import Scenario

DEFAULT_METRICS = ("output_throughput", "mean_e2el_ms", "p99_ttft_ms", "p99_itl_ms")
_TEXTS = ("date", "label", "model_id", "tokenizer_id", "goodput_limits", "utilisation_note", "slo_passed")
"""Keys of the summary that may be None and are no numbers where they are not."""
_NO_SETTINGS = ("compare", "schema_version")


SHORT_FLAGS = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "rate": "request_rate",
}
"""Keys by the short names that their flags have besides."""


def setting_key(name: str, value: Any) -> str:
    """The key of the scenario file that a name stands for: itself, that of a flag (``num_prompts``), or a short one.

    Where a section and a flag have one name (``engine``, ``slo``), a table is the section, and anything else the flag's
    value.
    """
    from windtunnel.scenarios.flags import KEY_OF_PARAMETER

    if isinstance(value, Mapping):
        return name
    return SHORT_FLAGS.get(name) or KEY_OF_PARAMETER.get(name, name)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a comparison, checked but not begun."""

    variant: str
    place: int
    """Which value of the axis; 0 without one."""
    overrides: dict[str, Any]
    """What makes it differ from the scenario: settings for all runs, of the variant, and on the axis."""
    loaded: Loaded


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """All runs of a comparison, by place and there by variant."""

    scenario: Scenario
    variants: dict[str, dict[str, Any]]
    axis: str | None
    values: tuple[Any, ...]
    metrics: tuple[str, ...]
    baseline: str
    runs: tuple[PlannedRun, ...]
    seeds: tuple[int, ...] = ()
    """Of the replications of each run; empty for one run with the seed that the scenario has."""

    def with_seeds(self, planned: PlannedRun) -> list[PlannedRun]:
        """The run once for each seed."""
        return [_with_seed(planned, seed) for seed in self.seeds] if self.seeds else [planned]

    def value_words(self, place: int) -> str:
        """The axis' value at a place as people write it."""
        from windtunnel.reports.values import plain

        return plain(self.values[place])

    def check(self) -> list[Obstacle | None]:
        """For each run why it is not possible, or None: what is wrong is found before hours of work, not after.

        Raises ScenarioError, TraceError, ProfileError or UnsupportedModel as ``resolve`` does, but where vLLM would
        refuse to start only if it refuses all runs.
        """
        found = [_obstacle(planned) for planned in self.runs]
        refused = [each for each in found if each is not None and each.is_contradiction]
        if refused and len(refused) == len(found):
            raise refusal(refused[0].reason)
        return found


def plan_comparison(
    scenario: str | Path | Mapping[str, Any] | Scenario | None,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    axis: str | None = None,
    values: Iterable[Any] = (),
    metrics: Iterable[str] = (),
    baseline: str | None = None,
    overrides: Mapping[str, Override] | None = None,
    reps: int = 1,
) -> ComparisonPlan:
    """The runs that ``compare`` would do, each with its settings checked.

    With several replications (``reps``) each run has so many seeds from the scenario's own on, the same in all runs.

    Raises ScenarioError if there is nothing to compare, for unknown keys, metrics and names, and as ``load_scenario``.
    """
    from windtunnel.scenarios.load import load_scenario

    common = _renamed(overrides or {}, "")
    _check_keys(common, "")
    base = load_scenario(scenario, common)
    asked = base.scenario.compare
    named = {name: _renamed(own, f"variant {name!r}: ") for name, own in _named_variants(base, variants).items()}
    chosen = tuple(values)
    axis = setting_key(axis, next(iter(chosen), "")) if axis else axis
    axis, chosen = _axis(base, axis, chosen, common, is_own_question=variants is not None)
    if not named and axis is None:
        raise refusal(
            f"{base.origin}: nothing to compare: give variants (--variant 'NAME; key=value', --batching POLICY), an "
            "axis (--over 'key=1,2,4') or a [compare] section in the scenario"
        )
    named = named or {base.scenario.name: {}}
    for name, own in named.items():
        _check_keys(own, f"variant {name!r}: ")
        if axis is not None and axis in own:
            raise refusal(f"variant {name!r} sets {axis}, which is varied along the axis: leave it out of one of them")
    runs = [
        _planned(scenario, common, name, own, axis, place, value)
        for place, value in enumerate(chosen if axis is not None else (None,))
        for name, own in named.items()
    ]
    wanted = _metrics(base.scenario, tuple(metrics) or tuple(asked.metrics))
    first = baseline_of(baseline, tuple(named))
    seeds = _seeds(base, reps, axis, named)
    return ComparisonPlan(base.scenario, named, axis, chosen, wanted, first, tuple(runs), seeds)


MOST_REPLICATIONS = 10_000


def _seeds(base: Loaded, reps: int, axis: str | None, named: Mapping[str, Mapping[str, Any]]) -> tuple[int, ...]:
    """Seeds of the replications; none for one.  Raises ScenarioError where the seed is what is compared."""
    if not 1 <= reps <= MOST_REPLICATIONS:
        raise refusal(f"replications must be 1 to {MOST_REPLICATIONS:,}, got {reps:,} (--reps)")
    if reps == 1:
        return ()
    if axis == "seed" or any("seed" in own for own in named.values()):
        raise refusal("replications vary the seed, and so does the comparison: drop one of them (--reps, or seed)")
    first = base.scenario.seed or 0
    return tuple(range(first, first + reps))


def _with_seed(planned: PlannedRun, seed: int) -> PlannedRun:
    loaded = planned.loaded
    sources = {**loaded.sources, ("seed",): loaded.sources.get(("seed",), "--reps")}
    scenario = loaded.scenario.model_copy(update={"seed": seed})
    return replace(planned, loaded=replace(loaded, scenario=scenario, sources=sources))


def refusal(message: str) -> Exception:
    """A ScenarioError, whose module is not imported before it is needed."""
    from windtunnel.scenarios.errors import ScenarioError

    return ScenarioError(message)


def _renamed(own: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings (or Overrides) under the keys of the scenario file.  Raises ScenarioError for two names of one."""
    made: dict[str, Any] = {}
    for name, given in own.items():
        key = setting_key(name, getattr(given, "value", given))
        if key in made:
            raise refusal(f"{where}{key} is set twice, the second time as {name}: drop one of them")
        made[key] = given
    return made


def _named_variants(base: Loaded, variants: Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]]:
    if variants is not None:
        return {str(name): dict(own) for name, own in variants.items()}
    return {name: _anchored(own, base.base_dir) for name, own in base.scenario.compare.variants.items()}


def _anchored(own: Mapping[str, Any], base_dir: Path) -> dict[str, Any]:
    """Overrides out of a scenario file, with their paths relative to that file."""
    anchored = dict(own)
    if isinstance(own.get("trace"), str):
        anchored["trace"] = str(base_dir / Path(own["trace"]).expanduser())
    for key in ("model", "profile"):
        if isinstance(own.get(key), str) and (base_dir / own[key]).exists():
            anchored[key] = str(base_dir / own[key])
    for section, key in (("cost", "path"), ("batching", "config")):
        table = own.get(section)
        if isinstance(table, Mapping) and isinstance(table.get(key), str):
            anchored[section] = {**table, key: str(base_dir / Path(table[key]).expanduser())}
    return anchored


def _axis(
    base: Loaded, axis: str | None, values: tuple[Any, ...], common: Mapping[str, Override], *, is_own_question: bool
) -> tuple[str | None, tuple[Any, ...]]:
    """The axis that was asked for, or the scenario's, unless other variants than its own are compared."""
    asked = base.scenario.compare
    if axis is None and values:
        raise refusal(f"values without an axis: name the setting that is to be {values[0]!r} and so on")
    if axis is None and not is_own_question and asked.axis not in common:
        axis = asked.axis
    if not axis:
        return None, ()
    if not values and axis == asked.axis:
        values = tuple(_anchored({axis: value}, base.base_dir)[axis] for value in asked.values)
    if not values:
        raise refusal(
            f"the axis {axis} has no values: give at least one (--over '{axis}=1,2,4', or values in [compare])"
        )
    _check_keys({axis: None}, "axis: ")
    if axis in common:
        raise refusal(
            f"{axis} is varied along the axis and set to {common[axis].value!r} for all runs: drop one of them"
        )
    return axis, values


def _check_keys(keys: Iterable[str], where: str) -> None:
    from windtunnel.scenarios.errors import ScenarioError
    from windtunnel.scenarios.load import override_path

    for key in keys:
        try:
            path = override_path(key)
        except ScenarioError:
            raise refusal(f"{where}unknown setting {key!r}{_nearest(key)}") from None
        if key in _NO_SETTINGS or path[0] == "compare":
            raise refusal(f"{where}{key} is no setting of a run: it describes the scenario or the comparison itself")


def _nearest(name: str) -> str:
    """The setting that was probably meant: it begins like that, has all of its words, or is spelt nearly so."""
    known = _setting_names()
    parts = name.split("_")
    alike = [key for key in known if name and key.startswith(name)]
    alike = alike or [key for key in known if name and all(part in key.split("_") for part in parts)]
    near = sorted(alike, key=len) or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else " (windtunnel schema --markdown lists all)"


def _setting_names() -> list[str]:
    """All that a variant may set, and the names of flags; not what describes the scenario or the comparison."""
    from windtunnel.scenarios.flags import KEY_OF_PARAMETER
    from windtunnel.scenarios.schema import SECTIONS

    kinds = [models for section, models in SECTIONS.items() if section != "compare"]
    names = [key for models in kinds for model in models for key in model.model_fields]
    return list(dict.fromkeys([*names, "seed", "batching", "cost", "profile", "speculative", *KEY_OF_PARAMETER]))


def _planned(
    scenario: Any,
    common: Mapping[str, Override],
    name: str,
    own: Mapping[str, Any],
    axis: str | None,
    place: int,
    value: Any,
) -> PlannedRun:
    from windtunnel.scenarios.load import Override, load_scenario

    changes = {key: Override(value, f"variant {name!r}") for key, value in own.items()}
    changes |= {axis: Override(value, f"axis {axis}")} if axis is not None else {}
    loaded = load_scenario(scenario, {**common, **changes})
    overrides = {key: given.value for key, given in {**common, **changes}.items()}
    return PlannedRun(name, place, overrides, loaded)


def _metrics(scenario: Scenario, wanted: tuple[str, ...]) -> tuple[str, ...]:
    from windtunnel.scenarios.fleet import is_fleet
    from windtunnel.scenarios.resolve import DEFAULT_PERCENTILES

    percentiles = scenario.run.percentiles or DEFAULT_PERCENTILES
    known = summary_keys(tuple(percentiles), tenants_of(scenario), is_fleet(scenario))
    if wanted:
        check_metrics(wanted, known, f"; percentiles of the runs: {', '.join(f'{each:g}' for each in percentiles)}")
        return tuple(dict.fromkeys(wanted))
    return default_metrics(known)


def default_metrics(known: Sequence[str]) -> tuple[str, ...]:
    """Those of DEFAULT_METRICS; where no P99 was asked for, with the highest percentile that was."""
    highest = next(
        (key.partition("_")[0] for key in reversed(known) if key.startswith("p") and key.endswith("_ttft_ms")), ""
    )
    chosen = [key if key in known else key.replace("p99", highest) for key in DEFAULT_METRICS]
    return tuple(key for key in chosen if key in known)


def check_metrics(wanted: Iterable[str], known: Sequence[str], hint: str = "") -> None:
    """Raises ScenarioError, naming the nearest known one, for a metric that no summary has."""
    for key in wanted:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            suggestion = f"; did you mean {near[0]!r}?" if near else " (windtunnel simulate --json prints all)"
            raise refusal(f"unknown metric {key!r}: it must be a number of the JSON summary{hint}{suggestion}")


def tenants_of(scenario: Scenario) -> tuple[str, ...]:
    """Names of the scenario's tenants, as far as it says them itself (a trace may have others)."""
    drawn = getattr(scenario.workload, "tenants", None) or {}
    return tuple(dict.fromkeys([*drawn, *scenario.tenants]))


def summary_keys(percentiles: tuple[float, ...], tenants: tuple[str, ...] = (), of_fleet: bool = False) -> list[str]:
    """Keys of the numbers that a summary has, found out by making one of a single request, and DERIVED."""
    from windtunnel.sim.cost.constant import ConstantCost
    from windtunnel.sim.engine.config import SchedulerConfig
    from windtunnel.sim.fleet.fleet import Fleet, Pool
    from windtunnel.sim.metrics import summarize
    from windtunnel.sim.simulate import serve
    from windtunnel.sim.system import System
    from windtunnel.sim.workload import workload

    load = workload([0], [1], [1], max_concurrency=1, tenant=[0] if tenants else None, tenants=tenants)
    config = SchedulerConfig(num_gpu_blocks=8, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)
    system = System(config, ConstantCost(step_s=0.001))
    records = serve(load, Fleet((Pool("any", system),)) if of_fleet else system)
    made = summarize(records, load, slo="failed<1", goodput="ttft:500", percentiles=percentiles).to_dict()
    return [*number_keys(made), *DERIVED]


def number_keys(summary: Mapping[str, Any]) -> list[str]:
    """Keys of a summary that are numbers, be they None in this run."""
    found = [key for key, value in summary.items() if value is None or isinstance(value, int | float)]
    return [key for key in found if not isinstance(summary[key], bool) and key not in _TEXTS]


def baseline_of(asked: str | None, names: tuple[str, ...]) -> str:
    """The variant that was asked for, or the first.  Raises ScenarioError if there is none of that name."""
    if asked is None:
        return names[0]
    if asked not in names:
        near = difflib.get_close_matches(asked, names, n=1)
        raise refusal(
            f"no variant {asked!r} to count from; {'did you mean' if near else 'there are'} {', '.join(near or names)}"
        )
    return asked


def _obstacle(planned: PlannedRun) -> Obstacle | None:
    found = resolved_or_obstacle(planned.loaded)
    return found if isinstance(found, Obstacle) else None
