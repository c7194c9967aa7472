"""The answer of a validation in a few sentences, and its numbers in words."""

from __future__ import annotations

from collections.abc import Iterator
from math import isinf
from typing import NamedTuple

from windtunnel.reports.words import NOTHING, count, milliseconds, percent, plural, seconds, verb
from windtunnel.sim.metrics.agreement import Agreement, Attribution, Effect, Headline, MetricError

MAIN = ("throughput:output", "ttft:mean", "tpot:mean", "e2el:mean", "preemptions")
"""What is told first, and without limits judged."""
_MOSTLY = 0.7
"""Share of an error that leaves little to explain."""


class ValidationAnswer(NamedTuple):
    """A headline, the sentences below it, and whether it is good news: good, note or bad."""

    headline: str
    sentences: tuple[str, ...]
    tone: str


def answer(agreement: Agreement) -> ValidationAnswer:
    """What a reader wants to know first."""
    sentences = (
        _numbers(agreement),
        _spread(agreement),
        *_missed(agreement),
        *_first_causes(agreement),
    )
    return ValidationAnswer(_headline(agreement), tuple(each for each in sentences if each), _tone(agreement))


def _headline(agreement: Agreement) -> str:
    if agreement.passed is None:
        worst = _worst_of_main(agreement)
        if worst is None:
            return "Nothing could be compared"
        return f"The main numbers are off by {error_words(worst, signed=False)} at most"
    kept = sum(bool(each.passed) for each in agreement.limited)
    number = len(agreement.limited)
    return "The prediction holds" if agreement.passed else f"The prediction misses {number - kept} of {number} limits"


def _worst_of_main(agreement: Agreement) -> MetricError | None:
    known = [each for key in MAIN if (each := agreement.error(key)) is not None and not isinf(each.error or 0.0)]
    return max(known, key=lambda each: abs(each.error or 0.0), default=None)


def _tone(agreement: Agreement) -> str:
    if agreement.passed is None:
        return "note"
    return "good" if agreement.passed else "bad"


def _numbers(agreement: Agreement) -> str:
    told = [f"{spoken(each)} {error_words(each)}" for key in MAIN if (each := agreement.error(key)) is not None]
    return f"Predicted against live: {'; '.join(told)}." if told else ""


def _spread(agreement: Agreement) -> str:
    if agreement.num_live_runs < 2:
        return "There is one live run, so how far live runs lie apart is not known (--repeats)."
    known = [each for each in agreement.errors if each.is_within_spread is not None]
    inside = sum(bool(each.is_within_spread) for each in known)
    return (
        f"Of {plural(len(known), 'number')}, {inside} {verb(inside, 'is', 'are')} no further off than one of the "
        f"{agreement.num_live_runs} live runs is from their mean."
    )


def _missed(agreement: Agreement) -> Iterator[str]:
    missed = [each for each in agreement.limited if not each.passed]
    if missed:
        told = "; ".join(f"{spoken(each)} {error_words(each)} (limit {percent(each.limit)})" for each in missed[:4])
        more = f"; and {len(missed) - 4} more" if len(missed) > 4 else ""
        yield f"Missed: {told}{more}."


def _first_causes(agreement: Agreement) -> Iterator[str]:
    """Requests that failed go first among the causes; a second cause is told where one alone does not explain most."""
    number = 1 if _one_explains(agreement) else 2
    yield from agreement.causes[: number + bool(agreement.num_failed)]


def _one_explains(agreement: Agreement) -> bool:
    """Whether one ingredient takes most of every error away; without an attribution one cause is enough."""
    attribution = agreement.attribution
    if attribution is None:
        return True
    wrong = [each for each in attribution.headlines if each.is_wrong]
    return any(
        all(_MOSTLY <= (attribution.explained(effect, each) or 0.0) <= 2 - _MOSTLY for each in wrong)
        for effect in attribution.effects
    )


def spoken(error: MetricError) -> str:
    """A metric inside a sentence: ``mean TTFT``, ``output throughput``, ``KV usage over time``."""
    metric, _, statistic = error.name.partition(", ")
    if metric.split()[0][1:].islower():
        metric = metric[:1].lower() + metric[1:]
    if not statistic:
        return metric
    return f"{metric} over time" if error.statistic == "over_time" else f"{statistic} {metric}"


def error_words(error: MetricError, *, signed: bool = True) -> str:
    """``+2.1 %``, ``-0.4 points``, or that there was nothing to divide by."""
    return share_words(error.error, in_points=error.in_points, signed=signed and error.statistic != "over_time")


def share_words(share: float | None, *, in_points: bool = False, signed: bool = True) -> str:
    """A relative error, or a difference of two shares in points of percent."""
    if share is None:
        return NOTHING
    if isinf(share):
        return "live is 0"
    value = 100 * share if signed else abs(100 * share)
    text = f"{value:+.1f}" if signed else f"{value:.1f}"
    return f"{'0.0' if text in ('-0.0', '+0.0') else text} {'points' if in_points else '%'}"


def effect_words(attribution: Attribution, effect: Effect, headline: Headline) -> str:
    """The share of an error that an ingredient takes away; where large effects cancel each other, what each does."""
    if not attribution.has_opposing_effects(headline):
        return share_words(attribution.explained(effect, headline))
    change = effect.change(headline.key)
    if not headline.live:
        return f"{change:+.1f}"
    return share_words(change / headline.live, in_points=True)


def rest_words(attribution: Attribution, headline: Headline) -> str:
    """What is left of an error, in the terms of ``effect_words``."""
    rest = attribution.rest(headline)
    if rest is None or not attribution.has_opposing_effects(headline):
        return share_words(rest)
    left = rest * (headline.predicted - headline.live)
    return share_words(left / headline.live, in_points=True) if headline.live else f"{left:+.1f}"


def opposing_note(attribution: Attribution) -> str:
    """How to read a table with effects that cancel each other; empty if there are none."""
    if not any(map(attribution.has_opposing_effects, attribution.headlines)):
        return ""
    return (
        "Points: by how much the prediction changes, in percent of the live number, where large opposite effects leave "
        "a small error of which shares say nothing; left is the error that remains."
    )


def interval_words(error: MetricError) -> str:
    """``-1.2 … +3.4 %``."""
    if error.interval is None:
        return NOTHING
    low, high = error.interval
    return f"{100 * low:+.1f} … {100 * high:+.1f} %"


def spread_words(error: MetricError) -> str:
    """``± 1.3 %``."""
    return (
        NOTHING if error.spread is None else f"± {share_words(error.spread, in_points=error.in_points, signed=False)}"
    )


def value_words(value: float | None, unit: str) -> str:
    """A number with its unit."""
    if value is None:
        return NOTHING
    if unit == "ms":
        return milliseconds(value)
    if unit == "s":
        return seconds(value)
    if unit == "%":
        return percent(value)
    return f"{count(value)} {unit}".strip()


def verdict_words(error: MetricError) -> str:
    """``kept``, ``missed``, or nothing without a limit."""
    if error.passed is None:
        return ""
    return "kept" if error.passed else "missed"
