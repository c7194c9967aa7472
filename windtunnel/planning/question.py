"""What is asked of a plan, as plain data that any process can work on: scenario, objectives, seed, sample sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from windtunnel.planning.candidates import Candidate
from windtunnel.scenarios.errors import ScenarioError
from windtunnel.scenarios.load import Loaded, Override, load_scenario
from windtunnel.scenarios.resolve import Resolved, read_workload, resolve
from windtunnel.scenarios.schema import TraceWorkload
from windtunnel.sim.metrics.slo import GoodputLimits, Slo, parse_slos
from windtunnel.sim.rng import stream
from windtunnel.sim.workload import Workload

_CHOSEN = (
    "model",
    "gpu",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "kv_cache_dtype",
    "gpu_memory_utilization",
    "data_parallel_size",
)
"""Keys of [deployment] that the plan chooses itself."""
_CHOSEN_KNOBS = ("max_num_seqs", "max_num_batched_tokens")
_ONE_REQUEST = {"num_requests": 1, "input": 16, "output": 16}


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that decides the result of a simulation of a candidate, beside the candidate."""

    scenario: Mapping[str, Any]
    """The scenario as a table with absolute paths, without what the plan chooses."""
    objectives: tuple[str, ...]
    goodput: tuple[str, ...] = ()
    seed: int = 0
    scale: float = 1.0
    """How many times as fast the scenario's workload comes as it was written; it is already so in ``scenario``."""
    num_requests: int = 1500
    """Requests of one simulation in the search, at least (where the workload has so many)."""
    replications: int = 5
    percentiles: tuple[float, ...] = field(default=(50.0, 90.0, 95.0, 99.0))

    def to_dict(self) -> dict[str, Any]:
        """Plain data from which ``question_of`` makes it again."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


def question_of(told: Mapping[str, Any]) -> Question:
    """The question that ``to_dict`` told."""
    values = {**told, **{name: tuple(told[name]) for name in ("objectives", "goodput", "percentiles")}}
    return Question(**values)


def table_of(loaded: Loaded) -> dict[str, Any]:
    """A scenario as a table that means the same in any folder: paths are absolute, chosen settings are left out.

    Raises ScenarioError for a fleet of several kinds or one that changes, which a plan does not choose.
    """
    fleet = loaded.scenario.fleet
    if fleet is not None and (fleet.pools or fleet.autoscaler is not None or fleet.faults):
        raise ScenarioError(
            f"{loaded.origin}: a plan chooses one kind of replica and their number: leave pools, autoscaler and faults "
            "of [fleet] out"
        )
    table = loaded.scenario.model_dump(mode="json", exclude_unset=True)
    table["name"] = loaded.scenario.name
    workload = loaded.scenario.workload
    if isinstance(workload, TraceWorkload):
        table["workload"]["trace"] = str(loaded.path_of("workload", "trace", workload.trace).absolute())
    cost = table.get("cost", {})
    if cost.get("path"):
        cost["path"] = str(loaded.path_of("cost", "path", cost["path"]).absolute())
    deployment = {key: value for key, value in table.get("deployment", {}).items() if key not in _CHOSEN}
    engine = {key: value for key, value in table.get("engine", {}).items() if key not in _CHOSEN_KNOBS}
    dropped = ("slo", "compare", "run", "plan", "price", "power")
    kept = {key: value for key, value in table.items() if key not in (*dropped, "deployment", "engine")}
    return {**kept, "deployment": deployment, "engine": engine}


_RATES = ("rate", "off_rate", "start_rate", "end_rate")


def scaled_workload(workload: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """A [workload] whose requests come so many times as fast."""
    made = dict(workload)
    if scale == 1:
        return made
    if "trace" in made:
        return {**made, "rate_scale": scale * (made.get("rate_scale") or 1.0)}
    if made.get("arrival"):
        arrival = {key: scale * float(value) if key in _RATES else value for key, value in made["arrival"].items()}
        return {**made, "arrival": arrival}
    if made.get("request_rate") is not None:
        made["request_rate"] = scale * float(made["request_rate"])
    return made


def model_path(loaded: Loaded, name: str) -> str:
    """A model's name, or the absolute path of its config.json."""
    found = loaded.model_of("deployment", "model", name)
    return str(Path(found).absolute()) if found != name or Path(found).exists() else found


# --- in any process: made once, kept while the process lives


def objectives_of(question: Question) -> tuple[tuple[Slo, ...], GoodputLimits | None]:
    """The objectives and the limits of goodput, read."""
    return parse_slos(question.objectives), (GoodputLimits.parse(question.goodput) if question.goodput else None)


def workload_of(question: Question, replication: int = 0) -> Workload:
    """The workload.  Replications of a synthetic one draw it anew; a trace is what it is."""
    table = question.scenario
    is_trace = "trace" in table["workload"]
    seed = question.seed if is_trace or replication == 0 else _seed_of(question.seed, replication)
    return _workload(json.dumps(table, sort_keys=True), seed)


def _seed_of(seed: int, replication: int) -> int:
    return int(stream(seed, "plan", "workload", replication).integers(2**31))


@lru_cache(maxsize=16)
def _workload(table: str, seed: int) -> Workload:
    return read_workload(load_scenario(json.loads(table), {"seed": Override(seed, "seed")}))


def deployment_of(question: Question, candidate: Candidate, num_replicas: int = 1) -> Resolved:
    """The candidate resolved as ``windtunnel simulate`` would, with a workload of one request in place of the real one.

    Raises what ``resolve`` raises.
    """
    return _deployment(json.dumps(question.scenario, sort_keys=True), question.seed, candidate, num_replicas)


@lru_cache(maxsize=512)
def _deployment(table: str, seed: int, candidate: Candidate, num_replicas: int) -> Resolved:
    chosen = {**candidate.overrides(), "data_parallel_size": num_replicas, "seed": seed, "workload": _ONE_REQUEST}
    overrides = {key: Override(value, "plan") for key, value in chosen.items()}
    return resolve(load_scenario(json.loads(table), overrides))
