"""All inputs of a step in one buffer on the host and its twin on the device, so that one copy brings them over."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from windtunnel.executor.devices import Device

ALIGNMENT = 256
"""Bytes; what torch's own allocator gives, so that kernels are specialised alike whatever is in front of a tensor."""

_TORCH_TYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


class Spec(NamedTuple):
    """Shape and numpy type of an array: int64, int32 or float32."""

    shape: tuple[int, ...]
    dtype: Any


class Places(NamedTuple):
    """The same arrays on both sides."""

    host: list[NDArray[Any]]
    """To be written to."""
    device: list[torch.Tensor]
    """Hold the same after ``send``."""
    num_bytes: int
    """All of them together."""


class Staging:
    """The two buffers.  They must not be written to while a copy is under way: wait for the step before."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._api = device
        self._reserve(num_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of either buffer."""
        return int(self._device.numel())

    def places(self, specs: Sequence[Spec]) -> Places:
        """Room for these arrays from the beginning of the buffers.

        If it takes larger buffers than there are, all places given before are void.
        """
        begins, end = [], 0
        for spec in specs:
            begins.append(end)
            size = prod(spec.shape) * np.dtype(spec.dtype).itemsize
            end += -(-size // ALIGNMENT) * ALIGNMENT
        if end > self.num_bytes:
            self._reserve(max(end, 2 * self.num_bytes))
        host, device = [], []
        for spec, begin in zip(specs, begins, strict=True):
            dtype = np.dtype(spec.dtype)
            behind = begin + prod(spec.shape) * dtype.itemsize
            host.append(self._host[begin:behind].view(dtype).reshape(spec.shape))
            device.append(self._device[begin:behind].view(_TORCH_TYPES[dtype]).view(spec.shape))
        return Places(host, device, end)

    def send(self, num_bytes: int) -> None:
        """Begin to copy the first bytes to the device."""
        self._device[:num_bytes].copy_(self._pinned[:num_bytes], non_blocking=True)

    def _reserve(self, num_bytes: int) -> None:
        self._pinned = self._api.staging(num_bytes)
        self._host: NDArray[np.uint8] = self._pinned.numpy()
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=self._api.torch_device)
