"""Whether a run reached a steady state: stable, backlogged, overloaded, or too short to tell.

Latency percentiles describe a system only if they do not depend on how long one looks.  Above capacity the queue grows
for as long as requests arrive and so does every latency; then a percentile says how long the run was.

What is judged is the *queue*: requests that are due and not yet started, at the client's limit or in the engine.  The
number in flight would not do, for it also grows while an idle system fills up: a batch of long answers takes minutes to
reach its usual size, in which nobody waits and nothing is overloaded.

How overload is told from chance.  Let A requests be due in the arrival window.  A queue just *at* capacity wanders like
a reflected random walk: after A requests its length is about sqrt(A (ca² + cs²)) |Z|, with ca and cs the coefficients
of variation of the gaps between arrivals and of the work per request (the heavy-traffic limit, Kingman 1962; Whitt,
"Stochastic-Process Limits", 2002, ch. 9), Z standard normal.  Twice that is exceeded by a queue at capacity in fewer
than one run of twenty, and by a stable one hardly ever, while beyond capacity it becomes A (1 - 1/rho), which outgrows
it.  So a run is called *overloaded* when the queue at the end of the arrivals exceeds that noise, rose through the
window (Kendall's tau of bucketed means, or of the number in flight where the seats had to fill first), makes late
requests wait longer than early ones, and has not fallen by a third or more from its height.  A queue that rose above
the noise and fell again was an overload *at the peak*: it stands, is worked off, and is called backlogged.

Where nothing of that shows, but the number in flight and the time in the system still grew when the last requests
came, the system was still filling up, and the run is too short to tell.  So it is where the offered rate is known to
exceed the saturation rate, but by so little for so few requests that what is left over fits into the batch and into
chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from windtunnel.sim.metrics.latency import NS_PER_S
from windtunnel.sim.metrics.trend import FOOT_SHARE, MIN_REQUESTS, Lives, Trend, backlog_trend, queue_trend
from windtunnel.sim.metrics.words import count, digits, plural, seconds, verb
from windtunnel.sim.records import Outcome, Records
from windtunnel.sim.workload import Workload

MIN_FILLING_SHARE = 0.25
"""Least rise of the number in flight, as a share of its mean, that counts as a system still filling up."""
MIN_RHO = 1.05
"""Least ratio of offered to saturation rate that is believed to be above 1: the latter is known within about 3 %."""
STANDING_QUEUE_SHARE = 0.5
"""Share of the arrival window with requests waiting from which on a queue is said to stand."""
MIN_REFUSED_SHARE = 0.01
"""Share of requests refused for want of room from which on a system is said to shed load."""
LONG_DRAIN_SHARE = 0.1
"""Time to empty the queue after the last arrival, as a share of the window, from which on it counts."""


class Verdict(StrEnum):
    """What the load did to the system."""

    STABLE = "stable"
    BACKLOGGED = "backlogged"
    """A queue stood most of the time, rose in a peak or had to be drained at the end, but not without bound."""
    OVERLOADED = "overloaded"
    """More came than could be served: the queue grew for as long as requests arrived."""
    TOO_SHORT = "too_short"
    """Too few requests, or they came for too short a time: the system was still filling up."""
    STALLED = "stalled"
    """Waiting requests could never be scheduled."""
    SHEDDING = "shedding"
    """The queue stayed short because the server refused requests."""


@dataclass(frozen=True, slots=True)
class Stability:
    """The verdict, a sentence that says why, and the numbers behind it.

    The *queue* are the requests due and not yet started (at the client's limit or in the engine), the *backlog* those
    due and not yet finished.
    """

    verdict: Verdict
    reason: str
    arrival_window_s: float
    """From the first to the last request due."""
    offered_request_rate: float | None
    """Requests due per second in that window; None if all are due at once."""
    completion_rate: float | None
    """Requests that finished in that window, per second."""
    queue_noise: float | None
    """Length of the queue at the end of the window that chance alone explains at capacity; None if not looked at."""
    queue_tau: float | None
    """Kendall correlation of its length with time: 1 rises steadily, 0 has no trend."""
    queue_peak: int
    """Longest that the queue was while requests came."""
    queue_peak_s: float
    """When that was, from the first request due."""
    queue_at_last_arrival: int
    queue_share: float
    """Share of the arrival window in which requests were left waiting by the scheduler (or at the client)."""
    queue_drain_s: float
    """From the last request due until the last one waiting was started."""
    backlog_growth: float | None
    """Growth of the backlog over the window without its ramp (Theil-Sen slope of bucketed means times its length)."""
    backlog_tau: float | None
    backlog_at_last_arrival: int
    stay_ratio: float | None
    """Mean time in the system in the last quarter of that part of the window over that in its first quarter."""
    drain_s: float
    """From the last request due until the end of the run."""
    is_burst: bool
    """Whether all were due in so short a time that there is no arrival window to speak of."""

    @property
    def is_steady(self) -> bool:
        """Whether latency statistics may be read as those of a steady state."""
        if self.verdict is Verdict.BACKLOGGED:
            return not self.is_burst
        return self.verdict is Verdict.STABLE or (self.verdict is Verdict.SHEDDING and not self.is_burst)

    @property
    def has_peak(self) -> bool:
        """Whether the queue outgrew chance in a peak, but was worked off from there on."""
        is_backlog = self.verdict is Verdict.BACKLOGGED and self.queue_noise is not None
        return is_backlog and self.queue_peak > (self.queue_noise or 0.0)

    @property
    def is_hopeless(self) -> bool:
        """Whether a longer run would show ever higher latencies: no promise about them can be kept."""
        return self.verdict is Verdict.OVERLOADED or self.verdict is Verdict.STALLED


def judge(records: Records, workload: Workload, *, saturation_request_throughput: float | None = None) -> Stability:
    """The stability verdict of a run.

    Times count from when a request was *due*: under a client-side limit (closed loop) the wait at the client shows
    overload that the server never sees.  ``saturation_request_throughput`` (requests per second) is only asked where
    the run itself is too short to tell.
    """
    life = Lives(records, workload)
    queue, backlog = queue_trend(life), backlog_trend(life)
    verdict, reason = _verdict(records, life, queue, backlog, saturation_request_throughput)
    window_s = life.window_ns / NS_PER_S
    return Stability(
        verdict=verdict,
        reason=reason,
        arrival_window_s=window_s,
        offered_request_rate=life.offered_request_rate,
        completion_rate=life.completion_rate,
        queue_noise=queue.noise if queue else None,
        queue_tau=queue.tau if queue else None,
        queue_peak=life.peak.height,
        queue_peak_s=(life.peak.time_ns - life.first_due) / NS_PER_S,
        queue_at_last_arrival=life.queue_at_last_arrival,
        queue_share=life.queue_share,
        queue_drain_s=life.queue_drain_ns / NS_PER_S,
        backlog_growth=backlog.growth if backlog else None,
        backlog_tau=backlog.tau if backlog else None,
        backlog_at_last_arrival=int((life.gone > life.last_due).sum()),
        stay_ratio=backlog.stay_ratio if backlog else None,
        drain_s=(records.end_ns - life.last_due) / NS_PER_S if len(life.due) else 0.0,
        is_burst=life.is_burst and workload.max_concurrency is None,
    )


def _is_overload(life: Lives, queue: Trend, backlog: Trend | None) -> bool:
    """Whether the queue outgrew chance by the end, steadily; where seats filled first, the backlog has to rise so."""
    if life.queue_at_last_arrival <= queue.noise or life.has_fallen:
        return False
    return queue.is_rising or (backlog is not None and backlog.is_rising)


def _is_filling(backlog: Trend | None) -> bool:
    """Whether the system still held ever more when the last requests came."""
    if backlog is None or not backlog.is_rising:
        return False
    return backlog.growth > max(backlog.noise, MIN_FILLING_SHARE * float(backlog.level.mean()))


def _verdict(
    records: Records, life: Lives, queue: Trend | None, backlog: Trend | None, saturation: float | None
) -> tuple[Verdict, str]:
    num_came = len(life.due)
    if records.stalled:
        is_stuck = records.requests.outcome == Outcome.UNFINISHED
        stuck = int(is_stuck.sum())
        if records.fleet is not None and (records.requests.replica[is_stuck] < 0).all():
            return Verdict.STALLED, (
                f"the run stopped with {plural(stuck, 'unfinished request')} and no replica left that could take "
                f"{verb(stuck, 'it', 'them')}: a crash with restart_after brings one back, as an autoscaler does"
            )
        return Verdict.STALLED, (
            f"the run stopped with {plural(stuck, 'unfinished request')}, of which the first in the queue can never be "
            "scheduled: it needs more KV blocks or tokens than the engine can ever give"
        )
    if num_came < MIN_REQUESTS:
        few = f"{plural(num_came, 'request')} {verb(num_came, 'is', 'are')} too few to tell"
        return Verdict.TOO_SHORT, f"{few}, at least {MIN_REQUESTS} are needed"
    if queue is not None and _is_overload(life, queue, backlog):
        return Verdict.OVERLOADED, _why_overloaded(life, queue)
    if life.refused_share >= MIN_REFUSED_SHARE:
        return Verdict.SHEDDING, _why_shedding(life)
    if life.is_burst:
        return _verdict_of_burst(life)
    if life.window_ns < 2 * life.long_service_ns:
        return Verdict.TOO_SHORT, _why_no_steady_state(life)
    if queue is not None and _excess_could_hide(life, queue, saturation):
        return Verdict.TOO_SHORT, _why_hidden(life, saturation or 0.0)
    if queue is not None and life.peak.height > queue.noise:
        return Verdict.BACKLOGGED, _why_peak(life)
    if backlog is not None and _is_filling(backlog):
        return Verdict.TOO_SHORT, _why_filling(life, backlog)
    if _was_drained(life):
        return Verdict.BACKLOGGED, (
            f"the queue did not grow steadily, but the last request waiting was started only "
            f"{_s(life.queue_drain_ns)} after the last arrival"
        )
    if life.queue_share > STANDING_QUEUE_SHARE:
        where = "at the client's limit or the server" if life.max_concurrency else "at the server"
        return Verdict.BACKLOGGED, (
            f"requests were waiting {where} {life.queue_share:.0%} of the time while they came, "
            "but the queue did not grow without bound"
        )
    return Verdict.STABLE, (
        f"the number of requests in the system shows no lasting growth; requests were left waiting "
        f"{life.queue_share:.0%} of the time"
    )


def _verdict_of_burst(life: Lives) -> tuple[Verdict, str]:
    offered = life.offered_request_rate
    if life.max_concurrency is not None and offered is not None:
        return Verdict.OVERLOADED, (
            f"{offered:,.4g} requests/s were due, but with {_in_flight(life)} only "
            f"{len(life.due) * NS_PER_S / life.duration_ns:,.3g}/s were served: the others waited at the client"
        )
    if life.max_concurrency is not None:
        if life.queue_share_at_server > STANDING_QUEUE_SHARE:
            return Verdict.BACKLOGGED, (
                f"closed loop with {_in_flight(life)}: the load adapts to the server, yet some of them waited in its "
                f"queue {life.queue_share_at_server:.0%} of the time"
            )
        return Verdict.STABLE, f"closed loop with {_in_flight(life)}: the load adapts to the server"
    rate = (
        ""
        if offered is None
        else f" ({offered:,.4g}/s; {len(life.due) * NS_PER_S / life.duration_ns:,.3g}/s were served)"
    )
    return Verdict.BACKLOGGED, (
        f"all {len(life.due):,} requests were due within {_s(life.window_ns)}{rate} and worked off in "
        f"{_s(life.duration_ns)}: throughput is that of a full system, latencies are those of one burst"
    )


def _in_flight(life: Lives) -> str:
    return f"{plural(life.max_concurrency or 0, 'request')} in flight"


def _was_drained(life: Lives) -> bool:
    return life.queue_drain_ns > LONG_DRAIN_SHARE * life.window_ns


def _excess_could_hide(life: Lives, queue: Trend, saturation: float | None) -> bool:
    """Whether more was offered than can be served, by so little that the batch and chance hold what is left over."""
    offered = life.offered_request_rate
    if saturation is None or offered is None or life.max_concurrency is not None or offered < MIN_RHO * saturation:
        return False
    left_over = len(life.due) * (1 - saturation / offered)
    return left_over <= queue.noise + life.num_running_peak


def _why_overloaded(life: Lives, queue: Trend) -> str:
    return (
        f"{count(life.offered_request_rate)} requests/s were offered and {count(life.completion_rate)}/s finished: the "
        f"queue{_place(life)} grew to {life.queue_at_last_arrival:,} requests by the last arrival, after "
        f"{_s(life.window_ns)}, where chance explains {queue.noise:,.0f}"
    )


def _why_shedding(life: Lives) -> str:
    refused, came = int(life.is_refused.sum()), len(life.due)
    offered = life.offered_request_rate
    at = "" if offered is None else f" at {count(offered)} requests/s offered"
    return (
        f"the queue stays short because {refused:,} of {came:,} requests ({refused / came:.1%}) were refused{at}: by "
        "max_num_queued_reqs, max_num_queued_tokens or the policy of the queue"
    )


def _why_peak(life: Lives) -> str:
    peak, left = life.peak, life.queue_at_last_arrival
    worked_off = "it was worked off before the last request came"
    return (
        f"more came at the peak than could be served: from {_s(peak.foot_ns - life.first_due)} to "
        f"{_s(peak.time_ns - life.first_due)} after the first request {count(peak.arrival_rate)} requests/s were due "
        f"and the queue{_place(life)} grew to {peak.height:,}; "
        + (f"{left:,} were left when the last request came" if left > FOOT_SHARE * peak.height else worked_off)
    )


def _why_no_steady_state(life: Lives) -> str:
    long = f" (up to {_s(life.long_service_ns)} for nine in ten)" if life.window_ns >= life.usual_service_ns else ""
    return (
        f"requests came for {_s(life.window_ns)} only and one takes {_s(life.usual_service_ns)} to serve{long}: no "
        "steady state could form, let them come for several times as long"
    )


def _why_filling(life: Lives, backlog: Trend) -> str:
    waited = "hardly any request waited" if life.queue_share < 0.1 else "the queue did not outgrow chance"
    longer = f"{digits(backlog.stay_ratio, 2)} times as long as" if backlog.stay_ratio < inf else "longer than"
    return (
        f"{waited}, but the number in flight still grew (by {backlog.growth:,.0f} after the ramp-up, to "
        f"{backlog.level[-1]:,.0f}) and late requests took {longer} early ones: the system was still filling up, let "
        "requests come for several times as long"
    )


def _why_hidden(life: Lives, saturation: float) -> str:
    return (
        f"{count(life.offered_request_rate)} requests/s were offered and {count(saturation)}/s can be served at "
        f"saturation, but what {len(life.due):,} requests leave over fits into the batch: let several times as many "
        "come to see the queue grow"
    )


def _place(life: Lives) -> str:
    return " (counting the wait at the client's limit)" if life.max_concurrency else ""


def _s(time_ns: float) -> str:
    return seconds(time_ns / NS_PER_S)
