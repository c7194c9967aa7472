"""What is asked of a service: goodput limits as vLLM writes them, and objectives in the manner of k6."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches

GOODPUT_METRICS = ("ttft", "tpot", "e2el")
"""What ``vllm bench serve --goodput`` knows."""

LATENCIES = ("ttft", "tpot", "itl", "e2el", "queue_time", "client_queue_time", "e2el_including_client_queue")
SHARES = ("failed", "prefix_cache_hit_rate", "kv_usage", "kv_cached_usage", "busy_share")
RATES = ("request_throughput", "output_throughput", "total_token_throughput")
COUNTS = (
    "preemptions",
    "preempted_requests",
    "max_preemptions_per_request",
    "recomputed_prefill_tokens",
    "rejected",
    "unfinished",
)
STATISTICS = ("mean", "median", "std", "min", "max")
MEAN_PEAK = ("mean", "peak")

MOST_FAILED_PERCENT = 1.0
"""Percent of failed requests up to which the mean latency of the others is taken for that of all."""

LATENCY_UNITS_MS = {"": 1.0, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1000.0, "min": 60_000.0}
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}

ALLOWED = f"""\
An objective is METRIC[:STATISTIC] OPERATOR NUMBER[UNIT], several are separated by commas or spaces:
  latencies   {", ".join(LATENCIES)}
              with a statistic: {", ".join(STATISTICS)}, p50, p99, p99.9, …; unit us, ms (if left out), s or min
  goodput     goodput>=99% (share of all requests) or goodput>=5/s; needs goodput limits (ttft:500 tpot:50 e2el:2000)
  shares      {", ".join(SHARES)} (kv_usage and kv_cached_usage with :mean or :peak); in %
  rates       {", ".join(RATES)}; per second
  counts      {", ".join(COUNTS)}, failed
  operators   {" ".join(OPERATORS)}
Examples: ttft:p99<500ms  e2el:mean<2s  itl:p95<50ms  goodput>=99%  kv_usage:peak<95%  preemptions==0"""


class SloSyntaxError(ValueError):
    """An objective that cannot be read; the message shows the place and lists what is allowed."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        self.text, self.position, self.problem = text, position, problem
        super().__init__(f"cannot read objective {text!r}: {problem}\n  {text}\n  {' ' * position}^\n{ALLOWED}")

    def __reduce__(self) -> tuple[type[SloSyntaxError], tuple[str, int, str]]:
        return type(self), (self.text, self.position, self.problem)


@dataclass(frozen=True, slots=True)
class GoodputLimits:
    """Limits, in milliseconds, that a request must keep to count as good; None asks nothing."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    @classmethod
    def parse(cls, text: str | Iterable[str]) -> GoodputLimits:
        """Limits from vLLM's notation: ``ttft:500 tpot:50 e2el:2000``, each in milliseconds, any of the three.

        Raises SloSyntaxError for anything else.
        """
        whole = text if isinstance(text, str) else " ".join(text)
        limits: dict[str, float] = {}
        for match in re.finditer(r"[^\s,]+", whole):
            name, colon, number = match[0].partition(":")
            if name not in GOODPUT_METRICS:
                problem = f"unknown goodput metric {name!r}, vLLM knows {', '.join(GOODPUT_METRICS)}"
                raise SloSyntaxError(whole, match.start(), problem)
            if name in limits:
                raise SloSyntaxError(whole, match.start(), f"{name} is given twice")
            if not colon or not re.fullmatch(r"\d+(\.\d+)?", number):
                after_name = match.start() + len(name) + len(colon)
                raise SloSyntaxError(whole, after_name, f"{name} needs :MILLISECONDS, a number such as {name}:500")
            limits[name] = float(number)
        if not limits:
            raise SloSyntaxError(whole, 0, "no goodput limit is given, write for example ttft:500 tpot:50")
        return cls(**{f"{name}_ms": value for name, value in limits.items()})

    def __str__(self) -> str:
        given = ((name, getattr(self, f"{name}_ms")) for name in GOODPUT_METRICS)
        return " ".join(f"{name}:{value:g}" for name, value in given if value is not None)


@dataclass(frozen=True, slots=True)
class Slo:
    """One objective: ``metric`` (its ``statistic``) compared by ``operator`` with ``limit``."""

    text: str
    """As it was written."""
    metric: str
    statistic: str | None
    """mean, median, std, min, max, peak, a percentile as p99, or None for a plain number."""
    operator: str
    limit: float
    """In ``unit``."""
    unit: str
    """ms for latencies, % for shares, /s for rates, empty for counts."""

    @classmethod
    def parse(cls, text: str) -> Slo:
        """One objective such as ``ttft:p99<500ms``.  Raises SloSyntaxError."""
        return _Reader(text).read()

    def holds(self, measured: float) -> bool:
        """Whether a measured value, in ``unit``, keeps the objective."""
        return OPERATORS[self.operator](measured, self.limit)

    @property
    def percent(self) -> float | None:
        """The percentile that the statistic asks for, if it is one."""
        return float(self.statistic[1:]) if self.statistic and self.statistic[1:2].isdigit() else None

    @property
    def room_percent(self) -> float:
        """So many of a hundred requests may never have an answer before a limit on a latency counts as missed.

        A percentile of all requests leaves room for those beyond it, the maximum for none.  The mean and the standard
        deviation of the others tell little of all once more than ``MOST_FAILED_PERCENT`` are missing.
        """
        if self.percent is not None:
            return round(100 - self.percent, 9)
        return {"median": 50.0, "min": 100.0, "max": 0.0}.get(self.statistic or "", MOST_FAILED_PERCENT)


@dataclass(frozen=True, slots=True)
class SloResult:
    """An objective, what was measured and whether it was kept."""

    slo: Slo
    measured: float | None
    """In the objective's unit; None if there was nothing to measure."""
    passed: bool
    note: str = ""
    """Why nothing was measured, or why the number must be read with care: the latencies and goodput of an overloaded or
    stalled run never count as kept, whatever was measured."""


