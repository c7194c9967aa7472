"""A step as a model sees it: the tokens of all requests in one row, and where each request's cache lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from windtunnel.executor.sampling import SamplingParams
from windtunnel.sim.engine.plan import StepPlan
from windtunnel.sim.engine.request import Request

if TYPE_CHECKING:
    import torch


class Grant(NamedTuple):
    """What one request computes in a step."""

    request: Request
    num_tokens: int
    """New tokens, at least 1."""
    num_computed_tokens: int
    """Tokens ahead of them whose keys and values are in the request's blocks."""
    samples: bool
    """Whether the step yields a token for it."""


class EngineView(Protocol):
    """What a real executor may see of the engine that it works for."""

    def grants(self, plan: StepPlan) -> list[Grant]:
        """Who computes what in a step that has been decided and not committed, decodes (one token) first."""

    def token_ids(self, request: Request) -> Sequence[int]:
        """All known tokens of a request: prompt and output."""

    def sampling_params(self, request: Request) -> SamplingParams:
        """How its tokens are chosen."""

    def running(self) -> list[tuple[Request, int]]:
        """Running requests and how many tokens of each are in its blocks."""


class StepBatch(NamedTuple):
    """The inputs of one forward pass over T new tokens of S sequences, built once and used by all layers.

    Sequences with one new token come first (``num_decode_seqs`` of them); the others follow.
    """

    token_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64: each token's place in its sequence."""
    slots: torch.Tensor
    """[T] int64: where its keys and values go, block id x block size + offset.  -1 is a padding row: not stored."""
    query_starts: torch.Tensor
    """[S + 1] int32: sequence s owns the rows query_starts[s] … query_starts[s + 1] - 1."""
    context_lens: torch.Tensor
    """[S] int32: tokens that sequence s attends to, its new ones included."""
    block_tables: torch.Tensor
    """[S, B] int32: ids of each sequence's blocks in order; entries past its context are 0."""
    sample_rows: torch.Tensor
    """[R] int64: the rows whose logits are wanted."""
    num_decode_seqs: int
    max_query_len: int
    """Most new tokens of one sequence."""
    max_context_len: int
    """Largest of ``context_lens``."""
