"""The HTTP interface: OpenAI's routes, vLLM's, and our own that swap the executor and look ahead."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from uuid import uuid4

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from windtunnel.executor.server.fork import ForkRequest
from windtunnel.executor.server.frontend import Frontend
from windtunnel.executor.server.generation import Generation, Piece
from windtunnel.executor.server.metrics import HttpMetrics, exposition
from windtunnel.executor.server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    SwapRequest,
    TokenizeRequest,
    internal,
    parse,
    to_json,
)

MAX_BODY_BYTES = 64 * 2**20
_UNMEASURED = ("/metrics", "/health", "/ping", "/version")
"""Handlers that vLLM keeps out of its HTTP metrics."""
_CLIENT_GONE = 499
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH")
"""Those of HTTP; whatever else clients make up is counted as one, so that there is no end to labels."""

Body = TypeVar("Body", bound=BaseModel)
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]

log = logging.getLogger("windtunnel.server")
router = APIRouter()


def create_app(frontend: Frontend, version: str) -> Any:
    """The ASGI application; its lifespan starts and stops the engine."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        frontend.loop.start()
        yield
        frontend.forks.close()
        await frontend.loop.stop()

    app = FastAPI(title="windtunnel", version=version, lifespan=lifespan)
    app.state.frontend = frontend
    app.state.version = version
    app.state.http_metrics = HttpMetrics()
    app.include_router(router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _bug)
    app.add_middleware(_Measured, metrics=app.state.http_metrics)
    return app


# -- generation


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """OpenAI's completions."""
    body, frontend = await _read(request, CompletionRequest), _frontend(request)
    generation = await frontend.complete(body)
    name = _answer_id("cmpl", body, request)
    return await _answer(request, body, generation, _CompletionWriter(name, frontend.model_name, body, generation))


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions."""
    body, frontend = await _read(request, ChatRequest), _frontend(request)
    generation = await frontend.chat(body)
    name = _answer_id("chatcmpl", body, request)
    return await _answer(request, body, generation, _ChatWriter(name, frontend.model_name, body, generation))


class _Writer:
    """Turns news into JSON; the two APIs differ in the choices."""

    kind = whole_kind = ""

    def __init__(self, name: str, model: str, request: SamplingFields, generation: Generation) -> None:
        self._head = {"id": name, "object": self.kind, "created": int(time.time()), "model": model}
        self._request = request
        self.generation = generation
        options = request.stream_options
        self._adds_usage = bool(options and options.include_usage)
        self._always_tells_usage = self._adds_usage and bool(options and options.continuous_usage_stats)

    def choices(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices of the chunks that a piece of news becomes."""
        raise NotImplementedError

    def whole_choice(self, piece: Piece) -> dict[str, Any]:
        """The choice of an answer that was put together."""
        raise NotImplementedError

    def whole(self, pieces: list[list[Piece]]) -> bytes:
        """The answer in one."""
        choices = [self.whole_choice(_joined(parts)) for parts in pieces]
        return to_json({**self._head, "object": self.whole_kind, "choices": choices, "usage": self._usage()})

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; a failure becomes an event, too."""
        try:
            async for piece in self.generation:
                for choice in self.choices(piece):
                    chunk: dict[str, Any] = {**self._head, "choices": [choice]}
                    if self._always_tells_usage:
                        chunk["usage"] = self._usage_of(piece)
                    yield _event(chunk)
            if self._adds_usage:
                yield _event({**self._head, "choices": [], "usage": self._usage()})
        except ApiError as error:
            yield _event(error.body())
        yield b"data: [DONE]\n\n"

    def _usage(self) -> dict[str, Any]:
        generation = self.generation
        return _usage(generation.num_prompt_tokens, generation.num_tokens, generation.num_cached_tokens)

    def _usage_of(self, piece: Piece) -> dict[str, Any]:
        """That of the piece's own answer, up to the piece."""
        prompt = self.generation.answers[piece.choice].prompt_token_ids
        return _usage(len(prompt), piece.num_tokens, piece.num_cached_tokens)

    def _ids(self, piece: Piece) -> dict[str, Any]:
        if not self._request.return_token_ids:
            return {}
        return {"token_ids": list(piece.token_ids)}


