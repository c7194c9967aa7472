"""The engine that a scenario asks for: vLLM's defaults by device, the memory plan, the scheduler's knobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from windtunnel.scenarios.errors import ScenarioError
from windtunnel.scenarios.ledger import Ledger
from windtunnel.scenarios.schema import ContinuousBatching, Scenario
from windtunnel.sim.deployment.engine_args import BLOCK_SIZE, engine_defaults
from windtunnel.sim.deployment.gpu import GpuSpec
from windtunnel.sim.deployment.memory import InfeasibleDeployment, KvPool, kv_pool
from windtunnel.sim.deployment.model import ModelSpec
from windtunnel.sim.deployment.versions import VersionProfile
from windtunnel.sim.engine.config import SchedulerConfig

_BARE = "without a GPU (bare SchedulerConfig)"
_BY_DEVICE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "enable_chunked_prefill",
    "enable_prefix_caching",
)
"""Knobs whose defaults ``engine_defaults`` knows; the others have those of SchedulerConfig."""
_KEY_OF_FIELD = {"policy": "scheduling_policy"}
_OF_THE_SERVER = ("max_num_queued_reqs", "max_num_queued_tokens")
"""Knobs of [engine] that the scheduler does not know: the API server obeys them."""
_TOLD_ELSEWHERE = ("num_speculative_tokens", "spec_method", "pipeline_parallel_size", "use_v2_model_runner")
_RULES_OF_A_RELEASE = ("free_blocks_to_front", "long_prefill_spares_lone_request")
"""Fields of SchedulerConfig that are no knobs; they follow from the version."""
_DEFAULTS_OF_A_RELEASE = ("scheduler_reserve_full_isl", "watermark")
_ASYNC_METHODS = ("eagle", "eagle3", "mtp", "draft_model")
"""Drafters that asynchronous scheduling works with, by default (vLLM 0.32, ``VllmConfig``)."""


class Hardware(NamedTuple):
    """What runs on what; None where nothing depends on it."""

    model: ModelSpec | None
    gpu: GpuSpec | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    version: VersionProfile

    @property
    def engine_default(self) -> str:
        """Source of a value that nobody gave."""
        return f"{self.version.label} default"


class _Settings(NamedTuple):
    """SchedulerConfig's fields but for num_gpu_blocks, and the source of each one's default."""

    values: dict[str, Any]
    sources: dict[str, str]


def make_engine(ledger: Ledger, hardware: Hardware) -> tuple[SchedulerConfig, KvPool | None]:
    """The scheduler's config and, where model and GPU are known, the memory plan behind its number of blocks.

    Raises ScenarioError for knobs that contradict each other, InfeasibleDeployment for what vLLM would not start.
    """
    _check_options(ledger, hardware)
    settings = _with_policy(ledger, hardware, _settings(ledger, hardware))
    if hardware.model is None or hardware.gpu is None:
        pool, num_blocks = None, _given_blocks(ledger, settings.values)
        source = "num_gpu_blocks_override"
    else:
        pool = _pool(ledger, hardware, settings.values)
        num_blocks = pool.num_gpu_blocks
        source = "windtunnel's memory plan, not measured" if pool.source == "formula" else pool.source
    for key, value in settings.values.items():
        if key in _TOLD_ELSEWHERE or (key in _RULES_OF_A_RELEASE and value):
            continue
        ledger.note("engine", _KEY_OF_FIELD.get(key, key), value, settings.sources[key])
    ledger.note("engine", "num_gpu_blocks", num_blocks, source)
    return _config(ledger, {**settings.values, "num_gpu_blocks": num_blocks}), pool


def _check_options(ledger: Ledger, hardware: Hardware) -> None:
    """Refuse options that the version does not know; say what of its rules is not reproduced."""
    scenario = ledger.loaded.scenario
    given = [key for key, value in scenario.engine.model_dump().items() if value is not None]
    given += [key for key, value in scenario.deployment.model_dump().items() if value is not None]
    for key in given:
        section = "engine" if key in type(scenario.engine).model_fields else "deployment"
        ledger.attempt(section, key, lambda key=key: hardware.version.check_options([key]))  # type: ignore[misc]
    if scenario.deployment.engine_version is not None:
        ledger.notes += hardware.version.differences(_scopes(scenario, hardware))


def _scopes(scenario: Scenario, hardware: Hardware) -> list[str]:
    """Which of a version's peculiarities matter to this run."""
    knobs = scenario.engine
    asked = {
        "always": True,
        "metrics": True,
        "memory": hardware.model is not None and hardware.gpu is not None,
        "long_prefill": bool(knobs.long_prefill_token_threshold),
        "chunked_prefill_off": knobs.enable_chunked_prefill is False,
        "prefix_caching": knobs.enable_prefix_caching is not False,
        "priority": knobs.scheduling_policy == "priority",
        "async": knobs.async_scheduling or (knobs.async_scheduling is None and hardware.version.async_scheduling),
        "pipeline": hardware.pipeline_parallel_size > 1,
        "speculation": scenario.speculative is not None,
    }
    return [scope for scope, matters in asked.items() if matters]


