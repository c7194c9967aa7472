"""Prefill and decode replicas: laws of the hand-over, the arithmetic of links, and what scenarios and reports say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import scheduler_configs, workloads

import windtunnel as wt
from windtunnel.scenarios.errors import ScenarioError
from windtunnel.scenarios.load import load_scenario
from windtunnel.scenarios.resolve import resolve
from windtunnel.sim.cost.constant import AffineCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.remote import DecodeScheduler, PrefillScheduler
from windtunnel.sim.engine.request import Request
from windtunnel.sim.engine.static import StaticConfig
from windtunnel.sim.fleet.autoscaler import Autoscaler
from windtunnel.sim.fleet.faults import Crash
from windtunnel.sim.fleet.fleet import Fleet, Pool
from windtunnel.sim.fleet.records import Fate, TransferTable
from windtunnel.sim.fleet.routers import Routing
from windtunnel.sim.fleet.transfer import KvTransfer, Links
from windtunnel.sim.metrics.summary import summarize
from windtunnel.sim.records import Outcome, Records, table_columns
from windtunnel.sim.simulate import RequestTooLarge, serve
from windtunnel.sim.system import System
from windtunnel.sim.tenancy import GatewayConfig, TenantPolicy
from windtunnel.sim.workload import Workload, workload
from windtunnel.sim.world import REPLY_NS

MS = 1_000_000
S = 1_000_000_000
COST = AffineCost(base_s=3e-3, token_s=1.7e-5, seq_s=1e-5, decode_context_s=4e-7, prefill_pair_s=1e-8)
BYTES = 1_000
"""KV cache of a token."""
HORIZON_NS, LATE_NS = 30 * S, 29 * S


def fleet(
    prefill: SchedulerConfig,
    decode: SchedulerConfig,
    num_prefill: int = 1,
    num_decode: int = 1,
    transfer: KvTransfer | None = None,
    routing: Routing | None = None,
) -> Fleet:
    """Prefill replicas first, then decode replicas."""
    pools = (
        Pool("p", System(prefill, COST, num_replicas=num_prefill), role="prefill", kv_bytes_per_token=BYTES),
        Pool("d", System(decode, COST, num_replicas=num_decode), role="decode", kv_bytes_per_token=BYTES),
    )
    return Fleet(pools, routing or Routing("least_requests"), transfer=transfer or KvTransfer(1e9, MS))


def transfers_of(records: Records) -> TransferTable:
    assert records.fleet is not None
    assert records.fleet.transfers is not None
    return records.fleet.transfers


ENGINE = SchedulerConfig(max_num_seqs=8, num_gpu_blocks=2_000, max_num_batched_tokens=1_024, max_model_len=4_096)


def step_ns(prefill_tokens: int, context: int = 0, num_seqs: int = 1) -> int:
    """A step of a prompt (or the last token of one) on an otherwise empty engine."""
    pairs = prefill_tokens * context + prefill_tokens * (prefill_tokens + 1) // 2
    return round((3e-3 + 1.7e-5 * prefill_tokens + 1e-5 * num_seqs + 1e-8 * pairs) * 1e9)


def test_a_lone_request_takes_the_sum_of_its_stages() -> None:
    """Prefill, one tick to the gateway, the copy, and a step for the last prompt token: then the client's first."""
    load = workload([0], [160], [5])
    records = serve(load, fleet(ENGINE, ENGINE, transfer=KvTransfer(1e9, 2 * MS)))
    prefilled_ns = step_ns(160)
    copied_ns = prefilled_ns + REPLY_NS + 160 * BYTES + 2 * MS
    table, moved = records.requests, transfers_of(records)
    assert moved.prefilled_ns.tolist() == [prefilled_ns]
    assert moved.end_ns.tolist() == [copied_ns]
    assert (moved.num_blocks.tolist(), moved.num_bytes.tolist()) == ([10], [160 * BYTES])
    assert table.scheduled_ns.tolist() == [0]
    assert table.first_token_ns.tolist() == [copied_ns + step_ns(1, 159)]
    assert table.replica.tolist() == [1]
    assert records.replicas[0].steps.num_decode_seqs.sum() == 0
    assert len(records.replicas[0].spans) == 0, "the prefill replica's token is nobody's"
    assert records.replicas[1].spans.count.sum() == 5


