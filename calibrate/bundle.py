"""Builds the profiles that come with the package.

    python -m windtunnel.calibrate.bundle                    every composed profile, and the index
    python -m windtunnel.calibrate.bundle --steps FILE       the error of composing as well, and the profiles of B300
    python -m windtunnel.calibrate.bundle --only llama-3.1-8b-h100-sxm-tp1-bf16
    python -m windtunnel.calibrate.bundle --index            the index alone: a profile was put into the folder
    python -m windtunnel.calibrate.bundle --docs             the tables in docs/bundled-profiles.md, and nothing else

Composed profiles need the kernel tables of aiconfigurator-core (``pip install 'windtunnel[kernels]'``).  ``FILE`` is
the table of real vLLM 0.20.1 steps of Qwen3-32B on B300 that docs/bundled-profiles.md describes.  The same tables give
the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.aiconfigurator import read_all_reduces, read_tables
from windtunnel.calibrate.distil import Limits, Otherwise, Scatter, SourceError, distil
from windtunnel.calibrate.fit import StepTimeFit
from windtunnel.calibrate.host import NO_HOST, HostOverhead, host_of_others, learned_host
from windtunnel.calibrate.kernel_tables import KernelTables, Rows
from windtunnel.calibrate.operators import OperatorModel
from windtunnel.calibrate.step_tables import StepTable, read_step_table
from windtunnel.sim.cost.bundled import INDEX, PROFILES, bundled_profiles, largest_steps
from windtunnel.sim.cost.fitted import FittedCost
from windtunnel.sim.cost.profile import load_profile, save_profile
from windtunnel.sim.deployment.gpu import GpuSpec, load_gpu
from windtunnel.sim.deployment.memory import InfeasibleDeployment, kv_pool
from windtunnel.sim.deployment.model import load_model, other_names
from windtunnel.sim.deployment.model_spec import ModelSpec

MODELS = ("llama-3.1-8b", "qwen2.5-7b", "qwen3-32b", "llama-3.3-70b")
GPUS = ("H100-SXM", "H200", "A100-80GB-SXM", "L40S", "B200")
SIZES = (1, 2, 4, 8)

COMPOSITION_FILE = Path(__file__).with_name("data") / "composition.json"
B300_RUN = "fpm_upfront_qwen32_full_once_20260613_194007/tp{size}_ep1_past4096"
_B300_MODEL = "qwen3-32b"

UNCOMPARED = 2.0
"""By how much the error of composing is widened for a card that was not compared: a judgement, not a measurement."""
_MAX_NUM_SEQS = 1024
"""vLLM's default on cards of 160 GiB and more; smaller ones have less."""
_MAX_NUM_BATCHED_TOKENS = 16_384
"""The largest default of vLLM 0.32."""
_SMALLEST_USE: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "max_model_len": 8192}
"""What has to start for a profile to be worth making."""


class Case(NamedTuple):
    """One profile to compose."""

    model: ModelSpec
    gpu: GpuSpec
    tensor_parallel_size: int
    num_kv_tokens: int

    @property
    def name(self) -> str:
        """Of the profile and its file."""
        return profile_name(self.model, self.gpu, self.tensor_parallel_size)


def profile_name(model: ModelSpec, gpu: GpuSpec, tensor_parallel_size: int) -> str:
    """``llama-3.1-8b-h100-sxm-tp1-bf16``."""
    short = {"bfloat16": "bf16", "float16": "fp16"}
    dtype = model.weight_format.gemm_dtype if model.weight_format else short[model.dtype]
    return f"{other_names(model.name)[0]}-{gpu.name.casefold()}-tp{tensor_parallel_size}-{dtype}"


def cases(models: Iterable[str] = MODELS, gpus: Iterable[str] = GPUS) -> Iterator[Case]:
    """Those whose heads divide and which vLLM would start with, by the memory plan."""
    cards = [load_gpu(gpu) for gpu in gpus]
    for model in map(load_model, models):
        for gpu in cards:
            for size in model.tensor_parallel_sizes(max(SIZES)):
                if size in SIZES and (num_kv_tokens := _kv_tokens(model, gpu, size)):
                    yield Case(model, gpu, size, num_kv_tokens)


