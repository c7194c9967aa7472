"""What to change so that vLLM starts: for each flag the smallest change that works, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from windtunnel.sim.deployment.memory_checks import UNKNOWN_ARCHITECTURE, Judgement, gib, judge
from windtunnel.sim.deployment.memory_plan import (
    DOES_NOT_START,
    OK,
    MemoryPlan,
    free_at_start,
    make_plan,
)
from windtunnel.sim.deployment.memory_request import MemoryRequest
from windtunnel.sim.deployment.model_spec import kv_element_bytes

LARGEST_UTILIZATION = 0.98
LARGEST_PIPELINE = 16
LARGEST_TENSOR = 16
BUDGET_STEP = 256
"""Token budgets are proposed in multiples of it."""
SHARE_STEPS = 1000
"""Shares are proposed in thousandths."""


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

    Of each flag it is the smallest change that is ok, with the smallest that starts in its cost; where none is ok, it
    is the latter.  No setting mends a correction that does not fit.
    """
    if judgement.verdict == OK or judgement.cause in (UNKNOWN_ARCHITECTURE, "overcorrected"):
        return ()
    found = (search(plan, judgement) for search in _SEARCHES)
    return tuple(remedy for remedy in found if remedy is not None)


class _Tried(NamedTuple):
    value: Any
    plan: MemoryPlan
    judgement: Judgement
    least: Any = None
    """The smallest change that starts, where it is not this one."""


def _try(request: MemoryRequest, flag: str, value: Any) -> _Tried | None:
    """The plan with that value; None where the settings contradict each other."""
    try:
        plan = make_plan(replace(request, **{flag: value}))
    except ValueError:
        return None
    return _Tried(value, plan, judge(plan))


def _smallest(
    request: MemoryRequest, flag: str, values: Sequence[Any], judgement: Judgement, *, points: int = 12
) -> _Tried | None:
    """The smallest change (the first of ``values``) that is ok; where none is, the smallest that starts.

    The latter only for a plan that does not start itself, and then beside the former, too.  Long sequences are looked
    at in so many places, and then halved between the last that does not help and the first that does: what helps is
    held to have no gap between two places.
    """
    seen: dict[Any, _Tried | None] = {}

    def tried(place: int) -> _Tried | None:
        value = values[place]
        if value not in seen:
            seen[value] = _try(request, flag, value)
        return seen[value]

    def first(helps: Callable[[_Tried], bool]) -> _Tried | None:
        bad = -1
        for place in _places(len(values), points):
            found = tried(place)
            if found is None or not helps(found):
                bad = place
                continue
            good = place
            while good - bad > 1:
                middle = (good + bad) // 2
                halved = tried(middle)
                good, bad = (middle, bad) if halved is not None and helps(halved) else (good, middle)
            return tried(good)
        return None

    best = first(lambda found: found.judgement.verdict == OK)
    if judgement.verdict != DOES_NOT_START:
        return best
    least = first(lambda found: found.judgement.verdict != DOES_NOT_START)
    return least if best is None or least is None else best._replace(least=least.value)


