"""What a step takes besides its kernels as measured alone.

The host: scheduling, input preparation, output handling and gaps between launches.  And the clocks: kernels are
measured in short bursts, while a card that prefills without a break is held back by its power limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.sim.engine.plan import StepShape


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """Seconds that a step takes besides its kernels as measured alone; all at least 0.

    Raises ValueError, naming the field, for a value that is negative or not finite.
    """

    base_s: float = 0.0
    """Of every step."""
    seq_s: float = 0.0
    """Of each sequence in the batch."""
    prefill_s: float = 0.0
    """Of a step that holds prompt chunks: planning of its attention, and launches outside of a full CUDA graph."""
    clocks_share: float = 0.0
    """By which share arithmetic (``OperatorModel.compute_s``) takes longer than in the tables: clocks under load."""
    source: str = ""
    """What it was learned from."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "source" and not (np.isfinite(value) and value >= 0):
                raise ValueError(f"HostOverhead.{field.name} must be at least 0 and finite, got {value!r}")

    def step_s(self, shape: StepShape) -> NDArray[np.float64]:
        """Seconds of the host for each step of a shape of arrays; those of the clocks are left out."""
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
    compute_s: NDArray[np.float64]
    """What of the kernels is arithmetic (``OperatorModel.compute_s``)."""
    step_s: NDArray[np.float64]

    def with_host_s(self, host: HostOverhead) -> NDArray[np.float64]:
        """The composed steps with that overhead."""
        return np.asarray(self.kernel_s + host.clocks_share * self.compute_s + host.step_s(self.shapes))


class PromptTerms(NamedTuple):
    """The parts of a HostOverhead that only steps with prompt chunks have."""

    prefill_s: float
    clocks_share: float


def fit_prompt_terms(comparisons: Sequence[Comparison]) -> PromptTerms:
    """Those that come nearest to real steps, beside a host overhead of these comparisons' own.

    Steps of one card tell them apart from all else that grows with a step: over several cards, all-reduces that are
    off would be taken for them.  Raises ValueError where there are no comparisons.
    """
    *_, prefill_s, clocks_share = _fitted(comparisons, _all_columns)
    return PromptTerms(prefill_s, clocks_share)


def fit_host(comparisons: Sequence[Comparison], source: str, *, prompts: PromptTerms | None = None) -> HostOverhead:
    """The HostOverhead that makes composed kernels come nearest to real steps, each comparison counting the same.

    Smallest mean of relative errors (absolute, not squared: real steps have outliers of twice their time), with
    coefficients of at least 0.  Without ``prompts``, ``prefill_s`` is learned as well, and the clocks are those of the
    tables.  Raises ValueError where there are no comparisons.
    """
    if prompts is None:
        base_s, seq_s, prefill_s = _fitted(comparisons, _host_columns)
        return HostOverhead(base_s, seq_s, prefill_s, source=source)
    known = HostOverhead(prefill_s=prompts.prefill_s, clocks_share=prompts.clocks_share)
    beside = [each._replace(kernel_s=each.with_host_s(known)) for each in comparisons]
    base_s, seq_s = _fitted(beside, lambda each: _host_columns(each)[:2])
    return HostOverhead(base_s, seq_s, *prompts, source)


def learn_host(comparisons: Mapping[int, Comparison], source: str) -> HostOverhead:
    """That of steps of several tensor parallelisms (the keys), among which is 1.

    What prompts add is learned on one card, where no all-reduce can be mistaken for it, and the rest from all.
    """
    return fit_host(list(comparisons.values()), source, prompts=fit_prompt_terms([comparisons[1]]))


def host_of_others(comparisons: Mapping[int, Comparison], size: int, source: str) -> HostOverhead:
    """The same without the steps of ``size`` cards, so that they can test it.

    For one card, what prompts add comes from the steps of several.
    """
    others = {other: each for other, each in comparisons.items() if other != size}
    prompts = fit_prompt_terms([others[1]] if 1 in others else list(others.values()))
    return fit_host(list(others.values()), source, prompts=prompts)


def _host_columns(comparison: Comparison) -> list[NDArray[np.float64]]:
    chunks = np.asarray(comparison.shapes.num_prefill_seqs)
    num_seqs = np.asarray(comparison.shapes.num_decode_seqs) + chunks
    return [np.ones(len(chunks)), np.asarray(num_seqs, np.float64), (chunks > 0).astype(np.float64)]


def _all_columns(comparison: Comparison) -> list[NDArray[np.float64]]:
    return [*_host_columns(comparison), comparison.compute_s]


def _fitted(
    comparisons: Sequence[Comparison], columns: Callable[[Comparison], list[NDArray[np.float64]]]
) -> list[float]:
    if not comparisons:
        raise ValueError("a host overhead is learned from at least one comparison of composed and real steps")
    design = np.concatenate([np.stack(columns(each), axis=1) / each.step_s[:, None] for each in comparisons])
    wanted = np.concatenate([1.0 - each.kernel_s / each.step_s for each in comparisons])
    counts = np.concatenate([np.full(len(each.step_s), 1.0 / len(each.step_s)) for each in comparisons])
    return _least_absolute(design, wanted, counts)


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
