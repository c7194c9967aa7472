"""Which setting matters most, as its reports read it, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Literal, NamedTuple, get_args

from windtunnel.reports.context import ReportContext
from windtunnel.reports.sweep_data import SweptAxis, SweptPoint, measure, say
from windtunnel.reports.words import digits, percent, plural

Method = Literal["oat", "sobol", "morris"]
METHODS: tuple[str, ...] = get_args(Method)
METHOD_NAMES = {"oat": "one at a time", "sobol": "Sobol indices", "morris": "Morris' elementary effects"}
MATTERS = 0.02
"""Share of the largest influence below which a setting is said not to matter."""


class Influence(NamedTuple):
    """How much one setting matters for one number, with its interval at 95 %."""

    axis: str
    value: float
    """oat: the largest change between two of its values; sobol: the total index; morris: the mean size of an effect."""
    low: float
    """-inf where it is not known."""
    high: float
    first: tuple[float, float, float] | None = None
    """sobol: the first-order index and its bounds."""
    mean: float | None = None
    """morris: the mean effect of moving from the low end to the high end of the range."""
    spread: float | None = None
    """morris: the standard deviation of the effects."""
    ends: tuple[tuple[str, float], ...] = ()
    """oat: the values, each with what the number is there, rising."""


@dataclass(frozen=True, slots=True)
class Influences:
    """All settings by how much they matter for one number, the greatest first."""

    key: str
    base: float
    """oat: the number at the base point; else its mean over all points."""
    ranked: tuple[Influence, ...]
    num_rows: int
    """Base points or trajectories that were used; oat: points."""
    noise_share: float | None
    """Share of the points' variance that is noise; None with a single replication."""

    @property
    def is_flat(self) -> bool:
        """Whether nothing varied changes the number."""
        return not self.ranked or self.ranked[0].value <= 0

    @property
    def leaders(self) -> tuple[Influence, ...]:
        """The setting that matters most, with those that cannot be told from it."""
        if self.is_flat:
            return ()
        top = self.ranked[0]
        return tuple(each for each in self.ranked if each is top or (each.high >= top.low and each.value > 0))


@dataclass(frozen=True, slots=True)
class Sensed:
    """A sensitivity analysis, as all reports show it."""

    context: ReportContext
    description: str
    method: str
    axes: tuple[SweptAxis, ...]
    ranges: Mapping[str, str]
    """What each setting was varied over."""
    base: Mapping[str, str]
    """oat: the values that stay while one setting moves."""
    found: tuple[Influences, ...]
    """One for each number."""
    points: tuple[SweptPoint, ...]
    seeds: tuple[int, ...]
    num_rows: int
    """Base points or trajectories that were asked for."""
    command: str = ""

    @property
    def num_infeasible(self) -> int:
        """Points that cannot run."""
        return sum(1 for point in self.points if point.infeasible)


class InfluenceAnswer(NamedTuple):
    """A headline and the sentences below it."""

    headline: str
    tone: str
    sentences: tuple[str, ...]
    risks: tuple[str, ...]


def influence_answer(sensed: Sensed) -> InfluenceAnswer:
    """Which setting matters most, and for what."""
    if all(point.infeasible for point in sensed.points):
        return InfluenceAnswer("Nothing of this starts.", "bad", (), tuple(_risks(sensed)))
    if not sensed.found:
        return InfluenceAnswer("Too few points start to say which setting matters.", "bad", (), tuple(_risks(sensed)))
    wins: dict[str, list[str]] = {}
    for each in sensed.found:
        if len(each.leaders) == 1:
            wins.setdefault(each.ranked[0].axis, []).append(measure(each.key).words)
    sentences = tuple(rank_words(sensed, each) for each in sensed.found)
    if not wins:
        is_flat = all(each.is_flat for each in sensed.found)
        headline = "Nothing varied matters." if is_flat else _tied(sensed)
        return InfluenceAnswer(headline, "note", sentences, tuple(_risks(sensed)))
    first = max(wins, key=lambda axis: len(wins[axis]))
    rest = [f"{axis} for {_listed(words)}" for axis, words in wins.items() if axis != first]
    headline = f"{first} matters most for {_listed(wins[first])}{'; ' if rest else ''}{'; '.join(rest)}."
    return InfluenceAnswer(headline, "good", sentences, tuple(_risks(sensed)))


