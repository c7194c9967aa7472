"""Who serves the next request: routers as real gateways have them, over what a real gateway can know.

A router chooses among the replicas that take requests; where all of them are full, the gateway lets the request wait
and asks again.  No router sees the length of an answer.  Ties go round.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, log
from typing import Protocol

import numpy as np

from windtunnel.sim.cluster import KV_PRESSURE_WEIGHT, STATS_INTERVAL_NS
from windtunnel.sim.fleet.view import Backend, Incoming
from windtunnel.sim.rng import mixed, stream
from windtunnel.sim.world import World

ROUTERS = (
    "vllm",
    "round_robin",
    "least_requests",
    "least_kv",
    "power_of_two",
    "prefix_affinity",
    "session",
    "shared_queue",
)
"""``vllm``: vLLM's internal load balancer.  ``round_robin``: in turns.  ``least_requests``: the fewest requests in
flight.  ``least_kv``: the lowest KV usage.  ``power_of_two``: the less busy of two drawn at random.
``prefix_affinity``: where most of the prompt is believed to be cached, weighed against load.  ``session``: a
conversation stays where it is.  ``shared_queue``: requests wait at the gateway until a replica has a free seat."""
READS_STATS = ("least_kv", "prefix_affinity")
"""Routers that need to be told of the engines' load."""
SHORTEST_INTERVAL_NS = 1_000_000
SCRAPE_INTERVAL_NS = 50_000_000
"""How often the engines' metrics are read.  Source: ``refresh-metrics-interval`` of the endpoint picker of the Gateway
API Inference Extension, which llm-d's router is built on."""


