"""What lies on a card before vLLM begins to count, and how far its graphs may go beyond their estimate.

Neither is in ``gpu_memory_utilization``, and neither follows from a formula: ``margins.json`` has what start-ups said.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from windtunnel.sim.deployment.gpu import GIB, GpuSpec, bundled_gpus, load_gpu
from windtunnel.sim.deployment.profile_run import is_amd

FEW = 3
"""Start-ups of a kind of card, at least, that its bounds are taken from; with fewer, those of a wider kind."""
COMMUNICATORS_FIRST = (0, 11)
"""Since 0.11 workers set up NCCL before they look at the free memory; before, after it, so that its buffers are
non-torch memory in the budget.  Source: ``init_device`` in ``v1/worker/gpu_worker.py``, as read in 0.8.0 to 0.32.0."""

_DATA = Path(__file__).with_name("margins.json")


class InUse(NamedTuple):
    """Bytes of a card that are not free when vLLM begins, if nothing else runs on it."""

    low: int
    typical: int
    high: int
    source: str
    """What it is from, in words."""


class GraphSpread(NamedTuple):
    """By how much CUDA graphs went beyond their estimate in 95 of 100 start-ups; bytes."""

    captured_bytes: int
    """What was captured beside the budget, beyond the estimate of a fit without that model."""
    estimate_bytes: int
    """What was captured, beyond vLLM's own estimate, which newer releases take out of the budget."""


class _Seen(NamedTuple):
    gpu: str
    several: bool
    gib: float
    start_ups: int


@cache
def in_use_at_start(gpu: GpuSpec, *, several: bool) -> InUse:
    """CUDA's context, with ``several`` ranks NCCL's buffers too, on that kind of card.

    The typical figure is the median of the card's start-ups, or of its maker's cards with the same kind of link, or of
    all.  The high one is the most that the narrowest of these with ``FEW`` start-ups had.  The low one, which alone
    makes a start impossible, is the card's least if it was seen that often, and else the least of any card.
    """
    seen = [each for each in _seen() if each.several == several]
    own = [each for each in seen if each.gpu == gpu.name]
    alike = [each for each in seen if _kind(each.gpu) == _kind(gpu.name, gpu)]
    typical = own or alike or seen
    bounds = next((each for each in (own, alike) if _start_ups(each) >= FEW), seen)
    least = own if _start_ups(own) >= FEW else seen
    middle = median(_each(typical))
    return InUse(
        round(min(min(_each(least)), middle) * GIB),
        round(middle * GIB),
        round(max(max(_each(bounds)), middle) * GIB),
        f"{_start_ups(typical)} start-up{'s' * (_start_ups(typical) > 1)} of {_names(typical)}",
    )


def _each(seen: Sequence[_Seen]) -> list[float]:
    return [each.gib for each in seen for _ in range(each.start_ups)]


def _start_ups(seen: Sequence[_Seen]) -> int:
    return sum(each.start_ups for each in seen)


def _names(seen: Sequence[_Seen]) -> str:
    return ", ".join(dict.fromkeys(each.gpu for each in seen))


def _kind(name: str, gpu: GpuSpec | None = None) -> tuple[bool, bool]:
    """Whether it is AMD's, and whether its cards talk over a link of their own."""
    known = load_gpu(name) if gpu is None and name in bundled_gpus() else gpu
    if known is None:
        return name.startswith("AMD"), False
    return is_amd(known), known.link.startswith(("NVLink", "Infinity"))


@cache
def graph_spread(*, amd: bool) -> GraphSpread:
    """That of the maker's cards."""
    entry = _data()["graphs"]["amd" if amd else "nvidia"]
    return GraphSpread(round(entry["captured_gib"] * GIB), round(entry["estimate_gib"] * GIB))


@cache
def _seen() -> tuple[_Seen, ...]:
    return tuple(_Seen(*(row[key] for key in _Seen._fields)) for row in _data()["in_use_at_start"])


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return data
