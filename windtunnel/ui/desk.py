"""Hands questions to the process that computes: one at a time, the latest of each page, and never for long.

A page that asks again takes back what it asked before, be it waiting or under way, so that questions never pile up
however fast a slider moves.  A process that overruns its time (it looks at the clock itself, but some computations
cannot be interrupted) or dies is replaced.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from windtunnel.ui.errors import complaint
from windtunnel.ui.question import Question

GRACE_S = 5.0
"""What a computation that cannot be interrupted may overrun its limit by before its process is ended."""
MAX_WAITING = 32
"""Pages whose questions wait; more are told to try again."""
_MAX_LINE = 64 * 2**20
_LAST = ("end", "superseded", "error")
"""Parts that nothing follows."""


class Busy(Exception):
    """Too many pages wait already."""


@dataclass(eq=False)
class Job:
    """A question that was asked by some page."""

    ticket: int
    tab: str
    question: Question
    parts: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)


class Desk:
    """The one process, and who waits for it."""

    def __init__(self, limit_s: float, command: Sequence[str] | None = None, grace_s: float = GRACE_S) -> None:
        """``limit_s`` is what one answer may take; ``command`` runs another worker, for tests."""
        self.limit_s = limit_s
        self._grace_s = grace_s
        self._command = command or (sys.executable, "-m", "windtunnel.ui.worker", str(limit_s))
        self._waiting: OrderedDict[str, Job] = OrderedDict()
        self._running: Job | None = None
        self._num_asked = 0
        self._process: asyncio.subprocess.Process | None = None
        self._called = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process, so that the first question does not wait for it."""
        await self._begin()
        self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """End the process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._kill()

    async def ask(self, question: Question, tab: str) -> AsyncGenerator[dict[str, Any], None]:
        """The parts of the answer; "superseded" if the same page asks again before it is complete.

        Raises Busy if too many other pages wait.
        """
        if len(self._waiting) >= MAX_WAITING and tab not in self._waiting:
            raise Busy(f"{MAX_WAITING} pages wait already: close some, or try again")
        self._num_asked += 1
        job = Job(self._num_asked, tab, question)
        self._take_back(tab)
        self._waiting[tab] = job
        self._called.set()
        try:
            while True:
                part = await job.parts.get()
                yield part
                if part["part"] in _LAST:
                    return
        finally:
            self._drop(job)

    # --- taking back

    def _take_back(self, tab: str) -> None:
        """What this page asked before is not wanted any more."""
        earlier = self._waiting.pop(tab, None)
        for job in (earlier, self._running if self._running and self._running.tab == tab else None):
            if job is not None:
                job.parts.put_nowait({"part": "superseded"})
        if self._running is not None and self._running.tab == tab:
            self._tell({"stop": self._running.ticket})

    def _drop(self, job: Job) -> None:
        """The page went away, or has its answer."""
        if self._waiting.get(job.tab) is job:
            del self._waiting[job.tab]
        if self._running is job:
            self._tell({"stop": job.ticket})

    # --- the process

    async def _work(self) -> None:
        while True:
            await self._called.wait()
            if not self._waiting:
                self._called.clear()
                continue
            _, self._running = self._waiting.popitem(last=False)
            if self._process is None or self._process.returncode is not None:
                await self._replace()  # it died while nobody asked, which is no fault of this question
            try:
                async with asyncio.timeout(self.limit_s + self._grace_s):
                    await self._run(self._running)
            except TimeoutError:
                self._running.parts.put_nowait(_overran(self.limit_s))
                await self._replace()
            except ConnectionError:
                self._running.parts.put_nowait(_died())
                await self._replace()
            self._running = None

    async def _run(self, job: Job) -> None:
        """Pass on the parts of one answer.  Raises ConnectionError if the process dies."""
        question = {"preset": job.question.preset, "settings": dict(job.question.settings)}
        self._tell({"ticket": job.ticket, "question": question})
        assert self._process is not None, "start was called"
        assert self._process.stdout is not None, "it is a pipe"
        while True:
            line = await self._process.stdout.readline()
            if not line:
                raise ConnectionError("the process that computes has died")
            part = json.loads(line)
            if part.pop("ticket") != job.ticket:
                continue
            job.parts.put_nowait(part)
            if part["part"] in ("end", "superseded"):
                return

    def _tell(self, told: dict[str, Any]) -> None:
        if self._process is None or self._process.stdin is None or self._process.stdin.is_closing():
            return
        self._process.stdin.write(json.dumps(told).encode() + b"\n")

    async def _begin(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_MAX_LINE
        )

    async def _replace(self) -> None:
        await self._kill()
        await self._begin()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _overran(limit_s: float) -> dict[str, Any]:
    return complaint(
        f"Ended after more than {limit_s:g} s: ask for fewer requests or shorter answers, or run windtunnel simulate, "
        "which takes its time.",
        "num_requests",
        kind="out_of_time",
    )


def _died() -> dict[str, Any]:
    return complaint(
        "The process that computes has died, probably for lack of memory; a new one has been started.  Ask for fewer "
        "requests.",
        "num_requests",
        kind="died",
    )
