"""An engine: scheduler, executor and the tokens of the requests, brought together one step at a time."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from windtunnel.executor.batch import EngineView, Grant
from windtunnel.executor.filler import Continuation, Filler
from windtunnel.executor.keys import DigestKeys
from windtunnel.executor.sampling import SamplingParams
from windtunnel.sim.engine.plan import Preemption, StepPlan, StepResult
from windtunnel.sim.engine.protocols import EngineLoad, Executor
from windtunnel.sim.engine.request import Request
from windtunnel.sim.engine.scheduler import Scheduler


@runtime_checkable
class RealExecutor(Protocol):
    """An executor that computes a model, on KV blocks of its own."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan once and sample."""

    def adopt(self, view: EngineView) -> int:
        """Work for this engine from now on; returns the tokens that had to be computed anew."""


class StepFailed(RuntimeError):
    """The executor raised; the requests of the step were dropped and their blocks are free."""

    def __init__(self, message: str, sequences: list[Sequence]) -> None:
        super().__init__(message)
        self.sequences = sequences
        """Whom it hit."""


class Sequence:
    """A request and its tokens."""

    __slots__ = (
        "continuation",
        "ends_after",
        "finish_reason",
        "params",
        "request",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, request: Request, token_ids: list[int], params: SamplingParams) -> None:
        self.request = request
        self.token_ids = token_ids
        """All known tokens: prompt and output."""
        self.params = params
        self.continuation: Continuation | None = None
        self.ends_after: int | None = None
        """Output tokens after which a made-up answer ends, as if the model had ended it."""
        self.finish_reason: str | None = None
        """``stop`` or ``length`` once the answer is complete, ``abort`` or ``error`` if it never will be."""
        self.stop_reason: int | None = None
        """The token of ``stop_token_ids`` that ended it."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The answer so far."""
        return self.token_ids[self.request.num_prompt_tokens :]

    def __repr__(self) -> str:
        return f"Sequence({self.request!r}, {self.num_output_tokens} output tokens)"


class Output(NamedTuple):
    """What a sequence got from a step."""

    sequence: Sequence
    token_ids: list[int]


class StepOutcome(NamedTuple):
    """What one step did."""

    plan: StepPlan
    begin_ns: int
    end_ns: int
    """By the executor's word: the begin and the time that the step took."""
    outputs: list[Output]
    finished: list[Sequence]
    preemptions: list[Preemption]
    """Those of the plan, and of empty decisions before it."""
    load: EngineLoad
    """While the step ran: as it was decided, before who finished left."""


