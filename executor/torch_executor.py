"""The executor in plain torch on a CPU: slow, exact, and the hardware of those who have no GPU."""

from __future__ import annotations

import time

import torch

from windtunnel.executor.batch_builder import HostBatch
from windtunnel.executor.cache import PagedKvCache
from windtunnel.executor.model import Decoder
from windtunnel.executor.model_executor import ModelExecutor

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
    ) -> None:
        """``clock`` times the steps: "wall", or "cpu" for the processor time of the calling thread, which hardly sees
        what else the machine does.  ``num_threads`` is torch's number of threads, in the whole process, from the first
        step until ``close``; more than one makes times unsteady on a shared machine.

        Raises ValueError for an unknown clock, for the clock "cpu" with more than one thread (the others' time would be
        lost), and for a model that is not on the CPU.
        """
        super().__init__(model, cache, max_catch_up_tokens=max_catch_up_tokens)
        if model.device.type != "cpu":
            raise ValueError(f"the model is on {model.device}: this executor computes on the CPU")
        if clock not in CLOCKS:
            raise ValueError(f"clock must be one of {', '.join(CLOCKS)}, got {clock!r}")
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        if clock == "cpu" and num_threads != 1:
            raise ValueError(f"the clock 'cpu' needs num_threads=1, got {num_threads}: it sees one thread only")
        self.clock = clock
        self.num_threads = num_threads
        self._num_threads_before = torch.get_num_threads()

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
        return super()._compute(host)
