"""What was seen of a real run, in one form whatever it was seen with: our client, or a result that exists already.

Times are whole nanoseconds.  A fact that the source does not have is -1 in a column, NaN in a series and None
elsewhere; nothing is filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from windtunnel.sim.records import IntArray

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

UNKNOWN = -1
NS_PER_S = 1_000_000_000


class Ending(IntEnum):
    """How a request ended for the client."""

    FINISHED = 0
    UNSENT = 1
    """The run ended before it was sent, or the client had its most requests in flight."""
    CUT_OFF = 2
    """In flight when the run ended."""
    TIMED_OUT = 3
    """Given up by the client."""
    REFUSED = 4
    """The server answered with an HTTP status other than 200."""
    UNREACHABLE = 5
    """No connection."""
    BROKEN = 6
    """The answer ended early, was not what was asked for, or carried an error."""
    FAILED = 7
    """A result that was read says that it failed, and not how."""


@dataclass(frozen=True, slots=True)
class ObservedRequests:
    """One row a request.  Offsets ``_ns`` other than ``due_ns`` and ``send_ns`` count from that request's sending."""

    due_ns: IntArray
    """When it should have been sent, from the start of the run."""
    send_ns: IntArray
    """When it was sent, from the start of the run."""
    ready_ns: IntArray
    """When nothing held it back any more: due, and a place free under a limit on requests in flight."""
    ttft_ns: IntArray
    e2el_ns: IntArray
    """Last token after sending."""
    end_ns: IntArray
    """End of the whole answer after sending."""
    num_prompt_tokens_asked: IntArray
    num_output_tokens_asked: IntArray
    num_prompt_tokens: IntArray
    """As the server counted."""
    num_output_tokens: IntArray
    """Tokens it got."""
    num_cached_tokens: IntArray
    """Prompt tokens that the server says it found in its prefix cache."""
    previous: IntArray
    """Row whose answer it followed, or -1 for none."""
    ending: IntArray
    """``Ending``."""
    http_status: IntArray
    errors: tuple[str, ...]
    """Empty where there was none."""
    chunk_offsets: IntArray
    """Row i has the chunks ``chunk_offsets[i]`` … ``chunk_offsets[i + 1] - 1``; one entry more than rows."""
    chunk_ns: IntArray
    """When each chunk with tokens came, after that request's sending."""
    chunk_tokens: IntArray
    """Tokens in each chunk."""
    labels: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.due_ns)

    def __post_init__(self) -> None:
        rows = len(self.due_ns)
        for item in fields(self):
            column = getattr(self, item.name)
            expected = rows + 1 if item.name == "chunk_offsets" else rows
            if item.name in ("chunk_ns", "chunk_tokens"):
                expected = int(self.chunk_offsets[-1]) if len(self.chunk_offsets) else 0
            if column is not None and len(column) != expected:
                raise ValueError(f"{item.name} has {len(column)} entries, {expected} are needed for {rows} requests")
        if len(self.chunk_offsets) and (int(self.chunk_offsets[0]) or bool((np.diff(self.chunk_offsets) < 0).any())):
            raise ValueError("chunk_offsets must begin with 0 and never fall")

    @property
    def is_finished(self) -> BoolArray:
        """Rows whose answer came to its end."""
        finished: BoolArray = self.ending == Ending.FINISHED
        return finished

    @property
    def finish_ns(self) -> IntArray:
        """When the last token came, from the start of the run; -1 where that is not known."""
        known = (self.send_ns >= 0) & (self.e2el_ns >= 0)
        return np.where(known, self.send_ns + self.e2el_ns, UNKNOWN)

    def chunk_times_of(self, row: int) -> IntArray:
        """When the chunks of one request came, after its sending."""
        return self.chunk_ns[int(self.chunk_offsets[row]) : int(self.chunk_offsets[row + 1])]


@dataclass(frozen=True, slots=True)
class ServerSeries:
    """The server's gauges and counters over the run, summed over its engines; NaN where it does not have one."""

    time_ns: IntArray
    """From the start of the run; negative before it."""
    num_running: FloatArray
    num_waiting: FloatArray
    num_swapped: FloatArray
    """Only servers before vLLM 0.9 or so swap."""
    kv_usage: FloatArray
    """0 … 1, of the fullest engine."""
    num_preemptions: FloatArray
    """Since the start of the series."""
    prefix_query_tokens: FloatArray
    prefix_hit_tokens: FloatArray
    generation_tokens: FloatArray
    prompt_tokens: FloatArray

    def __len__(self) -> int:
        return len(self.time_ns)


