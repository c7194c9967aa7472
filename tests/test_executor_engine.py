"""The engine: real tokens around the scheduler, whoever computes them."""

from __future__ import annotations

from typing import Any

import pytest
from cache_reader import CacheReader, continued
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import scheduler_configs

from windtunnel.executor.engine import Engine, Sequence, StepFailed, StepOutcome
from windtunnel.executor.filler import Filler
from windtunnel.executor.keys import DigestKeys
from windtunnel.executor.sampling import SamplingParams
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.keys import TokenKeys
from windtunnel.sim.engine.per_request import PerRequestScheduler, make_scheduler
from windtunnel.sim.engine.plan import StepPlan, StepResult
from windtunnel.sim.engine.request import Status
from windtunnel.sim.engine.scheduler import Scheduler
from windtunnel.sim.simulated import SimExecutor
from windtunnel.sim.speculation import Acceptance, Drafting

FILLER = Filler(
    range(100, 200), seed=3
)  # prompts whose whole need is not reserved may preempt each other for ever, as in vLLM
SIMULATED = SimExecutor(ConstantCost(0.001))
CONFIGS = scheduler_configs(scheduler_reserve_full_isl=True)  # else prompts may preempt each other for ever, as in vLLM


def config(**values: Any) -> SchedulerConfig:
    roomy = {"num_gpu_blocks": 100, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return SchedulerConfig(**{**roomy, "max_model_len": 200, **values})


def engine(executor: Any = SIMULATED, scheduler: Scheduler | None = None, **options: Any) -> Engine:
    return Engine(scheduler or Scheduler(config()), executor, FILLER, **options)


def run(under_test: Engine) -> list[StepOutcome]:
    """Step until nothing is left to do."""
    outcomes, now_ns = [], 0
    while (outcome := under_test.step(now_ns)) is not None:
        outcomes.append(outcome)
        now_ns = outcome.end_ns
    return outcomes


def assert_is_clean(under_test: Engine) -> None:
    scheduler = under_test.scheduler
    assert not under_test.sequences
    assert scheduler.num_requests == 0
    assert scheduler.pool.num_free == scheduler.config.num_usable_blocks


def greedy(max_tokens: int, **values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **values)


# -- answers


def test_equal_prompts_get_equal_answers_and_share_blocks():
    under_test = engine()
    first = under_test.add("a", range(20), greedy(9), 0)
    run(under_test)
    second = under_test.add("b", range(20), greedy(9), 0)
    run(under_test)
    assert first.output_token_ids == second.output_token_ids
    assert second.request.num_cached_tokens == 16
    assert len(set(first.output_token_ids)) > 3, "not the same token over and over"
    assert_is_clean(under_test)


def test_another_seed_makes_up_other_tokens():
    answers = []
    for seed in (1, 2):
        under_test = Engine(Scheduler(config()), SIMULATED, Filler(range(1000), seed))
        answers.append(under_test.add("a", [1, 2], greedy(8), 0))
        run(under_test)
    assert answers[0].output_token_ids != answers[1].output_token_ids


def test_a_prompt_that_holds_part_of_an_answer_goes_on_as_the_answer_did():
    """So that a conversation whose turns are sent again finds its blocks, as under greedy decoding."""
    under_test, prompt = engine(), [5, 6, 7]
    first = under_test.add("a", prompt, greedy(12), 0)
    run(under_test)
    for count in (1, 5, 11):
        again = under_test.add(count, [*prompt, *first.output_token_ids[:count]], greedy(12 - count), 0)
        run(under_test)
        assert again.output_token_ids == first.output_token_ids[count:]


@given(CONFIGS, st.data())
def test_made_up_answers_do_not_depend_on_the_schedule(limits, data):
    room = min(limits.max_model_len, limits.num_kv_tokens)
    lengths = st.tuples(st.integers(1, max(1, room // 2)), st.integers(1, 20))
    work = data.draw(st.lists(lengths, min_size=1, max_size=8))
    under_test, alone = engine(scheduler=Scheduler(limits)), engine(scheduler=Scheduler(config(num_gpu_blocks=200)))
    pairs = []
    for i, (num_prompt, num_output) in enumerate(work):
        prompt = [1 + i % 3] * min(num_prompt, 100)
        if len(prompt) + num_output > room:
            continue
        pairs.append((under_test.add(i, prompt, greedy(num_output), 0), alone.add(i, prompt, greedy(num_output), 0)))
    run(under_test)
    run(alone)
    assert [a.token_ids for a, _ in pairs] == [b.token_ids for _, b in pairs]
    assert all(a.finish_reason == "length" for a, _ in pairs)
    assert_is_clean(under_test)


@pytest.mark.parametrize("kind", [Scheduler, PerRequestScheduler])
@given(limits=CONFIGS, seed=st.integers(0, 99))
def test_a_real_executor_reads_what_was_written_for_it(kind, limits, seed):
    """Grants, positions and block ids fit together, under preemption, chunking and prefix hits."""
    room = min(limits.max_model_len, limits.num_kv_tokens)
    under_test = engine(CacheReader(limits), kind(limits))
    sequences = []
    for i in range(8):
        prompt = [7] * ((seed + 5 * i) % 30) + [8, i % 3]
        if len(prompt) + 12 <= room:
            sequences.append(under_test.add(i, prompt, greedy(12), 0, priority=i % 2))
    run(under_test)
    for sequence in sequences:
        prompt = sequence.token_ids[: sequence.request.num_prompt_tokens]
        assert sequence.output_token_ids == continued(prompt, 12)
    assert_is_clean(under_test)


def test_the_outcome_of_a_step_tells_who_got_what():
    under_test = engine()
    a, b = under_test.add("a", [1] * 5, greedy(2), 0), under_test.add("b", [2] * 6, greedy(1), 0)
    first, second = run(under_test)
    assert [(output.sequence, len(output.token_ids)) for output in first.outputs] == [(a, 1), (b, 1)]
    assert first.finished == [b]
    assert second.finished == [a]
    assert (first.begin_ns, first.end_ns, second.end_ns) == (0, 1_000_000, 2_000_000)
    assert under_test.step(5) is None


@pytest.mark.parametrize(
    ("kind", "values", "work"),
    [
        (Scheduler, {"num_gpu_blocks": 9, "max_model_len": 20}, [(6, 6), (5, 4)]),
        (PerRequestScheduler, {"num_gpu_blocks": 5, "max_model_len": 30}, [(4, 5), (4, 5)]),
    ],
)
def test_the_outcome_tells_the_preemptions_of_decisions_that_only_preempt(kind, values, work):
    limits = config(block_size=2, policy="priority", scheduler_reserve_full_isl=True, **values)
    under_test = engine(scheduler=kind(limits))
    sequences = [under_test.add(i, [i] * num_prompt, greedy(num), 0) for i, (num_prompt, num) in enumerate(work)]
    outcomes = run(under_test)
    assert sum(len(outcome.preemptions) for outcome in outcomes) == sum(s.request.num_preemptions for s in sequences)
    assert any(len(outcome.preemptions) > len(outcome.plan.preemptions) for outcome in outcomes), "one only preempts"


# -- how answers end


def answer(prompt: list[int], params: SamplingParams, **options: Any) -> Sequence:
    limits = config()
    under_test = engine(CacheReader(limits), Scheduler(limits), **options)
    sequence = under_test.add("a", prompt, params, 0)
    run(under_test)
    assert_is_clean(under_test)
    return sequence


def test_the_models_own_end_token_ends_an_answer():
    expected = continued([5], 10)
    ended = answer([5], greedy(10), eos_token_ids=[expected[3]])
    assert ended.output_token_ids == expected[:4]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)


def test_an_answer_may_ignore_the_end_token():
    expected = continued([5], 10)
    ended = answer([5], greedy(10, ignore_eos=True), eos_token_ids=[expected[3]])
    assert (ended.output_token_ids, ended.finish_reason) == (expected, "length")


def test_a_stop_token_ends_an_answer_and_says_which():
    expected = continued([5], 10)
    ended = answer([5], greedy(10, stop_token_ids=(expected[0], 12345)))
    assert ended.output_token_ids == expected[:1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", expected[0])


def test_nothing_ends_an_answer_before_min_tokens():
    expected = continued([5], 10)
    ended = answer([5], greedy(10, stop_token_ids=tuple(expected), min_tokens=6))
    assert ended.output_token_ids == expected[:6]


def test_a_stop_token_that_comes_last_counts_as_stop():
    expected = continued([5], 4)
    assert answer([5], greedy(4, stop_token_ids=(expected[3],))).finish_reason == "stop"


@pytest.mark.parametrize("kind", [Scheduler, PerRequestScheduler])
def test_an_early_end_makes_room_for_the_next(kind):
    limits = config(max_num_seqs=1, max_num_batched_tokens=16)
    under_test = engine(CacheReader(limits), kind(limits), eos_token_ids=[continued([5], 3)[2]])
    under_test.add("a", [5], greedy(50), 0)
    waiting = under_test.add("b", [6], greedy(1), 0)
    outcomes = run(under_test)
    assert len(outcomes) == 4
    assert outcomes[3].finished == [waiting]


def test_drafts_give_several_tokens_a_step_and_the_same_answer():
    limits = config(num_speculative_tokens=3)
    drafting = Drafting(Acceptance.fixed(0.8, 3), 3)
    under_test = engine(SimExecutor(ConstantCost(0.001), drafting=drafting), make_scheduler(limits))
    drafted = under_test.add(0, [1, 2, 3], greedy(40), 0)
    num_steps = len(run(under_test))
    plain = engine()
    expected = plain.add("a", [1, 2, 3], greedy(40), 0)
    assert num_steps < len(run(plain))
    assert drafted.output_token_ids == expected.output_token_ids


# -- coming and going


@given(
    CONFIGS,
    st.lists(st.integers(0, 7), min_size=1, max_size=20),
    st.integers(0, 5),
)
def test_aborting_anybody_at_any_time_leaks_nothing(limits, victims, every):
    under_test = engine(CacheReader(limits), Scheduler(limits))
    room = min(limits.max_model_len, limits.num_kv_tokens)
    sequences = [under_test.add(i, [3] * 4 + [i], greedy(5), 0) for i in range(8 if room >= 10 else 0)]
    for number, victim in enumerate(victims):
        if sequences:
            was_over = sequences[victim].finish_reason is not None
            assert under_test.abort(sequences[victim]) is not was_over
        if number % (every + 1) == 0:
            under_test.step(0)
    run(under_test)
    assert_is_clean(under_test)
    assert {sequence.finish_reason for sequence in sequences} <= {"abort", "length"}


class Broken:
    """Fails in the steps with these numbers."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.number in self.numbers:
            raise RuntimeError("the device fell off the bus")
        return StepResult(1_000)


@pytest.mark.parametrize("kind", [Scheduler, PerRequestScheduler])
def test_a_step_that_fails_takes_its_own_requests_along_and_no_others(kind):
    under_test = engine(Broken(1), kind(config(max_num_seqs=2)))
    hit = [under_test.add(i, [1, 2, 3], greedy(5), 0) for i in range(2)]
    waiting = under_test.add("later", [4], greedy(5), 0)
    under_test.step(0)
    with pytest.raises(StepFailed, match="step 1 failed: the device fell off the bus") as failure:
        under_test.step(1)
    assert failure.value.sequences == hit
    assert [sequence.finish_reason for sequence in hit] == ["error", "error"]
    run(under_test)
    assert (waiting.finish_reason, waiting.num_output_tokens) == ("length", 5)
    assert_is_clean(under_test)


class SamplesForNobody:
    def adopt(self, view: object) -> int:
        return 0

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(1, sampled=[])


def test_an_executor_that_forgets_a_request_is_caught():
    under_test = engine(SamplesForNobody())
    under_test.add("a", [1], greedy(5), 0)
    with pytest.raises(StepFailed, match="the step yields one each for"):
        under_test.step(0)
    assert_is_clean(under_test)


def test_what_the_engine_refuses_changes_nothing():
    under_test = engine(scheduler=Scheduler(config(num_gpu_blocks=6, max_model_len=200)))
    for prompt, params, told in (
        ([], greedy(1), "the prompt is empty"),
        ([1] * 10, greedy(12), "may grow to 21 tokens, but the KV cache holds 20"),
    ):
        with pytest.raises(ValueError, match=told):
            under_test.add("a", prompt, params, 0)
    with pytest.raises(ValueError, match="leaves no room"):
        engine().add("a", [1] * 200, greedy(1), 0)
    assert_is_clean(under_test)
    under_test.add("fits", [1] * 10, greedy(11), 0)
    assert run(under_test)[-1].finished[0].request.status == Status.FINISHED


def test_schedulers_that_decide_ahead_are_refused():
    with pytest.raises(ValueError, match="up to 2 steps at once"):
        engine(scheduler=Scheduler(config(async_scheduling=True)))


def test_real_executors_and_drafts_do_not_go_together():
    limits = config(num_speculative_tokens=2)
    under_test = engine(SimExecutor(ConstantCost(0.001)), make_scheduler(limits))
    with pytest.raises(ValueError, match="verify no drafts"):
        under_test.swap(CacheReader(limits))
    assert isinstance(under_test.executor, SimExecutor)


# -- identity of blocks


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 2), max_size=60), st.integers(1, 5))
def test_digests_are_equal_exactly_where_interned_keys_are(a, b, size):
    interned: dict[Any, int] = {}
    expected = [TokenKeys(t.__getitem__, size, interned).between(0, len(t) // size) for t in (a, b)]
    actual = [DigestKeys(t, size).between(0, len(t) // size) for t in (a, b)]
    assert [[x == y for y in actual[1]] for x in actual[0]] == [[x == y for y in expected[1]] for x in expected[0]]


def test_salted_requests_share_blocks_with_their_like_only():
    under_test, hits = engine(), []
    for salt in ("x", "x", "y", None, None):
        hits.append(under_test.add("a", range(9), greedy(1), 0, cache_salt=salt))
        run(under_test)
    assert [sequence.request.num_cached_tokens for sequence in hits] == [0, 8, 0, 0, 8]


@settings(max_examples=20)
@given(scheduler_configs(enable_prefix_caching=True, scheduler_reserve_full_isl=True), st.integers(0, 50))
def test_decisions_are_those_with_interned_keys(limits, seed):
    """The engine's keys and its tokens make the scheduler do what it does in a simulation with real token ids."""
    room = min(limits.max_model_len, limits.num_kv_tokens)
    plans: list[list[Any]] = []
    for interns in (False, True):
        under_test, interned = engine(scheduler=Scheduler(limits)), dict[Any, int]()
        for i in range(10):
            prompt = [1] * ((seed * i) % 25) + [2, i]
            if len(prompt) + 15 > room:
                continue
            sequence = under_test.add(i, prompt, greedy(15), 0)
            if interns:
                sequence.request.keys = TokenKeys(sequence.token_ids.__getitem__, limits.block_size, interned)
        plans.append([(o.plan.shape, [tuple(a)[1:] for a in o.plan.admissions]) for o in run(under_test)])
    assert plans[0] == plans[1]


def test_a_finished_request_leaves_nothing_behind():
    under_test = engine()
    for i in range(2000):
        under_test.add(i, [i % 500, i // 500, 3, 4, 5], greedy(3), 0)
        if i % 8 == 7:
            run(under_test)
    assert_is_clean(under_test)
    assert under_test.scheduler.pool.num_keys <= under_test.scheduler.config.num_usable_blocks


# -- made-up answers that end


@pytest.mark.parametrize("eos", [(), (7, 9)])
def test_a_made_up_answer_ends_after_the_tokens_that_were_set(eos):
    under_test = engine(eos_token_ids=eos)
    ended = under_test.add("a", range(10), greedy(150), 0, ends_after=12)
    free = under_test.add("b", range(10), greedy(150), 0)
    run(under_test)
    assert (ended.num_output_tokens, ended.finish_reason) == (12, "stop")
    assert (free.num_output_tokens, free.finish_reason) == (150, "length")
    assert ended.output_token_ids[:11] == free.output_token_ids[:11]
    assert ended.output_token_ids[11] == (eos[0] if eos else free.output_token_ids[11]), "as if the model had ended it"
    assert_is_clean(under_test)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"ignore_eos": True}, (40, "length")),
        ({"min_tokens": 20}, (20, "stop")),
        ({"max_tokens": 5}, (5, "length")),
        ({"max_tokens": 12}, (12, "stop")),
    ],
)
def test_the_limits_of_a_request_go_before_the_length_of_made_up_answers(values, expected):
    under_test = engine(eos_token_ids=(7,))
    params = SamplingParams(**{"max_tokens": 40, "temperature": 0.0, **values})
    sequence = under_test.add("a", range(10), params, 0, ends_after=12)
    run(under_test)
    assert (sequence.num_output_tokens, sequence.finish_reason) == expected


def test_a_model_that_is_swapped_in_ends_its_answers_itself():
    under_test = engine()
    sequence = under_test.add("a", range(10), greedy(30), 0, ends_after=12)
    for _ in range(5):
        under_test.step(0)
    under_test.swap(CacheReader(under_test.scheduler.config))
    for _ in range(15):
        under_test.step(0)
    assert sequence.num_output_tokens == 20
    under_test.swap(SIMULATED)
    run(under_test)
    assert (sequence.num_output_tokens, sequence.finish_reason) == (21, "stop"), "made up again, and too long already"


def test_drafts_do_not_go_beyond_the_end_of_a_made_up_answer():
    limits = config(num_speculative_tokens=3)
    drafting = Drafting(Acceptance.fixed(1.0, 3), 3)
    under_test = engine(SimExecutor(ConstantCost(0.001), drafting=drafting), make_scheduler(limits), eos_token_ids=(7,))
    sequence = under_test.add(0, range(10), greedy(100), 0, ends_after=6)
    run(under_test)
    assert (sequence.num_output_tokens, sequence.output_token_ids[-1]) == (6, 7)
    assert_is_clean(under_test)
