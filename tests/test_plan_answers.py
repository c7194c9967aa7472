"""``windtunnel plan``: no answer that merely looks like one (refused requests, full fleets, short runs, growth)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_builders import scenario, small_plan

import windtunnel as wt
from windtunnel.planning import Plan
from windtunnel.planning.analysis import _grown
from windtunnel.planning.answer import MIN_BEYOND, level_settings, requests_to_tell
from windtunnel.planning.candidates import Feasible, Space, candidates
from windtunnel.planning.jobs import MAX_RHO
from windtunnel.planning.load import demand_of, parse_growth, refused_share
from windtunnel.planning.offers import Offer, read_offers
from windtunnel.planning.plan import make_question
from windtunnel.planning.question import MOST_STEADY, cut_short, is_steady, scaled_workload, workload_of
from windtunnel.planning.search import Tried
from windtunnel.reports.plan_words import growth_rate, headline, tone
from windtunnel.scenarios.load import load_scenario
from windtunnel.sim.metrics.slo import Slo

ONE_CARD: dict[str, Any] = {"gpus": {"l40s": 0.9}, "tensor_parallel_sizes": (1,), "replications": 1}
SPREAD = {"dist": "lognormal", "mean": 100, "sigma": 0.6}


def on_one_line(plan: Plan) -> str:
    return " ".join(plan.text().split())


# --- requests that are refused


def some_too_long(max_model_len: int, **more: Any) -> dict[str, Any]:
    return scenario(engine={"max_model_len": max_model_len}, workload={"input": SPREAD, "num_requests": 400}, **more)


def share_of(table: dict[str, Any], max_model_len: int) -> float:
    return refused_share(workload_of(make_question(load_scenario(table), 1.0, 1, 100)), max_model_len)


def test_more_refused_requests_than_the_objectives_leave_room_for_hold_nothing_and_cost_no_simulation() -> None:
    table = some_too_long(120)
    assert share_of(table, 120) > 0.05
    found = small_plan(table, **ONE_CARD)
    assert found.verdict == "nothing_holds"
    assert found.told["search"]["num_simulations"] == 0
    assert [each["kind"] for each in found.told["dropped"]] == ["too_long"]
    said = on_one_line(found)
    assert "% of the requests need a longer context than max_model_len 120 of" in said
    assert "raise max_model_len, choose another model, or leave those rows out" in said
    assert "No deployment keeps the objectives: too many requests are refused." in said


@pytest.fixture(scope="module")
def few_refused() -> Plan:
    return small_plan(some_too_long(300), **ONE_CARD)


def test_fewer_refused_requests_stand_in_the_headline(few_refused: Plan) -> None:
    best = few_refused.recommended
    assert best is not None
    assert 0 < best["refused_share"] == share_of(some_too_long(300), 300) < 0.05
    assert "% of the requests are refused" in headline(few_refused.told)
    assert "of the requests refused)" in on_one_line(few_refused)
    assert tone(few_refused.told) == "note"
    assert any("are refused, however many replicas" in text for text in few_refused.told["warnings"])


def test_the_bill_is_over_the_tokens_that_are_served(few_refused: Plan) -> None:
    best = few_refused.recommended
    assert best is not None
    drawn = workload_of(make_question(load_scenario(some_too_long(300)), 1.0, 1, 100))
    served = drawn.num_prompt_tokens < 300
    outputs = np.minimum(drawn.num_output_tokens, 300 - drawn.num_prompt_tokens)[served]
    tokens = int(drawn.num_prompt_tokens[served].sum() + outputs.sum())
    an_hour = 3600 * demand_of(drawn).mean_rate * tokens / len(drawn)
    assert best["bill"]["per_million_tokens"] == pytest.approx(1e6 * best["bill"]["per_hour"] / an_hour)


def two_models(path: Path, every: int) -> dict[str, Any]:
    """Chats, every so manieth of 5,000 tokens: more than one of the two models takes."""
    rows = [f"{k / 20},{5000 if k % every == 0 else 100},20" for k in range(300)]
    path.write_text("\n".join(["arrival_s,num_prompt_tokens,num_output_tokens", *rows]), "utf-8")
    table = scenario()
    return {**table, "workload": {"trace": str(path)}, "engine": {}, "deployment": {}}


MODELS = ("tinyllama-1.1b", "llama-3.2-1b")


def test_each_model_has_its_own_longest_request(tmp_path: Path) -> None:
    found = small_plan(two_models(tmp_path / "t.csv", 50), models=MODELS, **ONE_CARD)
    lengths = {row["model"]: row["max_model_len"] for row in found.told["candidates"]}
    assert lengths == {"tinyllama-1.1b": 2048, "llama-3.2-1b": 8192}


def test_a_model_that_is_too_short_is_left_out_and_the_other_serves_all(tmp_path: Path) -> None:
    found = small_plan(two_models(tmp_path / "t.csv", 10), models=MODELS, **ONE_CARD)
    best = found.recommended
    assert best is not None
    assert (best["model"], best["refused_share"]) == ("llama-3.2-1b", 0.0)
    assert "--max-model-len 8192" in found.told["serve_command"]
    assert found.scenario is not None
    assert found.scenario["engine"]["max_model_len"] == 8192
    (dropped,) = found.told["dropped"]
    assert dropped["model"] == "tinyllama-1.1b"
    assert "10 % of the requests need a longer context than max_model_len 2,048" in dropped["reason"]


def test_what_the_scenario_says_wins_where_the_model_can(tmp_path: Path) -> None:
    table = {**two_models(tmp_path / "t.csv", 50), "engine": {"max_model_len": 6000}}
    found = small_plan(table, models=MODELS, **ONE_CARD)
    lengths = {row["model"]: row["max_model_len"] for row in found.told["candidates"]}
    assert lengths == {"tinyllama-1.1b": 2048, "llama-3.2-1b": 6000}
    assert any("is 2,048, the most it can, not 6,000" in note for note in found.told["notes"])


# --- fleets that cannot keep up

OBJECTIVES = (("ttft:p95<150ms", "tpot:p95<25ms"), ("ttft:p95<150ms", "tpot:p95<40ms"), ("ttft:p95<300s",))
"""Each as strict as the next, or stricter."""
RATES = (100, 400, 1600)


@pytest.fixture(scope="module")
def by_load() -> dict[tuple[int, tuple[str, ...]], dict[str, Any]]:
    """Short workloads, whose objectives hold well beyond what a fleet can do for long."""
    found: dict[tuple[int, tuple[str, ...]], dict[str, Any]] = {}
    for rate in RATES:
        for objectives in OBJECTIVES:
            table = scenario(workload={"request_rate": rate, "num_requests": 400}, slo={"objectives": list(objectives)})
            best = small_plan(table, **ONE_CARD).recommended
            assert best is not None
            found[rate, objectives] = best
    return found


def test_no_recommended_fleet_is_nearer_to_full_than_what_can_be_told(by_load: Any) -> None:
    assert all(best["rho"] <= MAX_RHO for best in by_load.values())
    assert all(best["rho"] * best["headroom"]["mean"] <= MAX_RHO * 1.001 for best in by_load.values())


def test_the_fullest_of_them_keeps_up_for_as_long_as_one_likes(by_load: Any) -> None:
    best = max(by_load.values(), key=lambda each: each["rho"])
    assert best["rho"] > 0.9
    rate = next(rate for rate, _ in by_load if any(by_load[rate, each] is best for each in OBJECTIVES))
    table = scenario(workload={"request_rate": rate, "num_requests": 8000}, slo={"objectives": list(OBJECTIVES[-1])})
    run = wt.simulate(table, **best["overrides"])
    assert run.summary["stability"] == "stable"


def test_more_load_never_takes_fewer_replicas(by_load: Any) -> None:
    for objectives in OBJECTIVES:
        sizes = [by_load[rate, objectives]["num_replicas"] for rate in RATES]
        assert sizes == sorted(sizes)
        assert sizes[-1] > sizes[0]


def test_looser_objectives_never_take_more_replicas(by_load: Any) -> None:
    for rate in RATES:
        sizes = [by_load[rate, objectives]["num_replicas"] for objectives in OBJECTIVES]
        assert sizes == sorted(sizes, reverse=True)


@pytest.fixture(scope="module")
def lenient() -> Plan:
    """Three replicas where two and a half keep up; a run of a second and a half misses nothing with fewer."""
    table = scenario(workload={"request_rate": 400, "num_requests": 600}, slo={"objectives": ["ttft:p95<300s"]})
    return small_plan(table, growth="5%/month", months=6, **ONE_CARD)


def test_what_is_left_after_a_failure_has_to_keep_up_too(lenient: Plan) -> None:
    best = lenient.recommended
    assert best is not None
    left = best["num_replicas"] - 1
    assert best["one_down"]["rho"] > MAX_RHO
    assert (best["one_down"]["num_held"], best["one_down"]["overloaded"]) == (0, True)
    assert (best["crash"]["holds"], best["crash"]["overloaded"]) == (False, True)
    said = on_one_line(lenient)
    assert f"If one replica fails, {left} replicas cannot keep up (rho" in said
    assert "misses ttft" not in said
    assert "miss ttft" not in said
    assert tone(lenient.told) == "note"


def test_the_number_that_other_draws_may_ask_for_keeps_up(lenient: Plan) -> None:
    best = lenient.recommended
    assert best is not None
    assert best["size_within_noise"]["low"] * MAX_RHO >= best["rho"] * best["num_replicas"] * 0.999
    assert "before it cannot keep up" in on_one_line(lenient)


def test_an_answer_with_a_spare_that_bears_a_failure_may_be_good() -> None:
    table = scenario(workload={"request_rate": 100, "num_requests": 3000})
    found = small_plan(table, spare_replicas=1, **{**ONE_CARD, "replications": 2})
    assert found.recommended is not None
    told = {**found.told, "warnings": []}
    assert tone(told) == "good"
    for change in (
        {"one_down": None},
        {"refused_share": 0.01},
        {"crash": {**found.recommended["crash"], "holds": False}},
    ):
        assert tone({**told, "recommended": {**found.recommended, **change}}) == "note"


# --- runs that are too short


def test_a_synthetic_workload_at_a_higher_rate_lasts_as_long() -> None:
    made = scaled_workload({"num_requests": 200, "request_rate": 10.0, "input": 1, "output": 1}, 4)
    assert (made["num_requests"], made["request_rate"]) == (800, 40.0)
    assert scaled_workload({"input": 1, "output": 1, "request_rate": 1.0}, 3)["num_requests"] == 3000
    assert scaled_workload({"request_rate": 1.0, "sessions": {"num_sessions": 7}}, 2) == {
        "request_rate": 2.0,
        "sessions": {"num_sessions": 14},
    }
    own = {"request_rate": 3.0, "num_requests": 30}
    assert scaled_workload({"tenants": {"a": own, "b": 0.5}, "num_requests": 5}, 2)["tenants"] == {
        "a": {"request_rate": 6.0, "num_requests": 60},
        "b": 0.5,
    }
    assert scaled_workload({"trace": "t.csv"}, 2) == {"trace": "t.csv", "rate_scale": 2.0}


def test_a_load_that_is_less_keeps_its_requests() -> None:
    assert scaled_workload({"num_requests": 200, "request_rate": 10.0}, 0.5) == {
        "num_requests": 200,
        "request_rate": 5.0,
    }


def test_lengthening_ends_somewhere_and_that_is_said() -> None:
    workload = {"num_requests": 5000, "request_rate": 10.0}
    assert scaled_workload(workload, 40)["num_requests"] == MOST_STEADY
    assert f"{MOST_STEADY:,} of them are simulated, 15 % of its duration" in cut_short(workload, 40)
    assert cut_short(workload, 2) == ""
    uneven = {"num_requests": 5000, "arrival": {"process": "ramp", "start_rate": 1, "end_rate": 9}}
    assert "be it the peak" in cut_short(uneven, 40)


@pytest.mark.parametrize(
    ("workload", "steady"),
    [
        ({"request_rate": 1.0}, True),
        ({"arrival": {"process": "gamma", "rate": 2}}, True),
        ({"arrival": {"process": "on_off", "rate": 2}}, False),
        ({"tenants": {"a": {"request_rate": 1.0}}}, False),
        ({"tenants": {"a": 0.5, "b": {"share": 0.5}}}, True),
        ({"trace": "t.csv"}, False),
    ],
)
def test_a_rate_that_changes_is_no_steady_load(workload: dict[str, Any], steady: bool) -> None:
    assert is_steady(workload) is steady


def test_the_ramp_of_a_steady_load_is_left_out_and_that_of_another_is_not() -> None:
    steady = small_plan(scenario(workload={"num_requests": 600}), **ONE_CARD).recommended
    arrival = {"process": "ramp", "start_rate": 50, "end_rate": 70}
    table = scenario()
    uneven = small_plan(
        {**table, "workload": {"num_requests": 600, "input": 100, "output": 20, "arrival": arrival}}, **ONE_CARD
    ).recommended
    assert steady is not None
    assert uneven is not None
    assert 300 < steady["fleet"]["num_counted"] < 430
    assert uneven["fleet"]["num_counted"] == 600


def test_a_trace_that_is_not_many_times_as_long_as_a_request_is_too_short(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{k / 100},100,150" for k in range(600)]
    path.write_text("\n".join(["arrival_s,num_prompt_tokens,num_output_tokens", *rows]), "utf-8")
    found = small_plan({**scenario(), "workload": {"trace": str(path)}}, **ONE_CARD)
    best = found.recommended
    assert best is not None
    assert 1.5 < best["fleet"]["latency_ms"]["e2el"]["p99"] / 1000 < 6
    assert best["doubts"] == ["the workload is too short"]
    assert "in doubt: the workload is too short" in headline(found.told)
    assert any("too short for a steady state" in text for text in found.told["warnings"])


def test_a_percentile_asks_for_requests_beyond_it() -> None:
    assert requests_to_tell(Slo.parse("ttft:p99<1s")) == 100 * MIN_BEYOND
    assert requests_to_tell(Slo.parse("e2el:p99.9<1s")) == 1000 * MIN_BEYOND
    assert requests_to_tell(Slo.parse("goodput>=95%")) == 20 * MIN_BEYOND
    assert requests_to_tell(Slo.parse("ttft:mean<1s")) == requests_to_tell(Slo.parse("itl:p99<1s")) == 0


def test_too_few_requests_for_an_objective_are_told_with_how_many_it_takes() -> None:
    found = small_plan(scenario(slo={"objectives": ["ttft:p99<150ms"]}), **ONE_CARD)
    assert found.recommended is not None
    assert "it has too few requests" in found.recommended["doubts"]
    assert "it takes 1,000 or more" in on_one_line(found)
    assert "in doubt: it has too few requests" in on_one_line(found)


# --- growth


def test_a_load_that_grows_never_takes_fewer_than_today(lenient: Plan) -> None:
    sizes = [row["num_replicas"] for row in lenient.told["growth"]["rows"]]
    assert sizes == sorted(sizes)
    assert lenient.recommended is not None
    assert sizes[0] == lenient.recommended["num_replicas"]


@given(today=st.integers(1, 50), share=st.floats(0.1, 60), loads=st.lists(st.floats(1, 100), min_size=2, max_size=5))
def test_replicas_follow_the_load_in_one_direction(today: int, share: float, loads: list[float]) -> None:
    sizes = [_grown(today, share * load, load) for load in sorted(loads)]
    assert sizes == sorted(sizes)
    assert sizes[0] >= today


def test_a_load_that_shrinks_never_takes_more_than_today() -> None:
    assert _grown(9, 9.5, 0.95) == 9


def test_what_no_fleet_can_carry_is_named_and_not_printed() -> None:
    table = scenario(workload={"request_rate": 200, "num_requests": 400})
    found = small_plan(table, growth="300%/month", months=9, **ONE_CARD)
    rows = found.told["growth"]["rows"]
    assert rows[-1]["num_replicas"] is rows[-1]["cost"] is None
    assert max(row["num_replicas"] or 0 for row in rows) <= found.told["growth"]["most_replicas"] == 4096
    said = on_one_line(found)
    assert "over 4,096" in said
    assert "it takes more than 4,096 replicas" in said
    assert "At +300 % a month" in said
    assert "e+0" not in said


@pytest.mark.parametrize("growth", ["5", "1.5/year", 5.0])
def test_growth_without_a_percent_sign_is_a_share(growth: str | float) -> None:
    with pytest.raises(ValueError, match=r"5%/month or 0\.05"):
        small_plan(growth=growth, **ONE_CARD)


def test_growth_may_still_be_large_if_it_says_so() -> None:
    assert parse_growth("500%/month").per_month == 5
    assert parse_growth("0.05").per_month == 0.05
    assert growth_rate({"growth": {"per_month": 5.0}}) == "+500 %"
    assert growth_rate({"growth": {"per_month": -0.031}}) == "-3.1 %"


def test_months_without_growth_are_refused_or_said_to_be_left_aside() -> None:
    with pytest.raises(ValueError, match="without growth say nothing"):
        small_plan(months=3, **ONE_CARD)
    found = small_plan(scenario(plan={"months": 3}), **ONE_CARD)
    assert any("months of [plan] are left aside" in note for note in found.told["notes"])


# --- numbers out of range


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tensor_parallel_sizes": (0,)}, "tensor_parallel_size must be at least 1, got 0: 1 is"),
        ({"max_num_seqs": (-4,)}, "max_num_seqs must be at least 1, got -4: give"),
        ({"gpu_memory_utilizations": (95,)}, "at most 1, got 95: 0.9 is 90 %"),
        ({"gpus_per_host": 0}, "gpus_per_host must be at least 1, got 0: most"),
        ({"spare_replicas": -1}, "from 0 to 1,000, got -1: 1 is N"),
        ({"growth": "5%", "months": 0}, "from 1 to 120, got 0: 12 is"),
    ],
)
def test_a_number_out_of_range_is_told_with_its_value_and_a_remedy(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        small_plan(**{**ONE_CARD, **options})


# --- settings that another seed may recommend


def took(feasible: Feasible, offer: Offer, *num_replicas: float) -> Tried:
    each = Tried(feasible, offer, True, "measured")
    each.estimates = [{"num_replicas": number} for number in num_replicas]
    return each


def test_settings_that_the_replications_cannot_tell_apart_are_named() -> None:
    (offer,) = read_offers(["h100-sxm=2"])
    asked = Space(("llama-3.1-8b",), (offer,), tensor_parallel_sizes=(1,), kv_cache_dtypes=("auto",))
    one, two, three, four, five = candidates(asked)[0][:5]
    chosen = took(one, offer, 4.0, 5.0, 6.0)
    level, dearer = took(two, offer, 4.1, 4.8, 6.2), took(three, offer, 5.0, 6.1, 7.0)
    once, verified = took(four, offer, 4.0), took(five, offer, 4.0, 5.0, 6.0)
    verified.fleets[6, 0] = {"holds": True}
    (told,) = level_settings([chosen, level, dearer, once, verified], chosen)
    assert told["max_num_batched_tokens"] == two.candidate.knobs.max_num_batched_tokens
    assert told["replicas_needed"]["mean"] == pytest.approx(np.mean([4.1, 4.8, 6.2]))


def test_settings_as_good_as_the_recommended_ones_are_in_the_answer() -> None:
    table = scenario(workload={"request_rate": 300, "num_requests": 900})
    found = small_plan(table, gpus={"l40s": 0.9}, max_num_batched_tokens=(512, 1024, 2048, 4096, 8192))
    best = found.recommended
    assert best is not None
    assert best["max_num_batched_tokens"] == 512
    assert [each["max_num_batched_tokens"] for each in best["level_settings"]] == [4096, 8192]
    assert {each["replicas_needed"]["num"] for each in best["level_settings"]} == {2}
    said = on_one_line(found)
    assert "as far as 2 replications can tell: max_num_batched_tokens 4,096 (takes 2.02)" in said


# --- step times that nobody vouches for


@pytest.mark.parametrize("is_outside", [False, True])
def test_an_answer_whose_steps_are_mostly_extrapolated_is_in_doubt(is_outside: bool) -> None:
    """Two H100 hold 70B with 15,000 tokens of cache by default, where their profile ends; at 0.95 they hold more."""
    table = {
        "name": "small",
        "deployment": {"model": "llama-3.3-70b"},
        "workload": {"num_requests": 300, "request_rate": 1, "input": 4000 if is_outside else 200, "output": 300},
        "slo": {"objectives": ["ttft:p90<60s"]},
    }
    found = small_plan(
        table,
        gpus={"h100-sxm": 2.5},
        tensor_parallel_sizes=(2,),
        gpu_memory_utilizations=(0.95,),
        replications=1,
        num_requests=300,
    )
    best = found.recommended
    assert best is not None
    assert (best["fleet"]["outside_share"] > 0.5) == is_outside
    assert ("most step times are extrapolated" in best["doubts"]) == is_outside
    assert ("in doubt: " in headline(found.told) and "extrapolated" in headline(found.told)) == is_outside
