"""The answer of a comparison in a few sentences: who leads, by how much, and where curves cross."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from windtunnel.reports.context import ReportContext
from windtunnel.reports.words import count, digits, milliseconds, percent, plural, seconds
from windtunnel.sim.metrics.comparison import (
    CONFIDENCE,
    LOAD_AXES,
    OFFERED,
    ComparedRun,
    ComparedRuns,
    ComparisonAxis,
    Crossing,
    Difference,
    Relation,
    are_level,
    metric,
)

CLEAR = 1.05
"""Ratio by which both variants must be ahead on their sides for a crossing to be worth a word in the answer."""
MOST_CROSSINGS = 3
"""Sentences on crossings in one metric in the answer; a report lists all of them further down."""
MOST_OTHERS = 4
MANY = 10
"""Factor from which on a change is told as a factor, not in percent."""


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
    seeds: tuple[int, ...] = ()
    """Of the replications of each run; empty for one."""


@dataclass(frozen=True, slots=True)
class ComparisonAnswer:
    """A headline and the sentences below it."""

    headline: str
    sentences: tuple[str, ...]


def answer(runs: ComparedRuns, relations: Sequence[Relation]) -> ComparisonAnswer:
    """What a reader wants to know first."""
    if all(run.summary is None for run in runs.runs):
        return ComparisonAnswer("No variant can be run.", tuple(_not_run(runs)))
    keys = [key for key in runs.metrics if not _is_offered_everywhere(runs, key)]
    if runs.axis is None:
        headline, found = _headline_of_leaders(runs, keys), [leading(runs, key) for key in keys]
    elif len(runs.variants) == 1:
        headline = _headline_of_axis(runs, runs.axis, keys)
        found = [_along(runs, runs.axis, key) for key in runs.metrics]
    else:
        headline = _headline_of_curves(runs, runs.axis, relations, keys)
        found = list(_told_first(runs, runs.axis, relations, keys))
    said = (*filter(None, found), *_differences(runs, keys), *_offered(runs), *_hopeless(runs), *_not_run(runs))
    return ComparisonAnswer(headline, said)


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
    """A change in percent, with its sign, or as a factor from ten on; nothing where there is none to state."""
    if change is None:
        return ""
    if not change:
        return "="
    if change >= MANY - 1:
        return f"x {digits(1 + change)}"
    return f"{100 * change:+.1f} %" if abs(change) >= 0.0005 else "≈ 0 %"


def within(found: Difference) -> str:
    """A change in percent with half its interval: +4.1 ±0.9 %; nothing over a zero."""
    share = found.share
    if share is None:
        return ""
    if found.absolute.low == found.absolute.high == 0:
        return "="
    if share.mean >= MANY - 1:
        return f"x {digits(1 + share.mean)}"
    return f"{100 * share.mean:+.1f} ±{100 * share.half_width:.1f} %"


def from_to(found: Difference) -> str:
    """A change in percent with its interval: +4.1 % (+3.2 to +5.0); in the metric's unit over a zero."""
    share = found.share
    if share is None:
        own = found.absolute
        return f"{own.mean:+,.3g} ({own.low:+,.3g} to {own.high:+,.3g})"
    return f"{100 * share.mean:+.1f} % ({100 * share.low:+.1f} to {100 * share.high:+.1f})"


def replicated_words(runs: ComparedRuns, seeds: Sequence[int]) -> str:
    """What the numbers and intervals are, in a sentence; nothing without replications."""
    if not seeds:
        return ""
    are = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    return (
        f"Numbers are means of {runs.num_replications} replications ({are}), changes those of pairs of one seed, with "
        f"half of the {percent(CONFIDENCE)} interval of their mean."
    )


def listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""


def names_of(runs: Iterable[ComparedRun]) -> list[str]:
    """Their variants."""
    return [run.variant for run in runs]


# --- without an axis


def _headline_of_leaders(runs: ComparedRuns, keys: Sequence[str]) -> str:
    """Who leads in the first metric, and who in the first latency."""
    judged = [key for key in keys if metric(key).better and runs.leaders(key)]
    shown = _one_of_a_kind(judged)
    if not shown:
        are_served = any(_is_offered_everywhere(runs, key) for key in runs.metrics)
        return "All serve what is offered." if are_served else f"{plural(len(runs.variants), 'variant')} side by side."
    first = {key: names_of(runs.leaders(key)) for key in shown}
    if all(len(names) == len(runs.variants) for names in first.values()):
        return f"All are level in {_listed_words(shown)}."
    leaders = list(dict.fromkeys(tuple(names) for names in first.values()))
    if len(leaders) == 1:
        return f"{_lead(leaders[0])} in {_listed_words(shown)}."
    told = [f"{_lead(tuple(names))} in {metric(key).words}" for key, names in first.items()]
    return f"{', '.join(told)}."


