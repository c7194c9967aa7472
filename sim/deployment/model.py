"""Models by name: bundled ones, and any whose ``config.json`` is at hand."""

from __future__ import annotations

import difflib
import errno
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from windtunnel.sim.deployment.hf_config import model_from_config
from windtunnel.sim.deployment.model_spec import ModelSpec, UnsupportedModel, WeightFormat, kv_element_bytes

__all__ = [
    "ModelFileMissing",
    "ModelFileUnreadable",
    "ModelSpec",
    "UnsupportedModel",
    "WeightFormat",
    "bundled_models",
    "is_bundled",
    "is_path",
    "kv_element_bytes",
    "load_model",
    "model_from_config",
    "other_names",
    "read_model_config",
    "short_name",
]

_DATA = Path(__file__).with_name("models.json")


class ModelFileMissing(FileNotFoundError, ValueError):
    """A model was given as a path, and no config.json is there."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(errno.ENOENT, what, path)

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class ModelFileUnreadable(ValueError):
    """A file that should describe a model is not JSON, or not one object of it."""


def load_model(name_or_path: str) -> ModelSpec:
    """The bundled model of that name, or the model that a ``config.json`` describes.

    A name is a Hugging Face id or its short form ("llama-3.1-8b"), in any case; a path names the file or the folder
    that holds it, and the model is then called by its ``short_name``.  Raises OSError if a file that is there cannot
    be read, ModelFileMissing (an OSError and a ValueError) if nothing is at what can only be a path, and
    ModelFileUnreadable (a ValueError) for what is no JSON object.

    Raises ValueError, naming the nearest bundled models, for a name that is neither; UnsupportedModel for a config
    whose architecture is not modelled.
    """
    entry = _bundled().get(name_or_path.casefold())
    if entry is not None:
        return model_from_config(entry["config"], entry["id"])
    path = _config_path(name_or_path)
    model = model_from_config(_with_modelopt(_read_config(path), path), name_or_path)
    return replace(model, name=short_name(name_or_path))


def read_model_config(name_or_path: str) -> tuple[dict[str, Any], Path | None]:
    """The ``config.json`` that ``load_model`` would read, and the folder it lies in; None for a bundled one.

    Raises as ``load_model`` does, but for UnsupportedModel.
    """
    entry = _bundled().get(name_or_path.casefold())
    if entry is not None:
        return dict(entry["config"]), None
    path = _config_path(name_or_path)
    return _read_config(path), path.parent


def is_bundled(name: str) -> bool:
    """Whether ``load_model`` takes text as the name of a bundled model, even where a file or folder is called so."""
    return name.casefold() in _bundled()


def is_path(name_or_path: str) -> bool:
    """Whether it can only be a path, be there something or not: no name of a repository is written like that."""
    if name_or_path.casefold() in _bundled():
        return False
    return name_or_path.startswith(("/", ".", "~")) or name_or_path.endswith(".json") or name_or_path.count("/") > 1


def short_name(name_or_path: str) -> str:
    """What a model is called by: its name, or of a path the folder of the ``config.json``, or another file's own name
    without its ending (files side by side are different models)."""
    if name_or_path.casefold() in _bundled():
        return name_or_path
    path = Path(name_or_path).expanduser()
    if path.name == "config.json":
        path = path.parent
    elif path.suffix == ".json":
        return path.stem
    elif not is_path(name_or_path) and not path.is_dir():
        return name_or_path
    return path.resolve().name or str(path)


def _config_path(name_or_path: str) -> Path:
    """The file that describes a model that is not bundled; raises ValueError as ``load_model`` does."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path / "config.json"
        raise ModelFileMissing(name_or_path, "there is no config.json in this folder")
    if path.is_file():
        return path
    if is_path(name_or_path):
        raise ModelFileMissing(
            name_or_path,
            "no such file or folder; give a config.json, the folder of one, or a name (windtunnel models lists them)",
        )
    raise ValueError(_unknown_model(name_or_path))


def bundled_models() -> list[str]:
    """Hugging Face ids of the models whose numbers come with the package."""
    return [entry["id"] for entry in _entries()]


def other_names(model_id: str) -> list[str]:
    """What else a bundled model answers to: short names first, then repositories whose config has the same numbers."""
    entry = _bundled()[model_id.casefold()]
    return [*entry["aliases"], *(other for other in entry["ids"] if other != model_id)]


@cache
def _entries() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(_DATA.read_text(encoding="utf-8"))["models"]
    return entries


@cache
def _bundled() -> dict[str, dict[str, Any]]:
    """Entries by every name they answer to, in lower case: ids, ids without their owner, aliases."""
    names: dict[str, dict[str, Any]] = {}
    for entry in _entries():
        ids = [full.casefold() for full in entry["ids"]]
        for name in (*ids, *(full.rpartition("/")[2] for full in ids), *entry["aliases"]):
            names[name] = entry
    return names


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelFileUnreadable(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from None
    except UnicodeDecodeError as error:
        raise ModelFileUnreadable(f"{path}: not UTF-8 text (byte {error.object[error.start]:#04x})") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileUnreadable(f"{path}: not usable JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelFileUnreadable(f"{path}: a config.json holds one JSON object, this holds {type(config).__name__}")
    return config


def _with_modelopt(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config with the quantisation that older ModelOpt exports write to a file beside it."""
    beside = path.with_name("hf_quant_config.json")
    if "quantization_config" in config or not beside.is_file():
        return config
    quantization = _read_config(beside).get("quantization")
    if not isinstance(quantization, dict):
        raise ValueError(f"{beside}: lacks the object 'quantization'")
    return {**config, "quantization_config": {"quant_method": "modelopt", **quantization}}


def _unknown_model(name: str) -> str:
    close = difflib.get_close_matches(name.casefold(), _bundled(), n=8, cutoff=0.5)
    near = list(dict.fromkeys(_bundled()[match]["id"] for match in close))[:3]
    hint = f"nearest: {', '.join(near)}" if near else "no bundled name is near"
    return (
        f"unknown model {name!r}: it is neither bundled nor a path to a config.json or the folder of one ({hint}; "
        "windtunnel models lists all)"
    )