def _settings(ledger: Ledger, hardware: Hardware) -> _Settings:
    given = ledger.loaded.scenario.engine.model_dump(exclude=set(_OF_THE_SERVER))
    given["policy"] = given.pop("scheduling_policy")
    batching = ledger.loaded.scenario.batching
    if given["enable_chunked_prefill"] is None and getattr(batching, "prefill_first", None):
        given["enable_chunked_prefill"] = False
    if hardware.gpu is None or (hardware.model is None and given["max_model_len"] is None):
        return _bare(ledger, hardware, given)
    deployment = ledger.loaded.scenario.deployment
    context = ledger.pick(
        "deployment", "usage_context", deployment.usage_context, "api_server", hardware.engine_default
    )
    version = hardware.version if deployment.engine_version is not None else None
    by_device = {key: given[key] for key in _BY_DEVICE}
    defaults = engine_defaults(hardware.gpu, context, model=hardware.model, version=version, **by_device)
    if given["enable_chunked_prefill"] is False and defaults.enable_chunked_prefill:
        ledger.warnings.append(
            f"enable_chunked_prefill = false has no effect: it is {defaults.sources['enable_chunked_prefill']}"
        )
    others = {key: value for key, value in given.items() if key not in _BY_DEVICE}
    rest = _of_scheduler_config(others, hardware, hardware.engine_default)
    by_device = {key: getattr(defaults, key) for key in _BY_DEVICE}
    return _Settings({**by_device, **rest.values}, {**defaults.sources, **rest.sources})


def _of_scheduler_config(given: Mapping[str, Any], hardware: Hardware, source: str) -> _Settings:
    """What is given, and for the rest the defaults of the version, or SchedulerConfig's own."""
    default = {item.name: item.default for item in fields(SchedulerConfig)}
    default |= {key: getattr(hardware.version, key) for key in (*_DEFAULTS_OF_A_RELEASE, *_RULES_OF_A_RELEASE)}
    given = {**given, **dict.fromkeys(_RULES_OF_A_RELEASE)}
    values = {key: default[key] if value is None else value for key, value in given.items()}
    return _Settings(values, dict.fromkeys(values, source))


def _with_policy(ledger: Ledger, hardware: Hardware, settings: _Settings) -> _Settings:
    """With what drafts, pipeline and batching policy make of the scheduler."""
    scenario = ledger.loaded.scenario
    drafts = scenario.speculative
    values, sources = dict(settings.values), dict(settings.sources)
    values["num_speculative_tokens"] = (drafts.num_speculative_tokens or 0) if drafts else 0
    values["spec_method"] = (drafts.method or "ngram") if drafts else "ngram"
    values["pipeline_parallel_size"] = hardware.pipeline_parallel_size
    is_pipeline, has_v2 = hardware.pipeline_parallel_size > 1, hardware.version.use_v2_model_runner is not False
    values["use_v2_model_runner"] = hardware.gpu is not None and is_pipeline and has_v2
    if scenario.engine.async_scheduling is None:
        values["async_scheduling"], sources["async_scheduling"] = _async_default(scenario, hardware, values)
    if getattr(scenario.batching, "prefill_first", None) and scenario.engine.enable_chunked_prefill is None:
        sources["enable_chunked_prefill"] = "prefill_first computes prompts whole"
    return _Settings(values, sources)


