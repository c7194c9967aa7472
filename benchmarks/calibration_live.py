"""How near simulations come to live runs of a real vLLM server, with a profile fitted on other runs of that server.

    python -m benchmarks.calibration_live DATA [--json] [--bare]

DATA is the folder of the live runs (``SERVER/RUN/``; ``calibrate.live_runs`` says what is in it).  Step times and the
way between client and engine are learned from three runs (one request at a time, eight at a time, all at once); three
others are predicted: a load of half the capacity, one above it, and one that preempts, on a smaller KV pool.  Of a
predicted run nothing is used but when the client sent which lengths, and the limits of its server.

Noise of steps and of the way to the engine is drawn: a prediction is the mean of several simulations, and what they
spread by is printed beside it.  Figures are the client's, as ``vllm bench serve`` defines them; those at the engine,
from the API server's arrival to the end of the steps, are shown as well and not judged.  ``--bare`` adds the runs of
the server whose steps were not paced: there the machine's speed changed by 1.6 to 1.8 times in phases, which no model
of the server can know, so nothing is judged.  Exit status 1 if a limit is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windtunnel.calibrate.fit import StepTimeFit
from windtunnel.calibrate.http_path import HttpPath
from windtunnel.calibrate.live_runs import (
    LiveRun,
    RunFigures,
    live_step_table,
    read_live_run,
    run_figures,
    simulated_tokens_s,
)
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.cost.fitted import FittedCost
from windtunnel.sim.engine.per_request import make_scheduler
from windtunnel.sim.engine.plan import StepPlan, StepResult
from windtunnel.sim.engine.protocols import SchedulerProtocol
from windtunnel.sim.simulate import run as simulate
from windtunnel.sim.simulate import serve
from windtunnel.sim.system import System

NUM_SIMULATIONS = 20
SEED = 0
LIMITS_PERCENT = {"makespan": 2.0, "mean": 4.0, "p95": 8.0, "preemptions": 10.0}
"""Largest errors that are accepted, by the kind of figure."""


class Study(NamedTuple):
    """Runs that are learned from, and runs that are predicted."""

    title: str
    learned: tuple[str, ...]
    predicted: tuple[str, ...]
    is_judged: bool


PACED = Study(
    "paced steps", ("Q2/a_seq", "Q2/b_conc8", "Q2/d_cap"), ("Q2/d_poisson50", "Q2/d_poisson110", "QB2/e_preempt"), True
)
BARE = Study("bare CPU steps", ("A2/b_conc8",), ("A2/d_poisson80", "A2/g_sweep"), False)


class Profile(NamedTuple):
    """What was learned."""

    cost: FittedCost
    path: HttpPath


class Line(NamedTuple):
    """One figure of one run."""

    run: str
    where: str
    """``client`` or ``engine``."""
    figure: str
    live: float
    predicted: float
    """Mean of the simulations."""
    spread: float
    """Standard deviation of the simulations."""
    error_percent: float
    limit_percent: float | None
    """None for what is not judged."""

    @property
    def is_broken(self) -> bool:
        return self.limit_percent is not None and not abs(self.error_percent) <= self.limit_percent


def learn(runs: Sequence[LiveRun], path_runs: Sequence[LiveRun] | None = None) -> Profile:
    """Step times from the runs, the way between client and engine from them as well unless others are given."""
    cost = StepTimeFit(max_graph_tokens=0, seed=SEED).fit(live_step_table(runs))
    return Profile(cost, HttpPath.of(path_runs or runs))


def predict(run: LiveRun, profile: Profile, *, num_simulations: int = NUM_SIMULATIONS) -> dict[str, list[RunFigures]]:
    """Figures of each simulation of the run, at the client and at the engine.

    At the engine the arrivals are the API server's own, and tokens count when their step is over.
    """
    figures: dict[str, list[RunFigures]] = {"client": [], "engine": []}
    for number in range(num_simulations):
        rng = np.random.default_rng(np.random.SeedSequence(SEED, spawn_key=(number,)))
        made_s, steps, counts = _simulated(run, profile, profile.path.at_engine(run.send_s, rng), number)
        figures["client"].append(run_figures(run.send_s, profile.path.at_client(made_s, steps), *counts))
        made_s, _, counts = _simulated(run, profile, profile.path.from_server(run.arrival_s, rng), number)
        figures["engine"].append(run_figures(run.arrival_s, made_s, *counts))
    return figures


def _simulated(run: LiveRun, profile: Profile, arrival_s: Any, number: int) -> tuple[Any, Any, tuple[int, int]]:
    """When each request's tokens were made, in which steps, and how many preemptions and steps there were."""
    system = System(run.config, profile.cost, noise_seed=number)
    records = serve(run.workload_at(arrival_s), system)
    made_s, steps = simulated_tokens_s(records)
    return made_s, steps, (len(records.replicas[0].preemptions), len(records.replicas[0].steps))


