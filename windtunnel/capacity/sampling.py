"""Requests at another rate, and a replica's share of a trace: what a search for capacity draws again and again.

Draws of one seed at two rates hold the same requests in the same order, and gaps between arrivals that differ only by
the ratio of the rates (*common random numbers*): what differs between the two runs is then the rate, and hardly chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from windtunnel.scenarios.workloads.arrivals import Arrivals, AtOnce, Constant, Gamma, OnOff, Poisson, arrivals_from
from windtunnel.scenarios.workloads.rows import conversation_roots
from windtunnel.scenarios.workloads.transform import take, with_arrivals
from windtunnel.sim.rng import stream
from windtunnel.sim.workload import IntArray, Segment, Workload

if TYPE_CHECKING:
    from windtunnel.scenarios.resolve import Resolved
    from windtunnel.scenarios.schema import SyntheticWorkload
    from windtunnel.scenarios.workloads.tenants import TenantLoad

NS_PER_S = 1_000_000_000


class Source(Protocol):
    """Where requests come from, at any rate."""

    notes: tuple[str, ...]
    """What drawing decides, in sentences for people."""
    cycle_s: float
    """How long arrivals take to go through all that they do, over and over; 0 where each gap is like any other."""

    def draw(self, rate: float, seed: int, num_requests: int) -> Workload:
        """``num_requests`` requests offered at ``rate`` requests per second; the same seed draws the same ones."""
        ...


def source_of(resolved: Resolved) -> Source:
    """The requests of a scenario at any rate: drawn anew from its distributions, or windows of its trace.

    Raises ValueError where there is no rate to vary: a closed loop (``max_concurrency``), or a ramp.
    """
    from windtunnel.scenarios.schema import SyntheticWorkload

    spec = resolved.scenario.workload
    if resolved.workload.max_concurrency is not None:
        raise ValueError(
            f"at most {resolved.workload.max_concurrency:,} requests are in flight (max_concurrency), so the load "
            "adapts to the server and has no rate of its own: leave max_concurrency out"
        )
    return SyntheticSource(spec) if isinstance(spec, SyntheticWorkload) else TraceSource(resolved.workload)


class SyntheticSource:
    """Requests drawn from the distributions of a scenario, their arrival process scaled to the rate.

    The gaps are those of the process itself: they are not stretched to end at num_requests / rate exactly, as
    ``vllm bench serve`` does, because that would take out the slow part of their chance.  Tenants with rates of their
    own keep their parts of the whole.  Raises ValueError for an arrival process without a rate that stays (a ramp).
    """

    def __init__(self, spec: SyntheticWorkload) -> None:
        self.spec = spec
        process = None if spec.arrival is None else arrivals_from(spec.arrival, "arrival")
        self.cycle_s = process.on_s + process.off_s if isinstance(process, OnOff) else 0.0
        self._drawn: dict[tuple[int, int], Workload] = {}
        self._own_rate = _own_rate(spec)
        if self._own_rate is not None:
            self.notes: tuple[str, ...] = ()
            return
        arrivals_at(spec, 1.0)
        is_burst = spec.arrival is None and spec.request_rate in (None, math.inf)
        if is_burst or (spec.arrival is not None and isinstance(arrivals_from(spec.arrival), AtOnce)):
            self.notes = (_NO_RATE,)
        else:
            self.notes = ()

    def __reduce__(self) -> tuple[type[SyntheticSource], tuple[SyntheticWorkload]]:
        return type(self), (self.spec,)

    def draw(self, rate: float, seed: int, num_requests: int) -> Workload:
        """As ``Source.draw``; of conversations, turns are counted."""
        _check_rate(rate)
        base = self._base(seed, num_requests)
        conversations = int((base.previous < 0).sum())
        if self._own_rate is not None:
            return _stretched(base, self._own_rate * len(base) / conversations / rate)
        return with_arrivals(base, arrivals_at(self.spec, rate * conversations / len(base)), seed)

    def _base(self, seed: int, num_requests: int) -> Workload:
        """The requests without their times; the last few are kept, since a search asks for them at rate after rate."""
        key = (seed, num_requests)
        if key not in self._drawn:
            if len(self._drawn) >= _MOST_KEPT:
                self._drawn.pop(next(iter(self._drawn)))
            self._drawn[key] = _drawn(self.spec, seed, num_requests)
        return self._drawn[key]


_NO_RATE = (
    "The scenario sends all requests at once; at a rate they come as a Poisson process, unless burstiness says not."
)
_MOST_KEPT = 64


def _own_rate(spec: SyntheticWorkload) -> float | None:
    """Requests (or conversations) per second of tenants with arrivals of their own, together; None without such."""
    from windtunnel.scenarios.workloads.tenants import tenants_from

    loads = tenants_from(spec.tenants) if spec.tenants else {}
    if not any(load.has_arrivals for load in loads.values()):
        return None
    for name, load in loads.items():
        if load.request_rate is None or math.isinf(load.request_rate) or load.start_s:
            raise ValueError(
                f"the arrivals of tenant {name} have no rate that stays: give each tenant a finite request_rate (with "
                "burstiness) from the start on, or a share of all requests"
            )
    return sum(load.request_rate or 0.0 for load in loads.values())


def _by_own_rates(tenants: Mapping[str, Any], num_requests: int) -> dict[str, TenantLoad]:
    """The same tenants with their parts, by rate, of so many requests, and gaps that are not stretched."""
    from windtunnel.scenarios.workloads.tenants import num_requests_of, tenants_from

    loads = {name: replace(load, num_requests=None) for name, load in tenants_from(tenants).items()}
    return {
        name: replace(
            load,
            arrival=Gamma(load.request_rate or 0.0, 1.0 if load.burstiness is None else load.burstiness),
            request_rate=None,
            burstiness=None,
            num_requests=max(number, 1),
        )
        for (name, load), number in zip(loads.items(), num_requests_of(loads, num_requests), strict=True)
    }


def _stretched(base: Workload, factor: float) -> Workload:
    """First turns so many times as late."""
    stretched = np.rint(base.arrival_ns * factor).astype(np.int64)
    return replace(base, arrival_ns=np.where(base.previous < 0, stretched, -1))


def _drawn(spec: SyntheticWorkload, seed: int, num_requests: int) -> Workload:
    from windtunnel.scenarios.workloads.synthetic import synthetic_workload

    sessions = None if spec.sessions is None else {**spec.sessions, "num_sessions": None}
    priorities = None if spec.priorities is None else {int(each): weight for each, weight in spec.priorities.items()}
    drawn = synthetic_workload(
        num_requests,
        AtOnce(),
        spec.input,
        spec.output,
        seed=seed,
        prefixes=spec.prefixes,
        sessions=sessions,
        max_tokens=spec.max_tokens,
        priorities=priorities,
        tenants=spec.tenants if _own_rate(spec) is None else _by_own_rates(spec.tenants or {}, num_requests),
    )
    if spec.request_timeout is None:
        return drawn
    return replace(drawn, request_timeout_ns=max(1, round(spec.request_timeout * NS_PER_S)))


def arrivals_at(spec: SyntheticWorkload, rate: float) -> Arrivals:
    """The scenario's arrival process at another mean rate (conversations, where there are any, per second).

    Raises ValueError for a process without a rate that stays.
    """
    if spec.arrival is None:
        return Gamma(rate, 1.0 if spec.burstiness is None else spec.burstiness)
    process = arrivals_from(spec.arrival, "arrival")
    match process:
        case Poisson() | AtOnce():
            return Poisson(rate)
        case Gamma():
            return Gamma(rate, process.burstiness)
        case Constant():
            return Constant(rate)
        case OnOff():
            return _on_off_at(process, rate)
    raise ValueError(
        f"the arrivals of this scenario ({spec.arrival.get('process')}) have no rate that stays: give a request_rate "
        "(with burstiness), or an arrival process of constant mean such as on_off"
    )


def _on_off_at(process: OnOff, rate: float) -> OnOff:
    cycle_s = process.on_s + process.off_s
    factor = rate * cycle_s / (process.rate * process.on_s + process.off_rate * process.off_s)
    return OnOff(process.rate * factor, process.on_s, process.off_s, process.off_rate * factor)


@dataclass(slots=True)
class TraceSource:
    """Windows of a trace, each scaled in time so that its own mean rate is the one asked for (see ``at_rate``)."""

    workload: Workload
    notes: tuple[str, ...] = ()
    cycle_s: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.workload):
            raise ValueError("the trace has no requests: nothing can be drawn from it")
        how = "windows of the trace that begin anywhere, each scaled in time to the rate as a whole"
        if _has_no_times(self.workload):
            how = "stretches of the trace that begin anywhere; it has no times, so they come as a Poisson process"
        self.notes = (*self.notes, f"Requests are {how}.")

    def draw(self, rate: float, seed: int, num_requests: int) -> Workload:
        """As ``Source.draw``."""
        return at_rate(self.workload, rate, seed, num_requests)


def at_rate(workload: Workload, rate: float, seed: int, num_requests: int) -> Workload:
    """A window of ``num_requests`` requests of the workload, scaled in time so that its mean rate is ``rate``.

    It begins at a request that the seed chooses, keeps the order, the conversations and the bursts within, and goes on
    with the beginning of the workload where its end is reached (what requests share, those copies do not share with the
    first ones).  Where all are due at once, they come as a Poisson process instead.  Of conversations the times of
    first turns are scaled; think times are the users' own.  Rate in requests per second, all turns counted.

    Raises ValueError for a rate that is not above 0 and finite, or less than one request.
    """
    _check_rate(rate)
    if num_requests < 1:
        raise ValueError(f"num_requests must be at least 1, got {num_requests}")
    if not len(workload):
        raise ValueError("the workload has no requests: nothing can be drawn from it")
    rng = stream(seed, "capacity", "window")
    roots = np.flatnonzero(workload.previous < 0)
    first = int(rng.integers(len(roots)))
    chosen, copies, rows_of_copy = _window(workload, roots, first, num_requests)
    arrivals_s = _window_times(workload, roots, first, len(chosen), rng) / (rate * len(chosen) / len(rows_of_copy))
    return _copied(workload, rows_of_copy, copies, np.rint(arrivals_s * NS_PER_S).astype(np.int64))


def _window(workload: Workload, roots: IntArray, first: int, num_requests: int) -> tuple[IntArray, IntArray, IntArray]:
    """Conversations in turn from the ``first`` on until they have enough turns: their roots, and rows with their lap.

    Rows of a conversation stand together, in their order; the last conversation is not cut.
    """
    if len(roots) == len(workload):
        places = first + np.arange(num_requests)
        return roots[places % len(roots)], places // len(roots), places % len(roots)
    root_of = conversation_roots(workload.previous)
    order = np.argsort(root_of, kind="stable")
    begins = np.searchsorted(root_of[order], roots)
    sizes = np.diff(np.append(begins, len(workload)))
    laps = 2 + num_requests // len(workload)
    places = first + np.arange(laps * len(roots))
    needed = int(np.searchsorted(np.cumsum(sizes[places % len(roots)]), num_requests)) + 1
    places = places[:needed]
    which = places % len(roots)
    rows = np.concatenate([order[begins[each] : begins[each] + sizes[each]] for each in which.tolist()])
    return roots[which], np.repeat(places // len(roots), sizes[which]), rows


def _window_times(
    workload: Workload, roots: IntArray, first: int, num: int, rng: np.random.Generator
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """When the conversations of the window are due, from its first one on, at a mean rate of one a second."""
    if _has_no_times(workload):
        return np.cumsum(rng.exponential(1.0, num))
    gaps = np.diff(workload.arrival_ns[roots].astype(np.float64))
    gaps = np.append(gaps, gaps.mean() if len(gaps) else 1.0)  # between the last one and the first of the next lap
    times = np.concatenate(([0.0], np.cumsum(gaps[(first + np.arange(max(num - 1, 0))) % len(gaps)])))
    return times * ((num - 1) / times[-1]) if times[-1] > 0 else np.cumsum(rng.exponential(1.0, num))


def _has_no_times(workload: Workload) -> bool:
    due = workload.arrival_ns[workload.previous < 0]
    return int(due[0]) == int(due[-1])


def _copied(workload: Workload, rows: IntArray, laps: IntArray, due_ns: IntArray) -> Workload:
    """Those rows in that order with new times of first turns; what a later lap shares is that lap's own."""
    links = workload.previous[rows]
    follows = links >= 0
    arrival_ns = np.full(len(rows), -1, np.int64)
    arrival_ns[~follows] = due_ns
    return replace(
        workload,
        arrival_ns=arrival_ns,
        num_prompt_tokens=workload.num_prompt_tokens[rows],
        num_output_tokens=workload.num_output_tokens[rows],
        max_tokens=workload.max_tokens[rows],
        priority=workload.priority[rows],
        previous=_relinked(workload, rows, laps) if bool(follows.any()) else np.full(len(rows), -1, np.int64),
        think_ns=workload.think_ns[rows],
        content=_copied_content(workload, rows, laps),
        num_streams=workload.num_streams * (int(laps.max(initial=0)) + 1),
        labels=None,
        tenant=None if workload.tenant is None else workload.tenant[rows],
        max_concurrency=None,
        notes=(),
    )


