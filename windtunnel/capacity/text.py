"""A search for capacity as text and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from windtunnel.capacity.binding import IDLE, LIMITS, MEANING
from windtunnel.capacity.decide import Measured
from windtunnel.capacity.max_rate import in_unit
from windtunnel.capacity.search import RateRow
from windtunnel.sim.cost import statement
from windtunnel.sim.metrics.words import count, digits, percent

if TYPE_CHECKING:
    from windtunnel.capacity.max_rate import MaxRate

_STATUS = {"holds": "holds", "fails": "fails", "undecided": "undecided", "too_short": "too short"}


def render_text(found: MaxRate) -> str:
    """The answer in a few lines, the table of rates, and what it rests on."""
    parts = [
        *_answer_lines(found),
        "",
        *_aligned([column_heads(found), *(cells(row) for row in found.rows)]),
        "",
        *binding_lines(found),
        "",
        *basis(found),
        *found.notes,
    ]
    return "\n".join(parts)


def render_markdown(found: MaxRate) -> str:
    """The same as Markdown, ending in a newline."""
    head, rows = column_heads(found), [cells(row) for row in found.rows]
    table = ["| " + " | ".join(cells) + " |" for cells in (head, ["---:"] * len(head), *rows)]
    title = scenario_name(found)
    answer, *rest = _answer_lines(found)
    parts = [
        [f"### Capacity{f' of {title}' if title else ''}"],
        [f"**{answer}**"],
        [" ".join(line.strip() for line in rest)],
        table,
        [f"- {line.strip()}" for line in binding_lines(found)],
        [f"- {line}" for line in (*basis(found), *found.notes)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if any(part)) + "\n"


def row_words(row: RateRow) -> str:
    """One rate in a line, for whoever waits."""
    verdict = row.verdict
    rho = "" if row.utilisation is None else f" (rho {row.utilisation:.2f})"
    measured = ", ".join(f"{each.slo.text} at {in_unit(each.estimate, each.slo.unit)}" for each in verdict.measured)
    return (
        f"{count(row.rate)} requests/s{rho}: {_STATUS[verdict.status.value]}, {measured}; "
        f"{verdict.num_replications} x {verdict.num_requests:,} requests"
    )


def headline(found: MaxRate) -> str:
    """The answer in one sentence."""
    asked = " and ".join(each.text for each in found.objectives)
    if found.rate is not None:
        return f"About {digits(found.rate)} requests/s within {asked}"
    if found.outcome == "near_saturation":
        return f"At least {digits(found.low)} requests/s within {asked}, close to saturation"
    if found.outcome == "idle_fails":
        return f"No rate is within {asked}"
    if found.low:
        return f"At least {digits(found.low)} requests/s within {asked}"
    return f"No answer for {asked}"


def _answer_lines(found: MaxRate) -> Iterator[str]:
    yield headline(found)
    yield f"  {found.reason}."
    yield from (f"  {line}" for line in saturation_words(found))


def saturation_words(found: MaxRate) -> list[str]:
    """How close to saturation the answer is."""
    facts = []
    if found.saturation_rate is not None:
        facts.append(f"saturation at about {count(found.saturation_rate)} requests/s")
    if found.utilisation is not None:
        where = "there" if found.rate is not None else "at the rate that holds"
        facts.append(f"utilisation (rho) {where} {found.utilisation:.2f}")
    return [f"{'; '.join(facts).capitalize()}."] if facts else []


def column_heads(found: MaxRate) -> list[str]:
    """Names of the columns of the table of rates."""
    objectives = [column for each in found.objectives for column in (each.text, "bounds")]
    return ["requests/s", "rho", "verdict", *objectives, "overloaded", "binds", "runs"]


def cells(row: RateRow) -> list[str]:
    """One rate as a row of that table."""
    verdict = row.verdict
    measured = [cell for each in verdict.measured for cell in (in_unit(each.estimate, each.slo.unit), _bounds(each))]
    return [
        count(row.rate),
        "–" if row.utilisation is None else f"{row.utilisation:.2f}",
        _STATUS[verdict.status.value],
        *measured,
        percent(verdict.overloaded_share),
        verdict.binding.name,
        f"{verdict.num_replications} x {verdict.num_requests:,}",
    ]


def _bounds(measured: Measured) -> str:
    if measured.estimate is None:
        return ""
    low = in_unit(measured.low, measured.slo.unit) if isfinite(measured.low) else "?"
    high = in_unit(measured.high, measured.slo.unit) if isfinite(measured.high) else "?"
    return f"{low} … {high}"


def binding_lines(found: MaxRate) -> list[str]:
    """What binds at the limit, and how the time divides there."""
    row = found.row_at_the_limit
    shares = row.verdict.binding.shares
    parts = [f"{name} {percent(shares[name])}" for name in (*LIMITS[:-1], IDLE) if shares[name] >= 0.005]
    return [
        f"Binds: {found.binding} ({MEANING[found.binding]}).",
        f"  Time at {count(row.rate)} requests/s: {', '.join(parts)}.",
    ]


def basis(found: MaxRate) -> list[str]:
    """What the answer rests on, and what its interval does not hold."""
    settings = found.settings
    return [
        f"{found.num_simulations:,} simulations of {found.num_simulated_requests:,} requests in all; bounds are "
        f"one-sided at {100 * settings.confidence:g} % confidence over all looks, from independent replications with "
        f"the same random numbers at every rate; seed {found.seed}.",
        *_cost_lines(found),
    ]


def _cost_lines(found: MaxRate) -> Iterator[str]:
    """What the step times are, and how far off: no interval of chance holds that."""
    if not found.described:
        return
    meta = found.described["metadata"]
    said = statement.sentences(found.described["cost"], None, has_noise=bool(meta.get("step_time_noise")))
    if not said:
        name = meta["cost_model"]
        said = (f"Step times are those of the cost model {name}, uncalibrated: their error is not known.",)
    yield f"The interval is that of chance alone, not of the step times. {' '.join(said)}"
    known = [each for each in found.other_steps if each.rate is not None]
    if known:
        parts = [f"{_times(each.factor)} about {digits(each.rate or 0.0)} requests/s" for each in known]
        yield f"Were all steps off by that error, the answer would be: {'; '.join(parts)}."


def _times(factor: float) -> str:
    return f"{abs(100 * (factor - 1)):.1f} % {'longer' if factor > 1 else 'shorter'}"


def scenario_name(found: MaxRate) -> str:
    """What the deployment is called: the scenario, or what runs on what; empty if nobody said."""
    if not found.described:
        return ""
    name, hardware = found.described["scenario"]["name"], found.described["hardware"]
    if name and name != "from flags":
        return str(name)
    return " on ".join(str(part) for part in (hardware["model"], hardware["gpu"]) if part)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
