"""The page that says what was validated against what, with which error; all of it from plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from windtunnel.reports import page
from windtunnel.reports.figures import Figure, Trace
from windtunnel.reports.published_page import write_published
from windtunnel.reports.words import plural

LATENCIES = ("TTFT", "TPOT", "E2EL", "ITL")
BAND_PERCENT = 4.0
"""What a mean latency of a paced run may be off."""
_COLOURS = ("@blue", "@orange", "@green", "@vermillion", "@purple", "@sky")
_SYMBOLS = ("circle", "diamond", "square", "cross", "triangle-up", "x")
_STATISTICS = (("mean", "circle", "@blue"), ("p50", "diamond", "@green"), ("p95", "cross", "@orange"))
_KINDS = (("requests known", 0, "@blue", "circle"), ("load and lengths drawn", 1, "@orange", "diamond"))
_HEADS = ("What", "Beside", "n", "Compared", "Worst error", "Live apart", "Decisions", "When, and from")
_FIGURE_HEADS = ("Group", "Run", "Figure", "Live", "Predicted", "Error", "Limit", "Live apart")
_NUM_SHOWN = 12

Plain = Mapping[str, Any]


def write_validation_page(path: str | Path, content: Plain, *, version: str) -> None:
    """Write the page of what ``benchmarks.validation_page`` gathers; the same content gives the same bytes.

    Raises OSError if it cannot be written.
    """
    drawn = list(_figures(content))
    write_published(
        path,
        "What was validated against what",
        _body(content, {figure.name: figure for figure in drawn}),
        subject="validation",
        version=version,
        skip_to="table",
        drawn=drawn,
        styles=("page.css", "validation.css"),
    )


def _body(content: Plain, drawn: Mapping[str, Figure]) -> Iterator[str]:
    yield from page.answer_box(_headline(content), _sentences(content), _tone(content))
    yield from page.navigation(
        [
            ("table", "Table"),
            ("runs", "Live runs"),
            ("decisions", "Decisions"),
            ("public", "GPU runs of others"),
            ("steps", "Step times"),
            ("memory", "Memory"),
            ("forks", "Forks"),
            ("open", "Not validated"),
        ]
    )
    yield from _table_section(content)
    yield from _runs_section(content, drawn)
    yield from _decisions_section(content)
    yield from _public_section(content)
    yield from _drawn_section("steps", "Step times of B300", drawn, "No step times of B300 were at hand.")
    yield from _drawn_section("memory", "KV cache of real start-ups", drawn, "No start-ups were at hand.")
    yield from _drawn_section("forks", "Forks of a running engine", drawn, "No forks were at hand.")
    yield from _open_section(content)


# --- the answer


def _judged(content: Plain) -> list[Plain]:
    return [point for point in content["points"] if point["limit_percent"] is not None]


def _broken(content: Plain) -> list[Plain]:
    return [point for point in _judged(content) if point["is_broken"]]


def _headline(content: Plain) -> str:
    judged, broken = _judged(content), _broken(content)
    if not judged:
        return "No judged live run was at hand."
    runs = plural(len({(point["group"], point["run"]) for point in judged}), "live workload")
    if broken:
        return f"{len(judged) - len(broken)} of {len(judged)} figures of {runs} are within their limits."
    return f"All {len(judged)} figures of {runs} are within their limits."


def _tone(content: Plain) -> str:
    if not _judged(content) or any(each["first_difference"] is not None for each in content["decisions"]):
        return "note"
    return "note" if _broken(content) else "good"


def _sentences(content: Plain) -> Iterator[str]:
    if content["decisions"]:
        yield _decisions_told(content["decisions"])
    if broken := _broken(content):
        worst = max(broken, key=_excess)
        more = "" if len(broken) == 1 else f" and {len(broken) - 1} more"
        yield (
            f"Out of its limit: {worst['figure']} of {worst['run']} ({worst['group']}), off by "
            f"{_signed(worst['error_percent'])} where {worst['limit_percent']:.1f} % is allowed{more}."
        )
    elif judged := _judged(content):
        worst = max(judged, key=_excess)
        yield (
            f"Nearest to its limit: {worst['figure']} of {worst['run']} ({worst['group']}), off by "
            f"{_signed(worst['error_percent'])} of {worst['limit_percent']:.1f} %."
        )
    latencies = [point for point in content["points"] if _is_latency(point) and point["error_percent"] is not None]
    if latencies:
        worst = max(latencies, key=lambda point: abs(point["error_percent"]))
        yield (
            f"The worst of all {len(latencies)} latencies, judged or not: {worst['figure']} of {worst['run']} "
            f"({worst['group']}), off by {_signed(worst['error_percent'])}."
        )
    yield from _public_told(content["public_about"])
    yield "Not validated: no GPU of our own was run; what is known of GPUs are runs and steps that others published."


def _public_told(predicted: Sequence[Plain]) -> Iterator[str]:
    """The first prediction of each run is the one without a change."""
    first = {each["run"]: each["errors"] for each in reversed(predicted)}
    means = {run: [abs(error) for name, error in errors.items() if "mean" in name] for run, errors in first.items()}
    if told := [f"{max(errors):.1f} % ({run})" for run, errors in reversed(means.items()) if errors]:
        worst = ", ".join(told)
        yield f"Mean latencies of GPU runs that others published, from kernel tables, are off by up to {worst}."


def _decisions_told(decisions: Sequence[Plain]) -> str:
    steps = sum(each["num_steps"] for each in decisions)
    different = sum(each["first_difference"] is not None for each in decisions)
    runs = plural(len(decisions), "live run")
    if different:
        return f"{different} of {runs} differ from vLLM's decisions somewhere."
    return f"Led through {runs}, our scheduler takes vLLM's decisions in all {steps:,} steps."


def _excess(point: Plain) -> float:
    limit, error = point["limit_percent"], point["error_percent"]
    if error is None:
        return float("inf")
    return float("inf") if not limit and error else abs(error) / limit if limit else 0.0


def _is_latency(point: Plain) -> bool:
    return point["figure"].partition(" ")[0] in LATENCIES


def _signed(value: float | None, places: int = 1) -> str:
    return "–" if value is None else f"{value:+.{places}f} %"


# --- figures


def _figures(content: Plain) -> Iterator[Figure]:
    latencies = [
        point for point in content["points"] if _is_latency(point) and min(point["live"], point["predicted"]) > 0
    ]
    if latencies:
        yield _scatter(latencies)
        yield _errors(latencies)
    if content["steps"]:
        yield _steps(content["steps"])
    if content["memory"]:
        yield _memory(content["memory"])
    if content["forks"]:
        yield _forks(content["forks"])


def _groups(points: Sequence[Plain]) -> list[str]:
    return list(dict.fromkeys(point["group"] for point in points))


def _scatter(points: Sequence[Plain]) -> Figure:
    ends = [0.8e3 * min(point["live"] for point in points), 1.25e3 * max(point["live"] for point in points)]
    low, high = ([share * end for end in ends] for share in (1 - BAND_PERCENT / 100, 1 + BAND_PERCENT / 100))
    line: Trace = {"type": "scatter", "mode": "lines", "x": ends, "hoverinfo": "skip"}
    edge = {"color": "@grey/50", "width": 0.5}
    data: list[Trace] = [
        {**line, "y": low, "line": edge, "showlegend": False},
        {**line, "y": high, "line": edge, "fill": "tonexty", "fillcolor": "@grey/40", "name": f"±{BAND_PERCENT:g} %"},
    ]
    for place, group in enumerate(_groups(points)):
        own = [point for point in points if point["group"] == group]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": group,
                "x": [1e3 * point["live"] for point in own],
                "y": [1e3 * point["predicted"] for point in own],
                "text": [f"{point['run']}, {point['figure']}: {_signed(point['error_percent'])}" for point in own],
                "marker": {"color": f"{_COLOURS[place]}/70", "symbol": _SYMBOLS[place], "size": 7},
                "hovertemplate": "%{text}<br>live %{x:.4~g} ms, predicted %{y:.4~g} ms<extra>" + group + "</extra>",
            }
        )
    caption = (
        "Means and percentiles of TTFT, TPOT, E2EL and ITL of every live run, judged or not; both axes are "
        f"logarithmic, the ground holds what is off by at most {BAND_PERCENT:g} %. n = {len(points)} latencies: "
        f"{_counted(points)}. Sources: live_vllm_cpu.json, calibration.json, cpu_end_to_end.json, validation_4090.json."
    )
    axis = {"type": "log", "dtick": 1}
    layout = {"xaxis": {**axis, "title": "live (ms)"}, "yaxis": {**axis, "title": "predicted (ms)"}}
    return Figure("scatter", "Latencies, predicted and live", caption, data, layout, tall=True)


def _counted(points: Sequence[Plain]) -> str:
    return ", ".join(f"{group} {sum(point['group'] == group for point in points)}" for group in _groups(points))


def _errors(points: Sequence[Plain]) -> Figure:
    """A line for each run: where its errors lie, and how far its live runs were apart."""
    names = list(dict.fromkeys(_run_name(point) for point in points))
    apart = {
        name: [
            p["live_spread_percent"] for p in points if _run_name(p) == name and p["live_spread_percent"] is not None
        ]
        for name in names
    }
    known = [name for name in names if apart[name]]
    data: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": "live runs apart (largest)",
            "y": known,
            "x": [2 * max(apart[name]) for name in known],
            "base": [-max(apart[name]) for name in known],
            "marker": {"color": "@grey/25"},
            "hoverinfo": "skip",
        }
    ]
    shown = 0
    for statistic, symbol, colour in _STATISTICS:
        own = [p for p in points if p["figure"].endswith(f" {statistic}") and p["error_percent"] is not None]
        shown += len(own)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": statistic,
                "y": [_run_name(point) for point in own],
                "x": [point["error_percent"] for point in own],
                "text": [point["figure"] for point in own],
                "marker": {"color": f"{colour}/80", "symbol": symbol, "size": 8},
                "hovertemplate": "%{y}<br>%{text}: %{x:+.2f} %<extra></extra>",
            }
        )
    caption = (
        "How far each latency (TTFT, TPOT, E2EL, ITL) is off, by run. Grey: the most that live runs of the same load "
        f"are apart in any of them, where it ran more than once. n = {shown} latencies of {plural(len(names), 'run')}. "
        "Sources as above."
    )
    layout = {
        "xaxis": {"title": "predicted / live - 1 (%)", "zeroline": True, "zerolinecolor": "@grey"},
        "yaxis": {"autorange": "reversed", "categoryorder": "array", "categoryarray": names, "tickfont": {"size": 11}},
    }
    return Figure("errors", "Errors by run", caption, data, layout, tall=True)


_SHORT = {"vLLM on CPU, ": "", "recorded vLLM, ": "recorded ", "own torch engine": "torch", "public GPU runs": ""}


def _run_name(point: Plain) -> str:
    """The run as an axis can bear it, in two lines if it needs them."""
    group = point["group"]
    for long, short in _SHORT.items():
        group = group.replace(long, short)
    run = point["run"].replace(", ", "<br>")
    return f"{group}<br>{run}" if group else run


def _steps(lines: Sequence[Plain]) -> Figure:
    data: list[Trace] = []
    for place, how in enumerate(dict.fromkeys(line["how"] for line in lines)):
        own = [line for line in lines if line["how"] == how]
        data.append(
            {
                "type": "bar",
                "name": how,
                "x": [f"TP {line['tensor_parallel_size']}" for line in own],
                "y": [line["median_percent"] for line in own],
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [line["p90_percent"] - line["median_percent"] for line in own],
                    "arrayminus": [0.0] * len(own),
                    "thickness": 1,
                },
                "marker": {"color": f"{_COLOURS[place]}/70"},
                "text": [f"{line['num_steps']} steps, nine of ten within {line['p90_percent']:.1f} %" for line in own],
                "textposition": "none",
                "hovertemplate": "%{x}: median %{y:.1f} %, %{text}<extra>" + how + "</extra>",
            }
        )
    counts = ", ".join(
        f"{how} {sum(line['num_steps'] for line in lines if line['how'] == how):,}"
        for how in dict.fromkeys(line["how"] for line in lines)
    )
    caption = (
        "Whole steps of vLLM 0.20 serving Qwen3-32B on B300: the bar is the median of the absolute error, its line "
        "ends at the 90th percentile. Fitted: medians over random divisions by shape. Composed: from tables of single "
        "kernels, the host's part learned on the other tensor parallelisms or left out. "
        f"n = {counts} steps. Sources: calibration.json, kernels_composed.json."
    )
    layout = {"barmode": "group", "yaxis": {"title": "absolute error (%)", "rangemode": "tozero"}, "xaxis": {}}
    return Figure("steps", "Errors of single steps", caption, data, layout)


def _memory(memory: Plain) -> Figure:
    logged, planned = memory["logged"], memory["planned"]
    errors = [100 * (own / truth - 1) for own, truth in zip(planned, logged, strict=True)]
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "start-ups",
            "showlegend": False,
            "x": logged,
            "y": errors,
            "text": memory["cards"],
            "marker": {"color": "@blue/60", "symbol": "circle", "size": 7},
            "hovertemplate": "%{text}<br>%{x:,.0f} KV tokens, planned %{y:+.2f} %<extra></extra>",
        }
    ]
    caption = (
        f"KV tokens that vLLM {memory['releases'][0]} to {memory['releases'][-1]} logged as it started, and how far "
        "the plan is off; each is planned with constants fitted without its family of models. Median "
        f"{memory['median_percent']:.2f} %, nine of ten within {memory['p90_percent']:.2f} %, worst "
        f"{memory['worst_percent']:.1f} %; {memory['covered_percent']:.0f} % lie in their 90 % interval. "
        f"n = {memory['num_start_ups']} start-ups of {memory['num_families']} families. Sources: public logs, each "
        "named in memory.html where it is among the worst."
    )
    layout = {
        "xaxis": {"type": "log", "dtick": 1, "title": "KV tokens, logged"},
        "yaxis": {"title": "planned / logged - 1 (%)", "zeroline": True, "zerolinecolor": "@grey"},
    }
    return Figure("memory", "KV tokens of real start-ups", caption, data, layout)


_FORK_NAMES = {
    "request_throughput": "throughput",
    "ttft_mean_ms": "TTFT mean",
    "tpot_mean_ms": "TPOT mean",
    "e2el_mean_ms": "E2EL mean",
    "running_mean": "running",
    "kv_usage_mean": "KV usage",
}


def _forks(forks: Sequence[Plain]) -> Figure:
    moments = [moment for fork in forks for moment in fork["moments"]]
    data: list[Trace] = []
    for kind, at, colour, symbol in _KINDS:
        found = [(_FORK_NAMES[name], moment["errors"][name][at]) for moment in moments for name in _FORK_NAMES]
        kept = [(name, error) for name, error in found if error is not None]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": kind,
                "y": [name for name, _ in kept],
                "x": [error for _, error in kept],
                "marker": {"color": f"{colour}/70", "symbol": symbol, "size": 8},
                "hovertemplate": "%{y}: %{x:+.1f} %<extra>" + kind + "</extra>",
            }
        )
    loads = " and ".join(f"{100 * fork['load']:.0f} %" for fork in forks)
    exact = sum(fork["num_exact"] for fork in forks)
    caption = (
        f"A snapshot of our running torch engine is simulated {forks[0]['horizon_s']:g} s ahead and compared with what "
        f"then happened, at {loads} of its capacity. With the true step times {exact} of {len(moments)} forks are what "
        "happened, to the nanosecond; here the step times are a profile's, of a machine whose speed drifts. Drawn: "
        f"the mean of {forks[0]['num_futures']} futures. n = {len(moments)} moments. Sources: "
        f"{', '.join(fork['name'] + '.json' for fork in forks)}."
    )
    layout = {
        "xaxis": {"title": "predicted / observed - 1 (%)", "zeroline": True, "zerolinecolor": "@grey"},
        "yaxis": {"autorange": "reversed"},
    }
    return Figure("forks", "What follows a fork", caption, data, layout)


# --- sections


def _table_section(content: Plain) -> Iterator[str]:
    yield page.section("table", "Everything that was measured")
    yield page.lead(
        "A row for each validation. Errors are absolute: of the makespan, the worst of the mean latencies and the "
        "worst of their 95th percentiles, unless they say otherwise. How far live runs of the same load are apart is "
        "said where it ran more than once. When: the day that the measurement states, else that of its file."
    )
    yield from page.table(_HEADS, map(_table_row, content["rows"]))
    if content["missing"]:
        yield page.lead("Not at hand, so not shown: " + ", ".join(f"{name}.json" for name in content["missing"]) + ".")
    yield "</section>"


def _table_row(row: Plain) -> list[str]:
    return [
        *(page.cell(row[key]) for key in ("subject", "truth")),
        page.cell(row["n"], "number"),
        *(page.cell(row[key]) for key in ("compared", "error")),
        page.cell(row["spread"] or "–", "number"),
        page.cell(row["decisions"] or "–"),
        page.cell(f"{row['when']}, {row['source']}"),
    ]


def _runs_section(content: Plain, drawn: Mapping[str, Figure]) -> Iterator[str]:
    yield page.section("runs", "Live runs, predicted")
    if not content["points"]:
        yield page.lead("No live runs were at hand.")
        yield "</section>"
        return
    yield page.lead(
        "Paced: a real vLLM server on a CPU whose steps are held until a set time has passed, so that the machine's "
        "changing speed does not blur what is compared; step times are learned from other runs. Bare: the same "
        "without pacing, where a prediction is held to how far live runs of the same load are apart, or, where they "
        "ran only once, to nothing. Public GPU runs are predicted from kernel tables."
    )
    if content.get("live_notes"):
        yield page.lead(" ".join(line.removeprefix("- ") for line in content["live_notes"]))
    for name in ("scatter", "errors"):
        if name in drawn:
            yield page.figure(drawn[name])
    yield "<h3>Judged figures, nearest to their limits first</h3>"
    judged = sorted(_judged(content), key=lambda point: -_excess(point))
    yield from page.folded_table(_FIGURE_HEADS, [_figure_row(point) for point in judged], num_shown=_NUM_SHOWN)
    others = [point for point in content["points"] if point["limit_percent"] is None]
    yield f"<details><summary>{plural(len(others), 'figure')} that no limit judges</summary>"
    yield from page.table(_FIGURE_HEADS, [_figure_row(point) for point in others])
    yield "</details></section>"


def _figure_row(point: Plain) -> list[str]:
    limit, spread = point["limit_percent"], point["live_spread_percent"]
    judged = "–" if limit is None else page.badge("bad" if point["is_broken"] else "good", f"{limit:.1f} %")
    return [
        *(page.cell(point[key]) for key in ("group", "run", "figure")),
        *(page.cell(_amount(point["figure"], point[key]), "number") for key in ("live", "predicted")),
        page.cell(_signed(point["error_percent"], 2), "number"),
        page.cell_html(judged),
        page.cell("–" if spread is None else f"{spread:.1f} %", "number"),
    ]


def _amount(figure: str, value: float) -> str:
    if figure.startswith(LATENCIES):
        return f"{value:,.3f} s" if value >= 1 else f"{1e3 * value:,.1f} ms"
    unit = " s" if figure in ("makespan", "busy time") else ""
    return f"{value:,.2f}{unit}" if unit else f"{value:,.1f}".removesuffix(".0")


def _decisions_section(content: Plain) -> Iterator[str]:
    yield page.section("decisions", "Decisions of live servers")
    if not content["decisions"]:
        yield page.lead("No recorded decisions were at hand.")
    else:
        yield page.lead(
            "Our scheduler is led through each recorded run, step times fed back, and every step compared with what "
            f"vLLM's decided: the same requests, the same tokens. n = {plural(len(content['decisions']), 'run')}. "
            "Sources: live_vllm_cpu.json, calibration.json."
        )
        heads = ("Server", "Run", "Steps", "Preemptions", "Beside vLLM's decisions")
        yield from page.table(heads, map(_decision_row, content["decisions"]))
    yield "</section>"


def _decision_row(each: Plain) -> list[str]:
    first = each["first_difference"]
    told = page.badge("good", "same in every step") if first is None else page.badge("bad", "differs") + escape(first)
    return [
        *(page.cell(each[key]) for key in ("group", "run")),
        *(page.cell(f"{each[key]:,}", "number") for key in ("num_steps", "num_preemptions")),
        page.cell_html(told),
    ]


def _public_section(content: Plain) -> Iterator[str]:
    yield page.section("public", "GPU runs that others published")
    if not content["public_about"]:
        yield page.lead("No public runs were at hand.")
    else:
        yield page.lead(
            "Runs of vLLM by the makers of LLMServingSim. Settings, arrivals and lengths are the run's own, step times "
            "come from kernel tables; no latency and no step of a run is used, except where it is marked. How steps "
            "are composed was changed after a first comparison with these runs, for reasons found on B300, which made "
            "the errors here larger; so this is no blind prediction any more. "
            "One ingredient is changed at a time. n = 1 run each, 300 requests. Source: validation_4090.json."
        )
        names = list(dict.fromkeys(name for each in content["public_about"] for name in each["errors"]))
        heads = ("Run", "Predicted from", "About", *names, "Preemptions")
        yield from page.table(heads, [_public_row(each, names) for each in content["public_about"]])
    yield "</section>"


def _public_row(each: Plain, names: Sequence[str]) -> list[str]:
    mark = page.badge("note", "after the fact") if each["is_hindsight"] else ""
    return [
        page.cell(each["run"]),
        page.cell_html(f"{escape(each['label'])} {mark}".strip()),
        page.cell(each["about"]),
        *(page.cell(_signed(each["errors"].get(name)), "number") for name in names),
        page.cell(f"{each['num_preemptions']:,}", "number"),
    ]


def _drawn_section(name: str, title: str, drawn: Mapping[str, Figure], otherwise: str) -> Iterator[str]:
    yield page.section(name, title)
    if name in drawn:
        yield page.figure(drawn[name])
    else:
        yield page.lead(otherwise)
    yield "</section>"


def _open_section(content: Plain) -> Iterator[str]:
    yield page.section("open", "What is not validated")
    yield f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in _open(content))}</ul></section>"


def _open(content: Plain) -> Iterator[str]:
    yield "No GPU of our own was run: neither our Triton engine nor a vLLM server on one."
    composed = content["profiles"].get("composed", 0)
    if composed:
        yield (
            f"{composed} of the {sum(content['profiles'].values())} bundled profiles are composed from kernel tables; "
            "the cards and models above are all of them that were held against whole steps or runs."
        )
    yield "Speculative decoding, pipeline and data parallelism: decisions are compared, latencies are not."
    yield "Static and dynamic batching, swapping: rules after descriptions, beside no recording of those systems."
    yield "Multi-node serving, disaggregated prefill, LoRA, multimodal inputs: not compared with anything."
    yield "The way between client and engine of a GPU server: it was learned and judged on CPU servers only."
    if content["memory"]:
        yield f"The memory plan of releases after {content['memory']['releases'][-1]}: beside no start-up."
    yield "Live runs longer than a few minutes."
    yield from (f"{name}.json was not at hand when this page was made." for name in content["missing"])
