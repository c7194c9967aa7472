"""Our simulated executor under real vLLM: its engine and scheduler decide, a cost model says how long each step takes.

    vllm serve MODEL --distributed-executor-backend windtunnel.executor.vllm_plugin.VllmSimExecutor \
        --additional-config '{"windtunnel": {"gpu": "H100"}}'

No weights are loaded and nothing is computed: MODEL may be a folder with a config.json and a tokenizer.  Written for
vLLM 0.32.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import IO, Any

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

from windtunnel.executor.vllm_plugin.clock import Clock, LateResult, VirtualClock, WallClock
from windtunnel.executor.vllm_plugin.options import SimOptions
from windtunnel.executor.vllm_plugin.shapes import Grant, StepShapes, shape_of
from windtunnel.sim.cost.evidence import evidence_of, in_words
from windtunnel.sim.deployment.hf_config import model_from_config
from windtunnel.sim.deployment.memory import InfeasibleDeployment, kv_pool
from windtunnel.sim.deployment.model import load_model
from windtunnel.sim.deployment.model_spec import ModelSpec
from windtunnel.sim.engine.plan import StepShape

logger = init_logger(__name__)

_NOTHING_TO_DO = (
    "set_kv_cache_layout",
    "initialize_from_config",
    "update_max_model_len",
    "execute_dummy_batch",
    "reset_mm_cache",
    "reset_encoder_cache",
    "synchronize_device",
    "profile",
    "sleep",
    "wake_up",
    "shutdown",
)
"""Calls to workers that a worker without a device answers by doing nothing."""


class VllmSimExecutor(Executor):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Takes the place of vLLM's executor and workers; see ``options.SimOptions`` for how to set it up.

    A step starts when the one before it has ended, and its tokens are shown when its time is over, on the clock that
    the options name.  Raises ValueError for options out of range and for what is not simulated: speculative decoding,
    pipeline parallelism, LoRA, connectors, multimodal and pooling models, models without full attention in every
    layer.
    """

    supports_pp = False

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """True: with asynchronous scheduling the next step is decided while this one lasts."""
        return True

    def _init_executor(self) -> None:
        _refuse_unsupported(self.vllm_config)
        self.options = SimOptions.from_additional_config(self.vllm_config.additional_config)
        if self.options.async_scheduling is not None:
            self.scheduler_config.async_scheduling = self.options.async_scheduling
        self.clock = self._make_clock()
        self.cost = self.options.make_cost(
            self._priced_model() if self.options.needs_model else None,
            self.parallel_config.tensor_parallel_size,
            self._kv_cache_dtype(),
        )
        self.last_shape: StepShape | None = None
        """Shape of the latest step that computed something."""
        self.num_steps = 0
        self._shapes = StepShapes()
        self._sampler = _Sampler(self.model_config.get_vocab_size())
        self._free_at_s = 0.0
        self._pending: LateResult | None = None
        self._log = self._open_log()
        evidence = in_words(evidence_of(self.cost.describe()))
        logger.info("windtunnel simulates the workers: %s cost model (%s)", self.cost.name, evidence)

    def _make_clock(self) -> Clock:
        if self.options.pace == "wall":
            return WallClock(self.options.speed)
        clock = VirtualClock.current()
        if clock is None or envs.VLLM_ENABLE_V1_MULTIPROCESSING:
            raise ValueError(
                "additional_config.windtunnel.pace 'virtual' works inside one process only: set "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0 and make the LLM inside `with VirtualClock():`, or use pace 'wall'"
            )
        return clock

    def _priced_model(self) -> ModelSpec:
        if self.options.model is not None:
            return load_model(self.options.model)
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        return model_from_config(self.model_config.hf_config.to_dict(), self.model_config.model, dtype=dtype)

    def _kv_cache_dtype(self) -> str:
        return str(self.cache_config.cache_dtype)

    # -- what the engine asks before it starts

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,  # noqa: ARG002
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Answer for the one worker that there is not.

        Raises NotImplementedError for a call that only a worker with a model could answer.
        """
        answers = [self._answer(method, *args, **(kwargs or {}))]
        if not non_block:
            return answers
        future: Future[list[Any]] = Future()
        future.set_result(answers)
        return future

    def _answer(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if method in _NOTHING_TO_DO:
            return None
        own = getattr(self, f"_rpc_{method}", None) if isinstance(method, str) else None
        if own is None:
            name = method if isinstance(method, str) else getattr(method, "__name__", repr(method))
            raise NotImplementedError(f"{name}: a simulated worker has no model to do this with")
        return own(*args, **kwargs)

    def _rpc_get_kv_cache_spec(self) -> dict[str, Any]:
        return {f"model.layers.{i}.self_attn.attn": self._layer_cache() for i in range(self._num_layers())}

    def _layer_cache(self) -> Any:
        return FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=self.model_config.get_num_kv_heads(self.parallel_config),
            head_size=self.model_config.get_head_size(),
            dtype=self.model_config.dtype,
        )

    def _num_layers(self) -> int:
        return int(self.model_config.get_num_layers(self.parallel_config))

    def _rpc_get_supported_kv_cache_layouts(self) -> list[str]:
        return [layout.name for layout in KVCacheLayout]

    def _rpc_determine_available_memory(self) -> int:
        """Bytes that hold just the wanted number of blocks, as vLLM will divide them."""
        return int(self._num_blocks() * self._layer_cache().page_size_bytes * self._num_layers())

    def _num_blocks(self) -> int:
        given = self.options.num_gpu_blocks or self.cache_config.num_gpu_blocks_override
        if given is not None:
            return int(given)
        try:
            pool = kv_pool(
                self._priced_model(),
                self.options.gpu_spec("the memory plan (without num_gpu_blocks or --num-gpu-blocks-override)"),
                max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
                max_num_seqs=self.scheduler_config.max_num_seqs,
                max_model_len=self.model_config.max_model_len,
                tensor_parallel_size=self.parallel_config.tensor_parallel_size,
                gpu_memory_utilization=self.cache_config.gpu_memory_utilization,
                block_size=self.cache_config.block_size,
                kv_cache_dtype=self._kv_cache_dtype(),
                enforce_eager=self.model_config.enforce_eager,
                kv_cache_memory_bytes=self.cache_config.kv_cache_memory_bytes,
            )
        except InfeasibleDeployment as error:
            raise ValueError(f"additional_config.windtunnel.gpu {self.options.gpu!r}: {error}") from error
        return pool.num_gpu_blocks

    def _rpc_get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def _rpc_compile_or_warm_up_model(self) -> Any:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def _rpc_supports_draft_weight_updates(self) -> bool:
        return False

    # -- steps

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Price the step and begin it; its tokens come from ``sample_tokens``, those of an empty step from here."""
        self._sampler.admit(scheduler_output)
        grants = self._shapes.grants(scheduler_output)
        now_s = self.clock.now_s()
        if not grants:
            empty = LateResult(EMPTY_MODEL_RUNNER_OUTPUT, now_s, self.clock)
            return empty if non_block else empty.result()
        self.last_shape = shape_of(grants)
        step_s = float(self.cost.step_time_s(self.last_shape))
        start_s = max(now_s, self._free_at_s)
        self._free_at_s = start_s + step_s
        self._write_log(grants, start_s, step_s)
        self.num_steps += 1
        self._pending = LateResult(self._sampler.output(grants), self._free_at_s, self.clock)
        return LateResult(None, now_s, self.clock) if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:  # noqa: ARG002
        """The tokens of the step that was begun last, when it is over."""
        pending, self._pending = self._pending, None
        assert pending is not None, "vLLM samples once after each step"
        return pending if non_block else pending.result()

    def take_draft_token_ids(self) -> None:
        """There are no drafts."""
        return

    def check_health(self) -> None:
        """Always well."""

    def shutdown(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()
            self._log = None

    # -- the log

    def _open_log(self) -> IO[str] | None:
        if self.options.step_log is None:
            return None
        return open(self.options.step_log, "w", encoding="utf-8", buffering=1)

    def _write_log(self, grants: list[Grant], start_s: float, step_s: float) -> None:
        if self._log is None or self.last_shape is None:
            return
        line = {
            "step": self.num_steps,
            "start_s": start_s,
            "step_s": step_s,
            "shape": self.last_shape._asdict(),
            "scheduled": {grant.request_id: grant.num_tokens for grant in grants},
        }
        self._log.write(json.dumps(line) + "\n")


class _Sampler:
    """Tokens that follow from the prompt and the position alone, and never end an answer.

    The same prompt gets the same answer in any run, whatever else is in the batch, so that prefixes repeat as they do
    with a real model at temperature 0.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._seeds: dict[str, int] = {}
        self._ends: dict[str, frozenset[int]] = {}

    def admit(self, output: Any) -> None:
        """Take in the new requests of a step, let the finished ones go."""
        for request_id in output.finished_req_ids:
            self._seeds.pop(request_id, None)
            self._ends.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._seeds[new.req_id] = zlib.crc32(
                b"".join(token.to_bytes(4, "little") for token in new.prompt_token_ids)
            )
            self._ends[new.req_id] = _ends_of(new.sampling_params)

    def output(self, grants: list[Grant]) -> Any:
        """What a model runner would return for the step."""
        ids = [grant.request_id for grant in grants]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[self._token(grant)] if grant.samples else [] for grant in grants],
        )

    def _token(self, grant: Grant) -> int:
        position = grant.num_computed_tokens + grant.num_tokens
        token = _mixed(self._seeds[grant.request_id] << 32 | position) % self._vocab_size
        ends = self._ends[grant.request_id]
        while token in ends:
            token = (token + 1) % self._vocab_size
        return token


def _ends_of(params: Any) -> frozenset[int]:
    """Tokens that would end the answer before max_tokens."""
    stop = params.stop_token_ids or ()
    return frozenset(stop) if params.eos_token_id is None else frozenset({*stop, params.eos_token_id})


def _mixed(value: int) -> int:
    """SplitMix64, a public-domain finaliser (Steele, Lea and Flood, 2014)."""
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def _refuse_unsupported(config: Any) -> None:
    causes = list(_unsupported(config))
    if causes:
        raise ValueError(f"VllmSimExecutor does not simulate {'; '.join(causes)}: change that or use another executor")


def _unsupported(config: Any) -> Iterator[str]:
    model, parallel = config.model_config, config.parallel_config
    if model.runner_type != "generate":
        yield f"the {model.runner_type} runner (it simulates text generation only)"
    if model.is_encoder_decoder or model.supports_multimodal_inputs:
        yield f"encoder inputs ({model.model} takes multimodal input or is an encoder-decoder)"
    if model.enable_prompt_embeds:
        yield "prompt embeddings (--enable-prompt-embeds)"
    if model.is_hybrid or model.is_attention_free or model.use_mla:
        yield "layers without a KV cache of full attention (state space, linear or latent attention)"
    if model.get_sliding_window() is not None:
        yield f"sliding windows (of {model.get_sliding_window()} tokens; --disable-sliding-window turns them off)"
    if config.speculative_config is not None:
        yield f"speculative decoding (--speculative-config, method {config.speculative_config.method})"
    if config.lora_config is not None:
        yield "LoRA (--enable-lora)"
    if config.kv_transfer_config is not None or config.ec_transfer_config is not None:
        yield "KV or encoder-cache connectors (--kv-transfer-config, --ec-transfer-config)"
    if parallel.pipeline_parallel_size > 1:
        yield f"pipeline parallelism (--pipeline-parallel-size {parallel.pipeline_parallel_size})"
