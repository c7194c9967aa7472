"""Small plans: a question that is answered within a second, whatever the model."""

from __future__ import annotations

from typing import Any

from windtunnel.planning import Plan, plan

STEPS = {"kind": "affine", "base_s": "8ms", "token_s": "20us", "seq_s": "100us"}
"""Step times that no card has a part in, so that the cheapest card wins."""


def scenario(**changes: Any) -> dict[str, Any]:
    """A chat of short answers, whose sections ``changes`` replaces or adds to."""
    table: dict[str, Any] = {
        "name": "small",
        "deployment": {"model": "llama-3.1-8b"},
        "engine": {"max_model_len": 2048},
        "workload": {"num_requests": 200, "request_rate": 60, "input": 100, "output": 20},
        "cost": STEPS,
        "slo": {"objectives": ["ttft:p95<150ms", "tpot:p95<25ms"]},
    }
    for section, values in changes.items():
        old = table.get(section)
        table[section] = {**old, **values} if isinstance(old, dict) and isinstance(values, dict) else values
    return table


def small_plan(table: dict[str, Any] | None = None, **options: Any) -> Plan:
    """The plan of a small scenario, in this process."""
    given: dict[str, Any] = {
        "gpus": {"h100-sxm": 2.5, "l40s": 0.9},
        "tensor_parallel_sizes": (1,),
        "kv_cache_dtypes": ("auto",),
        "max_num_seqs": (256,),
        "max_num_batched_tokens": (2048,),
        "gpu_memory_utilizations": (0.9,),
        "replications": 2,
        "num_requests": 100,
        "jobs": 1,
    }
    return plan(table or scenario(), **{**given, **options})
