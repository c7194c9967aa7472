"""Replicas behind a router, with the limits that the server puts before them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from windtunnel.sim.engine.protocols import EngineLoad
from windtunnel.sim.engine.request import Request
from windtunnel.sim.replica import Replica
from windtunnel.sim.world import World

STATS_INTERVAL_NS = 100_000_000
"""How often vLLM's coordinator tells the router how full the engines are (``DPCoordinatorProc``, 0.32)."""
KV_PRESSURE_WEIGHT = 6.0
"""Weight of waiting requests on an engine whose cache is more than half full.  Source: vLLM 0.32,
``DPLBAsyncMPClient.get_core_engine_for_request``."""


class QueueFull(ValueError):
    """The server takes no more requests (vLLM answers with HTTP 503)."""


class Cluster:
    """Takes requests in and hands them to replicas."""

    def __init__(
        self,
        world: World,
        replicas: Sequence[Replica],
        router: str = "vllm",
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
    ) -> None:
        self.replicas = replicas
        self._router = _LoadRouter(world, replicas) if router == "vllm" else _RoundRobin(len(replicas))
        self._max_num_reqs = max_num_queued_reqs
        self._max_num_tokens = max_num_queued_tokens

    def submit(self, request: Request) -> int:
        """Hand a request to a replica; returns its number.

        Raises QueueFull if there are too many, ValueError if the engine refuses it.  A prompt that is too long takes
        nobody's turn.
        """
        request.limit(self.replicas[0].scheduler.config.max_model_len)
        self._check_limits(request)
        number = self._router.choose() if len(self.replicas) > 1 else 0
        self.replicas[number].submit(request)
        return number

    def abort(self, request: Request, replica: int) -> int:
        """Drop a request; returns the tokens that it had got."""
        return self.replicas[replica].abort(request)

    def num_emitted_tokens(self, request: Request, replica: int) -> int:
        """Output tokens that a request has got."""
        return self.replicas[replica].scheduler.num_emitted_tokens(request)

    def end_of_input(self) -> None:
        """No more requests will be submitted."""
        for replica in self.replicas:
            replica.end_of_input()

    def _check_limits(self, request: Request) -> None:
        if self._max_num_reqs is not None:
            num_requests = sum(replica.scheduler.num_requests for replica in self.replicas)
            if num_requests + 1 > self._max_num_reqs:
                raise QueueFull(
                    f"request {request.request_id}: {num_requests} requests are in the server, max_num_queued_reqs is "
                    f"{self._max_num_reqs}"
                )
        if self._max_num_tokens is not None:
            num_tokens = sum(map(_num_prefilling_tokens, self.replicas))
            if num_tokens >= self._max_num_tokens:
                raise QueueFull(
                    f"request {request.request_id}: prompts without a first token have {num_tokens} tokens, "
                    f"max_num_queued_tokens is {self._max_num_tokens}"
                )


def _num_prefilling_tokens(replica: Replica) -> int:
    requests = replica.scheduler.requests()
    return sum(request.num_prompt_tokens for request in requests if request.first_token_ns < 0)


class _RoundRobin:
    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._next = 0

    def choose(self) -> int:
        """The next in turn."""
        chosen = self._next
        self._next = (chosen + 1) % self._num_replicas
        return chosen


class _LoadRouter:
    """vLLM's internal load balancer, one API server.

    An engine's score is the larger of the requests that the router has under way there and those that the engine said
    it had when it was last heard of; requests that wait on a full cache count more.  Ties go round.
    """

    def __init__(self, world: World, replicas: Sequence[Replica]) -> None:
        self._world = world
        self._replicas = replicas
        self._start = 0
        self._told_ns = -STATS_INTERVAL_NS
        self._told: list[list[float]] = []

    def choose(self) -> int:
        """The replica with the lowest score."""
        self._listen()
        replicas, told = self._replicas, self._told
        best, chosen = float("inf"), 0
        for number in chain(range(self._start, len(replicas)), range(self._start)):
            waiting, running, usage = told[number]
            score = waiting + running
            num_requests = replicas[number].scheduler.num_requests
            if score < num_requests:
                score = num_requests
            if waiting and usage > 0.5:
                score += waiting * KV_PRESSURE_WEIGHT * (usage - 0.5)
            if score < best:
                best, chosen = score, number
        told[chosen][0] += 1
        self._start = (self._start + 1) % len(replicas)
        return chosen

    def _listen(self) -> None:
        if self._world.now_ns - self._told_ns >= STATS_INTERVAL_NS:
            self._told_ns = self._world.now_ns
            self._told = [_stats(replica) for replica in self._replicas]


def _stats(replica: Replica) -> list[float]:
    load: EngineLoad = replica.scheduler.load()
    num_blocks = replica.scheduler.config.num_usable_blocks
    return [load.num_waiting, load.num_running, 1 - load.num_free_blocks / num_blocks]
