"""Noise of step times: a number for every step that depends on nothing but the seed, the replica and the step."""

from __future__ import annotations

import math
from statistics import NormalDist

from windtunnel.sim.cost.fitted import FittedCost
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.rng import mixed

_NORMAL = NormalDist()
_STREAM = mixed(0x6E6F697365)  # "noise" in ASCII: apart from other users of the same seed


class StepNoise:
    """Draws each step's time around the prediction of a fitted cost model.

    The factor is log-normal with the ``sigma`` that the profile states for such a step and with *mean* 1: over many
    steps the noise takes no side, so that throughput and busy time stay those of the prediction.  (With median 1, a
    step would be longer by exp(sigma**2 / 2) on average.)

    Its draw is a function of (seed, replica, step number), not the next one of a stream: a run gives the same times
    however its steps are grouped, and variants that are compared under one seed are given the same luck.
    """

    def __init__(self, cost: FittedCost, seed: int, replica: int = 0) -> None:
        """Raises ValueError for a negative seed or replica."""
        if seed < 0 or replica < 0:
            raise ValueError(f"seed and replica must be at least 0, got {seed} and {replica}")
        self._cost = cost
        self._key = mixed(mixed(_STREAM ^ seed) ^ replica)

    def extra_s(self, shape: StepShape, number: int) -> float:
        """What step ``number`` takes more than predicted, in seconds; below 0 where it takes less (scalars only).

        Raises OutsideDomain as ``FittedCost.step_time_s``.
        """
        return float(self._cost.step_time_s(shape)) * (self.factor(self._cost.sigma(shape), number) - 1.0)

    def factor(self, sigma: float, number: int) -> float:
        """What step ``number`` is multiplied by where steps scatter by ``sigma``."""
        return math.exp(sigma * (self._standard_normal(number) - 0.5 * sigma))

    def _standard_normal(self, number: int) -> float:
        chance = ((mixed(self._key ^ number) >> 11) + 0.5) / (1 << 53)  # inside of (0, 1)
        return _NORMAL.inv_cdf(chance)
