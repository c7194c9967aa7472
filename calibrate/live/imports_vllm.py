"""Results of ``vllm bench serve --save-result``, with and without ``--save-detailed``, and of SGLang's sibling.

Source of the format: ``vllm/benchmarks/serve.py`` of vLLM 0.32.  Lists are in seconds, aggregates in milliseconds.
``start_times`` are readings of the client's clock at the real sending, after ``queue_times`` under
``--max-concurrency``.  ``itls`` are gaps between chunks, which may hold several tokens; ``latencies`` end at the last
chunk, so that where older files lack them they are TTFT plus all gaps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from windtunnel.calibrate.live.observed import (
    UNKNOWN,
    BoolArray,
    Ending,
    ObservedRequests,
    ObservedRun,
    ServerFacts,
    observed_requests,
)
from windtunnel.calibrate.live.reading import (
    Place,
    count_or_unknown,
    ns_or_unknown,
    number_or_none,
    sequence,
)
from windtunnel.sim.records import IntArray

_MARKS = ("request_throughput", "mean_ttft_ms", "output_throughput")
_LISTS = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "errors")


def looks_like(value: Mapping[str, Any]) -> bool:
    """Whether a JSON object is such a result."""
    return sum(mark in value for mark in _MARKS) >= 2


def read(place: Place, result: Mapping[str, Any]) -> list[ObservedRun]:
    """The run in a result; without --save-detailed it has no requests, only what the file states.

    Raises UnreadableResult.
    """
    lists = {key: sequence(result.get(key), place.key(key)) for key in _LISTS}
    notes: list[str] = []
    requests = _requests(place, lists, notes)
    if not len(requests):
        notes.append(
            "The result has no single requests, only aggregates (it was saved without --save-detailed): "
            "distributions, arrivals and lengths are not known."
        )
    stated = _stated(place, result)
    duration_s = stated.get("duration")
    limit = count_or_unknown(result.get("max_concurrency"), place.key("max_concurrency"))
    run = ObservedRun(
        source="sglang bench_serving" if "mean_e2e_latency_ms" in result else "vllm bench serve",
        name=_name(place, result),
        requests=requests,
        duration_ns=None if duration_s is None else ns_or_unknown(duration_s, place.key("duration")),
        max_concurrency=None if limit == UNKNOWN else limit,
        request_rate=_rate(result.get("request_rate"), place.key("request_rate")),
        stated=stated,
        server=ServerFacts(model=_text(result.get("model_id"))),
        notes=tuple(notes),
    )
    return [run]


def _name(place: Place, result: Mapping[str, Any]) -> str:
    keys = ("date", "model_id", "request_rate", "max_concurrency", "num_prompts")
    told = ", ".join(f"{key} {str(result[key])[:60]}" for key in keys if result.get(key) is not None)
    return f"{place.path} ({told})" if told else place.path


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _rate(value: Any, place: Place) -> float | None:
    """vLLM writes the text "inf" for all at once, SGLang the number."""
    if isinstance(value, str):
        if value in ("inf", "Infinity"):
            return math.inf
        raise place.wrong(f'{value[:40]!r} is not a rate: expected requests per second or "inf"')
    return number_or_none(value, place, least=0)


def _stated(place: Place, result: Mapping[str, Any]) -> dict[str, float]:
    """All single numbers, SGLang's under vLLM's names; text and lists are not aggregates."""
    stated: dict[str, float] = {}
    for key, value in result.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            stated[key.replace("e2e_latency", "e2el")] = float(value)
    if "duration" in stated and stated["duration"] < 0:
        raise place.key("duration").wrong(f"{stated['duration']} s is below 0")
    return stated


def _requests(place: Place, lists: Mapping[str, Sequence[Any]], notes: list[str]) -> ObservedRequests:
    number = len(lists["input_lens"])
    if not number or not lists["ttfts"]:
        return observed_requests(0)
    for key, values in lists.items():
        if values and len(values) != number:
            raise place.key(key).wrong(f"{len(values):,} entries, input_lens has {number:,}: the file is damaged")
    failed = _failed(lists, number, place)
    gaps = [_times(row, place.key("itls").key(i)) for i, row in enumerate(lists["itls"] or [None] * number)]
    ttft = _column(lists["ttfts"], place.key("ttfts"))
    ttft[failed] = UNKNOWN
    start = _column(lists["start_times"], place.key("start_times")) if lists["start_times"] else None
    waits = _column(lists["queue_times"], place.key("queue_times")) if lists["queue_times"] else None
    output = _counts(lists["output_lens"], place.key("output_lens"), number)
    chunks = [
        np.cumsum([first, *row]) if first != UNKNOWN and lists["itls"] else np.zeros(0, np.int64)
        for first, row in zip(ttft.tolist(), gaps, strict=True)
    ]
    send, due = _sent(start, waits, notes)
    return observed_requests(
        number,
        due_ns=due,
        send_ns=send,
        ready_ns=send,
        ttft_ns=ttft,
        e2el_ns=np.where(failed, UNKNOWN, _latencies(place, lists, chunks, notes)),
        num_prompt_tokens=_counts(lists["input_lens"], place.key("input_lens"), number),
        num_output_tokens=output,
        ending=np.where(failed, Ending.FAILED, Ending.FINISHED),
        errors=tuple(str(error) for error in lists["errors"]) if lists["errors"] else None,
        chunks=chunks,
        chunk_tokens=[
            np.full(len(row), 1 if len(row) == tokens else UNKNOWN)
            for row, tokens in zip(chunks, output.tolist(), strict=True)
        ],
    )


def _failed(lists: Mapping[str, Sequence[Any]], number: int, place: Place) -> BoolArray:
    """vLLM gives a failed request an error and 0 output tokens; files without errors have the 0 alone."""
    with_error: BoolArray = np.array(
        [bool(error) for error in lists["errors"]] if lists["errors"] else [False] * number
    )
    without_tokens: BoolArray = _counts(lists["output_lens"], place.key("output_lens"), number) == 0
    return with_error | without_tokens


def _sent(start: IntArray | None, waits: IntArray | None, notes: list[str]) -> tuple[IntArray | None, IntArray | None]:
    """When requests were sent and due, from the first that was due; a start of 0 is one that was never taken."""
    if start is None:
        notes.append("The result has no start_times (older vLLM): when requests were sent is not known.")
        return None, None
    known = start > 0
    due = start if waits is None else start - waits
    origin = int(due[known].min()) if known.any() else 0
    send = np.where(known, start - origin, UNKNOWN)
    return send, send if waits is None else np.where(known, due - origin, UNKNOWN)


def _latencies(
    place: Place, lists: Mapping[str, Sequence[Any]], chunks: Sequence[IntArray], notes: list[str]
) -> IntArray:
    if lists["latencies"]:
        return _column(lists["latencies"], place.key("latencies"))
    if not lists["itls"]:
        return np.full(len(chunks), UNKNOWN)
    notes.append("The result has no latencies (older vLLM): they are TTFT plus all inter-token latencies.")
    return np.array([row[-1] if len(row) else UNKNOWN for row in chunks], np.int64)


def _column(values: Sequence[Any], place: Place) -> IntArray:
    return np.array([ns_or_unknown(value, place.key(row)) for row, value in enumerate(values)], np.int64)


def _counts(values: Sequence[Any], place: Place, number: int) -> IntArray:
    if not values:
        return np.full(number, UNKNOWN)
    return np.array([count_or_unknown(value, place.key(row)) for row, value in enumerate(values)], np.int64)


def _times(values: Any, place: Place) -> list[int]:
    gaps = sequence(values, place)
    if all(type(gap) is float and 0 <= gap < 1e6 for gap in gaps):
        return [round(gap * 1e9) for gap in gaps]
    return [ns_or_unknown(gap, place.key(number)) for number, gap in enumerate(gaps)]