class _CompletionWriter(_Writer):
    kind = whole_kind = "text_completion"

    def choices(self, piece: Piece) -> list[dict[str, Any]]:
        return [self.whole_choice(piece)]

    def whole_choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **self._ids(piece),
        }


class _ChatWriter(_Writer):
    kind, whole_kind = "chat.completion.chunk", "chat.completion"
    _has_begun = False

    def choices(self, piece: Piece) -> list[dict[str, Any]]:
        choice = {
            "index": piece.choice,
            "delta": {"content": piece.text},
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            **self._ids(piece),
        }
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if self._has_begun:
            return [choice]
        self._has_begun = True
        role = {"index": piece.choice, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return [{**role, "finish_reason": None}, choice]

    def whole_choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice,
            "message": {"role": "assistant", "content": piece.text},
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **self._ids(piece),
        }


async def _answer(request: Request, body: SamplingFields, generation: Generation, writer: _Writer) -> Response:
    if body.stream:
        return _EventStream(writer)
    try:
        pieces = await _unless_gone(request.receive, _collect(generation))
    finally:
        generation.close()
    return Response(status_code=_CLIENT_GONE) if pieces is None else _json(writer.whole(pieces))


async def _collect(generation: Generation) -> list[list[Piece]]:
    pieces: list[list[Piece]] = [[] for _ in generation.answers]
    async for piece in generation:
        pieces[piece.choice].append(piece)
    return pieces


def _joined(pieces: list[Piece]) -> Piece:
    token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
    return pieces[-1]._replace(text="".join(piece.text for piece in pieces), token_ids=token_ids)


class _EventStream(Response):  # type: ignore[misc]
    """Server-sent events until they end or the client goes away, which drops what is not answered."""

    def __init__(self, writer: _Writer) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]  # nobody knows it yet
        self._writer = writer

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Send, and watch the client meanwhile."""
        del scope
        try:
            await _unless_gone(receive, self._send_all(send))
        except OSError:
            pass  # the client went away while something was being sent
        finally:
            self._writer.generation.close()

    async def _send_all(self, send: Send) -> bool:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._writer.events():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return True


async def _unless_gone(receive: Receive, work: Any) -> Any:
    """What the work comes to, or None if the client goes away before."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- the rest of the interface


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The served model under each of its names."""
    frontend = _frontend(request)
    cards = [
        {
            "id": name,
            "object": "model",
            "created": frontend.created_s,
            "owned_by": "windtunnel",
            "root": frontend.model_root,
            "parent": None,
            "max_model_len": frontend.max_model_len,
        }
        for name in frontend.model_names
    ]
    return _json(to_json({"object": "list", "data": cards}))


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine lives, 503 afterwards."""
    return Response(status_code=200 if _frontend(request).loop.failure is None else 503)


router.add_api_route("/ping", health, methods=["GET", "POST"])


@router.get("/version")
async def version(request: Request) -> Response:
    """Ours."""
    return _json(to_json({"version": request.app.state.version}))


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """vLLM's metrics, in Prometheus' text format."""
    frontend = _frontend(request)
    text, content_type = exposition(frontend.loop.metrics, request.app.state.http_metrics, *frontend.more_metrics)
    return Response(text, media_type=content_type)


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of a chat."""
    body, frontend = await _read(request, TokenizeRequest), _frontend(request)
    token_ids = await frontend.tokenize(body)
    answer = {"count": len(token_ids), "max_model_len": frontend.max_model_len, "tokens": token_ids}
    return _json(to_json({**answer, "token_strs": None}))


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    body, frontend = await _read(request, DetokenizeRequest), _frontend(request)
    frontend.check_model(body.model)
    frontend.check_token_ids(body.tokens)
    return _json(to_json({"prompt": frontend.tokenizer.decode(body.tokens)}))


@router.get("/windtunnel/executor")
async def executor(request: Request) -> Response:
    """Which executor runs the steps, which others can, and why the rest cannot."""
    frontend = _frontend(request)
    available = await asyncio.to_thread(frontend.executors.kinds)
    unavailable = await asyncio.to_thread(frontend.executors.unavailable)
    return _json(to_json({"kind": frontend.kind, "available": available, "unavailable": unavailable}))


@router.post("/windtunnel/executor")
async def swap_executor(request: Request) -> Response:
    """Let another executor run the steps from the next one on."""
    body, frontend = await _read(request, SwapRequest), _frontend(request)
    num_tokens = await frontend.swap(body.kind)
    return _json(to_json({"kind": frontend.kind, "num_recomputed_tokens": num_tokens}))


@router.get("/windtunnel/snapshot")
async def snapshot(request: Request) -> Response:
    """The engine's queues, progress and blocks between two steps."""
    taken = await _frontend(request).forks.snapshot()
    return _json(await asyncio.to_thread(to_json, taken))


