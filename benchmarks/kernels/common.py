"""How an operation is timed, and what is told of it.

Calls are recorded (a CUDA graph on a GPU) and replayed, so that launches cost nothing; they take turns among inputs
that together exceed the cache, so that every call reads from memory; inputs are random, because zeros run faster.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from windtunnel.executor.batch import StepBatch
from windtunnel.executor.devices import CudaDevice, Device, HostDevice
from windtunnel.executor.ops import Ops

Call = Callable[[], object]
_ROTATED_BYTES = 256 << 20  # several times the cache of any card so far
_MOST_SETS = 16
_REPLAY_S = 2e-3  # long enough that what launching a graph costs is lost in it
_REPEATS = 15


class Times(NamedTuple):
    """Seconds of one call."""

    median_s: float
    p10_s: float
    p90_s: float


class Row(NamedTuple):
    """One shape of one operation."""

    op: str
    shape: str
    times: Times
    num_bytes: int
    """Least traffic with memory: each input read once, each output written once."""
    num_flops: int
    """Multiplications and additions that the result needs."""

    def told(self, copy_bytes_per_s: float | None = None, matmul_flops_per_s: float | None = None) -> dict[str, Any]:
        """As JSON, with shares of the card's own copy bandwidth and matrix rate where these are known."""
        told = {"op": self.op, "shape": self.shape, **self.times._asdict()}
        bytes_per_s, flops_per_s = (count / self.times.median_s for count in (self.num_bytes, self.num_flops))
        told |= {"bytes_per_s": bytes_per_s, "flops_per_s": flops_per_s}
        if copy_bytes_per_s:
            told["share_of_copy"] = bytes_per_s / copy_bytes_per_s
        if matmul_flops_per_s:
            told["share_of_matmul"] = flops_per_s / matmul_flops_per_s
        return told


class Heads(NamedTuple):
    """Attention's shape; Llama-3.1-8B's unless told otherwise."""

    num_query: int = 32
    num_kv: int = 8
    size: int = 128
    block_size: int = 16


