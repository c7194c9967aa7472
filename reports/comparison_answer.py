"""The answer of a comparison in a few sentences: who leads, by how much, and where curves cross."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from windtunnel.reports.context import ReportContext
from windtunnel.reports.words import count, digits, milliseconds, percent, plural, seconds
from windtunnel.sim.metrics.comparison import (
    ComparedRun,
    ComparedRuns,
    ComparisonAxis,
    Crossing,
    Relation,
    are_level,
    metric,
)

CLEAR = 1.05
"""Ratio by which both variants must be ahead on their sides for a crossing to be worth a word in the answer."""
MOST_CROSSINGS = 3
"""Sentences on crossings in one metric in the answer; a report lists all of them further down."""
MOST_OTHERS = 4


@dataclass(frozen=True, slots=True)
class DifferingSetting:
    """A setting that is not the same in all runs."""

    section: str
    key: str
    values: Mapping[str, tuple[Any, ...]]
    """Per variant its values along the axis, each once; nothing where the deployment is infeasible."""


@dataclass(frozen=True, slots=True)
class ComparisonContext:
    """Names, settings and origins that the summaries do not hold."""

    common: ReportContext
    """What is the same in all runs; names that differ are joined."""
    description: str = ""
    teaches: str = ""
    """What the scenario is there to show."""
    differing: tuple[DifferingSetting, ...] = ()
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Per variant what was asked for."""


@dataclass(frozen=True, slots=True)
class ComparisonAnswer:
    """A headline and the sentences below it."""

    headline: str
    sentences: tuple[str, ...]
    tone: str
    """good, note or bad: whether all of the runs can be relied on, some, or none."""


def answer(runs: ComparedRuns, relations: Sequence[Relation]) -> ComparisonAnswer:
    """What a reader wants to know first."""
    if all(run.summary is None for run in runs.runs):
        return ComparisonAnswer("No variant can be run.", tuple(_infeasible(runs)), "bad")
    if runs.axis is None:
        headline, found = _headline_of_leaders(runs), [leading(runs, key) for key in runs.metrics]
    elif len(runs.variants) == 1:
        headline, found = _headline_of_axis(runs, runs.axis), [_along(runs, runs.axis, key) for key in runs.metrics]
    else:
        headline, found = _headline_of_curves(runs, runs.axis, relations), list(_told_first(runs, runs.axis, relations))
    return ComparisonAnswer(headline, (*filter(None, found), *_hopeless(runs), *_infeasible(runs)), _tone(runs))


def _tone(runs: ComparedRuns) -> str:
    doubtful = [run.is_hopeless or run.summary is None for run in runs.runs]
    return "bad" if all(doubtful) else "note" if any(doubtful) else "good"


# --- words


def say(key: str, value: float) -> str:
    """A value with its unit: 1.24 s, 1,234 tok/s, 12 %."""
    unit = metric(key).unit
    match unit:
        case "ms":
            return milliseconds(value)
        case "s":
            return seconds(value)
        case "%":
            return percent(value)
    return f"{count(value)} {unit}".rstrip()


def times(ratio: float) -> str:
    """A ratio with as many digits as it needs to be told from 1: 0.97x, 1.03x, 2.1x, 23x."""
    if abs(ratio - 1) < 0.5:
        return f"{ratio:.2f}x"
    return f"{digits(ratio, 2)}x"


def changed(change: float | None) -> str:
    """A change in percent, with its sign; nothing where there is none to state."""
    if change is None:
        return ""
    if not change:
        return "="
    if abs(change) >= 10:
        return f"{100 * change:+,.0f} %"
    return f"{100 * change:+.1f} %" if abs(change) >= 0.0005 else "≈ 0 %"


def listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""


# --- without an axis


