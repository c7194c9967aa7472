"""How near step times composed from kernel tables come to measured ones.

    python -m benchmarks.calibration_kernels PROFILES STEPS [--out reports/published] [--learn]

PROFILES is a folder of LLMServingSim's profiles (RTX 4090, RTX PRO 6000), STEPS the table of real vLLM steps on B300
(Qwen3-32B).  Three comparisons:

a. composed steps against the profiles' own mixed shapes that were left out of the fit of attention;
b. steps composed from aiconfigurator-core's tables of B300 against real vLLM steps, without a host term, with one that
   was learned from the other tensor parallelisms, and with clocks under load and the part of prompts as on one card;
c. the two makers' tables of RTX PRO 6000 against each other.

Writes kernels_composed.json and .md; with --learn also calibrate/data/host.json, the host term learned from all steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.calibration_b300 import SIZES, b300_table
from windtunnel.calibrate.aiconfigurator import read_tables
from windtunnel.calibrate.host import NO_HOST, Comparison, HostOverhead, fit_host, host_of_others, learn_host
from windtunnel.calibrate.kernel_attention import Attention, fit_attention
from windtunnel.calibrate.kernel_tables import KernelTables, Rows, read_profiled
from windtunnel.calibrate.operators import OperatorModel
from windtunnel.sim.cost.features import REGIMES, regimes_of
from windtunnel.sim.deployment.model import load_model
from windtunnel.sim.engine.plan import StepShape

PROFILES = (
    ("RTX-4090", "meta-llama/Llama-3.1-8B", 1),
    ("RTX-PRO-6000", "meta-llama/Llama-3.1-8B", 1),
    ("RTX-PRO-6000", "meta-llama/Llama-3.1-8B", 2),
    ("RTX-PRO-6000", "Qwen/Qwen3-32B", 1),
    ("RTX-PRO-6000", "Qwen/Qwen3-32B", 2),
)
SHARE = 0.7
SEEDS = 5
HOST_FILE = Path(__file__).resolve().parent.parent / "calibrate" / "data" / "host.json"
HOST_SOURCE = (
    "real vLLM 0.20 steps of Qwen3-32B on B300 (TP 1, 2, 4, 8; Dynamo's forward-pass metrics), less their kernels as "
    "composed from aiconfigurator-core 0.12; prefill_s and clocks_share from those of TP 1"
)


class Errors(NamedTuple):
    """Of predicted against measured times, in percent."""

    num_steps: int
    median_percent: float
    p90_percent: float
    bias_percent: float
    """Of the median step, signed."""
    total_percent: float
    """Of the sum of all times, signed."""


def errors(predicted: NDArray[Any], measured: NDArray[Any]) -> Errors:
    relative = 100.0 * (predicted / measured - 1.0)
    return Errors(
        len(measured),
        round(float(np.median(np.abs(relative))), 2),
        round(float(np.percentile(np.abs(relative), 90)), 2),
        round(float(np.median(relative)), 2),
        round(100.0 * float(predicted.sum() / measured.sum() - 1.0), 2),
    )


def left_out(folder: Path) -> list[dict[str, Any]]:
    """Comparison a, one entry for each profile."""
    entries = []
    for gpu, name, size in PROFILES:
        tables = _with_reduce(read_profiled(folder, gpu, name, size))
        model = load_model(name.rsplit("/", 1)[-1])
        rows = _attention_rows(tables)
        entry: dict[str, Any] = {"gpu": gpu, "model": model.name, "tensor_parallel_size": size}
        steps, alone = [], []
        for seed in range(SEEDS):
            fitted, test = split_mixed(rows, seed)
            step, attention = left_out_errors(tables, name, size, fit_attention(fitted), test)
            steps.append(step)
            alone.append(attention)
        entry["steps"] = _middle(steps)._asdict()
        entry["attention"] = _middle(alone)._asdict()
        mixed = rows.take(_mixed(rows))
        pure = rows.take(~_mixed(rows))
        for label, factor in (("no_mixed", 1.0), ("no_mixed_group", _group_factor(model, size))):
            step, attention = left_out_errors(tables, name, size, fit_attention(pure, factor), mixed)
            entry[f"{label}_steps"], entry[f"{label}_attention"] = step._asdict(), attention._asdict()
        entry["rows"] = {"pure": len(pure), "mixed": len(mixed)}
        entries.append(entry)
    return entries


def _group_factor(model: Any, size: int) -> float:
    return float(np.sqrt(model.num_attention_heads // size / model.kv_heads_per_gpu(size)))


def _with_reduce(tables: KernelTables) -> KernelTables:
    if tables.tensor_parallel_size == 1:
        return tables
    return replace(tables, all_reduce=read_tables(tables.gpu).all_reduce)


def _mixed(rows: Rows) -> NDArray[Any]:
    return (rows["chunk"] > 0) & (rows["num_decodes"] > 0)


def split_mixed(rows: Rows, seed: int) -> tuple[Rows, Rows]:
    """All pure shapes and a random share of the mixed ones, and the other mixed ones."""
    mixed = _mixed(rows)
    chosen = np.random.default_rng(seed).random(len(rows)) < SHARE
    return rows.take(~mixed | chosen), rows.take(mixed & ~chosen)


def left_out_errors(
    tables: KernelTables, name: str, size: int, attention: Attention, rows: Rows
) -> tuple[Errors, Errors]:
    """Of whole steps and of attention alone; all but attention is the profile's own on both sides."""
    model = load_model(name.rsplit("/", 1)[-1])
    composed = OperatorModel(model, tables.gpu, size, tables, host=NO_HOST, attention=attention)
    terms = composed.terms_s(shape_of(rows))
    attention_s = terms["decode_attention"] + terms["prefill_attention"]
    others_s = _sum(terms) - attention_s
    measured_s = model.num_layers * rows.seconds
    return errors(others_s + attention_s, others_s + measured_s), errors(attention_s, measured_s)