@st.composite
def served(draw: st.DrawFn, **changes: Any) -> tuple[Workload, Fleet]:
    """A small fleet with both roles, all of whose limits bite now and then, and requests for it."""
    is_async = draw(st.booleans())
    prefill = draw(scheduler_configs(async_scheduling=is_async))
    same = {"block_size": prefill.block_size, "max_model_len": prefill.max_model_len}
    decode = draw(scheduler_configs(**same, enable_chunked_prefill=True, async_scheduling=draw(st.booleans())))
    smallest = min((prefill, decode), key=lambda config: config.num_kv_tokens)
    load = draw(workloads(smallest))
    transfer = KvTransfer(draw(st.sampled_from([1e6, 1e7, 1e12])), draw(st.sampled_from([0, 1, 3 * MS])))
    routing = Routing(draw(st.sampled_from(["vllm", "round_robin", "least_requests", "shared_queue"])))
    made = fleet(prefill, decode, draw(st.integers(1, 3)), draw(st.integers(1, 3)), transfer, routing)
    return replace(load, **changes), made


@given(served())
def test_requests_tokens_and_caches_are_conserved(case: tuple[Workload, Fleet]) -> None:
    load, made = case
    records = serve(load, made, horizon_ns=HORIZON_NS)
    table, moved = records.requests, transfers_of(records)
    assert table.request.tolist() == list(range(len(load)))
    if records.stalled or bool((table.outcome == Outcome.UNFINISHED).any()):
        return  # requests that preempt each other for ever, as in vLLM
    finished = table.outcome == Outcome.FINISHED
    too_long = load.num_prompt_tokens >= made.pools[0].system.config.max_model_len
    assert finished.tolist() == (~too_long).tolist()
    cut = np.minimum(load.num_output_tokens, made.pools[0].system.config.max_model_len - load.num_prompt_tokens)
    assert table.num_output_tokens[finished].tolist() == cut[finished].tolist()
    assert sorted(moved.request.tolist()) == np.flatnonzero(finished).tolist(), "each cache moves once"
    assert records.fleet is not None
    stays = records.fleet.stays
    for row in np.flatnonzero(finished).tolist():
        fates = stays.fate[stays.request == row].tolist()
        assert fates == [Fate.PREFILLED, Fate.FINISHED]
    summary = summarize(records, load)
    waste = summary.waste
    unseen = waste.computed_tokens - waste.useful_tokens - waste.recomputed_tokens
    assert unseen == 0 or (made.pools[1].system.config.async_scheduling and unseen <= 2 * len(load))
    assert waste.recomputed_tokens >= int(finished.sum()), "the last token of each prompt is computed twice"
    if not summary.preemption.num_preemptions:
        assert waste.recomputed_tokens == int(finished.sum())


@given(served())
def test_causes_precede_effects(case: tuple[Workload, Fleet]) -> None:
    load, made = case
    records = serve(load, made, horizon_ns=HORIZON_NS)
    table, moved = records.requests, transfers_of(records)
    row = moved.request
    chain = [
        table.due_ns[row],
        table.arrival_ns[row],
        table.scheduled_ns[row],
        moved.prefilled_ns,
        moved.asked_ns,
        moved.start_ns,
    ]
    for before, after in pairwise(chain):
        assert bool((before <= after).all())
    done = moved.end_ns >= 0
    assert bool((moved.start_ns < moved.end_ns)[done].all())
    began = done & (table.first_token_ns[row] >= 0)
    assert bool((moved.end_ns < table.first_token_ns[row])[began].all())


