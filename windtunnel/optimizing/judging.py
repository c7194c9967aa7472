"""Which of two deployments is better, and which are as good: target first, then cost, then head-room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from windtunnel.optimizing.capacity_job import SECONDS_AN_HOUR, ToBeat
from windtunnel.optimizing.question import CAPACITY, Question
from windtunnel.reports.optimize_data import Tried, is_level
from windtunnel.reports.sweep_data import LEVEL, SweptPoint, paired
from windtunnel.sim.metrics.replications import paired_difference

HEADROOM = 0.03
"""Shares of a limit that differ by less are the same head-room."""


def score_of(question: Question, points: Sequence[float | None], headroom: float | None) -> float | None:
    """The target's mean, larger is better; head-room moves it by up to 1 %, which decides where it is level."""
    known = [value for value in points if value is not None]
    if not known or len(known) < len(points):
        return None
    mean = question.target.sign * sum(known) / len(known)
    return mean + LEVEL * abs(mean) * min(max(headroom or 0.0, -1.0), 1.0)


def cost_of(question: Question, point: SweptPoint) -> float:
    """What an hour costs, or the GPUs where no price is given."""
    return point.mean("cost_per_hour" if question.is_priced else "num_gpus") or 0.0


def excludes(question: Question, best: SweptPoint, point: SweptPoint) -> bool:
    """Whether the runs so far say that a deployment is worse than the best, by more than what is level.

    At capacity a single run has an interval of its own: from the rate that holds to the rate that fails.
    """
    if question.at == CAPACITY and len(point.runs) == 1:
        return _rate_excludes(question, best, point)
    key, sign = question.target.key, question.target.sign
    own, other = point.values(key), best.values(key)[: len(point.runs)]
    if len(own) < 2 or len(other) != len(own):
        return False
    change = paired_difference([sign * value for value in other], [sign * value for value in own])
    return change.high < 0 and change.mean < -LEVEL * abs(best.mean(key) or 0.0)


def cannot_win(question: Question, best: SweptPoint, point: SweptPoint) -> bool:
    """Whether a deployment would be worse than the best even if every request that is sent to it were good.

    That holds at the scenario's load only, where a dearer deployment has no more to serve; one run is enough.
    """
    key = question.target.key
    costs = {"goodput_per_dollar": "cost_per_hour", "goodput_per_gpu_hour": "num_gpus"}
    if question.at == CAPACITY or key not in costs:
        return False
    for own, other in zip(point.runs, best.runs, strict=False):
        offered, cost, value = own.get("offered_request_rate"), own.get(costs[key]), other.get(key)
        if not offered or not cost or value is None or not isinstance(offered, int | float):
            return False
        if offered * SECONDS_AN_HOUR / cost >= (1 - LEVEL) * value:
            return False
    return bool(point.runs)


def to_beat(question: Question, best: SweptPoint, settings: Mapping[str, object]) -> ToBeat | None:
    """What a deployment with these settings has to reach at capacity to take the place of the best; None elsewhere.

    A rate to beat makes sense for goodput and what is made of it, of which the best must have some.
    """
    key = question.target.key
    value = best.mean(key)
    if question.at != CAPACITY or key not in _PAID_WITH or question.target.sign < 0 or not value:
        return None
    return ToBeat(
        value=value,
        per=_PAID_WITH[key],
        cost=cost_of(question, best),
        is_priced=question.is_priced,
        num_away=num_away(question, best.settings),
        own_num_away=num_away(question, settings),
        oom_margin_gib=best.mean("oom_margin_gib") or 0.0,
    )


_PAID_WITH = {"goodput_per_dollar": "cost_per_hour", "goodput_per_gpu_hour": "num_gpus", "goodput": ""}


def num_away(question: Question, settings: Mapping[str, object]) -> int:
    """Knobs that are not at vLLM's default."""
    return sum(repr(settings.get(knob.key)) != repr(knob.default) for knob in question.knobs)


def _rate_excludes(question: Question, best: SweptPoint, point: SweptPoint) -> bool:
    key = question.target.key
    if not key.startswith("goodput"):
        return False
    of_rate = [_scaled(run, key, "fails_from") for run in point.runs]
    if None in of_rate:
        return False
    least = [_scaled(run, key, "holds_up_to") or 0.0 for run in best.runs]
    return max(value or 0.0 for value in of_rate) < max(least)


def _scaled(run: object, key: str, bound: str) -> float | None:
    """A bound of the rate in the unit of the target."""
    assert isinstance(run, dict)
    rate, value, limit = run.get("max_rate"), run.get(key), run.get(bound)
    return None if not rate or value is None or limit is None else float(value) / float(rate) * float(limit)


def is_as_good(question: Question, best: SweptPoint, point: SweptPoint) -> bool:
    """Whether a deployment may stand in for a better one: level in the target, no dearer, with as much head-room."""
    if not is_level(best, point, question.target) or cost_of(question, point) > cost_of(question, best):
        return False
    own, other = point.mean("headroom"), best.mean("headroom")
    if own is None or other is None:
        return True
    change = paired(best, point, "headroom")
    return other - own <= HEADROOM or (change is not None and len(point.runs) > 2 and not change.high < 0)


def ranked(question: Question, tried: Sequence[Tried]) -> list[Tried]:
    """Candidates from the one to take on: those level with the best by cost, head-room and simplicity, then the rest.

    Raises nothing for an empty list.
    """
    full = [each for each in tried if each.is_candidate and each.point.values(question.target.key)]
    most = max((len(each.point.runs) for each in full), default=0)
    full = [each for each in full if len(each.point.runs) == most]
    ordered = sorted(full, key=lambda each: (-(_mean_score(question, each.point)), each.point.number))
    if not ordered:
        return []
    best = ordered[0].point
    level = [each for each in ordered if is_level(best, each.point, question.target)]
    level.sort(key=lambda each: _order(question, each))
    return [*level, *(each for each in ordered if each not in level)]


def _mean_score(question: Question, point: SweptPoint) -> float:
    return score_of(question, point.values(question.target.key), point.mean("headroom")) or float("-inf")


def _order(question: Question, each: Tried) -> tuple[float, float, int, float, int]:
    """By cost, head-room in coarse steps, knobs that differ from vLLM's, memory left, and who came first.

    At capacity, where the rate says it all, a head-room is not known.
    """
    headroom = each.point.mean("headroom") or 0.0
    away = num_away(question, each.point.settings)
    margin = each.point.mean("oom_margin_gib") or 0.0
    return cost_of(question, each.point), -round(headroom / HEADROOM), away, -margin, each.point.number