def _one_of_a_kind(keys: Sequence[str]) -> list[str]:
    """The first, and the first that is a latency if that is none, or the other way round."""
    return [*keys[:1], *[key for key in keys[1:] if metric(key).is_latency != metric(keys[0]).is_latency][:1]]


def _listed_words(keys: Sequence[str]) -> str:
    return listed([metric(key).words for key in keys])


def _lead(names: Sequence[str]) -> str:
    return f"{names[0]} leads" if len(names) == 1 else f"{listed(names)} are level"


def leading(runs: ComparedRuns, key: str, place: int = 0) -> str:
    """Who leads in a metric, and what the others have."""
    order, level, asked = runs.in_order(key, place), runs.leaders(key, place), metric(key)
    if not order:
        return f"No run has a {asked.words}."
    if not level:
        return f"Nobody leads in {asked.words}: {listed([_with_value(runs, run, key) for run in order])}."
    best = level[0].number(key) or 0.0
    extreme = {"higher": "Highest", "lower": "Lowest", "": "Largest"}[asked.better]
    text = f"{extreme} {asked.words}: {listed(names_of(level))}, {say(key, best)}"
    others = [_against(runs, run, best, key) for run in order if run not in level]
    if len(others) > MOST_OTHERS:
        others = [*others[: MOST_OTHERS - 2], f"{len(others) - MOST_OTHERS + 1} others between", others[-1]]
    return f"{text}; {', '.join(others)}." if others else f"{text}."


def _against(runs: ComparedRuns, run: ComparedRun, best: float, key: str) -> str:
    """How a run compares with the best: as a ratio, unless its latency only tells how long it was."""
    value = run.number(key) or 0.0
    if not runs.judges(key, run) or best <= 0 or value <= 0:
        return _with_value(runs, run, key)
    return f"{run.variant} {times(value / best)} that"


def _with_value(runs: ComparedRuns, run: ComparedRun, key: str) -> str:
    why = "" if runs.judges(key, run) else f" ({doubt(run)})"
    return f"{run.variant}{why} {say(key, run.number(key) or 0.0)}"


def doubt(run: ComparedRun) -> str:
    """Why latencies of a run are not to be ranked: it was overloaded, or so many requests failed."""
    if run.is_excessive:
        return "beyond capacity"
    return run.verdict if run.is_hopeless else f"{percent(run.number('failed_share'))} failed"


# --- one variant along an axis


def _headline_of_axis(runs: ComparedRuns, axis: ComparisonAxis, keys: Sequence[str]) -> str:
    """How far it keeps up, where more is more load, and where what else is judged is best."""
    limit = _limit_of_one(runs, axis)
    if limit:
        keys = [key for key in keys if key not in OFFERED and not metric(key).is_latency]
    bests: dict[str, list[str]] = {}
    for key in keys:
        if metric(key).better and (best := _distinct_best(runs, key)):
            bests.setdefault(_places(axis, [run.place for run in best]), []).append(key)
    told = [
        f"{'' if k or limit else 'best '}{_listed_words(of)} {place}" for k, (place, of) in enumerate(bests.items())
    ]
    if limit:
        told = [f"best {told[0]}", *told[1:]] if told else []
        return f"{'; '.join(filter(None, (limit, listed(told))))}."
    return f"{axis.key}: {listed(told)}." if told else f"{axis.key} makes no difference here."


def _limit_of_one(runs: ComparedRuns, axis: ComparisonAxis) -> str:
    """``Keeps up to request_rate 30, overloaded from 40 on``; nothing where the axis is no load."""
    if axis.key not in LOAD_AXES or axis.positions is None:
        return ""
    reached, failed = _limit(runs, axis, runs.variants[0])
    if reached is None:
        return f"Keeps up at no {axis.key}"
    how = f", {_state(failed)} from {axis.values[failed.place]} on" if failed else ", the highest tried"
    return f"Keeps up to {axis.key} {axis.values[reached]}{how}"


def _distinct_best(runs: ComparedRuns, key: str) -> list[ComparedRun]:
    """The runs that are level with the best; none if all are."""
    name = runs.variants[0]
    best, known = runs.best_along(key, name), runs.along(key, name)
    return best if len(best) < len(known) else []