def _headline_of_leaders(runs: ComparedRuns) -> str:
    """Who leads in the first metric, and who in the first latency."""
    judged = [key for key in runs.metrics if metric(key).better and runs.leaders(key)]
    shown = judged[:1] + [key for key in judged[1:] if metric(key).is_latency != metric(judged[0]).is_latency][:1]
    if not shown:
        return f"{plural(len(runs.variants), 'variant')} side by side."
    first = {key: [run.variant for run in _level_with_best(runs, key)] for key in shown}
    if all(len(names) == len(runs.variants) for names in first.values()):
        return f"All are level in {listed([metric(key).words for key in shown])}."
    leaders = list(dict.fromkeys(tuple(names) for names in first.values()))
    if len(leaders) == 1:
        return f"{_lead(leaders[0])} in {listed([metric(key).words for key in shown])}."
    told = [f"{_lead(tuple(names))} in {metric(key).words}" for key, names in first.items()]
    return f"{', '.join(told)}."


def _lead(names: Sequence[str]) -> str:
    return f"{names[0]} leads" if len(names) == 1 else f"{listed(names)} are level"


def _level_with_best(runs: ComparedRuns, key: str, place: int = 0) -> list[ComparedRun]:
    order = runs.leaders(key, place)
    best = order[0].number(key) or 0.0
    return [run for run in order if run.is_hopeless == order[0].is_hopeless and are_level(run.number(key) or 0.0, best)]


def leading(runs: ComparedRuns, key: str, place: int = 0) -> str:
    """Who leads in a metric, and what the others have."""
    order, asked = runs.leaders(key, place), metric(key)
    if not order:
        return f"No run has a {asked.words}."
    level = _level_with_best(runs, key, place)
    value = order[0].number(key) or 0.0
    extreme = {"higher": "Highest", "lower": "Lowest", "": "Largest"}[asked.better]
    text = f"{extreme} {asked.words}: {listed([_with_verdict(run, key) for run in level])}, {say(key, value)}"
    others = [
        f"{_with_verdict(run, key)} {_against(run.number(key) or 0.0, value, key)}" for run in order[len(level) :]
    ]
    if len(others) > MOST_OTHERS:
        others = [*others[: MOST_OTHERS - 2], f"{len(others) - MOST_OTHERS + 1} others between", others[-1]]
    return f"{text}; {', '.join(others)}." if others else f"{text}."


def _against(value: float, best: float, key: str) -> str:
    return f"{times(value / best)} that" if best > 0 and value > 0 else say(key, value)


def _with_verdict(run: ComparedRun, key: str) -> str:
    return f"{run.variant} ({run.verdict})" if run.is_hopeless and metric(key).is_latency else run.variant


# --- one variant along an axis


def _headline_of_axis(runs: ComparedRuns, axis: ComparisonAxis) -> str:
    bests = [(key, found[0]) for key in runs.metrics if metric(key).better and (found := _distinct_best(runs, key))]
    if not bests:
        return f"{axis.key} makes no difference here."
    told = [
        f"{'best ' if not k else ''}{metric(key).words} at {axis.values[run.place]}"
        for k, (key, run) in enumerate(bests[:2])
    ]
    text = f"{axis.key}: {listed(told)}"
    return f"{text[:1]}{text[1:]}."


def _distinct_best(runs: ComparedRuns, key: str) -> list[ComparedRun]:
    """Best first; empty if all are level."""
    order = runs.best(key, runs.variants[0])
    values = [run.number(key) or 0.0 for run in order]
    return [] if not order or are_level(min(values), max(values)) else order


def _along(runs: ComparedRuns, axis: ComparisonAxis, key: str) -> str:
    order = _distinct_best(runs, key)
    name = metric(key).label.partition(" (")[0]
    if not order:
        values = runs.numbers(key)
        return (
            f"{name}: level at every value of {axis.key}, {say(key, values[0])}."
            if values
            else f"No run has a {metric(key).words}."
        )
    best, worst = order[0], order[-1]
    words = ("highest", "lowest") if metric(key).better != "lower" else ("lowest", "highest")
    return (
        f"{name}: {words[0]} at {axis.values[best.place]} ({say(key, best.number(key) or 0.0)}), "
        f"{words[1]} at {axis.values[worst.place]} ({say(key, worst.number(key) or 0.0)})."
    )


# --- several variants along an axis


