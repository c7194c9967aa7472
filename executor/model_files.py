"""Reading the small files of a model's folder: what is missing, malformed or senseless is told by file and key."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MAX_TEMPERATURE = 2.0
"""Highest temperature of the OpenAI API."""


class ModelFileError(ValueError):
    """A file of a model is missing, cannot be read, or holds what it must not; the message says which and what to do.

    Also where a config was handed over as a mapping: then the message names the key only.
    """


class GenerationConfig(NamedTuple):
    """What a ``generation_config.json`` says about sampling; None is what it leaves open."""

    temperature: float | None = None
    top_p: float | None = None
    eos_token_ids: tuple[int, ...] = ()


def read_generation_config(folder: Path | None, vocab_size: int | None = None) -> GenerationConfig:
    """From ``generation_config.json``; empty where there is none.

    Raises ModelFileError for one that cannot be read, and for values out of range; token ids must be below
    ``vocab_size`` where that is known.
    """
    path = folder / "generation_config.json" if folder is not None else None
    if path is None or not path.is_file():
        return GenerationConfig()
    config = read_json_object(path)
    try:
        temperature = number_or_none(config, "temperature", least=0.0, most=MAX_TEMPERATURE)
        top_p = number_or_none(config, "top_p", above=0.0, most=1.0)
        return GenerationConfig(temperature, top_p, token_ids(config, "eos_token_id", vocab_size))
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises ModelFileError where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file: give the folder of a whole model") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:  # also bytes that are no UTF-8
        raise ModelFileError(f"{path}: not valid JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: must hold a JSON object, got {type(value).__name__}: download it again")
    return value


def number(
    config: Mapping[str, Any],
    key: str,
    default: float | None = None,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> float:
    """A finite number at a key, or the default where the key is absent.

    Raises ModelFileError for anything else, and if it is absent without a default.
    """
    value = config.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared as it is: a whole number may be too large for a float.
    if not is_number or not (least <= value <= most and above < value < math.inf and value > -math.inf):
        raise ModelFileError(f"{key} must be a number{_range(least, above, most)}, got {value!r}: correct the config")
    try:
        return float(value)
    except OverflowError:
        raise ModelFileError(f"{key} is too large: {str(value)[:20]}…: correct the config") from None


def number_or_none(config: Mapping[str, Any], key: str, **limits: float) -> float | None:
    """As ``number``, but None where the key is absent or null."""
    return None if config.get(key) is None else number(config, key, **limits)


def whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of at least 1 at a key; the default, if there is one, where the key is absent or null.

    Raises ModelFileError for anything else.
    """
    value = config.get(key)
    if value is None:
        if default is None:
            raise ModelFileError(f"the model's config lacks {key}: give a complete config.json")
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelFileError(f"{key} must be a whole number, got {value!r}: correct the config")
    if value < 1:
        raise ModelFileError(f"{key} must be at least 1, got {value}: correct the config")
    return value


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """True or false at a key; the default where it is absent or null.  Raises ModelFileError for anything else."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelFileError(f"{key} must be true or false, got {value!r}: correct the config")
    return value


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object at a key, empty where it is absent or null.  Raises ModelFileError for anything else."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ModelFileError(f"{key} must be an object, got {value!r}: correct the config")
    return value


def token_ids(config: Mapping[str, Any], key: str, vocab_size: int | None = None) -> tuple[int, ...]:
    """One token id or a list of them at a key, none where it is absent or null.

    Raises ModelFileError for anything else, and for ids outside the vocabulary.
    """
    value = config.get(key)
    ids: Iterable[Any] = () if value is None else value if isinstance(value, list | tuple) else (value,)
    end = math.inf if vocab_size is None else vocab_size
    if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < end for i in ids):
        limits = "at least 0" if vocab_size is None else f"in [0, vocab_size = {vocab_size})"
        raise ModelFileError(f"{key} must be one or several token ids {limits}, got {value!r}: correct the config")
    return tuple(dict.fromkeys(ids))


def _range(least: float, above: float, most: float) -> str:
    if most < math.inf:
        return f" in ({above:g}, {most:g}]" if above > least else f" in [{least:g}, {most:g}]"
    if above > -math.inf:
        return f" above {above:g}"
    return f" of at least {least:g}" if least > -math.inf else ""
