"""Identity of KV blocks for prefix caching: equal keys stand for equal tokens from the start of the sequence on.

vLLM hashes tokens; a simulation of a million requests need not.  What matters is only which blocks are *equal*, so
a key is a whole number that two blocks share exactly if they and all blocks before them hold the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

STREAM_BITS = 24
"""Blocks of one stream are numbered within 2**24: 268 million tokens at 16 a block."""


class BlockKeys(Protocol):
    """The keys of one request's blocks, output included."""

    @property
    def num_shared_blocks(self) -> int:
        """Blocks from here on are this request's alone: nobody else can look for them."""

    def between(self, first: int, last: int) -> Sequence[int]:
        """Keys of the full blocks first … last - 1."""


class PrivateKeys:
    """Keys of a request that shares nothing."""

    __slots__ = ("_base",)
    num_shared_blocks = 0

    def __init__(self, stream: int) -> None:
        self._base = stream << STREAM_BITS

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(number of the first block behind the piece, key of its block 0 if it had one) in order."""
        return ((1 << STREAM_BITS, self._base),)

    def between(self, first: int, last: int) -> range:
        """Keys of the full blocks first … last - 1."""
        return range(self._base + first, self._base + last)


class StreamKeys:
    """Keys of a request whose tokens follow shared streams for a while and are its own afterwards.

    ``segments`` are pairs (stream, end in tokens) in order, see ``sim.workload``.  A block belongs to the stream
    that holds its last token: a stream fixes everything before it, so that token's place says all.
    """

    __slots__ = ("_pieces", "num_shared_blocks")

    def __init__(self, segments: Sequence[tuple[int, int]], own_stream: int, block_size: int) -> None:
        pieces: list[tuple[int, int]] = []  # (number of the first block behind the piece, base key)
        for stream, end in segments:
            last = end // block_size
            if last > (pieces[-1][0] if pieces else 0):
                pieces.append((last, stream << STREAM_BITS))
        self.num_shared_blocks = pieces[-1][0] if pieces else 0
        pieces.append((1 << STREAM_BITS, own_stream << STREAM_BITS))
        self._pieces = tuple(pieces)

    @classmethod
    def from_pieces(cls, pieces: Sequence[tuple[int, int]]) -> StreamKeys:
        """Those that have these ``pieces``."""
        keys = cls((), 0, 1)
        keys._pieces = tuple(pieces)
        keys.num_shared_blocks = pieces[-2][0] if len(pieces) > 1 else 0
        return keys

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(number of the first block behind the piece, key of its block 0 if it had one) in order."""
        return self._pieces

    def between(self, first: int, last: int) -> Sequence[int]:
        """Keys of the full blocks first … last - 1."""
        keys: list[int] = []
        for behind, base in self._pieces:
            if first < behind:
                if last <= behind:
                    if not keys:
                        return range(base + first, base + last)
                    keys.extend(range(base + first, base + last))
                    break
                keys.extend(range(base + first, base + behind))
                first = behind
        return keys


class ListedKeys:
    """Keys of which the first are known one by one; those behind them belong to this request alone.

    What remains of a request's keys once its tokens are left behind (``sim.engine.snapshot``).
    """

    __slots__ = ("known", "may_look_up", "num_shared_blocks", "own_base")

    def __init__(
        self,
        known: Sequence[int],
        own_base: int,
        num_shared_blocks: int = 1 << STREAM_BITS,
        *,
        may_look_up: bool = True,
    ) -> None:
        """Block ``i`` behind the known ones has the key ``own_base + i``.

        ``may_look_up`` is False for a request that must compute its whole prompt.
        """
        self.known = known
        self.own_base = own_base
        self.num_shared_blocks = num_shared_blocks
        self.may_look_up = may_look_up

    def between(self, first: int, last: int) -> Sequence[int]:
        """Keys of the full blocks first … last - 1."""
        num_known = len(self.known)
        if first >= num_known:
            return range(self.own_base + first, self.own_base + last)
        if last <= num_known:
            return self.known[first:last]
        return [*self.known[first:], *range(self.own_base + num_known, self.own_base + last)]


class TokenKeys:
    """Keys from real token ids: chained, so that a block's key depends on all tokens before it."""

    __slots__ = ("_block_size", "_interned", "_keys", "_salt", "_token")
    num_shared_blocks = 1 << STREAM_BITS

    def __init__(
        self,
        token: Callable[[int], int],
        block_size: int,
        interned: dict[Hashable, int],
        salt: str | None = None,
    ) -> None:
        """``token(i)`` is the request's token at position i; ``interned`` is shared by all requests of an engine."""
        self._token = token
        self._block_size = block_size
        self._interned = interned
        self._salt = salt
        self._keys: list[int] = []

    def between(self, first: int, last: int) -> Sequence[int]:
        """Keys of the full blocks first … last - 1; their tokens must be known."""
        keys, size = self._keys, self._block_size
        while len(keys) < last:
            j = len(keys)
            tokens = tuple(self._token(i) for i in range(j * size, (j + 1) * size))
            chained = (keys[-1], tokens, None) if j else (0, tokens, self._salt)
            keys.append(self._interned.setdefault(chained, len(self._interned) + 1))
        return keys[first:last]
