"""The gated activation in Triton against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from kernels.closeness import DEVICE, FLOATS, assert_as_exact_as_torch, randn
from windtunnel.executor.kernels.silu_and_mul import silu_and_mul


def assert_activated(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    wide = gate.double()
    torchs = (functional.silu(gate.float()) * up.float()).to(x.dtype)
    assert_as_exact_as_torch(out, torchs, wide * torch.sigmoid(wide) * up.double())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 2048), (2, 2049), (1, 4864)])
def test_rows_are_activated(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = randn(shape[0], 2 * shape[1], dtype=dtype, scale=4.0)
    out = silu_and_mul(x)
    assert out.shape == shape
    assert_activated(out, x)


@settings(max_examples=12)
@given(shape=st.tuples(st.integers(0, 6), st.integers(0, 70)), dtype=st.sampled_from(FLOATS), seed=st.integers(0, 99))
def test_any_shape(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    x = randn(shape[0], 2 * shape[1], dtype=dtype, seed=seed)
    assert_activated(silu_and_mul(x), x)


def test_rows_may_be_part_of_wider_ones() -> None:
    x = randn(3, 50)[:, 10:40]
    assert_activated(silu_and_mul(x), x)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # numpy's, in the interpreter
def test_large_gates_saturate() -> None:
    gates = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], device=DEVICE)
    out = silu_and_mul(torch.cat([gates, torch.ones_like(gates)]).unsqueeze(0))
    torch.testing.assert_close(out[0], torch.tensor([0.0, 0.0, 0.0, 100.0, 1e4], device=DEVICE), rtol=0, atol=1e-30)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_what_has_no_halves_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\[T, 2I\] is expected"):
        silu_and_mul(torch.zeros(shape, device=DEVICE))
