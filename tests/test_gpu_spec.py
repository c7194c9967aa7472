"""The table of cards: names, memory as the driver reports it, dense rates."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from windtunnel.sim.deployment.gpu import GIB, bundled_gpus, load_gpu, siblings

STARTUPS = Path(__file__).resolve().parent.parent.parent / "shared" / "memory" / "startups.csv"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100", "H100-SXM"),
        ("H100-80GB", "H100-SXM"),
        ("H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("h100_pcie", "H100-PCIe"),
        ("a100-80", "A100-80GB-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB-SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("rtx4090", "RTX-4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("a100-80g", "A100-80GB-SXM"),
        ("a100-80gb", "A100-80GB-SXM"),
        ("a100-80GiB", "A100-80GB-SXM"),
        ("A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA-A100-SXM4-80GB", "A100-80GB-SXM"),
        ("h100-sxm5-80gb", "H100-SXM"),
        ("h100 80g", "H100-SXM"),
        ("NVIDIA H100 80GB HBM2e", "H100-PCIe"),
        ("nvidia-h100-mega-80gb", "H100-SXM"),
        ("H200 141GB HBM3e", "H200"),
        ("hgx-b200", "B200"),
        ("t4", "T4"),
        ("tesla t4", "T4"),
        ("nvidia-tesla-t4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100-32GB-SXM"),
        ("a10", "A10"),
        ("a10g", "A10G"),
        ("l40", "L40"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("AMD Instinct MI250X / MI250", "MI250X"),
        ("4090-24gb", "RTX-4090"),
    ],
)
def test_the_names_people_and_drivers_use_are_known(name: str, expected: str) -> None:
    assert load_gpu(name).name == expected


def test_every_card_loads_by_its_own_name() -> None:
    assert [load_gpu(name).name for name in bundled_gpus()] == bundled_gpus()


def test_no_name_means_two_cards() -> None:
    for name in bundled_gpus():
        assert [load_gpu(alias).name for alias in load_gpu(name).aliases] == [name] * len(load_gpu(name).aliases)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("a100-80gb", ["A100-80GB-PCIe"]),
        ("h100", ["H100-PCIe", "H100-NVL"]),
        ("v100", ["V100-16GB-SXM"]),
        ("a10", []),
        ("l40", []),
        ("h20", []),
        ("NVIDIA H100 80GB HBM3", []),
    ],
)
def test_a_short_name_tells_what_else_it_could_mean(name: str, others: list[str]) -> None:
    assert siblings(name) == others


def test_an_unknown_card_is_answered_with_the_nearest_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown GPU 'H1000'.*H100-SXM"):
        load_gpu("H1000")


def test_a_name_like_no_other_lists_all_cards() -> None:
    with pytest.raises(ValueError, match=r"known: A100-40GB-SXM, .*MI300X"):
        load_gpu("zzz")


@pytest.mark.parametrize("name", bundled_gpus())
def test_each_card_names_its_datasheet_and_reports_less_than_its_marketing_figure(name: str) -> None:
    gpu = load_gpu(name)
    marketed_gb = {
        "A100-40GB-SXM": 40,
        "A100-80GB-SXM": 80,
        "A100-40GB-PCIe": 40,
        "A100-80GB-PCIe": 80,
        "H100-SXM": 80,
        "H100-PCIe": 80,
        "H100-NVL": 94,
        "H200": 141,
        "B200": 180,
        "B300": 288,
        "L40S": 48,
        "L4": 24,
        "A10G": 24,
        "RTX-3090": 24,
        "RTX-4090": 24,
        "RTX-5090": 32,
        "MI300X": 192,
        "T4": 16,
        "V100-32GB-SXM": 32,
        "V100-16GB-SXM": 16,
        "A10": 24,
        "A40": 48,
        "L40": 48,
        "RTX-A6000": 48,
        "RTX-6000-Ada": 48,
        "RTX-PRO-6000": 96,
        "H20": 96,
        "GH200-96GB": 96,
        "MI210": 64,
        "MI250X": 64,
        "MI325X": 256,
        "MI355X": 288,
    }[name]
    assert 0.9 * marketed_gb < gpu.memory_gib < marketed_gb
    assert gpu.source
    assert gpu.memory_source


@pytest.mark.parametrize("name", bundled_gpus())
def test_eight_bit_rates_are_none_or_no_less_than_those_of_bf16(name: str) -> None:
    gpu = load_gpu(name)
    assert gpu.flops_per_s("fp8") >= gpu.flops_per_s("bf16")
    if name != "B300":  # Blackwell Ultra gave its int8 units away
        assert gpu.flops_per_s("int8") >= gpu.flops_per_s("bf16")


def test_a_format_without_units_runs_at_the_bf16_rate() -> None:
    a100 = load_gpu("a100")
    assert a100.fp8_flops_per_s is None
    assert a100.flops_per_s("fp8") == a100.bf16_flops_per_s
    with pytest.raises(ValueError, match="gemm_dtype must be bf16, fp8 or int8, got 'fp4'"):
        a100.flops_per_s("fp4")


def test_a_card_without_bandwidth_is_refused() -> None:
    with pytest.raises(ValueError, match=r"H200: hbm_bandwidth_bytes_per_s must be positive, got 0"):
        replace(load_gpu("h200"), hbm_bandwidth_bytes_per_s=0)


@pytest.mark.skipif(not STARTUPS.exists(), reason="needs the shared start-up logs")
def test_memory_is_what_real_start_ups_logged() -> None:
    compared = 0
    with STARTUPS.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not row["gpu"] or not row["gpu_total_gib"] or "mod" in row["gpu"]:
                continue
            try:
                gpu = load_gpu(row["gpu"].split(" (")[0])
            except ValueError:
                continue
            assert gpu.memory_bytes / GIB == pytest.approx(float(row["gpu_total_gib"]), rel=0.003), row["source"]
            compared += 1
    assert compared >= 30
