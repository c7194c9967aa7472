"""The scenario file: every key, its type, its range and what it means.

Keys are vLLM's flag names with underscores.  What is left out stays None here and gets its default, with the source of
the default, when the scenario is resolved.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from windtunnel.scenarios.units import parse_count, parse_duration_s, parse_rate, parse_size_bytes, parse_spec

SCHEMA_VERSION = 1

Count = Annotated[int, BeforeValidator(parse_count, json_schema_input_type=int | str)]
"""A whole number, also as 16k or 16K."""
_DurationSchema = WithJsonSchema({"type": ["number", "string"], "minimum": 0, "$comment": "duration"})
_SizeSchema = WithJsonSchema({"type": ["integer", "string"], "$comment": "size"})
_RateSchema = WithJsonSchema({"type": ["number", "string"], "exclusiveMinimum": 0})

Duration = Annotated[
    float, BeforeValidator(parse_duration_s, json_schema_input_type=Annotated[float | str, _DurationSchema])
]
"""Seconds, also as 20m, 90s, 1h30m or 250ms."""
Size = Annotated[int, BeforeValidator(parse_size_bytes, json_schema_input_type=Annotated[int | str, _SizeSchema])]
"""Bytes, also as 16GiB or 16GB."""
Rate = Annotated[float, BeforeValidator(parse_rate, json_schema_input_type=Annotated[float | str, _RateSchema])]
"""Requests per second; inf is all at once."""

Share = Annotated[float, Field(gt=0, le=1)]
StepPart = Annotated[Duration, Field(lt=1)]


def _spec(key: str, written: Any) -> BeforeValidator:
    """Reads text as the table that it abbreviates; ``written`` is what may stand in the file."""

    def read(value: Any) -> Any:
        if isinstance(value, str):
            return parse_spec(value, key)
        return dict(value) if isinstance(value, dict) else value

    return BeforeValidator(read, json_schema_input_type=written)


def _length(value: Any) -> Any:
    """A plain number of tokens (also as text) stays a number, everything else becomes a table."""
    if isinstance(value, str):
        try:
            return parse_count(value)
        except ValueError:
            return parse_spec(value, "dist")
    return value


Length = Annotated[int | dict[str, Any], BeforeValidator(_length, json_schema_input_type=int | str | dict[str, Any])]
"""Tokens per request: a number, or a distribution such as {dist = "lognormal", mean = 512, sigma = 0.8}."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class Deployment(_Section):
    """What runs on what."""

    model: str | None = None
    """Name of a bundled model (`windtunnel models`), or path of a Hugging Face config.json or of its folder."""
    gpu: str | None = None
    """Name of a GPU (`windtunnel gpus`)."""
    tensor_parallel_size: Annotated[Count | None, Field(ge=1)] = None
    """GPUs that one replica is spread over."""
    gpu_memory_utilization: Annotated[float | None, Field(gt=0, le=1)] = None
    """Share of the GPU's memory that vLLM may use for weights, activations and KV cache."""
    dtype: Literal["auto", "bfloat16", "float16", "half", "float32", "float"] | None = None
    """Type of unquantised weights and of activations; auto is the model's own."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "bfloat16", "float16", "float32"] | None = (
        None
    )
    """Type of the KV cache; auto is that of the model."""
    num_gpu_blocks_override: Annotated[Count | None, Field(ge=2)] = None
    """KV blocks in the pool, whatever the memory; block 0 is the null block and holds nothing."""
    kv_cache_memory_bytes: Annotated[Size | None, Field(ge=1)] = None
    """Memory for the KV cache per GPU, in place of gpu_memory_utilization's share."""
    usage_context: Literal["api_server", "llm_class"] | None = None
    """Whose defaults apply: those of `vllm serve` (api_server) or of the offline class LLM (llm_class)."""


