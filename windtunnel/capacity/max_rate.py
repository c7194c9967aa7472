"""``max_rate``: the largest rate of requests at which one deployment keeps its objectives, with an interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.capacity.binding import MEANING
from windtunnel.capacity.decide import Status, room_percent
from windtunnel.capacity.evaluate import Evaluator
from windtunnel.capacity.runs import Simulations
from windtunnel.capacity.sampling import source_of
from windtunnel.capacity.search import Found, RateRow, Search, Settings
from windtunnel.capacity.step_error import OtherSteps, other_steps
from windtunnel.sim.metrics.slo import GoodputLimits, Slo, parse_slos
from windtunnel.sim.metrics.words import count, digits, milliseconds, percent

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Override
    from windtunnel.scenarios.resolve import Resolved
    from windtunnel.scenarios.schema import Scenario
    from windtunnel.workers import Workers


@dataclass(frozen=True, slots=True)
class MaxRate:
    """The largest rate that keeps the objectives: an interval, a point within it if there is one, and the evidence."""

    rate: float | None
    """Requests per second at which the estimate meets the limit; None where a point would be no answer."""
    low: float
    """The highest rate shown to hold; 0 if none was."""
    high: float | None
    """The lowest rate shown to fail; None if none was."""
    utilisation: float | None
    """rho of ``rate``, or of ``low`` where there is no point."""
    saturation_rate: float | None
    """Requests per second at which the deployment saturates, known within about 3 %."""
    binding: str
    """What limits it at that rate, one of ``capacity.binding.LIMITS``."""
    limiting: Slo | None
    """The objective that breaks first."""
    reason: str
    """Why there is a point or none, in a sentence for people."""
    outcome: str
    """found, near_saturation, idle_fails, too_short or unresolved."""
    rows: tuple[RateRow, ...]
    """What was found out about each rate, by rate."""
    objectives: tuple[Slo, ...]
    goodput: GoodputLimits | None
    settings: Settings
    seed: int
    num_simulations: int
    num_simulated_requests: int
    """In all simulations together."""
    notes: tuple[str, ...]
    described: Mapping[str, Any]
    """What was simulated, as ``Resolved.describe`` says it; empty for a search without a scenario."""
    asked_of: str = ""
    """The scenario as it was given, a file or the name of a bundled one; empty if it was given as an object."""

    @property
    def row_at_the_limit(self) -> RateRow:
        """The lowest rate that fails, which shows what gives way; the highest that was judged where none fails."""
        return _row_at_the_limit(self.rows)

    @property
    def other_steps(self) -> tuple[OtherSteps, ...]:
        """The answer if all steps took longer or shorter by the error that the cost model states."""
        if self.outcome != "found" or not self.described:
            return ()
        return other_steps(self.described["cost"], self.rows, self.objectives)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data for JSON."""
        settings = self.settings
        return {
            "max_rate": self.rate,
            "holds_up_to": self.low,
            "fails_from": self.high,
            "utilisation": self.utilisation,
            "saturation_request_throughput": self.saturation_rate,
            "binding": self.binding,
            "binding_meaning": MEANING[self.binding],
            "limiting_objective": self.limiting.text if self.limiting else None,
            "outcome": self.outcome,
            "reason": self.reason,
            "confidence": settings.confidence,
            "precision": settings.precision,
            "num_requests": settings.num_requests,
            "max_replications": settings.max_replications,
            "objectives": [each.text for each in self.objectives],
            "goodput": str(self.goodput) if self.goodput else None,
            "seed": self.seed,
            "num_simulations": self.num_simulations,
            "num_simulated_requests": self.num_simulated_requests,
            "notes": list(self.notes),
            "if_step_times_were": [each._asdict() for each in self.other_steps],
            "rates": [row.to_plain() for row in self.rows],
            "scenario": dict(self.described),
        }

    def text(self) -> str:
        """The answer and the table of rates, for a terminal."""
        from windtunnel.capacity.text import render_text

        return render_text(self)

    def markdown(self) -> str:
        """The same as Markdown, for issues and pull requests."""
        from windtunnel.capacity.text import render_markdown

        return render_markdown(self)

    def report(self, path: str | Path) -> None:
        """Write one HTML file with the answer, the curve and the evidence; it needs nothing else and works offline.

        Folders that are missing are made.  Raises OutputError if it cannot be written.
        """
        from windtunnel.capacity.html import write_html
        from windtunnel.rundir import writing

        with writing(Path(path)):
            write_html(path, self)

    def __repr__(self) -> str:
        point = "no point" if self.rate is None else f"{digits(self.rate)}/s"
        return f"<MaxRate {point}, holds up to {digits(self.low)}/s: {self.outcome}>"


