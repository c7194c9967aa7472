"""How far many jobs are, in one line on the terminal that overwrites itself."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from windtunnel.workers.jobs import Done

_EVERY_S = 0.2


class Progress:
    """``done of total, rate, time left`` on stderr; a ``tell`` for ``Workers.map``.

    Nothing is written if ``quiet``, or if stderr is no terminal.  Without a total (a search that does not know how far
    it has to go) it counts.
    """

    def __init__(
        self, total: int | None = None, *, label: str = "", quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self.total = total
        """Jobs in all; may be changed while they run."""
        self.label = label
        self.num_done = 0
        self.num_cached = 0
        self._stream = sys.stderr if stream is None else stream
        self._is_on = not quiet and self._stream.isatty()
        self._began_s = time.monotonic()
        self._shown_s = 0.0
        self._width = 0

    def __call__(self, done: Done) -> None:
        """Count a job."""
        self.num_done += 1
        self.num_cached += done.was_cached
        now_s = time.monotonic()
        if self._is_on and (now_s - self._shown_s >= _EVERY_S or self.num_done == self.total):
            self._shown_s = now_s
            self._show(self.line(now_s - self._began_s))

    def line(self, elapsed_s: float) -> str:
        """What is shown after so many seconds."""
        of = "" if self.total is None else f" of {self.total:,}"
        kept = f" ({self.num_cached:,} from before)" if self.num_cached else ""
        parts = [f"{self.num_done:,}{of}{kept}"]
        rate = (self.num_done - self.num_cached) / elapsed_s if elapsed_s > 0 else 0.0
        if rate > 0:
            parts.append(f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each")
        if rate > 0 and self.total is not None and self.total > self.num_done:
            parts.append(f"{_clock((self.total - self.num_done) / rate)} left")
        return f"{self.label + ': ' if self.label else ''}{', '.join(parts)}"

    def close(self) -> None:
        """Take the line away."""
        if self._is_on and self._width:
            self._show("")
            self._stream.write("\r")
            self._stream.flush()
            self._width = 0

    def _show(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
