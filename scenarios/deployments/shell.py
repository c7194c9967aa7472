"""Shell text as words: quotes, escapes, comments, line continuations, variables that the text itself sets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from windtunnel.scenarios.deployments.words import Unclosed, Word

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|[@*#?$!0-9-]")
_BRACED = re.compile(r"([A-Za-z_]\w*|[@*#?0-9]+)(?:\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
_KEYWORDS = {"then", "else", "do", "if", "elif", "while", "until", "!", "{", "time", "exec", "command", "env"}
_DECLARE = {"export", "declare", "local", "readonly", "typeset"}
_OPERATORS = ";&|()<>\n"
_ESCAPED_IN_QUOTES = '$`"\\\n'


@dataclass(slots=True)
class Command:
    """One simple command."""

    words: list[Word]
    environment: dict[str, str] = field(default_factory=dict)
    """Variables set for it, and those exported before."""


def commands(
    text: str, source_of: Callable[[int], str], variables: Mapping[str, str] | None = None
) -> tuple[list[Command], list[str]]:
    """The simple commands of a shell text in their order, and notes on what was assumed.

    ``source_of`` gives a source for a line, counted from 0.  Variables keep what the text sets them to, whichever
    branch that is in; ``${NAME:-default}`` falls back to its default; what nothing sets stays as written and is named
    in the word.  Redirections are left out.  A quote that is never closed reaches to the end and is told by its word;
    an array that is never closed raises DeploymentError.
    """
    scanner = _Scanner(text, source_of, dict(variables or {}))
    return scanner.scan(), scanner.notes


def split_words(
    text: str, source: str | Callable[[int], str], variables: Mapping[str, str] | None = None
) -> list[Word]:
    """The words of a text that no shell runs; operators are plain letters.

    ``source`` is that of all words, or gives it for a line, counted from 0.
    """
    source_of = source if callable(source) else lambda _: source
    scanner = _Scanner(text, source_of, dict(variables or {}), operators="\n")
    return [word for command in scanner.scan() for word in command.words]


class _Field:
    """A word as it grows; an unquoted variable may break it into several."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.parts: list[str] = [""]
        self.is_quoted = False
        self.unresolved: list[str] = []
        self.unclosed: Unclosed | None = None

    def add(self, text: str) -> None:
        self.parts[-1] += text

    def add_split(self, text: str) -> None:
        first, *others = re.split(r"\s+", text)
        self.parts[-1] += first
        self.parts += others


