"""Deployments as people hold them, whatever the format."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windtunnel.scenarios.deployments.arguments import SERVE, config_words, read_arguments
from windtunnel.scenarios.deployments.compose import is_compose, read_compose
from windtunnel.scenarios.deployments.errors import DeploymentError, DeploymentUnreadable, printable
from windtunnel.scenarios.deployments.helm import is_helm, read_helm
from windtunnel.scenarios.deployments.kubernetes import is_llm_d, is_manifest, read_llm_d, read_manifests
from windtunnel.scenarios.deployments.launch import Launch, launches_in, launches_in_text
from windtunnel.scenarios.deployments.options import find, option_of_key, with_dashes
from windtunnel.scenarios.deployments.python_text import (
    calls,
    dict_keywords,
    keywords_of,
    logged,
    mentions_call,
    mentions_logged_arguments,
    read_keywords,
)
from windtunnel.scenarios.deployments.reading import ImportedDeployment, Reading
from windtunnel.scenarios.deployments.shell import Command, split_words
from windtunnel.scenarios.deployments.words import Word
from windtunnel.scenarios.deployments.yaml_tree import Tree, file_text, read_yaml

KINDS = (
    "auto",
    "command",
    "arguments",
    "vllm-config",
    "python",
    "log",
    "compose",
    "helm",
    "kubernetes",
    "kserve",
    "llm-d",
)
"""Formats.  command: shell text that starts vLLM.  arguments: what stands behind ``vllm serve``.  vllm-config: a file
for its --config.  python: ``LLM(...)`` calls and dicts of keyword arguments (Triton's model.json is one).  log: vLLM's
log, with its ``non-default args``.  compose, kubernetes, kserve: their YAML.  helm: values of vLLM's production-stack
chart.  llm-d: values of the llm-d-modelservice chart."""
_COMMAND = re.compile(r"\bvllm\s+serve\b|\bvllm\.entrypoints\b|openai/api_server\.py|vllm-openai")
_NO_SHELL = re.compile(r"^[ \t]*(?:```.*|ExecStart=|command=)", re.MULTILINE)
"""What stands around a command in Markdown, and before it in units of systemd and supervisord."""
_YAML_START = re.compile(r"^\s*(services|servingEngineSpec|modelArtifacts|apiVersion|kind)\s*:", re.MULTILINE)
_SUFFIXES = {".yaml", ".yml", ".json", ".sh", ".bash", ".txt", ".log", ".py", ".pbtxt", ".env", ".service", ".md"}
_MANIFESTS = ("kubernetes", "kserve")


def read_deployment(
    source: str | Path | Sequence[str] | Mapping[str, Any], *, kind: str = "auto", name: str | None = None
) -> ImportedDeployment:
    """The one deployment that a source holds, or the one called ``name`` where there are several.

    ``source`` is a file, ``FILE#NAME``, a text, a list of arguments, or a mapping: keyword arguments of ``LLM``, or a
    YAML document that was already read.  ``kind`` is one of ``KINDS``; "auto" looks at the content.

    Raises DeploymentUnreadable if there is no such file or nothing in it that starts vLLM, DeploymentError for values
    of the wrong type or out of range, and for several deployments without a name.
    """
    source, name = _apart(source, name)
    found = read_deployments(source, kind=kind)
    chosen = [item for item in found if name is None or item.name == name]
    if len(chosen) == 1:
        return chosen[0]
    origin, names = _origin(source), ", ".join(item.name for item in found)
    if name is None:
        how = f"{origin}#NAME" if _is_file(source) else "name=NAME"
        raise DeploymentError(f"{origin}: holds {len(found)} deployments: choose one as {how}, by its name: {names}")
    if chosen:
        raise DeploymentError(f"{origin}: holds {len(chosen)} deployments called {name}: rename them")
    raise DeploymentError(f"{origin}: holds no deployment {name!r}; there are {names}")


_Source = str | Path | Sequence[str] | Mapping[str, Any]


def _apart(source: _Source, name: str | None) -> tuple[_Source, str | None]:
    """The file and the name in ``FILE#NAME``, where no file is called just so."""
    if name is not None or not isinstance(source, (str, Path)) or _is_file(source):
        return source, name
    file, mark, chosen = str(source).partition("#")
    return (file, chosen) if mark and chosen and _is_file(file) else (source, name)


def _is_file(source: _Source) -> bool:
    path = _path_of(source) if isinstance(source, (str, Path)) else None
    try:
        return path is not None and path.is_file()
    except (OSError, ValueError):
        return False


def read_deployments(
    source: str | Path | Sequence[str] | Mapping[str, Any], *, kind: str = "auto"
) -> tuple[ImportedDeployment, ...]:
    """All deployments that a source holds, in its order; at least one.  See ``read_deployment``."""
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"; nearest {near[0]}" if near else ""
        raise DeploymentError(f"kind = {kind!r} must be one of {', '.join(KINDS)}{hint}")
    if isinstance(source, Mapping):
        found = _read_mapping(source, kind)
    elif isinstance(source, (str, Path)):
        found = _read_text_or_file(source, kind)
    else:
        found = _read_list([str(word) for word in source])
    if not found:
        raise DeploymentUnreadable(f"{_origin(source)}: nothing in it starts vLLM{_expected(kind)}")
    return tuple(found)


def _origin(source: object) -> str:
    if isinstance(source, Path) or (isinstance(source, str) and "\n" not in source and len(source) < 200):
        return printable(str(source))
    return "deployment"


def _expected(kind: str) -> str:
    if kind == "auto":
        return (
            ": give a `vllm serve` command, a config file, LLM(...) arguments, a log, a compose file, Helm values or a "
            "manifest"
        )
    return f": it is no {kind}, or holds no engine"


# ------------------------------------------------------------------ sources


def _read_mapping(mapping: Mapping[str, Any], kind: str) -> list[ImportedDeployment]:
    tree = Tree(dict(mapping), "deployment")
    found = _read_trees([tree], kind, Path())
    if found is not None:
        return found
    reading = Reading("arguments")
    reading.usage_context = "llm_class"
    read_keywords(keywords_of(mapping, ""), reading)
    return [reading.finish("", "python")]


def _read_list(words: list[str]) -> list[ImportedDeployment]:
    found, notes = launches_in(Command([Word(word) for word in words]))
    if not found and words:
        found = [Launch(SERVE, tuple(Word(word) for word in words), {})]
    return [_read_launch(launch, "arguments", Path(), "arguments", notes) for launch in found]


def _read_text_or_file(source: str | Path, kind: str) -> list[ImportedDeployment]:
    path = _path_of(source)
    if path is None:
        return _read_text(str(source), kind, "", Path(), "")
    return _read_text(file_text(path), kind, printable(str(source)), path.parent, path.suffix.lower())


def _path_of(source: str | Path) -> Path | None:
    """The file that is meant; None if the source is the text itself."""
    if isinstance(source, Path):
        return source
    if "\n" in source or len(source) > 4096:
        return None
    path = Path(source).expanduser()
    try:
        if path.is_file():
            return path
    except (OSError, ValueError):
        return None
    looks_like_path = path.suffix.lower() in _SUFFIXES and not any(letter.isspace() for letter in source)
    return path if looks_like_path and not source.startswith(("-", "{")) else None


def _read_text(text: str, kind: str, origin: str, base_dir: Path, suffix: str) -> list[ImportedDeployment]:
    kind = _kind_of(text, suffix) if kind == "auto" else kind
    if kind == "log":
        return _read_log(text, origin)
    if kind == "python":
        return _read_python(text, origin)
    if kind == "command":
        return _read_command(text, origin, base_dir)
    if kind == "arguments":
        words = split_words(text, origin) if not origin else _lined_words(text, origin)
        return [_read_launch(Launch(SERVE, tuple(words), {}), kind, base_dir, origin, [])]
    if kind == "json":
        text = text.replace("\t", " ")  # JSON may be indented by tabs, YAML may not
    found = _read_trees(read_yaml(text, origin or "deployment"), kind, base_dir)
    return found or []


def _kind_of(text: str, suffix: str) -> str:
    """The format of a text, by its content first and then by its file's name."""
    if suffix == ".pbtxt":
        raise DeploymentUnreadable(
            "a config.pbtxt tells Triton's batching, not vLLM's settings: give it as --batching dynamic:config=FILE, "
            "and the model.json beside it here"
        )
    if mentions_logged_arguments(text):
        return "log"
    if suffix == ".py":
        return "python"
    if suffix in (".yaml", ".yml") or _YAML_START.search(text):
        return "yaml"
    if text.lstrip().startswith("{"):
        return "python" if suffix != ".json" else "json"
    if _COMMAND.search(text):
        return "command"
    if mentions_call(text):
        return "python"
    first = text.split(maxsplit=1)[0] if text.strip() else ""
    if first.startswith("-") and find(with_dashes(first.partition("=")[0].partition(".")[0])).option is not None:
        return "arguments"
    return "command" if re.search(r"\bvllm\b", text) else "yaml"


# ------------------------------------------------------------------ formats


def _read_command(text: str, origin: str, base_dir: Path) -> list[ImportedDeployment]:
    found, notes = launches_in_text(_NO_SHELL.sub("", text), lambda line: f"{origin}:{line + 1}" if origin else "")
    version = re.search(r"\bvllm(?:\[[\w,]+\])?==(\d+(?:\.\d+)+(?:\.post\d+)?)", text)
    release = version[1] if version else ""
    return [_read_launch(launch, "command", base_dir, origin, notes, release) for launch in found]


def _lined_words(text: str, origin: str) -> list[Word]:
    without_joints = re.sub(r"[\\ \t]+$", "", text, flags=re.MULTILINE)
    return split_words(without_joints, lambda line: f"{origin}:{line + 1}")


def _read_launch(
    launch: Launch, kind: str, base_dir: Path, origin: str, notes: Sequence[str], release: str = ""
) -> ImportedDeployment:
    reading = Reading(launch.source or origin or "command line")
    reading.release = release
    reading.notes += notes
    launch.describe(reading)
    read_arguments(launch.words, reading, launch.program, base_dir)
    return reading.finish("", kind)


def _read_log(text: str, origin: str) -> list[ImportedDeployment]:
    if not mentions_logged_arguments(text):
        return []
    keywords, release, num_starts, is_server = logged(text, origin)
    reading = Reading(origin or "log")
    reading.release = release
    reading.usage_context = "api_server" if is_server else "llm_class"
    if num_starts > 1:
        reading.note(f"{origin or 'log'}: holds {num_starts} starts of vLLM; the last one is read")
    read_keywords(keywords, reading)
    return [reading.finish("", "log")]


def _read_python(text: str, origin: str) -> list[ImportedDeployment]:
    stripped = text.lstrip()
    if stripped.startswith("{"):
        reading = Reading(origin or "arguments")
        reading.usage_context = "llm_class"
        read_keywords(dict_keywords(stripped, origin, 1 + text[: len(text) - len(stripped)].count("\n")), reading)
        return [reading.finish("", "python")]
    found = []
    for call in calls(text, origin):
        reading = Reading(f"{origin}:{call.line}" if origin else call.name)
        reading.usage_context = "llm_class"
        read_keywords(call.keywords, reading)
        if call.keywords:
            found.append(reading.finish("", "python"))
    return found


def _read_trees(trees: list[Tree], kind: str, base_dir: Path) -> list[ImportedDeployment] | None:
    """Deployments in YAML documents; None if they are of no known kind."""
    trees = [tree for tree in trees if isinstance(tree.value, dict)]
    asks_for_any = kind in ("auto", "yaml", "json")
    if not trees:
        return None
    if kind in _MANIFESTS or (asks_for_any and any(is_manifest(tree) for tree in trees)):
        return read_manifests([tree for tree in trees if is_manifest(tree)], base_dir)
    readers = (("compose", is_compose, read_compose), ("helm", is_helm, read_helm), ("llm-d", is_llm_d, read_llm_d))
    for name, fits, read in readers:
        if kind == name or (asks_for_any and fits(trees[0])):
            return [item for tree in trees if fits(tree) for item in read(tree, base_dir)]
    if kind == "vllm-config" or (kind == "yaml" and _is_config(trees[0])):
        return [_read_config(trees[0], base_dir)]
    return [_read_json(trees[0])] if kind == "json" else None


def _is_config(tree: Tree) -> bool:
    """Whether half of the keys are vLLM's flags."""
    known = [key for key, _ in tree.items() if option_of_key(key.replace("-", "_")) is not None]
    return bool(known) and 2 * len(known) >= len(tree.value)


def _read_config(tree: Tree, base_dir: Path) -> ImportedDeployment:
    reading = Reading(tree.origin)
    read_arguments(config_words(tree, reading, SERVE), reading, SERVE, base_dir)
    return reading.finish("", "vllm-config")


def _read_json(tree: Tree) -> ImportedDeployment:
    """Keyword arguments of the engine as JSON, such as Triton's model.json."""
    reading = Reading(tree.origin)
    reading.usage_context = "llm_class"
    keywords = [item._replace(source=tree.get(item.name).source) for item in keywords_of(tree.value, tree.origin)]
    read_keywords(keywords, reading)
    return reading.finish("", "python")
