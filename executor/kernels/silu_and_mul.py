"""The activation of a gated MLP: silu(x[:, :I]) * x[:, I:], rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from windtunnel.executor.kernels.aot import AotCase
from windtunnel.executor.kernels.device import check_activations, rounded, sm_of


def config(sm: int, size: int) -> tuple[int, int]:
    """(elements of a program, warps): 16 elements a thread, at most 2,048.  The same for every ``sm``."""
    del sm
    block = min(triton.next_power_of_2(size), 2048)
    return block, max(1, block // 512)


@triton.jit
def _silu_and_mul(x_ptr, out_ptr, size, stride_xt, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    gate = tl.load(x_ptr + row * stride_xt + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_xt + size + offs, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * size + offs, rounded(out, out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :I]) * x[:, I:] for x [T, 2I], whose rows may be those of a larger tensor.

    Raises ValueError if x is not such a matrix of float32, float16 or bfloat16.
    """
    check_activations(x=x)
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"x has shape {list(x.shape)}: [T, 2I] is expected")
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows and size:
        block, num_warps = config(sm_of(x), size)
        _silu_and_mul[(num_rows, triton.cdiv(size, block))](x, out, size, x.stride(0), BLOCK=block, num_warps=num_warps)
    return out


def aot_cases(sm: int) -> list[AotCase]:
    """Intermediate sizes of Llama 3 8B and Qwen2.5 0.5B."""
    return [_case(sm, size, kind) for size, kind in ((14336, "bf16"), (4864, "bf16"), (14336, "fp32"))]


def _case(sm: int, size: int, kind: str) -> AotCase:
    block, num_warps = config(sm, size)
    signature = {"x_ptr": f"*{kind}", "out_ptr": f"*{kind}", "size": "i32", "stride_xt": "i32", "BLOCK": "constexpr"}
    aligned = ("x_ptr", "out_ptr", "size", "stride_xt")
    return AotCase(f"silu_and_mul {kind} I {size}", _silu_and_mul, signature, {"BLOCK": block}, aligned, num_warps)
