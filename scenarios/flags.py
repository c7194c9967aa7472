"""How the keys of a scenario file are called on the command line."""

from __future__ import annotations

PARAMETER_OF_KEY = {
    "num_requests": "num_prompts",
    "input": "input_len",
    "output": "output_len",
    "objectives": "slo",
    "speculative": "speculative_config",
    "engine_version": "engine",
    "gpu_hour": "gpu_price",
    "faults": "fault",
}
"""Keys whose flag has another name: that of ``vllm bench serve``, or a shorter one."""

KEY_OF_PARAMETER = {parameter: key for key, parameter in PARAMETER_OF_KEY.items()}
"""The other way round."""

WITHOUT_FLAG = frozenset(
    {
        "schema_version",
        "name",
        "description",
        "teaches",
        "max_tokens",
        "priorities",
        "prefixes",
        "sessions",
        "percentiles",
        "tenants",
        "fairness",
        "tenants_alone",
        "kv_transfer_bandwidth",
        "kv_transfer_latency",
        "kv_bytes_per_token",
        "max_in_flight",
        "pools",
        "max_attempts",
        "health_check_interval",
        "health_check_failures",
        "dead_replicas",
        "network_latency",
        "max_waiting_requests",
        "stats_interval",
        "stats_delay",
        "prefix_weight",
        "queue_weight",
        "kv_weight",
        "prefix_block_tokens",
        "prefix_max_blocks",
        "prefix_capacity_blocks",
    }
)
"""Keys that only a file (or Python) can give."""

_WITHOUT_FLAG_SECTIONS = frozenset({"cost", "batching", "speculative", "compare", "plan"})
"""Sections that one flag gives as a whole."""

_WITH_FLAG_ALL_THE_SAME = frozenset({("cost", "noise")})
"""Keys of those that have a flag of their own."""


def flag_of(key: str, section: str) -> str:
    """The flag that gives a key of this section ("scenario" is the top), or nothing."""
    if (section, key) in _WITH_FLAG_ALL_THE_SAME:
        return f"--{key}"
    if not section or section in _WITHOUT_FLAG_SECTIONS or key in WITHOUT_FLAG:
        return ""
    return "--" + PARAMETER_OF_KEY.get(key, key).replace("_", "-")
