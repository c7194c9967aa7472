"""What --vary means: values, ranges, and points drawn from ranges."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.scenarios.errors import ScenarioError
from windtunnel.sweeping.axes import Draw, make_axis, parse_vary, value_of
from windtunnel.sweeping.design import combinations


def values(key: str, spec: object) -> list[object]:
    return list(make_axis(key, spec).values)


def test_a_range_is_exact_in_decimals_and_holds_its_end() -> None:
    found = values("gpu_memory_utilization", "0.80:0.98:0.02")
    assert found == [0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94, 0.96, 0.98]


@given(st.integers(0, 500), st.integers(1, 50), st.integers(1, 60))
def test_every_value_of_a_range_is_the_decimal_that_people_write(first: int, step: int, number: int) -> None:
    """No 0.8999999: each value reads as the decimal that counting in hundredths gives."""
    low, by = Decimal(first) / 100, Decimal(step) / 100
    last = low + by * (number - 1)
    found = values("request_rate", f"{low}:{last}:{by}")
    assert [Decimal(str(value)) for value in found] == [low + by * place for place in range(number)]


def test_a_list_keeps_units_for_whoever_reads_the_setting() -> None:
    assert values("max_num_batched_tokens", "2k,4k,8k,16k") == ["2k", "4k", "8k", "16k"]
    assert values("kv_cache_dtype", "auto, fp8") == ["auto", "fp8"]
    assert values("enable_prefix_caching", "true,false") == [True, False]


def test_a_range_may_have_units() -> None:
    assert values("max_num_batched_tokens", "2k:8k:2k") == ["2k", "4k", "6k", "8k"]
    assert values("max_num_batched_tokens", "500:2k:500") == [500, 1000, 1500, 2000]
    assert values("request_timeout", "10s:30s:10s") == ["10s", "20s", "30s"]


def test_ranges_and_values_mix_in_one_list() -> None:
    assert values("max_num_seqs", "1,2,8:24:8,256") == [1, 2, 8, 16, 24, 256]


def test_values_that_hold_commas_are_separated_by_semicolons() -> None:
    assert values("output", "256; exponential:mean=256; uniform:low=1,high=511") == [
        256,
        "exponential:mean=256",
        "uniform:low=1,high=511",
    ]


def test_equal_ratios_are_whole_for_what_counts_something() -> None:
    assert values("max_num_seqs", "log:1:64:7") == [1, 2, 4, 8, 16, 32, 64]
    assert values("max_num_seqs", "log:1:4:10") == [1, 2, 3, 4], "each value once"
    assert values("request_rate", "log:0.5:8:5") == [0.5, 1.0, 2.0, 4.0, 8.0]


def test_equal_distances_hold_both_ends() -> None:
    assert values("request_rate", "lin:1:2:5") == [1.0, 1.25, 1.5, 1.75, 2.0]


def test_python_gives_values_as_they_are() -> None:
    assert values("max_num_seqs", np.array([8, 16])) == [8, 16]
    assert type(values("max_num_seqs", np.array([8, 16]))[0]) is int
    assert values("objectives", ["ttft:p99<1s"]) == [["ttft:p99<1s"]]


def test_flags_and_short_names_stand_for_keys() -> None:
    assert make_axis("tp", "1,2").key == "tensor_parallel_size"
    assert make_axis("num_prompts", "10,20").key == "num_requests"
    assert parse_vary("--max-num-seqs=1,2") == ("max_num_seqs", "1,2")


@pytest.mark.parametrize(
    ("key", "spec", "message"),
    [
        ("request_rate", "0.8:0.98", "without a step"),
        ("request_rate", "2:1:0.1", "must go up"),
        ("request_rate", "1:2:0", "must go up"),
        ("request_rate", "0:1000:0.001", "more than 1,000"),
        ("request_rate", "1,,2", "empty value"),
        ("request_rate", "log:0:8:4", "above 0"),
        ("request_rate", "log:1:8", "how many"),
        ("request_rate", "log:1:8:1", "2 to 1,000"),
        ("request_rate", "random:3:1", "must go up"),
        ("request_rate", "random:1", "LOW:HIGH"),
        ("request_timeout", "1s:5m:1s", "same unit"),
        ("max_num_seqs", 8, "several values"),
        ("max_num_seqs", [], "at least one"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_to_write(key: str, spec: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        make_axis(key, spec)
    assert str(raised.value).startswith(f"{key}=")


def test_gpus_models_and_releases_have_one_name_each_however_they_are_written() -> None:
    assert values("gpu", "H100-SXM,h100-sxm,h100,l40s") == ["H100-SXM", "L40S"]
    assert values("model", ["llama-3.1-8b", "./llama-3.1-8b"]) == ["meta-llama/Llama-3.1-8B-Instruct", "./llama-3.1-8b"]
    assert values("engine", "0.11,vllm-0.11,0.10") == ["vllm-0.11", "vllm-0.10"]
    assert values("gpu", "h100,no-such-card") == ["H100-SXM", "no-such-card"], "whoever needs it says so"
    assert make_axis("gpu", "choice:h100,H100-SXM,l40s").as_draw.choices == ("H100-SXM", "L40S")


def test_what_a_short_name_is_taken_as_is_said_with_what_it_may_mean_too() -> None:
    assert make_axis("gpu", "h100,H100-sxm").notes == (
        "gpu h100 is taken as H100-SXM (there are also H100-PCIe, H100-NVL).",
    )
    assert make_axis("gpu", "4090,3090").notes == ()


def test_digits_are_text_where_the_setting_is_text() -> None:
    """0.10 is not 0.1: there are releases of both names."""
    assert value_of("engine_version", "0.10") == "0.10"
    assert value_of("gpu", "4090") == "4090"
    assert value_of("max_num_seqs", "64") == 64
    assert value_of("request_rate", "0.10") == 0.1


def test_an_unknown_setting_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ScenarioError, match="max_num_seqs"):
        make_axis("max_num_seq", "1,2")


# --- what is drawn


def test_a_drawn_range_covers_whole_numbers_evenly() -> None:
    draw = make_axis("max_num_seqs", "random:1:4").as_draw
    counts = np.bincount([draw.at(share) for share in np.linspace(0, 1, 4000, endpoint=False)])
    assert counts.tolist() == [0, 1000, 1000, 1000, 1000]


@given(st.floats(0, 1), st.booleans(), st.booleans())
def test_what_is_drawn_lies_in_its_range(share: float, is_log: bool, is_whole: bool) -> None:
    value = Draw(2.0, 50.0, is_log=is_log, is_whole=is_whole).at(share)
    assert 2 <= value <= 50
    assert isinstance(value, int) == is_whole


def test_a_draw_reaches_both_ends_on_a_grid() -> None:
    draw = Draw(choices=("a", "b", "c"))
    assert [draw.at(share, on_grid=True) for share in (0.0, 1 / 3, 2 / 3, 1.0)] == ["a", "b", "b", "c"]
    assert [Draw(1, 7, is_whole=True).at(share, on_grid=True) for share in (0.0, 0.5, 1.0)] == [1, 4, 7]


# --- points


def test_lists_make_a_grid_or_go_side_by_side() -> None:
    axes = [make_axis("max_num_seqs", "8,16"), make_axis("request_rate", "1,2")]
    assert combinations(axes) == [(8, 1), (8, 2), (16, 1), (16, 2)]
    assert combinations(axes, is_zipped=True) == [(8, 1), (16, 2)]


def test_a_value_may_come_again_where_lists_go_side_by_side() -> None:
    axes = [make_axis("max_num_seqs", "8,8,16"), make_axis("request_rate", "1,2,2")]
    assert combinations(axes, is_zipped=True) == [(8, 1), (8, 2), (16, 2)]
    assert combinations(axes) == [(8, 1), (8, 2), (16, 1), (16, 2)]


def test_lists_of_different_lengths_cannot_go_side_by_side() -> None:
    axes = [make_axis("max_num_seqs", "8,16"), make_axis("request_rate", "1,2,3")]
    with pytest.raises(ValueError, match="max_num_seqs has 2, request_rate has 3"):
        combinations(axes, is_zipped=True)


def test_every_combination_of_a_grid_is_met_by_the_same_drawn_points() -> None:
    axes = [make_axis("max_num_seqs", "8,16"), make_axis("request_rate", "random:1:3")]
    found = combinations(axes, samples=5, seed=3)
    assert [seats for seats, _ in found] == [8] * 5 + [16] * 5
    assert [rate for _, rate in found[:5]] == [rate for _, rate in found[5:]]


def test_a_latin_hypercube_has_one_point_in_each_slice_of_each_setting() -> None:
    axes = [make_axis("request_rate", "random:0:10"), make_axis("watermark", "random:0:0.5")]
    found = np.array(combinations(axes, samples=10, sampling="lhs", seed=1))
    assert sorted(found[:, 0].astype(int)) == list(range(10))
    assert sorted((found[:, 1] * 20).astype(int)) == list(range(10))


def test_the_same_seed_draws_the_same_points_and_another_others() -> None:
    axes = [make_axis("request_rate", "random:0:10")]
    for sampling in ("lhs", "sobol", "random"):
        drawn = [combinations(axes, samples=8, sampling=sampling, seed=seed) for seed in (0, 0, 1)]
        assert drawn[0] == drawn[1] != drawn[2]


def test_sobol_points_come_in_powers_of_two() -> None:
    with pytest.raises(ValueError, match="give 8 or 16"):
        combinations([make_axis("request_rate", "random:0:10")], samples=10, sampling="sobol")


def test_samples_without_a_range_are_refused() -> None:
    with pytest.raises(ValueError, match="random:LOW:HIGH"):
        combinations([make_axis("request_rate", "1,2")], samples=4)


def test_a_grid_that_is_too_large_is_refused_before_it_is_made() -> None:
    axes = [make_axis(key, "1:500:1") for key in ("max_num_seqs", "num_requests", "request_rate")]
    with pytest.raises(ValueError, match="more than 20,000"):
        combinations(axes)


def test_commas_within_brackets_and_quotes_do_not_end_a_value() -> None:
    assert values("percentiles", "[50,99],[90]") == [[50, 99], [90]]
    assert values("model", '"a,b",c') == ["a,b", "c"]
    assert values("objectives", "[ttft:p99<1s") == [["[ttft:p99<1s"]]


def test_whole_numbers_are_not_drawn_from_between_fractions() -> None:
    with pytest.raises(ValueError, match="both ends must be whole numbers"):
        make_axis("max_num_seqs", "random:1.5:8")
    assert make_axis("gpu_memory_utilization", "random:0.5:0.8").draw is not None


def test_values_may_come_from_whatever_has_an_order() -> None:
    assert values("max_num_seqs", (number for number in (1, 2, 3))) == [1, 2, 3]
    assert values("max_num_seqs", np.array([1, 2, 3])) == [1, 2, 3]
    with pytest.raises(ValueError, match="a set has no order"):
        make_axis("max_num_seqs", {1, 2})
