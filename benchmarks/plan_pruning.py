"""What a plan loses by not trying everything: its search beside one of every candidate, on small questions.

    python -m benchmarks.plan_pruning [--question NAME] [--jobs N]

Each question is asked twice with the same requests: as ``windtunnel plan`` asks it, and exhaustively, where no bound,
no order of the knobs and no likeness leaves anything out.  Told are the cost of the cheapest fleet that held in either,
in whole replicas and before rounding, and how much more than the bound of a kind any of its knobs let an engine do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from windtunnel.planning import jobs
from windtunnel.planning.answer import ranking
from windtunnel.planning.candidates import Shape, Space
from windtunnel.planning.offers import read_offers
from windtunnel.planning.plan import make_question
from windtunnel.planning.question import Question
from windtunnel.planning.search import SATURATION_ERROR, Found, Tried, search, smallest_that_holds
from windtunnel.scenarios.load import load_scenario
from windtunnel.workers import Workers

STEPS = {"kind": "roofline"}


class Case(NamedTuple):
    """A question and what may be chosen."""

    scenario: Mapping[str, Any]
    gpus: Sequence[str]
    choices: Mapping[str, Any] = {}


def _scenario(model: str, rate: float, prompt: Any, output: Any, *objectives: str) -> dict[str, Any]:
    return {
        "name": "pruning",
        "deployment": {"model": model},
        "engine": {"max_model_len": 8192},
        "workload": {"num_requests": 900, "request_rate": rate, "input": prompt, "output": output},
        "cost": STEPS,
        "slo": {"objectives": list(objectives)},
    }


_CHAT = {"dist": "lognormal", "mean": 500, "sigma": 0.8, "max": 4000}
_LONG = {"dist": "lognormal", "mean": 3000, "sigma": 0.5, "max": 7500}
CASES = {
    "chat": Case(
        _scenario("llama-3.1-8b", 60.0, _CHAT, 100, "ttft:p95<500ms", "tpot:p95<40ms"),
        ["h100-sxm=2.5", "l40s=0.9"],
    ),
    "long prompts, little memory": Case(
        _scenario("llama-3.1-8b", 6.0, _LONG, 100, "ttft:p95<4s", "tpot:p95<150ms"),
        ["l4=0.4", "l40s=0.9"],
        {"max_num_batched_tokens": (2048, 512, 8192), "max_num_seqs": (256, 64)},
    ),
    "small model, tight gaps": Case(
        _scenario("qwen3-0.6b", 40.0, _LONG, 40, "ttft:p95<1s", "itl:p99<40ms"),
        ["l4=0.4", "a10=0.6"],
        {"max_num_batched_tokens": (8192, 2048, 512), "max_num_seqs": (256, 64)},
    ),
    "seats from few to many": Case(
        _scenario("llama-3.1-8b", 60.0, _CHAT, 100, "ttft:p95<500ms", "tpot:p95<60ms"),
        ["h100-sxm=2.5", "l40s=0.9"],
        {"max_num_batched_tokens": (2048, 8192), "max_num_seqs": (16, 64, 256), "gpu_memory_utilizations": (0.92,)},
    ),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--question", choices=list(CASES), action="append")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    with Workers(args.jobs) as workers:
        for name in args.question or CASES:
            for line in _measured(name, CASES[name], workers):
                print(line, flush=True)


def _measured(name: str, case: Case, workers: Workers) -> Iterator[str]:
    yield f"{name}: {', '.join(case.gpus)}"
    question = make_question(load_scenario(case.scenario, {}), 1.0, 3, 300)
    space = Space(
        (str(case.scenario["deployment"]["model"]),),
        read_offers(case.gpus),
        tensor_parallel_sizes=(1,),
        fixed={"max_model_len": 8192},
        **case.choices,
    )
    found: dict[str, Found] = {}
    for way in ("pruned", "exhaustive"):
        began_s = time.process_time()
        found[way] = search(question, space, workers, exhaustive=way == "exhaustive", tell=_say_nothing)
        yield f"  {way}: {_answer(found[way])}; {time.process_time() - began_s:.0f} s here"
    yield from (f"  {line}" for line in _losses(*found.values()))
    yield from (f"  {line}" for line in _bounds(question, found["exhaustive"], workers))


def _answer(found: Found) -> str:
    best = ranking(found, 0)[0]
    size = smallest_that_holds(best) or 0
    return (
        f"{best.whole_cost(size, 0):.2f} an hour with {size} x {best.candidate.label}, {best.cost:.2f} before rounding;"
        f" {len(found.tried)} candidates, {found.num_simulations:,} simulations"
    )


def _losses(pruned: Found, exhaustive: Found) -> Iterator[str]:
    """What the exhaustive search found that is cheaper."""
    held = [ranking(found, 0)[0] for found in (pruned, exhaustive)]
    costs = [each.whole_cost(smallest_that_holds(each) or 0, 0) for each in held]
    yield f"fleets that held: {100 * (costs[0] / costs[1] - 1):+.1f} %"
    lowest = [min(each.cost for each in found.tried) for found in (pruned, exhaustive)]
    yield f"lowest estimate: {100 * (lowest[0] / lowest[1] - 1):+.1f} %"
    seen = {each.candidate for each in pruned.tried}
    cheaper = [each for each in exhaustive.ranked if each.candidate not in seen and each.cost < lowest[0] * 0.98]
    yield f"not tried by the plan, though 2 % cheaper: {len(cheaper)} of {len(exhaustive.tried)}"
    yield from (f"  {each.cost:.2f}: {each.candidate.label}" for each in cheaper[:3])


def _bounds(question: Question, exhaustive: Found, workers: Workers) -> Iterator[str]:
    """How much more any knobs let an engine do than those that its bound was taken from."""
    by_shape: dict[Shape, list[Tried]] = {}
    for each in exhaustive.tried:
        by_shape.setdefault(each.shape, []).append(each)
    asked = [each for options in by_shape.values() for each in options if each.candidate not in exhaustive.limits]
    results = workers.map([jobs.limit_job(question, each.candidate) for each in asked])
    rates = {**exhaustive.limits}
    rates |= {each.candidate: found["request_throughput"] for each, found in zip(asked, results, strict=True)}
    for shape, options in by_shape.items():
        known = [rates[each.candidate] or 0.0 for each in options]
        bound = max(exhaustive.limits.get(each.candidate) or 0.0 for each in options)
        if bound:
            yield (
                f"{shape.label}: the best knobs do {max(known) / (bound * (1 + SATURATION_ERROR)):.3f} times the bound"
            )


def _say_nothing(text: str) -> None:
    del text


if __name__ == "__main__":
    main()
