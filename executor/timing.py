"""Where the time of a step goes: on the host, in the copies, in the model, and in each of its operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from windtunnel.executor.model import Decoder
from windtunnel.executor.ops import Ops

P = ParamSpec("P")
R = TypeVar("R")


class Marks(Protocol):
    """A clock of marks; every ``devices.Device`` is one."""

    def mark(self) -> Any:
        """A point in the work, reached when everything before it is done."""

    def ns_between(self, first: Any, last: Any) -> int:
        """Time between two marks that have been reached."""


class DeviceTiming(NamedTuple):
    """One step, by the host's clock where it says host, by events on the device elsewhere."""

    host_build_ns: int
    """Host: reading the plan, building the batch and laying it out for the copy."""
    copy_ns: int
    """From the begin of the inputs' copy to its end."""
    device_ns: int
    """Model and sampling, the device's waiting for launches included: much without a graph, one launch with it."""
    total_ns: int
    """Host: the whole step, until its tokens are there."""
    num_tokens: int
    """New tokens that were asked for."""
    num_padded_tokens: int
    """Rows that were added to reach the size of a captured graph."""
    is_graph: bool
    """Whether a captured graph was replayed."""

    @property
    def host_overhead_ns(self) -> int:
        """What the step took beyond the device's work on the model."""
        return self.total_ns - self.device_ns


class OpTiming(NamedTuple):
    """One operation of a step, all its calls together."""

    name: str
    """Of ``ops.Ops``; matrix products are named "linear INPUTS -> OUTPUTS"."""
    num_calls: int
    device_ns: int


class TimedOps:
    """``Ops`` that put marks around each call; ``timings`` reads them once the device is done."""

    def __init__(self, ops: Ops, device: Marks) -> None:
        self._device = device
        self._spans: list[tuple[str, Any, Any]] = []
        self.rms_norm = self._timed("rms_norm", ops.rms_norm)
        self.add_rms_norm = self._timed("add_rms_norm", ops.add_rms_norm)
        self.rope_and_store = self._timed("rope_and_store", ops.rope_and_store)
        self.attention = self._timed("attention", ops.attention)
        self.silu_and_mul = self._timed("silu_and_mul", ops.silu_and_mul)
        self.embed = self._timed("embed", ops.embed)
        self.gather_rows = self._timed("gather_rows", ops.gather_rows)
        self.sample = self._timed("sample", ops.sample)

    def linear(
        self, linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
        """The same matrix product, timed; each shape of weight counts as an operation of its own."""

        def timed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            begin = self._device.mark()
            out = linear(x, weight, bias)
            self._spans.append((f"linear {weight.shape[1]} -> {weight.shape[0]}", begin, self._device.mark()))
            return out

        return timed

    def timings(self) -> list[OpTiming]:
        """Since the last call, in the order in which operations first occurred; all marks must have been reached."""
        totals: dict[str, tuple[int, int]] = {}
        for name, begin, end in self._spans:
            calls, total_ns = totals.get(name, (0, 0))
            totals[name] = (calls + 1, total_ns + self._device.ns_between(begin, end))
        self._spans.clear()
        return [OpTiming(name, calls, total_ns) for name, (calls, total_ns) in totals.items()]

    def _timed(self, name: str, op: Callable[P, R]) -> Callable[P, R]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            begin = self._device.mark()
            out = op(*args, **kwargs)
            self._spans.append((name, begin, self._device.mark()))
            return out

        return timed


@contextmanager
def timed_ops(model: Decoder, device: Marks) -> Iterator[TimedOps]:
    """Let the model run on timed operations meanwhile."""
    ops, linear = model.ops, model.linear
    timed = TimedOps(ops, device)
    model.ops, model.linear = timed, timed.linear(linear)
    try:
        yield timed
    finally:
        model.ops, model.linear = ops, linear
