"""The page's HTTP interface: the page itself, its files, and answers as they are computed.

It serves one machine: requests under another host name (DNS rebinding) and from other sites' pages are refused, there
are no CORS headers, and the page may load nothing from anywhere else.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from windtunnel.ui.desk import Busy, Desk
from windtunnel.ui.errors import BadQuestion, complaint
from windtunnel.ui.knobs import MAX_REQUESTS, knobs
from windtunnel.ui.question import read_question

MAX_BODY_BYTES = 64 * 1024
MAX_TAB = 64
"""Characters of the name that a page gives itself."""
CONTENT_SECURITY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""plotly.js writes style sheets of its own, hence 'unsafe-inline' for styles alone."""
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LOOPBACK_NAMES = ("localhost",)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class PageSettings:
    """What the page is about, and who may see it."""

    presets: Mapping[str, str]
    """Names of scenarios and their descriptions; the page begins with the first."""
    version: str
    limit_s: float
    """What an answer may take."""
    is_open: bool = False
    """Whether other machines may ask, under any address or one of ``host_names``."""
    host_names: tuple[str, ...] = ()


def create_app(settings: PageSettings, desk: Desk) -> Any:
    """The ASGI application; its lifespan starts and ends the process that computes."""

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        await desk.start()
        yield
        await desk.close()

    app = Starlette(
        routes=[
            Route("/", _page),
            Route("/static/{name}", _static),
            Route("/api/start", _start),
            Route("/api/what-if", _what_if, methods=["POST"]),
            Route("/favicon.ico", _no_icon),
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error},
    )
    app.state.settings = settings
    app.state.desk = desk
    return _Guard(app, settings)


# --- who may ask


class _Guard:
    """Refuses what does not come from a page of this server, and sets the headers of all that it answers."""

    def __init__(self, app: Any, settings: PageSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(Request(scope))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_ENCODED_HEADERS]
            await send(message)

        await (self._app if refusal is None else refusal)(scope, receive, send_with_headers)

    def _refusal(self, request: Any) -> Response | None:
        host = request.headers.get("host", "")
        if not self._is_own(host):
            message = f"this page is not served under the name {host[:80]!r}: open it by the address that was printed"
            return _error(complaint(message, "Host", "forbidden"), 403)
        origin = request.headers.get("origin")
        if origin is not None and _authority(origin) != host:
            return _error(complaint(f"pages of {origin[:80]!r} may not ask here", "Origin", "forbidden"), 403)
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return _error(complaint("pages of other sites may not ask here", "Sec-Fetch-Site", "forbidden"), 403)
        return None

    def _is_own(self, host: str) -> bool:
        name = _host_name(host)
        address = _address(name)
        if address is not None:
            return self._settings.is_open or address.is_loopback
        return name in _LOOPBACK_NAMES or (self._settings.is_open and name in self._settings.host_names)


_ENCODED_HEADERS = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]