def _places(size: int, points: int) -> list[int]:
    """All places of a short sequence, else so many, the first and the last among them."""
    if size <= points:
        return list(range(size))
    return [place * (size - 1) // (points - 1) for place in range(points)]


def _remedy(
    flag: str, tried: _Tried | None, cost: Callable[[MemoryPlan], str], *, raises: bool | None = None
) -> Remedy | None:
    if tried is None:
        return None
    plan, verdict, told = tried.plan, tried.judgement.verdict, cost(tried.plan)
    if tried.least not in (None, tried.value):
        told += f"; {tried.least:,} starts, too, but is unsafe"
    return Remedy(flag, tried.value, verdict, plan.kv_cache_tokens, plan.max_concurrency, told, raises)


# --- one search a flag


def _utilization(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    """A smaller share where too little is free, a larger one where too little is left of it; in thousandths."""
    if plan.is_given or plan.source == "measured":
        return None
    share = plan.settings.gpu_memory_utilization
    if judgement.cause in _TOO_MUCH:
        most_free = math.floor(plan.free_interval.high / plan.total_bytes * SHARE_STEPS)
        shares = range(min(math.ceil(share * SHARE_STEPS) - 1, most_free), 0, -1)
    else:
        largest = min(LARGEST_UTILIZATION, free_at_start(plan.request) / plan.total_bytes)
        shares = range(math.floor(share * SHARE_STEPS) + 1, math.floor(largest * SHARE_STEPS) + 1)
    values = [thousandths / SHARE_STEPS for thousandths in shares]
    found = _smallest(plan.request, "gpu_memory_utilization", values, judgement, points=64)
    return _remedy("gpu_memory_utilization", found, _cost_of_share(share))


_TOO_MUCH = (
    "free_memory_below_desired",
    "free_memory_unsure",
    "graphs_outside",
    "sampler_warm_up",
    "small_margin",
    "out_of_memory_kv_cache",
)


def _cost_of_share(before: float) -> Callable[[MemoryPlan], str]:
    def cost(plan: MemoryPlan) -> str:
        if plan.settings.gpu_memory_utilization < before:
            return f"the pool is {gib(plan.available_kv_cache_bytes)}"
        return f"{gib(plan.margin_bytes)} of the card stay free for anything else"

    return cost


def _length(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    """The longest context that is ok."""
    longest = largest_length(plan, judgement)
    if plan.request.fits_length or longest < 1:
        return None
    longest = min(longest, plan.settings.max_model_len - 1)
    found = _smallest(plan.request, "max_model_len", range(longest, 0, -1), judgement)
    return _remedy("max_model_len", found, lambda _: "longer requests are refused")


def largest_length(plan: MemoryPlan, judgement: Judgement) -> int:
    """The longest max_model_len that starts, be it safe or not, with nothing else changed; 0 if that does not help."""
    if judgement.cause not in _OF_THE_POOL:
        return 0
    longest = plan.largest_model_len()
    if judgement.cause == "max_model_len_exceeds_model":
        longest = min(plan.request.model.max_model_len, longest)
    return longest


_OF_THE_POOL = (
    "max_model_len_exceeds_kv_cache",
    "small_pool",
    "small_override",
    "request_exceeds_pool",
    "max_model_len_exceeds_model",
)


def _kv_dtype(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    if kv_element_bytes(plan.request.model, plan.request.kv_cache_dtype) < 2 or judgement.cause not in _OF_THE_CACHE:
        return None
    found = _smallest(plan.request, "kv_cache_dtype", ["fp8"], judgement)
    return _remedy("kv_cache_dtype", found, lambda _: "keys and values are rounded to 8 bits: check the answers")


_OF_THE_CACHE = (*_OF_THE_POOL, "mamba_blocks_exceeded", "out_of_memory_kv_cache")


def _seqs(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    """Fewer sequences: as many as there are states, or less work space for logits."""
    if judgement.cause in _OUTSIDE:
        return None
    found = _smallest(plan.request, "max_num_seqs", range(plan.settings.max_num_seqs - 1, 0, -1), judgement)
    return _remedy("max_num_seqs", found, lambda made: f"at most {made.settings.max_num_seqs:,} requests run at once")


def _budget(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    """Smaller chunks: less work space; in steps of ``BUDGET_STEP`` tokens."""
    if judgement.cause in _OUTSIDE:
        return None
    if plan.request.runs_on_v0:
        return _chunked_prefill(plan, judgement)
    least = max(BUDGET_STEP, plan.request.max_num_seqs or 0)
    most = (plan.settings.max_num_batched_tokens - 1) // BUDGET_STEP * BUDGET_STEP
    found = _smallest(plan.request, "max_num_batched_tokens", range(most, least - 1, -BUDGET_STEP), judgement)
    return _remedy(
        "max_num_batched_tokens", found, lambda _: "prompts are computed in smaller chunks: later first tokens"
    )


def _chunked_prefill(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    found = _smallest(plan.request, "enable_chunked_prefill", [True], judgement)
    return _remedy("enable_chunked_prefill", found, lambda _: "prompts are computed in chunks of 2,048 tokens")


_OUTSIDE = (
    "max_model_len_exceeds_model",
    "free_memory_below_desired",
    "free_memory_unsure",
    "out_of_memory_weights",
)


def _eager(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    if plan.request.enforce_eager or not plan.cudagraph_bytes or judgement.cause in _OUTSIDE:
        return None
    found = _smallest(plan.request, "enforce_eager", [True], judgement)
    return _remedy("enforce_eager", found, lambda _: "no CUDA graphs: slower decoding")


def _tensor_parallel(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    if judgement.cause in _OF_ONE_CARD or _was_given_to_a_server(plan):
        return None
    size = plan.request.tensor_parallel_size
    sizes = [each for each in plan.request.model.tensor_parallel_sizes(LARGEST_TENSOR) if each > size]
    found = _smallest(_unmeasured(plan.request), "tensor_parallel_size", sizes, judgement, points=len(sizes))
    return _remedy("tensor_parallel_size", found, _cost_of_gpus(plan))


def _pipeline_parallel(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    """Stages, where no tensor-parallel size helps."""
    if judgement.cause in _OF_ONE_CARD or _was_given_to_a_server(plan):
        return None
    if _tensor_parallel(plan, judgement) is not None:
        return None
    stages = plan.request.pipeline_parallel_size
    most = min(plan.request.model.num_layers, LARGEST_PIPELINE)
    values = [value for value in (2, 3, 4, 6, 8, 12, 16) if stages < value <= most]
    found = _smallest(_unmeasured(plan.request), "pipeline_parallel_size", values, judgement)
    return _remedy("pipeline_parallel_size", found, _cost_of_gpus(plan))


_OF_ONE_CARD = (
    "max_model_len_exceeds_model",
    "free_memory_below_desired",
    "free_memory_unsure",
    "small_margin",
    "graphs_outside",
    "sampler_warm_up",
)
"""What more GPUs do not mend, or not first."""


def _unmeasured(request: MemoryRequest) -> MemoryRequest:
    """A pool that was measured, and what it taught, hold for one split only."""
    return replace(request, measured=None, correction_bytes=0)


def _was_given_to_a_server(plan: MemoryPlan) -> bool:
    """Then what it would be given on more GPUs is unknown."""
    return plan.source == "measured" and plan.is_given


def _cost_of_gpus(before: MemoryPlan) -> Callable[[MemoryPlan], str]:
    return lambda plan: f"{plan.request.num_gpus} GPUs instead of {before.request.num_gpus}"


def _blocks(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    """As many blocks as one request needs, or as fit beside the rest, where their number was given."""
    flag = "num_gpu_blocks_override"
    if plan.source != flag:
        return None
    if judgement.cause in _TOO_SMALL:
        needed = max(_blocks_of_length(plan), _blocks_of_states(plan, judgement))
        return _remedy(flag, _one(plan, flag, needed, judgement), _cost_of_pool, raises=needed > plan.num_gpu_blocks)
    if judgement.cause in _TOO_LARGE:
        place = plan.stages.index(plan.tightest)
        fitting = _fitting_bytes(plan) // max(plan.layout.block_bytes[place], 1)
        return _remedy(flag, _one(plan, flag, fitting, judgement), _cost_of_pool, raises=fitting > plan.num_gpu_blocks)
    return None


_TOO_SMALL = ("max_model_len_exceeds_kv_cache", "small_override", "request_exceeds_pool", "mamba_blocks_exceeded")
_TOO_LARGE = ("out_of_memory_kv_cache", "small_margin")


def _blocks_of_length(plan: MemoryPlan) -> int:
    """The fewest blocks with which a request of max_model_len starts and comes to its end."""
    length = plan.settings.max_model_len
    return max(plan.blocks_needed(length), plan.layout.blocks_of_request(length) + plan.num_null_blocks)


def _blocks_of_states(plan: MemoryPlan, judgement: Judgement) -> int:
    return plan.settings.max_num_seqs if judgement.cause == "mamba_blocks_exceeded" else 0


def _fitting_bytes(plan: MemoryPlan) -> int:
    """The largest KV cache that leaves as much free as is safe."""
    return plan.kv_cache_bytes + plan.margin_bytes - plan.safe_margin_bytes


def _kv_bytes(plan: MemoryPlan, judgement: Judgement) -> Remedy | None:
    """As many bytes as one request needs, or as many as there are, where they were given."""
    flag = "kv_cache_memory_bytes"
    if plan.source != flag:
        return None
    wanted = None
    if judgement.cause in ("max_model_len_exceeds_kv_cache", "request_exceeds_pool"):
        wanted = _blocks_of_length(plan) * max(plan.layout.block_bytes)
    if judgement.cause in _TOO_LARGE:
        wanted = _fitting_bytes(plan)
    if wanted is None:
        return None
    raises = wanted > (plan.request.kv_cache_memory_bytes or 0)
    return _remedy(flag, _one(plan, flag, wanted, judgement), _cost_of_pool, raises=raises)


def _one(plan: MemoryPlan, flag: str, value: int, judgement: Judgement) -> _Tried | None:
    return _smallest(plan.request, flag, [value], judgement) if value > 0 else None


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