@given(served())
def test_a_link_copies_one_cache_at_a_time_in_each_direction(case: tuple[Workload, Fleet]) -> None:
    load, made = case
    assert made.transfer is not None
    moved = transfers_of(serve(load, made, horizon_ns=HORIZON_NS))
    copied_ns = np.array([made.transfer.copy_ns(number) for number in moved.num_bytes.tolist()], np.int64)
    for ends in (moved.sender, moved.receiver):
        for replica in set(ends.tolist()):
            mine = ends == replica
            order = np.argsort(moved.start_ns[mine], kind="stable")
            starts, busy_until = moved.start_ns[mine][order], (moved.start_ns + copied_ns)[mine][order]
            assert bool((starts[1:] >= busy_until[:-1]).all())
    done = moved.end_ns >= 0
    assert (moved.end_ns - moved.start_ns)[done].tolist() == (copied_ns + made.transfer.latency_ns)[done].tolist()


@given(served(), st.sampled_from([40 * MS, 90 * MS, 300 * MS]))
def test_clients_that_leave_take_nothing_along(case: tuple[Workload, Fleet], timeout_ns: int) -> None:
    """In whatever stage they are: nothing is lost, and all blocks are free afterwards."""
    load, made = case
    load = replace(load, request_timeout_ns=timeout_ns)
    late = workload([LATE_NS], [1], [1])
    both = joined(load, late)
    records = serve(both, made, horizon_ns=HORIZON_NS)
    table = records.requests
    assert set(table.outcome[:-1].tolist()) <= {Outcome.FINISHED, Outcome.ABORTED, Outcome.REJECTED}
    assert table.outcome[-1] == Outcome.FINISHED
    for replica in records.replicas:
        if len(replica.steps) and int(replica.steps.start_ns[-1]) >= LATE_NS:
            first = int(np.searchsorted(replica.steps.start_ns, LATE_NS))
            assert int(replica.steps.num_free_blocks[first]) >= replica.num_usable_blocks - 1


def joined(load: Workload, late: Workload) -> Workload:
    """The one workload and then the other."""
    columns = {
        name: np.concatenate([getattr(load, name), getattr(late, name)])
        for name in (
            "arrival_ns",
            "num_prompt_tokens",
            "num_output_tokens",
            "max_tokens",
            "priority",
            "previous",
            "think_ns",
        )
    }
    content = None if load.content is None else (*load.content, ())
    return replace(load, **columns, content=content)


@given(served())
def test_the_same_fleet_does_the_same_again(case: tuple[Workload, Fleet]) -> None:
    load, made = case
    one, other = (serve(load, made, horizon_ns=HORIZON_NS) for _ in range(2))
    for first, second in ((one.requests, other.requests), (transfers_of(one), transfers_of(other))):
        for name, column in table_columns(first).items():
            assert column.tolist() == table_columns(second)[name].tolist(), name


@given(served())
def test_decode_replicas_compute_no_prompt_but_what_preemption_lost(case: tuple[Workload, Fleet]) -> None:
    load, made = case
    records = serve(load, made, horizon_ns=HORIZON_NS)
    num_prefill = made.pools[0].system.num_replicas
    for number, replica in enumerate(records.replicas):
        steps = replica.steps
        if number < num_prefill:
            assert int(steps.num_decode_seqs.sum()) == 0
        elif not len(replica.preemptions):
            assert steps.prefill_tokens.tolist() == steps.num_prefill_seqs.tolist()


# -- single effects


def test_blocks_of_a_prompt_stay_until_they_are_read() -> None:
    """A slow link lets the prefill replica's cache fill up, and the next prompt has to wait for it."""
    narrow = replace(ENGINE, num_gpu_blocks=12)
    load = workload([0, 0], [160, 160], [2, 2])
    slow = transfers_of(serve(load, fleet(narrow, ENGINE, transfer=KvTransfer(160 * BYTES / 0.5))))
    fast = transfers_of(serve(load, fleet(narrow, ENGINE, transfer=KvTransfer(1e12))))
    assert int(slow.end_ns[0] - slow.start_ns[0]) == 500 * MS
    assert int(slow.prefilled_ns[1]) >= int(slow.end_ns[0]) + step_ns(160)
    assert int(fast.prefilled_ns[1]) < 20 * MS


