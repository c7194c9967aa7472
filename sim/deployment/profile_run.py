"""What vLLM's profile run allocates, as far as the shapes and the source of a release say it.

The run at start-up passes max_num_batched_tokens dummy tokens through the model and samples for max_num_seqs of them;
its peak is what activations are taken to need.  Sources: ``v1/worker/gpu_model_runner.py`` (profile_run, _dummy_run,
_dummy_sampler_run), ``v1/sample/ops/topk_topp_sampler.py``, ``model_executor/layers/fused_moe`` and
``config/vllm.py`` of vLLM 0.8 to 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from windtunnel.sim.deployment.gpu import GpuSpec
from windtunnel.sim.deployment.layers import Experts, FeedForward, Mlp
from windtunnel.sim.deployment.model_spec import ModelSpec
from windtunnel.sim.deployment.versions import VersionProfile
from windtunnel.sim.deployment.weights import WeightFormat, format_of

FLOAT32_BYTES = 4
SORTING_BYTES_PER_LOGIT = 32
"""vLLM before 0.17 finds top-k and top-p by sorting: values (4) and indices (8), and inside torch's segmented sort the
indices to move (8) and a second buffer of both (12)."""
SAMPLING_BYTES_PER_LOGIT = 8
"""Since 0.17 a Triton kernel, and since 0.22 FlashInfer, masks in place; probabilities (4) and noise (4) remain."""

_HOPPER = ("h100", "h200", "h800", "h20", "gh200")
_BLACKWELL = ("b200", "b300")
_AMD = ("mi200", "mi210", "mi250", "mi300", "mi308", "mi325", "mi350", "mi355", "amd", "radeon")


def release(version: VersionProfile) -> tuple[int, ...]:
    """The release as numbers that compare: (0, 19, 1)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.release))


def is_amd(gpu: GpuSpec) -> bool:
    """Whether the card runs ROCm, by its name."""
    return gpu.name.casefold().startswith(_AMD)


def bytes_per_logit(model: ModelSpec, version: VersionProfile) -> int:
    """Bytes alive at the sampler's peak for each of its logits.

    The logits themselves, their float32 copy (none where they are float32 already), and what sampling needs.
    """
    copy = FLOAT32_BYTES if model.dtype_bytes < FLOAT32_BYTES else 0
    sampling = SAMPLING_BYTES_PER_LOGIT if release(version) >= (0, 17) else SORTING_BYTES_PER_LOGIT
    return model.dtype_bytes + copy + sampling


def sampler_bytes(model: ModelSpec, version: VersionProfile, num_rows: int) -> int:
    """The sampler's peak on ``num_rows`` sequences; every tensor-parallel rank gathers the whole vocabulary."""
    return num_rows * model.vocab_size * bytes_per_logit(model, version)


def mlp_bytes(model: ModelSpec, tensor_parallel_size: int, num_tokens: int) -> int:
    """Gate, up and their product (a plain block: before and after its activation) in the widest dense block."""
    widths = (width * (3 if gated else 2) for width, gated in _dense_blocks(model))
    return num_tokens * max(widths, default=0) // tensor_parallel_size * model.dtype_bytes


def _dense_blocks(model: ModelSpec) -> Iterator[tuple[int, bool]]:
    for block in _feed_forwards(model):
        if isinstance(block, Mlp):
            yield block.width, block.gated
        else:
            yield block.shared_width, block.gated


def _feed_forwards(model: ModelSpec) -> Iterator[FeedForward]:
    for layer in dict.fromkeys(model.decoder_layers):
        yield from (block for block in (layer.feed_forward, layer.also) if block is not None)


def encoder_cache_bytes(model: ModelSpec, num_tokens: int) -> int:
    """Outputs of the vision encoder that wait in its cache during the run: as many as the token budget."""
    return num_tokens * model.hidden_size * model.dtype_bytes if model.towers else 0


def expert_buffers_bytes(
    model: ModelSpec, gpu: GpuSpec, version: VersionProfile, tensor_parallel_size: int, num_tokens: int
) -> int:
    """Buffers that the experts' kernels keep: copies of every routed token, before and after the first product.

    FlashInfer's kernels and those for 4-bit floats keep none of them.
    """
    widest = 0
    for index, layer in enumerate(model.decoder_layers):
        experts = layer.experts
        if experts is None:
            continue
        if _keeps_buffers(_expert_format(model, index, experts, layer.feed_forward_name), gpu, version):
            widest = max(widest, _routed_elements(model, experts, tensor_parallel_size))
        break
    return num_tokens * widest * model.dtype_bytes


def _routed_elements(model: ModelSpec, experts: Experts, tensor_parallel_size: int) -> int:
    """Elements for each token: workspace13 and workspace2 of vLLM's TritonExperts."""
    seen = experts.latent_size or model.hidden_size
    width = experts.width // tensor_parallel_size
    first = 2 * width if experts.gated else width
    return experts.num_per_token * (max(width, seen) + max(first, seen))


def _expert_format(model: ModelSpec, index: int, experts: Experts, name: str) -> WeightFormat | None:
    matrices = (part for part in experts.parameters(model.hidden_size, name) if part.copies and part.linear)
    module = next(matrices).module
    return format_of(f"layers.{index}.{module}", model.weight_format, model.format_rules)


def _keeps_buffers(form: WeightFormat | None, gpu: GpuSpec, version: VersionProfile) -> bool:
    """By the order in which vLLM prefers kernels (``fused_moe/oracle``)."""
    name = gpu.name.casefold()
    hopper, blackwell = (any(part in name for part in parts) for parts in (_HOPPER, _BLACKWELL))
    if form is None:  # Hopper was given FlashInfer's kernels with 0.20 and Triton's again with 0.23
        return not ((blackwell and release(version) >= (0, 20)) or (hopper and (0, 20) <= release(version) < (0, 23)))
    if "fp4" in form.name:
        return False
    if form.bits == 8 and form.gemm_dtype == "fp8" and not form.channel_bits:
        return not (blackwell or (hopper and not form.block[0]))
    return True


def num_captured_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Batch sizes that CUDA graphs are captured for by default: 1, 2, 4, by 8 up to 256, by 16 up to 512.

    The largest is twice max_num_seqs, at most 512 and the token budget.
    """
    largest = min(2 * max_num_seqs, 512, max_num_batched_tokens)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    return sum(size <= largest for size in sizes)
