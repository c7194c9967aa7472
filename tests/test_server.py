"""The HTTP server: OpenAI's interface, vLLM's metrics, and what happens when things go wrong."""

from __future__ import annotations

import gc
import json
import logging
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from cache_reader import CacheReader, continued
from prometheus_client.parser import text_string_to_metric_families
from serving import Served, limits, serving, wait_until

from windtunnel.executor.engine import Sequence
from windtunnel.executor.model_config import DecoderConfig
from windtunnel.executor.server.cache_info import DEFAULTS, cache_info
from windtunnel.executor.server.engine_loop import Job
from windtunnel.executor.server.memory import free_host_bytes, need
from windtunnel.sim.deployment.metrics_text import read_metrics
from windtunnel.sim.deployment.model import read_model_config
from windtunnel.sim.engine.plan import StepPlan, StepResult
from windtunnel.sim.engine.request import Request

if TYPE_CHECKING or util.find_spec("torch"):
    from tiny_model import tiny_config

SMALL = {"vocab_size": 1000, "eos_token_id": 999}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(config=SMALL) as served:
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON of a stream's events, which must end with [DONE]."""
    with served.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


# -- an openai client


def test_an_openai_client_completes_a_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=7)
    assert len(answer.choices[0].text) == 7, "one letter a token"
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 7, 12)


def test_an_openai_client_streams_a_completion(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="Hello", max_tokens=7)
    stream = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 6 + ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 7


def test_an_openai_client_chats(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=6)
    assert whole.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=6, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content


def test_an_openai_client_lists_the_model_under_all_its_names(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def test_a_made_up_answer_to_a_chat_without_a_limit_ends_by_itself(server: Served) -> None:
    answer = server.post("/v1/chat/completions", {**CHAT, "return_token_ids": True}).json()
    assert answer["usage"]["completion_tokens"] == 256
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert (choice["token_ids"][-1], len(choice["message"]["content"])) == (999, 255), "the end token has no text"
    longer = server.post("/v1/chat/completions", {**CHAT, "max_completion_tokens": 300}).json()
    assert longer["usage"]["completion_tokens"] == 300, "it is no limit for those that bring one"
    endless = server.post("/v1/chat/completions", {**CHAT, "ignore_eos": True}).json()
    assert endless["usage"]["total_tokens"] == 600


@pytest.mark.parametrize(("length", "expected"), [(None, "length"), (3, "stop"), (5000, "length")])
def test_how_long_such_an_answer_is_may_be_set(length: int | None, expected: str) -> None:
    with serving(config=SMALL, default_output_tokens=length) as served:
        answer = served.post("/v1/chat/completions", CHAT).json()
        assert answer["choices"][0]["finish_reason"] == expected
        usage = answer["usage"]
        assert usage["completion_tokens"] == (3 if length == 3 else 600 - usage["prompt_tokens"])


# -- prompts and answers


def test_prompts_come_as_text_token_ids_and_lists_of_both(server: Served) -> None:
    text, ids = "abc", [97, 98, 99]
    answers = [server.complete(prompt, max_tokens=5)["text"] for prompt in (text, ids, [text], [ids])]
    assert answers == [answers[0]] * 4
    several = server.post("/v1/completions", {"prompt": ["abc", "xyz", "abc"], "max_tokens": 5}).json()
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert several["choices"][0]["text"] == several["choices"][2]["text"] == answers[0]
    assert several["usage"]["prompt_tokens"] == 9


def test_streams_of_several_prompts_interleave(server: Served) -> None:
    body = {"prompt": [[1], [2], [3]], "max_tokens": 4}
    whole = server.post("/v1/completions", body).json()
    chunks = events(server, "/v1/completions", body)
    assert {chunk["choices"][0]["index"] for chunk in chunks[:3]} == {0, 1, 2}
    for choice in whole["choices"]:
        parts = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(parts) == choice["text"]


def test_cached_prompt_tokens_are_told(server: Served) -> None:
    prompt = random.Random(5).choices(range(200), k=50)
    usages = [server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2}).json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 48]


