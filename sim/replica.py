"""One engine in simulated time: it sleeps through its steps and wakes up when a request comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from simpy.events import Event

from windtunnel.sim.engine.plan import StepPlan, StepResult
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


class _Step(NamedTuple):
    """A step that was handed to the executor."""

    plan: StepPlan
    start_ns: int
    end_ns: int
    result: StepResult
    state: tuple[int, int, int, int]


class Replica:
    """A scheduler and an executor on one clock, with as many steps under way as the config says.

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
        self._num_in_vain = 0  # preemptions since the last step that yielded a token
        self._free_ns = 0  # when the executor has done all that it was given
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
        """The engine's loop: decide while there is room for one more step under way, else wait for the oldest.

        Source: vLLM's ``EngineCore.step_with_batch_queue``, of which the synchronous loop is the case of one step.
        """
        world, scheduler, depth = self._world, self.scheduler, self.scheduler.config.max_steps_under_way
        under_way: deque[_Step | None] = deque()  # None for a decision to compute nothing, which takes a place as well
        now_ns = self._free_ns = world.now_ns  # ahead of the world while nothing can come in or go out
        while self._num_in_vain <= LIVELOCK_PREEMPTIONS:
            step = None
            if scheduler.num_requests:
                step, is_final = self._decide(now_ns)
                if is_final and not any(under_way):
                    under_way.clear()
                    now_ns = yield from self._sleep()
                    continue
                under_way.append(step)
                if len(under_way) < depth:
                    if step is None:
                        now_ns = yield from self._wait_until(now_ns + RETRY_NS)
                    continue
            elif not under_way:
                now_ns = yield from self._sleep()
                continue
            num_known = scheduler.num_requests  # those that come while it waits do not count
            done = under_way.popleft()
            if done is not None:
                now_ns = done.end_ns
                if world.peek() <= now_ns or scheduler.may_finish(done.plan):
                    yield from self._sleep_until(now_ns)
                self._end(done)
            if step is None and num_known:
                now_ns = yield from self._wait_until(now_ns + RETRY_NS)
        self.is_stuck = True

    def _decide(self, now_ns: int) -> tuple[_Step | None, bool]:
        """The next step, begun as soon as the executor is free; if it is none, whether asking again is in vain."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        plan = scheduler.schedule(now_ns)
        if plan.preemptions:
            self._num_in_vain += len(plan.preemptions)
            self._log.write_preemptions(plan, now_ns)
        if plan.is_empty:
            return None, not plan.preemptions
        if plan.shape.num_sampled:
            self._num_in_vain = 0
        state = len(scheduler.running), len(scheduler.waiting), pool.num_free, pool.num_free_cached
        start_ns = max(now_ns, self._free_ns)
        result = self.executor.execute(plan)
        self._free_ns = start_ns + result.step_ns
        return _Step(plan, start_ns, self._free_ns, result, state), False

    def _end(self, step: _Step) -> None:
        """Tell the scheduler and the log that a step is done."""
        log, end_ns = self._log, step.end_ns
        for request in self.scheduler.commit(step.plan, end_ns, step.result.speculated):
            log.write_spans(request, request.spans)
            self._on_finish(request, end_ns)
        log.write_step(step.plan, step.start_ns, end_ns, *step.state)

    def _sleep(self) -> Generator[Event, Any, int]:
        """Wait until a request comes; returns when that is."""
        self._asleep = Occurrence(self._world)
        yield self._asleep
        return self._world.now_ns

    def _wait_until(self, then_ns: int) -> Generator[Event, Any, int]:
        """Let the time pass; the world is asked only if something happens in it until then."""
        if self._world.peek() <= then_ns:
            yield from self._sleep_until(then_ns)
        return then_ns

    def _sleep_until(self, then_ns: int) -> Generator[Event, Any, None]:
        if then_ns > self._world.now_ns:
            wake_up = Occurrence(self._world)
            wake_up.fire(then_ns - self._world.now_ns, STEP_END + self.number)
            yield wake_up
