"""Batches that run to completion: in together, padded, every slot computed until the longest answer is done.

This is what inference with a plain ``generate`` loop does, and what both static and dynamic batching have in common;
they differ only in when a batch goes (``batch_queue``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from windtunnel.sim.engine.batch_queue import BatchQueue
from windtunnel.sim.engine.blocks import BlockPool
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import Admission, Chunk, Speculated, StepPlan, StepShape
from windtunnel.sim.engine.protocols import EngineLoad
from windtunnel.sim.engine.request import Request, Status
from windtunnel.sim.engine.scheduler import extend_spans

KV_RESERVES = ("padded", "max_model_len")
ANSWERS = ("together", "streamed")


@dataclass(frozen=True, slots=True)
class BatchExecution:
    """How a batch is computed once it has been formed.

    Prompts are padded to the longest of the batch.  Raises ValueError for an unknown choice or a budget below 1.
    """

    kv_reserve: str = "padded"
    """KV that each slot holds for as long as the batch runs: ``padded`` for the padded prompt and the largest
    ``max_tokens`` of the batch (true lengths are not known), or ``max_model_len`` tokens."""
    answers: str = "together"
    """``together``: all answers are given when the batch ends; ``streamed``: tokens come as they are made, and an
    answer ends with its last one, but its slot is held all the same."""
    max_prefill_tokens: int | None = None
    """Most prompt tokens of a step, padding included; None computes the prompts of the batch in one step."""

    def __post_init__(self) -> None:
        for name, allowed in (("kv_reserve", KV_RESERVES), ("answers", ANSWERS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.max_prefill_tokens is not None and self.max_prefill_tokens < 1:
            raise ValueError(f"max_prefill_tokens must be at least 1, got {self.max_prefill_tokens}")


class Batch:
    """Requests that are computed side by side, one slot each, until the last of them is done."""

    __slots__ = ("due", "num_left", "num_open", "num_padded_tokens", "num_prefilled", "num_tokens", "requests", "spans")

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        """One for each slot, whatever has become of it."""
        self.num_padded_tokens = max(request.num_prompt_tokens for request in requests)
        """Length of every slot's prompt, padded on the left."""
        self.num_prefilled = 0
        """How much of that is computed."""
        self.num_tokens = 0
        """Tokens that every slot has yielded; behind the end of its answer they are of no use."""
        self.due: dict[int, list[Request]] = {}
        """Who ends with which token."""
        for request in requests:
            self.due.setdefault(request.stop_after, []).append(request)
        self.num_left = len(requests)
        """Requests that are not aborted and lack tokens."""
        self.num_open = len(requests)
        """Requests that are neither answered nor aborted."""
        self.spans: list[tuple[int, int]] = []
        """(first step, count): the steps that yielded tokens."""