class Engine(_Section):
    """What the scheduler obeys."""

    max_num_seqs: Annotated[Count | None, Field(ge=1)] = None
    """Most requests that may be running at once."""
    max_num_batched_tokens: Annotated[Count | None, Field(ge=1)] = None
    """Token budget of one step."""
    max_model_len: Annotated[Count | None, Field(ge=1)] = None
    """Longest prompt plus output of one request, in tokens."""
    block_size: Annotated[Count | None, Field(ge=1)] = None
    """Tokens in one KV block."""
    enable_chunked_prefill: bool | None = None
    """Split prompts over steps where the budget is too small for them."""
    enable_prefix_caching: bool | None = None
    """Reuse the KV blocks of prompts that begin alike."""
    long_prefill_token_threshold: Annotated[Count | None, Field(ge=0)] = None
    """Longest prefill chunk of one request in one step while others are there; 0 is no limit."""
    long_prefill_token_threshold_adaptive: bool | None = None
    """Raise that threshold to the budget shared equally among all requests."""
    scheduling_policy: Literal["fcfs", "priority"] | None = None
    """First come, first served, or by the requests' priority."""
    watermark: Annotated[float | None, Field(ge=0, lt=1)] = None
    """Share of the pool that an admission must leave free while something is running."""
    max_num_active_seqs: Annotated[Count | None, Field(ge=1)] = None
    """Fewer seats than max_num_seqs."""
    max_num_scheduled_tokens: Annotated[Count | None, Field(ge=1)] = None
    """Fewer tokens a step than max_num_batched_tokens."""
    scheduler_reserve_full_isl: bool | None = None
    """Admit a request only if its whole prompt fits the free blocks, not just its first chunk."""
    async_scheduling: bool | None = None
    """Decide a step while the one before still runs; vLLM's default on GPUs, here off unless asked for."""


class TraceWorkload(_Section):
    """Requests replayed from a file."""

    trace: str
    """Path of the trace, relative to the scenario file."""
    format: Literal["auto", "azure", "mooncake", "burstgpt", "sharegpt", "vllm-bench", "windtunnel"] = "auto"
    """Format of the trace; auto looks at its content."""
    time_unit: Literal["auto", "s", "ms", "us", "ns"] = "auto"
    """Unit of its time stamps; auto judges by their span, and says so."""
    start: Duration | None = None
    """Leave out what is due before this time of the trace."""
    duration: Annotated[Duration | None, Field(gt=0)] = None
    """Leave out what is due later than this after the start."""
    limit: Annotated[Count | None, Field(ge=1)] = None
    """Keep at most so many requests."""
    rate_scale: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Compress time by this factor: 4 replays the trace at four times its rate."""
    on_bad_row: Literal["error", "skip"] | None = None
    """Stop at a row that cannot be read, or leave it out and say how many were."""
    max_concurrency: Annotated[Count | None, Field(ge=1)] = None
    """Most requests in flight; a due request waits at the client for its turn."""
    chunk_tokens: Annotated[Count | None, Field(ge=1)] = None
    """Mooncake traces: tokens in a hashed block, if not 512."""
    trace_model: str | None = None
    """BurstGPT traces: only the requests of this model."""
    trace_run: Annotated[Count | None, Field(ge=0)] = None
    """Results of vllm bench serve: which of several runs in the file, counted from 0."""
    all_turns: bool | None = None
    """ShareGPT: whole conversations, not just their first turns."""


class SyntheticWorkload(_Section):
    """Requests drawn from distributions."""

    num_requests: Annotated[Count | None, Field(ge=1)] = None
    """How many requests (turns, where there are sessions); 1000 if nothing says otherwise, as vLLM's --num-prompts."""
    input: Length
    """Prompt tokens of a request, where there are prefixes or sessions those that it adds to what was there before."""
    output: Length
    """Output tokens of a request."""
    request_rate: Rate | None = None
    """Requests per second; inf, the default, is all at once.  As vLLM's flag: the last request comes at
    num_requests / request_rate exactly."""
    burstiness: Rate | None = None
    """1 is Poisson, below is burstier, above more regular, inf is constant (shape of the gamma gaps, as vLLM's)."""
    arrival: Annotated[dict[str, Any] | None, _spec("process", dict[str, Any])] = None
    """Arrival process in full, in place of request_rate and burstiness."""
    max_tokens: Annotated[Count | None, Field(ge=1)] = None
    """Output limit that every request declares; longer answers are cut.  Not given: each declares its true length."""
    priorities: dict[str, float] | None = None
    """Priorities and their weights, such as {0 = 0.1, 1 = 0.9}; smaller is more urgent."""
    max_concurrency: Annotated[Count | None, Field(ge=1)] = None
    """Most requests in flight; a due request waits at the client for its turn."""
    prefixes: dict[str, Any] | None = None
    """Groups of requests that share the beginning of their prompts."""
    sessions: dict[str, Any] | None = None
    """Conversations of several turns, each turn's prompt holding all that was said before."""


def workload_kind(value: Any) -> str:
    """Which of the two a [workload] table is: a trace if it names one."""
    has_trace = "trace" in value if isinstance(value, dict) else isinstance(value, TraceWorkload)
    return "trace" if has_trace else "synthetic"


Workload = Annotated[
    Annotated[TraceWorkload, Tag("trace")] | Annotated[SyntheticWorkload, Tag("synthetic")],
    Discriminator(workload_kind),
]


