"""Cost, energy and what preemptions took of them, as rows and sentences that all reports share, and as a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from windtunnel.reports.figures import Figure, Trace, log_axis, rounded
from windtunnel.reports.words import NOTHING, count, digits, milliseconds, percent, plural
from windtunnel.sim.metrics.economics import (
    Economics,
    EvictionPair,
    PreemptionCost,
    Victim,
    eviction_log,
    itl_gaps,
)
from windtunnel.sim.metrics.sample import Sample
from windtunnel.sim.records import Records

Rows = Iterator[tuple[str, str]]
Named = Callable[[int], str]
"""The name of a request, from its row in the workload."""

NOTEWORTHY_PART = 0.005
"""Part of P99 ITL from which on it is said to come from preemptions."""
HOW_IT_IS_SPLIT = (
    "Input and output share the cost by time: a step's prompt chunks take what they made it longer by, its decodes "
    "the rest, and idle time goes along. Tokens are those of finished requests, cached input included; what failed "
    "is paid for by them."
)
WHAT_A_STALL_IS = (
    "A stall is the part of a gap between two tokens behind the end of the step in whose decision the request was "
    "preempted. Without preemptions means: the same run with stalls and the time of recomputation taken out, and else "
    "unchanged."
)


def money(value: float | None, currency: str) -> str:
    """An amount with its currency."""
    return NOTHING if value is None else f"{digits(value)} {currency}".rstrip()


def gpu_time(seconds: float | None) -> str:
    """GPU time: seconds, or hours from two on."""
    if seconds is None:
        return NOTHING
    return f"{digits(seconds)} GPU-s" if seconds < 7200 else f"{digits(seconds / 3600)} GPU-h"


def has_bill(stats: Economics) -> bool:
    """Whether a price or a power was given."""
    return stats.cost is not None or stats.energy_kwh is not None


def cost_rows(stats: Economics) -> Rows:
    """What the run cost and drew; nothing without a price and without watts."""
    if not has_bill(stats):
        return
    yield "GPUs" if float(stats.num_gpus).is_integer() else "GPUs, mean", count(stats.num_gpus)
    yield "GPU time held", gpu_time(stats.gpu_seconds)
    yield "GPU time in which steps ran", gpu_time(stats.busy_gpu_seconds)
    if stats.cost is not None:
        for name, value in (
            ("Cost per hour", stats.cost_per_hour),
            ("Cost of the run", stats.cost),
            ("Cost per request", stats.cost_per_request),
            ("Cost per million tokens, blended", stats.cost_per_million_tokens),
            ("All cost per million output tokens", stats.cost_per_million_output_tokens),
            ("Input cost per million tokens", stats.input_cost_per_million_tokens),
            ("Output cost per million tokens", stats.output_cost_per_million_tokens),
        ):
            yield name, money(value, stats.currency)
    if stats.energy_kwh is not None:
        yield "Energy of the run", _kwh(stats.energy_kwh)
        yield "Energy per million tokens", _kwh(stats.energy_kwh_per_million_tokens)
        yield "Energy per output token", f"{_or_nothing(stats.energy_joules_per_output_token)} J"


def _kwh(value: float | None) -> str:
    return f"{_or_nothing(value)} kWh"


def _or_nothing(value: float | None) -> str:
    return NOTHING if value is None else digits(value)


def preemption_rows(stats: Economics) -> Rows:
    """What preemptions cost; nothing without any."""
    own = stats.preemption
    if own is None:
        return
    stalls = own.stalls
    yield "Computed tokens thrown away", f"{own.lost_tokens:,}"
    yield "GPU time of recomputation", gpu_time(own.recomputed_gpu_seconds)
    yield "Share of the time that steps ran", percent(own.recomputed_busy_share)
    if own.recomputed_cost is not None:
        yield "Cost of recomputation", money(own.recomputed_cost, stats.currency)
    if own.recomputed_energy_kwh is not None:
        yield "Energy of recomputation", _kwh(own.recomputed_energy_kwh)
    yield "Preemptions before a first token", f"{own.num_before_first_token:,}"
    yield "Gaps between tokens with a stall", f"{stalls.num_stalled:,} of {stalls.num_gaps:,}"
    yield "Mean, longest stall", f"{milliseconds(stalls.stall_mean_ms)}, {milliseconds(stalls.stall_max_ms)}"
    yield "P99 ITL", milliseconds(stalls.p99_ms)
    yield "P99 ITL without own stalls", milliseconds(stalls.p99_without_stalls_ms)
    yield "P99 ITL without preemptions", milliseconds(stalls.p99_without_preemption_ms)
    yield "Gaps above P99: own stall", percent(stalls.slow_stalled_share)
    yield "Gaps above P99: others recomputed", percent(stalls.slow_recomputing_share)


def pair_words(pair: EvictionPair, named: Named) -> str:
    """``#12 for #55: twice, 9,312 tokens and 584 blocks lost``."""
    whom = "itself" if pair.request == pair.for_request else named(pair.for_request)
    times = "" if pair.num_preemptions == 1 else f"{pair.num_preemptions:,} times, "
    return (
        f"{named(pair.request)} for {whom}: {times}{plural(pair.lost_tokens, 'token')} and "
        f"{plural(pair.lost_blocks, 'block')} lost"
    )


