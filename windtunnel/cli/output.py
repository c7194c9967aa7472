"""Results go to stdout, everything else to stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

_REDRAW_EVERY_S = 0.1


def emit(text: str) -> None:
    """Print a result.  A reader that has left (``| head``) is no error: the command goes on and keeps its exit code."""
    try:
        print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()


def silence_stdout() -> None:
    """Send what is still printed, and Python's own flush at exit, nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    print(f"warning: {text}", file=sys.stderr)


def note(text: str) -> None:
    """Print a remark on stderr."""
    print(text, file=sys.stderr)


class ProgressBar:
    """``simulating  [#####.....]  52 %  10,400 of 20,000 requests, 3 s left`` on stderr, redrawn in place."""

    def __init__(self, title: str, width: int = 24) -> None:
        self.title = title
        self.width = width
        self.started_s = time.monotonic()
        self.drawn_s = 0.0
        self.length = 0

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` requests are through."""
        now_s = time.monotonic()
        if now_s - self.drawn_s < _REDRAW_EVERY_S:
            return
        self.drawn_s = now_s
        self._draw(progress_line(self.title, done, total, now_s - self.started_s, self.width))

    def close(self) -> None:
        """Wipe the bar off the terminal."""
        if self.length:
            self._draw("")
            sys.stderr.write("\r")
            sys.stderr.flush()

    def _draw(self, line: str) -> None:
        sys.stderr.write("\r" + line.ljust(self.length))
        sys.stderr.flush()
        self.length = len(line)


def progress_line(title: str, done: int, total: int, elapsed_s: float, width: int = 24) -> str:
    """One state of the bar as text; the time left assumes that the rest goes as fast as what is done."""
    share = min(done / total, 1.0) if total else 1.0
    bar = ("#" * round(share * width)).ljust(width, ".")
    left = f", {_human_s(elapsed_s / done * (total - done))} left" if done else ""
    return f"{title}  [{bar}] {share:4.0%}  {done:,} of {total:,} requests{left}"


def _human_s(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def progress_bar(title: str, quiet: bool) -> tuple[Callable[[int, int], None] | None, Callable[[], None]]:
    """A progress callback and what closes it; no callback where nobody is watching."""
    if quiet or not sys.stderr.isatty():
        return None, lambda: None
    bar = ProgressBar(title)
    return bar, bar.close
