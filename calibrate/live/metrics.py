"""The server's own word: its ``/metrics`` before, during and after a run, and what it says of its configuration.

Sources of the names: ``vllm/v1/metrics/loggers.py`` of vLLM 0.32 and, for older servers, ``vllm/engine/metrics.py`` of
0.2 … 0.8 (``gpu_cache_usage_perc``, ``num_requests_swapped``, ``num_preemptions_total``) and V1's first releases
(``gpu_prefix_cache_queries``, ``total_cumulative_preemption_cnt``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from windtunnel.calibrate.live.http import HttpClient, now_ns
from windtunnel.calibrate.live.observed import SERIES_COLUMNS, ObservedRun, ServerCounts, ServerFacts, ServerSeries
from windtunnel.sim.deployment.metrics_text import Sample, parse_exposition, read_metrics

_GAUGES: Mapping[str, tuple[str, ...]] = {
    "num_running": ("num_requests_running",),
    "num_waiting": ("num_requests_waiting",),
    "num_swapped": ("num_requests_swapped",),
    "kv_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
}
_COUNTERS: Mapping[str, tuple[str, ...]] = {
    "num_preemptions": ("num_preemptions_total", "num_preemptions", "total_cumulative_preemption_cnt"),
    "prefix_query_tokens": (
        "prefix_cache_queries_total",
        "prefix_cache_queries",
        "gpu_prefix_cache_queries_total",
        "gpu_prefix_cache_queries",
    ),
    "prefix_hit_tokens": (
        "prefix_cache_hits_total",
        "prefix_cache_hits",
        "gpu_prefix_cache_hits_total",
        "gpu_prefix_cache_hits",
    ),
    "prompt_tokens": ("prompt_tokens_total", "prompt_tokens"),
    "generation_tokens": ("generation_tokens_total", "generation_tokens"),
}
_ONLY_COUNTED: Mapping[str, tuple[str, ...]] = {
    "num_steps": ("iteration_tokens_total_count",),
    "num_requests_finished": ("request_success_total", "request_success"),
}
_NAMES = {**_GAUGES, **_COUNTERS, **_ONLY_COUNTED}
"""Today's name first, older ones after it; the first that is there counts."""
_ALL_NAMES = sorted((name for names in _NAMES.values() for name in names), key=len, reverse=True)
_WANTED = re.compile(rb"^vllm[:_](?:" + "|".join(_ALL_NAMES).encode() + rb")[ \t{][^\n]*", re.MULTILINE)
_NS_PER_S = 1_000_000_000


class Scrape(NamedTuple):
    """The lines of ``/metrics`` that matter here, and when they were asked for (the client's clock)."""

    at_ns: int
    lines: bytes


async def scrape(http: HttpClient, *, timeout_s: float = 10.0) -> Scrape:
    """One look at ``/metrics``; nothing is parsed yet, as that would hold up a client under load.

    Raises OSError if there is no answer, or none with status 200.
    """
    asked_ns = now_ns()
    status, body, _ = await http.get("/metrics", timeout_s=timeout_s)
    if status != 200:
        raise OSError(f"GET /metrics: status {status}")
    return Scrape(asked_ns, b"\n".join(match[0] for match in _WANTED.finditer(body)))


def series_of(scrapes: Sequence[Scrape], start_ns: int) -> ServerSeries | None:
    """Gauges and counters over time from ``start_ns`` of the client's clock on; None without any value of vLLM's.

    Raises ValueError at a malformed line.
    """
    values = [_values(parse_exposition(look.lines.decode("utf-8", "replace"), name="/metrics")) for look in scrapes]
    if not any(values):
        return None
    return _series([look.at_ns - start_ns for look in scrapes], values)


def counts_between(before: Scrape | None, after: Scrape | None) -> ServerCounts:
    """What the counters gained; a counter that fell (the server was started anew) is not known.

    Raises ValueError at a malformed line.
    """
    if before is None or after is None:
        return ServerCounts()
    first, last = (
        _values(parse_exposition(look.lines.decode("utf-8", "replace"), name="/metrics")) for look in (before, after)
    )
    gains: dict[str, int] = {}
    for key in (*_COUNTERS, *_ONLY_COUNTED):
        if key in first and key in last and last[key] >= first[key]:
            gains[key] = round(last[key] - first[key])
    return ServerCounts(**gains)


def _values(samples: Iterable[Sample]) -> dict[str, float]:
    """Each quantity over all engines: the fullest for KV usage, the sum for all others."""
    by_name: dict[str, list[float]] = {}
    for sample in samples:
        if sample.name.startswith(("vllm:", "vllm_")) and math.isfinite(sample.value):
            by_name.setdefault(sample.name[5:], []).append(sample.value)
    values: dict[str, float] = {}
    for key, names in _NAMES.items():
        found = next((by_name[name] for name in names if name in by_name), None)
        if found is not None:
            values[key] = max(found) if key == "kv_usage" else sum(found)
    return values


def _series(times_ns: Sequence[int], values: Sequence[Mapping[str, float]]) -> ServerSeries:
    columns = {}
    for name in SERIES_COLUMNS:
        column = np.array([row.get(name, np.nan) for row in values], np.float64)
        if name in _COUNTERS and not np.isnan(column).all():
            column = column - column[~np.isnan(column)][0]
        columns[name] = column
    return ServerSeries(time_ns=np.array(times_ns, np.int64), **columns)


