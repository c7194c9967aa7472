"""A search for capacity as one HTML file that works offline: the answer first, then the curve and the evidence."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel import __version__
from windtunnel.capacity.binding import IDLE, LIMITS, MEANING
from windtunnel.capacity.decide import OVERLOADED, Status
from windtunnel.capacity.text import (
    basis,
    binding_lines,
    cells,
    column_heads,
    headline,
    saturation_words,
    scenario_name,
)
from windtunnel.reports.figures import Figure, Trace
from windtunnel.reports.page import (
    answer_box,
    badge,
    cell,
    cell_html,
    code,
    evidence_badge,
    figure,
    masthead,
    navigation,
    section,
    stated_box,
    table,
    write_page,
)
from windtunnel.reports.values import plain
from windtunnel.sim.cost.evidence import evidence_of_run
from windtunnel.sim.metrics.slo import Slo
from windtunnel.sim.metrics.words import count, digits, percent

if TYPE_CHECKING:
    from windtunnel.capacity.max_rate import MaxRate
    from windtunnel.capacity.search import RateRow

_TONES = {"found": "good", "near_saturation": "note", "idle_fails": "bad", "too_short": "note", "unresolved": "note"}
_STATUS_TONES = {Status.HOLDS: "good", Status.FAILS: "bad", Status.UNDECIDED: "note", Status.TOO_SHORT: "note"}
_SYMBOLS = {
    Status.HOLDS: "circle",
    Status.FAILS: "x",
    Status.UNDECIDED: "diamond-open",
    Status.TOO_SHORT: "square-open",
}
_STATUS_COLOURS = {
    Status.HOLDS: "@blue",
    Status.FAILS: "@vermillion",
    Status.UNDECIDED: "@grey",
    Status.TOO_SHORT: "@grey",
}
_STATUS_WORDS = {
    Status.HOLDS: "holds",
    Status.FAILS: "fails",
    Status.UNDECIDED: "undecided",
    Status.TOO_SHORT: "too short",
}
_LIMIT_COLOURS = {
    "max_num_seqs": "@purple",
    "max_num_batched_tokens": "@orange",
    "kv_blocks": "@vermillion",
    "queue": "@grey",
    "compute": "@blue",
    "bandwidth": "@sky",
    "idle": "@grey/25",
}
_PATTERNS = {"max_num_seqs": "/", "max_num_batched_tokens": "\\", "kv_blocks": "x", "queue": "-", "bandwidth": "."}


def write_html(path: str | Path, found: MaxRate) -> None:
    """Write the report; the same answer gives the same bytes.  Raises OSError if it cannot be written."""
    curves = [_curve(found, number, slo) for number, slo in enumerate(found.objectives)]
    shares = _shares_figure(found)
    write_page(
        path,
        _title(found),
        _body(found, curves, shares),
        skip_to="curve",
        head=masthead(_title(found), _what(found)),
        foot=f"Searched with windtunnel {__version__}.",
        drawn=[*curves, shares],
    )


def _body(found: MaxRate, curves: Sequence[Figure], shares: Figure) -> Iterator[str]:
    sentences = [f"{found.reason}.", *saturation_words(found)]
    yield from answer_box(f"{headline(found)}.", sentences, _TONES[found.outcome])
    yield from _risk(found)
    yield from navigation(
        [("curve", "Objectives over the rate"), ("binds", "What binds"), ("rates", "All rates"), ("how", "How")]
    )
    yield section("curve", "Objectives over the rate")
    yield "".join(map(figure, curves))
    yield "</section>"
    yield section("binds", "What binds")
    yield f'<p class="lead">{escape(" ".join(line.strip() for line in binding_lines(found)))}</p>'
    yield figure(shares)
    yield from table(("Limit", "Meaning"), [[code(name), cell(MEANING[name], "words")] for name in LIMITS])
    yield "</section>"
    yield from _rates(found)
    yield from _how(found)


def _title(found: MaxRate) -> str:
    name = scenario_name(found)
    return f"Capacity of {name}" if name else "Capacity"


def _what(found: MaxRate) -> str:
    if not found.described:
        return "largest rate within the objectives"
    hardware, meta = found.described["hardware"], found.described["metadata"]
    cards = f"{hardware['num_gpus']} x {hardware['gpu']}" if hardware["gpu"] else ""
    facts = [hardware["model"], cards, found.described["engine"], f"cost model {meta['cost_model']}"]
    mark = evidence_badge(evidence_of_run(found.described))
    return f"{' · '.join(escape(str(fact)) for fact in facts if fact)} {mark}"


def _risk(found: MaxRate) -> Iterator[str]:
    """What the interval does not hold, where a reader sees it at once."""
    lines = [*basis(found), *found.notes]
    yield from stated_box(lines[1:], evidence_of_run(found.described))


def _rates(found: MaxRate) -> Iterator[str]:
    yield section("rates", "All rates")
    heads = column_heads(found)
    rows = []
    for row in found.rows:
        made = [cell(text, "number") for text in cells(row)]
        made[2] = cell_html(badge(_STATUS_TONES[row.status], _STATUS_WORDS[row.status]))
        rows.append(made)
    yield from table(heads, rows)
    yield "</section>"


def _how(found: MaxRate) -> Iterator[str]:
    settings = found.settings
    yield section("how", "How")
    yield f"<p>{escape(basis(found)[0])}</p>"
    facts = [
        ("Objectives", " ".join(slo.text for slo in found.objectives)),
        ("Goodput limits", str(found.goodput) if found.goodput else "–"),
        ("Seed", str(found.seed)),
        ("Requests of a simulation", f"{settings.num_requests:,} (more where the load needs it)"),
        ("Most replications of a rate", str(settings.max_replications)),
        ("Confidence, one-sided", percent(settings.confidence)),
        ("Precision aimed at", percent(settings.precision)),
    ]
    yield from table(("Setting", "Value"), [[cell(name), cell(value, "words")] for name, value in facts])
    yield f"<h3>Command line</h3><pre>{escape(_command(found))}</pre>"
    yield from _settings(found.described)
    yield "</section>"


def _command(found: MaxRate) -> str:
    """The command line that gives this answer again, from the folder that it was given in."""
    entries = found.described.get("settings", ())
    own = ("seed", "objectives", "goodput")
    given = [entry for entry in entries if entry["source"] == f"{entry['key']}=" and entry["key"] not in own]
    named = found.asked_of or (found.described["scenario"]["name"] if found.described else "SCENARIO")
    parts = ["windtunnel capacity", *([] if named == "from flags" else [shlex.quote(str(named))])]
    parts += ["--set " + shlex.quote(f"{entry['key']}={_toml(entry['value'])}") for entry in given]
    parts += [f"--slo '{slo.text}'" for slo in found.objectives]
    if found.goodput:
        parts += [f"--goodput {limit}" for limit in str(found.goodput).split()]
    settings = found.settings
    parts += [
        f"--seed {found.seed}",
        f"--num-requests {settings.num_requests}",
        f"--reps {settings.max_replications}",
        f"--confidence {settings.confidence:g}",
        f"--precision {settings.precision:g}",
    ]
    return " ".join(parts)


def _toml(value: Any) -> str:
    """A value as ``--set`` reads it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_quoted(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_quoted, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else _toml(value)


def _settings(described: Mapping[str, Any]) -> Iterator[str]:
    entries: Sequence[Mapping[str, Any]] = described.get("settings", ())
    if not entries:
        return
    yield "<details><summary>All settings of the deployment</summary>"
    rows = [[code(entry["key"]), code(plain(entry["value"])), cell(str(entry["source"]))] for entry in entries]
    yield from table(("Setting", "Value", "Source"), rows)
    yield "</details>"


# --- figures


def _curve(found: MaxRate, number: int, slo: Slo) -> Figure:
    """The objective's estimate with its bounds at each rate, its limit, and the interval of the answer."""
    scale, unit = (1000.0, "s") if slo.unit == "ms" and slo.limit >= 2000 else (1.0, slo.unit)
    rows = [row for row in found.rows if _is_drawn(row.verdict.measured[number].estimate)]
    seen = [row.verdict.measured[number] for row in rows]
    statuses = [_status_of(row, number) for row in rows]
    xs = [row.rate for row in rows]
    ys = [(each.estimate or 0.0) / scale for each in seen]
    top = max([slo.limit / scale, *ys])
    highs = [min(each.high / scale, 3 * top) - y for each, y in zip(seen, ys, strict=True)]
    lows = [y - max(each.low / scale, 0.0) for each, y in zip(seen, ys, strict=True)]
    line: Trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": xs,
        "y": [round(y, 4) for y in ys],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [round(high, 4) for high in highs],
            "arrayminus": [round(low, 4) for low in lows],
            "color": "@grey",
            "thickness": 1.2,
        },
        "line": {"color": "@grey", "width": 1.2},
        "marker": {
            "size": 10,
            "symbol": [_SYMBOLS[status] for status in statuses],
            "color": [_STATUS_COLOURS[status] for status in statuses],
        },
        "customdata": [
            f"{_STATUS_WORDS[status]}, {row.verdict.num_replications} runs"
            for status, row in zip(statuses, rows, strict=True)
        ],
        "hovertemplate": f"%{{x:,.4g}} requests/s<br>%{{y:,.4g}} {unit}<br>%{{customdata}}<extra></extra>",
        "showlegend": False,
    }
    shown = [y + high for y, high, each in zip(ys, highs, seen, strict=True) if isfinite(each.high)]
    y_max = min(max([1.15 * top, *shown]), 2 * top)
    layout: dict[str, Any] = {
        "xaxis": {"title": "requests per second", "rangemode": "tozero"},
        "yaxis": {"title": f"{_measured_name(slo)} ({unit})", "range": [0, y_max]},
        "shapes": [_across(slo.limit / scale), *_interval_shapes(found)],
        "annotations": [_limit_word(slo), *_interval_words(found)],
    }
    caption = (
        "Filled circles keep this objective, crosses break it or are overloaded, open marks are undecided or too "
        "short; bars are the bounds that decide. "
        "The dashed line is the limit, the band lies between the highest rate that holds and the lowest that fails."
    )
    return Figure(f"curve-{number}", f"{slo.text} over the rate", caption, [line], layout)


