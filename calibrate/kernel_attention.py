"""One layer's attention from measured calls: of decodes, of prompt chunks, and of both in one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.kernel_curves import Plane, PrefillCurve, cold_decodes, fit_prefill, rows_of_heads
from windtunnel.calibrate.kernel_tables import KernelTableError, KernelTables, Rows
from windtunnel.sim.deployment.gpu import GpuSpec, load_gpu
from windtunnel.sim.deployment.model_spec import ModelSpec, kv_element_bytes
from windtunnel.sim.engine.plan import StepShape

Floats = NDArray[np.float64]

DECODE_SIZES = ("batch", "context")
CONTEXT_SIZES = ("batch", "tokens")


@dataclass(frozen=True)
class Attention:
    """One layer's attention of decodes (``decodes``), chunks (``prefill``) and both in one step.

    Beside chunks the decodes cost ``beside(batch, context)`` on top of the chunks, and a step never less than its
    decodes alone.
    """

    decodes: Plane
    prefill: PrefillCurve
    beside: Plane
    beside_factor: float = 1.0

    def decode_s(self, shape: StepShape) -> Floats:
        """Of the decodes of steps without chunks, and of those with chunks on top of these."""
        decodes, context = np.asarray(shape.num_decode_seqs), np.asarray(shape.decode_context_tokens)
        alone = self.decodes.at(decodes, context)
        chunks_s = self.prefill_s(shape)
        beside = np.maximum(self.beside.at(decodes, context) * self.beside_factor, alone - chunks_s)
        return np.where(np.asarray(shape.num_prefill_seqs) > 0, np.maximum(beside, 0.0), alone)

    def prefill_s(self, shape: StepShape) -> Floats:
        """Of the chunks."""
        return self.prefill.at(
            shape.num_prefill_seqs, shape.prefill_tokens, shape.prefill_context_tokens, shape.prefill_pairs
        )


def attention_of(
    model: ModelSpec,
    tensor_parallel_size: int,
    tables: KernelTables,
    kv_cache_dtype: str = "auto",
    *,
    cold: bool = True,
) -> Attention:
    """One layer's attention of ``model`` as the tables have it: of the model itself where it was profiled, else of
    calls with as many heads as are on one card.  ``cold``: its cache is read from memory (``cold_decodes``).

    Raises KernelTableError where the tables have neither.
    """
    if tables.attention is not None:
        check_profiled(model, tensor_parallel_size, tables)
        return fit_attention(
            tables.attention, _beside_factor(load_gpu(tables.gpu), heads_per_card(model, tensor_parallel_size))
        )
    heads, kv = heads_per_card(model, tensor_parallel_size), kv_dtype_of(model, kv_cache_dtype)
    context = rows_of_heads(tables.context_attention, kv, CONTEXT_SIZES, heads)
    decode = rows_of_heads(tables.decode_attention, kv, DECODE_SIZES, heads)
    if cold:
        decode = cold_decodes(decode, 2 * heads[1] * heads[2] * kv_element_bytes(model, kv_cache_dtype))
    decodes = Plane(decode["batch"], decode["context"], decode.seconds)
    prefill = fit_prefill(context["batch"], context["tokens"], np.zeros(len(context)), context.seconds)
    return Attention(decodes, prefill, decodes, _beside_factor(load_gpu(tables.gpu), heads))


def fit_attention(rows: Rows, beside_factor: float = 1.0) -> Attention:
    """Attention of a profiled model: from its calls with decodes only, with a chunk only, and with both if there are.

    Without the last, decodes are taken to cost ``beside_factor`` times as much beside a chunk as alone.  With them,
    what they add to the chunk's own time is the median over the chunks that were measured beside the same decodes.

    Raises KernelTableError where the rows have no decodes alone or no chunk alone.
    """
    alone, chunks = rows.where(chunk=0), rows.where(num_decodes=0)
    if alone is None or chunks is None:
        raise KernelTableError(f"{rows.name}: attention needs calls with decodes only and with a chunk only")
    decodes = Plane(alone["num_decodes"], alone["decode_context"], alone.seconds)
    prefill = fit_prefill(np.ones(len(chunks)), chunks["chunk"], chunks["prefix"], chunks.seconds)
    mixed = (rows["chunk"] > 0) & (rows["num_decodes"] > 0)
    if not mixed.any():
        return Attention(decodes, prefill, decodes, beside_factor)
    return Attention(decodes, prefill, _beside(rows.take(mixed), prefill))


def _beside(rows: Rows, prefill: PrefillCurve) -> Plane:
    chunk, prefix = rows["chunk"], rows["prefix"]
    alone_s = prefill.at(np.ones(len(rows)), chunk, prefix, chunk * prefix + chunk * (chunk + 1) // 2)
    added_s = np.maximum(rows.seconds - alone_s, 0.0)
    kinds, places = np.unique(
        np.stack([rows["num_decodes"], rows["decode_context"]], axis=1), axis=0, return_inverse=True
    )
    places = places.reshape(-1)
    medians = np.array([np.median(added_s[places == kind]) for kind in range(len(kinds))])
    return Plane(kinds[:, 0], kinds[:, 1], medians, by_mean=True)


def _beside_factor(gpu: GpuSpec, heads: tuple[int, int, int]) -> float:
    """What decodes beside chunks cost, as a multiple of decodes alone.

    FlashAttention 2 (cards before and beside Hopper and data-centre Blackwell) does not share a key among the query
    heads of its group in a call that holds chunks; the second-level cache makes up for part.  LLMServingSim's
    profiles show about the square root of the group: 1.6 to 2 for groups of 4 and 2.7 to 2.9 for groups of 8.
    """
    packs = gpu.compute_capability is not None and gpu.compute_capability[0] in (9, 10)
    return 1.0 if packs else float(np.sqrt(heads[0] / heads[1]))


def heads_per_card(model: ModelSpec, size: int) -> tuple[int, int, int]:
    """Query heads and KV heads on one of ``size`` cards, and the dimension of each."""
    return model.num_attention_heads // size, model.kv_heads_per_gpu(size), model.head_dim


def kv_dtype_of(model: ModelSpec, kv_cache_dtype: str) -> str:
    """The tables' name of the cache's type."""
    return "fp8" if kv_element_bytes(model, kv_cache_dtype) == 1 else "bf16"


def check_profiled(model: ModelSpec, size: int, tables: KernelTables) -> None:
    """Raise KernelTableError unless the profile is of that model, split over that many cards."""
    if tables.tensor_parallel_size != size or not _same_model(model.name, tables.model):
        raise KernelTableError(
            f"{tables.source} is a profile of {tables.model} on {tables.tensor_parallel_size} cards, not of "
            f"{model.name} on {size}"
        )


def _same_model(ours: str, theirs: str) -> bool:
    """Whether two Hugging Face names are of the same shapes: the same but for the owner and tuning for chat."""
    return _shape_name(ours) == _shape_name(theirs)


def _shape_name(name: str) -> str:
    return name.casefold().split("/")[-1].removesuffix("-instruct").removesuffix("-chat")
