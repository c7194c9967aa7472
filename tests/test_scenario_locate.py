"""Where the keys of a TOML text stand."""

from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from windtunnel.scenarios.locate import KeyPath, key_lines

SCENARIO = '''\
# a comment with [brackets] and = signs
name = "a # b"          # 2
text = """
[not a table]
x = 1
"""                     # 3..6

[engine]                # 8
max_num_seqs = 64
"quoted key" = 'its'
deployment.model = "m"  # 11

[workload]
input = { dist = "lognormal", mean = 512, sigma = 0.8 }
request_rate = "inf"    # 15
prefixes = [            # 16
  { share = 0.5 },
  { share = 0.25 },
]

[[replica]]             # 21
gpu = "a"
[[replica]]             # 23
gpu = "b"
[replica.inner]         # 25
deep = true
'''


def test_every_way_to_write_a_key_has_its_line() -> None:
    lines = key_lines(SCENARIO)
    expected = {
        ("name",): 2,
        ("text",): 3,
        ("engine",): 8,
        ("engine", "max_num_seqs"): 9,
        ("engine", "quoted key"): 10,
        ("engine", "deployment", "model"): 11,
        ("workload", "input"): 14,
        ("workload", "input", "mean"): 14,
        ("workload", "request_rate"): 15,
        ("workload", "prefixes", 1, "share"): 18,
        ("replica", 0, "gpu"): 22,
        ("replica", 1, "gpu"): 24,
        ("replica", 1, "inner", "deep"): 26,
    }
    assert expected == {path: lines.get(path) for path in expected}


def test_every_key_that_tomllib_reads_has_a_line() -> None:
    assert set(_paths(tomllib.loads(SCENARIO))) == set(key_lines(SCENARIO))


KEYS = st.one_of(
    st.text("abcXYZ019_-", min_size=1, max_size=6),
    st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=5),
)
SCALARS = st.one_of(
    st.integers(-(2**40), 2**40),
    st.booleans(),
    st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8),
    st.text("a\"\\\n'#[]{}=,.", max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, st.one_of(VALUES, st.dictionaries(KEYS, VALUES, max_size=4)), max_size=5), st.data())
def test_the_lines_of_any_document_are_those_where_its_keys_are_written(
    table: dict[str, Any], data: st.DataObject
) -> None:
    writer = _Writer(data)
    writer.document(table)
    text = "\n".join(writer.lines) + "\n"
    assert table == tomllib.loads(text)
    assert writer.where == key_lines(text)


class _Writer:
    """Writes TOML in a mixture of styles and remembers the line of every key."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.lines: list[str] = []
        self.where: dict[KeyPath, int] = {}

    def document(self, table: dict[str, Any]) -> None:
        headed = [key for key, value in table.items() if isinstance(value, dict) and self._coin()]
        for key in (key for key in table if key not in headed):
            self._pair((), key, table[key])
        for key in headed:
            self._filler()
            self.lines.append(f"[ {self._key(key)} ] # ] = [")
            self.where[(key,)] = len(self.lines)
            for inner, value in table[key].items():
                self._pair((key,), inner, value)

    def _pair(self, path: KeyPath, key: str, value: Any) -> None:
        self._filler()
        here = (*path, key)
        self.where[here] = len(self.lines) + 1
        self.lines.append(f"  {self._key(key)} = ")
        self._value(here, value)
        self.lines[-1] += "  # 'x' = {"

    def _value(self, path: KeyPath, value: Any) -> None:
        if isinstance(value, dict):
            self._members("{", "}", [((*path, key), f"{self._key(key)} =", item) for key, item in value.items()], False)
        elif isinstance(value, list):
            self._members("[", "]", [((*path, index), "", item) for index, item in enumerate(value)], True)
        else:
            self._scalar(value)

    def _members(self, opening: str, closing: str, members: list[tuple[KeyPath, str, Any]], may_break: bool) -> None:
        self.lines[-1] += opening
        for index, (path, prefix, item) in enumerate(members):
            if may_break and self._coin():
                self.lines += [" # ]", ""]
            self.where[path] = len(self.lines)
            self.lines[-1] += f" {prefix} "
            self._value(path, item)
            self.lines[-1] += ", " if index + 1 < len(members) else " "
        self.lines[-1] += closing

    def _scalar(self, value: Any) -> None:
        if isinstance(value, bool):
            self.lines[-1] += str(value).lower()
        elif isinstance(value, int):
            self.lines[-1] += str(value)
        elif "'" not in value and "\n" not in value and value.isprintable() and self._coin():
            self.lines[-1] += f"'{value}'"
        elif self._coin():
            self._multi_line(value)
        else:
            self.lines[-1] += self._quoted(value)

    def _multi_line(self, value: str) -> None:
        first, *rest = ('"""\n' + value.replace("\\", "\\\\").replace('"', '\\"') + '"""').split("\n")
        self.lines[-1] += first
        self.lines += rest

    def _key(self, key: str) -> str:
        bare = key.isascii() and key.replace("_", "a").replace("-", "a").isalnum()
        return key if bare and self._coin() else self._quoted(key)

    def _quoted(self, text: str) -> str:
        escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return '"' + "".join(letter if letter.isascii() else f"\\U{ord(letter):08x}" for letter in escaped) + '"'

    def _filler(self) -> None:
        if self._coin():
            self.lines += ["", "# comment = [ 'x' {"]

    def _coin(self) -> bool:
        return self.data.draw(st.booleans())


def _paths(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in [(*path, key), *_paths(item, (*path, key))]]
