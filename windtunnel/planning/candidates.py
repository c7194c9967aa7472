"""The deployments that a plan chooses from, and which of them do not even start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from windtunnel.planning.offers import Offer
from windtunnel.sim.deployment.engine_args import ENGINE, engine_defaults
from windtunnel.sim.deployment.gpu import load_gpu
from windtunnel.sim.deployment.kv_dtypes import check_kv_dtype_name
from windtunnel.sim.deployment.memory import plan_memory
from windtunnel.sim.deployment.memory_plan import DOES_NOT_START, OK
from windtunnel.sim.deployment.memory_request import MemoryRequest
from windtunnel.sim.deployment.model import ModelSpec, UnsupportedModel, load_model, short_name
from windtunnel.sim.deployment.versions import VersionProfile, profile

GPUS_PER_HOST = 8
"""Cards of one host, over which tensor parallelism may span without leaving it."""
SEATS = (64, 128, 256)
"""max_num_seqs that are tried beside vLLM's default for the card."""
BUDGETS = (512, 1024, 2048, 4096, 8192, 16384)
"""max_num_batched_tokens that are tried beside vLLM's default for the card."""
SHARES = (0.95,)
"""gpu_memory_utilization that is tried beside vLLM's default."""
KV_DTYPES = ("auto", "fp8")


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What one replica runs on: the part of a deployment that sets its price and its step times."""

    model: str
    gpu: str
    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    names_model: bool = False
    """Whether the label names the model, too: where there are several."""
    max_model_len: int | None = None
    """Longest request of the model; None is what the scenario says, or vLLM's default."""

    @property
    def num_gpus(self) -> int:
        """Cards of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def label(self) -> str:
        """``4 x H100-SXM (TP 4)``, in short."""
        stages = f", PP {self.pipeline_parallel_size}" if self.pipeline_parallel_size > 1 else ""
        kv = "" if self.kv_cache_dtype == "auto" else f", {self.kv_cache_dtype} KV"
        model = f"{short_name(self.model)} on " if self.names_model else ""
        return f"{model}{self.num_gpus} x {self.gpu} (TP {self.tensor_parallel_size}{stages}{kv})"


@dataclass(frozen=True, slots=True, order=True)
class Knobs:
    """The engine's settings that are chosen; every value is the one that vLLM ends up with."""

    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float

    @property
    def label(self) -> str:
        """All three, in short."""
        return (
            f"max_num_seqs {self.max_num_seqs:,}, max_num_batched_tokens {self.max_num_batched_tokens:,}, "
            f"gpu_memory_utilization {self.gpu_memory_utilization:g}"
        )


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One deployment but for the number of its replicas."""

    shape: Shape
    knobs: Knobs

    def overrides(self) -> dict[str, Any]:
        """Settings of a scenario that make this deployment of it."""
        length = self.shape.max_model_len
        return {
            **({} if length is None else {"max_model_len": length}),
            "model": self.shape.model,
            "gpu": self.shape.gpu,
            "tensor_parallel_size": self.shape.tensor_parallel_size,
            "pipeline_parallel_size": self.shape.pipeline_parallel_size,
            "kv_cache_dtype": self.shape.kv_cache_dtype,
            "max_num_seqs": self.knobs.max_num_seqs,
            "max_num_batched_tokens": self.knobs.max_num_batched_tokens,
            "gpu_memory_utilization": self.knobs.gpu_memory_utilization,
        }

    @property
    def label(self) -> str:
        """All of it on one line."""
        return f"{self.shape.label}, {self.knobs.label}"


_COUNTS = {
    "tensor_parallel_sizes": ("tensor_parallel_size", "1 is a model that is not split"),
    "pipeline_parallel_sizes": ("pipeline_parallel_size", "1 is a model that is not split"),
    "max_num_seqs": ("max_num_seqs", "give seats such as 256, or leave it out"),
    "max_num_batched_tokens": ("max_num_batched_tokens", "give tokens such as 8192, or leave it out"),
}
"""Lists of a space of which no value may be below 1: what a value is called, and what to do."""


@dataclass(frozen=True, slots=True)
class Space:
    """What is to be combined.  None is windtunnel's own small set around vLLM's default."""

    models: tuple[str, ...]
    offers: tuple[Offer, ...]
    tensor_parallel_sizes: tuple[int, ...] | None = None
    pipeline_parallel_sizes: tuple[int, ...] = (1,)
    kv_cache_dtypes: tuple[str, ...] = KV_DTYPES
    max_num_seqs: tuple[int, ...] | None = None
    max_num_batched_tokens: tuple[int, ...] | None = None
    gpu_memory_utilizations: tuple[float, ...] | None = None
    gpus_per_host: int = GPUS_PER_HOST
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of every candidate: max_model_len, block_size, enable_prefix_caching, dtype, usage_context …"""
    version: VersionProfile = field(default_factory=lambda: profile(ENGINE))
    max_model_lens: Mapping[str, int] = field(default_factory=dict)
    """By model, in place of the one of ``fixed``."""

    def __post_init__(self) -> None:
        if self.gpus_per_host < 1:
            raise ValueError(f"gpus_per_host must be at least 1, got {self.gpus_per_host}: most hosts have 8")
        for name, (what, hint) in _COUNTS.items():
            for value in getattr(self, name) or ():
                if value < 1:
                    raise ValueError(f"{what} must be at least 1, got {value}: {hint}")
        for kv_dtype in self.kv_cache_dtypes:
            check_kv_dtype_name(kv_dtype)
        self._check_budgets()
        for share in self.gpu_memory_utilizations or ():
            if not 0 < share <= 1:
                raise ValueError(
                    f"gpu_memory_utilization must be above 0 and at most 1, got {share:g}: 0.9 is 90 % of the memory"
                )

    def _check_budgets(self) -> None:
        """Raises ValueError where no budget holds the smallest number of seats, which vLLM refuses."""
        if self.max_num_seqs and self.max_num_batched_tokens:
            seats, budget = min(self.max_num_seqs), max(self.max_num_batched_tokens)
            if budget < seats:
                raise ValueError(
                    f"max_num_batched_tokens (at most {budget:,}) is below max_num_seqs (at least {seats:,}): vLLM "
                    "refuses this; raise the one or lower the other"
                )

    def first_seats_and_budget(self) -> tuple[int | None, int | None]:
        """Those to begin with: the first of each list, as far as vLLM takes them together."""
        seats, budgets = self.max_num_seqs or (None,), self.max_num_batched_tokens or (None,)
        pairs = product(seats, budgets)
        return next((a, b) for a, b in pairs if a is None or b is None or b >= a)


