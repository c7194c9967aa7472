"""JSON Schema of the specifications of a workload, from the parameters that also check them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

from windtunnel.scenarios.workloads.arrivals import ARRIVAL_KINDS
from windtunnel.scenarios.workloads.durations import DURATION_KINDS
from windtunnel.scenarios.workloads.lengths import LENGTH_KINDS
from windtunnel.scenarios.workloads.specs import REQUIRED, Parameter, Range, parameters_of
from windtunnel.scenarios.workloads.synthetic import Prefixes, Sessions
from windtunnel.scenarios.workloads.tenants import TenantLoad

Schema = dict[str, Any]

DEFINITIONS = {"lengths": "Lengths", "durations": "Durations", "arrivals": "Arrivals"}
"""Name of the definition of each kind of nested distribution."""


def definitions() -> dict[str, Schema]:
    """Schemas of Lengths, Durations, Arrivals, Prefixes, Sessions and tenants, which name each other."""
    return {
        "Lengths": {
            "description": "Numbers of tokens: one number for all, or a distribution.",
            "anyOf": [
                {"type": ["integer", "string"], "minimum": 1},
                *_kinds(LENGTH_KINDS, "dist"),
            ],
        },
        "Durations": {
            "description": "Pauses: a duration for all, or a distribution.",
            "anyOf": [
                {"type": ["number", "string"], "minimum": 0, "$comment": "duration"},
                *_kinds(DURATION_KINDS, "dist"),
            ],
        },
        "Arrivals": {
            "description": "An arrival process.",
            "anyOf": [{"type": "string"}, *_kinds(ARRIVAL_KINDS, "process")],
        },
        "Prefixes": _table(Prefixes, {}),
        "Sessions": _table(Sessions, {}),
        "TenantLoad": _table(TenantLoad, {}),
    }


def _kinds(kinds: Mapping[str, Callable[..., Any]], tag: str) -> list[Schema]:
    return [_table(make, {tag: {"const": name}}) for name, make in kinds.items()]


def _table(make: Callable[..., Any], tag: dict[str, Schema]) -> Schema:
    parameters = parameters_of(make)
    single = [parameter for parameter in parameters if parameter.keys is None]
    required = [*tag, *(parameter.key for parameter in single if parameter.default is REQUIRED)]
    many = {f"^{p.keys.pattern}$": _value(p) for p in parameters if p.keys is not None}
    return {
        "type": "object",
        "description": (inspect.getdoc(make) or "").partition("\n\n")[0],
        "properties": {**tag, **{parameter.key: _value(parameter) for parameter in single}},
        **({"patternProperties": many} if many else {}),
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _value(parameter: Parameter) -> Schema:
    has_default = parameter.default is not None and parameter.default is not REQUIRED
    default = {"default": parameter.default} if has_default else {}
    return {**_type(parameter), "description": parameter.doc, **default}


def _type(parameter: Parameter) -> Schema:
    if parameter.nested is not None:
        return {"$ref": f"#/$defs/{DEFINITIONS[parameter.nested.of]}"}
    if parameter.range is not None:
        return _number(parameter.range)
    if parameter.type is bool:
        return {"type": "boolean"}
    if get_origin(parameter.type) is Literal:
        return {"enum": list(get_args(parameter.type))}
    if get_origin(parameter.type) is tuple:
        return {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1}
    return {"type": ["array", "object"]}


def _number(allowed: Range) -> Schema:
    bounds = {
        "minimum": allowed.least,
        "exclusiveMinimum": allowed.above,
        "maximum": allowed.most,
        "exclusiveMaximum": allowed.below,
    }
    return {
        "type": ["integer" if allowed.whole else "number", "string"],
        **{name: bound for name, bound in bounds.items() if bound is not None},
        **({"$comment": "duration"} if allowed.seconds else {}),
    }
