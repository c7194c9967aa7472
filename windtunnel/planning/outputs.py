"""The recommended deployment as a ``vllm serve`` line and as a scenario file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from windtunnel.memory_settings import served_model
from windtunnel.planning.candidates import Space
from windtunnel.planning.question import Question
from windtunnel.planning.search import Tried
from windtunnel.scenarios.deployments.write import serve_command
from windtunnel.sim.deployment.model import is_bundled, load_model
from windtunnel.toml_words import toml_key, toml_value

_DEPLOYMENT_KEYS = (
    "model",
    "gpu",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "kv_cache_dtype",
    "gpu_memory_utilization",
    "data_parallel_size",
)
_ENGINE_KEYS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
_DEFAULTS = {"pipeline_parallel_size": 1, "kv_cache_dtype": "auto"}


def serve_line(question: Question, space: Space, chosen: Tried) -> str:
    """The ``vllm serve`` line of one replica."""
    wanted = {
        **{key: value for key, value in space.fixed.items() if key != "usage_context"},
        **chosen.candidate.overrides(),
    }
    wanted.pop("gpu")
    wanted["model"] = _served(chosen.shape.model)
    deployment = question.scenario.get("deployment", {})
    for key in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
        if deployment.get(key) is not None:
            wanted[key] = deployment[key]
    return serve_command(wanted, version=space.version.name)


def _served(name: str) -> str:
    """What ``vllm serve`` is given: a bundled model's id, the folder of a config file."""
    return load_model(name).name if is_bundled(name) else served_model(name)


def scenario_table(question: Question, chosen: Tried, num_replicas: int, *, currency: str | None) -> dict[str, Any]:
    """The recommended fleet as a scenario, with the workload and the objectives of the plan."""
    base = {key: value for key, value in question.scenario.items() if key not in ("name", "description", "teaches")}
    overrides = {**chosen.candidate.overrides(), "data_parallel_size": num_replicas}
    deployment = {
        **base.pop("deployment", {}),
        **{key: overrides[key] for key in _DEPLOYMENT_KEYS if overrides[key] != _DEFAULTS.get(key)},
    }
    engine = {**base.pop("engine", {}), **{key: overrides[key] for key in _ENGINE_KEYS if key in overrides}}
    slo: dict[str, Any] = {"objectives": list(question.objectives)}
    if question.goodput:
        slo["goodput"] = list(question.goodput)
    table = {
        "schema_version": base.pop("schema_version", 1),
        "name": f"{question.scenario.get('name', 'plan')}-planned",
        "description": f"Planned: {num_replicas} replicas of {chosen.candidate.label}",
        "seed": question.seed,
        "deployment": deployment,
        "engine": engine,
        "workload": base.pop("workload"),
        "slo": slo,
        **{key: value for key, value in base.items() if key != "seed"},
    }
    if chosen.offer.price_per_hour is not None:
        table["price"] = {"gpu_hour": chosen.offer.price_per_hour, **({"currency": currency} if currency else {})}
    if chosen.offer.busy_watts is not None:
        idle = chosen.offer.idle_watts
        busy = chosen.offer.busy_watts
        table["power"] = {"idle_watts": busy if idle is None else idle, "busy_watts": busy}
    return table


# --- TOML


def toml_text(table: Mapping[str, Any]) -> str:
    """A table of tables as TOML, scalars first, then a section for each table."""
    return "\n".join(_lines(table)) + "\n"


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, Mapping) and value is not None:
            yield f"{toml_key(key)} = {toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield ""
            yield f"[{toml_key(key)}]"
            yield from (f"{toml_key(name)} = {toml_value(each)}" for name, each in value.items() if each is not None)
