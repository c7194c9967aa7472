"""The executors that ``windtunnel measure`` makes: a model, its weights and a KV cache on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.executor.server.executors import ExecutorUnavailable, ModelExecutors, unavailable_text
from windtunnel.sim.deployment.model import read_model_config, short_name
from windtunnel.sim.engine.config import SchedulerConfig

if TYPE_CHECKING:
    from windtunnel.executor.model_config import DecoderConfig
    from windtunnel.sim.engine.protocols import Executor

SMALL_MODEL = "small-cpu-model"
"""Name of the model that is measured on a CPU unless another one is named."""
SMALL_MODEL_CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
"""15.7 million parameters in the proportions of a Llama: a step takes milliseconds on one thread."""
_KV_CACHE_BYTES = 2**30
"""KV cache where neither blocks nor a GPU's memory say how large it is."""
_GPU_SHARE = 0.8
"""Of the GPU's free memory that weights and KV cache may take; the rest is for graphs and activations."""


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model that can be measured."""

    name: str
    config: Mapping[str, Any]
    """Its config.json."""
    folder: Path | None = None
    """Where its weights may be; without any they are random."""

    @property
    def digest(self) -> str:
        """Tells models of one name apart."""
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:16]

    def decoder_config(self) -> DecoderConfig:
        """The model as executors that compute it see it; raises ValueError for one that they do not know."""
        from windtunnel.executor.model_config import DecoderConfig

        try:
            return DecoderConfig.from_hf(self.config)
        except ValueError as error:
            hint = "" if self.folder else "; a bundled config has only what a simulation needs: give the model's folder"
            raise ValueError(f"{error}{hint}") from error


def find_model(name_or_path: str | None) -> MeasuredModel:
    """A bundled model by its name, one by its config.json or folder, or the built-in small one.

    Raises ValueError for a model that is not there, OSError for one that cannot be read.
    """
    if name_or_path is None or name_or_path == SMALL_MODEL:
        return MeasuredModel(SMALL_MODEL, SMALL_MODEL_CONFIG)
    config, folder = read_model_config(name_or_path)
    return MeasuredModel(short_name(name_or_path), config, folder)


def num_kv_blocks(
    decoder: DecoderConfig,
    kind: str,
    *,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
) -> int:
    """Blocks of the KV cache: as many as all seats can use, as far as the memory holds them.

    On a CPU that is 1 GiB; on a GPU 80 % of what is free beside the weights, if torch can tell.
    """
    from windtunnel.executor.server.memory import need

    weights_bytes, cache_bytes = _itemsize(dtype, kind, decoder), _itemsize(kv_cache_dtype, kind, decoder, dtype)
    needed = need(decoder, block_size, weights_bytes, cache_bytes)
    memory_bytes = _KV_CACHE_BYTES if kind == "torch" else _free_gpu_bytes() - needed.weights_bytes
    most_useful = max_num_seqs * -(-max_model_len // block_size) + 1
    return max(2, min(memory_bytes // needed.block_bytes, most_useful))


def make_executor(
    model: MeasuredModel,
    kind: str,
    config: SchedulerConfig,
    *,
    clock: str,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    num_threads: int = 1,
    seed: int = 0,
) -> Executor:
    """An executor of that kind ("torch" or "triton") for steps of that configuration.

    Raises ExecutorUnavailable, which says what is missing and what would help.
    """
    try:
        makers = ModelExecutors(
            model.decoder_config(),
            model.folder,
            config,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            seed=seed,
            num_threads=num_threads,
            clock=clock,
        )
        reason = makers.why_not(kind)
        if reason is None:
            return makers.make(kind)
    except (OSError, ValueError) as error:
        raise ExecutorUnavailable(unavailable_text(kind, str(error))) from error
    raise ExecutorUnavailable(unavailable_text(kind, reason))


def _free_gpu_bytes() -> int:
    import torch

    return int(_GPU_SHARE * torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else _KV_CACHE_BYTES


def _itemsize(dtype: str, kind: str, decoder: DecoderConfig, fallback: str = "auto") -> int:
    name = next((each for each in (dtype, fallback) if each != "auto"), "float32" if kind == "torch" else decoder.dtype)
    if name.startswith("fp8"):
        return 1
    return 2 if name in ("half", "float16", "bfloat16") else 4
