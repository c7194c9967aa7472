"""Small frozen specifications from plain dicts, with errors that name what is allowed."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

T = TypeVar("T")

_SHORT = {"min": "minimum", "max": "maximum"}
_SHORT_OF = {long: short for short, long in _SHORT.items()}


def build(spec: Mapping[str, Any], kinds: Mapping[str, Callable[..., T]], *, tag: str, what: str) -> T:
    """The thing that a dict such as ``{"dist": "lognormal", "mean": 512, "sigma": 0.8}`` describes.

    ``kinds`` maps the value under ``tag`` to what makes the thing; its parameters are the other keys, ``min`` and
    ``max`` standing for ``minimum`` and ``maximum``.  Raises ValueError, beginning with ``what``, for an unknown kind
    or key (naming the nearest), a missing key or a value out of range.
    """
    if tag not in spec:
        raise ValueError(f"{what}: the key {tag!r} is missing, it must be one of {', '.join(kinds)}")
    kind = spec[tag]
    if kind not in kinds:
        raise ValueError(
            f"{what}: unknown {tag} {kind!r}{_nearest(str(kind), kinds)}, must be one of {', '.join(kinds)}"
        )
    parameters = inspect.signature(kinds[kind]).parameters
    known = [_SHORT_OF.get(name, name) for name in parameters]
    given = {key: value for key, value in spec.items() if key != tag}
    for key in given:
        if key not in known:
            raise ValueError(f"{what}: {kind} has no {key!r}{_nearest(key, known)}, it has {', '.join(known)}")
    needed = [_SHORT_OF.get(n, n) for n, p in parameters.items() if p.default is inspect.Parameter.empty]
    missing = [name for name in needed if name not in given]
    if missing:
        raise ValueError(f"{what}: {kind} needs {' and '.join(missing)}")
    try:
        return kinds[kind](**{_SHORT.get(key, key): value for key, value in given.items()})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{what}: {error}") from error


def shown(spec: Any) -> str:
    """A specification for a note: its kind and every field that is not the default."""
    if not is_dataclass(spec) or isinstance(spec, type):
        return repr(spec)
    values = ((field, getattr(spec, field.name)) for field in fields(spec) if field.repr)
    told = (
        f"{_SHORT_OF.get(field.name, field.name)}={shown(value)}" for field, value in values if value != field.default
    )
    return f"{type(spec).__name__}({', '.join(told)})"


def _nearest(name: str, known: Any) -> str:
    near = get_close_matches(name, list(known), 1)
    return f" (do you mean {near[0]!r}?)" if near else ""


def is_number(value: Any) -> bool:
    """Whether it is a real number (NaN and infinity included), not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_positive(name: str, value: Any, *, infinite: bool = False) -> None:
    """Raise ValueError unless the value is a number above 0, and finite unless ``infinite``."""
    if not is_number(value) or not value > 0 or (math.isinf(value) and not infinite):
        raise ValueError(f"{name} must be a number above 0{'' if infinite else ' and finite'}, got {value!r}")


def check_not_negative(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a finite number of at least 0."""
    if not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise ValueError unless the value is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise ValueError(f"{name} must be a whole number of at least {least:,}, got {value!r}")
