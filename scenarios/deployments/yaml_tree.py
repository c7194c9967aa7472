"""YAML whose values know their lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windtunnel.scenarios.deployments.errors import DeploymentUnreadable, printable

_MOST_NODES = 200_000
KeyPath = tuple[Any, ...]
"""Keys from the top, with the index where there is a list."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A value somewhere in a document, or None where there is nothing."""

    value: Any
    origin: str
    """The file."""
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    path: KeyPath = ()
    literal: frozenset[KeyPath] = frozenset()
    """Texts that are kept line by line (``|``): the text begins on the line below its key."""

    @property
    def source(self) -> str:
        """FILE:LINE, or the path of keys where there are no lines."""
        path = self.path
        while path and path not in self.lines:
            path = path[:-1]
        if self.lines:
            return f"{self.origin}:{self.lines.get(path, 1)}"
        dotted = ".".join(map(str, self.path))
        return f"{self.origin}: {dotted}" if dotted else self.origin

    @property
    def first_line(self) -> int | None:
        """Line of the first line of a text; None where there are no lines."""
        line = self.lines.get(self.path)
        return None if line is None else line + (self.path in self.literal)

    def get(self, *keys: str | int) -> Tree:
        """The value under these keys; one of None where there is none."""
        value = self.value
        for key in keys:
            if isinstance(value, dict) and isinstance(key, str):
                value = value.get(key)
            elif isinstance(value, list) and isinstance(key, int) and key < len(value):
                value = value[key]
            else:
                value = None
        return Tree(value, self.origin, self.lines, (*self.path, *keys), self.literal)

    def items(self) -> Iterator[tuple[str, Tree]]:
        """Keys and values of a mapping; nothing for anything else."""
        if isinstance(self.value, dict):
            for key in self.value:
                yield str(key), self.get(key)

    def entries(self) -> Iterator[Tree]:
        """Elements of a list; nothing for anything else."""
        if isinstance(self.value, list):
            for at in range(len(self.value)):
                yield self.get(at)

    def children(self) -> Iterator[Tree]:
        """Values of a mapping, or elements of a list."""
        keys: Iterable[Any] = self.value if isinstance(self.value, dict) else ()
        yield from (self.get(key) for key in keys)
        yield from self.entries()

    def text(self, *keys: str | int) -> str:
        """The text under these keys, empty if there is none."""
        value = self.get(*keys).value
        return "" if value is None else str(value)


def read_yaml_file(path: Path) -> Tree:
    """The first document of a YAML file.  Raises DeploymentUnreadable."""
    trees = read_yaml(file_text(path), printable(str(path)))
    return trees[0] if trees else Tree({}, printable(str(path)))


def file_text(path: Path) -> str:
    """What a file holds.  Raises DeploymentUnreadable."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DeploymentUnreadable(f"cannot read deployment {path}: not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise DeploymentUnreadable(f"cannot read deployment {path}: {error.strerror or error}") from None


def read_yaml(text: str, origin: str) -> list[Tree]:
    """All documents of a YAML text; aliases and merge keys are followed.

    Raises DeploymentUnreadable, with file and line, for text that is no YAML.
    """
    import yaml

    try:
        make_loader: Any = yaml.SafeLoader
        loader = make_loader(text)
        try:
            found = []
            while loader.check_node():
                reader = _Reader(loader)
                value = reader.read(loader.get_node(), ())
                found.append(Tree(value, origin, reader.lines, (), frozenset(reader.literal)))
            return found
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise DeploymentUnreadable(f"{origin}{_line(error)}: not valid YAML: {_reason(error)}") from None


class _Reader:
    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.lines: dict[KeyPath, int] = {}
        self.literal: set[KeyPath] = set()
        self.num_nodes = 0

    def read(self, node: Any, path: KeyPath) -> Any:
        import yaml

        self.num_nodes += 1
        if self.num_nodes > _MOST_NODES:
            raise ValueError(f"more than {_MOST_NODES:,} values, its aliases followed")
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, at)) for at, item in enumerate(node.value)]
        if node.style == "|":
            self.literal.add(path)
        return self.loader.construct_object(node)

    def _mapping(self, node: Any, path: KeyPath) -> dict[Any, Any]:
        self.loader.flatten_mapping(node)
        found: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.loader.construct_object(key_node, deep=True)
            if not isinstance(key, (str, int, float, bool)) and key is not None:
                raise ValueError("a key is no text")
            is_alias = value_node.start_mark.line < key_node.start_mark.line  # the value stands elsewhere, before it
            self.lines[*path, key] = (value_node if is_alias else key_node).start_mark.line + 1
            found[key] = self.read(value_node, (*path, key))
        return found


def _line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark is not None else ""


def _reason(error: Exception) -> str:
    problem = getattr(error, "problem", None)
    return str(problem or error).splitlines()[0] if str(problem or error) else type(error).__name__
