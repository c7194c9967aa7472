"""What a memory plan can be read from: a server's log, its metrics, a deployment as somebody wrote it down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.sim.deployment.gpu import GIB
from windtunnel.sim.deployment.memory_request import MeasuredPool

if TYPE_CHECKING:
    from windtunnel.sim.deployment.startup_log import StartupFacts


class MemoryInputUnreadable(ValueError):
    """A log, dump of metrics, deployment or profile that cannot be read."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was read: settings by vLLM's names, the pool that was measured, and figures to compare with."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    measured: MeasuredPool | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def under(self, other: Found) -> Found:
        """Both together; what ``other`` says of a setting counts."""
        return Found(
            {**self.settings, **other.settings},
            other.measured or self.measured,
            {**self.facts, **other.facts},
            (*self.notes, *other.notes),
        )


# --- a deployment

_TAKEN = (
    "model",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "cpu_offload_gb",
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enforce_eager",
    "disable_hybrid_kv_cache_manager",
)
_MATTERS = (
    "quantization",
    "hf_overrides",
    "fully_sharded_loras",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "mamba_block_size",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "language_model_only",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "compilation_config",
)
"""Settings that change the memory in ways that are not planned."""


def read_deployment_settings(source: str | Path) -> Found:
    """The settings of a ``vllm serve`` line, a compose file, Helm values, a manifest or a config file.

    Raises MemoryInputUnreadable for a file that is none of them, ValueError for values out of range.
    """
    from windtunnel.scenarios.deployments.errors import DeploymentUnreadable
    from windtunnel.scenarios.deployments.read import read_deployment

    try:
        found = read_deployment(source)
    except DeploymentUnreadable as error:
        raise MemoryInputUnreadable(str(error)) from None
    given = found.settings
    settings = {name: given[name] for name in _TAKEN if given.get(name) is not None}
    if given.get("swap_space") is not None:
        settings["swap_space"] = given["swap_space"] / GIB
    speculative = given.get("speculative_config") or {}
    if speculative.get("num_speculative_tokens"):
        settings["num_speculative_tokens"] = speculative["num_speculative_tokens"]
    if given.get("enable_lora"):
        settings |= {name: given[name] for name in ("enable_lora", "max_loras", "max_lora_rank") if name in given}
    settings["usage_context"] = found.usage_context
    if found.engine_version:
        settings["engine"] = found.engine_version
    if found.gpu:
        settings["gpu"] = found.gpu
    left_out = [name for name in _MATTERS if given.get(name)]
    notes = list(found.notes)
    if speculative:
        notes.append("The weights of a drafter are not counted.")
    if left_out:
        notes.append(f"Not planned, though it changes the memory: {', '.join(left_out)}.")
    notes += [f"{flag} is no flag of vLLM" for flag in found.unknown]
    return Found(settings, notes=tuple(notes))


# --- a log

_FROM_LOG = {
    "model": "model",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "kv_cache_dtype": "kv_cache_dtype",
    "block_size": "block_size",
    "enforce_eager": "enforce_eager",
    "enable_prefix_caching": "enable_prefix_caching",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
}
_COMPARED = {
    "weights_bytes": "weights_bytes",
    "activation_bytes": "activation_bytes",
    "non_torch_bytes": "non_torch_bytes",
    "available_kv_cache_bytes": "available_kv_cache_bytes",
    "num_gpu_blocks": "num_gpu_blocks",
    "kv_cache_tokens": "kv_cache_tokens",
    "max_concurrency": "max_concurrency",
}


