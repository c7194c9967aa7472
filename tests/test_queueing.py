"""Where theory has the answer, the simulation has the same: M/D/1, M/G/1, M/M/1 and M/M/c.

With one seat and one-token answers an engine is a single server; a request's service is one step, or as many steps as
it has output tokens.  Every comparison is with the exact value, within a confidence interval from replications, and
demands that the interval be short enough to say something.
"""

from __future__ import annotations

import math

import pytest

from windtunnel.capacity.evaluate import Evaluator
from windtunnel.capacity.runs import Simulations
from windtunnel.capacity.sampling import SyntheticSource
from windtunnel.capacity.search import NUM_RELAXATIONS
from windtunnel.scenarios.schema import SyntheticWorkload
from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.fleet.fleet import Fleet, Pool
from windtunnel.sim.fleet.routers import Routing
from windtunnel.sim.metrics import parse_slos
from windtunnel.sim.metrics.replications import Interval, mean_interval, paired_difference, percentile_interval
from windtunnel.sim.system import System

SERVICE_S = 0.01
CONFIDENCE = 0.999


def single_server(**changes: int) -> SchedulerConfig:
    return SchedulerConfig(max_num_seqs=1, enable_prefix_caching=False, **changes)


def one_step_server() -> System:
    """Each request takes one step of constant length."""
    return System(single_server(), ConstantCost(step_s=SERVICE_S))


def exponential_server(num_replicas: int = 1) -> System:
    """One step a request, as long as its prompt: exponential prompts are exponential services of mean SERVICE_S."""
    config = single_server(max_num_batched_tokens=65_536, max_model_len=65_536, num_gpu_blocks=8_192)
    return System(config, AffineCost(1e-9, token_s=SERVICE_S / 1_000), num_replicas=num_replicas)


EXPONENTIAL_PROMPTS = SyntheticWorkload(input={"dist": "exponential", "mean": 1_000}, output=1, request_rate=1.0)


def measured(
    served: System | Fleet,
    spec: SyntheticWorkload,
    rate: float,
    statistic: str,
    *,
    num: int = 24,
    num_requests: int = 600,
) -> Interval:
    """A statistic in ms from replications, with its interval."""
    (slo,) = parse_slos(f"{statistic}<1s")
    simulations = Simulations(Evaluator(served, (slo,)), SyntheticSource(spec), seed=1)
    evaluations = simulations.run(rate, range(num), num_requests)
    if slo.percent is None:
        return mean_interval([each.measured[0] for each in evaluations], CONFIDENCE)
    return percentile_interval([each.sample(0) for each in evaluations], slo.percent, CONFIDENCE)


def check(found: Interval, exact_ms: float, *, within: float) -> None:
    """The interval holds the exact value and is no longer than a share of it on either side."""
    assert found.low <= exact_ms <= found.high, (found, exact_ms)
    assert found.half_width <= within * exact_ms, (found, exact_ms)


@pytest.mark.parametrize(("rho", "num_requests", "within"), [(0.3, 500, 0.2), (0.6, 600, 0.2), (0.8, 1_500, 0.25)])
def test_constant_services_wait_as_in_an_m_d_1_queue(rho: float, num_requests: int, within: float) -> None:
    """Pollaczek-Khinchine: mean wait rho s / (2 (1 - rho))."""
    spec = SyntheticWorkload(input=1, output=1, request_rate=1.0)
    found = measured(one_step_server(), spec, rho / SERVICE_S, "queue_time:mean", num_requests=num_requests)
    check(found, 1e3 * rho * SERVICE_S / (2 * (1 - rho)), within=within)


def test_the_percentile_of_the_wait_is_that_of_an_m_d_1_queue() -> None:
    """Erlang's series for P(W <= t): (1 - rho) sum_j (-lambda u_j)^j / j! exp(lambda u_j), u_j = t - j s."""
    rho = 0.6
    rate = rho / SERVICE_S

    def share_at_most(wait_s: float) -> float:
        terms = range(int(wait_s / SERVICE_S) + 1)
        left = [rate * (wait_s - j * SERVICE_S) for j in terms]
        return (1 - rho) * math.fsum((-left[j]) ** j / math.factorial(j) * math.exp(left[j]) for j in terms)

    low, high = 0.0, 20 * SERVICE_S
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if share_at_most(middle) < 0.95 else (low, middle)
    spec = SyntheticWorkload(input=1, output=1, request_rate=1.0)
    check(measured(one_step_server(), spec, rate, "queue_time:p95"), 1e3 * high, within=0.25)


