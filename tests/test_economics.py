"""What a run cost: GPU time, money, energy, and what preemptions took of them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from built_records import MS, pressed_engine, single_server, token_records, with_requests
from hypothesis import given
from hypothesis import strategies as st

import windtunnel as wt
from windtunnel.cli.main import main
from windtunnel.reports.economics import cost_rows, preemption_rows, preemption_sentence, stall_figure
from windtunnel.reports.text import render_text
from windtunnel.scenarios import schema
from windtunnel.scenarios.errors import ScenarioError
from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.cost.fitted import FittedCost
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.metrics.economics import (
    LARGEST_RATE,
    Economics,
    Rates,
    economics,
    eviction_log,
    itl_gaps,
    itl_stalls,
    prefill_ns,
    recomputed_ns,
)
from windtunnel.sim.metrics.latency import inter_token_latencies
from windtunnel.sim.metrics.summary import summarize
from windtunnel.sim.records import PreemptionTable, Records, ReplicaRecords, StepTable, empty_table
from windtunnel.sim.simulate import run, serve
from windtunnel.sim.system import System

REPO_ROOT = Path(__file__).resolve().parent.parent
S = 1_000_000_000
COST = AffineCost(base_s=0.01, token_s=2e-5, seq_s=1e-5, decode_context_s=1e-8)


def steps_of(**columns: list[int]) -> StepTable:
    """Steps one after the other, with the columns that were given."""
    ends = np.cumsum(columns.pop("lasted_ns"))
    state = {name: np.zeros(len(ends), np.int64) for name in StepTable.__dataclass_fields__}
    state |= {"start_ns": np.concatenate(([0], ends[:-1])), "end_ns": ends}
    return StepTable(**state | {name: np.array(values, np.int64) for name, values in columns.items()})


def mixed_steps() -> StepTable:
    """A prompt alone, a decode alone, and a step of both, half of whose prompt tokens had been lost."""
    return steps_of(
        lasted_ns=[30 * MS, 10 * MS, 24 * MS],
        num_decode_seqs=[0, 4, 4],
        prefill_tokens=[100, 0, 40],
        num_prefill_seqs=[1, 0, 1],
        recomputed_tokens=[0, 0, 20],
        decode_only_ns=[0, 10 * MS, 12 * MS],
    )


def records_of(steps: StepTable) -> Records:
    """One finished request of 100 + 10 tokens, on an engine with these steps."""
    made = token_records((0, [0]), num_steps=1)
    table = replace(made.requests, num_prompt_tokens=np.array([100]), num_output_tokens=np.array([10]))
    end_ns = int(steps.end_ns[-1])
    return Records(table, (replace(made.replicas[0], steps=steps),), end_ns)


def pressed(cost: CostModel = COST, **changes: Any) -> Records:
    load, config = pressed_engine()
    return run(load, replace(config, **changes), cost)


# --- time within steps


def test_chunks_take_what_they_make_a_step_longer_by() -> None:
    found = prefill_ns(mixed_steps())
    assert found is not None
    assert found.tolist() == [30 * MS, 0, 12 * MS]


def test_recomputed_tokens_take_their_share_of_the_chunks_time() -> None:
    found = recomputed_ns(mixed_steps())
    assert found is not None
    assert found.tolist() == [0, 0, 6 * MS]


def test_steps_that_nobody_priced_are_divided_by_tokens() -> None:
    unpriced = replace(mixed_steps(), decode_only_ns=np.full(3, -1))
    assert prefill_ns(unpriced) is None
    found = recomputed_ns(unpriced)
    assert found is not None
    assert found.tolist() == [0, 0, 24 * MS * 20 // 44 + 1]  # 20 of 44 tokens, rounded


def test_what_was_not_recorded_is_not_known() -> None:
    old = replace(mixed_steps(), recomputed_tokens=np.full(3, -1))
    assert recomputed_ns(old) is None


@pytest.mark.parametrize("changes", [{}, {"async_scheduling": True}, {"enable_prefix_caching": True}])
def test_every_recomputed_token_is_computed_in_some_step(changes: dict[str, Any]) -> None:
    records = pressed(**changes)
    by_request = int(records.requests.num_recomputed_tokens.sum())
    steps = records.replicas[0].steps
    assert by_request == int(steps.recomputed_tokens.sum()) > 0
    assert (steps.recomputed_tokens <= steps.prefill_tokens).all()


def test_a_simulated_step_knows_what_its_decodes_alone_would_have_taken() -> None:
    steps = pressed().replicas[0].steps
    lasted = steps.end_ns - steps.start_ns
    chunk_ns = 1e9 * (COST.token_s * steps.prefill_tokens + COST.seq_s * steps.num_prefill_seqs)
    mixed = (steps.num_decode_seqs > 0) & (steps.num_prefill_seqs > 0)
    assert mixed.any()
    assert np.abs(lasted - steps.decode_only_ns - chunk_ns)[mixed].max() <= 1, "within rounding"
    assert (steps.decode_only_ns == lasted)[steps.num_prefill_seqs == 0].all()
    assert not steps.decode_only_ns[steps.num_decode_seqs == 0].any()


def test_in_a_pipeline_a_step_is_divided_as_it_would_be_in_one_stage() -> None:
    steps = pressed(pipeline_parallel_size=2).replicas[0].steps
    lasted = steps.end_ns - steps.start_ns
    mixed = (steps.num_decode_seqs > 0) & (steps.num_prefill_seqs > 0)
    alone_s = COST.step_time_s(
        StepShape(steps.num_decode_seqs, steps.decode_context_tokens, 0, 0, 0, 0, steps.num_decode_seqs)  # type: ignore[arg-type]
    )
    chunks_s = COST.token_s * steps.prefill_tokens + COST.seq_s * steps.num_prefill_seqs
    share = steps.decode_only_ns[mixed] / lasted[mixed]
    assert mixed.any()
    assert (share <= (alone_s / (alone_s + chunks_s))[mixed] + 1e-6).all(), "waits for a stage are the chunks'"
    assert np.median(np.abs(share - (alone_s / (alone_s + chunks_s))[mixed])) < 0.15


def test_a_cost_model_that_refuses_what_it_does_not_know_still_divides_the_steps_it_ran() -> None:
    asked = {"num_requests": 20, "request_rate": 20, "saturation": False}
    fitted = wt.simulate("chat-8b-h100", **asked).records.replicas[0].steps
    assert ((fitted.num_decode_seqs > 0) & (fitted.num_prefill_seqs > 0)).any()
    refusing = wt.simulate("chat-8b-h100", cost={"kind": "auto", "refuse_outside": True}, **asked)
    assert refusing.resolved["cost"]["name"] == FittedCost.name
    assert (refusing.records.replicas[0].steps.decode_only_ns == fitted.decode_only_ns).all()


def test_steps_of_speculative_decoding_stay_undivided() -> None:
    drafts = "ngram:num_speculative_tokens=3,acceptance=0.7"
    made = wt.simulate("chat-8b-h100", num_requests=20, speculative=drafts, saturation=False, gpu_hour=2.0)
    assert (made.records.replicas[0].steps.decode_only_ns == -1).all()
    assert made.summary["prefill_gpu_seconds"] is None
    assert made.summary["input_cost_per_million_tokens"] is None
    assert made.summary["cost_per_million_tokens"] > 0


# --- money and energy


def test_the_price_is_paid_for_all_gpus_all_the_time() -> None:
    found = economics(records_of(mixed_steps()), 2 * S, Rates(4, gpu_hour=3600.0), currency="EUR")
    assert (found.num_gpus, found.gpu_seconds, found.currency) == (4, 8.0, "EUR")
    assert found.busy_gpu_seconds == pytest.approx(4 * 0.064)
    assert found.cost_per_hour == 4 * 3600.0
    assert found.cost == pytest.approx(8.0)
    assert found.cost_per_request == pytest.approx(8.0)
    assert found.cost_per_million_tokens == pytest.approx(8e6 / 110)
    assert found.cost_per_million_output_tokens == pytest.approx(8e5)


def test_input_and_output_share_the_cost_by_time() -> None:
    found = economics(records_of(mixed_steps()), 2 * S, Rates(gpu_hour=3600.0))
    share = 42 / 64  # of 64 ms that steps ran, chunks took 30 + 12
    assert found.input_cost_per_million_tokens == pytest.approx(2 * share / 100 * 1e6)
    assert found.output_cost_per_million_tokens == pytest.approx(2 * (1 - share) / 10 * 1e6)


@given(price=st.floats(0.01, 100), held_ns=st.integers(64 * MS, 10**12), gpus=st.integers(1, 16))
def test_input_and_output_add_up_to_the_cost(price: float, held_ns: int, gpus: int) -> None:
    found = economics(records_of(mixed_steps()), held_ns, Rates(gpus, gpu_hour=price))
    assert found.input_cost_per_million_tokens is not None
    assert found.output_cost_per_million_tokens is not None
    parts = found.input_cost_per_million_tokens * found.input_tokens
    parts += found.output_cost_per_million_tokens * found.output_tokens
    assert parts / 1e6 == pytest.approx(found.cost)


def test_energy_is_busy_and_idle_time_by_their_watts() -> None:
    found = economics(records_of(mixed_steps()), 1 * S, Rates(2, idle_watts=100, busy_watts=600))
    assert found.energy_kwh == pytest.approx(2 * (0.064 * 600 + 0.936 * 100) / 3.6e6)
    assert found.energy_joules_per_output_token == pytest.approx(2 * (0.064 * 600 + 0.936 * 100) / 10)
    assert found.cost is None
    assert found.currency == ""


def test_replicas_of_two_prices_add_up() -> None:
    one = records_of(mixed_steps())
    both = replace(one, replicas=one.replicas * 2)
    rates = [Rates(1, gpu_hour=3600.0), Rates(2, gpu_hour=7200.0)]
    found = economics(both, [1 * S, 2 * S], rates, currency="USD")
    assert found.cost == pytest.approx(1 * 1 * 1 + 2 * 2 * 2)
    assert found.cost_per_hour == pytest.approx(3600 + 2 * 7200)
    assert found.gpu_seconds == pytest.approx(1 + 4)
    half_known = economics(both, 1 * S, [Rates(gpu_hour=1.0), Rates()], currency="USD")
    assert (half_known.cost, half_known.cost_per_hour, half_known.currency) == (None, None, "")


def test_as_many_rates_as_replicas_are_needed() -> None:
    with pytest.raises(ValueError, match="one entry for each of the 1 replicas, got 2"):
        economics(records_of(mixed_steps()), 1, [Rates(), Rates()])
    with pytest.raises(ValueError, match="held_ns must have one entry for each of the 1 replicas, got 2"):
        economics(records_of(mixed_steps()), [1, 2])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_gpus": 0}, "num_gpus must be at least 1, got 0"),
        ({"gpu_hour": -1.0}, r"gpu_hour must be a number from 0 to 1e\+12, got -1.0"),
        *(({"gpu_hour": price}, "gpu_hour must be a number from 0 to") for price in (float("inf"), float("nan"), 1e13)),
        ({"busy_watts": 600.0}, "busy_watts was given without idle_watts"),
        ({"idle_watts": 60.0}, "idle_watts was given without busy_watts"),
        ({"idle_watts": 700.0, "busy_watts": 600.0}, "idle_watts .700. must be at most busy_watts .600."),
    ],
)
def test_rates_out_of_range_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rates(**given)


def test_nothing_finished_costs_nothing_each() -> None:
    records = records_of(mixed_steps())
    unfinished = with_requests(records, outcome=np.array([1]))
    found = economics(unfinished, 1 * S, Rates(gpu_hour=3600.0))
    assert found.cost == pytest.approx(1.0)
    assert found.cost_per_request is None
    assert found.cost_per_million_tokens is None


# --- preemptions


def test_recomputation_takes_what_its_tokens_add_to_the_steps() -> None:
    cost = AffineCost(base_s=0.01, token_s=1e-4)
    records = pressed(cost)
    own = economics(records, records.end_ns, Rates(2, gpu_hour=3600.0)).preemption
    assert own is not None
    steps = records.replicas[0].steps
    mixed = steps.num_decode_seqs > 0
    again = steps.recomputed_tokens
    expected = 2 * 1e-4 * float(again[mixed].sum())
    # alone in a step, chunks take the base as well
    expected += 2 * float(
        (again / steps.prefill_tokens.clip(min=1) * (0.01 + 1e-4 * steps.prefill_tokens))[~mixed].sum()
    )
    assert own.recomputed_gpu_seconds == pytest.approx(expected, rel=1e-6)
    assert own.recomputed_cost == pytest.approx(expected, rel=1e-6)
    busy_s = 2 * float((steps.end_ns - steps.start_ns).sum()) / S
    assert own.recomputed_busy_share == pytest.approx(expected / busy_s)


def test_what_recomputation_took_is_what_a_larger_pool_saves() -> None:
    """The bill of a run under pressure against the same requests with room for all, on a linear cost model."""
    cost = AffineCost(base_s=1e-6, token_s=1e-4)  # time is work, and next to nothing else
    tight, roomy = pressed(cost), pressed(cost, num_gpu_blocks=2000)
    own = economics(tight, tight.end_ns).preemption
    assert own is not None
    assert own.recomputed_gpu_seconds is not None
    assert economics(roomy, roomy.end_ns).preemption is None
    saved_s = (economics(tight, 1).busy_gpu_seconds) - economics(roomy, 1).busy_gpu_seconds
    assert own.recomputed_gpu_seconds == pytest.approx(saved_s, rel=0.02)


def test_a_constant_step_time_means_that_recomputation_beside_decodes_costs_no_time() -> None:
    records = pressed(ConstantCost(0.01))
    stats = economics(records, records.end_ns)
    assert stats.preemption is not None
    steps = records.replicas[0].steps
    alone = steps.num_decode_seqs == 0
    share = steps.recomputed_tokens / steps.prefill_tokens.clip(min=1)
    assert stats.preemption.recomputed_gpu_seconds == pytest.approx(0.01 * float(share[alone].sum()))


def stalled_records() -> Records:
    """One request with tokens at steps 0, 1, 2, then preempted for step 3 and back at 52; another in all steps.

    Steps take 10 ms; steps 51 and 52 compute again what was lost and take 30 ms each, 20 of them for that.
    """
    records = token_records((0, [0, 1, 2, 52, 53]), (0, list(range(60))), num_steps=60)
    replica = records.replicas[0]
    lasted = np.full(60, 10 * MS)
    lasted[[51, 52]] = 30 * MS
    again = np.zeros(60, np.int64)
    again[[51, 52]] = 50
    ends = np.cumsum(lasted)
    steps = replace(
        replica.steps,
        start_ns=ends - lasted,
        end_ns=ends,
        num_decode_seqs=np.full(60, 1),
        num_prefill_seqs=(again > 0).astype(np.int64),
        prefill_tokens=again,
        recomputed_tokens=again,
        decode_only_ns=np.full(60, 10 * MS),
    )
    lost = PreemptionTable(*(np.array([value]) for value in (30 * MS, 3, 0, 100, 7, 9, 1)))
    table = replace(records.requests, num_preemptions=np.array([1, 0]), num_recomputed_tokens=np.array([100, 0]))
    return Records(table, (replace(replica, steps=steps, preemptions=lost),), int(ends[-1]))


def test_a_stall_begins_where_the_next_token_would_have_come() -> None:
    gaps = itl_gaps(stalled_records())
    assert gaps.is_stalled.sum() == 1
    k = int(np.flatnonzero(gaps.is_stalled)[0])
    assert int(gaps.request[k]) == 0
    gap_ns = (49 + 1) * 10 * MS + 2 * 20 * MS  # steps 3 … 52
    assert int(gaps.measured_ns[k]) == gap_ns
    assert int(gaps.stall_ns[k]) == gap_ns - 10 * MS, "all but step 3, at whose end its token would have come"
    assert int(gaps.recomputing_ns[k]) == 0


def test_recomputation_is_taken_out_of_the_steps_in_which_others_decode() -> None:
    gaps = itl_gaps(stalled_records())
    assert gaps.measured().percentile(100) == 50 * 10 * MS + 2 * 20 * MS
    assert gaps.without_stalls().percentile(100) == 30 * MS
    without = gaps.without_preemption()
    assert without is not None
    assert (without.percentile(0), without.percentile(100)) == (10 * MS, 10 * MS)
    stalls = itl_stalls(gaps)
    assert stalls.num_gaps == gaps.measured().count == 4 + 59
    assert (stalls.num_stalled, stalls.stall_mean_ms) == (1, 530.0)
    assert stalls.stall_s == pytest.approx(0.53)
    assert stalls.p99_without_preemption_ms == 10.0
    assert stalls.p99_ms is not None
    assert stalls.p99_share == pytest.approx(1 - 10.0 / stalls.p99_ms)
    assert (stalls.num_slow, stalls.slow_stalled_share, stalls.slow_recomputing_share) == (1, 1.0, 0.0)


def test_gaps_above_p99_are_told_apart_by_what_holds_them() -> None:
    records = stalled_records()
    never = replace(records.replicas[0], preemptions=empty_table(PreemptionTable))
    shorter = with_requests(replace(records, replicas=(never,)), num_preemptions=np.array([0, 0]))
    stalls = itl_stalls(itl_gaps(shorter))
    assert stalls.num_stalled == 0, "a gap without a preemption is no stall, however long"
    assert stalls.slow_stalled_share == 0.0
    assert stalls.slow_recomputing_share == 1.0


def test_gaps_are_those_that_itl_is_made_of() -> None:
    for records in (pressed(), pressed(async_scheduling=True), pressed(max_num_batched_tokens=32)):
        gaps, itl = itl_gaps(records).measured(), inter_token_latencies(records)
        assert gaps.count == itl.count > 0
        assert gaps.sum() == itl.sum()
        for percent in (0, 1, 50, 90, 99, 99.9, 100):
            assert gaps.percentile(percent) == itl.percentile(percent)


@pytest.mark.parametrize("changes", [{}, {"async_scheduling": True}, {"max_num_batched_tokens": 32}])
def test_taking_preemptions_out_never_makes_a_gap_longer_or_negative(changes: dict[str, Any]) -> None:
    gaps = itl_gaps(pressed(**changes))
    assert gaps.is_stalled.any()
    assert (gaps.stall_ns >= 0).all()
    assert (gaps.recomputing_ns >= 0).all()
    assert (gaps.measured_ns - gaps.stall_ns - gaps.recomputing_ns > 0)[gaps.weights > 0].all()
    assert not gaps.stall_ns[~gaps.is_stalled].any()


def test_each_preemption_after_a_token_is_one_stall_unless_they_follow_without_one() -> None:
    records = pressed()
    own = economics(records, records.end_ns).preemption
    assert own is not None
    num_preemptions = int(records.requests.num_preemptions.sum())
    assert 0 < own.stalls.num_stalled <= num_preemptions - own.num_before_first_token


def test_without_preemptions_there_is_nothing_to_tell() -> None:
    records, load = single_server(np.arange(10) * 20 * MS, np.full(10, 10 * MS))
    stats = summarize(records, load).economics
    assert stats.preemption is None
    assert (list(preemption_rows(stats)), list(cost_rows(stats)), preemption_sentence(stats)) == ([], [], "")
    text = render_text(summarize(records, load))
    assert "Cost and energy" not in text
    assert "What preemptions cost" not in text


# --- who evicted whom


def evictions(*rows: tuple[int, int, int, int, int, int, int], usable: int = 100) -> Records:
    """Records with these preemptions: time, step, victim, tokens, blocks, free afterwards, for whom."""
    records = token_records(*[(0, [0, 1])] * 8)
    table = PreemptionTable(*np.array(rows, np.int64).T)
    return replace(records, replicas=(replace(records.replicas[0], preemptions=table, num_usable_blocks=usable),))


def test_the_log_says_how_often_it_was_and_how_full_the_cache_was() -> None:
    log = eviction_log(evictions((1, 0, 5, 90, 6, 6, 2), (2, 1, 3, 10, 1, 1, 3), (9, 4, 5, 40, 3, 4, 1)))
    assert log.request.tolist() == [5, 3, 5]
    assert log.number.tolist() == [1, 1, 2]
    assert log.for_request.tolist() == [2, 3, 1]
    assert log.lost_tokens.tolist() == [90, 10, 40]
    assert log.usage_before == pytest.approx([1.0, 1.0, 0.99])
    assert log.usage_after == pytest.approx([0.94, 0.99, 0.96])


def test_the_log_of_several_replicas_is_in_order_of_time() -> None:
    one = evictions((5, 0, 5, 90, 6, 6, 2), (9, 1, 3, 10, 1, 1, 3))
    other = evictions((1, 0, 4, 90, 6, 6, 2), (9, 1, 6, 10, 1, 1, 3))
    log = eviction_log(replace(one, replicas=one.replicas + other.replicas))
    assert (log.time_ns.tolist(), log.replica.tolist()) == ([1, 5, 9, 9], [1, 0, 0, 1])


def test_pairs_and_victims_are_summed_and_the_worst_come_first() -> None:
    rows = [(1, 0, 5, 90, 6, 6, 2), (2, 1, 3, 200, 13, 1, 3), (9, 4, 5, 140, 3, 4, 2), (9, 4, 5, 20, 2, 4, 1)]
    own = economics(evictions(*rows), 1).preemption
    assert own is not None
    pairs = [(p.request, p.for_request, p.num_preemptions, p.lost_tokens, p.lost_blocks) for p in own.pairs]
    assert pairs == [(5, 2, 2, 230, 9), (3, 3, 1, 200, 13), (5, 1, 1, 20, 2)]
    assert [(v.request, v.num_preemptions, v.lost_tokens) for v in own.victims] == [(5, 3, 250), (3, 1, 200)]
    assert (own.lost_tokens, own.lost_blocks, own.num_of_itself) == (450, 24, 1)


def test_a_preemption_before_the_first_token_is_one_of_ttft() -> None:
    records = evictions((1, 0, 5, 90, 6, 6, 2), (5 * MS, 1, 4, 80, 5, 6, 2), (30 * MS, 2, 3, 200, 13, 1, 4))
    own = economics(records, 1).preemption
    assert own is not None
    assert own.num_before_first_token == 1, "the second was decided while the step of the first token ran"


def test_the_bill_holds_all_that_the_preemption_table_holds() -> None:
    records = pressed()
    own, table = economics(records, 1).preemption, records.replicas[0].preemptions
    assert own is not None
    assert own.lost_tokens == int(table.num_computed_tokens.sum())
    assert own.lost_blocks == int(table.num_blocks.sum())
    log = eviction_log(records)
    assert (log.usage_after < log.usage_before).all()
    assert (log.usage_before <= 1.0).all()
    assert int(log.number.max()) == int(records.requests.num_preemptions.max())


# --- scenarios, summaries and reports


def storm(**given: Any) -> wt.Run:
    """A small storm of preemptions on steps whose time depends on what they compute."""
    return wt.simulate(
        {
            "name": "storm",
            "deployment": {"num_gpu_blocks_override": 120, "gpu": "H100-SXM"},
            "engine": {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512},
            "workload": {"num_requests": 60, "input": 120, "output": 120, "request_rate": 200},
            "cost": {"kind": "affine", "base_s": "8ms", "token_s": "20us"},
            "run": {"saturation": False},
        },
        **given,
    )


def test_price_and_power_are_settings_with_a_source() -> None:
    made = storm(gpu_hour=2.5, idle_watts=100, busy_watts=600)
    told = {(item["section"], item["key"]): (item["value"], item["source"]) for item in made.resolved["settings"]}
    assert told["price", "gpu_hour"] == (2.5, "gpu_hour=")
    assert told["price", "currency"] == ("USD", "windtunnel default")
    assert told["power", "busy_watts"] == (600.0, "busy_watts=")
    assert made.summary["cost_per_hour"] == 2.5
    assert made.summary["energy_kwh"] > 0


def test_without_a_price_there_is_no_money_and_no_setting_of_it() -> None:
    made = storm()
    assert {item["section"] for item in made.resolved["settings"]} & {"price", "power"} == set()
    assert made.summary["cost_per_hour"] is None
    assert made.summary["currency"] is None
    assert made.summary["recomputed_cost"] is None
    assert made.summary["recomputed_gpu_seconds"] > 0


@pytest.mark.parametrize(
    "price", [2.5, 3, "2.5", {"h100": 2.5, "l40s": 1.0}, "h100-sxm=2.5", ["l40s=1", "H100-SXM=2.5"], ["2.5"]]
)
def test_a_price_is_a_number_or_goes_by_the_gpu(price: Any) -> None:
    assert storm(gpu_hour=price).summary["cost_per_hour"] in (2.5, 3.0)


@pytest.mark.parametrize(
    ("price", "message"),
    [
        ("cheap", "gpu_hour = .*must be a number, or NAME=NUMBER"),
        *(
            (price, r"gpu_hour = .* must be a number from 0 to 1e\+12, or a table .* GPUs$")
            for price in (
                -1,
                float("nan"),
                float("inf"),
                True,
                {"h100-sxm": float("nan")},
                {"h100-sxm": "x"},
                ["nan"],
                [],
            )
        ),
        ({"l40s": 1.0}, "gpu_hour is given for L40S, but the GPU here is H100-SXM"),
        ({"l40": 1.0, "gpu9000": 2.0}, "unknown GPU 'gpu9000'"),
        (["2.5", "l40s=1"], "says a number for all GPUs and others by name"),
    ],
)
def test_a_price_that_cannot_be_meant_is_refused(price: Any, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        storm(gpu_hour=price)


def test_the_largest_price_and_power_still_make_numbers() -> None:
    assert schema.LARGEST_RATE == LARGEST_RATE
    made = storm(gpu_hour=LARGEST_RATE, idle_watts=0, busy_watts=LARGEST_RATE)
    json.dumps(made.summary, allow_nan=False)
    assert "nan" not in made.text().lower()


def test_one_power_without_the_other_is_refused() -> None:
    with pytest.raises(ScenarioError, match="busy_watts was given without idle_watts"):
        storm(busy_watts=600)


def test_a_gpu_of_a_replica_of_several_counts_each() -> None:
    made = storm(tensor_parallel_size=4, data_parallel_size=2, gpu_hour=2.0)
    assert made.summary["num_gpus"] == 8
    assert made.summary["cost_per_hour"] == 16.0
    assert made.summary["gpu_seconds"] == pytest.approx(8 * made.summary["duration"])


def test_flags_give_price_and_power(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--gpu-price", "b200=4", "--gpu-price", "h100-sxm=3", "--currency", "EUR"]
    flags += ["--idle-watts", "70", "--busy-watts", "700", "--num-prompts", "20", "-q", "--no-saturation"]
    assert main(["simulate", "chat-8b-h100", *flags, "-o", str(tmp_path / "run")]) in (0, 99)
    text = capsys.readouterr().out
    assert "Cost per hour:                           3 EUR" in text
    assert "kWh" in text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["cost_per_hour"] == 3.0


@pytest.mark.parametrize("records_format", ["parquet", "csv"])
def test_a_saved_run_has_the_same_bill(tmp_path: Path, records_format: Any) -> None:
    made = storm(gpu_hour=2.5, idle_watts=100, busy_watts=600)
    made.save(tmp_path / "run", records_format=records_format)
    loaded = wt.load_run(tmp_path / "run")
    assert loaded.statistics.economics == made.statistics.economics
    assert loaded.text() == made.text()


def test_a_run_saved_before_steps_knew_of_recomputation_says_that_it_is_not_known(tmp_path: Path) -> None:
    import pyarrow.csv as pc

    made = storm(gpu_hour=2.5)
    made.save(tmp_path / "run", records_format="csv")
    steps = pc.read_csv(tmp_path / "run" / "steps.csv").drop_columns(["recomputed_tokens", "decode_only_ns"])
    pc.write_csv(steps, tmp_path / "run" / "steps.csv")
    resolved = json.loads((tmp_path / "run" / "scenario.resolved.json").read_text())
    del resolved["rates"]
    (tmp_path / "run" / "scenario.resolved.json").write_text(json.dumps(resolved))
    loaded = wt.load_run(tmp_path / "run")
    assert loaded.summary["recomputed_gpu_seconds"] is None
    assert loaded.summary["p99_itl_without_preemption_ms"] is None
    assert loaded.summary["p99_itl_without_stalls_ms"] == made.summary["p99_itl_without_stalls_ms"]
    assert loaded.summary["cost_per_hour"] is None
    assert "GPU time of recomputation:               –" in loaded.text()


def documented_keys() -> list[str]:
    text = (REPO_ROOT / "docs" / "economics.md").read_text()
    table = text.partition("## Keys of the JSON summary")[2].partition("\n## ")[0]
    return [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]


def test_every_key_of_the_summary_is_documented_in_its_order() -> None:
    keys = list(storm(gpu_hour=2.5).summary)
    first, last = keys.index("num_gpus"), keys.index("worst_victims")
    assert documented_keys() == keys[first : last + 1]


def test_all_reports_tell_what_preemptions_cost(tmp_path: Path) -> None:
    made = storm(gpu_hour=2.5)
    own = made.statistics.economics.preemption
    assert own is not None
    rows = dict(preemption_rows(made.statistics.economics))
    assert rows["Computed tokens thrown away"] == f"{own.lost_tokens:,}"
    made.report(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    for text in (made.text(), made.markdown(), page):
        for label, value in {**rows, **dict(cost_rows(made.statistics.economics))}.items():
            assert label in text
            assert value in text
    assert "What preemptions cost" in made.text()
    assert f"#{own.pairs[0].request} for" in made.text()
    assert 'id="plot-stalls"' in page
    assert 'href="#cost"' in page


def test_the_command_prints_every_preemption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = storm()
    made.save(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--evictions"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    log = made.evictions
    assert len(lines) == len(log) == made.summary["preemptions"] > 0
    assert head.split()[:2] == ["time", "(s)"]
    first = next(log.itertuples())
    assert f"#{first.request}" in lines[0]
    assert f"{first.lost_tokens:,}" in lines[0]
    assert lines[0].endswith(f"{100 * first.usage_before:.1f} % {100 * first.usage_after:.1f} %")
    calm = storm(num_gpu_blocks_override=2000)
    calm.save(tmp_path / "calm")
    assert main(["report", str(tmp_path / "calm"), "--evictions"]) == 0
    assert capsys.readouterr().out == "No request was preempted.\n"
    assert main(["report", str(tmp_path / "run"), "--evictions", "--markdown"]) == 2


def test_the_figure_shows_the_share_of_longer_gaps() -> None:
    drawn = stall_figure(stalled_records())
    names = [trace["name"] for trace in drawn.data]
    assert names == ["as it was", "without own stalls", "without preemptions", "1 % (P99)"]
    assert max(drawn.data[0]["x"]) == pytest.approx(540.0)
    assert max(drawn.data[2]["x"]) == pytest.approx(10.0)
    assert all(y0 >= y1 for trace in drawn.data[:3] for y0, y1 in zip(trace["y"], trace["y"][1:], strict=False))


def test_a_watermark_saves_what_the_bill_says() -> None:
    """After vLLM's pull request 44594: a closed loop that asks for more than the cache holds, shortened."""
    runs = [
        wt.simulate("closed-loop-7b-b200", num_requests=300, watermark=watermark, saturation=False).summary
        for watermark in (0.0, 0.02)
    ]
    saved_s = runs[0]["busy_gpu_seconds"] - runs[1]["busy_gpu_seconds"]
    billed_s = runs[0]["recomputed_gpu_seconds"] - runs[1]["recomputed_gpu_seconds"]
    assert billed_s > 1.0
    assert billed_s == pytest.approx(saved_s, rel=0.1)
    assert runs[0]["p99_itl_ms"] > 5 * runs[0]["p99_itl_without_preemption_ms"]
    assert runs[0]["p99_itl_without_preemption_ms"] == pytest.approx(runs[1]["p99_itl_ms"], rel=0.02)
    assert runs[0]["slow_gaps_recomputing_share"] > 0.5


def test_records_of_all_policies_have_the_columns() -> None:
    load, config = pressed_engine()
    records = serve(load, System(config, COST, num_replicas=2))
    assert all(isinstance(replica, ReplicaRecords) for replica in records.replicas)
    assert [len(replica.steps.decode_only_ns) for replica in records.replicas] == [
        len(replica.steps) for replica in records.replicas
    ]
    assert {field.name for field in fields(Economics)} >= {"cost", "energy_kwh", "preemption"}
