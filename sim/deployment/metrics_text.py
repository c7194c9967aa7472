"""What a real vLLM's metrics say of its KV cache: the text of ``/metrics``, or JSON of Prometheus' ``/api/v1/query``.

``vllm:cache_config_info`` holds the cache config as labels, ``num_gpu_blocks`` and ``block_size`` among them (0.5 and
later; ``kv_cache_size_tokens`` from 0.24 on).  Sources: ``vllm/v1/metrics/loggers.py``, ``vllm/config/cache.py`` and
``vllm/v1/engine/core_client.py`` of vLLM 0.32 and their forerunners; the exposition formats of Prometheus (text 0.0.4)
and OpenMetrics 1.0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Sample(NamedTuple):
    """One value of one series, and the line (from 1) it is on; JSON has the number of the series instead."""

    name: str
    labels: Mapping[str, str]
    value: float
    line: int


@dataclass(frozen=True, slots=True)
class EngineCache:
    """The cache config of one engine, as ``vllm:cache_config_info`` has it; None is not in the labels."""

    engine: str
    """Label ``engine``; empty before vLLM 0.9 and for V0."""
    instance: str
    """Label ``instance`` (or ``pod``) that Prometheus adds; empty in ``/metrics``."""
    num_gpu_blocks: int | None
    """Of this engine, the null block included (see MetricsFacts.notes for servers with several)."""
    block_size: int | None
    kv_cache_tokens: int | None
    """``kv_cache_size_tokens`` where there is one, else blocks x block_size, which is too much for hybrid models."""
    max_concurrency: float | None
    gpu_memory_utilization: float | None
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    num_cpu_blocks: int | None
    cache_dtype: str | None
    enable_prefix_caching: bool | None
    sliding_window: int | None
    mamba_block_size: int | None
    labels: Mapping[str, str]
    line: int


@dataclass(frozen=True, slots=True)
class MetricsFacts:
    """What metrics say of a server.  Cache figures are those of the engine with the smallest pool; None is not there.

    Counters run since the start of the server; gauges are the last value in the text.
    """

    name: str
    model: str | None = None
    engines: tuple[EngineCache, ...] = ()
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    num_cpu_blocks: int | None = None
    cache_dtype: str | None = None
    enable_prefix_caching: bool | None = None
    tokens_are_counted: bool = False
    """Whether ``kv_cache_tokens`` is blocks x block_size, for want of a label."""
    first_release: str | None = None
    """The minor release since which there are such labels ("0.24"), and the last that has them; None is open."""
    last_release: str | None = None
    num_requests_running: int | None = None
    """Over all engines."""
    num_requests_waiting: int | None = None
    kv_cache_usage: float | None = None
    """In [0, 1], of the fullest engine: the blocks in use; cached blocks that nobody uses count as free."""
    num_preemptions: int | None = None
    prefix_cache_queries_tokens: int | None = None
    prefix_cache_hits_tokens: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    notes: tuple[str, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)
    """The line that each field came from (the first, where it is a sum)."""


def read_metrics(text: str, *, name: str) -> MetricsFacts:
    """The facts in the text of ``/metrics`` or in Prometheus' JSON (instant or range query); ``name`` is for messages.

    Raises ValueError if a line of vLLM's is malformed (it names the line), if the JSON is none of Prometheus', or if
    no series is one of vLLM's.
    """
    notes: list[str] = []
    is_json = text.lstrip()[:1] in ("{", "[")
    samples = list(_json_samples(text, name, notes) if is_json else _text_samples(text, name, notes))
    ours = [sample._replace(name=_own_name(sample.name)) for sample in samples if _own_name(sample.name)]
    if not ours:
        raise ValueError(
            f"{name}: no series of vLLM in it; looked for vllm:cache_config_info, vllm:num_requests_running, "
            "vllm:kv_cache_usage_perc and the like. Give the text of http://HOST:PORT/metrics, or the JSON of "
            "/api/v1/query?query=vllm:cache_config_info"
        )
    return _facts(ours, name, notes)


def parse_exposition(text: str, *, name: str) -> Iterator[Sample]:
    """Every sample of a text in the exposition format, in order; comments, time stamps and exemplars are passed over.

    Raises ValueError at a line that is not of the format, naming the line.
    """
    for number, line in enumerate(text.split("\n"), 1):
        content = line.strip()
        if content and not content.startswith("#"):
            yield _sample(content, number, name)


# The exposition format.

_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_LABEL = re.compile(r'[ \t]*(?:([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*)?"((?:[^"\\\n]|\\.)*)"[ \t]*')
_VALUE = re.compile(r"[ \t]+([+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|[Ii]nf(?:inity)?|[Nn]a[Nn]))")
_REST = re.compile(r"(?:[ \t]+-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)?[ \t]*(?:#[ \t].*)?")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}


def _sample(line: str, number: int, name: str) -> Sample:
    metric = _NAME.match(line)
    at = metric.end() if metric else 0
    series = metric[0] if metric else ""
    labels: dict[str, str] = {}
    opening = re.compile(r"[ \t]*\{").match(line, at)
    if opening:
        quoted, labels, at = _labels(line, opening.end(), number, name)
        series = series or quoted
    value = _VALUE.match(line, at)
    if not series or value is None or _REST.fullmatch(line, value.end()) is None:
        raise _malformed(line, number, name)
    return Sample(series, labels, float(value[1]), number)


def _labels(line: str, at: int, number: int, name: str) -> tuple[str, dict[str, str], int]:
    """Quoted metric name (UTF-8 names stand among the labels), labels, and where they end."""
    quoted = ""
    labels: dict[str, str] = {}
    while True:
        closing = re.compile(r"[ \t]*\}").match(line, at)
        if closing:
            return quoted, labels, closing.end()
        label = _LABEL.match(line, at)
        if label is None:
            raise _malformed(line, number, name)
        text = _ESCAPE.sub(lambda escape: _ESCAPED.get(escape[1], escape[0]), label[2])
        if label[1] is None:
            quoted = text
        else:
            labels[label[1]] = text
        at = label.end()
        if line[at : at + 1] == ",":
            at += 1
        elif line[at : at + 1] != "}":
            raise _malformed(line, number, name)


def _malformed(line: str, number: int, name: str) -> ValueError:
    return ValueError(
        f'{name}:{number}: {line[:200]!r} is not a sample of the exposition format; expected NAME{{LABEL="VALUE",…}} '
        "NUMBER. Save the text of /metrics unchanged"
    )


def _text_samples(text: str, name: str, notes: list[str]) -> Iterator[Sample]:
    """Samples of vLLM; what is not of the format counts as foreign, unless it looks like vLLM's."""
    lines = text.split("\n")
    foreign = 0
    for number, line in enumerate(lines, 1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        try:
            yield _sample(content, number, name)
        except ValueError:
            is_cut_off = number == len(lines)
            if content.startswith("vllm") and not is_cut_off:
                raise
            foreign += 1
    if foreign:
        notes.append(f"{foreign} lines are not samples and were passed over")


# Prometheus' JSON.


def _json_samples(text: str, name: str, notes: list[str]) -> Iterator[Sample]:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: neither the text of /metrics nor JSON ({error})") from None
    if isinstance(answer, dict) and answer.get("status") == "error":
        raise ValueError(f"{name}: Prometheus answered with an error: {answer.get('error', 'no reason given')}")
    nameless = 0
    for number, series in enumerate(_series(answer, name), 1):
        labels = series.get("metric")
        value = _last_value(series)
        if not isinstance(labels, dict) or value is None:
            raise ValueError(f"{name}: series {number} lacks a metric or a value; expected the result of /api/v1/query")
        texts = {str(key): str(label) for key, label in labels.items()}
        metric = texts.pop("__name__", "")
        nameless += not metric
        yield Sample(metric, texts, value, number)
    if nameless:
        notes.append(f"{nameless} series have no name, as after sum() or rate(), and were passed over")


def _series(answer: object, name: str) -> list[dict[str, Any]]:
    for key in ("data", "result"):
        if isinstance(answer, dict):
            answer = answer.get(key, answer)
    if isinstance(answer, list) and all(isinstance(series, dict) for series in answer):
        return answer
    raise ValueError(f"{name}: JSON without a list of series under data.result; give the answer of /api/v1/query")


def _last_value(series: Mapping[str, Any]) -> float | None:
    values = series.get("values")
    pair = values[-1] if isinstance(values, list) and values else series.get("value")
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], str | int | float):
        return None
    try:
        return float(pair[1])
    except (ValueError, OverflowError):
        return None


