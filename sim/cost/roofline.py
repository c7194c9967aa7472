"""Step times from first principles: bytes over bandwidth or FLOPs over peak, whichever takes longer.

Not calibrated: the hardware's peaks come from datasheets and the shares of them that are reached are engineering
estimates (``RooflineFactors``).  Source of the idea: Williams, Waterman and Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from windtunnel.sim.deployment.gpu import GpuSpec
from windtunnel.sim.deployment.model_spec import ModelSpec, UnsupportedModel
from windtunnel.sim.engine.plan import StepShape

FACTOR_SOURCES = {
    "gemm_bandwidth": "engineering estimate; public kernel tables show 0.70 (A100) to 0.92 (RTX 4090) of the "
    "datasheet for bf16 matrix products of up to 64 tokens, 0.83 on H100 (aiconfigurator-core 0.12 and "
    "LLMServingSim)",
    "gemm_flops": "engineering estimate; the same tables show 0.63 (L40S) to 1.0 (RTX 4090) at 2,048 tokens, 0.82 on "
    "H100, with cool cards and warm caches; sustained serving reaches less",
    "decode_attention_bandwidth": "engineering estimate; the same tables show 0.7 to 0.95 from 16 sequences of 1,024 "
    "tokens on, less for fewer",
    "prefill_attention_flops": "engineering estimate; the same tables show 0.33 to 0.67 for prompts of 1,536 to "
    "16,384 tokens on H100 and 0.6 to 0.8 on RTX 4090",
    "elementwise_bandwidth": "engineering estimate, as for memory-bound kernels in general",
    "link_bandwidth": "engineering estimate; NCCL all-reduces of 16 to 268 MB on H100 reach 0.4 to 0.6 of NVLink",
    "kernel_s": "engineering estimate; aiconfigurator-core's system files add 3 us to each memory-bound operation",
    "host_s": "engineering estimate; real vLLM 0.20 decode steps of a 64-layer model on B300 hold about 3 ms that "
    "neither weights nor cache explain, of which the kernels' fixed parts are about 2 ms",
    "sequence_s": "engineering estimate: input preparation, sampling and output handling of one sequence",
}
"""Where each default of RooflineFactors comes from; all are chosen, none is a fit."""


@dataclass(frozen=True, slots=True)
class RooflineFactors:
    """Shares of the hardware's peaks that are reached, in (0, 1], and fixed times in seconds (``*_s``).

    Raises ValueError, naming the factor, for a value out of range.
    """

    gemm_bandwidth: float = 0.80
    """Of memory bandwidth, when a matrix product waits for its weights."""
    gemm_flops: float = 0.75
    """Of peak FLOP/s, when it waits for arithmetic."""
    decode_attention_bandwidth: float = 0.75
    """Of memory bandwidth, reading the cache of decodes and the cached context of chunks."""
    prefill_attention_flops: float = 0.50
    """Of peak bf16 FLOP/s, causal attention of prompt chunks; a causal pair counts 4 * heads * head_dim FLOPs."""
    elementwise_bandwidth: float = 0.80
    """Of memory bandwidth, in norms, rotary embedding, activation function and cache writes."""
    link_bandwidth: float = 0.50
    """Of the link's bandwidth in each direction, in the all-reduces of tensor parallelism."""
    kernel_s: float = 3e-6
    """Fixed time of one kernel on the GPU (launch from a CUDA graph, ramp-up, tail)."""
    host_s: float = 1e-3
    """Fixed time of one step outside the kernels: scheduling, input preparation, output handling."""
    sequence_s: float = 5e-6
    """Time that each sequence in the batch adds to a step."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_time = field.name.endswith("_s")
            if not (0.0 <= value < 1.0 if is_time else 0.0 < value <= 1.0):
                allowed = "at least 0 and below 1 s" if is_time else "above 0 and at most 1"
                raise ValueError(f"RooflineFactors.{field.name} must be {allowed}, got {value!r}")


class RooflineCost:
    """Seconds for a step of ``model`` on ``tensor_parallel_size`` cards, as a sum of independent rooflines.

    host + kernels + sequences + matrix products + experts + elementwise + decode attention + prefill attention +
    lm_head + all-reduce; ``terms_s`` gives them one by one.  Matrix products take the longer of reading their
    weights and computing all tokens of the batch; of the experts only those expected to be hit are read, were the
    router to choose at random.  The lm_head is read in every step (vLLM computes logits for every request of the
    batch) and computes num_sampled rows.

    Not modelled: padding to CUDA graph sizes, wave quantisation, overlap of communication, skew between experts, and
    the congestion of more than two cards on one PCIe host (all-reduces of 8 L40S take 17 times as long as here).

    Raises ValueError for a split the model does not allow or a float32 model, for which datasheets give no
    comparable rate; UnsupportedModel for layers other than full attention with a dense or an expert block, and for
    mixed precisions.
    """

    name: str = "roofline"
    calibrated: bool = False

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        tensor_parallel_size: int = 1,
        *,
        kv_cache_dtype: str = "auto",
        factors: RooflineFactors | None = None,
    ) -> None:
        model.check_tensor_parallel_size(tensor_parallel_size)
        if model.unpriced:
            raise UnsupportedModel(
                f"{model.name}: the roofline cannot derive step times, because {model.unpriced}; its memory can be "
                "planned, and its step times be given as a constant or a profile"
            )
        if model.dtype_bytes != 2:
            raise ValueError(f"RooflineCost prices bfloat16 and float16 models; {model.name} is {model.dtype}")
        self.model = model
        self.gpu = gpu
        self.tensor_parallel_size = tensor_parallel_size
        self.kv_cache_dtype = kv_cache_dtype
        self.factors = factors or RooflineFactors()
        self._rates = _rates(model, gpu, tensor_parallel_size, kv_cache_dtype, self.factors)
        self._line = _line(self._rates)
        self._expert_read_s = _expert_read_s(model, gpu, tensor_parallel_size, self.factors)
        self._expert_read_s_array = np.array(self._expert_read_s)

    def step_time_s(self, shape: StepShape) -> Any:
        """Seconds for one step, or a float64 array for a shape of arrays; see CostModel."""
        decodes, decode_context, prefills, prefill_tokens, prefill_context, pairs, sampled = shape
        tokens = decodes + prefill_tokens
        if type(tokens) is not int or type(sampled) is not int:
            return self._step_times_s(shape)
        fixed, seq_s, token_s, read_s, multiply_s, expert_s, kv_s, pair_s, head_read_s, head_row_s = self._line
        gemm = tokens * multiply_s
        if gemm < read_s:
            gemm = read_s
        if expert_s:
            read = self._expert_read_s[tokens] if tokens < len(self._expert_read_s) else self._expert_read_s[-1]
            experts = tokens * expert_s
            gemm += read if experts < read else experts
        head = sampled * head_row_s
        if head < head_read_s:
            head = head_read_s
        return (
            fixed
            + (decodes + prefills) * seq_s
            + tokens * token_s
            + gemm
            + (decode_context + prefill_context) * kv_s
            + pairs * pair_s
            + head
        )

    def _step_times_s(self, shape: StepShape) -> Any:
        """The same expressions in the same order, so that every element equals the scalar's to the bit."""
        decodes, decode_context, prefills, prefill_tokens, prefill_context, pairs, sampled = map(np.asarray, shape)
        tokens = decodes + prefill_tokens
        fixed, seq_s, token_s, read_s, multiply_s, expert_s, kv_s, pair_s, head_read_s, head_row_s = self._line
        gemm = np.maximum(tokens * multiply_s, read_s)
        if expert_s:
            row = np.minimum(tokens, len(self._expert_read_s) - 1).astype(np.int64)
            gemm = gemm + np.maximum(tokens * expert_s, self._expert_read_s_array[row])
        head = np.maximum(sampled * head_row_s, head_read_s)
        return (
            fixed
            + (decodes + prefills) * seq_s
            + tokens * token_s
            + gemm
            + (decode_context + prefill_context) * kv_s
            + pairs * pair_s
            + head
        )

    def terms_s(self, shape: StepShape) -> dict[str, float]:
        """What ``step_time_s`` adds up, by name, in seconds: why a step takes as long as it does.  Scalars only."""
        rates, tokens = self._rates, shape.num_tokens
        read = self._expert_read_s[min(tokens, len(self._expert_read_s) - 1)]
        return {
            "host": rates.host_s,
            "kernels": rates.kernels_s,
            "sequences": (shape.num_decode_seqs + shape.num_prefill_seqs) * rates.sequence_s,
            "gemm": max(tokens * rates.gemm_token_s, rates.gemm_read_s),
            "experts": max(tokens * rates.expert_token_s, read),
            "elementwise": tokens * rates.elementwise_token_s,
            "decode_attention": shape.decode_context_tokens * rates.context_token_s,
            "prefill_attention": shape.prefill_pairs * rates.pair_s
            + shape.prefill_context_tokens * rates.context_token_s,
            "lm_head": max(shape.num_sampled * rates.head_row_s, rates.head_read_s),
            "all_reduce": rates.all_reduce_s + tokens * rates.all_reduce_token_s,
        }

    def describe(self) -> dict[str, Any]:
        """Model, card, split, factors and what each rests on, as plain data."""
        return {
            "name": self.name,
            "calibrated": self.calibrated,
            "model": self.model.name,
            "gpu": self.gpu.name,
            "gpu_source": self.gpu.source,
            "tensor_parallel_size": self.tensor_parallel_size,
            "kv_cache_dtype": self.kv_cache_dtype,
            "factors": asdict(self.factors),
            "factor_sources": dict(FACTOR_SOURCES),
            "error": "not stated: chosen factors, not a fit to measurements",
        }


