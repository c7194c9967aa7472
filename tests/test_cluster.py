"""Replicas behind a router with limits before them: laws for every policy, known choices, vLLM's score rewritten."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import scheduler_configs, workloads

from windtunnel.sim.cluster import Cluster
from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.cost.swap import SwapCost
from windtunnel.sim.engine.batch_queue import QueuePolicy
from windtunnel.sim.engine.batches import BatchExecution
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.dynamic import DynamicConfig
from windtunnel.sim.engine.protocols import EngineLoad
from windtunnel.sim.engine.request import Request
from windtunnel.sim.engine.static import StaticConfig
from windtunnel.sim.engine.swap import SwapConfig
from windtunnel.sim.metrics.load import in_flight as lives
from windtunnel.sim.metrics.load import level_over_time
from windtunnel.sim.records import Outcome, Records, table_columns
from windtunnel.sim.simulate import RequestTooLarge, run, serve
from windtunnel.sim.speculation import Acceptance, Drafting, FixedDraftCost
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload, workload
from windtunnel.sim.world import World

MS = 1_000_000
S = 1_000_000_000
COST = AffineCost(base_s=3e-3, token_s=1.7e-5, seq_s=1e-5, decode_context_s=4e-7, prefill_pair_s=1e-8)
HORIZON_NS = 20 * S


def engine(**changes: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"num_gpu_blocks": 10_000, "max_num_seqs": 64, **changes})


@st.composite
def batchings(draw: st.DrawFn) -> StaticConfig | DynamicConfig | SwapConfig:
    kind = draw(st.sampled_from(["static", "dynamic", "swap", "prefill_first"]))
    execution = BatchExecution(answers=draw(st.sampled_from(["together", "streamed"])))
    if kind == "static":
        timeout_ns = draw(st.one_of(st.none(), st.integers(0, 60).map(lambda ms: ms * MS)))
        return StaticConfig(draw(st.integers(1, 6)), timeout_ns, execution)
    if kind == "dynamic":
        policy = QueuePolicy(
            draw(st.sampled_from([0, 0, 2])),
            draw(st.sampled_from([0, 0, 3_000, 40_000])),
            draw(st.sampled_from(["REJECT", "DELAY"])),
        )
        delay = draw(st.sampled_from([0, 1_000, 25_000]))
        return DynamicConfig(
            draw(st.integers(1, 6)),
            max_queue_delay_microseconds=delay,
            default_queue_policy=policy,
            instance_count=draw(st.integers(1, 2)),
            execution=execution,
        )
    if kind == "swap":
        return SwapConfig(draw(st.integers(0, 60)))
    return SwapConfig(0, "recompute", prefill_first=True)


@st.composite
def systems(draw: st.DrawFn, **fixed: Any) -> System:
    """Deployments of every kind that there is, small enough that all of their limits bite now and then."""
    batching = draw(st.one_of(st.none(), batchings()))
    knobs: dict[str, Any] = {}
    if batching is None:
        knobs = {
            "async_scheduling": draw(st.booleans()),
            "num_speculative_tokens": draw(st.sampled_from([0, 1, 3])),
            "spec_method": draw(st.sampled_from(["ngram", "eagle3", "draft_model"])),
            "pipeline_parallel_size": draw(st.sampled_from([1, 1, 2, 3])),
            "use_v2_model_runner": draw(st.booleans()),
        }
    elif isinstance(batching, SwapConfig) and batching.prefill_first:
        knobs = {"enable_chunked_prefill": False, "max_num_batched_tokens": 500, "max_num_scheduled_tokens": None}
    if draw(st.booleans()):  # so few blocks that requests preempt each other
        knobs["num_gpu_blocks"] = draw(st.integers(6, 30))
    config = draw(scheduler_configs(**knobs))
    num_drafts = config.num_speculative_tokens
    rate = draw(st.sampled_from([0.0, 0.6, 1.0]))
    drafting = Drafting(
        Acceptance.fixed(rate, num_drafts), num_drafts, FixedDraftCost(1e-4), seed=draw(st.integers(0, 3))
    )
    values: dict[str, Any] = {
        "batching": batching,
        "swap_cost": SwapCost(1000, 1e9),
        "drafting": drafting if num_drafts else None,
        "num_replicas": draw(st.sampled_from([1, 1, 2, 3])),
        "router": draw(st.sampled_from(["vllm", "round_robin"])),
        "max_num_queued_reqs": draw(st.sampled_from([None, None, None, 0, 1, 3, 6])),
        "max_num_queued_tokens": draw(st.sampled_from([None, None, None, 0, 50, 300])),
    }
    return System(config, COST, **{**values, **fixed})


@st.composite
def clients(draw: st.DrawFn, config: SchedulerConfig) -> Workload:
    """Workloads with a client's patience, a client's limit, and turns that follow others."""
    work = draw(workloads(config))
    n = len(work)
    previous = [draw(st.integers(0, i - 1)) if i and draw(st.integers(0, 3)) == 0 else -1 for i in range(n)]
    return replace(
        work,
        previous=np.array(previous, np.int64),
        think_ns=np.array([draw(st.sampled_from([0, 5 * MS])) if p >= 0 else 0 for p in previous], np.int64),
        arrival_ns=np.where(np.array(previous) >= 0, -1, work.arrival_ns),
        max_concurrency=draw(st.one_of(st.none(), st.none(), st.integers(1, 5))),
        request_timeout_ns=draw(st.sampled_from([None, None, 1, 10 * MS, 37 * MS + 1, 200 * MS])),
    )


def tokens_per_span_row(records: Records, n: int) -> np.ndarray:
    counts = np.zeros(n, np.int64)
    for replica in records.replicas:
        np.add.at(counts, replica.spans.request, replica.spans.count)
    return counts


def same(a: Records, b: Records) -> bool:
    """Whether two runs left the same behind, in every column."""
    tables = [(a.requests, b.requests)]
    for left, right in zip(a.replicas, b.replicas, strict=True):
        tables += [(getattr(left, name), getattr(right, name)) for name in ("steps", "spans", "preemptions", "drafts")]
    return (a.end_ns, a.stalled) == (b.end_ns, b.stalled) and all(
        np.array_equal(column, table_columns(right)[name])
        for left, right in tables
        for name, column in table_columns(left).items()
    )


class Watched(System):
    """A System that remembers its schedulers."""

    __slots__ = ("made",)

    def make_scheduler(self) -> Any:
        scheduler = super().make_scheduler()
        if not hasattr(self, "made"):
            object.__setattr__(self, "made", [])
        self.made.append(scheduler)
        return scheduler


@given(st.data())
def test_conservation(data: st.DataObject) -> None:
    system = data.draw(systems())
    work = data.draw(clients(system.config))
    watched = Watched(**{name: getattr(system, name) for name in System.__dataclass_fields__})
    records = serve(work, watched, horizon_ns=HORIZON_NS)
    table, k = records.requests, system.config.num_speculative_tokens

    assert table.request.tolist() == list(range(len(work)))  # each has one row, so ends once
    was_sent = table.arrival_ns >= 0
    assert (table.outcome[~was_sent] == Outcome.UNFINISHED).all()
    is_finished = table.outcome == Outcome.FINISHED
    room = system.config.max_model_len - work.num_prompt_tokens
    assert (table.num_output_tokens[is_finished] == np.minimum(work.num_output_tokens, room)[is_finished]).all()
    assert (table.num_output_tokens <= work.num_output_tokens).all()
    assert (table.num_output_tokens[table.outcome == Outcome.REJECTED] == 0).all()

    counts = tokens_per_span_row(records, len(work))
    streams = not isinstance(system.batching, (StaticConfig, DynamicConfig)) or (
        system.batching.execution.answers == "streamed"
    )
    if streams:
        assert (counts <= table.num_output_tokens).all()
        assert (table.num_output_tokens <= counts * (1 + k)).all()
    else:
        assert counts.tolist() == is_finished.astype(int).tolist()

    ended = table.finish_ns >= 0
    assert (ended == (table.outcome != Outcome.UNFINISHED)).all()
    took_ns = (table.finish_ns - table.arrival_ns)[ended]
    assert (took_ns >= 0).all()
    if work.request_timeout_ns is not None:
        assert (took_ns <= work.request_timeout_ns).all()
        is_aborted = table.outcome == Outcome.ABORTED
        assert (table.finish_ns - table.arrival_ns)[is_aborted].tolist() == [work.request_timeout_ns] * is_aborted.sum()
    else:
        assert not (table.outcome == Outcome.ABORTED).any()

    assert in_flight(records, work).max(initial=0) <= (work.max_concurrency or len(work))
    if system.max_num_queued_reqs is not None:
        assert in_server(records).max(initial=0) <= system.max_num_queued_reqs
    for replica in records.replicas:
        steps = replica.steps
        assert (steps.end_ns > steps.start_ns).all() or system.config.pipeline_parallel_size > 1
        assert (steps.end_ns >= steps.start_ns).all()
        assert (steps.start_ns[1:] >= steps.end_ns[:-1]).all()
        assert steps.num_draft_tokens.sum() == replica.drafts.num_verified.sum()
        assert steps.num_accepted_tokens.sum() == replica.drafts.num_accepted.sum()
        assert (steps.num_accepted_tokens <= steps.num_draft_tokens).all()
        assert (replica.drafts.num_accepted <= replica.drafts.num_verified).all()
    in_system = [int(((table.replica == number) & was_sent).sum()) for number in range(system.num_replicas)]
    assert sum(in_system) + (table.replica[was_sent] < 0).sum() + (~was_sent).sum() == len(work)
    if ended.all():
        for scheduler in watched.made:
            assert scheduler.num_requests == 0
            assert scheduler.pool.num_free == scheduler.config.num_usable_blocks
            if isinstance(system.batching, SwapConfig):
                assert scheduler.cpu_pool.num_free == system.batching.num_cpu_blocks


def in_server(records: Records) -> np.ndarray:
    """Requests that have a replica, after each of them came."""
    table = records.requests
    taken = np.flatnonzero((table.arrival_ns >= 0) & (table.replica >= 0))
    finish_ns = np.where(table.finish_ns < 0, np.iinfo(np.int64).max, table.finish_ns)
    came, went = table.arrival_ns[taken], finish_ns[taken]
    return np.array([((came <= at) & (went > at)).sum() for at in came])


def in_flight(records: Records, work: Workload) -> np.ndarray:
    """Requests that the client has out, after each of them was sent: an answer is there 1 ns after its step."""
    table = records.requests
    sent = np.flatnonzero(table.arrival_ns >= 0)
    finish_ns = np.where(table.finish_ns < 0, np.iinfo(np.int64).max - 1, table.finish_ns)
    came, went = table.arrival_ns[sent], finish_ns[sent] + 1
    return np.array([((came <= at) & (went > at)).sum() for at in came])


@given(st.data())
def test_littles_law_is_exact(data: st.DataObject) -> None:
    system = data.draw(systems())
    records = serve(data.draw(clients(system.config)), system, horizon_ns=HORIZON_NS)
    start_ns, end_ns = lives(records)
    times_ns, level = level_over_time(start_ns, end_ns)
    in_flight_ns = int((np.diff(times_ns) * level[:-1]).sum())  # mean in flight x duration
    assert in_flight_ns == int((end_ns - start_ns).sum())  # requests x mean latency


@given(st.data())
def test_the_same_seed_gives_the_same_records(data: st.DataObject) -> None:
    system = data.draw(systems())
    work = data.draw(clients(system.config))
    assert same(serve(work, system, horizon_ns=HORIZON_NS), serve(work, system, horizon_ns=HORIZON_NS))


HASHED = """
import hashlib, numpy as np
from test_cluster import crowd, everything
from windtunnel.sim.records import table_columns
from windtunnel.sim.simulate import serve
records, digest = serve(crowd(), everything()), hashlib.sha256()
tables = [records.requests, *(t for r in records.replicas for t in (r.steps, r.spans, r.preemptions, r.drafts))]
for table in tables:
    for column in table_columns(table).values():
        digest.update(column.tobytes())
