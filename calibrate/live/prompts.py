"""Prompts for a live server: made-up tokens that are equal exactly where the workload says they are.

The tokens of a stream (see ``sim.workload``) are drawn from a generator of their own, seeded by the run's seed and
the stream's number; a request's own tokens likewise.  A workload's later turns repeat earlier answers: what the
server really answered is put into the stream in place of what was made up, as far as it is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from windtunnel.sim import rng
from windtunnel.sim.records import IntArray
from windtunnel.sim.workload import Workload

DEFAULT_TOKEN_IDS = (100, 30_000)
"""From … to (exclusive): within every vocabulary of note; special tokens mostly lie outside."""

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work number night point home water room mother area "
    "money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face level office door health person art war history party result change morning reason research "
    "girl guy moment air teacher force education foot boy age policy music market sense nation plan college interest "
    "death experience effect use class control field development role effort rate heart drug show leader light voice "
    "wife police mind price report decision son view relationship town road arm difference value building action"
)
WORDS = tuple(_TEXT.split())
"""Short common English words: with a space before it each is one token in most vocabularies."""


class Prompts:
    """The prompts of a workload, row by row."""

    def __init__(
        self,
        workload: Workload,
        *,
        seed: int = 0,
        token_ids: tuple[int, int] = DEFAULT_TOKEN_IDS,
        are_warm_up: bool = False,
    ) -> None:
        """Tokens are drawn from ``token_ids`` (from, to exclusive); those of a warm-up are never those of a run.

        Raises ValueError if there are fewer than two of them, or negative ones.
        """
        low, high = token_ids
        if not 0 <= low < high - 1:
            raise ValueError(f"token_ids must be at least two ids from 0 on, got {low} … {high}: raise the upper bound")
        self._workload = workload
        self._seed = seed
        self._kind = "warm-up" if are_warm_up else "run"
        self._low, self._high = low, high
        self._streams: dict[int, IntArray] = {}
        self._written = _written_streams(workload)

    def token_ids(self, row: int) -> list[int]:
        """The prompt of a row, with the answers known so far where it repeats them."""
        num_tokens = int(self._workload.num_prompt_tokens[row])
        parts, start = [], 0
        for stream, end in self._segments(row, num_tokens):
            parts.append(self._tokens(stream, end)[start:end])
            start = end
        own = self._draw(self._workload.num_streams + row, num_tokens - start)
        ids: list[int] = np.concatenate((*parts, own)).tolist()
        return ids

    def text(self, row: int, num_template_tokens: int = 0) -> str:
        """The prompt in words, one a token, fewer by the tokens that a chat template adds; at least one."""
        ids = self.token_ids(row)
        ids = ids[: max(len(ids) - num_template_tokens, 1)]
        return " ".join([WORDS[token_id % len(WORDS)] for token_id in ids])

    def waits_for_answers(self, row: int) -> bool:
        """Whether a part of this prompt may be an earlier answer, so that it is to be made only when it is due."""
        return any(stream in self._written for stream, _ in self._segments(row, None))

    @property
    def needs_answers(self) -> bool:
        """Whether any prompt repeats answers."""
        return bool(self._written)

    def answered(self, row: int, token_ids: Sequence[int]) -> None:
        """The server's answer to a row: later prompts that go on from it hold these tokens."""
        start = int(self._workload.num_prompt_tokens[row])
        given = np.asarray(token_ids, np.int64)
        position = start
        for stream, end in self._segments(row, start + len(given)):
            if end > position:
                tokens = self._tokens(stream, end)
                tokens[position:end] = given[position - start : end - start]
                position = end

    def _segments(self, row: int, num_tokens: int | None) -> Iterator[tuple[int, int]]:
        """The row's shared segments, cut at a number of tokens."""
        content = self._workload.content
        start = 0
        for stream, end in () if content is None else content[row]:
            last = end if num_tokens is None else min(end, num_tokens)
            if last > start:
                yield stream, last
                start = last

    def _tokens(self, stream: int, num_tokens: int) -> IntArray:
        """At least so many tokens of a stream, to be read or written."""
        known = self._streams.get(stream)
        if known is None or len(known) < num_tokens:
            longer = self._draw(stream, max(num_tokens, 2 * len(known) if known is not None else 0))
            if known is not None:
                longer[: len(known)] = known
            self._streams[stream] = known = longer
        return known

    def _draw(self, stream: int, num_tokens: int) -> IntArray:
        """The first tokens of a stream as made up; a longer draw begins with a shorter one."""
        generator = rng.stream(self._seed, "live prompts", self._kind, stream)
        return self._low + np.floor(generator.random(num_tokens) * (self._high - self._low)).astype(np.int64)


def _written_streams(workload: Workload) -> frozenset[int]:
    """Streams that hold an answer: a segment reaches behind the prompt of its row."""
    if workload.content is None:
        return frozenset()
    prompt = workload.num_prompt_tokens.tolist()
    return frozenset(
        stream for row, segments in enumerate(workload.content) for stream, end in segments if end > prompt[row]
    )
