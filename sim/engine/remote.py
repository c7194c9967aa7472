"""The two halves of disaggregated serving: an engine that computes prompts, and one that gets their cache and decodes.

What vLLM 0.32's scheduler does with a KV connector that loads between steps (``load_kv_async``, such as NIXL's in pull
mode): ``vllm/v1/core/sched/scheduler.py`` and ``vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py``.

* The prefill engine computes the prompt and one token, and keeps the request's blocks until they have been read.
* The decode engine takes a request from its queue only when a seat is free, takes all blocks of its prompt at once
  (those that its prefix cache has need not be loaded) and keeps them while the load runs; the request holds no seat and
  no budget meanwhile.  The blocks can be found by others once the load is over.  Then it goes before those that wait,
  and computes its last prompt token again, which yields the first output token.
* A request that the decode engine preempts loses its blocks like any other; its prompt and what it has written are
  computed there again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import Admission, Speculated, StepPlan
from windtunnel.sim.engine.protocols import EngineLoad
from windtunnel.sim.engine.request import Request, Status
from windtunnel.sim.engine.scheduler import Scheduler


class LoadBegins(Protocol):
    """Whom a decode engine tells that it wants the cache of a prompt."""

    def __call__(self, request: Request, num_blocks: int, now_ns: int) -> None:
        """``num_blocks`` blocks of the request's prompt are to be copied, beginning now."""


def check_supports_roles(config: SchedulerConfig) -> None:
    """Raise ValueError for engines whose handing over of a cache is not modelled."""
    if config.num_speculative_tokens or config.pipeline_parallel_size > 1:
        raise ValueError(
            "prefill and decode roles are not modelled for engines with speculative decoding or pipeline parallelism: "
            "set num_speculative_tokens to 0 and pipeline_parallel_size to 1"
        )


class PrefillScheduler(Scheduler):
    """Continuous batching whose finished requests keep their blocks until ``release``."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Raises ValueError for a config that roles do not support."""
        check_supports_roles(config)
        super().__init__(config)
        self._held: dict[Request, int] = {}  # with the number of its blocks that are full of prompt
        self._is_finishing = False

    @property
    def num_held(self) -> int:
        """Finished requests whose blocks are still here."""
        return len(self._held)

    def commit(self, plan: StepPlan, end_ns: int, speculated: Speculated | None = None) -> list[Request]:
        """As ``Scheduler.commit``; the finished requests' blocks stay, and their token is nobody's.

        A token of a request that was preempted meanwhile does not count, for its cache is gone: it is computed again
        (``requires_kv_delivery`` in vLLM).
        """
        for request in [request for request in plan.owed if request.status == Status.PREEMPTED]:
            plan.owed.remove(request)
            request.num_owed_tokens -= 1
        self._is_finishing = True
        finished = super().commit(plan, end_ns, speculated)
        self._is_finishing = False
        for request in finished:
            request.spans = []
        return finished

    def release(self, request: Request) -> None:
        """Its blocks have been read: give them back."""
        num_full = self._held.pop(request)
        super()._give_back(request, num_full)

    def _give_back(self, request: Request, num_full: int) -> None:
        if self._is_finishing:
            self._held[request] = num_full
        else:
            super()._give_back(request, num_full)


