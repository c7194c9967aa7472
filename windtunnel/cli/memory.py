# ruff: noqa: ARG001 -- the flags are read from the context, all at once
"""``windtunnel memory``: what gpu_memory_utilization buys, and whether vLLM starts."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.cli import options
from windtunnel.cli.errors import EXIT_INFEASIBLE, usage_errors
from windtunnel.cli.output import emit, note
from windtunnel.cli.panels import flag
from windtunnel.cli.results import check_files, check_one_form

if TYPE_CHECKING:
    from windtunnel.memory import MemoryReport, MemorySweep

_DEPLOYMENT, _ENGINE, _TRUTH, _OUTPUT = "Deployment", "Engine (vLLM's flags)", "A real server", "Output"
_NOT_SETTINGS = (
    "mean_tokens",
    "from_log",
    "from_metrics",
    "from_deployment",
    "correction",
    "save_correction",
    "as_json",
    "explain",
    "markdown",
    "html",
    "csv",
    "parquet",
    "gpu_price",
    "currency",
    "quiet",
)


def memory(
    ctx: typer.Context,
    model: Annotated[str | None, options.model(_DEPLOYMENT)] = None,
    gpu: Annotated[
        str | None, flag(_DEPLOYMENT, "--gpu", metavar="NAME", help="GPU, by its name (windtunnel gpus).")
    ] = None,
    gpu_memory_gib: Annotated[
        str | None,
        flag(
            _DEPLOYMENT,
            "--gpu-memory-gib",
            metavar="X",
            help="Total memory in GiB as the driver reports it, in place of the table's or of --gpu.",
        ),
    ] = None,
    free_memory_gib: Annotated[
        str | None,
        flag(_DEPLOYMENT, "--free-memory-gib", metavar="X", help="What is free when vLLM starts, if not all."),
    ] = None,
    tensor_parallel_size: Annotated[
        str | None, flag(_DEPLOYMENT, "--tensor-parallel-size", "--tp", "-tp", metavar="N", help="GPUs of a stage.")
    ] = None,
    pipeline_parallel_size: Annotated[
        str | None, flag(_DEPLOYMENT, "--pipeline-parallel-size", "--pp", "-pp", metavar="N", help="Stages.")
    ] = None,
    data_parallel_size: Annotated[
        str | None, flag(_DEPLOYMENT, "--data-parallel-size", "--dp", "-dp", metavar="N", help="Replicas.")
    ] = None,
    enable_expert_parallel: Annotated[
        bool | None,
        flag(
            _DEPLOYMENT,
            "--enable-expert-parallel/--no-enable-expert-parallel",
            "-ep",
            help="Whole experts on each GPU, instead of a slice of each.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        flag(_DEPLOYMENT, "--engine", metavar="vllm-0.N", help="Release of vLLM whose defaults and rules apply."),
    ] = None,
    v0: Annotated[
        bool | None, flag(_DEPLOYMENT, "--v0", help="The older engine of vLLM 0.8 to 0.10 (VLLM_USE_V1=0).")
    ] = None,
    gpu_memory_utilization: Annotated[str | None, options.gpu_memory_utilization(_ENGINE)] = None,
    max_model_len: Annotated[
        str | None, flag(_ENGINE, "--max-model-len", metavar="N|auto", help="Longest prompt plus output, in tokens.")
    ] = None,
    max_num_seqs: Annotated[str | None, options.max_num_seqs(_ENGINE)] = None,
    max_num_batched_tokens: Annotated[
        str | None, flag(_ENGINE, "--max-num-batched-tokens", metavar="N", help="Token budget of a step.")
    ] = None,
    kv_cache_dtype: Annotated[str | None, options.kv_cache_dtype(_ENGINE)] = None,
    dtype: Annotated[str | None, options.dtype(_ENGINE)] = None,
    block_size: Annotated[str | None, options.block_size(_ENGINE)] = None,
    enforce_eager: Annotated[
        bool | None, flag(_ENGINE, "--enforce-eager/--no-enforce-eager", help="No CUDA graphs.")
    ] = None,
    enable_prefix_caching: Annotated[bool | None, options.enable_prefix_caching(_ENGINE)] = None,
    enable_chunked_prefill: Annotated[bool | None, options.enable_chunked_prefill(_ENGINE)] = None,
    disable_hybrid_kv_cache_manager: Annotated[
        bool | None,
        flag(
            _ENGINE,
            "--disable-hybrid-kv-cache-manager/--no-disable-hybrid-kv-cache-manager",
            help="Keep windows in full beside full attention.",
        ),
    ] = None,
    kv_cache_memory_bytes: Annotated[
        str | None,
        flag(
            _ENGINE,
            "--kv-cache-memory-bytes",
            "--kv-cache-memory",
            metavar="SIZE",
            help="Memory for the KV cache, whatever the share: 16GiB, 16GB.",
        ),
    ] = None,
    num_gpu_blocks_override: Annotated[str | None, options.num_gpu_blocks_override(_ENGINE)] = None,
    swap_space: Annotated[
        str | None, flag(_ENGINE, "--swap-space", metavar="GIB", help="Host memory that V0 swaps to, for each GPU.")
    ] = None,
    cpu_offload_gb: Annotated[
        str | None,
        flag(_ENGINE, "--cpu-offload-gb", metavar="GIB", help="Weights of each GPU that stay in host memory."),
    ] = None,
    kv_offloading_size: Annotated[
        str | None,
        flag(
            _ENGINE,
            "--kv-offloading-size",
            metavar="GIB",
            help="Host memory for KV blocks that leave the GPUs, of all ranks of an engine.",
        ),
    ] = None,
    enable_lora: Annotated[
        bool | None, flag(_ENGINE, "--enable-lora/--no-enable-lora", help="Set memory aside for LoRA adapters.")
    ] = None,
    max_loras: Annotated[str | None, flag(_ENGINE, "--max-loras", metavar="N", help="Adapters at once.")] = None,
    max_lora_rank: Annotated[
        str | None, flag(_ENGINE, "--max-lora-rank", metavar="N", help="Their largest rank.")
    ] = None,
    usage_context: Annotated[
        str | None,
        flag(_ENGINE, "--usage-context", metavar="api_server|llm_class", help="Whose defaults: serve or class LLM."),
    ] = None,
    from_log: Annotated[
        Path | None,
        flag(_TRUTH, "--from-log", metavar="FILE", help="vLLM's log: settings and pool of a real start-up."),
    ] = None,
    from_metrics: Annotated[
        str | None,
        flag(_TRUTH, "--from-metrics", metavar="FILE|URL", help="A real server's /metrics: its pool."),
    ] = None,
    from_deployment: Annotated[
        str | None,
        flag(
            _TRUTH,
            "--from-deployment",
            metavar="FILE[#NAME]|'vllm serve ...'",
            help="A command line, compose file, Helm values or manifest: its settings; NAME is one of several servers.",
        ),
    ] = None,
    correction: Annotated[
        Path | None,
        flag(_TRUTH, "--correction", metavar="FILE", help="What --save-correction wrote: corrects the formula."),
    ] = None,
    save_correction: Annotated[
        Path | None,
        flag(_TRUTH, "--save-correction", metavar="FILE", help="Keep what the real start-up had more, or less."),
    ] = None,
    mean_tokens: Annotated[
        str | None,
        flag(_OUTPUT, "--mean-tokens", metavar="N", help="Count users: requests that hold so many tokens each."),
    ] = None,
    explain: Annotated[
        bool, flag(_OUTPUT, "--explain", help="Every formula with its numbers, every assumption.")
    ] = False,
    gpu_price: Annotated[
        list[str] | None,
        flag(
            _OUTPUT,
            "--gpu-price",
            metavar="PRICE",
            help="Price of one GPU for an hour: 2.49, or h100-sxm=2.49 (repeatable); then costs are shown.",
        ),
    ] = None,
    currency: Annotated[str | None, options.currency(_OUTPUT)] = None,
    as_json: Annotated[bool, options.as_json(_OUTPUT)] = False,
    markdown: Annotated[bool, flag(_OUTPUT, "--markdown", help="Print Markdown, for a pull request.")] = False,
    csv: Annotated[
        Path | None, flag(_OUTPUT, "--csv", metavar="FILE", help="Write one row a plan with all of its numbers.")
    ] = None,
    parquet: Annotated[Path | None, options.parquet(_OUTPUT)] = None,
    html: Annotated[Path | None, options.html_report(_OUTPUT)] = None,
    quiet: Annotated[bool, flag(_OUTPUT, "--quiet", "-q", help="No remarks on stderr.")] = False,
) -> None:
    """Plan the memory of a deployment: the KV cache that vLLM finds, whether it starts, and what helps if not.

    Flags have the names, defaults and meaning of vllm serve.  Any of them takes several values: a list (1,2,4) or a
    range FIRST:LAST:STEP; then every combination is a line of a table.  The exit code is 4 if vLLM would not start, of
    a table if it would start with none of the lines; 2 for a value that no release of vLLM takes, be it one of many;
    3 for a file that is missing or cannot be read, a config.json as well as a log.

    \b
    Examples:
      windtunnel memory --model llama-3.1-8b --gpu h100
      windtunnel memory --model qwen3-32b --gpu l40s -tp 2 --max-model-len 32k --explain
      windtunnel memory --model llama-3.3-70b --gpu h100 -tp 2,4,8 --kv-cache-dtype auto,fp8 --html memory.html
      windtunnel memory --model llama-3.3-70b --gpu h100 -tp 4 --gpu-price 2.49 --markdown >> pull-request.md
      windtunnel memory --model llama-3.1-8b --gpu a10g --gpu-memory-utilization 0.80:0.98:0.02
      windtunnel memory --from-log vllm.log --gpu h100 --save-correction ours.json
    """
    settings = {name: value for name, value in ctx.params.items() if name not in _NOT_SETTINGS and value is not None}
    files = {
        "from_log": from_log,
        "from_metrics": from_metrics,
        "from_deployment": from_deployment,
        "correction": correction,
        "mean_tokens": mean_tokens,
        "gpu_price": gpu_price or None,
        "currency": currency,
    }
    check_one_form(as_json=as_json, markdown=markdown)
    outputs = {"--html": html, "--csv": csv, "--parquet": parquet, "--save-correction": save_correction}
    check_files(outputs, (model, from_log, from_metrics, from_deployment, _file_of(from_deployment)))
    if save_correction is not None:
        _check_correction_file(save_correction)
    result = _planned(settings, files)
    if save_correction is not None:
        _save(result, save_correction)
    command = _command(ctx)
    for path, write in ((csv, result.to_csv), (parquet, result.to_parquet), (html, _html_writer(result, command))):
        if path is not None:
            write(path)
            if not quiet:
                note(f"wrote {path}")
    if markdown:
        emit(result.markdown(command=command).rstrip("\n"))
    else:
        _print(result, as_json=as_json, explain=explain)
    if result.is_infeasible:
        raise typer.Exit(EXIT_INFEASIBLE)


def _planned(settings: dict[str, Any], files: dict[str, Any]) -> MemoryReport | MemorySweep:
    from windtunnel.memory import memory_plan, memory_sweep
    from windtunnel.memory_settings import several

    with usage_errors():
        values = {name: several(name, value) for name, value in settings.items()}
        if all(len(each) == 1 for each in values.values()):
            return memory_plan(**{name: each[0] for name, each in values.items()}, **files)
        return memory_sweep(**settings, **files)


def _file_of(deployment: str | None) -> str | None:
    """The file in FILE#NAME."""
    return (deployment or "").rpartition("#")[0] or None


