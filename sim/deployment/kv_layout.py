"""How vLLM lays out the KV cache of a model: groups of layers, pages, blocks, and what one request takes of them.

Layers that keep the same kind of cache form groups.  A block id stands for one page of every layer of a group, all
groups draw their ids from one pool, and a block is as large as the largest group needs.  So a model with one kind of
layers has one group, and a hybrid one (windows, chunks, states beside full attention) has several, whose pages are
made equal by longer blocks or by padding.  Source: vLLM 0.32, ``v1/core/kv_cache_utils.py``,
``v1/kv_cache_interface.py`` and ``platforms/interface.py`` (states), for layer-outermost caches, which all backends
but those of sparse latent attention use.  Older releases differ by ``LayoutRules``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from windtunnel.sim.deployment.layers import Attention, LatentAttention, Layer, ParallelMixer, State
from windtunnel.sim.deployment.model_spec import (
    ModelSpec,
    UnsupportedModel,
    indexer_bytes,
    latent_or_kv_bytes,
    layers_of_stage,
)

FULL, SLIDING, CHUNKED, LATENT, STATE = "full", "sliding", "chunked", "latent", "state"
"""Kinds of caches: all tokens; those of a window; of a chunk; all tokens' latent vectors; one state a sequence."""


class LayoutRules(NamedTuple):
    """How a release lays out the cache of unlike layers; ``versions.json`` has the values of each.

    Windows and chunks: "full" keeps them as full attention, "merged" does so only beside full attention, "groups" gives
    them groups of their own.  Pages of different sizes: "equal" knows none, "divisible" lengthens the blocks of those
    that divide the largest, "padded" pads the others, too.
    """

    windows: str = "groups"
    chunks: str = "groups"
    whole_factor: float = 1.5
    """Kinds of layers whose numbers differ by less are padded to the larger one instead of split."""
    page_sizes: str = "padded"
    mixes_layer_sizes: bool = True
    """One group holds layers of one kind whose keys and values differ in size."""
    keeps_states: bool = True
    """States take blocks; V0 keeps them outside, for max_num_seqs sequences."""
    counts_state_blocks: bool = True
    """A sequence takes blocks for its speculated and cached states; before, one."""
    counts_checkpoints: bool = True
    """A cached Mamba-2 state takes one more, for a checkpoint of the prefill."""
    start_check: str = "groups"
    """What a request needs at the start-up check: the sum of all "layers" as they are, though windows may have been
    merged since and groups be padded; the blocks of the "first group" in all stages' layers ("first group of all
    stages") or those of a stage; or the blocks of all "groups"."""


LATEST_LAYOUT = LayoutRules()
V0_LAYOUT = LayoutRules(windows="full", chunks="full", keeps_states=False)
"""V0 keeps all tokens of every layer, and a start-up check of its own (``MemoryPlan.holds``)."""

