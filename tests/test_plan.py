"""``windtunnel plan``: the cheapest deployment that holds, and what is said of it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import chromium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_builders import STEPS, scenario, small_plan

import windtunnel as wt
from windtunnel.cli.main import main
from windtunnel.planning import Plan
from windtunnel.planning.candidates import Space, candidates
from windtunnel.planning.jobs import TOLERANCE, needed, needed_job
from windtunnel.planning.load import Growth, dealt, dealt_several, demand_of, parse_growth, shuffled
from windtunnel.planning.money import bill_of
from windtunnel.planning.offers import Offer, read_offers
from windtunnel.planning.outputs import toml_text
from windtunnel.planning.plan import make_question
from windtunnel.planning.search import Tried, next_size, search, smallest_that_holds
from windtunnel.scenarios.load import load_scenario
from windtunnel.sim.rng import stream
from windtunnel.sim.workload import Workload, workload
from windtunnel.workers import Workers

ONE_CARD: dict[str, Any] = {"gpus": {"l40s": 0.9}, "tensor_parallel_sizes": (1,), "replications": 1}

# --- what may be bought


def test_a_price_stands_behind_the_name_of_its_card() -> None:
    offers = read_offers(["h100-sxm=2.49", "l40s=0.86"], ["h100-sxm=120:700", "l40s=0.35kW"])
    assert [(each.gpu, each.price_per_hour, each.idle_watts, each.busy_watts) for each in offers] == [
        ("H100-SXM", 2.49, 120.0, 700.0),
        ("L40S", 0.86, None, 350.0),
    ]


@pytest.mark.parametrize(
    ("gpus", "powers", "told"),
    [
        ([], [], "no GPU to choose from"),
        (["h100-sxm=cheap"], [], "is no price"),
        (["h100-sxm=0"], [], "must be above 0"),
        (["h100-sxm=2", "h100=3"], [], "offered twice"),
        (["h100-sxm=2", "l40s"], [], "no price for L40S"),
        (["h100-sxm=2"], ["l40s=300"], "which is not offered"),
        (["h100-sxm=2"], ["h100-sxm=much"], "NAME=WATTS"),
        (["h100-sxm=2"], ["h100-sxm=100", "h100=200"], "given twice"),
        (["h100-sxm=2"], ["h100-sxm=700:120"], "must not exceed that when busy"),
    ],
)
def test_an_offer_that_means_nothing_is_refused(gpus: list[str], powers: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_offers(gpus, powers)


def test_a_card_draws_between_idle_and_busy() -> None:
    offer = Offer("L40S", 1.0, 300.0, 100.0)
    assert [offer.watts(share) for share in (0.0, 0.5, 1.0)] == [100.0, 200.0, 300.0]
    assert Offer("L40S", 1.0, 300.0).watts(0.1) == 300.0
    assert Offer("L40S", 1.0).watts(0.5) is None


@given(
    prefill_share=st.floats(0, 1),
    busy_share=st.floats(0, 1),
    num_gpus=st.integers(1, 64),
    price=st.floats(0.1, 100),
    load=st.floats(0.1, 10),
)
def test_input_and_output_together_pay_the_whole_bill(
    prefill_share: float, busy_share: float, num_gpus: int, price: float, load: float
) -> None:
    demand = demand_of(arrivals(10, gap_s=0.5))
    bill = bill_of(
        Offer("L40S", price), num_gpus, demand, prefill_share=prefill_share, busy_share=busy_share, load=load
    )
    assert bill.per_million_input_tokens is not None
    assert bill.per_million_output_tokens is not None
    assert bill.per_million_tokens is not None
    inputs, outputs = load * demand.input_tokens_per_hour / 1e6, load * demand.output_tokens_per_hour / 1e6
    paid = bill.per_million_input_tokens * inputs + bill.per_million_output_tokens * outputs
    assert paid == pytest.approx(num_gpus * price)
    assert bill.per_million_tokens * (inputs + outputs) == pytest.approx(num_gpus * price)


# --- the load


def arrivals(num: int, gap_s: float = 1.0, **columns: Any) -> Workload:
    return workload((np.arange(num) * gap_s * 1e9).astype(np.int64), np.arange(1, num + 1), np.full(num, 7), **columns)


@given(num=st.integers(1, 200), num_replicas=st.integers(1, 20))
def test_replicas_that_take_turns_share_all_requests(num: int, num_replicas: int) -> None:
    whole = arrivals(num)
    parts = [dealt(whole, num_replicas, k / num_replicas) for k in range(num_replicas)]
    assert sorted(np.concatenate([part.num_prompt_tokens for part in parts]).tolist()) == list(range(1, num + 1))


@given(num=st.integers(50, 300), num_replicas=st.floats(1, 20), phase=st.floats(0, 0.999))
def test_a_share_need_not_be_that_of_a_whole_number_of_replicas(num: int, num_replicas: float, phase: float) -> None:
    part = dealt(arrivals(num), num_replicas, phase)
    assert abs(len(part) - num / num_replicas) <= 1
    assert bool((np.diff(part.arrival_ns) > 0).all())


def test_a_conversation_goes_to_one_replica() -> None:
    whole = workload([0, -1, 10, -1, -1], [5, 6, 7, 8, 9], [1] * 5, previous=[-1, 0, -1, 2, 3])
    first, second = (dealt(whole, 2, phase) for phase in (0.0, 0.5))
    assert first.num_prompt_tokens.tolist() == [5, 6]
    assert second.num_prompt_tokens.tolist() == [7, 8, 9]
    assert second.previous.tolist() == [-1, 0, 1]


def test_shares_one_after_the_other_keep_the_rate_of_one() -> None:
    whole = arrivals(1000, gap_s=0.1)
    one, three = dealt(whole, 5, 0.0), dealt_several(whole, 5, (0.0, 0.4, 0.8))
    assert len(three) == 3 * len(one)
    assert demand_of(three).mean_rate == pytest.approx(demand_of(one).mean_rate, rel=0.01)
    assert sorted(three.arrival_ns.tolist()) == three.arrival_ns.tolist()


def test_another_day_has_the_same_arrivals_and_the_same_requests() -> None:
    whole = arrivals(500, gap_s=0.5)
    other = shuffled(whole, stream(1, "day"), window_s=60.0)
    assert other.arrival_ns.tolist() == whole.arrival_ns.tolist()
    assert sorted(other.num_prompt_tokens.tolist()) == whole.num_prompt_tokens.tolist()
    moved = np.abs(other.num_prompt_tokens - whole.num_prompt_tokens)
    assert 0 < moved.max() <= 120


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: arrivals(10, max_concurrency=4), "closed loop"),
        (lambda: workload([0, 0, 0], [1, 1, 1], [1, 1, 1]), "due at once"),
    ],
)
def test_a_load_without_a_rate_is_refused(made: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        demand_of(made())


def test_the_peak_is_that_of_the_busiest_minute() -> None:
    times = np.sort(np.concatenate([np.arange(0, 600), 300 + np.arange(120) / 4]))
    demand = demand_of(workload((times * 1e9).astype(np.int64), np.ones(720), np.ones(720)))
    assert demand.peak_window_s == 60.0
    assert demand.peak_rate == pytest.approx((60 + 120) / 60, rel=0.02)


def test_growth_is_by_month_or_by_year() -> None:
    assert parse_growth("5%/month").factor(2) == pytest.approx(1.1025)
    assert parse_growth("60%/year").factor(12) == pytest.approx(1.6)
    assert parse_growth("-10%", 3) == Growth(-0.1, 3)


@pytest.mark.parametrize("text", ["fast", "5%/week", "-100%/month", "-200%/year"])
def test_growth_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="growth"):
        parse_growth(text)


# --- candidates


def space(model: str, *gpus: str, **more: Any) -> Space:
    return Space((model,), read_offers(list(gpus)), fixed={"max_model_len": 8192}, **more)


def test_what_does_not_fit_is_refused_in_the_words_of_vllm() -> None:
    feasible, refused = candidates(
        space("llama-3.3-70b", "h100-sxm=2", tensor_parallel_sizes=(1, 4), kv_cache_dtypes=("auto",))
    )
    assert {each.candidate.shape.tensor_parallel_size for each in feasible} == {4}
    (one,) = refused
    assert (one.shape.tensor_parallel_size, one.kind, one.is_whole) == (1, "does_not_fit", True)
    assert "CUDA out of memory" in one.reason


def test_the_first_candidate_of_a_shape_has_the_defaults_of_vllm() -> None:
    feasible, _ = candidates(space("llama-3.1-8b", "h100-sxm=2", tensor_parallel_sizes=(1,), kv_cache_dtypes=("auto",)))
    assert feasible[0].is_default
    assert sum(each.is_default for each in feasible) == 1
    assert {each.candidate.knobs.max_num_batched_tokens for each in feasible} >= {2048, 8192, 16384}


def test_sizes_are_the_powers_of_two_that_a_host_holds() -> None:
    feasible, _ = candidates(space("llama-3.1-8b", "h100-sxm=2", kv_cache_dtypes=("auto",), gpus_per_host=4))
    assert sorted({each.candidate.shape.tensor_parallel_size for each in feasible}) == [1, 2, 4]


def test_a_split_that_the_model_does_not_allow_is_refused() -> None:
    _, refused = candidates(space("llama-3.1-8b", "h100-sxm=2", tensor_parallel_sizes=(3,), kv_cache_dtypes=("auto",)))
    assert [each.kind for each in refused] == ["refused"]


# --- the answer


@pytest.fixture(scope="module")
def planned() -> Plan:
    return small_plan(scenario(workload={"request_rate": 300, "num_requests": 900}), growth="10%/month", months=6)


def test_the_cheapest_card_that_holds_is_recommended(planned: Plan) -> None:
    best = planned.recommended
    assert best is not None
    assert (best["gpu"], best["tensor_parallel_size"]) == ("L40S", 1)
    assert best["cost_per_hour"] == pytest.approx(0.9 * best["num_replicas"])
    assert best["num_replicas"] > 1


def test_the_recommended_fleet_keeps_the_objectives_when_it_is_simulated(planned: Plan, tmp_path: Path) -> None:
    planned.save_scenario(tmp_path / "fleet.toml")
    run = wt.simulate(tmp_path / "fleet.toml")
    assert run.slo_passed
    best = planned.recommended
    assert best is not None
    assert run.summary["num_replicas"] == best["num_replicas"]
    assert run.summary["p99_ttft_ms"] == pytest.approx(best["fleet"]["latency_ms"]["ttft"]["p99"])


def test_one_replica_less_does_not_hold(planned: Plan) -> None:
    best = planned.recommended
    assert best is not None
    fewer = [each for each in best["fewer"] if each["num_replicas"] == best["num_replicas"] - 1]
    assert fewer
    assert not all(each["holds"] for each in fewer)
    assert best["one_down"]["num_replicas"] == best["num_replicas"] - 1
    assert best["one_down"]["missed"]


def test_the_estimate_lies_near_what_the_whole_fleet_takes(planned: Plan) -> None:
    best = planned.recommended
    assert best is not None
    assert best["replicas_needed"]["mean"] == pytest.approx(best["num_replicas"], rel=0.35)


def test_one_more_replica_is_what_redundancy_costs(planned: Plan) -> None:
    best = planned.recommended
    assert best is not None
    assert best["redundant"]["num_replicas"] == best["num_replicas"] + 1
    assert best["redundant"]["cost_per_hour"] == pytest.approx(0.9 * (best["num_replicas"] + 1))


def test_the_load_that_grows_takes_more_replicas(planned: Plan) -> None:
    rows = planned.told["growth"]["rows"]
    assert [row["month"] for row in rows] == list(range(7))
    sizes = [row["num_replicas"] for row in rows]
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]


def test_candidates_are_ranked_by_cost(planned: Plan) -> None:
    costs = planned.candidates.replicas_needed_mean * planned.candidates.cost_per_hour / planned.candidates.num_replicas
    assert costs.tolist() == sorted(costs.tolist())


def test_the_same_question_gives_the_same_bytes_whoever_works_on_it(planned: Plan) -> None:
    again = small_plan(
        scenario(workload={"request_rate": 300, "num_requests": 900}), growth="10%/month", months=6, jobs=2
    )
    assert again.to_json() == planned.to_json()


def test_every_output_tells_the_answer(planned: Plan, tmp_path: Path) -> None:
    best = planned.recommended
    assert best is not None
    answer = f"{best['num_replicas']} replicas of 1 x L40S (TP 1)"
    planned.report(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text("utf-8")
    for text in (planned.text(), planned.markdown(), page):
        assert answer in text
        assert "vllm serve meta-llama/Llama-3.1-8B-Instruct" in text
    assert "Cost, latency and throughput" in page
    assert 'src="http' not in page


def test_the_candidates_are_written_as_csv_and_as_parquet(planned: Plan, tmp_path: Path) -> None:
    import pandas as pd

    planned.save_candidates(tmp_path / "c.csv")
    planned.save_candidates(tmp_path / "c.parquet")
    assert (
        len(pd.read_csv(tmp_path / "c.csv")) == len(pd.read_parquet(tmp_path / "c.parquet")) == len(planned.candidates)
    )


def test_spare_replicas_are_bought_beside_those_that_are_needed() -> None:
    found = small_plan(spare_replicas=2, **ONE_CARD)
    best = found.recommended
    assert best is not None
    assert best["num_gpus"] == best["num_replicas"] + 2
    assert found.scenario is not None
    assert found.scenario["deployment"]["data_parallel_size"] == best["num_replicas"] + 2


def test_without_prices_the_fewest_cards_win() -> None:
    found = small_plan(gpus=["l40s"])
    best = found.recommended
    assert best is not None
    assert best["num_gpus"] == 1
    assert best["bill"]["per_hour"] is None
    assert "1 GPU" in found.text()


def test_a_card_without_a_price_is_told_to_be_ranked_by_number(tmp_path: Path) -> None:
    """Also where a price of another card stands in the file."""
    table = scenario(price={"gpu_hour": {"l40s": 0.9}}, plan={"gpus": ["h100-sxm"]})
    found = small_plan(table, gpus=())
    told = "No price of H100-SXM was given ([price] has L40S only): the fewest GPUs win, and no cost is told."
    assert found.told["ranked_by"] == "num_gpus"
    assert found.told["warnings"][0].startswith(told)
    found.report(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text("utf-8")
    for text in (found.text(), found.markdown(), page):
        assert told in " ".join(text.split())


def test_kinds_without_prices_are_told_to_count_alike() -> None:
    found = small_plan(gpus=["l40s", "h100-sxm"])
    assert "as if an hour of L40S and one of H100-SXM cost the same" in found.told["warnings"][0]
    assert not any("No price" in text for text in small_plan(**ONE_CARD).told["warnings"])


def test_a_card_named_without_a_price_has_that_of_the_file() -> None:
    found = small_plan(scenario(price={"gpu_hour": {"l40s": 0.9}}), gpus=["l40s"])
    assert found.told["ranked_by"] == "cost_per_hour"
    assert found.recommended is not None
    assert found.recommended["bill"]["per_hour"] == pytest.approx(0.9)


def test_twice_the_load_takes_more() -> None:
    table = scenario(workload={"request_rate": 200, "num_requests": 600})
    one, two = (small_plan(table, scale=scale, **ONE_CARD) for scale in (1.0, 2.0))
    assert one.recommended is not None
    assert two.recommended is not None
    ratio = two.recommended["replicas_needed"]["mean"] / one.recommended["replicas_needed"]["mean"]
    assert ratio == pytest.approx(2, rel=0.2)


def test_a_setting_of_the_scenario_is_the_only_choice() -> None:
    found = small_plan(scenario(engine={"max_num_seqs": 32}), max_num_seqs=None, **ONE_CARD)
    assert {row["max_num_seqs"] for row in found.told["candidates"]} == {32}


@pytest.mark.skipif(chromium.EXECUTABLE is None, reason="needs chromium")
@pytest.mark.parametrize(("width", "is_phone"), [(1280, False), (390, True)])
def test_in_a_browser_every_figure_is_drawn_and_nothing_sticks_out(
    planned: Plan, width: int, is_phone: bool, tmp_path: Path
) -> None:
    planned.report(tmp_path / "plan.html")
    with chromium.page() as page:
        page.look(width, 900, is_phone=is_phone)
        page.open(f"file://{tmp_path / 'plan.html'}")
        page.wait("document.readyState == 'complete' && window.Plotly")
        page.run("dispatchEvent(new Event('beforeprint'))")
        page.wait("[...document.querySelectorAll('.plot')].every((each) => each.querySelector('.main-svg'))")
        out = page.run(
            "[...document.querySelectorAll('body *')].filter((each) => !each.closest('.skip, .plot') && "
            "each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.tagName + '.' + each.className)"
        )
        assert out == []
        assert page.problems == []


# --- where there is no answer


def test_nothing_fits_is_told_with_the_reason_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    table = scenario(deployment={"model": "llama-3.3-70b"})
    found = small_plan(table, gpus={"l40s": 1.0}, tensor_parallel_sizes=(1,))
    assert (found.verdict, found.fits, found.holds, found.scenario) == ("nothing_fits", False, False, None)
    assert "CUDA out of memory" in found.text()
    with pytest.raises(ValueError, match="no deployment is recommended"):
        found.save_scenario("fleet.toml")


def test_nothing_holds_names_the_nearest_and_what_it_misses() -> None:
    found = small_plan(scenario(slo={"objectives": ["ttft:p95<150ms", "tpot:p95<5ms"]}))
    assert (found.verdict, found.fits, found.holds) == ("nothing_holds", True, False)
    assert found.told["nearest"]["missed"][0]["text"] == "tpot:p95<5ms"
    assert {each["kind"] for each in found.told["dropped"]} == {"too_slow_alone"}
    assert "Nearest is" in found.text()
    assert "tpot:p95<5ms" in found.markdown()


@pytest.mark.parametrize(("objective", "code"), [("ttft:p95<150ms", 0), ("tpot:p95<5ms", 99)])
def test_the_exit_code_says_whether_anything_holds(
    objective: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.toml"
    path.write_text(toml_text(scenario()), "utf-8")
    words = ["plan", str(path), "--gpu", "l40s=0.9", "--tp", "1", "--kv-cache-dtype", "auto", "--max-num-seqs", "256"]
    words += ["--max-num-batched-tokens", "2k", "--gpu-memory-utilization", "0.9", "--reps", "2", "--requests", "200"]
    assert main([*words, "--slo", objective, "-j", "1", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["asked"]["objectives"] == [objective]
    assert told["reproduce"].startswith("windtunnel plan")


def test_a_model_that_fits_nothing_exits_with_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.toml"
    path.write_text(toml_text(scenario(deployment={"model": "llama-3.3-70b"})), "utf-8")
    assert main(["plan", str(path), "--gpu", "l40s=0.9", "--tp", "1", "-j", "1"]) == 4
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gpus": {"h100-sxm": -1}}, "must be above 0"),
        ({"tensor_parallel_sizes": (0,)}, "must be at least 1"),
        ({"spare_replicas": -1}, "spare_replicas"),
        ({"scale": 0.0}, "scale must be above 0"),
        ({"replications": 0}, "replications must be from 1"),
        ({"num_requests": 5}, "at least 100"),
        ({"growth": "soon"}, "growth"),
    ],
)
def test_a_question_that_means_nothing_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        small_plan(**options)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"slo": {"objectives": []}}, "no objective"),
        ({"slo": {"objectives": ["output_throughput>100"]}}, "cannot bound the load"),
        ({"workload": {"request_rate": "inf"}}, "due at once"),
        ({"workload": {"max_concurrency": 8}}, "closed loop"),
    ],
)
def test_a_load_that_no_fleet_follows_from_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        small_plan(scenario(**changes))


# --- calibrated and uncalibrated


def test_uncalibrated_deployments_are_not_ranked_beside_calibrated_ones() -> None:
    table = scenario(workload={"request_rate": 20, "num_requests": 120})
    del table["cost"]
    found = small_plan(
        table,
        gpus={"h100-sxm": 2.5, "h100-nvl": 0.1},
        tensor_parallel_sizes=(1,),
        uncalibrated=True,
        replications=1,
        num_requests=100,
    )
    best = found.recommended
    assert best is not None
    assert (best["gpu"], best["calibrated"], best["profile"]) == ("H100-SXM", True, "llama-3.1-8b-h100-sxm-tp1-bf16")
    other = found.told["uncalibrated_alternative"]
    assert (other["gpu"], other["calibrated"]) == ("H100-NVL", False)
    assert all(row["calibrated"] for row in found.told["runners_up"])
    assert "kept apart" in found.text()
    assert best["slower"]["percent"] > 0


def test_uncalibrated_deployments_are_left_out_unless_they_are_asked_for() -> None:
    table = scenario(workload={"request_rate": 20, "num_requests": 120})
    del table["cost"]
    found = small_plan(table, gpus={"h100-sxm": 2.5, "h100-nvl": 0.1}, tensor_parallel_sizes=(1,), replications=1)
    assert [(each["gpu"], each["kind"]) for each in found.told["refused"]] == [("H100-NVL", "uncalibrated")]


# --- files


_SCALARS = st.one_of(
    st.booleans(), st.integers(-(10**9), 10**9), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8)
)
_NAMES = st.text(min_size=1, max_size=6)


@given(
    st.dictionaries(
        _NAMES,
        st.one_of(
            _SCALARS,
            st.lists(_SCALARS, max_size=3),
            st.dictionaries(
                _NAMES, st.one_of(_SCALARS, st.dictionaries(_NAMES, _SCALARS, max_size=2)), min_size=1, max_size=3
            ),
        ),
        max_size=4,
    )
)
def test_a_scenario_is_written_as_it_is_read(table: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text(table)) == table


def test_the_builders_steps_are_those_of_no_card() -> None:
    assert STEPS["kind"] == "affine"


def test_a_router_of_a_gateway_is_planned_for_as_well() -> None:
    table = scenario(deployment={"router": "least_requests"}, workload={"request_rate": 200, "num_requests": 600})
    found = small_plan(table, **ONE_CARD)
    best = found.recommended
    assert best is not None
    assert found.told["asked"]["router"] == "least_requests"
    assert found.scenario is not None
    assert wt.simulate(found.scenario).slo_passed


def test_a_fleet_that_changes_is_not_planned() -> None:
    with pytest.raises(wt.ScenarioError, match="leave pools, autoscaler and faults"):
        small_plan(scenario(fleet={"pools": {"a": {"replicas": 2}}}))


def test_requests_of_a_replica_that_crashes_begin_anew(planned: Plan) -> None:
    best = planned.recommended
    assert best is not None
    assert best["crash"]["num_begun_anew"] > 0
    assert "begun anew" in planned.text()


def test_of_several_models_the_cheapest_is_recommended_and_all_are_named() -> None:
    found = small_plan(models=("llama-3.1-8b", "qwen2.5-7b"), **ONE_CARD)
    assert {row["model"] for row in found.told["candidates"]} == {"llama-3.1-8b", "qwen2.5-7b"}
    best = found.recommended
    assert best is not None
    assert f"{best['model']} on 1 x L40S" in found.text()


def test_a_load_too_short_to_say_anything_is_warned_of() -> None:
    found = small_plan(scenario(workload={"num_requests": 100, "request_rate": 200, "output": 300}), **ONE_CARD)
    assert any("too short for a steady state" in warning for warning in found.told["warnings"])


def test_requests_beyond_max_model_len_are_told_of() -> None:
    found = small_plan(scenario(engine={"max_model_len": 110}), **ONE_CARD)
    assert any("200 reach it before their output ends" in note for note in found.told["notes"])


def test_every_key_of_the_json_is_described(planned: Plan) -> None:
    page = (Path(__file__).parents[1] / "docs" / "plan.md").read_text("utf-8")
    said_of_itself = {"windtunnel_version", "schema_version", "currency", "has_prices", "spare_replicas"}
    assert [key for key in planned.told if f"`{key}`" not in page and key not in said_of_itself] == []


# --- what a reviewer found


@pytest.fixture(scope="module")
def with_spare() -> Plan:
    return small_plan(
        scenario(workload={"request_rate": 300, "num_requests": 900}), growth="10%/month", spare_replicas=1
    )


def test_a_spare_replica_is_there_when_one_fails(with_spare: Plan, planned: Plan) -> None:
    best, without = with_spare.recommended, planned.recommended
    assert best is not None
    assert without is not None
    assert best["num_replicas"] == without["num_replicas"]
    assert best["one_down"]["num_replicas"] == best["num_replicas"]
    assert best["one_down"]["num_held"] == best["one_down"]["num_replications"]
    assert best["crash"]["holds"]
    assert not without["crash"]["holds"]
    for text in (with_spare.text(), with_spare.markdown()):
        assert "With one replica down the objectives still hold." in text
        assert f"one replica down ({best['num_replicas']} left)" in text


def test_the_price_of_a_fleet_is_that_of_the_replicas_it_is_told_with(with_spare: Plan) -> None:
    best = with_spare.recommended
    assert best is not None
    needed = best["num_replicas"]
    assert best["needed_alone"]["cost_per_hour"] == pytest.approx(0.9 * needed)
    assert best["redundant"]["cost_per_hour"] == best["cost_per_hour"] == pytest.approx(0.9 * (needed + 1))
    text = with_spare.text()
    assert "Without the spare replica" in text
    assert "One replica more" not in text
    assert f" {needed} + 1 " in text


def test_the_profile_and_its_error_are_told_before_the_tables(planned: Plan) -> None:
    best = planned.recommended
    assert best is not None
    said = best["statement"][0][:30]
    assert planned.text().index(said) < planned.text().index("vllm serve")
    assert planned.markdown().index(said) < planned.markdown().index("vllm serve")


LONG_PROMPTS: dict[str, Any] = {
    "workload": {"request_rate": 20, "num_requests": 150, "input": 1000, "output": 20},
    "cost": {"kind": "affine", "base_s": "8ms", "token_s": "30us", "seq_s": "100us"},
    "slo": {"objectives": ["ttft:p95<2s", "itl:p99<30ms"]},
}
"""Chunks of a whole prompt take longer than the gap between tokens may be; half a prompt does not."""


def test_a_budget_below_the_default_is_found_where_the_time_between_tokens_costs_replicas() -> None:
    found = small_plan(scenario(**LONG_PROMPTS), max_num_batched_tokens=None, **ONE_CARD)
    default = small_plan(scenario(**LONG_PROMPTS), max_num_batched_tokens=(2048,), **ONE_CARD)
    assert found.recommended is not None
    assert found.recommended["max_num_batched_tokens"] == 512
    least = default.recommended
    assert least is None or least["cost_per_hour"] > found.recommended["cost_per_hour"]


def test_a_dear_shape_is_probed_with_a_smaller_budget_before_it_is_given_up() -> None:
    table = scenario(**LONG_PROMPTS)
    found = small_plan(
        table, max_num_batched_tokens=(2048, 512), gpus={"l40s": 1.0, "h100-sxm": 1.05}, tensor_parallel_sizes=(1,)
    )
    assert found.recommended is not None
    assert found.recommended["gpu"] == "L40S"
    assert found.recommended["max_num_batched_tokens"] == 512


def test_what_is_bought_decides_not_fractions_of_replicas() -> None:
    """One replica of two cards and a spare one are four cards; two of one card and a spare one are three."""
    table = scenario(workload={"request_rate": 100, "num_requests": 600})
    found = small_plan(table, gpus={"l40s": 1.0}, tensor_parallel_sizes=(1, 2), spare_replicas=1, replications=1)
    best = found.recommended
    assert best is not None
    assert best["tensor_parallel_size"] == 1


@given(needed=st.integers(1, 300), start=st.integers(1, 300))
def test_the_smallest_fleet_that_holds_is_found_wherever_the_search_begins(needed: int, start: int) -> None:
    tried = Tried(None, Offer("L40S", 1.0), True, None)  # type: ignore[arg-type]
    size: int | None = start
    for _ in range(25):
        if size is None:
            break
        tried.fleets[size, 0] = {"holds": size >= needed}
        size = next_size(tried, 4096)
    assert size is None
    assert smallest_that_holds(tried) == needed
    assert needed == 1 or (needed - 1, 0) in tried.fleets


def test_growth_names_only_another_kind_of_deployment_as_cheaper() -> None:
    found = small_plan(
        scenario(workload={"request_rate": 300, "num_requests": 900}),
        max_num_batched_tokens=(2048, 4096),
        gpus={"l40s": 0.9},
        growth="20%/month",
        months=24,
    )
    assert {row["cheapest"] for row in found.told["growth"]["rows"]} == {None}


def test_growth_is_said_to_be_an_estimate(planned: Plan) -> None:
    assert planned.told["growth"]["is_simulated"] is False
    assert "Growth is an estimate: replicas are scaled with the load" in " ".join(planned.text().split())


SEATS = (16, 64, 256)


def test_the_order_of_choices_does_not_matter() -> None:
    """Few seats at the head of the list bound what the kind can do with more."""
    table = scenario(workload={"request_rate": 400, "num_requests": 800})
    up, down = (
        small_plan(table, max_num_seqs=seats, gpus={"l40s": 0.9}, replications=1).recommended
        for seats in (SEATS, SEATS[::-1])
    )
    assert up is not None
    assert down is not None
    assert up["replicas_needed"]["mean"] == pytest.approx(down["replicas_needed"]["mean"], rel=2 * TOLERANCE)
    assert up["cost_per_hour"] == down["cost_per_hour"]


@pytest.mark.parametrize("guess", [0.1, 1.0, 20.0])
def test_a_guess_that_is_far_off_is_still_bracketed(guess: float) -> None:
    """Other knobs of the same kind are where a search begins, and may take many times the replicas."""
    question = make_question(load_scenario(scenario(workload={"request_rate": 60}), {}), 1.0, 1, 100)
    space = Space(("llama-3.1-8b",), read_offers(["l40s=0.9"]), (1,), fixed={"max_model_len": 2048})
    candidate = candidates(space)[0][0].candidate
    found = needed(needed_job(question, candidate, 0, least=0.05, guess=guess, step=1.06).argument)
    assert found["missed_at"] < found["num_replicas"] <= found["missed_at"] * (1 + TOLERANCE)
    assert found["num_simulations"] < 20


def test_an_exhaustive_search_finds_nothing_cheaper() -> None:
    """What one kind's other budget saves must not leave another kind without its try."""
    question = make_question(load_scenario(scenario(**LONG_PROMPTS), {}), 1.0, 1, 100)
    space = Space(
        ("llama-3.1-8b",),
        read_offers(["l40s=0.9", "h100-sxm=1.5"]),
        (1,),
        max_num_seqs=(64,),
        max_num_batched_tokens=(8192, 4096, 2048, 512),
        kv_cache_dtypes=("auto",),
        gpu_memory_utilizations=(0.9,),
        fixed={"max_model_len": 2048},
    )
    with Workers(1) as workers:
        pruned, whole = (
            search(question, space, workers, exhaustive=every, tell=lambda text: None) for every in (False, True)
        )
    assert len(whole.tried) == len(candidates(space)[0]) > len(pruned.tried)
    costs = [
        min(each.whole_cost(size, 0) for each in found.finalists if (size := smallest_that_holds(each)) is not None)
        for found in (pruned, whole)
    ]
    assert costs[0] == costs[1]


