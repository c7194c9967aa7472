"""Reader of the kernel tables in the optional package aiconfigurator-core (Apache-2.0, NVIDIA).

They lie under ``systems/data/<card>/<operation>/<engine>/<version>/<table>.parquet``, with times in milliseconds, and
were measured with kernels in a loop, so that weights which fit the L2 cache come from there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from windtunnel.calibrate.kernel_tables import KernelTableError, KernelTables, Rows
from windtunnel.sim.deployment.gpu import GpuSpec, load_gpu

if TYPE_CHECKING:
    import pandas as pd

SYSTEMS = {
    "A100-80GB-SXM": "a100_sxm",
    "A100-80GB-PCIe": "a100_pcie",
    "B200": "b200_sxm",
    "B300": "b300_sxm",
    "H100-SXM": "h100_sxm",
    "H100-PCIe": "h100_pcie",
    "H200": "h200_sxm",
    "L4": "l4",
    "L40S": "l40s",
    "RTX-PRO-6000": "rtx_pro_6000_server",
}
"""Our names of the cards, and the package's."""

_DTYPES = {"bf16": ("bfloat16", "half", "float16"), "fp8": ("fp8",), "fp8_block": ("fp8_block",), "int8": ("int8",)}
_FUSED_CAPABILITIES = (9, 10)


def installed_systems() -> Path | None:
    """The folder ``systems`` of the installed package; None where it is not installed."""
    found = find_spec("aiconfigurator_core")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "systems"


def read_tables(gpu: str, engine: str = "vllm", *, systems: str | Path | None = None) -> KernelTables:
    """The kernels of a card as measured with ``engine``, each from the newest version that has its table.

    An all-reduce is the fastest of the kernels that the engine chooses from: its own in a CUDA graph, TensorRT-LLM's
    (FlashInfer has them) on Hopper and data-centre Blackwell, and NCCL's; ``all_reduce.source`` names the tables.
    ``systems`` is the package's folder of that name, where it is not installed.

    Raises KernelTableError where the package is missing, or has no such card or no matrix products of that engine.
    """
    name = load_gpu(gpu).name
    folder = _data_folder(name, Path(systems) if systems is not None else installed_systems())
    gemm = _table(folder, "gemm", engine, "gemm_perf")
    if gemm is None:
        raise KernelTableError(
            f"aiconfigurator-core has no matrix products of {engine} on {name}; it has {_engines(folder)}: choose one"
        )
    context = _table(folder, "attention", engine, "context_attention_perf")
    decode = _table(folder, "attention", engine, "generation_attention_perf")
    moe = _table(folder, "moe", engine, "moe_perf")
    return KernelTables(
        name,
        f"aiconfigurator-core {folder.name}",
        gemm=_of_kernels(_by_dtype(gemm, "gemm_dtype", {"m": "m", "n": "n", "k": "k"})),
        context_attention={} if context is None else _by_dtype(_plain(context), "kv_cache_dtype", _CONTEXT),
        decode_attention={} if decode is None else _by_dtype(_counted(_plain(decode)), "kv_cache_dtype", _DECODE),
        all_reduce=_all_reduce(folder, engine, load_gpu(name)),
        moe={} if moe is None else _by_dtype(_whole_experts(moe), "moe_dtype", _MOE),
    )


_HEADS = {"num_heads": "num_heads", "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
_CONTEXT = {"batch": "batch_size", "tokens": "isl", **_HEADS}
_DECODE = {"batch": "batch_size", "context": "context", **_HEADS}
_MOE = {
    "tokens": "num_tokens",
    "hidden": "hidden_size",
    "width": "inter_size",
    "top_k": "topk",
    "num_experts": "num_experts",
    "tp": "moe_tp_size",
}


def _data_folder(gpu: str, systems: Path | None) -> Path:
    if systems is None:
        raise KernelTableError(
            "kernel tables need the package aiconfigurator-core: pip install 'windtunnel[kernels]' (Python below 3.14)"
        )
    system = SYSTEMS.get(gpu)
    if system is None:
        raise KernelTableError(f"aiconfigurator-core has no tables for {gpu}; it has {', '.join(sorted(SYSTEMS))}")
    folder = systems / "data" / system
    if not folder.is_dir():
        raise KernelTableError(f"{folder}: no such folder; this release of aiconfigurator-core has no {system}")
    return folder


def _engines(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in (folder / "gemm").glob("*"))) or "none"


