"""The search for the cheapest deployment, from what is cheap to know to what is not.

1. The memory plan says which deployments start.
2. Requests that have a replica to themselves say which shapes miss an objective at any load.
3. The most that a replica can do says how many it takes at least, so which shapes cannot be the cheapest.
4. One replica's share of the requests says how many it takes, first with vLLM's defaults, then with one knob after the
   other, on the shapes that can still win.
5. Replications say how sure that is.
6. The whole fleets of the best few say what holds.

Every round is a list of jobs whose results come in their order, and what is dropped after a round depends on them
alone: the same seed gives the same answer, whatever the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from windtunnel.planning import jobs
from windtunnel.planning.candidates import Candidate, Feasible, Knobs, Refused, Shape, Space, candidates
from windtunnel.planning.load import Demand, demand_of, refused_share
from windtunnel.planning.offers import Offer
from windtunnel.planning.progress import NUM_STAGES, Stage, Tell
from windtunnel.planning.question import Question, deployment_of, objectives_of, workload_of
from windtunnel.sim.cost.evidence import UNCALIBRATED
from windtunnel.sim.deployment.memory import InfeasibleDeployment
from windtunnel.sim.deployment.model import short_name
from windtunnel.sim.metrics.replications import Interval, mean_interval, paired_difference
from windtunnel.sim.metrics.slo import Slo
from windtunnel.sim.metrics.words import percent
from windtunnel.workers import Job, Workers

CONTENDER = 1.25
"""A shape whose cost is more than so many times the best one's is not tried with other knobs."""
FIRST_WAVE = 4
"""Shapes that are tried at once, lowest bound first; what they cost says which others can still win."""
MOST_REPLICATED = 6
"""Candidates that are replicated."""
NUM_FINALISTS = 3
"""Candidates whose whole fleets are simulated."""
FINALIST = 1.25
"""A shape that costs so many times the best one's is no runner-up whose whole fleet is worth a simulation."""
NUM_FLEET_REPLICATIONS = 3
"""Replications of a whole fleet."""
SATURATION_ERROR = 0.03
"""The most that a replica can do is known within about that (``scenarios.saturation``)."""
ROOM_FOR_KNOBS = 0.8
"""A bound of one setting of the knobs is taken so many times where other settings are meant, too."""
PROBED_BUDGET = 512
"""max_num_batched_tokens, at least, with which a shape is tried that vLLM's default leaves dear: with a smaller one
prompts take long whatever the card."""
FLEET_MARGIN = 1.1
"""A whole fleet may take so many times the replicas that one replica's share of the requests asks for."""
LARGER_POOL = 1.2
"""A KV cache so many times that of vLLM's defaults is worth a bound of its own."""


@dataclass(slots=True, eq=False)
class Tried:
    """A candidate and what became of it."""

    feasible: Feasible
    offer: Offer
    calibrated: bool
    profile: str | None
    evidence: str = UNCALIBRATED
    """What stands behind its step times; see ``windtunnel.sim.cost.evidence``."""
    is_bound_of_shape: bool = False
    floor: float = 0.0
    """Replicas below which the load is more than ``MAX_RHO`` of what they can do at most; 0 where that is not known."""
    estimates: list[dict[str, Any]] = field(default_factory=list)
    """Results of ``jobs.needed``, one a replication."""
    fleets: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    """Results of ``jobs.fleet`` by number of replicas and replication."""

    @property
    def candidate(self) -> Candidate:
        """What was tried."""
        return self.feasible.candidate

    @property
    def shape(self) -> Shape:
        """What one replica runs on."""
        return self.candidate.shape

    @property
    def unit_cost(self) -> float:
        """What an hour of one replica costs; its number of cards where no prices were given."""
        price = self.offer.price_per_hour
        return self.shape.num_gpus * (1.0 if price is None else price)

    @property
    def num_replicas(self) -> Interval | None:
        """Replicas that it takes, not rounded, with an interval where there are replications; None if none do."""
        found = [each["num_replicas"] for each in self.estimates]
        if not found or any(value is None for value in found):
            return None
        return mean_interval([max(value, self.floor) for value in found])

    @property
    def least(self) -> int:
        """Whole replicas that keep up with the load, whatever the latency: no fewer are recommended."""
        return whole(self.floor)

    @property
    def missed(self) -> list[dict[str, Any]]:
        """Objectives that it misses with the largest number of replicas tried, in the first replication where none
        does; empty where each has one.
        """
        failed = next((each for each in self.estimates if each["num_replicas"] is None), None)
        below = (failed or {}).get("below") or {}
        return [objective for objective in below.get("objectives", ()) if not objective["passed"]]

    @property
    def cost(self) -> float:
        """Cost an hour of as many replicas as it takes, not rounded; infinite where no number does."""
        needed = self.num_replicas
        return math.inf if needed is None else max(needed.mean, 1.0) * self.unit_cost

    def whole_cost(self, num_replicas: int, spare: int) -> float:
        """Cost an hour of so many replicas and the spare ones."""
        return (num_replicas + spare) * self.unit_cost


