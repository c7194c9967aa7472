"""What a memory plan is asked for, and the settings that vLLM makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from windtunnel.sim.deployment.engine_args import ENGINE, engine_defaults
from windtunnel.sim.deployment.gpu import GIB, GpuSpec
from windtunnel.sim.deployment.layers import State
from windtunnel.sim.deployment.lora import LORA_RANKS
from windtunnel.sim.deployment.memory_rules import MemoryRules, memory_rules
from windtunnel.sim.deployment.model_spec import ModelSpec
from windtunnel.sim.deployment.refusal import RefusedByVllm
from windtunnel.sim.deployment.versions import VersionProfile, profile

FIT = -1
"""A max_model_len that means "the longest that fits", as vLLM's ``--max-model-len auto``."""


@dataclass(frozen=True, slots=True)
class MeasuredPool:
    """What a real server said of its pool; it overrides the formula.  None is not known."""

    source: str
    """The file it was read from."""
    available_bytes: int | None = None
    num_gpu_blocks: int | None = None
    kv_cache_tokens: int | None = None
    max_model_len: int | None = None
    """That the tokens were logged for."""
    profiled_num_gpu_blocks: int | None = None
    """What fits, where num_gpu_blocks_override took its place."""


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """One deployment under vLLM's names; None takes the default of the release.

    Sizes are bytes of one GPU.  Raises ValueError for values out of range or options that the release does not have.
    """

    model: ModelSpec
    gpu: GpuSpec
    version: VersionProfile = field(default_factory=lambda: profile(ENGINE))
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    """FIT for the longest that fits."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    dtype: str = "auto"
    """As it was given; what it comes to is the model's own field."""
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool = False
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    swap_space_gib: float | None = None
    """Host memory for each GPU, which only the V0 engine uses."""
    cpu_offload_gib: float = 0.0
    """Weights of each GPU that stay in host memory (``--cpu-offload-gb``, which counts in GiB)."""
    kv_offloading_gib: float | None = None
    """Host memory for KV blocks that leave the GPU, of all ranks of an engine (``--kv-offloading-size``)."""
    usage_context: str = "api_server"
    free_memory_bytes: int | None = None
    """Free on the GPU when vLLM starts; None estimates it."""
    uses_v0_engine: bool = False
    allows_long_max_model_len: bool = False
    """VLLM_ALLOW_LONG_MAX_MODEL_LEN=1: a max_model_len beyond the model's own is no error."""
    max_loras: int = 0
    """Adapters that fit at once; 0 without --enable-lora."""
    max_lora_rank: int = 16
    num_speculative_tokens: int = 0
    disable_hybrid_kv_cache_manager: bool = False
    measured: MeasuredPool | None = None
    correction_bytes: int = 0
    """What a real start-up had more for the KV cache than the formula, added to its result."""
    correction_differs: tuple[str, ...] = ()
    """Settings that the estimate depends on and that start-up had otherwise."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_loras < 0:
            raise ValueError(f"max_loras must not be negative, got {self.max_loras}")
        if self.max_lora_rank not in LORA_RANKS:
            ranks = ", ".join(map(str, LORA_RANKS))
            raise ValueError(f"max_lora_rank must be one of {ranks}, got {self.max_lora_rank}")
        for name in ("kv_cache_memory_bytes", "num_gpu_blocks_override", "free_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._check_offload()
        self._check_release()

    def _check_offload(self) -> None:
        if self.cpu_offload_gib < 0:
            raise ValueError(f"cpu_offload_gb must not be negative, got {self.cpu_offload_gib}")
        if self.swap_space_gib is not None and self.swap_space_gib < 0:
            raise ValueError(f"swap_space must not be negative, got {self.swap_space_gib}")
        if self.kv_offloading_gib is not None and not self.kv_offloading_gib > 0:
            raise ValueError(f"kv_offloading_size must be above 0, got {self.kv_offloading_gib}: leave it out for none")
        if self.free_memory_bytes is not None and self.free_memory_bytes > self.gpu.memory_bytes:
            raise ValueError(
                f"free memory ({self.free_memory_bytes / GIB:.2f} GiB) must not exceed what {self.gpu.name} has in all "
                f"({self.gpu.memory_bytes / GIB:.2f} GiB)"
            )

    def _check_release(self) -> None:
        version = self.version
        later = (option for option, (field, unset) in _LATER_OPTIONS.items() if getattr(self, field) != unset)
        version.check_options(later)
        if self.enable_expert_parallel and not self.model.has_experts:
            raise RefusedByVllm(
                "Number of experts in the model must be greater than 0 when expert parallelism is enabled.  "
                f"{self.model.name} has none: leave --enable-expert-parallel out"
            )
        if self.swap_space_gib is not None and version.swap_space_gib is None:
            raise RefusedByVllm(f"swap_space is no option of {version.label}: it went with vLLM 0.18; leave it out")
        if self.uses_v0_engine and version.v0 is None:
            raise RefusedByVllm(
                f"{version.label} has no V0 engine: it went with vLLM 0.11; leave --v0 out or take vllm-0.10 or earlier"
            )
        if self.max_model_len == FIT and (not self.rules.fits_max_model_len or self.runs_on_v0):
            raise RefusedByVllm(
                f"max_model_len -1 (auto) is unknown to {version.label}: it came with vLLM 0.14; give a number"
            )

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def rules(self) -> MemoryRules:
        """Rules of the release."""
        return memory_rules(self.version)

    @property
    def runs_on_v0(self) -> bool:
        """Whether the older engine runs: as asked for, or since V1 of that release leaves models with states, or cards
        older than Ampere, to it.

        Source: ``_is_v1_supported_oracle`` in ``engine/arg_utils.py``, as read in 0.8.4 to 0.10.2.
        """
        if self.version.has_v0_engine and (self.gpu.compute_capability or _LEAST_OF_V1) < _LEAST_OF_V1:
            return True
        falls_back = self.version.has_v0_engine and not self.rules.states_in_v1 and has_states(self.model)
        if falls_back and self.version.architecture_since(self.model.architecture):
            return self.uses_v0_engine
        return self.uses_v0_engine or falls_back

    @property
    def overrides_blocks(self) -> bool:
        """Whether num_gpu_blocks_override is given and has an effect."""
        return self.num_gpu_blocks_override is not None and (self.rules.applies_override or self.runs_on_v0)

    @property
    def fits_length(self) -> bool:
        """Whether the longest max_model_len that fits is wanted."""
        return self.max_model_len == FIT


_LEAST_OF_V1 = (8, 0)
"""Compute capability that V1 asked for as long as there was V0."""
_LATER_OPTIONS = {
    "data_parallel_size": ("data_parallel_size", 1),
    "disable_hybrid_kv_cache_manager": ("disable_hybrid_kv_cache_manager", False),
    "kv_cache_memory_bytes": ("kv_cache_memory_bytes", None),
    "kv_offloading_size": ("kv_offloading_gib", None),
}
"""Options that came after vLLM 0.8.0, the field that gives each, and its value where it is not given."""


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The values that the plan is made with, and where each comes from."""

    gpu_memory_utilization: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    sources: Mapping[str, str]


