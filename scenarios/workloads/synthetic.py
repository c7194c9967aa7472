"""Workloads made from distributions: independent requests, shared prefixes, conversations of several turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np

from windtunnel.scenarios.workloads.arrivals import Arrivals, arrivals_from
from windtunnel.scenarios.workloads.durations import Durations, durations_from
from windtunnel.scenarios.workloads.errors import BoolArray
from windtunnel.scenarios.workloads.lengths import Lengths, lengths_from
from windtunnel.scenarios.workloads.rows import Content
from windtunnel.scenarios.workloads.specs import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    TOKENS,
    Nested,
    build_one,
    check_parameters,
    shown,
)
from windtunnel.scenarios.workloads.tenants import (
    TenantLoad,
    Tenants,
    labelled,
    merged,
    num_requests_of,
    shares_of,
    tenants_from,
)
from windtunnel.sim.rng import stream
from windtunnel.sim.workload import IntArray, Segment, Workload, workload


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Groups of requests (or conversations) that begin alike; one group is a common system prompt.

    The prefix comes before the prompt that is drawn, as ``--random-prefix-len`` does.
    """

    num_prefixes: Annotated[int, COUNT, "How many groups there are."]
    prefix_tokens: Annotated[
        Lengths | int | str | Mapping[str, Any],
        Nested("lengths"),
        "Length of a group's prefix in tokens, drawn once a group; it comes before the prompt that input draws.",
    ]
    popularity: Annotated[
        Literal["uniform", "zipf"], "How often the groups are met: all alike, or the k-th by a weight of 1/k^exponent."
    ] = "uniform"
    exponent: Annotated[float, POSITIVE, "That of zipf: the larger, the more go to the first groups."] = 1.0
    share: Annotated[float, SHARE, "Share of the requests (or conversations) that have a prefix."] = 1.0

    def __post_init__(self) -> None:
        check_parameters(self)
        lengths_from(self.prefix_tokens, "prefix_tokens")


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations: every turn's prompt is all that was said before, and what the user adds.

    A turn follows the answer to the one before after a think time.  Arrivals are those of first turns; ``prompt`` and
    ``output`` of the workload are what one turn adds; a common system prompt is ``Prefixes(1, tokens)``.
    """

    turns: Annotated[Lengths | int | str | Mapping[str, Any], Nested("lengths"), "Turns of a conversation."]
    think: Annotated[
        Durations | float | str | Mapping[str, Any],
        Nested("durations"),
        "Pause between an answer and the next turn, in seconds.",
    ] = 0.0
    num_sessions: Annotated[
        int | None,
        COUNT,
        "How many conversations, in place of num_requests; without it as many as give num_requests turns, the last "
        "one cut short.",
    ] = None
    max_context_tokens: Annotated[
        int | None,
        TOKENS,
        "A conversation ends before the turn whose prompt and answer would exceed this (the model's context).",
    ] = None

    def __post_init__(self) -> None:
        check_parameters(self)
        lengths_from(self.turns, "turns")
        durations_from(self.think, "think")


def prefixes_from(spec: Mapping[str, Any], what: str = "prefixes") -> Prefixes:
    """Prefixes from a dict with its fields as keys.  Raises ValueError that begins with ``what``."""
    return build_one(spec, Prefixes, what)


def sessions_from(spec: Mapping[str, Any], what: str = "sessions") -> Sessions:
    """Sessions from a dict with its fields as keys.  Raises ValueError that begins with ``what``."""
    return build_one(spec, Sessions, what)


def synthetic_workload(
    num_requests: int | None,
    arrivals: Arrivals | float | Mapping[str, Any],
    prompt: Lengths | int | Mapping[str, Any],
    output: Lengths | int | Mapping[str, Any],
    *,
    seed: int,
    prefixes: Prefixes | Mapping[str, Any] | None = None,
    sessions: Sessions | Mapping[str, Any] | None = None,
    max_concurrency: int | None = None,
    max_tokens: int | None = None,
    priorities: Mapping[int, float] | None = None,
    tenants: Tenants | None = None,
) -> Workload:
    """Requests drawn from distributions; the same seed gives the same requests.

    Each quantity has its own random stream ("workload" and "arrivals", "prompt", "output", "prefix", …), so changing
    one leaves the others as they are.  ``num_requests`` counts turns where there are sessions, and is None where those
    have a number of their own.  ``max_tokens`` is declared by every request and cuts longer answers; None declares
    the true length.  ``priorities`` maps a priority to its weight (of a request, or of a whole conversation).

    ``tenants`` maps names to shares of the requests (or conversations), or to a table with the fields of
    ``TenantLoad``.  Where one of those asks for more than a share, each tenant's requests are drawn by themselves and
    share no prefix with those of others.

    Raises ValueError for a description that is none or a value out of range.
    """
    spec = _Spec(
        arrivals_from(arrivals),
        lengths_from(prompt, "prompt"),
        lengths_from(output, "output"),
        prefixes_from(prefixes) if isinstance(prefixes, Mapping) else prefixes,
        max_tokens,
        seed,
        priorities,
    )
    if max_tokens is not None:
        TOKENS.check("max_tokens", max_tokens)
    talks = sessions_from(sessions) if isinstance(sessions, Mapping) else sessions
    loads = None if tenants is None else tenants_from(tenants)
    if loads is None or all(load.is_plain for load in loads.values()):
        drawn = _drawn(spec, talks, num_requests)
        drawn = drawn if loads is None else labelled(drawn, loads, spec.rng("tenant"))
    elif any(load.has_arrivals for load in loads.values()):
        drawn = _by_own_arrivals(spec, talks, loads, num_requests)
    else:
        drawn = _by_shares(spec, talks, loads, num_requests)
    return replace(drawn, max_concurrency=max_concurrency)


def _drawn(spec: _Spec, sessions: Sessions | None, num_requests: int | None) -> Workload:
    turns = _turns(spec, sessions, num_requests)
    num_conversations = int((turns.previous < 0).sum())
    return _placed(spec, sessions, turns, spec.arrivals.sample_ns(spec.rng("arrivals"), num_conversations))


def _turns(spec: _Spec, sessions: Sessions | None, num_requests: int | None) -> _Turns:
    return _independent(spec, num_requests) if sessions is None else _conversations(spec, sessions, num_requests)


def _placed(spec: _Spec, sessions: Sessions | None, turns: _Turns, first_ns: IntArray) -> Workload:
    """The turns, whose conversations begin at these times."""
    first = turns.previous < 0
    conversation = np.cumsum(first) - 1
    return workload(
        np.where(first, first_ns[conversation], -1),
        turns.prompt,
        turns.output,
        max_tokens=None if spec.max_tokens is None else np.full(len(turns.output), spec.max_tokens, np.int64),
        priority=_priorities(spec, spec.priorities, len(first_ns))[conversation],
        previous=turns.previous,
        think_ns=turns.think_ns,
        content=turns.content,
        num_streams=turns.num_streams,
        source="synthetic",
        notes=(*_notes(spec, sessions), *turns.notes),
    )


@dataclass(frozen=True, slots=True)
class _Spec:
    arrivals: Arrivals
    prompt: Lengths
    output: Lengths
    prefixes: Prefixes | None
    max_tokens: int | None
    seed: int
    priorities: Mapping[int, float] | None = None
    names: tuple[str, ...] = ()
    """Names that tell its random streams from those of others."""

    def rng(self, name: str) -> np.random.Generator:
        return stream(self.seed, "workload", *self.names, name)


# -- tenants whose requests differ in more than their number


def _by_own_arrivals(
    spec: _Spec, sessions: Sessions | None, loads: Mapping[str, TenantLoad], num_requests: int | None
) -> Workload:
    """Each tenant's requests come by themselves."""
    if sessions is not None and sessions.num_sessions is not None:
        raise ValueError("tenants with arrivals of their own count requests: give num_requests, not num_sessions")
    parts = []
    for (name, load), number in zip(loads.items(), num_requests_of(loads, num_requests), strict=True):
        own = replace(_spec_of(spec, name, load), arrivals=load.arrivals())
        part = _drawn(own, sessions, number) if number else _placed(own, sessions, _NO_TURNS, _NO_TURNS.previous)
        delay_ns = round(load.start_s * 1e9)
        parts.append(replace(part, arrival_ns=np.where(part.previous < 0, part.arrival_ns + delay_ns, -1)))
    return _merged(parts, loads)


