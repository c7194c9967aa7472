"""How a sweep judges: knees beyond noise, the best under the objectives, Sobol indices and Morris' effects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from windtunnel.reports.sweep_data import SweptPoint, are_level
from windtunnel.sim.rng import stream
from windtunnel.sweeping.analysis import best_point, default_best_by
from windtunnel.sweeping.indices import morris_design, morris_effects, sobol_design, sobol_indices
from windtunnel.sweeping.knee import find_knee

# --- knees


def test_a_hinge_has_its_knee_where_it_bends() -> None:
    found = find_knee([1, 2, 3, 4, 5, 6], [[50, 30, 10, 9, 8, 7]])
    assert found is not None
    assert found.place == 2
    assert not found.is_tested, "a single run cannot say what is noise"


def test_a_straight_line_a_level_one_and_three_points_have_no_knee() -> None:
    assert find_knee([1, 2, 3, 4, 5], [[1, 2, 3, 4, 5]]) is None
    assert find_knee([1, 2, 3, 4, 5], [[3, 3, 3, 3, 3]]) is None
    assert find_knee([1, 2, 3], [[9, 1, 0]]) is None


def test_a_curve_with_its_peak_inside_and_one_that_bends_twice_have_no_knee() -> None:
    assert find_knee([1, 2, 3, 4, 5], [[0, 5, 9, 5, 1]]) is None
    assert find_knee([0, 1, 2, 3, 4, 5, 6], [[0, 0, 0, 5, 10, 10, 10]]) is None


def test_a_knee_must_stand_out_of_the_noise() -> None:
    curve = np.array([50.0, 30, 10, 9, 8, 7])
    rng = np.random.default_rng(5)
    calm = [curve + rng.normal(0, 0.5, 6) for _ in range(5)]
    wild = [curve + rng.normal(0, 40, 6) for _ in range(5)]
    found = find_knee([1, 2, 3, 4, 5, 6], [each.tolist() for each in calm])
    assert found is not None
    assert (found.place, found.low, found.high, found.is_tested) == (2, 2, 2, True)
    assert find_knee([1, 2, 3, 4, 5, 6], [each.tolist() for each in wild]) is None


def test_pure_noise_rarely_has_a_knee() -> None:
    """The place is chosen after looking; the interval pays for that."""
    rng = np.random.default_rng(7)
    slope = np.linspace(0, 1, 8)
    found = [find_knee(range(1, 9), (slope + rng.normal(0, 0.3, (5, 8))).tolist()) for _ in range(300)]
    assert sum(each is not None for each in found) <= 15


def test_equal_ratios_of_a_logarithm_are_a_straight_line_and_no_knee() -> None:
    positions = [1, 2, 4, 8, 16, 32]
    assert find_knee(positions, [[0, 1, 2, 3, 4, 5]], is_log=True) is None
    assert find_knee(positions, [[0, 1, 2, 3, 4, 5]]) is not None


# --- the best point


def point(
    number: int, values: dict[str, Any], *, held: tuple[bool, ...] = (True, True, True), **more: Any
) -> SweptPoint:
    """A point of three runs, whose numbers are given as one value or as three."""
    runs = []
    for place in range(3):
        own = {key: value[place] if isinstance(value, tuple) else value for key, value in values.items()}
        runs.append({"verdict": "stable", "stability": "stable", "slo_passed": held[place], **own, **more})
    return SweptPoint(number, {"x": number}, {"x": str(number)}, {"x": float(number)}, tuple(runs))


def test_the_best_keeps_the_objectives_in_every_replication() -> None:
    points = [
        point(1, {"output_throughput": 100.0}),
        point(2, {"output_throughput": 200.0}),
        point(3, {"output_throughput": 300.0}, held=(True, True, False)),
    ]
    found = best_point(points, "output_throughput", ["ttft:p99<1s"])
    assert found is not None
    assert (found.point.number, found.is_under_slo, found.level) == (2, True, ())
    assert best_point(points[2:], "output_throughput", ["ttft:p99<1s"]) is None


def test_of_points_that_are_level_the_one_with_fewer_gpus_then_preemptions_then_more_memory_wins() -> None:
    same = {"output_throughput": (100.0, 120.0, 110.0), "num_gpus": 1, "preemptions": 0}
    points = [
        point(1, {**same, "num_gpus": 2, "oom_margin_bytes": 9 * 2**30}),
        point(2, {**same, "oom_margin_bytes": 2 * 2**30}),
        point(3, {**same, "output_throughput": (101.0, 119.0, 111.0), "oom_margin_bytes": 4 * 2**30}),
        point(4, {**same, "preemptions": 3, "oom_margin_bytes": 8 * 2**30}),
    ]
    found = best_point(points, "output_throughput", [])
    assert found is not None
    assert (found.point.number, [each.number for each in found.level]) == (3, [1, 2, 4])
    assert found.tie_break == "needs the fewest GPUs and has the fewest preemptions and leaves the most memory free"


def test_points_are_told_apart_run_by_run_not_by_their_means() -> None:
    """The same requests at both: a small gain in every run is one, whatever the runs' own scatter."""
    first = point(1, {"output_throughput": (100.0, 200.0, 300.0)})
    assert not are_level(first, point(2, {"output_throughput": (105.0, 205.0, 305.5)}), "output_throughput")
    assert are_level(first, point(3, {"output_throughput": (205.0, 105.0, 305.0)}), "output_throughput")


