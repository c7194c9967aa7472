"""What the compilers make of every kernel, for GPUs that need not be here: reports/published/kernels_aot.json and .md.

    python -m benchmarks.kernels_aot [--targets sm_80 ...] [--modules rms_norm ...] [--only PATTERN] [--output DIR]

Each kernel is compiled as its launcher would: same tiles, warps and alignment.  Exit status 1 if one spills registers
or needs more shared memory than a block can have.  This proves that kernels build and fit, nothing about their speed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from windtunnel.executor.kernels.aot import AotReport, compile_case

TARGETS = ("sm_80", "sm_90", "sm_100")
MODULES = ("attention", "rms_norm", "rope_store", "silu_and_mul", "gather", "sample")
HEADS = ("kernel", "target", "warps", "registers", "spill bytes", "stack bytes", "shared KiB", "cubin KiB", "has")


class Job(NamedTuple):
    """A case by its place, because kernels do not travel between processes."""

    module: str
    target: str
    number: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), help="sm_80 … or an AMD name such as gfx942")
    parser.add_argument("--modules", nargs="+", default=list(MODULES), choices=MODULES)
    parser.add_argument("--only", default="", help="cases in whose name this regular expression is found")
    parser.add_argument("--output", type=Path, default=Path("reports/published"), help="folder to write to")
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # before a worker imports a kernel
    with tempfile.TemporaryDirectory(prefix="windtunnel-aot-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        reports = _compile_all(list(_jobs(arguments.modules, arguments.targets, arguments.only)))
    if not reports:
        print(f"no case of {', '.join(arguments.modules)} has {arguments.only!r} in its name", file=sys.stderr)
        return 2
    faults = [fault for report in reports for fault in report.faults()]
    _write(arguments.output, reports, faults)
    print("\n".join(_table(reports)))
    print(f"{len(reports)} compiled with triton {version('triton')}, {len(faults)} faults")
    print("".join(f"FAULT: {fault}\n" for fault in faults), end="", file=sys.stderr)
    return 1 if faults else 0


def _jobs(modules: Sequence[str], targets: Sequence[str], only: str) -> Iterator[Job]:
    for module in modules:
        for target in targets:
            for number, case in enumerate(_cases(module, target)):
                if re.search(only, case.name):
                    yield Job(module, target, number)


def _cases(module: str, target: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"windtunnel.executor.kernels.{module}").aot_cases(_sm(target))


def _sm(target: str) -> int:
    """What kernels are asked to be configured for; 0 on AMD, as their launchers do."""
    return int(target.removeprefix("sm_")) if target.startswith("sm_") else 0


def _compile_all(jobs: Sequence[Job]) -> list[AotReport]:
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_compile_one, jobs))


def _compile_one(job: Job) -> AotReport:
    return compile_case(_cases(job.module, job.target)[job.number], _sm(job.target) or job.target)


def _write(folder: Path, reports: Sequence[AotReport], faults: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    head = {"triton": version("triton"), "torch": version("torch"), "faults": list(faults)}
    kernels = ",\n".join(json.dumps(report._asdict()) for report in reports)  # a line each, so that changes are seen
    text = f'{json.dumps(head)[:-1]}, "kernels": [\n{kernels}\n]}}\n'
    (folder / "kernels_aot.json").write_text(text, encoding="utf-8")
    lines = [f"Compiled with Triton {version('triton')}; nothing of it was run.", "", *_table(reports)]
    (folder / "kernels_aot.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _table(reports: Sequence[AotReport]) -> list[str]:
    """A Markdown table, aligned so that it reads as text too."""
    rows = [HEADS, *(_row(report) for report in reports)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return [lines[0], "| " + " | ".join("-" * width for width in widths) + " |", *lines[1:]]


def _row(report: AotReport) -> tuple[str, ...]:
    return (
        report.name,
        report.target,
        str(report.num_warps),
        str(report.registers),
        str(report.spill_bytes),
        str(report.stack_bytes),
        f"{report.shared_bytes / 1024:.1f}",
        f"{report.binary_bytes / 1024:.0f}",
        ", ".join(report.features),
    )


if __name__ == "__main__":
    sys.exit(main())
