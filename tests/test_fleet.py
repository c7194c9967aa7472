"""Fleets: what each router chooses, what crashes, slow replicas and drains do, and what is said of them afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cluster import COST, MS, S, engine

from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.request import Request
from windtunnel.sim.fleet.autoscaler import Autoscaler
from windtunnel.sim.fleet.faults import Crash, Slowdown
from windtunnel.sim.fleet.fleet import Fleet, Pool
from windtunnel.sim.fleet.health import HealthChecks
from windtunnel.sim.fleet.line import Line
from windtunnel.sim.fleet.records import Death, Fate, FleetRecords
from windtunnel.sim.fleet.routers import ROUTERS, PrefixIndex, Router, Routing, make_router
from windtunnel.sim.fleet.view import IDLE, Backend, Incoming, Stats, sessions
from windtunnel.sim.metrics import Summary, summarize
from windtunnel.sim.metrics.economics import Rates
from windtunnel.sim.records import Outcome, Records
from windtunnel.sim.simulate import RequestTooLarge, serve
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload, workload
from windtunnel.sim.world import World

STEP = ConstantCost(0.01)
AT_ONCE = HealthChecks(interval_ns=0)
"""The router knows of a crash when it happens."""


def backend(number: int, in_flight: int = 0, stats: Stats = IDLE, **changes: Any) -> Backend:
    made = Backend(
        number,
        changes.pop("identity", number),
        **{"weight": 1.0, "max_in_flight": None, "max_model_len": 4096, "probe": lambda: stats, **changes},
    )
    made.num_in_flight, made.stats = in_flight, stats
    return made


def incoming(row: int = 0, prompt: int = 100, session: int = -1, work: Workload | None = None) -> Incoming:
    work = work or workload([0] * (row + 1), [prompt] * (row + 1), [5] * (row + 1))
    return Incoming(row, prompt, 5, 0, session, work)


def router(name: str, **settings: Any) -> Router:
    return make_router(Routing(name, **settings), World())


def chosen(of: Router, backends: list[Backend], count: int = 1, **request: Any) -> list[int]:
    return [of.choose(incoming(**request), backends).number for _ in range(count)]


def fleet_of(
    num_replicas: int, name: str = "least_requests", *, config: SchedulerConfig | None = None, **changes: Any
) -> Fleet:
    routing = {key: changes.pop(key) for key in list(changes) if key in Routing.__dataclass_fields__}
    pool = {key: changes.pop(key) for key in list(changes) if key in Pool.__dataclass_fields__}
    changes.setdefault("health", AT_ONCE)
    system = System(config or engine(), pool.pop("cost", STEP), num_replicas=num_replicas)
    return Fleet((Pool("all", system, **pool),), Routing(name, **routing), **changes)


def of_fleet(records: Records) -> FleetRecords:
    assert records.fleet is not None
    return records.fleet


# -- routers


def test_turns_go_round_those_that_are_there() -> None:
    turns = router("round_robin")
    three = [backend(number) for number in range(3)]
    assert chosen(turns, three, 4) == [0, 1, 2, 0]
    assert chosen(turns, [three[0], three[2]], 3) == [2, 0, 2]
    assert chosen(turns, [*three, backend(7)], 2) == [7, 0]


def test_fewest_requests_are_counted_for_the_weight() -> None:
    """(requests + 1) / weight: 4 of 2.0, 3 of 1.0, 2.5 of 2.0 …"""
    assert chosen(router("least_requests"), [backend(0, 2), backend(1, 1), backend(2, 4, weight=4.0)]) == [2]
    assert chosen(router("least_requests"), [backend(0, 2), backend(1, 1), backend(2, 4)]) == [1]


def test_of_equals_the_next_in_turn_is_taken() -> None:
    assert chosen(router("least_requests"), [backend(number) for number in range(3)], 4) == [0, 1, 2, 0]


def test_the_emptiest_cache_is_what_was_told_last_whatever_is_true_now() -> None:
    told = [backend(0, stats=Stats(0, 0, 0.3)), backend(1, stats=Stats(9, 9, 0.2))]
    told[1].probe = lambda: Stats(0, 0, 0.9)
    told[1].num_in_flight = 50
    assert chosen(router("least_kv"), told, 3) == [1, 1, 1]


def test_two_choices_never_take_the_busiest_and_are_drawn_from_the_seed() -> None:
    three = [backend(0, 5), backend(1, 9), backend(2, 3)]
    picks = chosen(router("power_of_two", seed=1), three, 200)
    assert set(picks) == {0, 2}
    assert picks.count(2) > picks.count(0), "two of the three pairs hold the least busy"
    assert picks == chosen(router("power_of_two", seed=1), three, 200)
    assert picks != chosen(router("power_of_two", seed=2), three, 200)


@given(st.integers(2, 6), st.integers(0, 5), st.integers(0, 500))
def test_a_conversation_moves_only_when_its_place_is_gone(num: int, leaves: int, session: int) -> None:
    sticky = router("session")
    places = [backend(number, identity=100 + number) for number in range(num)]
    before = chosen(sticky, places, session=session)[0]
    left = [place for place in places if place.number != leaves]
    after = chosen(sticky, left, session=session)[0]
    assert after == before or before == leaves
    again = [*left, backend(77, identity=100 + leaves)] if leaves < num else left  # the place has a new replica
    back = chosen(sticky, again, session=session)[0]
    assert back == (77 if before == leaves else before)


def test_conversations_spread_by_weight() -> None:
    sticky, places = router("session"), [backend(0, weight=1.0), backend(1, weight=3.0)]
    picks = [chosen(sticky, places, session=session)[0] for session in range(2000)]
    assert np.mean(picks) == pytest.approx(0.75, abs=0.03)


def test_a_request_that_stands_alone_goes_to_the_least_busy() -> None:
    assert chosen(router("session"), [backend(0, 3), backend(1, 1)]) == [1]


def test_a_conversation_is_called_by_its_first_turn() -> None:
    work = workload([0, 0, -1, -1, 5], [9] * 5, [1] * 5, previous=[-1, -1, 0, 2, -1])
    assert sessions(work) == [0, -1, 0, 0, -1]


def shared(*streams: int, prompt: int = 64) -> Workload:
    """Requests whose whole prompts are those of a stream."""
    n = len(streams)
    content = tuple(((stream, prompt),) for stream in streams)
    return workload([0] * n, [prompt] * n, [4] * n, content=content, num_streams=max(streams) + 1)


def test_a_prompt_goes_where_the_most_of_it_was_sent_before() -> None:
    work = shared(0, 1, 0, 1)
    affinity, two = router("prefix_affinity"), [backend(0), backend(1)]
    picks = [affinity.choose(Incoming(row, 64, 4, 0, -1, work), two).number for row in range(4)]
    assert picks == [0, 1, 0, 1]
    assert affinity.num_known_blocks == 64 // 16


def test_load_outweighs_a_known_prefix_when_it_is_weighted_so() -> None:
    """A known prompt is worth 2 points, an empty queue and an empty cache 1 each."""
    busy, idle = backend(0, stats=Stats(10, 5, 0.9)), backend(1, stats=Stats(0, 5, 0.1))
    picks = {}
    for weight in (2.0, 1.5):
        affinity = router("prefix_affinity", prefix_weight=weight)
        for place in (busy, idle):
            place.stats = IDLE
        assert affinity.choose(Incoming(0, 64, 4, 0, -1, shared(0, 0)), [busy, idle]).number == 0
        busy.stats, idle.stats = busy.probe(), idle.probe()
        picks[weight] = affinity.choose(Incoming(1, 64, 4, 0, -1, shared(0, 0)), [busy, idle]).number
    assert picks == {2.0: 0, 1.5: 1}  # 2 + 0 + 0.1 > 0 + 1 + 0.9, and 1.5 + 0.1 < 1.9


def test_the_longest_known_prefix_alone_ignores_load() -> None:
    busy, idle = backend(0), backend(1)
    affinity = router("prefix_affinity", queue_weight=0.0, kv_weight=0.0)
    assert affinity.choose(Incoming(0, 64, 4, 0, -1, shared(0, 0)), [busy, idle]).number == 0
    busy.stats = Stats(1000, 100, 1.0)
    assert affinity.choose(Incoming(1, 64, 4, 0, -1, shared(0, 0)), [busy, idle]).number == 0
    affinity.forget(busy)
    assert affinity.choose(Incoming(1, 64, 4, 0, -1, shared(0, 0)), [backend(2), idle]).number != 0


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), max_size=6)), max_size=30))
def test_the_index_holds_the_last_blocks_of_each_replica(capacity: int, sent: list[tuple[int, list[int]]]) -> None:
    index = PrefixIndex(capacity)
    order: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for number, blocks in sent:
        index.add(number, blocks)
        for block in blocks:
            if block in order[number]:
                order[number].remove(block)
            order[number].append(block)
        order[number] = order[number][-capacity:]
    for probe in ([0, 1, 2], [5], list(range(10))):
        expected: dict[int, int] = {}
        for block in probe:
            holders = [number for number, held in order.items() if block in held]
            if not holders:
                break
            for number in holders:
                expected[number] = expected.get(number, 0) + 1
        assert index.known(probe) == expected


def test_metrics_are_read_at_their_interval_and_count_after_their_delay() -> None:
    """Requests of many sizes come every 10 ms: who is seen as the emptiest changes when the metrics are read."""
    work = workload(np.arange(60) * 10 * MS, 100 + 137 * np.arange(60) % 1000, np.full(60, 200))
    spread = {}
    for interval, delay in ((0, 0), (50 * MS, 0), (50 * MS, 40 * MS)):
        records = serve(work, fleet_of(2, "least_kv", stats_interval_ns=interval, stats_delay_ns=delay))
        spread[interval, delay] = of_fleet(records).stays.replica.tolist()
    later = {key: np.array(chosen)[10:] for key, chosen in spread.items()}  # at first both are empty
    changed_ms = {key: 10 * (np.flatnonzero(np.diff(chosen)) + 11) % 50 for key, chosen in later.items()}
    assert len(changed_ms[0, 0]) > 20
    assert set(changed_ms[50 * MS, 0].tolist()) <= {0, 10}
    assert set(changed_ms[50 * MS, 40 * MS].tolist()) <= {40, 0}
    assert min(len(changed_ms[50 * MS, 0]), len(changed_ms[50 * MS, 40 * MS])) >= 4


@given(st.data())
def test_nobody_waits_in_a_shared_queue_while_a_seat_is_free(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 20))
    gaps = data.draw(st.lists(st.sampled_from([0, 5, 20, 100]), min_size=n, max_size=n))
    outputs = data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    num_replicas, seats = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    work = workload(np.cumsum(gaps) * MS, np.full(n, 20), outputs)
    config = engine(max_num_seqs=seats, max_num_batched_tokens=100)
    records = serve(work, fleet_of(num_replicas, "shared_queue", config=config))
    stays, table = of_fleet(records).stays, records.requests
    assert (np.bincount(stays.request) == 1).all()
    assert stays.request.tolist() == sorted(stays.request.tolist())  # first come, first served
    waited = stays.sent_ns > table.arrival_ns[stays.request]
    for sent_ns in stays.sent_ns[waited].tolist():
        there = (stays.sent_ns < sent_ns) & (stays.ended_ns >= sent_ns - 1)  # an answer frees its seat 1 ns later
        assert there.sum() >= num_replicas * seats


def test_requests_beyond_what_may_wait_are_rejected() -> None:
    work = workload([0] * 6, [20] * 6, [3] * 6)
    fleet = fleet_of(
        2, "shared_queue", config=engine(max_num_seqs=1, max_num_batched_tokens=64), max_waiting_requests=1
    )
    table = serve(work, fleet).requests
    assert table.outcome.tolist() == [0, 0, 0, *[Outcome.REJECTED] * 3]


def test_each_replica_has_the_limits_of_a_server() -> None:
    work = workload([0] * 6, [20] * 6, [3] * 6)
    system = System(engine(), STEP, num_replicas=2, max_num_queued_reqs=2)
    table = serve(work, Fleet((Pool("all", system),), Routing("round_robin"))).requests
    assert table.outcome.tolist() == [0, 0, 0, 0, Outcome.REJECTED, Outcome.REJECTED]


def test_a_long_prompt_goes_only_where_it_fits() -> None:
    long, short = System(engine(max_model_len=4000), STEP), System(engine(max_model_len=300), STEP)
    fleet = Fleet((Pool("short", short), Pool("long", long)), Routing("round_robin"))
    table = serve(workload([0] * 4, [500, 20, 500, 5000], [3] * 4), fleet).requests
    assert table.replica.tolist() == [1, 0, 1, -1]
    assert table.outcome.tolist() == [0, 0, 0, Outcome.REJECTED]


def long_and_short(**changes: Any) -> Fleet:
    """A pool for prompts below 4,000 tokens, a pool for those below 300."""
    config = {"max_num_seqs": 1, "max_num_batched_tokens": 4000}
    pools = [Pool(f"to{most}", System(engine(max_model_len=most, **config), STEP)) for most in (4000, 300)]
    return Fleet(tuple(pools), Routing(changes.pop("router", "shared_queue")), **{"health": AT_ONCE, **changes})


def test_a_long_prompt_whose_pool_is_gone_keeps_nobody_else_from_the_others() -> None:
    work = workload([100 * MS, 110 * MS, 120 * MS], [500, 20, 20], [3] * 3)
    for router in ROUTERS:
        table = serve(work, long_and_short(router=router, faults=(Crash("to4000", 0, 50 * MS),))).requests
        assert table.outcome.tolist() == [Outcome.UNFINISHED, Outcome.FINISHED, Outcome.FINISHED], router
        assert table.replica.tolist() == [-1, 1, 1], router
    back = serve(work, long_and_short(faults=(Crash("to4000", 0, 50 * MS, 200 * MS),))).requests
    assert back.first_token_ns.tolist()[0] == 260 * MS


def test_those_that_wait_for_the_same_replicas_go_in_the_order_in_which_they_came() -> None:
    """The long pool's seat is free at 30 ms, the short one's at 31: long prompts go on there, short ones where it is
    free first."""
    work = workload([0, MS, 2 * MS, 3 * MS, 4 * MS], [500, 20, 500, 20, 20], [3] * 5)
    stays = of_fleet(serve(work, long_and_short())).stays
    assert list(zip(stays.request.tolist(), stays.replica.tolist(), strict=True)) == [
        (0, 0), (1, 1), (2, 0), (3, 1), (4, 0)
    ]  # fmt: skip
    assert stays.sent_ns.tolist() == [0, MS, 30 * MS + 1, 31 * MS + 1, 60 * MS + 2]


@given(st.lists(st.tuples(st.sampled_from(["add", "back", "take"]), st.integers(0, 400)), max_size=40))
def test_a_line_is_a_queue_for_each_length(moves: list[tuple[str, int]]) -> None:
    line, order = Line([300, 100]), []
    for number, (move, size) in enumerate(moves):
        request = Request(number, 0, size, 1)
        if move == "add":
            line.append(request)
            order.append(request)
        elif move == "back":
            line.put_back([request, twin := Request(number, 0, size, 1)])
            order[:0] = [request, twin]
        elif order:
            line.remove(gone := order.pop(size % len(order)))
            with pytest.raises(ValueError, match="does not wait"):
                line.remove(gone)
        lanes = [range(100), range(100, 300), range(300, 401)]
        firsts = [next((each for each in order if each.num_prompt_tokens in lane), None) for lane in lanes]
        assert line.heads() == sorted((each for each in firsts if each is not None), key=order.index)
        assert len(line) == len(order)


def test_blocks_of_another_size_are_other_blocks() -> None:
    """Pools whose engines count in blocks of their own find what their own blocks hold."""
    work = replace(shared(0, 0, 0, 0, prompt=64), arrival_ns=np.arange(4) * S)
    pools = [Pool(f"by{size}", System(engine(block_size=size), STEP)) for size in (16, 64)]
    table = serve(work, Fleet(tuple(pools), Routing("round_robin"))).requests
    assert table.num_cached_tokens.tolist() == [0, 0, 48, 0]  # the last token is computed anew, and its block with it


# -- what goes wrong


def test_a_crash_loses_the_step_and_what_was_computed_is_computed_again() -> None:
    work = workload([0, 0], [100, 100], [5, 5])
    fleet = fleet_of(2, "round_robin", faults=(Crash("all", 0, 25 * MS),))
    records = serve(work, fleet)
    table, stays = records.requests, of_fleet(records).stays
    assert stays.request.tolist() == [0, 1, 0]
    assert stays.fate.tolist() == [Fate.LOST, Fate.FINISHED, Fate.FINISHED]
    assert stays.num_output_tokens.tolist() == [2, 5, 5]
    assert table.finish_ns.tolist() == [80 * MS, 50 * MS]  # it joins at 30 ms, and has 5 steps to go
    assert table.first_token_ns[0] > 25 * MS
    assert len(records.replicas[0].steps) == 2
    assert not len(records.replicas[0].spans)


@pytest.mark.parametrize(
    ("on_crash", "outcomes"),
    [
        ("retry", [Outcome.FINISHED, Outcome.FINISHED]),
        ("retry_unstarted", [Outcome.LOST, Outcome.FINISHED]),
        ("fail", [Outcome.LOST, Outcome.LOST]),
    ],
)
def test_who_is_tried_again_after_a_crash(on_crash: str, outcomes: list[Outcome]) -> None:
    """At 15 ms the first request has a token, the second waits for its first."""
    work = workload([0, 11 * MS], [100, 100], [5, 5])
    faults = (Crash("all", 0, 15 * MS, restart_after_ns=S),)
    records = serve(work, fleet_of(1, faults=faults, on_crash=on_crash))
    assert records.requests.outcome.tolist() == outcomes
    lost = records.requests.outcome == Outcome.LOST
    assert records.requests.num_output_tokens[lost].tolist() == [1, 0][: lost.sum()]
    assert (records.requests.finish_ns[lost] == 15 * MS).all()


def test_who_lost_its_replica_goes_before_those_that_wait() -> None:
    config = engine(max_num_seqs=1, max_num_batched_tokens=128)
    fleet = fleet_of(1, "shared_queue", config=config, faults=(Crash("all", 0, 15 * MS, 5 * MS),))
    assert of_fleet(serve(burst(3, output=3), fleet)).stays.request.tolist() == [0, 0, 1, 2]


def test_nobody_is_tried_more_often_than_allowed() -> None:
    faults = tuple(Crash("all", 0, at * MS, restart_after_ns=5 * MS) for at in (15, 35, 55, 75))
    records = serve(workload([0], [100], [5]), fleet_of(1, faults=faults, max_attempts=3))
    assert of_fleet(records).stays.fate.tolist() == [Fate.LOST] * 3
    assert records.requests.outcome.tolist() == [Outcome.LOST]


def test_without_a_replica_requests_wait_for_one() -> None:
    faults = (Crash("all", 0, 0, restart_after_ns=S),)
    table = serve(workload([MS], [100], [5]), fleet_of(1, faults=faults)).requests
    assert table.scheduled_ns.tolist() == [S]
    assert table.outcome.tolist() == [Outcome.FINISHED]


def test_if_nobody_comes_back_the_run_ends_stalled() -> None:
    records = serve(workload([MS, S], [100, 100], [5, 5]), fleet_of(1, faults=(Crash("all", 0, 0),)))
    assert records.stalled
    assert records.requests.outcome.tolist() == [Outcome.UNFINISHED] * 2
    assert records.requests.replica.tolist() == [-1, -1]


def test_what_was_to_happen_after_the_end_does_not_and_a_warning_says_so() -> None:
    late = (Crash("all", 0, S), Slowdown("all", 1, S, None, 2.0), Crash("all", 1, 25 * MS, restart_after_ns=S))
    work = workload([0, 0], [100, 100], [5, 5])
    summary = summary_of(work, fleet_of(2, "round_robin", faults=late))
    assert summary.fleet is not None
    assert (summary.fleet.num_crashes, summary.fleet.num_missed_faults) == (1, 2)
    assert [(each.ready_s, each.gone_s) for each in summary.fleet.replicas] == [(0, None), (0, 0.025), (None, None)]
    assert "2 faults of the fleet did not happen" in " ".join(summary.warnings)
    twice = (Crash("all", 0, 20 * MS), Crash("all", 0, 30 * MS))
    again = summary_of(work, fleet_of(2, "round_robin", faults=twice)).fleet
    assert again is not None
    assert (again.num_crashes, again.num_missed_faults) == (1, 1), "nobody was there to crash again"


def test_a_cache_is_cold_after_a_crash() -> None:
    work = replace(shared(0, 0, 0, 0, prompt=160), arrival_ns=np.array([0, S, 3 * S, 4 * S]))
    faults = (Crash("all", 0, 2 * S, restart_after_ns=MS),)
    table = serve(work, fleet_of(1, faults=faults)).requests
    assert table.num_cached_tokens.tolist() == [0, 144, 0, 144]
    assert table.replica.tolist() == [0, 0, 1, 1]


def test_a_slow_replica_takes_so_many_times_as_long_for_the_steps_that_it_begins_then() -> None:
    fleet = fleet_of(1, faults=(Slowdown("all", 0, 15 * MS, 50 * MS, 3.0),))
    steps = serve(workload([0], [100], [6]), fleet).replicas[0].steps
    assert (steps.end_ns - steps.start_ns).tolist() == [10 * MS, 10 * MS, 30 * MS, 10 * MS, 10 * MS, 10 * MS]


def test_slowdowns_multiply_and_stay_with_the_place() -> None:
    faults = (Slowdown("all", 0, 0, None, 2.0), Slowdown("all", 0, 0, None, 1.5), Crash("all", 0, 5 * MS, MS))
    records = serve(workload([S], [100], [2]), fleet_of(1, faults=faults))
    steps = records.replicas[1].steps
    assert (steps.end_ns - steps.start_ns).tolist() == [30 * MS] * 2


def test_a_client_that_gives_up_does_so_wherever_its_request_is() -> None:
    work = workload([0, 0, 0], [100] * 3, [50] * 3, request_timeout_ns=55 * MS)
    config = engine(max_num_seqs=1, max_num_batched_tokens=128)
    fleet = fleet_of(1, "shared_queue", config=config, faults=(Crash("all", 0, 30 * MS, 10 * MS),))
    records = serve(work, fleet)
    assert records.requests.outcome.tolist() == [Outcome.ABORTED] * 3
    assert (records.requests.finish_ns == 55 * MS).all()
    assert of_fleet(records).stays.fate.tolist() == [Fate.LOST, Fate.ABORTED]


# -- growing and shrinking


def burst(num: int, output: int = 100) -> Workload:
    return workload(np.zeros(num, np.int64), np.full(num, 100), np.full(num, output))


def test_a_replica_that_was_ordered_takes_requests_after_its_start_up() -> None:
    scaler = Autoscaler("concurrency", 4, max_replicas=3, interval_ns=100 * MS, start_up_ns=150 * MS)
    config = engine(max_num_seqs=4, max_num_batched_tokens=1000)
    work = replace(burst(12), arrival_ns=np.full(12, 50 * MS))
    records = serve(work, fleet_of(1, "shared_queue", config=config, autoscaler=scaler))
    lives = of_fleet(records).lives
    assert lives.ordered_ns.tolist() == [0, 100 * MS, 100 * MS]
    assert lives.ready_ns.tolist() == [0, 250 * MS, 250 * MS]
    assert np.bincount(records.requests.replica).tolist() == [4, 4, 4]
    scalings = of_fleet(records).scalings
    assert scalings.num_recommended[:2].tolist() == [0, 3]
    assert scalings.value_milli[1] == 12_000


def test_a_dismissed_replica_finishes_what_it_has() -> None:
    scaler = Autoscaler("concurrency", 4, max_replicas=2, interval_ns=50 * MS, down_stabilization_ns=0)
    work = workload([0, 0, MS], [100] * 3, [40, 5, 5])
    records = serve(work, fleet_of(2, "round_robin", autoscaler=scaler))
    lives = of_fleet(records).lives
    assert (records.requests.outcome == Outcome.FINISHED).all()
    gone = int(np.flatnonzero(lives.death == Death.SCALED_DOWN)[0])
    assert lives.draining_ns[gone] <= lives.gone_ns[gone]
    stays = of_fleet(records).stays
    assert (stays.ended_ns[stays.replica == gone] <= lives.gone_ns[gone]).all()


def test_out_of_time_to_finish_its_requests_go_elsewhere() -> None:
    scaler = Autoscaler(
        "concurrency", 4, max_replicas=2, interval_ns=50 * MS, down_stabilization_ns=0, drain_timeout_ns=20 * MS
    )
    work = workload([MS, MS], [100] * 2, [40, 40])
    records = serve(work, fleet_of(2, "round_robin", autoscaler=scaler))
    stays, lives = of_fleet(records).stays, of_fleet(records).lives
    gone = int(np.flatnonzero(lives.death == Death.SCALED_DOWN)[0])
    if lives.draining_ns[gone] > MS:
        assert (stays.fate == Fate.LOST).sum() == 1
        assert lives.gone_ns[gone] == lives.draining_ns[gone] + 20 * MS
    assert (records.requests.outcome == Outcome.FINISHED).all()


def test_from_no_replica_at_all_it_grows_for_the_first_request() -> None:
    scaler = Autoscaler("waiting", 1, max_replicas=2, min_replicas=0, interval_ns=20 * MS, start_up_ns=10 * MS,
                        down_stabilization_ns=0)  # fmt: skip
    records = serve(workload([50 * MS], [100], [5]), fleet_of(1, autoscaler=scaler))
    lives = of_fleet(records).lives
    assert lives.gone_ns[0] == 0
    assert lives.ready_ns[1] == 70 * MS  # seen at 60 ms
    assert records.requests.outcome.tolist() == [Outcome.FINISHED]


def test_an_autoscaler_that_can_do_nothing_more_does_not_keep_the_run_going() -> None:
    scaler = Autoscaler("waiting", 1, max_replicas=1, interval_ns=20 * MS, start_up_ns=S)
    records = serve(workload([0], [100], [5]), fleet_of(1, autoscaler=scaler, faults=(Crash("all", 0, 10 * MS),)))
    assert records.requests.outcome.tolist() == [Outcome.FINISHED]  # the pool's place is filled again
    config = engine(num_gpu_blocks=40, max_model_len=500)
    stuck = replace(fleet_of(1, config=config), faults=(Crash("all", 0, 10 * MS),))
    assert serve(workload([0], [100], [5]), stuck).stalled


# -- what is said


def summary_of(work: Workload, fleet: Fleet, **given: Any) -> Summary:
    return summarize(serve(work, fleet), work, **given)


def test_pools_and_replicas_add_up() -> None:
    rng = np.random.default_rng(5)
    n = 200
    work = workload(
        np.cumsum(rng.exponential(2 * MS, n)).astype(np.int64), rng.integers(10, 200, n), rng.integers(2, 60, n)
    )
    systems = [System(engine(), COST, num_replicas=count) for count in (2, 1)]
    pools = tuple(
        Pool(name, system, weight=weight) for name, system, weight in zip("ab", systems, (2.0, 1.0), strict=True)
    )
    fleet = Fleet(pools, Routing("least_requests"), (Crash("a", 1, 100 * MS, 50 * MS),), health=AT_ONCE)
    of = summary_of(work, fleet).fleet
    assert of is not None
    assert [pool.pool for pool in of.pools] == ["a", "b"]
    assert sum(pool.num_finished for pool in of.pools) == n
    for name in ("num_requests", "num_finished", "num_lost", "num_preemptions"):
        for pool in of.pools:
            mine = [getattr(each, name) for each in of.replicas if each.pool == pool.pool]
            assert getattr(pool, name) == sum(mine), name
    assert sum(each.num_requests for each in of.replicas) == n + of.num_lost_stays
    assert of.num_retried_requests == of.num_lost_stays > 0
    assert of.num_lost_requests == 0
    assert of.replica_hours == pytest.approx(sum(pool.replica_hours for pool in of.pools))
    assert (of.num_ready_peak, of.num_ready_min, of.num_crashes) == (3, 2, 1)


def test_a_fleet_is_paid_for_as_long_as_its_replicas_are_there() -> None:
    """Two replicas of 2 GPUs at 3 an hour; one of them is gone after the first second of ten."""
    work = workload([0, 10 * S - 10 * MS], [100, 100], [1, 1])
    fleet = fleet_of(2, "round_robin", faults=(Crash("all", 0, S),), rates=Rates(2, 3.0))
    summary = summary_of(work, fleet)
    assert summary.fleet is not None
    assert summary.fleet.replica_hours == pytest.approx(11 / 3600)
    assert summary.fleet.gpu_hours == pytest.approx(22 / 3600)
    assert summary.economics.cost == pytest.approx(22 / 3600 * 3)
    assert summary.economics.cost_per_hour == pytest.approx(2.2 * 3)
    assert summary.economics.num_gpus == pytest.approx(2.2)
    assert summary.fleet.pools[0].cost == pytest.approx(22 / 3600 * 3)
    assert summary.fleet.num_ready_mean == pytest.approx(1.1)
    assert summary.load.busy_share == pytest.approx(20e-3 / 11)


def test_shares_are_of_the_time_in_which_a_replica_was_there() -> None:
    work = workload([0, 0], [100, 100], [10, 10])
    of = summary_of(work, fleet_of(2, "round_robin", faults=(Crash("all", 0, 50 * MS),), on_crash="fail")).fleet
    assert of is not None
    first, second = of.replicas
    assert first.busy_share == pytest.approx(0.8)  # the step that the crash cut off is not counted
    assert second.busy_share == 1.0
    assert (first.gone_s, first.death, first.num_lost) == (0.05, "crash", 1)


def test_the_wait_at_the_router_is_told() -> None:
    config = engine(max_num_seqs=1, max_num_batched_tokens=128)
    of = summary_of(workload([0, 0], [100, 100], [3, 3]), fleet_of(1, "shared_queue", config=config)).fleet
    assert of is not None
    assert of.num_waited == 1
    assert of.gateway_wait.max_ms == pytest.approx(30, abs=1e-3)


def test_lost_requests_are_failed_requests_and_a_warning_says_so() -> None:
    fleet = fleet_of(2, "round_robin", faults=(Crash("all", 0, 25 * MS),), on_crash="fail")
    summary = summary_of(workload([0, 0], [100, 100], [5, 5]), fleet)
    assert (summary.completed, summary.failed) == (1, 1)
    assert "1 lost with their replica" in " ".join(summary.warnings)
    assert summary.waste.abandoned_tokens == 100 + 1
    made = summary.to_dict()
    assert (made["lost"], made["lost_stays"], made["lost_output_tokens"], made["crashes"]) == (1, 1, 2, 1)


def test_records_of_one_server_say_nothing_of_a_fleet() -> None:
    work = workload([0], [100], [5])
    summary = summarize(serve(work, System(engine(), STEP)), work)
    assert summary.fleet is None
    assert "replica_hours" not in summary.to_dict()


# -- wrong fleets


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Routing("random"), "router must be one of vllm, round_robin, .*, got 'random'"),
        (lambda: Routing(prefix_weight=-1), "prefix_weight must be at least 0, got -1"),
        (lambda: Routing(max_requests_per_replica=0), "max_requests_per_replica must be at least 1, got 0"),
        (
            lambda: Routing("least_kv", stats_interval_ns=5),
            r"stats_interval_ns must be 0 .* or at least 1000000 .* got 5",
        ),
        (lambda: Routing(stats_delay_ns=-1), "stats_delay_ns must be at least 0, got -1"),
        (lambda: Pool(" ", System(engine(), STEP)), "name of a pool must be printable, not empty, .* got ' '"),
        (lambda: Pool("a\nb", System(engine(), STEP)), r"name of a pool must be printable, .* got 'a\\nb'"),
        (lambda: Pool("a,b", System(engine(), STEP)), "name of a pool must be printable, .* got 'a,b'"),
        (lambda: Fleet(()), "pools must hold at least one pool"),
        (lambda: fleet_of(1, on_crash="panic"), "on_crash must be one of fail, retry, retry_unstarted, got 'panic'"),
        (lambda: fleet_of(1, max_attempts=0), "max_attempts must be at least 1, got 0"),
        (lambda: fleet_of(1, faults=(Crash("b", 0, 5),)), "a fault names pool 'b'; pools are all"),
        (lambda: fleet_of(2, faults=(Crash("all", 2, 5),)), "names replica 2 of pool all, which has at most 2"),
        (lambda: Crash("a", -1, 0), "place must be at least 0"),
        (lambda: Crash("a", 0, 0, 0), "restart_after_ns must be at least 1, got 0"),
        (lambda: Slowdown("a", 0, 5, 5, 2.0), r"end_ns must be above start_ns \(5\), got 5"),
        (lambda: Slowdown("a", 0, 5, None, 0.0), "factor must be a number above 0, got 0.0"),
        (lambda: fleet_of(1, weight=0.0), "weight of pool all must be above 0, got 0.0"),
        (
            lambda: fleet_of(3, autoscaler=Autoscaler("waiting", 1, max_replicas=2)),
            r"pool all starts with 3 replicas, which must be .* at most max_replicas \(2\)",
        ),
    ],
)
def test_a_wrong_fleet_says_what_is_wrong(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_two_pools_of_one_name_are_refused() -> None:
    pool = Pool("a", System(engine(), STEP))
    with pytest.raises(ValueError, match="two are called a"):
        Fleet((pool, pool))


def test_a_request_must_fit_the_cache_of_every_pool() -> None:
    small = Pool("small", System(engine(num_gpu_blocks=20), STEP))
    with pytest.raises(RequestTooLarge, match="request 0 needs"):
        serve(workload([0], [900], [5]), Fleet((Pool("big", System(engine(), STEP)), small)))


def test_the_routers_of_a_fleet_hold_those_of_one_server() -> None:
    from windtunnel.sim import system

    assert ROUTERS[: len(system.ROUTERS)] == system.ROUTERS
