"""The near future of a running engine: from a snapshot, simulate the next seconds as they are, or with other limits.

A fork starts from what the engine really holds (queues, progress, blocks) and goes on in virtual time.  Three things it
cannot know and has to be told: what a step costs (the cost model), what will still arrive, and how long the answers
will be that are being written.  Everything else is the scheduler's own rules, so with the true arrivals, lengths and
step times the forecast is what will happen, block ids included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np

from windtunnel.sim.client import Client
from windtunnel.sim.cluster import Cluster
from windtunnel.sim.cost.evidence import evidence_of
from windtunnel.sim.cost.fitted import FittedCost, extrapolation_warning
from windtunnel.sim.engine.keys import STREAM_BITS, BlockKeys, ListedKeys
from windtunnel.sim.engine.plan import StepPlan, StepResult
from windtunnel.sim.engine.protocols import CostModel, Executor, SchedulerProtocol
from windtunnel.sim.engine.request import Request
from windtunnel.sim.engine.scheduler import Scheduler
from windtunnel.sim.engine.snapshot import (
    OWN_STREAMS,
    RecentRequest,
    RequestState,
    Snapshot,
    change,
    restore,
    take_snapshot,
)
from windtunnel.sim.log import ReplicaLog, RequestLog
from windtunnel.sim.metrics.window import UNITS, Metrics, seen_in, window_metrics, with_state_of
from windtunnel.sim.noise import StepNoise
from windtunnel.sim.records import Outcome, Records
from windtunnel.sim.replica import Replica
from windtunnel.sim.rng import stream
from windtunnel.sim.simulate import check_fits
from windtunnel.sim.simulated import NS_PER_S, NoisySimExecutor, SimExecutor
from windtunnel.sim.speculation import Drafting
from windtunnel.sim.workload import Workload, workload
from windtunnel.sim.world import World

LENGTHS = ("known", "recent", "max_tokens")
RECENT_WINDOW_S = 60.0
"""Arrivals of so many seconds say how fast requests come."""
MAX_HORIZON_S = 86_400.0
_CONTENT_SHIFT = 1 << 37
"""Streams of arrivals in an engine whose blocks are told apart by tokens: nothing there is theirs."""
_ARRIVING_STREAMS = OWN_STREAMS + (1 << 30)


class ForkTooLong(ValueError):
    """The horizon holds more steps than were allowed."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests go on to come at random (Poisson), each like one of the recent ones.

    A request takes prompt length, ``max_tokens``, priority and the beginning that it shares with others from a recent
    one, drawn evenly.  Raises ValueError for a rate below 0.
    """

    requests_per_s: float | None = None
    """None is the rate of the recent arrivals."""

    def __post_init__(self) -> None:
        rate = self.requests_per_s
        if rate is not None and not (0.0 <= rate < math.inf):
            raise ValueError(f"the rate must be a finite number of at least 0 requests/s, got {rate}")


class MetricError(NamedTuple):
    """One metric, foretold and seen."""

    name: str
    unit: str
    predicted: float | None
    observed: float | None
    error_percent: float | None
    """Predicted over observed, less one; None where one of them is missing or the observed is 0."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the next seconds will bring, as far as can be known."""

    begin_ns: int
    """The moment of the snapshot, on the engine's clock."""
    end_ns: int
    metrics: dict[str, float | None]
    """As ``window_metrics`` has them, from ``begin_ns`` to ``end_ns``; the mean where several futures were drawn."""
    low: dict[str, float | None]
    """5th percentile over the futures that were drawn; the metrics themselves where it was one."""
    high: dict[str, float | None]
    """95th percentile."""
    records: Records
    """Of the first future.  Arrivals come first, in order, then the requests that the engine had: ``request_ids``."""
    request_ids: tuple[int | str, ...]
    num_futures: int
    changes: dict[str, Any]
    cost: str
    is_calibrated: bool
    evidence: str
    """What stands behind its step times; see ``windtunnel.sim.cost.evidence``."""
    arrivals: str
    """What was taken to arrive, in words."""
    lengths: str
    """How long answers were taken to be, in words."""
    notes: tuple[str, ...] = field(default=())
    num_under_way: int = 0
    """Steps that were decided before the snapshot and not over; they count with the engine's state at the snapshot."""

    @property
    def horizon_s(self) -> float:
        """Seconds that it looks ahead."""
        return (self.end_ns - self.begin_ns) / NS_PER_S

    def as_plain(self) -> dict[str, Any]:
        """All but the records, as plain data."""
        return {
            "begin_s": self.begin_ns / NS_PER_S,
            "end_s": self.end_ns / NS_PER_S,
            "horizon_s": self.horizon_s,
            "changes": self.changes,
            "cost": self.cost,
            "is_calibrated": self.is_calibrated,
            "evidence": self.evidence,
            "arrivals": self.arrivals,
            "lengths": self.lengths,
            "num_live": len(self.request_ids),
            "num_arrivals": len(self.records.requests) - len(self.request_ids),
            "num_futures": self.num_futures,
            "notes": list(self.notes),
            "metrics": [
                {"name": name, "unit": UNITS[name], "value": value, "low": self.low[name], "high": self.high[name]}
                for name, value in self.metrics.items()
            ],
        }


