"""The three things that can be swapped: what decides a step, what prices it and what runs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import Speculated, StepPlan, StepResult, StepShape
from windtunnel.sim.engine.request import Request


class EngineLoad(NamedTuple):
    """How full an engine is."""

    num_running: int
    num_waiting: int
    """All that are in the engine and do not run, swapped out ones included."""
    num_free_blocks: int
    num_free_cached_blocks: int
    """Those of the free blocks that still hold a findable prefix."""


class SchedulerProtocol(Protocol):
    """Decides the steps of one engine and keeps its KV blocks, whatever its policy.

    The caller's loop is ``plan = schedule(now_ns)``, run the plan, ``commit(plan, end_ns)``; ``add`` and ``abort``
    may come at any time.  Time is whole nanoseconds and comes from the caller.
    """

    @property
    def config(self) -> SchedulerConfig:
        """The pool and the limits that it obeys."""

    @property
    def max_steps_under_way(self) -> int:
        """Steps that may be decided and not committed at once."""

    @property
    def num_requests(self) -> int:
        """Requests that are in the engine."""

    def requests(self) -> Iterator[Request]:
        """Those requests: the running in the order of admission, then the others."""

    def load(self) -> EngineLoad:
        """How full the engine is."""

    def add(self, request: Request) -> None:
        """Queue a request; raises ValueError for one that the engine refuses."""

    def end_of_input(self) -> None:
        """No more requests will be added: whoever waits for company need not wait any longer."""

    def abort(self, request: Request) -> None:
        """Drop a request in whatever state it is."""

    def schedule(self, now_ns: int) -> StepPlan:
        """Decide the next step.  An empty plan means that nothing can be computed now.

        An empty plan that preempted nobody is final until something is added or aborted, or the time
        ``next_decision_ns`` comes.
        """

    def next_decision_ns(self, now_ns: int) -> int | None:
        """After an empty plan: when, later than ``now_ns``, to ask again although nothing happens; None for never."""

    def commit(self, plan: StepPlan, end_ns: int, speculated: Speculated | None = None) -> list[Request]:
        """Take the end of the oldest step under way; returns the requests whose answer is complete."""

    def may_finish(self, plan: StepPlan) -> bool:
        """Whether the plan's step may complete an answer."""

    def num_emitted_tokens(self, request: Request) -> int:
        """Output tokens that the request has got."""

    def token_spans(self, request: Request) -> list[tuple[int, int]]:
        """(first step, count) runs of steps at whose end the request got tokens."""


class CostModel(Protocol):
    """Seconds for a step of a given shape.

    ``name`` says which model it is and ``calibrated`` whether it was fitted to measurements; every output that
    shows its results shows both.
    """

    name: str
    calibrated: bool

    def step_time_s(self, shape: StepShape) -> Any:
        """Seconds for one step (a float), or for each of many when the shape holds arrays (a float64 array).

        Monotone: more tokens, sequences or context never cost less.  Scalars and arrays give the same values.
        """

    def describe(self) -> dict[str, Any]:
        """Parameters, units, sources and stated error, as plain data for reports and ``profile.json``."""


class Executor(Protocol):
    """Runs a step, for real or not, and says how long it took."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan once."""
