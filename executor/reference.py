"""The operations of a decoder in plain torch, for any device: the CPU's, and the truth that kernels are tested by.

Sums are taken in float32, or in float64 where the inputs are float64, so that the same code tells the error of both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from windtunnel.executor.batch import StepBatch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite float8_e4m3fn; what is larger is stored as this."""
LEAST_TEMPERATURE = 1e-30
"""Lower ones count as this: differences of logits divided by it are still finite or of no weight, as in the kernel."""


class TorchOps:
    """Implements ``ops.Ops``.  Attention goes sequence by sequence, so that its time is linear in what is computed."""

    def __init__(self) -> None:
        self._batch: StepBatch | None = None
        self._sequences: list[_Sequence] = []
        self._stored: torch.Tensor | None = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``ops.Ops``."""
        wide = _wide(x)
        return functional.rms_norm(wide, (x.shape[-1],), weight.to(wide.dtype), eps).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``ops.Ops``."""
        total = (_wide(x) + _wide(residual)).to(x.dtype)
        return self.rms_norm(total, weight, eps), total

    def rope_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        batch: StepBatch,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        """See ``ops.Ops``."""
        cos, sin = cos_sin.index_select(0, batch.positions).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D / 2] each
        slots, rows = batch.slots, self._stored_rows(batch)
        k = _rotate(k, cos, sin)
        if rows is not None:
            slots, k, v = slots[rows], k[rows], v[rows]
        _store(key_cache, slots, k, k_scale)
        _store(value_cache, slots, v, v_scale)
        return _rotate(q, cos, sin)

    def attention(
        self,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: StepBatch,
        scale: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        """See ``ops.Ops``.  A sequence without context (padding) gets zeros."""
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for sequence in self._plan(batch):
            rows = slice(sequence.begin, sequence.end)
            keys = _gather(key_cache, sequence, q.dtype, k_scale)
            values = _gather(value_cache, sequence, q.dtype, v_scale)
            attend = _attend_one if sequence.end - sequence.begin == 1 else _attend_many
            out[rows] = attend(_wide(q[rows]), keys, values, scale).to(q.dtype)
        return out

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See ``ops.Ops``."""
        gate, up = x.chunk(2, dim=-1)
        return (functional.silu(_wide(gate)) * _wide(up)).to(x.dtype)

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """See ``ops.Ops``."""
        return functional.embedding(token_ids, table)

    def gather_rows(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See ``ops.Ops``."""
        return x.index_select(0, rows)

    def sample(
        self, logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniforms: torch.Tensor
    ) -> torch.Tensor:
        """See ``ops.Ops``.

        A logit that is not a number counts as -inf; several of +inf share the probability; a row of -inf is uniform.
        """
        gaps, first = _gaps(logits)
        drawn = temperature > 0
        if not bool(drawn.any()):
            return first
        # Gaps are divided, not logits: no quotient but an infinite one, of weight 0, can then overflow.
        heat = torch.where(drawn, temperature, 1.0).clamp(min=LEAST_TEMPERATURE).unsqueeze(1)
        weights = torch.exp(-gaps / heat)
        cumulated = weights.masked_fill(gaps > _edge(gaps, weights, top_p), 0.0).cumsum(dim=-1)
        target = uniforms.unsqueeze(1) * cumulated[:, -1:]
        chosen = torch.searchsorted(cumulated, target, right=True).squeeze(1)
        # Rounding may lift the target to the sum itself, which nothing exceeds: then it is the last of the nucleus.
        last = torch.searchsorted(cumulated, cumulated[:, -1:].contiguous()).squeeze(1)
        return torch.where(drawn, torch.minimum(chosen, last), first)

    # -- once a step, for all layers

    def _plan(self, batch: StepBatch) -> list[_Sequence]:
        self._look_at(batch)
        return self._sequences

    def _stored_rows(self, batch: StepBatch) -> torch.Tensor | None:
        """The rows that are stored, where not all are."""
        self._look_at(batch)
        return self._stored

    def _look_at(self, batch: StepBatch) -> None:
        if batch is self._batch:
            return
        self._batch = batch
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        self._sequences = [
            _Sequence(starts[i], starts[i + 1], context, batch.block_tables[i])
            for i, context in enumerate(contexts)
            if context > 0
        ]
        is_stored = batch.slots >= 0
        self._stored = None if bool(is_stored.all()) else is_stored.nonzero().squeeze(1)


class _Sequence(NamedTuple):
    begin: int
    """First of its rows."""
    end: int
    context: int
    blocks: torch.Tensor
    """Its row of the block table."""


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = _wide(x).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _store(cache: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, scale: float) -> None:
    flat = cache.view(-1, *cache.shape[2:])  # [blocks * block size, heads, head size]
    if cache.dtype == FP8:
        quantised = (_wide(x) / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        flat.view(torch.uint8).index_copy_(0, slots, quantised.view(torch.uint8))
    else:
        flat.index_copy_(0, slots, x.to(cache.dtype))


def _gather(cache: torch.Tensor, sequence: _Sequence, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Keys or values of the sequence: [context, heads, head size]."""
    blocks = sequence.blocks[: -(-sequence.context // cache.shape[1])]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if cache.dtype == FP8:
        found = cache.view(torch.uint8).index_select(0, blocks).view(FP8).to(wide) * scale
    else:
        found = cache.index_select(0, blocks).to(wide)
    return found.view(-1, *cache.shape[2:])[: sequence.context]


def _attend_one(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One new token: q [1, query heads, D], keys and values [context, KV heads, D]."""
    grouped = q.reshape(keys.shape[1], -1, q.shape[-1])  # [KV heads, group, D]
    scores = torch.matmul(grouped, keys.permute(1, 2, 0)) * scale
    return torch.matmul(torch.softmax(scores, dim=-1), values.transpose(0, 1)).view(q.shape)


def _attend_many(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Several new tokens at the end of the context."""
    num_new, context = q.shape[0], keys.shape[0]
    mask = None
    if context > num_new:
        mask = torch.ones(num_new, context, dtype=torch.bool, device=q.device).tril_(context - num_new)
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != keys.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def _gaps(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, V]: how far each logit is below the largest of its row; and [R]: the first id of a largest one."""
    x = _wide(logits)
    x = torch.where(x.isnan(), -torch.inf, x)
    largest, first = x.max(dim=-1, keepdim=True).values, x.argmax(dim=-1)
    at_top = x == largest
    return torch.where(at_top, 0.0, largest - torch.where(at_top, 0.0, x)), first  # inf - inf is not a number


def _edge(gaps: torch.Tensor, weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[R, 1]: the gap of the last token needed to reach top_p, infinity where all are in the nucleus."""
    if not bool((top_p < 1.0).any()):
        return torch.full_like(gaps[:, :1], torch.inf)
    ordered, ids = gaps.sort(dim=-1)
    cumulated = weights.gather(1, ids).cumsum(dim=-1)
    needed = torch.searchsorted(cumulated, top_p.unsqueeze(1) * cumulated[:, -1:])
    edge = ordered.gather(1, needed.clamp_(max=ordered.shape[1] - 1))
    return torch.where(top_p.unsqueeze(1) < 1.0, edge, torch.inf)
