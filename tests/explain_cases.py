"""Simulated runs with one planted cause each, and healthy ones: what ``explain`` is tried on.

Every builder takes a seed, draws model, GPU, lengths and the size of the fault from it, simulates, and returns the run
as an observed one.  So the cause is a real one, in the data and not in the words.  ``benchmarks/explain_rates.py``
counts over many seeds how often the first finding is the planted cause, and how often a healthy run has any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from windtunnel.calibrate.explain import Facts
from windtunnel.calibrate.live.observed import (
    Ending,
    ObservedRequests,
    ObservedRun,
    ServerCounts,
    ServerFacts,
    observed_requests,
)
from windtunnel.calibrate.live.observed_metrics import observed_from_records
from windtunnel.scenarios.workloads.synthetic import Prefixes, Sessions, synthetic_workload
from windtunnel.sim.cost.roofline import RooflineCost
from windtunnel.sim.deployment.gpu import load_gpu
from windtunnel.sim.deployment.model import load_model
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.records import Records
from windtunnel.sim.simulate import serve
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload, workload

S = 1_000_000_000
HARDWARE = (
    ("llama-3.1-8b", "h100", 1),
    ("qwen2.5-7b-instruct", "a100", 1),
    ("llama-3.1-8b", "rtx-4090", 1),
    ("llama-3.1-70b", "h100", 4),
    ("qwen3-32b", "h200", 2),
)
LEAST_ROUNDS = 6


@dataclass(frozen=True)
class Case:
    """A run, what is known besides it, and the kind of its planted cause ("" for a healthy one)."""

    run: ObservedRun
    kind: str
    facts: Facts | None = None


@dataclass(frozen=True)
class Set:
    """What a seed draws: hardware, lengths, and a config in which nothing is short."""

    rng: np.random.Generator
    cost: CostModel
    prompt: int
    output: int
    seed: int

    @property
    def config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            max_model_len=131_072,
            num_gpu_blocks=200_000,
            enable_prefix_caching=False,
        )

    def lengths(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of prompts and outputs: uniform around their means."""
        around = [
            {"dist": "uniform", "low": max(mean // 2, 1), "high": mean * 3 // 2} for mean in (self.prompt, self.output)
        ]
        return around[0], around[1]

    def load(self, number: int, arrivals: Any, **more: Any) -> Workload:
        prompt, output = self.lengths()
        return synthetic_workload(number, arrivals, prompt, output, seed=self.seed, **more)

    def run(self, load: Workload, config: SchedulerConfig | None = None, **more: Any) -> Records:
        return serve(load, System(config or self.config, self.cost, **more))

    def closed(self, places: int, number: int, config: SchedulerConfig | None = None) -> tuple[Workload, Records]:
        load = self.load(number, {"process": "at_once"}, max_concurrency=places)
        return load, self.run(load, config)

    def capacity(self, config: SchedulerConfig | None = None, places: int = 96) -> tuple[float, float]:
        """Requests a second with so many in flight, and mean E2EL then."""
        _, records = self.closed(places, 3 * places, config)
        table = records.requests
        middle = slice(places // 2, -places)
        done = np.sort(table.finish_ns)[middle]
        rate = (len(done) - 1) * S / max(int(done[-1] - done[0]), 1)
        return rate, float((table.finish_ns - table.arrival_ns).mean()) / S


def drawn(seed: int, *, prompt: tuple[int, int] = (100, 3000), output: tuple[int, int] = (40, 300)) -> Set:
    """Hardware and lengths of a seed."""
    rng = np.random.default_rng(seed)
    model, gpu, size = HARDWARE[int(rng.integers(len(HARDWARE)))]
    cost = RooflineCost(load_model(model), load_gpu(gpu), size)
    around = [round(float(np.exp(rng.uniform(np.log(low), np.log(high))))) for low, high in (prompt, output)]
    return Set(rng, cost, around[0], around[1], seed)


def observed(load: Workload, records: Records, rate: float | None = None) -> ObservedRun:
    run = observed_from_records(records, load)
    return replace(run, request_rate=rate)


def with_columns(run: ObservedRun, **columns: Any) -> ObservedRun:
    """The run with some columns of its requests exchanged."""
    return replace(run, requests=replace(run.requests, **columns))


def of_rows(run: ObservedRun, rows: Any) -> ObservedRun:
    """The run with some of its requests only."""
    table = run.requests
    plain = {
        item.name: getattr(table, item.name)[rows]
        for item in fields(ObservedRequests)
        if item.name not in ("errors", "chunk_offsets", "chunk_ns", "chunk_tokens", "labels")
    }
    chunks = [table.chunk_times_of(int(row)) for row in rows]
    requests = observed_requests(len(rows), chunks=chunks, **plain)
    return replace(run, requests=requests, counts=ServerCounts(), series=None)


# --- healthy runs


def healthy(seed: int) -> Case:
    """A healthy run; every other one as the client alone sees it: no gauges, no settings, jittered times."""
    case = _healthy(seed)
    if seed % 2 == 0:
        return case
    rng = np.random.default_rng(seed)
    table = case.run.requests
    late = rng.exponential(1_000_000, len(table)).astype(np.int64)
    jitter = rng.exponential(2_000_000, len(table.chunk_ns)).astype(np.int64)
    row = np.repeat(np.arange(len(table)), np.diff(table.chunk_offsets))
    chunks = table.chunk_ns + jitter
    order = np.lexsort((chunks, row))
    chunks = chunks[order]
    ttft, last = chunks[table.chunk_offsets[:-1]], chunks[table.chunk_offsets[1:] - 1]
    run = with_columns(
        case.run, send_ns=table.send_ns + late, chunk_ns=chunks, ttft_ns=ttft, e2el_ns=last, end_ns=last + 500_000
    )
    return replace(case, run=replace(run, series=None, counts=ServerCounts(), server=ServerFacts()))


def _healthy(seed: int) -> Case:
    """Open loop at 30 to 75 % of what 96 in flight give, or a closed loop; with and without shared prefixes."""
    made = drawn(seed)
    rng = made.rng
    caching = bool(rng.random() < 0.4)
    config = replace(
        made.config,
        enable_prefix_caching=caching,
        max_num_seqs=int(rng.choice([128, 256, 512])),
        max_num_batched_tokens=int(rng.choice([2048, 4096, 8192])),
        num_gpu_blocks=int(rng.choice([30_000, 60_000])),
    )
    kind = rng.choice(["poisson", "gamma", "constant", "closed", "sessions"])
    more: dict[str, Any] = {"prefixes": Prefixes(4, max(made.prompt // 2, 16))} if caching else {}
    if kind == "closed":
        places = int(rng.choice([1, 4, 16, 32, 64]))
        number = max(LEAST_ROUNDS * places, 120)
        load = made.load(number, {"process": "at_once"}, max_concurrency=places, **more)
        return Case(observed(load, made.run(load, config)), "")
    rate, e2el_s = made.capacity(config)
    rate *= float(rng.uniform(0.3, 0.75))
    number = int(np.clip(12 * rate * e2el_s, 200, 1500))
    if kind == "sessions":
        turns = 4
        prompt = {"dist": "uniform", "low": 50, "high": 300}
        load = synthetic_workload(
            None,
            rate / turns / 2,
            prompt,
            made.lengths()[1],
            seed=seed,
            sessions=Sessions(turns=turns, think=2.0, num_sessions=number // turns),
        )
        return Case(observed(load, made.run(load, config), rate), "")
    arrivals: Any = {"process": str(kind), "rate": rate}
    if kind == "gamma":
        arrivals["burstiness"] = 0.5
    load = made.load(number, arrivals, **more)
    return Case(observed(load, made.run(load, config), rate), "")


# --- planted causes


def client_cap(seed: int) -> Case:
    """A pool of connections that is smaller than the load needs; the tool does not know of it."""
    made = drawn(seed)
    places = int(made.rng.choice([16, 32, 64, 100]))
    if made.rng.random() < 0.5:
        asked = round(places * float(made.rng.uniform(1.06, 3)))
        load, records = made.closed(places, 6 * places)
        run = observed(load, records)
        sent = run.requests.send_ns
        return Case(replace(with_columns(run, due_ns=sent, ready_ns=sent), max_concurrency=asked), "client_cap")
    rate, _ = made.capacity(places=places)
    rate *= float(made.rng.uniform(1.0, 2.0))
    load = made.load(8 * places, rate, max_concurrency=places)
    run = observed(load, made.run(load), rate)
    sent = run.requests.send_ns
    return Case(replace(with_columns(run, due_ns=sent, ready_ns=sent), max_concurrency=None), "client_cap")


def warm_cache(seed: int) -> Case:
    """The same prompts once more while the prefix cache holds them: the second pass is what was saved."""
    made = drawn(seed, prompt=(150, 3000))
    number = 120
    once = made.load(number, {"process": "at_once"})
    config = replace(made.config, enable_prefix_caching=True)
    rate, e2el_s = made.capacity()
    rate *= float(made.rng.uniform(0.3, 0.7))
    gaps = np.cumsum(made.rng.exponential(1 / rate, 2 * number)) * S
    gaps[number:] += 3 * e2el_s * S
    content = tuple(((row, int(length)),) for row, length in enumerate(once.num_prompt_tokens))
    twice = workload(
        gaps.astype(np.int64),
        np.tile(once.num_prompt_tokens, 2),
        np.tile(once.num_output_tokens, 2),
        content=content + content,
        num_streams=number,
    )
    run = observed(twice, made.run(twice, config), rate)
    second = of_rows(run, np.arange(number, 2 * number))
    if made.rng.random() < 0.5:
        return Case(second, "warm_cache")
    hits = int(second.requests.num_cached_tokens.sum())
    counts = ServerCounts(prefix_hit_tokens=hits, prefix_query_tokens=int(second.requests.num_prompt_tokens.sum()))
    unknown = np.full(number, -1)
    return Case(
        replace(with_columns(second, num_cached_tokens=unknown), counts=counts),
        "warm_cache",
        Facts(shared_prefix_share=0.0),
    )


def seats(seed: int) -> Case:
    """max_num_seqs below what the load has in flight, and a pool with room."""
    made = drawn(seed)
    cap = int(made.rng.choice([4, 8, 16, 32, 64]))
    config = replace(made.config, max_num_seqs=cap)
    if made.rng.random() < 0.5:
        places = round(cap * float(made.rng.uniform(1.1, 4))) + 1
        load, records = made.closed(places, max(6 * places, 120), config)
        return Case(observed(load, records), "seats")
    rate, _ = made.capacity(config, places=2 * cap)
    rate *= float(made.rng.uniform(1.0, 1.5))
    load = made.load(max(30 * cap, 400), rate)
    return Case(observed(load, made.run(load, config), rate), "seats")


def kv_pool(seed: int) -> Case:
    """A pool that holds 30 to 90 % of what the closed loop has in flight."""
    made = drawn(seed, output=(100, 500))
    places = int(made.rng.choice([16, 32, 64]))
    holds = float(made.rng.uniform(0.3, 0.9)) * places * (made.prompt + made.output / 2)
    blocks = max(int(holds / 16), (made.prompt * 3 // 2 + made.output * 3 // 2) // 16 + 2) + 1
    load, records = made.closed(places, 6 * places, replace(made.config, num_gpu_blocks=blocks))
    return Case(observed(load, records), "kv_pool")


def preempt_loop(seed: int) -> Case:
    """Long prompts that are let in when their first chunk fits (U02)."""
    made = drawn(seed)
    prompt, output = int(made.rng.integers(60_000, 120_000)), int(made.rng.integers(800, 1200))
    fit = int(made.rng.integers(3, 6))
    pool = round(prompt * (fit + 0.44))
    config = replace(
        made.config, num_gpu_blocks=pool // 16 + 1, scheduler_reserve_full_isl=False, max_model_len=prompt + output
    )
    number = fit + 1
    load = workload(np.zeros(number, np.int64), [prompt] * number, [output] * number)
    return Case(observed(load, made.run(load, config)), "preempt_loop")


def overload(seed: int) -> Case:
    """More than the hardware computes, where seats, blocks and budget are generous."""
    made = drawn(seed, prompt=(500, 3000), output=(40, 150))
    rate, _ = made.capacity(places=512)
    rate *= float(made.rng.uniform(1.1, 2.5))
    load = made.load(1500, rate)
    return Case(observed(load, made.run(load), rate), "overload")


def empty_streams(seed: int) -> Case:
    """2 to 70 % of the answers are empty and count as finished."""
    run = healthy_open(seed).run
    rng = np.random.default_rng(seed)
    hit = rng.random(len(run.requests)) < float(rng.uniform(0.02, 0.7))
    return Case(
        with_columns(
            run,
            ttft_ns=np.where(hit, 0, run.requests.ttft_ns),
            e2el_ns=np.where(hit, 2_000_000, run.requests.e2el_ns),
            end_ns=np.where(hit, 2_000_000, run.requests.end_ns),
            num_output_tokens=np.where(hit, 0, run.requests.num_output_tokens),
            num_output_tokens_asked=np.full(len(hit), -1),
        ),
        "empty_streams",
    )


def hidden_queue(seed: int) -> Case:
    """A rate above what the concurrency limit lets through: the wait is at the client."""
    made = drawn(seed)
    places = int(made.rng.choice([2, 4, 8, 16, 32]))
    rate, _ = made.capacity(places=places)
    rate *= float(made.rng.uniform(1.0, 3))
    load = made.load(max(20 * places, 150), rate, max_concurrency=places)
    return Case(observed(load, made.run(load), rate), "hidden_queue")


def budget(seed: int) -> Case:
    """A step's budget of 32 to 128 tokens for prompts of a thousand and more."""
    made = drawn(seed, prompt=(1000, 4000), output=(20, 80))
    tokens = int(made.rng.choice([32, 64, 96, 128]))
    config = replace(made.config, max_num_batched_tokens=tokens, max_num_seqs=min(tokens, 64))
    rate, _ = made.capacity(config, places=8)
    rate *= float(made.rng.uniform(0.3, 0.8))
    load = made.load(200, rate)
    return Case(observed(load, made.run(load, config), rate), "budget")


class ColdCost:
    """A cost model whose first steps take so much longer: compilation, graph capture, loading."""

    name = "cold"
    calibrated = False

    def __init__(self, cost: CostModel, extra_s: float, num_steps: int) -> None:
        self.cost, self.extra_s, self.left = cost, extra_s, num_steps

    def step_time_s(self, shape: Any) -> Any:
        self.left -= 1
        return self.cost.step_time_s(shape) + (self.extra_s if self.left >= 0 else 0.0)

    def describe(self) -> dict[str, Any]:
        return self.cost.describe()


def cold_start(seed: int) -> Case:
    """The first one to three steps take 2 to 30 s longer."""
    made = drawn(seed, prompt=(100, 1000))
    rate, e2el_s = made.capacity()
    rate *= float(made.rng.uniform(0.2, 0.5))
    extra_s = float(made.rng.uniform(2, 15))
    number = int(np.clip(15 * rate * max(extra_s, e2el_s), 300, 2000))
    cold = replace(made, cost=ColdCost(made.cost, extra_s, int(made.rng.integers(1, 4))))
    load = made.load(number, rate)
    return Case(observed(load, cold.run(load), rate), "cold_start")


def units(seed: int) -> Case:
    """Some of the times in milliseconds where seconds were meant, or the other way round."""
    run = healthy_open(seed).run
    table = run.requests
    which = int(np.random.default_rng(seed).integers(4))
    if which == 0:
        return Case(with_columns(run, ttft_ns=table.ttft_ns * 1000), "units")
    if which == 1:
        return Case(with_columns(run, e2el_ns=table.e2el_ns // 1000, end_ns=table.end_ns // 1000), "units")
    if which == 2:
        return Case(with_columns(run, chunk_ns=table.chunk_ns * 1000), "units")
    longer = {name: getattr(table, name) * 1000 for name in ("ttft_ns", "e2el_ns", "end_ns", "chunk_ns")}
    return Case(replace(with_columns(run, **longer), duration_ns=run.makespan_ns), "units")


def failed(seed: int) -> Case:
    """3 to 60 % of the requests fail soon after they were sent."""
    run = healthy_open(seed).run
    rng = np.random.default_rng(seed)
    hit = rng.random(len(run.requests)) < float(rng.uniform(0.03, 0.6))
    table = run.requests
    return Case(
        with_columns(
            run,
            ending=np.where(hit, int(Ending.REFUSED), table.ending),
            ttft_ns=np.where(hit, -1, table.ttft_ns),
            e2el_ns=np.where(hit, -1, table.e2el_ns),
            end_ns=np.where(hit, 3_000_000, table.end_ns),
            http_status=np.where(hit, 503, 200),
        ),
        "failed",
    )


def late_sends(seed: int) -> Case:
    """A client that stalls now and then and sends late what had become due."""
    made = drawn(seed)
    rate, e2el_s = made.capacity()
    rate *= float(made.rng.uniform(0.2, 0.5))
    load = made.load(400, rate)
    stall = float(made.rng.uniform(0.5, 3)) * e2el_s * S
    sent = (np.ceil(load.arrival_ns / stall) * stall).astype(np.int64)
    shifted = replace(load, arrival_ns=sent)
    run = observed(shifted, made.run(shifted), rate)
    return Case(with_columns(run, due_ns=load.arrival_ns), "late_sends")


def few_requests(seed: int) -> Case:
    """A run of 5 to 25 requests."""
    made = drawn(seed)
    load, records = made.closed(2, int(made.rng.integers(8, 26)))
    return Case(observed(load, records), "few_requests")


def router(seed: int) -> Case:
    """Taking turns sends all heavy requests to one engine."""
    made = drawn(seed)
    engines = int(made.rng.integers(2, 5))
    config = replace(made.config, max_num_seqs=16)
    number = 400
    rate, _ = made.capacity(config, places=32)
    base = made.load(number, {"process": "poisson", "rate": rate * engines * float(made.rng.uniform(0.35, 0.55))})
    heavy = np.arange(number) % engines == 0
    factor = float(made.rng.uniform(4, 8))
    outputs = np.where(heavy, base.num_output_tokens * factor, base.num_output_tokens / 2).astype(np.int64).clip(min=1)
    load = workload(base.arrival_ns, base.num_prompt_tokens, outputs)
    records = made.run(load, config, num_replicas=engines, router="round_robin")
    return Case(observed(load, records, None), "router", engine_facts(records))


def engine_facts(records: Records) -> Facts:
    """Mean running and waiting requests of each engine."""
    means = {"num_running": [], "num_waiting": []}
    for replica in records.replicas:
        held = replica.steps.end_ns - replica.steps.start_ns
        for name, column in means.items():
            column.append(float(np.dot(getattr(replica.steps, name), held)) / records.end_ns)
    return Facts(running_by_engine=tuple(means["num_running"]), waiting_by_engine=tuple(means["num_waiting"]))


def not_streamed(seed: int) -> Case:
    """A proxy that buffers: every answer comes in one piece."""
    run = healthy_open(seed).run
    table = run.requests
    whole = observed_requests(
        len(table),
        chunks=[table.e2el_ns[row : row + 1] for row in range(len(table))],
        **{
            item.name: getattr(table, item.name)
            for item in fields(ObservedRequests)
            if item.name not in ("errors", "chunk_offsets", "chunk_ns", "chunk_tokens", "labels", "ttft_ns")
        },
        ttft_ns=table.e2el_ns,
    )
    return Case(replace(run, requests=whole), "not_streamed")


def healthy_open(seed: int) -> Case:
    """A healthy open loop, always."""
    made = drawn(seed)
    rate, e2el_s = made.capacity()
    rate *= float(made.rng.uniform(0.3, 0.7))
    load = made.load(int(np.clip(12 * rate * e2el_s, 200, 1500)), rate)
    return Case(observed(load, made.run(load), rate), "")


PLANTED: dict[str, Callable[[int], Case]] = {
    build.__name__: build
    for build in (
        client_cap,
        warm_cache,
        seats,
        kv_pool,
        preempt_loop,
        overload,
        empty_streams,
        hidden_queue,
        budget,
        cold_start,
        units,
        failed,
        late_sends,
        few_requests,
        router,
        not_streamed,
    )
}