@dataclass(frozen=True, slots=True)
class Routing:
    """A router and its settings.

    Raises ValueError, naming the field, its value and the allowed range.
    """

    router: str = "vllm"
    max_requests_per_replica: int | None = None
    """Most requests that the gateway has in flight at one replica; more wait at the gateway.  None is no limit, with
    ``shared_queue`` the engine's seats."""
    max_waiting_requests: int | None = None
    """Requests waiting at the gateway from which on new ones are rejected; None is no limit."""
    stats_interval_ns: int = SCRAPE_INTERVAL_NS
    """How often the gateway reads the engines' metrics, at least 1 ms; 0 is at every decision."""
    stats_delay_ns: int = 0
    """How long what it read is under way until it counts."""
    prefix_weight: float = 2.0
    """``prefix_affinity``: weight of the share of the prompt that is believed to be cached."""
    queue_weight: float = 1.0
    """``prefix_affinity``: weight of a short queue (1 for the shortest, 0 for the longest of all replicas)."""
    kv_weight: float = 1.0
    """``prefix_affinity``: weight of the free share of the KV cache."""
    prefix_block_tokens: int = 16
    """``prefix_affinity``: tokens in a block of its index."""
    prefix_max_blocks: int = 256
    """``prefix_affinity``: blocks from the beginning of a prompt that it looks at."""
    prefix_capacity_blocks: int = 31_250
    """``prefix_affinity``: blocks that it remembers for each replica, those last seen."""
    seed: int = 0
    """``power_of_two`` draws from it."""

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            raise ValueError(f"router must be one of {', '.join(ROUTERS)}, got {self.router!r}")
        for name, least in (
            ("max_requests_per_replica", 1),
            ("max_waiting_requests", 0),
            ("stats_interval_ns", 0),
            ("stats_delay_ns", 0),
            ("prefix_block_tokens", 1),
            ("prefix_max_blocks", 1),
            ("prefix_capacity_blocks", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if 0 < self.stats_interval_ns < SHORTEST_INTERVAL_NS:
            raise ValueError(
                f"stats_interval_ns must be 0 (at every decision) or at least {SHORTEST_INTERVAL_NS} (1 ms), got "
                f"{self.stats_interval_ns}"
            )
        for name in ("prefix_weight", "queue_weight", "kv_weight"):
            weight = getattr(self, name)
            if not (isfinite(weight) and weight >= 0):
                raise ValueError(f"{name} must be at least 0, got {weight}")

    @property
    def reads_stats(self) -> bool:
        """Whether the router looks at the engines' metrics."""
        return self.router in READS_STATS


class Router(Protocol):
    """Chooses replicas, and remembers what it needs for that."""

    def choose(self, incoming: Incoming, backends: Sequence[Backend]) -> Backend:
        """One of the backends (there is at least one; they are in order of their numbers)."""

    def forget(self, backend: Backend) -> None:
        """The replica is gone, and its cache with it."""

    @property
    def num_known_blocks(self) -> int:
        """Blocks of the latest request's prompt that it believes cached where it sent it; -1 if it does not ask."""


def make_router(routing: Routing, world: World) -> Router:
    """The router that the settings ask for."""
    match routing.router:
        case "vllm":
            return VllmRouter(world)
        case "round_robin":
            return RoundRobin()
        case "least_kv":
            return LeastKv()
        case "power_of_two":
            return PowerOfTwo(routing.seed)
        case "prefix_affinity":
            return PrefixAffinity(routing)
        case "session":
            return SessionAffinity()
    return LeastRequests()


class _AsksNoCache:
    """Part of a router that knows nothing of caches."""

    num_known_blocks = -1

    def forget(self, backend: Backend) -> None:
        """Nothing is remembered of a replica."""


class RoundRobin(_AsksNoCache):
    """Takes turns among the replicas that are there."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, incoming: Incoming, backends: Sequence[Backend]) -> Backend:  # noqa: ARG002
        """The next after the one that was chosen last."""
        chosen = next((backend for backend in backends if backend.number > self._last), backends[0])
        self._last = chosen.number
        return chosen


class _InTurn:
    """The smallest by some measure; of several, the first from a place that moves on by one with every choice."""

    def __init__(self) -> None:
        self._start = 0

    def smallest(self, backends: Sequence[Backend], measure: Callable[[Backend], tuple[float, ...]]) -> Backend:
        """The backend for which ``measure`` is smallest."""
        count = len(backends)
        start, self._start = self._start % count, self._start + 1
        in_order = [backends[(start + offset) % count] for offset in range(count)]
        return min(in_order, key=measure)


class LeastRequests(_AsksNoCache):
    """The fewest requests in flight for its weight: (requests + 1) / weight, this one included."""

    def __init__(self) -> None:
        self._turn = _InTurn()

    def choose(self, incoming: Incoming, backends: Sequence[Backend]) -> Backend:  # noqa: ARG002
        """The least busy."""
        return self._turn.smallest(backends, _business)


class LeastKv(_AsksNoCache):
    """The lowest KV usage as last told; of equals the fewest requests in flight.

    Between two readings all go where the cache was emptiest: that herd is what such routers really cause.
    """

    def __init__(self) -> None:
        self._turn = _InTurn()

    def choose(self, incoming: Incoming, backends: Sequence[Backend]) -> Backend:  # noqa: ARG002
        """The one with the emptiest cache."""
        return self._turn.smallest(backends, lambda backend: (backend.stats.kv_usage, *_business(backend)))


class PowerOfTwo(_AsksNoCache):
    """The less busy of two replicas drawn at random (Mitzenmacher 2001; Envoy's ``LEAST_REQUEST`` by default)."""

    def __init__(self, seed: int) -> None:
        self._rng: np.random.Generator = stream(seed, "router", "power_of_two")

    def choose(self, incoming: Incoming, backends: Sequence[Backend]) -> Backend:  # noqa: ARG002
        """The first of the two where they are equally busy."""
        count = len(backends)
        if count == 1:
            return backends[0]
        first = int(self._rng.integers(count))
        second = int(self._rng.integers(count - 1))
        second += second >= first
        return min(backends[first], backends[second], key=_business)


class SessionAffinity(_AsksNoCache):
    """A conversation goes where its first turn went, as long as that place is there; others to the least busy.

    Places are found by weighted rendezvous hashing, which like the hash ring of production-stack's ``session`` router
    moves only the conversations of a place that comes or goes.
    """

    def __init__(self) -> None:
        self._others = LeastRequests()

    def choose(self, incoming: Incoming, backends: Sequence[Backend]) -> Backend:
        """The place with the highest hash for this conversation."""
        if incoming.session < 0:
            return self._others.choose(incoming, backends)
        key = mixed(incoming.session)
        return max(backends, key=lambda backend: _rendezvous(key, backend))


def _rendezvous(key: int, backend: Backend) -> float:
    chance = ((mixed(key ^ mixed(backend.identity)) >> 11) + 0.5) / (1 << 53)  # inside of (0, 1)
    return -backend.weight / log(chance)


class PrefixAffinity:
    """Where most of the prompt is believed to be cached, weighed against queue and KV usage.

    The replica's score is ``prefix_weight * known share of the prompt + queue_weight * shortness of its queue +
    kv_weight * free share of its cache``; the highest is chosen.  What is cached where is not asked but remembered:
    blocks of the prompts that were sent there, the last ``prefix_capacity_blocks`` of each replica.  It can be wrong:
    the engine may have evicted what the router remembers.

    Source: the scorers ``prefix-cache-scorer`` (approximate), ``queue-scorer`` and ``kv-cache-utilization-scorer`` of
    the Gateway API Inference Extension's endpoint picker, which llm-d uses with weights 2, 1 and 1, and their default
    sizes.  With ``queue_weight = kv_weight = 0`` it is the longest known prefix alone, as production-stack's
    ``prefixaware`` router has it.
    """

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._turn = _InTurn()
        self._index = PrefixIndex(routing.prefix_capacity_blocks)
        self._num_known = 0

    @property
    def num_known_blocks(self) -> int:
        """Blocks of the latest request's prompt that it believed cached where it sent it."""
        return self._num_known

    def choose(self, incoming: Incoming, backends: Sequence[Backend]) -> Backend:
        """The one with the highest score."""
        routing = self._routing
        blocks = incoming.prompt_blocks(routing.prefix_block_tokens, routing.prefix_max_blocks)
        known = self._index.known(blocks)
        queues = [backend.stats.num_waiting for backend in backends]
        longest, spread = max(queues), max(queues) - min(queues)

        def badness(backend: Backend) -> tuple[float]:
            prefix = known.get(backend.number, 0) / len(blocks) if blocks else 0.0
            queue = (longest - backend.stats.num_waiting) / spread if spread else 1.0
            free = 1.0 - backend.stats.kv_usage
            return (-(routing.prefix_weight * prefix + routing.queue_weight * queue + routing.kv_weight * free),)

        chosen = self._turn.smallest(backends, badness)
        self._num_known = known.get(chosen.number, 0)
        self._index.add(chosen.number, blocks)
        return chosen

    def forget(self, backend: Backend) -> None:
        """Nothing is cached there any more."""
        self._index.remove(backend.number)


class PrefixIndex:
    """Which blocks were sent where, the last ``capacity`` of each replica."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._holders: dict[int, dict[int, None]] = {}
        self._blocks: dict[int, OrderedDict[int, None]] = {}

    def known(self, blocks: Sequence[int]) -> dict[int, int]:
        """How many of the blocks each replica holds, up to the first that none holds."""
        found: dict[int, int] = {}
        for block in blocks:
            holders = self._holders.get(block)
            if not holders:
                break
            for number in holders:
                found[number] = found.get(number, 0) + 1
        return found

    def add(self, number: int, blocks: Sequence[int]) -> None:
        """Blocks were sent to this replica; the least recently sent ones make room."""
        held = self._blocks.setdefault(number, OrderedDict())
        for block in blocks:
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
                self._holders.setdefault(block, {})[number] = None
        while len(held) > self._capacity:
            self._drop(number, held.popitem(last=False)[0])

    def remove(self, number: int) -> None:
        """Forget all that was sent to this replica."""
        for block in self._blocks.pop(number, ()):
            self._drop(number, block)

    def _drop(self, number: int, block: int) -> None:
        holders = self._holders[block]
        del holders[number]
        if not holders:
            del self._holders[block]


class VllmRouter(_AsksNoCache):
    """vLLM's internal load balancer, as ``sim.cluster`` has it, over replicas that may come and go."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._start = 0
        self._told_ns = -STATS_INTERVAL_NS
        self._told: dict[int, list[float]] = {}

    def choose(self, incoming: Incoming, backends: Sequence[Backend]) -> Backend:  # noqa: ARG002
        """The lowest score: requests in flight or told of, waiting ones on a full cache counting more."""
        self._listen(backends)
        count = len(backends)
        in_order = (backends[(self._start + offset) % count] for offset in range(count))
        chosen = min(in_order, key=self._score)
        self._told[chosen.number][0] += 1
        self._start = (self._start + 1) % count
        return chosen

    def _score(self, backend: Backend) -> float:
        waiting, running, usage = self._told[backend.number]
        score = max(backend.num_in_flight, waiting + running)
        return score + (waiting * KV_PRESSURE_WEIGHT * max(0.0, usage - 0.5) if waiting else 0.0)

    def _listen(self, backends: Sequence[Backend]) -> None:
        if self._world.now_ns - self._told_ns >= STATS_INTERVAL_NS:
            self._told_ns = self._world.now_ns
            self._told = {backend.number: list(backend.probe()) for backend in backends}
        for backend in backends:
            if backend.number not in self._told:
                self._told[backend.number] = list(backend.probe())


def _business(backend: Backend) -> tuple[float, ...]:
    """Requests in flight, this one included, for its weight."""
    return ((backend.num_in_flight + 1) / backend.weight,)
