"""How far a plan's growth, in proportion to the load, is from plans of the grown loads.

    python -m benchmarks.plan_growth [--rate R ...] [--jobs N]

A chat is planned at a rate with 10 % growth a month; then as many times that rate, with as many times the requests, is
planned by itself.  Told are the replicas that growth said and those that the other plan recommends (with what it calls
noise), and both before they are rounded: whole fleets over the load that they carry.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from windtunnel.planning import Plan, plan

MONTHS = (4, 8, 12)
PER_MONTH = 0.1
SECONDS = 6
MIN_REQUESTS = 600
"""Of the plan at today's rate."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--rate", type=float, nargs="+", default=[40.0, 150.0, 600.0])
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    for rate in args.rate:
        for line in _measured(rate, args.jobs):
            print(line, flush=True)


def _measured(rate: float, num_jobs: int) -> Iterator[str]:
    today = _plan(rate, 1.0, num_jobs, growth=PER_MONTH, months=max(MONTHS))
    said = {row["month"]: row for row in today.told["growth"]["rows"]}
    for month in MONTHS:
        load = said[month]["load"]
        grown = _plan(rate, load, num_jobs)
        own = _recommended(grown)
        noise = own["size_within_noise"]
        apart = load * _unrounded(today) / _unrounded(grown) - 1
        yield (
            f"{rate:g} requests/s x {load:.2f}: said {said[month]['num_replicas']}, planned {own['num_replicas']} "
            f"({noise['low']} to {noise['high']}); before rounding {100 * apart:+.1f} %"
        )


def _plan(rate: float, load: float, num_jobs: int, **options: Any) -> Plan:
    return plan(
        {
            "name": "growth",
            "deployment": {"model": "llama-3.1-8b"},
            "engine": {"max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 2048},
            "workload": {
                "num_requests": int(load * max(MIN_REQUESTS, SECONDS * rate)),
                "request_rate": load * rate,
                "input": {"dist": "lognormal", "mean": 200, "sigma": 0.6, "max": 1500},
                "output": 20,
            },
            "cost": {"kind": "affine", "base_s": "8ms", "token_s": "20us", "seq_s": "100us"},
            "slo": {"objectives": ["ttft:p95<150ms", "tpot:p95<25ms"]},
        },
        gpus={"l40s": 0.9},
        tensor_parallel_sizes=(1,),
        kv_cache_dtypes=("auto",),
        gpu_memory_utilizations=(0.9,),
        replications=3,
        num_requests=400,
        jobs=num_jobs,
        **options,
    )


def _recommended(found: Plan) -> dict[str, Any]:
    if found.recommended is None:
        raise SystemExit("no deployment holds: give another --rate")
    return found.recommended


def _unrounded(found: Plan) -> float:
    best = _recommended(found)
    return float(best["num_replicas"] / best["headroom"]["mean"])


if __name__ == "__main__":
    main()
