"""Our engine as a live server needs it: vLLM's configuration for it, its identity of blocks, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.keys import STREAM_BITS
from windtunnel.sim.engine.per_request import PerRequestScheduler
from windtunnel.sim.engine.request import Request

NS_PER_S = 1_000_000_000


class HashKeys:
    """Keys of blocks from vLLM's own block hashes, so that equal keys mean what they mean to vLLM.

    The hashes cover tokens, cache salt and whatever else vLLM puts into them; ``hashes`` grows as tokens come.
    """

    __slots__ = ("_hashes", "may_look_up")
    num_shared_blocks = 1 << STREAM_BITS

    def __init__(self, hashes: Sequence[bytes], may_look_up: bool) -> None:
        """``may_look_up`` is False for requests that must compute their whole prompt (prompt log-probabilities)."""
        self._hashes = hashes
        self.may_look_up = may_look_up

    def between(self, first: int, last: int) -> Sequence[int]:
        """Keys of the full blocks first … last - 1; their tokens must be known."""
        return [int.from_bytes(each, "big") for each in self._hashes[first:last]]


class LiveEngine(PerRequestScheduler):
    """The scheduler under a real engine: answers end when the sampler says so, admission can be paused."""

    def admit(self, is_allowed: bool) -> None:
        """Let waiting requests in from now on, or hold them back."""
        most = self.config.max_num_active_seqs or self.config.max_num_seqs
        self._max_running = most if is_allowed else 0

    def propose(self, request: Request, num_drafts: int) -> bool:
        """The drafter proposes tokens that the next step may verify; False if the request still computes chunks."""
        progress = self._progress[request]
        progress.num_drafts = 0 if progress.is_chunk else num_drafts
        return not progress.is_chunk

    def num_awaited_tokens(self, request: Request) -> int:
        """Output tokens of the request that are scheduled and not known yet (asynchronous scheduling)."""
        return self._progress[request].num_placeholders

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens in those of its blocks that count as cached."""
        return request.num_findable_blocks * self.config.block_size

    def usage(self) -> float:
        """Share of the usable blocks that are held, 0 to 1."""
        return 1.0 - self.pool.num_free / self.config.num_usable_blocks

    def forget_prefixes(self) -> bool:
        """Forget all cached prefixes; False, with nothing changed, while any block is held.

        The order in which blocks will be handed out stays as it is.
        """
        pool = self.pool
        if pool.num_free < self.config.num_usable_blocks:
            return False
        pool.release(pool.take(pool.num_free)[::-1], 0, 0)
        return True

    def _lookup(self, request: Request) -> list[int]:
        if isinstance(request.keys, HashKeys) and not request.keys.may_look_up:
            return []
        return super()._lookup(request)


def engine_request(request: Any, caching: bool) -> Request:
    """Our request for one of vLLM's: its answer may be as long as ``max_tokens`` until the sampler ends it."""
    keys = HashKeys(request.block_hashes, not request.skip_reading_prefix_cache) if caching else None
    return Request(
        request.request_id,
        exact_ns(request.arrival_time),
        request.num_prompt_tokens,
        request.max_tokens,
        priority=request.priority,
        keys=keys,
    )


def exact_ns(time_s: float) -> int:
    """Nanoseconds of a wall-clock time; different times stay different, which ``round(time_s * 1e9)`` does not keep."""
    whole = int(time_s)
    return whole * NS_PER_S + round((time_s - whole) * NS_PER_S)


