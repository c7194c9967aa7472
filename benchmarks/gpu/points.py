"""Steps of a given shape, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from windtunnel.executor.batch import Grant
from windtunnel.executor.sampling import SamplingParams
from windtunnel.sim.engine.plan import StepPlan
from windtunnel.sim.engine.request import Request

NO_TIME = "no time left"
"""Why something was skipped that a longer run would have measured."""
PLAN = StepPlan(0)
"""A plan without admissions, chunks and preemptions: what is computed is the view's business."""
_GREEDY = SamplingParams(temperature=0.0)


class PointView:
    """An ``EngineView`` of requests in random blocks whose next grants are set by hand."""

    def __init__(
        self,
        lengths: Sequence[int],
        tokens: Sequence[Sequence[int]],
        num_blocks: int,
        block_size: int,
        *,
        seed: int = 0,
    ) -> None:
        """Requests of these many tokens, each with its token ids.

        Raises ValueError if their blocks are more than there are.
        """
        needed = [-(-length // block_size) for length in lengths]
        if sum(needed) > num_blocks - 1:
            raise ValueError(f"the requests need {sum(needed)} blocks, but the cache has {num_blocks - 1}")
        blocks = (np.random.default_rng(seed).permutation(num_blocks - 1) + 1).tolist()
        self.requests = []
        begin = 0
        for i, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            request = Request(i, 0, length, 1)
            request.block_ids = blocks[begin : begin + count]
            begin += count
            self.requests.append(request)
        self._tokens = dict(zip(self.requests, tokens, strict=True))
        self._grants: list[Grant] = []

    def chunks(self, begins: Sequence[int], ends: Sequence[int]) -> list[Grant]:
        """Grants from the first to the last of these tokens of each request, those of one token first."""
        grants = [
            Grant(request, end - begin, begin, samples=True)
            for request, begin, end in zip(self.requests, begins, ends, strict=True)
        ]
        grants.sort(key=lambda grant: grant.num_tokens > 1)
        self._grants = grants
        return grants

    def grants(self, plan: StepPlan) -> list[Grant]:  # noqa: ARG002
        """The latest ``chunks``."""
        return self._grants

    def token_ids(self, request: Request) -> Sequence[int]:
        """As given."""
        return self._tokens[request]

    def sampling_params(self, request: Request) -> SamplingParams:  # noqa: ARG002
        """Greedy."""
        return _GREEDY

    def running(self) -> list[tuple[Request, int]]:
        """None, so that adoption computes nothing."""
        return []
