"""The law by which a paced step lasts; needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a step lasts, and where is noted how late it was."""

    base_ms: float
    token_ms: float
    seq_ms: float
    context_ms: float
    log: str | None = None
    """A file that gets a line a step: nanoseconds that were left when the forward pass was over (negative if it took
    longer than the law allows), and by how many the step ended late."""

    def step_ns(self, output: Any) -> int:
        """Of the step with this SchedulerOutput."""
        context: int = sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        context += sum(output.scheduled_cached_reqs.num_computed_tokens)
        ms: float = self.base_ms + self.token_ms * output.total_num_scheduled_tokens
        ms += self.seq_ms * len(output.num_scheduled_tokens) + self.context_ms * context
        return round(1e6 * ms)
