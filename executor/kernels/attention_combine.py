"""Combine the parts of attention over a split context: out = sum_i 2^(lse_i - lse) out_i with 2^lse = sum_i 2^lse_i."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from windtunnel.executor.kernels.aot import AotCase

_PARTS_AT_ONCE = 8
_NUM_WARPS = 2
_NUM_STAGES = 3


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    out_ptr,
    parts_ptr,
    lse_ptr,
    num_splits,
    stride_ot,
    stride_oh,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Grid (heads, rows).  Parts whose log-sum is -inf were never written and are not read."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    offs_d = tl.arange(0, D_PAD)
    offs_p = tl.arange(0, PARTS)
    base = (row * tl.num_programs(0) + head) * num_splits

    acc = tl.zeros([D_PAD], tl.float32)
    total = 0.0
    top = float("-inf")
    for start in range(0, num_splits, PARTS):
        parts = start + offs_p
        lse = tl.load(lse_ptr + base + parts, mask=parts < num_splits, other=float("-inf"))
        written = lse > float("-inf")
        ptrs = parts_ptr + (base + parts)[:, None] * D + offs_d[None, :]
        values = tl.load(ptrs, mask=written[:, None] & (offs_d < D)[None, :], other=0.0)  # [PARTS, D_PAD]
        new_top = tl.maximum(top, tl.max(lse, 0))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.math.exp2(lse - finite_top)
        shrink = tl.math.exp2(top - finite_top)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top

    out = acc / tl.where(total > 0, total, 1.0)
    out_ptrs = out_ptr + row * stride_ot + head * stride_oh + offs_d
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=offs_d < D)


def new_parts(
    num_rows: int, num_heads: int, splits: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the parts [rows, heads, splits, head_dim] and their log-sums [rows, heads, splits], both float32."""
    parts = torch.empty((num_rows, num_heads, splits, head_dim), dtype=torch.float32, device=device)
    return parts, torch.empty((num_rows, num_heads, splits), dtype=torch.float32, device=device)


def combine(out: torch.Tensor, parts: torch.Tensor, lse: torch.Tensor) -> None:
    """Write into ``out`` [rows, heads, head_dim] the attention whose parts are given; rows without any become 0."""
    num_rows, num_heads, splits, head_dim = parts.shape
    combine_kernel[(num_heads, num_rows)](
        out,
        parts,
        lse,
        splits,
        out.stride(0),
        out.stride(1),
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        PARTS=_PARTS_AT_ONCE,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )


def aot_cases(sm: int) -> list[AotCase]:
    """What is compiled ahead of time; the same for every ``sm``."""
    del sm
    return [_aot_case(head_dim, kind) for head_dim in (64, 128) for kind in ("bf16", "fp16")]


def _aot_case(head_dim: int, kind: str) -> AotCase:
    from windtunnel.executor.kernels.aot import AotCase

    return AotCase(
        name=f"attention_combine {kind} head_dim {head_dim}",
        kernel=combine_kernel,
        signature={
            "out_ptr": f"*{kind}",
            "parts_ptr": "*fp32",
            "lse_ptr": "*fp32",
            "num_splits": "i32",
            "stride_ot": "i32",
            "stride_oh": "i32",
            "D": "constexpr",
            "D_PAD": "constexpr",
            "PARTS": "constexpr",
        },
        constexprs={"D": head_dim, "D_PAD": triton.next_power_of_2(head_dim), "PARTS": _PARTS_AT_ONCE},
        aligned=("out_ptr", "parts_ptr", "lse_ptr", "stride_ot", "stride_oh"),
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )
