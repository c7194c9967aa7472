"""Paged attention for decodes: one new token a sequence, out[h] = softmax(scale * q[h] . K) V over its whole context.

A program holds all query heads of one KV head, padded to the 16 rows that tensor cores want, so that a key is read once
for the whole group.  It is bound by reading the cache: tiles of 16 KiB are kept under way by asynchronous copies.  With
few sequences and long contexts the context is split over programs and the parts are combined (flash-decoding).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from windtunnel.executor.kernels.attention_combine import combine, new_parts
from windtunnel.executor.kernels.attention_common import (
    LOG2_E,
    Config,
    aot_shapes,
    cache_offsets,
    distinct,
    finish,
    fp8_factor,
    fp8_way,
    largest_of_rows,
    load_cache,
    num_sms_of,
    num_splits,
    operand,
    operand_bytes,
    operand_pair,
    padded,
    query_operand,
    weigh,
)
from windtunnel.executor.kernels.device import INTERPRETED, sm_of

if TYPE_CHECKING:
    from windtunnel.executor.kernels.aot import AotCase


@triton.jit(
    do_not_specialize=["group", "stride_table"], do_not_specialize_on_alignment=["table_ptr", "context_lens_ptr"]
)
def decode_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    context_lens_ptr,
    group,
    scale_log2,
    v_scale,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_block,
    stride_slot,
    stride_head,
    stride_table,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (KV heads, splits, sequences).  With SPLIT, out is float32 [seqs, heads, splits, D] and lse its log-sums."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2)
    num_splits = tl.num_programs(1)

    offs_m = tl.arange(0, BLOCK_M)
    heads = kv_head * group + offs_m
    mask_m = offs_m < group
    lse_ptrs = lse_ptr + (seq * tl.num_programs(0) * group + heads) * num_splits + split

    context_len = tl.load(context_lens_ptr + seq)
    part = tl.cdiv(tl.cdiv(context_len, TILE), num_splits) * TILE
    first = split * part
    end = tl.minimum(first + part, context_len)
    if SPLIT and first >= context_len:
        tl.store(lse_ptrs, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=mask_m)
        return

    # An fp8 cache is read as pairs of elements, and all that has elements comes in halves: the even ones, the odd ones.
    PAIRS: tl.constexpr = FP8 != ""
    STEP: tl.constexpr = 2 if PAIRS else 1
    WIDTH: tl.constexpr = D_PAD // STEP
    USED: tl.constexpr = D // STEP
    offs_d = tl.arange(0, WIDTH)
    mask_md = mask_m[:, None] & (offs_d < USED)[None, :]
    q_ptrs = q_ptr + seq.to(tl.int64) * stride_qt + heads[:, None] * stride_qh + offs_d[None, :] * STEP
    q = tl.load(q_ptrs, mask=mask_md, other=0.0)
    scale_rows = tl.full([BLOCK_M], scale_log2, tl.float32)
    if PAIRS:
        q_odd = tl.load(q_ptrs + 1, mask=mask_md, other=0.0)
        largest = tl.maximum(largest_of_rows(q), largest_of_rows(q_odd))
        largest = tl.where(largest > 0, largest, 1.0)
        scale_rows *= largest
        q = query_operand(q, largest, UPCAST)
        q_odd = query_operand(q_odd, largest, UPCAST)
        acc_odd = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    elif UPCAST:
        q = q.to(tl.float32)

    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    table_ptr += seq.to(tl.int64) * stride_table
    key_ptr += kv_head * stride_head
    value_ptr += kv_head * stride_head
    for start in range(first, end, TILE):
        offsets = cache_offsets(table_ptr, start, context_len, stride_block, stride_slot, TILE, BLOCK_SIZE, True)
        present = start + tl.arange(0, TILE) < context_len
        k = load_cache(key_ptr, offsets, present, USED, WIDTH, True)
        if PAIRS:
            k, k_odd = operand_pair(k, FP8, UPCAST)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(operand(k, "", UPCAST)), input_precision="ieee")  # [BLOCK_M, TILE]
        scores = tl.where(present[None, :], scores, float("-inf"))
        p, shrink, total, top = weigh(total, top, scores, scale_rows, False)
        p = p.to(q.dtype)
        v = load_cache(value_ptr, offsets, present, USED, WIDTH, True)
        if PAIRS:
            v, v_odd = operand_pair(v, FP8, UPCAST)
            acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
            acc_odd = tl.dot(p, v_odd, acc_odd * shrink[:, None], input_precision="ieee")
        else:
            acc = tl.dot(p, operand(v, "", UPCAST), acc * shrink[:, None], input_precision="ieee")

    factor, lse = finish(total, top, v_scale)
    out = acc * factor[:, None]
    if PAIRS:
        out = tl.interleave(out, acc_odd * factor[:, None])
    offs_d = tl.arange(0, D_PAD)
    out_ptrs = out_ptr + seq.to(tl.int64) * stride_ot + heads[:, None] * stride_oh + split * D + offs_d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & (offs_d < D)[None, :])
    if SPLIT:
        tl.store(lse_ptrs, lse, mask=mask_m)


def config(sm: int, head_dim: int, group: int, kv_bytes: int) -> Config:
    """Tiles of 16 KiB of keys and as much of values, two of them on their way while the program works on a third.

    The compiler halves ``num_stages``, since a tile's block ids must be there before the tile can be asked for.  That
    takes 72 KiB of shared memory, which every NVIDIA GPU since sm_80 has; AMD's have 64 (``sm`` 0).
    """
    width = padded(head_dim)
    tile = max(16, min(128, 16384 // (width * kv_bytes)))
    return Config(max(16, triton.next_power_of_2(group)), tile, num_warps=4, num_stages=5 if sm else 2)


def decode(
    out: torch.Tensor,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    *,
    choice: Config | None = None,
    splits: int | None = None,
) -> None:
    """Write attention of one new token a sequence into ``out`` [S, Hq, D]; q is [S, Hq, D], tables are [S, B].

    A row whose context length is 0 becomes 0.  ``choice`` and ``splits`` stand in for ``config`` and ``num_splits``.
    Shapes and types are checked by ``attention.attention``.
    """
    num_seqs, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = num_heads // num_kv_heads
    sm = sm_of(q)
    chosen = choice or config(sm, head_dim, group, operand_bytes(q, key_cache))
    way = fp8_way(key_cache.dtype, sm)
    if way:
        key_cache, value_cache = key_cache.view(torch.uint16), value_cache.view(torch.uint16)
    if splits is None:
        max_tiles = -(-max_context_len // chosen.tile)
        splits = num_splits(num_seqs * num_kv_heads, max_tiles, num_sms_of(q.device), group / chosen.tile)
    parts, lse = new_parts(num_seqs, num_heads, splits, head_dim, q.device) if splits > 1 else (out, out)
    decode_kernel[(num_kv_heads, splits, num_seqs)](
        parts,
        lse,
        q,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        group,
        scale * LOG2_E * k_scale * fp8_factor(way),
        v_scale * fp8_factor(way),
        q.stride(0),
        q.stride(1),
        parts.stride(0),
        parts.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        block_tables.stride(0),
        BLOCK_M=chosen.block_m,
        D=head_dim,
        D_PAD=padded(head_dim),
        BLOCK_SIZE=block_size,
        TILE=chosen.tile,
        FP8=way,
        UPCAST=INTERPRETED or q.dtype is torch.float32,
        SPLIT=splits > 1,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    if splits > 1:
        combine(out, parts, lse)


def aot_cases(sm: int) -> list[AotCase]:
    """Every kernel that ``decode`` launches on ``sm`` for the shapes of ``attention_common.aot_shapes``."""
    return distinct(
        _aot_case(sm, head_dim, group, q_kind, fp8, block_size, split)
        for head_dim, group, q_kind, fp8, block_size, split in aot_shapes()
    )


def _aot_case(sm: int, head_dim: int, group: int, q_kind: str, fp8: bool, block_size: int, split: bool) -> AotCase:
    from windtunnel.executor.kernels.aot import AotCase

    chosen = config(sm, head_dim, group, 1 if fp8 else 2)
    kv_kind = "u16" if fp8 else q_kind
    constexprs = {
        "BLOCK_M": chosen.block_m,
        "D": head_dim,
        "D_PAD": padded(head_dim),
        "BLOCK_SIZE": block_size,
        "TILE": chosen.tile,
        "FP8": fp8_way(torch.float8_e4m3fn, sm) if fp8 else "",
        "UPCAST": False,
        "SPLIT": split,
    }
    lists = dict.fromkeys(("table_ptr", "context_lens_ptr"), "*i32")
    pointers = {
        "out_ptr": "*fp32" if split else f"*{q_kind}",
        "lse_ptr": "*fp32" if split else f"*{q_kind}",
        "q_ptr": f"*{q_kind}",
        "key_ptr": f"*{kv_kind}",
        "value_ptr": f"*{kv_kind}",
    }
    scalars = {"scale_log2": "fp32", "v_scale": "fp32"}
    strides = ("qt", "qh", "ot", "oh", "block", "slot", "head")
    integers = {f"stride_{name}": "i32" for name in (*strides, "table")}
    return AotCase(
        name=f"attention_decode {q_kind} kv {'fp8' if fp8 else kv_kind} head_dim {head_dim} block {block_size}"
        f" rows {chosen.block_m}{' split' if split else ''}",
        kernel=decode_kernel,
        signature=pointers | lists | {"group": "i32"} | scalars | integers | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        aligned=(*pointers, *(f"stride_{name}" for name in strides)),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
