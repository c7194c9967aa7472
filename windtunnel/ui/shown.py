"""A question's scenario and its run as plain data for the page: settings, cards, tables and figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from windtunnel.ui.question import Question, load, values_of

if TYPE_CHECKING:
    from windtunnel.api import Run
    from windtunnel.reports.figures import Figure
    from windtunnel.scenarios.load import Loaded
    from windtunnel.scenarios.resolve import Resolved
    from windtunnel.sim.metrics import LatencyStats, Summary
    from windtunnel.ui.memory import Planned

LOWER, HIGHER = "lower", "higher"
_DRAWN = ("kv", "queue", "cdf-ttft", "cdf-itl", "cdf-e2el")


# --- settings


def settings_part(question: Question, loaded: Loaded, planned: Planned, resolved: Resolved | None) -> dict[str, Any]:
    """Where every knob stands, what was turned, and what gives the same elsewhere."""
    from windtunnel.ui.toml import scenario_text

    scenario = loaded.scenario
    values = values_of(scenario)
    settled = {**planned.values, **_resolved_values(resolved)}
    values |= {name: settled[name] for name in _SETTLED if values.get(name) is None and name in settled}
    if resolved is not None:
        values["gpu_hour"] = resolved.rates.gpu_hour
    return {
        "name": scenario.name,
        "description": scenario.description,
        "values": values,
        "base_values": _base_values(question, values),
        "turned": list(question.settings),
        "settings": [] if resolved is None else [_entry(entry) for entry in resolved.entries],
        "cost": None if resolved is None else cost_told(resolved),
        "notes": list(loaded.notes) if resolved is None else list(resolved.notes),
        "warnings": [] if resolved is None else list(resolved.warnings),
        "serve_command": _serve_command(loaded),
        "scenario_text": scenario_text(loaded),
    }


_SETTLED = (
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "kv_cache_dtype",
)


def _resolved_values(resolved: Resolved | None) -> dict[str, Any]:
    if resolved is None:
        return {}
    return {entry.key: entry.value for entry in resolved.entries if entry.section in ("deployment", "engine")}


def _base_values(question: Question, values: dict[str, Any]) -> dict[str, Any]:
    """What the preset says of the knobs that were turned, as far as it says so itself."""
    if not question.settings:
        return {}
    own = values_of(load(Question(question.preset)).scenario)
    return {name: own.get(name) for name in question.settings if name in values}


def _entry(entry: Any) -> dict[str, Any]:
    from windtunnel.reports.values import plain

    return {"section": entry.section, "key": entry.key, "value": plain(entry.value), "source": entry.source}


def cost_told(resolved: Resolved) -> dict[str, Any]:
    """What prices the steps, and how far off it is by its own word."""
    from windtunnel.sim.cost.evidence import in_words
    from windtunnel.sim.cost.statement import sentences, shown_name, statement_of

    told = resolved.describe()
    name, statement = shown_name(told["metadata"]), statement_of(told["cost"])
    badge = in_words(resolved.evidence)
    if statement is None:
        return {
            "name": name,
            "is_calibrated": False,
            "evidence": resolved.evidence,
            "badge": badge,
            "sentences": [
                "Step times come from a formula with assumed efficiencies or from a constant, not from measurements on "
                "this hardware: comparisons of settings are worth more than absolute times."
            ],
        }
    error = "error not known"
    if statement.p50_percent is not None and statement.p90_percent is not None:
        error = f"steps ± {statement.p50_percent:.0f} % (median), ± {statement.p90_percent:.0f} % (9 of 10)"
    said = sentences(told["cost"], has_noise=resolved.system.noise_seed is not None)
    return {
        "name": name,
        "is_calibrated": True,
        "evidence": resolved.evidence,
        "badge": f"{badge}; {error}",
        "sentences": list(said),
    }


def _serve_command(loaded: Loaded) -> dict[str, str]:
    """The ``vllm serve`` line, or why there is none."""
    from windtunnel.memory_settings import served_model
    from windtunnel.scenarios.deployments.settings import SETTINGS
    from windtunnel.scenarios.deployments.write import serve_command

    scenario = loaded.scenario
    deployment, engine = scenario.deployment.model_dump(), scenario.engine.model_dump()
    wanted = {key: value for key, value in (deployment | engine).items() if key in SETTINGS}
    if scenario.speculative is not None:
        return {"text": "", "why": "The scenario drafts tokens: give vLLM's --speculative-config by hand."}
    if getattr(scenario.batching, "policy", "continuous") != "continuous":
        return {"text": "", "why": f"Batching is {scenario.batching.policy}: vLLM 0.32 has no flag for that."}
    if wanted.get("model") is None:
        return {"text": "", "why": "The scenario names no model."}
    wanted["model"] = served_model(wanted["model"])
    try:
        return {"text": serve_command(wanted, version=deployment["engine_version"]), "why": ""}
    except ValueError as error:
        return {"text": "", "why": str(error)}


# --- a run


class Card(NamedTuple):
    """A number of the first screen."""

    key: str
    name: str
    value: float | None
    text: str
    more: str = ""
    better: str = ""
    """Which direction is good news; nothing where neither is."""


def run_part(run: Run, resolved: Resolved) -> dict[str, Any]:
    """What a run says: answer, cards, latencies and figures."""
    statistics = run.statistics
    context = run.context
    shown = [_figure(each) for each in _figures(run)]
    return {
        **_judged(run, resolved),
        "latencies": [_latency(name, stats) for name, stats in _latencies(statistics)],
        "objectives": [_objective(result) for result in statistics.slo],
        "figures": shown,
        "num_requests": statistics.num_prompts,
        "duration_s": statistics.duration_s,
        "num_steps": statistics.load.num_steps,
        "seed": resolved.seed,
        "run_warnings": [*context.warnings, *statistics.warnings],
        "calibrated_by": list(context.calibrated_by),
    }


def saturation_part(run: Run, resolved: Resolved, saturation: float | None) -> dict[str, Any]:
    """What changes once it is known what the engine can do at most."""
    from windtunnel.api import Run as AnyRun

    known = AnyRun(run.records, run.workload, run.resolved, saturation)
    return {
        **_judged(known, resolved),
        **_beyond(known),
        "saturation_request_throughput": saturation,
        "utilisation": known.statistics.load.utilisation,
        "utilisation_note": known.statistics.load.utilisation_note,
    }


OVERLOAD = 1.05
"""Utilisation from which on more comes in than is served, whatever the run was long enough to show: the saturation
throughput is within 3 % (``scenarios.saturation``)."""


def _beyond(run: Run) -> dict[str, Any]:
    """The headline where the run is too short for a verdict, but the utilisation tells."""
    from windtunnel.reports.answer import unanswered
    from windtunnel.reports.words import count

    load, stability = run.statistics.load, run.statistics.stability
    if stability.verdict != "too_short" or load.utilisation is None or load.utilisation < OVERLOAD:
        return {}
    offered, most = stability.offered_request_rate, run.saturation_request_throughput
    told = f"Too much: {count(offered)} requests/s come in, {count(most)}/s is what it can do."
    return {
        "headline": f"{unanswered(run.statistics)} {told}".lstrip(),
        "tone": "bad",
        "verdict": "over capacity",
    }


def _judged(run: Run, resolved: Resolved) -> dict[str, Any]:
    from windtunnel.reports.answer import answer

    statistics = run.statistics
    told = answer(run.records, statistics)
    return {
        "headline": told.headline,
        "sentences": list(told.sentences),
        "tone": told.tone,
        "verdict": statistics.stability.verdict.value,
        "cards": [card._asdict() for card in _cards(statistics, resolved)],
    }


def _cards(summary: Summary, resolved: Resolved) -> Iterator[Card]:
    from windtunnel.reports.words import count, milliseconds, percent

    for name, stats in (("TTFT", summary.ttft), ("ITL", summary.itl), ("E2EL", summary.e2el)):
        high, value = _highest(stats)
        more = f"median {milliseconds(stats.median_ms)}"
        yield Card(name.lower(), f"{name}, {high}", value, milliseconds(value), more, LOWER)
    output, requests = summary.output_throughput, summary.request_throughput
    yield Card("output_throughput", "Output", output, f"{count(output)} tok/s", f"{count(requests)} requests/s", HIGHER)
    load, kv = summary.load, summary.kv
    rho = load.utilisation
    if rho is not None:
        yield Card("utilisation", "Utilisation (rho)", rho, f"{rho:.2f}", "of what it can do")
    else:
        yield Card("busy_share", "Busy", load.busy_share, percent(load.busy_share), "of the time")
    yield Card("kv_peak", "KV usage, peak", kv.usage_peak, percent(kv.usage_peak), f"mean {percent(kv.usage_mean)}")
    num, tokens = summary.preemption.num_preemptions, summary.preemption.recomputed_prefill_tokens
    lost = f"{tokens:,} tokens recomputed" if num else "nothing recomputed"
    yield Card("preemptions", "Preemptions", num, f"{num:,}", lost, LOWER)
    yield Card(
        "waiting", "Waiting, peak", load.num_waiting_peak, f"{load.num_waiting_peak:,}",
        f"running, peak {load.num_running_peak:,}", LOWER,
    )  # fmt: skip
    if summary.goodput is not None:
        rate = summary.goodput.request_goodput
        yield Card(
            "goodput", "Goodput", rate, f"{count(rate)}/s", f"{percent(summary.goodput.good_share)} good", HIGHER
        )
    yield Card("gpus", "GPUs", resolved.num_gpus, f"{resolved.num_gpus:,}", _gpus(resolved))
    yield from _cost_cards(summary)


def _highest(stats: LatencyStats) -> tuple[str, float | None]:
    """The highest percentile that there is, with its name."""
    from windtunnel.sim.metrics.summary import percent_word

    if not stats.percentiles_ms:
        return "max", stats.max_ms
    level, value = stats.percentiles_ms[-1]
    return f"P{percent_word(level)}", value


def _gpus(resolved: Resolved) -> str:
    return resolved.gpu.name if resolved.gpu is not None else "no card is named"


def _cost_cards(summary: Summary) -> Iterator[Card]:
    """What the GPUs cost for an hour, and for a million tokens as served in this run; nothing without a price."""
    from windtunnel.reports.words import count

    paid = summary.economics
    unit = f" {paid.currency}" if paid.currency else ""
    for key, name, cost, more in (
        ("cost_hour", "Cost of an hour", paid.cost_per_hour, "of all GPUs"),
        ("cost_output", "Cost of 1M output tokens", paid.cost_per_million_output_tokens, "as served in this run"),
        ("cost_tokens", "Cost of 1M tokens", paid.cost_per_million_tokens, "input and output alike"),
    ):
        if cost is not None:
            yield Card(key, name, cost, f"{count(cost)}{unit}", more, LOWER)


def _latencies(summary: Summary) -> tuple[tuple[str, LatencyStats], ...]:
    return (
        ("TTFT", summary.ttft),
        ("ITL", summary.itl),
        ("TPOT", summary.tpot),
        ("E2EL", summary.e2el),
        ("Wait in the queue", summary.queue_time),
    )


def _latency(name: str, stats: LatencyStats) -> dict[str, Any]:
    from windtunnel.reports.words import milliseconds
    from windtunnel.sim.metrics.summary import percent_word

    cells = [("mean", stats.mean_ms), ("median", stats.median_ms)]
    cells += [(f"P{percent_word(level)}", value) for level, value in stats.percentiles_ms]
    return {
        "name": name,
        "cells": [{"statistic": which, "value_ms": value, "text": milliseconds(value)} for which, value in cells],
    }


def _objective(result: Any) -> dict[str, Any]:
    from windtunnel.reports.text import measured

    return {"text": result.slo.text, "measured": measured(result), "passed": result.passed, "note": result.note}


# --- figures


def _figures(run: Run) -> Iterator[Figure]:
    from windtunnel.reports.figures import kv_figure, latency_figures, queue_figure, time_axis
    from windtunnel.sim.metrics.latency import inter_token_latencies, request_latencies

    records = run.records
    axis = time_axis(records)
    yield kv_figure(records, axis)
    yield queue_figure(records, axis)
    drawn = latency_figures(request_latencies(records), inter_token_latencies(records), run.statistics)
    yield from (each for each in drawn if each.name in _DRAWN)


def _figure(figure: Figure) -> dict[str, Any]:
    return {**figure.for_page(), "title": figure.title, "caption": figure.caption}