def test_progress_tells_the_step_and_the_time_left() -> None:
    said: list[str] = []
    small_plan(tell=said.append, **ONE_CARD)
    steps = [int(text.split(" of ", 1)[0]) for text in said]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, 7)
    assert any(" left" in text for text in said)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gpus": {"l40s": 1e300}}, "at most 1,000,000,000"),
        ({"gpus": {"l40s": float("nan")}}, "must be above 0"),
        ({"scale": float("inf")}, "finite"),
        ({"spare_replicas": 1_000_000}, "from 0 to 1,000"),
        ({"kv_cache_dtypes": ("int3",)}, "kv_cache_dtype must be one of"),
        ({"max_num_seqs": (5000,)}, "is below max_num_seqs"),
        ({"tensor_parallel_sizes": ()}, "is empty"),
        ({"currency": " "}, "currency is blank"),
    ],
)
def test_a_slip_is_refused_before_anything_is_simulated(options: dict[str, Any], told: str) -> None:
    said: list[str] = []
    with pytest.raises(ValueError, match=told):
        small_plan(tell=said.append, **options)
    assert said == []


def test_seats_above_every_budget_leave_the_others_to_choose_from() -> None:
    found = small_plan(**{**ONE_CARD, "max_num_seqs": (5000, 256)})
    assert {row["max_num_seqs"] for row in found.told["candidates"]} == {256}