def _table(folder: Path, operation: str, engine: str, name: str) -> pd.DataFrame | None:
    """The table of the newest version that has it."""
    import pandas as pd

    paths = sorted((folder / operation / engine).glob(f"*/{name}.parquet"), key=lambda path: _version(path.parent.name))
    if not paths:
        return None
    try:
        frame = pd.read_parquet(paths[-1])
    except (OSError, ValueError) as error:
        raise KernelTableError(f"{paths[-1]}: not a Parquet file ({str(error).splitlines()[0]})") from error
    frame.attrs["source"] = f"{folder.name} {engine} {paths[-1].parent.name} {name.removesuffix('_perf')}"
    return frame


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Attention without a window."""
    return _kept(frame, frame["window_size"] == 0) if "window_size" in frame else frame


def _counted(frame: pd.DataFrame) -> pd.DataFrame:
    """Decodes with the tokens they read: those cached before (``step``) and the new one."""
    counted = frame.assign(context=frame["step"] + frame["isl"])
    counted.attrs = dict(frame.attrs)
    return counted


def _of_kernels(tables: dict[str, Rows]) -> dict[str, Rows]:
    """The tables whose smallest product shows the kernel, not the host that launches it.

    Products with block-wise fp8 scales never take less than 55 to 350 us there, with their quantisation launched from
    Python; a CUDA graph has none of that.
    """
    return {dtype: rows for dtype, rows in tables.items() if rows.seconds.min() < _LAUNCHED_S}


_LAUNCHED_S = 20e-6


def _whole_experts(frame: pd.DataFrame) -> pd.DataFrame:
    """Experts split over ranks by width, none whole, as vLLM does without expert parallelism, with tokens spread as
    evenly as was measured."""
    spread = min(frame["distribution"].unique())  # "balanced" comes before "power_law_1.01" and so on
    kept = _kept(frame, (frame["moe_ep_size"] == 1) & (frame["distribution"] == spread))
    return _sourced(kept, f"{frame.attrs['source']} {spread}")


def _kept(frame: pd.DataFrame, rows: pd.Series[bool]) -> pd.DataFrame:
    kept = frame[rows]
    kept.attrs = dict(frame.attrs)
    return kept


def _by_dtype(frame: pd.DataFrame, dtype: str, columns: Mapping[str, str]) -> dict[str, Rows]:
    """Rows for each of our dtypes; where a size was measured with several kernels, the fastest."""
    tables = {}
    for ours, theirs in _DTYPES.items():
        part = frame[frame[dtype].isin(theirs)]
        if len(part):
            best = part.groupby(list(columns.values()), as_index=False).agg({"latency": "min"})
            kernels = "" if "kernel_source" not in part else f" ({', '.join(sorted(part['kernel_source'].unique()))})"
            tables[ours] = _rows(best, columns, f"{frame.attrs['source']} {ours}{kernels}")
    return tables


def _rows(frame: pd.DataFrame, columns: Mapping[str, str], source: str) -> Rows:
    return Rows(
        {ours: frame[theirs].to_numpy(np.int64) for ours, theirs in columns.items()},
        frame["latency"].to_numpy(np.float64) * 1e-3,
        source,
    )


def _all_reduce(folder: Path, engine: str, gpu: GpuSpec) -> Rows | None:
    """The fastest of the kernels that the engine has for each size and number of cards."""
    import pandas as pd

    found = (_own_reduce(folder, engine), _fused_reduce(folder, gpu), _nccl_reduce(folder))
    parts = [_in_bytes(part) for part in found if len(part)]
    if not parts:
        return None
    sources = [part.attrs["source"] for part in parts]
    for part in parts:
        part.attrs = {}  # pandas compares them when it concatenates
    columns = {"ranks": "num_gpus", "bytes": "message_bytes"}
    best = pd.concat(parts).groupby(list(columns.values()), as_index=False).agg({"latency": "min"})
    return _rows(best, columns, f"the fastest of {'; '.join(sources)}" if len(parts) > 1 else sources[0])


def read_all_reduces(gpu: str, *, systems: str | Path | None = None) -> tuple[Rows, ...]:
    """The own all-reduces of every engine and version that the package has of a card, one table each.

    Their hosts may differ, which matters where the host is the way between the cards.  Raises KernelTableError where
    the package is missing or has no such card.
    """
    import pandas as pd

    folder = _data_folder(load_gpu(gpu).name, Path(systems) if systems is not None else installed_systems())
    columns = {"ranks": "num_gpus", "bytes": "message_bytes"}
    tables = []
    for path in sorted((folder / "comm").glob("*/*/custom_allreduce_perf.parquet")):
        frame = pd.read_parquet(path)
        frame.attrs["source"] = f"{folder.name} {path.parent.parent.name} {path.parent.name} custom_allreduce"
        frame = _in_bytes(_in_graphs(frame))
        best = frame.groupby(list(columns.values()), as_index=False).agg({"latency": "min"})
        tables.append(_rows(best, columns, str(frame.attrs["source"])))
    return tuple(tables)


def _in_bytes(frame: pd.DataFrame) -> pd.DataFrame:
    """With the bytes of each message: the tables count its elements (``message_size``).

    Their ``half`` ends at half the count of ``int8`` and takes as long there.  Read as elements, the largest messages
    have bus bandwidths of 227 GB/s on 8 A100, 469 on 8 H100 and 725 on 8 B200, which is 0.76, 1.04 (the switch adds up)
    and 0.81 of their links; read as bytes, half of that.
    """
    dtype = next(name for name in ("allreduce_dtype", "nccl_dtype") if name in frame)
    unknown = sorted(set(frame[dtype]) - set(_ELEMENT_BYTES))
    if unknown:
        raise KernelTableError(
            f"{frame.attrs['source']}: no size is known of elements of {', '.join(map(str, unknown))}; known are "
            f"{', '.join(_ELEMENT_BYTES)}"
        )
    sized = frame.assign(message_bytes=frame["message_size"] * frame[dtype].map(_ELEMENT_BYTES))
    sized.attrs = dict(frame.attrs)
    return sized


_ELEMENT_BYTES = {"bfloat16": 2, "half": 2, "float16": 2, "float32": 4, "int8": 1, "fp8": 1}


def _own_reduce(folder: Path, engine: str) -> pd.DataFrame:
    """The engine's own all-reduce, from a CUDA graph."""
    frame = _table(folder, "comm", engine, "custom_allreduce_perf")
    if frame is None:
        return _nothing()
    return _in_graphs(frame)


def _in_graphs(frame: pd.DataFrame) -> pd.DataFrame:
    """Those measured from CUDA graphs, where the table tells."""
    if "backend" not in frame:
        return frame
    return _sourced(_kept(frame, frame["backend"].str.endswith("_graph")), f"{frame.attrs['source']} in CUDA graphs")


def _fused_reduce(folder: Path, gpu: GpuSpec) -> pd.DataFrame:
    """TensorRT-LLM's kernels, which vLLM uses through FlashInfer, fused with the norm, on Hopper and Blackwell."""
    frame = _table(folder, "comm", "trtllm", "custom_allreduce_perf")
    served = gpu.compute_capability is not None and gpu.compute_capability[0] in _FUSED_CAPABILITIES
    return frame if frame is not None and served else _nothing()


def _nccl_reduce(folder: Path) -> pd.DataFrame:
    frame = _table(folder, "comm", "nccl", "nccl_perf")
    if frame is None:
        return _nothing()
    return _kept(frame, (frame["op_name"] == "all_reduce") & (frame["nccl_dtype"] == "half"))


def _nothing() -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame()


def _sourced(frame: pd.DataFrame, source: str) -> pd.DataFrame:
    frame.attrs["source"] = source
    return frame
