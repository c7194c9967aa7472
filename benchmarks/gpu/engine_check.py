"""Steps of a whole model on this card: their times over a grid, by operation, and an engine under load."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu.points import NO_TIME, PLAN, PointView
from windtunnel.executor.cache import PagedKvCache, block_bytes
from windtunnel.executor.devices import Device
from windtunnel.executor.engine import Engine
from windtunnel.executor.filler import Filler
from windtunnel.executor.model import Decoder
from windtunnel.executor.model_config import DecoderConfig
from windtunnel.executor.ops import Ops
from windtunnel.executor.sampling import SamplingParams
from windtunnel.executor.timing import DeviceTiming
from windtunnel.executor.triton_executor import TritonExecutor
from windtunnel.executor.weights import random_weights
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.engine.scheduler import Scheduler

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
"""Source: the model's config.json on Hugging Face (meta-llama/Llama-3.1-8B)."""
TINY_8B = LLAMA_3_1_8B | {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

_BLOCK_SIZE = 16
_MOST_TOKENS = 35 << 14  # of the cache: 70 GiB for Llama-3.1-8B in bfloat16
_MEMORY_SHARE = 0.8
_MAX_MODEL_LEN = 40960
_WARM_UPS = 2
_REPEATS = 8


class Point(NamedTuple):
    """A step: decodes at one context, and one chunk of a prompt behind cached tokens."""

    num_decodes: int = 0
    context: int = 0
    """Tokens that each decode attends to."""
    chunk: int = 0
    """New tokens of the chunk; 0 is none."""
    cached: int = 0
    """Tokens ahead of it."""

    @property
    def shape(self) -> StepShape:
        """As the scheduler would tell it."""
        pairs = self.chunk * self.cached + self.chunk * (self.chunk + 1) // 2
        return StepShape(
            num_decode_seqs=self.num_decodes,
            decode_context_tokens=self.num_decodes * self.context,
            num_prefill_seqs=int(self.chunk > 0),
            prefill_tokens=self.chunk,
            prefill_context_tokens=self.cached,
            prefill_pairs=pairs,
            num_sampled=self.num_decodes + int(self.chunk > 0),
        )


DECODES = [
    *((count, context) for count in (1, 8, 32, 64, 128, 256) for context in (128, 1024)),
    *((count, 2048) for count in (32, 64, 256)),
    *((count, 8192) for count in (1, 8, 32)),
    *((count, 32768) for count in (1, 8)),
]
PREFILLS = [(16, 0), (128, 0), (512, 0), (2048, 0), (8192, 0), (128, 4096), (512, 4096), (2048, 4096), (2048, 16384)]
MIXED = [(16, 1024, 496, 0), (64, 1024, 448, 0), (64, 1024, 1984, 4096), (256, 1024, 1792, 0)]
GRID = [*(Point(*d) for d in DECODES), *(Point(chunk=n, cached=c) for n, c in PREFILLS), *(Point(*m) for m in MIXED)]
TINY_GRID = [Point(1, 20), Point(3, 20), Point(chunk=12, cached=16), Point(2, 20, 5, 0)]


class ModelOnCard:
    """A model, its cache and executor; built when it is first asked for, because that takes a while."""

    def __init__(self, ops: Ops, device: Device, *, dtype: torch.dtype, tiny: bool, tp_size: int = 1) -> None:
        self._ops = ops
        self._device = device
        self._dtype = dtype
        self.tiny = tiny
        self.config = DecoderConfig.from_hf(TINY_8B if tiny else LLAMA_3_1_8B).shard(tp_size)
        self.max_model_len = 256 if tiny else _MAX_MODEL_LEN
        self.build_s = 0.0
        self._executor: TritonExecutor | None = None

    @property
    def executor(self) -> TritonExecutor:
        """With graphs for up to 256 sequences."""
        if self._executor is None:
            begin = time.perf_counter()
            self._executor = self._build()
            self.build_s = time.perf_counter() - begin
        return self._executor

    def describe(self) -> dict[str, Any]:
        """What was built, and what it takes."""
        executor = self.executor
        return {
            "build_s": self.build_s,
            "dtype": str(self._dtype)[6:],
            "tp_size": self.config.tp_size,
            "num_blocks": executor.cache.num_blocks,
            "block_size": executor.cache.block_size,
            "weight_bytes": executor.model.weights.num_bytes,
            "cache_bytes": executor.cache.num_bytes,
            "workspace_bytes": executor.workspace_bytes,
            "captured_sizes": list(executor.captured_sizes),
        }

    def close(self) -> None:
        """Give the memory back."""
        if self._executor is not None:
            self._executor.close()
        self._executor = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _build(self) -> TritonExecutor:
        place = self._device.torch_device
        weights = random_weights(self.config, dtype=self._dtype, device=place)
        model = Decoder(self.config, weights, self._ops, max_model_len=self.max_model_len)
        cache = PagedKvCache(self.config, self._num_blocks(), _BLOCK_SIZE, dtype=self._dtype, device=place)
        with torch.inference_mode():
            for tensor in (*cache.keys, *cache.values):
                tensor.normal_()  # zeros would run faster than what a model computes
        sizes = [1, 2, 4] if self.tiny else [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]
        return TritonExecutor(model, cache, capture_sizes=sizes, device=type(self._device)())

    def _num_blocks(self) -> int:
        if self.tiny or not torch.cuda.is_available():
            return 64
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        per_block = block_bytes(self.config, _BLOCK_SIZE, self._dtype)
        return min(_MOST_TOKENS // _BLOCK_SIZE, int(_MEMORY_SHARE * free) // per_block)


def step_times(card: ModelOnCard, points: Iterable[Point], more: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Each point's times; points that do not fit the cache, or for which there is no time left, are told as such."""
    for point in points:
        told: dict[str, Any] = {"point": point._asdict(), "shape": point.shape._asdict()}
        if not more():
            yield told | {"skipped": NO_TIME}
            continue
        try:
            timings = _run(card.executor, point, 2 if card.tiny else _REPEATS)
        except ValueError as error:
            yield told | {"skipped": str(error)}
            continue
        yield told | _told(timings)


def by_operation(card: ModelOnCard, points: Iterable[Point]) -> list[dict[str, Any]]:
    """Where the device time of a step goes; without graphs, since operations are timed one by one."""
    found = []
    executor = card.executor
    for point in points:
        with executor.timing_ops():
            timings = _run(executor, point, 2)
            operations = [timing._asdict() for timing in executor.last_op_timings]
        found.append({"point": point._asdict(), "device_ns": timings[-1].device_ns, "operations": operations})
    return found


def overhead(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Host time beyond the device's work in decode steps by graphs: the largest of the medians, and the usual one."""
    medians = [row["host_overhead_s"]["median"] for row in rows if row.get("is_graph")]
    return {"largest_median_s": max(medians), "median_s": median(medians)} if medians else None


def throughput(card: ModelOnCard, duration_s: float) -> dict[str, Any]:
    """An engine that is never short of requests: prompts of about 512 tokens, answers of about 128."""
    executor = card.executor
    load = _Load(card, SchedulerConfig(
        max_num_seqs=4 if card.tiny else 256,
        max_num_batched_tokens=32 if card.tiny else 2048,
        max_model_len=min(8192, card.max_model_len),
        block_size=executor.cache.block_size,
        num_gpu_blocks=executor.cache.num_blocks,
    ))  # fmt: skip
    return load.run(duration_s)


class _Load:
    def __init__(self, card: ModelOnCard, config: SchedulerConfig) -> None:
        self._executor = card.executor
        self._config = config
        self._engine = Engine(Scheduler(config), self._executor, Filler([0]))
        self._draw = np.random.default_rng(6)
        self._vocab = card.config.vocab_size
        self._prompt, self._answer = (12, 6) if card.tiny else (512, 128)
        self._added = 0

    def run(self, duration_s: float) -> dict[str, Any]:
        executor, engine = self._executor, self._engine
        num_output = num_finished = num_preemptions = num_scheduled = 0
        decodes: list[DeviceTiming] = []
        outside: list[float] = []
        begin = now = time.perf_counter()
        while now - begin < duration_s:
            while len(engine.sequences) < self._config.max_num_seqs + 8:
                self._add()
            before = time.perf_counter()
            outcome = engine.step(int((before - begin) * 1e9))
            now = time.perf_counter()
            timing = executor.last_device_timing
            assert outcome is not None
            assert timing is not None
            num_output += sum(len(output.token_ids) for output in outcome.outputs)
            num_finished += len(outcome.finished)
            num_preemptions += len(outcome.preemptions)
            num_scheduled += timing.num_tokens
            outside.append(now - before - 1e-9 * timing.total_ns)
            if timing.is_graph:
                decodes.append(timing)
        wall_s = now - begin
        executor.adopt(_Nobody())
        return {
            "max_num_seqs": self._config.max_num_seqs,
            "max_num_batched_tokens": self._config.max_num_batched_tokens,
            "mean_prompt_tokens": self._prompt,
            "mean_output_tokens": self._answer,
            "wall_s": wall_s,
            "num_steps": len(outside),
            "num_graph_steps": len(decodes),
            "num_finished": num_finished,
            "num_preemptions": num_preemptions,
            "output_tokens_per_s": num_output / wall_s,
            "computed_tokens_per_s": num_scheduled / wall_s,
            "finished_per_s": num_finished / wall_s,
            "median_host_overhead_of_decodes_s": median(t.host_overhead_ns for t in decodes) * 1e-9
            if decodes
            else None,
            "mean_padded_tokens_of_decodes": fmean(t.num_padded_tokens for t in decodes) if decodes else None,
            "median_outside_the_executor_s": median(outside),
        }

    def _add(self) -> None:
        prompt, answer = (
            int(np.clip(self._draw.lognormal(np.log(mean) - 0.125, 0.5), 1, 8 * mean))
            for mean in (self._prompt, self._answer)
        )
        token_ids = self._draw.integers(0, self._vocab, prompt).tolist()
        self._engine.add(self._added, token_ids, SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True), 0)
        self._added += 1


class _Nobody(PointView):
    def __init__(self) -> None:
        super().__init__([], [], 2, 1)


def _run(executor: TritonExecutor, point: Point, repeats: int) -> list[DeviceTiming]:
    """The timings of repeated steps.

    Raises ValueError if the point does not fit the cache.
    """
    num_tokens = [point.context] * point.num_decodes + [point.cached + point.chunk] * bool(point.chunk)
    tokens = np.random.default_rng(7).integers(0, executor.model.config.vocab_size, max(num_tokens)).tolist()
    cache = executor.cache
    view = PointView(num_tokens, [tokens] * len(num_tokens), cache.num_blocks, cache.block_size)
    begins = [point.context - 1] * point.num_decodes + [point.cached] * bool(point.chunk)
    view.chunks(begins, num_tokens)
    executor.adopt(view)
    timings = []
    for _ in range(_WARM_UPS + repeats):
        executor.execute(PLAN)
        assert executor.last_device_timing is not None
        timings.append(executor.last_device_timing)
    return timings[_WARM_UPS:]


def _told(timings: Sequence[DeviceTiming]) -> dict[str, Any]:
    return {
        "step_s": _spread([timing.total_ns for timing in timings]),
        "device_s": _spread([timing.device_ns for timing in timings]),
        "copy_s": _spread([timing.copy_ns for timing in timings]),
        "host_build_s": _spread([timing.host_build_ns for timing in timings]),
        "host_overhead_s": _spread([timing.host_overhead_ns for timing in timings]),
        "num_padded_tokens": timings[-1].num_padded_tokens,
        "is_graph": timings[-1].is_graph,
        "repeats": len(timings),
    }


def _spread(ns: Sequence[int]) -> dict[str, float]:
    p10, middle, p90 = (1e-9 * np.quantile(ns, [0.1, 0.5, 0.9])).tolist()
    return {"median": middle, "p10": p10, "p90": p90}
