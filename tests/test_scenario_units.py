"""Numbers as people write them."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.scenarios.units import (
    parse_count,
    parse_duration_s,
    parse_gib,
    parse_rate,
    parse_size_bytes,
    parse_spec,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16k", 16_000), ("16K", 16_384), ("25.6k", 25_600), ("2M", 2 * 2**20), ("2m", 2_000_000), ("8192", 8192), (7, 7)],
)
def test_counts_read_as_vllm_reads_its_flags(text: str | int, expected: int) -> None:
    assert expected == parse_count(text)


@pytest.mark.parametrize("text", ["25.6K", "1.5", "16kk", "k", "", "16 KiB", True, 1.5, None])
def test_what_is_no_count_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"must be (a )?whole"):
        parse_count(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20m", 1200),
        ("90s", 90),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("1 h 5 s", 3605),
        ("90", 90),
        (1.5, 1.5),
        ("2d", 172_800),
    ],
)
def test_durations_have_units(text: float | str, seconds: float) -> None:
    assert seconds == pytest.approx(parse_duration_s(text), rel=1e-12)


@pytest.mark.parametrize("text", ["20 minutes", "m", "", "1h30", "-5", -1, "inf", math.nan, True, "5x", [1]])
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration_s(text)  # type: ignore[arg-type]


@given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
def test_a_duration_is_the_sum_of_its_parts(hours: int, minutes: int, seconds: int) -> None:
    assert 3600 * hours + 60 * minutes + seconds == parse_duration_s(f"{hours}h{minutes}m{seconds}s")


def test_gib_and_gb_differ() -> None:
    assert parse_size_bytes("16GiB") == 16 * 2**30
    assert parse_size_bytes("16GB") == 16 * 10**9
    assert parse_size_bytes("16G") == 16 * 2**30
    assert parse_size_bytes("16g") == 16 * 10**9
    assert parse_size_bytes("1.5 GiB") == 3 * 2**29
    assert parse_size_bytes(1024) == 1024


@pytest.mark.parametrize("text", ["16gib", "16 giga", "GiB", "", True, -1.5])
def test_an_unknown_unit_of_memory_names_both_spellings(text: object) -> None:
    with pytest.raises(ValueError, match=r"16GiB.*16GB"):
        parse_size_bytes(text)  # type: ignore[arg-type]


def test_a_rate_is_above_zero_and_may_be_infinite() -> None:
    assert math.inf == parse_rate("inf")
    assert parse_rate("12.5") == 12.5
    for bad in (0, -1, "fast", math.nan, True, None):
        with pytest.raises(ValueError, match="above 0, or inf"):
            parse_rate(bad)  # type: ignore[arg-type]


def test_a_spec_is_a_name_with_fields() -> None:
    assert parse_spec("lognormal:mean=512, sigma=0.8", "dist") == {"dist": "lognormal", "mean": 512, "sigma": 0.8}
    assert parse_spec("profile:path=a b.json", "kind") == {"kind": "profile", "path": "a b.json"}
    assert parse_spec("roofline", "kind") == {"kind": "roofline"}
    with pytest.raises(ValueError, match="'sigma' has no value"):
        parse_spec("lognormal:mean=512,sigma", "dist")


@pytest.mark.parametrize(
    ("text", "spelled"), [("16gb", "16GB"), ("16Gib", "16GiB"), ("2mb", "2MB"), ("1.5 gi", "1.5GiB"), ("3Kib", "3KiB")]
)
def test_a_size_in_the_wrong_case_is_told_how_to_spell_it(text: str, spelled: str) -> None:
    with pytest.raises(ValueError, match=f"; write {re.escape(spelled)}$"):
        parse_size_bytes(text)
    assert parse_size_bytes(spelled) > 0


def test_gib_are_a_plain_number() -> None:
    assert parse_gib("24") == parse_gib(24) == 24.0
    assert parse_gib("0.5") == 0.5


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("24gb", ": 24 GB = 22.3517 GiB, so write 22.3517"),
        ("24g", ": 24 GB = 22.3517 GiB, so write 22.3517"),
        ("24G", ": write 24"),
        ("24GiB", ": write 24"),
        ("24 gib", ": write 24"),
        ("24576MiB", ": 24576 MiB = 24 GiB, so write 24"),
        ("1TB", ": 1 TB = 931.323 GiB, so write 931.323"),
        ("24x", "without a unit"),
        ("", "without a unit"),
        ("-1", "of at least 0"),
        ("nan", "of at least 0"),
        ("inf", "of at least 0"),
    ],
)
def test_gib_with_a_unit_are_told_as_a_number(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(remedy)}$"):
        parse_gib(text)
