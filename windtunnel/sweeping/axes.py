"""What ``--vary KEY=SPEC`` means: the values that a setting takes, or the range that they are drawn from.

===========================  ==========================================================================================
SPEC                         values
===========================  ==========================================================================================
``0.80:0.98:0.02``           first, last and step, the last included; exact in decimals, units allowed (``2k:16k:2k``)
``2k,4k,8k``                 a list; separate with ``;`` where a value has commas outside of brackets and quotes
``lin:1:64:8``               so many values at equal distances, both ends included
``log:1:64:7``               so many values at equal ratios, both ends included
``random:0.8:0.98``          drawn evenly from a range
``lograndom:1:64``           drawn so that equal ratios are equally likely
``choice:auto,fp8``          drawn from a list
===========================  ==========================================================================================

Settings that count something get whole numbers, whatever the range.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal
from math import exp, floor, isfinite, log
from typing import Any, get_args

from windtunnel.sweeping.names import alias_note, catalogue_name

MOST_VALUES = 1000
"""Of one setting in a sweep."""
LISTS = ("objectives", "goodput", "percentiles", "preferred_batch_size")
"""Settings that are lists: one value is a list of one."""

_DIGITS = 6
"""Significant digits of values that are computed: people read them, and write them into command lines."""
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµ]*)\s*")
_COUNT_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_EXAMPLE = "write FIRST:LAST:STEP, a list A,B,C, lin: or log:FIRST:LAST:HOW_MANY, random:LOW:HIGH or choice:A,B,C"


@dataclass(frozen=True, slots=True)
class Draw:
    """Where values are drawn from: a range of numbers, or a list."""

    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False
    choices: tuple[Any, ...] = ()
    """What is chosen from; then there is no range."""

    def at(self, share: float, *, on_grid: bool = False) -> Any:
        """The value below which a share (0 to 1) of all draws lies.

        ``on_grid`` says that the share is a step of a grid from 0 to 1, so that both ends are reached by their own
        share: of a list 0 is the first and 1 the last, each value with steps around it.
        """
        if self.choices:
            last = len(self.choices) - 1
            return self.choices[round(share * last) if on_grid else min(floor(share * len(self.choices)), last)]
        if self.is_whole:
            return self._whole(share, on_grid)
        if share in (0.0, 1.0):
            return self.high if share else self.low
        return _rounded(_between(self.low, self.high, share, is_log=self.is_log))

    def _whole(self, share: float, on_grid: bool) -> int:
        low, high = int(self.low), int(self.high)
        if on_grid:
            return round(_between(low, high, share, is_log=self.is_log))
        if self.is_log:
            return min(max(round(_between(low - 0.5, high + 0.5, share, is_log=True)), low), high)
        return min(low + floor(share * (high - low + 1)), high)


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting that is varied: either its values, or what they are drawn from."""

    key: str
    """As in the scenario file."""
    text: str
    """What was asked for."""
    values: tuple[Any, ...] = ()
    """Each once, GPUs, models and releases by the names of their catalogues."""
    draw: Draw | None = None
    repeated: tuple[Any, ...] = ()
    """All that was given, in its order: values that come twice stand there twice."""
    notes: tuple[str, ...] = ()
    """What names were taken as, in sentences for people."""

    @property
    def num_repeats(self) -> int:
        """Values that say what another one said."""
        return len(self.repeated) - len(self.values)

    @property
    def as_draw(self) -> Draw:
        """What is drawn from: the range, or one of the values."""
        return self.draw or Draw(choices=self.values)


def parse_vary(text: str) -> tuple[str, str]:
    """``KEY=SPEC`` in its two parts; a flag's spelling of the key will do.  Raises ValueError for anything else."""
    key, equals, spec = text.partition("=")
    key = key.strip().lstrip("-").replace("-", "_")
    if not key or not equals or not spec.strip():
        raise ValueError(f"{text!r} must read KEY=SPEC, such as gpu_memory_utilization=0.80:0.98:0.02; {_EXAMPLE}")
    return key, spec.strip()


def make_axis(name: str, spec: Any, *, bare_range: bool = False) -> Axis:
    """The axis of one setting, from text as on the command line, or from a sequence of values.

    ``bare_range`` takes ``LOW:HIGH`` for a range to draw from.  Raises ValueError for what has no such form,
    ScenarioError for an unknown setting.
    """
    from windtunnel.comparison_plan import setting_key

    if isinstance(spec, Set):
        raise ValueError(f"{name}: a set has no order, and results would follow it: give a list")
    if isinstance(spec, Iterator):
        spec = list(spec)
    if isinstance(spec, str):
        text = spec.strip()
        first = read_value(re.split(r"[,;:]", text)[0]) if text else ""
    else:
        text = ""
        first = next(iter(spec), "") if isinstance(spec, Iterable) and not isinstance(spec, Mapping) else spec
    key = setting_key(name, first)
    whole = is_whole(key)
    try:
        made = _from_text(key, text, whole, bare_range) if isinstance(spec, str) else _from_values(key, spec)
    except ValueError as error:
        raise ValueError(f"{name}={text or spec!r}: {error}") from None
    return made