def _attention_rows(tables: KernelTables) -> Rows:
    if tables.attention is None:
        raise ValueError(f"{tables.source} has no attention")
    return tables.attention


def shape_of(rows: Rows) -> Any:
    """The steps of calls of attention, as a StepShape of arrays; every sequence samples."""
    chunk, prefix, decodes = rows["chunk"], rows["prefix"], rows["num_decodes"]
    chunks = (chunk > 0).astype(np.int64)
    fields: list[Any] = [
        decodes,
        decodes * rows["decode_context"],
        chunks,
        chunk,
        prefix * chunks,
        chunk * prefix + chunk * (chunk + 1) // 2,
        decodes + chunks,
    ]
    return StepShape(*fields)


def _middle(parts: Sequence[Errors]) -> Errors:
    """The median of each figure over the seeds."""
    return Errors(
        parts[0].num_steps, *(round(float(np.median([part[place] for part in parts])), 2) for place in range(1, 5))
    )


def against_real_steps(path: Path) -> tuple[dict[str, Any], HostOverhead]:
    """Comparison b, and the host term learned from all steps."""
    tables, model = read_tables("B300"), load_model("Qwen3-32B")
    comparisons, rests_on = {}, {}
    for size in SIZES:
        composed, table = OperatorModel(model, "B300", size, tables, host=NO_HOST), b300_table(path, size)
        comparisons[size] = composed.beside(table.shapes, table.step_s)
        rests_on[str(size)] = composed.describe()
    result: dict[str, Any] = {"gpu": "B300", "model": model.name, "composition": rests_on["8"], "by_size": {}}
    pooled = []
    for size, comparison in comparisons.items():
        others = host_of_others(comparisons, size, HOST_SOURCE)
        plain = fit_host([each for other, each in comparisons.items() if other != size], HOST_SOURCE)
        pooled.append(comparison.with_host_s(others) / comparison.step_s - 1.0)
        result["by_size"][str(size)] = {
            "kernels_only": _by_regime(comparison, NO_HOST),
            "host_of_other_sizes_without_clocks": _by_regime(comparison, plain),
            "host_of_other_sizes": _by_regime(comparison, others),
            "host_s": {name: getattr(others, name) for name in ("base_s", "seq_s", "prefill_s", "clocks_share")},
        }
    result["stated_error"] = _stated(np.abs(np.concatenate(pooled)))
    warm = {str(size): _warm(model, size, tables, comparisons[size]) for size in SIZES}
    result["without_cold_corrections"] = warm
    return result, learn_host(comparisons, HOST_SOURCE)


def _stated(relative: NDArray[Any]) -> dict[str, Any]:
    """What a profile composed in the same way may state, all tensor parallelisms together."""
    return {
        "p50_percent": round(100.0 * float(np.median(relative)), 1),
        "p90_percent": round(100.0 * float(np.percentile(relative, 90)), 1),
        "rests_on": "real vLLM 0.20 steps of Qwen3-32B on B300 (TP 1, 2, 4, 8), composed from kernel tables with the "
        "host term of the other TPs; the corrections were chosen while looking at these steps, no other card was seen",
    }


def _warm(model: Any, size: int, tables: KernelTables, comparison: Comparison) -> dict[str, Any]:
    warm = OperatorModel(model, "B300", size, tables, host=NO_HOST, cold=False)
    return errors(warm.step_times_s(comparison.shapes), comparison.step_s)._asdict()


def _by_regime(comparison: Comparison, host: HostOverhead) -> dict[str, Any]:
    predicted = comparison.with_host_s(host)
    regimes = regimes_of(comparison.shapes)
    parts = {"all": errors(predicted, comparison.step_s)._asdict()}
    for number, regime in enumerate(REGIMES):
        inside = regimes == number
        if inside.any():
            parts[regime] = errors(predicted[inside], comparison.step_s[inside])._asdict()
    return parts