print(len(records.replicas[0].preemptions), int(records.replicas[0].drafts.num_verified.sum()), digest.hexdigest())
"""


def crowd() -> Workload:
    rng = np.random.default_rng(3)
    due_ns = np.cumsum(rng.exponential(8 * MS, 120)).astype(np.int64)
    prompts, outputs = rng.integers(10, 200, 120), rng.integers(5, 100, 120)
    return workload(due_ns, prompts, outputs, request_timeout_ns=3 * S)


def everything() -> System:
    """Replicas with drafts, pipelines and too few blocks."""
    config = engine(
        num_gpu_blocks=40, max_num_seqs=12, num_speculative_tokens=3, spec_method="eagle3", async_scheduling=True
    )
    config = replace(config, pipeline_parallel_size=2, use_v2_model_runner=True, max_model_len=400)
    return System(config, COST, drafting=Drafting(Acceptance.fixed(0.6, 3), 3), num_replicas=2)


def test_results_do_not_depend_on_the_hash_seed() -> None:
    here = str(Path(__file__).parent)
    told = [
        subprocess.run(
            [sys.executable, "-c", HASHED],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": here, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    num_preemptions, num_drafts, _ = told[0].split()
    assert int(num_preemptions) > 0
    assert int(num_drafts) > 0


@given(st.data())
def test_one_replica_behind_any_router_is_the_engine_alone(data: st.DataObject) -> None:
    config = data.draw(scheduler_configs(async_scheduling=data.draw(st.booleans())))
    work = data.draw(clients(config))
    alone = run(work, config, COST, horizon_ns=HORIZON_NS)
    for router in ("vllm", "round_robin"):
        assert same(alone, serve(work, System(config, COST, router=router), horizon_ns=HORIZON_NS))


@given(st.data())
def test_two_replicas_serve_each_request_twice_as_one_serves_it_once(data: st.DataObject) -> None:
    system = data.draw(systems(num_replicas=1, max_num_queued_reqs=None, max_num_queued_tokens=None))
    work = data.draw(workloads(system.config))
    twice = workload(
        *(np.repeat(column, 2) for column in (work.arrival_ns, work.num_prompt_tokens, work.num_output_tokens)),
        max_tokens=np.repeat(work.max_tokens, 2),
        priority=np.repeat(work.priority, 2),
    )
    once = replace(work, content=None)
    undrafted = replace(system, drafting=None, config=replace(system.config, num_speculative_tokens=0))
    alone = serve(once, undrafted, horizon_ns=HORIZON_NS).requests
    both = serve(twice, replace(undrafted, num_replicas=2), horizon_ns=HORIZON_NS).requests
    for name in ("outcome", "scheduled_ns", "first_token_ns", "finish_ns", "num_output_tokens", "num_preemptions"):
        assert np.repeat(getattr(alone, name), 2).tolist() == getattr(both, name).tolist(), name


def test_round_robin_takes_turns() -> None:
    work = workload(np.arange(10) * 50 * MS, np.full(10, 20), np.arange(10) * 30 + 1)
    table = serve(work, System(engine(), COST, num_replicas=3, router="round_robin")).requests
    assert table.replica.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


def test_a_prompt_that_is_too_long_takes_no_turn() -> None:
    work = workload(np.arange(5) * MS, [20, 5000, 20, 5000, 20], np.full(5, 10))
    for router in ("vllm", "round_robin"):
        table = serve(work, System(engine(), COST, num_replicas=2, router=router)).requests
        assert table.replica.tolist() == [0, -1, 1, -1, 0]


def test_a_burst_spreads_evenly() -> None:
    work = workload(np.zeros(30), np.full(30, 20), np.full(30, 10))
    table = serve(work, System(engine(max_num_seqs=2), COST, num_replicas=3)).requests
    assert np.bincount(table.replica).tolist() == [10, 10, 10]


def test_the_router_avoids_the_replica_that_is_busy() -> None:
    # the first replica gets the one long answer; while it lasts the other two have less to do
    work = workload(np.arange(7) * 200 * MS, np.full(7, 20), [2000, *[10] * 6])
    table = serve(work, System(engine(), COST, num_replicas=3)).requests
    assert table.replica[0] == 0
    assert set(table.replica[1:].tolist()) == {1, 2}


class FakeReplica:
    """As much of a replica as a router looks at."""

    def __init__(self) -> None:
        self.num_waiting = self.num_running = 0
        self.num_free = 100
        self.scheduler = self
        self.config = engine(num_gpu_blocks=101)

    @property
    def num_requests(self) -> int:
        return self.num_waiting + self.num_running

    def load(self) -> EngineLoad:
        return EngineLoad(self.num_running, self.num_waiting, self.num_free, 0)

    def submit(self, request: Request) -> None:
        self.num_waiting += 1


class NaiveRouter:
    """vLLM 0.32's ``get_core_engine_for_request`` for one API server, with numbers told every 100 ms at most."""

    def __init__(self, num_engines: int) -> None:
        self.told = [[0, 0, 0.0] for _ in range(num_engines)]
        self.start = 0
        self.heard_ns = -100 * MS

    def choose(self, now_ns: int, engines: list[FakeReplica]) -> int:
        if now_ns - self.heard_ns >= 100 * MS:
            self.heard_ns = now_ns
            self.told = [[e.num_waiting, e.num_running, 1 - e.num_free / 100] for e in engines]
        scores = []
        for engine_, (waiting, running, usage) in zip(engines, self.told, strict=True):
            load = max(engine_.num_requests, waiting + running)
            pressure = 6.0 * max(0.0, usage - 0.5)
            scores.append(load + waiting * pressure)
        order = [*range(self.start, len(engines)), *range(self.start)]
        chosen = min(order, key=lambda number: scores[number])
        self.told[chosen][0] += 1
        self.start = (self.start + 1) % len(engines)
        return chosen


