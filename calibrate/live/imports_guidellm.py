"""Results of guidellm: one run for each of its benchmarks.

Source of the format: the JSON of guidellm 0.8.1 (``metadata.version`` 2); of version 1 the same quantities are looked
for under their older names.  Its words are not vLLM's: ``time_per_output_token_ms`` counts the first token in, and its
per-request ``inter_token_latency_ms`` is what vLLM calls TPOT.  So only times are taken, and metrics are computed from
them.  ``request_latency`` (seconds) ends with the whole answer; E2EL ends at the last token, whose time it has too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from windtunnel.calibrate.live.observed import (
    UNKNOWN,
    Ending,
    ObservedRequests,
    ObservedRun,
    ServerFacts,
    observed_requests,
)
from windtunnel.calibrate.live.reading import (
    Place,
    count_or_unknown,
    mapping,
    ns_or_unknown,
    number_or_none,
    sequence,
)

_ENDINGS = (("successful", Ending.FINISHED), ("incomplete", Ending.CUT_OFF), ("errored", Ending.FAILED))
_PERCENTILES = ("p50", "p90", "p95", "p99")


def looks_like(value: Mapping[str, Any]) -> bool:
    """Whether a JSON object is such a result."""
    return isinstance(value.get("benchmarks"), list)


def read(place: Place, result: Mapping[str, Any]) -> list[ObservedRun]:
    """The runs in a result.  Raises UnreadableResult."""
    metadata = mapping(result.get("metadata"), place.key("metadata"))
    benchmarks = sequence(result["benchmarks"], place.key("benchmarks"))
    if not benchmarks:
        raise place.key("benchmarks").wrong("the list is empty: no benchmark was finished")
    version = metadata.get("guidellm_version")
    source = f"guidellm {version}" if isinstance(version, str) else "guidellm"
    return [_run(place.key("benchmarks").key(i), source, each) for i, each in enumerate(benchmarks)]


def _run(place: Place, source: str, given: Any) -> ObservedRun:
    benchmark = mapping(given, place)
    notes: list[str] = []
    rows = _rows(place, benchmark)
    requests = _requests(rows, notes)
    stated = _stated(place, benchmark)
    announced = stated.get("completed")
    finished = int(requests.is_finished.sum())
    if announced is not None and len(requests) and announced > finished:
        notes.append(
            f"The file holds a sample of {finished:,} of {announced:,.0f} finished requests: the aggregates that it "
            "states are used, since a sample has other throughputs."
        )
        requests = observed_requests(0)
    strategy, rate, limit = _strategy(place, benchmark)
    return ObservedRun(
        source=source,
        name=f"{place.path} ({strategy or 'a benchmark'}{'' if rate is None else f' {rate:g}'})",
        requests=requests,
        duration_ns=_duration_ns(place, benchmark),
        max_concurrency=limit,
        request_rate=rate,
        stated=stated,
        server=ServerFacts(model=_model(benchmark)),
        notes=tuple(notes),
    )


def _strategy(place: Place, benchmark: Mapping[str, Any]) -> tuple[str, float | None, int | None]:
    """Kind, rate of an open loop, and limit of a closed one."""
    config = mapping(benchmark.get("config") or benchmark.get("args"), place.key("config"))
    strategy = mapping(config.get("strategy"), place.key("config").key("strategy"))
    kind = str(strategy.get("type_", ""))
    rate = number_or_none(strategy.get("rate"), place.key("config").key("strategy").key("rate"))
    streams = 1 if kind == "synchronous" else strategy.get("streams", strategy.get("max_concurrency"))
    is_closed = kind in ("concurrent", "synchronous", "throughput") and isinstance(streams, int)
    return kind, rate if kind in ("poisson", "constant", "async") else None, streams if is_closed else None


def _model(benchmark: Mapping[str, Any]) -> str | None:
    config = benchmark.get("config")
    backend = config.get("backend") if isinstance(config, dict) else None
    model = backend.get("model") if isinstance(backend, dict) else None
    return model if isinstance(model, str) else None


def _duration_ns(place: Place, benchmark: Mapping[str, Any]) -> int | None:
    start = ns_or_unknown(benchmark.get("start_time"), place.key("start_time"))
    end = ns_or_unknown(benchmark.get("end_time"), place.key("end_time"))
    return end - start if UNKNOWN not in (start, end) and end > start else None


@dataclass(frozen=True, slots=True)
class _Row:
    place: Place
    values: Mapping[str, Any]
    timings: Mapping[str, Any]
    ending: Ending

    def time(self, *names: str) -> int:
        """The first of these that is there, in nanoseconds since 1970, from the timings or the request itself."""
        for name in names:
            for where in (self.timings, self.values):
                if where.get(name) is not None:
                    return ns_or_unknown(where[name], self.place.key(name))
        return UNKNOWN

    def count(self, name: str) -> int:
        return count_or_unknown(self.values.get(name), self.place.key(name))

    @property
    def error(self) -> str:
        info = self.values.get("info")
        error = self.values.get("error") or (info.get("error") if isinstance(info, dict) else None)
        return str(error)[:300] if error else "" if self.ending is Ending.FINISHED else self.ending.name.lower()


def _rows(place: Place, benchmark: Mapping[str, Any]) -> list[_Row]:
    requests = mapping(benchmark.get("requests"), place.key("requests"))
    rows = []
    for key, ending in _ENDINGS:
        where = place.key("requests").key(key)
        for i, given in enumerate(sequence(requests.get(key), where)):
            values = mapping(given, where.key(i))
            info = mapping(values.get("info") or values.get("scheduler_info"), where.key(i).key("info"))
            timings = mapping(info.get("timings"), where.key(i).key("info").key("timings"))
            rows.append(_Row(where.key(i), values, timings, ending))
    return rows


def _requests(rows: list[_Row], notes: list[str]) -> ObservedRequests:
    if not rows:
        notes.append("The file holds no single requests, only aggregates.")
        return observed_requests(0)
    send = np.array([row.time("request_start", "request_start_time", "start_time") for row in rows], np.int64)
    due = np.array([row.time("targeted_start") for row in rows], np.int64)
    order = np.argsort(send, kind="stable")
    rows, send, due = [rows[i] for i in order.tolist()], send[order], due[order]
    known = np.concatenate((send[send >= 0], due[due >= 0]))
    origin = int(known.min()) if len(known) else 0
    done = np.array([row.ending is Ending.FINISHED for row in rows])
    whole = np.array([ns_or_unknown(row.values.get("request_latency"), row.place) for row in rows], np.int64)
    last = np.array([row.time("last_token_iteration", "last_token_time") for row in rows], np.int64)
    to_last = np.where((last >= 0) & (send >= 0), last - send, UNKNOWN)
    if bool((done & (to_last < 0)).any()):
        notes.append("Where the time of the last token is missing, E2EL is guidellm's request_latency: a little more.")
    notes.append("guidellm keeps no single gaps between tokens: ITL is not known, TPOT is computed from its times.")
    return observed_requests(
        len(rows),
        due_ns=np.where(due >= 0, due - origin, UNKNOWN),
        send_ns=np.where(send >= 0, send - origin, UNKNOWN),
        ttft_ns=[
            ns_or_unknown(row.values.get("time_to_first_token_ms"), row.place.key("time_to_first_token_ms"), per_s=1e3)
            for row in rows
        ],
        e2el_ns=np.where(done, np.where(to_last >= 0, to_last, whole), UNKNOWN),
        end_ns=whole,
        num_prompt_tokens=[row.count("prompt_tokens") for row in rows],
        num_output_tokens=[row.count("output_tokens") for row in rows],
        num_cached_tokens=[row.count("cached_tokens") for row in rows],
        ending=[int(row.ending) for row in rows],
        errors=tuple(row.error for row in rows),
    )


def _stated(place: Place, benchmark: Mapping[str, Any]) -> dict[str, float]:
    """Aggregates whose meaning is vLLM's, under vLLM's keys."""
    metrics = mapping(benchmark.get("metrics"), place.key("metrics"))
    stated: dict[str, float] = {}
    totals = mapping(metrics.get("request_totals"), place.key("metrics").key("request_totals"))
    for ours, theirs in (("completed", "successful"), ("num_prompts", "total")):
        counted = number_or_none(totals.get(theirs), place.key("metrics").key("request_totals").key(theirs))
        if counted is not None:
            stated[ours] = counted
    if "completed" in stated and "num_prompts" in stated:
        stated["failed"] = stated["num_prompts"] - stated["completed"]
    for ours, theirs, scale in (("ttft", "time_to_first_token_ms", 1.0), ("e2el", "request_latency", 1000.0)):
        stated |= _distribution(ours, _successful(place, metrics, theirs), scale)
    for ours, theirs in (
        ("request_throughput", "requests_per_second"),
        ("output_throughput", "output_tokens_per_second"),
        ("mean_itl_ms", "inter_token_latency_ms"),
    ):
        mean = _successful(place, metrics, theirs).get("mean")
        if isinstance(mean, int | float):
            stated[ours] = float(mean)
    for ours, theirs in (("total_input_tokens", "prompt_token_count"), ("total_output_tokens", "output_token_count")):
        total = _successful(place, metrics, theirs).get("total_sum")
        if isinstance(total, int | float):
            stated[ours] = float(total)
    duration = _duration_ns(place, benchmark)
    return stated if duration is None else {**stated, "duration": duration / 1e9}


def _successful(place: Place, metrics: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    where = place.key("metrics").key(name)
    return mapping(mapping(metrics.get(name), where).get("successful"), where)


def _distribution(name: str, values: Mapping[str, Any], scale: float) -> dict[str, float]:
    given = {"mean": values.get("mean"), "median": values.get("median"), "std": values.get("std_dev")}
    percentiles = values.get("percentiles")
    if isinstance(percentiles, dict):
        given |= {name: percentiles.get(name) for name in _PERCENTILES}
    return {
        f"{statistic}_{name}_ms": float(value) * scale
        for statistic, value in given.items()
        if isinstance(value, int | float)
    }
