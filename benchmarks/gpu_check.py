"""Everything that only a GPU can tell, in one run of some minutes, from the root of the repository:

    python benchmarks/gpu_check.py --out DIR [--budget-s 420]

It needs torch, triton and numpy, and no installation.  DIR/gpu_check.json is written after each section: the card and
its measured ceilings; whether kernels and a model are right on it; each kernel's share of the ceilings; step times of
Llama-3.1-8B with random weights; an engine under load; other tiles of the attention kernels.  What fails is recorded,
and the rest goes on.  The exit status is 0 if all was done and right, 1 if something failed or was wrong, and 3 if
something was left out because the time was up (but for autotune, a search that takes what time there is); the last
lines and the file's "verdict" say what.  Targets that were missed or not measured are listed, and no failure.

``--dry-run`` runs the same code at tiny sizes on a CPU: to try the script, not to measure.  In plain torch nothing is
checked either, because torch is compared with itself; with TRITON_INTERPRET=1 the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is on the path, but its parent is needed
    sys.path[:1] = [str(Path(__file__).resolve().parent.parent)]

import torch

from benchmarks.gpu import card, engine_check, kernel_check, model_check
from benchmarks.gpu.points import NO_TIME
from benchmarks.kernels import (
    attention_decode,
    attention_prefill,
    gather,
    linear,
    rms_norm,
    rope_store,
    sample,
    silu_and_mul,
)
from benchmarks.kernels.common import Bench, default_bench, print_row
from windtunnel.executor.devices import GpuMissing, require_gpu
from windtunnel.executor.reference import TorchOps

Section = Callable[[], Any]
KERNELS = (attention_decode, attention_prefill, rms_norm, rope_store, silu_and_mul, gather, sample, linear)
RIGHT, WRONG, INCOMPLETE = 0, 1, 3
"""Exit statuses; 2 is a wrong flag's."""
DECODE_SHARE, PREFILL_SHARE, NORM_SHARE, OVERHEAD_S = 0.85, 0.60, 0.85, 0.5e-3


