"""Measured kernel times in one plain form, whoever measured them; and the reader of LLMServingSim's profiles.

LLMServingSim (MIT licence) profiles the layers of one model on one card through vLLM: a table each for layers by
tokens, attention by chunk, prefix and decodes, kernels by sequences, and experts by tokens.  Times are in
microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.sim.deployment.gpu import load_gpu

if TYPE_CHECKING:
    import pandas as pd

PROFILE_FILES = ("v1_dense", "v1_attention", "v1_per_sequence", "v1_moe")
"""Names of LLMServingSim's tables, each a Parquet file of one folder."""


class KernelTableError(ValueError):
    """No usable kernel table: the package, card, file or row is missing or wrong; the message names the remedy."""


@dataclass(frozen=True)
class Rows:
    """Measured calls of one kind of kernel: their sizes, as columns of whole numbers, and the seconds of each.

    Raises KernelTableError for no rows, columns of different lengths, a negative size or a time that is not positive.
    """

    columns: Mapping[str, NDArray[np.int64]]
    seconds: NDArray[np.float64]
    source: str = ""
    """Who measured it, as the table says: engine, its version, the kernel."""

    def __post_init__(self) -> None:
        lengths = {len(values) for values in (*self.columns.values(), self.seconds)}
        if len(lengths) != 1 or not self.columns:
            raise KernelTableError(f"the columns of {self.name} must be equally long, got {sorted(lengths)}")
        if lengths == {0}:
            raise KernelTableError(f"{self.name} holds no rows")
        bad = ~(np.isfinite(self.seconds) & (self.seconds > 0))
        if bad.any():
            row = int(np.argmax(bad))
            raise KernelTableError(
                f"{self.name}: times must be above 0 and finite, got {self.seconds[row]} in row {row}"
            )
        for column, values in self.columns.items():
            if (values < 0).any():
                raise KernelTableError(f"{self.name}: {column} must be at least 0, got {int(values.min())}")

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.source or "a kernel table"

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, column: str) -> NDArray[np.int64]:
        return self.columns[column]

    def take(self, rows: NDArray[Any]) -> Rows:
        """Those rows (numbers or a mask)."""
        return Rows({name: values[rows] for name, values in self.columns.items()}, self.seconds[rows], self.source)

    def where(self, **wanted: int) -> Rows | None:
        """The rows that hold those values; None where there are none."""
        mask = np.ones(len(self), bool)
        for column, value in wanted.items():
            mask &= self.columns[column] == value
        return self.take(mask) if mask.any() else None

    def values(self, column: str) -> list[int]:
        """The different values of a column, in order."""
        return [int(value) for value in np.unique(self.columns[column])]


@dataclass(frozen=True)
class KernelTables:
    """What was measured of one card's kernels; each part may be missing.

    ========================  ========================================================================================
    part                      columns
    ========================  ========================================================================================
    gemm[dtype]               m, n, k: rows of activations, columns and depth of the weight
    context_attention[kv]     batch, tokens, num_heads, num_kv_heads, head_dim: causal prefill without a prefix
    decode_attention[kv]      batch, context, num_heads, num_kv_heads, head_dim: one query each
    all_reduce                ranks, bytes
    moe[dtype]                tokens, hidden, width, top_k, num_experts, tp: one layer's experts, router left out
    layers[name]              tokens: one call of a named layer of ``model``, as it is on one of its GPUs
    sequences[name]           sequences: lm_head and sampler
    attention                 chunk, prefix, num_decodes, decode_context (of each): one call for all, of ``model``
    experts                   tokens, activated: the experts of one layer of ``model``
    ========================  ========================================================================================

    dtype is "bf16" or "fp8" and so on, kv that of the cache.  ``layers``, ``sequences``, ``attention`` and ``experts``
    are of one model and tensor parallelism (``model`` and ``tensor_parallel_size``), the others of any.
    """

    gpu: str
    """Our name of the card (GpuSpec)."""
    source: str
    gemm: Mapping[str, Rows] = field(default_factory=dict)
    context_attention: Mapping[str, Rows] = field(default_factory=dict)
    decode_attention: Mapping[str, Rows] = field(default_factory=dict)
    all_reduce: Rows | None = None
    moe: Mapping[str, Rows] = field(default_factory=dict)
    layers: Mapping[str, Rows] = field(default_factory=dict)
    sequences: Mapping[str, Rows] = field(default_factory=dict)
    attention: Rows | None = None
    experts: Rows | None = None
    model: str = ""
    tensor_parallel_size: int = 0


