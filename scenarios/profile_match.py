"""Whether a profile was made for what a scenario has: every fact that its provenance states, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from windtunnel.scenarios.engine import Hardware
from windtunnel.scenarios.schema import Speculative
from windtunnel.sim.deployment.gpu import load_gpu
from windtunnel.sim.deployment.model import ModelSpec, is_bundled, load_model
from windtunnel.sim.engine.config import SchedulerConfig

NO_PART_OF_THE_SHAPES = ("name", "dtype", "max_model_len", "max_position_embeddings")
"""Fields of ModelSpec that change no step of given lengths, or are compared by themselves."""
_OF_THE_WEIGHTS = ("weight_format", "format_rules", "head_format")
_DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_KV_DTYPES = {"fp8_e4m3": "fp8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8_e5m2"}
_BITS = {"fp8": 8, "fbgemm_fp8": 8, "modelopt": 8, "awq": 4, "awq_marlin": 4, "modelopt_fp4": 4, "mxfp4": 4}
"""Bits of a weight, of those methods of vLLM's ``--quantization`` that have one width only."""
_NONE = ("", "none", "null")
_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")


@dataclass(frozen=True, slots=True)
class Here:
    """What the scenario has."""

    hardware: Hardware
    config: SchedulerConfig
    kv_cache_dtype: str
    speculative: Speculative | None


class Provenance:
    """What a profile states of its origin; where a value is of the wrong kind, asking for it raises ValueError."""

    def __init__(self, stated: Mapping[str, Any], name: str) -> None:
        self._stated = stated
        self._name = name

    def text(self, key: str) -> str:
        """Empty if it is not stated."""
        value = self._stated.get(key)
        if value is not None and not isinstance(value, str):
            raise self._malformed(key, value, "text")
        return (value or "").strip()

    def whole(self, key: str) -> int | None:
        """A whole number of at least 0, be it written as text or with a point; None if it is not stated."""
        value = self._stated.get(key)
        if value is None:
            return None
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._malformed(key, value, "a whole number of at least 0")
        return value

    def flag(self, key: str) -> bool | None:
        """True or false, be it written as text; None if it is not stated."""
        value = self._stated.get(key)
        if isinstance(value, str):
            value = {"true": True, "false": False}.get(value.strip().casefold(), value)
        if value is not None and not isinstance(value, bool):
            raise self._malformed(key, value, "true or false")
        return value

    def tensor_parallel_size(self) -> int | None:
        """Under either of its names; None if it is not stated.  Raises ValueError if they contradict each other."""
        full, short = self.whole("tensor_parallel_size"), self.whole("tp")
        if full is not None and short is not None and full != short:
            raise ValueError(
                f"the profile {self._name} states both tensor_parallel_size {full} and tp {short}: fit it again with "
                "the right one (--provenance tensor_parallel_size=N)"
            )
        return short if full is None else full

    def _malformed(self, key: str, value: object, allowed: str) -> ValueError:
        return ValueError(
            f"the profile {self._name} states {key} = {value!r} of its origin, which must be {allowed}: fit it again "
            f"with the right one (--provenance {key}=...)"
        )


def differing(stated: Provenance, here: Here) -> Iterator[str]:
    """Facts that make steps take another time than the scenario's, each beside what the scenario has.

    Raises ValueError, naming the key, for a fact of the wrong kind.
    """
    yield from _of_model(stated, here.hardware.model)
    yield from _of_device(stated, here.hardware)
    yield from _of_types(stated, here)
    yield from _of_parallelism(stated, here)
    yield from _of_speculation(stated, here.speculative)
    if stated.flag("enforce_eager") or stated.text("cudagraph_mode").casefold() == "none":
        yield "no CUDA graphs (enforce_eager), the scenario has them"
    is_async = stated.flag("async_scheduling")
    if is_async is not None and is_async != here.config.async_scheduling:
        yield f"async_scheduling {_word(is_async)}, the scenario has {_word(here.config.async_scheduling)}"


def remarks(stated: Provenance, here: Here) -> Iterator[str]:
    """Facts that differ and hardly change what a step takes: the engine's release, and limits that are passed.

    Raises ValueError, naming the key, for a fact of the wrong kind.
    """
    yield from _of_engine(stated, here.hardware)
    for key in _LIMITS:
        most, own = stated.whole(key), getattr(here.config, key)
        if most is not None and own > most:
            yield f"{key} {most:,}, the scenario has {own:,}"
    block_size = stated.whole("block_size")
    if block_size is not None and block_size != here.config.block_size:
        yield f"block_size {block_size}, the scenario has {here.config.block_size}"


def differing_shapes(name: str, model: ModelSpec) -> dict[str, tuple[Any, Any]] | None:
    """Fields in which the bundled model of that name and this one differ, with both values; None if none is so called.

    Equal fields are equal steps, whatever a config.json is called.
    """
    if not is_bundled(name):
        return None
    known = load_model(name)
    pairs = {each.name: (getattr(known, each.name), getattr(model, each.name)) for each in fields(ModelSpec)}
    return {key: pair for key, pair in pairs.items() if key not in NO_PART_OF_THE_SHAPES and pair[0] != pair[1]}


