"""From gpu_memory_utilization to KV blocks, as vLLM counts: the budget of one GPU of each stage, and the pool.

``requested = ceil(total * gpu_memory_utilization)``; what weights, the peak of the profile run, non-torch memory and,
from 0.20 on, CUDA graphs leave of it is available for the KV cache; whole blocks of it, the least of all pipeline
stages, are the pool.  Source: vLLM 0.32, ``v1/worker/gpu_worker.py`` and ``v1/core/kv_cache_utils.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from windtunnel.sim.deployment.gpu import GIB
from windtunnel.sim.deployment.kv_layout import KvLayout, LayoutRules, kv_layout
from windtunnel.sim.deployment.layers import State
from windtunnel.sim.deployment.lora import lora_bytes
from windtunnel.sim.deployment.memory_at_start import COMMUNICATORS_FIRST, InUse, graph_spread, in_use_at_start
from windtunnel.sim.deployment.memory_request import (
    MeasuredPool,
    MemoryRequest,
    MemorySettings,
    check_block_size,
    check_budget,
    has_states,
    settle,
)
from windtunnel.sim.deployment.memory_rules import layout_rules
from windtunnel.sim.deployment.model_spec import ModelSpec, kv_element_bytes, layers_of_stage
from windtunnel.sim.deployment.overheads import Overheads, estimate_overheads
from windtunnel.sim.deployment.profile_run import is_amd, release
from windtunnel.sim.deployment.weights import Split

OK, UNSAFE, DOES_NOT_START = "ok", "unsafe", "does_not_start"
VERDICTS = (OK, UNSAFE, DOES_NOT_START)

CONTEXT_BYTES = round(0.51 * GIB)
"""In use before vLLM begins to measure: total less free in start-up logs of vLLM 0.19 on one H100 (20 of 20).  What a
plan takes is that of its own card (``memory_at_start``)."""
DISTRIBUTED_CONTEXT_BYTES = round(1.53 * GIB)
"""The same with several ranks, whose NCCL is set up before: median of 11 start-ups of vLLM 0.19 on H100."""
RESERVE_BYTES = 150 * 2**20
"""What vLLM itself keeps back when it suggests a ``--kv-cache-memory`` (``gpu_worker.py``), since its profile can be
slightly too low; a plan with less left on the card is unsafe."""
BOTH_ESTIMATES = math.sqrt(2)
"""How much wider the interval is with a correction that was learnt with other settings: it carries the error of the
estimate there into the one here, and two errors of one size that know nothing of each other add up as their squares."""


ESTIMATE_SETTINGS = ("engine", "max_num_batched_tokens", "max_num_seqs", "enforce_eager")
"""What the estimate of the other parts depends on beside the model, the card and the parallelism, so that a correction
learnt with another value is less sure."""


class Interval(NamedTuple):
    """Bounds, both included."""

    low: int
    high: int


class StageMemory(NamedTuple):
    """One GPU of one pipeline stage, in bytes."""

    weights_bytes: int
    """Parameters and rotary tables."""
    available_bytes: int
    """Left for the KV cache; negative where it does not fit."""
    num_blocks: int
    """Blocks that it could hold; the smallest stage decides."""


class Users(NamedTuple):
    """How many requests of some length there is memory for."""

    mean_tokens: int
    bytes_per_user: int
    """Of one GPU."""
    ideal: float
    """If all memory but the weights held keys and values."""
    real: float
    """In the pool as it is, the null block left out."""
    running: int
    """Those that run at once: max_num_seqs caps them."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The pool of one engine and what else is on its GPUs.  Bytes are those of one GPU of the tightest stage."""

    request: MemoryRequest
    settings: MemorySettings
    layout: KvLayout
    overheads: Overheads
    stages: tuple[StageMemory, ...]
    source: str
    """What the pool is from: "formula", "kv_cache_memory_bytes", "num_gpu_blocks_override" or "measured"."""
    available_kv_cache_bytes: int
    num_gpu_blocks: int
    """As vLLM counts, the null block included where there is one (``num_null_blocks``)."""
    interval_blocks: Interval
    """In nine starts of ten the blocks lie in it; one number where they were given."""

    # --- the budget

    @property
    def total_bytes(self) -> int:
        """Of the card, as the driver reports it."""
        return self.request.gpu.memory_bytes

    @property
    def requested_bytes(self) -> int:
        """gpu_memory_utilization of it, rounded up."""
        return math.ceil(self.total_bytes * self.settings.gpu_memory_utilization)

    @property
    def free_bytes(self) -> int:
        """Free when vLLM starts: as given, or the total less what CUDA's context and NCCL typically take."""
        return free_at_start(self.request)

    @property
    def free_interval(self) -> Interval:
        """The least and the most that is free, as far as start-ups on such cards tell; one number where it was given.

        Only what fails with the most does not start; what fails with the least is unsafe.
        """
        return free_interval(self.request)

    @property
    def tightest(self) -> StageMemory:
        """The stage that decides."""
        return min(self.stages, key=lambda stage: stage.num_blocks)

    @property
    def weights_bytes(self) -> int:
        """Parameters and rotary tables."""
        return self.tightest.weights_bytes

    @property
    def activation_bytes(self) -> int:
        """Peak of the profile run above what stays."""
        return self.overheads.activation_bytes

    @property
    def non_torch_bytes(self) -> int:
        """CUDA libraries, communication buffers."""
        return self.overheads.non_torch_bytes

    @property
    def cudagraph_bytes(self) -> int:
        """CUDA graphs, be they inside the budget or outside."""
        return self.overheads.cudagraph_bytes

    @property
    def graphs_inside(self) -> bool:
        """Whether the release takes them out of the budget."""
        return self.overheads.cudagraph_inside

    @property
    def graphs_outside_bytes(self) -> int:
        """What is captured after the budget is spent."""
        return 0 if self.graphs_inside else self.cudagraph_bytes

    @property
    def consumed_bytes(self) -> int:
        """All of the budget but the KV cache."""
        return (
            self.weights_bytes
            + self.activation_bytes
            + self.non_torch_bytes
            + (self.cudagraph_bytes if self.graphs_inside else 0)
        )

    @property
    def kv_cache_bytes(self) -> int:
        """What the pool's blocks take on that GPU."""
        place = self.stages.index(self.tightest)
        return self.num_gpu_blocks * self.layout.block_bytes[place]

    @property
    def is_given(self) -> bool:
        """Whether the pool was given (be it to the server that was measured), so that gpu_memory_utilization does not
        bound it."""
        return self.given_by is not None

    @property
    def given_by(self) -> str | None:
        """The option that gave the pool."""
        if self.source == "measured":
            options = ("num_gpu_blocks_override", "kv_cache_memory_bytes")
            return next((name for name in options if getattr(self.request, name) is not None), None)
        return self.source if self.source in ("kv_cache_memory_bytes", "num_gpu_blocks_override") else None

    @property
    def unexplained_bytes(self) -> int:
        """What the budget has more than its parts and what is available for the KV cache: 0 by the formula, less the
        correction where there is one; of a measured pool what no part accounts for, negative where they are too many;
        0 where the bytes of the KV cache were given."""
        if self.source != "num_gpu_blocks_override" and self.request.kv_cache_memory_bytes is not None:
            return 0
        return self.requested_bytes - self.consumed_bytes - self.available_kv_cache_bytes

    @property
    def spent_bytes(self) -> int:
        """The budget, or what the parts sum up to where the pool was given, or where they alone are more.

        A measured pool lies within the budget, as vLLM makes it, be the other parts estimated too large; only weights
        and pool that are more tell that the budget was another one.
        """
        if self.is_given:
            return self.consumed_bytes + self.kv_cache_bytes
        if self.source == "measured":
            return max(self.requested_bytes, self.weights_bytes + self.kv_cache_bytes)
        return max(self.requested_bytes, self.consumed_bytes)

    @property
    def margin_bytes(self) -> int:
        """Free on the card once the pool is there and the graphs are captured; below 0 it runs out of memory."""
        return self.free_bytes - self.spent_bytes - self.graphs_outside_bytes

    @property
    def margin_spread_bytes(self) -> int:
        """By how much the margin may be too high: what is free, the graphs and, where the pool was given, the other
        parts are estimates, whose errors know nothing of each other.  0 for a start-up that was measured."""
        if self.source == "measured":
            return 0
        errors = [self.free_bytes - self.free_interval.low]
        if self.cudagraph_bytes:
            spread = graph_spread(amd=is_amd(self.request.gpu))
            errors.append(spread.estimate_bytes if self.graphs_inside else spread.captured_bytes)
        if self.is_given:
            errors.append(max(self.overheads.error_bytes[1], 0))
        return math.isqrt(sum(error**2 for error in errors))

    @property
    def safe_margin_bytes(self) -> int:
        """The least margin of a plan that is ok."""
        return max(RESERVE_BYTES, self.margin_spread_bytes)

    @property
    def overcorrection_bytes(self) -> int:
        """What a correction gives more than there is: with it the KV cache would take a part of the weights' place."""
        return max(self.request.correction_bytes - (self.consumed_bytes - self.weights_bytes), 0)

    # --- the pool

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one GPU of the tightest stage, in those of its layers that keep tokens."""
        request = self.request
        return request.model.kv_bytes_per_token(
            request.tensor_parallel_size,
            request.kv_cache_dtype,
            pipeline_parallel_size=request.pipeline_parallel_size,
            pipeline_rank=self.stages.index(self.tightest),
        )

    @property
    def block_size(self) -> int:
        """vLLM's cache_config.block_size; longer than asked for where states need larger pages."""
        return self.layout.block_size

    @property
    def kv_cache_tokens(self) -> int:
        """The figure that this release logs as "GPU KV cache size"."""
        return self._logged_tokens(self.num_gpu_blocks)

    @property
    def interval_90(self) -> Interval:
        """Of ``kv_cache_tokens``."""
        return Interval(self._logged_tokens(self.interval_blocks.low), self._logged_tokens(self.interval_blocks.high))

    @property
    def max_concurrency(self) -> float:
        """Requests of max_model_len that fit at once: the figure that vLLM logs as "Maximum concurrency".

        V0, and V1 before 0.9.1, divide tokens by max_model_len and do not round a request up to whole blocks.
        """
        length = self.settings.max_model_len
        if self.request.runs_on_v0 or not self.request.rules.concurrency_by_blocks:
            return self.num_gpu_blocks * self.block_size / length
        return self.layout.max_concurrency(self.num_gpu_blocks, length)

    @property
    def num_null_blocks(self) -> int:
        """Blocks of the pool that are never used: one, but none in V0 and before 0.8.3."""
        return int(self.request.rules.has_null_block and not self.request.runs_on_v0)

    @property
    def memory_blocks(self) -> int:
        """Blocks that the available memory holds, where num_gpu_blocks_override takes their place."""
        return min((stage.num_blocks for stage in self.stages), default=0)

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that the start-up check leaves out: the null block, since 0.29."""
        return int(self.request.version.startup_check_reserves_null_block and not self.request.runs_on_v0)

    @property
    def max_state_sequences(self) -> int | None:
        """Sequences whose states the pool holds; None for a model without states, and where V0 keeps them.

        Only ``rules.refuses_states`` makes it a bound of max_num_seqs.
        """
        return self.layout.max_state_sequences(self.num_gpu_blocks)

    @property
    def num_cpu_blocks(self) -> int | None:
        """Blocks in host memory that V0 swaps to; None for V1."""
        if not self.request.runs_on_v0:
            return None
        default = self.request.version.swap_space_gib or 0.0
        swap = default if self.request.swap_space_gib is None else self.request.swap_space_gib
        return int(swap * GIB) // max(self.layout.block_bytes)

    @property
    def equivalent_gpu_memory_utilization(self) -> float | None:
        """What vLLM logs it to be equivalent to without graphs inside; None where they are outside or not captured."""
        if not self.graphs_inside or not self.cudagraph_bytes:
            return None
        return round(self.settings.gpu_memory_utilization - self.cudagraph_bytes / self.total_bytes, 4)

    @property
    def suggested_gpu_memory_utilization(self) -> float | None:
        """What vLLM suggests to have the KV cache of before; None as above."""
        if not self.graphs_inside or not self.cudagraph_bytes:
            return None
        return min(round(self.settings.gpu_memory_utilization + self.cudagraph_bytes / self.total_bytes, 4), 1.0)

    def blocks_needed(self, num_tokens: int) -> int:
        """The least blocks that pass the start-up check for ``num_tokens``, with those that it leaves out."""
        if self.request.runs_on_v0:
            return -(-num_tokens // self.block_size) * self.request.pipeline_parallel_size
        needed = (
            -(-self.layout.needed_bytes(num_tokens, place) // block)
            for place, block in enumerate(self.layout.block_bytes)
            if block
        )
        return max(needed, default=0) + self.num_reserved_blocks

    def holds(self, num_blocks: int, num_tokens: int | None = None) -> bool:
        """Whether a pool of so many blocks passes the start-up check for ``num_tokens`` (max_model_len if None).

        V0 compares with its blocks' tokens, divided by the stages of a pipeline (``raise_if_cache_size_invalid``).
        """
        length = self.settings.max_model_len if num_tokens is None else num_tokens
        if self.request.runs_on_v0:
            return length <= self.block_size * (num_blocks // self.request.pipeline_parallel_size)
        return all(
            self.layout.needed_bytes(length, place) <= self.checked_bytes(num_blocks, place)
            for place in range(len(self.stages))
        )

    def checked_bytes(self, num_blocks: int, stage: int) -> int:
        """The memory that the start-up check has for a request on a GPU of that stage, if the pool has so many blocks.

        Before 0.20.1 it is what memory there is, whatever num_gpu_blocks_override says.
        """
        block, there = self.layout.block_bytes[stage], self.stages[stage].available_bytes
        overridden = self.given_by == "num_gpu_blocks_override"
        if overridden and self.source != "measured" and not self.request.rules.checks_override:
            return there
        by_memory = not overridden and num_blocks == min(each.num_blocks for each in self.stages)
        return max(there if by_memory else num_blocks * block, 0) - self.num_reserved_blocks * block

    def runs(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens can come to its end, all alone; not every release asks at its start."""
        if not self.holds(self.num_gpu_blocks, num_tokens):
            return False
        usable = self.num_gpu_blocks - self.num_null_blocks
        return self.request.runs_on_v0 or self.layout.blocks_of_request(num_tokens) <= usable

    def largest_model_len(self) -> int:
        """The longest max_model_len up to the settings' that passes the start-up check; 0 if none does."""
        return self._longest(lambda length: self.holds(self.num_gpu_blocks, length))

    def longest_request(self) -> int:
        """The tokens of the longest request up to max_model_len that starts and comes to its end; 0 if none does."""
        return self._longest(self.runs)

    def _longest(self, fits: Callable[[int], bool]) -> int:
        shortest, longest = 0, self.settings.max_model_len
        while shortest < longest:
            middle = (shortest + longest + 1) // 2
            if fits(middle):
                shortest = middle
            else:
                longest = middle - 1
        return shortest

    def users(self, mean_tokens: int) -> Users:
        """How many requests of ``mean_tokens`` (prompt and what was answered) the memory holds at once.

        Raises ValueError for less than one token.
        """
        if mean_tokens < 1:
            raise ValueError(f"mean_tokens must be at least 1, got {mean_tokens}")
        place = self.stages.index(self.tightest)
        num_blocks = self.layout.blocks_of_request(mean_tokens)
        user_bytes = num_blocks * self.layout.block_bytes[place]
        each = mean_tokens * self.kv_bytes_per_token if not self.layout.is_hybrid else user_bytes
        if self.request.pipeline_parallel_size > 1:
            each = user_bytes
        real = max(self.num_gpu_blocks - self.num_null_blocks, 0) / max(num_blocks, 1)
        ideal = max(self.total_bytes - self.weights_bytes, 0) / max(each, 1)
        return Users(mean_tokens, each, ideal, real, min(int(real), self.settings.max_num_seqs))

    def _logged_tokens(self, num_blocks: int) -> int:
        by_concurrency = self.request.rules.logs_by_concurrency
        return _logged_tokens(self.layout, num_blocks, self.settings.max_model_len, by_concurrency=by_concurrency)