@dataclass(frozen=True, slots=True)
class Dropped:
    """A shape that was simulated, or bounded, and can not be the answer."""

    shape: Shape
    kind: str
    """"too_long", "too_slow_alone", "too_many", "dearer_by_bound" or "never_holds"."""
    reason: str
    bound: float | None = None
    """Cost an hour below which it cannot come."""


@dataclass(frozen=True, slots=True)
class WithoutEffect:
    """A value of a knob that was not tried, since the run would be the same."""

    shape: Shape
    knob: str
    value: float
    reason: str


@dataclass(slots=True)
class Found:
    """All that a search came to know."""

    demand: Demand
    tried: list[Tried]
    refused: list[Refused]
    dropped: list[Dropped]
    alone: dict[Shape, dict[str, Any]]
    limits: dict[Candidate, float | None]
    ranked: list[Tried]
    """Those with a number of replicas, cheapest first, calibrated ones apart from the others (see ``uncalibrated``)."""
    finalists: list[Tried]
    without_effect: list[WithoutEffect] = field(default_factory=list)
    refused_shares: dict[str, float] = field(default_factory=dict)
    """Of the requests, by model: those that max_model_len refuses."""
    num_simulations: int = 0
    num_requests: int = 0


def search(
    question: Question,
    space: Space,
    workers: Workers,
    *,
    with_uncalibrated: bool = False,
    spare: int = 0,
    exhaustive: bool = False,
    tell: Tell,
) -> Found:
    """Find the cheapest deployments that keep the objectives; ``spare`` replicas are bought beside those needed.

    Calibrated and uncalibrated step times are never ranked together: as long as there is a calibrated shape the others
    are left out, or, ``with_uncalibrated``, tried and kept apart.

    ``exhaustive`` leaves nothing out for what a bound says, and estimates every candidate: many times the work, to
    measure what is lost without (``benchmarks/plan_pruning.py``).

    Raises ValueError where no number of replicas follows from the workload, and what resolving a scenario raises.
    """
    kind = _ExhaustiveSearch if exhaustive else _Search
    return kind(question, space, workers, with_uncalibrated, spare, tell).run()


