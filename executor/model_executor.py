"""What all executors that compute a model have in common: from a decided step to sampled tokens, and adoption."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from windtunnel.executor.all_reduce import AllReduceTable, step_all_reduce_s
from windtunnel.executor.batch import EngineView, Grant
from windtunnel.executor.batch_builder import BatchBuilder, HostBatch
from windtunnel.executor.cache import PagedKvCache
from windtunnel.executor.model import Decoder
from windtunnel.executor.residency import Residency
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepPlan, StepResult


class StepTiming(NamedTuple):
    """Where the time of a step went."""

    build_ns: int
    """Reading the plan and building the batch on the host."""
    forward_ns: int
    """The model, the copy of its inputs included."""
    sample_ns: int
    """Choosing the tokens and fetching them."""
    all_reduce_ns: int = 0
    """Not computed here but read from measurements: what the ranks of a sharded model wait for each other."""

    @property
    def step_ns(self) -> int:
        """All of it."""
        return sum(self)


class ModelExecutor:
    """Computes the steps of one engine with a model and a paged cache.

    It works for the engine that it has adopted; whenever another executor has run steps of that engine, it must adopt
    again.  It can be used from one thread at a time.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedKvCache,
        *,
        max_catch_up_tokens: int = 2048,
        all_reduce: AllReduceTable | None = None,
    ) -> None:
        """``max_catch_up_tokens`` bounds one forward pass of what is recomputed outside steps.

        ``all_reduce`` says what the communication of a sharded model takes: it is added to ``step_ns`` and told in
        ``last_timing.all_reduce_ns``.  Without it a rank's steps lack that time; a model in one piece has none.

        Raises ValueError if model and cache are on different devices, or the table does not know the number of ranks.
        """
        if cache.keys[0].device != model.device:
            raise ValueError(f"the model is on {model.device} but the cache on {cache.keys[0].device}: use one device")
        if max_catch_up_tokens < 1:
            raise ValueError(f"max_catch_up_tokens must be at least 1, got {max_catch_up_tokens}")
        self.model = model
        self.cache = cache
        self.residency = Residency(cache.block_size)
        self.num_caught_up_tokens = 0
        """Tokens recomputed because a prefix hit had never been computed here; their time is in no step."""
        self.last_timing: StepTiming | None = None
        """Of the latest step."""
        self._view: EngineView | None = None
        self._builder = BatchBuilder(cache.block_size, model.max_model_len)
        self._max_catch_up_tokens = max_catch_up_tokens
        self._all_reduce = all_reduce
        self._num_padded_tokens = 0  # of the latest pass
        self._all_reduce_ns(1)

    def check_config(self, config: SchedulerConfig) -> None:
        """Raises ValueError if the executor cannot run the steps of a scheduler with that config."""
        for name, theirs, ours in (
            ("block_size", config.block_size, self.cache.block_size),
            ("num_gpu_blocks", config.num_gpu_blocks, self.cache.num_blocks),
        ):
            if theirs != ours:
                raise ValueError(f"{name} is {theirs} for the scheduler but {ours} for the executor's cache")
        if config.max_model_len > self.model.max_model_len:
            raise ValueError(
                f"max_model_len ({config.max_model_len}) exceeds the {self.model.max_model_len} tokens that the "
                "executor was built for"
            )
        if config.num_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens must be 0 for a real executor, got {config.num_speculative_tokens}"
            )
        if config.max_steps_under_way != 1:
            raise ValueError(
                f"a real executor takes one step at a time, but {config.max_steps_under_way} may be under way: "
                "turn async_scheduling off and set pipeline_parallel_size to 1"
            )
        self._all_reduce_ns(config.max_num_batched_tokens)

    def adopt(self, view: EngineView) -> int:
        """Work for that engine from now on; returns the tokens that were recomputed for it.

        The tokens that it knows are the truth.  Nothing in the cache counts as computed; keys and values of the
        running requests are computed anew into their own blocks.  To be called between steps.
        """
        self._view = view
        self._builder.clear()
        self.residency.clear()
        try:
            return self._recompute(
                [grant for request, number in view.running() for grant in self.residency.missing(request, number)]
            )
        except BaseException:
            self.residency.clear()  # it notes before it computes
            raise

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step: the tokens that it yields, and how long it took.

        ``step_ns`` covers all that the step needs: reading the plan, building the batch, the model, sampling.  Prefix
        hits that have to be recomputed first are not in it.

        Raises ValueError if no engine was adopted, for steps that swap blocks or verify drafts, and if the operations
        sampled what is no token.
        """
        view = self._view
        if view is None:
            raise ValueError("the executor works for no engine yet: call adopt(view) first")
        _check(plan)
        begin_ns = self._now_ns()
        grants = view.grants(plan)
        try:
            missing = self.residency.missing_hits(plan, grants)
            begin_ns += self._catch_up(missing) if missing else 0
            if not grants:
                return StepResult(max(1, self._now_ns() - begin_ns), sampled=())
            host = self._builder.build(grants, view)
            self.residency.note(grants)
            built_ns = self._now_ns()
            tokens, forward_ns = self._compute(host)
            _check_tokens(tokens, self.model.config.vocab_size)
        except BaseException:
            self.residency.clear()  # it notes before it computes, and who knows what was written
            raise
        computed_ns = max(1, self._now_ns() - begin_ns)
        build_ns = built_ns - begin_ns
        padded = self._num_padded_tokens
        all_reduce_ns = self._all_reduce_ns(len(host.token_ids) + padded)
        self.last_timing = StepTiming(build_ns, forward_ns, computed_ns - build_ns - forward_ns, all_reduce_ns)
        sampled = list(zip(host.sampled, tokens, strict=True))
        return StepResult(computed_ns + all_reduce_ns, sampled=sampled, num_padded_tokens=padded)

    def close(self) -> None:
        """Let the engine and the cache go; the executor cannot be used afterwards."""
        self._view = None
        self._builder.clear()
        self.residency.clear()
        self.cache.keys.clear()
        self.cache.values.clear()

    def _now_ns(self) -> int:
        """The clock that steps are timed by."""
        return time.perf_counter_ns()

    def _compute(self, host: HostBatch) -> tuple[list[int], int]:
        """One forward pass: the tokens of its sampled rows, and the nanoseconds before they were sampled."""
        begin_ns = self._now_ns()
        with torch.inference_mode():
            logits = self.model.forward(host.to_device(self.model.device), self.cache)
            forward_ns = self._now_ns() - begin_ns
            if not host.sampled:
                return [], forward_ns
            sampled = self.model.ops.sample(logits, *host.sampling_tensors(self.model.device))
        return sampled.tolist(), forward_ns

    def _all_reduce_ns(self, num_tokens: int) -> int:
        """What the ranks of a sharded model would spend on communication in a pass over so many rows."""
        if self._all_reduce is None:
            return 0
        bytes_per_element = int(self.model.dtype.itemsize)
        seconds = step_all_reduce_s(
            self._all_reduce, self.model.config, num_tokens, bytes_per_element=bytes_per_element
        )
        return round(seconds * 1e9)

    def _catch_up(self, missing: list[Grant]) -> int:
        """Recompute prefix hits; returns the nanoseconds that it took."""
        begin_ns = self._now_ns()
        self.num_caught_up_tokens += self._recompute(missing)
        return self._now_ns() - begin_ns

    def _recompute(self, grants: list[Grant]) -> int:
        """Compute these grants, in order, in as few passes as their size allows; returns their tokens."""
        assert self._view is not None
        for part in _parts(grants, self._max_catch_up_tokens):
            part.sort(key=_is_longer_than_a_token)
            self._compute(self._builder.build(part, self._view))
        return sum(grant.num_tokens for grant in grants)


def _check(plan: StepPlan) -> None:
    if plan.num_drafts:
        raise ValueError("a step verifies drafts, which real executors cannot do: use a scheduler without speculation")
    if plan.num_swapped_in_blocks or plan.num_swapped_out_blocks:
        raise ValueError("a step swaps blocks, which real executors cannot do: use a scheduler that recomputes")


def _check_tokens(tokens: list[int], vocab_size: int) -> None:
    """One that does not exist would be looked up in the embedding table by the next step, and fail all its requests."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = [token for token in tokens if not 0 <= token < vocab_size]
        raise ValueError(f"sampled token ids must be in [0, vocab_size = {vocab_size}), got {wrong}")


def _parts(grants: Iterable[Grant], most: int) -> Iterator[list[Grant]]:
    """The grants in order, cut and packed into lists of at most ``most`` tokens."""
    part: list[Grant] = []
    left = most
    for grant in grants:
        request, num_tokens, computed, _ = grant
        while num_tokens > 0:
            taken = min(num_tokens, left)
            part.append(Grant(request, taken, computed, False))
            computed, num_tokens, left = computed + taken, num_tokens - taken, left - taken
            if not left:
                yield part
                part, left = [], most
    if part:
        yield part


def _is_longer_than_a_token(grant: Grant) -> bool:
    return grant.num_tokens > 1
