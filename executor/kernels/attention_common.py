"""What the attention kernels share: reading the paged cache, the online softmax, and how far a context is split.

The cache of keys and that of values are [num_blocks, block_size, num_kv_heads, head_dim] with equal strides, so that
one offset serves both.  Offsets that a block id is multiplied into are int64.  The softmax is kept as exp2: scores are
multiplied by scale * log2(e) once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from windtunnel.executor.kernels.aot import AotCase

LOG2_E = math.log2(math.e)
_MAX_SPLITS = 128
_ALONE = 1.25
_PIPELINE_FILL_TILES = 1.0
_COMBINE_TILES = 3.0
_COMBINE_TILES_A_SPLIT = 0.05
_GOOD_ENOUGH = 1.05


class Config(NamedTuple):
    """How a kernel is launched."""

    block_m: int
    """Rows of a program: new tokens x query heads of one KV head."""
    tile: int
    """Cached tokens that a program reads at once."""
    num_warps: int
    num_stages: int
    """Depth of the pipeline of loads."""


def aot_shapes() -> Iterator[tuple[int, int, str, bool, int, bool]]:
    """(head_dim, query heads of a KV head, type of queries, fp8 cache, block_size, split) proven ahead of time.

    Heads and groups of the models that ``DecoderConfig`` is meant for (the largest group, 16, is Llama 3.1 405B's),
    vLLM's common block sizes, the types that are served.  Other shapes run too, but nothing is proven of them.
    """
    return product((64, 128), range(1, 17), ("bf16", "fp16"), (False, True), (16, 32), (False, True))


def distinct(cases: Iterable[AotCase]) -> list[AotCase]:
    """Cases without those that would be compiled to the same kernel: equal in all but the name."""
    seen: dict[tuple[Any, ...], AotCase] = {}
    for case in cases:
        seen.setdefault((case.kernel, *(repr(part) for part in case[2:])), case)
    return list(seen.values())


def padded(head_dim: int) -> int:
    """Elements of a head as kernels see it: a power of two, of which tensor cores can take half (pairs of fp8)."""
    return max(32, int(triton.next_power_of_2(head_dim)))


def fp8_way(dtype: torch.dtype, sm: int) -> str:
    """How kernels read a cache of ``dtype``: "" as it is, else how float8_e4m3fn becomes float16.

    float16 holds each of its values exactly.  "cvt" is an instruction of sm_89 and later, "packed" shifts the bits of
    several at once on older ones, "plain" is for the rest (``sm`` 0).
    """
    if dtype is not torch.float8_e4m3fn:
        return ""
    return "plain" if sm == 0 else "cvt" if sm >= 89 else "packed"


def operand_bytes(q: torch.Tensor, cache: torch.Tensor) -> int:
    """What decides about tiles: bytes of an element of the cache, or 4 where products are taken in float32."""
    return 4 if q.dtype is torch.float32 else cache.element_size()


def fp8_factor(way: str) -> float:
    """What a value read in that way must still be multiplied by: shifted bits have an exponent that is 8 too low."""
    return 256.0 if way in ("plain", "packed") else 1.0


@lru_cache
def num_sms_of(device: torch.device) -> int:
    """Multiprocessors of a device; 1 for a CPU, where nothing is gained by splitting."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


@lru_cache(maxsize=4096)
def num_splits(num_programs: int, max_tiles: int, num_sms: int, rows_per_token: float) -> int:
    """Into how many parts each context is split so that ``num_programs`` programs keep ``num_sms`` processors busy.

    A program passes over at most ``max_tiles`` tiles, each of ``1 / rows_per_token`` times as many cached tokens as the
    program has rows.  Time is modelled in tiles: what the busiest processor reads (one program alone does not reach its
    share of the bandwidth), the filling and draining of a program's pipeline, writing the parts, and combining them.
    The fewest parts within 5 % of the best are taken.  The answer depends on sizes only, never on what tensors hold, so
    that a captured graph keeps its grid.  The constants are estimates.
    """
    candidates = range(1, min(_MAX_SPLITS, max(max_tiles, 1)) + 1)
    costs = [_tiles_of_time(num_programs, max_tiles, num_sms, rows_per_token, splits) for splits in candidates]
    enough = _GOOD_ENOUGH * min(costs)
    return next(splits for splits, cost in zip(candidates, costs, strict=True) if cost <= enough)


def _tiles_of_time(num_programs: int, max_tiles: int, num_sms: int, rows_per_token: float, splits: int) -> float:
    programs_per_sm = -(-num_programs * splits // num_sms)
    part = -(-max_tiles // splits) + _PIPELINE_FILL_TILES
    combine = 0.0
    if splits > 1:
        part += 2 * rows_per_token  # float32 sums, written and read, against 16-bit keys and values
        combine = _COMBINE_TILES + splits * _COMBINE_TILES_A_SPLIT
    return max(programs_per_sm, _ALONE) * part + combine


@triton.jit
def cache_offsets(
    table_ptr,
    start,
    context_len,
    stride_block,
    stride_slot,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Where tokens start … start + TILE - 1 of a sequence lie in the cache; ``start`` is a multiple of TILE."""
    offs_n = tl.arange(0, TILE)
    if TILE % BLOCK_SIZE == 0:
        blocks = start // BLOCK_SIZE + offs_n // BLOCK_SIZE
        slots = offs_n % BLOCK_SIZE
    else:
        blocks = (start + offs_n) // BLOCK_SIZE
        slots = (start + offs_n) % BLOCK_SIZE
    if MASKED:
        block_ids = tl.load(table_ptr + blocks, mask=start + offs_n < context_len, other=0)
    else:
        block_ids = tl.load(table_ptr + blocks)
    return block_ids.to(tl.int64) * stride_block + slots * stride_slot  # [TILE]


@triton.jit
def load_cache(cache_ptr, offsets, present, D: tl.constexpr, D_PAD: tl.constexpr, MASKED: tl.constexpr):
    """Rows of the cache [TILE, D_PAD] as they are stored; what is not ``present`` reads as zero."""
    offs_d = tl.arange(0, D_PAD)
    ptrs = cache_ptr + offsets[:, None] + offs_d[None, :]
    if MASKED and D != D_PAD:
        x = tl.load(ptrs, mask=present[:, None] & (offs_d < D)[None, :], other=0)
    elif MASKED:
        x = tl.load(ptrs, mask=present[:, None], other=0)
    elif D != D_PAD:
        x = tl.load(ptrs, mask=(offs_d < D)[None, :], other=0)
    else:
        x = tl.load(ptrs)
    return x


@triton.jit
def operand(x, FP8: tl.constexpr, UPCAST: tl.constexpr):
    """What ``load_cache`` gave, ready for a product: fp8, read as uint8, becomes float16 by way of ``fp8_way``."""
    if FP8 == "cvt":
        x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif FP8 == "packed":
        x = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            and.b32 $0, a, 0x80008000; shr.b32 a, a, 1; and.b32 a, a, 0x3f803f80; or.b32 $0, $0, a;
            and.b32 $1, b, 0x80008000; shr.b32 b, b, 1; and.b32 b, b, 0x3f803f80; or.b32 $1, $1, b;
            }""",
            "=&r,=&r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    elif FP8 == "plain":
        x = _shifted(x.to(tl.uint16))
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def operand_pair(x, FP8: tl.constexpr, UPCAST: tl.constexpr):
    """The same for fp8 read as uint16: the even and the odd elements of the rows, each [TILE, D_PAD / 2].

    Tensor cores want the tokens of values side by side, and matrices are turned 16 bits at a time.
    """
    if FP8 == "cvt":
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 a;
            .reg .b16 lo, hi;
            prmt.b32 a, $2, 0, 0x3120;
            mov.b32 {lo, hi}, a;
            cvt.rn.f16x2.e4m3x2 $0, lo;
            cvt.rn.f16x2.e4m3x2 $1, hi;
            }""",
            "=&r,=&r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif FP8 == "packed":
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 a;
            shl.b32 a, $2, 8;
            and.b32 $0, a, 0x80008000; shr.b32 a, a, 1; and.b32 a, a, 0x3f803f80; or.b32 $0, $0, a;
            and.b32 $1, $2, 0x80008000; shr.b32 a, $2, 1; and.b32 a, a, 0x3f803f80; or.b32 $1, $1, a;
            }""",
            "=&r,=&r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even = _shifted(x & 0xFF)
        odd = _shifted(x >> 8)
    if UPCAST:
        even = even.to(tl.float32)
        odd = odd.to(tl.float32)
    return even, odd


@triton.jit
def _shifted(bits):
    """float8_e4m3fn in the low byte of uint16 as float16 / 2**8: 7 more bits of mantissa, a bias of 15 instead of 7."""
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def largest_of_rows(x):
    """The largest magnitude in each row: [M] float32."""
    return tl.max(tl.abs(x.to(tl.float32)), 1)


@triton.jit
def query_operand(q, largest, UPCAST: tl.constexpr):
    """Queries beside an fp8 cache: float16, divided by the largest of their row, or bfloat16 could overflow.

    float32 stays what it is, and its launchers set UPCAST, so that all products are taken in float32.
    """
    x = q.to(tl.float32) / largest[:, None]
    if q.dtype != tl.float32:
        x = x.to(tl.float16)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def weigh(total, top, scores, scale_rows, MASKED: tl.constexpr):
    """One step of the online softmax over a tile's scores [M, TILE]: (weights, shrink, total, top).

    ``top`` is the largest scaled score so far, ``total`` the sum of the weights exp2(score - top); sums taken so far
    must be multiplied by ``shrink``.  In a masked tile a row may have seen nothing yet, and -inf - -inf is not taken.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_rows)
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    p = tl.math.exp2(scores * scale_rows[:, None] - base[:, None])
    shrink = tl.math.exp2(top - base)
    return p, shrink, total * shrink + tl.sum(p, 1), new_top


@triton.jit
def finish(total, top, v_scale):
    """What sums of values are multiplied by, and log2 of the sum of weights; a row that saw nothing has -inf."""
    seen = total > 0
    divisor = tl.where(seen, total, 1.0)
    lse = tl.where(seen, top + tl.math.log2(divisor), float("-inf"))
    return v_scale / divisor, lse
