"""What tenants are entitled to, and how a gateway before the server chooses among them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from windtunnel.sim.workload import Workload

FAIRNESS = ("weighted", "none")
BEYOND = ("queue", "reject")


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """What one tenant is entitled to.

    Raises ValueError, naming the field, for a value out of range.
    """

    weight: float = 1.0
    """Its part of the tokens while others wait too, relative to theirs."""
    priority: int = 0
    """Smaller goes first, whatever the weights."""
    max_in_flight: int | None = None
    """Most of its requests that are in the server at once; None is no limit."""
    requests_per_s: float | None = None
    """Its requests that go in per second over time; as many as make a second (at least one) may go at once."""
    tokens_per_minute: float | None = None
    """Tokens (prompts and ``max_tokens``) that go in per minute over time; a minute's worth may go at once."""
    beyond: str = "queue"
    """What becomes of a request beyond these limits: it waits (``queue``), or is answered with HTTP 429
    (``reject``)."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight must be above 0 and finite, got {self.weight}")
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise ValueError(f"max_in_flight must be at least 1, got {self.max_in_flight}")
        for name in ("requests_per_s", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and not 0.001 <= value <= 1e12:
                raise ValueError(f"{name} must be from 0.001 to 1e12, got {value}: leave it out for no limit")
        if self.beyond not in BEYOND:
            raise ValueError(f"beyond must be one of {', '.join(BEYOND)}, got {self.beyond!r}")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """How a gateway chooses.  Raises ValueError, naming the field, for a value out of range."""

    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict)
    """By name; those who are not named have weight 1 and no limits."""
    fairness: str = "weighted"
    """``weighted`` takes the tenant that has got the least for its weight, ``none`` the request that came first."""
    max_in_flight: int | None = None
    """Requests that are in the server at once; None is as many as its replicas have seats (``max_num_seqs``)."""

    def __post_init__(self) -> None:
        if self.fairness not in FAIRNESS:
            raise ValueError(f"fairness must be one of {', '.join(FAIRNESS)}, got {self.fairness!r}")
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise ValueError(f"max_in_flight must be at least 1, got {self.max_in_flight}")

    def check_names(self, workload: Workload) -> None:
        """Raise ValueError if a tenant has settings here that the workload does not have."""
        unknown = [name for name in self.tenants if name not in workload.tenants]
        if unknown:
            there = ", ".join(workload.tenants) or "none"
            raise ValueError(
                f"there are settings for the tenant {unknown[0]!r}, but the workload has no such tenant (its tenants: "
                f"{there}): name one of them, or give requests a tenant"
            )
