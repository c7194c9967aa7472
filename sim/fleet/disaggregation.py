"""A fleet whose prompts are computed by some replicas and whose answers are written by others.

The path of a request is that of vLLM 0.32's proxy and NIXL connector (pull): the gateway sends it to a prefill replica
as a request for one token; when that is done the gateway sends the request itself to a decode replica, which loads the
cache from the first one when it has taken blocks for it.  The token of the prefill replica is thrown away: what the
client sees first comes from the decode replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from windtunnel.sim.engine.protocols import SchedulerProtocol
from windtunnel.sim.engine.remote import DecodeScheduler, PrefillScheduler
from windtunnel.sim.engine.request import Request
from windtunnel.sim.fleet.fleet import Fleet, Pool
from windtunnel.sim.fleet.records import Fate, FleetRecords, TransferTable
from windtunnel.sim.fleet.routers import make_router
from windtunnel.sim.fleet.server import Answers, FleetServer, Instance, Sender
from windtunnel.sim.fleet.transfer import Links
from windtunnel.sim.fleet.view import Backend
from windtunnel.sim.log import Rows
from windtunnel.sim.workload import Workload
from windtunnel.sim.world import REPLY_NS, World


class _Prefilled(NamedTuple):
    """A prompt whose cache lies in a prefill replica."""

    leg: Request
    """The request for one token that computed it."""
    instance: Instance
    end_ns: int


class DisaggregatedServer(FleetServer):
    """Hands each request to a prefill replica and then to a decode replica; mixed replicas do both by themselves."""

    def __init__(
        self,
        world: World,
        workload: Workload,
        fleet: Fleet,
        sender: Sender,
        answers: Answers,
        num_open: Callable[[], int],
    ) -> None:
        """As ``FleetServer``."""
        assert fleet.transfer is not None, "a fleet with roles has one"
        self._links = Links(fleet.transfer)
        self._legs: dict[Request, Request] = {}  # the leg at a prefill replica of each request that is there
        self._whole: dict[Request, Request] = {}  # whose leg it is
        self._prefilled: dict[Request, _Prefilled] = {}  # until their blocks there are given back
        self._handed: deque[Request] = deque()  # prefilled, and no decode replica has room yet
        self._decode_router = make_router(fleet.routing, world)
        self._transfers = Rows(TransferTable)
        self._copies: dict[Request, tuple[int, ...]] = {}  # transfers under way: the row, but for its end
        super().__init__(world, workload, fleet, sender, answers, num_open)

    # -- as a client sees it

    def abort(self, request: Request, replica: int) -> int:
        """Drop a request, wherever it is; returns the tokens that it had got."""
        if request in self._prefilled and request not in self._at:
            if request in self._handed:
                self._handed.remove(request)
            self._give_back(request)
            return 0
        leg = self._legs.get(request)
        if leg is not None:
            self._at[request].replica.abort(leg)
            self._forget_leg(request)
            self._left(request, Fate.ABORTED, 0)
            return 0
        is_waiting_for_its_load = self._is_remote(request) or self._is_on_way_to_decode(request)
        num_emitted = super().abort(request, replica)
        if is_waiting_for_its_load:
            self._give_back(request)
        return num_emitted

    @property
    def is_expecting(self) -> bool:
        """Whether something is under way that will wake a replica up."""
        return bool(self._copies)

    # -- as the replicas see it

    def _finished(self, request: Request, end_ns: int) -> None:
        whole = self._whole.get(request)
        if whole is None:
            super()._finished(request, end_ns)
            return
        self._prefilled[whole] = _Prefilled(request, self._at[whole], end_ns)
        self._forget_leg(whole)
        self._take_over(whole, request)
        self._left(whole, Fate.PREFILLED, 0)
        self._world.call_in(REPLY_NS, self._hand_over, whole)

    def _take_over(self, whole: Request, leg: Request) -> None:
        """What happened to the prompt happened to the request."""
        whole.scheduled_ns = leg.scheduled_ns
        whole.num_cached_tokens = leg.num_cached_tokens
        for name in (
            "num_preemptions",
            "num_recomputed_tokens",
            "num_resumed_cached_tokens",
            "num_resumed_query_tokens",
        ):
            setattr(whole, name, getattr(whole, name) + getattr(leg, name))

    def _forget_leg(self, request: Request) -> None:
        del self._whole[self._legs.pop(request)]

    # -- from one to the other

    def _hand_over(self, request: Request) -> None:
        """A prompt is computed: to a decode replica with it, or into the line for one."""
        if request not in self._prefilled:
            return  # its client gave up within this instant
        self._handed.append(request)
        self._hand_on()

    def _hand_on(self) -> None:
        """Give those whose prompts are computed to decode replicas, in their order, while there is room."""
        while self._handed:
            request = self._handed[0]
            backends = [backend for backend in self._ready_backends if self._role(backend) == "decode"]
            if self._has_limits:
                backends = [backend for backend in backends if backend.has_room]
            try:
                if not self._place_among(request, backends, self._decode_router):
                    return
            except ValueError:
                self._handed.popleft()
                self._give_back(request)
                self._answers.rejected(request, self._world.now_ns)
                continue
            self._handed.popleft()
            self._sender.placed(request, self._at[request].number)

    def _let_in(self, _: object = None) -> None:
        """Those first whose prompts are computed, then those that are new."""
        self._hand_on()
        super()._let_in()

    def _left(self, request: Request, fate: Fate, num_emitted: int) -> None:
        super()._left(request, fate, num_emitted)
        if self._handed and not self._waiting:
            self._world.call_in(REPLY_NS, self._let_in)

    def _begin_load(self, instance: Instance, request: Request, num_blocks: int, now_ns: int) -> None:
        """A decode replica wants the cache of a prompt; its own clock may be ahead of the world's."""
        source = self._prefilled[request].instance
        num_bytes = num_blocks * self._block_bytes(source, instance)
        start_ns, end_ns = self._links.begin(source.number, instance.number, num_bytes, now_ns)
        known = (int(request.request_id), source.number, instance.number, self._prefilled[request].end_ns)
        self._copies[request] = (*known, now_ns, start_ns, num_blocks, num_bytes)
        self._world.call_in(end_ns - self._world.now_ns, lambda _: self._end_load(instance, request))

    def _end_load(self, instance: Instance, request: Request) -> None:
        *row, num_blocks, num_bytes = self._copies.pop(request)
        self._transfers.append([*row, self._world.now_ns, num_blocks, num_bytes])
        _decoder(instance).loaded(request)
        instance.replica.nudge()
        self._give_back(request)

    def _give_back(self, request: Request) -> None:
        """The prefill replica needs to keep the prompt's blocks no longer."""
        leg, source, _ = self._prefilled.pop(request)
        scheduler = source.scheduler
        assert isinstance(scheduler, PrefillScheduler)
        scheduler.release(leg)
        source.replica.nudge()

    def _block_bytes(self, source: Instance, target: Instance) -> int:
        """Bytes of a block on one GPU, of whichever of the two has more of it there."""
        sizes = [self._pool(each).kv_bytes_per_token or 0 for each in (source, target)]
        return max(sizes) * target.scheduler.config.block_size

    def _is_on_way_to_decode(self, request: Request) -> bool:
        return request in self._prefilled and not self._at[request].stays[request].is_there

    def _turned_away(self, request: Request) -> None:
        if request in self._prefilled:
            self._give_back(request)
        super()._turned_away(request)

    def _is_remote(self, request: Request) -> bool:
        instance = self._at.get(request)
        if instance is None or not isinstance(instance.scheduler, DecodeScheduler):
            return False
        return instance.scheduler.is_remote(request)

    # -- who goes where

    def _candidates(self, request: Request) -> list[Backend]:
        return [backend for backend in super()._candidates(request) if self._role(backend) != "decode"]

    def _submit(self, request: Request, instance: Instance) -> None:
        match self._pool(instance).role:
            case "prefill":
                leg = Request(request.request_id, request.arrival_ns, request.num_prompt_tokens, 1, 1, request.priority)
                leg.keys = request.keys
                instance.replica.submit(leg)
                self._legs[request] = leg
                self._whole[leg] = request
            case "decode":
                _decoder(instance).add_remote(request)
                instance.replica.nudge()
            case _:
                super()._submit(request, instance)

    def _make_scheduler(self, pool: Pool, number: int) -> SchedulerProtocol:
        match pool.role:
            case "prefill":
                return PrefillScheduler(pool.system.config)
            case "decode":
                return DecodeScheduler(
                    pool.system.config,
                    lambda request, blocks, now_ns: self._begin_load(self.instances[number], request, blocks, now_ns),
                )
        return super()._make_scheduler(pool, number)

    def _role(self, backend: Backend) -> str:
        return self._pool(self.instances[backend.number]).role

    def _pool(self, instance: Instance) -> Pool:
        return self.fleet.pools[instance.pool]

    # -- what is left behind

    def records(self) -> FleetRecords:
        """As ``FleetServer.records``, and the transfers; those under way have no end."""
        for *row, num_blocks, num_bytes in self._copies.values():
            self._transfers.append([*row, -1, num_blocks, num_bytes])
        return replace(super().records(), transfers=self._transfers.table(order_by=("start_ns", "asked_ns")))


def _decoder(instance: Instance) -> DecodeScheduler:
    scheduler = instance.scheduler
    assert isinstance(scheduler, DecodeScheduler)
    return scheduler
