"""Who sends the requests: on schedule, after an earlier answer, and no more at once than the client allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator

import numpy as np
from simpy.events import Timeout

from windtunnel.sim.engine.keys import BlockKeys, PrivateKeys, StreamKeys
from windtunnel.sim.engine.request import Request
from windtunnel.sim.log import RequestLog
from windtunnel.sim.records import Outcome
from windtunnel.sim.workload import Workload
from windtunnel.sim.world import REPLY_NS, World

CHUNK_ROWS = 4096
"""Rows turned into Python numbers at a time, so that a long workload costs little memory."""


class Client:
    """Sends a workload to an engine and keeps count of its requests.

    Open loop: a request goes out when it is due.  With ``max_concurrency`` it also waits for one of that many places
    (as ``vllm bench serve --max-concurrency`` does; its TTFT counts from when it goes out).  A request with
    ``previous`` is due ``think_ns`` after that one's answer.
    """

    def __init__(self, world: World, workload: Workload, block_size: int, log: RequestLog) -> None:
        self.num_done = 0
        self._world = world
        self._workload = workload
        self._block_size = block_size
        self._log = log
        self._limit = workload.max_concurrency
        self._num_in_flight = 0
        self._held: deque[tuple[int, int]] = deque()  # (row, due_ns) of due requests without a place
        self._is_due = np.zeros(len(workload), bool)
        self._in_engine: dict[int, tuple[Request, int]] = {}  # row -> (request, due_ns)
        self._followers = _followers(workload)
        self._num_unsent = len(workload)
        self._submit: Callable[[Request], None] | None = None
        self._all_sent: Callable[[], None] | None = None

    def start(self, submit: Callable[[Request], None], all_sent: Callable[[], None] | None = None) -> None:
        """Begin; ``submit`` hands a request to the engine and raises ValueError if that refuses it.

        ``all_sent`` is called once, after the last request.
        """
        self._submit = submit
        self._all_sent = all_sent
        self._world.process(self._arrivals())

    def answered(self, request: Request, end_ns: int) -> None:
        """A request is finished."""
        self._close(request, Outcome.FINISHED, end_ns)

    def rejected(self, request: Request, now_ns: int) -> None:
        """The engine refused a request that it had taken in, because it waited too long."""
        self._close(request, Outcome.REJECTED, now_ns)

    def write_unfinished(self, num_emitted: Callable[[Request], int]) -> int:
        """Log what is still open at the end of the run; returns how many that are."""
        for request, due_ns in self._in_engine.values():
            self._log.write(request, Outcome.UNFINISHED, 0, due_ns, -1, num_emitted(request))
        for row, due_ns in self._held:
            self._write_unsent(row, due_ns)
        for row in (~self._is_due).nonzero()[0].tolist():
            self._write_unsent(row, int(self._workload.arrival_ns[row]))
        return len(self._workload) - self.num_done

    def _close(self, request: Request, outcome: Outcome, now_ns: int) -> None:
        row = int(request.request_id)
        _, due_ns = self._in_engine.pop(row)
        self._log.write(request, outcome, 0, due_ns, now_ns, request.num_emitted)
        self._leave(row)

    def _write_unsent(self, row: int, due_ns: int) -> None:
        prompt, priority = self._workload.num_prompt_tokens, self._workload.priority
        self._log.write_unsent(row, due_ns, int(prompt[row]), int(priority[row]))

    def _arrivals(self) -> Generator[Timeout, None, None]:
        world = self._world
        for row, due_ns in _scheduled(self._workload):
            delay_ns = due_ns - world.now_ns
            if delay_ns > 0:
                yield world.timeout(delay_ns)
            self._due(row)

    def _due(self, row: int) -> None:
        self._is_due[row] = True
        if self._limit is not None and self._num_in_flight >= self._limit:
            self._held.append((row, self._world.now_ns))
        else:
            self._send(row, self._world.now_ns)

    def _send(self, row: int, due_ns: int) -> None:
        assert self._submit is not None
        request = self._request(row)
        self._num_in_flight += 1
        try:
            self._submit(request)
        except ValueError:
            self._log.write(request, Outcome.REJECTED, 0, due_ns, self._world.now_ns, 0)
            self._leave(row)
        else:
            self._in_engine[row] = (request, due_ns)
        self._num_unsent -= 1
        if not self._num_unsent and self._all_sent is not None:
            self._all_sent()

    def _leave(self, row: int) -> None:
        self.num_done += 1
        if self._limit is not None or self._followers:
            self._world.call_in(REPLY_NS, self._got_answer, row)
        else:
            self._num_in_flight -= 1

    def _got_answer(self, row: int) -> None:
        self._num_in_flight -= 1
        for follower in self._followers.get(row, ()):
            self._world.call_in(int(self._workload.think_ns[follower]), self._due, follower)
        if self._held and (self._limit is None or self._num_in_flight < self._limit):
            self._send(*self._held.popleft())

    def _request(self, row: int) -> Request:
        w = self._workload
        return Request(
            row,
            self._world.now_ns,
            int(w.num_prompt_tokens[row]),
            int(w.num_output_tokens[row]),
            int(w.max_tokens[row]),
            int(w.priority[row]),
            self._keys(row),
        )

    def _keys(self, row: int) -> BlockKeys:
        own = self._workload.num_streams + row
        content = self._workload.content
        if content is None or not content[row]:
            return PrivateKeys(own)
        return StreamKeys(content[row], own, self._block_size)


def _scheduled(workload: Workload) -> Iterator[tuple[int, int]]:
    """(row, due_ns) of the requests that follow no other, in order."""
    for start in range(0, len(workload), CHUNK_ROWS):
        due = workload.arrival_ns[start : start + CHUNK_ROWS].tolist()
        previous = workload.previous[start : start + CHUNK_ROWS].tolist()
        for offset, (due_ns, before) in enumerate(zip(due, previous, strict=True)):
            if before < 0:
                yield start + offset, due_ns


def _followers(workload: Workload) -> dict[int, list[int]]:
    followers: dict[int, list[int]] = {}
    for row in (workload.previous >= 0).nonzero()[0].tolist():
        followers.setdefault(int(workload.previous[row]), []).append(row)
    return followers
