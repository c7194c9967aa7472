"""From settings to a served model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.executor.engine import Engine
from windtunnel.executor.filler import Filler
from windtunnel.executor.model_files import section, token_ids, whole
from windtunnel.executor.server.cache_info import cache_info
from windtunnel.executor.server.engine_loop import EngineLoop
from windtunnel.executor.server.executors import Executors, ModelExecutors, WhyNot
from windtunnel.executor.server.frontend import Frontend, read_sampling_defaults
from windtunnel.executor.server.metrics import EngineMetrics
from windtunnel.executor.server.tokenizer import load_chat_template, load_tokenizer
from windtunnel.executor.shadow import Drift, shadowed
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.per_request import make_scheduler
from windtunnel.sim.engine.protocols import CostModel, Executor
from windtunnel.sim.simulated import SimExecutor

if TYPE_CHECKING:
    from windtunnel.executor.model_config import DecoderConfig

ANY_VOCABULARY = 2**20
"""Vocabulary of a server without a model: token ids of any tokenizer are taken."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served, as far as the server must know."""

    names: tuple[str, ...]
    """Names that it answers to."""
    root: str
    """What was given as model."""
    config: Mapping[str, Any] | None = None
    """Its config.json; None for a server that simulates no model in particular."""
    folder: Path | None = None
    """Where tokenizer and weights are; None for a bundled config."""

    @property
    def vocab_size(self) -> int:
        """Token ids that it knows."""
        config = self.config or {}
        return whole(config, "vocab_size", whole(section(config, "text_config"), "vocab_size", ANY_VOCABULARY))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, by its config.json."""
        return token_ids(self.config or {}, "eos_token_id", self.vocab_size)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How it is served; names are those of the flags."""

    scheduler: SchedulerConfig
    cost: CostModel | None = None
    """Prices simulated steps; without one there is no simulated executor."""
    executor: str = "sim"
    speed: float = 1.0
    seed: int = 0
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    num_threads: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    default_output_tokens: int | None = 256
    """Tokens after which a made-up answer ends whose request sets no limit; None: it goes on to the context's end."""
    cache: Mapping[str, Any] = field(default_factory=dict)
    """Fields of vLLM's CacheConfig that this server was given, for ``vllm:cache_config_info``."""
    shadow: CostModel | None = None
    """Prices the steps of executors that compute a model, beside them; None is no shadow."""


def make_frontend(model: ServedModel, settings: ServerSettings) -> Frontend:
    """Load tokenizer and executor and put everything together; nothing runs yet.

    Raises ExecutorUnavailable for an executor that is not there, ValueError for a model or tokenizer that cannot be
    read.
    """
    drifts: dict[str, Drift] = {}
    executors = _executors(model, settings, drifts)
    executor = executors.get(settings.executor)
    defaults = read_sampling_defaults(model.folder, model.vocab_size)
    eos_token_ids = tuple(dict.fromkeys((*model.eos_token_ids, *defaults.eos_token_ids)))
    tokenizer = load_tokenizer(model.folder, model.vocab_size, eos_token_ids)
    choices = [token_id for token_id in tokenizer.filler_ids() if token_id not in eos_token_ids]
    engine = Engine(
        make_scheduler(settings.scheduler), executor, Filler(choices or [0], settings.seed), eos_token_ids=eos_token_ids
    )
    metrics = EngineMetrics(
        model.names[0], settings.scheduler.max_model_len, cache_info(_cache_fields(model, settings))
    )
    loop = EngineLoop(engine, metrics, settings.speed, settings.max_num_queued_reqs, settings.max_num_queued_tokens)
    return Frontend(
        loop,
        executors,
        settings.executor,
        tokenizer,
        load_chat_template(model.folder, tokenizer),
        model.names,
        model.root,
        defaults,
        settings.seed,
        settings.default_output_tokens,
        cost=settings.cost,
        shadow=settings.shadow,
        drifts=drifts,
    )


def decoder_config(model: ServedModel) -> DecoderConfig:
    """The model as executors that compute it see it.  Raises ValueError for none, or one that they do not know."""
    from windtunnel.executor.model_config import DecoderConfig

    if model.config is None:
        raise ValueError("it needs a model: start the server with --model")
    try:
        return DecoderConfig.from_hf(model.config)
    except ValueError as error:
        hint = "" if model.folder else "; a bundled config has only what a simulation needs: give the model's folder"
        raise ValueError(f"{error}{hint}") from error


def _executors(model: ServedModel, settings: ServerSettings, drifts: dict[str, Drift]) -> Executors:
    computing = partial(_model_executors, model, settings)
    makers: dict[str, Callable[[], Executor]] = {"sim": partial(_simulated, settings)}
    why_not: dict[str, WhyNot] = {"sim": partial(_why_no_price, settings)}
    for kind in ("torch", "triton"):
        makers[kind] = lambda kind=kind: _shadowed(computing().make(kind), kind, settings, drifts)  # type: ignore[misc]
        why_not[kind] = partial(_why_no_model, computing, kind)
    return Executors(makers, why_not)


def _simulated(settings: ServerSettings) -> Executor:
    assert settings.cost is not None, "_why_no_price asks for it"
    return SimExecutor(settings.cost)


def _shadowed(executor: Executor, kind: str, settings: ServerSettings, drifts: dict[str, Drift]) -> Executor:
    if settings.shadow is None:
        return executor
    with_shadow = shadowed(executor, settings.shadow)
    drifts[kind] = with_shadow.drift
    return with_shadow


def _why_no_price(settings: ServerSettings) -> str | None:
    if settings.cost is not None:
        return None
    return "nothing says what a step costs: start the server with --profile, --cost or --gpu"


def _why_no_model(computing: Callable[[], ModelExecutors], kind: str) -> str | None:
    try:
        return computing().why_not(kind)
    except ValueError as error:
        return str(error)


def _model_executors(model: ServedModel, settings: ServerSettings) -> ModelExecutors:
    """What makes the executors that compute the model.  Raises ValueError for one that they do not know."""
    return ModelExecutors(
        decoder_config(model),
        model.folder,
        settings.scheduler,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        seed=settings.seed,
        num_threads=settings.num_threads,
    )


def _cache_fields(model: ServedModel, settings: ServerSettings) -> dict[str, Any]:
    """What is true of this server, among the fields of vLLM's CacheConfig."""
    scheduler, config = settings.scheduler, model.config or {}
    num_blocks_of_a_request = -(-scheduler.max_model_len // scheduler.block_size)
    concurrency = scheduler.num_gpu_blocks / num_blocks_of_a_request
    window = (config.get("text_config") or config).get("sliding_window")
    return {
        "block_size": scheduler.block_size,
        "cache_dtype": settings.kv_cache_dtype,
        "enable_prefix_caching": scheduler.enable_prefix_caching,
        "sliding_window": window,
        "num_gpu_blocks": scheduler.num_gpu_blocks,
        "effective_attention_block_size": scheduler.block_size,
        "kv_cache_size_tokens": int(concurrency * scheduler.max_model_len),
        "kv_cache_max_concurrency": concurrency,
        **settings.cache,
    }
