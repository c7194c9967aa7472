"""Models small enough to compute in milliseconds, and the smallest engine that can drive one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from windtunnel.executor.batch import Grant
from windtunnel.executor.batch_builder import BatchBuilder
from windtunnel.executor.cache import PagedKvCache
from windtunnel.executor.model import Decoder
from windtunnel.executor.model_config import DecoderConfig
from windtunnel.executor.reference import TorchOps
from windtunnel.executor.sampling import SamplingParams
from windtunnel.executor.torch_executor import TorchExecutor
from windtunnel.executor.weights import random_weights
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.keys import TokenKeys
from windtunnel.sim.engine.plan import StepPlan
from windtunnel.sim.engine.protocols import Executor
from windtunnel.sim.engine.request import Request
from windtunnel.sim.engine.scheduler import Scheduler

VOCAB = 512

torch.set_num_threads(1)  # for so little work more threads only wait for each other


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A Llama's config.json of some 200,000 parameters."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    return {**config, **overrides}


def tiny_decoder(
    config: dict[str, Any] | None = None, *, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> Decoder:
    """A model with random weights."""
    decoder_config = DecoderConfig.from_hf(config or tiny_config())
    return Decoder(decoder_config, random_weights(decoder_config, seed, dtype=dtype), TorchOps(), **options)


def tiny_executor(config: SchedulerConfig, model: Decoder | None = None, **options: Any) -> TorchExecutor:
    """An executor for the engine of that config."""
    model = model or tiny_decoder()
    return TorchExecutor(model, PagedKvCache(model.config, config.num_gpu_blocks, config.block_size), **options)


class OneSequence:
    """A view of a single sequence that lies in the given blocks."""

    def __init__(self, tokens: Sequence[int], block_ids: list[int]) -> None:
        self.tokens = list(tokens)
        self.request = Request(0, 0, len(tokens), 1)
        self.request.block_ids = block_ids

    def token_ids(self, request: Request) -> list[int]:
        return self.tokens

    def sampling_params(self, request: Request) -> SamplingParams:
        return SamplingParams()


def logits_at_once(model: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab]: what the model says after each of them, all computed in one pass."""
    num_blocks = -(-len(tokens) // 16)
    view = OneSequence(tokens, list(range(1, num_blocks + 1)))
    host = BatchBuilder(16, len(tokens)).build([Grant(view.request, len(tokens), 0, False)], view)
    batch = host.to_device("cpu")._replace(sample_rows=torch.arange(len(tokens)))
    with torch.inference_mode():
        return model.forward(batch, PagedKvCache(model.config, num_blocks + 1, 16, dtype=model.dtype))


class TinyEngine:
    """A scheduler, an executor that can be exchanged, and the requests' tokens."""

    def __init__(self, config: SchedulerConfig, executor: Executor) -> None:
        self.scheduler = Scheduler(config)
        self.tokens: dict[Request, list[int]] = {}
        self.params: dict[Request, SamplingParams] = {}
        self.executor = executor
        self.decided: list[tuple[Any, ...]] = []
        self._interned: dict[Hashable, int] = {}
        self.use(executor)

    def use(self, executor: Executor) -> int:
        self.executor = executor
        return executor.adopt(self) if isinstance(executor, TorchExecutor) else 0

    def add(self, prompt: Sequence[int], params: SamplingParams, priority: int = 0) -> Request:
        tokens = list(prompt)
        size = self.scheduler.config.block_size
        keys = TokenKeys(tokens.__getitem__, size, self._interned)
        request = Request(len(self.tokens), 0, len(tokens), params.max_tokens, priority=priority, keys=keys)
        self.tokens[request], self.params[request] = tokens, params
        self.scheduler.add(request)
        return request

    def step(self, made_up: Sequence[int] = ()) -> bool:
        """One step; whether anything was computed.  An executor that yields no tokens is given made-up ones."""
        plan = self.scheduler.schedule(0)
        self.decided.append(
            (plan.shape, [(a.request.request_id, a.num_cached_tokens) for a in plan.admissions], len(plan.preemptions))
        )
        if plan.is_empty:
            return bool(plan.preemptions)
        sampled = self.executor.execute(plan).sampled
        if sampled is None:
            sampled = [
                (grant.request, made_up[len(self.tokens[grant.request]) % len(made_up)])
                for grant in self.grants(plan)
                if grant.samples
            ]
        for request, token in sampled:
            self.tokens[request].append(token)
        self.scheduler.commit(plan, 0)
        return True

    def run(self) -> None:
        while self.step():
            pass
        assert not self.scheduler.num_requests

    def answer(self, request: Request) -> list[int]:
        return self.tokens[request][request.num_prompt_tokens :]

    @property
    def num_preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.tokens)

    # -- what the executor sees

    def grants(self, plan: StepPlan) -> list[Grant]:
        grants = []
        for request, num_tokens in self.scheduler.scheduled_tokens(plan).items():
            end = self.scheduler.num_computed_tokens(request)
            samples = end == len(self.tokens[request])
            grants.append(Grant(request, num_tokens, end - num_tokens, samples))
        return sorted(grants, key=lambda grant: grant.num_tokens > 1)

    def token_ids(self, request: Request) -> list[int]:
        return self.tokens[request]

    def sampling_params(self, request: Request) -> SamplingParams:
        return self.params[request]

    def running(self) -> list[tuple[Request, int]]:
        return [(request, self.scheduler.num_computed_tokens(request)) for request in self.scheduler.running]
