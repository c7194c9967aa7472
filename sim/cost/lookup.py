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
    """Whether text is the path of a profile and not the name of a bundled one.

    With a separator or the ending ``.json`` it is a path, be there something or not.  Else the name of a bundled
    profile means that one, even where a file of the working folder is called so (``./NAME`` is the file), and any
    other file that is there is a path.
    """
    looks_so = text.endswith(".json") or "/" in text or "\\" in text
    return looks_so or (Path(text).is_file() and not any(each.name == text.casefold() for each in bundled_profiles()))


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
