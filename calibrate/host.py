"""What a step takes besides its kernels: scheduling, input preparation, output handling and gaps between launches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.sim.engine.plan import StepShape


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """Seconds that a step takes besides its kernels; all at least 0.

    Raises ValueError, naming the field, for a value that is negative or not finite.
    """

    base_s: float = 0.0
    """Of every step."""
    seq_s: float = 0.0
    """Of each sequence in the batch."""
    prefill_s: float = 0.0
    """Of a step that holds prompt chunks: planning of its attention, and launches outside of a full CUDA graph."""
    source: str = ""
    """What it was learned from."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and not (np.isfinite(value) and value >= 0):
                raise ValueError(f"HostOverhead.{field.name} must be at least 0 and finite, got {value!r}")

    def step_s(self, shape: StepShape) -> NDArray[np.float64]:
        """Seconds for each step of a shape of arrays."""
        chunks = np.asarray(shape.num_prefill_seqs)
        num_seqs = np.asarray(shape.num_decode_seqs) + chunks
        return np.asarray(self.base_s + self.seq_s * num_seqs + self.prefill_s * (chunks > 0))

    def as_plain(self) -> dict[str, Any]:
        """As plain data for a file."""
        return asdict(self)


NO_HOST = HostOverhead(source="none")
"""Kernels alone, as other simulators price a step."""


class Comparison(NamedTuple):
    """Real steps beside the seconds of their kernels, as composed."""

    shapes: StepShape
    kernel_s: NDArray[np.float64]
    step_s: NDArray[np.float64]


def fit_host(comparisons: Sequence[Comparison], source: str) -> HostOverhead:
    """The HostOverhead that makes composed kernels come nearest to real steps, each comparison counting the same.

    Smallest mean of relative errors (absolute, not squared: real steps have outliers of twice their time), with
    coefficients of at least 0.  Raises ValueError where there are no comparisons.
    """
    if not comparisons:
        raise ValueError("a host overhead is learned from at least one comparison of composed and real steps")
    parts = [_rows_of(each) for each in comparisons]
    design, wanted, counts = (np.concatenate([part[place] for part in parts]) for place in range(3))
    base_s, seq_s, prefill_s = _least_absolute(design, wanted, counts)
    return HostOverhead(base_s, seq_s, prefill_s, source)


def _rows_of(comparison: Comparison) -> tuple[Any, Any, Any]:
    shapes, kernel_s, step_s = comparison
    chunks = np.asarray(shapes.num_prefill_seqs)
    columns = [np.ones(len(step_s)), np.asarray(shapes.num_decode_seqs) + chunks, (chunks > 0).astype(np.float64)]
    design = np.stack(columns, axis=1) / step_s[:, None]
    return design, 1.0 - kernel_s / step_s, np.full(len(step_s), 1.0 / len(step_s))


def _least_absolute(design: Any, wanted: Any, counts: Any) -> list[float]:
    """Non-negative least absolute deviations, by reweighted least squares."""
    from scipy.optimize import nnls

    scale = np.where(design.any(axis=0), np.abs(design).max(axis=0), 1.0)
    weights = np.sqrt(counts)
    values = np.zeros(design.shape[1])
    for _ in range(_REWEIGHTINGS):
        values = nnls(design / scale * weights[:, None], wanted * weights)[0]
        residuals = np.abs(design / scale @ values - wanted)
        weights = np.sqrt(counts / np.maximum(residuals, _SMALLEST_RESIDUAL))
    return [float(value) for value in values / scale]


_REWEIGHTINGS = 50
_SMALLEST_RESIDUAL = 1e-3
"""Of a step's time; smaller ones weigh the same."""


def learned_host() -> HostOverhead:
    """That of vLLM as learned from real steps (``data/host.json``; benchmarks/calibration_kernels.py writes it)."""
    text = (files("windtunnel.calibrate") / "data" / "host.json").read_text(encoding="utf-8")
    return HostOverhead(**json.loads(text))
