"""RMSNorm, with and without the residual's sum: bound by memory."""

from __future__ import annotations

import torch

from benchmarks.kernels.common import Bench, Row, run_alone

SHAPES = [(64, 4096), (256, 4096), (2048, 4096), (8192, 4096), (8192, 8192)]
"""(tokens, hidden size)."""
TINY = [(3, 64)]


def bench(bench: Bench) -> list[Row]:
    rows = [_add_row(bench, *shape) for shape in bench.pick(SHAPES, TINY)]
    return rows + [_row(bench, *shape) for shape in bench.pick([(8192, 4096)], TINY)]


def _add_row(bench: Bench, num_tokens: int, size: int) -> Row:
    weight = bench.normal(size)
    num_bytes = 4 * num_tokens * size * bench.dtype.itemsize + weight.nbytes
    calls = []
    for _ in range(bench.num_sets(num_bytes)):
        x, residual = bench.normal(num_tokens, size), bench.normal(num_tokens, size)

        def call(x: torch.Tensor = x, residual: torch.Tensor = residual) -> object:
            return bench.ops.add_rms_norm(x, residual, weight, 1e-5)

        calls.append(call)
    return Row("add_rms_norm", f"{num_tokens} x {size}", bench.time(calls), num_bytes, 5 * num_tokens * size)


def _row(bench: Bench, num_tokens: int, size: int) -> Row:
    weight = bench.normal(size)
    num_bytes = 2 * num_tokens * size * bench.dtype.itemsize + weight.nbytes
    inputs = [bench.normal(num_tokens, size) for _ in range(bench.num_sets(num_bytes))]
    calls = [lambda x=x: bench.ops.rms_norm(x, weight, 1e-5) for x in inputs]
    return Row("rms_norm", f"{num_tokens} x {size}", bench.time(calls), num_bytes, 4 * num_tokens * size)


if __name__ == "__main__":
    run_alone(bench, __doc__)
