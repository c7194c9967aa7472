"""How near the memory planner comes to real start-ups: reports/published/memory.html.

    python -m benchmarks.memory_accuracy [--output reports/published/memory.html]

Each start-up is judged by constants that were fitted without its family of models (``calibrate.memory_fit``).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from windtunnel import __version__
from windtunnel.calibrate.memory_fit import Evaluation, Line, evaluate, table
from windtunnel.calibrate.startups import read_rows, usable
from windtunnel.reports import page
from windtunnel.sim.deployment.gpu import GIB
from windtunnel.sim.deployment.memory_plan import CONTEXT_BYTES, DISTRIBUTED_CONTEXT_BYTES

TARGET = "at most 2 % in the median, at most 6 % in nine of ten, and 85 % inside of a 90 % interval"
NUM_WORST = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("reports/published/memory.html"))
    target: Path = parser.parse_args().output
    rows = read_rows()
    evaluations = evaluate(rows)
    _, unusable = usable(rows)
    page.write_page(
        target,
        "KV cache of real start-ups, planned",
        _body(evaluations, unusable, len(rows)),
        skip_to="table",
        head=page.masthead("The memory planner beside real start-ups of vLLM", f"windtunnel {__version__}"),
        foot=f"Made by benchmarks/memory_accuracy.py of windtunnel {__version__}.",
    )
    print(f"{_in_all(evaluations)}; wrote {target}")


def _in_all(evaluations: Sequence[Evaluation]) -> str:
    errors = np.abs([evaluation.error for evaluation in evaluations])
    covered = float(np.mean([evaluation.covered for evaluation in evaluations]))
    return (
        f"median error of KV tokens {100 * np.median(errors):.2f} %, 90th percentile "
        f"{100 * np.percentile(errors, 90):.2f} %, {100 * covered:.0f} % inside of the 90 % interval, over "
        f"{len(evaluations)} start-ups"
    )


def _body(evaluations: Sequence[Evaluation], unusable: dict[int, str], num_rows: int) -> Iterator[str]:
    families = {evaluation.family for evaluation in evaluations}
    own = [evaluation for evaluation in evaluations if not evaluation.weights_logged]
    told = [
        f"Asked for was: {TARGET}.",
        f"In {len(evaluations) - len(own)} of them the weights are those that the log states, because the checkpoint's "
        f"config is not at hand (quantised variants). Where they are counted from a config: {_in_all(own)}.",
        f"{num_rows} start-ups from public logs; {len(evaluations)} say enough, of {len(families)} families of models. "
        "Each was predicted by constants fitted without its family; which terms there are was read in vLLM's source, "
        "in view of all of them.",
        f"{_with_replicas(evaluations)} start-ups are of data-parallel replicas, all of one family. Without it no "
        "communicator of replicas is left to fit: it is then taken to be what several ranks hold before vLLM begins "
        f"to count, {(DISTRIBUTED_CONTEXT_BYTES - CONTEXT_BYTES) / GIB:.2f} GiB.",
        "Where a log gives the memory that is available, tokens and blocks follow exactly; what is judged here is the "
        "whole way from gpu_memory_utilization to KV tokens.",
    ]
    headline = _in_all(evaluations)
    yield from page.answer_box(f"{headline[0].upper()}{headline[1:]}.", told, "good")
    yield page.section("table", "By release and card")
    yield from page.table(HEADS, map(_cells, table(evaluations)))
    yield "</section>"
    yield page.section("worst", "The largest errors")
    worst = sorted(evaluations, key=lambda evaluation: -abs(evaluation.error))[:NUM_WORST]
    heads = ("Family", "Release", "Card", "Logged tokens", "Planned", "Error", "In the interval", "Source")
    yield from page.table(heads, map(_worst, worst))
    yield "</section>"
    yield page.section("unusable", "Start-ups that say too little")
    counts = Counter(unusable.values()).most_common()
    yield from page.table(
        ("Reason", "Start-ups"), [(page.cell(why), page.cell(str(count), "number")) for why, count in counts]
    )
    yield "</section>"


def _with_replicas(evaluations: Sequence[Evaluation]) -> int:
    return sum(evaluation.num_replicas > 1 for evaluation in evaluations)


HEADS = ("Release", "Card", "Kind", "Start-ups", "Families", "Median error", "90th percentile", "Largest", "Covered")


def _cells(line: Line) -> tuple[str, ...]:
    shares = (line.median_error, line.p90_error, line.largest_error, line.coverage)
    return (
        page.cell(line.version),
        page.cell(line.gpu),
        page.cell(line.kind),
        page.cell(str(line.start_ups), "number"),
        page.cell(str(line.models), "number"),
        *(page.cell(f"{100 * share:.2f} %", "number") for share in shares),
    )


def _worst(evaluation: Evaluation) -> tuple[str, ...]:
    return (
        page.cell(evaluation.family),
        page.cell(evaluation.version),
        page.cell(evaluation.gpu),
        page.cell(f"{evaluation.logged:,.0f}", "number"),
        page.cell(f"{evaluation.predicted:,.0f}", "number"),
        page.cell(f"{100 * evaluation.error:+.2f} %", "number"),
        page.cell("yes" if evaluation.covered else "no"),
        page.cell(evaluation.source[:90], "words"),
    )


if __name__ == "__main__":
    main()
