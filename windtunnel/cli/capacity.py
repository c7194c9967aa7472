"""``windtunnel capacity``: the largest rate that one deployment carries within its objectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.cli.errors import EXIT_INTERNAL, EXIT_SLO_BREACHED, exit_code
from windtunnel.cli.output import emit, note
from windtunnel.cli.panels import flag

if TYPE_CHECKING:
    from windtunnel.capacity.max_rate import MaxRate
    from windtunnel.capacity.search import RateRow

_WHAT, _RUN, _OUTPUT = "What is asked", "Run", "Output"


def capacity(
    scenario: Annotated[
        str | None,
        typer.Argument(metavar="SCENARIO", help="A scenario file, or the name of a bundled one.", show_default=False),
    ] = None,
    slo: Annotated[
        list[str] | None,
        flag(_WHAT, "--slo", metavar="'ttft:p99<500ms'", help="An objective, in place of the scenario's; repeat it."),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        flag(_WHAT, "--goodput", metavar="'ttft:500'", help="A limit on each request in ms; repeat it."),
    ] = None,
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
    seed: Annotated[int | None, flag(_RUN, "--seed", metavar="N", min=0, help="Seed of all randomness.")] = None,
    jobs: Annotated[
        int | None,
        flag(_RUN, "--jobs", "-j", metavar="N", min=1, help="Processes that share the work: all CPUs; same results."),
    ] = None,
    ray: Annotated[
        str | None,
        flag(_RUN, "--ray", metavar="auto|ADDRESS|local:N", help="Let a Ray cluster do the work; same results."),
    ] = None,
    as_json: Annotated[bool, flag(_OUTPUT, "--json", help="Print JSON in place of the table.")] = False,
    markdown: Annotated[bool, flag(_OUTPUT, "--markdown", help="Print Markdown in place of the table.")] = False,
    html: Annotated[
        Path | None, flag(_OUTPUT, "--html", metavar="FILE", help="Write one self-contained HTML file with the curve.")
    ] = None,
    quiet: Annotated[bool, flag(_OUTPUT, "--quiet", "-q", help="No progress and no remarks on stderr.")] = False,
) -> None:
    """Find the largest rate of requests at which a deployment keeps its objectives, with an interval.

    The rate of the scenario is what is varied; its requests are drawn anew at each rate, and a trace is cut into
    windows that are scaled in time.  A rate holds, or fails, if the confidence bound on the objective says so; between
    the two lies the answer.  Where every latency depends on how long one looks, close to saturation, no point is given.
    The exit code is 99 if no rate holds.

    \b
    Examples:
      windtunnel capacity chat-8b-h100 --slo 'ttft:p99<500ms' --slo 'tpot:p95<30ms'
      windtunnel capacity chat-8b-h100 --slo 'goodput>=99%' --goodput ttft:500 --goodput tpot:40 --html capacity.html
      windtunnel capacity chat-8b-h100 --slo 'ttft:p99<1s' --set tp=2 --set max_num_seqs=128 --json
    """
    if as_json and markdown:
        raise typer.BadParameter("give one of them", param_hint="--json, --markdown")
    overrides = _overrides(settings or (), slo, goodput)
    if html is not None:
        from windtunnel.rundir import check_can_write_file

        check_can_write_file(html, inputs=(scenario, *_texts(overrides)))
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
        if not quiet:
            note(f"wrote {html}")
    _print(found, as_json=as_json, markdown=markdown)
    if found.outcome == "idle_fails":
        raise typer.Exit(EXIT_SLO_BREACHED)


def _texts(given: Any) -> Iterator[str]:
    """All texts in the values of settings, whichever of them names a file that is read."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping):
        for value in given.values():
            yield from _texts(value)
    elif isinstance(given, list):
        for value in given:
            yield from _texts(value)


def _overrides(settings: Iterable[str], slo: list[str] | None, goodput: list[str] | None) -> dict[str, Any]:
    from windtunnel.comparison_plan import setting_key
    from windtunnel.sweeping.axes import read_value

    found: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise typer.BadParameter(f"{text!r} must read KEY=VALUE", param_hint="--set")
        given = read_value(value.strip())
        key = setting_key(name.strip().lstrip("-").replace("-", "_"), given)
        if key in found:
            raise typer.BadParameter(f"{key} is set twice: drop one of them", param_hint="--set")
        found[key] = given
    for key, option, texts in (("objectives", "--slo", slo), ("goodput", "--goodput", goodput)):
        if texts and key in found:
            raise typer.BadParameter(f"{option} and --set {key} say the same: drop one of them")
        if texts:
            found[key] = texts
    return found


def _searched(
    scenario: str | None,
    overrides: dict[str, Any],
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


def _print(found: MaxRate, *, as_json: bool, markdown: bool) -> None:
    from windtunnel.rundir import to_json

    if as_json:
        emit(to_json(found.to_dict()))
    else:
        emit((found.markdown() if markdown else found.text()).rstrip("\n"))
