"""What a local worker process does: calls, one after the other, until its parent is done with it or gone."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from multiprocessing import parent_process
from multiprocessing.connection import Connection

from windtunnel.workers.calls import Outcome, packed, perform
from windtunnel.workers.machine import one_thread_each

READY = b"ready"


def serve(connection: Connection) -> None:
    """Answer each call with its outcome.

    Ctrl-C reaches all processes of a terminal; it is the parent that speaks for all and ends them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    one_thread_each()
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        connection.send_bytes(READY)
        while True:
            connection.send_bytes(packed(_answer(connection.recv_bytes())))
    except (EOFError, OSError):
        return


def _answer(data: bytes) -> Outcome:
    try:
        function, argument, as_text = pickle.loads(data)
    except Exception as error:
        return Outcome(None, error, "", 0.0)
    return perform(function, argument, as_text)


def _follow_parent() -> None:
    parent = parent_process()
    assert parent is not None, "only a child process serves"
    parent.join()
    os._exit(1)
