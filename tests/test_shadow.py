"""The shadow: predicted beside measured step times of a real executor."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.executor.engine import Engine, RealExecutor
from windtunnel.executor.filler import Filler
from windtunnel.executor.sampling import SamplingParams
from windtunnel.executor.shadow import Drift, ShadowMetrics, shadowed
from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepPlan, StepResult, StepShape
from windtunnel.sim.engine.protocols import Executor
from windtunnel.sim.engine.scheduler import Scheduler
from windtunnel.sim.simulated import SimExecutor

DECODE = StepShape(4, 400, 0, 0, 0, 0, 4)
PREFILL = StepShape(0, 0, 1, 50, 0, 1275, 1)
COST = AffineCost(base_s=2e-3, token_s=1e-5)


class Domain(ConstantCost):
    """Knows only decodes."""

    def extrapolates(self, shape: StepShape) -> Any:
        return np.asarray(shape.num_prefill_seqs) > 0


@given(st.lists(st.tuples(st.sampled_from([DECODE, PREFILL]), st.integers(1, 10**8)), min_size=1, max_size=600))
def test_lines_are_those_of_the_latest_steps_priced_one_by_one(steps: list[tuple[StepShape, int]]) -> None:
    drift = Drift(COST, window_steps=100)
    for number, (shape, step_ns) in enumerate(steps):
        drift.take(shape, step_ns)
        if number % 37 == 0:
            drift.lines()
    latest = steps[-100:]
    predicted = [COST.step_time_s(shape) for shape, _ in latest]
    measured = [step_ns * 1e-9 for _, step_ns in latest]
    line = drift.line()
    assert line is not None
    assert line.num_steps == len(latest)
    assert line.num_steps_in_all == len(steps)
    assert line.ratio == pytest.approx(sum(predicted) / sum(measured))
    errors = [100 * abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    assert line.p90_percent == pytest.approx(np.percentile(errors, 90))
    assert line.measured_s == pytest.approx(sum(step_ns for _, step_ns in steps) * 1e-9)
    by_regime = {each.regime: each.num_steps for each in drift.lines()}
    assert by_regime.get("decode", 0) + by_regime.get("prefill", 0) == by_regime["all"]


def test_drift_shows_when_the_machine_slows_down() -> None:
    drift = Drift(ConstantCost(0.01), window_steps=50)
    for _ in range(50):
        drift.take(DECODE, 10_000_000)
    assert drift.line().ratio == pytest.approx(1.0)  # type: ignore[union-attr]
    for _ in range(50):
        drift.take(DECODE, 20_000_000)
    line = drift.line("decode")
    assert line is not None
    assert line.bias_percent == pytest.approx(-50.0)
    assert line.ratio_in_all == pytest.approx(2 / 3)


def test_a_cost_model_is_corrected_by_its_drift() -> None:
    drift = Drift(COST)
    assert drift.corrected() is COST
    for shape in (DECODE, PREFILL):
        drift.take(shape, round(1.3e9 * COST.step_time_s(shape)))
    corrected = drift.corrected()
    assert corrected.step_time_s(DECODE) == pytest.approx(1.3 * COST.step_time_s(DECODE))
    assert corrected.name == "affine x 1.3"
    assert corrected.describe()["factor"] == pytest.approx(1.3)


def test_steps_outside_of_the_domain_are_counted() -> None:
    drift = Drift(Domain(0.01))
    for shape in (DECODE, DECODE, DECODE, PREFILL):
        drift.take(shape, 10_000_000)
    shares = {line.regime: line.extrapolated_share for line in drift.lines()}
    assert shares == {"all": 0.25, "decode": 0.0, "prefill": 1.0}


def test_before_the_first_step_there_is_nothing_to_say() -> None:
    assert Drift(COST).lines() == ()
    assert Drift(COST).line() is None
    with pytest.raises(ValueError, match="at least 1 step, got 0"):
        Drift(COST, window_steps=0)


class Computing:
    """Takes twice as long as the cost says and samples token 7 for everybody."""

    def __init__(self) -> None:
        self.view: Any = None
        self.model = "a model"

    def execute(self, plan: StepPlan) -> StepResult:
        sampled = [(grant.request, 7) for grant in self.view.grants(plan) if grant.samples]
        return StepResult(round(2e9 * COST.step_time_s(plan.shape)), sampled=sampled)

    def adopt(self, view: Any) -> int:
        self.view = view
        return 5


def served(executor: Executor) -> list[list[int]]:
    config = SchedulerConfig(num_gpu_blocks=50, block_size=4, max_model_len=500, enable_prefix_caching=False)
    engine = Engine(Scheduler(config), executor, Filler([0]))
    sequences = [engine.add(number, [1] * 9, SamplingParams(max_tokens=4, ignore_eos=True), 0) for number in range(3)]
    now_ns = 0
    while (outcome := engine.step(now_ns)) is not None:
        now_ns = outcome.end_ns
    return [each.output_token_ids for each in sequences]


def test_the_real_executor_runs_and_the_shadow_only_looks() -> None:
    shadow = shadowed(Computing(), COST)
    assert isinstance(shadow, RealExecutor)
    assert served(shadow) == served(Computing()) == [[7] * 4] * 3
    line = shadow.drift.line()
    assert line is not None
    assert line.num_steps == 4
    assert line.ratio == pytest.approx(0.5)
    assert shadow.model == "a model"
    assert shadow.adopt(shadow.view) == 5


def test_over_a_simulated_executor_it_is_none_that_computes() -> None:
    shadow = shadowed(SimExecutor(COST), COST)
    assert not isinstance(shadow, RealExecutor)
    served(shadow)
    assert shadow.drift.line().ratio == pytest.approx(1.0)  # type: ignore[union-attr]


def test_a_copy_that_is_not_made_yet_asks_nobody() -> None:
    with pytest.raises(AttributeError):
        copy.copy(shadowed(SimExecutor(COST), COST)).nothing_of_the_kind  # noqa: B018


def test_anybody_may_look_while_steps_come() -> None:
    drift, stop = Drift(COST, window_steps=10_000), threading.Event()

    def look() -> None:
        while not stop.is_set():
            drift.lines()

    looker = threading.Thread(target=look)
    looker.start()
    for _ in range(3000):
        drift.take(DECODE, 1_000_000)
    stop.set()
    looker.join()
    assert drift.line().num_steps == 3000  # type: ignore[union-attr]


def test_metrics_have_the_documented_names() -> None:
    pytest.importorskip("prometheus_client")
    from windtunnel.executor.server.metrics import exposition

    drift = Drift(ConstantCost(0.01))
    drift.take(DECODE, 8_000_000)
    text = exposition(ShadowMetrics({"torch": drift}))[0].decode()  # type: ignore[arg-type]
    for line in (
        'windtunnel_shadow_steps_total{executor="torch",regime="all"} 1.0',
        'windtunnel_shadow_measured_seconds_total{executor="torch",regime="decode"} 0.008',
        'windtunnel_shadow_predicted_seconds_total{executor="torch",regime="decode"} 0.01',
        'windtunnel_shadow_ratio{executor="torch",regime="all"} 1.25',
        'windtunnel_shadow_error_percent{executor="torch",quantile="0.9",regime="all"} 25.0',
        'windtunnel_shadow_extrapolated_share{executor="torch",regime="all"} 0.0',
        'windtunnel_shadow_info{calibrated="false",cost="constant",evidence="uncalibrated",executor="torch"} 1.0',
    ):
        assert line in text, text


def test_a_server_puts_its_shadow_beside_the_executor_that_computes() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    from serving import limits
    from tiny_model import tiny_config

    from windtunnel.executor.server.build import ServedModel, ServerSettings, make_frontend

    settings = ServerSettings(
        limits(num_gpu_blocks=50, max_model_len=500, enable_prefix_caching=False),
        cost=COST,
        shadow=ConstantCost(0.01),
        num_threads=1,
    )
    frontend = make_frontend(ServedModel(("tiny",), "tiny", tiny_config()), settings)
    executor = frontend.executors.get("torch")
    assert isinstance(executor, RealExecutor)
    assert served(executor) != []
    assert frontend.drifts["torch"].line().num_steps == 4  # type: ignore[union-attr]
    assert len(frontend.more_metrics) == 1
