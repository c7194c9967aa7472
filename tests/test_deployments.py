"""Deployments as people hold them: command lines, config files, compose files, charts, manifests, logs, Python."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO_ROOT
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.scenarios.deployments import (
    SETTINGS,
    DeploymentError,
    DeploymentUnreadable,
    ImportedDeployment,
    compose_service,
    helm_values,
    read_deployment,
    read_deployments,
    serve_command,
    without_defaults,
)
from windtunnel.scenarios.deployments.options import options
from windtunnel.scenarios.errors import ScenarioError
from windtunnel.scenarios.schema import Deployment, Engine

GIB = 2**30


def settings_of(line: str) -> dict[str, Any]:
    """What a ``vllm serve MODEL`` line with these flags sets, but for the model."""
    found = dict(read_deployment(f"vllm serve org/model {line}").settings)
    assert found.pop("model") == "org/model"
    return found


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def has_note(deployment: ImportedDeployment, *parts: str) -> bool:
    return any(all(part in note for part in parts) for note in deployment.notes)


# ------------------------------------------------------------------ flags


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--max-num-seqs 64", {"max_num_seqs": 64}),
        ("--max_num_seqs=64", {"max_num_seqs": 64}),
        ("-tp 4", {"tensor_parallel_size": 4}),
        ("-tp=4", {"tensor_parallel_size": 4}),
        ("--tensor-parallel 4", {"tensor_parallel_size": 4}),
        ("--gpu-memory-utilizatio 0.9", {"gpu_memory_utilization": 0.9}),
        ("--device-memory-utilization 0.9", {"gpu_memory_utilization": 0.9}),
        ("--kv-cache-memory 5G", {"kv_cache_memory_bytes": 5 * GIB}),
        ("--kv-cache-memory-bytes 5g", {"kv_cache_memory_bytes": 5 * 10**9}),
        ("--max-num-batched-tokens 16k", {"max_num_batched_tokens": 16_000}),
        ("--max-num-batched-tokens 16K", {"max_num_batched_tokens": 16_384}),
        ("--max-model-len 1.5k", {"max_model_len": 1500}),
        ("--max-model-len auto", {"max_model_len": -1}),
        ("--max-model-len -1", {"max_model_len": -1}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--no_enable_prefix_caching", {"enable_prefix_caching": False}),
        ("--enforce-eager", {"enforce_eager": True}),
        ("-ep", {"enable_expert_parallel": True}),
        ("-O3", {"optimization_level": "3"}),
        ("-O 3", {"optimization_level": "3"}),
        ("-q awq", {"quantization": "awq"}),
        ("-qawq", {"quantization": "awq"}),
        ("--quantization None", {}),
        ("--swap-space 4", {"swap_space": 4 * GIB}),
        ("--cudagraph-capture-sizes 1 2 4", {"cudagraph_capture_sizes": [1, 2, 4]}),
        ('--hf-overrides \'{"a": {"b": 1}}\'', {"hf_overrides": {"a": {"b": 1}}}),
        ("--hf-overrides.a.b 1 --hf_overrides.a.c_d=2k", {"hf_overrides": {"a": {"b": 1, "c_d": 2000}}}),
        ("--hf-overrides.archs+ x,y", {"hf_overrides": {"archs": ["x", "y"]}}),
        ("--limit-mm-per-prompt.image 2", {"limit_mm_per_prompt": {"image": 2}}),
        ("-sc.method ngram", {"speculative_config": {"method": "ngram"}}),
        (
            "--spec-method ngram --spec-tokens 3",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
        (
            "--speculative-model x/y --num-speculative-tokens 5",
            {"speculative_config": {"model": "x/y", "num_speculative_tokens": 5}},
        ),
    ],
)
def test_a_flag_is_read_in_every_spelling_that_vllm_takes(line: str, expected: dict[str, Any]) -> None:
    assert settings_of(line) == expected


def test_the_settings_that_a_scenario_has_are_called_as_there() -> None:
    keys = {*Deployment.model_fields, *Engine.model_fields}
    elsewhere = {"gpu", "usage_context", "engine_version", "router"}
    assert keys - elsewhere <= set(SETTINGS)


def test_flags_that_play_no_part_are_named() -> None:
    found = read_deployment("vllm serve m --port 8000 --trust-remote-code --served-model-name a b --port 8001")
    assert found.ignored == ("--port", "--trust-remote-code", "--served-model-name")
    assert set(found.settings) == {"model"}


@pytest.mark.parametrize(
    ("flag", "near"),
    [("--max-num-sequences", "--max-num-seqs"), ("--gpu-mem-utilization", "--gpu-memory-utilization")],
)
def test_an_unknown_flag_is_named_with_the_nearest_one(flag: str, near: str) -> None:
    found = read_deployment(f"vllm serve m {flag} 3 --enforce-eager")
    assert found.unknown == (f"{flag} is no flag of vLLM: {near} is the nearest",)
    assert found.settings == {"model": "m", "enforce_eager": True}


def test_the_word_behind_an_unknown_flag_can_still_be_the_model() -> None:
    assert read_deployment("vllm serve --enable-frobnication org/model").settings["model"] == "org/model"


def test_an_ambiguous_abbreviation_is_not_guessed() -> None:
    found = read_deployment("vllm serve m --max-num 3")
    assert found.settings == {"model": "m"}
    assert "--max-num-seqs" in found.unknown[0]
    assert found.unknown[0].startswith("--max-num may mean ")
    assert found.unknown[0].endswith(": write one of them in full")


def test_a_later_flag_takes_the_place_of_an_earlier_one_and_says_so() -> None:
    found = read_deployment("vllm serve m --max-num-seqs 3 --max_num_seqs 9")
    assert found.settings["max_num_seqs"] == 9
    assert has_note(found, "--max_num_seqs 9", "takes the place of --max-num-seqs 3")


def test_a_later_none_undoes_an_earlier_value() -> None:
    found = read_deployment("vllm serve m --quantization fp8 --quantization None")
    assert found.settings == {"model": "m"}
    assert has_note(found, "undoes", "fp8")


@pytest.mark.parametrize("value", ["--enable-prefix-caching=False", "--enable-prefix-caching false"])
def test_a_value_behind_a_switch_is_understood_and_called_a_trap(value: str) -> None:
    found = read_deployment(f"vllm serve m {value}")
    assert found.settings["enable_prefix_caching"] is False
    assert has_note(found, "vLLM refuses", "--no-enable-prefix-caching")


def test_flag_and_value_in_one_argument_are_taken_apart_with_a_note() -> None:
    found = read_deployment(["vllm", "serve", "m", "--max-model-len 8192"])
    assert found.settings["max_model_len"] == 8192
    assert has_note(found, "'--max-model-len 8192'", "one argument")


def test_a_flag_of_an_old_release_says_since_when_it_is_gone() -> None:
    found = read_deployment("vllm serve m --swap-space 4 --num-scheduler-steps 8")
    assert has_note(found, "--swap-space", "0.18.0")
    assert has_note(found, "--num-scheduler-steps", "0.10.1")


def test_a_flag_that_the_images_release_does_not_have_is_told() -> None:
    found = read_deployment("docker run vllm/vllm-openai:v0.11.0 --model m --watermark 0.05 --swap-space 4")
    assert found.engine_version == "vllm-0.11.0"
    assert has_note(found, "vLLM 0.11.0 refuses --watermark", "0.24.0")
    assert not has_note(found, "--swap-space")


def test_a_model_before_dash_dash_model_is_the_one_that_counts() -> None:
    found = read_deployment("vllm serve a/b --model c/d")
    assert found.settings["model"] == "a/b"
    assert has_note(found, "takes the place of --model c/d")


# ------------------------------------------------------------------ wrong values


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--tensor-parallel-size 0", ["--tensor-parallel-size = '0'", "at least 1"]),
        ("--max-num-seqs many", ["--max-num-seqs = 'many'", "whole number"]),
        ("--max-num-seqs 1k", ["takes no suffix", "write 1000"]),
        ("--block-size 16.0", ["whole number", "write 16"]),
        ("--max-model-len 0", ["at least 1, or -1 for the longest that fits"]),
        ("--max-model-len 1.5K", ["write 1.5k"]),
        ("--gpu-memory-utilization 90", ["above 0 and at most 1", "write 0.9"]),
        ("--gpu-memory-utilization 95%", ["must be a number", "write 0.95"]),
        ("--gpu-memory-utilization nan", ["above 0 and at most 1"]),
        ("--watermark 1", ["at least 0 and below 1"]),
        ("--kv-cache-memory-bytes 16GB", ["1g is 10**9 and 1G is 2**30", "write 16000000000", "7 %"]),
        ("--kv-cache-memory-bytes 16GiB", ["write 17179869184"]),
        ("--swap-space 16GiB", ["GiB without a unit: write 16"]),
        ("--cpu-offload-gb 10GB", ["10GB are 9.313 GiB", "write 9.313"]),
        ("--dtype fp16", ["must be one of auto, bfloat16"]),
        ("--kv-cache-dtype fp4", ["must be one of auto"]),
        ("--max-lora-rank 17", ["must be one of 1, 8, 16"]),
        ("--scheduling-policy lifo", ["must be one of fcfs, priority"]),
        ("--speculative-config {method:ngram}", ["no valid JSON", "single quotes"]),
        ("--max-num-seqs", ["needs a value"]),
        ("--max-num-seqs --enforce-eager", ["needs a value"]),
        ("--enforce-eager=yes", ["takes no value"]),
        ("--config", ["path of a YAML file"]),
        ("--spec-tokens 3 --speculative-config.num_speculative_tokens 4", ["leave one out"]),
    ],
)
def test_a_wrong_value_is_one_error_with_its_remedy(line: str, parts: list[str]) -> None:
    with pytest.raises(DeploymentError) as caught:
        read_deployment(f"vllm serve m {line}")
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("serve.sh", "#!/bin/sh\n\nvllm serve m \\\n  --max-num-seqs 0\n", 4),
        ("vllm.yaml", "model: m\nmax-num-seqs: 0\n", 2),
        (
            "compose.yaml",
            "services:\n  a:\n    image: vllm/vllm-openai\n    command:\n    - --max-num-seqs\n    - 0\n",
            5,
        ),
        ("run.py", "from vllm import LLM\nLLM('m',\n    max_num_seqs=0)\n", 3),
        ("model.json", '{"model": "m",\n "max_num_seqs": 0}', 2),
    ],
)
def test_a_wrong_value_names_its_file_and_line(name: str, text: str, line: int, tmp_path: Path) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(DeploymentError, match="at least 1") as caught:
        read_deployment(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(
    ("keywords", "part"),
    [
        ({"tensor_parallel_size": True}, "whole number"),
        ({"tensor_parallel_size": 2.0}, "whole number"),
        ({"enforce_eager": "yes"}, "True or False"),
        ({"gpu_memory_utilization": 1.5}, "at most 1"),
        ({"quantization": 8}, "must be text"),
    ],
)
def test_keyword_arguments_are_checked_for_their_type(keywords: dict[str, Any], part: str) -> None:
    with pytest.raises(DeploymentError, match=part):
        read_deployment(keywords)


# ------------------------------------------------------------------ shell


def test_a_script_is_read_with_its_variables_arrays_and_comments(tmp_path: Path) -> None:
    script = write(
        tmp_path / "serve.sh",
        """#!/bin/bash
