"""A scenario as the text of a file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def scenario_text(loaded: Loaded) -> str:
    """What was loaded, with every change, as a scenario file that gives the same run wherever it lies."""
    from windtunnel.trials.files import with_absolute_paths

    table = loaded.scenario.model_dump(exclude_unset=True, exclude={"compare", "teaches"})
    return to_toml(with_absolute_paths(loaded, table)[0])


def to_toml(table: Mapping[str, Any]) -> str:
    """A table of plain data as TOML; None is left out, as TOML has none."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping) and value is not None}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_key(key)}]", *_lines(value)]
    return "\n".join(lines).strip() + "\n"


def _lines(section: Mapping[str, Any]) -> Iterator[str]:
    for key, value in section.items():
        if value is not None:
            yield f"{_key(key)} = {_value(value)}"


def _key(key: Any) -> str:
    return str(key) if _BARE.fullmatch(str(key)) else _text(str(key))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        pairs = (f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _float(value: float) -> str:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(value)


def _text(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, but for the delete character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