def _by_shares(
    spec: _Spec, sessions: Sessions | None, loads: Mapping[str, TenantLoad], num_requests: int | None
) -> Workload:
    """Requests come as one stream, each (or each conversation) that of a tenant drawn by the shares."""
    rng = spec.rng("tenant")
    shares = np.array(shares_of(loads)) / sum(shares_of(loads))
    num_sessions = None if sessions is None else sessions.num_sessions
    total = num_requests if num_requests is not None else num_sessions
    COUNT.check("num_requests", total)
    drawn = []
    for (name, load), number in zip(loads.items(), rng.multinomial(total or 0, shares).tolist(), strict=True):
        own, talks = _spec_of(spec, name, load), sessions
        if talks is not None and num_requests is None:
            talks = replace(talks, num_sessions=number or None)
        turns = _turns(own, talks, number if num_requests is not None else None) if number else _NO_TURNS
        drawn.append((own, turns, int((turns.previous < 0).sum())))
    of = rng.permutation(np.repeat(np.arange(len(drawn)), [count for _, _, count in drawn]))
    first_ns = spec.arrivals.sample_ns(spec.rng("arrivals"), len(of))
    parts = [_placed(own, sessions, turns, first_ns[of == place]) for place, (own, turns, _) in enumerate(drawn)]
    return _merged(parts, loads)