# vllm serve not/this --max-num-seqs 1
MODEL=org/model   # the one
EXTRA="--max-num-seqs 64 --enable-prefix-caching"
ARGS=(--dtype bfloat16
  --block-size 32)
ARGS+=(--kv-cache-dtype "fp8")
export CUDA_VISIBLE_DEVICES=0,1
VLLM_USE_V1=0 nohup vllm serve "$MODEL" -tp ${TP:-2} $EXTRA "${ARGS[@]}" \\
  --hf-overrides '{"a": "$MODEL # no"}' > log.txt 2>&1 &
echo started
""",
    )
    found = read_deployment(script)
    assert found.settings == {
        "model": "org/model",
        "tensor_parallel_size": 2,
        "max_num_seqs": 64,
        "enable_prefix_caching": True,
        "dtype": "bfloat16",
        "block_size": 32,
        "kv_cache_dtype": "fp8",
        "hf_overrides": {"a": "$MODEL # no"},
    }
    assert found.sources["block_size"] == f"{script}:6"
    assert found.sources["hf_overrides"] == f"{script}:10"
    assert found.num_gpus == 2
    assert has_note(found, "TP is taken as '2'")
    assert has_note(found, "VLLM_USE_V1=0", "V0 engine")


def test_a_variable_that_nothing_sets_is_named_and_its_flag_left_out() -> None:
    found = read_deployment("vllm serve $MODEL --max-model-len $LEN --max-num-seqs 8 $MORE")
    assert found.settings == {"max_num_seqs": 8}
    for name in ("$MODEL", "$LEN", "$MORE"):
        assert has_note(found, name)


@pytest.mark.parametrize(
    "line",
    [
        "$ vllm serve m --max-num-seqs 8",
        "CUDA_VISIBLE_DEVICES=0 uv run vllm serve m --max-num-seqs=8 | tee log",
        "/opt/venv/bin/vllm serve m --max-num-seqs 8 && echo ok",
        "python3 -m vllm.entrypoints.openai.api_server --model m --max-num-seqs 8",
        "python -m vllm.entrypoints.cli.main serve m --max-num-seqs 8",
        'bash -c "cd /x; exec vllm serve m --max-num-seqs 8"',
        "ssh host 'vllm serve m --max-num-seqs 8'",
        "docker run --rm -it --gpus all -v /a:/b -p8000:8000 vllm/vllm-openai:v0.9.2 --model m --max-num-seqs 8",
        "sudo docker run -d --entrypoint vllm my/image serve m --max-num-seqs 8",
        "ExecStart=/usr/bin/vllm serve m --max-num-seqs 8",
        "```bash\nvllm serve m \\\r\n  --max-num-seqs 8\r\n```",
        "m --max-num-seqs 8",
    ],
)
def test_vllm_is_found_however_it_is_started(line: str) -> None:
    kind = "auto" if "vllm" in line else "arguments"
    assert read_deployment(line, kind=kind).settings == {"model": "m", "max_num_seqs": 8}


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "serve", "m", "--max-num-seqs", "8"],
        ["m", "--max-num-seqs", "8"],
        ["--model", "m", "--max-num-seqs=8"],
        ["/bin/sh", "-c", "exec vllm serve m --max-num-seqs 8"],
    ],
)
def test_a_list_of_arguments_is_read(words: list[str]) -> None:
    assert read_deployment(words).settings == {"model": "m", "max_num_seqs": 8}


@pytest.mark.parametrize(("gpus", "count"), [("2", 2), ("'\"device=0,3\"'", 2), ("device=1", 1), ("all", None)])
def test_the_gpus_of_a_container_are_counted(gpus: str, count: int | None) -> None:
    assert read_deployment(f"docker run --gpus {gpus} vllm/vllm-openai:v0.9.2 --model m").num_gpus == count


def test_more_gpus_than_given_is_told() -> None:
    found = read_deployment("CUDA_VISIBLE_DEVICES=0,1 vllm serve m -tp 4")
    assert has_note(found, "take 4 GPUs", "given 2", "does not start")


def test_a_script_with_several_servers_holds_several_deployments(tmp_path: Path) -> None:
    script = write(tmp_path / "all.sh", "vllm serve a/b -tp 2 &\nvllm serve c/d --max-num-seqs 4\n")
    assert [found.name for found in read_deployments(script)] == ["a/b", "c/d"]
    assert read_deployment(script, name="c/d").settings["max_num_seqs"] == 4
    with pytest.raises(DeploymentError, match=r"choose one as .*all\.sh#NAME, by its name: a/b, c/d"):
        read_deployment(script)
    with pytest.raises(DeploymentError, match="no deployment 'x'; there are a/b, c/d"):
        read_deployment(script, name="x")


def test_headless_workers_are_no_deployment_of_their_own() -> None:
    text = "if [ $R = 0 ]; then\n exec vllm serve m -dp 4\nelse\n exec vllm serve m -dp 4 --headless\nfi"
    assert read_deployment(text).settings == {"model": "m", "data_parallel_size": 4}


def test_flags_cut_off_by_a_comment_are_told() -> None:
    found = read_deployment("vllm serve m --enforce-eager \\\n  # --max-num-seqs 4 \\\n  --block-size 32\n")
    assert found.settings == {"model": "m", "enforce_eager": True}
    assert has_note(found, "--block-size", "missing backslash")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("vllm serve m --max-model-len '8192 -tp 2", "'8192 -tp 2  is never closed: write ' where it ends"),
        ('vllm serve m --hf-overrides "{} -tp 2', '"{} -tp 2  is never closed: write " where'),
        ("vllm serve m --served-model-name $(basename m -tp 2", "$(basename m -tp 2  is never closed: write ) where"),
        ("vllm serve m --max-model-len ${LENGTH -tp 2", "${LENGTH -tp 2  is never closed: write } where"),
        ("vllm serve m -tp `nproc", "`nproc  is never closed: write ` where"),
        ('bash -c "vllm serve m -tp 2', '"vllm serve m -tp 2  is never closed'),
        ("docker run -e 'A=b vllm/vllm-openai --model m", "'A=b vllm/vllm-openai --model m  is never closed"),
        ("ARGS=(-tp 2\nvllm serve m", "(-tp 2  is never closed: write ) where it ends"),
        ("--max-model-len '8192", "'8192  is never closed"),
        (
            "non-default args: {'model': 'm, 'max_model_len': 8}",
            "is never closed, or one before it is missing: write '",
        ),
        ("non-default args: {'model': 'm', 'max_model_len': 8", "{'model': 'm', 'max_model_len': 8  is never closed"),
        ("non-default args: {'model': 'm', 'a': (1, 'b': 2}", "(1, 'b': 2}  is never closed: write ) where"),
        ("INFO args: Namespace(model='m, max_num_seqs=8)", "'m, max_num_seqs=8)  is never closed"),
        ("{'model': 'm, 'max_model_len': 8192}", "copy the whole line"),
        ("LLM(model='m, max_model_len=8192)", "'m, max_model_len=8192)  is never closed"),
    ],
)
def test_a_quote_or_bracket_without_its_end_is_refused_and_its_place_named(
    text: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises(DeploymentError) as info:
        read_deployment(text)
    assert told in str(info.value)
    kind = "arguments" if text.startswith("--") else "auto"
    file = write(tmp_path / "serve.txt", f"\n\n{text}")
    with pytest.raises(DeploymentError) as info:
        read_deployment(file, kind=kind)
    assert str(info.value).startswith(f"{file}:3: ")
    assert told in str(info.value)


def test_an_apostrophe_in_prose_around_a_command_is_no_quote() -> None:
    text = "It's easy, isn't it?  We're done:\n```\nvllm serve m -tp 2\n```\n# don't forget\n"
    assert read_deployment(text).settings == {"model": "m", "tensor_parallel_size": 2}


def test_quoted_json_may_go_over_lines(tmp_path: Path) -> None:
    lines = "--model m \\ \n--hf-overrides '{\n  \"a\": 1\n}' \\\n--max-model-len 8k\n"
    found = read_deployment(write(tmp_path / "flags.txt", lines))
    assert found.settings == {"model": "m", "hf_overrides": {"a": 1}, "max_model_len": 8000}
    assert found.sources["max_model_len"].endswith("flags.txt:5")


def test_the_value_of_a_flag_that_plays_no_part_does_not_matter() -> None:
    found = read_deployment("vllm serve m --port=$PORT --uvicorn-log-level $LEVEL")
    assert (found.settings, found.notes, found.ignored) == ({"model": "m"}, (), ("--port", "--uvicorn-log-level"))


# ------------------------------------------------------------------ config files


def test_a_config_file_is_read_with_its_lines(tmp_path: Path) -> None:
    config = write(
        tmp_path / "vllm.yaml",
        "model: org/model\nport: 8000\ntensor-parallel-size: 2\nmax_num_batched_tokens: 16k\nenforce-eager: true\n"
        "speculative-config:\n  method: ngram\n  num_speculative_tokens: 3\ncudagraph-capture-sizes: [1, 2]\n",
    )
    found = read_deployment(config)
    assert found.kind == "vllm-config"
    assert found.settings == {
        "model": "org/model",
        "tensor_parallel_size": 2,
        "max_num_batched_tokens": 16_000,
        "enforce_eager": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "cudagraph_capture_sizes": [1, 2],
    }
    assert found.sources["max_num_batched_tokens"] == f"{config}:4"
    assert found.ignored == ("--port",)


def test_false_in_a_config_file_switches_nothing_off(tmp_path: Path) -> None:
    config = write(tmp_path / "vllm.yaml", "model: m\nenable-prefix-caching: false\nenforce-eager: false\n")
    found = read_deployment(config)
    assert found.settings == {"model": "m"}
    assert has_note(found, f"{config}:2", "has no effect", "--no-enable-prefix-caching")
    assert not has_note(found, "enforce-eager")


def test_flags_win_over_the_config_file_whatever_their_order(tmp_path: Path) -> None:
    write(tmp_path / "c.yaml", "model: x/y\nmax-num-seqs: 1\nblock-size: 32\n")
    script = write(tmp_path / "serve.sh", "vllm serve m --max-num-seqs 2 --config c.yaml\n")
    found = read_deployment(script)
    assert found.settings == {"model": "m", "max_num_seqs": 2, "block_size": 32}
    assert has_note(found, "--max-num-seqs 2", f"{tmp_path / 'c.yaml'}:2")


def test_a_config_file_behind_an_equals_sign_is_a_trap(tmp_path: Path) -> None:
    write(tmp_path / "c.yaml", "max-num-seqs: 1\n")
    found = read_deployment(write(tmp_path / "serve.sh", "vllm serve m --config=c.yaml\n"))
    assert found.settings == {"model": "m"}
    assert has_note(found, "reads no config file", "--config=c.yaml")


def test_a_config_file_that_is_not_here_is_told() -> None:
    assert has_note(read_deployment("vllm serve m --config /etc/no/such.yaml"), "/etc/no/such.yaml", "not here")


# ------------------------------------------------------------------ Python and logs


def test_the_arguments_of_llm_are_read_from_a_program(tmp_path: Path) -> None:
    program = write(
        tmp_path / "offline.py",
        """import torch
