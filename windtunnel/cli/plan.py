# ruff: noqa: ARG001 -- the flags are read from the context, all at once
"""``windtunnel plan``: the cheapest deployment that keeps the objectives."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.cli import options
from windtunnel.cli.errors import EXIT_INFEASIBLE, EXIT_SLO_BREACHED, usage_errors
from windtunnel.cli.output import emit, status_line
from windtunnel.cli.panels import flag
from windtunnel.cli.results import check_files, check_one_form, tell_written

if TYPE_CHECKING:
    from windtunnel.planning.plan import Plan

_CHOICE, _KNOBS, _WORKLOAD, _ASKED = "What may be bought", "What is tried", "Workload", "What must hold"
_SEARCH, _OUTPUT = "Search", "Output"
_SETTINGS = (
    *("router", "max_model_len", "block_size", "enable_prefix_caching", "engine", "dtype"),
    *("trace", "format", "on_bad_row", "start", "duration", "limit", "rate_scale"),
    *("num_prompts", "input_len", "output_len", "request_rate", "burstiness", "arrival"),
    *("slo", "goodput", "cost", "profile", "seed"),
)
"""Flags that are those of ``windtunnel simulate``: they set the scenario."""


def plan(
    ctx: typer.Context,
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="SCENARIO",
            help="A scenario file or the name of a bundled one: model, workload and objectives.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        flag(_CHOICE, "--model", metavar="NAME|PATH", help="Model; repeatable, where several would do."),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        flag(
            _CHOICE,
            "--gpu",
            metavar="NAME=PRICE",
            help="A card to choose from and the price of an hour of one; repeatable. Without prices the fewest win.",
        ),
    ] = None,
    power: Annotated[
        list[str] | None,
        flag(
            _CHOICE,
            "--power",
            metavar="NAME=[IDLE:]BUSY",
            help="Watts of a card with its share of the host; repeatable.",
        ),
    ] = None,
    currency: Annotated[str | None, options.currency(_CHOICE)] = None,
    gpus_per_host: Annotated[
        int | None, flag(_CHOICE, "--gpus-per-host", metavar="N", min=1, help="Cards of one host, if not 8.")
    ] = None,
    spare: Annotated[
        int | None,
        flag(_CHOICE, "--spare", metavar="N", min=0, help="Replicas bought beside those that are needed: 1 is N+1."),
    ] = None,
    tensor_parallel_size: Annotated[
        str | None,
        flag(_KNOBS, "--tensor-parallel-size", "--tp", "-tp", metavar="N,N,…", help="Sizes, if not 1, 2, 4 and 8."),
    ] = None,
    pipeline_parallel_size: Annotated[
        str | None, flag(_KNOBS, "--pipeline-parallel-size", "--pp", "-pp", metavar="N,N,…", help="Stages, if not 1.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, flag(_KNOBS, "--kv-cache-dtype", metavar="TYPE,…", help="Types of the KV cache, if not auto,fp8.")
    ] = None,
    max_num_seqs: Annotated[
        str | None, flag(_KNOBS, "--max-num-seqs", metavar="N,N,…", help="Seats of a replica.")
    ] = None,
    max_num_batched_tokens: Annotated[
        str | None, flag(_KNOBS, "--max-num-batched-tokens", metavar="N,N,…", help="Token budgets of a step: 2k,8k.")
    ] = None,
    gpu_memory_utilization: Annotated[
        str | None, flag(_KNOBS, "--gpu-memory-utilization", metavar="S,S,…", help="Shares of the memory.")
    ] = None,
    uncalibrated: Annotated[
        bool | None,
        flag(
            _KNOBS,
            "--uncalibrated/--no-uncalibrated",
            help="Try deployments without a profile, too; they are ranked apart.",
        ),
    ] = None,
    router: Annotated[
        str | None, flag(_KNOBS, "--router", metavar="NAME", help="Who serves the next request (docs/fleet.md).")
    ] = None,
    max_model_len: Annotated[
        str | None,
        flag(_KNOBS, "--max-model-len", metavar="N", help="Longest request, if not what the workload's longest asks."),
    ] = None,
    block_size: Annotated[str | None, options.block_size(_KNOBS)] = None,
    enable_prefix_caching: Annotated[bool | None, options.enable_prefix_caching(_KNOBS)] = None,
    dtype: Annotated[str | None, options.dtype(_KNOBS)] = None,
    engine: Annotated[
        str | None, flag(_KNOBS, "--engine", metavar="vllm-0.N", help="Release of vLLM whose rules apply.")
    ] = None,
    trace: Annotated[str | None, options.trace(_WORKLOAD)] = None,
    format: Annotated[  # noqa: A002 -- the flag's name
        str | None, options.trace_format(_WORKLOAD)
    ] = None,
    on_bad_row: Annotated[str | None, options.on_bad_row(_WORKLOAD)] = None,
    start: Annotated[
        str | None, flag(_WORKLOAD, "--start", metavar="TIME", help="Begin so far into the trace: 20m, 1h30m.")
    ] = None,
    duration: Annotated[str | None, options.duration(_WORKLOAD)] = None,
    limit: Annotated[str | None, options.limit(_WORKLOAD)] = None,
    rate_scale: Annotated[
        float | None, flag(_WORKLOAD, "--rate-scale", metavar="X", help="Replay the trace X times as fast.")
    ] = None,
    num_prompts: Annotated[str | None, options.num_prompts(_WORKLOAD)] = None,
    input_len: Annotated[str | None, options.input_len(_WORKLOAD)] = None,
    output_len: Annotated[str | None, options.output_len(_WORKLOAD)] = None,
    request_rate: Annotated[
        str | None, flag(_WORKLOAD, "--request-rate", "--rate", metavar="R", help="Requests per second.")
    ] = None,
    burstiness: Annotated[str | None, options.burstiness(_WORKLOAD)] = None,
    arrival: Annotated[str | None, options.arrival(_WORKLOAD)] = None,
    scale: Annotated[
        float, flag(_WORKLOAD, "--scale", metavar="X", help="Plan for X times the load, trace or synthetic.")
    ] = 1.0,
    growth: Annotated[
        str | None, flag(_WORKLOAD, "--growth", metavar="5%/month", help="How the load grows, for the months ahead.")
    ] = None,
    months: Annotated[
        int | None, flag(_WORKLOAD, "--months", metavar="N", min=1, max=120, help="How many months, if not 12.")
    ] = None,
    slo: Annotated[
        list[str] | None,
        flag(
            _ASKED,
            "--slo",
            metavar="LIMIT",
            help="Objective, such as 'ttft:p99<1s tpot:p95<50ms'. Repeatable; in place of the scenario's.",
        ),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        flag(_ASKED, "--goodput", metavar="METRIC:MS", help="What a good request is: ttft:500 tpot:50. Repeatable."),
    ] = None,
    cost: Annotated[str | None, options.cost(_SEARCH)] = None,
    profile: Annotated[
        str | None,
        flag(_SEARCH, "--profile", metavar="NAME|FILE", help="Price steps by this profile, whatever the candidate."),
    ] = None,
    seed: Annotated[str | None, options.scenario_seed(_SEARCH)] = None,
    replications: Annotated[
        int, flag(_SEARCH, "--replications", "--reps", metavar="N", min=1, max=100, help="Behind intervals, if not 5.")
    ] = 5,
    requests: Annotated[
        int, flag(_SEARCH, "--requests", metavar="N", min=100, help="Of a simulation in the search, if not 1500.")
    ] = 1500,
    jobs: Annotated[
        int | None,
        flag(_SEARCH, "--jobs", "-j", metavar="N", min=1, help="Processes that share the work; same answer."),
    ] = None,
    ray: Annotated[
        str | None, flag(_SEARCH, "--ray", metavar="auto|ADDRESS|local:N", help="Do the work on a Ray cluster.")
    ] = None,
    as_json: Annotated[bool, options.json_for_text(_OUTPUT)] = False,
    as_markdown: Annotated[bool, options.markdown_for_text(_OUTPUT)] = False,
    html: Annotated[Path | None, options.html_report(_OUTPUT)] = None,
    csv: Annotated[
        Path | None, flag(_OUTPUT, "--csv", metavar="FILE", help="Write one row a candidate that was simulated.")
    ] = None,
    parquet: Annotated[Path | None, options.parquet(_OUTPUT)] = None,
    save_scenario: Annotated[
        Path | None,
        flag(_OUTPUT, "--save-scenario", metavar="FILE", help="Write the recommended fleet for windtunnel simulate."),
    ] = None,
    force: Annotated[bool, options.force_scenario(_OUTPUT)] = False,
    quiet: Annotated[bool, flag(_OUTPUT, "--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Find the cheapest deployment that serves a workload within its objectives, and the runners-up.

    GPU, tensor and pipeline parallelism, replicas, max_num_seqs, max_num_batched_tokens, gpu_memory_utilization and
    the type of the KV cache are chosen; the answer says what binds, how much room there is, what it costs by the hour
    and by the million tokens, what happens when a replica fails, and how sure all of it is.  Prices are yours: none is
    bundled.  The exit code is 4 if vLLM starts with no candidate, 99 if none keeps the objectives.

    \b
    Examples:
      windtunnel plan --model llama-3.3-70b --trace azure.csv --rate-scale 10 --slo 'ttft:p99<2s tpot:p95<100ms'
                      --gpu h100-sxm=2.49 --gpu h200=3.50 --gpu a100-80gb-sxm=1.79 --html plan.html
      windtunnel plan chat-8b-h100 --gpu h100-sxm=2.49 --gpu l40s=0.86 --scale 4 --growth 5%/month --spare 1
      windtunnel plan chat-8b-h100 --gpu h100-sxm --tp 1,2 --max-num-seqs 64,256 --save-scenario fleet.toml
    """
    check_one_form(as_json=as_json, markdown=as_markdown)
    if parquet is not None and parquet.suffix != ".parquet":
        raise typer.BadParameter(f"{parquet} must end in .parquet", param_hint="--parquet")
    files = {"--html": html, "--csv": csv, "--parquet": parquet, "--save-scenario": save_scenario}
    check_files(files, (scenario, *(model or ()), trace, profile))
    if save_scenario is not None:
        from windtunnel.rundir import check_can_write_scenario

        check_can_write_scenario(save_scenario, force=force)
    found = _planned(ctx.params)
    if html is not None:
        found.report(html)
    for table in (csv, parquet):
        if table is not None:
            found.save_candidates(table)
    if save_scenario is not None and found.holds:
        found.save_scenario(save_scenario)
    tell_written((html, csv, parquet, save_scenario if found.holds else None), quiet=quiet)
    if as_json:
        emit(found.to_json())
    else:
        emit((found.markdown() if as_markdown else found.text()).rstrip("\n"))
    if not found.fits:
        raise typer.Exit(EXIT_INFEASIBLE)
    if not found.holds:
        raise typer.Exit(EXIT_SLO_BREACHED)


