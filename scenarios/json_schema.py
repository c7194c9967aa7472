"""The JSON Schema of a scenario file, and the same as tables for people.

Both follow from what checks a scenario: the models of ``schema`` and the specifications of ``workloads``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from windtunnel.scenarios.flags import flag_of
from windtunnel.scenarios.schema import SECTIONS, Scenario
from windtunnel.scenarios.workloads.cells import MAX_TOKENS
from windtunnel.scenarios.workloads.spec_schema import definitions
from windtunnel.sim.cost.roofline import RooflineFactors

Schema = dict[str, Any]

_SPECIFIED = {
    "input": "Lengths",
    "output": "Lengths",
    "arrival": "Arrivals",
    "prefixes": "Prefixes",
    "sessions": "Sessions",
}
"""Keys of a synthetic workload that are specifications, each with the name of its definition."""
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> Schema:
    """The JSON Schema of a scenario file, for editors and other tools."""
    schema: Schema = _tidied(Scenario.model_json_schema())
    defs = {**schema.pop("$defs"), **_tidied(definitions())}
    keys = defs["SyntheticWorkload"]["properties"]
    for key, name in _SPECIFIED.items():
        keys[key] = {"$ref": f"#/$defs/{name}", "description": keys[key]["description"]}
    shares = {"anyOf": [{"type": "number", "minimum": 0}, {"$ref": "#/$defs/TenantLoad"}]}
    keys["tenants"] = {"type": "object", "additionalProperties": shares, "description": keys["tenants"]["description"]}
    for key, default in asdict(RooflineFactors()).items():
        defs["RooflineCost"]["properties"][key]["default"] = default
    return {"$schema": _DIALECT, **schema, "$defs": dict(sorted(defs.items()))}


def _tidied(node: Any) -> Any:
    """Without what TOML cannot say (null) and what only repeats a name; texts on one line, choices of types as lists.

    pydantic leaves its own names of limits where a value may be text as well; JSON Schema's take their place.
    """
    if isinstance(node, list):
        return [_tidied(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = [(str(key), value) for key, value in node.items() if not _says_nothing(str(key), value)]
    tidy: Schema = {_LIMITS.get(key, key): _tidied(value) for key, value in kept}
    if isinstance(tidy.get("description"), str):
        tidy["description"] = " ".join(tidy["description"].replace("``", "`").split())
    return _with_types_as_list(tidy)


def _says_nothing(key: str, value: Any) -> bool:
    is_title = key == "title" and isinstance(value, str)
    return is_title or (key == "default" and (value is None or isinstance(value, dict)))


def _with_types_as_list(node: Schema) -> Schema:
    choices = [choice for choice in node.get("anyOf", ()) if choice != {"type": "null"}]
    if not choices:
        return node
    if any("$ref" in choice or "oneOf" in choice or "properties" in choice for choice in choices):
        rest = {key: value for key, value in node.items() if key != "anyOf"}
        return {**choices[0], **rest} if len(choices) == 1 else {**node, "anyOf": choices}
    types: list[str] = []
    limits: Schema = {}
    for choice in choices:
        kinds = choice.get("type", [])
        types += kinds if isinstance(kinds, list) else [kinds]
        limits.update((key, value) for key, value in choice.items() if key != "type")
    rest = {key: value for key, value in node.items() if key != "anyOf"}
    kind = {"type": types[0] if len(types) == 1 else types} if types else {}
    return {**kind, **limits, **rest}


def markdown() -> str:
    """Every key of a scenario file with what it may be and what it means, as Markdown tables."""
    schema = json_schema()
    defs = schema["$defs"]
    sections = [(section, defs[model.__name__]) for section, models in SECTIONS.items() for model in models]
    return "\n\n".join(
        [
            _block("At the top", {"properties": _plain_keys(schema)}, "scenario"),
            *(_block(_title(section, definition), definition, section) for section, definition in sections),
            _choices("Lengths: `input`, `output`, `prefix_tokens`, `turns`", defs["Lengths"]),
            _choices("Arrivals: `arrival`", defs["Arrivals"]),
            _block("`[workload.prefixes]`", defs["Prefixes"]),
            _block("`[workload.sessions]`", defs["Sessions"]),
            _block("`[workload.tenants.NAME]`", defs["TenantLoad"]),
            _block("`[tenants.NAME]`", defs["Tenant"]),
            _block("`[fleet.pools.NAME]`", defs["FleetPool"]),
            _block("`[fleet.autoscaler]`, also of a pool", defs["FleetAutoscaler"]),
            _block("`[[fleet.faults]]`", defs["FleetFault"]),
            _choices("Pauses: `think`", defs["Durations"]),
        ]
    )


def _plain_keys(schema: Schema) -> Schema:
    return {key: value for key, value in schema["properties"].items() if key not in SECTIONS}


def _title(section: str, definition: Schema) -> str:
    tag = {"batching": "policy"}.get(section, "kind")
    kind = definition["properties"].get(tag, {})
    which = kind.get("const") or kind.get("default")
    if section == "workload":
        which = "a trace" if "trace" in definition["properties"] else "drawn"
    return f"`[{section}]`" + (f", {which}" if which else "")


def _block(title: str, definition: Schema, section: str = "") -> str:
    keys: Mapping[str, Schema] = definition["properties"]
    intro = definition.get("description")
    lines = [f"### {title}", "", *([intro, ""] if intro else [])]
    flags = [flag_of(key, section) for key in keys]
    head = ["key", "value", "meaning", *(["flag"] if any(flags) else [])]
    rows = [
        [
            f"`{key}`",
            _words(value),
            value.get("description", ""),
            *([f"`{flag}`" if flag else ""] if any(flags) else []),
        ]
        for (key, value), flag in zip(keys.items(), flags, strict=True)
    ]
    return "\n".join([*lines, *_rows(head, rows)])


def _choices(title: str, definition: Schema) -> str:
    rows = [list(row) for choice in definition["anyOf"] if "properties" in choice for row in _choice(choice)]
    return "\n".join([f"### {title}", "", *_rows(["", "key", "value", "meaning"], rows)])


def _choice(choice: Schema) -> Iterator[tuple[str, str, str, str]]:
    (tag, which), *keys = choice["properties"].items()
    yield f'`{tag} = "{which["const"]}"`', "", "", choice["description"]
    for key, value in keys:
        yield "", f"`{key}`", _words(value), value["description"]
    for value in choice.get("patternProperties", {}).values():
        yield "", "`p50`, `p99`, …", _words(value), value["description"]


def _rows(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _words(value: Schema) -> str:
    """What a key may be, in a few words."""
    if "enum" in value or "const" in value:
        return ", ".join(f"`{choice}`" for choice in value.get("enum", [value.get("const")])) + _default_choice(value)
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return {"Lengths": "tokens: a number or a distribution", "Durations": "a duration or a distribution"}.get(
            name, "a table"
        )
    if any("$ref" in choice or "oneOf" in choice for choice in value.get("anyOf", ())):
        return "a table, also as text" if {"type": "string"} in value["anyOf"] else "a table"
    types = value.get("type", "")
    kinds = [_KINDS.get(kind, str(kind)) for kind in (types if isinstance(types, list) else [types])]
    kind = value.get("$comment") or (" or ".join(kinds) if kinds[0] == "list" else kinds[0])
    items = f" of: {_words(value['items'])}" if "items" in value else ""
    return f"{kind}{items}{_bounds(value)}{_default(value)}"


_KINDS = {"integer": "whole number", "string": "text", "boolean": "true or false", "object": "table", "array": "list"}


def _bounds(value: Schema) -> str:
    marks = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    stricter = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
    known = [(name, mark) for name, mark in marks if name in value and stricter.get(name) not in value]
    said = [f"{mark} {value[name]:g}" for name, mark in known if value[name] != MAX_TOKENS]
    return f" {', '.join(said)}" if said else ""


def _default_choice(value: Schema) -> str:
    has_choice = len(value.get("enum", ())) > 1 and "default" in value
    return f", default `{value['default']}`" if has_choice else ""


def _default(value: Schema) -> str:
    default = value.get("default")
    if default in (None, "", []):
        return ""
    return f", default {str(default).lower() if isinstance(default, bool) else f'{default:g}'}"