def _tied(sensed: Sensed) -> str:
    """Which settings matter most, where for no number a single one does."""
    ties: dict[tuple[str, ...], list[str]] = {}
    for each in sensed.found:
        axes = tuple(sorted(leader.axis for leader in each.leaders))
        if axes and len(axes) < len(sensed.axes) and each.ranked[0].low > 0:
            ties.setdefault(axes, []).append(measure(each.key).words)
    if not ties:
        return "No setting stands out beyond noise."
    axes, words = max(ties.items(), key=lambda tie: len(tie[1]))
    changing = sum(1 for each in sensed.found if not each.is_flat)
    what = "all that changes" if len(words) == changing > 2 else _listed(words)
    return f"{_listed(list(axes))} matter most for {what}, and cannot be told apart."


def rank_words(sensed: Sensed, found: Influences) -> str:
    """``P99 ITL: max_num_seqs (0.71, 0.62 to 0.8), then request_rate (0.2, 0.1 to 0.3).``"""
    words = f"{measure(found.key).words[:1].upper()}{measure(found.key).words[1:]}"
    if found.is_flat:
        return f"{words}: nothing varied changes it."
    told = [f"{each.axis} ({value_words(sensed, found, each)})" for each in _that_matter(found)]
    idle = [each.axis for each in found.ranked if each not in _that_matter(found)]
    tie = "" if len(found.leaders) == 1 else f"; {_listed([each.axis for each in found.leaders])} cannot be told apart"
    if found.ranked[0].low <= 0 and isfinite(found.ranked[0].high):
        tie = ", which may be noise"
    rest = f"; {_listed(idle)} {'does' if len(idle) == 1 else 'do'} not matter" if idle else ""
    return f"{words}: {', then '.join(told)}{tie}{rest}."


def _that_matter(found: Influences) -> list[Influence]:
    return [each for each in found.ranked if each.value > MATTERS * found.ranked[0].value]


def value_words(sensed: Sensed, found: Influences, each: Influence) -> str:
    """An influence with its interval, in the unit of the method."""
    shown = _index if sensed.method == "sobol" else lambda value: say(found.key, value)
    if not (isfinite(each.low) and isfinite(each.high)):
        return shown(each.value)
    return f"{shown(each.value)}, {shown(max(each.low, 0.0))} to {shown(each.high)}"


def _index(value: float) -> str:
    return digits(value, 2) if value >= 0.005 else "0"


def what_is_measured(method: str) -> str:
    """What the number behind a setting is."""
    match method:
        case "sobol":
            return (
                "Numbers are total Sobol indices with bootstrap intervals (95 %): the share of a number's variance, "
                "over the ranges below, that a setting takes part in, alone and together with others."
            )
        case "morris":
            return (
                "Numbers are mean sizes of elementary effects (mu*) with bootstrap intervals (95 %): what moving a "
                "setting through its whole range changes, on average over where the others are."
            )
    return (
        "Numbers are the largest change between two values of a setting while all others stay at the base, with the "
        "interval (95 %) of the difference run by run."
    )


def _risks(sensed: Sensed) -> Iterator[str]:
    yield "This holds for the ranges that were given: wider ones give a setting more weight."
    if sensed.num_infeasible:
        yield (
            f"{plural(sensed.num_infeasible, 'point')} of {len(sensed.points):,} cannot run"
            + (
                "; base points with one of them were left out, so that the rest stands for the part that runs."
                if sensed.method != "oat"
                else "."
            )
        )
    if sensed.method == "oat" and len(sensed.axes) > 1:
        yield "One at a time sees no interaction: --sensitivity sobol or morris does."
    noisy = [each for each in sensed.found if (each.noise_share or 0.0) > 0.1]
    if noisy:
        told = ", ".join(f"{measure(each.key).words} {percent(each.noise_share)}" for each in noisy)
        yield f"A part of what varies is noise between replications ({told}): more --reps would sharpen it."
    if len(sensed.seeds) == 1 and sensed.found:
        yield "All points served the same requests once; how far others would change the picture is not in it (--reps)."


def ranges_words(sensed: Sensed) -> Iterator[str]:
    """What each setting was varied over."""
    for axis in sensed.axes:
        base = f", base {sensed.base[axis.key]}" if axis.key in sensed.base else ""
        yield f"{axis.key}: {sensed.ranges[axis.key]}{base}"


def size_words(sensed: Sensed) -> str:
    """``512 points (64 base points), 1 run each (seed 0).``"""
    rows = {"sobol": "base points", "morris": "trajectories"}.get(sensed.method)
    of = f" ({sensed.num_rows:,} {rows})" if rows else ""
    seeds = f"seed {sensed.seeds[0]}" if len(sensed.seeds) == 1 else f"seeds {sensed.seeds[0]} to {sensed.seeds[-1]}"
    return f"{plural(len(sensed.points), 'point')}{of}, {plural(len(sensed.seeds), 'run')} each ({seeds})."


def no_bounds() -> tuple[float, float]:
    """Of an interval that is not known."""
    return -inf, inf


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
