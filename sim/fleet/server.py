"""A fleet in simulated time: the gateway, and replicas that come, serve, crash, slow down and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple, Protocol

from windtunnel.sim.cluster import QueueFull
from windtunnel.sim.engine.batches import BatchScheduler
from windtunnel.sim.engine.protocols import Executor, SchedulerProtocol
from windtunnel.sim.engine.request import Request
from windtunnel.sim.fleet.autoscaler import Autoscaler, ScalingRule, Seen
from windtunnel.sim.fleet.faults import Crash, Slowdown, SlowedExecutor
from windtunnel.sim.fleet.fleet import Fleet, Pool
from windtunnel.sim.fleet.line import Line
from windtunnel.sim.fleet.records import (
    Death,
    Fate,
    FleetRecords,
    LifeTable,
    PoolFacts,
    ScalingTable,
    StayTable,
)
from windtunnel.sim.fleet.routers import Router, make_router
from windtunnel.sim.fleet.ticker import Ticker
from windtunnel.sim.fleet.view import Backend, Incoming, Stats, block_keys, sessions
from windtunnel.sim.log import ReplicaLog, Rows
from windtunnel.sim.replica import Replica
from windtunnel.sim.workload import Workload
from windtunnel.sim.world import REPLY_NS, World

NOT_PLACED = -1
"""The replica of a request that waits at the gateway."""
PLACE_BITS = 32
Told = Callable[[Request, int], None]


class Sender(Protocol):
    """Who sent the requests, as the fleet sees it."""

    def placed(self, request: Request, replica: int) -> None:
        """A request that was taken in before has come to this replica, or waits again (-1)."""


class Answers(NamedTuple):
    """Whom to tell what becomes of requests that were taken in: each is called with the request and the time."""

    finished: Told
    rejected: Told
    lost: Told
    """The replica went away, and the request is not tried again."""


class State(Enum):
    """Where a replica is in its life."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    GONE = 3


class Stay(NamedTuple):
    """A request's time at one replica."""

    number: int
    """Its row in the table of stays."""
    sent_ns: int
    num_known_blocks: int
    is_there: bool = True
    """Whether the engine has got it; not yet where it is on its way, and never where the replica is dead."""
    is_unheard: bool = False
    """Whether the replica was dead already when it was sent there."""


class Instance:
    """One replica from the moment it is ordered until it is gone."""

    def __init__(
        self,
        number: int,
        pool: int,
        place: int,
        backend: Backend,
        replica: Replica,
        log: ReplicaLog,
        ordered_ns: int,
    ) -> None:
        self.number = number
        self.pool = pool
        self.place = place
        self.backend = backend
        self.replica = replica
        self.log = log
        self.executor: Executor = replica.executor
        """As it is when it is not slow."""
        self.slowed: list[SlowedExecutor] = []
        """Those that ran its steps when it was slow, in turn."""
        self.state = State.STARTING
        self.stays: dict[Request, Stay] = {}
        self.ordered_ns = ordered_ns
        self.ready_ns = -1
        self.draining_ns = -1
        self.gone_ns = -1
        self.death = Death.NONE

    @property
    def scheduler(self) -> SchedulerProtocol:
        """Its engine's scheduler."""
        return self.replica.scheduler

    def num_emitted_tokens(self, request: Request) -> int:
        """Output tokens that a request of its stays has got here."""
        return self.scheduler.num_emitted_tokens(request) if self.stays[request].is_there else 0


