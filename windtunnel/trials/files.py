"""The files that a scenario reads: where they are, and digests of what is in them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.sim.deployment.model import is_bundled

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded

_PATHS = (
    ("workload", "trace"),
    ("cost", "path"),
    ("batching", "config"),
    ("speculative", "acceptance"),
    ("speculative", "draft_model"),
    ("deployment", "model"),
)
"""Keys whose value is, or may be, a path."""
_MODELS = ("model", "draft_model")
"""Those whose value may be a bundled name instead."""


def with_absolute_paths(loaded: Loaded, table: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The scenario's table with its paths absolute, and a digest of each file or folder that is there.

    What is not there stays as it is: whoever needs it says so.
    """
    table, digests = copy.deepcopy(table), {}
    for sections, is_pool in _tables(table):
        for section, key, value in _given(sections):
            path = loaded.base_dir / Path(value).expanduser() if is_pool else loaded.path_of(section, key, value)
            if path.exists():
                sections[section][key] = str(path.absolute())
                digests[str(path.absolute())] = digest(path)
    return table, digests


def _tables(table: dict[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Whatever holds sections: the scenario itself, and the pools of its fleet, whose paths start at its file."""
    yield table, False
    pools = (table.get("fleet") or {}).get("pools") or {}
    yield from ((pool, True) for pool in pools.values())


def _given(sections: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Section, key and value of what may be a path."""
    for section, key in _PATHS:
        keys = sections.get(section)
        value = keys.get(key) if isinstance(keys, dict) else None
        if isinstance(value, str) and not (key in _MODELS and is_bundled(value)):
            yield section, key, value


def digest(path: Path) -> str:
    """SHA-256 of a file, or of the JSON files of a folder; computed again only if size or time of a file changed."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    parts = [f"{file.name} {_digest(str(file), *_stamp(file))}" for file in files]
    return parts[0].rpartition(" ")[2] if files == [path] else hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=256)
def _digest(file: str, mtime_ns: int, size: int) -> str:  # noqa: ARG001  # what a new digest is due by
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
