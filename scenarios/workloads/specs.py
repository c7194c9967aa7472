"""Small frozen specifications from plain dicts, with errors that name what is allowed.

A specification is a dataclass (or a function that makes one) whose parameters carry their meaning and their range as
``Annotated[float, POSITIVE, "Mean, in tokens."]``.  Checks, messages and the JSON Schema all follow from that.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from windtunnel.scenarios.units import parse_count, parse_duration_s, parse_spec
from windtunnel.scenarios.workloads.cells import MAX_TOKENS

T = TypeVar("T")

_SHORT = {"min": "minimum", "max": "maximum"}
_SHORT_OF = {long: short for short, long in _SHORT.items()}

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a parameter may be: from ``least`` or ``above`` (one of them is given) to ``most`` or ``below``.

    NaN is none of them.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    whole: bool = False
    infinite: bool = False
    seconds: bool = False
    """The number is a duration: text such as ``20s`` is read as one."""

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError, with name, range and value, unless the value is such a number."""
        if not self._holds(value):
            raise ValueError(f"{name} must be {self.words}, got {value!r}")

    def read(self, value: Any) -> Any:
        """The number in a text with a unit (``2k``, ``20s``); what is no text as it is.  Raises ValueError."""
        if not isinstance(value, str):
            return value
        return parse_duration_s(value) if self.seconds else parse_count(value)

    @property
    def words(self) -> str:
        """The range as it stands behind "must be"."""
        bounded = self.infinite or self.most is not None or self.below is not None
        kind = "whole number" if self.whole else "number" if bounded else "finite number"
        low = f"of at least {self.least:,}" if self.least is not None else f"above {self.above:,}"
        high = f"at most {self.most:,}" if self.most is not None else ""
        high = f"below {self.below:,}" if self.below is not None else high
        return f"a {kind} {low}{f' and {high}' if high else ''}"

    def _holds(self, value: Any) -> bool:
        if not (is_whole(value) if self.whole else is_number(value)):
            return False
        if abs(value) == math.inf and not self.infinite:
            return False
        return bool(
            (value >= self.least if self.least is not None else value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )


POSITIVE = Range(above=0)
POSITIVE_OR_INFINITE = Range(above=0, infinite=True)
NOT_NEGATIVE = Range(least=0)
COUNT = Range(least=1, whole=True)
TOKENS = Range(least=1, most=MAX_TOKENS, whole=True)
SHARE = Range(least=0, most=1)
SECONDS = Range(above=0, seconds=True)
SECONDS_OR_NONE = Range(least=0, seconds=True)


@dataclass(frozen=True, slots=True)
class Nested:
    """Marks a parameter that is itself a distribution of "lengths" or "durations"."""

    of: Literal["lengths", "durations", "arrivals"]


@dataclass(frozen=True, slots=True)
class Keys:
    """Marks ``**parameters``: all keys whose whole name has this pattern."""

    pattern: str


class Parameter(NamedTuple):
    """One key of a specification."""

    key: str
    """As it is written; ``min`` and ``max`` where the attribute is ``minimum`` or ``maximum``."""
    attribute: str
    type: Any
    """Without Annotated and without None."""
    doc: str
    default: Any
    """REQUIRED where the key must be there."""
    range: Range | None
    nested: Nested | None
    keys: Keys | None
    """Where the parameter stands for several keys."""

    def check(self, value: Any) -> None:
        """Raise ValueError unless the value is one that the parameter may have."""
        if value is None and self.default is None:
            return
        if self.range is not None:
            self.range.check(self.key, value)
        elif self.type is bool and not isinstance(value, bool):
            raise ValueError(f"{self.key} must be true or false, got {value!r}")
        elif get_origin(self.type) is Literal and value not in get_args(self.type):
            allowed = " or ".join(f'"{choice}"' for choice in get_args(self.type))
            raise ValueError(f"{self.key} must be {allowed}, got {value!r}")

    def read(self, value: Any) -> Any:
        """The value, a number with a unit or a true in text read as such."""
        if self.type is bool and value in ("true", "false"):
            return value == "true"
        try:
            return self.range.read(value) if self.range is not None else value
        except ValueError:
            assert self.range is not None
            raise ValueError(f"{self.key} must be {self.range.words}, got {value!r}") from None


def parameters_of(make: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The keys of a specification, in order."""
    return _parameters_of(cast(Hashable, make))


@cache
def _parameters_of(make: Any) -> tuple[Parameter, ...]:
    hints = get_type_hints(make, include_extras=True)
    return tuple(_parameter(parameter, hints[name]) for name, parameter in inspect.signature(make).parameters.items())


def _parameter(parameter: inspect.Parameter, hint: Any) -> Parameter:
    plain, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    is_many = parameter.kind is inspect.Parameter.VAR_KEYWORD
    return Parameter(
        key=_SHORT_OF.get(parameter.name, parameter.name),
        attribute=parameter.name,
        type=_without_none(plain),
        doc=next((mark for mark in marks if isinstance(mark, str)), ""),
        default=None if is_many else parameter.default,
        range=next((mark for mark in marks if isinstance(mark, Range)), None),
        nested=next((mark for mark in marks if isinstance(mark, Nested)), None),
        keys=next((mark for mark in marks if isinstance(mark, Keys)), None),
    )


def _without_none(hint: Any) -> Any:
    if get_origin(hint) not in (Union, UnionType):
        return hint
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 else tuple(kinds)


def check_parameters(spec: Any) -> None:
    """Check every parameter of a dataclass against its range; for ``__post_init__``.  Raises ValueError."""
    for parameter in parameters_of(type(spec)):
        parameter.check(getattr(spec, parameter.attribute))


def build(spec: Mapping[str, Any], kinds: Mapping[str, Callable[..., T]], *, tag: str, what: str) -> T:
    """The thing that a dict such as ``{"dist": "lognormal", "mean": 512, "sigma": 0.8}`` describes.

    ``kinds`` maps the value under ``tag`` to what makes the thing; its parameters are the other keys, ``min`` and
    ``max`` standing for ``minimum`` and ``maximum``.  Raises ValueError, beginning with ``what``, for an unknown kind
    or key (naming the nearest), a missing key or a value out of range.
    """
    if tag not in spec:
        raise ValueError(f"{what}: the key {tag!r} is missing, it must be one of {', '.join(kinds)}")
    kind = spec[tag]
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(
            f"{what}: unknown {tag} {kind!r}{_nearest(str(kind), kinds)}, must be one of {', '.join(kinds)}"
        )
    return _made({key: value for key, value in spec.items() if key != tag}, kinds[kind], what, kind)


def from_text(text: str, read: Callable[[str], T], tag: str, what: str) -> T | dict[str, object]:
    """A text as the number that it is (as ``read`` reads it), or as the table that it abbreviates.

    Raises ValueError, beginning with ``what``, for text that is neither.
    """
    try:
        return read(text)
    except ValueError:
        pass
    try:
        return parse_spec(text, tag)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def build_one(spec: Mapping[str, Any], make: Callable[..., T], what: str) -> T:
    """As ``build``, where there is only one kind and so no tag."""
    return _made(spec, make, what, "")


def _made(given: Mapping[str, Any], make: Callable[..., T], what: str, kind: str) -> T:
    parameters = parameters_of(make)
    unknown = [key for key in given if _find(parameters, key) is None]
    known = [parameter.key for parameter in parameters]
    if unknown:
        has = f"{kind} has no" if kind else "there is no key"
        raise ValueError(f"{what}: {has} {unknown[0]!r}{_nearest(unknown[0], known)}, it has {_listed(parameters)}")
    missing = [p.key for p in parameters if p.default is REQUIRED and p.key not in given]
    if missing:
        raise ValueError(f"{what}: {f'{kind} needs' if kind else 'missing'} {' and '.join(missing)}")
    try:
        return make(**{_SHORT.get(key, key): _checked(parameters, key, value) for key, value in given.items()})
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{what}: {error}") from error


def _find(parameters: tuple[Parameter, ...], key: str) -> Parameter | None:
    for parameter in parameters:
        if parameter.keys is None and parameter.key == key:
            return parameter
        if parameter.keys is not None and re.fullmatch(parameter.keys.pattern, key):
            return parameter
    return None


def _checked(parameters: tuple[Parameter, ...], key: str, value: Any) -> Any:
    parameter = _find(parameters, key)
    assert parameter is not None, "unknown keys are refused before"
    parameter = parameter._replace(key=key)
    read = parameter.read(value)
    parameter.check(read)
    return read


def _listed(parameters: tuple[Parameter, ...]) -> str:
    return ", ".join("p50, p99, …" if parameter.keys else parameter.key for parameter in parameters)


def shown(spec: Any) -> str:
    """A specification for a note, written as on the command line: its kind and every key that is not the default."""
    if not is_dataclass(spec) or isinstance(spec, type):
        return str(spec).lower() if isinstance(spec, bool) else f"{spec:g}" if isinstance(spec, float) else str(spec)
    told = ",".join(f"{key}={shown(value)}" for key, value in _told(spec))
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(spec).__name__).lower().removesuffix("_pause")
    return f"{kind}:{told}" if told else kind


def _told(spec: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(spec, "keys_shown"):
        yield from spec.keys_shown()
        return
    for item in fields(spec):
        value = getattr(spec, item.name)
        if item.repr and value != item.default:
            yield _SHORT_OF.get(item.name, item.name), value


def _nearest(name: str, known: Any) -> str:
    near = get_close_matches(name, list(known), 1)
    return f" (do you mean {near[0]!r}?)" if near else ""


def is_number(value: Any) -> bool:
    """Whether it is a real number (NaN and infinity included), not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether it is a whole number by its type, not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
