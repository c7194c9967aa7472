"""The answer of a search in a few sentences: what to set, what that gains, what it costs, and what is at risk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import NamedTuple

from windtunnel.reports.optimize_data import (
    Optimized,
    Step,
    half_width,
    is_level,
    relative,
    say_value,
    signed,
    with_noise,
)
from windtunnel.reports.sweep_data import SweptPoint
from windtunnel.reports.words import percent, plural, verb
from windtunnel.sim.metrics.replications import Interval

BINDS = {
    "max_num_seqs": "seats (max_num_seqs): requests wait while all are taken",
    "max_num_batched_tokens": "the token budget of a step (max_num_batched_tokens)",
    "kv_blocks": "KV blocks: requests wait, or are preempted, for want of them",
    "queue": "the queue",
    "compute": "arithmetic: steps take the time of their tokens",
    "bandwidth": "memory bandwidth: steps take the time of reading weights and KV cache",
    "idle": "nothing: it is idle most of the time",
}
NEARLY = 0.9
"""Share of a limit from which on it is near."""


class OptimizeAnswer(NamedTuple):
    """A headline and the sentences below it, by what they are about."""

    headline: str
    tone: str
    """good, note or bad."""
    gains: tuple[str, ...]
    costs: tuple[str, ...]
    risks: tuple[str, ...]
    how: tuple[str, ...]
    """How much was searched, and what for."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.gains, *self.costs, *self.risks, *self.how)


def answer(found: Optimized) -> OptimizeAnswer:
    """What a reader wants to know first."""
    headline, tone = _headline(found)
    return OptimizeAnswer(
        headline, tone, tuple(_gains(found)), tuple(_costs(found)), tuple(_risks(found)), tuple(_how(found))
    )


def settings_words(found: Optimized, point: SweptPoint) -> str:
    """The settings of a trial that differ from the scenario's; all of them if none does."""
    start = found.start.point.words
    changed = {key: word for key, word in point.words.items() if start.get(key) != word}
    return ", ".join(f"{key} {word}" for key, word in (changed or point.words).items())


# --- headline


def _headline(found: Optimized) -> tuple[str, str]:
    if found.is_infeasible:
        return f"Nothing of this starts: {_why_not(found)}", "bad"
    winner = found.winner
    if winner is None:
        return _none_holds(found), "bad"
    if found.objectives and not winner.holds:
        return (
            f"No deployment keeps the objectives in every run on fresh seeds; the nearest is "
            f"{settings_words(found, winner)}, in {winner.num_held} of {len(winner.runs)}.",
            "bad",
        )
    if not changed_keys(found, winner):
        more, tone = ("; it does not keep up with this load", "note") if _num_overloaded(winner) else ("", "good")
        return f"Keep the settings as they are: nothing that was tried is better beyond noise{more}.", tone
    if _is_worse(found):
        gain = found.confirmation.gain(found.target.key) if found.confirmation is not None else None
        shown = gain is not None and _is_beyond_noise(gain)
        why = (
            "they are better than all that was searched" if shown else "nothing that was searched is shown to be better"
        )
        best = settings_words(found, winner)
        return f"Keep the settings as they are: {why}; the best of that, told below, is {best}.", "note"
    if _num_overloaded(winner):
        return f"Set {settings_words(found, winner)}; it does not keep up with this load.", "note"
    if _is_unproven(found):
        runs = plural(len(winner.runs), "run" if found.is_fixed else "fresh run")
        return f"Set {settings_words(found, winner)}; {runs} do not show its gain beyond noise (--reps).", "note"
    return f"Set {settings_words(found, winner)}.", "note" if _is_thin(found, winner) else "good"


def _is_thin(found: Optimized, winner: SweptPoint) -> bool:
    """Whether the head-room is not shown to be there, or is less than what step times may be off by."""
    headroom = winner.interval("headroom")
    if headroom is None or not found.objectives:
        return False
    error = winner.mean("step_time_error_p90_percent") or 0.0
    is_chance = isfinite(headroom.half_width) and headroom.low <= 0
    return is_chance or 100 * headroom.mean < error


def _why_not(found: Optimized) -> str:
    """Why the first of those that were searched does not start, as a sentence."""
    searched = [each for each in found.tried if each.in_space] or list(found.tried)
    why = searched[0].point.infeasible
    return f"{why[:1].upper()}{why[1:].rstrip('.')}." if why else "the reasons are below."


