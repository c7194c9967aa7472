"""The torch executor under the real scheduler: answers do not depend on how they were computed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import VOCAB, TinyEngine, logits_at_once, tiny_config, tiny_decoder, tiny_executor

from windtunnel.executor.all_reduce import AllReduceTable, step_all_reduce_s
from windtunnel.executor.batch import Grant
from windtunnel.executor.batch_builder import BatchBuilder, uniforms
from windtunnel.executor.cache import PagedKvCache
from windtunnel.executor.devices import HostDevice
from windtunnel.executor.model import Decoder
from windtunnel.executor.model_config import DecoderConfig
from windtunnel.executor.reference import TorchOps
from windtunnel.executor.residency import Residency
from windtunnel.executor.sampling import SamplingParams, uniform
from windtunnel.executor.torch_executor import TorchExecutor
from windtunnel.executor.triton_executor import TritonExecutor
from windtunnel.executor.weights import random_weights
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.keys import TokenKeys
from windtunnel.sim.engine.plan import Admission, StepPlan
from windtunnel.sim.engine.request import Request, Status
from windtunnel.sim.simulated import SimExecutor

MODEL = tiny_decoder()
ROOMY = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=96, block_size=4, num_gpu_blocks=512)
ALONE = replace(ROOMY, max_num_seqs=1, enable_prefix_caching=False)
TIGHT = replace(ROOMY, num_gpu_blocks=26, max_num_batched_tokens=24)


def prompts(seed: int, count: int, shared: int = 0, longest: int = 40) -> list[list[int]]:
    """Random prompts that begin with the same ``shared`` tokens."""
    draw = np.random.default_rng(seed)
    head = draw.integers(0, VOCAB, shared).tolist()
    return [head + draw.integers(0, VOCAB, draw.integers(1, longest - shared + 1)).tolist() for _ in range(count)]


def engine(config: SchedulerConfig = ROOMY, **options: object) -> TinyEngine:
    return TinyEngine(config, tiny_executor(config, MODEL, **options))


def answers(config: SchedulerConfig, work: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    under_test = engine(config)
    requests = [under_test.add(prompt, its) for prompt, its in zip(work, params, strict=True)]
    under_test.run()
    return [under_test.answer(request) for request in requests]


def greedy(*lengths: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=length, temperature=0.0) for length in lengths]


# -- the same answers, however computed


def test_answers_do_not_depend_on_batching_chunking_prefix_hits_or_preemption():
    work = prompts(1, 8, shared=13)
    params = greedy(*range(9, 33, 3))
    alone = answers(ALONE, work, params)
    assert len({tuple(answer[:9]) for answer in alone}) == len(alone), "the model tells prompts apart"
    for config in (
        ROOMY,
        replace(ROOMY, max_num_batched_tokens=16),
        replace(ROOMY, long_prefill_token_threshold=3),
        replace(ROOMY, block_size=1, num_gpu_blocks=2048),
        replace(ROOMY, block_size=16, enable_prefix_caching=False),
        TIGHT,
    ):
        assert answers(config, work, params) == alone


def test_a_tiny_pool_preempts_and_the_answers_stay_the_same():
    work, params = prompts(2, 6), greedy(*[30] * 6)
    tight = engine(TIGHT)
    requests = [tight.add(prompt, its) for prompt, its in zip(work, params, strict=True)]
    tight.run()
    assert tight.num_preemptions > 3
    assert [tight.answer(request) for request in requests] == answers(ALONE, work, params)


def test_random_draws_depend_on_seed_and_position_only():
    work = prompts(3, 6, shared=9)
    params = [
        SamplingParams(max_tokens=20, temperature=0.5 + i / 4, top_p=(1.0, 0.9, 0.5)[i % 3], seed=i) for i in range(6)
    ]
    alone = answers(ALONE, work, params)
    assert answers(ROOMY, work, params) == alone
    assert answers(TIGHT, work, params) == alone
    assert answers(ROOMY, work, [replace(its, seed=77) for its in params]) != alone


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    num_requests=st.integers(1, 6),
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_tokens=st.integers(70, 200),
    budget=st.integers(6, 64),
    threshold=st.integers(0, 20),
    caching=st.booleans(),
    shared=st.integers(0, 20),
)
def test_any_schedule_gives_the_answers_of_one_by_one(
    seed, num_requests, block_size, num_tokens, budget, threshold, caching, shared
):
    config = SchedulerConfig(
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        max_model_len=64,
        block_size=block_size,
        num_gpu_blocks=1 - (-num_tokens // block_size),
        enable_prefix_caching=caching,
        long_prefill_token_threshold=threshold,
    )
    work = prompts(seed, num_requests, shared)
    params = greedy(*[4 + 3 * i for i in range(num_requests)])
    assert answers(config, work, params) == answers(ALONE, work, params)


# -- prefix hits


def test_a_prefix_hit_is_read_from_the_cache_and_gives_the_same_answer():
    [prompt], [its] = prompts(4, 1, shared=32), greedy(10)
    warm = engine()
    first = warm.add(prompt, its)
    warm.run()
    second = warm.add(prompt, its)
    warm.run()
    assert second.num_cached_tokens >= 32
    assert warm.answer(second) == warm.answer(first)
    assert warm.executor.num_caught_up_tokens == 0


def test_the_next_turn_reads_the_answer_from_the_cache():
    """Blocks that decodes have filled count as computed, too."""
    [prompt] = prompts(4, 1, shared=30)
    talk = engine()
    first = talk.add(prompt, greedy(21)[0])
    talk.run()
    second = talk.add([*talk.tokens[first], 3, 4, 5], greedy(8)[0])
    talk.run()
    assert second.num_cached_tokens > len(prompt) + 8
    assert talk.executor.num_caught_up_tokens == 0
    assert [talk.answer(second)] == answers(ALONE, [[*talk.tokens[first], 3, 4, 5]], greedy(8))


def test_a_prefix_hit_on_blocks_of_the_same_step_needs_no_recomputation():
    work, params = prompts(5, 2, shared=24), greedy(10, 10)
    both = engine()
    requests = [both.add(prompt, its) for prompt, its in zip(work, params, strict=True)]
    both.step()
    assert requests[1].num_cached_tokens == 24
    both.run()
    assert both.executor.num_caught_up_tokens == 0
    assert [both.answer(request) for request in requests] == answers(ALONE, work, params)


def test_prefix_blocks_that_only_a_simulation_filled_are_recomputed():
    [prompt], [its] = prompts(6, 1, shared=32), greedy(10)
    swapped = engine()
    real, simulated = swapped.executor, SimExecutor(ConstantCost(1e-3))
    swapped.use(simulated)
    swapped.add(prompt, its)
    while swapped.step(made_up=[7]):
        pass
    assert swapped.use(real) == 0, "nothing runs"
    late = swapped.add(prompt, its)
    swapped.run()
    assert late.num_cached_tokens >= 32
    assert real.num_caught_up_tokens == late.num_cached_tokens
    assert [swapped.answer(late)] == answers(ALONE, [prompt], [its])


def test_blocks_that_were_taken_back_before_they_were_computed_are_recomputed():
    """In one step the first gets a chunk, then loses it to a more urgent one; the chunk's blocks stay findable."""
    config = replace(
        ROOMY,
        num_gpu_blocks=11,
        policy="priority",
        long_prefill_token_threshold=8,
        long_prefill_spares_lone_request=False,
    )
    patient, urgent = [*range(37)], [*range(100, 107)]
    params = greedy(4, 3)
    tight = engine(config)
    first = tight.add(patient, params[0], priority=1)
    tight.step()
    second = tight.add(urgent, params[1], priority=0)
    tight.run()
    assert first.num_preemptions == 1
    assert first.num_resumed_cached_tokens == 28, "24 of them had been computed"
    assert tight.executor.num_caught_up_tokens == 4
    assert [tight.answer(first), tight.answer(second)] == answers(ALONE, [patient, urgent], params)


