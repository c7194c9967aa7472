"""What ``/metrics`` says, under vLLM 0.32's names, types, labels and buckets.

Series that can have no value here are left out: LoRA, KV connectors, speculation, sleep mode by level, FLOPs.  Sources
of names, buckets and meanings: ``vllm/v1/metrics/loggers.py``, ``buckets.py`` and ``stats.py`` of vLLM 0.32; the
``http_`` series are those of prometheus-fastapi-instrumentator, which vLLM uses.

Times are engine time: what the deployment would take, whatever ``--speed`` does to it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from windtunnel.executor import engine as core

if TYPE_CHECKING:
    from windtunnel.executor.server.engine_loop import Job

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
ITL_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
ITERATION_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PARAMS_N_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTIONS_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
HTTP_BUCKETS_S = (0.1, 0.5, 1)
HTTP_HIGHR_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60),
)
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
HIT_SOURCES = ("device", "host", "disk", "p2p", "external_unspecified")

_S = 1e-9


def token_buckets(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 … as far as ``max_model_len``."""
    buckets, scale = [], 1
    while scale <= max_model_len:
        buckets += [step * scale for step in (1, 2, 5) if step * scale <= max_model_len]
        scale *= 10
    return tuple(buckets)


class Histogram:
    """Counts by bucket; many equal values are taken at once."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self._buckets = tuple(map(float, buckets))
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._created_s = time.time()

    def observe(self, value: float, count: int = 1) -> None:
        """Take ``count`` values."""
        self._counts[bisect_left(self._buckets, value)] += count
        self._sum += value * count

    def write(self, family: Any, labels: Mapping[str, str]) -> None:
        """Add the samples to a family of ``prometheus_client``."""
        total = 0
        for bound, count in zip((*self._buckets, float("inf")), list(self._counts), strict=True):
            total += count
            family.add_sample(f"{self.name}_bucket", {**labels, "le": _bound_text(bound)}, total)
        family.add_sample(f"{self.name}_count", labels, total)
        family.add_sample(f"{self.name}_sum", labels, self._sum)
        family.add_sample(f"{self.name}_created", labels, self._created_s)


class Counter:
    """Counts, by the values of its own labels."""

    def __init__(self, name: str, text: str, label_names: tuple[str, ...] = (), *values: tuple[str, ...]) -> None:
        """Series with these ``values`` of the labels are there from the beginning."""
        self.name = name
        self.text = text
        self._label_names = label_names
        self._values: dict[tuple[str, ...], float] = dict.fromkeys(values, 0) if label_names else {(): 0}
        self._created_s = time.time()

    def inc(self, amount: float = 1, *labels: str) -> None:
        """Add to the series with these labels."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def value(self, *labels: str) -> float:
        """Of the series with these labels."""
        return self._values.get(labels, 0)

    def write(self, family: Any, labels: Mapping[str, str]) -> None:
        """Add the samples to a family of ``prometheus_client``."""
        for values, count in list(self._values.items()):
            own = {**labels, **dict(zip(self._label_names, values, strict=True))}
            family.add_sample(f"{self.name}_total", own, count)
            family.add_sample(f"{self.name}_created", own, self._created_s)


class Answered(NamedTuple):
    """What one job got from a step, up to where a stop string ended it."""

    job: Job
    num_tokens: int
    finish_reason: str | None
    num_cached_tokens: int
    """Of the prompt, found in the prefix cache."""


