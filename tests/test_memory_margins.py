"""What start-ups say of memory that no budget counts: where it is from, and that it is what the data gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from conftest import REPO_ROOT

from windtunnel.calibrate.memory_margins import graph_margins
from windtunnel.calibrate.startups import read_rows
from windtunnel.sim.deployment.gpu import GIB, bundled_gpus, load_gpu
from windtunnel.sim.deployment.memory_at_start import graph_spread, in_use_at_start

DATA: Mapping[str, Any] = json.loads((REPO_ROOT / "sim" / "deployment" / "margins.json").read_text())


def in_use_gib(gpu: str, *, several: bool) -> list[float]:
    return [round(each / GIB, 2) for each in in_use_at_start(load_gpu(gpu), several=several)[:3]]


@pytest.mark.parametrize(
    ("gpu", "several", "gib"),
    [
        ("h100", False, [0.51, 0.51, 0.53]),  # its own
        ("h100", True, [1.43, 1.53, 2.07]),
        ("a100-80g", True, [0.39, 1.53, 2.16]),  # those with NVLink, the least of any
        ("t4", True, [0.39, 0.63, 0.96]),  # those without
        ("rtx-3090", True, [0.39, 0.51, 0.96]),  # two of its own, the bounds of those without NVLink
        ("mi300x", False, [0.17, 0.33, 0.61]),  # one of its own, the bounds of any
    ],
)
def test_what_is_in_use_is_of_the_card_or_of_cards_like_it(gpu: str, several: bool, gib: list[float]) -> None:
    assert in_use_gib(gpu, several=several) == gib


@pytest.mark.parametrize("gpu", bundled_gpus())
def test_bounds_hold_the_typical_figure_and_several_ranks_take_more(gpu: str) -> None:
    one, several = (in_use_at_start(load_gpu(gpu), several=each) for each in (False, True))
    for found in (one, several):
        assert 0 < found.low <= found.typical <= found.high < 3 * GIB
    assert several.high > one.high
    assert several.typical >= one.typical


def test_start_ups_of_the_recorded_logs_are_those_of_the_file() -> None:
    """What H100s had in use, row by row: total less free."""
    rows = [row for row in read_rows() if row["free_at_start_gib"] and row["gpu"] == "H100 80GB HBM3"]
    seen: dict[bool, list[float]] = {False: [], True: []}
    for row in rows:
        several = float(row["tp"]) * float(row["pp"]) > 1
        seen[several].append(round(float(row["gpu_total_gib"]) - float(row["free_at_start_gib"]), 2))
    for several, found in seen.items():
        kept = [
            each["gib"]
            for each in DATA["in_use_at_start"]
            if each["gpu"] == "H100-SXM" and each["several"] == several and "startups.csv" in each["source"]
            for _ in range(each["start_ups"])
        ]
        assert sorted(found) == sorted(kept)
        assert found


def test_every_start_up_names_its_source() -> None:
    assert all(each["source"] and each["start_ups"] >= 1 for each in DATA["in_use_at_start"])


@pytest.mark.slow
def test_the_spread_of_graphs_is_what_the_recorded_start_ups_give() -> None:
    for maker, found in graph_margins(read_rows()).items():
        assert found == {
            name: pytest.approx(value, abs=0.02) if name.endswith("gib") else value
            for name, value in DATA["graphs"][maker].items()
        }


def test_the_spread_of_graphs_is_read_by_maker() -> None:
    for maker, amd in (("nvidia", False), ("amd", True)):
        found = DATA["graphs"][maker]
        assert graph_spread(amd=amd) == (
            round(found["captured_gib"] * GIB),
            round(found["estimate_gib"] * GIB),
        )
