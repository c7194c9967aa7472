"""How near fitted step times come to real vLLM steps on B300 whose shapes were left out of the fit.

    python -m benchmarks.calibration_b300 vllm_b300_qwen3_32b_sweep.parquet [--seed-range 0:20] [--tp 1,2,4,8]

For each tensor parallelism and seed, 70 % of the shapes are fitted and the others predicted.  Wanted: a median
absolute error of at most 2.5 %, nine of ten within 6 %, and 85 to 95 % of the steps in their 90 % intervals.  Steps are
pooled; "by shape" counts each shape once, however often it was repeated.  The last rows say how many single divisions
hold each limit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from windtunnel.calibrate.crossval import split_by_shape
from windtunnel.calibrate.fit import StepTimeFit
from windtunnel.calibrate.step_tables import StepTable, read_step_table

RUN = "fpm_upfront_qwen32_full_once_20260613_194007/tp{size}_ep1_past4096"
SIZES = (1, 2, 4, 8)
SHARE = 0.7
MEDIAN_LIMIT_PERCENT = 2.5
P90_LIMIT_PERCENT = 6.0
COVERED_PERCENT = (85.0, 95.0)


class Outcome(NamedTuple):
    """Errors of the held-out steps of one division, in percent."""

    median_percent: float
    p90_percent: float
    covered_percent: float
    bias_percent: float
    inside_p90_percent: float
    """Of the steps that the model does not call extrapolated."""
    shape_median_percent: float
    """Of the shapes' median errors, so that each shape counts once."""
    shape_p90_percent: float
    shape_covered_percent: float

    @property
    def holds(self) -> tuple[bool, bool, bool, bool, bool, bool]:
        """Median, 90th percentile and coverage within their limits: of the steps, then by shape."""
        low, high = COVERED_PERCENT
        return (
            self.median_percent <= MEDIAN_LIMIT_PERCENT,
            self.p90_percent <= P90_LIMIT_PERCENT,
            low <= self.covered_percent <= high,
            self.shape_median_percent <= MEDIAN_LIMIT_PERCENT,
            self.shape_p90_percent <= P90_LIMIT_PERCENT,
            low <= self.shape_covered_percent <= high,
        )


def b300_table(path: Path, tensor_parallel_size: int) -> StepTable:
    return read_step_table(path, where={"run": RUN.format(size=tensor_parallel_size)})


def outcome(table: StepTable, seed: int) -> Outcome:
    train, test = split_by_shape(table, SHARE, seed)
    cost = StepTimeFit().fit(train)
    predicted_s = cost.step_time_s(test.shapes)
    errors = 100.0 * np.abs(predicted_s / test.step_s - 1.0)
    bounds = np.array([cost.interval_s(shape) for shape in test.rows()])
    covered = 100.0 * ((bounds[:, 0] <= test.step_s) & (test.step_s <= bounds[:, 1]))
    ids = test.shape_ids
    of_shapes = [float(np.median(errors[ids == shape])) for shape in range(int(ids.max()) + 1)]
    return Outcome(
        float(np.median(errors)),
        float(np.percentile(errors, 90)),
        float(np.mean(covered)),
        100.0 * float(predicted_s.sum() / test.step_s.sum() - 1.0),
        float(np.percentile(errors[~cost.extrapolates(test.shapes)], 90)),
        float(np.median(of_shapes)),
        float(np.percentile(of_shapes, 90)),
        float(np.average(covered, weights=1.0 / np.bincount(ids)[ids])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--seed-range", type=_range, default=range(20), metavar="FROM:TO")
    parser.add_argument("--tp", type=_sizes, default=SIZES, metavar="SIZES")
    given = parser.parse_args()
    print("TP  seed  median %   p90 %  covered %  bias %  inside p90 %  by shape: median %   p90 %  covered %")
    every = []
    for size in given.tp:
        table = b300_table(given.table, size)
        begun_s = time.perf_counter()
        outcomes = []
        for seed in given.seed_range:
            outcomes.append(outcome(table, seed))
            print(_row(size, str(seed), outcomes[-1]), flush=True)
        taken_s = (time.perf_counter() - begun_s) / len(outcomes)
        print(_row(size, "half", Outcome(*np.median(outcomes, axis=0))), f" medians, {taken_s:.1f} s a division")
        print(_shares(f"TP {size}", outcomes))
        every += outcomes
    print(_shares("all", every))


def _range(text: str) -> range:
    low, _, high = text.partition(":")
    seeds = range(int(low), int(high))
    if not seeds:
        raise argparse.ArgumentTypeError(f"must be FROM:TO with TO above FROM, got {text!r}")
    return seeds


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _row(size: int, seed: str, one: Outcome) -> str:
    return (
        f"{size:>2}  {seed:>4}  {one.median_percent:8.2f}  {one.p90_percent:6.2f}  {one.covered_percent:9.1f}  "
        f"{one.bias_percent:+6.2f}  {one.inside_p90_percent:12.2f}  {one.shape_median_percent:18.2f}  "
        f"{one.shape_p90_percent:6.2f}  {one.shape_covered_percent:9.1f}"
    )


def _shares(name: str, outcomes: Sequence[Outcome]) -> str:
    steps_median, steps_p90, steps_covered, median, p90, covered = np.sum([one.holds for one in outcomes], axis=0)
    return (
        f"{name}: of {len(outcomes)} divisions hold the median {steps_median}, the 90th percentile {steps_p90}, the "
        f"coverage {steps_covered}; by shape {median}, {p90}, {covered}; mean coverage of steps "
        f"{np.mean([one.covered_percent for one in outcomes]):.1f} %"
    )


if __name__ == "__main__":
    main()