class Bench:
    """Where and with what operations are timed."""

    def __init__(self, device: Device, ops: Ops, *, dtype: torch.dtype = torch.bfloat16, tiny: bool = False) -> None:
        """``tiny`` shrinks all shapes to what a CPU does at once: to try the code, not to measure."""
        self.device = device
        self.ops = ops
        self.dtype = dtype
        self.tiny = tiny
        self.place = device.torch_device
        self.heads = Heads(4, 2, 32, 16) if tiny else Heads()
        self._generator = torch.Generator(self.place).manual_seed(0)
        self._draw = np.random.default_rng(0)

    def pick(self, real: Sequence[Any], tiny: Sequence[Any]) -> Sequence[Any]:
        """The shapes to go through."""
        return tiny if self.tiny else real

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, dtype=dtype or self.dtype, device=self.place, generator=self._generator)

    def num_sets(self, num_bytes: int) -> int:
        """How many sets of inputs of that size the calls take turns among."""
        return 1 if self.tiny else max(1, min(_MOST_SETS, -(-_ROTATED_BYTES // num_bytes)))

    def kv_cache(self, num_blocks: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random keys or values."""
        heads, dtype = self.heads, dtype or self.dtype
        shape = (num_blocks, heads.block_size, heads.num_kv, heads.size)
        return self.normal(*shape, dtype=torch.bfloat16).to(dtype)

    def batch(self, query_lens: Sequence[int], context_lens: Sequence[int]) -> tuple[StepBatch, int]:
        """Sequences whose blocks are scattered over the cache, and the number of blocks that it must have."""
        return step_batch(query_lens, context_lens, self.heads.block_size, self._draw, self.place)

    def time(self, calls: Sequence[Call]) -> Times:
        """Seconds of one of these calls, which must be alike."""
        return time_calls(self.device, calls, repeats=3, replay_s=0.0) if self.tiny else time_calls(self.device, calls)


def step_batch(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_size: int,
    draw: np.random.Generator,
    place: torch.device,
) -> tuple[StepBatch, int]:
    """Sequences in random blocks from 1 on, those with one new token first; and the number of blocks."""
    new, contexts = np.array(query_lens), np.array(context_lens)
    needed = -(-contexts // block_size)
    ids = draw.permutation(int(needed.sum())).astype(np.int32) + 1
    tables = np.zeros((len(new), int(needed.max())), dtype=np.int32)
    begin = 0
    for table, count in zip(tables, needed, strict=True):
        table[:count] = ids[begin : begin + count]
        begin += count
    starts = np.concatenate([[0], np.cumsum(new)])
    sequence = np.repeat(np.arange(len(new)), new)
    positions = np.arange(starts[-1]) + (contexts - new - starts[:-1])[sequence]
    slots = tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    arrays = (
        draw.integers(0, 100, starts[-1]),
        positions,
        slots,
        starts.astype(np.int32),
        contexts.astype(np.int32),
        tables,
        starts[1:] - 1,
    )
    token_ids, positions, slots, starts, contexts, tables, rows = (torch.from_numpy(a).to(place) for a in arrays)
    batch = StepBatch(
        token_ids,
        positions,
        slots,
        starts,
        contexts,
        tables,
        rows,
        num_decode_seqs=int(np.count_nonzero(new == 1)),
        max_query_len=int(new.max()),
        max_context_len=int(np.max(context_lens)),
    )
    return batch, int(needed.sum()) + 1


def time_calls(device: Device, calls: Sequence[Call], *, repeats: int = _REPEATS, replay_s: float = _REPLAY_S) -> Times:
    """Seconds of one of these calls: the median over replays of all of them, recorded as often as to fill a replay."""
    once_s = _replay_s(device, list(calls), 1)[0]
    rounds = max(1, round(replay_s / max(once_s, 1e-9)))
    seconds = np.array(_replay_s(device, list(calls) * rounds, repeats)) / (rounds * len(calls))
    p10, median, p90 = np.quantile(seconds, [0.1, 0.5, 0.9])
    return Times(float(median), float(p10), float(p90))


def _replay_s(device: Device, calls: list[Call], repeats: int) -> list[float]:
    device = type(device)()  # with a pool of memory of its own, which goes with the recording
    nothing = torch.empty(0, device=device.torch_device)

    def compute() -> torch.Tensor:
        for call in calls:
            call()
        return nothing

    replay = device.record(compute)
    replay()
    seconds = []
    for _ in range(repeats):
        begin = device.mark()
        replay()
        end = device.mark()
        device.wait(end)
        seconds.append(device.ns_between(begin, end) * 1e-9)
    return seconds


def default_bench(*, tiny: bool = False) -> Bench:
    """On the GPU with Triton's kernels; without one, tiny shapes on the CPU: in torch, or in Triton's interpreter."""
    has_gpu = torch.cuda.is_available()
    device: Device = CudaDevice() if has_gpu else HostDevice()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    dtype = torch.bfloat16 if has_gpu else torch.float32
    return Bench(device, default_ops(triton=has_gpu or interpreted), dtype=dtype, tiny=tiny or not has_gpu)


def default_ops(*, triton: bool) -> Ops:
    """Triton's kernels or plain torch."""
    if triton:
        from windtunnel.executor.kernels.ops import TritonOps

        return TritonOps()
    from windtunnel.executor.reference import TorchOps

    return TorchOps()


def run_alone(bench: Callable[[Bench], list[Row]], what: str | None) -> None:
    """Print the rows of one module."""
    argparse.ArgumentParser(description=what).parse_args()
    under_test = default_bench()
    with torch.inference_mode():
        for row in bench(under_test):
            print_row(row.told())


def print_row(told: dict[str, Any]) -> None:
    """One line of a table."""
    shares = [
        f"{100 * told[name]:5.1f} % of {name[9:]}" for name in ("share_of_copy", "share_of_matmul") if name in told
    ]
    print(
        f"  {told['op']:18} {told['shape']:44} {1e6 * told['median_s']:10.1f} µs "
        f"({1e6 * told['p10_s']:.1f} to {1e6 * told['p90_s']:.1f})  {1e-12 * told['bytes_per_s']:6.3f} TB/s "
        f"{1e-12 * told['flops_per_s']:7.1f} TFLOP/s  {'  '.join(shares)}",
        flush=True,
    )
