"""A simulation whose steps are really computed: workload, scheduler and records as ever, durations measured.

What it predicts and what it measures is then the same thing, told by the same code; only the step times differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from windtunnel.executor.engine import Engine, Sequence
from windtunnel.executor.filler import Filler
from windtunnel.executor.sampling import SamplingParams
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.per_request import make_scheduler
from windtunnel.sim.engine.plan import StepPlan, StepResult
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.engine.request import Request
from windtunnel.sim.engine.scheduler import Scheduler
from windtunnel.sim.records import Records
from windtunnel.sim.replay import RecordedStep
from windtunnel.sim.rng import stream
from windtunnel.sim.simulate import run
from windtunnel.sim.workload import Workload

if TYPE_CHECKING:
    from windtunnel.executor.model_executor import ModelExecutor

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class LiveRun(NamedTuple):
    """What a run with real steps leaves behind."""

    records: Records
    steps: list[RecordedStep]
    """Every step in order; ``sim.replay.ReplayExecutor`` takes them."""
    predicted_s: list[float]
    """What the shadow said each of them would take; empty without one."""
    token_ids: list[list[int]]
    """Prompt and answer of each request of the workload; empty for one that was never admitted."""


def run_live(
    workload: Workload,
    config: SchedulerConfig,
    executor: ModelExecutor,
    *,
    seed: int = 0,
    shadow: CostModel | None = None,
    horizon_ns: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LiveRun:
    """Serve the workload on one engine with continuous batching, each step computed by ``executor``.

    Time is the simulation's: it passes by what the steps took on the executor's clock, and waits cost nothing.  So
    even with a clock of processor time requests come, queue and finish as they would on a machine of that speed.
    ``seed`` makes up the prompts; the other arguments are those of ``RealSteps`` and ``sim.simulate.run``, as are the
    errors.
    """
    scheduler = make_scheduler(config)
    steps = RealSteps(executor, scheduler, workload, seed=seed, shadow=shadow)
    unasked = ConstantCost(1.0)
    records = run(
        workload, config, unasked, horizon_ns=horizon_ns, progress=progress, executor=steps, scheduler=scheduler
    )
    token_ids = [steps.token_ids(row) for row in range(len(workload))]
    return LiveRun(records, steps.steps, steps.predicted_s, token_ids)


class RealSteps:
    """An ``Executor`` that computes the steps of ``sim.simulate.run`` with a model, on tokens of its own making.

    Prompts are drawn from ``seed``, so that two requests begin alike exactly as far as the workload says.  Answers are
    the model's (greedy) and end at the workload's lengths, as with ``ignore_eos``.  Where the workload says what an
    answer holds, because a later prompt contains it, that is taken instead of the model's token: what is computed is
    the same.  Prefix hits that the executor never computed are made good before the step, outside of its time.

    ``shadow`` prices each step as well, outside of its time, into ``predicted_s``.

    It serves one run, with the scheduler that ``run`` is given too.  Raises ValueError for a scheduler that decides
    steps ahead or speculates, and for one that the executor was not built for (``ModelExecutor.check_config``).
    """

    def __init__(
        self,
        executor: ModelExecutor,
        scheduler: Scheduler,
        workload: Workload,
        *,
        seed: int = 0,
        shadow: CostModel | None = None,
    ) -> None:
        executor.check_config(scheduler.config)
        self.steps: list[RecordedStep] = []
        """Those so far."""
        self.predicted_s: list[float] = []
        """What the shadow said of each of them."""
        self._shadow = shadow
        self._engine = Engine(scheduler, executor, Filler([0]))
        self._tokens = _Tokens(workload, executor.model.config.vocab_size, seed)
        self._of_row: dict[int, Sequence] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the step and book its tokens.

        Raises ValueError for a request that is not one of the workload's, and as the executor does.
        """
        for admission in plan.admissions:
            if admission.request not in self._engine.sequences:
                self._begin(admission.request)
        result = self._engine.executor.execute(plan)
        for request, token in result.sampled or ():
            self._book(request, token)
        self.steps.append(RecordedStep(plan.shape, result.step_ns))
        if self._shadow is not None:
            self.predicted_s.append(float(self._shadow.step_time_s(plan.shape)))
        return result

    def token_ids(self, row: int) -> list[int]:
        """Prompt and answer so far of request ``row`` of the workload; empty until it is admitted."""
        sequence = self._of_row.get(row)
        return [] if sequence is None else sequence.token_ids

    def _begin(self, request: Request) -> None:
        row = int(request.request_id)
        sequence = Sequence(request, self._tokens.prompt(row, request.num_prompt_tokens), _GREEDY)
        self._engine.sequences[request] = self._of_row[row] = sequence

    def _book(self, request: Request, token: int) -> None:
        sequence = self._engine.sequences[request]
        row, place = int(request.request_id), len(sequence.token_ids)
        sequence.token_ids.append(self._tokens.given(row, place, otherwise=token))
        if sequence.num_output_tokens == request.stop_after:
            del self._engine.sequences[request]


class _Tokens:
    """The tokens that a workload implies: each is a function of the seed, its stream and its position."""

    def __init__(self, workload: Workload, vocab_size: int, seed: int) -> None:
        self._workload = workload
        self._vocab_size = vocab_size
        self._seed = seed
        self._shared: dict[int, list[int]] = {}
        self._ends: dict[int, int] = {}
        for segments in workload.content or ():
            for number, end in segments:
                self._ends[number] = max(end, self._ends.get(number, 0))

    def prompt(self, row: int, num_tokens: int) -> list[int]:
        """The prompt of a request.  Raises ValueError if it is not the workload's."""
        known = self._workload.num_prompt_tokens
        if not 0 <= row < len(known) or num_tokens != known[row]:
            raise ValueError(
                f"request {row} with {num_tokens} prompt tokens is not in the workload that the tokens are made for: "
                "give the run and its executor the same one"
            )
        tokens: list[int] = []
        for number, end in self._segments(row):
            tokens += self._stream(number)[len(tokens) : min(end, num_tokens)]
        own = self._draw(("request", row), num_tokens)
        return tokens + own[len(tokens) :]

    def given(self, row: int, place: int, *, otherwise: int) -> int:
        """The token there if the workload says what it is."""
        for number, end in self._segments(row):
            if place < end:
                return self._stream(number)[place]
        return otherwise

    def _segments(self, row: int) -> tuple[tuple[int, int], ...]:
        content = self._workload.content
        return () if content is None else content[row]

    def _stream(self, number: int) -> list[int]:
        if number not in self._shared:
            self._shared[number] = self._draw(("stream", number), self._ends[number])
        return self._shared[number]

    def _draw(self, name: tuple[str, int], num_tokens: int) -> list[int]:
        drawn: list[int] = stream(self._seed, "tokens", *name).integers(self._vocab_size, size=num_tokens).tolist()
        return drawn
