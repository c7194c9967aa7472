"""The labels of ``vllm:cache_config_info``: every field of vLLM's CacheConfig, in its order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULTS: dict[str, Any] = {
    "block_size": 16,
    "user_specified_block_size": False,
    "kv_cache_layout": None,
    "prefix_match_unit": None,
    "gpu_memory_utilization": 0.92,
    "cache_dtype": "auto",
    "is_attention_free": False,
    "num_gpu_blocks_override": None,
    "sliding_window": None,
    "enable_prefix_caching": True,
    "prefix_caching_hash_algo": "sha256",
    "prefix_cache_retention_interval": 0,
    "kv_cache_dtype_skip_layers": [],
    "mamba_page_size_padded": None,
    "skip_page_size_padded": None,
    "mamba_block_size": None,
    "mamba_cache_dtype": "auto",
    "mamba_ssm_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "enable_mamba_shared_prefix_checkpoint": False,
    "replayssm_buffer_len": 16,
    "use_replayssm": False,
    "use_kda_recoverssm": False,
    "num_gpu_blocks": None,
    "num_cpu_blocks": None,
    "effective_attention_block_size": None,
    "kv_cache_size_tokens": None,
    "kv_cache_max_concurrency": None,
    "hash_block_size": None,
    "cache_hit_alignment_tokens": None,
    "kv_sharing_fast_prefill": False,
    "swa_bounded_replay": True,
    "kv_cache_memory_bytes": None,
    "kv_offloading_size": None,
    "kv_offloading_backend": "native",
    "_block_size_resolved": True,
}
"""Fields and defaults of vLLM 0.32 (``vllm/config/cache.py``, ``CacheConfig.metrics_info``).  Those that only its
engine's process fills in (layout, hash block size) stay None in the process that answers ``/metrics``."""


def cache_info(known: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults with what is known of this server.  Raises ValueError for a field that vLLM does not have."""
    strange = [name for name in known if name not in DEFAULTS]
    if strange:
        raise ValueError(f"vLLM's CacheConfig has no {', '.join(strange)}: name one of {', '.join(DEFAULTS)}")
    return {**DEFAULTS, **known}
