"""``windtunnel decisions``: replay a step-indexed case and print what the scheduler decides."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from windtunnel.cli.output import silence_stdout


def decisions(
    case: Annotated[
        Path,
        typer.Argument(metavar="CASE", help="The case: a JSON file with 'config' and 'requests'.", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the lines to this file instead of stdout.", show_default=False
        ),
    ] = None,
) -> None:
    """Replay a case step by step and print each decision as a JSON line.

    Per step: tokens scheduled per request, who is new, resumed, running or preempted, prefix-cache hits, KV blocks
    handed out, free blocks, who yields a token, who is finished, and the queues afterwards.  The lines have the
    format of decisions recorded from vLLM 0.32's own scheduler, so the two can be compared field by field.

    \b
    Example:
      windtunnel decisions case.json -o decisions.jsonl
    """
    from windtunnel.reports.files import atomic_writer
    from windtunnel.rundir import check_can_write_file, writing
    from windtunnel.sim.decisions import CaseError, replay

    content = _read_case(case)
    try:
        lines = map(_encode, replay(content))
        if output is None:
            try:
                sys.stdout.writelines(lines)
                sys.stdout.flush()
            except BrokenPipeError:
                silence_stdout()
            return
        check_can_write_file(output)
        with writing(output), atomic_writer(output) as file:
            file.writelines(lines)
    except CaseError as error:
        raise CaseError(f"{case}: {error}") from None


def _read_case(path: Path) -> dict[str, Any]:
    from windtunnel.sim.decisions import CaseError

    try:
        case: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise CaseError(f"{path}: not a text file") from None
    except json.JSONDecodeError as error:
        raise CaseError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise CaseError(f"{path}: not usable JSON: {error}") from None
    return case


def _encode(line: dict[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"