def _places(axis: ComparisonAxis, places: Sequence[int]) -> str:
    """``at 5``, ``from 5 up``, ``up to 5``, ``from 2 to 5``, ``at 2 and 5``."""
    words, order = [axis.values[place] for place in places], axis.order
    ranks = sorted(order.index(place) for place in places if place in order)
    is_range = axis.positions is not None and len(ranks) == len(places) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1
    if not is_range:
        in_order = sorted(places, key=order.index) if len(ranks) == len(places) else places
        return f"at {listed([axis.values[place] for place in in_order])}" if words else ""
    low, high = axis.values[order[ranks[0]]], axis.values[order[ranks[-1]]]
    if ranks[-1] == len(order) - 1:
        return f"from {low} up"
    return f"up to {high}" if ranks[0] == 0 else f"from {low} to {high}"


def _along(runs: ComparedRuns, axis: ComparisonAxis, key: str) -> str:
    order, name = runs.along(key, runs.variants[0]), _title(key)
    if not order:
        return f"No run has a {metric(key).words}."
    if key in OFFERED and axis.key in LOAD_AXES and any(run.serves_what_is_offered for run in order):
        return _along_the_load(axis, name, key, order)
    best = _distinct_best(runs, key)
    if not best and len(runs.best_along(key, runs.variants[0])) == len(order):
        if all(run.serves_what_is_offered for run in order) and key in OFFERED:
            return ""
        return f"{name}: level at every value of {axis.key}, {say(key, order[0].number(key) or 0.0)}."
    words = ("highest", "lowest") if metric(key).better != "lower" else ("lowest", "highest")
    sign = 1 if words[0] == "lowest" else -1
    last = max(order, key=lambda run: sign * (run.number(key) or 0.0))
    worst = [run for run in order if run not in best and are_level(run.number(key) or 0.0, last.number(key) or 0.0)]
    told = [
        f"{word} {_at_value(runs, axis, found, key)}" for word, found in zip(words, (best, worst), strict=True) if found
    ]
    told += [f"not ranked {_places(axis, [run.place])} ({doubt(run)})" for run in _seemingly_better(runs, key, best)]
    return f"{name}: {', '.join(told)}."