class FleetServer:
    """Takes requests in, hands them to replicas, and keeps the replicas."""

    def __init__(
        self,
        world: World,
        workload: Workload,
        fleet: Fleet,
        sender: Sender,
        answers: Answers,
        num_open: Callable[[], int],
    ) -> None:
        """``num_open()`` is how many requests of the workload have not ended: with none nothing happens any more."""
        self.fleet = fleet
        self.instances: list[Instance] = []
        """All replicas that there ever were."""
        self._world = world
        self._workload = workload
        self._sender = sender
        self._answers = answers
        self._session = sessions(workload)
        self._router = make_router(fleet.routing, world)
        self._at: dict[Request, Instance] = {}
        self._attempts: dict[Request, int] = {}
        self._refusers: dict[Request, list[Backend]] = {}  # dead replicas that let a request down
        self._unnoticed: dict[Instance, None] = {}  # dead, and nobody knows; in the order of their deaths
        self._round_trip_ns = 2 * fleet.network_ns
        self._num_on_way = 0
        self._ready: list[Instance] = []
        self._ready_backends: list[Backend] = []
        self._factor: dict[tuple[int, int], float] = {}
        self._stays = Rows(StayTable)
        self._scalings = Rows(ScalingTable)
        self._num_stays = self._num_faults = 0
        self._input_has_ended = self._end_was_told = False
        self._has_limits = fleet.routing.max_requests_per_replica is not None or fleet.routing.router == "shared_queue"
        self._reads_live = fleet.routing.reads_stats and not fleet.routing.stats_interval_ns
        self._lengths = {pool.system.config.max_model_len for pool in fleet.pools}
        self._waiting = Line(self._lengths)
        self._is_over: Callable[[], bool] = lambda: num_open() == 0
        self._ticker = Ticker(world, self._is_over, _patience_ns(fleet))
        for number, pool in enumerate(fleet.pools):
            for _ in range(pool.system.num_replicas):
                self._make_ready(self._order(number))
        self._plan_faults()
        self._start_ticking()

    # -- as a client sees it

    def submit(self, request: Request) -> int:
        """Take a request in; returns its replica, or NOT_PLACED while it waits at the gateway.

        Raises QueueFull if too many wait, ValueError if the prompt fits no pool or the engine refuses it.
        """
        request.limit(max(self._lengths))
        if not self._may_anyone_go() and self._place(request):
            return self._at[request].number
        limit = self.fleet.routing.max_waiting_requests
        if limit is not None and len(self._waiting) >= limit:
            raise QueueFull(
                f"request {request.request_id}: {len(self._waiting)} requests wait at the gateway, "
                f"max_waiting_requests is {limit}"
            )
        self._waiting.append(request)
        return NOT_PLACED

    def abort(self, request: Request, replica: int) -> int:  # noqa: ARG002 - it knows better where the request is
        """Drop a request; returns the tokens that it had got."""
        instance = self._at.get(request)
        if instance is None:
            self._waiting.remove(request)
            self._forget_attempts(request)
            self._world.call_in(REPLY_NS, self._let_in)  # the next may fit where this one did not
            return 0
        num_emitted = instance.replica.abort(request) if instance.stays[request].is_there else 0
        self._left(request, Fate.ABORTED, num_emitted)
        return num_emitted

    def num_emitted_tokens(self, request: Request, replica: int) -> int:  # noqa: ARG002
        """Output tokens that a request has got."""
        instance = self._at.get(request)
        return 0 if instance is None else instance.num_emitted_tokens(request)

    def end_of_input(self) -> None:
        """No more requests will be submitted."""
        self._input_has_ended = True
        self._tell_of_the_end()

    # -- as the replicas see it

    def _finished(self, request: Request, end_ns: int) -> None:
        self._left(request, Fate.FINISHED, request.num_emitted)
        self._answers.finished(request, end_ns)

    def _rejected(self, request: Request, now_ns: int) -> None:
        self._left(request, Fate.REJECTED, request.num_emitted)
        self._answers.rejected(request, now_ns)

    # -- who goes where

    def _place(self, request: Request) -> bool:
        """Hand the request to a replica that has room; False if there is none.  Raises ValueError if it refuses."""
        return self._place_among(request, self._candidates(request), self._router)

    def _place_among(self, request: Request, backends: list[Backend], router: Router) -> bool:
        if not backends:
            return False
        if self._reads_live:
            _tell([(backend, backend.probe()) for backend in backends])
        chosen = router.choose(self._incoming(request), backends)
        self._send(request, self.instances[chosen.number], router.num_known_blocks)
        return True

    def _candidates(self, request: Request) -> list[Backend]:
        """Replicas that may be given the request: ready as far as is known, with room, and of a pool that it fits.

        One that a dead replica let down is not sent there again.
        """
        backends = self._ready_backends
        if self._refusers:
            refusers = self._refusers.get(request, ())
            backends = [backend for backend in backends if backend not in refusers]
        if self._has_limits:
            backends = [backend for backend in backends if backend.has_room]
        if len(self._lengths) > 1:
            backends = [backend for backend in backends if request.num_prompt_tokens < backend.max_model_len]
        return backends

    def _incoming(self, request: Request) -> Incoming:
        row = int(request.request_id)
        return Incoming(
            row, request.num_prompt_tokens, request.max_tokens, request.priority, self._session[row], self._workload
        )

    def _send(self, request: Request, instance: Instance, num_known_blocks: int) -> None:
        number, is_dead = self._num_stays, instance.state is State.GONE
        is_there = not is_dead and not self._round_trip_ns
        if is_there:
            self._hand_in(request, instance)
        else:
            self._num_on_way += 1
            delay_ns = self._round_trip_ns + (REPLY_NS if is_dead else 0)
            self._world.call_in(delay_ns, lambda _: self._arrive(request, number))
        instance.stays[request] = Stay(number, self._world.now_ns, num_known_blocks, is_there, is_dead)
        instance.backend.num_in_flight += 1
        self._num_stays += 1
        self._at[request] = instance
        self._attempts[request] = self._attempts.get(request, 0) + 1

    def _hand_in(self, request: Request, instance: Instance) -> None:
        """The replica's engine gets the request.  Raises ValueError if it refuses."""
        pool = self.fleet.pools[instance.pool]
        _check_limits(request, instance.scheduler, pool)
        if len(self.fleet.pools) > 1:
            request.keys = block_keys(self._workload, int(request.request_id), pool.system.config.block_size)
        self._submit(request, instance)

    def _arrive(self, request: Request, number: int) -> None:
        """A request of that stay comes to its replica, or to what is left of it."""
        self._num_on_way -= 1
        instance = self._at.get(request)
        stay = None if instance is None else instance.stays[request]
        if instance is None or stay is None or stay.number != number:
            self._tell_of_the_end()
            return  # it is not under way any more
        if instance.state is not State.GONE:
            self._come_to(request, instance)
        elif not self.fleet.health.hang:
            self._be_refused(request, instance)
        self._tell_of_the_end()

    def _come_to(self, request: Request, instance: Instance) -> None:
        try:
            self._hand_in(request, instance)
        except ValueError:
            self._turned_away(request)
        else:
            instance.stays[request] = instance.stays[request]._replace(is_there=True)

    def _turned_away(self, request: Request) -> None:
        """The engine that it came to did not take it in."""
        self._rejected(request, self._world.now_ns)

    def _be_refused(self, request: Request, instance: Instance) -> None:
        """Nobody listens at a dead replica: the router tries another, unless it is not to try again."""
        if self._lose(request, instance):
            self._begin_again(request)
            self._waiting.put_back_one(request)
            self._world.call_in(REPLY_NS, self._let_in)

    def _forget_attempts(self, request: Request) -> None:
        self._attempts.pop(request, None)
        self._refusers.pop(request, None)

    def _submit(self, request: Request, instance: Instance) -> None:
        instance.replica.submit(request)

    def _left(self, request: Request, fate: Fate, num_emitted: int) -> None:
        """A request is no longer at its replica; those that wait may go in."""
        instance = self._at.pop(request)
        self._write_stay(request, instance, fate, num_emitted, self._world.now_ns)
        instance.backend.num_in_flight -= 1
        if fate is not Fate.LOST:
            self._forget_attempts(request)
        if self._waiting:
            self._world.call_in(REPLY_NS, self._let_in)
        if instance.state is State.DRAINING and not instance.stays:
            self._world.call_in(REPLY_NS, self._retire, instance)

    def _let_in(self, _: object = None) -> None:
        """Hand out requests that wait, in their order, as long as there is room for one that is first in its lane."""
        while any(self._try(request) for request in self._waiting.heads()):
            pass
        self._tell_of_the_end()

    def _try(self, request: Request) -> bool:
        """Whether a request that waited does so no longer: it was placed, or refused."""
        try:
            if not self._place(request):
                return False
        except ValueError:
            self._waiting.remove(request)
            self._forget_attempts(request)
            self._answers.rejected(request, self._world.now_ns)
            return True
        self._waiting.remove(request)
        self._sender.placed(request, self._at[request].number)
        return True

    def _may_anyone_go(self) -> bool:
        """Whether somebody who waits could be placed this instant, and is going to be before whoever comes now."""
        return any(self._candidates(request) for request in self._waiting.heads())

    def _tell_of_the_end(self) -> None:
        """Once nothing waits here either, the engines need not wait for company any longer."""
        if self._input_has_ended and not self._waiting and not self._num_on_way and not self._end_was_told:
            self._end_was_told = True
            for instance in self.instances:
                if instance.state is not State.GONE:
                    instance.replica.end_of_input()

    # -- replicas that come and go

    def _order(self, pool_number: int, place: int | None = None) -> Instance:
        """A new replica, which is not ready yet."""
        fleet, number = self.fleet, len(self.instances)
        pool = fleet.pools[pool_number]
        if place is None:
            place = self._free_place(pool_number)
        scheduler = self._make_scheduler(pool, number)
        log = ReplicaLog(scheduler.config, isinstance(scheduler, BatchScheduler))
        executor = pool.system.make_executor(number)
        replica = Replica(self._world, number, scheduler, executor, log, self._finished, self._rejected)
        limit = fleet.routing.max_requests_per_replica
        if limit is None and fleet.routing.router == "shared_queue":
            limit = pool.num_seats
        backend = Backend(
            number,
            (pool_number << PLACE_BITS) | place,
            weight=pool.weight,
            max_in_flight=limit,
            max_model_len=scheduler.config.max_model_len,
            probe=lambda: _stats(scheduler),
        )
        instance = Instance(number, pool_number, place, backend, replica, log, self._world.now_ns)
        self.instances.append(instance)
        self._set_speed(instance)
        return instance

    def _make_scheduler(self, pool: Pool, number: int) -> SchedulerProtocol:  # noqa: ARG002
        """The scheduler of replica ``number``."""
        return pool.system.make_scheduler()

    def _free_place(self, pool_number: int) -> int:
        taken = {instance.place for instance in self._living(pool_number)}
        return next(place for place in range(len(taken) + 1) if place not in taken)

    def _living(self, pool_number: int) -> Iterator[Instance]:
        return (each for each in self.instances if each.pool == pool_number and each.state is not State.GONE)

    def _come_up(self, instance: Instance) -> None:
        """It has started, unless the run is over by now."""
        if not self._is_over():
            self._make_ready(instance)

    def _make_ready(self, instance: Instance) -> None:
        """It takes requests from now on, unless it is not wanted any more."""
        if instance.state is not State.STARTING:
            return
        instance.state = State.READY
        instance.ready_ns = self._world.now_ns
        num_waiting = len(self._waiting)
        self._take_place(instance)
        self._note_who_is_ready()
        if self._end_was_told:
            instance.replica.end_of_input()
        if num_waiting and num_waiting == len(self._waiting):  # with those that begin again they go in a tick later
            self._let_in()

    def _take_place(self, heir: Instance) -> None:
        """Where a dead replica was that nobody had noticed, its heir answers from now on."""
        for dead in list(self._unnoticed):
            if (dead.pool, dead.place) == (heir.pool, heir.place):
                self._notice(dead)

    def _note_who_is_ready(self) -> None:
        self._ready = [instance for instance in self.instances if instance.state is State.READY]
        self._ready_backends = [instance.backend for instance in self.instances if self._gets_requests(instance)]

    def _gets_requests(self, instance: Instance) -> bool:
        """Whether it is ready, as far as the router knows."""
        if instance.state is State.READY:
            return True
        return bool(self._unnoticed) and instance in self._unnoticed and instance.draining_ns < 0

    def _dismiss(self, instance: Instance, timeout_ns: int | None) -> None:
        """It gets no more requests, finishes what it has and goes."""
        instance.draining_ns = self._world.now_ns
        was_starting, instance.state = instance.state is State.STARTING, State.DRAINING
        self._note_who_is_ready()
        if was_starting or not instance.stays:
            self._retire(instance)
        elif timeout_ns is not None:
            self._world.call_in(timeout_ns, self._kill, instance)

    def _retire(self, instance: Instance) -> None:
        if instance.state is State.DRAINING and not instance.stays:
            self._end(instance, Death.SCALED_DOWN)

    def _kill(self, instance: Instance) -> None:
        if instance.state is State.DRAINING:
            self._end(instance, Death.SCALED_DOWN)

    def _end(self, instance: Instance, death: Death) -> None:
        """The replica is gone at once, with all that it held; of a crash the router may hear later."""
        health, now_ns, was_started = self.fleet.health, self._world.now_ns, instance.ready_ns >= 0
        instance.state, instance.death, instance.gone_ns = State.GONE, death, now_ns
        if death is not Death.CRASH or not health.has_delay or not was_started:
            self._note_who_is_ready()
            self._router.forget(instance.backend)
            instance.replica.stop()
            self._lose_all(instance)
            return
        last = instance.backend.probe()
        instance.backend.probe = lambda: last
        self._unnoticed[instance] = None
        self._note_who_is_ready()
        instance.replica.stop()
        self._world.call_in(health.noticed_ns(instance.ready_ns, now_ns) - now_ns, self._notice, instance)
        if not health.hang:
            self._lose_all(instance)

    def _notice(self, instance: Instance) -> None:
        """The router knows from now on that a replica is dead, and gives up what it had there."""
        if instance not in self._unnoticed:
            return
        del self._unnoticed[instance]
        self._note_who_is_ready()
        self._router.forget(instance.backend)
        self._lose_all(instance)

    def _lose_all(self, instance: Instance) -> None:
        again = [request for request in list(instance.stays) if self._lose(request, instance)]
        for request in again:
            self._begin_again(request)
        if again:
            self._waiting.put_back(again)
            self._world.call_in(REPLY_NS, self._let_in)

    def _begin_again(self, request: Request) -> None:
        """It waits for another replica, as it was when its client sent it."""
        _begin_anew(request)
        self._sender.placed(request, NOT_PLACED)
        self._end_was_told = False

    def _lose(self, request: Request, instance: Instance) -> bool:
        """Take a request off a replica that is gone; returns whether it is to be tried again."""
        fleet, scheduler, is_there = self.fleet, instance.scheduler, instance.stays[request].is_there
        num_emitted = instance.num_emitted_tokens(request)
        spans = scheduler.token_spans(request) if is_there else []
        is_tried_again = self._attempts[request] < fleet.max_attempts and (
            fleet.on_crash == "retry" or (fleet.on_crash == "retry_unstarted" and request.first_token_ns < 0)
        )
        if not is_tried_again:
            instance.log.write_spans(request, spans)
        if is_there:
            scheduler.abort(request)
        self._left(request, Fate.LOST, num_emitted)
        if is_tried_again and instance in self._unnoticed:
            self._refusers.setdefault(request, []).append(instance.backend)
        if not is_tried_again:
            self._forget_attempts(request)
            request.num_emitted = num_emitted
            self._answers.lost(request, self._world.now_ns)
        return is_tried_again

    # -- faults

    def _plan_faults(self) -> None:
        names = [pool.name for pool in self.fleet.pools]
        for fault in self.fleet.faults:
            pool = names.index(fault.pool)
            if isinstance(fault, Crash):
                self._world.call_in(fault.at_ns, lambda it: self._crash(*it), (pool, fault))
            else:
                self._plan_slowdown(pool, fault)

    def _crash(self, pool: int, fault: Crash) -> None:
        victim = next((each for each in self._living(pool) if each.place == fault.place), None)
        if victim is None or self._is_over():
            return
        self._num_faults += 1
        is_wanted = victim.state is not State.DRAINING
        self._end(victim, Death.CRASH)
        if fault.restart_after_ns is not None and is_wanted:
            heir = self._order(pool, fault.place)
            self._world.call_in(fault.restart_after_ns, self._come_up, heir)

    def _plan_slowdown(self, pool: int, fault: Slowdown) -> None:
        def begin(by: float) -> None:
            self._num_faults += not self._is_over()
            change(by)

        def change(by: float) -> None:
            place = pool, fault.place
            self._factor[place] = self._factor.get(place, 1.0) * by
            for instance in self._living(pool):
                if instance.place == fault.place:
                    self._set_speed(instance)

        self._world.call_in(fault.start_ns, begin, fault.factor)
        if fault.end_ns is not None:
            self._world.call_in(fault.end_ns, change, 1 / fault.factor)

    def _set_speed(self, instance: Instance) -> None:
        factor = self._factor.get((instance.pool, instance.place), 1.0)
        if abs(factor - 1.0) < 1e-9:
            instance.replica.executor = instance.executor
            return
        instance.slowed.append(SlowedExecutor(instance.executor, factor))
        instance.replica.executor = instance.slowed[-1]

    # -- what is looked at again and again

    @property
    def is_expecting(self) -> bool:
        """Whether something is under way that will wake a replica up."""
        return False

    @property
    def now_ns(self) -> int:
        """The present."""
        return self._world.now_ns

    def _start_ticking(self) -> None:
        routing = self.fleet.routing
        if routing.reads_stats and routing.stats_interval_ns:
            self._ticker.every(routing.stats_interval_ns, self._scrape)
        for number, pool in enumerate(self.fleet.pools):
            if pool.autoscaler is not None:
                scaler = _Scaler(self, number, pool.autoscaler, self._ticker)
                self._ticker.every(pool.autoscaler.interval_ns, scaler.look)

    def _scrape(self) -> None:
        """Read the engines' metrics, which count once they are here."""
        read = [(instance.backend, instance.backend.probe()) for instance in self._ready]
        delay_ns = self.fleet.routing.stats_delay_ns
        if not delay_ns:
            _tell(read)
        else:
            self._ticker.later(delay_ns, lambda: _tell(read))

    def seen(self, pool_number: int, metric: str) -> Seen:
        """A pool's metric at this instant, as an autoscaler would sum it."""
        living = list(self._living(pool_number))
        ready = [each for each in living if each.state is State.READY]
        num_wanted = sum(each.state in (State.STARTING, State.READY) for each in living)
        if metric == "kv_usage":
            return Seen(sum(each.backend.probe().kv_usage for each in ready), len(ready), num_wanted)
        num_scaled = sum(pool.autoscaler is not None for pool in self.fleet.pools)
        total = len(self._waiting) / num_scaled
        if metric == "waiting":
            total += sum(each.backend.probe().num_waiting for each in ready)
        else:
            total += sum(each.backend.num_in_flight for each in ready)
        return Seen(total, len(ready), num_wanted)

    def num_wanted(self, pool_number: int) -> int:
        """Replicas of a pool that are ready or on their way."""
        return sum(each.state in (State.STARTING, State.READY) for each in self._living(pool_number))

    def scale(self, pool_number: int, num_replicas: int, settings: Autoscaler) -> None:
        """Order replicas, or dismiss some: those on their way first, then those that came last."""
        living = [each for each in self._living(pool_number) if each.state in (State.STARTING, State.READY)]
        for _ in range(num_replicas - len(living)):
            self._world.call_in(settings.start_up_ns, self._come_up, self._order(pool_number))
        if num_replicas < len(living):
            living.sort(key=lambda each: (each.state is State.STARTING, each.ready_ns, each.number))
            for instance in living[num_replicas:]:
                self._dismiss(instance, settings.drain_timeout_ns)

    def write_scaling(self, row: tuple[int, ...]) -> None:
        """Log that an autoscaler looked: the fields of ``ScalingTable`` in order."""
        self._scalings.append([*row])

    # -- what is left behind

    def _write_stay(self, request: Request, instance: Instance, fate: Fate, num_emitted: int, ended_ns: int) -> None:
        stay = instance.stays.pop(request)
        fate = Fate.UNHEARD if stay.is_unheard else fate
        row = int(request.request_id)
        self._stays.append(
            [row, instance.number, stay.sent_ns, ended_ns, fate, num_emitted, stay.num_known_blocks, stay.number]
        )

    def records(self) -> FleetRecords:
        """Lives, stays and scalings; to be asked once, when the run is over."""
        for instance in self.instances:
            for request in list(instance.stays):
                self._write_stay(request, instance, Fate.OPEN, instance.num_emitted_tokens(request), -1)
        lives = Rows(LifeTable)
        for each in self.instances:
            lives.append(
                [each.pool, each.place, each.ordered_ns, each.ready_ns, each.draining_ns, each.gone_ns, each.death]
            )
        facts = tuple(_facts(pool) for pool in self.fleet.pools)
        stays = self._stays.table(order_by=("number",))
        routing, tables = self.fleet.routing, (lives.table(), stays, self._scalings.table())
        num_missed = len(self.fleet.faults) - self._num_faults
        return FleetRecords(
            facts,
            routing.router,
            *tables,
            self.fleet.on_crash,
            routing.prefix_block_tokens,
            num_missed_faults=num_missed,
        )


