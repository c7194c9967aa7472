"""``profile.json``: a cost model as a file that people can read and another run can load."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from windtunnel.sim.cost.constant import AffineCost, ConstantCost
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
    """Write ``cost`` to ``path`` as JSON: schema_version, kind, calibrated, parameters and provenance.

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
    Path(path).write_text(json.dumps(profile, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_profile(path: str | Path) -> CostModel:
    """The cost model that ``save_profile`` wrote to ``path``; it prices every shape as the saved one did.

    Raises ProfileError for a file that is no valid profile (unknown version, kind or key, missing key, wrong type,
    value out of range), OSError if it cannot be read.
    """
    path = Path(path)
    profile = _read(path)
    _check_keys(path, "the profile", profile, required=_TOP_LEVEL)
    if profile["schema_version"] != SCHEMA_VERSION:
        raise ProfileError(
            f"{path}: schema_version {profile['schema_version']!r} is not known, this version reads {SCHEMA_VERSION}: "
            "write the profile again"
        )
    kind = profile["kind"]
    if not isinstance(kind, str) or kind not in _LOADERS:
        raise ProfileError(f"{path}: kind must be one of {', '.join(_LOADERS)}, got {kind!r}")
    parameters = profile["parameters"]
    if not isinstance(parameters, dict):
        raise ProfileError(f"{path}: parameters must be an object, got {type(parameters).__name__}")
    cost = _LOADERS[kind](path, parameters)
    if profile["calibrated"] is not cost.calibrated:
        raise ProfileError(f"{path}: calibrated must be {str(cost.calibrated).lower()} for kind {kind}")
    return cost


_TOP_LEVEL = ("schema_version", "kind", "calibrated", "parameters", "provenance")
_ROOFLINE_KEYS = ("model", "gpu", "tensor_parallel_size", "kv_cache_dtype", "factors")
_AFFINE_KEYS = ("base_s", "token_s", "seq_s", "decode_context_s", "prefill_pair_s")


def _parameters(cost: CostModel) -> Json:
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
    raise TypeError(f"{type(cost).__name__} has no profile format; those with one: {', '.join(_LOADERS)}")


def _stated_provenance(cost: CostModel) -> Json:
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
    return _object(path, "the profile", profile)