def _headline_of_curves(runs: ComparedRuns, axis: ComparisonAxis, relations: Sequence[Relation]) -> str:
    """Who leads all along, or where that changes."""
    judged = [key for key in runs.metrics if metric(key).better and _of(relations, key)]
    shown = judged[:1] + [key for key in judged[1:] if metric(key).is_latency != metric(judged[0]).is_latency][:1]
    first = {key: _undefeated(runs, _of(relations, key)) for key in shown}
    if shown and all(len(names) == len(runs.variants) for names in first.values()):
        return f"All are level in {listed([metric(key).words for key in shown])} at every value of {axis.key}."
    if shown and first[shown[0]] and all(names == first[shown[0]] for names in first.values()):
        names = first[shown[0]]
        by = listed([_by_up_to(relations, key, names) for key in shown])
        return f"{listed(names)} {'is' if len(names) == 1 else 'are'} never behind over {axis.key}: {by}."
    crossing = _clearest_crossing(relations)
    if crossing is not None:
        pair = f"{crossing.first} and {crossing.second}"
        return f"{pair} cross at {where(axis, crossing.at)} ({metric(crossing.metric).words})."
    told = [f"{listed(names)} in {metric(key).words}" for key, names in first.items() if names]
    if told:
        return f"Ahead or level at every value of {axis.key}: {', '.join(told)}."
    return f"Who leads depends on {axis.key}."


def _of(relations: Sequence[Relation], key: str) -> list[Relation]:
    return [relation for relation in relations if relation.metric == key and relation.num_compared]


def _undefeated(runs: ComparedRuns, relations: Sequence[Relation]) -> list[str]:
    """The variants that no other is ahead of anywhere, of those that can be compared."""
    known = {name for relation in relations for name in (relation.first, relation.second)}
    return [
        name for name in runs.variants if name in known and not any(_beats(relation, name) for relation in relations)
    ]


def _beats(relation: Relation, name: str) -> bool:
    """Whether the other one of the two is ahead of this one somewhere."""
    if name not in (relation.first, relation.second) or relation.num_level == relation.num_compared:
        return False
    return relation.ahead != name


def _by_up_to(relations: Sequence[Relation], key: str, names: Sequence[str]) -> str:
    best = [relation for relation in _of(relations, key) if relation.ahead in names and relation.advantages]
    most = max((relation.advantages[1] for relation in best if relation.advantages), default=None)
    return f"up to {times(most)} ahead in {metric(key).words}" if most else f"ahead in {metric(key).words}"


def _clearest_crossing(relations: Sequence[Relation]) -> Crossing | None:
    """Of the clear ones that on whose both sides most is won; one that depends on the runs' length only if all do."""
    found = [crossing for relation in relations for crossing in relation.crossings if _is_clear(crossing)]
    return max(
        found, key=lambda each: (not each.is_hopeless, min(each.advantage_before, each.advantage_after)), default=None
    )


def _is_clear(crossing: Crossing) -> bool:
    return min(crossing.advantage_before, crossing.advantage_after) >= CLEAR


def _told_first(runs: ComparedRuns, axis: ComparisonAxis, relations: Sequence[Relation]) -> Iterator[str]:
    """Metric by metric who leads, and which curves cross clearly."""
    for key in runs.metrics:
        mine = _of(relations, key)
        if len(runs.variants) == 2:
            yield from (relation_words(axis, relation) for relation in mine)
        elif mine:
            yield _leaders_along(runs, axis, mine)
            clear = [relation for relation in mine if any(map(_is_clear, relation.crossings))]
            yield from (relation_words(axis, relation) for relation in clear[:MOST_CROSSINGS])


def _leaders_along(runs: ComparedRuns, axis: ComparisonAxis, relations: Sequence[Relation]) -> str:
    key = relations[0].metric
    name, best = metric(key).label.partition(" (")[0], _undefeated(runs, relations)
    if len(best) == len(runs.variants):
        return f"{name}: all are level at every value of {axis.key}."
    if len(best) == 1:
        own = [relation for relation in relations if best[0] in (relation.first, relation.second)]
        level = any(relation.num_level for relation in own)
        most = (
            max((relation.advantages[1], _loser(relation)) for relation in own if relation.advantages)
            if all(relation.advantages for relation in own)
            else None
        )
        by = f", by up to {times(most[0])} ({most[1]})" if most else ""
        return f"{name}: {best[0]} is ahead{' or level' if level else ''} at every value of {axis.key}{by}."
    where_ahead: dict[str, list[str]] = {}
    for place in axis.order:
        if runs.leaders(key, place):
            names = listed([run.variant for run in _level_with_best(runs, key, place)])
            where_ahead.setdefault(names, []).append(axis.values[place])
    return f"{name}: {'; '.join(f'{names} at {listed(values)}' for names, values in where_ahead.items())}."