# -- the record of computed blocks


def sequence(tokens: list[int], block_ids: list[int], interned: dict[Hashable, int]) -> Request:
    """A running request with blocks of 4 tokens."""
    request = Request("r", 0, len(tokens), 1, keys=TokenKeys(tokens.__getitem__, 4, interned))
    request.block_ids, request.status = block_ids, Status.RUNNING
    return request


def admitting(request: Request, num_cached_tokens: int) -> StepPlan:
    plan = StepPlan(0)
    plan.admissions.append(Admission(request, num_cached_tokens, False))
    return plan


def test_a_block_that_somebody_began_to_overwrite_is_not_trusted():
    """It may come to be findable under its old content again, if a later owner loses it before computing it."""
    interned: dict[Hashable, int] = {}
    owner, other = sequence([*range(8)], [5, 6], interned), sequence([*range(50, 60)], [5, 7, 8], interned)
    record = Residency(4)
    record.note([Grant(owner, 8, 0, True)])
    assert record.missing_hits(admitting(owner, 8), []) == []
    record.note([Grant(other, 1, 0, False)])
    assert record.missing_hits(admitting(owner, 8), []) == [Grant(owner, 4, 0, False)]


def test_only_lost_blocks_are_recomputed_neighbours_at_once():
    interned: dict[Hashable, int] = {}
    owner = sequence([*range(24)], [1, 2, 3, 4, 5, 6], interned)
    other = sequence([*range(50, 60)], [2, 3, 6], interned)
    record = Residency(4)
    record.note([Grant(owner, 24, 0, True)])
    record.note([Grant(other, 10, 0, True)])
    assert record.missing_hits(admitting(owner, 24), []) == [Grant(owner, 8, 4, False), Grant(owner, 4, 20, False)]
    assert record.missing_hits(admitting(owner, 24), []) == [], "they count as computed from then on"