class DecodeScheduler(Scheduler):
    """Continuous batching of requests whose prompts were computed elsewhere (and of others)."""

    def __init__(self, config: SchedulerConfig, begin_load: LoadBegins) -> None:
        """Raises ValueError for a config that roles do not support."""
        check_supports_roles(config)
        super().__init__(config)
        self._begin_load = begin_load
        self._remote: set[Request] = set()  # requests whose cache is still elsewhere; only ever asked for membership
        self._loading: dict[Request, bool] = {}  # in the order of their loads; whether the load is over
        self._left: dict[Request, None] = {}  # aborted while their load ran, which goes on into their blocks

    def add_remote(self, request: Request) -> None:
        """Queue a request whose prompt has been computed elsewhere.  Raises ValueError as ``add``."""
        self.add(request)
        self._remote.add(request)

    def loaded(self, request: Request) -> None:
        """The load that was begun for it is over."""
        if request in self._left:
            del self._left[request]
            self._give_back(request, request.num_findable_blocks)
            return
        self._loading[request] = True

    def is_remote(self, request: Request) -> bool:
        """Whether its cache is still elsewhere and nobody has begun to load it."""
        return request in self._remote

    @property
    def is_expecting(self) -> bool:
        """Whether loads are under way."""
        return bool(self._left) or not all(self._loading.values())

    @property
    def num_requests(self) -> int:
        """Requests that wait, are being loaded, or run."""
        return super().num_requests + len(self._loading)

    def requests(self) -> Iterator[Request]:
        """The running in the order of admission, those that hold loaded blocks, then the waiting."""
        yield from self.running
        yield from self._loading
        yield from self.waiting

    def load(self) -> EngineLoad:
        """How full the engine is; those that are being loaded wait, as vLLM counts them."""
        load = super().load()
        return load._replace(num_waiting=load.num_waiting + len(self._loading))

    def abort(self, request: Request) -> None:
        """Drop a request; blocks that a load still writes to are free when that is over."""
        self._remote.discard(request)
        is_loaded = self._loading.pop(request, None)
        if is_loaded is None:
            super().abort(request)
            return
        request.status = Status.ABORTED
        if is_loaded:
            self._give_back(request, request.num_findable_blocks)
        else:
            self._left[request] = None

    def _admit_waiting(self, plan: StepPlan, left: int, threshold: int, now_ns: int) -> None:
        """Those first whose cache is here now; then from the head of the queue, which a request leaves for its load."""
        left = self._admit_loaded(plan, left, now_ns)
        while left > 0 and len(self.waiting) and len(self.running) < self._max_running:
            if self.waiting.head() in self._remote:
                if not self._start_load(now_ns):
                    return
                continue
            num_tokens = self._admit_head(plan, left, threshold, now_ns)
            if not num_tokens:
                return
            left -= num_tokens

    def _admit_loaded(self, plan: StepPlan, left: int, now_ns: int) -> int:
        """Let those run whose cache is here; returns what is left of the budget, 0 if one of them has to wait.

        Their blocks are here already, also the one that the last prompt token is written to again.
        """
        for request in self._in_turn([request for request, is_over in self._loading.items() if is_over]):
            if left < 1 or len(self.running) >= self._max_running:
                return 0
            self._take_in(request)
            if self.running and self.pool.num_free < self._mark:
                return 0
            del self._loading[request]
            self._run(plan, request, now_ns)
            self._give_chunk(plan, request, 1, [])
            left -= 1
        return left

    def _in_turn(self, ready: list[Request]) -> list[Request]:
        """In the order of their loads, or of their urgency."""
        if self._by_priority:
            ready.sort(key=lambda request: (request.priority, request.arrival_ns, request.request_id))
        return ready

    def _take_in(self, request: Request) -> None:
        """Its blocks can be found from now on, and its last prompt token will be computed again."""
        self._publish(request, request.num_prompt_tokens)
        request.high_water_tokens = request.num_prompt_tokens
        request.base = request.num_prompt_tokens - 1

    def _run(self, plan: StepPlan, request: Request, now_ns: int) -> None:
        if request.scheduled_ns < 0:
            request.scheduled_ns = now_ns
        request.status = Status.RUNNING
        request.order = self._num_admitted
        self._num_admitted += 1
        self.running[request] = None
        self.prefilling[request] = None
        plan.admissions.append(Admission(request, request.base, False))

    def _start_load(self, now_ns: int) -> bool:
        """Take blocks for the whole prompt of the head and have its cache loaded; False if they are not there."""
        request = self.waiting.head()
        hits = self._lookup(request)
        size = self.config.block_size
        num_new = -(-request.num_prompt_tokens // size) - len(hits)
        free = self.pool.num_free - self.pool.num_free_among(hits)
        if self.running:
            free -= self._mark
        if num_new > free - self._num_promised_blocks():
            return False
        self.waiting.pop_head()
        self._remote.discard(request)
        if hits:
            self.pool.hold(hits)
        request.block_ids = hits + self.pool.take(num_new)
        request.num_findable_blocks = len(hits)
        self._loading[request] = False
        self._begin_load(request, num_new, now_ns)
        return True

    def _num_promised_blocks(self) -> int:
        """Blocks that prefills which have begun still need for all of their known tokens."""
        size = self.config.block_size
        return sum(
            max(0, -(-(request.num_prompt_tokens + request.num_emitted) // size) - len(request.block_ids))
            for request in self.prefilling
        )
