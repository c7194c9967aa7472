"""Continuous batching as vLLM 0.32's V1 scheduler does it: the same decisions, down to the block ids.

A step is decided in four parts, in this order: what the budget allows, what the running requests get, which blocks
they need (and who loses his if they are not there), and who of the waiting is let in with what is left.  The rules
were checked step by step against decisions recorded from the real scheduler (``tests/golden``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from windtunnel.sim.engine.blocks import BlockPool
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.decode_set import DecodeSet
from windtunnel.sim.engine.plan import Admission, Chunk, Preemption, Speculated, StepPlan, StepShape
from windtunnel.sim.engine.protocols import EngineLoad
from windtunnel.sim.engine.queues import FcfsQueue, PriorityQueue, WaitingQueue
from windtunnel.sim.engine.request import Request, Status

_new = tuple.__new__
"""Makes a named tuple of a tuple in half the time that its class takes; several are made in every step."""


class Scheduler:
    """Decides the steps of one engine and keeps its KV blocks.

    The caller's loop is ``plan = schedule(now_ns)``, run the plan, ``commit(plan, end_ns)``; ``add`` and ``abort``
    may come at any time.  Time is whole nanoseconds and comes from the caller.

    Invariants, checked in tests:

    - blocks are held or free, and held as often as they are listed;
    - no step exceeds the token budget, and no more than ``max_num_seqs`` requests run;
    - a running request that is left out of a step has nothing computed by it;
    - a request's output length is read only to finish it.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(
            config.num_gpu_blocks, config.enable_prefix_caching, unhashed_first=config.free_blocks_to_front
        )
        self.waiting: WaitingQueue = PriorityQueue() if config.policy == "priority" else FcfsQueue()
        self.running: dict[Request, None] = {}  # in the order of admission
        self.decoding = DecodeSet(config.block_size)
        self.prefilling: dict[Request, None] = {}  # those of the running that still compute chunks, in that order
        self.num_steps_done = 0
        self._under_way: deque[StepPlan] = deque()  # decided and not committed, oldest first
        self._is_async = config.async_scheduling
        self._lookahead = config.num_lookahead_tokens
        self._num_admitted = 0
        self._budget = config.max_num_batched_tokens
        if config.max_num_scheduled_tokens is not None:
            self._budget = min(self._budget, config.max_num_scheduled_tokens)
        self._max_running = config.max_num_active_seqs or config.max_num_seqs
        self._mark = int(config.watermark * config.num_gpu_blocks)
        self._by_priority = config.policy == "priority"

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises ValueError for a prompt that vLLM's API refuses because it leaves no room for an answer.
        """
        request.limit(self.config.max_model_len)
        self.waiting.add(request)

    def abort(self, request: Request) -> None:
        """Drop a request in whatever state it is; its blocks are free at once."""
        if request.status == Status.RUNNING:
            self._stop_running(request, self._num_full_blocks(request))
        elif request.status in (Status.WAITING, Status.PREEMPTED):
            self.waiting.remove(request)
        else:
            return
        request.status = Status.ABORTED

    def end_after(self, request: Request, num_output_tokens: int) -> None:
        """The answer turned out to be complete with that token; the commit that books it finishes the request.

        For whoever sees the tokens: to be called between the step that yields the token and its commit.
        """
        request.stop_after = num_output_tokens
        if request.decoding:
            num_before = request.num_emitted + request.num_owed_tokens
            self.decoding.finish_at(request, request.span_start + num_output_tokens - num_before)

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return len(self.running) + len(self.waiting)

    @property
    def max_steps_under_way(self) -> int:
        """Steps that may be decided and not committed at once."""
        return self.config.max_steps_under_way

    def requests(self) -> Iterator[Request]:
        """All requests: the running in the order of admission, then the waiting in theirs."""
        yield from self.running
        yield from self.waiting

    def load(self) -> EngineLoad:
        """How full the engine is."""
        return _new(EngineLoad, (len(self.running), len(self.waiting), *self.pool.counts()))

    def end_of_input(self) -> None:
        """Nobody waits for company here."""

    def next_decision_ns(self, now_ns: int) -> None:  # noqa: ARG002
        """Time alone changes nothing."""
        return

    def schedule(self, now_ns: int) -> StepPlan:
        """Decide the next step and hold its blocks.  An empty plan means that nothing can be computed now.

        An empty plan that preempted nobody is final until something is added or aborted: what waits can never be
        admitted.  After one that did preempt, ask again.
        """
        plan = StepPlan(self.decoding.clock)
        threshold = self._chunk_limit()
        left = self._grant_running(plan, threshold)
        if left > 0 and not plan.preemptions:
            self._admit_waiting(plan, left, threshold, now_ns)
        self._close(plan)
        return plan

    def commit(self, plan: StepPlan, end_ns: int, speculated: Speculated | None = None) -> list[Request]:  # noqa: ARG002
        """Take the end of the oldest step under way; return the requests that it finished, in the order of decision.

        ``speculated`` is for schedulers that know of drafts.
        """
        if not plan.chunks and not plan.shape.num_decode_seqs:
            return []
        self._under_way.popleft()
        self.num_steps_done += 1
        for request, _, _, _, samples in plan.chunks:
            if samples and request.first_token_ns < 0 and request.status != Status.ABORTED:
                request.first_token_ns = end_ns
        decoding = self.decoding
        finished = decoding.due(self.num_steps_done)
        if self._is_async and (plan.owed or decoding.eager):
            self._settle_late(plan, finished)
        if not finished:
            return finished
        if len(finished) > 1:
            finished.sort(key=_by_order)
        for request in finished:
            if request.status == Status.RUNNING:
                self._stop_running(request, self._num_full_blocks(request))
            else:
                self.waiting.remove(request)
            request.status = Status.FINISHED
        return finished

    def _settle_late(self, plan: StepPlan, finished: list[Request]) -> None:
        """Tokens that came for requests outside the decode set, and blocks that are known to be full only now."""
        for request in plan.owed:
            if request.status > Status.PREEMPTED:
                continue
            request.num_owed_tokens -= 1
            request.num_emitted += 1
            extend_spans(request.spans, plan.number)
            if request.num_emitted >= request.stop_after:
                finished.append(request)
        if not self.pool.caching:
            return
        full = [request for request in (*plan.owed, *finished) if self._is_eager(request)]
        if self.decoding.eager:
            full += self.decoding.filling(plan.number)
        for request in sorted(dict.fromkeys(full), key=_by_order):
            if request.status == Status.RUNNING:
                self._publish(request, self.num_tokens(request) - 1)

    def may_finish(self, plan: StepPlan) -> bool:
        """Whether the plan's step may finish a request (a step with chunks always may)."""
        return bool(plan.chunks or plan.owed or self.decoding.has_due(self.num_steps_done + 1))

    def num_computed_tokens(self, request: Request) -> int:
        """Tokens of the request whose KV is in its blocks or is being computed."""
        return request.base + self.decoding.clock if request.decoding else request.base

    def num_emitted_tokens(self, request: Request) -> int:
        """Output tokens that the request has got."""
        if not request.decoding:
            return request.num_emitted
        return request.num_emitted + max(0, self.num_steps_done - request.span_start)

    def token_spans(self, request: Request) -> list[tuple[int, int]]:
        """(first step, count) runs of steps at whose end the request got a token, up to the last finished step."""
        count = self.num_steps_done - request.span_start if request.decoding else 0
        return [*request.spans, (request.span_start, count)] if count > 0 else request.spans

    def num_tokens(self, request: Request) -> int:
        """Known tokens of the request: prompt and output."""
        return request.num_prompt_tokens + self.num_emitted_tokens(request)

    def scheduled_tokens(self, plan: StepPlan) -> dict[Request, int]:
        """Tokens per request in the order of the decision; valid from ``schedule`` until ``commit``."""
        chunks = {chunk.request: chunk.num_tokens for chunk in plan.chunks}
        left_out, owed = set(plan.left_out), set(plan.owed)
        return {
            request: chunks.get(request, 1)
            for request in self.running
            if request in chunks or request in owed or (request.decoding and request not in left_out)
        }

    # -- what the running requests get

    def _chunk_limit(self) -> int:
        """Longest chunk of one request in this step; 0 is no limit.  One that is alone is not cut (by default)."""
        limit = self.config.long_prefill_token_threshold
        if not limit:
            return 0
        num_requests = self.num_requests
        if not num_requests or (num_requests == 1 and self.config.long_prefill_spares_lone_request):
            return 0
        if self.config.long_prefill_token_threshold_adaptive:
            return max(limit, self.config.max_num_batched_tokens // num_requests)
        return limit

    def _grant_running(self, plan: StepPlan, threshold: int) -> int:
        """Tokens and blocks for the running requests; returns what is left of the budget.

        When budget and blocks suffice for all, nobody has to be looked at one by one.
        """
        decoding = self.decoding
        left = self._budget - decoding.size
        if left < 0:
            return self._grant_one_by_one(plan, threshold)
        wanted: list[tuple[Request, int, int]] = []
        num_blocks = decoding.num_crossing()
        for request in self.prefilling:
            num_tokens = self._chunk_tokens(request, threshold)
            if num_tokens > left:
                if request is not next(reversed(self.running)):
                    return self._grant_one_by_one(plan, threshold)
                num_tokens = left
                if not num_tokens:
                    plan.left_out.append(request)
                    break
            num_new = self._num_new_blocks(request, num_tokens)
            wanted.append((request, num_tokens, num_new))
            num_blocks += num_new
            left -= num_tokens
        if num_blocks > self.pool.num_free:
            plan.left_out.clear()
            return self._grant_one_by_one(plan, threshold)
        if wanted:
            self._give_merged(plan, wanted, num_blocks)
            return left
        if num_blocks:
            self._give_decoding(plan, num_blocks)
        if decoding.eager:
            for request in self._filling(plan):
                self._publish_decode(request)
        return left

    def _give_decoding(self, plan: StepPlan, num_blocks: int) -> None:
        """A block each for the decoding requests that need one; there are ``num_blocks`` of these."""
        plan.grown = self.decoding.crossing()
        for request, block in zip(plan.grown, self.pool.take(num_blocks), strict=True):
            request.block_ids.append(block)

    def _give_merged(self, plan: StepPlan, wanted: list[tuple[Request, int, int]], num_blocks: int) -> None:
        """The ``num_blocks`` blocks of chunks and decodes, in the order of admission as if each were asked in turn."""
        decoding, blocks, taken = self.decoding, self.pool.take(num_blocks), 0
        chunks = {request: (num_tokens, num_new) for request, num_tokens, num_new in wanted}
        crossing = dict.fromkeys(decoding.crossing())
        touched = [*crossing, *chunks]
        if decoding.eager:
            touched += [request for request in dict.fromkeys(self._filling(plan)) if request not in crossing]
        touched.sort(key=_by_order)
        for request in touched:
            if request in chunks:
                num_tokens, num_new = chunks[request]
                self._give_chunk(plan, request, num_tokens, blocks[taken : taken + num_new])
                taken += num_new
                continue
            if request in crossing:
                request.block_ids.append(blocks[taken])
                plan.grown.append(request)
                taken += 1
            self._publish_decode(request)

    def _give_decode(self, plan: StepPlan, request: Request) -> None:
        """One token for a decoding request, with the block that it may need."""
        computed = request.base + self.decoding.clock
        if computed == len(request.block_ids) * self.config.block_size:
            request.block_ids += self.pool.take(1)
            plan.grown.append(request)
        self._publish_decode(request)

    def _give_chunk(self, plan: StepPlan, request: Request, num_tokens: int, new_blocks: list[int]) -> None:
        """A chunk for a request that is prefilling, with its blocks; they can be found from now on."""
        computed = request.base
        request.block_ids += new_blocks
        self._publish(request, computed + num_tokens)
        total = request.num_prompt_tokens + request.num_emitted
        samples = computed + num_tokens == total
        plan.chunks.append(_new(Chunk, (request, num_tokens, computed, len(new_blocks), samples)))

    def _grant_one_by_one(self, plan: StepPlan, threshold: int) -> int:
        """The same when budget or blocks are short: ask in turn, preempt until it fits, stop where it does not."""
        order = list(self.running)
        granted: dict[Request, int] = {}
        left, index = self._budget, 0
        while index < len(order) and left > 0:
            request = order[index]
            if not request.decoding and request not in self.prefilling:
                index += 1  # its last token is under way
                continue
            num_tokens = min(1 if request.decoding else self._chunk_tokens(request, threshold), left)
            num_new = self._num_new_blocks(request, num_tokens)
            while num_new > self.pool.num_free:
                position = self._victim_position(order)
                victim = order.pop(position)
                index -= position < index
                left += self._take_back(plan, victim, granted, for_request=request)
                if victim is request:
                    break
            if request.status != Status.RUNNING:
                break
            if request.decoding:
                self._give_decode(plan, request)
            else:
                self._give_chunk(plan, request, num_tokens, self.pool.take(num_new))
            granted[request] = num_tokens
            left -= num_tokens
            index += 1
        plan.left_out = order[index:]
        return left

    def _victim_position(self, order: list[Request]) -> int:
        """Who loses his blocks: the latest admission, or the least urgent (of those the latest, then the first)."""
        if not self._by_priority:
            return len(order) - 1
        return max(range(len(order)), key=lambda i: (order[i].priority, order[i].arrival_ns))

    def _take_back(self, plan: StepPlan, victim: Request, granted: dict[Request, int], for_request: Request) -> int:
        """Preempt; returns the tokens that the victim had been given in this step."""
        num_tokens = granted.pop(victim, 0)
        if num_tokens:
            plan.chunks = [chunk for chunk in plan.chunks if chunk.request is not victim]
            plan.grown = [request for request in plan.grown if request is not victim]
        self._preempt(plan, victim, num_tokens, for_request)
        return num_tokens

    def _preempt(self, plan: StepPlan, victim: Request, num_tokens: int, for_request: Request) -> None:
        """Throw away what a running request has computed; ``num_tokens`` more had been scheduled in this step."""
        computed = self.num_computed_tokens(victim)
        num_blocks = len(victim.block_ids)
        # A block counts as cached from the moment it is scheduled, even if the step then never computes it.
        num_full = self._num_full_blocks(victim, num_tokens)
        self._register(victim, num_full)  # from now on it may look for its own blocks
        self._stop_running(victim, num_full)
        victim.high_water_tokens = max(victim.high_water_tokens, computed)
        victim.base = 0
        victim.num_preemptions += 1
        victim.status = Status.PREEMPTED
        self.waiting.put_back(victim)
        plan.preemptions.append(Preemption(victim, computed, num_blocks, self.pool.num_free, for_request))

    # -- who of the waiting is let in

    def _admit_waiting(self, plan: StepPlan, left: int, threshold: int, now_ns: int) -> None:
        """Admit from the head of the queue while budget, seats and blocks last; nobody overtakes."""
        while left > 0 and len(self.waiting) and len(self.running) < self._max_running:
            num_tokens = self._admit_head(plan, left, threshold, now_ns)
            if not num_tokens:
                return
            left -= num_tokens

    def _admit_head(self, plan: StepPlan, left: int, threshold: int, now_ns: int) -> int:
        """Admit the head of the queue; returns the tokens that it is given, 0 if it has to wait."""
        request = self.waiting.head()
        hits = self._lookup(request)
        cached = len(hits) * self.config.block_size
        num_tokens = request.num_prompt_tokens + request.num_emitted - cached
        if 0 < threshold < num_tokens:
            num_tokens = threshold
        if num_tokens > left:
            if not self.config.enable_chunked_prefill:
                return 0
            num_tokens = left
        num_new = self._num_admission_blocks(request, hits, cached + num_tokens)
        if num_new is None:
            return 0
        self.waiting.pop_head()
        self._admit(plan, request, hits, now_ns)
        self._give_chunk(plan, request, num_tokens, self.pool.take(num_new))
        return num_tokens

    def _lookup(self, request: Request) -> list[int]:
        """Cached blocks of the request's beginning; its last known token is always computed anew."""
        keys = request.keys
        if keys is None or not self.pool.caching:
            return []
        last = (request.num_prompt_tokens + request.num_emitted - 1) // self.config.block_size
        if not request.num_preemptions:  # what is its own can be known only if it has been here before
            last = min(last, keys.num_shared_blocks)
        return self.pool.lookup(keys.between(0, last)) if last else []

    def _num_admission_blocks(self, request: Request, hits: list[int], num_scheduled: int) -> int | None:
        """New blocks for ``num_scheduled`` tokens, hits included in these; None if the request has to wait."""
        size, max_len = self.config.block_size, self.config.max_model_len
        free = self.pool.num_free - self.pool.num_free_among(hits)
        if self.running:
            free -= self._mark
        if self.config.scheduler_reserve_full_isl:
            total = min(request.num_prompt_tokens + request.num_emitted, max_len)
            if max(-(-total // size) - len(hits), 0) > free:
                return None
        num_new = max(-(-min(num_scheduled + self._lookahead, max_len) // size) - len(hits), 0)
        return num_new if num_new <= free else None

    def _admit(self, plan: StepPlan, request: Request, hits: list[int], now_ns: int) -> None:
        cached = len(hits) * self.config.block_size
        resumed = request.status == Status.PREEMPTED
        if resumed:
            request.num_resumed_cached_tokens += cached
            request.num_resumed_query_tokens += request.num_prompt_tokens + request.num_emitted
        else:
            request.num_cached_tokens = cached
            request.scheduled_ns = now_ns
        if hits:
            self.pool.hold(hits)
            request.block_ids = hits
        request.num_findable_blocks = len(hits)
        request.base = cached
        request.status = Status.RUNNING
        request.order = self._num_admitted
        self._num_admitted += 1
        self.running[request] = None
        self.prefilling[request] = None
        plan.admissions.append(Admission(request, cached, resumed))

    # -- closing a decision, and what follows from a step

    def _close(self, plan: StepPlan) -> None:
        """Write the plan's shape and count its tokens as computed."""
        decoding = self.decoding
        skipped = [request for request in plan.left_out if request.decoding] if plan.left_out else ()
        if not plan.chunks and decoding.size == len(skipped):
            return
        for request in skipped:
            decoding.leave(request)
            self._end_span(request)
        num_decode = num_sampled = decoding.size
        context = decoding.context_tokens()
        tokens = cached = pairs = 0
        for request, num_tokens, computed, _, samples in plan.chunks:
            tokens += num_tokens
            cached += computed
            pairs += num_tokens * computed + num_tokens * (num_tokens + 1) // 2
            num_sampled += samples
            request.base += num_tokens
            if computed < request.high_water_tokens:
                again = min(request.high_water_tokens, request.base) - computed
                request.num_recomputed_tokens += again
                plan.num_recomputed_tokens += again
        plan.shape = _new(StepShape, (num_decode, context, len(plan.chunks), tokens, cached, pairs, num_sampled))
        self._under_way.append(plan)
        decoding.clock += 1  # every member's computed tokens grow by one
        for request in skipped:
            self._join(request, decoding.clock)
        for request, _, _, _, samples in plan.chunks:
            if samples:
                del self.prefilling[request]
                self._join(request, plan.number)
        if decoding.has_exhausted:
            for request in decoding.exhausted():
                decoding.leave(request)
                self._end_span(request)

    def _join(self, request: Request, span_start: int) -> None:
        """Decode from now on, with tokens at the end of the steps from ``span_start`` on."""
        request.span_start = span_start
        num_emitted = request.num_emitted + request.num_owed_tokens
        finish_clock = span_start + request.stop_after - num_emitted
        exit_clock = span_start + request.may_emit - num_emitted if self._is_async else -1
        self.decoding.join(request, finish_clock, exit_clock, self._is_eager(request))

    def _end_span(self, request: Request) -> None:
        """Settle a request that has left the decode set: what it got is its own, what is under way is owed to it."""
        count = self.num_steps_done - request.span_start
        if count > 0:
            request.spans.append((request.span_start, count))
            request.num_emitted += count
        num_scheduled = self.decoding.clock - request.span_start
        if num_scheduled > 0:
            request.num_start_tokens = request.base - num_scheduled + 1
        for plan in self._under_way:
            if plan.number >= request.span_start:
                plan.owed.append(request)
                request.num_owed_tokens += 1

    def _stop_running(self, request: Request, num_full: int) -> None:
        """Leave the batch: settle the counters and give the blocks back, of which ``num_full`` hold full prefixes."""
        del self.running[request]
        if request.decoding:
            self.decoding.leave(request)
            self._end_span(request)
        else:
            self.prefilling.pop(request, None)
        self._give_back(request, num_full)

    def _give_back(self, request: Request, num_full: int) -> None:
        """Give its blocks back, of which ``num_full`` hold full prefixes.

        What can be found counts as full: a request that goes while its newest tokens are under way has such blocks.
        """
        num_full = max(num_full, request.num_findable_blocks)
        self.pool.release(request.block_ids, request.num_findable_blocks, num_full)
        request.block_ids = []
        request.num_findable_blocks = 0

    # -- blocks

    def _filling(self, plan: StepPlan) -> list[Request]:
        """Decoding requests that may have one more block full of known tokens once this step is scheduled."""
        if not self.decoding.eager:
            return []
        filling = self.decoding.filling(plan.number)
        if self._is_async:  # the newest token may not be known yet; then the one before it counts
            filling += self.decoding.filling(plan.number - 1)
        return filling

    def _publish_decode(self, request: Request) -> None:
        """What a decode makes findable when it is scheduled: full blocks of tokens that are known."""
        if request in self.decoding.eager:
            self._publish(request, min(self.num_computed_tokens(request) + 1, self.num_tokens(request)))

    def _chunk_tokens(self, request: Request, threshold: int) -> int:
        num_tokens = request.num_prompt_tokens + request.num_emitted - request.base
        return threshold if 0 < threshold < num_tokens else num_tokens

    def _num_new_blocks(self, request: Request, num_tokens: int) -> int:
        last = self.num_computed_tokens(request) + num_tokens
        if self._lookahead:
            last = min(last + self._lookahead, self.config.max_model_len)
        return max(-(-last // self.config.block_size) - len(request.block_ids), 0)

    def _is_eager(self, request: Request) -> bool:
        """Whether others may look for the blocks of its output while it runs."""
        return self._num_shared_blocks(request) * self.config.block_size > request.num_prompt_tokens

    def _num_shared_blocks(self, request: Request) -> int:
        """Leading blocks that others may look for."""
        if request.keys is None or not self.pool.caching:
            return 0
        return request.keys.num_shared_blocks

    def _num_full_blocks(self, request: Request, num_scheduled: int = 0) -> int:
        """Leading blocks that are full of scheduled tokens, so that they count as cached when they are released."""
        if request.keys is None or not self.pool.caching:
            return 0
        if self._is_async and request not in self.prefilling:  # its decoded tokens count once they are known
            num_scheduled = max(self.num_tokens(request) - (not num_scheduled), self._num_start_tokens(request))
        else:
            num_scheduled += self.num_computed_tokens(request)
        return num_scheduled // self.config.block_size

    def _num_start_tokens(self, request: Request) -> int:
        """Tokens that were known when the first step of its latest run of decodes was scheduled."""
        num_scheduled = self.decoding.clock - request.span_start
        if not request.decoding or num_scheduled <= 0:
            return request.num_start_tokens
        return self.num_computed_tokens(request) - num_scheduled + 1

    def _publish(self, request: Request, num_scheduled: int) -> None:
        """Make the full blocks of the first ``num_scheduled`` tokens findable, as far as others may look for them."""
        num_shared = self._num_shared_blocks(request)
        if num_shared:
            self._register(request, min(num_scheduled // self.config.block_size, num_shared))

    def _register(self, request: Request, num_blocks: int) -> None:
        first = request.num_findable_blocks
        if num_blocks > first and request.keys is not None:
            self.pool.register(request.block_ids[first:num_blocks], request.keys.between(first, num_blocks))
            request.num_findable_blocks = num_blocks


def extend_spans(spans: list[tuple[int, int]], step: int) -> None:
    """Add one token at the end of ``step``, which is later than all that the spans hold."""
    if spans and sum(spans[-1]) == step:
        spans[-1] = (spans[-1][0], spans[-1][1] + 1)
    else:
        spans.append((step, 1))


def _by_order(request: Request) -> int:
    return request.order
