"""What a run leaves behind, as columns: requests, steps, token spans and preemptions.

Times are whole nanoseconds from the start of the run; -1 says that it never happened.  A request's token times are
not stored one by one: a span says that it got one token in each of ``count`` consecutive steps, and the steps say
when those ended.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from windtunnel.sim.fleet.records import FleetRecords, LifeTable, ScalingTable, StayTable, TransferTable

IntArray = npt.NDArray[np.int64]


class Outcome(IntEnum):
    """How a request ended."""

    FINISHED = 0
    UNFINISHED = 1
    """Still waiting or running when the run ended (a horizon was set, or nothing could move any more)."""
    REJECTED = 2
    """Refused: on arrival, for example because the prompt does not fit max_model_len, or after too long in a queue."""
    ABORTED = 3
    """The client gave up."""
    LOST = 4
    """Its replica went away before the answer was complete (fleets)."""


@dataclass(frozen=True, slots=True)
class RequestTable:
    """One row a request, in the order of the workload."""

    request: IntArray
    """Row of the workload."""
    outcome: IntArray
    """``Outcome``."""
    replica: IntArray
    due_ns: IntArray
    """When the client wanted to send it."""
    arrival_ns: IntArray
    """When the engine got it; later than ``due_ns`` if a client-side limit held it back.

    TTFT and E2EL count from here.
    """
    scheduled_ns: IntArray
    """Start of the first step that ran any of it."""
    first_token_ns: IntArray
    finish_ns: IntArray
    """When its last token came (or it was refused or aborted)."""
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    """Tokens it really got."""
    priority: IntArray
    num_preemptions: IntArray
    num_recomputed_tokens: IntArray
    """Tokens computed again because a preemption had thrown them away."""
    num_cached_tokens: IntArray
    """Prompt tokens found in the prefix cache at the first admission."""
    num_resumed_cached_tokens: IntArray
    """The same at re-admissions after preemption, summed."""
    num_resumed_query_tokens: IntArray
    """Tokens looked up at those re-admissions, summed."""

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True, slots=True)
class StepTable:
    """One row a step of one replica, in order.  State columns are as they were while the step ran.

    Steps of a pipeline overlap; each then starts, here, when the one before it ends, so that durations add up.
    """

    start_ns: IntArray
    end_ns: IntArray
    num_running: IntArray
    num_waiting: IntArray
    num_decode_seqs: IntArray
    decode_context_tokens: IntArray
    num_prefill_seqs: IntArray
    prefill_tokens: IntArray
    num_free_blocks: IntArray
    """Blocks that could be handed out, cached ones included."""
    num_cached_blocks: IntArray
    """Those of the free blocks that still hold a findable prefix."""
    num_preempted: IntArray
    """Requests preempted by the decision for this step."""
    num_draft_tokens: IntArray
    """Draft tokens that the step verified (speculative decoding)."""
    num_accepted_tokens: IntArray
    """Those of them that held."""
    num_swapped_in_blocks: IntArray
    """KV blocks copied from the CPU before the step (swapping)."""
    num_swapped_out_blocks: IntArray
    """KV blocks copied to the CPU before the step."""
    recomputed_tokens: IntArray
    """Those of ``prefill_tokens`` that had been computed before and were thrown away by a preemption.

    -1 where that was not recorded."""
    decode_only_ns: IntArray
    """The part of the step that its decodes alone would have taken by its cost model, the rest being what its prompt
    chunks added: all of it where there are no chunks, 0 where there are no decodes; -1 where nobody priced that."""

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Runs of tokens: ``request`` got one at the end of each of the steps first_step … first_step + count - 1.

    With speculative decoding a step may yield several tokens of one request; they come at once and count as one.
    """

    request: IntArray
    first_step: IntArray
    count: IntArray

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True, slots=True)
class PreemptionTable:
    """One row a preemption, in order."""

    time_ns: IntArray
    """When it was decided: the start of the step whose decision it was."""
    step: IntArray
    """Number of that step."""
    request: IntArray
    num_computed_tokens: IntArray
    """Computed tokens that were thrown away."""
    num_blocks: IntArray
    """KV blocks that were given back."""
    num_free_blocks: IntArray
    """Free blocks right after."""
    for_request: IntArray
    """The running request that needed the blocks; the victim itself where it was its own."""

    def __len__(self) -> int:
        return len(self.time_ns)


@dataclass(frozen=True, slots=True)
class DraftTable:
    """One row a position of a draft, from 0: how often it was verified, and how often it held."""

    position: IntArray
    num_verified: IntArray
    num_accepted: IntArray

    def __len__(self) -> int:
        return len(self.position)


@dataclass(frozen=True, slots=True)
class ReplicaRecords:
    """What one replica did, and what it was."""

    steps: StepTable
    spans: SpanTable
    preemptions: PreemptionTable
    drafts: DraftTable
    """Empty without speculative decoding."""
    num_usable_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int = 0
    """0 where it is not known."""
    runs_to_completion: bool = False
    """Whether batches went in and came out together (static and dynamic batching): only those pad and wait."""


@dataclass(frozen=True, slots=True)
class Records:
    """Everything that a run measured; metrics and reports are computed from this alone."""

    requests: RequestTable
    replicas: tuple[ReplicaRecords, ...]
    end_ns: int
    """When the run ended: the last finish, or the horizon."""
    stalled: bool = False
    """The run ended because nothing could move any more: the head of the queue can never be admitted, or requests keep
    preempting each other without ever getting a token.  vLLM would spin for ever."""
    fleet: FleetRecords | None = None
    """What a fleet adds; None for the replicas of one ``System``."""


def is_unservable(records: Records) -> npt.NDArray[np.bool_]:
    """Which requests were refused because their prompts leave no room for an answer, whatever the load."""
    longest = max((replica.max_model_len for replica in records.replicas), default=0)
    table = records.requests
    if not longest:
        return np.zeros(len(table), np.bool_)
    found: npt.NDArray[np.bool_] = (table.outcome == Outcome.REJECTED) & (table.num_prompt_tokens >= longest)
    return found


AnyTable = (
    RequestTable
    | StepTable
    | SpanTable
    | PreemptionTable
    | DraftTable
    | LifeTable
    | StayTable
    | ScalingTable
    | TransferTable
)
Table = TypeVar("Table", bound=AnyTable)


def table_columns(table: AnyTable) -> dict[str, IntArray]:
    """The table's columns by name, in order: what a file or a DataFrame is made of."""
    return {field.name: getattr(table, field.name) for field in fields(table)}


def empty_table(kind: type[Table]) -> Table:
    """A table of that kind with no rows."""
    return kind(*(np.zeros(0, np.int64) for _ in fields(kind)))
