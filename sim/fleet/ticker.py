"""Things that are done again and again, such as reading metrics, and that keep no simulation going on their own."""

from __future__ import annotations

from collections.abc import Callable

from windtunnel.sim.world import World


class Ticker:
    """Does things at regular times until the work is over, or until nothing else is left that could happen."""

    def __init__(self, world: World, is_over: Callable[[], bool], patience_ns: int) -> None:
        """``patience_ns`` is how long it goes on while nothing else is going to happen."""
        self._world = world
        self._is_over = is_over
        self._patience_ns = patience_ns
        self._num_pending = 0
        self._alone_since_ns = -1

    def every(self, interval_ns: int, action: Callable[[], None]) -> None:
        """Do it now and from now on every ``interval_ns``."""
        self.later(0, lambda: self._tick(interval_ns, action))

    def later(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do it once, ``delay_ns`` from now; not done any more once the work is over."""
        self._num_pending += 1
        self._world.call_in(delay_ns, self._ring, action)

    def _ring(self, action: Callable[[], None]) -> None:
        self._num_pending -= 1
        if not self._is_over():
            action()

    def _tick(self, interval_ns: int, action: Callable[[], None]) -> None:
        action()
        if not self._is_given_up():
            self.later(interval_ns, lambda: self._tick(interval_ns, action))

    def _is_given_up(self) -> bool:
        """Whether nothing but ticking has been going to happen for too long."""
        now_ns = self._world.now_ns
        if self._world.num_pending > self._num_pending:
            self._alone_since_ns = -1
        elif self._alone_since_ns < 0:
            self._alone_since_ns = now_ns
        return self._alone_since_ns >= 0 and now_ns - self._alone_since_ns > self._patience_ns
