"""The same scheduler, one request at a time: for speculative decoding and pipeline parallelism.

With drafts a request gains a varying number of tokens a step; with several steps under way it gains none in most of
them.  Neither fits a clock that all share, so here every running request is looked at in every step.
"""

from __future__ import annotations

from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import Chunk, Preemption, Speculated, StepPlan, StepShape
from windtunnel.sim.engine.request import Request, Status
from windtunnel.sim.engine.scheduler import Scheduler, extend_spans

NOTHING_SPECULATED = Speculated({}, {})


class Progress:
    """What a request is in the middle of, in tokens."""

    __slots__ = (
        "eligible_decision",
        "is_chunk",
        "num_drafts",
        "num_full_blocks",
        "num_in_flight",
        "num_placeholders",
        "num_stale",
    )

    def __init__(self) -> None:
        self.num_drafts = 0
        """Draft tokens to verify next."""
        self.num_placeholders = 0
        """Async: output tokens that are scheduled and not known yet."""
        self.num_in_flight = 0
        """Scheduled tokens whose outcome has not come back."""
        self.num_stale = 0
        """Those of them that were scheduled before a preemption."""
        self.num_full_blocks = 0
        """Leading blocks that count as cached."""
        self.is_chunk = False
        """Whether its latest grant left some of its known tokens uncomputed."""
        self.eligible_decision = 0
        """Number of the first decision that may serve it again."""


class SpeculativePlan(StepPlan):
    """A step in which every request is listed as a chunk, some with draft tokens to verify."""

    __slots__ = ("num_drafts", "num_kept", "padded")

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.num_drafts: dict[Request, int] = {}
        """Draft tokens that the step verifies."""
        self.padded: list[Request] = []
        """Admissions whose drafts only fill the batch; none of them can be accepted."""
        self.num_kept: dict[Request, int] = {}
        """Output tokens that each request got from the step, once it is committed."""


