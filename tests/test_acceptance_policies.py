"""What users have measured or proved about scheduling, as numbers that must come out.

The U-numbers are those of our collection of public reports; each section says whose numbers they are.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import windtunnel as wt
from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.dynamic import DynamicConfig, DynamicScheduler
from windtunnel.sim.engine.static import StaticConfig, StaticScheduler
from windtunnel.sim.records import Records
from windtunnel.sim.simulate import run
from windtunnel.sim.workload import Segment, Workload, workload

NS_PER_S = 1_000_000_000
STEP = ConstantCost(step_s=0.01)


def at_once(outputs: list[int], prompt: int = 16, max_concurrency: int | None = None) -> Workload:
    prompts = [prompt] * len(outputs)
    return workload([0] * len(outputs), prompts, outputs, max_concurrency=max_concurrency)


def slots(num_slots: int, **changes: Any) -> SchedulerConfig:
    defaults: dict[str, Any] = {"num_gpu_blocks": 100_000, "max_num_batched_tokens": 65_536, "max_model_len": 65_536}
    return SchedulerConfig(max_num_seqs=num_slots, **{**defaults, **changes})


def static(requests: Workload, num_slots: int) -> Records:
    config = slots(num_slots)
    return run(requests, config, STEP, scheduler=StaticScheduler(config, StaticConfig(num_slots)))


def slot_steps(records: Records) -> int:
    steps = records.replicas[0].steps
    return int((steps.num_decode_seqs + steps.num_prefill_seqs).sum())


def num_steps(records: Records) -> int:
    return len(records.replicas[0].steps)


# --- U01: the preemption cascade of vLLM's pull request 44594 (450 prompts, 128 clients, 18,724 blocks on one GB200)

WATERMARKS = (0.0, 0.02, 0.05, 0.10, 0.15)
MEASURED = {0.0: 1065, 0.02: 400, 0.05: 187, 0.10: 168, 0.15: 168}
"""Preemptions on the real GPU."""
PRICED = ("auto", "roofline")
"""The bundled profile, composed from kernel tables, and the data sheet."""
COSTS: dict[str, dict[str, Any]] = {
    "auto": {"kind": "auto"},
    "roofline": {"kind": "roofline"},
    "affine": {"kind": "affine", "base_s": "6ms", "token_s": "20us", "seq_s": "10us"},
    "constant": {"kind": "constant", "step_s": "10ms"},
}


@cache
def summary(watermark: float, seed: int = 0, cost: str = "auto", is_async: bool = True) -> dict[str, Any]:
    settings = {"watermark": watermark, "seed": seed, "cost": COSTS[cost], "async_scheduling": is_async}
    return wt.simulate("closed-loop-7b-b200", **settings, saturation=False).summary


def cascade(watermark: float, seed: int = 0, cost: str = "auto", is_async: bool = True) -> int:
    return int(summary(watermark, seed, cost, is_async)["preemptions"])


def throughput(watermark: float, cost: str) -> float:
    """Tokens/s, the mean over three workloads: one alone does not tell 5 % from 15 %."""
    return float(np.mean([summary(watermark, seed, cost)["output_throughput"] for seed in range(3)]))


@pytest.mark.slow
def test_the_cascade_has_as_many_preemptions_as_on_the_real_gpu() -> None:
    """Means over five workloads: the real run's own draws are not known, and the counts vary by some 5 to 10 %."""
    counts = {watermark: np.array([cascade(watermark, seed) for seed in range(5)]) for watermark in WATERMARKS}
    means = {watermark: float(count.mean()) for watermark, count in counts.items()}
    assert means == pytest.approx(MEASURED, rel=0.15)
    noise = max(float(count.std(ddof=1)) for count in counts.values())
    assert all(means[more] <= means[less] + noise for less, more in pairwise(WATERMARKS))


@pytest.mark.parametrize("watermark", [0.0, 0.02, 0.10])
def test_the_cascade_does_not_depend_on_the_time_of_a_step(watermark: float) -> None:
    """Not about the same number: the same one, from four cost models of quite different steps."""
    assert len({cascade(watermark, cost=cost) for cost in COSTS}) == 1


@pytest.mark.parametrize("watermark", [0.0, 0.02])
def test_the_cascade_hardly_depends_on_asynchronous_scheduling(watermark: float) -> None:
    """On, as in the real run, and off, which decides one step later what has finished."""
    counts = [cascade(watermark, is_async=is_async) for is_async in (True, False)]
    assert counts == pytest.approx([MEASURED[watermark]] * 2, rel=0.15)


