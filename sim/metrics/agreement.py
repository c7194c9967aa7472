"""How a prediction and a live run agree: errors by metric, curves to lay over each other, what explains the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_NAMES = {
    "throughput": "Throughput",
    "makespan": "Makespan",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "E2EL",
    "preemptions": "Preemptions",
    "prefix_hits": "Prefix cache hits",
    "kv_usage": "KV usage",
    "running": "Running",
    "waiting": "Waiting",
}
METRICS = tuple(_NAMES)
"""What is compared, in the order of reports."""
NEGLIGIBLE = 0.005
"""Relative errors up to here are none to be explained."""
OPPOSING = 3.0
"""Effects of so many times the error cancel each other: shares of the error that is left then say nothing."""


@dataclass(frozen=True, slots=True)
class MetricError:
    """One number of a live run, what was predicted, and how far off that is."""

    metric: str
    """One of ``METRICS``."""
    statistic: str
    """``mean``, ``p95``, ``peak`` …; ``over_time`` compares series instant by instant; empty for a single number."""
    unit: str
    """ms, s, tok/s, requests/s, requests, % or nothing."""
    live: float | None
    """Of several runs the mean; None for a comparison over time and where it is not known."""
    predicted: float | None
    error: float | None
    """(predicted - live) / live; infinite if only the live number is 0.  ``in_points``: the difference of two shares.

    Over time: the mean distance of the two series as a share of the live peak, or in points.
    """
    in_points: bool = False
    interval: tuple[float, float] | None = None
    """95 % bootstrap interval of the error."""
    spread: float | None = None
    """How far a live run lay from the mean of the live runs at most, in the terms of ``error``; None for one run."""
    limit: float | None = None
    """Largest error that was asked for."""

    @property
    def passed(self) -> bool | None:
        """Whether the limit was kept; None without one.  What cannot be compared has not kept it."""
        if self.limit is None:
            return None
        return self.error is not None and abs(self.error) <= self.limit

    @property
    def is_within_spread(self) -> bool | None:
        """Whether another live run was as far off as the prediction; None if there is only one."""
        if self.spread is None or self.error is None:
            return None
        return abs(self.error) <= self.spread

    @property
    def key(self) -> str:
        """``ttft:p95``, as limits name it."""
        return f"{self.metric}:{self.statistic}" if self.statistic else self.metric

    @property
    def name(self) -> str:
        """For people: ``TTFT, p95``."""
        return ", ".join(part for part in (_NAMES[self.metric], self.statistic.replace("_", " ")) if part)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "passed": self.passed, "is_within_spread": self.is_within_spread}


def relative_error(live: float | None, predicted: float | None) -> float | None:
    """(predicted - live) / live; 0 if both are 0, infinite if only the live number is, None if one is not known."""
    if live is None or predicted is None:
        return None
    if live == 0:
        return 0.0 if predicted == 0 else inf if predicted > 0 else -inf
    return (predicted - live) / live


class Curve(NamedTuple):
    """Points of a line."""

    x: FloatArray
    y: FloatArray


@dataclass(frozen=True, slots=True)
class Overlay:
    """The same quantity live, once for each run, and simulated."""

    name: str
    """One of ``METRICS``."""
    unit: str
    live: tuple[Curve, ...]
    predicted: Curve
    is_distribution: bool
    """Whether the curves say which share of the values (y) is at most x; else they are levels y over seconds x."""
    note: str = ""

    @property
    def title(self) -> str:
        """For people."""
        return _NAMES[self.name]


class Headline(NamedTuple):
    """A metric whose error is taken apart."""

    key: str
    label: str
    unit: str
    live: float
    predicted: float
    measured: float
    """As predicted with every ingredient at its measured value."""

    @property
    def is_wrong(self) -> bool:
        """Whether there is an error to explain."""
        return abs(self.predicted - self.live) > NEGLIGIBLE * abs(self.live)


@dataclass(frozen=True, slots=True)
class Effect:
    """What one ingredient of a prediction, at its measured value, does to the headline metrics."""

    ingredient: str
    swap: str
    """From which value to which, in words."""
    first: Mapping[str, float]
    """Change of each metric when this ingredient alone is swapped in the prediction."""
    last: Mapping[str, float]
    """Change when it is swapped after all the others."""
    is_inferred: bool = False
    """The measured value was not measured but inferred from the latencies themselves."""

    def change(self, key: str) -> float:
        """The mean of both: it does not depend on any order of the ingredients."""
        return (self.first[key] + self.last[key]) / 2


@dataclass(frozen=True, slots=True)
class Attribution:
    """What explains the error of a prediction."""

    headlines: tuple[Headline, ...]
    effects: tuple[Effect, ...]
    unmeasured: tuple[str, ...] = ()
    """Ingredients without a measured value, each with why, in sentences."""

    def explained(self, effect: Effect, headline: Headline) -> float | None:
        """Share of the error that the ingredient takes away; below 0 it adds to it.  None if there is no error."""
        if not headline.is_wrong:
            return None
        return -effect.change(headline.key) / (headline.predicted - headline.live)

    def rest(self, headline: Headline) -> float | None:
        """Share of the error that is left when every effect is taken off; None if there is none to speak of."""
        if not headline.is_wrong:
            return None
        shares = [self.explained(effect, headline) for effect in self.effects]
        return 1.0 - sum(share for share in shares if share is not None)

    def has_opposing_effects(self, headline: Headline) -> bool:
        """Whether an effect is so much larger than the error that others must have cancelled it."""
        shares = [self.explained(effect, headline) for effect in self.effects]
        return any(abs(share or 0.0) > OPPOSING for share in shares)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "headlines": [each._asdict() for each in self.headlines],
            "effects": [
                {
                    **asdict(effect),
                    "explained": {each.key: self.explained(effect, each) for each in self.headlines},
                }
                for effect in self.effects
            ],
            "unexplained": {each.key: self.rest(each) for each in self.headlines},
            "unmeasured": list(self.unmeasured),
        }


@dataclass(frozen=True, slots=True)
class Agreement:
    """Everything that came out of laying a prediction beside live runs."""

    errors: tuple[MetricError, ...]
    overlays: tuple[Overlay, ...]
    num_live_runs: int
    num_requests: int
    num_failed: int
    """Live requests that did not finish, in all runs."""
    attribution: Attribution | None = None
    causes: tuple[str, ...] = ()
    """What is likely to be behind the error, most important first, in sentences with numbers."""

    @property
    def limited(self) -> Sequence[MetricError]:
        """Those that have a limit."""
        return [each for each in self.errors if each.limit is not None]

    @property
    def passed(self) -> bool | None:
        """Whether all limits were kept; None if there are none."""
        return all(each.passed for each in self.limited) if self.limited else None

    def error(self, key: str) -> MetricError | None:
        """The error of that key, such as ``ttft:mean``; None if it was not compared."""
        return next((each for each in self.errors if each.key == key), None)
