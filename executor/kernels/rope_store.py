"""Rotary position embedding of q and k, and k and v into the paged cache, in one pass over q, k and v.

Elements i and i + D/2 of a head are rotated together, by the angle of the token's position (Su et al., "RoFormer",
2021; the pairing is that of Hugging Face's Llama).  A program takes one token and up to ``HEADS`` of its heads: of q,
or of k and v.  Cache offsets are 64-bit: a cache has more than 2^31 elements.

An 8-bit cache holds float8_e4m3fn (Micikevicius et al., "FP8 formats for deep learning", 2022): rounded to nearest
even, saturating at ±448.  It is encoded with integer operations, because GPUs before sm_89 have no conversion.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from windtunnel.executor.kernels.aot import AotCase
from windtunnel.executor.kernels.device import check_activations, rounded, sm_of


class Config(NamedTuple):
    """How the heads of a token are shared out."""

    HEADS: int
    """Query heads of a program, a power of two."""
    KV_HEADS: int
    """Key and value heads of a program, a power of two."""
    HALF: int
    """D / 2, rounded up to a power of two."""
    num_warps: int


def config(sm: int, num_q_heads: int, num_kv_heads: int, head_size: int) -> Config:
    """Up to 4,096 elements a program, 16 to 32 a thread.  The same for every ``sm``."""
    del sm
    half = triton.next_power_of_2(head_size // 2)
    most = max(1, 2048 // half)
    heads, kv_heads = (min(triton.next_power_of_2(heads), most) for heads in (num_q_heads, num_kv_heads))
    return Config(heads, kv_heads, half, min(max(heads * half // 512, 1), 4))


@triton.jit
def _to_e4m3(x):
    """Bits of float8_e4m3fn nearest to float32 x."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), 448.0)
    at = magnitude.to(tl.int32, bitcast=True)
    # Seven exponent biases of difference, 127 - 7, and a mantissa of 3 bits in place of 23.
    normal = ((at + 0x7FFFF + ((at >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9, which is the step of float32 from 2^14 on: let the addition round.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _store(ptr, x, scale, mask, FP8: tl.constexpr):
    if FP8:
        tl.store(ptr, _to_e4m3(tl.math.div_rn(x.to(tl.float32), scale)), mask=mask)
    else:
        tl.store(ptr, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_and_store(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    key_cache_ptr,
    value_cache_ptr,
    k_scale,
    v_scale,
    num_q_heads,
    num_kv_heads,
    block_size,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kcn,
    stride_kcs,
    stride_kch,
    stride_vcn,
    stride_vcs,
    stride_vch,
    HALF_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_q_parts = tl.cdiv(num_q_heads, HEADS)
    position = tl.load(positions_ptr + token).to(tl.int64)
    offs = tl.arange(0, HALF)[None, :]  # [1, HALF]
    within = offs < HALF_SIZE
    cos = tl.load(cos_sin_ptr + position * (2 * HALF_SIZE) + offs, mask=within, other=0.0)
    sin = tl.load(cos_sin_ptr + position * (2 * HALF_SIZE) + HALF_SIZE + offs, mask=within, other=0.0)
    if part < num_q_parts:
        heads = part * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
        mask = (heads < num_q_heads) & within  # [HEADS, HALF]
        lower = q_ptr + token * stride_qt + heads * stride_qh + offs
        a = tl.load(lower, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(lower + HALF_SIZE, mask=mask, other=0.0).to(tl.float32)
        tl.store(lower, rounded(a * cos - b * sin, q_ptr.dtype.element_ty), mask=mask)
        tl.store(lower + HALF_SIZE, rounded(b * cos + a * sin, q_ptr.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            heads = (part - num_q_parts) * KV_HEADS + tl.arange(0, KV_HEADS)[:, None]
            mask = (heads < num_kv_heads) & within
            block = slot // block_size
            row = slot % block_size
            lower = k_ptr + token * stride_kt + heads * stride_kh + offs
            a = tl.load(lower, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(lower + HALF_SIZE, mask=mask, other=0.0).to(tl.float32)
            # The key is rounded to its own type even on its way to 8 bits: as if it had been rotated in place.
            key_a = rounded(a * cos - b * sin, k_ptr.dtype.element_ty)
            key_b = rounded(b * cos + a * sin, k_ptr.dtype.element_ty)
            to = key_cache_ptr + block * stride_kcn + row * stride_kcs + heads * stride_kch + offs
            _store(to, key_a, k_scale, mask, FP8)
            _store(to + HALF_SIZE, key_b, k_scale, mask, FP8)
            lower = v_ptr + token * stride_vt + heads * stride_vh + offs
            value_a = tl.load(lower, mask=mask, other=0.0)
            value_b = tl.load(lower + HALF_SIZE, mask=mask, other=0.0)
            to = value_cache_ptr + block * stride_vcn + row * stride_vcs + heads * stride_vch + offs
            _store(to, value_a, v_scale, mask, FP8)
            _store(to + HALF_SIZE, value_b, v_scale, mask, FP8)


def rope_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Rotate q [T, Hq, D] in place, store rotated k [T, Hk, D] and v in the caches [N, S, Hk, D]; returns q.

    ``cos_sin`` is [positions, D] float32, D/2 cosines before D/2 sines; ``positions`` and ``slots`` are [T] int64.  A
    token whose slot is -1 is not stored.  Positions and slots out of range are not noticed.  A float8_e4m3fn cache gets
    k / k_scale and v / v_scale, saturated.

    Raises ValueError if shapes, types or places do not fit.
    """
    _check(q, k, v, cos_sin, positions, slots, key_cache, value_cache)
    num_tokens, num_q_heads, head_size = q.shape
    num_kv_heads = k.shape[1]
    if not num_tokens:
        return q
    fp8 = key_cache.dtype == torch.float8_e4m3fn
    if fp8:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    c = config(sm_of(q), num_q_heads, num_kv_heads, head_size)
    grid = (num_tokens, triton.cdiv(num_q_heads, c.HEADS) + triton.cdiv(num_kv_heads, c.KV_HEADS))
    _rope_and_store[grid](
        q,
        k,
        v,
        cos_sin,
        positions,
        slots,
        key_cache,
        value_cache,
        k_scale,
        v_scale,
        num_q_heads,
        num_kv_heads,
        key_cache.shape[1],
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        HALF_SIZE=head_size // 2,
        HALF=c.HALF,
        HEADS=c.HEADS,
        KV_HEADS=c.KV_HEADS,
        FP8=fp8,
        num_warps=c.num_warps,
    )
    return q


def _check(q, k, v, cos_sin, positions, slots, key_cache, value_cache) -> None:
    check_activations(q=q, k=k, v=v)
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[::2] != k.shape[::2] or q.shape[2] % 2:
        raise ValueError(
            f"q is {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: [T, Hq, D], [T, Hk, D] and [T, Hk, D]"
            " with an even D are expected"
        )
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: they must be of one type")
    for name, tensor in (("positions", positions), ("slots", slots)):
        if tensor.shape != q.shape[:1] or tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise ValueError(f"{name} is {list(tensor.shape)} {tensor.dtype}: [{q.shape[0]}] int64 is expected")
    if cos_sin.dim() != 2 or cos_sin.shape[1] != q.shape[2] or cos_sin.dtype != torch.float32:
        raise ValueError(
            f"cos_sin is {list(cos_sin.shape)} {cos_sin.dtype}: [positions, {q.shape[2]}] float32 is expected"
        )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dim() != 4 or cache.shape[2:] != k.shape[1:] or cache.stride(3) != 1:
            raise ValueError(f"{name} is {list(cache.shape)}: [N, S, {k.shape[1]}, {k.shape[2]}] is expected")
        if cache.dtype not in (q.dtype, torch.float8_e4m3fn) or cache.dtype != key_cache.dtype:
            raise ValueError(f"{name} holds {cache.dtype}: {q.dtype} or float8_e4m3fn is expected, both caches alike")
    if not cos_sin.is_contiguous() or value_cache.shape[:2] != key_cache.shape[:2]:
        raise ValueError("cos_sin must be contiguous, and both caches must have as many blocks of one size")


def aot_cases(sm: int) -> list[AotCase]:
    """Query, KV heads and head size of Llama 3 8B and 70B, Qwen2.5 7B and 0.5B; the first with an 8-bit cache too."""
    shapes = ((32, 8, 128), (64, 8, 128), (28, 4, 128), (14, 2, 64))
    return [*(_case(sm, *shape, "bf16", False) for shape in shapes), _case(sm, *shapes[0], "bf16", True)]


def _case(sm: int, num_q_heads: int, num_kv_heads: int, head_size: int, kind: str, fp8: bool) -> AotCase:
    c = config(sm, num_q_heads, num_kv_heads, head_size)
    cache = "*u8" if fp8 else f"*{kind}"
    pointers = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{kind}"),
        "cos_sin_ptr": "*fp32",
        **dict.fromkeys(("positions_ptr", "slots_ptr"), "*i64"),
        **dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), cache),
    }
    strides = [
        f"stride_{name}" for name in ("qt", "qh", "kt", "kh", "vt", "vh", "kcn", "kcs", "kch", "vcn", "vcs", "vch")
    ]
    constants = {"HALF_SIZE": head_size // 2, "HALF": c.HALF, "HEADS": c.HEADS, "KV_HEADS": c.KV_HEADS, "FP8": fp8}
    signature = {
        **pointers,
        **dict.fromkeys(("k_scale", "v_scale"), "fp32"),
        **dict.fromkeys(("num_q_heads", "num_kv_heads", "block_size", *strides), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    name = f"rope_and_store {kind} Hq {num_q_heads} Hk {num_kv_heads} D {head_size}{' fp8 cache' if fp8 else ''}"
    return AotCase(name, _rope_and_store, signature, constants, (*pointers, "block_size", *strides), c.num_warps)
