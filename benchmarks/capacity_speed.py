"""How many simulations a minute one core does in a search for capacity: all that one replication takes.

    python -m benchmarks.capacity_speed [--seconds 20] [--csv benchmarks/capacity_speed.csv]

Llama-3.3-70B on four H100 and on four A100-80GB under their bundled profiles, 1,000 requests each with the lengths of
the Azure conversation trace of 2023 (log-normal with its means and deviations), at half, three quarters and nine tenths
of the saturation rate.  A simulation here is a draw of requests, the run, and the statistics of the objectives, of the
stability and of what binds: everything between two rates of a search.
"""

from __future__ import annotations

import argparse
import csv
import platform
import subprocess
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from windtunnel.capacity.evaluate import Evaluator
from windtunnel.capacity.runs import Simulations
from windtunnel.capacity.sampling import source_of
from windtunnel.scenarios.load import load_scenario
from windtunnel.scenarios.resolve import resolve
from windtunnel.scenarios.saturation import saturation_request_throughput
from windtunnel.sim.metrics import parse_slos

NUM_REQUESTS = 1_000
LOADS = (0.5, 0.75, 0.9)
GPUS = ("h100-sxm", "a100-80gb-sxm")
WORKLOAD = {
    "input": {"dist": "lognormal", "mean": 1155, "std": 1109, "max": 14_050},
    "output": {"dist": "lognormal", "mean": 211, "std": 163, "max": 1_000},
    "request_rate": 1.0,
    "num_requests": NUM_REQUESTS,
}


@dataclass(frozen=True)
class Result:
    commit: str
    machine: str
    gpu: str
    cost_model: str
    load: float
    simulations_per_minute: int
    cpu_s_per_simulation: float
    steps_per_simulation: int


def measure(gpu: str, load: float, seconds: float) -> Result:
    scenario = {
        "deployment": {"model": "llama-3.3-70b", "gpu": gpu, "tensor_parallel_size": 4},
        "workload": WORKLOAD,
    }
    resolved = resolve(load_scenario(scenario))
    evaluator = Evaluator(resolved.system, parse_slos("ttft:p99<1s tpot:p95<50ms"))
    saturation = saturation_request_throughput(resolved.workload, resolved.system)
    assert saturation is not None
    simulations = Simulations(evaluator, source_of(resolved), seed=0)
    simulations.run(load * saturation, [0], NUM_REQUESTS)  # warms up caches and imports
    number, began_s, cpu_s = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began_s < seconds:
        number += 1
        simulations.run(load * saturation, [number], NUM_REQUESTS)
    took_s = (time.process_time() - cpu_s) / number
    return Result(
        _commit(),
        f"{platform.machine()} Python {platform.python_version()}",
        gpu,
        resolved.profile or resolved.cost.name,
        load,
        int(60 / took_s),
        round(took_s, 4),
        _num_steps(simulations, load * saturation),
    )


def _num_steps(simulations: Simulations, rate: float) -> int:
    from windtunnel.sim.simulate import serve

    records = serve(simulations.draw(rate, 1, NUM_REQUESTS), simulations.evaluator.served)
    return sum(len(replica.steps) for replica in records.replicas)


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each row")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    results = [measure(gpu, load, arguments.seconds) for gpu in GPUS for load in LOADS]
    names = [field.name for field in fields(Result)]
    print("  ".join(names))
    for result in results:
        print("  ".join(str(value) for value in asdict(result).values()))
    if arguments.csv:
        is_new = not arguments.csv.exists()
        with arguments.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, names)
            if is_new:
                writer.writeheader()
            writer.writerows(asdict(result) for result in results)


if __name__ == "__main__":
    main()