def _seemingly_better(runs: ComparedRuns, key: str, best: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Runs whose latency looks better than the best, but may not be ranked."""
    if not best or not metric(key).is_latency:
        return []
    sign = 1 if metric(key).better == "lower" else -1
    limit = sign * (best[0].number(key) or 0.0)
    rest = [run for run in runs.along(key, runs.variants[0]) if not runs.judges(key, run)]
    return [run for run in rest if sign * (run.number(key) or 0.0) < limit]


def _at_value(runs: ComparedRuns, axis: ComparisonAxis, found: Sequence[ComparedRun], key: str) -> str:
    shown = found[-1]
    why = "" if runs.judges(key, shown) else f", {doubt(shown)}"
    return f"{_places(axis, [run.place for run in found])} ({say(key, shown.number(key) or 0.0)}{why})"


def _along_the_load(axis: ComparisonAxis, name: str, key: str, order: Sequence[ComparedRun]) -> str:
    served = [run.place for run in order if run.serves_what_is_offered]
    others = sorted((run for run in order if not run.serves_what_is_offered), key=lambda run: run.place)
    if not others:
        return f"{name}: what is offered, at every value of {axis.key}."
    rest = listed([f"{say(key, run.number(key) or 0.0)} at {axis.values[run.place]}" for run in others])
    return f"{name}: what is offered {_places(axis, served)}; {rest}."


def _title(key: str) -> str:
    return metric(key).label.partition(" (")[0]


# --- several variants along an axis


def _headline_of_curves(
    runs: ComparedRuns, axis: ComparisonAxis, relations: Sequence[Relation], keys: Sequence[str]
) -> str:
    """How much load each bears, who leads in all metrics, or in which ones, or where that changes."""
    limits = _limits(runs, axis)
    if limits:
        return limits
    judged = [key for key in keys if metric(key).better and _of(relations, key)]
    if not judged:
        return f"{plural(len(runs.variants), 'variant')} along {axis.key}, side by side."
    first = {key: _undefeated(runs, _of(relations, key)) for key in judged}
    if all(len(names) == len(runs.variants) for names in first.values()):
        return f"All are level in {_listed_words(judged)} at every value of {axis.key}."
    always = [name for name in runs.variants if all(name in names for names in first.values())]
    if always:
        by = listed([f"{metric(key).words}{_by_up_to(relations, key, always)}" for key in judged])
        return f"{listed(always)} {'is' if len(always) == 1 else 'are'} never behind over {axis.key} in {by}."
    return _headline_of_parts(runs, axis, relations, first)


def _headline_of_parts(
    runs: ComparedRuns, axis: ComparisonAxis, relations: Sequence[Relation], first: Mapping[str, Sequence[str]]
) -> str:
    """Who is never behind in which metrics, and what becomes of the others."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for key, names in first.items():
        if names and len(names) < len(runs.variants):
            groups.setdefault(tuple(names), []).append(key)
    open_keys = [key for key, names in first.items() if not names]
    crossing = _clearest_crossing(runs, [each for each in relations if each.metric in open_keys])
    cross = ""
    if crossing is not None:
        pair = f"{crossing.first} and {crossing.second}"
        cross = f"{pair} cross at {where(axis, crossing.at)} ({metric(crossing.metric).words})"
    if not groups:
        return f"{cross}." if cross else f"Who leads depends on {axis.key}."
    verbs = [" is ahead or level" if len(names) == 1 else " are ahead or level" for names in groups]
    told = [
        f"{listed(names)}{'' if k else verbs[0]} in {_listed_words(of)}" for k, (names, of) in enumerate(groups.items())
    ]
    led = f"{', '.join(told)} at every value of {axis.key}"
    rest = cross or (f"in {_listed_words(open_keys)} the leader changes" if open_keys else "")
    return f"{'; '.join(filter(None, (led, rest)))}."


def _limits(runs: ComparedRuns, axis: ComparisonAxis) -> str:
    """Up to which load each variant keeps up; nothing where the axis is no load, or where all bear the same."""
    if axis.key not in LOAD_AXES or axis.positions is None:
        return ""
    limits = {name: _limit(runs, axis, name) for name in runs.variants}
    reached = {name: -1 if limit is None else axis.order.index(limit) for name, (limit, _) in limits.items()}
    most = max(reached.values())
    if most < 0 or len(set(reached.values())) == 1:
        return ""
    best = [name for name in runs.variants if reached[name] == most]
    value = axis.values[axis.order[most]]
    tried = "" if any(limits[name][1] for name in best) else ", the highest tried"
    others: dict[str, list[str]] = {}
    for name in runs.variants:
        failed = limits[name][1]
        if name not in best and failed is not None:
            others.setdefault(f"{_state(failed)} from {axis.values[failed.place]} on", []).append(name)
    told = [f"{listed(names)} {'is' if len(names) == 1 else 'are'} {how}" for how, names in others.items()]
    verb = "keeps" if len(best) == 1 else "keep"
    return f"{listed(best)} {verb} up to {axis.key} {value}{tried}; {listed(told)}."


def _limit(runs: ComparedRuns, axis: ComparisonAxis, name: str) -> tuple[int | None, ComparedRun | None]:
    """The place of the highest load up to which a variant keeps up, and the first run that does not."""
    reached = None
    for place in axis.order:
        run = runs.run(name, place)
        if not runs.keeps_up(run):
            return reached, run
        reached = place
    return reached, None


def _state(run: ComparedRun) -> str:
    """What is wrong with a run that does not keep up."""
    if run.is_excessive:
        return "offered more than can be served"
    if run.is_hopeless or run.summary is None or run.verdict == "shedding":
        return {"shedding": "shedding load"}.get(run.verdict, run.verdict)
    return "losing requests"


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
    most = max((relation.advantages[1] for relation in best if relation.advantages), default=1.0)
    return f" (up to {times(most)} ahead)" if most > 1 else ""


def _clearest_crossing(runs: ComparedRuns, relations: Sequence[Relation]) -> Crossing | None:
    """Of the clear ones between two that both lead somewhere that on whose both sides most is won."""
    found = [
        crossing
        for relation in relations
        if {relation.first, relation.second} <= _leaders_somewhere(runs, relation.metric)
        for crossing in relation.crossings
        if _is_clear(crossing)
    ]
    return max(found, key=lambda each: min(each.advantage_before, each.advantage_after), default=None)


def _leaders_somewhere(runs: ComparedRuns, key: str) -> set[str]:
    return {run.variant for place in runs.places for run in runs.leaders(key, place)}


def _is_clear(crossing: Crossing) -> bool:
    return not crossing.is_hopeless and min(crossing.advantage_before, crossing.advantage_after) >= CLEAR


def _told_first(
    runs: ComparedRuns, axis: ComparisonAxis, relations: Sequence[Relation], keys: Sequence[str]
) -> Iterator[str]:
    """Metric by metric who leads, and which curves cross clearly."""
    for key in keys:
        mine = _of(relations, key)
        if len(runs.variants) == 2:
            yield from (relation_words(axis, relation) for relation in mine)
        elif mine:
            yield _leaders_along(runs, axis, mine)
            clear = [relation for relation in mine if any(map(_is_clear, relation.crossings))]
            yield from (relation_words(axis, relation) for relation in clear[:MOST_CROSSINGS])


def _leaders_along(runs: ComparedRuns, axis: ComparisonAxis, relations: Sequence[Relation]) -> str:
    key = relations[0].metric
    name, best = _title(key), _undefeated(runs, relations)
    if len(best) == len(runs.variants):
        return f"{name}: all are level at every value of {axis.key}."
    if len(best) == 1:
        own = [relation for relation in relations if best[0] in (relation.first, relation.second)]
        level = any(relation.num_level for relation in own)
        ratios = [(relation.advantages[1], _loser(relation)) for relation in own if relation.advantages]
        most = max(ratios, default=None)
        by = f", by up to {times(most[0])} ({most[1]})" if most and most[0] > 1 else ""
        return f"{name}: {best[0]} is ahead{' or level' if level else ''} at every value of {axis.key}{by}."
    where_ahead: dict[str, list[int]] = {}
    for place in axis.order:
        if runs.in_order(key, place):
            names = listed(names_of(runs.leaders(key, place))) or "nobody"
            where_ahead.setdefault(names, []).append(place)
    return f"{name}: {'; '.join(f'{names} {_places(axis, places)}' for names, places in where_ahead.items())}."


def _loser(relation: Relation) -> str:
    return relation.second if relation.ahead == relation.first else relation.first


def relation_words(axis: ComparisonAxis, relation: Relation) -> str:
    """How two variants stand to each other in a metric, in a sentence."""
    asked, pair = metric(relation.metric), f"{relation.first} and {relation.second}"
    if relation.crossings:
        return _crossing_words(axis, relation)
    if not relation.num_compared:
        if relation.num_undecided:
            return f"{pair} cannot be ranked in {asked.words}: {_WHY_NOT}."
        return f"{pair} have no {asked.words} in common."
    everywhere = f"at every value of {axis.key}{' at which they can be ranked' if relation.num_undecided else ''}"
    if relation.num_level == relation.num_compared:
        return f"{pair} are level in {asked.words} {everywhere}."
    if relation.ahead is None:
        return f"Which of {pair} is {_ahead_word(asked.better)} in {asked.words} depends on {axis.key}."
    loser = _loser(relation)
    none = "no crossing, " if axis.positions is not None else ""
    how = f"{_ahead_word(asked.better)}{' of' if asked.better else ' than'} {loser}"
    if relation.num_level:
        how += " or level with it"
    return f"{_title(relation.metric)}: {none}{relation.ahead} is {how} {everywhere}{_by(relation)}."


_WHY_NOT = "wherever both were run one would lead that was overloaded or lost requests, or both were such"


def _ahead_word(better: str) -> str:
    return "ahead" if better else "higher"


def _by(relation: Relation) -> str:
    if relation.advantages is None:
        return ""
    low, high = (times(ratio) for ratio in relation.advantages)
    if relation.advantages[1] == 1:
        return ""
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
        text += "; one of them is overloaded or loses requests there, so the place depends on how long the runs are"
    return f"{text}."


def _up_to(advantage: float) -> str:
    return f" (by up to {times(advantage)})" if isfinite(advantage) and advantage > 1 else ""


def where(axis: ComparisonAxis, position: float, *, with_label: bool = True) -> str:
    """A place on a numeric axis: ``request_rate ≈ 3.2``."""
    return f"{axis.label} ≈ {digits(position, 2)}" if with_label else digits(position, 2)


# --- differences between replications


MOST_DIFFERENCES = 6
"""Sentences on differences in the answer; tables and figures have all of them."""


def _differences(runs: ComparedRuns, keys: Sequence[str]) -> Iterator[str]:
    """How each variant differs from the baseline, with intervals."""
    others = [run for run in runs.runs if run.variant != runs.baseline and run.replications]
    if len(others) > MOST_DIFFERENCES:
        return
    for run in others:
        found = [each for key in keys if (each := runs.difference(run, key)) is not None]
        if found:
            at = "" if runs.axis is None else f" at {runs.axis.key} {runs.axis.values[run.place]}"
            told = "; ".join(_difference_words(each) for each in found)
            yield f"{run.variant} against {runs.baseline}{at}, with {percent(CONFIDENCE)} intervals: {told}."


def _difference_words(found: Difference) -> str:
    return f"{metric(found.key).words} {from_to(found)}{', within noise' if found.is_noise else ''}"


# --- what not to rely on


def _is_offered_everywhere(runs: ComparedRuns, key: str) -> bool:
    """Whether a number only shows what is offered, at every place at which somebody has it."""
    places = [place for place in runs.places if runs.in_order(key, place)]
    is_told = len(runs.variants) > 1 or (runs.axis is not None and runs.axis.key not in LOAD_AXES)
    return is_told and bool(places) and all(runs.is_offered(key, place) for place in places)


def _offered(runs: ComparedRuns) -> Iterator[str]:
    """Where throughput does not tell variants apart, and what would."""
    keys = [key for key in runs.metrics if key in OFFERED]
    if len(runs.variants) == 1 and (runs.axis is None or runs.axis.key in LOAD_AXES):
        return
    places = [place for place in runs.places if keys and runs.is_offered(keys[0], place)]
    if not places:
        return
    who = "Both serve" if len(runs.variants) == 2 and runs.axis is None else "All serve"
    there = "" if len(places) == len(runs.places) else " there"
    told = f"{who} what is offered{_at(runs, places)}: {_listed_words(keys)} cannot tell them apart{there}"
    if any(run.number("capacity") is None for run in runs.runs if run.summary is not None):
        told += "; their capacity would, but it is not known (saturation = true measures it)"
    yield f"{told}."


def _hopeless(runs: ComparedRuns) -> Iterator[str]:
    advice = "Latencies there describe the length of the run, not the system."
    for verdict in ("overloaded", "stalled"):
        yield from _where(runs, verdict.capitalize(), advice, [run for run in runs.runs if run.verdict == verdict])
    excess = "Too short, but more is offered than can be served"
    yield from _where(runs, excess, advice, [run for run in runs.runs if run.is_excessive])


def _where(runs: ComparedRuns, what: str, advice: str, found: Sequence[ComparedRun]) -> Iterator[str]:
    own = {name: [run.place for run in found if run.variant == name] for name in runs.variants}
    told = [f"{name}{_at(runs, places)}" for name, places in own.items() if places]
    if told:
        yield f"{what}: {'; '.join(told)}. {advice}"


def failures(runs: ComparedRuns) -> Iterator[str]:
    """A warning for each variant of which requests failed."""
    for name in runs.variants:
        failed = [run for run in runs.runs if run.variant == name and run.number("failed_share")]
        if not failed:
            continue
        kinds = [kind for kind in ("rejected", "aborted", "unfinished") if any(run.number(kind) for run in failed)]
        why = f" ({', '.join(kinds)})" if kinds else ""
        first, *more = [percent(run.number("failed_share")) for run in failed]
        at = "" if runs.axis is None else f" at {runs.axis.key} {runs.axis.values[failed[0].place]}"
        values = [] if runs.axis is None else [runs.axis.values[run.place] for run in failed[1:]]
        rest = "".join(f", {share} at {value}" for share, value in zip(more, values, strict=True))
        yield (f"{name}: {first} of the requests did not finish{at}{rest}{why}; its latencies are those of the others.")


def _not_run(runs: ComparedRuns) -> Iterator[str]:
    for name in runs.variants:
        failed = [run for run in runs.runs if run.variant == name and run.summary is None]
        for verdict in dict.fromkeys(run.verdict for run in failed):
            mine = [run for run in failed if run.verdict == verdict]
            reason = mine[0].infeasible.splitlines()[0].removeprefix(f"variant {name!r}: ")
            yield f"{verdict.capitalize()}: {name}{_at(runs, [run.place for run in mine])}: {reason}"


def _at(runs: ComparedRuns, places: Sequence[int]) -> str:
    """Which values of the axis; nothing if there is none, or all of them."""
    if runs.axis is None:
        return ""
    if len(places) == len(runs.places):
        return f" at every value of {runs.axis.key}"
    return f" at {runs.axis.key} {listed([runs.axis.values[place] for place in places])}"
