"""Version profiles: what each release of vLLM has by default, which of its rules differ, and what is not known."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
from conftest import REPO_ROOT
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.sim.deployment import engine_args
from windtunnel.sim.deployment.engine_args import EngineDefaults, engine_defaults
from windtunnel.sim.deployment.gpu import GIB, bundled_gpus, load_gpu
from windtunnel.sim.deployment.versions import REPRODUCED, SCOPES, VersionProfile, profile, profile_names
from windtunnel.sim.engine.config import SchedulerConfig

DATA = json.loads((REPO_ROOT / "sim" / "deployment" / "versions.json").read_text())
RELEASES: list[str] = DATA["releases"]


def defaults(version: str, gpu: str = "h100", usage: str = "api_server", **given: Any) -> EngineDefaults:
    return engine_defaults(load_gpu(gpu), usage, **{"max_model_len": 32_768, **given}, version=profile(version))


def limits(version: str, gpu: str, usage: str = "api_server", **given: Any) -> tuple[int, int]:
    found = defaults(version, gpu, usage, **given)
    return found.max_num_batched_tokens, found.max_num_seqs


def test_the_minor_versions_from_0_8_to_0_32_have_a_name() -> None:
    assert profile_names() == tuple(f"vllm-0.{minor}" for minor in range(8, 33))


@pytest.mark.parametrize(
    ("name", "release", "shown"),
    [
        ("vllm-0.8", "0.8.5.post1", "vLLM 0.8"),
        ("0.11", "0.11.2", "vLLM 0.11"),
        ("vllm-0.11.2", "0.11.2", "vLLM 0.11.2"),
        ("vLLM-0.11.0", "0.11.0", "vLLM 0.11.0"),
        ("v0.10.1.1", "0.10.1.1", "vLLM 0.10.1.1"),
        ("vllm==0.8.5.post1", "0.8.5.post1", "vLLM 0.8.5.post1"),
        ("vllm-0.32", "0.32.0", "vLLM 0.32"),
        ("vllm", "0.32.0", "vLLM 0.32"),
    ],
)
def test_a_release_answers_to_its_names(name: str, release: str, shown: str) -> None:
    assert (profile(name).release, profile(name).label) == (release, shown)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("vllm-0.7", "vllm-0.8"),
        ("0.33", "vllm-0.32"),
        ("vllm-1.0", "vllm-0.32"),
        ("vllm-0.11.7", "vllm-0.11"),
        ("vllm-O.11", "vllm-0.11"),
    ],
)
def test_an_unknown_release_names_the_nearest_and_all_allowed(name: str, nearest: str) -> None:
    nearest = nearest.replace(".", r"\.")
    with pytest.raises(ValueError, match=rf"unknown engine .*; nearest: {nearest}[;,].* allowed: vllm-0\.8, .*0\.32, "):
        profile(name)


@pytest.mark.parametrize("name", ["", "sglang", "0", "vllm-0", "vllm-0.8.5.post2"])
def test_what_is_no_release_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown engine"):
        profile(name)


@pytest.mark.parametrize(
    ("version", "gpu", "usage", "expected"),
    [
        ("0.8.0", "h100", "api_server", (8192, 1024)),
        ("0.8.0", "a100-80", "api_server", (2048, 1024)),
        ("0.8.0", "l4", "llm_class", (8192, 1024)),
        ("0.8.4", "a100-80", "api_server", (2048, 256)),
        ("0.8.4", "b200", "api_server", (2048, 256)),
        ("0.8.5", "a100-80", "api_server", (8192, 1024)),
        ("0.8", "a100-80", "llm_class", (16384, 1024)),
        ("0.8", "a100-40", "llm_class", (8192, 256)),
        ("0.9.0", "a100-80", "api_server", (2048, 256)),
        ("0.9", "b200", "api_server", (8192, 1024)),
        ("0.27", "b200", "api_server", (8192, 1024)),
        ("0.28", "b200", "api_server", (16384, 1024)),
        ("0.28", "mi300x", "api_server", (16384, 1024)),
        ("0.32", "h200", "api_server", (8192, 1024)),
    ],
)
def test_batch_limits_are_those_of_the_release(version: str, gpu: str, usage: str, expected: tuple[int, int]) -> None:
    assert limits(version, gpu, usage) == expected


def test_each_value_names_the_release_it_was_read_in() -> None:
    sources = defaults("vllm-0.11").sources
    assert sources["max_num_batched_tokens"] == "vLLM 0.11 default for >= 70 GiB, api_server (read in 0.11.2)"
    assert sources["gpu_memory_utilization"] == "vLLM 0.11 default (read in 0.11.2)"
    assert defaults("vllm-0.11", max_num_seqs=3).sources["max_num_seqs"] == "given"


def test_a_release_that_was_not_read_says_so_everywhere() -> None:
    unread = profile("0.15.0")
    assert DATA["unread"] == ["0.15.0"]
    assert set(unread.verified.values()) == {"not verified"}
    assert defaults("0.15.0").sources["block_size"] == "vLLM 0.15.0 default on GPUs (not verified)"
    assert unread.differences()[0].startswith("vLLM 0.15.0 was not read")


@pytest.mark.parametrize("release", RELEASES)
def test_every_field_of_every_release_says_where_it_was_read(release: str) -> None:
    found = profile(release)
    described = {item.name for item in fields(VersionProfile)} - {"name", "release", "verified"}
    assert set(found.verified) == described
    assert release in DATA["unread"] or set(found.verified.values()) == {release}


@pytest.mark.parametrize(
    ("name", "old", "last_old", "first_new"),
    [
        ("gpu_memory_utilization", 0.9, "0.19.1", "0.20.0"),
        ("async_scheduling", False, "0.13.0", "0.14.0"),
        ("async_scheduling_with_pipeline", False, "0.14.1", "0.15.1"),
        ("scheduler_reserve_full_isl", False, "0.18.1", "0.19.0"),
        ("free_blocks_to_front", False, "0.23.0", "0.24.0"),
        ("long_prefill_spares_lone_request", False, "0.30.0", "0.31.0"),
        ("counts_resumed_prefix_hits", True, "0.11.0", "0.11.1"),
        ("counts_failed_lookups", True, "0.26.0", "0.27.0"),
        ("cuda_graphs_inside_utilization", False, "0.19.1", "0.20.0"),
        ("startup_check_reserves_null_block", False, "0.28.0", "0.29.0"),
        ("has_v0_engine", True, "0.10.2", "0.11.0"),
        ("swap_space_gib", 4.0, "0.17.1", "0.18.0"),
        ("forces_chunked_prefill", True, "0.11.0", "0.11.1"),
    ],
)
def test_a_rule_changes_with_one_release(name: str, old: Any, last_old: str, first_new: str) -> None:
    values = [getattr(profile(release), name) for release in RELEASES]
    start = RELEASES.index(first_new)
    assert RELEASES[start - 1] == last_old or last_old == "0.14.1"
    assert values[:start] == [old] * start
    assert old not in values[start:]


def test_before_0_11_1_chunked_prefill_cannot_be_turned_off() -> None:
    found = defaults("0.11.0", enable_chunked_prefill=False)
    assert found.enable_chunked_prefill
    assert "the given false has no effect" in found.sources["enable_chunked_prefill"]
    assert found.max_num_batched_tokens == 8192
    assert not defaults("0.11.1", enable_chunked_prefill=False).enable_chunked_prefill
    assert defaults("0.11.1", enable_chunked_prefill=False).max_num_batched_tokens == 32_768


def test_before_0_11_1_the_budget_may_exceed_what_all_sequences_could_fill() -> None:
    assert limits("0.11.0", "h100", max_num_seqs=2, max_model_len=1000) == (8192, 2)
    assert limits("0.11.1", "h100", max_num_seqs=2, max_model_len=1000) == (2000, 2)


def test_before_0_10_1_a_small_budget_clashes_with_the_default_seats() -> None:
    assert limits("0.10.0", "h100", max_num_batched_tokens=512) == (512, 1024)
    with pytest.raises(ValueError, match="must be at least max_num_seqs"):
        SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=1024)
    assert limits("0.10.1", "h100", max_num_batched_tokens=512) == (512, 512)


def test_options_of_later_releases_are_refused_with_the_release_that_has_them() -> None:
    old = profile("vllm-0.23")
    assert "watermark" in old.missing_options()
    with pytest.raises(ValueError, match=r"watermark is no option of vLLM 0\.23: it came with vLLM 0\.24"):
        old.check_options(["max_num_seqs", "watermark"])
    profile("vllm-0.24").check_options(["max_num_seqs", "watermark"])
    assert profile("vllm").missing_options() == ()


def test_a_performance_mode_needs_a_release_that_has_it() -> None:
    with pytest.raises(ValueError, match=r"performance_mode is no option of vLLM 0\.16: .* vllm-0\.17"):
        defaults("0.16", performance_mode="throughput")
    assert limits("0.17", "l4", performance_mode="throughput") == (4096, 512)


def test_0_32_is_what_is_simulated_by_default() -> None:
    latest, bare = profile(engine_args.ENGINE), SchedulerConfig()
    assert latest == profile("vllm-0.32")
    assert latest.label == engine_args.ENGINE_VERSION
    assert latest.gpu_memory_utilization == engine_args.GPU_MEMORY_UTILIZATION
    assert latest.block_size == engine_args.BLOCK_SIZE
    assert latest.watermark == bare.watermark
    for name in REPRODUCED:
        assert getattr(latest, name) == getattr(bare, name, True), name
    assert latest.differences(reproduced=()) == ()
    without, explicit = engine_defaults(load_gpu("h100"), max_model_len=9), defaults("0.32", max_model_len=9)
    assert replace(without, sources={}) == replace(explicit, sources={})


@pytest.mark.parametrize("entry", DATA["differences"], ids=lambda entry: entry["text"][:50])
def test_a_difference_holds_for_some_releases_but_not_for_the_latest(entry: dict[str, str]) -> None:
    holds = [any(entry["text"] in text for text in profile(release).differences(reproduced=())) for release in RELEASES]
    assert any(holds)
    assert not holds[-1]
    assert sum(a != b for a, b in zip([False, *holds], [*holds, False], strict=True)) == 2, "one stretch of releases"


@pytest.mark.parametrize(
    "entry", [entry for entry in DATA["differences"] if "field" in entry], ids=lambda e: e["field"]
)
def test_a_difference_about_a_field_holds_while_the_field_is_not_that_of_the_latest(entry: dict[str, str]) -> None:
    latest = getattr(profile("vllm"), entry["field"])
    for release in RELEASES:
        if "from" in entry and RELEASES.index(release) < RELEASES.index(entry["from"]):
            continue  # there is nothing of that kind yet
        told = any(entry["text"] in text for text in profile(release).differences(reproduced=()))
        assert told == (getattr(profile(release), entry["field"]) != latest), release
        assert not any(entry["text"] in text for text in profile(release).differences(reproduced=[entry["field"]]))


def test_every_rule_that_changed_is_told_until_it_is_reproduced() -> None:
    told = {entry.get("field") for entry in DATA["differences"]}
    rules = {name for change in DATA["changes"] for name in change["set"]}
    acted_on = {"gpu_memory_utilization", "batch_tiers", "budget_within_all_sequences", "seqs_within_budget"}
    acted_on |= {"forces_chunked_prefill", "async_scheduling", "async_scheduling_with_pipeline", "use_v2_model_runner"}
    acted_on |= {"has_v0_engine", "swap_space_gib"}
    assert rules - acted_on <= told


def test_only_differences_of_the_scopes_asked_for_are_told() -> None:
    old = profile("vllm-0.10")
    assert old.differences(scopes=()) == ()
    by_scope = [old.differences(scopes=[scope]) for scope in SCOPES]
    assert sorted(text for texts in by_scope for text in texts) == sorted(old.differences())
    with pytest.raises(ValueError, match=r"scope must be one of always, .*, got 'everything'"):
        old.differences(scopes=["everything"])


def test_changes_are_in_the_order_of_releases_and_change_something() -> None:
    changed = [change["release"] for change in DATA["changes"]]
    assert changed == sorted(set(changed), key=RELEASES.index)
    values = dict(DATA["start"])
    for change in DATA["changes"]:
        assert all(values[name] != value for name, value in change["set"].items()), change["release"]
        values.update(change["set"])


def test_the_older_engine_has_defaults_of_its_own_until_0_10() -> None:
    v0 = profile("vllm-0.8").v0
    assert v0 is not None
    assert (v0.swap_space_gib, v0.max_num_seqs, v0.watermark, v0.enable_prefix_caching) == (4.0, 256, 0.01, False)
    assert (v0.max_num_batched_tokens(8192), v0.enable_chunked_prefill(8192)) == (8192, False)
    assert (v0.max_num_batched_tokens(1024), v0.max_num_batched_tokens(131_072)) == (2048, 2048)
    assert profile("vllm-0.11").v0 is None


def test_a_profile_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(profile("vllm-0.11"))) == profile("vllm-0.11")
    assert len({profile("vllm-0.11"), profile("0.11"), profile("vllm-0.12")}) == 2


@given(release=st.sampled_from(RELEASES), gib=st.floats(1, 400), name=st.sampled_from(["A100", "H100", "B200", "X"]))
def test_every_card_has_limits_in_every_release(release: str, gib: float, name: str) -> None:
    card = replace(load_gpu("h100"), name=name, memory_bytes=round(gib * GIB))
    tier = profile(release).batch_tier(card)
    assert tier.llm_class >= tier.api_server >= tier.max_num_seqs > 0


@given(
    release=st.sampled_from(RELEASES),
    gpu=st.sampled_from(bundled_gpus()),
    usage=st.sampled_from(["api_server", "llm_class"]),
    max_model_len=st.integers(1024, 200_000),
    chunked=st.booleans(),
)
def test_defaults_start_an_engine(release: str, gpu: str, usage: str, max_model_len: int, chunked: bool) -> None:
    found = defaults(release, gpu, usage, max_model_len=max_model_len, enable_chunked_prefill=chunked)
    SchedulerConfig(
        max_num_batched_tokens=found.max_num_batched_tokens,
        max_num_seqs=found.max_num_seqs,
        max_model_len=found.max_model_len,
        enable_chunked_prefill=found.enable_chunked_prefill,
    )