def fork(
    source: Snapshot | Scheduler,
    cost: CostModel,
    horizon_s: float,
    arrivals: Workload | Rate | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    lengths: str | Mapping[int | str, int] | None = None,
    seed: int = 0,
    num_futures: int = 1,
    now_ns: int | None = None,
    drafting: Drafting | None = None,
    executor: Executor | None = None,
    has_noise: bool = False,
    max_num_steps: int | None = None,
) -> Forecast:
    """Simulate the next ``horizon_s`` seconds of an engine.

    ``source`` is a snapshot, or a scheduler between two decisions, whose clock then says ``now_ns``.  The engine is
    left as it is.

    ``arrivals`` is what still comes: a workload whose times count from now, a ``Rate``, or nothing.  In an engine whose
    requests came from a workload, streams with the same number in both are the same.

    ``lengths`` says how long the answers will be that are not complete: ``known`` is what the snapshot knows (of a
    simulation, or of answers that end by a limit); ``max_tokens`` are the limits; ``recent`` is what is known, and else
    a draw from the lengths of recent answers that became longer than this one is already.  Or it is a mapping from
    request id to output tokens.  By default ``known`` if the snapshot knows them all, else ``recent`` if there are any,
    else ``max_tokens``.

    ``changes`` are other limits from now on, see ``sim.engine.snapshot.change``.  ``num_futures`` futures are drawn
    with as many seeds; the metrics are their means.  ``executor`` runs the steps instead of the cost model;
    ``has_noise`` lets them scatter as a fitted model states.

    Raises ValueError for a horizon, a change or lengths that make no sense, RequestTooLarge for an arrival that
    never fits, ForkTooLong beyond ``max_num_steps`` steps (all futures together).
    """
    if not 0.0 < horizon_s <= MAX_HORIZON_S:
        raise ValueError(f"the horizon must be above 0 and at most {MAX_HORIZON_S:g} s, got {horizon_s}")
    if num_futures < 1:
        raise ValueError(f"num_futures must be at least 1, got {num_futures}")
    if executor is not None and num_futures > 1:
        raise ValueError("an executor serves one run: draw one future with it")
    snapshot = source if isinstance(source, Snapshot) else _taken(source, now_ns)
    if snapshot.config.num_speculative_tokens and drafting is None and executor is None:
        raise ValueError("the engine speculates, but how drafts fare was not said: give a drafting")
    futures = _Futures(snapshot, round(horizon_s * NS_PER_S), arrivals, dict(changes or {}), lengths)
    budget = _Budget(max_num_steps)
    runs = []
    for number in range(num_futures):
        own = stream(seed, "fork", number)
        runner = executor or _executor(cost, drafting, seed + number if has_noise else None)
        runs.append(futures.draw(own, _Counted(runner, budget)))
    samples = [window_metrics(seen_in(run), futures.begin_ns, futures.end_ns) for run in runs]
    stalled = ("nothing can move any more: requests wait that can never be admitted",) if runs[0].stalled else ()
    outside = extrapolation_warning(cost, (run.replicas[0].steps for run in runs))
    return Forecast(
        begin_ns=futures.begin_ns,
        end_ns=futures.end_ns,
        metrics=_over(samples, np.mean),
        low=_over(samples, lambda values: np.percentile(values, 5)),
        high=_over(samples, lambda values: np.percentile(values, 95)),
        records=runs[0],
        request_ids=tuple(state.request_id for state in sorted(snapshot.live, key=_place_of_id)),
        num_futures=num_futures,
        changes=futures.changes,
        cost=_words_of(cost),
        is_calibrated=cost.calibrated,
        evidence=evidence_of(cost.describe()),
        arrivals=futures.arrivals_text,
        lengths=futures.lengths_text,
        notes=(*stalled, *(() if outside is None else (outside,))),
        num_under_way=sum(any(plan.shape) for plan in snapshot.under_way),
    )


