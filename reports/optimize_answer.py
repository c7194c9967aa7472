"""The answer of a search in a few sentences: what to set, what that gains, what it costs, and what is at risk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import NamedTuple

from windtunnel.reports.optimize_data import Optimized, Step, half_width, relative, say_value, signed, with_noise
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
        return "Nothing of this starts.", "bad"
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
        return "Keep the settings as they are: nothing that was tried is better beyond noise.", "good"
    if _is_unproven(found):
        runs = plural(len(winner.runs), "fresh run")
        return f"Set {settings_words(found, winner)}; {runs} do not show its gain beyond noise (--reps).", "note"
    return f"Set {settings_words(found, winner)}.", "good"


def _is_unproven(found: Optimized) -> bool:
    """Whether the scenario keeps the objectives, too, and neither target nor head-room is better beyond noise."""
    confirmation = found.confirmation
    if confirmation is None or confirmation.start is None or (found.objectives and not confirmation.start.holds):
        return False
    gains = [confirmation.gain(found.target.key), confirmation.gain("headroom")]
    cheaper = (confirmation.winner.mean("num_gpus") or 0.0) < (confirmation.start.mean("num_gpus") or 0.0)
    return not cheaper and not any(gain is not None and gain.mean and _is_beyond_noise(gain) for gain in gains)


def _none_holds(found: Optimized) -> str:
    asked = ", ".join(found.objectives)
    near = found.nearest
    if not found.objectives or near is None:
        return "No deployment that was tried is safe to run."
    if near.excess <= 0:
        return f"Deployments that keep {asked} have unsafe memory plans; none is left to recommend."
    run = max(near.point.runs, key=lambda one: one.get("worst_use") or 0.0)
    text = run.get("worst_objective") or run.get("slo_missed") or asked
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
    if own is not None:
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
        yield from _what_binds(found, winner)
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
        yield f"What binds first: {percent(use)} of {what} is used{' — near' if use >= NEARLY else ''}.".replace(
            " —", ","
        )
    preemptions = winner.mean("preemptions") or 0.0
    if preemptions >= 1:
        yield f"KV blocks are short: {preemptions:,.0f} preemptions a run."
    seats = winner.settings.get("max_num_seqs")
    peak = winner.mean("num_running_peak")
    if isinstance(seats, int) and peak is not None and peak >= seats:
        yield f"All {seats:,} seats (max_num_seqs) are taken at the peak."


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
            yield f"The grid has {found.num_combinations:,} deployments."
        else:
            yield (
                f"The grid of all values has {found.num_combinations:,} deployments and would take {grid:,} "
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
