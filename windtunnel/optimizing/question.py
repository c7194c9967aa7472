"""What is searched for: the number to make large, on which load, under which objectives, with which knobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from windtunnel.comparison_plan import refusal
from windtunnel.optimizing.knobs import Knob, make_knobs, usual_knobs
from windtunnel.reports.optimize_data import Target
from windtunnel.reports.sweep_data import measure
from windtunnel.sim.metrics.slo import Slo, parse_slos
from windtunnel.sweeping.context import own_settings
from windtunnel.sweeping.plan import checked_value, is_fixed, renamed, shown_metrics

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded

LOAD, CAPACITY = "load", "capacity"
DEFAULT_TRIALS = 64
DEFAULT_REPS = {LOAD: 5, CAPACITY: 8}
_NOT_TUNED = ("schema_version", "name", "description", "teaches", "seed")
_NO_SETTINGS = ("slo", "price", "power", "run", "compare", "plan")
"""Sections of which no key is a setting of a deployment."""


@dataclass(frozen=True, slots=True)
class Question:
    """All that a search needs to know."""

    scenario: Any
    """As it was given."""
    base: Loaded
    common: dict[str, Any]
    """What is set for all trials."""
    knobs: tuple[Knob, ...]
    were_knobs_given: bool
    target: Target
    at: str
    """``load`` or ``capacity``."""
    objectives: tuple[Slo, ...]
    is_priced: bool
    currency: str
    has_limits: bool
    """Whether limits say which requests are good."""
    num_trials: int
    reps: int
    first_seed: int
    notes: tuple[str, ...]
    asked_for: str
    tuned: dict[str, Any]
    """As they were given."""
    given: dict[str, Any]
    """What was set for all trials, without what this adds."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Those of the search; the same for all trials."""
        return tuple(self.first_seed + k for k in range(self.reps))

    @property
    def fresh_seeds(self) -> tuple[int, ...]:
        """Those that the answer is confirmed with, which the search has not seen."""
        return tuple(self.first_seed + self.reps + k for k in range(self.reps))

    @property
    def num_combinations(self) -> int | None:
        """Of all values of all knobs; None where one is a range of numbers that are not whole."""
        number = 1
        for knob in self.knobs:
            if knob.num_values is None:
                return None
            number *= knob.num_values
        return number


def make_question(
    scenario: Any,
    tune: Mapping[str, Any],
    *,
    wanted: str = "goodput_per_dollar",
    at: str = LOAD,
    trials: int | None = None,
    reps: int | None = None,
    seed: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Question:
    """What ``optimize`` would search for.

    Raises ValueError for specifications that cannot be read and settings out of range, ScenarioError for unknown
    settings and numbers, knobs that make no sense and settings that are both tuned and set; as ``resolve`` does.
    """
    if at not in (LOAD, CAPACITY):
        raise ValueError(f"at must be load or capacity, got {at!r}")
    for name, value, most in (("trials", trials, 100_000), ("reps", reps, 1_000)):
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"{name} must be 1 to {most:,}, got {value:,}")
    common = renamed(overrides or {}) | ({} if seed is None else {"seed": seed})
    given = dict(common)
    base = _base(scenario, common)
    own, defaults, resolved = _values(base)
    notes: list[str] = []
    specs: Mapping[str, Any] = tune
    if not tune:
        if resolved is None:
            raise refusal("this scenario does not start, so that it is not known what to turn: name it with --tune")
        specs, notes = usual_knobs(resolved, own, defaults)
    knobs = make_knobs(specs, own, defaults)
    _check_knobs(knobs, common, at)
    knobs = tuple(_checked(scenario, common, knob) for knob in knobs)
    objectives = tuple(parse_slos(base.scenario.slo.objectives or ()))
    common = _with_percentiles(base, common, objectives)
    base = _base(scenario, common)
    is_priced, currency = _price(base, resolved)
    target = _target(wanted, base, is_priced=is_priced, currency=currency, at=at)
    if at == CAPACITY:
        _check_objectives(base, objectives)
    return Question(
        scenario=scenario,
        base=base,
        common=common,
        knobs=knobs,
        were_knobs_given=bool(tune),
        target=target,
        at=at,
        objectives=objectives,
        is_priced=is_priced,
        currency=currency,
        has_limits=bool(base.scenario.slo.goodput),
        num_trials=trials or DEFAULT_TRIALS,
        reps=_reps(base, reps, at),
        first_seed=base.scenario.seed or 0,
        notes=tuple(notes),
        asked_for=wanted,
        tuned=dict(tune),
        given=given,
    )


