"""How near calibrated step times come to measured ones: reports/published/calibration.html and calibration.json.

    python -m benchmarks.calibration_page [--b300 TABLE.parquet] [--live DATA] [--seeds 20] [--output FOLDER]

TABLE holds real steps of vLLM on B300 (``benchmarks.calibration_b300``), DATA the live runs of a vLLM server
(``benchmarks.calibration_live``).  What other benchmarks wrote is read from the output folder
(``kernels_composed.json``, ``cpu_end_to_end.json``), and the bundled profiles from their index.  A part whose input is
missing says so; without ``--b300`` or ``--live`` that part is taken from the last calibration.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import calibration_b300, calibration_live
from windtunnel import __version__
from windtunnel.calibrate.crossval import split_by_shape
from windtunnel.calibrate.errors import error_lines
from windtunnel.calibrate.fit import StepTimeFit
from windtunnel.calibrate.live_runs import live_step_table, read_live_run
from windtunnel.calibrate.step_tables import StepTable
from windtunnel.reports.calibration_page import MISSING, write_calibration_page
from windtunnel.reports.files import atomic_writer
from windtunnel.sim.cost import bundled
from windtunnel.sim.cost.features import REGIMES, regimes_of
from windtunnel.sim.cost.fitted import FittedCost

MOST_POINTS = 300
"""Steps of one group that are drawn."""
OUTPUT = Path("reports/published")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--b300", type=Path, help="table of steps on B300")
    parser.add_argument("--live", type=Path, help="folder of the live runs")
    parser.add_argument("--seeds", type=int, default=20, help="random divisions of the B300 table")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    before = _json_of(given.output / "calibration.json")
    content: dict[str, Any] = {
        "windtunnel": __version__,
        "b300": _part(given.b300, before.get("b300"), lambda path: b300_part(path, given.seeds), "--b300"),
        "live": _part(given.live, before.get("live"), live_part, "--live"),
        "kernels": _json_of(given.output / "kernels_composed.json") or _missing("kernels_composed.json"),
        "cpu": _json_of(given.output / "cpu_end_to_end.json") or _missing("cpu_end_to_end.json"),
        "bundled": _json_of(bundled.INDEX) or _missing("the index of bundled profiles"),
    }
    with atomic_writer(given.output / "calibration.json") as file:
        file.write(json.dumps(_shortened(content), separators=(",", ":")) + "\n")
    write_calibration_page(given.output / "calibration.html", _shortened(content), version=__version__)
    print(f"wrote {given.output / 'calibration.html'} and .json")
    for name, part in content.items():
        if isinstance(part, dict) and MISSING in part:
            print(f"{name}: {part[MISSING]}")


def _part(path: Path | None, before: Any, make: Callable[[Path], Any], option: str) -> Any:
    if path is not None:
        return make(path)
    return before or _missing(f"its measured steps (option {option})")


def _missing(what: str) -> dict[str, str]:
    return {MISSING: f"not shown: {what} was not at hand"}


def _json_of(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {"rows": found}


# ------------------------------------------------------------------ B300


def b300_part(path: Path, num_seeds: int) -> list[dict[str, Any]]:
    """For each tensor parallelism the errors of every division, and each step as the first predicted it that could."""
    return [_b300_size(path, size, num_seeds) for size in calibration_b300.SIZES]


def _b300_size(path: Path, size: int, num_seeds: int) -> dict[str, Any]:
    table = calibration_b300.b300_table(path, size)
    divisions = [calibration_b300.outcome(table, seed)._asdict() for seed in range(num_seeds)]
    predicted_s, covered = _each_held_out(table, num_seeds)
    known = np.isfinite(predicted_s)
    group = _group(f"B300, TP {size}", table.take(known), predicted_s[known], covered[known])
    return {**group, "tensor_parallel_size": size, "num_steps_in_table": len(table), "divisions": divisions}


def _each_held_out(table: StepTable, num_seeds: int) -> tuple[Any, Any]:
    """Every step's time by the first division that had held its shape out (NaN if none had), and if it is covered."""
    predicted_s, covered = np.full(len(table), np.nan), np.zeros(len(table), bool)
    for seed in range(num_seeds):
        train, _ = split_by_shape(table, calibration_b300.SHARE, seed)
        new = ~_has_shape_of(table, train) & np.isnan(predicted_s)
        if new.any():
            cost = StepTimeFit(seed=seed).fit(train)
            asked = table.take(new)
            predicted_s[new], covered[new] = cost.step_time_s(asked.shapes), _covered(cost, asked)
    return predicted_s, covered


def _has_shape_of(table: StepTable, train: StepTable) -> Any:
    seen = set(train.rows())
    return np.array([shape in seen for shape in table.rows()])


def _covered(cost: FittedCost, table: StepTable) -> Any:
    spans = [cost.interval_s(shape) for shape in table.rows()]
    return np.array([low <= step_s <= high for (low, high), step_s in zip(spans, table.step_s, strict=True)])


# ------------------------------------------------------------------ live runs


def live_part(data: Path) -> dict[str, Any]:
    """Predicted and live figures of the runs of both servers, and the steps of the predicted runs."""
    paced = calibration_live.run_study(data, calibration_live.PACED)
    bare = calibration_live.run_study(data, calibration_live.BARE, path_from=calibration_live.PACED)
    groups = []
    for name in calibration_live.PACED.predicted:
        table = live_step_table([read_live_run(data / name)])
        cost = paced.profile.cost
        predicted_s = np.asarray(cost.step_time_s(table.shapes))
        groups.append(_group(f"vLLM on CPU, {name}", table, predicted_s, _covered(cost, table)))
    return {
        "paced": calibration_live.as_plain(paced),
        "bare": {key: calibration_live.as_plain(bare)[key] for key in ("study", "lines", "decisions")},
        "groups": groups,
    }


# ------------------------------------------------------------------ what is kept of steps


def _group(name: str, table: StepTable, predicted_s: Any, covered: Any) -> dict[str, Any]:
    """Errors by regime, and a thinned-out set of points."""
    regimes = regimes_of(table.shapes)
    residuals = 100.0 * (predicted_s / table.step_s - 1.0)
    order = np.argsort(table.step_s, kind="stable")
    shown = order[np.unique(np.linspace(0, len(order) - 1, MOST_POINTS).astype(np.int64))]
    return {
        "name": name,
        "num_steps": len(table),
        "errors": [line._asdict() for line in error_lines(table, predicted_s, covered)],
        "residuals": {
            regime: {
                "num_steps": int((regimes == number).sum()),
                "percentiles_5_25_50_75_95": np.percentile(residuals[regimes == number], (5, 25, 50, 75, 95)).tolist(),
            }
            for number, regime in enumerate(REGIMES)
            if (regimes == number).any()
        },
        "points": {
            "measured_ms": (1e3 * table.step_s[shown]).tolist(),
            "predicted_ms": (1e3 * predicted_s[shown]).tolist(),
            "regime": [REGIMES[number] for number in regimes[shown].tolist()],
        },
    }


def _shortened(content: Any) -> Any:
    """The same with five significant digits, which is more than any of it is sure of."""
    if isinstance(content, float):
        return float(f"{content:.5g}")
    if isinstance(content, dict):
        return {key: _shortened(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_shortened(value) for value in content]
    return content


if __name__ == "__main__":
    main()
