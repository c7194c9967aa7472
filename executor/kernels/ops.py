"""The operations of a decoder layer in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windtunnel.executor.kernels import attention, gather, rms_norm, rope_store, sample, silu_and_mul

if TYPE_CHECKING:
    import torch

    from windtunnel.executor.batch import StepBatch


class TritonOps:
    """``executor.ops.Ops`` on a GPU; in Triton's interpreter on a CPU.

    Ids, rows, positions and slots out of range are not noticed: whoever builds the batch must see to it.  q is rotated
    in place.  An fp8 cache saturates at ±448 times its scale.
    """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See ``Ops.rms_norm``."""
        return rms_norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Ops.add_rms_norm``."""
        return rms_norm.add_rms_norm(x, residual, weight, eps)

    def rope_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        batch: StepBatch,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        """See ``Ops.rope_and_store``."""
        return rope_store.rope_and_store(
            q, k, v, cos_sin, batch.positions, batch.slots, key_cache, value_cache, k_scale, v_scale
        )

    def attention(
        self,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: StepBatch,
        scale: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        """See ``Ops.attention``."""
        return attention.attention(q, key_cache, value_cache, batch, scale, k_scale, v_scale)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Ops.silu_and_mul``."""
        return silu_and_mul.silu_and_mul(x)

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """See ``Ops.embed``."""
        return gather.gather_rows(table, token_ids)

    def gather_rows(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See ``Ops.gather_rows``."""
        return gather.gather_rows(x, rows)

    def sample(
        self, logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniforms: torch.Tensor
    ) -> torch.Tensor:
        """See ``Ops.sample``."""
        return sample.sample(logits, temperature, top_p, uniforms)
