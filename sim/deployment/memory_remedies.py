"""What to change so that vLLM starts: for each flag the smallest change that works, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from windtunnel.sim.deployment.memory_checks import UNKNOWN_ARCHITECTURE, Judgement, gib, judge, starts
from windtunnel.sim.deployment.memory_plan import (
    DOES_NOT_START,
    OK,
    RESERVE_BYTES,
    MemoryPlan,
    free_at_start,
    make_plan,
)
from windtunnel.sim.deployment.memory_request import MemoryRequest
from windtunnel.sim.deployment.model_spec import kv_element_bytes

LARGEST_UTILIZATION = 0.98
LARGEST_PIPELINE = 16
SMALLEST_BUDGET = 256


class Remedy(NamedTuple):
    """One change that makes it start."""

    flag: str
    """vLLM's name of what is changed."""
    value: Any
    verdict: str
    """ok, or unsafe where nothing better was found."""
    kv_cache_tokens: int
    max_concurrency: float
    cost: str
    """What it costs, in words."""
    raises: bool | None = None
    """Whether the value is raised or lowered; None where the flag says so, or is set at all."""

    @property
    def text(self) -> str:
        """What to do, in words."""
        if self.value is True:
            return f"set {self.flag}"
        if self.raises is not None:
            return f"{'raise' if self.raises else 'lower'} {self.flag} to {self.value}"
        return f"{_VERBS.get(self.flag, 'set')} {self.flag} to {self.value}"


_VERBS = {
    "tensor_parallel_size": "raise",
    "pipeline_parallel_size": "raise",
    "max_model_len": "lower",
    "max_num_seqs": "lower",
    "max_num_batched_tokens": "lower",
}


def find_remedies(plan: MemoryPlan, judgement: Judgement) -> tuple[Remedy, ...]:
    """One remedy a flag that works alone, the cheapest first; none for a plan that is well.

    A remedy that is safe is preferred to one that just starts.
    """
    if judgement.verdict == OK or judgement.cause == UNKNOWN_ARCHITECTURE:
        return ()
    found = (search(plan, judgement) for search in _SEARCHES)
    return tuple(remedy for remedy in found if remedy is not None)


class _Tried(NamedTuple):
    value: Any
    plan: MemoryPlan
    judgement: Judgement


def _try(request: MemoryRequest, flag: str, value: Any) -> _Tried | None:
    """The plan with that value; None where the settings contradict each other."""
    try:
        plan = make_plan(replace(request, **{flag: value}))
    except ValueError:
        return None
    return _Tried(value, plan, judge(plan))


def _first(request: MemoryRequest, flag: str, values: Iterable[Any], *, safe: bool) -> _Tried | None:
    """The first value that is ok, else the first that starts; with ``safe`` only the former."""
    just_starts = None
    for value in values:
        tried = _try(request, flag, value)
        if tried is None or tried.judgement.verdict == DOES_NOT_START:
            continue
        if tried.judgement.verdict == OK:
            return tried
        just_starts = just_starts or tried
    return None if safe else just_starts


def _remedy(
    flag: str, tried: _Tried | None, cost: Callable[[MemoryPlan], str], *, raises: bool | None = None
) -> Remedy | None:
    if tried is None:
        return None
    plan, verdict = tried.plan, tried.judgement.verdict
    return Remedy(flag, tried.value, verdict, plan.kv_cache_tokens, plan.max_concurrency, cost(plan), raises)


# --- one search a flag


