"""The model's own matrix products, by torch (cuBLAS on a GPU): Llama-3.1-8B's shapes at the sizes of batches."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.kernels.common import Bench, Row, run_alone

WEIGHTS = [
    ("qkv", 4096, 6144),
    ("o", 4096, 4096),
    ("gate_up", 4096, 28672),
    ("down", 14336, 4096),
    ("lm_head", 4096, 128256),
]
"""(name, inputs, outputs)."""
TOKENS = [1, 16, 64, 256, 2048]
TINY = [("qkv", 64, 96)]


def bench(bench: Bench) -> list[Row]:
    return [
        _row(bench, name, num_in, num_out, num_tokens)
        for name, num_in, num_out in bench.pick(WEIGHTS, TINY)
        for num_tokens in bench.pick(TOKENS, [3])
        if name != "lm_head" or num_tokens <= 256
    ]


def _row(bench: Bench, name: str, num_in: int, num_out: int, num_tokens: int) -> Row:
    num_bytes = (num_in * num_out + num_tokens * (num_in + num_out)) * bench.dtype.itemsize
    calls = []
    for _ in range(bench.num_sets(num_bytes)):
        x, weight = bench.normal(num_tokens, num_in), bench.normal(num_out, num_in)

        def call(x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
            return functional.linear(x, weight)

        calls.append(call)
    shape = f"{name}: {num_tokens} x {num_in} -> {num_out}"
    return Row("linear", shape, bench.time(calls), num_bytes, 2 * num_tokens * num_in * num_out)


if __name__ == "__main__":
    run_alone(bench, __doc__)