def _relinked(workload: Workload, rows: IntArray, laps: IntArray) -> IntArray:
    """Row numbers of the predecessors in the copy: they stand before, in the same lap."""
    place: dict[tuple[int, int], int] = {}
    previous = np.full(len(rows), -1, np.int64)
    for position, (row, lap) in enumerate(zip(rows.tolist(), laps.tolist(), strict=True)):
        place[row, lap] = position
        before = int(workload.previous[row])
        if before >= 0:
            previous[position] = place[before, lap]
    return previous


def _copied_content(workload: Workload, rows: IntArray, laps: IntArray) -> tuple[tuple[Segment, ...], ...] | None:
    content, step = workload.content, workload.num_streams
    if content is None:
        return None
    if not int(laps.max(initial=0)):
        return tuple(content[row] for row in rows.tolist())
    return tuple(
        tuple((stream_number + lap * step, end) for stream_number, end in content[row])
        for row, lap in zip(rows.tolist(), laps.tolist(), strict=True)
    )


def thinned(workload: Workload, share: float, seed: int) -> Workload:
    """Each request kept with probability ``share``, at its time: what one replica gets of a router that draws lots.

    A conversation is kept or left out as a whole.  The choice for a request depends on the seed alone, so a smaller
    share keeps a part of what a larger one keeps.  Routers that take turns or look at the load spread arrivals more
    evenly than a lot does, so a replica fares a little better behind them.

    Raises ValueError for a share outside of (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share that is kept must be above 0 and at most 1, got {share}")
    if share == 1:
        return workload
    lots = stream(seed, "capacity", "thinning").random(len(workload))
    rows = np.flatnonzero(lots[conversation_roots(workload.previous)] < share)
    return rows_of(workload, rows)


def rows_of(workload: Workload, rows: IntArray) -> Workload:
    """Those rows, ascending; every row that one of them follows must be among them."""
    return take(workload, rows)


def _check_rate(rate: float) -> None:
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"a rate must be above 0 and finite, got {rate} requests per second")
