"""A decoder-only transformer as shapes: what its weights and its KV cache weigh."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one element, by the dtypes vLLM computes in."""

KV_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
"""Bytes of one cached element, by ``kv_cache_dtype``; "auto" is the model's own dtype."""

VOCAB_PADDING = 64
"""vLLM pads the rows of embedding and lm_head to a multiple of this before it shards them."""


LARGEST_SHAPE = 2**31 - 1
"""No size of a model is larger."""


class UnsupportedModel(ValueError):
    """The model has a part whose memory or cost is not modelled, so any number would be wrong."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the linear layers of the decoder are stored; everything else keeps the model's dtype.

    ``bits`` a weight, plus ``group_overhead_bits`` (scale and zero point) for every ``group_size`` weights.
    ``group_size`` 0 says one scale a channel or tensor, which is left out of the count (below 0.1 %).
    """

    name: str
    bits: int
    group_size: int = 0
    group_overhead_bits: int = 0
    gemm_dtype: str = "bf16"
    """Arithmetic of the matrix products: "bf16", "fp8" or "int8"; weight-only formats compute in bf16."""

    def num_bytes(self, num_weights: int) -> int:
        """Bytes that ``num_weights`` take, rounded up."""
        overhead = num_weights // self.group_size * self.group_overhead_bits if self.group_size else 0
        return -(-(num_weights * self.bits + overhead) // 8)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes of a decoder-only transformer with full attention, dense or mixture of experts.

    Counts are exact: they follow from the shapes alone.  Sizes "per GPU" are those of one tensor-parallel rank as
    vLLM shards it: heads and MLP columns are split, KV heads are split until one is left and then replicated,
    norms, biases of row-parallel layers and routers are replicated.
    """

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the dense MLP; 0 when every layer is a mixture of experts."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    max_model_len: int
    """The longest context vLLM gives the model by default: positions, stretched by its rope scaling."""
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    """What the unquantised weights, the activations and, by default, the KV cache are held in."""
    weight_format: WeightFormat | None = None
    """Quantised storage of the linear layers; None when they are in ``dtype``."""
    attention_bias: bool = False
    """Biases on query, key and value projections."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """A norm of width head_dim on queries and one on keys, in each layer."""
    gated_mlp: bool = True
    """Three matrices (gate, up, down) instead of two."""
    norm_bias: bool = False
    """LayerNorm with weight and bias instead of RMSNorm."""
    num_learned_positions: int = 0
    """Rows of a learned position embedding; 0 for rotary positions."""
    rotary_dim: int = 0
    """Dimensions of a head that rotary embedding turns."""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    num_moe_layers: int = 0
    shared_expert_intermediate_size: int = 0
    """Width of the expert that every token visits; 0 where there is none."""

    def __post_init__(self) -> None:
        for field in _POSITIVE_FIELDS:
            check_whole(self.name, field, getattr(self, field), 1)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.name}: num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"{self.name}: dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if not 0 <= self.num_moe_layers <= self.num_layers:
            raise ValueError(
                f"{self.name}: num_moe_layers must lie in [0, {self.num_layers}], got {self.num_moe_layers}"
            )
        if self.num_moe_layers:
            for field in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
                check_whole(self.name, field, getattr(self, field), 1)
            if self.num_experts_per_tok > self.num_experts:
                raise ValueError(
                    f"{self.name}: num_experts_per_tok ({self.num_experts_per_tok}) exceeds num_experts "
                    f"({self.num_experts})"
                )
        if self.num_moe_layers < self.num_layers:
            check_whole(self.name, "intermediate_size", self.intermediate_size, 1)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one unquantised element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def num_parameters(self) -> int:
        """All parameters, tied embeddings once, as model cards count them."""
        return self._num_linear(self.num_experts) + self._num_other()

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token passes through: all but the experts its router does not choose."""
        return self._num_linear(self.num_experts_per_tok) + self._num_other()

    def weight_bytes(self, tensor_parallel_size: int = 1) -> int:
        """Bytes of the parameters one GPU holds.

        Raises ValueError if the model cannot be split that way (``check_tensor_parallel_size``).
        """
        self.check_tensor_parallel_size(tensor_parallel_size)
        linear = self.dense_linear_bytes(tensor_parallel_size) + self.num_moe_layers * (
            self.num_experts * self.expert_bytes(tensor_parallel_size)
        )
        embeddings = self.embedding_bytes(tensor_parallel_size)
        head = 0 if self.tie_word_embeddings else embeddings
        return linear + embeddings + head + self._replicated_parameters(tensor_parallel_size) * self.dtype_bytes

    def kv_bytes_per_token(self, tensor_parallel_size: int = 1, kv_cache_dtype: str = "auto") -> int:
        """Bytes of KV cache one token takes on each GPU: 2 * layers * max(kv_heads / TP, 1) * head_dim * element.

        Raises ValueError for an unknown ``kv_cache_dtype`` or a split the model does not allow.
        """
        self.check_tensor_parallel_size(tensor_parallel_size)
        element = kv_element_bytes(self, kv_cache_dtype)
        return 2 * self.num_layers * self.kv_heads_per_gpu(tensor_parallel_size) * self.head_dim * element

    def dense_linear_parameters(self, tensor_parallel_size: int = 1) -> int:
        """Weights of all matrices that every token passes through on one GPU, lm_head and routers left out."""
        attention = self.num_layers * self._attention_weights(tensor_parallel_size)
        dense = (self.num_layers - self.num_moe_layers) * self._mlp_weights(
            self.intermediate_size, tensor_parallel_size
        )
        shared = self.num_moe_layers * self._mlp_weights(self.shared_expert_intermediate_size, tensor_parallel_size)
        return attention + dense + shared

    def dense_linear_bytes(self, tensor_parallel_size: int = 1) -> int:
        """Bytes of ``dense_linear_parameters``."""
        return self._linear_bytes(self.dense_linear_parameters(tensor_parallel_size))

    def expert_parameters(self, tensor_parallel_size: int = 1) -> int:
        """Weights of one expert of one layer on one GPU; 0 for a dense model."""
        return self._mlp_weights(self.moe_intermediate_size, tensor_parallel_size) if self.num_moe_layers else 0

    def expert_bytes(self, tensor_parallel_size: int = 1) -> int:
        """Bytes of ``expert_parameters``."""
        return self._linear_bytes(self.expert_parameters(tensor_parallel_size))

    def embedding_parameters(self, tensor_parallel_size: int = 1) -> int:
        """Weights of the embedding (or of lm_head) on one GPU, its rows padded and split as vLLM does."""
        padded = -(-self.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        return -(-padded // tensor_parallel_size) * self.hidden_size

    def embedding_bytes(self, tensor_parallel_size: int = 1) -> int:
        """Bytes of ``embedding_parameters``; never quantised."""
        return self.embedding_parameters(tensor_parallel_size) * self.dtype_bytes

    def rotary_cache_bytes(self) -> int:
        """Bytes of the table of sines and cosines each GPU keeps: one row of ``rotary_dim`` a position."""
        return self.max_model_len * self.rotary_dim * self.dtype_bytes

    def kv_heads_per_gpu(self, tensor_parallel_size: int) -> int:
        """KV heads one GPU holds: split until one is left, then replicated."""
        return max(self.num_key_value_heads // tensor_parallel_size, 1)

    def check_tensor_parallel_size(self, tensor_parallel_size: int) -> None:
        """Raise ValueError, naming the sizes that work, if the model cannot be split over that many GPUs."""
        if not self._splits_into(tensor_parallel_size):
            allowed = ", ".join(str(size) for size in self.tensor_parallel_sizes())
            raise ValueError(
                f"{self.name} cannot be split over tensor_parallel_size {tensor_parallel_size}: its "
                f"{self.num_attention_heads} attention heads, {self.num_key_value_heads} KV heads and MLP widths "
                f"must divide evenly; choose one of {allowed}"
            )

    def tensor_parallel_sizes(self, largest: int = 16) -> list[int]:
        """Sizes up to ``largest`` that the model can be split into, in order."""
        return [size for size in range(1, largest + 1) if self._splits_into(size)]

    def _splits_into(self, size: int) -> bool:
        if size < 1 or self.num_attention_heads % size:
            return False
        if self.num_key_value_heads % size and size % self.num_key_value_heads:
            return False
        widths = (self.intermediate_size, self.moe_intermediate_size, self.shared_expert_intermediate_size)
        return all(width % size == 0 for width in widths)

    def _attention_weights(self, tensor_parallel_size: int) -> int:
        query_dim = self.num_attention_heads // tensor_parallel_size * self.head_dim
        kv_dim = self.kv_heads_per_gpu(tensor_parallel_size) * self.head_dim
        return self.hidden_size * (2 * query_dim + 2 * kv_dim)

    def _mlp_weights(self, width: int, tensor_parallel_size: int) -> int:
        return (3 if self.gated_mlp else 2) * self.hidden_size * width // tensor_parallel_size

    def _linear_bytes(self, num_weights: int) -> int:
        if self.weight_format is None:
            return num_weights * self.dtype_bytes
        return self.weight_format.num_bytes(num_weights)

    def _num_linear(self, experts_counted: int) -> int:
        return self.dense_linear_parameters() + self.num_moe_layers * experts_counted * self.expert_parameters()

    def _num_other(self) -> int:
        tables = 1 if self.tie_word_embeddings else 2
        return tables * self.vocab_size * self.hidden_size + self._replicated_parameters(1)

    def _replicated_parameters(self, tensor_parallel_size: int) -> int:
        """Norms, biases, routers and learned positions on one GPU (the split biases split, the rest replicated)."""
        hidden, layers = self.hidden_size, self.num_layers
        norm = hidden * (2 if self.norm_bias else 1)
        total = (2 * layers + 1) * norm + self.num_learned_positions * hidden
        if self.qk_norm:
            total += layers * 2 * self.head_dim
        if self.attention_bias:
            query_heads = self.num_attention_heads // tensor_parallel_size
            total += layers * (query_heads + 2 * self.kv_heads_per_gpu(tensor_parallel_size)) * self.head_dim
        if self.attention_output_bias:
            total += layers * hidden
        if self.mlp_bias:
            wide = (2 if self.gated_mlp else 1) * self.intermediate_size // tensor_parallel_size
            total += (layers - self.num_moe_layers) * (wide + hidden)
        shared_gate = hidden if self.shared_expert_intermediate_size else 0
        return total + self.num_moe_layers * (self.num_experts * hidden + shared_gate)


_POSITIVE_FIELDS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "max_model_len",
)


def kv_element_bytes(model: ModelSpec, kv_cache_dtype: str) -> int:
    """Bytes of one cached element; "auto" follows the model.  Raises ValueError for an unknown dtype."""
    dtype = model.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    if dtype not in KV_DTYPE_BYTES:
        known = ", ".join(("auto", *KV_DTYPE_BYTES))
        raise ValueError(f"kv_cache_dtype must be one of {known}, got {kv_cache_dtype!r}")
    return KV_DTYPE_BYTES[dtype]


def check_whole(name: str, key: str, value: object, least: int, most: int = LARGEST_SHAPE) -> int:
    """``value``, if it is a whole number in [least, most]; raises ValueError, naming model and key, if not."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        bound = f"at most {most:,}" if isinstance(value, int) and value > most else f"at least {least}"
        raise ValueError(f"{name}: {key} must be a whole number of {bound}, got {value!r:.60}")
    return value
