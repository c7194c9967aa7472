"""vLLM's engine arguments: what it takes when nothing is said, and where each value comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from windtunnel.sim.deployment.gpu import GIB, GpuSpec
from windtunnel.sim.deployment.model_spec import ModelSpec

ENGINE_VERSION = "vLLM 0.32"
USAGE_CONTEXTS = ("api_server", "llm_class")
PERFORMANCE_MODES = ("balanced", "throughput", "interactivity")

GPU_MEMORY_UTILIZATION = 0.92
BLOCK_SIZE = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineDefaults:
    """The settings an engine starts with, given ones and defaults together.

    ``sources`` says of each field, by name, where its value comes from ("given", or which default applied).
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    gpu_memory_utilization: float
    block_size: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    sources: Mapping[str, str]


def engine_defaults(
    gpu: GpuSpec,
    usage_context: str = "api_server",
    *,
    model: ModelSpec | None = None,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
    gpu_memory_utilization: float | None = None,
    block_size: int | None = None,
    enable_chunked_prefill: bool | None = None,
    enable_prefix_caching: bool | None = None,
    performance_mode: str = "balanced",
) -> EngineDefaults:
    """vLLM 0.32's settings for ``model`` on ``gpu``; what is not None was given and stays.

    ``usage_context`` is "api_server" (``vllm serve``) or "llm_class" (offline ``LLM``).  The token budget starts
    from a default by device memory, is at least max_model_len without chunked prefill and at most
    max_num_seqs * max_model_len; a defaulted max_num_seqs does not exceed the budget.

    Raises ValueError for an unknown context or mode, a value out of range, or when neither ``model`` nor
    ``max_model_len`` is there.  That a given budget reaches a given max_num_seqs is checked by SchedulerConfig.
    """
    _check_choice("usage_context", usage_context, USAGE_CONTEXTS)
    _check_choice("performance_mode", performance_mode, PERFORMANCE_MODES)
    _check_at_least_one(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
    )
    if gpu_memory_utilization is not None:
        check_gpu_memory_utilization(gpu_memory_utilization)

    generative = f"{ENGINE_VERSION} default for generative models"
    chunked = _given_or(enable_chunked_prefill, True, generative)
    caching = _given_or(enable_prefix_caching, True, generative)
    share = _given_or(gpu_memory_utilization, GPU_MEMORY_UTILIZATION, f"{ENGINE_VERSION} default")
    block = _given_or(block_size, BLOCK_SIZE, f"{ENGINE_VERSION} default on GPUs")
    length = _context_length(max_model_len, model)
    batch = _batch_defaults(gpu, usage_context, performance_mode)
    seqs = _given_or(max_num_seqs, batch.max_num_seqs, batch.source)
    budget = _budget(max_num_batched_tokens, batch, seqs.value, length.value, chunked.value)
    if max_num_seqs is None and seqs.value > budget.value:
        seqs = _Setting(budget.value, f"{batch.source}, lowered to max_num_batched_tokens")
    return EngineDefaults(
        max_num_batched_tokens=budget.value,
        max_num_seqs=seqs.value,
        max_model_len=length.value,
        gpu_memory_utilization=share.value,
        block_size=block.value,
        enable_chunked_prefill=chunked.value,
        enable_prefix_caching=caching.value,
        sources={
            "max_num_batched_tokens": budget.source,
            "max_num_seqs": seqs.source,
            "max_model_len": length.source,
            "gpu_memory_utilization": share.source,
            "block_size": block.source,
            "enable_chunked_prefill": chunked.source,
            "enable_prefix_caching": caching.source,
        },
    )


def check_gpu_memory_utilization(value: float) -> None:
    """Raise ValueError unless ``value`` is a share in (0, 1]."""
    if not 0.0 < value <= 1.0:
        raise ValueError(f"gpu_memory_utilization must lie in (0, 1], got {value}: it is a share of the device memory")


class _Setting(NamedTuple, Generic[T]):
    value: T
    source: str


class _BatchDefaults(NamedTuple):
    max_num_batched_tokens: int
    max_num_seqs: int
    source: str


def _given_or(given: T | None, default: T, source: str) -> _Setting[T]:
    return _Setting(default, source) if given is None else _Setting(given, "given")


def _context_length(given: int | None, model: ModelSpec | None) -> _Setting[int]:
    if given is not None:
        return _Setting(given, "given")
    if model is None:
        raise ValueError("max_model_len has no default without a model: give one of them")
    return _Setting(model.max_model_len, f"longest context of {model.name}")


def _batch_defaults(gpu: GpuSpec, usage_context: str, performance_mode: str) -> _BatchDefaults:
    """The table of vLLM's ``EngineArgs.get_batch_defaults`` by device memory; A100s count as small cards."""
    offline = usage_context == "llm_class"
    if gpu.memory_bytes >= 160 * GIB:
        budget, seqs, tier = 16384, 1024, ">= 160 GiB"
    elif gpu.memory_bytes >= 70 * GIB and "a100" not in gpu.name.casefold():
        budget, seqs, tier = 16384 if offline else 8192, 1024, ">= 70 GiB"
    else:
        budget, seqs, tier = 8192 if offline else 2048, 256, "A100 or < 70 GiB"
    source = f"{ENGINE_VERSION} default for {tier}, {usage_context}"
    if performance_mode == "throughput":
        return _BatchDefaults(2 * budget, 2 * seqs, f"{source}, doubled by performance_mode=throughput")
    return _BatchDefaults(budget, seqs, source)


def _budget(
    given: int | None, batch: _BatchDefaults, max_num_seqs: int, max_model_len: int, chunked: bool
) -> _Setting[int]:
    if given is not None:
        return _Setting(given, "given")
    budget, source = batch.max_num_batched_tokens, batch.source
    if not chunked and budget < max_model_len:
        budget, source = max_model_len, f"{source}, raised to max_model_len because chunked prefill is off"
    if budget > max_num_seqs * max_model_len:
        budget, source = max_num_seqs * max_model_len, f"{source}, lowered to max_num_seqs * max_model_len"
    return _Setting(budget, source)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_at_least_one(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
