"""Which points a sweep looks at: every combination of values, values side by side, or points drawn from ranges."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from windtunnel.sim.rng import stream
from windtunnel.sweeping.axes import Axis

Sampling = Literal["lhs", "sobol", "random"]
SAMPLINGS: tuple[str, ...] = get_args(Sampling)
DEFAULT_SAMPLES = 32
MOST_POINTS = 20_000
"""Of one sweep, before replications."""

FloatArray = npt.NDArray[np.float64]
Combination = tuple[Any, ...]
"""One value for each axis, in their order."""


def combinations(
    axes: Sequence[Axis], *, is_zipped: bool = False, samples: int | None = None, sampling: str = "lhs", seed: int = 0
) -> list[Combination]:
    """The points of a sweep.

    Axes with values make a grid (or, zipped, go side by side); those with ranges are drawn together, ``samples``
    points in as many dimensions, and each combination of the grid is looked at with all of these.  Latin hypercubes
    ("lhs") spread each setting evenly, Sobol points ("sobol") all of them together, "random" draws are independent.

    Raises ValueError if there are too many points, for lists of different lengths that are zipped, for samples where
    nothing is drawn, and for a number of Sobol points that is no power of two.
    """
    listed = [place for place, axis in enumerate(axes) if axis.draw is None]
    drawn = [place for place, axis in enumerate(axes) if axis.draw is not None]
    grid = _zipped(axes, listed) if is_zipped else _grid(axes, listed)
    if samples is not None and not drawn:
        raise ValueError(
            "--samples says how many points to draw, but nothing is drawn: give a range as random:LOW:HIGH"
        )
    shares = unit_points(len(drawn), samples or DEFAULT_SAMPLES, sampling, seed) if drawn else np.zeros((1, 0))
    number = len(grid) * len(shares)
    if number > MOST_POINTS:
        raise ValueError(f"{number:,} points are more than {MOST_POINTS:,}: take larger steps or fewer samples")
    points = []
    for values, row in product(grid, shares.tolist()):
        of = dict(zip(listed, values, strict=True))
        of |= {place: axes[place].as_draw.at(share) for place, share in zip(drawn, row, strict=True)}
        points.append(tuple(of[place] for place in range(len(axes))))
    return points


def _grid(axes: Sequence[Axis], listed: Sequence[int]) -> list[Combination]:
    number = 1
    for place in listed:
        number *= len(axes[place].values)
        if number > MOST_POINTS:
            raise ValueError(
                f"the grid has more than {MOST_POINTS:,} points: take larger steps, fewer settings or --zip"
            )
    return list(product(*(axes[place].values for place in listed)))


def _zipped(axes: Sequence[Axis], listed: Sequence[int]) -> list[Combination]:
    lengths = {axes[place].key: len(axes[place].repeated) for place in listed}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{key} has {length:,}" for key, length in lengths.items())
        raise ValueError(f"--zip sets values side by side, so each setting needs as many: {told}")
    return list(zip(*(axes[place].repeated for place in listed), strict=True)) if listed else [()]


def unit_points(dimensions: int, number: int, sampling: str, seed: int) -> FloatArray:
    """So many points in the unit cube, one a row; the same seed gives the same ones.

    Latin hypercubes and Sobol points are scipy's (``scipy.stats.qmc``; the latter scrambled as Owen proposed).
    """
    if number < 1:
        raise ValueError(f"the number of samples must be at least 1, got {number}")
    rng = stream(seed, "sweep", "points")
    match sampling:
        case "random":
            return rng.random((number, dimensions))
        case "lhs":
            from scipy.stats import qmc

            spread: FloatArray = _made(qmc.LatinHypercube, dimensions, rng).random(number)
            return spread
        case "sobol":
            return sobol_points(dimensions, number, rng)
    raise ValueError(f"sampling must be one of {', '.join(SAMPLINGS)}, got {sampling!r}")


def sobol_points(dimensions: int, number: int, rng: np.random.Generator) -> FloatArray:
    """Scrambled Sobol points, one a row.  Raises ValueError for a number that is no power of two."""
    from scipy.stats import qmc

    if number & (number - 1):
        lower = 1 << (number.bit_length() - 1)
        raise ValueError(
            f"Sobol points are balanced in powers of two only, and {number:,} is none: give {lower:,} or {2 * lower:,}"
        )
    points: FloatArray = _made(qmc.Sobol, dimensions, rng).random(number)
    return points


def _made(kind: Any, dimensions: int, rng: np.random.Generator) -> Any:
    """scipy called the generator ``seed`` before 1.15."""
    name = "rng" if "rng" in inspect.signature(kind.__init__).parameters else "seed"
    return kind(dimensions, **{name: rng})
