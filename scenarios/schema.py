"""The scenario file: every key, its type, its range and what it means.

Keys are vLLM's flag names with underscores.  What is left out stays None here and gets its default, with the source of
the default, when the scenario is resolved.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    WithJsonSchema,
    model_validator,
)

from windtunnel.scenarios.units import parse_count, parse_duration_s, parse_rate, parse_size_bytes, parse_spec

if TYPE_CHECKING:
    from pydantic import ModelWrapValidatorHandler

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
            return spec_table(value, key)
        return dict(value) if isinstance(value, dict) else value

    return BeforeValidator(read, json_schema_input_type=written)


def spec_table(text: str, key: str) -> dict[str, Any]:
    """The table that text abbreviates, as JSON or as ``parse_spec`` has it; raises ValueError if it is neither."""
    return _json_table(text) if text.lstrip().startswith("{") else parse_spec(text, key)


def _json_table(text: str) -> dict[str, Any]:
    try:
        table: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is no valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("is no valid JSON: it is nested too deeply") from None
    return table


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
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16"] | None = None
    """Type of the KV cache; auto is that of the model."""
    num_gpu_blocks_override: Annotated[Count | None, Field(ge=2, le=50_000_000)] = None
    """KV blocks in the pool, whatever the memory; block 0 is the null block and holds nothing."""
    kv_cache_memory_bytes: Annotated[Size | None, Field(ge=1)] = None
    """Memory for the KV cache per GPU, in place of gpu_memory_utilization's share."""
    usage_context: Literal["api_server", "llm_class"] | None = None
    """Whose defaults apply: those of `vllm serve` (api_server) or of the offline class LLM (llm_class)."""
    engine_version: str | None = None
    """Version of vLLM whose defaults and rules apply, such as vllm-0.11; the newest known one if not given."""
    pipeline_parallel_size: Annotated[Count | None, Field(ge=1, le=1024)] = None
    """Stages that one replica's layers are spread over, each on tensor_parallel_size GPUs."""
    data_parallel_size: Annotated[Count | None, Field(ge=1, le=4096)] = None
    """Replicas of the model, each with a KV cache and a scheduler of its own."""
    router: (
        Literal[
            "vllm",
            "round_robin",
            "least_requests",
            "least_kv",
            "power_of_two",
            "prefix_affinity",
            "session",
            "shared_queue",
        ]
        | None
    ) = None
    """Who serves the next request: vllm looks at the replicas' load as its own load balancer does, round_robin takes
    turns; the others make each replica a server of its own behind a router (docs/fleet.md)."""


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
    """Decide a step while the one before still runs; vLLM's default on GPUs since 0.14."""
    max_num_queued_reqs: Annotated[Count | None, Field(ge=0)] = None
    """Most requests in the server, waiting and running, over all replicas; one more is rejected (HTTP 503)."""
    max_num_queued_tokens: Annotated[Count | None, Field(ge=0)] = None
    """Prompt tokens of requests without a first token from which on new ones are rejected (HTTP 503)."""


class ContinuousBatching(_Section):
    """Requests come and go at every step: vLLM's scheduler."""

    policy: Literal["continuous"] = "continuous"
    """Which policy."""
    prefill_first: bool | None = None
    """Admit whoever fits before anybody decodes, for offline work; prompts are then computed whole (as vLLM V0 did)."""


KvReserve = Literal["padded", "max_model_len"]
Answers = Literal["together", "streamed"]


class StaticBatching(_Section):
    """Batches of a fixed size that run to completion."""

    policy: Literal["static"]
    """Which policy."""
    batch_size: Annotated[Count, Field(ge=1, le=1_000_000)]
    """Slots of a batch."""
    batch_timeout: Duration | None = None
    """Longest wait for company; 0 takes what is there, not given waits until the batch is full."""
    kv_reserve: KvReserve | None = None
    """KV that a slot holds: padded prompt plus the largest max_tokens of the batch (padded), or max_model_len."""
    answers: Answers | None = None
    """All answers at the end of the batch (together), or tokens as they are made (streamed)."""
    max_prefill_tokens: Annotated[Count | None, Field(ge=1)] = None
    """Most prompt tokens of a step, padding included; not given computes all prompts of a batch in one step."""


def _sizes(value: Any) -> Any:
    """One size, several in a list, or several as text (4/8), as a list."""
    if isinstance(value, str):
        return value.split("/")
    return [value] if isinstance(value, int) else value


