"""What a real start-up teaches about one deployment, kept in a file for later plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from windtunnel.memory_inputs import MemoryInputUnreadable
from windtunnel.sim.deployment.gpu import GIB
from windtunnel.sim.deployment.kv_dtypes import check_kv_dtype_name
from windtunnel.sim.deployment.memory_plan import ESTIMATE_SETTINGS, MemoryPlan
from windtunnel.sim.deployment.memory_request import MemoryRequest
from windtunnel.sim.deployment.model import short_name
from windtunnel.sim.deployment.versions import profile

SCHEMA_VERSION = 1
SAME_CARD = 0.05
"""Totals that drivers report of one kind of card are closer than that."""
SPLITS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
_DEPLOYMENT = ("model", "gpu", *SPLITS, "v0")
"""What must be as it was where the correction was learnt."""
_ALSO_TOLD = (*ESTIMATE_SETTINGS, "gpu_memory_utilization", "kv_cache_dtype")
"""What may differ, but is told."""


def correction_of(request: MemoryRequest, plan: MemoryPlan, correction_bytes: int, source: str) -> dict[str, Any]:
    """What a later plan of the same deployment is given."""
    return {
        "schema_version": SCHEMA_VERSION,
        "correction_bytes": correction_bytes,
        **_deployment(request),
        "gpu_memory_bytes": request.gpu.memory_bytes,
        "engine": request.version.name,
        "gpu_memory_utilization": plan.settings.gpu_memory_utilization,
        "max_num_batched_tokens": plan.settings.max_num_batched_tokens,
        "max_num_seqs": plan.settings.max_num_seqs,
        "enforce_eager": request.enforce_eager,
        "kv_cache_dtype": request.kv_cache_dtype,
        "source": source,
    }


def _deployment(request: MemoryRequest) -> dict[str, Any]:
    splits = {name: getattr(request, name) for name in SPLITS}
    return {"model": short_name(request.model.name), "gpu": request.gpu.name, **splits, "v0": request.runs_on_v0}


def read_correction(given: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """What ``MemoryReport.profile`` gave, or its file.

    Raises MemoryInputUnreadable for what is no correction, naming the key that lacks or has a value that cannot be.
    """
    content: Any = given
    name = "the correction" if isinstance(given, Mapping) else str(given)
    if not isinstance(given, Mapping):
        try:
            content = json.loads(Path(given).read_text(encoding="utf-8"))
        except OSError as error:
            raise MemoryInputUnreadable(f"{given}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise MemoryInputUnreadable(f"{given}: not valid JSON ({error})") from None
    if not is_correction(content):
        raise MemoryInputUnreadable(f"{name}: lacks the whole number 'correction_bytes' (--save-correction writes it)")
    for key, (expected, is_so) in _KEYS.items():
        if key not in content:
            raise MemoryInputUnreadable(f"{name}: lacks {key!r}, which must be {expected}{_ANEW}")
        if not is_so(content[key]):
            shown = repr(content[key])[:80]
            raise MemoryInputUnreadable(f"{name}: {key!r} is {shown}, and must be {expected}{_ANEW}")
    found: Mapping[str, Any] = content
    return found


_ANEW = ": save it anew with --save-correction"


def _is_whole(least: int | None = None) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and (least is None or value >= least)


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_version(value: Any) -> bool:
    return type(value) is int and value == SCHEMA_VERSION


def _is_named(read: Callable[[str], Any]) -> Callable[[Any], bool]:
    """Whether it is a name that can be read."""

    def is_so(value: Any) -> bool:
        try:
            return isinstance(value, str) and bool(read(value))
        except ValueError:
            return False

    return is_so


_AT_LEAST_1 = ("a whole number of at least 1", _is_whole(1))
_TRUE_OR_FALSE = ("true or false", _is_flag)
_KEYS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "schema_version": (f"{SCHEMA_VERSION}, the version that is read here", _is_version),
    "correction_bytes": ("a whole number of bytes", _is_whole()),
    "model": ("the name of a model", _is_text),
    "gpu": ("the name of a GPU", _is_text),
    "tensor_parallel_size": _AT_LEAST_1,
    "pipeline_parallel_size": _AT_LEAST_1,
    "data_parallel_size": _AT_LEAST_1,
    "enable_expert_parallel": _TRUE_OR_FALSE,
    "v0": _TRUE_OR_FALSE,
    "gpu_memory_bytes": ("a whole number of bytes, at least 1 GiB", _is_whole(GIB)),
    "engine": ("a release of vLLM, such as vllm-0.32", _is_named(profile)),
    "gpu_memory_utilization": ("a share in (0, 1]", _is_share),
    "max_num_batched_tokens": _AT_LEAST_1,
    "max_num_seqs": _AT_LEAST_1,
    "enforce_eager": _TRUE_OR_FALSE,
    "kv_cache_dtype": ("a type of the KV cache, such as auto or fp8", _is_named(check_kv_dtype_name)),
}
"""What a correction must have, in words, and whether a value is that."""


def is_correction(content: Any) -> bool:
    """Whether it has what makes a correction."""
    value = content.get("correction_bytes") if isinstance(content, Mapping) else None
    return isinstance(value, int) and not isinstance(value, bool)


def check_correction(learnt: Mapping[str, Any], request: MemoryRequest) -> None:
    """Raise ValueError for a correction that this deployment cannot have.

    A model, a card or a parallelism other than that on which it was learnt is an error, and so is a size that the card
    does not have.
    """
    remedy = "save one of this deployment with --save-correction, or leave --correction out"
    total = request.gpu.memory_bytes
    if not -total <= learnt["correction_bytes"] <= total:
        raise ValueError(
            f"--correction: correction_bytes {learnt['correction_bytes']:,} ({learnt['correction_bytes'] / GIB:,.2f} "
            f"GiB) must lie within {total:,} bytes more or less, what a {request.gpu.name} has "
            f"({total / GIB:.2f} GiB): {remedy}"
        )
    planned = _deployment(request)
    differ = [key for key in _DEPLOYMENT if learnt[key] != planned[key]]
    if differ:
        told = ", ".join(f"{key} {learnt[key]} (here {planned[key]})" for key in differ)
        raise ValueError(f"--correction: it was learnt with {told}, which must be the same: {remedy}")
    learnt_on = learnt["gpu_memory_bytes"]
    if abs(learnt_on / total - 1) > SAME_CARD:
        raise ValueError(
            f"--correction: it was learnt on a card of {learnt_on / GIB:.2f} GiB, and this one has {total / GIB:.2f} "
            f"GiB, which must be within {SAME_CARD:.0%}: {remedy}"
        )


def check_corrected(plan: MemoryPlan) -> None:
    """Raise ValueError if the correction leaves the KV cache more than the card has beside the weights."""
    most, wanted = plan.total_bytes - plan.weights_bytes, plan.available_kv_cache_bytes + plan.overcorrection_bytes
    if plan.request.correction_bytes > 0 and wanted > most:
        raise ValueError(
            f"--correction: with {plan.request.correction_bytes / GIB:+.2f} GiB the KV cache has "
            f"{wanted / GIB:.2f} GiB, and {most / GIB:.2f} GiB at most are left beside the "
            "weights: save one of this deployment with --save-correction, or leave --correction out"
        )


def other_settings(learnt: Mapping[str, Any], plan: MemoryPlan) -> tuple[str, ...]:
    """What else was not as it is planned, as a note."""
    now = _also_told(plan)
    differ = [f"{key} {learnt[key]} (here {now[key]})" for key in _differing(learnt, now)]
    return (f"The correction was learnt with {', '.join(differ)}.",) if differ else ()


def less_sure(learnt: Mapping[str, Any], plan: MemoryPlan) -> tuple[str, ...]:
    """Those of them that the estimate depends on."""
    return tuple(key for key in _differing(learnt, _also_told(plan)) if key in ESTIMATE_SETTINGS)


def _also_told(plan: MemoryPlan) -> dict[str, Any]:
    settings = {name: getattr(plan.settings, name) for name in _OF_SETTINGS}
    eager, dtype = plan.request.enforce_eager, plan.request.kv_cache_dtype
    return {"engine": plan.request.version.name, "enforce_eager": eager, "kv_cache_dtype": dtype, **settings}


_OF_SETTINGS = ("gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs")


def _differing(learnt: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [key for key in _ALSO_TOLD if learnt[key] != now[key]]


def check_can_write_correction(path: Path) -> None:
    """Raise ValueError for a file that is there and is no correction: it is not replaced."""
    if not path.is_file():
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size < _LARGEST_BYTES else None
    except (OSError, ValueError, RecursionError):
        content = None
    if not is_correction(content):
        raise ValueError(
            f"{path} exists and is no correction: it is not replaced.  Name another file, or remove that one first"
        )


_LARGEST_BYTES = 2**20
