"""A whole model on the kernels beside the same model in plain torch: prefill, then decodes by padded graphs."""

from __future__ import annotations

import numpy as np
import torch
from tiny_model import VOCAB, TinyEngine, tiny_config, tiny_executor

from windtunnel.executor.cache import PagedKvCache
from windtunnel.executor.devices import CudaDevice, HostDevice
from windtunnel.executor.kernels.ops import TritonOps
from windtunnel.executor.model import Decoder
from windtunnel.executor.model_config import DecoderConfig
from windtunnel.executor.model_executor import ModelExecutor
from windtunnel.executor.reference import TorchOps
from windtunnel.executor.sampling import SamplingParams
from windtunnel.executor.triton_executor import TritonExecutor
from windtunnel.executor.weights import random_weights
from windtunnel.sim.engine.config import SchedulerConfig

ENGINE = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32, block_size=16, num_gpu_blocks=8)
CONFIG = DecoderConfig.from_hf(tiny_config(architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=16))


def answers(executor: ModelExecutor) -> list[list[int]]:
    """Of two prompts, one answered greedily, one by draws."""
    engine = TinyEngine(ENGINE, executor)
    executor.adopt(engine)
    draw = np.random.default_rng(0)
    requests = [
        engine.add(
            draw.integers(0, VOCAB, num_tokens).tolist(), SamplingParams(max_tokens=3, temperature=temperature, seed=1)
        )
        for num_tokens, temperature in ((7, 0.0), (2, 0.8))
    ]
    engine.run()
    return [engine.answer(request) for request in requests]


def test_answers_and_cache_of_the_kernels_are_those_of_torch():
    device = CudaDevice() if torch.cuda.is_available() else HostDevice()
    place = device.torch_device
    on_torch = tiny_executor(ENGINE, Decoder(CONFIG, random_weights(CONFIG), TorchOps(), max_model_len=32))
    model = Decoder(CONFIG, random_weights(CONFIG, device=place), TritonOps(), max_model_len=32)
    cache = PagedKvCache(CONFIG, ENGINE.num_gpu_blocks, ENGINE.block_size, device=place)
    on_kernels = TritonExecutor(model, cache, capture_sizes=[2], device=device)
    assert answers(on_kernels) == answers(on_torch)
    timing = on_kernels.last_device_timing
    assert timing is not None
    assert timing.is_graph
    for name in ("keys", "values"):
        for ours, theirs in zip(getattr(cache, name), getattr(on_torch.cache, name), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)
