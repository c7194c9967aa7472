"""The what-if page: questions, answers, the process that computes them, HTTP, the command, and a real browser."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import textwrap
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import chromium
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import windtunnel as wt
from windtunnel import reports
from windtunnel.cli.main import main
from windtunnel.scenarios.load import bundled_scenarios, load_scenario
from windtunnel.scenarios.resolve import resolve
from windtunnel.scenarios.workloads.lengths import lengths_from
from windtunnel.sim.rng import stream
from windtunnel.ui.answers import Answers, OutOfTime, Superseded, Watch
from windtunnel.ui.app import PageSettings
from windtunnel.ui.desk import Desk
from windtunnel.ui.errors import BadQuestion
from windtunnel.ui.knobs import MAX_REQUESTS, knobs
from windtunnel.ui.lengths import nominal_mean, scaled_to
from windtunnel.ui.question import Question, load, presets, read_question, values_of
from windtunnel.ui.server import is_loopback, listen, make_server, url_of
from windtunnel.ui.toml import to_toml

CHAT = "chat-8b-h100"
LLAMA_70B = "meta-llama/Llama-3.3-70B-Instruct"
PRESETS = presets(None)


def answer(preset: str = CHAT, limit_s: float = 60.0, **settings: Any) -> dict[str, dict[str, Any]]:
    """The parts of an answer by their names."""
    asked = read_question({"preset": preset, "settings": settings}, {**PRESETS, preset: ""})
    return {part["part"]: part for part in Answers().parts(asked, Watch(limit_s))}


def few(preset: str = CHAT, **settings: Any) -> dict[str, dict[str, Any]]:
    """The same of a few requests, for tests that do not look at the numbers."""
    return answer(preset, num_requests=100, **settings)


def card(parts: dict[str, dict[str, Any]], key: str) -> dict[str, Any]:
    part = parts.get("saturation", parts["run"])
    return next(each for each in part["cards"] if each["key"] == key)


# --- answers


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        (CHAT, {"request_rate": 30, "num_requests": 500}),
        (CHAT, {"gpu": "L40S", "kv_cache_dtype": "fp8", "max_model_len": 16384, "num_requests": 200, "seed": 7}),
        ("preemption-storm", {"output": 700, "num_requests": 200}),
        ("agent-sessions", {"num_requests": 200, "input": 600}),
    ],
)
def test_the_scenario_to_take_away_gives_the_numbers_of_the_page(preset: str, settings: dict[str, Any]) -> None:
    parts = answer(preset, **settings)
    run = wt.simulate(tomllib.loads(parts["memory"]["scenario_text"]))
    assert card(parts, "ttft")["value"] == run.summary["p99_ttft_ms"]
    assert card(parts, "itl")["value"] == run.summary["p99_itl_ms"]
    assert card(parts, "preemptions")["value"] == run.statistics.preemption.num_preemptions
    assert card(parts, "output_throughput")["value"] == run.summary["output_throughput"]
    assert card(parts, "utilisation")["value"] == run.statistics.load.utilisation


@pytest.mark.parametrize("preset", bundled_scenarios())
def test_every_bundled_scenario_is_a_place_to_begin(preset: str) -> None:
    own = values_of(load(Question(preset)).scenario)
    is_small = own["num_requests"] is not None and own["num_requests"] <= 100
    parts = answer(preset) if is_small else few(preset)
    assert "error" not in parts
    if parts["memory"]["memory"] and parts["memory"]["memory"]["verdict"] == "does_not_start":
        assert parts["memory"]["memory"]["remedies"]
        return
    assert parts["run"]["num_requests"] <= 100
    assert {figure["name"] for figure in parts["run"]["figures"]} >= {"kv", "queue", "cdf-ttft"}


def test_the_memory_plan_is_that_of_the_simulation() -> None:
    for settings in ({}, {"gpu": "A100-40GB-SXM", "gpu_memory_utilization": 0.85, "max_num_seqs": 64}):
        parts = few(**settings, max_model_len=16384)
        pool = resolve(load_scenario(tomllib.loads(parts["memory"]["scenario_text"]))).kv_pool
        assert pool is not None
        assert parts["memory"]["memory"]["num_gpu_blocks"] == pool.num_gpu_blocks


def test_what_does_not_start_says_why_in_vllms_words_and_each_remedy_works() -> None:
    settings = {"gpu": "A10G", "max_model_len": 131072}
    parts = answer(**settings)
    assert "run" not in parts
    memory = parts["memory"]["memory"]
    assert memory["verdict"] == "does_not_start"
    assert memory["reason"].startswith("To serve at least one request with the model's max seq len (131072)")
    remedies = [remedy for remedy in memory["remedies"] if remedy["can_apply"]]
    assert {remedy["flag"] for remedy in remedies} >= {"max_model_len", "tensor_parallel_size"}
    for remedy in remedies:
        mended = few(**{**settings, remedy["flag"]: remedy["value"]})
        assert mended["memory"]["memory"]["verdict"] == remedy["verdict"]
        assert "run" in mended


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"max_num_seqs": 1024, "max_num_batched_tokens": 512}, "max_num_seqs"),
        ({"max_model_len": 1 << 20}, "max_model_len"),
        ({"model": "Qwen/Qwen2.5-7B-Instruct", "tensor_parallel_size": 8}, "tensor_parallel_size"),
    ],
)
def test_what_vllm_refuses_whatever_the_memory_has_remedies_too(settings: dict[str, Any], flag: str) -> None:
    memory = answer(**settings)["memory"]["memory"]
    assert memory["verdict"] == "does_not_start"
    assert flag in [remedy["flag"] for remedy in memory["remedies"]]
    for remedy in memory["remedies"]:
        mended = {**settings, remedy["flag"]: remedy["value"]}
        assert "run" in few(**{name: value for name, value in mended.items() if value is not None}), remedy


def test_the_profile_and_its_error_are_told() -> None:
    told = few()["memory"]["cost"]
    assert told["is_calibrated"]
    assert re.fullmatch(r"composed, not measured; steps ± \d+ % \(median\), ± \d+ % \(9 of 10\)", told["badge"])
    without = few("preemption-storm")["memory"]["cost"]
    assert (without["is_calibrated"], without["badge"]) == (False, "uncalibrated")


def test_a_load_beyond_saturation_is_told_even_where_the_run_is_short() -> None:
    parts = few(request_rate=100)
    assert parts["run"]["verdict"] == "too_short"
    assert parts["saturation"]["utilisation"] > 1.5
    assert parts["saturation"]["headline"].startswith("Too much: ")
    assert parts["saturation"]["tone"] == "bad"


def test_without_a_price_nothing_costs_anything() -> None:
    assert not [each for each in few()["run"]["cards"] if each["key"].startswith("cost")]


def test_a_price_is_of_all_gpus_and_per_token_served() -> None:
    parts = few(gpu_hour=2.5, tensor_parallel_size=2, data_parallel_size=3)
    assert card(parts, "gpus")["value"] == 6
    assert card(parts, "cost_hour")["value"] == pytest.approx(15.0)
    rate = card(parts, "output_throughput")["value"]
    assert card(parts, "cost_output")["value"] == pytest.approx(15.0 / 3600 / rate * 1e6)


def test_knobs_stand_where_the_engine_has_them() -> None:
    values = few(gpu="A100-80GB-SXM")["memory"]["values"]
    resolved = resolve(load(Question(CHAT, {"gpu": "A100-80GB-SXM"})))
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "enable_prefix_caching"):
        assert values[name] == getattr(resolved.config, name)


def test_what_was_turned_is_in_the_command_line() -> None:
    command = few(max_num_seqs=64, kv_cache_dtype="fp8")["memory"]["serve_command"]["text"]
    assert command == "vllm serve meta-llama/Llama-3.1-8B-Instruct --kv-cache-dtype fp8 --max-num-seqs 64"
    assert "names no model" in few("preemption-storm")["memory"]["serve_command"]["why"]


def test_an_answer_that_was_given_before_is_given_again() -> None:
    answers, asked = Answers(), Question(CHAT, {"num_requests": 100})
    first = [dict(part) for part in answers.parts(asked, Watch(60))]
    again = list(answers.parts(asked, Watch(60)))
    assert [part["part"] for part in again] == ["memory", "run", "saturation"]
    assert all(part.pop("kept") for part in again)
    assert [{**part, "ms": 0} for part in again] == [{**part, "ms": 0} for part in first]


def test_an_answer_that_takes_too_long_is_given_up_with_a_remedy() -> None:
    error = answer(limit_s=0.2, num_requests=5000, request_rate=1)["error"]
    assert (error["kind"], error["place"]) == ("out_of_time", "num_requests")
    assert re.search(r"Stopped after 0.2 s: [\d,]+ of 5,000 requests were done\.  Ask for fewer", error["message"])


def test_an_answer_that_nobody_waits_for_is_given_up() -> None:
    looks = iter([True] * 3)
    parts = Answers().parts(Question(CHAT, {"num_requests": 1000}), Watch(60, lambda: next(looks, False)))
    with pytest.raises(Superseded):
        list(parts)


def test_a_watch_stops_at_its_limit() -> None:
    Watch(60)(1, 2)
    with pytest.raises(OutOfTime):
        Watch(-1)(1, 2)


# --- questions


def json_values() -> st.SearchStrategy[Any]:
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    return st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


@given(
    name=st.sampled_from([*(each.name for each in knobs()), "trace", "num_gpus"]), value=json_values(), field=st.text()
)
def test_a_question_is_read_or_refused_with_its_place(name: str, value: Any, field: str) -> None:
    for body in ({"preset": CHAT, "settings": {name: value}}, {field: value}, value):
        asked, error = read(body)
        assert (asked is None) != (error is None)
        if error is not None:
            assert (str(error), error.place) > ("", "")
        if asked is not None:
            assert load(asked.without("rate_scale")).scenario.name == CHAT


def read(body: Any) -> tuple[Question | None, BadQuestion | None]:
    try:
        return read_question(body, PRESETS), None
    except BadQuestion as error:
        return None, error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs = 0 must be from 1 to 65,536"),
        ({"max_num_seqs": 10**400}, "max_num_seqs = 1000"),
        ({"max_num_seqs": -(10**400)}, "max_num_seqs = -1000"),
        ({"max_num_seqs": 1.5}, "max_num_seqs = 1.5 must be a whole number; nearest: 2"),
        ({"request_rate": "fast"}, "request_rate = 'fast' must be a number from 0.001 to 10,000, or inf"),
        ({"gpu": "H1000"}, "gpu = 'H1000' must be one of "),
        ({"gpu_utilization": 0.9}, "settings has no 'gpu_utilization': did you mean 'gpu_memory_utilization'?"),
        ({"rate_scale": 2}, "rate_scale: only a trace can be sped up; turn request_rate instead"),
    ],
)
def test_a_knob_beyond_its_range_is_refused_in_words(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadQuestion) as caught:
        load(read_question({"preset": CHAT, "settings": settings}, PRESETS))
    assert str(caught.value).startswith(message)
    assert caught.value.place in {*settings, "settings"}


def test_a_choice_is_one_of_the_choices_however_it_is_written() -> None:
    asked = read_question({"preset": CHAT, "settings": {"tensor_parallel_size": 2.0}}, PRESETS)
    assert isinstance(asked.settings["tensor_parallel_size"], int)


def test_an_objective_that_is_none_is_refused_at_its_knob() -> None:
    error = answer(objectives="ttft:p99<fast")["error"]
    assert error["place"] == "objectives"
    assert "ttft:p99<fast" in error["message"]
    assert " on the page" not in error["message"]


def test_requests_are_few_enough_for_an_answer_at_once(tmp_path: Path) -> None:
    table = {**tomllib.loads(answer(num_requests=100)["memory"]["scenario_text"])}
    for workload in (
        {"num_requests": 1_000_000, "input": 100, "output": 10, "request_rate": 5},
        {"input": 100, "output": 10, "sessions": {"turns": 20, "num_sessions": 1_000_000}},
    ):
        (tmp_path / "large.toml").write_text(to_toml({**table, "workload": workload}))
        asked = load(Question(str(tmp_path / "large.toml")))
        assert len(resolve(asked).workload) <= MAX_REQUESTS


@pytest.mark.parametrize(
    "spec",
    [
        512,
        {"dist": "fixed", "tokens": 300},
        {"dist": "uniform", "low": 100, "high": 900},
        {"dist": "uniform", "tokens": 1000, "range_ratio": 0.2},
        {"dist": "lognormal", "mean": 512, "sigma": 0.9},
        {"dist": "lognormal", "mean": 512.0, "std": 300.0, "min": 2},
        {"dist": "exponential", "mean": 128, "max": 100_000, "redraw": True},
        {"dist": "geometric", "mean": 16},
        {"dist": "quantiles", "p50": 200, "p90": 600, "p99": 1500},
        {"dist": "quantiles", "quantiles": [[0.5, 200], [1.0, 1500]]},
        {"dist": "in_turn", "values": [20, 20, 600]},
        {"dist": "empirical", "values": [100, 500]},
    ],
    ids=str,
)
def test_a_length_slider_moves_the_mean_and_keeps_the_shape(spec: int | dict[str, Any]) -> None:
    before, after = (
        lengths_from(each, "input").sample(stream(1, "prompt"), 20_000)
        for each in (spec, scaled_to(spec, 3 * nominal_mean(spec)))
    )
    assert after.mean() == pytest.approx(3 * before.mean(), rel=0.04)
    assert after.std() / after.mean() == pytest.approx(before.std() / before.mean(), abs=0.04)


def write_trace_scenario(folder: Path) -> Path:
    rows = [f"{second / 4},{200 + second % 400},{20 + second % 50}\n" for second in range(1500)]
    (folder / "traffic.csv").write_text("arrival_s,num_prompt_tokens,num_output_tokens\n" + "".join(rows))
    (folder / "mine.toml").write_text(
        'description = "ours"\n[deployment]\nmodel = "llama-3.1-8b"\ngpu = "h100"\n[workload]\ntrace = "traffic.csv"\n'
    )
    return folder / "mine.toml"


def test_a_scenario_with_a_trace_is_sped_up_and_not_drawn_anew(tmp_path: Path, monkeypatch: Any) -> None:
    mine = str(write_trace_scenario(tmp_path))
    once, twice = (answer(mine, rate_scale=scale, num_requests=200) for scale in (1, 2))
    values = once["memory"]["values"]
    assert (values["rate_scale"], values.get("request_rate"), values.get("input")) == (1, None, None)
    assert twice["run"]["duration_s"] == pytest.approx(once["run"]["duration_s"] / 2, rel=0.1)
    assert answer(mine, input=100)["error"]["place"] == "input"
    monkeypatch.chdir(tmp_path.parent)
    again = wt.simulate(tomllib.loads(twice["memory"]["scenario_text"]))
    assert again.summary["p99_ttft_ms"] == card(twice, "ttft")["value"]


def test_what_the_page_was_started_with_comes_first(tmp_path: Path) -> None:
    mine = str(write_trace_scenario(tmp_path))
    assert next(iter(presets(mine).items())) == (mine, "ours")
    assert next(iter(presets("rag-long-documents"))) == "rag-long-documents"
    assert next(iter(presets(None))) == CHAT
    assert set(presets(None)) == set(bundled_scenarios())


toml_values = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), toml_values, max_size=4))
def test_a_table_written_as_toml_is_read_as_it_was(table: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(table)) == table


# --- the desk, with a worker that does as it is told

WORKER = textwrap.dedent(
    """
    import json, os, sys, threading, time
    stopped = set()
    jobs = []
    def read():
        for line in sys.stdin:
            told = json.loads(line)
            stopped.add(told["stop"]) if "stop" in told else jobs.append(told)
        os._exit(0)
    threading.Thread(target=read, daemon=True).start()
    def tell(ticket, part, **more):
        print(json.dumps({"ticket": ticket, "part": part, **more}), flush=True)
    while True:
        if not jobs:
            time.sleep(0.002)
            continue
        job = jobs.pop(0)
        ticket, preset = job["ticket"], job["question"]["preset"]
        tell(ticket, "memory", preset=preset)
        if preset == "die":
            os._exit(3)
        while preset == "hang" or (preset == "slow" and ticket not in stopped):
            time.sleep(0.002)
        tell(ticket, "superseded" if ticket in stopped else "end")
    """
)


def with_desk(use: Any, **options: Any) -> Any:
    """What a coroutine function makes of a desk with that worker."""

    async def run() -> Any:
        desk = Desk(options.pop("limit_s", 20.0), (sys.executable, "-c", WORKER), **options)
        await desk.start()
        try:
            return await use(desk)
        finally:
            await desk.close()

    return asyncio.run(run())


async def parts_of(desk: Desk, preset: str, tab: str = "a") -> list[str]:
    return [part.get("kind", part["part"]) async for part in desk.ask(Question(preset), tab)]


def test_of_many_questions_of_one_page_only_the_latest_is_answered() -> None:
    async def use(desk: Desk) -> list[list[str]]:
        earlier = [asyncio.create_task(parts_of(desk, "slow")) for _ in range(20)]
        await asyncio.sleep(0.2)
        latest = asyncio.create_task(parts_of(desk, "quick"))
        return [*await asyncio.gather(*earlier), await latest]

    *earlier, latest = with_desk(use)
    assert latest == ["memory", "end"]
    assert all(parts[-1] == "superseded" for parts in earlier)
    assert sum("memory" in parts for parts in earlier) <= 2, "the others were never begun"


def test_pages_do_not_take_each_others_place() -> None:
    async def use(desk: Desk) -> list[list[str]]:
        return list(await asyncio.gather(*(parts_of(desk, "quick", tab) for tab in "abc")))

    assert with_desk(use) == [["memory", "end"]] * 3


def test_a_page_that_goes_away_frees_the_process() -> None:
    async def use(desk: Desk) -> list[str]:
        gone = desk.ask(Question("slow"), "gone")
        assert (await anext(gone))["part"] == "memory"
        await gone.aclose()
        return await parts_of(desk, "quick", "other")

    assert with_desk(use) == ["memory", "end"]


@pytest.mark.parametrize(("preset", "kind"), [("die", "died"), ("hang", "out_of_time")])
def test_a_process_that_dies_or_hangs_is_replaced(preset: str, kind: str) -> None:
    async def use(desk: Desk) -> tuple[list[str], list[str]]:
        return await parts_of(desk, preset), await parts_of(desk, "quick")

    broken, next_one = with_desk(use, limit_s=0.3, grace_s=0.3)
    assert broken == ["memory", kind]
    assert next_one[-1] == "end"


def test_a_process_that_died_while_nobody_asked_is_replaced_before_the_next_question() -> None:
    async def use(desk: Desk) -> list[str]:
        assert desk._process is not None
        desk._process.kill()
        await desk._process.wait()
        return await parts_of(desk, "quick")

    assert with_desk(use) == ["memory", "end"]


# --- HTTP


class Served(NamedTuple):
    url: str
    client: httpx.Client

    def ask(self, body: Any = None, **options: Any) -> httpx.Response:
        content = json.dumps({"preset": CHAT, "tab": "test"} if body is None else body)
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        return self.client.post("/api/what-if", content=options.pop("content", content), headers=headers)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """The page as the command serves it."""
    settings = PageSettings(PRESETS, "0.0.test", limit_s=30.0)
    with listen("127.0.0.1", 0) as listener:
        server = make_server(settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            with httpx.Client(base_url=url_of(listener), timeout=60.0) as client:
                yield Served(url_of(listener), client)
        finally:
            server.should_exit = True
            thread.join(timeout=20)
            assert not thread.is_alive()


def test_an_answer_comes_in_parts(served: Served) -> None:
    response = served.ask({"preset": CHAT, "settings": {"num_requests": 100}, "tab": "parts"})
    assert response.status_code == 200
    parts = [json.loads(line) for line in response.text.splitlines()]
    assert [part["part"] for part in parts] == ["memory", "run", "saturation", "end"]


def test_the_page_needs_nothing_from_elsewhere(served: Served) -> None:
    page = served.client.get("/")
    assert page.status_code == 200
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(links) >= 6
    assert all(link.startswith(("/static/", "#")) for link in links)
    for link in links:
        if link.startswith("/"):
            assert served.client.get(link).status_code == 200, link
    assert "http" not in served.client.get("/static/ui.js").text.replace("https://", "http")
    assert "default-src 'none'; script-src 'self';" in page.headers["Content-Security-Policy"]
    assert not [name for name in page.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "localhost.evil.example"},
        {"Host": "192.168.0.7"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
    ],
    ids=str,
)
def test_other_sites_are_refused(served: Served, headers: dict[str, str]) -> None:
    response = served.ask(headers=headers)
    assert response.status_code == 403
    assert response.json()["error"]["kind"] == "forbidden"
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("host", ["localhost:99", "127.0.0.1", "[::1]:80", "LOCALHOST."])
def test_this_machine_is_known_by_all_its_names(served: Served, host: str) -> None:
    assert served.client.get("/api/start", headers={"Host": host}).status_code == 200


BAD = [
    ("not json", {"content": b"{"}, "question"),
    ("no number", {"content": b'{"preset": NaN}'}, "question"),
    ("a key twice", {"content": b'{"preset": "chat-8b-h100", "settings": {"seed": 1, "seed": 2}}'}, "question"),
    ("nested", {"content": b"[" * 10_000}, "question"),
    ("not UTF-8", {"content": b'{"preset": "\xff"}'}, "question"),
    ("too long", {"content": b'"' + b"x" * 70_000 + b'"'}, "question"),
    ("a list", {"body": []}, "question"),
    ("of a form", {"headers": {"Content-Type": "text/plain"}}, "Content-Type"),
    ("no preset", {"body": {"preset": "../../etc/passwd"}}, "preset"),
    ("long tab", {"body": {"preset": CHAT, "tab": "x" * 100}}, "tab"),
    ("no range", {"body": {"preset": CHAT, "settings": {"output": -3}}}, "output"),
    ("a path", {"body": {"preset": CHAT, "settings": {"model": "/etc/passwd"}}}, "model"),
    ("an objective", {"body": {"preset": CHAT, "settings": {"objectives": "soon"}}}, "objectives"),
    ("a rate", {"body": {"preset": CHAT, "settings": {"request_rate": None}}}, "request_rate"),
]


@pytest.mark.parametrize(("options", "place"), [each[1:] for each in BAD], ids=[each[0] for each in BAD])
def test_a_bad_question_is_answered_with_place_and_remedy(served: Served, options: Any, place: str) -> None:
    response = served.ask(**options)
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert error["place"] == place
    assert error["message"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/static/app.py", 404)])
def test_what_is_not_there_is_told_as_json(served: Served, method: str, path: str, status: int) -> None:
    response = served.client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert served.client.get("/api/what-if").status_code == 405
    assert served.client.get("/static/..%2Fapp.py").status_code == 404


def test_a_page_open_to_others_takes_addresses_and_the_names_it_was_given() -> None:
    from windtunnel.ui.app import _Guard

    guard = _Guard(None, PageSettings({}, "", 1.0, is_open=True, host_names=("bench.lan",)))
    assert [guard._is_own(host) for host in ("192.168.0.7:8765", "bench.lan", "evil.example")] == [True, True, False]


# --- the command


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--host", "0.0.0.0"], 2, "can be reached from other machines"),
        (["--host", "example.com"], 2, "can be reached from other machines"),
        (["--max-seconds", "0"], 2, "must be from 0.1 to 600"),
        (["--port", "70000"], 2, "a --port is at most 65535"),
        (["no-such-scenario"], 3, "no scenario file no-such-scenario"),
    ],
)
def test_the_command_refuses_in_words(arguments: list[str], code: int, words: str, capsys: Any) -> None:
    assert main(["ui", *arguments]) == code
    assert words in capsys.readouterr().err


def test_the_command_names_the_extra_that_is_missing(monkeypatch: Any, capsys: Any) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    assert main(["ui"]) == 2
    assert capsys.readouterr().err == "error: ui needs uvicorn: pip install 'windtunnel[server]'\n"


def test_a_port_that_is_taken_is_told(capsys: Any) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert main(["ui", "--port", port]) == 2
    assert "choose another --port" in capsys.readouterr().err


def test_only_loopback_addresses_are_of_this_machine_alone() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1", "a.b")] == [
        *[True] * 3,
        *[False] * 4,
    ]


# --- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Page]:
    if chromium.EXECUTABLE is None:
        pytest.skip("there is no Chromium")
    with chromium.page() as page:
        yield page


READY = "document.getElementById('result').getAttribute('aria-busy') === 'false' && windtunnelTimings.length"


def open_page(browser: chromium.Page, served: Served, state: str = "") -> None:
    browser.open("about:blank")
    browser.problems.clear()
    browser.open(f"{served.url}#preset={CHAT}&num_requests=200{state}")
    browser.wait(READY)


def text(browser: chromium.Page, selector: str) -> str:
    return str(browser.run(f"document.querySelector({json.dumps(selector)}).innerText"))


def test_a_slider_moved_by_keyboard_changes_the_picture(browser: chromium.Page, served: Served) -> None:
    browser.look(1280, 900)
    open_page(browser, served)
    before = text(browser, "[data-card=ttft] .value")
    browser.run("document.getElementById('knob-request_rate').focus()")
    browser.press("ArrowRight", 12)
    assert browser.run("new URLSearchParams(location.hash.slice(1)).get('request_rate')") == "100"  # 12 stops on
    browser.wait(f"{READY} && document.querySelector('[data-card=ttft] .value').innerText !== {json.dumps(before)}")
    browser.wait("document.querySelector('#plot-waterfall .main-svg')")
    assert "requests/s" in text(browser, "#live")
    assert not browser.problems


def test_figures_are_drawn_by_the_script_of_the_reports(served: Served) -> None:
    own = Path(reports.__path__[0]) / "plot.js"
    assert served.client.get("/static/plot.js").text == own.read_text(encoding="utf-8")
    assert "Plotly.react" not in served.client.get("/static/figures.js").text


SLIDER = "[document.getElementById('knob-%s').getAttribute('aria-valuetext'), document.activeElement.id]"


def test_every_slider_says_its_value_with_its_unit_as_it_moves(browser: chromium.Page, served: Served) -> None:
    browser.look(1280, 900)
    open_page(browser, served, "&request_rate=10")
    shown = browser.run(
        "[...document.querySelectorAll('input[type=range]')].filter((each) => each.offsetParent).map((each) =>"
        " [each.getAttribute('aria-valuetext'), each.parentElement.querySelector('[type=text]').value])"
    )
    assert len(shown) >= 8
    assert [pair for pair in shown if not pair[1] or not pair[0].startswith(pair[1])] == []
    browser.run("document.getElementById('knob-request_rate').focus()")
    browser.press("ArrowRight")
    assert browser.run(SLIDER % "request_rate") == ["12 requests/s", "knob-request_rate"]
    browser.press("End")
    assert browser.run(SLIDER % "request_rate") == ["all at once", "knob-request_rate"]


def test_the_focus_goes_on_to_what_is_left_when_a_button_vanishes(browser: chromium.Page, served: Served) -> None:
    browser.look(1280, 900)
    open_page(browser, served, "&seed=3")
    focused = "document.activeElement.id || document.activeElement.textContent"
    browser.run("document.querySelector('#turned button').focus()")
    browser.press("Enter")
    assert browser.run(focused) == "seed = 3 ✕"
    browser.press("Enter")
    assert browser.run(focused) == "preset"
    browser.wait(READY)
    browser.run("document.getElementById('pin').focus()")
    browser.press("Enter")
    browser.run("document.getElementById('unpin').focus()")
    browser.press("Enter")
    assert browser.run(focused) == "pin"
    assert not browser.problems


def test_a_remedy_is_one_click_away(browser: chromium.Page, served: Served) -> None:
    browser.look(1280, 900)
    browser.open("about:blank")
    browser.open(f"{served.url}#preset={CHAT}&num_requests=200&model={LLAMA_70B}")
    browser.wait("document.querySelector('#remedies button')")
    assert text(browser, "#headline") == "vLLM does not start like this."
    assert "CUDA out of memory" in text(browser, "#sentences")
    assert not browser.run("document.getElementById('cards').offsetParent")
    browser.run("document.querySelector('#remedies button').click()")
    browser.wait(READY)
    assert "tensor_parallel_size=4" in browser.run("location.hash")
    assert text(browser, "[data-card=gpus] .value") == "4"
    assert text(browser, "#calibration").startswith("composed, not measured; steps ±")


def test_two_states_are_compared_and_a_link_leads_back_to_both(browser: chromium.Page, served: Served) -> None:
    browser.look(1280, 900)
    open_page(browser, served)
    browser.run("document.getElementById('pin').click()")
    browser.run(
        "(() => { const box = document.querySelector('[data-knob=max_num_seqs] input[type=text]');"
        " box.value = '8'; box.dispatchEvent(new Event('change')); })()"
    )
    browser.wait(f"{READY} && document.querySelector('[data-card=ttft] .worse')")
    compared, differs = text(browser, "#cards"), text(browser, "#differs")
    assert differs == "From A to this: max_num_seqs 1,024 → 8."
    link = browser.run("location.href")
    browser.open("about:blank")
    browser.open(link)
    browser.wait(f"{READY} && document.querySelector('[data-card=ttft] .worse')")
    browser.wait(f"document.getElementById('cards').innerText === {json.dumps(compared)}")
    assert text(browser, "#differs") == differs


def test_a_bad_link_is_told_at_its_knob(browser: chromium.Page, served: Served) -> None:
    browser.look(1280, 900)
    browser.open("about:blank")
    browser.open(f"{served.url}#preset={CHAT}&output=0")
    browser.wait("!document.getElementById('error').hidden")
    assert text(browser, "#error") == "output = 0 must be from 1 to 262,144"
    browser.wait("document.querySelector('[data-knob=output] [aria-invalid=true]')")
    browser.wait("document.getElementById('knob-model').value")


UNLABELLED = """
[...document.querySelectorAll('input, select, button, [role=img], pre[tabindex]')].filter((each) => {
  const labels = each.labels ? [...each.labels].map((label) => label.innerText).join('') : '';
  return each.offsetParent && !(labels || each.getAttribute('aria-label') || each.getAttribute('aria-labelledby') ||
    (each.tagName === 'BUTTON' && each.innerText.trim()));
}).map((each) => each.outerHTML.slice(0, 200))
"""
FOCUSED = """
(() => { const each = document.activeElement, style = getComputedStyle(each);
  if (each === document.body) return ['', ''];
  return [each.id || each.getAttribute('aria-label') || each.textContent.slice(0, 30), style.outlineStyle]; })()
