"""The CPU executor: time of steps, what the host needs around them, and an engine under load.

    python -m benchmarks.executor_cpu [--hidden 512] [--layers 8] [--seconds 10] [--output FILE.json]

Times are processor time of one thread, so that they mean something on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.card import describe
from benchmarks.gpu.points import PLAN, PointView
from windtunnel.executor.batch_builder import BatchBuilder
from windtunnel.executor.cache import PagedKvCache
from windtunnel.executor.engine import Engine
from windtunnel.executor.filler import Filler
from windtunnel.executor.model import Decoder
from windtunnel.executor.model_config import DecoderConfig
from windtunnel.executor.reference import TorchOps
from windtunnel.executor.sampling import SamplingParams
from windtunnel.executor.torch_executor import TorchExecutor
from windtunnel.executor.weights import random_weights
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.scheduler import Scheduler

DECODES = [(1, 128), (8, 128), (8, 1024), (32, 512), (64, 128)]
"""(sequences, context)."""
PREFILLS = [(16, 0), (128, 0), (512, 0), (128, 1024)]
"""(new tokens, cached ahead of them)."""
_BLOCKS = SchedulerConfig(max_model_len=2048, num_gpu_blocks=2049, max_num_seqs=32, max_num_batched_tokens=256)
_REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size, a multiple of 128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0, help="wall time of the engine under load")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    executor = _executor(arguments.hidden, arguments.layers)
    weights = executor.model.weights.num_bytes
    print(f"{weights / 4e6:.1f} million parameters in float32, one thread, {describe()['cpu']}")
    steps = list(_steps(executor))
    for row in steps:
        print(f"  {row['what']:32} {1e3 * row['step_s']:9.2f} ms, of which building {1e3 * row['build_s']:.3f} ms")
    load = _load(executor, arguments.seconds)
    print("  " + ", ".join(f"{name} {value:.4g}" for name, value in load.items()))
    if arguments.output:
        told = {"machine": describe(), "parameters": weights // 4, "steps": steps, "load": load}
        arguments.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _executor(hidden: int, layers: int) -> TorchExecutor:
    config = DecoderConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 2048,
            "hidden_size": hidden,
            "intermediate_size": 11 * hidden // 4,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": max(1, hidden // 256),
            "max_position_embeddings": 2048,
        }
    )
    model = Decoder(config, random_weights(config), TorchOps())
    cache = PagedKvCache(config, _BLOCKS.num_gpu_blocks, _BLOCKS.block_size)
    return TorchExecutor(model, cache, clock="cpu")


def _steps(executor: TorchExecutor) -> Iterator[dict[str, Any]]:
    """Medians of repeated steps."""
    for count, context in DECODES:
        yield {"what": f"{count} decodes at {context}", **_step(executor, [context - 1] * count, [context] * count)}
    for chunk, cached in PREFILLS:
        yield {"what": f"a chunk of {chunk} behind {cached}", **_step(executor, [cached], [cached + chunk])}


def _step(executor: TorchExecutor, begins: list[int], ends: list[int]) -> dict[str, float]:
    cache, vocab = executor.cache, executor.model.config.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab, max(ends)).tolist()
    view = PointView(ends, [tokens] * len(ends), cache.num_blocks, cache.block_size)
    view.chunks(begins, ends)
    executor.adopt(view)
    timings = []
    for _ in range(1 + _REPEATS):
        executor.execute(PLAN)
        assert executor.last_timing is not None
        timings.append(executor.last_timing)
    builder = BatchBuilder(cache.block_size, executor.model.max_model_len)
    builder.build(view.grants(PLAN), view)
    begin_ns = time.thread_time_ns()
    for _ in range(100):
        builder.build(view.grants(PLAN), view)
    return {
        "step_s": median(timing.step_ns for timing in timings[1:]) * 1e-9,
        "build_s": median(timing.build_ns for timing in timings[1:]) * 1e-9,
        "batch_builder_s": (time.thread_time_ns() - begin_ns) * 1e-11,
    }


def _load(executor: TorchExecutor, seconds: float) -> dict[str, float]:
    """An engine that is never short of requests: prompts of about 128 tokens, answers of 32."""
    engine = Engine(Scheduler(_BLOCKS), executor, Filler([0]))
    draw = np.random.default_rng(1)
    num_added = num_steps = num_output = 0
    step_ns = 0
    begin, begin_cpu = time.perf_counter(), time.thread_time()
    while time.perf_counter() - begin < seconds:
        while len(engine.sequences) < _BLOCKS.max_num_seqs + 8:
            prompt = draw.integers(0, executor.model.config.vocab_size, draw.integers(64, 193)).tolist()
            engine.add(num_added, prompt, SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True), 0)
            num_added += 1
        outcome = engine.step(num_steps)
        assert outcome is not None
        num_steps += 1
        num_output += sum(len(output.token_ids) for output in outcome.outputs)
        step_ns += outcome.end_ns - outcome.begin_ns
    wall_s, cpu_s = time.perf_counter() - begin, time.thread_time() - begin_cpu
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "num_steps": num_steps,
        "output_tokens_per_cpu_s": num_output / cpu_s,
        "mean_step_s": step_ns * 1e-9 / num_steps,
        "mean_outside_the_executor_s": (cpu_s - step_ns * 1e-9) / num_steps,
    }


if __name__ == "__main__":
    main()
