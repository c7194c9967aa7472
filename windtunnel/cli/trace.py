"""``windtunnel trace``: turn a saved run into a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli import options
from windtunnel.cli.output import note


def trace(
    run_dir: Annotated[Path, options.run_folder_argument()],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The trace, a JSON file.", show_default=False)
    ],
    start: Annotated[
        str, typer.Option("--start", metavar="TIME", help="Begin at this simulated time: 90s, 20m.")
    ] = "0",
    end: Annotated[
        str | None, typer.Option("--end", metavar="TIME", help="Stop at this simulated time.", show_default=False)
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=1, help="Most steps, and most requests, to write.", show_default=False
        ),
    ] = None,
) -> None:
    """Turn a saved run into a trace that ui.perfetto.dev and chrome://tracing show.

    \b
    Examples:
      windtunnel trace runs/64 -o trace.json
      windtunnel trace runs/64 -o minute.json --start 20m --end 21m
    """
    from windtunnel.api import load_run
    from windtunnel.rundir import OutputError, check_can_write_file
    from windtunnel.scenarios.errors import ScenarioError
    from windtunnel.scenarios.units import parse_duration_s

    run = load_run(run_dir)
    check_can_write_file(output)
    try:
        start_s, end_s = parse_duration_s(start), None if end is None else parse_duration_s(end)
        stats = run.trace(output, start_s=start_s, end_s=end_s, limit=limit)
    except OutputError:
        raise
    except ValueError as error:
        raise ScenarioError(f"--start {start}, --end {end or 'the end'}: {error}") from error
    if stats.num_steps_left_out or stats.num_requests_left_out:
        note(f"left out: {stats.num_steps_left_out:,} steps and {stats.num_requests_left_out:,} requests")
