"""How long a prompt's KV cache takes from one replica to another, and who has to wait for whom on the way."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """The way between prefill and decode replicas.

    Every GPU has a link of its own, and the ranks of a replica copy at the same time, so that what counts is the cache
    on one GPU and the bandwidth of its link.  A replica's link carries one request's cache at a time in each direction:
    a copy begins when sender and receiver are both done with earlier ones, in the order in which they were asked for.

    Raises ValueError, naming the field, its value and the allowed range.
    """

    bytes_per_s: float
    """What one GPU's link reaches, each way."""
    latency_ns: int = 0
    """From the request for a copy to its first byte, and from its last byte to the word that it is there, together.  It
    takes no bandwidth: the next copy may run meanwhile."""

    def __post_init__(self) -> None:
        if not (isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            raise ValueError(f"bytes_per_s of a KV transfer must be above 0 and finite, got {self.bytes_per_s}")
        if self.latency_ns < 0:
            raise ValueError(f"latency_ns of a KV transfer must be at least 0, got {self.latency_ns}")

    def copy_ns(self, num_bytes: int) -> int:
        """How long so many bytes keep a link busy."""
        return max(1, round(num_bytes * NS_PER_S / self.bytes_per_s))


class Links:
    """The links of all replicas: who copies when."""

    def __init__(self, transfer: KvTransfer) -> None:
        self._transfer = transfer
        self._sends_until_ns: dict[int, int] = {}
        self._gets_until_ns: dict[int, int] = {}

    def begin(self, sender: int, receiver: int, num_bytes: int, now_ns: int) -> tuple[int, int]:
        """Put a copy in line; returns when it begins and when it is over."""
        start_ns = max(now_ns, self._sends_until_ns.get(sender, 0), self._gets_until_ns.get(receiver, 0))
        busy_until_ns = start_ns + self._transfer.copy_ns(num_bytes)
        self._sends_until_ns[sender] = self._gets_until_ns[receiver] = busy_until_ns
        return start_ns, busy_until_ns + self._transfer.latency_ns
