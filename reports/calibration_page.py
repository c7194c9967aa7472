"""The page that says how near calibrated step times come to measured ones; all of it from plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.reports import page
from windtunnel.reports.figures import Figure, Trace
from windtunnel.reports.published_page import write_published
from windtunnel.reports.words import plural

MISSING = "missing"
"""Key of a part that says why it is not there."""
REGIMES = ("decode", "prefill", "mixed")
_COLOURS = {"decode": "@blue", "prefill": "@orange", "mixed": "@green"}
_SYMBOLS = {"decode": "circle", "prefill": "diamond", "mixed": "cross"}
_RUN_COLOURS = ("@blue", "@orange", "@purple", "@green")
_RUN_SYMBOLS = ("circle", "diamond", "square", "cross")
_ERROR_HEADS = ("Steps of", "Regime", "Steps", "Shapes", "Median", "90 %", "99 %", "Bias", "In 90 % interval")
_NUM_SHOWN = 12

Plain = Mapping[str, Any]


def write_calibration_page(path: str | Path, content: Plain, *, version: str) -> None:
    """Write the page of what ``benchmarks.calibration_page`` gathers; the same content gives the same bytes.

    Raises OSError if it cannot be written.
    """
    live = _present(content["live"])
    drawn = [*_step_figures(_groups(content)), *(_live_figures(live) if live else [])]
    write_published(
        path,
        "Predicted beside measured step times",
        _body(content, {figure.name: figure for figure in drawn}),
        subject="calibration",
        version=version,
        skip_to="steps",
        drawn=drawn,
    )


def _body(content: Plain, drawn: Mapping[str, Figure]) -> Iterator[str]:
    live = _present(content["live"])
    yield from page.answer_box(_headline(live, _present(content["b300"])), _sentences(content), _tone(live))
    yield from page.navigation(
        [
            ("steps", "Steps"),
            ("live", "Live runs"),
            ("b300", "B300"),
            ("kernels", "Composed from kernels"),
            ("cpu", "CPU, end to end"),
            ("bundled", "Bundled profiles"),
        ]
    )
    yield from _steps_section(_groups(content), drawn)
    yield from _live_section(content["live"], drawn)
    yield from _b300_section(content["b300"])
    yield from _kernels_section(content["kernels"])
    yield from _cpu_section(content["cpu"])
    yield from _bundled_section(content["bundled"])


# --- the answer


def _present(part: Any) -> Any:
    """The part, or None if it says that it is missing."""
    return None if isinstance(part, Mapping) and MISSING in part else part


def _groups(content: Plain) -> list[Plain]:
    b300, live = _present(content["b300"]), _present(content["live"])
    return [*(b300 or []), *(live["groups"] if live else [])]


def _headline(live: Plain | None, b300: Sequence[Plain] | None) -> str:
    if live is None:
        return "Live runs were not at hand." if b300 is None else "Step times of shapes that were left out."
    judged = [line for line in live["paced"]["lines"] if line["limit_percent"] is not None]
    broken = sum(line["is_broken"] for line in judged)
    runs = len(live["paced"]["study"]["predicted"])
    if broken:
        return f"{broken} of {len(judged)} figures of {runs} live runs are outside of their limits."
    return f"All {len(judged)} figures of {runs} live runs are within their limits."


def _tone(live: Plain | None) -> str:
    if live is None:
        return "note"
    return "bad" if any(line["is_broken"] for line in live["paced"]["lines"]) else "good"


def _sentences(content: Plain) -> Iterator[str]:
    live, b300 = _present(content["live"]), _present(content["b300"])
    if live:
        judged = [line for line in live["paced"]["lines"] if line["limit_percent"] is not None]
        worst = max(judged, key=lambda line: abs(line["error_percent"]) / line["limit_percent"])
        steps = sum(each["num_steps"] for each in live["paced"]["decisions"] + live["bare"]["decisions"])
        different = [
            each for each in live["paced"]["decisions"] + live["bare"]["decisions"] if each["first_difference"]
        ]
        yield (
            "A real vLLM server was recorded; step times were learned from three of its runs, and three others "
            f"predicted. Nearest to its limit is {worst['figure']} of {worst['run']}: {worst['error_percent']:+.1f} % "
            f"of {worst['limit_percent']:.0f} %."
        )
        yield (
            f"With recorded times fed back, our scheduler takes the decisions of vLLM in all {steps:,} steps."
            if not different
            else f"With recorded times fed back, {plural(len(different), 'run')} differ from vLLM's decisions."
        )
    if b300:
        told = ", ".join(
            f"{_middle(each, 'median_percent'):.1f} % at TP {each['tensor_parallel_size']}" for each in b300
        )
        yield f"Real steps on B300 whose shapes were left out are missed by {told} in the median."


def _middle(size: Plain, key: str) -> float:
    return float(np.median([each[key] for each in size["divisions"]]))


# --- steps


def _step_figures(groups: Sequence[Plain]) -> list[Figure]:
    return [_scatter(groups), _boxes(groups)] if groups else []


def _scatter(groups: Sequence[Plain]) -> Figure:
    data: list[Trace] = []
    for regime in REGIMES:
        xs, ys, names = [], [], []
        for group in groups:
            points = group["points"]
            for x, y, own in zip(points["measured_ms"], points["predicted_ms"], points["regime"], strict=True):
                if own == regime:
                    xs.append(x)
                    ys.append(y)
                    names.append(group["name"])
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": regime,
                "x": xs,
                "y": ys,
                "text": names,
                "marker": {"color": f"{_COLOURS[regime]}/60", "symbol": _SYMBOLS[regime], "size": 6},
                "hovertemplate": "%{text}<br>measured %{x:.3~g} ms, predicted %{y:.3~g} ms<extra>"
                + regime
                + "</extra>",
            }
        )
    measured = [x for group in groups for x in group["points"]["measured_ms"]]
    ends = [0.8 * min(measured), 1.25 * max(measured)]
    line = {"color": "@grey", "width": 1, "dash": "dot"}
    data.append(
        {"type": "scatter", "mode": "lines", "name": "equal", "x": ends, "y": ends, "line": line, "hoverinfo": "skip"}
    )
    shown, steps = sum(len(group["points"]["regime"]) for group in groups), sum(group["num_steps"] for group in groups)
    caption = (
        f"Each point is a step that the profile had not seen, n = {shown:,} of {steps:,} steps (thinned out evenly "
        "over the measured times). On B300 its shape was left out of the fit; of the live runs the whole run was. Both "
        "axes are logarithmic; on the dotted line both are equal."
    )
    axis = {"type": "log", "dtick": 1}
    layout = {"xaxis": {**axis, "title": "measured (ms)"}, "yaxis": {**axis, "title": "predicted (ms)"}}
    return Figure("scatter", "Predicted and measured time of single steps", caption, data, layout, tall=True)


def _boxes(groups: Sequence[Plain]) -> Figure:
    data: list[Trace] = []
    for regime in REGIMES:
        own = [group for group in groups if regime in group["residuals"]]
        spans = [group["residuals"][regime]["percentiles_5_25_50_75_95"] for group in own]
        low, q1, median, q3, high = (list(column) for column in zip(*spans, strict=True)) if own else ([],) * 5
        data.append(
            {
                "type": "box",
                "orientation": "h",
                "name": regime,
                "y": [_short(group["name"]) for group in own],
                "lowerfence": low,
                "q1": q1,
                "median": median,
                "q3": q3,
                "upperfence": high,
                "line": {"color": _COLOURS[regime], "width": 1.5},
                "fillcolor": f"{_COLOURS[regime]}/30",
                "hoverinfo": "x",
            }
        )
    counts = ", ".join(
        f"{regime} {sum(group['residuals'].get(regime, {}).get('num_steps', 0) for group in groups):,}"
        for regime in REGIMES
    )
    caption = (
        "How far predicted steps are off, in percent of the measured time: the box holds half of them, the line in it "
        f"is the median, the whiskers hold nine of ten. n = {counts} steps."
    )
    layout = {
        "boxmode": "group",
        "xaxis": {"title": "predicted / measured - 1 (%)", "zeroline": True, "zerolinecolor": "@grey"},
        "yaxis": {"autorange": "reversed"},
    }
    return Figure("residuals", "Residuals by regime", caption, data, layout, tall=True)


def _short(name: str) -> str:
    return name.removeprefix("vLLM on CPU, ")


def _steps_section(groups: Sequence[Plain], figures: Mapping[str, Figure]) -> Iterator[str]:
    yield page.section("steps", "Steps that a profile had not seen")
    if not groups:
        yield page.lead("Neither the table of B300 nor the live runs were at hand.")
    else:
        yield page.figure(figures["scatter"])
        yield page.figure(figures["residuals"])
        yield "<h3>Errors by profile</h3>"
        yield page.lead(
            "Absolute errors in percent of the measured time, at the median, the 90th and the 99th percentile; bias is "
            "the sum of predicted over the sum of measured times, less one."
        )
        lines = [(group, line) for group in groups for line in group["errors"]]
        yield from page.table(_ERROR_HEADS, [_error_row(*each) for each in lines if each[1]["regime"] == "all"])
        yield "<details><summary>By regime</summary>"
        yield from page.table(_ERROR_HEADS, [_error_row(*each) for each in lines if each[1]["regime"] in REGIMES])
        yield "</details>"
    yield "</section>"


def _error_row(group: Plain, line: Plain) -> list[str]:
    return [
        page.cell(_short(group["name"])),
        page.cell(line["regime"]),
        *(page.cell(f"{line[key]:,}", "number") for key in ("num_steps", "num_shapes")),
        *(page.cell(f"{line[key]:.2f} %", "number") for key in ("p50_percent", "p90_percent", "p99_percent")),
        page.cell(f"{line['bias_percent']:+.2f} %", "number"),
        page.cell(f"{line['covered_percent']:.1f} %", "number"),
    ]


# --- live runs


def _live_figures(live: Plain) -> list[Figure]:
    study = live["paced"]
    limits = study["limits_percent"]
    lines = [line for line in study["lines"] if line["limit_percent"] is not None]
    names = list(dict.fromkeys(line["figure"] for line in lines))
    allowed = [next(line["limit_percent"] for line in lines if line["figure"] == name) for name in names]
    data: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": "allowed",
            "y": names,
            "x": [2 * value for value in allowed],
            "base": [-value for value in allowed],
            "marker": {"color": "@grey/25"},
            "hoverinfo": "skip",
        }
    ]
    for place, run in enumerate(study["study"]["predicted"]):
        own = [line for line in lines if line["run"] == run]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": run,
                "y": [line["figure"] for line in own],
                "x": [line["error_percent"] if math.isfinite(line["error_percent"]) else None for line in own],
                "error_x": {
                    "type": "data",
                    "array": [100 * line["spread"] / line["live"] if line["live"] else 0.0 for line in own],
                    "thickness": 1,
                    "width": 3,
                },
                "marker": {"color": _RUN_COLOURS[place], "symbol": _RUN_SYMBOLS[place], "size": 9},
                "hovertemplate": "%{y}: %{x:+.2f} %<extra>" + run + "</extra>",
            }
        )
    counts = ", ".join(
        f"{each['run']} {each['num_steps']:,} steps"
        for each in study["decisions"]
        if each["run"] in study["study"]["predicted"]
    )
    caption = (
        f"How far the mean of {study['num_simulations']} simulations is from the live run, at the client; the bars are "
        "one standard deviation of the simulations, the grey ground what is allowed (makespan "
        f"{limits['makespan']:.0f} %, means {limits['mean']:.0f} %, 95th percentiles {limits['p95']:.0f} %, "
        f"preemptions {limits['preemptions']:.0f} %). n = {len(lines)} figures of "
        f"{len(study['study']['predicted'])} runs ({counts})."
    )
    layout = {
        "xaxis": {"title": "predicted / live - 1 (%)", "zeroline": True, "zerolinecolor": "@grey"},
        "yaxis": {"autorange": "reversed"},
    }
    return [Figure("live", "Live runs, predicted from other runs", caption, data, layout, tall=True)]


def _live_section(part: Any, figures: Mapping[str, Figure]) -> Iterator[str]:
    yield page.section("live", "Live runs of a vLLM server")
    live = _present(part)
    if live is None:
        yield page.lead(part[MISSING])
        yield "</section>"
        return
    study = live["paced"]
    path = study["http_path_ms"]
    yield page.lead(
        "vLLM 0.32 on a CPU, with its own HTTP server, scheduler and engine loop; each step is held until a set time "
        "has passed, so that the machine's changing speed does not blur what is compared. Step times and the way "
        f"between client and engine are learned from {', '.join(study['study']['learned'])}. A predicted run "
        "contributes when the client sent which lengths, and its server's limits; nothing else."
    )
    yield page.lead(
        f"The way in takes {path['in_ms']:.1f} ms in the median (the first request of a run {path['first_in_ms']:.0f} "
        f"ms), requests of a burst come {path['turn_ms']:.2f} ms apart, and a token is at the client "
        f"{path['out_ms']:.1f} ms after its step plus {path['out_per_token_ms']:.2f} ms for each token of that step."
    )
    yield page.figure(figures["live"])
    client = [line for line in study["lines"] if line["where"] == "client"]
    yield from page.table(_LIVE_HEADS, [_live_row(line) for line in client if line["limit_percent"] is not None])
    yield "<details><summary>What is not judged: medians and steps</summary>"
    yield from page.table(_LIVE_HEADS, [_live_row(line) for line in client if line["limit_percent"] is None])
    yield "</details>"
    yield "<details><summary>All at the engine, not judged</summary>"
    yield page.lead("From the API server's arrival, as recorded, to the end of the steps.")
    yield from page.table(_LIVE_HEADS, [_live_row(line) for line in study["lines"] if line["where"] == "engine"])
    yield "</details>"
    yield "<h3>Decisions</h3>"
    yield page.lead(
        "Arrivals and step times as recorded are fed back; compared is, in every step, which requests compute how many "
        "tokens, in the order of the decision."
    )
    rows = [
        [
            page.cell(each["run"]),
            page.cell(f"{each['num_steps']:,}", "number"),
            page.cell(f"{each['num_preemptions']:,}", "number"),
            page.cell(each["first_difference"] or "all the same"),
        ]
        for each in (*study["decisions"], *live["bare"]["decisions"])
    ]
    yield from page.table(("Run", "Steps", "Preemptions", "Beside vLLM's decisions"), rows)
    yield "<h3>Without pacing</h3>"
    yield page.lead(
        f"The same server with its bare CPU steps, learned from {', '.join(live['bare']['study']['learned'])}. The "
        "machine changed its speed by 1.6 to 1.8 times in phases, so that one run's steps do not foretell those of "
        "another; nothing is judged, and the errors are what such a machine does to any profile."
    )
    yield "<details><summary>Figures without pacing</summary>"
    yield from page.table(_LIVE_HEADS, [_live_row(line) for line in live["bare"]["lines"] if line["where"] == "client"])
    yield "</details></section>"


_LIVE_HEADS = ("Run", "Figure", "Live", "Predicted", "Spread", "Error", "Limit")


def _live_row(line: Plain) -> list[str]:
    limit = line["limit_percent"]
    judged = "" if limit is None else page.badge("bad" if line["is_broken"] else "good", f"{limit:.0f} %")
    return [
        page.cell(line["run"]),
        page.cell(line["figure"]),
        *(page.cell(_amount(line["figure"], line[key]), "number") for key in ("live", "predicted", "spread")),
        page.cell(f"{line['error_percent']:+.2f} %", "number"),
        page.cell_html(judged),
    ]


def _amount(figure: str, value: float) -> str:
    if figure in ("preemptions", "steps"):
        return f"{value:,.1f}".removesuffix(".0")
    if figure == "makespan" or figure.startswith("E2EL"):
        return f"{value:.3f} s"
    return f"{1e3 * value:,.2f} ms" if figure.startswith("TPOT") else f"{1e3 * value:,.1f} ms"


# --- the other parts


def _b300_section(part: Any) -> Iterator[str]:
    yield page.section("b300", "Real steps on B300")
    sizes = _present(part)
    if sizes is None:
        yield page.lead(part[MISSING])
    else:
        divisions = len(sizes[0]["divisions"])
        yield page.lead(
            f"vLLM 0.20 serving Qwen3-32B: 70 % of the shapes were fitted and the others predicted, with {divisions} "
            "random divisions. Wanted are a median of at most 2.5 %, nine of ten within 6 %, and 85 to 95 % of the "
            "steps in their 90 % intervals. Medians over the divisions, with the worst in brackets. A few steps of the "
            "table were recorded with next to no time beside a neighbour of twice its time; they count as they are."
        )
        heads = ("TP", "Steps", "Median error", "Nine of ten within", "In the interval", "Above 2.5 %", "Above 6 %")
        yield from page.table(heads, map(_b300_row, sizes))
    yield "</section>"


def _b300_row(size: Plain) -> list[str]:
    divisions = size["divisions"]
    worst = {key: max(each[key] for each in divisions) for key in ("median_percent", "p90_percent")}
    lowest = min(each["covered_percent"] for each in divisions)
    count = len(divisions)
    above = (("median_percent", 2.5), ("p90_percent", 6.0))
    return [
        page.cell(str(size["tensor_parallel_size"]), "number"),
        page.cell(f"{size['num_steps_in_table']:,}", "number"),
        *(page.cell(f"{_middle(size, key):.2f} % ({worst[key]:.2f} %)", "number") for key in worst),
        page.cell(f"{_middle(size, 'covered_percent'):.1f} % ({lowest:.1f} %)", "number"),
        *(page.cell(f"{sum(each[key] > limit for each in divisions)} of {count}", "number") for key, limit in above),
    ]


def _kernels_section(part: Plain) -> Iterator[str]:
    yield page.section("kernels", "Composed from kernel tables")
    if MISSING in part:
        yield page.lead(part[MISSING])
    else:
        yield page.lead(
            "Steps put together from measured times of single kernels, beside steps that were measured whole. Bias is "
            "that of the median step."
        )
        for key, value in part.items():
            rows = list(_composed_rows(value, ()))
            if rows:
                yield f"<h3>{escape(_TITLES.get(key, _words(key)))}</h3>"
                yield from page.folded_table(_COMPOSED_HEADS, rows, num_shown=_NUM_SHOWN)
    yield "</section>"


_TITLES = {
    "left_out": "The tables' own mixed shapes, left out of the fit",
    "real_steps": "Real vLLM steps on B300",
    "two_makers": "Two makers' tables of one card",
}
_COMPOSED_HEADS = ("What", "Steps", "Median", "90 %", "Bias")


def _composed_rows(part: Any, path: tuple[str, ...]) -> Iterator[list[str]]:
    """A row for each record of errors in the part, however deep, named by the way to it."""
    if isinstance(part, list):
        for each in part:
            yield from _composed_rows(each, path)
    elif isinstance(part, Mapping):
        if "median_percent" in part and "num_steps" in part:
            yield _composed_row(part, path)
            return
        subject = _subject(part)
        for key, value in part.items():
            yield from _composed_rows(value, (*path, subject, _step_words(str(key))))


def _subject(part: Plain) -> str:
    """What a record is of: card, model and tensor parallelism, as far as it names them."""
    model = str(part.get("model", "")).rpartition("/")[2]
    size = part.get("tensor_parallel_size")
    return ", ".join(text for text in (str(part.get("gpu", "")), model, f"TP {size}" if size else "") if text)


def _step_words(key: str) -> str:
    return f"TP {key}" if key.isdigit() else key.replace("_", " ").removeprefix("by size")


def _composed_row(errors: Plain, path: tuple[str, ...]) -> list[str]:
    return [
        page.cell(": ".join(text for text in path if text)),
        page.cell(f"{errors['num_steps']:,}", "number"),
        *(page.cell(f"{errors[key]:.2f} %", "number") for key in ("median_percent", "p90_percent")),
        page.cell(f"{errors['bias_percent']:+.2f} %", "number"),
    ]


def _words(key: str) -> str:
    words = key.replace("_", " ").strip()
    return f"{words[:1].upper()}{words[1:]}"


def _cpu_section(part: Plain) -> Iterator[str]:
    yield page.section("cpu", "CPU, from measuring to a live run")
    if MISSING in part:
        yield page.lead(part[MISSING])
    else:
        machine = part["machine"]
        yield page.lead(
            f"Our own torch executor, {part['layers']} layers of {part['hidden']}, one thread ({machine['cpu']}): "
            f"measured and fitted in {part['measure_and_fit_s']:.0f} s, then {part['num_requests']} requests at "
            f"{100 * part['load']:.0f} % of its capacity served live {len(part['live_s'])} times. "
            f"Clock: {part['clock']}."
        )
        kept = "" if part["clock"] != "cpu" else "All limits are kept." if not part["broken"] else "Limits are broken."
        exact = "reproduce" if part["is_replayed_exactly"] else "do not reproduce"
        yield page.lead(f"{kept} Recorded step times fed back {exact} every token's time to the nanosecond.".strip())
        heads = ("Figure", "Unit", "Predicted", "Live, median", "Error", "Limit", "Live runs apart")
        yield from page.table(heads, map(_cpu_row, part["comparison"]))
    yield "</section>"


def _cpu_row(row: Plain) -> list[str]:
    limit = row["limit_percent"]
    return [
        page.cell(row["metric"]),
        page.cell(row["unit"]),
        *(page.cell(f"{row[key]:,.4g}", "number") for key in ("predicted", "live_median")),
        page.cell(f"{row['error_percent']:+.1f} %", "number"),
        page.cell("" if limit is None else f"{limit:g} %", "number"),
        page.cell(f"{row['live_spread_percent']:.1f} %", "number"),
    ]


def _bundled_section(part: Plain) -> Iterator[str]:
    yield page.section("bundled", "Bundled profiles")
    if MISSING in part:
        yield page.lead(part[MISSING])
    else:
        profiles = part["profiles"]
        yield page.lead(
            f"{plural(len(profiles), 'profile')} come with windtunnel. Each states how far it is off where that was "
            "measured on a like case; a dash means that no real step was compared."
        )
        heads = ("Profile", "GPU", "TP", "Source", "Median", "90 %", "Rests on")
        yield from page.folded_table(heads, [_bundled_row(each) for each in profiles], num_shown=_NUM_SHOWN)
    yield "</section>"


def _bundled_row(profile: Plain) -> list[str]:
    stated = profile["stated_error"]
    return [
        page.code(profile["name"]),
        page.cell(profile["gpu"] or profile["device"]),
        page.cell(str(profile["tensor_parallel_size"]), "number"),
        page.cell(profile["source"]),
        *(page.cell(_percent(stated.get(key)), "number") for key in ("p50_percent", "p90_percent")),
        page.cell(str(stated.get("rests_on", "")), "words"),
    ]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} %"