def _planned(params: Mapping[str, Any]) -> Plan:
    from windtunnel.cli.simulate import overrides
    from windtunnel.planning.plan import plan as make_plan

    say, close = status_line(str, quiet=bool(params["quiet"]), every_s=0.0)
    try:
        with usage_errors():
            return make_plan(
                params["scenario"],
                gpus=list(params["gpu"] or ()),
                power=list(params["power"] or ()),
                currency=params["currency"],
                models=list(params["model"] or ()),
                tensor_parallel_sizes=_counts("--tp", params["tensor_parallel_size"]),
                pipeline_parallel_sizes=_counts("--pp", params["pipeline_parallel_size"]),
                kv_cache_dtypes=_words("--kv-cache-dtype", params["kv_cache_dtype"]),
                max_num_seqs=_counts("--max-num-seqs", params["max_num_seqs"]),
                max_num_batched_tokens=_counts("--max-num-batched-tokens", params["max_num_batched_tokens"]),
                gpu_memory_utilizations=_shares(params["gpu_memory_utilization"]),
                gpus_per_host=params["gpus_per_host"],
                uncalibrated=params["uncalibrated"],
                spare_replicas=params["spare"],
                scale=params["scale"],
                growth=params["growth"],
                months=params["months"],
                replications=params["replications"],
                num_requests=params["requests"],
                jobs=params["jobs"],
                ray=params["ray"],
                tell=say,
                overrides=overrides({name: params[name] for name in _SETTINGS}),
                reproduce=_command_line(params),
            )
    finally:
        close()


