"""The answer as a ``vllm serve`` line and as a scenario file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from windtunnel.toml_words import toml_key, toml_value

if TYPE_CHECKING:
    from windtunnel.scenarios.load import Loaded


def serve_line(loaded: Loaded) -> tuple[str, str]:
    """The ``vllm serve`` line of a scenario's deployment, or why there is none."""
    from windtunnel.memory_settings import served_model
    from windtunnel.scenarios.deployments.settings import SETTINGS
    from windtunnel.scenarios.deployments.write import serve_command
    from windtunnel.sim.deployment.model import is_bundled, load_model

    scenario = loaded.scenario
    deployment, engine = scenario.deployment.model_dump(), scenario.engine.model_dump()
    wanted = {key: value for key, value in (deployment | engine).items() if key in SETTINGS}
    policy = getattr(scenario.batching, "policy", "continuous")
    if scenario.fleet is not None:
        return "", "The scenario has a fleet of several pools: each needs a line of its own."
    if scenario.speculative is not None:
        return "", "The scenario drafts tokens: vLLM's --speculative-config has to be given by hand."
    if policy != "continuous":
        return "", f"Batching is {policy}: vLLM has no flag for that."
    model = wanted.get("model")
    if model is None:
        return "", "The scenario names no model."
    wanted["model"] = load_model(model).name if is_bundled(model) else served_model(model)
    try:
        return serve_command(wanted, version=deployment["engine_version"]), ""
    except ValueError as error:
        return "", str(error)


def scenario_text(loaded: Loaded) -> str:
    """A scenario as a file that ``windtunnel simulate`` runs; paths in it are absolute."""
    from windtunnel.trials.trial import trial_of

    own = loaded.scenario
    table: dict[str, Any] = {"schema_version": own.schema_version or 1, "name": f"{own.name}-optimized"}
    table |= {"description": f"{own.name} with the settings that windtunnel optimize found"}
    table |= trial_of(loaded).argument.scenario
    return "\n".join(_lines(table)) + "\n"


def _lines(table: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """Scalars and lists first, then a section for each table."""
    for key, value in table.items():
        if value is not None and not isinstance(value, Mapping):
            yield f"{toml_key(key)} = {toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            if name:
                yield f"{toml_key(key)} = {toml_value(value)}"
            else:
                yield f"\n[{toml_key(key)}]"
                yield from _lines(value, key)