LOADS = st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 6), st.integers(0, 100))


@given(st.integers(2, 4), st.lists(st.one_of(st.integers(0, 150), LOADS), max_size=60))
def test_choices_are_those_of_vllms_score(num_replicas: int, history: list[int | tuple[int, ...]]) -> None:
    world, engines = World(), [FakeReplica() for _ in range(num_replicas)]
    cluster, naive = Cluster(world, engines), NaiveRouter(num_replicas)  # type: ignore[arg-type]
    for row, event in enumerate(history):
        if isinstance(event, tuple):  # so full is an engine now, whatever became of its requests
            changed = engines[event[0] % num_replicas]
            changed.num_waiting, changed.num_running, changed.num_free = event[1:]
            continue
        if event:
            world.run(until=world.now_ns + event * MS)
        want = naive.choose(world.now_ns, engines)
        assert cluster.submit(Request(row, world.now_ns, 10, 10)) == want


def test_the_saturated_throughput_grows_with_the_replicas() -> None:
    # 64 seats each, so a burst of 640 is five waves on two replicas and ten on one
    work = workload(np.zeros(640), np.full(640, 20), np.full(640, 50))
    took_s = [serve(work, System(engine(), ConstantCost(0.01), num_replicas=n)).end_ns / S for n in (1, 2, 5)]
    assert took_s[0] / took_s[1] == pytest.approx(2, rel=0.01)
    assert took_s[0] / took_s[2] == pytest.approx(5, rel=0.01)


