"""A fleet's part of a report: rows and tables for text, Markdown and HTML, sentences, and figures over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from windtunnel.reports.figures import Axis, Figure, rounded, time_axis
from windtunnel.reports.words import NOTHING, count, digits, milliseconds, percent, plural, verb
from windtunnel.sim.fleet.records import Death, FleetRecords, LifeTable
from windtunnel.sim.metrics import Summary
from windtunnel.sim.metrics.fleet import FleetStats, ReplicaStats, Scaling, ready_over_time
from windtunnel.sim.metrics.latency import FloatArray
from windtunnel.sim.metrics.load import level_over_time
from windtunnel.sim.metrics.sample import LatencyStats
from windtunnel.sim.metrics.summary import percent_word
from windtunnel.sim.metrics.words import seconds
from windtunnel.sim.records import Records, ReplicaRecords

NUM_INTERVALS = 240
MAX_LINES = 8
"""Replicas (or pools) that get a line of their own; those with the most requests come first."""
MAX_TEXT_REPLICAS = 16
MAX_EVENTS = 40
MAX_WHOLE_TICKS = 8
"""Replicas up to which the axis shows each whole number."""
EVEN = 1.1
"""Requests of the busiest replica over the mean, up to which the router is said to have spread them evenly."""
LONG_AT_DEAD_S = 1e-3
"""Request-seconds at dead replicas from which on they are said: being refused takes no time to speak of."""
_LOOKS = (
    ("@blue", "solid"),
    ("@vermillion", "dash"),
    ("@green", "dot"),
    ("@purple", "dashdot"),
    ("@orange", "longdash"),
    ("@sky", "longdashdot"),
    ("@grey", "solid"),
    ("@text", "dot"),
)


def fleet_rows(of: FleetStats) -> Iterator[tuple[str, str]]:
    """The fleet in numbers; what did not happen is left out."""
    yield "Router", of.router
    fewest = "" if of.num_ready_min == of.num_ready_peak else f", from {of.num_ready_min:,} to {of.num_ready_peak:,}"
    yield "Ready replicas, mean", f"{count(of.num_ready_mean)}{fewest}"
    yield "Replica-hours", digits(of.replica_hours)
    yield "GPU-hours", digits(of.gpu_hours)
    if of.request_imbalance is not None and len(of.replicas) > 1:
        yield "Requests of the busiest over the mean", f"{of.request_imbalance:.2f}"
    if of.known_prefix_share is not None:
        yield "Prompt tokens that the router thought cached", percent(of.known_prefix_share)
    if of.num_waited:
        yield "Requests that waited at the router", f"{of.num_waited:,}"
        yield "Mean wait there", milliseconds(of.gateway_wait.mean_ms)
    if of.num_crashes:
        yield "Crashes", f"{of.num_crashes:,}"
    if of.num_unheard_stays:
        yield "Times a request was sent to a dead replica", f"{of.num_unheard_stays:,}"
    if of.time_at_dead_s >= LONG_AT_DEAD_S:
        yield "Request-seconds at dead replicas", digits(of.time_at_dead_s)
    if of.num_lost_stays:
        yield "Times a request lost its replica", f"{of.num_lost_stays:,}"
        yield "Requests tried again", f"{of.num_retried_requests:,}"
        yield "Requests lost for good", f"{of.num_lost_requests:,}"
        yield "Output tokens lost", f"{of.lost_output_tokens:,}"


class Table(NamedTuple):
    """Heads and rows of text; all but the first ``num_words`` columns are numbers."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    num_words: int = 1


def pool_table(summary: Summary) -> Table:
    """One row a pool."""
    of = _fleet(summary)
    high = f"P{percent_word(summary.percentiles[-1])}" if summary.percentiles else "max"
    heads = (
        *("Pool", "GPU", "Ready", "Requests", "Lost", "Busy", "KV mean", "KV peak", "Preempted", "Prefix hits"),
        *(f"TTFT {high}", f"E2EL {high}", "Replica-hours", "Cost"),
    )
    rows = [
        (
            pool.pool,
            pool.gpu or NOTHING,
            count(pool.num_ready_mean),
            f"{pool.num_requests:,}",
            f"{pool.num_lost:,}" if pool.num_lost else "",
            percent(pool.busy_share),
            percent(pool.kv_usage_mean),
            percent(pool.kv_usage_peak),
            f"{pool.num_preemptions:,}" if pool.num_preemptions else "",
            percent(pool.prefix_cache_hit_rate) if pool.prefix_cache_hit_rate else "",
            milliseconds(_highest(pool.ttft)),
            milliseconds(_highest(pool.e2el)),
            digits(pool.replica_hours),
            "" if pool.cost is None else digits(pool.cost),
        )
        for pool in of.pools
    ]
    return _without_empty(Table(heads, rows, 2))


