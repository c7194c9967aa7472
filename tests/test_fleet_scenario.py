"""A fleet as a scenario asks for it, and as reports, run folders and the command line show it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from conftest import REPO_ROOT

import windtunnel as wt
from windtunnel.cli.main import main
from windtunnel.scenarios.errors import ScenarioError
from windtunnel.scenarios.load import Override, load_scenario
from windtunnel.scenarios.resolve import Resolved, resolve
from windtunnel.scenarios.schema import Deployment
from windtunnel.sim.deployment.memory import InfeasibleDeployment
from windtunnel.sim.fleet.faults import Crash, Slowdown
from windtunnel.sim.fleet.fleet import Fleet
from windtunnel.sim.fleet.health import HealthChecks
from windtunnel.sim.fleet.records import Fate
from windtunnel.sim.fleet.routers import ROUTERS
from windtunnel.sim.records import Outcome

NS_PER_S = 1_000_000_000

BOTH = """
name = "two kinds"

[deployment]
model = "meta-llama/Llama-3.1-8B-Instruct"
router = "least_requests"

[workload]
num_requests = 120
request_rate = 20
input = 300
output = 30

[price]
gpu_hour = { h100-sxm = 2.5, l40s = 0.9 }

[fleet]

[fleet.pools.big]
replicas = 2
weight = 2.0
deployment = { gpu = "H100-SXM" }

[fleet.pools.small]
autoscaler = "concurrency:target=20,max_replicas=3,start_up=5s"
deployment = { gpu = "L40S" }
cost = { kind = "constant", step_s = "25ms" }

[fleet.pools.small.engine]
max_num_seqs = 64
max_model_len = "16K"

