"""The record of where each value of a scenario came from, kept while it is resolved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from windtunnel.scenarios.errors import ScenarioError
from windtunnel.scenarios.workloads.errors import TraceError, printable
from windtunnel.sim.cost.profile import ProfileError
from windtunnel.sim.deployment.model import UnsupportedModel

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded

T = TypeVar("T")

SECTION_ORDER = (
    *("scenario", "deployment", "engine", "batching", "speculative", "workload", "cost", "slo"),
    *("price", "power", "gateway", "tenants", "fleet", "run"),
)
WINDTUNNEL_DEFAULT = "windtunnel default"
_SAY_IT_ALL = (ScenarioError, UnsupportedModel, TraceError, ProfileError)
"""ValueErrors with a place, a remedy and an exit code of their own already."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting as it was resolved."""

    section: str
    key: str
    value: Any
    source: str
    """FILE:LINE, a flag, or which default applied."""


class Ledger:
    """Collects settings with their sources, warnings and notes, and puts a source before every complaint."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.warnings: list[str] = []
        """What may make the answer another one than was meant."""
        self.notes: list[str] = list(loaded.notes)
        """What was decided on the way."""
        self._entries: list[Entry] = []

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All settings so far, section by section."""
        return tuple(sorted(self._entries, key=lambda entry: SECTION_ORDER.index(entry.section)))

    def note(self, section: str, key: str, value: Any, default_source: str = WINDTUNNEL_DEFAULT) -> None:
        """Write down a setting; ``default_source`` is its source unless somebody gave it.  None is no setting."""
        if value is not None:
            path = (key,) if section == "scenario" else (section, key)
            shown = printable(value) if isinstance(value, str) else value
            self._entries.append(Entry(section, key, shown, self.loaded.source_of(*path) or default_source))

    def pick(self, section: str, key: str, given: T | None, default: T, default_source: str) -> T:
        """What was given, or the default; written down either way."""
        value = default if given is None else given
        self.note(section, key, value, default_source)
        return value

    def blame(self, message: str, section: str, *keys: str) -> ScenarioError:
        """A complaint that begins with where the first of the keys that somebody gave came from."""
        sources = [source for key in keys if (source := self.loaded.source_of(section, key))]
        return ScenarioError(f"{sources[0] if sources else self.loaded.origin}: {message}")

    def attempt(self, section: str, keys: str | tuple[str, ...], make: Callable[[], T]) -> T:
        """What ``make`` returns; a ValueError of it becomes a complaint about the key that its message names."""
        keys = (keys,) if isinstance(keys, str) else keys
        try:
            return make()
        except _SAY_IT_ALL:
            raise
        except ValueError as error:
            named = [key for key in keys if key in str(error)]
            raise self.blame(str(error), section, *(named or keys)) from error
