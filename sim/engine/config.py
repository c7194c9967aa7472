"""The knobs of one engine, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

POLICIES = ("fcfs", "priority")
SPEC_METHODS = ("ngram", "eagle", "eagle3", "mtp", "draft_model")
DRAFTS_IN_CACHE = ("eagle", "eagle3", "mtp", "draft_model")
DROPS_LAST_HIT = ("eagle", "eagle3", "mtp")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler of one replica obeys.

    Names, meanings and defaults are vLLM 0.32's ``SchedulerConfig`` and ``CacheConfig``; defaults that vLLM
    chooses by device and usage context come from ``sim.deployment.engine_args``.

    Raises ValueError, naming the field, its value and the allowed range, for what vLLM refuses to start with.
    """

    max_num_seqs: int = 128
    """Most requests that may be running at once."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step."""
    max_model_len: int = 4096
    """Longest prompt plus output of one request, in tokens."""
    block_size: int = 16
    """Tokens in one KV block."""
    num_gpu_blocks: int = 4096
    """KV blocks in the pool; block 0 is the null block, so one fewer is usable."""
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    """Longest prefill chunk of one request in one step while others are there; 0 is no limit."""
    long_prefill_token_threshold_adaptive: bool = False
    """Raise that threshold to the budget shared equally among all requests."""
    policy: str = "fcfs"
    watermark: float = 0.0
    """Share of the pool that an admission must leave free while something is running, in [0, 1)."""
    max_num_active_seqs: int | None = None
    """Fewer seats than ``max_num_seqs``; None is as many."""
    max_num_scheduled_tokens: int | None = None
    """Fewer tokens a step than ``max_num_batched_tokens``; None is as many."""
    scheduler_reserve_full_isl: bool = True
    """Admit a request only if its whole prompt fits the free blocks, not just its first chunk."""
    async_scheduling: bool = False
    """Decide a step while the one before still runs, without knowing its tokens."""
    num_speculative_tokens: int = 0
    """Draft tokens proposed for each request and step; 0 is no speculation."""
    spec_method: str = "ngram"
    """Who proposes them; only the bookkeeping of blocks and input slots depends on it."""
    pipeline_parallel_size: int = 1
    use_v2_model_runner: bool = False
    """vLLM's second model runner, which may keep pipelines full under async scheduling."""
    free_blocks_to_front: bool = True
    """Freed blocks without a full prefix are the next to be handed out; before vLLM 0.24 they were the last."""
    long_prefill_spares_lone_request: bool = True
    """``long_prefill_token_threshold`` does not cut a request that is alone; before vLLM 0.31 it did."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
            _at_least(name, getattr(self, name), 1)
        _at_least("num_gpu_blocks", self.num_gpu_blocks, 2)
        _at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be at least 0 and below 1, got {self.watermark}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): raise the budget or lower max_num_seqs"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_model_len ({self.max_model_len}): raise the budget, lower max_model_len or enable chunked prefill"
            )
        if self.long_prefill_token_threshold > self.max_model_len:
            raise ValueError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) must not exceed "
                f"max_model_len ({self.max_model_len})"
            )
        if self.max_num_active_seqs is not None:
            _at_least("max_num_active_seqs", self.max_num_active_seqs, 1)
            if self.max_num_active_seqs > self.max_num_seqs:
                raise ValueError(
                    f"max_num_active_seqs ({self.max_num_active_seqs}) must not exceed "
                    f"max_num_seqs ({self.max_num_seqs})"
                )
        if self.max_num_scheduled_tokens is not None:
            _at_least("max_num_scheduled_tokens", self.max_num_scheduled_tokens, 1)
        _at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        _at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        if self.spec_method not in SPEC_METHODS:
            raise ValueError(f"spec_method must be one of {', '.join(SPEC_METHODS)}, got {self.spec_method!r}")

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots beyond the scheduled tokens that a drafter writes to."""
        return self.num_speculative_tokens if self.spec_method in DRAFTS_IN_CACHE else 0

    @property
    def num_drafter_slots(self) -> int:
        """Input slots of the batch that the drafter needs for each request."""
        return 1 if self.num_speculative_tokens and self.spec_method == "draft_model" else 0

    @property
    def drops_last_hit(self) -> bool:
        """Whether the last block of a prefix hit is computed again, because the drafter needs its hidden states."""
        return self.num_speculative_tokens > 0 and self.spec_method in DROPS_LAST_HIT

    @property
    def max_steps_under_way(self) -> int:
        """Steps that may be decided and not committed at once."""
        if not self.async_scheduling:
            return self.pipeline_parallel_size
        if self.use_v2_model_runner:
            return self.pipeline_parallel_size + 1
        return max(2, self.pipeline_parallel_size)

    @property
    def num_decode_gap(self) -> int:
        """Decisions after which a decode may be scheduled again at the earliest; 0 is the next one."""
        return self.pipeline_parallel_size if self.async_scheduling and self.use_v2_model_runner else 0

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_gpu_blocks - 1

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the usable blocks can hold."""
        return self.num_usable_blocks * self.block_size


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