class _Rates(NamedTuple):
    """Seconds a step, a sequence, a token, a context token or a pair costs, term by term."""

    host_s: float
    kernels_s: float
    all_reduce_s: float
    sequence_s: float
    elementwise_token_s: float
    all_reduce_token_s: float
    gemm_read_s: float
    gemm_token_s: float
    expert_token_s: float
    context_token_s: float
    pair_s: float
    head_read_s: float
    head_row_s: float


def _rates(model: ModelSpec, gpu: GpuSpec, size: int, kv_cache_dtype: str, factors: RooflineFactors) -> _Rates:
    gemm_bytes_per_s = gpu.hbm_bandwidth_bytes_per_s * factors.gemm_bandwidth
    gemm_dtype = model.weight_format.gemm_dtype if model.weight_format else "bf16"
    gemm_flops_per_s = gpu.flops_per_s(gemm_dtype) * factors.gemm_flops
    dense_flops_per_s = gpu.flops_per_s("bf16") * factors.gemm_flops
    attention_flops = 4 * model.num_attention_heads // size * model.head_dim * model.num_layers
    expert_flops = 2 * model.num_moe_layers * model.num_experts_per_tok * model.expert_parameters(size)
    return _Rates(
        host_s=factors.host_s,
        kernels_s=_num_kernels(model) * factors.kernel_s,
        all_reduce_s=2 * model.num_layers * gpu.link_latency_s if size > 1 else 0.0,
        sequence_s=factors.sequence_s,
        elementwise_token_s=_elementwise_bytes(model, size)
        / (gpu.hbm_bandwidth_bytes_per_s * factors.elementwise_bandwidth),
        all_reduce_token_s=_all_reduce_bytes(model, size) / (gpu.link_bytes_per_s * factors.link_bandwidth),
        gemm_read_s=model.dense_linear_bytes(size) / gemm_bytes_per_s,
        gemm_token_s=2 * model.dense_linear_parameters(size) / gemm_flops_per_s,
        expert_token_s=expert_flops / gemm_flops_per_s,
        context_token_s=model.kv_bytes_per_token(size, kv_cache_dtype)
        / (gpu.hbm_bandwidth_bytes_per_s * factors.decode_attention_bandwidth),
        pair_s=attention_flops / (gpu.flops_per_s("bf16") * factors.prefill_attention_flops),
        head_read_s=model.embedding_bytes(size) / gemm_bytes_per_s,
        head_row_s=2 * model.embedding_parameters(size) / dense_flops_per_s,
    )


