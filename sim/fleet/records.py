"""What a fleet leaves behind besides what its replicas do: their lives, who was sent where, and how it was scaled."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class Death(IntEnum):
    """Why a replica is gone."""

    NONE = 0
    """It is not: it was still there when the run ended."""
    CRASH = 1
    SCALED_DOWN = 2
    """It was told to go, and had finished what it had (or was out of time for that)."""


class Fate(IntEnum):
    """What became of a request's stay at one replica."""

    OPEN = 0
    """Still there when the run ended."""
    FINISHED = 1
    LOST = 2
    """The replica went away before the answer was complete."""
    ABORTED = 3
    """The client gave up."""
    REJECTED = 4
    """The engine refused it after it had waited too long."""
    PREFILLED = 5
    """Its prompt was computed, for another replica to go on from (prefill and decode roles)."""
    UNHEARD = 6
    """The replica was dead already when the router sent it there, not having noticed.  It was there until it was
    refused, its client gave up or the router noticed."""


@dataclass(frozen=True, slots=True)
class LifeTable:
    """One row a replica, in the order of ``Records.replicas``; times are -1 where that never happened.

    A replica that crashed and comes back is a new one with an empty cache: another row, of the same place.
    """

    pool: IntArray
    """Number of its pool."""
    place: IntArray
    """Its place in the pool, from 0: a replica that comes back takes the place that it had."""
    ordered_ns: IntArray
    """When it was asked for; 0 for those that a run begins with.  From here on its GPUs are paid for."""
    ready_ns: IntArray
    """When it began to take requests."""
    draining_ns: IntArray
    """When it stopped taking requests, because it was told to go."""
    gone_ns: IntArray
    death: IntArray
    """``Death``."""

    def __len__(self) -> int:
        return len(self.pool)


@dataclass(frozen=True, slots=True)
class StayTable:
    """One row each time the gateway handed a request to a replica, in that order."""

    request: IntArray
    """Row of the workload."""
    replica: IntArray
    sent_ns: IntArray
    ended_ns: IntArray
    """-1 where it was still there when the run ended."""
    fate: IntArray
    """``Fate``."""
    num_output_tokens: IntArray
    """Tokens that it had got there when it ended."""
    num_known_blocks: IntArray
    """Blocks of the prompt that the router believed to be cached there; -1 for routers that do not ask."""
    number: IntArray
    """Counts the stays in the order in which they began: the row."""

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True, slots=True)
class ScalingTable:
    """One row each time an autoscaler looked at its pool."""

    time_ns: IntArray
    """When it acted; what it saw is older by the delay of its metric."""
    pool: IntArray
    value_milli: IntArray
    """The metric per replica, in thousandths."""
    num_ready: IntArray
    num_wanted: IntArray
    """Replicas that are there or on their way, before it acted."""
    num_recommended: IntArray
    """What the formula said."""
    num_chosen: IntArray
    """What remained of that after stabilisation, speed limit and bounds."""

    def __len__(self) -> int:
        return len(self.time_ns)


@dataclass(frozen=True, slots=True)
class TransferTable:
    """One row a prompt whose cache went from a prefill replica to a decode replica, in the order of their copies."""

    request: IntArray
    """Row of the workload."""
    sender: IntArray
    """Number of the prefill replica."""
    receiver: IntArray
    """Number of the decode replica."""
    prefilled_ns: IntArray
    """When the prompt was computed; from here on its blocks are kept for the copy."""
    asked_ns: IntArray
    """When the decode replica had taken blocks for it and asked for the copy."""
    start_ns: IntArray
    """When the links were free for it."""
    end_ns: IntArray
    """When it was there; -1 where the run ended before."""
    num_blocks: IntArray
    """Blocks that were copied: those of the prompt that the receiver's prefix cache did not have."""
    num_bytes: IntArray
    """Over one link (that of one GPU)."""

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What a pool is made of, for metrics and reports."""

    name: str
    num_gpus: int = 1
    """Of one replica."""
    gpu: str = ""
    """Name of the GPU; empty where it is not known."""
    gpu_hour: float | None = None
    """Price of one GPU for an hour; None where it was not given."""
    idle_watts: float | None = None
    busy_watts: float | None = None
    is_scaled: bool = False
    """Whether an autoscaler looks after it."""
    role: str = "mixed"
    """mixed, prefill or decode."""


@dataclass(frozen=True, slots=True)
class FleetRecords:
    """What ``Records`` of a fleet hold beside the requests and the replicas' own tables."""

    pools: tuple[PoolFacts, ...]
    router: str
    lives: LifeTable
    stays: StayTable
    scalings: ScalingTable
    on_crash: str = "fail"
    router_block_tokens: int = 16
    """Tokens in a block of the router's index, for routers that have one."""
    transfers: TransferTable | None = None
    """None where no replica has a prefill or decode role."""
    num_missed_faults: int = 0
    """Faults that were asked for and did not happen: all was over by then, or there was no replica to crash."""


def table_rows(table: LifeTable | StayTable | ScalingTable) -> list[tuple[int, ...]]:
    """The table's rows as plain numbers."""
    columns = [getattr(table, field.name).tolist() for field in fields(table)]
    return list(zip(*columns, strict=True))