def two_makers(folder: Path) -> list[dict[str, Any]]:
    """Comparison c: aiconfigurator-core's tables as a prediction of LLMServingSim's, over shapes that both measured."""
    entries = []
    own = read_tables("RTX-PRO-6000")
    for gpu, name, size in PROFILES[1:]:
        tables, model = _with_reduce(read_profiled(folder, gpu, name, size)), load_model(name.rsplit("/", 1)[-1])
        profiled = OperatorModel(model, gpu, size, tables, host=NO_HOST)
        composed = OperatorModel(model, gpu, size, own, host=NO_HOST)
        entry: dict[str, Any] = {"gpu": gpu, "model": model.name, "tensor_parallel_size": size}
        for label, shapes in _common_shapes(_attention_rows(tables)):
            theirs, ours = profiled.terms_s(shapes), composed.terms_s(shapes)
            entry[label] = errors(_sum(ours), _sum(theirs))._asdict()
            entry[f"{label}_ratio_of_terms"] = {
                term: round(float(np.median(ours[term] / theirs[term])), 3) for term in ours if (theirs[term] > 0).all()
            }
        entries.append(entry)
    return entries


def _sum(terms: dict[str, NDArray[Any]]) -> NDArray[Any]:
    return np.asarray(np.sum(list(terms.values()), axis=0))


def _common_shapes(rows: Rows) -> Iterator[tuple[str, StepShape]]:
    pure_decodes = rows.take((rows["chunk"] == 0) & (rows["decode_context"] >= _LEAST_CONTEXT))
    yield "decode", shape_of(pure_decodes)
    yield "prefill", shape_of(rows.take((rows["num_decodes"] == 0) & (rows["prefix"] == 0)))
    yield "prefill_behind_prefix", shape_of(rows.take((rows["num_decodes"] == 0) & (rows["prefix"] > 0)))
    yield "mixed", shape_of(rows.take(_mixed(rows) & (rows["decode_context"] >= _LEAST_CONTEXT)))


_LEAST_CONTEXT = 128


def as_markdown(results: dict[str, Any]) -> str:
    """The figures as tables."""
    lines = [
        "# Step times composed from kernel tables",
        "",
        "Errors in percent of the measured time: median and 90th percentile of their size, and the median signed one.",
        "",
        "## Mixed shapes left out of the fit (LLMServingSim's profiles)",
        "",
        "Whole steps, all but attention taken from the profile on both sides; then attention alone.  Fitted: all pure",
        f"shapes and {SHARE:.0%} of the mixed ones, median of {SEEDS} seeds.  None: no mixed shape in the fit; decodes",
        "beside a chunk cost as alone, or the square root of the heads that share a key times as much.",
        "",
        "| GPU | model | TP | fitted | attention | none | none, square root | attention |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for entry in results["left_out"]:
        cells = ("steps", "attention", "no_mixed_steps", "no_mixed_group_steps", "no_mixed_group_attention")
        lines.append(_row(entry, (_cell(entry[cell]) for cell in cells)))
    lines += [
        "",
        "## Real vLLM steps (B300, Qwen3-32B, vLLM 0.20) from aiconfigurator-core's tables",
        "",
        "| TP | steps | kernels only | with a host term of the other TPs | and clocks under load |",
        "|--:|---|--:|--:|--:|",
    ]
    for size, entry in results["real_steps"]["by_size"].items():
        for regime, part in entry["kernels_only"].items():
            others = [entry[key][regime] for key in ("host_of_other_sizes_without_clocks", "host_of_other_sizes")]
            shown = " | ".join(_cell(each) for each in (part, *others))
            lines.append(f"| {size} | {regime} ({part['num_steps']}) | {shown} |")
    lines += [
        "",
        "All together, with the host term and clocks: "
        f"{results['real_steps']['stated_error']['p50_percent']} / "
        f"{results['real_steps']['stated_error']['p90_percent']}.",
        "",
        "## Two makers' tables of RTX PRO 6000",
        "",
        "aiconfigurator-core's composition as a prediction of LLMServingSim's, kernels only.",
        "",
        "| GPU | model | TP | decode | prefill | prefill behind a prefix | mixed |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        _row(entry, (_cell(entry[cell]) for cell in ("decode", "prefill", "prefill_behind_prefix", "mixed")))
        for entry in results["two_makers"]
    ]
    return "\n".join([*lines, ""])


def _row(entry: dict[str, Any], cells: Iterator[str]) -> str:
    return f"| {entry['gpu']} | {entry['model']} | {entry['tensor_parallel_size']} | {' | '.join(cells)} |"


def _cell(part: dict[str, Any]) -> str:
    return f"{part['median_percent']:.1f} / {part['p90_percent']:.1f} ({part['bias_percent']:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", type=Path)
    parser.add_argument("steps", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--learn", action="store_true", help="write calibrate/data/host.json")
    given = parser.parse_args()
    real, host = against_real_steps(given.steps)
    results = {
        "left_out": left_out(given.profiles),
        "real_steps": real,
        "host": host.as_plain(),
        "two_makers": two_makers(given.profiles),
    }
    if given.learn:
        HOST_FILE.write_text(json.dumps(host.as_plain(), indent=2) + "\n", encoding="utf-8")
    text = as_markdown(results)
    print(text)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "kernels_composed.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        (given.out / "kernels_composed.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
