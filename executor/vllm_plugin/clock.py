"""How time passes in a simulated step: on the wall clock, faster than it, or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol

NS_PER_S = 1_000_000_000
_SPIN_S = 0.0003
"""The last part of a wait is spent looking at the clock, because sleeping overshoots by about 0.1 ms."""


class Clock(Protocol):
    """Simulated seconds, and waiting for them."""

    def now_s(self) -> float:
        """Simulated seconds since some fixed moment."""

    def wait_until_s(self, time_s: float) -> None:
        """Return when that time has come."""


class WallClock:
    """The wall clock, or ``speed`` times as fast."""

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        """Simulated seconds since the clock was made."""
        return (time.perf_counter() - self._start_s) * self._speed

    def wait_until_s(self, time_s: float) -> None:
        """Sleep, and look at the clock for the last 0.3 ms of the wall clock."""
        while (left_s := (time_s - self.now_s()) / self._speed) > 0:
            if left_s > _SPIN_S:
                time.sleep(left_s - _SPIN_S)


class VirtualClock:
    """Time that passes only when somebody waits for it: ``with VirtualClock() as clock: ...``

    Inside, ``time.time``, ``time.monotonic``, ``time.perf_counter`` (and their ``_ns`` forms) tell virtual time to the
    thread that entered, and its ``time.sleep`` returns at once after moving that time on.  Other threads keep the
    wall clock.  So vLLM's own metrics, made in one process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), are those of a run
    that took as long as the steps say, though it computed for seconds only.  The time that vLLM itself computes
    counts as zero.

    Raises RuntimeError when entered while another one is in force.
    """

    _current: ClassVar[VirtualClock | None] = None
    _PATCHED = ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns", "sleep")

    def __init__(self) -> None:
        self._elapsed_ns = 0
        self._thread = 0
        self._real: dict[str, Callable[..., Any]] = {}

    @classmethod
    def current(cls) -> VirtualClock | None:
        """The clock in force for the calling thread; None if there is none."""
        clock = cls._current
        return clock if clock is not None and clock._thread == threading.get_ident() else None

    def __enter__(self) -> VirtualClock:
        if VirtualClock._current is not None:
            raise RuntimeError("a VirtualClock is in force already: leave it before entering another")
        self._thread = threading.get_ident()
        self._real = {name: getattr(time, name) for name in self._PATCHED}
        for name in ("time", "monotonic", "perf_counter"):
            start_ns = self._real[f"{name}_ns"]()
            setattr(time, name, self._teller(self._real[name], start_ns, NS_PER_S))
            setattr(time, f"{name}_ns", self._teller(self._real[f"{name}_ns"], start_ns, None))
        setattr(time, "sleep", self._sleep)  # noqa: B010 - its type has another parameter name
        VirtualClock._current = self
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._real.items():
            setattr(time, name, function)
        VirtualClock._current = None

    def now_s(self) -> float:
        """Virtual seconds since the clock was made."""
        return self._elapsed_ns / NS_PER_S

    def wait_until_s(self, time_s: float) -> None:
        """Move on to that time, if it lies ahead."""
        self._elapsed_ns = max(self._elapsed_ns, round(time_s * NS_PER_S))

    def _teller(self, real: Callable[[], Any], start_ns: int, per_s: int | None) -> Callable[[], Any]:
        """Tells the time from ``start_ns`` on, in seconds (``per_s`` given) or nanoseconds."""

        def tell() -> Any:
            if threading.get_ident() != self._thread:
                return real()
            now_ns = start_ns + self._elapsed_ns
            return now_ns / per_s if per_s else now_ns

        return tell

    def _sleep(self, seconds: float) -> None:
        if threading.get_ident() != self._thread:
            self._real["sleep"](seconds)
        else:
            self._elapsed_ns += max(0, round(seconds * NS_PER_S))


class LateResult(Future[Any]):
    """A result that is there from the start, and shown when its time has come."""

    def __init__(self, value: Any, at_s: float, clock: Clock) -> None:
        super().__init__()
        self._at_s = at_s
        self._clock = clock
        self.set_result(value)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for its time (whatever ``timeout`` says) and return it."""
        self._clock.wait_until_s(self._at_s)
        return super().result(timeout)

    def done(self) -> bool:
        """Whether its time has come."""
        return self._clock.now_s() >= self._at_s
