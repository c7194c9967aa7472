"""A search as text and as Markdown: the answer, the walk to it, and the best trials."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from textwrap import wrap

from windtunnel.reports.optimize_answer import answer, importance_words, reset_words, step_buys, step_words
from windtunnel.reports.optimize_data import SIMPLE, Optimized, Tried, label_of, say_value
from windtunnel.reports.text import header
from windtunnel.reports.words import plural

PROSE_WIDTH = 100
MOST_ROWS = 12


def ordered(found: Optimized) -> list[Tried]:
    """The answer, then those that may be it, then by how much objectives are missed, then what does not start."""
    sign, key = found.target.sign, found.target.key

    answer_number = 0 if found.winner is None else found.winner.number

    def place(each: Tried) -> tuple[bool, bool, bool, float, int, float, int]:
        mean = each.point.mean(key)
        return (
            each.point.number != answer_number,
            bool(each.point.infeasible),
            not each.is_candidate,
            each.excess,
            -len(each.point.runs),
            -sign * mean if mean is not None else 0.0,
            each.point.number,
        )

    answer_too = [] if found.answer is None or found.answer in found.tried else [found.answer]
    return sorted([*answer_too, *found.tried], key=place)


def number_words(found: Optimized, each: Tried, key: str) -> str:
    """Mean and half of the interval, for a table."""
    interval = each.point.interval(key)
    if interval is None:
        return "–"
    say = found.target.say if key == found.target.key else lambda value: say_value(key, value)
    told = say(interval.mean)
    half = interval.half_width
    value, _, unit = told.partition(" ")
    is_said = unit in ("ms", "s", "%")
    if not isfinite(half) or half <= 0:
        return told if is_said else value
    noise = say(round(half) if abs(interval.mean) >= 100 and half >= 1 and not is_said else half)
    spread, _, same = noise.partition(" ")
    if same != unit:
        return f"{told} ±{noise}"
    return f"{value} ±{spread} {unit}" if is_said else f"{value} ±{spread}"


def heads(found: Optimized) -> list[str]:
    """Names of the shown numbers; units that stand in the cells are left out."""
    labels = [found.target.label if key == found.target.key else label_of(key) for key in found.shown_keys]
    return [label.replace(" (ms)", "").replace(" (%)", "") for label in labels]


def state_words(each: Tried) -> str:
    """What became of a trial."""
    if each.point.infeasible:
        return "does not start"
    if each.dropped:
        return each.dropped
    if each.origin == SIMPLE:
        return "made simple, on fresh seeds"
    return "" if each.in_space else "outside of what is searched"


# --- text


def render_text(found: Optimized) -> str:
    """The whole text, ending in a newline."""
    said = answer(found)
    lines = [*header(found.context), ""]
    for sentence in (said.headline, *said.sentences):
        lines += _wrapped(sentence)
    if found.serve_command:
        lines += ["", found.serve_command]
    elif found.why_no_command:
        lines += _wrapped(f"No vllm serve line: {found.why_no_command}")
    lines += _walk(found)
    for text in (reset_words(found), importance_words(found), *found.notes):
        if text:
            lines += _wrapped(text)
    lines += ["", *_knobs(found), "", *_table(found), ""]
    for text in _reasons(found):
        lines += _wrapped(text)
    for warning in found.context.warnings:
        lines += wrap(f"WARNING: {warning}", PROSE_WIDTH, subsequent_indent="         ")
    return "\n".join(line.rstrip() for line in lines).rstrip("\n") + "\n"


def _wrapped(text: str) -> list[str]:
    return wrap(text, PROSE_WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _walk(found: Optimized) -> Iterator[str]:
    if not found.walk:
        return
    yield ""
    seeds = plural(len(found.walk[0].after.runs), "seed" if found.is_fixed else "fresh seed")
    yield f"From the scenario's settings to the answer, on {seeds}:"
    told = [(step_words(step), step_buys(found, step)) for step in found.walk]
    width = max(len(words) for words, _ in told)
    for words, buys in told:
        yield f"  {words.ljust(width)}  {buys}"


def _knobs(found: Optimized) -> Iterator[str]:
    yield "knobs" + ("" if found.were_knobs_given else " (the usual ones; --tune takes others)")
    width = max(len(knob.key) for knob in found.knobs)
    for knob in found.knobs:
        values = ", ".join(knob.order) or knob.text
        own = f"; scenario {knob.own}" if knob.own else ""
        default = f", vLLM {knob.default}" if knob.default and knob.default != knob.own else ""
        yield f"  {knob.key.ljust(width)}  {values}{own}{default}"


def _rows(found: Optimized, most: int) -> list[list[str]]:
    rows = []
    for each in ordered(found)[:most]:
        numbers = [number_words(found, each, key) for key in found.shown_keys]
        mark = _mark(found, each)
        own = [each.point.words[knob.key] for knob in found.knobs]
        rows.append([str(each.point.number or "–"), *own, *numbers, str(len(each.point.runs)), mark])
    return rows


def _mark(found: Optimized, each: Tried) -> str:
    names = []
    if found.winner is not None and found.winner.number == each.point.number:
        names.append("answer")
    if each is found.start:
        names.append("scenario")
    elif each.origin == "vLLM defaults":
        names.append(each.origin)
    state = state_words(each)
    return ", ".join([*names, *([state] if state else [])])


def _table(found: Optimized) -> Iterator[str]:
    head = ["#", *(knob.key for knob in found.knobs), *heads(found), "runs", ""]
    cells = _rows(found, MOST_ROWS)
    broken = [wrap(name.replace("_", "_ "), 14, break_long_words=False) or [""] for name in head]
    broken = [[line.replace("_ ", "_") for line in part] for part in broken]
    height = max(map(len, broken))
    top = [[([""] * (height - len(part)) + part)[line] for part in broken] for line in range(height)]
    widths = [max(len(line[k]) for line in [*top, *cells]) for k in range(len(head))]
    for line in [*top, ["-" * width for width in widths], *cells]:
        last = len(head) - 1
        yield "  ".join(
            text.ljust(width) if k == last else text.rjust(width)
            for k, (text, width) in enumerate(zip(line, widths, strict=True))
        )
    if len(found.tried) > MOST_ROWS:
        yield f"... and {plural(len(found.tried) - MOST_ROWS, 'more deployment')} in --csv, --json, --html and -o"


def _reasons(found: Optimized) -> Iterator[str]:
    reasons: dict[str, list[int]] = {}
    for each in found.tried:
        if each.point.infeasible:
            reasons.setdefault(each.point.infeasible, []).append(each.point.number)
    for reason, numbers in list(reasons.items())[:1]:
        yield f"{plural(len(numbers), 'deployment')} ({', '.join(map(str, numbers[:8]))}) cannot start: {reason}"
    if len(reasons) > 1:
        yield f"{plural(len(reasons) - 1, 'more reason')} in the files."


# --- Markdown


def render_markdown(found: Optimized) -> str:
    """The same as Markdown, ending in a newline: for issues and pull requests."""
    said, shared = answer(found), found.context
    what = " on ".join(part for part in (shared.model, shared.gpu) if part)
    facts = [what, shared.engine and f"{shared.engine} (simulated)"]
    facts.append(f"cost model {shared.cost_model}, {shared.calibration}" if shared.cost_model else "")
    parts = [
        [f"### {shared.title}: {found.target.words}"],
        [f"**{said.headline}**"],
        [f"- {sentence}" for sentence in said.sentences],
        [f"```sh\n{found.serve_command}\n```"] if found.serve_command else [found.why_no_command],
        list(_markdown_walk(found)),
        [text for text in (reset_words(found), importance_words(found)) if text],
        list(_markdown_table(found)),
        [f"- {text}" for text in (*found.notes, *_reasons(found))],
        ["; ".join(fact for fact in facts if fact) + "."],
        list(shared.calibrated_by),
        [f"> **Warning:** {text}" for text in shared.warnings],
        [f"```sh\n{found.command}\n```"] if found.command else [],
        [f"windtunnel {shared.version}" if shared.version else ""],
    ]
    return "\n\n".join("\n".join(part) for part in parts if any(part)) + "\n"


def _markdown_walk(found: Optimized) -> Iterator[str]:
    if found.walk:
        yield "| Step from the scenario's settings | buys |"
        yield "| --- | --- |"
        for step in found.walk:
            yield _markdown_row([step_words(step), step_buys(found, step)])


def _markdown_table(found: Optimized) -> Iterator[str]:
    head = ["#", *(f"`{knob.key}`" for knob in found.knobs), *heads(found), "runs", ""]
    yield _markdown_row(head)
    yield _markdown_row(["---:"] * (len(head) - 1) + ["---"])
    for row in _rows(found, MOST_ROWS):
        yield _markdown_row(row)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"
