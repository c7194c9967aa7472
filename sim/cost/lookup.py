"""A profile by what people call it: the name of a bundled one, or the path of a file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from windtunnel.sim.cost.bundled import bundled_profiles, load_bundled
from windtunnel.sim.cost.profile import load_profile
from windtunnel.sim.engine.protocols import CostModel


class NamedProfile(NamedTuple):
    """A profile that was found."""

    name: str
    """The bundled name, or the path as it was given."""
    path: Path
    cost: CostModel


def is_path(text: str) -> bool:
    """Whether text is the path of a profile and not the name of a bundled one: it looks like one, or is there."""
    return text.endswith(".json") or "/" in text or "\\" in text or Path(text).is_file()


def load_named(text: str) -> NamedProfile:
    """The profile of that bundled name or path.

    Raises ValueError, naming the nearest, for an unknown name; ProfileError for a file that is no valid profile and
    OSError for one that cannot be read.
    """
    if is_path(text):
        path = Path(text).expanduser()
        return NamedProfile(text, path, load_profile(path))
    cost = load_bundled(text)
    found = next(each for each in bundled_profiles() if each.name == text.casefold())
    return NamedProfile(found.name, found.path, cost)