def _kv_tokens(model: ModelSpec, gpu: GpuSpec, size: int) -> int:
    """Tokens that the KV cache holds; 0 where vLLM does not start."""
    try:
        return kv_pool(model, gpu, tensor_parallel_size=size, **_SMALLEST_USE).kv_cache_tokens
    except InfeasibleDeployment:
        return 0


# --- composed from kernel tables


def compose(case: Case) -> FittedCost:
    """The profile of ``case``, from the kernel tables of its card."""
    composed = operator_model(case.model, case.gpu.name, case.tensor_parallel_size)
    return distil(
        composed.step_times_s,
        limits_of(case, composed),
        provenance={
            "source": "composed",
            "statement": "composed from kernel tables, not measured end to end" + _link_remark(case),
            "model": case.model.name,
            "gpu": case.gpu.name,
            "tensor_parallel_size": case.tensor_parallel_size,
            "dtype": case.model.dtype,
            "kv_cache_dtype": "auto",
            "engine": "vLLM, in the releases that the tables name",
            "clock": "GPU time of kernels in a loop, and the host's part of a step",
            "tables": composed.describe(),
            "tables_package": f"aiconfigurator-core {_tables_version()}",
            "licence": "Apache-2.0 (aiconfigurator-core, NVIDIA)",
        },
        extra_error=composition_error(),
        scatter=real_scatter(),
        otherwise=other_links(case),
    )


def other_links(case: Case) -> Otherwise | None:
    """The same steps with the all-reduces of every engine and version that the tables have of the card.

    None where cards reach each other without the host: there such tables differ by the kernels alone, and the error of
    composing has that.
    """
    size = case.tensor_parallel_size
    if not _rests_on_host(case):
        return None
    tables = [rows for rows in _all_reduces(case.gpu.name) if size in rows.values("ranks")]
    models = [_with_reduces(case, rows) for rows in tables]
    rates = [_rate_gb_per_s(rows, size) for rows in tables]
    return Otherwise(
        tuple(model.step_times_s for model in models),
        f"how {size} cards on {case.gpu.link} reach each other is up to the host: the {len(tables)} tables of their "
        f"all-reduces have {min(rates):.1f} to {max(rates):.1f} GB/s",
    )


def _rests_on_host(case: Case) -> bool:
    return case.tensor_parallel_size > 1 and case.gpu.link.startswith("PCIe")


def _with_reduces(case: Case, rows: Rows) -> OperatorModel:
    tables = replace(_tables(case.gpu.name), all_reduce=rows)
    return OperatorModel(case.model, case.gpu.name, case.tensor_parallel_size, tables, host=learned_host())


@cache
def _all_reduces(gpu: str) -> tuple[Rows, ...]:
    return read_all_reduces(gpu)


def _rate_gb_per_s(rows: Rows, size: int) -> float:
    """What each card sends and receives a second in the largest all-reduce (bus bandwidth), in GB/s (10**9)."""
    own = rows.where(ranks=size)
    assert own is not None, "the tables have these ranks"
    largest = int(np.argmax(own["bytes"]))
    return 2 * (size - 1) / size * float(own["bytes"][largest]) / float(own.seconds[largest]) / 1e9


def _link_remark(case: Case) -> str:
    """What all-reduces rest on where hosts differ much: how cards on PCIe reach each other is up to the host."""
    rows, size = _tables(case.gpu.name).all_reduce, case.tensor_parallel_size
    if rows is None or not _rests_on_host(case):
        return ""
    rate = _rate_gb_per_s(rows, size)
    return f"; its {size} cards reach each other at {rate:.1f} GB/s, as on the host of the tables"


def operator_model(model: ModelSpec, gpu: str, size: int, host: HostOverhead | None = None) -> OperatorModel:
    """The composed model that bundled profiles are distilled from; ``host`` in place of the learned overhead."""
    return OperatorModel(model, gpu, size, _tables(gpu), host=learned_host() if host is None else host)


@cache
def _tables(gpu: str) -> KernelTables:
    return read_tables(gpu)


def _tables_version() -> str:
    try:
        return version("aiconfigurator-core")
    except PackageNotFoundError:
        return "of unknown release"


