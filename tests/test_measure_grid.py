"""The grid of steps: within the limits of the engine, of all kinds, and the same every time."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.calibrate.grid import KINDS, SIZES, Composition, SequenceWork, log_spaced, make_grid
from windtunnel.sim.cost.features import graph_sizes
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepShape

ROOMY = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=4096, num_gpu_blocks=8192)

configs = st.builds(
    lambda seqs, more_tokens, length, size, blocks: SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + more_tokens,
        max_model_len=length,
        block_size=size,
        num_gpu_blocks=blocks,
    ),
    st.integers(1, 700),
    st.integers(0, 4096),
    st.integers(2, 40_000),
    st.sampled_from([1, 4, 16, 128]),
    st.integers(2, 5000),
)


@given(configs, st.sampled_from(sorted(SIZES)), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_step_could_be_one_of_the_engines(config: SchedulerConfig, size: str, seed: int) -> None:
    for point in make_grid(config, size, seed).points:
        shape = point.shape
        assert 1 <= len(point.sequences) <= config.max_num_seqs
        assert 1 <= shape.num_tokens == point.num_tokens <= config.max_num_batched_tokens
        assert all(1 <= work.num_tokens <= config.max_model_len for work in point.sequences)
        blocks = sum(-(-work.num_tokens // config.block_size) for work in point.sequences)
        assert blocks <= config.num_gpu_blocks - 1, "block 0 is nobody's"
        assert shape.num_sampled <= len(point.sequences) == shape.num_decode_seqs + shape.num_prefill_seqs


@pytest.mark.parametrize("size", SIZES)
def test_all_kinds_are_in_a_grid_of_any_size(size: str) -> None:
    grid = make_grid(ROOMY, size)
    assert list(grid.kinds()) == list(KINDS)
    for point in grid.points:
        shape = point.shape
        has = (shape.num_decode_seqs > 0, shape.num_prefill_seqs > 0)
        expected = {"prefill": (False, True), "chunks": (False, True), "mixed": (True, True), "drawn": has}
        assert has == expected.get(point.kind, (True, False)), point.kind
        if point.kind == "off_graph":
            assert shape.num_decode_seqs not in graph_sizes(64)
        if point.kind == "chunks":
            assert shape.num_prefill_seqs > 1


def test_larger_grids_hold_more() -> None:
    counts = [len(make_grid(ROOMY, size).points) for size in ("small", "default", "full")]
    assert counts == sorted(counts)
    assert counts[0] <= 80
    assert counts[2] >= 4 * counts[0]


def test_corners_of_the_box_are_in_the_grid() -> None:
    shapes = [point.shape for point in make_grid(ROOMY, "small").points]
    assert min(shape.num_tokens for shape in shapes) == 1
    assert max(shape.num_decode_seqs for shape in shapes) == 64
    assert max(shape.prefill_tokens for shape in shapes) == 1024
    longest = max(shape.decode_context_tokens for shape in shapes)
    assert longest > 0.9 * 64 * (8191 // 64) * 16, "nearly all of the pool"
    assert {shape.num_sampled == 0 for shape in shapes} == {True, False}, "a chunk that does not end its prompt"


def test_a_skewed_step_has_the_sums_of_one_whose_contexts_are_alike() -> None:
    points = make_grid(ROOMY, "full").points
    alike = defaultdict(list)
    for point in points:
        if point.kind == "decode":
            alike[point.shape].append(point)
    skewed = [point for point in points if point.kind == "skewed"]
    assert len(skewed) >= 5
    for point in skewed:
        contexts = sorted(work.num_tokens for work in point.sequences)
        assert alike[point.shape], point.shape
        assert contexts[-1] > 1.5 * contexts[0]
        assert contexts[-2] == contexts[0]


def test_the_same_seed_gives_the_same_grid() -> None:
    first, again, other = (make_grid(ROOMY, "default", seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len({point.sequences for point in first.points}) == len(first.points), "no step twice"


def test_the_shape_of_a_composition() -> None:
    works = (SequenceWork(1, 9), SequenceWork(1, 0), SequenceWork(3, 4, samples=False))
    assert Composition("mixed", works).shape == StepShape(1, 10, 2, 4, 4, 1 + 3 * 4 + 6, 2)


@pytest.mark.parametrize(
    ("works", "message"),
    [((), "at least one sequence"), ((SequenceWork(0, 4),), "at least 1 new token"), ((SequenceWork(1, -1),), "got 1")],
)
def test_a_composition_without_sense_is_refused(works: tuple[SequenceWork, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Composition("decode", works)


@pytest.mark.parametrize(
    ("size", "seed", "message"), [("huge", 0, "one of small, default, full"), ("small", -1, "seed must be at least 0")]
)
def test_a_grid_that_is_not_there_is_refused(size: str, seed: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_grid(ROOMY, size, seed)


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(0, 12))
def test_log_spaced_numbers_rise_from_the_least_to_the_most(least: int, most: int, count: int) -> None:
    values = log_spaced(least, most, count)
    assert values == sorted(set(values))
    assert len(values) <= count
    assert all(least <= value <= most for value in values)
    if most >= least and count > 1:
        assert (values[0], values[-1]) == (least, most)
