"""Why a batching policy is slow: padding, slots that yield nothing, and waits for company.

A slot is a sequence's place in a step, so a step of 8 sequences holds 8 slots, and a token of use fills one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from windtunnel.sim.fleet.records import Fate
from windtunnel.sim.records import IntArray, Outcome, Records

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TokenWaste:
    """Tokens that the steps computed, and what they were good for.

    ``computed = useful + recomputed + padding + straggler + rejected drafts + abandoned``, exactly, for a run in which
    every request that was begun is finished or aborted; of one that the end of the run cuts off in its prompt, all of
    the prompt counts as useful.
    """

    computed_tokens: int
    useful_tokens: int
    """Prompt tokens that were not cached, and output tokens but each answer's last, which is never fed back."""
    recomputed_tokens: int
    """Tokens computed again because a preemption had thrown them away."""
    padding_tokens: int
    """Prompt tokens that only fill a slot up to the longest prompt of its batch."""
    straggler_tokens: int
    """Decodes of slots whose answer is complete already: the batch waits for its longest ("barrel effect")."""
    rejected_draft_tokens: int = 0
    """Draft tokens that the model did not agree with, or that came after an answer's end (speculative decoding)."""
    abandoned_tokens: int = 0
    """Computed for requests whose client gave up, or whose replica went away, before the answer was complete; also
    where another replica began anew."""

    @property
    def wasted_share(self) -> float | None:
        """Share of the computed tokens that were of no use; None if nothing was computed."""
        return 1.0 - self.useful_tokens / self.computed_tokens if self.computed_tokens else None


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Slots that were held, and output tokens that came of them."""

    slot_steps: int
    """Slots summed over all steps."""
    output_tokens: int
    """Tokens that requests got."""
    slots_mean: float
    """Slots held at a time, mean over the time in which steps ran."""
    output_throughput: float
    """Output tokens a second over that time."""
    slot_throughput: float
    """Slot-steps a second over that time: the output throughput if every slot yielded a token in every step."""

    @property
    def efficiency(self) -> float | None:
        """Output tokens for each slot-step; None without steps.

        For a batch that runs to completion and computes its prompts in one step: sum of output lengths / (slots *
        longest output).  Where prompts take several steps, those without a token lower it as well.
        """
        return self.output_tokens / self.slot_steps if self.slot_steps else None


def token_waste(records: Records) -> TokenWaste:
    """What became of the tokens that the run computed."""
    table = records.requests
    begun = table.scheduled_ns >= 0
    given_up = (table.outcome == Outcome.ABORTED) | (table.outcome == Outcome.LOST)
    fed_back = (table.num_output_tokens - 1).clip(min=0)
    needed = table.num_prompt_tokens - table.num_cached_tokens + fed_back
    useful = int(needed[begun & ~given_up].sum())
    recomputed = int(table.num_recomputed_tokens.sum())
    num_decodes = sum(int(replica.steps.num_decode_seqs.sum()) for replica in records.replicas)
    computed = num_decodes + sum(int(replica.steps.prefill_tokens.sum()) for replica in records.replicas)
    rest = max(0, computed - useful - recomputed)
    abandoned = min(rest, int(needed[begun & given_up].sum()))  # less, where the client left during its prompt
    rest -= abandoned
    if any(replica.runs_to_completion for replica in records.replicas):
        straggler = min(rest, max(0, num_decodes - int(fed_back[begun].sum())))
        return TokenWaste(computed, useful, recomputed, rest - straggler, straggler, 0, abandoned)
    if any(len(replica.drafts) for replica in records.replicas):
        lost = min(max(0, rest - _num_rejected(records)), _most_lost(records))
        return TokenWaste(computed, useful, recomputed, 0, 0, rest - lost, abandoned + lost)
    return TokenWaste(computed, useful, recomputed, 0, 0, 0, abandoned + rest)


def _num_rejected(records: Records) -> int:
    """Draft tokens that steps verified and that did not hold."""
    steps = [replica.steps for replica in records.replicas]
    return sum(int((each.num_draft_tokens - each.num_accepted_tokens).sum()) for each in steps)


def _most_lost(records: Records) -> int:
    """What requests that were tried again had computed at replicas that went away, at most.

    Less, where prompts were cached or not computed to their end.  It only divides what is neither useful nor a draft
    that did not hold; the rest of that came after the ends of answers.
    """
    if records.fleet is None:
        return 0
    stays, table = records.fleet.stays, records.requests
    ended_there = (table.outcome == Outcome.LOST)[stays.request] & (table.replica[stays.request] == stays.replica)
    again = (stays.fate == Fate.LOST) & ~ended_there
    fed_back = (stays.num_output_tokens - 1).clip(min=0)
    return int((table.num_prompt_tokens[stays.request] + fed_back)[again].sum())


def slot_use(records: Records) -> SlotUse:
    """How many slots the run held, and how well they were used."""
    slot_steps = busy_ns = slot_ns = 0
    for replica in records.replicas:
        steps = replica.steps
        slots, duration_ns = steps.num_decode_seqs + steps.num_prefill_seqs, steps.end_ns - steps.start_ns
        slot_steps += int(slots.sum())
        busy_ns += int(duration_ns.sum())
        slot_ns += int((slots * duration_ns).sum())
    output_tokens = int(records.requests.num_output_tokens.sum())
    busy_s = busy_ns / NS_PER_S
    return SlotUse(
        slot_steps,
        output_tokens,
        slot_ns / busy_ns if busy_ns else 0.0,
        output_tokens / busy_s if busy_ns else 0.0,
        slot_steps / busy_s if busy_ns else 0.0,
    )


def dispatch_wait_ns(records: Records) -> IntArray:
    """Arrival to dispatch of every request that was dispatched, in the order of the workload."""
    table = records.requests
    begun = table.scheduled_ns >= 0
    return (table.scheduled_ns - table.arrival_ns)[begun]


def formation_wait_ns(records: Records) -> IntArray:
    """The part of ``dispatch_wait_ns`` in which the request's replica computed nothing: it waited for company.

    The rest of that wait is queueing behind batches that ran.  Only engines that run batches to completion wait like
    that; requests of others are left out.
    """
    table = records.requests
    batched = np.array([*(replica.runs_to_completion for replica in records.replicas), False])  # last: by none
    begun = ((table.scheduled_ns >= 0) & batched[table.replica]).nonzero()[0]
    waits = np.zeros(len(begun), np.int64)
    for number, replica in enumerate(records.replicas):
        mine = table.replica[begun] == number
        rows = begun[mine]
        start_ns, end_ns = replica.steps.start_ns, replica.steps.end_ns
        idle_ns = _idle_before(start_ns, end_ns, table.scheduled_ns[rows])
        waits[mine] = idle_ns - _idle_before(start_ns, end_ns, table.arrival_ns[rows])
    return waits


def mean_batch_size(records: Records) -> float | None:
    """Requests whose prompts a step computes together, mean over the steps that compute prompts; None without any.

    Of batches that run to completion this is their size, if each computes its prompts in one step.
    """
    slots = steps = 0
    for replica in records.replicas:
        num_prefill = replica.steps.num_prefill_seqs
        slots += int(num_prefill.sum())
        steps += int((num_prefill > 0).sum())
    return slots / steps if steps else None


def _idle_before(start_ns: IntArray, end_ns: IntArray, times_ns: IntArray) -> IntArray:
    """Time from the beginning of the run up to each of these times in which no step ran."""
    if not len(end_ns):
        return times_ns
    busy_ns = np.concatenate([np.zeros(1, np.int64), np.cumsum(end_ns - start_ns)])
    num_begun = np.searchsorted(start_ns, times_ns, side="right")
    last_end_ns = end_ns[np.maximum(num_begun - 1, 0)]
    to_come_ns = np.where(num_begun > 0, last_end_ns - times_ns, 0).clip(min=0)
    idle_ns: IntArray = times_ns - busy_ns[num_begun] + to_come_ns
    return idle_ns
