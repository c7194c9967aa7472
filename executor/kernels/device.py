"""Where a kernel is about to run, and the checks that all launchers share."""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run on the CPU, in Triton's interpreter."""

_INTERPRETED = tl.constexpr(INTERPRETED)

FLOATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Types of activations, and Triton's names for them."""


def sm_of(tensor: torch.Tensor) -> int:
    """80 for an A100, 90 for an H100 or H200, 100 for a B200 ...; 0 on ROCm and in the interpreter."""
    return _sm(tensor.device.index or 0) if tensor.is_cuda and torch.version.hip is None else 0


@functools.cache
def _sm(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return int(major * 10 + minor)


def check_activations(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless all are float32, float16 or bfloat16, on one device, their last dimension contiguous."""
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} is {tensor.dtype}: use float32, float16 or bfloat16")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, other arguments are on {device}: move it there")
        if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, not 1: call contiguous()")
    if not INTERPRETED and device.type != "cuda":
        raise ValueError(
            f"kernels run on a GPU, not on {device}: move the tensors, or set TRITON_INTERPRET=1 before importing"
        )


@triton.jit
def rounded(x, TYPE: tl.constexpr):
    """float32 x in another type, to nearest even.  Triton's interpreter would cut bfloat16 off instead."""
    if _INTERPRETED and TYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, upper, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(TYPE)
