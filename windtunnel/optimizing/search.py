"""The search: rounds of proposals, each run as often as it takes to tell it from the best so far."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from windtunnel.optimizing.capacity_job import ToBeat
from windtunnel.optimizing.errors import OptunaMissing
from windtunnel.optimizing.judging import HEADROOM, cannot_win, excludes, ranked, score_of, to_beat
from windtunnel.optimizing.knobs import Knob
from windtunnel.optimizing.measuring import completed, excesses, job_of
from windtunnel.optimizing.question import CAPACITY, Question, load
from windtunnel.reports.optimize_data import DEFAULTS, NEIGHBOUR, SEARCH, START, Target, Tried, is_level
from windtunnel.reports.sweep_data import SweptPoint
from windtunnel.reports.values import plain
from windtunnel.sim.rng import stream
from windtunnel.sweeping.plan import checked_value
from windtunnel.sweeping.running import How

ROUND = 8
"""Deployments that are proposed at once, however many processes share the work."""
FIRST = 3
"""Replications after which a deployment is held against the best."""
WAVE = 4
"""At capacity: deployments of a round that are held against the best at once, before the best of them counts."""
CLOSE = 0.1
"""By how much less than the best a deployment may have and still be a finalist, both on the same requests."""
MOST_FINALISTS = 3
"""At capacity: deployments whose rate is found once more, exactly and with more seeds."""
FIRST_OF_FINALISTS = 4
"""Seeds after which finalists are held against the best of them; all seeds for those that are left."""
PATIENCE = 3
"""Rounds without anything better beyond noise that end the search."""
LEAST_ROUNDS = 3
"""Rounds that are made at least: the first proposals are drawn without knowledge."""
STARTUP = 10
"""Trials that optuna draws at random before it models what it has seen."""
MOST_REPEATS = 24
"""Proposals in a row that were tried before, after which a neighbour of the best is taken."""
BEST_SHARE = 0.25
"""Of all trials: those that count as the best where the importance of knobs is told."""
DOES_NOT_START = 10.0
"""How much a deployment that does not start is beyond its constraints, for optuna."""
UNSAFE = 0.5
"""The same of one whose memory plan is unsafe."""

Tell = Callable[[int], None]


@dataclass(slots=True)
class Deployment:
    """One combination of the knobs' values, with the runs that it has so far."""

    number: int
    settings: dict[str, Any]
    words: dict[str, str]
    positions: dict[str, float | None]
    loaded: Any
    origin: str
    round: int
    in_space: bool
    runs: list[dict[str, Any]] = field(default_factory=list)
    dropped: str = ""
    beaten_by: Deployment | None = None
    """The one that it is worse than, so that it got no more runs."""

    @property
    def is_bound(self) -> bool:
        """Whether all that is known is that it stays below what it needed to be the best."""
        return any(run.get("below_rate") is not None for run in self.runs)

    @property
    def is_exact(self) -> bool:
        """Whether its rates are those of the finals at capacity, each of which is one of several seeds."""
        return bool(self.runs) and all(
            run.get("max_rate") is not None and "holds_up_to" not in run for run in self.runs
        )

    @property
    def rate_per_gpu(self) -> float | None:
        """Of its largest rate, as far as it is known."""
        known = [run["max_rate"] / run["num_gpus"] for run in self.runs if run.get("max_rate") and run.get("num_gpus")]
        return sum(known) / len(known) if known else None

    @property
    def point(self) -> SweptPoint:
        """As reports read it."""
        return SweptPoint(self.number, self.settings, self.words, self.positions, tuple(self.runs))

    def excess(self, question: Question) -> float:
        """By how much the worst objective is missed in the worst run."""
        over = [excesses(run, question.objectives) for run in self.runs if not run.get("infeasible")]
        return max((value for each in over for value in each.values()), default=0.0)

    def tried(self, question: Question) -> Tried:
        """As reports read it."""
        excess = max(self.excess(question), 0.0)
        return Tried(self.point, self.origin, self.round, self.in_space, excess, self.dropped)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to."""

    deployments: tuple[Deployment, ...]
    start: Deployment
    default: Deployment | None
    best: tuple[Deployment, ...]
    """Those that keep the objectives, from the one to take on."""
    num_rounds: int
    stop: str
    importance: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A deployment that is to be run, and what is known of it at capacity."""

    loaded: Any
    around: Sequence[float | None] = ()
    """For each seed, requests per second of each GPU near which its rate is expected; empty if nobody knows."""
    to_beat: ToBeat | None = None
    """What it needs, where nothing less is worth to be searched."""