def compare_fork(forecast: Forecast, observed: Records | Metrics) -> list[MetricError]:
    """The forecast beside what happened: the records of the whole run on the same clock, or metrics of the window.

    Of records, the steps that were under way at the snapshot count with the engine's state then, as in the forecast.
    """
    if isinstance(observed, Records):
        seen = with_state_of(seen_in(observed), seen_in(forecast.records), forecast.begin_ns, forecast.num_under_way)
        observed = window_metrics(seen, forecast.begin_ns, forecast.end_ns)
    return [
        MetricError(name, UNITS[name], value, observed.get(name), _error_percent(value, observed.get(name)))
        for name, value in forecast.metrics.items()
    ]


def shared_prefixes(recent: Sequence[RecentRequest], live: Iterable[RequestState] = ()) -> list[RecentRequest]:
    """The recent requests with only those ``prefix_keys`` that another one, recent or live, has as well."""
    counts = Counter(key for each in recent for key in each.prefix_keys)
    for state in live:
        if isinstance(state.keys, ListedKeys):
            counts.update(state.keys.known)
    return [each._replace(prefix_keys=_shared_part(each.prefix_keys, counts)) for each in recent]


def recent_rate(recent: Sequence[RecentRequest], now_ns: int, window_s: float = RECENT_WINDOW_S) -> float:
    """Requests per second of the last ``window_s`` seconds, or of the time since the first if that is shorter.

    Raises ValueError if fewer than two requests are known.
    """
    if len(recent) < 2:
        raise ValueError(f"{len(recent)} recent requests do not say how fast requests come: give a rate in requests/s")
    first_ns = min(each.arrival_ns for each in recent)
    begin_ns = now_ns - round(window_s * NS_PER_S)
    if first_ns < begin_ns:
        return sum(each.arrival_ns >= begin_ns for each in recent) / window_s
    return (len(recent) - 1) * NS_PER_S / max(now_ns - first_ns, 1)


def _shared_part(keys: Sequence[int], counts: Mapping[int, int]) -> tuple[int, ...]:
    num = 0
    while num < len(keys) and counts[keys[num]] > 1:
        num += 1
    return tuple(keys[:num])


def _words_of(cost: CostModel) -> str:
    """The cost model's name; of a fitted one whose steps it was fitted to, since all of them are called the same."""
    if not isinstance(cost, FittedCost):
        return cost.name
    known = cost.evidence.provenance
    machine = known.get("gpu") or known.get("cpu")
    parts = [f"of {known['model']}"] if known.get("model") else []
    parts += [f"on {machine}"] if machine else []
    return " ".join(("the profile", *parts)) if parts else cost.name


def _taken(scheduler: Scheduler, now_ns: int | None) -> Snapshot:
    if now_ns is None:
        raise ValueError("a scheduler has no clock: give now_ns, the time of its last step's end")
    return take_snapshot(scheduler, now_ns)


def _executor(cost: CostModel, drafting: Drafting | None, noise_seed: int | None) -> Executor:
    if noise_seed is None:
        return SimExecutor(cost, drafting=drafting)
    if not isinstance(cost, FittedCost):
        raise ValueError(f"the cost model {cost.name} states no noise: give a fitted one, or no noise")
    return NoisySimExecutor(cost, StepNoise(cost, noise_seed, 0), drafting=drafting)