class Check:
    """One run."""

    def __init__(self, out: Path, budget_s: float, bench: Bench) -> None:
        self._path = out / "gpu_check.json"
        self._end = time.monotonic() + budget_s
        self._tiny = bench.tiny
        self._bench = bench
        self._model = engine_check.ModelOnCard(
            self._bench.ops, self._bench.device, dtype=self._bench.dtype, tiny=bench.tiny
        )
        self._ceilings: dict[str, Any] = {}
        self.report: dict[str, Any] = {
            "format": "windtunnel gpu_check 1",
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "dry_run": bench.tiny,
            "operations": type(bench.ops).__name__,
            "budget_s": budget_s,
            "card": card.describe(),
            "sections": {},
            "targets": [],
            "verdict": {},
        }

    def run(self) -> int:
        """All sections, the most valuable first; the exit status."""
        if isinstance(self._bench.ops, TorchOps):
            print("these are torch's operations, compared with themselves: that they are right says nothing")
        for name, section, share in (
            ("ceilings", self._measure_ceilings, 1.0),
            ("kernels_right", self._check_kernels, 0.3),
            ("kernels", self._time_kernels, 0.4),
            ("model_right", self._check_model, 1.0),
            ("steps", self._time_steps, 0.6),
            ("throughput", self._load_engine, 1.0),
            ("autotune", self._autotune, 0.8),
            ("tensor_parallel", self._time_shares, 1.0),
        ):
            self._run_section(name, section, share)
        verdict = self.report["verdict"] = _verdict(self.report["sections"])
        self._write()
        for what, names in verdict.items():
            for name in names:
                print(f"{what.upper()}: {name}")
        if verdict["failed"] or verdict["wrong"]:
            return WRONG
        return INCOMPLETE if verdict["not done"] else RIGHT

    # -- sections

    def _measure_ceilings(self) -> dict[str, Any]:
        self._ceilings = card.ceilings(self._bench)
        copy, matmul = self._ceilings["copy_bytes_per_s"], self._ceilings["matmul_flops_per_s"]
        print(f"  copy {1e-12 * copy:.3f} TB/s, matmul {1e-12 * matmul:.1f} TFLOP/s")
        return self._ceilings

    def _check_kernels(self) -> list[dict[str, Any]]:
        rows = kernel_check.check(self._bench.ops, self._bench.place, tiny=self._tiny, more=self._more)
        compared = [row for row in rows if "passed" in row]
        wrong = [row for row in compared if not row["passed"]]
        print(f"  {len(compared) - len(wrong)} of {len(compared)} results are right")
        for row in wrong:
            print(f"  WRONG {row}")
        return rows

    def _time_kernels(self) -> Iterator[dict[str, Any]]:
        copy, matmul = self._ceilings.get("copy_bytes_per_s"), self._ceilings.get("matmul_flops_per_s")
        for module in KERNELS:
            if not self._more():
                yield {"op": module.__name__.rpartition(".")[2], "skipped": NO_TIME}
                continue
            try:
                rows = module.bench(self._bench)
            except Exception:  # the other kernels can still be measured
                print(traceback.format_exc())
                yield {"op": module.__name__.rpartition(".")[2], "failed": traceback.format_exc()}
                continue
            for row in rows:
                told = row.told(copy, matmul)
                print_row(told)
                yield told

    def _check_model(self) -> list[dict[str, Any]]:
        claims = model_check.check(self._bench.ops, self._bench.device, tiny=self._tiny)
        for claim in claims:
            print(f"  {'right' if claim['passed'] else 'WRONG'}: {claim['claim']} ({claim['value']})")
        return claims

    def _time_steps(self) -> dict[str, Any]:
        told = {"model": self._model.describe()}
        rows = []
        for row in engine_check.step_times(
            self._model, self._pick(engine_check.GRID, engine_check.TINY_GRID), self._more
        ):
            rows.append(row)
            _print_step(row)
        points = self._pick(
            [engine_check.Point(64, 1024), engine_check.Point(chunk=2048, cached=0)], engine_check.TINY_GRID[:1]
        )
        by_operation = engine_check.by_operation(self._model, points)
        return told | {"grid": rows, "overhead": engine_check.overhead(rows), "by_operation": by_operation}

    def _load_engine(self) -> dict[str, Any]:
        duration_s = 0.5 if self._tiny else min(60.0, 0.4 * self._left())
        told = engine_check.throughput(self._model, duration_s)
        print(
            f"  {told['output_tokens_per_s']:.0f} output tokens/s, {told['num_steps']} steps in {told['wall_s']:.1f} s"
        )
        return told

    def _autotune(self) -> dict[str, Any]:
        self._model.close()
        if isinstance(self._bench.ops, TorchOps):
            return {"skipped": "these are torch's operations"}
        from benchmarks.gpu import autotune  # needs Triton

        rows = list(autotune.probe(self._bench, self._more))
        best = autotune.best_of(rows)
        for row in best:
            print(f"  best {row}")
        return {"best": best, "tried": rows}

    def _time_shares(self) -> list[dict[str, Any]]:
        """One rank's share of the model, without communication."""
        self._model.close()
        found: list[dict[str, Any]] = []
        points = [engine_check.Point(64, 1024), engine_check.Point(chunk=2048, cached=0)]
        for tp_size in (2, 8) if not self._tiny else (2,):
            if not self._more():
                found.append({"tp_size": tp_size, "skipped": NO_TIME})
            else:
                share = engine_check.ModelOnCard(
                    self._bench.ops, self._bench.device, dtype=self._bench.dtype, tiny=self._tiny, tp_size=tp_size
                )
                picked = self._pick(points, engine_check.TINY_GRID[:1])
                rows = list(engine_check.step_times(share, picked, self._more))
                found.append({"tp_size": tp_size, "grid": rows})
                for row in rows:
                    _print_step(row)
                share.close()
        return found

    # -- how they are run

    def _run_section(self, name: str, section: Section, share: float) -> None:
        """``share`` of the time left is what it may use before it skips what is left of it."""
        begin = time.monotonic()
        print(f"{name} ({self._left():.0f} s left)", flush=True)
        told: dict[str, Any] = {"status": "ok"}
        if self._left() <= 0:
            told["status"] = "skipped"
        else:
            self._section_end = begin + share * self._left()
            try:
                with torch.inference_mode():
                    result = section()
                    told["result"] = list(result) if isinstance(result, Iterator) else result
            except Exception:
                print(traceback.format_exc(), flush=True)
                told |= {"status": "failed", "traceback": traceback.format_exc()}
        told["seconds"] = round(time.monotonic() - begin, 3)
        self.report["sections"][name] = told
        self.report["targets"] = list(_targets(self.report["sections"]))
        self._write()

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _more(self) -> bool:
        return time.monotonic() < self._section_end

    def _pick(self, real: Sequence[Any], tiny: Sequence[Any]) -> Sequence[Any]:
        return tiny if self._tiny else real

    def _write(self) -> None:
        partial = self._path.with_suffix(".part")
        partial.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
        partial.replace(self._path)


