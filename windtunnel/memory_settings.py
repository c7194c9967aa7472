"""Settings of a memory plan as people write them, and the request they make."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from windtunnel.memory_inputs import USE_V1_IS_0, MemoryInputUnreadable
from windtunnel.scenarios.units import parse_count, parse_gib, parse_size_bytes
from windtunnel.sim.deployment.card_checks import card_notes, check_card, on_card
from windtunnel.sim.deployment.engine_args import ENGINE, check_gpu_memory_utilization
from windtunnel.sim.deployment.gpu import GIB, GpuSpec, bundled_gpus, load_gpu
from windtunnel.sim.deployment.kv_dtypes import check_kv_dtype, check_kv_dtype_name
from windtunnel.sim.deployment.memory_request import FIT, MemoryRequest
from windtunnel.sim.deployment.model import ModelFileUnreadable, ModelSpec, UnsupportedModel, bundled_models, load_model
from windtunnel.sim.deployment.model_spec import DTYPE_BYTES
from windtunnel.sim.deployment.refusal import RefusedByVllm
from windtunnel.sim.deployment.versions import VersionProfile, profile

T = TypeVar("T")

MOST_VALUES = 500
"""Of one setting in a sweep."""

_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def request_of(settings: Mapping[str, Any]) -> tuple[MemoryRequest, tuple[str, ...]]:
    """The request, and what had to be taken for what."""
    notes: list[str] = []
    dtype = _dtype(settings.get("dtype") or "auto")
    model = _model(settings.get("model"), dtype)
    gpu = _gpu(settings.get("gpu"), settings.get("gpu_memory_gib"), notes)
    version = _engine(settings.get("engine"))
    if dtype == "auto":
        model, told = on_card(model, gpu, version)
        notes += told
    values: dict[str, Any] = {"dtype": dtype}
    for name, value in settings.items():
        if name in _READERS:
            values[_FIELD_OF.get(name, name)] = read_setting(name, value)
    if values.pop("enable_lora", None):
        values.setdefault("max_loras", 1)
    elif values.pop("max_loras", None) is not None or "max_lora_rank" in values:
        raise ValueError("--max-loras and --max-lora-rank have no effect without --enable-lora: give it, too")
    free = values.pop("free_memory_gib", None)
    if free is not None:
        values["free_memory_bytes"] = round(free * GIB)
    if settings.get(USE_V1_IS_0) and "uses_v0_engine" not in values:
        values["uses_v0_engine"] = version.v0 is not None
        notes.append(_about_v0(version))
    request = MemoryRequest(model, gpu, version, **values)
    return request, (*notes, *card_notes(request))


def _about_v0(version: VersionProfile) -> str:
    if version.v0 is not None:
        return f"VLLM_USE_V1=0: the V0 engine of {version.label} is planned."
    if version.release == "0.11.0":
        raise RefusedByVllm(
            "Using V1 AsyncLLMEngine, but envs.VLLM_USE_V1=False.  vLLM 0.11.0 has V1 only: leave VLLM_USE_V1=0 out"
        )
    return f"VLLM_USE_V1=0 asks for the V0 engine, which went with vLLM 0.11: {version.label} has V1 only."


def check_refused(request: MemoryRequest) -> None:
    """Raise RefusedByVllm for what the card or the release refuses of a request that no real server has run, and
    UnsupportedModel for a type of the KV cache that is not planned."""
    check_kv_dtype(request.kv_cache_dtype, request.version)
    check_card(request)


def _model(given: str | ModelSpec | None, dtype: str) -> ModelSpec:
    if given is None:
        raise ValueError("no model: give --model NAME (windtunnel models lists them) or the path of a config.json")
    model = given if isinstance(given, ModelSpec) else _loaded(given)
    return model if dtype == "auto" else replace(model, dtype=dtype)


def _loaded(given: str) -> ModelSpec:
    """The model by name, or that of a config file or its folder, which is called as it was given.

    Raises MemoryInputUnreadable for a file that is missing or is not JSON, ValueError for what a config lacks.
    """
    try:
        model = load_model(given)
    except UnsupportedModel:
        raise
    except OSError as error:
        raise MemoryInputUnreadable(f"--model: {given}: {error.strerror or error}") from None
    except ValueError as error:
        kind = MemoryInputUnreadable if isinstance(error, ModelFileUnreadable) else ValueError
        raise kind(f"--model: {error}") from None
    return model if model.name in bundled_models() else replace(model, name=given)


def _dtype(given: str) -> str:
    wanted = _DTYPE_ALIASES.get(given, given)
    if wanted not in ("auto", *DTYPE_BYTES):
        known = ", ".join(("auto", *DTYPE_BYTES, *_DTYPE_ALIASES))
        raise ValueError(f"--dtype: {given!r} must be one of {known}")
    return wanted


def _gpu(given: str | GpuSpec | None, memory_gib: Any, notes: list[str]) -> GpuSpec:
    if given is None and memory_gib is None:
        raise ValueError("no GPU: give --gpu NAME (windtunnel gpus lists them) or --gpu-memory-gib")
    if memory_gib is None:
        return _named_gpu(given)
    total = round(_total_gib(memory_gib) * GIB)
    if given is not None:
        known = _named_gpu(given)
        return replace(known, memory_bytes=total, memory_source="given")
    near = min(map(load_gpu, bundled_gpus()), key=lambda gpu: abs(gpu.memory_bytes - total))
    notes.append(f"The GPU has no name; what is not its memory is taken as that of {near.name}.")
    name = f"GPU with {total / GIB:.2f} GiB"
    return replace(near, name=name, memory_bytes=total, memory_source="given", aliases=(), compute_capability=None)


def _named_gpu(given: str | GpuSpec | None) -> GpuSpec:
    return given if isinstance(given, GpuSpec) else _of_flag("gpu", load_gpu, str(given))


def _total_gib(value: Any) -> float:
    try:
        total = _gib(value)
        if total < 1:
            raise ValueError("must be at least 1 GiB, the total that the driver reports")
    except ValueError as error:
        raise ValueError(f"--gpu-memory-gib: {value!r} {error}") from None
    return total


def _engine(given: str | None) -> VersionProfile:
    return _of_flag("engine", profile, str(given or ENGINE))


def _of_flag(name: str, load: Callable[[str], T], value: str) -> T:
    """What ``load`` makes of a name; its complaint begins with the flag."""
    try:
        return load(value)
    except UnsupportedModel:
        raise
    except ValueError as error:
        raise ValueError(f"{_flag(name)}: {error}") from None


def serve_settings(request: MemoryRequest) -> dict[str, Any]:
    """Settings that are not vLLM's defaults, for a command line."""
    names = (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "enable_expert_parallel",
        "gpu_memory_utilization",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_dtype",
        "block_size",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "enforce_eager",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
    )
    written = {"model": served_model(request.model.name), **{name: getattr(request, name) for name in names}}
    written |= {
        "cpu_offload_gb": request.cpu_offload_gib,
        "kv_offloading_size": request.kv_offloading_gib,
        "swap_space": None if request.swap_space_gib is None else round(request.swap_space_gib * GIB),
        "dtype": request.dtype,
        "disable_hybrid_kv_cache_manager": request.disable_hybrid_kv_cache_manager or None,
    }
    if request.max_loras:
        written |= {"enable_lora": True, "max_loras": request.max_loras, "max_lora_rank": request.max_lora_rank}
    return written


