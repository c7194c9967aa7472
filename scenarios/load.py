"""From TOML, tables or flags to a checked Scenario that knows where each of its values came from."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from windtunnel.scenarios.errors import ScenarioError, ScenarioUnreadable
from windtunnel.scenarios.flags import KEY_OF_PARAMETER, flag_of
from windtunnel.scenarios.locate import KeyPath, key_lines
from windtunnel.scenarios.schema import (
    BATCHING_POLICIES,
    COST_KINDS,
    SECTIONS,
    WORKLOAD_KINDS,
    Scenario,
    Tenant,
    batching_policy,
    cost_kind,
    fleet_table,
    spec_table,
    workload_kind,
)
from windtunnel.scenarios.workloads.errors import printable
from windtunnel.sim.cost.lookup import is_path
from windtunnel.sim.deployment.model import is_bundled

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_TAGGED_SECTIONS = (
    "workload",
    "cost",
    "batching",
)  # pydantic puts the variant's name into the location of an error in these
_TAGS = {"cost": "kind", "batching": "policy"}
"""The key that names the variant, in sections that have it written out."""
_MOST_COMPLAINTS = 10


@dataclass(frozen=True, slots=True)
class Override:
    """A value that takes the place of what the scenario says, and who gave it (a flag, an argument)."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked scenario, what it was called, and where its values came from."""

    scenario: Scenario
    origin: str
    """The file as it was named, or what took its place."""
    base_dir: Path
    """Relative paths in the scenario start here."""
    sources: Mapping[KeyPath, str] = field(default_factory=dict)
    """Source of each key that somebody wrote down: FILE:LINE, a flag, an argument."""
    notes: tuple[str, ...] = ()
    """What merging decided, in sentences for people."""
    overridden: frozenset[KeyPath] = frozenset()
    """Keys that an override gave."""

    def path_of(self, section: str, key: str, value: str) -> Path:
        """A path given under a key: relative to the scenario file, or to the working folder if an override gave it."""
        is_override = (section, key) in self.overridden or (section,) in self.overridden
        try:
            path = Path(value).expanduser()
        except RuntimeError as error:  # ~nobody
            raise ScenarioUnreadable(f"{key} = {_shown(value)}: {str(error).rstrip('.')}") from None
        return path if is_override else self.base_dir / path

    def model_of(self, section: str, key: str, value: str) -> str:
        """A model given under a key, as ``load_model`` is to be asked for it.

        The name of a bundled model means that one, whatever is called so in the working folder; ``./NAME`` and all
        else that is there is a path, and stays one.
        """
        path = self.path_of(section, key, value)
        if is_bundled(value) or not path.exists():
            return value
        return f"./{path}" if is_bundled(str(path)) else str(path)

    def source_of(self, *path: str) -> str | None:
        """Who gave this key (or, by an override, its whole section); None if nobody did."""
        if path in self.sources:
            return self.sources[path]
        return self.sources.get(path[:1]) if path[:1] in self.overridden else None


def bundled_scenarios() -> dict[str, str]:
    """Names of the scenarios that come with windtunnel, each with its one-line description."""
    found = {}
    for entry in sorted(_data_folder().iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".toml"):
            found[entry.name.removesuffix(".toml")] = str(tomllib.loads(entry.read_text("utf-8"))["description"])
    return found


def load_scenario(
    source: str | Path | Mapping[str, Any] | Scenario | None, overrides: Mapping[str, Override] | None = None
) -> Loaded:
    """Read, merge and check a scenario.

    ``source`` is a path, the name of a bundled scenario, a table, a Scenario, or None to start from nothing.  Keys of
    ``overrides`` are those of the schema without their section (``max_num_seqs``), or the name of a section, whose
    value then replaces the whole section.

    Raises ScenarioUnreadable if there is no such file, ScenarioError (one line a complaint, with file and line) for
    text that is no TOML, unknown keys, wrong types and values out of range.
    """
    raw, sources, origin, base_dir = _read(source)
    overrides = _renamed(overrides or {})
    notes = _merge(raw, sources, overrides)
    try:
        scenario = Scenario.model_validate(raw)
    except ValidationError as error:
        raise ScenarioError(_complaints(error, raw, sources, origin)) from None
    overridden = frozenset(override_path(key) for key in overrides)
    return Loaded(scenario, origin, base_dir, sources, notes, overridden)


