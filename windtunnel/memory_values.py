"""Values of the planner's Python functions: whatever programs have in hand, as the settings' readers take it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from windtunnel.memory_settings import several
from windtunnel.sim.deployment.gpu import GpuSpec
from windtunnel.sim.deployment.hf_config import model_from_config
from windtunnel.sim.deployment.model_spec import ModelSpec

MOST_PLANS = 2000
"""Of one sweep."""
NAMELESS = "MODEL"
"""What a model is called whose config does not tell its name, as a place to fill in a command line."""


def one_value(name: str, value: Any) -> Any:
    """The value of a setting of one plan; numbers of numpy become Python's, a config dict a model.

    Raises TypeError for a value of a type that the setting cannot have, ValueError for a config that no model can be
    read from, UnsupportedModel for one that is not modelled.
    """
    if name in _OBJECTS:
        return None if value is None else _OBJECTS[name](value)
    value = _plain(value)
    if isinstance(value, Mapping):
        raise TypeError(f"{name} must be a number or a text, got {type(value).__name__}")
    if _holds_several(value):
        raise TypeError(f"{name} must be one value, got {type(value).__name__}; memory_sweep takes several")
    return value


def all_values(name: str, given: Any) -> list[Any]:
    """The values of a setting of a sweep: any iterable (a set in order), text as on the command line, or one value.

    Raises TypeError and ValueError as ``one_value`` does, and ValueError for no value at all.  At most one more than
    ``MOST_PLANS`` is taken of what never ends.
    """
    if not _holds_several(given):
        return several(name, one_value(name, given)) if isinstance(given, str) else [one_value(name, given)]
    values: list[Any] = []
    for value in islice(_in_order(given), MOST_PLANS + 1):
        values += several(name, value) if isinstance(value, str) else [one_value(name, value)]
    if not values:
        raise ValueError(f"{name}: there is no value in it; give at least one, or leave it out")
    return values


def _model(given: Any) -> str | ModelSpec:
    if isinstance(given, str | ModelSpec):
        return given
    if isinstance(given, Path):
        return str(given)
    if isinstance(given, Mapping):
        named = given.get("_name_or_path")
        model = model_from_config(given, "the config")
        return replace(model, name=named if isinstance(named, str) and named else NAMELESS)
    raise TypeError(
        "model must be a bundled name, the path of a config.json, what is in one as a dict (config.to_dict() of "
        f"Transformers) or a ModelSpec, got {type(given).__name__}"
    )


def _gpu(given: Any) -> str | GpuSpec:
    if isinstance(given, str | GpuSpec):
        return given
    raise TypeError(
        f"gpu must be a name such as 'h100' or a GpuSpec (or give gpu_memory_gib), got {type(given).__name__}"
    )


_OBJECTS = {"model": _model, "gpu": _gpu}


def _plain(value: Any) -> Any:
    """Scalars of numpy and the like as Python's own."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value


def _holds_several(value: Any) -> bool:
    if isinstance(value, str | bytes | Path | Mapping | ModelSpec | GpuSpec):
        return False
    return isinstance(value, Iterable) and getattr(value, "ndim", None) != 0


def _in_order(values: Iterable[Any]) -> Iterable[Any]:
    """As they come; a set, which has no order of its own, sorted."""
    if not isinstance(values, Set):
        return values
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=str)
