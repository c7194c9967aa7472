"""The parts that decoder layers are made of: their weights, and what they keep of a sequence.

Names of modules follow the checkpoints, because quantisation configs name the modules they leave out.  Parts of one
matrix that are split differently carry a colon: "in_proj:x" and "in_proj:bc" are both in_proj.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from windtunnel.sim.deployment.weights import Parameter

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Attention:
    """Multi-head, grouped-query or multi-query attention over the whole context, a window of it or a chunk."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    """Width of a value head; 0 is head_dim."""
    sliding_window: int = 0
    """Tokens that are seen, the token itself included; 0 sees all."""
    chunk_size: int = 0
    """Tokens of the chunks that are attended to one by one; 0 for none."""
    bias: bool = False
    """On queries, keys and values."""
    output_bias: bool = False
    qk_norm: str = ""
    """Norms of queries and keys: "head" (one head wide), "all" (all heads, shared out), "whole" (all heads, on every
    GPU) or "" for none."""
    output_gate: bool = False
    """Queries come with a gate of the same width."""
    sinks: bool = False
    """One weight a head that attention may fall on."""
    value_is_key: bool = False
    """The checkpoint has no values of its own; vLLM holds the keys' projection twice."""
    head_gate: bool = False
    """A gate of one output a head."""
    shares_kv: bool = False
    """Uses the cache of an earlier layer and holds neither keys nor values."""

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.v_head_dim or self.head_dim

    def parameters(self, hidden_size: int, name: str) -> Iterator[Parameter]:
        """Weights of one layer."""
        heads, kv_heads, dim, value_dim = self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim
        projections = [("q_proj", heads * dim * (2 if self.output_gate else 1), heads)]
        if not self.shares_kv:
            projections += [("k_proj", kv_heads * dim, kv_heads), ("v_proj", kv_heads * value_dim, kv_heads)]
        for module, outputs, units in projections:
            real = not (self.value_is_key and module == "v_proj")
            yield Parameter(f"{name}.{module}", outputs, hidden_size, "outputs", units, in_checkpoint=real)
            if self.bias:
                yield _vector(f"{name}.{module}.bias", outputs, "outputs", units)
        yield Parameter(f"{name}.o_proj", hidden_size, heads * value_dim, "inputs", heads)
        if self.output_bias:
            yield _vector(f"{name}.o_proj.bias", hidden_size)
        if self.head_gate:
            yield Parameter(f"{name}.g_proj", heads, hidden_size, "outputs", heads)
        if self.qk_norm == "head":
            yield _vector(f"{name}.qk_norm", (1 if self.shares_kv else 2) * dim)
        elif self.qk_norm == "all":
            yield _vector(f"{name}.q_norm", heads * dim, "outputs", heads)
            yield _vector(f"{name}.k_norm", kv_heads * dim, "outputs", kv_heads)
        elif self.qk_norm == "whole":
            yield _vector(f"{name}.qk_norm", (heads + kv_heads) * dim)
        if self.sinks:
            yield _vector(f"{name}.sinks", heads, "outputs")

    def kv_heads_per_gpu(self, tensor_parallel_size: int) -> int:
        """KV heads one GPU holds: split until one is left, then replicated."""
        return max(self.num_kv_heads // tensor_parallel_size, 1)

    def cached_elements(self, tensor_parallel_size: int) -> int:
        """Elements of keys and values that one GPU keeps of a token."""
        if self.shares_kv:
            return 0
        return self.kv_heads_per_gpu(tensor_parallel_size) * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): one compressed vector a token, which every GPU keeps whole."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0
    """Width of the compressed queries; 0 for queries that are not compressed."""
    sparse: bool = False
    """Attends only to the tokens that an indexer, its own or an earlier layer's, picks (DeepSeek-V3.2)."""
    index_heads: int = 0
    """Heads of the layer's own indexer; 0 where it has none."""
    index_head_dim: int = 0

    def parameters(self, hidden_size: int, name: str) -> Iterator[Parameter]:
        """Weights of one layer."""
        heads, query_dim = self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.q_lora_rank:
            yield Parameter(f"{name}.q_a_proj", self.q_lora_rank, hidden_size)
            yield _vector(f"{name}.q_a_layernorm", self.q_lora_rank)
            yield Parameter(f"{name}.q_b_proj", heads * query_dim, self.q_lora_rank, "outputs", heads)
        else:
            yield Parameter(f"{name}.q_proj", heads * query_dim, hidden_size, "outputs", heads)
        yield Parameter(f"{name}.kv_a_proj_with_mqa", self.kv_lora_rank + self.qk_rope_head_dim, hidden_size)
        yield _vector(f"{name}.kv_a_layernorm", self.kv_lora_rank)
        expanded = heads * (self.qk_nope_head_dim + self.v_head_dim)
        yield Parameter(f"{name}.kv_b_proj", expanded, self.kv_lora_rank, "outputs", heads, keeps_copy=True)
        yield Parameter(f"{name}.o_proj", hidden_size, heads * self.v_head_dim, "inputs", heads)
        if self.index_heads:
            yield from self._indexer(hidden_size, f"{name}.indexer")

    def _indexer(self, hidden_size: int, name: str) -> Iterator[Parameter]:
        yield Parameter(f"{name}.wq_b", self.index_heads * self.index_head_dim, self.q_lora_rank or hidden_size)
        yield Parameter(f"{name}.wk", self.index_head_dim, hidden_size, linear=False)
        yield Parameter(f"{name}.weights_proj", self.index_heads, hidden_size, linear=False)
        yield _vector(f"{name}.k_norm", 2 * self.index_head_dim, element_bytes=FLOAT32_BYTES)

    def cached_elements(self, tensor_parallel_size: int) -> int:
        """Elements that one GPU keeps of a token, whatever the tensor parallelism."""
        del tensor_parallel_size
        return self.kv_lora_rank + self.qk_rope_head_dim


