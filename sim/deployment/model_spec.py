"""A language model as shapes: what its weights and its KV cache weigh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from windtunnel.sim.deployment.layers import (
    Attention,
    Experts,
    GatedDeltaNet,
    LatentAttention,
    Layer,
    Mamba1,
    Mamba2,
    Mlp,
    ParallelMixer,
)
from windtunnel.sim.deployment.refusal import RefusedByVllm
from windtunnel.sim.deployment.weights import FormatRule, Parameter, Split, WeightFormat, format_of

__all__ = [
    "DTYPE_BYTES",
    "KV_DTYPE_BYTES",
    "ModelSpec",
    "UnsupportedModel",
    "WeightFormat",
    "check_whole",
    "kv_element_bytes",
    "layers_of_stage",
]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one element, by the dtypes vLLM computes in."""

KV_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of one cached element; "auto" is the model's own dtype, and float32 comes of that only."""

VOCAB_PADDING = 64
"""vLLM pads the rows of embedding and lm_head to a multiple of this before it shards them."""


LARGEST_SHAPE = 2**31 - 1
"""No size of a model is larger."""


class UnsupportedModel(ValueError):
    """The model has a part whose memory or cost is not modelled, so any number would be wrong."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes of a decoder-only model.

    Counts are exact: they follow from the shapes alone.  Sizes "per GPU" are those of one tensor-parallel rank as
    vLLM shards it: heads and MLP columns are split, KV heads are split until one is left and then replicated,
    norms, biases of row-parallel layers and routers are replicated.

    Where ``layers`` is empty, the model is ``num_layers`` equal layers of full attention with a dense or an expert
    block, described by the other fields.  Else it is these layers, and the other fields give their usual shape.
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
    layers: tuple[Layer, ...] = ()
    """The decoder's layers, where they are not as above."""
    format_rules: tuple[FormatRule, ...] = ()
    """Modules that are not stored in ``weight_format``; the first rule that matches a name decides."""
    head_format: WeightFormat | None = None
    """Quantised storage of lm_head; None where it is in ``dtype`` or tied to the embedding."""
    towers: tuple[Parameter, ...] = ()
    """Weights of vision and audio encoders and their projectors, on every pipeline stage; never quantised."""
    not_counted: tuple[str, ...] = ()
    """What the config names and the weights leave out, in words."""
    rotary_tables: tuple[tuple[int, int, int], ...] = ()
    """Tables of sines and cosines, as (positions, dimensions, bytes of an element), where there is not just one of
    ``rotary_dim``."""
    kv_cache_dtype: str = ""
    """Type of the KV cache that the checkpoint asks for under "auto"; "" is ``dtype``."""
    on_every_stage: tuple[str, ...] = ()
    """What vLLM puts on every stage of a pipeline: "embedding", "positions" (learned ones), "head", "norm"."""
    state_bytes: tuple[int, int] = (0, 0)
    """Bytes of an element of convolution and recurrent states; 0 follows ``dtype``."""

    def __post_init__(self) -> None:
        self._settle_sequences()
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
        if self.layers:
            self._check_layers()
            return
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

    def _check_layers(self) -> None:
        for layer in dict.fromkeys(self.layers):
            mixer = layer.mixer.attention if isinstance(layer.mixer, ParallelMixer) else layer.mixer
            if isinstance(mixer, Attention) and mixer.num_heads % mixer.num_kv_heads:
                raise ValueError(
                    f"{self.name}: query heads ({mixer.num_heads}) must be a multiple of key and value heads "
                    f"({mixer.num_kv_heads}) in each layer"
                )
            experts = layer.experts
            if experts is not None and experts.num_per_token > experts.num_experts:
                raise ValueError(
                    f"{self.name}: num_experts_per_tok ({experts.num_per_token}) exceeds num_experts "
                    f"({experts.num_experts})"
                )

    def _settle_sequences(self) -> None:
        """Tuples where JSON or the caller gave lists, and as many layers as ``num_layers`` (the first ones)."""
        if isinstance(self.head_format, dict):
            object.__setattr__(self, "head_format", WeightFormat(**self.head_format))
        object.__setattr__(self, "towers", tuple(Parameter(*parameter) for parameter in self.towers))
        object.__setattr__(self, "rotary_tables", tuple((r, d, b) for r, d, b in self.rotary_tables))
        for field in ("format_rules", "not_counted", "on_every_stage", "state_bytes"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        object.__setattr__(self, "layers", tuple(self.layers[: self.num_layers]))
        if self.layers:
            object.__setattr__(self, "num_layers", len(self.layers))
            object.__setattr__(self, "num_moe_layers", sum(1 for layer in self.layers if layer.experts is not None))

    @property
    def has_experts(self) -> bool:
        """Whether some layer is a mixture of experts."""
        return any(layer.experts is not None for layer in self.layers) if self.layers else self.num_moe_layers > 0

    @property
    def unpriced(self) -> str:
        """Why step times of this model cannot be derived from its shapes, in words; "" if they can."""
        if self.layers:
            others = [text for text in self.layer_kinds() if not text.endswith(" full attention")]
            return f"it has {', '.join(others)}" if others else "its norms, biases or routers are of other kinds"
        return "its quantisation mixes precisions" if self.format_rules else ""

    def layer_kinds(self) -> list[str]:
        """How many layers mix tokens how, in words, such as "10 x full attention"."""
        kinds = Counter(layer_kind(layer) for layer in self.decoder_layers)
        return [f"{count} x {kind}" for kind, count in kinds.items()]

    @property
    def decoder_layers(self) -> tuple[Layer, ...]:
        """The layers one by one, also where they are all alike."""
        if self.layers:
            return self.layers
        dense, sparse = self._plain_layer(sparse=False), self._plain_layer(sparse=True)
        num_dense = self.num_layers - self.num_moe_layers
        return (dense,) * num_dense + (sparse,) * self.num_moe_layers

    def _plain_layer(self, *, sparse: bool) -> Layer:
        attention = Attention(
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            bias=self.attention_bias,
            output_bias=self.attention_output_bias,
            qk_norm="head" if self.qk_norm else "",
        )
        block = Mlp(self.intermediate_size, self.gated_mlp, self.mlp_bias)
        experts = Experts(
            self.num_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            self.gated_mlp,
            shared_width=self.shared_expert_intermediate_size,
            shared_gate=bool(self.shared_expert_intermediate_size),
            shared_module="shared_expert",
        )
        return Layer(attention, experts if sparse else block, norm_elements=2 * self._norm_elements)

    @property
    def _norm_elements(self) -> int:
        return self.hidden_size * (2 if self.norm_bias else 1)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one unquantised element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def num_parameters(self) -> int:
        """All parameters, tied embeddings once, towers included, as model cards count them."""
        return sum(parameter.num_elements for parameter in self._checkpoint())

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token passes through: all but the experts its router does not choose."""
        idle = 0
        for layer, count in Counter(self.decoder_layers).items():
            experts = layer.experts
            if experts is not None:
                held = sum(p.num_elements for p in layer.parameters(self.hidden_size) if p.copies)
                idle += count * held // experts.num_experts * (experts.num_experts - experts.num_per_token)
        return self.num_parameters - idle

    def _checkpoint(self) -> Iterator[Parameter]:
        tables = 1 if self.tie_word_embeddings else 2
        yield Parameter("embeddings", tables * self.vocab_size, self.hidden_size)
        yield from self.towers
        yield from self._outside_layers(positions=True, norm=True)
        for layer in self.decoder_layers:
            yield from (p for p in layer.parameters(self.hidden_size) if p.in_checkpoint)

    def _outside_layers(self, *, positions: bool, norm: bool) -> Iterator[Parameter]:
        """All but layers, embedding, head and towers."""
        if positions:
            yield Parameter("positions", self.num_learned_positions, self.hidden_size, linear=False)
        if norm:
            yield Parameter("norm", self._norm_elements, linear=False)

    def weight_bytes(
        self,
        tensor_parallel_size: int = 1,
        *,
        pipeline_parallel_size: int = 1,
        pipeline_rank: int = 0,
        data_parallel_size: int = 1,
        expert_parallel: bool = False,
    ) -> int:
        """Bytes of the parameters one GPU holds.

        The first stage of a pipeline holds the embedding, the last one the head (where they are tied, the embedding
        again) and the last norm, unless ``on_every_stage`` names them; ``layers_of_stage`` says which layers.  Towers
        are on every stage.  Experts are spread over all ``data_parallel_size`` engines, whole ones with
        ``expert_parallel``.

        Raises ValueError if the model cannot be split that way (``check_tensor_parallel_size``).
        """
        self.check_tensor_parallel_size(tensor_parallel_size)
        split = Split(tensor_parallel_size, data_parallel_size, expert_parallel)
        self._check_experts(split)
        start, end = layers_of_stage(self.num_layers, pipeline_rank, pipeline_parallel_size)
        first, last = pipeline_rank == 0, pipeline_rank == pipeline_parallel_size - 1
        embedding, positions, head, norm = (
            here or part in self.on_every_stage
            for here, part in ((first, "embedding"), (first, "positions"), (last, "head"), (last, "norm"))
        )
        others = (*self.towers, *self._outside_layers(positions=positions, norm=norm))
        return (
            self._tables_bytes(tensor_parallel_size, embedding=embedding, head=head)
            + sum(parameter.num_bytes(split, self.dtype_bytes, None) for parameter in others)
            + self._layers_bytes(start, end, split)
        )

    def _check_experts(self, split: Split) -> None:
        for layer in dict.fromkeys(self.decoder_layers):
            experts = layer.experts
            if experts is not None and not split.expert_parallel and experts.width % split.expert_ranks:
                raise RefusedByVllm(
                    f"{self.name}: experts of width {experts.width} cannot be split over {split.expert_ranks} GPUs "
                    "(tensor_parallel_size * data_parallel_size): set expert_parallel or choose a divisor"
                )

    def _tables_bytes(self, tensor_parallel_size: int, *, embedding: bool, head: bool) -> int:
        table = self.embedding_bytes(tensor_parallel_size)
        if self.tie_word_embeddings:
            return table if embedding or head else 0
        rows = self.embedding_parameters(tensor_parallel_size) // self.hidden_size
        own = table if self.head_format is None else self.head_format.matrix_bytes(rows, self.hidden_size)
        return int(embedding) * table + int(head) * own

    def _layers_bytes(self, start: int, end: int, split: Split) -> int:
        if not self.format_rules:
            return sum(
                count * self._layer_bytes(layer, 0, split)
                for layer, count in Counter(self.decoder_layers[start:end]).items()
            )
        return sum(self._layer_bytes(self.decoder_layers[index], index, split) for index in range(start, end))

    def _layer_bytes(self, layer: Layer, index: int, split: Split) -> int:
        return sum(
            parameter.num_bytes(split, self.dtype_bytes, self._format_of(f"layers.{index}.{parameter.module}"))
            for parameter in layer.parameters(self.hidden_size)
        )

    def _format_of(self, module: str) -> WeightFormat | None:
        return format_of(module, self.weight_format, self.format_rules)

    def kv_bytes_per_token(
        self,
        tensor_parallel_size: int = 1,
        kv_cache_dtype: str = "auto",
        *,
        pipeline_parallel_size: int = 1,
        pipeline_rank: int = 0,
    ) -> int:
        """Bytes of KV cache one token takes on each GPU of a pipeline stage, in all its layers that keep tokens.

        2 * layers * max(kv_heads / TP, 1) * head_dim * element for plain attention, (kv_lora_rank +
        qk_rope_head_dim) a layer for latent attention.  Layers with a window, which let old tokens go, are counted
        in full; states of a fixed size are not: ``kv_layout`` says what a request of some length takes.

        Raises ValueError for an unknown ``kv_cache_dtype`` or a split the model does not allow.
        """
        self.check_tensor_parallel_size(tensor_parallel_size)
        start, end = layers_of_stage(self.num_layers, pipeline_rank, pipeline_parallel_size)
        return sum(
            count * token_bytes(self, layer, tensor_parallel_size, kv_cache_dtype)
            for layer, count in Counter(self.decoder_layers[start:end]).items()
        )

    def dense_linear_parameters(self, tensor_parallel_size: int = 1) -> int:
        """Weights of all matrices that every token passes through on one GPU, lm_head and routers left out.

        Of plain transformers (``layers`` empty) only, like ``expert_parameters``.
        """
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
        """Bytes of the tables of sines and cosines each GPU keeps: one row of ``rotary_dim`` a position."""
        if self.rotary_tables:
            return sum(rows * dim * element_bytes for rows, dim, element_bytes in self.rotary_tables)
        return self.max_model_len * self.rotary_dim * self.dtype_bytes

    def kv_heads_per_gpu(self, tensor_parallel_size: int) -> int:
        """KV heads one GPU holds: split until one is left, then replicated."""
        return max(self.num_key_value_heads // tensor_parallel_size, 1)

    def check_tensor_parallel_size(self, tensor_parallel_size: int) -> None:
        """Raise ValueError, naming the sizes that work, if the model cannot be split over that many GPUs."""
        obstacle = self._obstacle(tensor_parallel_size)
        if obstacle:
            allowed = ", ".join(str(size) for size in self.tensor_parallel_sizes())
            heads, size = self.num_attention_heads, tensor_parallel_size
            printed = f"Total number of attention heads ({heads}) must be divisible by tensor parallel size ({size})."
            raise RefusedByVllm(
                f"{self.name} cannot be split over tensor_parallel_size {size}: {obstacle} must divide evenly; choose "
                f"one of {allowed or 'none (give another model)'}"
                f"{f' (vLLM: {printed})' if size < 1 or heads % size else ''}"
            )

    def tensor_parallel_sizes(self, largest: int | None = None) -> list[int]:
        """Sizes that the model can be split into, in order, those up to ``largest`` if it is given."""
        most = self.num_attention_heads if largest is None else min(largest, self.num_attention_heads)
        divisors = (size for size in range(1, most + 1) if self.num_attention_heads % size == 0)
        return [size for size in divisors if not self._obstacle(size)]

    def _obstacle(self, size: int) -> str:
        """What cannot be shared out by ``size``, in words; "" if all can."""
        if size < 1 or self.num_attention_heads % size or (not self.layers and not self._splits_plainly(size)):
            return f"its {self.num_attention_heads} attention heads, {self.num_key_value_heads} KV heads and MLP widths"
        parts: list[Parameter] = list(self.towers)
        for layer in dict.fromkeys(self.layers):
            heads = getattr(layer.mixer, "num_heads", size)
            if heads % size:
                return f"the {heads} heads of some layers"
            parts += layer.parameters(self.hidden_size)
        return next((f"{part.module} ({part.unit_count})" for part in parts if not part.splits_into(size)), "")

    def _splits_plainly(self, size: int) -> bool:
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


def layers_of_stage(num_layers: int, pipeline_rank: int, pipeline_parallel_size: int) -> tuple[int, int]:
    """First layer of a pipeline stage, and the one after its last, as vLLM's ``get_pp_indices`` shares them out.

    Layers that are left over go to the stages before the last, the later ones first.

    Raises ValueError for more stages than layers or a rank that is none.
    """
    if not 1 <= pipeline_parallel_size <= num_layers:
        raise RefusedByVllm(
            f"pipeline_parallel_size must lie in [1, {num_layers}] (the model's layers), got {pipeline_parallel_size}"
        )
    if not 0 <= pipeline_rank < pipeline_parallel_size:
        raise ValueError(f"pipeline_rank must lie in [0, {pipeline_parallel_size - 1}], got {pipeline_rank}")
    each, left = divmod(num_layers, pipeline_parallel_size)
    sizes = [each] * pipeline_parallel_size
    for place in range(2, left + 2):
        sizes[-place] += 1
    start = sum(sizes[:pipeline_rank])
    return start, start + sizes[pipeline_rank]


INDEXER_SCALE_BYTES = 4
FP8_SPARSE_LATENT_BYTES = 656
"""Bytes a token and layer of vLLM's ``fp8_ds_mla``: 512 in fp8, 4 scales in float32, 64 rotary dimensions in bf16."""


def token_bytes(model: ModelSpec, layer: Layer, tensor_parallel_size: int, kv_cache_dtype: str) -> int:
    """Bytes that one GPU keeps of a token in ``layer``, the keys of a sparse layer's indexer included."""
    mixer = layer.mixer
    if mixer is None:
        return 0
    size = latent_or_kv_bytes(model, layer, tensor_parallel_size, kv_cache_dtype)
    return size + indexer_bytes(layer)


def latent_or_kv_bytes(model: ModelSpec, layer: Layer, tensor_parallel_size: int, kv_cache_dtype: str) -> int:
    """Bytes that one GPU keeps of a token's keys and values, or of their latent vector."""
    if layer.mixer is None:
        return 0
    element = kv_element_bytes(model, kv_cache_dtype)
    if isinstance(layer.mixer, LatentAttention) and layer.mixer.sparse and element == 1:
        return FP8_SPARSE_LATENT_BYTES
    return layer.mixer.cached_elements(tensor_parallel_size) * element


def indexer_bytes(layer: Layer) -> int:
    """Bytes of a token's key in the layer's own indexer: fp8 with one float32 scale, whatever the KV cache's type."""
    mixer = layer.mixer
    if isinstance(mixer, LatentAttention) and mixer.index_heads:
        return mixer.index_head_dim + INDEXER_SCALE_BYTES
    return 0


def layer_kind(layer: Layer) -> str:
    """What mixes a layer's tokens, in words."""
    mixer = layer.mixer
    if mixer is None:
        return "feed-forward only"
    if isinstance(mixer, Attention):
        if mixer.sliding_window:
            return "sliding-window attention"
        return "chunked attention" if mixer.chunk_size else "full attention"
    if isinstance(mixer, LatentAttention):
        return "sparse latent attention" if mixer.sparse else "latent attention"
    return _STATE_KINDS[type(mixer)]


_STATE_KINDS: dict[type, str] = {
    Mamba1: "Mamba",
    Mamba2: "Mamba-2",
    GatedDeltaNet: "gated delta rule",
    ParallelMixer: "attention beside Mamba-2",
}


def kv_element_bytes(model: ModelSpec, kv_cache_dtype: str) -> int:
    """Bytes of one cached element; "auto" follows the checkpoint.  Raises ValueError for an unknown dtype."""
    dtype = (model.kv_cache_dtype or model.dtype) if kv_cache_dtype == "auto" else kv_cache_dtype
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
