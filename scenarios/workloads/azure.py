"""Azure LLM inference traces: CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens.

Source of the format: the Azure Public Dataset (2023 code and conversation traces: wall-clock times with seven digits
of a second; 2024 traces: with a time zone).  Plain numbers as TIMESTAMP are accepted too.  A row with no generated
token is a bad row: it ends before anything that a serving engine could report, and the 2023 files have none.
"""

from __future__ import annotations

from windtunnel.scenarios.workloads.cells import is_wall_clock, times, token_counts, wall_clock_ns
from windtunnel.scenarios.workloads.errors import OnBadRow
from windtunnel.scenarios.workloads.files import PathLike, read_csv
from windtunnel.scenarios.workloads.rows import TraceRows, line_labels

COLUMNS = frozenset(("timestamp", "contexttokens", "generatedtokens"))


def read(path: PathLike, *, on_bad_row: OnBadRow = "error") -> TraceRows:
    """The rows of an Azure LLM trace.  Raises OSError; TraceError for a missing column or a bad row."""
    table = read_csv(path)
    stamps = table.column("TIMESTAMP")
    prompt = token_counts("ContextTokens", table.column("ContextTokens"), table.bad)
    output = token_counts("GeneratedTokens", table.column("GeneratedTokens"), table.bad)
    wall_clock = any(map(is_wall_clock, stamps[:8]))
    when = wall_clock_ns("TIMESTAMP", stamps, table.bad) if wall_clock else times("TIMESTAMP", stamps, table.bad)
    keep, note = table.bad.settle(on_bad_row)
    lines = table.line_numbers[keep]
    return TraceRows(
        path,
        "azure",
        lines,
        when[keep],
        prompt[keep],
        output[keep],
        unit="ns" if wall_clock else None,
        labels=line_labels(lines),
        notes=(*table.unused_note(COLUMNS), *note),
    )
