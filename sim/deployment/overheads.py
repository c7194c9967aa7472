"""The parts of a GPU's memory that no formula gives: activations, CUDA and communication, CUDA graphs.

The profile run follows from shapes and source as far as ``profile_run`` has it; what remains is a handful of
constants, fitted to real start-ups by ``calibrate/memory_fit.py`` and kept in ``overheads.json``.  The interval is
that of errors on start-ups of models that were left out of the fit.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from windtunnel.sim.deployment.gpu import GIB, GpuSpec
from windtunnel.sim.deployment.layers import State
from windtunnel.sim.deployment.model_spec import ModelSpec, kv_element_bytes
from windtunnel.sim.deployment.profile_run import (
    _routed_elements,
    encoder_cache_bytes,
    expert_buffers_bytes,
    is_amd,
    mlp_bytes,
    num_captured_sizes,
    release,
    sampler_bytes,
)
from windtunnel.sim.deployment.versions import VersionProfile

MOST_SIZES = 51
"""Batch sizes captured by default where max_num_seqs is 256 or more: what the constants per layer are of."""

EXTRAPOLATION = 2.0
"""How much wider the interval is outside of what was measured: a judgement, not a fit."""

_DATA = Path(__file__).with_name("overheads.json")


@dataclass(frozen=True, slots=True)
class Overheads:
    """What weights and KV cache do not take of one GPU (rank); bytes.

    In a pipeline these are the figures of the last stage, which holds the sampler.
    """

    activation_bytes: int
    """Peak of the profile run."""
    non_torch_bytes: int
    """CUDA context, NCCL and all-reduce buffers."""
    cudagraph_bytes: int
    """CUDA graphs: what the release takes out of the budget for them (its estimate), or, before 0.20 and on AMD cards
    before 0.26, what it captures beside the budget; 0 with enforce_eager."""
    error_bytes: tuple[int, int]
    """90 % interval of the real sum less the estimated one, of what is taken out of the budget."""
    assumptions: tuple[str, ...]
    """What the figures rest on, in sentences."""
    is_extrapolated: bool
    """Outside of what was measured: the GPU, the release, the parallelism or the kind of model."""
    cudagraph_inside: bool = True
    """Whether the graphs are taken out of the budget."""


@dataclass(frozen=True, slots=True)
class Constants:
    """What is fitted, in bytes and copies of the batch's hidden states."""

    activation_bytes: float
    """Lasting allocations of the run, such as cuBLAS' work spaces."""
    hidden_copies_sampling: float
    """Copies of the hidden states alive beside the sampler's logits."""
    hidden_copies_mlp: float
    """Copies alive beside the widest dense block."""
    cuda_single_old_bytes: float
    """CUDA context on one GPU, before 0.18 began to try graphs out in the profile run."""
    cuda_single_bytes: float
    cuda_several_old_bytes: float
    """The same on two GPUs of a tensor-parallel group, before 0.17."""
    cuda_several_bytes: float
    cuda_doubling_bytes: float
    """More for each doubling of the group beyond two."""
    amd_single_bytes: float
    amd_several_bytes: float
    replicas_bytes: float
    """More where data-parallel replicas share their experts: the communicator by which they exchange tokens."""
    estimated_graphs_bytes: float
    estimated_graphs_layer_bytes: float
    """Of each layer, with all sizes captured."""
    captured_graphs_bytes: float
    captured_graphs_layer_bytes: float
    amd_captured_graphs_bytes: float


class Measured(NamedTuple):
    """What the start-ups behind the constants were of."""

    start_ups: int
    models: int
    gpus: tuple[str, ...]
    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    tensor_parallel_sizes: tuple[int, ...]
    """On NVIDIA cards."""
    data_parallel_sizes: tuple[int, ...]
    """On NVIDIA cards, of replicas that share their experts."""
    kinds: tuple[str, ...]
    error_scale: tuple[float, float]
    """90 % interval of errors on models left out, for an estimate of 1 GiB."""


