"""Paged attention in Triton against attention in float64, written here without a cache or tiles."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.executor.batch import StepBatch
from windtunnel.executor.kernels import attention_common, attention_decode, attention_prefill
from windtunnel.executor.kernels.attention import attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = torch.float8_e4m3fn


class Case(NamedTuple):
    """A batch with its cache: what is not part of any context holds NaN."""

    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: StepBatch
    scale: float
    k_scale: float
    v_scale: float

    def run(self) -> torch.Tensor:
        return attention(self.q, self.key_cache, self.value_cache, self.batch, self.scale, self.k_scale, self.v_scale)


def case(
    seqs: list[tuple[int, int]],
    *,
    group: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    seed: int = 0,
) -> Case:
    """Sequences of (new tokens, context length), decodes first; blocks lie anywhere in the cache."""
    gen = torch.Generator().manual_seed(seed)
    blocks_of = [-(-context // block_size) for _, context in seqs]
    num_blocks = sum(blocks_of) + 3
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    ids = torch.randperm(num_blocks, generator=gen)
    tables = torch.zeros((len(seqs), max([*blocks_of, 1])), dtype=torch.int32)
    key_cache = torch.full(shape, math.nan)
    value_cache = torch.full(shape, math.nan)
    taken = 0
    for row, (_, context) in enumerate(seqs):
        own = ids[taken : taken + blocks_of[row]]
        taken += blocks_of[row]
        tables[row, : len(own)] = own.to(torch.int32)
        for cache in (key_cache, value_cache):
            tokens = torch.full((len(own) * block_size, num_kv_heads, head_dim), math.nan)
            tokens[:context] = torch.randn((context, num_kv_heads, head_dim), generator=gen)
            cache[own] = tokens.view(len(own), block_size, num_kv_heads, head_dim)
    lens = [n for n, _ in seqs]
    q = torch.randn((sum(lens), group * num_kv_heads, head_dim), generator=gen).to(dtype)
    starts = torch.tensor([sum(lens[:i]) for i in range(len(lens) + 1)], dtype=torch.int32)
    num_decodes = sum(n == 1 for n in lens)
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    batch = StepBatch(
        token_ids=nothing,
        positions=nothing,
        slots=nothing,
        query_starts=starts.to(DEVICE),
        context_lens=torch.tensor([c for _, c in seqs], dtype=torch.int32, device=DEVICE),
        block_tables=tables.to(DEVICE),
        sample_rows=nothing,
        num_decode_seqs=num_decodes,
        max_query_len=max(lens),
        max_context_len=max(c for _, c in seqs),
    )
    caches = ((x / s).to(cache_dtype or dtype).to(DEVICE) for x, s in ((key_cache, k_scale), (value_cache, v_scale)))
    return Case(q.to(DEVICE), *caches, batch, head_dim**-0.5, k_scale, v_scale)


def expected(case: Case, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Attention sequence by sequence, all steps in ``dtype``."""
    out = torch.zeros(case.q.shape, dtype=dtype)
    group = case.q.shape[1] // case.key_cache.shape[2]
    block_size = case.key_cache.shape[1]
    starts = case.batch.query_starts.tolist()
    for row, context in enumerate(case.batch.context_lens.tolist()):
        if context == 0:
            continue
        own = case.batch.block_tables[row, : -(-context // block_size)].long()
        k, v = (
            (cache[own].cpu().to(torch.float64).flatten(0, 1)[:context] * scale)
            .to(dtype)
            .transpose(0, 1)
            .repeat_interleave(group, 0)  # [Hq, context, D]
            for cache, scale in ((case.key_cache, case.k_scale), (case.value_cache, case.v_scale))
        )
        q = case.q[starts[row] : starts[row + 1]].cpu().to(dtype).transpose(0, 1)
        num_new = q.shape[1]
        seen = torch.arange(context) <= torch.arange(context - num_new, context)[:, None]
        scores = (q @ k.transpose(1, 2) * case.scale).masked_fill(~seen, -math.inf)
        out[starts[row] : starts[row + 1]] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out


def assert_as_exact_as_torch(out: torch.Tensor, case: Case) -> None:
    """The largest error is at most three times that of torch in the type of the queries, plus two roundings."""
    truth = expected(case)
    of_torch = (expected(case, case.q.dtype).double() - truth).abs().max()
    of_kernel = (out.cpu().double() - truth).abs().max()
    assert of_kernel <= 3 * of_torch + 2 * torch.finfo(case.q.dtype).eps * truth.abs().max()


MIXED = [(1, 1), (1, 37), (1, 16), (5, 5), (3, 40), (20, 20), (2, 33)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("group", "head_dim", "block_size"), [(1, 64, 16), (4, 128, 16), (7, 64, 32), (8, 32, 8)])
def test_a_mixed_batch(dtype: torch.dtype, group: int, head_dim: int, block_size: int) -> None:
    mixed = case(MIXED, group=group, head_dim=head_dim, block_size=block_size, dtype=dtype)
    assert_as_exact_as_torch(mixed.run(), mixed)


@pytest.mark.parametrize("head_dim", [8, 80, 96, 256])
def test_head_sizes_that_are_padded_or_large(head_dim: int) -> None:
    odd = case([(1, 20), (4, 30)], head_dim=head_dim, num_kv_heads=1, dtype=torch.float16)
    assert_as_exact_as_torch(odd.run(), odd)


@pytest.mark.parametrize("block_size", [24, 256])
def test_blocks_that_are_no_part_of_a_tile(block_size: int) -> None:
    odd = case([(1, 150), (9, 120)], block_size=block_size, num_kv_heads=1)
    assert_as_exact_as_torch(odd.run(), odd)


def test_decodes_alone() -> None:
    decodes = case([(1, 300), (1, 1), (1, 128), (1, 129)], dtype=torch.bfloat16)
    assert_as_exact_as_torch(decodes.run(), decodes)


def test_long_chunks_alone_pass_over_full_and_masked_tiles() -> None:
    chunks = case([(70, 70), (40, 300)], num_kv_heads=1, dtype=torch.float16)
    assert_as_exact_as_torch(chunks.run(), chunks)


def test_a_chunk_behind_a_prefix_equals_the_whole_prompt() -> None:
    whole = case([(48, 48)], num_kv_heads=1)
    batch = whole.batch._replace(query_starts=torch.tensor([0, 11], dtype=torch.int32, device=DEVICE), max_query_len=11)
    chunk = attention(whole.q[37:], whole.key_cache, whole.value_cache, batch, whole.scale)
    torch.testing.assert_close(chunk, whole.run()[37:], rtol=1e-5, atol=1e-6)


@settings(max_examples=10, derandomize=True)
@given(
    decodes=st.lists(st.integers(1, 70), max_size=3),
    chunks=st.lists(st.tuples(st.integers(2, 24), st.integers(0, 50)), max_size=3),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    block_size=st.sampled_from([8, 16, 32]),
    seed=st.integers(0, 99),
)
def test_ragged_batches(
    decodes: list[int], chunks: list[tuple[int, int]], group: int, block_size: int, seed: int
) -> None:
    seqs = [(1, context) for context in decodes] + [(n, n + prefix) for n, prefix in chunks]
    ragged = case(seqs or [(1, 1)], group=group, num_kv_heads=1, head_dim=32, block_size=block_size, seed=seed)
    assert_as_exact_as_torch(ragged.run(), ragged)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_an_fp8_cache_with_scales(dtype: torch.dtype, group: int) -> None:
    fp8 = case([(1, 45), (1, 16), (6, 30)], group=group, dtype=dtype, cache_dtype=FP8, k_scale=0.02, v_scale=0.03)
    assert_as_exact_as_torch(fp8.run(), fp8)


def test_an_fp8_cache_of_heads_that_are_padded() -> None:
    odd = case([(1, 20), (4, 30)], head_dim=80, num_kv_heads=1, dtype=torch.float16, cache_dtype=FP8)
    assert_as_exact_as_torch(odd.run(), odd)


def test_queries_beside_an_fp8_cache_may_be_too_large_for_float16() -> None:
    large = case([(1, 20), (3, 20)], dtype=torch.bfloat16, cache_dtype=FP8)
    large = large._replace(q=large.q * 2.0**20, scale=large.scale * 2.0**-20)
    assert_as_exact_as_torch(large.run(), large)


def test_every_fp8_value_is_read_exactly() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    finite = every[every.float().isfinite()]
    one_token = case([(1, 1)], group=1, num_kv_heads=1, head_dim=256, cache_dtype=FP8)
    values = one_token.value_cache.float()
    values[one_token.batch.block_tables[0, 0].item(), 0, 0, : len(finite)] = finite.float().to(DEVICE)
    out = one_token._replace(value_cache=values.to(FP8)).run()
    assert out[0, 0, : len(finite)].tolist() == finite.float().tolist()


@pytest.mark.parametrize("splits", [2, 3, 8])
def test_decodes_split_over_programs(splits: int) -> None:
    decodes = case([(1, 1), (1, 300), (1, 129), (1, 64)], group=7, dtype=torch.float16)
    out = torch.empty_like(decodes.q)
    attention_decode.decode(
        out,
        decodes.q,
        decodes.key_cache,
        decodes.value_cache,
        decodes.batch.block_tables,
        decodes.batch.context_lens,
        decodes.batch.max_context_len,
        decodes.scale,
        choice=attention_common.Config(16, 32, 4, 5),
        splits=splits,
    )
    assert_as_exact_as_torch(out, decodes)


@pytest.mark.parametrize("splits", [2, 5])
def test_chunks_split_over_programs(splits: int) -> None:
    chunks = case([(3, 3), (9, 150), (2, 90)], dtype=torch.bfloat16)
    out = torch.empty_like(chunks.q)
    attention_prefill.prefill(
        out,
        chunks.q,
        chunks.key_cache,
        chunks.value_cache,
        chunks.batch.block_tables,
        chunks.batch.context_lens,
        chunks.batch.query_starts,
        chunks.batch.max_query_len,
        chunks.batch.max_context_len,
        chunks.scale,
        choice=attention_common.Config(32, 32, 4, 5),
        splits=splits,
    )
    assert_as_exact_as_torch(out, chunks)


@pytest.mark.parametrize("splits", [1, 4])
def test_padding_rows_become_zero_and_leave_the_others_alone(splits: int) -> None:
    padded = case([(1, 40), (1, 0), (1, 0)], head_dim=32)
    out = torch.full_like(padded.q, math.nan)
    attention_decode.decode(
        out,
        padded.q,
        padded.key_cache,
        padded.value_cache,
        padded.batch.block_tables,
        padded.batch.context_lens,
        4096,
        padded.scale,
        splits=splits,
    )
    assert not out[1:].any()
    assert_as_exact_as_torch(out, padded)


def test_queries_may_be_a_slice_of_a_wider_tensor() -> None:
    plain = case([(1, 20), (4, 20)], head_dim=32)
    num_tokens, num_heads, _ = plain.q.shape
    wide = torch.full((num_tokens, num_heads + 4, 32), math.nan, device=DEVICE)
    wide[:, :num_heads] = plain.q
    torch.testing.assert_close(plain._replace(q=wide[:, :num_heads]).run(), plain.run(), rtol=0, atol=0)


def test_blocks_beyond_two_to_the_31_elements() -> None:
    far = 2**31 // (16 * 64) + 1
    near = case([(1, 16), (3, 16)], group=1, num_kv_heads=1, dtype=torch.float16)
    cache = torch.empty((far + 8, 16, 1, 64), dtype=torch.float16, device=DEVICE)  # pages never touched cost nothing
    num_blocks = len(near.key_cache)
    cache[far : far + num_blocks] = near.key_cache
    moved = near.batch._replace(block_tables=near.batch.block_tables + far)
    both = near._replace(value_cache=near.key_cache)
    out = both._replace(key_cache=cache, value_cache=cache, batch=moved).run()
    torch.testing.assert_close(out, both.run(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c._replace(q=c.q[:, :7]), "must be a multiple"),
        (lambda c: c._replace(q=c.q.half()), "both caches must be torch.float16"),
        (lambda c: c._replace(q=c.q.double()), "q must be float32"),
        (lambda c: c._replace(q=c.q[0]), r"q must be \[tokens, heads, head_dim\]"),
        (lambda c: c._replace(q=c.q.transpose(1, 2).contiguous().transpose(1, 2)), "must be adjacent"),
        (lambda c: c._replace(value_cache=c.value_cache[1:]), "laid out alike"),
        (lambda c: c._replace(key_cache=c.key_cache[:, :4], value_cache=c.value_cache[:, :4]), "at least 8, got 4"),
        (lambda c: c._replace(key_cache=c.key_cache[..., :32]), "the size the same|don't fit"),
        (lambda c: c._replace(scale=0.0), "scale must be positive, got 0.0"),
    ],
)
def test_what_kernels_cannot_take_is_refused(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change(case([(1, 20)])).run()


rows_per_token = st.floats(1 / 128, 4)


@given(st.integers(1, 4096), st.integers(0, 4096), st.integers(1, 200), rows_per_token)
def test_a_context_has_no_more_parts_than_tiles(
    num_programs: int, max_tiles: int, num_sms: int, rows_per_token: float
) -> None:
    splits = attention_common.num_splits(num_programs, max_tiles, num_sms, rows_per_token)
    assert 1 <= splits <= max(max_tiles, 1)


@given(st.integers(2, 33), st.integers(0, 4096), st.integers(1, 200), rows_per_token)
def test_a_gpu_that_is_evenly_filled_is_not_split_further(
    rounds: int, max_tiles: int, num_sms: int, rows_per_token: float
) -> None:
    assert attention_common.num_splits(rounds * num_sms, max_tiles, num_sms, rows_per_token) == 1


@given(st.integers(1, 16), st.integers(1024, 4096))
def test_long_contexts_of_few_sequences_fill_most_of_a_large_gpu(num_programs: int, max_tiles: int) -> None:
    splits = attention_common.num_splits(num_programs, max_tiles, 132, 1 / 16)
    assert num_programs * splits >= 0.6 * 132


def test_kernels_are_compiled_to_the_instructions_that_make_them_fast() -> None:
    reports = aot_reports()
    for name, instruction in (
        ("90 attention_decode bf16 kv bf16 head_dim 128 block 16 rows 16", "mma.sync"),
        ("90 attention_decode bf16 kv fp8 head_dim 128 block 16 rows 16", "mma.sync"),
        ("90 attention_prefill bf16 kv bf16 head_dim 128 block 16 rows 128", "wgmma"),
        ("100 attention_prefill bf16 kv bf16 head_dim 128 block 16 rows 128", "tcgen05"),
    ):
        report = reports[name]
        assert instruction in report["features"]
        assert "128-bit loads" in report["features"]
        assert not report["faults"]
        two_tiles = 2 * 2 * 64 * 128 * 2  # of keys and of values, on their way while a third is worked on
        assert report["shared_bytes"] > two_tiles


def aot_reports() -> dict[str, dict[str, Any]]:
    """What the compiler says of this test's cases, in a process of its own: interpreted kernels are not compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", AOT_SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


AOT_SCRIPT = """
import json
from windtunnel.executor.kernels.aot import compile_case
from windtunnel.executor.kernels.attention import aot_cases

wanted = {
    90: ("attention_decode bf16 kv bf16 head_dim 128 block 16 rows 16",
         "attention_decode bf16 kv fp8 head_dim 128 block 16 rows 16",
         "attention_prefill bf16 kv bf16 head_dim 128 block 16 rows 128"),
    100: ("attention_prefill bf16 kv bf16 head_dim 128 block 16 rows 128",),
}
reports = {}
for sm, names in wanted.items():
    for case in aot_cases(sm):
        if case.name in names:
            report = compile_case(case, sm)
            reports[f"{sm} {case.name}"] = report._asdict() | {"faults": report.faults()}
print(json.dumps(reports))
"""