def max_rate(
    scenario: str | Path | Mapping[str, Any] | Scenario | Resolved | None = None,
    *,
    objectives: str | Iterable[str | Slo] | None = None,
    goodput: str | GoodputLimits | None = None,
    seed: int | None = None,
    confidence: float = 0.95,
    replications: int = 32,
    num_requests: int = 1_000,
    precision: float = 0.03,
    workers: Workers | None = None,
    tell: Callable[[RateRow], None] | None = None,
    **overrides: Any,
) -> MaxRate:
    """The largest rate of requests at which a deployment keeps its objectives.

    ``scenario`` and ``overrides`` are as ``simulate`` takes them, or a resolved scenario; its own rate is only what the
    search varies.  ``objectives`` (``"ttft:p99<500ms tpot:p95<50ms"``) and ``goodput`` limits take the place of the
    scenario's.  ``confidence`` is that of *holds* and of *fails*, one-sided; ``replications`` the most simulations, of
    ``num_requests`` requests or more each, that one rate gets; ``precision`` the relative distance between the two ends
    of the answer that is aimed at.  ``tell(row)`` is called when a rate is judged.  The same arguments and seed give
    the same answer, however many workers share the work.

    Raises ValueError for objectives or settings that cannot be answered, and as ``resolve`` does.

    >>> wt.max_rate("chat-8b-h100", objectives="ttft:p99<500ms")  # doctest: +SKIP
    """
    resolved = load_deployment(scenario, overrides, seed)
    slos = resolved.slo if objectives is None else _slos(objectives)
    limits = _limits(goodput, resolved)
    settings = Settings(confidence, replications, num_requests, precision)
    source = source_of(resolved)
    chosen_seed = resolved.seed if seed is None else seed
    simulations = Simulations(Evaluator(resolved.served, slos, limits), source, chosen_seed, workers)
    found = Search(simulations, settings, tell).run()
    return answer(
        found,
        simulations,
        settings,
        notes=(*source.notes, *resolved.warnings),
        described=resolved.describe(),
        asked_of=str(scenario) if isinstance(scenario, str | Path) else "",
    )


def answer(
    found: Found,
    simulations: Simulations,
    settings: Settings,
    *,
    notes: tuple[str, ...] = (),
    described: Mapping[str, Any] | None = None,
    asked_of: str = "",
) -> MaxRate:
    """What a finished search says, in words and numbers."""
    at = found.rate if found.rate is not None else found.low
    row = _row_at_the_limit(found.rows)
    utilisation = at / found.saturation_rate if found.saturation_rate and at else None
    return MaxRate(
        rate=found.rate,
        low=found.low,
        high=found.high,
        utilisation=utilisation,
        saturation_rate=found.saturation_rate,
        binding=row.verdict.binding.name,
        limiting=row.verdict.worst.slo if found.high is not None else None,
        reason=_reason(found, settings, row),
        outcome=found.outcome,
        rows=found.rows,
        objectives=simulations.evaluator.objectives,
        goodput=simulations.evaluator.goodput,
        settings=settings,
        seed=simulations.seed,
        num_simulations=simulations.num_run,
        num_simulated_requests=simulations.num_simulated,
        notes=notes,
        described=described or {},
        asked_of=asked_of,
    )


def _row_at_the_limit(rows: Sequence[RateRow]) -> RateRow:
    judged = [row for row in rows if row.status is not Status.TOO_SHORT] or rows
    return next((row for row in judged if row.status is Status.FAILS), judged[-1])


