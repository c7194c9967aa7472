"""``windtunnel measure``: how long an executor's steps take on this machine, as a table for ``windtunnel fit``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.cli.errors import EXIT_INTERRUPTED, usage_errors
from windtunnel.cli.output import emit, note, status_line, warn

if TYPE_CHECKING:
    from windtunnel.calibrate.grid import Grid
    from windtunnel.calibrate.measure import Progress
    from windtunnel.calibrate.measured_models import MeasuredModel
    from windtunnel.calibrate.measurements import MeasuredTable
    from windtunnel.sim.engine.config import SchedulerConfig

_REDRAW_EVERY_S = 0.2
_KINDS, _CLOCKS, _GRIDS = ("torch", "triton"), ("wall", "cpu"), ("small", "default", "full")
_DEFAULTS = {
    "torch": {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 2048},
    "triton": {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 8192},
}
"""Limits unless others are given: what a CPU can go through in minutes, and what is usual on a GPU."""


def measure(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A bundled model, a config.json or a model's folder; --executor torch has a small one of its own.",
            show_default=False,
        ),
    ] = None,
    executor: Annotated[
        str, typer.Option("--executor", metavar="torch|triton", help="Who computes: plain torch on the CPU, or a GPU.")
    ] = "torch",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the table.")] = Path(
        "steps.parquet"
    ),
    grid: Annotated[
        str, typer.Option("--grid", metavar="small|default|full", help="How many different steps are measured.")
    ] = "default",
    budget: Annotated[str, typer.Option("--budget", metavar="TIME", help="Most time to measure for: 90s, 5m.")] = "5m",
    clock: Annotated[
        str | None,
        typer.Option(
            "--clock",
            metavar="wall|cpu",
            help="What a step's time is: wall time, or the thread's processor time (--executor torch, the default "
            "there: it hardly sees what else the machine does).",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        float,
        typer.Option(
            "--target", metavar="X", help="A step is done when its median is known this well (95 % interval, share)."
        ),
    ] = 0.02,
    dtype: Annotated[str, typer.Option("--dtype", metavar="TYPE", help="Type of the weights.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", metavar="TYPE", help="Type of the KV cache.")
    ] = "auto",
    max_num_seqs: Annotated[
        str | None,
        typer.Option("--max-num-seqs", metavar="N", help="Most sequences in a step.", show_default="32; on a GPU 256"),
    ] = None,
    max_num_batched_tokens: Annotated[
        str | None,
        typer.Option(
            "--max-num-batched-tokens", metavar="N", help="Most tokens in a step.", show_default="512; on a GPU 8192"
        ),
    ] = None,
    max_model_len: Annotated[
        str | None,
        typer.Option("--max-model-len", metavar="N", help="Longest context.", show_default="2048; on a GPU 8192"),
    ] = None,
    block_size: Annotated[str, typer.Option("--block-size", metavar="N", help="Tokens in a KV block.")] = "16",
    num_gpu_blocks: Annotated[
        str | None,
        typer.Option(
            "--num-gpu-blocks-override",
            "--num-gpu-blocks",
            metavar="N",
            help="KV blocks; what all seats can use, if 1 GiB (on a GPU: its memory) holds it, by default.",
            show_default=False,
        ),
    ] = None,
    num_threads: Annotated[
        int,
        typer.Option("--num-threads", metavar="N", min=1, help="Threads of --executor torch; --clock cpu sees one."),
    ] = 1,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Of the grid, the order, weights and tokens.")
    ] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a measurement that was stopped.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over an earlier table, or begin anew.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no remarks.")] = False,
) -> None:
    """Measure how long an executor's steps take on this machine, over a grid of steps, and write a table for fit.

    Ctrl-C keeps what was measured; --resume goes on with it.

    \b
    Examples:
      windtunnel measure -o cpu.parquet --grid small --budget 2m
      windtunnel fit cpu.parquet -o cpu.json
      windtunnel measure ./llama-8b --executor triton --max-model-len 32k --budget 10m -o h100.parquet
      windtunnel measure -o cpu.parquet --resume --budget 10m
    """
    from windtunnel.calibrate.measure import measure as run
    from windtunnel.calibrate.measure import partial_path
    from windtunnel.scenarios.units import parse_duration_s

    _check_choices(executor, grid, clock, target, num_threads)
    clock = clock or ("cpu" if executor == "torch" and num_threads == 1 else "wall")
    budget_s = _parsed("--budget", budget, parse_duration_s)
    partial = partial_path(output)
    _check_output(output, partial, model, resume=resume, force=force)
    chosen = _model(model, executor)
    config = _config(
        executor,
        chosen,
        dtype,
        kv_cache_dtype,
        {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "block_size": block_size,
            "num_gpu_blocks": num_gpu_blocks,
        },
    )
    points = _grid(config, grid, seed)
    types = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    made = _executor(chosen, executor, config, clock=clock, num_threads=num_threads, seed=seed, **types)
    if force:
        partial.unlink(missing_ok=True)
    if not quiet:
        note(f"measuring {len(points.points)} steps of {chosen.name} on the {executor} executor ({clock} clock)")
    with _showing_progress(partial, quiet=quiet) as progress:
        table = run(
            made,
            points,
            clock=clock,
            budget_s=budget_s,
            seed=seed,
            path=output,
            progress=progress,
            resume=resume,
            target=target,
            provenance={"model": chosen.name, "model_config": chosen.digest},
        )
    emit(_json(table) if as_json else _text(table))
    if not quiet:
        _tell(table, output)


def _check_choices(executor: str, grid: str, clock: str | None, target: float, num_threads: int) -> None:
    for flag, value, allowed in (
        ("--executor", executor, _KINDS),
        ("--grid", grid, _GRIDS),
        ("--clock", clock, (*_CLOCKS, None)),
    ):
        if value not in allowed:
            names = ", ".join(each for each in allowed if each is not None)
            raise typer.BadParameter(f"{value!r} is not one of {names}", param_hint=flag)
    if clock == "cpu" and executor == "triton":
        raise typer.BadParameter(
            "a GPU's steps are no processor time: leave it out, or take wall", param_hint="--clock"
        )
    if clock == "cpu" and num_threads > 1:
        raise typer.BadParameter(
            f"cpu sees one thread only, but --num-threads is {num_threads}: take wall", param_hint="--clock"
        )
    if not 0 < target < 1:
        raise typer.BadParameter(f"{target:g} is not above 0 and below 1", param_hint="--target")


def _check_name(output: Path) -> None:
    from windtunnel.calibrate.step_tables import is_parquet

    if not is_parquet(output):
        raise typer.BadParameter(
            f"{output} is written as Parquet: name it {output.with_suffix('.parquet').name} (or .pq), so that fit "
            "reads it as that",
            param_hint="--output",
        )


def _check_output(output: Path, partial: Path, model: str | None, *, resume: bool, force: bool) -> None:
    from windtunnel.rundir import OutputError, check_can_write_file

    check_can_write_file(output, inputs=() if model is None else (model, Path(model) / "config.json"))
    _check_name(output)
    if resume and force:
        raise typer.BadParameter("--resume goes on with a measurement and --force begins anew: give one of them")
    if resume and not partial.exists():
        more = f"; {output} is finished" if output.exists() else ""
        raise OutputError(f"nothing to resume: there is no {partial}{more}; leave out --resume")
    if output.exists() and not (force or resume):
        raise OutputError(f"{output} exists: name another file, or write over it with --force")
    if partial.exists() and not (force or resume):
        raise OutputError(f"{partial} holds an unfinished measurement: go on with --resume, or begin anew with --force")


def _model(model: str | None, executor: str) -> MeasuredModel:
    from windtunnel.calibrate.measured_models import find_model

    if model is None and executor == "triton":
        raise typer.BadParameter("--executor triton needs a MODEL: a bundled name, a config.json or a model's folder")
    with usage_errors():
        try:
            return find_model(model)
        except OSError as error:
            raise typer.BadParameter(f"cannot read model {model}: {error.strerror or error}") from error


def _parsed(flag: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint=flag) from None


def _config(
    executor: str, model: MeasuredModel, dtype: str, kv_cache_dtype: str, given: dict[str, str | None]
) -> SchedulerConfig:
    """The limits of the steps; defaults never exceed what the model takes or other flags allow."""
    from windtunnel.calibrate.measured_models import num_kv_blocks
    from windtunnel.scenarios.units import parse_count
    from windtunnel.sim.engine.config import SchedulerConfig

    numbers = {
        name: _parsed(f"--{name.replace('_', '-')}", text, parse_count)
        for name, text in given.items()
        if text is not None
    }
    try:
        decoder = model.decoder_config()
    except ValueError as error:
        raise typer.BadParameter(f"{model.name} cannot be computed: {error}") from error
    limits = {**_DEFAULTS[executor], **numbers}
    if "max_model_len" not in numbers:
        limits["max_model_len"] = min(limits["max_model_len"], decoder.max_model_len)
    if "max_num_batched_tokens" not in numbers:
        limits["max_num_batched_tokens"] = max(limits["max_num_batched_tokens"], limits["max_num_seqs"])
    elif "max_num_seqs" not in numbers:
        limits["max_num_seqs"] = min(limits["max_num_seqs"], limits["max_num_batched_tokens"])
    if "num_gpu_blocks" not in limits:
        sizes = {name: limits[name] for name in ("max_num_seqs", "max_model_len", "block_size")}
        limits["num_gpu_blocks"] = num_kv_blocks(decoder, executor, dtype=dtype, kv_cache_dtype=kv_cache_dtype, **sizes)
    try:
        return SchedulerConfig(**limits)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _grid(config: SchedulerConfig, size: str, seed: int) -> Grid:
    from windtunnel.calibrate.grid import make_grid

    try:
        return make_grid(config, size, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _executor(model: MeasuredModel, kind: str, config: SchedulerConfig, **given: Any) -> Any:
    """Who computes the steps.  Raises typer.BadParameter where that is not possible here."""
    from windtunnel.calibrate.measured_models import make_executor
    from windtunnel.executor.server.executors import ExecutorUnavailable

    try:
        return make_executor(model, kind, config, **given)
    except ExecutorUnavailable as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def _showing_progress(partial: Path, *, quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """What is told how far the measurement is; Ctrl-C says what is kept and ends the command."""
    progress, close = status_line(progress_line, quiet=quiet, every_s=_REDRAW_EVERY_S)
    try:
        yield progress
    except KeyboardInterrupt:
        close()
        if partial.exists():
            note(f"stopped; what was measured is kept in {partial}")
            note("go on with the same command and --resume (with --budget 0s: write the table from what there is)")
        else:
            note("stopped before anything was measured")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        close()


def progress_line(progress: Progress) -> str:
    """One state of a measurement as text."""
    share = 1.0 if progress.budget_s <= 0 else min(progress.elapsed_s / progress.budget_s, 1.0)
    bar = ("#" * round(share * 24)).ljust(24, ".")
    seconds = round(progress.left_s)
    left = f"{seconds // 60} min {seconds % 60} s" if seconds >= 60 else f"{seconds} s"
    return (
        f"measuring  [{bar}] {progress.num_measured} of {progress.num_points} steps seen, {progress.num_tight} known "
        f"well enough, about {left} left"
    )


def _tell(table: MeasuredTable, output: Path) -> None:
    from windtunnel.calibrate.fit import FEWEST_SHAPES

    origin = table.provenance
    if not table.is_complete:
        warn(
            f"the time was over when only {table.num_measured} of {len(table.points)} steps had been measured: go on "
            "with the same command and --resume (--budget is the time to add), or begin anew with a smaller --grid or "
            "lower limits"
        )
    drift = origin["reference"].get("slowest_over_fastest", 1.0)
    if drift > 1.25:
        warn(
            f"the machine's speed moved: the same step took up to {drift:.2f} times as long as at its fastest; "
            "a profile of it is as uncertain"
        )
    num_shapes = int(table.step_table().shape_ids.max()) + 1
    if num_shapes < FEWEST_SHAPES:
        note(
            f"wrote {output}; a fit needs at least {FEWEST_SHAPES} different shapes and this table has {num_shapes}; "
            "next: the same command with --resume --budget 5m"
        )
    else:
        note(f"wrote {output}; next: windtunnel fit {output} -o profile.json")


def _json(table: MeasuredTable) -> str:
    from windtunnel.rundir import to_json

    return to_json(
        {"table": str(table.path), "is_complete": table.is_complete, "kinds": _kinds(table), **table.provenance}
    )


def _text(table: MeasuredTable) -> str:
    origin = table.provenance
    lines = [
        f"{origin['num_samples']:,} samples of {origin['num_measured_points']} of {origin['num_grid_points']} steps in "
        f"{origin['measured_s']:.0f} s, {origin['num_tight_points']} known to {origin['target']:.1%} or better, "
        f"{origin['num_outliers']} outliers marked",
        "",
        f"{'kind':<10}{'steps':>7}{'samples':>9}{'shortest':>12}{'median':>12}{'longest':>12}{'spread':>9}",
    ]
    for kind, of_kind in _kinds(table).items():
        times = "".join(f"{1e3 * of_kind[name]:>9.2f} ms" for name in ("shortest_s", "median_s", "longest_s"))
        lines.append(f"{kind:<10}{of_kind['steps']:>7}{of_kind['samples']:>9}{times}{_spread(of_kind['spread']):>9}")
    return "\n".join(
        [*lines, "", "spread: median over the steps measured more than once of (95th - 5th percentile) / median"]
    )


def _spread(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _kinds(table: MeasuredTable) -> dict[str, dict[str, Any]]:
    """By kind: points and samples, their median step times, and how far samples of one point scatter.

    The spread of a kind none of whose points has two samples is None.
    """
    frame = table.frame()
    frame = frame[~frame["is_reference"]]
    by_point = frame.groupby(["kind", "point"], sort=False)["step_s"]
    medians = by_point.median()
    spreads = ((by_point.quantile(0.95) - by_point.quantile(0.05)) / medians)[by_point.size() > 1]
    told: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(point.kind for point in table.points):
        if kind not in medians.index.get_level_values("kind"):
            continue
        of_kind = medians.xs(kind, level="kind")
        spread = spreads[spreads.index.get_level_values("kind") == kind]
        told[kind] = {
            "steps": len(of_kind),
            "samples": int((frame["kind"] == kind).sum()),
            "shortest_s": float(of_kind.min()),
            "median_s": float(of_kind.median()),
            "longest_s": float(of_kind.max()),
            "spread": float(spread.median()) if len(spread) else None,
        }
    return told
