"""Robust, relative, non-negative least squares: a sum of terms, none below 0, fitted to times some of which are wrong.

A residual is log(measured / predicted).  Its loss is that of a gamma distribution, exp(r) - 1 - r, which makes the mean
and not the median of the times come out right, and goes on as a straight line beyond 1.345 robust standard deviations
(Huber 1964): the pull of a step stays that of a step 1.345 deviations off, be it fifty times as slow.  Beyond ten
deviations the loss rises no more, so that the step pulls at nothing.

Each stage minimises a loss that stays the same throughout, by reweighting with a line search, so that it never rises:

1. that of Huber with a corner of 2 % for all steps, nearly least absolute residuals, which needs no scatter;
2. with the scatter of each regime, from the stage before; twice;
3. with the scatter of stage 2, which stays, and steps beyond ten deviations left out.  Leaving out and fitting go by
   turns as long as the whole loss falls; a step comes back only where the model is near it without its help.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.sim.cost.features import REGIMES

_Array = NDArray[np.float64]

HUBER = 1.345
"""Robust standard deviations from which on the loss is straight: 95 % efficient for normal residuals (Huber 1964)."""
HOPELESS = 10.0
"""Robust standard deviations from which on a step says nothing about its shape."""
MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_LEAST_SIGMA = 1e-3
_FIRST_CORNER = 0.02
_START_REACH = 4
_START_WITHIN = 3.0
"""Times by which a step may differ from its neighbours in work before the first fit takes it for wrong."""
_MOST_ROUNDS = 100
_MOST_TURNS = 10
_CONVERGED = 1e-6
"""Share of the loss by which a round must lower it for another to follow."""
_FIRST_CONVERGED = 1e-3
"""The same of the first stage, which only finds where to start."""
_LEAST_PENALTY = 1e-8
"""Of columns of unit length: keeps the factor regular."""
_SHORTEST = 1e-3
"""Share of a step that a line search still tries."""
_LEAST_SHARE = 1e-6
"""Least prediction as a share of the measured time: a logarithm needs one."""
_LEAST_S = 1e-9
"""A term that nowhere comes to a nanosecond is none."""


def scatter(residuals: _Array) -> float:
    """Robust standard deviation around 0, at least a thousandth."""
    return max(MAD_TO_SIGMA * float(np.median(np.abs(residuals))), _LEAST_SIGMA)


def hopeless(residuals: _Array, regimes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which residuals (logarithms) are beyond ten robust standard deviations of their own regime."""
    return np.asarray(np.abs(residuals) > HOPELESS * _sigmas(residuals, regimes))


def solve(columns: _Array, step_s: _Array, regimes: NDArray[np.int64], weights: _Array, ridge: _Array) -> _Array:
    """Non-negative coefficients of ``columns`` whose sum comes near ``step_s``.

    ``regimes`` are indices into REGIMES: scatter is that of a step's own.  ``ridge`` is how strongly each coefficient
    is held at 0, in units of its column's weight.
    """
    size = np.abs(columns).max(axis=0)
    size[size == 0.0] = 1.0
    problem = _Problem(columns / size, step_s, weights, ridge)
    coefficients = problem.start()
    coefficients = problem.minimised(coefficients, np.full(len(step_s), _FIRST_CORNER), _FIRST_CONVERGED)
    for _ in range(2):
        sigmas = _sigmas(problem.residuals(coefficients), regimes)
        coefficients = problem.minimised(coefficients, HUBER * sigmas)
    coefficients = _without_hopeless(problem, coefficients, _sigmas(problem.residuals(coefficients), regimes))
    coefficients = np.where(coefficients < _LEAST_S, 0.0, coefficients)  # of scaled columns: seconds at the most
    return np.asarray(coefficients / size, np.float64)


def _without_hopeless(problem: _Problem, coefficients: _Array, sigmas: _Array) -> _Array:
    """Leave out what is hopeless and fit the rest, by turns, until nothing changes."""
    kept = np.ones(len(sigmas), bool)
    for _ in range(_MOST_TURNS):
        near = np.abs(problem.residuals(coefficients)) <= HOPELESS * sigmas
        if (near == kept).all():
            break
        kept = near
        coefficients = problem.of(kept).minimised(coefficients, HUBER * sigmas[kept])
    return coefficients


def _sigmas(residuals: _Array, regimes: NDArray[np.int64]) -> _Array:
    """Each step's regime's scatter."""
    sigmas = np.empty(len(residuals))
    for regime in range(len(REGIMES)):
        own = regimes == regime
        if own.any():
            sigmas[own] = scatter(residuals[own])
    return sigmas