def _utilization(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    """A smaller share where too little is free, a larger one where too little is left of it."""
    request, share = plan.request, plan.settings.gpu_memory_utilization
    if plan.is_given or plan.source == "measured":
        return None
    safe = judgement.verdict != DOES_NOT_START
    if judgement.cause in _TOO_MUCH:
        found = _first(request, "gpu_memory_utilization", _smaller_shares(plan), safe=safe)
    else:
        largest = min(LARGEST_UTILIZATION, free_at_start(request) / request.gpu.memory_bytes)
        percents = range(math.floor(share * 100) + 1, math.floor(largest * 100) + 1)
        found = _bisect(request, "gpu_memory_utilization", [percent / 100 for percent in percents], safe=safe)
    return _remedy("gpu_memory_utilization", found, _cost_of_share(share))


_TOO_MUCH = ("free_memory_below_desired", "graphs_outside", "small_margin", "out_of_memory_kv_cache")


def _smaller_shares(plan: MemoryPlan) -> list[float]:
    """The largest share that is free, to three digits, then whole percents below."""
    largest = math.floor(plan.free_bytes / plan.total_bytes * 1000) / 1000
    share = plan.settings.gpu_memory_utilization
    percents = range(math.ceil(min(share, largest) * 100) - 1, max(math.floor(share * 100) - 25, 0), -1)
    below = [percent / 100 for percent in percents]
    return [largest, *below] if 0 < largest < share else below


def _cost_of_share(before: float) -> Callable[[MemoryPlan], str]:
    def cost(plan: MemoryPlan) -> str:
        if plan.settings.gpu_memory_utilization < before:
            return f"the pool is {gib(plan.available_kv_cache_bytes)}"
        return f"{gib(plan.margin_bytes)} of the card stay free for anything else"

    return cost


def _bisect(request: MemoryRequest, flag: str, values: list[Any], *, safe: bool) -> _Tried | None:
    """The first of ordered values that starts (all behind it do), and that is ok if one of the next is."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        tried = _try(request, flag, values[middle])
        if tried is not None and starts(tried.plan):
            high = middle
        else:
            low = middle + 1
    return _first(request, flag, values[low:], safe=safe)


def _length(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    """The longest context that starts, and in its cost the longest that is safe."""
    request, longest = plan.request, plan.largest_model_len()
    if request.fits_length or longest < 1 or judgement.cause not in _OF_THE_POOL:
        return None
    if judgement.cause == "max_model_len_exceeds_model":
        longest = min(request.model.max_model_len, longest)
    safe = _longest_safe(request, longest)
    if judgement.verdict != DOES_NOT_START:
        longest = safe
    found = _first(request, "max_model_len", [longest], safe=False) if longest else None
    hint = f"; {safe} or less is safe" if safe and found and found.judgement.verdict != OK else ""
    return _remedy("max_model_len", found, lambda _: f"longer requests are refused{hint}")


def _longest_safe(request: MemoryRequest, longest: int) -> int:
    """The longest context up to ``longest`` that is ok; 0 if none is."""
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        tried = _try(request, "max_model_len", middle)
        low, high = (middle, high) if tried is not None and tried.judgement.verdict == OK else (low, middle - 1)
    return low


_OF_THE_POOL = ("max_model_len_exceeds_kv_cache", "small_pool", "small_override", "max_model_len_exceeds_model")


def _kv_dtype(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    if kv_element_bytes(plan.request.model, plan.request.kv_cache_dtype) < 2 or judgement.cause not in _OF_THE_CACHE:
        return None
    found = _first(plan.request, "kv_cache_dtype", ["fp8"], safe=judgement.verdict != DOES_NOT_START)
    return _remedy("kv_cache_dtype", found, lambda _: "keys and values are rounded to 8 bits: check the answers")


_OF_THE_CACHE = (*_OF_THE_POOL, "mamba_blocks_exceeded", "out_of_memory_kv_cache")


def _seqs(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    """Fewer sequences: as many as there are states, or less work space for logits."""
    most, seqs = plan.max_state_sequences, plan.settings.max_num_seqs
    if judgement.cause in _OUTSIDE:
        return None
    values = [value for value in (512, 256, 128, 64, 32, 16, 8, 4, 2, 1) if value < seqs]
    if most is not None and 0 < most < seqs:
        values = [most, *(value for value in values if value < most)]
    found = _first(plan.request, "max_num_seqs", values, safe=judgement.verdict != DOES_NOT_START)
    return _remedy("max_num_seqs", found, lambda made: f"at most {made.settings.max_num_seqs:,} requests run at once")


def _budget(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    """Smaller chunks: less work space."""
    if judgement.cause in _OUTSIDE:
        return None
    budget, least = plan.settings.max_num_batched_tokens, max(SMALLEST_BUDGET, plan.request.max_num_seqs or 0)
    powers = (2**power for power in range(16, 7, -1))
    values = [value for value in powers if least <= value < budget]
    if plan.request.runs_on_v0:
        return _chunked_prefill(plan, judgement)
    found = _first(plan.request, "max_num_batched_tokens", values, safe=judgement.verdict != DOES_NOT_START)
    return _remedy(
        "max_num_batched_tokens", found, lambda _: "prompts are computed in smaller chunks: later first tokens"
    )


def _chunked_prefill(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    found = _first(plan.request, "enable_chunked_prefill", [True], safe=judgement.verdict != DOES_NOT_START)
    return _remedy("enable_chunked_prefill", found, lambda _: "prompts are computed in chunks of 2,048 tokens")


_OUTSIDE = ("max_model_len_exceeds_model", "free_memory_below_desired", "out_of_memory_weights")


def _eager(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    if plan.request.enforce_eager or not plan.cudagraph_bytes or judgement.cause in _OUTSIDE:
        return None
    found = _first(plan.request, "enforce_eager", [True], safe=judgement.verdict != DOES_NOT_START)
    return _remedy("enforce_eager", found, lambda _: "no CUDA graphs: slower decoding")


def _tensor_parallel(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    if judgement.cause in _OF_ONE_CARD or plan.is_given:
        return None
    size = plan.request.tensor_parallel_size
    sizes = [each for each in plan.request.model.tensor_parallel_sizes() if each > size]
    found = _first(_unmeasured(plan.request), "tensor_parallel_size", sizes, safe=judgement.verdict != DOES_NOT_START)
    return _remedy("tensor_parallel_size", found, _cost_of_gpus(plan))


def _pipeline_parallel(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    """Stages, where no tensor-parallel size helps."""
    if judgement.cause in _OF_ONE_CARD or plan.is_given:
        return None
    if _tensor_parallel(plan, judgement) is not None:
        return None
    stages = plan.request.pipeline_parallel_size
    most = min(plan.request.model.num_layers, LARGEST_PIPELINE)
    values = [value for value in (2, 3, 4, 6, 8, 12, 16) if stages < value <= most]
    found = _first(
        _unmeasured(plan.request), "pipeline_parallel_size", values, safe=judgement.verdict != DOES_NOT_START
    )
    return _remedy("pipeline_parallel_size", found, _cost_of_gpus(plan))


_OF_ONE_CARD = ("max_model_len_exceeds_model", "free_memory_below_desired", "small_margin", "graphs_outside")
"""What more GPUs do not mend, or not first."""


def _unmeasured(request: MemoryRequest) -> MemoryRequest:
    """A pool that was measured holds for one split only."""
    return replace(request, measured=None)


def _cost_of_gpus(before: MemoryPlan) -> Callable[[MemoryPlan], str]:
    return lambda plan: f"{plan.request.num_gpus} GPUs instead of {before.request.num_gpus}"


def _blocks(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    """As many blocks as one request needs, or as fit beside the rest, where their number was given."""
    flag = "num_gpu_blocks_override"
    if plan.source != flag:
        return None
    if judgement.cause in _TOO_SMALL:
        needed = max(plan.blocks_needed(plan.settings.max_model_len), _blocks_of_states(plan, judgement))
        return _remedy(flag, _first_of(plan, flag, needed), _cost_of_pool, raises=needed > plan.num_gpu_blocks)
    if judgement.cause in _TOO_LARGE:
        place = plan.stages.index(plan.tightest)
        fitting = _fitting_bytes(plan) // max(plan.layout.block_bytes[place], 1)
        return _remedy(flag, _first_of(plan, flag, fitting), _cost_of_pool, raises=fitting > plan.num_gpu_blocks)
    return None


_TOO_SMALL = ("max_model_len_exceeds_kv_cache", "small_override", "mamba_blocks_exceeded")
_TOO_LARGE = ("out_of_memory_kv_cache", "small_margin")


def _blocks_of_states(plan: MemoryPlan, judgement: Judgement) -> int:
    return plan.settings.max_num_seqs if judgement.cause == "mamba_blocks_exceeded" else 0


def _fitting_bytes(plan: MemoryPlan) -> int:
    """The largest KV cache that leaves as much free as is safe."""
    return plan.kv_cache_bytes + plan.margin_bytes - max(plan.overheads.error_bytes[1], RESERVE_BYTES)


def _kv_bytes(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    """As many bytes as one request needs, or as many as there are, where they were given."""
    flag = "kv_cache_memory_bytes"
    if plan.source != flag:
        return None
    wanted = None
    if judgement.cause == "max_model_len_exceeds_kv_cache":
        wanted = plan.blocks_needed(plan.settings.max_model_len) * max(plan.layout.block_bytes)
    if judgement.cause in _TOO_LARGE:
        wanted = _fitting_bytes(plan)
    if wanted is None:
        return None
    raises = wanted > (plan.request.kv_cache_memory_bytes or 0)
    return _remedy(flag, _first_of(plan, flag, wanted), _cost_of_pool, raises=raises)


def _first_of(plan: MemoryPlan, flag: str, value: int) -> _Tried | None:
    return _first(plan.request, flag, [value], safe=False) if value > 0 else None


def _cost_of_pool(plan: MemoryPlan) -> str:
    return f"the pool takes {gib(plan.kv_cache_bytes)}"


_SEARCHES: tuple[Callable[[MemoryPlan, Judgement], Remedy | None], ...] = (
    _utilization,
    _blocks,
    _kv_bytes,
    _length,
    _seqs,
    _budget,
    _kv_dtype,
    _eager,
    _tensor_parallel,
    _pipeline_parallel,
)