@pytest.mark.parametrize("rho", [0.5, 0.7])
def test_answers_of_random_length_wait_as_in_an_m_g_1_queue(rho: float) -> None:
    """Pollaczek-Khinchine: mean wait lambda E[S^2] / (2 (1 - rho)), S a step for each of 1 to 9 output tokens."""
    lengths = range(1, 10)
    mean_s = SERVICE_S * sum(lengths) / len(lengths)
    square_s2 = SERVICE_S**2 * sum(n * n for n in lengths) / len(lengths)
    spec = SyntheticWorkload(input=1, output={"dist": "uniform", "low": 1, "high": 9}, request_rate=1.0)
    found = measured(one_step_server(), spec, rho / mean_s, "queue_time:mean")
    check(found, 1e3 * rho / mean_s * square_s2 / (2 * (1 - rho)), within=0.35)


def test_exponential_services_stay_as_in_an_m_m_1_queue() -> None:
    """The time in the system is exponential of mean s / (1 - rho), so p90 is ln 10 times that."""
    rho = 0.6
    found = measured(exponential_server(), EXPONENTIAL_PROMPTS, rho / SERVICE_S, "ttft:p90")
    check(found, 1e3 * math.log(10) * SERVICE_S / (1 - rho), within=0.3)


def erlang_c(num_servers: int, offered: float) -> float:
    """Probability that a request waits, for ``offered`` Erlang."""
    blocked = 1.0
    for n in range(1, num_servers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    rho = offered / num_servers
    return blocked / (1 - rho + rho * blocked)


@pytest.mark.parametrize(("num_servers", "rho"), [(2, 0.7), (5, 0.8)])
def test_replicas_behind_a_shared_queue_wait_as_erlang_c_says(num_servers: int, rho: float) -> None:
    """Mean wait C(c, a) / (c mu - lambda): a request goes to whichever replica is free first."""
    pool = Pool("replicas", exponential_server(num_servers))
    fleet = Fleet((pool,), Routing("shared_queue"))
    rate = rho * num_servers / SERVICE_S
    found = measured(fleet, EXPONENTIAL_PROMPTS, rate, "ttft:mean", num=16, num_requests=900)
    wait_s = erlang_c(num_servers, rho * num_servers) / (num_servers / SERVICE_S - rate)
    check(found, 1e3 * (wait_s + SERVICE_S), within=0.2)


def test_replicas_with_queues_of_their_own_wait_longer_than_behind_a_shared_one() -> None:
    """Run by run on the same requests: a queue of one's own can be long while another replica has none."""
    (slo,) = parse_slos("ttft:mean<1s")
    means = {}
    for router in ("shared_queue", "round_robin"):
        fleet = Fleet((Pool("replicas", exponential_server(4)),), Routing(router))
        simulations = Simulations(Evaluator(fleet, (slo,)), SyntheticSource(EXPONENTIAL_PROMPTS), seed=1)
        means[router] = [each.measured[0] for each in simulations.run(0.8 * 4 / SERVICE_S, range(8), 500)]
    assert paired_difference(means["shared_queue"], means["round_robin"], CONFIDENCE).low > 0


def test_leaving_out_the_ramp_cures_the_bias_of_runs_that_begin_empty() -> None:
    """At rho = 0.7 the first requests wait too little.

    The run is as long as the search makes it: NUM_RELAXATIONS times the c^2 / (1 - rho)^2 requests in which a queue
    forgets its start (c^2 = 1 here).  All requests together have a mean that is 7.7 % too low then, those after the
    ramp one of 0.7 % (20,000 replications of Lindley's recursion).
    """
    rho, exact_ms = 0.7, 1e3 * 0.7 * SERVICE_S / (2 * 0.3)
    (slo,) = parse_slos("queue_time:mean<1s")
    spec = SyntheticWorkload(input=1, output=1, request_rate=1.0)
    simulations = Simulations(Evaluator(one_step_server(), (slo,)), SyntheticSource(spec), seed=5)
    all_of_them, after_ramp = [], []
    for replication in range(300):
        workload = simulations.draw(rho / SERVICE_S, replication, int(NUM_RELAXATIONS / (1 - rho) ** 2))
        all_of_them.append(simulations.evaluator.evaluate(workload, ramp=False).measured[0])
        after_ramp.append(simulations.evaluator.evaluate(workload).measured[0])
    assert paired_difference(all_of_them, after_ramp, CONFIDENCE).low > 0
    cured = mean_interval(after_ramp, 0.95)
    assert cured.low <= exact_ms <= cured.high
    assert abs(cured.mean - exact_ms) < (exact_ms - mean_interval(all_of_them).mean) / 2