def test_blocks_that_the_step_fills_are_computed_early_only_if_a_lost_block_needs_them():
    interned: dict[Hashable, int] = {}
    tokens = [*range(16)]
    writer, reader = sequence(tokens, [1, 2, 9, 8], interned), sequence(tokens, [1, 2, 3, 4], interned)
    step = [Grant(writer, 8, 0, False)]
    assert Residency(4).missing_hits(admitting(reader, 8), step) == []
    assert Residency(4).missing_hits(admitting(reader, 12), step) == [Grant(reader, 12, 0, False)]
    stranger = sequence([*range(70, 86)], [1, 2, 3, 4], interned)
    assert Residency(4).missing_hits(admitting(reader, 8), [Grant(stranger, 8, 0, False)]) == [
        Grant(reader, 8, 0, False)
    ]


def test_block_tables_are_zero_beyond_each_context():
    long, short = sequence([*range(12)], [7, 8, 9], {}), sequence([*range(12)], [4, 5, 6], {})
    view = engine()
    for request in (long, short):
        view.tokens[request], view.params[request] = [*range(12)], SamplingParams()
    batch = BatchBuilder(4, 32).build([Grant(short, 1, 3, True), Grant(long, 9, 0, True)], view)
    assert batch.block_tables.tolist() == [[4, 0, 0], [7, 8, 9]]
    assert batch.slots.tolist() == [19, *range(28, 37)]


# -- adoption


