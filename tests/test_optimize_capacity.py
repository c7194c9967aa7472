"""``optimize --at capacity``: rates on the same requests, bounds of what cannot win, and what both cost."""

from __future__ import annotations

import json
import re
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import windtunnel as wt
from windtunnel.optimizing import measuring
from windtunnel.optimizing.capacity_job import CapacityTrial, ToBeat, run_capacity
from windtunnel.optimizing.measuring import capacity_settings
from windtunnel.optimizing.optimize import Optimum
from windtunnel.optimizing.question import CAPACITY, make_question
from windtunnel.optimizing.rates import SATURATES, TOO_NEAR, ends, estimated_rate, next_rate
from windtunnel.optimizing.search import Bench, Search
from windtunnel.sweeping.running import prepared
from windtunnel.trials import make_trial

pytest.importorskip("optuna")

TINY: dict[str, Any] = {
    "name": "tiny",
    "deployment": {"num_gpu_blocks_override": 65, "data_parallel_size": 1},
    "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 512},
    "workload": {"num_requests": 40, "request_rate": 12, "input": "exponential:mean=64,max=200", "output": 4},
    "cost": {"kind": "constant", "step_s": "10ms"},
    "slo": {"objectives": ["ttft:p90<60ms"]},
}
SPACE: dict[str, Any] = {"max_num_seqs": [2, 4, 8], "data_parallel_size": [1, 2]}
QUICK = {"replications": 4, "num_requests": 150, "precision": 0.1}


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in (measuring.COARSE, measuring.FINE):
        monkeypatch.setitem(settings, "num_requests", 150)


def optimized(tune: dict[str, Any], **more: Any) -> Optimum:
    return wt.optimize(TINY, tune, at=CAPACITY, **{"jobs": 1, "reps": 2, **more})


@cache
def searched() -> Optimum:
    """For all who only look at it."""
    return optimized(SPACE, seed=5)


def rate_of(to_beat: ToBeat | None = None, around: float | None = None, **settings: Any) -> dict[str, Any]:
    trial = make_trial(TINY, settings).argument
    return run_capacity(CapacityTrial(trial, dict(QUICK), around, to_beat))


def needs(value: float) -> ToBeat:
    """So many requests per second."""
    return ToBeat(value / 1.01, "", cost=1, is_priced=False, num_away=0, own_num_away=0, oom_margin_gib=0)


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


# --- where a rate is looked for


@given(
    limit=st.floats(0.1, 100),
    steepness=st.floats(0.3, 30),
    first=st.floats(0.02, 64),
    precision=st.sampled_from([0.03, 0.05, 0.1]),
)
def test_a_rate_is_found_to_the_precision_asked_for_wherever_one_begins(
    limit: float, steepness: float, first: float, precision: float
) -> None:
    lowest, highest = 0.02, 64.0
    uses = [(first, (first / limit) ** steepness)]
    while (rate := next_rate(uses, lowest, highest, precision)) is not None:
        assert lowest <= rate <= highest
        assert rate not in dict(uses)
        uses.append((rate, (rate / limit) ** steepness))
        assert len(uses) <= 24
    kept, broken = ends(uses)
    if kept is None:
        assert limit < lowest * 1.000001
    elif broken is None:
        assert limit > highest * 0.999999
    else:
        assert broken <= kept * (1 + precision) * 1.000001
        assert estimated_rate(sorted(uses)) == pytest.approx(limit, rel=1e-6)


def test_begun_near_its_place_a_rate_takes_two_tries() -> None:
    uses = [(9.8, 0.9)]
    second = next_rate(uses, 0.1, 100, 0.05)
    assert second is not None
    assert second == pytest.approx(9.8 * 1.05)
    assert next_rate([*uses, (second, 1.2)], 0.1, 100, 0.05) is None


def test_a_queue_that_grows_tells_only_the_side() -> None:
    assert next_rate([(8.0, 0.5), (16.0, inf)], 0.1, 100, 0.05) == pytest.approx((8 * 16) ** 0.5 / 1.05**0.5)


# --- what a deployment needs


def test_a_deployment_that_counts_less_where_level_needs_more_than_the_best() -> None:
    best = ToBeat(1000, "num_gpus", cost=2, is_priced=False, num_away=1, own_num_away=1, oom_margin_gib=4)
    in_rate = 1000 * 2 / 3600
    assert best.needed(2, 2, 4) == pytest.approx(1.01 * in_rate)
    assert best.needed(2, 2, 5) == pytest.approx(0.95 * in_rate)  # it leaves more memory
    assert best.needed(1, 1, 0) == pytest.approx(0.95 * in_rate / 2)  # it is cheaper
    assert best.needed(4, 4, 9) == pytest.approx(1.01 * in_rate * 2)


def test_what_cannot_be_the_best_costs_four_simulations_at_most_and_has_no_rate() -> None:
    own = rate_of()
    assert own["num_simulations"] >= 8
    assert 0 < rate_of(needs(1.04 * own["max_rate"]))["num_simulations"] <= 4
    for factor in (1.04, 1.2, 100):
        found = rate_of(needs(factor * own["max_rate"]))
        assert found["num_simulations"] <= 4
        assert found["max_rate"] is None
        assert found["below_rate"] == pytest.approx(factor * own["max_rate"])
        assert found["below_why"] in ("misses ttft:p90<60ms", "its queue grows", TOO_NEAR, SATURATES)