def parse_slos(texts: str | Iterable[str]) -> tuple[Slo, ...]:
    """Objectives from one string or several, each holding one or more, separated by commas, semicolons or spaces.

    Raises SloSyntaxError.
    """
    given = [texts] if isinstance(texts, str) else list(texts)
    found: list[Slo] = []
    for text in given:
        # spaces around an operator belong to the objective, others separate objectives
        tight = re.sub(r"\s*(<=|>=|==|!=|<|>|:)\s*", r"\1", text)
        found += [Slo.parse(part) for part in re.split(r"[\s,;]+", tight) if part]
    if given and not found:
        raise SloSyntaxError(" ".join(given), 0, "it is empty")
    return tuple(found)


class _Reader:
    """Reads one objective from left to right and knows where it stands."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0

    def read(self) -> Slo:
        metric = self.metric()
        statistic = self.statistic(metric)
        comparison = self.take("|".join(OPERATORS)) or self.fail(f"expected one of {' '.join(OPERATORS)}")
        number = float(self.take(r"\d+(\.\d*)?|\.\d+") or self.fail("expected a number"))
        limit, unit = self.unit(metric, number)
        return Slo(self.text, metric, statistic, comparison, limit, unit)

    def take(self, pattern: str) -> str:
        """What stands here if it matches, else the empty string."""
        blank = re.compile(r"\s*").match(self.text, self.position)
        self.position = blank.end() if blank else self.position
        match = re.compile(pattern).match(self.text, self.position)
        if match is None:
            return ""
        self.position = match.end()
        return match[0]

    def fail(self, problem: str, position: int | None = None) -> str:
        raise SloSyntaxError(self.text, self.position if position is None else position, problem)

    def metric(self) -> str:
        known = (*LATENCIES, "goodput", *SHARES, *RATES, *COUNTS)
        name = self.take(r"[A-Za-z_0-9]+") or self.fail("expected a metric")
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            self.fail(f"unknown metric {name!r}{hint}", self.position - len(name))
        return name

    def statistic(self, metric: str) -> str | None:
        allowed = _statistics_of(metric)
        colon = self.take(":")
        if not colon and not allowed:
            return None
        if not colon:
            self.fail(f"{metric} needs a statistic, for example {metric}:{'p99' if metric in LATENCIES else 'peak'}")
        if not allowed:
            self.fail(f"{metric} is one number and has no statistic", self.position - 1)
        start = self.position
        name = re.sub(r"^p\((.*)\)$", r"p\1", self.take(r"p\([0-9.]+\)|[A-Za-z0-9_.]+"))
        is_percentile = metric in LATENCIES and re.fullmatch(r"p\d+(\.\d+)?", name) is not None
        if not (name in allowed or is_percentile):
            self.fail(f"unknown statistic {name!r} of {metric}", start)
        if is_percentile and float(name[1:]) > 100:
            self.fail("a percentile must be from 0 to 100", start)
        return name

    def unit(self, metric: str, number: float) -> tuple[float, str]:
        start = self.position
        unit = self.text[start:].strip()
        if metric in LATENCIES and unit in LATENCY_UNITS_MS:
            return number * LATENCY_UNITS_MS[unit], "ms"
        if unit == "%" and metric in (*SHARES, "goodput"):
            return number, "%"
        if unit in ("/s", "req/s", "tok/s") and metric in (*RATES, "goodput"):
            return number, "/s"
        if not unit and metric in RATES:
            return number, "/s"
        if not unit and metric in (*COUNTS, "failed"):
            return number, ""
        expected = {"goodput": "% or /s", **dict.fromkeys(LATENCIES, "us, ms, s or min"), **dict.fromkeys(SHARES, "%")}
        expected |= {**dict.fromkeys(RATES, "/s or none"), **dict.fromkeys(COUNTS, "none"), "failed": "% or none"}
        self.fail(f"unit {unit!r} does not fit {metric}, which takes {expected[metric]}", start)
        raise AssertionError("unreachable")


def _statistics_of(metric: str) -> tuple[str, ...]:
    if metric in LATENCIES:
        return STATISTICS
    return MEAN_PEAK if metric in ("kv_usage", "kv_cached_usage") else ()
