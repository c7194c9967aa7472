"""How much memory a real executor may take, by what the system says."""

from __future__ import annotations

from pathlib import Path

import pytest

from windtunnel.executor.server.memory import Need, free_host_bytes, why_too_large
from windtunnel.sim.engine.config import SchedulerConfig

GIB = 2**30
FREE = {"meminfo": f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {8 * 2**20} kB\n"}


def system(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """Folders that stand for /proc and /sys/fs/cgroup."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "cgroup"


def machine(groups: str = "0::/\n") -> dict[str, str]:
    return {"proc/meminfo": FREE["meminfo"], "proc/self/cgroup": groups}


def test_free_memory_is_what_the_machine_has_available(tmp_path: Path) -> None:
    assert free_host_bytes(*system(tmp_path, machine())) == 8 * GIB


def test_a_control_group_may_leave_less(tmp_path: Path) -> None:
    group = {
        "cgroup/a/memory.max": f"{4 * GIB}\n",
        "cgroup/a/memory.current": f"{3 * GIB}\n",
        "cgroup/a/memory.stat": f"anon 1\ninactive_file {GIB}\n",
    }
    assert free_host_bytes(*system(tmp_path, {**machine("0::/a\n"), **group})) == 2 * GIB, "cached files can go"


def test_a_group_without_a_limit_leaves_all(tmp_path: Path) -> None:
    assert free_host_bytes(*system(tmp_path, {**machine("0::/a\n"), "cgroup/a/memory.max": "max\n"})) == 8 * GIB


def test_the_older_interface_in_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    group = {
        "cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        "cgroup/memory/memory.stat": "total_inactive_file 0\n",
    }
    assert free_host_bytes(*system(tmp_path, {**machine("4:cpu,memory:/docker/x\n0::/\n"), **group})) == GIB


def test_a_system_that_tells_nothing_of_itself_is_asked_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert free_host_bytes(tmp_path / "proc", tmp_path / "cgroup") == 4096 * 1000


@pytest.mark.parametrize("num_blocks", [2, 899, 900, 901, 5000])
def test_the_remedy_is_the_most_that_fits(num_blocks: int) -> None:
    need = Need(weights_bytes=100, block_bytes=10)
    config = SchedulerConfig(num_gpu_blocks=num_blocks, block_size=4, max_model_len=4)
    free_bytes = 10_112  # of which 9100 may be used
    why = why_too_large(need, config, free_bytes, "host")
    if num_blocks <= 900:
        assert why is None
    else:
        assert why is not None
        assert why.endswith("start the server with --num-gpu-blocks-override 900 or less")


def test_where_a_context_does_not_fit_the_remedy_says_so_too() -> None:
    config = SchedulerConfig(num_gpu_blocks=5000, block_size=4, max_model_len=4000)
    why = why_too_large(Need(100, 10), config, 10_112, "host")
    assert why is not None
    assert why.endswith("--num-gpu-blocks-override 900 or less and --max-model-len 3596 or less")
    alone = why_too_large(Need(9_100, 10), config, 10_112, "host")
    assert alone is not None
    assert alone.endswith("take a smaller model")
    assert why_too_large(Need(9_100, 10), config, None, "host") is None, "nobody knows"
