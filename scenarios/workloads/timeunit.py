"""Which unit the times of a trace are in: given, or judged by their span and then said aloud."""

from __future__ import annotations

from typing import Literal

import numpy as np

from windtunnel.scenarios.workloads.cells import TimeArray
from windtunnel.sim.workload import IntArray

TimeUnit = Literal["s", "ms", "us", "ns"]

UNIT_NS: dict[TimeUnit, int] = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_NAMES: dict[TimeUnit, str] = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}

# Since 1970 about 1e9 s have passed: a first time of that size is a date and gives its unit away.
_EPOCH_FROM: tuple[tuple[float, TimeUnit], ...] = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"), (1e9, "s"))

_SHORTEST_GAP_S = 1e-3
_LONGEST_GAP_S = 600.0
_LONGEST_SPAN_S = 400 * 86_400.0
# One request every 10 s if these are seconds, 100 a second if milliseconds: the geometric middle of plausible.
_MILLISECONDS_FROM_GAP = 10.0


def detect_time_unit(times: TimeArray, usual: TimeUnit | None = None) -> tuple[TimeUnit, str]:
    """The unit that makes these times a plausible trace, and a sentence that says why.

    Large first times are dates and tell their unit by their size.  Otherwise ``usual`` (what the format documents)
    stands unless it would mean less than 1 ms or more than 10 minutes between requests on average, or more than
    400 days in all; without it an average gap of 10 units or more means milliseconds, a smaller one seconds.
    """
    smallest = float(times.min())
    for bound, unit in _EPOCH_FROM:
        if smallest >= bound:
            return unit, f"Times read as {_NAMES[unit]} since 1970, judged by their size ({smallest:.6g})."
    span = float(times.max()) - smallest
    if span == 0:
        unit = usual or "s"
        return unit, f"Times read as {_NAMES[unit]}; all requests are due at once, so the unit makes no difference."
    unit = _by_gap(span, span / (len(times) - 1), usual)
    rates = " and ".join(f"{_rate(len(times), span, u)} in {_NAMES[u]}" for u in ("s", "ms"))
    return unit, (
        f"Times read as {_NAMES[unit]}, judged by their span: {len(times):,} requests over {span:,.10g} units would be "
        f"{rates}; time_unit (--time-unit) overrides that."
    )


def _by_gap(span: float, gap: float, usual: TimeUnit | None) -> TimeUnit:
    if usual is not None and _plausible(span, gap, usual):
        return usual
    return "ms" if gap >= _MILLISECONDS_FROM_GAP else "s"


def _plausible(span: float, gap: float, unit: TimeUnit) -> bool:
    unit_s = UNIT_NS[unit] / 1e9
    return _SHORTEST_GAP_S <= gap * unit_s <= _LONGEST_GAP_S and span * unit_s <= _LONGEST_SPAN_S


def _rate(num_requests: int, span: float, unit: TimeUnit) -> str:
    return f"{(num_requests - 1) / (span * UNIT_NS[unit] / 1e9):,.3g} requests/s"


def to_ns(times: TimeArray, unit: TimeUnit) -> IntArray:
    """Whole nanoseconds; exact for whole numbers, else rounded.  Raises OverflowError beyond 292 years."""
    factor = UNIT_NS[unit]
    if len(times) and max(abs(float(times.min())), abs(float(times.max()))) * factor >= 2**63:
        raise OverflowError(f"a time of {float(np.abs(times).max()):g} {_NAMES[unit]} is out of range")
    if times.dtype == np.int64:
        return times.astype(np.int64) * factor
    return np.rint(times * factor).astype(np.int64)


def unit_name(unit: TimeUnit) -> str:
    """The unit in words."""
    return _NAMES[unit]