class Engine:
    """Runs requests with real tokens, whoever computes them; it implements ``EngineView``.

    It has no clock and no threads: ``step(now_ns)`` decides, executes and books one step.  Between two steps the
    executor may be exchanged (``swap``): all state of the run is the scheduler's and the token lists'.  Where the
    executor only simulates, ``filler`` makes the tokens up.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        filler: Filler,
        eos_token_ids: abc.Iterable[int] = (),
    ) -> None:
        """``eos_token_ids`` are the model's own; they end an answer unless it ignores them.

        Raises ValueError for a scheduler that decides steps ahead: tokens would not be known in time.
        """
        if scheduler.max_steps_under_way != 1:
            raise ValueError(
                f"the scheduler decides up to {scheduler.max_steps_under_way} steps at once, but an engine with real "
                "tokens needs them one by one: turn asynchronous scheduling off and use one pipeline stage"
            )
        self.scheduler = scheduler
        self.sequences: dict[Request, Sequence] = {}
        """Those that wait or run."""
        self._filler = filler
        eos = tuple(eos_token_ids)
        self._eos_token_ids = frozenset(eos)
        self._eos_token_id = eos[0] if eos else None
        self._caching = scheduler.config.enable_prefix_caching
        self.executor = executor
        self.swap(executor)

    def swap(self, executor: Executor) -> int:
        """Let this executor run the next steps; returns the tokens whose keys and values had to be computed anew.

        Raises ValueError for one that cannot do what the scheduler asks for; the present one then stays.
        """
        num_tokens = 0
        if isinstance(executor, RealExecutor):
            if self.scheduler.config.num_speculative_tokens:
                raise ValueError("executors that compute a model verify no drafts: leave speculative decoding out")
            num_tokens = executor.adopt(self)
        self.executor = executor
        return num_tokens

    def add(
        self,
        request_id: int | str,
        prompt_token_ids: abc.Sequence[int],
        params: SamplingParams,
        arrival_ns: int,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        ends_after: int | None = None,
    ) -> Sequence:
        """Queue a request.

        ``ends_after`` is the number of output tokens after which the answer ends if it is made up then (a model ends
        its answers itself), later if ``min_tokens`` says so and never with ``ignore_eos``.

        Raises ValueError for an empty prompt, one without room for an answer, or one that the KV cache cannot hold.
        """
        if not prompt_token_ids:
            raise ValueError(f"request {request_id}: the prompt is empty; it needs at least one token")
        token_ids = list(prompt_token_ids)
        keys = DigestKeys(token_ids, self.scheduler.config.block_size, cache_salt) if self._caching else None
        request = Request(request_id, arrival_ns, len(token_ids), params.max_tokens, priority=priority, keys=keys)
        self._check_fits(request)
        self.scheduler.add(request)
        sequence = Sequence(request, token_ids, params)
        if ends_after is not None and not params.ignore_eos:
            sequence.ends_after = max(1, ends_after, params.min_tokens)
        self.sequences[request] = sequence
        return sequence

    def abort(self, sequence: Sequence, finish_reason: str = "abort") -> bool:
        """Drop a sequence, whose blocks are free at once; False if it had been over already."""
        if self.sequences.pop(sequence.request, None) is None:
            return False
        self.scheduler.abort(sequence.request)
        sequence.finish_reason = finish_reason
        return True

    def step(self, now_ns: int) -> StepOutcome | None:
        """Decide a step, execute it and book it; None if nothing can be computed now.

        Raises StepFailed if the executor does not deliver; the engine can go on without the requests of that step.
        """
        plan, preemptions = self._decide(now_ns)
        if plan.is_empty:
            return None
        load = self.scheduler.load()
        try:
            result = self.executor.execute(plan)
            tokens = self._new_tokens(plan, result)
        except Exception as error:
            sequences = self._drop(plan, now_ns)
            raise StepFailed(f"step {plan.number} failed: {str(error) or type(error).__name__}", sequences) from error
        is_made_up = result.sampled is None
        outputs = [Output(sequence, self._append(sequence, new, is_made_up)) for sequence, new in tokens]
        end_ns = now_ns + result.step_ns
        finished = [self._finish(request) for request in self.scheduler.commit(plan, end_ns, result.speculated)]
        return StepOutcome(plan, now_ns, end_ns, outputs, finished, preemptions, load)

    # -- EngineView: what a real executor may see

    def grants(self, plan: StepPlan) -> list[Grant]:
        """Who computes what in a step that has been decided and not committed, decodes (one token) first."""
        grants = self._granted(plan)
        grants.sort(key=lambda grant: grant.num_tokens > 1)
        return grants

    def token_ids(self, request: Request) -> abc.Sequence[int]:
        """All known tokens of a request: prompt and output."""
        return self.sequences[request].token_ids

    def sampling_params(self, request: Request) -> SamplingParams:
        """How its tokens are chosen."""
        return self.sequences[request].params

    def running(self) -> list[tuple[Request, int]]:
        """Running requests and how many tokens of each are in its blocks."""
        return [(request, self.scheduler.num_computed_tokens(request)) for request in self.scheduler.running]

    # -- a step

    def _check_fits(self, request: Request) -> None:
        config = self.scheduler.config
        longest = min(request.num_prompt_tokens + request.max_tokens, config.max_model_len) - 1  # cached: all but one
        if longest > config.num_kv_tokens:
            raise ValueError(
                f"request {request.request_id} may grow to {longest} tokens, but the KV cache holds "
                f"{config.num_kv_tokens}: shorten it or raise num_gpu_blocks"
            )

    def _decide(self, now_ns: int) -> tuple[StepPlan, list[Preemption]]:
        """The next plan; one that only preempts is followed by another."""
        preemptions: list[Preemption] = []
        while True:
            plan = self.scheduler.schedule(now_ns)
            preemptions += plan.preemptions
            if not plan.is_empty or not plan.preemptions:
                return plan, preemptions

    def _granted(self, plan: StepPlan) -> list[Grant]:
        """The grants in the order of the decision."""
        chunks = {chunk.request: chunk for chunk in plan.chunks}
        grants = []
        for request, num_tokens in self.scheduler.scheduled_tokens(plan).items():
            chunk = chunks.get(request)
            if chunk is None:
                grants.append(Grant(request, 1, self.scheduler.num_computed_tokens(request) - 1, True))
            else:
                grants.append(Grant(request, num_tokens, chunk.num_computed_tokens, chunk.samples))
        return grants

    def _new_tokens(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, list[int]]]:
        """What the step yields for whom, in the order of the decision.

        Raises ValueError if the executor sampled for others than the plan says.
        """
        sampling = [grant.request for grant in self._granted(plan) if grant.samples]
        if result.sampled is None:
            accepted: Mapping[Request, int] = result.speculated.num_accepted if result.speculated else {}
            return [self._filled(request, 1 + accepted.get(request, 0)) for request in sampling]
        sampled = dict(result.sampled)
        if len(sampled) != len(sampling) or not all(request in sampled for request in sampling):
            raise ValueError(
                f"the executor sampled tokens for {list(sampled)}, but the step yields one each for {sampling}"
            )
        return [(self.sequences[request], [sampled[request]]) for request in sampling]

    def _filled(self, request: Request, num_tokens: int) -> tuple[Sequence, list[int]]:
        sequence = self.sequences[request]
        if sequence.continuation is None:
            sequence.continuation = self._filler.begin()
        known = sequence.token_ids
        new = [sequence.continuation.next_token(known)]
        for _ in range(num_tokens - 1):
            new.append(sequence.continuation.next_token([*known, *new]))
        if sequence.ends_after is not None and self._eos_token_id is not None:
            last = max(0, sequence.ends_after - sequence.num_output_tokens - 1)
            if last < num_tokens:
                new[last] = self._eos_token_id
        return sequence, new

    def _append(self, sequence: Sequence, token_ids: list[int], is_made_up: bool) -> list[int]:
        """Book new tokens up to the one that ends the answer; returns those that were taken."""
        room = sequence.request.stop_after - sequence.num_output_tokens
        for count, token in enumerate(token_ids[:room], 1):
            sequence.token_ids.append(token)
            if self._ends(sequence, token) or (is_made_up and _is_long_enough(sequence)):
                sequence.finish_reason = "stop"
                self.scheduler.end_after(sequence.request, sequence.num_output_tokens)
                return token_ids[:count]
        return token_ids[:room]

    def _ends(self, sequence: Sequence, token: int) -> bool:
        params = sequence.params
        if sequence.num_output_tokens < params.min_tokens:
            return False
        if token in self._eos_token_ids and not params.ignore_eos:
            return True
        if token in params.stop_token_ids:
            sequence.stop_reason = token
            return True
        return False

    def _finish(self, request: Request) -> Sequence:
        sequence = self.sequences.pop(request)
        sequence.finish_reason = sequence.finish_reason or "length"
        return sequence

    def _drop(self, plan: StepPlan, now_ns: int) -> list[Sequence]:
        """Abort all that a failed step was to serve, and take the step as over."""
        dropped = [self.sequences[grant.request] for grant in self._granted(plan)]
        for sequence in dropped:
            self.abort(sequence, "error")
        self.scheduler.commit(plan, now_ns)
        return dropped


def _is_long_enough(sequence: Sequence) -> bool:
    """Whether a made-up answer has come to its end."""
    return sequence.ends_after is not None and sequence.num_output_tokens >= sequence.ends_after
