"""The memory planner's face: a plan with its verdict and remedies, and the KV pool that a simulation runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windtunnel.sim.deployment.engine_args import BLOCK_SIZE, ENGINE, check_gpu_memory_utilization
from windtunnel.sim.deployment.gpu import GIB, GpuSpec
from windtunnel.sim.deployment.kv_layout import kv_layout
from windtunnel.sim.deployment.memory_checks import Judgement, judge
from windtunnel.sim.deployment.memory_plan import BOTH_ESTIMATES, DOES_NOT_START, MemoryPlan, in_use, make_plan
from windtunnel.sim.deployment.memory_remedies import Remedy, find_remedies, largest_length
from windtunnel.sim.deployment.memory_request import MemoryRequest
from windtunnel.sim.deployment.model_spec import ModelSpec
from windtunnel.sim.deployment.versions import VersionProfile, profile


class InfeasibleDeployment(Exception):
    """vLLM would not start like this; the message names the cause in vLLM's words and what to change.

    ``largest_max_model_len`` (the longest that starts; 0 if none does) and ``smallest_tensor_parallel_size`` (None if
    no size helps) are the remedies as numbers.
    """

    def __init__(self, message: str, largest_max_model_len: int, smallest_tensor_parallel_size: int | None) -> None:
        super().__init__(message, largest_max_model_len, smallest_tensor_parallel_size)
        self.largest_max_model_len = largest_max_model_len
        self.smallest_tensor_parallel_size = smallest_tensor_parallel_size

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class JudgedPlan:
    """A plan, whether vLLM starts with it, and what would help."""

    plan: MemoryPlan
    judgement: Judgement
    remedies: tuple[Remedy, ...] = ()

    @property
    def verdict(self) -> str:
        """ok, unsafe or does_not_start."""
        return self.judgement.verdict

    @property
    def reason(self) -> str:
        """Why, in vLLM's words where it does not start."""
        return self.judgement.reason


def plan_memory(request: MemoryRequest, *, with_remedies: bool = True) -> JudgedPlan:
    """The KV cache that vLLM finds, whether it starts, and what to change where it does not (or not safely).

    Raises ValueError for values out of range and splits that the model does not allow; UnsupportedModel for a cache
    that vLLM itself cannot lay out.
    """
    plan = make_plan(request)
    judgement = judge(plan)
    return JudgedPlan(plan, judgement, find_remedies(plan, judgement) if with_remedies else ())


# --- for simulations


@dataclass(frozen=True, slots=True)
class KvPool:
    """The KV cache of one replica and what else fills its GPUs.  Bytes are those of one GPU, of the tightest stage."""

    num_gpu_blocks: int
    """Blocks of block_size tokens, the null block included.  vLLM's own number for models with one kind of layers;
    of hybrid models as many as the tokens that vLLM logs come to."""
    block_size: int
    kv_cache_tokens: int
    """The figure vLLM logs as "GPU KV cache size"."""
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
    """What is taken out of the budget for them."""
    kv_bytes: int
    """What is available for the KV cache (given, or requested less the rest); the pool's blocks fit into it, unless
    their number was given."""
    kv_bytes_per_token: int
    source: str
    """What determined the pool: "formula", "kv_cache_memory_bytes" or "num_gpu_blocks_override"."""
    assumptions: tuple[str, ...]
    """What the figures rest on, in sentences for people."""
    kv_cache_tokens_90: tuple[int, int]
    """In nine starts of ten ``kv_cache_tokens`` lies in it, both included."""
    oom_margin_bytes: int
    """Free on the card once the pool is there and the graphs are captured; below 0 it runs out of memory."""
    oom_margin_spread_bytes: int
    """By how much that may be too high: what is free at the start and the graphs are estimates."""
    verdict: str
    """ok or unsafe, as ``windtunnel memory`` has it; does_not_start only where the pool was given."""
    reason: str
    """Why."""


def kv_pool(
    model: ModelSpec,
    gpu: GpuSpec,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    gpu_memory_utilization: float | None = None,
    block_size: int = BLOCK_SIZE,
    kv_cache_dtype: str = "auto",
    enable_prefix_caching: bool | None = None,
    enforce_eager: bool = False,
    num_gpu_blocks_override: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    version: VersionProfile | None = None,
) -> KvPool:
    """The KV blocks that vLLM finds for ``model`` on these GPUs, as ``plan_memory`` has it.

    ``kv_cache_memory_bytes`` and ``num_gpu_blocks_override`` are taken at their word: whether so much is there is not
    asked, nor whether ``max_model_len`` is within the model's own, nor what the scheduler's config makes of the token
    budget, nor whether the release has such a model.  ``version`` is 0.32 if None.

    Raises InfeasibleDeployment when vLLM does not start; ValueError for a value out of range or a split the model
    does not allow.
    """
    if gpu_memory_utilization is not None:
        check_gpu_memory_utilization(gpu_memory_utilization)
    request = MemoryRequest(
        model,
        gpu,
        profile(ENGINE) if version is None else version,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        enforce_eager=enforce_eager,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_gpu_blocks_override=num_gpu_blocks_override,
        allows_long_max_model_len=True,
    )
    plan = make_plan(request, checks_budget=False)
    judgement = judge(plan, asks_architecture=False)
    if judgement.verdict == DOES_NOT_START and not (plan.is_given and judgement.cause in _TAKEN_AT_ITS_WORD):
        raise infeasible(plan, judgement)
    return _pool_of(plan, judgement)