def _is_worse(found: Optimized) -> bool:
    """Whether the scenario's own settings, which are not among those searched, are better, by more than what is level.

    They are then no answer of the search, but what to stay with.
    """
    confirmation = found.confirmation
    if confirmation is None or confirmation.start is None or found.start.in_space or found.start.excess > 0:
        return False
    start, winner = confirmation.start, confirmation.winner
    if start.is_unsafe or (found.objectives and not start.holds):
        return False
    gain = confirmation.gain(found.target.key)
    loses = gain is not None and found.target.sign * gain.mean < 0
    return loses and not is_level(start, winner, found.target)


def _num_overloaded(point: SweptPoint) -> int:
    """Runs in which the queue grows for as long as the load lasts, be they long enough to show it or not."""
    return sum(
        run.get("verdict") in ("overloaded", "stalled")
        or (run.get("verdict") == "too_short" and (run.get("utilisation") or 0.0) > 1)
        for run in point.runs
    )


def _is_unproven(found: Optimized) -> bool:
    """Whether the scenario keeps the objectives, too, and neither target nor head-room is better beyond noise."""
    confirmation = found.confirmation
    if confirmation is None or confirmation.start is None or (found.objectives and not confirmation.start.holds):
        return False
    gains = [(found.target.sign, confirmation.gain(found.target.key)), (1, confirmation.gain("headroom"))]
    cheaper = (confirmation.winner.mean("num_gpus") or 0.0) < (confirmation.start.mean("num_gpus") or 0.0)
    return not cheaper and not any(
        gain is not None and sign * gain.mean > 0 and _is_beyond_noise(gain) for sign, gain in gains
    )


def _none_holds(found: Optimized) -> str:
    asked = ", ".join(found.objectives)
    near = found.nearest
    if near is None or (not found.objectives and near.point.is_unsafe):
        return "No deployment that was tried is safe to run."
    if not found.objectives:
        return f"No deployment tells its {found.target.words}, so that none can be called best."
    if near.excess <= 0 and not near.point.is_unsafe:
        return f"No deployment that keeps {asked} tells its {found.target.words}, so that none can be called best."
    if near.excess <= 0:
        return f"Deployments that keep {asked} have unsafe memory plans; none is left to recommend."
    run = max(near.point.runs, key=lambda one: one.get("worst_use") or 0.0)
    text = run.get("worst_objective") or run.get("slo_missed") or asked
    if (run.get("worst_use") or 0.0) < 1 and run.get("verdict") == "overloaded":
        return (
            f"No deployment keeps the objectives ({asked}). The nearest is {settings_words(found, near.point)}, which "
            f"does not keep up with the load: its queue grows, and {text} is missed sooner or later."
        )
    return (
        f"No deployment keeps the objectives ({asked}). The nearest is {settings_words(found, near.point)}, which "
        f"misses {text} by {percent(near.excess)} of its limit."
    )


def changed_keys(found: Optimized, point: SweptPoint) -> list[str]:
    """The knobs in which a trial differs from the scenario."""
    return [key for key, word in point.words.items() if found.start.point.words.get(key) != word]


# --- what it gains


def _gains(found: Optimized) -> Iterator[str]:
    confirmation, target = found.confirmation, found.target
    if confirmation is None:
        return
    own = confirmation.winner.interval(target.key)
    runs = plural(len(confirmation.seeds), "run")
    if own is not None and found.is_fixed and found.at != "capacity":
        yield (
            f"In {runs}: {target.words} {with_noise(target, own.mean, half_width(own))}. Nothing is drawn, so that "
            "other seeds serve the same requests: try it on another trace, too."
        )
    elif own is not None:
        yield f"Confirmed in {runs} with fresh seeds: {target.words} {with_noise(target, own.mean, half_width(own))}."
    if confirmation.start is None:
        yield "The scenario's own settings do not start, so that there is nothing to hold it against."
        return
    if not changed_keys(found, confirmation.winner):
        return
    yield _against_start(found)
    yield from _headroom(found)


def _against_start(found: Optimized) -> str:
    confirmation, target = found.confirmation, found.target
    assert confirmation is not None
    assert confirmation.start is not None
    base, gain = confirmation.start.mean(target.key), confirmation.gain(target.key)
    missed = found.objectives and not confirmation.start.holds
    held = confirmation.start.num_held
    misses = f", and keep the objectives in {held} of {len(confirmation.start.runs)} runs" if missed else ""
    if gain is None or base is None:
        return f"The scenario's own settings have no {target.words} to hold it against{misses}."
    told = signed(target, gain)
    share = relative(gain, base)
    noise = "" if _is_beyond_noise(gain) or not half_width(gain) else ", which is within the noise"
    return (
        f"Against the scenario's own settings ({target.say(base)}{misses}), on the same requests: {told}"
        f"{f' ({share})' if share else ''}{noise}."
    )


