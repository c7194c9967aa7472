"""What a fitted cost model sees in a step: monotone curves over tokens, sequences and context, and its regime."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from windtunnel.sim.engine.plan import StepShape

REGIMES = ("decode", "prefill", "mixed")
"""Steps of decodes only, of prompt chunks only, and of both."""


def regime_of(shape: StepShape) -> str:
    """The regime of one step (scalars only); a step with nothing in it counts as decode."""
    if not shape.num_prefill_seqs:
        return "decode"
    return "mixed" if shape.num_decode_seqs else "prefill"


def regimes_of(shape: StepShape) -> Any:
    """The index in ``REGIMES`` of each step of a shape of arrays."""
    return regimes_from(shape.num_decode_seqs, shape.num_prefill_seqs)


def regimes_from(num_decode_seqs: Any, num_prefill_seqs: Any) -> Any:
    """The same from the two numbers that it depends on."""
    decodes, prefills = np.asarray(num_decode_seqs), np.asarray(num_prefill_seqs)
    return np.where(prefills > 0, np.where(decodes > 0, 2, 1), 0)


def graph_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """Batch sizes that vLLM captures as CUDA graphs by default, up to ``max_num_tokens``.

    1, 2, 4, then every 8 below 256 and every 16 from there on (``cudagraph_capture_sizes`` of vLLM 0.11 and later); a
    batch between two sizes is padded to the larger one.  Raises ValueError unless ``max_num_tokens`` is at least 1.
    """
    if max_num_tokens < 1:
        raise ValueError(f"max_num_tokens must be at least 1, got {max_num_tokens!r}")
    sizes = (1, 2, 4, *range(8, min(256, max_num_tokens + 1), 8), *range(256, max_num_tokens + 1, 16))
    return tuple(size for size in sizes if size <= max_num_tokens)


class Curve:
    """A piecewise linear function through (0, 0) that never falls: seconds over tokens, sequences or context.

    ``seconds[i]`` is its value at ``knots[i]``.  Beyond the last knot it goes on with the last slope, or with the
    mean slope from 0 where that is steeper: a curve that happens to end flat does not promise work for nothing.

    Raises ValueError, naming the number, unless the knots are whole numbers that rise from 0, the seconds never fall
    from 0, and all are finite.
    """

    def __init__(self, knots: Sequence[int], seconds: Sequence[float]) -> None:
        self.knots = tuple(knots)
        self.seconds = tuple(map(_number, seconds))
        _check_curve(self.knots, self.seconds)
        spans = zip(self.knots, self.knots[1:], self.seconds, self.seconds[1:], strict=False)
        slopes = [(high_s - low_s) / (high - low) for low, high, low_s, high_s in spans]
        mean = self.seconds[-1] / self.knots[-1] if self.knots[-1] else 0.0
        self._slopes = (*slopes, max(mean, slopes[-1] if slopes else 0.0))
        self._tops = (*self.seconds[1:], math.inf)
        self._arrays = tuple(np.array(values, np.float64) for values in (self.seconds, self._slopes, self._tops))
        self._knot_array = np.array(self.knots, np.int64)

    @classmethod
    def linear(cls, unit_s: float, last: int) -> Curve:
        """``unit_s`` for each one, stated at 0 and at ``last``."""
        return cls((0, last), (0.0, unit_s * last))

    @classmethod
    def mean(cls, curves: Sequence[Curve]) -> Curve:
        """The mean of curves, exact up to their largest knot.  Raises ValueError for none."""
        if not curves:
            raise ValueError("a mean needs at least one curve, got none")
        if all(curve == curves[0] for curve in curves):
            return curves[0]
        knots = sorted({knot for curve in curves for knot in curve.knots})
        seconds = [sum(curve.at(knot) for curve in curves) / len(curves) for knot in knots]
        return cls(knots, [max(seconds[: place + 1]) for place in range(len(seconds))])  # no rounding lets it fall

    def at(self, amount: int) -> float:
        """Seconds at a whole number of at least 0."""
        piece = bisect_right(self.knots, amount) - 1
        value = self.seconds[piece] + self._slopes[piece] * (amount - self.knots[piece])
        top = self._tops[piece]
        return value if value < top else top

    def at_all(self, amounts: Any) -> Any:
        """The same for each element of an array, to the bit."""
        amounts = np.asarray(amounts)
        piece = np.searchsorted(self._knot_array, amounts, side="right") - 1
        seconds, slopes, tops = self._arrays
        return np.minimum(seconds[piece] + slopes[piece] * (amounts - self._knot_array[piece]), tops[piece])

    def as_plain(self) -> dict[str, list[Any]]:
        """Knots and seconds, as plain data for a file."""
        return {"knots": list(self.knots), "seconds": list(self.seconds)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Curve) and (self.knots, self.seconds) == (other.knots, other.seconds)

    def __hash__(self) -> int:
        return hash((self.knots, self.seconds))

    def __repr__(self) -> str:
        return f"Curve(knots={self.knots}, seconds={self.seconds})"


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"the seconds of a curve must be numbers, got {value!r}")
    return float(value)


def _check_curve(knots: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    if not knots or len(knots) != len(seconds):
        raise ValueError(f"a curve needs as many seconds as knots and at least one, got {len(knots)}, {len(seconds)}")
    if any(type(knot) is not int for knot in knots):
        raise ValueError(f"the knots of a curve must be whole numbers, got {knots!r}")
    if knots[0] != 0 or seconds[0] != 0.0:
        raise ValueError(f"a curve must begin with 0 s at 0, got {seconds[0]!r} at {knots[0]!r}")
    for low, high in pairwise(knots):
        if low >= high:
            raise ValueError(f"the knots of a curve must rise, got {high!r} behind {low!r}")
    for low_s, high_s in zip(seconds, (*seconds[1:], seconds[-1]), strict=True):
        if not (low_s <= high_s and math.isfinite(high_s)):
            raise ValueError(f"the seconds of a curve must be finite and never fall, got {high_s!r} behind {low_s!r}")
