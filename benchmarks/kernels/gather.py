"""Rows of a matrix: the embedding of tokens, and the rows whose logits are wanted."""

from __future__ import annotations

import torch

from benchmarks.kernels.common import Bench, Row, run_alone

SHAPES = [(128256, 4096, 256), (128256, 4096, 8192)]
"""(rows of the table, hidden size, rows that are taken)."""
TINY = [(50, 64, 7)]


def bench(bench: Bench) -> list[Row]:
    return [_row(bench, *shape) for shape in bench.pick(SHAPES, TINY)]


def _row(bench: Bench, num_rows: int, size: int, num_taken: int) -> Row:
    table = bench.normal(num_rows, size)
    num_bytes = num_taken * (2 * size * bench.dtype.itemsize + 8)
    taken = [torch.randint(num_rows, (num_taken,), device=bench.place) for _ in range(bench.num_sets(num_bytes))]
    calls = [lambda rows=rows: bench.ops.gather_rows(table, rows) for rows in taken]
    return Row("gather", f"{num_taken} of {num_rows} x {size}", bench.time(calls), num_bytes, 0)


if __name__ == "__main__":
    run_alone(bench, __doc__)
