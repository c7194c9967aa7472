"""The shapes of a decoder, read from a Hugging Face config.json: Llama, Mistral, Qwen2 and Qwen3 (dense)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from windtunnel.executor.rope import RopeConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Supported architectures and their ``model_type``."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder with RMSNorm, rotary embeddings, grouped-query attention and a SiLU-gated MLP.

    Names are those of config.json.  With ``tp_size`` above 1 all fields still describe the whole model; the
    ``local_`` properties are what one rank holds.

    Raises ValueError, naming the field and its value, for shapes that do not fit together.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    """Biases on the projections to queries, keys and values."""
    o_bias: bool = False
    """A bias on attention's output projection."""
    mlp_bias: bool = False
    """Biases in the MLP."""
    qk_norm: bool = False
    """RMSNorm of each head of queries and keys before the rotation (Qwen3)."""
    tie_word_embeddings: bool = False
    """The output projection is the embedding table."""
    sliding_window: int | None = None
    """Tokens that a token can see, if not all; sequences must not be longer, because no kernel here has windows."""
    architecture: str = "LlamaForCausalLM"
    dtype: str = "bfloat16"
    """Type of the weights as published, in torch's words."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer."""
    bos_token_id: int | None = None
    tp_size: int = 1
    """Ranks that share the model (tensor parallelism)."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "tp_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, because elements are rotated in pairs, got {self.head_dim}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        self._check_shards()

    def _check_shards(self) -> None:
        for name in ("num_attention_heads", "intermediate_size", "vocab_size"):
            if getattr(self, name) % self.tp_size:
                raise ValueError(f"{name} ({getattr(self, name)}) must be a multiple of tp_size ({self.tp_size})")
        if self.num_key_value_heads % self.tp_size and self.tp_size % self.num_key_value_heads:
            raise ValueError(
                f"tp_size ({self.tp_size}) must divide num_key_value_heads ({self.num_key_value_heads}) "
                "or be a multiple of it"
            )

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> DecoderConfig:
        """From a config.json: its content, its path, or the folder of the model.

        Raises ValueError, naming what is unsupported and what is supported, for any other kind of model, and naming
        the key for one that is missing; FileNotFoundError where there is no such file.
        """
        config = source if isinstance(source, Mapping) else _read_config(Path(source))
        architecture = _architecture(config)
        _refuse_what_is_not_built(config, architecture)
        heads = _whole(config, "num_attention_heads")
        hidden = _whole(config, "hidden_size")
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            vocab_size=_whole(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_whole(config, "intermediate_size"),
            num_hidden_layers=_whole(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or (128 if architecture == "Qwen3ForCausalLM" else hidden // heads)),
            max_position_embeddings=_whole(config, "max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(config),
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            o_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            sliding_window=_sliding_window(config, architecture),
            architecture=architecture,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            eos_token_ids=_token_ids(config.get("eos_token_id")),
            bos_token_id=config.get("bos_token_id"),
        )

    def shard(self, tp_size: int) -> DecoderConfig:
        """The same model shared among ``tp_size`` ranks.

        Heads, the MLP's inner size and the vocabulary of the output projection are split; KV heads are replicated
        where there are fewer than ranks.  The embedding table is whole on every rank.

        Raises ValueError for shapes that cannot be split.
        """
        return replace(self, tp_size=tp_size)

    @property
    def local_num_attention_heads(self) -> int:
        """Query heads of one rank."""
        return self.num_attention_heads // self.tp_size

    @property
    def local_num_key_value_heads(self) -> int:
        """KV heads of one rank."""
        return max(1, self.num_key_value_heads // self.tp_size)

    @property
    def local_intermediate_size(self) -> int:
        """Inner size of one rank's MLP."""
        return self.intermediate_size // self.tp_size

    @property
    def local_vocab_size(self) -> int:
        """Columns of one rank's logits."""
        return self.vocab_size // self.tp_size

    @property
    def max_model_len(self) -> int:
        """Longest sequence that the model can take here, in tokens."""
        longest = self.rope.max_positions(self.max_position_embeddings)
        return min(longest, self.sliding_window) if self.sliding_window else longest

    def check_max_model_len(self, max_model_len: int) -> None:
        """Raises ValueError if sequences of that many tokens are too long for the model."""
        if max_model_len < 1:
            raise ValueError(f"max_model_len must be at least 1, got {max_model_len}")
        if self.sliding_window and max_model_len > self.sliding_window:
            raise ValueError(
                f"max_model_len ({max_model_len}) exceeds the model's sliding window of {self.sliding_window} tokens, "
                f"and attention with windows is not built: lower max_model_len to at most {self.sliding_window}"
            )
        if max_model_len > self.max_model_len:
            raise ValueError(
                f"max_model_len ({max_model_len}) exceeds the {self.max_model_len} positions that the model knows: "
                f"lower it to at most {self.max_model_len}"
            )


def _read_config(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file}: no such file; give a Hugging Face config.json or the folder that holds it"
        ) from None
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file}: must hold a JSON object, got {type(config).__name__}")
    generation = file.with_name("generation_config.json")
    if generation.is_file():
        ends = _token_ids(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id"))
        config["eos_token_id"] = list(dict.fromkeys([*_token_ids(config.get("eos_token_id")), *ends]))
    return config


def _architecture(config: Mapping[str, Any]) -> str:
    named = list(config.get("architectures") or [])
    if not named:
        named = [name for name, kind in ARCHITECTURES.items() if kind == config.get("model_type")]
    if len(named) != 1 or named[0] not in ARCHITECTURES:
        what = ", ".join(map(str, named)) or config.get("model_type") or "a config without architectures"
        raise ValueError(
            f"{what} is not supported by the executor: use a model that is one of {', '.join(ARCHITECTURES)}"
        )
    return str(named[0])


def _refuse_what_is_not_built(config: Mapping[str, Any], architecture: str) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown method")
        raise ValueError(
            f"quantised weights ({method}) are not supported by the executor: use the unquantised model "
            "(float32, float16 or bfloat16)"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported by the executor: only 'silu' is")
    parameters = config.get("rope_parameters") or {}
    rotated = float(config.get("partial_rotary_factor") or parameters.get("partial_rotary_factor") or 1.0)
    if rotated != 1.0:
        raise ValueError(f"partial_rotary_factor {rotated} is not supported by the executor: only 1.0 is")
    if config.get("mlp_bias") and architecture != "LlamaForCausalLM":
        raise ValueError(f"mlp_bias is not supported for {architecture}: only for LlamaForCausalLM")


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int | None:
    """The window, if any layer has one."""
    window = config.get("sliding_window")
    layers = config.get("layer_types")
    if window is None or (layers is not None and "sliding_attention" not in layers):
        return None
    if architecture.startswith("Qwen") and not config.get("use_sliding_window", False):
        return None
    return int(window) if architecture != "LlamaForCausalLM" else None


def _whole(config: Mapping[str, Any], key: str) -> int:
    if config.get(key) is None:
        raise ValueError(f"the model's config lacks {key}: give a complete config.json")
    return int(config[key])


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)
