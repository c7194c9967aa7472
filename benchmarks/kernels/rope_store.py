"""Rotation of queries and keys, and storing keys and values in the paged cache: bound by memory."""

from __future__ import annotations

import torch

from benchmarks.kernels.common import Bench, Row, run_alone

SHAPES = [64, 256, 2048, 8192]
"""Tokens."""
TINY = [5]


def bench(bench: Bench) -> list[Row]:
    rows = [_row(bench, num_tokens, bench.dtype) for num_tokens in bench.pick(SHAPES, TINY)]
    return rows + [_row(bench, num_tokens, torch.float8_e4m3fn) for num_tokens in bench.pick(SHAPES[-1:], TINY)]


def _row(bench: Bench, num_tokens: int, kv_dtype: torch.dtype) -> Row:
    heads = bench.heads
    batch, num_blocks = bench.batch([num_tokens], [num_tokens])
    angles = torch.rand(num_tokens, heads.size // 2, device=bench.place)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    q_width, kv_width = heads.num_query * heads.size, heads.num_kv * heads.size
    read = num_tokens * (q_width + 2 * kv_width) * bench.dtype.itemsize + cos_sin.nbytes
    written = num_tokens * (q_width * bench.dtype.itemsize + 2 * kv_width * kv_dtype.itemsize)
    calls = []
    for _ in range(bench.num_sets(read + written)):
        fused = bench.normal(num_tokens, q_width + 2 * kv_width)
        q, k, v = fused.split([q_width, kv_width, kv_width], dim=1)
        keys, values = bench.kv_cache(num_blocks, kv_dtype), bench.kv_cache(num_blocks, kv_dtype)

        def call(q=q, k=k, v=v, keys=keys, values=values) -> torch.Tensor:  # type: ignore[no-untyped-def]
            q, k, v = (x.unflatten(1, (-1, heads.size)) for x in (q, k, v))
            return bench.ops.rope_and_store(q, k, v, cos_sin, batch, keys, values)

        calls.append(call)
    num_flops = 3 * num_tokens * (q_width + kv_width)
    shape = f"{num_tokens}, kv {str(kv_dtype)[6:]}"
    return Row("rope_store", shape, bench.time(calls), read + written, num_flops)


if __name__ == "__main__":
    run_alone(bench, __doc__)
