"""Executors may be exchanged between any two steps of a run, and nothing but the tokens tells the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from cache_reader import CacheReader, next_token
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import scheduler_configs

from windtunnel.executor.engine import Engine, RealExecutor, StepOutcome
from windtunnel.executor.filler import Filler
from windtunnel.executor.sampling import SamplingParams
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.per_request import PerRequestScheduler
from windtunnel.sim.engine.protocols import Executor
from windtunnel.sim.engine.scheduler import Scheduler
from windtunnel.sim.simulated import SimExecutor

STEP_NS = 1_000_000
FILLER = Filler(range(100, 300))
CONFIGS = scheduler_configs(scheduler_reserve_full_isl=True)  # else prompts may preempt each other for ever, as in vLLM
NextToken = Callable[[Sequence[int]], int]


def simulated() -> SimExecutor:
    return SimExecutor(ConstantCost(STEP_NS / 1e9))


def signature(outcome: StepOutcome) -> tuple[Any, ...]:
    """All of a step that is decided."""
    plan = outcome.plan
    return (
        plan.number,
        plan.shape,
        [(a.request.request_id, a.num_cached_tokens, a.resumed) for a in plan.admissions],
        [(c.request.request_id, *c[1:]) for c in plan.chunks],
        [request.request_id for request in plan.grown],
        [(p.request.request_id, p.num_computed_tokens) for p in outcome.preemptions],
        [(o.sequence.request.request_id, list(o.sequence.request.block_ids)) for o in outcome.outputs],
    )


class Work:
    """Prompts that share beginnings and are never equal, with gaps between them in steps."""

    def __init__(self, limits: SchedulerConfig, lengths: list[tuple[int, int, int]], vocab: int = 500) -> None:
        room = min(limits.max_model_len, limits.num_kv_tokens)
        self.prompts = [
            (gap, [5 + i % 2] * num_prompt + [10 + i, vocab - 1 - i], num_output)
            for i, (gap, num_prompt, num_output) in enumerate(lengths)
            if num_prompt + 2 + num_output <= room
        ]

    def run(self, engine: Engine, before_step: Callable[[int], None] = lambda _: None) -> list[StepOutcome]:
        """Run all of it; ``before_step(number)`` may exchange the executor."""
        outcomes: list[StepOutcome] = []
        waiting = list(enumerate(self.prompts))
        due = 0
        while waiting or engine.sequences:
            while waiting and due <= len(outcomes):
                i, (gap, prompt, num_output) = waiting.pop(0)
                params = SamplingParams(num_output, temperature=0.0, ignore_eos=True)
                engine.add(i, prompt, params, 0, priority=i % 3)
                due += gap
            before_step(len(outcomes))
            outcome = engine.step(len(outcomes) * STEP_NS)
            if outcome is None:
                assert waiting, "what is in the engine never ends"
                due = len(outcomes)
                continue
            outcomes.append(outcome)
        return outcomes


WORK = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=10)


def check_continuations(engine: Engine, outcomes: list[StepOutcome], real_steps: list[bool], model: NextToken) -> int:
    """Each token that a real executor gave is the model's after all tokens before it; returns their number."""
    seen: dict[Any, list[int]] = {}
    num_checked = 0
    for outcome, is_real in zip(outcomes, real_steps, strict=True):
        for sequence, token_ids in outcome.outputs:
            num_prompt = sequence.request.num_prompt_tokens
            known = seen.setdefault(sequence, sequence.token_ids[:num_prompt])
            if is_real:
                assert token_ids == [model(known)]
                num_checked += 1
            known += token_ids
    assert not engine.sequences
    return num_checked


