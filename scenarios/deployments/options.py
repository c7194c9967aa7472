"""vLLM's command line options: their names and spellings, and the releases that have them.

``vllm_flags.json`` was taken from the parser of ``vllm serve`` 0.32.0 (names, abbreviations, arity, types) and from
``vllm/engine/arg_utils.py`` of every published release from 0.8.0 on but 0.15.0 (``since``, ``until``, ``spelling``);
for options of the HTTP server ``until`` comes from the 28 releases whose ``cli_args.py`` was read.  Nothing is said
about flags that were gone before 0.8.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_DATA = Path(__file__).with_name("vllm_flags.json")
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


class Option(NamedTuple):
    """One option of ``vllm serve``."""

    name: str
    """"max-num-seqs"."""
    key: str
    """"max_num_seqs", its name in Python."""
    kind: str
    """value, list (one or more values), optional_value, boolean (also with --no-) or switch (on only)."""
    type: str = "text"
    """text, int, float, count (also 16k), count_or_auto, json, config (JSON that may hold 16k), text_or_json."""
    takes_none: bool = False
    """The words None and the empty word stand for "not given"."""
    short: tuple[str, ...] = ()
    since: str = ""
    """First release that has it; empty for those older than 0.8.1."""
    until: str = ""
    """First release without it; empty for what 0.32 has."""
    spelling: tuple[tuple[str, str], ...] = ()
    """(release, kind) where the kind changed; boolean_value is ``--flag=False``."""

    @property
    def flag(self) -> str:
        """ "--max-num-seqs"."""
        return f"--{self.name}"

    @property
    def takes_values(self) -> bool:
        """Whether a value follows it."""
        return self.kind not in ("boolean", "switch")

    def exists_in(self, release: str) -> bool:
        """Whether this release has it."""
        order = release_order(release)
        return not (
            (self.since and order < release_order(self.since)) or (self.until and order >= release_order(self.until))
        )

    def kind_in(self, release: str) -> str:
        """Its kind in this release."""
        kind = self.kind
        for since, other in self.spelling:
            if release_order(since) <= release_order(release):
                kind = other
        return kind


class Match(NamedTuple):
    """What an argument that starts with a dash means."""

    option: Option | None
    """None for what is no option."""
    value: str | None = None
    """What stood behind an equals sign, or right behind a one-letter option."""
    negated: bool = False
    """Spelled ``--no-``."""
    candidates: tuple[str, ...] = ()
    """Flags that an ambiguous abbreviation may mean."""


def release_order(release: str) -> tuple[int, ...]:
    """A key by which releases sort."""
    return tuple(int(part) for part in re.findall(r"\d+", release))


@cache
def options() -> dict[str, Option]:
    """All options by name, those that are gone included."""
    table: dict[str, dict[str, Any]] = json.loads(_DATA.read_text("utf-8"))
    return {name: _option(name, entry) for name, entry in table.items()}


def _option(name: str, entry: dict[str, Any]) -> Option:
    return Option(
        name=name,
        key=entry.get("key", name.replace("-", "_")),
        kind=entry["kind"],
        type=entry.get("type", "text"),
        takes_none=entry.get("none", False),
        short=tuple(entry.get("short", ())),
        since=entry.get("since", ""),
        until=entry.get("until", ""),
        spelling=tuple((since, kind) for since, kind in entry.get("spelling", ())),
    )


@cache
def option_of_key(key: str) -> Option | None:
    """The option that gives a keyword of ``LLM`` or ``EngineArgs``."""
    found = options().get(key.replace("_", "-"))
    if found is not None:
        return found
    return next((option for option in options().values() if option.key == key), None)


def nearest_flags(flag: str, count: int = 3) -> tuple[str, ...]:
    """Flags of vLLM 0.32 that look like this one, the nearest first."""
    name = flag.lstrip("-").replace("_", "-").removeprefix("no-")
    current = [option.name for option in options().values() if not option.until]
    return tuple(f"--{near}" for near in difflib.get_close_matches(name, current, n=count, cutoff=0.6))


def is_option_like(text: str) -> bool:
    """Whether argparse takes a word for an option, known or not, rather than for a value."""
    if not text.startswith("-") or text == "-":
        return False
    if find(with_dashes(text)).option is not None:
        return True
    return not (_NEGATIVE_NUMBER.fullmatch(text) or " " in text)


def with_dashes(text: str) -> str:
    """A long flag with dashes for its underscores; what follows the first dot or equals sign stays."""
    if not text.startswith("--"):
        return text
    name, mark, rest = _split_name(text)
    return name.replace("_", "-") + mark + rest


def _split_name(text: str) -> tuple[str, str, str]:
    match = re.search(r"[.=]", text)
    return (text[: match.start()], match[0], text[match.end() :]) if match else (text, "", "")


def find(text: str) -> Match:
    """The option that an argument names, by the rules of argparse: in full, or by an unambiguous beginning."""
    spelled = _spellings()
    name, equals, value = text.partition("=")
    explicit = value if equals else None
    for known, given in ((text, None), (name, explicit)):
        if known in spelled:
            return spelled[known]._replace(value=given)
    return _abbreviated(name, explicit) if text.startswith("--") else _one_dash(text)


def _abbreviated(name: str, value: str | None) -> Match:
    fits = [known for known in _current_spellings() if known.startswith(name)] if len(name) > 2 else []
    if len(fits) == 1:
        return _spellings()[fits[0]]._replace(value=value)
    return Match(None, value, candidates=tuple(fits))


def _one_dash(text: str) -> Match:
    letter, attached = text[:2], text[2:]
    fits = [known for known in _current_spellings() if known == letter or known.startswith(text)]
    if len(fits) != 1:
        return Match(None, candidates=tuple(fits))
    return _spellings()[fits[0]]._replace(value=attached if fits[0] == letter and attached else None)


@cache
def _spellings() -> dict[str, Match]:
    found: dict[str, Match] = {}
    for option in sorted(options().values(), key=lambda option: bool(option.until)):  # a flag that is gone comes last
        for spelling in (option.flag, *option.short):
            found.setdefault(spelling, Match(option))
        if option.kind == "boolean":
            found.setdefault(f"--no-{option.name}", Match(option, negated=True))
    return found


@cache
def _current_spellings() -> tuple[str, ...]:
    return tuple(text for text, match in _spellings().items() if match.option is not None and not match.option.until)
