"""The process that computes answers: questions come in on its stdin, parts of answers go out on its stdout.

One JSON object a line.  ``{"ticket": 7, "question": {...}}`` asks, ``{"stop": 7}`` says that nobody waits any more;
``{"ticket": 7, "part": ...}`` is a part of the answer, of which "end" or "superseded" is the last.  When stdin ends, so
does the process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TextIO

from windtunnel.ui.answers import Answers, Superseded, Watch
from windtunnel.ui.question import Question

Job = dict[str, Any]


class Inbox:
    """Questions in the order in which they came, and which of them nobody waits for."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        self._stopped: set[int] = set()

    def take(self, line: str) -> None:
        """Note what a line says."""
        told = json.loads(line)
        if "stop" in told:
            self._stopped.add(int(told["stop"]))
        else:
            self.jobs.put(told)

    def is_wanted(self, ticket: int) -> bool:
        """Whether somebody waits for that answer."""
        return ticket not in self._stopped

    def done(self, ticket: int) -> None:
        """Forget a ticket."""
        self._stopped.discard(ticket)


def serve(inbox: Inbox, tell: Callable[[dict[str, Any]], None], limit_s: float) -> None:
    """Answer one question after the other, for ever."""
    answers = Answers()
    while True:
        job = inbox.jobs.get()
        answer(answers, inbox, job, tell, limit_s)


def answer(answers: Answers, inbox: Inbox, job: Job, tell: Callable[[dict[str, Any]], None], limit_s: float) -> None:
    """Tell every part of the answer to one question."""
    ticket = int(job["ticket"])
    watch = Watch(limit_s, lambda: inbox.is_wanted(ticket))
    try:
        watch()
        for part in answers.parts(Question(**job["question"]), watch):
            tell({"ticket": ticket, **part})
        tell({"ticket": ticket, "part": "end", "ms": watch.elapsed_ms})
    except Superseded:
        tell({"ticket": ticket, "part": "superseded"})
    finally:
        inbox.done(ticket)


def main() -> None:
    """Run until stdin ends; whatever else is printed goes to stderr."""
    limit_s = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which then closes stdin
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    inbox = Inbox()
    threading.Thread(target=_read, args=(inbox,), daemon=True).start()
    _warm_up()
    serve(inbox, lambda part: _write(out, part), limit_s)


def _read(inbox: Inbox) -> None:
    for line in sys.stdin:
        inbox.take(line)
    os._exit(0)  # the page's server is gone, and with it whoever might want an answer


def _write(out: TextIO, part: dict[str, Any]) -> None:
    out.write(f"{as_line(part)}\n")
    out.flush()


def as_line(part: dict[str, Any]) -> str:
    """A part as strict JSON in one line: what is no number is null, an infinite rate "inf"."""
    from windtunnel.rundir import to_json

    try:
        return json.dumps(part, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(to_json(part)), separators=(",", ":"))


def _warm_up() -> None:
    """Load what every answer needs, before the first question waits for it."""
    import windtunnel.api
    import windtunnel.memory
    import windtunnel.reports.figures
    import windtunnel.scenarios.resolve  # noqa: F401


if __name__ == "__main__":
    main()
