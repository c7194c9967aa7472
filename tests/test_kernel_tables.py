"""Readers of measured kernel tables, on small ones in the makers' formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from kernel_table_builder import context_s, decode_s, gemm_s, reduce_s, write_aiconfigurator, write_profile

from windtunnel.calibrate import aiconfigurator
from windtunnel.calibrate.aiconfigurator import installed_systems, read_all_reduces, read_tables
from windtunnel.calibrate.kernel_tables import KernelTableError, Rows, read_profiled
from windtunnel.sim.deployment.gpu import load_gpu


def test_a_table_of_aiconfigurator_is_read_in_seconds(tmp_path: Path) -> None:
    tables = read_tables("A100-80GB-SXM", systems=write_aiconfigurator(tmp_path))
    gemm = tables.gemm["bf16"].where(m=256, n=4096, k=1024)
    context = tables.context_attention["bf16"].where(batch=4, tokens=512, num_heads=8, num_kv_heads=4)
    decode = tables.decode_attention["bf16"].where(batch=32, context=1024, num_heads=4, num_kv_heads=2)
    assert gemm is not None
    assert context is not None
    assert decode is not None
    assert gemm.seconds == pytest.approx([gemm_s(256, 4096, 1024)])
    assert context.seconds == pytest.approx([context_s(4, 512, 8)])
    assert decode.seconds == pytest.approx([decode_s(32, 1024, 2)])


def test_all_reduces_are_those_of_cuda_graphs(tmp_path: Path) -> None:
    rows = read_tables("A100-80GB-SXM", systems=write_aiconfigurator(tmp_path)).all_reduce
    assert rows is not None
    found = rows.where(ranks=4, bytes=8192)
    assert found is not None
    assert found.seconds == pytest.approx([reduce_s(4, 8192)])
    assert "CUDA graphs" in rows.source


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("half", 2), ("float16", 2), ("float32", 4), ("int8", 1)])
def test_messages_are_counted_in_elements_of_their_type(tmp_path: Path, dtype: str, size: int) -> None:
    systems = write_aiconfigurator(tmp_path)
    path = next(systems.rglob("custom_allreduce_perf.parquet"))
    pd.read_parquet(path).assign(allreduce_dtype=dtype).to_parquet(path)
    rows = read_tables("A100-80GB-SXM", systems=systems).all_reduce
    assert rows is not None
    assert rows.values("bytes") == [size * elements for elements in (128, 4096, 2**18, 2**22, 2**25)]


def test_elements_of_unknown_size_are_refused(tmp_path: Path) -> None:
    systems = write_aiconfigurator(tmp_path)
    path = next(systems.rglob("custom_allreduce_perf.parquet"))
    pd.read_parquet(path).assign(allreduce_dtype="nvfp4").to_parquet(path)
    with pytest.raises(KernelTableError, match="no size is known of elements of nvfp4; known are bfloat16"):
        read_tables("A100-80GB-SXM", systems=systems)


@pytest.mark.parametrize("gpu", ["A100-80GB-SXM", "H100-SXM", "H200", "B200", "B300", "L40S"])
def test_large_all_reduces_are_as_fast_as_links_allow_and_no_faster(gpu: str) -> None:
    """Half of the table's bytes, or twice as many, would not pass: the largest have 0.64 to 0.83 of an NVLink."""
    if installed_systems() is None:
        pytest.skip("needs aiconfigurator-core")
    card, tables = load_gpu(gpu), read_all_reduces(gpu)
    assert len(tables) >= 3
    reaches = []
    for rows in tables:
        for ranks in rows.values("ranks"):
            own = rows.where(ranks=ranks)
            assert own is not None
            passed = own["bytes"] / own.seconds  # in a switch that adds up, each byte passes a link once
            busy = 2 * (ranks - 1) / ranks * passed
            assert (passed <= card.link_bytes_per_s).all(), rows.source
            if ranks == 2:
                assert (busy <= card.link_bytes_per_s).all(), rows.source
                reaches.append(float(busy[own["bytes"] == own["bytes"].max()].max()) / card.link_bytes_per_s)
    assert min(reaches) >= 0.55