from vllm import LLM
name = "org/model"
more = dict(max_num_seqs=8)
llm = LLM(model=name, tensor_parallel_size=2, dtype=torch.bfloat16,
          max_model_len=int(1e4), swap_space=8, seed=1, frobnicate=2, **more)
""",
    )
    found = read_deployment(program)
    assert found.usage_context == "llm_class"
    assert found.settings == {
        "model": "org/model",
        "tensor_parallel_size": 2,
        "dtype": "bfloat16",
        "swap_space": 8 * GIB,
        "max_num_seqs": 8,
    }
    assert found.sources["swap_space"] == f"{program}:6"
    assert has_note(found, "max_model_len = int(10000.0)", "no literal")
    assert found.unknown == (f"{program}:6: frobnicate is no flag of vLLM, and none is like it",)


@pytest.mark.parametrize(
    "text",
    [
        'LLM(model="m", max_num_seqs=8)',
        '>>> LLM("m", max_num_seqs=8)',
        "{'model': 'm', 'max_num_seqs': 8, 'port': 1}",
        '{"model": "m", "max_num_seqs": 8, "enforce_eager": null}',
    ],
)
def test_keyword_arguments_in_text_are_read(text: str) -> None:
    assert read_deployment(text).settings == {"model": "m", "max_num_seqs": 8}


def test_keyword_arguments_as_a_mapping_are_read() -> None:
    found = read_deployment({"model": "m", "max_num_seqs": 8, "max_model_len": None, "seed": 0})
    assert found.settings == {"model": "m", "max_num_seqs": 8}
    assert found.sources["max_num_seqs"] == "max_num_seqs"
    assert found.ignored == ("--seed",)


def test_the_non_default_arguments_of_a_log_are_read(tmp_path: Path) -> None:
    log = write(
        tmp_path / "vllm.log",
        "(APIServer pid=1) INFO 10-03 16:22:17 [api_server.py:1839] vLLM API server version 0.11.0\n"
        "(APIServer pid=1) INFO 10-03 16:22:17 [utils.py:233] non-default args: {'model_tag': 'm', 'port': 1, "
        "'model': 'm', 'max_model_len': 32768, 'kv_cache_dtype': 'fp8', 'attention_backend': <Backend.X: 1>, "
        "'kv_transfer_config': KVTransferConfig(a='b', c={'d': 1}), 'enable_prefix_caching': False}\n"
        "INFO later: {'max_num_seqs': 3}\n",
    )
    found = read_deployment(log)
    assert found.settings == {
        "model": "m",
        "max_model_len": 32768,
        "kv_cache_dtype": "fp8",
        "enable_prefix_caching": False,
    }
    assert (found.engine_version, found.usage_context) == ("vllm-0.11.0", "api_server")
    assert found.sources["max_model_len"] == f"{log}:2"
    assert has_note(found, "attention_backend")


def test_the_namespace_of_older_logs_is_read() -> None:
    text = "INFO [api_server.py:981] args: Namespace(subparser='serve', model_tag='m', config='', max_num_seqs=8)"
    assert read_deployment(text).settings == {"model": "m", "max_num_seqs": 8}


def test_of_several_starts_in_a_log_the_last_counts() -> None:
    text = "non-default args: {'model': 'a'}\nnon-default args: {'model': 'b', 'max_num_seqs': 2}\n"
    found = read_deployment(text)
    assert found.settings == {"model": "b", "max_num_seqs": 2}
    assert has_note(found, "2 starts")


# ------------------------------------------------------------------ compose

COMPOSE = """
x-gpu: &gpu
  deploy:
    resources:
      reservations:
        devices:
          - {driver: nvidia, count: 2, capabilities: [gpu]}