def test_a_full_decode_replica_holds_the_prefill_replica_s_blocks() -> None:
    small = replace(ENGINE, max_num_seqs=1)
    load = workload([0, 100 * MS], [160, 160], [100, 2])
    records = serve(load, fleet(ENGINE, small))
    moved = transfers_of(records)
    assert int(moved.asked_ns[1]) >= int(records.requests.finish_ns[0]), "one seat, one load"
    summary = summarize(records, load)
    assert summary.transfers is not None
    assert summary.transfers.hand_over.max_ms is not None
    assert summary.transfers.hand_over.max_ms > 200


def test_two_copies_from_one_replica_share_its_link() -> None:
    links = Links(KvTransfer(1e9, 5))
    assert links.begin(0, 2, 1_000, 100) == (100, 1_105)
    assert links.begin(0, 3, 1_000, 100) == (1_100, 2_105)
    assert links.begin(1, 3, 500, 200) == (2_100, 2_605)
    assert links.begin(1, 2, 500, 3_000) == (3_000, 3_505)


def test_what_the_decode_replica_has_cached_is_not_copied_again() -> None:
    content = (((0, 128),), ((0, 128),))
    load = workload([0, S], [160, 160], [2, 2], content=content, num_streams=1)
    moved = transfers_of(serve(load, fleet(ENGINE, ENGINE)))
    assert moved.num_blocks.tolist() == [10, 2]
    records = serve(load, fleet(ENGINE, ENGINE))
    assert records.requests.num_cached_tokens.tolist() == [0, 128], "as found where the prompt was computed"


def test_a_request_preempted_while_it_decodes_is_computed_again_there() -> None:
    """Its cache does not move a second time."""
    tight = SchedulerConfig(
        max_num_seqs=4, num_gpu_blocks=24, max_num_batched_tokens=512, max_model_len=4_096, enable_prefix_caching=False
    )
    load = workload([0, 0], [150, 150], [120, 120])
    records = serve(load, fleet(ENGINE, tight))
    assert len(records.replicas[1].preemptions) >= 1
    assert len(transfers_of(records)) == 2
    steps = records.replicas[1].steps
    assert int(steps.prefill_tokens.max()) > 150
    assert records.requests.outcome.tolist() == [Outcome.FINISHED] * 2


def test_mixed_replicas_beside_them_serve_whole_requests() -> None:
    made = fleet(ENGINE, ENGINE)
    mixed = replace(made, pools=(Pool("m", System(ENGINE, COST)), *made.pools), routing=Routing("round_robin"))
    load = workload([0, S, 2 * S, 3 * S], [100] * 4, [5] * 4)
    records = serve(load, mixed)
    assert records.requests.replica.tolist() == [0, 2, 0, 2]
    assert transfers_of(records).request.tolist() == [1, 3]


def test_gaps_between_tokens_never_hold_a_prompt() -> None:
    """What disaggregation is for: nobody who reads an answer waits for somebody else's prompt."""
    rng = np.random.default_rng(5)
    num = 60
    load = workload(np.sort(rng.integers(0, 10 * S, num)), rng.integers(300, 1_000, num), rng.integers(20, 80, num))
    mixed = Fleet((Pool("m", System(ENGINE, COST, num_replicas=2)),))
    apart = summarize(serve(load, fleet(ENGINE, ENGINE)), load)
    together = summarize(serve(load, mixed), load)
    assert apart.itl.max_ms is not None
    assert together.itl.max_ms is not None
    assert apart.itl.max_ms < 6 < 20 < together.itl.max_ms
    assert apart.total_output_tokens == together.total_output_tokens


def test_an_engine_without_loads_is_the_plain_one() -> None:
    """Requests that come whole to a decode engine are served as ever."""
    from windtunnel.sim.engine.scheduler import Scheduler

    def refuse(request: Request, num_blocks: int, now_ns: int) -> None:
        raise AssertionError("nothing is to be loaded")

    plain, decode = Scheduler(ENGINE), DecodeScheduler(ENGINE, refuse)
    for scheduler in (plain, decode):
        for row in range(20):
            scheduler.add(Request(row, 0, 100 + 37 * row, 10 + row))
    while plain.num_requests:
        one, other = plain.schedule(0), decode.schedule(0)
        assert one.shape == other.shape
        ends = plain.commit(one, 1), decode.commit(other, 1)
        assert [each.request_id for each in ends[0]] == [each.request_id for each in ends[1]]
    assert plain.pool.free_queue() == decode.pool.free_queue()


