"""Paged attention for chunks of several new tokens behind a cached prefix, of many sequences in one launch.

The rows of a program are block_q new tokens of one sequence x the query heads of one KV head, so that a tile of keys
serves the whole group.  Sequence s gets the blocks query_starts[s] // block_q + s and up; a program finds its sequence
by binary search.  That needs nothing from the host but the sizes, costs a few cached loads, and leaves at most one
program a sequence and head without work, however ragged the batch.  Blocks with the longest reach come first.

Token j of n sees the first context_len - n + j + 1 tokens.  Tiles that all rows of a block see are taken unmasked,
those at the diagonal masked, those beyond it not at all.
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
    padded,
    query_operand,
    weigh,
)
from windtunnel.executor.kernels.device import INTERPRETED, sm_of

if TYPE_CHECKING:
    from windtunnel.executor.kernels.aot import AotCase

_AOT_QUERY_LENS = (2, 4096)


@triton.jit
def _find_sequence(query_starts_ptr, block, num_seqs, block_q):
    """The last sequence whose first block is at most ``block``."""
    origin = tl.load(query_starts_ptr)
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first_block = (tl.load(query_starts_ptr + middle) - origin) // block_q + middle
        if first_block <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend(
    acc,
    total,
    top,
    q,
    scale_rows,
    positions,
    key_ptr,
    value_ptr,
    table_ptr,
    first,
    end,
    context_len,
    stride_block,
    stride_slot,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    FP8: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Fold the cached tokens first … end - 1 into the sums of all rows."""
    for start in range(first, end, TILE):
        offsets = cache_offsets(table_ptr, start, context_len, stride_block, stride_slot, TILE, BLOCK_SIZE, MASKED)
        tokens = start + tl.arange(0, TILE)
        present = tokens < context_len
        k = operand(load_cache(key_ptr, offsets, present, D, D_PAD, MASKED), FP8, UPCAST)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, TILE]
        if MASKED:
            scores = tl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
        p, shrink, total, top = weigh(total, top, scores, scale_rows, MASKED)
        v = operand(load_cache(value_ptr, offsets, present, D, D_PAD, MASKED), FP8, UPCAST)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, total, top