def compare(run: LiveRun, figures: dict[str, list[RunFigures]], *, is_judged: bool) -> list[Line]:
    """Live and predicted figures of one run side by side."""
    live = {"client": run.at_client(), "engine": run.at_engine()}
    return [
        line
        for where, simulated in figures.items()
        for line in _lines(run.name, where, live[where], simulated, is_judged and where == "client")
    ]


def _lines(run: str, where: str, live: RunFigures, simulated: Sequence[RunFigures], is_judged: bool) -> Iterator[Line]:
    columns = [dict(_named(figures)) for figures in simulated]
    for name, value in _named(live):
        values = np.array([each[name] for each in columns])
        mean = float(values.mean())
        error = 100.0 * (mean / value - 1.0) if value else (0.0 if mean == 0 else float("inf"))
        limit = LIMITS_PERCENT.get(name.rpartition(" ")[2]) if is_judged else None
        yield Line(run, where, name, value, mean, float(values.std()), error, limit)


def _named(figures: RunFigures) -> Iterator[tuple[str, float]]:
    """Figures by the names of the table; times in seconds."""
    yield "makespan", figures.makespan_s
    for name in ("ttft", "tpot", "e2el"):
        for statistic, value_s in getattr(figures, name)._asdict().items():
            yield f"{name.upper()} {statistic.removesuffix('_s')}", value_s
    yield "preemptions", figures.num_preemptions
    yield "steps", figures.num_steps


def step_errors(run: LiveRun, cost: FittedCost) -> dict[str, Any]:
    """Predicted and measured time of every step of the run, decision to decision, as plain data."""
    table = live_step_table([run])
    return {
        "run": run.name,
        "measured_s": table.step_s.tolist(),
        "predicted_s": np.asarray(cost.step_time_s(table.shapes)).tolist(),
        "num_decode_seqs": table.shapes.num_decode_seqs.tolist(),
        "num_prefill_seqs": table.shapes.num_prefill_seqs.tolist(),
    }


class Decisions(NamedTuple):
    """A run's decisions beside those of our scheduler, given the same arrivals and step times."""

    run: str
    num_steps: int
    num_preemptions: int
    first_difference: str | None
    """The first step that does not give the same requests the same tokens in the same order; None if all do."""


def compare_decisions(run: LiveRun) -> Decisions:
    """Feed the recorded times back: each request comes when the engine took it in, each step lasts as it did."""
    scheduler = make_scheduler(run.config)
    compared = _Compared(run, scheduler)
    begin_ns = np.rint(run.begin_s * 1e9).astype(np.int64)
    seen_by = np.minimum(np.searchsorted(run.begin_s, run.engine_arrival_s), len(begin_ns) - 1)
    arrival_s = begin_ns[seen_by] / 1e9  # the decision that saw it, so that idle pauses end alike
    records = simulate(
        run.workload_at(arrival_s), run.config, ConstantCost(1.0), executor=compared, scheduler=scheduler
    )
    num_steps, num_preemptions = len(records.replicas[0].steps), len(records.replicas[0].preemptions)
    told = compared.first_difference
    if told is None and num_steps != run.steps.num_steps:
        told = f"{num_steps} steps, recorded were {run.steps.num_steps}"
    return Decisions(run.name, num_steps, num_preemptions, told)


