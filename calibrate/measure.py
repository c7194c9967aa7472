"""Measures how long an executor takes for the steps of a grid.

Points are visited in rounds, each in a new random order, until the 95 % interval of every point's median is narrow or
the time is used up: whatever the machine does for a while hits all points alike.  The first round takes the kinds of
steps by turns, so that little time still sees some of each.  A visit runs a step that is new, or
short and reads cached tokens, once unrecorded, and then all steps once or a few times recorded.  Between visits a
reference step shows how the machine's speed moves.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windtunnel.calibrate.grid import Composition, Grid, SequenceWork
from windtunnel.calibrate.machine import GpuWatch, describe_machine
from windtunnel.calibrate.measurements import (
    REFERENCE,
    MeasuredTable,
    MeasurementError,
    PartialFile,
    Sample,
    VisitMedians,
    describe_reference,
    outliers,
)
from windtunnel.calibrate.origins import gpu_name
from windtunnel.executor.batch import Grant
from windtunnel.executor.engine import RealExecutor
from windtunnel.executor.sampling import SamplingParams
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepPlan
from windtunnel.sim.engine.protocols import Executor
from windtunnel.sim.engine.request import Request

CLOCKS = ("wall", "cpu")
TARGET = 0.02
"""Half width of the 95 % interval of a point's median, as a share, below which it is measured no more."""
_REFERENCE_EVERY_S = 2.0
_REFERENCE_SEQS, _REFERENCE_CONTEXT = 8, 256
_VISIT_S = 0.02
"""Short steps are repeated within a visit until it has taken that long."""
_MOST_REPEATS = 3
_WARM_UP_S, _WARM_UP_SHARE = 3.0, 0.1
"""Before the first visit unrecorded steps are run for so long, or for that share of the budget if that is less."""
_MOST_VISITS = 500
_NUM_TOKEN_LISTS = 8
_GREEDY = SamplingParams(temperature=0.0)
_NS = 1e-9


class Progress(NamedTuple):
    """How far a measurement is."""

    num_points: int
    num_measured: int
    """Points with at least one sample."""
    num_tight: int
    """Points whose median is known well enough."""
    num_samples: int
    elapsed_s: float
    budget_s: float
    left_s: float
    """Estimate of the time to the end, which is at the latest when the budget is used up."""


def measure(
    executor: Executor,
    grid: Grid,
    *,
    clock: str,
    budget_s: float,
    seed: int = 0,
    path: str | Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    resume: bool = False,
    target: float = TARGET,
    provenance: Mapping[str, Any] | None = None,
) -> MeasuredTable:
    """Measure ``grid`` on ``executor`` for at most about ``budget_s`` seconds of wall time and write ``path``.

    The executor's own ``step_ns`` is the time of a step; ``clock`` ("wall" or "cpu") says which clock that is.  The
    order of the points depends on ``seed`` alone.  While measuring, visits are appended to ``path`` +
    ``.partial.jsonl``, which ``resume`` goes on with and which goes when a table with all points is written; it stays
    after an interruption and where the budget did not reach every point.  Without a path nothing is kept on disk.
    ``provenance`` is added to what the executor and the machine say of themselves.

    The executor works for nobody else meanwhile, and its cache holds random numbers afterwards.

    Raises ValueError for a clock that is not the executor's and for numbers out of range, MeasurementError for a
    partial file that cannot be gone on with and a budget in which nothing could be measured.
    """
    _check(executor, grid.config, clock, budget_s, target)
    origin = {**describe_executor(executor, grid, clock), **(provenance or {})}
    medians, samples = VisitMedians(), list[Sample]()
    partial = None
    if path is not None:
        partial = PartialFile(partial_path(path), _identity(origin, grid, seed), resume=resume)
        for visit in partial.visits:
            samples += visit
            medians.add(visit)
    try:
        run = _Run(executor, grid, seed, target, medians, samples, partial)
        run.go(budget_s, progress)
    finally:
        if partial is not None:
            partial.close()
    if not run.num_measured:
        raise MeasurementError(f"nothing was measured in {budget_s:g} s: give a larger --budget")
    table = MeasuredTable(grid.points, run.reference, tuple(samples), _told(run, origin, grid, seed, budget_s))
    if path is None or partial is None:
        return table
    table.write(Path(path))
    if table.is_complete:
        partial.remove()
    return MeasuredTable(table.points, table.reference, table.samples, table.provenance, Path(path))


def partial_path(path: str | Path) -> Path:
    """Where the visits of an unfinished measurement are."""
    return Path(f"{path}.partial.jsonl")


