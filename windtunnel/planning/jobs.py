"""The simulations of a plan as jobs: functions of plain data that any process can do, in any order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from windtunnel.planning.candidates import Candidate, Knobs, Shape
from windtunnel.planning.load import busiest_ns, dealt_several, scaled, shuffled
from windtunnel.planning.measure import crashing, measured, slowed, slowed_system
from windtunnel.planning.question import Question, deployment_of, question_of, workload_of
from windtunnel.scenarios.saturation import saturation_request_throughput
from windtunnel.sim.fleet.fleet import Fleet
from windtunnel.sim.rng import stream
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload
from windtunnel.workers import Job

NUM_ALONE = 200
"""Requests that are served one at a time, for what no number of replicas makes faster."""
STEP = 1.25
"""First factor between two tries while the number of replicas is not yet bracketed."""
FASTER = 1.5
"""Power of the factor from try to try: a guess that is far off, as from other knobs, is still bracketed."""
TOLERANCE = 0.02
"""Ratio of the ends of a bracket, less 1, at which it is narrow enough."""
MOST_TRIES = 24
MOST_REPLICAS = 4096
"""Of a fleet that can be simulated."""
MAX_RHO = 0.97
"""Load over what the engine can do at most (known within about 3 %) from which on no latency is a steady state's."""
_HEADROOM_STEP = 1.1
_MODULE = "windtunnel.planning.jobs"


def as_plain(candidate: Candidate) -> dict[str, Any]:
    """A candidate as plain data."""
    return asdict(candidate)


def candidate_of(told: Mapping[str, Any]) -> Candidate:
    """The candidate that ``as_plain`` told."""
    return Candidate(Shape(**told["shape"]), Knobs(**told["knobs"]))


def _argument(question: Question, candidate: Candidate, **more: Any) -> dict[str, Any]:
    return {"question": question.to_dict(), "candidate": as_plain(candidate), **more}


# --- alone: what no number of replicas makes faster


def alone_job(question: Question, candidate: Candidate) -> Job:
    """See ``alone``."""
    return Job(f"{_MODULE}:alone", _argument(question, candidate))


def alone(argument: Mapping[str, Any]) -> dict[str, Any]:
    """Objectives of requests that have a replica to themselves, one at a time, and what the engine can do at most.

    The requests are spread evenly over the lengths of the prompts.
    """
    question, candidate = _read(argument)
    system = deployment_of(question, candidate).system
    workload = workload_of(question)
    rows = np.argsort(workload.num_prompt_tokens, kind="stable")
    sample = rows[np.linspace(0, len(rows) - 1, min(NUM_ALONE, len(rows))).astype(np.int64)]
    unhurried = replace(
        workload,
        arrival_ns=np.zeros(len(sample), np.int64),
        num_prompt_tokens=workload.num_prompt_tokens[sample],
        num_output_tokens=workload.num_output_tokens[sample],
        max_tokens=workload.max_tokens[sample],
        priority=workload.priority[sample],
        previous=np.full(len(sample), -1, np.int64),
        think_ns=np.zeros(len(sample), np.int64),
        content=None,
        num_streams=0,
        labels=None,
        tenant=None if workload.tenant is None else workload.tenant[sample],
        max_concurrency=1,
        request_timeout_ns=None,
    )
    return measured(question, unhurried, system, ramp=False)


def limit_job(question: Question, candidate: Candidate) -> Job:
    """See ``limit``."""
    return Job(f"{_MODULE}:limit", _argument(question, candidate))


def limit(argument: Mapping[str, Any]) -> dict[str, Any]:
    """Requests per second of one replica that never lacks work; None if these requests do not tell."""
    question, candidate = _read(argument)
    system = deployment_of(question, candidate).system
    return {"request_throughput": saturation_request_throughput(workload_of(question), system)}


# --- how many replicas


def needed_job(
    question: Question,
    candidate: Candidate,
    replication: int,
    *,
    least: float,
    guess: float,
    step: float = STEP,
    slower: float = 1.0,
) -> Job:
    """See ``needed``."""
    more = {"replication": replication, "least": least, "guess": guess, "step": step, "slower": slower}
    return Job(f"{_MODULE}:needed", _argument(question, candidate, **more))


def needed(argument: Mapping[str, Any]) -> dict[str, Any]:
    """The least number of equal replicas, not rounded, that keep the objectives; None for ``num_replicas`` if none do.

    Each replica serves its share of the requests as if all took turns (``dealt``); a number below one is a load that a
    single replica carries several times.  ``least`` is a bound that no number below needs to be tried, ``guess`` where
    to begin; every step takes ``slower`` times as long as the cost model says.  The bracket is halved, in logarithms,
    until its ends differ by less than ``TOLERANCE``.
    """
    question, candidate = _read(argument)
    search = _Search(question, candidate, int(argument["replication"]), float(argument["slower"]))
    low, high = float(argument["least"]), None
    tried, step = max(float(argument["guess"]), low), float(argument["step"])
    is_bound = True  # whether low is the bound that nobody tried
    while search.num_simulations < MOST_TRIES:
        if search.holds(tried):
            high = tried
            if tried <= low * (1 + TOLERANCE):
                break
            if not is_bound:
                break
            tried, step = max(tried / step, low), step**FASTER
        else:
            low, is_bound = tried, False
            if high is not None or tried >= MOST_REPLICAS:
                break
            tried, step = min(tried * step, MOST_REPLICAS), step**FASTER
    while high is not None and high / low > 1 + TOLERANCE and search.num_simulations < MOST_TRIES:
        middle = math.sqrt(low * high)
        if search.holds(middle):
            high = middle
        else:
            low, is_bound = middle, False
    return {
        "num_replicas": high,
        "missed_at": None if is_bound else low,
        "at": None if high is None else search.results[high],
        "below": None if is_bound else search.results.get(low),
        "tries": [_try(number, result) for number, result in sorted(search.results.items())],
        "num_simulations": search.num_simulations,
        "num_requests": search.num_requests,
    }