def read_log_settings(path: str | Path) -> Found:
    """The settings and the pool of the last start-up in a log.

    Raises MemoryInputUnreadable for a file that cannot be read or holds no line of vLLM's.
    """
    from windtunnel.sim.deployment.startup_log import read_startup_log

    try:
        facts = read_startup_log(_text(path), name=str(path))
    except ValueError as error:
        raise MemoryInputUnreadable(str(error)) from None
    settings = _arguments(facts)
    for name, attribute in _FROM_LOG.items():
        value = getattr(facts, attribute)
        if value is not None:
            settings[name] = value
    notes = list(facts.notes)
    if facts.total_memory_bytes is not None:
        settings["gpu_memory_gib"] = facts.total_memory_bytes / GIB
    if facts.free_memory_bytes is not None:
        settings["free_memory_gib"] = facts.free_memory_bytes / GIB
    if facts.vllm_version:
        settings |= _engine(facts.vllm_version, notes)
    if facts.engine == "V0":
        settings["v0"] = True
    notes += [f"{path}, line {error.line}: {error.text}" for error in facts.errors]
    figures = {name: getattr(facts, attribute) for name, attribute in _COMPARED.items()}
    graphs = facts.cudagraph_estimate_bytes
    figures["cudagraph_bytes"] = facts.cudagraph_actual_bytes if graphs is None else graphs
    measured = MeasuredPool(
        str(path),
        facts.available_kv_cache_bytes,
        facts.num_gpu_blocks,
        facts.kv_cache_tokens,
        facts.max_concurrency_tokens or facts.max_model_len,
    )
    known = (measured.available_bytes, measured.num_gpu_blocks, measured.kv_cache_tokens)
    if all(value is None for value in known):
        notes.append(f"{path} does not tell the KV cache: it is that of the formula")
        return Found(settings, None, {}, tuple(notes))
    return Found(settings, measured, figures, tuple(notes))


def _arguments(facts: StartupFacts) -> dict[str, Any]:
    """Settings that only the logged arguments tell."""
    names = ("enable_expert_parallel", "num_gpu_blocks_override", "cpu_offload_gb", "dtype")
    given = {name: facts.non_default_args[name] for name in names if facts.non_default_args.get(name) is not None}
    dtype = given.get("dtype")
    if dtype is not None:
        given["dtype"] = str(dtype).removeprefix("torch.")
    return given


def _engine(version: str, notes: list[str]) -> dict[str, Any]:
    """The release, if it is a known one; a vendor's build counts as what it was built from."""
    from windtunnel.sim.deployment.versions import profile

    plain = version.split("+")[0]
    for name in (plain, ".".join(plain.split(".")[:2])):
        try:
            return {"engine": profile(name).name}
        except ValueError:
            continue
    notes.append(f"vLLM {version} is no release that is known; give --engine")
    return {}


# --- metrics


def read_metrics_settings(path: str | Path) -> Found:
    """The pool in a dump of ``/metrics`` or in Prometheus' JSON.

    Raises MemoryInputUnreadable for a file that cannot be read or holds no metrics of vLLM's.
    """
    from windtunnel.sim.deployment.metrics_text import read_metrics

    try:
        facts = read_metrics(_text(path), name=str(path))
    except ValueError as error:
        raise MemoryInputUnreadable(str(error)) from None
    if facts.num_gpu_blocks is None and facts.kv_cache_tokens is None:
        raise MemoryInputUnreadable(f"{path}: no vllm:cache_config_info with the number of blocks in it")
    named = {
        "block_size": facts.block_size,
        "gpu_memory_utilization": facts.gpu_memory_utilization,
        "kv_cache_memory_bytes": facts.kv_cache_memory_bytes,
        "kv_cache_dtype": facts.cache_dtype,
        "enable_prefix_caching": facts.enable_prefix_caching,
        "model": facts.model,
    }
    settings = {name: value for name, value in named.items() if value is not None}
    figures = {"num_gpu_blocks": facts.num_gpu_blocks, "kv_cache_tokens": facts.kv_cache_tokens}
    measured = MeasuredPool(str(path), None, facts.num_gpu_blocks, facts.kv_cache_tokens)
    return Found(settings, measured, figures, facts.notes)


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise MemoryInputUnreadable(f"{path}: {error.strerror}") from None


__all__ = [
    "Found",
    "MemoryInputUnreadable",
    "read_deployment_settings",
    "read_log_settings",
    "read_metrics_settings",
]
