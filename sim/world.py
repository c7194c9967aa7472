"""Simulated time: a SimPy environment in whole nanoseconds, with a stated order of what happens at one instant."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import Any, cast

import simpy
from simpy.events import Event, EventPriority

NORMAL = 1
STEP_END = 2
"""Plus the replica's number: at one instant the world acts first, then the replicas in order."""
REPLY_NS = 1
"""An answer leaves the replica one tick after its step, so nothing passes between replicas within an instant."""


class World(simpy.Environment):
    """A SimPy environment whose time is whole nanoseconds, because every delay is."""

    @property
    def now_ns(self) -> int:
        """The present, in nanoseconds from the start of the run."""
        return cast(int, self._now)

    @property
    def num_pending(self) -> int:
        """Events that are going to happen."""
        return len(self._queue)

    def call_in(self, delay_ns: int, action: Callable[[Any], None], value: Any = None) -> None:
        """Let ``action(value)`` happen ``delay_ns`` from now."""
        self.at(self.now_ns + delay_ns, NORMAL).callbacks = [lambda _: action(value)]

    def at(self, then_ns: int, rank: int) -> Event:
        """An event that happens at ``then_ns``, which is not before now; at that instant, lower ranks go first.

        What ``Environment.timeout`` and ``schedule`` do, without their calls.
        """
        event = Event(self)
        event._ok, event._value = True, None
        queue: Any = self._queue
        heappush(queue, (then_ns, rank, next(self._eid), event))
        return event


class Occurrence(Event):
    """An event that is fired once, at a chosen delay and rank within its instant (a SimPy timeout has no rank)."""

    def fire(self, delay_ns: int, rank: int) -> None:
        """Happen ``delay_ns`` from now; at that instant, lower ranks go first."""
        self._ok = True
        self._value = None
        self.env.schedule(self, cast(EventPriority, rank), delay_ns)