class _Search:
    def __init__(
        self, question: Question, space: Space, workers: Workers, with_uncalibrated: bool, spare: int, tell: Tell
    ) -> None:
        self._question, self._space, self._workers = question, space, workers
        self._with_uncalibrated, self._spare, self._tell = with_uncalibrated, spare, tell
        self._stage = Stage(tell)
        self._num_fleets = min(NUM_FLEET_REPLICATIONS, question.replications)
        self._offers = {offer.gpu: offer for offer in space.offers}
        self._workload = workload_of(question)
        self.found = Found(demand_of(self._workload), [], [], [], {}, {}, [], [])

    def run(self) -> Found:
        feasible = self._start()
        groups = self._groups(feasible)
        for by_shape in groups:
            self._run_group(by_shape)
        self.found.ranked = sorted(
            (each for each in self.found.tried if each.num_replicas is not None),
            key=lambda each: (not each.calibrated, each.cost, each.candidate),
        )
        for is_calibrated in (True, False):
            self._verify([each for each in self.found.ranked if each.calibrated is is_calibrated])
        return self.found

    # 1 -- what starts, and what is known of its steps

    def _start(self) -> dict[Shape, list[Tried]]:
        self._tell(f"1 of {NUM_STAGES}, planning memory")
        feasible, self.found.refused = candidates(self._space)
        by_shape: dict[Shape, list[Tried]] = {}
        for each in feasible:
            by_shape.setdefault(each.candidate.shape, []).append(
                Tried(each, self._offers[each.candidate.shape.gpu], False, None)
            )
        for shape, options in list(by_shape.items()):
            try:
                resolved = deployment_of(self._question, options[0].candidate)
            except (ValueError, InfeasibleDeployment) as error:  # a profile of another split, an option not there
                self.found.refused.append(Refused(shape, (), "refused", str(error)))
                del by_shape[shape]
                continue
            share = self.found.refused_shares[shape.model] = refused_share(
                self._workload, resolved.system.config.max_model_len
            )
            if too_long := _too_long(self._question, shape, share, resolved.system.config.max_model_len):
                self.found.dropped.append(Dropped(shape, "too_long", too_long))
                del by_shape[shape]
                continue
            for option in options:
                option.calibrated, option.evidence = resolved.cost.calibrated, resolved.evidence
                option.profile = resolved.profile
        return by_shape

    def _groups(self, by_shape: dict[Shape, list[Tried]]) -> list[dict[Shape, list[Tried]]]:
        """Shapes to be ranked together: the calibrated ones, and, where wanted or where there are none, the others."""
        calibrated = {shape: options for shape, options in by_shape.items() if options[0].calibrated}
        others = {shape: options for shape, options in by_shape.items() if not options[0].calibrated}
        if calibrated and not self._with_uncalibrated:
            self.found.refused += [Refused(shape, (), "uncalibrated", _UNCALIBRATED) for shape in others]
            others = {}
        return [group for group in (calibrated, others) if group]

    # 2 and 3 -- bounds

    def _run_group(self, by_shape: dict[Shape, list[Tried]]) -> None:
        shapes = self._fast_enough_alone(by_shape)
        if not shapes:
            return
        firsts, wider, least = self._bounds({shape: by_shape[shape] for shape in shapes})
        shapes = [shape for shape in shapes if self._is_within_reach(shape, least[shape])]
        order = sorted(shapes, key=lambda shape: (least[shape] * firsts[shape].unit_cost, shape))
        best = math.inf
        tried: list[Tried] = []
        for wave in (order[:FIRST_WAVE], order[FIRST_WAVE:]):
            kept = [shape for shape in wave if self._can_win(firsts[shape], least[shape], best)]
            begun = {shape: [firsts[shape], *([wider[shape]] if shape in wider else [])] for shape in kept}
            self._begin(4, f"replicas for {_counted(len(kept), 'kind')}")
            self._estimate([each for options in begun.values() for each in options], least, replication=0)
            tried += [min(options, key=lambda each: each.cost) for options in begun.values()]
            best = min((self._surely(each) for each in tried), default=math.inf)
        self._turn_knobs(tried, by_shape, least)
        self._drop_hopeless(tried)

    def _fast_enough_alone(self, by_shape: dict[Shape, list[Tried]]) -> list[Shape]:
        """Shapes on which a request that has a replica to itself keeps every objective."""
        largest = [
            max(options, key=lambda each: each.candidate.knobs.max_num_batched_tokens) for options in by_shape.values()
        ]
        self._begin(2, f"requests one at a time on {_counted(len(largest), 'kind')}")
        results = self._do(jobs.alone_job(self._question, each.candidate) for each in largest)
        kept = []
        for each, result in zip(largest, results, strict=True):
            self.found.alone[each.shape] = result
            missed = [objective for objective in result["objectives"] if _is_missed_alone(objective)]
            if missed:
                self.found.dropped.append(Dropped(each.shape, "too_slow_alone", _too_slow(missed)))
            else:
                kept.append(each.shape)
        return kept

    def _bounds(
        self, by_shape: dict[Shape, list[Tried]]
    ) -> tuple[dict[Shape, Tried], dict[Shape, Tried], dict[Shape, float]]:
        """For each shape the knobs to begin with, those with more seats and tokens where they do more than
        ``ROOM_FOR_KNOBS`` allows for, and the least number of replicas that keep up with any of these.

        To begin with are vLLM's defaults (the first of the lists that were given), or the knobs with the largest KV
        cache where that is much larger and does more.
        """
        asked = [each for options in by_shape.values() for each in _extremes(options)]
        self._begin(3, f"what {_counted(len(by_shape), 'kind')} can do at most")
        results = self._do(jobs.limit_job(self._question, each.candidate) for each in asked)
        firsts: dict[Shape, Tried] = {}
        wider: dict[Shape, Tried] = {}
        bounds: dict[Candidate, float] = {}
        least: dict[Shape, float] = {}
        for each, result in zip(asked, results, strict=True):
            rate = self.found.limits[each.candidate] = result["request_throughput"]
            bound = _LEAST if rate is None else self.found.demand.mean_rate / (rate * (1 + SATURATION_ERROR))
            bounds[each.candidate] = bound
            self._set_floor(each)
            least[each.shape] = min(bound, least.get(each.shape, math.inf))
            first = firsts.setdefault(each.shape, each)
            if _is_wider(each, first):
                if bound < ROOM_FOR_KNOBS * bounds[first.candidate]:
                    wider[each.shape] = each
            elif bound < bounds[first.candidate] / (1 + SATURATION_ERROR):
                firsts[each.shape] = each
        return firsts, wider, least

    def _set_floor(self, each: Tried) -> None:
        """The least number of replicas that keep up, from what one does at most."""
        limit = self.found.limits[each.candidate]
        if limit is not None:
            load = self.found.demand.mean_rate * (1 - self.found.refused_shares[each.shape.model])
            each.floor = load / (limit * jobs.MAX_RHO)

    def _know_limits(self, chosen: Sequence[Tried]) -> None:
        """What a replica of each does at most, where that was not asked before."""
        wanted = [each for each in chosen if each.candidate not in self.found.limits]
        if wanted:
            self._begin(6, f"what {_counted(len(wanted), 'candidate')} can do at most")
            results = self._do(jobs.limit_job(self._question, each.candidate) for each in wanted)
            for each, result in zip(wanted, results, strict=True):
                self.found.limits[each.candidate] = result["request_throughput"]
                self._set_floor(each)

    def _is_within_reach(self, shape: Shape, least: float) -> bool:
        """Whether so many replicas can be simulated as could be needed."""
        if ROOM_FOR_KNOBS * least + self._spare <= jobs.MOST_REPLICAS:
            return True
        reason = f"it takes at least {least:,.0f} replicas to keep up, and a fleet has at most {jobs.MOST_REPLICAS:,}"
        self.found.dropped.append(Dropped(shape, "too_many", reason))
        return False

    def _can_win(self, first: Tried, least: float, best: float) -> bool:
        """Whether a shape's bound, with room for better knobs, is below what another one costs, both in whole
        replicas and with the spare ones: what is bought.
        """
        bound = first.whole_cost(whole(ROOM_FOR_KNOBS * least), self._spare)
        if bound <= best:
            return True
        reason = (
            f"it takes at least {max(1.0, least):.1f} replicas to keep up with the mean rate; were other knobs to "
            f"spare {100 * (1 - ROOM_FOR_KNOBS):.0f} % of them, it would still cost more than the best deployment found"
        )
        self.found.dropped.append(Dropped(first.shape, "dearer_by_bound", reason, bound))
        return False

    def _surely(self, each: Tried) -> float:
        """What a candidate costs in whole replicas, should its fleet take somewhat more than the estimate says."""
        needed = each.num_replicas
        return math.inf if needed is None else each.whole_cost(whole(FLEET_MARGIN * needed.mean), self._spare)

    # 4 and 5 -- how many replicas

    def _estimate(self, tried: Sequence[Tried], least: dict[Shape, float], replication: int) -> None:
        """One more replication of each, and its place among those tried."""
        if not tried:
            return
        made = []
        for each in tried:
            bound = least[each.shape] * (1.0 if each.candidate in self.found.limits else ROOM_FOR_KNOBS)
            alike = [each] if each.estimates else [other for other in self.found.tried if other.shape == each.shape]
            known = [
                found["num_replicas"]
                for other in alike
                for found in other.estimates
                if found["num_replicas"] is not None
            ]
            guess, step = (sum(known) / len(known), _NARROW_STEP) if known else (_FIRST_GUESS * bound, jobs.STEP)
            made.append(
                jobs.needed_job(self._question, each.candidate, replication, least=bound, guess=guess, step=step)
            )
        for each, result in zip(tried, self._do(made), strict=True):
            each.estimates.append(result)
            if each not in self.found.tried:
                self.found.tried.append(each)

    def _turn_knobs(
        self, firsts: Sequence[Tried], by_shape: dict[Shape, list[Tried]], least: dict[Shape, float]
    ) -> None:
        """One knob after the other, on the shapes that are still near the best; then replications of the best few."""
        best = {each.shape: each for each in firsts}
        self._probe(best, by_shape, least)
        for knob in _KNOBS:
            near = [shape for shape, each in best.items() if self._is_worth_turning(each, best, least)]
            others = {shape: self._worth_trying(best[shape], by_shape[shape], knob) for shape in near}
            self._begin(4, f"{knob} of {_counted(len(near), 'kind')}")
            self._estimate([each for options in others.values() for each in options], least, replication=0)
            for shape, options in others.items():
                best[shape] = min((best[shape], *options), key=lambda each: (each.cost, not each.feasible.is_default))
        self._replicate([each for options in by_shape.values() for each in options if each.estimates], best, least)

    def _probe(self, best: dict[Shape, Tried], by_shape: dict[Shape, list[Tried]], least: dict[Shape, float]) -> None:
        """One other token budget for each shape that vLLM's own leaves dear, though the engine could do much more.

        What that makes cheaper may leave another shape dear, which then gets its try, too.
        """
        probed: set[Shape] = set()
        while True:
            wanted = {
                shape: option
                for shape, each in best.items()
                if shape not in probed
                and each.cost < math.inf
                and self._may_win(each, best, least)
                and not self._is_near(each, best, least)
                and (option := _other_budget(each, by_shape[shape])) is not None
            }
            if not wanted:
                break
            self._begin(4, f"another budget of {_counted(len(wanted), 'kind')}")
            self._estimate(list(wanted.values()), least, replication=0)
            for shape, option in wanted.items():
                best[shape] = min((best[shape], option), key=lambda each: each.cost)
            probed |= wanted.keys()

    def _is_worth_turning(self, each: Tried, others: dict[Shape, Tried], least: dict[Shape, float]) -> bool:
        """Whether other knobs may make a shape hold at all, or save it a replica and with that be the cheapest."""
        needed = each.num_replicas
        if needed is None:
            return True
        saves = whole(ROOM_FOR_KNOBS * least[each.shape]) < whole(FLEET_MARGIN * needed.mean)
        return saves and self._is_near(each, others, least)

    def _may_win(self, each: Tried, others: dict[Shape, Tried], least: dict[Shape, float]) -> bool:
        """Whether a shape, by what its engine can do at most, may be the cheapest in whole replicas."""
        at_least = each.whole_cost(whole(ROOM_FOR_KNOBS * least[each.shape]), self._spare)
        return at_least <= min(self._surely(other) for other in others.values())

    def _is_near(self, each: Tried, others: dict[Shape, Tried], least: dict[Shape, float]) -> bool:
        """Whether a shape may win, and is not far from the best, be it with fractions of replicas or without."""
        if not self._may_win(each, others, least) or each.cost == math.inf:
            return False
        cheapest = min(other.cost for other in others.values())
        least_bought = min(
            other.whole_cost(_rounded(other), self._spare) for other in others.values() if other.cost < math.inf
        )
        bought = each.whole_cost(_rounded(each), self._spare)
        return each.cost <= CONTENDER * cheapest or bought <= CONTENDER * least_bought

    def _worth_trying(self, base: Tried, options: Sequence[Tried], knob: str) -> list[Tried]:
        """Other values of a knob, but for those that change nothing, which are written down."""
        shares_prefixes = workload_of(self._question).content is not None
        kept = []
        for each in _varied(base, options, knob):
            why = _without_effect(base, each, knob, shares_prefixes)
            if why:
                self.found.without_effect.append(
                    WithoutEffect(each.shape, knob, getattr(each.candidate.knobs, knob), why)
                )
            else:
                kept.append(each)
        return kept

    def _replicate(self, tried: Sequence[Tried], best: dict[Shape, Tried], least: dict[Shape, float]) -> None:
        """More replications of the cheapest, and of the best of each shape that is near."""
        ranked = sorted((each for each in tried if each.cost < math.inf), key=lambda each: (each.cost, each.candidate))
        if not ranked:
            return
        near = [each for each in best.values() if self._is_near(each, best, least)]
        cheap = [each for each in ranked[:MOST_REPLICATED] if each.cost <= CONTENDER * ranked[0].cost]
        chosen = list(dict.fromkeys([*cheap, *near]))
        self._begin(
            5,
            f"{_counted(len(chosen), 'candidate')} on other requests",
            (self._question.replications - 1) * len(chosen),
        )
        for replication in range(1, self._question.replications):
            self._estimate(chosen, least, replication)

    def _drop_hopeless(self, firsts: Sequence[Tried]) -> None:
        """Shapes that keep the objectives with no number of replicas, whatever the knobs."""
        for first in firsts:
            options = [each for each in self.found.tried if each.shape == first.shape]
            if all(each.num_replicas is None for each in options):
                self.found.dropped.append(Dropped(first.shape, "never_holds", _never(first.missed)))

    # 6 -- the whole fleets of the best few

    def _verify(self, ranked: Sequence[Tried]) -> None:
        """Whole fleets of the cheapest candidates, one of a shape first, then others of the cheapest."""
        chosen = self._finalists(ranked)
        while chosen:
            self._know_limits(chosen)
            self._find_sizes(chosen)
            self._repeat(chosen)
            self.found.finalists += chosen
            chosen = self._might_be_cheaper(ranked)

    def _might_be_cheaper(self, ranked: Sequence[Tried]) -> list[Tried]:
        """The cheapest of the shapes not yet verified whose estimate costs less than any fleet that held."""
        known = [each for each in self.found.finalists if each in ranked]
        held = [each.whole_cost(size, self._spare) for each in known if (size := smallest_that_holds(each)) is not None]
        shapes = {each.shape for each in known}
        others = [each for each in self._in_whole_replicas(ranked) if each.shape not in shapes]
        least = min(held, default=math.inf)
        return [each for each in others if each.whole_cost(_rounded(each), self._spare) < least][:1]

    def _find_sizes(self, chosen: Sequence[Tried]) -> None:
        """For each the number of replicas that holds over the whole workload, and the next smaller, which does not."""
        self._begin(6, f"whole fleets of {_counted(len(chosen), 'candidate')}")
        sizes = {each.candidate: min(_rounded(each), jobs.MOST_REPLICAS - self._spare) for each in chosen}
        settled: set[Candidate] = set()
        for _ in range(_MOST_ROUNDS):
            open_ones = [each for each in chosen if each.candidate not in settled]
            if not open_ones:
                break
            self._simulate_fleets([(each, sizes[each.candidate], 0) for each in open_ones])
            for each in open_ones:
                step = next_size(each, jobs.MOST_REPLICAS - self._spare)
                if step is None:
                    settled.add(each.candidate)
                else:
                    sizes[each.candidate] = step

    def _in_whole_replicas(self, ranked: Sequence[Tried]) -> list[Tried]:
        """By what is bought."""
        return sorted(
            ranked,
            key=lambda each: (each.whole_cost(_rounded(each), self._spare), each.cost, not each.feasible.is_default),
        )

    def _finalists(self, ranked: Sequence[Tried]) -> list[Tried]:
        """The cheapest as whole fleets: the best of each shape first, then others of the shapes near the best."""
        order = self._in_whole_replicas(ranked)
        firsts = [each for k, each in enumerate(order) if each.shape not in {other.shape for other in order[:k]}]
        near = [each for each in firsts if each.cost <= FINALIST * firsts[0].cost or self._costs_as(each, firsts[0])]
        chosen = near[:NUM_FINALISTS] if len(near) > 1 else firsts[:2]
        others = [each for each in order if each not in chosen and each.cost <= (1 + jobs.TOLERANCE) * order[0].cost]
        return [*chosen, *others[: max(0, NUM_FINALISTS - len(chosen))]]

    def _costs_as(self, each: Tried, best: Tried) -> bool:
        """Whether a fleet costs about what another one does, in whole replicas."""
        one, other = (tried.whole_cost(_rounded(tried), self._spare) for tried in (each, best))
        return one <= FINALIST * other

    def _repeat(self, chosen: Sequence[Tried]) -> None:
        """The smallest fleet that held, in the other replications, one more replica where one of them does not hold."""
        self._begin(6, f"whole fleets of {_counted(len(chosen), 'candidate')}, other orders")
        for _ in range(_MOST_ROUNDS):
            self._simulate_fleets(
                [
                    (each, size, 0)
                    for each in chosen
                    if (size := _skipped(each, jobs.MOST_REPLICAS - self._spare)) is not None
                ]
            )
            wanted = [
                (each, size, replication)
                for each in chosen
                if (size := smallest_that_holds(each)) is not None
                for replication in range(1, self._num_fleets)
                if (size, replication) not in each.fleets
            ]
            if not wanted:
                break
            self._simulate_fleets(wanted)

    def _simulate_fleets(self, wanted: Sequence[tuple[Tried, int, int]]) -> None:
        results = self._do(
            jobs.fleet_job(self._question, each.candidate, size, replication) for each, size, replication in wanted
        )
        for (each, size, replication), result in zip(wanted, results, strict=True):
            each.fleets[size, replication] = result

    # --

    def _begin(self, number: int, what: str, total: int | None = None) -> None:
        self._stage.begin(number, what, total)

    def _do(self, made: Iterable[Job]) -> list[Any]:
        """Results of jobs, in order; what they took is counted."""
        results = self._stage.do(list(made), self._workers)
        for result in results:
            self.found.num_simulations += result.get("num_simulations", 1)
            self.found.num_requests += result.get("num_requests", 0)
        return results


