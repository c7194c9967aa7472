"""Random numbers: named streams of one seed.

Every use of randomness has a stream of its own, so that one more draw in one place shifts nothing in another.
"""

from __future__ import annotations

import hashlib
import operator

import numpy as np

_MASK = (1 << 64) - 1


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The generator that belongs to these names under this seed; the same for ever, on every machine.

    Other names, in another order or of another kind (``1`` and ``"1"``), give an independent stream: the names are
    digested with SHA-256 into the spawn key of a numpy ``SeedSequence``.  Each call starts the stream anew.

    Raises ValueError for a negative seed, TypeError for a name that is neither text nor a whole number.
    """
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=_spawn_key(names))))


def mixed(number: int) -> int:
    """A whole number below 2**64 that looks random: for draws that are functions of a place, such as a step's number.

    Source: the finaliser of splitmix64 (Steele, Lea, Flood 2014).
    """
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def _spawn_key(names: tuple[str | int, ...]) -> tuple[int, ...]:
    digest = hashlib.sha256()
    for name in names:
        tagged = f"s{name}" if isinstance(name, str) else f"i{operator.index(name)}"
        encoded = tagged.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return tuple(int.from_bytes(digest.digest()[i : i + 4], "little") for i in range(0, 32, 4))
