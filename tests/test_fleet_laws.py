"""Laws of fleets: whatever crashes, scales and routes, each request ends once and nothing is left held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import scheduler_configs
from test_cluster import COST, HORIZON_NS, MS, S, clients, same, systems

from windtunnel.sim.engine.swap import SwapConfig
from windtunnel.sim.fleet.autoscaler import METRICS, Autoscaler
from windtunnel.sim.fleet.faults import Crash, Fault, Slowdown
from windtunnel.sim.fleet.fleet import ON_CRASH, Fleet, Pool
from windtunnel.sim.fleet.health import DEAD_REPLICAS, HealthChecks
from windtunnel.sim.fleet.records import Death, Fate, IntArray, LifeTable, table_rows
from windtunnel.sim.fleet.routers import ROUTERS, Routing
from windtunnel.sim.records import Outcome, Records, table_columns
from windtunnel.sim.simulate import serve
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload

NAMES = ("big", "small", "spare")
LOST = (Fate.LOST, Fate.UNHEARD)


@st.composite
def autoscalers(draw: st.DrawFn, num_replicas: int) -> Autoscaler:
    metric = draw(st.sampled_from(METRICS))
    least = draw(st.integers(1 if metric == "kv_usage" else 0, num_replicas))
    return Autoscaler(
        metric,
        draw(st.sampled_from([0.05, 0.5, 1.0] if metric == "kv_usage" else [0.5, 1, 3])),
        max_replicas=draw(st.integers(max(num_replicas, 1), 4)),
        min_replicas=least,
        start_up_ns=draw(st.sampled_from([0, 30 * MS, 500 * MS])),
        interval_ns=draw(st.sampled_from([10, 70])) * MS,
        metric_delay_ns=draw(st.sampled_from([0, 15 * MS])),
        up_stabilization_ns=draw(st.sampled_from([0, 100 * MS])),
        down_stabilization_ns=draw(st.sampled_from([0, 100 * MS])),
        up_limit_replicas=draw(st.integers(1, 4)),
        up_period_ns=50 * MS,
        drain_timeout_ns=draw(st.sampled_from([None, 0, 40 * MS])),
    )


@st.composite
def fault_lists(draw: st.DrawFn, pools: tuple[Pool, ...]) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    for _ in range(draw(st.integers(0, 4))):
        pool = draw(st.sampled_from(pools))
        most = pool.system.num_replicas if pool.autoscaler is None else pool.autoscaler.max_replicas
        place, at_ns = draw(st.integers(0, most - 1)), draw(st.sampled_from([0, 1, 7, 20, 40, 90, 400])) * MS
        if draw(st.booleans()):
            faults.append(Crash(pool.name, place, at_ns, draw(st.sampled_from([None, 1, 50 * MS]))))
        else:
            end_ns = draw(st.sampled_from([None, at_ns + 60 * MS]))
            faults.append(Slowdown(pool.name, place, at_ns, end_ns, draw(st.sampled_from([0.5, 2.0, 7.0]))))
    return tuple(faults)


@st.composite
def routings(draw: st.DrawFn, **fixed: Any) -> Routing:
    values: dict[str, Any] = {
        "router": draw(st.sampled_from(ROUTERS)),
        "max_requests_per_replica": draw(st.sampled_from([None, None, 1, 3])),
        "max_waiting_requests": draw(st.sampled_from([None, None, 0, 2])),
        "stats_interval_ns": draw(st.sampled_from([0, 1, 30])) * MS,
        "stats_delay_ns": draw(st.sampled_from([0, 5 * MS])),
        "prefix_block_tokens": draw(st.sampled_from([1, 16])),
        "prefix_capacity_blocks": draw(st.sampled_from([1, 5, 1000])),
        "seed": draw(st.integers(0, 3)),
    }
    return Routing(**{**values, **fixed})


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Fleets of every kind; requests must fit the KV pool of each of their engines, so pools differ in all else."""
    first = draw(systems())
    pools = []
    for name in NAMES[: draw(st.integers(1, 2))]:
        system = first
        if pools:
            seats = draw(st.integers(1, first.config.max_num_seqs))
            limits = {"max_num_seqs": seats, "max_num_active_seqs": None}
            system = replace(first, config=replace(first.config, **limits), num_replicas=draw(st.integers(1, 2)))
        scaler = draw(st.one_of(st.none(), autoscalers(system.num_replicas)))
        pools.append(Pool(name, system, scaler, weight=draw(st.sampled_from([1.0, 2.5]))))
    faults = draw(fault_lists(tuple(pools)))
    on_crash, attempts = draw(st.sampled_from(ON_CRASH)), draw(st.integers(1, 3))
    health = HealthChecks(
        draw(st.sampled_from([0, 10, 30, 300])) * MS, draw(st.integers(1, 3)), draw(st.sampled_from(DEAD_REPLICAS))
    )
    network_ns = draw(st.sampled_from([0, 0, 1, 4 * MS]))
    return Fleet(tuple(pools), draw(routings()), faults, on_crash, attempts, health=health, network_ns=network_ns)


