"""Speculative decoding in simulated time: acceptance as it was asked for, counts that agree, known numbers of steps."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import scheduler_configs, workloads

from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.per_request import make_scheduler
from windtunnel.sim.engine.plan import StepPlan, StepResult, StepShape
from windtunnel.sim.engine.request import Request
from windtunnel.sim.records import Records
from windtunnel.sim.simulate import run, serve
from windtunnel.sim.simulated import SimExecutor
from windtunnel.sim.speculation import Acceptance, DraftCost, Drafting, FixedDraftCost
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload, workload

MS = 1_000_000
S = 1_000_000_000
STEP = ConstantCost(0.01)
METHODS = ["ngram", "eagle3", "draft_model"]
BOTH = pytest.mark.parametrize("is_async", [False, True])


def engine(num_drafts: int, **changes: Any) -> SchedulerConfig:
    roomy = {"num_gpu_blocks": 100_000, "max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 50_000}
    return SchedulerConfig(**{**roomy, "num_speculative_tokens": num_drafts, "spec_method": "eagle3", **changes})


def speculating(acceptance: Acceptance, num_drafts: int, seed: int = 0, **changes: Any) -> System:
    return System(engine(num_drafts, **changes), STEP, drafting=Drafting(acceptance, num_drafts, seed=seed))


def alone(num_output_tokens: int, num_prompt_tokens: int = 20) -> Workload:
    return workload([0], [num_prompt_tokens], [num_output_tokens])


def rates_of(records: Records) -> np.ndarray:
    """Share of the verified drafts of which the first 1, 2, … tokens held."""
    drafts = records.replicas[0].drafts
    return drafts.num_accepted / drafts.num_verified[0]


# -- the acceptance model


@given(st.floats(0, 1), st.integers(0, 8))
def test_a_fixed_rate_holds_in_a_row(rate: float, num_drafts: int) -> None:
    acceptance = Acceptance.fixed(rate, num_drafts)
    assert acceptance.rates == pytest.approx([rate ** (position + 1) for position in range(num_drafts)])
    assert acceptance.mean_length == pytest.approx(1 + sum(rate**i for i in range(1, num_drafts + 1)))


@given(st.integers(1, 8), st.data())
def test_a_recording_gives_back_its_own_histogram(num_drafts: int, data: st.DataObject) -> None:
    recording = data.draw(st.lists(st.integers(0, num_drafts), min_size=1, max_size=60))
    acceptance, total = Acceptance.recorded(recording, num_drafts), len(recording)
    assert acceptance.mean_length == pytest.approx(1 + np.mean(recording))
    chances = (np.arange(total) + 0.5) / total  # each quantile once
    drawn = sorted(acceptance.num_accepted(chance) for chance in chances)
    assert drawn == sorted(recording)


@given(st.integers(1, 8), st.floats(0, 1))
def test_a_length_is_spread_as_little_as_can_be(num_drafts: int, share: float) -> None:
    length = 1 + share * num_drafts
    acceptance = Acceptance.of_length(length, num_drafts)
    assert acceptance.mean_length == pytest.approx(length)
    assert sum(0 < rate < 1 for rate in acceptance.rates) <= 1


def test_a_length_gives_the_rates_that_vllm_gives() -> None:
    assert Acceptance.of_length(2.5, 4).rates == (1.0, 0.5, 0.0, 0.0)
    assert Acceptance.of_length(1.0, 2).rates == (0.0, 0.0)
    assert Acceptance.of_length(3.0, 2).rates == (1.0, 1.0)


@given(st.lists(st.floats(0, 1), max_size=6), st.floats(0, 1, exclude_max=True))
def test_a_smaller_chance_never_accepts_less(rates: list[float], chance: float) -> None:
    acceptance = Acceptance(tuple(sorted(rates, reverse=True)))
    assert acceptance.num_accepted(chance / 2) >= acceptance.num_accepted(chance)
    assert 0 <= acceptance.num_accepted(chance) <= len(rates)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Acceptance((0.5, 1.5)), "between 0 and 1, got 1.5 at position 1"),
        (lambda: Acceptance((-0.1,)), "between 0 and 1, got -0.1 at position 0"),
        (lambda: Acceptance((float("nan"),)), "between 0 and 1, got nan"),
        (lambda: Acceptance((0.4, 0.6)), "must not rise, got 0.4 and then 0.6"),
        (lambda: Acceptance.fixed(1.5, 3), "between 0 and 1, got 1.5"),
        (lambda: Acceptance.fixed(float("nan"), 3), "between 0 and 1, got nan"),
        (lambda: Acceptance.recorded([], 3), "is empty"),
        (lambda: Acceptance.recorded([1, 4], 3), r"draft 1 of the recording has 4 accepted tokens.*\(3\)"),
        (lambda: Acceptance.recorded([-1], 3), "draft 0 of the recording has -1"),
        (lambda: Acceptance.of_length(0.5, 3), r"between 1 and num_speculative_tokens \+ 1 \(4\), got 0.5"),
        (lambda: Acceptance.of_length(4.5, 3), "got 4.5"),
        (lambda: Acceptance.of_length(float("nan"), 3), "got nan"),
    ],
)
def test_what_is_no_acceptance_says_why(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


# -- what comes out of a run


@BOTH
@pytest.mark.parametrize("rate", [0.3, 0.7, 0.9])
def test_a_fixed_rate_accepts_as_many_as_it_says(rate: float, is_async: bool) -> None:
    system = speculating(Acceptance.fixed(rate, 4), 4, async_scheduling=is_async)
    work = workload(np.zeros(30), np.full(30, 20), np.full(30, 400))
    records = serve(work, system)
    want = np.array([rate**position for position in (1, 2, 3, 4)])
    num_drafts = int(records.replicas[0].drafts.num_verified[0])
    error = np.sqrt(want * (1 - want) / num_drafts)
    assert num_drafts > 2000
    assert (np.abs(rates_of(records) - want) < 4 * error).all()


@BOTH
def test_rates_per_position_come_out_as_given(is_async: bool) -> None:
    given_rates = (0.9, 0.5, 0.45)
    records = serve(
        workload(np.zeros(30), np.full(30, 20), np.full(30, 400)),
        speculating(Acceptance(given_rates), 3, async_scheduling=is_async),
    )
    assert rates_of(records) == pytest.approx(given_rates, abs=0.03)


def test_seeds_differ_and_repeat() -> None:
    work = workload(np.zeros(4), np.full(4, 20), np.full(4, 200))
    ends = [serve(work, speculating(Acceptance.fixed(0.6, 3), 3, seed=seed)).end_ns for seed in (0, 0, 1, 2)]
    assert ends[0] == ends[1]
    assert len(set(ends)) > 1


@BOTH
@given(st.integers(1, 60), st.integers(1, 5))
def test_perfect_drafts_need_one_step_for_k_plus_one_tokens(is_async: bool, num_tokens: int, k: int) -> None:
    records = serve(alone(num_tokens), speculating(Acceptance.fixed(1.0, k), k, async_scheduling=is_async))
    num_steps = 1 + ceil((num_tokens - 1) / (k + 1))  # the prompt's step yields the first token and no more
    assert records.requests.finish_ns.tolist() == [num_steps * 10 * MS]
    assert records.requests.num_output_tokens.tolist() == [num_tokens]
    assert int(records.replicas[0].spans.count.sum()) == num_steps


@given(st.integers(1, 60), st.integers(1, 5))
def test_useless_drafts_change_no_time(num_tokens: int, k: int) -> None:
    plain = run(alone(num_tokens), engine(0), STEP)
    drafted = serve(alone(num_tokens), speculating(Acceptance.fixed(0.0, k), k))
    for name in ("first_token_ns", "finish_ns", "num_output_tokens"):
        assert getattr(plain.requests, name).tolist() == getattr(drafted.requests, name).tolist()
    assert int(drafted.replicas[0].drafts.num_accepted.sum()) == 0


@BOTH
def test_in_a_crowd_useless_drafts_give_one_token_a_step(is_async: bool) -> None:
    rng = np.random.default_rng(5)
    work = workload(np.sort(rng.integers(0, S, 40)), rng.integers(1, 300, 40), rng.integers(1, 80, 40))
    plain = run(work, engine(0, async_scheduling=is_async), STEP)
    drafted = serve(work, speculating(Acceptance.fixed(0.0, 2), 2, async_scheduling=is_async))
    assert plain.requests.finish_ns.tolist() == drafted.requests.finish_ns.tolist()


@given(st.data())
def test_counts_agree(data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 4))
    config = data.draw(
        scheduler_configs(
            num_speculative_tokens=k,
            spec_method=data.draw(st.sampled_from(METHODS)),
            async_scheduling=data.draw(st.booleans()),
        )
    )
    rates = sorted(data.draw(st.lists(st.sampled_from([0.0, 0.3, 0.8, 1.0]), min_size=k, max_size=k)), reverse=True)
    work = data.draw(workloads(config))
    records = serve(work, System(config, STEP, drafting=Drafting(Acceptance(tuple(rates)), k)), horizon_ns=20 * S)
    table, replica = records.requests, records.replicas[0]
    steps, drafts = replica.steps, replica.drafts
    assert len(drafts) <= k
    assert steps.num_draft_tokens.sum() == drafts.num_verified.sum()
    assert steps.num_accepted_tokens.sum() == drafts.num_accepted.sum()
    assert (steps.num_accepted_tokens <= steps.num_draft_tokens).all()
    assert (np.diff(drafts.num_verified) <= 0).all()
    assert (np.diff(drafts.num_accepted) <= 0).all()
    spans = np.zeros(len(work), np.int64)
    np.add.at(spans, replica.spans.request, replica.spans.count)
    assert (spans <= table.num_output_tokens).all()
    assert (table.num_output_tokens <= spans * (1 + k)).all()
    assert (table.num_output_tokens <= work.num_output_tokens).all()
    # what was accepted was given, but for what lies behind the end of an answer (and of drafts that a preemption drops)
    num_extra = int((table.num_output_tokens - spans).sum())
    assert num_extra <= steps.num_accepted_tokens.sum()


class Watching(SimExecutor):
    """Keeps the places at which drafts were verified, and what became of them."""

    def __init__(self, drafting: Drafting) -> None:
        super().__init__(STEP, drafting=drafting)
        self.places: list[tuple[int, int]] = []
        self.padded: list[int] = []
        self.accepted: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        assert result.speculated is not None
        for chunk in plan.chunks:
            if plan.num_drafts.get(chunk.request) and chunk.request not in plan.padded:
                self.places.append((int(chunk.request.request_id), chunk.num_computed_tokens))
                self.accepted.append(result.speculated.num_accepted[chunk.request])
                assert self.accepted[-1] <= plan.num_drafts[chunk.request]
        self.padded += [plan.num_drafts[request] for request in plan.padded]
        assert not set(plan.padded) & set(result.speculated.num_accepted)
        return result


@BOTH
@given(st.data())
def test_every_draft_is_drawn_at_a_place_of_its_own(is_async: bool, data: st.DataObject) -> None:
    config = engine(3, async_scheduling=is_async, max_num_seqs=4, max_num_batched_tokens=64)
    n = data.draw(st.integers(1, 8))
    lengths = st.lists(st.integers(1, 40), min_size=n, max_size=n)
    work = workload(np.zeros(n), data.draw(lengths), data.draw(lengths))
    executor = Watching(Drafting(Acceptance.fixed(data.draw(st.sampled_from([0.0, 0.5, 1.0])), 3), 3))
    records = run(work, config, STEP, executor=executor)
    assert len(set(executor.places)) == len(executor.places)
    drafts = records.replicas[0].drafts
    assert int(drafts.num_accepted.sum()) <= sum(executor.accepted)
    assert int(drafts.num_verified[:1].sum()) <= len(executor.places) + len(executor.padded)


def test_drafts_that_only_fill_the_batch_count_as_rejected_as_in_vllm() -> None:
    # the second prompt is one token next to a running decode: its drafts are padding, and none of them holds
    config = engine(3, spec_method="ngram")
    executor = Watching(Drafting(Acceptance.fixed(1.0, 3), 3))
    records = run(workload([0, 15 * MS], [20, 1], [9, 1]), config, STEP, executor=executor)
    assert executor.padded == [3]
    steps = records.replicas[0].steps
    assert steps.num_draft_tokens.tolist() == [0, 3, 6]
    assert steps.num_accepted_tokens.tolist() == [0, 3, 3]
    assert records.requests.num_output_tokens.tolist() == [9, 1]


def test_a_request_holds_the_same_drafts_whoever_runs_beside_it() -> None:
    system = speculating(Acceptance.fixed(0.6, 3), 3)
    lonely = serve(alone(300), system)
    crowd = serve(workload(np.zeros(5), np.full(5, 20), [300, 50, 60, 200, 10]), system)
    for records in (lonely, crowd):
        assert records.requests.num_output_tokens[0] == 300
    assert lonely.requests.finish_ns[0] == crowd.requests.finish_ns[0]


def test_drafts_of_a_request_that_is_over_do_not_count() -> None:
    # asynchronous: the last step was decided before the one before it was known to complete the answer
    records = serve(alone(9), speculating(Acceptance.fixed(1.0, 3), 3, async_scheduling=True))
    steps = records.replicas[0].steps
    assert records.requests.finish_ns.tolist() == [30 * MS]
    assert steps.end_ns.tolist() == [10 * MS, 20 * MS, 30 * MS, 40 * MS]
    assert steps.num_draft_tokens.tolist() == [0, 3, 3, 0]


@BOTH
@given(st.integers(1, 80), st.sampled_from([0.0, 0.4, 0.9]), st.integers(1, 4))
def test_what_was_accepted_was_given(is_async: bool, num_tokens: int, rate: float, k: int) -> None:
    records = serve(alone(num_tokens), speculating(Acceptance.fixed(rate, k), k, async_scheduling=is_async))
    num_steps = int(records.replicas[0].spans.count.sum())
    num_behind_the_end = int(records.replicas[0].steps.num_accepted_tokens.sum()) - (num_tokens - num_steps)
    assert 0 <= num_behind_the_end <= k


# -- what drafting costs


class Priced:
    """A drafter whose passes cost 1 s for each sequence and 100 s for each token, and that says what it was asked."""

    name, calibrated = "priced", False

    def __init__(self) -> None:
        self.asked: list[StepShape] = []

    def step_time_s(self, shape: StepShape) -> float:
        self.asked.append(shape)
        return shape.num_decode_seqs + 100.0 * shape.num_tokens

    def describe(self) -> dict[str, Any]:
        return {}


def test_a_drafter_passes_over_the_step_and_then_adds_a_token_at_a_time() -> None:
    drafter = Priced()
    shape = StepShape(2, 100, 3, 12, 50, 200, 5)
    assert DraftCost(drafter, 4).time_s(shape) == (2 + 100 * 14) + 3 * (5 + 100 * 5)
    first, later = drafter.asked[1], drafter.asked[0]
    assert first.prefill_tokens == 12
    assert (later.num_decode_seqs, later.decode_context_tokens, later.prefill_tokens) == (5, 162, 0)
    assert DraftCost(drafter, 1).time_s(shape) == 2 + 100 * 14


def test_drafting_adds_its_time_to_every_step() -> None:
    config, acceptance = engine(2), Acceptance.fixed(0.5, 2)
    free, dear = (
        serve(alone(50), System(config, STEP, drafting=Drafting(acceptance, 2, cost)))
        for cost in (None, FixedDraftCost(0.002))
    )
    steps = [records.replicas[0].steps for records in (free, dear)]
    assert len(steps[0]) == len(steps[1])
    assert set((steps[1].end_ns - steps[1].start_ns).tolist()) == {12 * MS}
    assert set((steps[0].end_ns - steps[0].start_ns).tolist()) == {10 * MS}


def test_the_longer_draft_pays_only_if_it_holds() -> None:
    cost = AffineCost(base_s=0.01, token_s=1e-4)

    def finish_s(rate: float, k: int) -> float:
        system = System(engine(k), cost, drafting=Drafting(Acceptance.fixed(rate, k), k) if k else None)
        return float(serve(alone(500), system).requests.finish_ns[0]) / S

    assert finish_s(0.9, 4) < finish_s(0.9, 1) < finish_s(0.9, 0)
    assert finish_s(0.0, 4) > finish_s(0.0, 0)


def test_drafts_without_anybody_who_says_how_they_fare_are_refused() -> None:
    scheduler = make_scheduler(engine(2))
    scheduler.add(Request(0, 0, 5, 5))
    executor = Watching(Drafting(Acceptance.fixed(1.0, 2), 2))
    plan = scheduler.schedule(0)
    scheduler.commit(plan, 1, executor.execute(plan).speculated)
    with pytest.raises(ValueError, match="give a drafting"):
        SimExecutor(STEP).execute(scheduler.schedule(1))
