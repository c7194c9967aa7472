"""Where the keys of a TOML text stand: tomllib reads values without saying which line they came from."""

from __future__ import annotations

KeyPath = tuple[str | int, ...]
"""Keys from the top, with the index where an array holds tables: ("engine", "max_num_seqs"), ("replica", 0, "gpu")."""

_BLANK = " \t\r\n"
_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b", '"': '"', "\\": "\\"}


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line number, counted from 1, of every key and table of a valid TOML text.

    Headers, dotted keys, inline tables and arrays of tables are all followed.  What is no valid TOML is for tomllib to
    refuse; here it gives some lines or an IndexError, never a wrong value, because no values are read.
    """
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text + "\n"
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self.array_sizes: dict[KeyPath, int] = {}

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._skip_blank():
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._pair(table)
        return self.lines

    def _header(self) -> KeyPath:
        is_array = self.text.startswith("[[", self.at)
        self.at += 2 if is_array else 1
        keys = self._dotted_key("]")
        self.at += 2 if is_array else 1
        parent = self._note((), keys[:-1])
        path: KeyPath = (*parent, keys[-1])
        if not is_array:
            return self._note(parent, keys[-1:])
        index = self.array_sizes.get(path, 0)
        self.array_sizes[path] = index + 1
        self._note(parent, keys[-1:])
        self.lines[(*path, index)] = self._line()
        return (*path, index)

    def _note(self, table: KeyPath, keys: list[str]) -> KeyPath:
        """Remember the line of each key on the way down; an array of tables stands for its last element."""
        path = table
        for key in keys:
            path = (*path, key)
            self.lines.setdefault(path, self._line())
            if path in self.array_sizes:
                path = (*path, self.array_sizes[path] - 1)
        return path

    def _pair(self, table: KeyPath) -> None:
        keys = self._dotted_key("=")
        path = self._note(table, keys)
        self.at += 1
        self._skip_blank()
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        opening = self.text[self.at]
        if opening in "\"'":
            self._string()
        elif opening == "[":
            self._array(path)
        elif opening == "{":
            self._inline_table(path)
        else:
            while self.text[self.at] not in ",]}#\n":
                self.at += 1

    def _array(self, path: KeyPath) -> None:
        self.at += 1
        index = 0
        while self._skip_blank() and self.text[self.at] != "]":
            self.lines[(*path, index)] = self._line()
            self._value((*path, index))
            index += 1
            self._skip_separator()
        self.at += 1

    def _inline_table(self, path: KeyPath) -> None:
        self.at += 1
        while self._skip_blank() and self.text[self.at] != "}":
            self._pair(path)
            self._skip_separator()
        self.at += 1

    def _skip_separator(self) -> None:
        self._skip_blank()
        if self.text[self.at] == ",":
            self.at += 1

    def _dotted_key(self, end: str) -> list[str]:
        keys: list[str] = []
        while True:
            self._skip_blank()
            keys.append(self._string() if self.text[self.at] in "\"'" else self._bare_key())
            self._skip_blank()
            if self.text[self.at] == end:
                return keys
            self.at += 1

    def _bare_key(self) -> str:
        start = self.at
        while self.text[self.at].isalnum() or self.text[self.at] in "_-":
            self.at += 1
        if self.at == start:
            raise IndexError(f"no key at line {self._line()}")
        return self.text[start : self.at]

    def _string(self) -> str:
        quote = self.text[self.at]
        fence = quote * 3 if self.text.startswith(quote * 3, self.at) else quote
        self.at += len(fence)
        letters: list[str] = []
        while not self.text.startswith(fence, self.at):
            letters.append(self._escape() if quote == '"' and self.text[self.at] == "\\" else self.text[self.at])
            self.at += 1
        self.at += len(fence)
        while len(fence) == 3 and self.text[self.at] == quote:  # up to two quotes may belong to the text itself
            self.at += 1
        return "".join(letters)

    def _escape(self) -> str:
        """The character of the escape at the backslash; leaves the position on its last letter."""
        self.at += 1
        letter = self.text[self.at]
        length = {"x": 2, "u": 4, "U": 8}.get(letter)
        if length is None:
            return _ESCAPES.get(letter, "")
        digits = self.text[self.at + 1 : self.at + 1 + length]
        self.at += length
        return chr(int(digits, 16))

    def _skip_blank(self) -> bool:
        """Move to the next thing that is neither blank nor comment; False at the end of the text."""
        while self.at < len(self.text):
            if self.text[self.at] == "#":
                self.at = self.text.index("\n", self.at)
            elif self.text[self.at] not in _BLANK:
                return True
            self.at += 1
        return False

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1
