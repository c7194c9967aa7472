"""``windtunnel fit``: turn measured steps into a profile that prices steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windtunnel.cli.output import emit, note, status_line, warn

if TYPE_CHECKING:
    from windtunnel.sim.cost.fitted import FittedCost


def fit(
    tables: Annotated[
        list[Path],
        typer.Argument(
            metavar="TABLE...",
            help="Measured steps: Parquet, CSV, a recording of a real vLLM (.jsonl, .jsonl.gz) or a live run's folder.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the profile.")] = Path(
        "profile.json"
    ),
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where", metavar="COLUMN=TEXT", help="Only rows whose column holds that text.", show_default=False
        ),
    ] = None,
    include_host: Annotated[
        bool | None,
        typer.Option(
            "--include-host/--no-include-host",
            help="Recordings: count the scheduler's and the engine loop's own time as part of each step.",
            show_default="include",
        ),
    ] = None,
    provenance: Annotated[
        list[str] | None,
        typer.Option(
            "--provenance",
            metavar="KEY=TEXT",
            help="What the profile is to say of its origin, besides or instead of what the tables say: gpu, model, "
            "dtype, tensor_parallel_size, engine, date.",
            show_default=False,
        ),
    ] = None,
    max_graph_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-graph-tokens",
            metavar="N",
            min=0,
            help="Largest CUDA graph; 0: none (enforce eager).",
            show_default="what the tables say, else 512",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Divides the shapes into parts.")] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a file that is no profile; an earlier profile needs no leave.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no remarks.")] = False,
) -> None:
    """Fit a cost model to measured steps and write it as a profile, with its error on shapes left out of the fit.

    \b
    Examples:
      windtunnel fit steps.parquet -o h100-llama-8b.json --provenance gpu=H100 --provenance model=llama-3.1-8b
      windtunnel fit sweep.csv --where tp=4 --json
      windtunnel fit recorded_steps/steps-*.jsonl -o vllm.json --provenance gpu=H100
      windtunnel simulate chat-8b-h100 --cost profile:path=h100-llama-8b.json
    """
    from windtunnel.calibrate.fit import StepTimeFit
    from windtunnel.calibrate.origins import max_graph_tokens as graph_tokens_of
    from windtunnel.calibrate.step_tables import is_recording, read_steps
    from windtunnel.rundir import check_can_write_file, to_json
    from windtunnel.sim.cost.profile import save_profile

    chosen, stated = _pairs("--where", where), _pairs("--provenance", provenance)
    check_can_write_file(output, inputs=tables)
    _check_is_replaceable(output, force=force)
    has_recordings = any(map(is_recording, tables))
    if chosen and all(map(is_recording, tables)):
        raise typer.BadParameter("recordings have no columns to choose by: leave it out", param_hint="--where")
    if include_host is not None and not has_recordings and not quiet:
        warn(f"--{'' if include_host else 'no-'}include-host has no effect: it is for recordings, and these are tables")
    steps = read_steps(tables, where=chosen, include_host=include_host is not False)
    for text in () if quiet else steps.remarks:
        warn(text)
    try:
        largest = graph_tokens_of({**steps.provenance, **stated}) if max_graph_tokens is None else max_graph_tokens
    except ValueError as error:
        raise typer.BadParameter(f"{error}: give --max-graph-tokens N", param_hint="provenance") from None
    progress, close = status_line(
        lambda done, most: f"fitting: {done} of at most {most} forms tried", quiet=quiet, every_s=0.0
    )
    try:
        cost = StepTimeFit(max_graph_tokens=largest, seed=seed).fit(steps, provenance=stated, progress=progress)
    finally:
        close()
    output.parent.mkdir(parents=True, exist_ok=True)
    save_profile(cost, output)
    emit(to_json({"profile": str(output), **cost.describe()}) if as_json else _text(cost))
    if not quiet:
        _remark(cost)
        note(f"wrote {output}")


def _check_is_replaceable(output: Path, *, force: bool) -> None:
    """Raise OutputError for a file that holds something other than a profile."""
    from windtunnel.rundir import OutputError

    if output.exists() and not force and not _is_profile(output):
        raise OutputError(f"{output} exists and is no profile: name another file, or write over it with --force")


def _is_profile(path: Path) -> bool:
    """Whether it is one of ours, be it damaged or of another release."""
    import json

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"schema_version", "kind", "parameters"} <= set(found)


def _pairs(flag: str, given: list[str] | None) -> dict[str, str]:
    pairs = {}
    for text in given or []:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{text!r} is not KEY=TEXT", param_hint=flag)
        if key in pairs:
            raise typer.BadParameter(f"{key} is given twice", param_hint=flag)
        pairs[key] = value
    return pairs


def _remark(cost: FittedCost) -> None:
    origin = cost.evidence.provenance
    num_left_out, num_kept = len(origin.get("left_out_forms", ())), 1 + len(origin.get("other_forms", ()))
    if num_left_out:
        warn(
            f"{num_left_out} of {num_left_out + num_kept} fits missed the steps they were fitted to and were left out "
            "of the mean: another --seed shows how much hangs on that"
        )


def _text(cost: FittedCost) -> str:
    from windtunnel.calibrate.errors import error_table, far_off_text

    parameters = cost.parameters
    terms = [
        f"a step {1e3 * parameters.base_s:.3f} ms",
        f"tokens up to {1e3 * parameters.tokens.seconds[-1]:.3f} ms at {parameters.tokens.knots[-1]:,}",
        f"decode context up to {1e3 * parameters.decode_context.seconds[-1]:.3f} ms at "
        f"{parameters.decode_context.knots[-1]:,}",
        f"a million query-key pairs {1e9 * parameters.pair_s:.3f} ms",
    ]
    origin = cost.evidence.provenance
    far = far_off_text(cost.evidence.errors, origin.get("far_off_steps", {}))
    return "\n".join(
        [
            f"{origin['num_steps']:,} steps of {origin['num_shapes']:,} shapes: {'; '.join(terms)}",
            "",
            error_table(cost.evidence.errors),
            *(["", far] if far else []),
        ]
    )