def preemption_sentence(stats: Economics) -> str:
    """What recomputation took, and whether P99 ITL comes from preemptions; empty without any."""
    own = stats.preemption
    if own is None:
        return ""
    return " ".join(part for part in (_recomputation(own, stats.currency), _part_of_p99(own)) if part)


def _recomputation(own: PreemptionCost, currency: str) -> str:
    if own.recomputed_gpu_seconds is None or not own.recomputed_busy_share:
        return "" if own.recomputed_gpu_seconds is None else "By this cost model that made no step longer."
    paid = "" if own.recomputed_cost is None else f", or {money(own.recomputed_cost, currency)}"
    return (
        f"That took {gpu_time(own.recomputed_gpu_seconds)}{paid}: {percent(own.recomputed_busy_share)} of the time in "
        "which steps ran."
    )


def _part_of_p99(own: PreemptionCost) -> str:
    stalls, share = own.stalls, own.stalls.p99_share
    if share is None or stalls.p99_ms is None:
        return ""
    if share < NOTEWORTHY_PART:
        return f"P99 ITL ({milliseconds(stalls.p99_ms)}) does not come from preemptions."
    without = milliseconds(stalls.p99_without_preemption_ms)
    parts = [
        f"{percent(part)} {what}"
        for part, what in (
            (stalls.slow_stalled_share, "are stalls of the preempted themselves"),
            (stalls.slow_recomputing_share, "lie in steps that computed again what others had lost"),
        )
        if part
    ]
    told = f" (of the gaps above it {' and '.join(parts)})" if parts else ""
    return f"P99 ITL is {milliseconds(stalls.p99_ms)}, and {without} with preemptions taken out{told}."


PAIR_HEADS = ("Preempted", "For", "Times", "Tokens lost", "Blocks given back")
VICTIM_HEADS = ("Request", "Preempted", "Tokens lost", "Computed again", "Stalled")


def pair_cells(pair: EvictionPair, named: Named) -> tuple[str, ...]:
    """A row under ``PAIR_HEADS``."""
    whom = "itself" if pair.request == pair.for_request else named(pair.for_request)
    return (
        named(pair.request),
        whom,
        f"{pair.num_preemptions:,}",
        f"{pair.lost_tokens:,}",
        f"{pair.lost_blocks:,}",
    )


def victim_cells(victim: Victim, named: Named) -> tuple[str, ...]:
    """A row under ``VICTIM_HEADS``."""
    return (
        named(victim.request),
        f"{victim.num_preemptions:,}",
        f"{victim.lost_tokens:,}",
        f"{victim.recomputed_tokens:,}",
        milliseconds(1000 * victim.stall_s) if victim.stall_s else "before its first token",
    )


EVICTION_HEADS = (
    "time (s)",
    "replica",
    "preempted",
    "its nth",
    "for",
    "tokens lost",
    "blocks",
    "KV usage before, after",
)


