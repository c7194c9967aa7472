"""How far a plan is: which of its steps it is at, how many jobs of it are done, and how long the rest of them takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from windtunnel.workers import Done, Job, Progress, Workers

NUM_STAGES = 7
"""Those of ``docs/plan.md``: memory, alone, at most, a share, replications, whole fleets, what if."""

Tell = Callable[[str], None]


class Stage:
    """Tells what is done of one step of the search.

    How many steps a search goes on for is not known before, so the time left is that of the jobs of this one.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._began_s = 0.0
        self._progress = Progress(quiet=True)
        self._num_asked = 0
        self._is_known = False

    def begin(self, number: int, what: str, total: int | None = None) -> None:
        """Another step; ``total`` is how many jobs it will take in all, None where that is how many are asked for."""
        self._progress = Progress(total or 0, label=f"{number} of {NUM_STAGES}, {what}", quiet=True)
        self._began_s, self._num_asked, self._is_known = time.monotonic(), 0, total is not None

    def do(self, jobs: Sequence[Job], workers: Workers) -> list[Any]:
        """Results of jobs that belong to this step, in order."""
        if not jobs:
            return []
        self._num_asked += len(jobs)
        if not self._is_known:
            self._progress.total = self._num_asked
        self._show()
        return list(workers.map(jobs, tell=self._count))

    def _count(self, done: Done) -> None:
        self._progress(done)
        self._show()

    def _show(self) -> None:
        if self._progress.num_done:
            self._tell(self._progress.line(time.monotonic() - self._began_s))
        else:
            self._tell(self._progress.label)
