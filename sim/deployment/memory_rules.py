"""What differs between releases in how vLLM sizes the KV cache and refuses to start.

Read in the source distributions of 0.8.0 to 0.32.0: ``v1/core/kv_cache_utils.py``, ``v1/worker/gpu_worker.py``,
``v1/worker/utils.py``, ``v1/kv_cache_interface.py``, ``config/model.py`` and ``config/compilation.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from windtunnel.sim.deployment.versions import VersionProfile

_ESTIMATES_LENGTH = (0, 8, 4)
_CHECKS_FREE_MEMORY = (0, 9, 1)
_FITS_LENGTH = (0, 14, 0)
_REFUSES_STATES = (0, 20, 0)
_LOGS_BY_CONCURRENCY = (0, 20, 1)
_CACHES_STATES = (0, 26, 0)
_COUNTS_BATCHES = (0, 26, 0)
_SPEAKS_OF_CPU = (0, 22, 0)


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """Rules of one release."""

    names_largest_length: bool
    """The error of a max_model_len that does not fit says which would."""
    checks_free_memory: bool
    """A start is refused where less is free than gpu_memory_utilization of the total; before, it ran out of memory."""
    fits_max_model_len: bool
    """``--max-model-len -1`` (auto) takes the longest that fits."""
    refuses_states: bool
    """A max_num_seqs above the state blocks is refused; before, fewer CUDA graphs were captured."""
    logs_by_concurrency: bool
    """"GPU KV cache size" is concurrency * max_model_len; before, blocks // groups * block_size."""
    caches_states: bool
    """Prefix caching is on by default for models with states, too."""
    counts_batches_in_flight: bool
    """Windows and chunks keep the tokens of all steps under way; before, those of one step."""
    mentions_cpu: bool
    """The errors speak of the CPU backend."""


def memory_rules(version: VersionProfile) -> MemoryRules:
    """The rules of that release."""
    release = tuple(int(part) for part in re.findall(r"\d+", version.release)[:3])
    return MemoryRules(
        names_largest_length=release >= _ESTIMATES_LENGTH,
        checks_free_memory=release >= _CHECKS_FREE_MEMORY,
        fits_max_model_len=release >= _FITS_LENGTH,
        refuses_states=release >= _REFUSES_STATES,
        logs_by_concurrency=release >= _LOGS_BY_CONCURRENCY,
        caches_states=release >= _CACHES_STATES,
        counts_batches_in_flight=release >= _COUNTS_BATCHES,
        mentions_cpu=release >= _SPEAKS_OF_CPU,
    )
