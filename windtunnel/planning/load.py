"""What is asked of a deployment: how much, how unevenly, what one of R replicas gets of it, and how it grows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from windtunnel.capacity.sampling import rows_of
from windtunnel.scenarios.workloads.rows import conversation_roots
from windtunnel.sim.workload import IntArray, Workload

NS_PER_S = 1_000_000_000
PEAK_WINDOWS_S = (10.0, 60.0, 300.0)
"""Windows over which the busiest part of a workload is told."""
PEAK_WINDOW_S = 60.0
"""The one that is meant by the peak."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A workload in a few numbers.  Rates are of requests (turns, where there are conversations)."""

    num_requests: int
    span_s: float
    """From the first to the last request due."""
    mean_rate: float
    peak_rates: Mapping[str, float]
    """Highest rate in any window of so many seconds ("60"), where the workload is longer than that."""
    burstiness_cv: float
    """Coefficient of variation of the gaps between arrivals; 1 is Poisson."""
    mean_prompt_tokens: float
    mean_output_tokens: float
    longest_tokens: int
    """Prompt and output of the longest request."""

    @property
    def peak_window_s(self) -> float:
        """The window of ``peak_rate``: a minute, or what a shorter workload has."""
        windows = [float(window) for window in self.peak_rates if float(window) <= PEAK_WINDOW_S]
        return max(windows, default=self.span_s)

    @property
    def peak_rate(self) -> float:
        """Highest rate in any minute (of a shorter workload: in any window of ``peak_window_s``)."""
        return self.peak_rates.get(f"{self.peak_window_s:g}", self.mean_rate)

    @property
    def peak_to_mean(self) -> float:
        """How much busier than the mean that is."""
        return self.peak_rate / self.mean_rate

    @property
    def input_tokens_per_hour(self) -> float:
        """Prompt tokens at the mean rate."""
        return 3600 * self.mean_rate * self.mean_prompt_tokens

    @property
    def output_tokens_per_hour(self) -> float:
        """Output tokens at the mean rate."""
        return 3600 * self.mean_rate * self.mean_output_tokens


def demand_of(workload: Workload) -> Demand:
    """The demand of a workload.

    Raises ValueError for one from which no rate follows: all requests at once, or a closed loop of clients, whose rate
    depends on how fast they are served.
    """
    if workload.max_concurrency is not None:
        raise ValueError(
            f"the workload is a closed loop of {workload.max_concurrency:,} clients, who ask as fast as they are "
            "served: no number of replicas follows from that; leave max_concurrency out and give a request rate"
        )
    due = np.sort(workload.arrival_ns[workload.previous < 0])
    if len(due) < 2 or due[-1] == due[0]:
        raise ValueError(
            "all requests are due at once, from which no rate follows: give a request rate (--request-rate) or a trace "
            "with times"
        )
    span_s = float(due[-1] - due[0]) / NS_PER_S
    turns = len(workload) / len(due)
    gaps = np.diff(due).astype(np.float64)
    return Demand(
        num_requests=len(workload),
        span_s=span_s,
        mean_rate=turns * (len(due) - 1) / span_s,
        peak_rates={
            f"{window_s:g}": turns * _busiest(due, window_s) for window_s in PEAK_WINDOWS_S if window_s <= span_s / 2
        },
        burstiness_cv=float(gaps.std() / gaps.mean()),
        mean_prompt_tokens=float(workload.num_prompt_tokens.mean()),
        mean_output_tokens=float(workload.num_output_tokens.mean()),
        longest_tokens=int((workload.num_prompt_tokens + workload.num_output_tokens).max()),
    )


def _busiest(due_ns: IntArray, window_s: float) -> float:
    """Highest rate of arrivals in any half-open window of that length."""
    inside = np.searchsorted(due_ns, due_ns + round(window_s * NS_PER_S), side="left") - np.arange(len(due_ns))
    return float(inside.max()) / window_s