def estimate_overheads(
    model: ModelSpec,
    gpu: GpuSpec,
    *,
    version: VersionProfile,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    expert_parallel: bool = False,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    enforce_eager: bool = False,
    kv_cache_dtype: str = "auto",
) -> Overheads:
    """Activations, non-torch memory and CUDA graphs of one GPU, with an interval for their error.

    activation = constant + hidden states + max(logits * sampler, MLP, gathered experts) + experts' buffers + encoder
    outputs, after ``profile_run``.  Neither the run nor the recorded start-ups depend on ``max_model_len`` and
    ``kv_cache_dtype``.  Data-parallel replicas matter where they share experts; those of a dense model are engines of
    their own.

    Raises ValueError for a value below 1, an unknown ``kv_cache_dtype`` or a split that the model does not allow.
    """
    setting = Setting(
        model,
        gpu,
        version,
        tensor_parallel_size,
        pipeline_parallel_size,
        max_num_batched_tokens,
        max_num_seqs,
        enforce_eager,
        kv_cache_dtype,
        data_parallel_size,
        expert_parallel,
    )
    _check(setting, max_num_batched_tokens, max_model_len)
    shapes, measured = shapes_of(setting), measured_range()
    parts, outside = estimate_parts(shapes, constants()), _outside(setting, measured)
    low, high = error_interval(parts.in_budget_bytes, measured.error_scale, wider=bool(outside))
    return Overheads(
        round(parts.activation_bytes),
        round(parts.non_torch_bytes),
        round(parts.cudagraph_bytes),
        (round(low), round(high)),
        _assumptions(setting, shapes, parts, outside),
        bool(outside),
        parts.cudagraph_inside,
    )


class Setting(NamedTuple):
    """One deployment, as far as it matters here."""

    model: ModelSpec
    gpu: GpuSpec
    version: VersionProfile
    tensor_parallel_size: int
    pipeline_parallel_size: int
    num_tokens: int
    max_num_seqs: int
    enforce_eager: bool = False
    kv_cache_dtype: str = "auto"
    data_parallel_size: int = 1
    expert_parallel: bool = False

    @property
    def shares_experts(self) -> bool:
        """Whether replicas exchange the tokens of their experts."""
        return self.data_parallel_size > 1 and self.model.num_moe_layers > 0

    @property
    def gathered_tokens(self) -> int:
        """Tokens that a rank's experts see in the profile run: with replicas, those of all of them.

        Source: ``distributed/device_communicators/all2all.py``; both defaults, "naive" and later
        "allgather_reducescatter", hand every rank the tokens of all.
        """
        return self.num_tokens * (self.data_parallel_size if self.shares_experts else 1)

    @property
    def routed_tokens(self) -> int:
        """Those that the experts' kernels work on at once: before 0.18 in chunks (VLLM_FUSED_MOE_CHUNK_SIZE)."""
        number = release(self.version)
        if number >= (0, 18):
            return self.gathered_tokens
        return min(self.gathered_tokens, 16_384 if number >= (0, 12) else 32_768)

    @property
    def expert_shards(self) -> int:
        """Parts that the width of an expert is split into."""
        return 1 if self.expert_parallel else self.tensor_parallel_size * self.data_parallel_size


class Shapes(NamedTuple):
    """What the shapes of a setting and the source of its release say; bytes."""

    hidden_bytes: int
    """One copy of the batch's hidden states."""
    sampler_bytes: int
    mlp_bytes: int
    gathered_bytes: int
    """Tokens of all replicas while the experts work on them; 0 for a single one."""
    kept_bytes: int
    """Experts' buffers and encoder outputs."""
    captured_layers: float
    """Layers of one stage, times the share of all batch sizes that is captured."""
    doublings: float
    """Of the tensor-parallel group beyond two; -1 for one GPU."""
    release: tuple[int, ...]
    is_amd: bool
    cudagraph_inside: bool
    captures: bool
    """Not with enforce_eager."""
    shares_experts: bool


def shapes_of(setting: Setting) -> Shapes:
    """What no fit is needed for."""
    model, gpu, version = setting.model, setting.gpu, setting.version
    tokens, size = setting.num_tokens, setting.tensor_parallel_size
    sizes = num_captured_sizes(setting.max_num_seqs, tokens) / MOST_SIZES
    buffers = expert_buffers_bytes(model, gpu, version, setting.expert_shards, setting.routed_tokens)
    return Shapes(
        tokens * model.hidden_size * model.dtype_bytes,
        sampler_bytes(model, version, min(setting.max_num_seqs, tokens)),
        mlp_bytes(model, size, tokens),
        _gathered_bytes(setting, buffers),
        buffers + encoder_cache_bytes(model, tokens),
        _transformer_layers(model) / setting.pipeline_parallel_size * sizes,
        math.log2(size) - 1,
        release(version),
        is_amd(gpu),
        graphs_inside(gpu, version),
        not setting.enforce_eager,
        setting.shares_experts,
    )


