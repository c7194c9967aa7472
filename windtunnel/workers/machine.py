"""How many processes the machine has room for."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity, and within a container no more than its CPU limit, rounded up."""
    try:
        found = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        found = os.cpu_count() or 1
    limit = _cpu_limit()
    return max(1, found if limit is None else min(found, math.ceil(limit)))


def _cpu_limit() -> float | None:
    """The quota of the control group (version 2), in CPUs; None if there is none."""
    try:
        quota, period = _CPU_LIMIT.read_text("ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def one_thread_each() -> None:
    """Keep numeric libraries that are not loaded yet from starting a thread a CPU in each of many processes."""
    for name in _THREADS:
        os.environ.setdefault(name, "1")
