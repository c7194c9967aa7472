"""Tokens for answers that are only simulated."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from windtunnel.executor.keys import packed


class Filler:
    """Makes up tokens: each is a function of the seed and of all tokens before it.

    So equal prompts get equal answers, as under greedy decoding, and share their KV blocks.
    """

    def __init__(self, choices: Sequence[int], seed: int = 0) -> None:
        """Tokens are drawn from ``choices``; leave the ones that end an answer out of them.

        Raises ValueError if there are none.
        """
        if not choices:
            raise ValueError("no tokens to choose from: give the filler at least one token id")
        self._choices = tuple(choices)
        self._seed = packed([seed])

    def begin(self) -> Continuation:
        """For one sequence that will be continued token by token."""
        return Continuation(self._choices, self._seed)


class Continuation:
    """How one sequence goes on; it remembers a digest of the tokens that it has seen."""

    __slots__ = ("_choices", "_digest", "_num_seen")

    def __init__(self, choices: tuple[int, ...], seed: bytes) -> None:
        self._choices = choices
        self._digest = blake2b(seed, digest_size=8)
        self._num_seen = 0

    def next_token(self, token_ids: Sequence[int]) -> int:
        """The token after ``token_ids``, which begin with those of the last call."""
        self._digest.update(packed(token_ids[self._num_seen :]))
        self._num_seen = len(token_ids)
        return self._choices[int.from_bytes(self._digest.digest(), "little") % len(self._choices)]