class _Scanner:
    def __init__(
        self, text: str, source_of: Callable[[int], str], variables: dict[str, str], operators: str = _OPERATORS
    ) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.line = 0
        self.source_of = source_of
        self.variables = variables
        self.arrays: dict[str, list[Word]] = {}
        self.exported: dict[str, str] = {}
        self.operators = operators
        self.notes: list[str] = []

    def scan(self) -> list[Command]:
        found: list[Command] = []
        words: list[Word] = []
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in self.operators:
                if letter in "<>":
                    self._redirection(words)
                    continue
                self._end(words, found)
                words = []
                self._step()
            elif letter in " \t\r\n":
                self._step()
            elif letter == "#":
                self._skip_line()
            elif self._continues():
                self.at += 2
                self.line += 1
            else:
                words += self._word()
        self._end(words, found)
        return found

    def _step(self) -> None:
        self.line += self.text[self.at] == "\n"
        self.at += 1

    def _continues(self) -> bool:
        return self.text.startswith("\\\n", self.at)

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _redirection(self, words: list[Word]) -> None:
        """Leave out ``2> file``, ``<<EOF``, ``2>&1`` and the like."""
        if words and words[-1].text.isdigit() and self.text[self.at - 1].isdigit():
            words.pop()
        while self.at < len(self.text) and self.text[self.at] in "<>&-":
            self.at += 1
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        if self.at < len(self.text) and self.text[self.at] not in self.operators:
            self._word()

    def _end(self, words: list[Word], found: list[Command]) -> None:
        """Close a command: keep assignments, note the rest."""
        while words and words[0].text in _KEYWORDS:
            words = words[1:]
        exports = bool(words) and words[0].text in _DECLARE
        rest = [word for word in words[1:] if not word.text.startswith("-")] if exports else words
        own: dict[str, str] = {}
        while rest and (match := _ASSIGNMENT.fullmatch(rest[0].text)):
            name, plus, value = match.groups()
            if not rest[0].unresolved:
                own[name] = self.variables.get(name, "") + value if plus else value
            rest = rest[1:]
        if not rest:
            self.variables |= own
            self.exported |= own if exports else {}
        elif not exports:
            found.append(Command(rest, {**self.exported, **own}))

    def _word(self) -> list[Word]:
        field_ = _Field(self.line)
        start = self.at
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in " \t\n" or (letter in self.operators and not self._opens_array(start, field_)):
                break
            if self._opens_array(start, field_):
                return self._array(field_)
            if self._continues():
                self.at += 2
                self.line += 1
            elif (spread := self._spread()) is not None and not field_.parts[-1]:
                return spread
            else:
                self._piece(field_, letter)
        return self._words_of(field_)

    def _piece(self, field_: _Field, letter: str) -> None:
        if letter == "'":
            self._single(field_)
        elif letter == '"':
            self._double(field_)
        elif letter == "\\":
            field_.add(self.text[self.at + 1 : self.at + 2])
            self.at += 2
        elif letter in "$`":
            self._expansion(field_, is_quoted=False)
        else:
            field_.add(letter)
            self._step()

    def _words_of(self, field_: _Field) -> list[Word]:
        source = self.source_of(field_.line)
        texts = [part for part in field_.parts if part] or ([""] if field_.is_quoted else [])
        return [Word(text, source, tuple(dict.fromkeys(field_.unresolved)), field_.unclosed) for text in texts]

    def _unclosed(self, closing: str, start: int, line: int) -> Unclosed:
        return Unclosed(closing, self.source_of(line), self.text[start:])

    def _single(self, field_: _Field) -> None:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            field_.unclosed = self._unclosed("'", self.at, self.line)
            end = len(self.text)
        inner = self.text[self.at + 1 : end]
        field_.add(inner)
        field_.is_quoted = True
        self.line += inner.count("\n")
        self.at = end + 1

    def _double(self, field_: _Field) -> None:
        field_.is_quoted = True
        start, line = self.at, self.line
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            letter = self.text[self.at]
            if letter == "\\" and self.text[self.at + 1 : self.at + 2] in tuple(_ESCAPED_IN_QUOTES):
                escaped = self.text[self.at + 1]
                field_.add("" if escaped == "\n" else escaped)
                self.line += escaped == "\n"
                self.at += 2
            elif letter in "$`":
                self._expansion(field_, is_quoted=True)
            else:
                field_.add(letter)
                self._step()
        if self.at >= len(self.text):
            field_.unclosed = self._unclosed('"', start, line)
        self.at += 1

    def _expansion(self, field_: _Field, is_quoted: bool) -> None:
        """Put in the value of a variable, or what is written and the variable's name."""
        start, line = self.at, self.line
        written, name, value = self._variable()
        closing = _closing(written)
        if closing:
            field_.unclosed = self._unclosed(closing, start, line)
        if name is None:
            field_.add(written)
        elif value is None:
            field_.add(written)
            field_.unresolved.append(name)
        elif is_quoted or self.operators != _OPERATORS or _ASSIGNMENT.match(field_.parts[0]):
            field_.add(value)
        else:
            field_.add_split(value)

    def _variable(self) -> tuple[str, str | None, str | None]:
        """What is written at the dollar, the variable's name (None if it is no variable), its value if known."""
        start = self.at
        if self.text[self.at] == "`":
            return self._to("`", start, 1)
        follower = self.text[self.at + 1 : self.at + 2]
        if follower == "(":
            return self._to_bracket("(", ")", start)
        if follower == "{":
            return self._braced(start)
        match = _NAME.match(self.text, self.at + 1)
        if match is None:
            self.at += 1
            return "$", None, None
        self.at = match.end()
        return self.text[start : self.at], match[0], self.variables.get(match[0])

    def _braced(self, start: int) -> tuple[str, str | None, str | None]:
        written, _, _ = self._to_bracket("{", "}", start)
        match = _BRACED.fullmatch(written[2:-1])
        if match is None:
            return written, written[2:-1], None
        name, operator, default = match.groups()
        value = self.variables.get(name)
        if operator and (value is None or (operator.startswith(":") and not value)):
            fallback = split_words(f'"{default}"', "", self.variables)
            if not fallback or fallback[0].unresolved:
                return written, name, None
            self.notes.append(f"{self.source_of(self.line)}: {name} is taken as {fallback[0].text!r}, its default")
            value = fallback[0].text
        return written, name, value

    def _to(self, end: str, start: int, skip: int) -> tuple[str, str | None, str | None]:
        stop = self.text.find(end, start + skip)
        self.at = len(self.text) if stop < 0 else stop + 1
        written = self.text[start : self.at]
        self.line += written.count("\n")
        return written, f"({written.strip('`')})", None

    def _to_bracket(self, opening: str, closing: str, start: int) -> tuple[str, str | None, str | None]:
        depth = 0
        at = start
        while at < len(self.text):
            depth += (self.text[at] == opening) - (self.text[at] == closing)
            at += 1
            if depth == 0 and self.text[at - 1] == closing:
                break
        self.at = at
        written = self.text[start:at]
        self.line += written.count("\n")
        return written, written[1:], None

    def _spread(self) -> list[Word] | None:
        """The elements of an array that stands for itself, as in "${ARGS[@]}"."""
        match = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?').match(self.text, self.at)
        if match is None or match[1] not in self.arrays:
            return None
        self.at = match.end()
        return list(self.arrays[match[1]])

    def _opens_array(self, start: int, field_: _Field) -> bool:
        return (
            self.text[self.at] == "("
            and self.operators == _OPERATORS
            and _ASSIGNMENT.fullmatch(field_.parts[-1]) is not None
            and field_.parts[-1].endswith("=")
            and self.at > start
        )

    def _array(self, field_: _Field) -> list[Word]:
        """Remember NAME=( words ); it leaves no word."""
        match = _ASSIGNMENT.fullmatch(field_.parts[-1])
        assert match is not None
        start, line = self.at, self.line
        self.at += 1
        elements: list[Word] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            letter = self.text[self.at]
            if letter in " \t\r\n":
                self._step()
            elif letter == "#":
                self._skip_line()
            elif self._continues():
                self.at += 2
                self.line += 1
            elif letter in self.operators:
                self._step()
            else:
                elements += self._word()
        if self.at >= len(self.text):
            raise self._unclosed(")", start, line).complaint()
        self.at += 1
        self.arrays[match[1]] = [*self.arrays.get(match[1], []), *elements] if match[2] else elements
        return []


def _closing(expansion: str) -> str:
    """What an expansion lacks at its end; nothing for a whole one."""
    for opening, closing in (("`", "`"), ("${", "}"), ("$(", ")")):
        if expansion.startswith(opening):
            return "" if expansion.endswith(closing) and len(expansion) > 1 and _is_balanced(expansion) else closing
    return ""


def _is_balanced(expansion: str) -> bool:
    """Whether the brackets of an expansion are closed; of back quotes there is no more than the end."""
    opening, closing = ("(", ")") if expansion.startswith("$(") else ("{", "}")
    return expansion.startswith("`") or expansion.count(opening) == expansion.count(closing)