def _words(flag: str, text: str | None) -> list[str] | None:
    if text is None:
        return None
    words = [part.strip() for part in text.split(",") if part.strip()]
    if not words:
        raise typer.BadParameter(
            f"{text!r} names nothing: give values with commas between, or leave it out", param_hint=flag
        )
    return words


def _counts(flag: str, text: str | None) -> list[int] | None:
    from windtunnel.scenarios.units import parse_count

    try:
        return None if text is None else [parse_count(part) for part in _words(flag, text) or ()]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}", param_hint=flag) from None


def _shares(text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in _words("--gpu-memory-utilization", text) or ()]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} must be shares such as 0.90,0.95", param_hint="--gpu-memory-utilization"
        ) from None


def _command_line(params: Mapping[str, Any]) -> str:
    """The command that asks the same again, without what does not change the answer."""
    words = ["windtunnel", "plan"]
    if params["scenario"] is not None:
        words.append(str(params["scenario"]))
    for name, value in params.items():
        if name in _NO_PART_OF_THE_ANSWER or value is None or value is False or value == _DEFAULTS.get(name):
            continue
        flag = "--" + name.replace("_", "-")
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [flag] if each is True else [flag, f"{each:g}" if isinstance(each, float) else str(each)]
    return shlex.join(words)


_DEFAULTS = {"scale": 1.0, "replications": 5, "requests": 1500}
_NO_PART_OF_THE_ANSWER = frozenset(
    {"scenario", "jobs", "ray", "as_json", "as_markdown", "html", "csv", "parquet", "save_scenario", "force", "quiet"}
)
