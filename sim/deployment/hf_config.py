"""From a Hugging Face ``config.json`` to a ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from windtunnel.sim.deployment.config_reader import ConfigReader
from windtunnel.sim.deployment.model_spec import DTYPE_BYTES, ModelSpec, UnsupportedModel
from windtunnel.sim.deployment.quantization import weight_format


def model_from_config(config: Mapping[str, Any], name: str, *, dtype: str = "auto") -> ModelSpec:
    """The ModelSpec that a Hugging Face ``config.json`` describes; a nested ``text_config`` is followed.

    ``dtype`` overrides the config's; a float32 checkpoint runs in bfloat16 under "auto", as in vLLM.

    Raises UnsupportedModel for what is not modelled (latent attention, effective sliding windows, state-space or
    linear attention, vision towers, unknown architectures and quantisations) and ValueError for a missing or
    impossible value.
    """
    text = _text_config(config, name)
    _refuse_unmodelled_attention(text, name)
    traits = _traits(text, name)
    read = ConfigReader(text, name)
    heads = read.whole("num_attention_heads")
    hidden = read.whole("hidden_size")
    head_dim = read.whole("head_dim", default=hidden // heads)
    positions = read.whole("max_position_embeddings")
    experts = _experts(read, traits)
    return ModelSpec(
        name=name,
        architecture=traits.architecture,
        num_layers=read.whole("num_hidden_layers", most=_MOST_LAYERS),
        hidden_size=hidden,
        intermediate_size=0 if experts.every_layer else read.whole(traits.intermediate_key),
        num_attention_heads=heads,
        num_key_value_heads=read.whole("num_key_value_heads", default=heads),
        head_dim=head_dim,
        vocab_size=read.whole("vocab_size"),
        max_position_embeddings=positions,
        max_model_len=_default_max_model_len(text, positions, name),
        tie_word_embeddings=bool(text.get("tie_word_embeddings", traits.tied_by_default)),
        dtype=_dtype(text, name) if dtype == "auto" else dtype,
        weight_format=weight_format(text, name),
        attention_bias=bool(traits.qkv_bias or text.get("attention_bias", False)),
        attention_output_bias=bool(traits.all_biases or text.get("attention_bias", False)),
        mlp_bias=bool(traits.all_biases or text.get("mlp_bias", False)),
        qk_norm=traits.qk_norm,
        gated_mlp=not traits.opt,
        norm_bias=traits.opt,
        num_learned_positions=positions + _OPT_POSITION_OFFSET if traits.opt else 0,
        rotary_dim=0 if traits.opt else int(head_dim * read.number("partial_rotary_factor", 1.0)),
        num_experts=experts.num_experts,
        num_experts_per_tok=experts.per_token,
        moe_intermediate_size=experts.width,
        num_moe_layers=experts.num_layers,
        shared_expert_intermediate_size=experts.shared_width,
    )


class _Traits(NamedTuple):
    """What an architecture does that its config does not say."""

    architecture: str
    moe: bool = False
    qkv_bias: bool = False
    all_biases: bool = False
    qk_norm: bool = False
    opt: bool = False
    tied_by_default: bool = False

    @property
    def intermediate_key(self) -> str:
        return "ffn_dim" if self.opt else "intermediate_size"


ARCHITECTURES = {
    traits.architecture: traits
    for traits in (
        _Traits("LlamaForCausalLM"),
        _Traits("MistralForCausalLM"),
        _Traits("GraniteForCausalLM"),
        _Traits("Phi3ForCausalLM"),
        _Traits("Qwen2ForCausalLM", qkv_bias=True),
        _Traits("Qwen2MoeForCausalLM", moe=True, qkv_bias=True),
        _Traits("Qwen3ForCausalLM", qk_norm=True),
        _Traits("Qwen3MoeForCausalLM", moe=True, qk_norm=True),
        _Traits("MixtralForCausalLM", moe=True),
        _Traits("OPTForCausalLM", qkv_bias=True, all_biases=True, opt=True, tied_by_default=True),
    )
}

_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "granite": "GraniteForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "opt": "OPTForCausalLM",
}

_MOST_LAYERS = 100_000
_OPT_POSITION_OFFSET = 2
"""OPT's position table begins two rows late."""

