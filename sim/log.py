"""Writes records while a simulation runs: whole rows are appended, columns come out at the end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import fields
from typing import Generic

import numpy as np

from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepPlan
from windtunnel.sim.engine.protocols import EngineLoad
from windtunnel.sim.engine.request import Request
from windtunnel.sim.records import (
    DraftTable,
    IntArray,
    Outcome,
    PreemptionTable,
    ReplicaRecords,
    RequestTable,
    SpanTable,
    StepTable,
    Table,
)

ROWS_PER_PACK = 1 << 14


class Rows(Generic[Table]):
    """Rows of whole numbers, packed into growing columns now and then so that a number takes 8 bytes."""

    def __init__(self, kind: type[Table]) -> None:
        self._kind = kind
        self._width = len(fields(kind))
        self._loose = array("q")
        self._num_packed = 0
        self._columns = [np.empty(ROWS_PER_PACK, np.int64) for _ in range(self._width)]

    def append(self, row: list[int]) -> None:
        """Add a row: the fields of the table in order."""
        self._loose.fromlist(row)  # twice as fast as extend
        if len(self._loose) == ROWS_PER_PACK * self._width:
            self._pack()

    def table(self, order_by: tuple[str, ...] = ()) -> Table:
        """The rows as a table, sorted by the named columns (the last is the first to count); none are left here."""
        self._pack()
        columns, self._columns = [column[: self._num_packed] for column in self._columns], []
        if order_by:
            names = [field.name for field in fields(self._kind)]
            order = np.lexsort([columns[names.index(name)] for name in order_by])
            for i, column in enumerate(columns):
                columns[i] = column[order]
        return self._kind(*columns)

    def _pack(self) -> None:
        rows = np.frombuffer(self._loose, dtype=np.int64).reshape(-1, self._width)
        start, end = self._num_packed, self._num_packed + len(rows)
        for i, values in enumerate(rows.T):
            if end > len(self._columns[i]):
                self._columns[i] = _doubled(self._columns[i])
            self._columns[i][start:end] = values
        self._num_packed = end
        self._loose = array("q")


class RequestLog:
    """One row a request, whoever served it."""

    def __init__(self) -> None:
        self._rows = Rows(RequestTable)

    def write(
        self, request: Request, outcome: Outcome, replica: int, due_ns: int, finish_ns: int, num_output_tokens: int
    ) -> None:
        """A request that came to an engine, and how it ended; its id is its row in the workload."""
        self._rows.append(
            [
                int(request.request_id),
                outcome,
                replica,
                due_ns,
                request.arrival_ns,
                request.scheduled_ns,
                request.first_token_ns,
                finish_ns,
                request.num_prompt_tokens,
                num_output_tokens,
                request.priority,
                request.num_preemptions,
                request.num_recomputed_tokens,
                request.num_cached_tokens,
                request.num_resumed_cached_tokens,
                request.num_resumed_query_tokens,
            ]
        )

    def write_unsent(self, row: int, due_ns: int, num_prompt_tokens: int, priority: int) -> None:
        """A request that the client still held when the run ended."""
        self._rows.append(
            [row, Outcome.UNFINISHED, -1, due_ns, -1, -1, -1, -1, num_prompt_tokens, 0, priority, 0, 0, 0, 0, 0]
        )

    def table(self) -> RequestTable:
        """All rows, in the order of the workload; they are no longer held here."""
        return self._rows.table(order_by=("request",))


class ReplicaLog:
    """Steps, token spans and preemptions of one replica."""

    def __init__(self, config: SchedulerConfig, runs_to_completion: bool = False) -> None:
        self._config = config
        self._runs_to_completion = runs_to_completion
        self._steps = Rows(StepTable)
        self._num_verified: list[int] = []
        self._num_accepted: list[int] = []
        self._last_end_ns = 0
        self._latency_ns = array("q") if config.pipeline_parallel_size > 1 else None
        self._spans = Rows(SpanTable)
        self._preemptions = Rows(PreemptionTable)

    def write_step(
        self,
        plan: StepPlan,
        start_ns: int,
        end_ns: int,
        load: EngineLoad,
        drafts: Sequence[tuple[int, int]] = (),
    ) -> None:
        """A step that ran, with the state of the engine while it did and the (verified, accepted) tokens of drafts."""
        num_running, num_waiting, num_free, num_free_cached = load
        num_decode_seqs, decode_context_tokens, num_prefill_seqs, prefill_tokens, _, _, _ = plan.shape
        num_verified = num_accepted = 0
        if drafts:
            num_verified, num_accepted = self._count_drafts(drafts)
        if self._latency_ns is not None:
            self._latency_ns.append(end_ns - start_ns)
        if start_ns < self._last_end_ns:
            start_ns = self._last_end_ns
        self._last_end_ns = end_ns
        self._steps.append(
            [
                start_ns,
                end_ns,
                num_running,
                num_waiting,
                num_decode_seqs,
                decode_context_tokens,
                num_prefill_seqs,
                prefill_tokens,
                num_free,
                num_free_cached,
                len(plan.preemptions),
                num_verified,
                num_accepted,
                plan.num_swapped_in_blocks,
                plan.num_swapped_out_blocks,
                plan.num_recomputed_tokens,
                -1,
            ]
        )

    def _count_drafts(self, drafts: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Book drafts by position; returns the tokens verified and accepted in all."""
        longest = max(verified for verified, _ in drafts)
        for counts in (self._num_verified, self._num_accepted):
            counts += [0] * (longest - len(counts))
        for verified, accepted in drafts:
            for position in range(verified):
                self._num_verified[position] += 1
            for position in range(accepted):
                self._num_accepted[position] += 1
        return sum(verified for verified, _ in drafts), sum(accepted for _, accepted in drafts)

    def write_preemptions(self, plan: StepPlan, now_ns: int) -> None:
        """The plan's preemptions."""
        for victim, num_computed, num_blocks, num_free, for_request in plan.preemptions:
            self._preemptions.append(
                [
                    now_ns,
                    plan.number,
                    int(victim.request_id),
                    num_computed,
                    num_blocks,
                    num_free,
                    int(for_request.request_id),
                ]
            )

    def write_spans(self, request: Request, spans: list[tuple[int, int]]) -> None:
        """When a request got its tokens."""
        row = int(request.request_id)
        for first_step, count in spans:
            self._spans.append([row, first_step, count])

    def latency_ns(self) -> IntArray | None:
        """How long each step took through the stages of a pipeline; None without one."""
        return None if self._latency_ns is None else np.array(self._latency_ns, np.int64)

    def records(self) -> ReplicaRecords:
        """What the replica did, as columns."""
        return ReplicaRecords(
            steps=self._steps.table(),
            spans=self._spans.table(order_by=("first_step", "request")),
            preemptions=self._preemptions.table(),
            drafts=DraftTable(
                np.arange(len(self._num_verified), dtype=np.int64),
                np.array(self._num_verified, np.int64),
                np.array(self._num_accepted, np.int64),
            ),
            num_usable_blocks=self._config.num_usable_blocks,
            block_size=self._config.block_size,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_model_len=self._config.max_model_len,
            runs_to_completion=self._runs_to_completion,
        )


def _doubled(column: IntArray) -> IntArray:
    longer = np.empty(2 * len(column), np.int64)  # the new half costs nothing until it is written to
    longer[: len(column)] = column
    return longer