def test_an_unsafe_point_is_best_only_if_there_is_no_other() -> None:
    points = [point(1, {"output_throughput": 100.0}), point(2, {"output_throughput": 200.0}, memory_verdict="unsafe")]
    found = best_point(points, "output_throughput", [])
    assert found is not None
    assert found.point.number == 1
    alone = best_point(points[1:], "output_throughput", [])
    assert alone is not None
    assert alone.point.is_unsafe


def test_goodput_is_what_is_best_where_limits_are_set_and_per_gpu_where_gpus_differ() -> None:
    plain = [point(1, {"output_throughput": 1.0, "num_gpus": 1})]
    assert default_best_by(plain) == "output_throughput"
    good = [point(n, {"output_throughput": 1.0, "request_goodput": 2.0, "num_gpus": n}) for n in (1, 2)]
    assert default_best_by(good) == "request_goodput_per_gpu"


# --- Sobol and Morris


def ishigami(points: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Ishigami and Homma 1990, with a = 7 and b = 0.1; its indices are known in closed form."""
    x = (2 * points - 1) * np.pi
    result: np.ndarray[Any, Any] = np.sin(x[:, 0]) + 7 * np.sin(x[:, 1]) ** 2 + 0.1 * x[:, 2] ** 4 * np.sin(x[:, 0])
    return result


def test_sobol_indices_are_those_of_the_closed_form() -> None:
    points = sobol_design(3, 4096, stream(0, "test"))
    found = sobol_indices(ishigami(points), 3, stream(0, "bootstrap"))
    variance = 0.5 + 7**2 / 8 + 0.1 * np.pi**4 / 5 + 0.1**2 * np.pi**8 / 18
    first = [0.5 * (1 + 0.1 * np.pi**4 / 5) ** 2 / variance, 7**2 / 8 / variance, 0.0]
    both = 0.1**2 * np.pi**8 * (1 / 18 - 1 / 50) / variance
    assert [each.value for each in found.first] == pytest.approx(first, abs=0.02)
    assert [each.value for each in found.total] == pytest.approx([first[0] + both, first[1], both], abs=0.02)
    assert all(each.low <= each.value <= each.high for each in (*found.first, *found.total))


def test_sobol_indices_agree_with_scipy() -> None:
    from scipy.stats import sobol_indices as scipy_indices

    points = sobol_design(3, 1024, stream(1, "test"))
    outputs = ishigami(points)
    blocks = outputs.reshape(5, 1024)
    theirs = scipy_indices(func={"f_A": blocks[:1], "f_B": blocks[1:2], "f_AB": blocks[2:, None, :]}, n=1024)
    ours = sobol_indices(outputs, 3, stream(0, "bootstrap"))
    assert [each.value for each in ours.first] == pytest.approx(theirs.first_order.ravel().tolist(), abs=0.01)
    assert [each.value for each in ours.total] == pytest.approx(theirs.total_order.ravel().tolist(), abs=0.01)


def test_base_points_with_a_missing_output_are_left_out() -> None:
    points = sobol_design(2, 64, stream(0, "test"))
    outputs = points[:, 0] + 0.1 * points[:, 1]
    outputs[[3, 70, 140]] = np.nan  # in A, in B and in a mixed block: three base points
    found = sobol_indices(outputs, 2, stream(0, "bootstrap"))
    assert found.num_rows == 64 - len({3 % 64, 70 % 64, 140 % 64})
    assert found.total[0].value > 0.9
    with pytest.raises(ValueError, match="too few"):
        sobol_indices(np.full(256, np.nan), 2, stream(0, "bootstrap"))


def test_nothing_matters_where_nothing_varies() -> None:
    points = sobol_design(2, 16, stream(0, "test"))
    found = sobol_indices(np.full(len(points), 3.0), 2, stream(0, "bootstrap"))
    assert [each.value for each in (*found.first, *found.total)] == [0.0] * 4


def test_morris_effects_of_a_linear_model_are_its_slopes_with_no_spread() -> None:
    points = morris_design(3, 20, stream(0, "test"))
    found = morris_effects(points, points @ np.array([3.0, -2.0, 0.0]), stream(0, "bootstrap"))
    assert [each.value for each in found.mean_absolute] == pytest.approx([3.0, 2.0, 0.0])
    assert [each.value for each in found.mean] == pytest.approx([3.0, -2.0, 0.0])
    assert [each.value for each in found.spread] == pytest.approx([0.0] * 3, abs=1e-9)


def test_an_interaction_shows_as_spread() -> None:
    points = morris_design(2, 40, stream(0, "test"))
    found = morris_effects(points, points[:, 0] * points[:, 1], stream(0, "bootstrap"))
    assert all(each.low > 0.05 for each in found.spread)


def test_each_trajectory_moves_every_input_once_and_stays_in_the_cube() -> None:
    points = morris_design(4, 10, stream(2, "test"))
    assert points.min() >= 0
    assert points.max() <= 1
    moves = np.diff(points.reshape(10, 5, 4), axis=1)
    assert (np.count_nonzero(moves, axis=2) == 1).all()
    assert (np.count_nonzero(moves, axis=1) == 1).all()
    assert np.unique(np.abs(moves[moves != 0]).round(12)).tolist() == pytest.approx([2 / 3])
