"""The load client: what it sends, when, and what it notes of good, slow and broken answers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import END, Asked, answer_well, chunk, event, head, scripted, token
from serving import Served, limits, serving

from windtunnel.calibrate.live.answers import Answer
from windtunnel.calibrate.live.client import ClientConfig, Progress, ServerUnreachable, drive, run_live
from windtunnel.calibrate.live.http import BadResponse, ResponseParser, parse_address
from windtunnel.calibrate.live.metrics import Scrape, counts_between, prometheus_series, series_of
from windtunnel.calibrate.live.observed import Ending, ObservedRun
from windtunnel.calibrate.live.observed_metrics import observed_from_records
from windtunnel.calibrate.live.prompts import Prompts
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.metrics.latency import peak_in_flight
from windtunnel.sim.simulate import run as simulate
from windtunnel.sim.workload import Workload, workload

SMALL = {"vocab_size": 1000, "eos_token_id": 999}
IDS = (3, 990)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(config=SMALL, step_s=5e-4) as served:
        yield served


def config(url: str, **values: Any) -> ClientConfig:
    """Quick to run; the machine of a test may be busy, so that late sending is not worth a note."""
    quick = {"token_ids": IDS, "num_warmup_requests": 0, "scrape_interval_s": 0.0, "late_limit_s": 60.0}
    return ClientConfig(url, **{**quick, **values})


def at_once(num_requests: int, **values: Any) -> Workload:
    made = {"num_prompt_tokens": np.full(num_requests, 8), "num_output_tokens": np.full(num_requests, 4), **values}
    return workload(np.zeros(num_requests), **made)


def endings(run: ObservedRun) -> list[Ending]:
    return [Ending(ending) for ending in run.requests.ending]


# -- against our own server


def test_every_token_of_every_request_has_a_time(server: Served) -> None:
    outputs = np.arange(1, 13)
    load = workload(np.arange(12) * 5_000_000, outputs * 3, outputs)
    run = run_live(load, config(server.url, scrape_interval_s=0.05, num_warmup_requests=2))
    table = run.requests
    assert endings(run) == [Ending.FINISHED] * 12
    assert table.num_output_tokens.tolist() == outputs.tolist()
    assert table.num_prompt_tokens.tolist() == (outputs * 3).tolist()
    for row in range(12):
        times = table.chunk_times_of(row)
        tokens = table.chunk_tokens[table.chunk_offsets[row] : table.chunk_offsets[row + 1]]
        assert int(tokens.sum()) == outputs[row]
        assert (np.diff(times) >= 0).all()
        assert (times[0], times[-1]) == (table.ttft_ns[row], table.e2el_ns[row])
    assert run.notes == ()


def test_the_servers_counters_are_those_of_the_run_alone(server: Served) -> None:
    run = run_live(at_once(5), config(server.url, scrape_interval_s=0.05, num_warmup_requests=3))
    assert run.counts.prompt_tokens == 40
    assert run.counts.generation_tokens == 20
    assert run.counts.num_requests_finished == 5
    assert (run.server.model, run.server.max_model_len) == ("tiny", 600)
    assert (run.server.num_gpu_blocks, run.server.block_size) == (400, 4)
    assert run.series is not None
    assert run.series.generation_tokens[-1] == 20


def test_a_closed_loop_never_exceeds_its_concurrency(server: Served) -> None:
    run = run_live(at_once(20, max_concurrency=3), config(server.url))
    table = run.requests
    assert endings(run) == [Ending.FINISHED] * 20
    assert peak_in_flight(table.send_ns, table.send_ns + table.end_ns) == 3
    assert (table.due_ns == 0).all()
    assert (table.send_ns >= table.ready_ns).all()


def test_a_turn_waits_for_the_answer_before_and_thinks(server: Served) -> None:
    think_ns = 30_000_000
    load = workload([0, -1, -1], [8, 20, 30], [4, 4, 4], previous=[-1, 0, 1], think_ns=[0, think_ns, think_ns])
    table = run_live(load, config(server.url)).requests
    answered = table.send_ns + table.end_ns
    assert table.due_ns[1:].tolist() == (answered[:-1] + think_ns).tolist()
    assert (table.send_ns[1:] >= table.due_ns[1:]).all()


def conversations() -> Workload:
    """Two prompts with a common beginning, each gone on with twice: all of it, answers included, is sent again."""
    content = []
    for stream in (1, 2):
        content += [((0, 40), (stream, end)) for end in (40 + 13 + 9, 80 + 11, 120 + 5)]
    return workload(
        [0, -1, -1, 0, -1, -1],
        [53, 80, 120] * 2,
        [9, 11, 5] * 2,
        previous=[-1, 0, 1, -1, 3, 4],
        content=tuple(content),
        num_streams=3,
        max_concurrency=1,
    )


def test_the_servers_prefix_cache_hits_what_the_simulation_says(server: Served) -> None:
    load = conversations()
    run = run_live(load, config(server.url, scrape_interval_s=0.05, cache_salt="this test"))
    simulated = simulate(load, limits(enable_prefix_caching=True), ConstantCost(1e-3))
    expected = observed_from_records(simulated, load).counts
    assert run.counts.prefix_hit_tokens == expected.prefix_hit_tokens
    assert run.counts.prefix_query_tokens == expected.prefix_query_tokens == int(load.num_prompt_tokens.sum())
    assert run.notes == ()


def test_token_ids_that_the_model_does_not_have_are_noted(server: Served) -> None:
    run = run_live(at_once(1), config(server.url, token_ids=(2000, 3000), num_warmup_requests=1))
    assert endings(run) == [Ending.REFUSED]
    assert run.notes[0].startswith("1 of 1 warm-up requests failed")
    assert "lower token_ids" in run.notes[1]


def test_a_cache_salt_keeps_an_earlier_run_out(server: Served) -> None:
    load = at_once(1, num_prompt_tokens=[40])
    hits = [
        run_live(load, config(server.url, scrape_interval_s=0.05, cache_salt=salt)).counts.prefix_hit_tokens
        for salt in ("one", "one", "two")
    ]
    assert hits == [0, 36, 0]


def test_late_sending_is_reported() -> None:
    with scripted(answer_well) as served:
        run = run_live(at_once(4), config(served.url, late_limit_s=1e-9))
    assert run.send_report is not None
    assert 0 < run.send_report.late_p50_s <= run.send_report.late_p99_s <= run.send_report.late_max_s
    assert any("sent late" in note for note in run.notes)


def test_text_prompts_of_another_length_are_noted(server: Served) -> None:
    run = run_live(at_once(2), config(server.url, prompt_kind="text"))
    assert endings(run) == [Ending.FINISHED] * 2
    assert (run.requests.num_prompt_tokens > 8).all()  # this server has a token for each byte
    assert any("other prompt lengths" in note for note in run.notes)


# -- against servers that are slow or broken


def test_an_open_loop_sends_on_time_although_nothing_is_answered() -> None:
    """The server answers nobody until it has seen all requests: a client that waits for answers would wait for ever."""
    num_requests = 40
    seen: list[int] = []
    everybody = asyncio.Event()

    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        seen.append(asked.row)
        if len(seen) == num_requests:
            everybody.set()
        await everybody.wait()
        await answer_well(asked, writer)

    due_ns = np.arange(num_requests) * 2_000_000
    load = workload(due_ns, np.full(num_requests, 8), np.full(num_requests, 2))
    with scripted(script) as served:
        run = run_live(load, config(served.url, max_seconds=30))
    table = run.requests
    assert endings(run) == [Ending.FINISHED] * num_requests
    assert (table.send_ns >= due_ns).all()
    assert table.send_ns.max() < (table.send_ns + table.ttft_ns).min()
    assert run.send_report is not None
    assert run.send_report.late_max_s == pytest.approx((table.send_ns - due_ns).max() / 1e9)


async def break_in_its_own_way(asked: Asked, writer: asyncio.StreamWriter) -> None:
    match asked.row:
        case 0:
            body = json.dumps({"error": {"message": "the queue is full"}}).encode()
            writer.write(head(503, transfer_encoding="", content_length=str(len(body))) + body)
        case 1:
            writer.write(head() + chunk(token(1)))
            await writer.drain()
            writer.close()
        case 2:
            writer.write(head() + chunk(token(1)) + chunk(event({"error": {"message": "the engine died"}})) + END)
        case 3:
            writer.write(head() + chunk(token(1)) + b"0\r\n\r\n")
        case 4:
            writer.write(head() + chunk(event(b"{not json")) + END)
        case 5:
            writer.write(b"SSH-2.0-something else altogether\r\n\r\n")
        case 6:
            writer.write(head() + END)
        case 7:
            body = b'{"choices": [{"text": "whole"}]}'
            writer.write(head(transfer_encoding="", content_length=str(len(body))) + body)
        case 8:
            writer.close()
        case _:
            await answer_well(asked, writer)


def test_broken_answers_are_recorded_each_with_its_reason() -> None:
    with scripted(break_in_its_own_way) as served:
        run = run_live(at_once(10, num_output_tokens=np.full(10, 3)), config(served.url))
    assert endings(run) == [Ending.REFUSED, *[Ending.BROKEN] * 8, Ending.FINISHED]
    for row, reason in enumerate(
        [
            "status 503: the queue is full",
            "closed the connection",
            "the engine died",
            "without [DONE]",
            "not an event of a completion",
            "not an answer of HTTP/1.1",
            "no tokens",
            "did not stream",
            "closed the connection",
        ]
    ):
        assert reason in run.requests.errors[row]
    assert run.requests.http_status[[0, 1, 9]].tolist() == [503, 200, 200]
    assert run.requests.ttft_ns[1] > 0  # what there was of it
    assert run.requests.e2el_ns[1] == -1


def test_a_closed_loop_goes_on_after_failures() -> None:
    with scripted(break_in_its_own_way) as served:
        run = run_live(at_once(12, max_concurrency=1), config(served.url))
    assert endings(run)[9:] == [Ending.FINISHED] * 3
    assert served.rows == list(range(12))


async def never_answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(head() + chunk(token(1)))
    await writer.drain()
    await asyncio.sleep(60)


def test_the_clients_patience_ends_a_request_and_its_followers_go_on() -> None:
    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await (never_answer if asked.row == 0 else answer_well)(asked, writer)

    load = workload([0, -1], [8, 8], [4, 4], previous=[-1, 0], request_timeout_ns=50_000_000)
    with scripted(script) as served:
        run = run_live(load, config(served.url))
    assert endings(run) == [Ending.TIMED_OUT, Ending.FINISHED]
    assert run.requests.end_ns[0] >= 50_000_000


def test_a_server_that_is_not_there_is_recorded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    run = run_live(at_once(3), config(f"http://127.0.0.1:{port}", model="tiny", scrape_interval_s=0.05))
    assert endings(run) == [Ending.UNREACHABLE] * 3
    assert "refused" in run.requests.errors[0].lower()
    with pytest.raises(ServerUnreachable, match="does not say which model"):
        run_live(at_once(1), config(f"http://127.0.0.1:{port}"))


def test_a_run_is_cut_off_after_its_time() -> None:
    load = workload([0, 0, 10**13], [8] * 3, [4] * 3)
    with scripted(never_answer) as served:
        run = run_live(load, config(served.url, max_seconds=0.2))
    assert endings(run) == [Ending.CUT_OFF, Ending.CUT_OFF, Ending.UNSENT]
    assert run.requests.num_output_tokens.tolist() == [1, 1, 0]
    assert any("max_seconds" in note for note in run.notes)


def test_no_more_requests_are_in_flight_than_the_client_bears() -> None:
    with scripted(never_answer) as served:
        run = run_live(at_once(5), config(served.url, max_in_flight=2, max_seconds=0.2))
    assert endings(run) == [Ending.CUT_OFF] * 2 + [Ending.UNSENT] * 3
    assert "max_in_flight" in run.requests.errors[4]
    assert served.rows == [0, 1]


def test_an_interrupted_run_keeps_what_was_seen() -> None:
    first_done = threading.Event()

    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await (answer_well if asked.row == 0 else never_answer)(asked, writer)

    async def interrupted(url: str) -> ObservedRun:
        def note(progress: Progress) -> None:
            if progress.num_finished == 1 and progress.num_tokens == 5:
                first_done.set()

        task = asyncio.create_task(drive(at_once(2), config(url), on_progress=note))
        while not first_done.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        return await task

    with scripted(script) as served:
        run = asyncio.run(interrupted(served.url))
    assert run.was_interrupted
    assert endings(run) == [Ending.FINISHED, Ending.CUT_OFF]


# -- what is sent


def test_requests_ask_for_exact_lengths_and_the_same_again_with_the_same_seed() -> None:
    load = workload([0, 0], [5, 7], [3, 2])
    bodies = []
    for _ in range(2):
        with scripted(answer_well) as served:
            run_live(load, config(served.url, cache_salt="salt", seed=7))
        bodies.append({asked.row: asked.body for asked in served.asked if asked.method == "POST"})
    assert bodies[0] == bodies[1]
    assert [len(bodies[0][row]["prompt"]) for row in (0, 1)] == [5, 7]
    body = bodies[0][0]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["stream"]) == (3, 3, True, True)
    assert body["cache_salt"] == "salt"
    assert body["model"] == "scripted"


def test_servers_that_refuse_unknown_fields_get_none() -> None:
    with scripted(answer_well) as served:
        run_live(at_once(1), config(served.url, vllm_extensions=False, api_key="secret", prompt_kind="text"))
    asked = served.asked[-1]
    assert set(asked.body) == {"model", "max_tokens", "temperature", "prompt", "stream", "stream_options"}
    assert asked.headers["authorization"] == "Bearer secret"


def test_chats_send_words() -> None:
    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        opening = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        parts = [event({"choices": [{"delta": {"content": "a"}}]}) for _ in range(asked.body["max_tokens"])]
        writer.write(head() + chunk(event(opening)) + b"".join(map(chunk, parts)) + END)

    with scripted(script) as served:
        chatting = config(served.url, endpoint="/v1/chat/completions", prompt_kind="text", num_template_tokens=3)
        run = run_live(at_once(1), chatting)
    message = served.asked[-1].body["messages"][0]
    assert len(message["content"].split()) == 8 - 3
    assert run.requests.num_output_tokens.tolist() == [4]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"endpoint": "/v2"}, "endpoint '/v2' is not known"),
        ({"endpoint": "/v1/chat/completions"}, "chats take no token ids"),
        ({"num_warmup_requests": -1}, "num_warmup_requests must be at least 0"),
        ({"max_in_flight": 0}, "max_in_flight must be above 0"),
        ({"max_seconds": 0}, "max_seconds must be above 0"),
    ],
)
def test_a_bad_config_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClientConfig("http://localhost:1", **values)


def test_addresses() -> None:
    plain = parse_address("localhost:8000/v1")
    assert (plain.host, plain.port, plain.is_tls, plain.path) == ("localhost", 8000, False, "")
    deep = parse_address("https://example.org/vllm/v1/")
    assert (deep.host, deep.port, deep.is_tls, deep.path) == ("example.org", 443, True, "/vllm")
    assert parse_address("http://[::1]:80").host_header == "[::1]"
    for wrong in ("ftp://x", "http://", "http://x:99999"):
        with pytest.raises(ValueError, match="give it as http"):
            parse_address(wrong)


# -- prompts


@given(st.integers(0, 3), st.data())
def test_prompts_agree_exactly_where_their_streams_do(seed: int, data: st.DataObject) -> None:
    common = data.draw(st.integers(1, 60))
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=2, max_size=5))
    content = tuple(((0, common),) for _ in lengths)
    load = workload(np.zeros(len(lengths)), lengths, [1] * len(lengths), content=content, num_streams=1)
    prompts = Prompts(load, seed=seed, token_ids=(0, 1 << 30))
    rows = [prompts.token_ids(row) for row in data.draw(st.permutations(range(len(lengths))))]
    for one in rows:
        for other in rows:
            if one is not other:
                alike = sum(1 for a, b in zip(one, other, strict=False) if a == b)
                assert one[:alike] == other[:alike]
                assert alike == min(common, len(one), len(other))


def test_an_answer_becomes_part_of_the_next_prompt() -> None:
    prompts = Prompts(conversations(), token_ids=IDS)
    assert prompts.needs_answers
    before = prompts.token_ids(1)
    prompts.answered(0, [5] * 9)
    after = prompts.token_ids(1)
    assert after == before[:53] + [5] * 9 + before[62:]
    assert prompts.token_ids(0) == before[:53]


def test_a_warm_up_shares_nothing_with_the_run() -> None:
    load = at_once(3)
    run, warm_up = (Prompts(load, token_ids=(0, 1 << 30), are_warm_up=warm) for warm in (False, True))
    first_tokens = {prompts.token_ids(row)[0] for prompts in (run, warm_up) for row in range(3)}
    assert len(first_tokens) == 6


# -- bytes


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), st.data())
def test_a_chunked_body_is_put_together_however_it_is_cut(parts: list[bytes], data: st.DataObject) -> None:
    raw = b"HTTP/1.1 100 Continue\r\n\r\n" + head() + b"".join(map(chunk, parts)) + b"0\r\nTrailer: x\r\n\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    parser, got = ResponseParser(), b""
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        assert not parser.is_complete or start == end
        if end > start:
            got += b"".join(parser.feed(raw[start:end]))
    assert got == b"".join(parts)
    assert (parser.status, parser.is_complete, parser.keeps_alive) == (200, True, True)


def test_bodies_end_with_their_length_or_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc") == [b"abc"]
    assert (parser.is_complete, parser.keeps_alive) == (True, False)
    parser.reset()
    assert parser.feed(b"HTTP/1.0 200 OK\r\n\r\nab") == [b"ab"]
    assert not parser.is_complete
    assert parser.end_of_input()
    for wrong in (b"HTTP/1.1 x\r\n\r\n", b"nonsense", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"):
        parser.reset()
        with pytest.raises(BadResponse):
            parser.feed(wrong)
    parser.reset()
    with pytest.raises(BadResponse, match="size of a chunk"):
        parser.feed(head() + b"zz\r\n")


@given(st.data())
def test_tokens_are_counted_however_the_stream_is_cut(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    numbers = np.cumsum(counts).tolist()
    newline = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    raw = b": a comment\n\n" + b"".join(token(number, count) for number, count in zip(numbers, counts, strict=True))
    raw = (raw + event(b"[DONE]")).replace(b"\n", newline)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    answer = Answer()
    for time, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(raw)], strict=True)):
        answer.feed(time, raw[start:end])
    assert answer.why_broken() == ""
    assert answer.chunk_tokens == counts
    assert answer.chunk_ns == sorted(answer.chunk_ns)


# -- the server's metrics


OLD = """vllm:num_requests_running{model_name="m"} 7.0
vllm:num_requests_waiting{model_name="m"} 2.0
vllm:num_requests_swapped{model_name="m"} 1.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:num_preemptions_total{model_name="m"} 3.0
"""
NEW = """vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 4.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:num_preemptions_total{engine="0"} 3.0
vllm:num_preemptions_total{engine="1"} 2.0
"""


def test_old_and_new_names_of_metrics_are_read() -> None:
    series = series_of([Scrape(5, OLD.encode()), Scrape(25, NEW.encode())], start_ns=10)
    assert series is not None
    assert series.time_ns.tolist() == [-5, 15]
    assert series.num_running.tolist() == [7, 7]
    assert series.kv_usage.tolist() == [0.25, 0.75]
    assert series.num_swapped.tolist()[0] == 1
    assert np.isnan(series.num_swapped[1])
    assert series.num_preemptions.tolist() == [0, 2]
    assert counts_between(Scrape(0, OLD.encode()), Scrape(1, NEW.encode())).num_preemptions == 2
    first_v1 = Scrape(0, b"vllm:total_cumulative_preemption_cnt 4.0")
    assert counts_between(first_v1, Scrape(1, b"vllm:total_cumulative_preemption_cnt 9.0")).num_preemptions == 5


def test_counters_of_a_server_that_was_started_anew_are_not_known() -> None:
    assert counts_between(Scrape(0, OLD.encode()), Scrape(1, b"vllm:num_preemptions_total 1.0")).num_preemptions is None


def test_a_range_query_of_prometheus_is_a_series() -> None:
    def series(name: str, values: list[float]) -> dict[str, Any]:
        points = [[1000.0 + 5 * number, str(value)] for number, value in enumerate(values)]
        return {"metric": {"__name__": name, "engine": "0"}, "values": points}

    result = [series("vllm:num_requests_running", [1, 5]), series("vllm:num_preemptions_total", [10, 12])]
    found = prometheus_series(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}))
    assert found is not None
    assert found.time_ns.tolist() == [0, 5_000_000_000]
    assert found.num_running.tolist() == [1, 5]
    assert found.num_preemptions.tolist() == [0, 2]
