"""``profile.json``: a cost model as a file that people can read and another run can load.

Every profile holds schema_version, kind, calibrated, parameters and provenance.  A fitted one also holds its domain,
noise, errors, memory corrections and a checksum over all of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.cost.features import Curve
from windtunnel.sim.cost.fitted import (
    Domain,
    ErrorLine,
    Evidence,
    FittedCost,
    FittedParameters,
    NoiseBin,
    domain_as_plain,
)
from windtunnel.sim.cost.roofline import RooflineCost, RooflineFactors
from windtunnel.sim.deployment.gpu import GpuSpec
from windtunnel.sim.deployment.model_spec import ModelSpec, WeightFormat
from windtunnel.sim.engine.protocols import CostModel

SCHEMA_VERSION = 1

Json = dict[str, Any]
Spec = TypeVar("Spec", ModelSpec, GpuSpec, RooflineFactors, WeightFormat)


class ProfileError(ValueError):
    """The file is not a profile this version can load; the message names the file, the key and the remedy."""


def save_profile(cost: CostModel, path: str | Path, *, provenance: Mapping[str, Any] | None = None) -> None:
    """Write ``cost`` to ``path`` as JSON, in the form that the module describes.

    ``provenance`` is plain data that says where the parameters come from; by default it is what the model itself
    states.  The same model gives the same bytes.

    Raises TypeError for a cost model of a kind that has no file format, OSError if the file cannot be written.
    """
    profile = {
        "schema_version": SCHEMA_VERSION,
        "kind": cost.name,
        "calibrated": cost.calibrated,
        "parameters": _parameters(cost),
        "provenance": dict(provenance) if provenance is not None else _stated_provenance(cost),
    }
    if isinstance(cost, FittedCost):
        profile |= _evidence_as_plain(cost.evidence)
        profile["checksum"] = _checksum(profile)
    Path(path).write_text(_json(profile), encoding="utf-8")


def load_profile(path: str | Path) -> CostModel:
    """The cost model that ``save_profile`` wrote to ``path``; it prices every shape as the saved one did.

    Raises ProfileError for a file that is no valid profile (unknown version, kind or key, missing key, wrong type,
    value out of range), OSError if it cannot be read.
    """
    path = Path(path)
    profile = _read(path)
    _check_version(path, profile)
    is_fitted = profile.get("kind") == FittedCost.name
    _check_keys(path, "the profile", profile, required=(*_TOP_LEVEL, *(_FITTED_LEVEL if is_fitted else ())))
    kind = profile["kind"]
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ProfileError(f"{path}: kind must be one of {', '.join(_KINDS)}, got {kind!r}")
    parameters = profile["parameters"]
    if not isinstance(parameters, dict):
        raise ProfileError(f"{path}: parameters must be an object, got {type(parameters).__name__}")
    cost = _load_fitted(path, profile) if is_fitted else _LOADERS[kind](path, parameters)
    if profile["calibrated"] is not cost.calibrated:
        raise ProfileError(f"{path}: calibrated must be {str(cost.calibrated).lower()} for kind {kind}")
    return cost


_TOP_LEVEL = ("schema_version", "kind", "calibrated", "parameters", "provenance")
_FITTED_LEVEL = ("domain", "noise", "errors", "memory", "checksum")
_ROOFLINE_KEYS = ("model", "gpu", "tensor_parallel_size", "kv_cache_dtype", "factors")
_AFFINE_KEYS = ("base_s", "token_s", "seq_s", "decode_context_s", "prefill_pair_s")


def _parameters(cost: CostModel) -> Json:
    if isinstance(cost, FittedCost):
        return cost.parameters.as_plain()
    if isinstance(cost, RooflineCost):
        return {
            "model": asdict(cost.model),
            "gpu": asdict(cost.gpu),
            "tensor_parallel_size": cost.tensor_parallel_size,
            "kv_cache_dtype": cost.kv_cache_dtype,
            "factors": asdict(cost.factors),
        }
    if isinstance(cost, AffineCost):
        return {key: getattr(cost, key) for key in _AFFINE_KEYS}
    if isinstance(cost, ConstantCost):
        return {"step_s": cost.step_s}
    raise TypeError(f"{type(cost).__name__} has no profile format; those with one: {', '.join(_KINDS)}")


def _stated_provenance(cost: CostModel) -> Json:
    if isinstance(cost, FittedCost):
        return dict(cost.evidence.provenance)
    stated = cost.describe()
    return {key: stated[key] for key in ("error", "gpu_source", "factor_sources") if key in stated}


def _load_roofline(path: Path, parameters: Json) -> CostModel:
    _check_keys(path, "parameters", parameters, required=_ROOFLINE_KEYS)
    model = dict(_object(path, "parameters.model", parameters["model"]))
    if model.get("weight_format") is not None:
        model["weight_format"] = _spec(path, "parameters.model.weight_format", WeightFormat, model["weight_format"])
    gpu = dict(_object(path, "parameters.gpu", parameters["gpu"]))
    if isinstance(gpu.get("aliases"), list):
        gpu["aliases"] = tuple(gpu["aliases"])
    return _made(
        path,
        lambda: RooflineCost(
            _spec(path, "parameters.model", ModelSpec, model),
            _spec(path, "parameters.gpu", GpuSpec, gpu),
            parameters["tensor_parallel_size"],
            kv_cache_dtype=parameters["kv_cache_dtype"],
            factors=_spec(path, "parameters.factors", RooflineFactors, parameters["factors"]),
        ),
    )


def _load_affine(path: Path, parameters: Json) -> CostModel:
    _check_keys(path, "parameters", parameters, required=_AFFINE_KEYS)
    return _made(path, lambda: AffineCost(**parameters))


def _load_constant(path: Path, parameters: Json) -> CostModel:
    _check_keys(path, "parameters", parameters, required=("step_s",))
    return _made(path, lambda: ConstantCost(**parameters))


_LOADERS: dict[str, Callable[[Path, Json], CostModel]] = {
    RooflineCost.name: _load_roofline,
    AffineCost.name: _load_affine,
    ConstantCost.name: _load_constant,
}
_KINDS = (*_LOADERS, FittedCost.name)


def _load_fitted(path: Path, profile: Json) -> CostModel:
    _check_checksum(path, profile)
    return _made(
        path,
        lambda: FittedCost(
            _fitted_parameters(path, profile["parameters"]),
            Evidence(
                domain=_domain(path, profile["domain"]),
                noise=tuple(_row(path, "noise", NoiseBin, row) for row in _list(path, "noise", profile["noise"])),
                errors=tuple(_row(path, "errors", ErrorLine, row) for row in _list(path, "errors", profile["errors"])),
                memory=_object(path, "memory", profile["memory"]),
                provenance=_object(path, "provenance", profile["provenance"]),
            ),
        ),
    )


def _evidence_as_plain(evidence: Evidence) -> Json:
    return {
        "domain": domain_as_plain(evidence.domain),
        "noise": [row._asdict() for row in evidence.noise],
        "errors": [row._asdict() for row in evidence.errors],
        "memory": dict(evidence.memory),
    }


_LATER = ("mixed_context_s",)
"""Parameters that profiles of before lack; 0 is what they meant."""


def _fitted_parameters(path: Path, given: Json) -> FittedParameters:
    plain = dict(given)
    names = tuple(field.name for field in fields(FittedParameters) if field.name not in _LATER)
    _check_keys(path, "parameters", plain, required=names, optional=_LATER)
    for name in ("tokens", "decode_seqs", "decode_context"):
        where = f"parameters.{name}"
        curve = _object(path, where, plain[name])
        _check_keys(path, where, curve, required=("knots", "seconds"))
        plain[name] = Curve(_list(path, f"{where}.knots", curve["knots"]), _list(path, where, curve["seconds"]))
    plain["graph_sizes"] = tuple(_list(path, "parameters.graph_sizes", plain["graph_sizes"]))
    return FittedParameters(**plain)


def _domain(path: Path, given: object) -> Domain:
    boxes: dict[str, dict[str, tuple[int, int]]] = {}
    for regime, box in _object(path, "domain", given).items():
        boxes[regime] = {}
        for name, span in _object(path, f"domain.{regime}", box).items():
            match span:
                case [int(low), int(high)]:
                    boxes[regime][name] = (low, high)
                case _:
                    raise ProfileError(f"{path}: domain.{regime}.{name} must be two whole numbers, got {span!r}")
    return Domain(boxes)


_Row = TypeVar("_Row", NoiseBin, ErrorLine)


def _row(path: Path, where: str, kind: type[_Row], given: object) -> _Row:
    row = _object(path, where, given)
    _check_keys(path, where, row, required=kind._fields)
    for name, value in row.items():
        wanted: type | Any = str if name == "regime" else int if name.startswith(("num_", "up_")) else int | float
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ProfileError(
                f"{path}: {where}.{name} must be {'text' if wanted is str else 'a number'}, got {value!r}"
            )
    return kind(**row)


def _list(path: Path, where: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ProfileError(f"{path}: {where} must be a list, got {type(value).__name__}")
    return value


def _json(profile: Json) -> str:
    """Indented, but with each list of numbers in a line of its own (there are no raw line breaks in JSON's strings)."""
    text = json.dumps(profile, indent=2, ensure_ascii=False, allow_nan=False)
    return re.sub(r'\[\n([^\[\]{}"]*)\n\s*\]', lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def _checksum(profile: Json) -> str:
    """SHA-256 of the profile without its checksum, independent of layout and the order of keys."""
    rest = {key: value for key, value in profile.items() if key != "checksum"}
    plain = json.dumps(rest, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(plain.encode("ascii")).hexdigest()


def _check_checksum(path: Path, profile: Json) -> None:
    if profile["checksum"] != _checksum(profile):
        raise ProfileError(
            f"{path}: checksum {profile['checksum']!r} does not fit the content, which was changed or damaged after it "
            "was written: fit again, or take the file from where it came"
        )


def _check_version(path: Path, profile: Json) -> None:
    if "schema_version" not in profile:
        raise ProfileError(f"{path}: the profile lacks schema_version; is it a profile that windtunnel wrote?")
    version = profile["schema_version"]
    if type(version) is not int or version != SCHEMA_VERSION:
        remedy = "write the profile again"
        if type(version) is int and version > SCHEMA_VERSION:
            remedy += ", or use the newer windtunnel that wrote it"
        raise ProfileError(
            f"{path}: schema_version {version!r} is not known, this version reads {SCHEMA_VERSION}: {remedy}"
        )


def _made(path: Path, make: Callable[[], CostModel]) -> CostModel:
    try:
        return make()
    except ProfileError:
        raise
    except (TypeError, ValueError) as error:
        raise ProfileError(f"{path}: {error}") from error


def _spec(path: Path, where: str, kind: type[Spec], values: object) -> Spec:
    given = _object(path, where, values)
    known = fields(kind)
    required = tuple(field.name for field in known if field.default is MISSING)
    _check_keys(path, where, given, required=required, optional=tuple(field.name for field in known))
    return kind(**given)


def _object(path: Path, where: str, value: object) -> Json:
    if not isinstance(value, dict):
        raise ProfileError(f"{path}: {where} must be an object, got {type(value).__name__}")
    return value


def _check_keys(
    path: Path, where: str, given: Json, *, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    missing = [key for key in required if key not in given]
    if missing:
        raise ProfileError(f"{path}: {where} lacks {', '.join(missing)}")
    unknown = [key for key in given if key not in required and key not in optional]
    if unknown:
        allowed = ", ".join(dict.fromkeys((*required, *optional)))
        raise ProfileError(f"{path}: {where} has unknown {', '.join(unknown)}; known: {allowed}")


def _read(path: Path) -> Json:
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ProfileError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from None
    except RecursionError:
        raise ProfileError(f"{path}: not a profile, it is nested too deeply") from None
    return _object(path, "the profile", profile)
