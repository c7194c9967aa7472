"""The memory plan of a question, and what helps where vLLM would not start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from windtunnel.ui.knobs import knobs

if TYPE_CHECKING:
    from windtunnel.memory import MemoryReport
    from windtunnel.scenarios.load import Loaded

_OF_DEPLOYMENT = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "gpu_memory_utilization",
    "dtype",
    "kv_cache_dtype",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "usage_context",
)
_OF_ENGINE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "enable_chunked_prefill",
    "enable_prefix_caching",
)
_WITHOUT_PLAN = "There is no memory plan: the scenario gives the number of KV blocks, and no model and GPU with it."


@dataclass(frozen=True, slots=True)
class Planned:
    """A memory plan as far as there is one."""

    shown: dict[str, Any]
    """What the page shows of it."""
    values: dict[str, Any] = field(default_factory=dict)
    """Settings as vLLM would take them, by name."""
    is_infeasible: bool = False


def memory_part(loaded: Loaded) -> Planned:
    """The plan of a scenario's deployment.

    Raises ValueError for values that no release takes; what vLLM refuses is a plan that does not start.
    """
    from windtunnel.memory import memory_plan
    from windtunnel.sim.deployment.refusal import RefusedByVllm

    asked = _asked(loaded)
    if asked["model"] is None or asked["gpu"] is None:
        return Planned({"memory": None, "memory_note": _WITHOUT_PLAN})
    try:
        report = memory_plan(**asked)
    except RefusedByVllm as refusal:
        return _refused(asked, str(refusal))
    plan = report.judged.plan
    values = {name: getattr(plan.settings, name) for name in _SETTLED}
    values["kv_cache_dtype"] = plan.request.kv_cache_dtype
    return Planned({"memory": _shown(report)}, values, report.is_infeasible)


_SETTLED = (
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
)


def _asked(loaded: Loaded) -> dict[str, Any]:
    deployment, engine = loaded.scenario.deployment, loaded.scenario.engine
    model = None if deployment.model is None else loaded.model_of("deployment", "model", deployment.model)
    return {
        "model": model,
        "gpu": deployment.gpu,
        "engine": deployment.engine_version,
        **{name: getattr(deployment, name) for name in _OF_DEPLOYMENT},
        **{name: getattr(engine, name) for name in _OF_ENGINE},
    }


def _shown(report: MemoryReport) -> dict[str, Any]:
    from windtunnel.reports.memory_figures import waterfall

    plan, full = report.judged.plan, report.to_dict()
    figure = waterfall(plan)
    return {
        **{key: full[key] for key in _KEYS},
        "title": report.row.title,
        "remedies": [_remedy(remedy._asdict() | {"text": remedy.text}) for remedy in report.judged.remedies],
        "figure": {**figure.for_page(), "title": figure.title, "caption": figure.caption},
        "assumptions": list(report.assumptions),
        "interval_90": full["interval_90"],
    }


_KEYS = (
    "verdict",
    "reason",
    "kv_cache_tokens",
    "num_gpu_blocks",
    "block_size",
    "max_concurrency",
    "available_kv_cache_bytes",
    "weights_bytes",
    "kv_bytes_per_token",
    "oom_margin_bytes",
    "notes",
    "warnings",
)


def _remedy(told: Mapping[str, Any]) -> dict[str, Any]:
    """A change, and whether the page can make it."""
    keys = ("flag", "value", "text", "verdict", "cost", "kv_cache_tokens")
    can_apply = any(each.name == told["flag"] for each in knobs())
    return {**{key: told[key] for key in keys}, "can_apply": can_apply}


# --- what vLLM refuses whatever the memory


def _refused(asked: Mapping[str, Any], reason: str) -> Planned:
    memory = {
        "verdict": "does_not_start",
        "reason": reason,
        "title": "vLLM refuses these settings",
        "remedies": list(_changes_that_start(asked)),
        "figure": None,
        "notes": [],
        "warnings": [],
        "assumptions": [],
    }
    return Planned({"memory": memory}, is_infeasible=True)


def _changes_that_start(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of each setting that vLLM may refuse the first other value with which it starts, nothing else changed."""
    from windtunnel.memory import memory_plan

    def tried(name: str, value: Any) -> MemoryReport | None:
        try:
            report = memory_plan(**{**asked, name: value})
        except ValueError:
            return None
        return None if report.is_infeasible else report

    for name, values in _candidates(asked).items():
        for value in values:
            report = tried(name, value)
            if report is not None:
                text = f"set {name} to {'the default' if value is None else value}"
                told = {"flag": name, "value": value, "text": text, "verdict": report.verdict, "cost": ""}
                yield _remedy({**told, "kv_cache_tokens": report.kv_cache_tokens})
                break


def _candidates(asked: Mapping[str, Any]) -> dict[str, list[Any]]:
    from windtunnel.sim.deployment.model import load_model

    model = load_model(asked["model"])
    size, seqs, budget = (asked[name] for name in ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens"))
    sizes = sorted(model.tensor_parallel_sizes(16), key=lambda each: (abs(each - (size or 1)), -each))
    found: dict[str, list[Any]] = {"tensor_parallel_size": [each for each in sizes if each != size]}
    if budget is not None:
        found["max_num_seqs"] = [budget]
    if seqs is not None or budget is not None:
        found["max_num_batched_tokens"] = [None] if seqs is None else [seqs, None]
    if asked["max_model_len"] is not None:
        found["max_model_len"] = [model.max_model_len]
    if asked["kv_cache_dtype"] not in (None, "auto"):
        found["kv_cache_dtype"] = ["auto"]
    return found
