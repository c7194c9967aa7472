"""A workload as columns: what is asked, when, and which prompts begin alike."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

Segment = tuple[int, int]
"""(stream, end): the tokens up to position ``end`` (exclusive), from where the segment before ends, are those of
``stream`` at the same positions.  Streams are numbered 0 … num_streams - 1 and form a tree: a stream fixes all
that comes before it, so two requests that name the same stream agree in every token up to there."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, one row each.

    The true output length is ``num_output_tokens``; the engine may use ``max_tokens`` (what the client declared)
    for its decisions and the truth only to finish a request.
    """

    arrival_ns: IntArray
    """When the request is due, from the start of the run; -1 for one that waits for another (``previous``)."""
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    max_tokens: IntArray
    """Declared limit of output tokens; at least ``num_output_tokens``."""
    priority: IntArray
    """Smaller is more urgent; only the priority policy looks at it."""
    previous: IntArray
    """Row whose answer this request follows (the turn before), or -1."""
    think_ns: IntArray
    """Pause between that answer and this request; 0 where there is none."""
    content: tuple[tuple[Segment, ...], ...] | None = None
    """Per row the shared part of its tokens; what lies behind the last segment is the request's own.
    None when no two requests share anything."""
    num_streams: int = 0
    labels: tuple[str, ...] | None = None
    """The requests' names in their source, for reports; None when the row number says as much."""
    max_concurrency: int | None = None
    """A client-side limit on requests in flight: a due request waits at the client for its turn (closed loop)."""
    request_timeout_ns: int | None = None
    """How long after sending the client gives a request up whose answer is not complete; None is never."""
    tenant: IntArray | None = None
    """Per row the place of its tenant (whose request it is) in ``tenants``; None where there are none."""
    tenants: tuple[str, ...] = ()
    """Names of the tenants; some may have no request."""
    source: str = "synthetic"
    """Where it comes from, for reports."""
    notes: tuple[str, ...] = field(default=())
    """What reading or making it decided (unit of time, rows left out, scaling), in sentences for people."""

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def __post_init__(self) -> None:
        n = len(self.arrival_ns)
        for name in ("num_prompt_tokens", "num_output_tokens", "max_tokens", "priority", "previous", "think_ns"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"{name} has {len(getattr(self, name))} rows, arrival_ns has {n}")
        for name in ("num_prompt_tokens", "num_output_tokens"):
            column = getattr(self, name)
            if n and int(column.min()) < 1:
                row = int(column.argmin())
                raise ValueError(f"{name} must be at least 1, row {row} has {int(column[row])}")
        if n and bool((self.max_tokens < self.num_output_tokens).any()):
            row = int((self.max_tokens < self.num_output_tokens).argmax())
            raise ValueError(
                f"max_tokens ({int(self.max_tokens[row])}) is below num_output_tokens "
                f"({int(self.num_output_tokens[row])}) in row {row}"
            )
        due = self.arrival_ns[self.previous < 0]
        if len(due) and int(due.min()) < 0:
            raise ValueError("arrival_ns must not be negative for a request that follows no other")
        if len(due) and bool((np.diff(due) < 0).any()):
            raise ValueError("requests must be in order of arrival_ns")
        if n and bool((self.previous >= np.arange(n)).any()):
            raise ValueError("previous must name an earlier row")
        _check_tenants(self)
        if self.content is not None and len(self.content) != n:
            raise ValueError(f"content has {len(self.content)} rows, arrival_ns has {n}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {self.max_concurrency}")
        if self.request_timeout_ns is not None and self.request_timeout_ns < 1:
            raise ValueError(f"request_timeout_ns must be at least 1, got {self.request_timeout_ns}")


def _check_tenants(load: Workload) -> None:
    if load.tenant is None:
        if load.tenants:
            raise ValueError(f"there are tenants ({', '.join(load.tenants)}), but no column says whose a request is")
        return
    if len(load.tenant) != len(load):
        raise ValueError(f"tenant has {len(load.tenant)} rows, arrival_ns has {len(load)}")
    if len(set(load.tenants)) < len(load.tenants):
        raise ValueError(f"every tenant must have a name of its own, got {', '.join(load.tenants)}")
    if len(load) and not 0 <= int(load.tenant.min()) <= int(load.tenant.max()) < len(load.tenants):
        raise ValueError(f"tenant must be from 0 to {len(load.tenants) - 1}, the places in tenants")
    turns = np.flatnonzero(load.previous >= 0)
    others = turns[load.tenant[turns] != load.tenant[load.previous[turns]]]
    if len(others):
        raise ValueError(f"row {int(others[0])} follows a request of another tenant: a conversation belongs to one")


def workload(
    arrival_ns: npt.ArrayLike,
    num_prompt_tokens: npt.ArrayLike,
    num_output_tokens: npt.ArrayLike,
    *,
    max_tokens: npt.ArrayLike | None = None,
    priority: npt.ArrayLike | None = None,
    previous: npt.ArrayLike | None = None,
    think_ns: npt.ArrayLike | None = None,
    content: tuple[tuple[Segment, ...], ...] | None = None,
    num_streams: int = 0,
    labels: tuple[str, ...] | None = None,
    max_concurrency: int | None = None,
    request_timeout_ns: int | None = None,
    tenant: npt.ArrayLike | None = None,
    tenants: tuple[str, ...] = (),
    source: str = "synthetic",
    notes: tuple[str, ...] = (),
) -> Workload:
    """A Workload from anything array-like; what is left out takes its neutral value.  Raises ValueError as Workload."""
    arrival = _column(arrival_ns)
    n = len(arrival)
    output = _column(num_output_tokens)
    return Workload(
        arrival_ns=arrival,
        num_prompt_tokens=_column(num_prompt_tokens),
        num_output_tokens=output,
        max_tokens=output if max_tokens is None else _column(max_tokens),
        priority=np.zeros(n, np.int64) if priority is None else _column(priority),
        previous=np.full(n, -1, np.int64) if previous is None else _column(previous),
        think_ns=np.zeros(n, np.int64) if think_ns is None else _column(think_ns),
        content=content,
        num_streams=num_streams,
        labels=labels,
        max_concurrency=max_concurrency,
        request_timeout_ns=request_timeout_ns,
        tenant=None if tenant is None else _column(tenant),
        tenants=tenants,
        source=source,
        notes=notes,
    )


def _column(values: npt.ArrayLike) -> IntArray:
    return np.ascontiguousarray(values, dtype=np.int64)