def test_usage_may_come_with_every_chunk(server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server, "/v1/completions", {"prompt": "a", "max_tokens": 3, "stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


def test_usage_with_a_chunk_is_that_of_its_own_prompt(server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": [[1] * 5, [2] * 7], "max_tokens": 3, "stream_options": options}
    *chunks, last = events(server, "/v1/completions", body)
    for index, num_prompt_tokens in enumerate((5, 7)):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in usages] == [1, 2, 3]
        assert {usage["prompt_tokens"] for usage in usages} == {num_prompt_tokens}
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (12, 6)


def test_token_ids_are_returned_on_request(server: Served) -> None:
    choice = server.complete("abc", max_tokens=5, return_token_ids=True)
    assert bytes(choice["token_ids"]).decode() == choice["text"]


def test_a_stop_string_ends_the_answer_before_it(server: Served) -> None:
    free = server.complete("stop here", max_tokens=40)["text"]
    stop = free[10:13]
    expected = free[: free.index(stop)]
    for body in ({"stop": stop}, {"stop": ["@@@@", stop]}):
        cut = server.complete("stop here", max_tokens=40, **body)
        assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == (expected, "stop", stop)
    kept = server.complete("stop here", max_tokens=40, stop=stop, include_stop_str_in_output=True)
    assert kept["text"] == expected + stop
    chunks = events(server, "/v1/completions", {"prompt": "stop here", "max_tokens": 40, "stop": stop})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    wait_until(server.is_idle)


def test_a_stop_token_is_no_part_of_the_text(server: Served) -> None:
    free = server.complete("stop here", max_tokens=40)["text"]
    cut = server.complete("stop here", max_tokens=40, stop_token_ids=[ord(free[12])])
    assert cut["text"] == free[: free.index(free[12])]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", ord(free[12]))


def test_a_request_id_may_be_given(server: Served) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert server.post("/v1/completions", {**body, "request_id": "x7"}).json()["id"] == "cmpl-x7"
    named = server.client.post("/v1/completions", json=body, headers={"X-Request-Id": "y8"})
    assert named.json()["id"] == "cmpl-y8"


def test_text_and_tokens_are_translated(server: Served) -> None:
    tokens = server.post("/tokenize", {"prompt": "Grüße"}).json()
    assert tokens["tokens"] == list("Grüße".encode())
    assert tokens["count"] == 7
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "Grüße"}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert bytes(chat["tokens"]).decode() == "user: Hi\nassistant:"


def test_small_things_are_there(server: Served) -> None:
    assert server.client.get("/ping").status_code == 200
    assert server.client.get("/version").json() == {"version": "0.0.test"}


# -- what is refused


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"prompt": "a", "model": "gpt-9"}, 404, "does not exist"),
        ({}, 400, "prompt is empty"),
        ({"prompt": []}, 400, "prompt is empty"),
        ({"prompt": [[]]}, 400, "prompt is empty"),
        ({"prompt": ["a", ""]}, 400, "prompt is empty"),
        ({"prompt": [1000]}, 400, "out of vocabulary"),
        ({"prompt": [-1]}, 400, "greater than or equal to 0"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ({"prompt": "a", "max_tokens": 600}, 400, "context is 600 tokens"),
        ({"prompt": [1] * 600}, 400, "context is 600 tokens"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature must be in"),
        ({"prompt": "a", "temperature": float("nan")}, 400, "temperature must be in"),
        ({"prompt": "a", "top_p": 0}, 400, "top_p must be in"),
        ({"prompt": "a", "min_tokens": 17}, 400, "min_tokens must be in"),
        ({"prompt": "a", "seed": 2**63}, 400, "seed"),
        ({"prompt": "a", "n": 2}, 400, "not supported here: n;"),
        ({"prompt": "a", "logprobs": 1}, 400, "not supported here: logprobs;"),
        ({"prompt": "a", "echo": True}, 400, "not supported here: echo;"),
        ({"prompt": "a", "stop": [""]}, 400, "cannot be empty"),
        ({"prompt": "a", "stream_options": {}}, 400, "stream=true"),
        ({"prompt": "a", "priority": 1}, 400, "--scheduling-policy priority"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    server: Served, body: dict[str, Any], status: int, told: str
) -> None:
    answer = server.client.post(
        "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == status
    error = answer.json()["error"]
    assert told in error["message"]
    assert error["code"] == status
    assert set(error) == {"message", "type", "param", "code"}


def test_an_openai_client_raises_the_right_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError, match="context is 600 tokens"):
        client.completions.create(model="tiny", prompt="a", max_tokens=700)


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [
        (b"{}", "text/plain", 400),
        (b"", "application/json", 400),
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"prompt": "\xff"}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"prompt": [' + b"9" * 5000 + b"]}", "application/json", 400),
        (b" " * (2**26 + 1), "application/json", 413),
    ],
)
def test_bodies_that_are_no_json_objects_are_refused(
    server: Served, content: bytes, content_type: str, status: int
) -> None:
    answer = server.client.post("/v1/completions", content=content, headers={"Content-Type": content_type})
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == status


def test_other_paths_and_methods_are_refused_in_the_same_shape(server: Served) -> None:
    assert server.client.get("/v1/nothing").json()["error"]["code"] == 404
    assert server.client.get("/v1/completions").json()["error"]["code"] == 405


def test_unknown_fields_have_no_effect(server: Served) -> None:
    assert server.complete("abc", max_tokens=5, no_such_field=[1]) == server.complete("abc", max_tokens=5)


def test_sampling_that_nobody_knows_is_fine_for_a_simulation_and_refused_by_a_real_executor() -> None:
    scheduler = limits()
    with serving(scheduler, config=SMALL, executors={"torch": CacheReader(scheduler)}) as served:
        served.complete("a", top_k=5, presence_penalty=0.5)
        assert served.post("/windtunnel/executor", {"kind": "torch"}).status_code == 200
        refused = served.post("/v1/completions", {"prompt": "a", "top_k": 5, "presence_penalty": 0.5})
        assert "presence_penalty, top_k" in refused.json()["error"]["message"]
        served.complete("a", top_k=-1, presence_penalty=0.0)


def test_long_names_of_unknown_fields_are_cut_in_the_log(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    server.complete("abc", max_tokens=1, **{"x" * 100_000: 1}, **{f"y{i}": 1 for i in range(10_000)})
    [text] = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
    assert "'xxx" in text
    assert "'y0'" in text
    assert len(text) < 2000


def mangled(rng: random.Random) -> bytes:
    """A body that is wrong in some way, or perhaps not."""

    def value(depth: int = 0) -> Any:
        kinds: list[Any] = [
            None,
            True,
            -1,
            0,
            10**30,
            1.5,
            float("nan"),
            float("inf"),
            "",
            "a\ud800b",
            "x" * 50,
            [],
            {},
        ]
        if depth < 3:
            kinds += [[value(depth + 1)] * rng.randrange(4), {rng.choice(fields): value(depth + 1)}]
        return rng.choice(kinds)

    fields = [
        *("prompt", "messages", "model", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options"),
        *("temperature", "top_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "priority"),
        *("request_id", "cache_salt", "response_format", "logit_bias", "tools", "chat_template_kwargs", "user", "role"),
    ]
    good: dict[str, Any] = {
        "prompt": "hello",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": rng.randrange(1, 5),
    }
    body = {**good, **{rng.choice(fields): value() for _ in range(rng.randrange(1, 4))}}
    text = json.dumps(body if rng.random() < 0.95 else value()).encode()
    if rng.random() < 0.15:
        cut = rng.randrange(len(text) + 1)
        text = text[:cut] + bytes(rng.randrange(256) for _ in range(rng.randrange(4))) + text[cut + 1 :]
    return text


def test_a_thousand_malformed_bodies_never_make_the_server_fail(server: Served) -> None:
    rng = random.Random(20)
    paths = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/windtunnel/executor"]
    statuses = [
        server.client.post(
            rng.choice(paths), content=mangled(rng), headers={"Content-Type": "application/json"}
        ).status_code
        for _ in range(1000)
    ]
    assert set(statuses) <= {200, 400, 404}
    assert 100 < statuses.count(400) < 950, "some are good, some are bad"
    wait_until(server.is_idle)
    assert server.client.get("/health").status_code == 200
    assert len(server.complete("still here", max_tokens=3)["text"]) == 3


# -- clients that go away


def test_a_stream_that_its_client_leaves_frees_its_blocks() -> None:
    with serving(config=SMALL, step_s=0.002) as served:
        for _ in range(5):
            with served.client.stream(
                "POST", "/v1/completions", json={"prompt": [1] * 90, "max_tokens": 500, "stream": True}
            ) as answer:
                lines = answer.iter_lines()  # kept, because the stream is closed with its iterator
                next(lines)
                assert not served.is_idle()
        wait_until(served.is_idle)
        metrics = served.frontend.loop.metrics
        wait_until(lambda: metrics.request_success.value("abort") == 5)


def test_a_client_that_leaves_before_its_whole_answer_is_there_frees_its_blocks() -> None:
    with serving(config=SMALL, step_s=0.002) as served:
        with pytest.raises(httpx.ReadTimeout):
            served.client.post("/v1/completions", json={"prompt": [1] * 90, "max_tokens": 500}, timeout=0.1)
        wait_until(served.is_idle)
        assert served.frontend.loop.metrics.request_success.value("abort") == 1


def test_clients_that_leave_while_they_wait_are_forgotten() -> None:
    with serving(limits(max_num_seqs=1, max_num_batched_tokens=600), config=SMALL, step_s=0.002) as served:
        with served.client.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 400, "stream": True}):
            with pytest.raises(httpx.ReadTimeout):
                served.client.post("/v1/completions", json={"prompt": "b", "max_tokens": 9}, timeout=0.1)
            wait_until(lambda: served.frontend.loop.num_jobs == 1)
        wait_until(served.is_idle)


# -- limits and failures


def test_a_full_queue_answers_503() -> None:
    with serving(config=SMALL, step_s=0.01, max_num_queued_reqs=3) as served, ThreadPoolExecutor(3) as pool:
        body = {"prompt": "a", "max_tokens": 500}
        waiting = [pool.submit(served.post, "/v1/completions", body) for _ in range(3)]
        wait_until(lambda: served.frontend.loop.num_jobs == 3)
        refused = served.post("/v1/completions", body)
        assert refused.status_code == 503
        assert "max_num_queued_reqs is 3" in refused.json()["error"]["message"]
        options: dict[str, Any] = {"base_url": served.url + "/v1", "api_key": "none", "max_retries": 0}
        with openai.OpenAI(**options) as client, pytest.raises(openai.InternalServerError):
            client.completions.create(model="tiny", prompt="a")
        assert served.frontend.loop.metrics.rejections.value("max_num_queued_reqs") == 2
        served.frontend.loop.clock.set_speed(1000.0)
        assert [answer.result().status_code for answer in waiting] == [200] * 3


def test_prompts_that_exceed_the_token_limit_answer_503() -> None:
    with serving(config=SMALL, step_s=0.5, max_num_queued_tokens=50) as served:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(served.post, "/v1/completions", {"prompt": [1] * 60, "max_tokens": 1})
            wait_until(lambda: served.frontend.loop.num_jobs == 1)
            assert served.post("/v1/completions", {"prompt": [1], "max_tokens": 1}).status_code == 503
            assert first.result().status_code == 200
        assert served.post("/v1/completions", {"prompt": [1], "max_tokens": 1}).status_code == 200


class Faulty:
    """Fails while it is told to."""

    def __init__(self) -> None:
        self.is_broken = True

    def execute(self, plan: StepPlan) -> StepResult:
        if self.is_broken:
            raise RuntimeError("device lost")
        return StepResult(1_000)


def test_prompt_tokens_of_clients_that_leave_are_given_back() -> None:
    """Whether they leave before their first token or after it."""
    with serving(limits(max_num_seqs=1), config=SMALL, step_s=0.005, max_num_queued_tokens=50) as served:
        streamed = {"prompt": [1] * 60, "max_tokens": 500, "stream": True}
        with served.client.stream("POST", "/v1/completions", json=streamed) as answer:
            lines = answer.iter_lines()
            next(lines)
            with pytest.raises(httpx.ReadTimeout):
                served.client.post("/v1/completions", json={"prompt": [2] * 70, "max_tokens": 9}, timeout=0.1)
            wait_until(lambda: served.frontend.loop.num_jobs == 1)
            assert served.frontend.loop._num_prefill_tokens == 0
        wait_until(served.is_idle)
        assert served.frontend.loop._num_prefill_tokens == 0
        assert served.post("/v1/completions", {"prompt": [1] * 60, "max_tokens": 1}).status_code == 200


def test_failures_with_a_success_between_them_do_not_add_up() -> None:
    faulty = Faulty()
    with serving(config=SMALL, executors={"torch": faulty}) as served:  # type: ignore[dict-item]
        served.post("/windtunnel/executor", {"kind": "torch"})
        for _ in range(3):
            faulty.is_broken = True
            statuses = [served.post("/v1/completions", {"prompt": "a"}).status_code for _ in range(2)]
            assert statuses == [500, 500]
            faulty.is_broken = False
            assert served.post("/v1/completions", {"prompt": "a"}).status_code == 200
        metrics = served.frontend.loop.metrics
        assert (metrics.request_success.value("error"), metrics.request_success.value("length")) == (6, 3)


class FailsOnce(CacheReader):
    """Writes its step into the cache and fails."""

    has_failed = False

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if not self.has_failed:
            self.has_failed = True
            for block in self._key_of:
                self._cells.update({block * self.block_size + i: 0 for i in range(self.block_size)})  # garbage
            raise RuntimeError("device lost")
        return result


def test_what_a_failed_step_left_in_the_cache_is_not_read() -> None:
    scheduler = limits()
    with serving(scheduler, config=SMALL, executors={"torch": FailsOnce(scheduler)}) as served:
        served.post("/windtunnel/executor", {"kind": "torch"})
        body = {"prompt": [5] * 21, "max_tokens": 4, "return_token_ids": True, "ignore_eos": True}
        assert served.post("/v1/completions", body).status_code == 500
        answer = served.post("/v1/completions", body).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 20, "the index still knows them"
        assert answer["choices"][0]["token_ids"] == continued([5] * 21, 4)


def test_an_answer_that_cannot_be_put_into_text_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(config=SMALL) as served:
        detokenizer = served.frontend.tokenizer.detokenizer

        class Broken:
            def add(self, token_id: int) -> str:
                raise KeyError(token_id)

        monkeypatch.setattr(
            served.frontend.tokenizer, "detokenizer", lambda prompt, **_: Broken() if prompt == [1] else detokenizer()
        )
        with ThreadPoolExecutor(2) as pool:
            bad, good = pool.map(lambda p: served.post("/v1/completions", {"prompt": p, "max_tokens": 5}), ([1], [2]))
        assert (bad.status_code, good.status_code) == (500, 200)
        assert "could not be put into text" in bad.json()["error"]["message"]
        wait_until(served.is_idle)
        success = served.frontend.loop.metrics.request_success
        assert (success.value("error"), success.value("length"), success.value("abort")) == (1, 1, 0)


def test_a_step_that_fails_answers_500_and_the_server_goes_on() -> None:
    faulty = Faulty()
    with serving(config=SMALL, executors={"torch": faulty}) as served:  # type: ignore[dict-item]
        served.post("/windtunnel/executor", {"kind": "torch"})
        failed = served.post("/v1/completions", {"prompt": "a"})
        assert failed.status_code == 500
        assert "device lost" in failed.json()["error"]["message"]
        streamed = events(served, "/v1/completions", {"prompt": "a"})
        assert "device lost" in streamed[-1]["error"]["message"]
        faulty.is_broken = False
        assert served.client.get("/health").status_code == 200
        assert len(served.complete("a", max_tokens=4)["text"]) == 4
        wait_until(served.is_idle)


def test_an_engine_that_keeps_failing_gives_up_and_says_so() -> None:
    with serving(config=SMALL, executors={"torch": Faulty()}) as served:  # type: ignore[dict-item]
        served.post("/windtunnel/executor", {"kind": "torch"})
        statuses = [served.post("/v1/completions", {"prompt": "a"}).status_code for _ in range(3)]
        assert statuses == [500] * 3
        wait_until(lambda: served.client.get("/health").status_code == 503)
        refused = served.post("/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503
        assert "device lost" in refused.json()["error"]["message"]
        assert served.post("/windtunnel/executor", {"kind": "sim"}).status_code == 503


# -- executors


def test_the_executor_is_swapped_in_the_middle_of_an_answer() -> None:
    scheduler = limits()
    reader = CacheReader(scheduler)
    with serving(scheduler, config=SMALL, step_s=0.002, executors={"torch": reader}) as served:
        there = {"kind": "sim", "available": ["sim", "torch"], "unavailable": {}}
        assert served.client.get("/windtunnel/executor").json() == there
        body = {"prompt": [1, 2, 3], "max_tokens": 500, "ignore_eos": True, "stream": True, "return_token_ids": True}
        token_ids: list[int] = []
        with served.client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                token_ids += json.loads(line[6:])["choices"][0]["token_ids"]
                if len(token_ids) == 5:
                    swapped = served.post("/windtunnel/executor", {"kind": "torch"}).json()
        num_simulated = 500 - reader.num_steps
        assert 5 <= num_simulated < 500
        assert swapped == {"kind": "torch", "num_recomputed_tokens": 3 + num_simulated - 1}
        assert token_ids[num_simulated:] == continued([1, 2, 3, *token_ids[:num_simulated]], 500 - num_simulated)
        assert served.client.get("/windtunnel/executor").json()["kind"] == "torch"
        wait_until(served.is_idle)


def test_an_executor_that_is_not_there_is_refused(server: Served) -> None:
    for kind in ("torch", "warp"):
        refused = server.post("/windtunnel/executor", {"kind": kind})
        if kind == "warp" or refused.status_code != 200:
            assert refused.status_code == 400
            assert f"executor '{kind}' is not available" in refused.json()["error"]["message"]
    assert server.client.get("/windtunnel/executor").json()["kind"] == "sim"


def told(served: Served) -> tuple[list[str], dict[str, str]]:
    """Which executors the server says it can run, and why not the others."""
    answer = served.client.get("/windtunnel/executor").json()
    return answer["available"], answer["unavailable"]


def test_executors_that_cannot_run_are_told_with_the_reason() -> None:
    torch = pytest.importorskip("torch")
    bundled, _ = read_model_config("llama-3.1-8b")
    with serving(config=bundled) as served:
        available, why_not = told(served)
        assert available == ["sim"]
        assert "a bundled config has only what a simulation needs" in why_not["torch"]
    with serving() as served:
        assert told(served)[1]["torch"] == "it needs a model: start the server with --model"
    with serving(limits(max_model_len=512), config=tiny_config(), executor="torch", cost=None) as served:
        available, why_not = told(served)
        assert "nothing says what a step costs" in why_not["sim"]
        if not torch.cuda.is_available():
            assert available == ["torch"]
            assert why_not["triton"] == "torch sees no GPU; --executor torch needs none"
        for kind, reason in why_not.items():
            refused = served.post("/windtunnel/executor", {"kind": kind})
            assert refused.status_code == 400
            assert refused.json()["error"]["message"] == f"executor '{kind}' is not available: {reason}"


def test_an_executor_too_large_for_the_memory_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    free_bytes = 10 * 2**20
    monkeypatch.setattr("windtunnel.executor.server.executors.free_host_bytes", lambda: free_bytes)
    monkeypatch.setattr("windtunnel.executor.cache.PagedKvCache.__init__", lambda *_, **__: pytest.fail("allocated"))
    needed = need(DecoderConfig.from_hf(tiny_config()), 16, 4, 4)
    with serving(limits(num_gpu_blocks=20_000, block_size=16, max_model_len=512), config=tiny_config()) as served:
        assert told(served)[0] == ["sim"]
        refused = served.post("/windtunnel/executor", {"kind": "torch"})
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert f"({needed.total_bytes(20_000)} bytes:" in message
        assert "0.01 GiB are free, of which 90% may be used" in message
        found = re.search(r"--num-gpu-blocks-override (\d+) or less", message)
        assert found is not None
        most = int(found[1])
        assert needed.total_bytes(most) <= 0.9 * free_bytes < needed.total_bytes(most + 1)
        assert len(served.complete("still here", max_tokens=3)["text"]) == 3


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_runs_out_while_an_executor_is_made_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    pytest.importorskip("torch")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("windtunnel.executor.cache.PagedKvCache.__init__", fail)
    with serving(config=tiny_config(), scheduler=limits(max_model_len=512)) as served:
        refused = served.post("/windtunnel/executor", {"kind": "torch"})
        assert refused.status_code == 400
        assert "there is not enough memory" in refused.json()["error"]["message"]
        assert len(served.complete("still here", max_tokens=3)["text"]) == 3


def test_a_large_cache_that_nobody_uses_can_be_swapped_in() -> None:
    """4 GiB of address space, of which next to nothing is ever touched."""
    pytest.importorskip("torch")
    free_bytes = free_host_bytes()
    if free_bytes is not None and free_bytes < 5 * 2**30:
        pytest.skip("needs 5 GiB of free memory")
    large = limits(num_gpu_blocks=500_000, block_size=16, max_model_len=512)
    with serving(large, config=tiny_config(), num_threads=1) as served:
        begin_s = time.monotonic()
        assert served.post("/windtunnel/executor", {"kind": "torch"}).status_code == 200
        assert time.monotonic() - begin_s < 10.0
        assert served.complete("Hello", max_tokens=3, temperature=0)["finish_reason"] is not None


def test_each_prompt_of_a_request_is_sampled_by_a_seed_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torch")
    caplog.set_level(logging.INFO)
    with serving(limits(max_model_len=64), config=tiny_config(eos_token_id=None), num_threads=1) as served:
        assert served.post("/windtunnel/executor", {"kind": "torch"}).status_code == 200
        assert "Steps are run by the torch executor. Weights: random, seed 0" in caplog.messages

        def answers(**fields: Any) -> list[Any]:
            body = {"prompt": [[5, 6], [5, 6]], "max_tokens": 12, "return_token_ids": True, **fields}
            return [choice["token_ids"] for choice in served.post("/v1/completions", body).json()["choices"]]

        own, same = answers(), answers(seed=3)
        assert own[0] != own[1]
        assert same[0] == same[1]


def test_a_real_model_answers_as_it_does_alone() -> None:
    """Continuous batching over a tiny pool with preemption gives what one-by-one generation gives."""
    pytest.importorskip("torch")
    config = tiny_config(eos_token_id=None)
    prompts = [[3 + i] * (5 + 7 * i) for i in range(6)]
    body: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
    real: dict[str, Any] = {"config": config, "executor": "torch", "num_threads": 1}
    with serving(limits(max_model_len=64), **real) as served:
        alone = [served.complete(prompt, **body)["token_ids"] for prompt in prompts]
    tight = limits(max_model_len=64, num_gpu_blocks=22, max_num_batched_tokens=20, max_num_seqs=6)
    with serving(tight, **real) as served:
        together = served.post("/v1/completions", {"prompt": prompts, **body}).json()["choices"]
        assert [choice["token_ids"] for choice in together] == alone
        assert served.frontend.loop.metrics.preemptions.value() > 0
        wait_until(served.is_idle)


# -- the server's end


def test_what_is_open_after_the_grace_is_ended_in_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving(config=SMALL, step_s=0.05, grace_s=0.3) as served, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "a", "max_tokens": 500}
        whole = pool.submit(served.post, "/v1/completions", body)
        streamed = pool.submit(events, served, "/v1/completions", body)
        wait_until(lambda: served.frontend.loop.metrics.generation_tokens.value() > 4)
        served.server.should_exit = True
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["message"] == "the server is shutting down: the answer ends here"
        *chunks, last = streamed.result()
        assert last["error"]["code"] == 503
        assert all(chunk["choices"][0]["text"] for chunk in chunks)
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_cut_off_without_a_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("windtunnel.executor.server.run._LAST_WORDS_S", 0.5)
    many = {"prompt": [[1]] * 60, "max_tokens": 500, "return_token_ids": True}
    body = json.dumps({**many, "stream": stream, "stop": ["\0" * 9]}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with serving(config=SMALL, step_s=0.0001, grace_s=0.1) as served, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(served.url.rsplit(":", 1)[1])))
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: served.frontend.loop.metrics.request_success.value("length") == 60)
        served.server.should_exit = True
        wait_until(lambda: not served.server.started or not served.server.server_state.tasks)
    assert not [record for record in caplog.records if record.exc_info]


