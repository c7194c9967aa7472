"""Our scheduler inside real vLLM: it decides, vLLM's model runner runs, vLLM's front end serves.

    vllm serve MODEL --scheduler-cls windtunnel.executor.vllm_plugin.VllmScheduler

Nothing of vLLM's own scheduler, KV cache manager or block pool takes part.  What is taken from vLLM are the
messages between engine, worker and front end, the request with its tokens and block hashes, and the check of stop
conditions on a sampled token.  Written for vLLM 0.32.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.request import RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from windtunnel.executor.vllm_plugin.engine import (
    LiveEngine,
    engine_request,
    exact_ns,
    refusal,
    refuse_unsupported,
    scheduler_config,
)
from windtunnel.sim.engine.per_request import SpeculativePlan
from windtunnel.sim.engine.plan import Chunk, Speculated
from windtunnel.sim.engine.request import Request

logger = init_logger(__name__)


class _Entry(NamedTuple):
    """A request as vLLM and as our engine know it."""

    theirs: Any
    ours: Request


class _Step(NamedTuple):
    """A decision that went to the worker; ``plan`` is None while the scheduler is paused."""

    output: Any
    plan: SpeculativePlan | None


class VllmScheduler(SchedulerInterface):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Takes the place of vLLM's Scheduler and AsyncScheduler; which of both it is follows from the configuration.

    Raises ValueError, naming every cause, for an engine that is not modelled: speculative decoding other than ngram,
    LoRA, connectors, multimodal or pooling models, pipeline and context parallelism, caches other than full
    attention.  A single request that is not modelled (structured output, streaming input) ends with an error; the
    others go on.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        structured_output_manager: Any,  # noqa: ARG002
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: Any = MULTIMODAL_REGISTRY,  # noqa: ARG002
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        refuse_unsupported(vllm_config, kv_cache_config, block_size, hash_block_size)
        self.engine = LiveEngine(scheduler_config(vllm_config, kv_cache_config.num_blocks, block_size))
        """The scheduler that decides."""
        self.last_plan: SpeculativePlan | None = None
        """Its latest decision."""
        self.connector = self.ec_connector = None  # EngineCore asks for them
        self._log_stats = log_stats
        self._uses_v2_runner = bool(vllm_config.use_v2_model_runner)
        self._entries: dict[str, _Entry] = {}
        self._refused: dict[str, Any] = {}
        self._under_way: deque[_Step] = deque()
        self._scheduled_before: set[str] = set()  # ids of the step before; the first runner caches their tokens
        self._finished_ids: set[str] = set()  # since the last decision
        self._finished_by_client: dict[int, set[str]] | None = defaultdict(set) if include_finished_set else None
        self._pause_state = PauseState.UNPAUSED
        self._prefix_stats = PrefixCacheStats()
        self._speculation: Any = None  # statistics of drafts since they were last asked for
        logger.info("windtunnel schedules: %s", self.engine.config)

    # -- requests

    def add_request(self, request: Any) -> None:
        """Queue a request; one that is not modelled is answered with an error at the next step."""
        if request.request_id in self._entries:
            raise ValueError(f"request id {request.request_id!r} is already in the engine: ids must be unique")
        if self._log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        reason = refusal(request)
        if reason is None:
            ours = engine_request(request, self.engine.config.enable_prefix_caching)
            try:
                self.engine.add(ours)
            except ValueError as error:
                reason = str(error)
            else:
                self._entries[request.request_id] = _Entry(request, ours)
                return
        logger.error("request %s is refused: %s", request.request_id, reason)
        request.status = RequestStatus.FINISHED_ERROR
        self._refused[request.request_id] = request

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Any]:
        """Drop requests in whatever state they are (all if None); those that were still there."""
        if request_ids is None:
            request_ids = [*self._entries, *self._refused]
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        dropped = []
        for request_id in dict.fromkeys(request_ids):
            if entry := self._entries.get(request_id):
                self.engine.abort(entry.ours)
                self._forget(entry.theirs, finished_status)
                dropped.append(entry.theirs)
            elif refused := self._refused.pop(request_id, None):
                self._tell_client(refused)
                dropped.append(refused)
        return dropped

    def _forget(self, request: Any, status: Any) -> None:
        request.status = status
        del self._entries[request.request_id]
        self._finished_ids.add(request.request_id)
        self._tell_client(request)

    def _tell_client(self, request: Any) -> None:
        """Note the end for the client, which keeps track of its requests where there are several engines."""
        if self._finished_by_client is not None:
            self._finished_by_client[request.client_index].add(request.request_id)

    # -- the decision

    def schedule(self, throttle_prefills: bool = False) -> Any:  # noqa: ARG002
        """Let our engine decide the next step and write it down as vLLM's worker wants it."""
        now_s = time.monotonic()
        plan = None if self._pause_state == PauseState.PAUSED_ALL else self.engine.schedule(exact_ns(now_s))
        output = self._written(SpeculativePlan(0) if plan is None else plan, now_s)
        self._scheduled_before = set(output.num_scheduled_tokens)
        self._under_way.append(_Step(output, plan))
        self.last_plan = plan
        return output

    def _written(self, plan: SpeculativePlan, now_s: float) -> Any:
        preempted = {self._book_preemption(each.request, now_s) for each in plan.preemptions}
        for admission in plan.admissions:
            self._book_admission(admission.request, admission.num_cached_tokens, now_s)
        admitted = {each.request: each.resumed for each in plan.admissions}
        fresh, running, resumed = [], [], []
        for chunk in plan.chunks:
            self._entry(chunk).theirs.num_computed_tokens = chunk.num_computed_tokens
            if chunk.request not in admitted:
                running.append(chunk)
            elif admitted[chunk.request] and not self._uses_v2_runner:
                resumed.append(chunk)
            else:
                fresh.append(chunk)
        if self._uses_v2_runner:  # which takes resumed requests for new ones, behind these
            fresh.sort(key=lambda chunk: admitted[chunk.request])
        num_tokens = {chunk.request.request_id: chunk.num_tokens for chunk in plan.chunks}
        finished, self._finished_ids = self._finished_ids, set()
        output = SchedulerOutput(
            scheduled_new_reqs=[self._first_grant(chunk) for chunk in fresh],
            scheduled_cached_reqs=self._later_grants(running, resumed),
            num_scheduled_tokens=num_tokens,
            total_num_scheduled_tokens=sum(num_tokens.values()),
            scheduled_spec_decode_tokens=self._drafts_to_verify(plan),
            num_spec_tokens_to_schedule=self.engine.config.num_speculative_tokens,
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
            preempted_req_ids=preempted,
        )
        for chunk in plan.chunks:
            self._entry(chunk).theirs.num_computed_tokens += chunk.num_tokens
        return output

    def _drafts_to_verify(self, plan: SpeculativePlan) -> dict[str, list[int]]:
        """Draft tokens of the step; -1 where an admission is padded to the size of a verification."""
        drafts = {}
        for ours, num in plan.num_drafts.items():
            request_id = str(ours.request_id)
            known = [] if ours in plan.padded else self._entries[request_id].theirs.spec_token_ids[:num]
            drafts[request_id] = known or [-1] * num
        for chunk in plan.chunks:
            self._entry(chunk).theirs.spec_token_ids = []
        return drafts

    def _first_grant(self, chunk: Chunk) -> Any:
        theirs, ours = self._entry(chunk)
        prefill = list(theirs.all_token_ids) if self._uses_v2_runner else None
        return NewRequestData.from_request(theirs, (list(ours.block_ids),), prefill)

    def _later_grants(self, running: list[Chunk], resumed: list[Chunk]) -> Any:
        entries = [self._entry(chunk) for chunk in (*running, *resumed)]
        ids = [theirs.request_id for theirs, _ in entries]
        grown = [chunk.request.block_ids[-chunk.num_new_blocks :] if chunk.num_new_blocks else [] for chunk in running]
        whole = [list(chunk.request.block_ids) for chunk in resumed]
        all_token_ids = {}
        if not self._uses_v2_runner:
            all_token_ids = {
                theirs.request_id: list(theirs.all_token_ids)
                for theirs, _ in entries
                if theirs.request_id not in self._scheduled_before
            }
        return CachedRequestData(
            req_ids=ids,
            resumed_req_ids=set(ids[len(running) :]),
            new_token_ids=[],
            all_token_ids=all_token_ids,
            new_block_ids=[(blocks,) if blocks else None for blocks in (*grown, *whole)],
            num_computed_tokens=[chunk.num_computed_tokens for chunk in (*running, *resumed)],
            num_output_tokens=[
                self._entry(chunk).theirs.num_output_tokens + self._num_awaited_before(chunk)
                for chunk in (*running, *resumed)
            ],
        )

    def _num_awaited_before(self, chunk: Chunk) -> int:
        """Output tokens that were already on their way when the chunk was granted."""
        now = self.engine.num_awaited_tokens(chunk.request)
        return now - chunk.samples if self.engine.config.async_scheduling else now

    def _book_preemption(self, ours: Request, now_s: float) -> str:
        request = self._entries[str(ours.request_id)].theirs
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.spec_token_ids = []
        if self._log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED, now_s)
        return str(request.request_id)

    def _book_admission(self, ours: Request, num_cached: int, now_s: float) -> None:
        request = self._entries[str(ours.request_id)].theirs
        request.status = RequestStatus.RUNNING
        if request.prefill_stats and not request.num_preemptions:
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=num_cached,
                num_external_cached_tokens=0,
            )
        if not self._log_stats:
            return
        request.record_event(EngineCoreEventType.SCHEDULED, now_s)
        if self.engine.config.enable_prefix_caching and not request.skip_reading_prefix_cache:
            self._prefix_stats.record(request.num_tokens, num_cached, preempted=request.num_preemptions > 0)

    def _entry(self, chunk: Chunk) -> _Entry:
        return self._entries[str(chunk.request.request_id)]

    # -- what came of it

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Take the tokens of the oldest step under way; what goes to each client."""
        output, plan = self._under_way.popleft()
        if output is not scheduler_output:
            raise RuntimeError("vLLM's engine returned steps in another order than it was given them")
        outputs: dict[int, list[Any]] = defaultdict(list)
        if plan is not None:
            self._take_tokens(plan, model_runner_output, outputs)
        for request in self._refused.values():
            outputs[request.client_index].append(_last_words(request))
            self._tell_client(request)
        self._refused.clear()
        answers = {client: EngineCoreOutputs(outputs=each) for client, each in outputs.items()}
        self._add_finished_ids(answers)
        if (stats := self.make_stats(model_runner_output.cudagraph_stats)) is not None:
            if not answers:
                answers[0] = EngineCoreOutputs()
            next(iter(answers.values())).scheduler_stats = stats
        return answers

    def _take_tokens(self, plan: SpeculativePlan, result: Any, outputs: dict[int, list[Any]]) -> None:
        """Append the sampled tokens, see who is done, tell our engine, and write the messages."""
        stopped: list[Any] = []
        num_accepted: dict[Request, int] = {}
        for chunk in plan.chunks:
            entry = self._entries.get(str(chunk.request.request_id))
            if entry is None or entry.ours is not chunk.request:
                continue  # aborted while the step ran
            index = result.req_id_to_index[entry.theirs.request_id]
            tokens = list(result.sampled_token_ids[index]) if result.sampled_token_ids else []
            num_drafts = plan.num_drafts.get(chunk.request, 0)
            _check_number(entry.theirs, len(tokens), chunk.samples, num_drafts)
            if not tokens:
                continue
            if num_drafts:
                num_accepted[entry.ours] = len(tokens) - 1
                self._draft_stats().observe_draft(num_drafts, len(tokens) - 1)
            if self._append(entry, tokens):
                stopped.append(entry.theirs)
            outputs[entry.theirs.client_index].append(self._answer(entry, tokens, index, result))
        finished = self.engine.commit(plan, exact_ns(time.monotonic()), Speculated(num_accepted, {}))
        if [each.request_id for each in finished] != [each.request_id for each in stopped]:
            raise RuntimeError(f"our engine finished {finished}, vLLM's stop conditions {stopped}: please report this")
        for request in stopped:
            self._forget(request, request.status)

    def _append(self, entry: _Entry, tokens: list[int]) -> bool:
        """Append tokens up to the one that ends the answer, if any does; those behind it are dropped."""
        for number, token in enumerate(tokens, 1):
            entry.theirs.append_output_token_ids(token)
            if check_stop(entry.theirs, self.engine.config.max_model_len):
                del tokens[number:]
                self.engine.end_after(entry.ours, entry.theirs.num_output_tokens)
                return True
        return False

    def _draft_stats(self) -> Any:
        if self._speculation is None:
            self._speculation = SpecDecodingStats.new(self.engine.config.num_speculative_tokens)
        return self._speculation

    def _answer(self, entry: _Entry, tokens: list[int], index: int, result: Any) -> Any:
        """The message to the front end about one request's new tokens."""
        request = entry.theirs
        prefill_stats = request.take_prefill_stats()
        if prefill_stats is not None:
            prefill_stats.finalize(self.engine.num_cached_tokens(entry.ours))
        if result.num_nans_in_logits is not None:
            request.num_nans_in_logits = result.num_nans_in_logits.get(request.request_id, request.num_nans_in_logits)
        wants_logprobs = request.sampling_params.num_logprobs is not None and result.logprobs
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=tokens,
            finish_reason=request.get_finished_reason(),
            new_logprobs=result.logprobs.slice_request(index, len(tokens)) if wants_logprobs else None,
            new_prompt_logprobs_tensors=result.prompt_logprobs_dict.get(request.request_id),
            prompt_token_id_logprobs=result.prompt_token_id_logprobs_dict.get(request.request_id),
            stop_reason=request.stop_reason,
            events=request.take_events(),
            prefill_stats=prefill_stats,
            trace_headers=request.trace_headers,
            num_nans_in_logits=request.num_nans_in_logits,
        )

    def _add_finished_ids(self, answers: dict[int, Any]) -> None:
        if not self._finished_by_client:
            return
        for client, ids in self._finished_by_client.items():
            if client not in answers:
                answers[client] = EngineCoreOutputs()
            answers[client].finished_requests = ids
        self._finished_by_client.clear()

    # -- what the engine asks

    def get_num_unfinished_requests(self) -> int:
        """Requests for which the engine must go on; those that a pause holds back do not count."""
        if self._pause_state == PauseState.PAUSED_ALL:
            return 0
        waiting = 0 if self._pause_state == PauseState.PAUSED_NEW else len(self.engine.waiting)
        return len(self.engine.running) + waiting + len(self._refused)

    def has_finished_requests(self) -> bool:
        """Whether the worker has still to be told of a request's end."""
        return bool(self._finished_ids)

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        return len(self.engine.running), len(self.engine.waiting)

    def get_kv_cache_usage(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""
        return self.engine.usage()

    def make_stats(self, cudagraph_stats: Any = None) -> Any:
        """Gauges and counters for vLLM's metrics; None if statistics are off."""
        if not self._log_stats:
            return None
        prefix_stats, self._prefix_stats = self._prefix_stats, PrefixCacheStats()
        speculation, self._speculation = self._speculation, None
        return SchedulerStats(
            num_running_reqs=len(self.engine.running),
            num_waiting_reqs=len(self.engine.waiting),
            kv_cache_usage=self.engine.usage(),
            prefix_cache_stats=prefix_stats,
            spec_decoding_stats=speculation,
            cudagraph_stats=cudagraph_stats,
        )

    @property
    def pause_state(self) -> Any:
        """Whether new requests, or all, are held back."""
        return self._pause_state

    def set_pause_state(self, pause_state: Any) -> None:
        """Hold back nobody, new requests, or all."""
        self._pause_state = pause_state
        self.engine.admit(pause_state == PauseState.UNPAUSED)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:  # noqa: ARG002
        """Forget all cached prefixes; False if requests hold blocks.

        Raises ValueError for ``reset_running_requests`` while requests run.
        """
        if reset_running_requests and self.engine.running:
            raise ValueError("VllmScheduler cannot reset running requests: wait until they have ended, or abort them")
        done = self.engine.forget_prefixes()
        if done:
            self._prefix_stats.reset = True
        return done

    def reset_encoder_cache(self) -> None:
        """Nothing to do: there is no encoder."""

    def get_grammar_bitmask(self, scheduler_output: Any) -> None:  # noqa: ARG002
        """None: there is no structured output."""
        return

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Take what the drafter proposes for the next step."""
        for request_id, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            entry = self._entries.get(request_id)
            if entry is not None:
                entry.theirs.spec_token_ids = list(tokens) if self.engine.propose(entry.ours, len(tokens)) else []

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        """Never called: it serves structured output under asynchronous scheduling."""
        raise NotImplementedError("VllmScheduler does no structured output")

    def shutdown(self) -> None:
        """Nothing to give back."""


def _check_number(request: Any, num_tokens: int, samples: bool, num_drafts: int) -> None:
    least, most = (1, 1 + num_drafts) if samples else (0, 0)
    if not least <= num_tokens <= most:
        raise RuntimeError(
            f"request {request.request_id}: the model runner returned {num_tokens} tokens where the step has {least} "
            f"to {most}; VllmScheduler is written for vLLM 0.32"
        )


def _last_words(request: Any) -> Any:
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
