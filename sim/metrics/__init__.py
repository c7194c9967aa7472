"""Metrics of a run, from its records alone: latencies, throughput, goodput, KV usage, preemptions, stability."""

from windtunnel.sim.metrics.sample import LatencyStats, Sample
from windtunnel.sim.metrics.slo import GoodputLimits, Slo, SloResult, SloSyntaxError, parse_slos
from windtunnel.sim.metrics.stability import Stability, Verdict
from windtunnel.sim.metrics.summary import Summary, summarize

__all__ = [
    "GoodputLimits",
    "LatencyStats",
    "Sample",
    "Slo",
    "SloResult",
    "SloSyntaxError",
    "Stability",
    "Summary",
    "Verdict",
    "parse_slos",
    "summarize",
]
