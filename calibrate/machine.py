"""What a measurement should say of the machine that it was made on, and what its GPU does meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGES = ("windtunnel", "torch", "triton", "numpy")
_SMI_FIELDS = (
    *("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu", "power.draw"),
    "clocks_throttle_reasons.active",
)
_HARMLESS_REASONS = 0x1 | 0x2
"""Bits of nvmlClocksEventReasons that are no trouble: the GPU is idle, or an application set its clocks (nvml.h)."""
_SMI_TIMEOUT_S = 10.0

Run = Callable[[Sequence[str]], str | None]
"""Runs a program and answers what it printed; None if that failed."""


def describe_machine(gpu_device: str | None = None) -> dict[str, Any]:
    """Date, processor, versions and commit, as plain data; ``gpu_device`` is the driver's name of the GPU, if any."""
    told: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        "git_commit": git_commit(),
        "load_average": _load_average(),
    }
    if gpu_device is not None:
        told["device"] = gpu_device
    return {key: value for key, value in told.items() if value is not None}


def cpu_name() -> str:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def git_commit() -> str | None:
    """The commit of this package's sources, with ``+`` if they were changed since; None for an installed release."""
    package = Path(__file__).resolve()
    folder = str(package.parent)
    if not _printed(["git", "-C", folder, "ls-files", "--", package.name]):
        return None  # a repository of someone else around an installed package
    commit = _printed(["git", "-C", folder, "rev-parse", "HEAD"])
    if not commit:
        return None
    changed = _printed(["git", "-C", folder, "status", "--porcelain", "--untracked-files=no"])
    return commit.strip() + ("+" if changed else "")


class GpuState(NamedTuple):
    """What the driver says of a GPU at one moment."""

    name: str
    driver: str
    sm_mhz: float
    max_sm_mhz: float
    memory_mhz: float
    temperature_c: float
    power_w: float
    throttle_reasons: int
    """Bits of nvmlClocksEventReasons."""

    @property
    def is_throttled(self) -> bool:
        """Whether anything but idleness or a chosen clock holds it back."""
        return bool(self.throttle_reasons & ~_HARMLESS_REASONS)


class GpuWatch:
    """Asks ``nvidia-smi`` for the state of a GPU, at most every ``every_s`` seconds; silent where there is none."""

    def __init__(self, index: int | str, *, every_s: float = 5.0, run: Run | None = None) -> None:
        self._index = index
        self._every_s = every_s
        self._run = _printed if run is None else run
        self._asked_s = -float("inf")
        self._is_there = True
        self.latest: GpuState | None = None
        """The last answer."""

    def look(self) -> GpuState | None:
        """Ask again if it is time; a driver that failed to answer is not asked again."""
        now_s = time.monotonic()
        if self._is_there and now_s - self._asked_s >= self._every_s:
            self._asked_s = now_s
            query = f"--query-gpu={','.join(_SMI_FIELDS)}"
            text = self._run(["nvidia-smi", f"--id={self._index}", query, "--format=csv,noheader,nounits"])
            self.latest = None if text is None else parse_gpu_state(text)
            self._is_there = self.latest is not None
        return self.latest


def parse_gpu_state(line: str) -> GpuState | None:
    """The answer of nvidia-smi; numbers that it does not know are NaN, and None is no answer at all."""
    fields = [field.strip() for field in line.strip().splitlines()[0].split(",")] if line.strip() else []
    if len(fields) != len(_SMI_FIELDS):
        return None
    name, driver, *numbers, reasons = fields
    sm, max_sm, memory, temperature, power = map(_number, numbers)
    return GpuState(name, driver, sm, max_sm, memory, temperature, power, _bits(reasons))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _bits(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0


def _printed(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _load_average() -> list[float] | None:
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except (AttributeError, OSError):
        return None