# -- limits


def test_of_a_burst_so_many_are_taken_as_the_limit_says() -> None:
    work = workload(np.zeros(10), np.full(10, 20), np.full(10, 5))
    for limit in (0, 1, 4, 10, 11):
        table = serve(work, System(engine(), COST, num_replicas=2, max_num_queued_reqs=limit)).requests
        assert (table.outcome == Outcome.REJECTED).tolist() == [row >= limit for row in range(10)]


def test_an_answer_makes_room_for_the_next() -> None:
    # steps of 10 ms; two tokens take until 20 ms
    work = workload([0, 0, 19 * MS, 20 * MS, 20 * MS + 1], np.full(5, 20), [2, 50, 2, 2, 2])
    table = serve(work, System(engine(), ConstantCost(0.01), max_num_queued_reqs=2)).requests
    assert table.outcome.tolist() == [0, 0, Outcome.REJECTED, Outcome.REJECTED, 0]


def test_whole_prompts_count_until_their_first_token() -> None:
    # 100 tokens are fewer than 150, so a second prompt is taken although 200 are more; at 15 ms the first step is done
    config = engine(max_num_batched_tokens=2048)
    work = workload([0, 0, 0, 9 * MS, 15 * MS], np.full(5, 100), np.full(5, 30))
    table = serve(work, System(config, ConstantCost(0.01), max_num_queued_tokens=150)).requests
    assert table.outcome.tolist() == [0, 0, Outcome.REJECTED, Outcome.REJECTED, 0]


