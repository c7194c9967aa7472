"""A job: a function by its name, an argument, and a key that says when two jobs have the same result."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from windtunnel.workers.errors import JobFailed

_WITHOUT_RESULTS = ("calibrate", "cli", "executor", "reports", "ui", "__pycache__")
"""Folders of the package that no result depends on."""
_COMPUTED_WITH = ("numpy", "scipy")
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Job:
    """One piece of work: a function that any process can import, called with one argument.

    The same function and argument must always give the same result, and that must be plain data (dict, list, text,
    numbers, true, false, None).
    """

    function: str
    """``package.module:name``."""
    argument: Any
    """Can be pickled.  Its ``identity()``, if it has one, or else itself is what the key is made from."""

    @property
    def key(self) -> str:
        """SHA-256 of the function, the argument and the version of code and data: the same key, the same result.

        Raises TypeError for an argument that is no plain data and has no ``identity()``.
        """
        identity = getattr(self.argument, "identity", None)
        said = [self.function, identity() if callable(identity) else self.argument, content_version()]
        return hashlib.sha256(canonical_json(said).encode("ascii")).hexdigest()


@dataclass(frozen=True, slots=True)
class Done:
    """A job that has its result, told at once."""

    index: int
    """Its place among the jobs."""
    job: Job
    result: Any
    was_cached: bool
    """Whether it came from the store, or from an equal job, instead of being done now."""
    elapsed_s: float
    """Wall-clock seconds that doing it took; 0 if it was cached."""


def load_function(name: str) -> Callable[[Any], Any]:
    """The function that ``package.module:name`` stands for.  Raises ValueError for a name that does not read so."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ValueError(f"function is {name!r}, but must read package.module:name")
    found: Callable[[Any], Any] = getattr(import_module(module), attribute)
    return found


def result_text(function: str, argument: Any) -> str:
    """Call the function; its result as the JSON that is kept and handed out.  Raises JobFailed for what is none."""
    result = load_function(function)(argument)
    try:
        return json.dumps(result, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise JobFailed(f"{function} returned what is no plain data ({error}): numbers must be Python's own") from error


def canonical_json(value: Any) -> str:
    """JSON in ASCII with sorted keys and no spaces: equal data, equal text.

    Paths become text, tuples lists, numpy's numbers Python's own and infinity the text "inf".  Raises TypeError for
    everything else that JSON has not, NaN included.
    """
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return _plain_float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy, which need not be loaded for this
        return _plain(value.tolist())
    raise TypeError(f"{value!r} is no plain data: a job's argument is made of dicts, lists, text and numbers")


def _plain_float(value: float) -> float | str:
    if value != value:
        raise TypeError("NaN is no plain data: use None for what is not known")
    return value if value not in (float("inf"), float("-inf")) else "inf" if value > 0 else "-inf"


@cache
def content_version() -> str:
    """A digest of all that results depend on beside the jobs: this package's code and data, numpy, scipy and Python.

    Results that were kept under another one are not used again.
    """
    digest = hashlib.sha256(f"Python {platform.python_version_tuple()[:2]}".encode())
    for package in _COMPUTED_WITH:
        digest.update(f"{package} {metadata.version(package)}".encode())
    for path in _files(_PACKAGE):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode("utf-8", "surrogateescape"))
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name not in _WITHOUT_RESULTS)
        yield from (Path(folder, name) for name in sorted(names) if not name.endswith((".pyc", ".html")))
