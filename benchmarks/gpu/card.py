"""The card, and the two ceilings that everything else is compared with, measured on it."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.common import Bench

_COPIED_BYTES = 4 << 30
_MATMUL_SIZE = 8192


def describe() -> dict[str, Any]:
    """Card, driver and versions."""
    told: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cpu": _cpu(),
        "num_cpus": os.cpu_count(),
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        told |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "num_sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "nvidia_smi": _nvidia_smi(),
        }
    return told


def ceilings(bench: Bench) -> dict[str, Any]:
    """Bytes a second of a large copy on the device, read and written, and FLOP/s of a large bfloat16 product."""
    num_bytes = _COPIED_BYTES if not bench.tiny else 1 << 16
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=bench.place)
    target = torch.empty_like(source)
    copy = bench.time([partial(target.copy_, source)])
    size = _MATMUL_SIZE if not bench.tiny else 64
    a, b = bench.normal(size, size), bench.normal(size, size)
    product = bench.time([lambda: torch.mm(a, b)])
    return {
        "copy_bytes_per_s": 2 * num_bytes / copy.median_s,
        "copy_times": copy._asdict(),
        "matmul_flops_per_s": 2 * size**3 / product.median_s,
        "matmul_size": size,
        "matmul_times": product._asdict(),
    }


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()


def _nvidia_smi() -> str | None:
    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    try:
        asked = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