services:
  proxy: {image: nginx}
  chat:
    <<: *gpu
    image: vllm/vllm-openai:v0.10.2
    environment: {VLLM_USE_V1: "0"}
    command: >
      --model ${MODEL:-org/model}
      --max-model-len 32k -tp ${TP}
  embed:
    image: vllm/vllm-openai:latest
    command: ["--model", "c/d", "--gpu-memory-utilization=0.3"]
  shell:
    image: vllm/vllm-openai:v0.19.1
    entrypoint: [/bin/sh, -c]
    command:
      - |
        echo "$$HOME"
        exec vllm serve e/f \\
          --max-num-seqs 7
  doubled:
    image: vllm/vllm-openai:v0.19.1
    command: vllm serve g/h
"""


def test_the_services_of_a_compose_file_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "compose.yaml", COMPOSE)
    chat = read_deployment(path, name="chat")
    assert chat.settings == {"model": "org/model", "max_model_len": 32_000}
    assert (chat.num_gpus, chat.engine_version) == (2, "vllm-0.10.2")
    assert has_note(chat, "MODEL is taken as 'org/model'")
    assert has_note(chat, "-tp", "$TP")
    embed = read_deployment(path, name="embed")
    assert embed.settings == {"model": "c/d", "gpu_memory_utilization": 0.3}
    assert has_note(embed, "vllm-openai:latest", "does not tell")
    shell = read_deployment(path, name="shell")
    assert shell.settings == {"model": "e/f", "max_num_seqs": 7}
    assert shell.sources["max_num_seqs"] == f"{path}:27"
    assert has_note(read_deployment(path, name="doubled"), "entry point is already")
    assert [found.name for found in read_deployments(path)] == ["chat", "embed", "shell", "doubled"]


def test_variables_of_a_compose_file_come_from_its_dotenv(tmp_path: Path) -> None:
    path = write(tmp_path / "compose.yaml", COMPOSE)
    write(tmp_path / ".env", "# here\nMODEL='x/y'\nexport TP=2\n")
    assert read_deployment(path, name="chat").settings == {
        "model": "x/y",
        "tensor_parallel_size": 2,
        "max_model_len": 32_000,
    }


# ------------------------------------------------------------------ Helm

VALUES = """
servingEngineSpec:
  modelSpec:
  - name: llama
    repository: vllm/vllm-openai
    tag: v0.9.2
    modelURL: org/model
    replicaCount: 3
    requestGPU: 1
    vllmConfig:
      maxModelLen: 4096
      gpuMemoryUtilization: 0.6
      extraArgs: ["--disable-log-requests", "--gpu-memory-utilization", "0.8"]
  - name: qwen
    repository: lmcache/vllm-openai
    tag: latest
    modelURL: c/d
    replicaCount: 1
    requestGPU: 2
    enableLoRA: true
    nodeSelectorTerms:
    - matchExpressions:
      - {key: nvidia.com/gpu.product, operator: In, values: [NVIDIA-H100-80GB-HBM3]}
    vllmConfig:
      enablePrefixCaching: true
      enableChunkedPrefill: false
      tensorParallelSize: 2
      maxTokens: 1
  - name: bare
    modelURL: e/f