def load(scenario: Any, overrides: Mapping[str, Any], tuned: Iterable[str] = ()) -> Loaded:
    """The scenario with these settings.  Raises as ``load_scenario`` does."""
    from windtunnel.scenarios.load import Override, load_scenario

    names = {key: f"--tune {key}" if key in set(tuned) else f"--set {key}" for key in overrides} | {"seed": "--seed"}
    return load_scenario(scenario, {key: Override(value, names[key]) for key, value in overrides.items()})


def _base(scenario: Any, common: Mapping[str, Any]) -> Loaded:
    return load(scenario, common)


def _values(base: Loaded) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """What the scenario has for each setting, what vLLM takes where it does not say, and the run it makes.

    The run is None where it does not start; then of the settings only what the scenario says is known.
    """
    from windtunnel.trials import Obstacle, resolved_or_obstacle

    found = resolved_or_obstacle(base)
    if isinstance(found, Obstacle):
        return _said(base), _defaults(base), None
    return own_settings(found.describe()), _defaults(base), found


def _said(base: Loaded) -> dict[str, Any]:
    table = base.scenario.model_dump(exclude_unset=True)
    return {key: value for part in ("deployment", "engine") for key, value in (table.get(part) or {}).items()}


_OF_THE_DEPLOYMENT = ("model", "gpu", "dtype", "engine_version", "usage_context", "num_gpu_blocks_override")


def _defaults(base: Loaded) -> dict[str, Any]:
    """vLLM's value of each setting for this model, card and release, were nothing else said."""
    from windtunnel.scenarios.errors import ScenarioError
    from windtunnel.scenarios.load import load_scenario
    from windtunnel.trials import resolved_or_obstacle
    from windtunnel.trials.trial import trial_of

    table = {key: value for key, value in trial_of(base).argument.scenario.items() if key != "fleet"}
    given = table.get("deployment") or {}
    table["deployment"] = {key: given[key] for key in _OF_THE_DEPLOYMENT if key in given}
    length = (table.pop("engine", None) or {}).get("max_model_len")
    table["engine"] = {} if length is None else {"max_model_len": length}
    for sizes in ({}, {"tensor_parallel_size": given.get("tensor_parallel_size") or 1}):
        try:
            found = resolved_or_obstacle(load_scenario({**table, "deployment": {**table["deployment"], **sizes}}))
        except ScenarioError:
            continue
        describe = getattr(found, "describe", None)
        if describe is not None:
            told = own_settings(describe())
            return {**told, "tensor_parallel_size": 1} if sizes else told
    return {}


def _check_knobs(knobs: Sequence[Knob], common: Mapping[str, Any], at: str) -> None:
    from windtunnel.scenarios.load import override_path

    if not knobs:
        raise refusal("there is nothing to turn: give --tune KEY=SPEC, such as --tune max_num_seqs=32,64,128")
    for place, knob in enumerate(knobs):
        section = override_path(knob.key)[0]
        if knob.key in _NOT_TUNED or section in _NO_SETTINGS:
            raise refusal(f"{knob.key} cannot be tuned: it is no setting of a deployment")
        if knob.key in [each.key for each in knobs[:place]]:
            raise refusal(f"{knob.key} is tuned twice: put all of its values into one specification")
        if knob.key in common:
            raise refusal(f"{knob.key} is tuned and also set to {common[knob.key]!r}: drop one of them")
        if section != "workload":
            continue
        if at == CAPACITY:
            raise refusal(f"{knob.key} cannot be tuned at capacity: the load is what is searched there")
        if knob.key != "max_concurrency":
            raise refusal(
                f"{knob.key} cannot be tuned: it is the load, which all deployments must serve alike; set it with "
                "--set, or see what it does with windtunnel sweep"
            )


