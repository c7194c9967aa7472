"""The time of a step composed from measured kernels, for a model that was never run on the card.

A step is the sum of its kernels one behind the other, as vLLM runs them on one stream: for each layer the matrix
products, attention, norms, rotary embedding, cache write, activation and, over several cards, two all-reduces; then
embedding, lm_head and sampler; and what they take longer in a server: clocks under load and the host
(``host.HostOverhead``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.host import Comparison, HostOverhead
from windtunnel.calibrate.kernel_attention import (
    DECODE_SIZES,
    Attention,
    attention_of,
    heads_per_card,
    kv_dtype_of,
)
from windtunnel.calibrate.kernel_curves import rows_of_heads
from windtunnel.calibrate.kernel_parts import Parts
from windtunnel.calibrate.kernel_tables import KernelTableError, KernelTables
from windtunnel.sim.cost.features import graph_sizes
from windtunnel.sim.deployment.gpu import load_gpu
from windtunnel.sim.deployment.model_spec import ModelSpec, UnsupportedModel
from windtunnel.sim.engine.plan import StepShape

Floats = NDArray[np.float64]

LARGEST_GRAPH = 512
"""Tokens of vLLM's largest CUDA graph by default; smaller batches are padded to the next graph."""


class Limits(NamedTuple):
    """The largest sizes that the kernel tables hold for a model."""

    max_num_decode_seqs: int
    max_context_tokens: int
    """Of one sequence."""
    max_num_tokens: int
    """Of one step."""


class OperatorModel:
    """Seconds of steps of ``model`` on ``tensor_parallel_size`` cards of ``gpu``, composed from ``tables``.

    Arrays only.  Never falls with tokens, sequences or context.  ``cold``: weights and cache come from memory, not from
    the second-level cache (``GemmTable``, ``cold_decodes``).

    Raises UnsupportedModel for layers that are not full attention with a dense or an expert block; KernelTableError
    where the tables lack what the model needs; ValueError for a split that the model does not allow.
    """

    def __init__(
        self,
        model: ModelSpec,
        gpu: str,
        tensor_parallel_size: int,
        tables: KernelTables,
        *,
        host: HostOverhead,
        kv_cache_dtype: str = "auto",
        cold: bool = True,
        attention: Attention | None = None,
    ) -> None:
        model.check_tensor_parallel_size(tensor_parallel_size)
        if model.unpriced:
            raise UnsupportedModel(
                f"{model.name}: its step times cannot be composed from kernels, because {model.unpriced}"
            )
        self.model, self.gpu, self.size = model, load_gpu(gpu), tensor_parallel_size
        if self.gpu.name != tables.gpu:
            raise KernelTableError(f"the kernel tables are of {tables.gpu}, not of {self.gpu.name}")
        self.tables, self.host, self.kv_cache_dtype = tables, host, kv_cache_dtype
        self._parts = Parts(model, self.gpu, self.size, tables, cold)
        self.attention = attention or attention_of(model, self.size, tables, kv_cache_dtype, cold=cold)
        self._pads = np.array(graph_sizes(LARGEST_GRAPH))

    def step_times_s(self, shape: StepShape) -> Floats:
        """Seconds for each step of a shape of arrays: the sum of ``terms_s``."""
        terms = self.terms_s(shape)
        total = np.zeros(np.shape(np.asarray(shape.num_decode_seqs)))
        for term in terms.values():
            total = total + term
        return total

    def terms_s(self, shape: StepShape) -> dict[str, Floats]:
        """What ``step_times_s`` adds up, by name, for a shape of arrays."""
        arrays: Any = (np.asarray(values, np.int64) for values in shape)
        shape = StepShape(*arrays)
        padded = self._padded(shape.num_tokens)
        layers, parts = self.model.num_layers, self._parts
        prefill_s = layers * self.attention.prefill_s(shape)
        return {
            "gemm": parts.gemm_s(padded),
            "experts": parts.experts_s(padded),
            "elementwise": parts.elementwise_s(padded),
            "decode_attention": layers * self.attention.decode_s(shape),
            "prefill_attention": prefill_s,
            "all_reduce": parts.all_reduce_s(padded),
            "head": parts.head_s(shape.num_sampled),
            "sampler": parts.sampler_s(shape.num_sampled),
            "clocks": self.host.clocks_share * (parts.gemm_compute_s(padded) + prefill_s),
            "host": self.host.step_s(shape),
        }

    def compute_s(self, shape: StepShape) -> Floats:
        """What of the steps is held back by low clocks: products beyond reading their weights, and prefill attention.

        The share ``host.clocks_share`` of it is added to the kernels as measured.
        """
        arrays: Any = (np.asarray(values, np.int64) for values in shape)
        shape = StepShape(*arrays)
        compute_s = self._parts.gemm_compute_s(self._padded(shape.num_tokens))
        return np.asarray(compute_s + self.model.num_layers * self.attention.prefill_s(shape))

    def beside(self, shapes: StepShape, step_s: Floats) -> Comparison:
        """Real steps beside their composed kernels; of a model with ``NO_HOST``."""
        return Comparison(shapes, self.step_times_s(shapes), self.compute_s(shapes), step_s)

    def _padded(self, tokens: Any) -> Any:
        place = np.minimum(np.searchsorted(self._pads, tokens), len(self._pads) - 1)
        return np.maximum(tokens, np.where(tokens > 0, self._pads[place], 0))

    @property
    def domain_limits(self) -> Limits:
        """The largest batch of decodes, context of one sequence and tokens of one step that the tables hold."""
        own = self.tables.attention
        if own is not None:
            batch, context = int(own["num_decodes"].max()), int(max(own["prefix"].max(), own["decode_context"].max()))
        else:
            kv, heads = kv_dtype_of(self.model, self.kv_cache_dtype), heads_per_card(self.model, self.size)
            decode = rows_of_heads(self.tables.decode_attention, kv, DECODE_SIZES, heads)
            batch, context = int(decode["batch"].max()), int(decode["context"].max())
        return Limits(batch, context, self._parts.max_num_tokens)

    def describe(self) -> dict[str, Any]:
        """What the composition rests on, as plain data: tables, corrections, and how near the shapes are."""
        return {
            "tables": self.tables.source,
            "gpu": self.gpu.name,
            "model": self.model.name,
            "tensor_parallel_size": self.size,
            **self._parts.describe(),
            "host": self.host.as_plain(),
        }
