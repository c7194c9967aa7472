"""Where results go: which files a command may write, what it prints, and the exit code that a result has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import typer

from windtunnel.cli.errors import EXIT_INFEASIBLE, EXIT_SLO_BREACHED
from windtunnel.cli.output import emit, note


class Printable(Protocol):
    """A result that can be printed."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""

    def text(self) -> str:
        """For a terminal."""

    def markdown(self) -> str:
        """For a pull request."""


class Judged(Protocol):
    """A result of several deployments or points."""

    @property
    def is_infeasible(self) -> bool:
        """Whether none of them starts."""

    @property
    def slo_passed(self) -> bool | None:
        """Whether one of them keeps the objectives; None without any."""


def check_one_form(*, as_json: bool, markdown: bool) -> None:
    """Raises BadParameter if both are asked for: one result is printed once."""
    if as_json and markdown:
        raise typer.BadParameter("give one of them", param_hint="--json, --markdown")


def check_files(files: Mapping[str, Path | None], inputs: Iterable[object]) -> None:
    """Find out before the work, not after it, that a file cannot be written, is read for it or is named twice.

    ``files`` are by their flags.  Raises OutputError and BadParameter.
    """
    from windtunnel.rundir import check_can_write_file

    given = {flag: path for flag, path in files.items() if path is not None}
    read = tuple(inputs)
    earlier: dict[Path, str] = {}
    for flag, path in given.items():
        check_can_write_file(path, inputs=read)
        first = earlier.setdefault(path.resolve(), flag)
        if first != flag:
            raise typer.BadParameter(f"{first} and {flag} both name {path}: give them different names")


def check_is_parquet(path: Path | None) -> None:
    """Raises BadParameter for a table whose name would make it something else."""
    if path is not None and path.suffix.lower() not in (".parquet", ".pq"):
        raise typer.BadParameter(f"{path} must end in .parquet or .pq", param_hint="--parquet")


def tell_written(paths: Iterable[Path | None], *, quiet: bool) -> None:
    """Say which files and folders there are now."""
    written = [str(path) for path in paths if path is not None]
    if written and not quiet:
        note(f"wrote {', '.join(written)}")


def print_result(found: Printable, *, as_json: bool, markdown: bool) -> None:
    """Print it in the form that is asked for."""
    from windtunnel.rundir import to_json

    if as_json:
        emit(to_json(found.to_dict()))
    else:
        emit((found.markdown() if markdown else found.text()).rstrip("\n"))


def exit_as(found: Judged) -> None:
    """Raises typer.Exit(4) if nothing starts, (99) if nothing keeps the objectives."""
    if found.is_infeasible:
        raise typer.Exit(EXIT_INFEASIBLE)
    if found.slo_passed is False:
        raise typer.Exit(EXIT_SLO_BREACHED)