def test_routes_that_are_not_there_name_those_that_are(server: Served) -> None:
    missing = server.client.get("/v1/chat")
    assert missing.status_code == 404
    assert "there is no /v1/chat here; there are /v1/completions, " in missing.json()["error"]["message"]
    wrong = server.client.get("/v1/completions")
    assert wrong.status_code == 405
    assert wrong.json()["error"]["message"] == "/v1/completions does not take GET, only POST"
    assert wrong.headers["allow"] == "POST"


# -- pace


def test_simulated_steps_take_their_time_and_paces_do_not_drift() -> None:
    with serving(config=SMALL, step_s=0.01, speed=5.0) as served:
        begin_s = time.monotonic()
        served.complete("a", max_tokens=100)
        wall_s = time.monotonic() - begin_s
        told = served.frontend.loop.metrics
        assert wall_s >= 100 * 0.01 / 5.0
        assert told.itl._sum == pytest.approx(99 * 0.01), "engine time, to the nanosecond"


# -- metrics

VLLM_METRICS = {
    **dict.fromkeys(
        (
            *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"),
            *("engine_sleep_state", "cache_config_info"),
        ),
        "gauge",
    ),
    **dict.fromkeys(
        (
            *("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries"),
            *("external_prefix_cache_hits", "mm_cache_queries", "mm_cache_hits", "num_preemptions", "prompt_tokens"),
            *("prompt_tokens_by_source", "prompt_tokens_cached", "prompt_tokens_cached_by_source"),
            *("generation_tokens", "request_success", "admission_rejections"),
        ),
        "counter",
    ),
    **dict.fromkeys(
        (
            *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
            *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
            *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
            *("request_generation_tokens", "iteration_tokens_total", "request_max_num_generation_tokens"),
            *("request_params_n", "request_params_max_tokens", "request_num_preemptions"),
            "request_prefill_kv_computed_tokens",
        ),
        "histogram",
    ),
}
"""Names and types of vLLM 0.32 (``vllm/v1/metrics/loggers.py``), but for LoRA, connectors, FLOPs and speculation."""


