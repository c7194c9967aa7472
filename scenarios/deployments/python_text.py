"""Keyword arguments in Python text: ``LLM(...)`` calls, dicts, and the arguments that vLLM logs at its start."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from windtunnel.scenarios.deployments.errors import DeploymentError
from windtunnel.scenarios.deployments.options import option_of_key
from windtunnel.scenarios.deployments.reading import Reading
from windtunnel.scenarios.deployments.settings import SETTINGS, from_python

CALLS = ("LLM", "AsyncEngineArgs", "EngineArgs", "AsyncLLMEngine", "LLMEngine")
_CALL = re.compile(rf"\b({'|'.join(CALLS)})\s*\(")
_LOGGED = re.compile(r"non-default args: (?=\{)|\bargs: Namespace(?=\()")
_RELEASE = re.compile(
    r"(?:vLLM API server version|LLM engine \(v?(?:ersion )?|\bversion) ?v?(\d+(?:\.\d+)+(?:\.post\d+)?)"
)
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_JSON_WORDS = {"true": True, "false": False, "null": None}
_OF_THE_PROGRAM = ("config", "dispatch_function", "subparser")
"""What a logged Namespace holds beside the server's arguments."""


class Keyword(NamedTuple):
    """One keyword argument."""

    name: str
    value: Any
    source: str


class Unread(NamedTuple):
    """A value that is no literal, as written."""

    text: str


class Found(NamedTuple):
    """A call or a dict."""

    name: str
    """LLM, EngineArgs …"""
    keywords: list[Keyword]
    line: int


def read_keywords(keywords: list[Keyword], reading: Reading) -> None:
    """Give keyword arguments of the engine to the reading.  Raises DeploymentError for wrong values."""
    names = {keyword.name for keyword in keywords}
    for keyword in keywords:
        name = "model" if keyword.name == "model_tag" else keyword.name.replace("-", "_")
        if (
            name.startswith("_")
            or name in _OF_THE_PROGRAM
            or (keyword.name == "model_tag" and "model" in names and keyword.value is None)
        ):
            continue
        option = option_of_key(name)
        if option is None:
            reading.refuse_unknown(keyword.name, keyword.source)
        elif isinstance(keyword.value, Unread):
            if option.key in SETTINGS:
                place = f"{keyword.source}: " if keyword.source else ""
                reading.note(f"{place}{keyword.name} = {keyword.value.text} is no literal: give its value")
        else:
            value = from_python(option, keyword.value, keyword.source, keyword.name)
            reading.give(option, value, keyword.source, keyword.name)


def keywords_of(mapping: Mapping[str, Any], origin: str) -> list[Keyword]:
    """The entries of a Python dict."""
    return [Keyword(str(name), value, f"{origin}: {name}" if origin else "") for name, value in mapping.items()]


def mentions_call(text: str) -> bool:
    """Whether an engine is made in this text."""
    return _CALL.search(text) is not None


def mentions_logged_arguments(text: str) -> bool:
    """Whether vLLM logged its arguments in this text."""
    return _LOGGED.search(text) is not None


def calls(text: str, origin: str) -> list[Found]:
    """All engines that a Python text makes, with the arguments that are literals or names of such."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return list(_calls_in_fragments(text, origin))
    constants = _constants(tree)
    found = [
        Found(_name(node.func), list(_call_keywords(node, constants, origin)), node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _name(node.func) in CALLS
    ]
    return sorted(found, key=lambda call: call.line)


def dict_keywords(text: str, origin: str, line: int = 1) -> list[Keyword]:
    """The entries of a dict or a call in text, however odd its values; ``text`` begins at its bracket.

    Raises DeploymentError for a quote or bracket that is never closed.
    """
    try:
        return [
            Keyword(name.strip().strip("'\""), _literal(value.strip()), _place(origin, line + at))
            for name, value, at in _entries(text)
        ]
    except _Open as error:
        place = _place(origin, line + text.count("\n", 0, error.at)) or "arguments"
        raise DeploymentError(f"{place}: {error.told(text)}") from None


class _Open(Exception):
    """A quote or bracket without its end; ``closing`` is what would close it."""

    def __init__(self, at: int, closing: str) -> None:
        super().__init__(at, closing)
        self.at = at
        self.closing = closing

    def told(self, text: str) -> str:
        """What is wrong, with the text from there on, and the remedy."""
        first = text[self.at :].splitlines()[0].rstrip()
        shown = first if len(first) <= 40 else f"{first[:37]}..."
        is_quote = self.closing in "'\""
        before = ", or one before it is missing" if is_quote else ""
        return (
            f"the {'quote' if is_quote else 'bracket'} that opens at  {shown}  is never closed{before}: write "
            f"{self.closing} where it belongs, or copy the whole line"
        )


def logged(text: str, origin: str) -> tuple[list[Keyword], str, int, bool]:
    """What the last start in a log had: its arguments, its release ("" if not told), how many starts there are, and
    whether it was a server."""
    matches = list(_LOGGED.finditer(text))
    last = matches[-1]
    line = text.count("\n", 0, last.start()) + 1
    releases = _RELEASE.findall(text, 0, last.end()) or _RELEASE.findall(text)
    keywords = dict_keywords(text[last.end() :], origin, line)
    row = text[text.rfind("\n", 0, last.start()) + 1 : last.start()]
    is_server = "api_server" in row.lower() or "apiserver" in row.lower() or "Namespace" in last[0]
    is_server = is_server or any(word.name in ("model_tag", "host", "port", "api_server_count") for word in keywords)
    return keywords, releases[-1] if releases else "", len(matches), is_server


def _place(origin: str, line: int) -> str:
    return f"{origin}:{line}" if origin else ""


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return _name(node.value) if node.attr in ("from_engine_args", "from_cli_args") else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _constants(tree: ast.AST) -> dict[str, Any]:
    """Names that are set to a literal, once or to the same value again."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = _value(node.value, {})
            name = node.targets[0].id
            found[name] = value if name not in found or found[name] == value else Unread(name)
    return found


