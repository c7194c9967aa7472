"""What a deployment runs into: for each instant of a run, which of its limits held it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from windtunnel.sim.cost.fitted import FittedCost
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.fleet.fleet import Fleet, replicas_by_cost
from windtunnel.sim.metrics.load import durations, num_tokens
from windtunnel.sim.records import Records, ReplicaRecords, RequestTable, StepTable
from windtunnel.sim.system import System

SEATS, BUDGET, KV_BLOCKS, QUEUE = "max_num_seqs", "max_num_batched_tokens", "kv_blocks", "queue"
COMPUTE, BANDWIDTH, IDLE = "compute", "bandwidth", "idle"
LIMITS = (SEATS, BUDGET, KV_BLOCKS, QUEUE, COMPUTE, BANDWIDTH, IDLE)
"""In the order in which reports list them; shares of time that add up to 1."""

MEANING = {
    SEATS: "requests wait while max_num_seqs run",
    BUDGET: "requests wait while steps hold max_num_batched_tokens",
    KV_BLOCKS: "requests wait, or are preempted, for want of KV blocks",
    QUEUE: "requests wait for another reason: a batch that forms, a policy, a tenant's limit",
    COMPUTE: "nobody waits; the step takes the time of its tokens' arithmetic",
    BANDWIDTH: "nobody waits; the step takes the time of reading weights and KV cache, and its fixed parts",
    IDLE: "nothing runs",
}

MIN_WAITING_SHARE = 0.1
"""Share of the time with requests waiting from which on what they wait for is what binds."""
_NEARLY_FULL = 0.98
"""Share of the token budget from which on a step counts as full: what is left fits no useful chunk."""


@dataclass(frozen=True, slots=True)
class Binding:
    """The limit that holds the deployment back most, and how the time divides among all of them."""

    name: str
    """One of ``LIMITS``."""
    shares: Mapping[str, float]
    """Share of the time (all replicas) under each of ``LIMITS``."""

    @property
    def waiting_share(self) -> float:
        """Share of the time with requests waiting."""
        return sum(self.shares[name] for name in (SEATS, BUDGET, KV_BLOCKS, QUEUE))


def binding_of(shares: Mapping[str, float]) -> Binding:
    """What binds, by shares of the time: what requests wait for, where they wait often enough; else the steps' time."""
    waits = {name: shares[name] for name in (SEATS, BUDGET, KV_BLOCKS, QUEUE)}
    if sum(waits.values()) >= MIN_WAITING_SHARE:
        return Binding(max(waits, key=lambda name: waits[name]), shares)
    return Binding(COMPUTE if shares[COMPUTE] >= shares[BANDWIDTH] else BANDWIDTH, shares)


def time_shares(records: Records, served: System | Fleet, start_ns: int, end_ns: int) -> dict[str, float]:
    """How the time between two moments divides among ``LIMITS``, averaged over replicas.

    A step whose decision left requests waiting belongs to the limit that kept them out: no seat, no budget, no room in
    the pool for the longest of the prompts.  Other steps are divided into what their tokens took and what they take
    anyway: the step of one decode, and reading the context.
    """
    total_ns = max(end_ns - start_ns, 1) * max(len(records.replicas), 1)
    spent_ns = dict.fromkeys(LIMITS, 0.0)
    longest = int(records.requests.num_prompt_tokens.max(initial=1))
    owned = [(cost, replica) for cost, replicas in replicas_by_cost(records, served) for replica in replicas]
    for cost, replica in owned:
        lasted = durations(replica.steps, start_ns, end_ns).astype(np.float64)
        limit = _limits(replica, served, longest, records.requests)
        for name, number in ((SEATS, 0), (BUDGET, 1), (KV_BLOCKS, 2), (QUEUE, 3)):
            spent_ns[name] += float(lasted[limit == number].sum())
        free = limit < 0
        fixed = np.minimum(_fixed_share(replica.steps, cost), 1.0)
        spent_ns[BANDWIDTH] += float((lasted * fixed)[free].sum())
        spent_ns[COMPUTE] += float((lasted * (1.0 - fixed))[free].sum())
    shares = {name: spent / total_ns for name, spent in spent_ns.items()}
    shares[IDLE] = max(0.0, 1.0 - sum(shares.values()))
    return shares


def _limits(replica: ReplicaRecords, served: System | Fleet, longest_prompt: int, requests: RequestTable) -> np.ndarray:
    """For each step the number of the limit (in the order of ``LIMITS``) that left requests waiting, or -1."""
    steps, seats, budget = replica.steps, replica.max_num_seqs, replica.max_num_batched_tokens
    if isinstance(served, System):
        seats = min(seats, served.config.max_num_active_seqs or seats)
        budget = min(budget, served.config.max_num_scheduled_tokens or budget)
    free_tokens = steps.num_free_blocks * replica.block_size
    is_short = (steps.num_preempted > 0) | (free_tokens < longest_prompt)
    is_full = steps.num_running >= seats
    kept_out = np.select([is_full, num_tokens(steps) >= _NEARLY_FULL * budget, is_short], [0, 1, 2], default=3)
    waited = (steps.num_waiting > 0) | (steps.num_preempted > 0)
    if served.gateway is not None or (isinstance(served, Fleet) and served.routing.router == "shared_queue"):
        waited |= is_full  # others wait before the server, where its steps do not see them
    if served.gateway is not None:
        waited |= _are_held(steps, requests)
    return np.where(waited, kept_out, -1)


def _are_held(steps: StepTable, requests: RequestTable) -> np.ndarray:
    """For each step, whether a request that was there when the step before it began is in no step yet."""
    if not len(steps):
        return np.zeros(0, np.bool_)
    there = requests.due_ns >= 0
    begun_ns = np.where(requests.scheduled_ns >= 0, requests.scheduled_ns, requests.finish_ns)[there]
    before_ns = np.append(steps.start_ns[:1], steps.start_ns[:-1])
    came = np.searchsorted(np.sort(requests.arrival_ns[there]), before_ns, "left")
    held: np.ndarray = came > np.searchsorted(np.sort(begun_ns), steps.start_ns, "right")
    return held


def _fixed_share(steps: StepTable, cost: CostModel) -> np.ndarray:
    """Share of each step's price that it costs to run any step at all and to read the context of its decodes."""
    if isinstance(cost, FittedCost) and cost.refuse_outside:
        cost = FittedCost(cost.parameters, cost.evidence)  # shapes are asked for that no step had
    if not len(steps):
        return np.zeros(0)
    decodes: Any = steps.num_decode_seqs
    context: Any = steps.decode_context_tokens
    none: Any = np.zeros_like(decodes)
    alone_s = float(cost.step_time_s(StepShape(1, 1, 0, 0, 0, 0, 1)))
    reading_s = cost.step_time_s(StepShape(decodes, context, none, none, none, none, decodes)) - cost.step_time_s(
        StepShape(decodes, decodes, none, none, none, none, decodes)
    )
    price_s = np.maximum((steps.end_ns - steps.start_ns) / 1e9, 1e-12)
    share: np.ndarray = (alone_s + np.asarray(reading_s)) / price_s
    return share