@pytest.mark.parametrize("kind", [Scheduler, PerRequestScheduler])
@given(
    limits=CONFIGS,
    lengths=WORK,
    pattern=st.lists(st.integers(0, 3), min_size=1, max_size=12),
)
def test_executors_alternate_and_the_plans_stay_those_of_the_simulation(kind, limits, lengths, pattern):
    """Simulated, a real executor that stays, another one that stays, and one that is new for a single step."""
    work = Work(limits, lengths)
    expected = [signature(outcome) for outcome in work.run(Engine(kind(limits), simulated(), FILLER))]

    staying: list[Executor] = [simulated(), CacheReader(limits, STEP_NS), CacheReader(limits, STEP_NS)]
    engine = Engine(kind(limits), staying[0], FILLER)
    was_real: list[bool] = []

    def exchange(number: int) -> None:
        choice = pattern[number % len(pattern)]
        executor = staying[choice] if choice < 3 else CacheReader(limits, STEP_NS)
        if executor is not engine.executor:
            engine.swap(executor)
        if len(was_real) > number:
            was_real.pop()  # the step before was empty
        was_real.append(isinstance(executor, RealExecutor))

    outcomes = work.run(engine, exchange)
    assert [signature(outcome) for outcome in outcomes] == expected
    check_continuations(engine, outcomes, was_real[: len(outcomes)], next_token)
    assert engine.scheduler.pool.num_free == limits.num_usable_blocks


def test_a_real_executor_swapped_in_computes_the_running_requests_and_nothing_else():
    limits = SchedulerConfig(max_num_seqs=2, num_gpu_blocks=50, block_size=4, max_model_len=100)
    engine = Engine(Scheduler(limits), simulated(), FILLER)
    for i, num_prompt in enumerate((10, 5, 7)):
        engine.add(i, [i] * num_prompt, SamplingParams(20), 0)
    for _ in range(3):
        engine.step(0)
    assert engine.swap(CacheReader(limits)) == (10 + 2) + (5 + 2)


def test_prefix_blocks_that_were_only_simulated_are_caught_up():
    limits = SchedulerConfig(max_num_seqs=2, num_gpu_blocks=50, block_size=4, max_model_len=100)
    engine, reader = Engine(Scheduler(limits), simulated(), FILLER), CacheReader(limits)
    engine.add(0, [7] * 20, SamplingParams(2), 0)
    while engine.step(0):
        pass
    assert engine.swap(reader) == 0
    hit = engine.add(1, [7] * 20 + [8], SamplingParams(3, temperature=0.0), 0)
    while engine.step(0):
        pass
    assert hit.request.num_cached_tokens == 20
    assert reader.num_caught_up_tokens == 20
    assert hit.output_token_ids[0] == next_token([7] * 20 + [8])


@settings(max_examples=10)
@given(
    limits=scheduler_configs(block_size=4, max_model_len=64, scheduler_reserve_full_isl=True),
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 8)), min_size=1, max_size=5),
    pattern=st.lists(st.integers(0, 2), min_size=1, max_size=7),
)
def test_the_same_with_a_real_model(limits, lengths, pattern):
    """After simulated steps the model goes on from the tokens that are known, as if it had computed them all."""
    pytest.importorskip("torch")
    from tiny_model import VOCAB, logits_at_once, tiny_decoder, tiny_executor

    model = tiny_decoder(max_model_len=64)
    work = Work(limits, lengths, VOCAB)
    expected = [signature(outcome) for outcome in work.run(Engine(Scheduler(limits), simulated(), FILLER))]

    executors: list[Any] = [simulated(), tiny_executor(limits, model), tiny_executor(limits, model)]
    engine = Engine(Scheduler(limits), executors[0], FILLER)
    was_real: list[bool] = []

    def exchange(number: int) -> None:
        executor = executors[pattern[number % len(pattern)]]
        if executor is not engine.executor:
            engine.swap(executor)
        del was_real[number:]
        was_real.append(isinstance(executor, RealExecutor))

    outcomes = work.run(engine, exchange)
    assert [signature(outcome) for outcome in outcomes] == expected
    greedy = lambda known: int(logits_at_once(model, known)[-1].argmax())  # noqa: E731
    check_continuations(engine, outcomes, was_real[: len(outcomes)], greedy)
