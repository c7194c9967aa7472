"""How near fitted step times come to real vLLM steps on B300 whose shapes were left out of the fit.

    python -m benchmarks.calibration_b300 vllm_b300_qwen3_32b_sweep.parquet [--seeds 10]

For each tensor parallelism and seed, 70 % of the shapes are fitted and the others predicted.  Wanted: a median
absolute error of at most 2.5 %, nine of ten within 6 %, and 85 to 95 % of the steps in their 90 % intervals.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from windtunnel.calibrate.crossval import split_by_shape
from windtunnel.calibrate.fit import StepTimeFit
from windtunnel.calibrate.step_tables import StepTable, read_step_table

RUN = "fpm_upfront_qwen32_full_once_20260613_194007/tp{size}_ep1_past4096"
SIZES = (1, 2, 4, 8)
SHARE = 0.7


class Outcome(NamedTuple):
    """Errors of the held-out steps of one split, in percent."""

    median_percent: float
    p90_percent: float
    covered_percent: float
    bias_percent: float
    inside_p90_percent: float
    """Of the steps that the model does not call extrapolated."""
    form: str


def b300_table(path: Path, tensor_parallel_size: int) -> StepTable:
    return read_step_table(path, where={"run": RUN.format(size=tensor_parallel_size)})


def outcome(table: StepTable, seed: int) -> Outcome:
    train, test = split_by_shape(table, SHARE, seed)
    cost = StepTimeFit(seed=seed).fit(train)
    predicted_s = cost.step_time_s(test.shapes)
    errors = 100.0 * np.abs(predicted_s / test.step_s - 1.0)
    covered = []
    for shape, step_s in zip(test.rows(), test.step_s, strict=True):
        low_s, high_s = cost.interval_s(shape)
        covered.append(low_s <= step_s <= high_s)
    return Outcome(
        float(np.median(errors)),
        float(np.percentile(errors, 90)),
        100.0 * float(np.mean(covered)),
        100.0 * float(predicted_s.sum() / test.step_s.sum() - 1.0),
        float(np.percentile(errors[~cost.extrapolates(test.shapes)], 90)),
        str(list(cost.evidence.provenance["form"].values())),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    given = parser.parse_args()
    heads = f"{'TP':>2}  {'seed':>4}  {'median %':>8}  {'p90 %':>6}  {'in interval %':>13}  {'bias %':>6}"
    print(f"{heads}  {'inside p90 %':>12}  form")
    for size in SIZES:
        table = b300_table(given.table, size)
        outcomes = []
        begun_s = time.perf_counter()
        for seed in range(given.seeds):
            one = outcome(table, seed)
            outcomes.append(one)
            print(_row(size, str(seed), one, one.form))
        middle = Outcome(
            float(np.median([each.median_percent for each in outcomes])),
            float(np.median([each.p90_percent for each in outcomes])),
            float(np.median([each.covered_percent for each in outcomes])),
            float(np.median([each.bias_percent for each in outcomes])),
            float(np.median([each.inside_p90_percent for each in outcomes])),
            "median",
        )
        worst = Outcome(
            max(each.median_percent for each in outcomes),
            max(each.p90_percent for each in outcomes),
            min(each.covered_percent for each in outcomes),
            max((each.bias_percent for each in outcomes), key=abs),
            max(each.inside_p90_percent for each in outcomes),
            "worst",
        )
        taken_s = (time.perf_counter() - begun_s) / given.seeds
        print(_row(size, "all", middle, f"median of the seeds, {taken_s:.1f} s a fit"))
        print(_row(size, "all", worst, "worst of the seeds (lowest coverage)"))


def _row(size: int, seed: str, one: Outcome, remark: str) -> str:
    return (
        f"{size:>2}  {seed:>4}  {one.median_percent:8.2f}  {one.p90_percent:6.2f}  {one.covered_percent:13.1f}  "
        f"{one.bias_percent:+6.2f}  {one.inside_p90_percent:12.2f}  {remark}"
    )


if __name__ == "__main__":
    main()
