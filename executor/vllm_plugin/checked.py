"""Our scheduler inside real vLLM with vLLM's own beside it: the first decision that differs ends the run."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request as VllmRequest

from windtunnel.executor.vllm_plugin.scheduler import VllmScheduler

COMPARED = (
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "scheduled_spec_decode_tokens",
    "finished_req_ids",
    "preempted_req_ids",
    "new_block_ids_to_zero",
)
COMPARED_OF_NEW = ("req_id", "prompt_token_ids", "block_ids", "num_computed_tokens", "prefill_token_ids")
COMPARED_OF_CACHED = (
    "req_ids",
    "new_token_ids",
    "all_token_ids",
    "new_block_ids",
    "num_computed_tokens",
    "num_output_tokens",
    "resumed_req_ids",
)


class DecisionsDiffer(AssertionError):
    """Our scheduler and vLLM's decided differently on the same input; the message shows both."""


class VllmSchedulerChecked(VllmScheduler):
    """As VllmScheduler; vLLM's scheduler sees the same requests and tokens, and every decision is compared.

    Compared are what goes to the worker (tokens, their order, block ids, computed tokens, preempted and finished
    requests), what goes to the front end (tokens, end reasons, cached tokens), queues and KV usage.  Raises
    DecisionsDiffer at the first difference, which ends the engine.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        structured_output_manager: Any,
        block_size: int,
        hash_block_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size, **options
        )
        kind = AsyncScheduler if self.engine.config.async_scheduling else Scheduler
        self._theirs = kind(
            vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size, **options
        )
        self._their_outputs: dict[int, Any] = {}  # by the identity of ours, while the step is under way
        self.num_compared = 0
        """Decisions compared so far."""

    def add_request(self, request: Any) -> None:
        """Queue a request with both."""
        super().add_request(request)
        if request.request_id in self._entries:
            self._theirs.add_request(_twin(request))

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Any]:
        """Drop requests with both, one by one: vLLM's order for several depends on the hash of their ids."""
        dropped = super().finish_requests(request_ids, finished_status)
        for request in dropped:
            self._theirs.finish_requests(request.request_id, finished_status)
        return dropped

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Decide twice and compare."""
        ours = super().schedule(throttle_prefills)
        theirs = self._theirs.schedule(throttle_prefills)
        for name in COMPARED:
            self._compare(name, _plain(getattr(ours, name)), _plain(getattr(theirs, name)))
        self._compare("order of the batch", list(ours.num_scheduled_tokens), list(theirs.num_scheduled_tokens))
        self._compare_state()
        self._their_outputs[id(ours)] = theirs
        self.num_compared += 1
        return ours

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Take the tokens twice and compare what goes to the front end."""
        theirs = self._their_outputs.pop(id(scheduler_output))
        copied = copy(model_runner_output)  # vLLM cuts the lists of tokens where an answer ends
        copied.sampled_token_ids = [list(tokens) for tokens in model_runner_output.sampled_token_ids]
        ours = super().update_from_output(scheduler_output, model_runner_output)
        expected = self._theirs.update_from_output(theirs, copied)
        self._compare("answers", _told(ours), _told(expected))
        self._compare_state()
        return ours

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Give the drafts to both."""
        super().update_draft_token_ids(draft_token_ids)
        self._theirs.update_draft_token_ids(draft_token_ids)

    def set_pause_state(self, pause_state: Any) -> None:
        """Pause both."""
        super().set_pause_state(pause_state)
        self._theirs.set_pause_state(pause_state)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes with both."""
        done = super().reset_prefix_cache(reset_running_requests, reset_connector)
        self._compare("reset_prefix_cache", done, self._theirs.reset_prefix_cache())
        return done

    def shutdown(self) -> None:
        """Shut both down."""
        super().shutdown()
        self._theirs.shutdown()

    def _compare_state(self) -> None:
        ids = [request.request_id for request in self.engine.running]
        self._compare("running", ids, [request.request_id for request in self._theirs.running])
        ids = [request.request_id for request in self.engine.waiting]
        self._compare("waiting", ids, [request.request_id for request in self._theirs.waiting])
        pool = self._theirs.kv_cache_manager.block_pool
        self._compare("free blocks", self.engine.pool.num_free, pool.get_num_free_blocks())
        self._compare(
            "free queue",
            self.engine.pool.free_queue(),
            [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        )

    def _compare(self, what: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            raise DecisionsDiffer(f"decision {self.num_compared}, {what}: ours {ours!r}, vLLM's {theirs!r}")


def _twin(request: Any) -> Any:
    """The same request for the other scheduler; each changes its own."""
    return VllmRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=request.sampling_params,
        pooling_params=None,
        client_index=request.client_index,
        arrival_time=request.arrival_time,
        cache_salt=request.cache_salt,
        priority=request.priority,
        trace_headers=request.trace_headers,
        block_hasher=request._block_hasher,
    )


def _plain(value: Any) -> Any:
    """Comparable data of a part of a SchedulerOutput."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    for names in (COMPARED_OF_CACHED, COMPARED_OF_NEW):
        if hasattr(value, names[-1]):
            return {name: getattr(value, name) for name in names}
    return value


def _told(answers: dict[int, Any]) -> dict[int, Any]:
    """What each client is told, without time stamps, and without the requests that only ours refused."""
    told = {
        client: [
            (
                each.request_id,
                each.new_token_ids,
                each.finish_reason,
                each.stop_reason,
                each.prefill_stats,
                [event.type for event in each.events or ()],
            )
            for each in answer.outputs
            if each.finish_reason != FinishReason.ERROR
        ]
        for client, answer in answers.items()
    }
    return {client: each for client, each in told.items() if each}