def _loser(relation: Relation) -> str:
    return relation.second if relation.ahead == relation.first else relation.first


def relation_words(axis: ComparisonAxis, relation: Relation) -> str:
    """How two variants stand to each other in a metric, in a sentence."""
    asked, pair = metric(relation.metric), f"{relation.first} and {relation.second}"
    if relation.crossings:
        return _crossing_words(axis, relation)
    if not relation.num_compared:
        return f"{pair} have no {asked.words} in common."
    if relation.num_level == relation.num_compared:
        return f"{pair} are level in {asked.words} at every value of {axis.key}."
    if relation.ahead is None:
        return f"Which of {pair} is {_ahead_word(asked.better)} in {asked.words} depends on {axis.key}."
    loser = _loser(relation)
    none = "no crossing, " if axis.positions is not None else ""
    how = f"{_ahead_word(asked.better)}{' of' if asked.better else ' than'} {loser}"
    if relation.num_level:
        how += " or level with it"
    name = asked.label.partition(" (")[0]
    return f"{name}: {none}{relation.ahead} is {how} at every value of {axis.key}{_by(relation)}."


def _ahead_word(better: str) -> str:
    return "ahead" if better else "higher"


def _by(relation: Relation) -> str:
    if relation.advantages is None:
        return ""
    low, high = (times(ratio) for ratio in relation.advantages)
    if relation.num_level:
        return f", by up to {high}"
    return f", by {low}" if low == high else f", by {low} … {high}"


def _crossing_words(axis: ComparisonAxis, relation: Relation) -> str:
    first = relation.crossings[0]
    places = listed([where(axis, crossing.at, with_label=not k) for k, crossing in enumerate(relation.crossings)])
    text = f"{relation.first} and {relation.second} cross at {places} ({metric(relation.metric).words}): "
    ahead = _ahead_word(metric(relation.metric).better)
    text += f"{first.ahead_before} is {ahead} below{_up_to(first.advantage_before)}"
    text += f", {first.ahead_after} above{_up_to(first.advantage_after)}"
    if len(relation.crossings) > 1:
        text += " until the next"
    if any(crossing.is_hopeless for crossing in relation.crossings):
        text += "; one of them is overloaded there, so the place depends on how long the runs are"
    return f"{text}."


def _up_to(advantage: float) -> str:
    return f" (by up to {times(advantage)})" if isfinite(advantage) else ""


def where(axis: ComparisonAxis, position: float, *, with_label: bool = True) -> str:
    """A place on a numeric axis: ``request_rate ≈ 3.2``."""
    return f"{axis.label} ≈ {digits(position, 2)}" if with_label else digits(position, 2)


# --- what not to rely on


def _hopeless(runs: ComparedRuns) -> Iterator[str]:
    for verdict in ("overloaded", "stalled"):
        found = [
            f"{name}{_at(runs, places)}"
            for name in runs.variants
            if (places := [run.place for run in runs.runs if run.variant == name and run.verdict == verdict])
        ]
        if found:
            advice = "Latencies there describe the length of the run, not the system."
            yield f"{verdict.capitalize()}: {'; '.join(found)}. {advice}"


def _infeasible(runs: ComparedRuns) -> Iterator[str]:
    for name in runs.variants:
        failed = [run for run in runs.runs if run.variant == name and run.summary is None]
        if failed:
            places = [run.place for run in failed]
            yield f"Infeasible: {name}{_at(runs, places)}: {failed[0].infeasible.splitlines()[0]}"


def _at(runs: ComparedRuns, places: Sequence[int]) -> str:
    """Which values of the axis; nothing if there is none, or all of them."""
    if runs.axis is None:
        return ""
    if len(places) == len(runs.places):
        return f" at every value of {runs.axis.key}"
    return f" at {runs.axis.key} {listed([runs.axis.values[place] for place in places])}"
