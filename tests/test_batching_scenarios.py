"""Policies, speculation, replicas, pipelines, limits and patience, as scenarios and flags ask for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from windtunnel.cli.main import main
from windtunnel.scenarios.load import Override, load_scenario
from windtunnel.scenarios.resolve import Resolved, resolve
from windtunnel.scenarios.saturation import saturation_request_throughput
from windtunnel.sim.cost.swap import SwapCost
from windtunnel.sim.engine.batch_queue import QueuePolicy
from windtunnel.sim.engine.batches import BatchExecution
from windtunnel.sim.engine.dynamic import DynamicConfig
from windtunnel.sim.engine.static import StaticConfig
from windtunnel.sim.engine.swap import SwapConfig
from windtunnel.sim.simulate import serve
from windtunnel.sim.speculation import Acceptance, DraftCost, FixedDraftCost

MODEL_AND_GPU = {"model": "llama-3.1-8b", "gpu": "h100"}
WITHOUT = {"num_gpu_blocks_override": 500}
WORK = {"num_requests": 12, "input": 100, "output": 20, "request_rate": 50}
STEP = {"kind": "constant", "step_s": "10ms"}
PBTXT = """
max_batch_size: 8
name: "llm"
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 500 }
instance_group [ { count: 2 } ]
"""


def resolved(hardware: dict[str, Any] = WITHOUT, flags: dict[str, Any] | None = None, **sections: Any) -> Resolved:
    """A small scenario with these sections; without a GPU its step takes 10 ms."""
    cost = {} if "gpu" in hardware else {"cost": STEP}
    deployment = {**hardware, **sections.pop("deployment", {})}
    scenario = {"name": "small", "workload": WORK, **cost, "deployment": deployment, **sections}
    given = {key: Override(value, f"--{key}") for key, value in (flags or {}).items()}
    return resolve(load_scenario(scenario, given))


def settings(run: Resolved) -> dict[str, tuple[Any, str]]:
    """Value and source of each setting."""
    return {entry.key: (entry.value, entry.source) for entry in run.entries}


# -- [batching]


def test_without_a_policy_batching_is_continuous() -> None:
    for batching in ({}, {"policy": "continuous"}, "continuous", {"prefill_first": False}):
        assert resolved(batching=batching).system.batching is None


@pytest.mark.parametrize(
    ("batching", "want"),
    [
        ("static:batch_size=8", StaticConfig(8)),
        ("static:batch_size=8,batch_timeout=50ms", StaticConfig(8, 50_000_000)),
        ("static:batch_size=8,batch_timeout=0", StaticConfig(8, 0)),
        (
            {"policy": "static", "batch_size": 2, "kv_reserve": "max_model_len", "answers": "streamed"},
            StaticConfig(2, None, BatchExecution("max_model_len", "streamed")),
        ),
        (
            '{"policy": "static", "batch_size": 2, "max_prefill_tokens": "1k"}',
            StaticConfig(2, None, BatchExecution(max_prefill_tokens=1000)),
        ),
        ("dynamic:max_batch_size=16", DynamicConfig(16)),
        (
            "dynamic:max_batch_size=16,preferred_batch_size=4/8,max_queue_delay_microseconds=500",
            DynamicConfig(16, (4, 8), 500),
        ),
        ("dynamic:max_batch_size=16,preferred_batch_size=8", DynamicConfig(16, (8,))),
        ({"policy": "dynamic", "max_batch_size": 16, "preferred_batch_size": [8, 4]}, DynamicConfig(16, (8, 4))),
        (
            "dynamic:max_batch_size=4,max_queue_size=9,default_timeout_microseconds=7,timeout_action=DELAY",
            DynamicConfig(4, default_queue_policy=QueuePolicy(9, 7, "DELAY")),
        ),
        (
            "dynamic:max_batch_size=4,priority_levels=3,default_priority_level=2,instance_count=2",
            DynamicConfig(4, priority_levels=3, default_priority_level=2, instance_count=2),
        ),
        ("swap:num_cpu_blocks=77,block_bytes=1MiB", SwapConfig(77)),
        ("swap:swap_space=10MiB,block_bytes=1MiB", SwapConfig(10)),
        ("continuous:prefill_first=true", SwapConfig(0, "recompute", prefill_first=True)),
    ],
)
def test_a_policy_is_read_as_it_is_written(batching: Any, want: Any) -> None:
    assert resolved(batching=batching).system.batching == want
    if isinstance(batching, str):
        assert resolved(flags={"batching": batching}).system.batching == want


def test_the_size_of_swapped_blocks_follows_from_the_model() -> None:
    run = resolved(MODEL_AND_GPU, batching={"policy": "swap"})
    assert run.model is not None
    cost = run.system.swap_cost
    assert isinstance(cost, SwapCost)
    assert cost.block_bytes == run.config.block_size * run.model.kv_bytes_per_token(1, "auto")
    assert run.system.batching == SwapConfig(4 * 2**30 // cost.block_bytes)
    told = settings(run)
    assert told["block_bytes"] == (cost.block_bytes, "model config")
    assert told["swap_space"] == (4 * 2**30, "vLLM V0 default (4 GiB per GPU)")
    assert told["pcie_bandwidth"][0] == cost.bytes_per_s == 25 * 10**9


def test_prefill_first_computes_prompts_whole_and_says_so() -> None:
    run = resolved(batching="continuous:prefill_first=true")
    assert not run.config.enable_chunked_prefill
    assert settings(run)["enable_chunked_prefill"] == (False, "prefill_first computes prompts whole")


def test_a_config_pbtxt_is_read_next_to_the_scenario_and_other_keys_win(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text(PBTXT)
    toml = """name = "x"