def limits_of(case: Case, composed: OperatorModel) -> Limits:
    """What the tables hold, the model allows and the card's KV cache has room for."""
    held = composed.domain_limits
    seats = min(_MAX_NUM_SEQS, held.max_num_decode_seqs)
    return Limits(
        seats,
        min(case.model.max_model_len, held.max_context_tokens),
        min(_MAX_NUM_BATCHED_TOKENS, held.max_num_tokens),
        max(case.num_kv_tokens, seats),
    )


def composition_error(path: Path = COMPOSITION_FILE) -> SourceError:
    """How far composed step times of cards that were not compared are taken to be from real ones.

    ``UNCOMPARED`` times the largest error of the cases in the file, whose better ones vouch for nothing elsewhere.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))["errors"]
    sizes = ", ".join(str(row["tensor_parallel_size"]) for row in rows)
    return SourceError(
        UNCOMPARED * max(row["p50_percent"] for row in rows),
        UNCOMPARED * max(row["p90_percent"] for row in rows),
        f"{sum(row['num_steps'] for row in rows):,} real vLLM 0.20.1 steps of {rows[0]['model']} on B300 at tensor "
        f"parallelism {sizes}, composed in the same way from that card's tables: the largest of these errors, doubled, "
        "as no step of this profile's own card was compared",
    )


def composition_table(path: Path = COMPOSITION_FILE) -> str:
    """The errors in the file as a table."""
    rows = json.loads(path.read_text(encoding="utf-8"))["errors"]
    heads = ["| TP | real steps | median error | nine of ten within | bias of the sum |", "|---|---|---|---|---|"]
    cells = (
        f"| {row['tensor_parallel_size']} | {row['num_steps']} | {row['p50_percent']} % | {row['p90_percent']} % | "
        f"{row['bias_percent']:+} % |"
        for row in rows
    )
    return "\n".join([*heads, *cells])


def compare_composed(steps: Path) -> dict[str, Any]:
    """Composed times of Qwen3-32B on B300 beside those of its real steps: the content of ``COMPOSITION_FILE``.

    The host's part for each tensor parallelism is learned from the others, so that no step vouches for itself.
    """
    model = load_model(_B300_MODEL)
    tables = {size: _b300_table(steps, size) for size in SIZES}
    comparisons = {
        size: operator_model(model, "B300", size, NO_HOST).beside(table.shapes, table.step_s)
        for size, table in tables.items()
    }
    rows = []
    for size, table in tables.items():
        host = host_of_others(comparisons, size, "the other tensor parallelisms")
        rows.append(_composition_row(size, table, comparisons[size].with_host_s(host)))
    return {"about": "Composed against real step times; python -m windtunnel.calibrate.bundle --steps", "errors": rows}


def real_scatter(path: Path = COMPOSITION_FILE) -> Scatter:
    """How real steps scatter around a fit of their own, as the file has it."""
    return Scatter(**json.loads(path.read_text(encoding="utf-8"))["scatter"])


def scatter_of_b300(fits: Sequence[FittedCost]) -> dict[str, Any]:
    """The scatter in ``COMPOSITION_FILE``, from the profiles of all tensor parallelisms."""
    engine = fits[0].evidence.provenance["engine"]
    model = load_model(_B300_MODEL).name
    return asdict(Scatter.of(fits, f"real {engine} steps of {model} on B300 do around the fits to them"))


def _composition_row(size: int, table: StepTable, composed_s: NDArray[np.float64]) -> dict[str, Any]:
    errors = 100.0 * np.abs(composed_s / table.step_s - 1.0)
    return {
        "model": load_model(_B300_MODEL).name,
        "gpu": "B300",
        "tensor_parallel_size": size,
        "p50_percent": round(float(np.median(errors)), 1),
        "p90_percent": round(float(np.percentile(errors, 90)), 1),
        "bias_percent": round(100.0 * float(composed_s.sum() / table.step_s.sum() - 1.0), 1),
        "num_steps": len(table),
    }


# --- fitted to real steps


def _b300_table(steps: Path, size: int) -> StepTable:
    return read_step_table(steps, where={"run": B300_RUN.format(size=size)})


def fit_b300(steps: Path, size: int) -> FittedCost:
    """The profile of Qwen3-32B on ``size`` B300, from its real steps."""
    table, model = _b300_table(steps, size), load_model(_B300_MODEL)
    fitted = StepTimeFit().fit(table)
    line = fitted.evidence.errors[0]
    provenance = {
        "source": "recorded",
        "statement": f"fitted to {len(table)} real vLLM 0.20.1 steps",
        "model": model.name,
        "gpu": "B300",
        "tensor_parallel_size": size,
        "dtype": model.dtype,
        "kv_cache_dtype": "auto",
        "engine": "vLLM 0.20.1",
        "clock": "wall clock of the engine's step",
        "date": "2026-06-13",
        "tables": {"run": B300_RUN.format(size=size), "by": "forward-pass metrics of the aiconfigurator project"},
        "licence": "Apache-2.0 (aiconfigurator, NVIDIA)",
        "stated_error": {
            "p50_percent": round(line.p50_percent, 1),
            "p90_percent": round(line.p90_percent, 1),
            "rests_on": f"{line.num_steps} of its own steps, of shapes left out of the fit",
        },
    }
    kept = {key: value for key, value in fitted.evidence.provenance.items() if key not in ("source", "where")}
    return FittedCost(fitted.parameters, replace(fitted.evidence, provenance={**kept, **provenance}))


# --- the index


def write_index(folder: Path = PROFILES) -> dict[str, Any]:
    """``index.json`` of all profiles in the folder, by name."""
    names = sorted(path for path in folder.glob("*.json") if path.name != INDEX.name)
    index = {
        "about": "What the profiles of this folder are of; python -m windtunnel.calibrate.bundle --index",
        "profiles": [_entry(path) for path in names],
    }
    (folder / INDEX.name).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return index


def _entry(path: Path) -> dict[str, Any]:
    cost = load_profile(path)
    if not isinstance(cost, FittedCost):
        raise ValueError(f"{path}: a bundled profile must be a fitted one, got kind {cost.name}")
    told = cost.evidence.provenance
    missing = [key for key in ("model", "source", "statement", "dtype") if not told.get(key)]
    if missing:
        raise ValueError(f"{path}: the provenance of a bundled profile must hold {', '.join(missing)}")
    gpu = _card(told.get("gpu"))
    return {
        "name": path.stem,
        "model": str(told["model"]),
        "gpu": gpu,
        "device": gpu or str(told.get("device") or told.get("cpu") or told.get("gpu") or "not stated"),
        "tensor_parallel_size": int(told.get("tensor_parallel_size") or 1),
        "dtype": str(told["dtype"]),
        "kv_cache_dtype": str(told.get("kv_cache_dtype") or "auto"),
        "source": str(told["source"]),
        "statement": str(told["statement"]),
        "stated_error": _error_of(cost),
        "largest_steps": largest_steps(cost.evidence.domain),
        "checksum": json.loads(path.read_text(encoding="utf-8"))["checksum"],
    }


def _card(name: object) -> str | None:
    try:
        return load_gpu(str(name)).name if name else None
    except ValueError:
        return None


def _error_of(cost: FittedCost) -> dict[str, Any]:
    stated = cost.evidence.provenance.get("stated_error")
    if stated:
        return {key: stated[key] for key in ("p50_percent", "p90_percent", "rests_on")}
    whole = next((line for line in cost.evidence.errors if line.regime == "all"), None)
    if whole is None:
        return {"p50_percent": None, "p90_percent": None, "rests_on": "no real step was compared"}
    return {
        "p50_percent": round(whole.p50_percent, 1),
        "p90_percent": round(whole.p90_percent, 1),
        "rests_on": f"{whole.num_steps} of its own steps, of shapes left out of the fit",
    }


def markdown_table() -> str:
    """The composed and recorded profiles as a table: stated median and 90th percentile by tensor parallelism."""
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for each in bundled_profiles():
        if each.gpu is not None:
            rows.setdefault((each.model, each.gpu), {})[each.tensor_parallel_size] = _cell(each.stated_error)
    lines = [f"| model | card | {' | '.join(f'TP {size}' for size in SIZES)} |", f"|---|---|{'---|' * len(SIZES)}"]
    for (model, gpu), cells in rows.items():
        lines.append(f"| {model} | {gpu} | {' | '.join(cells.get(size, '–') for size in SIZES)} |")
    return "\n".join(lines)


def _cell(error: Mapping[str, Any]) -> str:
    if error["p50_percent"] is None:
        return "not known"
    return f"{error['p50_percent']:g} / {error['p90_percent']:g}"


# --- the documentation

DOCUMENTATION = Path(__file__).resolve().parent.parent / "docs" / "bundled-profiles.md"


def documentation_tables() -> dict[str, str]:
    """The tables of docs/bundled-profiles.md by the names of their places there."""
    from windtunnel.calibrate import transfer

    return {
        "profiles": markdown_table(),
        "composition": composition_table(),
        "scatter": scatter_table(),
        "transfers": transfer.markdown_table(transfer.transfer_errors().values()),
        "transfers to real steps": transfer.markdown_table(transfer.transfer_errors("on_real_steps").values()),
    }


def scatter_table() -> str:
    """The noise of composed profiles by regime."""
    sigmas = real_scatter().sigmas
    return "\n".join(
        ["| regime | sigma |", "|---|---|", *(f"| {name} | {100 * s:.1f} % |" for name, s in sigmas.items())]
    )


def write_documentation(path: Path = DOCUMENTATION) -> None:
    """Put the tables between ``<!-- table: NAME -->`` and ``<!-- end -->``; raises ValueError for a missing place."""
    text = path.read_text(encoding="utf-8")
    for name, table in documentation_tables().items():
        before, found, rest = text.partition(f"<!-- table: {name} -->\n")
        _, closed, after = rest.partition("<!-- end -->")
        if not found or not closed:
            raise ValueError(f"{path} must hold <!-- table: {name} --> and <!-- end --> behind it")
        text = f"{before}{found}{table}\n{closed}{after}"
    path.write_text(text, encoding="utf-8")


# --- the command


def main(arguments: list[str] | None = None) -> None:
    """Build profiles into the package's folder and write its index."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path, help="the table of real steps on B300")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these composed profiles")
    parser.add_argument("--index", action="store_true", help="nothing but the index")
    parser.add_argument(
        "--docs", action="store_true", help="write the tables in docs/bundled-profiles.md, build nothing"
    )
    given = parser.parse_args(arguments)
    if given.docs:
        write_documentation()
        return
    if not given.index:
        PROFILES.mkdir(exist_ok=True)
        if given.steps is not None:
            _rest_on(given.steps)
        _compose_all(given.only)
    index = write_index()
    print(f"{INDEX}: {len(index['profiles'])} profiles")