def _call_keywords(node: ast.Call, constants: Mapping[str, Any], origin: str) -> Iterator[Keyword]:
    if node.args:
        yield Keyword("model", _value(node.args[0], constants), _place(origin, node.args[0].lineno))
    for keyword in node.keywords:
        value = _value(keyword.value, constants)
        place = _place(origin, keyword.value.lineno)
        if keyword.arg is not None:
            yield Keyword(keyword.arg, value, place)
        elif isinstance(value, dict):
            for name, item in value.items():
                yield Keyword(str(name), item, place)
        else:
            yield Keyword("model", Unread(f"**{ast.unparse(keyword.value)}"), place)


def _value(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return node.attr
    if isinstance(node, ast.Call) and _name(node.func) == "dict" and not node.args:
        return {item.arg: _value(item.value, constants) for item in node.keywords if item.arg}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return Unread(ast.unparse(node))


def _calls_in_fragments(text: str, origin: str) -> Iterator[Found]:
    """Calls in a text that is no whole Python program; one without its end counts only if there is no other."""
    broken: DeploymentError | None = None
    num_found = 0
    for match in _CALL.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        try:
            yield Found(match[1], dict_keywords(text[match.end() - 1 :], origin, line), line)
            num_found += 1
        except DeploymentError as error:
            broken = broken or error
    if broken is not None and not num_found:
        raise broken


def _literal(text: str) -> Any:
    if text in _JSON_WORDS:
        return _JSON_WORDS[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return Unread(text)


def _entries(text: str) -> Iterator[tuple[str, str, int]]:
    """Names and values between the first bracket and its end, with the line of each name counted from 0.

    Values such as ``<Backend.X: 1>`` or ``Config(a=1)`` are no literals, so brackets and quotes are followed by hand.
    Raises _Open for one without its end.
    """
    opened: list[int] = []
    start, name, line = 0, "", 0
    at = 0
    while at < len(text):
        letter = text[at]
        if letter in "'\"":
            at = _end_of_string(text, at)
            continue
        if letter in _BRACKETS:
            opened.append(at)
            start = at + 1 if len(opened) == 1 else start
        elif letter in _BRACKETS.values():
            expected = _BRACKETS[text[opened[-1]]]
            if letter != expected:
                raise _Open(opened[-1], expected)
            opened.pop()
        is_end = not opened or (letter == "," and len(opened) == 1)
        if letter in ":=" and len(opened) == 1 and not name:
            name, start = text[start:at], at + 1
            line = text.count("\n", 0, at)
        elif is_end:
            rest = text[start:at].strip()
            if name or rest:
                yield (name or "model", rest, line if name else text.count("\n", 0, at))
            name, start = "", at + 1
        if not opened:
            return
        at += 1
    raise _Open(opened[-1], _BRACKETS[text[opened[-1]]])


def _end_of_string(text: str, at: int) -> int:
    """The index behind the string that begins here.  Raises _Open if it does not end, on its line or at all."""
    start, quote = at, text[at]
    mark = 3 * quote if text.startswith(3 * quote, at) else quote
    at += len(mark)
    while at < len(text) and not text.startswith(mark, at):
        if text[at] == "\n" and len(mark) == 1:
            break
        at += 2 if text[at] == "\\" else 1
    if not text.startswith(mark, at):
        raise _Open(start, quote)
    return at + len(mark)
