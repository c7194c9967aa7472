"""The next token of each row of logits: the largest, or drawn with temperature and top-p.  No sort.

A program takes a row and reads it a few times, in blocks:

1. the largest logit m and its first place: the answer if the temperature T is 0;
2. Z = Σ w, where w = exp(-(m - x) / T);
3. with top_p < 1 the edge of the nucleus: the smallest gap c for which the tokens with m - x <= c have a sum of w of
   at least top_p · Z.  The bits of a float >= 0 are ordered as the float is, so c is searched for in them: each pass
   sums up to 8 candidates at once and leaves an eighth of the range, at most 11 passes; it ends as soon as one gap is
   left in the range.  c is the gap of a token, exactly: equal logits are in or out together;
4. the token: w of the nucleus is summed block by block in the order of ids until u · Σ w is exceeded.

A logit that is not a number counts as -inf; several of +inf share the probability; a row of -inf is uniform.  A row's
answer depends on nothing but the row and its parameters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from windtunnel.executor.kernels.aot import AotCase
from windtunnel.executor.kernels.device import check_activations, sm_of

_LOG2_E = tl.constexpr(1.4426950408889634)
_ABOVE_INF = tl.constexpr(0x7F800001)
_WAYS = tl.constexpr(8)


class Config(NamedTuple):
    """How a row is read."""

    BLOCK: int
    """Logits of a block, a power of two."""
    BLOCKS: int
    """Blocks of a row, rounded up to a power of two."""
    STAGES: int
    """Blocks that are on their way from memory while one is worked on, and that one."""
    num_warps: int


def config(sm: int, vocab_size: int) -> Config:
    """4 logits a thread, up to 2,048: with more the eight sums of step 3 spill.  The same for every ``sm``.

    Rows that don't begin at a multiple of 16 are read one logit at a time, which takes more registers: up to 1,024.
    """
    del sm
    block = min(max(triton.next_power_of_2(vocab_size), 128), 1024 if vocab_size % 16 else 2048)
    return Config(block, triton.next_power_of_2(triton.cdiv(vocab_size, block)), 3, block // 128)


@triton.jit
def _logits(row_ptr, offs, vocab_size):
    x = tl.load(row_ptr + offs, mask=offs < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _gaps(row_ptr, offs, vocab_size, largest):
    x = _logits(row_ptr, offs, vocab_size)
    at_top = x == largest
    return tl.where(at_top, 0.0, largest - tl.where(at_top, 0.0, x))  # inf - inf is not a number


@triton.jit
def _weights(gaps, offs, vocab_size, scale):
    return tl.where(offs < vocab_size, tl.exp2(-gaps * scale), 0.0)


@triton.jit
def _largest(row_ptr, vocab_size, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """The largest logit and the first id that has it."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    ids = tl.arange(0, BLOCK)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        offs = start + tl.arange(0, BLOCK)
        x = _logits(row_ptr, offs, vocab_size)
        ids = tl.where(x > best, offs, ids)
        best = tl.maximum(best, x)
    largest = tl.max(best)
    return largest, tl.min(tl.where(best == largest, ids, vocab_size))


