"""The pool of local processes, each with a pipe of its own, so that it is known what a process died of."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from windtunnel.workers.calls import LOST, MAX_ATTEMPTS, Call, Outcome, unpacked
from windtunnel.workers.errors import WorkerDied
from windtunnel.workers.worker import READY, serve

_MAX_STARTS = 3
START_S = 120.0
"""A process that is not ready by then is given up; on a machine that has time for it a start takes some 0.1 s."""
_LOOK_S = 1.0
"""How often it is looked after processes whose pipe says nothing, although they are dead or do not start."""
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
        """To an idle process, or a new one.  Raises WorkerDied if none can be started."""
        data = pickle.dumps(call.work, pickle.HIGHEST_PROTOCOL)
        idle = self._idle()
        if idle is None:
            idle = _started()
            self._workers.append(idle)
        idle.begin(call, data)

    def _idle(self) -> _Worker | None:
        """A process without work; those that died of idleness (memory ran out) are forgotten."""
        for worker in [worker for worker in self._workers if worker.call is None]:
            if worker.is_alive:
                return worker
            self._forget(worker)
        return None

    def wait(self) -> None:
        """Until a call is delivered, whatever dies and is done again on the way.

        Raises WorkerDied if nothing will ever be.
        """
        while not self._collect(_LOOK_S):
            if all(worker.call is None for worker in self._workers):
                raise WorkerDied(LOST)

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

    def _collect(self, timeout_s: float) -> int:
        """The number of calls that were delivered."""
        busy = {worker.connection: worker for worker in self._workers if worker.call is not None}
        ready = wait(list(busy), timeout_s) if busy else []
        num_delivered = 0
        for connection, worker in busy.items():
            is_dead = connection not in ready and not worker.is_alive
            if connection in ready or (is_dead and connection.poll()):  # it may have answered and died since
                num_delivered += self._hear(worker)
            elif is_dead or worker.is_late:
                num_delivered += self._bury(worker)
        return num_delivered

    def _hear(self, worker: _Worker) -> int:
        """The number of calls that what a process says delivers: one or none."""
        try:
            data = worker.connection.recv_bytes()
        except (EOFError, OSError):
            return self._bury(worker)
        if data == READY:
            self._num_failed_starts = 0
            worker.ready()
            return 0
        call, worker.call = worker.call, None
        assert call is not None, "only a busy process answers"
        call.deliver(unpacked(data))
        return 1

    def _forget(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join(_END_S)
        worker.connection.close()
        self._workers.remove(worker)

    def _bury(self, worker: _Worker) -> int:
        """Give the call of a dead process to a new one, unless it is at fault."""
        was_late = worker.is_late and worker.is_alive
        if not was_late:
            worker.process.join(_END_S)  # its pipe may be closed a moment before it ends
        self._forget(worker)
        call = worker.call
        assert call is not None, "only busy processes are watched"
        how = f"not ready after {START_S:g} s" if was_late else _death(worker.process.exitcode)
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
            try:
                self.submit(call)
            except WorkerDied as none_starts:
                error = none_starts
            else:
                return 0
        call.deliver(Outcome(None, error, "", 0.0))
        return 1


class _Worker:
    """One process and the call that it is busy with.  Raises OSError if it cannot be started."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # forking a process that has threads is unsafe
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve, args=(theirs,), daemon=True)
        self.call: Call | None = None
        self.is_ready = False
        self._data: bytes | None = None
        self._started_s = time.monotonic()
        try:
            with _without_ctrl_c(), _without_main():
                self.process.start()
        finally:
            theirs.close()

    @property
    def is_alive(self) -> bool:
        """Whether it runs, whoever else holds its end of the pipe."""
        return self.process.exitcode is None

    @property
    def is_late(self) -> bool:
        """Whether it should have been ready long ago."""
        return not self.is_ready and time.monotonic() - self._started_s > START_S

    def begin(self, call: Call, data: bytes) -> None:
        """Nothing is sent before it listens: a pipe that nobody reads takes only so much, and then blocks."""
        self.call, self._data = call, data
        if self.is_ready:
            self._send()

    def ready(self) -> None:
        """It listens."""
        self.is_ready = True
        self._send()

    def _send(self) -> None:
        data, self._data = self._data, None
        assert data is not None, "a process is told of a call once"
        with suppress(OSError):  # it is dead: found out when its answer is awaited
            self.connection.send_bytes(data)


def _started() -> _Worker:
    _take_standard_streams()
    try:
        return _Worker()
    except OSError as error:
        raise WorkerDied(f"no process can be started ({error}): do with fewer (--jobs 1)") from error


def _take_standard_streams() -> None:
    """Where standard streams are closed, a pipe to a process would be one of them, and whatever is printed be in it."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


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
    """The main module is not run again in a new process, nor told its arguments: calls name what they need.

    So scripts need no ``if __name__ == "__main__"``, a worker does not pay for what a script imports, and arguments
    longer than a pipe holds cannot block the start of a process that died at once.
    """
    main: dict[str, Any] = vars(sys.modules["__main__"])
    hidden: dict[str, Any] = {name: main[name] for name in ("__spec__", "__file__") if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = arguments
        main.update(hidden)
        if "__spec__" not in hidden:
            del main["__spec__"]


def in_worker() -> bool:
    """Whether this process is itself a worker, which must not have workers of its own."""
    return bool(multiprocessing.current_process().daemon)
