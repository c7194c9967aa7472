"""Which input matters most: Sobol indices and Morris' elementary effects, with bootstrap intervals.

A model's output is a number for each point of a design; inputs are shares (0 to 1) of their ranges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windtunnel.sweeping.design import sobol_points

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]

NUM_RESAMPLES = 1000
MORRIS_LEVELS = 4
"""Of the grid that trajectories walk on, as is usual (Campolongo et al. 2007)."""


class Estimate(NamedTuple):
    """A number and the bounds of its bootstrap interval."""

    value: float
    low: float
    high: float


class SobolIndices(NamedTuple):
    """For each input, the share of the output's variance that it explains."""

    first: tuple[Estimate, ...]
    """Alone."""
    total: tuple[Estimate, ...]
    """With all interactions that it takes part in."""
    num_rows: int
    """Base points that they rest on."""


class MorrisEffects(NamedTuple):
    """For each input, what a move through its whole range would change, from moves by a part of it."""

    mean_absolute: tuple[Estimate, ...]
    """Mean size of the change (mu*): how much an input matters."""
    mean: tuple[Estimate, ...]
    """Mean change (mu): in which direction."""
    spread: tuple[Estimate, ...]
    """Standard deviation (sigma): whether the change depends on where the inputs are, or is not linear."""
    num_rows: int
    """Trajectories that they rest on."""


# --- Sobol


def sobol_design(num_inputs: int, num_rows: int, rng: np.random.Generator) -> FloatArray:
    """Points for ``sobol_indices``, one a row: A, B, and A with one column of B for each input.

    ``num_rows * (num_inputs + 2)`` rows (Saltelli et al. 2010).  Raises ValueError if ``num_rows`` is no power of two.
    """
    both = sobol_points(2 * num_inputs, num_rows, rng)
    first, second = both[:, :num_inputs], both[:, num_inputs:]
    blocks = [first, second]
    for column in range(num_inputs):
        mixed = first.copy()
        mixed[:, column] = second[:, column]
        blocks.append(mixed)
    return np.concatenate(blocks)


def sobol_indices(
    outputs: FloatArray, num_inputs: int, rng: np.random.Generator, confidence: float = 0.95
) -> SobolIndices:
    """Indices from the outputs at the points of ``sobol_design``, in their order.

    First-order indices by Saltelli's and total indices by Jansen's estimator (Saltelli et al., "Variance based
    sensitivity analysis of model output", Computer Physics Communications 181, 2010, table 2); percentile bootstrap
    over base points.  A base point of which any output is NaN is left out.  Where nothing varies all indices are 0.

    Raises ValueError if fewer than 4 base points are left.
    """
    blocks = outputs.reshape(num_inputs + 2, -1)
    blocks = blocks[:, np.isfinite(blocks).all(axis=0)]
    number = blocks.shape[1]
    _check_enough(number, "base points")
    blocks = blocks - blocks[:2].mean()

    def indices(rows: IntArray) -> FloatArray:
        chosen = blocks[:, rows]
        first, second, mixed = chosen[0], chosen[1], chosen[2:]
        variance = np.var(chosen[:2].ravel())
        if variance <= 0:
            return np.zeros(2 * num_inputs)
        alone = (second * (mixed - first)).mean(axis=1) / variance
        with_others = ((first - mixed) ** 2).mean(axis=1) / (2 * variance)
        return np.concatenate([alone, with_others])

    found = _bootstrapped(indices, number, rng, confidence)
    return SobolIndices(tuple(found[:num_inputs]), tuple(found[num_inputs:]), number)


# --- Morris


def morris_design(num_inputs: int, num_rows: int, rng: np.random.Generator) -> FloatArray:
    """Trajectories on a grid, one point a row: each begins at random and moves every input once, in random order.

    ``num_rows * (num_inputs + 1)`` rows; steps are levels / (2 (levels - 1)) of a range, so that all levels are equally
    likely (Morris, "Factorial sampling plans for preliminary computational experiments", Technometrics 33, 1991).
    """
    if num_rows < 2:
        raise ValueError(f"Morris' method needs at least 2 trajectories, got {num_rows}")
    half = MORRIS_LEVELS // 2
    points = []
    for _ in range(num_rows):
        at = rng.integers(0, MORRIS_LEVELS, num_inputs)
        points.append(at.copy())
        for column in rng.permutation(num_inputs):
            at[column] += half if at[column] < half else -half
            points.append(at.copy())
    return np.array(points, np.float64) / (MORRIS_LEVELS - 1)


def morris_effects(
    points: FloatArray, outputs: FloatArray, rng: np.random.Generator, confidence: float = 0.95
) -> MorrisEffects:
    """Effects from the outputs at the points of ``morris_design``; percentile bootstrap over trajectories.

    A trajectory of which any output is NaN is left out.  Raises ValueError if fewer than 4 are left.
    """
    num_inputs = points.shape[1]
    paths = points.reshape(-1, num_inputs + 1, num_inputs)
    values = outputs.reshape(-1, num_inputs + 1)
    whole = np.isfinite(values).all(axis=1)
    paths, values = paths[whole], values[whole]
    _check_enough(len(values), "trajectories")
    moves = np.diff(paths, axis=1)
    moved = np.abs(moves).argmax(axis=2)
    effects = np.zeros((len(values), num_inputs))
    steps = np.take_along_axis(moves, moved[:, :, None], axis=2)[:, :, 0]
    np.put_along_axis(effects, moved, np.diff(values, axis=1) / steps, axis=1)

    def statistics(rows: IntArray) -> FloatArray:
        chosen = effects[rows]
        return np.concatenate([np.abs(chosen).mean(axis=0), chosen.mean(axis=0), chosen.std(axis=0, ddof=1)])

    found = _bootstrapped(statistics, len(values), rng, confidence)
    parts = [tuple(found[start : start + num_inputs]) for start in range(0, 3 * num_inputs, num_inputs)]
    return MorrisEffects(parts[0], parts[1], parts[2], len(values))


# --- common to both


def _check_enough(number: int, what: str) -> None:
    if number < 4:
        raise ValueError(
            f"only {number} {what} have a result at all of their points, too few for an estimate: narrow the ranges to "
            "where the deployment starts, or draw more (--samples)"
        )


def _bootstrapped(
    statistic: Callable[[IntArray], FloatArray], number: int, rng: np.random.Generator, confidence: float
) -> list[Estimate]:
    """A vector of statistics of rows, with percentile intervals from rows drawn with replacement."""
    estimate = statistic(np.arange(number))
    drawn = np.stack([statistic(rng.integers(0, number, number)) for _ in range(NUM_RESAMPLES)])
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return [Estimate(*map(float, each)) for each in zip(estimate, low, high, strict=True)]
