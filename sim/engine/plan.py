"""What passes through the seam between scheduler and executor: the shape of a step, its plan, its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from windtunnel.sim.engine.request import Request

NO_DRAFTS: Mapping[Request, int] = MappingProxyType({})


class StepShape(NamedTuple):
    """All that the cost of a step depends on.

    Every field is a whole number, or an array of them when many steps are priced at once.
    """

    num_decode_seqs: int
    """Requests that compute exactly their one newest token."""
    decode_context_tokens: int
    """Cached tokens that those read, summed, each one's own new token included."""
    num_prefill_seqs: int
    """Requests that compute a chunk of prompt (or of what a preemption lost)."""
    prefill_tokens: int
    """New tokens in those chunks."""
    prefill_context_tokens: int
    """Tokens already cached ahead of those chunks, summed over the chunks."""
    prefill_pairs: int
    """Query-key pairs of causal attention in the chunks: sum of n*c + n*(n+1)/2 for n new after c cached tokens."""
    num_sampled: int
    """Requests that yield a token, so rows of logits."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch: one for each decode and all of the chunks."""
        return self.num_decode_seqs + self.prefill_tokens


class Chunk(NamedTuple):
    """A prefill grant: ``num_tokens`` new tokens of ``request`` behind ``num_computed_tokens`` cached ones."""

    request: Request
    num_tokens: int
    num_computed_tokens: int
    num_new_blocks: int
    """Blocks handed out for it; they are the last ones of the request's list."""
    samples: bool
    """Whether it completes the prefill, so that the step yields a token."""


class Admission(NamedTuple):
    """A request that left the queue in this step."""

    request: Request
    num_cached_tokens: int
    """Tokens found in the prefix cache."""
    resumed: bool
    """Whether it had been preempted before."""


class Preemption(NamedTuple):
    """A running request that lost its cache so that another could go on."""

    request: Request
    num_computed_tokens: int
    """Computed tokens that were thrown away; 0 where they went to the CPU."""
    num_blocks: int
    num_free_blocks: int
    """Free blocks right after."""
    for_request: Request
    """Who needed the blocks; the victim itself where it was its own."""


class StepPlan:
    """One step: who computes how many tokens, and what changed in the batch.

    Decoding requests are not listed one by one; ``Scheduler.scheduled_tokens`` does that for those who need it.
    """

    __slots__ = (
        "admissions",
        "chunks",
        "grown",
        "left_out",
        "num_recomputed_tokens",
        "number",
        "owed",
        "preemptions",
        "shape",
    )

    rejections: Sequence[Request] = ()
    """Requests that the decision refused because they had waited too long.  Only some schedulers do that."""
    num_swapped_in_blocks: int = 0
    """KV blocks that come back from the CPU before the step.  Only some schedulers do that."""
    num_swapped_out_blocks: int = 0
    """KV blocks that go to the CPU before the step."""
    num_drafts: Mapping[Request, int] = NO_DRAFTS
    """Draft tokens that the step verifies.  Only speculative decoding has any."""
    padded: Sequence[Request] = ()
    """Requests whose drafts only fill the batch; none of them can be accepted."""

    def __init__(self, number: int) -> None:
        self.number = number
        """Counts the steps that compute something, from 0."""
        self.chunks: list[Chunk] = []
        """Prefill grants in the order of the decision."""
        self.grown: list[Request] = []
        """Decoding requests that were given one more block, the last of their list."""
        self.admissions: list[Admission] = []
        self.preemptions: list[Preemption] = []
        self.left_out: list[Request] = []
        """Running requests that get nothing in this step: the budget ran out or the decision broke off before them."""
        self.owed: list[Request] = []
        """Requests that yield a token in this step but have left the decode set since it was decided."""
        self.num_recomputed_tokens = 0
        """Tokens of this step that had been computed before and were thrown away by a preemption."""
        self.shape = EMPTY_SHAPE

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all is computed."""
        return not self.chunks and not self.shape.num_decode_seqs


class Speculated(NamedTuple):
    """What a step's speculation came to, per request."""

    num_accepted: Mapping[Request, int]
    """Of the drafts that the step verified, how many the model agreed with."""
    num_proposed: Mapping[Request, int]
    """Drafts that the drafter proposes next (synchronous scheduling; else they are placeholders of a fixed number)."""


class StepResult(NamedTuple):
    """What an executor answers: how long the step took, and how the drafts fared if there were any."""

    step_ns: int
    """From its begin to its end; of a pipeline, through all stages."""
    speculated: Speculated | None = None
    sampled: Sequence[tuple[Request, int]] | None = None
    """(request, token) of each request that the step yielded a token for; None from executors that compute none."""
    num_padded_tokens: int = 0
    """Rows computed for nobody, which fill the batch up to the size of a CUDA graph; ``StepShape`` has none of them."""


EMPTY_SHAPE = StepShape(0, 0, 0, 0, 0, 0, 0)
