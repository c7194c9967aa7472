"""What the GPU executor asks of a device besides running operations: clocks, memory for copies, recorded work.

``CudaDevice`` is a GPU (CUDA or ROCm).  ``HostDevice`` answers the same for the CPU, so that all code around the
kernels runs, and is tested, without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class GpuMissing(RuntimeError):
    """There is no GPU that torch and Triton can use; the message says what is missing and what to do."""


class Device(Protocol):
    """A device whose work is asynchronous and can be recorded."""

    torch_device: torch.device
    """Where its tensors are."""

    def mark(self) -> Any:
        """A point in the stream of work, reached when everything before it is done."""

    def ns_between(self, first: Any, last: Any) -> int:
        """Device time between two marks that have been reached."""

    def wait(self, mark: Any) -> None:
        """Block until the mark is reached."""

    def hold_up(self) -> None:
        """Keep the device from the work that follows for some 50 ms, so that it never has to wait for its host."""

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Host memory [bytes] uint8 that is copied to and from the device without blocking."""

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run ``compute`` as often as it takes to record it; the answer replays it.

        The replay reads what the tensors that ``compute`` read hold by then, and always returns the same tensor.
        """

    def used_bytes(self) -> int:
        """Device memory that is taken, by whomever."""


class CudaDevice:
    """The present CUDA (or ROCm) device; what it records are CUDA graphs that share one pool of memory."""

    _WARM_UPS = 2  # the first compiles kernels and loads them, which is forbidden while a graph is captured
    _HELD_UP_CYCLES = 100_000_000

    def __init__(self) -> None:
        """Raises GpuMissing if there is none."""
        self.torch_device = require_gpu()
        self._pool: Any = None
        self._stream: Any = None  # one for all recordings: cuBLAS keeps a workspace for each stream that it has seen

    def mark(self) -> Any:
        """See ``Device``."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ns_between(self, first: Any, last: Any) -> int:
        """See ``Device``.  The resolution is about half a microsecond (CUDA runtime API, cudaEventElapsedTime)."""
        return int(first.elapsed_time(last) * 1e6)

    def wait(self, mark: Any) -> None:
        """See ``Device``."""
        mark.synchronize()

    def hold_up(self) -> None:
        """See ``Device``."""
        torch.cuda._sleep(self._HELD_UP_CYCLES)

    def staging(self, num_bytes: int) -> torch.Tensor:
        """See ``Device``."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """See ``Device``."""
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.torch_device)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self._WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device, as a server's do.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            out = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    def used_bytes(self) -> int:
        """See ``Device``."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return int(total - free)


class HostDevice:
    """The CPU: its work is done when a call returns, and what it records is computed again at each replay."""

    torch_device = torch.device("cpu")

    def mark(self) -> int:
        """See ``Device``."""
        return time.perf_counter_ns()

    def ns_between(self, first: Any, last: Any) -> int:
        """See ``Device``."""
        return int(last - first)

    def wait(self, mark: Any) -> None:
        """See ``Device``."""

    def hold_up(self) -> None:
        """See ``Device``.  The CPU never waits for itself."""

    def staging(self, num_bytes: int) -> torch.Tensor:
        """See ``Device``."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """See ``Device``."""
        out = compute().clone()

        def replay() -> torch.Tensor:
            return out.copy_(compute())

        return replay

    def used_bytes(self) -> int:
        """See ``Device``.  The CPU's memory is not counted."""
        return 0


def require_gpu() -> torch.device:
    """The present GPU; raises GpuMissing, which says what is missing, if there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.version.cuda is None and torch.version.hip is None:
        missing = f"torch {torch.__version__} is built for CPUs only: install its CUDA or ROCm build"
    else:
        missing = "torch finds no GPU: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
    raise GpuMissing(f"the Triton executor needs a GPU, but {missing}; --executor torch runs on a CPU")