def plain_kv_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """One name for each type: auto where it is the model's own, fp8 for vLLM's default form of it."""
    name = kv_cache_dtype.removeprefix("torch.")
    name = _DTYPES.get(name, name)
    return "auto" if name == dtype else _KV_DTYPES.get(name, name)


def _of_model(stated: Provenance, model: ModelSpec | None) -> Iterator[str]:
    named, quantization = stated.text("model"), stated.text("quantization")
    if model is None:
        return
    if named:
        yield from _of_named_model(named, model, weights_too=not quantization)
    if quantization and not _is_stored_so(quantization, model):
        yield f"quantization {quantization}, the scenario has {_stored(model)}"


def _of_named_model(named: str, model: ModelSpec, *, weights_too: bool) -> Iterator[str]:
    known = next((each for each in (named, _last(named)) if is_bundled(each)), None)
    found = None if known is None else differing_shapes(known, model)
    names = [named] if known is None else [named, load_model(known).name]
    is_namesake = _last(model.name) in map(_last, names)
    if found is None:
        if not is_namesake:
            yield f"model {named}, the scenario has {model.name}"
        return
    told = {key: pair for key, pair in found.items() if weights_too or key not in _OF_THE_WEIGHTS}
    if told and not is_namesake:
        yield f"model {named}, the scenario has {model.name}"
    elif told:
        parts = ", ".join(f"{key} {_word(there)} (the scenario's: {_word(own)})" for key, (there, own) in told.items())
        yield f"model {named} with {parts}"


def _last(name: str) -> str:
    return name.rpartition("/")[2].casefold()


def _is_stored_so(quantization: str, model: ModelSpec) -> bool:
    if quantization.casefold() in _NONE:
        return model.weight_format is None
    if model.weight_format is None:
        return False
    bits = _BITS.get(quantization.casefold())
    return bits is None or bits == model.weight_format.bits


def _stored(model: ModelSpec) -> str:
    return "none" if model.weight_format is None else f"{model.weight_format.name}, {model.weight_format.bits} bits"


def _of_device(stated: Provenance, hardware: Hardware) -> Iterator[str]:
    gpu, device = stated.text("gpu"), stated.text("device")
    if hardware.gpu is None:
        return
    if gpu:
        if not _names_gpu(gpu, hardware.gpu.name):
            yield f"gpu {gpu}, the scenario has {hardware.gpu.name}"
    elif device and not _names_gpu(device, hardware.gpu.name):
        yield f"device {device}, the scenario has {hardware.gpu.name}"


def _names_gpu(text: str, name: str) -> bool:
    try:
        return load_gpu(text).name == name
    except ValueError:
        return False


def _of_types(stated: Provenance, here: Here) -> Iterator[str]:
    dtype, of_cache, model = stated.text("dtype"), stated.text("kv_cache_dtype"), here.hardware.model
    if model is None:
        return
    plain = dtype.removeprefix("torch.")
    if plain not in ("", "auto") and _DTYPES.get(plain, plain) != model.dtype:
        yield f"dtype {dtype}, the scenario has {model.dtype}"
    if of_cache:
        there, own = (plain_kv_dtype(each, model.dtype) for each in (of_cache, here.kv_cache_dtype))
        if there != own:
            yield f"kv_cache_dtype {there}, the scenario has {own}"


def _of_parallelism(stated: Provenance, here: Here) -> Iterator[str]:
    num_stages, own = stated.whole("pipeline_parallel_size"), here.hardware.pipeline_parallel_size
    if num_stages is not None and num_stages != own:
        yield f"pipeline_parallel_size {num_stages}, the scenario has {own}"
    if stated.flag("enable_expert_parallel"):
        yield "enable_expert_parallel true, the scenario's experts are split like other matrices"


def _of_speculation(stated: Provenance, speculative: Speculative | None) -> Iterator[str]:
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
    own = (speculative.method if speculative is not None and num_drafts else None) or "none"
    method, num_stated = stated.text("speculative_method"), stated.whole("num_speculative_tokens")
    if method:
        there = "none" if method.casefold() in _NONE else method
        if there != own:
            yield f"speculative_method {there}, the scenario has {own}"
    if num_stated is not None and num_stated != num_drafts:
        yield f"num_speculative_tokens {num_stated}, the scenario has {num_drafts}"


def _of_engine(stated: Provenance, hardware: Hardware) -> Iterator[str]:
    engine = stated.text("engine")
    release = stated.text("vllm") or engine.casefold().removeprefix("vllm").strip()
    if engine and not engine.casefold().startswith("vllm"):
        yield f"engine {engine}, the scenario has {hardware.version.label}"
    elif release[:1].isdigit() and release.split(".")[:2] != hardware.version.release.split(".")[:2]:
        yield f"vLLM {release}, the scenario has {hardware.version.label}"


def _word(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(getattr(value, "name", "none" if value is None else value))