_Size = Annotated[Count, Field(ge=1)]
Sizes = Annotated[list[_Size], BeforeValidator(_sizes, json_schema_input_type=list[_Size] | _Size)]


class DynamicBatching(_Section):
    """Batches formed on demand, as the Triton Inference Server does, that run to completion."""

    policy: Literal["dynamic"]
    """Which policy."""
    config: str | None = None
    """Path of a config.pbtxt, relative to the scenario file; the other keys win over it."""
    max_batch_size: Annotated[Count | None, Field(ge=1, le=1_000_000)] = None
    """Most requests of a batch."""
    preferred_batch_size: Sizes | None = None
    """Sizes that go at once when they can be made."""
    max_queue_delay_microseconds: Annotated[Count | None, Field(ge=0)] = None
    """Longest wait for company while no preferred size can be made."""
    instance_count: Annotated[Count | None, Field(ge=1, le=10_000)] = None
    """Copies of the model on the GPU, which take turns."""
    max_queue_size: Annotated[Count | None, Field(ge=0)] = None
    """Waiting requests beyond which one that comes is rejected; 0 is no limit."""
    default_timeout_microseconds: Annotated[Count | None, Field(ge=0)] = None
    """Wait after which timeout_action befalls a request; 0 is never."""
    timeout_action: Literal["REJECT", "DELAY"] | None = None
    """Reject it, or put it behind all others."""
    priority_levels: Annotated[Count | None, Field(ge=0, le=10_000)] = None
    """Levels from 1, which goes first; 0 is one queue for all."""
    default_priority_level: Annotated[Count | None, Field(ge=0, le=10_000)] = None
    """Level of requests whose priority is no level."""
    kv_reserve: KvReserve | None = None
    """KV that a slot holds: padded prompt plus the largest max_tokens of the batch (padded), or max_model_len."""
    answers: Answers | None = None
    """All answers at the end of the batch (together), or tokens as they are made (streamed)."""
    max_prefill_tokens: Annotated[Count | None, Field(ge=1)] = None
    """Most prompt tokens of a step, padding included; not given computes all prompts of a batch in one step."""


class SwapBatching(_Section):
    """Continuous batching in which preempted requests keep their cache in CPU memory, as vLLM V0 could."""

    policy: Literal["swap"]
    """Which policy."""
    swap_space: Annotated[Size | None, Field(ge=0)] = None
    """CPU memory for swapped KV blocks per GPU (vLLM V0's flag of that name)."""
    num_cpu_blocks: Annotated[Count | None, Field(ge=0, le=50_000_000)] = None
    """The same in KV blocks, where no model says how large one is."""
    pcie_bandwidth: Annotated[Size | None, Field(ge=1)] = None
    """Bytes per second that copies between GPU and CPU reach, each way, per GPU."""
    block_bytes: Annotated[Size | None, Field(ge=1)] = None
    """Bytes of a KV block on one GPU, where no model says it."""
    prefill_first: bool | None = None
    """Admit whoever fits before anybody decodes; prompts are then computed whole."""


def batching_policy(value: Any) -> str:
    """Which policy a [batching] table asks for; continuous where it does not say."""
    policy = value.get("policy", "continuous") if isinstance(value, dict) else getattr(value, "policy", "continuous")
    return str(policy)


Batching = Annotated[
    Annotated[ContinuousBatching, Tag("continuous")]
    | Annotated[StaticBatching, Tag("static")]
    | Annotated[DynamicBatching, Tag("dynamic")]
    | Annotated[SwapBatching, Tag("swap")],
    Discriminator(batching_policy),
]


def _acceptance(value: Any) -> Any:
    """Rates as a number, as a list or as text (0.8/0.6/0.4); other text is the path of a recording."""
    if not isinstance(value, str):
        rates = value if isinstance(value, list) else [value]
        if not all(isinstance(rate, (int, float)) and not isinstance(rate, bool) for rate in rates):
            raise ValueError("must be a rate such as 0.7, a list of rates, or the path of a recording in quotes")
        return value
    try:
        rates = [float(part) for part in value.split("/")]
    except ValueError:
        return value
    return rates if len(rates) > 1 else rates[0]


Acceptance = Annotated[
    float | list[float] | str,
    BeforeValidator(
        _acceptance,
        json_schema_input_type=Annotated[
            float | list[float] | str,
            WithJsonSchema({"type": ["number", "array", "string"], "$comment": "a rate, a list of rates or a path"}),
        ],
    ),
]