@settings(max_examples=40)
@given(seed=st.integers(0, 1000), pattern=st.lists(st.integers(0, 2), min_size=1, max_size=12), tight=st.booleans())
def test_executors_may_alternate_at_any_step(seed, pattern, tight):
    """Plans are those of a run that was simulated throughout; real tokens continue what the simulation made up."""
    config = TIGHT if tight else ROOMY
    work, params = prompts(seed, 5, shared=seed % 20), greedy(*range(4, 19, 3))
    simulated = SimExecutor(ConstantCost(1e-3))
    dry = TinyEngine(config, simulated)
    mixed = engine(config)
    executors = [simulated, mixed.executor, tiny_executor(config, MODEL)]
    requests = [mixed.add(prompt, its) for prompt, its in zip(work, params, strict=True)]
    for prompt, its in zip(work, params, strict=True):
        dry.add(prompt, its)
    origin: dict[int, list[bool]] = {request.request_id: [] for request in requests}  # whether each token is real
    step, going, in_use = 0, True, -1
    while going:
        turn = pattern[step // 2 % len(pattern)]
        if turn != in_use:
            mixed.use(executors[turn])
            in_use = turn
        before = {request: len(mixed.tokens[request]) for request in requests}
        going = mixed.step(made_up=[5, 9])
        for request in requests:
            origin[request.request_id] += [turn > 0] * (len(mixed.tokens[request]) - before[request])
        step += 1
    while dry.step(made_up=[3]):
        pass
    assert [d[0] for d in mixed.decided] == [d[0] for d in dry.decided]
    for request in requests:
        tokens = mixed.tokens[request]
        expected = logits_at_once(MODEL, tokens).argmax(dim=-1).tolist()
        for i, is_real in enumerate(origin[request.request_id], start=request.num_prompt_tokens):
            assert not is_real or tokens[i] == expected[i - 1]


def test_adoption_computes_the_running_requests_anew():
    work, params = prompts(8, 4, shared=12), greedy(*[20] * 4)
    swapped = engine()
    requests = [swapped.add(prompt, its) for prompt, its in zip(work, params, strict=True)]
    for _ in range(5):
        swapped.step()
    fresh = tiny_executor(ROOMY, MODEL, max_catch_up_tokens=7)
    num_computed = [swapped.scheduler.num_computed_tokens(request) for request in requests]
    num_recomputed = swapped.use(fresh)
    assert num_recomputed == sum(num_computed) - 3 * 12, "shared blocks are computed once"
    swapped.run()
    assert [swapped.answer(request) for request in requests] == answers(ALONE, work, params)


def test_what_was_computed_for_one_engine_is_not_trusted_for_another():
    """Each engine interns its own keys, so that equal keys of two engines mean nothing."""
    [prompt, other], [its] = prompts(14, 2, shared=0, longest=40), greedy(6)
    prompt, other = (prompt * 40)[:40], (other * 40)[:40]
    one = engine()
    one.add(prompt, its)
    one.run()
    two = TinyEngine(ROOMY, SimExecutor(ConstantCost(1e-3)))
    two.add(other, its)
    while two.step(made_up=[7]):
        pass
    two.use(one.executor)
    late = two.add(other, its)
    two.run()
    assert late.num_cached_tokens == 36
    assert [two.answer(late)] == answers(ALONE, [other], [its])


def test_an_executor_without_an_engine_says_so():
    with pytest.raises(ValueError, match="call adopt"):
        tiny_executor(ROOMY, MODEL).execute(StepPlan(0))


# -- timing, options, refusals


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_step_time_is_the_sum_of_its_parts(clock):
    timed = engine(clock=clock)
    timed.add(prompts(9, 1)[0], greedy(3)[0])
    plan = timed.scheduler.schedule(0)
    result = timed.executor.execute(plan)
    timing = timed.executor.last_timing
    assert timing is not None
    assert result.step_ns == timing.step_ns > 0
    assert timing.forward_ns > 0
    assert min(timing) >= 0


class CountingClock(TorchExecutor):
    """Every look at the clock takes 1 ns, and recomputing takes a million."""

    now_ns = 0

    def _now_ns(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def _recompute(self, grants: list[Grant]) -> int:
        self.now_ns += 1_000_000
        return super()._recompute(grants)


def test_the_time_of_lost_prefix_hits_is_in_no_step():
    [prompt], [its] = prompts(6, 1, shared=32), greedy(10)
    swapped = TinyEngine(ROOMY, SimExecutor(ConstantCost(1e-3)))
    swapped.add(prompt, its)
    while swapped.step(made_up=[7]):
        pass
    real = CountingClock(MODEL, PagedKvCache(MODEL.config, ROOMY.num_gpu_blocks, ROOMY.block_size))
    swapped.use(real)
    swapped.add(prompt, its)
    result = real.execute(swapped.scheduler.schedule(0))
    assert real.num_caught_up_tokens > 0
    assert 0 < result.step_ns < 100


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="clock must be one of wall, cpu, got 'sun'"):
        tiny_executor(ROOMY, MODEL, clock="sun")
    with pytest.raises(ValueError, match="needs num_threads=1, got 2"):
        tiny_executor(ROOMY, MODEL, clock="cpu", num_threads=2)
    with pytest.raises(ValueError, match="num_threads must be at least 1, got 0"):
        tiny_executor(ROOMY, MODEL, num_threads=0)
    with pytest.raises(ValueError, match="max_catch_up_tokens must be at least 1"):
        tiny_executor(ROOMY, MODEL, max_catch_up_tokens=0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"block_size": 8}, "block_size is 8 for the scheduler but 4"),
        ({"num_gpu_blocks": 9}, "num_gpu_blocks is 9 for the scheduler but 512"),
        ({"max_model_len": 512}, "exceeds the 96 tokens"),
        ({"num_speculative_tokens": 2}, "num_speculative_tokens must be 0"),
        ({"async_scheduling": True}, "one step at a time, but 2"),
        ({"pipeline_parallel_size": 3}, "one step at a time, but 3"),
    ],
)
def test_a_scheduler_that_does_not_fit_is_refused(change, told):
    executor = tiny_executor(ROOMY, tiny_decoder(max_model_len=96))
    executor.check_config(ROOMY)
    with pytest.raises(ValueError, match=told):
        executor.check_config(replace(ROOMY, **change))


