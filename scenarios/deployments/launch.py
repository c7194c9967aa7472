"""Where vLLM is started in a command: directly, as a module, in a container, or in a text for another shell."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from windtunnel.scenarios.deployments.arguments import API_SERVER, SERVE
from windtunnel.scenarios.deployments.reading import Reading
from windtunnel.scenarios.deployments.shell import Command, commands
from windtunnel.scenarios.deployments.words import Word

_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server", "vllm.entrypoints.openai.rpc.server")
_CLI_MODULES = ("vllm", "vllm.entrypoints.cli.main", "vllm.scripts")
_MENTION = re.compile(r"\bvllm\s+serve\b|vllm\.entrypoints|\bvllm-openai\b")
_CONTAINER_TOOLS = ("docker", "podman", "nerdctl")
_WITHOUT_VALUE = {
    "--detach",
    "--disable-content-trust",
    "--init",
    "--interactive",
    "--no-healthcheck",
    "--oom-kill-disable",
    "--privileged",
    "--publish-all",
    "--read-only",
    "--replace",
    "--rm",
    "--rmi",
    "--sig-proxy",
    "--tty",
}
"""Options of ``docker run`` and ``podman run`` that stand alone."""
_HANDS_ON = ("bash", "sh", "zsh", "dash", "ksh", "eval", "ssh", "su", "sudo", "nohup", "srun", "screen", "tmux")
"""Programs whose argument is a command; elsewhere an apostrophe in prose is no quote."""
_SHORT_WITH_VALUE = set("ehlmpuvwac")


class Launch(NamedTuple):
    """vLLM being started."""

    program: str
    """serve or api_server."""
    words: tuple[Word, ...]
    """Its arguments."""
    environment: Mapping[str, str]
    image: Word | None = None
    gpus: Word | None = None
    """What --gpus of docker says."""

    @property
    def source(self) -> str:
        """Where it stands."""
        return self.words[0].source if self.words else ""

    def describe(self, reading: Reading, environment_source: str = "") -> None:
        """Give the reading what stands around the arguments."""
        if self.image is not None:
            reading.image(self.image.text, self.image.source)
        if self.gpus is not None:
            count = _gpu_count(self.gpus.text)
            if count is not None:
                reading.devices(count, self.gpus.source or "--gpus")
        reading.environment(self.environment, environment_source or self.source or "environment")


def launches_in_text(
    text: str, source_of: Callable[[int], str], variables: Mapping[str, str] | None = None
) -> tuple[list[Launch], list[str]]:
    """All starts of vLLM in a shell text, and notes on what was assumed."""
    found, notes = commands(text, source_of, variables)
    launches: list[Launch] = []
    for command in found:
        inner, more = launches_in(command, variables)
        first = command.words[0]
        if launches and first.text.startswith("--"):
            notes.append(
                f"{first.source + ': ' if first.source else ''}{first.text} is not part of the command above it, which "
                "ended before: a comment or a missing backslash"
            )
        launches += inner
        notes += more
    if not launches:
        _check_quotes(found)
    return _without_followers(launches), notes


def _check_quotes(found: Sequence[Command]) -> None:
    """Raise DeploymentError for a quote that is never closed and so hides vLLM's start."""
    for word in (word for command in found for word in command.words):
        if word.unclosed is not None and _MENTION.search(word.unclosed.text):
            raise word.unclosed.complaint()


def launches_in(command: Command, variables: Mapping[str, str] | None = None) -> tuple[list[Launch], list[str]]:
    """The starts of vLLM in one command: at most one, or those in a text that it hands to another shell."""
    words = command.words
    contained = _container_run(command)
    if contained is not None:
        return contained
    for at, word in enumerate(words):
        if _is_vllm_serve(words, at):
            return [Launch(SERVE, tuple(words[at + 2 :]), command.environment)], []
        if word.text == "-m" and at + 1 < len(words) and words[at + 1].text in (*_MODULES, *_CLI_MODULES):
            return _module(words[at + 1 :], command.environment)
        if word.text.endswith("openai/api_server.py"):
            return [Launch(API_SERVER, tuple(words[at + 1 :]), command.environment)], []
    return _handed_on(words, command.environment, variables)


def image_launch(words: Sequence[Word], environment: Mapping[str, str], image: Word | None) -> Launch:
    """The start of an image whose own entry point is vLLM's server: its arguments are the words."""
    return Launch(SERVE, tuple(words), environment, image)