def eviction_lines(records: Records, named: Named) -> Iterator[str]:
    """Every preemption in order of time, as an aligned table; one line that says so where there is none."""
    log = eviction_log(records)
    if not len(log):
        yield "No request was preempted."
        return
    columns = [getattr(log, field.name).tolist() for field in fields(log)]
    rows = [_eviction_cells(named, *row) for row in zip(*columns, strict=True)]
    widths = [max(map(len, column)) for column in zip(EVICTION_HEADS, *rows, strict=True)]
    for row in (EVICTION_HEADS, *rows):
        yield "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))


def _eviction_cells(
    named: Named,
    replica: int,
    time_ns: int,
    step: int,  # noqa: ARG001 -- a column of the log that nobody reads
    request: int,
    number: int,
    for_request: int,
    lost_tokens: int,
    lost_blocks: int,
    before: float,
    after: float,
) -> tuple[str, ...]:
    whom = "itself" if request == for_request else named(for_request)
    usage = f"{100 * before:.1f} % {100 * after:.1f} %"
    own = (named(request), f"{number:,}", whom, f"{lost_tokens:,}", f"{lost_blocks:,}", usage)
    return (f"{time_ns / 1e9:,.6f}", str(replica), *own)


# --- the figure


def stall_figure(records: Records) -> Figure:
    """How many gaps between tokens are longer than so much: as measured, without own stalls, without preemptions."""
    gaps = itl_gaps(records)
    without = gaps.without_preemption()
    samples = [
        ("as it was", gaps.measured(), "@vermillion", "solid"),
        ("without own stalls", gaps.without_stalls(), "@orange", "dash"),
        *([("without preemptions", without, "@blue", "dot")] if without is not None else []),
    ]
    longest = max((sample.percentile(100) or 0.0 for _, sample, _, _ in samples), default=0.0)
    unit_ns, unit = (1e9, "s") if longest > 2e9 else (1e6, "ms")
    drawn = [_tail(name, sample, colour, dash, unit_ns, unit) for name, sample, colour, dash in samples if sample.count]
    measured = samples[0][1]
    x = [value for trace in drawn for value in trace["x"] if value > 0]
    y = [value for trace in drawn for value in trace["y"]]
    if measured.count:
        drawn.append(_one_percent(min(x, default=1.0), max(x, default=1.0)))
    layout: dict[str, Any] = {
        "xaxis": {"title": f"gap between two tokens ({unit})", **log_axis(min(x, default=1.0), max(x, default=1.0))},
        "yaxis": {"title": "longer gaps (%)", **log_axis(min(y, default=0.01), 100.0)},
        "hovermode": "closest",
    }
    caption = (
        f"The share of the {count(measured.count)} gaps between tokens that is longer, on logarithmic axes; the dashed "
        "line at 1 % is where P99 is read. Own stalls are those of preempted requests themselves; without preemptions "
        "the steps are also shorter by what they computed again."
    )
    return Figure("stalls", "The stalls' part in ITL", caption, drawn, layout)


def _tail(name: str, sample: Sample, colour: str, dash: str, unit_ns: float, unit: str) -> Trace:
    """Share of the values above each of many quantiles, ever finer towards the largest, and that of the largest."""
    shares = np.unique(np.concatenate((np.linspace(1, 0.1, 40), np.logspace(-1, -6, 120))))[::-1]
    shares = shares[shares > 1 / sample.count]
    values = [(sample.percentile(100 * (1 - share)) or 0.0) / unit_ns for share in shares.tolist()]
    shares, values = np.append(shares, 1 / sample.count), [*values, (sample.percentile(100) or 0.0) / unit_ns]
    line = {"color": colour, "width": 2, "dash": dash}
    return {
        "x": rounded(values), "y": rounded(100 * shares), "mode": "lines", "name": name, "line": line,
        "hovertemplate": f"{name}: %{{y:.3~g}} % longer than %{{x:,.4~r}} {unit}<extra></extra>",
    }  # fmt: skip


def _one_percent(low: float, high: float) -> Trace:
    line = {"color": "@text", "width": 1.2, "dash": "dash"}
    ends = rounded([low, high])
    return {"x": ends, "y": [1.0, 1.0], "mode": "lines", "name": "1 % (P99)", "line": line, "hoverinfo": "skip"}
