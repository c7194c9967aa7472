"""The results as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MS = ("TTFT", "TPOT", "E2EL")


def page(results: Mapping[str, Any]) -> str:
    """All studies in ``results``, as ``benchmarks.live_vllm_cpu`` saves them."""
    lines = ["# Live runs of a real vLLM server on a CPU, predicted", "", *_words(_INTRODUCTION), ""]
    for study in results["studies"].values():
        lines += [*_study(study), ""]
    return "\n".join(lines).rstrip() + "\n"


_INTRODUCTION = (
    "Made by `python -m benchmarks.live_vllm_cpu`.",
    "A vLLM server was started with a small random model; our client ran the workloads against it over HTTP, and a",
    "recorder wrote down each step.",
    "Step times and the way between client and engine were learned from the runs named so (one request at a time,",
    "eight at a time, all at once). The other workloads were then predicted from when the client sent which lengths,",
    "and the server's limits. Figures are the client's.",
)


def _words(parts: tuple[str, ...]) -> list[str]:
    return list(parts)


def _study(study: Mapping[str, Any]) -> Iterator[str]:
    machine = study["machine"]
    yield f"## {study['title'][0].upper()}{study['title'][1:]}"
    yield ""
    yield f"On {study['date']}: {study['versions']}; {machine['processor']}, {machine['num_cores']} cores,"
    yield f"{machine['memory_gib']} GiB, shared with other jobs all the time (see the last table)."
    yield f"Server: {'; '.join(study['placement'][:-1])}. {study['placement'][-1].capitalize()}."
    if study["pace"]:
        pace = study["pace"]
        yield "Everything is real but for how long a step takes: the forward pass is held until"
        yield (
            f"{pace['base_ms']:g} ms + {pace['token_ms']:g} ms a token + {pace['seq_ms']:g} ms a request + "
            f"{1e3 * pace['context_ms']:g} ms for 1,000 tokens of context have passed."
        )
    else:
        yield "Each predicted workload ran several times; a prediction may be no farther from the mean of the live runs"
        yield "than these are from each other (limit). The machine's own speed changes meanwhile: small bursts"
        yield "before and after each predicted run (*speed*) show it, and its steps are priced by their mean."
    yield ""
    yield from _rows(study)
    yield ""
    yield from _verdict(study)
    yield from (("", *study["notes"]) if study["notes"] else ())
    yield ""
    yield from _decisions(study["decisions"])
    yield ""
    yield from _runs(study["runs"])
    yield ""
    yield f"Fitted step times: {study['step_times']['error']}."
    path = ", ".join(f"{name.removesuffix('_ms')} {value:.2f}" for name, value in study["http_path_ms"].items())
    yield f"Way between client and engine, in ms (`calibrate.http_path`): {path}."


def _rows(study: Mapping[str, Any]) -> Iterator[str]:
    yield "*At own speed* is no prediction: all steps are longer by the one factor by which those of the live run were,"
    yield "which shows what a machine busy with other jobs explains of an error."
    yield ""
    yield "| workload | figure | unit | live | live runs apart | predicted | ± | error | limit | | at own speed |"
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|---|--:|"
    for row in study["rows"]:
        unit, scale = _unit(row["figure"])
        values = [row[name] * scale for name in ("live", "live_spread", "predicted", "simulated_sd", "at_own_speed")]
        limit = "" if row["limit_percent"] is None else f"{row['limit_percent']:.1f} %"
        mark = "broken" if row["is_broken"] else ""
        live, spread, predicted, sd, own = (_number(value) for value in values)
        spread = spread if study["num_repeats"] > 1 else ""
        yield (
            f"| {row['workload']} | {row['figure']} | {unit} | {live} | {spread} | {predicted} | {sd} "
            f"| {row['error_percent']:+.2f} % | {limit} | {mark} | {own} |"
        )


def _unit(figure: str) -> tuple[str, float]:
    if figure.startswith(_MS):
        return "ms", 1e3
    return {"makespan": "s", "throughput": "tokens/s"}.get(figure, ""), 1.0


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _verdict(study: Mapping[str, Any]) -> Iterator[str]:
    judged = [row for row in study["rows"] if row["limit_percent"] is not None]
    broken = [row for row in judged if row["is_broken"]]
    num = len(judged)
    yield f"{len(broken)} of {num} limits are broken." if broken else f"All {num} limits are kept."
    if study["num_repeats"] > 1:
        inside = sum(abs(row["predicted"] - row["live"]) <= row["live_interval"] for row in judged)
        yield f"{inside} of the {num} predictions are where one more live run would be with 95 % (Student's t from the"
        yield f"{study['num_repeats']} live runs)."


def _decisions(decisions: list[Mapping[str, Any]]) -> Iterator[str]:
    same = sum(each["first_difference"] is None for each in decisions)
    yield "With the recorded arrivals and step times fed back (`sim.replay.ReplayExecutor`), the simulator gives"
    yield "the same requests the same tokens, in the same order, in every step of"
    yield f"{same} of {len(decisions)} runs ({sum(each['num_same'] for each in decisions):,} steps)."
    for each in decisions:
        if each["first_difference"] is not None:
            yield f"- {each['run']}: {each['first_difference']}"


def _runs(runs: list[Mapping[str, Any]]) -> Iterator[str]:
    yield (
        "| run | over at (UTC) | server | learned | requests "
        "| s | tokens/s | steps | preempted | cached prompt tokens | load average "
        "| others' cores | sent late p99 ms | steps late p99 / max ms | all steps, measured over fitted |"
    )
    yield "|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for run in runs:
        pace = run["pace"]
        late = "" if pace is None else f"{pace['late_p99_ms']:.2f} / {pace['late_max_ms']:.1f}"
        hits = f"{run['prefix_hit_tokens']:,} of {run['prefix_query_tokens']:,}" if run["prefix_query_tokens"] else ""
        yield (
            f"| {run['name']} | {run['date'].split(', ')[1].removesuffix(' UTC')} | {run['server']} "
            f"| {'yes' if run['is_learned'] else ''} | {run['num_requests']} "
            f"| {run['duration_s']:.1f} | {run['tokens_per_s']:.0f} | {run['num_steps']:,} | {run['num_preemptions']} "
            f"| {hits} | {run['load_average']:.1f} | {run['others_cores']:.2f} | {run['sent_late_p99_ms']:.2f} "
            f"| {late} | {run['speed_factor']:.4f} |"
        )
