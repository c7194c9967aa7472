"""Sampling in Triton against a sort in float64: the same token, wherever rounding could not decide."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kernels.closeness import DEVICE, randn
from windtunnel.executor.kernels.sample import sample

INF = math.inf
ROUNDING = 2e-6
"""Of a cumulated share: float32 sums of some thousand addends, and the exponential of a GPU."""


class Drawn(NamedTuple):
    token: int
    margin: float
    """How far the nearest decision was from going the other way, as a share of the sum."""


def draw(logits: torch.Tensor, temperature: float, top_p: float, uniform: float) -> Drawn:
    """One token of a row as ``Ops.sample`` says, by sorting, in float64; only the gaps are float32."""
    x = logits.float().cpu().numpy()
    if temperature == 0.0:
        return Drawn(int(x.argmax()), 1.0)
    weights = np.exp(-(x.max() - x).astype(np.float64) / float(np.float32(temperature)))
    shares = weights / weights.sum()
    margin = 1.0
    if top_p < 1.0:
        order = np.argsort(-shares, kind="stable")
        cumulated = shares[order].cumsum()
        last = min(int(np.searchsorted(cumulated, np.float32(top_p))), len(x) - 1)
        margin = float(np.abs(cumulated - np.float32(top_p)).min())
        shares = np.where(shares >= shares[order[last]], shares, 0.0)
    cumulated = shares.cumsum() / shares.sum()
    margin = min(margin, float(np.abs(cumulated - np.float32(uniform)).min()))
    return Drawn(int(np.searchsorted(cumulated, np.float32(uniform), side="right")), margin)


def run(logits: torch.Tensor, temperature: list[float], top_p: list[float], uniforms: list[float]) -> list[int]:
    parameters = (torch.tensor(values, device=DEVICE) for values in (temperature, top_p, uniforms))
    return sample(logits.to(DEVICE), *parameters).tolist()


def one(logits: list[float], temperature: float = 1.0, top_p: float = 1.0, uniform: float = 0.5) -> int:
    return run(torch.tensor([logits]), [temperature], [top_p], [uniform])[0]


def logs(*shares: float) -> list[float]:
    return [math.log(share) for share in shares]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 7, 100, 2048, 2049, 5003])
def test_the_same_token_as_by_sorting(vocab_size: int, dtype: torch.dtype) -> None:
    settings_of_rows = [(0.0, 0.5), (1.0, 1.0), (0.4, 0.999), (1.0, 0.9), (2.0, 0.3), (1.0, 0.99), (2.0, 1.0)]
    logits = randn(len(settings_of_rows), vocab_size, dtype=dtype, seed=vocab_size, scale=3.0)
    uniforms = torch.rand(len(settings_of_rows), generator=torch.Generator().manual_seed(1)).tolist()
    temperature, top_p = (list(values) for values in zip(*settings_of_rows, strict=True))
    found = run(logits, temperature, top_p, uniforms)
    wanted = [draw(*row) for row in zip(logits, temperature, top_p, uniforms, strict=True)]
    decided = [i for i, row in enumerate(wanted) if row.margin > ROUNDING]
    assert len(decided) >= len(wanted) - 1
    assert [found[i] for i in decided] == [wanted[i].token for i in decided]


@settings(max_examples=40)
@given(
    logits=st.lists(st.sampled_from([-INF, -3.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=40),
    temperature=st.sampled_from([0.0, 0.25, 1.0, 1.7]),
    top_p=st.floats(1 / 64, 1.0, width=32),
    uniform=st.floats(0.0, 1.0, width=32, exclude_max=True),
)
def test_any_small_row_with_many_ties(logits: list[float], temperature: float, top_p: float, uniform: float) -> None:
    assume(max(logits) > -INF)
    wanted = draw(torch.tensor(logits), temperature, top_p, uniform)
    assume(wanted.margin > ROUNDING)
    assert one(logits, temperature, top_p, uniform) == wanted.token


def test_a_large_vocabulary() -> None:
    logits = randn(2, 128_256, scale=3.0)
    wanted = [draw(row, 0.8, top_p, 0.37) for row, top_p in zip(logits, (0.95, 1.0), strict=True)]
    assert min(row.margin for row in wanted) > ROUNDING, "choose other numbers"
    assert run(logits, [0.8, 0.8], [0.95, 1.0], [0.37, 0.37]) == [row.token for row in wanted]


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_evenly_spread_uniforms_draw_each_token_as_often_as_it_is_likely(top_p: float) -> None:
    num_draws = 40
    shares = np.array([0.05, 0.3, 0.02, 0.2, 0.08, 0.25, 0.1])
    kept = shares if top_p == 1.0 else np.where(shares >= 0.1, shares, 0.0)  # 0.3 + 0.25 + 0.2 are less than 0.8
    logits = torch.tensor(logs(*shares)).expand(num_draws, -1)
    uniforms = ((np.arange(num_draws) + 0.5) / num_draws).tolist()
    found = run(logits, [1.0] * num_draws, [top_p] * num_draws, uniforms)
    counts = np.bincount(found, minlength=len(shares))
    assert np.abs(counts - num_draws * kept / kept.sum()).max() <= 1.0
    assert found == sorted(found)


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-38])
def test_a_temperature_near_zero_takes_the_largest(temperature: float) -> None:
    logits = randn(1, 300, seed=5)
    assert run(logits, [temperature], [1.0], [0.99]) == [int(logits.argmax())]


@pytest.mark.parametrize("top_p", [0.0, 1e-30, 1e-3])
def test_a_top_p_near_zero_takes_the_largest(top_p: float) -> None:
    logits = randn(1, 300, seed=6)
    assert run(logits, [1.0], [top_p], [0.99]) == [int(logits.argmax())]


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.6, 0.99])
def test_tokens_that_tie_at_the_edge_of_the_nucleus_are_all_in(uniform: float) -> None:
    shares = logs(0.2, 0.1, 0.4, 0.2, 0.1)  # 0.4 and one of 0.2 are enough for 0.55; the other comes along
    wanted = {0.0: 0, 0.3: 2, 0.6: 2, 0.99: 3}
    assert one(shares, top_p=0.55, uniform=uniform) == wanted[uniform]


def test_neighbouring_numbers_are_told_apart_at_the_edge() -> None:
    just_less = 1.0 - 2.0**-23
    row = [0.0, just_less, 1.0]  # from 2.0: gaps of 1 and of one unit more
    shares = np.exp([*row, 2.0])
    enough_with_one = float((shares[3] + shares[2] / 2) / shares.sum())
    assert one([*row, 2.0], top_p=enough_with_one, uniform=0.0) == 2
    assert one([*row, 2.0], top_p=enough_with_one + float(shares[2] / shares.sum()), uniform=0.0) == 1


def test_the_first_of_the_largest_is_taken_at_temperature_zero() -> None:
    assert one([1.0, 3.0, -2.0, 3.0], temperature=0.0) == 1
    wide = torch.zeros(1, 6000)
    wide[0, [2500, 2499, 2499 + 2048, 5999]] = 1.0
    assert run(wide, [0.0], [1.0], [0.5]) == [2499]


@pytest.mark.parametrize("vocab_size", [4, 8192])
def test_the_sum_must_be_exceeded_not_only_reached(vocab_size: int) -> None:
    assert run(torch.zeros(1, vocab_size), [1.0], [1.0], [0.25]) == [vocab_size // 4]


def test_a_uniform_that_rounds_to_one_takes_the_last_of_the_nucleus() -> None:
    assert one(logs(0.5, 0.4, 0.1), uniform=1.0) == 2
    assert one(logs(0.5, 0.4, 0.1), top_p=0.7, uniform=1.0) == 1
    assert one([0.0, 1.0, -INF, -200.0], uniform=1.0) == 1


def test_a_uniform_of_zero_takes_the_first_that_is_possible() -> None:
    assert one([-INF, -500.0, 0.0, 1.0], uniform=0.0) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_a_number_is_never_taken(temperature: float) -> None:
    row = [math.nan, -math.nan, 2.0, -INF, math.nan, 1.0, 2.0, -math.nan]
    for top_p in (0.9, 1.0):
        tokens = [one(row, temperature=temperature, top_p=top_p, uniform=uniform) for uniform in (0.0, 0.5, 1.0)]
        assert tokens == ([2, 5, 6] if temperature else [2, 2, 2])


def test_infinite_logits_share_the_probability() -> None:
    row = [5.0, INF, math.nan, INF]
    assert one(row, temperature=0.0) == 1
    assert [one(row, top_p=top_p, uniform=u) for top_p in (1.0, 0.9) for u in (0.1, 0.9)] == [1, 3, 1, 3]


def test_a_row_without_a_possible_token_is_uniform() -> None:
    row = [-INF] * 4
    assert one(row, temperature=0.0) == 0
    assert [one(row, top_p=top_p, uniform=u) for top_p in (1.0, 0.9) for u in (0.1, 0.6, 0.9)] == [0, 2, 3] * 2


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = randn(6, 700, scale=2.0)
    temperature, top_p, uniforms = [0.0, 1.0, 0.7, 1.3, 1.0, 0.0], [1.0, 0.9, 1.0, 0.5, 0.99, 0.1], [0.1, 0.9] * 3
    together = run(logits, temperature, top_p, uniforms)
    apart = [run(logits[i : i + 1], temperature[i : i + 1], top_p[i : i + 1], uniforms[i : i + 1]) for i in range(6)]
    assert [[token] for token in together] == apart


def test_rows_may_be_part_of_wider_ones() -> None:
    wide = randn(3, 500)
    assert run(wide[:, 20:320], [0.0] * 3, [1.0] * 3, [0.5] * 3) == wide[:, 20:320].argmax(1).tolist()


def test_no_rows_give_no_tokens() -> None:
    assert run(torch.zeros(0, 10), [], [], []) == []


@pytest.mark.parametrize(
    ("logits", "top_p", "message"),
    [
        (torch.zeros(5), torch.ones(1), r"\[R, V\]"),
        (torch.zeros(2, 0), torch.ones(2), r"V of at least 1"),
        (torch.zeros(2, 5), torch.ones(3), r"top_p is \[3\].*\[2\] float32"),
        (torch.zeros(2, 5), torch.ones(2).double(), r"top_p is .*float64.*float32 .* is expected"),
    ],
)
def test_what_does_not_fit_is_refused(logits: torch.Tensor, top_p: torch.Tensor, message: str) -> None:
    ones = torch.ones(2, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        sample(logits.to(DEVICE), ones, top_p.to(DEVICE), ones)