def _verdict(sections: dict[str, Any]) -> dict[str, list[str]]:
    """What failed, what was wrong, and what was not done for lack of time."""
    results = [(name, row) for name in ("kernels_right", "model_right") for row in _result(sections, name, [])]
    failed = [f"section {name}" for name, told in sections.items() if told["status"] == "failed"]
    failed += [f"benchmark {row['op']}" for row in _result(sections, "kernels", []) if "failed" in row]
    failed += [f"all tiles of {what}" for what in _all_failed(_result(sections, "autotune", {}).get("tried", []))]
    wrong = [f"{name}: {_name(row)}" for name, row in results if not row.get("passed", True)]
    not_done = [f"section {name}" for name, told in sections.items() if told["status"] == "skipped"]
    not_done += [
        f"{name}: {_name(row)}"
        for name, told in sections.items()
        if name != "autotune"
        for row in _rows_in(told.get("result"))
        if row.get("skipped") == NO_TIME
    ]
    return {"failed": failed, "wrong": wrong, "not done": not_done}


def _all_failed(tried: Sequence[dict[str, Any]]) -> list[str]:
    """Kernels and shapes of which no tile ran; that some do not is in the nature of a search."""
    works = {f"{row['kernel']} {row['shape']}": False for row in tried if "failed" in row}
    works |= {f"{row['kernel']} {row['shape']}": True for row in tried if "median_s" in row}
    return [name for name, does in works.items() if not does]


def _rows_in(result: Any) -> Iterator[dict[str, Any]]:
    """All rows of a section, however deep."""
    if isinstance(result, dict):
        yield result
    for value in result.values() if isinstance(result, dict) else result if isinstance(result, list) else ():
        yield from _rows_in(value)


def _name(row: dict[str, Any]) -> str:
    """What a row is about."""
    return ", ".join(str(row[key]) for key in ("claim", "op", "case", "point", "tp_size") if key in row)


def _targets(sections: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the kernels and the executor are meant to reach; what was not measured is not met."""
    rows = [row for row in _result(sections, "kernels", []) if "shape" in row]

    def worst(op: str, share: str, *shapes: str) -> float | None:
        return min((row[share] for row in rows if row["op"] == op and row["shape"].startswith(shapes)), default=None)

    kinds = (
        ("decode attention, 32 sequences or more x 2k: share of copy bandwidth", DECODE_SHARE,
         worst("attention_decode", "share_of_copy", "32 x 2048, kv bf", "64 x 2048, kv bf", "256 x 2048, kv bf")),
        ("prefill attention at 4k: share of matmul rate", PREFILL_SHARE,
         worst("attention_prefill", "share_of_matmul", "1 x 4096 behind 0, kv bf")),
        ("RMSNorm of 8192 tokens: share of copy bandwidth", NORM_SHARE, worst("add_rms_norm", "share_of_copy", "8192")),
        ("RoPE and store of 8192 tokens: share of copy bandwidth", NORM_SHARE,
         worst("rope_store", "share_of_copy", "8192, kv bf")),
    )  # fmt: skip
    for name, target, value in kinds:
        yield {"target": name, "at_least": target, "value": value, "met": value is not None and value >= target}
    value = (_result(sections, "steps", {}).get("overhead") or {}).get("largest_median_s")
    name = "host overhead of a decode step under graphs, seconds (largest median)"
    yield {"target": name, "at_most": OVERHEAD_S, "value": value, "met": value is not None and value <= OVERHEAD_S}


def _result(sections: dict[str, Any], name: str, otherwise: Any) -> Any:
    return sections.get(name, {}).get("result", otherwise)


def _print_step(row: dict[str, Any]) -> None:
    point = ", ".join(f"{name} {value}" for name, value in row["point"].items() if value)
    if "skipped" in row:
        print(f"  {point:52} skipped: {row['skipped']}", flush=True)
        return
    step, device, over = (1e3 * row[name]["median"] for name in ("step_s", "device_s", "host_overhead_s"))
    print(f"  {point:52} {step:9.3f} ms, device {device:9.3f} ms, host {over:7.3f} ms", flush=True)


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--budget-s", type=float, default=420.0, help="seconds after which nothing new is begun")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU")
    arguments = parser.parse_args()
    if arguments.dry_run:
        torch.set_num_threads(1)
    else:
        try:
            require_gpu()
        except GpuMissing as error:
            parser.error(f"{error}, and --dry-run tries this script on one")
    arguments.out.mkdir(parents=True, exist_ok=True)
    check = Check(arguments.out, arguments.budget_s, default_bench(tiny=arguments.dry_run))
    status = check.run()
    for target in check.report["targets"] if not arguments.dry_run else []:
        print(f"{'met' if target['met'] else 'MISSED' if target['value'] is not None else 'NOT MEASURED'} {target}")
    return status


if __name__ == "__main__":
    sys.exit(main())
