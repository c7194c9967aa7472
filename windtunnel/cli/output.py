"""Results go to stdout, everything else to stderr."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

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


class StatusLine:
    """One line on stderr that is redrawn in place, at most every so many seconds."""

    def __init__(self, every_s: float = _REDRAW_EVERY_S) -> None:
        self.every_s = every_s
        self.drawn_s = -math.inf
        self.length = 0

    def show(self, words: Callable[..., str], *state: Any) -> None:
        """Show what ``words`` say of the state, unless the line is too young."""
        now_s = time.monotonic()
        if now_s - self.drawn_s >= self.every_s:
            self.drawn_s = now_s
            self._draw(words(*state))

    def close(self) -> None:
        """Wipe it off the terminal."""
        if self.length:
            self._draw("")
            sys.stderr.write("\r")
            sys.stderr.flush()

    def _draw(self, line: str) -> None:
        import shutil

        line = line[: max(shutil.get_terminal_size().columns - 1, 1)]  # one that wraps is not wiped off by \r
        sys.stderr.write("\r" + line.ljust(self.length))
        sys.stderr.flush()
        self.length = len(line)


def status_line(
    words: Callable[..., str], *, quiet: bool, every_s: float = _REDRAW_EVERY_S
) -> tuple[Callable[..., None] | None, Callable[[], None]]:
    """What shows ``words`` of whatever it is called with (None where nobody is watching), and what wipes them off."""
    if quiet or not sys.stderr.isatty():
        return None, lambda: None
    line = StatusLine(every_s)
    return partial(line.show, words), line.close


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
    """``simulating  [#####.....]  52 %  10,400 of 20,000 requests, 3 s left``: a progress callback, and what closes it.

    There is no callback where nobody is watching.
    """
    started_s = time.monotonic()
    return status_line(lambda done, total: progress_line(title, done, total, time.monotonic() - started_s), quiet=quiet)
