"""Attention of a step's new tokens over the paged cache: decodes in one launch, longer chunks in another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from windtunnel.executor.kernels import attention_combine, attention_decode, attention_prefill
from windtunnel.executor.kernels.attention_decode import decode
from windtunnel.executor.kernels.attention_prefill import prefill
from windtunnel.executor.kernels.device import INTERPRETED

if TYPE_CHECKING:
    from windtunnel.executor.batch import StepBatch
    from windtunnel.executor.kernels.aot import AotCase

_Q_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: StepBatch,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Causal attention of each new token over its sequence's cache, as ``executor.ops.Ops.attention``: [T, Hq, D].

    q may be a slice of a wider tensor if a head's elements are adjacent.  Caches are [N, S, Hk, D], S at least 8, of
    q's type or float8_e4m3fn.  A decode with context length 0 (a padding row) gives 0.
    Only decodes can be padded: rows past the last sequence's would be left undefined.  Raises ValueError for shapes,
    types, strides or devices that the kernels can't take.
    """
    _check(q, key_cache, value_cache, batch, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_decodes = batch.num_decode_seqs
    num_seqs = batch.context_lens.shape[0]
    if num_decodes:
        decode(
            out[:num_decodes],
            q[:num_decodes],
            key_cache,
            value_cache,
            batch.block_tables[:num_decodes],
            batch.context_lens[:num_decodes],
            batch.max_context_len,
            scale,
            k_scale,
            v_scale,
        )
    if num_seqs > num_decodes:
        prefill(
            out[num_decodes:],
            q[num_decodes:],
            key_cache,
            value_cache,
            batch.block_tables[num_decodes:],
            batch.context_lens[num_decodes:],
            batch.query_starts[num_decodes:],
            batch.max_query_len,
            batch.max_context_len,
            scale,
            k_scale,
            v_scale,
        )
    return out


def aot_cases(sm: int) -> list[AotCase]:
    """All attention kernels as they are launched on ``sm`` (80, 90, 100)."""
    return attention_decode.aot_cases(sm) + attention_prefill.aot_cases(sm) + attention_combine.aot_cases(sm)


def _check(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, batch: StepBatch, scale: float) -> None:
    if q.dim() != 3 or key_cache.dim() != 4:
        raise ValueError(
            f"q must be [tokens, heads, head_dim] and caches [blocks, block_size, KV heads, head_dim], got"
            f" {list(q.shape)} and {list(key_cache.shape)}"
        )
    num_heads, head_dim = q.shape[1:]
    _, block_size, num_kv_heads, cached_dim = key_cache.shape
    if cached_dim != head_dim or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads of {head_dim} don't fit {num_kv_heads} KV heads of {cached_dim}: the number of"
            " query heads must be a multiple and the size the same"
        )
    if block_size < 8:
        raise ValueError(f"block_size must be at least 8, got {block_size}")
    if head_dim > 256 or head_dim % 2:
        raise ValueError(f"head_dim must be even and at most 256, got {head_dim}")
    if q.dtype not in _Q_TYPES:
        raise ValueError(f"q must be float32, float16 or bfloat16, got {q.dtype}: cast it")
    if key_cache.dtype not in (q.dtype, torch.float8_e4m3fn) or value_cache.dtype != key_cache.dtype:
        raise ValueError(
            f"both caches must be {q.dtype} like q, or float8_e4m3fn, got {key_cache.dtype} and {value_cache.dtype}"
        )
    if key_cache.stride() != value_cache.stride() or key_cache.shape != value_cache.shape:
        raise ValueError(
            f"key and value cache must be laid out alike, got shapes {list(key_cache.shape)} and"
            f" {list(value_cache.shape)}, strides {key_cache.stride()} and {value_cache.stride()}"
        )
    if q.stride(2) != 1 or key_cache.stride(3) != 1:
        raise ValueError(f"elements of a head must be adjacent, got strides {q.stride()} and {key_cache.stride()}")
    if batch.block_tables.stride(1) != 1:
        raise ValueError(f"ids of a sequence's blocks must be adjacent, got strides {batch.block_tables.stride()}")
    if len({q.device, key_cache.device, value_cache.device, batch.block_tables.device, batch.context_lens.device}) > 1:
        raise ValueError(
            f"everything must be on one device, got q on {q.device}, caches on {key_cache.device} and"
            f" {value_cache.device}, the batch on {batch.block_tables.device}"
        )
    if not INTERPRETED and q.device.type != "cuda":
        raise ValueError(
            f"kernels run on a GPU, q is on {q.device}: move the tensors, or set TRITON_INTERPRET=1 before the import"
        )
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
