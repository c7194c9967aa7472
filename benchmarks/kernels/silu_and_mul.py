"""The gate of the MLP: bound by memory."""

from __future__ import annotations

from benchmarks.kernels.common import Bench, Row, run_alone

SHAPES = [(64, 14336), (256, 14336), (2048, 14336), (8192, 14336)]
"""(tokens, inner size)."""
TINY = [(3, 80)]


def bench(bench: Bench) -> list[Row]:
    return [_row(bench, *shape) for shape in bench.pick(SHAPES, TINY)]


def _row(bench: Bench, num_tokens: int, size: int) -> Row:
    num_bytes = 3 * num_tokens * size * bench.dtype.itemsize
    inputs = [bench.normal(num_tokens, 2 * size) for _ in range(bench.num_sets(num_bytes))]
    calls = [lambda x=x: bench.ops.silu_and_mul(x) for x in inputs]
    return Row("silu_and_mul", f"{num_tokens} x {size}", bench.time(calls), num_bytes, 5 * num_tokens * size)


if __name__ == "__main__":
    run_alone(bench, __doc__)
