"""``--ray`` through the commands that search: every output has the bytes that local processes give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCENARIO = """\
name = "small"
[deployment]
model = "llama-3.1-8b"
[engine]
max_model_len = 2048
[workload]
num_requests = 200
request_rate = 60
input = "lognormal:mean=200,sigma=0.6,max=1500"
output = 20
[cost]
kind = "affine"
base_s = "8ms"
token_s = "20us"
seq_s = "100us"
[slo]
objectives = ["ttft:p95<150ms", "tpot:p95<25ms"]
"""
CARD = ("--set", "gpu=h100-sxm")
SEATS = ("--tune", "max_num_seqs=16,64,256", "--trials", "3", "--reps", "2", "--gpu-price", "2.5")
PLAN = (
    *("--gpu", "h100-sxm=2.5", "--gpu", "l40s=0.9", "--tp", "1", "--replications", "2", "--requests", "100"),
    *("--growth", "5%/month", "--html", "report.html", "--csv", "rows.csv", "--save-scenario", "fleet.toml"),
)
COMMANDS = {
    "plan": PLAN,
    "capacity": (*CARD, "--num-requests", "300", "--reps", "8", "--precision", "0.2", "--html", "report.html"),
    "optimize": (*CARD, *SEATS, "--html", "report.html", "--csv", "rows.csv"),
}
WHO = {"one": ("--jobs", "1"), "two": ("--jobs", "2"), "ray": ("--ray", "local:2")}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_cluster_gives_the_bytes_of_local_processes(command: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    if command == "optimize":
        pytest.importorskip("optuna")
    found = {who: outputs(command, flags, tmp_path / who) for who, flags in WHO.items()}
    assert len(found["one"]) > 2
    assert found["two"] == found["one"]
    assert found["ray"] == found["one"]


def outputs(command: str, flags: tuple[str, ...], folder: Path) -> dict[str, bytes]:
    """What the command printed and wrote, by name."""
    folder.mkdir()
    (folder / "small.toml").write_text(SCENARIO)
    words = [sys.executable, "-m", "windtunnel", command, "small.toml", *COMMANDS[command], "--json", "-q", *flags]
    done = subprocess.run(words, cwd=folder, env=dict(os.environ), capture_output=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return {"stdout": done.stdout, **{path.name: path.read_bytes() for path in sorted(folder.iterdir())}}
