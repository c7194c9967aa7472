"""How fast the simulator is: simulated requests per CPU second, end to end with records and summary.

    python -m benchmarks.speed [--quick] [--csv benchmarks/speed.csv]

Llama-3.1-8B on one H100 under the roofline cost model; Poisson arrivals, lognormal lengths with means of 512 tokens in
and 256 out.  Capacity is measured first: the throughput of the same requests when all are there at once.  Each case
runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import resource
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from windtunnel.sim.cost.roofline import RooflineCost
from windtunnel.sim.deployment.engine_args import engine_defaults
from windtunnel.sim.deployment.gpu import load_gpu
from windtunnel.sim.deployment.memory import kv_pool
from windtunnel.sim.deployment.model import load_model
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.metrics import summarize
from windtunnel.sim.simulate import run
from windtunnel.sim.workload import Workload, workload

SEED = 0
SIGMA = 0.8
SMALL_POOL_BLOCKS = 6_000
"""A pool that holds about 90 of these requests: it preempts at 80 % of the large pool's capacity."""


@dataclass(frozen=True)
class Case:
    num_requests: int
    load: float
    """Share of capacity."""
    caching: bool
    small_pool: bool = False


@dataclass(frozen=True)
class Result:
    commit: str
    machine: str
    num_requests: int
    load: float
    caching: str
    pool: str
    requests_per_cpu_s: int
    simulate_cpu_s: float
    summarize_cpu_s: float
    num_steps: int
    num_preemptions: int
    peak_mb: int
    stability: str


def cases(quick: bool) -> list[Case]:
    size = 10_000 if quick else 100_000
    grid = [Case(size, load, caching) for caching in (False, True) for load in (0.3, 0.5, 0.8, 1.0)]
    pressed = [Case(size, 0.8, caching, small_pool=True) for caching in (False, True)]
    growth = [] if quick else [Case(n, 0.8, caching) for n in (10_000, 1_000_000) for caching in (False, True)]
    return grid + pressed + growth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10,000 requests a case, no growth")
    parser.add_argument("--csv", type=Path, help="append the results to this file")
    args = parser.parse_args()
    capacity = saturation_rate()
    print(f"capacity: {capacity:.2f} requests/s (10,000 requests, all there at once)")
    print(" requests  load  caching  pool   req/CPU-s  simulate s  summary s     steps  preempted  peak MB  verdict")
    results = []
    for case in cases(args.quick):
        with ProcessPoolExecutor(max_workers=1) as pool:
            result = pool.submit(measure, case, capacity).result()
        results.append(result)
        print(
            f"{result.num_requests:9,} {result.load:5.0%}  {result.caching:7s}  {result.pool:5s}"
            f"{result.requests_per_cpu_s:11,} {result.simulate_cpu_s:11.2f} {result.summarize_cpu_s:10.2f}"
            f"{result.num_steps:10,} {result.num_preemptions:10,} {result.peak_mb:8,}  {result.stability}",
            flush=True,
        )
    if args.csv:
        append(args.csv, results)


def measure(case: Case, capacity: float) -> Result:
    config, cost = engine(case.caching, case.small_pool)
    work = poisson(case.num_requests, capacity * case.load)
    start = time.process_time()
    records = run(work, config, cost)
    simulated = time.process_time()
    summary = summarize(records, work)
    end = time.process_time()
    return Result(
        commit=commit(),
        machine=f"{platform.machine()} Python {platform.python_version()}",
        num_requests=case.num_requests,
        load=case.load,
        caching="on" if case.caching else "off",
        pool="small" if case.small_pool else "full",
        requests_per_cpu_s=round(case.num_requests / (end - start)),
        simulate_cpu_s=round(simulated - start, 2),
        summarize_cpu_s=round(end - simulated, 2),
        num_steps=len(records.replicas[0].steps),
        num_preemptions=int(records.requests.num_preemptions.sum()),
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        stability=summary.stability.verdict,
    )


def engine(caching: bool, small_pool: bool) -> tuple[SchedulerConfig, RooflineCost]:
    model, gpu = load_model("llama-3.1-8b"), load_gpu("h100")
    defaults = engine_defaults(gpu, model=model)
    max_num_seqs, budget, max_model_len = defaults.max_num_seqs, defaults.max_num_batched_tokens, 16_384
    pool = kv_pool(model, gpu, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=max_model_len)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        num_gpu_blocks=SMALL_POOL_BLOCKS if small_pool else pool.num_gpu_blocks,
        enable_prefix_caching=caching,
    )
    return config, RooflineCost(model, gpu)


def poisson(num_requests: int, rate_per_s: float) -> Workload:
    rng = np.random.default_rng(SEED)
    arrival_s = np.cumsum(rng.exponential(1 / rate_per_s, num_requests))
    lengths = (lognormal(rng, mean, num_requests) for mean in (512, 256))
    return workload((arrival_s * 1e9).astype(np.int64), *lengths)


def lognormal(rng: np.random.Generator, mean: float, count: int) -> npt.NDArray[np.int64]:
    tokens = rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, count)
    return np.clip(np.rint(tokens), 1, 7_000).astype(np.int64)


def saturation_rate() -> float:
    config, cost = engine(caching=False, small_pool=False)
    work = poisson(10_000, 1e9)
    return 10_000 / (run(work, config, cost).end_ns / 1e9)


def commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def append(path: Path, results: list[Result]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Result)])
        if is_new:
            writer.writeheader()
        writer.writerows(asdict(result) for result in results)


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    main()