def _spec_of(spec: _Spec, name: str, load: TenantLoad) -> _Spec:
    """What the tenant's requests are drawn from."""
    return replace(
        spec,
        prompt=spec.prompt if load.input is None else lengths_from(load.input, "input"),
        output=spec.output if load.output is None else lengths_from(load.output, "output"),
        max_tokens=spec.max_tokens if load.max_tokens is None else load.max_tokens,
        priorities=spec.priorities if load.priority is None else {load.priority: 1.0},
        names=("tenant", name),
    )


def _merged(parts: list[Workload], loads: Mapping[str, TenantLoad]) -> Workload:
    notes = tuple(f"Tenant {name}: {note}" for name, part in zip(loads, parts, strict=True) for note in part.notes)
    return merged(parts, tuple(loads), "synthetic", notes)


@dataclass(frozen=True, slots=True)
class _Turns:
    prompt: IntArray
    output: IntArray
    previous: IntArray
    think_ns: IntArray
    content: Content | None
    num_streams: int
    notes: tuple[str, ...] = ()


_NOTHING = np.zeros(0, np.int64)
_NO_TURNS = _Turns(_NOTHING, _NOTHING, _NOTHING, _NOTHING, None, 0)


def _independent(spec: _Spec, num_requests: int | None) -> _Turns:
    COUNT.check("num_requests", num_requests)
    assert num_requests is not None
    prompt = spec.prompt.sample(spec.rng("prompt"), num_requests)
    output, cut = _outputs(spec, spec.rng("output"), num_requests)
    nothing = np.zeros(num_requests, np.int64)
    previous = np.full(num_requests, -1, np.int64)
    notes = _cut_note(spec, int(cut.sum()))
    if spec.prefixes is None:
        return _Turns(prompt, output, previous, nothing, None, 0, notes)
    groups = _groups(spec, spec.prefixes, spec.rng("prefix"), num_requests)
    content = tuple(map(groups.prefixes.__getitem__, groups.of.tolist()))
    num_prefixes = spec.prefixes.num_prefixes
    return _Turns(prompt + groups.tokens[groups.of], output, previous, nothing, content, num_prefixes, notes)


def _outputs(spec: _Spec, rng: np.random.Generator, n: int) -> tuple[IntArray, BoolArray]:
    """Answer lengths, and which of them max_tokens has cut."""
    output = spec.output.sample(rng, n)
    if spec.max_tokens is None:
        return output, np.zeros(n, np.bool_)
    return np.minimum(output, spec.max_tokens), output > spec.max_tokens


