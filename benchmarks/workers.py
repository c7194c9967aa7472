"""What workers cost beside the work: time of a job that does nothing, and of trials of 1,000 requests.

    python -m benchmarks.workers [--trace FILE] [--ray local:2]

The table tells wall-clock milliseconds: to start the workers and do the first jobs, then for each further job that
does nothing, kept in a store or not.  Below it CPU milliseconds of a trial (``make_trial``, key, ``run_trial``) in a
process that has done one before, along a rate (whose capacity is measured once) and along a knob (``saturation =
false``, so without measuring the capacity); ``--trace`` names the Azure conversation trace.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from windtunnel.trials import make_trial, run_trial
from windtunnel.workers import Job, Store, Workers

NUM_JOBS = 2_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="the Azure conversation trace, for Llama-3.3-70B")
    parser.add_argument("--ray", help="a Ray cluster, such as local:2")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{'workers':24}{'start ms':>10}{'job ms':>10}{'kept job ms':>13}{'known job ms':>14}")
    for name, jobs, ray in (("this process", 1, None), ("1 in processes", -1, None), ("2 processes", 2, None)):
        print(overhead(name, jobs, ray))
    if args.ray:
        print(overhead(f"Ray {args.ray}", None, args.ray))
    print(f"\n{'trial':40}{'first ms':>10}{'next ms':>10}")
    for name, scenario, overrides in trials(args.trace):
        first, *others = [trial_ms(scenario, each) for each in overrides]
        print(f"{name:40}{first:>10.0f}{statistics.median(others):>10.0f}")


def overhead(name: str, jobs: int | None, ray: str | None) -> str:
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, Workers(2 if jobs == -1 else jobs, ray=ray) as workers:
        if jobs == -1:
            workers.num = 1
            from windtunnel.workers.processes import LocalProcesses

            workers._pool = LocalProcesses(1)
        spent(workers, range(4), None)
        start_s = time.perf_counter() - began_s
        plain_s = spent(workers, range(NUM_JOBS), None)
        with Store(folder) as store:
            kept_s = spent(workers, range(NUM_JOBS), store)
        with Store(folder) as store:
            known_s = spent(workers, range(NUM_JOBS), store)
    times_ms = [1000 * each / NUM_JOBS for each in (plain_s, kept_s, known_s)]
    return f"{name:24}{1000 * start_s:>10.0f}{times_ms[0]:>10.3f}{times_ms[1]:>13.3f}{times_ms[2]:>14.3f}"


def spent(workers: Workers, numbers: Sequence[int], store: Store | None) -> float:
    """Wall-clock seconds of so many jobs that do nothing."""
    began_s = time.perf_counter()
    for _ in workers.map([Job("builtins:abs", number) for number in numbers], store=store):
        pass
    return time.perf_counter() - began_s


def trials(trace: Path | None) -> Iterator[tuple[str, str | None, list[dict[str, Any]]]]:
    rates, seats = (5.0, 6.0, 7.0, 8.0, 9.0, 10.0), (256, 250, 240, 230, 220, 210)
    chat = {"num_requests": 1_000}
    yield "chat-8b-h100, along request_rate", "chat-8b-h100", [{**chat, "request_rate": rate} for rate in rates]
    knob = [{**chat, "max_num_seqs": num, "saturation": False} for num in seats]
    yield "chat-8b-h100, along max_num_seqs", "chat-8b-h100", knob
    if trace is None:
        return
    large = {"model": "llama-3.3-70b", "gpu": "h100-sxm", "tensor_parallel_size": 4, "trace": str(trace)}
    large["limit"] = 1_000
    yield "70B TP4, Azure, along rate_scale", None, [{**large, "rate_scale": rate / 10} for rate in rates]
    yield "70B TP4, Azure, along max_num_seqs", None, [{**large, "max_num_seqs": n, "saturation": False} for n in seats]


def trial_ms(scenario: str | None, overrides: Mapping[str, Any]) -> float:
    began_s = time.process_time()
    job = make_trial(scenario, overrides, seed=1)
    _ = job.key
    run_trial(job.argument)
    return 1000 * (time.process_time() - began_s)


if __name__ == "__main__":
    main()