[[fleet.faults]]
kind = "crash"
pool = "big"
replica = 1
at = "2s"
restart_after = "1500ms"
"""


def resolved(text: str | Mapping[str, Any], tmp_path: Path, **overrides: Any) -> Resolved:
    source: Any = text
    if isinstance(text, str):
        source = tmp_path / "asked.toml"
        source.write_text(text)
    return resolve(load_scenario(source, {key: Override(value, key) for key, value in overrides.items()}))


def fleet_of(text: str | Mapping[str, Any], tmp_path: Path, **overrides: Any) -> Fleet:
    fleet = resolved(text, tmp_path, **overrides).fleet
    assert fleet is not None
    return fleet


def of_pools(pools: Mapping[str, Any]) -> dict[str, Any]:
    deployment = {key: value for key, value in PLAIN["deployment"].items() if key != "data_parallel_size"}
    return {**PLAIN, "deployment": deployment, "fleet": {"pools": pools}}


PLAIN: dict[str, dict[str, Any]] = {
    "deployment": {"model": "llama-3.1-8b", "gpu": "l40s", "data_parallel_size": 3},
    "workload": {"num_requests": 40, "request_rate": 20, "input": 200, "output": 20},
}


def test_pools_differ_in_what_they_say_and_share_the_rest(tmp_path: Path) -> None:
    found = resolved(BOTH, tmp_path)
    assert found.fleet is not None
    big, small = found.fleet.pools
    assert [pool.name for pool in found.fleet.pools] == ["big", "small"]
    assert [pool.gpu for pool in found.fleet.pools] == ["H100-SXM", "L40S"]
    assert [pool.system.num_replicas for pool in found.fleet.pools] == [2, 1]
    assert (small.system.config.max_num_seqs, small.system.config.max_model_len) == (64, 16_384)
    assert big.system.config.max_model_len == 131_072
    assert big.system.config.num_gpu_blocks > small.system.config.num_gpu_blocks
    assert (small.system.cost.name, big.system.cost.calibrated) == ("constant", True)
    assert [pool.rates.gpu_hour for pool in found.fleet.pools] == [2.5, 0.9]
    assert small.autoscaler is not None
    assert (small.autoscaler.start_up_ns, small.autoscaler.interval_ns) == (5 * NS_PER_S, 15 * NS_PER_S)
    assert found.fleet.faults == (Crash("big", 1, 2 * NS_PER_S, 1_500_000_000),)
    assert found.num_gpus == 3
    assert found.served is found.fleet


def test_every_setting_of_a_pool_has_its_source(tmp_path: Path) -> None:
    told = {(entry.section, entry.key): entry for entry in resolved(BOTH, tmp_path).entries}
    assert told["deployment", "gpu"].value == "H100-SXM"
    assert told["fleet", "small.gpu"].value == "L40S"
    line = BOTH.splitlines().index('deployment = { gpu = "L40S" }') + 1
    assert told["fleet", "small.gpu"].source == f"{tmp_path / 'asked.toml'}:{line}"
    assert told["fleet", "small.max_num_seqs"].value == 64
    assert told["fleet", "pools"].value == {"big": 2, "small": 1}
    assert told["fleet", "faults"].value == ["crash:pool=big,replica=1,at=2s,restart_after=1.5s"]
    assert told["fleet", "on_crash"].source == "windtunnel default"


def test_a_router_of_a_fleet_makes_one(tmp_path: Path) -> None:
    for router in ROUTERS:
        found = resolved(PLAIN, tmp_path, router=router)
        assert (found.fleet is None) == (router in ("vllm", "round_robin"))
        assert found.fleet is None or found.fleet.routing.router == router
        assert found.fleet is None or found.fleet.num_replicas == 3


def test_the_routers_of_the_schema_are_those_that_there_are() -> None:
    kinds = get_args(Deployment.model_fields["router"].annotation)
    assert set(get_args(kinds[0])) == set(ROUTERS)


def test_faults_may_be_written_as_text(tmp_path: Path) -> None:
    faults = ["crash:replica=2,at=5m,restart_after=2m", "slow:at=90s,factor=2.5,duration=1m"]
    assert fleet_of(PLAIN, tmp_path, faults=faults).faults == (
        Crash("all", 2, 300 * NS_PER_S, 120 * NS_PER_S),
        Slowdown("all", 0, 90 * NS_PER_S, 150 * NS_PER_S, 2.5),
    )


def test_a_fleet_is_full_where_all_of_its_pools_are(tmp_path: Path) -> None:
    from windtunnel.scenarios.saturation import saturation_request_throughput

    workload = {**PLAIN["workload"], "num_requests": 3000}
    three = resolved({**PLAIN, "workload": workload, "fleet": {}}, tmp_path)
    one = saturation_request_throughput(three.workload, three.system)
    assert one is not None
    assert saturation_request_throughput(three.workload, three.served) == pytest.approx(one)
    pools = {"a": {"replicas": 1}, "b": {"replicas": 2}}
    deployment = {"model": "llama-3.1-8b", "gpu": "l40s"}
    both = resolved({"deployment": deployment, "workload": workload, "fleet": {"pools": pools}}, tmp_path)
    assert saturation_request_throughput(both.workload, both.served) == pytest.approx(one)
    scaled = resolved({**PLAIN, "fleet": {"autoscaler": "waiting:target=2,max_replicas=5"}}, tmp_path)
    assert saturation_request_throughput(scaled.workload, scaled.served) is None


def test_the_router_learns_of_a_crash_as_kubernetes_does_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    asked = {**PLAIN, "fleet": {"faults": ["crash:at=1s"]}}
    assert fleet_of(asked, tmp_path).health == HealthChecks(10 * NS_PER_S, 3, "refuse")
    told = {entry.key: entry for entry in resolved(asked, tmp_path).entries if entry.section == "fleet"}
    assert (told["health_check_interval"].value, told["health_check_failures"].value) == (10, 3)
    assert told["health_check_interval"].source == "Kubernetes' readiness probes"
    calm = resolved({**PLAIN, "fleet": {}}, tmp_path)
    assert not any(entry.key == "health_check_interval" for entry in calm.entries)
    given = {"health_check_interval": "500ms", "health_check_failures": 2, "dead_replicas": "hang"}
    found = fleet_of({**PLAIN, "fleet": {**given, "network_latency": "1.5ms"}}, tmp_path)
    assert found.health == HealthChecks(500_000_000, 2, "hang")
    assert found.network_ns == 1_500_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[fleet]\ndead_replicas = "sulk"', "dead_replicas = 'sulk' in [fleet] must be one of 'refuse' or 'hang'"),
        ("[fleet]\nhealth_check_failures = 0", "health_check_failures = 0 in [fleet] must be at least 1"),
        ("[fleet]\nnetwork_latency = -1", "network_latency = -1 in [fleet]"),
        ('[fleet]\nroutr = "x"', "unknown key 'routr' in [fleet]; did you mean 'router'?"),
        ('[fleet]\nrouter = "session"', "unknown key 'router' in [fleet]; it belongs in [deployment]"),
        ("[fleet.pools.a]\nreplica = 3", "unknown key 'replica' in [fleet.pools.a]; did you mean 'replicas'?"),
        ("[fleet.pools.a]\nreplicas = 0", "replicas = 0 in [fleet.pools.a] must be at least 1"),
        ('[fleet.pools.a]\ndeployment = { gpuu = "h100" }', "unknown key 'gpuu' in [fleet.pools.a.deployment]"),
        ("[fleet.pools.a.engine]\nmax_num_seqs = -3", "max_num_seqs = -3 in [fleet.pools.a.engine]"),
        ('[fleet.pools.a.cost]\nkind = "constant"\nstep = 3', "did you mean 'step_s'?"),
        (
            '[fleet]\nfaults = ["explode:at=3s"]',
            "kind = 'explode' in [fleet.faults.0] must be one of 'crash' or 'slow'",
        ),
        ('[fleet]\nfaults = ["crash:at=3s,factor=2"]', "fault 0: factor is for faults of kind slow, this is crash"),
        ('[fleet]\nfaults = ["slow:at=3s"]', "give a factor such as 2"),
        ('[fleet]\nfaults = ["crash:at=3s,replica=4"]', "names replica 4 of pool all, which has at most 1"),
        (
            '[fleet.pools.a]\n[fleet.pools.b]\n[[fleet.faults]]\nkind = "crash"\nat = 1',
            "names no pool: give one of a, b",
        ),
        ('[fleet]\nautoscaler = "waiting:target=3"', "missing 'max_replicas' in [fleet.autoscaler]"),
        ('[fleet]\nautoscaler = "kv_usage:target=70,max_replicas=4"', "target of kv_usage is a share"),
        ('[fleet]\nautoscaler = "waiting:target=3,max_replicas=4"\n[fleet.pools.a]', "move it into a pool"),
        ("[fleet.pools.a]\ndeployment = { data_parallel_size = 2 }", "give replicas of the pool"),
        ('[fleet.pools.a]\ndeployment = { router = "session" }', "router cannot differ between pools"),
    ],
)
def test_a_wrong_fleet_says_where_and_what(text: str, words: str, tmp_path: Path) -> None:
    head = '[deployment]\nmodel = "llama-3.1-8b"\ngpu = "l40s"\n[workload]\nnum_requests = 1\ninput = 9\noutput = 9\n'
    with pytest.raises(wt.ScenarioError) as caught:
        resolved(head + text, tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path / "asked.toml") in str(caught.value)


def test_replicas_are_said_once(tmp_path: Path) -> None:
    with pytest.raises(wt.ScenarioError, match="data_parallel_size has no meaning beside"):
        resolved({**PLAIN, "fleet": {"pools": {"a": {}}}}, tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> wt.Run:
    path = tmp_path_factory.mktemp("fleet") / "both.toml"
    path.write_text(BOTH)
    return wt.simulate(path, saturation=False)


def test_the_text_shows_pools_replicas_and_events(run: wt.Run) -> None:
    text = run.text()
    assert f"\n{'Fleet':-^50}\n" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for words in (
        "big H100-SXM",
        "small L40S",
        "2 s big replica 1 (#1) crashes with",
        "#1 big/1 the start 2 s, crashed",
    ):
        assert any(line.startswith(words) for line in lines), words
    assert any(line.endswith("is ready, 1.5 s after its order") for line in lines)
    assert "2 x H100-SXM, 1 x L40S" in text
    assert any(line.startswith("Of requests given up or lost: ") for line in lines)
    assert "Abandoned by their clients" not in text


def test_the_summary_counts_what_the_records_hold(run: wt.Run) -> None:
    told, fleet = run.summary, run.records.fleet
    assert fleet is not None
    assert told["crashes"] == 1
    assert told["lost"] == 0
    assert told["retried_requests"] == int((np.bincount(fleet.stays.request) > 1).sum())
    assert told["sends_to_dead"] == int((fleet.stays.fate == Fate.UNHEARD).sum()) > 0
    assert sum(pool["num_requests"] for pool in told["fleet"]["pools"]) == len(fleet.stays) - told["sends_to_dead"]
    assert told["run_cost"] == pytest.approx(sum(pool["cost"] for pool in told["fleet"]["pools"]))
    json.dumps(told, allow_nan=False)


@pytest.mark.parametrize("records_format", ["parquet", "csv"])
def test_a_fleet_is_saved_and_read_again(run: wt.Run, tmp_path: Path, records_format: Any) -> None:
    run.save(tmp_path / "run", records_format=records_format)
    again = wt.load_run(tmp_path / "run")
    assert again.text() == run.text()
    assert again.summary == run.summary
    assert again.records.fleet is not None
    assert run.records.fleet is not None
    for name in ("lives", "stays", "scalings"):
        mine, theirs = getattr(run.records.fleet, name), getattr(again.records.fleet, name)
        for field in type(mine).__dataclass_fields__:
            assert np.array_equal(getattr(mine, field), getattr(theirs, field)), field


def test_a_run_of_one_server_takes_the_place_of_a_fleets(run: wt.Run, tmp_path: Path) -> None:
    run.save(tmp_path / "run")
    wt.simulate({**PLAIN, "name": "plain"}, saturation=False).save(tmp_path / "run")
    assert not (tmp_path / "run" / "stays.parquet").exists()
    assert wt.load_run(tmp_path / "run").records.fleet is None


def test_the_page_and_the_markdown_have_a_part_on_the_fleet(run: wt.Run, tmp_path: Path) -> None:
    run.report(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for words in ('id="fleet"', "plot-replicas", "plot-replica-load", "One crash took", "Events", "crashed"):
        assert words in page, words
    markdown = run.markdown()
    assert "| Crashes | 1 |" in markdown
    assert "| big | H100-SXM |" in markdown


def test_the_command_takes_a_fleet_in_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "llama-3.1-8b", "--gpu", "l40s", "--dp", "3", "--router", "power_of_two", "--num-prompts", "60"]
    flags += ["--input-len", "200", "--output-len", "40", "--request-rate", "20", "--on-crash", "fail", "--json", "-q"]
    assert main(["simulate", *flags, "--fault", "crash:replica=1,at=1s", "--fault", "slow:at=0,factor=2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["router"] == "power_of_two"
    assert told["crashes"] == 1
    assert told["lost"] == told["failed"] > 0
    assert told["seed"] == 0


def test_a_dry_run_shows_the_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "both.toml").write_text(BOTH)
    assert main(["simulate", str(tmp_path / "both.toml"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for words in ("small.gpu", "small.max_num_seqs", "crash:pool=big", "least_requests"):
        assert words in shown, words


def test_pools_may_come_in_any_order_of_their_longest_requests(tmp_path: Path) -> None:
    """The prompts fit the second pool alone."""
    pools = {"short": {"engine": {"max_model_len": 200}}, "long": {"engine": {"max_model_len": 2048}}}
    made = wt.simulate(of_pools(pools), saturation=False, input=300, output=10, num_requests=20)
    assert made.summary["completed"] == 20
    assert [pool["num_requests"] for pool in made.summary["fleet"]["pools"]] == [0, 20]
    with pytest.raises(ScenarioError, match=r"tensor_parallel_size 3.* \(pool long\)$"):
        wt.simulate(of_pools({"a": {}, "long": {"deployment": {"tensor_parallel_size": 3}}}))
    with pytest.raises(InfeasibleDeployment, match=r"^pool large: No available memory"):
        wt.simulate(of_pools({"a": {}, "large": {"deployment": {"gpu_memory_utilization": 0.2}}}))


def test_without_a_replica_the_verdict_says_that_none_is_left() -> None:
    faults = [f"crash:replica={number},at=100ms" for number in range(3)]
    made = wt.simulate({**PLAIN, "fleet": {"faults": faults, "health_check_interval": 0}}, saturation=False)
    assert made.summary["stability"] == "stalled"
    assert "no replica left that could take them: a crash with restart_after" in " ".join(made.summary["warnings"])


def test_a_replica_that_is_still_starting_at_the_end_is_called_so() -> None:
    scaler = "concurrency:target=1,max_replicas=2,interval=100ms,start_up=1h"
    made = wt.simulate({**PLAIN, "fleet": {"autoscaler": scaler}}, saturation=False, data_parallel_size=1)
    assert any(line.split()[:4] == ["#1", "all/1", "still", "starting"] for line in made.text().splitlines())


def test_variants_of_a_comparison_may_be_fleets() -> None:
    made = wt.compare(
        {**PLAIN, "fleet": {}}, axis="router", values=["round_robin", "least_requests"], metrics=["replica_hours"]
    )
    assert "Replica-hours" in made.text()


def test_the_fleet_shown_in_the_docs_runs(tmp_path: Path) -> None:
    text = (REPO_ROOT / "docs" / "fleet.md").read_text()
    shown = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert len(shown) == 1
    (tmp_path / "shown.toml").write_text(shown[0])
    run = wt.simulate(tmp_path / "shown.toml", saturation=False, num_requests=600, seed=1)
    assert run.summary["completed"] == 600
    assert [pool["pool"] for pool in run.summary["fleet"]["pools"]] == ["big", "small"]
    keys = re.findall(r"`([a-z_]+)`", text.partition("Keys of the JSON")[2].partition("Utilisation")[0])
    whole = [key for key in keys if not key.startswith("_")]
    assert [key for key in whole if key not in run.summary] == []


def test_the_worst_requests_say_what_the_fleet_did_to_them() -> None:
    from windtunnel.reports.causes import Causes

    faults = ["crash:replica=0,at=1s,restart_after=1s"]
    asked = {**PLAIN, "deployment": {**PLAIN["deployment"], "data_parallel_size": 1}, "cost": "constant:step_s=50ms"}
    asked = {**asked, "engine": {"max_num_seqs": 4}, "fleet": {"faults": faults}}
    run = wt.simulate(asked, router="shared_queue", saturation=False)
    causes, fleet = Causes(run.records), run.records.fleet
    assert fleet is not None
    twice = int(np.flatnonzero(np.bincount(fleet.stays.request) > 1)[0])
    assert "with 1 replica that went away" in causes.why(twice)
    assert "at the router" in causes.why(len(run.records.requests) - 1)
    failed = wt.simulate(asked, router="shared_queue", saturation=False, on_crash="fail")
    lost = int(np.flatnonzero(failed.records.requests.outcome == Outcome.LOST)[0])
    assert Causes(failed.records).why(lost).endswith("(lost with its replica)")


def test_commands_about_one_server_refuse_a_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "fleet-crash", "--against", "max_num_seqs=8"]) == 2
    assert "windtunnel diff takes one server, and this scenario asks for a fleet" in capsys.readouterr().err
