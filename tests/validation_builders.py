"""Runs to compare: simulations that stand for live ones, and files as load generators and servers write them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.calibrate.attribution import Setup
from windtunnel.calibrate.live.observed import ObservedRun
from windtunnel.executor.vllm_plugin.recording import COLUMNS, FORMAT, VERSION
from windtunnel.sim.cost.constant import AffineCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepPlan, StepResult, StepShape
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.simulate import run
from windtunnel.sim.simulated import SimExecutor
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload, workload

CONFIG = SchedulerConfig(
    num_gpu_blocks=301, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512, enable_prefix_caching=False
)
COST = AffineCost(base_s=0.008, token_s=2e-5)
FLAGS = (
    *("--cost", "affine:base_s=8ms,token_s=20us", "--num-gpu-blocks-override", "301", "--max-num-seqs", "16"),
    *("--max-num-batched-tokens", "256", "--max-model-len", "512", "--no-enable-prefix-caching"),
)
"""The same on the command line."""


def requests(num: int = 80, *, gap_s: float = 0.05, seed: int = 0, **more: Any) -> Workload:
    draw = np.random.default_rng(seed)
    arrival_ns = np.rint(np.cumsum(draw.exponential(gap_s, num)) * 1e9).astype(np.int64)
    return workload(arrival_ns, draw.integers(20, 200, num), draw.integers(10, 80, num), **more)


def setup(load: Workload | None = None, config: SchedulerConfig = CONFIG, cost: CostModel = COST) -> Setup:
    return Setup(requests() if load is None else load, System(config, cost))


def as_live(run: ObservedRun, *, extra_ns: int = 0) -> ObservedRun:
    """A simulated run in the place of a live one; ``extra_ns`` is added to each request's way."""
    table = run.requests
    later = replace(
        table,
        ttft_ns=np.where(table.ttft_ns >= 0, table.ttft_ns + extra_ns, -1),
        e2el_ns=np.where(table.e2el_ns >= 0, table.e2el_ns + extra_ns, -1),
        end_ns=np.where(table.end_ns >= 0, table.end_ns + extra_ns, -1),
        chunk_ns=table.chunk_ns + extra_ns,
    )
    return replace(run, source="windtunnel live", requests=later)


def bench_result(run: ObservedRun, **more: Any) -> dict[str, Any]:
    """As ``vllm bench serve --save-result --save-detailed`` has it (keys of vLLM 0.32)."""
    table = run.requests
    rows = range(len(table))
    duration_s = (run.makespan_ns or 0) / 1e9
    return {
        "date": "20261129-120000",
        "model_id": "tiny",
        "num_prompts": len(table),
        "request_rate": 20.0,
        "duration": duration_s,
        "completed": len(table),
        "failed": 0,
        "total_input_tokens": int(table.num_prompt_tokens.sum()),
        "total_output_tokens": int(table.num_output_tokens.sum()),
        "request_throughput": len(table) / duration_s,
        "output_throughput": float(table.num_output_tokens.sum()) / duration_s,
        "mean_ttft_ms": float(table.ttft_ns.mean()) / 1e6,
        "mean_e2el_ms": float(table.e2el_ns.mean()) / 1e6,
        "input_lens": table.num_prompt_tokens.tolist(),
        "output_lens": table.num_output_tokens.tolist(),
        "ttfts": (table.ttft_ns / 1e9).tolist(),
        "itls": [(np.diff(table.chunk_times_of(row)) / 1e9).tolist() for row in rows],
        "latencies": (table.e2el_ns / 1e9).tolist(),
        "start_times": (1000 + table.send_ns / 1e9).tolist(),
        "queue_times": ((table.send_ns - table.due_ns) / 1e9).tolist(),
        "errors": [""] * len(table),
        **more,
    }


def write_bench(path: Path, run: ObservedRun, **more: Any) -> Path:
    path.write_text(json.dumps(bench_result(run, **more)))
    return path


def write_metrics(path: Path, config: SchedulerConfig = CONFIG) -> Path:
    """A dump of ``/metrics`` that tells the pool."""
    labels = (
        f'block_size="{config.block_size}",num_gpu_blocks="{config.num_gpu_blocks}",'
        f'enable_prefix_caching="{config.enable_prefix_caching}",engine="0"'
    )
    path.write_text(f'vllm:cache_config_info{{{labels}}} 1.0\nvllm:num_requests_running{{engine="0"}} 0.0\n')
    return path


class _Noting:
    """An executor that notes what it ran."""

    def __init__(self, cost: CostModel) -> None:
        self.inner = SimExecutor(cost)
        self.steps: list[tuple[StepShape, int]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.inner.execute(plan)
        self.steps.append((plan.shape, result.step_ns))
        return result


def write_recording(path: Path, of: Setup) -> Path:
    """The recording of a server that serves ``of`` without any time of the host between two steps."""
    noting = _Noting(of.system.cost)
    run(of.workload, of.system.config, of.system.cost, executor=noting)
    lines = [{"format": FORMAT, "version": VERSION, "windtunnel": "0.1.0", "model": "tiny", "device": "cpu"}]
    at_ns = 1_000_000
    for number, (shape, step_ns) in enumerate(noting.steps):
        end_ns = at_ns + step_ns
        times = (at_ns, at_ns, at_ns, end_ns, end_ns)
        values = (number, *times, *shape, 0, 0, 0, -1, -1, 0)
        lines.append(dict(zip(COLUMNS, values, strict=True)))
        at_ns = end_ns
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