class RooflineCost(_Section):
    """Step times from the data sheet of the GPU and shares of its peaks that are reached; not calibrated."""

    kind: Literal["roofline"] = "roofline"
    """Which cost model."""
    gemm_bandwidth: Share | None = None
    """Share of memory bandwidth reached when a matrix product waits for its weights."""
    gemm_flops: Share | None = None
    """Share of peak FLOP/s reached when a matrix product waits for arithmetic."""
    decode_attention_bandwidth: Share | None = None
    """Share of memory bandwidth reached when reading the KV cache."""
    prefill_attention_flops: Share | None = None
    """Share of peak FLOP/s reached by the attention of prompt chunks."""
    elementwise_bandwidth: Share | None = None
    """Share of memory bandwidth reached by norms, activations and cache writes."""
    link_bandwidth: Share | None = None
    """Share of the link's bandwidth reached by all-reduces."""
    kernel_s: StepPart | None = None
    """Fixed time of one kernel."""
    host_s: StepPart | None = None
    """Fixed time of a step outside the kernels."""
    sequence_s: StepPart | None = None
    """Time that each sequence adds to a step."""


class ConstantCost(_Section):
    """Every step takes the same time."""

    kind: Literal["constant"]
    """Which cost model."""
    step_s: Annotated[Duration, Field(gt=0)]
    """Time of a step."""


class AffineCost(_Section):
    """base_s + token_s * tokens + seq_s * sequences + decode_context_s * context + prefill_pair_s * pairs."""

    kind: Literal["affine"]
    """Which cost model."""
    base_s: Annotated[Duration, Field(gt=0)]
    """Time of a step, whatever is in it."""
    token_s: Duration | None = None
    """Time for each token in the batch."""
    seq_s: Duration | None = None
    """Time for each sequence in the batch."""
    decode_context_s: Duration | None = None
    """Time for each cached token that decodes read."""
    prefill_pair_s: Duration | None = None
    """Time for each pair of query and key in prompt chunks."""


class ProfileCost(_Section):
    """Step times fitted to measurements."""

    kind: Literal["profile"]
    """Which cost model."""
    path: str
    """Path of the profile.json, relative to the scenario file."""


def cost_kind(value: Any) -> str:
    """Which cost model a [cost] table asks for; roofline where it does not say."""
    kind = value.get("kind", "roofline") if isinstance(value, dict) else getattr(value, "kind", "roofline")
    return str(kind)


Cost = Annotated[
    Annotated[RooflineCost, Tag("roofline")]
    | Annotated[ConstantCost, Tag("constant")]
    | Annotated[AffineCost, Tag("affine")]
    | Annotated[ProfileCost, Tag("profile")],
    Discriminator(cost_kind),
]


class Slo(_Section):
    """What counts as good enough."""

    objectives: list[str] = []
    """Limits on a statistic of all requests, such as "ttft:p99<500ms"; a run that misses one exits with 99."""
    goodput: list[str] = []
    """Limits in ms on each single request, such as "ttft:500"; goodput counts the requests that keep all of them."""


class Run(_Section):
    """How the simulation is run."""

    horizon: Annotated[Duration | None, Field(gt=0)] = None
    """Stop after so much simulated time, whatever is still open."""
    saturation: bool | None = None
    """Measure what the engine can do at most, by a second short simulation, to state how much of it is asked for."""
    percentiles: list[Annotated[float, Field(gt=0, lt=100)]] | None = None
    """Percentiles in the summary."""


class Scenario(_Section):
    """One question: which workload, on which deployment."""

    schema_version: Literal[1] = 1
    """Version of this format."""
    name: str
    """A short name, for reports."""
    description: str = ""
    """One line on what it is about."""
    seed: Annotated[Count | None, Field(ge=0)] = None
    """All randomness follows from it."""
    deployment: Deployment = Deployment()
    engine: Engine = Engine()
    workload: Workload
    cost: Annotated[Cost, _spec("kind", Cost | str)] = RooflineCost()
    slo: Slo = Slo()
    run: Run = Run()


WORKLOAD_KINDS: dict[str, type[BaseModel]] = {"trace": TraceWorkload, "synthetic": SyntheticWorkload}
COST_KINDS: dict[str, type[BaseModel]] = {
    "roofline": RooflineCost,
    "constant": ConstantCost,
    "affine": AffineCost,
    "profile": ProfileCost,
}
SECTIONS: dict[str, tuple[type[BaseModel], ...]] = {
    "deployment": (Deployment,),
    "engine": (Engine,),
    "workload": (TraceWorkload, SyntheticWorkload),
    "cost": tuple(COST_KINDS.values()),
    "slo": (Slo,),
    "run": (Run,),
}
