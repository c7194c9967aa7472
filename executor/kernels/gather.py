"""Rows of a matrix by number: token embeddings, and the hidden states whose logits are wanted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from windtunnel.executor.kernels.aot import AotCase
from windtunnel.executor.kernels.device import check_activations, sm_of


def config(sm: int, size: int) -> tuple[int, int]:
    """(elements of a program, warps): 16 elements a thread, at most 4,096.  The same for every ``sm``."""
    del sm
    block = min(triton.next_power_of_2(size), 4096)
    return block, max(1, block // 512)


@triton.jit
def _gather_rows(x_ptr, rows_ptr, out_ptr, size, stride_xt, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    tl.store(out_ptr + index * size + offs, tl.load(x_ptr + row * stride_xt + offs, mask=mask), mask=mask)


def gather_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows] for x [T, H] and rows [R] int64 in 0 … T - 1: numbers out of range are not noticed.

    Raises ValueError if shapes, types or places do not fit.
    """
    check_activations(x=x)
    if x.dim() != 2 or rows.dim() != 1 or rows.dtype != torch.int64 or rows.device != x.device:
        raise ValueError(
            f"x is {list(x.shape)} on {x.device}, rows {list(rows.shape)} {rows.dtype} on {rows.device}:"
            " [T, H] and [R] int64 on one device are expected"
        )
    out = torch.empty((rows.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    if out.numel():
        block, num_warps = config(sm_of(x), x.shape[1])
        grid = (rows.shape[0], triton.cdiv(x.shape[1], block))
        _gather_rows[grid](x, rows.contiguous(), out, x.shape[1], x.stride(0), BLOCK=block, num_warps=num_warps)
    return out


def aot_cases(sm: int) -> list[AotCase]:
    """Hidden sizes of Llama 3 8B and Qwen2.5 0.5B."""
    return [_case(sm, size, kind) for size, kind in ((4096, "bf16"), (896, "bf16"), (4096, "fp32"))]


def _case(sm: int, size: int, kind: str) -> AotCase:
    block, num_warps = config(sm, size)
    pointers = {"x_ptr": f"*{kind}", "rows_ptr": "*i64", "out_ptr": f"*{kind}"}
    signature = {**pointers, "size": "i32", "stride_xt": "i32", "BLOCK": "constexpr"}
    aligned = (*pointers, "size", "stride_xt")
    return AotCase(f"gather_rows {kind} H {size}", _gather_rows, signature, {"BLOCK": block}, aligned, num_warps)