def test_metrics_have_vllms_names_types_and_labels(server: Served) -> None:
    server.complete("metrics", max_tokens=3)
    text = server.client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    ours = {name.removeprefix("vllm:"): f.type for name, f in families.items() if name.startswith("vllm:")}
    assert {name: kind for name, kind in ours.items() if not name.endswith("_created")} == VLLM_METRICS
    for name, family in families.items():
        if name.startswith("vllm:") and not name.startswith(("vllm:cache_config_info", "vllm:admission_rejections")):
            assert {(s.labels["model_name"], s.labels["engine"]) for s in family.samples} == {("tiny", "0")}
    reasons = {s.labels["finished_reason"] for s in families["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error", "repetition"}
    bounds = [s.labels["le"] for s in families["vllm:request_prompt_tokens"].samples if s.name.endswith("_bucket")]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "500.0", "+Inf"]
    assert "http_requests" in families


def test_the_settings_of_the_cache_are_told_as_vllm_tells_them() -> None:
    given = {"num_gpu_blocks_override": 400, "gpu_memory_utilization": 0.9, "user_specified_block_size": True}
    with serving(config={**SMALL, "sliding_window": 4096}, cache=given, kv_cache_dtype="fp8") as served:
        families = text_string_to_metric_families(served.client.get("/metrics").text)
        [sample] = next(family.samples for family in families if family.name == "vllm:cache_config_info")
    assert sample.value == 1
    assert set(sample.labels) == {*DEFAULTS, "engine"}
    changed = {name: text for name, text in sample.labels.items() if name != "engine" and text != str(DEFAULTS[name])}
    assert changed == {
        "block_size": "4",
        "cache_dtype": "fp8",
        "effective_attention_block_size": "4",
        "gpu_memory_utilization": "0.9",
        "kv_cache_max_concurrency": str(400 / 150),
        "kv_cache_size_tokens": "1600",
        "num_gpu_blocks": "400",
        "num_gpu_blocks_override": "400",
        "sliding_window": "4096",
        "user_specified_block_size": "True",
    }
    with pytest.raises(ValueError, match="CacheConfig has no swap_space"):
        cache_info({"swap_space": 4})