def _cut_note(spec: _Spec, num_cut: int) -> tuple[str, ...]:
    return (f"{num_cut:,} answers cut to max_tokens = {spec.max_tokens:,}.",) if num_cut else ()


@dataclass(frozen=True, slots=True)
class _Groups:
    of: IntArray
    """Group of each request or conversation; the last one is that without a prefix."""
    tokens: IntArray
    """Prefix tokens of each group."""
    prefixes: list[tuple[Segment, ...]]
    """Content of each group."""


def _groups(spec: _Spec, prefixes: Prefixes, rng: np.random.Generator, n: int) -> _Groups:
    num = prefixes.num_prefixes
    tokens = lengths_from(prefixes.prefix_tokens).sample(spec.rng("prefix_tokens"), num)
    weights = np.ones(num) if prefixes.popularity == "uniform" else np.arange(1.0, num + 1) ** -prefixes.exponent
    bounds = np.cumsum(weights) / weights.sum()
    of = np.minimum(np.searchsorted(bounds, rng.random(n), side="right"), num - 1)
    of = np.where(rng.random(n) < prefixes.share, of, num)
    contents: list[tuple[Segment, ...]] = [((group, length),) for group, length in enumerate(tokens.tolist())]
    return _Groups(of, np.append(tokens, 0), [*contents, ()])


