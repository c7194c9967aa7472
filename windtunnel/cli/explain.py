"""``windtunnel explain``: why a result is as it is, and which knob to turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windtunnel.cli import options
from windtunnel.cli.errors import EXIT_SLO_BREACHED
from windtunnel.cli.output import emit
from windtunnel.cli.panels import flag
from windtunnel.cli.results import check_one_form

if TYPE_CHECKING:
    from windtunnel.calibrate.explain import Explanation, Facts
    from windtunnel.calibrate.live.observed import ObservedRun
    from windtunnel.sim.records import Records

_KNOWN, _OUTPUT = "What is known besides the result", "Output"


class FailOn(StrEnum):
    """Least severity that makes the exit code 99."""

    WEAK = "weak"
    LIMIT = "limit"
    MISLEADING = "misleading"
    INVALID = "invalid"


def explain(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULT...",
            help="Results of vllm bench serve, guidellm, aiperf, genai-perf or LLMPerf, saved live runs, or folders "
            "of simulated runs; several in the order in which they were made.",
            show_default=False,
        ),
    ],
    log: Annotated[
        Path | None, flag(_KNOWN, "--log", metavar="FILE", help="The server's log: flags, pool and periodic lines.")
    ] = None,
    metrics: Annotated[
        Path | None,
        flag(_KNOWN, "--metrics", metavar="FILE", help="Text of /metrics, or Prometheus' JSON of a range query."),
    ] = None,
    max_num_seqs: Annotated[
        int | None, flag(_KNOWN, "--max-num-seqs", metavar="N", help="Seats of one engine.", min=1)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, flag(_KNOWN, "--max-num-batched-tokens", metavar="N", help="Token budget of a step.", min=1)
    ] = None,
    kv_cache_tokens: Annotated[
        int | None, flag(_KNOWN, "--kv-cache-tokens", metavar="N", help="KV pool of one engine.", min=1)
    ] = None,
    request_rate: Annotated[
        float | None,
        flag(_KNOWN, "--request-rate", metavar="R", help="Requests a second that the client was to send.", min=0),
    ] = None,
    max_concurrency: Annotated[
        int | None,
        flag(_KNOWN, "--max-concurrency", metavar="N", help="Requests in flight that the client was to hold.", min=1),
    ] = None,
    shared_prefix_share: Annotated[
        float | None,
        flag(
            _KNOWN,
            "--shared-prefix-share",
            metavar="X",
            help="Share of the prompt tokens that the workload itself repeats (0 for random prompts): more hits than "
            "that are of an earlier run.",
            min=0,
            max=1,
        ),
    ] = None,
    max_prefill: Annotated[
        float | None,
        flag(
            _KNOWN,
            "--max-prefill",
            metavar="TOKENS/S",
            help="Prompt tokens a second that the deployment computes at most: peak FLOP/s / (2 x active parameters).",
            min=0.001,
        ),
    ] = None,
    queue_ms: Annotated[
        float | None, flag(_KNOWN, "--queue-ms", metavar="MS", help="Mean time in the server's queue (Triton).", min=0)
    ] = None,
    compute_ms: Annotated[
        float | None, flag(_KNOWN, "--compute-ms", metavar="MS", help="Mean time of computing a batch.", min=0)
    ] = None,
    batch_size: Annotated[
        float | None,
        flag(_KNOWN, "--batch-size", metavar="X", help="Mean batch: inferences over executions (Triton).", min=0),
    ] = None,
    fail_on: Annotated[
        FailOn | None,
        flag(_OUTPUT, "--fail-on", help="Exit with code 99 at a finding of this severity or a worse one."),
    ] = None,
    as_json: Annotated[bool, options.as_json(_OUTPUT)] = False,
    markdown: Annotated[bool, flag(_OUTPUT, "--markdown", help="Print Markdown.")] = False,
) -> None:
    """Say what is wrong with a result or binds in it, with the numbers and the knob to turn, most important first.

    Findings alone are no failure: the exit code is 0 unless --fail-on says otherwise.

    \b
    Examples:
      windtunnel explain bench.json --log vllm.log
      windtunnel explain runs/64
      windtunnel explain first.json second.json --shared-prefix-share 0 --fail-on misleading
    """
    from windtunnel.calibrate.explain import Facts, Severity, explain_together

    check_one_form(as_json=as_json, markdown=markdown)
    given = Facts(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_tokens=kv_cache_tokens,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        shared_prefix_share=shared_prefix_share,
        max_prefill_tokens_per_s=max_prefill,
        queue_s=None if queue_ms is None else queue_ms / 1e3,
        compute_s=None if compute_ms is None else compute_ms / 1e3,
        mean_batch_size=batch_size,
    )
    runs = [loaded for path in results for loaded in _runs(path, given)]
    if log is not None or metrics is not None:
        runs = [_with_server(run, facts, log, metrics) for run, facts in runs]
    explained = explain_together([run for run, _ in runs], [facts for _, facts in runs])
    if as_json:
        from windtunnel.rundir import to_json

        emit(to_json({"schema_version": 1, "results": [each.to_dict() for each in explained]}))
    else:
        emit("\n\n".join("\n".join(_markdown(each) if markdown else _text(each)) for each in explained))
    worst = max((int(each.worst or 0) for each in explained), default=0)
    if fail_on is not None and worst >= Severity[fail_on.name]:
        raise typer.Exit(EXIT_SLO_BREACHED)


def _runs(path: Path, given: Facts) -> list[tuple[ObservedRun, Facts]]:
    """All runs in a result, with what is known besides each."""
    if path.is_dir():
        return [_simulated(path, given)]
    from windtunnel.calibrate.live.imports import read_results

    return [(run, given) for run in read_results(path)]


def _simulated(path: Path, given: Facts) -> tuple[ObservedRun, Facts]:
    from windtunnel.api import load_run
    from windtunnel.calibrate.explain_sources import facts_of_records
    from windtunnel.calibrate.live.observed_metrics import observed_from_records

    run = load_run(path)
    known = facts_of_records(run.records, _wait_shares(run.records))
    told = {name: getattr(given, name) for name in given.__slots__ if getattr(given, name) not in (None, (), False)}
    return observed_from_records(run.records, run.workload, name=str(path)), replace(known, **told)


def _wait_shares(records: Records) -> Mapping[str, float]:
    from windtunnel.reports.causes import shares_of_waiting

    return {cause.name.lower(): share for cause, share in shares_of_waiting(records).items()}


def _with_server(run: ObservedRun, facts: Facts, log: Path | None, metrics: Path | None) -> tuple[ObservedRun, Facts]:
    from windtunnel.calibrate.explain_sources import add_server_log, counted_since_start
    from windtunnel.calibrate.live.metrics import add_saved_metrics
    from windtunnel.calibrate.live.reading import UnreadableResult

    try:
        if metrics is not None:
            text = metrics.read_text("utf-8", errors="replace")
            run = add_saved_metrics(run, text, name=str(metrics))
            facts = replace(facts, counted_since_start=counted_since_start(text, name=str(metrics)))
        if log is not None:
            run = add_server_log(run, log.read_text("utf-8", errors="replace"), name=str(log))
    except ValueError as error:
        raise UnreadableResult(str(error)) from None
    return run, facts


def _text(explained: Explanation) -> Iterator[str]:
    """Numbered findings, then what was measured, remarked and could not be checked."""
    yield f"{explained.name} ({explained.source}): {_headline(explained)}"
    for number, finding in enumerate(explained.findings, 1):
        yield ""
        yield f"{number}. [{finding.severity.name.lower()}] {finding.title}"
        yield from _wrapped(finding.sentence, "   ")
        yield from _wrapped(f"-> {finding.knob}", "   ")
    for title, lines in (("Seen", explained.remarks), ("Not checked, for want of", explained.not_checked)):
        if lines:
            yield ""
            yield f"{title}:"
            for line in lines:
                yield from _wrapped(line, "  ", "- ")
    yield ""
    yield from _measures(explained)


def _headline(explained: Explanation) -> str:
    number = len(explained.findings)
    return (
        explained.verdict if not number else f"{number} finding{'s' if number > 1 else ''}, first: {explained.verdict}"
    )


def _measures(explained: Explanation) -> Iterator[str]:
    from windtunnel.calibrate.explain import describe

    known = {name: value for name, value in explained.measures.items() if value is not None}
    width = max((len(name) for name in known), default=0)
    for name, value in known.items():
        yield f"{name:{width}}  {describe(name, value)}"


def _wrapped(text: str, indent: str, mark: str = "") -> Sequence[str]:
    import textwrap

    later = indent + " " * len(mark)
    return textwrap.wrap(text, 100, initial_indent=indent + mark, subsequent_indent=later, break_on_hyphens=False)


def _markdown(explained: Explanation) -> Iterator[str]:
    from windtunnel.calibrate.explain import describe

    yield f"### {explained.name}"
    yield ""
    yield f"**{_headline(explained)}**"
    if explained.findings:
        yield ""
    for number, finding in enumerate(explained.findings, 1):
        knob = finding.knob.replace("|", "\\|")
        yield f"{number}. **{finding.title}** ({finding.severity.name.lower()}). {finding.sentence} *Turn:* {knob}."
    if explained.remarks:
        yield ""
        yield from (f"- {line}" for line in explained.remarks)
    known = {name: value for name, value in explained.measures.items() if value is not None}
    if known:
        yield ""
        yield "| | |"
        yield "|---|---|"
        yield from (f"| {name} | {describe(name, value)} |" for name, value in known.items())