# Facts.

_INFO = "cache_config_info"
_NO_CONFIG_LABELS = ("engine", "instance", "pod", "job", "namespace", "container", "service", "endpoint", "node")
_SUMS = {
    "num_requests_running": ("num_requests_running",),
    "num_requests_waiting": ("num_requests_waiting",),
    "num_preemptions": ("num_preemptions_total", "num_preemptions"),
    "prefix_cache_queries_tokens": (
        "prefix_cache_queries_total",
        "prefix_cache_queries",
        "gpu_prefix_cache_queries_total",
    ),
    "prefix_cache_hits_tokens": ("prefix_cache_hits_total", "prefix_cache_hits", "gpu_prefix_cache_hits_total"),
    "prompt_tokens": ("prompt_tokens_total", "prompt_tokens"),
    "generation_tokens": ("generation_tokens_total", "generation_tokens"),
}
"""Fields that are sums over series, with today's name first and older ones after it; the first that is there counts."""
_USAGES = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
_OF_SMALLEST = (
    "num_gpu_blocks",
    "block_size",
    "kv_cache_tokens",
    "max_concurrency",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "num_cpu_blocks",
    "cache_dtype",
    "enable_prefix_caching",
)


def _own_name(series: str) -> str:
    """The name without ``vllm:``; some collectors write the colon as an underscore.  Empty for others."""
    return series[5:] if series.startswith(("vllm:", "vllm_")) else ""