def _conversations(spec: _Spec, sessions: Sessions, num_requests: int | None) -> _Turns:
    if (num_requests is None) == (sessions.num_sessions is None):
        got = "neither" if num_requests is None else f"both ({num_requests:,} and {sessions.num_sessions:,})"
        raise ValueError(f"give either num_requests or num_sessions, got {got}")
    if num_requests is not None:
        COUNT.check("num_requests", num_requests)
    draws = _Draws(spec, sessions)
    batches: list[_Batch] = []
    missing = num_requests
    while missing is None or missing > 0:
        batch = draws.batch(sessions.num_sessions if missing is None else missing, missing)
        batches.append(batch)
        if missing is None:
            break
        missing -= len(batch.prompt)
    return _joined(spec, batches)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Turns of some conversations, those of one conversation in a row."""

    session: IntArray
    group: IntArray
    prompt: IntArray
    output: IntArray
    think_ns: IntArray
    prefixes: list[tuple[Segment, ...]]
    num_answers_cut: int
    num_ended_early: int
    num_too_long: int


class _Draws:
    """The random streams of conversations, from which batch after batch is drawn."""

    def __init__(self, spec: _Spec, sessions: Sessions) -> None:
        self._spec = spec
        self._sessions = sessions
        self._turns = spec.rng("turns")
        self._prompt = spec.rng("prompt")
        self._output = spec.rng("output")
        self._think = spec.rng("think")
        self._prefix = spec.rng("prefix")

    def batch(self, num_sessions: int | None, enough_turns: int | None) -> _Batch:
        """``num_sessions`` conversations, or as many as have ``enough_turns`` turns and no more turns than those."""
        assert num_sessions is not None
        turns = lengths_from(self._sessions.turns).sample(self._turns, num_sessions)
        if enough_turns is not None:
            turns = turns[: int(np.searchsorted(np.cumsum(turns), enough_turns)) + 1]
        groups = self._groups(len(turns))
        session = np.repeat(np.arange(len(turns)), turns)
        added = self._spec.prompt.sample(self._prompt, len(session))
        output, cut = _outputs(self._spec, self._output, len(session))
        think_ns = durations_from(self._sessions.think).sample_ns(self._think, len(session))
        first = np.cumsum(turns) - turns
        before = _sum_before(added + output, session, first)
        prompt = groups.tokens[groups.of][session] + before + added
        fits = self._fits(prompt + output)
        num_too_long = int((~fits[first]).sum())
        if num_too_long == len(turns):
            raise ValueError(
                f"no first turn fits max_context_tokens = {self._sessions.max_context_tokens}: raise it or shorten "
                "prompt, output or prefix"
            )
        num_ended_early = len(np.unique(session[~fits])) - num_too_long
        kept = np.flatnonzero(fits)[:enough_turns]
        return _Batch(
            session[kept],
            groups.of[session[kept]],
            prompt[kept],
            output[kept],
            think_ns[kept],
            groups.prefixes,
            int(cut[kept].sum()),
            num_ended_early,
            num_too_long,
        )

    def _groups(self, num_sessions: int) -> _Groups:
        if self._spec.prefixes is None:
            return _Groups(np.zeros(num_sessions, np.int64), np.zeros(1, np.int64), [()])
        return _groups(self._spec, self._spec.prefixes, self._prefix, num_sessions)

    def _fits(self, context: IntArray) -> BoolArray:
        limit = self._sessions.max_context_tokens
        return np.ones(len(context), np.bool_) if limit is None else context <= limit


def _sum_before(values: IntArray, session: IntArray, first: IntArray) -> IntArray:
    """For each turn the sum over the earlier turns of its conversation."""
    before = np.cumsum(values) - values
    return before - before[first][session]


def _joined(spec: _Spec, batches: list[_Batch]) -> _Turns:
    starts = np.cumsum([0, *(int(batch.session[-1]) + 1 for batch in batches)])
    session = np.concatenate([batch.session + start for batch, start in zip(batches, starts[:-1], strict=True)])
    prompt = np.concatenate([batch.prompt for batch in batches])
    output = np.concatenate([batch.output for batch in batches])
    think_ns = np.concatenate([batch.think_ns for batch in batches])
    group = np.concatenate([batch.group for batch in batches])
    begins = np.ones(len(session), np.bool_)
    begins[1:] = session[1:] != session[:-1]
    previous = np.where(begins, -1, np.arange(len(session)) - 1)
    num_prefixes = 0 if spec.prefixes is None else spec.prefixes.num_prefixes
    streams = num_prefixes + np.cumsum(begins) - 1
    prefixes = batches[0].prefixes
    content = tuple(
        (*prefixes[g], (own, end))
        for g, own, end in zip(group.tolist(), streams.tolist(), (prompt + output).tolist(), strict=True)
    )
    notes = _session_notes(spec, batches, int(begins.sum()), len(session))
    return _Turns(prompt, output, previous, np.where(begins, 0, think_ns), content, int(streams[-1]) + 1, notes)


def _session_notes(spec: _Spec, batches: list[_Batch], num_sessions: int, num_turns: int) -> tuple[str, ...]:
    ended = sum(batch.num_ended_early for batch in batches)
    refused = sum(batch.num_too_long for batch in batches)
    notes = [f"{num_sessions:,} conversations with {num_turns:,} turns."]
    if ended:
        notes.append(f"{ended:,} conversations ended early at max_context_tokens.")
    if refused:
        notes.append(f"{refused:,} conversations left out: their first turn exceeds max_context_tokens.")
    return (*notes, *_cut_note(spec, sum(batch.num_answers_cut for batch in batches)))


def _priorities(spec: _Spec, priorities: Mapping[int, float] | None, n: int) -> IntArray:
    if not priorities:
        return np.zeros(n, np.int64)
    for priority, weight in priorities.items():
        NOT_NEGATIVE.check(f"weight of priority {priority}", weight)
    levels, weights = np.array(list(priorities), np.int64), np.array(list(priorities.values()), np.float64)
    if not weights.sum() > 0:
        raise ValueError(f"the weights of priorities must not all be 0, got {dict(priorities)}")
    bounds = np.cumsum(weights) / weights.sum()
    drawn = np.searchsorted(bounds, spec.rng("priority").random(n), side="right")
    return levels[np.minimum(drawn, len(levels) - 1)]


def _notes(spec: _Spec, sessions: Sessions | None) -> tuple[str, ...]:
    parts = [f"arrival {shown(spec.arrivals)}", f"input {shown(spec.prompt)}", f"output {shown(spec.output)}"]
    if spec.prefixes is not None:
        parts.append(shown(spec.prefixes))
    if sessions is not None:
        parts.append(shown(sessions))
    return (f"Drawn with seed {spec.seed}: {'; '.join(parts)}.",)
