"""Decoder layers of the architectures that are modelled, from the keys of their configs.

What an architecture does that its config does not say stands in ``ARCHITECTURES``; it was read off, and is checked
against, the modules that vLLM 0.32 builds for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from windtunnel.sim.deployment.config_reader import ConfigReader
from windtunnel.sim.deployment.layers import (
    FLOAT32_BYTES,
    Attention,
    Experts,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    Layer,
    Mamba1,
    Mamba2,
    Mlp,
    ParallelMixer,
)
from windtunnel.sim.deployment.model_spec import UnsupportedModel

MOST_LAYERS = 10_000


class Windows(NamedTuple):
    """What the config class of an architecture, and its modules in vLLM, make of sliding windows.

    Source: ``configuration_*.py`` of Transformers 5, the modules of vLLM 0.32, and its ``create_engine_config``: a
    model whose modules ask for no window of their own has one in all layers or in none.
    """

    size: int = 0
    """sliding_window of a config without that key; null is none."""
    every: int = 0
    """Full attention in every so many-th layer of a config that says nothing of its layers; 0 is windows in all."""
    switched: bool = False
    """use_sliding_window is false where the config does not have it."""
    all_or_none: bool = False
    """No window where layer_types names a layer without one."""
    first_key: str = ""
    """The key with the first layer that has a window."""
    first: int = 0
    """That layer where the key is missing."""


class Traits(NamedTuple):
    """What an architecture does that its config does not say."""

    layers: Callable[[Config], list[Layer]]
    qkv_bias: bool = False
    output_bias: bool = False
    output_follows_bias: bool = False
    """attention_bias puts a bias on the output projection, too."""
    mlp_bias: bool = False
    qk_norm: str = ""
    optional_qk_norm: str = ""
    """The norm that use_qk_norm asks for."""
    gated_mlp: bool = True
    norm_bias: bool = False
    norms: int = 2
    """Norms of hidden_size in each layer."""
    tied_by_default: bool = False
    shared_gate: bool = False
    router_bytes: int = 0
    router_bias_bytes: int = 0
    intermediate_key: str = "intermediate_size"
    shared_module: str = "shared_experts"
    learned_positions: int = -1
    """Rows of a learned position table beyond max_position_embeddings; -1 for rotary positions."""
    rotary: bool = True
    """Keeps a table of sines and cosines; False without rotary positions, and where vLLM runs Transformers' own
    modules, which compute them anew."""
    rotary_tables: int = 1
    """Tables of sines and cosines: two where layers of two kinds turn differently."""
    rotary_bytes: int = 0
    """Bytes of an element of these tables; 0 follows the model."""
    on_every_stage: tuple[str, ...] = ()
    """What vLLM puts on every stage of a pipeline."""
    state_dtype: str = ""
    """Type of recurrent states where the config does not give mamba_ssm_cache_dtype; "" is the model's."""
    windows: Windows = Windows()


