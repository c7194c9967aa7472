"""What compose files and manifests share: containers, their command, environment and GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from windtunnel.scenarios.deployments.arguments import read_arguments
from windtunnel.scenarios.deployments.launch import Launch, image_launch, launches_in
from windtunnel.scenarios.deployments.reading import ImportedDeployment, Reading
from windtunnel.scenarios.deployments.shell import Command
from windtunnel.scenarios.deployments.words import Word
from windtunnel.scenarios.deployments.yaml_tree import Tree

_BARE_REFERENCE = re.compile(r"\$\((\w+)\)")


class Container(NamedTuple):
    """One container that may run vLLM."""

    name: str
    image: Word
    command: Sequence[Word]
    """What replaces the image's own entry point."""
    arguments: Sequence[Word]
    environment: Mapping[str, str]
    source: str
    environment_source: str = ""

    def launch(self, reading: Reading) -> Launch | None:
        """How it starts vLLM; None if it does not."""
        words = [*self.command, *self.arguments]
        found, notes = launches_in(Command(words, dict(self.environment)), self.environment)
        reading.notes += notes
        if found:
            if not self.command and "vllm-openai" in self.image.text and _starts_with_program(self.arguments):
                reading.refusal(
                    f"{self.arguments[0].source}: the image's entry point is already vLLM's server; these words become "
                    "its arguments, which it refuses: leave out `vllm serve`, or set the entry point"
                )
            return found[0]._replace(image=self.image, environment={**self.environment, **found[0].environment})
        if not self.command and "vllm" in self.image.text.lower():
            return image_launch(self.arguments, self.environment, self.image)
        return None

    def read(self, reading: Reading, kind: str, base_dir: Path, name: str = "") -> ImportedDeployment | None:
        """The deployment that it is; None if it does not run vLLM."""
        launch = self.launch(reading)
        if launch is None:
            return None
        launch.describe(reading, self.environment_source or self.source)
        read_arguments(launch.words, reading, launch.program, base_dir)
        return reading.finish(name or self.name, kind)


def item_words(tree: Tree, expand: Callable[[str], tuple[str, tuple[str, ...]]]) -> list[Word]:
    """A list of words, each with its place; ``expand`` puts in variables and names those that it does not know."""
    found = []
    for item in tree.entries():
        text, unresolved = expand(_yaml_text(item.value))
        line = item.first_line
        source = f"{item.origin}:{line}" if line is not None else item.source
        found.append(Word(text, source, unresolved))
    return found


def expand_references(text: str, variables: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """``$(NAME)`` as Kubernetes expands it in commands and arguments; what is not set stays."""
    unresolved = []

    def put_in(match: re.Match[str]) -> str:
        if match[1] not in variables:
            unresolved.append(match[1])
        return variables.get(match[1], match[0])

    return _BARE_REFERENCE.sub(put_in, text), tuple(unresolved)


def _starts_with_program(arguments: Sequence[Word]) -> bool:
    return len(arguments) > 1 and arguments[0].text == "vllm" and arguments[1].text == "serve"


def _yaml_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)
