"""Values out of a ``config.json``, with an error that says which one is missing or of the wrong kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.sim.deployment.model_spec import LARGEST_SHAPE, check_whole


class ConfigReader:
    """Reads one table of a config; a missing key and null are the same.

    Every method raises ValueError, naming the model, the key and the value, for a value of another kind.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name

    def whole(self, key: str, *, default: int | None = None, least: int = 1, most: int = LARGEST_SHAPE) -> int:
        """A whole number in [least, most].  Without a default the key must be there."""
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise ValueError(f"{self.name}: the config lacks {key}: take the model's own, whole config.json")
            return default
        return check_whole(self.name, key, value, least, most)

    def number(self, key: str, default: float) -> float:
        """A finite number, also where it is written as text."""
        value = self.config.get(key)
        try:
            number = default if value is None else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self._wrong(key, "a finite number", value)
        return number

    def table(self, key: str) -> Mapping[str, Any]:
        """A table; an empty one where there is none."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(key, "a table", value)
        return value or {}

    def listed(self, key: str) -> Sequence[Any]:
        """A list; an empty one where there is none."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        return value or []

    def switch(self, key: str, default: bool = False) -> bool:
        """True or false; null is the default."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool) and value not in (0, 1):
            raise self._wrong(key, "true or false", value)
        return bool(value)

    def _wrong(self, key: str, kind: str, value: object) -> ValueError:
        return ValueError(f"{self.name}: {key} must be {kind}, got {value!r:.60}")