def _renamed(overrides: Mapping[str, Override]) -> dict[str, Override]:
    """``engine`` as text is the version of vLLM, as the flag of that name; as a table it is the section.

    ``profile`` is the short form of a [cost] of that kind.
    """
    renamed = {
        "engine_version" if key == "engine" and isinstance(override.value, str) else key: override
        for key, override in overrides.items()
    }
    short = renamed.pop("profile", None)
    if short is not None:
        if "cost" in renamed:
            raise ScenarioError(
                f"{short.source} and {renamed['cost'].source} both say what a step costs: give one of them"
            )
        renamed["cost"] = Override(profile_cost(short.value, short.source), short.source)
    return renamed


def profile_cost(given: Any, source: str = "profile") -> dict[str, Any]:
    """The [cost] that a profile's path or bundled name stands for: see ``is_path``.

    Raises ScenarioError for what is no text.
    """
    if not isinstance(given, str | Path) or not str(given):
        raise ScenarioError(
            f"{source}: profile = {_shown(given)} must be the path of a profile.json or the name of a bundled profile "
            "(windtunnel profiles list)"
        )
    is_file = isinstance(given, Path) or is_path(given)
    return {"kind": "profile", "path" if is_file else "name": str(given)}


def override_path(key: str) -> tuple[str, ...]:
    """The place of a key in the schema: its section and itself, or itself where it stands at the top.

    Raises ScenarioError, naming the nearest known one, for a key that is in no section.
    """
    if key in Scenario.model_fields:
        return (key,)
    if key == "profile":
        return ("cost",)
    for section, models in SECTIONS.items():
        if any(key in model.model_fields for model in models):
            return (section, key)
    hint = _suggestion(key, _all_keys()) or " (windtunnel schema --markdown lists all)"
    raise ScenarioError(f"unknown setting {key!r}{hint}")


_Raw = tuple[dict[str, Any], dict[KeyPath, str], str, Path]


def _read(source: str | Path | Mapping[str, Any] | Scenario | None) -> _Raw:
    if source is None:
        return {"name": "from flags"}, {}, "flags", Path()
    if isinstance(source, Scenario):
        return _read_mapping(source.model_dump(exclude_unset=True))
    if isinstance(source, Mapping):
        return _read_mapping(source)
    return _read_file(source)


def _read_mapping(table: Mapping[str, Any]) -> _Raw:
    raw = {key: dict(value) if isinstance(value, Mapping) else value for key, value in table.items()}
    raw.setdefault("name", "from a dict")
    return raw, dict.fromkeys(_paths(raw), "scenario argument"), "scenario argument", Path()


def _read_file(source: str | Path) -> _Raw:
    path = Path(source)
    if path.is_file() or (path.exists() and str(source) not in _bundled_names()):  # a run's folder may have that name
        text, origin, base_dir = _file_text(path), printable(str(source)), path.parent
    else:
        text, origin, base_dir = _bundled_text(str(source)), f"{source}.toml", Path()
    raw = _parse(text, origin)
    raw.setdefault("name", printable(path.stem))
    return raw, {key: f"{origin}:{line}" for key, line in key_lines(text).items()}, origin, base_dir


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        where, reason = (f"{origin}:{place[1]}", str(error)[: place.start()]) if place else (origin, str(error))
        raise ScenarioError(f"{where}: not valid TOML: {reason.strip()}") from None


def _file_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioUnreadable(f"cannot read scenario {path}: {_reason(error)}") from None


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else f"not UTF-8 text ({error.reason})"


