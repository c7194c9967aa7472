"""One name for one thing: the values of a setting as the catalogues of GPUs, models and releases have them."""

from __future__ import annotations

from typing import Any


def catalogue_name(key: str, value: Any) -> Any:
    """The name under which a catalogue has a GPU, a bundled model or a release of vLLM; everything else as it is.

    So does a name that no catalogue has: whoever needs it says what is wrong with it.
    """
    from windtunnel.sim.deployment.gpu import load_gpu
    from windtunnel.sim.deployment.model import is_bundled, load_model
    from windtunnel.sim.deployment.versions import profile

    if not isinstance(value, str):
        return value
    try:
        match key:
            case "gpu":
                return load_gpu(value).name
            case "model" | "draft_model":
                return load_model(value).name if is_bundled(value) else value
            case "engine_version":
                return profile(value).name
    except ValueError:
        return value
    return value


def alias_note(key: str, written: str) -> str:
    """What a name is taken as; empty where it is the catalogue's own, or the end of that (3090, 0.11)."""
    from windtunnel.sim.deployment.gpu import siblings

    name = catalogue_name(key, written)
    if name.casefold().endswith(written.casefold()):
        return ""
    others = ", ".join(siblings(written)) if key == "gpu" else ""
    return f"{key} {written} is taken as {name}{f' (there are also {others})' if others else ''}."
