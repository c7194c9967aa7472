"""Kernels compile for GPUs that are not here, without spills, within shared memory and with the right instructions."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.executor.kernels import attention_combine, attention_decode, attention_prefill
from windtunnel.executor.kernels.aot import AotCase, AotReport, compile_case
from windtunnel.executor.kernels.device import INTERPRETED

REPO_ROOT = Path(__file__).resolve().parents[2]
SMALL_KERNELS = ("rms_norm", "rope_store", "silu_and_mul", "gather", "sample")
WHOLE = os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev") == "ci"
"""Continuous integration compiles every case; elsewhere block sizes, types of queries and splits go together."""
PART = r"attention_combine|bf16 kv .* block 16 rows \d+$|fp16 kv .* block 32 rows \d+ split$"
WANTED = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05"}

Kernels = dict[tuple[str, str], dict[str, Any]]


def run_benchmark(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.kernels_aot", "--output", str(folder), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, cwd=REPO_ROOT, env=environment, timeout=1150)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Kernels]:
    """Compile and read the tables; (name, target) -> what the report says."""

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
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", WANTED)
def test_attention_fits_and_uses_the_matrix_units_of_each_gpu(compiled: Callable[..., Kernels], target: str) -> None:
    kernels = compiled("--modules", "attention", "--targets", target, "--only", "" if WHOLE else PART)
    assert_fits(kernels)
    all_names = {case.name for case in cases_of("attention", target)}
    assert {name for name, _ in kernels} == all_names if WHOLE else len(kernels) >= len(all_names) // 4
    for (name, _), kernel in kernels.items():
        assert "128-bit loads" in kernel["features"], name
        if "prefill" in name:
            assert WANTED[target] in kernel["features"], name


@functools.cache
def cases_of(module: str, target: str) -> list[AotCase]:
    return importlib.import_module(f"windtunnel.executor.kernels.{module}").aot_cases(int(target.removeprefix("sm_")))


def test_the_published_table_is_of_these_kernels() -> None:
    published = json.loads((REPO_ROOT / "reports/published/kernels_aot.json").read_text())
    assert published["faults"] == []
    listed = {(kernel["name"], kernel["target"], kernel["num_warps"]) for kernel in published["kernels"]}
    modules = ("attention", *SMALL_KERNELS)
    cases = [(case, target) for module in modules for target in WANTED for case in cases_of(module, target)]
    assert listed == {(case.name, target, case.num_warps) for case, target in cases}
    assert len(published["kernels"]) == len(cases)


class Launches:
    """Stands in for a kernel and keeps what it would be launched with."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: self.seen.append((arguments, options))


TRITON_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    torch.int32: "*i32",
    int: "i32",
    float: "fp32",
}


@given(
    target=st.sampled_from(sorted(WANTED)),
    num_new=st.one_of(st.just(1), st.integers(2, 300)),
    group=st.integers(1, 16),
    head_dim=st.sampled_from([64, 128]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    fp8=st.booleans(),
    block_size=st.sampled_from([16, 32]),
    splits=st.integers(1, 3),
)
def test_what_attention_launches_is_among_the_cases(
    target: str,
    num_new: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    fp8: bool,
    block_size: int,
    splits: int,
) -> None:
    module, name, launch = (
        (attention_decode, "decode_kernel", attention_decode.decode)
        if num_new == 1
        else (attention_prefill, "prefill_kernel", attention_prefill.prefill)
    )
    attention_cases, main, combining = cases_of("attention", target), Launches(), Launches()
    q = torch.zeros((num_new, 2 * group, head_dim), dtype=dtype)
    cache = torch.zeros((1, block_size, 2, head_dim), dtype=torch.float8_e4m3fn if fp8 else dtype)
    table, lens, starts = (torch.zeros(shape, dtype=torch.int32) for shape in ((1, 1), (1,), (2,)))
    sizes = (300,) if num_new == 1 else (starts, num_new, 300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "INTERPRETED", False)
        patch.setattr(module, "sm_of", lambda _: int(target.removeprefix("sm_")))
        patch.setattr(module, name, main)
        patch.setattr(attention_combine, "combine_kernel", combining)
        launch(torch.empty_like(q), q, cache, cache, table, lens, *sizes, 0.1, splits=splits)
    assert len(main.seen) == 1
    assert len(combining.seen) == (splits > 1)
    for arguments, options in main.seen + combining.seen:
        assert any(is_launched_as(case, arguments, options) for case in attention_cases)


def is_launched_as(case: AotCase, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    given_types = [TRITON_TYPES[getattr(argument, "dtype", type(argument))] for argument in arguments]
    by_name = dict(zip(case.signature, arguments, strict=False))
    return (
        given_types == [kind for kind in case.signature.values() if kind != "constexpr"]
        and options == case.constexprs | {"num_warps": case.num_warps, "num_stages": case.num_stages}
        and all(multiple_of_16(by_name[name]) for name in case.aligned)
    )


def multiple_of_16(argument: Any) -> bool:
    return (argument.data_ptr() if isinstance(argument, torch.Tensor) else argument) % 16 == 0


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
