"""A comparison as text and as Markdown: the answer, and one table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from textwrap import wrap
from typing import NamedTuple

from windtunnel.reports.comparison_answer import ComparisonContext, answer, changed
from windtunnel.reports.text import header
from windtunnel.reports.words import NOTHING
from windtunnel.sim.metrics.comparison import ComparedRun, ComparedRuns, Relation, metric

WIDTH = 120
PROSE_WIDTH = 100
LONGEST_VALUE = 24
"""Of a distribution of lengths, whose measure stands beside it."""
NARROWEST = 10
"""Of a column; headings are broken over lines to fit."""

_ALWAYS = (
    "completed",
    "duration",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "mean_itl_ms",
    "p99_itl_ms",
    "mean_e2el_ms",
    "p99_e2el_ms",
    "mean_client_queue_time_ms",
    "mean_queue_time_ms",
    "utilisation",
    "batch_size_mean",
    "num_running_peak",
    "kv_usage_mean",
    "kv_usage_peak",
    "preemptions",
    "prefix_cache_hit_rate",
    "slot_efficiency",
    "slots_mean",
    "mean_prefill_batch_size",
)
"""Rows that are left out only where no run has them."""
_WHERE_ANY = (
    "failed",
    "recomputed_prefill_tokens",
    "padding_tokens",
    "straggler_tokens",
    "rejected_draft_tokens",
    "wasted_token_share",
    "mean_batch_formation_wait_ms",
    "swapped_out_blocks",
    "swapped_in_blocks",
)
"""Rows that are also left out where all are 0."""
_BESIDE_METRICS = (
    "utilisation",
    "preemptions",
    "recomputed_prefill_tokens",
    "wasted_token_share",
    "slot_efficiency",
)
"""Columns besides those of the metrics in a table of one row a run."""


class Cell(NamedTuple):
    """A value, and how it differs from the baseline's."""

    value: str
    change: str = ""
    tone: str = ""
    """good, bad or nothing: whether the change is one for the better."""
    is_verdict: bool = False


def render_text(runs: ComparedRuns, relations: Sequence[Relation], context: ComparisonContext) -> str:
    """The whole text, ending in a newline: what was compared, the answer, and the table."""
    said = answer(runs, relations)
    lines = [*header(context.common), ""]
    for sentence in (said.headline, *said.sentences):
        lines += wrap(sentence, PROSE_WIDTH, subsequent_indent="  ")
    lines += ["", *(_by_variant(runs) if runs.axis is None else _by_run(runs)), ""]
    if len(runs.variants) > 1:
        lines += wrap(f"Changes are against {runs.baseline}.", PROSE_WIDTH)
    for warning in context.common.warnings:
        lines += wrap(f"WARNING: {warning}", PROSE_WIDTH, subsequent_indent="         ")
    return "\n".join(line.rstrip() for line in lines).rstrip("\n") + "\n"