def _reason(found: Found, settings: Settings, row: RateRow) -> str:
    sure = f"{100 * settings.confidence:g} % confidence"
    match found.outcome:
        case "found":
            assert found.high is not None
            return (
                f"{count(found.low)} requests/s hold and {count(found.high)} fail, each with {sure}, so plan with no "
                f"more than {count(found.low)}; what fails there: {_what_fails(row)} "
                f"({MEANING[row.verdict.binding.name]}){_how_to_narrow(found, settings)}"
            )
        case "near_saturation":
            assert found.saturation_rate is not None
            assert found.max_utilisation is not None
            return (
                f"the objectives still hold at {count(found.low)}/s and the system saturates at about "
                f"{count(found.saturation_rate)}/s: beyond a utilisation of {found.max_utilisation:.2f} every latency "
                "depends on how long the load lasts, so no point is given there.  Plan with the rate that holds, or "
                "give more requests per run (--num-requests) to come closer"
            )
        case "idle_fails":
            row = found.rows[0]
            refusing = row.verdict.refuses_too_many
            if refusing is not None:
                return (
                    f"{percent(row.verdict.unservable_share)} of the prompts do not fit max_model_len and are refused, "
                    f"whatever the rate, and {refusing.text} leaves room for {room_percent(refusing):g} %: raise "
                    "max_model_len, or leave those requests out"
                )
            return f"no load is low enough: even a system that is nearly idle misses {_what_fails(found.rows[0])}"
        case "too_short":
            service_s = max(each.verdict.service_s for each in found.rows)
            longest = max(each.verdict.num_requests for each in found.rows)
            return (
                f"{_what_holds(found)}runs of {longest:,} requests are too short: requests take up to "
                f"{digits(service_s)} s and the system was still filling up; give more (--num-requests)"
            )
    undecided = [each for each in found.rows if each.status is Status.UNDECIDED]
    if found.low and undecided:
        rates = [count(each.rate) for each in (undecided[0], undecided[-1])]
        where = f"at {rates[0]}/s" if len(undecided) == 1 else f"from {rates[0]} to {rates[1]}/s"
        return (
            f"{count(found.low)} requests/s hold with {sure}; {where} chance decides: give more replications "
            "(--reps) or longer runs (--num-requests)"
        )
    return (
        f"{_what_holds(found)}the bounds stay on both sides of the limit: give more replications (--reps), or an "
        "objective that is not met by chance"
    )


def _what_holds(found: Found) -> str:
    return f"{count(found.low)} requests/s hold, but above that " if found.low else ""


def _how_to_narrow(found: Found, settings: Settings) -> str:
    """What helps where chance is larger than the precision that was aimed at."""
    assert found.high is not None
    if found.high <= found.low * (1 + 3 * settings.precision):
        return ""
    return "; more replications (--reps) or longer runs (--num-requests) bring the two closer together"


def _what_fails(row: RateRow) -> str:
    if row.verdict.overloaded_share >= 0.5:
        return "the queue grows without bound"
    worst = row.verdict.worst
    return f"{worst.slo.text} at {in_unit(worst.estimate, worst.slo.unit)}"


def in_unit(value: float | None, unit: str) -> str:
    """A measured value with its unit, for people."""
    if value is None:
        return "nothing measured"
    if unit == "ms":
        return "no answer" if value == float("inf") else milliseconds(value)
    return f"{digits(value)} {unit}".rstrip()


def load_deployment(
    scenario: str | Path | Mapping[str, Any] | Scenario | Resolved | None,
    overrides: Mapping[str, Any],
    seed: int | None,
) -> Resolved:
    """The resolved scenario, with the overrides in place of what it says; a search varies its rate.

    An override is a value, or an ``Override`` that says where it was given.
    Raises ValueError for overrides of a scenario that is resolved already, and as ``resolve`` does.
    """
    from windtunnel.scenarios.load import load_scenario
    from windtunnel.scenarios.resolve import Resolved, resolve

    if isinstance(scenario, Resolved):
        if overrides:
            raise ValueError(f"a resolved scenario takes no more settings, got {', '.join(overrides)}")
        return scenario
    given = {"seed": seed, **overrides}
    loaded = load_scenario(
        scenario, {key: _as_override(key, value) for key, value in given.items() if value is not None}
    )
    return resolve(loaded)


def _as_override(key: str, value: Any) -> Override:
    from windtunnel.scenarios.load import Override

    return value if isinstance(value, Override) else Override(value, f"{key}=")


def _slos(objectives: str | Iterable[str | Slo]) -> tuple[Slo, ...]:
    if isinstance(objectives, str):
        return parse_slos(objectives)
    found: list[Slo] = []
    for each in objectives:
        found += [each] if isinstance(each, Slo) else parse_slos(each)
    return tuple(found)


def _limits(goodput: str | GoodputLimits | None, resolved: Resolved) -> GoodputLimits | None:
    if goodput is None:
        return resolved.goodput
    return GoodputLimits.parse(goodput) if isinstance(goodput, str) else goodput
