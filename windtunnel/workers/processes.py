"""The pool of local processes, each with a pipe of its own, so that it is known what a process died of."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from windtunnel.workers.calls import MAX_ATTEMPTS, Call, Outcome
from windtunnel.workers.errors import WorkerDied
from windtunnel.workers.worker import READY, serve

_MAX_STARTS = 3
_END_S = 5.0


class LocalProcesses:
    """See ``Pool``.  Processes start when there is work for them and stay until ``close``."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._workers: list[_Worker] = []
        self._num_failed_starts = 0

    @property
    def is_running(self) -> bool:
        """Whether any process was started."""
        return bool(self._workers)

    @property
    def has_room(self) -> bool:
        """Whether a process is idle or can be started."""
        return len(self._workers) < self._num_workers or any(worker.call is None for worker in self._workers)

    def submit(self, call: Call) -> None:
        """To an idle process, or a new one."""
        data = pickle.dumps(call.work, pickle.HIGHEST_PROTOCOL)
        idle = next((worker for worker in self._workers if worker.call is None), None)
        if idle is None:
            idle = _Worker()
            self._workers.append(idle)
        idle.begin(call, data)

    def wait(self) -> None:
        """Until a call is delivered, whatever dies and is done again on the way."""
        while not self._collect(None):
            pass

    def poll(self) -> None:
        """What was finished, and what a death in between gave back is begun again."""
        self._collect(0)

    def close(self) -> None:
        """End all processes, in the middle of whatever they do."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(_END_S)
            worker.connection.close()
        self._workers.clear()

    def _collect(self, timeout_s: float | None) -> int:
        """The number of calls that were delivered."""
        busy = {worker.connection: worker for worker in self._workers if worker.call is not None}
        ready = wait(list(busy), timeout_s)
        num_delivered = 0
        for worker in [worker for connection, worker in busy.items() if connection in ready]:
            try:
                data = worker.connection.recv_bytes()
            except (EOFError, OSError):
                num_delivered += self._bury(worker)
                continue
            if data == READY:
                worker.is_ready, self._num_failed_starts = True, 0
                continue
            call, worker.call = worker.call, None
            assert call is not None, "only a busy process answers"
            num_delivered += 1
            call.deliver(pickle.loads(data))
        return num_delivered

    def _bury(self, worker: _Worker) -> int:
        """Give the call of a dead process to a new one, unless it is at fault."""
        worker.process.join(_END_S)
        worker.connection.close()
        self._workers.remove(worker)
        call = worker.call
        assert call is not None, "only busy processes are watched"
        how = _death(worker.process.exitcode)
        if worker.is_ready:
            call.num_attempts += 1
        else:
            self._num_failed_starts += 1
        if not call.is_wanted:
            return 1
        if call.num_attempts >= MAX_ATTEMPTS:
            remedy = "memory may have run out: share the work among fewer processes (--jobs 1), or make it smaller"
            error = WorkerDied(f"{MAX_ATTEMPTS} processes died one after the other ({how}) of {call}; {remedy}")
        elif self._num_failed_starts >= _MAX_STARTS:
            error = WorkerDied(f"{_MAX_STARTS} processes ended while they started ({how}): do without (--jobs 1)")
        else:
            self.submit(call)
            return 0
        call.deliver(Outcome(None, error, "", 0.0))
        return 1


class _Worker:
    """One process and the call that it is busy with."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # forking a process that has threads is unsafe
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve, args=(theirs,), daemon=True)
        self.call: Call | None = None
        self.is_ready = False
        with _without_ctrl_c(), _without_main():
            self.process.start()
        theirs.close()

    def begin(self, call: Call, data: bytes) -> None:
        self.call = call
        with suppress(OSError):  # it is dead: found out when its answer is awaited
            self.connection.send_bytes(data)


def _death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            return f"signal {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """What is started within never sees SIGINT, not even before it can say so itself; here it comes a bit later."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_main() -> Iterator[None]:
    """The main module is not run again in a new process: calls name what they need.

    So scripts need no ``if __name__ == "__main__"``, and a worker does not pay for what a script imports.
    """
    main: dict[str, Any] = vars(sys.modules["__main__"])
    hidden: dict[str, Any] = {name: main[name] for name in ("__spec__", "__file__") if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(hidden)
        if "__spec__" not in hidden:
            del main["__spec__"]


def in_worker() -> bool:
    """Whether this process is itself a worker, which must not have workers of its own."""
    return bool(multiprocessing.current_process().daemon)
