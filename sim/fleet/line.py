"""Who waits at the gateway: first come, first served among those that wait for the same replicas."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Sequence

from windtunnel.sim.engine.request import Request

_NEW = 1 << 62
"""Turns of requests that have been at no replica begin here; those that were put back go before them."""


class Line:
    """Requests in the order in which they came.

    Those whose prompts fit fewer pools stand in a lane of their own: a long prompt that has to wait for the one pool
    that can take it keeps nobody else from the others.
    """

    def __init__(self, max_model_lens: Collection[int]) -> None:
        """``max_model_lens`` are those of the pools; a prompt fits those that are longer than it is."""
        self._lengths = sorted(set(max_model_lens))
        self._lanes: list[deque[tuple[int, Request]]] = [deque() for _ in range(len(self._lengths) + 1)]
        self._num = 0
        self._first, self._next_back, self._last = 0, 0, _NEW  # turns given out: to those put back, to those that came

    def __len__(self) -> int:
        return self._num

    def append(self, request: Request) -> None:
        """It waits behind all others."""
        self._lane(request).append((self._last, request))
        self._last += 1
        self._num += 1

    def put_back(self, requests: Sequence[Request]) -> None:
        """They wait before all others, in their order."""
        for request in reversed(requests):
            self._first -= 1
            self._lane(request).appendleft((self._first, request))
        self._num += len(requests)

    def put_back_one(self, request: Request) -> None:
        """It waits before all that have not been anywhere, and behind those that were put back before."""
        lane = self._lane(request)
        place = next((place for place, (turn, _) in enumerate(lane) if turn >= _NEW), len(lane))
        lane.insert(place, (self._next_back, request))
        self._next_back += 1
        self._num += 1

    def remove(self, request: Request) -> None:
        """It waits no longer.  Raises ValueError if it did not."""
        lane = self._lane(request)
        place = next((place for place, (_, other) in enumerate(lane) if other is request), None)
        if place is None:
            raise ValueError(f"{request!r} does not wait: only what was put in the line can be taken out of it")
        del lane[place]
        self._num -= 1

    def heads(self) -> list[Request]:
        """The first of each lane, whoever came first before the others."""
        return [request for _, request in sorted(lane[0] for lane in self._lanes if lane)]

    def _lane(self, request: Request) -> deque[tuple[int, Request]]:
        return self._lanes[bisect_right(self._lengths, request.num_prompt_tokens)]