# What the server says of itself.


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a server told when it was asked what it is, and what it did not answer."""

    facts: ServerFacts
    notes: tuple[str, ...]


async def read_server(http: HttpClient, model: str | None = None, *, timeout_s: float = 10.0) -> Introduction:
    """Ask ``/v1/models``, ``/version``, ``/metrics`` and ``/server_info`` (vLLM's development mode).

    ``model`` chooses among several models.  Nothing is raised: what does not answer is not known, and a note says so.
    """
    notes: list[str] = []

    async def ask(path: str, *, note: bool) -> bytes | None:
        try:
            status, body, _ = await http.get(path, timeout_s=timeout_s)
        except (OSError, ValueError) as error:
            notes.append(f"{path} gave no answer ({error})")
            return None
        if status != 200:
            if note:
                notes.append(f"{path} answered with status {status}")
            return None
        return body

    card = _model_card(_json(await ask("/v1/models", note=True)), model)
    version = _json(await ask("/version", note=False)).get("version")
    text = await ask("/metrics", note=True)
    info = _json(await ask("/server_info?config_format=json", note=False))
    facts = ServerFacts(
        model=_text(card.get("id")) or model,
        version=_text(version),
        max_model_len=_whole(card.get("max_model_len")),
    )
    if text is not None:
        facts = _with_metrics(facts, text.decode("utf-8", "replace"), notes)
    return Introduction(_with_config(facts, info), tuple(notes))


def _json(body: bytes | None) -> dict[str, Any]:
    try:
        value = json.loads(body or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _model_card(models: Mapping[str, Any], model: str | None) -> Mapping[str, Any]:
    data = models.get("data")
    cards = [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []
    if model is not None:
        cards = [card for card in cards if card.get("id") == model]
    return cards[0] if cards else {}


def _with_metrics(facts: ServerFacts, text: str, notes: list[str]) -> ServerFacts:
    try:
        found = read_metrics(text, name="/metrics")
    except ValueError as error:
        notes.append(str(error))
        return facts
    notes.extend(found.notes)
    return replace(
        facts,
        num_gpu_blocks=found.num_gpu_blocks,
        block_size=found.block_size,
        kv_cache_tokens=found.kv_cache_tokens,
        enable_prefix_caching=found.enable_prefix_caching,
        num_engines=len(found.engines) or None,
    )


def _with_config(facts: ServerFacts, info: Mapping[str, Any]) -> ServerFacts:
    config = info.get("vllm_config")
    if not isinstance(config, dict):
        return facts
    scheduler = config.get("scheduler_config")
    known = scheduler if isinstance(scheduler, dict) else {}
    return replace(
        facts,
        config=config,
        max_num_seqs=_whole(known.get("max_num_seqs")),
        max_num_batched_tokens=_whole(known.get("max_num_batched_tokens")),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# Metrics that were saved by others.


def add_saved_metrics(run: ObservedRun, text: str, *, name: str) -> ObservedRun:
    """A run with what saved metrics say of its server: the text of ``/metrics``, or Prometheus' JSON.

    A range query gives a series too; its times count from its first sample, since the clocks of Prometheus and of the
    load generator cannot be compared.  Raises ValueError as ``read_metrics`` does.
    """
    found = read_metrics(text, name=name)
    server = replace(
        run.server,
        model=run.server.model or found.model,
        num_gpu_blocks=found.num_gpu_blocks,
        block_size=found.block_size,
        kv_cache_tokens=found.kv_cache_tokens,
        enable_prefix_caching=found.enable_prefix_caching,
        num_engines=len(found.engines) or None,
    )
    series = prometheus_series(text) if text.lstrip()[:1] in ("{", "[") else None
    counts = run.counts if series is None else _gains(series)
    return replace(run, server=server, series=series or run.series, counts=counts, notes=(*run.notes, *found.notes))


def prometheus_series(text: str) -> ServerSeries | None:
    """The series in the answer to range queries; None if there is no range in it.  Raises ValueError for bad JSON."""
    answer = json.loads(text)
    for key in ("data", "result"):
        answer = answer.get(key, answer) if isinstance(answer, dict) else answer
    at: dict[float, list[Sample]] = {}
    for number, series in enumerate(answer if isinstance(answer, list) else [], 1):
        labels, points = series.get("metric", {}), series.get("values", [])
        for time_s, value in points:
            at.setdefault(float(time_s), []).append(Sample(labels.get("__name__", ""), labels, float(value), number))
    times = sorted(at)
    values = [_values(at[time_s]) for time_s in times]
    if not any(values):
        return None
    return _series([round((time_s - times[0]) * _NS_PER_S) for time_s in times], values)


def _gains(series: ServerSeries) -> ServerCounts:
    """What the counters gained over a series."""
    gains: dict[str, int] = {}
    for name in _COUNTERS:
        column = getattr(series, name)
        known = column[~np.isnan(column)]
        if len(known) and bool((np.diff(known) >= 0).all()):
            gains[name] = round(float(known[-1] - known[0]))
    return ServerCounts(**gains)
