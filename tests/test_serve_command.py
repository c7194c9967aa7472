"""The command ``windtunnel serve``: what it refuses, and how a real process starts and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from bundle import bundle, fitted

from windtunnel.cli.main import main
from windtunnel.executor.server.build import ServedModel, ServerSettings
from windtunnel.executor.server.clock import PacedClock
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.cost.profile import save_profile

BARE = ("--cost", "constant:step_s=1ms", "--num-gpu-blocks-override", "100", "--max-model-len", "200")


def planned(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[ServedModel, ServerSettings]:
    """What the command would serve."""
    seen: list[Any] = []
    monkeypatch.setattr("windtunnel.cli.serve._run", lambda *given, **_: seen.append(given[:2]))
    assert main(["serve", *arguments]) == 0
    served, settings = seen[0]
    return served, settings


def test_flags_mean_what_they_mean_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    served, settings = planned(
        monkeypatch,
        *("--model", "llama-3.1-8b", "--gpu", "h100", "--max-model-len", "32k", "--max_num_seqs", "64"),
        *("--no-enable-prefix-caching", "--served-model-name", "a", "--served-model-name", "b", "--speed", "3"),
        *("--max-num-queued-reqs", "9", "--seed", "4"),
    )
    scheduler = settings.scheduler
    assert served.names == ("a", "b")
    assert served.vocab_size == 128_256
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_model_len) == (64, 8192, 32_000)
    assert not scheduler.enable_prefix_caching
    assert not scheduler.async_scheduling
    assert scheduler.num_gpu_blocks > 20_000, "from the memory plan"
    assert (settings.speed, settings.max_num_queued_reqs, settings.seed) == (3.0, 9, 4)
    assert settings.cost is not None
    assert settings.cost.name in ("fitted", "roofline"), "fitted where a profile of it is bundled"


def test_a_bundled_profile_is_named_like_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bundle(tmp_path, monkeypatch, [("llama-h100", fitted())])
    of_gpu = ("--model", "llama-3.1-8b", "--gpu", "h100", "--max-model-len", "32k")
    for flags in (of_gpu, (*BARE[2:], "--profile", "llama-h100")):
        _, settings = planned(monkeypatch, *flags)
        assert settings.cost is not None
        assert settings.cost.describe()["provenance"]["gpu"] == "H100-SXM"


def test_a_profile_prices_the_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_profile(ConstantCost(0.125), tmp_path / "profile.json")
    _, settings = planned(monkeypatch, "--profile", str(tmp_path / "profile.json"), *BARE[2:])
    assert isinstance(settings.cost, ConstantCost)
    assert settings.cost.step_s == 0.125


def test_a_real_executor_needs_neither_a_gpu_nor_a_price(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tiny_model import tiny_config

    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    served, settings = planned(monkeypatch, str(tmp_path), "--executor", "torch", "--kv-cache-memory-bytes", "1MiB")
    assert served.folder == tmp_path
    assert settings.cost is None, "nothing says what a simulated step would cost"
    bytes_of_a_block = 2 * 2 * 2 * 16 * 16 * 4  # keys and values, layers, KV heads, head size, tokens, float32
    assert settings.scheduler.num_gpu_blocks == 2**20 // bytes_of_a_block


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--executor", "warp"], "not one of sim, torch, triton"),
        ([*BARE, "--speed", "0"], "not above 0"),
        ([*BARE, "--speed", "1e300"], "1e+300 is not above 0 and at most 1e+06"),
        ([*BARE, "--speed", "nan"], "nan is not above 0"),
        ([*BARE, "--num-threads", "0"], "0 is not at least 1"),
        ([*BARE, "--default-output-tokens", "-1"], "-1 is below 0"),
        (["llama-3.1-8b", "--executor", "torch"], "executor 'torch' is not available: rope scaling 'llama3' lacks"),
        (["llama-3.1-8b", "--gpu", "a100-40gb", "--max-model-len", "-2"], "max_model_len"),
        ([], "no model: give --model"),
        (["--profile", "p.json", *BARE], "give one of them"),
        (["llama-3.1-8b", "--model", "qwen3-32b"], "give one of them"),
        (["--model", "no-such-model", *BARE], "unknown model"),
        (["--executor", "torch", "--num-gpu-blocks-override", "9", "--max-model-len", "99"], "needs a model"),
        ([*BARE, "--port", "99999"], "cannot listen on 127.0.0.1:99999"),
    ],
)
def test_what_cannot_be_served_is_refused_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: Sequence[str], told: str
) -> None:
    assert main(["serve", *arguments]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_cache_that_the_host_cannot_hold_is_refused_with_a_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    """A GPU's worth of blocks of a model this small is some 140 GiB of float32."""
    monkeypatch.setattr("windtunnel.executor.server.executors.free_host_bytes", lambda: 8 * 2**30)
    assert main(["serve", str(model_folder), "--executor", "torch", "--gpu", "h100"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(r"it needs [\d.]+ GiB of host memory .* --num-gpu-blocks-override \d+ or less", error)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    pytest.importorskip("torch")
    from tiny_model import tiny_config

    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    return tmp_path


def test_more_threads_than_the_machine_can_run_are_refused(
    capsys: pytest.CaptureFixture[str], model_folder: Path
) -> None:
    assert main(["serve", str(model_folder), "--executor", "torch", "--num-threads", "100000"]) == 2
    assert "num_threads must be at most" in " ".join(capsys.readouterr().err.split())


def test_the_start_says_where_weights_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    monkeypatch.setattr("windtunnel.executor.server.run.run_server", lambda *_, **__: None)
    real = ["--executor", "torch", "--kv-cache-memory-bytes", "1MiB", "--port", "0"]
    assert main(["serve", str(model_folder), *real, "--seed", "4"]) == 0
    assert "Weights: random, seed 4\n" in capsys.readouterr().err
    assert main(["serve", *BARE, "--port", "0"]) == 0
    assert "Weights" not in capsys.readouterr().err


@pytest.mark.parametrize("spelling", ["auto", "AUTO", "-1"])
def test_the_longest_context_that_fits_is_taken_on_request(monkeypatch: pytest.MonkeyPatch, spelling: str) -> None:
    deployment = ("--model", "llama-3.1-8b", "--gpu", "l4", "--max-model-len", spelling)
    scheduler = planned(monkeypatch, *deployment)[1].scheduler
    assert scheduler.max_model_len < 131_072
    assert scheduler.max_model_len <= scheduler.num_gpu_blocks * scheduler.block_size < scheduler.max_model_len + 32
    roomy = planned(monkeypatch, "--model", "llama-3.1-8b", "--gpu", "h100", "--max-model-len", spelling)[1].scheduler
    assert roomy.max_model_len == 131_072, "the model's own"


def test_the_longest_context_fits_the_cache_of_a_real_executor_too(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    real = (str(model_folder), "--executor", "torch", "--max-model-len", "-1")
    assert planned(monkeypatch, *real)[1].scheduler.max_model_len == 512
    scheduler = planned(monkeypatch, *real, "--kv-cache-memory-bytes", "128KiB")[1].scheduler
    assert scheduler.max_model_len == (scheduler.num_gpu_blocks - 1) * 16 == 240


def test_flags_without_effect_are_told(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*arguments: str) -> str:
        planned(monkeypatch, str(model_folder), *arguments)
        return " ".join(capsys.readouterr().err.split())

    real = ("--executor", "torch", "-tp", "2", "--speed", "5")
    alone = told(*real, "--gpu-memory-utilization", "0.5")
    assert "--tensor-parallel-size 2 has no effect on the torch executor, which has one device: leave it out" in alone
    assert "--speed 5 has no effect on the torch executor: it is for simulated steps" in alone
    assert "--gpu-memory-utilization has no effect without --gpu" in alone
    beside = told(*real, "--gpu", "h100", "--gpu-memory-utilization", "0.5", "--num-gpu-blocks-override", "99")
    assert "it is for the simulated deployment" in beside
    assert "it is for simulated steps, once they are swapped in" in beside
    assert "--gpu-memory-utilization" not in beside
    assert told("--gpu", "h100", "--speed", "5", "-tp", "2", "--num-threads", "2") == ""


def test_what_the_metrics_say_of_the_cache_is_what_was_given(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    def told(*arguments: str) -> tuple[Any, ...]:
        fields = planned(monkeypatch, str(model_folder), *arguments)[1].cache
        names = ("gpu_memory_utilization", "num_gpu_blocks_override", "kv_cache_memory_bytes")
        return (*(fields[name] for name in names), fields["user_specified_block_size"])

    assert told("--gpu", "h100") == (0.92, None, None, False)
    given = ("--gpu-memory-utilization", "0.5", "--num-gpu-blocks-override", "1k", "--block-size", "16")
    assert told("--gpu", "h100", *given) == (0.5, 1000, None, True)
    assert told("--gpu", "h100", "--kv-cache-memory-bytes", "1GiB") == (0.92, None, 2**30, False)
    assert told("--executor", "torch") == (0.92, None, 2**30, False), "its own default"


@pytest.mark.parametrize(("number", "expected"), [("0", None), ("40", 40)])
def test_the_length_of_unlimited_answers_is_set(
    monkeypatch: pytest.MonkeyPatch, number: str, expected: int | None
) -> None:
    assert planned(monkeypatch, *BARE)[1].default_output_tokens == 256
    assert planned(monkeypatch, *BARE, "--default-output-tokens", number)[1].default_output_tokens == expected


def test_without_torch_the_extra_to_install_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *more: None if name == "torch" else found(name, *more))
    assert main(["serve", "llama-3.1-8b", "--executor", "torch"]) == 2
    assert "pip install 'windtunnel[executor]'" in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", *BARE, "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another --port" in capsys.readouterr().err


class Running(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    told: list[str]
    """Its first lines."""


@contextmanager
def process(*arguments: str) -> Iterator[Running]:
    """A server of its own."""
    told: list[str] = []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    running = subprocess.Popen(
        [sys.executable, "-m", "windtunnel", "serve", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert running.stderr is not None
        for line in running.stderr:
            told.append(line.rstrip())
            if match := re.search(r"Starting windtunnel API server on (http://\S+)", line):
                yield Running(running, match[1], told)
                break
        else:
            raise AssertionError("it never started")
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_gracefully(number: signal.Signals) -> None:
    with process(*BARE) as (running, url, _):
        body = {"prompt": "a", "max_tokens": 100}
        with httpx.stream("POST", url + "/v1/completions", json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.send_signal(number)
            assert [line for line in lines if line][-1] == "data: [DONE]", "what had begun is answered"
        assert running.wait(timeout=20) == 0


# -- the clock


def test_the_clock_runs_at_its_speed_and_slips_back() -> None:
    clock = PacedClock(1000.0)
    before_ns = clock.now_ns()
    assert clock.sleep_towards(before_ns + 5_000_000_000) <= 0
    after_ns = clock.now_ns()
    assert after_ns - before_ns >= 5_000_000_000
    clock.slip_to(before_ns)
    assert before_ns <= clock.now_ns() < after_ns
    assert clock.num_slipped_ns > 0
    clock.set_speed(1.0)
    assert clock.speed == 1.0
    with pytest.raises(ValueError, match="at most 1e\\+06, got 1e\\+300"):
        clock.set_speed(1e300)
    with pytest.raises(ValueError, match="speed must be above 0"):
        PacedClock(0.0)