def settle(request: MemoryRequest) -> MemorySettings:
    """Fill in the defaults of the release, by card, context and engine.

    Raises ValueError for a value out of range.
    """
    length = None if request.fits_length else request.max_model_len
    defaults = engine_defaults(
        request.gpu,
        request.usage_context,
        model=request.model,
        max_num_batched_tokens=request.max_num_batched_tokens,
        max_num_seqs=request.max_num_seqs,
        max_model_len=length,
        gpu_memory_utilization=request.gpu_memory_utilization,
        block_size=request.block_size,
        enable_chunked_prefill=request.enable_chunked_prefill,
        enable_prefix_caching=request.enable_prefix_caching,
        version=request.version,
    )
    seqs, budget, sources = defaults.max_num_seqs, defaults.max_num_batched_tokens, dict(defaults.sources)
    if request.runs_on_v0:
        seqs, budget = _v0_batch(request, defaults.max_model_len)
        sources |= {name: "default of V0" for name in _V0_NAMES if getattr(request, name) is None}
    caching = defaults.enable_prefix_caching
    if request.enable_prefix_caching is None and has_states(request.model) and not request.rules.caches_states:
        caching = False
        sources["enable_prefix_caching"] = f"{request.version.label} default for models with states"
    if request.runs_on_v0 and request.enable_prefix_caching is None:
        caching, sources["enable_prefix_caching"] = False, "default of V0"
    return MemorySettings(
        defaults.gpu_memory_utilization,
        defaults.max_model_len,
        seqs,
        budget,
        defaults.block_size,
        caching,
        defaults.enable_chunked_prefill,
        sources,
    )


_V0_NAMES = ("max_num_seqs", "max_num_batched_tokens")


def has_states(model: ModelSpec) -> bool:
    """Whether some layers keep a state of fixed size for each sequence (Mamba, linear attention)."""
    return any(isinstance(layer.mixer, State) for layer in dict.fromkeys(model.layers))


def _v0_batch(request: MemoryRequest, max_model_len: int) -> tuple[int, int]:
    v0 = request.version.v0
    assert v0 is not None, "__post_init__ asks for it"
    budget = v0.max_num_batched_tokens(max_model_len)
    if request.enable_chunked_prefill is not None:
        budget = 2048 if request.enable_chunked_prefill else max(max_model_len, 2048)
    return request.max_num_seqs or v0.max_num_seqs, request.max_num_batched_tokens or budget


def check_block_size(request: MemoryRequest) -> None:
    """Raise ValueError for a block size that the release does not take on CUDA."""
    size, allowed = request.block_size, request.rules.block_sizes
    if size is None or (size >= 1 and (size % 16 == 0 if allowed is None else size in allowed)):
        return
    known = "a multiple of 16" if allowed is None else f"one of {', '.join(map(str, allowed))}"
    nearest = max(round(size / 16), 1) * 16 if allowed is None else min(allowed, key=lambda each: abs(each - size))
    raise RefusedByVllm(f"block_size must be {known} in {request.version.label}, got {size}; nearest: {nearest}")


def check_budget(request: MemoryRequest, settings: MemorySettings) -> None:
    """Raise ValueError for a token budget that vLLM refuses: below max_num_seqs, or below an unchunked prompt."""
    budget, seqs, length = settings.max_num_batched_tokens, settings.max_num_seqs, settings.max_model_len
    if budget < seqs:
        raise RefusedByVllm(
            f"max_num_batched_tokens ({budget}) must be greater than or equal to max_num_seqs ({seqs}): vLLM refuses "
            "this; raise the one or lower the other"
        )
    if not settings.enable_chunked_prefill and budget < length and not request.runs_on_v0:
        raise RefusedByVllm(
            f"max_num_batched_tokens ({budget}) must be at least max_model_len ({length}) without chunked prefill: "
            "raise it, lower max_model_len, or leave chunked prefill on"
        )