def test_metrics_count_what_happened() -> None:
    with serving(config=SMALL, step_s=0.01, speed=100.0) as served:
        served.post("/v1/completions", {"prompt": [[1] * 21, [1] * 21], "max_tokens": 5})
        served.complete([1] * 21, max_tokens=1)
        facts = read_metrics(served.client.get("/metrics").text, name="metrics")
        assert (facts.num_gpu_blocks, facts.block_size) == (400, 4)
        assert (facts.prompt_tokens, facts.generation_tokens) == (63, 11)
        assert (facts.prefix_cache_queries_tokens, facts.prefix_cache_hits_tokens) == (63, 40)
        assert (facts.num_requests_running, facts.num_requests_waiting, facts.kv_cache_usage) == (0, 0, 0.0)
        metrics = served.frontend.loop.metrics
        assert metrics.request_success.value("length") == 3
        assert metrics.itl._counts == [8, *[0] * 19], "all gaps are one step of 10 ms"
        assert metrics.ttft._sum >= 0.03


def test_a_stop_string_that_ends_with_the_last_token_counts_as_stop() -> None:
    with serving(config=SMALL) as served:
        free = served.complete("stop here", max_tokens=20)["text"]
        answer = served.post("/v1/completions", {"prompt": "stop here", "max_tokens": 20, "stop": free[17:]}).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 20
        success = served.frontend.loop.metrics.request_success
        assert (success.value("length"), success.value("stop"), success.value("abort")) == (1, 1, 0)


