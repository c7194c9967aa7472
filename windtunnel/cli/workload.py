"""``windtunnel workload``: describe a request trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli.output import emit


def workload(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The trace.", show_default=False)],
    format: Annotated[  # noqa: A002 -- the flag's name
        str, typer.Option("--format", metavar="NAME", help="Format, if not to be recognised.")
    ] = "auto",
    time_unit: Annotated[
        str, typer.Option("--time-unit", metavar="UNIT", help="Unit of its times, if not to be recognised.")
    ] = "auto",
    on_bad_row: Annotated[
        str, typer.Option("--on-bad-row", metavar="error|skip", help="What to do with a row that is wrong.")
    ] = "error",
    chunk_tokens: Annotated[
        str | None,
        typer.Option("--chunk-tokens", metavar="N", help="Mooncake: tokens in a hashed block.", show_default=False),
    ] = None,
    trace_model: Annotated[
        str | None,
        typer.Option(
            "--trace-model", metavar="NAME", help="BurstGPT: only requests of this model.", show_default=False
        ),
    ] = None,
    trace_run: Annotated[
        str | None,
        typer.Option(
            "--trace-run", metavar="N", help="vllm bench serve: which run of the file, from 0.", show_default=False
        ),
    ] = None,
    all_turns: Annotated[
        bool | None,
        typer.Option("--all-turns", help="ShareGPT: whole conversations, not just first turns.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a request trace asks for: its format and unit, rate, lengths and shared prefixes.

    \b
    Examples:
      windtunnel workload trace.csv
      windtunnel workload trace.jsonl --json
    """
    from windtunnel.cli.dry_run import show, table
    from windtunnel.rundir import to_json
    from windtunnel.scenarios.flags import flag_of
    from windtunnel.scenarios.load import Override, load_scenario
    from windtunnel.scenarios.resolve import read_workload
    from windtunnel.scenarios.workloads.describe import describe

    given = {
        "trace": str(file),
        "format": format,
        "time_unit": time_unit,
        "on_bad_row": on_bad_row,
        "chunk_tokens": chunk_tokens,
        "trace_model": trace_model,
        "trace_run": trace_run,
        "all_turns": all_turns,
    }
    overrides = {key: Override(value, flag_of(key, "workload")) for key, value in given.items() if value is not None}
    loaded = load_scenario(None, overrides)
    facts = describe(read_workload(loaded))
    if as_json:
        emit(to_json(facts))
        return
    notes = facts.pop("notes")
    rows = [(key, show(value)) for key, value in facts.items() if value is not None]
    emit("\n".join([*table(rows), *(f"note: {text}" for text in notes)]))
