"""From measuring to predicting on one machine: does a profile of our own CPU executor foretell a live run of it?

    python -m benchmarks.cpu_end_to_end [--clock cpu|wall] [--hidden 384] [--layers 6] [--profile FILE.json]

A grid of steps is measured, a cost model fitted to it, and from the simulation follows the rate of requests that is
70 % of what the executor can serve.  Poisson arrivals at that rate are then served live (every step computed) several
times, and predicted once.  Printed are predicted and measured, the error, and how far the live runs themselves are
apart.  Shared machines change their speed in phases of seconds to minutes, so the grid is measured again after each
live run, and all of it fitted; no live step is.  The prediction of the first measuring alone is shown beside.

With the clock ``cpu`` the exit status is 1 if a limit is broken: busy time and throughput 10 %, mean E2EL, ITL and
TTFT 25 %, 95th percentile of TTFT 35 %.  The clock ``wall`` is reported, not judged: other processes are in it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.errors import error_lines, error_table
from windtunnel.calibrate.fit import StepTimeFit
from windtunnel.calibrate.grid import SIZES, Grid, make_grid
from windtunnel.calibrate.machine import cpu_name, describe_machine
from windtunnel.calibrate.measure import measure
from windtunnel.calibrate.origins import merged
from windtunnel.calibrate.step_tables import StepTable
from windtunnel.executor.cache import PagedKvCache
from windtunnel.executor.model import Decoder
from windtunnel.executor.model_config import DecoderConfig
from windtunnel.executor.real_steps import LiveRun, run_live
from windtunnel.executor.reference import TorchOps
from windtunnel.executor.torch_executor import CLOCKS, TorchExecutor
from windtunnel.executor.weights import random_weights
from windtunnel.scenarios.saturation import saturation_request_throughput
from windtunnel.scenarios.workloads.lengths import Lognormal
from windtunnel.scenarios.workloads.synthetic import synthetic_workload
from windtunnel.sim.cost.fitted import ErrorLine, FittedCost
from windtunnel.sim.cost.profile import save_profile
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.metrics.summary import summarize
from windtunnel.sim.records import AnyTable, Records, table_columns
from windtunnel.sim.replay import ReplayExecutor
from windtunnel.sim.simulate import run
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload

LIMITS_PERCENT = {
    "busy time": 10.0,
    "request throughput": 10.0,
    "E2EL mean": 25.0,
    "ITL mean": 25.0,
    "TTFT mean": 25.0,
    "TTFT p95": 35.0,
}
"""Largest absolute errors, in percent of the median live run."""
UNITS = {"busy time": "s", "request throughput": "requests/s", "makespan": "s"}
"""Of those that are not in milliseconds."""
_CLOCK_NAMES = {"cpu": "processor time of the thread", "wall": "wall time"}


_CONFIG = SchedulerConfig(max_num_seqs=24, max_num_batched_tokens=256, max_model_len=512, num_gpu_blocks=769)
_PROMPT = Lognormal(96.0, 0.7, 8, 320)
_OUTPUT = Lognormal(32.0, 0.7, 2, 128)


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured, served and predicted."""

    hidden: int = 384
    layers: int = 6
    vocab: int = 2048
    clock: str = "cpu"
    num_requests: int = 240
    num_live_runs: int = 3
    load: float = 0.7
    """Share of what the executor can serve."""
    seed: int = 0
    grid: str = "default"
    measure_budget_s: float = 240.0
    """Wall time that measuring may take, all parts together."""
    config: SchedulerConfig = _CONFIG
    prompt: Lognormal = _PROMPT
    output: Lognormal = _OUTPUT


class Outcome(NamedTuple):
    """What came of it."""

    setup: Setup
    cost: FittedCost
    request_rate: float
    predicted: dict[str, float]
    first_predicted: dict[str, float]
    """By the profile of the first pass of measuring alone."""
    live: list[dict[str, float]]
    step_bias_percent: list[float]
    """Per live run: its steps' times as the profile prices them, summed, over what they took, less one."""
    traffic_errors: tuple[ErrorLine, ...]
    """The same by regime, each step by itself, all live runs together."""
    extrapolated_percent: float
    """Live steps outside of what was measured."""
    is_replayed: bool
    """Whether the live runs come out the same when their step times are fed back."""
    num_parts: int
    """Times that the grid was measured."""
    measure_s: float
    """Wall time of measuring and fitting."""
    live_s: list[float]
    """Wall time of each live run."""

    def median(self, metric: str) -> float:
        """Of the live runs."""
        return float(np.median([each[metric] for each in self.live]))

    def error_percent(self, metric: str, predicted: dict[str, float] | None = None) -> float:
        """Predicted over the median live run, less one."""
        return 100.0 * ((predicted or self.predicted)[metric] / self.median(metric) - 1.0)

    def spread_percent(self, metric: str) -> float:
        """How far apart the live runs are: the largest less the smallest, over the median."""
        values = [each[metric] for each in self.live]
        return 100.0 * (max(values) - min(values)) / self.median(metric)

    @property
    def broken(self) -> list[str]:
        """Limits that were not kept, in words."""
        exact = [] if self.is_replayed else ["recorded step times do not reproduce the live run"]
        return exact + [
            f"{metric} is {self.error_percent(metric):+.1f} % off, the limit is {limit:g} %"
            for metric, limit in LIMITS_PERCENT.items()
            if abs(self.error_percent(metric)) > limit
        ]


