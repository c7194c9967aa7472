"""Does a fork foretell what a live run does?  Our CPU executor, five random moments, the next 30 seconds of each.

    python -m benchmarks.fork_live [--duration 150] [--hidden 256] [--layers 4] [--json FILE] [--markdown FILE]

A grid of steps is measured and a cost model fitted to it.  Poisson arrivals are then served live: every step is
computed by torch on one thread, and time is the processor time that the steps took (waits cost nothing).  A shadow
prices each step beside it.  At random moments a snapshot is taken, and from each four futures are simulated:

- ``true step times``: arrivals, lengths and the recorded step times are known.  It must be what happened, to the
  nanosecond; all that remains is whether the snapshot is right.
- ``known``: arrivals and lengths are known, step times are the profile's.
- ``known, corrected``: the same with the profile divided by the ratio that the shadow had seen by then.
- ``unknown``: what a live server knows.  Arrivals at the recent rate, each like a recent request; lengths drawn from
  recent answers, given what is written; the mean of several futures, with a band from 5 % to 95 %.

No live step is fitted.  The exit status is 1 if the first kind is not exact.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cpu_end_to_end import Setup, capacity, fitted, make_executor, measured
from windtunnel.calibrate.grid import SIZES, make_grid
from windtunnel.calibrate.machine import describe_machine
from windtunnel.executor.real_steps import RealSteps
from windtunnel.executor.shadow import Drift, ShadowExecutor, shadowed
from windtunnel.scenarios.workloads.synthetic import synthetic_workload
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.cost.fitted import FittedCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.per_request import make_scheduler
from windtunnel.sim.engine.plan import StepPlan, StepResult
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.engine.scheduler import Scheduler
from windtunnel.sim.engine.snapshot import RecentRequest, Snapshot, take_snapshot
from windtunnel.sim.engine.snapshot_json import to_json
from windtunnel.sim.fork import Forecast, MetricError, Rate, compare_fork, fork
from windtunnel.sim.records import Records
from windtunnel.sim.replay import RecordedStep, ReplayExecutor
from windtunnel.sim.rng import stream
from windtunnel.sim.simulate import run
from windtunnel.sim.workload import Workload, workload

CONFIG = SchedulerConfig(max_num_seqs=24, max_num_batched_tokens=256, max_model_len=512, num_gpu_blocks=193)
HORIZON_S = 30.0
NUM_MOMENTS = 5
NUM_FUTURES = 10
MAX_TOKENS = 128
"""What every request declares; only the workload knows better."""
_NS = 1_000_000_000
SHOWN = (
    *("request_throughput", "output_throughput", "ttft_mean_ms", "ttft_p90_ms", "tpot_mean_ms", "e2el_mean_ms"),
    *("e2el_p90_ms", "num_preemptions", "running_mean", "waiting_mean", "kv_usage_mean", "busy"),
)


class Moment(NamedTuple):
    """A snapshot and what the shadow said at that time."""

    step: int
    snapshot: Snapshot
    corrected: CostModel
    ratio: float
    take_ms: float
    """Wall time of taking the snapshot."""


class Watched:
    """Runs the steps and takes snapshots at the first step that admits a request which came after each moment."""

    def __init__(self, steps: RealSteps, scheduler: Scheduler, moments_ns: Sequence[int], drift: Drift) -> None:
        self._steps = steps
        self._scheduler = scheduler
        self._left = sorted(moments_ns)
        self._drift = drift
        self.moments: list[Moment] = []

    def execute(self, plan: StepPlan) -> StepResult:
        if self._left and any(each.request.arrival_ns >= self._left[0] for each in plan.admissions):
            self._left.pop(0)
            self._take(plan.number)
        return self._steps.execute(plan)

    def _take(self, step: int) -> None:
        begun_s = time.perf_counter()
        snapshot = take_snapshot(self._scheduler, 0)
        take_ms = 1e3 * (time.perf_counter() - begun_s)
        line = self._drift.line()
        ratio = 1.0 if line is None else line.ratio
        self.moments.append(Moment(step, snapshot, self._drift.corrected(), ratio, take_ms))


class Live(NamedTuple):
    """The live run."""

    load: Workload
    records: Records
    steps: list[RecordedStep]
    moments: list[Moment]
    drift: Drift
    wall_s: float


def serve_live(setup: Setup, cost: FittedCost, executor: Any, rate: float, duration_s: float) -> Live:
    """Serve Poisson arrivals for so long, with the shadow beside and snapshots on the way."""
    load = _load(setup, rate, duration_s)
    scheduler = make_scheduler(setup.config)
    shadow: ShadowExecutor = shadowed(executor, cost)
    real: Any = shadow
    steps = RealSteps(real, scheduler, load, seed=setup.seed)
    draws = stream(setup.seed, "fork moments").uniform(0.08 * duration_s, duration_s - HORIZON_S, NUM_MOMENTS)
    watched = Watched(steps, scheduler, [round(each * _NS) for each in draws], shadow.drift)
    begun_s = time.perf_counter()
    records = run(load, setup.config, ConstantCost(1.0), executor=watched, scheduler=scheduler)
    start_ns = records.replicas[0].steps.start_ns
    moments = [
        each._replace(snapshot=replace(each.snapshot, now_ns=int(start_ns[each.step]))) for each in watched.moments
    ]
    return Live(load, records, steps.steps, moments, shadow.drift, time.perf_counter() - begun_s)


def _load(setup: Setup, rate: float, duration_s: float) -> Workload:
    drawn = synthetic_workload(round(rate * duration_s), rate, setup.prompt, setup.output, seed=setup.seed)
    return replace(drawn, max_tokens=np.full(len(drawn), MAX_TOKENS, np.int64))


def later(load: Workload, now_ns: int) -> Workload:
    """What comes after that time, counted from it."""
    there = load.arrival_ns > now_ns
    columns = ("num_prompt_tokens", "num_output_tokens", "max_tokens", "priority")
    return workload(load.arrival_ns[there] - now_ns, **{name: getattr(load, name)[there] for name in columns})


def as_a_server_knows_it(snapshot: Snapshot, live: Live) -> Snapshot:
    """The snapshot without the lengths that only the workload knows, and with the requests of the last minute."""
    table, now_ns = live.records.requests, snapshot.now_ns
    recent = [
        RecentRequest(
            int(table.arrival_ns[row]),
            int(table.num_prompt_tokens[row]),
            MAX_TOKENS,
            int(table.num_output_tokens[row]) if 0 <= table.finish_ns[row] <= now_ns else None,
            0,
            (),
        )
        for row in np.flatnonzero((now_ns - 60 * _NS <= table.arrival_ns) & (table.arrival_ns <= now_ns)).tolist()
    ]
    requests = [each._replace(num_output_tokens=None) for each in snapshot.requests]
    return replace(snapshot, requests=requests, recent=recent)


def forecasts(moment: Moment, cost: FittedCost, live: Live, seed: int) -> dict[str, Forecast]:
    """The four futures of a moment."""
    snapshot, arrivals = moment.snapshot, later(live.load, moment.snapshot.now_ns)
    replay = ReplayExecutor(live.steps[moment.step :])
    unknown = as_a_server_knows_it(snapshot, live)
    return {
        "true step times": fork(snapshot, cost, HORIZON_S, arrivals, executor=replay),
        "known": fork(snapshot, cost, HORIZON_S, arrivals),
        "known, corrected": fork(snapshot, moment.corrected, HORIZON_S, arrivals),
        "unknown": fork(unknown, moment.corrected, HORIZON_S, Rate(), num_futures=NUM_FUTURES, seed=seed),
    }


def is_exact(errors: Sequence[MetricError]) -> bool:
    """Whether nothing is off by more than arithmetic."""
    return all(
        each.predicted is each.observed is None
        or (
            each.predicted is not None
            and each.observed is not None
            and abs(each.predicted - each.observed) <= 1e-9 * max(1.0, abs(each.observed))
        )
        for each in errors
    )


def moment_as_plain(moment: Moment, cost: FittedCost, live: Live, seed: int) -> dict[str, Any]:
    """A moment, its futures and what happened."""
    begun_s = time.perf_counter()
    found = forecasts(moment, cost, live, seed)
    wall_s = time.perf_counter() - begun_s
    compared = {kind: compare_fork(each, live.records) for kind, each in found.items()}
    begun_s = time.perf_counter()
    num_bytes = len(json.dumps(to_json(moment.snapshot)))
    return {
        "time_s": moment.snapshot.now_ns / _NS,
        "step": moment.step,
        "num_running": moment.snapshot.num_running,
        "num_waiting": moment.snapshot.num_waiting,
        "take_ms": moment.take_ms,
        "to_json_ms": 1e3 * (time.perf_counter() - begun_s),
        "snapshot_bytes": num_bytes,
        "shadow_ratio": moment.ratio,
        "forks_wall_s": wall_s,
        "arrivals": found["unknown"].arrivals,
        "lengths": found["unknown"].lengths,
        "is_exact_with_true_step_times": is_exact(compared["true step times"]),
        "metrics": [
            {
                "name": observed.name,
                "unit": observed.unit,
                "observed": observed.observed,
                **{
                    kind: {"predicted": errors[place].predicted, "error_percent": errors[place].error_percent}
                    for kind, errors in compared.items()
                },
                "band": [found["unknown"].low[observed.name], found["unknown"].high[observed.name]],
            }
            for place, observed in enumerate(compared["known"])
        ],
    }


def prove(setup: Setup, duration_s: float) -> dict[str, Any]:
    """Measure, fit, serve live, fork."""
    executor, begun_s = make_executor(setup), time.perf_counter()
    grid = make_grid(setup.config, setup.grid, setup.seed)
    cost = fitted([measured(executor, grid, setup, 0)], setup)
    measure_s = time.perf_counter() - begun_s
    rate = setup.load * capacity(setup, cost)
    _say(f"{len(grid.points)} shapes measured and fitted in {measure_s:.0f} s; {rate:.3g} requests/s")
    live = serve_live(setup, cost, executor, rate, duration_s)
    executor.close()
    _say(f"{len(live.steps):,} live steps, {live.records.end_ns / _NS:.0f} s of processor time, {live.wall_s:.0f} s")
    moments = [moment_as_plain(each, cost, live, setup.seed + place) for place, each in enumerate(live.moments)]
    return {
        "machine": describe_machine(),
        "hidden": setup.hidden,
        "layers": setup.layers,
        "seed": setup.seed,
        "grid": setup.grid,
        "load": setup.load,
        "requests_per_s": rate,
        "num_requests": len(live.load),
        "engine": asdict(setup.config),
        "horizon_s": HORIZON_S,
        "num_futures": NUM_FUTURES,
        "measure_and_fit_s": measure_s,
        "live_wall_s": live.wall_s,
        "live_s": live.records.end_ns / _NS,
        "num_steps": len(live.steps),
        "num_preemptions": int(live.records.requests.num_preemptions.sum()),
        "profile_errors": [line._asdict() for line in cost.evidence.errors],
        "shadow": [line._asdict() for line in live.drift.lines()],
        "shadow_ratio_in_all": [(line.regime, line.ratio_in_all) for line in live.drift.lines()],
        "moments": moments,
    }


def report(found: Mapping[str, Any]) -> str:
    """What came of it, as Markdown."""
    machine, moments = found["machine"], found["moments"]
    exact = sum(each["is_exact_with_true_step_times"] for each in moments)
    lines = [
        "# Forks of a live run",
        "",
        f"Made by `benchmarks/fork_live.py` with seed {found['seed']} on {machine['date'][:10]}: {machine['cpu']},",
        f"torch {machine['torch']}, one thread, processor time. A model of {found['layers']} layers of "
        f"{found['hidden']} in float32;",
        f"{found['num_requests']:,} Poisson arrivals at {found['requests_per_s']:.3g} requests/s,",
        f"{found['load']:.0%} of capacity; {found['num_steps']:,} steps in {found['live_s']:.0f} s, "
        f"{found['num_preemptions']} preemptions. Each fork looks {found['horizon_s']:g} s ahead.",
        "",
        f"With the true arrivals, lengths and step times {exact} of {len(moments)} forks are what happened, to the "
        "nanosecond.",
        "The table shows the errors of the others: the median of the absolute errors of all moments, and the largest.",
        "For the unknown, the last column says how often the truth lay in the band from 5 % to 95 % of "
        f"{found['num_futures']} futures.",
        "",
        "| metric | observed | known | known, corrected | unknown | in the band |",
        "|---|---|---|---|---|---|",
        *(_metric_row(name, moments) for name in SHOWN),
        "",
        "| moment | running | waiting | snapshot | its JSON | shadow ratio |",
        "|---|---|---|---|---|---|",
        *(
            f"| {each['time_s']:.1f} s | {each['num_running']} | {each['num_waiting']} | {each['take_ms']:.2f} ms | "
            f"{each['snapshot_bytes'] / 1024:.0f} KiB | {each['shadow_ratio']:.3f} |"
            for each in moments
        ),
        "",
        "Shadow at the end of the run (predicted over measured, the latest steps and all; errors of single steps):",
        "",
        "| regime | steps | ratio | ratio of all | p50 error | p90 error | extrapolated |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {line['regime']} | {line['num_steps_in_all']:,} | {line['ratio']:.3f} | {in_all:.3f} | "
            f"{line['p50_percent']:.1f} % | {line['p90_percent']:.1f} % | {100 * line['extrapolated_share']:.1f} % |"
            for line, (_, in_all) in zip(found["shadow"], found["shadow_ratio_in_all"], strict=True)
        ),
        "",
    ]
    return "\n".join(lines)


def _metric_row(name: str, moments: Sequence[Mapping[str, Any]]) -> str:
    rows = [row for each in moments for row in each["metrics"] if row["name"] == name]
    observed = [row["observed"] for row in rows if row["observed"] is not None]
    span = f"{min(observed):.4g} to {max(observed):.4g} {rows[0]['unit']}" if observed else "-"
    cells = [_errors(rows, kind) for kind in ("known", "known, corrected", "unknown")]
    inside = sum(_is_inside(row) for row in rows)
    return f"| {name} | {span} | {' | '.join(cells)} | {inside} of {len(rows)} |"


def _errors(rows: Sequence[Mapping[str, Any]], kind: str) -> str:
    errors = [abs(row[kind]["error_percent"]) for row in rows if row[kind]["error_percent"] is not None]
    return f"{np.median(errors):.1f} %, {max(errors):.1f} %" if errors else "-"


def _is_inside(row: Mapping[str, Any]) -> bool:
    low, high = row["band"]
    return low is not None and row["observed"] is not None and bool(low <= row["observed"] <= high)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=150.0, metavar="S", help="of the arrivals, processor time")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--load", type=float, default=0.85, help="share of the capacity that the simulation finds")
    parser.add_argument("--grid", choices=SIZES, default="default")
    parser.add_argument("--measure-budget", type=float, default=90.0, metavar="S", help="wall time of measuring")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.duration < 2 * HORIZON_S:
        parser.error(f"--duration must be at least {2 * HORIZON_S:g} s, so that forks have a future to look at")
    setup = Setup(
        hidden=given.hidden,
        layers=given.layers,
        num_live_runs=0,
        load=given.load,
        seed=given.seed,
        grid=given.grid,
        measure_budget_s=given.measure_budget,
        config=CONFIG,
    )
    found = prove(setup, given.duration)
    text = report(found)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.markdown:
        given.markdown.write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(each["is_exact_with_true_step_times"] for each in found["moments"]) else 1


if __name__ == "__main__":
    sys.exit(main())
