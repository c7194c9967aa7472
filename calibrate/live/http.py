"""HTTP/1.1 for a load client: every byte gets the time at which it was read, and is looked at afterwards.

General HTTP libraries stamp a token after they have parsed it, in their caller; with hundreds of streams that get a
token in the same step, the last one is then seen milliseconds late.  Here all sockets that are ready are read and
stamped first, and parsed in a second pass.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

now_ns = time.perf_counter_ns
"""The client's clock: monotonic, and on Linux the same for all processes of a machine."""

MAX_HEAD_BYTES = 1 << 16
_PARSE_NS = 300_000
"""Longest that parsing holds up requests that are due."""
FRESH_IDLE_NS = 30_000_000_000
USED_IDLE_NS = 2_000_000_000
"""A connection that was idle for longer is not used again: uvicorn, and so vLLM, closes one after 5 s, and a request
sent at that moment would be lost."""


class BadResponse(Exception):
    """What came is not HTTP/1.1."""


class Taker(Protocol):
    """Who asked: told of an answer as it comes, each time with the clock at which the bytes were read."""

    def on_head(self, at_ns: int, status: int) -> None:
        """The status line and all headers are there."""

    def on_body(self, at_ns: int, data: bytes) -> None:
        """A part of the body."""

    def on_end(self, at_ns: int) -> None:
        """The answer is complete."""

    def on_failure(self, at_ns: int, reason: str) -> None:
        """The answer will never be complete."""


class ResponseParser:
    """One HTTP/1.1 response after the other, from bytes cut anywhere."""

    __slots__ = ("_buffer", "_left", "_state", "has_begun", "is_complete", "keeps_alive", "status")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Expect the next response."""
        self._buffer = b""
        self._state = "head"
        self._left = 0
        self.status = 0
        self.keeps_alive = True
        self.has_begun = False
        self.is_complete = False

    def feed(self, data: bytes) -> list[bytes]:
        """The parts of the body in ``data``; ``status`` is set once the head is there, ``is_complete`` at the end.

        Raises BadResponse if it is not a response of HTTP/1.
        """
        self.has_begun = True
        self._buffer += data
        parts: list[bytes] = []
        while not self.is_complete and self._advance(parts):
            pass
        return parts

    def end_of_input(self) -> bool:
        """The server closed the connection; returns whether that ends the response well."""
        if self._state == "until close":
            self.is_complete = True
        return self.is_complete

    def _advance(self, parts: list[bytes]) -> bool:
        """Take one piece out of the buffer; False if more bytes are needed."""
        match self._state:
            case "head":
                return self._take_head()
            case "size":
                return self._take_chunk_size()
            case "chunk":
                return self._take_chunk(parts)
            case "trailer":
                return self._take_trailer()
            case "length":
                return self._take_length(parts)
        if self._buffer:
            parts.append(self._buffer)
            self._buffer = b""
        return False

    def _take_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES or not b"HTTP/1.".startswith(self._buffer[:7]):
                raise BadResponse(f"not an answer of HTTP/1.1: {self._buffer[:60]!r}")
            return False
        lines = self._buffer[:end].split(b"\r\n")
        words = lines[0].split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise BadResponse(f"not an answer of HTTP/1.1: {lines[0][:60]!r}")
        self._buffer = self._buffer[end + 4 :]
        status = int(words[1])
        if 100 <= status < 200:
            return True
        headers = _headers(lines[1:])
        self.status = status
        connection = headers.get(b"connection", b"").lower()
        self.keeps_alive = b"close" not in connection if words[0] != b"HTTP/1.0" else b"keep-alive" in connection
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            self._state = "size"
        elif b"content-length" in headers or status in (204, 304):
            length = headers.get(b"content-length", b"0")
            if not length.isdigit():
                raise BadResponse(f"content-length is {length[:40]!r}, not a number of bytes")
            self._left = int(length)
            self._state = "length"
        else:
            self._state = "until close"
            self.keeps_alive = False
        return True

    def _take_chunk_size(self) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > 1024:
                raise BadResponse(f"no size of a chunk: {self._buffer[:40]!r}")
            return False
        size = self._buffer[:end].partition(b";")[0].strip()
        try:
            self._left = int(size, 16)
        except ValueError:
            raise BadResponse(f"{size[:40]!r} is not the size of a chunk") from None
        self._buffer = self._buffer[end + 2 :]
        self._state = "chunk" if self._left else "trailer"
        return True

    def _take_chunk(self, parts: list[bytes]) -> bool:
        if len(self._buffer) < self._left + 2:
            return False
        parts.append(self._buffer[: self._left])
        self._buffer = self._buffer[self._left + 2 :]
        self._state = "size"
        return True

    def _take_trailer(self) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        self.is_complete = end == 0
        self._buffer = self._buffer[end + 2 :]
        return True

    def _take_length(self, parts: list[bytes]) -> bool:
        taken = self._buffer[: self._left]
        if taken:
            parts.append(taken)
            self._buffer = self._buffer[len(taken) :]
            self._left -= len(taken)
        self.is_complete = self._left == 0
        return False


def _headers(lines: list[bytes]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    return headers


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is."""

    host: str
    port: int
    is_tls: bool
    path: str
    """Before ``/v1/…``; empty for most servers."""

    @property
    def host_header(self) -> str:
        """As the Host header wants it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


def parse_address(url: str) -> Address:
    """The address of a server; a trailing ``/v1`` is dropped.  Raises ValueError for anything but http and https."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ValueError(f"{url!r} is not the address of a server: give it as http://HOST:PORT")
    is_tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.hostname, port or (443 if is_tls else 80), is_tls, path)


