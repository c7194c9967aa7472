"""Mooncake traces: one JSON object a line with timestamp, input_length, output_length and hash_ids.

Source of the format: the Mooncake FAST'25 traces (milliseconds, blocks of 512 tokens); the same keys with seconds and
blocks of 16 tokens are used by the Alibaba (Qwen) traces.  ``hash_ids`` name the prompt's blocks in order, each id
standing for its block and all before it; requests with the same first ids begin with the same tokens.  It may be
missing or empty: then the request shares nothing.  A row without output tokens is a bad row (the published files
have none).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from windtunnel.scenarios.workloads.cells import times, token_counts
from windtunnel.scenarios.workloads.errors import BadRows, OnBadRow, TraceError
from windtunnel.scenarios.workloads.files import PathLike, read_json_lines
from windtunnel.scenarios.workloads.prefix_tree import shared_content
from windtunnel.scenarios.workloads.rows import TraceRows, line_labels
from windtunnel.sim.workload import IntArray

COLUMNS = frozenset(("timestamp", "input_length", "output_length", "hash_ids"))

MOONCAKE_CHUNK_TOKENS = 512
_MOST_ROWS = 0.9
_USUAL_CHUNK_TOKENS = (MOONCAKE_CHUNK_TOKENS, 16, 64, 128, 256, 32, 1024, 2048)


def read(path: PathLike, *, on_bad_row: OnBadRow = "error", chunk_tokens: int | None = None) -> TraceRows:
    """The rows of a Mooncake trace with their shared prefixes.

    ``chunk_tokens`` is the size of the hashed blocks; None finds the usual size at which every prompt has as many
    ids as blocks.  Raises OSError; TraceError for a missing key, a bad row, or if no block size fits.
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    table = read_json_lines(path)
    when = times("timestamp", table.column("timestamp"), table.bad)
    prompt = token_counts("input_length", table.column("input_length"), table.bad)
    output = token_counts("output_length", table.column("output_length"), table.bad)
    chains = _chains(table.find("hash_ids") or [None] * len(table.lines), table.bad)
    chunk, chunk_notes = _chunk_tokens(path, chains, prompt, table.bad, chunk_tokens)
    _check_lengths(chains, prompt, chunk, table.bad)
    keep, note = table.bad.settle(on_bad_row)
    kept = np.flatnonzero(keep).tolist()
    content, num_streams = shared_content([chains[row] for row in kept], chunk, prompt[keep])
    lines = table.line_numbers[keep]
    return TraceRows(
        path,
        "mooncake",
        lines,
        when[keep],
        prompt[keep],
        output[keep],
        usual_unit="ms" if chunk == MOONCAKE_CHUNK_TOKENS and when.dtype == np.int64 else None,
        content=content,
        num_streams=num_streams,
        labels=line_labels(lines),
        notes=(*table.unused_note(COLUMNS), *note, *chunk_notes),
    )


def _chains(cells: Sequence[Any], bad: BadRows) -> list[list[int | str]]:
    chains: list[list[int | str]] = []
    for row, cell in enumerate(cells):
        ids = [] if cell is None else cell
        if not isinstance(ids, list) or not all(type(hash_id) in (int, str) for hash_id in ids):
            bad.add(row, f"hash_ids is {cell!r:.60}, not a list of whole numbers or texts")
            ids = []
        chains.append(ids)
    return chains


def _chunk_tokens(
    path: PathLike, chains: Sequence[Sequence[object]], prompt: IntArray, bad: BadRows, given: int | None
) -> tuple[int, tuple[str, ...]]:
    if given is not None:
        return given, (f"Hashed blocks taken as {given:,} tokens, as given.",)
    rows = [row for row in range(len(chains)) if chains[row] and row not in bad]
    if not rows:
        return MOONCAKE_CHUNK_TOKENS, ("No row has hash_ids: requests share nothing.",)
    lengths = prompt[rows]
    num_ids = np.array([len(chains[row]) for row in rows], np.int64)
    for low, high, which in (_ceiling_range(lengths, num_ids), _floor_range(lengths, num_ids)):
        if low <= high:
            chunk = next((usual for usual in _USUAL_CHUNK_TOKENS if low <= usual <= high), low)
            between = f"every size from {low:,} to {high:,} would" if low < high else "no other size would"
            return chunk, (
                f"Hashed blocks taken as {chunk:,} tokens: {which} ({between} fit); chunk_tokens (--chunk-tokens) "
                "overrides that.",
            )
    fits, chunk = max((float((-(-lengths // usual) == num_ids).mean()), usual) for usual in _USUAL_CHUNK_TOKENS)
    if fits < _MOST_ROWS:
        raise TraceError(
            path,
            None,
            "no block size gives every prompt as many blocks as it has hash_ids: give it with chunk_tokens "
            "(--chunk-tokens)",
        )
    return chunk, (
        f"Hashed blocks taken as {chunk:,} tokens, which fits {fits:.1%} of the rows; chunk_tokens (--chunk-tokens) "
        "overrides that.",
    )


def _ceiling_range(lengths: IntArray, num_ids: IntArray) -> tuple[int, int, str]:
    several = num_ids > 1
    high = int(((lengths[several] - 1) // (num_ids[several] - 1)).min()) if several.any() else int(lengths.max()) + 2048
    return int((-(-lengths // num_ids)).max()), high, "ids per prompt = its length by that, rounded up"


def _floor_range(lengths: IntArray, num_ids: IntArray) -> tuple[int, int, str]:
    low = int((lengths // (num_ids + 1)).max()) + 1
    return low, int((lengths // num_ids).min()), "ids per prompt = its length by that, rounded down"


def _check_lengths(chains: Sequence[Sequence[object]], prompt: IntArray, chunk: int, bad: BadRows) -> None:
    num_ids = np.fromiter(map(len, chains), np.int64, len(chains))
    for row in np.flatnonzero(num_ids > -(-prompt // chunk)).tolist():
        if row not in bad:
            bad.add(
                row,
                f"{num_ids[row]:,} hash_ids are too many for input_length {prompt[row]:,} in blocks of {chunk:,}",
            )
