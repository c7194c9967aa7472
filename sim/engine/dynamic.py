"""Dynamic batching as the Triton Inference Server does it: whoever waits when an instance is free becomes a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from windtunnel.sim.engine.batch_queue import NS_PER_US, BatchQueue, QueuePolicy
from windtunnel.sim.engine.batches import BatchExecution, BatchScheduler
from windtunnel.sim.engine.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class DynamicConfig:
    """A model's batching settings, under the names of Triton's ``config.pbtxt``.

    Raises ValueError, naming the field, its value and the allowed range, for what Triton refuses to load.
    """

    max_batch_size: int
    preferred_batch_size: tuple[int, ...] = ()
    """Sizes that go at once when they can be made, the largest first; () is ``max_batch_size`` alone."""
    max_queue_delay_microseconds: int = 0
    """Longest wait for company while no such size can be made; 0 takes what is there as soon as an instance is free."""
    default_queue_policy: QueuePolicy = field(default_factory=QueuePolicy)
    priority_levels: int = 0
    """Levels from 1, which goes first; 0 is one queue for all, whatever the requests' priority."""
    default_priority_level: int = 0
    """Level of requests whose priority is no level."""
    priority_queue_policy: tuple[tuple[int, QueuePolicy], ...] = ()
    """(level, policy) of levels that have their own."""
    instance_count: int = 1
    """Copies of the model on the GPU, which take turns."""
    execution: BatchExecution = field(default_factory=BatchExecution)

    def __post_init__(self) -> None:
        for name, least in (("max_batch_size", 1), ("max_queue_delay_microseconds", 0), ("instance_count", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for size in self.preferred_batch_size:
            if not 1 <= size <= self.max_batch_size:
                raise ValueError(
                    f"preferred_batch_size must lie between 1 and max_batch_size ({self.max_batch_size}), got {size}"
                )
        least, most = (1, self.priority_levels) if self.priority_levels else (0, 0)
        if self.priority_levels < 0 or not least <= self.default_priority_level <= most:
            raise ValueError(
                f"default_priority_level must lie between {least} and priority_levels ({self.priority_levels}), "
                f"got {self.default_priority_level}"
            )
        for level, _ in self.priority_queue_policy:
            if not 1 <= level <= self.priority_levels:
                raise ValueError(
                    f"priority_queue_policy names level {level}, which is not between 1 and priority_levels "
                    f"({self.priority_levels})"
                )


class DynamicScheduler(BatchScheduler):
    """Batches formed on demand; see ``BatchQueue`` for when they go and ``BatchScheduler`` for how they run.

    Triton may form the next batch while all instances are busy and let it grow until one is free; here it is formed
    when one is free, as the documentation has it, which gives the same batches.
    """

    def __init__(self, config: SchedulerConfig, dynamic: DynamicConfig) -> None:
        queue = BatchQueue(
            dynamic.max_batch_size,
            dynamic.preferred_batch_size,
            dynamic.max_queue_delay_microseconds * NS_PER_US,
            dynamic.default_queue_policy,
            dynamic.priority_levels,
            dynamic.default_priority_level,
            dict(dynamic.priority_queue_policy),
        )
        super().__init__(config, queue, dynamic.execution, dynamic.instance_count)
        self.dynamic = dynamic
