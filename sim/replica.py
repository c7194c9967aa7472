"""One engine in simulated time: it sleeps through its steps and wakes up when a request comes or a wait is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from simpy.events import Event

from windtunnel.sim.engine.plan import Speculated, StepPlan, StepResult
from windtunnel.sim.engine.protocols import EngineLoad, Executor, SchedulerProtocol
from windtunnel.sim.engine.request import Request, Status
from windtunnel.sim.log import ReplicaLog
from windtunnel.sim.world import STEP_END, Occurrence, World

RETRY_NS = 1_000_000
"""Pause after a step in which nothing was computed though requests are there.  Source: vLLM's engine loop."""

LIVELOCK_PREEMPTIONS = 1_000
"""Preemptions without one token in between after which the engine is taken to be stuck for good.

Requests that keep preempting each other (a tiny pool, admission by first chunk, priorities) would go on for ever, in
vLLM as well as here.
"""


_Step = tuple[StepPlan, int, int, StepResult, EngineLoad]
"""A step that was handed to the executor: plan, start_ns, end_ns, result, load."""


class Replica:
    """A scheduler and an executor on one clock, with as many steps under way as the config says.

    The executor may be swapped between any two steps: ``replica.executor = other``.
    """

    def __init__(
        self,
        world: World,
        number: int,
        scheduler: SchedulerProtocol,
        executor: Executor,
        log: ReplicaLog,
        on_finish: Callable[[Request, int], None],
        on_reject: Callable[[Request, int], None],
    ) -> None:
        """``on_finish(request, end_ns)`` is called at the end of the step that completed the answer.

        ``on_reject(request, now_ns)`` is called when the scheduler gives up a request that waited too long.
        """
        self.number = number
        self.scheduler = scheduler
        self.executor = executor
        self._world = world
        self._log = log
        self._on_finish = on_finish
        self._on_reject = on_reject
        self.is_stuck = False
        """Whether it gave up because its requests only keep preempting each other."""
        self._num_in_vain = 0  # preemptions since the last step that yielded a token
        self._free_ns = [0] * scheduler.config.pipeline_parallel_size  # when each stage has done all it was given
        self._asleep: Occurrence | None = None
        self._alarm_ns = -1  # when the latest alarm rings
        self._loop = self._serve()
        world.process(self._loop)

    @property
    def is_helpless(self) -> bool:
        """Whether it sleeps although requests are there: nothing can ever be done for them."""
        return self._asleep is not None and self.scheduler.num_requests > 0

    def submit(self, request: Request) -> None:
        """Queue a request; the decision after the step in progress is the first to see it.

        Raises ValueError for a request that the engine refuses.
        """
        self.scheduler.add(request)
        self._wake_up()

    def abort(self, request: Request) -> int:
        """Drop a request; what the step in progress computes for it is lost.  Returns the tokens that it had got."""
        num_emitted = self.scheduler.num_emitted_tokens(request)
        self._log.write_spans(request, self.scheduler.token_spans(request))
        self.scheduler.abort(request)
        self.is_stuck, self._num_in_vain = False, 0
        self._wake_up()
        return num_emitted

    def end_of_input(self) -> None:
        """No more requests will be submitted."""
        self.scheduler.end_of_input()
        self._wake_up()

    def nudge(self) -> None:
        """Something changed in the scheduler that no request brought: it may have work now."""
        self._wake_up()

    def stop(self) -> None:
        """The engine is gone: the step in progress never ends.  To be called by the world, not from one of its steps.

        Its requests are left to whoever stops it.
        """
        self._asleep = None
        self._loop.close()

    def _serve(self) -> Generator[Event, Any, None]:
        """The engine's loop: decide while there is room for one more step under way, else wait for the oldest.

        Source: vLLM's ``EngineCore.step_with_batch_queue``, of which the synchronous loop is the case of one step.
        """
        world, scheduler, depth = self._world, self.scheduler, self.scheduler.max_steps_under_way
        under_way: deque[_Step | None] = deque()  # None for a decision to compute nothing, which takes a place as well
        now_ns = world.now_ns  # ahead of the world while nothing can come in or go out
        while True:
            step = None
            if self._num_in_vain > LIVELOCK_PREEMPTIONS:
                now_ns = yield from self._give_up(under_way, now_ns)
                continue
            num_known = scheduler.num_requests  # those that come while it waits do not count
            if num_known:
                plan = scheduler.schedule(now_ns)
                if plan.rejections:
                    yield from self._reject(plan, now_ns)
                step = self._begin(plan, now_ns)
                if step is None and not plan.preemptions and not any(under_way):
                    under_way.clear()
                    now_ns = yield from self._sleep(scheduler.next_decision_ns(now_ns))
                    continue
                under_way.append(step)
                if len(under_way) < depth:
                    if step is None:
                        now_ns = yield from self._wait_until(now_ns + RETRY_NS)
                    continue
            elif not under_way:
                now_ns = yield from self._sleep()
                continue
            done = under_way.popleft()
            if done is not None:
                if done[2] > now_ns:  # else the loop slept through its end
                    now_ns = done[2]
                if (world.peek() <= now_ns or scheduler.may_finish(done[0])) and now_ns > world.now_ns:
                    yield self._alarm(now_ns)  # only if the world can tell
                self._end(done, now_ns)
            if step is None and num_known:
                now_ns = yield from self._wait_until(now_ns + RETRY_NS)

    def _give_up(self, under_way: deque[_Step | None], now_ns: int) -> Generator[Event, Any, int]:
        """Finish what is under way and rest, since only a client that loses patience can change anything."""
        while under_way:
            done = under_way.popleft()
            if done is not None:
                now_ns = max(now_ns, done[2])
                yield from self._sleep_until(now_ns)
                self._end(done, now_ns)
        yield from self._sleep_until(now_ns)
        self.is_stuck = self._num_in_vain > LIVELOCK_PREEMPTIONS
        return (yield from self._sleep()) if self.is_stuck else now_ns

    def _begin(self, plan: StepPlan, now_ns: int) -> _Step | None:
        """The step that was decided now, begun as soon as the executor is free; None if nothing is computed."""
        if plan.preemptions:
            self._num_in_vain += len(plan.preemptions)
            self._log.write_preemptions(plan, now_ns)
        if plan.is_empty:
            return None
        if self._num_in_vain and plan.shape.num_sampled:
            self._num_in_vain = 0
        load = self.scheduler.load()
        start_ns = self._free_ns[0]
        if start_ns < now_ns:
            start_ns = now_ns
        result = self.executor.execute(plan)
        if len(self._free_ns) > 1:
            return plan, start_ns, self._pass_stages(start_ns, result.step_ns), result, load
        end_ns = self._free_ns[0] = start_ns + result.step_ns
        return plan, start_ns, end_ns, result, load

    def _pass_stages(self, start_ns: int, step_ns: int) -> int:
        """When a step that begins now leaves the last stage; stages take equal parts of it, one step at a time each."""
        free_ns, num_stages = self._free_ns, len(self._free_ns)
        end_ns = start_ns
        for stage in range(num_stages):
            part_ns = step_ns * (stage + 1) // num_stages - step_ns * stage // num_stages
            end_ns = free_ns[stage] = max(end_ns, free_ns[stage]) + part_ns
        return end_ns

    def _reject(self, plan: StepPlan, now_ns: int) -> Generator[Event, Any, None]:
        """Tell whom the decision refused, once the world has come to this time."""
        yield from self._sleep_until(now_ns)
        for request in plan.rejections:
            self._on_reject(request, now_ns)

    def _end(self, step: _Step, end_ns: int) -> None:
        """Tell the scheduler and the log that a step is done."""
        log = self._log
        plan, start_ns, _, result, load = step
        drafts = _verified(plan, result.speculated) if plan.num_drafts else ()
        for request in self.scheduler.commit(plan, end_ns, result.speculated):
            log.write_spans(request, request.spans)
            self._on_finish(request, end_ns)
        log.write_step(plan, start_ns, end_ns, load, drafts)

    def _sleep(self, alarm_ns: int | None = None) -> Generator[Event, Any, int]:
        """Wait until a request comes, or until ``alarm_ns``; returns when that is."""
        if alarm_ns is not None and alarm_ns != self._alarm_ns:
            self._alarm_ns = alarm_ns
            self._call_at(alarm_ns, self._wake_up)
        self._asleep = Occurrence(self._world)
        yield self._asleep
        return self._world.now_ns

    def _wake_up(self) -> None:
        """End the sleep; too early does no harm, since whoever wakes up asks the scheduler what to do."""
        if self._asleep is not None:
            self._asleep.fire(0, STEP_END + self.number)
            self._asleep = None

    def _wait_until(self, then_ns: int) -> Generator[Event, Any, int]:
        """Let the time pass; the world is asked only if something happens in it until then."""
        if self._world.peek() <= then_ns:
            yield from self._sleep_until(then_ns)
        return then_ns

    def _sleep_until(self, then_ns: int) -> Generator[Event, Any, None]:
        if then_ns > self._world.now_ns:
            yield self._alarm(then_ns)

    def _alarm(self, then_ns: int) -> Event:
        """What happens at that time, which is to come."""
        return self._world.at(then_ns, STEP_END + self.number)

    def _call_at(self, then_ns: int, action: Callable[[], None]) -> None:
        self._alarm(then_ns).callbacks = [lambda _: action()]


def _verified(plan: StepPlan, speculated: Speculated | None) -> list[tuple[int, int]]:
    """(tokens verified, tokens accepted) of each draft.

    As in vLLM, drafts that only fill the batch count as well (nothing of them holds), and drafts of requests that are
    over when the step ends count no more than their tokens do.
    """
    accepted = speculated.num_accepted if speculated else {}
    return [
        (num_drafts, accepted.get(request, 0))
        for request, num_drafts in plan.num_drafts.items()
        if request.status <= Status.PREEMPTED
    ]