def test_closing_gives_the_number_of_threads_back():
    before = torch.get_num_threads()
    two = TinyEngine(ROOMY, tiny_executor(ROOMY, MODEL, num_threads=before + 1))
    two.add(prompts(9, 1)[0], greedy(2)[0])
    two.run()
    assert torch.get_num_threads() == before + 1
    two.executor.close()
    assert torch.get_num_threads() == before


def test_a_step_that_fails_leaves_nothing_trusted():
    [prompt], [its] = prompts(10, 1, shared=32), greedy(5)
    model = tiny_decoder()
    broken = TinyEngine(ROOMY, tiny_executor(ROOMY, model))
    broken.add(prompt, its)
    forward = model.forward

    def fail(*_):
        raise RuntimeError("out of memory")

    model.forward = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        broken.step()
    model.forward = forward
    for request in list(broken.scheduler.requests()):
        broken.scheduler.abort(request)
    again = broken.add(prompt, its)
    broken.step()
    assert again.num_cached_tokens > 0
    assert broken.executor.num_caught_up_tokens == again.num_cached_tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_runs_in_half_precision(dtype):
    model = tiny_decoder(dtype=dtype)
    cache = PagedKvCache(model.config, ROOMY.num_gpu_blocks, ROOMY.block_size, dtype=dtype)
    half = TinyEngine(ROOMY, TorchExecutor(model, cache))
    requests = [half.add(prompt, its) for prompt, its in zip(prompts(11, 3), greedy(8, 8, 8), strict=True)]
    half.run()
    assert all(len(half.answer(request)) == 8 for request in requests)


def test_uniforms_are_those_of_the_scalar_definition():
    seeds = [0, 1, 7, 2**63, 2**64 - 1, -5]
    positions = np.array([0, 1, 5, 1000, 2**31, 99])
    wrapped = np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64)
    expected = [np.float32(uniform(seed, position)) for seed, position in zip(seeds, positions.tolist(), strict=True)]
    assert uniforms(wrapped, positions).tolist() == expected


def test_a_draw_depends_on_all_bits_of_the_seed_and_on_the_place_of_the_new_token():
    view = engine()
    seeds, num_tokens = [7, 2**32 + 7, 2**40 + 7, 2**63 + 7, -5, 2**32 - 5], 9
    requests = [sequence([*range(12)], [3 * i + 1, 3 * i + 2, 3 * i + 3], {}) for i in range(len(seeds))]
    for request, seed in zip(requests, seeds, strict=True):
        view.tokens[request], view.params[request] = [*range(12)], SamplingParams(seed=seed)
    host = BatchBuilder(4, 32).build([Grant(request, num_tokens, 0, True) for request in requests], view)
    assert host.uniforms.tolist() == [np.float32(uniform(seed, num_tokens)) for seed in seeds]
    assert len(set(host.uniforms.tolist())) == len(seeds)


