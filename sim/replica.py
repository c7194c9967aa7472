"""One engine in simulated time: it sleeps through its steps and wakes up when a request comes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from simpy.events import Event

from windtunnel.sim.engine.plan import StepPlan
from windtunnel.sim.engine.protocols import Executor
from windtunnel.sim.engine.request import Request
from windtunnel.sim.engine.scheduler import Scheduler
from windtunnel.sim.log import ReplicaLog
from windtunnel.sim.world import STEP_END, Occurrence, World

RETRY_NS = 1_000_000
"""Pause after a step in which nothing was computed though requests are there.  Source: vLLM's engine loop."""

LIVELOCK_PREEMPTIONS = 1_000
"""Preemptions without one token in between after which the engine is taken to be stuck for good.

Requests that keep preempting each other (a tiny pool, admission by first chunk, priorities) would go on for ever, in
vLLM as well as here.
"""


class Replica:
    """A scheduler and an executor on one clock.

    The executor may be swapped between any two steps: ``replica.executor = other``.
    """

    def __init__(
        self,
        world: World,
        number: int,
        scheduler: Scheduler,
        executor: Executor,
        log: ReplicaLog,
        on_finish: Callable[[Request, int], None],
    ) -> None:
        """``on_finish(request, end_ns)`` is called at the end of the step that finished the request."""
        self.number = number
        self.scheduler = scheduler
        self.executor = executor
        self._world = world
        self._log = log
        self._on_finish = on_finish
        self.is_stuck = False
        """Whether it gave up because its requests only keep preempting each other."""
        self._asleep: Occurrence | None = None
        world.process(self._serve())

    def submit(self, request: Request) -> None:
        """Queue a request; the decision after the step in progress is the first to see it.

        Raises ValueError for a request that the engine refuses.
        """
        self.scheduler.add(request)
        if self._asleep is not None:
            self._asleep.fire(0, STEP_END + self.number)
            self._asleep = None

    def _serve(self) -> Generator[Event, Any, None]:
        world, scheduler, log, pool = self._world, self.scheduler, self._log, self.scheduler.pool
        now_ns = world.now_ns  # runs ahead of the world while nothing can come in or go out
        num_in_vain = 0
        while num_in_vain <= LIVELOCK_PREEMPTIONS:
            plan = scheduler.schedule(now_ns)
            if plan.shape.num_sampled:
                num_in_vain = 0
            if plan.preemptions:
                num_in_vain += len(plan.preemptions)
                log.write_preemptions(plan, now_ns)
            if plan.is_empty:
                now_ns = yield from self._pause(plan, now_ns)
                continue
            state = len(scheduler.running), len(scheduler.waiting), pool.num_free, pool.num_free_cached
            end_ns = now_ns + self.executor.execute(plan).step_ns
            if world.peek() <= end_ns or scheduler.may_finish(plan):
                yield from self._sleep_until(end_ns)
            for request in scheduler.commit(plan, end_ns):
                log.write_spans(request, request.spans)
                self._on_finish(request, end_ns)
            log.write_step(plan, now_ns, end_ns, *state)
            now_ns = end_ns
        self.is_stuck = True

    def _pause(self, plan: StepPlan, now_ns: int) -> Generator[Event, Any, int]:
        """Nothing can be computed: wait for a request, or try again soon; returns when it goes on."""
        if plan.preemptions:  # what the victims gave back can be used by the next decision
            yield from self._sleep_until(now_ns + RETRY_NS)
        else:
            self._asleep = Occurrence(self._world)
            yield self._asleep
        return self._world.now_ns

    def _sleep_until(self, end_ns: int) -> Generator[Event, Any, None]:
        wake_up = Occurrence(self._world)
        wake_up.fire(end_ns - self._world.now_ns, STEP_END + self.number)
        yield wake_up
