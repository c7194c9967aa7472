"""Python values as a log prints them: arguments of a command, the config of an engine."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from typing import Any

_TOKEN = re.compile(
    r"'[^'\\]*(?:\\.[^'\\]*)*'" r'|"[^"\\]*(?:\\.[^"\\]*)*"' r"|[\[({]|[\])}]|,|[^'\"\[\](){},]+|['\"]", re.DOTALL
)
_OBJECT = re.compile(r"'[^'\\]*(?:\\.[^'\\]*)*'" r'|"[^"\\]*(?:\\.[^"\\]*)*"' r"|<([\w.]+)(?:[ :][^<>]*)?>", re.DOTALL)
_LONGEST_VALUE = 20_000


def list_items(text: str) -> Iterator[str]:
    """The comma-separated items up to the bracket that closes the list; one that was cut off is left out."""
    depth = 0
    item: list[str] = []
    for token in _TOKEN.finditer(text):
        part = token[0]
        if part in "'\"":
            return
        if part in "])}":
            depth -= 1
            if depth < 0:
                yield "".join(item)
                return
        elif part in "[({":
            depth += 1
        if part == "," and not depth:
            yield "".join(item)
            item = []
        else:
            item.append(part)


def literal(text: str) -> Any:
    """A Python value; enums, classes and calls in it become their text, and so does what cannot be read."""
    if len(text) > _LONGEST_VALUE:
        return text
    source = _OBJECT.sub(lambda part: repr(part[1]) if part[1] else part[0], text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in a template is no concern of ours
            return _of_node(ast.parse(source, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def _of_node(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Dict):
        return {
            _hashable(_of_node(key)): _of_node(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    if isinstance(node, ast.Tuple):
        return tuple(_of_node(part) for part in node.elts)
    if isinstance(node, ast.List | ast.Set):
        return [_of_node(part) for part in node.elts]
    if isinstance(node, ast.UnaryOp | ast.BinOp):
        return ast.literal_eval(node)
    return ast.unparse(node)


def _hashable(key: Any) -> Any:
    return key if isinstance(key, str | int | float | bool | None) else repr(key)