def is_whole(key: str) -> bool:
    """Whether a setting counts something, so that only whole numbers make sense.  Raises ScenarioError if unknown."""
    kinds = _kinds_of(key)
    return int in kinds and not kinds & {float, str}


def _is_text(key: str) -> bool:
    from windtunnel.scenarios.errors import ScenarioError

    try:
        kinds = _kinds_of(key)
    except ScenarioError:  # whoever looks for the setting says so
        return False
    return str in kinds and not kinds & {bool, int, float}


def _kinds_of(key: str) -> set[type]:
    """Types that the schema has for a setting, whichever section it is in."""
    from windtunnel.scenarios.load import override_path
    from windtunnel.scenarios.schema import SECTIONS, Scenario

    path = override_path(key)
    models = SECTIONS.get(path[0], ()) if len(path) == 2 else (Scenario,)
    return {kind for model in models if path[-1] in model.model_fields for kind in _kinds(model, path[-1])}


def _kinds(model: Any, name: str) -> set[type]:
    def leaves(annotation: Any) -> Iterable[type]:
        parts = get_args(annotation)
        if parts:
            for part in parts:
                yield from leaves(part)
        elif isinstance(annotation, type):
            yield annotation

    return set(leaves(model.model_fields[name].annotation))


# --- from Python


def _from_values(key: str, spec: Any) -> Axis:
    if isinstance(spec, Mapping) or not isinstance(spec, Iterable):
        raise ValueError(f"give several values in a list, or text: {_EXAMPLE}")
    values = [_plain(value) for value in spec]
    return _listed_axis(key, ", ".join(map(str, values)), values)


def _plain(value: Any) -> Any:
    """Scalars of numpy as Python's own."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value


def _listed_axis(key: str, text: str, values: Sequence[Any], *, is_drawn: bool = False) -> Axis:
    """An axis of these values, or one that draws from them."""
    repeated = _checked(key, values)
    once = tuple(value for place, value in enumerate(repeated) if value not in repeated[:place])
    told = dict.fromkeys(alias_note(key, value) for value in values if isinstance(value, str))
    notes = tuple(filter(None, told))
    if is_drawn:
        return Axis(key, text, draw=Draw(choices=once), notes=notes)
    return Axis(key, text, once, repeated=repeated, notes=notes)


def _checked(key: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Lists as such where the setting is one, and names as their catalogues have them."""
    if not values or any(value == "" for value in values):
        raise ValueError("there is an empty value, or none at all: give at least one")
    if len(values) > MOST_VALUES:
        raise ValueError(f"{len(values):,} values are more than {MOST_VALUES:,}: take a larger step")
    listed = ([value] if key in LISTS and not isinstance(value, list) else value for value in values)
    return tuple(catalogue_name(key, value) for value in listed)


# --- from text


def _from_text(key: str, text: str, whole: bool, bare_range: bool) -> Axis:
    kind, colon, rest = text.partition(":")
    kind = kind.strip().lower()
    if colon and kind in ("lin", "log"):
        return _listed_axis(key, text, _spaced(rest, is_log=kind == "log", whole=whole))
    if colon and kind in ("random", "lograndom"):
        return Axis(key, text, draw=_range_to_draw(rest, is_log=kind == "lograndom", whole=whole))
    if colon and kind == "choice":
        return _listed_axis(key, text, [value_of(key, part) for part in _split(rest)], is_drawn=True)
    if bare_range and text.count(":") == 1 and _are_numbers(text.split(":")):
        return Axis(key, text, draw=_range_to_draw(text, is_log=False, whole=whole))
    return _listed_axis(key, text, list(_ranges_and_values(key, text)))


def _ranges_and_values(key: str, text: str) -> Iterable[Any]:
    for part in _split(text):
        numbers = part.split(":")
        if len(numbers) == 3 and _are_numbers(numbers):
            yield from _stepped(part)
        elif len(numbers) == 2 and _are_numbers(numbers):
            raise ValueError(f"{part!r} is a range without a step; {_EXAMPLE}")
        else:
            yield value_of(key, part)


def _split(text: str) -> list[str]:
    """The values of a list: apart by semicolons if there are any, else by commas, but not within brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    separator = ";" if ";" in text else ","
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth = max(depth + (letter in "[{") - (letter in "]}"), 0)
            if letter == separator and not depth:
                parts.append("")
                continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def value_of(key: str, text: str) -> Any:
    """``read_value``, but for a setting that is text the text: 0.10 is a release of vLLM, and 4090 a GPU."""
    value = read_value(text)
    return text if isinstance(value, int | float) and _is_text(key) else value


def read_value(text: str) -> Any:
    """A number, true or false, a list or a table as TOML writes them; text if it is none of these."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError, ValueError, RecursionError):
        value = text
    return value if isinstance(value, bool | int | float | str | list | dict) else text


