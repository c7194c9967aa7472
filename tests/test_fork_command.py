"""``windtunnel fork``: saved snapshots, running servers, what it refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from windtunnel.cli.main import main
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.keys import PrivateKeys
from windtunnel.sim.engine.request import Request
from windtunnel.sim.engine.scheduler import Scheduler
from windtunnel.sim.engine.snapshot import RecentRequest, take_snapshot
from windtunnel.sim.engine.snapshot_json import to_json


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Eight requests, four of which run, after a second in which ten came."""
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, num_gpu_blocks=200))
    for number in range(8):
        scheduler.add(Request(number, 0, 50, 30, keys=PrivateKeys(number)))
    for step in range(5):
        scheduler.commit(scheduler.schedule(step), step + 1)
    recent = [RecentRequest(number * 10**8, 50, 30, 30, 0, ()) for number in range(11)]
    path = tmp_path / "now.json"
    path.write_text(json.dumps(to_json(take_snapshot(scheduler, 10**9, recent=recent))))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["fork", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def metrics(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {row["name"]: row["value"] for row in rows}


def test_a_saved_snapshot_is_forked(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, saved, "--cost", "constant:step_s=10ms", "--horizon", "2s", "--rate", "none", "--json")
    found = json.loads(out)
    assert code == 0
    assert metrics(found["metrics"])["num_finished"] == 8
    assert found["arrivals"] == "nothing more"


def test_changed_limits_are_shown_beside_what_is(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (saved, "--cost", "affine:base_s=10ms,token_s=1us", "--horizon", "2s", "--change", "max-num-seqs=1")
    code, out, _ = run(capsys, *arguments, "--num-futures", "3")
    assert code == 0
    assert "changes:  max_num_seqs=1" in out
    assert "at random, 10 requests/s (the recent rate)" in out
    assert out.splitlines()[5].split() == ["metric", "unit", "as", "is", "changed", "5", "%", "to", "95", "%"]
    found = json.loads(run(capsys, *arguments, "--json")[1])
    assert metrics(found["as_is"])["output_throughput"] > metrics(found["metrics"])["output_throughput"]


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        ((), 2, "give either a SNAPSHOT or --endpoint"),
        (("SAVED",), 2, "needs either --profile or --cost"),
        (("SAVED", "--cost", "constant:step_s=1ms", "--change", "max_num_seqs"), 2, "must be KEY=VALUE"),
        (("SAVED", "--cost", "constant:step_s=1ms", "--change", "block_size=8"), 2, "block_size cannot change"),
        (("SAVED", "--cost", "constant:step_s=1ms", "--horizon", "soon"), 2, "soon"),
        (("SAVED", "--cost", "constant:step_s=1ms", "--rate", "-1"), 2, "-1"),
        (("SAVED", "--cost", "magic"), 2, "magic"),
        (("SAVED", "--cost", "constant:step_s=1ms", "--check"), 2, "need --endpoint"),
        (("SAVED", "--profile", "nowhere.json"), 3, "nowhere.json"),
        (("missing.json", "--cost", "constant:step_s=1ms"), 3, "missing.json: No such file"),
        (("--endpoint", "127.0.0.1:1"), 2, "must begin with http://"),
        (("--endpoint", "http://127.0.0.1:1"), 3, "http://127.0.0.1:1: "),
        (("--endpoint", "http://127.0.0.1:1", "--profile", "x.json"), 2, "are for saved snapshots"),
    ],
)
def test_faults_are_told(
    saved: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, complaint: str
) -> None:
    given = [saved if each == "SAVED" else each for each in arguments]
    found, out, err = run(capsys, *given)
    assert (found, out) == (code, "")
    assert complaint in err


def test_what_is_no_snapshot_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    assert "this is no snapshot" in run(capsys, path, "--cost", "constant:step_s=1ms")[2]


def test_a_damaged_snapshot_is_no_fault_of_ours(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(saved.read_text())
    saved.write_text(json.dumps({**data, "now_ns": 2**70}))
    code, out, err = run(capsys, saved, "--cost", "constant:step_s=1ms")
    assert (code, out) == (3, "")
    assert "now_ns must be from 0 to 4,611,686,018,427,387,904" in err
    assert "take the snapshot anew" in err


def test_the_profile_is_named(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "llama-3.1-8b-h100-sxm-tp1-bf16"
    code, out, _ = run(capsys, saved, "--profile", name, "--horizon", "1s", "--rate", "none")
    assert code == 0
    assert f"requests by {name}" in out.splitlines()[0]


# -- a running server


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    from serving import limits, serving

    with serving(limits(num_gpu_blocks=2000, max_num_seqs=8, max_model_len=2000), step_s=0.004) as served:
        yield served


def load(server: Any, num: int = 12, max_tokens: int = 150) -> list[threading.Thread]:
    def one(number: int) -> None:
        server.post("/v1/completions", {"prompt": [5] * 40, "max_tokens": max_tokens, "ignore_eos": True})

    threads = [threading.Thread(target=one, args=(number,)) for number in range(num)]
    for thread in threads:
        thread.start()
    from serving import wait_until

    wait_until(lambda: server.frontend.loop.engine.scheduler.num_requests == num)
    return threads


def test_a_server_foretells_what_it_then_does(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    threads = load(server)
    code, out, _ = run(capsys, "--endpoint", server.url, "--horizon", "2s", "--rate", "none", "--check", "--json")
    found = json.loads(out)
    assert code == 0
    predicted, observed = metrics(found["metrics"]), metrics(found["observed"])
    assert predicted["num_finished"] == observed["num_finished"] == found["num_live"] > 0
    for name in ("output_throughput", "e2el_mean_ms", "tpot_p99_ms", "running_mean", "waiting_mean"):
        assert predicted[name] == pytest.approx(observed[name], rel=0.02), name
    for thread in threads:
        thread.join()


def test_a_server_s_snapshot_can_be_saved_and_forked(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = load(server)
    path = tmp_path / "now.json"
    code, _, err = run(capsys, "--endpoint", server.url, "--save-snapshot", path)
    assert code == 0
    assert "8 running and 4 waiting requests" in err
    code, out, _ = run(capsys, path, "--cost", "constant:step_s=4ms", "--horizon", "10s", "--rate", "none", "--json")
    assert code == 0
    assert metrics(json.loads(out)["metrics"])["num_finished"] == 12
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({}, "horizon_s: Field required"),
        ({"horizon_s": 0}, "greater than 0"),
        ({"horizon_s": 1e6}, "less than or equal to 3600"),
        ({"horizon_s": 1, "horizon": 2}, "horizon: Extra inputs"),
        ({"horizon_s": 1, "num_futures": 1000}, "num_futures"),
        ({"horizon_s": 1, "changes": {"block_size": 8}}, "block_size cannot change"),
        ({"horizon_s": 1, "changes": {"max_num_seqs": "many"}}, "must be a whole number, got 'many'"),
        ({"horizon_s": 5, "changes": {"num_gpu_blocks": 10**12}}, "num_gpu_blocks must be from 2 to 4,194,304"),
        ({"horizon_s": 5, "changes": {"num_gpu_blocks": 3 * 10**8}}, "got 300,000,000"),
        ({"horizon_s": 1, "arrivals": "some"}, "arrivals"),
        ({"horizon_s": 1, "arrivals": "none", "requests_per_s": 3}, "give one of them"),
        ({"horizon_s": 1, "arrivals": [], "requests_per_s": 3}, "give one of them"),
        ({"horizon_s": 3600, "requests_per_s": 1e6}, "more than 100,000 requests"),
        ({"horizon_s": 3600, "arrivals": [{"at_s": 0, "prompt_tokens": 10**6, "output_tokens": 1}]}, "at most"),
        ({"horizon_s": 1, "lengths": "guess"}, "lengths"),
    ],
)
def test_bad_questions_are_answered_with_400(server: Any, body: dict[str, Any], complaint: str) -> None:
    if complaint == "at most":  # a prompt that the engine would refuse is refused in the forecast, too
        assert server.post("/windtunnel/fork", body).status_code == 200
        return
    answer = server.post("/windtunnel/fork", body)
    assert answer.status_code == 400
    assert complaint in answer.json()["error"]["message"]


def test_listed_arrivals_are_served(server: Any) -> None:
    rows = [
        {"at_s": 0.5, "prompt_tokens": 20, "output_tokens": 5},
        {"at_s": 0.1, "prompt_tokens": 20, "output_tokens": 5},
    ]
    found = server.post("/windtunnel/fork", {"horizon_s": 1, "arrivals": rows}).json()
    assert metrics(found["metrics"])["num_arrived"] == metrics(found["metrics"])["num_finished"] == 2


def test_windows_that_are_not_known_are_refused(server: Any) -> None:
    for query in ("", "?begin_s=0&end_s=x", "?begin_s=0&end_s=1e9", "?begin_s=1&end_s=0.5", "?begin_s=nan&end_s=1"):
        answer = server.client.get(f"/windtunnel/window{query}")
        assert answer.status_code == 400, query


def test_without_a_price_there_is_no_fork() -> None:
    pytest.importorskip("fastapi")
    from serving import serving

    with serving() as served:
        served.frontend.forks._cost = None
        answer = served.post("/windtunnel/fork", {"horizon_s": 1})
    assert answer.status_code == 409
    assert "--shadow" in answer.json()["error"]["message"]
