"""Kernels compile for GPUs that are not here, without spills, within shared memory and with the right instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windtunnel.executor.kernels.aot import AotCase, AotReport, compile_case
from windtunnel.executor.kernels.device import INTERPRETED

REPO_ROOT = Path(__file__).resolve().parents[2]
SMALL_KERNELS = ("rms_norm", "rope_store", "silu_and_mul", "gather", "sample")

Kernels = dict[tuple[str, str], dict[str, Any]]


def run_benchmark(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.kernels_aot", "--output", str(folder), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, cwd=REPO_ROOT, env=environment, timeout=580)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Kernels]:
    """Compile for all three targets once; (name, target) -> what the report says."""

    def compile_them(*arguments: str) -> Kernels:
        folder = tmp_path_factory.mktemp("aot")
        done = run_benchmark(folder, *arguments)
        assert done.returncode == 0, done.stderr
        kernels = json.loads((folder / "kernels_aot.json").read_text())["kernels"]
        assert len((folder / "kernels_aot.md").read_text().splitlines()) == len(kernels) + 4
        return {(kernel["name"], kernel["target"]): kernel for kernel in kernels}

    return compile_them


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_small_kernels_fit_and_move_16_bytes_at_a_time(compiled: Callable[..., Kernels]) -> None:
    kernels = compiled("--modules", *SMALL_KERNELS)
    assert {target for _, target in kernels} == {"sm_80", "sm_90", "sm_100"}
    assert_fits(kernels)
    for (name, target), kernel in kernels.items():
        if not name.startswith("sample"):
            assert {"128-bit loads", "128-bit stores"} <= set(kernel["features"]), f"{name} on {target}"
        elif name == "sample fp32 V 128256":
            assert "128-bit loads" in kernel["features"], f"{name} on {target}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_attention_fits_and_uses_the_matrix_units_of_each_gpu(compiled: Callable[..., Kernels]) -> None:
    kernels = compiled("--modules", "attention", "--only", "head_dim 128")
    assert_fits(kernels)
    wanted = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05"}
    long_chunks = [kernel for (name, _), kernel in kernels.items() if "prefill" in name and "rows 128" in name]
    decodes = [kernel for (name, _), kernel in kernels.items() if "decode" in name]
    assert {kernel["target"] for kernel in long_chunks} == set(wanted)
    assert {kernel["target"] for kernel in decodes} == set(wanted)
    for kernel in long_chunks:
        assert wanted[kernel["target"]] in kernel["features"]
    for kernel in (*long_chunks, *decodes):
        assert "128-bit loads" in kernel["features"]
    assert any("kv fp8" in kernel["name"] for kernel in long_chunks)
    assert any("kv fp8" in kernel["name"] for kernel in decodes)


def assert_fits(kernels: Kernels) -> None:
    assert kernels
    limit_bytes = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
    for (name, target), kernel in kernels.items():
        assert kernel["spill_bytes"] == 0, f"{name} on {target}"
        assert 0 < kernel["registers"] <= 255
        assert kernel["shared_bytes"] <= limit_bytes[target], f"{name} on {target}"


SPILLING = """
import triton, triton.language as tl
from windtunnel.executor.kernels.aot import AotCase, compile_case

@triton.jit
def sums_of_everything(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    kept = tl.load(x_ptr + tl.arange(0, BLOCK))
    turned = tl.zeros([BLOCK], tl.float32)
    for i in range(n):
        turned += kept * i
    tl.store(out_ptr + tl.arange(0, BLOCK), kept + turned)

case = AotCase(
    "spilling", sums_of_everything, {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"},
    {"BLOCK": 8192}, ("x_ptr", "out_ptr"), num_warps=1,
)
report = compile_case(case, 90)
print(report.spill_bytes, report.faults())
"""


@pytest.mark.slow
def test_a_kernel_that_spills_is_a_fault(tmp_path: Path) -> None:
    script = tmp_path / "spilling.py"
    script.write_text(SPILLING)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=120)
    spilled, faults = done.stdout.split(maxsplit=1)
    assert int(spilled) > 0
    assert "spilling on sm_90 spills" in faults


def test_too_much_shared_memory_is_a_fault() -> None:
    report = AotReport("big", "sm_80", 64, 0, 0, 163 * 1024, 1000, (), 4)
    assert report.faults() == []
    (fault,) = report._replace(shared_bytes=163 * 1024 + 1).faults()
    assert fault == (
        "big on sm_80 needs 166913 bytes of shared memory, 166912 is the most: use smaller tiles or fewer stages"
    )


@pytest.mark.skipif(not INTERPRETED, reason="kernels are not interpreted here")
def test_an_interpreted_kernel_is_refused() -> None:
    from windtunnel.executor.kernels.gather import aot_cases

    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        compile_case(aot_cases(90)[0], 90)


class Compilable:
    """Looks like a kernel with two arguments."""

    arg_names = ("x_ptr", "BLOCK")
    cache_key = ""


@pytest.mark.parametrize(
    ("signature", "constexprs", "aligned", "message"),
    [
        ({"x_ptr": "*fp32"}, {}, (), r"the kernel has \('x_ptr', 'BLOCK'\)"),
        ({"x_ptr": "*fp32", "BLOCK": "constexpr"}, {}, (), r"needed are \['BLOCK'\]"),
        ({"x_ptr": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 8}, ("y_ptr",), r"aligned names \['y_ptr'\]"),
    ],
)
def test_a_case_that_does_not_fit_its_kernel_is_refused(
    signature: dict[str, str], constexprs: dict[str, Any], aligned: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compile_case(AotCase("wrong", Compilable(), signature, constexprs, aligned), 90)


def test_a_name_that_no_case_has_is_bad_input(tmp_path: Path) -> None:
    done = run_benchmark(tmp_path, "--modules", "gather", "--only", "no such kernel")
    assert done.returncode == 2
    assert "no such kernel" in done.stderr
