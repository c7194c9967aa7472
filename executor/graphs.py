"""CUDA graphs of decode steps: recorded at a few batch sizes, replayed for every batch that fits one of them.

A step of decodes is launched by one call instead of some ten a layer.  A batch is padded to the next recorded size;
padding rows have slot -1, so that nothing of them is stored, and an empty context, so that they attend to nothing.
Grids depend on sizes only: attention is laid out for the longest sequence that the model takes, and its programs that
find no work end at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from windtunnel.executor.batch import StepBatch
from windtunnel.executor.batch_builder import HostBatch
from windtunnel.executor.cache import PagedKvCache
from windtunnel.executor.devices import Device
from windtunnel.executor.model import Decoder
from windtunnel.executor.staging import Places, Spec, Staging

LARGEST_SIZE = 512
"""Beyond that many sequences launches no longer matter; vLLM 0.32 has the same limit."""


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that get a graph: 1, 2, 4, from 8 on every 8th, from 256 on every 16th, and the largest.

    The largest is ``max_num_seqs``, 512 at most.  They are vLLM 0.32's sizes as far as decode steps can reach them.

    Raises ValueError for fewer than one sequence.
    """
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
    largest = min(max_num_seqs, LARGEST_SIZE)
    regular = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_SIZE + 1, 16)]
    return (*(size for size in regular if size < largest), largest)


class _Graph(NamedTuple):
    places: Places
    """token_ids, positions, slots, context_lens, temperature, top_p, uniforms, and the flat block tables."""
    replay: Callable[[], torch.Tensor]
    """Sampled tokens [size]."""


class GraphRunner:
    """Runs decode steps by graphs whose inputs lie at fixed places."""

    def __init__(self, model: Decoder, cache: PagedKvCache, device: Device, sizes: Sequence[int]) -> None:
        """Raises ValueError for sizes that do not rise from at least 1."""
        if not sizes or sizes[0] < 1 or any(small >= large for small, large in pairwise(sizes)):
            raise ValueError(f"sizes of graphs must rise from at least 1, got {list(sizes)}")
        self.sizes = tuple(sizes)
        self._model = model
        self._cache = cache
        self._device = device
        self._graphs: dict[int, _Graph] = {}
        self._graph_bytes = 0
        most, max_blocks = self.sizes[-1], -(-model.max_model_len // cache.block_size)
        place = device.torch_device
        self._rows = torch.arange(most, dtype=torch.int64, device=place)
        self._query_starts = torch.arange(most + 1, dtype=torch.int32, device=place)
        self._block_tables = torch.zeros((most, max_blocks), dtype=torch.int32, device=place)
        self._staging = Staging(device, 0)
        self._staging.places(self._specs(most))  # all other sizes need less, so that places stay where they are

    @property
    def workspace_bytes(self) -> int:
        """Device memory of the graphs recorded so far, what they compute in included, and of their inputs."""
        inputs = (self._rows, self._query_starts, self._block_tables)
        return self._graph_bytes + self._staging.num_bytes + sum(int(tensor.nbytes) for tensor in inputs)

    @property
    def recorded_sizes(self) -> tuple[int, ...]:
        """Sizes that are ready to be replayed."""
        return tuple(sorted(self._graphs))

    def size_for(self, host: HostBatch) -> int | None:
        """The size of graph that runs this batch; None if it must be run without."""
        num_seqs = len(host.context_lens)
        if host.num_decode_seqs != num_seqs or not 0 < num_seqs <= self.sizes[-1]:
            return None
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def record_all(self) -> None:
        """Record every size now, the largest first: the others then fit into the memory that it computed in."""
        for size in reversed(self.sizes):
            self.record(size)

    def record(self, size: int) -> None:
        """Record one size, unless that was done before.  It runs on padding rows only, so the cache stays as it is."""
        if size in self._graphs:
            return
        places = self._staging.places(self._specs(size))
        _fill(places.host, 0)
        self._staging.send(places.num_bytes)
        self._device.wait(self._device.mark())
        before = self._device.used_bytes()
        replay = self._device.record(lambda: self._compute(size, places.device))
        self._graph_bytes += max(0, self._device.used_bytes() - before)
        self._graphs[size] = _Graph(places, replay)

    def lay_out(self, host: HostBatch, size: int) -> None:
        """Write the batch, padded to ``size``, to where the host keeps what ``send`` copies."""
        arrays = self._graphs[size].places.host
        num_seqs, width = host.block_tables.shape
        _fill(arrays, num_seqs)
        for array, values in zip(arrays, (host.token_ids, host.positions, host.slots, host.context_lens), strict=False):
            array[:num_seqs] = values
        for array, wanted in zip(arrays[4:7], (host.temperature, host.top_p, host.uniforms), strict=True):
            array[host.sample_rows] = wanted
        arrays[7][: num_seqs * width].reshape(num_seqs, width)[:] = host.block_tables

    def send(self, host: HostBatch, size: int) -> None:
        """Begin to copy what ``lay_out`` wrote to where the graph reads it."""
        places = self._graphs[size].places
        num_seqs, width = host.block_tables.shape
        unused = places.host[7].nbytes - num_seqs * width * host.block_tables.itemsize
        self._staging.send(places.num_bytes - unused)
        # Entries past a context are never read, so that what older batches left there may stay.
        self._block_tables[:num_seqs, :width].copy_(places.device[7][: num_seqs * width].view(num_seqs, width))

    def replay(self, size: int) -> torch.Tensor:
        """The sampled tokens [size] of the batch that was sent, one of each row, wanted or not."""
        return self._graphs[size].replay()

    def _compute(self, size: int, inputs: list[torch.Tensor]) -> torch.Tensor:
        token_ids, positions, slots, context_lens, temperature, top_p, uniforms, _ = inputs
        batch = StepBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_starts=self._query_starts[: size + 1],
            context_lens=context_lens,
            block_tables=self._block_tables[:size],
            sample_rows=self._rows[:size],
            num_decode_seqs=size,
            max_query_len=1,
            max_context_len=self._model.max_model_len,
        )
        logits = self._model.forward(batch, self._cache)
        return self._model.ops.sample(logits, temperature, top_p, uniforms)

    def _specs(self, size: int) -> list[Spec]:
        int64, int32, float32 = Spec((size,), np.int64), Spec((size,), np.int32), Spec((size,), np.float32)
        tables = Spec((size * self._block_tables.shape[1],), np.int32)
        return [int64, int64, int64, int32, float32, float32, float32, tables]


def _fill(arrays: list[NDArray[Any]], first: int) -> None:
    """Make padding of the rows from ``first``, and let all rows be sampled greedily."""
    token_ids, positions, slots, context_lens, temperature, top_p, uniforms, _ = arrays
    for array in (token_ids, positions, context_lens):
        array[first:] = 0
    slots[first:] = -1
    temperature[:] = 0.0
    top_p[:] = 1.0
    uniforms[:] = 0.0
