"""Distributions of pauses, in seconds at the rim and whole nanoseconds inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt

from windtunnel.scenarios.units import parse_duration_s
from windtunnel.scenarios.workloads.specs import (
    NOT_NEGATIVE,
    SECONDS,
    SECONDS_OR_NONE,
    build,
    check_parameters,
    from_text,
    is_number,
)
from windtunnel.sim.workload import IntArray

_LONGEST_S = 1e9


class Durations(Protocol):
    """A distribution of pauses."""

    def sample_ns(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` pauses in nanoseconds, each at least 0."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPause:
    """Always the same pause."""

    seconds: Annotated[float, SECONDS_OR_NONE, "The pause."]

    def __post_init__(self) -> None:
        check_parameters(self)

    def sample_ns(self, rng: np.random.Generator, n: int) -> IntArray:  # noqa: ARG002 - one signature for all
        """``n`` times the pause."""
        return np.full(n, round(self.seconds * 1e9), np.int64)


@dataclass(frozen=True, slots=True)
class ExponentialPause:
    """Exponential with this mean."""

    mean_s: Annotated[float, SECONDS, "Mean, in seconds."]

    def __post_init__(self) -> None:
        check_parameters(self)

    def sample_ns(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` draws."""
        return _whole_ns(rng.exponential(self.mean_s, n))


@dataclass(frozen=True, slots=True)
class LognormalPause:
    """Log-normal with this mean; ``sigma`` is that of the logarithm."""

    mean_s: Annotated[float, SECONDS, "Mean, in seconds."]
    sigma: Annotated[float, NOT_NEGATIVE, "Standard deviation of the logarithm."]

    def __post_init__(self) -> None:
        check_parameters(self)

    def sample_ns(self, rng: np.random.Generator, n: int) -> IntArray:
        """``n`` draws."""
        return _whole_ns(rng.lognormal(math.log(self.mean_s) - self.sigma**2 / 2, self.sigma, n))


DURATION_KINDS: dict[str, Callable[..., Durations]] = {
    "fixed": FixedPause,
    "exponential": ExponentialPause,
    "lognormal": LognormalPause,
}


def durations_from(spec: Durations | float | str | Mapping[str, Any], what: str = "think time") -> Durations:
    """A distribution of pauses from its plain description: a number of seconds (fixed), a dict, or text.

    ``{"dist": "fixed", "seconds"}``, ``{"dist": "exponential", "mean_s"}``, ``{"dist": "lognormal", "mean_s",
    "sigma"}``.  A distribution is returned as it is.  Raises ValueError that begins with ``what``.
    """
    if isinstance(spec, str):
        spec = from_text(spec, parse_duration_s, "dist", what)
    if isinstance(spec, Mapping):
        return build(spec, DURATION_KINDS, tag="dist", what=what)
    if is_number(spec):
        return build({"dist": "fixed", "seconds": spec}, DURATION_KINDS, tag="dist", what=what)
    if not hasattr(spec, "sample_ns"):
        raise ValueError(f"{what}: must be a number of seconds or a table with dist = …, got {spec!r}")
    return spec  # type: ignore[return-value]


def _whole_ns(seconds: npt.NDArray[np.float64]) -> IntArray:
    return np.rint(np.minimum(seconds, _LONGEST_S) * 1e9).astype(np.int64)
