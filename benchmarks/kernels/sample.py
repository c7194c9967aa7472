"""Choosing tokens from logits: bound by memory; drawing reads each row again and again, from the cache."""

from __future__ import annotations

import torch

from benchmarks.kernels.common import Bench, Row, run_alone

SHAPES = [(64, 128256), (256, 128256)]
"""(rows, vocabulary)."""
TINY = [(3, 300)]


def bench(bench: Bench) -> list[Row]:
    kinds = [("greedy", 0.0, 1.0), ("temperature 0.7", 0.7, 1.0), ("top_p 0.9", 0.7, 0.9)]
    return [_row(bench, shape, *kind) for shape in bench.pick(SHAPES, TINY) for kind in kinds]


def _row(bench: Bench, shape: tuple[int, int], what: str, temperature: float, top_p: float) -> Row:
    num_rows, vocab = shape
    temperatures, top_ps = (torch.full((num_rows,), value, device=bench.place) for value in (temperature, top_p))
    uniforms = torch.rand(num_rows, device=bench.place)
    num_bytes = num_rows * vocab * 4
    inputs = [2 * bench.normal(num_rows, vocab, dtype=torch.float32) for _ in range(bench.num_sets(num_bytes))]
    calls = [lambda x=x: bench.ops.sample(x, temperatures, top_ps, uniforms) for x in inputs]
    return Row("sample", f"{num_rows} x {vocab}, {what}", bench.time(calls), num_bytes, num_rows * vocab)


if __name__ == "__main__":
    run_alone(bench, __doc__)
