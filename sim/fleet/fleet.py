"""A service of many replicas: which pools of engines there are, who sends what to whom, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from windtunnel.sim.engine.dynamic import DynamicConfig
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.engine.remote import check_supports_roles
from windtunnel.sim.engine.static import StaticConfig
from windtunnel.sim.fleet.autoscaler import Autoscaler
from windtunnel.sim.fleet.faults import Fault
from windtunnel.sim.fleet.health import HealthChecks
from windtunnel.sim.fleet.routers import Routing
from windtunnel.sim.fleet.transfer import KvTransfer
from windtunnel.sim.metrics.economics import Rates
from windtunnel.sim.records import Records, ReplicaRecords
from windtunnel.sim.system import System
from windtunnel.sim.tenancy import GatewayConfig

ROLES = ("mixed", "prefill", "decode")
ON_CRASH = ("fail", "retry", "retry_unstarted")


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas of one kind: ``system.num_replicas`` of them at the start, each a server of its own.

    The limits of the system (``max_num_queued_reqs`` …) are those of each single replica; its router is not asked.

    Raises ValueError, naming the field, its value and the allowed range.
    """

    name: str
    system: System
    autoscaler: Autoscaler | None = None
    weight: float = 1.0
    """How much a replica of this pool can take beside those of others; routers that count requests use it."""
    gpu: str = ""
    """Name of the GPU, for reports."""
    rates: Rates = field(default_factory=Rates)
    """How many GPUs a replica has, and what they cost and draw."""
    role: str = "mixed"
    """``mixed`` replicas serve requests from beginning to end; ``prefill`` ones compute prompts and hand their cache to
    ``decode`` ones, which write the answers."""
    kv_bytes_per_token: int | None = None
    """KV cache of one token on one GPU; needed for a role other than ``mixed``."""

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.name.isprintable() or set(self.name) & set(",="):
            raise ValueError(
                f"name of a pool must be printable, not empty, and without , and = (faults name it), got {self.name!r}"
            )
        if not (isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight of pool {self.name} must be above 0, got {self.weight}")
        if self.role not in ROLES:
            raise ValueError(f"role of pool {self.name} must be one of {', '.join(ROLES)}, got {self.role!r}")
        if self.role != "mixed":
            self._check_role()
        scaler = self.autoscaler
        if scaler is not None and not scaler.min_replicas <= self.system.num_replicas <= scaler.max_replicas:
            raise ValueError(
                f"pool {self.name} starts with {self.system.num_replicas} replicas, which must be at least "
                f"min_replicas ({scaler.min_replicas}) and at most max_replicas ({scaler.max_replicas})"
            )

    def _check_role(self) -> None:
        if self.system.batching is not None:
            raise ValueError(f"pool {self.name} has the role {self.role}, which only continuous batching can take")
        check_supports_roles(self.system.config)
        if self.kv_bytes_per_token is None or self.kv_bytes_per_token < 1:
            raise ValueError(
                f"pool {self.name} has the role {self.role}, so kv_bytes_per_token must be at least 1, got "
                f"{self.kv_bytes_per_token}: give a model, or the number itself"
            )
        if self.autoscaler is not None:
            raise ValueError(f"pool {self.name} has the role {self.role}: autoscaling of such pools is not modelled")

    @property
    def most_replicas(self) -> int:
        """Replicas that it may have at most."""
        return self.system.num_replicas if self.autoscaler is None else self.autoscaler.max_replicas

    @property
    def num_seats(self) -> int:
        """Requests that a replica can run at once."""
        match self.system.batching:
            case StaticConfig() as static:
                return static.batch_size
            case DynamicConfig() as dynamic:
                return dynamic.max_batch_size * dynamic.instance_count
        config = self.system.config
        return config.max_num_active_seqs or config.max_num_seqs


@dataclass(frozen=True, slots=True)
class Fleet:
    """Pools of replicas behind one gateway.

    A fleet of one pool with the ``vllm`` or the ``round_robin`` router, no faults and no autoscaler serves as its
    ``System`` does.

    Raises ValueError for two pools of one name, and for a fault of a pool that is not there.
    """

    pools: tuple[Pool, ...]
    routing: Routing = field(default_factory=Routing)
    faults: tuple[Fault, ...] = ()
    on_crash: str = "retry"
    """What becomes of requests whose replica goes away: ``fail``, ``retry`` (from the first token on, elsewhere) or
    ``retry_unstarted`` (only those of which the client has seen no token yet, as a proxy can)."""
    max_attempts: int = 3
    """How often a request is sent to a replica at most, until it counts as lost."""
    gateway: GatewayConfig | None = None
    """What queues requests before the fleet, one queue a tenant; None lets all of them in as they come."""
    transfer: KvTransfer | None = None
    """How a prompt's cache gets from prefill to decode replicas; needed where pools have those roles."""
    health: HealthChecks = field(default_factory=HealthChecks)
    """How the gateway learns of a crash."""
    network_ns: int = 0
    """What a message takes from the gateway to a replica, or back.  Times of steps and tokens are then those at which
    the gateway gets the answer: a request comes to its replica two such times after it was sent, and what it yields is
    seen at once.  As the way is the same for all, this is what a replica does one way later."""

    def __post_init__(self) -> None:
        if not self.pools:
            raise ValueError("pools must hold at least one pool")
        names = [pool.name for pool in self.pools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"pools must have names of their own, two are called {twice}")
        if self.on_crash not in ON_CRASH:
            raise ValueError(f"on_crash must be one of {', '.join(ON_CRASH)}, got {self.on_crash!r}")
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, got {self.max_attempts}")
        if self.network_ns < 0:
            raise ValueError(f"network_ns must be at least 0, got {self.network_ns}")
        for fault in self.faults:
            if fault.pool not in names:
                raise ValueError(f"a fault names pool {fault.pool!r}; pools are {', '.join(names)}")
        for pool in self.pools:
            self._check_places(pool)
        if self.has_roles:
            self._check_roles()

    @property
    def has_roles(self) -> bool:
        """Whether some replicas compute prompts for others."""
        return any(pool.role != "mixed" for pool in self.pools)

    def _check_roles(self) -> None:
        there = {pool.role for pool in self.pools}
        missing = next((role for role in ("prefill", "decode") if role not in there), None)
        if missing is not None:
            raise ValueError(f"there is no pool with the role {missing}: prefill and decode need each other")
        if self.transfer is None:
            raise ValueError(
                "pools have prefill and decode roles, but how a cache is copied was not said: give transfer"
            )
        if self.faults:
            raise ValueError("faults of fleets with prefill and decode roles are not modelled: leave faults out")
        for name in ("block_size", "max_model_len"):
            sizes = {getattr(pool.system.config, name) for pool in self.pools if pool.role != "mixed"}
            if len(sizes) > 1:
                raise ValueError(f"{name} must be the same in prefill and decode pools, got {sorted(sizes)}")

    def _check_places(self, pool: Pool) -> None:
        most = pool.most_replicas
        for fault in self.faults:
            if fault.pool == pool.name and fault.place >= most:
                raise ValueError(
                    f"a fault names replica {fault.place} of pool {pool.name}, which has at most {most}: they are "
                    "counted from 0"
                )

    @property
    def num_replicas(self) -> int:
        """Replicas at the start."""
        return sum(pool.system.num_replicas for pool in self.pools)

    @property
    def max_num_seats(self) -> int:
        """Requests that all replicas can run at once when there are as many as there may be."""
        scalers = [(pool, pool.autoscaler) for pool in self.pools]
        return sum(
            pool.num_seats * (pool.system.num_replicas if scaler is None else scaler.max_replicas)
            for pool, scaler in scalers
        )

    @property
    def is_steady(self) -> bool:
        """Whether its replicas stay what they are: no autoscaler and no faults."""
        return not self.faults and all(pool.autoscaler is None for pool in self.pools)


def replicas_by_cost(records: Records, served: System | Fleet) -> list[tuple[CostModel, list[ReplicaRecords]]]:
    """The replicas of each kind with the cost model that priced their steps."""
    if isinstance(served, System) or records.fleet is None:
        cost = served.cost if isinstance(served, System) else served.pools[0].system.cost
        return [(cost, list(records.replicas))]
    pool_of = records.fleet.lives.pool.tolist()
    return [
        (pool.system.cost, [own for own, where in zip(records.replicas, pool_of, strict=True) if where == number])
        for number, pool in enumerate(served.pools)
    ]