class Config(NamedTuple):
    """A model's config with what its architecture adds to it."""

    read: ConfigReader
    traits: Traits

    @property
    def values(self) -> Mapping[str, Any]:
        """The config's table."""
        return self.read.config

    @property
    def name(self) -> str:
        """The model."""
        return self.read.name

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.read.whole("hidden_size")

    @property
    def num_layers(self) -> int:
        """Decoder layers; where the config does not count them, as many as it lists."""
        listed = self.read.listed("layers_block_type") or self.read.listed("layer_types")
        return self.read.whole("num_hidden_layers", default=len(listed) or None, most=MOST_LAYERS)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.read.whole("num_attention_heads")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        least = self.read.whole("attention_head_dim", default=self.hidden_size // self.heads)
        return self.read.whole("head_dim", default=least)

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.read.whole("num_key_value_heads", default=self.heads)

    def first(self, *keys: str, default: int | None = None, least: int = 0) -> int:
        """The first of several spellings that the config has."""
        key = next((key for key in keys if self.values.get(key) is not None), keys[0])
        return self.read.whole(key, default=default, least=least)

    def flag(self, key: str, default: bool = False) -> bool:
        """A switch; null is the default."""
        return self.read.switch(key, default)

    def per_layer(self, key: str) -> Sequence[Any]:
        """A list with one entry a layer; () where there is none."""
        listed = self.read.listed(key)
        if listed and len(listed) != self.num_layers:
            raise ValueError(
                f"{self.name}: {key} has {len(listed)} entries for {self.num_layers} layers (num_hidden_layers): it "
                "must have one for each"
            )
        return listed

    def dense(self, width: int | None = None) -> Mlp:
        """A dense block."""
        bias = self.traits.mlp_bias or self.flag("mlp_bias")
        return Mlp(width or self.read.whole(self.traits.intermediate_key), self.traits.gated_mlp, bias)

    def norm_elements(self, norms: int | None = None) -> int:
        """Weights of the norms of one layer."""
        each = self.hidden_size * (2 if self.traits.norm_bias else 1)
        return each * (self.traits.norms if norms is None else norms)

    def attention(self, kind: str = "full_attention") -> Attention:
        """The attention of one layer; ``kind`` as in layer_types."""
        biased = self.flag("attention_bias")
        return Attention(
            self.heads,
            self.kv_heads,
            self.head_dim,
            sliding_window=self.window if kind == "sliding_attention" else 0,
            chunk_size=self.read.whole("attention_chunk_size") if kind == "chunked_attention" else 0,
            bias=self.traits.qkv_bias or biased or self.flag("qkv_bias") or self.flag("use_qkv_bias"),
            output_bias=self.traits.output_bias or (biased and self.traits.output_follows_bias),
            qk_norm=self.qk_norm,
        )

    @property
    def qk_norm(self) -> str:
        """Norms of queries and keys; optional ones where the config asks for them."""
        optional = self.traits.optional_qk_norm if self.flag("use_qk_norm") else ""
        return self.traits.qk_norm or optional

    @property
    def window(self) -> int:
        """Tokens of a sliding window, where there is one; 0 for none."""
        if not self.flag("use_sliding_window", not self.traits.windows.switched):
            return 0
        if "sliding_window" not in self.values:
            return 0 if self.values.get("model_type") in _WITHOUT_WINDOW else self.traits.windows.size
        return self.read.whole("sliding_window", default=0, least=0)

    @property
    def max_positions(self) -> int:
        """Positions of the model."""
        return self.read.whole("max_position_embeddings")

    def kinds(self) -> list[str]:
        """The kind of attention of each layer, by layer_types, a pattern, or a window for all."""
        listed = self._listed_kinds()
        for kind in listed:
            if kind not in _KINDS:
                raise UnsupportedModel(
                    f"{self.name}: layers of type {kind} are not modelled; these are: {', '.join(_KINDS)}"
                )
        self._check_mixed(listed)
        window = self.window
        is_mixed = self.traits.windows.all_or_none and "full_attention" in listed
        if is_mixed or not 0 < window < self.max_positions:  # a window as long as the context is none
            return ["full_attention" if kind == "sliding_attention" else kind for kind in listed]
        return listed

    def _listed_kinds(self) -> list[str]:
        if self.values.get("layer_types") == []:
            raise ValueError(
                f"{self.name}: layer_types is empty: it must have one for each of {self.num_layers} layers"
            )
        return [str(kind) for kind in self.per_layer("layer_types")] or self._patterned()

    def _patterned(self) -> list[str]:
        windows = self.traits.windows
        every = self.first("sliding_window_pattern", "_sliding_window_pattern", default=windows.every)
        if every:
            return ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(self.num_layers)]
        start = self.first(windows.first_key, default=windows.first) if windows.first_key else 0
        return ["full_attention" if i < start else "sliding_attention" for i in range(self.num_layers)]

    def _check_mixed(self, kinds: Sequence[str]) -> None:
        """Refuse windows behind the first layers, which no release of vLLM loads."""
        windows = self.traits.windows
        if not self.window or not windows.first_key or len(dict.fromkeys(kinds)) < 2:
            return
        start = self.first(windows.first_key, default=windows.first)
        if start != self.num_layers:
            raise UnsupportedModel(
                f"{self.name}: vLLM does not load it: Sliding window for some but all layers is not supported. This "
                f"model uses sliding window but `{windows.first_key}` = {start} is less than `num_hidden_layers` = "
                f"{self.num_layers}."
            )

    def experts(self) -> Experts:
        """The mixture of experts of one layer."""
        width = self.first("moe_intermediate_size", self.traits.intermediate_key, least=1)
        traits = self.traits
        return Experts(
            self.first("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", least=1),
            self.first("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", least=1),
            width,
            traits.gated_mlp,
            shared_width=self.shared_width(width),
            shared_gate=traits.shared_gate and self.shared_width(width) > 0,
            router_bytes=traits.router_bytes,
            router_bias_bytes=traits.router_bias_bytes,
            shared_module=traits.shared_module if self.shared_width(width) else "shared_expert",
        )

    def shared_width(self, width: int) -> int:
        """Width of all shared experts together."""
        for key in ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"):
            if self.values.get(key):
                return self.read.whole(key)
        if self.values.get("shared_intermediate_size") is not None:
            return self.read.whole("shared_intermediate_size", least=0)
        return width * self.first("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0)

    def sparse_layers(self) -> list[bool]:
        """Which layers are mixtures of experts, by any of the keys in use."""
        count = self.num_layers
        if self.read.listed("mlp_layer_types"):
            return [kind == "sparse" for kind in self.per_layer("mlp_layer_types")]
        if isinstance(self.values.get("moe_layer_freq"), list):
            return [bool(value) for value in self.per_layer("moe_layer_freq")]
        if self.values.get("moe_layers") is not None:
            chosen = self.read.listed("moe_layers")
            return [i in chosen for i in range(count)]
        if "interleave_moe_layer_step" in self.values:
            step = self.read.whole("interleave_moe_layer_step", least=0)
            return [step > 0 and (i + 1) % step == 0 for i in range(count)]
        first = self.first("first_k_dense_replace", "moe_layer_start_index", default=0)
        freq = self.read.whole("moe_layer_freq", default=1)
        step = self.read.whole("decoder_sparse_step", default=1)
        dense = self.read.listed("mlp_only_layers")
        return [i >= first and i % freq == 0 and (i + 1) % step == 0 and i not in dense for i in range(count)]


_WITHOUT_WINDOW = ("ministral3",)
"""Types of models whose config class has no window by default, unlike others of their architecture."""
_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


_NOT_IN_PLAIN_LAYERS = {
    "kv_lora_rank": "latent attention",
    "linear_num_key_heads": "linear attention",
    "mamba_d_state": "Mamba layers",
    "mamba_num_heads": "Mamba layers",
    "ssm_state_size": "state-space layers",
    "attention_chunk_size": "chunked local attention",
    "index_topk": "sparse attention",
    "sparse_attention_config": "sparse attention",
}


def _check_is_plain(config: Config) -> None:
    """Refuse keys that this architecture does not know, because they would change its layers."""
    for key, what in _NOT_IN_PLAIN_LAYERS.items():
        if config.values.get(key):
            raise UnsupportedModel(
                f"{config.name}: {what} ({key} = {config.values[key]!s:.40}) is not modelled in this architecture"
            )


def _dense(config: Config) -> list[Layer]:
    """Attention and a dense block in each layer."""
    return [
        Layer(config.attention(kind), config.dense(), norm_elements=config.norm_elements())
        for kind in _without_linear(config)
    ]


def _sparse(config: Config) -> list[Layer]:
    """Attention, and experts or a dense block, in each layer."""
    sparse = config.sparse_layers()
    return [
        Layer(
            config.attention(kind),
            config.experts() if sparse[i] else config.dense(),
            norm_elements=config.norm_elements(),
        )
        for i, kind in enumerate(_without_linear(config))
    ]


def _without_linear(config: Config) -> list[str]:
    _check_is_plain(config)
    kinds = config.kinds()
    if "linear_attention" in kinds:
        raise UnsupportedModel(f"{config.name}: linear_attention layers are not modelled in this architecture")
    return kinds


def _smollm3(config: Config) -> list[Layer]:
    """Windows, where switched on, in the layers without rotary positions."""
    if config.values.get("layer_types") is not None or not config.window:
        return _dense(config)
    every = config.first("no_rope_layer_interval", default=4, least=1)
    rotary = config.per_layer("no_rope_layers") or [(i + 1) % every for i in range(config.num_layers)]
    kinds = ["full_attention" if turned else "sliding_attention" for turned in rotary]
    return _dense(Config(ConfigReader({**config.values, "layer_types": kinds}, config.name), config.traits))


def _gemma3(config: Config) -> list[Layer]:
    """Heads of 256 unless the config says otherwise."""
    return _dense(Config(ConfigReader({"head_dim": 256, **config.values}, config.name), config.traits))


def _gemma4(config: Config) -> list[Layer]:
    """Windows with one kind of heads, full attention with another, and experts beside the dense block."""
    for key, what in (("hidden_size_per_layer_input", "embeddings of each layer"), ("num_kv_shared_layers", "caches")):
        if config.values.get(key):
            raise UnsupportedModel(f"{config.name}: shared or extra {what} ({key}) are not modelled")
    moe = config.flag("enable_moe_block")
    scalars = 1  # layer_scalar
    hidden = config.hidden_size
    experts = None
    if moe:
        experts = config.experts()
        experts = replace(experts, router_scales=hidden + experts.num_experts)
    return [
        Layer(
            _gemma4_attention(config, kind),
            config.dense(),
            experts,
            config.norm_elements(7 if moe else 4) + scalars,
        )
        for kind in _without_linear(config)
    ]


def _gemma4_attention(config: Config, kind: str) -> Attention:
    if kind == "sliding_attention":
        return config.attention(kind)
    same = config.flag("attention_k_eq_v")
    kv_heads = config.first("num_global_key_value_heads", default=config.kv_heads) if same else config.kv_heads
    return Attention(
        config.heads,
        kv_heads,
        config.first("global_head_dim", default=config.head_dim),
        qk_norm="head",
        value_is_key=same,
    )


def _gpt_oss(config: Config) -> list[Layer]:
    """Windows in every other layer, sinks, and experts with biases everywhere."""
    experts = Experts(
        config.first("num_local_experts", "num_experts", least=1),
        config.first("num_experts_per_tok", "experts_per_token", least=1),
        config.read.whole("intermediate_size"),
        bias=True,
        router_bias_bytes=2,
    )
    heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
    windows = {"sliding_attention": config.window, "full_attention": 0}
    return [
        Layer(
            Attention(heads, kv_heads, dim, sliding_window=windows[kind], bias=True, output_bias=True, sinks=True),
            experts,
            norm_elements=config.norm_elements(),
        )
        for kind in _without_linear(config)
    ]


def _llama4(config: Config) -> list[Layer]:
    """Chunks in three of four layers; experts beside a shared one of the same width."""
    full = config.per_layer("no_rope_layers") or [
        int((i + 1) % config.first("no_rope_layer_interval", default=4) != 0) for i in range(config.num_layers)
    ]
    chunk = config.first("attention_chunk_size", default=0)
    width = config.read.whole("intermediate_size")
    experts = Experts(
        config.read.whole("num_local_experts"),
        config.read.whole("num_experts_per_tok"),
        width,
        shared_width=width,
        shared_module="shared_expert",
    )
    dense = config.dense(config.first("intermediate_size_mlp", default=width))
    sparse = config.sparse_layers()
    plain = Attention(config.heads, config.kv_heads, config.head_dim)
    chunked = Attention(config.heads, config.kv_heads, config.head_dim, chunk_size=chunk)
    return [
        Layer(
            chunked if full[i] and chunk else plain,
            experts if sparse[i] else dense,
            norm_elements=config.norm_elements(),
        )
        for i in range(config.num_layers)
    ]


def _deepseek(config: Config) -> list[Layer]:
    """Latent attention (or plain, as in the first DeepSeek-MoE), and experts after some dense layers."""
    owned = _indexers(config)
    sparse = config.sparse_layers()
    experts = config.experts()
    if config.values.get("topk_method", "noaux_tc" if config.traits.router_bias_bytes else "") != "noaux_tc":
        experts = replace(experts, router_bias_bytes=0)
    return [
        Layer(
            _latent(config, own_indexer=owned[i]) if config.values.get("kv_lora_rank") else config.attention(),
            experts if sparse[i] else config.dense(),
            norm_elements=config.norm_elements(),
        )
        for i in range(config.num_layers)
    ]


def _indexers(config: Config) -> list[bool]:
    """Which layers have an indexer of their own."""
    kinds = config.per_layer("indexer_types")
    return [kind == "full" for kind in kinds] if kinds else [True] * config.num_layers


def _latent(config: Config, *, own_indexer: bool) -> LatentAttention:
    sparse = config.values.get("index_topk") is not None
    return LatentAttention(
        config.heads,
        config.read.whole("kv_lora_rank"),
        config.read.whole("qk_nope_head_dim"),
        config.read.whole("qk_rope_head_dim"),
        config.read.whole("v_head_dim"),
        config.first("q_lora_rank", default=0),
        sparse,
        config.read.whole("index_n_heads") if sparse and own_indexer else 0,
        config.read.whole("index_head_dim") if sparse and own_indexer else 0,
    )


def _mimo_v2(config: Config) -> list[Layer]:
    """Windows with other heads than full attention, and values narrower than keys."""
    pattern = config.per_layer("hybrid_layer_pattern")
    if not pattern:
        raise ValueError(f"{config.name}: the config lacks hybrid_layer_pattern")
    sparse = config.sparse_layers()
    full = Attention(config.heads, config.kv_heads, config.head_dim, config.first("v_head_dim", default=0))
    windowed = Attention(
        config.read.whole("swa_num_attention_heads", default=config.heads),
        config.read.whole("swa_num_key_value_heads"),
        config.read.whole("swa_head_dim", default=config.head_dim),
        config.first("swa_v_head_dim", "v_head_dim", default=0),
        sliding_window=config.first("sliding_window_size", "sliding_window", least=1),
        sinks=config.flag("add_swa_attention_sink_bias"),
    )
    return [
        Layer(
            windowed if pattern[i] else full,
            config.experts() if sparse[i] else config.dense(),
            norm_elements=config.norm_elements(),
        )
        for i in range(config.num_layers)
    ]


def _qwen3_next(config: Config) -> list[Layer]:
    """Gated delta rule in three of four layers; gated attention in the others."""
    every = config.first("full_attention_interval", default=4, least=1)
    kinds = [str(kind) for kind in config.per_layer("layer_types")] or [
        "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(config.num_layers)
    ]
    linear = GatedDeltaNet(
        config.read.whole("linear_num_key_heads"),
        config.read.whole("linear_num_value_heads"),
        config.read.whole("linear_key_head_dim"),
        config.read.whole("linear_value_head_dim"),
        config.read.whole("linear_conv_kernel_dim"),
    )
    gated = config.flag("attn_output_gate", True)
    attention = Attention(config.heads, config.kv_heads, config.head_dim, qk_norm="head", output_gate=gated)
    sparse = config.sparse_layers() if config.first("num_experts", default=0) else [False] * config.num_layers
    return [
        Layer(
            linear if kind == "linear_attention" else attention,
            config.experts() if sparse[i] else config.dense(),
            norm_elements=config.norm_elements(),
            mixer_name="linear_attn" if kind == "linear_attention" else "self_attn",
        )
        for i, kind in enumerate(kinds)
    ]


def _nemotron_h(config: Config) -> list[Layer]:
    """Each layer is one of Mamba-2, attention, a dense block or experts."""
    mamba = Mamba2(
        config.read.whole("mamba_num_heads"),
        config.read.whole("mamba_head_dim"),
        config.first("n_groups", "mamba_n_groups", least=1),
        config.read.whole("ssm_state_size"),
        config.read.whole("conv_kernel"),
        config.flag("use_conv_bias", True),
        config.flag("mamba_proj_bias"),
    )
    norm = config.norm_elements(1)
    return [_nemotron_h_layer(config, kind, mamba, norm) for kind in _nemotron_h_kinds(config)]


_NEMOTRON_H_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron_h_kinds(config: Config) -> list[str]:
    pattern = config.values.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        unknown = next((letter for letter in pattern if letter not in _NEMOTRON_H_KINDS), "")
        if unknown or len(pattern) != config.num_layers:
            raise ValueError(
                f"{config.name}: hybrid_override_pattern must have one of {' '.join(_NEMOTRON_H_KINDS)} for each of "
                f"{config.num_layers} layers, got {len(pattern)}{f' and {unknown!r}' if unknown else ''}"
            )
        return [_NEMOTRON_H_KINDS[letter] for letter in pattern]
    kinds = [str(kind) for kind in config.per_layer("layers_block_type")]
    if not kinds:
        raise ValueError(f"{config.name}: the config lacks hybrid_override_pattern or layers_block_type")
    return kinds


def _nemotron_h_layer(config: Config, kind: str, mamba: Mamba2, norm: int) -> Layer:
    if kind == "mamba":
        return Layer(mamba, norm_elements=norm, mixer_name="mixer")
    if kind == "attention":
        return Layer(config.attention(), norm_elements=norm, mixer_name="mixer")
    if kind == "mlp":
        return Layer(None, config.dense(), norm_elements=norm, feed_forward_name="mixer")
    if kind != "moe":
        raise UnsupportedModel(f"{config.name}: layers of type {kind} are not modelled in this architecture")
    width = config.read.whole("moe_intermediate_size")
    experts = Experts(
        config.read.whole("n_routed_experts"),
        config.read.whole("num_experts_per_tok"),
        width,
        gated=False,
        shared_width=config.shared_width(width) if config.first("n_shared_experts", default=1) else 0,
        latent_size=config.first("moe_latent_size", default=0),
        router_bytes=FLOAT32_BYTES,
        router_bias_bytes=FLOAT32_BYTES,
    )
    return Layer(None, experts, norm_elements=norm, feed_forward_name="mixer")


def _granite_hybrid(config: Config) -> list[Layer]:
    """Mamba-2 or attention, then experts beside a shared one (or only that)."""
    return [
        Layer(
            _mamba2(config, "mamba_") if kind == "mamba" else config.attention(),
            *_granite_blocks(config),
            norm_elements=config.norm_elements(),
            mixer_name="mamba" if kind == "mamba" else "self_attn",
            also_name="shared_mlp",
        )
        for kind in _mamba_kinds(config)
    ]


def _granite_blocks(config: Config) -> tuple[FeedForward | None, FeedForward | None]:
    shared = config.first("shared_intermediate_size", default=0)
    experts = None
    if config.first("num_local_experts", default=0):
        experts = Experts(
            config.read.whole("num_local_experts"),
            config.read.whole("num_experts_per_tok"),
            config.read.whole("intermediate_size"),
        )
    return experts, Mlp(shared) if shared else None


def _granite_moe(config: Config) -> list[Layer]:
    return [
        Layer(
            config.attention(), *_granite_blocks(config), norm_elements=config.norm_elements(), also_name="shared_mlp"
        )
        for _ in range(config.num_layers)
    ]


def _mamba_kinds(config: Config) -> list[str]:
    """ "mamba" or "attention" for each layer."""
    kinds = [str(kind) for kind in config.per_layer("layer_types") or config.per_layer("layers_block_type")]
    if not kinds:
        where = config.read.listed("attn_layer_indices")
        kinds = ["attention" if i in where else "mamba" for i in range(config.num_layers)]
    unknown = next((kind for kind in kinds if kind not in ("mamba", "attention")), None)
    if unknown is not None:
        raise UnsupportedModel(f"{config.name}: layers of type {unknown} are not modelled in this architecture")
    return kinds


def _mamba2(config: Config, prefix: str) -> Mamba2:
    return Mamba2(
        config.read.whole(f"{prefix}n_heads"),
        config.read.whole(f"{prefix}d_head"),
        config.read.whole(f"{prefix}n_groups", default=1),
        config.read.whole(f"{prefix}d_state"),
        config.read.whole(f"{prefix}d_conv"),
        config.flag(f"{prefix}conv_bias", True),
        config.flag(f"{prefix}proj_bias"),
        config.flag(f"{prefix}rms_norm", True),
    )


def _bamba(config: Config) -> list[Layer]:
    return [
        Layer(
            _mamba2(config, "mamba_") if kind == "mamba" else config.attention(),
            config.dense(),
            norm_elements=config.norm_elements(),
            mixer_name="mamba" if kind == "mamba" else "self_attn",
        )
        for kind in _mamba_kinds(config)
    ]


def _falcon_h1(config: Config) -> list[Layer]:
    """Attention and Mamba-2 side by side."""
    mamba = _mamba2(config, "mamba_")
    inner = config.first("mamba_d_ssm", default=mamba.inner_size)
    if inner != mamba.inner_size:
        raise ValueError(
            f"{config.name}: mamba_d_ssm ({inner}) must be mamba_n_heads * mamba_d_head ({mamba.inner_size})"
        )
    mixer = ParallelMixer(config.attention(), mamba)
    return [Layer(mixer, config.dense(), norm_elements=config.norm_elements()) for _ in range(config.num_layers)]


def _jamba(config: Config) -> list[Layer]:
    """Mamba-1 with attention in one of eight layers and experts in every other."""
    period, offset = config.read.whole("attn_layer_period"), config.read.whole("attn_layer_offset", least=0)
    every, start = config.read.whole("expert_layer_period"), config.read.whole("expert_layer_offset", least=0)
    inner = config.read.whole("mamba_expand") * config.hidden_size
    rank = config.values.get("mamba_dt_rank")
    mamba = Mamba1(
        inner,
        config.read.whole("mamba_d_state"),
        config.read.whole("mamba_d_conv"),
        -(-config.hidden_size // 16) if rank in (None, "auto") else config.read.whole("mamba_dt_rank"),
        config.flag("mamba_conv_bias", True),
        config.flag("mamba_proj_bias"),
    )
    return [
        Layer(
            config.attention() if i % period == offset else mamba,
            config.experts() if i % every == start and config.first("num_experts", default=1) > 1 else config.dense(),
            norm_elements=config.norm_elements(),
            mixer_name="self_attn" if i % period == offset else "mamba",
        )
        for i in range(config.num_layers)
    ]


def _deci(config: Config) -> list[Layer]:
    """Layers of a searched architecture, each with its own heads and width or without a part."""
    blocks = config.per_layer("block_configs")
    if not blocks:
        raise ValueError(f"{config.name}: the config lacks block_configs")
    layers = []
    for index, block in enumerate(blocks):
        reader = ConfigReader({"block": block}, f"{config.name}, block_configs[{index}]")
        attention = ConfigReader(ConfigReader(reader.table("block"), reader.name).table("attention"), reader.name)
        ffn = ConfigReader(ConfigReader(reader.table("block"), reader.name).table("ffn"), reader.name)
        for part in (attention, ffn):
            if part.config.get("replace_with_linear"):
                raise UnsupportedModel(f"{part.name}: parts replaced by a linear layer are not modelled")
        layers.append(_deci_layer(config, attention, ffn))
    return layers


def _deci_layer(config: Config, attention: ConfigReader, ffn: ConfigReader) -> Layer:
    mixer = None
    if not attention.config.get("no_op"):
        group = attention.whole("n_heads_in_group")
        mixer = Attention(config.heads, max(config.heads // group, 1), config.head_dim)
    block = None
    if not ffn.config.get("no_op"):
        exact = int(2 * ffn.number("ffn_mult", 1.0) * config.hidden_size / 3)
        block = Mlp(-(-exact // 256) * 256)
    return Layer(mixer, block, norm_elements=config.norm_elements((mixer is not None) + (block is not None)))


_ALL = ("embedding", "head", "norm")
_EMBEDDING = ("embedding", "norm")
_QWEN_WINDOWS = Windows(4096, switched=True, all_or_none=True, first_key="max_window_layers", first=28)

ARCHITECTURES: dict[str, Traits] = {
    "LlamaForCausalLM": Traits(_dense, output_follows_bias=True),
    "MistralForCausalLM": Traits(_dense, output_follows_bias=True, windows=Windows(4096)),
    "SmolLM3ForCausalLM": Traits(_smollm3, tied_by_default=True, rotary=False, windows=Windows(switched=True)),
    "GraniteForCausalLM": Traits(_dense, output_follows_bias=True),
    "Phi3ForCausalLM": Traits(_dense, output_follows_bias=True),
    "MiMoForCausalLM": Traits(_dense, qkv_bias=True, windows=_QWEN_WINDOWS),
    "Qwen2ForCausalLM": Traits(_dense, qkv_bias=True, windows=_QWEN_WINDOWS),
    "Qwen2MoeForCausalLM": Traits(
        _sparse,
        qkv_bias=True,
        shared_gate=True,
        shared_module="shared_expert",
        on_every_stage=_ALL,
        windows=Windows(4096, every=2, switched=True, all_or_none=True),
    ),
    "Qwen3ForCausalLM": Traits(_dense, qk_norm="head", windows=_QWEN_WINDOWS),
    "Qwen3MoeForCausalLM": Traits(
        _sparse,
        qk_norm="head",
        shared_gate=True,
        shared_module="shared_expert",
        on_every_stage=_ALL,
        windows=Windows(4096, switched=True, all_or_none=True),
    ),
    "MixtralForCausalLM": Traits(_sparse, on_every_stage=_ALL),
    "OPTForCausalLM": Traits(
        _dense,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        norm_bias=True,
        tied_by_default=True,
        intermediate_key="ffn_dim",
        learned_positions=2,
        rotary=False,
        on_every_stage=("embedding", "positions", "norm"),
    ),
    "Starcoder2ForCausalLM": Traits(
        _dense,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        norm_bias=True,
        tied_by_default=True,
        rotary=False,
    ),
    "GemmaForCausalLM": Traits(_dense, tied_by_default=True, on_every_stage=_EMBEDDING),
    "Gemma2ForCausalLM": Traits(
        _dense, norms=4, tied_by_default=True, on_every_stage=_EMBEDDING, windows=Windows(4096, every=2)
    ),
    "Gemma3ForCausalLM": Traits(
        _gemma3,
        norms=4,
        qk_norm="head",
        tied_by_default=True,
        rotary_tables=2,
        on_every_stage=_EMBEDDING,
        windows=Windows(4096, every=6),
    ),
    "Gemma4ForCausalLM": Traits(
        _gemma4,
        norms=4,
        qk_norm="head",
        tied_by_default=True,
        rotary_tables=2,
        on_every_stage=_EMBEDDING,
        windows=Windows(512, every=6),
    ),
    "CohereForCausalLM": Traits(
        _dense, norms=1, tied_by_default=True, optional_qk_norm="all", on_every_stage=_EMBEDDING
    ),
    "Cohere2ForCausalLM": Traits(
        _dense,
        norms=1,
        tied_by_default=True,
        optional_qk_norm="all",
        on_every_stage=_EMBEDDING,
        windows=Windows(4096, every=4),
    ),
    "Olmo2ForCausalLM": Traits(_dense, qk_norm="whole", rotary=False),
    "Olmo3ForCausalLM": Traits(_dense, qk_norm="whole", rotary=False, windows=Windows(4096, every=4)),
    "OlmoeForCausalLM": Traits(_sparse, qk_norm="whole", on_every_stage=_ALL),
    "Glm4ForCausalLM": Traits(_dense, norms=4),
    "Glm4MoeForCausalLM": Traits(
        _sparse, optional_qk_norm="head", router_bytes=FLOAT32_BYTES, router_bias_bytes=FLOAT32_BYTES
    ),
    "GptOssForCausalLM": Traits(
        _gpt_oss, rotary_bytes=FLOAT32_BYTES, on_every_stage=_ALL, windows=Windows(128, every=2)
    ),
    "Llama4ForCausalLM": Traits(_llama4),
    "DeepseekForCausalLM": Traits(_deepseek),
    "DeepseekV2ForCausalLM": Traits(_deepseek),
    "DeepseekV3ForCausalLM": Traits(_deepseek, router_bias_bytes=FLOAT32_BYTES),
    "DeepseekV32ForCausalLM": Traits(_deepseek, router_bias_bytes=FLOAT32_BYTES, rotary_tables=2),
    "GlmMoeDsaForCausalLM": Traits(_deepseek, router_bias_bytes=FLOAT32_BYTES, rotary_tables=1),
    "Glm4MoeLiteForCausalLM": Traits(_deepseek, router_bias_bytes=FLOAT32_BYTES, router_bytes=FLOAT32_BYTES),
    "SarvamMLAForCausalLM": Traits(_deepseek, router_bias_bytes=FLOAT32_BYTES),
    "MiniMaxM2ForCausalLM": Traits(_sparse, qk_norm="all", router_bytes=FLOAT32_BYTES, router_bias_bytes=FLOAT32_BYTES),
    "MiMoV2FlashForCausalLM": Traits(
        _mimo_v2, router_bytes=FLOAT32_BYTES, router_bias_bytes=FLOAT32_BYTES, rotary_tables=2
    ),
    "Qwen3NextForCausalLM": Traits(
        _qwen3_next, shared_gate=True, shared_module="shared_expert", on_every_stage=("embedding", "head")
    ),
    "Qwen3_5ForCausalLM": Traits(_qwen3_next, on_every_stage=("embedding",)),
    "Qwen3_5MoeForCausalLM": Traits(
        _qwen3_next, shared_gate=True, shared_module="shared_expert", on_every_stage=("embedding",)
    ),
    "NemotronHForCausalLM": Traits(
        _nemotron_h, gated_mlp=False, norms=1, rotary=False, state_dtype="float32", on_every_stage=_ALL
    ),
    "DeciLMForCausalLM": Traits(_deci),
    "GraniteMoeForCausalLM": Traits(_granite_moe, on_every_stage=_EMBEDDING),
    "GraniteMoeSharedForCausalLM": Traits(_granite_moe, on_every_stage=_EMBEDDING),
    "GraniteMoeHybridForCausalLM": Traits(_granite_hybrid, on_every_stage=_EMBEDDING),
    "BambaForCausalLM": Traits(_bamba),
    "FalconH1ForCausalLM": Traits(_falcon_h1),
    "JambaForCausalLM": Traits(_jamba, rotary=False, on_every_stage=_ALL),
}
"""By the name in "architectures"."""
