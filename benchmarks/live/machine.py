"""The machine that a benchmark shares with others: priority over them, a core apart, and what they used meanwhile.

With ``kernel.sched_autogroup_enabled`` niceness counts only inside a session; between sessions it is that of the
session's group which decides, so a session of its own is needed, and leave to write its ``/proc/PID/autogroup``.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

GROUP_NICENESS = -10
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def prefer(pid: int) -> str:
    """Put the session of a process before others; how that went, in words.  Never fails."""
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(GROUP_NICENESS), encoding="ascii")
    except OSError as error:
        return f"no priority: {error.strerror}"
    return f"session group at niceness {GROUP_NICENESS}"


def cores() -> tuple[set[int], set[int]]:
    """(for the engine, for everything else): the first core that this process may use, and the others, if any."""
    allowed = sorted(os.sched_getaffinity(0))
    return ({allowed[0]}, set(allowed[1:])) if len(allowed) > 1 else (set(allowed), set(allowed))


def pin(pid: int, to: set[int]) -> None:
    """Keep all threads of a process to these cores; a thread that has just ended does not matter."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            os.sched_setaffinity(int(thread.name), to)


def children_of(pid: int) -> list[int]:
    """Its child processes."""
    return [child for child, (parent, _) in _processes().items() if parent == pid]


def describe() -> dict[str, object]:
    """Processor, cores, memory and system, for the record."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": names[0] if names else platform.processor(),
        "num_cores": os.cpu_count(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


class Load(NamedTuple):
    """What was going on during a run; cores are CPU seconds a second."""

    load_average: float
    """Mean of the one-minute load average."""
    own_cores: float
    """Server and client."""
    others_cores: float
    steal_cores: float


class Watch:
    """Looks once a second, in a thread, at what the machine does; a context manager."""

    def __init__(self, roots: Iterable[int]) -> None:
        self._roots = tuple(roots)
        self._looks: list[Load] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def load(self) -> Load:
        """Means so far."""
        if not self._looks:
            return Load(os.getloadavg()[0], float("nan"), float("nan"), float("nan"))
        return Load(*(round(float(value), 2) for value in np.mean(self._looks, axis=0)))

    def _run(self) -> None:
        before, at_s = (_machine_ticks(), self._own_ticks()), time.monotonic()
        while not self._is_over.wait(1.0):
            now, now_s = (_machine_ticks(), self._own_ticks()), time.monotonic()
            per_core = _TICKS_PER_S * (now_s - at_s)
            busy, steal = ((after - then) / per_core for after, then in zip(now[0], before[0], strict=True))
            own = sum(ticks - before[1].get(pid, 0) for pid, ticks in now[1].items()) / per_core
            self._looks.append(Load(os.getloadavg()[0], own, max(busy - own, 0.0), steal))
            before, at_s = now, now_s

    def _own_ticks(self) -> dict[int, int]:
        """Of the roots and all below them."""
        processes = _processes()
        own = {os.getpid(), *self._roots}
        grown = True
        while grown:
            more = {pid for pid, (parent, _) in processes.items() if parent in own} - own
            own |= more
            grown = bool(more)
        return {pid: processes[pid][1] for pid in own if pid in processes}


def _machine_ticks() -> tuple[int, int]:
    """(busy, stolen) of all cores since the start of the machine."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]
    )
    return user + nice + system + irq + softirq, steal


def _processes() -> dict[int, tuple[int, int]]:
    """(parent, ticks used) of every process."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()
                found[int(folder.name)] = (int(fields[1]), int(fields[11]) + int(fields[12]))
    return found