@dataclass(slots=True)
class HttpClient:
    """Connections to one server, kept for the next request; requests are sent in one piece."""

    address: Address
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with every request."""
    connect_timeout_s: float = 10.0
    num_connections: int = 0
    """Opened so far."""
    _idle: deque[Connection] = field(default_factory=deque)
    _inbox: deque[tuple[Connection, int, bytes | None]] = field(default_factory=deque)
    _open: dict[Connection, None] = field(default_factory=dict)
    _tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        if self.address.is_tls:
            self._tls = ssl.create_default_context()

    def request_bytes(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> bytes:
        """A whole request, ready to be sent.  Raises ValueError for a header that holds a line break."""
        given = {"Host": self.address.host_header, **self.headers, **(headers or {})}
        if body:
            given |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, value in given.items():
            if "\r" in name + value or "\n" in name + value:
                raise ValueError(f"header {name!r} holds a line break: leave it out")
        head = f"{method} {self.address.path}{path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in given.items())
        return head.encode("latin-1", "replace") + b"\r\n" + body

    def send_if_connected(self, request: bytes, taker: Taker) -> Connection | None:
        """Send at once on a connection that is open; None if there is none: then ``connect_and_send``."""
        connection = self._take_idle()
        if connection is not None:
            connection.send(request, taker)
        return connection

    async def connect_and_send(self, request: bytes, taker: Taker) -> Connection:
        """Open a connection and send.  Raises OSError if that fails or takes too long."""
        connection = await self._connect()
        connection.send(request, taker)
        return connection

    async def open_spares(self, wanted: int) -> None:
        """Have that many connections open ahead of their use.  Raises OSError if one cannot be opened."""
        self._drop_stale()
        missing = wanted - len(self._idle)
        if missing > 0:
            for connection in await asyncio.gather(*(self._connect() for _ in range(missing))):
                self._keep(connection, FRESH_IDLE_NS)

    async def get(self, path: str, *, timeout_s: float = 10.0) -> tuple[int, bytes, int]:
        """``answer_to`` a GET."""
        try:
            return await self.answer_to(self.request_bytes("GET", path), timeout_s=timeout_s)
        except OSError as error:
            raise OSError(f"GET {path}: {error}") from None

    async def answer_to(self, request: bytes, *, timeout_s: float | None) -> tuple[int, bytes, int]:
        """(status, body, clock at the head of the answer).  Raises OSError if there is no complete answer in time."""
        taker = _Whole()
        connection = self.send_if_connected(request, taker) or await self.connect_and_send(request, taker)
        try:
            async with asyncio.timeout(timeout_s):
                await taker.done.wait()
        except TimeoutError:
            raise OSError(f"no answer within {timeout_s:g} s") from None
        finally:
            if not taker.done.is_set():
                connection.abort()
        if taker.failure:
            raise OSError(taker.failure)
        return taker.status, b"".join(taker.parts), taker.head_ns

    def close(self) -> None:
        """Drop all connections; answers under way fail."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        at = self.address
        server_name = at.host if at.is_tls else None
        opening = loop.create_connection(
            lambda: Connection(self, loop), at.host, at.port, ssl=self._tls, server_hostname=server_name
        )
        try:
            _, connection = await asyncio.wait_for(opening, self.connect_timeout_s)
        except TimeoutError:
            raise OSError(f"no connection to {at.host}:{at.port} within {self.connect_timeout_s:g} s") from None
        self.num_connections += 1
        return connection

    def _take_idle(self) -> Connection | None:
        now = now_ns()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now < connection.idle_until_ns:
                return connection
            connection.abort()
        return None

    def _drop_stale(self) -> None:
        now = now_ns()
        for connection in [held for held in self._idle if not held.is_open or now >= held.idle_until_ns]:
            self._idle.remove(connection)
            connection.abort()

    def _keep(self, connection: Connection, idle_ns: int) -> None:
        connection.idle_until_ns = now_ns() + idle_ns
        self._idle.append(connection)

    def _read(self, loop: asyncio.AbstractEventLoop, connection: Connection, data: bytes | None) -> None:
        """Note what came and when; it is parsed after all sockets that are ready have been read."""
        if not self._inbox:
            loop.call_soon(self._parse, loop)
        self._inbox.append((connection, now_ns(), data))

    def _parse(self, loop: asyncio.AbstractEventLoop) -> None:
        """Parse what was read; what takes longer than a moment goes on after whatever else is due."""
        until_ns = now_ns() + _PARSE_NS
        try:
            while self._inbox and now_ns() < until_ns:
                connection, at_ns, data = self._inbox.popleft()
                connection.parse(at_ns, data)
        finally:
            if self._inbox:
                loop.call_soon(self._parse, loop)


