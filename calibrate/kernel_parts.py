"""The parts of a step besides attention: products, experts, norms, all-reduces, lm_head and sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.kernel_attention import check_profiled
from windtunnel.calibrate.kernel_curves import GemmTable, Line
from windtunnel.calibrate.kernel_tables import KernelTableError, KernelTables, Rows
from windtunnel.sim.deployment.gpu import GpuSpec
from windtunnel.sim.deployment.model_spec import ModelSpec, UnsupportedModel

Floats = NDArray[np.float64]

KERNEL_S = 2.3e-6
"""Of a small norm, rotary embedding or activation: the median of LLMServingSim's one-token times of these layers on RTX
4090 and RTX PRO 6000 (1.7 to 2.8 us)."""
ELEMENTWISE_BANDWIDTH = 0.8
"""Of memory bandwidth, in those kernels on many tokens; aiconfigurator-core's system files hold the same."""
SAMPLER_S = 15e-6
"""Of the sampler's kernels for one sequence: LLMServingSim has 10 to 25 us."""
SAMPLER_PASSES = 2
"""Over float32 logits: LLMServingSim's sampler takes as long as 2 to 2.5 at that bandwidth for 256 sequences."""
_MIB = 2**20
FUSED_NORM_BYTES = {
    (9, 0): {2: 64 * _MIB, 4: 2 * _MIB, 8: _MIB // 2},
    (10, 0): {2: 64 * _MIB, 4: 32 * _MIB, 8: _MIB},
    (10, 3): {2: 64 * _MIB, 4: 64 * _MIB, 8: 4 * _MIB},
}
"""Largest all-reduces that vLLM fuses with the norm behind them by default (pass ``fuse_allreduce_rms``, through
FlashInfer), by compute capability and number of cards; vLLM 0.32, ``FI_ALLREDUCE_FUSION_MAX_SIZE_MB``."""


class Parts:
    """The terms of a step besides attention, over the tokens of the batch or the rows that are sampled."""

    def __init__(self, model: ModelSpec, gpu: GpuSpec, size: int, tables: KernelTables, cold: bool) -> None:
        self._model, self._gpu, self._size, self._tables = model, gpu, size, tables
        self._dtype = _gemm_dtype(model)
        self._gemms = {name: self._gemm_table(name, cold) for name in dict.fromkeys((self._dtype, "bf16"))}
        self._dense = model.num_layers - model.num_moe_layers
        self._products = [(count, self._product(name, n, k)) for name, count, n, k in self._weights()]
        self._experts = self._expert_curve() if model.num_moe_layers else None
        self._reduce = self._reduce_curve() if size > 1 else None
        self._head = self._head_curve()

    @property
    def max_num_tokens(self) -> int:
        """The largest batch of tokens that all matrix products were measured with."""
        return int(min(line.sizes[-1] for _, line in self._products))

    def gemm_s(self, tokens: Any) -> Floats:
        """Matrix products of all layers, experts left out."""
        return sum((count * line.at(tokens) for count, line in self._products), np.zeros(np.shape(tokens)))

    def gemm_compute_s(self, tokens: Any) -> Floats:
        """What of ``gemm_s`` comes on top of reading the weights: the products of one token are all reading."""
        tokens = np.asarray(tokens)
        return np.maximum(self.gemm_s(tokens) - self.gemm_s(np.minimum(tokens, 1)), 0.0)

    def experts_s(self, tokens: Any) -> Floats:
        """Experts of all layers that have some."""
        if self._experts is None:
            return np.zeros(np.shape(tokens))
        return self._model.num_moe_layers * self._experts.at(tokens)

    def elementwise_s(self, tokens: Any) -> Floats:
        """Norms, rotary embedding, cache write and activation of all layers, embedding and last norm."""
        tokens = np.asarray(tokens, np.float64)
        total = np.zeros(tokens.shape)
        for name, count, moved in self._elementwise():
            rows = self._tables.layers.get(name)
            each = Line(rows["tokens"], rows.seconds).at(tokens) if rows is not None else self._stream(tokens, moved)
            if name == "layernorm":
                each = np.where(self._fuses_norm(tokens), np.maximum(each - KERNEL_S, 0.0), each)
            total = total + count * each
        return total

    def _fuses_norm(self, tokens: Floats) -> NDArray[np.bool_]:
        """Whether the layers' norms are part of the all-reduce before them, which saves their fixed part."""
        limit = FUSED_NORM_BYTES.get(self._gpu.compute_capability or (0, 0), {}).get(self._size, 0)
        if not self._has_switch or self._reduce is None:
            limit = 0
        moved = tokens * self._model.hidden_size * self._model.dtype_bytes
        fused: NDArray[np.bool_] = moved <= limit
        return fused

    def all_reduce_s(self, tokens: Any) -> Floats:
        """Two all-reduces a layer and that of the embedding, of one token's hidden state a token."""
        if self._reduce is None:
            return np.zeros(np.shape(tokens))
        count = 2 * self._model.num_layers + 1
        return count * self._reduce.at(np.asarray(tokens) * self._model.hidden_size * self._model.dtype_bytes)

    def head_s(self, rows: Any) -> Floats:
        """The lm_head, and over several cards the gathering of its logits (half of an all-reduce's traffic)."""
        head = self._head.at(np.maximum(rows, 1))  # vLLM computes a row also where no request samples
        if self._reduce is None:
            return head
        return head + self._reduce.at(np.asarray(rows) * self._model.vocab_size * self._model.dtype_bytes / 2)

    def sampler_s(self, rows: Any) -> Floats:
        """Sampling of so many rows of logits."""
        own = self._tables.sequences.get("sampler")
        if own is not None:
            return Line(own["sequences"], own.seconds).at(rows)
        rows = np.asarray(rows, np.float64)
        passes_s = SAMPLER_PASSES * 4 * self._model.vocab_size / self._streamed()
        return np.where(rows > 0, SAMPLER_S + passes_s * rows, 0.0)

    def describe(self) -> dict[str, Any]:
        """Tables and corrections of each term."""
        gemm, reduces = self._gemms[self._dtype], self._tables.all_reduce
        return {
            "gemm": self._tables.source if gemm is None else gemm.rows.source,
            "gemm_shapes": {} if gemm is None else self._nearness(gemm),
            "cold_weights_bytes_per_s": None if gemm is None else gemm.stream_bytes_per_s,
            "all_reduce": None if self._reduce is None or reduces is None else reduces.source,
            "experts": self._expert_source(),
        }

    def _nearness(self, gemm: GemmTable) -> dict[str, Any]:
        """Of the matrices that the tables do not name, routers left out: narrower than any measured, and as quick."""
        return {
            name: {"n": n, "k": k, "nearest_measured_ratio": round(gemm.distance(n, k), 3)}
            for name, _, n, k in self._weights()
            if name not in self._tables.layers and name != "router"
        }

    def _expert_source(self) -> str | None:
        rows = self._tables.experts or self._tables.moe.get(self._dtype)
        return rows.source if self._experts is not None and rows is not None else None

    def _gemm_table(self, dtype: str, cold: bool) -> GemmTable | None:
        rows = self._tables.gemm.get(dtype)
        if rows is None:
            return None
        return GemmTable(
            rows,
            bandwidth_bytes_per_s=self._gpu.hbm_bandwidth_bytes_per_s,
            flops_per_s=self._gpu.flops_per_s(dtype.removesuffix("_block")),
            weight_bytes=2.0 if dtype == "bf16" else 1.0,
            cold=cold,
        )

    def _weights(self) -> list[tuple[str, int, int, int]]:
        """Name, number, columns and depth of the matrices on one card that every token passes."""
        model, size = self._model, self._size
        queries = model.num_attention_heads // size * model.head_dim
        keys = model.kv_heads_per_gpu(size) * model.head_dim
        gate = 2 if model.gated_mlp else 1
        weights = [
            ("qkv_proj", model.num_layers, queries + 2 * keys, model.hidden_size),
            ("o_proj", model.num_layers, model.hidden_size, queries),
        ]
        if self._dense:
            width = model.intermediate_size // size
            weights += [
                ("gate_up_proj", self._dense, gate * width, model.hidden_size),
                ("down_proj", self._dense, model.hidden_size, width),
            ]
        if model.num_moe_layers:
            weights.append(("router", model.num_moe_layers, model.num_experts, model.hidden_size))
        if model.num_moe_layers and model.shared_expert_intermediate_size:
            width = model.shared_expert_intermediate_size // size
            weights += [
                ("shared_gate_up_proj", model.num_moe_layers, gate * width, model.hidden_size),
                ("shared_down_proj", model.num_moe_layers, model.hidden_size, width),
            ]
        return weights

    def _product(self, name: str, n: int, k: int) -> Line:
        rows = self._tables.layers.get(name)
        if rows is not None:
            check_profiled(self._model, self._size, self._tables)
            return Line(rows["tokens"], rows.seconds)
        gemm = self._gemms["bf16" if name == "router" else self._dtype]
        if gemm is not None:
            return gemm.curve(n, k)
        if name == "router" and self._tables.layers:
            return Line([1], [KERNEL_S])  # far below 1 % of its layer
        raise KernelTableError(
            f"{self._tables.source} has no matrix products of {self._dtype} for {name} of {self._model.name}; it has "
            f"{', '.join(self._tables.gemm) or 'none'}"
        )

    def _head_curve(self) -> Line:
        own = self._tables.sequences.get("lm_head")
        if own is not None:
            return Line(own["sequences"], own.seconds)
        gemm = self._gemms["bf16"]
        if gemm is None:
            raise KernelTableError(f"{self._tables.source} has no matrix products of bf16 for the lm_head")
        hidden = self._model.hidden_size
        return gemm.curve(self._model.embedding_parameters(self._size) // hidden, hidden)

    def _expert_curve(self) -> Line:
        own = self._tables.experts
        if own is not None:
            expected = _expected_experts(self._model, own["tokens"])
            return _at_expected(own, expected)
        rows = self._tables.moe.get(self._dtype)
        model = self._model
        found = rows and rows.where(
            hidden=model.hidden_size,
            width=model.moe_intermediate_size,
            top_k=model.num_experts_per_tok,
            num_experts=model.num_experts,
            tp=self._size,
        )
        if not found:
            raise KernelTableError(
                f"{self._tables.source} has no experts of {self._dtype} for {model.name}: hidden {model.hidden_size}, "
                f"width {model.moe_intermediate_size}, {model.num_experts_per_tok} of {model.num_experts}, "
                f"TP {self._size}"
            )
        return Line(found["tokens"], found.seconds)

    def _reduce_curve(self) -> Line:
        """Over bytes; no faster than over fewer cards, which the kernels for more are here and there."""
        rows = self._tables.all_reduce
        if rows is None:
            raise KernelTableError(f"{self._tables.source} has no all-reduce, which {self._size} cards need")
        if self._size not in rows.values("ranks"):
            raise KernelTableError(f"{rows.name} has all-reduces of {rows.values('ranks')} cards, not of {self._size}")
        sizes = np.unique(rows["bytes"])
        by_ranks = {
            ranks: Line(part["bytes"], part.seconds).at(sizes)
            for ranks in rows.values("ranks")
            if ranks <= self._size and (part := rows.where(ranks=ranks)) is not None
        }
        return Line(sizes, np.max(list(by_ranks.values()), axis=0))

    @property
    def _has_switch(self) -> bool:
        return self._gpu.link.startswith("NVLink") and "bridge" not in self._gpu.link

    def _streamed(self) -> float:
        return self._gpu.hbm_bandwidth_bytes_per_s * ELEMENTWISE_BANDWIDTH

    def _stream(self, tokens: Floats, elements: float) -> Floats:
        return np.where(tokens > 0, KERNEL_S + tokens * elements * self._model.dtype_bytes / self._streamed(), 0.0)

    def _elementwise(self) -> list[tuple[str, int, float]]:
        """Name, number and elements moved a token of the kernels between the matrix products."""
        model, size = self._model, self._size
        queries = model.num_attention_heads // size * model.head_dim
        keys = model.kv_heads_per_gpu(size) * model.head_dim
        kernels = [
            ("layernorm", 2 * model.num_layers, 4.0 * model.hidden_size),  # token and residual, in and out
            ("rotary_emb", model.num_layers, 2.0 * (queries + keys)),
            ("embedding", 1, 2.0 * model.hidden_size),
            ("final_layernorm", 1, 4.0 * model.hidden_size),
        ]
        if not self._tables.layers:  # a profile counts it to attention
            kernels.append(("cache_write", model.num_layers, 4.0 * keys))
        if model.qk_norm:
            kernels.append(("qk_norm", model.num_layers, 2.0 * (queries + keys)))
        if self._dense:
            kernels.append(("act_fn", self._dense, (3.0 if model.gated_mlp else 2.0) * model.intermediate_size / size))
        return kernels


def _expected_experts(model: ModelSpec, tokens: NDArray[Any]) -> Floats:
    """Experts that so many tokens are expected to hit, were the router to choose at random."""
    share = model.num_experts_per_tok / model.num_experts
    return model.num_experts * (1.0 - (1.0 - share) ** np.asarray(tokens, np.float64))


def _at_expected(rows: Rows, expected: Floats) -> Line:
    """The experts' time over tokens at the expected number of experts that they hit."""
    tokens = rows.values("tokens")
    seconds = []
    for count in tokens:
        part = rows["tokens"] == count
        line = Line(rows["activated"][part], rows.seconds[part])
        seconds.append(float(line.at(expected[part][:1])[0]))
    return Line(tokens, seconds)


def _gemm_dtype(model: ModelSpec) -> str:
    """Name of the tables of matrix products with the model's weights."""
    form = model.weight_format
    if form is None:
        return "bf16"
    if form.gemm_dtype == "bf16" or form.bits != 8:
        raise UnsupportedModel(
            f"{model.name}: there are no tables of matrix products with weights of {form.name}; bf16 and fp8 have some"
        )
    return f"{form.gemm_dtype}_block" if form.block[0] else form.gemm_dtype
