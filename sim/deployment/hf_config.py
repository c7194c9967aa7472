"""From a Hugging Face ``config.json`` to a ModelSpec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from windtunnel.sim.deployment.config_reader import ConfigReader
from windtunnel.sim.deployment.families import ARCHITECTURES, Config, Traits
from windtunnel.sim.deployment.layers import Attention, LatentAttention, Layer, ParallelMixer, State
from windtunnel.sim.deployment.model_spec import DTYPE_BYTES, ModelSpec, UnsupportedModel
from windtunnel.sim.deployment.quantization import storage
from windtunnel.sim.deployment.towers import towers

__all__ = ["ARCHITECTURES", "WRAPPERS", "model_from_config"]


def model_from_config(config: Mapping[str, Any], name: str, *, dtype: str = "auto") -> ModelSpec:
    """The ModelSpec that a Hugging Face ``config.json`` describes; a nested ``text_config`` is followed.

    ``dtype`` overrides the config's; a float32 checkpoint runs in bfloat16 under "auto", as in vLLM.

    Raises UnsupportedModel for what is not modelled (unknown architectures, layers and quantisations) and ValueError,
    naming key and value, for a missing or impossible value.
    """
    text = _text_config(config)
    named = _named(config, text, name)
    parts = Config(ConfigReader(text, name), named.traits)
    layers = parts.traits.layers(parts)
    if not layers:
        raise ValueError(f"{name}: num_hidden_layers must be at least 1, got 0")
    model = _model(parts, named.architecture, tuple(layers), dtype)
    stored = storage(text, name)
    beside = towers(config, model.hidden_size, name)
    return _plain(
        replace(
            model,
            weight_format=stored.format,
            format_rules=stored.rules,
            head_format=None if model.tie_word_embeddings else stored.head_format,
            kv_cache_dtype=stored.kv_cache_dtype,
            towers=beside.parameters,
            not_counted=(*beside.not_counted, *_extra_modules(text)),
            rotary_tables=_rotary_tables(parts, model),
        )
    )


class _Named(NamedTuple):
    architecture: str
    traits: Traits


WRAPPERS = {
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
}
"""Multimodal architectures, and that of their language model."""

_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MistralForCausalLM",
    "ministral3": "MistralForCausalLM",
    "granite": "GraniteForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "opt": "OPTForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
}

_NULL_SAYS_NONE = ("sliding_window",)
"""Keys whose null is a statement, and not the same as leaving them out."""
_INHERITED_KEYS = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config", "model_type")

_REFUSED = {
    "DeepseekV4ForCausalLM": "attention to compressed tokens, with caches of many kinds in one block",
    "DeepseekV41ForCausalLM": "attention to compressed tokens, with caches of many kinds in one block",
    "KimiK3ForConditionalGeneration": "Kimi delta attention",
    "KimiLinearForCausalLM": "Kimi delta attention",
    "MiniMaxM3ForCausalLM": "block-sparse attention with an index",
    "MiniMaxM3SparseForConditionalGeneration": "block-sparse attention with an index",
    "MiniMaxM1ForCausalLM": "lightning attention",
    "WhisperForConditionalGeneration": "an encoder and cross-attention",
    "Gemma3nForConditionalGeneration": "embeddings of each layer and shared caches",
}
"""What keeps some well-known architectures out."""

_FACTOR_NOT_APPLIED = ("su", "longrope", "llama3")
"""Rope types whose max_position_embeddings already is the stretched length."""


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    outer = {key: config[key] for key in _INHERITED_KEYS if key in config}
    given = {key: value for key, value in inner.items() if value is not None or key in _NULL_SAYS_NONE}
    return {**outer, **given}


def _named(config: Mapping[str, Any], text: Mapping[str, Any], name: str) -> _Named:
    """The architecture of the language model, by its own name, that of the whole, or its model_type."""
    whole, own = (_first_architecture(table, name) for table in (config, text))
    kind = str(text.get("model_type", "")).removesuffix("_text").replace("_vl", "")
    by_type = _MODEL_TYPES.get(kind, "") if text is not config or not whole else ""
    for architecture in (own, WRAPPERS.get(whole, ""), whole, by_type):
        if architecture in ARCHITECTURES:
            return _Named(architecture, ARCHITECTURES[architecture])
    what = str(whole or text.get("model_type") or "none named")[:60]
    reason = next((f" ({_REFUSED[each]})" for each in (whole, own) if each in _REFUSED), "")
    raise UnsupportedModel(
        f"{name}: architecture {what} is not modelled{reason}, so its weights and KV cache would be guesses; "
        "docs/limits.md lists those that are"
    )


def _first_architecture(config: Mapping[str, Any], name: str) -> str:
    named = ConfigReader(config, name).listed("architectures")
    return str(named[0]) if named else ""


def _model(parts: Config, architecture: str, layers: tuple[Layer, ...], dtype: str) -> ModelSpec:
    """The model with both its layers and the fields that give their usual shape."""
    text, traits, read = parts.values, parts.traits, parts.read
    _refuse_odd_opt(parts, architecture)
    attention = _usual_attention(layers)
    experts = next((layer.experts for layer in layers if layer.experts is not None), None)
    mlp = max((layer.mlp for layer in layers if layer.mlp is not None), key=lambda mlp: mlp.width, default=None)
    positions, heads = parts.max_positions, parts.heads
    plain = attention if isinstance(attention, Attention) else None
    return ModelSpec(
        name=parts.name,
        architecture=architecture,
        num_layers=len(layers),
        hidden_size=parts.hidden_size,
        intermediate_size=mlp.width if mlp else 0,
        num_attention_heads=heads,
        num_key_value_heads=parts.kv_heads if plain is None else plain.num_kv_heads,
        head_dim=_head_dim(attention, parts),
        vocab_size=read.whole("vocab_size"),
        max_position_embeddings=positions,
        max_model_len=_default_max_model_len(text, positions, parts.name),
        tie_word_embeddings=parts.flag("tie_word_embeddings", traits.tied_by_default),
        dtype=_dtype(text, parts.name) if dtype == "auto" else dtype,
        attention_bias=bool(plain and plain.bias),
        attention_output_bias=bool(plain and plain.output_bias),
        mlp_bias=bool(mlp and mlp.bias),
        qk_norm=bool(plain and plain.qk_norm == "head"),
        gated_mlp=traits.gated_mlp,
        norm_bias=traits.norm_bias,
        num_learned_positions=positions + traits.learned_positions if traits.learned_positions >= 0 else 0,
        rotary_dim=_rotary_dim(attention, parts),
        num_experts=experts.num_experts if experts else 0,
        num_experts_per_tok=experts.num_per_token if experts else 0,
        moe_intermediate_size=experts.width if experts else 0,
        num_moe_layers=sum(1 for layer in layers if layer.experts is not None),
        shared_expert_intermediate_size=experts.shared_width if experts else 0,
        layers=layers,
        on_every_stage=traits.on_every_stage,
        state_bytes=(0, _state_bytes(parts, layers)),
    )


def _plain(model: ModelSpec) -> ModelSpec:
    """The model without its list of layers where the other fields say the same."""
    if not model.intermediate_size and model.num_moe_layers < model.num_layers:
        return model
    bare = replace(model, layers=())
    if model.format_rules:
        return bare if bare.decoder_layers == model.layers else model
    return bare if Counter(bare.decoder_layers) == Counter(model.layers) else model


def _usual_attention(layers: tuple[Layer, ...]) -> Attention | LatentAttention | None:
    """The attention of the first layer that sees all, or of the first that sees anything."""
    found: list[Attention | LatentAttention] = []
    for layer in layers:
        mixer = layer.mixer.attention if isinstance(layer.mixer, ParallelMixer) else layer.mixer
        if isinstance(mixer, Attention | LatentAttention):
            found.append(mixer)
    full = (each for each in found if not (isinstance(each, Attention) and (each.sliding_window or each.chunk_size)))
    return next(full, found[0] if found else None)


def _head_dim(attention: Attention | LatentAttention | None, parts: Config) -> int:
    if isinstance(attention, LatentAttention):
        return attention.qk_nope_head_dim + attention.qk_rope_head_dim
    return attention.head_dim if attention else parts.head_dim


def _rotary_dim(attention: Attention | LatentAttention | None, parts: Config) -> int:
    """Dimensions of a head that are turned; 0 for a model without rotary positions."""
    if attention is None or not parts.traits.rotary or parts.values.get("position_embedding_type") == "nope":
        return 0
    if isinstance(attention, LatentAttention):
        return attention.qk_rope_head_dim
    if parts.values.get("rotary_dim") is not None:
        return parts.read.whole("rotary_dim")
    rope = _rope(parts.values, parts.name)
    if _kind(rope) == "proportional":  # all dimensions are in the table, some with a frequency of 0
        return attention.head_dim
    share = rope.number("partial_rotary_factor", 1.0)
    share = parts.read.number("partial_rotary_factor", share)
    if not 0 <= share <= 1:
        raise ValueError(f"{parts.name}: partial_rotary_factor must lie in [0, 1], got {share:g}")
    return int(attention.head_dim * share)


_VIDEO_POSITIONS = 4
"""vLLM lengthens the table of Qwen2-VL and Qwen2.5-VL by this, because positions follow the length of a video."""


def _rotary_tables(parts: Config, model: ModelSpec) -> tuple[tuple[int, int, int], ...]:
    """Tables of sines and cosines, () where it is one of the usual kind."""
    rows, dim, traits = model.max_model_len, model.rotary_dim, parts.traits
    element = traits.rotary_bytes or model.dtype_bytes
    if "mrope_section" in _rope(parts.values, parts.name).config and "qwen2" in str(parts.values.get("model_type")):
        return ((rows * _VIDEO_POSITIONS, dim, element),)
    if traits.rotary_tables == 1 and not traits.rotary_bytes:
        return ()
    if traits.rotary_tables == 1:
        return ((rows, dim, element),)
    widths = {mixer.head_dim: None for layer in model.layers if isinstance(mixer := layer.mixer, Attention)}
    if len(widths) > 1 and dim == model.head_dim:
        return tuple((rows, width, element) for width in widths)
    stretch = _rope(parts.values, parts.name)
    factor = stretch.number("factor", 1.0) if _kind(stretch) == "linear" else 1.0
    return ((rows, dim, element), (int(rows * max(factor, 1.0)), dim, element))


def _state_bytes(parts: Config, layers: tuple[Layer, ...]) -> int:
    """Bytes of an element of the recurrent state; 0 is the model's dtype (vLLM's mamba_ssm_cache_dtype "auto")."""
    if not any(isinstance(layer.mixer, State) for layer in layers):
        return 0
    dtype = parts.values.get("mamba_ssm_cache_dtype" if parts.traits.state_dtype else "mamba_ssm_dtype")
    dtype = str(dtype or parts.traits.state_dtype or "")
    if dtype and dtype not in DTYPE_BYTES:
        raise ValueError(f"{parts.name}: the state's dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r:.40}")
    return DTYPE_BYTES[dtype] if dtype else 0


_EXTRA_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def _extra_modules(text: Mapping[str, Any]) -> tuple[str, ...]:
    """Layers that predict further tokens: vLLM loads them only for speculative decoding."""
    key = next((key for key in _EXTRA_LAYERS if text.get(key)), None)
    return (f"prediction layers ({key} = {text[key]!s:.20}), loaded only for speculative decoding",) if key else ()


def _refuse_odd_opt(parts: Config, architecture: str) -> None:
    if architecture != "OPTForCausalLM":
        return
    if parts.values.get("word_embed_proj_dim", parts.hidden_size) != parts.hidden_size:
        raise UnsupportedModel(
            f"{parts.name}: embeddings narrower than hidden_size (word_embed_proj_dim) are not modelled"
        )
    if not parts.flag("do_layer_norm_before", True):
        raise UnsupportedModel(f"{parts.name}: OPT with norms after the blocks is not modelled")


def _dtype(config: Mapping[str, Any], name: str) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{name}: dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r:.60}")
    return "bfloat16" if dtype == "float32" else dtype


def _rope(config: Mapping[str, Any], name: str) -> ConfigReader:
    """The rope scaling, of the full-attention layers where each kind has its own."""
    read = ConfigReader(config, name)
    table = read.table("rope_scaling") or read.table("rope_parameters")
    inner = table.get("full_attention")
    return ConfigReader(inner if isinstance(inner, Mapping) else table, f"{name}, rope scaling")


_ROPE_TYPES = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "longrope",
    "su",
    "llama3",
    "proportional",
    "mrope",
    "mllama4",
    "ntk",
    "deepseek_yarn",
    "deepseek_llama_scaling",
    "telechat3-yarn",
)
"""Kinds of rope scaling that vLLM 0.32 or an earlier release takes: ``get_rope`` in ``model_executor/layers/
rotary_embedding`` and ``patch_legacy_rope_type`` in ``transformers_utils/config.py``."""


def _kind(scaling: ConfigReader) -> str:
    kind = str(scaling.config.get("rope_type") or scaling.config.get("type") or "default")
    if kind not in _ROPE_TYPES:
        raise ValueError(
            f"{scaling.name}: vLLM refuses it: Unknown RoPE scaling type {kind!s:.40}; it must be one of "
            f"{', '.join(_ROPE_TYPES)}"
        )
    return kind


def _default_max_model_len(config: Mapping[str, Any], positions: int, name: str) -> int:
    """vLLM's default context: YaRN counts from the original length, plain factors from the stated one.

    Gemma 3 states the stretched length.
    """
    scaling = _rope(config, name)
    kind = _kind(scaling)
    gemma3 = "gemma3" in str(config.get("model_type", ""))
    if scaling.config.get("factor") is None or kind in _FACTOR_NOT_APPLIED or gemma3:
        return positions
    base = scaling.whole("original_max_position_embeddings", default=positions) if kind == "yarn" else positions
    factor = scaling.number("factor", 1.0)
    if not base * factor >= 1:
        raise ValueError(f"{name}: rope scaling factor must be positive, got {factor:g}")
    return int(base * factor)
