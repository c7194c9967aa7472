"""Attention of chunks of new tokens: bound by matrix products."""

from __future__ import annotations

import torch

from benchmarks.kernels.common import Bench, Row, run_alone

SHAPES = [(1, 1024, 0), (1, 4096, 0), (1, 16384, 0), (4, 1024, 0), (1, 2048, 14336), (16, 128, 2048)]
"""(sequences, new tokens of each, tokens cached ahead of them)."""
TINY = [(2, 20, 0), (1, 9, 30)]


def bench(bench: Bench) -> list[Row]:
    rows = [_row(bench, shape, bench.dtype) for shape in bench.pick(SHAPES, TINY)]
    return rows + [_row(bench, shape, torch.float8_e4m3fn) for shape in bench.pick([(1, 4096, 0)], TINY[:1])]


def _row(bench: Bench, shape: tuple[int, int, int], kv_dtype: torch.dtype) -> Row:
    num_seqs, num_new, cached = shape
    heads, context = bench.heads, num_new + cached
    batch, num_blocks = bench.batch([num_new] * num_seqs, [context] * num_seqs)
    keys, values = bench.kv_cache(num_blocks, kv_dtype), bench.kv_cache(num_blocks, kv_dtype)
    q = bench.normal(num_seqs * num_new, heads.num_query, heads.size)
    pairs = num_seqs * (num_new * cached + num_new * (num_new + 1) // 2)
    kv_bytes = 2 * num_seqs * context * heads.num_kv * heads.size * kv_dtype.itemsize
    return Row(
        "attention_prefill",
        f"{num_seqs} x {num_new} behind {cached}, kv {str(kv_dtype)[6:]}",
        bench.time([lambda: bench.ops.attention(q, keys, values, batch, heads.size**-0.5)]),
        kv_bytes + 2 * q.nbytes,
        4 * pairs * heads.num_query * heads.size,
    )


if __name__ == "__main__":
    run_alone(bench, __doc__)
