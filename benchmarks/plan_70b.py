"""How long ``windtunnel plan`` takes for Llama-3.3-70B under a trace, and whether another seed gives the same answer.

The trace and the prices are arguments: none comes with windtunnel.  The Azure conversation trace of 2023 is
AzureLLMInferenceTrace_conv.csv of https://github.com/Azure/AzurePublicDataset.

    python -m benchmarks.plan_70b TRACE --scale 10 --gpu h100-sxm=2.49 --gpu h200=3.50 --gpu a100-80gb-sxm=1.79

Printed for each seed: wall time, CPU time of all processes, simulations and requests, how many simulations of 1,000
requests that is a minute and core, and the answer; then whether the seeds agree.  The wall time depends on who else
uses the machine, the CPU time hardly.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from windtunnel.planning import Plan, plan
from windtunnel.planning.candidates import Candidate, Knobs, Shape
from windtunnel.planning.jobs import needed, needed_job
from windtunnel.planning.plan import make_question
from windtunnel.scenarios.load import load_scenario

OBJECTIVES = ("ttft:p99<2s", "tpot:p95<100ms")


def main() -> None:
    asked = _arguments()
    table = {
        "name": "azure-70b",
        "deployment": {"model": "llama-3.3-70b"},
        "workload": {"trace": str(asked.trace.absolute())},
        "slo": {"objectives": asked.slo or list(OBJECTIVES)},
    }
    plans = []
    print(f"{os.cpu_count()} CPUs, {asked.jobs} processes, load {os.getloadavg()[0]:.1f} before it began")
    for seed in asked.seeds:
        began_s, cpu_s = time.perf_counter(), _cpu_s()
        found = plan(table, gpus=asked.gpu, scale=asked.scale, seed=seed, jobs=asked.jobs)
        _print(seed, found, time.perf_counter() - began_s, _cpu_s() - cpu_s)
        plans.append(found)
    _compare(plans)
    _print_speed(asked, table)


def _print_speed(asked: Any, table: dict[str, Any]) -> None:
    """How fast the search itself is, in this process alone: how many replicas four H100 each take."""
    question = replace(make_question(load_scenario(table), asked.scale, 5, 1500), seed=asked.seeds[0])
    candidate = Candidate(Shape("llama-3.3-70b", "H100-SXM", 4), Knobs(1024, 2048, 0.92))
    num_simulations, num_requests, cpu_s = 0, 0, _cpu_s()
    for replication in range(3):
        result = needed(needed_job(question, candidate, replication, least=5.0, guess=6.5).argument)
        num_simulations += result["num_simulations"]
        num_requests += result["num_requests"]
    minutes = (_cpu_s() - cpu_s) / 60
    print(
        f"\nthe search alone, 4 x H100: {num_simulations} simulations of {num_requests / num_simulations:,.0f} "
        f"requests, {num_simulations / minutes:.0f} a minute and core; {num_requests / 1000 / minutes:.0f} of 1,000 "
        "requests"
    )


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--scale", type=float, default=10.0)
    parser.add_argument("--gpu", action="append", required=True, metavar="NAME=PRICE")
    parser.add_argument("--slo", action="append")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--jobs", type=int, default=2)
    return parser.parse_args()


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _print(seed: int, found: Plan, wall_s: float, cpu_s: float) -> None:
    search, best = found.told["search"], found.recommended
    per_minute = search["num_requests"] / 1000 / (cpu_s / 60)
    print(f"\nseed {seed}: {wall_s:.1f} s, {cpu_s:.1f} s of CPU")
    print(
        f"  {search['num_simulations']} simulations, {search['num_requests']:,} requests: {per_minute:.0f} simulations "
        "of 1,000 requests a minute and core"
    )
    if best is None:
        print(f"  {found.verdict}")
        return
    needed, noise = best["replicas_needed"], best["size_within_noise"]
    print(f"  {best['num_replicas']} x {best['label']}, {_knobs(best)}: {best['cost_per_hour']:.2f} an hour")
    print(
        f"  takes {needed['mean']:.2f} ({needed['low']:.2f} to {needed['high']:.2f}) replicas, within noise "
        f"{noise['low']} to {noise['high']}; binds: {best['binding']}; carries {best['headroom']['mean']:.2f} x the "
        "load"
    )
    for row in found.told["runners_up"]:
        print(f"  {row['num_replicas']} x {row['label']}: {row['cost_per_hour']:.2f}, {row['why_not']}")


def _knobs(row: dict[str, Any]) -> str:
    return f"{row['max_num_seqs']} / {row['max_num_batched_tokens']} / {row['gpu_memory_utilization']:g}"


def _knows(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether an answer recommends the other's settings, or says that they are as good."""
    return _knobs(other) in {_knobs(each) for each in (one, *one["level_settings"])}


def _compare(plans: Sequence[Plan]) -> None:
    found = [each.recommended for each in plans if each.recommended is not None]
    if len(found) < 2:
        return
    kinds = {(each["label"], _knobs(each)) for each in found}
    sizes = sorted({each["num_replicas"] for each in found})
    told = all(
        each["size_within_noise"]["low"] <= size <= each["size_within_noise"]["high"]
        for each in found
        for size in sizes
    )
    same = "yes" if len(kinds) == 1 else "no"
    if len({each["label"] for each in found}) == 1 and all(_knows(one, other) for one in found for other in found):
        same = "yes, or in settings that each answer calls as good"
    print(f"\nsame deployment: {same}; replicas {', '.join(map(str, sizes))}", end="")
    print("" if len(sizes) == 1 else f", a difference that {'each answer' if told else 'not every answer'} calls noise")


if __name__ == "__main__":
    main()