def replica_table(summary: Summary) -> Table:
    """One row a replica, in the order in which they came."""
    of = _fleet(summary)
    heads = (
        *("Replica", "Pool", "From", "To", "Requests", "Lost", "Busy", "Running", "Waiting", "KV mean", "KV peak"),
        *("Preempted", "Prefix hits"),
    )
    rows = [
        (
            f"#{replica.replica}",
            f"{replica.pool}/{replica.place}",
            *_life_words(replica),
            f"{replica.num_requests:,}",
            f"{replica.num_lost:,}" if replica.num_lost else "",
            percent(replica.busy_share),
            _mean(replica.num_running_mean),
            _mean(replica.num_waiting_mean),
            percent(replica.kv_usage_mean),
            percent(replica.kv_usage_peak),
            f"{replica.num_preemptions:,}" if replica.num_preemptions else "",
            percent(replica.prefix_cache_hit_rate) if replica.prefix_cache_hit_rate else "",
        )
        for replica in of.replicas
    ]
    return _without_empty(Table(heads, rows, 4))


def _life_words(replica: ReplicaStats) -> tuple[str, str]:
    """From when to when it was there."""
    gone = "the end" if replica.gone_s is None else f"{seconds(replica.gone_s)}, {_DEATHS[replica.death]}"
    if replica.ready_s is None:
        return ("still starting" if replica.gone_s is None else "never ready"), gone
    return (seconds(replica.ready_s) if replica.ready_s else "the start"), gone


def _mean(value: float | None) -> str:
    """A mean number of requests; a few thousandths of one are nothing."""
    return count(None if value is None else round(value, 2))


_DEATHS = {"crash": "crashed", "scaled_down": "scaled down", "none": ""}


def event_table(summary: Summary) -> Table:
    """What happened to the fleet, in order of time: crashes, replicas that came and went, decisions to scale."""
    of = _fleet(summary)
    events = [*_life_events(of), *((each.time_s, each.pool, _scaling_words(each)) for each in of.scalings)]
    rows = [(seconds(time_s), pool, what) for time_s, pool, what in sorted(events, key=lambda event: event[0])]
    return Table(("Time", "Pool", "What"), rows, 3)


def _scaling_words(scaling: Scaling) -> str:
    moves = "grows" if scaling.after > scaling.before else "shrinks"
    return f"{moves} from {scaling.before:,} to {scaling.after:,} ({digits(scaling.value)} for each ready replica)"


def _life_events(of: FleetStats) -> Iterator[tuple[float, str, str]]:
    for each in of.replicas:
        name = f"replica {each.place} (#{each.replica})"
        if each.ready_s:
            yield each.ready_s, each.pool, f"{name} is ready, {seconds(each.ready_s - each.ordered_s)} after its order"
        if each.gone_s is not None and each.death == "crash":
            later = f"; {each.num_unheard:,} more are sent there" if each.num_unheard else ""
            yield each.gone_s, each.pool, f"{name} crashes with {plural(each.num_lost, 'request')} in it{later}"
        elif each.gone_s is not None:
            yield each.gone_s, each.pool, f"{name} is gone, scaled down"


