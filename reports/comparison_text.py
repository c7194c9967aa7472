"""A comparison as text and as Markdown: the answer, and one table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from textwrap import wrap
from typing import NamedTuple

from windtunnel.reports.comparison_answer import ComparisonContext, answer, changed, replicated_words, within
from windtunnel.reports.text import header
from windtunnel.reports.words import NOTHING, digits
from windtunnel.sim.metrics.comparison import ComparedRun, ComparedRuns, Relation, metric

WIDTH = 120
PROSE_WIDTH = 100
LONGEST_VALUE = 24
"""Of a distribution of lengths, whose measure stands beside it."""
NARROWEST = 10
"""Of a column; headings are broken over lines to fit."""

_ALWAYS = (
    "failed_share",
    "completed",
    "duration",
    "capacity",
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
    "cost_per_hour",
    "cost_per_million_tokens",
    "energy_kwh_per_million_tokens",
    "recomputed_prefill_tokens",
    "recomputed_gpu_seconds",
    "recomputed_busy_share",
    "recomputed_cost",
    "p99_itl_without_preemption_ms",
    "padding_tokens",
    "straggler_tokens",
    "rejected_draft_tokens",
    "abandoned_tokens",
    "wasted_token_share",
    "mean_batch_formation_wait_ms",
    "replica_hours",
    "request_imbalance",
    "waited_at_gateway",
    "mean_gateway_wait_ms",
    "retried_requests",
    "lost",
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


def render_text(
    runs: ComparedRuns, relations: Sequence[Relation], context: ComparisonContext, *, with_purpose: bool = False
) -> str:
    """The whole text, ending in a newline: what was compared, the answer, and the table.

    ``with_purpose`` puts what the scenario teaches before the answer.
    """
    said = answer(runs, relations)
    lines = [*header(context.common), ""]
    if with_purpose and context.teaches:
        lines += [*wrap(context.teaches, PROSE_WIDTH), ""]
    for sentence in (said.headline, *said.sentences):
        lines += wrap(sentence, PROSE_WIDTH, subsequent_indent="  ")
    table, has_changes = _table(runs)
    lines += ["", *table, ""]
    if len(runs.variants) > 1:
        left_out = f"Changes from {runs.baseline} are left out for want of room; --html and --json have them."
        lines += wrap(f"Changes are against {runs.baseline}." if has_changes else left_out, PROSE_WIDTH)
    lines += wrap(replicated_words(runs, context.seeds), PROSE_WIDTH)
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
        list(shared.calibrated_by),
        list(_markdown_table(*(variant_table(runs) if runs.axis is None else run_table(runs)))),
        [f"Changes are against {runs.baseline}."] if len(runs.variants) > 1 else [],
        [told] if (told := replicated_words(runs, context.seeds)) else [],
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
    """How many failed if any did, the metrics, and what explains them."""
    beside = [key for key in _BESIDE_METRICS if key not in runs.metrics and _is_told(runs, key)]
    return [*_needed(runs), *(key for key in beside if key not in _EXPLAINS or any(runs.numbers(key)))]


def _needed(runs: ComparedRuns) -> list[str]:
    has_failures = "failed_share" not in runs.metrics and _is_told(runs, "failed_share")
    return ["failed_share", *runs.metrics] if has_failures else [*runs.metrics]


_EXPLAINS = ("preemptions", *_WHERE_ANY)
"""Columns that are left out where all are 0."""


def shown_keys(runs: ComparedRuns) -> list[str]:
    """Numbers that are worth a row: those that some run has, and of waste those that are not all 0."""
    high = _highest_percentile(runs)
    rows = [key.replace("p99", high) for key in _ALWAYS]
    for key in runs.metrics:
        if key not in (*rows, *_WHERE_ANY):
            rows.insert(_row_of(key, rows), key)
    told = [key for key in rows if _is_told(runs, key)]
    return [*told, *(key for key in _WHERE_ANY if any(runs.numbers(key)))]


def _row_of(key: str, rows: Sequence[str]) -> int:
    """Behind the last number of its kind (a latency of the same name), else behind all."""
    kind = key.partition("_")[2]
    return max(
        (k + 1 for k, row in enumerate(rows) if metric(key).is_latency and row.endswith(kind)), default=len(rows)
    )


def _highest_percentile(runs: ComparedRuns) -> str:
    """``p99`` if the runs have it, else the highest that they have."""
    keys = [key for run in runs.runs for key in run.summary or {}]
    found = {found[1] for key in keys if (found := re.fullmatch(r"(p[\d.]+)_ttft_ms", key))}
    return "p99" if "p99" in found or not found else max(found, key=lambda name: float(name[1:]))


def _is_told(runs: ComparedRuns, key: str) -> bool:
    """Whether some run has this number, and not all the one that says nothing."""
    numbers = runs.numbers(key)
    if key == "failed_share":
        return any(numbers)
    if key == "slot_efficiency":
        return any(abs(number - 1) >= 0.005 for number in numbers)
    return bool(numbers)


def cell(runs: ComparedRuns, run: ComparedRun, key: str) -> Cell:
    """A number of a run for a table, and its change from the baseline."""
    value = run.number(key)
    if value is None:
        return Cell(NOTHING)
    change, found = runs.change(run, key), runs.difference(run, key)
    are_whole = metric(key).unit == "" and all(number.is_integer() for number in runs.numbers(key))
    shown = 100 * value if metric(key).unit == "%" else value
    text = f"{shown:,.0f}" if are_whole else digits(shown) if key in _FINE else f"{shown:,.2f}"
    if found is None:
        return Cell(text, changed(change), _tone(key, change))
    return Cell(text, within(found), "" if found.is_level else _tone(key, change))


_FINE = (
    *("cost_per_request", "cost_per_million_tokens", "cost_per_million_output_tokens", "run_cost", "recomputed_cost"),
    *("input_cost_per_million_tokens", "output_cost_per_million_tokens", "energy_kwh", "energy_kwh_per_million_tokens"),
    "energy_joules_per_output_token",
)
"""Numbers that are told with three digits, however small they are."""


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


def _table(runs: ComparedRuns) -> tuple[list[str], bool]:
    """The lines of the table, and whether they hold the changes: these are left out where they would break it in two.

    Of the columns that only explain, as many stand beside the others as fit.
    """
    for with_changes in (True, False):
        labels, columns, num_needed = _columns(runs, with_changes=with_changes)
        if _width([*labels, *columns[:num_needed]]) <= WIDTH:
            break
    while len(columns) > num_needed and _width([*labels, *columns]) > WIDTH:
        columns.pop()
    group = len(columns[0].body) if runs.axis is None else len(runs.variants)
    return list(_blocks(labels, columns, group)), with_changes


def _columns(runs: ComparedRuns, *, with_changes: bool) -> tuple[list[_Column], list[_Column], int]:
    """Those that name what stands in a row, those of numbers, and how many of these are never left out."""
    heads, rows = variant_table(runs) if runs.axis is None else run_table(runs)
    num_labels = 1 if runs.axis is None else len(heads) - len(run_columns(runs))
    num_needed = len(heads) - num_labels if runs.axis is None else len(_needed(runs))
    if not with_changes:
        rows = [[each._replace(change="") for each in row] for row in rows]
    made = [_column(heads[k], [row[k] for row in rows], left=k < num_labels) for k in range(len(heads))]
    return made[:num_labels], made[num_labels:], num_needed


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.width + 2 for column in columns) - 2


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