"""


def test_each_model_of_helm_values_is_a_deployment(tmp_path: Path) -> None:
    path = write(tmp_path / "values.yaml", VALUES)
    llama, qwen, _ = read_deployments(path)
    assert (llama.num_replicas, llama.num_gpus, llama.engine_version) == (3, 1, "vllm-0.9.2")
    assert qwen.settings == {
        "model": "c/d",
        "tensor_parallel_size": 2,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": True,
        "enable_lora": True,
    }
    assert qwen.gpu == "NVIDIA-H100-80GB-HBM3"
    assert has_note(qwen, "knows no vllmConfig.maxTokens")


def test_the_chart_switches_prefix_caching_off_where_it_is_not_asked_for(tmp_path: Path) -> None:
    llama, _, bare = read_deployments(write(tmp_path / "values.yaml", VALUES))
    assert llama.settings["enable_prefix_caching"] is False
    assert has_note(llama, "without enablePrefixCaching", "--no-enable-prefix-caching")
    assert "enable_prefix_caching" not in bare.settings  # the chart makes no flags at all without a vllmConfig


def test_extra_arguments_of_the_chart_come_last(tmp_path: Path) -> None:
    path = write(tmp_path / "values.yaml", VALUES)
    llama = read_deployment(path, name="llama")
    assert llama.settings["gpu_memory_utilization"] == 0.8
    assert has_note(llama, f"{path}:13", "0.8", f"{path}:12")


# ------------------------------------------------------------------ Kubernetes


def test_a_deployment_is_read_from_its_container(tmp_path: Path) -> None:
    path = write(
        tmp_path / "deploy.yaml",
        """apiVersion: v1
