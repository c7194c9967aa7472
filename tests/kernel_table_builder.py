"""Small kernel tables in the packages' formats, made of a simple machine's times: a fixed part, bytes and FLOPs."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from windtunnel.sim.deployment.model_spec import ModelSpec
from windtunnel.sim.engine.plan import StepShape

FIXED_S = 5e-6
BANDWIDTH = 2e12
FLOPS = 5e14
HEAD_DIM = 128


def tiny_model(**changes: Any) -> ModelSpec:
    """Two layers of Llama's kind that split over up to four cards."""
    shapes: dict[str, Any] = {
        "name": "tiny/Tiny-1B",
        "architecture": "LlamaForCausalLM",
        "num_layers": 2,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": HEAD_DIM,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "max_model_len": 8192,
    }
    return ModelSpec(**{**shapes, **changes})


def gemm_s(m: Any, n: Any, k: Any) -> Any:
    return FIXED_S + np.maximum(2.0 * n * k / BANDWIDTH, 2.0 * m * n * k / FLOPS)


def context_s(batch: Any, tokens: Any, heads: Any) -> Any:
    pairs = batch * tokens * (tokens + 1) / 2
    return FIXED_S + 4.0 * heads * HEAD_DIM * pairs / FLOPS


def decode_s(batch: Any, context: Any, kv_heads: Any) -> Any:
    return FIXED_S + 4.0 * kv_heads * HEAD_DIM * batch * context / BANDWIDTH


def reduce_s(ranks: Any, num_bytes: Any) -> Any:
    return FIXED_S * (1 + ranks / 8) + 2 * num_bytes * (ranks - 1) / ranks / 3e11


def write_aiconfigurator(
    root: Path, system: str = "a100_sxm", *, noise: float = 0.0, versions: Any = ("0.9.0",)
) -> Path:
    """A folder ``systems`` as in aiconfigurator-core, for one card, and its path."""
    rng = np.random.default_rng(7)
    data = root / "systems" / "data" / system
    gemm = _grid(m=(1, 16, 64, 256, 1024, 8192), n=(64, 512, 1024, 4096, 32768), k=(64, 512, 1024, 4096))
    gemm["latency"] = gemm_s(gemm["m"], gemm["n"], gemm["k"])
    gemm["gemm_dtype"], gemm["kernel_source"] = "bfloat16", "linear"
    heads = [(8, 4), (4, 2), (2, 1), (6, 2), (12, 4), (4, 4)]
    context = _attention(heads, batch_size=(1, 4, 16), isl=(1, 16, 128, 512, 2048, 8192))
    context["latency"] = context_s(context["batch_size"], context["isl"], context["num_heads"])
    decode = _attention(heads, batch_size=(1, 4, 32, 256), step=(1, 127, 1023, 8191))
    decode["isl"] = 1
    decode["latency"] = decode_s(decode["batch_size"], decode["step"] + 1, decode["num_key_value_heads"])
    reduce = _grid(num_gpus=(2, 4), message_size=(128, 4096, 2**18, 2**22, 2**25))  # elements of two bytes
    reduce["latency"] = reduce_s(reduce["num_gpus"], 2 * reduce["message_size"])
    reduce["backend"], reduce["allreduce_dtype"] = "vllm_graph", "bfloat16"
    eager = reduce.assign(backend="vllm_eager", latency=reduce["latency"] + 2e-5)
    tables = {
        "gemm/vllm/{}/gemm_perf": gemm,
        "attention/vllm/{}/context_attention_perf": context,
        "attention/vllm/{}/generation_attention_perf": decode,
        "comm/vllm/{}/custom_allreduce_perf": pd.concat([reduce, eager]),
    }
    for age, version in enumerate(reversed(versions)):
        for name, frame in tables.items():
            path = data / f"{name.format(version)}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            scatter = 1.0 + noise * rng.standard_normal(len(frame)).clip(-2, 2)
            frame.assign(latency=frame["latency"] * 1e3 * scatter * (1 + age)).to_parquet(path)
    return root / "systems"


def _attention(heads: list[tuple[int, int]], **sizes: Any) -> pd.DataFrame:
    frames = [_grid(**sizes).assign(num_heads=queries, num_key_value_heads=keys) for queries, keys in heads]
    return pd.concat(frames, ignore_index=True).assign(
        head_dim=HEAD_DIM, kv_cache_dtype="bfloat16", attn_dtype="bfloat16", window_size=0
    )


def _grid(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame(list(product(*columns.values())), columns=list(columns))


def write_profile(folder: Path, model: str = "tiny/Tiny-1B", gpu: str = "RTX4090") -> Path:
    """A folder of tables as LLMServingSim writes them, for one card and model."""
    folder.mkdir(parents=True, exist_ok=True)
    tags = {"gpu": gpu, "model": model, "dtype": "bf16", "tp": "tp1"}
    sizes = {"qkv_proj": (2048, 1024), "o_proj": (1024, 1024), "gate_up_proj": (8192, 1024), "down_proj": (1024, 4096)}
    tokens = np.array([1, 64, 512, 2048])
    dense = [
        pd.DataFrame({"layer": name, "tokens": tokens, "time_us": gemm_s(tokens, *size) * 1e6})
        for name, size in sizes.items()
    ]
    dense += [
        pd.DataFrame({"layer": name, "tokens": tokens, "time_us": 2.0 + tokens / 100.0})
        for name in ("layernorm", "final_layernorm", "rotary_emb", "act_fn", "embedding")
    ]
    attention = _grid(
        prefill_chunk=(0, 16, 128, 512), kv_prefill=(0, 128, 1024), n_decode=(0, 1, 8, 64), kv_decode=(0, 128, 2048)
    )
    chunk, prefix, decodes, context = (attention[name] for name in attention)
    sane = ((chunk > 0) | (prefix == 0)) & ((decodes > 0) == (context > 0)) & (chunk + decodes > 0)
    pairs = chunk * prefix + chunk * (chunk + 1) / 2
    attention["time_us"] = 1e6 * (decode_s(decodes, context, 4) + 4.0 * 8 * HEAD_DIM * pairs / FLOPS)
    rows = np.array([1, 8, 64])
    per_sequence = [
        pd.DataFrame({"layer": "lm_head", "sequences": rows, "time_us": gemm_s(rows, 32000, 1024) * 1e6}),
        pd.DataFrame({"layer": "sampler", "sequences": rows, "time_us": 10.0 + rows}),
    ]
    for name, frame in (
        ("v1_dense", pd.concat(dense)),
        ("v1_attention", attention[sane]),
        ("v1_per_sequence", pd.concat(per_sequence)),
    ):
        frame.assign(**tags).to_parquet(folder / f"{name}.parquet")
    return folder


def shapes(*steps: tuple[int, ...]) -> Any:
    """A StepShape of arrays of those steps."""
    columns: list[Any] = [np.array(column, np.int64) for column in zip(*steps, strict=True)]
    return StepShape(*columns)