def test_beyond_the_load_that_saturates_it_nothing_is_simulated() -> None:
    found = rate_of(needs(1000.0))
    assert (found["num_simulations"], found["below_why"]) == (0, SATURATES)


@pytest.mark.parametrize("factor", [0.6, 0.9, 0.97])
def test_what_may_be_the_best_has_the_rate_that_a_search_without_a_rate_to_beat_finds(factor: float) -> None:
    own = rate_of()
    found = rate_of(needs(factor * own["max_rate"]))
    assert found["below_rate"] is None
    assert found["max_rate"] == pytest.approx(own["max_rate"], rel=0.05)
    assert found["max_rate"] >= factor * own["max_rate"]


@pytest.mark.parametrize("around", [2.0, 20.0, 200.0])
def test_where_a_search_begins_does_not_move_what_it_finds(around: float) -> None:
    own = rate_of()
    assert rate_of(around=around)["max_rate"] == pytest.approx(own["max_rate"], rel=0.05)


def test_begun_near_the_answer_it_takes_fewer_simulations() -> None:
    own = rate_of()
    assert rate_of(around=own["max_rate"])["num_simulations"] < own["num_simulations"]


# --- the whole search


def test_the_winner_is_that_of_a_search_of_each_in_full_or_level_with_it() -> None:
    found = searched()
    each = {
        (seats, replicas): rate_of(max_num_seqs=seats, data_parallel_size=replicas, seed=5)
        for seats in SPACE["max_num_seqs"]
        for replicas in SPACE["data_parallel_size"]
    }
    per_gpu = {settings: run["max_rate"] / run["num_gpus"] for settings, run in each.items()}
    assert found.settings is not None
    own = per_gpu[found.settings["max_num_seqs"], found.settings["data_parallel_size"]]
    assert own >= 0.95 * max(per_gpu.values())
    assert sum(run["num_simulations"] for run in each.values()) > found.optimized.num_search


def test_bounds_hold_what_a_full_search_finds() -> None:
    for each in searched().optimized.tried:
        run = each.point.runs[0]
        if run.get("below_rate") is None:
            continue
        own = rate_of(**each.point.settings, seed=5)
        assert own["max_rate"] <= 1.05 * run["below_rate"]


def test_a_bound_is_marked_everywhere_and_is_a_number_nowhere() -> None:
    found = searched()
    bounds = [each for each in found.optimized.tried if each.point.runs[0].get("below_rate") is not None]
    assert bounds
    key = found.optimized.target.key
    told = {row["trial"]: row for row in found.to_dict()["trials"]}
    for each in bounds:
        assert each.point.values(key) == each.point.values("goodput") == ()
        row = told[each.point.number]
        assert row[key] is None
        assert row["is_upper_bound"] is True
        assert row["upper_bound"] == each.point.runs[0][f"{key}_below"] > 0
        assert re.fullmatch(r"below .*; not searched further", row["dropped"])
    measured = [row for row in told.values() if not row["is_upper_bound"]]
    assert all(row["upper_bound"] is None and row[key] is not None for row in measured)
    frame = found.trials.set_index("trial")
    assert frame.loc[[each.point.number for each in bounds], key].isna().all()
    line = next(line for line in found.text().splitlines() if "not searched further" in line and "below" in line)
    assert "–" in line


def test_the_answer_says_how_many_were_not_searched_further() -> None:
    found = searched()
    number = sum(row["is_upper_bound"] for row in found.to_dict()["trials"])
    for text in (found.text(), found.markdown()):
        assert f"{number} of them" in squeezed(text)


def test_the_html_shows_bounds_as_bounds(tmp_path: Path) -> None:
    searched().report(tmp_path / "o.html")
    page = (tmp_path / "o.html").read_text()
    assert "not searched further" in page


def test_optuna_is_told_no_value_of_a_deployment_of_which_only_a_bound_is_known() -> None:
    question = make_question(TINY, SPACE, at=CAPACITY, reps=2, seed=5)
    with prepared(1) as how:
        search = Search(question, Bench(question, how))
        found = search.run()
    bounds = sum(each.is_bound for each in found.deployments)
    pruned = [trial for trial in search.study.trials if trial.state.name == "PRUNED"]
    assert len(pruned) == bounds > 0
    assert all(trial.value is None for trial in pruned)


def test_any_number_of_workers_and_a_resumed_search_give_the_same_bytes(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(done: int) -> None:
        if done == 2:
            raise Stop

    small = {"max_num_seqs": [2, 8]}
    optimized(small, folder=tmp_path / "one")
    with pytest.raises(Stop):
        optimized(small, folder=tmp_path / "two", jobs=2, progress=stop)
    optimized(small, folder=tmp_path / "two", jobs=2, resume=True)
    one, two = (
        {path.name: path.read_bytes() for path in sorted((tmp_path / name).iterdir()) if path.is_file()}
        for name in ("one", "two")
    )
    assert one == two
    assert json.loads(one["optimize.json"])["settings"]


def test_rare_requests_are_many_enough_for_their_percentile() -> None:
    question = make_question(TINY, SPACE, at=CAPACITY, overrides={"objectives": ["ttft:p99.9<1s"]})
    for is_fine in (False, True):
        asked = capacity_settings(question.objectives, is_fine=is_fine)
        assert asked["replications"] * asked["num_requests"] * 0.7 * 0.001 >= 12 * 0.999
