"""The shapes of a decoder, read from a Hugging Face config.json: Llama, Mistral, Qwen2 and Qwen3 (dense)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from windtunnel.executor.model_files import (
    ModelFileError,
    flag,
    number,
    number_or_none,
    read_generation_config,
    read_json_object,
    section,
    token_ids,
    whole,
)
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
        if not 0.0 < self.rms_norm_eps < math.inf:
            raise ValueError(f"rms_norm_eps must be a finite number above 0, got {self.rms_norm_eps}")
        outside = [token for token in self.eos_token_ids if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(f"eos_token_ids must be in [0, vocab_size = {self.vocab_size}), got {outside}")
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

        Raises ModelFileError (a ValueError), naming the file and the key, for a config that is missing, incomplete or
        malformed, and ValueError, naming what is unsupported and what is supported, for any other kind of model.
        """
        if isinstance(source, Mapping):
            return cls._from_config(source)
        file = _config_file(Path(source))
        try:
            config = cls._from_config(read_json_object(file))
        except ModelFileError as error:
            told = str(error)
            raise ModelFileError(told if told.startswith(str(file)) else f"{file}: {told}") from None
        ends = read_generation_config(file.parent, config.vocab_size).eos_token_ids
        return replace(config, eos_token_ids=tuple(dict.fromkeys([*config.eos_token_ids, *ends])))

    @classmethod
    def _from_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        architecture = _architecture(config)
        _refuse_what_is_not_built(config, architecture)
        heads, hidden, vocab = (whole(config, key) for key in ("num_attention_heads", "hidden_size", "vocab_size"))
        attention_bias = flag(config, "attention_bias")
        bos = token_ids(config, "bos_token_id")
        return cls(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=whole(config, "intermediate_size"),
            num_hidden_layers=whole(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=whole(config, "num_key_value_heads", heads),
            head_dim=whole(config, "head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // heads),
            max_position_embeddings=whole(config, "max_position_embeddings"),
            rms_norm_eps=number(config, "rms_norm_eps", 1e-6, above=0.0),
            rope=RopeConfig.from_hf(config),
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            o_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
            mlp_bias=flag(config, "mlp_bias"),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tie_word_embeddings=flag(config, "tie_word_embeddings"),
            sliding_window=_sliding_window(config, architecture),
            architecture=architecture,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            eos_token_ids=token_ids(config, "eos_token_id", vocab),
            bos_token_id=bos[0] if bos else None,
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


def _config_file(path: Path) -> Path:
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise ModelFileError(f"{file}: no such file; give a Hugging Face config.json or the folder that holds it")
    return file


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ModelFileError(f"architectures must be a list of names, got {named!r}: correct the config")
    if not named:
        named = [name for name, kind in ARCHITECTURES.items() if kind == config.get("model_type")]
    if len(named) != 1 or named[0] not in ARCHITECTURES:
        what = ", ".join(named) or config.get("model_type") or "a config without architectures"
        raise ValueError(
            f"{what} is not supported by the executor: use a model that is one of {', '.join(ARCHITECTURES)}"
        )
    return str(named[0])


def _refuse_what_is_not_built(config: Mapping[str, Any], architecture: str) -> None:
    quantization = section(config, "quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown method")
        raise ValueError(
            f"quantised weights ({method}) are not supported by the executor: use the unquantised model "
            "(float32, float16 or bfloat16)"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported by the executor: only 'silu' is")
    for source in (config, section(config, "rope_parameters")):
        rotated = number_or_none(source, "partial_rotary_factor")
        if rotated is not None and rotated != 1.0:
            raise ValueError(f"partial_rotary_factor {rotated} is not supported by the executor: only 1.0 is")
    if flag(config, "mlp_bias") and architecture != "LlamaForCausalLM":
        raise ValueError(f"mlp_bias is not supported for {architecture}: only for LlamaForCausalLM")


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int | None:
    """The window, if any layer has one."""
    layers = config.get("layer_types")
    if layers is not None and not isinstance(layers, list):
        raise ModelFileError(f"layer_types must be a list, got {layers!r}: correct the config")
    if config.get("sliding_window") is None or architecture == "LlamaForCausalLM":
        return None
    if layers is not None and "sliding_attention" not in layers:
        return None
    if architecture.startswith("Qwen") and not flag(config, "use_sliding_window"):
        return None
    return whole(config, "sliding_window")