def _gathered_bytes(setting: Setting, buffers_bytes: int) -> int:
    """The tokens of all replicas, what the experts make of them, and between both the copies of each routed token,
    unless buffers are kept for these."""
    if not setting.shares_experts:
        return 0
    model = setting.model
    experts = dict.fromkeys(layer.experts for layer in model.decoder_layers if layer.experts is not None)
    routed = 0 if buffers_bytes else max(_routed_elements(model, each, setting.expert_shards) for each in experts)
    elements = 2 * setting.gathered_tokens * model.hidden_size + setting.routed_tokens * routed
    return elements * model.dtype_bytes


def graphs_inside(gpu: GpuSpec, version: VersionProfile) -> bool:
    """Whether the release takes an estimate for graphs out of the budget: since 0.20, on AMD cards since 0.26."""
    return version.cuda_graphs_inside_utilization and (not is_amd(gpu) or release(version) >= (0, 26))


def _transformer_layers(model: ModelSpec) -> float:
    """Half of all mixers and feed-forward blocks, which some models count as layers of their own."""
    blocks = sum((layer.mixer is not None) + (layer.feed_forward is not None) for layer in model.decoder_layers)
    return blocks / 2


class Parts(NamedTuple):
    """The estimate in bytes, before it is rounded."""

    activation_bytes: float
    non_torch_bytes: float
    estimated_graphs_bytes: float
    """What vLLM expects CUDA graphs to take."""
    captured_graphs_bytes: float
    """What they take."""
    cudagraph_inside: bool

    @property
    def cudagraph_bytes(self) -> float:
        """What the budget loses to graphs, or what they take beside it."""
        return self.estimated_graphs_bytes if self.cudagraph_inside else self.captured_graphs_bytes

    @property
    def in_budget_bytes(self) -> float:
        """What is taken out of gpu_memory_utilization."""
        return self.activation_bytes + self.non_torch_bytes + self.cudagraph_bytes * self.cudagraph_inside


def estimate_parts(shapes: Shapes, fitted: Constants) -> Parts:
    """The estimate with these constants."""
    dense = shapes.mlp_bytes + fitted.hidden_copies_mlp * shapes.hidden_bytes
    peak = max(sampling_bytes(shapes, fitted), dense, shapes.gathered_bytes)
    return Parts(
        fitted.activation_bytes + shapes.kept_bytes + peak,
        _non_torch(shapes, fitted),
        *_graphs(shapes, fitted),
        shapes.cudagraph_inside,
    )


def error_interval(
    estimated_bytes: float, error_scale: tuple[float, float], *, wider: bool = False
) -> tuple[float, float]:
    """The interval of the real sum less this estimate: it grows with the root of the estimate."""
    unit = math.sqrt(estimated_bytes / GIB) * GIB * (EXTRAPOLATION if wider else 1.0)
    return error_scale[0] * unit, error_scale[1] * unit


def sampling_bytes(shapes: Shapes, fitted: Constants) -> float:
    """The sampler with the hidden states beside it."""
    return shapes.sampler_bytes + fitted.hidden_copies_sampling * shapes.hidden_bytes


def _non_torch(shapes: Shapes, fitted: Constants) -> float:
    if shapes.is_amd:
        single, several = fitted.amd_single_bytes, fitted.amd_several_bytes
    else:
        single = fitted.cuda_single_bytes if shapes.release >= (0, 18) else fitted.cuda_single_old_bytes
        several = fitted.cuda_several_bytes if shapes.release >= (0, 17) else fitted.cuda_several_old_bytes
    group = single if shapes.doublings < 0 else several + fitted.cuda_doubling_bytes * shapes.doublings
    return group + fitted.replicas_bytes * shapes.shares_experts


def _graphs(shapes: Shapes, fitted: Constants) -> tuple[float, float]:
    """Estimated by vLLM and captured."""
    if not shapes.captures:
        return 0.0, 0.0
    if shapes.is_amd:
        return fitted.amd_captured_graphs_bytes, fitted.amd_captured_graphs_bytes
    return (
        fitted.estimated_graphs_bytes + fitted.estimated_graphs_layer_bytes * shapes.captured_layers,
        fitted.captured_graphs_bytes + fitted.captured_graphs_layer_bytes * shapes.captured_layers,
    )


def kinds_of(model: ModelSpec) -> tuple[str, ...]:
    """What sets a model apart from a dense transformer: experts, recurrent states, an encoder; () for none."""
    kinds = {
        "experts": model.num_moe_layers > 0,
        "states": any(isinstance(layer.mixer, State) for layer in model.decoder_layers),
        "encoder": bool(model.towers),
    }
    return tuple(kind for kind, holds in kinds.items() if holds)