_UNMODELLED_KEYS = {
    "kv_lora_rank": "multi-head latent attention",
    "linear_num_key_heads": "linear attention",
    "mamba_d_state": "Mamba layers",
    "mamba_num_heads": "Mamba layers",
    "ssm_state_size": "state-space layers",
    "attention_chunk_size": "chunked local attention",
    "index_topk": "sparse attention",
}

_FACTOR_NOT_APPLIED = ("su", "longrope", "llama3")
"""Rope types whose max_position_embeddings already is the stretched length."""


def _text_config(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    for tower in ("vision_config", "audio_config"):
        if config.get(tower):
            raise UnsupportedModel(
                f"{name}: the config has a {tower}, and the weights of that tower are not modelled yet: give the "
                "text model's own config to plan the language part alone"
            )
    outer = {key: config[key] for key in _INHERITED_KEYS if key in config}
    return {**outer, **inner}


_INHERITED_KEYS = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config", "model_type")


def _traits(config: Mapping[str, Any], name: str) -> _Traits:
    named = ConfigReader(config, name).listed("architectures")
    architecture = str(named[0]) if named else _MODEL_TYPES.get(str(config.get("model_type", "")).removesuffix("_text"))
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    what = architecture or config.get("model_type") or "none named"
    raise UnsupportedModel(
        f"{name}: architecture {what} is not modelled; its weights and KV cache would be guesses.  "
        f"Modelled: {', '.join(ARCHITECTURES)}"
    )


def _refuse_unmodelled_attention(config: Mapping[str, Any], name: str) -> None:
    for key, what in _UNMODELLED_KEYS.items():
        if config.get(key):
            raise UnsupportedModel(f"{name}: not modelled yet: {what} ({key} = {config[key]})")
    read = ConfigReader(config, name)
    window = read.number("sliding_window", 0)
    effective = window and config.get("use_sliding_window", True)
    if effective and window < read.whole("max_position_embeddings"):
        raise UnsupportedModel(f"{name}: sliding-window attention (sliding_window = {window:g}) is not modelled yet")
    for kind in read.listed("layer_types"):
        if kind != "full_attention":
            raise UnsupportedModel(f"{name}: layers of type {kind} are not modelled yet, only full_attention")
    if config.get("word_embed_proj_dim", config.get("hidden_size")) != config.get("hidden_size"):
        raise UnsupportedModel(f"{name}: embeddings narrower than hidden_size (word_embed_proj_dim) are not modelled")
    if config.get("model_type") == "opt" and not config.get("do_layer_norm_before", True):
        raise UnsupportedModel(f"{name}: OPT with norms after the blocks is not modelled")


class _Experts(NamedTuple):
    num_experts: int = 0
    per_token: int = 0
    width: int = 0
    shared_width: int = 0
    num_layers: int = 0
    every_layer: bool = False


def _experts(read: ConfigReader, traits: _Traits) -> _Experts:
    if not traits.moe:
        return _Experts()
    config, layers = read.config, read.whole("num_hidden_layers", most=_MOST_LAYERS)
    every = read.whole("decoder_sparse_step", default=1)
    dense = read.listed("mlp_only_layers")
    sparse_layers = sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % every == 0)
    num_experts = read.whole("num_local_experts" if "num_local_experts" in config else "num_experts")
    return _Experts(
        num_experts=num_experts,
        per_token=read.whole("num_experts_per_tok"),
        width=read.whole("moe_intermediate_size", default=read.whole("intermediate_size")),
        shared_width=read.whole("shared_expert_intermediate_size", default=0, least=0),
        num_layers=sparse_layers,
        every_layer=sparse_layers == layers,
    )


def _dtype(config: Mapping[str, Any], name: str) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{name}: dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    return "bfloat16" if dtype == "float32" else dtype


def _default_max_model_len(config: Mapping[str, Any], positions: int, name: str) -> int:
    """vLLM's default context: YaRN counts from the original length, plain factors from the stated one."""
    read = ConfigReader(config, name)
    scaling = ConfigReader(read.table("rope_scaling") or read.table("rope_parameters"), f"{name}, rope scaling")
    kind = scaling.config.get("rope_type") or scaling.config.get("type") or "default"
    if scaling.config.get("factor") is None or kind in _FACTOR_NOT_APPLIED:
        return positions
    base = scaling.whole("original_max_position_embeddings", default=positions) if kind == "yarn" else positions
    factor = scaling.number("factor", 1.0)
    if not base * factor >= 1:
        raise ValueError(f"{name}: rope scaling factor must be positive, got {factor:g}")
    return int(base * factor)
