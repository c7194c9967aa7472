"""The pool of a Ray cluster: one that is there, or a local one of a given size."""

from __future__ import annotations

import os
import pickle
import re
import socket
from contextlib import suppress
from typing import Any

from windtunnel.workers.calls import LOST, MAX_ATTEMPTS, Call, Outcome, packed, perform, unpacked
from windtunnel.workers.errors import BadRayAddress, RayMissing, RayUnreachable, WorkerDied
from windtunnel.workers.jobs import content_version

_LOCAL = re.compile(r"local(?::([1-9]\d*))?")
_REMOTE = re.compile(r"(?!local:)(?:ray://)?\[?([^\[\]/]+)\]?:(\d{1,5})")
_ANSWER_S = 5.0
_PER_CPU = 2
"""Calls handed to Ray for each CPU, so that none waits for its next one."""


class RayCluster:
    """See ``Pool``.  ``address`` is as ``Workers`` takes it; ``jobs`` limits how many calls Ray has at once."""

    def __init__(self, address: str, jobs: int | None) -> None:
        check_address(address)
        self._ray = _ray()
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            _keep_off_stdout(self._ray)
            _connect(self._ray, address, jobs)
        cpus = int(self._ray.cluster_resources().get("CPU", 1)) or 1
        self.num_workers = cpus if jobs is None else min(jobs, cpus)
        self._most = self.num_workers * _PER_CPU if jobs is None or jobs >= cpus else jobs
        self._do = self._ray.remote(num_cpus=1, max_retries=0)(perform_remotely)
        self._calls: dict[Any, Call] = {}

    @property
    def has_room(self) -> bool:
        """Whether fewer calls are under way than keep all CPUs busy."""
        return len(self._calls) < self._most

    def submit(self, call: Call) -> None:
        """To whichever node Ray chooses."""
        reference = self._do.remote(pickle.dumps(call.work, pickle.HIGHEST_PROTOCOL), content_version())
        self._calls[reference] = call

    def wait(self) -> None:
        """Until a call is delivered, whatever dies and is done again on the way.

        Raises WorkerDied if nothing will ever be.
        """
        while not self._collect(None):
            if not self._calls:
                raise WorkerDied(LOST)

    def poll(self) -> None:
        """Deliver what Ray has ready."""
        self._collect(0)

    def close(self) -> None:
        """Drop what is under way; a cluster that was started or joined here is left."""
        for reference in self._calls:
            with suppress(Exception):
                self._ray.cancel(reference, force=True)
        self._calls.clear()
        if self._is_ours:
            self._ray.shutdown()

    def _collect(self, timeout_s: float | None) -> int:
        """The number of calls that were delivered."""
        if not self._calls:
            return 0
        ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        num_delivered = 0
        for reference in ready:
            call = self._calls.pop(reference)
            outcome = self._outcome(reference, call)
            if outcome is None and call.is_wanted:
                self.submit(call)
                continue
            num_delivered += 1
            if outcome is not None:
                call.deliver(outcome)
        return num_delivered

    def _outcome(self, reference: Any, call: Call) -> Outcome | None:
        """None if the worker died and the call is to be done again."""
        try:
            outcome = unpacked(self._ray.get(reference))
        except self._ray.exceptions.RayTaskError as error:
            return Outcome(None, RayUnreachable(f"a node of the cluster cannot do the work: {error.cause}"), "", 0.0)
        except self._ray.exceptions.RayError as error:
            call.num_attempts += 1
            if call.num_attempts < MAX_ATTEMPTS:
                return None
            first = str(error).splitlines()[0]
            told = f"{MAX_ATTEMPTS} Ray workers died one after the other of {call}: {first}"
            return Outcome(None, WorkerDied(told), "", 0.0)
        return outcome


def check_address(address: str) -> None:
    """Raise BadRayAddress for what ``Workers`` would not take as ``ray``."""
    if address != "auto" and not _LOCAL.fullmatch(address) and not _REMOTE.fullmatch(address):
        raise BadRayAddress(
            f"ray is {address!r}, but must be auto (the cluster of this machine), HOST:PORT, ray://HOST:PORT, or "
            "local:N for one of N CPUs that starts here"
        )


def perform_remotely(data: bytes, version: str) -> bytes:
    """On a node: do a call, if the node has the same windtunnel."""
    if content_version() != version:
        raise RuntimeError(
            "its windtunnel has other code or data, or its numpy, scipy or Python is another, than on this machine: "
            "install the same on all nodes"
        )
    return packed(perform(*pickle.loads(data)))


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody asked for reports to others
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise RayMissing(
            f"Ray is not installed ({error}): pip install 'windtunnel[ray]', or leave --ray out to use this machine"
        ) from None
    return ray


def _keep_off_stdout(ray: Any) -> None:
    """Ray tells of dead workers on stdout, where results belong, and has no switch for it: let it be stderr."""
    module = getattr(getattr(ray, "_private", None), "worker", None)
    tell = getattr(module, "print_to_stdstream", None)
    if module is None or tell is None:
        return

    def tell_on_stderr(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        tell({**data, "is_err": True}, *args, **kwargs)

    module.print_to_stdstream = tell_on_stderr


def _connect(ray: Any, address: str, jobs: int | None) -> None:
    local = _LOCAL.fullmatch(address)
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if local is not None:
        ray.init(address="local", num_cpus=int(local[1]) if local[1] else jobs, include_dashboard=False, **quiet)
        return
    try:
        _knock(address)
        ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise RayUnreachable(
            f"no Ray cluster answers at {address!r} ({first}): start one (ray start --head), give its address, or "
            "--ray local:N for one on this machine"
        ) from None


def _knock(address: str) -> None:
    """Raise OSError if nobody listens there: Ray itself would try for many minutes."""
    place = _REMOTE.fullmatch(address)
    if place is not None:
        socket.create_connection((place[1], int(place[2])), _ANSWER_S).close()
