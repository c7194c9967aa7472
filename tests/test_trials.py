"""Trials: the same numbers as ``simulate``, one key for one question, and obstacles as results."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

import windtunnel as wt
from windtunnel.rundir import to_json
from windtunnel.scenarios.errors import ScenarioError, ScenarioUnreadable
from windtunnel.scenarios.load import load_scenario
from windtunnel.trials import make_trial, run_trial
from windtunnel.workers import Job, Store, Workers, canonical_json

SMALL = """\
name = "small"
teaches = "Fewer seats make a queue."

[deployment]
num_gpu_blocks_override = 200

[engine]
max_num_seqs = 8
max_num_batched_tokens = 512
max_model_len = 1024

[workload]
num_requests = 40
input = "uniform:low=10,high=300"
output = 20
request_rate = 5

[cost]
kind = "constant"
step_s = "10ms"
"""
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02}.6805900,{100 + second},{5 + second}\n" for second in range(20)
)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with small.toml and trace.csv in it."""
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(SMALL, "utf-8")
    Path("trace.csv").write_text(TRACE, "utf-8")
    return tmp_path


def done(job: Job) -> dict[str, Any]:
    """What a worker makes of it, which gets a copy."""
    return run_trial(pickle.loads(pickle.dumps(job.argument)))


@pytest.mark.parametrize(
    ("scenario", "overrides"),
    [
        ("small.toml", {"max_num_seqs": 2}),
        ("small.toml", {"objectives": ["ttft:p99<1ms", "failed<1"], "goodput": ["ttft:500"]}),
        ("chat-8b-h100", {"num_requests": 60, "noise": True}),
        ("speculative-decoding", {"num_requests": 30}),
        (None, {"trace": "trace.csv", "num_gpu_blocks_override": 100, "cost": "constant:step_s=10ms"}),
    ],
)
def test_a_trial_has_the_numbers_of_simulate(small: Path, scenario: str | None, overrides: dict[str, Any]) -> None:
    found = done(make_trial(scenario, overrides, seed=3))
    run = wt.simulate(scenario, seed=3, **overrides)
    expected = {key: value for key, value in run.summary.items() if value is None or not isinstance(value, list | dict)}
    missing = {"date", "label", "tokenizer_id", "endpoint_type", "backend", "scenario", "rtfx"}
    assert expected.keys() - found.keys() == missing | {"windtunnel_schema_version"}
    for key in expected.keys() & found.keys():
        assert to_json({key: found[key]}) == to_json({key: expected[key]})
    assert (found["verdict"], found["infeasible"], found["seed"]) == (run.summary["stability"], None, 3)
    assert found["num_gpus"] == run.resolved["hardware"]["num_gpus"]
    assert json_able(found)


def json_able(value: dict[str, Any]) -> bool:
    return all(item is None or isinstance(item, str | int | float) for item in value.values())


def test_missed_objectives_are_named(small: Path) -> None:
    found = done(make_trial("small.toml", {"objectives": ["ttft:p99<1ms", "failed<1", "e2el:p50<2ms"]}))
    assert (found["slo_passed"], found["slo_missed"]) == (False, "ttft:p99<1ms, e2el:p50<2ms")
    assert done(make_trial("small.toml", {"objectives": ["failed<1"]}))["slo_missed"] is None


def test_the_memory_plan_is_told_with_its_interval_and_margin() -> None:
    found = {}
    for share in (0.8, 0.9, 0.95):
        made = done(make_trial("chat-8b-h100", {"num_requests": 20, "gpu_memory_utilization": share}))
        plan = wt.memory_plan("llama-3.1-8b", "h100-sxm", gpu_memory_utilization=share).to_dict()
        assert made["kv_cache_tokens"] == plan["kv_cache_tokens"]
        assert made["oom_margin_bytes"] == plan["oom_margin_bytes"]
        assert [made["kv_cache_tokens_low"], made["kv_cache_tokens_high"]] == [*plan["interval_90"].values()]
        assert made["memory_verdict"] == plan["verdict"]
        assert made["oom_margin_spread_bytes"] > 0
        found[share] = made
    assert found[0.8]["kv_cache_tokens"] < found[0.9]["kv_cache_tokens"] < found[0.95]["kv_cache_tokens"]
    assert found[0.8]["oom_margin_bytes"] > found[0.9]["oom_margin_bytes"] > found[0.95]["oom_margin_bytes"]


# --- obstacles and mistakes


def test_a_deployment_that_does_not_fit_is_a_result() -> None:
    found = done(make_trial("chat-8b-h100", {"model": "llama-3.3-70b", "num_requests": 5}, seed=4))
    assert found["verdict"] == "infeasible"
    assert "tensor_parallel_size" in found["infeasible"]
    assert found["seed"] == 4
    assert "completed" not in found


def test_settings_that_vllm_refuses_are_a_result(small: Path) -> None:
    found = done(make_trial("small.toml", {"max_num_seqs": 600}))
    assert found["verdict"] == "not possible"
    assert "max_num_seqs" in found["infeasible"]


def test_both_kinds_of_results_begin_with_the_same_keys(small: Path) -> None:
    possible, refused = done(make_trial("small.toml")), done(make_trial("small.toml", {"max_num_seqs": 600}))
    assert list(possible)[: len(refused)] == list(refused)


def test_what_is_no_setting_is_refused_when_the_trial_is_made(small: Path) -> None:
    with pytest.raises(ScenarioError, match="max_num_seqs"):
        make_trial("small.toml", {"max_num_seqss": 2})
    with pytest.raises(ScenarioUnreadable, match="nowhere"):
        make_trial("nowhere.toml")


