"""From what the page asks to a scenario: a preset, and the knobs that were turned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.ui.errors import BadQuestion
from windtunnel.ui.knobs import ALL_AT_ONCE, MAX_REQUESTS, knob
from windtunnel.ui.lengths import nominal_mean, scaled_to

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded
    from windtunnel.scenarios.schema import Scenario, SyntheticWorkload

START = "chat-8b-h100"
"""The preset of a page that was given no scenario."""
USUAL_REQUESTS = 1_000
"""Requests of an answer, unless told otherwise."""
MARK = " on the page"
"""What stands behind a knob's name where a complaint says who gave a value."""
_FIELDS = ("preset", "settings", "tab")
_KNOBS_OF_WORKLOADS = ("input", "output")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: where to begin, and what is otherwise."""

    preset: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values by knob, checked; a knob that is not turned is not there."""

    @property
    def key(self) -> str:
        """The same for the same question."""
        return json.dumps([self.preset, dict(sorted(self.settings.items()))])

    def without(self, *names: str) -> Question:
        """The question with these knobs as they were."""
        return Question(self.preset, {name: value for name, value in self.settings.items() if name not in names})


def read_question(body: Any, presets: Mapping[str, Any]) -> Question:
    """A question from plain data.

    Raises BadQuestion, naming the place, for anything else than a known preset and known knobs with values in range.
    """
    if not isinstance(body, Mapping):
        raise BadQuestion(f"the question must be an object with {', '.join(_FIELDS)}, got {_kind(body)}", "question")
    for name in body:
        if name not in _FIELDS:
            raise BadQuestion(f"the question has no {str(name)[:60]!r}: there are {', '.join(_FIELDS)}", "question")
    preset, settings = body.get("preset", ""), body.get("settings", {})
    if not isinstance(preset, str) or preset not in presets:
        raise BadQuestion(f"preset = {str(preset)[:60]!r} must be one of {', '.join(presets)}", "preset")
    if not isinstance(settings, Mapping):
        raise BadQuestion(f"settings must be an object of knobs and values, got {_kind(settings)}", "settings")
    return Question(preset, {name: knob(str(name)).read(value) for name, value in settings.items()})


def _kind(value: Any) -> str:
    return type(value).__name__


def load(question: Question) -> Loaded:
    """The scenario that is asked about, at most MAX_REQUESTS requests of it.  Raises ScenarioError."""
    from windtunnel.scenarios.load import Override, load_scenario

    base = load_scenario(question.preset)
    overrides = dict(_workload_overrides(question, base.scenario))
    for name, value in question.settings.items():
        if name not in overrides and name not in (*_KNOBS_OF_WORKLOADS, "num_requests"):
            overrides[name] = _value(name, value)
    made = {name: Override(value, f"{name}{MARK}") for name, value in overrides.items()}
    return load_scenario(question.preset, made)


def _value(name: str, value: Any) -> Any:
    if name == "objectives":
        return [text for text in str(value).replace(",", " ").split() if text]
    if name == "request_rate":
        return float("inf") if value == ALL_AT_ONCE else float(value)
    return None if value == "none" else value


def _workload_overrides(question: Question, scenario: Scenario) -> Mapping[str, Any]:
    """What of the workload is otherwise: how many requests, and how long they are."""
    from windtunnel.scenarios.schema import SyntheticWorkload

    workload, settings = scenario.workload, question.settings
    wanted = int(settings.get("num_requests", 0)) or None
    if not isinstance(workload, SyntheticWorkload):
        for name in ("input", "output", "request_rate"):
            if name in settings:
                raise BadQuestion(f"{name}: a trace brings its own; turn rate_scale, or choose another preset", name)
        return {"limit": min(wanted or USUAL_REQUESTS, workload.limit or MAX_REQUESTS, MAX_REQUESTS)}
    if "rate_scale" in settings:
        raise BadQuestion("rate_scale: only a trace can be sped up; turn request_rate instead", "rate_scale")
    overrides = _number_of_requests(workload, wanted)
    for name in _KNOBS_OF_WORKLOADS:
        if name in settings:
            overrides[name] = scaled_to(getattr(workload, name), settings[name])
    return overrides