def test_a_load_beyond_any_fleet_is_told_at_once() -> None:
    found = small_plan(scale=1e9, **ONE_CARD)
    assert found.verdict == "nothing_holds"
    assert {each["kind"] for each in found.told["dropped"]} == {"too_many"}
    assert "a fleet has at most 4,096" in found.told["dropped"][0]["reason"]


def test_an_empty_list_on_the_command_line_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.toml"
    path.write_text(toml_text(scenario()), "utf-8")
    assert main(["plan", str(path), "--gpu", "l40s=0.9", "--tp", ","]) == 2
    assert "names nothing" in capsys.readouterr().err


def test_the_number_that_other_draws_ask_for_is_named_from_either_side() -> None:
    """At this rate three replicas carry the load in about three draws of four, four in all of them."""
    table = scenario(workload={"request_rate": 436, "num_requests": 1500})
    for seed in (0, 2):
        found = small_plan(table, seed=seed, **{**ONE_CARD, "replications": 3})
        best = found.recommended
        assert best is not None
        assert best["num_replicas"] in (3, 4)
        assert best["size_within_noise"] == {"low": 3, "high": 4}
        assert "3 to 4 replicas" in " ".join(found.text().split())


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"plan": {"gpus": ["h999"]}}, "gpus of .plan."),
        ({"plan": {"gpus": ["l40s"], "growth": "soon"}}, "growth in .plan."),
        ({"price": {"gpu_hour": {"l40s": 0}}}, "gpus of .plan., .price."),
    ],
)
def test_a_slip_in_a_file_names_the_file_and_the_section(section: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(toml_text(scenario(**section)), "utf-8")
    with pytest.raises(wt.ScenarioError, match=f"small.toml: {told}"):
        wt.plan(path, jobs=1)


def test_bad_rows_are_left_out_where_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{k / 50},100,20" for k in range(200)]
    trace.write_text("\n".join(["arrival_s,num_prompt_tokens,num_output_tokens", *rows, "9,many,5"]), "utf-8")
    words = ["plan", "--model", "llama-3.1-8b", "--trace", str(trace), "--slo", "ttft:p95<5s", "--gpu", "h100-sxm"]
    words += ["--tp", "1", "--kv-cache-dtype", "auto", "--reps", "1", "--requests", "100", "-j", "1"]
    assert main(words) == 3
    assert "--on-bad-row skip" in capsys.readouterr().err
    assert main([*words, "--on-bad-row", "skip"]) == 0


def test_the_front_is_of_fleets_that_hold_at_what_is_paid_for_them(with_spare: Plan) -> None:
    points, best = with_spare.told["pareto"]["points"], with_spare.recommended
    assert best is not None
    assert any(not point["holds"] for point in points)
    front = [point for point in points if point["on_front"]]
    assert front
    assert all(point["holds"] for point in front)
    assert best["cost_per_hour"] in [point["cost_per_hour"] for point in front]


def test_what_is_missed_is_that_of_the_replication_that_no_fleet_served() -> None:
    tried = Tried(None, Offer("L40S", 1.0), True, None)  # type: ignore[arg-type]
    kept, missed = ({"text": "ttft:p99<5s", "passed": passed} for passed in (True, False))
    tried.estimates += [
        {"num_replicas": 2.0, "below": {"objectives": [kept]}},
        {"num_replicas": None, "below": {"objectives": [kept, missed]}},
    ]
    assert tried.num_replicas is None
    assert tried.missed == [missed]
