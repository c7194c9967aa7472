"""What differs between releases in how vLLM sizes the KV cache and refuses to start.

The values by release stand in ``versions.json``.  They were read in the source distributions of 0.8.0 to 0.32.0:
``v1/core/kv_cache_utils.py``, ``v1/kv_cache_interface.py``, ``v1/worker/gpu_worker.py``, ``v1/worker/utils.py``,
``model_executor/models/config.py``, ``engine/arg_utils.py`` and ``config``; those of V0 in ``worker/worker.py``,
``worker/cache_engine.py``, ``executor/executor_base.py`` and ``model_executor/models/mamba_cache.py`` of 0.8.4 and
0.9.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from windtunnel.sim.deployment.kv_layout import LATEST_LAYOUT, V0_LAYOUT, LayoutRules
from windtunnel.sim.deployment.versions import VersionProfile, profile


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """Rules of one release's V1 engine, but for ``v0_layout``."""

    windows: str
    """Layers with a window beside full attention: see ``LayoutRules``."""
    chunks: str
    whole_factor: float
    page_sizes: str
    mixes_layer_sizes: bool
    states_in_v1: bool
    """Models with states run on V1 by default; before, on V0."""
    caches_states: bool
    """Prefix caching is on by default for models with states, too."""
    counts_state_blocks: bool
    counts_checkpoints: bool
    refuses_states: bool
    """A max_num_seqs above the state blocks is refused.  0.18 and 0.19 captured fewer CUDA graphs then, and earlier
    releases looked at neither."""
    start_check: str
    """What one request of max_model_len is held to need: see ``LayoutRules``."""
    has_null_block: bool
    """One block of the pool is never used (``BlockPool``); V0 has none either."""
    applies_override: bool
    """``--num-gpu-blocks-override`` has an effect; in 0.9.1 it was only logged."""
    checks_override: bool
    """One request of max_model_len has to fit into the blocks of the override; before, into those that memory holds."""
    concurrency_by_blocks: bool
    """"Maximum concurrency" is blocks over those of a request; before, tokens over max_model_len."""
    logs_by_concurrency: bool
    """"GPU KV cache size" is concurrency * max_model_len; before, blocks // groups * block_size."""
    counts_batches_in_flight: bool
    """Windows and chunks keep the tokens of all steps under way; before, those of one step."""
    fits_max_model_len: bool
    """``--max-model-len -1`` (auto) takes the longest that fits."""
    checks_free_memory: bool
    """A start is refused where less is free than gpu_memory_utilization of the total; before, it ran out of memory."""
    names_largest_length: bool
    """The error of a max_model_len that does not fit says which would.  0.8.4 to 0.9.0.1 mean to and end the sentence
    before the number."""
    names_guide: bool
    """The errors point to a page of vLLM's documentation."""
    mentions_cpu: bool
    """The errors speak of the CPU backend."""
    block_sizes: tuple[int, ...] | None
    """Tokens that a block may have on CUDA; None is any multiple of 16.

    The command line takes 1 and 8, too (8 only before 0.8.5), which ``FlashAttentionBackend.get_kv_cache_shape``
    refuses."""

    @property
    def layout(self) -> LayoutRules:
        """Those that lay out the cache."""
        return LayoutRules(
            self.windows,
            self.chunks,
            self.whole_factor,
            self.page_sizes,
            self.mixes_layer_sizes,
            True,
            self.counts_state_blocks,
            self.counts_checkpoints,
            self.start_check,
        )


def memory_rules(version: VersionProfile) -> MemoryRules:
    """The rules of that release."""
    return _rules(version.release)


def layout_rules(version: VersionProfile, architecture: str, *, v0: bool = False) -> LayoutRules:
    """The rules by which that release lays out the cache of a model of this architecture.

    A release that lacks the architecture is held to lay it out as the first one that has it.
    """
    if v0:
        return V0_LAYOUT
    first = version.architecture_since(architecture)
    return memory_rules(version if first is None else profile(first)).layout


@cache
def _rules(release: str) -> MemoryRules:
    values = profile(release).memory_values()
    sizes = values.pop("block_sizes")
    return MemoryRules(**values, block_sizes=None if sizes is None else tuple(sizes))


__all__ = ["LATEST_LAYOUT", "MemoryRules", "layout_rules", "memory_rules"]