def render_markdown(runs: ComparedRuns, relations: Sequence[Relation], context: ComparisonContext) -> str:
    """The same as Markdown, ending in a newline."""
    said = answer(runs, relations)
    shared = context.common
    what = " on ".join(part for part in (shared.model, shared.gpu) if part)
    facts = [
        what,
        shared.engine and f"{shared.engine} (simulated)",
        f"cost model {shared.cost_model}, {shared.calibration}",
    ]
    parts = [
        [f"### {shared.title}"],
        [f"**{said.headline}**"],
        [f"- {sentence}" for sentence in said.sentences],
        ["; ".join(fact for fact in facts if fact) + "."],
        list(_markdown_table(*(variant_table(runs) if runs.axis is None else run_table(runs)))),
        [f"Changes are against {runs.baseline}."] if len(runs.variants) > 1 else [],
        [f"> **Warning:** {text}" for text in shared.warnings],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


# --- what the tables hold


def variant_table(runs: ComparedRuns) -> tuple[list[str], list[list[Cell]]]:
    """A row a number, a column a variant; for one place."""
    heads = ["", *(f"{name} (baseline)" if _is_base(runs, name) else name for name in runs.variants)]
    rows = [[Cell("Verdict"), *(Cell(run.verdict, is_verdict=True) for run in runs.runs)]]
    rows += [[Cell(metric(key).label), *(cell(runs, run, key) for run in runs.runs)] for key in shown_keys(runs)]
    if any(_objectives(run) for run in runs.runs):
        rows.append([Cell("Objectives kept"), *(Cell(_objectives(run) or NOTHING) for run in runs.runs)])
    return heads, rows


def _is_base(runs: ComparedRuns, name: str) -> bool:
    return name == runs.baseline and len(runs.variants) > 1


def run_table(runs: ComparedRuns) -> tuple[list[str], list[list[Cell]]]:
    """A row a run, with its place on the axis and its variant; a column a number."""
    axis = runs.axis
    places = [[Cell(axis.values[run.place]) for run in runs.runs]] if axis is not None else []
    heads = [axis.key] if axis is not None else []
    if axis is not None and axis.positions is not None and axis.label != axis.key:
        heads.append(axis.label)
        places[0] = [Cell(_shortened(each.value)) for each in places[0]]
        places.append([Cell(f"{axis.positions[run.place]:,.2f}") for run in runs.runs])
    if len(runs.variants) > 1 or axis is None:
        heads.append("Variant")
        places.append([Cell(run.variant) for run in runs.runs])
    heads.append("Verdict")
    places.append([Cell(run.verdict, is_verdict=True) for run in runs.runs])
    columns = run_columns(runs)
    rows = [
        [*(column[number] for column in places), *(_cell_of_run(runs, run, key) for key in columns)]
        for number, run in enumerate(runs.runs)
    ]
    return [*heads, *(metric(key).label for key in columns)], rows


def _shortened(value: str) -> str:
    return value if len(value) <= LONGEST_VALUE else f"{value[: LONGEST_VALUE - 1]}…"


def _cell_of_run(runs: ComparedRuns, run: ComparedRun, key: str) -> Cell:
    """Only what the comparison is about is told with its change: a row has no room for more."""
    made = cell(runs, run, key)
    return made if key in runs.metrics else Cell(made.value)


def run_columns(runs: ComparedRuns) -> list[str]:
    """The metrics, and what explains them."""
    beside = [key for key in _BESIDE_METRICS if key not in runs.metrics and _is_told(runs, key)]
    return [*runs.metrics, *(key for key in beside if key not in _WHERE_ANY or any(runs.numbers(key)))]


def shown_keys(runs: ComparedRuns) -> list[str]:
    """Numbers that are worth a row: those that some run has, and of waste those that are not all 0."""
    high = _highest_percentile(runs)
    always = [key.replace("p99", high) for key in _ALWAYS]
    first = [key for key in runs.metrics if key not in (*always, *_WHERE_ANY)]
    told = [key for key in (*first, *always) if _is_told(runs, key)]
    return [*told, *(key for key in _WHERE_ANY if any(runs.numbers(key)))]


def _highest_percentile(runs: ComparedRuns) -> str:
    """``p99`` if the runs have it, else the highest that they have."""
    keys = [key for run in runs.runs for key in run.summary or {}]
    found = {found[1] for key in keys if (found := re.fullmatch(r"(p[\d.]+)_ttft_ms", key))}
    return "p99" if "p99" in found or not found else max(found, key=lambda name: float(name[1:]))


def _is_told(runs: ComparedRuns, key: str) -> bool:
    return bool(runs.numbers(key))


def cell(runs: ComparedRuns, run: ComparedRun, key: str) -> Cell:
    """A number of a run for a table, and its change from the baseline."""
    value = run.number(key)
    if value is None:
        return Cell(NOTHING)
    change = runs.change(run, key)
    return Cell(_shown(key, value), changed(change), _tone(key, change))


def _shown(key: str, value: float) -> str:
    value = 100 * value if metric(key).unit == "%" else value
    is_whole = value.is_integer() and metric(key).unit == ""
    return f"{value:,.0f}" if is_whole else f"{value:,.2f}"


def _tone(key: str, change: float | None) -> str:
    if change is None or abs(change) <= 0.01 or not metric(key).better:
        return ""
    return "good" if (change > 0) == (metric(key).better == "higher") else "bad"


def _objectives(run: ComparedRun) -> str:
    results = (run.summary or {}).get("slo") or []
    return f"{sum(bool(result['passed']) for result in results)} of {len(results)}" if results else ""


# --- how they are set


class _Column(NamedTuple):
    """Lines of equal width."""

    head: list[str]
    body: list[str]

    @property
    def width(self) -> int:
        return len(self.head[0])


def _by_variant(runs: ComparedRuns) -> Iterator[str]:
    heads, rows = variant_table(runs)
    columns = [_column(heads[k], [row[k] for row in rows], left=k == 0) for k in range(len(heads))]
    yield from _blocks(columns[:1], columns[1:], len(rows))


def _by_run(runs: ComparedRuns) -> Iterator[str]:
    heads, rows = run_table(runs)
    number_from = len(heads) - len(run_columns(runs))
    columns = [_column(heads[k], [row[k] for row in rows], left=k < number_from) for k in range(len(heads))]
    yield from _blocks(columns[:number_from], columns[number_from:], len(runs.variants))


def _blocks(labels: Sequence[_Column], columns: Sequence[_Column], group: int) -> Iterator[str]:
    """As many columns side by side as fit, the others below; rows in groups of so many."""
    rest = list(columns)
    while rest:
        taken = _num_fitting(WIDTH - sum(column.width + 2 for column in labels) + 2, rest)
        yield from _side_by_side([*labels, *rest[:taken]], group)
        rest = rest[taken:]
        if rest:
            yield ""


def _num_fitting(width: int, columns: Sequence[_Column]) -> int:
    """How many columns fit; at least one."""
    ends = list(accumulate(2 + column.width for column in columns))
    return max(1, sum(end <= width for end in ends))


def _column(head: str, cells: Sequence[Cell], *, left: bool) -> _Column:
    """The heading is broken to fit the cells."""
    value_width = max(len(each.value) for each in cells)
    change_width = max(len(each.change) for each in cells)
    body = [_aligned(each, value_width, change_width, left=left) for each in cells]
    width = max(NARROWEST if head else 0, *(len(line) for line in body))
    title = wrap(head, width, break_long_words=False) or [""]
    width = max(width, *(len(line) for line in title))
    place = str.ljust if left else str.rjust
    return _Column([place(line, width) for line in title], [place(line, width) for line in body])


def _aligned(cell: Cell, value_width: int, change_width: int, *, left: bool) -> str:
    value = cell.value.ljust(value_width) if left else cell.value.rjust(value_width)
    return f"{value}  {cell.change.rjust(change_width)}" if change_width else value


def _side_by_side(columns: Sequence[_Column], group: int) -> Iterator[str]:
    depth = max(len(column.head) for column in columns)
    heads = ([" " * column.width] * (depth - len(column.head)) + column.head for column in columns)
    yield from map(_line, zip(*heads, strict=True))
    yield _line(["-" * column.width for column in columns])
    for number, cells in enumerate(zip(*(column.body for column in columns), strict=True)):
        if number and group > 1 and number % group == 0:
            yield ""
        yield _line(cells)


def _line(cells: Iterable[str]) -> str:
    return "  ".join(cells)


def _markdown_table(heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Iterator[str]:
    texts = [[f"{each.value} ({each.change})" if each.change else each.value for each in row] for row in rows]
    for cells in (heads, ["---"] * len(heads), *texts):
        yield f"| {' | '.join(text.replace('|', '/') for text in cells)} |"
