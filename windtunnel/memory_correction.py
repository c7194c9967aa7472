"""What a real start-up teaches about one deployment, kept in a file for later plans."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windtunnel.memory_inputs import MemoryInputUnreadable
from windtunnel.sim.deployment.gpu import GIB
from windtunnel.sim.deployment.memory_plan import MemoryPlan
from windtunnel.sim.deployment.memory_request import MemoryRequest

SCHEMA_VERSION = 1
SAME_CARD = 0.05
"""Totals that drivers report of one kind of card are closer than that."""
_SPLITS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
_DEPLOYMENT = ("model", "gpu", *_SPLITS)
"""What must be as it was where the correction was learnt."""
_ALSO_TOLD = ("engine", "gpu_memory_utilization", "max_num_batched_tokens", "kv_cache_dtype")
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
        "kv_cache_dtype": request.kv_cache_dtype,
        "source": source,
    }


def _deployment(request: MemoryRequest) -> dict[str, Any]:
    splits = {name: getattr(request, name) for name in _SPLITS}
    return {"model": request.model.name, "gpu": request.gpu.name, **splits}


def read_correction(given: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """What ``MemoryReport.profile`` gave, or its file.  Raises MemoryInputUnreadable for what is no correction."""
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
    version = content.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise MemoryInputUnreadable(
            f"{name}: schema_version is {version!r}, and this windtunnel reads {SCHEMA_VERSION}: save it anew with "
            "--save-correction"
        )
    found: Mapping[str, Any] = content
    return found


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
    differ = [key for key in _DEPLOYMENT if learnt.get(key) not in (None, planned[key])]
    if differ:
        told = ", ".join(f"{key} {learnt[key]} (here {planned[key]})" for key in differ)
        raise ValueError(f"--correction: it was learnt with {told}, which must be the same: {remedy}")
    learnt_on = learnt.get("gpu_memory_bytes")
    if isinstance(learnt_on, int) and abs(learnt_on / total - 1) > SAME_CARD:
        raise ValueError(
            f"--correction: it was learnt on a card of {learnt_on / GIB:.2f} GiB, and this one has {total / GIB:.2f} "
            f"GiB, which must be within {SAME_CARD:.0%}: {remedy}"
        )


def check_corrected(plan: MemoryPlan) -> None:
    """Raise ValueError if the correction leaves the KV cache more than the card has beside the weights."""
    most = plan.total_bytes - plan.weights_bytes
    if plan.request.correction_bytes > 0 and plan.available_kv_cache_bytes > most:
        raise ValueError(
            f"--correction: with {plan.request.correction_bytes / GIB:+.2f} GiB the KV cache has "
            f"{plan.available_kv_cache_bytes / GIB:.2f} GiB, and {most / GIB:.2f} GiB at most are left beside the "
            "weights: save one of this deployment with --save-correction, or leave --correction out"
        )


def other_settings(learnt: Mapping[str, Any], plan: MemoryPlan) -> tuple[str, ...]:
    """What else was not as it is planned, as a note."""
    now = {
        "engine": plan.request.version.name,
        "gpu_memory_utilization": plan.settings.gpu_memory_utilization,
        "max_num_batched_tokens": plan.settings.max_num_batched_tokens,
        "kv_cache_dtype": plan.request.kv_cache_dtype,
    }
    differ = [f"{key} {learnt[key]} (here {now[key]})" for key in _ALSO_TOLD if learnt.get(key) not in (None, now[key])]
    return (f"The correction was learnt with {', '.join(differ)}.",) if differ else ()


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
