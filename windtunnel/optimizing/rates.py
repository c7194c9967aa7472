"""The largest rate of one deployment among many: as exact as telling them apart needs, and as cheap.

``capacity`` proves rates: one holds with confidence, one fails.  Here the same runs answer a smaller question.  On the
same requests (common random numbers) each deployment has one rate at which the estimate of its tightest objective
meets the limit.  That rate is bracketed and interpolated; how far chance moves it is told by other seeds, not by the
bounds of one (a sample path that is solved: Healy and Schruben, "Retrospective simulation response optimization",
Winter Simulation Conference 1991).

Where a deployment has a rate to beat, that one is simulated first.  If the objectives are missed there, it is searched
no further, and all that is known, and told, is that its rate is below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, log, sqrt
from typing import TYPE_CHECKING

from windtunnel.capacity.decide import OVERLOADED, Verdict, decide
from windtunnel.capacity.evaluate import Evaluation, Evaluator
from windtunnel.capacity.runs import Simulations
from windtunnel.capacity.search import IDLE_RHO, MAX_RATES, Found, RateRow, Search

if TYPE_CHECKING:
    from windtunnel.capacity.sampling import Source

FIRST_LOOK = 2
"""Replications of a rate to beat that are looked at before the others are run."""
HOPELESS = 2.0
"""Use of a limit in each of them from which on the others are spared."""
ROUNDING = 1e-9
OFF_THE_ENDS = 0.1
"""Share of the way between two ends, in logarithms, by which the next rate keeps off both."""
SATURATES, TOO_NEAR = "it saturates earlier", "too near its saturation to be tried"
HIGHEST = 64
"""Times the scale of rates up to which rates are tried where nobody knows what saturates a deployment."""


class KeptSimulations(Simulations):
    """Simulations of which none is run twice."""

    def __init__(self, evaluator: Evaluator, source: Source, seed: int) -> None:
        super().__init__(evaluator, source, seed)
        self._kept: dict[tuple[float, int, int], Evaluation] = {}

    def run(self, load: float, replications: Sequence[int], num_requests: int) -> list[Evaluation]:
        """As ``Simulations.run``; only what is new is run, and counted."""
        missing = [each for each in replications if (load, each, num_requests) not in self._kept]
        for each, found in zip(missing, super().run(load, missing, num_requests), strict=True):
            self._kept[load, each, num_requests] = found
        return [self._kept[load, each, num_requests] for each in replications]


@dataclass(frozen=True, slots=True)
class Below:
    """A rate that a deployment does not reach, and why."""

    rate: float
    """Requests per second."""
    why: str
    """``misses ttft:p99<500ms``, ``its queue grows``, SATURATES or TOO_NEAR."""


class RateFinder(Search):
    """Looks for the rate at which the estimates of all replications meet the limit."""

    def below(self, rate: float) -> Below | None:
        """Whether the deployment stays below a rate, and what shows it; None if it may reach it.

        No simulation is needed beyond the largest utilisation that runs of this length can judge, since no rate that is
        found lies there.  Else two replications are enough where each is overloaded or uses twice the limit; where they
        are not all of them decide, as they would if its own rate were searched for on the same requests.
        """
        top = self._top
        if top is not None and rate > top:
            is_beyond = self._saturation is not None and rate >= self._saturation
            return Below(rate, SATURATES if is_beyond else TOO_NEAR)
        first = self._simulations.run(rate, range(FIRST_LOOK), self._num_requests(rate))
        objectives, sure = self._simulations.evaluator.objectives, self._settings.confidence_of_a_look
        alone = [decide([each], objectives, sure) for each in first]
        if all(one.overloaded_share or one.margin >= HOPELESS for one in alone):
            return Below(rate, _why(decide(first, objectives, sure)))
        row = self.judge(rate)
        return None if use_of(row) <= 1 else Below(rate, _why(row.verdict))

    def find(self, around: float | None = None) -> Found:
        """The rate itself, looked for from where it is expected, or from what was simulated already.

        ``rate`` is where the estimates meet the limit; the highest that is ever tried where they do not reach it, and
        0 where even an idle system breaks it.
        """
        highest, lowest = self._top or HIGHEST * self._scale, IDLE_RHO * self._scale
        precision = self._settings.precision
        first = around / sqrt(1 + precision) if around else 0.75 * self._top if self._top else self._scale / 2
        rate: float | None = min(max(first, lowest), highest)
        while (rate := next_rate(self._uses, lowest, highest, precision) if self._rows else rate) is not None:
            if rate in self._rows or len(self._rows) >= MAX_RATES:
                break
            self.judge(rate)
        top = None if self._saturation is None else self._max_rho
        found = estimated_rate(sorted(self._uses))
        return Found(found, self._low(), self._high(), self.rows, self._saturation, self._ending(), top)

    @property
    def _uses(self) -> list[tuple[float, float]]:
        """Rates in the order in which they were tried, with the use of the tightest limit."""
        return [(rate, use_of(row)) for rate, row in self._rows.items()]

    @property
    def _top(self) -> float | None:
        return None if self._saturation is None else self._max_rho * self._saturation

    def _ending(self) -> str:
        kept, broken = ends(self._uses)
        if kept and broken:
            return "found"
        if not kept:
            return "idle_fails"
        return "unresolved" if self._top is None else "near_saturation"


def next_rate(uses: Sequence[tuple[float, float]], lowest: float, highest: float, precision: float) -> float | None:
    """The rate to try next, to know by ``precision`` where the use of a limit crosses 1; None once that is known.

    ``uses`` has pairs of a rate and a use in the order in which they were tried.  While all lie on one side, each
    stride is the square of the last one.  Between two ends the next rate is where the crossing is expected, moved on by
    half of the precision, so that it becomes the other end and both are close together.
    """
    kept, broken = ends(uses)
    stride = float((1 + precision) ** 2 ** (len(uses) - 1))
    if broken is None:
        assert kept is not None
        return None if kept >= highest * (1 - ROUNDING) else min(kept * stride, highest)
    if kept is None:
        return None if broken <= lowest * (1 + ROUNDING) else max(broken / stride, lowest)
    if broken <= kept * (1 + precision) * (1 + ROUNDING):
        return None
    known = dict(uses)
    expected = _crossing(kept, known[kept], broken, known[broken])
    reach = sqrt(1 + precision)
    moved = expected * reach if uses[-1][0] == kept else expected / reach
    least = float((broken / kept) ** OFF_THE_ENDS)
    return min(max(moved, kept * least), broken / least)


def ends(uses: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """The highest rate that keeps the limit below all that do not, and the lowest that does not; None for none."""
    broken = min((rate for rate, use in uses if use > 1), default=None)
    kept = [rate for rate, _ in uses if broken is None or rate < broken]
    return max(kept, default=None), broken


def use_of(row: RateRow) -> float:
    """The use of the tightest limit at a rate, by the estimates; infinite where the queue grows without bound."""
    margin: float = row.verdict.margin
    return inf if row.verdict.overloaded_share >= OVERLOADED else margin


def estimated_rate(uses: Sequence[tuple[float, float]]) -> float:
    """Where the use of a limit crosses 1, by interpolation in logarithms between rates; 0 if it does so nowhere.

    ``uses`` has pairs of a rate and a use, by rate.  Where all lie below 1 the highest rate is taken.
    """
    kept, broken = ends(uses)
    if kept is None or broken is None:
        return kept or 0.0
    known = dict(uses)
    return _crossing(kept, known[kept], broken, known[broken])


def _crossing(kept: float, below: float, broken: float, above: float) -> float:
    """Half-way where a use is no help: nothing was measured, or the queue grows without bound."""
    share = log(1 / below) / log(above / below) if below > 0 and isfinite(above) else 0.5
    return float(kept * (broken / kept) ** share)


def _why(verdict: Verdict) -> str:
    if verdict.overloaded_share >= OVERLOADED:
        return "its queue grows"
    return f"misses {verdict.worst.slo.text}"