@triton.jit
def _total(row_ptr, vocab_size, largest, scale, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        offs = start + tl.arange(0, BLOCK)
        gaps = _gaps(row_ptr, offs, vocab_size, largest)
        total += _weights(gaps, offs, vocab_size, scale)
    return tl.sum(total)


@triton.jit
def _nucleus(row_ptr, vocab_size, largest, scale, needed, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Bits of the smallest gap up to which the sum of w is at least ``needed``."""
    ways = tl.arange(0, _WAYS)[:, None]  # [WAYS, 1]
    below = -1  # gaps up to here are too few,
    up_to = 0x7F800000  # up to here enough: infinity
    while up_to - below > 1:
        step = (up_to - below + _WAYS - 1) // _WAYS
        edges = tl.minimum(below + (ways + 1) * step, up_to)  # [WAYS, 1]
        sums = tl.zeros([_WAYS, BLOCK], tl.float32)
        nearest = tl.full([1, BLOCK], _ABOVE_INF, tl.int32)
        farthest = tl.full([1, BLOCK], -1, tl.int32)
        for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
            offs = start + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]: one layout for all that follows
            gaps = _gaps(row_ptr, offs, vocab_size, largest)
            w = _weights(gaps, offs, vocab_size, scale)
            bits = gaps.to(tl.int32, bitcast=True)
            nearest = tl.minimum(nearest, tl.where(bits > below, bits, _ABOVE_INF))
            farthest = tl.maximum(farthest, tl.where(bits <= up_to, bits, -1))
            sums += tl.where(bits <= edges, w, 0.0)
        too_few = tl.sum((tl.sum(sums, axis=1) < needed).to(tl.int32))
        too_few = tl.minimum(too_few, _WAYS - 1)  # all are in, should rounding leave their sum below what is needed
        lower = below + too_few * step
        up_to = tl.minimum(tl.minimum(lower + step, up_to), tl.max(farthest))
        below = tl.maximum(lower, tl.min(nearest) - 1)
    return up_to


@triton.jit
def _kept(row_ptr, offs, vocab_size, largest, scale, edge):
    gaps = _gaps(row_ptr, offs, vocab_size, largest)
    w = _weights(gaps, offs, vocab_size, scale)
    return tl.where(gaps.to(tl.int32, bitcast=True) <= edge, w, 0.0)


@triton.jit
def _draw(
    row_ptr, vocab_size, largest, scale, edge, uniform, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr
):
    blocks = tl.arange(0, BLOCKS)
    sums = tl.zeros([BLOCKS], tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        w = _kept(row_ptr, start + tl.arange(0, BLOCK), vocab_size, largest, scale, edge)
        sums = tl.where(blocks == start // BLOCK, tl.sum(w), sums)
    target = uniform * tl.sum(sums)
    # Rounding, also of a uniform to 1.0, may leave the target just out of reach: then the last token is it.
    block = tl.min(tl.where((tl.cumsum(sums) > target) & (sums > 0.0), blocks, BLOCKS))
    block = tl.where(block < BLOCKS, block, tl.max(tl.where(sums > 0.0, blocks, 0)))
    before = tl.sum(tl.where(blocks < block, sums, 0.0))
    offs = block * BLOCK + tl.arange(0, BLOCK)
    w = _kept(row_ptr, offs, vocab_size, largest, scale, edge)
    first = tl.min(tl.where((before + tl.cumsum(w) > target) & (w > 0.0), offs, vocab_size))
    return tl.where(first < vocab_size, first, tl.max(tl.where(w > 0.0, offs, 0)))


@triton.jit
def _sample(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    uniforms_ptr,
    out_ptr,
    vocab_size,
    stride_lr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_lr
    temperature = tl.load(temperature_ptr + row)
    largest, token = _largest(row_ptr, vocab_size, BLOCK, STAGES)
    if temperature > 0.0:
        scale = _LOG2_E / tl.maximum(temperature, 1e-30)
        top_p = tl.load(top_p_ptr + row)
        edge = 0x7F800000
        if top_p < 1.0:
            needed = top_p * _total(row_ptr, vocab_size, largest, scale, BLOCK, STAGES)
            edge = _nucleus(row_ptr, vocab_size, largest, scale, needed, BLOCK, STAGES)
        uniform = tl.load(uniforms_ptr + row)
        token = _draw(row_ptr, vocab_size, largest, scale, edge, uniform, BLOCK, BLOCKS, STAGES)
    tl.store(out_ptr + row, token.to(tl.int64))


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """One token id a row, [R] int64, of logits [R, V]; temperature, top_p and uniforms are [R] float32.

    Temperature 0 takes the first of the largest.  Else: the first token, in the order of ids, at which the cumulated
    probability of the nucleus exceeds uniform x its sum.  The nucleus is every token at least as likely as the last one
    needed to reach top_p, likelihoods compared as the float32 distance of logits from the largest.

    Raises ValueError if shapes, types or places do not fit.
    """
    check_activations(logits=logits)
    if logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"logits have shape {list(logits.shape)}: [R, V] with V of at least 1 is expected")
    num_rows, vocab_size = logits.shape
    for name, tensor in (("temperature", temperature), ("top_p", top_p), ("uniforms", uniforms)):
        if tensor.shape != (num_rows,) or tensor.dtype != torch.float32 or tensor.device != logits.device:
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}:"
                f" [{num_rows}] float32 on {logits.device} is expected"
            )
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        c = config(sm_of(logits), vocab_size)
        _sample[(num_rows,)](
            logits,
            *(tensor.contiguous() for tensor in (temperature, top_p, uniforms)),
            out,
            vocab_size,
            logits.stride(0),
            BLOCK=c.BLOCK,
            BLOCKS=c.BLOCKS,
            STAGES=c.STAGES,
            num_warps=c.num_warps,
        )
    return out


def aot_cases(sm: int) -> list[AotCase]:
    """Vocabularies of Llama 2 and 3 and one that nothing divides (GPT-2's size)."""
    return [_case(sm, 128_256, "fp32"), _case(sm, 32_000, "bf16"), _case(sm, 50_257, "fp32")]


def _case(sm: int, vocab_size: int, kind: str) -> AotCase:
    c = config(sm, vocab_size)
    pointers = {
        "logits_ptr": f"*{kind}",
        **dict.fromkeys(("temperature_ptr", "top_p_ptr", "uniforms_ptr"), "*fp32"),
        "out_ptr": "*i64",
    }
    constants = {"BLOCK": c.BLOCK, "BLOCKS": c.BLOCKS, "STAGES": c.STAGES}
    signature = {**pointers, "vocab_size": "i32", "stride_lr": "i32", **dict.fromkeys(constants, "constexpr")}
    sizes = () if vocab_size % 16 else ("vocab_size", "stride_lr")
    return AotCase(f"sample {kind} V {vocab_size}", _sample, signature, constants, (*pointers, *sizes), c.num_warps)