class _Problem(NamedTuple):
    columns: _Array
    step_s: _Array
    weights: _Array
    ridge: _Array

    def of(self, kept: NDArray[np.bool_]) -> _Problem:
        return _Problem(self.columns[kept], self.step_s[kept], self.weights[kept], self.ridge)

    def predicted_s(self, coefficients: _Array) -> _Array:
        sums = np.einsum("ij,j->i", self.columns, coefficients)
        return np.asarray(np.maximum(sums, _LEAST_SHARE * self.step_s), np.float64)

    def residuals(self, coefficients: _Array) -> _Array:
        return np.asarray(np.log(self.step_s / self.predicted_s(coefficients)))

    def start(self) -> _Array:
        """Least squares whose target keeps near what steps of about as much work took.

        Where a step that was far too fast is followed at first, its small prediction makes for steep slopes, and no
        later stage gets away from it.
        """
        rough = self._least_squares(self.step_s, self.step_s)
        order = np.argsort(np.einsum("ij,j->i", self.columns, rough), kind="stable")
        usual_s = np.empty(len(order))
        usual_s[order] = _running_median(self.step_s[order])
        near_s = np.clip(self.step_s, usual_s / _START_WITHIN, usual_s * _START_WITHIN)
        return self._least_squares(near_s, near_s)

    def _least_squares(self, target_s: _Array, relative_to_s: _Array) -> _Array:
        share = np.sqrt(self.weights) / relative_to_s
        matrix = self.columns * share[:, None]
        return _non_negative(matrix, target_s * share, self.ridge * np.einsum("ij,ij->j", matrix, matrix))

    def minimised(self, coefficients: _Array, corners: _Array, converged: float = _CONVERGED) -> _Array:
        """The coefficients of least loss that rounds of reweighting come to; the loss straightens at ``corners``."""
        # The penalty is fixed by the first prediction, or the loss would be another one in every round.
        share = self.columns / self.predicted_s(coefficients)[:, None]
        penalty = self.ridge * np.einsum("i,ij,ij->j", self.weights, share, share)
        loss = self._loss(coefficients, corners, penalty)
        for _ in range(_MOST_ROUNDS):
            aim = self._reweighted(coefficients, corners, penalty)
            coefficients, before = self._line_search(coefficients, aim, corners, penalty, loss), loss
            loss = self._loss(coefficients, corners, penalty)
            if before - loss <= converged * before:
                break
        return coefficients

    def _loss(self, coefficients: _Array, corners: _Array, penalty: _Array) -> float:
        residuals = self.residuals(coefficients)
        inner = np.clip(residuals, -corners, corners)
        pull = np.expm1(inner)
        losses = pull - inner + pull * (residuals - inner)
        return float(np.einsum("i,i->", self.weights, losses) + 0.5 * np.einsum("j,j->", penalty, coefficients**2))

    def _reweighted(self, coefficients: _Array, corners: _Array, penalty: _Array) -> _Array:
        """Least squares whose weights make its gradient, at ``coefficients``, that of the loss."""
        predicted_s = self.predicted_s(coefficients)
        excess = self.step_s / predicted_s - 1.0
        pull = np.clip(excess, np.expm1(-corners), np.expm1(corners))
        trust = np.divide(pull, excess, out=np.ones_like(pull), where=np.abs(excess) > 1e-12)
        share = np.sqrt(self.weights * trust) / predicted_s
        return _non_negative(self.columns * share[:, None], self.step_s * share, penalty)

    def _line_search(self, begin: _Array, aim: _Array, corners: _Array, penalty: _Array, loss: float) -> _Array:
        """The first of ever nearer points towards ``aim`` that has a smaller loss; ``begin`` if none has."""
        way = 1.0
        while way >= _SHORTEST:
            tried = begin + way * (aim - begin)
            if self._loss(tried, corners, penalty) < loss:
                return tried
            way *= 0.5
        return begin


def _running_median(values: _Array) -> _Array:
    """Of each value and up to four on either side."""
    padded = np.pad(values, _START_REACH, mode="reflect") if len(values) > _START_REACH else values
    if len(padded) < 2 * _START_REACH + 1:
        return np.full(len(values), np.median(values))
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * _START_REACH + 1), axis=1))


def _non_negative(matrix: _Array, target: _Array, penalty: _Array) -> _Array:
    """argmin |matrix x - target|² + penalty x² over x >= 0, by way of the normal equations' triangular factor.

    A column of zeros gets 0.
    Columns of unit length and the penalty keep them well-conditioned.  The sums are einsum's, not those of a threaded
    BLAS: those depend on the number of threads, and wait for each other where the machine is busy.
    """
    from scipy.optimize import nnls

    length = np.sqrt(np.einsum("ij,ij->j", matrix, matrix))
    used = length > 0.0
    unit = matrix[:, used] / length[used]
    held = np.maximum(penalty[used] / length[used] ** 2, _LEAST_PENALTY)
    factor = np.linalg.cholesky(np.einsum("ij,ik->jk", unit, unit) + np.diag(held))
    solution, _ = nnls(factor.T, np.linalg.solve(factor, np.einsum("ij,i->j", unit, target)), maxiter=100 * len(held))
    coefficients = np.zeros(matrix.shape[1])
    coefficients[used] = solution / length[used]
    return coefficients
