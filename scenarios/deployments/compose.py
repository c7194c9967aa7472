"""Compose files: services that run vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from windtunnel.scenarios.deployments.containers import Container, item_words
from windtunnel.scenarios.deployments.reading import ImportedDeployment, Reading
from windtunnel.scenarios.deployments.shell import split_words
from windtunnel.scenarios.deployments.words import Word
from windtunnel.scenarios.deployments.yaml_tree import Tree

_VARIABLE = re.compile(r"\$(?:\$|\{(\w+)(?:(:?[-?+])([^}]*))?\}|(\w+))")
KIND = "compose"


def is_compose(tree: Tree) -> bool:
    """Whether a document is a compose file."""
    return isinstance(tree.get("services").value, dict)


def read_compose(tree: Tree, base_dir: Path) -> list[ImportedDeployment]:
    """One deployment for each service that runs vLLM."""
    found = []
    for name, service in tree.get("services").items():
        reading = Reading(service.source)
        container = _container(name, service, reading, _dotenv(base_dir))
        _count_gpus(service, reading)
        deployment = container.read(reading, KIND, base_dir)
        if deployment is not None:
            found.append(deployment)
    return found


def _container(name: str, service: Tree, reading: Reading, variables: Mapping[str, str]) -> Container:
    expand = _Expansion(reading, variables)
    image = service.get("image")
    return Container(
        name=name,
        image=Word(expand(image.value, image.source)[0], image.source),
        command=_words(service.get("entrypoint"), expand),
        arguments=_words(service.get("command"), expand),
        environment=_environment(service.get("environment"), expand),
        source=service.source,
        environment_source=service.get("environment").source,
    )


def _words(tree: Tree, expand: _Expansion) -> list[Word]:
    if isinstance(tree.value, list):
        return item_words(tree, lambda text: expand(text, tree.source))
    if tree.value is None:
        return []
    text, unresolved = expand(tree.value, tree.source)
    line = tree.first_line
    words = split_words(text, tree.source if line is None else f"{tree.origin}:{line}")
    return [
        word._replace(unresolved=tuple(n for n in unresolved if f"${n}" in word.text or f"{{{n}" in word.text))
        for word in words
    ]


class _Expansion:
    """Puts in ``${NAME}``, ``${NAME:-default}`` and ``$$`` as Compose does: from .env, not from the service."""

    def __init__(self, reading: Reading, variables: Mapping[str, str]) -> None:
        self.reading = reading
        self.variables = variables

    def __call__(self, value: object, source: str) -> tuple[str, tuple[str, ...]]:
        unresolved: list[str] = []

        def put_in(match: re.Match[str]) -> str:
            if match[0] == "$$":
                return "$"
            name = match[1] or match[4]
            if name in self.variables:
                return self.variables[name]
            if match[2] in ("-", ":-"):
                self.reading.note(f"{source}: {name} is taken as {match[3]!r}, its default")
                return match[3]
            unresolved.append(name)
            return match[0]

        text = "" if value is None else str(value)
        return _VARIABLE.sub(put_in, text), tuple(unresolved)


def _dotenv(base_dir: Path) -> dict[str, str]:
    """What the .env file beside the compose file sets."""
    try:
        lines = (base_dir / ".env").read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = [line.strip().removeprefix("export ").partition("=") for line in lines if not line.lstrip().startswith("#")]
    return {name.strip(): value.strip().strip("'\"") for name, equals, value in pairs if equals}


def _environment(tree: Tree, expand: _Expansion) -> dict[str, str]:
    """A mapping, or a list of NAME=value."""
    if isinstance(tree.value, dict):
        pairs = [(name, item.value) for name, item in tree.items() if item.value is not None]
    else:
        split = [str(item.value).partition("=") for item in tree.entries()]
        pairs = [(name, value) for name, equals, value in split if equals]
    return {name: expand(value, tree.source)[0] for name, value in pairs}


def _count_gpus(service: Tree, reading: Reading) -> None:
    devices = [*service.get("deploy", "resources", "reservations", "devices").entries(), *service.get("gpus").entries()]
    for device in devices:
        count = _gpus_of(device)
        if count is not None:
            reading.devices(count, device.source)
    replicas = service.get("deploy", "replicas").value or service.get("scale").value
    if isinstance(replicas, int):
        reading.num_replicas = replicas


def _gpus_of(device: Tree) -> int | None:
    capabilities = str(device.get("capabilities").value)
    if "gpu" not in capabilities and device.get("driver").value not in (None, "nvidia"):
        return None
    ids = device.get("device_ids").value
    if isinstance(ids, list):
        return len(ids)
    count = device.get("count").value
    return int(count) if str(count).isdigit() else None