class State:
    """A mixer that keeps one state of fixed size of each sequence instead of a token's keys and values."""

    __slots__ = ()

    @property
    def checkpoint_blocks(self) -> int:
        """Blocks that prefix caching may add for a state in the middle of a prefill."""
        return 0

    def state_elements(self, tensor_parallel_size: int, num_speculative_tokens: int = 0) -> tuple[int, int]:
        """Elements of the convolution's and of the recurrence's state that one GPU keeps of a sequence."""
        raise NotImplementedError

    def cached_elements(self, tensor_parallel_size: int) -> int:
        """Nothing for each token."""
        del tensor_parallel_size
        return 0


@dataclass(frozen=True, slots=True)
class Mamba2(State):
    """A Mamba-2 mixer (Nemotron-H, Bamba, Granite 4 hybrid, Falcon-H1)."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_kernel: int
    conv_bias: bool = True
    projection_bias: bool = False
    gated_norm: bool = True

    @property
    def inner_size(self) -> int:
        """Width of the mixer."""
        return self.num_heads * self.head_dim

    @property
    def checkpoint_blocks(self) -> int:
        """One, since vLLM 0.32."""
        return 1

    def parameters(self, hidden_size: int, name: str) -> Iterator[Parameter]:
        """Weights of one layer."""
        heads, inner, groups = self.num_heads, self.inner_size, self.num_groups
        shared = 2 * groups * self.state_size
        for module, outputs, units in (("x", 2 * inner, heads), ("bc", shared, groups), ("dt", heads, heads)):
            yield Parameter(f"{name}.in_proj:{module}", outputs, hidden_size, "outputs", units)
            if self.projection_bias:
                yield _vector(f"{name}.in_proj:{module}.bias", outputs, "outputs", units)
        for module, outputs, units in (("x", inner, heads), ("bc", shared, groups)):
            yield Parameter(f"{name}.conv1d:{module}", outputs, self.conv_kernel, "outputs", units, linear=False)
            if self.conv_bias:
                yield _vector(f"{name}.conv1d:{module}.bias", outputs, "outputs", units)
        yield _vector(f"{name}.A", heads, "outputs", element_bytes=FLOAT32_BYTES)
        yield _vector(f"{name}.D", heads, "outputs")
        yield _vector(f"{name}.dt_bias", heads, "outputs")
        if self.gated_norm:
            yield _vector(f"{name}.norm", inner, "outputs", heads)
        yield Parameter(f"{name}.out_proj", hidden_size, inner, "inputs", heads)
        if self.projection_bias:
            yield _vector(f"{name}.out_proj.bias", hidden_size)

    def state_elements(self, tensor_parallel_size: int, num_speculative_tokens: int = 0) -> tuple[int, int]:
        """As vLLM's MambaStateShapeCalculator.mamba2_state_shape: groups are replicated where they do not divide."""
        size, groups = tensor_parallel_size, self.num_groups
        groups += 0 if groups % size == 0 else size - groups
        conv_dim = (self.inner_size + 2 * groups * self.state_size) // size
        return (
            self.conv_kernel - 1 + num_speculative_tokens
        ) * conv_dim, self.num_heads // size * self.head_dim * self.state_size


