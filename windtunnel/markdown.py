"""A run as Markdown: short enough for an issue or a pull request, and with what a reader must know to believe it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from windtunnel.reports.answer import answer
from windtunnel.reports.context import ReportContext
from windtunnel.reports.economics import PAIR_HEADS, cost_rows, pair_cells, preemption_rows
from windtunnel.reports.fleet import fleet_rows, pool_table
from windtunnel.reports.tenants import tenant_heads, tenant_rows, tenant_sentences
from windtunnel.reports.text import measured
from windtunnel.reports.transfers import transfer_rows
from windtunnel.reports.words import count, milliseconds, percent
from windtunnel.sim.metrics import LatencyStats, Summary
from windtunnel.sim.metrics.summary import percent_word
from windtunnel.sim.records import Records

_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL", "queue_time": "queue time"}


def render_markdown(records: Records, summary: Summary, context: ReportContext) -> str:
    """Answer, latencies, load, objectives and warnings as Markdown, ending in a newline."""
    said = answer(records, summary)
    parts = [
        [f"### {context.title}"],
        [f"**{said.headline}**"],
        [" ".join(said.sentences)],
        list(_origin(context)),
        [" ".join(context.calibrated_by)],
        list(_latencies(summary)),
        list(_load(summary)),
        list(_rows("cost and energy", cost_rows(summary.economics))),
        list(_rows("what preemptions cost", preemption_rows(summary.economics))),
        list(_evictions(summary, context)),
        list(_rows("prefill to decode", transfer_rows(summary.transfers)) if summary.transfers else ()),
        list(_tenants(summary)),
        list(_fleet(summary)),
        list(_objectives(summary)),
        [f"> **Warning:** {text}" for text in (*context.warnings, *summary.warnings)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if any(part)) + "\n"


def _origin(context: ReportContext) -> Iterator[str]:
    what = " on ".join(part for part in (context.model, context.gpu) if part)
    facts = [what, context.engine and f"{context.engine} (simulated)"]
    facts.append(f"cost model {context.cost_model}, {context.calibration}")
    facts.append(f"seed {context.seed}, windtunnel {context.version}")
    yield "; ".join(fact for fact in facts if fact) + "."


def _latencies(summary: Summary) -> Iterator[str]:
    percents = [f"P{percent_word(percent)}" for percent in summary.percentiles]
    rows = [(name, *_latency(getattr(summary, key))) for key, name in _LATENCIES.items()]
    yield from _table(["latency", "mean", "median", *percents], rows)


def _latency(stats: LatencyStats) -> list[str]:
    return [milliseconds(ms) for ms in (stats.mean_ms, stats.median_ms, *(value for _, value in stats.percentiles_ms))]


def _load(summary: Summary) -> Iterator[str]:
    rows = [
        ("requests finished", f"{summary.completed:,} of {summary.num_prompts:,}"),
        ("request throughput", f"{count(summary.request_throughput)} /s"),
        ("output throughput", f"{count(summary.output_throughput)} tokens/s"),
        ("utilisation (rho)", count(summary.load.utilisation)),
        ("mean / peak KV usage", f"{percent(summary.kv.usage_mean)} / {percent(summary.kv.usage_peak)}"),
        ("preemptions", f"{summary.preemption.num_preemptions:,}"),
        ("recomputed prefill tokens", f"{summary.preemption.recomputed_prefill_tokens:,}"),
        ("prefix cache hit rate", percent(summary.prefix_cache.hit_rate)),
        ("stability", f"{summary.stability.verdict.value}: {summary.stability.reason}"),
    ]
    if summary.goodput is not None:
        rows.append((f"good requests ({summary.goodput.limits})", percent(summary.goodput.good_share)))
    yield from _table(["", "value"], rows)


_NUM_PAIRS = 5


def _rows(title: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    known = list(rows)
    if known:
        yield from _table([title, "value"], known)


def _evictions(summary: Summary, context: ReportContext) -> Iterator[str]:
    """Who lost the most for whom."""
    own = summary.economics.preemption
    if own is not None:
        rows = [pair_cells(pair, context.label) for pair in own.pairs[:_NUM_PAIRS]]
        yield from _table([head.lower() for head in PAIR_HEADS], rows)


def _tenants(summary: Summary) -> Iterator[str]:
    if summary.tenants is not None:
        yield from _table([head.lower() for head in tenant_heads(summary)], tenant_rows(summary))
        yield ""
        yield " ".join(tenant_sentences(summary.tenants))


def _fleet(summary: Summary) -> Iterator[str]:
    of = summary.fleet
    if of is None:
        return
    yield from _table(["fleet", "value"], fleet_rows(of))
    pools = pool_table(summary)
    yield ""
    yield from _table([head.lower() for head in pools.heads], pools.rows)


def _objectives(summary: Summary) -> Iterator[str]:
    rows = [(f"`{result.slo.text}`", "pass" if result.passed else "FAIL", measured(result)) for result in summary.slo]
    if rows:
        yield from _table(["objective", "", "measured"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
