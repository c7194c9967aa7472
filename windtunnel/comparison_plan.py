"""What a comparison is to run: variants, axis, metrics and baseline, checked before anything is run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from windtunnel.sim.metrics.comparison import DERIVED

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded, Override
    from windtunnel.scenarios.resolve import Resolved
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


class Obstacle(NamedTuple):
    """Why a run is not possible."""

    reason: str
    is_contradiction: bool
    """Whether vLLM refuses the settings; otherwise the model or a request does not fit the memory."""

    @property
    def verdict(self) -> str:
        """``infeasible`` or ``not possible``."""
        return "not possible" if self.is_contradiction else "infeasible"


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
) -> ComparisonPlan:
    """The runs that ``compare`` would do, each with its settings checked.

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
    return ComparisonPlan(base.scenario, named, axis, chosen, wanted, first, tuple(runs))


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
    from windtunnel.scenarios.resolve import DEFAULT_PERCENTILES

    percentiles = scenario.run.percentiles or DEFAULT_PERCENTILES
    known = summary_keys(tuple(percentiles))
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
            suggestion = f"; did you mean {near[0]!r}?" if near else ""
            raise refusal(f"unknown metric {key!r}: it must be a number of the JSON summary{hint}{suggestion}")


def summary_keys(percentiles: tuple[float, ...]) -> list[str]:
    """Keys of the numbers that a summary has, found out by making one of a single request, and DERIVED."""
    from windtunnel.sim.cost.constant import ConstantCost
    from windtunnel.sim.engine.config import SchedulerConfig
    from windtunnel.sim.metrics import summarize
    from windtunnel.sim.simulate import run
    from windtunnel.sim.workload import workload

    load = workload([0], [1], [1], max_concurrency=1)
    config = SchedulerConfig(num_gpu_blocks=8, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)
    records = run(load, config, ConstantCost(step_s=0.001))
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


def resolved_or_obstacle(loaded: Loaded) -> Resolved | Obstacle:
    """The run with every setting known, or why it is not possible, where that is a result of the comparison.

    Raises as ``resolve`` for everything else.
    """
    from windtunnel.scenarios.errors import ScenarioError
    from windtunnel.scenarios.resolve import resolve
    from windtunnel.sim.deployment.memory import InfeasibleDeployment
    from windtunnel.sim.simulate import RequestTooLarge

    try:
        return resolve(loaded)
    except (InfeasibleDeployment, RequestTooLarge) as error:
        return Obstacle(str(error), is_contradiction=False)
    except ScenarioError as error:
        if not _is_refused_by_engine(loaded):
            raise
        return Obstacle(str(error), is_contradiction=True)


def _is_refused_by_engine(loaded: Loaded) -> bool:
    """Whether the engine's settings contradict model and GPU, or each other; not if these are not known at all."""
    from windtunnel.scenarios.engine import make_engine
    from windtunnel.scenarios.errors import ScenarioError
    from windtunnel.scenarios.ledger import Ledger
    from windtunnel.scenarios.resolve import read_hardware

    ledger = Ledger(loaded)
    hardware = read_hardware(ledger)
    try:
        make_engine(ledger, hardware)
    except ScenarioError:
        return True
    return False
