"""The tables of a search for programs: one row a deployment, one row a run, and all of it as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from windtunnel.reports.optimize_answer import answer
from windtunnel.reports.optimize_data import Optimized, Step, Tried
from windtunnel.reports.sweep_data import SweptPoint
from windtunnel.sim.metrics.replications import Interval


def run_rows(found: Optimized) -> Iterator[dict[str, Any]]:
    """One row a run: first those of the search, then the answer and the scenario's settings on fresh seeds."""
    confirmation = found.confirmation
    parts = [("search", each.point) for each in found.tried]
    if confirmation is not None:
        parts.append(("confirmation", confirmation.winner))
        if confirmation.start is not None:
            parts.append(("confirmation, start", confirmation.start))
    columns = dict.fromkeys(key for _, point in parts for run in point.runs for key in run)
    for phase, point in parts:
        for replication, run in enumerate(point.runs, 1):
            own = {"phase": phase, "trial": point.number or None, **point.settings, "replication": replication}
            yield {**own, **{key: run.get(key) for key in columns if key not in own}}


def trial_rows(found: Optimized) -> Iterator[dict[str, Any]]:
    """One row a deployment that was tried, in the order of the search."""
    for each in found.tried:
        point = each.point
        row: dict[str, Any] = {"trial": point.number, "round": each.round, "origin": each.origin, **point.settings}
        row |= {"num_runs": len(point.runs), "verdict": ", ".join(point.verdicts)}
        row |= {"infeasible": point.infeasible or None, "dropped": each.dropped or None}
        row |= {"is_candidate": each.is_candidate, "is_answer": _is_answer(found, each)}
        row |= {"excess": each.excess, "memory_verdict": next((run.get("memory_verdict") for run in point.runs), None)}
        for key in found.shown_keys:
            row |= _columns(key, point.interval(key))
        yield row


def _is_answer(found: Optimized, each: Tried) -> bool:
    return found.winner is not None and found.winner.number == each.point.number


def _columns(name: str, interval: Interval | None) -> dict[str, float | None]:
    if interval is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    is_known = isfinite(interval.half_width)
    return {
        name: interval.mean,
        f"{name}_low": interval.low if is_known else None,
        f"{name}_high": interval.high if is_known else None,
    }


def to_dict(found: Optimized) -> dict[str, Any]:
    """All of it as plain data, in a fixed order."""
    said, shared, confirmation = answer(found), found.context, found.confirmation
    return {
        "windtunnel_version": shared.version,
        "scenario": {"name": shared.title, "description": found.description},
        "command": found.command or None,
        "at": found.at,
        "for": {"key": found.target.key, "better": found.target.better, "unit": found.target.unit},
        "knobs": [
            {"key": knob.key, "asked": knob.text, "values": list(knob.order), "own": knob.own, "default": knob.default}
            for knob in found.knobs
        ],
        "overrides": dict(found.overrides),
        "objectives": list(found.objectives),
        "seeds": list(found.seeds),
        "answer": {"headline": said.headline, "sentences": list(said.sentences)},
        "settings": None if found.winner is None else dict(found.winner.settings),
        "serve_command": found.serve_command or None,
        "why_no_serve_command": found.why_no_command or None,
        "confirmation": None if confirmation is None else _confirmation(found),
        "set_back_to_default": {key: list(pair) for key, pair in found.reset.items()},
        "walk": [_step(found, step) for step in found.walk],
        "nearest": None if found.nearest is None or found.winner is not None else _nearest(found.nearest),
        "importance": dict(found.importance),
        "num_rounds": found.num_rounds,
        "stop": found.stop,
        "num_simulations": {"search": found.num_search, "after": found.num_after, "grid": found.num_grid},
        "num_combinations": found.num_combinations,
        "cost_model": {
            "name": shared.cost_model,
            "calibrated": shared.calibrated,
            "evidence": shared.evidence,
            "says": [*shared.calibrated_by],
        },
        "warnings": list(shared.warnings),
        "trials": list(trial_rows(found)),
    }


def _confirmation(found: Optimized) -> dict[str, Any]:
    confirmation, key = found.confirmation, found.target.key
    assert confirmation is not None
    gain = confirmation.gain(key)
    return {
        "seeds": list(confirmation.seeds),
        "answer": _plain(confirmation.winner.interval(key)),
        "start": None if confirmation.start is None else _plain(confirmation.start.interval(key)),
        "gain": _plain(gain),
        "num_held": confirmation.winner.num_held if found.objectives else None,
        "numbers": _numbers(found, confirmation.winner),
        "start_numbers": {} if confirmation.start is None else _numbers(found, confirmation.start),
        "passed_over": [dict(point.settings) for point in confirmation.passed_over],
    }


def _numbers(found: Optimized, point: SweptPoint) -> dict[str, float | None]:
    return {key: point.mean(key) for key in found.shown_keys}


def _plain(interval: Interval | None) -> Mapping[str, Any] | None:
    return None if interval is None else interval.to_dict()


def _step(found: Optimized, step: Step) -> dict[str, Any]:
    return {
        "changes": {key: list(pair) for key, pair in step.changes.items()},
        "before": step.before.mean(found.target.key),
        "after": step.after.mean(found.target.key),
        "change": _plain(step.change),
        "is_level": step.is_level,
        "headroom_before": step.before.mean("headroom"),
        "headroom_after": step.after.mean("headroom"),
        "keeps_objectives": step.after.holds if found.objectives else None,
    }


def _nearest(each: Tried) -> dict[str, Any]:
    run = max(each.point.runs, key=lambda one: one.get("worst_use") or 0.0)
    return {"trial": each.point.number, "settings": dict(each.point.settings), "excess": each.excess} | {
        "objective": run.get("worst_objective") or run.get("slo_missed")
    }
