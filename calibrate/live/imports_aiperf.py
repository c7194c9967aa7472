"""Results of NVIDIA's aiperf and genai-perf.

aiperf's ``profile_export.jsonl`` has a request a line, ``profile_export_aiperf.json`` the aggregates; genai-perf writes
the same blocks of aggregates, and ``profile_export.json`` with every response's time.  Their words are not vLLM's:
``inter_token_latency`` is (latency - TTFT) / (output tokens - 1), which is TPOT; ``inter_chunk_latency`` is ITL.
Every value carries its unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from windtunnel.sim.records import IntArray

_PER_S = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}
_LATENCIES = {
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",
    "inter_chunk_latency": "itl",
    "request_latency": "e2el",
}
_STATISTICS = {
    "avg": "mean",
    "p50": "median",
    "std": "std",
    "min": "min",
    "max": "max",
    "p90": "p90",
    "p95": "p95",
    "p99": "p99",
}
_AMOUNTS = {
    "request_throughput": "request_throughput",
    "output_token_throughput": "output_throughput",
    "request_count": "completed",
    "benchmark_duration": "duration",
}


def looks_like_records(value: Any) -> bool:
    """Whether a line is a request of ``profile_export.jsonl``."""
    return isinstance(value, dict) and isinstance(value.get("metadata"), dict) and "metrics" in value


def looks_like_summary(value: Mapping[str, Any]) -> bool:
    """Whether a JSON object holds aggregates of either tool, or genai-perf's raw export."""
    blocks = value.get("records") if isinstance(value.get("records"), dict) else value
    has_blocks = isinstance(blocks, dict) and any(isinstance(blocks.get(name), dict) for name in _LATENCIES)
    return has_blocks or isinstance(value.get("experiments"), list)


def read_records(place: Place, lines: Sequence[tuple[Place, Any]]) -> ObservedRun:
    """The run in ``profile_export.jsonl``; requests of a warm-up are left out.  Raises UnreadableResult."""
    rows = [_Record(where, value) for where, value in lines]
    kept = [row for row in rows if row.phase != "warmup"]
    notes = [f"{len(rows) - len(kept)} requests of the warm-up are left out."] if len(kept) < len(rows) else []
    if not kept:
        raise place.wrong("no requests but those of a warm-up")
    return ObservedRun("aiperf", place.path, _requests(kept), notes=tuple(notes))


def read_summary(place: Place, result: Mapping[str, Any]) -> list[ObservedRun]:
    """The aggregates in a result, or genai-perf's raw export as runs.  Raises UnreadableResult."""
    if "experiments" in result:
        experiments = sequence(result["experiments"], place.key("experiments"))
        return [_experiment(place.key("experiments").key(i), each) for i, each in enumerate(experiments)]
    where = place.key("records") if isinstance(result.get("records"), dict) else place
    blocks = mapping(result["records"], where) if isinstance(result.get("records"), dict) else result
    stated: dict[str, float] = {}
    for theirs, ours in _LATENCIES.items():
        stated |= _latency(ours, mapping(blocks.get(theirs), where.key(theirs)), where.key(theirs))
    for theirs, ours in _AMOUNTS.items():
        value = mapping(blocks.get(theirs), where.key(theirs)).get("avg")
        if (amount := number_or_none(value, where.key(theirs).key("avg"), least=0)) is not None:
            stated[ours] = amount
    duration_s = stated.get("duration")
    run = ObservedRun(
        source="aiperf" if "input_config" in result and "telemetry_data" not in result else "aiperf or genai-perf",
        name=place.path,
        requests=observed_requests(0),
        duration_ns=None if duration_s is None else ns_or_unknown(duration_s, where.key("benchmark_duration")),
        stated=stated,
        server=ServerFacts(model=_model(result)),
        notes=(
            "The file has aggregates only. Its inter_token_latency is what vLLM calls TPOT.",
            *(("How many requests failed is not in it.",) if "error_summary" not in result else ()),
        ),
    )
    return [run]


def _latency(name: str, block: Mapping[str, Any], place: Place) -> dict[str, float]:
    if not block:
        return {}
    per_s = _unit(block.get("unit"), place)
    stated = {}
    for theirs, ours in _STATISTICS.items():
        value = number_or_none(block.get(theirs), place.key(theirs))
        if value is not None:
            stated[f"{ours}_{name}_ms"] = value / per_s * 1e3
    return stated


def _unit(unit: Any, place: Place) -> float:
    if unit not in _PER_S:
        raise place.key("unit").wrong(f"{unit!r} is no unit of time that is known: {', '.join(_PER_S)}")
    return _PER_S[unit]


def _model(result: Mapping[str, Any]) -> str | None:
    config = result.get("input_config")
    endpoint = config.get("endpoint") if isinstance(config, dict) else None
    names = endpoint.get("model_names") if isinstance(endpoint, dict) else None
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    return None