_NOT_IN_COMMAND = ("as_json", "markdown", "html", "csv", "parquet", "save_correction", "explain", "quiet")


def _command(ctx: typer.Context) -> str:
    """The command line that makes the same plan again."""
    words = ["windtunnel", "memory"]
    for name, value in ctx.params.items():
        if value in (None, (), []) or name in _NOT_IN_COMMAND:
            continue
        flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        each = value if isinstance(value, list | tuple) else [value]
        words += [flag] if isinstance(value, bool) else [word for one in each for word in (flag, str(one))]
    return shlex.join(words)


def _html_writer(result: MemoryReport | MemorySweep, command: str) -> Callable[[Path], None]:
    from windtunnel.rundir import writing

    def write(path: Path) -> None:
        with writing(path):
            result.report(path, command=command)

    return write


def _check_correction_file(path: Path) -> None:
    """Refuse, before anything is planned, to replace a file that is no correction."""
    from windtunnel.memory_correction import check_can_write_correction

    try:
        check_can_write_correction(path)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--save-correction") from None


def _save(result: MemoryReport | MemorySweep, path: Path) -> None:
    from windtunnel.memory import MemorySweep
    from windtunnel.reports.files import atomic_writer
    from windtunnel.rundir import to_json, writing

    if isinstance(result, MemorySweep):
        raise typer.BadParameter(
            "a correction is that of one start-up: give one value each", param_hint="--save-correction"
        )
    try:
        learnt = result.profile()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--save-correction") from None
    with writing(path), atomic_writer(path) as file:
        file.write(to_json(learnt) + "\n")


def _print(result: MemoryReport | MemorySweep, *, as_json: bool, explain: bool) -> None:
    import json

    from windtunnel.memory import MemoryReport

    if as_json:
        emit(json.dumps(result.to_dict(), indent=2, ensure_ascii=False, allow_nan=False))
    elif isinstance(result, MemoryReport):
        emit(result.text(explain=explain))
    else:
        emit(result.text())
