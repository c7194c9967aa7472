"""Continuous batching that moves the cache of preempted requests to the CPU instead of throwing it away.

vLLM did that until its V0 engine was removed (``--preemption-mode swap``, ``--swap-space``); these are its rules as far
as its public source and documentation tell them, on top of today's scheduler, so that two runs that differ in nothing
else say whether swapping or recomputing wins.  Deviations from V0, none of them checked against recordings:

- a running request asks for a free block only when its last one is full (V0 wants one free block for each);
- where the CPU pool is full the victim is recomputed (V0 stopped the whole engine);
- prefix caching works as in V1; what comes back from the CPU is copied, though its blocks may still be found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from windtunnel.sim.engine.blocks import BlockPool
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import Preemption, StepPlan
from windtunnel.sim.engine.protocols import EngineLoad
from windtunnel.sim.engine.queues import FcfsQueue, PriorityQueue, WaitingQueue
from windtunnel.sim.engine.request import Request, Status
from windtunnel.sim.engine.scheduler import Scheduler

PREEMPTION_MODES = ("swap", "recompute")


@dataclass(frozen=True, slots=True)
class SwapConfig:
    """What becomes of preempted requests.  Raises ValueError for a negative pool or an unknown mode."""

    num_cpu_blocks: int
    """KV blocks that the CPU has room for: ``swap_space`` divided by the size of a block."""
    preemption_mode: str = "swap"
    prefill_first: bool = False
    """As V0's default loop: whoever can be admitted is, and while anybody is, nobody decodes.  Prompts are then
    computed whole."""

    def __post_init__(self) -> None:
        if self.num_cpu_blocks < 0:
            raise ValueError(f"num_cpu_blocks must be at least 0, got {self.num_cpu_blocks}")
        if self.preemption_mode not in PREEMPTION_MODES:
            raise ValueError(
                f"preemption_mode must be one of {', '.join(PREEMPTION_MODES)}, got {self.preemption_mode!r}"
            )


class SwapPlan(StepPlan):
    """A step before which KV blocks are copied between GPU and CPU."""

    __slots__ = ("num_swapped_in_blocks", "num_swapped_out_blocks", "swapped_in", "swapped_out")

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.num_swapped_in_blocks = 0
        self.num_swapped_out_blocks = 0
        self.swapped_in: list[Request] = []
        self.swapped_out: list[Request] = []


class _Parked(NamedTuple):
    """What the CPU keeps of a request."""

    block_ids: list[int]
    was_decoding: bool


class SwapScheduler(Scheduler):
    """WAITING → RUNNING ⇄ SWAPPED → FINISHED.

    Whoever is swapped out comes back before anybody waiting is admitted, and nobody comes back in a step that
    preempts.

    Invariants, checked in tests, besides the scheduler's own:

    - CPU blocks are held by swapped requests or free, and a swapped request holds no GPU block;
    - nothing of a swapped request is ever computed again;
    - nobody is admitted while anybody is swapped out.

    Raises ValueError for a config with asynchronous scheduling, drafts or pipeline parallelism, and for
    ``prefill_first`` with chunked prefill.
    """

    def __init__(self, config: SchedulerConfig, swap: SwapConfig) -> None:
        _check(config, swap)
        super().__init__(config)
        self.swap = swap
        self.cpu_pool = BlockPool(swap.num_cpu_blocks + 1, caching=False)  # block 0 is the null block
        self.swapped: WaitingQueue = PriorityQueue() if config.policy == "priority" else FcfsQueue()
        self.num_swapped_in_blocks = 0
        """Of all steps so far."""
        self.num_swapped_out_blocks = 0
        self.num_recomputations = 0
        """Preemptions that threw the cache away."""
        self._parked: dict[Request, _Parked] = {}
        self._num_unpriced_blocks = 0  # swapped out by decisions that led to no step

    @property
    def num_requests(self) -> int:
        """Requests that wait, run or are swapped out."""
        return len(self.running) + len(self.waiting) + len(self.swapped)

    def requests(self) -> Iterator[Request]:
        """All requests: the running in the order of admission, the swapped out, the waiting."""
        yield from self.running
        yield from self.swapped
        yield from self.waiting

    def load(self) -> EngineLoad:
        """How full the engine is; the swapped out count as waiting."""
        load = super().load()
        return load._replace(num_waiting=load.num_waiting + len(self.swapped))

    def abort(self, request: Request) -> None:
        """Drop a request in whatever state it is; its blocks are free at once, those on the CPU as well."""
        if request.status != Status.SWAPPED:
            super().abort(request)
            return
        self.swapped.remove(request)
        self._unpark(request)
        request.status = Status.ABORTED

    def schedule(self, now_ns: int) -> SwapPlan:
        """Decide the next step; see ``Scheduler.schedule``."""
        plan, first = SwapPlan(self.decoding.clock), self.swap.prefill_first
        if not (first and self._prefill(plan, now_ns)):
            threshold = self._chunk_limit()
            left = self._grant_running(plan, threshold)
            if not plan.preemptions:
                left = self._bring_back(plan, left, threshold)
                if left > 0 and not first and len(self.waiting) and not len(self.swapped):
                    self._admit_waiting(plan, left, threshold, now_ns)
        self._close(plan)
        self._carry_over(plan)
        return plan

    def _prefill(self, plan: SwapPlan, now_ns: int) -> bool:
        """Admit whoever fits, and let nobody else have anything; whether there was somebody."""
        if len(self.swapped) or not len(self.waiting):
            return False
        others = list(self.running)
        self._admit_waiting(plan, self._budget, 0, now_ns)
        if plan.chunks:
            plan.left_out = others
        return bool(plan.chunks)

    def _preempt(self, plan: StepPlan, victim: Request, num_tokens: int, for_request: Request) -> None:
        """Move a running request's cache to the CPU, if that is wanted and has room."""
        num_blocks = -(-self.num_computed_tokens(victim) // self.config.block_size)
        if self.swap.preemption_mode == "recompute" or num_blocks > self.cpu_pool.num_free:
            self.num_recomputations += 1
            super()._preempt(plan, victim, num_tokens, for_request)
            return
        assert isinstance(plan, SwapPlan)
        num_held = len(victim.block_ids)
        self._parked[victim] = _Parked(self.cpu_pool.take(num_blocks), victim.decoding)
        self._stop_running(victim, self._num_full_blocks(victim, num_tokens))
        victim.num_preemptions += 1
        victim.status = Status.SWAPPED
        self.swapped.put_back(victim)
        self.num_swapped_out_blocks += num_blocks
        plan.num_swapped_out_blocks += num_blocks
        plan.swapped_out.append(victim)
        plan.preemptions.append(Preemption(victim, 0, num_held, self.pool.num_free, for_request))

    def _bring_back(self, plan: SwapPlan, left: int, threshold: int) -> int:
        """Swap in from the head while budget, seats and blocks last; returns what is left of the budget."""
        while left > 0 and len(self.swapped) and len(self.running) < self._max_running:
            request = self.swapped.head()
            num_tokens = min(self._chunk_tokens(request, threshold), left)
            if not self._has_room(request, num_tokens):
                break
            self.swapped.pop_head()
            self._swap_in(plan, request, num_tokens)
            left -= num_tokens
        return left

    def _has_room(self, request: Request, num_tokens: int) -> bool:
        """Whether its blocks and those of its next tokens are free, and one more than it had where others run."""
        num_blocks = -(-(request.base + num_tokens) // self.config.block_size)
        if not self.running:
            return num_blocks <= self.pool.num_free
        return max(num_blocks, len(self._parked[request].block_ids) + 1) <= self.pool.num_free - self._mark

    def _swap_in(self, plan: SwapPlan, request: Request, num_tokens: int) -> None:
        num_blocks, was_decoding = self._unpark(request)
        request.block_ids = self.pool.take(num_blocks)
        request.status = Status.RUNNING
        request.order = self._num_admitted
        self._num_admitted += 1
        self.running[request] = None
        self.num_swapped_in_blocks += num_blocks
        plan.num_swapped_in_blocks += num_blocks
        plan.swapped_in.append(request)
        if was_decoding:
            self._join(request, plan.number)
            self._give_decode(plan, request)
        else:
            self.prefilling[request] = None
            self._give_chunk(plan, request, num_tokens, self.pool.take(self._num_new_blocks(request, num_tokens)))

    def _unpark(self, request: Request) -> tuple[int, bool]:
        """Free its CPU blocks; returns how many they were, and whether it was decoding."""
        block_ids, was_decoding = self._parked.pop(request)
        num_blocks = len(block_ids)
        self.cpu_pool.release(block_ids, 0, 0)
        return num_blocks, was_decoding

    def _carry_over(self, plan: SwapPlan) -> None:
        """A decision that computes nothing is never run, so its copies count for the next step that is."""
        if plan.is_empty:
            self._num_unpriced_blocks += plan.num_swapped_out_blocks
        else:
            plan.num_swapped_out_blocks += self._num_unpriced_blocks
            self._num_unpriced_blocks = 0


def _check(config: SchedulerConfig, swap: SwapConfig) -> None:
    for name, plain in (("async_scheduling", False), ("num_speculative_tokens", 0), ("pipeline_parallel_size", 1)):
        if getattr(config, name) != plain:
            raise ValueError(f"{name} is {getattr(config, name)}, which swapping does not support: leave it at {plain}")
    if swap.prefill_first and config.enable_chunked_prefill:
        raise ValueError("prefill_first computes prompts whole: set enable_chunked_prefill to false")
