"""What ``explain`` can be told besides a result: a server's log, and what a simulation knows of itself."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from windtunnel.calibrate.explain_types import Facts
from windtunnel.calibrate.live.observed import NS_PER_S, SERIES_COLUMNS, ObservedRun, ServerSeries
from windtunnel.sim.deployment.metrics_text import parse_exposition
from windtunnel.sim.deployment.startup_log import read_startup_log
from windtunnel.sim.metrics.sample import weighted_sum
from windtunnel.sim.records import Records

_PERIODIC = re.compile(
    r"(?:Engine (?P<engine>\d{1,6}): )?"
    r"Avg prompt throughput: [\d.]+ tokens/s, Avg generation throughput: [\d.]+ tokens/s, "
    r"Running: (?P<running>\d{1,12}) reqs, (?:Swapped: (?P<swapped>\d{1,12}) reqs, )?"
    r"(?:Waiting|Pending): (?P<waiting>\d{1,12}) reqs(?P<rest>.*)"
)
_USAGE = re.compile(r"KV cache usage: (\d{1,6}(?:\.\d{1,6})?)%")
_CLOCK = re.compile(r"(?<!\d)(\d{1,2}):(\d{2}):(\d{2})(?!\d)")
_COUNTERS = {
    "num_preemptions": "num_preemptions",
    "total_cumulative_preemption_cnt": "num_preemptions",
    "prefix_cache_queries": "prefix_query_tokens",
    "gpu_prefix_cache_queries": "prefix_query_tokens",
    "prefix_cache_hits": "prefix_hit_tokens",
    "gpu_prefix_cache_hits": "prefix_hit_tokens",
}
"""Names of vLLM's counters, now and in older releases (sources: ``calibrate.live.metrics``)."""
LINE_EVERY_S = 10.0
"""How often vLLM writes its periodic line (``VLLM_LOG_STATS_INTERVAL``)."""


def add_server_log(run: ObservedRun, text: str, *, name: str) -> ObservedRun:
    """A run with what a vLLM log says: flags, KV pool, preemptions, and the gauges of its periodic lines.

    The lines' times are those of the log's clock from its first such line, or 10 s apart where they have none; they
    cannot be laid beside the client's.  Raises ValueError if no line is one of vLLM's.
    """
    facts = read_startup_log(text, name=name)
    known, serving = run.server, facts.serving
    server = replace(
        known,
        model=known.model or facts.model,
        version=known.version or facts.vllm_version,
        max_num_seqs=known.max_num_seqs or facts.max_num_seqs,
        max_num_batched_tokens=known.max_num_batched_tokens or facts.max_num_batched_tokens,
        max_model_len=known.max_model_len or facts.max_model_len,
        block_size=known.block_size or facts.block_size,
        kv_cache_tokens=known.kv_cache_tokens or facts.kv_cache_tokens,
        enable_prefix_caching=(
            known.enable_prefix_caching if known.enable_prefix_caching is not None else facts.enable_prefix_caching
        ),
        num_engines=known.num_engines or facts.data_parallel_size,
    )
    counts, notes = run.counts, run.notes
    if serving is not None and counts.num_preemptions is None:
        counts = replace(counts, num_preemptions=serving.num_preemptions)
        notes = (*notes, f"Preemptions are those of the whole log {name}, which may be longer than the run.")
    series = run.series if run.series is not None else _series(text)
    return replace(run, server=server, counts=counts, series=series, notes=notes)


def counted_since_start(text: str, *, name: str) -> dict[str, int] | None:
    """Counters in the text of ``/metrics``, summed over engines; None for Prometheus' JSON, which has gains.

    Raises ValueError at a malformed line.
    """
    if text.lstrip()[:1] in ("{", "["):
        return None
    sums: dict[str, float] = {}
    for sample in parse_exposition(text, name=name):
        key = _COUNTERS.get(sample.name.removeprefix("vllm:").removeprefix("vllm_").removesuffix("_total"))
        if key is not None and sample.name.startswith("vllm") and math.isfinite(sample.value):
            sums[key] = sums.get(key, 0.0) + sample.value
    return {key: round(value) for key, value in sums.items()}


def _series(text: str) -> ServerSeries | None:
    """The periodic lines as gauges; None for fewer than two."""
    looks = list(_looks(text))
    if len(looks) < 2:
        return None
    columns = {name: np.full(len(looks), np.nan) for name in SERIES_COLUMNS}
    for name in ("num_running", "num_waiting", "num_swapped", "kv_usage"):
        columns[name] = np.array([look.get(name, np.nan) for _, look in looks], np.float64)
    times = np.array([time_s for time_s, _ in looks])
    return ServerSeries(time_ns=np.round((times - times[0]) * NS_PER_S).astype(np.int64), **columns)


def _looks(text: str) -> Iterator[tuple[float, Mapping[str, float]]]:
    """Time and gauges of each set of periodic lines, summed over engines (KV usage is the fullest's)."""
    at_s, days, seen, now = 0.0, 0.0, set[str](), dict[str, float]()
    for line in text.splitlines():
        found = _PERIODIC.search(line)
        if found is None:
            continue
        engine = found["engine"] or "0"
        if engine in seen:
            yield at_s, now
            seen, now, at_s = set(), {}, at_s + LINE_EVERY_S
        seen.add(engine)
        clock = _CLOCK.search(line[: found.start()])
        if clock is not None:
            hours, minutes, secs = (float(part) for part in clock.groups())
            stamp = days + 3600 * hours + 60 * minutes + secs
            days += 86_400.0 if stamp < at_s - 43_200 else 0.0
            at_s = max(stamp + (86_400.0 if stamp < at_s - 43_200 else 0.0), at_s if now else 0.0)
        for name, value in (("num_running", found["running"]), ("num_waiting", found["waiting"])):
            now[name] = now.get(name, 0.0) + float(value)
        if found["swapped"] is not None:
            now["num_swapped"] = now.get("num_swapped", 0.0) + float(found["swapped"])
        if usage := _USAGE.search(found["rest"]):
            now["kv_usage"] = max(now.get("kv_usage", 0.0), float(usage[1]) / 100)
    if seen:
        yield at_s, now


def facts_of_records(records: Records, wait_shares: Mapping[str, float] | None = None) -> Facts:
    """What a simulation knows that no client sees; ``wait_shares`` as ``Facts`` has them."""
    computed, running, waiting = 0, list[float](), list[float]()
    for replica in records.replicas:
        steps = replica.steps
        held = (steps.end_ns - steps.start_ns).astype(np.float64)
        computed += int((steps.num_decode_seqs + steps.prefill_tokens).sum())
        running.append(weighted_sum(held, steps.num_running) / max(records.end_ns, 1))
        waiting.append(weighted_sum(held, steps.num_waiting) / max(records.end_ns, 1))
    return Facts(
        wait_shares=wait_shares,
        num_recomputed_tokens=int(records.requests.num_recomputed_tokens.sum()),
        num_computed_tokens=computed,
        stalled=records.stalled,
        running_by_engine=tuple(running),
        waiting_by_engine=tuple(waiting),
        num_swapped_out_blocks=sum(int(replica.steps.num_swapped_out_blocks.sum()) for replica in records.replicas),
    )
