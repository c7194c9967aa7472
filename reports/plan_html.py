"""A plan as one HTML file that works offline: the answer for a manager, below it what an engineer asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from windtunnel.reports import plan_words as words
from windtunnel.reports.figures import Figure
from windtunnel.reports.page import (
    answer_box,
    cards,
    cell,
    code,
    evidence_badge,
    figure,
    folded_table,
    glossary,
    masthead,
    navigation,
    section,
    simulated_with,
    stated_box,
    table,
    write_page,
)
from windtunnel.reports.plan_figures import plan_figures
from windtunnel.reports.plan_words import Told
from windtunnel.reports.words import plural

SHOWN_CANDIDATES = 15
SHOWN_PRUNED = 12
STYLES = ("page.css", "plan.css")


def write_plan_html(path: str | Path, told: Told) -> None:
    """Write the report; the same plan gives the same bytes.  Raises OSError if it cannot be written."""
    drawn = plan_figures(told)
    write_page(
        path,
        f"Plan for {words.title(told)}",
        _body(told, {each.name: each for each in drawn}),
        skip_to="choice",
        head=_header(told),
        foot=simulated_with(told["windtunnel_version"]),
        drawn=drawn,
        styles=STYLES,
    )


def _body(told: Told, by_name: dict[str, Figure]) -> Iterator[str]:
    best = told["recommended"]
    yield from answer_box(words.headline(told), words.first_sentences(told), words.tone(told))
    if best is not None:
        yield from _cards(told)
    yield from _warnings(told)
    yield from _stated(told)
    yield from navigation(_sections(told))
    yield from _choice(told, by_name)
    if best is not None:
        yield from _cost(told)
        yield from _room(told, by_name)
        yield from _risk(told)
        yield from _command(told)
    yield from _load(told, by_name)
    yield from _candidates(told, by_name)
    yield from _pruned(told)
    yield from _how(told)
    yield from glossary()


def _header(told: Told) -> Iterator[str]:
    best = told["recommended"]
    asked = ", ".join(told["asked"]["objectives"])
    mark = ""
    if best is not None:
        mark = evidence_badge(best["evidence"])
    yield from masthead(f"Plan for {words.title(told)}", f"{escape(asked)} · {escape(told['asked']['engine'])} {mark}")


def _sections(told: Told) -> Iterator[tuple[str, str]]:
    yield "choice", "The choice"
    if told["recommended"] is not None:
        yield "cost", "Cost"
        yield "room", "Room"
        yield "risk", "Risk"
        yield "command", "Command line"
    yield "load", "Peak and mean"
    yield "candidates", "Candidates"
    if words.pruned_rows(told):
        yield "pruned", "Not the answer"
    yield "how", "How it was found"
    yield "glossary", "Glossary"


def _cards(told: Told) -> Iterator[str]:
    """Answer, cost and risk as numbers."""
    best = told["recommended"]
    bill, extra, room = best["bill"], best["redundant"], best["headroom"]
    number = plural(best["num_replicas"] + told["spare_replicas"], "replica")
    items = [("GPUs", f"{best['num_gpus']:,}", f"{best['gpu']}, {number}")]
    if told["has_prices"]:
        items += [
            ("An hour", words.money(best["cost_per_hour"], told), f"{words.money(bill['per_month'], told)} a month"),
            (
                "A million tokens",
                words.money(bill["per_million_tokens"], told),
                f"in {words.money(bill['per_million_input_tokens'], told)}, out "
                f"{words.money(bill['per_million_output_tokens'], told)}",
            ),
            ("N+1", words.money(extra["cost_per_hour"], told), f"{plural(extra['num_replicas'], 'replica')}, an hour"),
        ]
    items.append(("Load that it carries", f"{room['mean']:.2f} x", f"95 %: {_bounds(room)}"))
    items.append(("Binds", str(best["binding"]), "at the most that it carries"))
    if bill["watts"] is not None:
        items.append(("Power", f"{bill['watts'] / 1000:,.1f} kW", f"{bill['kwh_per_month']:,.0f} kWh a month"))
    yield cards(items)


def _bounds(room: Told) -> str:
    if room["low"] is None or room["high"] is None:
        return "one replication"
    return f"{max(0.0, room['low']):.2f} to {room['high']:.2f}"


def _warnings(told: Told) -> Iterator[str]:
    shown = [*told["warnings"], *words.apart_sentence(told)]
    if shown:
        yield f'<div class="warnings" role="note">{"".join(f"<p>{escape(text)}</p>" for text in shown)}</div>'


def _stated(told: Told) -> Iterator[str]:
    best = told["recommended"]
    if best is not None:
        yield from stated_box(best["statement"], best["evidence"])


def _choice(told: Told, drawn: dict[str, Figure]) -> Iterator[str]:
    yield section("choice", "The choice")
    if told["runners_up"]:
        yield '<p class="lead">Fleets that held in every simulation of them, cheapest first.</p>'
        heads = words.RUNNER_UP_HEADS
        rows = [
            [cell(what), cell(knobs), cell(price, "number"), cell(values), cell(verdict)]
            for what, knobs, price, values, verdict in words.runner_up_rows(told)
        ]
        yield from table(heads, rows)
    for name in ("pareto", "curves"):
        if name in drawn:
            yield figure(drawn[name])
    yield "</section>"


def _cost(told: Told) -> Iterator[str]:
    yield section("cost", "Cost")
    yield (
        '<p class="lead">Tokens are those of the workload at its mean rate. Input and output share the bill as their '
        "share of the GPUs' busy time: what prompt chunks add to the steps is the input's.</p>"
    )
    rows = [[cell(name), cell(one, "number"), cell(more, "number")] for name, one, more in words.cost_rows(told)]
    yield from table(words.cost_heads(told), rows, "snug stack")
    yield "</section>"


def _room(told: Told, drawn: dict[str, Figure]) -> Iterator[str]:
    yield section("room", "Room")
    yield f'<div class="pair">{figure(drawn["room"])}{figure(drawn["time"])}</div>'
    rows = [[cell(name), cell(value, "number"), cell(remark)] for name, value, remark in words.room_rows(told)]
    yield from table(("What", "How much", "Remark"), rows)
    yield "</section>"


def _risk(told: Told) -> Iterator[str]:
    yield section("risk", "Risk")
    rows = [[cell(case), cell(consequence)] for case, consequence in words.risk_rows(told)]
    yield from table(("Case", "Consequence"), rows)
    yield "</section>"


def _command(told: Told) -> Iterator[str]:
    yield section("command", "Command line")
    number = told["recommended"]["num_replicas"] + told["spare_replicas"]
    yield f'<p class="lead">Each of the {plural(number, "replica")}, behind one router:</p>'
    yield f"<pre>{escape(told['serve_command'])}</pre>"
    yield "<details><summary>The same as a scenario, for windtunnel simulate</summary>"
    yield f"<pre>{escape(told['scenario'])}</pre></details>\n</section>"


def _load(told: Told, drawn: dict[str, Figure]) -> Iterator[str]:
    yield section("load", "Peak and mean")
    if "growth" in drawn:
        yield f'<div class="pair">{figure(drawn["load"])}{figure(drawn["growth"])}</div>'
        yield f'<p class="lead">{escape(words.growth_sentence(told))}</p>'
    else:
        yield figure(drawn["load"])
    yield from table(("What", "Value"), [[cell(name), cell(value)] for name, value in words.peak_rows(told)])
    if told["growth"]:
        yield "<h3>Growth</h3>"
        rows = [[*(cell(each, "number") for each in row[:-1]), cell(row[-1])] for row in words.growth_rows(told)]
        heads = ("Month", "Load", "Replicas", "GPUs", "Cost an hour", "Cheaper then")
        yield from folded_table(heads, rows, num_shown=13)
    yield "</section>"


def _candidates(told: Told, drawn: dict[str, Figure]) -> Iterator[str]:
    yield section("candidates", "Candidates")
    if not told["candidates"]:
        yield '<p class="lead">None was simulated under load.</p>\n</section>'
        return
    yield (
        '<p class="lead">How many replicas each takes, with the 95 % interval where it was replicated; knobs were '
        "turned one after the other on the kinds that are near the best.</p>"
    )
    if "candidates" in drawn:
        yield figure(drawn["candidates"])
    rows = []
    for row in told["candidates"]:
        first, *numbers, binds, verdict = words.candidate_cells(told, row)
        rows.append([cell(first), *(cell(each, "number") for each in numbers), cell(binds), cell(verdict)])
    yield from folded_table(words.candidate_heads(told), rows, num_shown=SHOWN_CANDIDATES)
    effectless = words.effectless_rows(told)
    if effectless:
        yield f"<details><summary>{plural(len(effectless), 'choice')} that changes nothing</summary>"
        yield from table(("What", "Why"), [[cell(what), cell(reason)] for what, reason in effectless])
        yield "</details>"
    yield "</section>"


def _pruned(told: Told) -> Iterator[str]:
    rows: Sequence[Sequence[str]] = words.pruned_rows(told)
    if not rows:
        return
    yield section("pruned", "Not the answer")
    made = [[cell(what), cell(kind), cell(reason)] for what, kind, reason in rows]
    yield from folded_table(("Deployment", "Kind", "Why"), made, num_shown=SHOWN_PRUNED)
    yield "</section>"


def _how(told: Told) -> Iterator[str]:
    yield section("how", "How it was found")
    yield f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in words.how_sentences(told))}</ul>"
    yield from table(("What", "Value"), [[cell(name), cell(value)] for name, value in words.asked_rows(told)])
    if told["notes"]:
        yield f"<h3>Notes</h3><ul>{''.join(f'<li>{escape(text)}</li>' for text in told['notes'])}</ul>"
    if told["reproduce"]:
        yield f"<h3>Again</h3><pre>{escape(told['reproduce'])}</pre>"
    rows = [[code("windtunnel"), cell(told["windtunnel_version"])], [code("seed"), cell(str(told["search"]["seed"]))]]
    yield from table(("What", "Value"), rows, "snug")
    yield "</section>"