@dataclass(frozen=True, slots=True)
class Mamba1(State):
    """A Mamba-1 mixer with norms on step, input and output (Jamba)."""

    inner_size: int
    state_size: int
    conv_kernel: int
    dt_rank: int
    conv_bias: bool = True
    projection_bias: bool = False
    norms: bool = True

    def parameters(self, hidden_size: int, name: str) -> Iterator[Parameter]:
        """Weights of one layer."""
        inner, state = self.inner_size, self.state_size
        yield Parameter(f"{name}.in_proj", 2 * inner, hidden_size, "outputs", inner)
        yield Parameter(f"{name}.conv1d", inner, self.conv_kernel, "outputs", linear=False)
        if self.conv_bias:
            yield _vector(f"{name}.conv1d.bias", inner, "outputs")
        yield Parameter(f"{name}.x_proj", self.dt_rank + 2 * state, inner, "inputs")
        yield Parameter(f"{name}.dt_proj", inner, self.dt_rank, "outputs")
        yield _vector(f"{name}.dt_proj.bias", inner, "outputs")
        yield Parameter(f"{name}.A", inner, state, "outputs", element_bytes=FLOAT32_BYTES, linear=False)
        yield _vector(f"{name}.D", inner, "outputs")
        if self.norms:
            yield _vector(f"{name}.norms", self.dt_rank + 2 * state)
        yield Parameter(f"{name}.out_proj", hidden_size, inner, "inputs")
        if self.projection_bias:
            yield _vector(f"{name}.in_proj.bias", 2 * inner, "outputs", inner)
            yield _vector(f"{name}.out_proj.bias", hidden_size)

    def state_elements(self, tensor_parallel_size: int, num_speculative_tokens: int = 0) -> tuple[int, int]:
        """As vLLM's MambaStateShapeCalculator.mamba1_state_shape."""
        del num_speculative_tokens  # not drafted for
        width = self.inner_size // tensor_parallel_size
        return (self.conv_kernel - 1) * width, width * self.state_size


