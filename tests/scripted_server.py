"""A tiny HTTP server whose answers a test writes itself: slow, broken or wrong ones."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """One request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def row(self) -> int:
        """Of the workload; -1 for a warm-up."""
        last = self.headers.get("x-request-id", "").rpartition("-")
        return int(last[2]) if "warm" not in last[0] and last[2] else -1


Script = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Scripted:
    """The running server and all that it was asked."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop | None = None

    @property
    def rows(self) -> list[int]:
        """Of the workload, in the order in which they came."""
        return [asked.row for asked in self.asked if asked.method == "POST" and asked.row >= 0]


def head(status: int = 200, **headers: str) -> bytes:
    given = {"content_type": "text/event-stream", "transfer_encoding": "chunked", **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in given.items() if value)
    return f"HTTP/1.1 {status} Whatever\r\n{lines}\r\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def token(number: int, count: int = 1) -> bytes:
    """An event with ``count`` tokens, the last of them the ``number``-th."""
    usage = {"prompt_tokens": 7, "completion_tokens": number}
    return event({"choices": [{"index": 0, "text": "a" * count}], "usage": usage})


END = chunk(event(b"[DONE]")) + b"0\r\n\r\n"


async def answer_well(asked: Asked, writer: asyncio.StreamWriter, pause_s: float = 0.0) -> None:
    """All tokens that were asked for, one a chunk."""
    writer.write(head())
    for number in range(1, asked.body["max_tokens"] + 1):
        if pause_s:
            await asyncio.sleep(pause_s)
        writer.write(chunk(token(number)))
        await writer.drain()
    writer.write(END)


@contextmanager
def scripted(script: Script) -> Iterator[Scripted]:
    """A server that names its model and otherwise does what the script says."""
    served, started, stop = Scripted(), threading.Event(), asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError), closing(writer):
            while not writer.is_closing():
                asked = await _read(reader)
                served.asked.append(asked)
                if asked.path == "/v1/models":
                    body = json.dumps({"data": [{"id": "scripted", "max_model_len": 512}]}).encode()
                    writer.write(head(transfer_encoding="", content_length=str(len(body))) + body)
                elif asked.method == "GET":
                    writer.write(head(404, transfer_encoding="", content_length="0"))
                elif asked.row < 0:
                    await answer_well(asked, writer)
                else:
                    await script(asked, writer)
                await writer.drain()

    async def serve() -> None:
        served.loop = asyncio.get_running_loop()
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await stop.wait()
        server.close()
        talks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)
        await asyncio.sleep(0.01)  # their connections close

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(10)
    try:
        yield served
    finally:
        assert served.loop is not None
        served.loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()


async def _read(reader: asyncio.StreamReader) -> Asked:
    raw = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = raw.strip().split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", 0))
    body = json.loads(await reader.readexactly(length)) if length else {}
    method, path, _ = first.split()
    return Asked(method, path, headers, body)