def _is_beyond_noise(change: Interval) -> bool:
    return not isfinite(change.half_width) or change.excludes(0)


def _headroom(found: Optimized) -> Iterator[str]:
    assert found.confirmation is not None
    start, winner = found.confirmation.start, found.confirmation.winner
    own, other = winner.mean("headroom"), start.mean("headroom") if start is not None else None
    if own is None or other is None or abs(own - other) < 0.005:
        return
    yield (
        f"Head-room, what is left of the tightest limit, goes from {say_value('headroom', other)} to "
        f"{say_value('headroom', own)}."
    )


# --- what it costs


def _costs(found: Optimized) -> Iterator[str]:
    winner = found.winner
    if winner is None:
        return
    gpus, cost = winner.mean("num_gpus"), winner.mean("cost_per_hour")
    start = found.confirmation.start if found.confirmation else None
    if cost is not None:
        before = start.mean("cost_per_hour") if start is not None else None
        same = "" if before is None else ", as before" if before == cost else f", before {before:.2f}"
        yield f"It costs {cost:.2f} {found.currency} an hour ({plural(round(gpus or 0), 'GPU')}{same})."
    elif gpus is not None:
        before = start.mean("num_gpus") if start is not None else None
        same = "" if before is None else ", as before" if before == gpus else f", before {before:g}"
        yield (
            f"It takes {plural(round(gpus), 'GPU')}{same}. No price is given (--gpu-price), so that GPU-hours stand in "
            "for money."
        )


# --- what is at risk


def _risks(found: Optimized) -> Iterator[str]:
    winner = found.winner
    if winner is not None:
        yield from _growing_queue(winner)
        yield from _what_binds(found, winner)
        yield from _error_of_steps(found, winner)
        yield from _memory(winner)
    if found.confirmation is not None and found.confirmation.passed_over:
        number = len(found.confirmation.passed_over)
        yield (
            f"{plural(number, 'deployment')} looked better in the search and missed an objective on fresh seeds: the "
            "objectives are near the limit there."
        )
    if found.start.excess > 0 and winner is not None:
        yield (
            f"The scenario's own settings missed an objective in the search, by {percent(found.start.excess)} of its "
            "limit in the worst run."
        )
    if not found.objectives:
        yield "No objectives were set, so that best means most, not good enough (--slo ttft:p99<500ms)."
    unsafe = sum(each.point.is_unsafe for each in found.tried)
    if unsafe:
        yield (
            f"{plural(unsafe, 'deployment')} {verb(unsafe, 'was', 'were')} left out: what the memory plan leaves free "
            "is less than it may be off."
        )


def _how_near(use: float) -> str:
    return "" if use < NEARLY else ", near" if use <= 1 else ", beyond it"


def _growing_queue(winner: SweptPoint) -> Iterator[str]:
    number = _num_overloaded(winner)
    if number:
        yield (
            f"It is overloaded in {number} of {plural(len(winner.runs), 'run')}: the queue grows as long as the load "
            "lasts, and a longer run would give other numbers. An objective (--slo) leaves out what does not keep up; "
            "--at capacity finds what does."
        )


def _what_binds(found: Optimized, winner: SweptPoint) -> Iterator[str]:
    if found.at == "capacity":
        names = list(dict.fromkeys(str(run["binding"]) for run in winner.runs if run.get("binding")))
        limiting = list(dict.fromkeys(str(run["limiting"]) for run in winner.runs if run.get("limiting")))
        first = f"; the objective that breaks first is {limiting[0]}" if limiting else ""
        if names:
            yield f"What binds at its limit is {BINDS.get(names[0], names[0])}{first}."
        rho = winner.mean("utilisation")
        if rho is not None:
            yield f"That is at {percent(rho)} of the load that saturates it: plan with less."
        return
    run = max(winner.runs, key=lambda one: one.get("worst_use") or 0.0)
    use, text = winner.mean("worst_use"), run.get("worst_objective")
    if use is not None and text:
        what = "the load that saturates it" if text == "utilisation" else f"the limit of {text}"
        yield f"What binds first: {percent(use)} of {what} is used{_how_near(use)}."
    preemptions = winner.mean("preemptions") or 0.0
    if preemptions >= 1:
        yield f"KV blocks are short: {preemptions:,.0f} preemptions a run."
    seats = winner.settings.get("max_num_seqs")
    peak = winner.mean("num_running_peak")
    if isinstance(seats, int) and peak is not None and peak >= seats:
        yield f"All {seats:,} seats (max_num_seqs) are taken at the peak."