@dataclass(frozen=True, slots=True)
class Refused:
    """A shape, or some knobs of one, that never got as far as a simulation."""

    shape: Shape
    knobs: tuple[Knobs, ...]
    """Those that are refused for this kind of reason; empty where it has nothing to do with them."""
    kind: str
    """"does_not_fit", "unsafe", "refused" (the model cannot be split so, or the release lacks an
    option) or "uncalibrated"."""
    reason: str
    """Of the first of the knobs, in vLLM's words where it is vLLM that refuses."""
    is_whole: bool = True
    """Whether nothing is left of the shape."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory plan of a candidate that starts."""

    num_gpu_blocks: int
    kv_cache_tokens: int
    max_concurrency: float
    oom_margin_bytes: int
    """Free on the tightest card once the pool is there and CUDA graphs are captured."""


@dataclass(frozen=True, slots=True)
class Feasible:
    """A candidate that vLLM starts with."""

    candidate: Candidate
    memory: Memory
    is_default: bool
    """Whether all knobs are vLLM's defaults."""


def candidates(space: Space) -> tuple[list[Feasible], list[Refused]]:
    """Every deployment of the space that vLLM starts with, and why the others do not, in a fixed order."""
    feasible: list[Feasible] = []
    refused: list[Refused] = []
    for shape in shapes(space):
        found, dropped = _of_shape(space, shape)
        feasible += found
        refused += dropped
    return feasible, refused


def shapes(space: Space) -> Iterator[Shape]:
    """Models x cards x splits x cache types.  Without a list of sizes: powers of two that one host holds."""
    sizes = space.tensor_parallel_sizes or tuple(2**k for k in range(space.gpus_per_host.bit_length()))
    for model, offer, size, stages, kv_dtype in product(
        space.models, space.offers, sizes, space.pipeline_parallel_sizes, space.kv_cache_dtypes
    ):
        if space.tensor_parallel_sizes is not None or size * stages <= space.gpus_per_host:
            length = space.max_model_lens.get(model)
            yield Shape(model, offer.gpu, size, stages, kv_dtype, len(space.models) > 1, length)


