"""The answer of a sweep in a few sentences: which value to take, what it does, where that stops, what is at risk."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import NamedTuple

from windtunnel.reports.sweep_data import (
    COMES_FIRST,
    Best,
    Knee,
    Swept,
    SweptAxis,
    SweptPoint,
    fall,
    measure,
    paired,
    say,
)
from windtunnel.reports.words import digits, percent, plural, verb
from windtunnel.sim.metrics.comparison import MOST_FAILED

MOST_EFFECTS = 6
MOST_KNEES = 4
MOST_REASONS = 1
MOST_NAMED = 8
CHANGED = 0.02
"""Share of its start by which a number must change to be told."""


class SweepAnswer(NamedTuple):
    """A headline and the sentences below it, by what they are about."""

    headline: str
    tone: str
    """good, note or bad."""
    effects: tuple[str, ...]
    """What the settings do, and where that stops."""
    risks: tuple[str, ...]
    """What may go wrong with the answer."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.effects, *self.risks)


def answer(swept: Swept) -> SweepAnswer:
    """What a reader wants to know first."""
    headline, tone = _headline(swept)
    effects = (*_level(swept), *_effects(swept), *_knees(swept))
    return SweepAnswer(headline, tone, effects, tuple(_risks(swept)))


# --- headline


def _headline(swept: Swept) -> tuple[str, str]:
    if not swept.feasible:
        return "Nothing of this starts.", "bad"
    best = swept.best
    if best is None:
        if swept.objectives:
            return f"No point keeps the objectives ({', '.join(swept.objectives)}){_nearest(swept)}.", "bad"
        return f"{plural(len(swept.feasible), 'point')} ran, and none has a {measure(swept.best_by).words}.", "note"
    told = f"{say_in(best.by, best.point)}"
    if best.is_under_slo:
        return f"Best under the objectives: {best.point.name}, with {told}.", "good"
    if best.level and len(best.level) == len(swept.feasible) - 1 and len(swept.feasible) > 1:
        level = f"{measure(best.by).words} {_is_level(swept)} everywhere"
        if best.tie_break == COMES_FIRST:
            return f"{_cap(level)}: {say_with_noise(best.by, best.point)}.", "note"
        return f"{best.point.name} {best.tie_break}; {level}.", "note"
    way = "Lowest" if measure(best.by).better == "lower" else "Highest"
    value = say_with_noise(best.by, best.point)
    return f"{way} {measure(best.by).words} at {best.point.name}: {value}.", "note" if _is_risky(best) else "good"


def _nearest(swept: Swept) -> str:
    """Which points keep them most often, where that is in some replications at least."""
    most = max((point.num_held or 0 for point in swept.feasible), default=0)
    if not most:
        return ""
    return f" in all {len(swept.seeds)} replications: {most} at most"


def _is_risky(best: Best) -> bool:
    return best.point.is_unsafe or best.point.is_hopeless or (best.point.mean("failed_share") or 0.0) > MOST_FAILED


def say_in(key: str, point: SweptPoint) -> str:
    """``output token throughput 4,512 tok/s ± 31``."""
    return f"{measure(key).words} {say_with_noise(key, point)}"


def say_with_noise(key: str, point: SweptPoint) -> str:
    """``4,512 tok/s ± 31``: the mean, and half of its interval where there are replications."""
    interval = point.interval(key)
    if interval is None:
        return "–"
    told = say(key, interval.mean)
    half = interval.half_width
    if not isfinite(half) or half <= 0:
        return told
    noise = say(key, half)
    (value, _, unit), (spread, _, same) = told.partition(" "), noise.partition(" ")
    return f"{value} ± {spread} {unit}".strip() if unit == same else f"{told} ± {noise}"


# --- what it does


def _level(swept: Swept) -> Iterator[str]:
    best = swept.best
    if best is None or not best.level:
        return
    yield (
        f"{_cap(measure(best.by).words)} {_is_level(swept)} at {plural(len(best.level), 'other point')} "
        f"({_named(list(best.level))}); of these, {best.point.name} {best.tie_break}."
    )


def _is_level(swept: Swept) -> str:
    """What being level means here; single runs know no noise."""
    return "is level within noise" if len(swept.seeds) > 1 else "differs by less than 1 %"


def _effects(swept: Swept) -> Iterator[str]:
    """From the first to the last point of each curve, what changes beyond noise."""
    if swept.is_scattered:
        return
    for curve in swept.curves()[:MOST_NAMED]:
        runs = [point for point in curve.points if not point.infeasible]
        if len(runs) < 2:
            continue
        told = [text for key in swept.shown() if (text := _effect(key, runs[0], runs[-1]))][:MOST_EFFECTS]
        unchanged = [key for key in swept.shown() if key != "num_gpus" and not _effect(key, runs[0], runs[-1])]
        first, last = (point.words[swept.x_axis.key] for point in (runs[0], runs[-1]))
        where = f" ({curve.name})" if curve.name else ""
        parts = [*([", ".join(told)] if told else []), *_unchanged(unchanged, runs[0], runs[-1])]
        if parts:
            yield f"From {swept.x_axis.key} {first} to {last}{where}: {'; '.join(parts)}."
    for axis in swept.axes:
        if axis is not swept.x_axis and not swept.is_zipped:
            yield from _effects_across(swept, axis)


