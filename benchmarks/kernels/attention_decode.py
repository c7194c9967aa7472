"""Attention of one new token a sequence: bound by reading the cache."""

from __future__ import annotations

import torch

from benchmarks.kernels.common import Bench, Row, run_alone

SHAPES = [(32, 2048), (64, 2048), (256, 2048), (1, 32768), (2, 32768), (8, 32768), (256, 512), (8, 512)]
"""(sequences, context)."""
TINY = [(2, 40), (1, 70)]


def bench(bench: Bench) -> list[Row]:
    rows = [_row(bench, shape, bench.dtype) for shape in bench.pick(SHAPES, TINY)]
    fp8 = [(64, 2048), (8, 32768)]
    return rows + [_row(bench, shape, torch.float8_e4m3fn) for shape in bench.pick(fp8, TINY[:1])]


def _row(bench: Bench, shape: tuple[int, int], kv_dtype: torch.dtype) -> Row:
    (num_seqs, context), heads = shape, bench.heads
    kv_bytes = 2 * num_seqs * context * heads.num_kv * heads.size * kv_dtype.itemsize
    calls = []
    for _ in range(bench.num_sets(kv_bytes)):
        batch, num_blocks = bench.batch([1] * num_seqs, [context] * num_seqs)
        keys, values = bench.kv_cache(num_blocks, kv_dtype), bench.kv_cache(num_blocks, kv_dtype)
        q = bench.normal(num_seqs, heads.num_query, heads.size)

        def call(batch=batch, keys=keys, values=values, q=q) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return bench.ops.attention(q, keys, values, batch, heads.size**-0.5)

        calls.append(call)
    return Row(
        "attention_decode",
        f"{num_seqs} x {context}, kv {str(kv_dtype)[6:]}",
        bench.time(calls),
        kv_bytes + 2 * q.nbytes,
        4 * num_seqs * context * heads.num_query * heads.size,
    )


if __name__ == "__main__":
    run_alone(bench, __doc__)