[deployment]
num_gpu_blocks_override = 500
[batching]
policy = "dynamic"
config = "config.pbtxt"
instance_count = 1
max_queue_size = 3
[workload]
num_requests = 3
input = 10
output = 2
[cost]
kind = "constant"
step_s = 0.01
"""
    (tmp_path / "x.toml").write_text(toml)
    run = resolve(load_scenario(tmp_path / "x.toml"))
    assert run.system.batching == DynamicConfig(8, (4, 8), 500, QueuePolicy(3))
    assert settings(run)["config.pbtxt"][1] == str(tmp_path / "config.pbtxt")
    assert any("line 3: name" in note for note in run.notes)


# -- asynchronous scheduling


@pytest.mark.parametrize(
    ("hardware", "sections", "is_async"),
    [
        (WITHOUT, {}, False),
        (MODEL_AND_GPU, {}, True),
        (MODEL_AND_GPU, {"batching": {"prefill_first": False}}, True),
        (MODEL_AND_GPU, {"engine": {"async_scheduling": False}}, False),
        (WITHOUT, {"engine": {"async_scheduling": True}}, True),
        (MODEL_AND_GPU, {"batching": "static:batch_size=4"}, False),
        (MODEL_AND_GPU, {"batching": "dynamic:max_batch_size=4"}, False),
        (MODEL_AND_GPU, {"batching": "swap"}, False),
        (MODEL_AND_GPU, {"batching": "continuous:prefill_first=true"}, False),
        (MODEL_AND_GPU, {"speculative": "eagle3:num_speculative_tokens=3,acceptance=0.7"}, True),
        (MODEL_AND_GPU, {"speculative": "mtp:num_speculative_tokens=1,acceptance=0.7"}, True),
        (MODEL_AND_GPU, {"speculative": "ngram:num_speculative_tokens=3,acceptance=0.7"}, False),
        (MODEL_AND_GPU, {"speculative": "ngram:num_speculative_tokens=0"}, True),
        (MODEL_AND_GPU, {"deployment": {"pipeline_parallel_size": 2}}, True),
    ],
)
def test_steps_are_decided_ahead_where_vllm_does(hardware: Any, sections: Any, is_async: bool) -> None:
    run = resolved(hardware, **sections)
    assert run.config.async_scheduling == is_async
    value, source = settings(run)["async_scheduling"]
    assert value == is_async
    assert source


def test_stages_on_gpus_use_the_second_model_runner() -> None:
    assert resolved(MODEL_AND_GPU, deployment={"pipeline_parallel_size": 2}).config.use_v2_model_runner
    assert not resolved(deployment={"pipeline_parallel_size": 2}).config.use_v2_model_runner


# -- [speculative]


def rates(speculative: Any) -> tuple[float, ...]:
    drafting = resolved(speculative=speculative).system.drafting
    assert drafting is not None
    return drafting.acceptance.rates


@pytest.mark.parametrize(
    ("acceptance", "want"),
    [
        (0.5, (0.5, 0.25, 0.125)),
        (1, (1.0, 1.0, 1.0)),
        ([0.8, 0.6, 0.4], (0.8, 0.6, 0.4)),
        ([0.8, 0.6, 0.4, 0.2], (0.8, 0.6, 0.4)),
        ("0.8/0.6/0.4", (0.8, 0.6, 0.4)),
        ("0.5", (0.5, 0.25, 0.125)),
    ],
)
def test_acceptance_is_a_rate_or_rates(acceptance: Any, want: tuple[float, ...]) -> None:
    assert rates({"method": "eagle3", "num_speculative_tokens": 3, "acceptance": acceptance}) == pytest.approx(want)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("[0, 1, 3, 3]", (0.75, 0.5, 0.5)),
        ("0\n1\n\n3\n3\n", (0.75, 0.5, 0.5)),
        ("3\n", (1.0, 1.0, 1.0)),
        ('{"spec_decode_per_position_acceptance_rates": [0.9, 0.7, 0.1, 0.0]}', (0.9, 0.7, 0.1)),
    ],
)
def test_acceptance_may_be_recorded(text: str, want: tuple[float, ...], tmp_path: Path) -> None:
    (tmp_path / "drafts").write_text(text)
    acceptance = str(tmp_path / "drafts")
    assert rates({"method": "ngram", "num_speculative_tokens": 3, "acceptance": acceptance}) == want


@pytest.mark.parametrize(
    ("table", "method", "acceptance"),
    [
        ({"method": "eagle3", "model": "x/y", "acceptance": 0.5}, "eagle3", Acceptance.fixed(0.5, 2)),
        ({"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "acceptance": 0.5}, "eagle3", Acceptance.fixed(0.5, 2)),
        ({"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B", "acceptance": 0.5}, "eagle", Acceptance.fixed(0.5, 2)),
        ({"model": "llama-3.2-1b", "acceptance": 0.5}, "draft_model", Acceptance.fixed(0.5, 2)),
        ({"method": "deepseek_mtp", "acceptance": 0.5}, "mtp", Acceptance.fixed(0.5, 2)),
        (
            {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2, "acceptance": 0.5},
            "ngram",
            Acceptance.fixed(0.5, 2),
        ),
        (
            {"method": "eagle3", "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.9, 0.3]},
            "eagle3",
            Acceptance((0.9, 0.3)),
        ),
        (
            {"method": "eagle3", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.25},
            "eagle3",
            Acceptance((1.0, 0.25)),
        ),
    ],
)
def test_vllms_own_json_works(table: dict[str, Any], method: str, acceptance: Acceptance) -> None:
    run = resolved(MODEL_AND_GPU, flags={"speculative": json.dumps({**table, "num_speculative_tokens": 2})})
    assert run.config.spec_method == method
    assert run.system.drafting is not None
    assert run.system.drafting.acceptance == acceptance


def test_keys_of_vllm_that_play_no_part_are_told() -> None:
    table = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4, "acceptance": 0.5}
    assert "Speculation: plays no part here: prompt_lookup_max." in resolved(speculative=table).notes


def test_no_drafts_are_no_speculation() -> None:
    run = resolved(speculative={"method": "eagle3", "num_speculative_tokens": 0})
    assert run.system.drafting is None
    assert run.config.num_speculative_tokens == 0


def test_drafting_costs_what_is_known_of_it() -> None:
    def cost(hardware: dict[str, Any], **more: Any) -> Any:
        table = {"method": "eagle3", "num_speculative_tokens": 2, "acceptance": 0.5, **more}
        run = resolved(hardware, speculative=table)
        assert run.system.drafting is not None
        return run.system.drafting.cost, run.warnings, run.notes

    assert isinstance(cost(MODEL_AND_GPU)[0], DraftCost)
    assert isinstance(cost(MODEL_AND_GPU, draft_s="1ms")[0], FixedDraftCost)
    assert cost(MODEL_AND_GPU, method="ngram")[0] is None
    free, warnings, _ = cost(WITHOUT)
    assert free is None
    assert any("is taken to be free: give draft_s" in warning for warning in warnings)
    assert not cost(WITHOUT, method="ngram")[1]
    assert any("only the name is known" in note for note in cost(MODEL_AND_GPU, draft_model="my/own-head")[2])


def test_a_larger_drafter_makes_steps_longer() -> None:
    def end_ns(drafter: str) -> int:
        table = {"method": "draft_model", "num_speculative_tokens": 2, "acceptance": 0.5, "draft_model": drafter}
        run = resolved(MODEL_AND_GPU, speculative=table)
        return serve(run.workload, run.system).end_ns

    assert end_ns("llama-3.2-1b") < end_ns("llama-3.1-8b")


# -- replicas, pipelines, limits


def test_replicas_router_and_limits_reach_the_system() -> None:
    run = resolved(
        deployment={"data_parallel_size": 3, "router": "round_robin"},
        engine={"max_num_queued_reqs": 7, "max_num_queued_tokens": "2k"},
    )
    system = run.system
    assert (system.num_replicas, system.router) == (3, "round_robin")
    assert (system.max_num_queued_reqs, system.max_num_queued_tokens) == (7, 2000)
    assert run.num_gpus == 3


def test_gpus_are_counted_over_all_that_they_are_spread_over() -> None:
    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 3}
    run = resolved(MODEL_AND_GPU, deployment=parallel)
    assert run.num_gpus == 12
    assert run.config.pipeline_parallel_size == 2
    value, source = settings(run)["router"]
    assert (value, "internal load balancing" in source) == ("vllm", True)


def test_stages_share_the_weights_so_that_more_blocks_fit() -> None:
    one, two = (resolved(MODEL_AND_GPU, deployment={"pipeline_parallel_size": n}).config for n in (1, 2))
    assert two.num_gpu_blocks > 2 * one.num_gpu_blocks


def test_patience_reaches_the_workload() -> None:
    assert resolved(flags={"request_timeout": "2m"}).workload.request_timeout_ns == 120 * 10**9
    assert resolved(flags={"request_timeout": "1ns"}).workload.request_timeout_ns == 1
    assert resolved(flags={"request_timeout": "1e-12"}).workload.request_timeout_ns == 1
    assert resolved().workload.request_timeout_ns is None


# -- how much such systems can serve


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"batching": "static:batch_size=4"},
        {"batching": "static:batch_size=4,batch_timeout=5ms,answers=streamed"},
        {"batching": "dynamic:max_batch_size=4"},
        {"batching": "dynamic:max_batch_size=4,max_queue_size=3"},
        {"batching": "dynamic:max_batch_size=4,default_timeout_microseconds=1000,timeout_action=REJECT"},
        {"batching": "swap:num_cpu_blocks=100,block_bytes=1MiB"},
        {"batching": "continuous:prefill_first=true"},
        {"speculative": "eagle3:num_speculative_tokens=2,acceptance=0.7"},
        {"deployment": {"pipeline_parallel_size": 2}},
        {"deployment": {"data_parallel_size": 2}},
        {"engine": {"max_num_queued_reqs": 2, "max_num_queued_tokens": 100}},
    ],
)
def test_every_system_has_a_highest_throughput(sections: dict[str, Any]) -> None:
    run = resolved(engine={"max_num_seqs": 4, **sections.pop("engine", {})}, **sections)
    rate = saturation_request_throughput(run.workload, run.system)
    # four at once, 20 steps of 10 ms each for 20 tokens: 20 a second, more only with drafts, replicas or stages
    best = 20.0 * (2 if sections.get("deployment") else 3 if sections.get("speculative") else 1)
    assert rate is not None
    assert 0.6 * best / (3 if sections else 1) < rate <= best * 1.001


def test_replicas_serve_so_many_times_as_much() -> None:
    one, three = (resolved(engine={"max_num_seqs": 4}, deployment={"data_parallel_size": n}) for n in (1, 3))
    rates_ = [saturation_request_throughput(run.workload, run.system) for run in (one, three)]
    assert rates_[0] is not None
    assert rates_[1] == pytest.approx(3 * rates_[0])


# -- from the command line

FLAGS = [
    *("simulate", "--num-gpu-blocks-override", "500", "--cost", "constant:step_s=10ms", "--num-prompts", "12"),
    *("--input-len", "100", "--output-len", "20", "--rate", "50", "--quiet"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WINDTUNNEL_DEBUG", raising=False)
    Path("ok.pbtxt").write_text(PBTXT)
    Path("bad.pbtxt").write_text("max_batch_size: [ {")
    Path("binary").write_bytes(bytes(range(256)))
    Path("empty").write_text("")
    Path("words").write_text("1\nmany\n")
    Path("deep").write_text("[" * 100_000)
    Path("null.json").write_text('{"spec_decode_per_position_acceptance_rates": [null, 1, 2]}')
    Path("other.json").write_text("{}")
    Path("short.json").write_text('{"spec_decode_per_position_acceptance_rates": [0.5]}')
    Path("seven").write_text("[1, 7]")
    Path("model.json").write_text("{")
    return tmp_path


@pytest.mark.parametrize(
    "flags",
    [
        ["--batching", "static:batch_size=4"],
        ["--batching", "static:batch_size=4,answers=streamed", "--request-timeout", "150ms"],
        ["--batching", "dynamic:config=ok.pbtxt"],
        ["--batching", "dynamic:max_batch_size=2,max_queue_size=1"],
        ["--batching", "swap:num_cpu_blocks=5,block_bytes=1MiB"],
        ["--batching", "continuous:prefill_first=true"],
        ["--speculative-config", "ngram:num_speculative_tokens=3,acceptance=0.8/0.6/0.4"],
        ["--dp", "2", "--pp", "2", "--router", "round_robin"],
        ["--max-num-queued-reqs", "0"],
        ["--max-num-queued-tokens", "0"],
        ["--request-timeout", "1ns"],
        ["--request-timeout", "50ms", "--max-concurrency", "2", "--async-scheduling"],
    ],
)
def test_the_summary_is_json_whatever_the_policy(flags: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--json", *flags]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["num_prompts"] == 12
    assert 0 <= summary["completed"] <= 12


S, B = "--speculative-config", "--batching"


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        # policies
        ([B, ""], 2, "policy = '' in [batching] must be one of 'continuous', 'static'"),
        ([B, "best"], 2, "policy = 'best' in [batching] must be one of"),
        ([B, "{"], 2, "is no valid JSON"),
        ([B, '{"a":' + "[" * 60_000], 2, "is no valid JSON: it is nested too deeply"),
        ([B, "[1]"], 2, "policy = '[1]'"),
        ([B, "static"], 2, "missing 'batch_size' in [batching]"),
        ([B, "static:batch_size=0"], 2, "batch_size = 0 in [batching] must be at least 1"),
        ([B, "static:batch_size=4,foo=3"], 2, "unknown key 'foo' in [batching]; known are policy, batch_size"),
        ([B, "static:batch_size=4,max_batch_size=4"], 2, "it needs policy = 'dynamic'"),
        ([B, "static:batch_size=4,batch_timeout=soon"], 2, "must be a duration"),
        ([B, "static:batch_size=4", "--async-scheduling"], 2, "--async-scheduling: async_scheduling is True"),
        ([B, "static:batch_size=4", "--pp", "2"], 2, "--batching: pipeline_parallel_size is 2"),
        (
            [B, "static:batch_size=4", S, "ngram:num_speculative_tokens=1,acceptance=0.5"],
            2,
            "num_speculative_tokens is 1",
        ),
        ([B, "dynamic"], 2, "dynamic batching needs max_batch_size, or a config.pbtxt"),
        ([B, "dynamic:max_batch_size=8,preferred_batch_size=16"], 2, "between 1 and max_batch_size (8), got 16"),
        ([B, "dynamic:max_batch_size=8,preferred_batch_size=4/x"], 2, "must be a whole number"),
        ([B, "dynamic:max_batch_size=8,preferred_batch_size=0"], 2, "must be at least 1"),
        ([B, "dynamic:max_batch_size=8,timeout_action=FLEE"], 2, "must be one of 'REJECT' or 'DELAY'"),
        ([B, "dynamic:max_batch_size=8,priority_levels=3"], 2, "default_priority_level must lie between 1 and"),
        ([B, "dynamic:config=missing.pbtxt"], 3, "cannot read config missing.pbtxt"),
        ([B, "dynamic:config=bad.pbtxt"], 3, "bad.pbtxt: line 1"),
        ([B, "dynamic:config=binary"], 3, "not UTF-8 text"),
        ([B, "dynamic:config=."], 3, "Is a directory"),
        ([B, "dynamic:config=ok.pbtxt,max_batch_size=2"], 2, "between 1 and max_batch_size (2), got 4"),
        ([B, "swap"], 2, "give a model, or block_bytes"),
        ([B, "swap:num_cpu_blocks=10"], 2, "give a model, or block_bytes"),
        ([B, "swap:swap_space=some,block_bytes=1MiB"], 2, "must be bytes or a size with a unit"),
        ([B, "swap:swap_space=1GiB,num_cpu_blocks=3,block_bytes=1MiB"], 2, "say the same thing twice"),
        ([B, "swap:num_cpu_blocks=3,block_bytes=1MiB,pcie_bandwidth=0"], 2, "must be at least 1"),
        ([B, "swap:num_cpu_blocks=3,block_bytes=1MiB", "--pp", "2"], 2, "which swapping does not support"),
        ([B, "continuous:prefill_first=true", "--enable-chunked-prefill"], 2, "set enable_chunked_prefill to false"),
        ([B, "continuous:batch_size=3"], 2, "it needs policy = 'static'"),
        # speculation
        ([S, ""], 2, "method = '' in [speculative] must be one of"),
        (
            [S, "medusa:num_speculative_tokens=1"],
            2,
            "'medusa' in [speculative] must be one of 'ngram', 'eagle'",
        ),
        ([S, "eagle3"], 2, "speculation needs num_speculative_tokens"),
        ([S, "eagle3:acceptance=0.7"], 2, "speculation needs num_speculative_tokens"),
        ([S, "eagle3:num_speculative_tokens=3"], 2, "needs to know how many drafts hold: give acceptance"),
        ([S, '{"method": "eagle3", "model": "x", "num_speculative_tokens": 3}'], 2, "give acceptance"),
        ([S, '{"num_speculative_tokens": 3, "acceptance": 0.5}'], 2, "who drafts: give a method"),
        ([S, "eagle3:num_speculative_tokens=-1"], 2, "must be at least 0"),
        ([S, "eagle3:num_speculative_tokens=few"], 2, "must be a whole number"),
        ([S, '{"method": "eagle3", "num_speculative_tokens": 2.5}'], 2, "must be a whole number"),
        ([S, '{"a"'], 2, "is no valid JSON"),
        ([S, '{"a":' + "[" * 60_000], 2, "nested too deeply"),
        ([S, "[1, 2]"], 2, "must be one of 'ngram'"),
        ([S, "eagle3:foo=1"], 2, "unknown key 'foo' in [speculative]; known are method"),
        ([S, '{"method": "eagle3", "model": "a", "draft_model": "b"}'], 2, "leave out model or draft_model"),
        ([S, "eagle3:num_speculative_tokens=3,acceptance=1.5"], 2, "must lie between 0 and 1, got 1.5"),
        ([S, "eagle3:num_speculative_tokens=3,acceptance=nan"], 2, "must lie between 0 and 1, got nan"),
        (
            [S, "eagle3:num_speculative_tokens=3,acceptance=true"],
            2,
            "acceptance = true in [speculative] must be",
        ),
        ([S, '{"method": "mtp", "num_speculative_tokens": 1, "acceptance": ["a"]}'], 2, "must be a rate such as 0.7"),
        ([S, '{"method": "mtp", "num_speculative_tokens": 1, "acceptance": {}}'], 2, "must be a rate such as 0.7"),
        ([S, '{"method": "mtp", "num_speculative_tokens": 1, "acceptance": []}'], 2, "acceptance has 0 rates"),
        ([S, "eagle3:num_speculative_tokens=3,acceptance=0.4/0.6/0.8"], 2, "must not rise, got 0.4 and then 0.6"),
        ([S, "eagle3:num_speculative_tokens=3,acceptance=0.8/0.6"], 2, "acceptance has 2 rates, one for each position"),
        (
            [S, "eagle3:num_speculative_tokens=3,acceptance=0.5,synthetic_acceptance_length=2"],
            2,
            "the same thing twice",
        ),
        (
            [S, "eagle3:num_speculative_tokens=3,synthetic_acceptance_length=5"],
            2,
            "1 (4), got 5",
        ),
        ([S, "eagle3:num_speculative_tokens=3,acceptance=missing"], 3, "cannot read acceptance missing"),
        ([S, "eagle3:num_speculative_tokens=3,acceptance=."], 3, "Is a directory"),
        ([S, "eagle3:num_speculative_tokens=3,acceptance=binary"], 3, "not UTF-8 text"),
        (
            [S, "eagle3:num_speculative_tokens=3,acceptance=empty"],
            3,
            "the recording of accepted tokens is empty",
        ),
        ([S, "eagle3:num_speculative_tokens=3,acceptance=words"], 3, "words:2: 'many' is no whole number"),
        ([S, "eagle3:num_speculative_tokens=3,acceptance=deep"], 3, "deep: not valid JSON: nested too deeply"),
        ([S, "eagle3:num_speculative_tokens=3,acceptance=null.json"], 3, "must hold numbers between 0 and 1"),
        ([S, "eagle3:num_speculative_tokens=3,acceptance=other.json"], 3, "has no list spec_decode_per_position"),
        ([S, "eagle3:num_speculative_tokens=3,acceptance=short.json"], 3, "has 1 rates"),
        ([S, "eagle3:num_speculative_tokens=3,acceptance=seven"], 3, "has 7 accepted tokens"),
        ([S, "eagle3:num_speculative_tokens=3,acceptance=0.5,draft_s=-1"], 2, "must be a duration"),
        # replicas, stages, limits, patience
        (["--dp", "0"], 2, "data_parallel_size = '0' in [deployment] must be at least 1"),
        (["--dp", "two"], 2, "must be a whole number"),
        (["--pp", "0"], 2, "pipeline_parallel_size = '0' in [deployment] must be at least 1"),
        (["--router", "x"], 2, "router = 'x' in [deployment] must be one of 'vllm', 'round_robin', 'least_requests'"),
        (["--max-num-queued-reqs", "-1"], 2, "max_num_queued_reqs = '-1' in [engine] must be at least 0"),
        (["--max-num-queued-tokens", "-1"], 2, "max_num_queued_tokens = '-1' in [engine] must be at least 0"),
        (["--request-timeout", "0"], 2, "request_timeout = '0' in [workload] must be above 0"),
        (["--request-timeout", "-1"], 2, "must be a duration"),
        (["--request-timeout", "inf"], 2, "must be a duration"),
        (["--request-timeout", "late"], 2, "must be a duration"),
    ],
)
def test_a_wrong_flag_gives_one_clear_error(
    flags: Sequence[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refusal([*FLAGS, *flags], code, words, capsys)


ON_A_GPU = [
    *("simulate", "--model", "llama-3.1-8b", "--gpu", "h100", "--num-prompts", "3", "--input-len", "9"),
    *("--output-len", "2", "-q"),
]
DRAFTED = "draft_model:num_speculative_tokens=3,acceptance=0.5"


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--pp", "100"], 2, "--pipeline-parallel-size: pipeline_parallel_size is 100, but"),
        ([S, DRAFTED], 2, "--speculative-config: method draft_model needs to know the model that drafts"),
        ([S, f"{DRAFTED},draft_model=foo"], 2, "--speculative-config: unknown model 'foo'"),
        ([S, f"{DRAFTED},draft_model=model.json"], 3, "model.json, line 1: not valid JSON"),
        ([B, "static:batch_size=8", "--model", "llama-3.1-70b"], 4, "GiB"),
    ],
)
def test_what_does_not_fit_the_hardware_gives_one_clear_error(
    flags: Sequence[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refusal([*ON_A_GPU, *flags], code, words, capsys)


def check_refusal(arguments: Sequence[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = main(list(arguments))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error: ") == 1
    assert "Traceback" not in captured.err
    assert "bug in windtunnel" not in captured.err
    assert words in captured.err
    assert got == code


def test_a_section_in_its_short_form_and_one_of_its_keys_go_together() -> None:
    scenario = {
        "name": "short",
        "workload": WORK,
        "cost": "constant:step_s=10ms",
        "batching": "static:batch_size=4",
        "deployment": WITHOUT,
    }
    given = {"batch_size": Override(2, "--set"), "step_s": Override("1ms", "--set")}
    run = resolve(load_scenario(scenario, given))
    assert run.system.batching == StaticConfig(2)
    assert run.cost.describe()["step_s"] == 0.001


@pytest.mark.parametrize(
    ("engine", "to_front", "spares"), [("0.23", False, False), ("0.24", True, False), ("0.31", True, True)]
)
def test_the_rules_of_a_release_reach_the_scheduler(engine: str, to_front: bool, spares: bool) -> None:
    run = resolved(MODEL_AND_GPU, deployment={"engine_version": engine})
    assert run.config.free_blocks_to_front is to_front
    assert run.config.long_prefill_spares_lone_request is spares
    bare = resolved(deployment={"engine_version": engine})
    assert bare.config.free_blocks_to_front is to_front


@pytest.mark.parametrize("batching", ["swap:swap_space=1GiB", "continuous:prefill_first=true"])
def test_policies_that_know_no_asynchronous_scheduling_say_so(batching: str) -> None:
    warned = resolved(MODEL_AND_GPU, flags={"batching": batching})
    assert any("async_scheduling = false" in text for text in warned.warnings)
    told = resolved(MODEL_AND_GPU, flags={"batching": batching, "async_scheduling": False})
    assert not any("async_scheduling = false" in text for text in told.warnings)
