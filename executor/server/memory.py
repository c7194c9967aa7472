"""How much memory an executor needs, and how much there is: asked before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from windtunnel.sim.engine.config import SchedulerConfig

if TYPE_CHECKING:
    from windtunnel.executor.model_config import DecoderConfig

USABLE_SHARE = 0.9
"""Of what is free; the rest is left for activations and everything else on the machine."""
_GIB = 2**30
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class Need(NamedTuple):
    """Bytes that an executor takes for good."""

    weights_bytes: int
    block_bytes: int
    """Of one KV block, all layers together."""

    def total_bytes(self, num_blocks: int) -> int:
        """With a cache of so many blocks."""
        return self.weights_bytes + num_blocks * self.block_bytes


def need(model: DecoderConfig, block_size: int, weights_itemsize: int, cache_itemsize: int) -> Need:
    """Of a model whose numbers have these many bytes."""
    from math import prod

    from windtunnel.executor.weights import tensor_shapes

    num_weights = sum(prod(shape) for shape in tensor_shapes(model).values())
    token_bytes = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * cache_itemsize
    return Need(num_weights * weights_itemsize, token_bytes * block_size)


def why_too_large(needed: Need, config: SchedulerConfig, free_bytes: int | None, where: str) -> str | None:
    """What to do if weights and cache do not fit into the memory that is free; None if they do, or nobody knows.

    ``where`` says whose memory it is.
    """
    total_bytes = needed.total_bytes(config.num_gpu_blocks)
    if free_bytes is None or total_bytes <= USABLE_SHARE * free_bytes:
        return None
    weights, cache = needed.weights_bytes, total_bytes - needed.weights_bytes
    return (
        f"it needs {_gib(total_bytes)} of {where} memory ({total_bytes} bytes: weights {_gib(weights)}, "
        f"{config.num_gpu_blocks:,} KV blocks {_gib(cache)}), but {_gib(free_bytes)} are free, of which "
        f"{USABLE_SHARE:.0%} may be used: {_remedy(needed, config, free_bytes)}"
    )


def _remedy(needed: Need, config: SchedulerConfig, free_bytes: int) -> str:
    num_blocks = int(USABLE_SHARE * free_bytes - needed.weights_bytes) // needed.block_bytes
    if num_blocks < 2:
        return "the weights alone leave no room for a cache; take a smaller model"
    remedy = f"start the server with --num-gpu-blocks-override {num_blocks} or less"
    num_tokens = (num_blocks - 1) * config.block_size
    return remedy if num_tokens >= config.max_model_len else f"{remedy} and --max-model-len {num_tokens} or less"


def free_host_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Memory that this process can still take without swapping: of the machine, and of its control group.

    None where the system does not tell.  Pages that only cache files count as free.  Sources: proc(5), MemAvailable;
    cgroups(7), memory.max and memory.limit_in_bytes.
    """
    known = [free for free in (_machine_bytes(proc), _group_bytes(proc, cgroups)) if free is not None]
    return min(known) if known else None


def _machine_bytes(proc: Path) -> int | None:
    try:
        for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _group_bytes(proc: Path, cgroups: Path) -> int | None:
    """What the control group of this process has left, by either version of the interface; None without a limit."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            left.append(_left_in(cgroups, path, "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            left.append(_left_in(cgroups / "memory", path, *names))
    known = [each for each in left if each is not None]
    return min(known) if known else None


def _left_in(mount: Path, path: str, limit: str, used: str, cached: str) -> int | None:
    for folder in (mount / path.lstrip("/"), mount):  # in a container the path is often that of the host
        try:
            most = (folder / limit).read_text(encoding="ascii").strip()
            if most == "max":
                return None
            statistics = dict(row.split() for row in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            taken = int((folder / used).read_text(encoding="ascii")) - int(statistics.get(cached, 0))
            return max(0, int(most) - taken)
        except (OSError, ValueError):
            continue
    return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
