"""Are the kernels right on this card: each beside float64, its error measured by torch's own in the same type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu.points import NO_TIME
from benchmarks.kernels.common import step_batch
from windtunnel.executor.batch import StepBatch
from windtunnel.executor.ops import Ops
from windtunnel.executor.reference import TorchOps

ALLOWED = 3.0
"""Times torch's own error."""
FLOOR = 1e-6
"""Error that is allowed in any case, relative to the norm of the result."""
FP8_FLOOR = 2.0**-11
"""The same where the cache is fp8: queries and weights then become float16, whatever their type."""
SAME_DRAWS = 0.98
"""Share of drawn tokens that must be torch's; a draw at the border of two tokens may fall to either."""

Compute = Callable[[Ops, torch.dtype], torch.Tensor]


class Case(NamedTuple):
    """Shapes and types."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{str(self.dtype)[6:]}, kv {str(self.kv_dtype)[6:]}, heads {self.num_query_heads}/{self.num_kv_heads} of "
            f"{self.head_size}, blocks of {self.block_size}, {len(self.query_lens)} sequences"
        )


_MIXED = ((1, 1, 1, 1, 37, 200, 64), (1, 17, 333, 2050, 37, 700, 1000))
_LONG = ((1, 1), (9000, 4097))
_CHUNK = ((5,), (6000,))
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
CASES = [
    Case(BF16, BF16, 32, 8, 128, 16, *_MIXED),
    Case(BF16, BF16, 32, 8, 128, 16, *_LONG),
    Case(BF16, BF16, 32, 8, 128, 16, *_CHUNK),
    Case(BF16, FP8, 32, 8, 128, 16, *_MIXED),
    Case(BF16, FP8, 32, 8, 128, 16, *_LONG),
    Case(FP16, FP16, 14, 2, 64, 32, *_MIXED),
    Case(FP32, FP32, 4, 2, 64, 16, *_MIXED),
]
TINY = [
    Case(FP32, FP32, 4, 2, 32, 16, (1, 6), (20, 9)),
    Case(FP32, FP8, 4, 2, 32, 16, (1, 6), (20, 9)),
]


def check(ops: Ops, place: torch.device, *, tiny: bool, more: Callable[[], bool]) -> list[dict[str, Any]]:
    """Each operation of each case: its error, torch's, and whether it passes.

    ``more`` says if there is time left; a case without is told as skipped.
    """
    found: list[dict[str, Any]] = []
    for case in TINY if tiny else CASES:
        rows = _check_case(case, ops, place) if more() else [{"op": "all", "skipped": NO_TIME}]
        found += [{"case": str(case), **row} for row in rows]
    return [*found, *_check_draws(ops, place, tiny)]


def _check_case(case: Case, ops: Ops, place: torch.device) -> Iterator[dict[str, Any]]:
    draw = np.random.default_rng(1)
    batch, num_blocks = step_batch(case.query_lens, case.context_lens, case.block_size, draw, place)
    inputs = _Inputs(case, batch, num_blocks, place)
    floor = FP8_FLOOR if case.kv_dtype == FP8 else FLOOR
    for name, compute in inputs.operations().items():
        truth = compute(TorchOps(), torch.float64).double()
        own, torchs = (_error(compute(which, case.dtype), truth) for which in (ops, TorchOps()))
        yield {"op": name, "error": own, "torch_error": torchs, "passed": own <= ALLOWED * torchs + floor}


def _error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative to the norm of the truth; anything that is not a number makes it infinite."""
    error = float((out.double() - truth).norm() / truth.norm())
    return error if error == error else float("inf")