def test_after_a_stop_string_the_engine_drops_the_rest() -> None:
    """Which would take 10 s."""
    with serving(config=SMALL, step_s=0.02) as served:
        stop = served.complete("stop here", max_tokens=12)["text"][5:8]
        assert served.complete("stop here", max_tokens=500, stop=stop)["finish_reason"] == "stop"
        wait_until(served.is_idle, seconds=3.0)


def test_metrics_count_what_is_answered_however_far_the_engine_has_gone() -> None:
    """At this speed it computes many tokens between a stop string and its abort."""
    with serving(config=SMALL, step_s=1e-3, speed=1e5) as served:
        prompts = [[i, i + 1] for i in range(40)]
        answers = [
            served.post("/v1/completions", {"prompt": prompts, "max_tokens": 300, "stop": stop}).json()
            for stop in (["a"], ["qu", "x"], ["zz"])
        ]
        wait_until(served.is_idle)
        metrics = served.frontend.loop.metrics
        num_tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
        reasons = [choice["finish_reason"] for answer in answers for choice in answer["choices"]]
        assert reasons.count("stop") > 20
        assert metrics.generation_tokens.value() == metrics.request_generation_tokens._sum == num_tokens
        for reason in ("stop", "length", "abort"):
            assert metrics.request_success.value(reason) == reasons.count(reason)
        assert metrics.iteration_tokens._sum == num_tokens + 2 * len(reasons)
        assert sum(metrics.itl._counts) == num_tokens - len(reasons)


