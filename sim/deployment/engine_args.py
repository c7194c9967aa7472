"""vLLM's engine arguments: what it takes when nothing is said, and where each value comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from windtunnel.sim.deployment.gpu import GpuSpec
from windtunnel.sim.deployment.model_spec import ModelSpec
from windtunnel.sim.deployment.versions import NOT_VERIFIED, VersionProfile, profile

ENGINE = "vllm-0.32"
"""The engine that is simulated unless another one is asked for."""
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
    version: VersionProfile | None = None,
) -> EngineDefaults:
    """vLLM's settings for ``model`` on ``gpu``; what is not None was given and stays.

    ``usage_context`` is "api_server" (``vllm serve``) or "llm_class" (offline ``LLM``), ``version`` the release,
    0.32 if None.  The token budget starts from a default by device memory, is at least max_model_len without chunked
    prefill and at most max_num_seqs * max_model_len; a defaulted max_num_seqs does not exceed the budget.  Releases
    before 0.11.1 do less: no such upper bound, chunked prefill whatever is given, and before 0.10.1 no bound on
    max_num_seqs.

    Raises ValueError for an unknown context or mode, a value out of range, a mode that the release does not know, or
    when neither ``model`` nor ``max_model_len`` is there.  That a budget reaches max_num_seqs is checked by
    SchedulerConfig.
    """
    rules = profile(ENGINE) if version is None else version
    if performance_mode != "balanced":
        rules.check_options(["performance_mode"])
    read = "" if version is None else _read_in(version)
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

    default = f"{rules.label} default"
    chunked = _chunked_prefill(enable_chunked_prefill, rules, read)
    caching = _given_or(enable_prefix_caching, rules.enable_prefix_caching, f"{default} for generative models{read}")
    share = _given_or(gpu_memory_utilization, rules.gpu_memory_utilization, f"{default}{read}")
    block = _given_or(block_size, rules.block_size, f"{default} on GPUs{read}")
    length = _context_length(max_model_len, model)
    batch = _batch_defaults(gpu, usage_context, performance_mode, rules, read)
    seqs = _given_or(max_num_seqs, batch.max_num_seqs, batch.source)
    most = seqs.value * length.value if rules.budget_within_all_sequences else None
    budget = _budget(max_num_batched_tokens, batch, most, length.value, chunked.value)
    if max_num_seqs is None and seqs.value > budget.value and rules.seqs_within_budget:
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
        remedy = f"; for {value:g} % give {value / 100:g}" if 10.0 <= value <= 100.0 else ""
        raise ValueError(
            f"gpu_memory_utilization must lie in (0, 1], got {value}: it is a share of the device memory{remedy}"
        )


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


def _read_in(version: VersionProfile) -> str:
    release = version.verified["batch_tiers"]
    return f" ({NOT_VERIFIED})" if release == NOT_VERIFIED else f" (read in {release})"


def _chunked_prefill(given: bool | None, rules: VersionProfile, read: str) -> _Setting[bool]:
    if given is False and rules.forces_chunked_prefill:
        return _Setting(True, f"always on in the V1 engine of {rules.label}{read}; the given false has no effect")
    return _given_or(given, True, f"{rules.label} default for generative models{read}")


def _batch_defaults(
    gpu: GpuSpec, usage_context: str, performance_mode: str, rules: VersionProfile, read: str
) -> _BatchDefaults:
    tier = rules.batch_tier(gpu)
    budget = tier.llm_class if usage_context == "llm_class" else tier.api_server
    source = f"{rules.label} default for {tier.label}, {usage_context}{read}"
    if performance_mode == "throughput":
        return _BatchDefaults(2 * budget, 2 * tier.max_num_seqs, f"{source}, doubled by performance_mode=throughput")
    return _BatchDefaults(budget, tier.max_num_seqs, source)


def _budget(
    given: int | None, batch: _BatchDefaults, most: int | None, max_model_len: int, chunked: bool
) -> _Setting[int]:
    if given is not None:
        return _Setting(given, "given")
    budget, source = batch.max_num_batched_tokens, batch.source
    if not chunked and budget < max_model_len:
        budget, source = max_model_len, f"{source}, raised to max_model_len because chunked prefill is off"
    if most is not None and budget > most:
        budget, source = most, f"{source}, lowered to max_num_seqs * max_model_len"
    return _Setting(budget, source)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_at_least_one(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