def _over(samples: Sequence[Metrics], combine: Callable[[list[float]], Any]) -> dict[str, float | None]:
    """A statistic of each metric, over the futures in which there was something to measure."""
    combined: dict[str, float | None] = {}
    for name in samples[0]:
        values = [value for each in samples if (value := each[name]) is not None]
        combined[name] = float(combine(values)) if values else None
    return combined


def _error_percent(predicted: float | None, observed: float | None) -> float | None:
    if predicted is None or not observed:
        return None
    return 100.0 * (predicted / observed - 1.0)


class _Budget:
    """Steps that may still be simulated."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._num = 0

    def take(self) -> None:
        """One step.  Raises ForkTooLong if it is one too many."""
        self._num += 1
        if self._most is not None and self._num > self._most:
            raise ForkTooLong(f"the horizon holds more than {self._most:,} steps: shorten it, or ask for fewer futures")


class _Counted:
    def __init__(self, executor: Executor, budget: _Budget) -> None:
        self._executor = executor
        self._budget = budget

    def execute(self, plan: StepPlan) -> StepResult:
        self._budget.take()
        return self._executor.execute(plan)


# -- what is not known: arrivals and lengths


class _Lengths:
    """How long answers will be."""

    def __init__(self, snapshot: Snapshot, asked: str | Mapping[int | str, int] | None) -> None:
        self._told = asked if isinstance(asked, Mapping) else {}
        finished = (each.num_output_tokens for each in snapshot.recent)
        self._recent = np.sort(np.array([length for length in finished if length is not None], np.int64))
        self.kind = "told" if isinstance(asked, Mapping) else self._chosen(snapshot, asked)
        self._takes_known = self.kind == "known" or (self.kind != "told" and asked != "max_tokens")

    def _chosen(self, snapshot: Snapshot, asked: str | None) -> str:
        are_known = all(state.num_output_tokens is not None for state in snapshot.live)
        if asked is None:
            return "known" if are_known else "recent" if len(self._recent) else "max_tokens"
        if asked not in LENGTHS:
            raise ValueError(f"lengths must be one of {', '.join(LENGTHS)}, got {asked!r}")
        if asked == "known" and not are_known:
            raise ValueError(
                "nobody knows how long the engine's answers will be: take lengths from recent or max_tokens"
            )
        if asked == "recent" and not len(self._recent):
            raise ValueError("no recent answer is complete: take lengths from max_tokens")
        return asked

    @property
    def text(self) -> str:
        """In words."""
        return {
            "told": "the lengths that were given; max_tokens for the others",
            "known": "known",
            "recent": f"known, or drawn from {len(self._recent)} recent answers, given what is already written",
            "max_tokens": "each as long as its max_tokens allow",
        }[self.kind]

    def of(self, state: RequestState, rng: np.random.Generator) -> int:
        """Of a request that is under way."""
        if self._takes_known and state.num_output_tokens is not None:
            return state.num_output_tokens
        if self.kind == "told":
            return self._told.get(state.request_id, state.may_emit)
        return self.drawn(state.num_emitted_tokens, state.may_emit, rng)

    def drawn(self, num_emitted: int, most: int, rng: np.random.Generator) -> int:
        """Longer than what is written, and no longer than it may be.

        An answer that is longer than all recent ones is taken to go on for as long as one of them.
        """
        if self.kind in ("max_tokens", "told") or not len(self._recent):
            return most
        longer = int(np.searchsorted(self._recent, num_emitted, side="right"))
        if longer == len(self._recent):
            return min(num_emitted + max(1, int(rng.choice(self._recent))), most)
        return min(int(rng.choice(self._recent[longer:])), most)


class _Arrivals(NamedTuple):
    """What comes, on the engine's clock, and whose blocks it can look for."""

    load: Workload
    keys: Callable[[int], BlockKeys] | None = None


