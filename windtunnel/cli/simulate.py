# ruff: noqa: ARG001 -- the flags are read from the context, all at once
"""``windtunnel simulate``: run a workload through a simulated deployment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from windtunnel.cli import options
from windtunnel.cli.errors import EXIT_SLO_BREACHED
from windtunnel.cli.output import emit, note, progress_bar, warn
from windtunnel.cli.panels import flag

if TYPE_CHECKING:
    from windtunnel.api import Run
    from windtunnel.scenarios.load import Override
    from windtunnel.scenarios.resolve import Resolved

_DEPLOYMENT, _ENGINE, _WORKLOAD = "Deployment", "Engine (vLLM's flags)", "Workload"
_RUN, _OUTPUT = "Run", "Output"


@dataclass(frozen=True, slots=True)
class Options:
    """What is done with the result."""

    as_json: bool
    output: Path | None
    html: Path | None
    force: bool
    quiet: bool
    dry_run: bool
    records_format: Literal["parquet", "csv"]


def simulate(
    ctx: typer.Context,
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="SCENARIO",
            help="A scenario file, or the name of a bundled one (windtunnel scenarios).",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str | None, options.model(_DEPLOYMENT)] = None,
    gpu: Annotated[
        str | None,
        flag(_DEPLOYMENT, "--gpu", metavar="NAME", help="GPU, by its name or a short one (windtunnel gpus)."),
    ] = None,
    tensor_parallel_size: Annotated[
        str | None,
        flag(_DEPLOYMENT, "--tensor-parallel-size", "--tp", "-tp", metavar="N", help="GPUs that one replica spans."),
    ] = None,
    gpu_memory_utilization: Annotated[float | None, options.gpu_memory_utilization(_DEPLOYMENT)] = None,
    dtype: Annotated[str | None, options.dtype(_DEPLOYMENT)] = None,
    kv_cache_dtype: Annotated[str | None, options.kv_cache_dtype(_DEPLOYMENT)] = None,
    num_gpu_blocks_override: Annotated[str | None, options.num_gpu_blocks_override(_DEPLOYMENT)] = None,
    kv_cache_memory_bytes: Annotated[str | None, options.kv_cache_memory_bytes(_DEPLOYMENT)] = None,
    usage_context: Annotated[
        str | None,
        flag(
            _DEPLOYMENT,
            "--usage-context",
            metavar="api_server|llm_class",
            help="Whose defaults: vllm serve or class LLM.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        flag(_DEPLOYMENT, "--engine", metavar="vllm-0.N", help="Version of vLLM whose defaults and rules apply."),
    ] = None,
    pipeline_parallel_size: Annotated[
        str | None,
        flag(_DEPLOYMENT, "--pipeline-parallel-size", "--pp", "-pp", metavar="N", help="Stages of one replica."),
    ] = None,
    data_parallel_size: Annotated[
        str | None,
        flag(_DEPLOYMENT, "--data-parallel-size", "--dp", "-dp", metavar="N", help="Replicas, behind one router."),
    ] = None,
    router: Annotated[
        str | None,
        flag(
            _DEPLOYMENT,
            "--router",
            metavar="NAME",
            help="Who serves the next request: vllm, round_robin, least_requests, least_kv, power_of_two, "
            "prefix_affinity, session or shared_queue.",
        ),
    ] = None,
    max_requests_per_replica: Annotated[
        str | None,
        flag(
            _DEPLOYMENT,
            "--max-requests-per-replica",
            metavar="N",
            help="Most requests that the router has at one replica; others wait before it.",
        ),
    ] = None,
    autoscaler: Annotated[
        str | None,
        flag(_DEPLOYMENT, "--autoscaler", metavar="SCALER", help="Grow and shrink the replicas' number; see below."),
    ] = None,
    fault: Annotated[
        list[str] | None,
        flag(_DEPLOYMENT, "--fault", metavar="FAULT", help="What goes wrong, and when; see below. Repeatable."),
    ] = None,
    on_crash: Annotated[
        str | None,
        flag(
            _DEPLOYMENT,
            "--on-crash",
            metavar="fail|retry|retry_unstarted",
            help="What becomes of requests whose replica is gone.",
        ),
    ] = None,
    max_num_seqs: Annotated[str | None, options.max_num_seqs(_ENGINE)] = None,
    max_num_batched_tokens: Annotated[str | None, options.max_num_batched_tokens(_ENGINE)] = None,
    max_model_len: Annotated[
        str | None, flag(_ENGINE, "--max-model-len", metavar="N", help="Longest prompt plus output, in tokens.")
    ] = None,
    block_size: Annotated[str | None, options.block_size(_ENGINE)] = None,
    enable_chunked_prefill: Annotated[bool | None, options.enable_chunked_prefill(_ENGINE)] = None,
    enable_prefix_caching: Annotated[bool | None, options.enable_prefix_caching(_ENGINE)] = None,
    long_prefill_token_threshold: Annotated[str | None, options.long_prefill_token_threshold(_ENGINE)] = None,
    long_prefill_token_threshold_adaptive: Annotated[
        bool | None,
        flag(
            _ENGINE,
            "--long-prefill-token-threshold-adaptive/--no-long-prefill-token-threshold-adaptive",
            help="Raise that threshold when few are there.",
        ),
    ] = None,
    scheduling_policy: Annotated[str | None, options.scheduling_policy(_ENGINE)] = None,
    watermark: Annotated[
        float | None, flag(_ENGINE, "--watermark", metavar="SHARE", help="Share of blocks an admission leaves free.")
    ] = None,
    max_num_active_seqs: Annotated[
        str | None, flag(_ENGINE, "--max-num-active-seqs", metavar="N", help="Fewer seats than --max-num-seqs.")
    ] = None,
    max_num_scheduled_tokens: Annotated[
        str | None,
        flag(_ENGINE, "--max-num-scheduled-tokens", metavar="N", help="Fewer tokens a step than the budget."),
    ] = None,
    scheduler_reserve_full_isl: Annotated[
        bool | None,
        flag(
            _ENGINE,
            "--scheduler-reserve-full-isl/--no-scheduler-reserve-full-isl",
            help="Admit only what fits with its whole prompt.",
        ),
    ] = None,
    async_scheduling: Annotated[
        bool | None,
        flag(
            _ENGINE,
            "--async-scheduling/--no-async-scheduling",
            help="Decide a step while the one before still runs (vLLM's default on GPUs).",
        ),
    ] = None,
    max_num_queued_reqs: Annotated[
        str | None,
        flag(_ENGINE, "--max-num-queued-reqs", metavar="N", help="Most requests in the server; more are rejected."),
    ] = None,
    max_num_queued_tokens: Annotated[
        str | None,
        flag(
            _ENGINE, "--max-num-queued-tokens", metavar="N", help="Prompt tokens in prefill from which on it rejects."
        ),
    ] = None,
    batching: Annotated[
        str | None,
        flag(_ENGINE, "--batching", metavar="POLICY", help="Another policy than continuous batching; see below."),
    ] = None,
    speculative_config: Annotated[
        str | None,
        flag(
            _ENGINE, "--speculative-config", metavar="DRAFTS", help="Speculative decoding; see below, or vLLM's JSON."
        ),
    ] = None,
    trace: Annotated[str | None, options.trace(_WORKLOAD)] = None,
    format: Annotated[  # noqa: A002 -- the flag's name
        str | None, options.trace_format(_WORKLOAD)
    ] = None,
    time_unit: Annotated[
        str | None, flag(_WORKLOAD, "--time-unit", metavar="UNIT", help="Unit of its times, if not to be recognised.")
    ] = None,
    start: Annotated[
        str | None, flag(_WORKLOAD, "--start", metavar="TIME", help="Begin so far into the trace: 20m, 90s, 1h30m.")
    ] = None,
    duration: Annotated[str | None, options.duration(_WORKLOAD)] = None,
    limit: Annotated[str | None, options.limit(_WORKLOAD)] = None,
    rate_scale: Annotated[
        float | None, flag(_WORKLOAD, "--rate-scale", metavar="X", help="Replay X times as fast.")
    ] = None,
    on_bad_row: Annotated[str | None, options.on_bad_row(_WORKLOAD)] = None,
    chunk_tokens: Annotated[
        str | None, flag(_WORKLOAD, "--chunk-tokens", metavar="N", help="Mooncake: tokens in a hashed block.")
    ] = None,
    trace_model: Annotated[
        str | None, flag(_WORKLOAD, "--trace-model", metavar="NAME", help="BurstGPT: only requests of this model.")
    ] = None,
    trace_run: Annotated[
        str | None,
        flag(_WORKLOAD, "--trace-run", metavar="N", help="vllm bench serve: which run of the file, from 0."),
    ] = None,
    all_turns: Annotated[
        bool | None,
        flag(_WORKLOAD, "--all-turns/--no-all-turns", help="ShareGPT: whole conversations, not just first turns."),
    ] = None,
    request_timeout: Annotated[
        str | None,
        flag(_WORKLOAD, "--request-timeout", metavar="TIME", help="The client gives up after so long: 30s, 2m."),
    ] = None,
    num_prompts: Annotated[str | None, options.num_prompts(_WORKLOAD)] = None,
    input_len: Annotated[str | None, options.input_len(_WORKLOAD)] = None,
    output_len: Annotated[str | None, options.output_len(_WORKLOAD)] = None,
    request_rate: Annotated[
        str | None,
        flag(_WORKLOAD, "--request-rate", "--rate", metavar="R", help="Requests per second; inf is all at once."),
    ] = None,
    burstiness: Annotated[str | None, options.burstiness(_WORKLOAD)] = None,
    arrival: Annotated[str | None, options.arrival(_WORKLOAD)] = None,
    max_concurrency: Annotated[
        str | None, flag(_WORKLOAD, "--max-concurrency", metavar="N", help="Most requests in flight (closed loop).")
    ] = None,
    cost: Annotated[str | None, options.cost(_RUN)] = None,
    profile: Annotated[
        str | None,
        flag(
            _RUN,
            "--profile",
            metavar="NAME|FILE",
            help="Price steps by this profile: a bundled one (windtunnel profiles list), or a profile.json.",
        ),
    ] = None,
    noise: Annotated[
        bool | None,
        flag(_RUN, "--noise/--no-noise", help="Scatter the steps' times by what the profile states."),
    ] = None,
    slo: Annotated[
        list[str] | None,
        flag(
            _RUN,
            "--slo",
            metavar="LIMIT",
            help="Objective, such as 'ttft:p99<500ms'; missed: exit code 99. Repeatable; the objectives given here "
            "take the place of the scenario's.",
        ),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        flag(
            _RUN,
            "--goodput",
            metavar="METRIC:MS",
            help="Limit per request, such as ttft:500 or tpot:50. Repeatable; in place of the scenario's.",
        ),
    ] = None,
    seed: Annotated[str | None, options.scenario_seed(_RUN)] = None,
    horizon: Annotated[
        str | None, flag(_RUN, "--horizon", metavar="TIME", help="Stop after so much simulated time.")
    ] = None,
    saturation: Annotated[
        bool | None,
        flag(
            _RUN,
            "--saturation/--no-saturation",
            help="Measure the highest throughput too, for the utilisation; done by default where requests come at a "
            "rate of their own.",
        ),
    ] = None,
    gpu_price: Annotated[
        list[str] | None,
        flag(
            _RUN,
            "--gpu-price",
            metavar="PRICE",
            help="Price of one GPU for an hour, for the cost of the run: 2.49, or h100-sxm=2.49 (repeatable).",
        ),
    ] = None,
    currency: Annotated[str | None, options.currency(_RUN)] = None,
    idle_watts: Annotated[
        list[str] | None,
        flag(_RUN, "--idle-watts", metavar="W", help="Power of one GPU while no step runs, for the energy: 120."),
    ] = None,
    busy_watts: Annotated[
        list[str] | None,
        flag(_RUN, "--busy-watts", metavar="W", help="Power of one GPU while a step runs: 650, or h100-sxm=650."),
    ] = None,
    as_json: Annotated[bool, flag(_OUTPUT, "--json", help="Print the summary as JSON.")] = False,
    output: Annotated[
        Path | None, flag(_OUTPUT, "--output", "-o", metavar="DIR", help="Write records and summary into this folder.")
    ] = None,
    records_format: Annotated[
        str | None,
        flag(_OUTPUT, "--records-format", metavar="parquet|csv", help="Format of the records in DIR, if not parquet."),
    ] = None,
    html: Annotated[Path | None, options.html_report(_OUTPUT)] = None,
    force: Annotated[bool, options.force(_OUTPUT)] = False,
    quiet: Annotated[bool, flag(_OUTPUT, "--quiet", "-q", help="No progress bar and no remarks.")] = False,
    dry_run: Annotated[
        bool, flag(_OUTPUT, "--dry-run", help="Show every setting with its source and the memory plan; run nothing.")
    ] = False,
) -> None:
    """Run a workload through a simulated deployment and say how it went.

    The scenario says what runs on what; every flag overrides it, and flags alone do as well.  Names, defaults and
    meaning of the flags are those of vllm serve and vllm bench serve; underscores may stand for dashes.  Numbers may
    end in k (1000) or K (1024), times in ms, s, m or h, sizes in GB (10^9 bytes) or GiB (2^30 bytes).

    \b
    DIST     a number of tokens, uniform:low=100,high=900, lognormal:mean=512,sigma=0.8,max=8192,
             exponential:mean=256, geometric:mean=256 or quantiles:p50=200,p90=600,p99=1500
    PROCESS  poisson:rate=5, gamma:rate=5,burstiness=0.5, constant:rate=5, on_off:rate=20,on_s=10,off_s=50
             or ramp:start_rate=1,end_rate=20
    COST     auto (the default: the bundled profile of this model on this GPU, else the roofline), roofline,
             constant:step_s=10ms, affine:base_s=5ms,token_s=20us, profile:path=FILE or profile:name=NAME
    POLICY   continuous (the default), static:batch_size=8,batch_timeout=50ms, swap:swap_space=4GiB,
             dynamic:max_batch_size=16,max_queue_delay_microseconds=500 or dynamic:config=config.pbtxt
    SCALER   waiting:target=4,max_replicas=8 or concurrency:target=40,... or kv_usage:target=0.7,... with
             min_replicas=1, start_up=2m, down_stabilization=5m and more (docs/fleet.md)
    FAULT    crash:replica=1,at=5m,restart_after=2m or slow:replica=0,at=5m,duration=10m,factor=2
    DRAFTS   eagle3:num_speculative_tokens=3,acceptance=0.7 (a rate for each draft, or 0.8/0.6/0.4 for the
             first, second, third), ngram:..., mtp:..., draft_model:draft_model=NAME,...

    \b
    Examples:
      windtunnel simulate chat-8b-h100
      windtunnel simulate chat-8b-h100 --max-num-seqs 64 --slo 'ttft:p99<500ms' -o runs/64
      windtunnel simulate chat-8b-h100 --profile measured.json --noise
      windtunnel simulate --model llama-3.1-8b --gpu h100-sxm --trace trace.csv --duration 20m --rate-scale 4
      windtunnel simulate --model llama-3.1-8b --gpu l40s --num-prompts 1000 --request-rate 5
                          --input-len lognormal:mean=512,sigma=0.8 --output-len 256 --dry-run
    """
    if records_format is not None and output is None:
        raise typer.BadParameter("it needs a folder to write to: give -o DIR too", param_hint="--records-format")
    options = Options(as_json, output, html, force, quiet, dry_run, _checked_format(records_format or "parquet"))
    own = {"scenario", *(item.name for item in fields(Options))}
    run_simulation(scenario, {name: value for name, value in ctx.params.items() if name not in own}, options)


def run_simulation(scenario: str | None, flags: Mapping[str, Any], options: Options) -> None:
    """Resolve, run, write and print; raises typer.Exit(99) if an objective was missed."""
    from windtunnel.scenarios.load import load_scenario
    from windtunnel.scenarios.resolve import resolve

    loaded = load_scenario(scenario, overrides(flags))
    if options.dry_run:
        _print_plan(resolve(loaded), options)
        return
    check_outputs(options, (scenario, *flags.values()))
    resolved = resolve(loaded)
    _tell(resolved, options)
    run = _execute(resolved, options)
    for warning in run.context.warnings[len(resolved.warnings) :]:
        warn(warning)
    _write(run, options)
    _print(run, options)
    if run.slo_passed is False:
        raise typer.Exit(EXIT_SLO_BREACHED)


def overrides(flags: Mapping[str, Any]) -> dict[str, Override]:
    """The flags that were given, under the keys of the scenario file."""
    from windtunnel.scenarios.flags import KEY_OF_PARAMETER
    from windtunnel.scenarios.load import Override

    return {
        KEY_OF_PARAMETER.get(name, name): Override(
            list(value) if isinstance(value, tuple) else value, _flag_name(name, value)
        )
        for name, value in flags.items()
        if value is not None and value not in ((), [])
    }


def _flag_name(parameter: str, value: Any) -> str:
    return ("--no-" if value is False else "--") + parameter.replace("_", "-")


def check_outputs(options: Options, inputs: Iterable[object] = ()) -> None:
    """Find out that something cannot be written, or is one of the inputs, before the simulation, not after it."""
    from windtunnel.rundir import check_can_write, check_can_write_file

    if options.output is not None:
        check_can_write(options.output, force=options.force)
    if options.html is not None:
        check_can_write_file(options.html, inputs=inputs)
    if options.output is not None and options.html is not None:
        _check_apart(options.output, options.html)


def _check_apart(folder: Path, file: Path) -> None:
    from windtunnel.rundir import OutputError

    if file.absolute() in (folder.absolute(), *folder.absolute().parents):
        raise OutputError(f"--html {file} is a file, but -o {folder} makes it a folder: give them different names")


def _checked_format(name: str) -> Literal["parquet", "csv"]:
    if name == "parquet":
        return "parquet"
    if name == "csv":
        return "csv"
    raise typer.BadParameter(f"{name!r} is neither parquet nor csv", param_hint="--records-format")


def _print_plan(resolved: Resolved, options: Options) -> None:
    from windtunnel.cli.dry_run import plan_text
    from windtunnel.rundir import to_json

    emit(to_json(resolved.describe()) if options.as_json else plan_text(resolved, with_notes=not options.quiet))


def _tell(resolved: Resolved, options: Options) -> None:
    for warning in resolved.warnings:
        warn(warning)
    if not options.quiet:
        for remark in resolved.notes:
            note(remark)


def _execute(resolved: Resolved, options: Options) -> Run:
    from windtunnel.api import execute

    progress, close = progress_bar("simulating", options.quiet)
    try:
        return execute(resolved, progress=progress)
    finally:
        close()


def _write(run: Run, options: Options) -> None:
    if options.output is not None:
        run.save(options.output, force=options.force, records_format=options.records_format)
    if options.html is not None:
        run.report(options.html)


def _print(run: Run, options: Options) -> None:
    from windtunnel.rundir import to_json

    emit(to_json(run.summary) if options.as_json else run.text().rstrip("\n"))
