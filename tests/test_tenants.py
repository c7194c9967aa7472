"""Tenants: whose requests come, who goes in next at the gateway, what limits do, and what the summary says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import scheduler_configs, workloads

import windtunnel as wt
from windtunnel.scenarios.errors import ScenarioError
from windtunnel.scenarios.load import load_scenario
from windtunnel.scenarios.resolve import resolve
from windtunnel.scenarios.saturation import saturating_sample
from windtunnel.scenarios.workloads import read_trace, write_workload
from windtunnel.scenarios.workloads.errors import TraceError
from windtunnel.scenarios.workloads.synthetic import synthetic_workload
from windtunnel.scenarios.workloads.transform import slice_time, truncate
from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.request import Request
from windtunnel.sim.gateway import Gateway, TokenBucket
from windtunnel.sim.metrics.summary import summarize
from windtunnel.sim.metrics.tenants import fair_shares, jain_index, tenants_summary
from windtunnel.sim.records import Outcome, Records, table_columns
from windtunnel.sim.simulate import serve
from windtunnel.sim.system import System
from windtunnel.sim.tenancy import GatewayConfig, TenantPolicy
from windtunnel.sim.workload import Workload, workload
from windtunnel.sim.world import World

MS = 1_000_000
S = 1_000_000_000
COST = AffineCost(base_s=3e-3, token_s=1.7e-5, seq_s=1e-5, decode_context_s=4e-7, prefill_pair_s=1e-8)


# -- a gateway before a server that only counts


class Passed(NamedTuple):
    """A request that went in."""

    time_ns: int
    tenant: int
    tokens: int


class SlowServer:
    """Every request takes as many nanoseconds as it has tokens; checks at each change that nobody waits in vain."""

    def __init__(self, world: World, load: Workload) -> None:
        self.passed: list[Passed] = []
        self.in_flight: list[int] = [0] * max(1, len(load.tenants))
        self.most_in_flight = list(self.in_flight)
        self.most_at_once = 0
        self.done: Callable[[Request, int], None] = lambda *_: None
        self._world = world
        self._load = load

    def tenant_of(self, request: Request) -> int:
        return 0 if self._load.tenant is None else int(self._load.tenant[int(request.request_id)])

    def submit(self, request: Request) -> int:
        tenant = self.tenant_of(request)
        tokens = request.num_prompt_tokens + request.num_output_tokens
        self.passed.append(Passed(self._world.now_ns, tenant, tokens))
        self.in_flight[tenant] += 1
        self.most_in_flight[tenant] = max(self.most_in_flight[tenant], self.in_flight[tenant])
        self.most_at_once = max(self.most_at_once, sum(self.in_flight))
        self._world.call_in(tokens * 1_000, self._finish, request)
        return 3

    def _finish(self, request: Request) -> None:
        self.in_flight[self.tenant_of(request)] -= 1
        request.num_emitted = request.num_output_tokens
        self.done(request, self._world.now_ns)

    def abort(self, request: Request, replica: int) -> int:
        raise AssertionError("nobody gives up here")

    def num_emitted_tokens(self, request: Request, replica: int) -> int:
        return 0

    def end_of_input(self) -> None:
        pass


class Sender:
    def __init__(self) -> None:
        self.finished: dict[int, int] = {}
        self.placed_at: dict[int, int] = {}

    def placed(self, request: Request, replica: int) -> None:
        self.placed_at[int(request.request_id)] = replica

    def rejected(self, request: Request, now_ns: int) -> None:
        raise AssertionError("nobody is rejected here")

    def answered(self, request: Request, now_ns: int) -> None:
        self.finished[int(request.request_id)] = now_ns


def through(load: Workload, config: GatewayConfig, num_seats: int) -> SlowServer:
    """Send everything through a gateway."""
    world, sender = World(), Sender()
    server = SlowServer(world, load)
    gateway = Gateway(world, load, config, sender, 10**6, num_seats).open(server)
    server.done = gateway.then(sender.answered)
    columns = (load.arrival_ns, load.num_prompt_tokens, load.num_output_tokens, load.max_tokens)
    for row, (arrival, prompt, output, most) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        world.call_in(arrival, gateway.submit, Request(row, arrival, prompt, output, most))
    world.run()
    assert len(sender.finished) == len(server.passed) == len(load)
    return server


sizes = st.integers(1, 400)
weights_ = st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.0, 10.0])


@st.composite
def backlogs(draw: st.DrawFn, num_seats: int, num_tenants: int = 2, slack: int = 0) -> Workload:
    """Requests of several tenants that all come while the seats are taken by somebody else's (the last tenant's).

    ``slack`` is the most by which ``max_tokens`` may exceed an answer.
    """
    tenant = draw(st.lists(st.integers(0, num_tenants - 1), min_size=2, max_size=24))
    num = len(tenant)
    prompts = draw(st.lists(sizes, min_size=num, max_size=num))
    outputs = draw(st.lists(sizes, min_size=num, max_size=num))
    spare = draw(st.lists(st.integers(0, slack), min_size=num, max_size=num))
    return workload(
        [0] * num_seats + [1] * num,
        [500] * num_seats + prompts,
        [500] * num_seats + outputs,
        max_tokens=[500] * num_seats + [output + more for output, more in zip(outputs, spare, strict=True)],
        tenant=[num_tenants] * num_seats + tenant,
        tenants=(*(f"t{place}" for place in range(num_tenants)), "first"),
    )


def while_all_wait(server: SlowServer, load: Workload) -> list[Passed]:
    """What went in while each of the waiting tenants still had a request that waited."""
    assert load.tenant is not None
    left = np.bincount(load.tenant, minlength=len(load.tenants))[:-1].tolist()
    passed = []
    for each in server.passed:
        if min(left) == 0:
            break
        if each.tenant < len(left):
            passed.append(each)
            left[each.tenant] -= 1
    return passed


@given(st.data(), weights_, weights_, st.integers(1, 8))
def test_two_backlogged_tenants_are_served_by_weight_to_within_one_request(
    data: st.DataObject, first: float, second: float, num_seats: int
) -> None:
    """The bound of start-time fair queueing (Goyal, Vin, Cheng 1996), Theorem 1, here from the first request on."""
    load = data.draw(backlogs(num_seats))
    weights = (first, second)
    policies = {"t0": TenantPolicy(weight=first), "t1": TenantPolicy(weight=second)}
    server = through(load, GatewayConfig(policies), num_seats)
    passed = while_all_wait(server, load)
    largest = max((each.tokens / weights[each.tenant] for each in passed), default=0.0)
    got = [0.0, 0.0]
    for each in passed:
        got[each.tenant] += each.tokens / weights[each.tenant]
        assert abs(got[0] - got[1]) <= largest * (1 + 1e-9)


@given(st.data(), st.integers(1, 6))
def test_tokens_that_were_charged_and_not_used_are_given_back(data: st.DataObject, num_seats: int) -> None:
    """A tenant that declares too much is ahead by no more than what it has in flight."""
    load = data.draw(backlogs(num_seats, slack=2_000))
    server = through(load, GatewayConfig({}), num_seats)
    charged = (load.num_prompt_tokens + load.max_tokens).max()
    got = [0.0, 0.0]
    for each in while_all_wait(server, load):
        got[each.tenant] += each.tokens
        assert abs(got[0] - got[1]) <= (num_seats + 1) * charged


@given(st.data(), st.integers(1, 6), st.sampled_from(["weighted", "none"]))
def test_nobody_waits_while_there_is_room(data: st.DataObject, num_seats: int, fairness: str) -> None:
    """Work conservation: without limits of tenants, each request goes in when one of the seats is free."""
    load = data.draw(backlogs(num_seats, 3))
    server = through(load, GatewayConfig({}, fairness), num_seats)
    assert server.most_at_once == min(num_seats, len(load))
    lengths = np.array([passed.tokens * 1_000 for passed in server.passed])
    starts = np.array([passed.time_ns for passed in server.passed])
    ends = np.sort(starts + lengths)
    for position in range(num_seats, len(starts)):
        free_ns = ends[position - num_seats]
        assert starts[position] in (free_ns, free_ns + 1), "at most one tick after an answer"


def test_without_fairness_the_first_to_come_goes_first() -> None:
    load = workload([0, 1, 1, 1, 1], [9] * 5, [9] * 5, tenant=[0, 1, 1, 1, 0], tenants=("a", "b"))
    assert [each.tenant for each in through(load, GatewayConfig({}, "none"), 1).passed] == [0, 1, 1, 1, 0]
    assert [each.tenant for each in through(load, GatewayConfig({}, "weighted"), 1).passed] == [0, 1, 0, 1, 1]


def test_a_tenant_that_was_idle_saves_nothing_up() -> None:
    """It begins where the other is, and does not catch up on what that got in the meantime."""
    early, late = 30, 20
    load = workload(
        [0] * early + [10 * 20 * 1_000] * late,
        [10] * (early + late),
        [10] * (early + late),
        tenant=[0] * early + [1] * late,
        tenants=("busy", "late"),
    )
    passed = through(load, GatewayConfig({}), 1).passed
    begin = next(place for place, each in enumerate(passed) if each.tenant == 1)
    assert begin in (10, 11)
    assert {each.tenant for each in passed[:begin]} == {0}
    for end in range(begin, begin + 30):
        turns = [each.tenant for each in passed[begin:end]]
        assert abs(turns.count(0) - turns.count(1)) <= 1


def test_an_empty_server_forgets_who_got_more() -> None:
    load = workload([0, 0, 0, *([S] * 6)], [10] * 9, [10] * 9, tenant=[0, 0, 0, 0, 0, 0, 1, 1, 1], tenants=("a", "b"))
    later = [each.tenant for each in through(load, GatewayConfig({}), 1).passed[3:]]
    assert later == [0, 1, 0, 1, 0, 1]


@given(st.data(), st.integers(1, 4))
def test_the_more_urgent_priority_goes_first(data: st.DataObject, num_seats: int) -> None:
    load = data.draw(backlogs(num_seats, 3))
    policies = {"t0": TenantPolicy(priority=1, weight=100.0), "t1": TenantPolicy(priority=-1)}
    order = [each.tenant for each in through(load, GatewayConfig(policies), num_seats).passed[num_seats:]]
    rank = [{0: 1, 1: -1, 2: 0}[tenant] for tenant in order]
    assert rank == sorted(rank)


@given(st.data(), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_no_more_are_in_flight_than_the_limits_say(
    data: st.DataObject, num_seats: int, of_first: int, of_second: int
) -> None:
    load = data.draw(backlogs(num_seats))
    policies = {"t0": TenantPolicy(max_in_flight=of_first), "t1": TenantPolicy(max_in_flight=of_second)}
    server = through(load, GatewayConfig(policies, max_in_flight=num_seats), 10_000)
    assert server.most_in_flight[0] <= of_first
    assert server.most_in_flight[1] <= of_second
    assert server.most_at_once <= num_seats


@given(st.data(), st.sampled_from([0.5, 3.0, 40.0, 1e5]), st.sampled_from([600.0, 6e4, 6e7]))
def test_no_more_goes_in_than_the_rates_allow(data: st.DataObject, per_s: float, per_minute: float) -> None:
    """In any stretch of time no more than what the bucket holds and what flows in, and one request of any size."""
    load = data.draw(backlogs(2))
    policies = {"t0": TenantPolicy(requests_per_s=per_s, tokens_per_minute=per_minute)}
    passed = [each for each in through(load, GatewayConfig(policies), 10_000).passed if each.tenant == 0]
    for first in range(len(passed)):
        tokens = 0
        for last in range(first, len(passed)):
            tokens += passed[last].tokens
            seconds = (passed[last].time_ns - passed[first].time_ns) / S
            assert last - first + 1 <= max(1.0, per_s) + 1 + per_s * seconds + 1e-6
            largest = max(each.tokens for each in passed[first : last + 1])
            assert tokens <= max(per_minute, largest) + largest + per_minute * seconds / 60 + 1e-3


@given(st.integers(1, 50), st.floats(0.01, 1e4), st.floats(1, 1e4))
def test_a_bucket_opens_exactly_when_it_says(amount: int, per_s: float, capacity: float) -> None:
    bucket = TokenBucket(per_s, capacity)
    now_ns = 0
    for _ in range(20):
        wait_ns = bucket.wait_ns(amount, now_ns)
        if wait_ns > 1:
            assert bucket.wait_ns(amount, now_ns + wait_ns - 1) == 1
        now_ns += wait_ns
        assert bucket.wait_ns(amount, now_ns) == 0
        bucket.take(amount, now_ns)
    least_s = (20 * amount - capacity - amount) / per_s
    assert now_ns / S >= least_s * (1 - 1e-6) - 1e-6


# -- in a simulation


def system(config: SchedulerConfig, gateway: GatewayConfig | None, **changes: Any) -> System:
    return System(config, COST, gateway=gateway, **changes)


def of_tenants(load: Workload, data: st.DataObject, num_tenants: int = 3) -> Workload:
    tenant = data.draw(st.lists(st.integers(0, num_tenants - 1), min_size=len(load), max_size=len(load)))
    return replace(load, tenant=np.array(tenant, np.int64), tenants=tuple("abc"[:num_tenants]))


@st.composite
def gateways(draw: st.DrawFn) -> GatewayConfig:
    policies = {
        name: TenantPolicy(
            weight=draw(weights_),
            priority=draw(st.integers(0, 1)),
            max_in_flight=draw(st.sampled_from([None, None, 1, 3])),
            requests_per_s=draw(st.sampled_from([None, None, 2.0, 50.0])),
            tokens_per_minute=draw(st.sampled_from([None, None, 3_000.0, 1e6])),
            beyond=draw(st.sampled_from(["queue", "queue", "reject"])),
        )
        for name in draw(st.sampled_from(["", "a", "ab", "abc"]))
    }
    limit = draw(st.sampled_from([None, 1, 3]))
    return GatewayConfig(policies, draw(st.sampled_from(["weighted", "none"])), limit)


@given(st.data())
def test_nothing_is_lost_at_the_gateway(data: st.DataObject) -> None:
    """Every request ends, once, with all its tokens, or was refused or given up; and twice the same."""
    config = data.draw(scheduler_configs())
    load = of_tenants(data.draw(workloads(config)), data)
    timeout = data.draw(st.sampled_from([None, None, 100 * MS]))
    load = replace(load, request_timeout_ns=timeout, max_concurrency=data.draw(st.sampled_from([None, None, 2])))
    gateway = data.draw(gateways())
    deployed = system(config, gateway, num_replicas=data.draw(st.integers(1, 2)))
    records = serve(load, deployed, horizon_ns=600 * S)
    table = records.requests
    assert table.request.tolist() == list(range(len(load)))
    finished = table.outcome == Outcome.FINISHED
    assert bool((table.num_output_tokens[finished] > 0).all())
    assert bool((table.replica[finished] >= 0).all())
    whole = load.num_prompt_tokens + load.num_output_tokens <= config.max_model_len
    assert table.num_output_tokens[finished & whole].tolist() == load.num_output_tokens[finished & whole].tolist()
    rejects = {name for name, policy in gateway.tenants.items() if policy.beyond == "reject"}
    for row in np.flatnonzero(table.outcome == Outcome.REJECTED).tolist():
        assert load.tenant is not None
        too_long = int(load.num_prompt_tokens[row]) >= config.max_model_len
        assert too_long or load.tenants[int(load.tenant[row])] in rejects
    if not timeout and not records.stalled:
        assert not bool((table.outcome == Outcome.ABORTED).any())
    again = serve(load, deployed, horizon_ns=600 * S)
    assert all(
        np.array_equal(column, table_columns(again.requests)[name]) for name, column in table_columns(table).items()
    )


@given(st.data())
def test_a_gateway_with_room_for_all_changes_nothing(data: st.DataObject) -> None:
    config = data.draw(scheduler_configs())
    load = of_tenants(data.draw(workloads(config)), data)
    plain = serve(load, system(config, None), horizon_ns=600 * S)
    behind = serve(load, system(config, GatewayConfig(max_in_flight=10_000)), horizon_ns=600 * S)
    assert_equal(plain, behind)


def assert_equal(one: Records, other: Records) -> None:
    pairs = [(one.requests, other.requests)]
    pairs += [(a.steps, b.steps) for a, b in zip(one.replicas, other.replicas, strict=True)]
    for first, second in pairs:
        for name, column in table_columns(first).items():
            assert column.tolist() == table_columns(second)[name].tolist(), name


ENGINE = SchedulerConfig(max_num_seqs=4, num_gpu_blocks=4_000, max_model_len=2_000)


def rival(burst: int = 120, steady: int = 16) -> Workload:
    """One tenant's burst, and another's request every 250 ms."""
    num = burst + steady
    arrivals = [0] * burst + [250 * MS * (k + 1) for k in range(steady)]
    return workload(arrivals, [100] * num, [50] * num, tenant=[0] * burst + [1] * steady, tenants=("burst", "steady"))


def test_fair_queueing_shields_a_tenant_from_a_burst_of_another() -> None:
    load = rival()
    first_come, fair = (
        summarize(serve(load, system(ENGINE, GatewayConfig({}, fairness))), load).tenants
        for fairness in ("none", "weighted")
    )
    assert first_come is not None
    assert fair is not None
    assert first_come.tenants[1].ttft.mean_ms is not None
    assert fair.tenants[1].ttft.mean_ms is not None
    assert fair.tenants[1].ttft.mean_ms < first_come.tenants[1].ttft.mean_ms / 5
    assert first_come.jain_index is not None
    assert fair.jain_index is not None
    assert first_come.jain_index < 0.8 < 0.9 < fair.jain_index <= 1.0


def test_weights_share_out_what_both_ask_for() -> None:
    num = 60
    load = workload([0] * (2 * num), [100] * (2 * num), [50] * (2 * num), tenant=[0, 1] * num, tenants=("a", "b"))
    deployed = system(ENGINE, GatewayConfig({"a": TenantPolicy(weight=3.0)}))
    table = serve(load, deployed).requests
    order = np.lexsort((table.request, table.scheduled_ns))
    first = load.tenant[order][: num // 2 * 4 // 3] if load.tenant is not None else np.zeros(0)
    assert 0.7 <= float((first == 0).mean()) <= 0.8


def test_beyond_its_limit_a_tenant_is_rejected_at_once() -> None:
    load = workload([0] * 5, [10] * 5, [10] * 5, tenant=[0] * 5, tenants=("a",))
    policy = TenantPolicy(max_in_flight=2, beyond="reject")
    table = serve(load, system(ENGINE, GatewayConfig({"a": policy}))).requests
    assert table.outcome.tolist() == [Outcome.FINISHED] * 2 + [Outcome.REJECTED] * 3
    assert table.finish_ns[2:].tolist() == [0, 0, 0]


def test_settings_for_a_tenant_that_is_not_there_are_refused() -> None:
    load = workload([0], [10], [10], tenant=[0], tenants=("acme",))
    with pytest.raises(ValueError, match="tenant 'acne', but the workload has no such tenant"):
        serve(load, system(ENGINE, GatewayConfig({"acne": TenantPolicy()})))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": 0.0}, "weight must be above 0 and finite, got 0.0"),
        ({"max_in_flight": 0}, "max_in_flight must be at least 1, got 0"),
        ({"requests_per_s": 0.0}, "requests_per_s must be from 0.001 to 1e12, got 0.0"),
        ({"tokens_per_minute": -1.0}, "tokens_per_minute must be from 0.001 to 1e12, got -1.0"),
        ({"beyond": "wait"}, "beyond must be one of queue, reject, got 'wait'"),
    ],
)
def test_a_policy_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TenantPolicy(**changes)


# -- whose requests they are


def test_a_tenant_goes_with_its_request_wherever_workloads_are_cut() -> None:
    load = workload(
        [0, S, 2 * S, 3 * S], [1, 2, 3, 4], [5] * 4, tenant=[1, 0, 1, 0], tenants=("a", "b"), labels=tuple("wxyz")
    )
    cut = slice_time(load, 1.0, 2.0)
    assert (cut.tenant.tolist(), cut.tenants) == ([0, 1], ("a", "b"))
    first = truncate(load, 3)
    assert first.tenant is not None
    assert first.tenant.tolist() == [1, 0, 1]
    sample = saturating_sample(load, ENGINE)
    assert sample.tenant is not None
    assert len(sample.tenant) == len(sample)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_tenants_are_written_and_read_again(name: str, tmp_path: Path) -> None:
    load = workload([0, 5, 9], [1, 2, 3], [5] * 3, tenant=[2, 0, 2], tenants=('"q", é', "idle", "b"))
    write_workload(load, tmp_path / name)
    again = read_trace(tmp_path / name)
    assert (again.tenant.tolist(), again.tenants) == ([2, 0, 2], load.tenants)


def test_a_trace_of_ours_names_tenants_by_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("arrival_s,num_prompt_tokens,num_output_tokens,tenant\n1,5,5,acme\n0,5,5,\n2,5,5,acme\n")
    load = read_trace(path)
    assert [load.tenants[place] for place in load.tenant.tolist()] == ["default", "acme", "acme"]


def test_a_conversation_belongs_to_one_tenant(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows = "0,10,5,s,acme\n,20,5,s,free\n"
    path.write_text(f"arrival_s,num_prompt_tokens,num_output_tokens,session_id,tenant\n{rows}")
    with pytest.raises(TraceError, match=":3: its tenant is 'free', that of the turn before 'acme'"):
        read_trace(path)


def drawn(tenants: Any, **more: Any) -> Workload:
    arguments: dict[str, Any] = {"arrivals": 5.0, "prompt": 100, "output": {"dist": "geometric", "mean": 20}, "seed": 3}
    return synthetic_workload(400, **{**arguments, **more}, tenants=tenants)


def test_shares_label_requests_and_leave_all_else_as_it_was() -> None:
    load = drawn({"acme": 0.7, "free": 0.3})
    assert load.tenant is not None
    assert 0.6 < float((load.tenant == 0).mean()) < 0.8
    assert_same_but_tenants(load, drawn(None))


def assert_same_but_tenants(load: Workload, plain: Workload) -> None:
    for name in ("arrival_ns", "num_prompt_tokens", "num_output_tokens", "previous", "think_ns", "max_tokens"):
        assert getattr(load, name).tolist() == getattr(plain, name).tolist(), name


def test_all_turns_of_a_conversation_are_one_tenant_s() -> None:
    sessions = {"turns": 4, "think": 1.0}
    for tenants in ({"a": 1, "b": 1}, {"a": {"share": 1, "input": 7}, "b": 1}):
        load = drawn(tenants, sessions=sessions)
        assert load.tenant is not None
        assert len(load) == 400
        turns = np.flatnonzero(load.previous >= 0)
        assert load.tenant[turns].tolist() == load.tenant[load.previous[turns]].tolist()
        assert len(set(load.tenant.tolist())) == 2


def test_a_tenant_may_have_lengths_of_its_own() -> None:
    load = drawn({"long": {"share": 1, "input": 900, "max_tokens": 5, "priority": 2}, "short": {"share": 3}})
    assert load.tenant is not None
    long = load.tenant == 0
    assert 60 < int(long.sum()) < 140
    assert set(load.num_prompt_tokens[long].tolist()) == {900}
    assert set(load.num_prompt_tokens[~long].tolist()) == {100}
    assert int(load.num_output_tokens[long].max()) <= 5
    assert set(load.priority[long].tolist()) == {2}
    assert set(load.priority[~long].tolist()) == {0}
    assert load.arrival_ns.tolist() == drawn(None).arrival_ns.tolist(), "requests still come as one stream"


def test_tenants_with_rates_of_their_own_come_by_themselves() -> None:
    load = drawn({"a": {"request_rate": 3}, "b": {"request_rate": 1, "start_s": 50}})
    assert load.tenant is not None
    assert np.bincount(load.tenant).tolist() == [300, 100]
    for place, (begin_s, end_s) in enumerate(((0, 100), (50, 150))):
        times_s = load.arrival_ns[load.tenant == place] / S
        assert begin_s <= times_s.min()
        assert times_s.max() == pytest.approx(end_s)
    alone = drawn({"a": {"request_rate": 3, "num_requests": 300}, "b": {"request_rate": 9, "num_requests": 7}})
    assert alone.tenant is not None
    own = alone.arrival_ns[alone.tenant == 0]
    assert own.tolist() == load.arrival_ns[load.tenant == 0].tolist(), "one tenant's draws are not touched by others'"


def test_prefixes_of_tenants_that_are_drawn_apart_are_their_own() -> None:
    tenants = {"a": {"share": 1, "input": 50}, "b": {"share": 1}}
    load = drawn(tenants, prefixes={"num_prefixes": 2, "prefix_tokens": 64})
    assert load.tenant is not None
    assert load.content is not None
    streams = [{load.content[row][0][0] for row in np.flatnonzero(load.tenant == place)} for place in (0, 1)]
    assert streams[0] & streams[1] == set()
    assert load.num_streams == 4


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ({}, "tenants: name at least one tenant"),
        ({"a": 0, "b": 0}, "tenants: the shares must not all be 0"),
        ({"a": -1}, "tenants.a: share must be a finite number of at least 0, got -1"),
        ({"a": "many"}, "tenants.a: must be a share such as 0.3 or a table, got 'many'"),
        ({"a": {"share": 1, "request_rate": 2}}, "tenants.a: give a share of all requests or arrivals of its own"),
        ({"a": {"request_rate": 2}, "b": 1}, "a has arrivals of its own and b has none"),
        ({"a": {"rate": 2}}, "tenants.a: there is no key 'rate'"),
        ({"a": {"arrival": {"process": "at_once"}}}, "an arrival process of its own needs num_requests"),
        ({"a": {"num_requests": 5}}, "num_requests and start_s need arrivals of its own"),
        ({"a": {"request_rate": float("inf")}, "b": {"request_rate": 1}}, "give each its num_requests"),
    ],
)
def test_a_description_that_says_nothing_clear_is_refused(tenants: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drawn(tenants)


# -- what the summary says


@given(st.floats(0, 1e6), st.lists(st.tuples(st.floats(0, 1e5), weights_), min_size=1, max_size=6))
def test_fair_shares_are_weighted_max_min(total: float, demands: list[tuple[float, float]]) -> None:
    """All is given out that is asked for, and who gets less than he asks for gets the most for his weight."""
    asked, weights = [demand for demand, _ in demands], [weight for _, weight in demands]
    parts = fair_shares(total, asked, weights)
    assert sum(parts) == pytest.approx(min(total, sum(asked)), rel=1e-9, abs=1e-6)
    level = max(part / weight for part, weight in zip(parts, weights, strict=True))
    for part, demand, weight in zip(parts, asked, weights, strict=True):
        assert part <= demand + 1e-9
        if part < demand * (1 - 1e-9) - 1e-6:
            assert part / weight == pytest.approx(level, rel=1e-6, abs=1e-6)


def test_jain_s_index_is_1_for_equals_and_1_over_n_for_one_that_takes_all() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain_index([1.0]) is None
    assert jain_index([0.0, 0.0]) is None


@given(st.data())
def test_tenants_add_up_to_the_run(data: st.DataObject) -> None:
    config = data.draw(scheduler_configs())
    load = of_tenants(data.draw(workloads(config)), data)
    records = serve(load, system(config, data.draw(gateways())), horizon_ns=600 * S)
    summary = summarize(records, load, goodput="ttft:100")
    of, goodput = summary.tenants, summary.goodput
    assert of is not None
    assert goodput is not None
    for name in ("completed", "rejected", "aborted", "unfinished"):
        assert sum(getattr(tenant, name) for tenant in of.tenants) == getattr(summary, name)
    assert sum(tenant.num_requests for tenant in of.tenants) == len(load)
    assert sum(tenant.num_good_requests or 0 for tenant in of.tenants) == goodput.num_good_requests
    shares = [tenant.token_share for tenant in of.tenants if tenant.token_share is not None]
    assert not shares or sum(shares) == pytest.approx(1.0)
    counts = [(tenant.itl.count, tenant.itl.mean_ms or 0.0) for tenant in of.tenants]
    assert sum(count for count, _ in counts) == summary.itl.count
    assert sum(count * mean for count, mean in counts) == pytest.approx(
        summary.itl.count * (summary.itl.mean_ms or 0.0), abs=1e-6
    )
    assert sum(map(sum, of.evictions)) == sum(len(replica.preemptions) for replica in records.replicas)


def test_a_lone_tenant_competes_with_nobody() -> None:
    load = workload([0, 0, 0], [10] * 3, [10] * 3, tenant=[0] * 3, tenants=("only",))
    of = tenants_summary(serve(load, system(ENGINE, None)), load)
    assert of is not None
    assert of.jain_index is None
    assert (of.tenants[0].contended_s, of.tenants[0].fair_share_ratio) == (0.0, None)


SCENARIO: dict[str, Any] = {
    "name": "two",
    "deployment": {"num_gpu_blocks_override": 4_000},
    "engine": {"max_num_seqs": 4, "max_model_len": 2_000},
    "workload": {"num_requests": 80, "request_rate": 20, "input": 100, "output": 50, "tenants": {"a": 0.7, "b": 0.3}},
    "cost": {"kind": "constant", "step_s": 0.01},
    "slo": {"goodput": ["ttft:500"]},
}


def test_a_run_with_tenants_is_saved_and_loaded_whole(tmp_path: Path) -> None:
    run = wt.simulate({**SCENARIO, "tenants": {"a": {"weight": 2.0}}})
    run.save(tmp_path / "run")
    again = wt.load_run(tmp_path / "run")
    assert again.summary == run.summary
    assert again.text() == run.text()
    assert again.requests.tenant.value_counts().to_dict() == run.requests.tenant.value_counts().to_dict()
    tenants = run.summary["tenants"]
    assert run.summary["tenant_a_p99_ttft_ms"] == tenants[0]["p99_ttft_ms"]
    assert [tenant["name"] for tenant in tenants] == ["a", "b"]
    assert [tenant["weight"] for tenant in tenants] == [2.0, 1.0]
    assert all(tenant["slowdown"] > 1 for tenant in tenants)


def test_every_report_names_the_tenants(tmp_path: Path) -> None:
    run = wt.simulate(SCENARIO, tenants={"a": {"weight": 2.0}})
    run.report(tmp_path / "a.html")
    assert "Tenants" in run.text()
    assert "| a | 2 |" in run.markdown()
    page = (tmp_path / "a.html").read_text()
    assert 'id="tenants"' in page
    assert "Tokens by tenant" in page


def test_without_tenants_nothing_speaks_of_them(tmp_path: Path) -> None:
    plain = {**SCENARIO, "workload": {**SCENARIO["workload"], "tenants": None}}
    plain["workload"].pop("tenants")
    run = wt.simulate(plain)
    assert "tenants" not in run.summary
    assert "enant" not in run.text() + run.markdown()
    assert "tenant" not in run.requests.columns


def test_a_tenant_alone_is_slowed_down_by_nobody() -> None:
    light = {**SCENARIO["workload"], "request_rate": 1, "burstiness": "inf", "tenants": {"a": 0.5, "b": 0.5}}
    tenants = wt.simulate({**SCENARIO, "workload": light}).summary["tenants"]
    assert [tenant["slowdown"] for tenant in tenants] == [1.0, 1.0]
    assert "slowdown" in wt.simulate(SCENARIO, tenants_alone=False).summary["tenants"][0]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"tenants": {"a": {"wieght": 2.0}}}, "unknown key 'wieght' in .tenants.; did you mean 'weight'"),
        ({"tenants": {"a": {"weight": 0}}}, "weight = 0 in .tenants. must be above 0"),
        ({"tenants": {"c": {"weight": 2.0}}}, "there are settings for the tenant 'c', but the workload has no such"),
        ({"gateway": {"fairness": "much"}}, "fairness = 'much' in .gateway. must be one of 'weighted' or 'none'"),
    ],
)
def test_a_scenario_with_wrong_tenants_says_what_is_wrong(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        resolve(load_scenario({**SCENARIO, **sections}))


def test_no_gateway_stands_there_unless_it_is_asked_for() -> None:
    assert resolve(load_scenario(SCENARIO)).system.gateway is None
    assert resolve(load_scenario({**SCENARIO, "gateway": {}})).system.gateway == GatewayConfig()
    asked = resolve(load_scenario({**SCENARIO, "tenants": {"b": {"max_in_flight": 2}}})).system.gateway
    assert asked == GatewayConfig({"b": TenantPolicy(max_in_flight=2)})


def test_the_throughput_at_saturation_knows_no_gateway() -> None:
    config = SchedulerConfig(max_num_seqs=4, num_gpu_blocks=4_000, max_model_len=2_000)
    load = replace(rival(), tenant=None, tenants=())
    assert System(config, ConstantCost(0.01), gateway=GatewayConfig(max_in_flight=1)) != System(
        config, ConstantCost(0.01)
    )
    from windtunnel.scenarios.saturation import saturation_request_throughput

    narrow = System(config, ConstantCost(0.01), gateway=GatewayConfig(max_in_flight=1))
    assert saturation_request_throughput(load, narrow) == saturation_request_throughput(
        load, System(config, ConstantCost(0.01))
    )