class PerRequestScheduler(Scheduler):
    """Continuous batching with speculative decoding and pipeline parallelism, by vLLM 0.32's rules."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._progress: dict[Request, Progress] = {}
        self._num_decisions = 0
        self._num_steps = 0

    def add(self, request: Request) -> None:
        """Queue a request; raises ValueError as ``Scheduler.add``."""
        super().add(request)
        self._progress[request] = Progress()

    def abort(self, request: Request) -> None:
        """Drop a request in whatever state it is; its blocks are free at once."""
        super().abort(request)
        self._progress.pop(request, None)

    def schedule(self, now_ns: int) -> SpeculativePlan:
        """Decide the next step; see ``Scheduler.schedule``."""
        self._num_decisions += 1
        plan = SpeculativePlan(self._num_steps)
        limits = self.config
        most = limits.max_num_scheduled_tokens or limits.max_num_batched_tokens
        budget = _Budget(most, limits.max_num_batched_tokens, limits.num_drafter_slots)
        threshold = self._chunk_limit()
        self._serve_running(plan, budget, threshold)
        if not plan.preemptions:
            self._serve_waiting(plan, budget, threshold, now_ns)
        self._write_shape(plan)
        return plan

    def commit(self, plan: StepPlan, end_ns: int, speculated: Speculated | None = None) -> list[Request]:
        """Take the end of the oldest step under way; see ``Scheduler.commit``."""
        assert isinstance(plan, SpeculativePlan)
        self.num_steps_done += not plan.is_empty
        num_accepted, num_proposed = speculated or NOTHING_SPECULATED
        finished = []
        for chunk in plan.chunks:
            request = chunk.request
            if request.status > Status.PREEMPTED:
                continue
            if self._take_outcome(plan, chunk, num_accepted.get(request, 0), end_ns):
                finished.append(request)
        for request in finished:
            if request.status == Status.RUNNING:
                self._stop_running(request, self._progress[request].num_full_blocks)
            else:
                self.waiting.remove(request)
            request.status = Status.FINISHED
            del self._progress[request]
        for request, num_drafts in num_proposed.items():
            if (progress := self._progress.get(request)) is not None:
                progress.num_drafts = 0 if progress.is_chunk else num_drafts
        return finished

    def end_after(self, request: Request, num_output_tokens: int) -> None:
        """The answer turned out to be complete with that token; the commit that books it finishes the request."""
        request.stop_after = num_output_tokens

    def may_finish(self, plan: StepPlan) -> bool:
        """Whether the plan's step may finish a request."""
        return not plan.is_empty

    def scheduled_tokens(self, plan: StepPlan) -> dict[Request, int]:
        """Tokens per request in the order of the decision."""
        return {chunk.request: chunk.num_tokens for chunk in plan.chunks}

    # -- the running

    def _serve_running(self, plan: SpeculativePlan, budget: _Budget, threshold: int) -> None:
        order, index = list(self.running), 0
        while index < len(order) and budget.tokens > 0 and budget.has_room:
            request = order[index]
            num_tokens = self._wanted(request, threshold, budget)
            if num_tokens <= 0:
                index += 1
                continue
            while (num_new := self._num_new_blocks(request, num_tokens)) > self.pool.num_free:
                position = self._victim_position(order)
                victim = order.pop(position)
                index -= position < index
                self._evict(plan, victim, budget, for_request=request)
                if victim is request:
                    break
            if request.status != Status.RUNNING:
                break
            self._grant(plan, request, num_tokens, num_new, budget)
            self._cut_drafts(plan, request, num_tokens)
            index += 1

    def _wanted(self, request: Request, threshold: int, budget: _Budget) -> int:
        progress = self._progress[request]
        held, computed = progress.num_placeholders, request.base
        if held > 0 and computed + 2 - held >= request.num_prompt_tokens + request.max_tokens:
            return 0  # the output under way reaches max_tokens for sure
        if self._num_decisions < progress.eligible_decision:
            return 0
        wanted = self._num_known(request) + progress.num_drafts + held - computed
        if 0 < threshold < wanted:
            wanted = threshold
        return min(wanted, budget.largest, self.config.max_model_len - computed - 1)

    def _grant(self, plan: SpeculativePlan, request: Request, num_tokens: int, num_new: int, budget: _Budget) -> None:
        computed, known = request.base, self._num_known(request)
        if num_new:
            request.block_ids += self.pool.take(num_new)
        self._count_full(request, min(computed + num_tokens, known))
        samples = computed + num_tokens >= known + self._progress[request].num_placeholders
        plan.chunks.append(Chunk(request, num_tokens, computed, num_new, samples))
        budget.spend(num_tokens)

    def _cut_drafts(self, plan: SpeculativePlan, request: Request, num_tokens: int) -> None:
        """Drafts that fit into the grant are verified; the others are dropped."""
        progress = self._progress[request]
        if progress.num_drafts:
            spare = num_tokens + request.base - self._num_known(request) - progress.num_placeholders
            if spare > 0:
                plan.num_drafts[request] = min(spare, progress.num_drafts)
            progress.num_drafts = 0

    def _evict(self, plan: SpeculativePlan, victim: Request, budget: _Budget, for_request: Request) -> None:
        for chunk in plan.chunks:
            if chunk.request is victim:
                budget.spend(-chunk.num_tokens)
                plan.chunks.remove(chunk)
                break
        plan.num_drafts.pop(victim, None)
        progress = self._progress[victim]
        computed, num_blocks = victim.base, len(victim.block_ids)
        self._register(victim, progress.num_full_blocks)
        self._stop_running(victim, progress.num_full_blocks)
        progress.num_full_blocks = progress.num_drafts = progress.num_placeholders = 0
        progress.num_stale = progress.num_in_flight
        victim.high_water_tokens = max(victim.high_water_tokens, computed)
        victim.base = 0
        victim.num_preemptions += 1
        victim.status = Status.PREEMPTED
        self.waiting.put_back(victim)
        plan.preemptions.append(Preemption(victim, computed, num_blocks, self.pool.num_free, for_request))

    # -- the waiting

    def _serve_waiting(self, plan: SpeculativePlan, budget: _Budget, threshold: int, now_ns: int) -> None:
        skipped: list[Request] = []
        waiting, chunk_in_batch = self.waiting, any(self._progress[c.request].is_chunk for c in plan.chunks)
        anybody_ran = bool(plan.chunks)
        while budget.tokens > 0 and budget.has_room and len(waiting) and len(self.running) < self._max_running:
            request = waiting.head()
            if self._progress[request].num_stale:
                skipped.append(waiting.pop_head())
                continue
            hits = self._lookup(request)
            cached = len(hits) * self.config.block_size
            num_tokens = self._num_known(request) - cached
            is_padded = num_tokens == 1 and not chunk_in_batch and self._pads(cached, anybody_ran)
            if is_padded:
                num_tokens += self.config.num_speculative_tokens
                if num_tokens > budget.largest:
                    break
            if 0 < threshold < num_tokens:
                num_tokens = threshold
            if num_tokens > budget.largest:
                if not self.config.enable_chunked_prefill:
                    break
                num_tokens = budget.largest
            num_new = self._num_admission_blocks(request, hits, cached + num_tokens)
            if num_new is None:
                break
            waiting.pop_head()
            self._admit(plan, request, hits, now_ns)
            self._progress[request].num_full_blocks = len(hits)
            self._grant(plan, request, num_tokens, num_new, budget)
            if is_padded:
                plan.num_drafts[request] = self.config.num_speculative_tokens
                plan.padded.append(request)
        for request in reversed(skipped):
            waiting.put_back(request)

    def _pads(self, cached: int, anybody_ran: bool) -> bool:
        """Whether a request that needs one token only is given drafts to fill a uniform decode batch."""
        k = self.config.num_speculative_tokens
        return bool(k) and (anybody_ran or cached > 0) and cached + 2 + k <= self.config.max_model_len

    # -- what follows

    def _write_shape(self, plan: SpeculativePlan) -> None:
        decodes = context = chunks = tokens = cached = pairs = sampled = 0
        for request, num_tokens, computed, _, samples in plan.chunks:
            progress = self._progress[request]
            if num_tokens == 1 and request not in self.prefilling:
                decodes += 1
                context += computed + 1
            else:
                chunks += 1
                tokens += num_tokens
                cached += computed
                pairs += num_tokens * computed + num_tokens * (num_tokens + 1) // 2
            sampled += samples + plan.num_drafts.get(request, 0)
            if computed < request.high_water_tokens:
                again = min(request.high_water_tokens, computed + num_tokens) - computed
                request.num_recomputed_tokens += again
                plan.num_recomputed_tokens += again
            request.base += num_tokens
            progress.num_in_flight += num_tokens
            progress.is_chunk = not samples
            if samples:
                self._expect_token(plan, request)
        plan.shape = StepShape(decodes, context, chunks, tokens, cached, pairs, sampled)
        self._num_steps += bool(plan.chunks)

    def _expect_token(self, plan: SpeculativePlan, request: Request) -> None:
        progress = self._progress[request]
        if request in self.prefilling:
            del self.prefilling[request]
            request.num_start_tokens = self._num_known(request)
        if self._is_async:
            progress.num_placeholders += 1 + plan.num_drafts.get(request, 0)
            progress.num_drafts = self.config.num_speculative_tokens
            progress.eligible_decision = self._num_decisions + self.config.num_decode_gap

    def _take_outcome(self, plan: SpeculativePlan, chunk: Chunk, num_accepted: int, end_ns: int) -> bool:
        """Book the outcome of one grant; whether the request is finished."""
        request, progress = chunk.request, self._progress[chunk.request]
        progress.num_in_flight -= chunk.num_tokens
        is_stale = progress.num_stale > 0
        if is_stale:
            progress.num_stale -= chunk.num_tokens
        if not chunk.samples:
            return False
        num_drafts = plan.num_drafts.get(request, 0)
        if num_drafts and not is_stale:
            num_rejected = num_drafts - num_accepted
            if request.base > 0:
                request.base -= num_rejected
            if progress.num_placeholders > 0:
                progress.num_placeholders -= num_rejected
        num_kept = min(1 + num_accepted, request.stop_after - request.num_emitted)
        request.num_emitted += num_kept
        plan.num_kept[request] = num_kept
        if request.first_token_ns < 0:
            request.first_token_ns = end_ns
        extend_spans(request.spans, plan.number)
        if self._is_async:
            if not is_stale:
                progress.num_placeholders -= num_kept
            if request.status == Status.RUNNING:
                self._count_full(request, request.base - progress.num_placeholders)
        return request.num_emitted >= request.stop_after

    def _lookup(self, request: Request) -> list[int]:
        hits = super()._lookup(request)
        return hits[:-1] if self.config.drops_last_hit else hits

    def _num_full_blocks(self, request: Request, num_scheduled: int = 0) -> int:  # noqa: ARG002
        return self._progress[request].num_full_blocks

    def _num_known(self, request: Request) -> int:
        return request.num_prompt_tokens + request.num_emitted

    def _count_full(self, request: Request, num_tokens: int) -> None:
        """The request's blocks that are full of its first ``num_tokens`` tokens count as cached from now on."""
        if request.keys is None or not self.pool.caching:
            return
        progress = self._progress[request]
        progress.num_full_blocks = max(progress.num_full_blocks, num_tokens // self.config.block_size)
        self._publish(request, progress.num_full_blocks * self.config.block_size)


class _Budget:
    """What is left of a step: tokens to schedule, and input slots, of which the drafter needs some a request."""

    __slots__ = ("_extra", "_room", "tokens")

    def __init__(self, tokens: int, room: int, extra: int) -> None:
        self.tokens = tokens
        self._room = room
        self._extra = extra

    @property
    def has_room(self) -> bool:
        return self._room > self._extra

    @property
    def largest(self) -> int:
        """Most tokens that one more request can get."""
        return min(self.tokens, self._room - self._extra)

    def spend(self, num_tokens: int) -> None:
        """Take a grant off; a negative number gives one back."""
        self.tokens -= num_tokens
        self._room -= num_tokens + (self._extra if num_tokens > 0 else -self._extra)


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    """The scheduler that the config needs: the fast one, unless requests cannot share a clock."""
    if config.num_speculative_tokens or config.pipeline_parallel_size > 1:
        return PerRequestScheduler(config)
    return Scheduler(config)