def prove(setup: Setup, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Measure, fit, serve live and predict."""
    executor, begun_s = make_executor(setup), time.perf_counter()
    grid = make_grid(setup.config, setup.grid, setup.seed)
    parts = [measured(executor, grid, setup, 0)]
    first = fitted(parts, setup)
    measure_s = time.perf_counter() - begun_s
    rate = setup.load * capacity(setup, first)
    load = workload_at(setup, rate)
    say(f"{len(grid.points)} shapes in {measure_s:.0f} s; {rate:.3g} requests/s are {setup.load:.0%} of capacity")
    live: list[LiveRun] = []
    live_s = []
    for number in range(1, setup.num_live_runs + 1):
        begun_s = time.perf_counter()
        live.append(run_live(load, setup.config, executor, seed=setup.seed))
        live_s.append(time.perf_counter() - begun_s)
        say(f"live run {number}: {len(live[-1].steps)} steps in {live_s[-1]:.0f} s")
        begun_s = time.perf_counter()
        parts.append(measured(executor, grid, setup, number))
        measure_s += time.perf_counter() - begun_s
    executor.close()
    begun_s = time.perf_counter()
    cost = fitted(parts, setup)
    measure_s += time.perf_counter() - begun_s
    traffic = joined([as_table(each) for each in live])
    traffic_errors = error_lines(traffic, cost.step_time_s(traffic.shapes), covered(cost, traffic))
    predicted, first_predicted = (metrics(run(load, setup.config, each), load) for each in (cost, first))
    return Outcome(
        setup=setup,
        cost=with_stated_error(cost, traffic_errors[0]),
        request_rate=rate,
        predicted=predicted,
        first_predicted=first_predicted,
        live=[metrics(each.records, load) for each in live],
        step_bias_percent=[bias_percent(cost, as_table(each)) for each in live],
        traffic_errors=traffic_errors,
        extrapolated_percent=100.0 * float(np.mean(cost.extrapolates(traffic.shapes))),
        is_replayed=all(is_replayed(each, load, setup.config, cost) for each in live),
        num_parts=len(parts),
        measure_s=measure_s,
        live_s=live_s,
    )


def make_executor(setup: Setup) -> TorchExecutor:
    """One thread, float32, random weights."""
    num_heads = setup.hidden // 64
    config = DecoderConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": setup.vocab,
            "hidden_size": setup.hidden,
            "intermediate_size": 11 * setup.hidden // 4,
            "num_hidden_layers": setup.layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": 2 if num_heads % 2 == 0 else 1,
            "max_position_embeddings": setup.config.max_model_len,
        }
    )
    model = Decoder(config, random_weights(config, setup.seed), TorchOps())
    cache = PagedKvCache(config, setup.config.num_gpu_blocks, setup.config.block_size)
    return TorchExecutor(model, cache, clock=setup.clock)


def measured(executor: TorchExecutor, grid: Grid, setup: Setup, number: int) -> StepTable:
    """The grid, measured in its share of the time."""
    budget_s = setup.measure_budget_s / (setup.num_live_runs + 1)
    seed = setup.seed + number
    return measure(executor, grid, clock=setup.clock, budget_s=budget_s, seed=seed).step_table()


def fitted(parts: Sequence[StepTable], setup: Setup) -> FittedCost:
    """The cost model of all these steps; there are no CUDA graphs on a CPU."""
    return StepTimeFit(seed=setup.seed, max_graph_tokens=0).fit(joined(parts), provenance=provenance(setup))


def joined(parts: Sequence[StepTable]) -> StepTable:
    """All their steps."""
    columns: list[Any] = [np.concatenate(each) for each in zip(*(part.shapes for part in parts), strict=True)]
    told = merged((f"part {number}", part.provenance) for number, part in enumerate(parts))
    return StepTable(StepShape(*columns), np.concatenate([part.step_s for part in parts]), told)


def capacity(setup: Setup, cost: FittedCost) -> float:
    """Requests per second that the executor can serve, as the simulation has it."""
    found = saturation_request_throughput(workload_at(setup, 1.0), System(setup.config, cost))
    if found is None:
        raise ValueError(f"{setup.num_requests} requests never fill {setup.config.max_num_seqs} seats: ask for more")
    return found


def workload_at(setup: Setup, request_rate: float) -> Workload:
    """The same requests at any rate, arriving at random."""
    return synthetic_workload(setup.num_requests, request_rate, setup.prompt, setup.output, seed=setup.seed)


def metrics(records: Records, load: Workload) -> dict[str, float]:
    """What is compared: seconds, requests per second, milliseconds."""
    summary = summarize(records, load)
    steps = records.replicas[0].steps
    found = {
        "busy time": float((steps.end_ns - steps.start_ns).sum()) * 1e-9,
        "request throughput": summary.request_throughput,
        "makespan": records.end_ns * 1e-9,
        "E2EL mean": summary.e2el.mean_ms,
        "ITL mean": summary.itl.mean_ms,
        "TPOT mean": summary.tpot.mean_ms,
        "TTFT mean": summary.ttft.mean_ms,
        "TTFT p50": summary.ttft.percentile_ms(50),
        "TTFT p95": summary.ttft.percentile_ms(95),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def as_table(live: LiveRun) -> StepTable:
    """The steps of a live run."""
    columns: list[Any] = list(np.array([step.shape for step in live.steps], np.int64).T)
    return StepTable(StepShape(*columns), np.array([step.step_ns for step in live.steps]) * 1e-9)


def bias_percent(cost: FittedCost, steps: StepTable) -> float:
    """How far off the sum of the steps' times is, as the profile prices them, in percent."""
    return 100.0 * (float(np.sum(cost.step_time_s(steps.shapes)) / np.sum(steps.step_s)) - 1.0)


def covered(cost: FittedCost, steps: StepTable) -> NDArray[np.bool_]:
    """Which steps are in the profile's 90 % intervals."""
    low_s, high_s = np.array([cost.interval_s(shape) for shape in steps.rows()]).T
    inside: NDArray[np.bool_] = (low_s <= steps.step_s) & (steps.step_s <= high_s)
    return inside


def is_replayed(live: LiveRun, load: Workload, config: SchedulerConfig, cost: FittedCost) -> bool:
    """Whether the recorded step times give the same records, each token's time to the nanosecond."""
    replay = ReplayExecutor(live.steps)
    again = run(load, config, cost, executor=replay)
    return replay.num_left == 0 and _content(again) == _content(live.records)


def _content(records: Records) -> list[bytes]:
    tables: list[AnyTable] = [records.requests]
    for replica in records.replicas:
        tables += [replica.steps, replica.spans, replica.preemptions]
    return [column.tobytes() for table in tables for column in table_columns(table).values()]


def provenance(setup: Setup) -> dict[str, Any]:
    """What the profile says of its origin, beyond what the measured table does."""
    return {
        "statement": f"measured on one thread of {cpu_name()}, {_CLOCK_NAMES[setup.clock]}, around live runs",
        "model": f"Llama-like: {setup.layers} layers of {setup.hidden}, vocabulary {setup.vocab}",
        "tables": [f"the {setup.grid} grid of windtunnel measure, {setup.num_live_runs + 1} times"],
        **describe_machine(),
    }


def with_stated_error(cost: FittedCost, live: ErrorLine) -> FittedCost:
    """The same model, whose provenance says how far it was off on the steps of the live runs."""
    stated = {
        "p50_percent": live.p50_percent,
        "p90_percent": live.p90_percent,
        "rests_on": f"{live.num_steps:,} steps of live runs, none of which was fitted",
    }
    evidence = replace(cost.evidence, provenance={**cost.evidence.provenance, "stated_error": stated})
    return FittedCost(cost.parameters, evidence)


def comparison(outcome: Outcome) -> list[dict[str, Any]]:
    """A row a metric: predicted, measured, error, limit and the spread of the live runs."""
    return [
        {
            "metric": metric,
            "unit": UNITS.get(metric, "ms"),
            "predicted": predicted,
            "live_median": outcome.median(metric),
            "live": [each[metric] for each in outcome.live],
            "error_percent": outcome.error_percent(metric),
            "limit_percent": LIMITS_PERCENT.get(metric),
            "live_spread_percent": outcome.spread_percent(metric),
            "first_pass_error_percent": outcome.error_percent(metric, outcome.first_predicted),
        }
        for metric, predicted in outcome.predicted.items()
    ]


def as_text(outcome: Outcome) -> str:
    """The comparison as a table of Markdown."""
    lines = [
        "| metric | unit | predicted | live (median) | error | limit | live runs apart | error after first pass |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in comparison(outcome):
        limit = "" if row["limit_percent"] is None else f"{row['limit_percent']:g} %"
        lines.append(
            f"| {row['metric']} | {row['unit']} | {row['predicted']:.4g} | {row['live_median']:.4g} | "
            f"{row['error_percent']:+.1f} % | {limit} | {row['live_spread_percent']:.1f} % | "
            f"{row['first_pass_error_percent']:+.1f} % |"
        )
    return "\n".join(lines)


def as_plain(outcome: Outcome) -> dict[str, Any]:
    """All of it, for a file."""
    setup = outcome.setup
    return {
        "machine": describe_machine(),
        "clock": setup.clock,
        "hidden": setup.hidden,
        "layers": setup.layers,
        "vocab": setup.vocab,
        "seed": setup.seed,
        "grid": setup.grid,
        "num_requests": setup.num_requests,
        "load": setup.load,
        "request_rate": outcome.request_rate,
        "engine": asdict(setup.config),
        "prompt": asdict(setup.prompt),
        "output": asdict(setup.output),
        "num_measurings": outcome.num_parts,
        "measure_and_fit_s": outcome.measure_s,
        "live_s": outcome.live_s,
        "step_bias_percent": outcome.step_bias_percent,
        "extrapolated_percent": outcome.extrapolated_percent,
        "traffic_errors": [line._asdict() for line in outcome.traffic_errors],
        "is_replayed_exactly": outcome.is_replayed,
        "comparison": comparison(outcome),
        "profile_errors": [line._asdict() for line in outcome.cost.evidence.errors],
        "broken": outcome.broken,
    }


def report(outcome: Outcome) -> str:
    """What happened, as Markdown for people."""
    setup, machine = outcome.setup, describe_machine()
    bias = ", ".join(f"{each:+.1f} %" for each in outcome.step_bias_percent)
    judged = "All limits are kept." if not outcome.broken else "Broken: " + "; ".join(outcome.broken) + "."
    load = f"{machine['load_average'][2]:.1f}" if "load_average" in machine else "unknown"
    if setup.clock != "cpu":
        judged = "Not judged: other processes are in the wall clock."
    return f"""# A live run of the CPU executor, predicted

Made by `benchmarks/cpu_end_to_end.py` with seed {setup.seed} on {machine["date"][:10]}: {machine["cpu"]},
{machine["num_cpus"]} cores, load average over the last 15 minutes {load}, torch {machine["torch"]}, one thread,
{_CLOCK_NAMES[setup.clock]}.
The model has {setup.layers} layers of {setup.hidden} in float32 and random weights.

{setup.num_requests} requests with Poisson arrivals at {outcome.request_rate:.3g} a second, {setup.load:.0%} of the
capacity that the simulation finds, were served live {len(outcome.live)} times. The grid of steps was measured
{outcome.num_parts} times, before and after each live run: {outcome.measure_s:.0f} s with the fits. The prediction comes
from all of it, the last column from what was measured before the first live run.

{as_text(outcome)}

The live steps, priced by the profile and summed, are off by {bias}. Recorded step times fed back
{"reproduce" if outcome.is_replayed else "do NOT reproduce"} every token's time of the live runs to the nanosecond.
{judged}

The live steps one by one, of which {outcome.extrapolated_percent:.1f} % are outside of what was measured:

```
{error_table(outcome.traffic_errors)}
```

The profile on shapes that were left out of the fit:

```
{error_table(outcome.cost.evidence.errors)}
```
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = Setup()
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--hidden", type=int, default=own.hidden, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=own.layers)
    parser.add_argument("--requests", type=int, default=own.num_requests)
    parser.add_argument("--live-runs", type=int, default=own.num_live_runs)
    parser.add_argument("--load", type=float, default=own.load, help="share of the capacity")
    parser.add_argument("--budget", type=float, default=own.measure_budget_s, help="seconds of measuring, in all")
    parser.add_argument("--grid", choices=tuple(SIZES), default=own.grid)
    parser.add_argument("--seed", type=int, default=own.seed)
    parser.add_argument("--profile", type=Path, help="where the profile goes")
    parser.add_argument("--output", type=Path, help="folder of the reports, such as reports/published")
    given = parser.parse_args()
    setup = Setup(
        hidden=given.hidden,
        layers=given.layers,
        clock=given.clock,
        num_requests=given.requests,
        num_live_runs=given.live_runs,
        load=given.load,
        grid=given.grid,
        measure_budget_s=given.budget,
        seed=given.seed,
    )
    outcome = prove(setup, lambda text: print(text, file=sys.stderr, flush=True))
    print(report(outcome))
    if given.profile:
        save_profile(outcome.cost, given.profile)
    if given.output:
        given.output.mkdir(parents=True, exist_ok=True)
        written = json.dumps(as_plain(outcome), indent=1) + "\n"
        (given.output / "cpu_end_to_end.json").write_text(written, encoding="utf-8")
        (given.output / "cpu_end_to_end.md").write_text(report(outcome), encoding="utf-8")
    return 1 if outcome.broken and setup.clock == "cpu" else 0


if __name__ == "__main__":
    raise SystemExit(main())
