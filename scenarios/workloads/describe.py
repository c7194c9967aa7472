"""What a workload asks for, in a few numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from windtunnel.sim.workload import IntArray, Workload

_PERCENTILES = (50, 90, 99)


def describe(workload: Workload) -> dict[str, Any]:
    """Counts, rates, lengths and sharing of a workload, as plain values in a fixed order.

    ``duration_s``: from 0 to the last arrival that has a time of its own.  ``request_rate_per_s``: arrivals per second
    between the first and the last such arrival, None if they come at once.  ``burstiness_cv``: standard deviation of
    the gaps between them over their mean (1 for Poisson, 0 for constant gaps), None without gaps.  Lengths in tokens:
    mean, min, p50, p90, p99 (numpy's linear percentiles), max, total.  ``shared_prompt_tokens``: prompt tokens that
    some earlier row begins with too, what a prefix cache that never forgets could at most save; ``…_share`` of all
    prompt tokens.
    """
    due_ns = workload.arrival_ns[workload.previous < 0]
    shared = shared_prompt_tokens(workload)
    total_prompt = int(workload.num_prompt_tokens.sum())
    return {
        "source": workload.source,
        "num_requests": len(workload),
        "num_conversations": len(due_ns) if len(due_ns) < len(workload) else None,
        "duration_s": float(due_ns.max()) / 1e9 if len(due_ns) else 0.0,
        **_arrival_numbers(due_ns),
        "max_concurrency": workload.max_concurrency,
        **({} if workload.tenant is None else {"tenants": _tenants(workload.tenant, workload.tenants)}),
        "prompt_tokens": _lengths(workload.num_prompt_tokens),
        "output_tokens": _lengths(workload.num_output_tokens),
        "shared_prompt_tokens": int(shared.sum()),
        "shared_prompt_token_share": float(shared.sum()) / total_prompt if total_prompt else 0.0,
        "notes": list(workload.notes),
    }


def _arrival_numbers(due_ns: IntArray) -> dict[str, float | None]:
    gaps_s = np.diff(due_ns) / 1e9
    mean_s = float(gaps_s.mean()) if len(gaps_s) else 0.0
    return {
        "request_rate_per_s": 1.0 / mean_s if mean_s else None,
        "burstiness_cv": float(gaps_s.std()) / mean_s if mean_s else None,
    }


def _tenants(tenant: IntArray, names: tuple[str, ...]) -> dict[str, int]:
    """Requests of each tenant."""
    return dict(zip(names, np.bincount(tenant, minlength=len(names)).tolist(), strict=True))


def _lengths(tokens: IntArray) -> dict[str, float | int]:
    if not len(tokens):
        return {}
    percentiles = np.percentile(tokens, _PERCENTILES).tolist()
    return {
        "mean": float(tokens.mean()),
        "min": int(tokens.min()),
        **{f"p{percent}": value for percent, value in zip(_PERCENTILES, percentiles, strict=True)},
        "max": int(tokens.max()),
        "total": int(tokens.sum()),
    }


def shared_prompt_tokens(workload: Workload) -> IntArray:
    """Per row the prompt tokens that some earlier row has too, at the same places from the start."""
    shared = np.zeros(len(workload), np.int64)
    if workload.content is None:
        return shared
    longest: dict[int, int] = {}
    for row, segments in enumerate(workload.content):
        common = 0
        for stream, end in segments:
            seen = longest.get(stream, 0)
            common = max(common, min(seen, end))
            longest[stream] = max(seen, end)
        shared[row] = common
    return np.minimum(shared, workload.num_prompt_tokens)