def _outside(setting: Setting, measured: Measured) -> tuple[str, ...]:
    """In what respects the setting is outside of what was measured, in words."""
    model, version = setting.model, release(setting.version)
    found = []
    if setting.gpu.name not in measured.gpus:
        found.append(f"{setting.gpu.name} (measured: {', '.join(measured.gpus)})")
    if not measured.oldest[:2] <= version[:2] <= measured.newest[:2]:
        span = " to ".join(".".join(map(str, number[:2])) for number in (measured.oldest, measured.newest))
        found.append(f"{setting.version.label} (measured: {span})")
    if setting.tensor_parallel_size not in measured.tensor_parallel_sizes:
        sizes = ", ".join(map(str, measured.tensor_parallel_sizes))
        found.append(f"tensor_parallel_size {setting.tensor_parallel_size} (measured: {sizes})")
    replicas_measured = not is_amd(setting.gpu) and setting.data_parallel_size in measured.data_parallel_sizes
    if setting.shares_experts and not replicas_measured:
        sizes = ", ".join(map(str, measured.data_parallel_sizes))
        found.append(f"data_parallel_size {setting.data_parallel_size} (measured: {sizes}, on NVIDIA cards)")
    if setting.shares_experts and model.weight_format is not None:
        found.append("data-parallel replicas of quantised experts")
    if setting.pipeline_parallel_size > 1 and setting.tensor_parallel_size > 1:
        found.append("pipelines of tensor-parallel groups")
    found += [f"models with {kind}" for kind in kinds_of(model) if kind not in measured.kinds]
    found += [f"{part}, whose activations are not counted" for part in model.not_counted if "tower" in part]
    return tuple(found)


def _assumptions(setting: Setting, shapes: Shapes, parts: Parts, outside: tuple[str, ...]) -> tuple[str, ...]:
    rows, model, measured = min(setting.max_num_seqs, setting.num_tokens), setting.model, measured_range()
    sampler_decides = (
        sampling_bytes(shapes, constants()) >= parts.activation_bytes - shapes.kept_bytes - constants().activation_bytes
    )
    peak = f"the widest MLP on {setting.num_tokens:,} tokens"
    if sampler_decides:
        peak = f"the sampler on {rows:,} rows of {model.vocab_size:,} logits"
    elif shapes.gathered_bytes > shapes.mlp_bytes + constants().hidden_copies_mlp * shapes.hidden_bytes:
        peak = f"the experts on {setting.gathered_tokens:,} tokens of all replicas"
    sentences = [
        f"Activations peak in {peak} ({parts.activation_bytes / GIB:.2f} GiB with hidden states and kept buffers).",
        f"Constants are fitted to {measured.start_ups} real start-ups of {measured.models} models; the 90 % interval "
        "is that of models left out of the fit.",
        "Start-up with a warm compile cache: a cold one was seen to cost 0.9 GiB more on a 6 GiB card.",
        _about_graphs(setting, parts),
    ]
    if outside:
        sentences.append(f"Not measured: {'; '.join(outside)}; the interval is taken twice as wide.")
    return tuple(sentences)


def _about_graphs(setting: Setting, parts: Parts) -> str:
    if setting.enforce_eager:
        return "enforce_eager: no CUDA graphs."
    size = f"{parts.cudagraph_bytes / GIB:.2f} GiB"
    if parts.cudagraph_inside:
        return f"CUDA graphs: {size} are taken out of the budget, vLLM's own estimate of them."
    return f"CUDA graphs: {size} are captured beside gpu_memory_utilization, which does not count them."


def _check(setting: Setting, max_num_batched_tokens: int, max_model_len: int) -> None:
    values = {
        "tensor_parallel_size": setting.tensor_parallel_size,
        "pipeline_parallel_size": setting.pipeline_parallel_size,
        "data_parallel_size": setting.data_parallel_size,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": setting.max_num_seqs,
        "max_model_len": max_model_len,
    }
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    setting.model.check_tensor_parallel_size(setting.tensor_parallel_size)
    kv_element_bytes(setting.model, setting.kv_cache_dtype)


def constants() -> Constants:
    """The fitted constants that come with the package."""
    return Constants(**_data()["constants"])


@cache
def measured_range() -> Measured:
    """What they were fitted to."""
    entry: dict[str, Any] = _data()["measured"]
    settled: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Measured(**settled)


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return data
