"""The folder of a search."""

from __future__ import annotations

from pathlib import Path

from windtunnel.sweeping import running

WRITTEN = ("runs.csv", "runs.parquet", "trials.csv", "report.html", "report.md", "scenario.toml", "optimize.json")
"""What ``Optimum.save`` writes into it."""


def check_folder(folder: Path, *, resume: bool) -> None:
    """Raises OutputError unless it is new, empty, or holds a search that is to be resumed."""
    running.check_folder(folder, resume=resume, what="runs", it="them")


def check_is_no_part(folder: Path, path: Path) -> None:
    """Raises OutputError if another output has the place of what a search writes into its folder."""
    running.check_is_no_part(folder, path, WRITTEN)