class _ExhaustiveSearch(_Search):
    """Every candidate is estimated, and every one verified whose estimate costs less than what held."""

    def _run_group(self, by_shape: dict[Shape, list[Tried]]) -> None:
        firsts, _, bounds = self._bounds(by_shape)
        least = {shape: _LOOSE * bound for shape, bound in bounds.items()}
        self._begin(4, f"replicas for {_counted(len(by_shape), 'kind')}")
        self._estimate(list(firsts.values()), least, replication=0)
        rest = [each for options in by_shape.values() for each in options if not each.estimates]
        self._begin(4, f"replicas for {_counted(len(rest), 'other setting')}")
        self._estimate(rest, least, replication=0)
        self._replicate([each for options in by_shape.values() for each in options], firsts, least)
        self._drop_hopeless(list(firsts.values()))

    def _might_be_cheaper(self, ranked: Sequence[Tried]) -> list[Tried]:
        known = [each for each in self.found.finalists if each in ranked]
        held = [each.whole_cost(size, self._spare) for each in known if (size := smallest_that_holds(each)) is not None]
        least = min(held, default=math.inf)
        others = [each for each in self._in_whole_replicas(ranked) if each not in known]
        return [each for each in others if each.whole_cost(_rounded(each), self._spare) < least][:1]


