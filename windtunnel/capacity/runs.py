"""Replications of one deployment at any load, here or shared among workers."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import NamedTuple

from windtunnel.capacity.evaluate import Evaluation, Evaluator
from windtunnel.capacity.sampling import Source
from windtunnel.sim.rng import stream
from windtunnel.sim.workload import Workload
from windtunnel.workers import Workers


def seed_of(seed: int, replication: int) -> int:
    """The seed of one replication: the same at every load, so that loads are compared on the same requests."""
    return int(stream(seed, "capacity", "replication", replication).integers(2**62))


class Simulations:
    """Asks an evaluator for replications; replication k has the same random numbers at every load.

    With ``workers`` the simulations of a request for several are shared among them; the answers are the same.
    """

    def __init__(self, evaluator: Evaluator, source: Source, seed: int, workers: Workers | None = None) -> None:
        self.evaluator = evaluator
        self.source = source
        self.seed = seed
        self.num_run = 0
        """Simulations so far."""
        self.num_simulated = 0
        """Requests in them."""
        self.saturation_rate: float | None = None
        """Requests per second at saturation, where it is known: helps to tell overload in short runs."""
        self._workers = workers
        self._packed: tuple[str, bytes] | None = None

    def draw(self, load: float, replication: int, num_requests: int) -> Workload:
        """The requests of one replication."""
        return self.source.draw(load, seed_of(self.seed, replication), num_requests)

    def run(self, load: float, replications: Sequence[int], num_requests: int) -> list[Evaluation]:
        """Evaluations of these replications at a load, in order."""
        asked = [
            Asked(*self._deployment, load, seed_of(self.seed, each), num_requests, self.saturation_rate)
            for each in replications
        ]
        if self._workers is None or self._workers.num == 1:
            done = [_evaluated(self.evaluator, self.source, each) for each in asked]
        else:
            done = list(self._workers.call("windtunnel.capacity.runs:evaluated", asked))
        self.num_run += len(done)
        self.num_simulated += sum(each.num_requests for each in done)
        return done

    @property
    def _deployment(self) -> tuple[str, bytes]:
        """Evaluator and source as bytes with a name, packed once; nothing where no other process needs them."""
        if self._workers is None or self._workers.num == 1:
            return "", b""
        if self._packed is None:
            data = pickle.dumps((self.evaluator, self.source), pickle.HIGHEST_PROTOCOL)
            self._packed = hashlib.sha256(data).hexdigest(), data
        return self._packed


class Asked(NamedTuple):
    """One simulation, for whichever process runs it."""

    name: str
    deployment: bytes
    """Evaluator and source."""
    load: float
    seed: int
    num_requests: int
    saturation_rate: float | None


_unpacked: dict[str, tuple[Evaluator, Source]] = {}  # the deployments that this process worked for lately
_MOST_UNPACKED = 8


def evaluated(asked: Asked) -> Evaluation:
    """Run it in a worker process, which keeps what it unpacked."""
    if asked.name not in _unpacked:
        if len(_unpacked) >= _MOST_UNPACKED:
            _unpacked.pop(next(iter(_unpacked)))
        _unpacked[asked.name] = pickle.loads(asked.deployment)
    return _evaluated(*_unpacked[asked.name], asked)


def _evaluated(evaluator: Evaluator, source: Source, asked: Asked) -> Evaluation:
    workload = source.draw(asked.load, asked.seed, asked.num_requests)
    return evaluator.evaluate(workload, seed=asked.seed, saturation_rate=asked.saturation_rate)
