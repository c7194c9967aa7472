"""What the reports of a sweep say beside its numbers: what was simulated, and how far its step times may be off."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel import __version__
from windtunnel.reports.context import ReportContext, ResolvedValue
from windtunnel.sim.cost.evidence import UNCALIBRATED, different, evidence_of_summary, weakest
from windtunnel.sim.cost.statement import CostStatement, shown_name
from windtunnel.trials import Obstacle, resolved_or_obstacle

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded

Run = Mapping[str, Any]
MOST_WARNINGS = 8
_OUTSIDE = re.compile(r"\(([\d.]+) ?% of the time\) lies? outside of what the profile")


def describe(loaded: Iterable[Loaded]) -> dict[str, Any] | None:
    """The settings of the first of these scenarios that can run, as ``Resolved.describe`` has them."""
    from windtunnel.scenarios.errors import ScenarioError

    for each in loaded:
        try:
            found = resolved_or_obstacle(each)
        except ScenarioError:  # the base alone may lack what is varied
            continue
        if not isinstance(found, Obstacle):
            return found.describe()
    return None


def own_settings(described: Mapping[str, Any] | None) -> dict[str, Any]:
    """The values of all settings by their keys."""
    return {entry["key"]: entry["value"] for entry in (described or {}).get("settings", ())}


def report_context(
    title: str,
    described: Mapping[str, Any] | None,
    runs: Sequence[Run],
    varied: Iterable[str],
    seeds: Sequence[int],
    notes: Iterable[str] = (),
) -> ReportContext:
    """What is common to all runs, from the settings of one of them and from what each came to.

    ``notes`` are those on the design, and come before those on the settings.
    """
    told = described or {}
    hidden = set(varied)
    known = [run for run in runs if not run.get("infeasible")]
    costs = list(dict.fromkeys(shown_name(run) for run in known if run.get("cost_model")))
    return ReportContext(
        title=title,
        model=_joined(run.get("model_id") for run in known),
        gpu=_gpus(told, known, hidden),
        engine="" if "engine_version" in hidden or not told else told["engine"],
        cost_model=" / ".join(costs),
        evidence=weakest(map(evidence_of_summary, known)),
        cost=told.get("cost", {}) if len(costs) == 1 else {},
        calibrated_by=tuple(_calibrated_by(known)),
        resolved=tuple(ResolvedValue(**each) for each in told.get("settings", ()) if each["key"] not in hidden),
        seed=seeds[0] if len(seeds) == 1 else None,
        version=__version__,
        workload=told.get("workload", {}),
        notes=(*notes, *told.get("notes", ())),
        warnings=tuple(_warnings(told, known)),
    )


def _joined(values: Iterable[Any]) -> str:
    return " / ".join(str(value) for value in dict.fromkeys(values) if value)


def _gpus(told: Mapping[str, Any], known: Sequence[Run], hidden: set[str]) -> str:
    gpu = told.get("hardware", {}).get("gpu")
    if not gpu or "gpu" in hidden:
        return ""
    numbers = sorted({int(run["num_gpus"]) for run in known if run.get("num_gpus")})
    return f"{' / '.join(map(str, numbers))} x {gpu}" if numbers else str(gpu)


def _calibrated_by(known: Sequence[Run]) -> Iterator[str]:
    """Where step times of profiles come from and how far off they are, each profile once."""
    names = dict.fromkeys(shown_name(run) for run in known)
    told: dict[str, None] = {}
    for run in known:
        if not run.get("cost_model_calibrated"):
            continue
        statement = CostStatement(
            str(run.get("cost_model_statement") or ""),
            run.get("step_time_error_p50_percent"),
            run.get("step_time_error_p90_percent"),
            str(run.get("step_time_error_rests_on") or ""),
        )
        whose = f" of {shown_name(run)}" if len(names) > 1 else ""
        told[f"Step times{whose}: {statement.origin}; error: {statement.error}."] = None
    yield from told


def _warnings(told: Mapping[str, Any], known: Sequence[Run]) -> Iterator[str]:
    grades = [evidence_of_summary(run) for run in known]
    if apart := different(grades):
        remedy = ": give all of them the same one (--set cost=roofline)" if UNCALIBRATED in grades else ""
        yield f"{apart}, so that a part of what the points differ by is that of their cost models{remedy}."
    said = [*told.get("warnings", ()), *(line for run in known for line in str(run.get("warnings") or "").splitlines())]
    yield from _extrapolated(said, len(known))
    others = [text for text in dict.fromkeys(said) if not _OUTSIDE.search(text)]
    yield from others[:MOST_WARNINGS]
    if others[MOST_WARNINGS:]:
        yield f"... and {len(others) - MOST_WARNINGS:,} more warnings of single points."


def _extrapolated(said: Iterable[str], num_runs: int) -> Iterator[str]:
    """How many runs took steps outside of their profile's domain, and how much of the time at most."""
    found = [float(match[1]) for text in said if (match := _OUTSIDE.search(text))]
    if found:
        most = f"up to {max(found):g} %" if max(found) >= 1 else "less than 1 %"
        yield (
            f"{len(found):,} of {num_runs:,} runs took steps outside of what their profile was measured at, for {most} "
            "of the time: these are extrapolated, and the profile's stated error does not cover them."
        )


def command_of(scenario: Any, vary: Mapping[str, Any], options: Mapping[str, Any], common: Mapping[str, Any]) -> str:
    """The command line that does the same; empty for a scenario that no file holds.

    ``options`` are by the names of their flags; True is a flag without a value, and None and False are left out.
    """
    if not (scenario is None or isinstance(scenario, str | Path)):
        return ""
    words = ["windtunnel", "sweep", *([] if scenario is None else [str(scenario)])]
    for key, spec in vary.items():
        words += ["--vary", f"{key}={spec if isinstance(spec, str) else ';'.join(map(_written, spec))}"]
    for key, value in common.items():
        if key != "seed":
            words += ["--set", f"{key}={_written(value)}"]
    for name, value in options.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is not None and each is not False:
                words += [f"--{name}"] if each is True else [f"--{name}", _written(each)]
    return shlex.join(words)


def _written(value: Any) -> str:
    """A value as TOML writes it; text as it is."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_quoted(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_quoted, value))}]"
    return str(value)


def _quoted(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else _written(value)
