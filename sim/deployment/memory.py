"""From gpu_memory_utilization to KV blocks: what the weights and the engine leave, or why it does not start."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from windtunnel.sim.deployment.engine_args import BLOCK_SIZE, GPU_MEMORY_UTILIZATION, check_gpu_memory_utilization
from windtunnel.sim.deployment.gpu import GIB, GpuSpec
from windtunnel.sim.deployment.model_spec import ModelSpec, kv_element_bytes

SAMPLER_BYTES_PER_LOGIT = 12
"""Beside the logits themselves: their float32 copy and the sampler's work space.  Fitted to the difference between
start-ups of vLLM 0.19 with vocabularies of 128,256 and 152,064 and between bf16 and fp32 (14 and 16 bytes in all)."""
ACTIVATION_BASE_BYTES = round(0.115 * GIB)
"""Fitted remainder of the same start-ups."""
NON_TORCH_BYTES = round(0.25 * GIB)
"""CUDA context and libraries on one GPU; median of vLLM 0.19 start-ups on H100."""
NON_TORCH_TP_BYTES = round(2.1 * GIB)
"""The same with NCCL and all-reduce buffers, tensor_parallel_size of 2 or more."""
CUDA_GRAPH_BASE_BYTES = round(0.45 * GIB)
CUDA_GRAPH_BYTES_PER_LAYER = round(0.0125 * GIB)
"""A line through captures of vLLM 0.18 to 0.20: 0.6 to 0.9 GiB at 28 to 40 layers; at 80 layers 0.7 to 1.0 GiB on H200
and B200 but 1.6 to 1.9 on H100, so the line is off by up to 0.7 GiB there."""


class InfeasibleDeployment(Exception):
    """vLLM would not start like this; the message names the cause in vLLM's words and what to change.

    ``largest_max_model_len`` (0 if nothing fits) and ``smallest_tensor_parallel_size`` (None if no size helps) are
    the remedies as numbers.
    """

    def __init__(self, message: str, largest_max_model_len: int, smallest_tensor_parallel_size: int | None) -> None:
        super().__init__(message, largest_max_model_len, smallest_tensor_parallel_size)
        self.largest_max_model_len = largest_max_model_len
        self.smallest_tensor_parallel_size = smallest_tensor_parallel_size

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class KvPool:
    """The KV cache of one replica and what else fills its GPUs.  Bytes are those of one GPU."""

    num_gpu_blocks: int
    """Blocks in the pool, the null block included, as vLLM counts them."""
    block_size: int
    kv_cache_tokens: int
    """num_gpu_blocks * block_size: the figure vLLM logs as "GPU KV cache size"."""
    max_concurrency: float
    """Requests of max_model_len tokens that fit at once: the figure vLLM logs as "Maximum concurrency"."""
    total_bytes: int
    requested_bytes: int
    """gpu_memory_utilization of the total, rounded up."""
    weights_bytes: int
    """Parameters and the rotary table."""
    activation_bytes: int
    non_torch_bytes: int
    cuda_graphs_bytes: int
    kv_bytes: int
    """What is available for the KV cache (given, or requested less the rest); the pool's blocks fit into it, unless
    their number was given."""
    kv_bytes_per_token: int
    source: str
    """What determined the pool: "formula", "kv_cache_memory_bytes" or "num_gpu_blocks_override"."""
    assumptions: tuple[str, ...]
    """What the figures rest on, in sentences for people."""


def kv_pool(
    model: ModelSpec,
    gpu: GpuSpec,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    tensor_parallel_size: int = 1,
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
    block_size: int = BLOCK_SIZE,
    kv_cache_dtype: str = "auto",
    enforce_eager: bool = False,
    num_gpu_blocks_override: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    cuda_graphs_inside_utilization: bool = True,
    startup_check_reserves_null_block: bool = True,
) -> KvPool:
    """The KV blocks that vLLM finds for ``model`` on ``tensor_parallel_size`` GPUs.

    kv_bytes = ceil(total * gpu_memory_utilization) - weights - activation - non_torch - cuda_graphs, and
    num_gpu_blocks = kv_bytes // (block_size * kv_bytes_per_token).  ``kv_cache_memory_bytes`` replaces the first,
    ``num_gpu_blocks_override`` the second.  Weights and bytes per token are exact; activation, non-torch memory and
    graphs are estimates (``assumptions``).

    The last two are rules of vLLM 0.32: CUDA graphs count (since 0.20), and one request of max_model_len has to fit
    without the null block (since 0.29).

    Raises InfeasibleDeployment when nothing is left or one request of max_model_len does not fit into all blocks but
    the null block; ValueError for a value out of range or a split the model does not allow.
    """
    _check_at_least_one(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        num_gpu_blocks_override=num_gpu_blocks_override,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
    )
    check_gpu_memory_utilization(gpu_memory_utilization)
    plan = _Plan(
        model,
        gpu,
        tensor_parallel_size,
        gpu_memory_utilization,
        max_num_batched_tokens,
        max_num_seqs,
        max_model_len,
        block_size,
        kv_cache_dtype,
        enforce_eager,
        num_gpu_blocks_override,
        kv_cache_memory_bytes,
        cuda_graphs_inside_utilization,
        int(startup_check_reserves_null_block),
    )
    pool = _pool(plan)
    if not _starts(plan, pool):
        raise _infeasible(plan, pool)
    return pool


def num_kv_blocks(
    model: ModelSpec,
    kv_bytes: int,
    *,
    tensor_parallel_size: int = 1,
    block_size: int = BLOCK_SIZE,
    kv_cache_dtype: str = "auto",
) -> int:
    """Whole blocks that ``kv_bytes`` on each GPU hold, the null block included."""
    return kv_bytes // (block_size * model.kv_bytes_per_token(tensor_parallel_size, kv_cache_dtype))


class _Plan(NamedTuple):
    model: ModelSpec
    gpu: GpuSpec
    tensor_parallel_size: int
    gpu_memory_utilization: float
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    kv_cache_dtype: str
    enforce_eager: bool
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    counts_cuda_graphs: bool
    num_reserved_blocks: int


def _pool(plan: _Plan) -> KvPool:
    """The pool as the arithmetic gives it, be it empty or negative."""
    model, size = plan.model, plan.tensor_parallel_size
    per_token = model.kv_bytes_per_token(size, plan.kv_cache_dtype)
    requested = math.ceil(plan.gpu.memory_bytes * plan.gpu_memory_utilization)
    weights = model.weight_bytes(size) + model.rotary_cache_bytes()
    activation = _activation_bytes(plan)
    non_torch = NON_TORCH_BYTES if size == 1 else NON_TORCH_TP_BYTES
    counts_graphs = plan.counts_cuda_graphs and not plan.enforce_eager
    graphs = 0 if not counts_graphs else CUDA_GRAPH_BASE_BYTES + CUDA_GRAPH_BYTES_PER_LAYER * model.num_layers
    kv_bytes, source = requested - weights - activation - non_torch - graphs, "formula"
    if plan.kv_cache_memory_bytes is not None:
        kv_bytes, source = plan.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    blocks = max(kv_bytes // (plan.block_size * per_token), 0)
    if plan.num_gpu_blocks_override is not None:
        blocks, source = plan.num_gpu_blocks_override, "num_gpu_blocks_override"
    return KvPool(
        num_gpu_blocks=blocks,
        block_size=plan.block_size,
        kv_cache_tokens=blocks * plan.block_size,
        max_concurrency=blocks / _blocks_of_one_request(plan.max_model_len, plan.block_size),
        total_bytes=plan.gpu.memory_bytes,
        requested_bytes=requested,
        weights_bytes=weights,
        activation_bytes=activation,
        non_torch_bytes=non_torch,
        cuda_graphs_bytes=graphs,
        kv_bytes=kv_bytes,
        kv_bytes_per_token=per_token,
        source=source,
        assumptions=_assumptions(plan, source),
    )


def _activation_bytes(plan: _Plan) -> int:
    """Peak of vLLM's profile run: the widest layer on a full budget, or the sampler on all sequences."""
    model, size, tokens = plan.model, plan.tensor_parallel_size, plan.max_num_batched_tokens
    element = model.dtype_bytes
    widths = 3 if model.gated_mlp else 2
    dense_mlp = tokens * (widths * model.intermediate_size // size + 4 * model.hidden_size) * element
    rows = min(plan.max_num_seqs, tokens)
    sampler = rows * model.vocab_size * (element + SAMPLER_BYTES_PER_LOGIT) + tokens * model.hidden_size * element
    experts = 2 * tokens * model.num_experts_per_tok * model.hidden_size * element
    return max(dense_mlp, sampler + ACTIVATION_BASE_BYTES) + experts


def _blocks_of_one_request(max_model_len: int, block_size: int) -> int:
    return -(-max_model_len // block_size)


def _starts(plan: _Plan, pool: KvPool) -> bool:
    num_blocks = pool.num_gpu_blocks - plan.num_reserved_blocks
    return num_blocks >= _blocks_of_one_request(plan.max_model_len, pool.block_size)


def _infeasible(plan: _Plan, pool: KvPool) -> InfeasibleDeployment:
    usable_blocks = max(pool.num_gpu_blocks - plan.num_reserved_blocks, 0)
    largest = usable_blocks * pool.block_size
    needed_blocks = _blocks_of_one_request(plan.max_model_len, plan.block_size)
    where = (
        f"{plan.model.name} on {plan.tensor_parallel_size} x {plan.gpu.name} at gpu_memory_utilization "
        f"{plan.gpu_memory_utilization:g}"
    )
    if pool.source == "formula" and pool.kv_bytes <= 0:
        cause = (
            f"No available memory for the cache blocks: {where} may use {_gib(pool.requested_bytes)}, but weights "
            f"take {_gib(pool.weights_bytes)}, activations {_gib(pool.activation_bytes)}, CUDA and communication "
            f"{_gib(pool.non_torch_bytes)} and CUDA graphs {_gib(pool.cuda_graphs_bytes)} "
            f"({_gib(-pool.kv_bytes)} too much)"
        )
    else:
        needed, there = _gib_apart(
            *(n * pool.block_size * pool.kv_bytes_per_token for n in (needed_blocks, usable_blocks))
        )
        cause = (
            f"max seq len ({plan.max_model_len}) is larger than the maximum number of tokens that can be stored in "
            f"KV cache ({largest}): {where}, one such request needs {needed_blocks:,} blocks ({needed}) and "
            f"{usable_blocks:,} ({there}) are there beside the null block"
        )
    size = _smallest_tensor_parallel_size(plan)
    return InfeasibleDeployment(f"{cause}.  Remedy: {_remedy(plan, largest, size)}", largest, size)


def _remedy(plan: _Plan, largest_max_model_len: int, smallest_size: int | None) -> str:
    remedies = []
    if largest_max_model_len > 0:
        remedies.append(f"lower max_model_len to {largest_max_model_len} or less")
    num_blocks = _blocks_of_one_request(plan.max_model_len, plan.block_size) + plan.num_reserved_blocks
    if plan.num_gpu_blocks_override is not None:
        remedies.append(f"raise num_gpu_blocks_override to {num_blocks}")
    elif plan.kv_cache_memory_bytes is not None:
        per_token = plan.model.kv_bytes_per_token(plan.tensor_parallel_size, plan.kv_cache_dtype)
        remedies.append(f"raise kv_cache_memory_bytes to {num_blocks * plan.block_size * per_token}")
    share = _smallest_utilization(plan)
    if share is not None:
        remedies.append(f"raise gpu_memory_utilization to {share:.2f}")
    if smallest_size is not None:
        remedies.append(f"raise tensor_parallel_size to {smallest_size}")
    if kv_element_bytes(plan.model, plan.kv_cache_dtype) > 1 and _would_start(plan._replace(kv_cache_dtype="fp8")):
        remedies.append("set kv_cache_dtype to fp8")
    return ", or ".join(remedies) if remedies else "take a GPU with more memory or a smaller model"


def _smallest_tensor_parallel_size(plan: _Plan) -> int | None:
    if plan.num_gpu_blocks_override is not None:
        return None
    sizes = plan.model.tensor_parallel_sizes()
    larger = (size for size in sizes if size > plan.tensor_parallel_size)
    return next((size for size in larger if _would_start(plan._replace(tensor_parallel_size=size))), None)


def _smallest_utilization(plan: _Plan) -> float | None:
    """The least two-digit share that starts, up to 0.98; None where it is not the share that binds."""
    if plan.num_gpu_blocks_override is not None or plan.kv_cache_memory_bytes is not None:
        return None
    percents = range(math.floor(plan.gpu_memory_utilization * 100) + 1, 99)
    shares = (percent / 100 for percent in percents)
    return next((share for share in shares if _would_start(plan._replace(gpu_memory_utilization=share))), None)


def _would_start(plan: _Plan) -> bool:
    return _starts(plan, _pool(plan))


def _assumptions(plan: _Plan, source: str) -> tuple[str, ...]:
    if source == "num_gpu_blocks_override":
        return ("The number of blocks was given; the other parts of the memory did not enter.",)
    if source == "kv_cache_memory_bytes":
        return ("The bytes of the KV cache were given; gpu_memory_utilization and the other parts did not enter.",)
    sentences = [
        f"{plan.gpu.name} has {_gib(plan.gpu.memory_bytes)} in all ({plan.gpu.memory_source}); drivers differ by "
        "up to 0.3 %.",
        "The card is otherwise empty at the start.",
        "Weights are counted from the shapes, with the rotary table; loading leaves nothing else behind.",
        "Peak activation is an estimate: the larger of the widest MLP on a full token budget and the sampler on "
        "max_num_seqs rows of logits, after start-ups of vLLM 0.19 on H100.",
        f"CUDA context and communication buffers are taken as {_gib(NON_TORCH_BYTES)} on one GPU and "
        f"{_gib(NON_TORCH_TP_BYTES)} with tensor parallelism.",
    ]
    if not plan.counts_cuda_graphs:
        sentences.append("CUDA graphs lie outside gpu_memory_utilization, as before vLLM 0.20.")
    elif plan.enforce_eager:
        sentences.append("enforce_eager: no CUDA graphs are captured.")
    else:
        sentences.append(
            f"CUDA graphs are taken out of the budget (vLLM does so since 0.20) as {_gib(CUDA_GRAPH_BASE_BYTES)} and "
            f"{CUDA_GRAPH_BYTES_PER_LAYER / GIB:.4f} GiB a layer, an estimate; vLLM's own estimate can be larger."
        )
    if plan.model.num_moe_layers:
        sentences.append("The experts' work space is an estimate: two copies of every routed token.")
    return tuple(sentences)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _gib_apart(*sizes_bytes: int) -> list[str]:
    """Different sizes in GiB with as many digits as it takes to tell them apart, two or more."""
    for digits in range(2, 10):
        shown = [f"{size / GIB:.{digits}f} GiB" for size in sizes_bytes]
        if len(dict.fromkeys(shown)) == len(dict.fromkeys(sizes_bytes)):
            break
    return shown


def _check_at_least_one(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
