"""Measuring steps: that what is written is what was measured, that nothing is lost, and that a known law comes back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import tiny_decoder, tiny_executor

from windtunnel.calibrate.fit import Form, StepTimeFit
from windtunnel.calibrate.grid import Grid, make_grid
from windtunnel.calibrate.machine import GpuWatch, describe_machine, parse_gpu_state
from windtunnel.calibrate.measure import measure, partial_path, reference_step
from windtunnel.calibrate.measurements import (
    COLUMNS,
    REFERENCE,
    MeasuredTable,
    MeasurementError,
    median_half_width,
    outliers,
    read_provenance,
)
from windtunnel.calibrate.step_tables import read_step_table
from windtunnel.executor.cache import PagedKvCache
from windtunnel.executor.devices import HostDevice
from windtunnel.executor.triton_executor import TritonExecutor
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepPlan, StepResult, StepShape
from windtunnel.sim.simulated import SimExecutor

LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, block_size=4, num_gpu_blocks=300)
GRID = make_grid(LIMITS, "small")


class KnownLaw:
    """A cost that is linear in what a step holds."""

    name = "known law"
    calibrated = True

    def step_time_s(self, shape: StepShape) -> float:
        return float(
            2e-3
            + 3e-5 * shape.num_tokens
            + 1e-4 * shape.num_decode_seqs
            + 4e-7 * shape.decode_context_tokens
            + 2e-7 * shape.prefill_pairs
        )


class Noisy:
    """An executor of a known law whose steps scatter, and which fails after so many of them."""

    def __init__(self, noise: float = 0.0, fails_after: int | None = None) -> None:
        self.steps: list[StepShape] = []
        self._noise = noise
        self._fails_after = fails_after
        self._draw = np.random.default_rng(0)

    def execute(self, plan: StepPlan) -> StepResult:
        if self._fails_after is not None and len(self.steps) == self._fails_after:
            raise KeyboardInterrupt
        self.steps.append(plan.shape)
        step_s = KnownLaw().step_time_s(plan.shape) * float(np.exp(self._draw.normal(0.0, self._noise)))
        return StepResult(round(step_s * 1e9))


def measured(executor: Any, path: Path | None = None, grid: Grid = GRID, **options: Any) -> MeasuredTable:
    return measure(executor, grid, **{"clock": "wall", "budget_s": 60.0, "path": path, **options})


def order(table: MeasuredTable) -> list[int]:
    """Points in the order of their visits."""
    return [sample.point for sample in table.samples if sample.repeat == 0 and sample.point != REFERENCE]


def test_a_steady_executor_is_measured_until_all_is_known_and_no_longer() -> None:
    table = measured(SimExecutor(KnownLaw()))
    assert table.is_complete
    assert set(Counter(order(table)).values()) == {6}, "an interval of the median needs six values"
    assert table.provenance["num_tight_points"] == len(GRID.points)
    assert table.provenance["num_outliers"] == 0
    for sample in table.samples:
        assert sample.step_ns == round(KnownLaw().step_time_s(table.composition(sample.point).shape) * 1e9)


def test_the_order_is_random_and_depends_on_the_seed_alone() -> None:
    first, again, other = (order(measured(SimExecutor(KnownLaw()), seed=seed)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    num_points = len(GRID.points)
    rounds = [first[begin : begin + num_points] for begin in range(0, len(first), num_points)]
    assert all(sorted(each) == list(range(num_points)) for each in rounds), "every round visits every point once"
    assert len({tuple(each) for each in rounds}) == len(rounds)


def test_the_first_round_sees_every_kind_before_any_for_the_third_time() -> None:
    visits = order(measured(SimExecutor(KnownLaw())))[: len(GRID.points)]
    kinds = [GRID.points[point].kind for point in visits]
    num_kinds = len(set(kinds))
    assert num_kinds >= 6
    assert len(set(kinds[:num_kinds])) == len(set(kinds[num_kinds : 2 * num_kinds])) == num_kinds
    assert kinds[:num_kinds] != kinds[num_kinds : 2 * num_kinds]


def test_the_table_on_disk_is_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "new" / "steps.parquet"
    table = measured(Noisy(0.05), path, budget_s=0.5, target=0.9, provenance={"model": "a model", "tables": ["x"]})
    assert [file.name for file in path.parent.iterdir()] == ["steps.parquet"], "no partial and no temporary file stays"
    read, told = read_step_table(path), table.step_table()
    assert np.array_equal(read.step_s, told.step_s)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(read.shapes, told.shapes, strict=True))
    assert read.provenance == {**json.loads(json.dumps(table.provenance)), "tables": ["steps.parquet"]}
    assert read_provenance(path) == json.loads(json.dumps(table.provenance))
    frame = table.frame()
    assert list(frame.columns) == [name for name in COLUMNS if not name.startswith("gpu_")]
    assert len(read) == (~frame["is_reference"]).sum() < len(frame), "the reference is in the file, not in the fit"


def test_the_file_says_where_it_comes_from() -> None:
    told = measured(SimExecutor(KnownLaw()), budget_s=0.05, seed=5, provenance={"model": "m", "dtype": "d"}).provenance
    assert (told["source"], told["clock"], told["model"], told["dtype"], told["seed"]) == (
        "measured",
        "wall",
        "m",
        "d",
        5,
    )
    assert told["max_num_seqs"] == 8
    assert told["gpu_clocks"] == "no GPU"
    assert told["reference"]["num_visits"] >= 1
    assert {"date", "cpu", "python", "windtunnel", "engine", "statement", "grid"} <= told.keys()
    assert told["python"] == describe_machine()["python"]


def test_a_known_law_is_recovered() -> None:
    table = measured(Noisy(0.01), grid=make_grid(LIMITS, "default"), target=0.02)
    cost = StepTimeFit(form=Form(), max_graph_tokens=0).fit(table.step_table())
    law = KnownLaw()
    shapes = [point.shape for point in make_grid(LIMITS, "default", seed=99).points]
    errors = [abs(cost.step_time_s(shape) / law.step_time_s(shape) - 1.0) for shape in shapes]
    assert np.median(errors) < 0.01
    assert max(errors) < 0.05
    assert cost.evidence.provenance["source"] == "measured"


class Cold(Noisy):
    """A step is ten times as long where the one before was another, as with cold caches or a kernel to compile."""

    def execute(self, plan: StepPlan) -> StepResult:
        is_cold = not self.steps or self.steps[-1] != plan.shape
        return StepResult(super().execute(plan).step_ns * (10 if is_cold else 1))


def test_a_new_step_and_a_short_one_that_reads_the_cache_are_run_once_before_they_count() -> None:
    table = measured(Cold(), budget_s=2.0)
    law_ns = {point: round(KnownLaw().step_time_s(table.composition(point).shape) * 1e9) for point in set(order(table))}
    reads = {point for point in law_ns if any(work.num_cached_tokens for work in table.composition(point).sequences)}
    assert reads
    assert reads != set(law_ns)
    cold = {
        (sample.point, sample.visit) for sample in table.samples if sample.step_ns > 2 * law_ns.get(sample.point, 1e99)
    }
    assert not {(point, visit) for point, visit in cold if point in reads or visit == 0}
    assert cold, "the others run as they are: the step before has left nothing of use to them"


def test_the_reference_is_the_last_that_is_measured() -> None:
    assert measured(SimExecutor(KnownLaw())).samples[-1].point == REFERENCE


# ------------------------------------------------------------------ interruption


def test_a_run_that_measured_nothing_leaves_nothing_in_the_way_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    with pytest.raises(MeasurementError, match="nothing was measured"):
        measured(Noisy(), path, budget_s=1e-9)
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        measured(Noisy(fails_after=0), path)
    assert not list(tmp_path.iterdir())
    assert measured(Noisy(), path).is_complete


def test_a_run_that_adds_nothing_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    with pytest.raises(KeyboardInterrupt):
        measured(Noisy(fails_after=100), path)
    kept = partial_path(path).read_bytes()
    with pytest.raises(KeyboardInterrupt):
        measured(Noisy(fails_after=0), path, resume=True)
    assert partial_path(path).read_bytes() == kept


def test_an_interrupted_run_keeps_its_samples_and_can_be_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    with pytest.raises(KeyboardInterrupt):
        measured(Noisy(fails_after=200), path)
    assert not path.exists()
    kept = partial_path(path).read_text(encoding="utf-8").splitlines()
    assert len(kept) > 30
    table = measured(Noisy(), path, resume=True)
    assert order(table) == order(measured(Noisy())), "as if it had never stopped"
    visits = Counter((sample.point, sample.visit, sample.repeat) for sample in table.samples)
    assert set(visits.values()) == {1}
    assert [sample.at_s for sample in table.samples] == sorted(sample.at_s for sample in table.samples)
    assert not partial_path(path).exists()


def test_a_budget_of_nothing_turns_what_there_is_into_a_table(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    with pytest.raises(KeyboardInterrupt):
        measured(Noisy(fails_after=100), path)
    num_kept = sum(len(json.loads(line)) for line in partial_path(path).read_text().splitlines()[1:])
    executor = Noisy()
    assert len(measured(executor, path, resume=True, budget_s=0.0).samples) == num_kept
    assert not executor.steps
    assert len(read_step_table(path)) < num_kept, "without the reference"


def test_a_visit_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    with pytest.raises(KeyboardInterrupt):
        measured(Noisy(fails_after=200), path)
    partial = partial_path(path)
    partial.write_bytes(partial.read_bytes()[:-9])
    assert order(measured(Noisy(), path, resume=True)) == order(measured(Noisy()))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text.replace('"seed":0', '"seed":1'), "was measured with seed 1, not 0"),
        (lambda text: text.replace("windtunnel-measured-steps", "other"), "line 1: not the header"),
        (lambda text: text.replace("[[", "[7,[", 1), "not a visit"),
        (lambda text: text.split("\n")[0] + "\n[]\n", "line 2: a visit without samples"),
        (lambda text: text.split("\n")[0] + "\nnonsense\n", "line 2: not a visit"),
        (lambda text: "", "was cut off within its first line"),
        (lambda text: text[:40], "was cut off within its first line"),
    ],
)
def test_samples_of_something_else_are_not_gone_on_with(
    tmp_path: Path, spoil: Callable[[str], str], message: str
) -> None:
    path = tmp_path / "steps.parquet"
    with pytest.raises(KeyboardInterrupt):
        measured(Noisy(fails_after=100), path)
    partial = partial_path(path)
    partial.write_text(spoil(partial.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(MeasurementError, match=message):
        measured(Noisy(), path, resume=True)


def test_an_unfinished_measurement_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    with pytest.raises(KeyboardInterrupt):
        measured(Noisy(fails_after=100), path)
    with pytest.raises(MeasurementError, match="--resume"):
        measured(Noisy(), path)


# ------------------------------------------------------------------ real steps


def test_a_real_executor_computes_what_the_grid_says() -> None:
    executor = tiny_executor(LIMITS, clock="cpu")
    computed: list[tuple[int, int]] = []
    forward = executor.model.forward

    def watched(batch: Any, cache: Any) -> Any:
        computed.append((len(batch.token_ids), int(batch.context_lens.sum())))
        return forward(batch, cache)

    executor.model.forward = watched  # type: ignore[method-assign]
    table = measure(executor, GRID, clock="cpu", budget_s=1.5)
    expected = {
        (point.num_tokens, sum(work.num_tokens for work in point.sequences))
        for point in (*GRID.points, reference_step(LIMITS))
    }
    assert set(computed) <= expected
    assert len(set(computed)) > 10
    assert all(0 < sample.step_ns <= sample.cpu_ns for sample in table.samples), (
        "the step is within what is seen outside"
    )
    assert table.provenance["dtype"] == "float32"
    assert all(float(keys.abs().sum()) > 0 for keys in executor.cache.keys), (
        "memory that was never written reads faster"
    )


def test_the_gpu_executor_tells_of_its_graphs() -> None:
    """On the CPU, which stands in for a GPU: recorded steps are computed anew."""
    model = tiny_decoder()
    cache = PagedKvCache(model.config, LIMITS.num_gpu_blocks, LIMITS.block_size)
    executor = TritonExecutor(model, cache, max_num_seqs=8, device=HostDevice())
    table = measure(executor, GRID, clock="wall", budget_s=1.5)
    assert table.provenance["engine"] == "windtunnel triton executor"
    assert table.provenance["max_graph_tokens"] == 8
    frame = table.frame()
    padded = frame[frame["kind"] == "off_graph"]
    assert (padded["num_decode_seqs"] + padded["num_padded_tokens"]).isin([1, 2, 4, 8]).all()
    assert (frame[frame["kind"].isin(["prefill", "chunks"])]["num_padded_tokens"] == 0).all()


def test_the_clock_must_be_the_executors() -> None:
    with pytest.raises(ValueError, match="by the clock 'cpu', not 'wall'"):
        measure(tiny_executor(LIMITS, clock="cpu"), GRID, clock="wall", budget_s=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clock": "sun"}, "clock must be one of"),
        ({"budget_s": -1.0}, "budget_s must be at least 0"),
        ({"budget_s": float("nan")}, "budget_s must be at least 0"),
        ({"target": 0.0}, "target must be above 0"),
        ({"budget_s": 0.0}, "nothing was measured"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measured(SimExecutor(KnownLaw()), **options)


# ------------------------------------------------------------------ statistics


@pytest.mark.parametrize(("size", "first", "last"), [(6, 1, 6), (9, 2, 8), (15, 4, 12), (20, 6, 15), (30, 10, 21)])
def test_the_interval_of_a_median_is_that_of_the_tables(size: int, first: int, last: int) -> None:
    """Ranks of the distribution-free 95 % interval, as tables of nonparametric statistics list them."""
    values = np.random.default_rng(0).permutation(np.arange(1.0, size + 1)).tolist()
    assert median_half_width(values) == pytest.approx((last - first) / 2 / ((size + 1) / 2))


def test_five_values_say_nothing_of_their_median() -> None:
    assert median_half_width([1.0] * 5) == np.inf


def test_outliers_are_those_far_from_their_own_point() -> None:
    points = np.repeat([0, 1, 2], [10, 10, 3])
    step_s = np.concatenate([np.linspace(0.99, 1.01, 10), np.linspace(99.0, 101.0, 10), [1.0, 1.0, 50.0]])
    step_s[4], step_s[15] = 1.5, 60.0
    assert np.flatnonzero(outliers(points, step_s)).tolist() == [4, 15], (
        "three samples do not tell which is the odd one"
    )


# ------------------------------------------------------------------ a GPU's clocks

SMI = "NVIDIA H100 80GB HBM3, 550.54.15, 1980, 1980, 2619, 41, 312.05, 0x0000000000000004\n"


def test_a_gpus_clocks_are_read_from_its_driver() -> None:
    state = parse_gpu_state(SMI)
    assert state is not None
    assert (state.name, state.driver, state.sm_mhz, state.memory_mhz) == (
        "NVIDIA H100 80GB HBM3",
        "550.54.15",
        1980.0,
        2619.0,
    )
    assert state.is_throttled, "by its power limit"
    idle = parse_gpu_state(SMI.replace("0x0000000000000004", "0x0000000000000001"))
    assert idle is not None
    assert not idle.is_throttled
    unknown = parse_gpu_state(SMI.replace("312.05", "[N/A]"))
    assert unknown is not None
    assert np.isnan(unknown.power_w)
    assert parse_gpu_state("") is None
    assert parse_gpu_state("No devices were found") is None


def test_a_driver_that_does_not_answer_is_asked_once() -> None:
    asked: list[Sequence[str]] = []
    silent = GpuWatch(0, every_s=0.0, run=asked.append)
    assert silent.look() is None
    assert silent.look() is None
    assert len(asked) == 1
    assert asked[0][0] == "nvidia-smi"
    answering = GpuWatch(0, every_s=3600.0, run=lambda _: SMI)
    first = answering.look()
    assert first is not None
    assert answering.look() is first
