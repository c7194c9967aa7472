"""The engine in a thread of its own, and the hand-over between it and the asyncio side.

Requests, cancellations, executors and questions go in through a queue and are taken between two steps; tokens come out
once a step, all requests together.  A simulated step lasts as long as the executor says: the thread sleeps until the
step's end on the engine's clock, so that paces do not drift by what deciding and waking up cost.  Where the host cannot
keep pace at all, the clock is put back (``PacedClock.num_slipped_ns``) instead of lagging ever more.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from windtunnel.executor.engine import Engine, RealExecutor, StepFailed, StepOutcome
from windtunnel.executor.engine import Sequence as EngineSequence
from windtunnel.executor.sampling import SamplingParams
from windtunnel.executor.server.clock import PacedClock
from windtunnel.executor.server.history import History
from windtunnel.executor.server.metrics import Answered, EngineMetrics
from windtunnel.sim.engine.protocols import Executor
from windtunnel.sim.engine.request import Request

_LATEST_S = 0.05
_LATEST_STEPS = 20
"""Wall time, and simulated steps, by which a step may end late before the clock is put back."""
_MAX_FAILURES = 3
"""Steps that may fail one after the other before the engine gives up."""

log = logging.getLogger("windtunnel.server")
T = TypeVar("T")


class QueueFull(Exception):
    """A queue limit is reached; the message is vLLM's."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
        """The limit's name."""


class EngineDead(Exception):
    """The engine gave up; nothing can be served any more."""


class Delta(NamedTuple):
    """What a job got: new tokens, or its end, or both."""

    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    """Of the prompt, found in the prefix cache."""
    error: str | None = None
    """Why it failed, if it did."""
    error_status: int = 500
    """HTTP's: 400 if the failure is the request's own fault, 503 if the server is about to end."""


class Taken(NamedTuple):
    """What of a delta is answered: a stop string may end the answer before its tokens do."""

    num_tokens: int
    finish_reason: str | None = None
    """None: the answer goes on."""


class Job:
    """One prompt on its way through the engine; ``take`` is called in the event loop's thread."""

    __slots__ = (
        "arrival_ns",
        "cache_salt",
        "ends_after",
        "first_token_ns",
        "last_token_ns",
        "num_tokens",
        "number",
        "params",
        "priority",
        "prompt_token_ids",
        "request",
        "take",
    )

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        take: Callable[[Delta], Taken],
        priority: int = 0,
        cache_salt: str | None = None,
        ends_after: int | None = None,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.take = take
        self.priority = priority
        self.cache_salt = cache_salt
        self.ends_after = ends_after
        self.number = -1
        """Its place among all jobs, once it is submitted."""
        self.arrival_ns = -1
        self.request: Request | None = None
        """The engine's, once it has taken the job."""
        self.num_tokens = 0
        """Of the answer so far."""
        self.first_token_ns = self.last_token_ns = -1
        """When its first and its latest token were given out."""


class _Abort(NamedTuple):
    job: Job
    finish_reason: str


class _Swap(NamedTuple):
    executor: Executor
    done: asyncio.Future[int]


class _Look(NamedTuple):
    look: Callable[[Engine, int], Any]
    done: asyncio.Future[Any]


_Command = Job | _Abort | _Swap | _Look