kind: Service
metadata: {name: s}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: llm}
spec:
  replicas: 4
  template:
    spec:
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-L4}
      containers:
      - {name: proxy, image: busybox}
      - name: vllm
        image: vllm/vllm-openai:v0.19.1
        env: [{name: LEN, value: "2048"}]
        args: ["--model", a/b, "--max-model-len", $(LEN), "--max-num-seqs", 16, "--block-size", $(BLOCK)]
        resources: {limits: {nvidia.com/gpu: 1}}
""",
    )
    found = read_deployment(path)
    assert found.settings == {"model": "a/b", "max_model_len": 2048, "max_num_seqs": 16}
    assert (found.name, found.kind, found.num_replicas, found.num_gpus, found.gpu) == (
        "llm",
        "kubernetes",
        4,
        1,
        "NVIDIA-L4",
    )
    assert has_note(found, "16 in args is no text", f"{path}:18")
    assert has_note(found, "--block-size", "BLOCK")


def test_a_leader_worker_set_counts_the_gpus_of_all_its_pods() -> None:
    found = read_deployment(
        {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": {"name": "big"},
            "spec": {
                "replicas": 2,
                "leaderWorkerTemplate": {
                    "size": 2,
                    "leaderTemplate": {
                        "spec": {
                            "containers": [
                                {
                                    "name": "v",
                                    "image": "vllm/vllm-openai:v0.19.1",
                                    "command": ["sh", "-c", "vllm serve m -tp 8 -pp 2"],
                                    "resources": {"limits": {"nvidia.com/gpu": "8"}},
                                }
                            ]
                        }
                    },
                },
            },
        }
    )
    assert (found.num_gpus, found.num_replicas) == (16, 2)
    assert found.settings == {"model": "m", "tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    assert found.notes == ()


KSERVE = """
apiVersion: serving.kserve.io/v1alpha1
kind: ServingRuntime
metadata: {name: runtime}
spec:
  containers:
  - name: kserve-container
    image: quay.io/modh/vllm:fast
    command: [python, -m, vllm.entrypoints.openai.api_server]
    args: [--port=8080, --model=/mnt/models, --max-model-len=1024]
---
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: chat}
spec:
  predictor:
    minReplicas: 2
    model:
      modelFormat: {name: vLLM}
      runtime: runtime
      storageUri: hf://org/model
      args: [--max-model-len=4096, --tensor-parallel-size=2]
      resources: {limits: {nvidia.com/gpu: "2"}}
