"""Arrival processes: when requests are due.

Each is a small frozen specification with ``sample_ns(rng, n)``: the times of n requests from the start of the run, in
whole nanoseconds, not falling.  The first request comes one gap after the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from windtunnel.scenarios.units import parse_rate
from windtunnel.scenarios.workloads.specs import (
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_OR_INFINITE,
    SECONDS,
    SECONDS_OR_NONE,
    build,
    check_parameters,
    from_text,
)
from windtunnel.sim.workload import IntArray

FloatArray = npt.NDArray[np.float64]

Rate = Annotated[float, POSITIVE_OR_INFINITE, "Requests per second; inf is all at once."]
Burstiness = Annotated[
    float, POSITIVE_OR_INFINITE, "1 is Poisson, below is burstier, above more regular, inf constant."
]
Rescale = Annotated[
    bool, "Stretch the times so that the last of n requests comes at n / rate exactly, as vllm bench serve does."
]


class Arrivals(Protocol):
    """An arrival process."""

    def sample_ns(self, rng: np.random.Generator, n: int) -> IntArray:
        """Arrival times of ``n`` requests in nanoseconds, not falling."""
        ...


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma-distributed gaps as ``vllm bench serve --request-rate --burstiness`` has them.

    Gaps have shape ``burstiness`` and scale 1/(rate·burstiness): their mean is 1/rate, their coefficient of variation
    1/√burstiness, so less than 1 is bursty, 1 Poisson, infinity constant.  An infinite rate sends all at once.
    ``rescale`` stretches the times so that the last request comes at n/rate exactly, as vLLM does.
    Source: vLLM 0.32 ``benchmarks/serve.py``, ``get_request``.
    """

    rate: Rate
    burstiness: Burstiness = 1.0
    rescale: Rescale = False

    def __post_init__(self) -> None:
        check_parameters(self)

    def sample_ns(self, rng: np.random.Generator, n: int) -> IntArray:
        """Arrival times of ``n`` requests."""
        if math.isinf(self.rate):
            return np.zeros(n, np.int64)
        if math.isinf(self.burstiness):
            return _whole_ns(np.arange(1, n + 1) / self.rate)
        times_s = np.cumsum(_gamma_gaps(rng, n, self.burstiness)) / self.rate
        if self.rescale and n and times_s[-1] > 0:
            times_s *= n / self.rate / times_s[-1]
        return _whole_ns(times_s)


@dataclass(frozen=True, slots=True)
class Poisson:
    """A Poisson process: independent requests at ``rate`` a second.  ``rescale`` as in Gamma."""

    rate: Rate
    rescale: Rescale = False

    def __post_init__(self) -> None:
        check_parameters(self)

    def sample_ns(self, rng: np.random.Generator, n: int) -> IntArray:
        """Arrival times of ``n`` requests."""
        return Gamma(self.rate, 1.0, self.rescale).sample_ns(rng, n)


@dataclass(frozen=True, slots=True)
class Constant:
    """One request every 1/rate seconds."""

    rate: Rate

    def __post_init__(self) -> None:
        check_parameters(self)

    def sample_ns(self, rng: np.random.Generator, n: int) -> IntArray:
        """Arrival times of ``n`` requests."""
        return Gamma(self.rate, math.inf).sample_ns(rng, n)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """All requests at the start (``--request-rate inf``)."""

    def sample_ns(self, rng: np.random.Generator, n: int) -> IntArray:  # noqa: ARG002 - one signature for all
        """Zeros."""
        return np.zeros(n, np.int64)