_NO_PART_IN_SPECULATION = frozenset(
    {
        "attention_backend",
        "code_revision",
        "draft_load_config",
        "draft_sample_method",
        "draft_tensor_parallel_size",
        "kv_cache_dtype",
        "moe_backend",
        "prompt_lookup_max",
        "prompt_lookup_min",
        "quantization",
        "rejection_sample_method",
        "revision",
        "use_local_argmax_reduction",
    }
)
"""Keys of vLLM 0.32's ``SpeculativeConfig`` that may be given and have no effect."""


class Speculative(_Section):
    """Speculative decoding: drafts that the model verifies, several tokens of one request in one step."""

    method: Literal["ngram", "eagle", "eagle3", "mtp", "draft_model"] | None = None
    """Who drafts, as in vLLM's --speculative-config; told by the name of draft_model if not given."""
    num_speculative_tokens: Annotated[Count | None, Field(ge=0, le=1024)] = None
    """Tokens drafted for each request and step; 0 is no speculation."""
    acceptance: Acceptance | None = None
    """How many drafts hold: one rate for each draft whose predecessors held; a list of the shares of all steps in which
    the first 1, 2, … drafts held (vLLM's per-position rates); or the path of a recording."""
    synthetic_acceptance_rates: list[float] | None = None
    """vLLM's name for a list of rates; it means the same as acceptance."""
    synthetic_acceptance_length: float | None = None
    """In place of acceptance: tokens that a step yields on average, at least 1; all drafts before some position hold
    and none behind it, as in vLLM."""
    draft_model: str | None = None
    """The model that drafts, for its time: a bundled one or the path of a config.json; model, as vLLM has it, is the
    same."""
    draft_s: Duration | None = None
    """Time that drafting adds to a step, in place of an estimate."""
    _ignored: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keys of vLLM that were given and play no part here."""
        return self._ignored

    @model_validator(mode="wrap")
    @classmethod
    def _read_vllm(cls, value: Any, handler: ModelWrapValidatorHandler[Speculative]) -> Speculative:
        """Take vLLM's own JSON as it is."""
        if not isinstance(value, dict):
            return handler(value)
        ignored = tuple(key for key in value if key in _NO_PART_IN_SPECULATION)
        read = handler(_in_our_words({key: item for key, item in value.items() if key not in ignored}))
        read._ignored = ignored
        return read


def _in_our_words(table: dict[str, Any]) -> dict[str, Any]:
    """vLLM's names for the drafter and its methods; what it tells by the drafter's name (``SpeculativeConfig``)."""
    if "model" in table:
        if "draft_model" in table:
            raise ValueError("names the model that drafts twice: leave out model or draft_model")
        table["draft_model"] = table.pop("model")
    method, drafter = table.get("method"), table.get("draft_model")
    if isinstance(method, str) and method.endswith("_mtp"):
        table["method"] = "mtp"
    elif method is None and isinstance(drafter, str):
        name = drafter.lower()
        table["method"] = "eagle" if "eagle-" in name else "eagle3" if "eagle3" in name else "draft_model"
        if name in ("ngram", "[ngram]"):
            table["method"] = "ngram"
    return table


class Compare(_Section):
    """What `windtunnel compare` sets side by side."""

    variants: dict[str, dict[str, Any]] = {}
    """Names, each with the settings that make the difference."""
    axis: str | None = None
    """The key of a setting that is varied."""
    values: list[Any] = []
    """What it is set to."""
    metrics: list[str] = []
    """Keys of the JSON summary that the figure shows."""


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
    request_timeout: Annotated[Duration | None, Field(gt=0)] = None
    """The client gives a request up if its answer is not complete so long after it was sent."""
    trace_model: str | None = None
    """BurstGPT traces: only the requests of this model."""
    trace_run: Annotated[Count | None, Field(ge=0)] = None
    """Results of vllm bench serve: which of several runs in the file, counted from 0."""
    all_turns: bool | None = None
    """ShareGPT: whole conversations, not just their first turns."""


