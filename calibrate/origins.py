"""Where measured steps come from: what a profile says of it, and which tables may be fitted together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

DEPLOYMENT = (
    *("engine", "vllm", "torch", "triton", "gpu", "device", "cpu", "num_threads", "model", "model_config"),
    *("architectures", "dtype", "quantization", "kv_cache_dtype", "block_size", "enforce_eager", "executor"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"),
    *("async_scheduling", "speculative_method", "num_speculative_tokens", "cudagraph_mode", "clock", "includes_host"),
)
"""Keys of a provenance that must not differ between tables that are fitted together: they change what a step takes."""

_LARGEST_GRAPH = 512
"""Of vLLM by default, see ``sim.cost.features.graph_sizes``."""


class DifferentDeployments(ValueError):
    """Steps of different deployments were to be mixed."""


def merged(origins: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """One provenance for several tables, each given by its name and its own; keys that differ become lists.

    A key that only some of the tables state is taken to hold for all.  Raises DifferentDeployments, naming the key and
    the tables, where what they say of their deployments differs.
    """
    told: dict[str, Any] = {}
    first: dict[str, str] = {}
    for name, origin in origins:
        for key, value in origin.items():
            if value is None:
                continue
            if key not in told:
                told[key], first[key] = value, name
            elif told[key] != value and key in DEPLOYMENT:
                raise DifferentDeployments(
                    f"{name} has {key} {value!r}, but {first[key]} has {told[key]!r}: fit each deployment by itself"
                )
            elif told[key] != value:
                told[key] = _listed(told[key], value)
    return told


def _listed(before: Any, value: Any) -> list[Any]:
    values = list(before) if isinstance(before, list) else [before]
    for each in value if isinstance(value, list) else [value]:
        if each not in values:
            values.append(each)
    return values


def gpu_name(device: str | None) -> str | None:
    """Our name of the card that a driver calls so; None for a processor or a card that is not in our table."""
    from windtunnel.sim.deployment.gpu import load_gpu

    if not device:
        return None
    try:
        return load_gpu(device).name
    except ValueError:
        return None


def model_name(model: str | None) -> str | None:
    """Our name of a bundled model; else what was given."""
    from windtunnel.sim.deployment.model import load_model

    try:
        return None if model is None else load_model(model).name
    except ValueError:
        return model


def max_graph_tokens(origin: Mapping[str, Any]) -> int:
    """The largest batch that ran as a CUDA graph, by a table's provenance; 512, vLLM's default, where it does not say.

    0 is none: ``--enforce-eager``, or an executor without graphs.  What is written as text ("true", "512") counts as
    what it says.  Raises ValueError, naming the key, for a value of the wrong kind.
    """
    if "max_graph_tokens" in origin:
        return _whole("max_graph_tokens", origin["max_graph_tokens"])
    sizes = origin.get("cudagraph_capture_sizes")
    if str(origin.get("enforce_eager")).casefold() == "true" or origin.get("cudagraph_mode") == "NONE":
        return 0
    if not sizes:
        return _LARGEST_GRAPH
    listed = sizes.strip("[] ").split(",") if isinstance(sizes, str) else sizes
    if not isinstance(listed, list | tuple):
        listed = [listed]
    return max(_whole("cudagraph_capture_sizes", size) for size in listed)


def _whole(key: str, value: object) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer() or value < 0:
        raise ValueError(f"{key} must be a whole number of at least 0, got {value!r}")
    return int(value)
