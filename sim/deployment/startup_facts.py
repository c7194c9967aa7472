"""What a start-up of vLLM says of its memory, as plain data: facts, errors by kind, periodic lines in short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ERROR_KINDS = {
    "free_memory_below_desired": "less memory is free on the device than gpu_memory_utilization asks for",
    "no_available_memory": "nothing is left for the KV cache",
    "max_model_len_exceeds_kv_cache": "one request of max_model_len tokens does not fit into the KV cache",
    "auto_fit_failed": "not even one token fits into the KV cache",
    "mamba_blocks_exceeded": "max_num_seqs is larger than the number of state blocks",
    "out_of_memory_weights": "out of memory while the weights were loaded",
    "out_of_memory_profiling": "out of memory in the profile run",
    "out_of_memory_kv_cache": "out of memory after the KV cache was sized, before or without graph capture",
    "out_of_memory_graph_capture": "out of memory while CUDA graphs were captured",
    "out_of_memory_sampler_warmup": "out of memory when the sampler was warmed up with max_num_seqs requests",
    "out_of_memory_serving": "out of memory after the start-up",
    "memory_profiling_error": "another process freed memory while vLLM measured",
    "heads_not_divisible": "tensor_parallel_size does not divide the number of attention heads",
    "max_model_len_exceeds_model": "max_model_len is larger than the model's context",
    "budget_below_max_num_seqs": "max_num_batched_tokens is smaller than max_num_seqs",
    "budget_below_max_model_len": "without chunked prefill max_num_batched_tokens is smaller than max_model_len",
    "host_memory_below_desired": "less host memory is free than the CPU backend's KV cache needs",
    "engine_core_failed": "the engine did not start, and the text does not say why",
}
"""Kinds of error that are told apart, each with what it means."""


class StartupError(NamedTuple):
    """An error in the log: its kind (a key of ERROR_KINDS), the numbers it names and the line it is on."""

    kind: str
    numbers: Mapping[str, float]
    """By name, with units in the names (``needed_bytes``, ``estimated_max_model_len``); empty if it names none."""
    line: int
    text: str
    """The message as logged, at most 500 characters."""


class PoolLine(NamedTuple):
    """One "KV cache size" line; each engine of a data-parallel server writes its own, old releases one a worker."""

    process: str
    kv_cache_tokens: int
    line: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one process said of its device, in bytes; None is not in the log (most lines come from rank 0 only)."""

    process: str
    """As logged: ``Worker_TP0``, ``Worker_DP1_TP0``, ``VllmWorker rank=1``, ``EngineCore``; empty for a bare line."""
    total_memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    requested_memory_bytes: int | None = None
    weights_bytes: int | None = None
    non_torch_bytes: int | None = None
    consumed_bytes: int | None = None
    activation_bytes: int | None = None
    cudagraph_actual_bytes: int | None = None
    cudagraph_estimate_bytes: int | None = None
    available_kv_cache_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    """The periodic lines in short.  Peaks are over all engines and lines."""

    num_lines: int
    first_line: int
    last_line: int
    max_running: int
    max_waiting: int
    max_kv_cache_usage_percent: float | None
    num_preemptions: int
    """The sum of V1's counts per interval, or V0's last cumulative count (which it logs every 50th time)."""
    prefix_cache_hit_rate_percent: float | None
    """Of the last line that has it."""


@dataclass(frozen=True, slots=True)
class StartupFacts:
    """What the last start-up in a log says.  Sizes are bytes of one rank; None is not in the log.

    Of several ranks the one with the smallest KV cache is reported, since it decides the pool; ``ranks`` has them all.
    """

    name: str
    vllm_version: str | None = None
    engine: str | None = None
    """``V0`` or ``V1``."""
    model: str | None = None
    non_default_args: Mapping[str, Any] = field(default_factory=dict)
    """The ``non-default args`` or, to 0.9, ``Namespace``; enums and objects as text, what was cut off left out."""
    max_model_len: int | None = None
    """After auto-fit, where there is one."""
    auto_fit_max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    context_parallel_size: int | None = None
    """Decode (and prefill) context parallel ranks by which the logged tokens were multiplied."""
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool | None = None
    total_memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    """At start-up, before the weights are loaded."""
    requested_memory_bytes: int | None = None
    """gpu_memory_utilization of the total."""
    weights_bytes: int | None = None
    non_torch_bytes: int | None = None
    """As logged; from 0.28 on, which logs consumed memory instead, consumed less weights."""
    consumed_bytes: int | None = None
    """Weights and everything else that stays, as vLLM 0.28 and later log it."""
    activation_bytes: int | None = None
    """Peak of the profile run, without graphs (some releases add their estimate to the logged figure)."""
    cudagraph_actual_bytes: int | None = None
    cudagraph_estimate_bytes: int | None = None
    cudagraph_estimate_applied: bool | None = None
    """Whether the estimate was taken out of the KV cache (the default from 0.21 on)."""
    equivalent_gpu_memory_utilization: float | None = None
    """The one that gives the same KV cache without the estimate."""
    suggested_gpu_memory_utilization: float | None = None
    """The one that vLLM suggests to have the KV cache of before."""
    available_kv_cache_bytes: int | None = None
    """The minimum over the ranks in the log."""
    kv_cache_memory_bytes: int | None = None
    """``--kv-cache-memory-bytes``, which overrides gpu_memory_utilization."""
    suggested_kv_cache_memory_bytes: int | None = None
    """``--kv-cache-memory=N`` to fit into requested memory."""
    suggested_kv_cache_memory_limit_bytes: int | None = None
    """``--kv-cache-memory=N`` to use the device fully."""
    kv_cache_tokens: int | None = None
    """The minimum over ``pools``: the pool of one engine."""
    num_gpu_blocks: int | None = None
    """Of one engine, the null block included; the override where there is one."""
    profiled_num_gpu_blocks: int | None = None
    """What fits, where num_gpu_blocks_override replaced it."""
    num_cpu_blocks: int | None = None
    max_concurrency: float | None = None
    max_concurrency_tokens: int | None = None
    """The request length that max_concurrency is for."""
    is_hybrid: bool | None = None
    """True if a line speaks of several kinds of cache layers; never False, as no line says so."""
    hybrid_hints: tuple[str, ...] = ()
    started: bool = False
    """Whether the server came up."""
    errors: tuple[StartupError, ...] = ()
    serving: Serving | None = None
    ranks: tuple[RankMemory, ...] = ()
    pools: tuple[PoolLine, ...] = ()
    num_startups: int = 1
    notes: tuple[str, ...] = ()
    """What had to be chosen or assumed, in sentences."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """The line (from 1) that each field came from."""
