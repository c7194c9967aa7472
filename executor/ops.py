"""The operations of a decoder layer: one set in plain torch (``reference``), one in Triton (``kernels``).

Both have these signatures, so that a model runs on either.  T is tokens, H the hidden size, Hq and Hk query and KV
heads, D the size of a head, N blocks of S tokens, V the vocabulary, R rows.  Activations are float32, float16 or
bfloat16; all sums are taken in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from windtunnel.executor.batch import StepBatch


class Ops(Protocol):
    """What a decoder needs besides matrix products."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension; x is [T, H], or [T, Hq, D] for norms of heads."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum): the sum x + residual is rounded to the type of x before its norm is taken."""

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
        """Rotate q [T, Hq, D] and k [T, Hk, D] by position, store k and v in the caches; returns the rotated q.

        ``cos_sin`` is [positions, D] float32: D/2 cosines, then D/2 sines; element i is rotated with i + D/2, as in
        Hugging Face's Llama.  Caches are [N, S, Hk, D]; an fp8 cache (float8_e4m3fn) stores k / k_scale.  Rows whose
        slot is -1 are not stored.  q may be changed in place.
        """

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
        """Causal attention of each new token over its sequence's paged cache, its own key included: [T, Hq, D].

        Query head h reads KV head h // (Hq / Hk).  The new token j of sequence s, counted from the first of its n,
        sees the first context_lens[s] - n + j + 1 tokens.
        """

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """silu(x[:, :I]) * x[:, I:] for x [T, 2I]."""

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of the table [V, H]: [T, H]."""

    def gather_rows(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """x[rows]: [R, H]."""

    def sample(
        self, logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniforms: torch.Tensor
    ) -> torch.Tensor:
        """[R] int64 token ids from logits [R, V].

        Where temperature [R] is 0: the first of the largest.  Elsewhere: of the tokens in order of their ids, those
        outside the nucleus struck out, the first whose cumulated probability exceeds uniforms [R] x the nucleus' sum.
        The nucleus is every token at least as likely as the last one needed to reach top_p [R].  All float32.
        """
