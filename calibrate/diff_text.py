"""A comparison of decisions for people, and as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from windtunnel.calibrate.diff import (
    WORDS,
    Compared,
    Decision,
    Divergence,
    Progress,
    QueueState,
    Side,
    likely_reasons,
    settings_that_differ,
)

NS_PER_S = 1_000_000_000
MOST_ROWS = 16
"""Lines of a table; those that differ come first."""
MOST_STEPS_LISTED = 20
_NOTHING, _UNKNOWN = "-", "?"

Labels = Sequence[str] | None
_Row = tuple[str, str, str]


def as_text(compared: Compared, left: Side, right: Side, labels: Labels = None) -> str:
    """What was compared, the first step that differs with both plans and the queue before it, and the likely reason."""
    lines = [f"left:   {_whole_name(left)}", f"right:  {_whole_name(right)}"]
    settings = settings_that_differ(left, right)
    if settings:
        lines.append("differ:")
        lines += [f"  {name}: {one} | {other}" for name, (one, other) in settings.items()]
    lines.append("")
    first = compared.first
    if first is None:
        return "\n".join([*lines, _equal(compared)])
    lines += [*_headline(first), "", *_queue(first, labels), "", *_plans(first, labels), "", "likely reason:"]
    lines += [f"  - {reason}" for reason in likely_reasons(first, left, right, _tuple(labels))]
    if len(compared.differing) > 1:
        lines += ["", *_all_steps(compared)]
    return "\n".join(lines)


def as_plain(compared: Compared, left: Side, right: Side, labels: Labels = None) -> dict[str, Any]:
    """The same for JSON: times in ns, requests by their labels where there are some."""
    first = compared.first
    return {
        "left": _whole_name(left),
        "right": _whole_name(right),
        "settings_that_differ": {name: list(pair) for name, pair in settings_that_differ(left, right).items()},
        "num_steps_compared": compared.num_steps,
        "is_equal": first is None,
        "is_cut": compared.is_cut,
        "first_difference": None if first is None else _plain_divergence(first, left, right, labels),
        "differing_steps": [{"step": number, "fields": list(fields)} for number, fields in compared.differing],
    }


# ------------------------------------------------------------------ text


def _whole_name(side: Side) -> str:
    return f"{side.name} ({side.source})" if side.source else side.name


def _equal(compared: Compared) -> str:
    steps = "1 step" if compared.num_steps == 1 else f"{compared.num_steps:,} steps"
    end = "the comparison was cut there" if compared.is_cut else "both sides end with it"
    return f"no difference: the same decisions in {steps}; {end}"


def _headline(first: Divergence) -> Iterator[str]:
    equal = "the first of all" if not first.number else f"after {first.number:,} equal ones"
    times = [_time(each) for each in (first.left, first.right)]
    at = times[0] if times[0] == times[1] else f"{times[0]} left, {times[1]} right"
    yield f"first difference: step {first.number:,}, {equal}, at {at}"
    if first.fields:
        yield "  in " + ", ".join(WORDS[name] for name in first.fields)
    else:
        yield f"  {'left' if first.left is None else 'right'} has no such step"


def _time(decision: Decision | None) -> str:
    if decision is None or decision.time_ns is None:
        return _NOTHING
    return f"{decision.time_ns / NS_PER_S:.9f} s"


def _queue(first: Divergence, labels: Labels) -> list[str]:
    before = [None if each is None else each.before for each in (first.left, first.right)]
    if before[0] is None and before[1] is None:
        return ["queue before the step: not known"]
    rows: list[_Row] = [("", "left", "right")]
    running = [{} if queue is None else {each.request: each for each in queue.running} for queue in before]
    order = dict.fromkeys([*running[0], *running[1]])
    told = [_row(_name(row, labels), (_progress(each.get(row), both=running) for each in running)) for row in order]
    rows += _most(told)
    rows.append(_row("waiting", (_waiting(queue, labels) for queue in before)))
    rows.append(_row("free blocks", (_count(None if queue is None else queue.num_free_blocks) for queue in before)))
    return ["queue before the step (running: computed tokens and blocks):", *_aligned(rows)]


def _progress(progress: Progress | None, both: Sequence[dict[int, Progress]]) -> str:
    if progress is None:
        return _NOTHING
    others = [each.get(progress.request) for each in both]
    is_told = progress.num_blocks is not None and all(each is None or each.num_blocks is not None for each in others)
    return f"{progress.num_computed_tokens:,}" + (f" in {progress.num_blocks:,}" if is_told else "")


def _waiting(queue: QueueState | None, labels: Labels) -> str:
    if queue is None:
        return _UNKNOWN
    shown = [_name(row, labels) for row in queue.waiting[:6]]
    more = queue.num_waiting - len(shown)
    return f"{queue.num_waiting:,}" + (f": {', '.join(shown)}{' …' if more else ''}" if shown else "")


def _plans(first: Divergence, labels: Labels) -> list[str]:
    sides = (first.left, first.right)
    rows: list[_Row] = [("", "left", "right")]
    by_request = [_told_by_request(each) for each in sides]
    order = dict.fromkeys([*by_request[0], *by_request[1]])
    rows += _most([_row(_name(row, labels), (each.get(row, _NOTHING) for each in by_request)) for row in order])
    rows += _orders(by_request, labels)
    rows += [
        _row(word, (_count(_number(each, name)) for each in sides))
        for name, word in (
            ("num_tokens", "all tokens"),
            ("num_decode_seqs", "decodes"),
            ("num_prefill_seqs", "prefills"),
            ("num_preempted", "preempted"),
            ("num_running", "running"),
            ("num_held_blocks", "held blocks"),
        )
    ]
    return ["plans (tokens):", *_aligned(rows)]


def _orders(by_request: Sequence[dict[int, str]], labels: Labels) -> list[_Row]:
    """The order of those that both plans have, from where it differs; nothing if it is the same."""
    one, other = ([row for row in each if all(row in them for them in by_request)] for each in by_request)
    if one == other:
        return []
    first = next(place for place, (here, there) in enumerate(zip(one, other, strict=True)) if here != there)
    return [_row("order", (", ".join(_name(row, labels) for row in each[first : first + 6]) for each in (one, other)))]


def _told_by_request(decision: Decision | None) -> dict[int, str]:
    if decision is None:
        return {}
    told = {row: f"{num_tokens:,}" for row, num_tokens in decision.tokens or ()}
    for row, num_cached in decision.admitted or ():
        told[row] = told.get(row, "") + " admitted" + (f", {num_cached:,} cached" if num_cached else "")
    for row in decision.preempted or ():
        told[row] = (told.get(row, "") + " preempted").strip()
    return told


def _number(decision: Decision | None, name: str) -> int | None:
    if decision is None:
        return None
    value: int | None = getattr(decision if name in Decision._fields else decision.batch, name, None)
    return value


def _all_steps(compared: Compared) -> Iterator[str]:
    yield f"{len(compared.differing):,} of {compared.num_steps:,} steps differ:"
    for number, fields in compared.differing[:MOST_STEPS_LISTED]:
        yield f"  step {number:,}: {', '.join(WORDS[name] for name in fields) or 'only one side has it'}"
    if len(compared.differing) > MOST_STEPS_LISTED:
        yield f"  … and {len(compared.differing) - MOST_STEPS_LISTED:,} more (--json lists all)"


def _most(rows: list[_Row]) -> list[_Row]:
    """No more rows than a table has room for: those that differ, then the others, in their order."""
    if len(rows) <= MOST_ROWS:
        return rows
    ranked = sorted(range(len(rows)), key=lambda place: rows[place][1] == rows[place][2])
    kept = sorted(ranked[: MOST_ROWS - 1])
    num_left_out = len(rows) - len(kept)
    are_same = all(rows[place][1] == rows[place][2] for place in ranked[MOST_ROWS - 1 :])
    left_out = f"… {num_left_out:,} more" + (" alike" if are_same else "")
    return [*(rows[place] for place in kept), (left_out, "", "")]


def _aligned(rows: Sequence[_Row]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        f"{'*' if place and _differs(row) else ' '} {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip()
        for place, row in enumerate(rows)
    ]


def _differs(row: _Row) -> bool:
    return row[1] != row[2] and _UNKNOWN not in row


def _row(name: str, cells: Iterable[str]) -> _Row:
    left, right = cells
    return name, left, right


def _name(row: int, labels: Labels) -> str:
    return str(row) if labels is None else labels[row]


def _count(value: int | None) -> str:
    return _UNKNOWN if value is None else f"{value:,}"


def _tuple(labels: Labels) -> tuple[str, ...] | None:
    return None if labels is None else tuple(labels)


# ------------------------------------------------------------------ plain data


def _plain_divergence(first: Divergence, left: Side, right: Side, labels: Labels) -> dict[str, Any]:
    return {
        "step": first.number,
        "fields": list(first.fields),
        "likely_reasons": likely_reasons(first, left, right, _tuple(labels)),
        "left": _plain_decision(first.left, labels),
        "right": _plain_decision(first.right, labels),
    }


def _plain_decision(decision: Decision | None, labels: Labels) -> dict[str, Any] | None:
    if decision is None:
        return None

    def pairs(given: Iterable[tuple[int, int]] | None) -> list[list[Any]] | None:
        return None if given is None else [[_name(row, labels), number] for row, number in given]

    preempted = decision.preempted
    return {
        "time_ns": decision.time_ns,
        "tokens": pairs(decision.tokens),
        "admitted": pairs(decision.admitted),
        "preempted": None if preempted is None else [_name(row, labels) for row in preempted],
        "num_preempted": decision.num_preempted,
        "batch": None if decision.batch is None else decision.batch._asdict(),
        "num_running": decision.num_running,
        "num_held_blocks": decision.num_held_blocks,
        "before": None if decision.before is None else _plain_queue(decision.before, labels),
    }


def _plain_queue(queue: QueueState, labels: Labels) -> dict[str, Any]:
    return {
        "running": [
            {
                "request": _name(each.request, labels),
                "num_computed_tokens": each.num_computed_tokens,
                "num_blocks": each.num_blocks,
            }
            for each in queue.running
        ],
        "waiting": [_name(row, labels) for row in queue.waiting],
        "num_waiting": queue.num_waiting,
        "num_free_blocks": queue.num_free_blocks,
    }
