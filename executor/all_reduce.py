"""Time of the all-reduces of a model that several GPUs share, from measurements: a table, or this machine's own GPUs.

A step of one rank's share, computed on one GPU, lacks its communication; ``step_all_reduce_s`` is what to add.
"""

from __future__ import annotations

import json
import socket
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from windtunnel.executor.model_config import DecoderConfig

_WARM_UPS = 5
_REPEATS = 20


@dataclass(frozen=True, slots=True)
class AllReduceTable:
    """Measured seconds of an all-reduce by number of ranks and bytes of each rank's tensor.

    Raises ValueError for a table without a source, without points, or whose bytes do not rise.
    """

    source: str
    """Who measured it, on what: a publication, or the machine."""
    points: Mapping[int, Sequence[tuple[int, float]]]
    """Ranks -> (bytes, seconds), by rising bytes."""

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ValueError("an all-reduce table must name its source: say who measured it and on what")
        if not self.points:
            raise ValueError("an all-reduce table needs at least one number of ranks")
        for num_ranks, points in self.points.items():
            if num_ranks < 2:
                raise ValueError(f"an all-reduce has at least 2 ranks, got {num_ranks}")
            if not points:
                raise ValueError(f"the all-reduce table has no points for {num_ranks} ranks")
            sizes = [num_bytes for num_bytes, _ in points]
            if any(small >= large for small, large in pairwise(sizes)):
                raise ValueError(f"bytes must rise in the all-reduce table of {num_ranks} ranks, got {sizes}")
            if sizes[0] < 1 or any(seconds <= 0.0 for _, seconds in points):
                raise ValueError(f"bytes and seconds must be above 0 in the all-reduce table of {num_ranks} ranks")

    @classmethod
    def read(cls, path: str | Path) -> AllReduceTable:
        """From JSON: {"source": …, "points": {"RANKS": [[bytes, seconds], …]}}.

        Raises ValueError, naming the file, for anything else.
        """
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
            points = {
                int(num_ranks): tuple((int(num_bytes), float(seconds)) for num_bytes, seconds in rows)
                for num_ranks, rows in read["points"].items()
            }
            return cls(str(read["source"]), points)
        except KeyError as error:
            raise ValueError(f"{path}: the all-reduce table lacks {error}") from None
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not an all-reduce table: {error}") from None

    def write(self, path: str | Path) -> None:
        """As ``read`` takes it."""
        text = json.dumps(
            {"source": self.source, "points": {str(n): rows for n, rows in self.points.items()}}, indent=1
        )
        Path(path).write_text(text + "\n", encoding="utf-8")

    def seconds(self, num_bytes: int, num_ranks: int) -> float:
        """Between two measured sizes time is taken as linear in bytes; below the smallest it is that of the smallest.

        Raises ValueError for ranks that were not measured, and for more bytes than were.
        """
        if num_ranks == 1 or num_bytes == 0:
            return 0.0
        points = self.points.get(num_ranks)
        if points is None:
            raise ValueError(
                f"the all-reduce table ({self.source}) knows {', '.join(map(str, sorted(self.points)))} ranks, not "
                f"{num_ranks}: measure them"
            )
        at = bisect_left(points, num_bytes, key=lambda point: point[0])
        if at == len(points):
            raise ValueError(
                f"an all-reduce of {num_bytes} bytes is larger than the table's largest ({points[-1][0]} bytes for "
                f"{num_ranks} ranks; {self.source}): measure larger ones, or lower the tokens of a step"
            )
        if at == 0:
            return points[0][1]
        (small, small_s), (large, large_s) = points[at - 1], points[at]
        return small_s + (large_s - small_s) * (num_bytes - small) / (large - small)


def step_all_reduce_s(
    table: AllReduceTable, config: DecoderConfig, num_tokens: int, *, bytes_per_element: int = 2
) -> float:
    """Seconds that a step of ``num_tokens`` tokens spends in the all-reduces of a model shared by ``config.tp_size``.

    There are two a layer, behind attention and behind the MLP, each of [tokens, hidden size].  Engines that also split
    the embedding table or gather logits have a little more.
    """
    num_bytes = num_tokens * config.hidden_size * bytes_per_element
    return 2 * config.num_hidden_layers * table.seconds(num_bytes, config.tp_size)


def measure(num_ranks: int, sizes: Sequence[int], *, backend: str = "nccl") -> AllReduceTable:
    """Measure bfloat16 all-reduces of these many bytes on ``num_ranks`` GPUs of this machine, by torch.distributed.

    A point is the median over repeats of the slowest rank's time.  ``backend`` "gloo" measures processes on the CPU.

    Raises ValueError if there are fewer GPUs than ranks.
    """
    if num_ranks < 2:
        raise ValueError(f"num_ranks must be at least 2, got {num_ranks}")
    on_gpus = backend == "nccl"
    num_gpus = torch.cuda.device_count() if on_gpus else num_ranks
    if num_gpus < num_ranks:
        raise ValueError(
            f"{num_ranks} ranks need as many GPUs, but torch finds {num_gpus}: give a table of measurements instead"
        )
    sizes = sorted({max(2, size // 2 * 2) for size in sizes})
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    address = f"tcp://127.0.0.1:{_free_port()}"
    torch.multiprocessing.spawn(_rank, (num_ranks, tuple(sizes), backend, address, answers), num_ranks)
    seconds = answers.get()
    what = f"{num_ranks} x {torch.cuda.get_device_name()}" if on_gpus else f"{num_ranks} processes on a CPU"
    source = f"measured here: {what}, torch {torch.__version__}, {backend}"
    return AllReduceTable(source, {num_ranks: tuple(zip(sizes, seconds, strict=True))})


def _rank(rank: int, num_ranks: int, sizes: Sequence[int], backend: str, address: str, answers: Any) -> None:
    """What each process does; rank 0 answers with the seconds of each size."""
    from torch import distributed

    from windtunnel.executor.devices import CudaDevice, Device, HostDevice

    device: Device
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = CudaDevice()
    else:
        device = HostDevice()
    distributed.init_process_group(backend, init_method=address, rank=rank, world_size=num_ranks)
    try:
        seconds = []
        for size in sizes:
            x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device.torch_device)
            for _ in range(_WARM_UPS):
                distributed.all_reduce(x)
            distributed.barrier()
            marks = [device.mark()]
            for _ in range(_REPEATS):
                distributed.all_reduce(x)
                marks.append(device.mark())
            device.wait(marks[-1])
            spans = [device.ns_between(*pair) for pair in pairwise(marks)]
            slowest = torch.tensor(spans, dtype=torch.int64, device=device.torch_device)
            distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
            seconds.append(median(slowest.tolist()) * 1e-9)
        if rank == 0:
            answers.put(seconds)
    finally:
        distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