class _Futures:
    """Draws futures of one snapshot."""

    def __init__(
        self,
        snapshot: Snapshot,
        horizon_ns: int,
        arrivals: Workload | Rate | None,
        changes: dict[str, Any],
        lengths: str | Mapping[int | str, int] | None,
    ) -> None:
        self.begin_ns = snapshot.now_ns
        self.end_ns = snapshot.now_ns + horizon_ns
        self.changes = changes
        self._snapshot = snapshot
        self._arrivals = arrivals
        self._lengths = _Lengths(snapshot, lengths)
        self._recent = shared_prefixes(snapshot.recent, snapshot.live) if isinstance(arrivals, Rate) else []
        self._rate = self._requests_per_s(arrivals) if isinstance(arrivals, Rate) else 0.0

    def _requests_per_s(self, rate: Rate) -> float:
        told = rate.requests_per_s
        per_s = recent_rate(self._snapshot.recent, self.begin_ns) if told is None else told
        if per_s and not self._recent:
            raise ValueError("no recent request says what further ones look like: give them as a workload")
        return per_s

    @property
    def lengths_text(self) -> str:
        """How long answers were taken to be."""
        return self._lengths.text

    @property
    def arrivals_text(self) -> str:
        """What was taken to arrive."""
        if isinstance(self._arrivals, Rate):
            source = "the recent rate" if self._arrivals.requests_per_s is None else "as told"
            return (
                f"at random, {self._rate:.4g} requests/s ({source}), each like one of {len(self._recent)} recent ones"
            )
        if self._arrivals is None:
            return "nothing more"
        return f"{len(self._arrivals)} known requests"

    def draw(self, rng: np.random.Generator, executor: Executor) -> Records:
        """One future."""
        scheduler, plans = restore(
            self._snapshot, output_length=lambda state: self._lengths.of(state, rng), counts_from_zero=True
        )
        changed = change(scheduler, self.changes) if self.changes else None
        arrivals = self._drawn(rng)
        check_fits(arrivals.load, scheduler.config)
        return _run(scheduler, plans, changed, arrivals, executor, self.begin_ns, self.end_ns)

    def _drawn(self, rng: np.random.Generator) -> _Arrivals:
        if self._arrivals is None:
            return _Arrivals(workload([], [], []))
        if isinstance(self._arrivals, Workload):
            return _Arrivals(self._placed(self._arrivals))
        return self._continued(rng)

    def _placed(self, given: Workload) -> Workload:
        """The workload on the engine's clock, its own streams apart from all that the engine knows."""
        arrival_ns = np.where(given.previous < 0, given.arrival_ns + self.begin_ns, given.arrival_ns)
        content = given.content
        if content is not None and self._snapshot.has_content_keys:
            content = tuple(tuple((number + _CONTENT_SHIFT, end) for number, end in row) for row in content)
        return replace(given, arrival_ns=arrival_ns, content=content, num_streams=_ARRIVING_STREAMS)

    def _continued(self, rng: np.random.Generator) -> _Arrivals:
        times_ns = _poisson_ns(self._rate, self.begin_ns, self.end_ns, rng)
        like = (
            [self._recent[place] for place in rng.integers(len(self._recent), size=len(times_ns))] if times_ns else []
        )
        longest = self._snapshot.config.max_model_len
        outputs = []
        for each in like:
            room = max(1, min(each.max_tokens, longest - each.num_prompt_tokens))
            outputs.append(min(each.num_output_tokens or self._lengths.drawn(0, room, rng), room))
        load = workload(
            times_ns,
            [each.num_prompt_tokens for each in like],
            outputs,
            max_tokens=[max(each.max_tokens, output) for each, output in zip(like, outputs, strict=True)],
            priority=[each.priority for each in like],
            num_streams=_ARRIVING_STREAMS,
        )
        return _Arrivals(load, lambda row: ListedKeys(like[row].prefix_keys, (_ARRIVING_STREAMS + row) << STREAM_BITS))


def _poisson_ns(per_s: float, begin_ns: int, end_ns: int, rng: np.random.Generator) -> list[int]:
    times: list[int] = []
    now = float(begin_ns)
    while per_s:
        now += rng.exponential(NS_PER_S / per_s)
        if now >= end_ns:
            break
        times.append(round(now))
    return times