def _try(num_replicas: float, result: Mapping[str, Any]) -> dict[str, Any]:
    """A number of replicas and what it gave, in short."""
    return {
        "num_replicas": num_replicas,
        "holds": result["holds"],
        "objectives": [objective["measured"] for objective in result["objectives"]],
        "latency_ms": result["latency_ms"],
    }


class _Search:
    """Tries numbers of replicas on one replication's requests, and remembers what came of it."""

    def __init__(self, question: Question, candidate: Candidate, replication: int, slower: float) -> None:
        self._question = question
        self._system = slowed_system(deployment_of(question, candidate).system, slower)
        self._workload = workload_of(question, replication)
        self._replication = replication
        self.results: dict[float, dict[str, Any]] = {}
        self.num_simulations = 0
        self.num_requests = 0

    def holds(self, num_replicas: float) -> bool:
        if num_replicas not in self.results:
            sample = share_of(self._question, self._workload, num_replicas, self._replication)
            self.results[num_replicas] = measured(
                self._question, sample, self._system, num_replicas=max(num_replicas, 1.0)
            )
            self.num_simulations += 1
            self.num_requests += len(sample)
        return bool(self.results[num_replicas]["holds"])


def share_of(question: Question, workload: Workload, num_replicas: float, replication: int) -> Workload:
    """What one of so many replicas gets; where that is too little, what several of them get, one after the other.

    Which ones is drawn, evenly spread over all replications, so that a candidate is tried with the same requests as
    every other one.
    """
    if num_replicas < 1:
        return scaled(workload, 1 / num_replicas)
    of_one = len(workload) / num_replicas
    several = max(1, min(math.floor(num_replicas), math.ceil(question.num_requests / of_one)))
    start = float(stream(question.seed, "plan", "phase").random())
    total = several * question.replications
    phases = [(start + (replication + k * question.replications) / total) % 1.0 for k in range(several)]
    return dealt_several(workload, num_replicas, phases)


# --- the whole fleet


def fleet_job(
    question: Question,
    candidate: Candidate,
    num_replicas: int,
    replication: int,
    *,
    slower: float = 1.0,
    crashes: bool = False,
) -> Job:
    """See ``fleet``."""
    more = {"num_replicas": num_replicas, "replication": replication, "slower": slower, "crashes": crashes}
    return Job(f"{_MODULE}:fleet", _argument(question, candidate, **more))


def fleet(argument: Mapping[str, Any]) -> dict[str, Any]:
    """All replicas behind their router, over the whole workload; steps take ``slower`` times as long.  With
    ``crashes`` one replica goes away in the middle of the busiest minute, and its requests begin anew elsewhere.

    Replication 0 of a trace is the trace; others have its requests in another order within each minute.
    """
    question, candidate = _read(argument)
    replication, num_replicas = int(argument["replication"]), int(argument["num_replicas"])
    workload = fleet_workload(question, replication)
    served = fleet_of(question, candidate, num_replicas)
    if argument["crashes"]:
        return measured(question, workload, crashing(served, busiest_ns(workload)))
    return measured(question, workload, slowed(served, float(argument["slower"])))


def fleet_workload(question: Question, replication: int) -> Workload:
    """The requests of a replication of the whole fleet."""
    workload = workload_of(question, replication)
    if replication == 0 or "trace" not in question.scenario["workload"]:
        return workload
    return shuffled(workload, stream(question.seed, "plan", "order", replication))


def headroom_job(question: Question, candidate: Candidate, num_replicas: int, replication: int, *, guess: float) -> Job:
    """See ``headroom``."""
    more = {"num_replicas": num_replicas, "replication": replication, "guess": guess}
    return Job(f"{_MODULE}:headroom", _argument(question, candidate, **more))


def headroom(argument: Mapping[str, Any]) -> dict[str, Any]:
    """How many times the load a whole fleet carries before it misses an objective; below 1 if it misses one as it is.

    Bracketed by steps of a tenth from ``guess`` on and halved, in logarithms, to 2 %.
    """
    question, candidate = _read(argument)
    replication, num_replicas = int(argument["replication"]), int(argument["num_replicas"])
    served = fleet_of(question, candidate, num_replicas)
    workload = fleet_workload(question, replication)
    num_simulations = 0

    def holds(factor: float) -> bool:
        nonlocal num_simulations
        num_simulations += 1
        return bool(measured(question, scaled(workload, factor), served)["holds"])

    factor = other = float(argument["guess"])
    up = holds(factor)
    while num_simulations < MOST_TRIES:
        other = factor * _HEADROOM_STEP if up else factor / _HEADROOM_STEP
        if holds(other) is not up:
            break
        factor = other
    low, high = min(factor, other), max(factor, other)
    while high / low > 1 + TOLERANCE and num_simulations < MOST_TRIES:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return {
        "factor": low,
        "num_simulations": num_simulations,
        "num_requests": num_simulations * len(workload),
    }


def _read(argument: Mapping[str, Any]) -> tuple[Question, Candidate]:
    return question_of(argument["question"]), candidate_of(argument["candidate"])


def fleet_of(question: Question, candidate: Candidate, num_replicas: int) -> System | Fleet:
    """So many replicas behind the router that the scenario asks for."""
    return deployment_of(question, candidate, num_replicas).served
