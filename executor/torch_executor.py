"""The executor in plain torch on a CPU: slow, exact, and the hardware of those who have no GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from windtunnel.executor.all_reduce import AllReduceTable
from windtunnel.executor.batch_builder import HostBatch
from windtunnel.executor.cache import PagedKvCache
from windtunnel.executor.model import Decoder
from windtunnel.executor.model_executor import ModelExecutor
from windtunnel.executor.timing import OpTiming, TimedOps, timed_ops

_THREADS_PER_CPU = 4
CLOCKS = ("wall", "cpu")


class TorchExecutor(ModelExecutor):
    """Computes steps on the CPU."""

    def __init__(
        self,
        model: Decoder,
        cache: PagedKvCache,
        *,
        clock: str = "wall",
        num_threads: int = 1,
        max_catch_up_tokens: int = 2048,
        all_reduce: AllReduceTable | None = None,
    ) -> None:
        """``clock`` times the steps: "wall", or "cpu" for the processor time of the calling thread, which hardly sees
        what else the machine does.  ``num_threads`` is torch's number of threads, in the whole process, from the first
        step until ``close``; more than one makes times unsteady on a shared machine.

        Raises ValueError for an unknown clock, for the clock "cpu" with more than one thread (the others' time would be
        lost), for a model that is not on the CPU, and as ``ModelExecutor`` does.
        """
        super().__init__(model, cache, max_catch_up_tokens=max_catch_up_tokens, all_reduce=all_reduce)
        if model.device.type != "cpu":
            raise ValueError(f"the model is on {model.device}: this executor computes on the CPU")
        if clock not in CLOCKS:
            raise ValueError(f"clock must be one of {', '.join(CLOCKS)}, got {clock!r}")
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        most_threads = _THREADS_PER_CPU * (os.cpu_count() or 1)
        if num_threads > most_threads:
            raise ValueError(
                f"num_threads must be at most {most_threads}, {_THREADS_PER_CPU} for each processor here, got "
                f"{num_threads}: more make it slower, and far too many end the process"
            )
        if clock == "cpu" and num_threads != 1:
            raise ValueError(f"the clock 'cpu' needs num_threads=1, got {num_threads}: it sees one thread only")
        self.clock = clock
        self.num_threads = num_threads
        self.last_op_timings: list[OpTiming] = []
        """Of the latest step within ``timing_ops``."""
        self._timed: TimedOps | None = None
        self._num_threads_before = torch.get_num_threads()

    @contextmanager
    def timing_ops(self) -> Iterator[None]:
        """Time each operation of the steps that run meanwhile, by the executor's clock (``last_op_timings``)."""
        with timed_ops(self.model, _ClockMarks(self._now_ns)) as timed:
            self._timed = timed
            try:
                yield
            finally:
                self._timed = None

    def _now_ns(self) -> int:
        return time.thread_time_ns() if self.clock == "cpu" else time.perf_counter_ns()

    def close(self) -> None:
        """See ``ModelExecutor.close``; torch has its former number of threads again."""
        super().close()
        torch.set_num_threads(self._num_threads_before)

    def _compute(self, host: HostBatch) -> tuple[list[int], int]:
        if (
            torch.get_num_threads() != self.num_threads
        ):  # not set back after each step: that costs more than small steps
            torch.set_num_threads(self.num_threads)
        computed = super()._compute(host)
        if self._timed is not None:
            self.last_op_timings = self._timed.timings()
        return computed


class _ClockMarks:
    """Marks of a clock on the CPU, whose work is done when a call returns."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.mark = now_ns

    def ns_between(self, first: int, last: int) -> int:
        """See ``timing.Marks``."""
        return last - first