@router.post("/windtunnel/fork")
async def fork(request: Request) -> Response:
    """What the next seconds will bring, as things are or with other limits."""
    body, frontend = await _read(request, ForkRequest), _frontend(request)
    return _json(to_json(await frontend.forks.fork(body)))


@router.get("/windtunnel/window")
async def window(request: Request) -> Response:
    """What happened between two times of the engine's clock, to be held against a fork."""
    begin_s, end_s = (_seconds(request, name) for name in ("begin_s", "end_s"))
    return _json(to_json(await _frontend(request).forks.window(begin_s, end_s)))


# -- plumbing


def _seconds(request: Request, name: str) -> float:
    text = request.query_params.get(name)
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ApiError(f"{name} must be given as a number of seconds, got {(text or 'nothing')[:80]!r}", param=name)
    return value


def _frontend(request: Request) -> Frontend:
    frontend: Frontend = request.app.state.frontend
    return frontend


async def _read(request: Request, kind: type[Body]) -> Body:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise ApiError(f"the body is larger than {MAX_BODY_BYTES} bytes", 413, "Request Entity Too Large")
    return parse(kind, request.headers.get("content-type", ""), bytes(data))


def _answer_id(prefix: str, body: SamplingFields, request: Request) -> str:
    return f"{prefix}-{body.request_id or request.headers.get('x-request-id') or uuid4().hex}"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def _usage(num_prompt_tokens: int, num_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "completion_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status_code=status, media_type="application/json")


async def _api_error(_: Request, error: ApiError) -> Response:
    return _json(to_json(error.body()), error.status)


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {request.url.path[:200]} here; there are {', '.join(_routes())}"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}, only {', '.join(_methods_of(request.url.path))}"
    answer = await _api_error(request, ApiError(message, error.status_code, str(error.detail)))
    answer.headers.update(error.headers or {})
    return answer


def _routes() -> list[str]:
    return list(dict.fromkeys(route.path for route in router.routes))


def _methods_of(path: str) -> list[str]:
    return sorted({method for route in router.routes if route.path == path for method in route.methods})


async def _client_gone(_: Request, error: ClientDisconnect) -> Response:
    del error
    return Response(status_code=_CLIENT_GONE)


async def _bug(_: Request, error: Exception) -> Response:
    return await _api_error(_, internal(f"{type(error).__name__}: {error}"))


class _Measured:
    """Counts requests, their durations and their sizes."""

    def __init__(self, app: Any, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Pass everything through and look at it."""
        if scope["type"] != "http" or scope["path"] in _UNMEASURED:
            await self._app(scope, receive, send)
            return
        begin_s, status, num_bytes = time.perf_counter(), 500, 0

        async def counting_send(message: dict[str, Any]) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        except asyncio.CancelledError:  # at the server's end, when a client does not even read the last words
            log.info("an answer was cut off")
        finally:
            handler = getattr(scope.get("route"), "path", "none")
            length = dict(scope["headers"]).get(b"content-length", b"0")
            request_bytes = int(length) if length.isdigit() else 0
            duration_s = time.perf_counter() - begin_s
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.take(handler, method, status, duration_s, request_bytes, num_bytes)
