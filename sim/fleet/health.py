"""When the gateway learns that a replica is dead, and what the dead one does to requests until then."""

from __future__ import annotations

from dataclasses import dataclass

NS_PER_S = 1_000_000_000
DEAD_REPLICAS = ("refuse", "hang")


@dataclass(frozen=True, slots=True)
class HealthChecks:
    """Probes of each replica at regular times, of which several in a row have to fail until it gets no more requests.

    The default is that of a Kubernetes readiness probe (``core/v1`` ``Probe``: ``periodSeconds`` 10,
    ``failureThreshold`` 3), so that a dead replica gets requests for 20 to 30 seconds.  A probe fails at once; one that
    waits for its timeout (``timeoutSeconds``, 1 second there) fails so much later in reality.

    Raises ValueError, naming the field, its value and the allowed range.
    """

    interval_ns: int = 10 * NS_PER_S
    """From one probe of a replica to the next; the first is when it becomes ready.  0 is to know of a crash at once."""
    num_failures: int = 3
    """Probes that have to fail in a row."""
    dead_replicas: str = "refuse"
    """``refuse``: a process died, so connections to it are reset and new ones refused at once.  ``hang``: a machine or
    its network is gone, so nothing comes back, and requests wait there until the gateway notices."""

    def __post_init__(self) -> None:
        if self.interval_ns < 0:
            raise ValueError(
                f"interval_ns of health checks must be at least 0 (0 is to know of a crash at once), got "
                f"{self.interval_ns}"
            )
        if self.num_failures < 1:
            raise ValueError(f"num_failures of health checks must be at least 1, got {self.num_failures}")
        if self.dead_replicas not in DEAD_REPLICAS:
            raise ValueError(f"dead_replicas must be one of {', '.join(DEAD_REPLICAS)}, got {self.dead_replicas!r}")

    @property
    def has_delay(self) -> bool:
        """Whether the gateway learns of a crash later than it happens."""
        return self.interval_ns > 0

    @property
    def hang(self) -> bool:
        """Whether requests at a dead replica wait until the gateway notices."""
        return self.has_delay and self.dead_replicas == "hang"

    def noticed_ns(self, ready_ns: int, dead_ns: int) -> int:
        """When a replica that became ready and died at these times is known to be dead: at the last failing probe."""
        if not self.has_delay:
            return dead_ns
        num_passed = (dead_ns - ready_ns) // self.interval_ns
        return ready_ns + (num_passed + self.num_failures) * self.interval_ns
