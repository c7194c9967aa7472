"""Is a model right on this card: a small Llama beside torch on the CPU in float32, whatever the scheduler does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.points import PointView
from windtunnel.executor.batch_builder import BatchBuilder
from windtunnel.executor.cache import PagedKvCache
from windtunnel.executor.devices import Device
from windtunnel.executor.engine import Engine
from windtunnel.executor.engine import Sequence as Answer
from windtunnel.executor.filler import Filler
from windtunnel.executor.model import Decoder
from windtunnel.executor.model_config import DecoderConfig
from windtunnel.executor.model_executor import ModelExecutor
from windtunnel.executor.ops import Ops
from windtunnel.executor.reference import TorchOps
from windtunnel.executor.sampling import SamplingParams
from windtunnel.executor.torch_executor import TorchExecutor
from windtunnel.executor.triton_executor import TritonExecutor
from windtunnel.executor.weights import random_weights
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.scheduler import Scheduler

SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}
TINY_LLAMA = SMALL_LLAMA | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
LOGITS_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Allowed relative to the norm of the logits; bfloat16 has 8 bits, and errors add up over the layers."""
_PROMPTS = 8


def check(ops: Ops, device: Device, *, tiny: bool) -> list[dict[str, Any]]:
    """Each claim and whether it holds."""
    return list(_Check(ops, device, tiny).claims())


class _Check:
    def __init__(self, ops: Ops, device: Device, tiny: bool) -> None:
        self._ops = ops
        self._device = device
        self._config = DecoderConfig.from_hf(TINY_LLAMA if tiny else SMALL_LLAMA)
        self._longest = 40 if tiny else 200
        self._num_output = 8 if tiny else 32
        self._on_cpu = Decoder(self._config, random_weights(self._config), TorchOps(), max_model_len=512)
        self._here = self._model(torch.float32)
        blocks = -(-(self._longest + self._num_output) // 16)
        self._roomy = SchedulerConfig(max_model_len=512, num_gpu_blocks=1 + _PROMPTS * blocks, max_num_seqs=_PROMPTS)
        self._tight = replace(
            self._roomy, num_gpu_blocks=2 + 2 * blocks, max_num_batched_tokens=24, scheduler_reserve_full_isl=False
        )
        self._prompts = _prompts(self._config.vocab_size, self._longest)

    def claims(self) -> Iterator[dict[str, Any]]:
        """One at a time."""
        yield from (self._logits(dtype) for dtype in LOGITS_ERROR)
        lone = replace(self._roomy, max_num_seqs=1, enable_prefix_caching=False)
        expected, _ = self._answers(lone, [self._torch(lone)])
        batched, _ = self._answers(self._roomy, [self._triton(self._roomy)])
        yield _claim(
            "greedy answers of a batch on graphs are those of torch, one by one, on the CPU", batched == expected
        )
        eager, _ = self._answers(self._roomy, [self._triton(self._roomy, use_graphs=False)])
        yield _claim("greedy answers with and without graphs are the same", eager == batched)
        tight, preemptions = self._answers(self._tight, [self._triton(self._tight)])
        yield _claim(
            "preemption and chunks of prompts change nothing", tight == expected and preemptions > 0, preemptions
        )
        swapped, _ = self._answers(self._tight, [self._triton(self._tight), self._torch(self._tight)])
        yield _claim("swapping this card and the CPU at every third step changes nothing", swapped == expected)

    def _model(self, dtype: torch.dtype) -> Decoder:
        weights = random_weights(self._config, dtype=dtype, device=self._device.torch_device)
        return Decoder(self._config, weights, self._ops, max_model_len=512)

    def _logits(self, dtype: torch.dtype) -> dict[str, Any]:
        """Two passes: a first chunk of each prompt, then the rest, whose last row is compared."""
        theirs = self._last_logits(self._on_cpu)
        ours = self._last_logits(self._here if dtype == torch.float32 else self._model(dtype)).cpu()
        error = float((ours - theirs).norm() / theirs.norm())
        return _claim(f"logits in {str(dtype)[6:]} are those of torch in float32", error <= LOGITS_ERROR[dtype], error)

    def _last_logits(self, model: Decoder) -> torch.Tensor:
        cache = PagedKvCache(model.config, self._roomy.num_gpu_blocks, 16, dtype=model.dtype, device=model.device)
        builder = BatchBuilder(16, model.max_model_len)
        lengths = [len(prompt) for prompt in self._prompts]
        view = PointView(lengths, self._prompts, self._roomy.num_gpu_blocks, 16, seed=4)
        with torch.inference_mode():
            for begins, ends in (([0] * len(lengths), [n // 3 for n in lengths]), ([n // 3 for n in lengths], lengths)):
                host = builder.build(view.chunks(begins, ends), view)
                logits = model.forward(host.to_device(model.device), cache)
        return logits

    def _torch(self, config: SchedulerConfig) -> ModelExecutor:
        return TorchExecutor(self._on_cpu, PagedKvCache(self._config, config.num_gpu_blocks, 16))

    def _triton(self, config: SchedulerConfig, *, use_graphs: bool = True) -> ModelExecutor:
        place = self._device.torch_device
        cache = PagedKvCache(self._config, config.num_gpu_blocks, 16, device=place)
        device = type(self._device)()
        return TritonExecutor(self._here, cache, use_graphs=use_graphs, capture_sizes=[1, 2, 4, 8], device=device)

    def _answers(self, config: SchedulerConfig, executors: Sequence[ModelExecutor]) -> tuple[list[list[int]], int]:
        """The answers, and how often a request was preempted."""
        engine = Engine(Scheduler(config), executors[0], Filler([0]))
        params = SamplingParams(max_tokens=self._num_output, temperature=0.0, ignore_eos=True)
        answers: list[Answer] = [engine.add(i, prompt, params, 0) for i, prompt in enumerate(self._prompts)]
        turns, num_steps = cycle([*executors[1:], executors[0]]), 0
        while engine.sequences:
            engine.step(num_steps)
            num_steps += 1
            if len(executors) > 1 and num_steps % 3 == 0:
                engine.swap(next(turns))
        return [answer.output_token_ids for answer in answers], sum(a.request.num_preemptions for a in answers)


def _prompts(vocab: int, longest: int) -> list[list[int]]:
    """Half of them begin alike, so that prefix hits occur."""
    draw = np.random.default_rng(5)
    head = draw.integers(0, vocab, longest // 2).tolist()
    tails = [draw.integers(0, vocab, int(count)).tolist() for count in draw.integers(6, longest // 2, _PROMPTS)]
    return [(head if i % 2 else []) + tail for i, tail in enumerate(tails)]


def _claim(what: str, holds: bool, value: float | None = None) -> dict[str, Any]:
    return {"claim": what, "passed": bool(holds), "value": value}
