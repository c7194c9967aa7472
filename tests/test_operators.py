"""Step times composed from kernel tables: laws, and values on a machine whose kernels are known."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_table_builder import gemm_s, shapes, tiny_model, write_aiconfigurator, write_profile

from windtunnel.calibrate.aiconfigurator import read_tables
from windtunnel.calibrate.host import (
    NO_HOST,
    Comparison,
    HostOverhead,
    fit_host,
    fit_prompt_terms,
    host_of_others,
    learn_host,
    learned_host,
)
from windtunnel.calibrate.kernel_curves import GemmTable, Line, Plane, cold_decodes, fit_prefill
from windtunnel.calibrate.kernel_tables import KernelTableError, KernelTables, Rows, read_profiled
from windtunnel.calibrate.operators import OperatorModel
from windtunnel.sim.deployment.model_spec import UnsupportedModel, WeightFormat

GPU = "A100-80GB-SXM"


@cache
def measured(noise: float = 0.0) -> KernelTables:
    with TemporaryDirectory() as folder:
        return read_tables(GPU, systems=write_aiconfigurator(Path(folder), noise=noise))


@cache
def profiled() -> KernelTables:
    with TemporaryDirectory() as folder:
        return read_profiled(write_profile(Path(folder)), "RTX 4090", "tiny/Tiny-1B")


@cache
def composed(size: int = 1, *, noise: float = 0.0, host: HostOverhead = NO_HOST) -> OperatorModel:
    return OperatorModel(tiny_model(), GPU, size, measured(noise), host=host)


@cache
def from_profile() -> OperatorModel:
    return OperatorModel(tiny_model(), "RTX-4090", 1, profiled(), host=NO_HOST)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    """Contexts of decodes, and (tokens, prefix) of chunks."""
    contexts = draw(st.lists(st.integers(1, 8000), max_size=40))
    chunks = draw(st.lists(st.tuples(st.integers(1, 2048), st.integers(0, 6000)), max_size=4))
    return contexts, chunks


def step(contexts: list[int], chunks: list[tuple[int, int]]) -> tuple[int, ...]:
    pairs = sum(new * prefix + new * (new + 1) // 2 for new, prefix in chunks)
    new_tokens, prefixes = sum(new for new, _ in chunks), sum(prefix for _, prefix in chunks)
    return len(contexts), sum(contexts), len(chunks), new_tokens, prefixes, pairs, len(contexts) + len(chunks)


@given(steps(), st.integers(1, 8000), st.tuples(st.integers(1, 2048), st.integers(0, 6000)), st.sampled_from([1, 2, 4]))
def test_more_sequences_tokens_or_context_never_cost_less(
    given_step: tuple[list[int], list[tuple[int, int]]], context: int, chunk: tuple[int, int], size: int
) -> None:
    contexts, chunks = given_step
    longer = [*contexts[:-1], contexts[-1] + context] if contexts else [context]
    cases = shapes(
        step(contexts, chunks),
        step([*contexts, context], chunks),
        step(contexts, [*chunks, chunk]),
        step(longer, chunks),
        step(contexts, [(new + chunk[0], prefix + chunk[1]) for new, prefix in chunks] or [chunk]),
    )
    times = composed(size, noise=0.2, host=HostOverhead(1e-3, 1e-5, 1e-3, 0.1)).step_times_s(cases)
    assert (times[1:] >= times[0] * (1 - 1e-12)).all()
    assert (times > 0).all()


@given(st.integers(1, 60), st.integers(1, 3000), st.integers(1, 512), st.integers(0, 1024))
def test_a_profile_too_never_charges_less_for_a_chunk_or_a_like_sequence(
    num_seqs: int, context: int, new: int, prefix: int
) -> None:
    contexts = [context] * num_seqs
    cases = shapes(
        step(contexts, []),
        step(contexts, [(new, prefix)]),
        step([*contexts, context], [(new, prefix)]),
        step([*contexts, context], [(new, prefix + 1)]),
    )
    times = from_profile().step_times_s(cases)
    assert (np.diff(times) >= -1e-15).all()


@given(steps(), st.sampled_from([(1, 2), (2, 4), (1, 4)]))
def test_more_cards_never_compute_more_on_each_nor_reduce_faster(
    given_step: tuple[list[int], list[tuple[int, int]]], sizes: tuple[int, int]
) -> None:
    contexts, chunks = given_step
    few, many = (composed(size).terms_s(shapes(step([*contexts, 1], chunks))) for size in sizes)
    for term in ("gemm", "elementwise", "decode_attention", "prefill_attention"):
        assert many[term] <= few[term] * (1 + 1e-9)
    assert many["all_reduce"] >= few["all_reduce"]


@pytest.mark.parametrize("model", [tiny_model(), tiny_model(num_key_value_heads=1), tiny_model(qk_norm=True)])
def test_weights_and_flops_of_a_card_never_rise_with_cards(model: Any) -> None:
    def amounts(size: int) -> tuple[int, ...]:
        composed_model = OperatorModel(model, GPU, size, _any_heads(measured()), host=NO_HOST)
        sizes = composed_model.describe()["gemm_shapes"].values()
        return tuple(each["n"] * each["k"] for each in sizes)

    one, two, four = amounts(1), amounts(2), amounts(4)
    assert all(a >= b >= c for a, b, c in zip(one, two, four, strict=True))
    assert sum(one) > sum(four)


def _any_heads(tables: KernelTables) -> KernelTables:
    """The same attention for every number of KV heads, for tests of other parts."""

    def spread(rows: Rows) -> Rows:
        like = rows.where(num_heads=8, num_kv_heads=4)
        assert like is not None
        kinds = [(8, 4), (4, 2), (2, 1), (8, 1), (4, 1)]
        columns = {name: np.concatenate([like[name]] * len(kinds)) for name in rows.columns}
        columns["num_heads"] = np.repeat([kind[0] for kind in kinds], len(like))
        columns["num_kv_heads"] = np.repeat([kind[1] for kind in kinds], len(like))
        return Rows(columns, np.concatenate([like.seconds] * len(kinds)))

    return replace(
        tables,
        context_attention={name: spread(rows) for name, rows in tables.context_attention.items()},
        decode_attention={name: spread(rows) for name, rows in tables.decode_attention.items()},
    )


def test_matrix_products_are_those_of_the_model_in_all_layers() -> None:
    wanted = 2 * sum(gemm_s(1024, n, k) for n, k in ((2048, 1024), (1024, 1024), (8192, 1024), (1024, 4096)))
    gemm = composed().terms_s(shapes((0, 0, 1, 1024, 0, 1024 * 1025 // 2, 1)))["gemm"]
    assert gemm == pytest.approx([wanted], rel=0.05)  # (2048, 1024) and (8192, 1024) lie between measured ones


def test_a_batch_is_padded_to_the_next_cuda_graph_and_not_beyond_the_largest() -> None:
    cases = shapes(*((count, 100 * count, 0, 0, 0, 0, count) for count in (33, 40, 41, 600, 601)))
    moved = composed().terms_s(cases)["elementwise"]
    assert moved[0] == moved[1]
    assert moved[1] < moved[2]
    assert moved[3] < moved[4]


def test_terms_add_up_to_the_step() -> None:
    case = shapes((4, 4000, 1, 128, 256, 128 * 256 + 128 * 129 // 2, 5))
    model = composed(2, host=HostOverhead(1e-3, 1e-5, 2e-3))
    terms = model.terms_s(case)
    assert model.step_times_s(case) == pytest.approx(sum(terms.values()))
    assert terms["host"] == pytest.approx([1e-3 + 5e-5 + 2e-3])


def test_a_profile_gives_its_own_times_back() -> None:
    terms = from_profile().terms_s(shapes((64, 64 * 2048, 0, 0, 0, 0, 64), (0, 0, 1, 512, 1024, 655_616, 1)))
    attention = profiled().attention
    assert attention is not None
    decodes = attention.where(chunk=0, num_decodes=64, decode_context=2048)
    chunk = attention.where(chunk=512, prefix=1024, num_decodes=0)
    assert decodes is not None
    assert chunk is not None
    assert terms["decode_attention"][0] == pytest.approx(2 * decodes.seconds[0])
    assert terms["prefill_attention"][1] == pytest.approx(2 * chunk.seconds[0], rel=0.05)
    assert terms["sampler"][0] == pytest.approx(74e-6)


def test_a_profile_of_another_model_or_split_is_refused() -> None:
    with pytest.raises(KernelTableError, match="is a profile of tiny/Tiny-1B on 1 cards, not of other/Big on 1"):
        OperatorModel(tiny_model(name="other/Big"), "RTX-4090", 1, profiled(), host=NO_HOST)
    with pytest.raises(KernelTableError, match="are of RTX-4090, not of H100-SXM"):
        OperatorModel(tiny_model(), "H100", 1, profiled(), host=NO_HOST)


def test_what_the_tables_lack_is_named() -> None:
    with pytest.raises(KernelTableError, match="no all-reduce, which 2 cards need"):
        OperatorModel(tiny_model(), GPU, 2, replace(measured(), all_reduce=None), host=NO_HOST)
    with pytest.raises(KernelTableError, match="no attention of 4 KV heads of 64"):
        OperatorModel(tiny_model(head_dim=64), GPU, 1, measured(), host=NO_HOST)
    with pytest.raises(KernelTableError, match="no attention with a cache of fp8"):
        OperatorModel(tiny_model(), GPU, 1, measured(), host=NO_HOST, kv_cache_dtype="fp8")
    four_bits = WeightFormat("awq", 4, group_size=128, group_overhead_bits=20)
    with pytest.raises(UnsupportedModel, match="weights of awq"):
        OperatorModel(tiny_model(weight_format=four_bits), GPU, 1, measured(), host=NO_HOST)
    experts = {"num_moe_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    with pytest.raises(KernelTableError, match="no experts of bf16 for tiny/Tiny-1B: hidden 1024, width 512, 2 of 8"):
        OperatorModel(tiny_model(**experts), GPU, 1, measured(), host=NO_HOST)


def test_query_heads_between_measured_ones_cost_something_between() -> None:
    case = shapes((0, 0, 1, 8192, 0, 8192 * 8193 // 2, 1))
    eight, twelve = (
        OperatorModel(tiny_model(num_attention_heads=heads), GPU, 1, measured(), host=NO_HOST).terms_s(case)
        for heads in (8, 12)
    )
    spared = {
        kv: rows.take((rows["num_heads"] != 8) | (rows["num_kv_heads"] != 4))
        for kv, rows in measured().context_attention.items()
    }
    between = OperatorModel(tiny_model(), GPU, 1, replace(measured(), context_attention=spared), host=NO_HOST)
    found = between.terms_s(case)["prefill_attention"]
    assert found == pytest.approx(eight["prefill_attention"], rel=0.02)
    assert found < twelve["prefill_attention"]


def test_limits_are_those_of_the_tables() -> None:
    assert composed().domain_limits == (256, 8192, 8192)
    assert from_profile().domain_limits == (64, 2048, 2048)


def test_the_description_says_how_near_the_measured_shapes_are() -> None:
    described = composed(2).describe()
    assert described["gemm_shapes"]["qkv_proj"] == {"n": 1024, "k": 1024, "nearest_measured_ratio": 1.0}
    assert described["gemm_shapes"]["o_proj"]["nearest_measured_ratio"] == 1.0
    assert "custom_allreduce in CUDA graphs" in described["all_reduce"]


def _gemm(seconds: Any) -> GemmTable:
    sizes = [(m, n, 4096) for m in (1, 64, 4096) for n in (512, 4096, 65536)]
    columns = {name: np.array(values) for name, values in zip(("m", "n", "k"), zip(*sizes, strict=True), strict=True)}
    times = np.array([seconds(*size) for size in sizes])
    return GemmTable(Rows(columns, times), bandwidth_bytes_per_s=2e12, flops_per_s=5e14, weight_bytes=2.0)


def test_small_weights_are_not_read_faster_than_large_ones() -> None:
    table = _gemm(lambda m, n, k: gemm_s(m, n, k) * (0.2 if n == 4096 else 1.0))  # as from a cache
    streamed_s = 2 * 4096 * 4096 / table.stream_bytes_per_s if table.stream_bytes_per_s else 0.0
    assert table.curve(4096, 4096).at(1) == pytest.approx(streamed_s)
    assert table.stream_bytes_per_s == pytest.approx(2e12, rel=0.03)


def test_a_weight_between_measured_ones_has_their_efficiency() -> None:
    table = _gemm(lambda m, n, k: 1.25 * np.maximum(2.0 * (n * k + m * (n + k)) / 2e12, 2.0 * m * n * k / 5e14))
    for m in (1, 64, 4096):
        ideal_s = max(2.0 * (10_000 * 4096 + m * 14_096) / 2e12, 2.0 * m * 10_000 * 4096 / 5e14)
        assert table.curve(10_000, 4096).at(m) == pytest.approx(1.25 * ideal_s)


def test_decodes_read_their_cache_from_memory() -> None:
    batch, context = np.array([64] * 4), np.array([1, 128, 4096, 8192])
    kv_bytes = 4096
    read_s = batch * context * kv_bytes / 2e12
    warm = np.where(context == 128, 0.1, 1.0) * read_s + 1e-5
    cold = cold_decodes(Rows({"batch": batch, "context": context}, warm), kv_bytes)
    assert cold.seconds[1] == pytest.approx(1e-5 + read_s[1])
    assert cold.seconds[2:4] == pytest.approx(warm[2:])


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-6, 1e-2)), min_size=1, unique_by=lambda pair: pair[0]))
def test_a_line_never_falls_and_holds_where_nothing_fell(points: list[tuple[int, float]]) -> None:
    sizes, seconds = zip(*points, strict=True)
    line = Line(sizes, seconds)
    assert (np.diff(line.at(np.arange(0, 20_000, 37))) >= 0).all()
    rising = sorted(seconds)
    assert Line(sorted(sizes), rising).at(sorted(sizes)) == pytest.approx(rising)
    assert line.at(0) == 0.0


def test_a_plane_is_exact_where_it_was_measured() -> None:
    batches, contexts = (each.ravel() for each in np.meshgrid([1, 4, 16], [1, 100, 1000]))
    seconds = 1e-6 * (5 + batches * contexts / 50)
    plane = Plane(batches, contexts, seconds)
    assert plane.at(batches, batches * contexts) == pytest.approx(seconds)
    assert plane.at(0, 0) == 0.0


def test_prefill_learns_a_sum_of_its_parts() -> None:
    tokens = np.array([16, 64, 256, 1024, 4096] * 3)
    prefix = np.repeat([0, 512, 4096], 5)
    seconds = 1e-5 + 1e-9 * tokens + 2e-12 * np.maximum(tokens * prefix + tokens * (tokens + 1) / 2, 128 * prefix)
    curve = fit_prefill(np.ones(15), tokens, prefix, seconds)
    pairs = tokens * prefix + tokens * (tokens + 1) // 2
    assert curve.at(np.ones(15), tokens, prefix, pairs) == pytest.approx(seconds, rel=1e-6)
    assert curve.least_rows == 128


def test_a_host_overhead_is_found_again_despite_outliers() -> None:
    rng = np.random.default_rng(3)
    decodes, chunks = rng.integers(1, 64, 200), rng.integers(0, 3, 200)
    cases = shapes(
        *((int(d), int(d) * 100, int(c), int(c) * 256, 0, 0, int(d + c)) for d, c in zip(decodes, chunks, strict=True))
    )
    kernel_s = rng.uniform(5e-3, 2e-2, 200)
    step_s = kernel_s + 1e-3 + 1e-5 * (decodes + chunks) + 2e-3 * (chunks > 0)
    step_s[::20] *= 3
    found = fit_host([Comparison(cases, kernel_s, np.zeros(200), step_s)], "test")
    assert (found.base_s, found.seq_s, found.prefill_s) == pytest.approx((1e-3, 1e-5, 2e-3), rel=0.02)
    with pytest.raises(ValueError, match="at least one comparison"):
        fit_host([], "test")


def test_clocks_under_load_are_found_again_beside_the_host() -> None:
    rng = np.random.default_rng(4)
    decodes, chunks = rng.integers(1, 64, 300), rng.integers(0, 3, 300)
    cases = shapes(
        *((int(d), int(d) * 100, int(c), int(c) * 256, 0, 0, int(d + c)) for d, c in zip(decodes, chunks, strict=True))
    )
    compute_s = np.where(chunks > 0, rng.uniform(1e-3, 8e-2, 300), 0.0)
    true = HostOverhead(1e-3, 0.0, 2e-3, 0.08)
    one = Comparison(cases, compute_s + 8e-3, compute_s, np.ones(300))
    one = one._replace(step_s=one.with_host_s(true))
    many = one._replace(step_s=one.step_s + 0.1 * compute_s)  # such as all-reduces that are too cheap
    prompts = fit_prompt_terms([one])
    assert prompts == pytest.approx((2e-3, 0.08), rel=0.01)
    assert fit_host([one], "test", prompts=prompts).base_s == pytest.approx(1e-3, rel=0.01)
    assert learn_host({1: one, 2: many}, "test").clocks_share == pytest.approx(0.08, rel=0.01)
    assert host_of_others({1: one, 2: one, 4: many}, 4, "test").prefill_s == pytest.approx(2e-3, rel=0.01)
    assert host_of_others({1: one, 2: many}, 1, "test").clocks_share == pytest.approx(0.18, rel=0.01)


def test_clocks_hold_back_arithmetic_and_not_the_reading_of_weights() -> None:
    one_token, prompt = (1, 1000, 0, 0, 0, 0, 1), (0, 0, 1, 4096, 0, 4096 * 4097 // 2, 1)
    plain, slow = (composed(host=HostOverhead(clocks_share=share)) for share in (0.0, 0.1))
    terms = plain.terms_s(shapes(one_token, prompt))
    longer = slow.step_times_s(shapes(one_token, prompt)) - plain.step_times_s(shapes(one_token, prompt))
    assert longer[0] == 0.0
    assert 0.08 * (terms["gemm"] + terms["prefill_attention"])[1] < longer[1]
    assert longer[1] < 0.1 * (terms["gemm"] + terms["prefill_attention"])[1]


def test_the_learned_host_overhead_names_its_source() -> None:
    host = learned_host()
    assert 0 < host.base_s < 5e-3
    assert "B300" in host.source
    with pytest.raises(ValueError, match=r"HostOverhead\.base_s must be at least 0"):
        HostOverhead(base_s=-1.0)