class Connection(asyncio.Protocol):
    """A connection, with at most one request under way."""

    def __init__(self, client: HttpClient, loop: asyncio.AbstractEventLoop) -> None:
        self.idle_until_ns = 0
        self.is_open = True
        self._client = client
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = ResponseParser()
        self._taker: Taker | None = None
        self._reason = "the server closed the connection"
        self._has_told_status = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's: it is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._client._open[self] = None

    def data_received(self, data: bytes) -> None:
        """asyncio's: bytes were read."""
        self._client._read(self._loop, self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's: it is closed."""
        self.is_open = False
        self._client._open.pop(self, None)
        if exc is not None:
            self._reason = f"the connection broke: {str(exc) or type(exc).__name__}"
        self._client._read(self._loop, self, None)

    def send(self, request: bytes, taker: Taker) -> None:
        """Write a whole request; its answer goes to ``taker``."""
        assert self._transport is not None
        self._parser.reset()
        self._has_told_status = False
        self._taker = taker
        self._transport.write(request)

    def abort(self) -> None:
        """Drop the connection and tell nobody."""
        self._taker = None
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def parse(self, at_ns: int, data: bytes | None) -> None:
        """Hand on what came at that time; None is the end of the connection."""
        taker = self._taker
        if taker is None:
            return
        if data is None:
            self._taker = None
            if self._parser.end_of_input():
                taker.on_end(at_ns)
            else:
                taker.on_failure(at_ns, self._reason)
            return
        try:
            parts = self._parser.feed(data)
        except BadResponse as error:
            self.abort()
            taker.on_failure(at_ns, str(error))
            return
        if self._parser.status and not self._has_told_status:
            self._has_told_status = True
            taker.on_head(at_ns, self._parser.status)
        for part in parts:
            taker.on_body(at_ns, part)
        if self._parser.is_complete and self._taker is taker:
            self._taker = None
            if self._parser.keeps_alive and self.is_open:
                self._client._keep(self, USED_IDLE_NS)
            else:
                self.abort()
            taker.on_end(at_ns)


class _Whole:
    """Collects an answer."""

    def __init__(self) -> None:
        self.status = 0
        self.head_ns = 0
        self.parts: list[bytes] = []
        self.failure = ""
        self.done = asyncio.Event()

    def on_head(self, at_ns: int, status: int) -> None:
        self.status, self.head_ns = status, at_ns

    def on_body(self, at_ns: int, data: bytes) -> None:
        del at_ns
        self.parts.append(data)

    def on_end(self, at_ns: int) -> None:
        del at_ns
        self.done.set()

    def on_failure(self, at_ns: int, reason: str) -> None:
        del at_ns
        self.failure = reason
        self.done.set()