def default_knobs(space: Space, shape: Shape) -> Knobs:
    """The knobs that vLLM takes for this shape if nobody says anything (or the space's only choice)."""
    seats, budget = space.first_seats_and_budget()
    defaults = engine_defaults(
        load_gpu(shape.gpu),
        str(space.fixed.get("usage_context") or "api_server"),
        model=_model(space, shape),
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        gpu_memory_utilization=_only(space.gpu_memory_utilizations),
        max_model_len=space.fixed.get("max_model_len"),
        block_size=space.fixed.get("block_size"),
        enable_chunked_prefill=space.fixed.get("enable_chunked_prefill"),
        version=space.version,
    )
    return Knobs(defaults.max_num_seqs, defaults.max_num_batched_tokens, defaults.gpu_memory_utilization)


def _only(values: Sequence[Any] | None) -> Any:
    return values[0] if values else None


def _of_shape(space: Space, shape: Shape) -> tuple[list[Feasible], list[Refused]]:
    try:
        first = default_knobs(space, shape)
        options = _knobs(space, first)
        judged = [(knobs, _judged(space, shape, knobs)) for knobs in options]
    except UnsupportedModel:
        raise
    except ValueError as error:
        return [], [Refused(shape, (), "refused", str(error))]
    feasible = [
        Feasible(Candidate(shape, knobs), memory, knobs == first)
        for knobs, memory in judged
        if isinstance(memory, Memory)
    ]
    refused: dict[str, list[tuple[Knobs, str]]] = {}
    for knobs, memory in judged:
        if not isinstance(memory, Memory):
            refused.setdefault(memory[0], []).append((knobs, memory[1]))
    return feasible, [
        Refused(shape, tuple(knobs for knobs, _ in found), kind, found[0][1], is_whole=not feasible)
        for kind, found in refused.items()
    ]


def _knobs(space: Space, default: Knobs) -> list[Knobs]:
    """The default first, then the others in order; what vLLM refuses (a budget below the seats) is left out."""
    seats = space.max_num_seqs or (default.max_num_seqs, *(each for each in SEATS if each < default.max_num_seqs))
    budgets = space.max_num_batched_tokens or (default.max_num_batched_tokens, *BUDGETS)
    shares = space.gpu_memory_utilizations or (default.gpu_memory_utilization, *SHARES)
    made = [Knobs(*values) for values in product(seats, budgets, shares)]
    kept = [knobs for knobs in made if knobs.max_num_batched_tokens >= knobs.max_num_seqs]
    return [default, *sorted(dict.fromkeys(knobs for knobs in kept if knobs != default))]


def _judged(space: Space, shape: Shape, knobs: Knobs) -> Memory | tuple[str, str]:
    """The memory plan, or what is wrong with it: kind and reason."""
    judged = plan_memory(_request(space, shape, knobs), with_remedies=False)
    if judged.verdict == OK:
        plan = judged.plan
        return Memory(plan.num_gpu_blocks, plan.kv_cache_tokens, plan.max_concurrency, plan.margin_bytes)
    return ("does_not_fit" if judged.verdict == DOES_NOT_START else "unsafe"), judged.reason


def _request(space: Space, shape: Shape, knobs: Knobs) -> MemoryRequest:
    fixed = {
        key: space.fixed[key]
        for key in ("max_model_len", "block_size", "enable_prefix_caching", "usage_context")
        if space.fixed.get(key) is not None
    }
    if shape.max_model_len is not None:
        fixed["max_model_len"] = shape.max_model_len
    return MemoryRequest(
        _model(space, shape),
        load_gpu(shape.gpu),
        space.version,
        tensor_parallel_size=shape.tensor_parallel_size,
        pipeline_parallel_size=shape.pipeline_parallel_size,
        kv_cache_dtype=shape.kv_cache_dtype,
        max_num_seqs=knobs.max_num_seqs,
        max_num_batched_tokens=knobs.max_num_batched_tokens,
        gpu_memory_utilization=knobs.gpu_memory_utilization,
        **fixed,
    )


def _model(space: Space, shape: Shape) -> ModelSpec:
    model = load_model(shape.model)
    dtype = space.fixed.get("dtype")
    return model if dtype in (None, "auto") else replace(model, dtype=str(dtype))
