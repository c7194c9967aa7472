"""Replicas behind a shared queue against queueing theory: M/M/c (Erlang C) and M/D/c (Crommelin)."""

from __future__ import annotations

from math import factorial

import numpy as np
import pytest
from scipy import stats

from windtunnel.sim.cost.constant import AffineCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.fleet.fleet import Fleet, Pool
from windtunnel.sim.fleet.routers import Routing
from windtunnel.sim.metrics.replications import mean_interval
from windtunnel.sim.rng import stream
from windtunnel.sim.simulate import serve
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload, workload

S = 1_000_000_000
TOKEN_S = 1e-4
MEAN_TOKENS = 10_000
SERVICE_S = TOKEN_S * MEAN_TOKENS
COST = AffineCost(base_s=1e-9, token_s=TOKEN_S)
ENGINE = SchedulerConfig(
    max_num_seqs=1, max_num_batched_tokens=200_000, max_model_len=200_000, num_gpu_blocks=20_000, async_scheduling=False
)
"""One request at a time, its prompt in one step and its answer of one token with it: a server with one service."""
WARM_UP, COUNTED, REPLICATIONS = 300, 1_500, 12


def erlang_c(num_servers: int, load: float) -> float:
    """Chance of having to wait in M/M/c with so many Erlangs offered."""
    rho = load / num_servers
    busy = load**num_servers / factorial(num_servers) / (1 - rho)
    return busy / (sum(load**k / factorial(k) for k in range(num_servers)) + busy)


def crommelin(num_servers: int, rho: float) -> float:
    """Mean wait in M/D/c, in service times (Crommelin 1932)."""
    total, i = 0.0, 1
    while True:
        arrivals = stats.poisson(i * num_servers * rho)
        term = arrivals.sf(i * num_servers - 1) - arrivals.sf(i * num_servers) / rho
        total += term
        if term < 1e-12:
            return float(total)
        i += 1


def requests(num_servers: int, rho: float, seed: int, *, deterministic: bool) -> Workload:
    rng = stream(seed, "queueing")
    count = WARM_UP + COUNTED
    due_ns = np.cumsum(rng.exponential(S * SERVICE_S / (rho * num_servers), count)).astype(np.int64)
    lengths = np.full(count, MEAN_TOKENS)
    if not deterministic:
        lengths = np.ceil(rng.exponential(MEAN_TOKENS, count)).astype(np.int64)
    return workload(due_ns, lengths, np.ones(count, np.int64))


def mean_wait_s(num_servers: int, rho: float, seed: int, router: str = "shared_queue", *, deterministic: bool) -> float:
    system = System(ENGINE, COST, num_replicas=num_servers)
    fleet = Fleet((Pool("all", system),), Routing(router, seed=seed))
    table = serve(requests(num_servers, rho, seed, deterministic=deterministic), fleet).requests
    return float((table.scheduled_ns - table.arrival_ns)[WARM_UP:].mean()) / S


@pytest.mark.parametrize(("num_servers", "rho"), [(1, 0.6), (2, 0.7), (5, 0.8)])
def test_exponential_services_wait_as_erlang_c_says(num_servers: int, rho: float) -> None:
    waits = [mean_wait_s(num_servers, rho, seed, deterministic=False) for seed in range(REPLICATIONS)]
    expected = erlang_c(num_servers, rho * num_servers) * SERVICE_S / (num_servers * (1 - rho))
    interval = mean_interval(waits, 0.99)
    assert interval.low <= expected <= interval.high
    assert interval.high - interval.low < 0.6 * expected, "so wide an interval would hold anything"


@pytest.mark.parametrize(("num_servers", "rho"), [(1, 0.6), (2, 0.7), (5, 0.8)])
def test_equal_services_wait_as_crommelin_says(num_servers: int, rho: float) -> None:
    waits = [mean_wait_s(num_servers, rho, seed, deterministic=True) for seed in range(REPLICATIONS)]
    expected = crommelin(num_servers, rho) * SERVICE_S
    interval = mean_interval(waits, 0.99)
    assert interval.low <= expected <= interval.high
    assert interval.high - interval.low < 0.6 * expected, "so wide an interval would hold anything"


def test_crommelin_with_one_server_is_pollaczek_khinchine() -> None:
    assert crommelin(1, 0.6) == pytest.approx(0.6 / 2 / (1 - 0.6), rel=1e-9)


def test_routers_wait_longer_the_less_they_know() -> None:
    """A shared queue wastes no server; fewest requests comes close; turns are blind."""
    routers = ("shared_queue", "least_requests", "power_of_two", "round_robin")
    waits = [
        np.mean([mean_wait_s(4, 0.8, seed, router, deterministic=False) for seed in range(4)]) for router in routers
    ]
    assert waits == sorted(waits)
    assert waits[-1] > 2 * waits[0]


def test_with_equal_services_turns_are_as_good_as_a_shared_queue() -> None:
    """First come, first served among equal services ends in the order of arrival, so the servers are freed in turns."""
    shared, turns = (mean_wait_s(3, 0.8, 1, router, deterministic=True) for router in ("shared_queue", "round_robin"))
    assert turns == pytest.approx(shared, rel=1e-6)  # an answer frees its server 1 ns later at the gateway
