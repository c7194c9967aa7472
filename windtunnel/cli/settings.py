"""Settings on the command line, ``KEY=VALUE`` and ``KEY=SPEC``, and which files they may name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import typer


def read_setting(text: str, option: str = "--set", *, advice: str = "") -> tuple[str, Any]:
    """The key of the scenario file and the value in ``KEY=VALUE``; a flag's name will do for the key.

    Raises BadParameter, with ``advice`` behind the form it must have, for text that does not read so.
    """
    from windtunnel.comparison_plan import setting_key
    from windtunnel.sweeping.axes import read_value, value_of

    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise typer.BadParameter(f"{text!r} must read KEY=VALUE{advice}", param_hint=option)
    key = setting_key(name.strip().lstrip("-").replace("-", "_"), read_value(value.strip()))
    return key, value_of(key, value.strip())


def read_overrides(settings: Iterable[str], flags: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """What ``--set`` says, and with it what flags of their own say, by key of the scenario file.

    ``flags`` have key and value by the name of the flag; None or an empty list is one that was not given.  Raises
    BadParameter for a key that is set twice.
    """
    found: dict[str, Any] = {}
    for key, value in map(read_setting, settings):
        if key in found:
            raise typer.BadParameter(f"{key} is set twice: drop one of them", param_hint="--set")
        found[key] = value
    for option, (key, value) in flags.items():
        if value is None or value == []:
            continue
        if key in found:
            raise typer.BadParameter(f"{option} and --set {key} say the same: drop one of them")
        found[key] = value
    return found


def read_specs(texts: Iterable[str], option: str, *, said: str) -> dict[str, str]:
    """``KEY=SPEC`` by key; ``said`` is what is done to a key ("varied").  Raises BadParameter for a key twice."""
    from windtunnel.sweeping.axes import parse_vary

    found: dict[str, str] = {}
    for text in texts:
        try:
            key, spec = parse_vary(text)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=option) from None
        if key in found:
            raise typer.BadParameter(f"{key} is {said} twice: put all of its values into one", param_hint=option)
        found[key] = spec
    return found


def words_in(told: Any) -> Iterator[str]:
    """All words among values and specifications, of which some may name files that runs read."""
    if isinstance(told, str):
        yield told
        yield from (part.strip() for part in re.split("[,;]", told.removeprefix("choice:")))
    elif isinstance(told, Mapping):
        for value in told.values():
            yield from words_in(value)
    elif isinstance(told, list | tuple):
        for value in told:
            yield from words_in(value)
