"""vLLM 0.32's defaults by card and usage, what was given, and where each value comes from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.sim.deployment.engine_args import EngineDefaults, engine_defaults
from windtunnel.sim.deployment.gpu import GIB, load_gpu
from windtunnel.sim.deployment.model import load_model

LLAMA = load_model("llama-3.1-8b")


def defaults(gpu: str = "h100", usage: str = "api_server", **given: Any) -> EngineDefaults:
    return engine_defaults(load_gpu(gpu), usage, model=LLAMA, **given)


@pytest.mark.parametrize(
    ("gpu", "usage", "budget", "seqs"),
    [
        ("h100", "api_server", 8192, 1024),
        ("h100", "llm_class", 16384, 1024),
        ("h200", "api_server", 8192, 1024),
        ("b200", "api_server", 16384, 1024),
        ("mi300x", "llm_class", 16384, 1024),
        ("a100-80", "api_server", 2048, 256),
        ("a100-80", "llm_class", 8192, 256),
        ("l40s", "api_server", 2048, 256),
        ("rtx-4090", "llm_class", 8192, 256),
    ],
)
def test_batch_limits_go_by_memory_usage_and_the_name_a100(gpu: str, usage: str, budget: int, seqs: int) -> None:
    found = defaults(gpu, usage)
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (budget, seqs)


@pytest.mark.parametrize(("gib", "budget"), [(69.99, 2048), (70, 8192), (159.99, 8192), (160, 16384)])
def test_the_tiers_begin_at_70_and_160_gib(gib: float, budget: int) -> None:
    card = replace(load_gpu("h100"), memory_bytes=round(gib * GIB))
    assert engine_defaults(card, model=LLAMA).max_num_batched_tokens == budget


def test_the_rest_of_the_defaults() -> None:
    found = defaults()
    assert found.gpu_memory_utilization == 0.92
    assert found.block_size == 16
    assert found.max_model_len == 131_072
    assert found.enable_chunked_prefill
    assert found.enable_prefix_caching


def test_each_value_names_its_source() -> None:
    found = defaults(max_num_seqs=64)
    assert found.sources["max_num_seqs"] == "given"
    assert found.sources["max_num_batched_tokens"] == "vLLM 0.32 default for >= 70 GiB, api_server"
    assert found.sources["max_model_len"] == "longest context of meta-llama/Llama-3.1-8B-Instruct"


def test_a_defaulted_max_num_seqs_does_not_exceed_the_budget() -> None:
    found = defaults(max_num_batched_tokens=512)
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (512, 512)
    assert "lowered to max_num_batched_tokens" in found.sources["max_num_seqs"]


def test_given_values_stay_even_where_they_clash() -> None:
    found = defaults(max_num_batched_tokens=128, max_num_seqs=256)
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (128, 256)


def test_without_chunked_prefill_the_budget_holds_the_longest_prompt() -> None:
    assert defaults(enable_chunked_prefill=False, max_model_len=20_000).max_num_batched_tokens == 20_000
    assert defaults(enable_chunked_prefill=False, max_model_len=4096).max_num_batched_tokens == 8192
    assert defaults(max_model_len=20_000).max_num_batched_tokens == 8192


def test_the_budget_is_no_more_than_all_sequences_could_fill() -> None:
    assert defaults(max_num_seqs=2, max_model_len=1000).max_num_batched_tokens == 2000


def test_throughput_mode_doubles_both_limits() -> None:
    found = defaults("l40s", performance_mode="throughput")
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (4096, 512)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"usage": "server"}, "usage_context must be one of api_server, llm_class"),
        ({"performance_mode": "fast"}, "performance_mode must be one of"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"gpu_memory_utilization": 92}, r"gpu_memory_utilization must lie in \(0, 1\], got 92"),
    ],
)
def test_bad_values_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        defaults(**given)


def test_without_a_model_the_context_must_be_given() -> None:
    with pytest.raises(ValueError, match="max_model_len has no default without a model"):
        engine_defaults(load_gpu("h100"))
    assert engine_defaults(load_gpu("h100"), max_model_len=4096).max_model_len == 4096


@given(
    gpu=st.sampled_from(["h100", "a100", "b200", "l4"]),
    usage=st.sampled_from(["api_server", "llm_class"]),
    max_model_len=st.integers(1, 200_000),
    chunked=st.booleans(),
)
def test_defaults_are_always_accepted_by_vllm(gpu: str, usage: str, max_model_len: int, chunked: bool) -> None:
    found = defaults(gpu, usage, max_model_len=max_model_len, enable_chunked_prefill=chunked)
    assert found.max_num_batched_tokens >= found.max_num_seqs >= 1
    assert chunked or found.max_num_batched_tokens >= found.max_model_len
