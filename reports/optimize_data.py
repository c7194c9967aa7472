"""What a search found, as its reports read it: trials, the answer with its confirmation, and the walk to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

from windtunnel.reports.context import ReportContext
from windtunnel.reports.sweep_data import LEVEL, SweptPoint, are_level, measure, paired, say
from windtunnel.reports.words import count, percent
from windtunnel.sim.metrics.replications import Interval

START, DEFAULTS, SEARCH, NEIGHBOUR = "scenario", "vLLM defaults", "search", "neighbour"
SIMPLE = "made simple"


class Target(NamedTuple):
    """The number that is made large, or small."""

    key: str
    words: str
    unit: str
    better: str
    """``higher`` or ``lower``."""

    def say(self, value: float | None) -> str:
        """A value with its unit."""
        if value is None:
            return "–"
        if self.key in _OWN_KEYS:
            return f"{count(value)} {self.unit}".strip()
        return say(self.key, value)

    @property
    def sign(self) -> int:
        """1 where more is better, else -1."""
        return 1 if self.better == "higher" else -1

    @property
    def label(self) -> str:
        """For a table's head."""
        name = f"{self.words[:1].upper()}{self.words[1:]}"
        return f"{name} ({self.unit})" if self.unit else name


_OWN_KEYS = ("goodput", "goodput_per_dollar", "goodput_per_gpu_hour", "cost_per_hour", "num_gpus")
_WORDS = {
    "goodput": ("goodput", "req/s"),
    "goodput_per_gpu_hour": ("goodput per GPU-hour", "requests"),
    "goodput_per_dollar": ("goodput per money", "requests"),
    "headroom": ("head-room", "%"),
    "worst_use": ("use of the tightest limit", "%"),
    "holds_up_to": ("rate that holds", "req/s"),
}


def words_of(key: str) -> str:
    """What a number of a trial is called."""
    return _WORDS[key][0] if key in _WORDS else measure(key).words


def say_value(key: str, value: float | None) -> str:
    """A number of a trial with its unit."""
    if value is None:
        return "–"
    if key in ("headroom", "worst_use"):
        return f"−{percent(-value)}" if value < 0 else percent(value)
    if key in _WORDS:
        return f"{count(value)} {_WORDS[key][1]}"
    return say(key, value)


def label_of(key: str) -> str:
    """The same for a table's head."""
    if key not in _WORDS:
        return measure(key).label
    words, unit = _WORDS[key]
    return f"{words[:1].upper()}{words[1:]} ({unit})"


@dataclass(frozen=True, slots=True)
class TunedKnob:
    """A setting that was turned."""

    key: str
    text: str
    """What was asked for."""
    num_values: int | None
    own: str
    """The scenario's value; empty if not known."""
    default: str
    """vLLM's; empty if not known."""
    is_numeric: bool
    is_log: bool
    order: tuple[str, ...]
    """All values in a list, in order; empty for a range."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One deployment of the search."""

    point: SweptPoint
    origin: str
    """Of START, DEFAULTS, SEARCH, NEIGHBOUR and SIMPLE."""
    round: int
    in_space: bool
    """Whether its values are among those that were to be searched."""
    excess: float
    """By how much of its limit the worst objective is missed; 0 if all are kept."""
    dropped: str
    """Why it got no more replications; empty if it got all."""

    @property
    def is_candidate(self) -> bool:
        """Whether it may be the answer: it starts, keeps all objectives, and its memory plan is safe."""
        return self.in_space and not self.point.infeasible and self.excess <= 0 and not self.point.is_unsafe


class Step(NamedTuple):
    """A part of the way from the scenario's settings to the answer."""

    changes: Mapping[str, tuple[str, str]]
    """Settings with their values before and after."""
    before: SweptPoint
    after: SweptPoint
    change: Interval | None
    """Of the target, seed against seed; None where the start cannot run."""
    is_level: bool
    """Whether it buys nothing beyond noise, or less than 1 %."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The answer run again with seeds that the search has not seen."""

    seeds: tuple[int, ...]
    winner: SweptPoint
    start: SweptPoint | None
    """The scenario's own settings on the same seeds; None if they cannot run."""
    passed_over: tuple[SweptPoint, ...]
    """Those that looked better in the search and missed an objective here."""

    def gain(self, key: str) -> Interval | None:
        """What the answer has more than the scenario, seed against seed."""
        return None if self.start is None else paired(self.start, self.winner, key)


