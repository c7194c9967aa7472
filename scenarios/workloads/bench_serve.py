"""Results of ``vllm bench serve --save-result --save-detailed``: the requests of a real run, to be run again.

Source of the format: vLLM 0.32 ``benchmarks/serve.py``.  ``start_times`` are seconds of the client's clock, taken when
a request was really sent, after the wait for ``--max-concurrency``; ``queue_times`` are those waits.  A request with
an error or without output tokens failed; it is left out and counted in the notes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from windtunnel.scenarios.workloads.cells import TimeArray, times, token_counts
from windtunnel.scenarios.workloads.errors import BadRows, BoolArray, OnBadRow, TraceError, brief
from windtunnel.scenarios.workloads.files import PathLike, json_values, read_text
from windtunnel.scenarios.workloads.rows import TraceRows

KEYS = frozenset(("input_lens", "output_lens", "total_input_tokens", "request_throughput", "endpoint_type"))


def read(path: PathLike, *, on_bad_row: OnBadRow = "error", trace_run: int | None = None) -> TraceRows:
    """The requests of one benchmark run; ``trace_run`` (from 0) chooses among those that --append-result put in a file.

    A run with ``max_concurrency`` keeps that limit, and its requests are due before their wait at the client where
    the file has ``queue_times``.  A file without ``start_times`` (older vLLM) has all requests due at once.

    Raises OSError; ValueError if there are several runs and none is chosen, or no such run; TraceError for a file
    that was saved without --save-detailed, lists of different length, or a bad request.
    """
    results = [(line, value) for line, value in json_values(path, read_text(path))]
    line, result = _chosen(path, results, trace_run)
    inputs, outputs = _list(path, line, result, "input_lens"), _list(path, line, result, "output_lens")
    _same_length(path, line, result, len(inputs))
    bad = _BadRequests(path, [line] * len(inputs))
    prompt = token_counts("input_lens", inputs, bad, least=0)
    output = token_counts("output_lens", outputs, bad, least=0)
    failed = (output == 0) | _with_error(result.get("errors"), len(inputs))
    for row in np.flatnonzero(~failed & (prompt == 0)).tolist():
        bad.add(row, "input_lens is 0, must be at least 1")
    due, due_notes = _due(result, bad)
    good, bad_note = bad.settle(on_bad_row)
    keep = good & ~failed
    return TraceRows(
        path,
        "vllm-bench",
        np.full(int(keep.sum()), line, np.int64),
        None if due is None else due[keep],
        prompt[keep],
        output[keep],
        unit="s",
        labels=tuple(f"request {row}" for row in np.flatnonzero(keep).tolist()),
        max_concurrency=result.get("max_concurrency"),
        notes=(*bad_note, *_failed_note(failed), *due_notes, *_limit_note(result)),
    )


class _BadRequests(BadRows):
    """Bad rows that are told apart by their number: they all stand in one line."""

    def add(self, row: int, reason: str) -> None:
        super().add(row, f"request {row}: {reason}")


def _chosen(path: PathLike, results: Sequence[tuple[int, Any]], run: int | None) -> tuple[int, Mapping[str, Any]]:
    if not results:
        raise TraceError(path, None, "the file is empty: a result of vllm bench serve is needed")
    for line, value in results:
        if not isinstance(value, Mapping):
            raise TraceError(path, line, f"a result of vllm bench serve is a JSON object, this is {value!r:.40}")
    if run is None and len(results) > 1:
        listed = "; ".join(f"{number}: {_described(value)}" for number, (_, value) in enumerate(results[:8]))
        more = f"; and {len(results) - 8} more" if len(results) > 8 else ""
        raise TraceError(
            path,
            None,
            f"the file holds {len(results)} runs, choose one with trace_run (--trace-run): {listed}{more}",
        )
    chosen = 0 if run is None else run
    if not 0 <= chosen < len(results):
        raise TraceError(path, None, f"there is no run {chosen}: the file holds runs 0 to {len(results) - 1}")
    return results[chosen]


def _described(result: Mapping[str, Any]) -> str:
    keys = ("date", "model_id", "request_rate", "max_concurrency", "num_prompts")
    return ", ".join(f"{key} {str(result[key])[:40]}" for key in keys if result.get(key) is not None)


def _list(path: PathLike, line: int, result: Mapping[str, Any], key: str) -> list[Any]:
    if key not in result:
        raise TraceError(
            path,
            line,
            f"the result has no {key}: vllm bench serve leaves the single requests out unless it is run with "
            "--save-result --save-detailed; run it again so",
        )
    values = result[key]
    if not isinstance(values, list):
        raise TraceError(path, line, f"{key} is {values!r:.40}, not a list with one value a request")
    return values


def _same_length(path: PathLike, line: int, result: Mapping[str, Any], num_requests: int) -> None:
    for key in ("output_lens", "start_times", "queue_times", "errors"):
        values = _list(path, line, result, key) if result.get(key) or key == "output_lens" else []
        if len(values) != num_requests and (values or key == "output_lens"):
            raise TraceError(path, line, f"{key} has {len(values):,} values, input_lens {num_requests:,}")
    limit = result.get("max_concurrency")
    if limit is not None and not (type(limit) is int and limit >= 1):
        raise TraceError(path, line, f"max_concurrency is {brief(limit)}, must be null or at least 1")


def _with_error(errors: Any, num_requests: int) -> BoolArray:
    if not errors:
        return np.zeros(num_requests, np.bool_)
    return np.array([bool(error) for error in errors], np.bool_)


def _due(result: Mapping[str, Any], bad: BadRows) -> tuple[TimeArray | None, tuple[str, ...]]:
    starts = result.get("start_times")
    if not starts:
        return None, ("The result has no start_times (older vLLM): all requests are due at once.",)
    sent = times("start_times", starts, bad)
    waits = result.get("queue_times")
    if result.get("max_concurrency") is None or not waits:
        return sent, ("Requests are due when the client sent them (start_times).",)
    return (
        sent - times("queue_times", waits, bad),
        ("Requests are due when the client would have sent them without its limit (start_times - queue_times).",),
    )


def _failed_note(failed: BoolArray) -> tuple[str, ...]:
    numbers = np.flatnonzero(failed).tolist()
    if not numbers:
        return ()
    shown = ", ".join(map(str, numbers[:3])) + (f" and {len(numbers) - 3:,} more" if len(numbers) > 3 else "")
    return (
        f"Left out {len(numbers):,} of {len(failed):,} requests that failed (an error or no output token): {shown}.",
    )


def _limit_note(result: Mapping[str, Any]) -> tuple[str, ...]:
    limit = result.get("max_concurrency")
    return () if limit is None else (f"At most {limit:,} requests in flight, as in the run (max_concurrency).",)