_LOOSE = 0.25
"""Of a bound, where none is to be trusted."""
_UNCALIBRATED = (
    "no profile prices its steps, and roofline times are not ranked beside those of profiles (measure it, or "
    "--uncalibrated tries it and keeps it apart)"
)
_LEAST = 0.02
"""Replicas from which to begin where nothing bounds them."""
_FIRST_GUESS = 1.3
"""A first guess, over the bound: engines are rarely run fuller than three quarters under an objective on latency."""
_NARROW_STEP = 1.06
"""First factor between tries where another replication already said where to look."""
_MOST_ROUNDS = 25
_STRIDE = 0.03
"""Of a fleet's size, between two that are simulated while one side of the bracket is not known."""
_KNOBS = ("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization")


def _extremes(options: Sequence[Tried]) -> list[Tried]:
    """The first of a shape's candidates, the one with the largest KV cache where that is much larger, and the one with
    the most seats and tokens where the first has fewer of either.
    """
    first = options[0]
    largest = max(options, key=lambda each: each.feasible.memory.kv_cache_tokens)
    is_larger = largest.feasible.memory.kv_cache_tokens > LARGER_POOL * first.feasible.memory.kv_cache_tokens
    widest = max(
        options,
        key=lambda each: (
            each.candidate.knobs.max_num_seqs,
            each.candidate.knobs.max_num_batched_tokens,
            each.feasible.memory.kv_cache_tokens,
        ),
    )
    found = [first, *([largest] if is_larger else []), *([widest] if _is_wider(widest, first) else [])]
    return list(dict.fromkeys(found))