def test_a_prefill_engine_gives_blocks_back_when_they_are_read() -> None:
    scheduler = PrefillScheduler(ENGINE)
    request = Request(0, 0, 160, 1)
    scheduler.add(request)
    assert scheduler.commit(scheduler.schedule(0), 1) == [request]
    assert (scheduler.num_requests, scheduler.num_held) == (0, 1)
    assert scheduler.pool.num_free == ENGINE.num_usable_blocks - 10
    scheduler.release(request)
    assert scheduler.pool.num_free == ENGINE.num_usable_blocks


# -- what is refused


def pool(role: str, **changes: Any) -> Pool:
    return Pool(role, System(ENGINE, COST), role=role, **{"kv_bytes_per_token": BYTES, **changes})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fleet((pool("prefill"),), transfer=KvTransfer(1e9)), "there is no pool with the role decode"),
        (lambda: Fleet((pool("prefill"), pool("decode"))), "how a cache is copied was not said"),
        (lambda: pool("both"), "role of pool both must be one of mixed, prefill, decode, got 'both'"),
        (lambda: pool("decode", kv_bytes_per_token=None), "kv_bytes_per_token must be at least 1, got None"),
        (
            lambda: pool("decode", autoscaler=Autoscaler("waiting", 1.0, max_replicas=2)),
            "autoscaling of such pools is not modelled",
        ),
        (
            lambda: Fleet(
                (pool("prefill"), pool("decode")), faults=(Crash("prefill", 0, S),), transfer=KvTransfer(1e9)
            ),
            "faults of fleets with prefill and decode roles are not modelled",
        ),
        (
            lambda: Pool("p", System(ENGINE, COST, StaticConfig(4)), role="prefill", kv_bytes_per_token=1),
            "only continuous batching",
        ),
        (
            lambda: Pool(
                "p", System(replace(ENGINE, pipeline_parallel_size=2), COST), role="prefill", kv_bytes_per_token=1
            ),
            "not modelled for engines with speculative decoding or pipeline parallelism",
        ),
        (lambda: KvTransfer(0.0), "bytes_per_s of a KV transfer must be above 0 and finite, got 0.0"),
        (lambda: KvTransfer(1.0, -1), "latency_ns of a KV transfer must be at least 0, got -1"),
    ],
)
def test_what_is_not_modelled_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_blocks_of_two_sizes_do_not_fit_each_other() -> None:
    other = Pool("d", System(replace(ENGINE, block_size=32), COST), role="decode", kv_bytes_per_token=1)
    with pytest.raises(ValueError, match=r"block_size must be the same in prefill and decode pools, got \[16, 32\]"):
        Fleet((pool("prefill"), other), transfer=KvTransfer(1e9))


