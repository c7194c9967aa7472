"""Where two engines first decide differently: their decisions side by side, step by step, and the likely reason.

A decision says who computes how many tokens, who was let in, who was preempted and how many KV blocks are held then.
Decisions come from our scheduler, from vLLM's own, or from a recording (``calibrate.diff_sources``); each source says
what it knows, and only what both know is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepShape

MOST_WAITING_KEPT = 32
"""Waiting requests that a queue lists: nobody behind them is let in by the next decision in practice."""
LOOK_AHEAD = 8
"""Decisions behind a difference that are looked at for its reason."""


class Progress(NamedTuple):
    """A running request before a decision."""

    request: int
    """Its row in the workload, as everywhere here."""
    num_computed_tokens: int
    """Tokens whose KV is there, or is being computed by a step under way."""
    num_blocks: int | None
    """KV blocks that it holds; None if unknown, as everywhere here."""


class QueueState(NamedTuple):
    """The engine right before a decision."""

    running: tuple[Progress, ...]
    """In the order in which they are served."""
    waiting: tuple[int, ...]
    """The first ``MOST_WAITING_KEPT`` of those that wait, the next one first."""
    num_waiting: int
    num_free_blocks: int | None


class Batch(NamedTuple):
    """What a step computes, in four numbers; see ``StepShape``."""

    num_decode_seqs: int
    decode_context_tokens: int
    num_prefill_seqs: int
    prefill_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return self.num_decode_seqs + self.prefill_tokens

    @classmethod
    def of(cls, shape: StepShape) -> Batch:
        """Those of a shape."""
        return cls(shape.num_decode_seqs, shape.decode_context_tokens, shape.num_prefill_seqs, shape.prefill_tokens)


class Decision(NamedTuple):
    """One step that computes something, as it was decided; None is what the source does not tell."""

    number: int
    """Counts from 0."""
    time_ns: int | None = None
    """When it was decided, from the begin of the run."""
    tokens: tuple[tuple[int, int], ...] | None = None
    """(request, tokens) in the order of the decision."""
    admitted: tuple[tuple[int, int], ...] | None = None
    """(request, tokens found in the prefix cache) of those let in, first come first; resumed ones too."""
    preempted: tuple[int, ...] | None = None
    """Who lost its blocks since the step before, by row; decisions that computed nothing count as part of this one."""
    num_preempted: int | None = None
    batch: Batch | None = None
    shape: StepShape | None = None
    num_running: int | None = None
    """After the decision."""
    num_held_blocks: int | None = None
    """After the decision."""
    before: QueueState | None = None


WORDS = {
    "tokens": "tokens",
    "admitted": "admissions",
    "preempted": "preemptions",
    "num_preempted": "number of preemptions",
    "batch": "decodes and prefills",
    "shape": "shape of the batch",
    "num_running": "running requests",
    "num_held_blocks": "held KV blocks",
}
"""Fields of a decision that are compared, most telling first, and what they are called."""
_IMPLIED = {"tokens": ("batch", "shape"), "preempted": ("num_preempted",), "batch": ("shape",)}


class Divergence(NamedTuple):
    """A step that two sides decided differently."""

    number: int
    """Of the step; as many steps before the first one are equal."""
    fields: tuple[str, ...]
    """What differs, by the names of ``Decision``; empty if one side has no such step."""
    left: Decision | None
    """None if that side has ended."""
    right: Decision | None
    left_next: tuple[Decision, ...] = ()
    """What that side decides next, up to ``LOOK_AHEAD`` steps."""
    right_next: tuple[Decision, ...] = ()


@dataclass(frozen=True, slots=True)
class Compared:
    """Two streams of decisions, compared."""

    num_steps: int
    """Steps that both sides took and that were compared."""
    first: Divergence | None
    """None if all of them are equal and both sides end alike."""
    differing: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """(number, fields) of every step that differs; of the first one only unless all were asked for."""
    is_cut: bool = False
    """Whether the comparison ended at ``max_steps`` and not with the runs."""


def diff(left: Iterable[Decision], right: Iterable[Decision]) -> Divergence | None:
    """The first step that the two sides decide differently; None if there is none.

    Both streams are read in lockstep, no further than needed.
    """
    return compare(left, right).first


def compare(
    left: Iterable[Decision], right: Iterable[Decision], *, max_steps: int | None = None, all_steps: bool = False
) -> Compared:
    """Compare step by step until the first difference, or (``all_steps``) to the end.

    Raises ValueError for ``max_steps`` below 1.
    """
    if max_steps is not None and max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {max_steps}: leave it out to compare all steps")
    streams = _Lockstep(iter(left), iter(right))
    first: Divergence | None = None
    differing: list[tuple[int, tuple[str, ...]]] = []
    number = 0
    while max_steps is None or number < max_steps:
        one, other = streams.next_pair()
        if one is None and other is None:
            return Compared(number, first, tuple(differing))
        fields = () if one is None or other is None else differences(one, other)
        has_ended = one is None or other is None
        if fields or has_ended:
            differing.append((number, fields))
            if first is None:
                first = Divergence(number, fields, one, other, *streams.ahead())
            if has_ended or not all_steps:
                return Compared(number + (not has_ended), first, tuple(differing))
        number += 1
    return Compared(number, first, tuple(differing), is_cut=True)


def differences(left: Decision, right: Decision) -> tuple[str, ...]:
    """Names of the fields that both sides know and that differ, in the order of ``WORDS``.

    What follows from one that differs (the numbers of a batch from its tokens) is left out.
    """
    differ = tuple(
        name
        for name in WORDS
        if (one := getattr(left, name)) is not None and (other := getattr(right, name)) is not None and one != other
    )
    implied = [name for cause, names in _IMPLIED.items() if cause in differ for name in names]
    return tuple(name for name in differ if name not in implied)


class _Lockstep:
    """Two streams, one pair at a time, with a look ahead."""

    def __init__(self, left: Iterator[Decision], right: Iterator[Decision]) -> None:
        self._streams = (left, right)
        self._kept: tuple[list[Decision], list[Decision]] = ([], [])

    def next_pair(self) -> tuple[Decision | None, Decision | None]:
        return self._next(0), self._next(1)

    def _next(self, side: int) -> Decision | None:
        kept = self._kept[side]
        return kept.pop(0) if kept else next(self._streams[side], None)

    def ahead(self) -> tuple[tuple[Decision, ...], tuple[Decision, ...]]:
        for kept, stream in zip(self._kept, self._streams, strict=True):
            kept.extend(islice(stream, LOOK_AHEAD - len(kept)))
        return tuple(self._kept[0]), tuple(self._kept[1])


# ------------------------------------------------------------------ the likely reason


class Side(NamedTuple):
    """What is known of one side besides its decisions."""

    name: str
    config: SchedulerConfig | None = None
    source: str = ""
    """Where it comes from, for headings."""


VERSION_RULES = {
    "free_blocks_to_front": "freed blocks without a full prefix are handed out next from vLLM 0.24 on, last before it",
    "long_prefill_spares_lone_request": "a request that is alone is not cut to long_prefill_token_threshold from "
    "vLLM 0.31 on, and is before it",
}
"""Settings that stand for a rule which changed between releases, and what changed."""
_BUDGET = ("max_num_batched_tokens", "max_num_scheduled_tokens")
_SEATS = ("max_num_seqs", "max_num_active_seqs")
_POOL = ("num_gpu_blocks", "block_size", "watermark")


def settings_that_differ(left: Side, right: Side) -> dict[str, tuple[object, object]]:
    """Settings of the two engines that are not the same; empty where one of them is not known."""
    if left.config is None or right.config is None:
        return {}
    return {
        name: (one, other)
        for name in SchedulerConfig.__dataclass_fields__
        if (one := getattr(left.config, name)) != (other := getattr(right.config, name))
    }


def likely_reasons(found: Divergence, left: Side, right: Side, labels: tuple[str, ...] | None = None) -> list[str]:
    """Why the two sides may differ there, in sentences, the most likely first; never empty.

    Read from the queues before the step, the limits of both sides and what they decide next.  Settings that differ are
    named even if nothing shows that they matter here.
    """
    if found.left is None or found.right is None:
        return [_end_reason(found, left, right)]
    reasons = _Reasons(found, found.left, found.right, left, right, labels)
    said = [*reasons.arrivals(), *reasons.limits(), *reasons.cache(), *reasons.rules(), *reasons.other_settings()]
    return said or [reasons.none_found()]


def _end_reason(found: Divergence, left: Side, right: Side) -> str:
    ended, other = (left, right) if found.left is None else (right, left)
    return (
        f"{ended.name} has no step {found.number}, {other.name} goes on: one side has fewer requests, shorter answers "
        "or an earlier horizon, or was cut off"
    )


@dataclass(frozen=True, slots=True)
class _Reasons:
    found: Divergence
    one: Decision
    other: Decision
    left: Side
    right: Side
    labels: tuple[str, ...] | None

    @property
    def settings(self) -> dict[str, tuple[object, object]]:
        return settings_that_differ(self.left, self.right)

    def name(self, request: int) -> str:
        return self.labels[request] if self.labels is not None else str(request)

    # -- who is there

    def arrivals(self) -> Iterator[str]:
        """Requests that only one side has seen, and those that both have in another order."""
        one, other = self.one.before, self.other.before
        if one is None or other is None:
            return
        seen, seen_there = _present(one), _present(other)
        missing = [request for request in seen if request not in seen_there]
        missing_here = [request for request in seen_there if request not in seen]
        yield from self._one_sided(missing, self.left, self.right, self.found.right_next, self.other)
        yield from self._one_sided(missing_here, self.right, self.left, self.found.left_next, self.one)
        if not missing and not missing_here and one.waiting != other.waiting:
            place = next(
                i for i, pair in enumerate(zip(one.waiting, other.waiting, strict=False)) if pair[0] != pair[1]
            )
            yield (
                f"order of the waiting: place {place + 1} of the queue is request {self.name(one.waiting[place])} for "
                f"{self.left.name} and request {self.name(other.waiting[place])} for {self.right.name}, so they came, "
                "or were put back, in another order"
            )

    def _one_sided(
        self, requests: list[int], has: Side, lacks: Side, later: tuple[Decision, ...], decision: Decision
    ) -> Iterator[str]:
        if not requests:
            return
        request = requests[0]
        who = f"request {self.name(request)}" + (f" (and {len(requests) - 1} more)" if len(requests) > 1 else "")
        for distance, each in enumerate(later, 1):
            if each.before is not None and request in _present(each.before):
                steps = "one step" if distance == 1 else f"{distance} steps"
                yield f"arrival: {who} is there for {has.name}, and {lacks.name} sees it {steps} later"
                return
        if decision.before is not None and decision.before.num_waiting > MOST_WAITING_KEPT:
            return
        yield (
            f"arrival: {who} is there for {has.name}, and {lacks.name} does not see it within the next {len(later)} "
            "steps, or is done with it already"
        )

    # -- what limits the step

    def limits(self) -> Iterator[str]:
        if self._differ(_BUDGET):
            yield from self._budget()
        if self._differ(_SEATS):
            yield from self._seats()
        if self._differ(_POOL):
            yield self._pool()

    def _budget(self) -> Iterator[str]:
        budgets = [_budget(side.config) for side in (self.left, self.right) if side.config is not None]
        totals = [_num_tokens(self.one), _num_tokens(self.other)]
        full = [side.name for side, *pair in zip(self._sides, totals, budgets, strict=True) if pair[0] == pair[1]]
        if full:
            yield (
                f"budget: {_none_left(full)}; {self.left.name} computes {totals[0]} of at most "
                f"{budgets[0]} tokens, {self.right.name} {totals[1]} of {budgets[1]} ({self._told(_BUDGET)})"
            )

    def _seats(self) -> Iterator[str]:
        seats = [_seats(side.config) for side in (self.left, self.right) if side.config is not None]
        running = [self.one.num_running, self.other.num_running]
        full = [side.name for side, *pair in zip(self._sides, running, seats, strict=True) if pair[0] == pair[1]]
        if full:
            yield (
                f"seats: {_none_left(full)}; {self.left.name} runs {running[0]} of at most {seats[0]} "
                f"requests, {self.right.name} {running[1]} of {seats[1]} ({self._told(_SEATS)})"
            )

    def _pool(self) -> str:
        free = [
            f"{side.name} {decision.before.num_free_blocks}"
            for side, decision in zip(self._sides, (self.one, self.other), strict=True)
            if decision.before is not None and decision.before.num_free_blocks is not None
        ]
        return f"pool: {self._told(_POOL)}" + (f"; free blocks before the step: {', '.join(free)}" if free else "")

    def cache(self) -> Iterator[str]:
        hits, hits_there = dict(self.one.admitted or ()), dict(self.other.admitted or ())
        for request, num_cached in hits.items():
            if hits_there.get(request, num_cached) != num_cached:
                yield (
                    f"prefix cache: request {self.name(request)} finds {num_cached} cached tokens for "
                    f"{self.left.name}, {hits_there[request]} for {self.right.name}"
                )
                return

    def rules(self) -> Iterator[str]:
        for name, rule in VERSION_RULES.items():
            if name in self.settings:
                yield f"version rule: {self._told((name,))}; {rule}"

    def other_settings(self) -> Iterator[str]:
        known = (*_BUDGET, *_SEATS, *_POOL, *VERSION_RULES)
        names = [name for name in self.settings if name not in known]
        for kind in (_BUDGET, _SEATS):
            if self._differ(kind) and not self._shows(kind):
                names += [name for name in kind if name in self.settings]
        if names:
            yield f"settings: {self._told(names)}"

    def none_found(self) -> str:
        has_limits = self.left.config is not None and self.right.config is not None
        has_queues = self.one.before is not None and self.other.before is not None
        known = [word for word, is_known in (("queues", has_queues), ("limits and pool", has_limits)) if is_known]
        same = (
            f"{' and '.join(known)} are the same on both sides" if known else "nothing is known of what was before it"
        )
        return (
            f"none found: {same}, so a rule differs, a decision was altered, or one side is not a run of this workload"
        )

    # -- helpers

    @property
    def _sides(self) -> tuple[Side, Side]:
        return self.left, self.right

    def _differ(self, names: Iterable[str]) -> bool:
        return any(name in self.settings for name in names)

    def _shows(self, kind: tuple[str, ...]) -> bool:
        return next(self._budget() if kind is _BUDGET else self._seats(), None) is not None

    def _told(self, names: Iterable[str]) -> str:
        settings = self.settings
        told = [f"{name} is {settings[name][0]} and {settings[name][1]}" for name in names if name in settings]
        return ", ".join(told)


def _none_left(names: list[str]) -> str:
    return f"{' and '.join(names)} {'have' if len(names) > 1 else 'has'} none left"


def _present(queue: QueueState) -> dict[int, None]:
    return dict.fromkeys([*(each.request for each in queue.running), *queue.waiting])


def _num_tokens(decision: Decision) -> int | None:
    if decision.tokens is not None:
        return sum(num_tokens for _, num_tokens in decision.tokens)
    return None if decision.batch is None else decision.batch.num_tokens


def _budget(config: SchedulerConfig) -> int:
    return min(config.max_num_batched_tokens, config.max_num_scheduled_tokens or config.max_num_batched_tokens)


def _seats(config: SchedulerConfig) -> int:
    return config.max_num_active_seqs or config.max_num_seqs
