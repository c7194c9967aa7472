"""One request, and where it stands in the engine."""

from __future__ import annotations

from enum import IntEnum

from windtunnel.sim.engine.keys import BlockKeys


class Status(IntEnum):
    """Where a request is in its life."""

    WAITING = 0
    """Queued, never admitted."""
    RUNNING = 1
    SWAPPED = 2
    """Its cache is on the CPU."""
    PREEMPTED = 3
    """Queued again after it lost its cache."""
    FINISHED = 4
    ABORTED = 5
    REJECTED = 6
    """Refused because it had waited too long."""


class Request:
    """A user's request and its progress.

    ``num_output_tokens`` is the truth that only the workload knows: it decides when the request is finished, and
    nothing else may read it.  While the request decodes, its progress is kept by the ``DecodeSet`` (``base`` is
    relative to the set's clock); ask the scheduler for ``num_computed_tokens`` and ``num_tokens``.
    """

    __slots__ = (
        "arrival_ns",
        "base",
        "block_ids",
        "decoding",
        "exit_clock",
        "finish_clock",
        "first_token_ns",
        "high_water_tokens",
        "keys",
        "max_tokens",
        "may_emit",
        "num_cached_tokens",
        "num_emitted",
        "num_findable_blocks",
        "num_output_tokens",
        "num_owed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_recomputed_tokens",
        "num_resumed_cached_tokens",
        "num_resumed_query_tokens",
        "num_start_tokens",
        "order",
        "priority",
        "request_id",
        "scheduled_ns",
        "span_start",
        "spans",
        "status",
        "stop_after",
    )

    def __init__(
        self,
        request_id: int | str,
        arrival_ns: int,
        num_prompt_tokens: int,
        num_output_tokens: int,
        max_tokens: int | None = None,
        priority: int = 0,
        keys: BlockKeys | None = None,
    ) -> None:
        self.request_id = request_id
        self.arrival_ns = arrival_ns
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = num_output_tokens
        self.max_tokens = num_output_tokens if max_tokens is None else max_tokens
        self.priority = priority
        self.keys = keys
        """Identity of its blocks; None when prefix caching does not matter."""

        self.status = Status.WAITING
        self.order = -1
        """Number of its latest admission: the order of the running requests."""
        self.stop_after = num_output_tokens
        """Output tokens after which it stops: its true length, or fewer where max_model_len cuts it."""
        self.may_emit = self.max_tokens
        """Output tokens after which it is no longer scheduled, as far as the scheduler can know beforehand."""
        self.num_emitted = 0
        """Output tokens so far; while decoding, those before it began to."""
        self.num_owed_tokens = 0
        """Tokens of steps under way that the decode set does not count for it."""
        self.num_start_tokens = 0
        """Known tokens when its latest prefill, or run of decodes, began to yield tokens."""
        self.base = 0
        """Computed tokens; while decoding, computed tokens less the clock of the decode set."""
        self.decoding = False
        self.exit_clock = -1
        self.finish_clock = -1
        self.span_start = -1
        """Step that yielded the first token of the present run of one token a step."""
        self.block_ids: list[int] = []
        self.num_findable_blocks = 0
        """Leading blocks that the prefix index knows."""

        self.scheduled_ns = -1
        self.first_token_ns = -1
        self.spans: list[tuple[int, int]] = []
        """(first step, count): it got one token at the end of each of these steps."""
        self.num_preemptions = 0
        self.high_water_tokens = 0
        """Most tokens it had computed before a preemption threw them away."""
        self.num_recomputed_tokens = 0
        self.num_cached_tokens = 0
        self.num_resumed_cached_tokens = 0
        self.num_resumed_query_tokens = 0

    def limit(self, max_model_len: int) -> None:
        """Cut its answer to what ``max_model_len`` leaves room for.

        Raises ValueError for a prompt that vLLM's API refuses because it leaves no room for an answer.
        """
        room = max_model_len - self.num_prompt_tokens
        if room < 1:
            raise ValueError(
                f"request {self.request_id}: a prompt of {self.num_prompt_tokens} tokens leaves no room for an answer "
                f"within max_model_len ({max_model_len}): shorten it or raise max_model_len"
            )
        self.stop_after = min(self.num_output_tokens, room)
        self.may_emit = min(self.max_tokens, room)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name.lower()})"
