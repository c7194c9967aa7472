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
from windtunnel.scenarios.requests import DEFAULT_NUM_PROMPTS
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

    @property
    def is_steady(self) -> bool:
        """Whether the requests come at one rate all along, so that the ramp of a run is no part of what is asked."""
        return is_steady(self.scenario["workload"])

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
_STEADY = ("poisson", "gamma", "constant")
"""Arrival processes whose rate does not change."""
MOST_STEADY = 30_000
"""Requests that a steady synthetic workload is lengthened to at most, where it is planned for at a higher rate."""
MOST_UNEVEN = 100_000
"""The same of one whose rate changes: what is cut off may be its peak."""


def scaled_workload(workload: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """A [workload] whose requests come so many times as fast.

    A trace is replayed faster.  Of a synthetic workload there are as many times more requests, so that it lasts as
    long as before, up to ``MOST_STEADY`` of them (``MOST_UNEVEN`` where the rate changes).
    """
    made = dict(workload)
    if scale == 1:
        return made
    if "trace" in made:
        return {**made, "rate_scale": scale * (made.get("rate_scale") or 1.0)}
    made |= _faster(made, scale)
    if made.get("tenants"):
        made["tenants"] = {
            name: {**load, **_faster(load, scale), **_more(load, "num_requests", scale)}
            if isinstance(load, Mapping)
            else load
            for name, load in made["tenants"].items()
        }
    sessions = made.get("sessions") or {}
    if made.get("num_requests") is None and sessions.get("num_sessions") is not None:
        made["sessions"] = {**sessions, **_more(sessions, "num_sessions", scale, _most(made))}
    else:
        of = {"num_requests": DEFAULT_NUM_PROMPTS, **{key: value for key, value in made.items() if value is not None}}
        made |= _more(of, "num_requests", scale, _most(made))
    return made


def _faster(table: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """The rates of a table of a workload or of a tenant, so many times as high."""
    if isinstance(table.get("arrival"), Mapping):
        rates = {key: scale * float(value) if key in _RATES else value for key, value in table["arrival"].items()}
        return {"arrival": rates}
    return {} if table.get("request_rate") is None else {"request_rate": scale * float(table["request_rate"])}


def _more(table: Mapping[str, Any], key: str, scale: float, most: float = MOST_UNEVEN) -> dict[str, Any]:
    """A number of requests, so many times as large (never a smaller one), as far as ``most``."""
    number = table.get(key)
    return {} if number is None else {key: max(int(number), round(min(scale * int(number), most)))}


def _most(workload: Mapping[str, Any]) -> int:
    return MOST_STEADY if is_steady(workload) else MOST_UNEVEN


def is_steady(workload: Mapping[str, Any]) -> bool:
    """Whether the rate of a [workload] does not change: a synthetic one whose arrivals have the same rate all along."""
    if "trace" in workload:
        return False
    tables = [each for each in (workload.get("tenants") or {}).values() if isinstance(each, Mapping)]
    own = [each for each in tables if each.get("arrival") is not None or each.get("request_rate") is not None]
    arrival = workload.get("arrival")
    return not own and (arrival is None or arrival.get("process") in _STEADY)


def cut_short(workload: Mapping[str, Any], scale: float) -> str:
    """What is to be said where a workload could not be lengthened in proportion to its rate; else empty."""
    sessions = workload.get("sessions") or {}
    number = int(workload.get("num_requests") or sessions.get("num_sessions") or DEFAULT_NUM_PROMPTS)
    if scale <= 1 or "trace" in workload or scale * number <= _most(workload):
        return ""
    made = scaled_workload(workload, scale)
    given = int(made.get("num_requests") or made["sessions"]["num_sessions"])
    rest = "" if is_steady(workload) else " What comes later, be it the peak, is left out."
    return (
        f"At {scale:g} times its rate the workload would have {scale * number:,.0f} requests; {given:,} of them are "
        f"simulated, {100 * given / (scale * number):.0f} % of its duration.{rest}"
    )


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