def _status_of(row: RateRow, number: int) -> Status:
    """Whether one objective holds at that rate, be it that another one fails."""
    verdict = row.verdict
    is_told_by_all = row.status is Status.TOO_SHORT or verdict.overloaded_share >= OVERLOADED
    return row.status if is_told_by_all else verdict.measured[number].status


def _is_drawn(value: float | None) -> bool:
    return value is not None and isfinite(value)


def _measured_name(slo: Slo) -> str:
    return slo.metric if slo.statistic is None else f"{slo.metric} {slo.statistic}"


def _across(y: float) -> dict[str, Any]:
    line = {"color": "@text", "width": 1.5, "dash": "dash"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def _interval_shapes(found: MaxRate) -> list[dict[str, Any]]:
    shapes: list[dict[str, Any]] = []
    if found.low and found.high is not None:
        band = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": found.low, "x1": found.high}
        shapes.append({**band, "fillcolor": "@blue/15", "line": {"width": 0}})
    for x, dash in ((found.rate, "solid"), (found.saturation_rate, "dot")):
        if x is not None and (dash == "solid" or found.outcome == "near_saturation"):
            line = {"color": "@blue" if dash == "solid" else "@grey", "width": 1.5, "dash": dash}
            shapes.append({"type": "line", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": line})
    return shapes


def _limit_word(slo: Slo) -> dict[str, Any]:
    scale = 1000.0 if slo.unit == "ms" and slo.limit >= 2000 else 1.0
    return {
        "xref": "paper",
        "x": 0.01,
        "y": slo.limit / scale,
        "text": "limit",
        "showarrow": False,
        "xanchor": "left",
        "yanchor": "bottom",
        "font": {"color": "@text", "size": 12},
    }


def _interval_words(found: MaxRate) -> list[dict[str, Any]]:
    words = [(found.rate, f"{digits(found.rate)}/s", "@blue")] if found.rate is not None else []
    if found.outcome == "near_saturation" and found.saturation_rate is not None:
        words.append((found.saturation_rate, "saturation", "@grey"))
    return [
        {
            "x": x,
            "yref": "paper",
            "y": 1,
            "text": text,
            "showarrow": False,
            "xanchor": "right",
            "xshift": -4,
            "yanchor": "top",
            "font": {"color": colour, "size": 12},
        }
        for x, text, colour in words
    ]


def _shares_figure(found: MaxRate) -> Figure:
    """How the time divides among the limits, at each rate."""
    names = [count(row.rate) for row in found.rows]
    data: list[Trace] = [
        {
            "type": "bar",
            "name": name,
            "x": names,
            "y": [round(100 * row.verdict.binding.shares[name], 2) for row in found.rows],
            "marker": {"color": _LIMIT_COLOURS[name], "pattern": {"shape": _PATTERNS.get(name, "")}},
            "hovertemplate": f"{name}: %{{y:.1f}} % at %{{x}}/s<extra></extra>",
        }
        for name in (*LIMITS[:-1], IDLE)
        if any(row.verdict.binding.shares[name] >= 0.005 for row in found.rows)
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": "requests per second", "type": "category"},
        "yaxis": {"title": "share of the time (%)", "range": [0, 100]},
    }
    caption = "Each bar is the counted time of all runs at a rate, by the limit that held the deployment back then."
    return Figure("shares", "What holds the deployment back", caption, data, layout)
