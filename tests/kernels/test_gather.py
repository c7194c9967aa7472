"""Rows by number in Triton: they are copies, so equality is exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.closeness import DEVICE, FLOATS, randn
from windtunnel.executor.kernels.gather import gather_rows


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 64, 100, 4096, 5000])
def test_rows_are_copied(size: int, dtype: torch.dtype) -> None:
    x = randn(7, size, dtype=dtype)
    rows = torch.tensor([6, 0, 0, 3], device=DEVICE)
    assert torch.equal(gather_rows(x, rows), x[rows])


@settings(max_examples=12)
@given(data=st.data(), num_rows=st.integers(1, 9), size=st.integers(1, 80))
def test_any_rows(data: st.DataObject, num_rows: int, size: int) -> None:
    chosen = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=12))
    rows = torch.tensor(chosen, dtype=torch.int64, device=DEVICE)
    x = randn(num_rows, size)
    assert torch.equal(gather_rows(x, rows), x[rows])


def test_rows_may_be_part_of_wider_ones_and_numbers_apart() -> None:
    x, rows = randn(5, 40)[:, 8:28], torch.tensor([4, 9, 1, 9, 2, 9], device=DEVICE)[::2]
    assert torch.equal(gather_rows(x, rows), x[rows])


def test_what_is_not_a_number_is_copied_too() -> None:
    x = torch.tensor([[float("nan"), float("inf")], [-0.0, 1.0]], device=DEVICE)
    torch.testing.assert_close(gather_rows(x, torch.tensor([0], device=DEVICE)), x[:1], equal_nan=True)


@pytest.mark.parametrize("rows", [torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int64)])
def test_numbers_of_another_kind_are_refused(rows: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="int64 on one device"):
        gather_rows(randn(3, 4), rows.to(DEVICE))