class _Compared:
    """An executor whose steps last as recorded, and which looks at what each of them computes."""

    def __init__(self, run: LiveRun, scheduler: SchedulerProtocol) -> None:
        self._scheduled = scheduler.scheduled_tokens  # type: ignore[attr-defined]
        self._recorded = run.num_scheduled_tokens
        begin_ns, over_ns = (np.rint(times_s * 1e9).astype(np.int64) for times_s in (run.begin_s, run.over_s))
        self._step_ns = (np.minimum(over_ns, np.append(begin_ns[1:], over_ns[-1])) - begin_ns).tolist()
        self._number = 0
        self.first_difference: str | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        number = self._number
        self._number += 1
        if number >= len(self._recorded):
            self._differs(f"step {number} is beyond the recording")
            return StepResult(1_000_000)
        decided = tuple((int(request.request_id), tokens) for request, tokens in self._scheduled(plan).items())
        if decided != self._recorded[number]:
            self._differs(f"step {number}: (request, tokens) {decided}, recorded were {self._recorded[number]}")
        return StepResult(self._step_ns[number])

    def _differs(self, told: str) -> None:
        self.first_difference = self.first_difference or told


class Outcome(NamedTuple):
    """All that a study came to."""

    study: Study
    profile: Profile
    lines: list[Line]
    steps: list[dict[str, Any]]
    decisions: list[Decisions]


def run_study(data: Path, study: Study, *, path_from: Study | None = None) -> Outcome:
    """Learn and predict.  ``path_from`` names the runs for the way between client and engine, if not the same."""
    runs = {name: read_live_run(data / name) for name in (*study.learned, *study.predicted)}
    learned = [runs[name] for name in study.learned]
    path_runs = [read_live_run(data / name) for name in path_from.learned] if path_from else None
    profile = learn(learned, path_runs)
    lines: list[Line] = []
    for name in study.predicted:
        lines += compare(runs[name], predict(runs[name], profile), is_judged=study.is_judged)
    steps = [step_errors(runs[name], profile.cost) for name in study.predicted]
    return Outcome(study, profile, lines, steps, [compare_decisions(run) for run in runs.values()])


def as_plain(outcome: Outcome) -> dict[str, Any]:
    """For JSON: limits, what was learned, and every line."""
    return {
        "study": outcome.study._asdict(),
        "limits_percent": LIMITS_PERCENT,
        "num_simulations": NUM_SIMULATIONS,
        "step_times": outcome.profile.cost.describe(),
        "http_path_ms": outcome.profile.path.describe(),
        "lines": [{**line._asdict(), "is_broken": line.is_broken} for line in outcome.lines],
        "decisions": [decisions._asdict() for decisions in outcome.decisions],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--bare", action="store_true", help="also the server without paced steps; not judged")
    given = parser.parse_args()
    outcomes = [run_study(given.data, PACED)]
    if given.bare:
        outcomes.append(run_study(given.data, BARE, path_from=PACED))
    if given.json:
        print(json.dumps([as_plain(outcome) for outcome in outcomes], indent=1))
    else:
        for outcome in outcomes:
            _show(outcome)
    broken = [line for outcome in outcomes for line in outcome.lines if line.is_broken]
    for line in broken:
        print(f"{line.run}: {line.figure} is off by {line.error_percent:+.1f} %", file=sys.stderr)
    sys.exit(1 if broken else 0)


def _show(outcome: Outcome) -> None:
    study, profile = outcome.study, outcome.profile
    print(f"{study.title}: learned from {', '.join(study.learned)}")
    print(f"  step times: {profile.cost.describe()['error']}")
    print("  way between client and engine: " + ", ".join(f"{k} {v:.2f}" for k, v in profile.path.describe().items()))
    heads = f"{'run':<16}{'at':<8}{'figure':<13}{'live':>10}{'predicted':>11}{'spread':>9}{'error':>9}{'limit':>8}"
    print(f"\n{heads}")
    for line in outcome.lines:
        is_count = line.figure in ("preemptions", "steps")
        form = "{:.1f}" if is_count else "{:.4f}"
        live, predicted, spread = map(form.format, (line.live, line.predicted, line.spread))
        limit = "" if line.limit_percent is None else f"{line.limit_percent:.0f} %"
        mark = "  broken" if line.is_broken else ""
        print(
            f"{line.run:<16}{line.where:<8}{line.figure:<13}{live:>10}{predicted:>11}{spread:>9}"
            f"{line.error_percent:>+8.2f}%{limit:>8}{mark}"
        )
    print("\ndecisions, with the recorded arrivals and step times fed back:")
    for each in outcome.decisions:
        told = each.first_difference or "the same tokens for the same requests in every step"
        print(f"{each.run:<16}{each.num_steps:>6,} steps, {each.num_preemptions} preemptions: {told}")
    print()


if __name__ == "__main__":
    main()
