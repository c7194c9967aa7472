"""What is asked of a deployment: traces that were recorded, and workloads made from distributions.

``read_trace`` reads a file, ``synthetic_workload`` draws requests, ``write_workload`` writes either down; ``transform``
cuts and scales them, ``describe`` says in a few numbers what they ask for.
"""

from __future__ import annotations

from windtunnel.scenarios.workloads.arrivals import (
    Arrivals,
    AtOnce,
    Constant,
    Gamma,
    OnOff,
    Poisson,
    Ramp,
    arrivals_from,
)
from windtunnel.scenarios.workloads.describe import describe, shared_prompt_tokens
from windtunnel.scenarios.workloads.detect import FORMATS, TraceFormat, detect_format
from windtunnel.scenarios.workloads.durations import (
    Durations,
    ExponentialPause,
    FixedPause,
    LognormalPause,
    durations_from,
)
from windtunnel.scenarios.workloads.errors import TraceError
from windtunnel.scenarios.workloads.lengths import (
    Empirical,
    Exponential,
    Fixed,
    Geometric,
    InTurn,
    Lengths,
    Lognormal,
    Quantiles,
    Uniform,
    lengths_from,
)
from windtunnel.scenarios.workloads.synthetic import (
    Prefixes,
    Sessions,
    prefixes_from,
    sessions_from,
    synthetic_workload,
)
from windtunnel.scenarios.workloads.trace import read_trace
from windtunnel.scenarios.workloads.transform import (
    scale_rate,
    slice_time,
    truncate,
    with_arrivals,
    with_max_concurrency,
)
from windtunnel.scenarios.workloads.write import write_workload

__all__ = [
    "FORMATS",
    "Arrivals",
    "AtOnce",
    "Constant",
    "Durations",
    "Empirical",
    "Exponential",
    "ExponentialPause",
    "Fixed",
    "FixedPause",
    "Gamma",
    "Geometric",
    "InTurn",
    "Lengths",
    "Lognormal",
    "LognormalPause",
    "OnOff",
    "Poisson",
    "Prefixes",
    "Quantiles",
    "Ramp",
    "Sessions",
    "TraceError",
    "TraceFormat",
    "Uniform",
    "arrivals_from",
    "describe",
    "detect_format",
    "durations_from",
    "lengths_from",
    "prefixes_from",
    "read_trace",
    "scale_rate",
    "sessions_from",
    "shared_prompt_tokens",
    "slice_time",
    "synthetic_workload",
    "truncate",
    "with_arrivals",
    "with_max_concurrency",
    "write_workload",
]