def test_a_complaint_of_a_worker_names_file_and_line(small: Path) -> None:
    text = SMALL.replace("output = 20", 'output = "lognormal:mean=20"')
    Path("wrong.toml").write_text(text, "utf-8")
    line = 1 + text.splitlines().index('output = "lognormal:mean=20"')
    for num in (1, 2):
        jobs = [make_trial("small.toml"), make_trial("wrong.toml", seed=1), make_trial("wrong.toml", seed=2)]
        with Workers(num) as workers, pytest.raises(ScenarioError, match=rf"^wrong.toml:{line}: "):
            list(workers.map(jobs))


def test_an_override_is_blamed_as_such(small: Path) -> None:
    with pytest.raises(ScenarioError, match=r"^output=: "):
        done(make_trial("small.toml", {"output": "lognormal:mean=20"}))


# --- keys


def test_one_question_in_other_words_has_one_key(small: Path) -> None:
    key = make_trial("small.toml", {"max_num_seqs": 4}, seed=1).key
    renamed = SMALL.replace('"small"', '"other"').replace("max_num_seqs = 8", "max_num_seqs = 4")
    Path("other.toml").write_text(renamed, "utf-8")
    assert make_trial("other.toml", seed=1).key == key
    assert make_trial(load_scenario("other.toml").scenario, {"seed": 1}).key == key
    assert make_trial("small.toml", {"max_num_seqs": "4", "seed": 9}, seed=1).key == key


@pytest.mark.parametrize(
    "changes", [{"max_num_seqs": 5}, {"seed": 2}, {"request_rate": 6}, {"objectives": ["failed<1"]}]
)
def test_another_question_has_another_key(small: Path, changes: dict[str, Any]) -> None:
    given = {"max_num_seqs": 4, "seed": 1}
    assert make_trial("small.toml", given).key != make_trial("small.toml", {**given, **changes}).key


def test_paths_are_relative_to_the_scenario_and_work_from_anywhere(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    shutil.move("trace.csv", folder / "own.csv")
    text = SMALL[: SMALL.index("[workload]")] + '[workload]\ntrace = "own.csv"\n' + SMALL[SMALL.index("[cost]") - 1 :]
    (folder / "a.toml").write_text(text, "utf-8")
    job = make_trial("inside/a.toml")
    by_flag = make_trial("small.toml", {"trace": "inside/own.csv"})
    monkeypatch.chdir("/")
    assert done(job)["num_prompts"] == done(by_flag)["num_prompts"] == 20


def test_a_file_of_another_content_is_another_question(small: Path) -> None:
    before = make_trial("small.toml", {"trace": "trace.csv"})
    assert make_trial("small.toml", {"trace": "trace.csv"}).key == before.key
    Path("trace.csv").write_text(TRACE.rstrip("\n").rpartition("\n")[0] + "\n", "utf-8")
    after = make_trial("small.toml", {"trace": "trace.csv"})
    assert before.key != after.key
    assert done(after)["num_prompts"] == 19
    with pytest.raises(ScenarioUnreadable, match=r"trace\.csv has changed since this work began"):
        done(before)


def test_the_config_of_a_model_and_a_profile_are_files_too(small: Path) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(MODEL, "utf-8")
    given = {"model": "model", "gpu": "h100-sxm", "num_requests": 5}
    first = make_trial("chat-8b-h100", given)
    Path("model/config.json").write_text(MODEL.replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'), "utf-8")
    assert make_trial("chat-8b-h100", given).key != first.key


def test_the_pools_of_a_fleet_have_files_too(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()
    Path("inside/model.json").write_text(MODEL, "utf-8")
    pools = "[fleet.pools.one]\nreplicas = 2\n[fleet.pools.one.deployment]\n"
    text = SMALL + pools + 'model = "model.json"\ngpu = "h100-sxm"\n'
    Path("inside/a.toml").write_text(text, "utf-8")
    job = make_trial("inside/a.toml")
    Path("inside/model.json").write_text(MODEL.replace("512", "1024"), "utf-8")
    assert make_trial("inside/a.toml").key != job.key
    Path("inside/model.json").write_text(MODEL, "utf-8")
    monkeypatch.chdir("/")
    assert done(job)["num_gpus"] == 2


MODEL = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4,
"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 1000,
"max_position_embeddings": 8192, "torch_dtype": "bfloat16", "tie_word_embeddings": false}"""


# --- the same bytes, and the same after a resume


@pytest.mark.slow
def test_one_worker_two_processes_and_a_store_give_the_same_bytes(small: Path) -> None:
    jobs = [make_trial("small.toml", {"max_num_seqs": seats}, seed=seed) for seats in (1, 4, 600) for seed in (1, 2)]
    found = []
    for num in (1, 2):
        with Workers(num) as workers:
            found.append(canonical_json(list(workers.map(jobs))))
    with Store("kept") as store, Workers(1) as workers:
        list(workers.map(jobs[:3], store=store))
    with Store("kept") as store, Workers(2) as workers:
        found.append(canonical_json(list(workers.map(jobs, store=store))))
    assert len(set(found)) == 1


def test_a_run_after_another_is_as_it_would_be_alone(small: Path) -> None:
    """Whatever the process has kept of the one before: trace, memory plan, capacity."""
    given = {"trace": "trace.csv", "rate_scale": 1.5}
    alone = done(make_trial("small.toml", given))
    for other in ({"rate_scale": 3.0}, {"limit": 5}, {"max_num_seqs": 1}):
        done(make_trial("small.toml", {**given, **other}))
    assert done(make_trial("small.toml", given)) == alone
