"""The verdict on a prediction, and what explains its error: planted differences are named, with their numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from validation_builders import CONFIG, COST, as_live, requests, setup, write_recording

from windtunnel.calibrate.attribution import (
    AdjustedCost,
    Attributed,
    Ingredient,
    Setup,
    arrivals_of,
    attribute,
    causes_of,
    engine_of,
    lengths_of,
    recording_of,
)
from windtunnel.calibrate.live.observed import Ending, ObservedRun
from windtunnel.calibrate.validation import (
    errors_of,
    overlays_of,
    parse_limits,
    with_limits,
    with_requests,
)
from windtunnel.sim.metrics.agreement import (
    METRICS,
    Agreement,
    Attribution,
    Effect,
    Headline,
    MetricError,
    relative_error,
)

# --- limits


def test_limits_are_read_however_they_are_written() -> None:
    limits = parse_limits("throughput:2% ttft:mean<4%, e2el:p95 <= 8 %; preemptions < 10%")
    assert [(limit.metric, limit.statistic, limit.most) for limit in limits] == [
        ("throughput", "", 0.02),
        ("ttft", "mean", 0.04),
        ("e2el", "p95", 0.08),
        ("preemptions", "", 0.10),
    ]


@given(
    st.sampled_from(("ttft", "tpot", "itl", "e2el")),
    st.sampled_from(("mean", "p50", "p90", "p95", "p99")),
    st.integers(0, 500),
)
def test_a_limit_reads_back_as_it_was_written(metric: str, statistic: str, percent: int) -> None:
    (limit,) = parse_limits(f"{metric}:{statistic}<{percent}%")
    assert (limit.metric, limit.statistic, limit.most) == (metric, statistic, percent / 100)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no limit is in it"),
        ("ttft", "is no limit: write METRIC<PERCENT"),
        ("ttft<4", "a limit is in percent: write ttft<4%"),
        ("speed<4%", "there is no metric 'speed', only throughput"),
        ("ttft:p42<4%", "ttft has no statistic 'p42'; it has mean, p50, p90, p95, p99"),
        ("makespan:mean<4%", "it has no statistics: leave it out"),
        ("ttft:mean<-4%", "is no limit"),
    ],
)
def test_a_limit_that_is_none_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_limits(text)


def test_a_limit_without_a_statistic_holds_for_each_and_one_with_it_goes_first() -> None:
    errors = with_limits(errors_of([live()], predicted()), parse_limits("ttft:mean<1% ttft<5%"))
    limits = {error.statistic: error.limit for error in errors if error.metric == "ttft"}
    assert limits == {"mean": 0.01, "p50": 0.05, "p90": 0.05, "p95": 0.05, "p99": 0.05}


def test_a_limit_on_what_was_not_measured_is_refused() -> None:
    unseen = replace(live(), counts=replace(live().counts, num_preemptions=None), series=None)
    with pytest.raises(ValueError, match="preemptions was not compared"):
        with_limits(errors_of([unseen], predicted()), parse_limits("preemptions<10%"))


# --- errors


def predicted() -> ObservedRun:
    return setup().observed()


def live(extra_ns: int = 0) -> ObservedRun:
    return as_live(predicted(), extra_ns=extra_ns)


def by_key(errors: Sequence[MetricError]) -> dict[str, MetricError]:
    return {error.key: error for error in errors}


def test_a_run_agrees_with_itself() -> None:
    errors = errors_of([live()], predicted())
    assert {error.metric for error in errors} == set(METRICS)
    assert {error.error for error in errors} == {0.0}
    assert {error.interval for error in errors} <= {None, (0.0, 0.0)}


def test_an_error_is_relative_to_the_live_number() -> None:
    errors = by_key(errors_of([live(extra_ns=10_000_000)], predicted()))
    mean_ms = errors["ttft:mean"].predicted
    assert mean_ms is not None
    assert errors["ttft:mean"].error == pytest.approx(-10 / (mean_ms + 10))
    assert errors["itl:mean"].error == 0


def test_an_interval_holds_the_error_and_not_0_where_all_requests_are_late() -> None:
    error = by_key(errors_of([live(extra_ns=10_000_000)], predicted()))["ttft:mean"]
    assert error.interval is not None
    assert error.interval[0] <= (error.error or 0) <= error.interval[1] < 0


def test_the_interval_of_a_difference_by_chance_holds_0() -> None:
    run = live()
    draw = np.random.default_rng(0)
    scattered = run.requests.ttft_ns * (1 + 0.3 * draw.choice([-1, 1], len(run.requests)))
    noisy = replace(run, requests=replace(run.requests, ttft_ns=np.rint(scattered).astype(np.int64)))
    error = by_key(errors_of([noisy], predicted()))["ttft:mean"]
    assert error.interval is not None
    assert error.interval[0] < 0 < error.interval[1]


def test_the_same_seed_gives_the_same_intervals() -> None:
    runs = [live(extra_ns=10_000_000)], setup(cost=AdjustedCost(COST, factor=1.1)).observed()
    assert errors_of(*runs, seed=3) == errors_of(*runs, seed=3)
    assert errors_of(*runs, seed=3) != errors_of(*runs, seed=4)


def test_live_runs_are_averaged_and_their_spread_is_told() -> None:
    errors = by_key(errors_of([live(), live(extra_ns=20_000_000)], predicted()))
    ttft = errors["ttft:mean"]
    assert ttft.live is not None
    assert ttft.predicted is not None
    assert ttft.live == pytest.approx(ttft.predicted + 10)
    assert ttft.spread == pytest.approx(10 / ttft.live)
    assert ttft.is_within_spread
    assert errors["itl:mean"].spread == 0


def test_the_spread_of_one_live_run_is_not_known() -> None:
    assert {error.spread for error in errors_of([live()], predicted())} == {None}


def test_nothing_predicted_of_nothing_is_no_error_and_something_is_an_infinite_one() -> None:
    assert (relative_error(0, 0), relative_error(0, 3), relative_error(None, 3)) == (0, inf, None)
    missed = MetricError("preemptions", "", "", 0, 3, inf, limit=0.1)
    assert missed.passed is False


def test_load_is_compared_at_the_instants_at_which_the_server_was_looked_at() -> None:
    run = live()
    assert run.series is not None
    kept = slice(None, None, 7)
    columns = {name: getattr(run.series, name)[kept] for name in type(run.series).__slots__}
    seen_rarely = replace(run, series=type(run.series)(**columns))
    errors = by_key(errors_of([seen_rarely], predicted()))
    for key in ("running:mean", "running:peak", "running:over_time", "kv_usage:over_time", "waiting:over_time"):
        assert errors[key].error == 0


def test_a_series_that_differs_is_far_off_over_time_by_its_distance() -> None:
    run = live()
    assert run.series is not None
    more = replace(run, series=replace(run.series, num_running=run.series.num_running + 2))
    error = by_key(errors_of([more], predicted()))["running:over_time"]
    assert error.error == pytest.approx(2 / (run.series.num_running.max() + 2))


def test_series_of_another_clock_are_not_compared_instant_by_instant() -> None:
    other = replace(live(), source="vllm bench serve")
    errors = by_key(errors_of([other], predicted()))
    assert "running:over_time" not in errors
    assert errors["running:mean"].error is not None
    assert not [overlay for overlay in overlays_of([other], predicted()) if not overlay.is_distribution]


def test_aggregates_alone_are_compared_without_intervals() -> None:
    aggregates = ObservedRun(
        source="vllm bench serve",
        name="aggregates",
        requests=with_requests(live(), np.zeros(0, np.int64)).requests,
        stated={"mean_ttft_ms": 100.0, "median_ttft_ms": 90.0, "completed": 80, "output_throughput": 500.0},
    )
    errors = by_key(errors_of([aggregates], predicted()))
    assert errors["ttft:mean"].live == 100
    assert errors["ttft:p50"].live == 90
    assert errors["ttft:mean"].interval is None
    assert "e2el:mean" not in errors


def test_a_part_of_a_run_has_its_requests_and_their_tokens() -> None:
    run = live()
    rows = np.array([5, 2, 7])
    part = with_requests(run, rows)
    assert part.requests.ttft_ns.tolist() == run.requests.ttft_ns[rows].tolist()
    for place, row in enumerate(rows.tolist()):
        assert part.requests.chunk_times_of(place).tolist() == run.requests.chunk_times_of(row).tolist()


# --- attribution


def shares(attribution: Attribution, key: str) -> dict[str, float]:
    headline = next(each for each in attribution.headlines if each.key == key)
    return {effect.ingredient: attribution.explained(effect, headline) or 0.0 for effect in attribution.effects}


def all_ingredients(planned: Setup, run: ObservedRun, served: Setup) -> list[Ingredient]:
    own = (lengths_of(planned.workload, run), arrivals_of(planned.workload, run))
    return [*(each for each in own if each), *engine_of(planned.system.config, served.system.config)]


def test_a_smaller_pool_is_named_with_both_sizes() -> None:
    planned, served = setup(), setup(config=replace(CONFIG, num_gpu_blocks=61))
    run = as_live(served.observed())
    attributed = attribute(planned, all_ingredients(planned, run, served), [run])
    assert shares(attributed.attribution, "mean_e2el_ms") == {"KV pool": pytest.approx(1.0)}
    (cause,) = causes_of(attributed, run, planned.observed())
    assert "the live server had 960 KV tokens (61 blocks of 16), the plan said 4,800" in cause.lower().replace(
        "kv", "KV"
    )
    assert "100 % of the errors in" in cause


def test_fewer_seats_are_named_with_both_numbers() -> None:
    planned, served = setup(), setup(config=replace(CONFIG, max_num_seqs=4))
    run = as_live(served.observed())
    attributed = attribute(planned, all_ingredients(planned, run, served), [run])
    assert shares(attributed.attribution, "mean_ttft_ms") == {"engine settings": pytest.approx(1.0)}
    assert "max_num_seqs 4 (planned: 16)" in causes_of(attributed, run, planned.observed())[0]


def test_late_arrivals_are_named_with_their_delay() -> None:
    planned = setup()
    delay_ns = np.where(np.arange(80) % 10 == 0, 0, 300_000_000)
    order = np.argsort(planned.workload.arrival_ns + delay_ns, kind="stable")
    load = planned.workload
    served = setup(
        replace(
            load,
            arrival_ns=(load.arrival_ns + delay_ns)[order],
            num_prompt_tokens=load.num_prompt_tokens[order],
            num_output_tokens=load.num_output_tokens[order],
            max_tokens=load.max_tokens[order],
        )
    )
    run = as_live(with_requests(served.observed(), np.argsort(order)))
    attributed = attribute(planned, all_ingredients(planned, run, served), [run])
    assert shares(attributed.attribution, "makespan_s") == {"arrivals": pytest.approx(1.0)}
    assert "sent 270 ms after they were due on average, at most 300 ms" in causes_of(attributed, run, run)[0]


def test_a_capped_client_is_named_with_its_cap() -> None:
    planned = setup(requests(gap_s=0.01))
    run = as_live(setup(replace(planned.workload, max_concurrency=5)).observed())
    attributed = attribute(planned, all_ingredients(planned, run, planned), [replace(run, max_concurrency=None)])
    assert shares(attributed.attribution, "mean_ttft_ms")["arrivals"] == pytest.approx(1.0, abs=0.02)
    assert "the client was capped, never more than 5 in flight" in causes_of(attributed, run, planned.observed())[0]


def test_shorter_answers_are_named_with_both_means() -> None:
    planned = setup()
    short = replace(planned.workload, num_output_tokens=np.maximum(planned.workload.num_output_tokens // 2, 1))
    run = as_live(setup(short).observed())
    attributed = attribute(planned, all_ingredients(planned, run, planned), [run])
    assert shares(attributed.attribution, "mean_e2el_ms")["lengths"] == pytest.approx(1.0)
    cause = causes_of(attributed, run, run)[0]
    assert f"{short.num_output_tokens.mean():.2f} tokens on average" in cause


def test_slower_steps_are_named_from_a_recording(tmp_path: Path) -> None:
    planned, served = setup(), setup(cost=AdjustedCost(COST, factor=1.2))
    run = as_live(served.observed())
    recording = write_recording(tmp_path / "steps.jsonl", served)
    attributed = attribute(planned, recording_of(planned, recording), [run], infers_step_times=False)
    assert shares(attributed.attribution, "mean_tpot_ms")["step times"] == pytest.approx(1.0, abs=0.05)
    assert "(1.2 times as long" in causes_of(attributed, run, planned.observed())[0]


def test_slower_steps_are_inferred_without_a_recording() -> None:
    planned = setup()
    run = as_live(setup(cost=AdjustedCost(COST, factor=1.2)).observed())
    attributed = attribute(planned, [], [run])
    (effect,) = attributed.attribution.effects
    assert effect.is_inferred
    assert "1.2 times as long" in effect.swap
    assert shares(attributed.attribution, "mean_e2el_ms")["step times (inferred)"] == pytest.approx(1.0, abs=0.01)


def test_longer_answers_than_were_asked_for_are_a_cause() -> None:
    planned = setup()
    more = planned.workload.num_output_tokens + 7
    run = as_live(setup(replace(planned.workload, num_output_tokens=more, max_tokens=more)).observed())
    attributed = attribute(planned, all_ingredients(planned, run, planned), [run])
    assert shares(attributed.attribution, "mean_e2el_ms")["lengths"] == pytest.approx(1.0)
    assert f"Answers had {more.mean():.2f} tokens on average" in causes_of(attributed, run, run)[0]


def test_an_inferred_cause_that_explains_most_goes_first() -> None:
    planned = setup()
    config = replace(CONFIG, max_num_seqs=15)
    run = as_live(setup(config=config, cost=AdjustedCost(COST, factor=1.5)).observed())
    causes = causes_of(attribute(planned, engine_of(CONFIG, config), [run]), run, planned.observed())
    assert causes[0].startswith("Steps that take 1.5")


def test_slow_steps_are_not_taken_for_a_slow_way() -> None:
    planned = setup()
    run = as_live(setup(cost=AdjustedCost(COST, factor=1.5)).observed())
    causes = causes_of(attribute(planned, [], [run]), run, planned.observed())
    assert not any("First tokens" in cause for cause in causes)


def test_a_way_beside_slow_steps_is_its_own_part_only() -> None:
    planned = setup()
    run = as_live(setup(cost=AdjustedCost(COST, factor=1.5)).observed(), extra_ns=40_000_000)
    causes = causes_of(attribute(planned, [], [run]), run, planned.observed())
    (way,) = [cause for cause in causes if "First tokens" in cause]
    found = re.match(r"First tokens came ([0-9.]+) ms later in the median request than simulated with everything", way)
    assert found is not None
    assert float(found[1]) == pytest.approx(40, rel=0.06)
    assert "HTTP" in way


def test_first_tokens_that_are_late_by_very_different_times_are_named_too() -> None:
    run = live()
    extra_ns = np.where(np.arange(80) % 2 == 0, 10_000_000, 200_000_000)
    late = replace(run, requests=replace(run.requests, ttft_ns=run.requests.ttft_ns + extra_ns))
    told = causes_of(attribute(setup(), [], [late], infers_step_times=False), late, predicted())
    (way,) = [cause for cause in told if "First tokens" in cause]
    assert "not by about the same in all" in way


def test_rows_that_arrivals_reorder_are_compared_with_themselves() -> None:
    """Every second request is held back by longer than the gap to its neighbour."""
    planned = setup()
    arrival_ns = planned.workload.arrival_ns + np.where(np.arange(80) % 2 == 0, 120_000_000, 0)
    order = np.argsort(arrival_ns, kind="stable")
    load = planned.workload
    columns = {name: getattr(load, name)[order] for name in ("num_prompt_tokens", "num_output_tokens", "max_tokens")}
    served = setup(replace(load, arrival_ns=arrival_ns[order], **columns))
    run = as_live(with_requests(served.observed(), np.argsort(order)))
    as_measured = attribute(planned, all_ingredients(planned, run, planned), [run]).as_measured
    assert as_measured.requests.ttft_ns.tolist() == run.requests.ttft_ns.tolist()


def test_steps_that_take_as_long_as_priced_are_no_cause(tmp_path: Path) -> None:
    planned = setup()
    run = as_live(setup(config=replace(CONFIG, num_gpu_blocks=61)).observed())
    recording = write_recording(tmp_path / "steps.jsonl", planned)
    attributed = attribute(planned, recording_of(planned, recording), [run], infers_step_times=False)
    assert [effect.swap for effect in attributed.attribution.effects] == [""]
    assert not any("step" in cause for cause in causes_of(attributed, run, planned.observed()))


def test_two_large_opposite_effects_are_told_as_such() -> None:
    headline = Headline("mean_ttft_ms", "mean TTFT", "ms", 100.0, 98.0, 100.0)
    pool = Effect("KV pool", "the pool was larger", {"mean_ttft_ms": -50.0}, {"mean_ttft_ms": -50.0})
    steps = Effect("step times", "steps were slower", {"mean_ttft_ms": 52.0}, {"mean_ttft_ms": 52.0})
    causes = causes_of(Attributed(Attribution((headline,), (pool, steps)), predicted()), live(), predicted())
    assert causes == [
        "The error in mean TTFT is the small rest of two large opposite effects: KV pool (-50.0 points) and step times "
        "(+52.0 points)."
    ]


def test_two_causes_share_the_error_whatever_their_order() -> None:
    planned = setup()
    config = replace(CONFIG, num_gpu_blocks=81, max_num_seqs=12)
    run = as_live(setup(config=config).observed())
    ingredients = engine_of(CONFIG, config)
    one = attribute(planned, ingredients, [run]).attribution
    other = attribute(planned, ingredients[::-1], [run]).attribution
    assert shares(one, "mean_ttft_ms") == pytest.approx(shares(other, "mean_ttft_ms"))
    assert all(each.measured == pytest.approx(each.live) for each in one.headlines)


def test_an_exact_prediction_has_nothing_to_explain() -> None:
    attributed = attribute(setup(), [], [live()])
    assert attributed.attribution.effects == ()
    assert not any(each.is_wrong for each in attributed.attribution.headlines)
    assert causes_of(attributed, live(), predicted()) == []


def test_a_way_that_delays_every_first_token_alike_is_told_apart_from_queueing() -> None:
    run = live(extra_ns=12_000_000)
    told = causes_of(attribute(setup(), [], [run]), run, predicted())
    assert any("First tokens came 12 ms later in the median request than simulated" in cause for cause in told)


def test_first_tokens_that_wait_in_a_queue_are_not_put_down_to_the_way() -> None:
    small = replace(CONFIG, num_gpu_blocks=61)
    run = as_live(setup(requests(gap_s=0.001), config=small).observed())
    planned = setup(requests(gap_s=0.001))
    told = causes_of(attribute(planned, engine_of(CONFIG, small), [run]), run, planned.observed())
    assert len(told) == 1
    assert "KV tokens" in told[0]


def test_a_warm_prefix_cache_is_told_with_both_shares() -> None:
    run = live()
    warm = replace(run, counts=replace(run.counts, prefix_query_tokens=1000, prefix_hit_tokens=920))
    told = causes_of(attribute(setup(), [], [warm]), warm, predicted())
    assert any("92 % of the prompt tokens were found in the live prefix cache, 0 % in the simulated" in x for x in told)


def test_the_attribution_is_the_same_each_time() -> None:
    config = replace(CONFIG, num_gpu_blocks=61)
    run = as_live(setup(config=config).observed())
    each = [attribute(setup(), engine_of(CONFIG, config), [run]).attribution.to_dict() for _ in range(2)]
    assert each[0] == each[1]


def test_requests_that_failed_are_counted_and_not_compared() -> None:
    run = live()
    ending = run.requests.ending.copy()
    ending[:3] = Ending.BROKEN
    broken = replace(run, requests=replace(run.requests, ending=ending))
    errors = by_key(errors_of([broken], predicted()))
    assert errors["ttft:mean"].interval is not None
    agreement = Agreement(tuple(errors.values()), (), 1, 80, 3)
    assert agreement.passed is None
