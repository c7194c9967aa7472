"""Writes records while a simulation runs: appends to flat arrays, which become columns at the end."""

from __future__ import annotations

from array import array
from dataclasses import fields

import numpy as np
import numpy.typing as npt

from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepPlan
from windtunnel.sim.engine.request import Request
from windtunnel.sim.records import (
    Outcome,
    PreemptionTable,
    ReplicaRecords,
    RequestTable,
    SpanTable,
    StepTable,
    Table,
    empty_table,
)


class RequestLog:
    """One row a request, whoever served it."""

    def __init__(self) -> None:
        self._rows = array("q")

    def write(
        self, request: Request, outcome: Outcome, replica: int, due_ns: int, finish_ns: int, num_output_tokens: int
    ) -> None:
        """A request that came to an engine, and how it ended; its id is its row in the workload."""
        self._rows.extend(
            (
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
            )
        )

    def write_unsent(self, row: int, due_ns: int, num_prompt_tokens: int, priority: int) -> None:
        """A request that the client still held when the run ended."""
        self._rows.extend(
            (row, Outcome.UNFINISHED, -1, due_ns, -1, -1, -1, -1, num_prompt_tokens, 0, priority, 0, 0, 0, 0, 0)
        )

    def rows(self) -> list[int]:
        """Workload rows of the requests written so far."""
        return _matrix(self._rows, RequestTable)[:, 0].tolist()

    def table(self) -> RequestTable:
        """All rows, in the order of the workload."""
        rows = _matrix(self._rows, RequestTable)
        return _table(rows[np.argsort(rows[:, 0], kind="stable")], RequestTable)


class ReplicaLog:
    """Steps, token spans and preemptions of one replica."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._steps = array("q")
        self._spans = array("q")
        self._preemptions = array("q")

    def write_step(
        self,
        plan: StepPlan,
        start_ns: int,
        end_ns: int,
        num_running: int,
        num_waiting: int,
        num_free: int,
        num_free_cached: int,
    ) -> None:
        """A step that ran, with the state of the engine while it did."""
        shape = plan.shape
        self._steps.extend(
            (
                start_ns,
                end_ns,
                num_running,
                num_waiting,
                shape.num_decode_seqs,
                shape.decode_context_tokens,
                shape.num_prefill_seqs,
                shape.prefill_tokens,
                num_free,
                num_free_cached,
                len(plan.preemptions),
            )
        )

    def write_preemptions(self, plan: StepPlan, now_ns: int) -> None:
        """The plan's preemptions."""
        for victim, num_computed, num_blocks, num_free, for_request in plan.preemptions:
            self._preemptions.extend(
                (
                    now_ns,
                    plan.number,
                    int(victim.request_id),
                    num_computed,
                    num_blocks,
                    num_free,
                    int(for_request.request_id),
                )
            )

    def write_spans(self, request: Request, spans: list[tuple[int, int]]) -> None:
        """When a request got its tokens."""
        row = int(request.request_id)
        for first_step, count in spans:
            self._spans.extend((row, first_step, count))

    def records(self) -> ReplicaRecords:
        """What the replica did, as columns."""
        spans = _matrix(self._spans, SpanTable)
        return ReplicaRecords(
            steps=_table(_matrix(self._steps, StepTable), StepTable),
            spans=_table(spans[np.lexsort((spans[:, 1], spans[:, 0]))], SpanTable),
            preemptions=_table(_matrix(self._preemptions, PreemptionTable), PreemptionTable),
            num_usable_blocks=self._config.num_usable_blocks,
            block_size=self._config.block_size,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
        )


def _matrix(rows: array[int], kind: type[Table]) -> npt.NDArray[np.int64]:
    return np.frombuffer(rows, dtype=np.int64).reshape(-1, len(fields(kind)))


def _table(rows: npt.NDArray[np.int64], kind: type[Table]) -> Table:
    return kind(*np.ascontiguousarray(rows.T)) if len(rows) else empty_table(kind)