def _is_wider(each: Tried, other: Tried) -> bool:
    """Whether one has more seats or a larger budget, and neither less."""
    one, two = each.candidate.knobs, other.candidate.knobs
    seats, budget = one.max_num_seqs - two.max_num_seqs, one.max_num_batched_tokens - two.max_num_batched_tokens
    return min(seats, budget) >= 0 and max(seats, budget) > 0


def _is_missed_alone(objective: dict[str, Any]) -> bool:
    """Whether an objective that more load can only worsen is missed without load: latencies, and shares of them."""
    return (
        not objective["passed"]
        and (objective["unit"] == "ms" or objective["text"].startswith("goodput"))
        and (objective["unit"] != "/s")
    )


def _too_slow(missed: Sequence[dict[str, Any]]) -> str:
    told = "; ".join(f"{each['text']}: {shown(each)}" for each in missed)
    return f"too slow even for requests that have a replica to themselves ({told})"


def _never(missed: Sequence[dict[str, Any]]) -> str:
    told = "; ".join(f"{each['text']}: {shown(each)}" for each in missed)
    return f"no number of replicas that was tried keeps the objectives{f' ({told})' if told else ''}"


def shown(objective: dict[str, Any]) -> str:
    """What was measured, with its unit."""
    value, unit = objective["measured"], objective["unit"]
    return "nothing measured" if value is None else f"{value:,.4g} {unit}".strip()