def _rest_on(steps: Path) -> None:
    """The profiles of B300, and from them and its steps what composed profiles state."""
    fits = []
    for size in SIZES:
        begun_s = time.perf_counter()
        fits.append(fit_b300(steps, size))
        _save(profile_name(load_model(_B300_MODEL), load_gpu("B300"), size), fits[-1], begun_s)
    found = {**compare_composed(steps), "scatter": scatter_of_b300(fits)}
    COMPOSITION_FILE.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _compose_all(only: list[str] | None) -> None:
    wanted = [case for case in cases() if not only or case.name in only]
    unknown = sorted(set(only or ()) - {case.name for case in wanted})
    if unknown:
        known = ", ".join(case.name for case in cases())
        sys.exit(f"no such composed profile: {', '.join(unknown)}; there are {known}")
    for case in wanted:
        begun_s = time.perf_counter()
        _save(case.name, compose(case), begun_s)


def _save(name: str, cost: FittedCost, begun_s: float) -> None:
    path = PROFILES / f"{name}.json"
    save_profile(cost, path)
    stated = cost.evidence.provenance["stated_error"]
    distilled = stated.get("distillation", {}).get("all", {})
    print(
        f"{name:44} {path.stat().st_size:>6} bytes  {time.perf_counter() - begun_s:4.1f} s  stated p50 "
        f"{stated['p50_percent']} % p90 {stated['p90_percent']} %  distilled {distilled.get('p50_percent', '-')} % "
        f"{distilled.get('p90_percent', '-')} %",
        flush=True,
    )


if __name__ == "__main__":
    main()
