"""``windtunnel report``: turn a saved run into something to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli import options
from windtunnel.cli.output import emit


def report(
    run_dir: Annotated[Path, options.run_folder_argument()],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one self-contained HTML file.", show_default=False),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of a table.")] = False,
    evictions: Annotated[
        bool, typer.Option("--evictions", help="Print every preemption: who lost what for whom, and how full it was.")
    ] = False,
) -> None:
    """Show a saved run: as a table, as Markdown, or as an HTML file that works offline.

    \b
    Examples:
      windtunnel report runs/64
      windtunnel report runs/64 --html report.html
      windtunnel report runs/64 --markdown >> pull-request.md
      windtunnel report runs/64 --evictions | less
    """
    if markdown and evictions:
        raise typer.BadParameter("give one of them", param_hint="--markdown, --evictions")
    from windtunnel.api import load_run
    from windtunnel.rundir import check_can_write_file

    run = load_run(run_dir)
    if html is not None:
        check_can_write_file(html)
        run.report(html)
    if evictions:
        from windtunnel.reports.economics import eviction_lines

        emit("\n".join(eviction_lines(run.records, run.context.label)))
    elif markdown or html is None:
        emit((run.markdown() if markdown else run.text()).rstrip("\n"))