def _async_default(scenario: Scenario, hardware: Hardware, settings: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether steps are decided ahead if nobody says so, and why.  Source: ``VllmConfig`` of vLLM."""
    default = hardware.engine_default
    if not isinstance(scenario.batching, ContinuousBatching) or scenario.batching.prefill_first:
        return False, "another policy than vLLM's own knows nothing of it"
    if hardware.gpu is None:
        return False, f"{default} without a GPU"
    if not hardware.version.async_scheduling:
        return False, default
    if settings["num_speculative_tokens"] and settings["spec_method"] not in _ASYNC_METHODS:
        return False, f"{default} with {settings['spec_method']} drafts"
    if hardware.pipeline_parallel_size > 1 and not hardware.version.async_scheduling_with_pipeline:
        return False, f"{default} with a pipeline"
    return True, f"{default} on GPUs"


def _bare(ledger: Ledger, hardware: Hardware, given: Mapping[str, Any]) -> _Settings:
    """Without a GPU vLLM's defaults by device do not apply; those of its bare SchedulerConfig do."""
    model = hardware.model
    values, sources = _of_scheduler_config(given, hardware, f"{hardware.engine_default} {_BARE}")
    if given["block_size"] is None:
        values["block_size"] = BLOCK_SIZE
    num_blocks = ledger.loaded.scenario.deployment.num_gpu_blocks_override
    if given["max_model_len"] is None and model is not None:
        values["max_model_len"], sources["max_model_len"] = model.max_model_len, f"longest context of {model.name}"
    elif given["max_model_len"] is None and num_blocks is not None:
        values["max_model_len"] = (num_blocks - 1) * values["block_size"]
        sources["max_model_len"] = "the longest that fits the KV cache, as for vLLM's --max-model-len -1"
    if given["max_num_batched_tokens"] is None and not values["enable_chunked_prefill"]:
        values["max_num_batched_tokens"] = max(values["max_num_batched_tokens"], values["max_model_len"])
        sources["max_num_batched_tokens"] += ", at least max_model_len because chunked prefill is off"
    if given["max_num_seqs"] is None:
        values["max_num_seqs"] = min(values["max_num_seqs"], values["max_num_batched_tokens"])
        sources["max_num_seqs"] += ", at most max_num_batched_tokens"
    return _Settings(values, sources)


def _pool(ledger: Ledger, hardware: Hardware, settings: Mapping[str, Any]) -> KvPool:
    given = ledger.loaded.scenario.deployment
    assert hardware.model is not None, "make_engine asks for it"
    assert hardware.gpu is not None, "make_engine asks for it"
    model, gpu, size = hardware.model, hardware.gpu, hardware.tensor_parallel_size
    num_stages, version, default = hardware.pipeline_parallel_size, hardware.version, hardware.engine_default
    ledger.attempt("deployment", "pipeline_parallel_size", lambda: _check_stages(model, num_stages))
    share = ledger.pick(
        "deployment", "gpu_memory_utilization", given.gpu_memory_utilization, version.gpu_memory_utilization, default
    )
    kv_dtype = ledger.pick("deployment", "kv_cache_dtype", given.kv_cache_dtype, "auto", default)
    ledger.note("deployment", "num_gpu_blocks_override", given.num_gpu_blocks_override)
    ledger.note("deployment", "kv_cache_memory_bytes", given.kv_cache_memory_bytes)
    return ledger.attempt(
        "deployment",
        ("tensor_parallel_size", "kv_cache_dtype", "gpu_memory_utilization"),
        lambda: kv_pool(
            model,
            gpu,
            tensor_parallel_size=size,
            pipeline_parallel_size=num_stages,
            gpu_memory_utilization=share,
            kv_cache_dtype=kv_dtype,
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            max_num_seqs=settings["max_num_seqs"],
            max_model_len=settings["max_model_len"],
            block_size=settings["block_size"],
            enable_prefix_caching=ledger.loaded.scenario.engine.enable_prefix_caching,
            num_gpu_blocks_override=given.num_gpu_blocks_override,
            kv_cache_memory_bytes=given.kv_cache_memory_bytes,
            version=version,
        ),
    )


def _check_stages(model: ModelSpec, num_stages: int) -> None:
    """Raise ValueError for more stages than layers."""
    if num_stages > model.num_layers:
        raise ValueError(
            f"pipeline_parallel_size is {num_stages}, but {model.name} has {model.num_layers} layers: lower it"
        )


def _given_blocks(ledger: Ledger, settings: Mapping[str, Any]) -> int:
    """The override, after vLLM's check at start-up, which ``kv_pool`` makes where there is a model."""
    num_blocks = ledger.loaded.scenario.deployment.num_gpu_blocks_override
    assert num_blocks is not None, "resolve asks for it where there is no model"
    ledger.note("deployment", "num_gpu_blocks_override", num_blocks)
    block_size, max_model_len = settings["block_size"], settings["max_model_len"]
    if max_model_len > (num_blocks - 1) * block_size:
        usable = (num_blocks - 1) * block_size
        raise InfeasibleDeployment(
            f"max seq len ({max_model_len}) is larger than the maximum number of tokens that can be stored in KV "
            f"cache ({usable}, {num_blocks:,} blocks less the null block).  Remedy: lower max_model_len to {usable} or "
            f"less, or raise num_gpu_blocks_override to {-(-max_model_len // block_size) + 1:,}",
            usable,
            None,
        )
    return num_blocks


def _config(ledger: Ledger, settings: dict[str, Any]) -> SchedulerConfig:
    try:
        return SchedulerConfig(**settings)
    except ValueError as error:
        raise _contradiction(ledger, str(error)) from error


def _contradiction(ledger: Ledger, message: str) -> ScenarioError:
    """The complaint of SchedulerConfig with the source of every knob that it names."""
    named = [entry for entry in ledger.entries if entry.section == "engine" and entry.key in message]
    told = ", ".join(f"{entry.key} is from {entry.source}" for entry in named)
    return ledger.blame(f"{message} ({told})", "engine", *(entry.key for entry in named))
