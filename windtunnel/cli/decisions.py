"""``windtunnel decisions``: replay a step-indexed case and print what the scheduler decides."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer


def decisions(
    case: Annotated[
        Path, typer.Argument(help="The case: a JSON file with 'config' and 'requests'.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the lines to this file instead of stdout.")
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
    from windtunnel.sim.decisions import CaseError, replay

    content = _read_case(case)
    try:
        lines = replay(content)
        if output is None:
            for line in lines:
                sys.stdout.write(_encode(line))
        else:
            _write_atomically(output, lines)
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
    return case


def _write_atomically(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write to a temporary name beside ``path`` and rename, so that a failure leaves nothing half-written."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        try:
            file.writelines(_encode(line) for line in lines)
        except BaseException:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)


def _encode(line: dict[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"
