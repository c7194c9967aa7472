"""From the grants of a step to the inputs of a forward pass: one pass on the host, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from windtunnel.executor.batch import EngineView, Grant, StepBatch
from windtunnel.sim.engine.request import Request

Ints = NDArray[np.int64]
_LARGEST_BELOW_1 = np.nextafter(np.float32(1.0), np.float32(0.0))


class HostBatch(NamedTuple):
    """A ``StepBatch`` in numpy, with the same shapes and types, and how the wanted rows are sampled."""

    token_ids: Ints
    positions: Ints
    slots: Ints
    query_starts: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    sample_rows: Ints
    num_decode_seqs: int
    max_query_len: int
    max_context_len: int
    sampled: list[Request]
    """Whose token each of ``sample_rows`` yields."""
    temperature: NDArray[np.float32]
    """[R], like the two that follow."""
    top_p: NDArray[np.float32]
    uniforms: NDArray[np.float32]
    """Where a row is drawn at random: a number in [0, 1) that depends on seed and position only."""

    def to_device(self, device: str | torch.device) -> StepBatch:
        """The batch as tensors."""
        return StepBatch(
            token_ids=torch.from_numpy(self.token_ids).to(device),
            positions=torch.from_numpy(self.positions).to(device),
            slots=torch.from_numpy(self.slots).to(device),
            query_starts=torch.from_numpy(self.query_starts).to(device),
            context_lens=torch.from_numpy(self.context_lens).to(device),
            block_tables=torch.from_numpy(self.block_tables).to(device),
            sample_rows=torch.from_numpy(self.sample_rows).to(device),
            num_decode_seqs=self.num_decode_seqs,
            max_query_len=self.max_query_len,
            max_context_len=self.max_context_len,
        )

    def sampling_tensors(self, device: str | torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """temperature, top_p and uniforms as tensors."""
        temperature, top_p, uniforms = (
            torch.from_numpy(array).to(device) for array in (self.temperature, self.top_p, self.uniforms)
        )
        return temperature, top_p, uniforms


class BatchBuilder:
    """Builds the batches of one engine; it keeps each request's block table, so that a step only adds to it."""

    def __init__(self, block_size: int, max_model_len: int) -> None:
        self._block_size = block_size
        self._rows = _Rows(-(-max_model_len // block_size))

    def clear(self) -> None:
        """Forget all requests."""
        self._rows.clear()

    def build(self, grants: Sequence[Grant], view: EngineView) -> HostBatch:
        """The batch of these grants, in their order; those of one token must come first."""
        rows, size = self._rows.of(grants, view), self._block_size
        counts = np.array([grant.num_tokens for grant in grants], dtype=np.int64)
        computed = np.array([grant.num_computed_tokens for grant in grants], dtype=np.int64)
        contexts = computed + counts
        starts = np.zeros(len(grants) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        longest = int(contexts.max(initial=0))
        tables = self._rows.blocks[rows, : -(-longest // size)]
        # What a recycled row or a longer list holds beyond the context is of no concern: the contract wants zeros.
        tables[np.arange(tables.shape[1]) * size >= contexts[:, None]] = 0
        sequence = np.repeat(np.arange(len(grants)), counts)
        positions = np.arange(starts[-1]) + (computed - starts[:-1])[sequence]
        slots = tables[sequence, positions // size].astype(np.int64) * size + positions % size
        samples = np.array([grant.samples for grant in grants], dtype=bool)
        sample_rows = starts[1:][samples] - 1
        temperature, top_p, uniforms = self._rows.sampling(rows[samples], contexts[samples])
        return HostBatch(
            token_ids=_token_ids(grants, view),
            positions=positions,
            slots=slots,
            query_starts=starts.astype(np.int32),
            context_lens=contexts.astype(np.int32),
            block_tables=tables,
            sample_rows=sample_rows,
            num_decode_seqs=int(np.count_nonzero(counts == 1)),
            max_query_len=int(counts.max(initial=0)),
            max_context_len=longest,
            sampled=[grant.request for grant in grants if grant.samples],
            temperature=temperature,
            top_p=top_p,
            uniforms=uniforms,
        )


def uniforms(seeds: NDArray[np.uint64], positions: Ints) -> NDArray[np.float32]:
    """``sampling.uniform`` of many tokens at once, rounded to float32 but never up to 1."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds) + positions.astype(np.uint64))
    exact = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.minimum(exact.astype(np.float32), _LARGEST_BELOW_1)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _token_ids(grants: Sequence[Grant], view: EngineView) -> Ints:
    token_ids: list[int] = []
    for request, num_tokens, computed, _ in grants:
        known = view.token_ids(request)
        if num_tokens == 1:
            token_ids.append(known[computed])
        else:
            token_ids.extend(known[computed : computed + num_tokens])
    return np.array(token_ids, dtype=np.int64)


class _Rows:
    """A row for each request that was in a recent step: its blocks, and how it is sampled."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._step = 0
        self._row_of: dict[Request, int] = {}
        self._resize(64)

    def clear(self) -> None:
        """Forget all requests."""
        self._row_of.clear()
        self._free = list(range(len(self.blocks)))

    def of(self, grants: Sequence[Grant], view: EngineView) -> Ints:
        """The rows of these requests, brought up to date."""
        self._step += 1
        if len(grants) > len(self.blocks):
            self._resize(2 * len(grants))
        rows = [self._row_of.get(grant.request, -1) for grant in grants]
        self._used_in[[row for row in rows if row >= 0]] = self._step
        for i, grant in enumerate(grants):
            request, row = grant.request, rows[i]
            if row < 0:  # unless an earlier grant took it: a request has several where it catches up
                taken = self._row_of.get(request)
                row = rows[i] = self._take(request, view) if taken is None else taken
            elif self._order[row] != request.order:  # admitted again since: its blocks are others
                self._start(row, request)
            num_blocks = len(request.block_ids)
            if self._num_blocks[row] != num_blocks:
                known = self._num_blocks[row]
                self.blocks[row, known:num_blocks] = request.block_ids[known:]
                self._num_blocks[row] = num_blocks
        return np.array(rows, dtype=np.int64)

    def sampling(self, rows: Ints, positions: Ints) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """temperature, top_p and uniforms for the tokens of these rows' requests at these positions."""
        temperature = self._temperature[rows]
        drawn = uniforms(self._seed[rows], positions) if temperature.any() else np.zeros(len(rows), dtype=np.float32)
        return temperature, self._top_p[rows], drawn

    def _take(self, request: Request, view: EngineView) -> int:
        if not self._free:
            self._drop_unused()
        row = self._row_of[request] = self._free.pop()
        self._used_in[row] = self._step
        params = view.sampling_params(request)
        self._temperature[row] = params.temperature
        self._top_p[row] = params.top_p
        self._seed[row] = params.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._start(row, request)
        return row

    def _start(self, row: int, request: Request) -> None:
        self._num_blocks[row] = 0
        self._order[row] = request.order

    def _drop_unused(self) -> None:
        """Let go of those that are not in this step: they have left, or will be taken in anew."""
        unused = [request for request, row in self._row_of.items() if self._used_in[row] != self._step]
        self._free = [self._row_of.pop(request) for request in unused]

    def _resize(self, num_rows: int) -> None:
        self.blocks = np.zeros((num_rows, self._max_blocks), dtype=np.int32)
        self._num_blocks = [0] * num_rows
        self._order = [-1] * num_rows
        self._used_in = np.zeros(num_rows, dtype=np.int64)
        self._temperature = np.zeros(num_rows, dtype=np.float32)
        self._top_p = np.zeros(num_rows, dtype=np.float32)
        self._seed = np.zeros(num_rows, dtype=np.uint64)
        self.clear()