def test_the_time_per_output_token_leaves_the_first_token_out() -> None:
    with serving(config=SMALL, step_s=0.01, speed=50.0) as served:
        served.complete("a", max_tokens=5)
        served.complete("b", max_tokens=1)
        metrics = served.frontend.loop.metrics
        assert metrics.tpot._sum == pytest.approx(0.01)
        assert sum(metrics.tpot._counts) == 2


def test_the_prefix_cache_is_asked_once_for_each_request_however_often_it_is_resumed() -> None:
    tight = limits(num_gpu_blocks=22, max_model_len=64, max_num_seqs=6)
    with serving(tight, config=SMALL) as served:
        prompts = [[3 + i] * (5 + 7 * i) for i in range(6)]
        usage = served.post("/v1/completions", {"prompt": prompts, "max_tokens": 12}).json()["usage"]
        metrics = served.frontend.loop.metrics
        assert metrics.preemptions.value() > 0
        assert metrics.prefix_queries.value() == usage["prompt_tokens"]
        assert metrics.prefix_hits.value() == metrics.prompt_tokens_cached_by_source.value("device") == 0


def test_methods_that_clients_make_up_share_one_label(server: Served) -> None:
    for method in ("BREW", "WHEN", "PROPFIND", "PUT"):
        server.client.request(method, "/v1/completions")
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    [requests] = [family for family in families if family.name == "http_requests"]
    methods = {sample.labels["method"] for sample in requests.samples}
    assert {"other", "PUT"} <= methods <= {"other", "PUT", "GET", "POST"}