def _authority(origin: str) -> str:
    """Host and port of an Origin header; nothing for one that is no URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".").lower()
    except ValueError:
        return ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a name is, which no DNS server can point elsewhere; None for a real name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


# --- the page and its files


async def _page(_: Any) -> Response:
    return Response(_own_file("page.html"), media_type="text/html")


async def _static(request: Any) -> Response:
    name = request.path_params["name"]
    if name not in _FILES:
        raise HTTPException(404, f"there is no file {name[:80]!r}")
    read, kind = _FILES[name]
    return Response(read(), media_type=kind)


async def _no_icon(_: Any) -> Response:
    return Response(status_code=204)


async def _start(request: Any) -> Response:
    """What the page is built from."""
    settings: PageSettings = request.app.state.settings
    return _json(
        {
            "version": settings.version,
            "presets": [{"name": name, "description": text} for name, text in settings.presets.items()],
            "knobs": [knob.for_page() for knob in knobs()],
            "limit_s": settings.limit_s,
            "max_requests": MAX_REQUESTS,
        }
    )


@cache
def _own_file(name: str) -> bytes:
    return (Path(__file__).parent / "static" / name).read_bytes()


@cache
def _report_file(name: str) -> bytes:
    """What this page has in common with all reports: their style, and how figures are drawn."""
    from windtunnel import reports

    return (Path(reports.__path__[0]) / name).read_bytes()


@cache
def _plotly() -> bytes:
    """plotly.js as it comes with the plotly package, read without importing that."""
    found = importlib.util.find_spec("plotly")
    assert found is not None, "plotly is a dependency of windtunnel"
    assert found.origin is not None, "plotly is a package with an __init__.py"
    return (Path(found.origin).parent / "package_data" / "plotly.min.js").read_bytes()


_JAVASCRIPT, _STYLE = "text/javascript", "text/css"
_FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "ui.js": (lambda: _own_file("ui.js"), _JAVASCRIPT),
    "figures.js": (lambda: _own_file("figures.js"), _JAVASCRIPT),
    "ui.css": (lambda: _own_file("ui.css"), _STYLE),
    "page.css": (lambda: _report_file("page.css"), _STYLE),
    "plot.js": (lambda: _report_file("plot.js"), _JAVASCRIPT),
    "plotly.min.js": (_plotly, _JAVASCRIPT),
}


# --- answers


async def _what_if(request: Any) -> Response:
    """The parts of an answer, a JSON object a line, as they are ready; an error is a JSON object of its own."""
    settings: PageSettings = request.app.state.settings
    desk: Desk = request.app.state.desk
    try:
        body = await _body(request)
        question, tab = read_question(body, settings.presets), _tab(body)
    except BadQuestion as error:
        return _error(complaint(str(error), error.place), 422)
    except ClientDisconnect:
        return Response(status_code=499)
    parts = desk.ask(question, tab)
    try:
        first = await anext(parts)
    except Busy as error:
        return _error(complaint(str(error), kind="busy"), 503)
    if first["part"] == "error":
        await parts.aclose()
        return _error(first, 500 if first["kind"] == "internal" else 422)
    if first["part"] == "superseded":
        await parts.aclose()
        return _json(first, 409)
    return StreamingResponse(_lines(first, parts), media_type="application/x-ndjson")


async def _lines(first: dict[str, Any], parts: Any) -> AsyncIterator[bytes]:
    try:
        yield _encoded(first) + b"\n"
        async for part in parts:
            yield _encoded(part) + b"\n"
    finally:
        await parts.aclose()


async def _body(request: Any) -> Any:
    """What was posted.  Raises BadQuestion for what is no JSON, or too long."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/json":
        raise BadQuestion(f"Content-Type = {kind[:60]!r} must be application/json", "Content-Type")
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise BadQuestion(f"the question is longer than {MAX_BODY_BYTES:,} bytes: ask for less", "question")
    try:
        return json.loads(bytes(data), parse_constant=_no_number, object_pairs_hook=_each_key_once)
    except (ValueError, RecursionError) as error:
        raise BadQuestion(f"the question is no valid JSON: {error}", "question") from None


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ: of two values of one key none is the one that was meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"{twice[:60]!r} is given twice: drop one of them")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _tab(body: Mapping[str, Any]) -> str:
    """The name of the page that asks: a new question of it takes the place of its last."""
    tab = body.get("tab", "")
    if not isinstance(tab, str) or len(tab) > MAX_TAB:
        raise BadQuestion(f"tab must be text of at most {MAX_TAB} characters", "tab")
    return tab


async def _http_error(_: Any, error: Any) -> Response:
    return _error(complaint(f"{error.detail}", "path", "http"), error.status_code)


def _error(told: dict[str, Any], status: int) -> Response:
    return _json({"error": told}, status)


def _json(data: Any, status: int = 200) -> Response:
    return Response(_encoded(data), status, media_type="application/json")


def _encoded(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