class EngineLoop:
    """Runs an engine for an asyncio program."""

    def __init__(
        self,
        engine: Engine,
        metrics: EngineMetrics,
        speed: float = 1.0,
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
    ) -> None:
        """``speed`` is that of simulated steps; the limits are vLLM's (``AsyncLLM.check_admission``)."""
        self.engine = engine
        self.metrics = metrics
        self.speed = speed
        self.clock = PacedClock()
        self.history = History()
        """What the engine did lately; the engine thread's, see ``look``."""
        self.failure: str | None = None
        """Why the engine gave up, if it did."""
        self._max_num_reqs = max_num_queued_reqs
        self._max_num_tokens = max_num_queued_tokens
        self._jobs: dict[Job, None] = {}  # submitted and not over; the event loop's
        self._awaited: set[asyncio.Future[Any]] = set()
        self._num_prefill_tokens = 0
        self._num_submitted = 0
        self._inbox: deque[_Command] = deque()
        self._wake = threading.Event()
        self._is_stopping = False
        self._sequences: dict[Job, EngineSequence] = {}  # the engine thread's
        self._job_of: dict[EngineSequence, Job] = {}
        self._num_failures = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # -- the asyncio side

    def start(self) -> None:
        """Start the thread; to be called in the event loop that will serve."""
        self._loop = asyncio.get_running_loop()
        self._set_pace()
        self._thread = threading.Thread(target=self._run, name="windtunnel-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its present step."""
        self._is_stopping = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def end_jobs(self, message: str) -> None:
        """Tell all who wait that nothing more will come, and take nothing in any more."""
        self._fail_all(message, 503)

    @property
    def num_jobs(self) -> int:
        """Jobs that are not over."""
        return len(self._jobs)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs of one request, all of them or none.

        Raises QueueFull if a limit is reached, EngineDead if nothing can be served.
        """
        self._check_alive()
        self._check_limits(len(jobs))
        now_ns = self.clock.now_ns()
        for job in jobs:
            job.arrival_ns = now_ns
            job.number = self._num_submitted
            self._num_submitted += 1
            self._jobs[job] = None
            self._num_prefill_tokens += len(job.prompt_token_ids)
        self._send(*jobs)

    def abort(self, job: Job, finish_reason: str = "abort") -> None:
        """Drop a job that is not over; its blocks are free before the next step is decided."""
        if self._forget(job):
            self.metrics.request_success.inc(1, finish_reason)
            self._send(_Abort(job, finish_reason))

    async def swap(self, executor: Executor) -> int:
        """Let another executor run the steps from the next one on; returns the tokens that it had to compute anew.

        Raises ValueError if it cannot, EngineDead if nothing can be served.
        """
        done: asyncio.Future[int] = self._future()
        self._send(_Swap(executor, done))
        return await done

    async def look(self, look: Callable[[Engine, int], T]) -> T:
        """What ``look(engine, now_ns)`` returns, called by the engine's thread between two steps.

        The engine waits for it.  Raises what it raises, and EngineDead if nothing can be served.
        """
        done: asyncio.Future[T] = self._future()
        self._send(_Look(look, done))
        return await done

    def _future(self) -> asyncio.Future[Any]:
        """One that is told if the engine gives up."""
        self._check_alive()
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._awaited.add(done)
        done.add_done_callback(self._awaited.discard)
        return done

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineDead(self.failure)

    def _check_limits(self, num_jobs: int) -> None:
        if self._max_num_reqs is not None and len(self._jobs) + num_jobs > self._max_num_reqs:
            self.metrics.rejections.inc(1, "max_num_queued_reqs")
            raise QueueFull(
                f"{len(self._jobs)} requests are in the server and max_num_queued_reqs is {self._max_num_reqs}: try "
                "again later",
                "max_num_queued_reqs",
            )
        if self._max_num_tokens is not None and self._num_prefill_tokens >= self._max_num_tokens:
            self.metrics.rejections.inc(1, "max_num_queued_tokens")
            raise QueueFull(
                f"{self._num_prefill_tokens} prompt tokens wait for a first token and max_num_queued_tokens is "
                f"{self._max_num_tokens}: try again later",
                "max_num_queued_tokens",
            )

    def _send(self, *commands: _Command) -> None:
        self._inbox.extend(commands)
        self._wake.set()

    def _forget(self, job: Job) -> bool:
        if job not in self._jobs:
            return False
        del self._jobs[job]
        if not job.num_tokens:
            self._num_prefill_tokens -= len(job.prompt_token_ids)
        return True

    def _deliver(self, deltas: list[tuple[Job, Delta]], given_out_ns: int = 0) -> None:
        """Hand over what a step yielded, and book what of it is answered."""
        answered = []
        for job, delta in deltas:
            if job not in self._jobs:
                continue  # cancelled meanwhile, or ended by a stop string
            taken = self._hand_over(job, delta)
            if taken is None:
                continue
            if taken.num_tokens and not job.num_tokens:
                self._num_prefill_tokens -= len(job.prompt_token_ids)
            job.num_tokens += taken.num_tokens
            if taken.finish_reason is not None:
                self._forget(job)
                if delta.finish_reason is None:  # a stop string, which the engine does not know of
                    self._send(_Abort(job, taken.finish_reason))
            answered.append(Answered(job, taken.num_tokens, taken.finish_reason, delta.num_cached_tokens))
        if given_out_ns:
            self.metrics.take_answers(answered, given_out_ns)

    def _hand_over(self, job: Job, delta: Delta) -> Taken | None:
        """What the job takes; None if it failed, which is not to hit others."""
        if delta.error is None:
            try:
                return job.take(delta)
            except Exception as error:
                log.exception("an answer could not be put into text")
                self.abort(job, "error")
                job.take(Delta((), "error", error=f"the answer could not be put into text: {error}"))
                return None
        self._forget(job)
        if delta.error_status == 500:
            self.metrics.request_success.inc(1, "error")
        job.take(delta)
        return None

    def _fail_all(self, message: str, status: int = 500) -> None:
        """From here on nothing is taken in; who waits is told."""
        self.failure = message
        self._deliver([(job, Delta((), "error", error=message, error_status=status)) for job in list(self._jobs)])
        for done in list(self._awaited):
            _set_exception(done, EngineDead(message))
        self._inbox.clear()

    # -- the engine's thread

    def _run(self) -> None:
        try:
            begin_ns = self.clock.now_ns()
            while not self._is_stopping:
                self._wake.clear()
                self._take_commands(begin_ns)
                begin_ns = self._step(begin_ns)
        except Exception as error:
            log.exception("the engine gave up")
            self._give_up(f"the engine gave up: {str(error) or type(error).__name__}")

    def _take_commands(self, begin_ns: int) -> None:
        """Take what has come by ``begin_ns``; a request that came later waits for the next step, as it would have."""
        inbox = self._inbox
        while inbox:
            command = inbox[0]
            if isinstance(command, Job):
                if command.arrival_ns > begin_ns:
                    if command.arrival_ns <= self.clock.now_ns():
                        return
                    command.arrival_ns = begin_ns  # it came before the clock was put back
                self._add(command)
            elif isinstance(command, _Abort):
                self._abort(command)
            elif isinstance(command, _Look):
                self._look(command, begin_ns)
            else:
                self._swap(command)
            inbox.popleft()

    def _add(self, job: Job) -> None:
        try:
            sequence = self.engine.add(
                job.number,
                job.prompt_token_ids,
                job.params,
                job.arrival_ns,
                priority=job.priority,
                cache_salt=job.cache_salt,
                ends_after=job.ends_after,
            )
        except ValueError as error:
            self._post([(job, Delta((), error=str(error), error_status=400))])
            return
        job.request = sequence.request
        self.history.add(sequence)
        self._sequences[job] = sequence
        self._job_of[sequence] = job

    def _abort(self, command: _Abort) -> None:
        sequence = self._sequences.pop(command.job, None)
        if sequence is None:
            return
        del self._job_of[sequence]
        self.engine.abort(sequence, command.finish_reason)
        self._end(sequence)

    def _swap(self, command: _Swap) -> None:
        try:
            num_tokens = self.engine.swap(command.executor)
        except Exception as error:
            log.warning("the executor could not be swapped in: %s", error)
            self._call(_set_exception, command.done, ValueError(f"the executor could not be swapped in: {error}"))
            return
        self._set_pace()
        self._call(_set_result, command.done, num_tokens)

    def _look(self, command: _Look, now_ns: int) -> None:
        try:
            found = command.look(self.engine, now_ns)
        except Exception as error:
            self._call(_set_exception, command.done, error)
            return
        self._call(_set_result, command.done, found)

    def _set_pace(self) -> None:
        is_real = isinstance(self.engine.executor, RealExecutor)
        self.clock.set_speed(1.0 if is_real else self.speed)

    def _step(self, begin_ns: int) -> int:
        """One step, or a rest if there is nothing to do; returns when the next may begin."""
        try:
            outcome = self.engine.step(begin_ns)
        except StepFailed as failure:
            self._take_failure(failure)
            return max(begin_ns, self.clock.now_ns())
        if outcome is None:
            self.metrics.take_load(self.engine)
            if not self._inbox:
                self._wake.wait()
            return max(begin_ns, self.clock.now_ns())
        self._num_failures = 0
        end_ns = self._wait_for_end(outcome)
        self.metrics.take_step(self.engine, outcome)
        self.history.take_step(self.engine, outcome, end_ns)
        self._post(self._deltas(outcome), end_ns)
        return end_ns

    def _wait_for_end(self, outcome: StepOutcome) -> int:
        """Let the step last as long as it does; returns its end."""
        if isinstance(self.engine.executor, RealExecutor):
            return max(outcome.begin_ns + 1, self.clock.now_ns())
        end_ns = outcome.end_ns
        while (left_s := self.clock.sleep_towards(end_ns)) > 0 and not self._is_stopping:
            pass
        step_s = (end_ns - outcome.begin_ns) / self.clock.speed / 1e9
        if left_s < -min(_LATEST_S, _LATEST_STEPS * step_s):
            self.clock.slip_to(end_ns)
        return end_ns

    def _deltas(self, outcome: StepOutcome) -> list[tuple[Job, Delta]]:
        deltas = []
        for sequence, token_ids in outcome.outputs:
            job = self._job_of[sequence]
            reason = sequence.finish_reason
            deltas.append((job, Delta(token_ids, reason, sequence.stop_reason, sequence.request.num_cached_tokens)))
            if reason is not None:
                del self._job_of[sequence], self._sequences[job]
                self._end(sequence)
        return deltas

    def _end(self, sequence: EngineSequence) -> None:
        self.history.end(sequence, self.engine.scheduler.config.block_size)

    def _take_failure(self, failure: StepFailed) -> None:
        log.error("%s", failure, exc_info=failure.__cause__)
        self._num_failures += 1
        deltas = []
        for sequence in failure.sequences:
            job = self._job_of.pop(sequence)
            del self._sequences[job]
            self._end(sequence)
            deltas.append((job, Delta((), "error", error=str(failure))))
        self._post(deltas)
        self.metrics.take_load(self.engine)
        if self._num_failures >= _MAX_FAILURES:
            raise RuntimeError(f"{self._num_failures} steps failed one after the other, the last one: {failure}")
        self.engine.swap(self.engine.executor)  # what the failed step left in its cache cannot be trusted

    def _give_up(self, message: str) -> None:
        for sequence in list(self._job_of):
            self.engine.abort(sequence, "error")
        self._sequences.clear()
        self._job_of.clear()
        self.metrics.take_load(self.engine)
        self._call(self._fail_all, message)

    def _post(self, deltas: list[tuple[Job, Delta]], given_out_ns: int = 0) -> None:
        if deltas:
            self._call(self._deliver, deltas, given_out_ns)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Run a function in the event loop's thread; if that is gone, nobody waits for it any more."""
        assert self._loop is not None, "start() sets it"
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("the event loop is closed")


def _set_result(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