class Bench:
    """Runs deployments with given seeds, and counts what that takes."""

    def __init__(self, question: Question, how: How) -> None:
        self.question = question
        self.num_simulations = 0
        self._how = how

    def run(
        self, wanted: Sequence[Wanted], seeds: Sequence[int], *, is_fine: bool = True
    ) -> list[list[dict[str, Any]]]:
        """For each of these what its runs came to, by seed."""
        jobs = [
            job_of(self.question, each.loaded, seed, is_fine=is_fine, around=around, to_beat=each.to_beat)
            for each in wanted
            for seed, around in zip(seeds, each.around or (None,) * len(seeds), strict=True)
        ]
        found = []
        keys = set[str]()
        results = self._how.workers.map(jobs, store=self._how.store, tell=self._how.tell)
        for job, result in zip(jobs, results, strict=True):
            if job.key not in keys:
                keys.add(job.key)
                self.num_simulations += 0 if result.get("infeasible") else int(result.get("num_simulations", 1))
            found.append(completed(self.question, result))
        number = len(seeds)
        return [found[place * number : (place + 1) * number] for place in range(len(wanted))]


class Search:
    """Looks for the deployment with most of the target among those that keep the objectives.

    Optuna's tree-structured Parzen estimator proposes ``ROUND`` deployments at a time, knowing all rounds before and by
    how much each deployment missed its objectives.  A deployment that misses one in its first run gets no second one;
    the others are run three times and then as often as asked for, unless the interval of their paired difference to the
    best so far says that they are worse.  What was tried is not tried again: where optuna proposes nothing new, a
    neighbour of the best is.  Nothing depends on who does the work, or in which order it is finished.

    At capacity each deployment is first run at the rate that it needs to be the best.  One that misses an objective
    there is not searched any further, and has a bound in place of a value; of such a one optuna is told that it was
    stopped (pruned), which ranks it below all that have a value and makes up no number.
    """

    def __init__(self, question: Question, bench: Bench) -> None:
        self.question = question
        self.bench = bench
        self._optuna = _optuna()
        self._deployments: dict[tuple[str, ...], Deployment] = {}
        self._rng = stream(question.first_seed, "optimize", "neighbours")
        sampler = self._quietly(
            lambda: self._optuna.samplers.TPESampler(
                n_startup_trials=STARTUP,
                multivariate=True,
                constant_liar=True,
                seed=int(stream(question.first_seed, "optimize", "optuna").integers(2**31)),
            )
        )
        self.study = self._optuna.create_study(direction="maximize", sampler=sampler)
        """What optuna was told."""
        self._distributions = {knob.key: knob.distribution() for knob in question.knobs}
        self._open: list[tuple[Any, Deployment]] = []

    # --- the rounds

    def run(self) -> Found:
        """All rounds until the budget is used up, nothing is left, or nothing gets better."""
        start, default = self._first()
        best, waited, number, stop = self._best(), 0, 0, ""
        while not stop:
            left = self.question.num_trials - len(self._deployments)
            proposed = self._proposals(min(ROUND, left), number + 1) if left > 0 else []
            if not proposed:
                stop = self._why_none(left)
                break
            number += 1
            self._race(proposed)
            before, best = best, self._best()
            waited = 0 if self._is_better(before, best) else waited + 1
            if not self._is_exhausted() and number >= LEAST_ROUNDS and waited >= PATIENCE and best is not None:
                stop = f"{waited} rounds in a row brought nothing better beyond noise"
        self._finish()
        order = ranked(self.question, [each.tried(self.question) for each in self._deployments.values()])
        by_number = {each.number: each for each in self._deployments.values()}
        return Found(
            tuple(self._deployments.values()),
            start,
            default,
            tuple(by_number[each.point.number] for each in order),
            number,
            stop,
            self._importance(),
        )

    def _why_none(self, left: int) -> str:
        if left <= 0 and not self._is_exhausted():
            return f"the budget of {self.question.num_trials:,} deployments is used up (--trials)"
        return "all combinations have been tried"

    def _first(self) -> tuple[Deployment, Deployment | None]:
        """The scenario's own settings and vLLM's defaults, with all replications."""
        knobs = self.question.knobs
        start = self._new({knob.key: knob.own for knob in knobs}, START, 0)
        wanted = {knob.key: knob.own if knob.default is None else knob.default for knob in knobs}
        default = self._known(wanted)
        if default is None and all(knob.holds(wanted[knob.key]) for knob in knobs):
            default = self._new(wanted, DEFAULTS, 0)
        first = [start] if default is None or default is start else [start, default]
        for each in first:
            if each.in_space:
                self.study.enqueue_trial({knob.key: knob.drawn_at(each.settings[knob.key]) for knob in knobs})
                self._open.append((self._ask(), each))
        if self.question.at == CAPACITY:
            for each in first:  # vLLM's defaults are searched from the scenario's rate on
                self._more([each], self._seeds)
                each.dropped = self._below_words(each) if each.is_bound else ""
        else:
            self._more(first, self._seeds)
        self._close()
        return start, default

    def _is_better(self, before: Deployment | None, after: Deployment | None) -> bool:
        if after is None or before is after:
            return False
        if before is None or not is_level(before.point, after.point, self.question.target):
            return True
        gained = (after.point.mean("headroom") or 0.0) - (before.point.mean("headroom") or 0.0)
        return gained > HEADROOM

    def _best(self) -> Deployment | None:
        """The one with the highest score of those that have all replications and keep all objectives."""
        full = [each for each in self._deployments.values() if self._is_full(each)]
        scored = [(self._score(each), each) for each in full if each.tried(self.question).is_candidate]
        known = [(score, each) for score, each in scored if score is not None]
        return max(known, key=lambda pair: (pair[0], -pair[1].number))[1] if known else None

    def _is_full(self, each: Deployment) -> bool:
        return len(each.runs) == len(self._seeds)

    @property
    def _seeds(self) -> tuple[int, ...]:
        """Of the search: at capacity a single run has an interval of its own."""
        return self.question.seeds[:1] if self.question.at == CAPACITY else self.question.seeds

    # --- proposals

    def _proposals(self, number: int, round_number: int) -> list[Deployment]:
        """So many deployments that were not tried yet, fewer where no more are left."""
        made: list[Deployment] = []
        repeats = 0
        while len(made) < number and not self._is_exhausted():
            if repeats >= MOST_REPEATS:
                found = self._neighbour(round_number)
                if found is None:
                    break
                made.append(found)
                continue
            trial = self._ask()
            wanted = {knob.key: knob.value_at(trial.params[knob.key]) for knob in self.question.knobs}
            known = self._known(wanted)
            if known is None:
                known = self._new(wanted, SEARCH, round_number)
                self._open.append((trial, known))
                made.append(known)
                repeats = 0
            else:
                self.study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                repeats += 1
        return made

    def _is_exhausted(self) -> bool:
        total = self.question.num_combinations
        return total is not None and sum(each.in_space for each in self._deployments.values()) >= total

    def _neighbour(self, round_number: int) -> Deployment | None:
        """One that differs in one knob from the best that has such neighbours left; None if none has."""
        knobs = self.question.knobs
        for near in self._by_score():
            found = [
                {**near.settings, knob.key: value}
                for knob in knobs
                for value in knob.neighbours(near.settings[knob.key])
                if self._known({**near.settings, knob.key: value}) is None
            ]
            if found:
                wanted = found[int(self._rng.integers(len(found)))]
                made = self._new(wanted, NEIGHBOUR, round_number)
                self.study.enqueue_trial({knob.key: knob.drawn_at(wanted[knob.key]) for knob in knobs})
                self._open.append((self._ask(), made))
                return made
        return None

    def _by_score(self) -> list[Deployment]:
        inside = [each for each in self._deployments.values() if each.in_space and each.runs]
        return sorted(inside, key=lambda each: (each.excess(self.question) > 0, -(self._told(each)), each.number))

    def _ask(self) -> Any:
        return self._quietly(lambda: self.study.ask(self._distributions))

    def _known(self, wanted: Mapping[str, Any]) -> Deployment | None:
        return self._deployments.get(_key(wanted))

    def _new(self, wanted: Mapping[str, Any], origin: str, round_number: int) -> Deployment:
        question = self.question
        given = {key: value for key, value in wanted.items() if value is not None}
        made = deployment_of(question, given, len(self._deployments) + 1, origin, round_number)
        made.settings = dict(wanted)
        made.in_space = all(knob.holds(wanted[knob.key]) for knob in question.knobs)
        self._deployments[_key(wanted)] = made
        return made

    # --- racing

    def _race(self, proposed: Sequence[Deployment]) -> None:
        """One run of each, more for those that may be better than the best so far, and all told to optuna."""
        seeds = self._seeds
        for wave in self._waves(proposed):
            self._more(wave, seeds[:1])
        field_ = [each for each in proposed if self._goes_on(each)]
        field_ = [each for each in field_ if not self._is_hopeless(each, field_)]
        if len(seeds) > 1:
            self._more(field_, seeds[1:FIRST])
            field_ = [each for each in field_ if self._goes_on(each) and not self._is_beaten(each, field_)]
            self._more(field_, seeds[FIRST:])
        for each in field_:
            self._goes_on(each)
        self._revive(proposed)
        self._close()

    def _waves(self, proposed: Sequence[Deployment]) -> Iterator[Sequence[Deployment]]:
        """All at once; at capacity a few, as each has to beat the best, and one while there is none to beat."""
        if self.question.at != CAPACITY:
            yield proposed
            return
        left = list(proposed)
        while left:
            number = 1 if self._best() is None else WAVE
            yield left[:number]
            left = left[number:]

    def _revive(self, proposed: Sequence[Deployment]) -> None:
        """Those that were dropped for one that missed an objective later on run on, since it is no answer itself."""
        for each in proposed:
            if each.beaten_by is not None and each.beaten_by.excess(self.question) > 0:
                each.dropped, each.beaten_by = "", None
                self._more([each], self._seeds[len(each.runs) :])
                self._goes_on(each)

    def _more(self, deployments: Sequence[Deployment], seeds: Sequence[int]) -> None:
        if not deployments or not seeds:
            return
        best = self._best()
        wanted = [self._wanted(each, best) for each in deployments]
        for each, runs in zip(deployments, self.bench.run(wanted, seeds, is_fine=False), strict=True):
            each.runs += runs

    def _wanted(self, each: Deployment, best: Deployment | None) -> Wanted:
        """With what the best so far says about where to look at capacity, and what is not worth to be searched."""
        if self.question.at != CAPACITY or best is None or best is each:
            return Wanted(each.loaded)
        return Wanted(each.loaded, (best.rate_per_gpu,), to_beat(self.question, best.point, each.settings))

    def _goes_on(self, each: Deployment) -> bool:
        """Whether more runs of it could matter; if not it says why."""
        if each.point.infeasible:
            each.dropped = "does not start"
        elif each.excess(self.question) > 0:
            each.dropped = f"misses an objective in run {len(each.runs)}"
        elif each.point.is_unsafe:
            each.dropped = "its memory plan is unsafe"
        elif each.is_bound:
            each.dropped = self._below_words(each)
        return not each.dropped

    def _below_words(self, each: Deployment) -> str:
        """``below 13,300 requests/USD (9.2 req/s): misses ttft:p99<500ms there; not searched further``."""
        run, target = each.runs[-1], self.question.target
        rate = Target("goodput", "", "req/s", "higher").say(run["below_rate"])
        more = f" ({rate})" if target.key != "goodput" else ""
        there = " there" if run["below_why"].startswith("misses") else ""
        bound = target.say(run[f"{target.key}_below"])
        return f"below {bound}{more}: {run['below_why']}{there}; not searched further"

    def _is_hopeless(self, each: Deployment, others: Sequence[Deployment]) -> bool:
        best = self._best()
        rivals = [*([] if best is None else [best]), *(other for other in others if other is not each)]
        rival = next((other for other in rivals if cannot_win(self.question, other.point, each.point)), None)
        if rival is not None:
            each.dropped = f"worse than {rival.number} even if all of its requests were good"
            each.beaten_by = rival
        return rival is not None

    def _is_beaten(self, each: Deployment, others: Sequence[Deployment]) -> bool:
        best = self._best()
        rivals = [other for other in others if other is not each]
        for rival in [*([] if best is None else [best]), *rivals]:
            if len(rival.runs) >= len(each.runs) and self._is_beaten_by(each, rival):
                each.beaten_by = rival
                return True
        return False

    def _finish(self) -> None:
        """More seeds for those that are level with the best at capacity, where the search made one run each."""
        best = self._best()
        if self.question.at != CAPACITY or best is None:
            return
        final = [each for each in self._by_score() if self._is_close(each, best)][:MOST_FINALISTS]
        hints = {each.number: each.rate_per_gpu for each in final}
        for each in final:
            each.runs = []
        for seeds in (self.question.seeds[:FIRST_OF_FINALISTS], self.question.seeds[FIRST_OF_FINALISTS:]):
            wanted = [Wanted(each.loaded, (hints[each.number],) * len(seeds)) for each in final]
            for each, runs in zip(final, self.bench.run(wanted, seeds), strict=True):
                each.runs += runs
            leader = max(final, key=lambda each: (self._told(each), -each.number))
            final = [each for each in final if each is leader or not self._is_beaten_by(each, leader)]
            if len(final) == 1:  # nothing is left to tell it from
                break

    def _is_close(self, each: Deployment, best: Deployment) -> bool:
        if each is best:
            return True
        target = self.question.target
        own, most = each.point.mean(target.key), best.point.mean(target.key)
        if not each.tried(self.question).is_candidate or each.dropped or own is None or most is None:
            return False
        is_near = target.sign * (most - own) <= CLOSE * abs(most)
        return is_near and not excludes(self.question, best.point, each.point)

    def _is_beaten_by(self, each: Deployment, rival: Deployment) -> bool:
        if not excludes(self.question, rival.point, each.point):
            return False
        each.dropped = f"worse than {rival.number} beyond noise after {len(each.runs)} runs"
        return True

    # --- what optuna is told

    def _score(self, each: Deployment) -> float | None:
        """The target with the start's chance taken out, so that trials of one run and of many can be compared."""
        point, question = each.point, self.question
        own = score_of(question, point.values(question.target.key) or (None,), point.mean("headroom"))
        start = next(iter(self._deployments.values()))
        base = start.point.values(question.target.key)
        if own is None or len(base) <= len(each.runs) or start is each:
            return own
        mean, same = sum(base) / len(base), sum(base[: len(each.runs)]) / len(each.runs)
        return own + question.target.sign * (mean - same)

    def _told(self, each: Deployment) -> float:
        """The score, or for what has none the lowest of all."""
        score = self._score(each)
        if score is not None:
            return score
        known = [value for other in self._deployments.values() if (value := self._score(other)) is not None]
        return min(known, default=0.0)

    def _close(self) -> None:
        """Tell optuna what came of the proposals, in their order."""
        waiting, self._open = self._open, []
        for trial, each in waiting:
            over = {slo.text: 0.0 for slo in self.question.objectives}
            for run in each.runs:
                for text, value in ({} if run.get("infeasible") else excesses(run, self.question.objectives)).items():
                    over[text] = max(over.get(text, 0.0), value) if value > 0 else over.get(text, 0.0)
            over["memory"] = DOES_NOT_START if each.point.infeasible else UNSAFE if each.point.is_unsafe else 0.0
            for name, value in over.items():
                trial.set_constraint(name, value)
            if each.is_bound:  # stopped for being worse than the best: it has no value, and ranks below all that have
                self.study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
            else:
                self.study.tell(trial, self._told(each))

    def _importance(self) -> dict[str, float]:
        """PED-ANOVA's share of each knob in being among the best quarter; empty where too few trials can be held.

        One of which only a bound is known is not among the best, so that it counts as the lowest; where fewer than a
        quarter have a value it is not known who is.
        """
        evaluators = self._optuna.importance
        kept = self._optuna.create_study(direction="maximize")
        num_bounds = 0
        for each in self._deployments.values():
            if not each.in_space or each.point.infeasible or (self._score(each) is None and not each.is_bound):
                continue
            num_bounds += each.is_bound
            worst = each.excess(self.question)
            value = self._told(each) - (abs(self._told(each)) * (1 + worst) if worst > 0 else 0.0)
            params = {knob.key: knob.drawn_at(each.settings[knob.key]) for knob in self.question.knobs}
            kept.add_trial(
                self._optuna.trial.create_trial(params=params, distributions=self._distributions, value=value)
            )
        is_told = len(kept.trials) - num_bounds >= BEST_SHARE * len(kept.trials)
        if len(kept.trials) < 2 * STARTUP or len(self.question.knobs) < 2 or not is_told:
            return {}
        evaluator = evaluators.PedAnovaImportanceEvaluator(target_quantile=BEST_SHARE)
        found = self._quietly(lambda: evaluators.get_param_importances(kept, evaluator=evaluator))
        return {key: float(value) for key, value in found.items() if np.isfinite(value)}

    @staticmethod
    def _quietly(do: Callable[[], Any]) -> Any:
        """Without optuna's remarks on what is experimental or will change."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return do()


def deployment_of(question: Question, given: Mapping[str, Any], number: int, origin: str, round_: int) -> Deployment:
    """A deployment with these settings.  Raises ScenarioError for values out of range."""
    loaded = load(question.scenario, {**question.common, **given}, given)
    settings = {key: checked_value(loaded, key, value) for key, value in given.items()}
    words = {knob.key: _word(settings.get(knob.key)) for knob in question.knobs}
    positions = {knob.key: _position(knob, settings.get(knob.key)) for knob in question.knobs}
    return Deployment(number, settings, words, positions, loaded, origin, round_, True)


def _key(wanted: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(repr(value) for value in wanted.values())


def _word(value: Any) -> str:
    return "not set" if value is None else value if isinstance(value, str) else plain(value)


def _position(knob: Knob, value: Any) -> float | None:
    is_one = knob.is_numeric and isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_one else None


def check_optuna() -> None:
    """Raises OptunaMissing without the extra, before a folder is made for what could not begin."""
    _optuna()


def _optuna() -> Any:
    """The package, without its log on stderr.  Raises OptunaMissing."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise OptunaMissing from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