def _checked(scenario: Any, common: Mapping[str, Any], knob: Knob) -> Knob:
    """The knob with its values as the scenario has them ("2k" is 2000).  Raises ScenarioError for one out of range."""
    ends = () if knob.draw is None else (knob.value_at(knob.draw.low), knob.value_at(knob.draw.high))
    for value in ends:
        load(scenario, {**common, knob.key: value}, (knob.key,))
    values = [
        checked_value(load(scenario, {**common, knob.key: value}, (knob.key,)), knob.key, value)
        for value in knob.values
    ]
    once = [value for place, value in enumerate(values) if value not in values[:place]]
    is_numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in once)
    return replace(knob, values=tuple(sorted(once) if is_numeric else once))


def _with_percentiles(base: Loaded, common: dict[str, Any], objectives: Sequence[Slo]) -> dict[str, Any]:
    """The percentiles that objectives ask for are among those that each run computes, so that it tells its margin."""
    from windtunnel.scenarios.resolve import DEFAULT_PERCENTILES

    own = list(base.scenario.run.percentiles or DEFAULT_PERCENTILES)
    more = [slo.percent for slo in objectives if slo.percent is not None and slo.percent not in own]
    return {**common, "percentiles": [*own, *dict.fromkeys(more)]} if more else common


def _price(base: Loaded, resolved: Any) -> tuple[bool, str]:
    is_priced = base.scenario.price.gpu_hour is not None
    currency = getattr(resolved, "currency", "") or base.scenario.price.currency or "USD"
    return is_priced, currency if is_priced else ""


def _target(wanted: str, base: Loaded, *, is_priced: bool, currency: str, at: str) -> Target:
    """The number that is made large, or small.  Raises ScenarioError for one that no trial has."""
    name, sign = wanted.strip().replace("-per-", "_per_"), ""
    for mark in "+-":
        if name.startswith(mark) or name.endswith(mark):
            name, sign = name.strip("+-").strip(), mark
    per = at == CAPACITY
    match name:
        case "goodput_per_dollar" if is_priced and _is_free(base):
            raise refusal("with GPUs at a price of 0 there is no goodput per dollar: give their price, or none at all")
        case "goodput_per_dollar" if is_priced:
            money = "dollar" if currency == "USD" else currency
            key, words, unit = "goodput_per_dollar", f"goodput per {money}", f"requests/{currency}"
            better = "higher"
        case "goodput_per_dollar" | "goodput_per_gpu_hour":
            key, words, unit, better = "goodput_per_gpu_hour", "goodput per GPU-hour", "requests/GPU-h", "higher"
        case "goodput":
            key, words, unit, better = "goodput", "sustainable rate" if per else "goodput", "req/s", "higher"
        case "cost" if is_priced:
            key, words, unit, better = "cost_per_hour", "cost per hour", f"{currency}/h", "lower"
        case "cost":
            key, words, unit, better = "num_gpus", "GPUs", "", "lower"
        case _:
            if per:
                raise refusal(f"{name} is not known at capacity: take goodput_per_dollar, goodput or cost")
            key = shown_metrics(base.scenario, (name,), ())[0]
            known = measure(key)
            words, unit, better = known.words, known.unit, known.better
    if sign:
        better = "higher" if sign == "+" else "lower"
    if not better:
        raise refusal(f"{name} is neither good nor bad in itself: write +{name} for as much as possible, or -{name}")
    return Target(key, words, unit, better)


def _is_free(base: Loaded) -> bool:
    """Whether a GPU, or one of several, costs nothing."""
    price = base.scenario.price.gpu_hour
    return 0 in (price.values() if isinstance(price, Mapping) else (price,))


def _check_objectives(base: Loaded, objectives: Sequence[Slo]) -> None:
    from windtunnel.capacity.evaluate import check_objectives
    from windtunnel.sim.metrics.slo import GoodputLimits

    limits = GoodputLimits.parse(base.scenario.slo.goodput) if base.scenario.slo.goodput else None
    check_objectives(objectives, limits)


def _reps(base: Loaded, asked: int | None, at: str) -> int:
    if asked is not None:
        return asked
    return 1 if at == LOAD and is_fixed(base.scenario) else DEFAULT_REPS[at]