def test_two_runs_of_one_request_take_one_row():
    """So that a builder of 64 rows still has 64 for the next step."""
    view, builder = engine(), BatchBuilder(4, 32)
    requests = [sequence([*range(12)], [3 * i + 1, 3 * i + 2, 3 * i + 3], {}) for i in range(65)]
    for request in requests:
        view.tokens[request], view.params[request] = [*range(12)], SamplingParams()
    torn, others = requests[0], requests[1:]
    host = builder.build([Grant(torn, 4, 0, False), Grant(torn, 4, 8, False)], view)
    assert host.block_tables.tolist() == [[1, 0, 0], [1, 2, 3]]
    for group in (others, [torn, *others[:-1]], others):
        tables = builder.build([Grant(request, 12, 0, True) for request in group], view).block_tables
        assert tables.tolist() == [request.block_ids for request in group]


def test_lost_prefix_hits_in_two_places_leave_room_for_a_full_batch():
    """A hit whose first and last block were lost is computed in two runs; then 64 requests still go into one step."""
    config = replace(ROOMY, max_num_seqs=64)
    prompt, params = [*range(50, 71)], greedy(2)[0]
    torn = engine(config)
    torn.add(prompt, params)
    torn.run()
    hit = torn.add(prompt, params)
    record = torn.executor.residency
    for block in list(record._key_of)[::2]:
        del record._key_of[block]
    torn.step()
    assert torn.executor.num_caught_up_tokens == 12
    others = [[i + 100, 5, 6] for i in range(64)]
    requests = [torn.add(other, greedy(4)[0]) for other in others]
    torn.run()
    assert [torn.answer(request) for request in [hit, *requests]] == answers(
        ALONE, [prompt, *others], [params, *greedy(*[4] * 64)]
    )


def test_a_request_with_odd_settings_fails_nobody():
    work = prompts(15, 4)
    params = [SamplingParams(max_tokens=8, temperature=heat, seed=3) for heat in (1.0, 1e-39, 5e-324, 0.7)]
    found = answers(ROOMY, work, params)
    assert found[1:3] == answers(ALONE, work[1:3], greedy(8, 8)), "hardly any temperature is none"
    assert found == answers(ALONE, work, params)


