"""``windtunnel capacity``: the largest rate that one deployment carries within its objectives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.cli import options
from windtunnel.cli.errors import EXIT_INTERNAL, EXIT_SLO_BREACHED, exit_code
from windtunnel.cli.output import note
from windtunnel.cli.panels import flag
from windtunnel.cli.results import check_files, check_one_form, print_result, tell_written
from windtunnel.cli.settings import read_overrides, words_in

if TYPE_CHECKING:
    from windtunnel.capacity.max_rate import MaxRate
    from windtunnel.capacity.search import RateRow
    from windtunnel.scenarios.load import Override

EXIT_UNDECIDED = 6
"""More requests, or more replications, are needed: the search ended without an answer, or with a low end alone."""
_WHAT, _RUN, _OUTPUT = "What is asked", "Run", "Output"


def capacity(
    scenario: Annotated[str | None, options.scenario_argument()] = None,
    slo: Annotated[list[str] | None, options.slo(_WHAT)] = None,
    goodput: Annotated[list[str] | None, options.goodput(_WHAT)] = None,
    settings: Annotated[
        list[str] | None,
        flag(_WHAT, "--set", metavar="KEY=VALUE", help="A setting in place of the scenario's; repeat it."),
    ] = None,
    reps: Annotated[
        int, flag(_RUN, "--reps", metavar="N", min=4, help="Most replications of a rate: 32 if not given.")
    ] = 32,
    num_requests: Annotated[
        int,
        flag(
            _RUN,
            "--num-requests",
            metavar="N",
            min=100,
            help="Requests of a simulation, 1000; more where load needs it.",
        ),
    ] = 1_000,
    confidence: Annotated[
        float, flag(_RUN, "--confidence", metavar="SHARE", help="Of holds and of fails, each one-sided: 0.95.")
    ] = 0.95,
    precision: Annotated[
        float, flag(_RUN, "--precision", metavar="SHARE", help="How close the ends of the answer are to come: 0.03.")
    ] = 0.03,
    seed: Annotated[int | None, options.seed(_RUN)] = None,
    jobs: Annotated[int | None, options.jobs(_RUN)] = None,
    ray: Annotated[str | None, options.ray(_RUN)] = None,
    as_json: Annotated[bool, options.json_for_table(_OUTPUT)] = False,
    markdown: Annotated[bool, options.markdown_for_table(_OUTPUT)] = False,
    html: Annotated[
        Path | None, flag(_OUTPUT, "--html", metavar="FILE", help="Write one self-contained HTML file with the curve.")
    ] = None,
    quiet: Annotated[bool, options.quiet(_OUTPUT)] = False,
) -> None:
    """Find the largest rate of requests at which a deployment keeps its objectives, with an interval.

    The rate of the scenario is what is varied; its requests are drawn anew at each rate, and a trace is cut into
    windows that are scaled in time.  A rate holds, or fails, if the confidence bound on the objective says so; between
    the two lies the answer.  Where every latency depends on how long one looks, close to saturation, no point is given.
    The exit code is 99 if no rate holds, 6 if chance leaves it open or the runs are too short.

    \b
    Examples:
      windtunnel capacity chat-8b-h100 --slo 'ttft:p99<500ms' --slo 'tpot:p95<30ms'
      windtunnel capacity chat-8b-h100 --slo 'goodput>=99%' --goodput ttft:500 --goodput tpot:40 --html capacity.html
      windtunnel capacity chat-8b-h100 --slo 'ttft:p99<1s' --set tp=2 --set max_num_seqs=128 --json
    """
    check_one_form(as_json=as_json, markdown=markdown)
    overrides = _overrides(settings or (), slo, goodput)
    check_files({"--html": html}, (scenario, *words_in([given.value for given in overrides.values()])))
    found = _searched(
        scenario,
        overrides,
        {
            "seed": seed,
            "replications": reps,
            "num_requests": num_requests,
            "confidence": confidence,
            "precision": precision,
        },
        jobs=jobs,
        ray=ray,
        quiet=quiet,
    )
    if html is not None:
        found.report(html)
    tell_written((html,), quiet=quiet)
    print_result(found, as_json=as_json, markdown=markdown)
    if found.outcome in _EXITS:
        raise typer.Exit(_EXITS[found.outcome])


_EXITS = {"idle_fails": EXIT_SLO_BREACHED, "unresolved": EXIT_UNDECIDED, "too_short": EXIT_UNDECIDED}
"""Outcomes that are no answer; close to saturation the rate that holds is one."""


def _overrides(settings: Iterable[str], slo: list[str] | None, goodput: list[str] | None) -> dict[str, Override]:
    """What was asked for in place of the scenario's settings, each with the flag that messages name."""
    from windtunnel.scenarios.load import Override

    flags = {"--slo": ("objectives", slo), "--goodput": ("goodput", goodput)}
    of_flags = {key: option for option, (key, texts) in flags.items() if texts}
    found = read_overrides(settings, flags)
    return {key: Override(value, of_flags.get(key, f"--set {key}")) for key, value in found.items()}


def _searched(
    scenario: str | None,
    overrides: dict[str, Override],
    asked: dict[str, Any],
    *,
    jobs: int | None,
    ray: str | None,
    quiet: bool,
) -> MaxRate:
    from windtunnel.capacity.max_rate import load_deployment, max_rate
    from windtunnel.workers import Workers

    resolved = load_deployment(scenario, overrides, asked["seed"])
    try:
        with Workers(jobs, ray=ray) as workers:
            found = max_rate(resolved, workers=workers, tell=None if quiet else _tell, **asked)
            return replace(found, asked_of=scenario or "")
    except ValueError as error:
        raise (error if exit_code(error) != EXIT_INTERNAL else typer.BadParameter(str(error))) from None


def _tell(row: RateRow) -> None:
    from windtunnel.capacity.text import row_words

    note(row_words(row))