def served_model(name: str) -> str:
    """What ``vllm serve`` is given: a name as it is, and for a config file the folder that it lies in."""
    path = Path(name).expanduser()
    if path.suffix == ".json":
        return str(path.parent)
    return str(path) if name.startswith("~") else name


def is_setting(name: str) -> bool:
    """Whether it is a setting of the request, beside model, GPU and release."""
    return name in _READERS


def several(name: str, value: Any) -> list[Any]:
    """The values of a setting: a sequence, a range "first:last:step", a list "a,b", or just one.

    Raises ValueError for a range that is none.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    if not isinstance(value, str) or name in _ONE_TEXT:
        return [value]
    values: list[Any] = []
    for part in value.split(","):
        values += _range(name, part.strip()) if part.count(":") == 2 else [_plain_number(name, part.strip())]
    if any(part == "" for part in values):
        raise ValueError(f"{_flag(name)}: {value!r} holds an empty value")
    if len(values) > MOST_VALUES:
        raise ValueError(f"{_flag(name)}: {value!r} are {len(values):,} values, more than {MOST_VALUES}")
    return list(dict.fromkeys(values))


_ONE_TEXT = ("model",)


def _plain_number(name: str, text: str) -> Any:
    """A number as such, so that it has a place on an axis; anything else stays text for its reader to judge."""
    try:
        if name in _COUNTS:
            return parse_count(text)
        return float(text) if name in _NUMBERS else text
    except ValueError:
        return text


MOST = 10**9
"""No number of a range is larger, and no step smaller than its inverse."""


def _range(name: str, text: str) -> list[Any]:
    """``0.80:0.98:0.02``, the last value included."""
    is_count = name in _COUNTS
    try:
        first, last, step = (Decimal(parse_count(part)) if is_count else Decimal(part) for part in text.split(":"))
        if not all(-MOST <= number <= MOST for number in (first, last, step)) or 0 < step < 1 / MOST:
            raise ValueError("no end, or no number")
    except (ValueError, ArithmeticError):
        raise ValueError(
            f"{_flag(name)}: {text!r} must be a range FIRST:LAST:STEP of numbers, such as 0.80:0.98:0.02"
        ) from None
    if step <= 0 or last < first:
        raise ValueError(f"{_flag(name)}: the range {text!r} must go up: FIRST at most LAST, and STEP above 0")
    number = int((last - first) / step) + 1
    if number > MOST_VALUES:
        raise ValueError(f"{_flag(name)}: the range {text!r} has {number:,} values, more than {MOST_VALUES}")
    values = [first + step * place for place in range(number)]
    return [int(value) for value in values] if is_count else [float(value) for value in values]


# --- settings from text


def _share(value: Any) -> float:
    try:
        share = float(value)
    except (TypeError, ValueError):
        raise ValueError("must be a share in (0, 1], such as 0.9") from None
    check_gpu_memory_utilization(share)
    return share


MOST_GIB = 16_384.0
"""No device has more; larger numbers are bytes or MiB that somebody took for GiB."""


def _gib(value: Any) -> float:
    number = parse_gib(value)
    if number > MOST_GIB:
        raise ValueError(f"must be at most {MOST_GIB:,.0f}: this flag takes GiB, not MiB or bytes")
    return number


def _gib_above_0(value: Any) -> float:
    number = _gib(value)
    if number <= 0:
        raise ValueError("must be a number of GiB above 0")
    return number


LEAST_KV_BYTES = 2**16
"""No block of a language model is smaller: less is a number of GiB without its unit."""


def _kv_bytes(value: Any) -> int:
    size = parse_size_bytes(value)
    if 0 < size < LEAST_KV_BYTES:
        raise ValueError(
            f"is {size:,} bytes, less than one block: a number without a unit counts bytes; write {size}GiB for "
            f"{size} * 2**30 bytes"
        )
    return size


def _length(value: Any) -> int:
    if str(value).strip().casefold() in ("auto", "-1"):
        return FIT
    return _at_least_one(value)


def _at_least_one(value: Any) -> int:
    number = parse_count(value)
    if number < 1:
        raise ValueError("must be at least 1")
    return number


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).casefold() in ("true", "false"):
        return str(value).casefold() == "true"
    raise ValueError("must be true or false")


def _choice(value: Any) -> str:
    return str(value)


def _kv_dtype(value: Any) -> str:
    return check_kv_dtype_name(str(value))


_COUNTS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_gpu_blocks_override",
    "max_loras",
    "max_lora_rank",
)
_NUMBERS = (
    "gpu_memory_utilization",
    "free_memory_gib",
    "gpu_memory_gib",
    "cpu_offload_gb",
    "swap_space",
    "kv_offloading_size",
)
_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_COUNTS, _at_least_one),
    "max_model_len": _length,
    "gpu_memory_utilization": _share,
    "kv_cache_dtype": _kv_dtype,
    "enable_expert_parallel": _switch,
    "enable_chunked_prefill": _switch,
    "enable_prefix_caching": _switch,
    "enforce_eager": _switch,
    "disable_hybrid_kv_cache_manager": _switch,
    "kv_cache_memory_bytes": _kv_bytes,
    "swap_space": _gib,
    "cpu_offload_gb": _gib,
    "kv_offloading_size": _gib_above_0,
    "usage_context": _choice,
    "free_memory_gib": _gib_above_0,
    "v0": _switch,
    "num_speculative_tokens": parse_count,
    "enable_lora": _switch,
    "allows_long_max_model_len": _switch,
}
_FIELD_OF = {
    "swap_space": "swap_space_gib",
    "cpu_offload_gb": "cpu_offload_gib",
    "kv_offloading_size": "kv_offloading_gib",
    "v0": "uses_v0_engine",
}
_OTHERS = ("model", "gpu", "engine", "gpu_memory_gib", "dtype")


def check_names(given: Mapping[str, Any]) -> None:
    """Raise ValueError for a name that is no setting."""
    known = (*_OTHERS, *_READERS)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known)}"
            raise ValueError(f"unknown setting {name!r} ({hint})")


def check_values(values: Mapping[str, Sequence[Any]]) -> None:
    """Raise ValueError, naming flag and element, for the first value that no release, card or model takes."""
    readers = {"gpu": _named_gpu, "engine": _engine, "gpu_memory_gib": _total_gib, "dtype": _dtype}
    for name, each in values.items():
        for value in each:
            if name in _READERS:
                read_setting(name, value)
            elif name in readers:
                readers[name](value)


def read_setting(name: str, value: Any) -> Any:
    """The value of a setting, from text or as it is; ValueError names the flag and the value."""
    try:
        return _READERS[name](value)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(name) else f"{_flag(name)}: {value!r} {text}") from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_mean_tokens(value: int | str | None) -> int | None:
    """Tokens of a request; None stays None."""
    if value is None:
        return None
    try:
        return _at_least_one(value)
    except ValueError as error:
        raise ValueError(f"--mean-tokens: {value!r} {error}") from None


def shown_value(value: Any) -> Any:
    """A value of a sweep as it is shown."""
    return value.name if isinstance(value, ModelSpec | GpuSpec) else value
