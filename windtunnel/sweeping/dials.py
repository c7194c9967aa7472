"""What a setting changes: which numbers to show when it is varied, and what it trades for what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MORE_METRICS = (
    "kv_cache_tokens",
    "num_gpu_blocks",
    "oom_margin_gib",
    "num_gpus",
    "output_throughput_per_gpu",
    "request_throughput_per_gpu",
    "request_goodput_per_gpu",
    "total_token_throughput_per_gpu",
)
"""Numbers that a trial has beside those of the summary."""
PLANNED = ("kv_cache_tokens", "num_gpu_blocks", "oom_margin_gib", "num_gpus")
"""Numbers that are known without a simulation: no noise is in them, and no knee."""
COST = "cost_per_million_output_tokens"
"""Shown where GPUs have a price."""
DEFAULT_TRADE = ("p99_itl_ms", "output_throughput")


class Dial(NamedTuple):
    """Settings that change the same things."""

    keys: frozenset[str]
    metrics: tuple[str, ...]
    """In the order in which the effect goes."""
    trade: tuple[str, str] | None = None
    """Of the second, more costs some of the first."""


_MEMORY = Dial(
    frozenset(
        {
            "gpu_memory_utilization",
            "kv_cache_memory_bytes",
            "num_gpu_blocks_override",
            "kv_cache_dtype",
            "block_size",
            "max_model_len",
            "watermark",
            "swap_space",
            "num_cpu_blocks",
            "enforce_eager",
            "scheduler_reserve_full_isl",
        }
    ),
    (
        *("kv_cache_tokens", "num_gpu_blocks", "preemptions", "p99_ttft_ms", "p99_itl_ms", "output_throughput"),
        "oom_margin_gib",
    ),
)
_BUDGET = Dial(
    frozenset(
        {
            "max_num_batched_tokens",
            "max_num_scheduled_tokens",
            "long_prefill_token_threshold",
            "enable_chunked_prefill",
            "max_prefill_tokens",
        }
    ),
    ("p99_itl_ms", "output_throughput", "p99_ttft_ms", "kv_cache_tokens", "preemptions"),
    DEFAULT_TRADE,
)
_SIZE = Dial(
    frozenset({"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "gpu", "model", "dtype"}),
    ("num_gpus", "output_throughput", "output_throughput_per_gpu", "p99_ttft_ms", "p99_itl_ms", "kv_cache_tokens"),
    ("mean_tpot_ms", "output_throughput_per_gpu"),
)
_SEATS = Dial(
    frozenset({"max_num_seqs", "max_num_active_seqs", "batch_size", "max_batch_size", "max_num_queued_reqs"}),
    ("output_throughput", "p99_itl_ms", "p99_ttft_ms", "num_waiting_mean", "kv_usage_mean", "preemptions"),
    DEFAULT_TRADE,
)
_LOAD = Dial(
    frozenset({"request_rate", "rate_scale", "burstiness", "max_concurrency", "arrival", "num_requests"}),
    ("p99_ttft_ms", "p99_itl_ms", "output_throughput", "request_goodput", "utilisation", "preemptions"),
    ("p99_ttft_ms", "output_throughput"),
)
DIALS = (_MEMORY, _BUDGET, _SIZE, _SEATS, _LOAD)
_OTHER = Dial(
    frozenset(), ("output_throughput", "p99_ttft_ms", "p99_itl_ms", "mean_e2el_ms", "preemptions"), DEFAULT_TRADE
)


def dial_of(keys: Iterable[str]) -> Dial:
    """What to show when these settings are varied: of the first that is known, then what the others add."""
    found = [dial for key in keys for dial in DIALS if key in dial.keys] or [_OTHER]
    metrics = tuple(dict.fromkeys(metric for dial in found for metric in dial.metrics))
    trade = next((dial.trade for dial in found if dial.trade), None)
    return Dial(frozenset().union(*(dial.keys for dial in found)), metrics[:MOST_METRICS], trade)


MOST_METRICS = 8
"""Plots below each other in one figure."""
