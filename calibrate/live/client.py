"""A load client: runs a workload against a live server that speaks OpenAI's interface, and notes every token.

Each request goes out when the workload says so, whatever became of the others: a slow server does not slow the
sending down (no coordinated omission), unless the workload limits its requests in flight.  Errors, time-outs and
broken answers are results, too.  The rules are those of the simulated client (``sim.client``).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from windtunnel.calibrate.live.answers import Answer, ErrorBody, error_text
from windtunnel.calibrate.live.http import Connection, HttpClient, now_ns, parse_address
from windtunnel.calibrate.live.metrics import Scrape, counts_between, read_server, scrape, series_of
from windtunnel.calibrate.live.observed import (
    UNKNOWN,
    Ending,
    ObservedRequests,
    ObservedRun,
    SendReport,
    ServerCounts,
    ServerFacts,
    observed_requests,
)
from windtunnel.calibrate.live.prompts import DEFAULT_TOKEN_IDS, Prompts
from windtunnel.sim.records import IntArray
from windtunnel.sim.workload import Workload, workload

NS_PER_S = 1_000_000_000
_LEAD_NS = 1_500_000
"""A sleep may end a millisecond late; the rest up to the due time is spent looking at the clock between events."""
_HEAD_START_NS = 20_000_000
"""So that all that runs beside the requests has begun when the first of them is due."""
_LAG_TICK_S = 0.01
_REFILL_S = 0.25
_SPARE_WINDOW_NS = 20_000_000
_MOST_SPARES = 256
_MOST_BODY_BYTES = 1 << 28
"""Requests beyond these are made when they are due."""
_OTHER_FILES = 64
"""Files and connections that the process has open besides those of requests."""

LATE_NOTE = "The client sent late:"
"""How the note of ``late_note`` begins."""

PromptKind = Literal["token_ids", "text"]
Endpoint = Literal["/v1/completions", "/v1/chat/completions"]


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How to reach a server and how to ask it."""

    url: str
    """``http://HOST:PORT``."""
    model: str | None = None
    """None: the first that the server names."""
    endpoint: Endpoint = "/v1/completions"
    prompt_kind: PromptKind = "token_ids"
    """Token ids give exact lengths; text of so many words for servers that take none, its length then checked."""
    token_ids: tuple[int, int] = DEFAULT_TOKEN_IDS
    """Prompts are drawn from these ids (from, to exclusive)."""
    seed: int = 0
    cache_salt: str | None = None
    """Requests share cached prefixes only with others of the same salt: a new one keeps what an earlier run left in
    the server's prefix cache out of this one.  Needs vLLM 0.8.5."""
    vllm_extensions: bool = True
    """Ask for exact lengths with ``ignore_eos`` and ``min_tokens``; servers that refuse unknown fields need False."""
    num_template_tokens: int = 0
    """Tokens that the chat template adds to a prompt."""
    headers: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = None
    num_warmup_requests: int = 2
    """Sent one after the other before the run, in the workload's median lengths; not measured."""
    max_seconds: float | None = None
    """The run is cut off after that long, and its warm-up before it; None waits for the last answer."""
    max_in_flight: int = 4096
    """A request that is due while so many are in flight is not sent and counts as failed."""
    connect_timeout_s: float = 10.0
    scrape_interval_s: float = 1.0
    """Between looks at ``/metrics``; 0 for none."""
    late_limit_s: float = 0.005
    """A 99th percentile of late sending above this is warned of."""

    def __post_init__(self) -> None:
        if self.endpoint not in ("/v1/completions", "/v1/chat/completions"):
            raise ValueError(f"endpoint {self.endpoint!r} is not known: give /v1/completions or /v1/chat/completions")
        if self.endpoint == "/v1/chat/completions" and self.prompt_kind == "token_ids":
            raise ValueError("chats take no token ids: set prompt_kind='text', or use /v1/completions")
        for name in ("num_warmup_requests", "num_template_tokens", "scrape_interval_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("max_in_flight", "connect_timeout_s", "late_limit_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise ValueError(f"max_seconds must be above 0 or None, got {self.max_seconds}")

    @property
    def look_timeout_s(self) -> float:
        """How long an answer about the server itself, such as its metrics, is waited for."""
        return self.connect_timeout_s if self.max_seconds is None else min(self.connect_timeout_s, self.max_seconds)


class Progress(NamedTuple):
    """How far a run is."""

    elapsed_s: float
    num_requests: int
    num_sent: int
    num_in_flight: int
    num_finished: int
    num_failed: int
    num_tokens: int


OnProgress = Callable[[Progress], None]


class ServerUnreachable(ValueError):
    """A server that does not even say which model it serves."""


def run_live(load: Workload, config: ClientConfig, *, on_progress: OnProgress | None = None) -> ObservedRun:
    """Run a workload against a server.  Ctrl-C ends the run early and keeps what was seen.

    A request asks for exactly ``num_output_tokens`` tokens.  Raises ValueError for an address that is none,
    ServerUnreachable if no model is given and the server does not name one; after that nothing that the server does
    is an error of the run.
    """
    return asyncio.run(drive(load, config, on_progress=on_progress))


async def drive(load: Workload, config: ClientConfig, *, on_progress: OnProgress | None = None) -> ObservedRun:
    """``run_live`` inside a running event loop; cancelling it ends the run early and keeps what was seen."""
    headers = {"User-Agent": "windtunnel", "Accept": "*/*", **config.headers}
    if config.api_key is not None:
        headers["Authorization"] = f"Bearer {config.api_key}"
    http = HttpClient(parse_address(config.url), headers, config.connect_timeout_s)
    try:
        introduction = await read_server(http, config.model, timeout_s=config.look_timeout_s)
        model = config.model or introduction.facts.model
        if model is None:
            why = "; ".join(introduction.notes) or "its list is empty"
            raise ServerUnreachable(
                f"{config.url} does not say which model it serves ({why}): "
                "check that the server runs, or name the model"
            )
        run = _Run(load, config, http, model)
        return await run.go(introduction.facts, introduction.notes, on_progress)
    finally:
        http.close()


class _Row:
    """One request of the run, told of its answer by its connection."""

    __slots__ = (
        "answer",
        "body",
        "connection",
        "due_ns",
        "end_ns",
        "ending",
        "error",
        "is_done",
        "ready_ns",
        "refusal",
        "row",
        "run",
        "send_ns",
        "status",
        "timer",
    )

    def __init__(self, run: _Run, row: int) -> None:
        self.run = run
        self.row = row
        self.body: bytes | None = None
        self.due_ns = self.ready_ns = self.send_ns = self.end_ns = self.status = UNKNOWN
        self.answer = Answer()
        self.refusal = ErrorBody()
        self.ending = Ending.UNSENT
        self.error = ""
        self.is_done = False
        self.connection: Connection | None = None
        self.timer: asyncio.TimerHandle | None = None

    def on_head(self, at_ns: int, status: int) -> None:
        del at_ns
        self.status = status

    def on_body(self, at_ns: int, data: bytes) -> None:
        if self.status == 200:
            self.answer.feed(at_ns, data)
        else:
            self.refusal.feed(data)

    def on_end(self, at_ns: int) -> None:
        if self.status != 200:
            self.close(at_ns, Ending.REFUSED, f"status {self.status}: {self.refusal}")
        elif reason := self.answer.why_broken():
            self.close(at_ns, Ending.BROKEN, reason)
        else:
            self.close(at_ns, Ending.FINISHED, "")

    def on_failure(self, at_ns: int, reason: str) -> None:
        self.close(at_ns, Ending.BROKEN, reason)

    def give_up(self) -> None:
        """The client's patience is over."""
        self.stop(Ending.TIMED_OUT, "no complete answer in time")

    def stop(self, ending: Ending, reason: str) -> None:
        """Drop the request, if it is not over; the server sees its connection close."""
        if self.is_done:
            return
        if self.connection is not None:
            self.connection.abort()
        self.close(now_ns(), ending, reason)

    def close(self, at_ns: int, ending: Ending, error: str) -> None:
        """The request is over."""
        if self.is_done:
            return
        self.is_done = True
        self.end_ns, self.ending, self.error = at_ns, ending, error
        self.connection = self.body = None
        if self.timer is not None:
            self.timer.cancel()
        self.run.answered(self)


class _Run:
    """The state of one run."""

    def __init__(self, load: Workload, config: ClientConfig, http: HttpClient, model: str) -> None:
        self.load = load
        self.config = config
        self.http = http
        self.model = model
        self.prompts = Prompts(load, seed=config.seed, token_ids=config.token_ids)
        self.rows = [_Row(self, row) for row in range(len(load))]
        self.start_ns = 0
        self._limit = load.max_concurrency
        self._most_in_flight = min(config.max_in_flight, max((max_open_files() or 1 << 30) - _OTHER_FILES, 1))
        self._held: deque[_Row] = deque()
        self._followers: dict[int, list[int]] = {}
        for row in (load.previous >= 0).nonzero()[0].tolist():
            self._followers.setdefault(int(load.previous[row]), []).append(row)
        self._in_flight: dict[int, _Row] = {}
        self._num_done = 0
        self._num_sent = 0
        self._num_finished = 0
        self._is_refilling = False
        self._crash: BaseException | None = None
        self._all_done = asyncio.Event()
        self._is_over = False
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._scrapes: list[Scrape] = []
        self._lag_ns = 0
        self._spares = 0
        self.notes: list[str] = []

    # The course of a run.

    async def go(self, facts: ServerFacts, notes: tuple[str, ...], on_progress: OnProgress | None) -> ObservedRun:
        """Warm up, run, and put together what was seen."""
        self.notes.extend(notes)
        self._make_bodies()
        was_interrupted = False
        side = [] if on_progress is None else [asyncio.create_task(self._keep_telling(on_progress))]
        before: Scrape | None = None
        try:
            await self._warm_up()
            before = await self._look()
            await self._open_connections()
            with _little_garbage_collection():
                self.start_ns = now_ns() + _HEAD_START_NS
                side += self._side_tasks()
                await self._send_all()
        except asyncio.CancelledError:
            was_interrupted = True
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            self.notes.append("The run was interrupted; what was in flight is cut off.")
        self._cut_off()
        for task in (*side, *self._tasks):
            task.cancel()
        await asyncio.gather(*side, *self._tasks, return_exceptions=True)
        after = await self._look_after()
        if on_progress is not None:
            on_progress(self._progress())
        return self._observed(facts, before, after, was_interrupted)

    async def _send_all(self) -> None:
        """Send until all is answered or the time is over."""
        if not self.rows:
            return
        limit_s = self.config.max_seconds
        sending = asyncio.create_task(self._send_on_time())
        try:
            async with asyncio.timeout(limit_s):
                await sending
                await self._all_done.wait()
            if self._crash is not None:
                raise self._crash
        except TimeoutError:
            self.notes.append(f"The run was cut off after {limit_s:g} s (max_seconds).")
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send_on_time(self) -> None:
        first = self.load.previous < 0
        for row, due_ns in zip(first.nonzero()[0].tolist(), self.load.arrival_ns[first].tolist(), strict=True):
            await self._due_at(self.rows[row], self.start_ns + due_ns)

    async def _due_at(self, row: _Row, due_ns: int) -> None:
        """Wait until the request is due, then send or hold it."""
        delay_ns = due_ns - now_ns()
        if delay_ns > _LEAD_NS:
            await asyncio.sleep((delay_ns - _LEAD_NS) / NS_PER_S)
        if row.body is None and not self._is_full():
            row.body = self._body(row.row)
        while now_ns() < due_ns:
            await asyncio.sleep(0)
        self._due(row, due_ns)

    def _is_full(self) -> bool:
        """Whether the workload's limit on requests in flight is reached."""
        return self._limit is not None and len(self._in_flight) >= self._limit

    def _due(self, row: _Row, due_ns: int) -> None:
        row.due_ns = due_ns
        if self._is_full():
            self._held.append(row)
        elif len(self._in_flight) >= self._most_in_flight:
            row.close(now_ns(), Ending.UNSENT, self._too_many())
        else:
            row.ready_ns = due_ns
            self._send(row)

    def _too_many(self) -> str:
        most = self._most_in_flight
        why = "max_in_flight" if most == self.config.max_in_flight else "the limit on open files: raise it (ulimit -n)"
        return f"not sent: {most:,} requests were in flight, which is {why}"

    def _send(self, row: _Row) -> None:
        row.ending = Ending.CUT_OFF
        self._in_flight[row.row] = row
        self._num_sent += 1
        body = row.body if row.body is not None else self._body(row.row)
        row.send_ns = now_ns()
        row.connection = self.http.send_if_connected(body, row)
        if row.connection is None:
            self._spawn(self._connect_and_send(row, body))
        elif not self._is_refilling:
            self._spawn(self._refill())
        if self.load.request_timeout_ns is not None:
            loop = asyncio.get_running_loop()
            row.timer = loop.call_later(self.load.request_timeout_ns / NS_PER_S, row.give_up)

    async def _connect_and_send(self, row: _Row, request: bytes) -> None:
        try:
            connection = await self.http.connect_and_send(request, row)
        except OSError as error:
            row.close(now_ns(), Ending.UNREACHABLE, _why(error))
            return
        if row.is_done:
            connection.abort()
        else:
            row.connection = connection

    def answered(self, row: _Row) -> None:
        """A request is over, whatever its end: the next turn and the next in the queue may come."""
        self._in_flight.pop(row.row, None)
        self._num_done += 1
        self._num_finished += row.ending is Ending.FINISHED
        if self._num_done == len(self.rows):
            self._all_done.set()
        if self._is_over:
            return
        if row.answer.token_ids and row.ending is Ending.FINISHED:
            self.prompts.answered(row.row, row.answer.token_ids)
        for follower in self._followers.get(row.row, ()):
            due_ns = row.end_ns + int(self.load.think_ns[follower])
            self._spawn(self._due_at(self.rows[follower], due_ns))
        while self._held and not self._is_full():
            held = self._held.popleft()
            held.ready_ns = row.end_ns
            self._send(held)

    def _cut_off(self) -> None:
        self._is_over = True
        for row in list(self._in_flight.values()):
            row.stop(Ending.CUT_OFF, "the run ended before the answer")
        for row in self.rows:
            if not row.is_done:
                row.close(now_ns(), Ending.UNSENT, "the run ended before it was sent")

    # Requests.

    def _make_bodies(self) -> None:
        """As many requests as may be made ahead, so that sending is one write."""
        num_bytes = 0
        for row in self.rows:
            if num_bytes > _MOST_BODY_BYTES:
                return
            if not self.prompts.waits_for_answers(row.row):
                row.body = self._body(row.row)
                num_bytes += len(row.body)

    def _body(self, row: int) -> bytes:
        text = "" if self.config.prompt_kind == "token_ids" else self._text(row)
        prompt: Any = text or self.prompts.token_ids(row)
        priority = int(self.load.priority[row])
        return self._request(prompt, int(self.load.num_output_tokens[row]), f"windtunnel-{row}", priority)

    def _text(self, row: int) -> str:
        return self.prompts.text(row, self.config.num_template_tokens)

    def _request(self, prompt: Any, num_output_tokens: int, request_id: str, priority: int = 0) -> bytes:
        config = self.config
        fields: dict[str, Any] = {"model": self.model, "max_tokens": num_output_tokens, "temperature": 0.0}
        if config.endpoint == "/v1/completions":
            fields["prompt"] = prompt
        else:
            fields["messages"] = [{"role": "user", "content": prompt}]
        options: dict[str, Any] = {"include_usage": True}
        if config.vllm_extensions:
            fields |= {"ignore_eos": True, "min_tokens": num_output_tokens}
            options["continuous_usage_stats"] = True
            if self.prompts.needs_answers and config.prompt_kind == "token_ids":
                fields["return_token_ids"] = True
            if config.cache_salt is not None:
                fields["cache_salt"] = config.cache_salt
            if priority:
                fields["priority"] = priority
        fields |= {"stream": True, "stream_options": options}
        body = json.dumps(fields, separators=(",", ":")).encode()
        return self.http.request_bytes("POST", config.endpoint, body, {"X-Request-Id": request_id})

    # Before, beside and after.

    async def _warm_up(self) -> None:
        """A few requests whose prompts are in no way those of the run."""
        config, load = self.config, self.load
        if not config.num_warmup_requests or not len(load):
            return
        lengths = [int(np.median(column)) for column in (load.num_prompt_tokens, load.num_output_tokens)]
        times = np.zeros(config.num_warmup_requests, np.int64)
        made = workload(times, np.full(len(times), lengths[0]), np.full(len(times), lengths[1]))
        prompts = Prompts(made, seed=config.seed, token_ids=config.token_ids, are_warm_up=True)
        failures = []
        for number in range(len(times)):
            text = config.prompt_kind == "text"
            prompt = prompts.text(number, config.num_template_tokens) if text else prompts.token_ids(number)
            try:
                request = self._request(prompt, lengths[1], f"windtunnel-warm-up-{number}")
                status, body, _ = await self.http.answer_to(request, timeout_s=config.max_seconds)
            except OSError as error:
                failures.append(_why(error))
                break
            if reason := _why_bad(status, body):
                failures.append(reason)
        if failures:
            self.notes.append(f"{len(failures)} of {len(times)} warm-up requests failed: {failures[0]}")

    async def _open_connections(self) -> None:
        """As many spare connections as requests may be due at once."""
        due = self.load.arrival_ns[self.load.previous < 0]
        if not len(due):
            return
        crowd = int((np.searchsorted(due, due + _SPARE_WINDOW_NS) - np.arange(len(due))).max())
        most = min(_MOST_SPARES, len(self.rows), self._limit or _MOST_SPARES)
        self._spares = min(crowd + 4, most)
        with suppress(OSError):  # the requests will meet it again, and say so
            await self.http.open_spares(self._spares)

    async def _refill(self) -> None:
        """Have connections ready for the next requests; those that were idle for long are replaced."""
        self._is_refilling = True
        try:
            with suppress(OSError):
                await self.http.open_spares(min(self._spares, len(self.rows) - self._num_sent))
        finally:
            self._is_refilling = False

    async def _keep_connected(self) -> None:
        while True:
            await asyncio.sleep(_REFILL_S)
            if not self._is_refilling:
                await self._refill()

    def _side_tasks(self) -> list[asyncio.Task[None]]:
        works = [self._watch_lag(), self._keep_connected()]
        if self.config.scrape_interval_s:
            works.append(self._keep_looking())
        return [asyncio.create_task(work) for work in works]

    async def _watch_lag(self) -> None:
        while True:
            expected_ns = now_ns() + round(_LAG_TICK_S * NS_PER_S)
            await asyncio.sleep(_LAG_TICK_S)
            self._lag_ns = max(self._lag_ns, now_ns() - expected_ns)

    async def _keep_looking(self) -> None:
        interval_ns = round(self.config.scrape_interval_s * NS_PER_S)
        next_ns = self.start_ns
        while True:
            with suppress(OSError):
                self._scrapes.append(await scrape(self.http, timeout_s=self.config.look_timeout_s))
            next_ns = max(next_ns + interval_ns, now_ns())
            await asyncio.sleep((next_ns - now_ns()) / NS_PER_S)

    async def _keep_telling(self, on_progress: OnProgress) -> None:
        while True:
            on_progress(self._progress())
            await asyncio.sleep(0.5)

    async def _look(self) -> Scrape | None:
        if not self.config.scrape_interval_s:
            return None
        try:
            return await scrape(self.http, timeout_s=self.config.look_timeout_s)
        except OSError as error:
            self.notes.append(f"No metrics of the server: {error}")
            return None

    async def _look_after(self) -> Scrape | None:
        """The counters are up to date a moment after the last answer."""
        if not self._num_sent or not self.config.scrape_interval_s:
            return None
        await asyncio.sleep(0.1)
        return await self._look()

    def _progress(self) -> Progress:
        return Progress(
            elapsed_s=(now_ns() - self.start_ns) / NS_PER_S if self.start_ns else 0.0,
            num_requests=len(self.rows),
            num_sent=self._num_sent,
            num_in_flight=len(self._in_flight),
            num_finished=self._num_finished,
            num_failed=self._num_done - self._num_finished,
            num_tokens=sum(row.answer.num_tokens for row in self.rows),
        )

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self._crash = task.exception()
            self._all_done.set()

    # What was seen.

    def _observed(
        self, facts: ServerFacts, before: Scrape | None, after: Scrape | None, was_interrupted: bool
    ) -> ObservedRun:
        requests = self._requests()
        report = self._send_report(requests)
        self._note_lengths(requests)
        series, counts = None, ServerCounts()
        try:
            looks = [*((before,) if before else ()), *self._scrapes, *((after,) if after else ())]
            series, counts = series_of(looks, self.start_ns), counts_between(before, after)
        except ValueError as error:
            self.notes.append(f"The server's metrics cannot be read: {error}")
        return ObservedRun(
            source="windtunnel live",
            name=self.config.url,
            requests=requests,
            max_concurrency=self._limit,
            series=series,
            counts=counts,
            server=facts,
            send_report=report,
            was_interrupted=was_interrupted,
            notes=tuple(self.notes),
        )

    def _requests(self) -> ObservedRequests:
        rows, load, start = self.rows, self.load, self.start_ns
        sent = np.array([row.send_ns for row in rows], np.int64)
        was_sent = sent >= 0

        def since_start(values: list[int]) -> IntArray:
            column = np.array(values, np.int64)
            return np.where(column >= 0, column - start, UNKNOWN)

        due = since_start([row.due_ns for row in rows])
        planned = (load.previous < 0) & (due < 0)
        answers = [row.answer for row in rows]
        chunks = [np.array(row.answer.chunk_ns, np.int64) - row.send_ns for row in rows]
        last = [int(times[-1]) if len(times) else UNKNOWN for times in chunks]
        return observed_requests(
            len(rows),
            due_ns=np.where(planned, load.arrival_ns, due),
            send_ns=since_start([row.send_ns for row in rows]),
            ready_ns=since_start([row.ready_ns for row in rows]),
            ttft_ns=[int(times[0]) if len(times) else UNKNOWN for times in chunks],
            e2el_ns=np.where([row.ending is Ending.FINISHED for row in rows], last, UNKNOWN),
            end_ns=np.where(was_sent, np.array([row.end_ns for row in rows], np.int64) - sent, UNKNOWN),
            num_prompt_tokens_asked=load.num_prompt_tokens,
            num_output_tokens_asked=load.num_output_tokens,
            num_prompt_tokens=[answer.prompt_tokens for answer in answers],
            num_output_tokens=[max(answer.num_tokens, answer.usage_tokens) for answer in answers],
            num_cached_tokens=[answer.cached_tokens for answer in answers],
            previous=load.previous,
            ending=[int(row.ending) for row in rows],
            http_status=[row.status for row in rows],
            errors=tuple(row.error for row in rows),
            labels=load.labels,
            chunks=chunks,
            chunk_tokens=[_tokens_of(answer) for answer in answers],
        )

    def _send_report(self, requests: ObservedRequests) -> SendReport | None:
        sent = (requests.send_ns >= 0) & (requests.ready_ns >= 0)
        if not sent.any():
            return None
        late_s = (requests.send_ns - requests.ready_ns)[sent] / NS_PER_S
        report = SendReport(
            late_p50_s=float(np.percentile(late_s, 50)),
            late_p99_s=float(np.percentile(late_s, 99)),
            late_max_s=float(late_s.max()),
            loop_lag_max_s=self._lag_ns / NS_PER_S,
            num_connections=self.http.num_connections,
        )
        if report.late_p99_s > self.config.late_limit_s:
            self.notes.append(late_note(report))
        return report

    def _note_lengths(self, requests: ObservedRequests) -> None:
        """Say where the server counted other lengths than were asked for."""
        done = requests.is_finished
        for what, asked, got in (
            ("prompt", requests.num_prompt_tokens_asked, requests.num_prompt_tokens),
            ("output", requests.num_output_tokens_asked, requests.num_output_tokens),
        ):
            known = done & (got >= 0)
            wrong = known & (asked != got)
            if wrong.any():
                row = int(wrong.argmax())
                self.notes.append(
                    f"{int(wrong.sum()):,} of {int(known.sum()):,} requests have other {what} lengths than asked for, "
                    f"the first asked for {int(asked[row]):,} and got {int(got[row]):,} tokens"
                )
        if any("vocabulary" in error for error in requests.errors):
            low, high = self.config.token_ids
            self.notes.append(f"The model does not have all token ids from {low:,} to {high - 1:,}: lower token_ids.")
        blind = [row.row for row in self.rows if row.ending is Ending.FINISHED and not row.answer.token_ids]
        if self.prompts.needs_answers and blind:
            self.notes.append(
                "The server did not return token ids, so that later turns hold made-up answers in place of its own: "
                "it finds fewer prefixes in its cache than in a real conversation."
            )


def _tokens_of(answer: Answer) -> IntArray:
    """Tokens in each chunk; not known if they were only guessed to be one each and the server counted others."""
    tokens = np.array(answer.chunk_tokens, np.int64)
    if answer.usage_tokens not in (UNKNOWN, answer.num_tokens):
        tokens[:] = UNKNOWN
    return tokens


@contextmanager
def _little_garbage_collection() -> Iterator[None]:
    """Looking through all that was made before the run would hold up every stream for tens of milliseconds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _why_bad(status: int, body: bytes) -> str:
    """What is wrong with a whole answer; empty if nothing is."""
    if status != 200:
        return f"status {status}: {error_text(body)}"
    answer = Answer()
    answer.feed(now_ns(), body)
    return answer.why_broken()


def _why(error: OSError) -> str:
    """The operating system's word for it, if it has one."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)


def max_open_files() -> int | None:
    """How many files, connections among them, this process may have open; None where that is not limited or known."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def late_note(report: SendReport) -> str:
    """What to make of a client that did not keep its times."""
    return (
        f"{LATE_NOTE} 99 % within {report.late_p99_s * 1e3:.1f} ms, at most {report.late_max_s * 1e3:.1f} ms. Its "
        "machine is too busy for this load; latencies and arrivals are not to be trusted below that. Run it on "
        "another machine, or with less beside it."
    )


def new_cache_salt() -> str:
    """A salt that no earlier run had."""
    return "windtunnel-" + os.urandom(8).hex()
