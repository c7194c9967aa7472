"""The search for the largest rate that holds: bracketed, with as many replications as each rate needs.

Each rate is simulated a few times and, while it is undecided, again twice as often, up to a cap.  As the evidence is
looked at several times, each look has its share of the error that the confidence allows (Bonferroni).  Rates are chosen
where the objective is expected to meet its limit, by interpolation between what was seen, until the highest rate that
holds and the lowest that fails (or the undecided ones between them) are closer together than the precision asked for.

Close to saturation no finite run tells.  There the queue behaves as a random walk with a barrier (reflected Brownian
motion): it forgets how it began only after about ``c² / (1 - rho)²`` requests, c² being the squared coefficients of
variation of gaps and work, summed.  Runs are made long enough for that, up to a cap; from the utilisation on at which
the cap does not do, rates are not tried, because their answer would depend on the length of the run.
Sources: Whitt, "Planning queueing simulations", Management Science 1989; Abate and Whitt, "Transient behavior of
regulated Brownian motion", Advances in Applied Probability 1987 (a mean that begins at 0 is at 0.94 of its final value
after twice, at 0.99 after four times that many requests).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite, log, sqrt
from typing import Any

from windtunnel.capacity.decide import Status, Verdict, decide
from windtunnel.capacity.evaluate import RAMP_SHARE, Evaluation
from windtunnel.capacity.runs import Simulations
from windtunnel.scenarios.saturation import saturation_request_throughput
from windtunnel.sim.metrics.slo import Slo

FIRST_REPLICATIONS = 8
"""With fewer a bound on a skewed mean is so far out that hardly any rate holds."""
MIN_REPLICATIONS = 4
NUM_DRAWS = 4
"""Draws of the workload that tell the saturation rate and how rough the traffic is."""
NUM_RELAXATIONS = 8.0
"""A run has so many times the c² / (1 - rho)² requests in which a queue forgets its start.