def reference_step(config: SchedulerConfig) -> Composition:
    """The step that shows how fast the machine is: a few decodes with a medium context, as far as they fit."""
    usable = config.num_gpu_blocks - 1
    num_seqs = max(1, min(_REFERENCE_SEQS, config.max_num_seqs, config.max_num_batched_tokens, usable))
    context = min(_REFERENCE_CONTEXT, config.max_model_len, usable // num_seqs * config.block_size)
    return Composition("decode", (SequenceWork(1, context - 1),) * num_seqs)


def _check(executor: Executor, config: SchedulerConfig, clock: str, budget_s: float, target: float) -> None:
    if clock not in CLOCKS:
        raise ValueError(f"clock must be one of {', '.join(CLOCKS)}, got {clock!r}")
    its_clock = getattr(executor, "clock", clock)
    if its_clock != clock:
        raise ValueError(
            f"the executor times its steps by the clock {its_clock!r}, not {clock!r}: make it with that one"
        )
    if not 0.0 <= budget_s < float("inf"):
        raise ValueError(f"budget_s must be at least 0 and finite, got {budget_s!r}")
    if not 0.0 < target < 1.0:
        raise ValueError(f"target must be above 0 and below 1, got {target!r}")
    check = getattr(executor, "check_config", None)
    if check is not None:
        check(config)


# ------------------------------------------------------------------ running steps


class _Run:
    """One measurement under way."""

    def __init__(
        self,
        executor: Executor,
        grid: Grid,
        seed: int,
        target: float,
        medians: VisitMedians,
        samples: list[Sample],
        partial: PartialFile | None,
    ) -> None:
        self.reference = reference_step(grid.config)
        self.gpu = gpu_watch(executor)
        self.elapsed_s = 0.0
        """Of this run alone."""
        self._executor = executor
        self._grid = grid
        self._seed = seed
        self.target = target
        self._medians = medians
        self.samples = samples
        self._partial = partial
        self._before_s = samples[-1].at_s if samples else 0.0
        self._reference_at_s = -float("inf")
        vocab_size = getattr(getattr(getattr(executor, "model", None), "config", None), "vocab_size", 2)
        draw = np.random.default_rng(np.random.SeedSequence([seed, 1]))
        self._token_lists = draw.integers(0, vocab_size, (_NUM_TOKEN_LISTS, grid.config.max_model_len)).tolist()

    @property
    def num_measured(self) -> int:
        """Points with at least one sample."""
        return sum(self._medians.num_visits(point) > 0 for point in range(len(self._grid.points)))

    @property
    def num_tight(self) -> int:
        """Points whose median is known well enough, or that were visited often enough."""
        return sum(not self._is_open(point) for point in range(len(self._grid.points)))

    def go(self, budget_s: float, progress: Callable[[Progress], None] | None) -> None:
        """Warm up and visit points until all are tight or the time is over."""
        if budget_s <= 0.0:
            return
        _fill_cache(self._executor, self._seed)
        begin_s = time.monotonic()
        self._warm_up(begin_s + min(_WARM_UP_S, _WARM_UP_SHARE * budget_s))
        begun_s = time.monotonic()
        for point in self._points():
            now_s = time.monotonic()
            self.elapsed_s = now_s - begin_s
            if self.elapsed_s >= budget_s:
                break
            if now_s - self._reference_at_s >= _REFERENCE_EVERY_S:
                self._visit(REFERENCE, now_s - begun_s)
                self._reference_at_s = now_s
            self._visit(point, now_s - begun_s)
            if progress is not None:
                progress(self._progress(budget_s, time.monotonic() - begin_s))
        self._visit(REFERENCE, time.monotonic() - begun_s)
        self.elapsed_s = time.monotonic() - begin_s

    def _points(self) -> Iterator[int]:
        """Which point comes next; in each round all open ones once, in an order of its own."""
        for number in count():
            draw = np.random.default_rng(np.random.SeedSequence([self._seed, 2, number]))
            order = draw.permutation(len(self._grid.points)).tolist()
            open_before = False
            for point in order if number else self._by_turns(order):
                if self._is_open(point):
                    open_before = True
                    if self._medians.num_visits(point) <= number:
                        yield point
            if not open_before:
                return

    def _by_turns(self, order: Sequence[int]) -> list[int]:
        """The same points, one of each kind, then a second of each, and so on."""
        taken: Counter[str] = Counter()
        turns = {}
        for point in order:
            kind = self._grid.points[point].kind
            turns[point] = taken[kind]
            taken[kind] += 1
        return sorted(order, key=turns.__getitem__)

    def _is_open(self, point: int) -> bool:
        return self._medians.num_visits(point) < _MOST_VISITS and self._medians.half_width(point) > self.target

    def _warm_up(self, until_s: float) -> None:
        """Kernels are compiled, memory is mapped, clocks rise."""
        for number, point in enumerate((*self._of_each_kind(), *self._grid.points)):
            if number and time.monotonic() >= until_s:
                return
            plan = self._lay_out(REFERENCE, point)
            self._executor.execute(plan)

    def _of_each_kind(self) -> list[Composition]:
        return list({point.kind: point for point in self._grid.points}.values())

    def _visit(self, point: int, at_s: float) -> None:
        composition = self.reference if point == REFERENCE else self._grid.points[point]
        visit = self._medians.num_visits(point)
        plan = self._lay_out(point, composition, visit)
        if self._needs_a_run_before(point, composition):
            self._executor.execute(plan)
        state = self.gpu.look() if self.gpu is not None else None
        mhz, throttled = (float("nan"), 0) if state is None else (state.sm_mhz, int(state.is_throttled))
        samples: list[Sample] = []
        begin_s = time.perf_counter()
        while not samples or (len(samples) < _MOST_REPEATS and time.perf_counter() - begin_s < _VISIT_S):
            times = self._timed(plan)
            samples.append(Sample(point, visit, len(samples), self._before_s + at_s, *times, mhz, throttled))
        self.samples += samples
        self._medians.add(samples)
        if self._partial is not None:
            self._partial.add(samples)

    def _needs_a_run_before(self, point: int, composition: Composition) -> bool:
        """The first step of its kind may compile something; later a short one that reads cached tokens would be slowed
        by finding them out of the processor's caches, where a real engine's step before it has left them."""
        if self._medians.num_visits(point) == 0:
            return True
        reads = any(work.num_cached_tokens for work in composition.sequences)
        return reads and self._medians.latest_s(point) < _VISIT_S

    def _timed(self, plan: StepPlan) -> tuple[int, int, int, int]:
        """The step by its own clock, by both clocks from outside, and how many rows were padding."""
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        result = self._executor.execute(plan)
        cpu_ns = time.thread_time_ns() - cpu_ns
        wall_ns = time.perf_counter_ns() - wall_ns
        return result.step_ns, wall_ns, cpu_ns, result.num_padded_tokens

    def _lay_out(self, point: int, composition: Composition, visit: int = 0) -> StepPlan:
        """Give the sequences random blocks of the pool and make the executor work for them."""
        plan = StepPlan(0)
        plan.shape = composition.shape
        if isinstance(self._executor, RealExecutor):
            draw = np.random.default_rng(np.random.SeedSequence([self._seed, 3, point + 1, visit]))
            self._executor.adopt(_View(composition, self._grid.config, self._token_lists, draw))
        return plan

    def _progress(self, budget_s: float, elapsed_s: float) -> Progress:
        num_points, num_tight = len(self._grid.points), self.num_tight
        left_s = budget_s - elapsed_s
        if num_tight:
            left_s = min(left_s, elapsed_s * (num_points - num_tight) / num_tight)
        return Progress(
            num_points, self.num_measured, num_tight, len(self.samples), elapsed_s, budget_s, max(left_s, 0.0)
        )


class _View:
    """An ``EngineView`` of requests that are where a composition says."""

    def __init__(
        self,
        composition: Composition,
        config: SchedulerConfig,
        token_lists: Sequence[Sequence[int]],
        draw: np.random.Generator,
    ) -> None:
        blocks = (draw.permutation(config.num_gpu_blocks - 1)[: composition.num_blocks(config.block_size)] + 1).tolist()
        self._grants: list[Grant] = []
        self._tokens: dict[Request, Sequence[int]] = {}
        for index, work in enumerate(composition.sequences):
            request = Request(index, 0, work.num_tokens, 1)
            num_blocks = -(-work.num_tokens // config.block_size)
            request.block_ids, blocks = blocks[:num_blocks], blocks[num_blocks:]
            self._tokens[request] = token_lists[index % len(token_lists)]
            self._grants.append(Grant(request, work.num_new_tokens, work.num_cached_tokens, work.samples))
        self._grants.sort(key=lambda grant: grant.num_tokens > 1)

    def grants(self, plan: StepPlan) -> list[Grant]:  # noqa: ARG002 -- always the same
        """What each request computes, those with one token first."""
        return self._grants

    def token_ids(self, request: Request) -> Sequence[int]:
        """Random ones."""
        return self._tokens[request]

    def sampling_params(self, request: Request) -> SamplingParams:  # noqa: ARG002
        """Greedy."""
        return _GREEDY

    def running(self) -> list[tuple[Request, int]]:
        """None, so that adoption computes nothing."""
        return []


def _fill_cache(executor: Executor, seed: int) -> None:
    """Write random numbers into all keys and values: what was never written costs a CPU less to read."""
    cache = getattr(executor, "cache", None)
    if cache is None:
        return
    import torch

    for tensor in (*cache.keys, *cache.values):
        generator = torch.Generator(tensor.device).manual_seed(seed)
        block = torch.randn((1, *tensor.shape[1:]), generator=generator, device=tensor.device)
        tensor.copy_(block.to(tensor.dtype).expand(tensor.shape))


def gpu_watch(executor: Executor) -> GpuWatch | None:
    """What watches the clocks of the executor's GPU; None for one on a CPU, or one that only simulates."""
    device: Any = getattr(getattr(executor, "model", None), "device", None)
    if getattr(device, "type", "cpu") != "cuda":
        return None
    import torch

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return GpuWatch(f"GPU-{uuid}" if uuid is not None else (device.index or 0))


# ------------------------------------------------------------------ provenance


def describe_executor(executor: Executor, grid: Grid, clock: str) -> dict[str, Any]:
    """What a table says of the executor, its model and its limits."""
    model, cache = getattr(executor, "model", None), getattr(executor, "cache", None)
    kind = type(executor).__name__.removesuffix("Executor").lower()
    config = grid.config
    told: dict[str, Any] = {
        "source": "measured",
        "statement": f"steps of windtunnel's {kind} executor, measured one by one outside an engine",
        "engine": f"windtunnel {kind} executor",
        "executor": kind,
        "clock": clock,
        "tensor_parallel_size": 1,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "num_gpu_blocks": config.num_gpu_blocks,
        "max_graph_tokens": max(getattr(executor, "captured_sizes", ()), default=0),
    }
    if model is not None:
        told |= {
            "tensor_parallel_size": model.config.tp_size,
            "dtype": str(model.dtype).removeprefix("torch."),
            "weights": model.weights.source.split(" in ")[0],
            "num_weights_bytes": model.weights.num_bytes,
        }
    if cache is not None:
        told["kv_cache_dtype"] = str(cache.dtype).removeprefix("torch.")
    if hasattr(executor, "num_threads"):
        told["num_threads"] = executor.num_threads
    return told | describe_machine(_device_name(executor))


def _device_name(executor: Executor) -> str | None:
    device = getattr(getattr(executor, "model", None), "device", None)
    if getattr(device, "type", "cpu") != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_name(device))


_OF_THE_MOMENT = ("date", "load_average", "git_commit", "windtunnel", "numpy", "statement")
"""What may differ between the parts of a measurement that was resumed."""


def _identity(origin: Mapping[str, Any], grid: Grid, seed: int) -> dict[str, Any]:
    """What must be the same for samples to belong together."""
    points = [[point.kind, [list(work) for work in point.sequences]] for point in grid.points]
    digest = hashlib.sha256(json.dumps(points).encode()).hexdigest()[:16]
    kept = {key: value for key, value in origin.items() if key not in _OF_THE_MOMENT}
    return {"seed": seed, "grid": grid.size, **kept, "points": digest}


def _told(run: _Run, origin: Mapping[str, Any], grid: Grid, seed: int, budget_s: float) -> dict[str, Any]:
    """The whole provenance, once all is measured."""
    samples = run.samples
    columns = (np.array([sample.point for sample in samples]), np.array([sample.step_ns for sample in samples], float))
    told = {
        **origin,
        "grid": grid.size,
        "seed": seed,
        "budget_s": budget_s,
        "measured_s": round(max(sample.at_s for sample in samples), 3),
        "target": run.target,
        "num_grid_points": len(grid.points),
        "num_measured_points": run.num_measured,
        "num_tight_points": run.num_tight,
        "num_samples": len(samples),
        "num_outliers": int(outliers(*columns).sum()),
        "reference": describe_reference(run.reference, samples),
        "gpu_clocks": _gpu_clocks(run),
    }
    state = run.gpu.latest if run.gpu is not None else None
    if state is not None:
        told |= {"driver": state.driver, "device": state.name}
    told["gpu"] = gpu_name(told.get("device"))
    return {key: value for key, value in told.items() if value is not None}


def _gpu_clocks(run: _Run) -> Any:
    if run.gpu is None:
        return "no GPU"
    mhz = [sample.gpu_mhz for sample in run.samples if not np.isnan(sample.gpu_mhz)]
    if not mhz:
        return "not recorded: nvidia-smi did not answer"
    return {
        "lowest_sm_mhz": min(mhz),
        "median_sm_mhz": float(np.median(mhz)),
        "highest_sm_mhz": max(mhz),
        "share_of_samples_throttled": sum(sample.gpu_throttled for sample in run.samples) / len(run.samples),
    }
