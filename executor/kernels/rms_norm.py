"""RMSNorm, alone or of a sum: x / sqrt(mean(x²) + eps) * weight over the last dimension.

A program takes whole rows, several if they are short (norms of heads), so that each thread has 16-byte loads to do; a
row is read once and stays in registers.  The row is rounded once, at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from windtunnel.executor.kernels.aot import AotCase
from windtunnel.executor.kernels.device import check_activations, rounded, sm_of

MAX_SIZE = 16_384
"""Longest row; it has to fit the registers of one block."""


class Config(NamedTuple):
    """How rows are shared out."""

    BLOCK: int
    """Elements of a row, a power of two."""
    ROWS: int
    """Rows of a program."""
    num_warps: int


def config(sm: int, size: int) -> Config:
    """16 elements a thread, 2,048 or more a program; longer rows get up to 16 warps.  The same for every ``sm``."""
    del sm
    block = triton.next_power_of_2(size)
    rows = max(1, 2048 // block)
    return Config(block, rows, min(max(block * rows // 512, 4), 16))


@triton.jit(do_not_specialize=["num_rows"])  # it changes from step to step
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    num_rows,
    num_heads,
    size,
    stride_xt,
    stride_xh,
    stride_rt,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    offs = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    mask = (rows < num_rows) & (offs < size)  # [ROWS, BLOCK]
    starts = (rows // num_heads).to(tl.int64) * stride_xt + rows % num_heads * stride_xh
    rows = rows.to(tl.int64)
    weight = tl.load(weight_ptr + offs, mask=offs < size, other=0.0)
    x = tl.load(x_ptr + starts + offs, mask=mask, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + rows * stride_rt + offs, mask=mask, other=0.0)
        x = rounded(x.to(tl.float32) + residual.to(tl.float32), x_ptr.dtype.element_ty)
        tl.store(sum_ptr + rows * size + offs, x, mask=mask)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)[:, None]  # [ROWS, 1]
    normed = x * scale * weight.to(tl.float32)
    tl.store(out_ptr + rows * size + offs, rounded(normed, out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of every row of x: [T, H] or [T, heads, D]; rows may be those of a larger tensor.  A new, contiguous tensor.

    Raises ValueError if shapes, types or places do not fit.
    """
    if x.dim() not in (2, 3):
        raise ValueError(f"x has shape {list(x.shape)}: [T, H] or [T, heads, D] is expected")
    _check(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_heads = x.shape[1] if x.dim() == 3 else 1
    stride_xh = x.stride(1) if x.dim() == 3 else 0
    _launch(x, None, weight, out, None, num_heads, stride_xh, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the sum, the sum) of x and residual, both [T, H]; the sum is rounded to their type first.

    Raises ValueError if shapes, types or places do not fit.
    """
    if x.dim() != 2 or residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"x is {list(x.shape)} {x.dtype} and residual {list(residual.shape)} {residual.dtype}:"
            " both must be [T, H] of one type"
        )
    _check(x, weight, residual)
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, residual, weight, out, total, 1, 0, eps)
    return out, total


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> None:
    check_activations(x=x, weight=weight, **({} if residual is None else {"residual": residual}))
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight is {list(weight.shape)}, rows of x have {x.shape[-1]} elements: they must be as many")
    if x.shape[-1] > MAX_SIZE:
        raise ValueError(f"rows have {x.shape[-1]} elements, {MAX_SIZE} is the most: use torch for this model's norms")


def _launch(x, residual, weight, out, total, num_heads, stride_xh, eps) -> None:
    size = x.shape[-1]
    num_rows = x.shape[0] * num_heads
    if not num_rows:
        return
    c = config(sm_of(x), size)
    _rms_norm[(triton.cdiv(num_rows, c.ROWS),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        out if total is None else total,
        num_rows,
        num_heads,
        size,
        x.stride(0),
        stride_xh,
        0 if residual is None else residual.stride(0),
        eps,
        ADD=residual is not None,
        BLOCK=c.BLOCK,
        ROWS=c.ROWS,
        num_warps=c.num_warps,
    )


def aot_cases(sm: int) -> list[AotCase]:
    """Norms of hidden states of 896 to 16,384, with and without a residual, and of heads of 128."""
    cases = [
        _case(sm, size, kind, add) for size in (896, 4096, 8192, 16384) for add in (False, True) for kind in ("bf16",)
    ]
    return [*cases, _case(sm, MAX_SIZE, "fp32", True), _case(sm, 128, "bf16", False, num_heads=32)]


def _case(sm: int, size: int, kind: str, add: bool, num_heads: int = 1) -> AotCase:
    c = config(sm, size)
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "sum_ptr"), f"*{kind}")
    constants = {"ADD": add, "BLOCK": c.BLOCK, "ROWS": c.ROWS} | (
        {"num_heads": 1, "stride_xh": 0} if num_heads == 1 else {}
    )
    integers = ("num_rows", "num_heads", "size", "stride_xt", "stride_xh", "stride_rt")
    signature = {
        **pointers,
        **{name: "constexpr" if name in constants else "i32" for name in integers},
        "eps": "fp32",
        **dict.fromkeys(("ADD", "BLOCK", "ROWS"), "constexpr"),
    }
    aligned = (*pointers, *(name for name in integers if name not in constants and name != "num_rows"))
    what = "add_rms_norm" if add else "rms_norm"
    return AotCase(f"{what} {kind} H {size}", _rms_norm, signature, constants, aligned, c.num_warps)
