"""What the reports of a comparison say besides its numbers: settings that are common and that differ, and warnings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windtunnel.reports.comparison_answer import ComparisonContext, DifferingSetting, failures
from windtunnel.reports.context import ReportContext, ResolvedValue
from windtunnel.scenarios.ledger import SECTION_ORDER
from windtunnel.sim.cost.evidence import UNCALIBRATED, different, evidence_of_run, weakest
from windtunnel.sim.cost.statement import sentences, shown_name
from windtunnel.sim.metrics.comparison import ComparedRuns


@dataclass(frozen=True, slots=True)
class Told:
    """What the scenario says of itself."""

    name: str
    description: str
    teaches: str


def comparison_context(
    told: Told,
    runs: ComparedRuns,
    described: Sequence[Mapping[str, Any]],
    overrides: Mapping[str, Mapping[str, Any]],
    are_saved: bool,
    seeds: Sequence[int] = (),
) -> ComparisonContext:
    """The context of these runs; ``described`` are their settings as ``Resolved.describe`` has them, or nothing."""
    known = [each for each in described if each]
    common, differing = _settings(runs, described)
    costs = _distinct(shown_name(each["metadata"]) for each in known)
    of_runs = _distinct(each["seed"] for each in known)
    shared = ReportContext(
        title=told.name,
        model=" / ".join(_distinct(each["hardware"]["model"] for each in known)),
        gpu=" / ".join(_distinct(_gpu(each["hardware"]) for each in known)),
        engine=" / ".join(_distinct(each["engine"] for each in known)),
        cost_model=" / ".join(costs),
        evidence=weakest(map(evidence_of_run, known)),
        cost=known[0]["cost"] if known and all(each["cost"] == known[0]["cost"] for each in known) else {},
        calibrated_by=tuple(_calibrated_by(runs, described)),
        resolved=common,
        seed=of_runs[0] if len(of_runs) == 1 and not seeds else None,
        version=" / ".join(_distinct(each["windtunnel_version"] for each in known)),
        workload=_shared_workload(known),
        notes=tuple(_said(runs, described, "notes")),
        warnings=(
            *_cautions(known, are_saved),
            *_about_replications(runs),
            *failures(runs),
            *_said(runs, described, "warnings"),
        ),
    )
    return ComparisonContext(shared, told.description, told.teaches, differing, overrides, tuple(seeds))


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(value for value in values if value not in (None, "")))


def _gpu(hardware: Mapping[str, Any]) -> str:
    return f"{hardware['num_gpus']} x {hardware['gpu']}" if hardware["gpu"] else ""


def _settings(
    runs: ComparedRuns, described: Sequence[Mapping[str, Any]]
) -> tuple[tuple[ResolvedValue, ...], tuple[DifferingSetting, ...]]:
    """Settings that all runs share, and those in which they differ, each with its value in every variant."""
    tables = [{(entry["section"], entry["key"]): entry for entry in each["settings"]} for each in described if each]
    owners = [run.variant for run, each in zip(runs.runs, described, strict=True) if each]
    names = dict.fromkeys(name for table in tables for name in table)
    common, differing = [], []
    for section, key in sorted(names, key=lambda name: _section_order(name[0])):
        found = [table.get((section, key)) for table in tables]
        values = [None if entry is None else entry["value"] for entry in found]
        first = next(entry for entry in found if entry is not None)
        if all(value == values[0] for value in values):
            common.append(ResolvedValue(**first))
        elif runs.axis is None or key != runs.axis.key:
            of = {
                name: _unequal([v for v, owner in zip(values, owners, strict=True) if owner == name])
                for name in runs.variants
            }
            differing.append(DifferingSetting(section, key, of))
    return tuple(common), tuple(differing)


def _section_order(section: str) -> int:
    return SECTION_ORDER.index(section) if section in SECTION_ORDER else len(SECTION_ORDER)


def _unequal(values: list[Any]) -> tuple[Any, ...]:
    """Each value once, in order."""
    kept: list[Any] = []
    kept += [value for k, value in enumerate(values) if value not in values[:k]]
    return tuple(kept)


def _shared_workload(known: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = known[0]["workload"] if known else {}
    return {key: value for key, value in first.items() if all(each["workload"].get(key) == value for each in known)}


def _cautions(known: Sequence[Mapping[str, Any]], are_saved: bool) -> Iterator[str]:
    """What makes runs incomparable; those of one plan differ only as they were told to, and in what priced them."""
    grades = [evidence_of_run(each) for each in known]
    if apart := different(grades):
        remedy = ": give all of them the same one (cost = roofline)" if UNCALIBRATED in grades else ""
        yield f"{apart}, so that a part of what the runs differ by is that of their cost models{remedy}."
    if not are_saved:
        return
    if any(each["workload"] != known[0]["workload"] for each in known):
        yield "The runs have different workloads, so that not all of the difference is due to their settings."
    if len({each["windtunnel_version"] for each in known}) > 1:
        yield "The runs were made by different versions of windtunnel."
    if len({json.dumps(each["cost"], sort_keys=True) for each in known}) > 1:
        yield "The runs have different cost models, so that their step times differ for that reason, too."
    objectives = [{key: each.get("objectives", {}).get(key) for key in ("slo", "goodput")} for each in known]
    if any(each != objectives[0] for each in objectives):
        yield "The runs have different objectives, so that goodput and the objectives kept are not comparable."


def _about_replications(runs: ComparedRuns) -> Iterator[str]:
    """Where replications say nothing, and where they do not agree."""
    several = [run for run in runs.runs if run.replications]
    if not several:
        return
    if all(
        {**own, "seed": None} == {**run.replications[0], "seed": None} for run in several for own in run.replications
    ):
        yield (
            "All replications are alike: nothing here depends on the seed (a trace is replayed, and steps have no "
            "noise), so that they say nothing of chance."
        )
    for run in several:
        verdicts = [str(own["stability"]).replace("_", " ") for own in run.replications]
        if len(set(verdicts)) > 1:
            at = "" if runs.axis is None else f" at {runs.axis.key} {runs.axis.values[run.place]}"
            counts = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts))
            yield f"{run.variant}{at}: replications differ in their verdict ({counts}); {run.verdict} is shown."


def _said(runs: ComparedRuns, described: Sequence[Mapping[str, Any]], key: str) -> Iterator[str]:
    """Remarks of the runs, each once, with the variants that they are about unless they are about all."""
    return _once(runs, [each.get(key, ()) for each in described])


def _calibrated_by(runs: ComparedRuns, described: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What profiles state of themselves."""
    said = [
        sentences(each["cost"], has_noise=bool(each["metadata"].get("step_time_noise"))) if each else ()
        for each in described
    ]
    return _once(runs, [(" ".join(texts),) if texts else () for texts in said])


def _once(runs: ComparedRuns, said: Sequence[Iterable[str]]) -> Iterator[str]:
    about: dict[str, dict[str, None]] = {}
    for run, texts in zip(runs.runs, said, strict=True):
        for text in texts:
            about.setdefault(text, {})[run.variant] = None
    for text, names in about.items():
        yield text if len(names) == len(runs.variants) else f"{', '.join(names)}: {text}"
