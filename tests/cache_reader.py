"""A model that is a hash of its context, which it reads from a paged cache: the smallest real executor."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from windtunnel.executor.batch import EngineView, Grant
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepPlan, StepResult
from windtunnel.sim.engine.request import Request

VOCAB = 1000


def next_token(context: Sequence[int]) -> int:
    """What the model says after these tokens."""
    return int.from_bytes(blake2b(repr(list(context)).encode(), digest_size=8).digest(), "little") % VOCAB


def continued(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The model's answer to a prompt, token by token and without any cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class CacheReader:
    """Writes tokens into the cells of the blocks that the scheduler hands out, and reads its contexts from there.

    Any mistake in grants, positions or block ids makes it read a wrong token, or a cell that was never written.
    """

    def __init__(self, config: SchedulerConfig, step_ns: int = 1_000_000) -> None:
        self.block_size = config.block_size
        self.step_ns = step_ns
        self.num_caught_up_tokens = 0
        self.num_steps = 0
        self.view: Any = None
        self._cells: dict[int, int] = {}
        self._key_of: dict[int, int] = {}

    def adopt(self, view: EngineView) -> int:
        self.view = view
        self._cells.clear()
        self._key_of.clear()
        running = view.running()
        for request, num_tokens in running:
            self._write(request, 0, num_tokens)
        return sum(num_tokens for _, num_tokens in running)

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        grants = self.view.grants(plan)
        assert [grant.num_tokens > 1 for grant in grants] == sorted(grant.num_tokens > 1 for grant in grants)
        for admission in plan.admissions:
            self._catch_up(admission.request, admission.num_cached_tokens)
        for grant in grants:
            self._write(grant.request, grant.num_computed_tokens, grant.num_computed_tokens + grant.num_tokens)
        return StepResult(self.step_ns, sampled=[(g.request, self._sample(g)) for g in grants if g.samples])

    def _sample(self, grant: Grant) -> int:
        num_tokens = grant.num_computed_tokens + grant.num_tokens
        return next_token([self._cells[self._cell(grant.request, i)] for i in range(num_tokens)])

    def _catch_up(self, request: Request, num_tokens: int) -> None:
        if request.keys is None or not request.block_ids:
            return
        for j in range(num_tokens // self.block_size):
            if self._key_of.get(request.block_ids[j]) != request.keys.between(j, j + 1)[0]:
                self._write(request, j * self.block_size, (j + 1) * self.block_size)
                self.num_caught_up_tokens += self.block_size

    def _write(self, request: Request, first: int, last: int) -> None:
        tokens, size = self.view.token_ids(request), self.block_size
        for i in range(first, last):
            self._cells[self._cell(request, i)] = tokens[i]
            block = request.block_ids[i // size]
            self._key_of.pop(block, None)
            if (i + 1) % size == 0 and request.keys is not None:
                self._key_of[block] = request.keys.between(i // size, i // size + 1)[0]

    def _cell(self, request: Request, position: int) -> int:
        return request.block_ids[position // self.block_size] * self.block_size + position % self.block_size
