"""Folders of models without weights: a configuration and a tokenizer, for servers with ``--load-format dummy``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

VOCAB_SIZE = 8192
FIRST_WORD_ID = 3
MAX_POSITIONS = 4096


class ModelSize(NamedTuple):
    """Dimensions of a Llama."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int


PACED = ModelSize(hidden_size=128, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=256)
"""So small that its forward pass takes a fraction of the time that a paced step is held."""
BARE = ModelSize(hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=4, intermediate_size=2048)
"""Large enough that a step on one CPU core takes some tens of milliseconds, as on a real card."""


def make_model(folder: Path, size: ModelSize) -> Path:
    """Write the folder; each token of its tokenizer is a word, so that every id can be told as text."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", _config(size)),
        ("tokenizer.json", _tokenizer()),
        ("tokenizer_config.json", _tokenizer_config()),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def _config(size: ModelSize) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.hidden_size // size.num_heads,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _tokenizer() -> dict[str, object]:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(FIRST_WORD_ID, VOCAB_SIZE)}}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": word, **special} for word, i in list(words.items())[:FIRST_WORD_ID]],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": MAX_POSITIONS,
    }