_SMALLEST_KERNEL_BLOCK = 16
_LATENT_KERNEL_BLOCK = 128


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table."""

    kind: str
    block_size: int
    """Tokens of one block in this group; without meaning for states."""
    layer_page_bytes: tuple[int, ...]
    """One page of each layer of the group, padding included."""
    layers: tuple[int, ...]
    """The decoder layers, by number; a layer with two caches (attention beside Mamba, an indexer) is in twice."""
    sliding_window: int = 0
    chunk_size: int = 0
    state_blocks: int = 0
    """Blocks that one sequence holds of its states."""

    @property
    def page_bytes(self) -> int:
        """The largest page of a layer."""
        return max(self.layer_page_bytes)

    @property
    def num_layers(self) -> int:
        """Caches in the group."""
        return len(self.layers)

    def bytes_in(self, start: int, end: int) -> int:
        """One page of each of its layers from ``start`` to before ``end``."""
        pages = zip(self.layer_page_bytes, self.layers, strict=True)
        return sum(page for page, layer in pages if start <= layer < end)

    def blocks_of_request(self, num_tokens: int, max_in_flight_tokens: int) -> int:
        """Blocks that a request of ``num_tokens`` holds at most, with so many tokens scheduled but not settled."""
        if self.kind == STATE:
            return self.state_blocks
        if self.kind == SLIDING:
            held = min(self.sliding_window - 1 + max_in_flight_tokens, num_tokens)
            return -(-held // self.block_size) + 1  # the window need not begin at the beginning of a block
        held = min(self.chunk_size + max_in_flight_tokens, num_tokens) if self.kind == CHUNKED else num_tokens
        return -(-held // self.block_size)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV cache of one deployment."""

    groups: tuple[KvGroup, ...]
    block_bytes: tuple[int, ...]
    """Bytes of one block on a GPU of each pipeline stage."""
    block_size: int
    """vLLM's cache_config.block_size: that asked for, lengthened where states need larger pages."""
    max_in_flight_tokens: int
    caches_states: bool = False
    """Prefix caching keeps states, too."""
    stages: tuple[tuple[int, int], ...] = ()
    """First layer of each pipeline stage, and the one after its last."""
    rules: LayoutRules = LATEST_LAYOUT
    unmerged: tuple[KvGroup, ...] = ()
    """Layers of each kind before any are merged, padded or split: what older releases check at the start."""

    @property
    def is_hybrid(self) -> bool:
        """More than one group."""
        return len(self.groups) > 1

    def num_blocks(self, available_bytes: int | Sequence[int]) -> int:
        """Blocks that fit, the null block included: the least of all stages.  Bytes are those of one GPU a stage."""
        each = [available_bytes] * len(self.block_bytes) if isinstance(available_bytes, int) else list(available_bytes)
        if len(each) != len(self.block_bytes):
            raise ValueError(f"available_bytes must name {len(self.block_bytes)} stages, got {len(each)}")
        held = (available // block for available, block in zip(each, self.block_bytes, strict=True) if block)
        return max(min(held, default=0), 0)

    def blocks_of_request(self, num_tokens: int) -> int:
        """Blocks that one request of ``num_tokens`` takes in all groups together."""
        return sum(group.blocks_of_request(num_tokens, self.max_in_flight_tokens) for group in self.groups)

    def max_concurrency(self, num_blocks: int, max_model_len: int) -> float:
        """Requests of ``max_model_len`` that fit at once: the figure vLLM logs as "Maximum concurrency"."""
        return num_blocks / self.blocks_of_request(max_model_len)

    def logged_tokens(self, num_blocks: int, max_model_len: int, *, by_concurrency: bool = True) -> int:
        """What vLLM logs as "GPU KV cache size".

        int(concurrency * max_model_len) in 0.32; ``by_concurrency=False`` is num_blocks // groups * block_size, as
        earlier versions (0.13 to 0.20 at least) have it.
        """
        if by_concurrency:
            return int(self.max_concurrency(num_blocks, max_model_len) * max_model_len)
        sizes = [group.block_size for group in self.groups if group.kind != STATE or self.caches_states]
        if len(sizes) < len(self.groups):
            sizes.append(max_model_len)  # the block of a state that is not cached
        return num_blocks // len(self.groups) * min(sizes)

    def needed_bytes(self, num_tokens: int, stage: int) -> int:
        """What the start-up check holds a request of ``num_tokens`` to need on a GPU of that pipeline stage."""
        check = self.rules.start_check
        if check == "layers":
            start, end = self.stages[stage]
            return sum(
                group.blocks_of_request(num_tokens, self.max_in_flight_tokens) * group.bytes_in(start, end)
                for group in self.unmerged
            )
        if check == "groups":
            return self.blocks_of_request(num_tokens) * self.block_bytes[stage]
        block = self.block_bytes[stage]
        if check == "first group of all stages":
            block = max(sum(group.layer_page_bytes) for group in self.groups)
        return self.groups[0].blocks_of_request(num_tokens, self.max_in_flight_tokens) * block

    def max_state_sequences(self, num_blocks: int) -> int | None:
        """Sequences whose states the pool holds if each takes one block; None for a model without states in blocks.

        Since 0.20 vLLM refuses a ``max_num_seqs`` above its blocks ("exceeds available Mamba cache blocks") where it
        captures CUDA graphs of whole steps.
        """
        return num_blocks if any(group.kind == STATE for group in self.groups) else None


def kv_layout(
    model: ModelSpec,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    block_size: int = 16,
    kv_cache_dtype: str = "auto",
    max_num_batched_tokens: int = 8192,
    max_concurrent_batches: int = 2,
    enable_prefix_caching: bool = True,
    disable_hybrid_kv_cache_manager: bool = False,
    num_speculative_tokens: int = 0,
    rules: LayoutRules = LATEST_LAYOUT,
) -> KvLayout:
    """The groups and pages of ``model``, as the release with these rules has them.

    ``max_concurrent_batches`` is 2 with asynchronous scheduling (pipelines: their stages, one more with asynchronous
    scheduling); windows and chunks keep that many batches' tokens beside their own.  ``block_size`` is what the
    attention backend takes: 16 unless the user or the backend says otherwise.

    Raises ValueError for a split the model does not allow or an unknown ``kv_cache_dtype``; UnsupportedModel where
    vLLM itself cannot lay out the cache.
    """
    model.check_tensor_parallel_size(tensor_parallel_size)
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    wanted = _Wanted(
        model, tensor_parallel_size, block_size, kv_cache_dtype, enable_prefix_caching, num_speculative_tokens, rules
    )
    wanted = wanted._replace(block_size=_block_size_for_states(wanted))
    pages = _pages(wanted)
    merged = _merged(pages, rules, all_kinds=disable_hybrid_kv_cache_manager)
    if disable_hybrid_kv_cache_manager and merged and not _one_type(merged):
        raise UnsupportedModel(
            f"{model.name}: Hybrid KV cache manager is disabled but failed to convert the KV cache specs to one "
            "unified type: leave disable_hybrid_kv_cache_manager out"
        )
    groups = _groups(merged, model.name, rules)
    stages = tuple(
        layers_of_stage(model.num_layers, rank, pipeline_parallel_size) for rank in range(pipeline_parallel_size)
    )
    return KvLayout(
        tuple(groups),
        tuple(max((group.bytes_in(*stage) for group in groups), default=0) for stage in stages),
        wanted.block_size,
        max_num_batched_tokens * max_concurrent_batches,
        enable_prefix_caching,
        stages,
        rules,
        tuple(_group(kind) for kind in _kinds(pages)),
    )


class _Wanted(NamedTuple):
    model: ModelSpec
    size: int
    block_size: int
    kv_cache_dtype: str
    prefix_caching: bool
    num_speculative_tokens: int
    rules: LayoutRules


class _Page(NamedTuple):
    """The cache of one layer: what vLLM calls its KVCacheSpec, and the layer's number."""

    layer: int
    kind: str
    block_size: int
    page_bytes: int
    shape: tuple[int, ...]
    """What must be equal, beside kind, block and page, for layers to share a group."""
    reach: int = 0
    """Tokens of the window or the chunk."""
    state_blocks: int = 0

    @property
    def spec(self) -> tuple[object, ...]:
        return self[1:]


def _pages(wanted: _Wanted) -> list[_Page]:
    """One entry for every cache, in the order of the layers."""
    pages: list[_Page] = []
    padded = _padded_state_bytes(wanted)
    for index, layer in enumerate(wanted.model.decoder_layers):
        mixer = layer.mixer
        if isinstance(mixer, State) and wanted.rules.keeps_states:
            pages.append(_state_page(wanted, index, mixer, padded))
        if isinstance(mixer, ParallelMixer):
            pages.append(_token_page(wanted, index, replace(layer, mixer=mixer.attention)))
        elif mixer is not None and not isinstance(mixer, State):
            if token_page := _token_page(wanted, index, layer):
                pages.append(token_page)
            if indexer_bytes(layer):
                size = indexer_bytes(layer)
                pages.append(_Page(index, LATENT, wanted.block_size, size * wanted.block_size, (size,)))
    return pages


def _token_page(wanted: _Wanted, index: int, layer: Layer) -> _Page:
    size = latent_or_kv_bytes(wanted.model, layer, wanted.size, wanted.kv_cache_dtype)
    page, mixer, block = size * wanted.block_size, layer.mixer, wanted.block_size
    if not isinstance(mixer, Attention):
        return _Page(index, LATENT, block, page, (size,))
    shape = (mixer.kv_heads_per_gpu(wanted.size), mixer.head_dim, mixer.value_dim)
    if mixer.sliding_window and wanted.rules.windows != "full":
        return _Page(index, SLIDING, block, page, shape, mixer.sliding_window)
    if mixer.chunk_size and wanted.rules.chunks != "full":
        return _Page(index, CHUNKED, block, page, shape, mixer.chunk_size)
    return _Page(index, FULL, block, page, shape)


def _state_page(wanted: _Wanted, index: int, mixer: State, padded_bytes: int) -> _Page:
    size = _state_bytes(wanted, mixer)
    blocks = 1
    if wanted.rules.counts_state_blocks:
        blocks += wanted.num_speculative_tokens
        if wanted.prefix_caching:  # the state at the last block's end is kept beside the running one
            blocks += 1 + mixer.checkpoint_blocks * wanted.rules.counts_checkpoints
    return _Page(index, STATE, wanted.block_size, max(size, padded_bytes), (size,), state_blocks=blocks)


def _state_bytes(wanted: _Wanted, mixer: State) -> int:
    convolution, recurrent = mixer.state_elements(wanted.size, wanted.num_speculative_tokens)
    conv_bytes, recurrent_bytes = wanted.model.state_bytes
    default = wanted.model.dtype_bytes
    return convolution * (conv_bytes or default) + recurrent * (recurrent_bytes or default)


def _largest_state_bytes(wanted: _Wanted) -> int:
    mixers = dict.fromkeys(layer.mixer for layer in wanted.model.decoder_layers if isinstance(layer.mixer, State))
    return max((_state_bytes(wanted, mixer) for mixer in mixers), default=0)


def _full_token_bytes(wanted: _Wanted) -> int:
    """Bytes of a token in one full-attention layer; 0 for a model without any."""
    for layer in wanted.model.decoder_layers:
        mixer = layer.mixer.attention if isinstance(layer.mixer, ParallelMixer) else layer.mixer
        if isinstance(mixer, Attention | LatentAttention):
            return latent_or_kv_bytes(wanted.model, replace(layer, mixer=mixer), wanted.size, wanted.kv_cache_dtype)
    return 0


def _block_size_for_states(wanted: _Wanted) -> int:
    """The block size, lengthened until a page of attention holds a state (``_align_hybrid_block_size``)."""
    state, token = _largest_state_bytes(wanted), _full_token_bytes(wanted)
    if not state or not token or not wanted.rules.keeps_states:
        return wanted.block_size
    latent = any(isinstance(layer.mixer, LatentAttention) for layer in wanted.model.decoder_layers)
    unit = max(_SMALLEST_KERNEL_BLOCK, wanted.block_size, _LATENT_KERNEL_BLOCK if latent else 0)
    return max(wanted.block_size, unit * -(-state // (unit * token)))


def _padded_state_bytes(wanted: _Wanted) -> int:
    """A state takes a whole page of attention."""
    if not _largest_state_bytes(wanted):
        return 0
    return _full_token_bytes(wanted) * wanted.block_size


def _merged(pages: list[_Page], rules: LayoutRules, *, all_kinds: bool) -> list[_Page]:
    """Windows and chunks kept in full beside full attention, by the release or --disable-hybrid-kv-cache-manager."""
    if not any(page.kind == FULL for page in pages):
        return pages
    kinds = [
        kind for kind, rule in ((SLIDING, rules.windows), (CHUNKED, rules.chunks)) if all_kinds or rule == "merged"
    ]
    return [page._replace(kind=FULL, reach=0) if page.kind in kinds else page for page in pages]


def _groups(pages: list[_Page], name: str, rules: LayoutRules) -> list[KvGroup]:
    """As vLLM's ``get_kv_cache_groups``."""
    if not pages:
        return []
    if _one_type(pages):
        if not rules.mixes_layer_sizes and len({page.page_bytes for page in pages}) > 1:
            raise UnsupportedModel(
                f"{name}: its layers have keys and values of different sizes, for which vLLM cannot lay out a cache "
                "before 0.11: take a later release"
            )
        return [_group(pages)]
    return [_group(part) for part in _equal_parts(_with_equal_pages(pages, name, rules), rules.whole_factor)]


def _one_type(pages: list[_Page]) -> bool:
    """Whether all caches need the same number of token slots."""
    first = pages[0]
    if any(page.block_size != first.block_size for page in pages):
        return False
    if first.kind in (FULL, LATENT):
        return all(page.kind in (FULL, LATENT) for page in pages)
    same = all(page.kind == first.kind and page.reach == first.reach for page in pages)
    return same and (first.kind != STATE or all(page.page_bytes == first.page_bytes for page in pages))


def _with_equal_pages(pages: list[_Page], name: str, rules: LayoutRules) -> list[_Page]:
    """Smaller pages hold more tokens where they divide the largest, and are padded where they do not."""
    largest = max(page.page_bytes for page in pages)
    equal = []
    for page in pages:
        times, rest = divmod(largest, page.page_bytes)
        _check_page(page, largest, name, rules)
        if page.kind == STATE or (rest and page.kind != LATENT):
            equal.append(page._replace(page_bytes=largest))
        elif rest:
            raise UnsupportedModel(
                f"{name}: pages of latent attention ({page.page_bytes} bytes) do not divide the largest page "
                f"({largest} bytes): vLLM cannot lay out this cache"
            )
        else:
            equal.append(page._replace(page_bytes=largest, block_size=page.block_size * times))
    return equal


def _check_page(page: _Page, largest: int, name: str, rules: LayoutRules) -> None:
    """Refuse what releases before 0.24 cannot make equal."""
    allowed = {"equal": page.page_bytes == largest, "divisible": largest % page.page_bytes == 0}
    if not allowed.get(rules.page_sizes, True):
        since = "0.12 (where they divide) or 0.24" if rules.page_sizes == "equal" else "0.24"
        raise UnsupportedModel(
            f"{name}: pages of some layers ({page.page_bytes} bytes) differ from the largest ({largest} bytes), for "
            f"which vLLM cannot lay out a cache before {since}: take a later release"
        )


def _kinds(pages: Sequence[_Page]) -> list[list[_Page]]:
    """Layers with the same cache."""
    kinds: dict[tuple[object, ...], list[_Page]] = {}
    for page in pages:
        kinds.setdefault(page.spec, []).append(page)
    return list(kinds.values())


def _equal_parts(pages: list[_Page], whole_factor: float) -> list[list[_Page]]:
    """Layers of one kind, in parts of about as many layers as the rarest kind has."""
    kinds = _kinds(pages)
    counts = [len(members) for members in kinds]
    size = max(counts) if max(counts) < min(counts) * whole_factor else min(counts)
    parts = []
    for members in kinds:
        number = -(-len(members) // size)
        parts += [members[start::number] for start in range(number)]
    return parts


def _group(pages: list[_Page]) -> KvGroup:
    first = pages[0]
    return KvGroup(
        first.kind,
        first.block_size,
        tuple(page.page_bytes for page in pages),
        tuple(page.layer for page in pages),
        sliding_window=first.reach if first.kind == SLIDING else 0,
        chunk_size=first.reach if first.kind == CHUNKED else 0,
        state_blocks=first.state_blocks,
    )
