"""A memory plan, or a sweep of plans, as one HTML file that works offline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from windtunnel.reports.figures import Figure
from windtunnel.reports.memory_figures import MOST_CURVES, num_curves, sweep_figures, waterfall
from windtunnel.reports.memory_first_screen import (
    Cost,
    cheapest,
    headline,
    hourly,
    plan_cards,
    point_words,
    price,
    sweep_cards,
)
from windtunnel.reports.memory_text import (
    VERDICT_WORDS,
    MemoryRow,
    axis_cell,
    budget_rows,
    comparison_rows,
    pool_rows,
    reasons_of,
    remedy_rows,
    setting_rows,
    short,
    steps,
    sweep_cells,
    users_rows,
)
from windtunnel.reports.page import (
    answer_box,
    badge,
    cards,
    cell,
    cell_html,
    code,
    figure,
    masthead,
    navigation,
    section,
    table,
    write_page,
)
from windtunnel.reports.values import plain
from windtunnel.reports.words import plural
from windtunnel.sim.deployment.memory_plan import DOES_NOT_START, OK, UNSAFE

TONES = {OK: "good", UNSAFE: "note", DOES_NOT_START: "bad"}


def write_plan_html(
    path: str | Path, row: MemoryRow, *, version: str, cost: Cost | None = None, command: str = ""
) -> None:
    """Write the report of one plan; the same plan gives the same bytes.  Raises OSError if it cannot be written.

    ``cost`` is that of its GPUs, where a price was given, ``command`` the line that makes the plan again.
    """
    drawn = waterfall(row.plan)
    write_page(
        path,
        row.title,
        _plan_body(row, version, cost, command, drawn),
        skip_to="memory",
        head=masthead(row.title, "memory plan"),
        foot=_planned_with(version),
        drawn=[drawn],
    )


def write_sweep_html(
    path: str | Path,
    axes: Sequence[str],
    points: Sequence[Mapping[str, Any]],
    best: MemoryRow | None,
    notes: Sequence[str],
    warnings: Sequence[str] = (),
    *,
    version: str,
    currency: str = "",
    command: str = "",
) -> None:
    """Write the report of a sweep: ``points`` as plain data, ``best`` the plan whose waterfall is drawn.

    ``currency`` is that of the points' ``cost_per_hour``, where a price was given, ``command`` the line that makes the
    sweep again.  Raises OSError if it cannot be written.
    """
    drawn, falls = sweep_figures(axes, points), [waterfall(best.plan)] if best is not None else []
    title = sweep_title(axes, best)
    write_page(
        path,
        title,
        _sweep_body(axes, points, best, notes, warnings, version, currency, command, drawn, falls),
        skip_to="sweep",
        head=masthead(title, escape(f"memory plans over {', '.join(axes)}")),
        foot=_planned_with(version),
        drawn=[*drawn, *falls],
    )


def _planned_with(version: str) -> str:
    return f"Planned with windtunnel {version}."


# --- one plan


def _plan_body(row: MemoryRow, version: str, cost: Cost | None, command: str, drawn: Figure) -> Iterator[str]:
    verdict = row.judged.verdict
    judgement = row.judged.judgement
    sentences = [text for text in (judgement.error, judgement.why) if text]
    tone = "note" if row.warnings and verdict == OK else TONES[verdict]
    yield from answer_box(headline(row), [*sentences, *row.warnings], tone)
    yield cards((card.name, card.value, card.more) for card in plan_cards(row, cost))
    yield from _notes(row.notes)
    sections = [("memory", "Memory"), ("pool", "KV cache")]
    sections += [("remedies", "What would help")] if row.judged.remedies else []
    sections += [("real", "Beside the real start-up")] if row.comparison else []
    yield from navigation([*sections, ("how", "How it comes about")])
    yield from _memory(row, drawn)
    yield from _pool(row)
    yield from _remedies(row)
    yield from _command(row)
    yield from _comparison(row)
    yield from _how(row, version, command)


def _notes(notes: Sequence[str]) -> Iterator[str]:
    if notes:
        yield f'<div class="warnings" role="note">{"".join(f"<p>{escape(note)}</p>" for note in notes)}</div>'


def _memory(row: MemoryRow, drawn: Figure) -> Iterator[str]:
    yield section("memory", "Memory of one GPU")
    yield figure(drawn)
    yield from table(("Part", "Size", "Remark"), _three(budget_rows(row)))
    yield "</section>"


def _three(rows: Sequence[tuple[str, str, str]]) -> list[list[str]]:
    return [[cell(name), cell(value, "number"), cell(remark)] for name, value, remark in rows]


def _pool(row: MemoryRow) -> Iterator[str]:
    yield section("pool", "KV cache")
    yield from table(("Figure", "Value", "Remark"), _three(pool_rows(row)))
    if row.users is not None:
        yield f"<h3>Requests of {row.users.mean_tokens:,} tokens</h3>"
        yield from table(("Figure", "Value", "Remark"), _three(users_rows(row.users, row.plan)))
    yield "</section>"


def _remedies(row: MemoryRow) -> Iterator[str]:
    if not row.judged.remedies:
        if row.judged.verdict != OK:
            yield f'<p class="lead">{escape(row.advice)}</p>'
        return
    yield section("remedies", "What would help")
    yield '<p class="lead">Each of these changes alone helps.</p>'
    made = zip(row.judged.remedies, remedy_rows(row.judged.remedies), strict=True)
    rows = [
        [cell(text), _verdict(remedy.verdict), cell(tokens, "number"), cell(cost)]
        for remedy, (text, _, tokens, cost) in made
    ]
    yield from table(("Change", "Verdict", "KV cache", "Cost"), rows)
    yield "</section>"


def _command(row: MemoryRow) -> Iterator[str]:
    if row.serve_command:
        yield f"<h3>Command line</h3><pre>{escape(row.serve_command)}</pre>"


def _verdict(verdict: str) -> str:
    return cell_html(badge(TONES[verdict], VERDICT_WORDS[verdict]))


def _comparison(row: MemoryRow) -> Iterator[str]:
    if not row.comparison:
        return
    yield section("real", "Beside the real start-up")
    rows = [[cell(name), *(cell(value, "number") for value in values)] for name, *values in comparison_rows(row)]
    yield from table(("Figure", "Measured", "Formula", "Formula off by"), rows)
    yield "</section>"


def _how(row: MemoryRow, version: str, command: str) -> Iterator[str]:
    yield section("how", "How it comes about")
    yield f"<pre>{escape(chr(10).join(steps(row.plan)))}</pre>"
    yield f"<h3>Assumptions</h3><ul>{''.join(f'<li>{escape(text)}</li>' for text in row.assumptions)}</ul>"
    yield "<h3>Settings</h3>"
    rows = [(code(name), code(value), cell(source)) for name, value, source in setting_rows(row.plan)]
    yield from table(("Setting", "Value", "Source"), rows)
    yield from _again(version, command)
    yield "</section>"


def _again(version: str, command: str) -> Iterator[str]:
    """How to make the plan again."""
    if command:
        yield f"<h3>To make it again</h3><p>With windtunnel {escape(version)}:</p><pre>{escape(command)}</pre>"


# --- a sweep


def _sweep_body(
    axes: Sequence[str],
    points: Sequence[Mapping[str, Any]],
    best: MemoryRow | None,
    notes: Sequence[str],
    warnings: Sequence[str],
    version: str,
    currency: str,
    command: str,
    drawn: Sequence[Figure],
    falls: Sequence[Figure],
) -> Iterator[str]:
    answer, sentences, tone = _sweep_answer(axes, points)
    yield from answer_box(answer, [*sentences, *warnings], "note" if warnings and tone == "good" else tone)
    yield cards((card.name, card.value, card.more) for card in sweep_cards(axes, points, currency))
    yield from _notes(notes)
    yield from navigation([("sweep", "What if"), ("points", "All plans"), ("memory", "Memory of one GPU")])
    yield section("sweep", "What if")
    yield "".join(figure(each) for each in drawn if not each.half)
    yield f'<div class="pair">{"".join(figure(each) for each in drawn if each.half)}</div>'
    if num_curves(axes, points) > MOST_CURVES:
        yield f'<p class="lead">{MOST_CURVES} curves are drawn; the table has every plan.</p>'
    yield "</section>"
    yield from _points(axes, points, currency)
    if best is not None:
        yield section("memory", "Memory of one GPU")
        chosen = next(point for point in points if point["verdict"] == best.judged.verdict and _is(point, best))
        told = ", ".join(f"{axis} {plain(chosen[axis])}" for axis in axes)
        word = VERDICT_WORDS[best.judged.verdict]
        yield f'<p class="lead">At {escape(told)}: the largest KV cache that is {word}.</p>'
        yield f"{figure(falls[0])}\n</section>"
    yield from _again(version, command)


def sweep_title(axes: Sequence[str], best: MemoryRow | None) -> str:
    """What is common to all plans."""
    if best is None:
        return "Memory plans"
    request = best.plan.request
    parts = {"model": request.model.name, "gpu": request.gpu.name, "engine": request.version.label}
    return ", ".join(text for axis, text in parts.items() if axis not in axes) or "Memory plans"


def _is(point: Mapping[str, Any], best: MemoryRow) -> bool:
    return point.get("kv_cache_tokens") == best.plan.kv_cache_tokens


def _sweep_answer(axes: Sequence[str], points: Sequence[Mapping[str, Any]]) -> tuple[str, list[str], str]:
    ok = [point for point in points if point["verdict"] == OK]
    unsafe = [point for point in points if point["verdict"] == UNSAFE]
    rest = len(points) - len(ok) - len(unsafe)
    sentence = f"{plural(len(points), 'plan')}: {len(ok)} ok, {len(unsafe)} unsafe, {rest} do not start."
    chosen = ok or unsafe
    if not chosen:
        return "None of these starts.", [sentence], "bad"
    largest = max(chosen, key=lambda point: point["kv_cache_tokens"])
    least = cheapest(chosen)
    settings = ", ".join(f"{axis} {plain(largest[axis])}" for axis in axes)
    told = f"With {settings}, on {plural(largest['num_gpus'], 'GPU')}"
    headline = f"Up to {largest['kv_cache_tokens']:,} KV tokens."
    if price(least) < price(largest):
        told = f"The largest has {largest['kv_cache_tokens']:,} KV tokens: {told[0].lower()}{told[1:]}"
        how = "with the fewest GPUs" if least.get("cost_per_hour") is None else "at the lowest cost"
        headline = (
            f"{point_words(axes, least)} {'fits' if ok else 'starts'} {how}: {plural(least['num_gpus'], 'GPU')}, "
            f"{least['kv_cache_tokens']:,} KV tokens."
        )
    return headline, [f"{told}.", sentence], "good" if ok else "note"


def _points(axes: Sequence[str], points: Sequence[Mapping[str, Any]], currency: str) -> Iterator[str]:
    yield section("points", "All plans")
    heads = ["Row", *map(short, axes), "GPUs", "KV tokens", "90 % interval", "Concurrency", "Left"]
    heads += ["Cost per hour", "Verdict"] if currency else ["Verdict"]
    rows = []
    for number, point in enumerate(points, 1):
        *figures, _ = sweep_cells(point)
        cells = [cell(str(number), "number"), *(cell(axis_cell(point, axis), "number") for axis in axes)]
        figures += [hourly(point, currency)] if currency else []
        rows.append([*cells, *(cell(text, "number") for text in figures), _verdict(point["verdict"])])
    yield from table(heads, rows)
    reasons = [*reasons_of(points, DOES_NOT_START), *reasons_of(points, UNSAFE)]
    if reasons:
        told = f"Why some do not start or are unsafe: {plural(len(reasons), 'reason')}"
        yield f"<details><summary>{told}</summary><ul>"
        yield "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
        yield "</ul></details>"
    yield "</section>"