def free_at_start(request: MemoryRequest) -> int:
    """Bytes free on a GPU when vLLM starts: as given, or estimated."""
    if request.free_memory_bytes is not None:
        return request.free_memory_bytes
    return max(request.gpu.memory_bytes - in_use(request).typical, 0)


def free_interval(request: MemoryRequest) -> Interval:
    """The least and the most of it that start-ups on such cards had."""
    if request.free_memory_bytes is not None:
        return Interval(request.free_memory_bytes, request.free_memory_bytes)
    total, used = request.gpu.memory_bytes, in_use(request)
    return Interval(max(total - used.high, 0), max(total - used.low, 0))


def in_use(request: MemoryRequest) -> InUse:
    """What lies on each of the cards before vLLM begins to count, if nothing else runs on it."""
    ranks = request.tensor_parallel_size * request.pipeline_parallel_size
    if request.model.num_moe_layers:  # whose replicas share the experts
        ranks *= request.data_parallel_size
    return in_use_at_start(request.gpu, several=ranks > 1 and release(request.version) >= COMMUNICATORS_FIRST)


def make_plan(request: MemoryRequest, *, checks_budget: bool = True) -> MemoryPlan:
    """The pool as the arithmetic gives it, be it empty or too small.

    Raises ValueError for settings out of range, a split that the model does not allow, an unknown kv_cache_dtype, or
    (``checks_budget``) a token budget or a block size that vLLM refuses; UnsupportedModel for a cache that the release
    cannot lay out.
    """
    settings = settle(request)
    if checks_budget:
        check_block_size(request)
        check_budget(request, settings)
    plan = _plan(request, settings)
    if not request.fits_length:
        return plan
    longest = plan.largest_model_len()
    return replace(plan, settings=replace(plan.settings, max_model_len=longest)) if longest else plan