@dataclass(frozen=True, slots=True)
class OnOff:
    """A Poisson process with two rates in turn: ``rate`` for ``on_s`` seconds, ``off_rate`` for ``off_s``, and again.

    Mean rate: (rate·on_s + off_rate·off_s)/(on_s + off_s).  Made from a Poisson process of rate 1 through the inverse
    of the cumulated rate.
    """

    rate: Annotated[float, POSITIVE, "Requests per second while it is on."]
    on_s: Annotated[float, SECONDS, "How long it is on, in seconds."]
    off_s: Annotated[float, SECONDS_OR_NONE, "How long it is off then, in seconds."]
    off_rate: Annotated[float, NOT_NEGATIVE, "Requests per second while it is off."] = 0.0

    def __post_init__(self) -> None:
        check_parameters(self)

    def sample_ns(self, rng: np.random.Generator, n: int) -> IntArray:
        """Arrival times of ``n`` requests."""
        on, off = self.rate * self.on_s, self.off_rate * self.off_s
        cycles, rest = np.divmod(np.cumsum(rng.exponential(1.0, n)), on + off)
        within_s = rest / self.rate
        if off:
            within_s = np.where(rest < on, within_s, self.on_s + np.maximum(rest - on, 0) / self.off_rate)
        return _whole_ns(cycles * (self.on_s + self.off_s) + within_s)


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that goes from ``start_rate`` at the first request to ``end_rate`` at the last.

    "linear" in the number of the request, or "exponential"; gaps are gamma-distributed as in Gamma.
    Source: ``--ramp-up-strategy`` of vLLM 0.32 ``benchmarks/serve.py``; here the rate may fall, too.
    """

    start_rate: Annotated[float, POSITIVE, "Requests per second at the first request."]
    end_rate: Annotated[float, POSITIVE, "Requests per second at the last request."]
    strategy: Annotated[
        Literal["linear", "exponential"], "How the rate goes from one to the other, by number of the request."
    ] = "linear"
    burstiness: Burstiness = 1.0

    def __post_init__(self) -> None:
        check_parameters(self)

    def sample_ns(self, rng: np.random.Generator, n: int) -> IntArray:
        """Arrival times of ``n`` requests."""
        progress = np.arange(n) / max(n - 1, 1)
        if self.strategy == "linear":
            rates = self.start_rate + (self.end_rate - self.start_rate) * progress
        else:
            rates = self.start_rate * (self.end_rate / self.start_rate) ** progress
        gaps = np.ones(n) if math.isinf(self.burstiness) else _gamma_gaps(rng, n, self.burstiness)
        return _whole_ns(np.cumsum(gaps / rates))


ARRIVAL_KINDS: dict[str, Callable[..., Arrivals]] = {
    "poisson": Poisson,
    "gamma": Gamma,
    "constant": Constant,
    "at_once": AtOnce,
    "on_off": OnOff,
    "ramp": Ramp,
}


def arrivals_from(spec: Arrivals | float | str | Mapping[str, Any], what: str = "arrivals") -> Arrivals:
    """An arrival process from its plain description: a rate (Poisson; ``inf`` is all at once), a dict, or text.

    ``{"process": "poisson", "rate", "rescale"}``, ``{"process": "gamma", "rate", "burstiness", "rescale"}``,
    ``{"process": "constant", "rate"}``, ``{"process": "at_once"}``, ``{"process": "on_off", "rate", "on_s", "off_s",
    "off_rate"}``, ``{"process": "ramp", "start_rate", "end_rate", "strategy", "burstiness"}``.  A process is returned
    as it is.  Raises ValueError that begins with ``what``.
    """
    if isinstance(spec, str):
        spec = from_text(spec, parse_rate, "process", what)
    if isinstance(spec, Mapping):
        return build(spec, ARRIVAL_KINDS, tag="process", what=what)
    if isinstance(spec, (int, float)) and not isinstance(spec, bool):
        return build({"process": "poisson", "rate": spec}, ARRIVAL_KINDS, tag="process", what=what)
    if not hasattr(spec, "sample_ns"):
        raise ValueError(f"{what}: must be a rate or a table with process = …, got {spec!r}")
    return spec  # type: ignore[return-value]


def _gamma_gaps(rng: np.random.Generator, n: int, burstiness: float) -> FloatArray:
    """Gaps of mean 1."""
    return rng.standard_gamma(burstiness, n) / burstiness


def _whole_ns(times_s: FloatArray) -> IntArray:
    if len(times_s) and not times_s[-1] < 9.2e9:
        raise ValueError(f"the last of {len(times_s):,} requests would come after 292 years: raise the rate")
    return np.rint(times_s * 1e9).astype(np.int64)