def _number_of_requests(workload: SyntheticWorkload, wanted: int | None) -> dict[str, Any]:
    """So many requests; as many as the scenario has where that is few enough."""
    own = _own_numbers(workload)
    if own:
        return _of_tenants(workload, own, wanted)
    sessions = dict(workload.sessions or {})
    num_sessions = sessions.pop("num_sessions", None)
    if num_sessions is not None and wanted is None:
        turns = sessions.get("turns", 1)
        mean_turns = nominal_mean(turns) if isinstance(turns, int | Mapping) else 1
        if num_sessions * mean_turns <= MAX_REQUESTS:
            return {}
    number = {"num_requests": wanted or min(workload.num_requests or USUAL_REQUESTS, USUAL_REQUESTS)}
    return number | ({"sessions": sessions} if num_sessions is not None else {})


def _own_numbers(workload: SyntheticWorkload) -> dict[str, int]:
    """Requests of tenants that have a number of their own."""
    tables = {name: table for name, table in (workload.tenants or {}).items() if isinstance(table, Mapping)}
    return {name: table["num_requests"] for name, table in tables.items() if isinstance(table.get("num_requests"), int)}


def _of_tenants(workload: SyntheticWorkload, own: Mapping[str, int], wanted: int | None) -> dict[str, Any]:
    """The same mixture in so many requests; the table of a workload is replaced as a whole."""
    total = sum(own.values())
    if wanted is None and total <= MAX_REQUESTS:
        return {}
    factor = (wanted or MAX_REQUESTS) / total
    tenants = dict(workload.tenants or {})
    for name, number in own.items():
        tenants[name] = {**_table(tenants[name]), "num_requests": max(1, int(number * factor))}
    return {"workload": {**workload.model_dump(exclude_unset=True), "tenants": tenants}}


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


_AS_GIVEN = {
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "model",
    "gpu",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
}


def values_of(scenario: Scenario) -> dict[str, Any]:
    """What the knobs of a scenario stand at, as far as it says so itself; None where a knob does not apply."""
    from windtunnel.scenarios.schema import SyntheticWorkload

    deployment, engine, workload = scenario.deployment, scenario.engine, scenario.workload
    values: dict[str, Any] = {
        **deployment.model_dump(include=_AS_GIVEN),
        "tensor_parallel_size": deployment.tensor_parallel_size or 1,
        "pipeline_parallel_size": deployment.pipeline_parallel_size or 1,
        "data_parallel_size": None if scenario.fleet else deployment.data_parallel_size or 1,
        **engine.model_dump(
            include={"max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching"}
        ),
        "max_concurrency": workload.max_concurrency or "none",
        "seed": scenario.seed or 0,
        "objectives": " ".join(scenario.slo.objectives),
        "gpu_hour": scenario.price.gpu_hour if isinstance(scenario.price.gpu_hour, float) else None,
    }
    if not isinstance(workload, SyntheticWorkload):
        return values | {"rate_scale": workload.rate_scale or 1, "num_requests": workload.limit}
    values |= {
        "request_rate": _rate(workload.request_rate, workload.arrival),
        "input": nominal_mean(workload.input),
        "output": nominal_mean(workload.output),
        "num_requests": sum(_own_numbers(workload).values()) or workload.num_requests,
    }
    of_tenants = {key for table in (workload.tenants or {}).values() for key in _table(table)}
    return values | {knob: None for knob, keys in _LEFT_TO_TENANTS.items() if of_tenants & set(keys)}


_LEFT_TO_TENANTS = {
    "request_rate": ("request_rate", "arrival", "burstiness"),
    "input": ("input",),
    "output": ("output",),
}
"""Knobs that do not apply where tenants have these keys of their own."""


def _rate(rate: float | None, arrival: Mapping[str, Any] | None) -> float | str | None:
    """Requests per second; None where an arrival process has none of its own."""
    if arrival is not None:
        given = arrival.get("rate")
        return float(given) if isinstance(given, int | float) else None
    return ALL_AT_ONCE if rate is None or rate == float("inf") else rate


def presets(given: str | None) -> dict[str, str]:
    """Names of what a page can begin with, each with its description; what it was started with comes first."""
    from windtunnel.scenarios.load import bundled_scenarios, load_scenario

    bundled = bundled_scenarios()
    first = given or START
    if first in bundled and not Path(first).is_file():
        return {first: bundled[first], **bundled}
    return {
        first: load_scenario(first).scenario.description or "The scenario that the page was started with.",
        **bundled,
    }