def _facts(samples: list[Sample], name: str, notes: list[str]) -> MetricsFacts:
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    engines = _engines([sample for sample in samples if sample.name == _INFO], name, notes)
    if engines:
        smallest = min(engines, key=_pool_size)
        values["tokens_are_counted"] = smallest.kv_cache_tokens is not None and _SIZE not in smallest.labels
        values["first_release"], values["last_release"] = _releases(smallest)
        for key in _OF_SMALLEST:
            if getattr(smallest, key) is not None:
                values[key], lines[key] = getattr(smallest, key), smallest.line
    for key, names in _SUMS.items():
        series = _first_present(samples, names)
        if series:
            values[key], lines[key] = round(sum(sample.value for sample in series)), series[0].line
    if usages := _first_present(samples, _USAGES):
        fullest = max(usages, key=lambda sample: sample.value)
        values["kv_cache_usage"], lines["kv_cache_usage"] = fullest.value, fullest.line
    models = list(dict.fromkeys(label for sample in samples if (label := sample.labels.get("model_name"))))
    if len(models) > 1:
        notes.append(
            f"{len(models)} models in it ({', '.join(models)}): figures are sums or those of the smallest pool"
        )
    if models:
        values["model"] = models[0]
        lines["model"] = next(sample.line for sample in samples if sample.labels.get("model_name"))
    return MetricsFacts(name=name, engines=tuple(engines), notes=tuple(notes), lines=lines, **values)


_SIZE = "kv_cache_size_tokens"
_SINCE = ((_SIZE, "0.24"), ("engine", "0.9"))
"""Labels and the release that they came with, newest first."""
_UNTIL = (("swap_space", "0.17"), ("swap_space_bytes", "0.17"))
"""Labels and the last release that has them."""
_LAST_WITHOUT_SIZE = "0.23"


def _releases(engine: EngineCache) -> tuple[str | None, str | None]:
    """The first and the last minor release that labels a server so."""
    names = {*engine.labels, *(("engine",) if engine.engine else ())}
    first = next((release for label, release in _SINCE if label in names), None)
    last = next((release for label, release in _UNTIL if label in names), None)
    if _SIZE in names:
        return first, None
    return first, last or _LAST_WITHOUT_SIZE