With 30 % of them left out as the ramp, the mean wait of what is counted is then within 1 % (M/D/1) or 1.5 % (M/M/1) of
that of a steady state, at rho = 0.7 as well as at 0.9 (20,000 replications of Lindley's recursion); with all of them
counted it is 7 % too low, and with five times as many requests, in place of eight, still 2 to 3 % after the ramp.
"""
NUM_CYCLES = 10
"""Arrivals that come and go (on_off) go through so many of their cycles in a run: fewer are chance, or not even one."""
MAX_RHO = 0.97
"""Largest utilisation that is tried: the saturation rate itself is known within about 3 %."""
LONGEST = 8
"""A run has at most so many times the requests asked for."""
IDLE_RHO = 0.02
"""Utilisation at which a system counts as idle: hardly any request meets another one."""
NUM_RARE = 10
"""As many of the requests that an objective is about (those beyond a percentile, those that may be bad) are expected in
all replications together, at its limit."""
MAX_RATES = 24


@dataclass(frozen=True, slots=True)
class Settings:
    """How a rate is judged.  Raises ValueError, naming the setting, for a value out of range."""

    confidence: float = 0.95
    """One-sided, of *holds* and of *fails*."""
    max_replications: int = 32
    num_requests: int = 1_000
    """Of a simulation; more where the load needs it."""
    precision: float = 0.03
    """Relative distance of the two ends of the answer that ends the search."""

    def __post_init__(self) -> None:
        if not 0.5 < self.confidence < 1:
            raise ValueError(f"confidence must be above 0.5 and below 1, got {self.confidence}: 0.95 is usual")
        if self.max_replications < MIN_REPLICATIONS:
            raise ValueError(
                f"replications must be at least {MIN_REPLICATIONS}, got {self.max_replications}: fewer do not tell "
                "how far off they are"
            )
        if self.num_requests < 100:
            raise ValueError(f"num_requests must be at least 100, got {self.num_requests}: take 1,000 or more")
        if not 0.001 <= self.precision < 1:
            raise ValueError(f"precision must be from 0.001 to 1, got {self.precision}: 0.03 is 3 %")

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of replications after which a rate is looked at."""
        looks = [min(FIRST_REPLICATIONS, self.max_replications)]
        while looks[-1] < self.max_replications:
            looks.append(min(2 * looks[-1], self.max_replications))
        return tuple(looks)

    @property
    def confidence_of_a_look(self) -> float:
        """So high that all looks together err no more often than ``confidence`` allows."""
        return 1 - (1 - self.confidence) / len(self.looks)

    def check_percentiles(self, objectives: tuple[Slo, ...]) -> None:
        """Raise ValueError for a percentile, or a share of requests, that all replications are too short for."""
        most = int(self.max_replications * self.num_requests * (1 - RAMP_SHARE))
        for slo in objectives:
            rare = rare_share(slo)
            if rare is None:
                continue
            needed = ceil(NUM_RARE / rare - 1e-6)
            if most < needed:
                what = slo.statistic if slo.percent is not None else f"a share of {100 * rare:.4g} %"
                raise ValueError(
                    f"{slo.text}: {self.max_replications} replications of {self.num_requests:,} requests count "
                    f"{most:,}, too few for {what}, which needs {needed:,}: give more requests "
                    "(--num-requests) or more replications (--reps)"
                )


@dataclass(frozen=True, slots=True)
class RateRow:
    """What was found out about one rate."""

    rate: float
    """Requests per second, of the whole deployment."""
    utilisation: float | None
    """rho: rate over saturation rate."""
    verdict: Verdict

    @property
    def status(self) -> Status:
        """Whether the rate holds."""
        return self.verdict.status

    def to_plain(self) -> dict[str, Any]:
        """As plain data for JSON."""
        verdict = self.verdict
        return {
            "rate": self.rate,
            "utilisation": self.utilisation,
            "status": verdict.status.value,
            "num_replications": verdict.num_replications,
            "num_requests": verdict.num_requests,
            "num_counted": verdict.num_counted,
            "overloaded_share": verdict.overloaded_share,
            "binding": verdict.binding.name,
            "time_shares": dict(verdict.binding.shares),
            "service_s": verdict.service_s,
            "num_preemptions": verdict.num_preemptions,
            "objectives": [each.to_plain() for each in verdict.measured],
        }


@dataclass(frozen=True, slots=True)
class Found:
    """How a search ended."""

    rate: float | None
    """Where the estimate meets the limit; None where a point would be no answer."""
    low: float
    """The highest rate shown to hold; 0 if none was."""
    high: float | None
    """The lowest rate shown to fail; None if none was."""
    rows: tuple[RateRow, ...]
    """By rate."""
    saturation_rate: float | None
    outcome: str
    """found, idle_fails, near_saturation, too_short or unresolved."""
    max_utilisation: float | None
    """Largest rho that runs of the allowed length can judge."""


class Search:
    """Looks for the largest rate that holds."""

    def __init__(
        self, simulations: Simulations, settings: Settings, tell: Callable[[RateRow], None] | None = None
    ) -> None:
        """``tell`` is told of each rate when it is judged.  Raises ValueError as ``Settings.check_percentiles``."""
        settings.check_percentiles(simulations.evaluator.objectives)
        self._simulations = simulations
        self._settings = settings
        self._tell = tell
        self._rows: dict[float, RateRow] = {}
        self._saturation = _saturation_rate(simulations, settings)
        simulations.saturation_rate = self._saturation
        self._noise = _noise_of(simulations, settings)
        self._max_rho = min(MAX_RHO, 1 - sqrt(NUM_RELAXATIONS * self._noise / (LONGEST * settings.num_requests)))
        self._max_rho = max(self._max_rho, 0.5)
        self._scale = self._saturation or _burst_rate(simulations, settings)

    @property
    def rows(self) -> tuple[RateRow, ...]:
        """What was judged so far, by rate."""
        return tuple(self._rows[rate] for rate in sorted(self._rows))

    def run(self) -> Found:
        """Search, and say how it ended."""
        top = None if self._saturation is None else self._max_rho * self._saturation
        for rate in self._candidates(top):
            if rate is None or rate in self._rows or len(self._rows) >= MAX_RATES:
                break
            if self.judge(rate).verdict.refuses_too_many is not None:
                break  # no other rate would refuse fewer
        low, high = self._low(), self._high()
        outcome = self._outcome(low, high, top)
        rate = self._point() if outcome == "found" else None
        return Found(
            rate, low, high, self.rows, self._saturation, outcome, None if self._saturation is None else self._max_rho
        )

    def _outcome(self, low: float, high: float | None, top: float | None) -> str:
        statuses = [row.status for row in self.rows]
        if high is not None and low > 0:
            return "found"
        if high is not None:
            return "idle_fails" if statuses[0] is Status.FAILS else "unresolved"
        if Status.TOO_SHORT in statuses:
            return "too_short"
        is_near = top is not None and low * (1 + min(self._settings.precision, 0.1)) >= top
        return "near_saturation" if is_near else "unresolved"

    def judge(self, rate: float) -> RateRow:
        """Simulate a rate until it is decided or the cap on replications is reached."""
        if rate in self._rows:
            return self._rows[rate]
        settings, num_requests = self._settings, self._num_requests(rate)
        most = LONGEST * settings.num_requests
        while True:
            verdict = self._verdict(rate, num_requests)
            if verdict.status is not Status.TOO_SHORT or num_requests >= most:
                break
            num_requests = min(2 * num_requests, most)
        row = RateRow(rate, self._rho(rate), verdict)
        self._rows[rate] = row
        if self._tell is not None:
            self._tell(row)
        return row

    def _verdict(self, rate: float, num_requests: int) -> Verdict:
        evaluations: list[Evaluation] = []
        settings = self._settings
        for look in settings.looks:
            evaluations += self._simulations.run(rate, range(len(evaluations), look), num_requests)
            verdict = decide(evaluations, self._simulations.evaluator.objectives, settings.confidence_of_a_look)
            if verdict.status is not Status.UNDECIDED:
                break
        if num_requests < self._cycles(rate):
            return replace(verdict, status=Status.TOO_SHORT)
        return verdict

    def _cycles(self, rate: float) -> int:
        """Requests of NUM_CYCLES cycles of the arrivals."""
        return ceil(NUM_CYCLES * self._simulations.source.cycle_s * rate)

    def _num_requests(self, rate: float) -> int:
        """As many as asked for, or as many as a queue at this utilisation needs to forget its start."""
        rho, asked = self._rho(rate), self._settings.num_requests
        asked = max(asked, min(self._cycles(rate), LONGEST * asked))
        if rho is None or rho >= 1:
            return asked
        needed = ceil(NUM_RELAXATIONS * self._noise / (1 - rho) ** 2)
        return max(asked, min(needed, LONGEST * self._settings.num_requests))

    def _rho(self, rate: float) -> float | None:
        return None if self._saturation is None else rate / self._saturation

    def _candidates(self, top: float | None) -> Iterator[float | None]:
        """The next rate to judge, until the answer is as precise as asked; each choice looks at all that is known."""
        yield 0.75 * top if top is not None else self._scale / 2
        while True:
            yield self._next(top)

    def _next(self, top: float | None) -> float | None:
        low, high = self._low(), self._high()
        short = min((rate for rate, row in self._rows.items() if row.status is Status.TOO_SHORT), default=None)
        if short is not None and low == 0.0 and short == min(self._rows):
            return self._lower(short)  # a run is the longer the lower the rate
        if high is None:
            return self._higher(low, top)
        if low == 0.0:
            return self._lower(high)
        return self._between(low, high)

    def _higher(self, low: float, top: float | None) -> float | None:
        """Nothing failed so far: up to the top, or twice as high where nobody knows the top."""
        short = [rate for rate, row in self._rows.items() if row.status is Status.TOO_SHORT]
        if short:  # at higher rates runs are shorter still
            return _middle(low, min(short), max(self._settings.precision, 0.2)) if low > 0 else None
        tried = max(self._rows)
        if top is None:
            return 2 * tried if tried < 64 * self._scale else None
        if tried >= top * (1 - 1e-9):
            undecided = [rate for rate in self._rows if rate > low]
            lowest = min(undecided, default=inf)
            return _middle(low, lowest, self._settings.precision) if isfinite(lowest) and low > 0 else None
        return top

    def _lower(self, high: float) -> float | None:
        """Nothing held so far: half as high, and if that does not hold either, an idle system."""
        idle = IDLE_RHO * self._scale
        lowest = min(self._rows)
        if lowest <= idle * (1 + 1e-9):
            return None
        return high / 2 if lowest > 0.4 * self._scale else idle

    def _between(self, low: float, high: float) -> float | None:
        """Between the ends, or on either side of what is undecided between them."""
        precision = self._settings.precision
        between = [rate for rate in sorted(self._rows) if low < rate < high]
        if not between:
            return self._expected(low, high) if high > low * (1 + precision) else None
        below, above = between[0], between[-1]
        if below - low >= high - above:
            return _middle(low, below, precision) or _middle(above, high, precision)
        return _middle(above, high, precision) or _middle(low, below, precision)

    def _expected(self, low: float, high: float) -> float:
        """Where the margin is expected to be 1, by interpolation of its logarithm, kept off the ends."""
        below, above = self._rows[low].verdict.margin, self._rows[high].verdict.margin
        if not (0 < below < 1 < above < inf):
            return (low + high) / 2
        share = -log(below) / (log(above) - log(below))
        return low + min(max(share, 0.15), 0.85) * (high - low)

    def _low(self) -> float:
        """The highest rate that holds below all that fail."""
        high = self._high()
        held = [rate for rate, row in self._rows.items() if row.status is Status.HOLDS]
        return max((rate for rate in held if high is None or rate < high), default=0.0)

    def _high(self) -> float | None:
        return min((rate for rate, row in self._rows.items() if row.status is Status.FAILS), default=None)

    def _point(self) -> float:
        """Where the estimates meet the limit, by interpolation between the rates around."""
        rows = self.rows
        broken = next((row for row in rows if row.verdict.margin > 1 or row.status is Status.FAILS), rows[-1])
        kept = [row for row in rows if row.rate < broken.rate]
        if not kept:
            return broken.rate
        below, above = kept[-1], broken
        margins = below.verdict.margin, above.verdict.margin
        if not (0 < margins[0] <= 1 < margins[1] < inf):
            return (below.rate + above.rate) / 2
        share = -log(margins[0]) / (log(margins[1]) - log(margins[0]))
        return below.rate + share * (above.rate - below.rate)


def rare_share(slo: Slo) -> float | None:
    """Share of the requests that may be beyond the percentile, not good, or failed; None for other objectives."""
    if slo.percent is not None and slo.percent < 100:
        return 1 - slo.percent / 100
    if slo.metric == "goodput":
        return 1 - slo.limit / 100
    return slo.limit / 100 if slo.metric == "failed" else None


def _middle(low: float, high: float, precision: float) -> float | None:
    return (low + high) / 2 if high > low * (1 + precision) else None


def _saturation_rate(simulations: Simulations, settings: Settings) -> float | None:
    """Requests per second at saturation, mean of a few draws, as one alone is off by what its requests are."""
    served, num_requests = simulations.evaluator.served, max(settings.num_requests, 1_000)
    rates = []
    for draw in range(NUM_DRAWS):
        rate = saturation_request_throughput(simulations.draw(1.0, draw, num_requests), served)
        if rate is None:
            return None
        rates.append(rate)
    return sum(rates) / len(rates)


def _noise_of(simulations: Simulations, settings: Settings) -> float:
    """ca² + cs² of the requests, mean of a few draws."""
    from windtunnel.capacity.evaluate import traffic_noise

    draws = [simulations.draw(1.0, each, settings.num_requests) for each in range(NUM_DRAWS)]
    return sum(map(traffic_noise, draws)) / len(draws)


def _burst_rate(simulations: Simulations, settings: Settings) -> float:
    """Requests per second when all come at once: the scale of rates where saturation cannot be told."""
    burst = simulations.draw(1e6, 0, settings.num_requests)
    from windtunnel.sim.simulate import serve

    records = serve(burst, simulations.evaluator.served)
    return len(burst) * 1e9 / max(records.end_ns, 1)
