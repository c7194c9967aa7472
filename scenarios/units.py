"""Numbers with units as people write them: counts, durations, memory sizes, rates."""

from __future__ import annotations

import math
import re

_COUNT_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_COUNT = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*([kKmMgGtT]?)")

_DURATION_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION_UNITS_S["d"] = 86400.0
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zµ]+)\s*")

_SIZE_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_count(value: int | str) -> int:
    """A whole number, also as ``16k`` (16,000) or ``16K`` (16,384): lower case counts in 1000, upper case in 1024.

    That is how vLLM reads its own flags (``human_readable_int`` in ``vllm/engine/arg_utils.py``, 0.32), decimals
    with lower-case suffixes only included.  Raises ValueError for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return _checked(value)
    match = _COUNT.fullmatch(value.strip().replace("_", "")) if isinstance(value, str) else None
    if match is None:
        raise ValueError("must be a whole number such as 8192, 16k (16,000) or 16K (16,384)")
    number, suffix = match.groups()
    if "." not in number:
        return _checked(int(number[:40]) * _COUNT_SUFFIXES.get(suffix, 1))
    if not suffix.islower():
        raise ValueError(f"must be whole; decimals need a lower-case suffix, such as {number}k")
    return _checked(int(float(number[:40]) * _COUNT_SUFFIXES[suffix]))


MAX_COUNT = 10**15
"""Larger whole numbers are slips of the finger, and more than columns of 64 bits hold once they are multiplied."""


def _checked(number: int) -> int:
    if abs(number) > MAX_COUNT:
        raise ValueError("must be at most 10^15")
    return number


MAX_DURATION_S = 1e9
"""About 30 years; simulated time ends after 292."""


def parse_duration_s(value: float | str) -> float:
    """Seconds from a number of seconds or from text such as ``20m``, ``90s``, ``1h30m`` or ``250ms``.

    Raises ValueError for text that is no duration and for negative or infinite values.
    """
    seconds = _duration_s(value)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError("must be a duration of at least 0, such as 20m, 90s, 1h30m or a number of seconds")
    if seconds > MAX_DURATION_S:
        raise ValueError("must be at most 10^9 seconds (30 years)")
    return seconds


def _duration_s(value: float | str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _as_float(value)
    text = value.strip() if isinstance(value, str) else ""
    try:
        return float(text)
    except ValueError:
        pass
    seconds, position = 0.0, 0
    for part in _DURATION_PART.finditer(text):
        number, unit = part.groups()
        if part.start() != position or unit not in _DURATION_UNITS_S:
            return math.nan
        seconds += float(number) * _DURATION_UNITS_S[unit]
        position = part.end()
    return seconds if text and position == len(text) else math.nan


def parse_size_bytes(value: int | str) -> int:
    """Bytes from a number of bytes or from text with a unit; ``GiB`` is 2**30 and ``GB`` is 10**9.

    The bare suffixes of vLLM's flag (``16g`` = 16e9, ``16G`` = 16 * 2**30) work too.  Raises ValueError for anything
    else, naming both spellings, because mixing them up costs 7 % of the memory.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return _checked_size(value)
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = match.group(2) if match else ""
    factor = _SIZE_UNITS.get(unit, _COUNT_SUFFIXES.get(unit, 1 if not unit else 0))
    if match is None or not factor:
        raise ValueError(
            "must be bytes or a size with a unit: 16GiB is 16 * 2**30 bytes, 16GB is 16 * 10**9 bytes"
            f"{_respelled(match)}"
        )
    number = match.group(1)[:40]
    if "." in number and not unit:
        raise ValueError(
            f"must be whole: a number without a unit counts bytes; write {number}GiB for {number} * 2**30 bytes, or "
            f"{number}GB for {number} * 10**9"
        )
    return _checked_size(round(float(number) * factor) if "." in number else int(number) * factor)


def parse_gib(value: float | str) -> float:
    """A plain number of GiB (2**30 bytes) of at least 0, as vLLM's --swap-space and --cpu-offload-gb take it.

    Raises ValueError for anything else; for a size with a unit the message says how many GiB that is.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
        raise ValueError(f"must be a plain number of GiB (2^30 bytes), without a unit{_in_gib(match)}") from None
    if not (math.isfinite(number) and number >= 0):
        raise ValueError("must be a plain number of GiB (2^30 bytes) of at least 0")
    return number


def _in_gib(match: re.Match[str] | None) -> str:
    """How many GiB a size with a unit is, and what to write; nothing for what is no size."""
    unit = _unit(match)
    if match is None or unit is None:
        return ""
    number = match.group(1)[:40]
    if unit == "GiB":
        return f": write {number}"
    gib = f"{float(number) * _SIZE_UNITS[unit] / 2**30:.6g}"
    return f": {number} {unit} = {gib} GiB, so write {gib}"


def _respelled(match: re.Match[str] | None) -> str:
    """The right spelling of a unit in other letters; nothing for what is no size."""
    unit = _unit(match)
    return "" if match is None or unit is None else f"; write {match.group(1)[:40]}{unit}"


def _unit(match: re.Match[str] | None) -> str | None:
    """The unit that is meant in any case: "GB" by "gb" and (as vLLM has it) "g", "GiB" by "gib", "gi" and "G"."""
    if match is None or not match.group(2):
        return None
    given = match.group(2)
    letters = f"{given}ib".casefold() if given in "KMGT" else given.casefold().removesuffix("b") + "b"
    return next((unit for unit in _SIZE_UNITS if unit.casefold() == letters), None)


def _checked_size(num_bytes: int) -> int:
    if abs(num_bytes) > MAX_COUNT * 1000:
        raise ValueError("must be at most 10^18 bytes")
    return num_bytes


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf


def parse_rate(value: float | str) -> float:
    """Requests per second, above 0; ``inf`` is all at once.  Raises ValueError for anything else."""
    try:
        rate = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        rate = math.nan
    if not rate > 0:
        raise ValueError("must be a number of requests per second above 0, or inf")
    return rate


def parse_spec(text: str, key: str) -> dict[str, object]:
    """``NAME`` or ``NAME:field=value,field=value`` as the table it abbreviates, ``{key: NAME, field: value, ...}``.

    Values stay text unless they read as a number, or are true or false.  Raises ValueError for a field without a value.
    """
    name, _, rest = text.strip().partition(":")
    spec: dict[str, object] = {key: name.strip()}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        field, equals, value = item.partition("=")
        if not equals or not field.strip() or not value.strip():
            raise ValueError(f"{text!r} must read NAME:field=value,field=value; {item!r} has no value")
        spec[field.strip()] = _number_or_text(value.strip())
    return spec


def _number_or_text(text: str) -> object:
    if text in ("true", "false"):
        return text == "true"
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text