class _Scaler:
    """An autoscaler at work: it looks, and acts upon what it saw once that is here."""

    def __init__(self, server: FleetServer, pool: int, settings: Autoscaler, ticker: Ticker) -> None:
        self._server = server
        self._pool = pool
        self._settings = settings
        self._rule = ScalingRule(settings)
        self._ticker = ticker

    def look(self) -> None:
        """See how the pool is."""
        seen = self._server.seen(self._pool, self._settings.metric)
        if self._settings.metric_delay_ns:
            self._ticker.later(self._settings.metric_delay_ns, lambda: self._act(seen))
        else:
            self._act(seen)

    def _act(self, seen: Seen) -> None:
        server, now_ns = self._server, self._server.now_ns
        seen = seen._replace(num_wanted=server.num_wanted(self._pool))
        decision = self._rule.decide(seen, now_ns)
        value_milli = round(1000 * seen.per_replica)
        numbers = (seen.num_ready, seen.num_wanted, decision.num_recommended, decision.num_chosen)
        server.write_scaling((now_ns, self._pool, value_milli, *numbers))
        server.scale(self._pool, decision.num_chosen, self._settings)


def _check_limits(request: Request, scheduler: SchedulerProtocol, pool: Pool) -> None:
    """Refuse what the replica's own server would answer with HTTP 503 (``sim.cluster``)."""
    most_requests, most_tokens = pool.system.max_num_queued_reqs, pool.system.max_num_queued_tokens
    if most_requests is not None and scheduler.num_requests + 1 > most_requests:
        raise QueueFull(
            f"request {request.request_id}: {scheduler.num_requests} requests are in the replica, max_num_queued_reqs "
            f"is {most_requests}"
        )
    if most_tokens is not None:
        prompts = [other.num_prompt_tokens for other in scheduler.requests() if other.first_token_ns < 0]
        if sum(prompts) >= most_tokens:
            raise QueueFull(
                f"request {request.request_id}: prompts without a first token have {sum(prompts)} tokens, "
                f"max_num_queued_tokens is {most_tokens}"
            )


def _begin_anew(request: Request) -> None:
    """As it was when its client sent it."""
    sent = (request.request_id, request.arrival_ns, request.num_prompt_tokens, request.num_output_tokens)
    Request.__init__(request, *sent, request.max_tokens, request.priority, request.keys)


def _stats(scheduler: SchedulerProtocol) -> Stats:
    load = scheduler.load()
    return Stats(load.num_waiting, load.num_running, 1 - load.num_free_blocks / scheduler.config.num_usable_blocks)


def _tell(read: list[tuple[Backend, Stats]]) -> None:
    for backend, stats in read:
        backend.stats = stats


def _facts(pool: Pool) -> PoolFacts:
    rates = pool.rates
    costs = (rates.gpu_hour, rates.idle_watts, rates.busy_watts)
    return PoolFacts(pool.name, rates.num_gpus, pool.gpu, *costs, pool.autoscaler is not None, pool.role)


def _patience_ns(fleet: Fleet) -> int:
    """How long to go on reading metrics while nothing else is going to happen: until nobody would act any more."""
    waits = [pool.autoscaler.patience_ns for pool in fleet.pools if pool.autoscaler is not None]
    return max(waits, default=0)
