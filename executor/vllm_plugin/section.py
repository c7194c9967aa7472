"""Options of the plug-ins: each has a section of vLLM's ``additional_config``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


class Section:
    """One section, and how faults in it are told."""

    def __init__(self, name: str) -> None:
        self.name = f"additional_config.{name}"
        self._key = name

    def read(self, additional_config: Any, known: Collection[str]) -> dict[str, Any]:
        """What is given, nothing if the section is missing.  Raises ValueError for an unknown key."""
        given = additional_config.get(self._key, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ValueError(f"{self.name} must be an object, got {given!r}")
        unknown = [key for key in given if key not in known]
        if unknown:
            raise ValueError(f"{self.name} has unknown {', '.join(unknown)}: allowed are {', '.join(known)}")
        return dict(given)

    def named(self, key: str) -> str:
        """The full name of a key."""
        return f"{self.name}.{key}"

    def check(self, key: str, value: object, is_right: bool, allowed: str) -> None:
        """Raise ValueError for a value that is not allowed."""
        if not is_right:
            raise ValueError(f"{self.named(key)} must be {allowed}, got {value!r}")