"""


def test_kserve_puts_the_services_arguments_behind_those_of_its_runtime() -> None:
    found = read_deployment(KSERVE)
    assert found.settings == {"model": "org/model", "tensor_parallel_size": 2, "max_model_len": 4096}
    assert (found.name, found.kind, found.num_gpus, found.num_replicas) == ("chat", "kserve", 2, 2)


def test_a_kserve_service_without_its_runtime_says_what_is_missing() -> None:
    service = KSERVE.partition("---")[2].replace("hf://org/model", "s3://bucket/x")
    found = read_deployment(service)
    assert found.settings == {"tensor_parallel_size": 2, "max_model_len": 4096}
    assert has_note(found, "runtime 'runtime' is not in this file")
    assert has_note(found, "s3://bucket/x", "does not tell which model")


def test_the_options_of_kserves_own_server_are_not_vllms() -> None:
    text = """
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: hf}
spec:
  predictor:
    model:
      modelFormat: {name: huggingface}
      args: [--model_name=chat, --model_id=org/model, --dtype, half, --backend, vllm]
"""
    found = read_deployment(text)
    assert found.settings == {"model": "org/model", "dtype": "half"}
    assert found.unknown == ()


def test_an_llm_inference_service_is_read_with_its_parallelism() -> None:
    text = """
apiVersion: serving.kserve.io/v1alpha1
kind: LLMInferenceService
metadata: {name: llm}
spec:
  model: {uri: "hf://org/model", name: m}
  replicas: 2
  parallelism: {tensor: 4, expert: true}
  template:
    containers:
    - name: main
      env: [{name: VLLM_ADDITIONAL_ARGS, value: "--max-num-seqs 99"}]
      resources: {limits: {nvidia.com/gpu: "4"}}
"""
    found = read_deployment(text)
    assert found.settings == {
        "model": "org/model",
        "tensor_parallel_size": 4,
        "enable_expert_parallel": True,
        "max_num_seqs": 99,
    }
    assert (found.num_gpus, found.num_replicas) == (4, 2)


def test_llm_d_values_hold_a_decode_and_a_prefill_deployment() -> None:
    text = """
modelArtifacts: {name: org/model, uri: 'hf://"{{ .Values.modelArtifacts.name }}"'}
decode:
  replicas: 2
  parallelism: {tensor: 2, data: 4, workers: 2}
  acceleratorTypes: {labelKey: gpu.nvidia.com/model, labelValues: [H200]}
  containers:
  - {name: vllm, image: "ghcr.io/llm-d/llm-d:v0.2.0", modelCommand: vllmServe, args: [--enforce-eager]}
prefill:
  parallelism: {tensor: 4}
  containers:
  - name: vllm
    image: ghcr.io/llm-d/llm-d:v0.2.0
    modelCommand: custom
    command: [/bin/sh, -c]
    args: ["exec vllm serve c/d --tensor-parallel-size $TP_SIZE"]