_TAKEN_AT_ITS_WORD = ("out_of_memory_weights", "out_of_memory_profiling", "out_of_memory_kv_cache")


def infeasible(plan: MemoryPlan, judgement: Judgement) -> InfeasibleDeployment:
    """The exception for a plan that vLLM does not start with, remedies included."""
    request = plan.request
    remedies = find_remedies(plan, judgement)
    told = ", or ".join(remedy.text for remedy in remedies) or "take a GPU with more memory or a smaller model"
    where = (
        f"{request.model.name} on {request.tensor_parallel_size} x {request.gpu.name} at gpu_memory_utilization "
        f"{plan.settings.gpu_memory_utilization:g}"
    )
    size = next((remedy.value for remedy in remedies if remedy.flag == "tensor_parallel_size"), None)
    largest = largest_length(plan, judgement)
    return InfeasibleDeployment(f"{judgement.reason}  ({where})  Remedy: {told}", largest, size)


def _pool_of(plan: MemoryPlan, judgement: Judgement) -> KvPool:
    num_blocks, tokens = plan.num_gpu_blocks, plan.kv_cache_tokens
    assumptions = assumptions_of(plan)
    if plan.layout.is_hybrid:
        num_blocks = max(tokens // plan.block_size, 1)
        assumptions += (
            f"Blocks of this hybrid model are counted as {plan.block_size} tokens each; vLLM's own number, which "
            f"several groups of layers share, is {plan.num_gpu_blocks:,}.",
        )
    return KvPool(
        num_gpu_blocks=num_blocks,
        block_size=plan.block_size,
        kv_cache_tokens=tokens,
        max_concurrency=plan.max_concurrency,
        total_bytes=plan.total_bytes,
        requested_bytes=plan.requested_bytes,
        weights_bytes=plan.weights_bytes,
        activation_bytes=plan.activation_bytes,
        non_torch_bytes=plan.non_torch_bytes,
        cuda_graphs_bytes=plan.cudagraph_bytes if plan.graphs_inside else 0,
        kv_bytes=plan.available_kv_cache_bytes,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        source=plan.source,
        assumptions=assumptions,
        kv_cache_tokens_90=(plan.interval_90.low, plan.interval_90.high),
        oom_margin_bytes=plan.margin_bytes,
        oom_margin_spread_bytes=plan.margin_spread_bytes,
        verdict=judgement.verdict,
        reason=judgement.reason,
    )


def assumptions_of(plan: MemoryPlan) -> tuple[str, ...]:
    """What the figures rest on, in sentences."""
    if plan.source == "num_gpu_blocks_override":
        return ("The number of blocks was given; the other parts of the memory did not enter.",)
    if plan.source == "kv_cache_memory_bytes":
        return ("The bytes of the KV cache were given; gpu_memory_utilization and the other parts did not enter.",)
    request = plan.request
    free = "as given"
    if request.free_memory_bytes is None:
        low, high = plan.free_interval
        free = (
            f"if nothing else runs on it: {low / GIB:.2f} to {high / GIB:.2f} GiB, after {in_use(request).source} and "
            "the like"
        )
    sentences = [
        f"{request.gpu.name} has {plan.total_bytes / GIB:.2f} GiB in all ({request.gpu.memory_source}); drivers differ "
        "by up to 0.3 %.",
        f"{plan.free_bytes / GIB:.2f} GiB of it are free at the start, {free}.",
        "Weights are counted from the shapes, with the rotary table; loading leaves nothing else behind.",
        *plan.overheads.assumptions,
    ]
    if request.measured is not None:
        sentences.insert(0, f"The pool is that of {request.measured.source}; the formula is only compared with it.")
    if request.correction_bytes and request.correction_differs:
        sentences.append(
            f"The correction was learnt with another {', '.join(request.correction_differs)}: the interval is "
            f"{BOTH_ESTIMATES:.2f} times as wide, since it carries the error of the estimate there, too."
        )
    if request.max_loras:
        sentences.append(
            f"Slots for {request.max_loras} LoRA adapters of rank {request.max_lora_rank}, for all linear layers, are "
            "counted with the weights; their work space is not."
        )
    sentences += [f"Not counted: {part}." for part in request.model.not_counted]
    return tuple(sentences)


def num_kv_blocks(
    model: ModelSpec,
    kv_bytes: int,
    *,
    tensor_parallel_size: int = 1,
    block_size: int = BLOCK_SIZE,
    kv_cache_dtype: str = "auto",
    **others: Any,
) -> int:
    """Whole blocks that ``kv_bytes`` on each GPU hold, the null block included; ``others`` as for ``kv_layout``."""
    layout = kv_layout(
        model,
        tensor_parallel_size=tensor_parallel_size,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        **others,
    )
    return layout.num_blocks(kv_bytes)
