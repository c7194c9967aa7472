"""Identity of KV blocks from their tokens, without a table of all prefixes that were ever seen."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from windtunnel.sim.engine.keys import STREAM_BITS

_DIGEST_BYTES = 16
_ROOT = bytes(_DIGEST_BYTES)


class DigestKeys:
    """Keys that are chained digests: a block's key follows from its tokens and the key of the block before it.

    Equal prefixes have equal keys, as with ``TokenKeys``, but nothing is interned, so a server may run for ever.  Two
    different prefixes share a key with a chance of 2**-128 a pair; vLLM takes the same risk (it hashes with SHA-256).
    """

    __slots__ = ("_block_size", "_digests", "_salt", "_token_ids")
    num_shared_blocks = 1 << STREAM_BITS

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: str | None = None) -> None:
        """``token_ids`` grows as tokens come; requests share blocks only if their ``salt`` is the same, too."""
        self._token_ids = token_ids
        self._block_size = block_size
        self._salt = b"" if salt is None else b"salted" + salt.encode()
        self._digests: list[int] = []

    def between(self, first: int, last: int) -> Sequence[int]:
        """Keys of the full blocks first … last - 1; their tokens must be known."""
        digests, size = self._digests, self._block_size
        while len(digests) < last:
            j = len(digests)
            before = digests[-1].to_bytes(_DIGEST_BYTES, "little") if j else _ROOT + self._salt
            digest = blake2b(before, digest_size=_DIGEST_BYTES)
            digest.update(packed(self._token_ids[j * size : (j + 1) * size]))
            digests.append(int.from_bytes(digest.digest(), "little"))
        return digests[first:last]


def packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes that are the same on every machine."""
    return struct.pack(f"<{len(token_ids)}q", *token_ids)