def _error_of_steps(found: Optimized, winner: SweptPoint) -> Iterator[str]:
    """How far off step times may be, beside the head-room, which should be more than that."""
    if not found.context.calibrated:
        yield "Step times are uncalibrated: their error is not known, and not in the intervals."
        return
    error, headroom = winner.mean("step_time_error_p90_percent"), winner.mean("headroom")
    if error is None:
        return
    told = f"Step times of the profile may be off, nine of ten by up to {percent(error / 100)}"
    if headroom is None or not found.objectives:
        yield f"{told}; that is not in the intervals."
    elif percent(error / 100) == say_value("headroom", headroom):
        yield f"{told}: about as much as the head-room, so measure before you rely on it."
    elif 100 * headroom < error:
        yield f"{told}: more than the head-room of {say_value('headroom', headroom)}, so measure before you rely on it."
    else:
        yield f"{told}: less than the head-room of {say_value('headroom', headroom)}."


def _memory(winner: SweptPoint) -> Iterator[str]:
    margin = winner.mean("oom_margin_gib")
    if margin is not None:
        yield f"It leaves {margin:.1f} GiB of each card free (OOM margin)."


# --- how it was searched


def _how(found: Optimized) -> Iterator[str]:
    knobs = plural(len(found.knobs), "knob")
    after = f", and {found.num_after:,} to simplify, confirm and explain the answer" if found.num_after else ""
    yield (
        f"Searched: {plural(len(found.tried), 'deployment')} over {knobs} in {plural(found.num_rounds, 'round')}, "
        f"{plural(found.num_search, 'simulation')}{after}; {found.stop}."
    )
    grid = found.num_grid
    if found.num_combinations is not None and grid is not None:
        if found.at == "capacity":
            yield f"The grid has {plural(found.num_combinations, 'deployment')}."
        else:
            yield (
                f"The grid of all values has {plural(found.num_combinations, 'deployment')} and would take {grid:,} "
                "simulations, less those of deployments that do not start."
            )
    yield _what_for(found)


def _what_for(found: Optimized) -> str:
    good = "requests that kept the limits" if found.has_limits else "finished requests"
    if found.at == "capacity":
        return f"Searched for {found.target.words}, where goodput is the largest rate that keeps the objectives."
    if found.target.key.startswith("goodput"):
        return (
            f"Searched for {found.target.words}, counting {good}, at the scenario's own load: it cannot exceed what is "
            "asked for, so deployments that are level are ranked by cost, then by head-room."
        )
    way = "highest" if found.target.sign > 0 else "lowest"
    return f"Searched for the {way} {found.target.words}, at the scenario's own load."


# --- the walk


def step_words(step: Step) -> str:
    """``max_num_seqs 1,024 → 64``."""
    return ", ".join(f"{key} {before} → {after}" for key, (before, after) in step.changes.items())


def step_buys(found: Optimized, step: Step) -> str:
    """What a step buys, in the target and in head-room; or that it buys nothing beyond noise."""
    told: list[str] = []
    if step.before.infeasible:
        told.append("makes it start")
    elif step.change is None:
        told.append("not known")
    elif step.is_level:
        told.append("level")
    else:
        share = relative(step.change, step.before.mean(found.target.key))
        told.append(f"{signed(found.target, step.change)}{f' ({share})' if share else ''}")
    own, other = step.after.mean("headroom"), step.before.mean("headroom")
    if own is not None and other is not None and abs(own - other) >= 0.005:
        told.append(f"head-room {say_value('headroom', other)} → {say_value('headroom', own)}")
    if found.objectives and not step.before.infeasible and step.before.holds != step.after.holds:
        told.append("keeps the objectives" if step.after.holds else "misses an objective")
    return ", ".join(told)


def reset_words(found: Optimized) -> str:
    """Which knobs went back to vLLM's default, as they buy nothing."""
    told = [f"{key} ({was} → {default})" for key, (was, default) in found.reset.items()]
    return f"Back at vLLM's default, as nothing beyond noise is lost: {', '.join(told)}." if told else ""


def importance_words(found: Optimized) -> str:
    """Which knobs decide whether a trial is among the best."""
    if not found.importance:
        return ""
    told = ", ".join(f"{key} {percent(share)}" for key, share in _sorted(found))
    return f"What decides whether a trial is among the best quarter (PED-ANOVA, shares): {told}."


def _sorted(found: Optimized) -> Sequence[tuple[str, float]]:
    return sorted(found.importance.items(), key=lambda pair: -pair[1])