class SyntheticWorkload(_Section):
    """Requests drawn from distributions."""

    num_requests: Annotated[Count | None, Field(ge=1, le=1_000_000_000)] = None
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
    request_timeout: Annotated[Duration | None, Field(gt=0)] = None
    """The client gives a request up if its answer is not complete so long after it was sent."""
    prefixes: dict[str, Any] | None = None
    """Groups of requests that share the beginning of their prompts."""
    sessions: dict[str, Any] | None = None
    """Conversations of several turns, each turn's prompt holding all that was said before."""
    tenants: dict[str, float | dict[str, Any]] | None = None
    """Whose requests they are: names with a share each, such as {acme = 0.7, free = 0.3}, or with a table of what
    that tenant asks for."""


def workload_kind(value: Any) -> str:
    """Which of the two a [workload] table is: a trace if it names one."""
    has_trace = "trace" in value if isinstance(value, dict) else isinstance(value, TraceWorkload)
    return "trace" if has_trace else "synthetic"


Workload = Annotated[
    Annotated[TraceWorkload, Tag("trace")] | Annotated[SyntheticWorkload, Tag("synthetic")],
    Discriminator(workload_kind),
]


class AutoCost(_Section):
    """The bundled profile of this model on this GPU, if there is one; else the roofline."""

    kind: Literal["auto"] = "auto"
    """Which cost model."""
    noise: bool | None = None
    """Scatter the steps' times by what the profile states; same seed, same times.  Needs a profile."""
    refuse_outside: bool | None = None
    """Stop at a step that is outside of what the profile was measured at, in place of a warning."""


class RooflineCost(_Section):
    """Step times from the data sheet of the GPU and shares of its peaks that are reached; uncalibrated."""

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
    """Step times fitted to measurements: give path or name."""

    kind: Literal["profile"]
    """Which cost model."""
    path: str | None = None
    """Path of the profile.json, relative to the scenario file."""
    name: str | None = None
    """Name of a bundled profile (`windtunnel profiles list`)."""
    noise: bool | None = None
    """Scatter the steps' times by what the profile states; same seed, same times."""
    refuse_outside: bool | None = None
    """Stop at a step that is outside of what the profile was measured at, in place of a warning."""

    @model_validator(mode="after")
    def _check_which(self) -> ProfileCost:
        if self.path is None and self.name is None:
            raise ValueError("needs a path (of a file) or a name (of a bundled profile: windtunnel profiles list)")
        if self.path is not None and self.name is not None:
            raise ValueError("says twice which profile: leave path or name out")
        return self


def cost_kind(value: Any) -> str:
    """Which cost model a [cost] table asks for; where it does not say, auto, or the roofline if it sets its factors."""
    if not isinstance(value, dict):
        return str(getattr(value, "kind", "auto"))
    has_factors = any(key in RooflineCost.model_fields for key in value if key != "kind")
    return str(value.get("kind", "roofline" if has_factors else "auto"))