def busiest_ns(workload: Workload) -> int:
    """The middle of the minute in which the most requests come, or of a third of a workload of less than three."""
    due = np.sort(workload.arrival_ns[workload.previous < 0])
    window_ns = min(round(PEAK_WINDOW_S * NS_PER_S), max(int(due[-1] - due[0]) // 3, 1))
    inside = np.searchsorted(due, due + window_ns, side="left") - np.arange(len(due))
    return int(due[int(inside.argmax())]) + window_ns // 2


def rates_over_time(workload: Workload, num_parts: int = 60) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Starts in seconds of equal parts of the workload, and the request rate in each."""
    due = np.sort(workload.arrival_ns[workload.previous < 0])
    edges = np.linspace(float(due[0]), float(due[-1]), num_parts + 1)
    counts, _ = np.histogram(due, bins=edges)
    width_s = (edges[1] - edges[0]) / NS_PER_S
    turns = len(workload) / len(due)
    return (edges[:-1] - edges[0]) / NS_PER_S, turns * counts / width_s


def refused_share(workload: Workload, max_model_len: int | None) -> float:
    """Share of the requests whose prompts fill max_model_len: vLLM refuses them, whatever the load."""
    if max_model_len is None or not len(workload):
        return 0.0
    return float((workload.num_prompt_tokens >= max_model_len).mean())


# --- what one replica gets


def dealt(workload: Workload, num_replicas: float, phase: float) -> Workload:
    """Every ``num_replicas``-th request, from place ``phase`` (a share, 0 … 1, of that) on: what one of so many equal
    replicas gets where they take turns.

    ``num_replicas`` need not be whole: 12.5 takes requests 0, 12, 25, 37 …  A conversation goes as a whole.  Times
    stay.  Raises ValueError for less than one replica and for a phase outside of [0, 1).
    """
    if not num_replicas >= 1:
        raise ValueError(f"num_replicas must be at least 1, got {num_replicas:g}")
    if not 0 <= phase < 1:
        raise ValueError(f"phase must be at least 0 and below 1, got {phase:g}")
    roots = np.flatnonzero(workload.previous < 0)
    places = np.floor(np.arange(math.ceil(len(roots) / num_replicas)) * num_replicas + phase * num_replicas)
    chosen = roots[places[places < len(roots)].astype(np.int64)]
    if not (workload.previous >= 0).any():
        return rows_of(workload, chosen)
    is_chosen = np.zeros(len(workload), np.bool_)
    is_chosen[chosen] = True
    return rows_of(workload, np.flatnonzero(is_chosen[conversation_roots(workload.previous)]))


def dealt_several(workload: Workload, num_replicas: float, phases: Sequence[float]) -> Workload:
    """What several of so many replicas get, one after the other: a longer sample of the life of one."""
    parts = [dealt(workload, num_replicas, phase) for phase in phases]
    return parts[0] if len(parts) == 1 else _joined(parts, _cycle_ns(workload))


def _cycle_ns(workload: Workload) -> int:
    """The length of the workload, up to where a repetition of it would begin."""
    due = workload.arrival_ns[workload.previous < 0]
    span = int(due.max() - due.min())
    return span + span // max(len(due) - 1, 1)


def _joined(parts: Sequence[Workload], cycle_ns: int) -> Workload:
    """Workloads one after the other; what the requests of one share, those of another do not share again."""
    first = parts[0]
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("num_prompt_tokens", "num_output_tokens", "max_tokens", "priority", "think_ns")
    }
    return replace(
        first,
        arrival_ns=np.concatenate(
            [
                np.where(part.previous < 0, part.arrival_ns + k * cycle_ns, part.arrival_ns)
                for k, part in enumerate(parts)
            ]
        ),
        previous=np.concatenate(
            [
                np.where(part.previous < 0, -1, part.previous + start)
                for part, start in zip(parts, starts.tolist(), strict=True)
            ]
        ),
        content=None
        if first.content is None
        else tuple(
            tuple((stream + k * first.num_streams, end) for stream, end in segments)
            for k, part in enumerate(parts)
            for segments in part.content or ()
        ),
        num_streams=first.num_streams * len(parts),
        labels=None,
        tenant=None
        if first.tenant is None
        else np.concatenate([part.tenant for part in parts if part.tenant is not None]),
        **columns,
    )


def shuffled(workload: Workload, generator: np.random.Generator, window_s: float = 60.0) -> Workload:
    """The same arrivals, the requests in another order within each window: as likely a day as the recorded one.

    Requests that share beginnings or follow one another stay as they are.
    """
    if workload.content is not None or bool((workload.previous >= 0).any()):
        return workload
    windows = workload.arrival_ns // round(window_s * NS_PER_S)
    order = np.lexsort((generator.random(len(workload)), windows))
    return replace(
        workload,
        num_prompt_tokens=workload.num_prompt_tokens[order],
        num_output_tokens=workload.num_output_tokens[order],
        max_tokens=workload.max_tokens[order],
        priority=workload.priority[order],
        labels=None,
        tenant=None if workload.tenant is None else workload.tenant[order],
    )


def scaled(workload: Workload, factor: float) -> Workload:
    """The same requests, so many times as fast; think times stay."""
    if factor == 1:
        return workload
    arrival_ns = np.rint(workload.arrival_ns / factor).astype(np.int64)
    return replace(workload, arrival_ns=np.where(workload.previous < 0, arrival_ns, workload.arrival_ns))


# --- growth


@dataclass(frozen=True, slots=True)
class Growth:
    """How the load grows: by a share of itself every month, compounded."""

    per_month: float
    num_months: int

    def __post_init__(self) -> None:
        if not (self.per_month > -1 and math.isfinite(self.per_month)):
            raise ValueError(f"growth must be above -100 % a month and finite, got {100 * self.per_month:g} %")
        if not 1 <= self.num_months <= 120:
            raise ValueError(f"months must be from 1 to 120, got {self.num_months}: 12 is a year ahead")

    def factor(self, month: int) -> float:
        """Load after so many months over that of today."""
        return float((1.0 + self.per_month) ** month)


def _bare(given: str | float) -> str:
    return (
        f"growth {given} without a percent sign is a share, at most 1 (0.05 is 5 %): write 5%/month or 0.05, and "
        "200%/month if it is to be so much"
    )


def growth_from(given: str | float, num_months: int) -> Growth:
    """Growth from text, as ``parse_growth``, or from a share a month (0.05), at most 1."""
    if isinstance(given, str):
        return parse_growth(given, num_months)
    if given > 1:
        raise ValueError(_bare(given))
    return Growth(given, num_months)


def parse_growth(text: str, num_months: int = 12) -> Growth:
    """Growth from ``5%/month``, ``5%``, ``60%/year`` or ``0.05``; a year's is spread over twelve equal factors.

    Raises ValueError for anything else.
    """
    number, _, period = text.partition("/")
    is_percent = number.strip().endswith("%")
    try:
        share = float(number.strip().removesuffix("%")) / (100 if is_percent else 1)
    except ValueError:
        share = math.nan
    if not is_percent and share > 1:
        raise ValueError(_bare(text))
    unit = period.strip().casefold() or "month"
    if math.isnan(share) or unit not in ("month", "year"):
        raise ValueError(f"growth {text!r} must read 5%/month or 60%/year")
    if unit == "year":
        if share <= -1:
            raise ValueError(f"growth must be above -100 % a year, got {100 * share:g} %")
        share = (1 + share) ** (1 / 12) - 1
    return Growth(share, num_months)
