"""The answer made simple, confirmed on fresh seeds, and explained knob by knob."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from windtunnel.optimizing.judging import is_as_good, to_beat
from windtunnel.optimizing.question import CAPACITY, Question
from windtunnel.optimizing.search import FIRST_OF_FINALISTS, Bench, Deployment, Found, Wanted, deployment_of
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
        alone = self._searched([{**winner.settings, knob.key: knob.default} for knob in away], best)
        free = [knob for knob, point in zip(away, alone, strict=True) if self._may_replace(best, point)]
        chosen = dict(winner.settings)
        together = {**chosen, **{knob.key: knob.default for knob in free}}
        if free and self._may_replace(best, self._searched([together], best)[0]):
            chosen = together
        else:
            for knob in free:
                trial = {**chosen, knob.key: knob.default}
                if self._may_replace(best, self._searched([trial], best)[0]):
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

    def _searched(self, wanted: Sequence[Mapping[str, Any]], against: SweptPoint | None = None) -> list[SweptPoint]:
        """On seeds of the search; at capacity on some, and where one stays below ``against`` on the first it ends."""
        seeds = self._question.seeds
        if self._question.at == CAPACITY:
            seeds = seeds[:FIRST_OF_FINALISTS]
        return self._points(wanted, seeds, is_fresh=False, against=against)

    def _fresh(self, wanted: Sequence[Mapping[str, Any]]) -> list[SweptPoint]:
        return self._points(wanted, self._question.fresh_seeds, is_fresh=True)

    def _points(
        self,
        wanted: Sequence[Mapping[str, Any]],
        seeds: Sequence[int],
        *,
        is_fresh: bool,
        against: SweptPoint | None = None,
    ) -> list[SweptPoint]:
        """What these settings come to on these seeds, each once; what the search knows already is not run again."""
        names = [(tuple(map(repr, settings.values())), is_fresh) for settings in wanted]
        if not is_fresh:
            for each in self._found.deployments:
                if self._is_known(each, len(seeds)):
                    name = (tuple(map(repr, each.settings.values())), False)
                    self._known.setdefault(name, replace(each.point, runs=tuple(each.runs[: len(seeds)])))
        missing = {name: settings for name, settings in zip(names, wanted, strict=True) if name not in self._known}
        made = {name: self._deployment(settings) for name, settings in missing.items()}
        for name, runs in zip(made, self._runs(list(made.values()), seeds, against), strict=True):
            self._known[name] = replace(made[name].point, runs=tuple(runs))
        return [self._known[name] for name in names]

    def _is_known(self, each: Deployment, number: int) -> bool:
        """Whether its runs are so many of the kind that is wanted here, which at capacity only finalists have."""
        if self._question.at != CAPACITY:
            return len(each.runs) == number
        return len(each.runs) >= number and each.is_exact

    def _runs(
        self, made: Sequence[Deployment], seeds: Sequence[int], against: SweptPoint | None
    ) -> list[list[dict[str, Any]]]:
        """The runs of each, fewer of those that stay below ``against`` on the first seed."""
        question, bench = self._question, self._bench
        if question.at != CAPACITY:
            return bench.run([Wanted(each.loaded) for each in made], seeds)
        around = self._found.best[0].rate_per_gpu
        first = None if against is None else replace(against, runs=against.runs[:1])
        runs = bench.run(
            [
                Wanted(
                    each.loaded,
                    (each.rate_per_gpu or around,),
                    None if first is None else to_beat(question, first, each.settings),
                )
                for each in made
            ],
            seeds[:1],
        )
        known = [k for k, own in enumerate(runs) if own[0].get("below_rate") is None]
        wanted = [Wanted(made[k].loaded, self._expected(runs[k][0], seeds)) for k in known]
        for k, more in zip(known, bench.run(wanted, seeds[1:]), strict=True):
            runs[k] = [*runs[k], *more]
        return runs

    def _expected(self, first: Mapping[str, Any], seeds: Sequence[int]) -> tuple[float | None, ...]:
        """Where the rates of the other seeds are expected, which draw requests that are lighter or heavier for all."""
        if not first.get("max_rate") or not first.get("num_gpus"):
            return (None,) * (len(seeds) - 1)
        own = first["max_rate"] / first["num_gpus"]
        for point in self._known.values():
            rates = point.values("max_rate")
            if len(rates) == len(seeds) and point.values("seed") == tuple(map(float, seeds)) and all(rates):
                return tuple(own * rate / rates[0] for rate in rates[1:])
        return (own,) * (len(seeds) - 1)

    def _deployment(self, settings: Mapping[str, Any]) -> Deployment:
        for each in self._found.deployments:
            if {key: repr(value) for key, value in each.settings.items()} == {k: repr(v) for k, v in settings.items()}:
                return each
        given = {key: value for key, value in settings.items() if value is not None}
        made = deployment_of(self._question, given, 0, SEARCH, 0)
        made.settings = dict(settings)
        return made
