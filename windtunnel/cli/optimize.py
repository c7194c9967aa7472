"""``windtunnel optimize``: the settings with most goodput per dollar under the objectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windtunnel.cli import options
from windtunnel.cli.errors import usage_errors
from windtunnel.cli.output import emit, warn
from windtunnel.cli.panels import flag
from windtunnel.cli.results import (
    check_files,
    check_is_parquet,
    check_one_form,
    exit_as,
    print_result,
    tell_written,
)
from windtunnel.cli.settings import read_overrides, read_specs, words_in

if TYPE_CHECKING:
    from windtunnel.optimizing.optimize import Optimum
    from windtunnel.optimizing.question import Question

_WHAT, _JUDGE, _RUN, _OUTPUT = "What is turned", "What is wanted", "Run", "Output"


@dataclass(frozen=True, slots=True)
class _Outputs:
    """What is written, and how the result is printed."""

    as_json: bool
    markdown: bool
    html: Path | None
    csv: Path | None
    parquet: Path | None
    scenario: Path | None
    folder: Path | None
    quiet: bool

    @property
    def files(self) -> dict[str, Path | None]:
        """By their flags, those that are not asked for as None."""
        tables = {"--html": self.html, "--csv": self.csv, "--parquet": self.parquet}
        return {**tables, "--save-scenario": self.scenario}


def optimize(
    scenario: Annotated[str | None, options.scenario_argument()] = None,
    tune: Annotated[
        list[str] | None,
        flag(
            _WHAT,
            "--tune",
            metavar="KEY=SPEC",
            help="A setting and its values, in place of the usual ones: A,B,C, FIRST:LAST:STEP, "
            "log:FIRST:LAST:HOW_MANY, or a range LOW:HIGH, lograndom:LOW:HIGH; repeat it.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        flag(_WHAT, "--set", metavar="KEY=VALUE", help="A setting for all deployments; repeat it."),
    ] = None,
    wanted: Annotated[
        str,
        flag(
            _JUDGE,
            "--for",
            metavar="KEY",
            help="goodput_per_dollar if not given (per GPU-hour without a price), goodput, cost, or a key of simulate "
            "--json, with + or - before it where neither way is good in itself.",
        ),
    ] = "goodput_per_dollar",
    at: Annotated[
        str,
        flag(
            _JUDGE,
            "--at",
            metavar="load|capacity",
            help="The scenario's own load if not given, or the largest rate that keeps the objectives.",
        ),
    ] = "load",
    slo: Annotated[list[str] | None, options.slo(_JUDGE)] = None,
    goodput: Annotated[list[str] | None, options.goodput(_JUDGE)] = None,
    gpu_price: Annotated[
        float | None,
        flag(_JUDGE, "--gpu-price", metavar="PRICE", min=0, help="Of one GPU for an hour, in place of the scenario's."),
    ] = None,
    trials: Annotated[
        int | None, flag(_RUN, "--trials", metavar="N", min=1, help="Deployments that are tried at most: 64.")
    ] = None,
    reps: Annotated[
        int | None,
        flag(
            _RUN,
            "--reps",
            metavar="N",
            min=1,
            help="Runs of a deployment that may win, and of the answer on fresh seeds: 5 (capacity 8, traces 1).",
        ),
    ] = None,
    seed: Annotated[int | None, options.first_seed(_RUN)] = None,
    jobs: Annotated[int | None, options.jobs(_RUN)] = None,
    ray: Annotated[str | None, options.ray(_RUN)] = None,
    dry_run: Annotated[bool, flag(_RUN, "--dry-run", help="List the knobs; run nothing.")] = False,
    output: Annotated[Path | None, options.kept_in(_OUTPUT)] = None,
    resume: Annotated[
        bool, flag(_OUTPUT, "--resume", help="Go on with the search in -o: what is finished is not run again.")
    ] = False,
    as_json: Annotated[bool, options.json_for_text(_OUTPUT)] = False,
    markdown: Annotated[bool, options.markdown_for_text(_OUTPUT)] = False,
    html: Annotated[Path | None, options.html_file(_OUTPUT)] = None,
    csv: Annotated[Path | None, options.csv_of_runs(_OUTPUT)] = None,
    parquet: Annotated[Path | None, options.parquet(_OUTPUT)] = None,
    save_scenario: Annotated[
        Path | None,
        flag(_OUTPUT, "--save-scenario", metavar="FILE", help="Write the answer as a scenario that simulate runs."),
    ] = None,
    force: Annotated[bool, options.force_scenario(_OUTPUT)] = False,
    quiet: Annotated[bool, options.quiet(_OUTPUT)] = False,
) -> None:
    """Search the settings of a deployment for goodput per dollar under its objectives, in far fewer runs than a grid.

    Prints the vllm serve line, what it gains over the scenario's own settings on fresh seeds, and which setting buys
    how much; what buys nothing is back at vLLM's default.  Without --tune the usual knobs are turned, as far as step
    times are known for them.  At the scenario's load goodput cannot exceed what is asked for: deployments that are
    level are ranked by cost, then by head-room.  The exit code is 4 if nothing starts, 99 if no deployment keeps the
    objectives.

    \b
    Examples:
      windtunnel optimize memory-dial --gpu-price 1.79 --html best.html
      windtunnel optimize chat-8b-h100 --at capacity --tune max_num_seqs=64,128,256 --tune tensor_parallel_size=1,2
      windtunnel optimize token-budget --slo 'itl:p99<100ms' --for goodput --tune max_num_batched_tokens=1k:16k
      windtunnel optimize chat-8b-h100 --set num_requests=1000 -o night -j 8 --resume
    """
    outputs = _Outputs(as_json, markdown, html, csv, parquet, save_scenario, output, quiet)
    tuned = read_specs(tune or (), "--tune", said="tuned")
    flags = {"--slo": ("objectives", slo), "--goodput": ("goodput", goodput), "--gpu-price": ("gpu_hour", gpu_price)}
    overrides = read_overrides(settings or (), flags)
    _check_outputs(outputs, (scenario, *words_in(tuned), *words_in(overrides)), resume=resume, force=force)
    with usage_errors():
        from windtunnel.optimizing.question import make_question

        question = make_question(
            scenario,
            tuned,
            wanted=wanted,
            at=at,
            trials=trials,
            reps=reps,
            seed=seed,
            overrides=overrides,
        )
        if dry_run:
            emit(_question_text(question, as_json=as_json))
            return
        _finish(_run(question, jobs, ray, outputs, resume=resume), outputs)


# --- what was asked


def _check_outputs(outputs: _Outputs, inputs: Sequence[str | None], *, resume: bool, force: bool) -> None:
    from windtunnel.rundir import check_can_write_scenario

    check_one_form(as_json=outputs.as_json, markdown=outputs.markdown)
    if resume and outputs.folder is None:
        raise typer.BadParameter("which search? Name its folder with -o DIR", param_hint="--resume")
    check_files(outputs.files, inputs)
    if outputs.scenario is not None:
        check_can_write_scenario(outputs.scenario, force=force)
    check_is_parquet(outputs.parquet)
    if outputs.folder is not None:
        from windtunnel.optimizing.running import check_folder, check_is_no_part

        check_folder(outputs.folder, resume=resume)
        for path in outputs.files.values():
            if path is not None:
                check_is_no_part(outputs.folder, path)


# --- doing it


def _run(question: Question, jobs: int | None, ray: str | None, outputs: _Outputs, *, resume: bool) -> Optimum:
    from windtunnel.optimizing.optimize import execute
    from windtunnel.optimizing.search import check_optuna
    from windtunnel.sweeping.running import prepared
    from windtunnel.workers import Progress

    check_optuna()
    with (
        Progress(label="runs", quiet=outputs.quiet) as progress,
        prepared(jobs, ray=ray, folder=outputs.folder, resume=resume, tell=progress) as how,
    ):
        found = execute(question, how)
        progress.close()
        if outputs.folder is not None:
            found.save(outputs.folder)
    return found


# --- telling


def _question_text(question: Question, *, as_json: bool) -> str:
    from windtunnel.cli.dry_run import table
    from windtunnel.rundir import to_json

    if as_json:
        return to_json(
            {
                "scenario": question.base.scenario.name,
                "for": question.target.key,
                "at": question.at,
                "knobs": [
                    {
                        "key": knob.key,
                        "asked": knob.text,
                        "values": list(knob.values),
                        "own": knob.own,
                        "default": knob.default,
                    }
                    for knob in question.knobs
                ],
                "objectives": [slo.text for slo in question.objectives],
                "num_combinations": question.num_combinations,
                "trials": question.num_trials,
                "seeds": list(question.seeds),
                "notes": list(question.notes),
            }
        )
    rows = [
        (
            knob.key,
            ", ".join(map(str, knob.values)) or knob.text,
            "–" if knob.own is None else str(knob.own),
            "–" if knob.default is None else str(knob.default),
        )
        for knob in question.knobs
    ]
    number = question.num_combinations
    grid = "a range, so that there is no grid" if number is None else f"{number:,} combinations"
    lines = [
        f"scenario: {question.base.scenario.name}",
        f"for: {question.target.label}, at {'capacity' if question.at == 'capacity' else 'its own load'}",
        f"objectives: {', '.join(slo.text for slo in question.objectives) or 'none'}",
        f"deployments: {question.num_trials:,} at most, of {grid}; up to {len(question.seeds):,} runs each",
        *question.notes,
        "",
    ]
    return "\n".join([*lines, *table([("knob", "values", "scenario", "vLLM default"), *rows])])


def _finish(found: Optimum, outputs: _Outputs) -> None:
    """Write and print; raises typer.Exit(4) if nothing starts, (99) if no deployment keeps the objectives."""
    scenario = outputs.scenario if found.optimized.scenario_toml else None
    for path, write in (
        (outputs.html, found.report),
        (outputs.csv, found.to_csv),
        (outputs.parquet, found.to_parquet),
        (scenario, found.save_scenario),
    ):
        if path is not None:
            write(path)
    tell_written((outputs.html, outputs.csv, outputs.parquet, scenario, outputs.folder), quiet=outputs.quiet)
    print_result(found, as_json=outputs.as_json, markdown=outputs.markdown)
    if outputs.as_json:
        for text in found.warnings:
            warn(text)
    exit_as(found)