def _unchanged(keys: list[str], first: SweptPoint, last: SweptPoint) -> Iterator[str]:
    """What changes little, and what may change but cannot be told from noise."""
    little = [key for key in keys if _is_little(first.mean(key), last.mean(key))]
    noisy = [key for key in keys if key not in little and first.values(key) and last.values(key)]
    for found, change, changes, how in (
        (little, "hardly change", "hardly changes", f"(less than {100 * CHANGED:g} %)"),
        (noisy, "change", "changes", "within noise only"),
    ):
        words = [measure(key).words for key in found]
        if words:
            yield f"{_listed(words)} {change if len(words) > 1 or words[0].endswith('s') else changes} {how}"


def _is_little(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and abs(b - a) <= CHANGED * max(abs(a), abs(b))


def _effects_across(swept: Swept, axis: SweptAxis) -> Iterator[str]:
    """From the first to the last value of another axis, at both ends of the one of the figures."""
    told: dict[str, list[SweptPoint]] = {}
    for point in swept.feasible:
        told.setdefault(", ".join(f"{key} {word}" for key, word in point.words.items() if key != axis.key), []).append(
            point
        )
    lines = [(where, points) for where, points in told.items() if len(points) == len(axis.words) > 1]
    for where, points in dict([*lines[:1], *lines[-1:]]).items():
        ordered = sorted(points, key=lambda point: axis.words.index(point.words[axis.key]))
        first, last = ordered[0], ordered[-1]
        found = [text for key in swept.shown() if (text := _effect(key, first, last))][:MOST_EFFECTS]
        change = ", ".join(found) or f"nothing shown changes by {100 * CHANGED:g} % and beyond noise"
        yield f"At {where}, from {axis.key} {first.words[axis.key]} to {last.words[axis.key]}: {change}."


def _effect(key: str, first: SweptPoint, last: SweptPoint) -> str:
    """``P99 TTFT 8.2 s → 0.41 s (-95 %)``; empty for what does not change, or only within noise."""
    a, b, change = first.mean(key), last.mean(key), paired(first, last, key)
    if a is None or b is None or change is None or a == b:
        return ""
    if isfinite(change.half_width) and not change.excludes(0):
        return ""
    if abs(b - a) < CHANGED * max(abs(a), abs(b)):
        return ""
    return f"{measure(key).words} {say(key, a)} → {say(key, b)}{_relative(a, b)}"


def _relative(a: float, b: float) -> str:
    if a <= 0 or b < 0:
        return ""
    if b >= 3 * a:
        return f" ({digits(b / a)} times)"
    return f" (+{percent((b - a) / a)})" if b > a else f" (−{fall((a - b) / a)})"


def _knees(swept: Swept) -> Iterator[str]:
    for knee in swept.knees[:MOST_KNEES]:
        yield knee_words(swept, knee)
    if swept.knees[MOST_KNEES:]:
        yield f"{plural(len(swept.knees) - MOST_KNEES, 'more knee')} in the figures."
    if not swept.knees and swept.x_axis.is_numeric and not swept.is_scattered and len(swept.feasible) >= 4:
        yield f"No curve along {swept.x_axis.key} has a knee that is distinct beyond noise."


def knee_words(swept: Swept, knee: Knee) -> str:
    """``The knee of P99 TTFT is at max_num_seqs 64: 8.2 s → 0.5 s up to it, 0.5 s → 0.41 s beyond it.``"""
    key = swept.x_axis.key
    at = knee.point.words[key]
    spread = f" ({knee.low} to {knee.high} in single replications)" if knee.low != knee.high else ""
    untested = "" if knee.is_tested else ", in a single run, so that noise is not known"
    where = f" ({knee.curve})" if knee.curve else ""
    before, mid, after = (say(knee.key, point.mean(knee.key)) for point in (knee.before, knee.point, knee.after))
    return (
        f"The knee of {measure(knee.key).words}{where} is at {key} {at}{spread}{untested}: {before} → {mid} up to it, "
        f"{mid} → {after} beyond it."
    )


# --- what is at risk


def _risks(swept: Swept) -> Iterator[str]:
    yield from _about_memory(swept)
    yield from _about_objectives(swept)
    yield from _about_load(swept)
    yield from _about_failures(swept)
    yield from _about_preemptions(swept)
    if not swept.currency and len({point.mean("num_gpus") for point in swept.feasible}) > 1:
        yield "No price is given (--set gpu_hour=2.49), so that GPUs stand in for money."
    infeasible = [point for point in swept.points if point.infeasible]
    if infeasible:
        yield f"{_named(infeasible)} cannot run; the table has the reason."
    if len(swept.seeds) > 1 and swept.is_deterministic and swept.feasible:
        yield (
            "All replications of a point are the same, since nothing is drawn by the seed: the intervals say nothing, "
            "and one replication is enough (--reps 1)."
        )
    elif len(swept.seeds) == 1 and swept.feasible:
        yield "Each point was run once, so that noise is not known (--reps 5)." if not swept.is_fixed else _FIXED


_FIXED = "The trace is replayed as it is, with one run a point: how other days would differ is not in it."


def _about_memory(swept: Swept) -> Iterator[str]:
    unsafe = [point for point in swept.feasible if point.is_unsafe]
    if unsafe:
        yield (
            f"{_named(unsafe)} {verb(len(unsafe), 'is', 'are')} unsafe: what is left on the card is less than the "
            "memory plan may be off, so vLLM may run out of memory."
        )
    best = swept.best
    if best is not None and not best.point.is_unsafe:
        margin = best.point.mean("oom_margin_gib")
        if margin is not None:
            yield f"{best.point.name} leaves {say('oom_margin_gib', margin)} of each card free (OOM margin)."


def _about_objectives(swept: Swept) -> Iterator[str]:
    if not swept.objectives:
        yield "No objectives were set, so that best means most, not good enough (--slo ttft:p99<500ms)."
        return
    if swept.best is not None and len(swept.seeds) > 1 and not swept.is_deterministic:
        number = len(swept.seeds)
        yield (
            f"{swept.best.point.name} keeps the objectives in all {number} replications: with 95 % confidence at least "
            f"{percent(least_share(number))} of such runs do (more --reps say more)."
        )
    some = [point for point in swept.feasible if point.num_held and not point.holds]
    none = [point for point in swept.feasible if point.num_held == 0]
    if some:
        keep = verb(len(some), "keeps", "keep")
        yield f"{_named(some)} {keep} the objectives in some replications only ({_missed(some)} missed)."
    if none and swept.best is not None:
        keep = verb(len(none), "keeps", "keep")
        yield f"{_named(none)} {keep} the objectives in no replication ({_missed(none)} missed)."


def least_share(number: int, confidence: float = 0.95) -> float:
    """The share of all runs that keep the objectives at least, where as many independent ones all did.

    The one-sided bound of Clopper and Pearson: with a smaller share so many in a row would be rarer than 1 in 20.
    """
    return float((1 - confidence) ** (1 / number))


def _missed(points: list[SweptPoint]) -> str:
    return " and ".join(dict.fromkeys(text for point in points for text in point.missed)) or "some"


def _about_load(swept: Swept) -> Iterator[str]:
    hopeless = [point for point in swept.feasible if point.is_hopeless]
    seen = [point for point in hopeless if point.is_overloaded]
    unseen = [point for point in hopeless if not point.is_overloaded]
    if seen:
        yield (
            f"{_named(seen)} {verb(len(seen), 'is', 'are')} overloaded: latencies there are those of the run's length, "
            "and a longer one would be worse."
        )
    if unseen:
        yield (
            f"At {_named(unseen)} more comes in than can be served, in a run too short to show it: latencies there are "
            "those of its length, and a longer one would be worse."
        )


def _about_failures(swept: Swept) -> Iterator[str]:
    """Where requests had no answer: latencies leave them out."""
    lost = [point for point in swept.feasible if (point.mean("failed_share") or 0.0) > MOST_FAILED]
    if lost:
        most = max(point.mean("failed_share") or 0.0 for point in lost)
        share = f"up to {percent(most)}" if len(lost) > 1 else percent(most)
        yield f"At {_named(lost)} {share} of the requests had no answer: latencies there are those of the others."


def _about_preemptions(swept: Swept) -> Iterator[str]:
    """What preemptions cost where there are most of them."""
    worst = max(swept.feasible, key=lambda point: point.mean("preemptions") or 0.0, default=None)
    if worst is None or not worst.mean("preemptions"):
        return
    told = [f"{say('preemptions', worst.mean('preemptions'))} preemptions a run"]
    for key, words in (
        ("recomputed_prefill_tokens", "{} prefill tokens computed again"),
        ("recomputed_gpu_seconds", "{}"),
        ("recomputed_busy_share", "{} of the time in which steps ran"),
        ("recomputed_cost", f"a cost of {{}} {swept.currency}".rstrip()),
        ("preemption_share_of_p99_itl", "{} of P99 ITL"),
    ):
        value = worst.mean(key)
        if value:
            told.append(words.format(say(key, value)))
    yield f"Preemptions take most at {worst.name}: {_listed(told)}."


def _named(points: list[SweptPoint]) -> str:
    if len(points) > MOST_NAMED:
        first = ", ".join(str(point.number) for point in points[:MOST_NAMED])
        return f"Points {first} and {len(points) - MOST_NAMED:,} more"
    keys = list(points[0].words)
    if len(keys) == 1:
        return f"{keys[0]} {_listed([point.words[keys[0]] for point in points])}"
    return "; ".join(point.name for point in points)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _cap(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