def fleet_sentences(of: FleetStats) -> Iterator[str]:
    """What the fleet came to, for people."""
    if of.num_crashes:
        crashes = "One crash" if of.num_crashes == 1 else f"{of.num_crashes:,} crashes"
        text = f"{crashes} took {plural(of.num_lost_stays, 'request')} along"
        if of.num_unheard_requests:
            many = of.num_unheard_requests
            text += f", and {many:,} {verb(many, 'was', 'were')} sent to a dead replica before the router noticed"
        if of.num_lost_stays or of.num_unheard_stays:
            text += (
                f": {plural(of.num_retried_requests, 'request')} {verb(of.num_retried_requests, 'was', 'were')} tried "
                f"again, {of.num_lost_requests:,} lost for good"
            )
        yield f"{text}."
    elif of.num_lost_stays:
        yield (
            f"{plural(of.num_lost_stays, 'request')} lost their replica because it was out of time to finish them; "
            f"{of.num_lost_requests:,} for good."
        )
    if of.scalings:
        ups = sum(each.after > each.before for each in of.scalings)
        yield (
            f"The autoscaler grew the fleet {_times(ups)} and shrank it {_times(len(of.scalings) - ups)}; "
            f"{count(of.num_ready_mean)} replicas were ready on average, at most {of.num_ready_peak:,}."
        )
    if of.num_waited and of.gateway_wait.mean_ms is not None:
        yield (
            f"{plural(of.num_waited, 'request')} waited at the router for a replica with room; the mean of all "
            f"requests is {milliseconds(of.gateway_wait.mean_ms)}."
        )
    is_level = len(of.pools) == 1 and all(each.ready_s == 0 and each.gone_s is None for each in of.replicas)
    if is_level and of.request_imbalance is not None and of.request_imbalance > EVEN:
        yield (
            f"The busiest replica got {of.request_imbalance:.2f} times as many requests a second as the mean of all: "
            f"{of.router} did not spread them evenly."
        )


def _times(number: int) -> str:
    return "never" if not number else "once" if number == 1 else f"{number:,} times"


def fleet_lines(summary: Summary) -> Iterator[str]:
    """The tables in columns, each as wide as it needs to be; replicas only where they are few."""
    yield from _columns(pool_table(summary))
    if len(_fleet(summary).replicas) <= MAX_TEXT_REPLICAS:
        yield from _columns(replica_table(summary))
    events = event_table(summary)
    shown = events.rows[:MAX_EVENTS]
    if shown:
        yield from _columns(events._replace(rows=shown))
    if events.rows[MAX_EVENTS:]:
        yield f"and {len(events.rows) - MAX_EVENTS:,} more events"