@pytest.mark.parametrize("system", ["a100_sxm", "h100_sxm", "b300_sxm", "l40s"])
def test_nccl_takes_as_long_for_as_many_bytes_of_either_type(system: str) -> None:
    """The package's own evidence for its unit: counted in elements, half of int8's count is as long as half floats'."""
    folder = installed_systems()
    if folder is None:
        pytest.skip("needs aiconfigurator-core")
    path = max((folder / "data" / system / "comm" / "nccl").glob("*/nccl_perf.parquet"))
    frame = pd.read_parquet(path).query("op_name == 'all_reduce' and num_gpus == 2 and message_size >= 2**24")
    best = frame.groupby(["nccl_dtype", "message_size"])["latency"].min()
    for elements, latency in best["half"].items():
        assert best["int8"][2 * elements] == pytest.approx(latency, rel=0.15)
        assert best["int8"][elements] < 0.7 * latency


def test_the_newest_version_that_has_a_table_is_read(tmp_path: Path) -> None:
    systems = write_aiconfigurator(tmp_path, versions=("0.9.0", "0.14.0"))
    rows = read_tables("A100-80GB-SXM", systems=systems).gemm["bf16"]
    assert "0.14.0" in rows.source  # 14 is more than 9, though its text comes first
    assert rows.seconds.min() == pytest.approx(gemm_s(1, 64, 64))


def test_products_that_show_the_host_instead_of_the_kernel_are_left_out(tmp_path: Path) -> None:
    systems = write_aiconfigurator(tmp_path)
    path = next(systems.rglob("gemm_perf.parquet"))
    frame = pd.read_parquet(path)
    slow = frame.assign(gemm_dtype="fp8", latency=frame["latency"] + 0.06)
    pd.concat([frame, slow]).to_parquet(path)
    assert list(read_tables("A100-80GB-SXM", systems=systems).gemm) == ["bf16"]


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiconfigurator, "installed_systems", lambda: None)
    with pytest.raises(KernelTableError, match=r"windtunnel\[kernels\]"):
        read_tables("H100")


def test_a_card_without_tables_is_refused_with_those_that_have_some(tmp_path: Path) -> None:
    with pytest.raises(KernelTableError, match=r"no tables for RTX-4090; it has .*H100-SXM"):
        read_tables("RTX 4090", systems=write_aiconfigurator(tmp_path))
    with pytest.raises(KernelTableError, match="no matrix products of sglang on A100-80GB-SXM; it has vllm"):
        read_tables("A100-80GB-SXM", "sglang", systems=write_aiconfigurator(tmp_path))


def test_a_profile_is_read_in_seconds(tmp_path: Path) -> None:
    tables = read_profiled(write_profile(tmp_path), "RTX 4090", "tiny/Tiny-1B")
    assert tables.gpu == "RTX-4090"
    found = tables.layers["o_proj"].where(tokens=512)
    assert found is not None
    assert found.seconds == pytest.approx([gemm_s(512, 1024, 1024)])
    assert tables.sequences["sampler"].seconds == pytest.approx([11e-6, 18e-6, 74e-6])
    assert tables.experts is None


def test_a_profile_of_another_model_is_refused_with_those_there_are(tmp_path: Path) -> None:
    folder = write_profile(tmp_path)
    with pytest.raises(KernelTableError, match="has no RTX-4090 other/Model tp1; it has RTX-4090 tiny/Tiny-1B tp1"):
        read_profiled(folder, "RTX 4090", "other/Model")
    with pytest.raises(KernelTableError, match="no such table"):
        read_profiled(folder / "nowhere", "RTX 4090", "tiny/Tiny-1B")


@pytest.mark.parametrize(
    ("columns", "seconds", "message"),
    [
        ({"m": [1, 2]}, [1e-6], "equally long"),
        ({"m": []}, [], "no rows"),
        ({"m": [1, 2]}, [1e-6, 0.0], "above 0 and finite, got 0.0 in row 1"),
        ({"m": [1, -2]}, [1e-6, 1e-6], "m must be at least 0, got -2"),
    ],
)
def test_rows_that_cannot_be_are_refused(columns: dict[str, list[int]], seconds: list[float], message: str) -> None:
    with pytest.raises(KernelTableError, match=message):
        Rows({name: np.array(values, np.int64) for name, values in columns.items()}, np.array(seconds))