@pytest.mark.parametrize("cost", PRICED)
def test_a_small_watermark_saves_the_gap_between_tokens_and_costs_time_to_first_token(cost: str) -> None:
    """Measured: throughput gains 5 % at 2 %, ITL P99 halves, and TTFT P50 rises with the watermark."""
    none, small, large = (summary(share, cost=cost) for share in (0, 0.02, 0.15))
    assert small["output_throughput"] > 1.03 * none["output_throughput"]
    assert max(small["p99_itl_ms"], large["p99_itl_ms"]) < none["p99_itl_ms"] / 2
    assert none["median_ttft_ms"] < small["median_ttft_ms"] < large["median_ttft_ms"]


@pytest.mark.slow
@pytest.mark.parametrize("cost", PRICED)
def test_throughput_is_higher_at_a_small_watermark_than_at_a_large_one_or_at_none(cost: str) -> None:
    """Measured: 11,582 tokens/s without, 12,167 at 5 %, which is 5.1 % more, and 11,635 at 15 %."""
    none, small, large = (throughput(share, cost) for share in (0, 0.05, 0.15))
    assert none < large < small
    assert small / none == pytest.approx(12_167 / 11_582, abs=0.02)


# --- U02: the preempt-resume loop of vLLM's pull request 37307 (5 prompts of 100,000 tokens, a pool of 444,000)


def test_admission_by_first_chunk_loops_and_by_whole_prompt_does_not() -> None:
    """168 preemptions and 7.0 million prefill tokens for half a million useful ones, against none and 1.0 times."""
    by_chunk, whole = (
        wt.simulate("preempt-resume-loop", scheduler_reserve_full_isl=is_full) for is_full in (False, True)
    )
    assert by_chunk.summary["preemptions"] == pytest.approx(168, rel=0.15)
    assert whole.summary["preemptions"] == 0
    assert prefill_per_useful(by_chunk) == pytest.approx(14, rel=0.15)
    assert prefill_per_useful(whole) == 1.0


def test_most_of_the_loop_is_full_prefill_chunks_in_the_steps_of_those_who_decode() -> None:
    """Of the steps in which somebody decodes 42 % carry a full chunk as well."""
    steps = wt.simulate("preempt-resume-loop", scheduler_reserve_full_isl=False).records.replicas[0].steps
    decoding = steps.num_decode_seqs > 0
    is_full = steps.num_decode_seqs + steps.prefill_tokens == 8192
    assert (is_full & decoding).sum() / decoding.sum() == pytest.approx(0.42, abs=0.03)


def prefill_per_useful(made: wt.Run) -> float:
    computed = int(made.records.replicas[0].steps.prefill_tokens.sum())
    return computed / int(made.workload.num_prompt_tokens.sum())


# --- U08: the cliff of inference-sim's pull request 298


def test_preemption_begins_at_a_cliff_and_more_blocks_than_needed_change_nothing() -> None:
    """There 4.5 % fewer blocks took preemptions from none to 0.11 a request and P99 of TTFT to 4.7 times as much."""
    made = {
        blocks: wt.simulate("preemption-storm", num_requests=300, num_gpu_blocks_override=blocks, saturation=False)
        for blocks in (4001, 2551, 2501, 2436, 2301)
    }
    assert made[2551].requests.equals(made[4001].requests)
    rates = [made[blocks].summary["preemptions"] / 300 for blocks in sorted(made, reverse=True)]
    waits = [made[blocks].summary["p99_ttft_ms"] for blocks in sorted(made, reverse=True)]
    assert rates == sorted(rates)
    assert waits == sorted(waits)
    assert rates[:2] == [0, 0]
    assert rates[3] > 0.11
    assert waits[3] > 4.7 * waits[1]


# --- U15: a short request behind a prompt of 60,000 tokens (club-3090's pull request 712)

PREFILL_3333_PER_S = AffineCost(base_s=0.01, token_s=1 / 3333)


def short_behind_long(threshold: int) -> tuple[float, float]:
    """Seconds to the first token: of the short request, sent after 1.2 s, and of the long one."""
    requests = workload([0, int(1.2 * NS_PER_S)], [60_000, 200], [20, 20])
    config = slots(256, max_num_batched_tokens=4096, long_prefill_token_threshold=threshold)
    table = run(requests, config, PREFILL_3333_PER_S).requests
    ttft_s = (table.first_token_ns - table.arrival_ns) / NS_PER_S
    return float(ttft_s[1]), float(ttft_s[0])


