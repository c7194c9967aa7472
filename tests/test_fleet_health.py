"""What a router does that learns of a crash late, and what a network between it and the replicas costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cluster import COST, MS, S, engine
from test_fleet import STEP, fleet_of, of_fleet, summary_of

from windtunnel.reports.fleet import event_table, fleet_rows, fleet_sentences
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.fleet.faults import Crash, Fault, Slowdown
from windtunnel.sim.fleet.fleet import Fleet, Pool
from windtunnel.sim.fleet.health import HealthChecks
from windtunnel.sim.fleet.records import Fate
from windtunnel.sim.fleet.routers import ROUTERS, Routing
from windtunnel.sim.fleet.transfer import KvTransfer
from windtunnel.sim.metrics.waste import token_waste
from windtunnel.sim.records import Outcome
from windtunnel.sim.simulate import serve
from windtunnel.sim.speculation import Acceptance, Drafting
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload, workload

REFUSES = HealthChecks(100 * MS, 3)
HANGS = HealthChecks(100 * MS, 3, "hang")


def every(gap_ns: int, num: int, output: int = 3, **changes: Any) -> Workload:
    return workload(np.arange(num) * gap_ns, np.full(num, 100), np.full(num, output), **changes)


# -- when it is noticed


@pytest.mark.parametrize(
    ("dead_ns", "noticed_ns"), [(1, 31 * S), (10 * S, 31 * S), (11 * S - 1, 31 * S), (11 * S, 41 * S)]
)
def test_the_last_of_so_many_failing_probes_tells(dead_ns: int, noticed_ns: int) -> None:
    """Ready at 1 s; the probes of Kubernetes come every 10 s, and a replica that dies at one has passed it."""
    assert HealthChecks().noticed_ns(S, max(dead_ns, S)) == noticed_ns


@given(st.integers(1, 10**12), st.integers(1, 9), st.integers(0, 10**12), st.integers(0, 10**12))
def test_a_crash_is_noticed_within_so_many_intervals(interval: int, failures: int, ready: int, lived: int) -> None:
    delay_ns = HealthChecks(interval, failures).noticed_ns(ready, ready + lived) - ready - lived
    assert (failures - 1) * interval < delay_ns <= failures * interval
    assert HealthChecks(0, failures).noticed_ns(ready, ready + lived) == ready + lived


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"interval_ns": -1}, "interval_ns of health checks must be at least 0 .* got -1"),
        ({"num_failures": 0}, "num_failures of health checks must be at least 1, got 0"),
        ({"dead_replicas": "sulk"}, "dead_replicas must be one of refuse, hang, got 'sulk'"),
    ],
)
def test_wrong_health_checks_say_what_is_wrong(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HealthChecks(**settings)


# -- what happens until then


def test_a_dead_replica_refuses_requests_until_the_router_notices() -> None:
    """Two replicas in turns; one dies at 150 ms, and its probes at 200, 300 and 400 ms fail.

    Each that it refuses takes the turn of the other one, so the next request comes to it again.
    """
    fleet = fleet_of(2, "round_robin", faults=(Crash("all", 0, 150 * MS),), health=REFUSES)
    records = serve(every(40 * MS, 15), fleet)
    stays = of_fleet(records).stays
    unheard = stays.fate == Fate.UNHEARD
    assert stays.sent_ns[unheard].tolist() == [at * MS for at in range(160, 400, 40)]
    assert stays.ended_ns[unheard].tolist() == [at * MS + 1 for at in range(160, 400, 40)]
    assert (records.requests.outcome == Outcome.FINISHED).all()
    assert stays.replica[stays.sent_ns >= 150 * MS].tolist().count(0) == 6
    assert of_fleet(records).lives.gone_ns.tolist() == [150 * MS, -1]


def test_without_retries_who_comes_to_a_dead_replica_is_lost() -> None:
    fleet = fleet_of(2, "round_robin", faults=(Crash("all", 0, 150 * MS),), health=REFUSES, on_crash="fail")
    table = serve(every(40 * MS, 15), fleet).requests
    lost = table.outcome == Outcome.LOST
    assert table.arrival_ns[lost].tolist() == [160 * MS, 240 * MS, 320 * MS]
    assert (table.finish_ns[lost] == table.arrival_ns[lost] + 1).all()


def test_a_router_that_counts_requests_sends_everybody_to_the_dead_replica_first() -> None:
    """It refuses at once, so it always has the fewest requests in flight: a black hole."""
    work, shares = every(5 * MS, 100, output=10), {}
    for router in ("least_requests", "round_robin"):
        fleet = fleet_of(4, router, faults=(Crash("all", 0, 150 * MS),), health=REFUSES, on_crash="fail")
        of = of_fleet(serve(work, fleet)).stays
        sent = (of.sent_ns > 150 * MS) & (of.sent_ns < 400 * MS)
        shares[router] = (of.fate[sent] == Fate.UNHEARD).mean()
    assert shares["least_requests"] > 0.85
    assert shares["round_robin"] == pytest.approx(0.25, abs=0.03)


def test_requests_hang_at_a_dead_replica_until_the_router_notices() -> None:
    """One is in it when it dies at 170 ms, and four come there until 400 ms."""
    fleet = fleet_of(2, "round_robin", faults=(Crash("all", 0, 170 * MS),), health=HANGS)
    records = serve(every(40 * MS, 15), fleet)
    stays, table = of_fleet(records).stays, records.requests
    at_dead = (stays.replica == 0) & (stays.fate != Fate.FINISHED)
    assert stays.fate[at_dead].tolist() == [Fate.LOST, *[Fate.UNHEARD] * 2]
    assert stays.sent_ns[at_dead].tolist() == [160 * MS, 240 * MS, 320 * MS]
    assert (stays.ended_ns[at_dead] == 400 * MS).all()
    assert (table.outcome == Outcome.FINISHED).all()
    assert (table.first_token_ns[stays.request[at_dead]] > 400 * MS).all()


def test_an_heir_gets_what_hung_at_its_predecessor_a_tick_after_it_is_ready() -> None:
    fleet = fleet_of(1, faults=(Crash("all", 0, 0, restart_after_ns=5),), health=HANGS)
    stays = of_fleet(serve(every(S, 1), fleet)).stays
    assert stays.sent_ns.tolist() == [0, 6]
    assert stays.ended_ns[0] == 5


def test_clients_give_up_at_a_replica_that_hangs() -> None:
    fleet = fleet_of(2, "round_robin", faults=(Crash("all", 0, 170 * MS),), health=HANGS)
    records = serve(replace(every(40 * MS, 15), request_timeout_ns=70 * MS), fleet)
    stays, table = of_fleet(records).stays, records.requests
    gone = table.outcome == Outcome.ABORTED
    assert table.arrival_ns[gone].tolist() == [160 * MS, 240 * MS, 320 * MS]
    assert (table.finish_ns[gone] == table.arrival_ns[gone] + 70 * MS).all()
    assert stays.fate[np.isin(stays.request, np.flatnonzero(gone))].tolist() == [Fate.ABORTED, *[Fate.UNHEARD] * 2]


def test_a_replica_that_takes_the_place_of_a_dead_one_ends_the_wait() -> None:
    fleet = fleet_of(2, "round_robin", faults=(Crash("all", 0, 170 * MS, 90 * MS),), health=HANGS)
    stays = of_fleet(serve(every(40 * MS, 15), fleet)).stays
    at_dead = (stays.replica == 0) & (stays.fate != Fate.FINISHED)
    assert (stays.ended_ns[at_dead] == 260 * MS).all()
    assert set(stays.replica[stays.sent_ns > 260 * MS].tolist()) == {1, 2}


@pytest.mark.parametrize("router", ROUTERS)
def test_who_was_refused_goes_to_another_replica_before_those_that_wait(router: str) -> None:
    settings: dict[str, Any] = {"queue_weight": 0.0, "kv_weight": 0.0, "health": HealthChecks(S, 1), "max_attempts": 2}
    fleet = fleet_of(3, router, faults=(Crash("all", 1, 55 * MS),), **settings)
    records = serve(every(MS, 100, output=1 + 60 * (router == "least_kv")), fleet)
    stays = of_fleet(records).stays
    assert (records.requests.outcome == Outcome.FINISHED).all()
    assert (stays.fate == Fate.UNHEARD).any()
    for row in stays.request[stays.fate == Fate.UNHEARD].tolist():
        mine = np.flatnonzero(stays.request == row)
        assert stays.fate[mine].tolist() == [Fate.UNHEARD, Fate.FINISHED]
        assert stays.sent_ns[mine[1]] == stays.ended_ns[mine[0]] + 1


def test_where_every_replica_is_dead_requests_wait_in_their_order() -> None:
    """Each is refused, by none twice, and then waits for the one that comes back."""
    faults = (Crash("all", 0, 5 * MS), Crash("all", 1, 5 * MS, 95 * MS))
    config = engine(max_num_seqs=1, max_num_batched_tokens=128)
    fleet = fleet_of(2, "least_requests", config=config, faults=faults, health=HealthChecks(S, 1), max_attempts=9)
    records = serve(workload([10 * MS, 10 * MS, 20 * MS, 30 * MS], [100] * 4, [2] * 4), fleet)
    stays = of_fleet(records).stays
    refused = stays.fate == Fate.UNHEARD
    pairs = list(zip(stays.request[refused].tolist(), stays.replica[refused].tolist(), strict=True))
    assert len(pairs) == len(set(pairs))
    assert {row for row, _ in pairs} == {0, 1, 2, 3}
    assert stays.request[stays.replica == 2].tolist() == [0, 1, 2, 3]
    assert (records.requests.outcome == Outcome.FINISHED).all()


def test_being_refused_counts_as_an_attempt() -> None:
    faults = tuple(Crash("all", place, 5 * MS) for place in range(3))
    fleet = fleet_of(4, "round_robin", faults=faults, health=HealthChecks(S, 1), max_attempts=3)
    records = serve(workload([10 * MS], [100], [2]), fleet)
    assert of_fleet(records).stays.fate.tolist() == [Fate.UNHEARD] * 3
    assert records.requests.outcome.tolist() == [Outcome.LOST]


def test_routers_read_no_metrics_of_a_dead_replica() -> None:
    """What its engine said last stands, whether they read now and then or at every decision."""
    for interval in (0, 20 * MS):
        fleet = fleet_of(
            2, "least_kv", stats_interval_ns=interval, faults=(Crash("all", 0, 150 * MS),), health=HANGS, max_attempts=9
        )
        records = serve(every(10 * MS, 60, output=30), fleet)
        assert (records.requests.outcome == Outcome.FINISHED).all()


# -- what is said


def test_the_answer_says_how_many_came_to_a_dead_replica() -> None:
    summary = summary_of(
        every(40 * MS, 15), fleet_of(2, "round_robin", faults=(Crash("all", 0, 170 * MS),), health=HANGS)
    )
    of = summary.fleet
    assert of is not None
    assert (of.num_unheard_stays, of.num_unheard_requests, of.num_lost_stays) == (2, 2, 1)
    assert of.time_at_dead_s == pytest.approx(0.400 - 0.170 + 0.400 - 0.240 + 0.400 - 0.320)
    assert [each.num_unheard for each in of.replicas] == [2, 0]
    assert sum(each.num_requests for each in of.replicas) == 15 + 1
    assert sum(pool.num_requests for pool in of.pools) == 15 + 1
    told = summary.to_dict()
    assert (told["sends_to_dead"], told["requests_sent_to_dead"]) == (2, 2)
    rows = dict(fleet_rows(of))
    assert rows["Times a request was sent to a dead replica"] == "2"
    assert "and 2 were sent to a dead replica before the router noticed: 3 requests were tried again" in " ".join(
        fleet_sentences(of)
    )
    assert any("crashes with 1 request in it; 2 more are sent there" in row[2] for row in event_table(summary).rows)


def test_nothing_is_said_of_dead_replicas_where_the_router_knows_at_once() -> None:
    of = summary_of(every(40 * MS, 15), fleet_of(2, faults=(Crash("all", 0, 170 * MS),))).fleet
    assert of is not None
    assert (of.num_unheard_stays, of.time_at_dead_s) == (0, 0)
    assert not any("dead" in name for name, _ in fleet_rows(of))


# -- the network


def test_the_client_sees_its_first_token_a_round_trip_later() -> None:
    work = every(S, 3)
    near, far = (serve(work, fleet_of(2, network_ns=network)).requests for network in (0, 7 * MS))
    assert (far.first_token_ns - near.first_token_ns).tolist() == [14 * MS] * 3
    assert (far.finish_ns - near.finish_ns).tolist() == [14 * MS] * 3
    assert (far.arrival_ns == near.arrival_ns).all()


def test_the_next_turn_of_a_conversation_waits_for_an_answer_that_travels() -> None:
    work = replace(every(S, 2), previous=np.array([-1, 0]), think_ns=np.array([0, 0]), arrival_ns=np.array([0, -1]))
    near, far = (serve(work, fleet_of(1, network_ns=network)).requests for network in (0, 7 * MS))
    assert far.arrival_ns[1] - near.arrival_ns[1] == 14 * MS
    assert far.finish_ns[1] - near.finish_ns[1] == 28 * MS


def test_a_crash_takes_along_what_is_on_its_way() -> None:
    fleet = fleet_of(2, "round_robin", faults=(Crash("all", 0, 5 * MS),), network_ns=10 * MS)
    records = serve(workload([0], [100], [2]), fleet)
    assert of_fleet(records).stays.fate.tolist() == [Fate.LOST, Fate.FINISHED]
    assert of_fleet(records).stays.ended_ns[0] == 5 * MS
    assert not len(records.replicas[0].steps)


def test_an_engine_may_refuse_what_has_travelled() -> None:
    system = System(engine(), STEP, max_num_queued_reqs=1)
    fleet = Fleet((Pool("all", system),), Routing("round_robin"), network_ns=10 * MS)
    table = serve(workload([0, 0], [100] * 2, [2] * 2), fleet).requests
    assert table.outcome.tolist() == [Outcome.FINISHED, Outcome.REJECTED]
    assert table.finish_ns[1] == 20 * MS


def test_a_client_gives_up_a_request_on_its_way() -> None:
    fleet = fleet_of(1, network_ns=100 * MS)
    records = serve(replace(every(S, 1), request_timeout_ns=150 * MS), fleet)
    assert records.requests.outcome.tolist() == [Outcome.ABORTED]
    assert of_fleet(records).stays.fate.tolist() == [Fate.ABORTED]
    assert not len(records.replicas[0].steps)


@pytest.mark.parametrize("patience_ms", [None, 5, 25, 33, 45, 60, 90])
def test_prefill_and_decode_replicas_are_a_round_trip_away_each(patience_ms: int | None) -> None:
    """A client that gives up on the way to either leaves no blocks behind."""
    pools = tuple(
        Pool(role, System(engine(), STEP), role=role, kv_bytes_per_token=1000) for role in ("prefill", "decode")
    )
    fleet = Fleet(pools, Routing("least_requests"), transfer=KvTransfer(1e9))
    timeout_ns = None if patience_ms is None else patience_ms * MS
    work = replace(every(S, 2, output=5), request_timeout_ns=timeout_ns)
    far = serve(work, replace(fleet, network_ns=10 * MS)).requests
    if patience_ms is None:
        near = serve(work, fleet).requests
        assert (far.first_token_ns - near.first_token_ns).tolist() == [40 * MS] * 2
    else:
        assert (far.outcome == Outcome.ABORTED).all()
        assert (far.finish_ns - far.arrival_ns == timeout_ns).all()


# -- the price of slow steps, and work that a crash threw away


def priced(cost: CostModel, faults: tuple[Fault, ...]) -> Fleet:
    return Fleet((Pool("all", System(engine(), cost)),), faults=faults)


def test_the_decodes_of_a_slow_replica_are_priced_as_slowly_as_they_ran() -> None:
    """A fast replica and one three times as slow share their steps between prompts and decodes alike."""
    work = every(7 * MS, 40, output=20)
    fast, slow = (
        serve(replace(work, arrival_ns=work.arrival_ns * factor), priced(COST, faults)).replicas[0].steps
        for factor, faults in ((1, ()), (3, (Slowdown("all", 0, 0, None, 3.0),)))
    )
    mixed = (fast.num_decode_seqs > 0) & (fast.num_prefill_seqs > 0)
    assert mixed.sum() > 10
    assert (abs(slow.decode_only_ns - 3 * fast.decode_only_ns) <= 3).all()


def test_each_step_is_priced_as_fast_as_it_ran() -> None:
    faults = (Slowdown("all", 0, 55 * MS, 150 * MS, 2.0), Slowdown("all", 0, 100 * MS, 200 * MS, 4.0))
    steps = serve(every(13 * MS, 40, output=30), priced(STEP, faults)).replicas[0].steps
    lasted = steps.end_ns - steps.start_ns
    assert set(lasted.tolist()) == {10 * MS, 20 * MS, 40 * MS, 80 * MS}
    has_decodes = steps.num_decode_seqs > 0
    assert (steps.decode_only_ns == np.where(has_decodes, lasted, 0)).all()  # prompts cost nothing on top here


def test_work_that_a_crash_threw_away_is_not_rejected_drafts() -> None:
    config = SchedulerConfig(num_gpu_blocks=4000, max_num_batched_tokens=4096, num_speculative_tokens=3)
    system = System(config, STEP, num_replicas=2, drafting=Drafting(Acceptance.fixed(0.7, 3), 3))
    fleet = Fleet((Pool("all", system),), Routing("round_robin"))
    work = every(MS, 40, output=60)
    calm, crash = (serve(work, replace(fleet, faults=faults)) for faults in ((), (Crash("all", 0, 200 * MS, 50 * MS),)))
    waste, lost = token_waste(calm), token_waste(crash)
    assert waste.abandoned_tokens == 0
    stays = of_fleet(crash).stays
    gone = stays.fate == Fate.LOST
    assert (stays.num_output_tokens[gone] > 0).all()
    assert lost.abandoned_tokens == int((100 + stays.num_output_tokens[gone] - 1).sum())
    assert lost.useful_tokens == waste.useful_tokens
    verified = sum(int((own.steps.num_draft_tokens - own.steps.num_accepted_tokens).sum()) for own in crash.replicas)
    assert verified <= lost.rejected_draft_tokens <= verified + 40 * 4  # and what came after the end of an answer
    parts = (lost.useful_tokens, lost.recomputed_tokens, lost.rejected_draft_tokens, lost.abandoned_tokens)
    assert sum(parts) == lost.computed_tokens
