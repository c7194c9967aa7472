"""The shape of a step from vLLM's SchedulerOutput: what our own scheduler would say of the same decision."""

from __future__ import annotations

from typing import Any, NamedTuple

from windtunnel.sim.engine.plan import StepShape


class Grant(NamedTuple):
    """What one request computes in a step."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is in the cache before the step."""
    samples: bool
    """Whether the step yields a token for it."""
    is_decode: bool
    """Whether it is past its prefill and computes its newest token only."""


class StepShapes:
    """Keeps, for each request on the worker, how many tokens its prefill has; the rest is in each SchedulerOutput.

    A request is prefilling until the tokens that it had when it was admitted (prompt, and output if it was preempted)
    are computed.  Text generation without drafts.
    """

    def __init__(self) -> None:
        self._prefill_tokens: dict[str, int] = {}

    def grants(self, output: Any) -> list[Grant]:
        """Who computes what in this step, in the order of the decision; to be called once for every step."""
        for request_id in output.finished_req_ids:
            self._prefill_tokens.pop(request_id, None)
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            known = new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            self._prefill_tokens[new.req_id] = len(known)
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id in cached.resumed_req_ids:
            self._prefill_tokens[request_id] = len(cached.all_token_ids[request_id])
        return [
            self._grant(request_id, num_tokens, computed[request_id])
            for request_id, num_tokens in output.num_scheduled_tokens.items()
        ]

    def _grant(self, request_id: str, num_tokens: int, num_computed: int) -> Grant:
        prefill = self._prefill_tokens[request_id]
        is_decode = num_computed >= prefill
        return Grant(request_id, num_tokens, num_computed, num_computed + num_tokens >= prefill, is_decode)


def shape_of(grants: list[Grant]) -> StepShape:
    """The StepShape of a step with these grants."""
    decodes = context = chunks = tokens = cached = pairs = sampled = 0
    for _, num_tokens, computed, samples, is_decode in grants:
        sampled += samples
        if is_decode:
            decodes += 1
            context += computed + 1
        else:
            chunks += 1
            tokens += num_tokens
            cached += computed
            pairs += num_tokens * computed + num_tokens * (num_tokens + 1) // 2
    return StepShape(decodes, context, chunks, tokens, cached, pairs, sampled)
