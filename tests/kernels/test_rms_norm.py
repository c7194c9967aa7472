"""RMSNorm in Triton against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from kernels.closeness import DEVICE, FLOATS, assert_as_exact_as_torch, randn
from windtunnel.executor.kernels.rms_norm import MAX_SIZE, add_rms_norm, rms_norm

EPS = 1e-5


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def assert_normed(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    assert_as_exact_as_torch(out, functional.rms_norm(x, x.shape[-1:], weight, EPS), exact_norm(x, weight))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 128), (17, 100), (2, 896), (3, 4096), (1, 5120)])
def test_rows_are_normed(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype, scale=3.0), randn(shape[1], dtype=dtype, seed=1)
    assert_normed(rms_norm(x, weight, EPS), x, weight)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(3, 4, 128), (5, 7, 64), (2, 3, 20)])
def test_heads_that_are_part_of_a_wider_row_are_normed(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_tokens, num_heads, size = shape
    fused = randn(num_tokens, (num_heads + 2) * size, dtype=dtype)
    x = fused[:, size : (num_heads + 1) * size].view(num_tokens, num_heads, size)
    before = fused.clone()
    weight = randn(size, dtype=dtype, seed=1)
    out = rms_norm(x, weight, EPS)
    assert out.is_contiguous()
    assert_normed(out, x, weight)
    assert torch.equal(fused, before)


def test_heads_may_lie_apart() -> None:
    x, weight = randn(3, 4, 100)[:, 1:, 20:84], randn(64, seed=1)
    assert_normed(rms_norm(x, weight, EPS), x, weight)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (3, 896), (2, 4096)])
def test_the_sum_is_rounded_before_its_norm_is_taken(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = (randn(*shape, dtype=dtype, seed=seed, scale=5.0) for seed in (0, 1))
    weight = randn(shape[1], dtype=dtype, seed=2)
    before = x.clone(), residual.clone()
    out, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert_normed(out, total, weight)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@settings(max_examples=12)
@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(1, 130)),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_any_shape_and_scale(shape: tuple[int, int, int], dtype: torch.dtype, seed: int, scale: float) -> None:
    x, weight = randn(*shape, dtype=dtype, seed=seed, scale=scale), randn(shape[2], dtype=dtype, seed=seed + 1)
    assert_normed(rms_norm(x, weight, EPS), x, weight)


def test_a_row_of_zeros_stays_zero() -> None:
    zeros = torch.zeros(2, 64, device=DEVICE)
    assert torch.equal(rms_norm(zeros, torch.ones(64, device=DEVICE), EPS), zeros)


def test_rows_may_lie_apart_in_a_sum() -> None:
    x, residual = randn(4, 100)[:, :50], randn(4, 70, seed=1)[:, 20:]
    out, total = add_rms_norm(x, residual, torch.ones(50, device=DEVICE), EPS)
    assert torch.equal(total, x + residual)
    assert_normed(out, total, torch.ones(50, device=DEVICE))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(8), torch.zeros(8), r"\[T, H\] or \[T, heads, D\] is expected"),
        (torch.zeros(2, 8), torch.zeros(7), "rows of x have 8 elements"),
        (torch.zeros(2, 8, dtype=torch.float64), torch.zeros(8), "use float32, float16 or bfloat16"),
        (torch.zeros(8, 2).T, torch.zeros(8), "call contiguous"),
        (torch.zeros(1, MAX_SIZE + 1), torch.zeros(MAX_SIZE + 1), f"{MAX_SIZE} is the most"),
    ],
)
def test_what_does_not_fit_is_refused(x: torch.Tensor, weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(x.to(DEVICE), weight.to(DEVICE), EPS)


def test_a_residual_of_another_type_is_refused() -> None:
    x = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="both must be"):
        add_rms_norm(x, x.half(), torch.zeros(8, device=DEVICE), EPS)
