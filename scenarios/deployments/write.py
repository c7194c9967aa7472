"""Settings as a ``vllm serve`` line, as Helm values and as a service of a compose file."""

from __future__ import annotations

import difflib
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from windtunnel.scenarios.deployments.helm import FLAGS_OF_KEYS
from windtunnel.scenarios.deployments.options import Option, option_of_key
from windtunnel.scenarios.deployments.settings import GIB, SETTINGS, from_python
from windtunnel.sim.deployment.versions import VersionProfile, profile

_IMAGE = "vllm/vllm-openai"


def serve_command(settings: Mapping[str, Any], *, version: str | None = None) -> str:
    """The ``vllm serve`` line that gives these settings, quoted for a POSIX shell, in the spelling of a release.

    ``settings`` has the keys of ``ImportedDeployment.settings``; None is "not given".  ``version`` is a release such
    as "vllm-0.11", 0.32 if None.  Settings that are vLLM's default anyway are left out, see ``without_defaults``.

    Raises ValueError for a missing model, an unknown setting, a value out of range, or an option that the release does
    not have.
    """
    return shlex.join(["vllm", "serve", *_arguments(settings, version)])


def helm_values(
    settings: Mapping[str, Any],
    *,
    name: str = "model",
    num_replicas: int = 1,
    num_gpus: int | None = None,
    version: str | None = None,
) -> str:
    """Values for vLLM's production-stack chart that give these settings, as YAML.

    Prefix caching is always said, because the chart switches it off where it is not; what has no key of its own goes
    to ``extraArgs``.  ``num_gpus`` are those of one replica, by default as many as the settings take.  The chart also
    asks for ``requestCPU`` and ``requestMemory``, which do not follow from the settings.

    Raises ValueError as ``serve_command`` does.
    """
    wanted = _checked(without_defaults(settings, version), version)
    config: dict[str, Any] = {"enablePrefixCaching": bool(wanted.pop("enable_prefix_caching", True))}
    if "enable_chunked_prefill" in wanted:
        config["enableChunkedPrefill"] = wanted.pop("enable_chunked_prefill")
    for key, flag in FLAGS_OF_KEYS.items():
        setting = flag[2:].replace("-", "_")
        if setting in wanted:
            config[key] = wanted.pop(setting)
    model = wanted.pop("model")
    extra = list(_flags(wanted, version))
    if extra:
        config["extraArgs"] = extra
    spec = {
        "name": name,
        "repository": _IMAGE,
        "tag": _tag(version),
        "modelURL": model,
        "replicaCount": num_replicas,
        "requestGPU": num_gpus or _gpus(settings),
        "vllmConfig": config,
    }
    return _yaml({"servingEngineSpec": {"modelSpec": [spec]}})


def compose_service(
    settings: Mapping[str, Any], *, name: str = "vllm", num_gpus: int | None = None, version: str | None = None
) -> str:
    """A service of a compose file that gives these settings, as YAML.

    ``num_gpus`` is by default as many as the settings take.  Raises ValueError as ``serve_command`` does.
    """
    device = {"driver": "nvidia", "count": num_gpus or _gpus(settings), "capabilities": ["gpu"]}
    service = {
        "image": f"{_IMAGE}:{_tag(version)}",
        "entrypoint": ["vllm", "serve"],
        "command": [word.replace("$", "$$") for word in _arguments(settings, version)],
        "ipc": "host",
        "deploy": {"resources": {"reservations": {"devices": [device]}}},
    }
    return _yaml({"services": {name: service}})


def without_defaults(settings: Mapping[str, Any], version: str | None = None) -> dict[str, Any]:
    """The settings that change something.

    Left out is what is not given (None) and what every release from 0.8 on takes by default on every device.  Defaults
    that differ between releases (``gpu_memory_utilization``) are left out only if ``version`` tells the release, those
    that depend on the card or the model never.
    """
    defaults = {key: setting.default for key, setting in SETTINGS.items() if setting.default is not None}
    if version is not None:
        rules = profile(version)
        defaults["gpu_memory_utilization"] = rules.gpu_memory_utilization
        defaults["scheduler_reserve_full_isl"] = rules.scheduler_reserve_full_isl
    return {
        key: value
        for key, value in settings.items()
        if value is not None and not (key in defaults and value == defaults[key])
    }


def _arguments(settings: Mapping[str, Any], version: str | None) -> list[str]:
    wanted = _checked(without_defaults(settings, version), version)
    return [wanted.pop("model"), *_flags(wanted, version)]


def _checked(settings: dict[str, Any], version: str | None) -> dict[str, Any]:
    """The settings in their usual order; refuses what cannot be written."""
    for key in settings:
        if key not in SETTINGS:
            near = difflib.get_close_matches(key, SETTINGS, n=1)
            raise ValueError(f"unknown setting {key!r}{f'; nearest {near[0]}' if near else ''}")
    model = settings.get("model")
    if not isinstance(model, str) or not model or model.startswith("-"):
        raise ValueError(f"model = {model!r} must be the name or path of a model: vllm serve begins with it")
    rules = profile(version) if version is not None else None
    for key, value in settings.items():
        _check(key, value, rules)
    return {key: settings[key] for key in SETTINGS if key in settings}


def _check(key: str, value: Any, rules: VersionProfile | None) -> None:
    option = option_of_key(key)
    assert option is not None
    in_its_unit = value / GIB if key == "swap_space" and isinstance(value, int) else value
    from_python(option, in_its_unit, "settings", key)
    if rules is not None and not option.exists_in(rules.release):
        ends = f"it came with {option.since}" if option.since else f"it went with {option.until}"
        raise ValueError(f"{key} = {value!r}: {rules.label} has no {option.flag} ({ends}): leave it out")
    if rules is None and option.until:
        raise ValueError(f"{key} = {value!r}: {option.flag} went with vLLM {option.until}: leave it out")


def _flags(settings: Mapping[str, Any], version: str | None) -> Iterator[str]:
    release = profile(version).release if version is not None else None
    for key, value in settings.items():
        option = option_of_key(key)
        assert option is not None
        yield from _flag(option, value, option.kind if release is None else option.kind_in(release))


def _flag(option: Option, value: Any, kind: str) -> Iterator[str]:
    if kind == "boolean_value":
        yield f"{option.flag}={value}"
    elif kind == "boolean":
        yield option.flag if value else f"--no-{option.name}"
    elif kind == "switch":
        if value:
            yield option.flag
    elif kind == "list":
        yield from (option.flag, *(str(item) for item in value)) if value else ()
    else:
        text = _text(option, value)
        if text.startswith("-") and not isinstance(value, (int, float)):
            yield f"{option.flag}={text}"
        else:
            yield from (option.flag, text)


def _text(option: Option, value: Any) -> str:
    if option.key == "swap_space":
        return _number(value / GIB)
    if option.type in ("json", "config", "text_or_json") and not isinstance(value, str):
        return json.dumps(value, separators=(",", ":"))
    return _number(value) if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else repr(value)


def _gpus(settings: Mapping[str, Any]) -> int:
    keys = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size")
    return math.prod(int(settings.get(key) or 1) for key in keys)


def _tag(version: str | None) -> str:
    return "latest" if version is None else f"v{profile(version).release}"


def _yaml(table: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(table, sort_keys=False, allow_unicode=True, width=120))