def _columns(table: Table) -> Iterator[str]:
    whole = [table.heads, *table.rows]
    widths = [max(len(row[column]) for row in whole) for column in range(len(table.heads))]
    for row in whole:
        cells = [
            text.ljust(width) if column < table.num_words else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


# --- figures


def fleet_figures(records: Records) -> list[Figure]:
    """Replicas over time, where that changes, and the load of each."""
    fleet = records.fleet
    if fleet is None:
        return []
    axis = time_axis(records)
    drawn = [_load_figure(records, fleet, axis)]
    changes = bool((fleet.lives.death != Death.NONE).any() or (fleet.lives.ready_ns != 0).any())
    return [_replicas_figure(records, fleet, axis), *drawn] if changes else drawn


def _replicas_figure(records: Records, fleet: FleetRecords, axis: Axis) -> Figure:
    lives, data = fleet.lives, []
    for number, pool in enumerate(fleet.pools[:MAX_LINES]):
        (colour, look), mine = _LOOKS[number], lives.pool == number
        for name, (times, level), dash, width in (
            ("ready", ready_over_time(lives, mine, records.end_ns), look, 2.5),
            ("paid for", _held_over_time(lives, mine, records.end_ns), "dot", 1.5),
        ):
            label = name if len(fleet.pools) == 1 else f"{pool.name}, {name}"
            before = times < records.end_ns
            x = np.append(times[before], records.end_ns)
            y = [*level[before].tolist(), *level[before][-1:].tolist()]
            line = {"color": colour, "width": width, "dash": dash, "shape": "hv"}
            data.append(
                {
                    "x": rounded(axis.at(x[-len(y) :]), 7), "y": y, "mode": "lines", "name": label, "line": line,
                    "hovertemplate": "%{y:.0f}",
                }
            )  # fmt: skip
    data += _crash_marks(lives, axis)
    caption = (
        "Ready replicas take requests; those paid for are there as well while they start up, and until they have "
        "finished what they had."
    )
    if bool((lives.death == Death.CRASH).any()):
        caption += " ✕ marks a crash."
    y_axis: dict[str, Any] = {"title": "replicas", "rangemode": "tozero"}
    if max(max(trace["y"], default=0) for trace in data) <= MAX_WHOLE_TICKS:
        y_axis["dtick"] = 1
    layout = {
        "xaxis": {"title": axis.title, "rangemode": "nonnegative"},
        "yaxis": y_axis,
        "hovermode": "x unified",
    }
    return Figure("replicas", "Replicas", caption, data, layout)


def _held_over_time(lives: LifeTable, chosen: Any, end_ns: int) -> tuple[Any, Any]:
    starts = lives.ordered_ns[chosen]
    ends = np.where(lives.gone_ns < 0, end_ns, lives.gone_ns)[chosen]
    return level_over_time(np.minimum(starts, end_ns), np.minimum(ends, end_ns))


def _crash_marks(lives: LifeTable, axis: Axis) -> list[dict[str, Any]]:
    crashed = np.flatnonzero(lives.death == Death.CRASH)
    if not len(crashed):
        return []
    mark = {"symbol": "x", "size": 11, "color": "@vermillion"}
    x = rounded(axis.at(lives.gone_ns[crashed]), 7)
    return [
        {
            "x": x, "y": [0] * len(crashed), "mode": "markers", "name": "crash", "marker": mark,
            "cliponaxis": False, "hovertemplate": "crash",
        }
    ]  # fmt: skip


def _load_figure(records: Records, fleet: FleetRecords, axis: Axis) -> Figure:
    edges = np.linspace(axis.start_ns, max(axis.end_ns, axis.start_ns + 1), NUM_INTERVALS + 1)
    middles = rounded(axis.at((edges[1:] + edges[:-1]) / 2), 6)
    counts = np.bincount(fleet.stays.replica, minlength=len(records.replicas))
    shown = sorted(np.argsort(-counts, kind="stable")[:MAX_LINES].tolist())
    data = []
    for place, number in enumerate(shown):
        colour, dash = _LOOKS[place]
        pool = fleet.pools[int(fleet.lives.pool[number])].name
        load = rounded(_mean_load(records.replicas[number], edges))
        there = _is_there(fleet.lives, number, edges)
        data.append(
            {
                "x": middles, "y": [value if here else None for value, here in zip(load, there, strict=True)],
                "mode": "lines",
                "name": f"#{number} ({pool}/{int(fleet.lives.place[number])})",
                "line": {"color": colour, "dash": dash, "width": 2}, "hovertemplate": "%{y:,.3~r} requests",
            }
        )  # fmt: skip
    caption = (
        f"Requests in each replica, running and waiting, mean of {NUM_INTERVALS} equal intervals. Lines that lie "
        "together: the router spreads the load; one that climbs alone: it does not, or that replica is slow."
    )
    if len(records.replicas) > len(shown):
        caption += f" The {len(shown)} of {len(records.replicas):,} replicas with the most requests."
    layout = {
        "xaxis": {"title": axis.title, "rangemode": "nonnegative"},
        "yaxis": {"title": "requests in the replica", "rangemode": "tozero"},
        "hovermode": "x unified",
    }
    return Figure("replica-load", "Load of each replica", caption, data, layout)


def _is_there(lives: LifeTable, number: int, edges: FloatArray) -> list[bool]:
    """In which intervals the replica is there, be it for a part of them."""
    ready, gone = int(lives.ready_ns[number]), int(lives.gone_ns[number])
    if ready < 0:
        return [False] * (len(edges) - 1)
    there: list[bool] = ((edges[1:] > ready) & ((gone < 0) | (edges[:-1] < gone))).tolist()
    return there


def _mean_load(replica: ReplicaRecords, edges: FloatArray) -> FloatArray:
    """Requests in a replica, mean of each interval; none while no step runs."""
    steps = replica.steps
    if not len(steps):
        return np.zeros(len(edges) - 1)
    load = steps.num_running + steps.num_waiting
    total = np.concatenate(([0.0], np.cumsum(load * (steps.end_ns - steps.start_ns), dtype=np.float64)))
    times = np.empty(2 * len(load), np.float64)
    times[0::2], times[1::2] = steps.start_ns, steps.end_ns
    until = np.empty(2 * len(load), np.float64)
    until[0::2], until[1::2] = total[:-1], total[1:]
    means: FloatArray = np.diff(np.interp(edges, times, until)) / np.diff(edges)
    return means


def _without_empty(table: Table) -> Table:
    """Without columns in which nothing stands."""
    kept = [column for column in range(len(table.heads)) if any(row[column] not in ("", NOTHING) for row in table.rows)]
    num_words = sum(column < table.num_words for column in kept)
    return Table(
        tuple(table.heads[column] for column in kept),
        [tuple(row[column] for column in kept) for row in table.rows],
        num_words,
    )


def _fleet(summary: Summary) -> FleetStats:
    assert summary.fleet is not None, "the caller looks"
    return summary.fleet


def _highest(stats: LatencyStats) -> float | None:
    return stats.percentiles_ms[-1][1] if stats.percentiles_ms else stats.max_ms