@dataclass(frozen=True, slots=True)
class GatedDeltaNet(State):
    """Linear attention by the gated delta rule (Qwen3-Next, Qwen3.5)."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    def parameters(self, hidden_size: int, name: str) -> Iterator[Parameter]:
        """Weights of one layer."""
        keys, values = self.num_key_heads * self.key_head_dim, self.num_value_heads * self.value_head_dim
        key_heads, value_heads = self.num_key_heads, self.num_value_heads
        yield Parameter(f"{name}.in_proj_qkv:qk", 2 * keys, hidden_size, "outputs", key_heads)
        yield Parameter(f"{name}.in_proj_qkv:v", values, hidden_size, "outputs", value_heads)
        yield Parameter(f"{name}.in_proj_z", values, hidden_size, "outputs", value_heads)
        yield Parameter(f"{name}.in_proj_b", value_heads, hidden_size, "outputs")
        yield Parameter(f"{name}.in_proj_a", value_heads, hidden_size, "outputs")
        yield Parameter(f"{name}.conv1d:qk", 2 * keys, self.conv_kernel, "outputs", key_heads, linear=False)
        yield Parameter(f"{name}.conv1d:v", values, self.conv_kernel, "outputs", value_heads, linear=False)
        yield _vector(f"{name}.dt_bias", value_heads, "outputs")
        yield _vector(f"{name}.A_log", value_heads, "outputs", element_bytes=FLOAT32_BYTES)
        yield _vector(f"{name}.norm", self.value_head_dim)
        yield Parameter(f"{name}.out_proj", hidden_size, values, "inputs", value_heads)

    def state_elements(self, tensor_parallel_size: int, num_speculative_tokens: int = 0) -> tuple[int, int]:
        """As vLLM's MambaStateShapeCalculator.gated_delta_net_state_shape."""
        size = tensor_parallel_size
        keys, values = self.num_key_heads * self.key_head_dim, self.num_value_heads * self.value_head_dim
        recurrent = self.num_value_heads // size * self.value_head_dim * self.key_head_dim
        return (self.conv_kernel - 1 + num_speculative_tokens) * ((2 * keys + values) // size), recurrent


@dataclass(frozen=True, slots=True)
class ParallelMixer(State):
    """Attention and a state-space mixer side by side in one layer (Falcon-H1)."""

    attention: Attention
    state: Mamba2

    def parameters(self, hidden_size: int, name: str) -> Iterator[Parameter]:
        """Weights of both."""
        yield from self.attention.parameters(hidden_size, name)
        yield from self.state.parameters(hidden_size, "mamba")

    @property
    def checkpoint_blocks(self) -> int:
        """Those of the state-space mixer."""
        return self.state.checkpoint_blocks

    def state_elements(self, tensor_parallel_size: int, num_speculative_tokens: int = 0) -> tuple[int, int]:
        """Those of the state-space mixer."""
        return self.state.state_elements(tensor_parallel_size, num_speculative_tokens)

    def cached_elements(self, tensor_parallel_size: int) -> int:
        """Those of the attention."""
        return self.attention.cached_elements(tensor_parallel_size)


Mixer = Attention | LatentAttention | Mamba2 | Mamba1 | GatedDeltaNet | ParallelMixer


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense feed-forward block."""

    width: int
    gated: bool = True
    bias: bool = False

    def parameters(self, hidden_size: int, name: str) -> Iterator[Parameter]:
        """Weights of one layer."""
        for module in ("gate_proj", "up_proj") if self.gated else ("up_proj",):
            yield Parameter(f"{name}.{module}", self.width, hidden_size, "outputs")
            if self.bias:
                yield _vector(f"{name}.{module}.bias", self.width, "outputs")
        yield Parameter(f"{name}.down_proj", hidden_size, self.width, "inputs")
        if self.bias:
            yield _vector(f"{name}.down_proj.bias", hidden_size)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts with its router and the experts that every token visits."""

    num_experts: int
    num_per_token: int
    width: int
    gated: bool = True
    bias: bool = False
    shared_width: int = 0
    """Width of all experts that every token visits, together; 0 where there is none."""
    shared_gate: bool = False
    latent_size: int = 0
    """Width that tokens are projected to before the experts; 0 is hidden_size."""
    router_bytes: int = 0
    """Bytes of an element of the router; 0 follows the model."""
    router_bias_bytes: int = 0
    """Bytes of an element of the router's bias or score correction; 0 where there is none."""
    router_scales: int = 0
    """Further weights of the router."""
    expert_module: str = "experts"
    shared_module: str = "shared_experts"

    def parameters(self, hidden_size: int, name: str) -> Iterator[Parameter]:
        """Weights of one layer."""
        yield Parameter(f"{name}.gate", self.num_experts, hidden_size, element_bytes=self.router_bytes, linear=False)
        if self.router_bias_bytes:
            yield _vector(f"{name}.gate.bias", self.num_experts, element_bytes=self.router_bias_bytes)
        if self.router_scales:
            yield _vector(f"{name}.gate.scales", self.router_scales)
        seen = self.latent_size or hidden_size
        if self.latent_size:
            yield Parameter(f"{name}.fc1_latent_proj", seen, hidden_size)
            yield Parameter(f"{name}.fc2_latent_proj", hidden_size, seen)
        yield from self._experts(seen, f"{name}.{self.expert_module}.0")
        if self.shared_width:
            yield from Mlp(self.shared_width, self.gated).parameters(hidden_size, f"{name}.{self.shared_module}")
        if self.shared_gate:
            yield Parameter(f"{name}.shared_expert_gate", 1, hidden_size, linear=False)

    def _experts(self, seen: int, name: str) -> Iterator[Parameter]:
        for parameter in Mlp(self.width, self.gated, self.bias).parameters(seen, name):
            yield parameter._replace(copies=self.num_experts)


FeedForward = Mlp | Experts


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: what mixes tokens, what works on each, and its norms."""

    mixer: Mixer | None = None
    feed_forward: FeedForward | None = None
    also: FeedForward | None = None
    """A second feed-forward block beside the first (Gemma 4: dense and experts)."""
    norm_elements: int = 0
    """Weights of all norms and scalars of the layer."""
    mixer_name: str = "self_attn"
    feed_forward_name: str = "mlp"
    also_name: str = ""

    def parameters(self, hidden_size: int) -> Iterator[Parameter]:
        """Weights of the layer."""
        if self.mixer is not None:
            yield from self.mixer.parameters(hidden_size, self.mixer_name)
        if self.feed_forward is not None:
            yield from self.feed_forward.parameters(hidden_size, self.feed_forward_name)
        if self.also is not None:
            yield from self.also.parameters(hidden_size, self.also_name)
        if self.norm_elements:
            yield _vector("norms", self.norm_elements)

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts of the layer."""
        return next((part for part in (self.feed_forward, self.also) if isinstance(part, Experts)), None)

    @property
    def mlp(self) -> Mlp | None:
        """The dense block of the layer."""
        return next((part for part in (self.feed_forward, self.also) if isinstance(part, Mlp)), None)


def _vector(module: str, size: int, split: str = "", units: int = 0, element_bytes: int = 0) -> Parameter:
    return Parameter(module, size, 1, split, units, element_bytes=element_bytes, linear=False)