@triton.jit(
    do_not_specialize=["num_seqs", "group", "stride_table"],
    do_not_specialize_on_alignment=["table_ptr", "context_lens_ptr", "query_starts_ptr"],
)
def prefill_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    context_lens_ptr,
    query_starts_ptr,
    num_seqs,
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
    """Grid (KV heads, splits, blocks); rows are counted from the first one of sequence 0.

    With SPLIT, out is float32 [rows, heads, splits, D] and lse its log-sums.
    """
    block_q = BLOCK_M // group
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    block = tl.num_programs(2) - 1 - tl.program_id(2)

    seq = _find_sequence(query_starts_ptr, block, num_seqs, block_q)
    origin = tl.load(query_starts_ptr)
    seq_start = tl.load(query_starts_ptr + seq)
    query_len = tl.load(query_starts_ptr + seq + 1) - seq_start
    first_query = (block - ((seq_start - origin) // block_q + seq)) * block_q
    if first_query >= query_len:
        return

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D_PAD)
    queries = first_query + offs_m // group
    heads = kv_head * group + offs_m % group
    mask_m = (offs_m < block_q * group) & (queries < query_len)
    rows = (seq_start - origin + queries).to(tl.int64)
    lse_ptrs = lse_ptr + (rows * tl.num_programs(0) * group + heads) * num_splits + split

    context_len = tl.load(context_lens_ptr + seq)
    prefix_len = context_len - query_len
    reach = prefix_len + tl.minimum(first_query + block_q, query_len)  # tokens that the last row sees
    part = tl.cdiv(tl.cdiv(reach, TILE), num_splits) * TILE
    first = split * part
    end = tl.minimum(first + part, reach)
    if SPLIT and first >= reach:
        tl.store(lse_ptrs, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=mask_m)
        return
    seen_by_all = prefix_len + first_query + 1
    full_end = tl.maximum(first, tl.minimum(end, seen_by_all // TILE * TILE))

    mask_md = mask_m[:, None] & (offs_d < D)[None, :]
    q_ptrs = q_ptr + rows[:, None] * stride_qt + heads[:, None] * stride_qh + offs_d[None, :]
    q = tl.load(q_ptrs, mask=mask_md, other=0.0)
    scale_rows = tl.full([BLOCK_M], scale_log2, tl.float32)
    if FP8 != "":
        largest = largest_of_rows(q)
        largest = tl.where(largest > 0, largest, 1.0)
        scale_rows *= largest
        q = query_operand(q, largest, UPCAST)
    elif UPCAST:
        q = q.to(tl.float32)
    positions = tl.minimum(prefix_len + queries, context_len - 1)

    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    table_ptr += seq.to(tl.int64) * stride_table
    key_ptr += kv_head * stride_head
    value_ptr += kv_head * stride_head
    acc, total, top = _attend(
        acc, total, top, q, scale_rows, positions, key_ptr, value_ptr, table_ptr, first, full_end, context_len,
        stride_block, stride_slot, D, D_PAD, BLOCK_SIZE, TILE, False, FP8, UPCAST,
    )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q, scale_rows, positions, key_ptr, value_ptr, table_ptr, full_end, end, context_len,
        stride_block, stride_slot, D, D_PAD, BLOCK_SIZE, TILE, True, FP8, UPCAST,
    )  # fmt: skip

    factor, lse = finish(total, top, v_scale)
    out = acc * factor[:, None]
    out_ptrs = out_ptr + rows[:, None] * stride_ot + heads[:, None] * stride_oh + split * D + offs_d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_md)
    if SPLIT:
        tl.store(lse_ptrs, lse, mask=mask_m)


def config(sm: int, head_dim: int, group: int, kv_bytes: int, max_query_len: int) -> Config:
    """128 rows, 64 for short chunks (``wgmma`` takes no fewer); the largest tiles of keys that do not spill on ``sm``.

    float32, which is here for checks, has no tensor cores to feed: few rows, and registers do spill.
    The compiler halves ``num_stages``, since a tile's block ids must be there before the tile can be asked for: 5 keep
    two tiles on their way.
    """
    width = padded(head_dim)
    most_rows = 16 if kv_bytes == 4 else 64 if width > 128 and sm < 90 else 128
    wanted = 64 if max_query_len * group <= 64 else 128
    block_m = max(min(wanted, most_rows), triton.next_power_of_2(group))
    four_would_spill = (sm < 90 and width > 64 and kv_bytes == 1) or (sm >= 100 and width <= 64)
    num_warps = 8 if block_m >= 128 or width > 128 or four_would_spill else 4
    narrow = width > 128 or kv_bytes == 4 or (sm < 90 and (width > 64 or kv_bytes == 1))
    return Config(block_m, 32 if narrow else 64, num_warps, num_stages=3 if width > 128 and sm < 90 else 5)


def prefill(
    out: torch.Tensor,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    max_query_len: int,
    max_context_len: int,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    *,
    choice: Config | None = None,
    splits: int | None = None,
) -> None:
    """Write attention of S sequences' new tokens into ``out`` [T, Hq, D]; q is [T, Hq, D], tables are [S, B].

    Sequence s owns the rows query_starts[s] - query_starts[0] and up; rows past the last sequence's are not written.
    ``choice`` and ``splits`` stand in for ``config`` and ``num_splits``.  Shapes and types are checked by
    ``attention.attention``.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_seqs = context_lens.shape[0]
    group = num_heads // num_kv_heads
    sm = sm_of(q)
    chosen = choice or config(sm, head_dim, group, operand_bytes(q, key_cache), max_query_len)
    way = fp8_way(key_cache.dtype, sm)
    if way:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    num_blocks = num_tokens // (chosen.block_m // group) + num_seqs
    if splits is None:
        max_tiles = -(-max_context_len // chosen.tile)
        rows_per_token = chosen.block_m / chosen.tile
        splits = num_splits(num_blocks * num_kv_heads, max_tiles, num_sms_of(q.device), rows_per_token)
    parts, lse = new_parts(num_tokens, num_heads, splits, head_dim, q.device) if splits > 1 else (out, out)
    prefill_kernel[(num_kv_heads, splits, num_blocks)](
        parts,
        lse,
        q,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        query_starts,
        num_seqs,
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
    """Every kernel that ``prefill`` launches on ``sm`` for the shapes of ``attention_common.aot_shapes``."""
    return distinct(
        _aot_case(sm, head_dim, group, q_kind, fp8, block_size, max_query_len, split)
        for max_query_len in _AOT_QUERY_LENS
        for head_dim, group, q_kind, fp8, block_size, split in aot_shapes()
    )


def _aot_case(
    sm: int, head_dim: int, group: int, q_kind: str, fp8: bool, block_size: int, max_query_len: int, split: bool
) -> AotCase:
    from windtunnel.executor.kernels.aot import AotCase

    chosen = config(sm, head_dim, group, 1 if fp8 else 2, max_query_len)
    kv_kind = "u8" if fp8 else q_kind
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
    lists = dict.fromkeys(("table_ptr", "context_lens_ptr", "query_starts_ptr"), "*i32")
    pointers = {
        "out_ptr": "*fp32" if split else f"*{q_kind}",
        "lse_ptr": "*fp32" if split else f"*{q_kind}",
        "q_ptr": f"*{q_kind}",
        "key_ptr": f"*{kv_kind}",
        "value_ptr": f"*{kv_kind}",
    }
    strides = [f"stride_{name}" for name in ("qt", "qh", "ot", "oh", "block", "slot", "head")]
    signature = pointers | lists | {"num_seqs": "i32", "group": "i32", "scale_log2": "fp32", "v_scale": "fp32"}
    signature |= dict.fromkeys([*strides, "stride_table"], "i32") | dict.fromkeys(constexprs, "constexpr")
    return AotCase(
        name=f"attention_prefill {q_kind} kv {'fp8' if fp8 else kv_kind} head_dim {head_dim} block {block_size}"
        f" rows {chosen.block_m}{' split' if split else ''}",
        kernel=prefill_kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=(*pointers, *strides),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