class _Inputs:
    """Random inputs of every operation, rounded to the type of the case so that all compute from the same."""

    def __init__(self, case: Case, batch: StepBatch, num_blocks: int, place: torch.device) -> None:
        self._case = case
        self._batch = batch
        self._place = place
        self._generator = torch.Generator(place).manual_seed(2)
        shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_size)
        self._keys, self._values = (self._normal(*shape).to(case.kv_dtype) for _ in range(2))
        self._scales = (0.5, 2.0) if case.kv_dtype == FP8 else (1.0, 1.0)
        self._num_tokens = int(batch.token_ids.shape[0])

    def operations(self) -> dict[str, Compute]:
        """Name -> how to compute it with these operations in that type."""
        hidden = self._case.num_query_heads * self._case.head_size
        x, residual, weight = (
            self._normal(self._num_tokens, hidden),
            self._normal(self._num_tokens, hidden),
            self._normal(hidden),
        )
        gate_up = self._normal(self._num_tokens, 2 * hidden + 96)
        table = self._normal(100, hidden)
        return {
            "rms_norm": lambda ops, t: ops.rms_norm(x.to(t), weight.to(t), 1e-5),
            "add_rms_norm": lambda ops, t: torch.cat(ops.add_rms_norm(x.to(t), residual.to(t), weight.to(t), 1e-5)),
            "silu_and_mul": lambda ops, t: ops.silu_and_mul(gate_up.to(t)),
            "embed": lambda ops, t: ops.embed(self._batch.token_ids, table.to(t)),
            "gather_rows": lambda ops, t: ops.gather_rows(x.to(t), self._batch.sample_rows),
            "rope_and_store": self._rope(),
            "attention": self._attention(),
        }

    def _rope(self) -> Compute:
        case, batch = self._case, self._batch
        q = self._normal(self._num_tokens, case.num_query_heads, case.head_size)
        k, v = (self._normal(self._num_tokens, case.num_kv_heads, case.head_size) for _ in range(2))
        angles = torch.rand(batch.max_context_len, case.head_size // 2, device=self._place, generator=self._generator)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)

        def compute(ops: Ops, dtype: torch.dtype) -> torch.Tensor:
            kv_dtype = dtype if case.kv_dtype != FP8 or dtype == torch.float64 else FP8
            keys, values = (torch.zeros_like(cache, dtype=kv_dtype) for cache in (self._keys, self._values))
            q_, k_, v_ = (tensor.to(dtype, copy=True) for tensor in (q, k, v))
            k_scale, v_scale = self._scales if kv_dtype == FP8 else (1.0, 1.0)
            rotated = ops.rope_and_store(q_, k_, v_, cos_sin, batch, keys, values, k_scale, v_scale)
            stored = (keys.double() * k_scale, values.double() * v_scale)
            return torch.cat([rotated.double().flatten(), *(cache.flatten() for cache in stored)])

        return compute

    def _attention(self) -> Compute:
        case = self._case
        q = self._normal(self._num_tokens, case.num_query_heads, case.head_size)

        def compute(ops: Ops, dtype: torch.dtype) -> torch.Tensor:
            args = (q.to(dtype), self._keys, self._values, self._batch, case.head_size**-0.5, *self._scales)
            return ops.attention(*args)

        return compute

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._place, generator=self._generator).to(self._case.dtype)


def _check_draws(ops: Ops, place: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Tokens from logits beside torch's."""
    generator = torch.Generator(place).manual_seed(3)
    num_rows, vocab = (4, 300) if tiny else (256, 128256)
    logits = 2.5 * torch.randn(num_rows, vocab, device=place, generator=generator)
    uniforms = torch.rand(num_rows, device=place, generator=generator)
    for name, temperature, top_p in (("greedy", 0.0, 1.0), ("temperature", 0.8, 1.0), ("top_p", 0.8, 0.9)):
        heat, least = (torch.full((num_rows,), value, device=place) for value in (temperature, top_p))
        own, torchs = (which.sample(logits, heat, least, uniforms) for which in (ops, TorchOps()))
        same = float((own == torchs).double().mean())
        needed = 1.0 if name == "greedy" else SAME_DRAWS
        yield {"case": f"{num_rows} x {vocab}", "op": f"sample {name}", "same": same, "passed": same >= needed}