"""


def test_every_control_has_a_name_and_is_reached_by_tab_with_its_focus_seen(
    browser: chromium.Page, served: Served
) -> None:
    browser.look(1280, 900)
    open_page(browser, served)
    assert browser.run(UNLABELLED) == []
    reached = {}
    for _ in range(90):
        browser.press("Tab")
        name, outline = browser.run(FOCUSED)
        reached[name] = outline
    controls = browser.run(
        "[...document.querySelectorAll('[data-knob] [id^=knob-]')].filter((each) => each.offsetParent"
        " && /INPUT|SELECT/.test(each.tagName)).map((each) => each.id)"
    )
    assert len(controls) >= 15
    assert set(controls) <= set(reached)
    assert {"preset", "pin", "copy-link", "serve", "plot-kv"} <= set(reached)
    assert [name for name, outline in reached.items() if outline == "none"] == []


@pytest.mark.parametrize("state", ["", "&request_rate=60&gpu_hour=2.5", f"&model={LLAMA_70B}"])
def test_nothing_sticks_out_of_a_phone(browser: chromium.Page, served: Served, state: str) -> None:
    browser.look(390, 844, is_phone=True)
    browser.open("about:blank")
    browser.open(f"{served.url}#preset={CHAT}&num_requests=200{state}")
    browser.wait(f"({READY}) || document.querySelector('#remedies button')")
    assert browser.run("document.documentElement.scrollWidth") == 390
    assert browser.run("getComputedStyle(document.getElementById('strip')).position") == "sticky"
