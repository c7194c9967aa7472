# ruff: noqa: ARG001 -- the flags are read from the context, all at once
"""``windtunnel validate``: a prediction beside a live run, how far off it is, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from windtunnel.cli import options
from windtunnel.cli.errors import EXIT_SLO_BREACHED
from windtunnel.cli.output import emit, note, warn
from windtunnel.cli.panels import flag
from windtunnel.cli.simulate import Options, overrides
from windtunnel.cli.simulate import simulate as simulate_command

if TYPE_CHECKING:
    from windtunnel.validation import Validation
    from windtunnel.validation_inputs import Asked

_LIVE, _CLIENT, _VERDICT, _OUTPUT = "Live run (give one of three)", "Load client", "Verdict", "Output"
_NOT_TAKEN = ("horizon", "saturation", "goodput", "slo", "dry_run", "records_format")
"""Flags of simulate that mean nothing here."""
_OWN = "own_parameters"
F = TypeVar("F", bound=Callable[..., Any])


def _with_flags_of_simulate(function: F) -> F:
    """Let the command take the flags of ``windtunnel simulate``, too, as further keyword arguments."""
    own = [
        each
        for each in inspect.signature(function, eval_str=True).parameters.values()
        if each.kind is not each.VAR_KEYWORD
    ]
    names = {each.name for each in own}
    theirs = inspect.signature(simulate_command, eval_str=True).parameters
    added = [each for name, each in theirs.items() if name not in names and name not in _NOT_TAKEN]
    parameters = [*own, *added]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {each.name: each.annotation for each in parameters}
    setattr(function, _OWN, names)
    return function


@_with_flags_of_simulate
def validate(
    ctx: typer.Context,
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="SCENARIO",
            help="What is simulated: a scenario file, or the name of a bundled one; flags alone do as well.",
            show_default=False,
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        flag(_LIVE, "--endpoint", metavar="URL", help="A server that runs, http://HOST:PORT: it is loaded now."),
    ] = None,
    bench: Annotated[
        Path | None,
        flag(
            _LIVE,
            "--bench",
            metavar="FILE",
            help="A result that exists: of vllm bench serve, guidellm, aiperf, genai-perf, LLMPerf, or ours.",
        ),
    ] = None,
    executor: Annotated[
        str | None,
        flag(_LIVE, "--executor", metavar="torch|triton", help="Our own engine, computing in this process."),
    ] = None,
    repeats: Annotated[
        int, flag(_LIVE, "--repeats", metavar="N", min=1, help="Live runs; from 2 on their spread is shown, too.")
    ] = 1,
    bench_run: Annotated[
        int | None, flag(_LIVE, "--bench-run", metavar="N", min=0, help="Which run of the file, from 0.")
    ] = None,
    log: Annotated[
        Path | None, flag(_LIVE, "--log", metavar="FILE", help="With --bench: the log of the server's start.")
    ] = None,
    metrics: Annotated[
        Path | None,
        flag(_LIVE, "--metrics", metavar="FILE", help="With --bench: its /metrics, or Prometheus' JSON, saved."),
    ] = None,
    recording: Annotated[
        Path | None,
        flag(_LIVE, "--recording", metavar="FILE", help="Steps that RecordingScheduler recorded in the server."),
    ] = None,
    clock: Annotated[
        str | None,
        flag(_LIVE, "--clock", metavar="wall|cpu", help="With --executor torch: what a step's time is."),
    ] = None,
    as_planned: Annotated[
        bool,
        flag(_LIVE, "--as-planned", help="Predict from the flags alone, whatever the server says of its KV pool."),
    ] = False,
    served_model_name: Annotated[
        str | None,
        flag(_CLIENT, "--served-model-name", metavar="NAME", help="Model to ask the server for, if not its first."),
    ] = None,
    api_endpoint: Annotated[
        str | None,
        flag(_CLIENT, "--api-endpoint", metavar="PATH", help="/v1/completions (the default) or /v1/chat/completions."),
    ] = None,
    text_prompts: Annotated[
        bool, flag(_CLIENT, "--text-prompts", help="Send text, not token ids; lengths are then about right only.")
    ] = False,
    max_token_id: Annotated[
        int | None,
        flag(_CLIENT, "--max-token-id", metavar="N", min=102, help="Draw prompts from token ids below; 30000."),
    ] = None,
    api_key: Annotated[str | None, flag(_CLIENT, "--api-key", metavar="KEY", help="Sent as a bearer token.")] = None,
    num_warmup_requests: Annotated[
        int | None,
        flag(_CLIENT, "--num-warmups", metavar="N", min=0, help="Requests before the run that do not count; 2."),
    ] = None,
    scrape_interval: Annotated[
        float | None,
        flag(_CLIENT, "--scrape-interval", metavar="S", min=0, help="Seconds between looks at /metrics; 1."),
    ] = None,
    max_seconds: Annotated[
        float | None, flag(_CLIENT, "--max-seconds", metavar="S", help="Cut a live run off after so long.")
    ] = None,
    plain_openai: Annotated[
        bool,
        flag(_CLIENT, "--plain-openai", help="Send no fields of vLLM's own (ignore_eos, min_tokens, cache_salt)."),
    ] = False,
    max_error: Annotated[
        list[str] | None,
        flag(
            _VERDICT,
            "--max-error",
            metavar="LIMITS",
            help="Largest errors, such as 'throughput<2% ttft:mean<4% e2el:p95<8%'; missed: exit code 99. Repeatable.",
        ),
    ] = None,
    attribution: Annotated[
        bool,
        flag(_VERDICT, "--attribution/--no-attribution", help="Look for what explains the error (more simulations)."),
    ] = True,
    as_json: Annotated[bool, flag(_OUTPUT, "--json", help="Print everything as JSON.")] = False,
    html: Annotated[
        Path | None, flag(_OUTPUT, "--html", metavar="FILE", help="Write one self-contained HTML file with figures.")
    ] = None,
    output: Annotated[
        Path | None,
        flag(_OUTPUT, "--output", "-o", metavar="DIR", help="Write the live runs, the simulated one and the verdict."),
    ] = None,
    force: Annotated[bool, options.force(_OUTPUT)] = False,
    quiet: Annotated[bool, options.quiet(_OUTPUT)] = False,
    **simulated: Any,
) -> None:
    """Lay a prediction beside what really happened: the error in every number, the verdict, and why.

    Deployment, workload and cost model are given as for windtunnel simulate.  With --endpoint the workload is run
    against that server and then simulated; with --bench the requests are those of the result.  The KV pool and the
    limits that the server, its log or its metrics tell are used in the simulation, unless --as-planned.  Without
    --cost, --profile or --gpu, --executor measures step times in a run of its own first.

    \b
    LIMITS   METRIC<PERCENT or METRIC:STATISTIC<PERCENT, apart by spaces; metrics are throughput (requests, output,
             total), makespan, ttft, tpot, itl, e2el (mean, p50, p90, p95, p99), preemptions, prefix_hits, kv_usage,
             running and waiting (mean, peak, over_time); without a statistic it holds for each of them

    \b
    Examples:
      windtunnel validate chat-8b-h100 --endpoint http://127.0.0.1:8000 --num-prompts 300 --repeats 3 --html v.html
      windtunnel validate --model llama-3.1-8b --gpu h100 --bench result.json --log vllm.log --metrics metrics.txt
      windtunnel validate --model ./tiny-llama --executor torch --clock cpu --num-prompts 40 --input-len 64
                          --output-len 32 --max-error 'e2el:mean<5%'
    """
    asked = _asked(ctx.params)
    _check_outputs(output, html, force=force, inputs=_read(ctx.params))
    validation = _carried_out(ctx, scenario, asked, quiet=quiet)
    if output is not None:
        validation.save(output, force=force)
    if html is not None:
        validation.report(html)
    _print(validation, as_json=as_json)
    if validation.passed is False:
        raise typer.Exit(EXIT_SLO_BREACHED)


def _asked(given: dict[str, Any]) -> Asked:
    from windtunnel.calibrate.live.prompts import DEFAULT_TOKEN_IDS
    from windtunnel.validation_inputs import Asked, ValidationError

    client = {
        "model": given["served_model_name"],
        "endpoint": given["api_endpoint"],
        "prompt_kind": "text" if given["text_prompts"] or "chat" in (given["api_endpoint"] or "") else None,
        "token_ids": None if given["max_token_id"] is None else (DEFAULT_TOKEN_IDS[0], given["max_token_id"]),
        "api_key": given["api_key"],
        "num_warmup_requests": given["num_warmup_requests"],
        "scrape_interval_s": given["scrape_interval"],
        "max_seconds": given["max_seconds"],
        "vllm_extensions": False if given["plain_openai"] else None,
    }
    try:
        return Asked(
            endpoint=given["endpoint"],
            bench=given["bench"],
            executor=given["executor"],
            client={key: value for key, value in client.items() if value is not None},
            bench_run=given["bench_run"],
            log=given["log"],
            metrics=given["metrics"],
            clock=given["clock"] or "wall",
            repeats=given["repeats"],
            as_planned=given["as_planned"],
            recording=given["recording"],
            limits=_limits(given["max_error"] or ()),
            attributes=given["attribution"],
        )
    except ValidationError as error:
        raise typer.BadParameter(str(error)) from None


def _limits(texts: Any) -> Any:
    from windtunnel.calibrate.validation import parse_limits

    try:
        return tuple(limit for text in texts for limit in parse_limits(text))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-error") from None


def _read(given: dict[str, Any]) -> list[object]:
    """Whatever may be a file to read."""
    own = {name: value for name, value in given.items() if name not in ("output", "html")}
    return [item for value in own.values() for item in (value if isinstance(value, list | tuple) else [value])]


def _check_outputs(output: Path | None, html: Path | None, *, force: bool, inputs: Iterable[object]) -> None:
    """Find out that something cannot be written, or is one of the inputs, before the live run, not after it."""
    from windtunnel.rundir import check_can_write_file
    from windtunnel.validation import check_folder

    if output is not None:
        check_folder(output, force=force)
    if html is not None:
        check_can_write_file(html, inputs=inputs)


def _carried_out(ctx: typer.Context, scenario: str | None, asked: Asked, *, quiet: bool) -> Validation:
    from windtunnel.validation import carry_out

    own = getattr(validate, _OWN) | {item.name for item in fields(Options)}
    flags = {name: value for name, value in ctx.params.items() if name not in own}
    tell = None if quiet else note
    validation = carry_out(scenario, overrides(flags), asked, tell=tell)
    for warning in validation.run.context.warnings:
        warn(warning)
    return validation


def _print(validation: Validation, *, as_json: bool) -> None:
    from windtunnel.rundir import to_json

    emit(to_json(validation.to_dict()) if as_json else validation.text().rstrip("\n"))
