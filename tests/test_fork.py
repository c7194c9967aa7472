"""Forks: a forecast with the true arrivals, lengths and step times is what happens."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import scheduler_configs, workloads

from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.cost.lookup import load_named
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.keys import PrivateKeys
from windtunnel.sim.engine.per_request import make_scheduler
from windtunnel.sim.engine.plan import StepPlan, StepResult, StepShape
from windtunnel.sim.engine.request import Request
from windtunnel.sim.engine.scheduler import Scheduler
from windtunnel.sim.engine.snapshot import RecentRequest, Snapshot, take_snapshot
from windtunnel.sim.engine.snapshot_json import from_json, to_json
from windtunnel.sim.fork import (
    ForkTooLong,
    Rate,
    compare_fork,
    fork,
    recent_rate,
    shared_prefixes,
)
from windtunnel.sim.metrics.window import UNITS, seen_in, window_metrics
from windtunnel.sim.records import Records
from windtunnel.sim.simulate import RequestTooLarge, run
from windtunnel.sim.simulated import SimExecutor
from windtunnel.sim.workload import Workload, workload

COST = AffineCost(base_s=3e-3, token_s=1.7e-5, seq_s=1e-5, decode_context_s=4e-7, prefill_pair_s=1e-8)
HORIZON_S = 4.0


class Spy(SimExecutor):
    """Takes a snapshot while a step runs, and notes the shapes of all steps."""

    def __init__(self, scheduler: Scheduler, step: int) -> None:
        super().__init__(COST)
        self._scheduler = scheduler
        self._step = step
        self.snapshot: Snapshot | None = None
        self.shapes: list[StepShape] = []
        self.blocks: list[list[list[int]]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        if len(self.shapes) == self._step:
            self.snapshot = take_snapshot(self._scheduler, 0)
        self.shapes.append(plan.shape)
        self.blocks.append([list(request.block_ids) for request in self._scheduler.requests()])
        return super().execute(plan)


class Shapes(SimExecutor):
    def __init__(self) -> None:
        super().__init__(COST)
        self.shapes: list[StepShape] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.shapes.append(plan.shape)
        return super().execute(plan)


def later(work: Workload, now_ns: int) -> Workload:
    """What arrives after that time, counted from it."""
    there = work.arrival_ns > now_ns
    columns = ("num_prompt_tokens", "num_output_tokens", "max_tokens", "priority")
    chosen = {name: getattr(work, name)[there] for name in columns}
    content = None if work.content is None else tuple(c for c, ok in zip(work.content, there, strict=True) if ok)
    return workload(work.arrival_ns[there] - now_ns, **chosen, content=content, num_streams=work.num_streams)


def spied(work: Workload, config: SchedulerConfig, step: int) -> tuple[Snapshot | None, Records, Spy]:
    scheduler = make_scheduler(config)
    spy = Spy(scheduler, step)
    records = run(work, config, COST, executor=spy, scheduler=scheduler, horizon_ns=round(HORIZON_S * 1e9))
    if spy.snapshot is None or step >= len(records.replicas[0].steps):
        return None, records, spy
    return replace(spy.snapshot, now_ns=int(records.replicas[0].steps.start_ns[step])), records, spy


@given(st.data())
def test_a_fork_that_knows_all_is_what_happens(data: st.DataObject) -> None:
    config = data.draw(scheduler_configs())
    work = data.draw(workloads(config))
    step = data.draw(st.integers(0, 40))
    snapshot, records, spy = spied(work, config, step)
    if snapshot is None:
        return
    horizon_s = data.draw(st.sampled_from([0.004, 0.05, 0.3]))
    if snapshot.now_ns + horizon_s * 1e9 > HORIZON_S * 1e9:
        return
    shapes = Shapes()
    forecast = fork(snapshot, COST, horizon_s, later(work, snapshot.now_ns), executor=shapes)
    num = min(len(shapes.shapes), len(spy.shapes) - step)
    assert shapes.shapes[:num] == spy.shapes[step : step + num]
    assert forecast.metrics == pytest.approx(window_metrics(seen_in(records), forecast.begin_ns, forecast.end_ns))
    assert all(error.error_percent in (None, pytest.approx(0.0)) for error in compare_fork(forecast, records))


def test_steps_under_way_count_with_the_state_at_the_snapshot_on_both_sides() -> None:
    num_other = 0
    for step in range(20, 50):
        snapshot, work, records = busy(now_step=step, num=60, async_scheduling=True)
        assert len(snapshot.under_way) == 2
        snapshot = replace(snapshot, now_ns=int(records.replicas[0].steps.start_ns[step - 1]))
        forecast = fork(snapshot, COST, 0.02, later(work, snapshot.now_ns))
        as_decided = window_metrics(seen_in(records), forecast.begin_ns, forecast.end_ns)
        num_other += forecast.metrics != pytest.approx(as_decided)
        for error in compare_fork(forecast, records):
            assert error.predicted == pytest.approx(error.observed), (step, error.name)
    assert num_other


def test_a_fitted_cost_is_called_by_what_it_was_fitted_to() -> None:
    snapshot, _, _ = busy()
    cost = load_named("llama-3.1-8b-h100-sxm-tp1-bf16").cost
    assert fork(snapshot, cost, 0.1).cost == "the profile of meta-llama/Llama-3.1-8B-Instruct on H100-SXM"
    assert fork(snapshot, COST, 0.1).cost == "affine"


def busy(now_step: int = 30, num: int = 30, **values: Any) -> tuple[Snapshot, Workload, Records]:
    """An engine in which eight run and others wait."""
    config = SchedulerConfig(**{"max_num_seqs": 8, "num_gpu_blocks": 200, "max_num_batched_tokens": 128, **values})
    work = workload([10_000_000 * row for row in range(num)], [40 + row for row in range(num)], [60] * num)
    snapshot, records, _ = spied(work, config, now_step)
    assert snapshot is not None
    return snapshot, work, records


def test_fewer_seats_are_foretold_to_cost_throughput() -> None:
    snapshot, work, _ = busy()
    arrivals = later(work, snapshot.now_ns)
    as_is = fork(snapshot, COST, 0.5, arrivals)
    fewer = fork(snapshot, COST, 0.5, arrivals, changes={"max_num_seqs": 2})
    assert as_is.metrics["output_throughput"] > 1.5 * fewer.metrics["output_throughput"]  # type: ignore[operator]
    assert fewer.changes == {"max_num_seqs": 2}
    assert fewer.metrics["waiting_end"] > as_is.metrics["waiting_end"]  # type: ignore[operator]


def test_a_smaller_pool_preempts_at_once() -> None:
    snapshot, work, _ = busy()
    shrunk = fork(snapshot, COST, 0.2, later(work, snapshot.now_ns), changes={"num_gpu_blocks": 20})
    assert (shrunk.records.replicas[0].preemptions.time_ns == snapshot.now_ns).any()


def test_what_the_engine_had_follows_the_arrivals() -> None:
    snapshot, work, records = busy()
    arrivals = later(work, snapshot.now_ns)
    forecast = fork(snapshot, COST, 1.0, arrivals)
    rows = forecast.records.requests.request.tolist()
    assert rows == list(range(len(arrivals) + len(forecast.request_ids)))
    for row, request_id in enumerate(forecast.request_ids, len(arrivals)):
        assert forecast.records.requests.finish_ns[row] == records.requests.finish_ns[int(request_id)]


def test_steps_that_run_ahead_are_finished_first() -> None:
    snapshot, work, _ = busy(async_scheduling=True)
    assert len(snapshot.under_way) == 2
    forecast = fork(snapshot, COST, 0.05, later(work, snapshot.now_ns))
    assert forecast.records.replicas[0].steps.end_ns[0] > snapshot.now_ns
    assert forecast.metrics["output_throughput"] > 0  # type: ignore[operator]


def live(lengths: list[int | None], **values: Any) -> Snapshot:
    """An engine nobody knows the lengths of, with recent answers of these lengths."""
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, num_gpu_blocks=200, **values))
    for number in range(6):
        scheduler.add(Request(f"cmpl-{number}", number, 20, 100, keys=PrivateKeys(number)))
    for step in range(10):
        scheduler.commit(scheduler.schedule(step), step + 1)
    recent = [
        RecentRequest(number * 500_000_000, 30, 100, length, 0, (7, 8, 100 + number))
        for number, length in enumerate(lengths)
    ]
    return take_snapshot(scheduler, 10_000_000_000, recent=recent, are_lengths_known=False)


def test_unknown_lengths_are_drawn_from_those_that_are_long_enough() -> None:
    snapshot = live([3, 5, 30])
    forecast = fork(snapshot, ConstantCost(0.01), 20.0)
    table = forecast.records.requests
    assert table.num_output_tokens[:4].tolist() == [30] * 4
    assert {3, 5, 30} >= set(table.num_output_tokens[4:].tolist())
    assert forecast.lengths == "known, or drawn from 3 recent answers, given what is already written"


def test_without_recent_answers_the_limits_are_the_lengths() -> None:
    forecast = fork(live([]), ConstantCost(0.01), 20.0)
    assert set(forecast.records.requests.num_output_tokens.tolist()) == {100}


def test_lengths_may_be_told() -> None:
    forecast = fork(live([]), ConstantCost(0.01), 20.0, lengths={"cmpl-0": 11, "cmpl-5": 1})
    assert forecast.records.requests.num_output_tokens.tolist() == [11, 100, 100, 100, 100, 1]


def test_an_answer_longer_than_all_recent_ones_goes_on_as_one_of_them() -> None:
    snapshot = live([4, 4])  # who runs has ten tokens already
    forecast = fork(snapshot, ConstantCost(0.01), 20.0)
    assert forecast.records.requests.num_output_tokens[:4].tolist() == [14] * 4


def test_arrivals_continue_at_the_recent_rate() -> None:
    snapshot = live([20] * 20)
    forecast = fork(snapshot, ConstantCost(0.001), 200.0, Rate())
    num = len(forecast.records.requests) - len(forecast.request_ids)
    expected = recent_rate(snapshot.recent, snapshot.now_ns) * 200.0
    assert num == pytest.approx(expected, abs=4 * np.sqrt(expected))
    assert set(forecast.records.requests.num_prompt_tokens[:num].tolist()) == {30}


def test_arrivals_find_the_beginning_that_the_recent_ones_share() -> None:
    config = SchedulerConfig(block_size=4, num_gpu_blocks=100)
    scheduler = Scheduler(config)
    for number in range(2):
        request = Request(number, 0, 12, 3, keys=PrivateKeys(3))
        scheduler.add(request)
    for step in range(8):
        scheduler.commit(scheduler.schedule(step), step + 1)
    recent = [RecentRequest(number, 12, 3, 3, 0, (500, 501, 600 + number)) for number in range(2)]
    assert [each.prefix_keys for each in shared_prefixes(recent)] == [(500, 501)] * 2
    forecast = fork(take_snapshot(scheduler, 1_000_000_000, recent=recent), COST, 10.0, Rate(3.0), seed=5)
    cached = forecast.records.requests.num_cached_tokens
    assert cached[0] == 0
    assert (cached[1:] == 8).all()


def test_futures_are_drawn_apart_and_their_spread_is_told() -> None:
    snapshot = live([5, 20, 80])
    forecast = fork(snapshot, ConstantCost(0.01), 5.0, Rate(2.0), num_futures=8)
    low, mean, high = (each["output_throughput"] for each in (forecast.low, forecast.metrics, forecast.high))
    assert low < mean < high  # type: ignore[operator]
    again = fork(snapshot, ConstantCost(0.01), 5.0, Rate(2.0), num_futures=8)
    assert again.as_plain() == forecast.as_plain()
    assert fork(snapshot, ConstantCost(0.01), 5.0, Rate(2.0), num_futures=8, seed=1).metrics != forecast.metrics


def test_a_fork_of_a_saved_snapshot_is_the_same() -> None:
    snapshot, work, _ = busy()
    saved = from_json(json.loads(json.dumps(to_json(snapshot))))
    first, second = (fork(each, COST, 0.4, later(work, snapshot.now_ns)) for each in (snapshot, saved))
    assert first.as_plain() == second.as_plain()


def test_the_result_is_plain_data() -> None:
    snapshot, _, _ = busy()
    plain = json.loads(json.dumps(fork(snapshot, COST, 0.2).as_plain()))
    assert [each["name"] for each in plain["metrics"]] == list(UNITS)
    assert plain["arrivals"] == "nothing more"
    assert plain["horizon_s"] == pytest.approx(0.2)


def test_an_idle_engine_has_an_idle_future() -> None:
    snapshot = take_snapshot(Scheduler(SchedulerConfig()), 5)
    forecast = fork(snapshot, COST, 1.0)
    assert forecast.metrics["busy"] == 0.0
    assert forecast.metrics["ttft_mean_ms"] is None


def snapshot_of(num_speculative_tokens: int = 0) -> Snapshot:
    return take_snapshot(make_scheduler(SchedulerConfig(num_speculative_tokens=num_speculative_tokens)), 0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"horizon_s": 0.0}, "horizon must be above 0"),
        ({"horizon_s": float("nan")}, "horizon must be above 0"),
        ({"num_futures": 0}, "num_futures must be at least 1"),
        ({"lengths": "guess"}, "lengths must be one of known, recent, max_tokens"),
        ({"lengths": "recent"}, "no recent answer is complete"),
        ({"arrivals": Rate()}, "0 recent requests do not say how fast"),
        ({"arrivals": Rate(1.0)}, "no recent request says what"),
        ({"changes": {"block_size": 8}}, "block_size cannot change"),
        ({"has_noise": True}, "states no noise"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        fork(snapshot_of(), COST, **{"horizon_s": 1.0, **arguments})


def test_speculation_needs_to_be_told_how_drafts_fare() -> None:
    with pytest.raises(ValueError, match="give a drafting"):
        fork(snapshot_of(num_speculative_tokens=3), COST, 1.0)


def test_a_scheduler_needs_a_clock() -> None:
    with pytest.raises(ValueError, match="give now_ns"):
        fork(Scheduler(SchedulerConfig()), COST, 1.0)


def test_known_lengths_are_refused_where_nobody_knows_them() -> None:
    with pytest.raises(ValueError, match="nobody knows"):
        fork(live([]), COST, 1.0, lengths="known")


def test_negative_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 0 requests/s, got -1"):
        Rate(-1.0)


def test_arrivals_that_never_fit_are_refused() -> None:
    with pytest.raises(RequestTooLarge):
        fork(snapshot_of(), COST, 1.0, workload([0], [1000], [100]), changes={"num_gpu_blocks": 10})


def test_too_many_steps_end_it() -> None:
    with pytest.raises(ForkTooLong, match="more than 20 steps"):
        fork(live([]), ConstantCost(0.001), 60.0, max_num_steps=20)