def _other_budget(base: Tried, options: Sequence[Tried]) -> Tried | None:
    """A much smaller token budget where it is the time between tokens that costs replicas, else the largest one."""
    own = base.candidate.knobs.max_num_batched_tokens
    others = _varied(base, options, "max_num_batched_tokens")
    worst = (base.estimates[0]["at"] or {}).get("worst") or ""
    if worst.startswith(("itl", "tpot", "goodput")):
        smaller = [each for each in others if PROBED_BUDGET <= each.candidate.knobs.max_num_batched_tokens < own]
        return min(smaller, key=lambda each: each.candidate.knobs.max_num_batched_tokens, default=None)
    larger = [each for each in others if each.candidate.knobs.max_num_batched_tokens > own]
    return max(larger, key=lambda each: each.candidate.knobs.max_num_batched_tokens, default=None)


def _varied(base: Tried, options: Sequence[Tried], knob: str) -> list[Tried]:
    """The candidates of the shape that differ from this one in that knob alone, and were not tried."""

    def rest(knobs: Knobs) -> dict[str, Any]:
        return {name: getattr(knobs, name) for name in _KNOBS if name != knob}

    return [each for each in options if not each.estimates and rest(each.candidate.knobs) == rest(base.candidate.knobs)]


def _without_effect(base: Tried, option: Tried, knob: str, shares_prefixes: bool) -> str:
    """Why this value of the knob gives the very same run as the base's; empty where it may not.

    A limit that a run never reached changes nothing when it is another one that the run never reaches.
    """
    at = base.estimates[0]["at"] if base.estimates else None
    if at is None:
        return ""
    ours, other = base.candidate.knobs, option.candidate.knobs
    if knob == "max_num_seqs" and at["num_running_peak"] < min(ours.max_num_seqs, other.max_num_seqs):
        return f"never more than {at['num_running_peak']:,} requests ran at once"
    is_pool_ample = (
        not shares_prefixes
        and not at["num_preemptions"]
        and at["kv_usage_peak"] * base.feasible.memory.num_gpu_blocks
        < 0.98 * min(base.feasible.memory.num_gpu_blocks, option.feasible.memory.num_gpu_blocks)
    )
    smaller = min(ours.max_num_batched_tokens, other.max_num_batched_tokens)
    if knob == "max_num_batched_tokens" and is_pool_ample and at["num_step_tokens_peak"] < smaller:
        return f"never more than {at['num_step_tokens_peak']:,} tokens were in a step"
    if knob == "gpu_memory_utilization" and is_pool_ample:
        return f"never more than {100 * at['kv_usage_peak']:.0f} % of the KV cache was in use"
    return ""


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def whole(num_replicas: float) -> int:
    """Replicas that can be bought."""
    return max(1, math.ceil(num_replicas - 1e-9))