SERIES_COLUMNS = tuple(item.name for item in fields(ServerSeries) if item.name != "time_ns")


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """What the server's counters gained over the run; None where it does not have one."""

    num_preemptions: int | None = None
    prefix_query_tokens: int | None = None
    prefix_hit_tokens: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    num_steps: int | None = None
    """Of ``iteration_tokens_total``."""
    num_requests_finished: int | None = None
    """More than were sent means that somebody else used the server, too."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What is known of the server; None is not known."""

    model: str | None = None
    version: str | None = None
    max_model_len: int | None = None
    num_gpu_blocks: int | None = None
    """Of the smallest engine, the null block included."""
    block_size: int | None = None
    kv_cache_tokens: int | None = None
    enable_prefix_caching: bool | None = None
    num_engines: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    config: Mapping[str, Any] | None = None
    """The server's own config, where it shows it."""


@dataclass(frozen=True, slots=True)
class SendReport:
    """How well the client kept its times, over the requests that it sent; in seconds."""

    late_p50_s: float
    late_p99_s: float
    late_max_s: float
    """Sending later than due, or than a place was free."""
    loop_lag_max_s: float
    """Longest that the client was too busy, or not scheduled, to look at its sockets."""
    num_connections: int


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """A real run: its requests, what its server said, and where all of it comes from."""

    source: str
    """The tool, such as ``windtunnel live`` or ``vllm bench serve``."""
    name: str
    """The file or the address."""
    requests: ObservedRequests
    """No rows where the source has only aggregates."""
    duration_ns: int | None = None
    """As the source states it; else metrics count from the first sending to the last token."""
    max_concurrency: int | None = None
    request_rate: float | None = None
    """Requests a second that the client was set to; infinity for all at once."""
    stated: Mapping[str, float] = field(default_factory=dict)
    """Aggregates that the source states itself, under the keys of ``vllm bench serve``."""
    series: ServerSeries | None = None
    counts: ServerCounts = ServerCounts()
    server: ServerFacts = ServerFacts()
    send_report: SendReport | None = None
    was_interrupted: bool = False
    notes: tuple[str, ...] = ()
    """What the reader or the client had to decide, and what a reader should know."""

    @property
    def makespan_ns(self) -> int | None:
        """From the first sending to the last token; None where no times of sending are known."""
        sent = self.requests.send_ns[self.requests.send_ns >= 0]
        finish = self.requests.finish_ns[self.requests.is_finished]
        return int(finish.max() - sent.min()) if len(sent) and len(finish) else None


def unknown_column(num_rows: int) -> IntArray:
    """A column of which nothing is known."""
    return np.full(num_rows, UNKNOWN, np.int64)


def observed_requests(
    num_rows: int,
    *,
    chunks: list[IntArray] | None = None,
    chunk_tokens: list[IntArray] | None = None,
    errors: tuple[str, ...] | None = None,
    labels: tuple[str, ...] | None = None,
    **columns: npt.ArrayLike | None,
) -> ObservedRequests:
    """Requests from columns by name; what is left out, or None, is not known, except that requests are finished.

    ``chunks`` holds the chunk times of each row.  Raises ValueError for columns of different lengths, TypeError for
    an unknown one.
    """
    times = chunks if chunks is not None else [np.zeros(0, np.int64)] * num_rows
    tokens = chunk_tokens if chunk_tokens is not None else [unknown_column(len(row)) for row in times]
    columns.setdefault("ending", [int(Ending.FINISHED)] * num_rows)
    plain = [item.name for item in fields(ObservedRequests) if item.name not in _NOT_PLAIN]
    made = {name: _column(columns.pop(name, None), num_rows) for name in plain}
    if columns:
        raise TypeError(f"no such columns of a request: {', '.join(columns)}")
    return ObservedRequests(
        **made,
        errors=errors if errors is not None else ("",) * num_rows,
        chunk_offsets=np.concatenate(([0], np.cumsum([len(row) for row in times], dtype=np.int64))),
        chunk_ns=np.concatenate([np.zeros(0, np.int64), *times]),
        chunk_tokens=np.concatenate([np.zeros(0, np.int64), *tokens]),
        labels=labels,
    )


_NOT_PLAIN = ("errors", "chunk_offsets", "chunk_ns", "chunk_tokens", "labels")


def _column(values: npt.ArrayLike | None, num_rows: int) -> IntArray:
    return unknown_column(num_rows) if values is None else np.ascontiguousarray(values, dtype=np.int64)