class EngineMetrics:
    """Counts what the engine does and what is answered; ``/metrics`` reads.

    As in vLLM, tokens and ends are counted where stop strings are looked for: they are what clients get.
    """

    def __init__(self, model_name: str, max_model_len: int, cache_config: Mapping[str, Any]) -> None:
        """``cache_config`` becomes the labels of ``vllm:cache_config_info``."""
        self._labels = {"model_name": model_name, "engine": "0"}
        self._cache_config = {key: str(value) for key, value in cache_config.items()} | {"engine": "0"}
        self.num_running = self.num_waiting = 0
        self.kv_cache_usage = 0.0
        tokens = token_buckets(max_model_len)

        self.prefix_queries = Counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self.prefix_hits = Counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.")
        self.preemptions = Counter("vllm:num_preemptions", "Preemptions.")
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens, counted at the first token of the answer.")
        self.prompt_tokens_by_source = Counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by source.", ("source",), *((s,) for s in PROMPT_SOURCES)
        )
        self.prompt_tokens_cached = Counter("vllm:prompt_tokens_cached", "Prompt tokens that were cached.")
        self.prompt_tokens_cached_by_source = Counter(
            "vllm:prompt_tokens_cached_by_source",
            "Cached prompt tokens by the tier that had them, counted at admission.",
            ("source",),
            *((source,) for source in HIT_SOURCES),
        )
        self.generation_tokens = Counter("vllm:generation_tokens", "Output tokens.")
        self.request_success = Counter(
            "vllm:request_success", "Finished requests.", ("finished_reason",), *((r,) for r in FINISH_REASONS)
        )
        self.rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused by a queue limit.",
            ("reason",),
            *((reason,) for reason in REJECTION_REASONS),
        )
        self._external = [
            Counter(f"vllm:{name}", "Always 0: there is none here.")
            for name in (
                *("external_prefix_cache_queries", "external_prefix_cache_hits"),
                *("mm_cache_queries", "mm_cache_hits"),
            )
        ]

        self.ttft = Histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S)
        self.itl = Histogram("vllm:inter_token_latency_seconds", "Time between tokens.", ITL_BUCKETS_S)
        self.tpot = Histogram(
            "vllm:request_time_per_output_token_seconds", "Time per output token after the first.", ITL_BUCKETS_S
        )
        self.e2e = Histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", LATENCY_BUCKETS_S)
        self.queue_time = Histogram("vllm:request_queue_time_seconds", "Arrival to admission.", LATENCY_BUCKETS_S)
        self.inference_time = Histogram(
            "vllm:request_inference_time_seconds", "Admission to last token.", LATENCY_BUCKETS_S
        )
        self.prefill_time = Histogram(
            "vllm:request_prefill_time_seconds", "Admission to first token.", LATENCY_BUCKETS_S
        )
        self.decode_time = Histogram("vllm:request_decode_time_seconds", "First to last token.", LATENCY_BUCKETS_S)
        self.request_prompt_tokens = Histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self.request_generation_tokens = Histogram(
            "vllm:request_generation_tokens", "Output tokens of a request.", tokens
        )
        self.iteration_tokens = Histogram(
            "vllm:iteration_tokens_total",
            "Tokens of a step; prompts are counted whole, with their first output token.",
            ITERATION_TOKENS_BUCKETS,
        )
        self.max_generation_tokens = Histogram(
            "vllm:request_max_num_generation_tokens", "Longest answer of a request.", tokens
        )
        self.params_n = Histogram("vllm:request_params_n", "n of a request.", PARAMS_N_BUCKETS)
        self.params_max_tokens = Histogram("vllm:request_params_max_tokens", "max_tokens of a request.", tokens)
        self.request_preemptions = Histogram(
            "vllm:request_num_preemptions", "Preemptions of a request.", PREEMPTIONS_BUCKETS
        )
        self.prefill_computed = Histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached.", tokens
        )

    def take_load(self, engine: core.Engine) -> None:
        """Note how full the engine is."""
        load = engine.scheduler.load()
        self.num_running, self.num_waiting = load.num_running, load.num_waiting
        self.kv_cache_usage = 1 - load.num_free_blocks / engine.scheduler.config.num_usable_blocks

    def take_step(self, engine: core.Engine, outcome: core.StepOutcome) -> None:
        """Book what a step decided; in the engine's thread."""
        self._take_admissions(outcome)
        self.preemptions.inc(len(outcome.preemptions))
        self.take_load(engine)

    def take_answers(self, answers: Sequence[Answered], given_out_ns: int) -> None:
        """Book what a step yielded, given out at ``given_out_ns``; in the event loop's thread."""
        num_generated = num_computed = 0
        gaps: Tally[int] = Tally()
        for job, num_tokens, finish_reason, num_cached_tokens in answers:
            if num_tokens:
                num_generated += num_tokens
                if job.first_token_ns < 0:
                    num_computed += self._take_first_token(job, num_cached_tokens, given_out_ns)
                else:
                    gaps[given_out_ns - job.last_token_ns] += 1
                job.last_token_ns = given_out_ns
            if finish_reason is not None:
                self._take_finished(job, finish_reason, num_cached_tokens)
        for gap_ns, count in gaps.items():
            self.itl.observe(gap_ns * _S, count)
        self.generation_tokens.inc(num_generated)
        self.iteration_tokens.observe(num_computed + num_generated)

    def _take_finished(self, job: Job, finish_reason: str, num_cached_tokens: int) -> None:
        request, num_tokens = job.request, job.num_tokens
        assert request is not None, "it was answered"
        first_ns, last_ns = job.first_token_ns, job.last_token_ns
        decode_ns = last_ns - first_ns
        self.request_success.inc(1, finish_reason)
        self.e2e.observe((last_ns - job.arrival_ns) * _S)
        self.queue_time.observe((request.scheduled_ns - job.arrival_ns) * _S)
        self.prefill_time.observe((first_ns - request.scheduled_ns) * _S)
        self.decode_time.observe(decode_ns * _S)
        self.inference_time.observe((last_ns - request.scheduled_ns) * _S)
        self.tpot.observe(decode_ns * _S / (num_tokens - 1) if num_tokens > 1 else 0.0)
        self.request_prompt_tokens.observe(request.num_prompt_tokens)
        self.request_generation_tokens.observe(num_tokens)
        self.max_generation_tokens.observe(num_tokens)
        self.params_n.observe(1)
        self.params_max_tokens.observe(job.params.max_tokens)
        self.request_preemptions.observe(request.num_preemptions)
        self.prefill_computed.observe(request.num_prompt_tokens - num_cached_tokens)

    def _take_admissions(self, outcome: core.StepOutcome) -> None:
        for request, num_cached_tokens, resumed in outcome.plan.admissions:
            if not resumed:
                self.prefix_queries.inc(request.num_prompt_tokens)
                self.prefix_hits.inc(num_cached_tokens)
                self.prompt_tokens_cached_by_source.inc(num_cached_tokens, "device")

    def _take_first_token(self, job: Job, num_cached_tokens: int, given_out_ns: int) -> int:
        """Book the first token of an answer; returns the prompt tokens that were computed for it."""
        num_prompt_tokens = len(job.prompt_token_ids)
        job.first_token_ns = given_out_ns
        self.ttft.observe((given_out_ns - job.arrival_ns) * _S)
        num_computed = num_prompt_tokens - num_cached_tokens
        self.prompt_tokens.inc(num_prompt_tokens)
        self.prompt_tokens_by_source.inc(num_computed, "local_compute")
        self.prompt_tokens_by_source.inc(num_cached_tokens, "local_cache_hit")
        self.prompt_tokens_cached.inc(num_cached_tokens)
        return num_computed

    def collect(self) -> Iterator[Any]:
        """The families, as ``prometheus_client`` registries ask for them."""
        labels = self._labels
        yield _gauge("vllm:num_requests_running", "Requests that run.", (labels, self.num_running))
        yield _gauge("vllm:num_requests_waiting", "Requests that wait.", (labels, self.num_waiting))
        yield _gauge(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait, by reason.",
            ({**labels, "reason": "capacity"}, self.num_waiting),
            ({**labels, "reason": "deferred"}, 0),
        )
        yield _gauge(
            "vllm:engine_sleep_state",
            "Sleep state: always awake here.",
            *(
                ({**labels, "sleep_state": state}, int(state == "awake"))
                for state in ("awake", "weights_offloaded", "discard_all")
            ),
        )
        yield _gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0-1.", (labels, self.kv_cache_usage))
        yield _gauge("vllm:cache_config_info", "The settings of the KV cache.", (self._cache_config, 1))
        for metric in vars(self).values():
            if isinstance(metric, Counter | Histogram) and metric is not self.rejections:
                yield _family(metric, labels)
        for metric in self._external:
            yield _family(metric, labels)
        yield _family(self.rejections, {"model_name": labels["model_name"]})