def _rounded(each: Tried) -> int:
    """Whole replicas from which the simulation of fleets begins: a router that looks at the load does a little better
    than taking turns, so the mean is rounded up, not the end of its interval."""
    needed = each.num_replicas
    return each.least if needed is None else whole(needed.mean)


def next_size(each: Tried, most: int) -> int | None:
    """The size to simulate next, so that one is known to hold and the next smaller not to; None where that is known.
    Of fewer than ``each.least`` it is known.

    The first step is of one replica, of a large fleet a few percent; steps double until both sides are known, and what
    is between them is then halved.
    """
    holds = {known: result["holds"] for (known, replication), result in each.fleets.items() if replication == 0}
    high = min((size for size, held in holds.items() if held), default=None)
    tried = [size for size, held in holds.items() if not held and (high is None or size < high)]
    low = max(tried, default=each.least - 1)
    step = 2 ** (len(holds) - 1) * _STRIDE
    if high is None:
        return min(low + max(1, round(step * low)), most) if low < most else None
    if high - low <= 1:
        return None
    return (low + high) // 2 if tried else max(each.least, high - max(1, round(step * high)))


def _skipped(each: Tried, most: int) -> int | None:
    """One replica more than the largest fleet that missed in a replication, where nobody simulated that."""
    missed = max((size for (size, _), result in each.fleets.items() if not result["holds"]), default=None)
    return None if missed is None or missed >= most or (missed + 1, 0) in each.fleets else missed + 1


def smallest_that_holds(each: Tried, *, in_all: bool = True) -> int | None:
    """The smallest fleet that held in every replication of it (or, with ``in_all`` False, in any); None if none did."""
    sizes: dict[int, list[bool]] = {}
    for (size, _), result in each.fleets.items():
        if size >= each.least:
            sizes.setdefault(size, []).append(result["holds"])
    held = [size for size, results in sizes.items() if (all(results) if in_all else any(results))]
    return min(held, default=None)


def room_percent(slo: Slo) -> float:
    """So many of a hundred requests may be refused before the objective is missed: each misses every latency."""
    if slo.metric == "goodput":
        return 100 - slo.limit if slo.unit == "%" else 100.0
    if slo.metric == "failed":
        return slo.limit if slo.unit == "%" else 100.0
    return slo.room_percent if slo.unit == "ms" else 100.0


def _too_long(question: Question, shape: Shape, share: float, max_model_len: int) -> str:
    """Why a model that refuses so many requests cannot keep the objectives; empty where it can."""
    broken = [slo for slo in objectives_of(question)[0] if 100 * share > room_percent(slo)]
    if not broken:
        return ""
    strictest = min(broken, key=room_percent)
    return (
        f"{percent(share)} of the requests need a longer context than max_model_len {max_model_len:,} of "
        f"{short_name(shape.model)} and are refused, and {strictest.text} leaves room for "
        f"{room_percent(strictest):g} %: raise max_model_len, choose another model, or leave those rows out"
    )


def difference(a: Tried, b: Tried) -> Interval | None:
    """What b costs more than a an hour, on the same requests, replication by replication; None without replications."""
    costs = [
        [found["num_replicas"] * each.unit_cost for found in each.estimates if found["num_replicas"] is not None]
        for each in (a, b)
    ]
    num = min(map(len, costs))
    return paired_difference(costs[0][:num], costs[1][:num]) if num >= 2 else None