@dataclass(frozen=True, slots=True)
class Optimized:
    """A search, as all reports show it."""

    context: ReportContext
    description: str
    target: Target
    at: str
    objectives: tuple[str, ...]
    is_priced: bool
    currency: str
    has_limits: bool
    knobs: tuple[TunedKnob, ...]
    were_knobs_given: bool
    tried: tuple[Tried, ...]
    start: Tried
    found: Tried | None
    """The best of the search, before it was made simpler; None if none keeps the objectives."""
    nearest: Tried | None
    """Where none keeps them: the one that misses them by least."""
    confirmation: Confirmation | None
    reset: Mapping[str, tuple[str, str]]
    """Settings that buy nothing beyond noise: the search's value, and vLLM's that they went back to."""
    walk: tuple[Step, ...]
    importance: Mapping[str, float]
    """Of each knob for being among the best quarter of all trials; empty where too few ran."""
    seeds: tuple[int, ...]
    num_rounds: int
    stop: str
    """Why the search ended, in a sentence."""
    num_search: int
    """Simulations of the search."""
    num_after: int
    """Simulations to make the answer simple, to confirm and to explain it."""
    num_combinations: int | None
    serve_command: str
    why_no_command: str
    scenario_toml: str
    """The answer as a scenario file; empty without an answer."""
    command: str
    overrides: Mapping[str, Any]
    notes: tuple[str, ...]
    is_fixed: bool = False
    """Whether nothing is drawn, as in a trace, so that all seeds serve the same requests."""

    @property
    def winner(self) -> SweptPoint | None:
        """The answer, with its runs on fresh seeds."""
        return None if self.confirmation is None else self.confirmation.winner

    @property
    def answer(self) -> Tried | None:
        """The answer as a trial: that of the search, or where it was made simple one with its runs on fresh seeds."""
        winner = self.winner
        if winner is None:
            return None
        known = next((each for each in self.tried if each.point.number == winner.number), None)
        return known or Tried(winner, SIMPLE, self.num_rounds, in_space=True, excess=0.0, dropped="")

    @property
    def holds(self) -> bool | None:
        """Whether the answer keeps all objectives in all fresh runs; None if none were set."""
        if not self.objectives:
            return None
        return self.winner is not None and self.winner.holds

    @property
    def is_infeasible(self) -> bool:
        """Whether nothing of what is searched starts, whatever the scenario's own settings do outside of that."""
        searched = [each for each in self.tried if each.in_space]
        return all(each.point.infeasible for each in searched or self.tried)

    @property
    def num_grid(self) -> int | None:
        """Simulations that all combinations would take, with as many replications."""
        return None if self.num_combinations is None else self.num_combinations * len(self.seeds)

    @property
    def is_flat(self) -> bool:
        """Whether all that may be the answer is level in the target, so that head-room is what tells them apart."""
        kept = [each.point for each in self.tried if each.is_candidate and not each.dropped]
        means = [mean for point in kept if (mean := point.mean(self.target.key)) is not None]
        has_headroom = bool(kept) and all(point.values("headroom") for point in kept)
        return has_headroom and bool(means) and max(means) - min(means) <= LEVEL * max(map(abs, means))

    @property
    def shown_keys(self) -> tuple[str, ...]:
        """Numbers of the tables, those that some trial has, the target first."""
        more: tuple[str, ...] = ("goodput", "utilisation", "num_gpus")
        if self.at != "capacity":
            more = ("goodput", "headroom", "p99_ttft_ms", "p99_itl_ms", "preemptions", "utilisation", "num_gpus")
        own = ("cost_per_hour",) if self.is_priced else ()
        wanted = dict.fromkeys((self.target.key, *more, *own))
        return tuple(key for key in wanted if any(each.point.values(key) for each in self.tried))


NEVER_LEVEL = 0.05
"""Share from which on a difference is one, however noisy: few runs that say nothing do not make two trials equal."""


def is_level(first: SweptPoint, second: SweptPoint, target: Target) -> bool:
    """Whether two trials cannot be told apart in the target: by less than 1 %, or by less than 5 % within the noise.

    At capacity the noise is that of the rates themselves, from the one that holds to the one that fails.
    """
    a, b = first.mean(target.key), second.mean(target.key)
    if a is None or b is None:
        return False
    distance = abs(b - a) / (abs(a) or 1.0)
    if LEVEL < distance <= NEVER_LEVEL and any("holds_up_to" in run for run in first.runs):
        lower, upper = sorted((first, second), key=lambda point: point.mean("max_rate") or 0.0)
        high = lower.mean("fails_from")
        return high is None or (upper.mean("holds_up_to") or 0.0) <= high
    return distance <= NEVER_LEVEL and are_level(first, second, target.key)


def half_width(interval: Interval | None) -> float:
    """Half of an interval; 0 where it is not known."""
    return 0.0 if interval is None or not isfinite(interval.half_width) else interval.half_width


def with_noise(target: Target, mean: float, half: float) -> str:
    """``4,841 ± 302 requests/USD``; without the noise where that is not known, or 0."""
    told = target.say(mean)
    if not half:
        return told
    value, _, unit = told.partition(" ")
    noise = target.say(round(half) if abs(mean) >= 100 and half >= 1 else half)
    spread, _, same = noise.partition(" ")
    return f"{value} ± {spread} {unit}".strip() if unit == same else f"{told} ± {noise}"


def signed(target: Target, change: Interval) -> str:
    """``+12 ± 3 requests/USD``."""
    half = half_width(change)
    if change.mean == 0 and not half:
        return "no difference"
    sign = "+" if change.mean >= 0 else "−"
    return f"{sign}{with_noise(target, abs(change.mean), half)}"


def relative(change: Interval, base: float | None) -> str:
    """``+12 % ± 3 %``; empty where there is nothing to relate to."""
    if not base or (change.mean == 0 and not half_width(change)):
        return ""
    share, half = 100 * abs(change.mean / base), 100 * half_width(change) / abs(base)
    places = 0 if max(share, half) >= 10 else 1
    sign = "+" if change.mean >= 0 else "−"
    return f"{sign}{share:,.{places}f}{f' ± {half:,.{places}f}' if half else ''} %"
