"""Records made by hand for the tests of metrics and reports: a single server, requests with given token times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.records import (
    DraftTable,
    Outcome,
    PreemptionTable,
    Records,
    ReplicaRecords,
    RequestTable,
    SpanTable,
    StepTable,
    empty_table,
)
from windtunnel.sim.workload import Workload, workload

MS = 1_000_000
S = 1_000_000_000


class AffineStepCost:
    """A cost model for tests: so many seconds a step, plus so many a token."""

    name = "affine"
    calibrated = False

    def __init__(self, base_s: float = 0.01, token_s: float = 0.0) -> None:
        self.base_s, self.token_s = base_s, token_s

    def step_time_s(self, shape: object) -> float:
        return self.base_s + self.token_s * shape.num_tokens  # type: ignore[attr-defined]

    def describe(self) -> dict[str, object]:
        return {"base_s": self.base_s, "token_s": self.token_s}


def columns(n: int, **given: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
    """All columns of a request table with n rows: those given, the others neutral."""
    neutral = dict.fromkeys(RequestTable.__dataclass_fields__, 0)
    neutral |= {"num_prompt_tokens": 10, "num_output_tokens": 1}
    made = {name: np.full(n, value, np.int64) for name, value in neutral.items()}
    made["request"] = np.arange(n, dtype=np.int64)
    return made | {name: np.asarray(values, np.int64) for name, values in given.items()}


def single_server(arrival_ns: np.ndarray, service_ns: np.ndarray) -> tuple[Records, Workload]:
    """First come, first served by one server (Lindley's recursion): a request is one step and gives one token."""
    n = len(arrival_ns)
    served = np.cumsum(service_ns)
    start = np.maximum.accumulate(arrival_ns - (served - service_ns)) + served - service_ns
    end, one, none = start + service_ns, np.ones(n, np.int64), np.zeros(n, np.int64)
    requests = RequestTable(
        **columns(n, due_ns=arrival_ns, arrival_ns=arrival_ns, scheduled_ns=start, first_token_ns=end, finish_ns=end)
    )
    waiting = np.searchsorted(arrival_ns, start, side="right") - np.arange(1, n + 1)
    steps = StepTable(start, end, one, waiting, none, none, one, 10 * one, 90 * one, *[none] * 8)
    spans = SpanTable(np.arange(n), np.arange(n), one)
    replica = ReplicaRecords(steps, spans, empty_table(PreemptionTable), empty_table(DraftTable), 100, 16, 1, 64)
    return Records(requests, (replica,), int(end.max(initial=0))), workload(arrival_ns, 10 * one, one)


def queue_at(rho: float, num_requests: int, seed: int, service_ns: int = 10 * MS) -> tuple[Records, Workload]:
    """An M/D/1 queue at utilisation ``rho``."""
    gaps = np.random.default_rng(seed).exponential(service_ns / rho, num_requests).astype(np.int64)
    return single_server(np.cumsum(gaps), np.full(num_requests, service_ns, np.int64))


def token_records(*requests: tuple[int, list[int]], step_ns: int = 10 * MS, num_steps: int = 100) -> Records:
    """Steps of equal length; each request is (arrival_ns, the numbers of the steps that gave it a token)."""
    n, start = len(requests), np.arange(num_steps) * step_ns
    spans: list[tuple[int, int, int]] = []
    for row, (_, steps) in enumerate(requests):
        for step in steps:
            if spans and spans[-1][0] == row and spans[-1][1] + spans[-1][2] == step:
                spans[-1] = (row, spans[-1][1], spans[-1][2] + 1)
            else:
                spans.append((row, step, 1))
    first = [steps[0] for _, steps in requests]
    table = RequestTable(
        **columns(
            n,
            due_ns=[arrival for arrival, _ in requests],
            arrival_ns=[arrival for arrival, _ in requests],
            scheduled_ns=[max(step * step_ns, arrival) for step, (arrival, _) in zip(first, requests, strict=True)],
            first_token_ns=[(step + 1) * step_ns for step in first],
            finish_ns=[(steps[-1] + 1) * step_ns for _, steps in requests],
            num_output_tokens=[len(steps) for _, steps in requests],
        )
    )
    state = {name: np.zeros(num_steps, np.int64) for name in StepTable.__dataclass_fields__}
    state |= {"start_ns": start, "end_ns": start + step_ns, "num_free_blocks": np.full(num_steps, 50)}
    span_table = SpanTable(*np.array(spans, np.int64).reshape(-1, 3).T)
    replica = ReplicaRecords(
        StepTable(**state), span_table, empty_table(PreemptionTable), empty_table(DraftTable), 100, 16, 8, 64
    )
    return Records(table, (replica,), int(table.finish_ns.max()))


def workload_of(records: Records, max_concurrency: int | None = None) -> Workload:
    """The workload that such records could come from."""
    table = records.requests
    return workload(
        np.sort(table.due_ns), table.num_prompt_tokens, table.num_output_tokens, max_concurrency=max_concurrency
    )


def with_requests(records: Records, **columns: np.ndarray) -> Records:
    """The same records with other columns in the request table."""
    return replace(records, requests=replace(records.requests, **columns))


def pressed_engine() -> tuple[Workload, SchedulerConfig]:
    """A burst of requests that together need more KV blocks than there are, so that some are preempted."""
    rng = np.random.default_rng(7)
    n = 80
    arrival = np.cumsum(rng.exponential(0.002 * S, n)).astype(np.int64)
    config = SchedulerConfig(
        max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512, num_gpu_blocks=120, enable_prefix_caching=False
    )
    return workload(arrival, rng.integers(20, 200, n), rng.integers(10, 200, n)), config


UNFINISHED = int(Outcome.UNFINISHED)