def scheduler_config(vllm_config: Any, num_gpu_blocks: int, block_size: int) -> SchedulerConfig:
    """Our SchedulerConfig for a VllmConfig.  Raises ValueError for values that vLLM refuses as well."""
    given = vllm_config.scheduler_config
    return SchedulerConfig(
        max_num_seqs=given.max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        enable_chunked_prefill=given.enable_chunked_prefill,
        enable_prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        long_prefill_token_threshold=given.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=given.long_prefill_token_threshold_adaptive,
        policy=given.policy,
        watermark=given.watermark,
        max_num_active_seqs=given.max_num_active_seqs,
        max_num_scheduled_tokens=given.max_num_scheduled_tokens,
        scheduler_reserve_full_isl=given.scheduler_reserve_full_isl,
        async_scheduling=bool(given.async_scheduling),
        num_speculative_tokens=vllm_config.num_speculative_tokens,
        use_v2_model_runner=bool(vllm_config.use_v2_model_runner),
    )


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any, block_size: int, hash_block_size: int | None) -> None:
    """Raise ValueError, naming every cause at once, for an engine that our scheduler does not model."""
    causes = [*_unsupported_model(vllm_config), *_unsupported_cache(kv_cache_config, block_size, hash_block_size)]
    if causes:
        raise ValueError(
            f"VllmScheduler does not support {'; '.join(causes)}: change that or leave --scheduler-cls out"
        )


def refusal(request: Any) -> str | None:
    """Why our scheduler does not serve this request of vLLM's; None if it does."""
    if request.structured_output_request is not None:
        return "structured output is not supported by VllmScheduler: send the request without it"
    if request.resumable:
        return "streaming input is not supported by VllmScheduler: send the whole prompt at once"
    if request.prompt_embeds is not None or request.mm_features or request.lora_request is not None:
        return "VllmScheduler serves plain token prompts only: no embeddings, multimodal input or LoRA"
    return None


def _unsupported_model(config: Any) -> Iterator[str]:
    model, parallel = config.model_config, config.parallel_config
    if model.runner_type != "generate":
        yield f"the {model.runner_type} runner (it schedules text generation only)"
    if model.is_encoder_decoder or model.supports_multimodal_inputs:
        yield f"encoder inputs ({model.model} takes multimodal input or is an encoder-decoder)"
    if model.enable_prompt_embeds:
        yield "prompt embeddings (--enable-prompt-embeds)"
    if model.return_sampling_mask:
        yield "sampling masks (--return-sampling-mask)"
    if config.lora_config is not None:
        yield "LoRA (--enable-lora)"
    yield from _unsupported_speculation(config)
    if config.kv_transfer_config is not None or config.ec_transfer_config is not None:
        yield "KV or encoder-cache connectors (--kv-transfer-config, --ec-transfer-config)"
    if config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events:
        yield "KV cache events (--kv-events-config)"
    if config.aux_output_config.enabled:
        yield "auxiliary outputs (--enable-return-routed-experts)"
    if parallel.pipeline_parallel_size > 1:
        yield f"pipeline parallelism (--pipeline-parallel-size {parallel.pipeline_parallel_size})"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism (--decode-context-parallel-size, --prefill-context-parallel-size)"
    if config.scheduler_config.prefill_schedule_interval > 1:
        yield f"prefill balancing (--prefill-schedule-interval {config.scheduler_config.prefill_schedule_interval})"


def _unsupported_speculation(config: Any) -> Iterator[str]:
    given = config.speculative_config
    if given is None:
        return
    if given.method != "ngram" or config.scheduler_config.async_scheduling:
        yield f"speculative decoding by other methods than synchronous ngram (--speculative-config, {given.method})"
    if given.num_speculative_tokens_per_batch_size:
        yield "numbers of drafts by batch size (num_speculative_tokens_per_batch_size)"
    if config.observability_config.per_request_spec_decode_metrics != "none":
        yield "speculation metrics of each request (--per-request-spec-decode-metrics)"


def _unsupported_cache(kv_cache_config: Any, block_size: int, hash_block_size: int | None) -> Iterator[str]:
    kinds = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
    if kinds != ["FullAttentionSpec"]:
        yield f"KV caches other than one group of full attention (this model has {', '.join(kinds) or 'none'})"
    elif hash_block_size not in (None, block_size):
        yield f"prefix hashes of {hash_block_size} tokens in blocks of {block_size} (--hash-block-size)"
    if kv_cache_config.needs_kv_cache_zeroing:
        yield "KV caches that must be zeroed (state-space layers or mixed precision)"
