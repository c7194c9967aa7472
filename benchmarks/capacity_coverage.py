"""How often the interval of a search for capacity holds the true rate, on queues whose true rate theory gives.

    python -m benchmarks.capacity_coverage [--searches 150]

The search is the real one; its runs are those of one server by Lindley's recursion, which gives the waits that the
simulation gives (tests/test_queueing.py) in a thousandth of the time.  True rates: Pollaczek-Khinchine for means, and
for percentiles of M/M/1 the exponential time in the system.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from windtunnel.capacity.binding import LIMITS, SEATS
from windtunnel.capacity.evaluate import RAMP_SHARE, Evaluation
from windtunnel.capacity.runs import Simulations
from windtunnel.capacity.sampling import SyntheticSource
from windtunnel.capacity.search import Search, Settings
from windtunnel.scenarios.schema import SyntheticWorkload
from windtunnel.sim.cost.constant import AffineCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.metrics import parse_slos
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload

SERVICE_S = 0.01
MEAN_PROMPT = 1_000
RHOS = (0.7, 0.9)
KINDS = ("M/D/1 mean wait", "M/M/1 mean stay", "M/M/1 p90 stay", "M/M/1 p99 stay")


class LindleyQueue:
    """An evaluator whose single server is Lindley's recursion; a service is as long as its prompt, constant or
    exponential."""

    goodput = None

    def __init__(self, objective: str, *, exponential: bool) -> None:
        config = SchedulerConfig(
            max_num_seqs=1,
            max_num_batched_tokens=65_536,
            max_model_len=65_536,
            num_gpu_blocks=8_192,
            enable_prefix_caching=False,
        )
        self.served = System(config, AffineCost(1e-9, token_s=SERVICE_S / MEAN_PROMPT))  # for the saturation rate
        self.objectives = parse_slos(objective)
        length = {"dist": "exponential", "mean": MEAN_PROMPT} if exponential else MEAN_PROMPT
        self.source = SyntheticSource(SyntheticWorkload(input=length, output=1, request_rate=1.0))

    def evaluate(self, load: Workload, *, seed: int = 0, saturation_rate: float | None = None) -> Evaluation:  # noqa: ARG002
        due_ms, num = load.arrival_ns / 1e6, len(load)
        service_ms = load.num_prompt_tokens * (1e3 * SERVICE_S / MEAN_PROMPT)
        done = np.cumsum(service_ms)
        start = np.maximum.accumulate(due_ms - (done - service_ms)) + done - service_ms
        slo = self.objectives[0]
        values = (start - due_ms if slo.metric == "queue_time" else start + service_ms - due_ms)[
            int(RAMP_SHARE * num) :
        ]
        measured = float(values.mean()) if slo.percent is None else np.sort(values)
        shares = dict.fromkeys(LIMITS, 0.0) | {SEATS: 1.0}
        return Evaluation((measured,), (None,), "stable", num, len(values), None, shares, SERVICE_S, 0, 1.0)


def objective_met_at(kind: str, rho: float) -> str:
    """The objective that a queue of that kind meets exactly at rho."""
    stay_ms = 1e3 * SERVICE_S / (1 - rho)
    match kind:
        case "M/D/1 mean wait":
            return f"queue_time:mean<{1e3 * SERVICE_S * rho / (2 * (1 - rho)):.6f}ms"
        case "M/M/1 mean stay":
            return f"ttft:mean<{stay_ms:.6f}ms"
        case "M/M/1 p90 stay":
            return f"ttft:p90<{math.log(10) * stay_ms:.6f}ms"
    return f"ttft:p99<{math.log(100) * stay_ms:.6f}ms"


def measure(kind: str, rho: float, num_searches: int) -> str:
    exact, rows = rho / SERVICE_S, []
    for seed in range(num_searches):
        evaluator = LindleyQueue(objective_met_at(kind, rho), exponential=kind.startswith("M/M"))
        simulations = Simulations(
            evaluator,  # type: ignore[arg-type]
            evaluator.source,
            seed,
        )
        found = Search(simulations, Settings()).run()
        rows.append((found.low, found.high or math.inf, found.rate or math.nan, simulations.num_run))
    low, high, rate, runs = np.array(rows).T
    return (
        f"{kind:16} {rho:.1f}  {int(((low <= exact) & (exact <= high)).sum()):4} of {num_searches}  "
        f"{int((low > exact).sum()):4}  {int((high < exact).sum()):4}  {np.nanmean(rate) / exact:.3f} ± "
        f"{np.nanstd(rate) / exact:.3f}  {np.mean((high - low)[np.isfinite(high)]) / exact:.3f}  {runs.mean():.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=int, default=150, help="for each row")
    arguments = parser.parse_args()
    print("queue, statistic  rho  interval holds  low too high  high too low  point / true  width / true  runs")
    for kind in KINDS:
        for rho in RHOS:
            print(measure(kind, rho, arguments.searches), flush=True)


if __name__ == "__main__":
    main()