def test_a_prompt_that_one_role_takes_the_other_takes_too() -> None:
    shorter = replace(ENGINE, max_model_len=ENGINE.max_model_len // 2)
    other = Pool("d", System(shorter, COST), role="decode", kv_bytes_per_token=1)
    with pytest.raises(ValueError, match="max_model_len must be the same in prefill and decode pools, got"):
        Fleet((pool("prefill"), other), transfer=KvTransfer(1e9))


def test_a_prefill_replica_needs_room_for_prompts_only() -> None:
    narrow = replace(ENGINE, num_gpu_blocks=12)
    load = workload([0], [160], [200])
    assert serve(load, fleet(narrow, ENGINE)).requests.outcome.tolist() == [Outcome.FINISHED]
    with pytest.raises(RequestTooLarge):
        serve(load, fleet(ENGINE, narrow))


# -- scenarios and reports

SCENARIO: dict[str, Any] = {
    "name": "apart",
    "deployment": {"num_gpu_blocks_override": 4_000},
    "engine": {"max_num_seqs": 8, "max_model_len": 2_000},
    "workload": {"num_requests": 60, "request_rate": 20, "input": 300, "output": 20},
    "cost": {"kind": "affine", "base_s": "3ms", "token_s": 1e-5},
    "fleet": {
        "kv_transfer_bandwidth": "1GB",
        "kv_transfer_latency": "2ms",
        "kv_bytes_per_token": 1000,
        "pools": {"p": {"role": "prefill"}, "d": {"role": "decode", "replicas": 2}},
    },
}


def fleet_section(**changes: Any) -> dict[str, Any]:
    return {**SCENARIO, "fleet": {**SCENARIO["fleet"], **changes}}


def test_a_run_with_roles_is_saved_and_loaded_whole(tmp_path: Path) -> None:
    run = wt.simulate(SCENARIO)
    run.save(tmp_path / "run")
    again = wt.load_run(tmp_path / "run")
    assert again.summary == run.summary
    assert again.text() == run.text()
    assert run.summary["kv_transfers"] == 60
    assert run.summary["kv_transfer_bytes"] == 60 * 19 * 16 * 1000
    assert run.summary["mean_kv_copy_ms"] == pytest.approx(2 + 19 * 16 * 1000 / 1e9 * 1e3)


def test_every_report_speaks_of_the_transfers(tmp_path: Path) -> None:
    run = wt.simulate(SCENARIO)
    run.report(tmp_path / "a.html")
    assert "KV caches handed over" in run.text()
    assert "KV caches handed over" in run.markdown()
    assert "KV caches handed over" in (tmp_path / "a.html").read_text()


def test_a_model_says_how_large_a_token_s_cache_is() -> None:
    named = fleet_section()
    named["fleet"].pop("kv_bytes_per_token")
    named["deployment"] = {"model": "meta-llama/Llama-3.1-8B-Instruct", "gpu": "H100-SXM", "tensor_parallel_size": 2}
    made = resolve(load_scenario(named)).fleet
    assert made is not None
    assert [each.kv_bytes_per_token for each in made.pools] == [2 * 32 * 8 * 128 * 2 // 2] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_transfer_bandwidth": None}, "so the way between them has to be known: give kv_transfer_bandwidth"),
        ({"kv_bytes_per_token": None}, "give a model, or kv_bytes_per_token"),
        ({"pools": {"a": {}, "b": {}}}, "is for pools with the roles prefill and decode, and none has one"),
        ({"pools": {"p": {"role": "prefill"}}}, "there is no pool with the role decode"),
    ],
)
def test_a_scenario_that_lacks_something_says_what(changes: dict[str, Any], message: str) -> None:
    given_ = {key: value for key, value in fleet_section(**changes)["fleet"].items() if value is not None}
    with pytest.raises(ScenarioError, match=message):
        resolve(load_scenario({**SCENARIO, "fleet": given_}))


def test_no_saturation_is_claimed_for_replicas_that_depend_on_each_other() -> None:
    assert wt.simulate(SCENARIO, saturation=True).summary["utilisation"] is None


def test_a_gateway_before_them_limits_what_is_in_both() -> None:
    """A request counts from its prefill to its last token."""
    num = 12
    load = workload([0] * num, [160] * num, [10] * num, tenant=[0, 1] * (num // 2), tenants=("a", "b"))
    made = replace(fleet(ENGINE, ENGINE), gateway=GatewayConfig({"a": TenantPolicy(max_in_flight=1)}, max_in_flight=3))
    records = serve(load, made)
    table = records.requests
    assert table.outcome.tolist() == [Outcome.FINISHED] * num
    order = np.argsort(table.scheduled_ns, kind="stable")
    begin, end = table.scheduled_ns[order], np.sort(table.finish_ns)
    assert bool((begin[3:] > end[: num - 3]).all())
    mine = np.flatnonzero(load.tenant == 0)
    assert bool((table.scheduled_ns[mine][1:] > table.finish_ns[mine][:-1]).all())


def test_where_a_request_s_time_went_is_told_by_stages() -> None:
    from windtunnel.reports.causes import Causes

    load = workload([0, 0], [1_600, 1_600], [5, 5])
    records = serve(load, fleet(ENGINE, ENGINE, transfer=KvTransfer(1e7)))
    told = Causes(records).why_first_token(1)
    assert "its cache took " in told
    assert "prefill of 1,600 prompt tokens took " in told
    assert "went away" not in told