def read_profiled(folder: str | Path, gpu: str, model: str, tensor_parallel_size: int = 1) -> KernelTables:
    """LLMServingSim's profile of ``model`` (its Hugging Face name) on ``gpu`` (our name or theirs).

    Raises KernelTableError where the folder has no such files, card, model or tensor parallelism, naming those it has.
    """
    folder, spec = Path(folder), load_gpu(gpu)
    frames = {name: _profile(folder / f"{name}.parquet") for name in PROFILE_FILES[:3]}
    chosen = {
        name: _of_profile(folder, frame, spec.name, model, tensor_parallel_size) for name, frame in frames.items()
    }
    source = f"LLMServingSim {model} {spec.name} tp{tensor_parallel_size}"
    return KernelTables(
        spec.name,
        source,
        layers=_by_layer(chosen["v1_dense"], "tokens", source),
        sequences=_by_layer(chosen["v1_per_sequence"], "sequences", source),
        attention=_rows(
            chosen["v1_attention"],
            {
                "chunk": "prefill_chunk",
                "prefix": "kv_prefill",
                "num_decodes": "n_decode",
                "decode_context": "kv_decode",
            },
            source,
        ),
        experts=_profiled_experts(folder, spec.name, model, tensor_parallel_size, source),
        model=model,
        tensor_parallel_size=tensor_parallel_size,
    )


def _profile(path: Path) -> pd.DataFrame:
    import pandas as pd

    if not path.is_file():
        raise KernelTableError(
            f"{path}: no such table; a folder of profiles holds {', '.join(PROFILE_FILES)} (.parquet)"
        )
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise KernelTableError(f"{path}: not a Parquet file ({str(error).splitlines()[0]})") from error


def _of_profile(folder: Path, frame: pd.DataFrame, gpu: str, model: str, size: int) -> pd.DataFrame:
    missing = [column for column in ("gpu", "model", "tp", "time_us") if column not in frame]
    if missing:
        raise KernelTableError(f"{folder}: a table lacks the columns {', '.join(missing)}")
    has = frame["gpu"].map({name: load_gpu(_spaced(name)).name for name in frame["gpu"].unique()})
    chosen = frame[(has == gpu) & (frame["model"] == model) & (frame["tp"] == f"tp{size}")]
    if chosen.empty:
        kinds = sorted({f"{a} {b} {c}" for a, b, c in zip(has, frame["model"], frame["tp"], strict=True)})
        raise KernelTableError(f"{folder} has no {gpu} {model} tp{size}; it has {', '.join(kinds)}")
    return chosen


def _spaced(name: str) -> str:
    """``RTX4090`` as ``RTX 4090``, which is how cards are called."""
    return name.replace("RTXPRO", "RTX PRO ").replace("RTX", "RTX ", 1).replace("RTX  ", "RTX ")


def _by_layer(frame: pd.DataFrame, size: str, source: str) -> dict[str, Rows]:
    return {
        str(layer): _rows(part, {size: size}, f"{source} {layer}") for layer, part in frame.groupby("layer", sort=True)
    }


def _profiled_experts(folder: Path, gpu: str, model: str, size: int, source: str) -> Rows | None:
    path = folder / f"{PROFILE_FILES[3]}.parquet"
    if not path.is_file():
        return None
    try:
        chosen = _of_profile(folder, _profile(path), gpu, model, size)
    except KernelTableError:
        return None  # a dense model has no rows here
    return _rows(chosen, {"tokens": "tokens", "activated": "activated_experts"}, f"{source} experts")


def _rows(frame: pd.DataFrame, columns: Mapping[str, str], source: str) -> Rows:
    missing = [name for name in (*columns.values(), "time_us") if name not in frame]
    if missing:
        raise KernelTableError(f"{source}: the table lacks the columns {', '.join(missing)}")
    return Rows(
        {ours: frame[theirs].to_numpy(np.int64) for ours, theirs in columns.items()},
        frame["time_us"].to_numpy(np.float64) * 1e-6,
        source,
    )
