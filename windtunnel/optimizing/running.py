"""The folder of a search."""

from __future__ import annotations

from pathlib import Path

from windtunnel.rundir import OutputError
from windtunnel.sweeping.running import RESULTS_FOLDER

WRITTEN = ("runs.csv", "runs.parquet", "trials.csv", "report.html", "report.md", "scenario.toml", "optimize.json")
"""What ``Optimum.save`` writes into it."""


def check_folder(folder: Path, *, resume: bool) -> None:
    """Raises OutputError unless it is new, empty, or holds a search that is to be resumed."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file: name a folder to write into")
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if RESULTS_FOLDER in found:
        if not resume:
            raise OutputError(f"{folder} holds runs already: add --resume to go on with them, or name another folder")
    elif found:
        raise OutputError(f"{folder} is not empty ({found[0]}) and holds no runs: name another folder")


def check_is_no_part(folder: Path, path: Path) -> None:
    """Raises OutputError if another output has the place of what a search writes into its folder."""
    if not path.resolve().is_relative_to(folder.resolve()):
        return
    inside = path.resolve().relative_to(folder.resolve())
    if inside.parts[:1] == (RESULTS_FOLDER,) or str(inside) in WRITTEN:
        raise OutputError(f"cannot write {path}: -o {folder} writes its own there; name another file")
