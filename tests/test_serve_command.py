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
from typing import Any

import httpx
import pytest

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
    assert settings.cost.name == "roofline"


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


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its address, which it prints."""
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
            if match := re.search(r"Starting windtunnel API server on (http://\S+)", line):
                yield running, match[1]
                break
        else:
            raise AssertionError("it never started")
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_gracefully(number: signal.Signals) -> None:
    with process(*BARE) as (running, url):
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
    with pytest.raises(ValueError, match="speed must be above 0"):
        PacedClock(0.0)
