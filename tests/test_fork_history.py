"""A server's history: the levels of a step are those while it ran, as a simulation has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from windtunnel.executor.engine import Engine, StepOutcome
from windtunnel.executor.filler import Filler
from windtunnel.executor.sampling import SamplingParams
from windtunnel.executor.server.history import History
from windtunnel.sim.cost.constant import AffineCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.protocols import EngineLoad
from windtunnel.sim.engine.scheduler import Scheduler
from windtunnel.sim.metrics.window import seen_in, window_metrics
from windtunnel.sim.simulate import run
from windtunnel.sim.simulated import SimExecutor
from windtunnel.sim.workload import workload

COST = AffineCost(base_s=3e-3, token_s=1.7e-5, seq_s=1e-5, decode_context_s=4e-7, prefill_pair_s=1e-8)
CONFIG = SchedulerConfig(max_num_seqs=4, num_gpu_blocks=60, max_model_len=500, enable_prefix_caching=False)
PROMPTS, OUTPUTS = [40 + 7 * row for row in range(12)], [5 + 3 * row for row in range(12)]


def engine() -> Engine:
    made = Engine(Scheduler(CONFIG), SimExecutor(COST), Filler([0]))
    for row, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        made.add(row, [1] * prompt, SamplingParams(max_tokens=output, ignore_eos=True), 0)
    return made


def test_levels_are_those_that_the_engine_noted_while_the_step_ran() -> None:
    made, history = engine(), History()
    outcome = made.step(0)
    assert outcome is not None
    noted = SimpleNamespace(**outcome._asdict() | {"load": EngineLoad(3, 9, 20, 0)})
    history.take_step(made, cast(StepOutcome, noted), outcome.end_ns)
    seen = history.seen(made)
    assert (seen.num_running[0], seen.num_waiting[0]) == (3, 9)
    assert seen.kv_usage[0] == pytest.approx(39 / 59)


def test_a_window_of_an_engine_is_that_of_the_simulation() -> None:
    made, history, now_ns = engine(), History(), 0
    while (outcome := made.step(now_ns)) is not None:
        now_ns = outcome.end_ns
        history.take_step(made, outcome, now_ns)
    records = run(workload([0] * 12, PROMPTS, OUTPUTS), CONFIG, COST)
    assert len(records.replicas[0].steps) > 30
    expected: dict[str, Any] = window_metrics(seen_in(records), 0, now_ns)
    found = window_metrics(history.seen(made), 0, now_ns)
    assert found == pytest.approx(expected)
    assert 0.0 < found["kv_usage_mean"] < found["kv_usage_max"] <= 1.0  # type: ignore[operator]