def test_a_short_request_waits_for_the_rest_of_a_long_prompt() -> None:
    """Real: 18.0 s, of a prefill of 18.1 s."""
    short_s, long_s = short_behind_long(threshold=0)
    assert long_s == pytest.approx(60_000 / 3333, rel=0.02)
    assert long_s - 1.2 <= short_s <= long_s - 1.2 + 0.1, "the rest of the prefill and its own step"


def test_a_threshold_lets_a_short_request_in_within_about_a_step() -> None:
    """Real: 1.09 s, and the long prefill takes 6 % longer."""
    (short_s, long_s), (_, alone_s) = short_behind_long(threshold=2048), short_behind_long(threshold=0)
    assert 0.65 <= short_s <= 1.3
    assert alone_s <= long_s <= 1.06 * alone_s


# --- U57: prefix-cache thrash (SGLang's pull request 38423: 32 conversations, 93,000 tokens, pools of 131k and 65k)


def conversations(num_gpu_blocks: int) -> wt.Run:
    return wt.simulate("shared-prefix-thrash", num_gpu_blocks_override=num_gpu_blocks, saturation=False)


def test_nothing_is_lost_from_a_prefix_cache_that_holds_all_that_is_said() -> None:
    """From 32 * 182 blocks (and the null block) on, every turn finds all full blocks of what was said before it."""
    said = conversations(8193).workload
    known = said.num_prompt_tokens - 200  # prompts and answers so far, but the answer's last token is not computed
    expected = np.where(known > 0, (known - 1) // 16 * 16, 0)
    for num_gpu_blocks in (8193, 32 * 182 + 1):
        assert conversations(num_gpu_blocks).records.requests.num_cached_tokens.tolist() == expected.tolist()


def test_conversations_evict_each_other_once_they_say_more_than_the_pool_holds() -> None:
    """Only evictions lower the number of cached blocks; hits are lost later, since what is over is evicted first."""
    cached = {blocks: conversations(blocks).records.replicas[0].steps.num_cached_blocks for blocks in (8193, 5825)}
    working_set = int(cached[8193].max())
    assert working_set <= 32 * 182
    assert cached[5825].tolist() == cached[8193].tolist()
    assert conversations(working_set).records.replicas[0].steps.num_cached_blocks.max() < working_set
    hits = [conversations(blocks).summary["prefix_cache_hits"] for blocks in (5825, 5121, 4097, 2049)]
    assert all(more > less for more, less in pairwise(hits))


# --- U60: who is evicted first (llm-d-inference-sim's issue 704)


def test_the_last_block_of_a_prompt_is_evicted_first() -> None:
    """A pool of 3 blocks: [1, 2, 3] ends, another request needs one block, and [1, 2, 3] comes again and hits two."""
    prompts = [48, 16, 48]
    content: list[tuple[Segment, ...]] = [((0, 48),), ((1, 16),), ((0, 48),)]
    requests = workload([0, NS_PER_S, 2 * NS_PER_S], prompts, [1, 1, 1], content=tuple(content), num_streams=2)
    table = run(requests, SchedulerConfig(num_gpu_blocks=4, max_model_len=64), STEP).requests
    assert table.num_cached_tokens.tolist() == [0, 0, 32]


# --- U93: static efficiency and what continuous batching can gain (8 slots, 7 answers of 30 tokens and one of 400)

UNEVEN = [30] * 7 + [400]


def test_a_static_batch_of_uneven_answers_yields_a_token_in_19_percent_of_its_slots() -> None:
    records = static(at_once(UNEVEN), 8)
    assert (sum(UNEVEN), slot_steps(records)) == (610, 3200)
    assert round(610 / 3200, 2) == 0.19


def test_continuous_batching_gains_up_to_the_inverse_of_that_efficiency() -> None:
    requests = at_once(UNEVEN * 100)
    gain = num_steps(static(requests, 8)) / num_steps(run(requests, slots(8), STEP))
    assert 0.95 * 3200 / 610 < gain <= 3200 / 610
    assert round(3200 / 610, 1) == 5.2


# --- equal and spread lengths: what continuous batching gains over static


@given(tokens=st.integers(1, 60), num_slots=st.integers(1, 12), num_batches=st.integers(1, 4))
@example(tokens=1, num_slots=1, num_batches=1)
def test_equal_lengths_leave_continuous_batching_nothing_to_gain(tokens: int, num_slots: int, num_batches: int) -> None:
    """Exactly as many steps, where every batch is full and its prompts fit one step."""
    requests = at_once([tokens] * num_slots * num_batches)
    assert num_steps(static(requests, num_slots)) == num_steps(run(requests, slots(num_slots), STEP))


@given(outputs=st.lists(st.integers(1, 200), min_size=1, max_size=60), num_slots=st.integers(1, 12))
@example(outputs=[7, 1, 1, 7], num_slots=2)
def test_the_gain_lies_between_one_and_the_slots_that_static_batching_leaves_idle(
    outputs: list[int], num_slots: int
) -> None:
    """1 <= gain <= slots * steps of static batching / tokens, whatever the lengths."""
    requests = at_once(outputs)
    static_steps, steps = num_steps(static(requests, num_slots)), num_steps(run(requests, slots(num_slots), STEP))
    assert 1 <= static_steps / steps <= num_slots * static_steps / sum(outputs)


def test_the_gain_grows_with_the_spread_to_what_the_longest_of_a_batch_says() -> None:
    """16 slots, mean 256; at length the gain is the mean of the longest of 16 over the mean of all."""
    rng = np.random.default_rng(1)
    spreads = {
        "equal": np.full(640, 256),
        "uniform, 20 %": rng.integers(205, 308, 640),
        "uniform, 90 %": rng.integers(26, 487, 640),
        "exponential": np.maximum(1, np.rint(rng.exponential(256, 640))).astype(int),
        "log-normal": np.clip(np.rint(rng.lognormal(np.log(282) - 1.28, 1.6, 640)), 1, 4096).astype(int),
    }
    gains = []
    for outputs in spreads.values():
        requests = at_once(outputs.tolist())
        gains.append(num_steps(static(requests, 16)) / num_steps(run(requests, slots(16), STEP)))
        longest = outputs.reshape(-1, 16).max(axis=1)
        assert 0.85 <= gains[-1] / (longest.mean() / outputs.mean()) <= 1
    assert gains == sorted(gains)
    assert gains[0] == 1
    assert gains[3] == pytest.approx(sum(1 / k for k in range(1, 17)), rel=0.15), (
        "exponential: the 16th harmonic number"
    )
    assert gains[4] > 5


# --- U94: a saturated server with dynamic batching (Triton's issue 7986: max_batch_size 16, 1,000 clients)


def triton(num_clients: int, num_requests: int) -> tuple[Records, np.ndarray[Any, np.dtype[np.float64]]]:
    """Executions every 16 / 4,005.66 s, and the latencies in ms of all but the first and last round of clients."""
    config = slots(16)
    scheduler = DynamicScheduler(config, DynamicConfig(max_batch_size=16))
    requests = at_once([1] * num_requests, max_concurrency=num_clients)
    records = run(requests, config, ConstantCost(step_s=16 / 4005.66), scheduler=scheduler)
    table = records.requests
    return records, ((table.finish_ns - table.arrival_ns) / 1e6)[num_clients:-num_clients]


def test_a_thousand_clients_of_a_batch_of_16_wait_in_the_queue() -> None:
    """Measured: 4,005.66 inferences/s, 72,262 in 4,518 executions, 242.7 of 247.6 ms in the queue; Little: 249.6 ms."""
    records, latency_ms = triton(1000, 16_000)
    assert 16_000 / num_steps(records) == pytest.approx(72_262 / 4518, rel=0.001)
    assert latency_ms.mean() == pytest.approx(1000 / 4005.66 * 1000, rel=0.005)
    table = records.requests
    queue_ms = ((table.scheduled_ns - table.arrival_ns) / 1e6)[1000:-1000]
    assert queue_ms.mean() / latency_ms.mean() == pytest.approx(242.7 / 247.6, abs=0.01)


def test_thirty_two_clients_get_the_same_throughput_without_the_queue() -> None:
    records, latency_ms = triton(32, 4_000)
    assert 4_000 / (records.end_ns / NS_PER_S) == pytest.approx(4005.66, rel=0.01)
    assert latency_ms.mean() == pytest.approx(1000 * 32 / 4005.66, rel=0.01)