def _bundled_text(name: str) -> str:
    names = _bundled_names()
    if name in names:
        return str(_data_folder().joinpath(f"{name}.toml").read_text("utf-8"))
    hint = _suggestion(name, names) or f"; bundled are {', '.join(names)}"
    raise ScenarioUnreadable(f"no scenario file {name}, and no bundled scenario of that name{hint}")


def _bundled_names() -> list[str]:
    return sorted(item.name.removesuffix(".toml") for item in _data_folder().iterdir() if item.name.endswith(".toml"))


def _data_folder() -> Any:
    return resources.files("windtunnel.scenarios") / "data"


def _paths(table: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    items = table.items() if isinstance(table, Mapping) else enumerate(table) if isinstance(table, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _paths(value, (*path, key))


def _merge(raw: dict[str, Any], sources: dict[KeyPath, str], overrides: Mapping[str, Override]) -> tuple[str, ...]:
    notes = (*_make_room(raw, sources, overrides), *_replaced_lists(raw, overrides))
    whole_sections_first = sorted(overrides.items(), key=lambda item: len(override_path(item[0])))
    for key, override in whole_sections_first:
        path = override_path(key)
        _forget(sources, path)
        sources[path] = override.source
        if len(path) == 1:
            raw[key] = dict(override.value) if isinstance(override.value, Mapping) else override.value
            continue
        section = raw[path[0]] = _expanded(path[0], raw.get(path[0], {}), sources)
        if not isinstance(section, dict):
            raise ScenarioError(f"{sources.get((path[0],), path[0])}: [{path[0]}] must be a table of keys")
        section[key] = override.value
    return notes


_SPELT_AS_TEXT = {**_TAGS, "speculative": "method"}
"""Sections that may be written as text, each with the key that its first word stands for."""


def _expanded(section: str, value: Any, sources: Mapping[KeyPath, str]) -> Any:
    """A section as a table, where it was written as the text that abbreviates one."""
    if not isinstance(value, str) or section not in _SPELT_AS_TEXT:
        return value
    try:
        return spec_table(value, _SPELT_AS_TEXT[section])
    except ValueError as error:
        source = sources.get((section,), section)
        raise ScenarioError(f"{source}: {section} = {_shown(value)} {error}") from None


_SAY_THE_SAME = (("request_rate", "arrival"), ("arrival", "request_rate"), ("arrival", "burstiness"))


def _make_room(raw: dict[str, Any], sources: dict[KeyPath, str], overrides: Mapping[str, Override]) -> tuple[str, ...]:
    """Take out of the file's workload what an override replaces under another name; says what that was."""
    workload = raw.get("workload")
    if not isinstance(workload, dict) or not workload or "workload" in overrides:
        return ()
    if "trace" in overrides and "trace" not in workload:
        raw["workload"] = {}
        _forget(sources, ("workload",))
        return (f"{overrides['trace'].source} replaces the scenario's own workload",)
    notes = []
    for new, old in _SAY_THE_SAME:
        if new in overrides and old in workload and old not in overrides:
            workload.pop(old)
            _forget(sources, ("workload", old))
            notes.append(f"{overrides[new].source} replaces the scenario's own {old}")
    return tuple(notes)


def _replaced_lists(raw: Mapping[str, Any], overrides: Mapping[str, Override]) -> Iterator[str]:
    """Says which objectives and limits of the file an override drops: they are not added up."""
    given = raw.get("slo")
    for key in ("objectives", "goodput"):
        old = given.get(key) if isinstance(given, dict) else None
        if key in overrides and isinstance(old, list) and old and old != overrides[key].value:
            yield f"{overrides[key].source} replaces the scenario's own {key}: {', '.join(map(str, old))}"


def _forget(sources: dict[KeyPath, str], path: KeyPath) -> None:
    for known in [known for known in sources if known[: len(path)] == path]:
        del sources[known]


def _source_of(sources: Mapping[KeyPath, str], path: KeyPath) -> str | None:
    while path:
        if path in sources:
            return sources[path]
        path = path[:-1]
    return None


def _complaints(error: ValidationError, raw: dict[str, Any], sources: Mapping[KeyPath, str], origin: str) -> str:
    found = []
    for detail in error.errors():
        path = _path_in_file(detail)
        found.append((_source_of(sources, path) or origin, _complaint(detail, path, raw)))
    lines = list(dict.fromkeys(f"{source}: {text}" for source, text in sorted(found, key=_by_line)))
    hidden = len(lines) - _MOST_COMPLAINTS
    return "\n".join(lines[:_MOST_COMPLAINTS] + ([f"and {hidden} more"] if hidden > 0 else []))


def _by_line(complaint: tuple[str, str]) -> int:
    line = complaint[0].rpartition(":")[2]
    return int(line) if line.isdigit() else 0


def _path_in_file(detail: ErrorDetails) -> KeyPath:
    """The keys of the file that an error is about, without the names of variants that pydantic puts between."""
    path = detail["loc"]
    if detail["type"] == "union_tag_invalid":
        return (*path, _TAGS[str(path[0])])
    if len(path) > 1 and path[0] in _TAGGED_SECTIONS:
        return (path[0], *path[2:3])
    if len(path) > 4 and path[:2] == ("fleet", "pools") and path[3] in _TAGGED_SECTIONS:
        return (*path[:4], *path[5:6])
    return path


def _complaint(detail: ErrorDetails, path: KeyPath, raw: dict[str, Any]) -> str:
    where = f" in [{_table_of(path)}]" if len(path) > 1 else ""
    if detail["type"] == "extra_forbidden":
        return _unknown_key(path, raw)
    if detail["type"] == "missing":
        return f"missing {path[-1]!r}{where}{_remedy_for_missing(path)}"
    value = detail["input"][path[-1]] if detail["type"] == "union_tag_invalid" else detail["input"]
    key = str(path[-1]) if isinstance(path[-1], str) else f"{path[-2]}[{path[-1]}]"
    return f"{key} = {_shown(value)}{where} {_requirement(detail, _limits(path, raw))}"


def _table_of(path: KeyPath) -> str:
    """The table that a key stands in: its section, or in a fleet the pool, the autoscaler or the fault."""
    return ".".join(str(part) for part in path[:-1]) if path[0] == "fleet" else str(path[0])


def _unknown_key(path: KeyPath, raw: dict[str, Any]) -> str:
    key = str(path[-1])
    if len(path) == 1:
        home = _home_of(key)
        return f"unknown key {key!r}" + (
            f"; it belongs in [{home}]" if home else _suggestion(key, list(Scenario.model_fields))
        )
    section = str(path[0])
    if path[0] == "fleet" and len(path) > 2:
        known = list(_in_fleet(path[1:-1], raw["fleet"]).model_fields)
        hint = _suggestion(key, known) or "; known are " + ", ".join(known)
        return f"unknown key {key!r} in [{_table_of(path)}]{hint}"
    known = list(_variant(section, raw).model_fields)
    hint = _flag_name(key, known) or _wrong_variant(section, key) or _other_home(section, key)
    hint = hint or _suggestion(key, known)
    hint = hint or _suggestion(key, _all_keys())
    return f"unknown key {key!r} in [{section}]{hint or '; known are ' + ', '.join(known)}"


def _in_fleet(path: KeyPath, fleet: dict[str, Any]) -> type[BaseModel]:
    """Which table stands at this place of [fleet]."""
    if path[-1] == "cost":
        value = fleet["pools"][path[1]]["cost"]
        return COST_KINDS.get(str(cost_kind(value)), SECTIONS["cost"][0])
    return fleet_table(path)


def _flag_name(key: str, known: list[str]) -> str:
    """What a key is called here that is written as its flag."""
    name = KEY_OF_PARAMETER.get(key.replace("-", "_"), key.replace("-", "_"))
    return f"; it is called {name!r} here" if name != key and name in known else ""


def _variant(section: str, raw: dict[str, Any]) -> type[BaseModel]:
    value = raw.get(section)
    if isinstance(value, str) and section in _TAGS:
        with suppress(ValueError):
            value = spec_table(value, _TAGS[section])
    if section == "workload":
        return WORKLOAD_KINDS[workload_kind(value)]
    if section == "tenants":
        return Tenant
    if section == "cost":
        return COST_KINDS.get(str(cost_kind(value)), SECTIONS["cost"][0])
    if section == "batching":
        return BATCHING_POLICIES.get(str(batching_policy(value)), SECTIONS["batching"][0])
    return SECTIONS[section][0]


def _wrong_variant(section: str, key: str) -> str:
    if section == "workload" and key in WORKLOAD_KINDS["trace"].model_fields:
        return "; it needs a trace"
    if section == "workload" and key in WORKLOAD_KINDS["synthetic"].model_fields:
        return "; a trace brings its own lengths and arrivals (rate_scale speeds them up, limit cuts them off)"
    known = {"cost": COST_KINDS, "batching": BATCHING_POLICIES}.get(section, {})
    kinds = [kind for kind, model in known.items() if key in model.model_fields]
    return f"; it needs {_TAGS[section]} = {' or '.join(repr(kind) for kind in kinds)}" if kinds else ""


def _other_home(section: str, key: str) -> str:
    home = _home_of(key)
    return f"; it belongs in [{home}]" if home and home != section else ""


def _home_of(key: str) -> str | None:
    for section, models in SECTIONS.items():
        if any(key in model.model_fields for model in models):
            return section
    return None


@cache
def _all_keys() -> list[str]:
    names = list(Scenario.model_fields)
    names += [key for models in SECTIONS.values() for model in models for key in model.model_fields]
    return list(dict.fromkeys(names))


def _suggestion(key: str, known: list[str]) -> str:
    begins_alike = [name for name in known if key and name.startswith(key)]
    near = begins_alike or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _remedy_for_missing(path: KeyPath) -> str:
    if path == ("workload",):
        return ": give a trace (--trace), or num_requests, input and output (--num-prompts, --input-len, --output-len)"
    if path[0] == "workload":
        return f": give {flag_of(str(path[-1]), 'workload')} or {path[-1]} under [workload], or a trace (--trace)"
    return ""


_LIMIT_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_LIMIT_ERRORS = ("greater_than_equal", "greater_than", "less_than_equal", "less_than")
_TYPES = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text in quotes",
    "bool_type": "must be true or false",
    "dict_type": "must be a table of keys",
    "list_type": "must be a list",
    "model_type": "must be a table of keys",
    "model_attributes_type": "must be a table of keys",
}


def _requirement(detail: ErrorDetails, limits: dict[str, float]) -> str:
    context = detail.get("ctx", {})
    if detail["type"] in _LIMIT_ERRORS:
        words = [f"{_LIMIT_WORDS[name]} {value:g}" for name, value in (limits or context).items()]
        return f"must be {' and '.join(words)}"
    if detail["type"] in ("literal_error", "union_tag_invalid"):
        allowed = str(context.get("expected", context.get("expected_tags")))
        return f"must be {'one of ' if ',' in allowed or ' or ' in allowed else ''}{allowed}"
    if detail["type"] == "value_error":
        return str(context["error"])
    return _TYPES.get(detail["type"], detail["msg"].replace("Input should be", "must be"))


def _limits(path: KeyPath, raw: dict[str, Any]) -> dict[str, float]:
    """The whole allowed range of a key, where pydantic names only the end that was overstepped."""
    if len(path) != 2:
        return {}
    field = _variant(str(path[0]), raw).model_fields.get(str(path[1]))
    metadata = field.metadata if field else []
    return {name: getattr(item, name) for name in _LIMIT_WORDS for item in metadata if hasattr(item, name)}


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
