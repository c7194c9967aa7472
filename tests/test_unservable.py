"""Prompts that do not fit max_model_len are refused at any load, and no answer may look better for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import windtunnel as wt
from windtunnel.cli.main import main
from windtunnel.optimizing.measuring import excesses, uses_of
from windtunnel.reports.answer import answer
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.metrics import Summary, Verdict, summarize
from windtunnel.sim.metrics.slo import Slo, parse_slos
from windtunnel.sim.simulate import serve
from windtunnel.sim.system import System
from windtunnel.sim.workload import workload

MS = 1_000_000
SCENARIO = """\
schema_version = 1
name = "small"
[deployment]
num_gpu_blocks_override = 2000
[engine]
max_num_seqs = 32
max_num_batched_tokens = 512
max_model_len = 280
[workload]
num_requests = 200
input = { dist = "uniform", low = 50, high = 300 }
output = { dist = "uniform", low = 5, high = 40 }
request_rate = 5.0
[cost]
kind = "constant"
step_s = "10ms"
[slo]
objectives = ["ttft:p90<60ms"]
[run]
saturation = false
"""
"""About one prompt in twelve has 280 tokens or more."""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return str(path)


def summary(num_long: int, slo: str, *, num: int = 200) -> Summary:
    """So many of the prompts do not fit; the others have their first token after 10 ms."""
    prompts = np.where(np.arange(num) < num_long, 5000, 20)
    work = workload(np.arange(num) * 1000 * MS, prompts, np.full(num, 5))
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4096, max_model_len=4096, num_gpu_blocks=10_000)
    return summarize(serve(work, System(config, ConstantCost(0.01))), work, slo=slo, goodput="ttft:500")


@pytest.mark.parametrize(
    ("objective", "num_long", "passed"),
    [
        ("ttft:p99<1s", 2, True),
        ("ttft:p99<1s", 3, False),
        ("ttft:p90<1s", 20, True),
        ("ttft:p90<1s", 21, False),
        ("ttft:median<1s", 100, True),
        ("ttft:median<1s", 101, False),
        ("ttft:mean<1s", 2, True),
        ("ttft:mean<1s", 3, False),
        ("e2el:max<1s", 0, True),
        ("e2el:max<1s", 1, False),
        ("goodput>=90%", 20, True),
        ("goodput>=90%", 21, False),
        ("failed<5%", 10, False),
    ],
)
def test_a_refused_request_has_missed_whatever_is_asked_of_it(objective: str, num_long: int, passed: bool) -> None:
    assert summary(num_long, objective).slo_passed is passed


def test_the_note_says_how_many_do_not_fit_and_the_remedy() -> None:
    (result,) = summary(20, "ttft:p99<1s").slo
    assert result.note == (
        "10 % of the requests failed, p99 of all requests leaves room for 1 %; all of them were refused because of "
        "max_model_len: raise it, or leave those rows out"
    )


@pytest.mark.parametrize(("statistic", "room"), [("p99.9", 0.1), ("p50", 50), ("median", 50), ("max", 0), ("mean", 1)])
def test_each_statistic_has_its_room_for_failures(statistic: str, room: float) -> None:
    assert Slo.parse(f"ttft:{statistic}<1s").room_percent == pytest.approx(room)


def test_all_that_were_sent_were_offered_and_stability_is_of_those_that_can_be_served() -> None:
    found = summary(100, "ttft:p99<1s")
    assert found.request_rate == pytest.approx(1.0)
    told = found.to_dict()
    assert told["offered_request_rate"] == pytest.approx(1.0)
    assert told["servable_request_rate"] == pytest.approx(1.0)  # the later half, at the same gaps
    assert found.stability.verdict is Verdict.STABLE


def test_the_headline_says_first_what_was_refused(scenario: str) -> None:
    run = wt.simulate(scenario)
    told = answer(run.records, run.statistics)
    share = run.statistics.unservable / 200
    assert 0.05 < share < 0.12
    assert told.headline.startswith(f"{100 * share:.1f} % of the ")
    assert (
        "requests/s offered were refused: their prompts do not fit max_model_len. Stable: it keeps up" in told.headline
    )
    assert told.tone == "bad"
    whole = wt.simulate(scenario, max_model_len=400)
    kept = answer(whole.records, whole.statistics)
    assert (kept.headline.startswith("Stable: it keeps up with"), kept.tone) == (True, "good")


def test_few_that_do_not_fit_are_no_headline(scenario: str) -> None:
    run = wt.simulate(scenario, max_model_len=299, num_requests=400)
    assert 0 < run.statistics.unservable <= 4
    told = answer(run.records, run.statistics)
    assert (told.headline.startswith("Stable"), told.tone) == (True, "good")


QUICK = ("--num-requests", "150", "--reps", "12", "--precision", "0.2", "-j", "1", "-q")


@pytest.mark.parametrize(
    "objective", [("ttft:p99<1s",), ("itl:p99<1s",), ("ttft:mean<1s",), ("goodput>=99%", "--goodput", "ttft:500")]
)
def test_capacity_has_no_rate_where_too_many_prompts_do_not_fit(
    scenario: str, objective: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capacity", scenario, *QUICK, "--slo", *objective, "--json"]) == 99
    told = json.loads(capsys.readouterr().out)
    assert (told["outcome"], told["holds_up_to"], told["max_rate"]) == ("idle_fails", 0, None)
    assert "do not fit max_model_len" in told["reason"]
    assert "leaves room for 1 %: raise max_model_len, or leave those requests out" in told["reason"]
    assert len(told["rates"]) == 1  # no other rate would refuse fewer


def test_capacity_has_one_where_the_objective_leaves_room(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", scenario, *QUICK, "--slo", "ttft:p50<60ms", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds_up_to"] > 0


def test_a_sweep_keeps_no_objective_by_refusing(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("sweep", scenario, "--vary", "max_model_len=100,400", "--reps", "2", "-j", "1", "-q", "--json")
    assert main([*asked]) == 0
    told = json.loads(capsys.readouterr().out)
    first, second = told["points"]
    assert (first["num_held"], second["num_held"]) == (0, 2)
    assert main([*asked[:-1]]) == 0
    text = capsys.readouterr().out
    assert "% failed" in text
    assert "of the requests had no answer: latencies there are those of the others" in " ".join(text.split())


def test_a_sweep_without_objectives_does_not_take_the_point_that_refuses(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = tmp_path / "free.toml"
    free.write_text(SCENARIO.replace('objectives = ["ttft:p90<60ms"]', ""))
    asked = ("--vary", "max_model_len=100,400", "--best", "p99_ttft_ms", "--reps", "2", "-j", "1", "-q", "--json")
    assert main(["sweep", str(free), *asked]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [point["is_best"] for point in told["points"]] == [False, True]


def test_a_comparison_along_max_model_len_ranks_no_latency_of_few(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", scenario, "--over", "max_model_len=100,400", "--metric", "p99_e2el_ms", "-q"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "P99 E2EL: lowest at 400" in told
    assert "not ranked at 100" in told


def test_failures_use_up_the_limit_of_a_latency_in_a_search() -> None:
    objectives = parse_slos("ttft:p99<1s")
    run = {"num_prompts": 100, "failed": 12, "p99_ttft_ms": 100.0, "slo_missed": "ttft:p99<1s"}
    assert uses_of(run, objectives) == {"ttft:p99<1s": pytest.approx(12)}
    assert excesses(run, objectives) == {"ttft:p99<1s": pytest.approx(11)}
    few = {"num_prompts": 1000, "failed": 9, "p99_ttft_ms": 100.0}
    assert uses_of(few, objectives) == {"ttft:p99<1s": pytest.approx(0.1)}
