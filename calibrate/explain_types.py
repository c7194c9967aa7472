"""What ``explain`` says and what it may be told besides a result: findings, and facts that no result file holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Severity(IntEnum):
    """What a finding means for whoever reads the result, from the least to the worst."""

    WEAK = 1
    """The numbers hold, but for less than they seem to say (few requests, a short run, no warm-up)."""
    LIMIT = 2
    """A limit of the server binds, or more is offered than it can serve."""
    MISLEADING = 3
    """The client, not the server, made the numbers, or hides a part of the wait."""
    INVALID = 4
    """The numbers do not describe what was meant to be measured."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong or binds, with its numbers and what to do."""

    kind: str
    """Stable name, such as ``seats`` or ``warm_cache``; ``docs/explain.md`` lists them."""
    severity: Severity
    score: float
    """0 … 1 within the severity: how much of the result it touches."""
    title: str
    sentence: str
    """What was found, with its numbers."""
    knob: str
    """What to turn, with a value where there is one."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """The numbers behind the sentence, by name; units are in the names."""

    @property
    def rank(self) -> tuple[int, float]:
        """What findings are ordered by: the more important one is larger."""
        return int(self.severity), self.score

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "kind": self.kind,
            "severity": self.severity.name.lower(),
            "score": round(self.score, 4),
            "title": self.title,
            "sentence": self.sentence,
            "knob": self.knob,
            "evidence": dict(self.evidence),
        }


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known besides the result; None is not known.  What is given here wins over the result's own facts."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_tokens: int | None = None
    request_rate: float | None = None
    """Requests a second that the client was asked for."""
    max_concurrency: int | None = None
    """Requests in flight that the client was asked for."""
    shared_prefix_share: float | None = None
    """Share of all prompt tokens that the workload itself repeats (system prompts, earlier turns), 0 … 1."""
    max_prefill_tokens_per_s: float | None = None
    """Prompt tokens a second that the deployment can compute at the very most, such as from its peak FLOP/s."""
    queue_s: float | None = None
    """Mean time in the server's queue, where the server counts it (Triton, ``request_queue_time_seconds``)."""
    compute_s: float | None = None
    """Mean time of computing one batch, where the server counts it."""
    mean_batch_size: float | None = None
    """Requests in an execution, where the server counts both."""
    wait_shares: Mapping[str, float] | None = None
    """Shares of the queueing by cause (``seats``, ``kv_cache``, ``budget``, ``step``), of simulations."""
    num_recomputed_tokens: int | None = None
    num_computed_tokens: int | None = None
    """All tokens that steps computed, recomputed ones included."""
    stalled: bool = False
    """The run ended because nothing could move any more."""
    running_by_engine: tuple[float, ...] = ()
    """Mean running requests of each engine."""
    waiting_by_engine: tuple[float, ...] = ()
    num_swapped_out_blocks: int | None = None
    counted_since_start: Mapping[str, int] | None = None
    """Counters of one look at the server (``num_preemptions``, ``prefix_query_tokens``, ``prefix_hit_tokens``): they
    count from its start on, so that they only bound what fell into the run.  None without such a look."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a result shows, the most important first."""

    name: str
    source: str
    findings: tuple[Finding, ...]
    measures: Mapping[str, Any]
    """What was computed on the way, such as ``in_flight`` and where the latency goes; units are in the names."""
    remarks: tuple[str, ...]
    """What is worth knowing and no fault."""
    not_checked: tuple[str, ...]
    """What could not be looked at, and what is missing for it."""

    @property
    def verdict(self) -> str:
        """One line: the first finding, or that there is none."""
        return self.findings[0].title if self.findings else "no fault found"

    @property
    def worst(self) -> Severity | None:
        """The severity of the first finding; None without any."""
        return self.findings[0].severity if self.findings else None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "name": self.name,
            "source": self.source,
            "verdict": self.verdict,
            "findings": [finding.to_dict() for finding in self.findings],
            "measures": dict(self.measures),
            "remarks": list(self.remarks),
            "not_checked": list(self.not_checked),
        }
