"""Who sends the requests: on schedule, after an earlier answer, and no more at once than the client allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from typing import NamedTuple, Protocol

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


class Server(Protocol):
    """Where requests are sent to."""

    def submit(self, request: Request) -> int:
        """Take a request in; returns the replica's number, -1 while it has none (``Client.placed`` tells it later).

        Raises ValueError if it is refused.
        """

    def abort(self, request: Request, replica: int) -> int:
        """Drop a request; returns the tokens that it had got."""

    def num_emitted_tokens(self, request: Request, replica: int) -> int:
        """Output tokens that a request has got."""

    def end_of_input(self) -> None:
        """No more requests will be submitted."""


class Client:
    """Sends a workload to a server and keeps count of its requests.

    Open loop: a request goes out when it is due.  With ``max_concurrency`` it also waits for one of that many places
    (as ``vllm bench serve --max-concurrency`` does; its TTFT counts from when it goes out).  A request with
    ``previous`` is due ``think_ns`` after that one's answer, or after it was refused or given up: a conversation goes
    on with its next turn, as recorded.  With ``request_timeout_ns`` a request whose answer is not complete that long
    after it went out is given up.
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
        self._timeout_ns = workload.request_timeout_ns
        self._in_engine: dict[int, _Sent] = {}
        self._followers = _followers(workload)
        self._num_unsent = len(workload)
        self._server: Server | None = None

    def start(self, server: Server) -> None:
        """Begin to send."""
        self._server = server
        self._world.process(self._arrivals())

    def answered(self, request: Request, end_ns: int) -> None:
        """A request is finished."""
        self._close(request, Outcome.FINISHED, end_ns, request.num_emitted)

    def rejected(self, request: Request, now_ns: int) -> None:
        """The engine refused a request that it had taken in, because it waited too long."""
        self._close(request, Outcome.REJECTED, now_ns, request.num_emitted)

    def lost(self, request: Request, now_ns: int) -> None:
        """A request's replica went away before the answer was complete, and nobody tries it again."""
        self._close(request, Outcome.LOST, now_ns, request.num_emitted)

    def placed(self, request: Request, replica: int) -> None:
        """A request that a server had taken in before has come to this replica; -1 where it waits (again) for one."""
        row = int(request.request_id)
        self._in_engine[row] = self._in_engine[row]._replace(replica=replica)

    def write_unfinished(self) -> int:
        """Log what is still open at the end of the run; returns how many that are."""
        for request, due_ns, replica in self._in_engine.values():
            assert self._server is not None
            num_emitted = self._server.num_emitted_tokens(request, replica)
            self._log.write(request, Outcome.UNFINISHED, replica, due_ns, -1, num_emitted)
        for row, due_ns in self._held:
            self._write_unsent(row, due_ns)
        for row in (~self._is_due).nonzero()[0].tolist():
            self._write_unsent(row, int(self._workload.arrival_ns[row]))
        return len(self._workload) - self.num_done

    def _close(self, request: Request, outcome: Outcome, now_ns: int, num_emitted: int) -> None:
        row = int(request.request_id)
        _, due_ns, replica = self._in_engine.pop(row)
        self._log.write(request, outcome, replica, due_ns, now_ns, num_emitted)
        self._leave(row)

    def _give_up(self, row: int) -> None:
        """The client's patience is over, unless the answer is there."""
        sent = self._in_engine.get(row)
        if sent is not None:
            assert self._server is not None
            num_emitted = self._server.abort(sent.request, sent.replica)
            self._close(sent.request, Outcome.ABORTED, self._world.now_ns, num_emitted)

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
        assert self._server is not None
        request = self._request(row)
        self._num_in_flight += 1
        try:
            replica = self._server.submit(request)
        except ValueError:
            self._log.write(request, Outcome.REJECTED, -1, due_ns, self._world.now_ns, 0)
            self._leave(row)
        else:
            self._in_engine[row] = _Sent(request, due_ns, replica)
            if self._timeout_ns is not None:
                self._world.call_in(self._timeout_ns, self._give_up, row)
        self._num_unsent -= 1
        if not self._num_unsent:
            self._server.end_of_input()

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


class _Sent(NamedTuple):
    """A request that is in a server."""

    request: Request
    due_ns: int
    replica: int


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
