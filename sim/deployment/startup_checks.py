"""Where the facts of a start-up contradict each other by more than rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator

from windtunnel.sim.deployment.gpu import GIB
from windtunnel.sim.deployment.startup_facts import RankMemory, StartupFacts
from windtunnel.sim.deployment.startup_summary import ROUNDING_BYTES, fixed_bytes


def check(facts: StartupFacts) -> list[str]:
    """Sentences that say where a log contradicts itself by more than rounding allows; empty if it does not."""
    found = [*_check_pool(facts), *_check_concurrency(facts), *_check_graphs(facts), *_check_errors(facts)]
    for rank in facts.ranks:
        found += [*_check_requested(facts, rank), *_check_parts(facts, rank)]
    return found


def _check_pool(facts: StartupFacts) -> Iterator[str]:
    """Tokens are blocks x block_size, or (from 0.20 on) the largest concurrency times max_model_len."""
    tokens, blocks, size = facts.kv_cache_tokens, facts.num_gpu_blocks, facts.block_size
    if tokens is None or blocks is None or size is None or facts.is_hybrid:
        return
    tokens_of_block = size * (facts.context_parallel_size or 1)
    expected = {blocks * tokens_of_block}
    if length := facts.max_concurrency_tokens:
        whole = int(blocks / math.ceil(length / tokens_of_block) * length)
        expected |= {whole - 1, whole, whole + 1}
    if tokens not in expected:
        yield f"{_at(facts, 'kv_cache_tokens')}: {tokens:,} tokens are not {blocks:,} blocks of {tokens_of_block}"


def _check_concurrency(facts: StartupFacts) -> Iterator[str]:
    """A request takes whole blocks, so up to one block more than its length, but no more than that."""
    tokens, concurrency, length = facts.kv_cache_tokens, facts.max_concurrency, facts.max_concurrency_tokens
    if tokens is None or concurrency is None or not length or facts.is_hybrid:
        return
    tokens_of_block = (facts.block_size or length) * (facts.context_parallel_size or 1)
    if concurrency < tokens / (length + tokens_of_block) - 0.0051:
        yield (
            f"{_at(facts, 'max_concurrency')}: {concurrency:.2f} requests of {length:,} tokens are not what "
            f"{tokens:,} tokens hold ({tokens / length:.2f})"
        )


def _check_requested(facts: StartupFacts, rank: RankMemory) -> Iterator[str]:
    total, requested, share = rank.total_memory_bytes, rank.requested_memory_bytes, facts.gpu_memory_utilization
    if total is None or requested is None or share is None:
        return
    is_rounded = facts.engine == "V0" and "gpu_memory_utilization" not in facts.non_default_args
    allowed = total * (0.005 if is_rounded else 0.00005) + ROUNDING_BYTES * (1 + share) + 1
    if abs(total * share - requested) > allowed:
        yield f"{_of(rank)}{_gib(requested)} GiB are not {share:g} of {_gib(total)} GiB ({_gib(total * share)} GiB)"


def _check_parts(facts: StartupFacts, rank: RankMemory) -> Iterator[str]:
    """Weights, non-torch, activation, the KV cache and, where it is applied, the estimate of the graphs."""
    requested, available, activation = (
        rank.requested_memory_bytes,
        rank.available_kv_cache_bytes,
        rank.activation_bytes,
    )
    fixed = fixed_bytes({"consumed_bytes": rank.consumed_bytes, **_weights_and_non_torch(rank)})
    if requested is None or available is None or activation is None or fixed is None or facts.kv_cache_memory_bytes:
        return
    estimate = rank.cudagraph_estimate_bytes or 0
    applied = facts.cudagraph_estimate_applied
    possible = [estimate] if applied else [0] if applied is False else [0, estimate]
    rest = requested - fixed - activation - available
    if min(abs(rest - graphs) for graphs in possible) > 7 * ROUNDING_BYTES:
        parts = fixed + activation + available + possible[-1]
        yield f"{_of(rank)}the parts sum to {_gib(parts)} GiB, but {_gib(requested)} GiB were requested"


def _weights_and_non_torch(rank: RankMemory) -> dict[str, int | None]:
    return {"weights_bytes": rank.weights_bytes, "non_torch_bytes": rank.non_torch_bytes}


def _check_graphs(facts: StartupFacts) -> Iterator[str]:
    """The equivalent utilization is the one given less the estimate's share of the device."""
    share, equivalent = facts.gpu_memory_utilization, facts.equivalent_gpu_memory_utilization
    estimate, total = facts.cudagraph_estimate_bytes, facts.total_memory_bytes
    if share is None or equivalent is None or estimate is None or not total or total < 0:
        return
    allowed = 0.0001 + (1 + estimate / total) * ROUNDING_BYTES / total
    if abs(share - equivalent - estimate / total) > allowed:
        yield (
            f"{_at(facts, 'equivalent_gpu_memory_utilization')}: {equivalent:g} is not {share:g} less "
            f"{_gib(estimate)} of {_gib(total)} GiB for the graphs"
        )


def _check_errors(facts: StartupFacts) -> Iterator[str]:
    for error in facts.errors:
        numbers = error.numbers
        if error.kind == "free_memory_below_desired":
            free, requested = numbers["free_bytes"], numbers["requested_bytes"]
            if free > requested + 2 * ROUNDING_BYTES:
                yield f"line {error.line}: {_gib(free)} GiB free are not less than {_gib(requested)} GiB"
        elif error.kind == "max_model_len_exceeds_kv_cache" and "needed_bytes" in numbers:
            needed, available = numbers["needed_bytes"], numbers["available_bytes"]
            if needed < available - 2 * ROUNDING_BYTES:
                yield f"line {error.line}: {_gib(needed)} GiB needed are not more than {_gib(available)} GiB available"
        if facts.started and error.kind != "out_of_memory_serving":
            yield f"line {error.line}: {error.kind}, but the server came up"


def _at(facts: StartupFacts, name: str) -> str:
    return f"line {facts.lines[name]}"


def _of(rank: RankMemory) -> str:
    return f"{rank.process}: " if rank.process else ""


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"