# -- one future in virtual time


class _ForkClient(Client):
    """Sends the arrivals; the requests of the snapshot are in the engine already."""

    def __init__(self, world: World, arrivals: _Arrivals, block_size: int, log: RequestLog) -> None:
        super().__init__(world, arrivals.load, block_size, log)
        self._own_keys = arrivals.keys

    def _keys(self, row: int) -> BlockKeys:
        return super()._keys(row) if self._own_keys is None else self._own_keys(row)


class _ForkLog(ReplicaLog):
    """Leaves out what came before the first step that is logged."""

    last_end_ns = -1

    def write_spans(self, request: Request, spans: list[tuple[int, int]]) -> None:
        later = [(max(first, 0), count + min(first, 0)) for first, count in spans]
        super().write_spans(request, [(first, count) for first, count in later if count > 0])

    def write_step(self, plan: StepPlan, start_ns: int, end_ns: int, *state: Any) -> None:
        super().write_step(plan, start_ns, end_ns, *state)
        self.last_end_ns = end_ns


class _Resumed:
    """A scheduler whose first decisions were taken before the snapshot."""

    def __init__(self, scheduler: Scheduler, plans: Sequence[StepPlan]) -> None:
        self._scheduler = scheduler
        self._plans = list(plans)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def schedule(self, now_ns: int) -> StepPlan:
        return self._plans.pop(0) if self._plans else self._scheduler.schedule(now_ns)


def _run(
    scheduler: Scheduler,
    plans: Sequence[StepPlan],
    changed: StepPlan | None,
    arrivals: _Arrivals,
    executor: Executor,
    begin_ns: int,
    end_ns: int,
) -> Records:
    world, table = World(begin_ns), RequestLog()
    log = _ForkLog(scheduler.config)
    live = _renamed(scheduler, len(arrivals.load))
    client = _ForkClient(world, arrivals, scheduler.config.block_size, table)

    def on_finish(request: Request, now_ns: int) -> None:
        if request in live:
            del live[request]
            table.write(request, Outcome.FINISHED, 0, request.arrival_ns, now_ns, request.num_emitted)
        else:
            client.answered(request, now_ns)

    driven = cast(SchedulerProtocol, _Resumed(scheduler, plans)) if plans else scheduler
    replica = Replica(world, 0, driven, executor, log, on_finish, client.rejected)
    if changed is not None and changed.preemptions:
        log.write_preemptions(changed, begin_ns)
    client.start(Cluster(world, [replica]))
    world.run(until=end_ns)
    _end_last_step(world, replica, scheduler, log, end_ns)
    num_open = client.write_unfinished() + len(live)
    for request in live:
        emitted = scheduler.num_emitted_tokens(request)
        table.write(request, Outcome.UNFINISHED, 0, request.arrival_ns, -1, emitted)
    for request in scheduler.requests():
        log.write_spans(request, scheduler.token_spans(request))
    stalled = num_open > 0 and (replica.is_stuck or replica.is_helpless)
    return Records(table.table(), (log.records(),), end_ns, stalled)


def _end_last_step(world: World, replica: Replica, scheduler: Scheduler, log: _ForkLog, end_ns: int) -> None:
    """Go on until the step that runs when the horizon ends is logged, for a part of it belongs to the window."""
    while log.last_end_ns < end_ns and scheduler.num_requests and world.peek() < math.inf:
        if replica.is_helpless or replica.is_stuck:
            return
        world.step()


def _renamed(scheduler: Scheduler, first: int) -> dict[Request, None]:
    """The requests of the snapshot, called by the rows that follow those of the arrivals.

    Requests that are equally urgent go by their ids, so the new ids are in the order of the old.
    """
    live = dict.fromkeys(scheduler.requests())
    for row, request in enumerate(sorted(live, key=_place_of_id), first):
        request.request_id = row
    return live


def _place_of_id(request: Request | RequestState) -> tuple[bool, int | str]:
    return isinstance(request.request_id, str), request.request_id
