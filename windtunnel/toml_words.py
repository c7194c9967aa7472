"""Keys and values as TOML has them; Python's own library only reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def toml_key(key: str) -> str:
    """A key, in quotes where it needs them."""
    is_bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if is_bare else _text(key)


def toml_value(value: Any) -> str:
    """A value in one line; tables within it are inline ones, without what is None."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{toml_key(name)} = {toml_value(each)}" for name, each in value.items() if each is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    return str(value)


def _text(text: str) -> str:
    """A basic string of TOML: as JSON has it, but for DEL, which TOML does not take as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
