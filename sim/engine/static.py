"""Static batching: N requests go in together and come out together."""

from __future__ import annotations

from dataclasses import dataclass, field

from windtunnel.sim.engine.batch_queue import BatchQueue
from windtunnel.sim.engine.batches import BatchExecution, BatchScheduler
from windtunnel.sim.engine.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class StaticConfig:
    """Batches of a fixed size.  Raises ValueError for a size below 1 or a negative time-out."""

    batch_size: int
    """Slots of a batch.  Fewer are used where the KV pool holds no more, where the time-out ends the wait for company,
    and for the rest when the input has ended."""
    batch_timeout_ns: int | None = None
    """Longest wait for company; 0 takes what is there, None waits until the batch is full.

    Without a time-out a client that waits for answers before it sends more, and keeps fewer requests in flight than
    ``batch_size``, never gets one: such a run ends as stalled.
    """
    execution: BatchExecution = field(default_factory=BatchExecution)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.batch_timeout_ns is not None and self.batch_timeout_ns < 0:
            raise ValueError(f"batch_timeout_ns must be at least 0, or None for no limit, got {self.batch_timeout_ns}")


class StaticScheduler(BatchScheduler):
    """First come, first served in batches of a fixed size; see ``BatchScheduler``."""

    def __init__(self, config: SchedulerConfig, static: StaticConfig) -> None:
        queue = BatchQueue(static.batch_size, max_delay_ns=static.batch_timeout_ns)
        super().__init__(config, queue, static.execution)
        self.static = static