def _plan(request: MemoryRequest, settings: MemorySettings) -> MemoryPlan:
    kv_element_bytes(request.model, request.kv_cache_dtype)
    layout = _layout(request, settings)
    overheads = _overheads(request, settings)
    weights = [stage_weights(request, rank) for rank in range(request.pipeline_parallel_size)]
    budget = math.ceil(request.gpu.memory_bytes * settings.gpu_memory_utilization)
    others = overheads.activation_bytes + overheads.non_torch_bytes
    others += overheads.cudagraph_bytes * overheads.cudagraph_inside
    available = [budget - held - others + min(request.correction_bytes, others) for held in weights]
    source, given = _given(request, settings, layout)
    if given.available is not None:
        available = [given.available] * len(weights)
    elif given.available_blocks is not None:
        available = [given.available_blocks * block for block in layout.block_bytes]
    stages = tuple(
        StageMemory(held, left, max(left // block, 0) if block else 0)
        for held, left, block in zip(weights, available, layout.block_bytes, strict=True)
    )
    num_blocks = layout.num_blocks(available) if given.num_blocks is None else given.num_blocks
    interval = Interval(num_blocks, num_blocks)
    if source == "formula":
        low, high = _error_bytes(request, overheads)
        limits = [budget - held for held in weights]
        ends = ([min(left - more, most) for left, most in zip(available, limits, strict=True)] for more in (high, low))
        interval = Interval(*(layout.num_blocks(end) for end in ends))
    tightest = min(stages, key=lambda stage: stage.num_blocks)
    return MemoryPlan(
        request, settings, layout, overheads, stages, source, tightest.available_bytes, num_blocks, interval
    )


def _error_bytes(request: MemoryRequest, overheads: Overheads) -> tuple[int, int]:
    """The interval of the parts' error, with that of the correction where it was learnt with other settings."""
    low, high = overheads.error_bytes
    if not request.correction_bytes or not request.correction_differs:
        return low, high
    return round(low * BOTH_ESTIMATES), round(high * BOTH_ESTIMATES)


class _Given(NamedTuple):
    available: int | None = None
    num_blocks: int | None = None
    available_blocks: int | None = None
    """What is available in blocks, where its bytes are not known."""


def _given(request: MemoryRequest, settings: MemorySettings, layout: KvLayout) -> tuple[str, _Given]:
    """What the pool is from, and what of it is known beforehand."""
    if request.measured is not None:
        measured = request.measured
        blocks = _measured_blocks(measured, settings, layout, by_concurrency=request.rules.logs_by_concurrency)
        fitting = blocks if request.num_gpu_blocks_override is None else measured.profiled_num_gpu_blocks
        return "measured", _Given(measured.available_bytes, blocks, fitting)
    if request.overrides_blocks:
        return "num_gpu_blocks_override", _Given(request.kv_cache_memory_bytes, request.num_gpu_blocks_override)
    if request.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes", _Given(request.kv_cache_memory_bytes)
    return "formula", _Given()


def _measured_blocks(
    measured: MeasuredPool, settings: MemorySettings, layout: KvLayout, *, by_concurrency: bool
) -> int | None:
    """The blocks that were logged, or the fewest that are logged as so many tokens; None follows the bytes."""
    tokens = measured.kv_cache_tokens
    if measured.num_gpu_blocks is not None or tokens is None:
        return measured.num_gpu_blocks
    length = measured.max_model_len or settings.max_model_len
    fewest, most = 0, len(layout.groups) * (tokens + 1) + layout.blocks_of_request(length) * (tokens // length + 2)
    while fewest < most:
        middle = (fewest + most) // 2
        if _logged_tokens(layout, middle, length, by_concurrency=by_concurrency) < tokens:
            fewest = middle + 1
        else:
            most = middle
    return fewest


def _logged_tokens(layout: KvLayout, num_blocks: int, max_model_len: int, *, by_concurrency: bool) -> int:
    """What a release logs as "GPU KV cache size"."""
    if not layout.is_hybrid and not by_concurrency:
        return num_blocks * layout.block_size
    return layout.logged_tokens(num_blocks, max_model_len, by_concurrency=by_concurrency)


def stage_weights(request: MemoryRequest, rank: int) -> int:
    """Bytes of the weights and adapters on a GPU of that pipeline stage, without what stays in host memory."""
    held = _weights(
        request.model,
        request.tensor_parallel_size,
        request.pipeline_parallel_size,
        rank,
        request.data_parallel_size,
        request.enable_expert_parallel,
    )
    on_card = max(held - round(request.cpu_offload_gib * GIB), 0) + request.model.rotary_cache_bytes()
    return on_card + (_adapters(request, rank) if request.max_loras else 0)


def _adapters(request: MemoryRequest, rank: int) -> int:
    return lora_bytes(
        request.model,
        max_loras=request.max_loras,
        max_lora_rank=request.max_lora_rank,
        split=Split(request.tensor_parallel_size, request.data_parallel_size, request.enable_expert_parallel),
        pipeline_parallel_size=request.pipeline_parallel_size,
        pipeline_rank=rank,
    )


@lru_cache(maxsize=512)
def _weights(model: ModelSpec, size: int, stages: int, rank: int, replicas: int, expert_parallel: bool) -> int:
    return model.weight_bytes(
        size,
        pipeline_parallel_size=stages,
        pipeline_rank=rank,
        data_parallel_size=replicas,
        expert_parallel=expert_parallel,
    )


def _layout(request: MemoryRequest, settings: MemorySettings) -> KvLayout:
    return _cached_layout(
        request.model,
        request.tensor_parallel_size,
        request.pipeline_parallel_size,
        settings.block_size,
        request.kv_cache_dtype,
        settings.max_num_batched_tokens,
        max_concurrent_batches(request),
        settings.enable_prefix_caching,
        request.num_speculative_tokens,
        request.disable_hybrid_kv_cache_manager,
        layout_rules(request.version, request.model.architecture, v0=request.runs_on_v0),
    )


def max_concurrent_batches(request: MemoryRequest) -> int:
    """Steps whose tokens windows keep: a pipeline's stages, one more with asynchronous scheduling; to 0.25 one."""
    if not request.rules.counts_batches_in_flight:
        return 1
    stages, version = request.pipeline_parallel_size, request.version
    asynchronous = version.async_scheduling and (stages == 1 or version.async_scheduling_with_pipeline)
    return stages + int(asynchronous)


@lru_cache(maxsize=512)
def _cached_layout(
    model: ModelSpec,
    size: int,
    stages: int,
    block_size: int,
    kv_cache_dtype: str,
    budget: int,
    batches: int,
    caching: bool,
    num_speculative_tokens: int,
    disable_hybrid: bool,
    rules: LayoutRules,
) -> KvLayout:
    return kv_layout(
        model,
        tensor_parallel_size=size,
        pipeline_parallel_size=stages,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        max_num_batched_tokens=budget,
        max_concurrent_batches=batches,
        enable_prefix_caching=caching,
        num_speculative_tokens=num_speculative_tokens,
        disable_hybrid_kv_cache_manager=disable_hybrid,
        rules=rules,
    )


def _overheads(request: MemoryRequest, settings: MemorySettings) -> Overheads:
    sizes: dict[str, Any] = {
        "tensor_parallel_size": request.tensor_parallel_size,
        "pipeline_parallel_size": request.pipeline_parallel_size,
        "data_parallel_size": request.data_parallel_size,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": settings.max_model_len,
    }
    found = estimate_overheads(
        request.model,
        request.gpu,
        version=request.version,
        expert_parallel=request.enable_expert_parallel,
        enforce_eager=request.enforce_eager,
        kv_cache_dtype=request.kv_cache_dtype,
        **sizes,
    )
    return _with_v0_states(found, request, settings.max_num_seqs)


def _with_v0_states(found: Overheads, request: MemoryRequest, max_num_seqs: int) -> Overheads:
    """V0 keeps the states of max_num_seqs sequences beside the KV blocks, in the model's type, from the profile run on.

    Source: ``MambaCacheManager`` in ``model_executor/models/mamba_cache.py``, as read in vLLM 0.8.4 and 0.9.2.
    """
    if not request.runs_on_v0 or not has_states(request.model):
        return found
    model, stages = request.model, request.pipeline_parallel_size
    ranges = (layers_of_stage(model.num_layers, rank, stages) for rank in range(stages))
    elements = max(
        sum(
            sum(layer.mixer.state_elements(request.tensor_parallel_size))
            for layer in model.decoder_layers[start:end]
            if isinstance(layer.mixer, State)
        )
        for start, end in ranges
    )
    states = max_num_seqs * elements * model.dtype_bytes
    why = "as --v0 asks for" if request.uses_v0_engine else "as this release does by default for models with states"
    return replace(
        found,
        activation_bytes=found.activation_bytes + states,
        assumptions=(
            *found.assumptions,
            f"The V0 engine runs, {why}: states of {max_num_seqs:,} sequences ({states / GIB:.2f} GiB) lie beside the "
            "KV blocks and are counted with the activations.",
        ),
    )
