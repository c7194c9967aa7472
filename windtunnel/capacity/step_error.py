"""What the answer would be if all steps took longer or shorter than the cost model says.

No interval of chance holds that, but it needs no more simulations: a deployment whose steps all take ``f`` times as
long, at the rate ``r / f``, has the same life stretched in time, each latency ``f`` times as long.  So its largest rate
within a limit is that of the simulated one within ``limit / f``, divided by ``f``.  That rate is read off the curve of
estimates, where it was simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log
from typing import Any, NamedTuple

from windtunnel.capacity.decide import MOST_OVERLOADED
from windtunnel.capacity.search import RateRow
from windtunnel.sim.cost.statement import statement_of
from windtunnel.sim.metrics.slo import Slo


class OtherSteps(NamedTuple):
    """The answer for steps that take ``factor`` times as long."""

    factor: float
    rate: float | None
    """None where no simulated rate is on that side of it."""
    what: str
    """Where the factor comes from."""


def other_steps(cost: dict[str, Any], rows: Sequence[RateRow], objectives: Sequence[Slo]) -> tuple[OtherSteps, ...]:
    """The answer for steps that are longer and shorter by the stated error of the cost model; none if it states none.

    Only for objectives that are latencies: a share of requests within given limits does not scale with time.
    """
    stated = statement_of(cost)
    if stated is None or any(slo.unit != "ms" for slo in objectives):
        return ()
    errors = (("median", stated.p50_percent), ("nine-of-ten", stated.p90_percent))
    return tuple(
        OtherSteps(1 + sign * percent / 100, rate_within(rows, 1 + sign * percent / 100), name)
        for name, percent in errors
        if percent is not None
        for sign in (1, -1)
        if percent < 100
    )


def rate_within(rows: Sequence[RateRow], factor: float) -> float | None:
    """The largest rate for steps ``factor`` times as long, by interpolation; None if it lies beyond the rates seen."""
    target = 1 / factor
    seen = [(row.rate, row.verdict.margin) for row in rows if row.verdict.overloaded_share <= MOST_OVERLOADED]
    below: tuple[float, float] | None = None
    for rate, margin in seen:
        if margin > target:
            if below is None or not 0 < below[1] < margin < inf:
                return None
            share = log(target / below[1]) / log(margin / below[1])
            return (below[0] + share * (rate - below[0])) / factor
        below = rate, margin
    return None
