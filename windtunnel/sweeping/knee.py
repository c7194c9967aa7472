"""The knee of a curve: where more of a setting stops to buy much.

Method: both axes are scaled to 0 … 1 and a chord is drawn from the first point of the curve to its last; the knee is
the point that lies farthest from the chord, measured upright (the difference curve of Satopää et al., "Finding a
'Kneedle' in a Haystack", ICDCS workshops 2011).  It counts only if it is distinct:

* the curve goes from one end of its range to (nearly) the other, so that the chord says something;
* the distance is at least ``LEAST_DISTANCE`` of the range, and far greater than any on the other side of the chord;
* with replications, the lower end of the distance's t interval is above that, too.  The place was chosen among all
  inner points, so the interval's confidence is raised for as many (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

from windtunnel.sim.metrics.replications import mean_interval

FloatArray = npt.NDArray[np.float64]

LEAST_POINTS = 4
LEAST_DISTANCE = 0.1
"""Of the curve's range."""
LEAST_RISE = 0.5
"""Of its range, from the curve's first point to its last."""
OTHER_SIDE = 0.5
"""Of the distance, at most, on the other side of the chord."""
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class FoundKnee:
    """A knee, by the place of its point on the curve."""

    place: int
    distance: float
    """From the chord, as a share of the curve's range."""
    low: int
    """The first place at which a single replication has its knee."""
    high: int
    """The last."""
    is_tested: bool
    """Whether there were replications to tell it from noise."""


def find_knee(
    positions: Sequence[float], values: Sequence[Sequence[float]], *, is_log: bool = False
) -> FoundKnee | None:
    """The knee of a curve, or None if it has none that is distinct.

    ``values`` holds one sequence a replication, each with a value for every position; positions rise.  ``is_log`` takes
    their logarithms.
    """
    if len(positions) < LEAST_POINTS:
        return None
    x = np.array([log(position) for position in positions] if is_log else positions, np.float64)
    x = (x - x[0]) / (x[-1] - x[0])
    y = np.array(values, np.float64)
    mean = y.mean(axis=0)
    span = float(mean.max() - mean.min())
    if span <= 0 or abs(mean[-1] - mean[0]) < LEAST_RISE * span:
        return None
    away = (y - y[:, :1] - x * (y[:, -1:] - y[:, :1])) / span
    mean_away = away.mean(axis=0)
    place = int(np.abs(mean_away).argmax())
    sign = 1.0 if mean_away[place] > 0 else -1.0
    distance = float(sign * mean_away[place])
    if distance < LEAST_DISTANCE or float((-sign * mean_away).max()) > OTHER_SIDE * distance:
        return None
    if not _is_beyond_noise(sign * away[:, place], len(positions) - 2):
        return None
    places = (sign * away).argmax(axis=1)
    return FoundKnee(place, distance, int(places.min()), int(places.max()), len(y) > 1)


def _is_beyond_noise(distances: FloatArray, num_places: int) -> bool:
    if len(distances) < 2:
        return True
    confidence = 1 - (1 - _CONFIDENCE) / num_places
    return mean_interval(distances.tolist(), confidence).low >= LEAST_DISTANCE
