"""Distributions of token counts.

Each is a small frozen specification with ``sample(rng, n)``, which gives n whole numbers of at least 1 as int64.
Where a distribution has a ``mean``, that is its mean before rounding and before clipping to [minimum, maximum].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from windtunnel.scenarios.workloads.cells import MAX_TOKENS
from windtunnel.scenarios.workloads.specs import build, check_not_negative, check_positive, check_whole, is_number
from windtunnel.sim.workload import IntArray


class Lengths(Protocol):
    """A distribution of token counts."""

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` token counts, each at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same number of tokens."""

    tokens: int

    def __post_init__(self) -> None:
        check_whole("tokens", self.tokens, 1)

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:  # noqa: ARG002 - one signature for all
        """``n`` times ``tokens``."""
        return np.full(n, self.tokens, np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from ``low`` to ``high``, both included, equally often."""

    low: int
    high: int

    def __post_init__(self) -> None:
        check_whole("low", self.low, 1)
        check_whole("high", self.high, self.low)

    @classmethod
    def around(cls, tokens: int, range_ratio: float) -> Uniform:
        """What ``vllm bench serve --dataset-name random`` draws for a length and a ``--random-range-ratio`` in [0, 1).

        From floor(tokens·(1 - ratio)), at least 1, to ceil(tokens·(1 + ratio)).  Source: vLLM 0.32
        ``benchmarks/datasets``, without the tokenizer's special tokens that are taken off prompts there.
        """
        check_whole("tokens", tokens, 1)
        if not is_number(range_ratio) or not 0 <= range_ratio < 1:
            raise ValueError(f"range_ratio must be at least 0 and below 1, got {range_ratio!r}")
        return cls(max(1, math.floor(tokens * (1 - range_ratio))), math.ceil(tokens * (1 + range_ratio)))

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` draws."""
        return rng.integers(self.low, self.high, n, dtype=np.int64, endpoint=True)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Log-normal with this mean, and either ``sigma`` (of the logarithm) or ``std`` (of the tokens themselves).

    Parameters of the logarithm: sigma² = ln(1 + (std/mean)²), mu = ln(mean) - sigma²/2.
    """

    mean: float
    sigma: float | None = None
    minimum: int = 1
    maximum: int | None = None
    std: float | None = None

    def __post_init__(self) -> None:
        check_positive("mean", self.mean)
        if (self.sigma is None) == (self.std is None):
            raise ValueError(f"give either sigma or std, got sigma={self.sigma!r} and std={self.std!r}")
        check_not_negative("sigma" if self.std is None else "std", self.sigma if self.std is None else self.std)
        _check_bounds(self.minimum, self.maximum)

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` draws, rounded and clipped."""
        sigma = self.sigma if self.std is None else math.sqrt(math.log1p((self.std / self.mean) ** 2))
        assert sigma is not None
        return _clipped(rng.lognormal(math.log(self.mean) - sigma * sigma / 2, sigma, n), self.minimum, self.maximum)


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponential with this mean, rounded to whole tokens."""

    mean: float
    minimum: int = 1
    maximum: int | None = None

    def __post_init__(self) -> None:
        check_positive("mean", self.mean)
        _check_bounds(self.minimum, self.maximum)

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` draws, rounded and clipped."""
        return _clipped(rng.exponential(self.mean, n), self.minimum, self.maximum)


@dataclass(frozen=True, slots=True)
class Geometric:
    """Geometric on 1, 2, 3, … with this mean: after every token it ends with the probability 1/mean."""

    mean: float
    minimum: int = 1
    maximum: int | None = None

    def __post_init__(self) -> None:
        if not is_number(self.mean) or not 1 <= self.mean < math.inf:
            raise ValueError(f"mean must be a finite number of at least 1, got {self.mean!r}")
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
        pairs = list(quantiles.items()) if isinstance(quantiles, Mapping) else [tuple(pair) for pair in quantiles]
        points = []
        for pair in pairs:
            if len(pair) != 2 or not is_number(pair[1]):
                raise ValueError(f"a quantile is a share and a number of tokens, got {pair!r}")
            points.append((_share(pair[0]), float(pair[1])))
        return cls(tuple(sorted(points)))

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` draws, rounded."""
        points = self.points if self.points[0][0] == 0 else ((0.0, 1.0), *self.points)
        shares, tokens = zip(*points, strict=True)
        return _clipped(np.interp(rng.random(n), shares, tokens), 1, None)


@dataclass(frozen=True, slots=True)
class Empirical:
    """Draws from these values, with replacement."""

    values: tuple[int, ...] = field(repr=False)
    num_values: int = field(init=False)
    """How many they are."""

    def __post_init__(self) -> None:
        values = np.asarray(self.values)
        if values.ndim != 1 or not len(values) or values.dtype.kind not in "iu" or values.min() < 1:
            raise ValueError(
                f"values must be whole numbers of at least 1, at least one of them, got {self.values!r:.80}"
            )
        object.__setattr__(self, "values", tuple(values.tolist()))
        object.__setattr__(self, "num_values", len(values))

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` draws."""
        return np.array(self.values, np.int64)[rng.integers(0, len(self.values), n)]


def _uniform(
    low: int | None = None, high: int | None = None, tokens: int | None = None, range_ratio: float | None = None
) -> Uniform:
    if tokens is None and range_ratio is None and low is not None and high is not None:
        return Uniform(low, high)
    if low is None and high is None and tokens is not None and range_ratio is not None:
        return Uniform.around(tokens, range_ratio)
    raise ValueError("uniform needs either low and high or tokens and range_ratio")


def _quantiles(quantiles: Mapping[Any, float] | Sequence[Sequence[float]]) -> Quantiles:
    return Quantiles.of(quantiles)


LENGTH_KINDS: dict[str, Callable[..., Lengths]] = {
    "fixed": Fixed,
    "uniform": _uniform,
    "lognormal": Lognormal,
    "exponential": Exponential,
    "geometric": Geometric,
    "quantiles": _quantiles,
    "empirical": Empirical,
}


def lengths_from(spec: Lengths | int | Mapping[str, Any], what: str = "lengths") -> Lengths:
    """A distribution of token counts from its plain description: a number (fixed) or a dict.

    ``{"dist": "fixed", "tokens"}``, ``{"dist": "uniform", "low", "high"}`` or ``{…, "tokens", "range_ratio"}``,
    ``{"dist": "lognormal", "mean", "sigma" or "std", "min", "max"}``, ``{"dist": "exponential" or "geometric", "mean",
    "min", "max"}``, ``{"dist": "quantiles", "quantiles": {"p50": 200, "p99": 4000, "1": 9000}}``,
    ``{"dist": "empirical", "values": […]}``.  A distribution is returned as it is.

    Raises ValueError that begins with ``what``.
    """
    if isinstance(spec, Mapping):
        return build(spec, LENGTH_KINDS, tag="dist", what=what)
    if isinstance(spec, int) and not isinstance(spec, bool):
        return build({"dist": "fixed", "tokens": spec}, LENGTH_KINDS, tag="dist", what=what)
    if not hasattr(spec, "sample"):
        raise ValueError(f"{what}: must be a number of tokens or a table with dist = …, got {spec!r}")
    return spec  # type: ignore[return-value]


def _check_bounds(minimum: Any, maximum: Any) -> None:
    check_whole("min", minimum, 1)
    if maximum is not None:
        check_whole("max", maximum, minimum)


def _clipped(values: npt.NDArray[Any], minimum: int, maximum: int | None) -> IntArray:
    clipped = np.clip(np.rint(values), minimum, MAX_TOKENS if maximum is None else maximum)
    return np.asarray(clipped, np.int64)


def _share(value: Any) -> float:
    text = str(value)
    try:
        return float(text[1:]) / 100 if text.startswith("p") else float(text)
    except ValueError:
        raise ValueError(f"a quantile's share is a number from 0 to 1 or a name such as p99, got {value!r}") from None


def _shares(points: Sequence[tuple[float, float]]) -> str:
    return ", ".join(f"{share:g}" for share, _ in points) or "none"
