"""What the engine did lately: requests that came, requests that ended, steps; bounded, and cheap to keep."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from windtunnel.executor.engine import Engine, RealExecutor, Sequence, StepOutcome
from windtunnel.sim.engine.request import Request
from windtunnel.sim.engine.snapshot import RecentRequest, Snapshot, take_snapshot, with_lengths
from windtunnel.sim.metrics.window import Seen

MOST_RECENT = 256
"""Requests that say what further ones may look like."""
MOST_RECENT_TOKENS = 1_000_000
"""Of their prompts, which are kept as long; fewer requests where prompts are long."""
MOST_ENDED = 20_000
MOST_STEPS = 50_000


class _Ended(NamedTuple):
    arrival_ns: int
    first_token_ns: int
    finish_ns: int
    num_output_tokens: int


class _Step(NamedTuple):
    begin_ns: int
    end_ns: int
    num_running: int
    num_waiting: int
    kv_usage: float
    num_tokens: int
    num_preempted: int


class History:
    """Belongs to the thread that drives the engine."""

    def __init__(self) -> None:
        self._recent: dict[int, Sequence | RecentRequest] = {}  # by arrival; a sequence while it is under way
        self._place: dict[Request, int] = {}  # of those that are
        self._num_added = 0
        self._num_recent_tokens = 0
        self._first_ns: dict[Request, int] = {}
        self._ended: deque[_Ended] = deque(maxlen=MOST_ENDED)
        self._steps: deque[_Step] = deque(maxlen=MOST_STEPS)

    def add(self, sequence: Sequence) -> None:
        """A request that came."""
        recent = self._recent
        recent[self._num_added] = sequence
        self._place[sequence.request] = self._num_added
        self._num_added += 1
        self._num_recent_tokens += sequence.request.num_prompt_tokens
        while len(recent) > MOST_RECENT or (self._num_recent_tokens > MOST_RECENT_TOKENS and len(recent) > 2):
            oldest = recent.pop(next(iter(recent)))
            if isinstance(oldest, Sequence):
                del self._place[oldest.request]
                oldest = _recent(oldest, 0)
            self._num_recent_tokens -= oldest.num_prompt_tokens

    def end(self, sequence: Sequence, block_size: int) -> None:
        """A request that is over, one way or the other; neither it nor its tokens are kept."""
        place = self._place.pop(sequence.request, None)
        if place is not None:
            self._recent[place] = _recent(sequence, block_size)
        self._first_ns.pop(sequence.request, None)

    def take_step(self, engine: Engine, outcome: StepOutcome, end_ns: int) -> None:
        """A step that ended then; its levels are those while it ran, before who finished left."""
        plan = outcome.plan
        for chunk in plan.chunks:
            if chunk.samples:
                self._first_ns.setdefault(chunk.request, end_ns)
        for sequence in outcome.finished:
            request = sequence.request
            first_ns = self._first_ns.get(request, end_ns)
            self._ended.append(_Ended(request.arrival_ns, first_ns, end_ns, sequence.num_output_tokens))
        load, usable = outcome.load, engine.scheduler.config.num_usable_blocks
        num_tokens = sum(len(output.token_ids) for output in outcome.outputs)
        self._steps.append(
            _Step(
                outcome.begin_ns,
                end_ns,
                load.num_running,
                load.num_waiting,
                1.0 - load.num_free_blocks / usable,
                num_tokens,
                len(outcome.preemptions),
            )
        )

    def begin_ns(self) -> int:
        """From when on all steps are known."""
        return self._steps[0].begin_ns if len(self._steps) == MOST_STEPS else 0

    def seen(self, engine: Engine) -> Seen:
        """What is kept, with the requests that are under way."""
        live = [
            _Ended(request.arrival_ns, self._first_ns.get(request, -1), -1, sequence.num_output_tokens)
            for request, sequence in engine.sequences.items()
        ]
        requests = np.array([*self._ended, *live], np.int64).reshape(-1, 4)
        arrival, first, finish, num_tokens = requests.T
        steps = list(self._steps)
        return Seen(
            arrival,
            first,
            finish,
            num_tokens,
            np.array([step.begin_ns for step in steps], np.int64),
            np.array([step.end_ns for step in steps], np.int64),
            np.array([step.num_running for step in steps], np.int64),
            np.array([step.num_waiting for step in steps], np.int64),
            np.array([step.kv_usage for step in steps], np.float64),
            np.array([step.num_tokens for step in steps], np.int64),
            np.array([step.num_preempted for step in steps], np.int64),
        )

    def recent(self, engine: Engine) -> list[RecentRequest]:
        """Requests that came lately, oldest first."""
        size = engine.scheduler.config.block_size
        return [_recent(each, size) if isinstance(each, Sequence) else each for each in self._recent.values()]


def engine_snapshot(engine: Engine, now_ns: int, history: History | None = None) -> Snapshot:
    """The state of an engine between two steps; what its history says of recent requests is part of it.

    Lengths are known of answers that end by a limit: made-up ones, and those that ignore the end of sequence.
    """
    recent = [] if history is None else history.recent(engine)
    snapshot = take_snapshot(engine.scheduler, now_ns, recent=recent, are_lengths_known=False)
    made_up = not isinstance(engine.executor, RealExecutor)
    lengths = {
        request.request_id: length
        for request, sequence in engine.sequences.items()
        if (length := _known_length(sequence, made_up)) is not None
    }
    return with_lengths(snapshot, lengths)


def _known_length(sequence: Sequence, made_up: bool) -> int | None:
    most, params = sequence.request.may_emit, sequence.params
    if made_up and sequence.ends_after is not None:
        return max(min(sequence.ends_after, most), sequence.num_output_tokens + 1)
    return most if params.ignore_eos and not params.stop_token_ids else None


def _recent(sequence: Sequence, block_size: int) -> RecentRequest:
    request = sequence.request
    is_complete = sequence.finish_reason in ("stop", "length")
    keys = request.keys if block_size and request.scheduled_ns >= 0 else None  # who waits has not looked for any yet
    return RecentRequest(
        request.arrival_ns,
        request.num_prompt_tokens,
        request.max_tokens,
        sequence.num_output_tokens if is_complete else None,
        request.priority,
        () if keys is None else tuple(keys.between(0, request.num_prompt_tokens // block_size)),
    )