class Sampling(TorchOps):
    """Samples what it is told to."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def sample(self, logits: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.full((logits.shape[0],), self.token)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_what_is_no_token_is_caught_in_the_step_that_sampled_it(token):
    model = Decoder(MODEL.config, MODEL.weights, Sampling(token))
    broken = TinyEngine(ROOMY, tiny_executor(ROOMY, model))
    broken.add([1, 2, 3], greedy(5)[0])
    with pytest.raises(ValueError, match=rf"in \[0, vocab_size = 512\), got \[{token}\]"):
        broken.step()
    model.ops.token = VOCAB - 1
    fine = TinyEngine(ROOMY, tiny_executor(ROOMY, model))
    request = fine.add([1, 2, 3], greedy(2)[0])
    fine.run()
    assert fine.answer(request) == [VOCAB - 1] * 2


def test_requests_may_come_and_go_in_any_number():
    """More than the builder has rows at first, so that it makes room and lets old ones go."""
    many = replace(ROOMY, max_num_seqs=80, max_num_batched_tokens=2048, num_gpu_blocks=2048)
    work, params = prompts(12, 160, longest=6), greedy(*[2 + i % 5 for i in range(160)])
    expected = answers(replace(many, max_num_seqs=7, max_num_batched_tokens=64), work, params)
    assert answers(many, work, params) == expected


def test_a_config_of_another_family_runs_too():
    config = tiny_config(architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=24, tie_word_embeddings=True)
    model = tiny_decoder(config)
    work, params = prompts(13, 4, shared=10), greedy(12, 12, 12, 12)

    def served(scheduler: SchedulerConfig) -> list[list[int]]:
        under_test = TinyEngine(scheduler, tiny_executor(scheduler, model))
        requests = [under_test.add(prompt, its) for prompt, its in zip(work, params, strict=True)]
        under_test.run()
        return [under_test.answer(request) for request in requests]

    assert served(TIGHT) == served(ALONE)


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_operations_are_timed_on_request_and_the_answers_stay_the_same(clock):
    work, params = prompts(6, 3), greedy(12, 12, 12)
    timed = engine(clock=clock)
    requests = [timed.add(prompt, its) for prompt, its in zip(work, params, strict=True)]
    with timed.executor.timing_ops():
        timed.run()
    assert [timed.answer(request) for request in requests] == answers(ROOMY, work, params)
    calls = {timing.name: timing.num_calls for timing in timed.executor.last_op_timings}
    layers = MODEL.config.num_hidden_layers
    assert calls["attention"] == calls["rope_and_store"] == calls["linear 64 -> 224"] == layers
    assert calls["embed"] == calls["sample"] == calls["linear 64 -> 512"] == 1
    in_ops_ns = sum(timing.device_ns for timing in timed.executor.last_op_timings)
    last = timed.executor.last_timing
    assert 0 < in_ops_ns <= last.forward_ns + last.sample_ns
    before = timed.executor.last_op_timings
    again = timed.add(work[0], params[0])
    timed.run()
    assert timed.executor.last_op_timings is before, "only on request"
    assert len(timed.answer(again)) == 12


# -- communication, padding


TABLE = AllReduceTable("a test", {2: [(64, 1e-5), (2**20, 2e-3)]})


def sharded(**options: object) -> TinyEngine:
    """A rank of two, whose steps lack communication unless a table says what it takes."""
    config = DecoderConfig.from_hf(tiny_config()).shard(2)
    model = Decoder(config, random_weights(config), TorchOps())
    return TinyEngine(ROOMY, tiny_executor(ROOMY, model, **options))


def test_the_all_reduces_of_a_sharded_model_are_added_from_a_table():
    under_test = sharded(all_reduce=TABLE)
    under_test.add([*range(30)], greedy(3)[0])
    result = under_test.executor.execute(under_test.scheduler.schedule(0))
    timing = under_test.executor.last_timing
    expected_s = step_all_reduce_s(TABLE, under_test.executor.model.config, 30, bytes_per_element=4)
    assert timing.all_reduce_ns == round(expected_s * 1e9) > 0
    assert result.step_ns == timing.step_ns > timing.all_reduce_ns


def test_without_a_table_or_without_shards_no_communication_is_added():
    for under_test in (sharded(), engine(all_reduce=TABLE)):
        under_test.add([*range(30)], greedy(3)[0])
        under_test.executor.execute(under_test.scheduler.schedule(0))
        assert under_test.executor.last_timing.all_reduce_ns == 0


def test_a_table_that_does_not_fit_is_refused_before_any_step():
    with pytest.raises(ValueError, match="knows 4 ranks, not 2: measure them"):
        sharded(all_reduce=AllReduceTable("a test", {4: [(64, 1e-5)]}))
    small = sharded(all_reduce=AllReduceTable("a test", {2: [(1000, 1e-5)]}))
    with pytest.raises(ValueError, match="lower the tokens of a step"):
        small.executor.check_config(ROOMY)


def test_the_rows_that_fill_a_graph_are_told_with_the_step():
    cache = PagedKvCache(MODEL.config, ROOMY.num_gpu_blocks, ROOMY.block_size)
    under_test = TritonExecutor(MODEL, cache, max_num_seqs=16, device=HostDevice(), capture_at_start=False)
    padded = TinyEngine(ROOMY, under_test)
    under_test.adopt(padded)
    results = []
    execute = under_test.execute
    under_test.execute = lambda plan: results.append(execute(plan)) or results[-1]
    for prompt, its in zip(prompts(9, 3), greedy(4, 4, 4), strict=True):
        padded.add(prompt, its)
    padded.run()
    assert [result.num_padded_tokens for result in results] == [0, 1, 1, 1], "3 decodes in a graph of 4"


# -- memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_cache_is_zero_and_takes_memory_only_where_it_is_written(dtype):
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = PagedKvCache(MODEL.config, 200_000, 16, dtype=dtype)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < cache.num_bytes // 1024 // 4
    assert cache.keys[0].dtype == dtype
    assert cache.keys[1].shape == (200_000, 16, 2, 16)
    assert not cache.values[1][-1].float().any()
