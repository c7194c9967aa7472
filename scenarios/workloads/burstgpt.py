"""BurstGPT traces: CSV with Timestamp (seconds), Model, Request tokens, Response tokens, … found by header name.

Source of the format: HPMLL/BurstGPT, versions 1 (without sessions) and 2 (with ``Session ID`` and ``Elapsed time``).
A row with no response token is a request that failed at its source; it is left out and counted in the notes.
"""

from __future__ import annotations

import numpy as np

from windtunnel.scenarios.workloads.cells import times, token_counts
from windtunnel.scenarios.workloads.errors import BoolArray, OnBadRow, TraceError, brief, failures_note, names
from windtunnel.scenarios.workloads.files import PathLike, Table, read_csv
from windtunnel.scenarios.workloads.rows import TraceRows, line_labels

COLUMNS = frozenset(("timestamp", "request tokens", "response tokens"))


def read(path: PathLike, *, on_bad_row: OnBadRow = "error", trace_model: str | None = None) -> TraceRows:
    """The rows of a BurstGPT trace that got a response, of one ``trace_model`` ("GPT-4", "ChatGPT") or of all (None).

    Requests come at their recorded times whatever their session: the file does not say which text they share.
    Raises OSError; TraceError for a missing column, a bad row or a model that the file does not have.
    """
    table = read_csv(path)
    when = times("Timestamp", table.column("Timestamp"), table.bad)
    output = token_counts("Response tokens", table.column("Response tokens"), table.bad, least=0)
    prompt = token_counts("Request tokens", table.column("Request tokens"), table.bad, least=0)
    for row in np.flatnonzero((prompt == 0) & (output > 0)).tolist():
        table.bad.add(row, "Request tokens is 0 although there was a response, must be at least 1")
    good, bad_note = table.bad.settle(on_bad_row)
    asked = _of_model(table, trace_model)
    keep = good & asked & (output > 0)
    lines = table.line_numbers
    failed = lines[good & asked & (output == 0)].tolist()
    notes = [*_model_note(trace_model, good, asked)]
    if failed:
        notes.append(failures_note(int((good & asked).sum()), failed, "that failed (0 response tokens)"))
    return TraceRows(
        path,
        "burstgpt",
        lines[keep],
        when[keep],
        prompt[keep],
        output[keep],
        usual_unit="s",
        labels=line_labels(lines[keep]),
        notes=(
            *table.unused_note(COLUMNS | ({"model"} if trace_model else set())),
            *bad_note,
            *notes,
            *_session_note(table),
        ),
    )


def _of_model(table: Table, model: str | None) -> BoolArray:
    if model is None:
        return np.ones(len(table.lines), np.bool_)
    models = table.column("Model")
    asked = np.array([each == model for each in models], np.bool_)
    if not asked.any():
        raise TraceError(
            table.path, None, f"no request of model {brief(model)}; there are {names(dict.fromkeys(models))}"
        )
    return asked


def _model_note(model: str | None, good: BoolArray, asked: BoolArray) -> tuple[str, ...]:
    if model is None:
        return ()
    return (f"Took the {int((good & asked).sum()):,} requests of model {model} and left out those of other models.",)


def _session_note(table: Table) -> tuple[str, ...]:
    cells = table.find("Session ID")
    if cells is None:
        return ()
    sessions = len(dict.fromkeys(cell for cell in cells if cell))
    return (
        f"The file names {sessions:,} sessions: their requests come at the recorded times and share no content, "
        "because the file does not say what they have in common.",
    )