def _first_present(samples: list[Sample], names: tuple[str, ...]) -> list[Sample]:
    for name in names:
        found = [sample for sample in samples if sample.name == name and math.isfinite(sample.value)]
        if found:
            return found
    return []


def _pool_size(engine: EngineCache) -> float:
    return math.inf if engine.kv_cache_tokens is None else engine.kv_cache_tokens


def _engines(infos: list[Sample], name: str, notes: list[str]) -> list[EngineCache]:
    groups: dict[str, dict[str, Sample]] = {}
    for info in infos:
        instance = info.labels.get("instance") or info.labels.get("pod") or ""
        groups.setdefault(instance, {})[info.labels.get("engine", "")] = info  # of restarts the last counts
    engines = []
    for instance, group in groups.items():
        summed = _num_engines_summed(group, instance, notes)
        engines += [_engine(info, instance, summed, name) for info in group.values()]
    return engines


def _num_engines_summed(group: Mapping[str, Sample], instance: str, notes: list[str]) -> int:
    """A server adds the blocks of its data-parallel engines up and shows the sum as the blocks of each.

    Source: ``vllm/v1/engine/core_client.py`` (to 0.19 ``utils.py``): "Sum num_gpu_blocks from all engines in DP case".
    """
    counts = {info.labels.get("num_gpu_blocks") for info in group.values()}
    if len(group) == 1 or len(counts) > 1:
        return 1
    where = f"{instance}: " if instance else ""
    notes.append(f"{where}num_gpu_blocks is the sum of {len(group)} engines; divided evenly")
    return len(group)


def _engine(info: Sample, instance: str, num_engines: int, name: str) -> EngineCache:
    labels = _Labels(info, name)
    blocks, size = labels.whole("num_gpu_blocks"), labels.whole("block_size")
    blocks = blocks // num_engines if blocks is not None else None
    tokens = labels.whole("kv_cache_size_tokens")
    counted = blocks * size if blocks is not None and size is not None else None
    return EngineCache(
        engine=info.labels.get("engine", ""),
        instance=instance,
        num_gpu_blocks=blocks,
        block_size=size,
        kv_cache_tokens=counted if tokens is None else tokens,
        max_concurrency=labels.number("kv_cache_max_concurrency"),
        gpu_memory_utilization=labels.number("gpu_memory_utilization"),
        kv_cache_memory_bytes=labels.whole("kv_cache_memory_bytes"),
        num_gpu_blocks_override=labels.whole("num_gpu_blocks_override"),
        num_cpu_blocks=labels.whole("num_cpu_blocks"),
        cache_dtype=labels.text("cache_dtype"),
        enable_prefix_caching=labels.flag("enable_prefix_caching"),
        sliding_window=labels.whole("sliding_window"),
        mamba_block_size=labels.whole("mamba_block_size"),
        labels={key: value for key, value in info.labels.items() if key not in _NO_CONFIG_LABELS},
        line=info.line,
    )


class _Labels:
    """The labels of one info series as values; ``None`` (Python's) is no value."""

    def __init__(self, info: Sample, name: str) -> None:
        self.info = info
        self.name = name

    def text(self, label: str) -> str | None:
        value = self.info.labels.get(label, "None")
        return None if value in ("None", "null", "") else value

    def whole(self, label: str) -> int | None:
        value = self.text(label)
        if value is None:
            return None
        if re.fullmatch(r"\d{1,18}(?:\.0+)?", value) is None:
            raise self._wrong(label, value, "a whole number")
        return int(value.partition(".")[0])

    def number(self, label: str) -> float | None:
        value = self.text(label)
        if value is None:
            return None
        try:
            number = float(value)
        except ValueError:
            raise self._wrong(label, value, "a number") from None
        return number if math.isfinite(number) else None

    def flag(self, label: str) -> bool | None:
        value = self.text(label)
        if value is None:
            return None
        if value.casefold() not in ("true", "false"):
            raise self._wrong(label, value, "True or False")
        return value.casefold() == "true"

    def _wrong(self, label: str, value: str, expected: str) -> ValueError:
        return ValueError(
            f"{self.name}:{self.info.line}: {label}={value[:80]!r} of vllm:cache_config_info is not {expected}; "
            "save the metrics unchanged"
        )
