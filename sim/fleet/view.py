"""What a gateway can know: of a request before anybody has computed any of it, and of replicas from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from windtunnel.sim.engine.keys import BlockKeys, PrivateKeys, StreamKeys
from windtunnel.sim.workload import Workload


class Stats(NamedTuple):
    """What an engine's ``/metrics`` says of its load."""

    num_waiting: int
    """``vllm:num_requests_waiting``."""
    num_running: int
    """``vllm:num_requests_running``."""
    kv_usage: float
    """``vllm:kv_cache_usage_perc``, a share."""


IDLE = Stats(0, 0, 0.0)
"""What is assumed of a replica that has not been heard of."""


class Backend:
    """A replica as the gateway sees it.

    ``num_in_flight`` is the gateway's own count of requests sent there and not ended; ``stats`` is what it was last
    told.
    """

    __slots__ = ("identity", "max_in_flight", "max_model_len", "num_in_flight", "number", "probe", "stats", "weight")

    def __init__(
        self,
        number: int,
        identity: int,
        *,
        weight: float,
        max_in_flight: int | None,
        max_model_len: int,
        probe: Callable[[], Stats],
    ) -> None:
        """``probe()`` is its load at this instant."""
        self.number = number
        """Its row in the records."""
        self.identity = identity
        """What stays when it crashes and another takes its place: its address."""
        self.weight = weight
        """How much it can take beside others."""
        self.max_in_flight = max_in_flight
        """Most requests that the gateway sends there at once; None is no limit."""
        self.max_model_len = max_model_len
        self.probe = probe
        self.num_in_flight = 0
        self.stats = IDLE

    @property
    def has_room(self) -> bool:
        """Whether the gateway may send one more request."""
        return self.max_in_flight is None or self.num_in_flight < self.max_in_flight

    def __repr__(self) -> str:
        return f"Backend({self.number}, {self.num_in_flight} in flight)"


class Incoming(NamedTuple):
    """A request as it comes to a gateway: what its client wrote into it, never how long its answer will be."""

    row: int
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    session: int
    """The conversation that it belongs to; -1 for a request that stands alone."""
    workload: Workload

    def prompt_blocks(self, block_tokens: int, most: int) -> Sequence[int]:
        """Identities of the first full blocks of the prompt, as hashes of its tokens would tell them.

        Empty where no two requests of the workload share anything, so that nobody could ever look for them.
        """
        if self.workload.content is None:
            return ()
        count = min(self.num_prompt_tokens // block_tokens, most)
        return block_keys(self.workload, self.row, block_tokens).between(0, count)


def block_keys(workload: Workload, row: int, block_size: int) -> BlockKeys:
    """Identities of a request's blocks of so many tokens."""
    own = workload.num_streams + row
    content = workload.content
    if content is None or not content[row]:
        return PrivateKeys(own)
    return StreamKeys(content[row], own, block_size)


def sessions(workload: Workload) -> list[int]:
    """The conversation that each request belongs to: the row of its first turn; -1 for a request that stands alone."""
    previous = workload.previous.tolist()
    found = list(range(len(previous)))
    has_others = [False] * len(previous)
    for row, before in enumerate(previous):
        if before >= 0:
            found[row] = found[before]
            has_others[found[row]] = True
    return [root if has_others[root] else -1 for root in found]