Cost = Annotated[
    Annotated[AutoCost, Tag("auto")]
    | Annotated[RooflineCost, Tag("roofline")]
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


class Tenant(_Section):
    """What one tenant is entitled to at the gateway."""

    weight: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Its part of the tokens while others wait too, relative to theirs."""
    priority: int | None = None
    """Smaller goes first, whatever the weights."""
    max_in_flight: Annotated[Count | None, Field(ge=1)] = None
    """Most of its requests that are in the server at once."""
    requests_per_s: Annotated[float | None, Field(ge=0.001, le=1e12)] = None
    """Its requests that go in per second over time; a second's worth may go at once."""
    tokens_per_minute: Annotated[Count | None, Field(ge=1, le=10**12)] = None
    """Tokens (prompts and max_tokens) that go in per minute over time; a minute's worth may go at once."""
    beyond: Literal["queue", "reject"] | None = None
    """What becomes of a request beyond these limits: it waits, or is rejected (HTTP 429)."""


class Gateway(_Section):
    """What stands before the server, with a queue for each tenant; there is none unless it is asked for."""

    fairness: Literal["weighted", "none"] | None = None
    """Who is next: the tenant that has got the fewest tokens for its weight, or whoever came first."""
    max_in_flight: Annotated[Count | None, Field(ge=1)] = None
    """Requests in the server at once; not given: as many as its replicas have seats (max_num_seqs)."""


class Run(_Section):
    """How the simulation is run."""

    horizon: Annotated[Duration | None, Field(gt=0)] = None
    """Stop after so much simulated time, whatever is still open."""
    saturation: bool | None = None
    """Measure what the engine can do at most, by a second short simulation, to state how much of it is asked for."""
    tenants_alone: bool | None = None
    """Simulate each tenant with the server to itself, too, to say what the others cost it."""
    percentiles: list[Annotated[float, Field(gt=0, lt=100)]] | None = None
    """Percentiles in the summary."""


LARGEST_RATE = 1e12
"""As in ``sim.metrics.economics``, which takes long to import."""


def read_per_gpu(value: Any) -> Any:
    """A number for any GPU, or a table by the GPU's name; also as text (2.49, h100-sxm=2.49), or a list of such."""
    found = _split_per_gpu(value)
    numbers = list(found.values()) if isinstance(found, dict) else [found]
    if not numbers or not all(map(_may_be_meant, numbers)):
        raise ValueError(f"must be a number from 0 to {LARGEST_RATE:g}, or a table of such by the names of GPUs")
    return found


def _may_be_meant(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number <= LARGEST_RATE


def _split_per_gpu(value: Any) -> Any:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        return value
    found: dict[str, float] = {}
    for text in value:
        name, _, number = str(text).rpartition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            raise ValueError("must be a number, or NAME=NUMBER with the name of a GPU, such as h100-sxm=2.49") from None
    if "" in found and len(found) > 1:
        raise ValueError("says a number for all GPUs and others by name: give names with all of them, or one number")
    return found.get("", found)


PerGpu = Annotated[
    float | dict[str, float],
    BeforeValidator(
        read_per_gpu,
        json_schema_input_type=Annotated[
            float | str | dict[str, float],
            WithJsonSchema(
                {"type": ["number", "string", "array", "object"], "minimum": 0, "$comment": "number, or table by GPU"}
            ),
        ],
    ),
]
"""A number for one GPU, or a table of them by name."""


class Price(_Section):
    """What GPUs cost, for the cost of a run; nothing is assumed where no price is given."""

    gpu_hour: PerGpu | None = None
    """Price of one GPU for an hour, as a number or by the GPU's name: {h100-sxm = 2.49, l40s = 0.86}."""
    currency: Annotated[str | None, Field(min_length=1, max_length=12)] = None
    """What prices are in; only a word beside them."""


class Power(_Section):
    """What GPUs draw, for the energy of a run; both are needed."""

    idle_watts: PerGpu | None = None
    """Power of one GPU while no step runs, as a number or by the GPU's name."""
    busy_watts: PerGpu | None = None
    """Power of one GPU while a step runs, as a number or by the GPU's name."""


class FleetAutoscaler(_Section):
    """How a pool grows and shrinks, as Kubernetes' HorizontalPodAutoscaler does under KEDA."""

    metric: Literal["waiting", "concurrency", "kv_usage"]
    """What it goes by: requests that wait, requests sent and not answered, or the share of the KV cache in use."""
    target: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """What the metric should be for each replica."""
    min_replicas: Annotated[Count | None, Field(ge=0)] = None
    """Fewest replicas; 1 if not given."""
    max_replicas: Annotated[Count, Field(ge=1, le=4096)]
    """Most replicas."""
    start_up: Duration | None = None
    """From the decision to the first request of a new replica: node, image, weights, CUDA graphs."""
    interval: Annotated[Duration | None, Field(gt=0)] = None
    """How often it looks, at least 1 ms."""
    metric_delay: Duration | None = None
    """How old the metric is that it acts upon."""
    tolerance: Annotated[float | None, Field(ge=0, lt=1)] = None
    """Share by which the metric may miss the target without anything being done."""
    up_stabilization: Duration | None = None
    """It grows to the lowest recommendation of so long a time."""
    down_stabilization: Duration | None = None
    """It shrinks to the highest recommendation of so long a time."""
    up_limit_replicas: Annotated[Count | None, Field(ge=0)] = None
    """In up_period it grows by so many replicas, or by up_limit_percent, whichever is more."""
    up_limit_percent: Annotated[Count | None, Field(ge=0)] = None
    """In up_period it grows by so much of what is there, or by up_limit_replicas, whichever is more."""
    up_period: Annotated[Duration | None, Field(gt=0)] = None
    """The time that these two limits are about."""
    drain_timeout: Duration | None = None
    """How long a replica that has to go may finish its requests; not given: as long as it takes."""


class FleetFault(_Section):
    """Something that goes wrong with one replica."""

    kind: Literal["crash", "slow"]
    """crash: it is gone at once, with its cache and what it computes; slow: its steps take longer."""
    pool: str | None = None
    """Name of its pool; not needed where there is only one."""
    replica: Annotated[Count | None, Field(ge=0)] = None
    """Which of the pool's, counted from 0; 0 if not given."""
    at: Duration
    """When it happens, from the start of the run."""
    restart_after: Annotated[Duration | None, Field(gt=0)] = None
    """crash: so long after, another with an empty cache takes its place; not given: never."""
    factor: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """slow: how many times as long its steps take."""
    duration: Annotated[Duration | None, Field(gt=0)] = None
    """slow: how long that lasts; not given: to the end."""


_Scaler = Annotated[FleetAutoscaler, _spec("metric", FleetAutoscaler | str)]
_Fault = Annotated[FleetFault, _spec("kind", FleetFault | str)]


class FleetPool(_Section):
    """Replicas of one kind; what is not given here is that of the scenario."""

    replicas: Annotated[Count | None, Field(ge=1, le=4096)] = None
    """How many there are at the start; 1 if not given."""
    role: Literal["mixed", "prefill", "decode"] | None = None
    """prefill computes prompts and hands their KV cache to a pool with the role decode; mixed (the default) does
    both."""
    weight: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """How much one of them can take beside those of other pools; routers that count requests use it."""
    autoscaler: _Scaler | None = None
    """How the pool grows and shrinks."""
    deployment: Deployment = Deployment()
    """Keys of [deployment] that differ here."""
    engine: Engine = Engine()
    """Keys of [engine] that differ here."""
    cost: Annotated[Cost | None, _spec("kind", Cost | str)] = None
    """[cost] of these replicas, in place of the scenario's."""


class Fleet(_Section):
    """Replicas as servers of their own behind a router, of one kind or several, that may come, go, crash and slow
    down; deployment.router says who serves the next request."""

    pools: dict[str, FleetPool] = {}
    """Kinds of replicas, by name; not given: data_parallel_size replicas of [deployment]."""
    autoscaler: _Scaler | None = None
    """How the replicas grow and shrink in number, where no pools are given."""
    faults: list[_Fault] = []
    """What goes wrong, and when."""
    on_crash: Literal["fail", "retry", "retry_unstarted"] | None = None
    """What becomes of requests whose replica is gone: they fail, are tried elsewhere from the beginning, or are so only
    if the client has seen no token yet."""
    max_attempts: Annotated[Count | None, Field(ge=1)] = None
    """How often a request is sent to a replica at most."""
    health_check_interval: Duration | None = None
    """How often the router looks whether each replica is alive, 10s if not given; 0: it knows of a crash at once."""
    health_check_failures: Annotated[Count | None, Field(ge=1)] = None
    """Looks in a row that have to fail until a replica gets no more requests; 3 if not given."""
    dead_replicas: Literal["refuse", "hang"] | None = None
    """What a dead replica does to requests until the router notices: it refuses them at once (the default), or lets
    them wait for nothing."""
    network_latency: Duration | None = None
    """From the router to a replica, or back; 0 if not given."""
    kv_transfer_bandwidth: Annotated[Size | None, Field(ge=1)] = None
    """Between prefill and decode pools: bytes per second that one GPU's link reaches, each way."""
    kv_transfer_latency: Duration | None = None
    """Time that a copy takes besides; 0 if not given."""
    kv_bytes_per_token: Annotated[Count | None, Field(ge=1)] = None
    """KV cache of a token on one GPU, where no model says it."""
    max_requests_per_replica: Annotated[Count | None, Field(ge=1)] = None
    """Most requests that the router has in flight at one replica; others wait for their turn before it."""
    max_waiting_requests: Annotated[Count | None, Field(ge=0)] = None
    """Requests waiting there from which on new ones are rejected."""
    stats_interval: Duration | None = None
    """How often the router reads the engines' metrics, at least 1 ms; 0 is at every decision."""
    stats_delay: Duration | None = None
    """How long what it read is under way until it counts."""
    prefix_weight: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    """prefix_affinity: weight of the share of the prompt that is believed to be cached."""
    queue_weight: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    """prefix_affinity: weight of a short queue."""
    kv_weight: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    """prefix_affinity: weight of the free share of the KV cache."""
    prefix_block_tokens: Annotated[Count | None, Field(ge=1)] = None
    """prefix_affinity: tokens in a block of its index."""
    prefix_max_blocks: Annotated[Count | None, Field(ge=1)] = None
    """prefix_affinity: blocks from the beginning of a prompt that it looks at."""
    prefix_capacity_blocks: Annotated[Count | None, Field(ge=1)] = None
    """prefix_affinity: blocks that it remembers for each replica."""


class Plan(_Section):
    """What `windtunnel plan` chooses from, and how far it looks ahead; prices are those of [price]."""

    gpus: list[str] = []
    """Cards to choose from; not given: those that [price] names."""
    gpus_per_host: Annotated[Count | None, Field(ge=1, le=1024)] = None
    """Cards of one host, over which one replica may span."""
    tensor_parallel_size_choices: Sizes | None = None
    """Sizes that are tried; not given: powers of two that one host holds."""
    pipeline_parallel_size_choices: Sizes | None = None
    """Stages that are tried; not given: one."""
    kv_cache_dtype_choices: list[Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16"]] | None = None
    """Types of the KV cache that are tried."""
    max_num_seqs_choices: Sizes | None = None
    """Seats that are tried."""
    max_num_batched_tokens_choices: Sizes | None = None
    """Token budgets that are tried."""
    gpu_memory_utilization_choices: list[Share] | None = None
    """Shares of the memory that are tried."""
    uncalibrated: bool | None = None
    """Try deployments without a profile, too; they are ranked apart."""
    spare_replicas: Annotated[Count | None, Field(ge=0, le=1000)] = None
    """Replicas bought beside those that are needed: 1 is N+1."""
    growth: str | None = None
    """How the load grows: "5%/month" or "60%/year"."""
    months: Annotated[Count | None, Field(ge=1, le=120)] = None
    """How far ahead the growth is followed."""


class Scenario(_Section):
    """One question: which workload, on which deployment."""

    schema_version: Literal[1] = 1
    """Version of this format."""
    name: str
    """A short name, for reports."""
    description: str = ""
    """One line on what it is about."""
    teaches: str = ""
    """What it shows, for those who want to learn from it."""
    seed: Annotated[Count | None, Field(ge=0)] = None
    """All randomness follows from it."""
    deployment: Deployment = Deployment()
    engine: Engine = Engine()
    batching: Annotated[Batching, _spec("policy", Batching | str)] = ContinuousBatching()
    speculative: Annotated[Speculative | None, _spec("method", Speculative | str)] = None
    workload: Workload
    cost: Annotated[Cost, _spec("kind", Cost | str)] = AutoCost()
    slo: Slo = Slo()
    price: Price = Price()
    power: Power = Power()
    gateway: Gateway | None = None
    tenants: dict[str, Tenant] = {}
    """Weights and limits of tenants, by name; they ask for a gateway."""
    fleet: Fleet | None = None
    run: Run = Run()
    compare: Compare = Compare()
    plan: Plan = Plan()


WORKLOAD_KINDS: dict[str, type[BaseModel]] = {"trace": TraceWorkload, "synthetic": SyntheticWorkload}
COST_KINDS: dict[str, type[BaseModel]] = {
    "auto": AutoCost,
    "roofline": RooflineCost,
    "constant": ConstantCost,
    "affine": AffineCost,
    "profile": ProfileCost,
}
BATCHING_POLICIES: dict[str, type[BaseModel]] = {
    "continuous": ContinuousBatching,
    "static": StaticBatching,
    "dynamic": DynamicBatching,
    "swap": SwapBatching,
}


def fleet_table(path: tuple[str | int, ...]) -> type[BaseModel]:
    """Which table stands at this place below [fleet]."""
    table: type[BaseModel] = Fleet
    below: dict[str, type[BaseModel]] = {
        "pools": FleetPool,
        "autoscaler": FleetAutoscaler,
        "faults": FleetFault,
    }
    of_pool: dict[str, type[BaseModel]] = {"deployment": Deployment, "engine": Engine, "autoscaler": FleetAutoscaler}
    for part in path:
        table = (of_pool if table is FleetPool else below).get(str(part), table)
    return table


SECTIONS: dict[str, tuple[type[BaseModel], ...]] = {
    "deployment": (Deployment,),
    "engine": (Engine,),
    "batching": tuple(BATCHING_POLICIES.values()),
    "speculative": (Speculative,),
    "workload": (TraceWorkload, SyntheticWorkload),
    "cost": tuple(COST_KINDS.values()),
    "slo": (Slo,),
    "gateway": (Gateway,),
    "price": (Price,),
    "power": (Power,),
    "fleet": (Fleet,),
    "run": (Run,),
    "compare": (Compare,),
    "plan": (Plan,),
}
