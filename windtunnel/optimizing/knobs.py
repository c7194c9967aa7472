"""The settings that a search turns: their values or ranges, where the scenario has them, and vLLM's defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windtunnel.sweeping.axes import Draw, make_axis

if TYPE_CHECKING:
    from windtunnel.scenarios.resolve import Resolved

SEATS = (16, 32, 64, 128, 256, 512, 1024)
BUDGETS = (1024, 2048, 4096, 8192, 16384)
SHARES = (0.85, 0.88, 0.9, 0.92, 0.94, 0.96)
SIZES = (1, 2, 4, 8)
KV_DTYPES = ("auto", "fp8")
THRESHOLDS = (0, 512, 2048)
"""long_prefill_token_threshold: off, and what a long prompt may take of a step."""
_DIGITS = 3
"""Significant digits of values from a range that is not one of whole numbers."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting that is turned: a list of values or a range."""

    key: str
    text: str
    """What was asked for."""
    values: tuple[Any, ...]
    """In order; empty for a range."""
    draw: Draw | None
    """The range."""
    own: Any
    """What the scenario has; None if that is not known."""
    default: Any
    """What vLLM takes if it is not given; None if that is not known."""

    @property
    def is_numeric(self) -> bool:
        """Whether all values are numbers."""
        return self.draw is not None or all(_is_number(value) for value in self.values)

    @property
    def is_log(self) -> bool:
        """Whether equal ratios deserve equal distances in a figure."""
        if self.draw is not None:
            return self.draw.is_log
        return self.is_numeric and len(self.values) > 2 and self.values[0] > 0 and self.values[-1] >= 8 * self.values[0]

    @property
    def num_values(self) -> int | None:
        """How many values there are; None for a range of numbers that are not whole."""
        if self.draw is None:
            return len(self.values)
        return int(self.draw.high) - int(self.draw.low) + 1 if self.draw.is_whole else None

    def holds(self, value: Any) -> bool:
        """Whether a value is among those that are searched."""
        if self.draw is None:
            return any(_same(value, each) for each in self.values)
        return _is_number(value) and self.draw.low <= value <= self.draw.high

    def distribution(self) -> Any:
        """What optuna draws from: places in the list, which are ordered where values are numbers, or the range."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        draw = self.draw
        if draw is None:
            last = len(self.values) - 1
            return IntDistribution(0, last) if self.is_numeric else CategoricalDistribution(tuple(range(last + 1)))
        if draw.is_whole:
            return IntDistribution(int(draw.low), int(draw.high), log=draw.is_log)
        return FloatDistribution(draw.low, draw.high, log=draw.is_log)

    def value_at(self, drawn: Any) -> Any:
        """The value that optuna's stands for."""
        if self.draw is None:
            return self.values[int(drawn)]
        if self.draw.is_whole:
            return int(drawn)
        return min(max(float(f"{drawn:.{_DIGITS}g}"), self.draw.low), self.draw.high)

    def drawn_at(self, value: Any) -> Any:
        """Optuna's for a value that the knob holds."""
        if self.draw is not None:
            return value
        return next(place for place, each in enumerate(self.values) if _same(value, each))

    def neighbours(self, value: Any) -> Iterator[Any]:
        """Values next to one: both sides in a list of numbers, all others in any other list, none in a range."""
        if self.draw is not None or not self.holds(value):
            return
        place = self.drawn_at(value)
        if not self.is_numeric:
            yield from (each for other, each in enumerate(self.values) if other != place)
            return
        yield from (self.values[other] for other in (place - 1, place + 1) if 0 <= other < len(self.values))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def make_knobs(asked: Mapping[str, Any], own: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[Knob, ...]:
    """The knobs that were asked for, with the values that the scenario and vLLM have for them by key.

    Raises ValueError for specifications that cannot be read, ScenarioError for unknown settings.
    """
    return tuple(_knob(name, spec, own, defaults) for name, spec in asked.items())


def _knob(name: str, spec: Any, own: Mapping[str, Any], defaults: Mapping[str, Any]) -> Knob:
    axis = make_axis(name, spec, bare_range=True)
    values = axis.values or (axis.draw.choices if axis.draw is not None else ())
    draw = axis.draw if axis.draw is not None and not axis.draw.choices else None
    if all(_is_number(value) for value in values):
        values = tuple(sorted(values))
    return Knob(axis.key, axis.text, values, draw, own.get(axis.key), defaults.get(axis.key))


# --- where nothing was asked


def usual_knobs(
    resolved: Resolved, own: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Values of the settings that are worth turning in this scenario, and why others are left out."""
    usual = {"max_num_seqs": SEATS, "max_num_batched_tokens": BUDGETS}
    found: dict[str, tuple[Any, ...]] = {key: values for key, values in usual.items() if key in own}
    left_out: list[str] = []
    if resolved.fleet is not None:
        left_out.append("The pools of a fleet have deployments of their own: name their settings with --tune.")
    elif resolved.model is not None and resolved.gpu is not None:
        if resolved.kv_pool is not None and "gpu_memory_utilization" in own:
            found["gpu_memory_utilization"] = SHARES
        found |= _of_profiles(resolved, left_out)
    if "long_prefill_token_threshold" in own:
        found["long_prefill_token_threshold"] = THRESHOLDS
    return {key: _with(values, own.get(key), defaults.get(key)) for key, values in found.items()}, left_out


def _with(values: tuple[Any, ...], *more: Any) -> list[Any]:
    """These values, and those that the scenario and vLLM have, too."""
    merged = list(dict.fromkeys((*values, *(value for value in more if value is not None))))
    return sorted(merged) if all(_is_number(value) for value in merged) else merged


def _of_profiles(resolved: Resolved, left_out: list[str]) -> dict[str, tuple[Any, ...]]:
    """Tensor parallelism and type of the KV cache, as far as step times of one kind are known for them."""
    from windtunnel.scenarios.schema import AutoCost, ProfileCost
    from windtunnel.sim.cost.bundled import bundled_profiles

    if isinstance(resolved.scenario.cost, ProfileCost):
        left_out.append(
            "tensor_parallel_size and kv_cache_dtype are left as they are: the scenario names one profile, and that is "
            "of one size and type."
        )
        return {}
    if resolved.profile is None or not isinstance(resolved.scenario.cost, AutoCost):
        return {"tensor_parallel_size": SIZES, "kv_cache_dtype": KV_DTYPES}
    here = next(each for each in bundled_profiles() if each.name == resolved.profile)
    alike = [
        each for each in bundled_profiles() if (each.model, each.gpu, each.dtype) == (here.model, here.gpu, here.dtype)
    ]
    found: dict[str, tuple[Any, ...]] = {}
    sizes = sorted({each.tensor_parallel_size for each in alike if each.kv_cache_dtype == here.kv_cache_dtype})
    if len(sizes) > 1:
        found["tensor_parallel_size"] = tuple(sizes)
    dtypes = [
        dtype
        for dtype in KV_DTYPES
        if {each.tensor_parallel_size for each in alike if each.kv_cache_dtype == dtype} >= set(sizes)
    ]
    if len(dtypes) > 1:
        found["kv_cache_dtype"] = tuple(dtypes)
    else:
        left_out.append(
            "kv_cache_dtype is left as it is: there is no bundled profile of this model and card with an fp8 KV cache, "
            "and step times of a formula are not to be held against those of a profile."
        )
    return found
