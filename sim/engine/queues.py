"""The waiting requests, in the order in which they are admitted."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from windtunnel.sim.engine.request import Request


class WaitingQueue(Protocol):
    """Waiting requests; the head is the only one that may be admitted."""

    def add(self, request: Request) -> None:
        """Queue a new request."""

    def put_back(self, request: Request) -> None:
        """Queue a preempted request again."""

    def head(self) -> Request:
        """The next request; the queue must not be empty."""

    def pop_head(self) -> Request:
        """Take out the head."""

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it stands."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FcfsQueue(deque[Request]):
    """First come, first served; what was preempted goes before everybody."""

    add = deque.append
    put_back = deque.appendleft
    pop_head = deque.popleft

    def head(self) -> Request:
        """The next request; the queue must not be empty."""
        return self[0]


class PriorityQueue:
    """By priority (smaller first), then arrival, then request id; a preempted request keeps its place."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: list[Request] = []  # the head is the last, so that taking it is cheap

    def add(self, request: Request) -> None:
        """Queue a request at its place."""
        insort(self._queue, request, key=_reversed_place)

    put_back = add

    def head(self) -> Request:
        """The next request; the queue must not be empty."""
        return self._queue[-1]

    def pop_head(self) -> Request:
        """Take out the head."""
        return self._queue.pop()

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it stands."""
        self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return reversed(self._queue)


class _Reversed:
    """A key that sorts the other way round."""

    __slots__ = ("key",)

    def __init__(self, key: tuple[int, int, int | str]) -> None:
        self.key = key

    def __lt__(self, other: _Reversed) -> bool:
        return other.key < self.key


def _reversed_place(request: Request) -> _Reversed:
    return _Reversed((request.priority, request.arrival_ns, request.request_id))