def _line(rates: _Rates) -> tuple[float, ...]:
    """The rates as ``step_time_s`` unpacks them, those of like quantities added up."""
    return (
        rates.host_s + rates.kernels_s + rates.all_reduce_s,
        rates.sequence_s,
        rates.elementwise_token_s + rates.all_reduce_token_s,
        rates.gemm_read_s,
        rates.gemm_token_s,
        rates.expert_token_s,
        rates.context_token_s,
        rates.pair_s,
        rates.head_read_s,
        rates.head_row_s,
    )


def _num_kernels(model: ModelSpec) -> int:
    """Kernels of one step: those of each layer, then embedding, last norm, lm_head and sampling."""
    attention = 7 + (2 if model.qk_norm else 0)  # norm, qkv, rotary, cache write, attention, output, norm
    dense_mlp = 3  # up, activation, down
    moe = 7  # router, top-k, sorting, up, activation, down, sum
    dense_layers = model.num_layers - model.num_moe_layers
    return model.num_layers * attention + dense_layers * dense_mlp + model.num_moe_layers * moe + 4


def _elementwise_bytes(model: ModelSpec, size: int) -> int:
    """Bytes that one token moves on one GPU between the matrix products of all layers."""
    hidden = model.hidden_size
    query = model.num_attention_heads // size * model.head_dim
    key = model.kv_heads_per_gpu(size) * model.head_dim
    norms = 8 * hidden  # two, each reads and writes the token and its residual
    rotary_and_cache = 2 * (query + key) + 4 * key
    activation = 3 if model.gated_mlp else 2
    dense = activation * model.intermediate_size // size
    routed = model.num_experts_per_tok * (activation * model.moe_intermediate_size // size + 2 * hidden)
    shared = activation * model.shared_expert_intermediate_size // size
    dense_layers = model.num_layers - model.num_moe_layers
    elements = model.num_layers * (norms + rotary_and_cache) + dense_layers * dense
    return (elements + model.num_moe_layers * (routed + shared)) * model.dtype_bytes


def _all_reduce_bytes(model: ModelSpec, size: int) -> float:
    """Bytes that one token sends from each GPU in one step: two ring all-reduces a layer."""
    return 2 * model.num_layers * model.hidden_size * model.dtype_bytes * 2 * (size - 1) / size


def _expert_read_s(model: ModelSpec, gpu: GpuSpec, size: int, factors: RooflineFactors) -> list[float]:
    """Seconds to read the experts that n tokens are expected to hit, for n = 0, 1, … until all are.

    With k of E experts for each token, chosen at random, E * (1 - (1 - k/E)^n) are hit.  A table, so that scalars
    and arrays agree to the bit.
    """
    if not model.num_moe_layers:
        return [0.0]
    all_bytes = model.num_moe_layers * model.num_experts * model.expert_bytes(size)
    all_s = all_bytes / (gpu.hbm_bandwidth_bytes_per_s * factors.gemm_bandwidth)
    miss = 1.0 - model.num_experts_per_tok / model.num_experts
    table, missed = [0.0], 1.0
    while table[-1] < all_s:
        missed *= miss
        table.append(all_s * (1.0 - missed))
    return table
