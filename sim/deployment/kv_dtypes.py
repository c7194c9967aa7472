"""What ``--kv-cache-dtype`` takes, by release, and which of it is planned.

Source: ``CacheDType`` in ``vllm/config/cache.py`` (before 0.11 in ``config/__init__.py``, ``config.py`` and
``engine/arg_utils.py``), as read in every release from 0.8.0 to 0.32.0 but 0.15.0.  No name is gone again.
"""

from __future__ import annotations

from windtunnel.sim.deployment.model_spec import KV_DTYPE_BYTES, UnsupportedModel
from windtunnel.sim.deployment.refusal import RefusedByVllm
from windtunnel.sim.deployment.versions import VersionProfile

KV_DTYPE_SINCE = {
    "auto": "0.8.0",
    "bfloat16": "0.11.0",
    "float16": "0.18.0",
    "fp8": "0.8.0",
    "fp8_ds_mla": "0.11.1",
    "fp8_e4m3": "0.8.0",
    "fp8_e5m2": "0.8.0",
    "fp8_inc": "0.10.0",
    "fp8_per_token_head": "0.20.0",
    "int4_per_token_head": "0.25.0",
    "int8_per_token_head": "0.20.0",
    "nvfp4": "0.20.0",
    "nvfp4_4over6": "0.28.0",
    "nvfp4_ds_mla": "0.30.0",
    "turboquant_3bit_nc": "0.20.0",
    "turboquant_4bit_nc": "0.20.0",
    "turboquant_k3v4_nc": "0.20.0",
    "turboquant_k8v4": "0.20.0",
    "ultraquant_4bit": "0.32.0",
}
"""The first release from 0.8.0 on that takes each."""
PLANNED = tuple(name for name in KV_DTYPE_SINCE if name == "auto" or name in KV_DTYPE_BYTES)
"""Those whose bytes are known here."""
_HINTS = {
    "fp8_ds_mla": "fp8 makes the same cache of a model with sparse latent attention",
    "fp8_inc": "it is Gaudi's fp8",
}


def check_kv_dtype_name(name: str) -> str:
    """The name; raises ValueError for one that no release takes."""
    if name not in KV_DTYPE_SINCE:
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(KV_DTYPE_SINCE)}, got {name!r}")
    return name


def check_kv_dtype(name: str, version: VersionProfile) -> None:
    """Raise ValueError for a name that no release takes, RefusedByVllm for one that came later than this release, and
    UnsupportedModel for one that vLLM takes and that is not planned."""
    since = KV_DTYPE_SINCE[check_kv_dtype_name(name)]
    if not version.is_at_least(since):
        raise RefusedByVllm(
            f"kv_cache_dtype {name} is unknown to {version.label}: it came with vLLM {since}; take the engine "
            f"vllm-{since} or a later one"
        )
    if name not in PLANNED:
        hint = f" ({_HINTS[name]})" if name in _HINTS else ""
        raise UnsupportedModel(
            f"kv_cache_dtype {name}: vLLM takes it, and its bytes are not modelled here{hint}; planned are "
            f"{', '.join(PLANNED)}"
        )
