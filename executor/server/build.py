"""From settings to a served model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from windtunnel.executor.engine import Engine
from windtunnel.executor.filler import Filler
from windtunnel.executor.server.engine_loop import EngineLoop
from windtunnel.executor.server.executors import (
    Executors,
    ExecutorUnavailable,
    make_model_executor,
    why_torch_is_missing,
)
from windtunnel.executor.server.frontend import Frontend, read_sampling_defaults
from windtunnel.executor.server.metrics import EngineMetrics
from windtunnel.executor.server.tokenizer import load_chat_template, load_tokenizer
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.per_request import make_scheduler
from windtunnel.sim.engine.protocols import CostModel, Executor
from windtunnel.sim.simulated import SimExecutor

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
        size = (self.config or {}).get("vocab_size") or (self.config or {}).get("text_config", {}).get("vocab_size")
        return int(size) if size else ANY_VOCABULARY

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, by its config.json."""
        eos = (self.config or {}).get("eos_token_id")
        return () if eos is None else tuple(map(int, eos)) if isinstance(eos, list) else (int(eos),)


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
    gpu_memory_utilization: float | None = None


def make_frontend(model: ServedModel, settings: ServerSettings) -> Frontend:
    """Load tokenizer and executor and put everything together; nothing runs yet.

    Raises ExecutorUnavailable for an executor that is not there, ValueError for a model or tokenizer that cannot be
    read.
    """
    executors = _executors(model, settings)
    executor = executors.get(settings.executor)
    defaults = read_sampling_defaults(model.folder)
    eos_token_ids = tuple(dict.fromkeys((*model.eos_token_ids, *defaults.eos_token_ids)))
    tokenizer = load_tokenizer(model.folder, model.vocab_size, eos_token_ids)
    choices = [token_id for token_id in tokenizer.filler_ids() if token_id not in eos_token_ids]
    engine = Engine(
        make_scheduler(settings.scheduler), executor, Filler(choices or [0], settings.seed), eos_token_ids=eos_token_ids
    )
    metrics = EngineMetrics(model.names[0], settings.scheduler.max_model_len, _cache_config(settings))
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
    )


def _executors(model: ServedModel, settings: ServerSettings) -> Executors:
    makers: dict[str, Callable[[], Executor]] = {}
    why_not: dict[str, str] = {}
    if settings.cost is None:
        why_not["sim"] = "nothing says what a step costs: start the server with --profile, --cost or --gpu"
    else:
        makers["sim"] = partial(SimExecutor, settings.cost)
    missing = "it needs a model: start the server with --model" if model.config is None else why_torch_is_missing()
    for kind in ("torch", "triton"):
        if missing is None:
            makers[kind] = partial(_model_executor, kind, model, settings)
        else:
            why_not[kind] = missing
    return Executors(makers, why_not)


def _model_executor(kind: str, model: ServedModel, settings: ServerSettings) -> Executor:
    from windtunnel.executor.model_config import DecoderConfig

    assert model.config is not None, "_executors asks for it"
    try:
        decoder = DecoderConfig.from_hf(model.config)
    except ValueError as error:
        hint = "" if model.folder else "; a bundled config has only what a simulation needs: give the model's folder"
        raise ExecutorUnavailable(f"executor {kind!r} is not available: {error}{hint}") from error
    return make_model_executor(
        kind,
        decoder,
        model.folder,
        settings.scheduler,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        seed=settings.seed,
        num_threads=settings.num_threads,
    )


def _cache_config(settings: ServerSettings) -> dict[str, Any]:
    """Labels of ``vllm:cache_config_info``: fields of vLLM's CacheConfig that mean something here."""
    scheduler = settings.scheduler
    return {
        "block_size": scheduler.block_size,
        "cache_dtype": settings.kv_cache_dtype,
        "enable_prefix_caching": scheduler.enable_prefix_caching,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": None,
        "kv_cache_size_tokens": scheduler.num_gpu_blocks * scheduler.block_size,
        "num_cpu_blocks": None,
        "num_gpu_blocks": scheduler.num_gpu_blocks,
        "num_gpu_blocks_override": None,
        "sliding_window": None,
    }