def served(work: Workload, fleet: Fleet) -> tuple[Records, list[Any]]:
    """The records, and every scheduler that there was."""
    made: list[Any] = []

    class Watched(System):
        __slots__ = ()

        def make_scheduler(self) -> Any:
            made.append(super().make_scheduler())
            return made[-1]

    def watched(system: System) -> Watched:
        return Watched(**{name: getattr(system, name) for name in System.__dataclass_fields__})

    pools = tuple(replace(pool, system=watched(pool.system)) for pool in fleet.pools)
    return serve(work, replace(fleet, pools=pools), horizon_ns=HORIZON_NS), made


def noticed_ns(fleet: Fleet, lives: LifeTable) -> IntArray:
    """When the router gave up each replica at the latest; far off for those that are still there."""
    times = []
    for ready_ns, gone_ns, death in zip(lives.ready_ns, lives.gone_ns, lives.death, strict=True):
        noticed = fleet.health.noticed_ns(int(ready_ns), int(gone_ns)) if death == Death.CRASH else int(gone_ns)
        times.append(np.iinfo(np.int64).max if gone_ns < 0 else noticed if ready_ns >= 0 else int(gone_ns))
    return np.array(times, np.int64)


@given(st.data())
def test_each_request_ends_once_and_no_block_stays_held(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    work = data.draw(clients(fleet.pools[0].system.config))
    records, schedulers = served(work, fleet)
    table, of_fleet = records.requests, records.fleet
    assert of_fleet is not None
    assert table.request.tolist() == list(range(len(work)))
    is_finished = table.outcome == Outcome.FINISHED
    room = fleet.pools[0].system.config.max_model_len - work.num_prompt_tokens
    assert (table.num_output_tokens[is_finished] == np.minimum(work.num_output_tokens, room)[is_finished]).all()
    assert (table.num_output_tokens <= work.num_output_tokens).all()
    ended = table.finish_ns >= 0
    assert (ended == (table.outcome != Outcome.UNFINISHED)).all()
    assert ((table.finish_ns >= table.arrival_ns) | ~ended).all()
    if ended.all():
        for scheduler, gone_ns in zip(schedulers, of_fleet.lives.gone_ns.tolist(), strict=True):
            assert scheduler.num_requests == 0
            if gone_ns >= 0:
                continue  # what a dead engine's step held went with it
            assert scheduler.pool.num_free == scheduler.config.num_usable_blocks
            if isinstance(fleet.pools[0].system.batching, SwapConfig):
                assert scheduler.cpu_pool.num_free == fleet.pools[0].system.batching.num_cpu_blocks


@given(st.data())
def test_stays_tell_where_each_request_was_and_how_it_ended(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    work = data.draw(clients(fleet.pools[0].system.config))
    records = serve(work, fleet, horizon_ns=HORIZON_NS)
    table, of_fleet = records.requests, records.fleet
    assert of_fleet is not None
    stays, lives = of_fleet.stays, of_fleet.lives
    assert len(lives) == len(records.replicas)
    gone_ns = np.where(lives.gone_ns < 0, np.iinfo(np.int64).max, lives.gone_ns)
    assert (stays.sent_ns >= lives.ready_ns[stays.replica]).all()
    assert (lives.ready_ns[stays.replica] >= 0).all()
    is_unheard = stays.fate == Fate.UNHEARD
    assert (stays.sent_ns[is_unheard] >= gone_ns[stays.replica[is_unheard]]).all()
    assert (stays.sent_ns[~is_unheard] <= gone_ns[stays.replica[~is_unheard]]).all()
    assert not stays.num_output_tokens[is_unheard].any()
    assert fleet.health.interval_ns or not is_unheard.any()
    assert (lives.death[stays.replica[is_unheard]] == Death.CRASH).all()  # whom it dismissed the router knows of
    assert (stays.ended_ns <= noticed_ns(fleet, lives)[stays.replica]).all()
    assert ((stays.fate == Fate.OPEN) == (stays.ended_ns < 0))[~is_unheard].all()
    assert (np.bincount(stays.request, minlength=len(work)) <= fleet.max_attempts).all()
    for row in range(len(work)):
        mine = np.flatnonzero(stays.request == row)
        fates = stays.fate[mine].tolist()
        assert all(fate in LOST for fate in fates[:-1])  # it is tried again only where it was lost
        assert (stays.sent_ns[mine][1:] > stays.ended_ns[mine][:-1]).all()
        last = fates[-1] if fates else None
        outcome = Outcome(int(table.outcome[row]))
        expected = {
            Outcome.FINISHED: (Fate.FINISHED,),
            Outcome.LOST: LOST,
            Outcome.UNFINISHED: (Fate.OPEN, *LOST, None),
            Outcome.ABORTED: (Fate.ABORTED, *LOST, None),
            Outcome.REJECTED: (Fate.REJECTED, *LOST, None),
        }[outcome]
        assert last in expected
        if last is not None and last not in LOST:
            assert table.replica[row] == stays.replica[mine[-1]]


@given(st.data())
def test_a_replica_serves_only_while_it_is_there(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    work = data.draw(clients(fleet.pools[0].system.config))
    records = serve(work, fleet, horizon_ns=HORIZON_NS)
    assert records.fleet is not None
    lives = records.fleet.lives
    for number, replica in enumerate(records.replicas):
        steps = replica.steps
        if len(steps):
            assert steps.start_ns[0] >= lives.ready_ns[number] >= 0
            assert lives.gone_ns[number] < 0 or steps.end_ns[-1] <= lives.gone_ns[number]
    scaled = [pool.autoscaler for pool in fleet.pools]
    for number, scaler in enumerate(scaled):
        mine = lives.pool == number
        dismissed = mine & (lives.death == Death.SCALED_DOWN)
        assert scaler is not None or not dismissed.any()
        starts, ends = lives.ordered_ns[mine], np.where(lives.draining_ns < 0, lives.gone_ns, lives.draining_ns)[mine]
        times = np.unique(starts)
        there = [int(((starts <= at) & ((ends < 0) | (ends > at))).sum()) for at in times]
        most = fleet.pools[number].system.num_replicas if scaler is None else scaler.max_replicas
        assert max(there) <= most


@given(st.data())
def test_the_same_fleet_gives_the_same_records(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    work = data.draw(clients(fleet.pools[0].system.config))
    first, second = (serve(work, fleet, horizon_ns=HORIZON_NS) for _ in range(2))
    assert same(first, second)
    assert first.fleet is not None
    assert second.fleet is not None
    for name in ("lives", "stays", "scalings"):
        assert table_rows(getattr(first.fleet, name)) == table_rows(getattr(second.fleet, name))


@given(st.data())
def test_a_fleet_of_one_pool_serves_as_its_system_does(data: st.DataObject) -> None:
    system = data.draw(systems(max_num_queued_reqs=None, max_num_queued_tokens=None))
    work = data.draw(clients(system.config))
    fleet = Fleet((Pool("all", system),), Routing(system.router))
    assert same(serve(work, system, horizon_ns=HORIZON_NS), serve(work, fleet, horizon_ns=HORIZON_NS))


@given(st.data())
def test_one_replica_behind_any_router_is_the_engine_alone(data: st.DataObject) -> None:
    config = data.draw(scheduler_configs(async_scheduling=data.draw(st.booleans())))
    work = data.draw(clients(config))
    alone = serve(work, System(config, COST), horizon_ns=HORIZON_NS)
    for router in set(ROUTERS) - {"shared_queue"}:
        fleet = Fleet((Pool("one", System(config, COST)),), Routing(router))
        assert same(alone, serve(work, fleet, horizon_ns=HORIZON_NS)), router


@given(st.data())
def test_faults_that_hit_nobody_change_nothing(data: st.DataObject) -> None:
    """Crashes after the end, and a slowdown by a factor of 1."""
    system = data.draw(systems())
    work = data.draw(clients(system.config))
    pool, routing = Pool("all", system), data.draw(routings())
    late = Crash("all", 0, 10 * HORIZON_NS)
    plain = serve(work, Fleet((pool,), routing))
    faulty = serve(work, Fleet((pool,), routing, (late, Slowdown("all", 0, 0, None, 1.0))))
    assert plain.stalled or same(plain, replace(faulty, end_ns=plain.end_ns))


@given(st.data())
def test_the_network_delays_what_the_client_sees_and_changes_nothing_else(data: st.DataObject) -> None:
    """There and back, as if every request had been sent so much later."""
    config, network_ns = data.draw(scheduler_configs()), data.draw(st.sampled_from([1, 3 * MS, S]))
    work = data.draw(clients(config))
    arrival_ns, previous = np.maximum.accumulate(work.arrival_ns.clip(min=0)), np.full(len(work), -1)
    work = replace(work, arrival_ns=arrival_ns, previous=previous, request_timeout_ns=None, max_concurrency=None)
    fleet = Fleet((Pool("all", System(config, COST, num_replicas=2)),), Routing("round_robin"), network_ns=network_ns)
    table = serve(work, fleet, horizon_ns=HORIZON_NS).requests
    later = replace(work, arrival_ns=work.arrival_ns + 2 * network_ns)
    expected = serve(later, replace(fleet, network_ns=0), horizon_ns=HORIZON_NS).requests
    assert table.arrival_ns.tolist() == work.arrival_ns.tolist()
    is_refused = expected.replica < 0
    for name, column in table_columns(expected).items():
        if name not in ("arrival_ns", "due_ns"):
            assert getattr(table, name)[~is_refused].tolist() == column[~is_refused].tolist(), name
    assert table.outcome.tolist() == expected.outcome.tolist()


@given(st.data())
def test_health_checks_of_a_fleet_in_which_nobody_crashes_change_nothing(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    fleet = replace(fleet, faults=tuple(fault for fault in fleet.faults if isinstance(fault, Slowdown)))
    work = data.draw(clients(fleet.pools[0].system.config))
    first, second = (
        serve(work, replace(fleet, health=health), horizon_ns=HORIZON_NS)
        for health in (HealthChecks(0), HealthChecks(7 * MS, 2, "hang"))
    )
    assert same(first, second)


@given(st.data())
def test_no_router_looks_at_the_length_of_an_answer(data: st.DataObject) -> None:
    """The first choice for every request of a burst is the same whatever the answers' true lengths are."""
    config = data.draw(scheduler_configs())
    work = data.draw(clients(config))
    shorter = replace(
        work,
        arrival_ns=np.where(work.previous < 0, 0, -1),
        request_timeout_ns=None,
        max_concurrency=None,
        num_output_tokens=np.ones(len(work), np.int64),
    )
    whole = replace(shorter, num_output_tokens=work.num_output_tokens)
    fleet = Fleet((Pool("all", System(config, COST, num_replicas=3)),), data.draw(routings(max_waiting_requests=None)))
    chosen = []
    for one in (shorter, whole):
        stays = serve(one, fleet, horizon_ns=HORIZON_NS).fleet.stays  # type: ignore[union-attr]
        at_once = stays.sent_ns == 0
        chosen.append(dict(zip(stays.request[at_once].tolist(), stays.replica[at_once].tolist(), strict=True)))
    assert chosen[0] == chosen[1]


def test_requests_are_retried_in_the_order_in_which_they_were_sent() -> None:
    from windtunnel.sim.engine.config import SchedulerConfig
    from windtunnel.sim.workload import workload

    config = SchedulerConfig(num_gpu_blocks=1000, max_num_seqs=1, max_num_batched_tokens=100)
    work = workload(np.arange(6) * MS, np.full(6, 10), np.full(6, 5))
    fleet = Fleet(
        (Pool("all", System(config, COST, num_replicas=2)),),
        Routing("round_robin", max_requests_per_replica=3),
        (Crash("all", 0, 7 * MS),),
        health=HealthChecks(0),
    )
    records = serve(work, fleet)
    assert records.fleet is not None
    stays = records.fleet.stays
    assert stays.request.tolist() == [0, 1, 2, 3, 4, 5, 0, 2, 4]
    assert (records.requests.outcome == Outcome.FINISHED).all()
    assert records.requests.replica.tolist() == [1] * 6


@pytest.mark.parametrize("name", ["lives", "stays", "scalings"])
def test_tables_of_a_fleet_have_columns_of_one_length(name: str) -> None:
    from windtunnel.sim.engine.config import SchedulerConfig
    from windtunnel.sim.workload import workload

    work = workload([0, 0], [10, 10], [3, 3])
    records = serve(work, Fleet((Pool("all", System(SchedulerConfig(), COST)),)))
    table = getattr(records.fleet, name)
    assert {len(column) for column in table_columns(table).values()} == {len(table)}