def test_a_prompt_counts_as_a_whole_while_its_chunks_are_computed() -> None:
    config = engine(max_num_batched_tokens=100)  # three steps for 300 tokens; the first token is there at 30 ms
    work = workload([0, 25 * MS, 31 * MS], [300, 10, 10], [50, 5, 5])
    table = serve(work, System(config, ConstantCost(0.01), max_num_queued_tokens=300)).requests
    assert table.outcome.tolist() == [0, Outcome.REJECTED, 0]


def test_a_limit_of_no_tokens_refuses_all() -> None:
    work = workload(np.arange(4) * S, np.full(4, 20), np.full(4, 5))
    table = serve(work, System(engine(), COST, max_num_queued_tokens=0)).requests
    assert (table.outcome == Outcome.REJECTED).all()
    assert table.finish_ns.tolist() == table.arrival_ns.tolist()


def test_a_client_with_a_limit_goes_on_after_refusals() -> None:
    work = workload(np.zeros(6), np.full(6, 20), np.full(6, 5), max_concurrency=2)
    table = serve(work, System(engine(), COST, max_num_queued_reqs=1)).requests
    assert table.outcome.tolist() == [0, *[Outcome.REJECTED] * 5]


# -- wrong systems


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_replicas": 0}, "num_replicas must be at least 1, got 0"),
        ({"router": "random"}, "router must be one of vllm, round_robin, got 'random'"),
        ({"max_num_queued_reqs": -1}, "max_num_queued_reqs must be at least 0, got -1"),
        ({"max_num_queued_tokens": -5}, "max_num_queued_tokens must be at least 0, got -5"),
        ({"config": engine(num_speculative_tokens=2)}, "give a drafting"),
        ({"batching": SwapConfig(10)}, "give a swap_cost"),
        (
            {"config": engine(num_speculative_tokens=2), "drafting": Drafting(Acceptance.fixed(0.5, 3), 3)},
            "drafting proposes 3 tokens, num_speculative_tokens is 2",
        ),
    ],
)
def test_a_wrong_system_says_what_is_wrong(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        System(**{"config": engine(), "cost": COST, **changes})


def test_a_request_that_never_fits_is_refused_before_anything_runs() -> None:
    with pytest.raises(RequestTooLarge, match="request 1 needs"):
        serve(workload([0, 0], [10, 900], [5, 5]), System(engine(num_gpu_blocks=20), COST, num_replicas=2))
