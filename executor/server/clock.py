"""The engine's clock: wall time, or that times ``speed`` while steps are only simulated."""

from __future__ import annotations

import time
from typing import NamedTuple

MAX_SPEED = 1e6
"""A step of a millisecond then takes a nanosecond: no host is that fast, and what is beyond is no number to pace by."""
_LONGEST_SLEEP_S = 0.1


class _Base(NamedTuple):
    wall_ns: int
    engine_ns: int
    speed: float


class PacedClock:
    """Whole nanoseconds from 0 on; reading it is safe from any thread, setting it is the engine loop's alone."""

    def __init__(self, speed: float = 1.0) -> None:
        """Raises ValueError for a speed that is not above 0 or beyond ``MAX_SPEED``."""
        _check(speed)
        self._base = _Base(time.monotonic_ns(), 0, speed)
        self.num_slipped_ns = 0
        """Engine time by which the clock was put back because the host could not keep pace."""

    @property
    def speed(self) -> float:
        """Engine time that passes in one unit of wall time."""
        return self._base.speed

    def now_ns(self) -> int:
        """Engine time."""
        wall_ns, engine_ns, speed = self._base
        return engine_ns + int((time.monotonic_ns() - wall_ns) * speed)

    def set_speed(self, speed: float) -> None:
        """Go on at another speed from now on.  Raises ValueError as the constructor does."""
        _check(speed)
        self._base = _Base(time.monotonic_ns(), self.now_ns(), speed)

    def slip_to(self, now_ns: int) -> None:
        """Say that it is ``now_ns`` only: time that the host could not keep pace with is taken out."""
        self.num_slipped_ns += max(0, self.now_ns() - now_ns)
        self._base = _Base(time.monotonic_ns(), now_ns, self._base.speed)

    def sleep_towards(self, due_ns: int) -> float:
        """Sleep until ``due_ns``, or a part of the way; returns the wall seconds that are left (negative: late)."""
        left_s = self._left_s(due_ns)
        if left_s <= 0:
            return left_s
        time.sleep(min(left_s, _LONGEST_SLEEP_S))
        return self._left_s(due_ns)

    def _left_s(self, due_ns: int) -> float:
        return (due_ns - self.now_ns()) / self._base.speed / 1e9


def _check(speed: float) -> None:
    if not 0 < speed <= MAX_SPEED:
        raise ValueError(f"speed must be above 0 and at most {MAX_SPEED:g}, got {speed}")