"""
    decode, prefill = read_deployments(text)
    assert decode.settings == {
        "model": "org/model",
        "tensor_parallel_size": 2,
        "data_parallel_size": 4,
        "data_parallel_size_local": 2,
        "enforce_eager": True,
    }
    assert (decode.num_gpus, decode.num_replicas, decode.gpu, decode.engine_version) == (4, 2, "H200", None)
    assert prefill.settings == {"model": "c/d", "tensor_parallel_size": 4}


# ------------------------------------------------------------------ what cannot be read


def test_a_file_that_is_not_there_is_told() -> None:
    with pytest.raises(DeploymentUnreadable, match=r"cannot read deployment nowhere\.yaml"):
        read_deployment("nowhere.yaml")


@pytest.mark.parametrize(
    "text", ["", "hello", "echo hi", "a: 1\nb: 2\n", "[1, 2]", "services: {web: {image: nginx}}", "- a\n- b\n"]
)
def test_a_text_without_vllm_says_what_is_expected(text: str) -> None:
    with pytest.raises(DeploymentUnreadable, match="nothing in it starts vLLM"):
        read_deployment(text)


@pytest.mark.parametrize("text", ["services:\n  a: [1\n", "services: &a\n  b: *a\n", "services: *x\n"])
def test_broken_yaml_is_one_error(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "compose.yaml", text)
    with pytest.raises(DeploymentUnreadable, match="not valid YAML"):
        read_deployment(path)


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    lines = ["services: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"k{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(DeploymentUnreadable, match="aliases"):
        read_deployment(write(tmp_path / "bomb.yaml", "\n".join(lines)))


def test_a_triton_batching_config_says_where_it_belongs(tmp_path: Path) -> None:
    with pytest.raises(DeploymentUnreadable, match="--batching dynamic"):
        read_deployment(write(tmp_path / "config.pbtxt", "max_batch_size: 8\n"))


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(DeploymentError, match="nearest compose"):
        read_deployment("x", kind="composer")


def test_text_that_is_no_utf8_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.sh"
    path.write_bytes(b"vllm serve \xff")
    with pytest.raises(DeploymentUnreadable, match="not UTF-8"):
        read_deployment(path)


@given(st.text(alphabet="vllm serve-_='\"\\$(){}[]<>|&;#`\n\t.,:a0", max_size=80))
def test_any_text_is_read_or_refused_but_never_breaks(text: str) -> None:
    for prefix in ("", "vllm serve m ", "LLM(", "non-default args: {"):
        with suppress(ScenarioError):
            read_deployments(f"{prefix}{text}\n")


# ------------------------------------------------------------------ writing

_WORDS = st.text(alphabet="abcXYZ019-_./ '\"$\\{}:", min_size=1, max_size=12)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | _WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_WORDS, inner, max_size=2),
    max_leaves=4,
)
_TABLES = st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), _JSON, min_size=1, max_size=3)
_SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "model": _WORDS.filter(lambda text: not text.startswith("-")),
    "max_model_len": st.just(-1) | st.integers(1, 10**6),
    "num_gpu_blocks_override": st.integers(2, 10**6),
    "quantization": _WORDS.filter(lambda text: text != "None"),
    "attention_backend": _WORDS.filter(lambda text: text != "None"),
    "mamba_cache_mode": _WORDS,
    "optimization_level": st.sampled_from(["0", "1", "2", "3"]),
    "kv_cache_dtype_skip_layers": st.lists(st.sampled_from(["0", "1", "sliding_window"]), min_size=1, max_size=3),
    "cudagraph_capture_sizes": st.lists(st.integers(1, 512), min_size=1, max_size=3),
    "gpu_memory_utilization": st.floats(0.01, 1.0),
    "watermark": st.floats(0.0, 0.99),
    "cpu_offload_gb": st.floats(0, 100),
    "kv_offloading_size": st.floats(0, 100),
    "speculative_config": _TABLES,
    "hf_overrides": _TABLES,
    "compilation_config": _TABLES,
    "limit_mm_per_prompt": _TABLES,
}


def _values(key: str) -> st.SearchStrategy[Any]:
    if key in _SPECIAL:
        return _SPECIAL[key]
    if SETTINGS[key].choices:
        return st.sampled_from(SETTINGS[key].choices)
    if options()[key.replace("_", "-")].kind == "boolean":
        return st.booleans()
    return st.integers(1, 10**6)


def settings_dicts() -> st.SearchStrategy[dict[str, Any]]:
    """Settings of vLLM 0.32 that differ from its unconditional defaults."""
    current = [key for key in SETTINGS if not options()[key.replace("_", "-")].until and key != "model"]
    some = st.lists(st.sampled_from(current), unique=True, max_size=8)
    tables = some.flatmap(lambda keys: st.fixed_dictionaries({key: _values(key) for key in ["model", *keys]}))
    return tables.map(without_defaults)


@given(settings_dicts())
def test_what_is_written_is_read_again(settings: dict[str, Any]) -> None:
    found = read_deployment(serve_command(settings))
    assert found.settings == settings
    assert found.unknown == ()
    assert found.notes == ()


@given(settings_dicts())
def test_helm_values_and_compose_services_are_read_again(settings: dict[str, Any]) -> None:
    with_caching = {"enable_prefix_caching": True, **settings}
    assert read_deployment(helm_values(settings), kind="helm").settings == with_caching
    assert read_deployment(compose_service(settings), kind="compose").settings == settings


def test_only_what_is_no_default_is_written() -> None:
    settings = {"model": "m", "tensor_parallel_size": 1, "dtype": "auto", "max_num_seqs": None, "max_model_len": 8192}
    assert serve_command(settings) == "vllm serve m --max-model-len 8192"


def test_a_default_that_changed_is_left_out_only_for_its_release() -> None:
    settings = {"model": "m", "gpu_memory_utilization": 0.92}
    assert serve_command(settings) == "vllm serve m --gpu-memory-utilization 0.92"
    assert serve_command(settings, version="vllm-0.32") == "vllm serve m"
    assert serve_command(settings, version="vllm-0.19") == "vllm serve m --gpu-memory-utilization 0.92"


def test_a_line_is_spelled_as_the_release_wants_it() -> None:
    settings = {"model": "m", "enable_chunked_prefill": False, "swap_space": 4 * GIB}
    assert serve_command(settings, version="0.8.4") == "vllm serve m --swap-space 4 --enable-chunked-prefill=False"
    assert serve_command(settings, version="0.9") == "vllm serve m --swap-space 4 --no-enable-chunked-prefill"


@pytest.mark.parametrize(
    ("settings", "version", "part"),
    [
        ({"model": "m", "watermark": 0.1}, "vllm-0.11", "no --watermark \\(it came with 0.24.0\\)"),
        ({"model": "m", "swap_space": 1}, None, "went with vLLM 0.18.0"),
        ({"model": "m", "max_seqs": 1}, None, "unknown setting 'max_seqs'; nearest max_num_seqs"),
        ({"model": "m", "max_num_seqs": 0}, None, "at least 1"),
        ({"max_num_seqs": 1}, None, "model = None"),
        ({"model": "-x"}, None, "model = '-x'"),
    ],
)
def test_what_cannot_be_written_is_refused(settings: dict[str, Any], version: str | None, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        serve_command(settings, version=version)


def test_the_writers_ask_for_as_many_gpus_as_the_settings_take() -> None:
    settings = {"model": "m", "tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    assert read_deployment(compose_service(settings)).num_gpus == 8
    assert read_deployment(helm_values(settings, num_replicas=3)).num_replicas == 3
    assert "vllm-openai:v0.11.0" in compose_service(settings, version="vllm-0.11.0")


def test_the_writers_in_the_document_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = (REPO_ROOT / "docs" / "importing-deployments.md").read_text("utf-8")
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1], {})
    assert capsys.readouterr().out.startswith("vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2 --max-model-len 16384")


def test_reading_a_command_imports_no_yaml() -> None:
    code = (
        "import sys; from windtunnel.scenarios.deployments import read_deployment as r; r('vllm serve m -tp 2');"
        "assert not {'yaml', 'pandas', 'plotly', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