class _Record:
    """One line of ``profile_export.jsonl``."""

    def __init__(self, place: Place, value: Any) -> None:
        given = mapping(value, place)
        self.place = place
        self.metadata = mapping(given.get("metadata"), place.key("metadata"))
        self.metrics = mapping(given.get("metrics"), place.key("metrics"))
        self.failure = given.get("error")

    @property
    def phase(self) -> str:
        return str(self.metadata.get("benchmark_phase", "")).lower()

    @property
    def ending(self) -> Ending:
        if self.metadata.get("was_cancelled"):
            return Ending.CUT_OFF
        return Ending.FAILED if self.failure else Ending.FINISHED

    @property
    def error(self) -> str:
        if isinstance(self.failure, dict):
            return ": ".join(str(self.failure[key]) for key in ("type", "message") if self.failure.get(key))[:300]
        return str(self.failure)[:300] if self.failure else ""

    def clock(self, name: str) -> int:
        return count_or_unknown(self.metadata.get(name), self.place.key("metadata").key(name))

    def count(self, name: str) -> int:
        block, where = self._block(name)
        return count_or_unknown(block.get("value"), where)

    def time(self, name: str) -> int:
        block, where = self._block(name)
        return ns_or_unknown(block["value"], where, per_s=_unit(block.get("unit"), where)) if block else UNKNOWN

    def times(self, name: str) -> list[int]:
        block, where = self._block(name)
        if not block:
            return []
        per_s = _unit(block.get("unit"), where)
        values = block.get("value")
        return [ns_or_unknown(each, where, per_s=per_s) for each in sequence(values, where)]

    def _block(self, name: str) -> tuple[Mapping[str, Any], Place]:
        where = self.place.key("metrics").key(name)
        block = mapping(self.metrics.get(name), where)
        if block and "value" not in block:
            raise where.wrong("it has no value")
        return block, where


def _requests(rows: list[_Record]) -> ObservedRequests:
    rows = sorted(rows, key=lambda row: row.clock("request_start_ns"))
    send = np.array([row.clock("request_start_ns") for row in rows], np.int64)
    end = np.array([row.clock("request_end_ns") for row in rows], np.int64)
    origin = int(send[send >= 0].min()) if bool((send >= 0).any()) else 0
    chunks = [_chunks(row) for row in rows]
    output = np.array([row.count("output_sequence_length") for row in rows], np.int64)
    done = np.array([row.ending is Ending.FINISHED for row in rows])
    return observed_requests(
        len(rows),
        send_ns=np.where(send >= 0, send - origin, UNKNOWN),
        ttft_ns=[row.time("time_to_first_token") for row in rows],
        e2el_ns=np.where(done, [row.time("request_latency") for row in rows], UNKNOWN),
        end_ns=np.where((send >= 0) & (end >= send), end - send, UNKNOWN),
        num_prompt_tokens=[row.count("input_sequence_length") for row in rows],
        num_output_tokens=output,
        ending=[int(row.ending) for row in rows],
        errors=tuple(row.error for row in rows),
        chunks=chunks,
        chunk_tokens=[
            np.full(len(times), 1 if len(times) == tokens else UNKNOWN)
            for times, tokens in zip(chunks, output.tolist(), strict=True)
        ],
    )


def _chunks(row: _Record) -> IntArray:
    first, gaps = row.time("time_to_first_token"), row.times("inter_chunk_latency")
    return np.cumsum([first, *gaps]) if first != UNKNOWN and gaps else np.zeros(0, np.int64)


def _experiment(place: Place, given: Any) -> ObservedRun:
    """genai-perf's raw export: the times of responses, whose tokens it does not count."""
    experiment = mapping(given, place)
    rows = [
        (place.key("requests").key(i), mapping(each, place.key("requests").key(i)))
        for i, each in enumerate(sequence(experiment.get("requests"), place.key("requests")))
    ]
    if not rows:
        raise place.key("requests").wrong("no requests are in it")
    send = np.array([count_or_unknown(row.get("timestamp"), where.key("timestamp")) for where, row in rows], np.int64)
    if bool((send < 0).any()):
        raise rows[int((send < 0).argmax())][0].wrong("it has no timestamp")
    chunks = [_responses(where, row, sent) for (where, row), sent in zip(rows, send.tolist(), strict=True)]
    done = np.array([len(times) > 0 for times in chunks])
    setting = mapping(experiment.get("experiment"), place.key("experiment"))
    value = number_or_none(setting.get("value"), place.key("experiment").key("value"))
    mode = setting.get("mode")
    return ObservedRun(
        source="genai-perf",
        name=f"{place.path} ({mode} {value:g})" if value is not None else place.path,
        requests=observed_requests(
            len(rows),
            send_ns=send - send.min(),
            ttft_ns=[times[0] if len(times) else UNKNOWN for times in chunks],
            e2el_ns=[times[-1] if len(times) else UNKNOWN for times in chunks],
            ending=np.where(done, Ending.FINISHED, Ending.FAILED),
            errors=tuple("" if fine else "no response" for fine in done.tolist()),
            chunks=chunks,
        ),
        max_concurrency=int(value) if mode == "concurrency" and value else None,
        request_rate=value if mode == "request_rate" else None,
        notes=("genai-perf's raw export does not count tokens: lengths, TPOT and token throughput are not known.",),
    )


def _responses(place: Place, row: Mapping[str, Any], sent_ns: int) -> IntArray:
    """Times of the responses with content after sending; the one that only says the stream is over has none."""
    where = place.key("response_timestamps")
    times = [
        count_or_unknown(each, where.key(i)) for i, each in enumerate(sequence(row.get("response_timestamps"), where))
    ]
    outputs = row.get("response_outputs")
    if isinstance(outputs, list) and len(outputs) == len(times):
        times = [time for time, output in zip(times, outputs, strict=True) if not _is_end(output)]
    if any(time < sent_ns for time in times):
        raise where.wrong(f"a response came before its request at {sent_ns}")
    return np.array(times, np.int64) - sent_ns


def _is_end(output: Any) -> bool:
    text = output.get("response") if isinstance(output, dict) else output
    return isinstance(text, str) and text.strip() in ("", "data: [DONE]", "[DONE]")
