"""The answer made simple, confirmed on fresh seeds, and explained knob by knob."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from windtunnel.optimizing.judging import is_as_good
from windtunnel.optimizing.question import Question
from windtunnel.optimizing.search import Bench, Deployment, Found, deployment_of
from windtunnel.reports.optimize_data import SEARCH, Confirmation, Step, is_level
from windtunnel.reports.sweep_data import SweptPoint, paired

MOST_CONFIRMED = 5
"""Deployments that are tried on fresh seeds until one keeps all objectives."""


class Explainer:
    """Asks for further runs of what a search found."""

    def __init__(self, question: Question, bench: Bench, found: Found) -> None:
        self._question = question
        self._bench = bench
        self._found = found
        self._known: dict[tuple[tuple[str, ...], bool], SweptPoint] = {}

    def simplified(self, winner: Deployment) -> tuple[Deployment, dict[str, tuple[str, str]]]:
        """The winner with vLLM's default wherever that is as good, and the knobs that went back.

        Each knob is set back alone; those that cost nothing are set back together, or, where that costs something, one
        after the other, each kept if the whole is still as good.
        """
        question = self._question
        away = [
            knob
            for knob in question.knobs
            if knob.default is not None
            and knob.holds(knob.default)
            and repr(winner.settings[knob.key]) != repr(knob.default)
        ]
        if not away:
            return winner, {}
        best = self._searched([winner.settings])[0]
        alone = self._searched([{**winner.settings, knob.key: knob.default} for knob in away])
        free = [knob for knob, point in zip(away, alone, strict=True) if self._may_replace(best, point)]
        chosen = dict(winner.settings)
        together = {**chosen, **{knob.key: knob.default for knob in free}}
        if free and self._may_replace(best, self._searched([together])[0]):
            chosen = together
        else:
            for knob in free:
                trial = {**chosen, knob.key: knob.default}
                if self._may_replace(best, self._searched([trial])[0]):
                    chosen = trial
        if chosen == winner.settings:
            return winner, {}
        simple = self._deployment(chosen)
        back = [key for key in chosen if repr(chosen[key]) != repr(winner.settings[key])]
        return simple, {key: (winner.words[key], simple.words[key]) for key in back}

    def _may_replace(self, best: SweptPoint, point: SweptPoint) -> bool:
        is_sound = not point.infeasible and not point.is_unsafe
        keeps = not self._question.objectives or point.holds
        return is_sound and keeps and is_as_good(self._question, best, point)

    def confirmed(self) -> tuple[Confirmation, Deployment, dict[str, tuple[str, str]]]:
        """The first of the search's best that, made simple, keeps all objectives on fresh seeds; else the nearest.

        Also which knobs went back to vLLM's default.  Of several that came to the same in the search one is tried.
        """
        start = self._fresh([self._found.start.settings])[0]
        shown = None if start.infeasible else start
        missed: list[tuple[SweptPoint, Deployment, dict[str, tuple[str, str]]]] = []
        seen: list[tuple[object, ...]] = []
        for each in self._found.best:
            outcome = (each.point.values(self._question.target.key), each.point.values("headroom"))
            if outcome in seen or len(missed) == MOST_CONFIRMED:
                continue
            seen.append(outcome)
            simple, reset = self.simplified(each)
            point = self._fresh([simple.settings])[0]
            if not self._question.objectives or point.holds:
                passed_over = tuple(other for other, _, _ in missed)
                return Confirmation(self._question.fresh_seeds, point, shown, passed_over), simple, reset
            missed.append((point, simple, reset))
        place = max(range(len(missed)), key=lambda k: (missed[k][0].num_held or 0, -k))
        point, simple, reset = missed[place]
        rest = tuple(other for k, (other, _, _) in enumerate(missed) if k != place)
        return Confirmation(self._question.fresh_seeds, point, shown, rest), simple, reset

    def walk(self, winner: Deployment) -> tuple[Step, ...]:
        """From the scenario's settings to the winner's, the knob whose loss hurts most first, on the fresh seeds.

        A knob that leads to a deployment that does not start is turned together with the next one.
        """
        start = self._found.start
        keys = [key for key in winner.settings if repr(winner.settings[key]) != repr(start.settings[key])]
        if not keys:
            return ()
        own = self._fresh([winner.settings])[0]
        without = self._fresh([{**winner.settings, key: start.settings[key]} for key in keys])
        order = sorted(keys, key=lambda key: -self._loss(own, without[keys.index(key)]))
        stops: list[dict[str, Any]] = [dict(start.settings)]
        for key in order:
            stops.append({**stops[-1], key: winner.settings[key]})
        return tuple(self._steps(order, stops, self._fresh(stops)))

    def _loss(self, own: SweptPoint, point: SweptPoint) -> float:
        """How much worse a deployment is; one that does not start, or misses an objective, is worse than all."""
        if point.infeasible:
            return float("inf")
        target = self._question.target
        change = paired(point, own, target.key)
        loss = target.sign * change.mean if change is not None else 0.0
        more = (own.mean("headroom") or 0.0) - (point.mean("headroom") or 0.0)
        if self._question.objectives and not point.holds:
            return 1e12 + more
        scale = abs(own.mean(target.key) or 1.0)
        return loss + 0.01 * scale * more

    def _steps(
        self, order: Sequence[str], stops: Sequence[Mapping[str, Any]], points: Sequence[SweptPoint]
    ) -> list[Step]:
        steps: list[Step] = []
        before, pending = points[0], list[str]()
        for key, settings, point in zip(order, stops[1:], points[1:], strict=True):
            pending.append(key)
            del settings
            is_last = key == order[-1]
            if point.infeasible and not is_last:
                continue
            changes = {name: (before.words[name], point.words[name]) for name in pending}
            change = None if before.infeasible else paired(before, point, self._question.target.key)
            level = change is not None and is_level(before, point, self._question.target)
            steps.append(Step(changes, before, point, change, level))
            before, pending = point, []
        return steps

    # --- runs

    def _searched(self, wanted: Sequence[Mapping[str, Any]]) -> list[SweptPoint]:
        return self._points(wanted, self._question.seeds, is_fresh=False)

    def _fresh(self, wanted: Sequence[Mapping[str, Any]]) -> list[SweptPoint]:
        return self._points(wanted, self._question.fresh_seeds, is_fresh=True)

    def _points(self, wanted: Sequence[Mapping[str, Any]], seeds: Sequence[int], *, is_fresh: bool) -> list[SweptPoint]:
        """What these settings come to on these seeds, each once; what the search knows already is not run again."""
        names = [(tuple(map(repr, settings.values())), is_fresh) for settings in wanted]
        if not is_fresh:
            for each in self._found.deployments:
                if len(each.runs) == len(seeds):
                    self._known.setdefault((tuple(map(repr, each.settings.values())), False), each.point)
        missing = {name: settings for name, settings in zip(names, wanted, strict=True) if name not in self._known}
        made = {name: self._deployment(settings) for name, settings in missing.items()}
        runs = self._bench.run([(each.settings, each.loaded) for each in made.values()], seeds)
        for (name, each), own in zip(made.items(), runs, strict=True):
            self._known[name] = replace(each.point, runs=tuple(own))
        return [self._known[name] for name in names]

    def _deployment(self, settings: Mapping[str, Any]) -> Deployment:
        for each in self._found.deployments:
            if {key: repr(value) for key, value in each.settings.items()} == {k: repr(v) for k, v in settings.items()}:
                return each
        given = {key: value for key, value in settings.items() if value is not None}
        made = deployment_of(self._question, given, 0, SEARCH, 0)
        made.settings = dict(settings)
        return made
