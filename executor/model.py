"""A decoder's forward pass over the flattened tokens of a step, on whatever operations and device it is given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from windtunnel.executor.batch import StepBatch
from windtunnel.executor.cache import PagedKvCache
from windtunnel.executor.model_config import DecoderConfig
from windtunnel.executor.ops import Ops
from windtunnel.executor.weights import DecoderWeights, LayerWeights

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x [T, inputs], weight [outputs, inputs], bias or None) -> [T, outputs]."""


class Decoder:
    """A Llama-like decoder, or one rank's share of it, whose keys and values are in a paged cache."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        ops: Ops,
        *,
        max_model_len: int | None = None,
        all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
        linear: Linear = functional.linear,
    ) -> None:
        """``max_model_len`` is the longest sequence, by default all that the model knows.

        ``all_reduce`` sums what the ranks add to the residual stream.  Without it a share computes the same shapes as
        in a group of ranks, but no meaningful values: good enough to measure.  Logits are the rank's part of them.

        Raises ValueError for a ``max_model_len`` that the model cannot take.
        """
        self.max_model_len = config.max_model_len if max_model_len is None else max_model_len
        config.check_max_model_len(self.max_model_len)
        self.config = config
        self.weights = weights
        self.ops = ops
        self.linear = linear
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.cos_sin = torch.from_numpy(config.rope.cos_sin(self.max_model_len, config.head_dim)).to(self.device)
        self._all_reduce = all_reduce
        self._heads = config.local_num_attention_heads
        self._kv_heads = config.local_num_key_value_heads
        self._qkv_sizes = [heads * config.head_dim for heads in (self._heads, self._kv_heads, self._kv_heads)]
        self._scale = config.head_dim**-0.5

    def forward(self, batch: StepBatch, cache: PagedKvCache) -> torch.Tensor:
        """Logits [R, V] (float32) of the rows that the batch wants; keys and values of all rows go to the cache."""
        ops, weights, eps = self.ops, self.weights, self.config.rms_norm_eps
        residual = ops.embed(batch.token_ids, weights.embedding)
        x = ops.rms_norm(residual, weights.layers[0].input_norm, eps)
        for i, layer in enumerate(weights.layers):
            if i:
                x, residual = ops.add_rms_norm(x, residual, layer.input_norm, eps)
            x = self._attention(x, layer, batch, cache, i)
            x, residual = ops.add_rms_norm(x, residual, layer.post_attention_norm, eps)
            x = self._mlp(x, layer)
        if not batch.sample_rows.shape[0]:
            return x.new_empty((0, weights.lm_head.shape[0]), dtype=torch.float32)
        x, residual = ops.gather_rows(x, batch.sample_rows), ops.gather_rows(residual, batch.sample_rows)
        x, _ = ops.add_rms_norm(x, residual, weights.norm, eps)
        return self.linear(x, weights.lm_head, None).float()

    def _attention(
        self, x: torch.Tensor, layer: LayerWeights, batch: StepBatch, cache: PagedKvCache, index: int
    ) -> torch.Tensor:
        ops, eps, head_dim = self.ops, self.config.rms_norm_eps, self.config.head_dim
        q, k, v = self.linear(x, layer.qkv, layer.qkv_bias).split(self._qkv_sizes, dim=-1)
        q = q.unflatten(-1, (self._heads, head_dim))
        k = k.unflatten(-1, (self._kv_heads, head_dim))
        v = v.unflatten(-1, (self._kv_heads, head_dim))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)
        keys, values, k_scale, v_scale = cache.keys[index], cache.values[index], cache.k_scale, cache.v_scale
        q = ops.rope_and_store(q, k, v, self.cos_sin, batch, keys, values, k_scale, v_scale)
        out = ops.attention(q, keys, values, batch, self._scale, k_scale, v_scale)
        return self._reduced(self.linear(out.flatten(1), layer.o, layer.o_bias))

    def _mlp(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        gated = self.ops.silu_and_mul(self.linear(x, layer.gate_up, layer.gate_up_bias))
        return self._reduced(self.linear(gated, layer.down, layer.down_bias))

    def _reduced(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._all_reduce is None else self._all_reduce(x)