class HttpMetrics:
    """Counts what the web server does, by handler, method and class of status."""

    def __init__(self) -> None:
        self.requests = Counter("http_requests", "Requests.", ("handler", "method", "status"))
        self._request_bytes: dict[str, list[float]] = {}
        self._response_bytes: dict[str, list[float]] = {}
        self._durations: dict[tuple[str, str], Histogram] = {}
        self._highr = Histogram("http_request_duration_highr_seconds", "Duration of requests.", HTTP_HIGHR_BUCKETS_S)

    def take(
        self, handler: str, method: str, status: int, duration_s: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Book one request."""
        self.requests.inc(1, handler, method, f"{status // 100}xx")
        for sums, num_bytes in ((self._request_bytes, request_bytes), (self._response_bytes, response_bytes)):
            count_sum = sums.setdefault(handler, [0, 0])
            count_sum[0] += 1
            count_sum[1] += num_bytes
        key = (handler, method)
        if key not in self._durations:
            self._durations[key] = Histogram("http_request_duration_seconds", "Duration of requests.", HTTP_BUCKETS_S)
        self._durations[key].observe(duration_s)
        self._highr.observe(duration_s)

    def collect(self) -> Iterator[Any]:
        """The families, as ``prometheus_client`` registries ask for them."""
        from prometheus_client.core import HistogramMetricFamily, SummaryMetricFamily

        yield _family(self.requests, {})
        for name, sums in (
            ("http_request_size_bytes", self._request_bytes),
            ("http_response_size_bytes", self._response_bytes),
        ):
            summary = SummaryMetricFamily(name, "Length of the content.", labels=["handler"])
            for handler, (count, total) in sums.items():
                summary.add_metric([handler], int(count), total)
            yield summary
        durations = HistogramMetricFamily("http_request_duration_seconds", "Duration of requests.")
        for (handler, method), histogram in self._durations.items():
            histogram.write(durations, {"handler": handler, "method": method})
        yield durations
        yield _family(self._highr, {})


class Collector(Protocol):
    """Something that has metrics."""

    def collect(self) -> Iterator[Any]:
        """The families, as ``prometheus_client`` registries ask for them."""


def exposition(*collectors: Collector) -> tuple[bytes, str]:
    """The text of ``/metrics`` and its content type."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return bytes(generate_latest(registry)), str(CONTENT_TYPE_LATEST)


def _bound_text(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(bound)


def _gauge(name: str, text: str, *samples: tuple[Mapping[str, str], float]) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, text)
    for labels, value in samples:
        family.add_sample(name, dict(labels), value)
    return family


def _family(metric: Counter | Histogram, labels: Mapping[str, str]) -> Any:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    kind = CounterMetricFamily if isinstance(metric, Counter) else HistogramMetricFamily
    family = kind(metric.name, metric.text)
    metric.write(family, labels)
    return family
