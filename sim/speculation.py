"""How drafts fare in a simulation: how many of their tokens hold, and what drafting costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul

from windtunnel.sim.engine.plan import Speculated, StepPlan, StepShape
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.engine.request import Request
from windtunnel.sim.rng import mixed


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Shares of drafts of which the first 1, 2, … tokens hold; never rising.

    These are the unconditional rates per position that vLLM reports (``spec_decode_per_position_acceptance_rates``)
    and takes for its own synthetic acceptance (``synthetic_acceptance_rates``).

    Raises ValueError for a rate outside 0 … 1 or one that is above the rate before.
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        for position, rate in enumerate(self.rates):
            if not 0.0 <= rate <= 1.0:
                raise ValueError(f"acceptance rates must lie between 0 and 1, got {rate} at position {position}")
            if position and rate > self.rates[position - 1]:
                raise ValueError(
                    f"acceptance rates must not rise, got {self.rates[position - 1]} and then {rate}: a draft token "
                    "holds only if all before it do"
                )

    @classmethod
    def fixed(cls, rate: float, num_speculative_tokens: int) -> Acceptance:
        """Every token holds with this probability if all before it did."""
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"the acceptance rate must lie between 0 and 1, got {rate}")
        return cls(tuple(accumulate(repeat(rate, num_speculative_tokens), mul)))

    @classmethod
    def of_length(cls, mean_length: float, num_speculative_tokens: int) -> Acceptance:
        """A verified draft yields so many tokens on average, spread as little as can be.

        Source: ``SpeculativeConfig.synthetic_acceptance_length`` of vLLM 0.32.  Raises ValueError for a length outside
        1 … num_speculative_tokens + 1.
        """
        if not 1.0 <= mean_length <= num_speculative_tokens + 1:
            raise ValueError(
                f"the acceptance length must lie between 1 and num_speculative_tokens + 1 "
                f"({num_speculative_tokens + 1}), got {mean_length}"
            )
        left = mean_length - 1.0
        return cls(tuple(min(1.0, max(0.0, left - position)) for position in range(num_speculative_tokens)))

    @classmethod
    def recorded(cls, num_accepted: Sequence[int], num_speculative_tokens: int) -> Acceptance:
        """As often as in a recording of how many tokens of each draft held.

        Raises ValueError for an empty recording, or a number outside 0 … num_speculative_tokens.
        """
        if not num_accepted:
            raise ValueError("the recording of accepted tokens is empty")
        for number, accepted in enumerate(num_accepted):
            if not 0 <= accepted <= num_speculative_tokens:
                raise ValueError(
                    f"draft {number} of the recording has {accepted} accepted tokens, which is not between 0 and "
                    f"num_speculative_tokens ({num_speculative_tokens})"
                )
        total = len(num_accepted)
        return cls(tuple(sum(n > position for n in num_accepted) / total for position in range(num_speculative_tokens)))

    @property
    def mean_length(self) -> float:
        """Tokens that a verified draft yields on average, the one of the model itself included."""
        return 1.0 + sum(self.rates)

    def num_accepted(self, chance: float) -> int:
        """How many tokens hold, for a number drawn uniformly from [0, 1)."""
        accepted = 0
        for rate in self.rates:
            if chance >= rate:
                break
            accepted += 1
        return accepted


class DraftCost:
    """Seconds that a drafter adds to a step: one pass over the step's tokens, then one token a pass.

    Source of the scheme: vLLM's eagle proposer, which runs ``num_speculative_tokens`` passes one after the other.
    """

    def __init__(self, drafter: CostModel, num_speculative_tokens: int) -> None:
        """``drafter`` prices a forward pass of the model that drafts."""
        self._drafter = drafter
        self._num_passes = num_speculative_tokens

    def time_s(self, shape: StepShape) -> float:
        """For a step of that shape."""
        num_seqs = shape.num_decode_seqs + shape.num_prefill_seqs
        context = shape.decode_context_tokens + shape.prefill_context_tokens + shape.prefill_tokens
        one_more = StepShape(num_seqs, context, 0, 0, 0, 0, num_seqs)
        first = shape._replace(num_sampled=num_seqs)
        later_s = float(self._drafter.step_time_s(one_more)) if self._num_passes > 1 else 0.0
        return float(self._drafter.step_time_s(first)) + (self._num_passes - 1) * later_s


class FixedDraftCost:
    """The same time for every step."""

    def __init__(self, draft_s: float) -> None:
        self._draft_s = draft_s

    def time_s(self, shape: StepShape) -> float:  # noqa: ARG002
        """For any step."""
        return self._draft_s


class Drafting:
    """Decides how the drafts of a step fare.

    Which tokens of a request hold is a function of the seed, the request and its position, so that other settings
    change nothing about it.
    """

    def __init__(
        self,
        acceptance: Acceptance,
        num_speculative_tokens: int,
        cost: DraftCost | FixedDraftCost | None = None,
        seed: int = 0,
    ) -> None:
        """Without a ``cost`` drafting takes no time."""
        self.acceptance = acceptance
        self.cost = cost
        self.num_speculative_tokens = num_speculative_tokens
        self._seed = mixed(seed)

    def outcome(self, plan: StepPlan) -> Speculated:
        """What the step's drafts come to, and a full draft for everybody who gets a token."""
        accepted, proposed = {}, {}
        for chunk in plan.chunks:
            request = chunk.request
            num_tokens = plan.num_drafts.get(request, 0)
            if num_tokens and request not in plan.padded:
                accepted[request] = min(num_tokens, self._num_holding(request, chunk.num_computed_tokens))
            if chunk.samples:
                proposed[request] = self.num_speculative_tokens
        return Speculated(accepted, proposed)

    def _num_holding(self, request: Request, num_computed_tokens: int) -> int:
        place = mixed((int(request.request_id) << 32) ^ num_computed_tokens)
        return self.acceptance.num_accepted(mixed(self._seed ^ place) / (1 << 64))