# -- the long run


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind() -> None:
    """Counts of live objects; ``benchmarks/serve.py`` measures bytes."""
    with serving(limits(max_num_seqs=128, max_num_batched_tokens=512), config=SMALL, speed=1e6) as served:
        loop, counts = served.frontend.loop, []
        rng = random.Random(1)
        for _ in range(4):
            for _ in range(25):
                prompts = [[rng.randrange(900) for _ in range(8)] for _ in range(100)]
                answer = served.post("/v1/completions", {"prompt": prompts, "max_tokens": 2})
                assert len(answer.json()["choices"]) == 100
            wait_until(served.is_idle)
            gc.collect()
            kept = (Request, Sequence, Job)
            counts.append(sum(type(thing) in kept for thing in gc.get_objects()))
            assert loop.engine.scheduler.pool.num_keys <= 399
        assert loop.metrics.request_success.value("length") == 10_000
        assert max(counts) <= 3 * 100, "a job, a request and a sequence for each prompt of the last body, at most"


def test_many_threads_get_their_own_answers(server: Served) -> None:
    expected = {i: server.complete([i, i + 1], max_tokens=20)["text"] for i in range(8)}
    failures: list[Any] = []

    def ask(i: int) -> None:
        with httpx.Client(base_url=server.url, timeout=30.0) as client:
            for _ in range(10):
                body = {"prompt": [i, i + 1], "max_tokens": 20}
                text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
                if text != expected[i]:
                    failures.append((i, text))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(set(expected.values())) == 8
