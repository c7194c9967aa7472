"""Distributions of token counts.

Each is a small frozen specification with ``sample(rng, n)``, which gives n whole numbers of at least 1 as int64.
Where a distribution has a ``mean``, that is its mean before rounding and before clipping to [minimum, maximum].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt

from windtunnel.scenarios.units import parse_count
from windtunnel.scenarios.workloads.cells import MAX_TOKENS
from windtunnel.scenarios.workloads.specs import (
    NOT_NEGATIVE,
    POSITIVE,
    TOKENS,
    Keys,
    Range,
    build,
    check_parameters,
    from_text,
    is_number,
)
from windtunnel.sim.workload import IntArray

_RATIO = Range(least=0, below=1)

Mean = Annotated[float, POSITIVE, "Mean, before rounding and clipping to min and max."]
Minimum = Annotated[int, TOKENS, "What is drawn below is raised to this."]
Maximum = Annotated[int | None, TOKENS, "What is drawn above is lowered to this."]


class Lengths(Protocol):
    """A distribution of token counts."""

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` token counts, each at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same number of tokens."""

    tokens: Annotated[int, TOKENS, "The number of tokens."]

    def __post_init__(self) -> None:
        check_parameters(self)

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:  # noqa: ARG002 - one signature for all
        """``n`` times ``tokens``."""
        return np.full(n, self.tokens, np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from ``low`` to ``high``, both included, equally often."""

    low: int
    high: int

    def __post_init__(self) -> None:
        TOKENS.check("low", self.low)
        replace(TOKENS, least=self.low).check("high", self.high)

    @classmethod
    def around(cls, tokens: int, range_ratio: float) -> Uniform:
        """What ``vllm bench serve --dataset-name random`` draws for a length and a ``--random-range-ratio`` in [0, 1).

        From floor(tokens·(1 - ratio)), at least 1, to ceil(tokens·(1 + ratio)).  Source: vLLM 0.32
        ``benchmarks/datasets``, without the tokenizer's special tokens that are taken off prompts there.
        """
        TOKENS.check("tokens", tokens)
        _RATIO.check("range_ratio", range_ratio)
        return cls(max(1, math.floor(tokens * (1 - range_ratio))), math.ceil(tokens * (1 + range_ratio)))

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` draws."""
        return rng.integers(self.low, self.high, n, dtype=np.int64, endpoint=True)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Log-normal with this mean, and either ``sigma`` (of the logarithm) or ``std`` (of the tokens themselves).

    Parameters of the logarithm: sigma² = ln(1 + (std/mean)²), mu = ln(mean) - sigma²/2.
    """

    mean: Mean
    sigma: Annotated[float | None, NOT_NEGATIVE, "Standard deviation of the logarithm; either this or std."] = None
    minimum: Minimum = 1
    maximum: Maximum = None
    std: Annotated[float | None, NOT_NEGATIVE, "Standard deviation of the tokens; either this or sigma."] = None

    def __post_init__(self) -> None:
        check_parameters(self)
        _check_bounds(self.minimum, self.maximum)
        if (self.sigma is None) == (self.std is None):
            raise ValueError(f"give either sigma or std, got {'neither' if self.std is None else 'both'}")

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` draws, rounded and clipped."""
        sigma = self.sigma if self.std is None else math.sqrt(math.log1p((self.std / self.mean) ** 2))
        assert sigma is not None
        return _clipped(rng.lognormal(math.log(self.mean) - sigma * sigma / 2, sigma, n), self.minimum, self.maximum)


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponential with this mean, rounded to whole tokens."""

    mean: Mean
    minimum: Minimum = 1
    maximum: Maximum = None
    redraw: Annotated[
        bool, "Draw again what exceeds max instead of lowering it to max: fewer long ones, none piled up at max."
    ] = False

    def __post_init__(self) -> None:
        check_parameters(self)
        _check_bounds(self.minimum, self.maximum)
        if self.redraw and self.maximum is None:
            raise ValueError("redraw needs max: it says what to do with what exceeds it")

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` draws, rounded, and clipped or drawn from below ``maximum``."""
        if not self.redraw:
            return _clipped(rng.exponential(self.mean, n), self.minimum, self.maximum)
        assert self.maximum is not None, "checked when it was made"
        share_below = -math.expm1(-(self.maximum + 0.5) / self.mean)  # what rounds to maximum or less
        return _clipped(-self.mean * np.log1p(-share_below * rng.random(n)), self.minimum, self.maximum)


@dataclass(frozen=True, slots=True)
class Geometric:
    """Geometric on 1, 2, 3, … with this mean: after every token it ends with the probability 1/mean."""

    mean: Annotated[float, Range(least=1), "Mean, before clipping to min and max."]
    minimum: Minimum = 1
    maximum: Maximum = None

    def __post_init__(self) -> None:
        check_parameters(self)
        _check_bounds(self.minimum, self.maximum)

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` draws, clipped."""
        return _clipped(rng.geometric(1 / self.mean, n), self.minimum, self.maximum)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution known by its quantiles, straight lines between them (piecewise-linear inverse CDF).

    ``points`` are pairs (share, tokens) with rising shares; the last share is 1 (the largest length), and where the
    first is not 0 the distribution begins at 1 token.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if len(self.points) < 1 or self.points[-1][0] != 1:
            raise ValueError(
                f"quantiles must end with the share 1 (the largest length), got {_shares(self.points)}: without it "
                "the longest requests would be missing"
            )
        shares = [share for share, _ in self.points]
        tokens = [count for _, count in self.points]
        if any(b <= a for a, b in pairwise(shares)) or shares[0] < 0:
            raise ValueError(f"shares of quantiles must rise from 0 to 1, got {_shares(self.points)}")
        if any(b < a for a, b in pairwise(tokens)) or not 1 <= tokens[0] <= tokens[-1] <= MAX_TOKENS:
            raise ValueError(f"tokens of quantiles must not fall and be at least 1, got {tokens}")

    @classmethod
    def of(cls, quantiles: Mapping[Any, float] | Sequence[Sequence[float]]) -> Quantiles:
        """From ``{"p50": 200, "p99": 4000, "1": 9000}`` (``p50`` is the share 0.5) or pairs ``[[0.5, 200], …]``."""
        return cls(tuple(sorted(_points(_pairs(quantiles)))))

    def keys_shown(self) -> list[tuple[str, float]]:
        """The points as the keys ``p50``, ``p99``, …"""
        return [(f"p{100 * share:.12g}", tokens) for share, tokens in self.points]

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` draws, rounded."""
        points = self.points if self.points[0][0] == 0 else ((0.0, 1.0), *self.points)
        shares, tokens = zip(*points, strict=True)
        return _clipped(np.interp(rng.random(n), shares, tokens), 1, None)


@dataclass(frozen=True, slots=True)
class Empirical:
    """Draws from these values, with replacement."""

    values: Annotated[tuple[int, ...], "The lengths to draw from, each at least 1 token."] = field(repr=False)
    num_values: int = field(init=False)
    """How many they are."""

    def __post_init__(self) -> None:
        _set_values(self, self.values)

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` draws."""
        return np.array(self.values, np.int64)[rng.integers(0, len(self.values), n)]


@dataclass(frozen=True, slots=True)
class InTurn:
    """These values in turn, and again from the first: no chance is in it."""

    values: Annotated[tuple[int, ...], "The lengths in their order, each at least 1 token."] = field(repr=False)
    num_values: int = field(init=False)
    """How many they are."""

    def __post_init__(self) -> None:
        _set_values(self, self.values)

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:  # noqa: ARG002 - one signature for all
        """The first ``n`` of them."""
        return np.resize(np.array(self.values, np.int64), n)


def _uniform(
    low: Annotated[int | None, TOKENS, "The shortest; with high."] = None,
    high: Annotated[int | None, TOKENS, "The longest; with low."] = None,
    tokens: Annotated[int | None, TOKENS, "The middle, in place of low and high; with range_ratio."] = None,
    range_ratio: Annotated[
        float | None,
        _RATIO,
        "From tokens * (1 - range_ratio) to tokens * (1 + range_ratio), as --random-range-ratio of vllm bench serve.",
    ] = None,
) -> Uniform:
    """Every whole number in a range equally often."""
    if tokens is None and range_ratio is None and low is not None and high is not None:
        return Uniform(low, high)
    if low is None and high is None and tokens is not None and range_ratio is not None:
        return Uniform.around(tokens, range_ratio)
    raise ValueError("uniform needs either low and high or tokens and range_ratio")


def _quantiles(
    quantiles: Annotated[
        Mapping[Any, float] | Sequence[Sequence[float]] | None,
        "The same as pairs [[0.5, 200], [0.99, 1500]] or as a table {p50 = 200, p99 = 1500}.",
    ] = None,
    minimum: Annotated[int | None, TOKENS, "The shortest length (p0); 1 where neither is given."] = None,
    maximum: Annotated[
        int | None,
        TOKENS,
        "The longest length (p100); where neither is given the line through the last two quantiles goes on to p100.",
    ] = None,
    **percentiles: Annotated[
        float,
        Range(least=1, most=MAX_TOKENS),
        Keys(r"p\d+(\.\d+)?"),
        'Tokens that so many percent of the requests do not exceed: p50 = 200, p99 = 1500, "p99.9" = 4000.',
    ],
) -> Quantiles:
    """Known by its quantiles, with straight lines between them."""
    points = _points([*_pairs(quantiles or ()), *percentiles.items()])
    if not points:
        raise ValueError("no quantile is given, write for example p50 = 200, p90 = 600, p99 = 1500")
    for share, name, given in ((0.0, "min", minimum), (1.0, "max", maximum)):
        if given is not None and share in dict(points):
            raise ValueError(f"{name} and the quantile {share:g} say the same thing twice: leave one out")
        if given is not None:
            points.append((share, float(given)))
    points.sort()
    if points[0][0] > 0:
        points.insert(0, (0.0, 1.0))
    if points[-1][0] < 1:
        points.append((1.0, _continued(points)))
    return Quantiles(tuple(points))


def _continued(points: Sequence[tuple[float, float]]) -> float:
    """Where the line through the last two points reaches the share 1, in whole tokens."""
    (share, tokens), (last_share, last_tokens) = points[-2:]
    if last_share <= share:  # Quantiles says what is wrong with these
        return last_tokens
    return float(round(last_tokens + (last_tokens - tokens) / (last_share - share) * (1 - last_share)))


LENGTH_KINDS: dict[str, Callable[..., Lengths]] = {
    "fixed": Fixed,
    "uniform": _uniform,
    "lognormal": Lognormal,
    "exponential": Exponential,
    "geometric": Geometric,
    "quantiles": _quantiles,
    "empirical": Empirical,
    "in_turn": InTurn,
}


def lengths_from(spec: Lengths | int | str | Mapping[str, Any], what: str = "lengths") -> Lengths:
    """A distribution of token counts from its plain description: a number (fixed), a dict, or text.

    ``{"dist": "fixed", "tokens"}``, ``{"dist": "uniform", "low", "high"}`` or ``{…, "tokens", "range_ratio"}``,
    ``{"dist": "lognormal", "mean", "sigma" or "std", "min", "max"}``, ``{"dist": "exponential" or "geometric", "mean",
    "min", "max"}`` (the former also with ``"redraw"``), ``{"dist": "quantiles", "p50": 200, "p99": 4000, "max": 9000}``
    or ``{…, "quantiles": [[0.5, 200], …]}``, ``{"dist": "empirical" or "in_turn", "values": […]}``.  A distribution is
    returned as it is.

    Raises ValueError that begins with ``what``.
    """
    if isinstance(spec, str):
        spec = from_text(spec, parse_count, "dist", what)
    if isinstance(spec, Mapping):
        return build(spec, LENGTH_KINDS, tag="dist", what=what)
    if isinstance(spec, int) and not isinstance(spec, bool):
        return build({"dist": "fixed", "tokens": spec}, LENGTH_KINDS, tag="dist", what=what)
    if not hasattr(spec, "sample"):
        raise ValueError(f"{what}: must be a number of tokens or a table with dist = …, got {spec!r}")
    return spec  # type: ignore[return-value]


def _check_bounds(minimum: int, maximum: int | None) -> None:
    if maximum is not None:
        replace(TOKENS, least=minimum).check("max", maximum)


def _clipped(values: npt.NDArray[Any], minimum: int, maximum: int | None) -> IntArray:
    clipped = np.clip(np.rint(values), minimum, MAX_TOKENS if maximum is None else maximum)
    return np.asarray(clipped, np.int64)


def _set_values(of: Empirical | InTurn, given: Sequence[int]) -> None:
    """Check the values of a distribution and set them with their number.  Raises ValueError."""
    values = np.asarray(given)
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "iu" or values.min() < 1:
        raise ValueError(f"values must be whole numbers of at least 1, at least one of them, got {given!r:.80}")
    object.__setattr__(of, "values", tuple(values.tolist()))
    object.__setattr__(of, "num_values", len(values))


def _pairs(quantiles: Mapping[Any, float] | Sequence[Sequence[float]]) -> list[tuple[Any, ...]]:
    if isinstance(quantiles, Mapping):
        return list(quantiles.items())
    try:
        return [tuple(pair) for pair in quantiles]
    except TypeError:
        raise ValueError(f"quantiles must be pairs of a share and a number, got {quantiles!r:.80}") from None


def _points(pairs: Sequence[tuple[Any, ...]]) -> list[tuple[float, float]]:
    points = []
    for pair in pairs:
        if len(pair) != 2 or not is_number(pair[1]):
            raise ValueError(f"a quantile is a share and a number of tokens, got {pair!r}")
        points.append((_share(pair[0]), float(pair[1])))
    return points


def _share(value: Any) -> float:
    text = str(value)
    try:
        share = float(f"{text[1:]}e-2" if text.startswith("p") else text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ValueError(f"a quantile's share is a number from 0 to 1 or a name from p0 to p100, got {value!r}")
    return share


def _shares(points: Sequence[tuple[float, float]]) -> str:
    return ", ".join(f"{share:g}" for share, _ in points) or "none"
