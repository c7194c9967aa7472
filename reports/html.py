"""The report as one HTML file: it works offline and shows what happened, from the answer down to single requests."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np

from windtunnel.reports.answer import answer
from windtunnel.reports.causes import Causes, worst_requests
from windtunnel.reports.context import ReportContext
from windtunnel.reports.economics import (
    HOW_IT_IS_SPLIT,
    PAIR_HEADS,
    VICTIM_HEADS,
    WHAT_A_STALL_IS,
    cost_rows,
    has_bill,
    money,
    pair_cells,
    preemption_rows,
    stall_figure,
    victim_cells,
)
from windtunnel.reports.figures import Axis, Figure, figures, time_axis
from windtunnel.reports.fleet import (
    event_table,
    fleet_figures,
    fleet_rows,
    pool_table,
    replica_table,
)
from windtunnel.reports.page import (
    answer_box,
    badge,
    calibration_box,
    cell,
    cell_html,
    code,
    figure,
    folded_table,
    glossary,
    header,
    how_it_was_run,
    navigation,
    section,
    simulated_with,
    table,
    warning_box,
    write_page,
)
from windtunnel.reports.tenants import tenant_heads, tenant_rows, tenant_sentences, tenants_figure
from windtunnel.reports.text import measured_value, render_text
from windtunnel.reports.transfers import transfer_rows, transfer_sentences
from windtunnel.reports.words import NOTHING, count, milliseconds, nanoseconds, percent
from windtunnel.sim.metrics import LatencyStats, Summary
from windtunnel.sim.metrics.economics import EvictionLog, eviction_log
from windtunnel.sim.metrics.summary import percent_word
from windtunnel.sim.records import Records

NUM_WORST = 20
NUM_SHOWN = 5
"""Rows of a long table that are always shown; the others are behind a fold."""
NUM_EVICTIONS = 12
NUM_REPLICAS = 10

SECTIONS = (
    ("load", "KV cache, queue and steps"),
    ("latency", "Latencies"),
    ("preemptions", "Preemptions"),
    ("tenants", "Tenants"),
    ("fleet", "Fleet"),
    ("work", "Where the work went"),
    ("cost", "Cost and energy"),
    ("worst", "Worst requests"),
    ("how", "How it was run"),
    ("numbers", "All numbers"),
    ("glossary", "Glossary"),
)


def write_html(path: str | Path, records: Records, summary: Summary, context: ReportContext) -> None:
    """Write the report of a run: one file, about 5 MB of which plotly.js is most, that needs no network.

    The same run gives the same bytes.  Raises OSError if the file cannot be written; then none is left behind.
    """
    drawn = _drawn(records, summary, context)
    write_page(
        path,
        context.title,
        _body(records, summary, context, drawn),
        skip_to="load",
        head=header(context),
        foot=simulated_with(context.version),
        drawn=drawn,
    )


def _drawn(records: Records, summary: Summary, context: ReportContext) -> list[Figure]:
    drawn = figures(records, summary)
    if summary.economics.preemption is not None:
        drawn.append(stall_figure(records))
    if summary.tenants is not None and context.tenant is not None:
        drawn.append(tenants_figure(records, context.tenants, context.tenant))
    return [*drawn, *fleet_figures(records)]


def _body(records: Records, summary: Summary, context: ReportContext, drawn: list[Figure]) -> Iterator[str]:
    yield from _answer(records, summary, context)
    yield from _navigation(summary)
    yield from _load(drawn)
    yield from _latency(drawn, summary)
    yield from _preemptions(records, summary, context, drawn)
    yield from _tenants(summary, drawn)
    yield from _fleet(summary, drawn)
    yield from _work(summary)
    yield from _cost(summary)
    yield from _worst(records, context)
    yield from _how(context)
    yield from _numbers(summary, context)
    yield from glossary()


# --- first screen


def _answer(records: Records, summary: Summary, context: ReportContext) -> Iterator[str]:
    yield from answer_box(*answer(records, summary))
    yield from warning_box((*context.warnings, *summary.warnings), calibrated=context.calibrated)
    yield from calibration_box(context)
    yield f'<ul class="cards">{"".join(_cards(summary))}</ul>'
    yield from _objectives(summary)


def _cards(summary: Summary) -> Iterator[str]:
    kv, preemption, load = summary.kv, summary.preemption, summary.load
    yield _card("TTFT, median", milliseconds(summary.ttft.median_ms), _high(summary.ttft))
    yield _card("ITL, median", milliseconds(summary.itl.median_ms), _high(summary.itl))
    yield _card("E2EL, median", milliseconds(summary.e2el.median_ms), _high(summary.e2el))
    yield _card(
        "Output", f"{count(summary.output_throughput)} tok/s", f"{count(summary.request_throughput)} requests/s"
    )
    yield _card("Requests", f"{summary.completed:,}", f"finished, {summary.failed:,} failed")
    yield _card("In flight, mean", count(load.in_flight_mean), f"peak {summary.peak_concurrent_requests:,}")
    yield _card("KV usage, peak", percent(kv.usage_peak), f"mean {percent(kv.usage_mean)}")
    lost = (
        f"{preemption.recomputed_prefill_tokens:,} tokens recomputed"
        if preemption.num_preemptions
        else "nothing recomputed"
    )
    yield _card("Preemptions", f"{preemption.num_preemptions:,}", lost)
    cost = summary.economics
    if cost.cost is not None:
        per_million = f"{money(cost.cost_per_million_tokens, cost.currency)} per million tokens"
        yield _card("Cost per hour", money(cost.cost_per_hour, cost.currency), per_million)
    rho = "rho unknown" if load.utilisation is None else f"rho {load.utilisation:.2f}"
    yield _card("Verdict", summary.stability.verdict.replace("_", " "), rho)
    if summary.slo:
        kept = sum(result.passed for result in summary.slo)
        yield _card("Objectives", "kept" if summary.slo_passed else "missed", f"{kept} of {len(summary.slo)} kept")
    if summary.goodput is not None:
        yield _card(
            "Goodput", f"{count(summary.goodput.request_goodput)}/s", f"{percent(summary.goodput.good_share)} good"
        )


def _card(name: str, value: str, more: str) -> str:
    return (
        f'<li><span class="name">{escape(name)}</span><span class="value">{escape(value)}</span>'
        f'<span class="more">{escape(more)}</span></li>'
    )


def _high(stats: LatencyStats) -> str:
    if not stats.percentiles_ms:
        return f"max {milliseconds(stats.max_ms)}"
    level, value = stats.percentiles_ms[-1]
    return f"P{percent_word(level)} {milliseconds(value)}"


def _objectives(summary: Summary) -> Iterator[str]:
    if not summary.slo:
        return
    has_notes = any(result.note for result in summary.slo)
    rows = [
        (
            code(result.slo.text),
            cell(measured_value(result), "number"),
            cell_html(badge("good", "✓ kept") if result.passed else badge("bad", "✗ missed")),
            *([cell(result.note, "words")] if has_notes else []),
        )
        for result in summary.slo
    ]
    heads = ("Objective", "Measured", "Result", *(("Note",) if has_notes else ()))
    yield from table(heads, rows, "stack snug")


def _navigation(summary: Summary) -> Iterator[str]:
    is_there = {
        "preemptions": summary.preemption.num_preemptions > 0,
        "tenants": summary.tenants is not None,
        "fleet": summary.fleet is not None,
        "work": _has_waste(summary),
        "cost": has_bill(summary.economics),
    }
    yield from navigation([item for item in SECTIONS if is_there.get(item[0], True)])


# --- figures


def _load(drawn: list[Figure]) -> Iterator[str]:
    yield section("load", "KV cache, queue and steps")
    yield '<p class="lead">With a mouse, drag across a figure to zoom in; a double click shows all of it again.</p>'
    yield from (figure(each) for each in drawn if each.name in ("kv", "queue", "tokens"))
    yield "</section>"


def _latency(drawn: list[Figure], summary: Summary) -> Iterator[str]:
    yield section("latency", "Latencies")
    if not summary.stability.is_steady:
        yield (
            f'<p class="lead">{badge("bad", "not a steady state")} '
            "These distributions depend on how long the run was.</p>"
        )
    yield from (figure(each) for each in drawn if each.name == "over-time")
    yield f'<div class="pair">{"".join(figure(each) for each in drawn if each.half)}</div>\n</section>'


# --- tables


def _preemptions(records: Records, summary: Summary, context: ReportContext, drawn: list[Figure]) -> Iterator[str]:
    if not summary.preemption.num_preemptions:
        return
    yield section("preemptions", "Preemptions")
    yield from (figure(each) for each in drawn if each.name in ("preemptions", "stalls"))
    yield from _what_preemptions_cost(summary, context)
    rows = _evictions(records, context)
    total = summary.preemption.num_preemptions
    which = "All of them" if total <= NUM_EVICTIONS else f"The {NUM_EVICTIONS} of {total:,} that threw away the most"
    yield f'<h3>One by one</h3><p class="lead">{which}, in order of time.</p>'
    heads = ("Time", "Preempted", "Its nth", "For", "Tokens lost", "Blocks given back", "KV usage before", "after")
    yield from folded_table(heads, rows, "stack snug", num_shown=NUM_SHOWN)
    yield "</section>"


def _what_preemptions_cost(summary: Summary, context: ReportContext) -> Iterator[str]:
    """The bill, and who lost the most for whom."""
    own = summary.economics.preemption
    if own is None:
        return
    yield f'<h3>What they cost</h3><p class="lead">{escape(WHAT_A_STALL_IS)}</p>'
    rows = [(cell(name), cell(value, "number")) for name, value in preemption_rows(summary.economics)]
    yield from table(("What", "Value"), rows, "snug")
    yield '<h3>Who lost the most for whom</h3><p class="lead">Over the whole run.</p>'
    pairs = [_cells(pair_cells(pair, context.label), num_words=2) for pair in own.pairs]
    yield from folded_table(PAIR_HEADS, pairs, "stack snug", num_shown=NUM_SHOWN)
    yield '<h3>Who lost the most</h3><p class="lead">Requests, with all that they lost.</p>'
    victims = [_cells(victim_cells(victim, context.label), num_words=1) for victim in own.victims]
    yield from folded_table(VICTIM_HEADS, victims, "stack snug", num_shown=NUM_SHOWN)


def _cells(texts: tuple[str, ...], num_words: int) -> tuple[str, ...]:
    """Cells of which the first are words and the others numbers."""
    return tuple(cell(text) if k < num_words else cell(text, "number") for k, text in enumerate(texts))


def _evictions(records: Records, context: ReportContext) -> list[tuple[str, ...]]:
    """The preemptions that threw away the most, in order of time."""
    axis, log = time_axis(records), eviction_log(records)
    most = np.sort(np.argsort(-log.lost_tokens, kind="stable")[:NUM_EVICTIONS])
    return [_eviction(log, k, axis, context) for k in most.tolist()]


def _eviction(log: EvictionLog, k: int, axis: Axis, context: ReportContext) -> tuple[str, ...]:
    victim, needy = int(log.request[k]), int(log.for_request[k])
    return (
        cell(axis.say(int(log.time_ns[k])), "number"),
        cell(context.label(victim)),
        cell(f"{int(log.number[k]):,}", "number"),
        cell("itself" if needy == victim else context.label(needy)),
        cell(f"{int(log.lost_tokens[k]):,}", "number"),
        cell(f"{int(log.lost_blocks[k]):,}", "number"),
        cell(percent(float(log.usage_before[k])), "number"),
        cell(percent(float(log.usage_after[k])), "number"),
    )


def _cost(summary: Summary) -> Iterator[str]:
    """Money and energy; left out without a price and without watts."""
    if not has_bill(summary.economics):
        return
    yield section("cost", "Cost and energy")
    yield '<p class="lead">By the price and the watts that were given; nothing is assumed.</p>'
    rows = [(cell(name), cell(value, "number")) for name, value in cost_rows(summary.economics)]
    yield from table(("What", "Value"), rows, "snug")
    yield f"<p>{escape(HOW_IT_IS_SPLIT)}</p>"
    yield "</section>"


def _tenants(summary: Summary, drawn: list[Figure]) -> Iterator[str]:
    if summary.tenants is None:
        return
    yield section("tenants", "Tenants")
    yield f'<p class="lead">{escape(" ".join(tenant_sentences(summary.tenants)))}</p>'
    yield from (figure(each) for each in drawn if each.name == "tenants")
    rows = [(cell(row[0]), *(cell(text, "number") for text in row[1:])) for row in tenant_rows(summary)]
    yield from table(tenant_heads(summary), rows, "stack")
    yield "</section>"


def _fleet(summary: Summary, drawn: list[Figure]) -> Iterator[str]:
    of = summary.fleet
    if of is None:
        return
    yield section("fleet", "Fleet")
    yield from (figure(each) for each in drawn if each.name in ("replicas", "replica-load"))
    rows = [(cell(name), cell(value, "number")) for name, value in fleet_rows(of)]
    yield from table(("What", "Value"), rows, "snug")
    shown = (("Pools", pool_table(summary)), ("Replicas", replica_table(summary)), ("Events", event_table(summary)))
    for title, made in shown:
        if made.rows:
            yield f"<h3>{title}</h3>"
            cells = [
                [cell(text, "" if column < made.num_words else "number") for column, text in enumerate(row)]
                for row in made.rows
            ]
            yield from folded_table(made.heads, cells, "stack", num_shown=NUM_REPLICAS)
    yield from _transfers(summary)
    yield "</section>"


def _transfers(summary: Summary) -> Iterator[str]:
    of = summary.transfers
    if of is None:
        return
    yield "<h3>From prefill to decode</h3>"
    yield f'<p class="lead">{escape(" ".join(transfer_sentences(of)))}</p>'
    rows = [(cell(name), cell(value, "number")) for name, value in transfer_rows(of)]
    yield from table(("What", "Value"), rows, "snug")


def _has_waste(summary: Summary) -> bool:
    return summary.waste.useful_tokens < summary.waste.computed_tokens or summary.speculation is not None


def _work(summary: Summary) -> Iterator[str]:
    """What became of the computed tokens; left out where all were of use."""
    if not _has_waste(summary):
        return
    waste = summary.waste
    yield section("work", "Where the work went")
    yield '<p class="lead">Tokens that the steps computed, and what they were good for.</p>'
    whose = "whose clients gave up" + ("" if summary.fleet is None else ", or whose replicas went away")
    kinds = (
        ("useful", waste.useful_tokens, "prompts, and output tokens that were fed back"),
        ("recomputed", waste.recomputed_tokens, "lost to preemption and computed again"),
        ("padding", waste.padding_tokens, "fills prompts up to the longest of their batch"),
        ("stragglers", waste.straggler_tokens, "slots of complete answers that wait for the longest of their batch"),
        ("abandoned", waste.abandoned_tokens, f"computed for requests {whose}"),
        ("rejected drafts", waste.rejected_draft_tokens, "draft tokens that the model did not agree with"),
    )
    rows = [
        (cell(name), cell(f"{amount:,}", "number"), cell(percent(amount / waste.computed_tokens), "number"), cell(what))
        for name, amount, what in kinds
        if amount
    ]
    yield from table(("Tokens", "Number", "Share", "What they are"), rows, "stack")
    yield from (f"<p>{escape(sentence)}</p>" for sentence in _about_slots(summary))
    yield "</section>"


def _about_slots(summary: Summary) -> Iterator[str]:
    waste, slots, drafts = summary.waste, summary.slots, summary.speculation
    if waste.padding_tokens or waste.straggler_tokens:
        yield (
            f"A held slot yielded {count(slots.efficiency)} tokens a step: {count(slots.output_throughput)} of the "
            f"{count(slots.slot_throughput)} tokens/s that {count(slots.slots_mean)} slots could yield."
        )
    if summary.formation_wait.mean_ms:
        yield (
            f"Requests waited {milliseconds(summary.formation_wait.mean_ms)} for company on average while the engine "
            "computed nothing."
        )
    if drafts is not None:
        yield (
            f"{drafts.num_drafts:,} drafts were verified; {percent(drafts.acceptance_rate)} of their tokens held, so a "
            f"draft yielded {count(drafts.acceptance_length)} tokens."
        )


def _worst(records: Records, context: ReportContext) -> Iterator[str]:
    yield section("worst", "Worst requests, and why")
    causes = Causes(records)
    tables = (
        ("e2el", "Longest from sending to the last token", "Where its time went", causes.why),
        ("ttft", "Longest until the first token", "Where the time until its first token went", causes.why_first_token),
    )
    for name, title, why, explain in tables:
        worst = worst_requests(records, name, NUM_WORST).tolist()
        rows = [_request(records, row, explain(row), context) for row in worst]
        heads = ("Request", "Sent", "Prompt", "Output", "TTFT", "E2EL", why)
        yield f"<h3>{title}</h3>"
        yield from folded_table(heads, rows, num_shown=NUM_SHOWN)
    yield "</section>"


def _request(records: Records, row: int, why: str, context: ReportContext) -> tuple[str, ...]:
    table = records.requests
    sent = int(table.arrival_ns[row])

    def since(end_ns: int) -> str:
        return NOTHING if end_ns < 0 else nanoseconds(end_ns - sent)

    return (
        cell(context.label(row)),
        cell(time_axis(records).say(sent), "number"),
        cell(f"{int(table.num_prompt_tokens[row]):,}", "number"),
        cell(f"{int(table.num_output_tokens[row]):,}", "number"),
        cell(since(int(table.first_token_ns[row])), "number"),
        cell(since(int(table.finish_ns[row])), "number"),
        cell(why, "words"),
    )


def _how(context: ReportContext) -> Iterator[str]:
    yield section("how", "How it was run")
    yield from how_it_was_run(context)
    yield "</section>"


def _numbers(summary: Summary, context: ReportContext) -> Iterator[str]:
    yield section("numbers", "All numbers")
    yield '<p class="lead">The rows of vllm bench serve, with the same names and definitions, and then our own.</p>'
    yield f"<details><summary>Show the table</summary><pre>{escape(render_text(summary, context))}</pre></details>"
    yield "</section>"