def _without_followers(launches: list[Launch]) -> list[Launch]:
    """Workers of the same deployment (``--headless``) are no deployment of their own."""
    leaders = [launch for launch in launches if not any(word.text == "--headless" for word in launch.words)]
    return leaders or launches


def _is_vllm_serve(words: Sequence[Word], at: int) -> bool:
    return PurePosixPath(words[at].text).name == "vllm" and at + 1 < len(words) and words[at + 1].text == "serve"


def _module(words: Sequence[Word], environment: Mapping[str, str]) -> tuple[list[Launch], list[str]]:
    if words[0].text in _MODULES:
        return [Launch(API_SERVER, tuple(words[1:]), environment)], []
    if len(words) > 1 and words[1].text == "serve":
        return [Launch(SERVE, tuple(words[2:]), environment)], []
    return [], []


def _handed_on(
    words: Sequence[Word], environment: Mapping[str, str], variables: Mapping[str, str] | None
) -> tuple[list[Launch], list[str]]:
    """Launches in words that are themselves shell text: ``bash -c "…"``, ``ssh host "…"``."""
    found: list[Launch] = []
    notes: list[str] = []
    for word in words:
        if any(letter.isspace() for letter in word.text) and _MENTION.search(word.text):
            if word.unclosed is not None and PurePosixPath(words[0].text).name in _HANDS_ON:
                raise word.unclosed.complaint()
            known = {**(variables or {}), **environment}
            inner, more = launches_in_text(word.text, _lines_from(word.source), known)
            found += [launch._replace(environment={**environment, **launch.environment}) for launch in inner]
            notes += more
    return found, notes


def _lines_from(source: str) -> Callable[[int], str]:
    """Sources of the lines of a text that begins at FILE:LINE."""
    origin, _, number = source.rpartition(":")
    if not origin or not number.isdigit():
        return lambda _: source
    return lambda line: f"{origin}:{int(number) + line}"


def _container_run(command: Command) -> tuple[list[Launch], list[str]] | None:
    words = command.words
    tool = next((at for at, word in enumerate(words) if PurePosixPath(word.text).name in _CONTAINER_TOOLS), None)
    if tool is None or not any(word.text in ("run", "create") for word in words[tool + 1 : tool + 3]):
        return None
    start = next(at for at in range(tool + 1, tool + 3) if words[at].text in ("run", "create")) + 1
    given, image_at = _container_options(words, start)
    if image_at is None:
        return [], []
    image, arguments = words[image_at], words[image_at + 1 :]
    environment = _environment(given)
    gpus = next((value for name, value in given if name == "--gpus"), None)
    entrypoint = [value for name, value in given if name == "--entrypoint" and value.text]
    inner, notes = launches_in(Command([*entrypoint, *arguments], environment))
    if not inner and not entrypoint and "vllm" in image.text:
        inner = [image_launch(arguments, environment, image)]
    return [
        launch._replace(image=image, gpus=gpus, environment={**environment, **launch.environment}) for launch in inner
    ], notes


def _container_options(words: Sequence[Word], at: int) -> tuple[list[tuple[str, Word]], int | None]:
    """Options of a container with their values, and the index of the image behind them."""
    given: list[tuple[str, Word]] = []
    while at < len(words):
        word = words[at]
        if not word.text.startswith("-"):
            return given, at
        name, equals, value = word.text.partition("=")
        if equals:
            given.append((name, word._replace(text=value)))
        elif _takes_value(word.text) and at + 1 < len(words):
            at += 1
            given.append((name, words[at]))
        at += 1
    return given, None


def _takes_value(flag: str) -> bool:
    if flag.startswith("--"):
        return flag not in _WITHOUT_VALUE
    return flag[-1] in _SHORT_WITH_VALUE and len(flag) == 2


def _environment(given: Sequence[tuple[str, Word]]) -> dict[str, str]:
    pairs = [value.text.partition("=") for name, value in given if name in ("-e", "--env")]
    return {name: value for name, equals, value in pairs if equals}


def _gpu_count(text: str) -> int | None:
    """``2``, ``"device=0,1"`` or ``device=3``; None for ``all``."""
    text = text.strip("'\" ")
    if text.isdigit():
        return int(text)
    match = re.fullmatch(r'"?device=([\w,.-]+)"?', text)
    return len(match[1].split(",")) if match else None