def _are_numbers(parts: Sequence[str]) -> bool:
    return all(_NUMBER.fullmatch(part) for part in parts)


def _numbers(text: str, what: str, how_many: int) -> tuple[list[Decimal], str]:
    """Numbers of one unit, and that unit; counts (2k) are multiplied out where their units differ."""
    parts = text.split(":")
    found = [_NUMBER.fullmatch(part) for part in parts]
    if len(parts) != how_many or not all(found):
        raise ValueError(f"{text!r} must be {what}; {_EXAMPLE}")
    numbers, units = zip(*(match.groups() for match in found if match), strict=True)
    made = [Decimal(number) for number in numbers]
    if not all(number.is_finite() and abs(number) <= 10**15 for number in made):
        raise ValueError(f"{text!r}: numbers must be at most 10^15")
    if len(set(units)) == 1:
        return made, units[0]
    if all(not unit or unit in _COUNT_UNITS for unit in units):
        return [number * _COUNT_UNITS.get(unit, 1) for number, unit in zip(made, units, strict=True)], ""
    raise ValueError(f"{text!r}: give all numbers in the same unit")


def _stepped(text: str) -> list[Any]:
    (first, last, step), unit = _numbers(text, "a range FIRST:LAST:STEP of numbers", 3)
    if step <= 0 or last < first:
        raise ValueError(f"the range {text!r} must go up: FIRST at most LAST, and STEP above 0")
    number = int((last - first) / step) + 1
    if number > MOST_VALUES:
        raise ValueError(f"the range {text!r} has {number:,} values, more than {MOST_VALUES:,}: take a larger step")
    return [_with_unit(first + step * place, unit) for place in range(number)]


def _with_unit(number: Decimal, unit: str) -> Any:
    if unit:
        return f"{_written(number)}{unit}"
    return int(number) if number == number.to_integral_value() and number.as_tuple().exponent == 0 else float(number)


def _written(number: Decimal) -> str:
    return f"{number.normalize():f}"


def _spaced(text: str, *, is_log: bool, whole: bool) -> list[Any]:
    first, last, how_many = _ends(text)
    low, high, unit = first[0], last[0], first[1]
    _check_range(text, low, high, is_log=is_log)
    shares = [place / (how_many - 1) for place in range(how_many)]
    ends = {0.0: low, 1.0: high}
    made = [ends[share] if share in ends else _between(low, high, share, is_log=is_log) for share in shares]
    if whole:
        return [f"{round(value)}{unit}" if unit else round(value) for value in made]
    return [f"{_rounded(value):g}{unit}" if unit else _rounded(value) for value in made]


def _ends(text: str) -> tuple[tuple[float, str], tuple[float, str], int]:
    parts = text.rsplit(":", 1)
    if text.count(":") != 2 or not parts[1].strip().isdigit():
        raise ValueError(f"{text!r} must be FIRST:LAST:HOW_MANY, with how many values there are, as in log:1:64:7")
    how_many = int(parts[1])
    if not 2 <= how_many <= MOST_VALUES:
        raise ValueError(f"{text!r}: the number of values must be 2 to {MOST_VALUES:,}, got {how_many:,}")
    (low, high), unit = _numbers(parts[0], "a range LOW:HIGH of numbers", 2)
    return (float(low), unit), (float(high), unit), how_many


def _range_to_draw(text: str, *, is_log: bool, whole: bool) -> Draw:
    (low, high), unit = _numbers(text, "a range LOW:HIGH of numbers", 2)
    if unit:
        if unit not in _COUNT_UNITS or not whole:
            raise ValueError(f"{text!r}: a range to draw from has no units here: give plain numbers")
        low, high = low * _COUNT_UNITS[unit], high * _COUNT_UNITS[unit]
    _check_range(text, float(low), float(high), is_log=is_log)
    if whole and not (low == int(low) and high == int(high)):
        raise ValueError(f"{text!r}: this setting counts something: both ends must be whole numbers")
    return Draw(float(low), float(high), is_log=is_log, is_whole=whole)


def _check_range(text: str, low: float, high: float, *, is_log: bool) -> None:
    if not (isfinite(low) and isfinite(high)) or low >= high:
        raise ValueError(f"the range {text!r} must go up: its first end below its second")
    if is_log and low <= 0:
        raise ValueError(f"the range {text!r} must lie above 0: there are no equal ratios from {low:g} on")


def _between(low: float, high: float, share: float, *, is_log: bool) -> float:
    if is_log:
        return exp(log(low) + share * (log(high) - log(low)))
    return low + share * (high - low)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