class BatchPlan(StepPlan):
    """A step of one batch.  Chunks list what the prompts really hold; padding is in the shape alone."""

    __slots__ = ("batch", "rejections")

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.batch: Batch | None = None
        self.rejections: Sequence[Request] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all is computed."""
        return self.batch is None


class BatchScheduler:
    """Runs batches to completion on one or more instances of the model, which take turns step by step.

    Of the config only ``max_model_len``, ``block_size`` and ``num_gpu_blocks`` count.  Instances stand on one GPU and
    share its KV blocks; a batch holds its blocks until it ends.

    Invariants, checked in tests:

    - nobody joins or leaves a batch while it runs, and none is larger than allowed;
    - blocks are held or free, and free as soon as their batch has ended;
    - all slots of a batch are computed in each of its steps;
    - a request's output length is read only to finish it.

    Raises ValueError for a config that asks for what such engines do not have, or that leaves no room for one slot.
    """

    def __init__(
        self, config: SchedulerConfig, queue: BatchQueue, execution: BatchExecution, num_instances: int = 1
    ) -> None:
        _check(config, queue.max_batch_size, execution)
        self.config = _effective(config, queue.max_batch_size, execution, num_instances)
        self.pool = BlockPool(config.num_gpu_blocks, caching=False)
        self.waiting = queue
        self.running: dict[Request, Batch] = {}
        self.num_steps_done = 0
        self._num_steps = 0
        self._execution = execution
        self._streams = execution.answers == "streamed"
        self._num_instances = num_instances
        self._batches: deque[Batch] = deque()  # of the busy instances, the next to be served first
        self._under_way: Batch | None = None

    max_steps_under_way = 1

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return len(self.running) + len(self.waiting)

    def requests(self) -> Iterator[Request]:
        """All requests: the running in the order of admission, then the waiting in theirs."""
        yield from self.running
        yield from self.waiting

    def load(self) -> EngineLoad:
        """How full the engine is; a slot whose request is answered does not count as running."""
        return EngineLoad(len(self.running), len(self.waiting), self.pool.num_free, 0)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises ValueError for a prompt that leaves no room for an answer, a request that the whole pool cannot hold,
        and one that finds the queue full.
        """
        request.limit(self.config.max_model_len)
        num_blocks = self._num_row_blocks(request.num_prompt_tokens, request.may_emit)
        if num_blocks > self.config.num_usable_blocks:
            raise ValueError(
                f"request {request.request_id}: {num_blocks:,} KV blocks would have to be reserved for its prompt and "
                f"max_tokens, the pool has {self.config.num_usable_blocks:,}: lower max_tokens or make the pool larger"
            )
        self.waiting.add(request)

    def end_of_input(self) -> None:
        """No more requests will be added, so that a batch that waits to be full goes as it is."""
        self.waiting.end_of_input()

    def abort(self, request: Request) -> None:
        """Drop a request in whatever state it is; one that runs leaves its slot and its blocks to the batch."""
        if request.status == Status.RUNNING:
            batch = self.running.pop(request)
            batch.num_open -= 1
            batch.num_left -= request.stop_after > batch.num_tokens
            if not batch.num_open and batch is not self._under_way:
                self._close(batch)
        elif request.status == Status.WAITING:
            self.waiting.remove(request)
        else:
            return
        request.status = Status.ABORTED

    def schedule(self, now_ns: int) -> BatchPlan:
        """Form batches for idle instances, and decide the next step of the instance whose turn it is."""
        plan = BatchPlan(self._num_steps)
        plan.rejections = self.waiting.expire(now_ns)
        for request in plan.rejections:
            request.status = Status.REJECTED
        while len(self._batches) < self._num_instances:
            requests = self.waiting.take(now_ns, self._num_fitting)
            if not requests:
                break
            self._dispatch(plan, requests, now_ns)
        if self._batches:
            self._compute(plan, self._batches[0])
            self._batches.rotate(-1)
        return plan

    def next_decision_ns(self, now_ns: int) -> int | None:
        """When a wait for company, or a request's patience, is over."""
        return self.waiting.next_decision_ns(now_ns)

    def commit(self, plan: StepPlan, end_ns: int, speculated: Speculated | None = None) -> list[Request]:  # noqa: ARG002
        """Take the end of the step; returns the requests whose answer is complete and given, in the order of slots."""
        assert isinstance(plan, BatchPlan)
        batch, self._under_way = plan.batch, None
        if batch is None:
            return []
        self.num_steps_done += 1
        answered = self._take_tokens(batch, plan.number, end_ns) if plan.shape.num_sampled else []
        for request in answered:
            request.num_emitted = request.stop_after
            request.status = Status.FINISHED
            del self.running[request]
        batch.num_open -= len(answered)
        if not batch.num_open:
            self._close(batch)
        return answered

    def may_finish(self, plan: StepPlan) -> bool:
        """Whether the plan's step may complete an answer."""
        assert isinstance(plan, BatchPlan)
        return plan.batch is not None and plan.shape.num_sampled > 0 and plan.batch.num_tokens + 1 in plan.batch.due

    def num_emitted_tokens(self, request: Request) -> int:
        """Output tokens that the request has got; answers that are given together count once they are given."""
        batch = self.running.get(request) if self._streams else None
        return batch.num_tokens if batch is not None else request.num_emitted

    def token_spans(self, request: Request) -> list[tuple[int, int]]:
        """(first step, count) runs of steps at whose end the request got tokens; all at once is one step."""
        batch = self.running.get(request) if self._streams else None
        return list(batch.spans) if batch is not None else request.spans

    # -- forming a batch

    def _num_fitting(self, requests: Sequence[Request]) -> int:
        """How many of these, from the first on, the free blocks can hold as one batch."""
        prompt = output = 0
        is_bounded = self._execution.kv_reserve == "max_model_len"
        for num, request in enumerate(requests):
            prompt, output = max(prompt, request.num_prompt_tokens), max(output, request.may_emit)
            if is_bounded and prompt + output > self.config.max_model_len:
                return num
            if (num + 1) * self._num_row_blocks(prompt, output) > self.pool.num_free:
                return num
        return len(requests)

    def _num_row_blocks(self, num_prompt_tokens: int, num_output_tokens: int) -> int:
        """Blocks that one slot reserves; the last token is never written to the cache."""
        num_tokens = num_prompt_tokens + num_output_tokens - 1
        if self._execution.kv_reserve == "max_model_len":
            num_tokens = self.config.max_model_len
        return -(-num_tokens // self.config.block_size)

    def _dispatch(self, plan: BatchPlan, requests: list[Request], now_ns: int) -> None:
        batch = Batch(requests)
        num_blocks = self._num_row_blocks(batch.num_padded_tokens, max(request.may_emit for request in requests))
        for request in requests:
            request.status = Status.RUNNING
            request.scheduled_ns = now_ns
            request.block_ids = self.pool.take(num_blocks)
            self.running[request] = batch
            plan.admissions.append(Admission(request, 0, resumed=False))
        self._batches.append(batch)

    def _close(self, batch: Batch) -> None:
        self._batches.remove(batch)
        for request in batch.requests:
            self.pool.release(request.block_ids, 0, 0)
            request.block_ids = []

    # -- a step of it

    def _compute(self, plan: BatchPlan, batch: Batch) -> None:
        plan.batch = self._under_way = batch
        self._num_steps += 1
        num = len(batch.requests)
        if batch.num_prefilled < batch.num_padded_tokens:
            self._prefill(plan, batch)
        else:
            context = batch.num_padded_tokens + batch.num_tokens
            plan.shape = StepShape(num, num * context, 0, 0, 0, 0, num)

    def _prefill(self, plan: BatchPlan, batch: Batch) -> None:
        """Compute the next columns of the padded prompts, as many as the budget allows."""
        num, start = len(batch.requests), batch.num_prefilled
        width = batch.num_padded_tokens - start
        if self._execution.max_prefill_tokens is not None:
            width = min(width, self._execution.max_prefill_tokens // num)
        end = batch.num_prefilled = start + width
        is_last = end == batch.num_padded_tokens
        for request in batch.requests:
            padding = batch.num_padded_tokens - request.num_prompt_tokens
            computed = max(0, start - padding)
            num_tokens = max(0, end - padding) - computed
            if num_tokens and request.status == Status.RUNNING:
                num_new_blocks = 0 if computed else len(request.block_ids)
                plan.chunks.append(Chunk(request, num_tokens, computed, num_new_blocks, samples=is_last))
        pairs = width * start + width * (width + 1) // 2
        plan.shape = StepShape(0, 0, num, num * width, num * start, num * pairs, num if is_last else 0)

    def _take_tokens(self, batch: Batch, step: int, end_ns: int) -> list[Request]:
        """Every slot has one token more; returns those whose answers are complete and given with it."""
        batch.num_tokens += 1
        ended = [request for request in batch.due.pop(batch.num_tokens, ()) if request.status == Status.RUNNING]
        batch.num_left -= len(ended)
        if self._streams:
            extend_spans(batch.spans, step)
            if batch.num_tokens == 1:
                _note_first_token(batch, end_ns)
            for request in ended:
                request.spans = list(batch.spans)
            return ended
        if batch.num_left:
            return []
        _note_first_token(batch, end_ns)
        answered = [request for request in batch.requests if request.status == Status.RUNNING]
        for request in answered:
            request.spans = [(step, 1)]
        return answered


def _note_first_token(batch: Batch, end_ns: int) -> None:
    for request in batch.requests:
        if request.status == Status.RUNNING:
            request.first_token_ns = end_ns


def _check(config: SchedulerConfig, max_batch_size: int, execution: BatchExecution) -> None:
    for name, plain in (("async_scheduling", False), ("num_speculative_tokens", 0), ("pipeline_parallel_size", 1)):
        if getattr(config, name) != plain:
            raise ValueError(
                f"{name} is {getattr(config, name)}, but batches that run to completion know nothing of it: "
                f"leave it at {plain}"
            )
    budget = execution.max_prefill_tokens
    if budget is not None and budget < max_batch_size:
        raise ValueError(
            f"max_prefill_tokens ({budget}) must be at least the batch size ({max_batch_size}), one token a slot: "
            "raise it or make the batch smaller"
        )
    if execution.kv_reserve == "max_model_len" and config.max_model_len > config.num_kv_tokens:
        raise ValueError(
            f"one slot reserves max_model_len ({config.max_model_len:,} tokens) and the KV pool holds "
            f"{config.num_kv_tokens:,}: lower max_model_len, make the pool larger or reserve the padded length"
        )


def _effective(
    config: SchedulerConfig, max_batch_size: int, execution: BatchExecution, num_instances: int
) -> SchedulerConfig:
    """The config in whose terms such an engine can be described: its slots are its seats."""
    num_slots = max_batch_size * num_instances
    budget = execution.max_prefill_tokens or max_batch_size * config.max_model_len
    return SchedulerConfig(
        max_num_seqs=num_slots,
        max_num_batched_tokens=max(budget, num_slots),
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_gpu_blocks=config.num_gpu_blocks,
        enable_prefix_caching=False,
    )
