"""``windtunnel compare``: several variants on one workload, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.cli import options
from windtunnel.cli.errors import EXIT_INFEASIBLE
from windtunnel.cli.output import emit, note, warn
from windtunnel.cli.panels import flag
from windtunnel.cli.results import check_files, check_one_form
from windtunnel.cli.settings import read_setting

if TYPE_CHECKING:
    from windtunnel.comparison import Comparison
    from windtunnel.comparison_plan import ComparisonPlan, PlannedRun
    from windtunnel.sim.metrics.comparison import ComparedRun
    from windtunnel.trials.obstacle import Obstacle

_WHAT, _RUN, _OUTPUT = "What is compared", "Run", "Output"
_LISTS = ("objectives", "goodput", "percentiles", "values", "preferred_batch_size")
"""Settings that are lists: one value on the command line is a list of one."""
NO_AXIS = "none"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is done with the result."""

    as_json: bool
    markdown: bool
    html: Path | None
    csv: Path | None
    quiet: bool
    with_purpose: bool
    """Whether to say what the scenario teaches: of its own comparison only."""


def compare(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCENARIO | RUN_DIR RUN_DIR ...",
            help="A scenario file, or the name of a bundled one; or two or more folders that windtunnel simulate -o "
            "wrote.",
            show_default=False,
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        flag(
            _WHAT,
            "--variant",
            metavar="'NAME; KEY=VALUE; ...'",
            help="A variant: its name, and what it sets; repeat it.",
        ),
    ] = None,
    batching: Annotated[
        list[str] | None,
        flag(_WHAT, "--batching", metavar="POLICY", help="A batching policy as a variant of its own name; repeat it."),
    ] = None,
    over: Annotated[
        str | None,
        flag(
            _WHAT,
            "--over",
            metavar="KEY=V1,V2,...",
            help="Run each variant at each of these values of a setting; KEY alone takes the scenario's.",
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        flag(
            _WHAT,
            "--metric",
            metavar="KEY",
            help="What curves and crossings are about: a key of simulate's --json; repeat it.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        flag(_WHAT, "--baseline", metavar="NAME", help="Count changes from this variant, not from the first."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        flag(_RUN, "--set", metavar="KEY=VALUE", help="A setting for all runs, in place of the scenario's; repeat it."),
    ] = None,
    seed: Annotated[int | None, options.seed(_RUN)] = None,
    reps: Annotated[
        int,
        flag(
            _RUN,
            "--reps",
            metavar="N",
            min=1,
            help="Run each N times, with seeds from --seed on, the same for all: differences then have intervals.",
        ),
    ] = 1,
    jobs: Annotated[
        int, flag(_RUN, "--jobs", "-j", metavar="N", min=1, help="Processes that share the work; same results.")
    ] = 1,
    dry_run: Annotated[bool, flag(_RUN, "--dry-run", help="List the runs and what they set; run nothing.")] = False,
    as_json: Annotated[bool, options.json_for_table(_OUTPUT)] = False,
    markdown: Annotated[bool, options.markdown_for_table(_OUTPUT)] = False,
    html: Annotated[
        Path | None,
        flag(_OUTPUT, "--html", metavar="FILE", help="Write one self-contained HTML file with the curves."),
    ] = None,
    csv: Annotated[Path | None, options.csv_of_runs(_OUTPUT)] = None,
    quiet: Annotated[bool, options.quiet(_OUTPUT)] = False,
) -> None:
    """Run several variants (policies, settings) on one workload and compare them: who leads, by how much, and where
    their curves cross.

    A scenario may say in [compare] what is compared.  --variant and --batching take the place of its variants (and of
    its axis, unless --over names it), --over that of its axis (--over none: no axis).  KEY is a key of a scenario file
    (windtunnel schema --markdown) or its flag's name (tp, dp, pp and rate, too).  Parts are separated by ';' if there
    is one, else by ','.

    \b
    Examples:
      windtunnel compare chat-8b-h100 --variant 'small; max_num_seqs=32' --variant 'large; max_num_seqs=256'
      windtunnel compare chat-8b-h100 --batching continuous --batching static:batch_size=8 --set num_prompts=300
      windtunnel compare chat-8b-h100 --variant 2k,max_num_batched_tokens=2k --variant 8k,max_num_batched_tokens=8k
                         --over request_rate=5,10,20 --metric output_throughput --metric p99_itl_ms --html rate.html
      windtunnel compare chat-8b-h100 --over 'output=256; exponential:mean=256'
      windtunnel compare chat-8b-h100 --variant 'a; max_num_seqs=32' --variant 'b; max_num_seqs=64' --reps 10
      windtunnel compare runs/64 runs/32
      windtunnel compare runs/64-seed0 runs/64-seed1 runs/32-seed0 runs/32-seed1
    """
    is_its_own = not (variant or batching or over)
    wanted = _Wanted(as_json, markdown, html, csv, quiet, with_purpose=is_its_own and not quiet)
    check_one_form(as_json=as_json, markdown=markdown)
    _check_outputs(wanted, targets or ())
    if _are_runs(targets or ()):
        _refuse_with_runs(variant=variant, batching=batching, over=over, set=settings, seed=seed, dry_run=dry_run)
        _refuse_with_runs(reps=reps > 1)
        from windtunnel.comparison import compare_runs

        _finish(compare_runs(targets or (), metrics=metric or (), baseline=baseline), wanted)
        return
    plan = _plan(targets or [], variant, batching, over, metric, baseline, settings, seed, reps)
    if dry_run:
        emit(_plan_text(plan, as_json=as_json))
        return
    from windtunnel.comparison import execute_plan

    _finish(execute_plan(plan, jobs=jobs, tell=None if quiet else _Teller(plan)), wanted)


# --- what to do


def _are_runs(targets: Sequence[str]) -> bool:
    """Whether saved runs are named.  Raises BadParameter for several things of which one is none."""
    from windtunnel.comparison import is_run

    runs = [target for target in targets if is_run(target)]
    if len(targets) > 1 and len(runs) < len(targets):
        other = next(target for target in targets if target not in runs)
        raise typer.BadParameter(
            f"{other} is no folder of a saved run (windtunnel simulate -o): give one scenario, or several such folders",
            param_hint="SCENARIO | RUN_DIR",
        )
    return bool(runs)


def _refuse_with_runs(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise typer.BadParameter(
                "saved runs are compared as they are; name a scenario to run something",
                param_hint=f"--{name.replace('_', '-')}",
            )


def _check_outputs(wanted: _Wanted, targets: Sequence[str]) -> None:
    check_files({"--html": wanted.html, "--csv": wanted.csv}, targets)
    for path in (wanted.html, wanted.csv):
        if path is not None:
            _check_is_no_input(path, targets)


def _check_is_no_input(path: Path, targets: Sequence[str]) -> None:
    """A result must not take the place of what it is made from."""
    for target in map(Path, targets):
        if target.exists() and (path.resolve() == target.resolve() or target.resolve() in path.resolve().parents):
            if target.is_dir() and not path.exists():
                continue  # a new file beside a run's own
            raise typer.BadParameter(f"{path} is part of what is compared ({target}): name another file")


def _plan(
    targets: Sequence[str],
    variant: Iterable[str] | None,
    batching: Iterable[str] | None,
    over: str | None,
    metric: Iterable[str] | None,
    baseline: str | None,
    settings: Iterable[str] | None,
    seed: int | None,
    reps: int,
) -> ComparisonPlan:
    from windtunnel.comparison_plan import plan_comparison
    from windtunnel.scenarios.load import Override

    given = _settings_of("--set", settings or ())
    common = {key: Override(value, f"--set {key}") for key, value in given.items()}
    common |= {} if seed is None else {"seed": Override(seed, "--seed")}
    variants = [*map(_variant, variant or ()), *((policy, {"batching": policy}) for policy in batching or ())]
    for number, (name, _) in enumerate(variants):
        if name in (earlier for earlier, _ in variants[:number]):
            raise typer.BadParameter(f"two variants are called {name!r}: give each a name", param_hint="--variant")
    axis, values = (None, ()) if over is None else _axis(over)
    return plan_comparison(
        targets[0] if targets else None,
        dict(variants) or None,
        axis=axis,
        values=values,
        metrics=metric or (),
        baseline=baseline,
        overrides=common,
        reps=reps,
    )


def _variant(text: str) -> tuple[str, dict[str, Any]]:
    """``NAME; key=value; key=value``; without a name it is called by what it sets."""
    first, *rest = _parts(text)
    if "=" in first:
        return text.strip(), _settings_of(text, (first, *rest))
    return first, _settings_of(first, rest)


def _settings_of(name: str, texts: Iterable[str]) -> dict[str, Any]:
    """Settings of one variant, or of all runs, by key.  Raises BadParameter for a key that is set twice."""
    found: dict[str, Any] = {}
    for text in texts:
        key, value = _setting(text)
        if key in found:
            raise typer.BadParameter(f"{name}: {key} is set twice, drop one of them", param_hint="--variant, --set")
        found[key] = value
    return found


def _axis(text: str) -> tuple[str, tuple[Any, ...]]:
    from windtunnel.sweeping.axes import read_value, value_of

    if text.strip() == NO_AXIS:
        return "", ()
    name, equals, values = text.partition("=")
    key = _key(name, "")
    if not key or (equals and not values.strip()):
        raise typer.BadParameter(f"{text!r} must read KEY=VALUE,VALUE,..., KEY or {NO_AXIS}", param_hint="--over")
    if not equals:
        return key, ()
    parts = _parts(values)
    key = _key(name, read_value(parts[0]))
    return key, tuple(_listed(key, value_of(key, part)) for part in parts)


def _parts(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(";" if ";" in text else ",")]
    kept = [part for part in parts if part]
    if not kept:
        raise typer.BadParameter(f"{text!r} is empty", param_hint="--variant, --over")
    return kept


def _setting(text: str) -> tuple[str, Any]:
    key, given = read_setting(text, "--variant, --set", advice=" (separate with ';' where a value has commas)")
    return key, _listed(key, given)


def _key(name: str, value: Any) -> str:
    """A key as the scenario file has it; a flag's name will do."""
    from windtunnel.comparison_plan import setting_key

    return setting_key(name.strip().lstrip("-").replace("-", "_"), value)


def _listed(key: str, value: Any) -> Any:
    return [value] if key in _LISTS and not isinstance(value, list) else value


# --- telling


class _Teller:
    """Says on stderr what a run came to, and once what it warned of."""

    def __init__(self, plan: ComparisonPlan) -> None:
        self.plan = plan
        self.done = 0

    def __call__(self, planned: PlannedRun, run: ComparedRun) -> None:
        self.done += 1
        place = f", {self.plan.axis} {self.plan.value_words(planned.place)}" if self.plan.axis else ""
        times = f" ({len(self.plan.seeds)} replications)" if self.plan.seeds else ""
        note(f"{self.done} of {len(self.plan.runs)}: {planned.variant}{place}: {run.verdict}{times}")


def _plan_text(plan: ComparisonPlan, *, as_json: bool) -> str:
    from windtunnel.cli.dry_run import table
    from windtunnel.reports.values import plain
    from windtunnel.rundir import to_json

    obstacles = plan.check()
    if as_json:
        runs = [
            {
                "variant": run.variant,
                "place": run.place,
                "overrides": run.overrides,
                "infeasible": None if obstacle is None else obstacle.reason,
            }
            for run, obstacle in zip(plan.runs, obstacles, strict=True)
        ]
        return to_json(
            {
                "scenario": plan.scenario.name,
                "axis": plan.axis,
                "values": list(plan.values),
                "metrics": list(plan.metrics),
                "baseline": plan.baseline,
                **({"seeds": list(plan.seeds)} if plan.seeds else {}),
                "runs": runs,
            }
        )
    sets = [", ".join(f"{key} = {plain(value)}" for key, value in run.overrides.items()) for run in plan.runs]
    rows = [(str(number), run.variant, sets[number - 1]) for number, run in enumerate(plan.runs, 1)]
    lines = [f"scenario: {plan.scenario.name}", f"metrics: {', '.join(plan.metrics)}", f"baseline: {plan.baseline}"]
    if plan.seeds:
        lines.append(f"replications of each run: {len(plan.seeds)}, seeds {plan.seeds[0]} to {plan.seeds[-1]}")
    lines.append("")
    return "\n".join([*lines, *table([("run", "variant", "sets"), *rows]), *_told(plan, obstacles)])


def _told(plan: ComparisonPlan, obstacles: Sequence[Obstacle | None]) -> list[str]:
    runs = enumerate(zip(plan.runs, obstacles, strict=True), 1)
    return [
        f"run {number} ({run.variant}) is {obstacle.verdict}: {obstacle.reason}"
        for number, (run, obstacle) in runs
        if obstacle is not None
    ]


def _finish(comparison: Comparison, wanted: _Wanted) -> None:
    """Write and print; raises typer.Exit(4) if no variant can be run."""
    from windtunnel.rundir import to_json

    if wanted.html is not None:
        comparison.report(wanted.html)
    if wanted.csv is not None:
        comparison.to_csv(wanted.csv)
    if wanted.as_json:
        emit(to_json(comparison.to_dict()))
    else:
        text = comparison.text(with_purpose=wanted.with_purpose)
        emit((comparison.markdown() if wanted.markdown else text).rstrip("\n"))
    if wanted.as_json:
        for text in comparison.context.common.warnings:
            warn(text)
    if comparison.is_infeasible:
        raise typer.Exit(EXIT_INFEASIBLE)
