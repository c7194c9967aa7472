"""Runs the page's server until it is told to stop."""

from __future__ import annotations

import ipaddress
import signal
import socket
from contextlib import suppress
from typing import Any

from windtunnel.ui.app import PageSettings, create_app
from windtunnel.ui.desk import Desk

GRACE_S = 2
"""Wall time that answers under way get after Ctrl-C."""


class AddressUnavailable(ValueError):
    """The page cannot be served there."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any that is free.  Raises AddressUnavailable."""
    if not 0 <= port <= 65535:
        raise AddressUnavailable(f"cannot listen on {host}:{port}: a --port is at most 65535 (0 is any that is free)")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(64)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AddressUnavailable(
            f"cannot listen on {host}:{port}: {reason}; choose another --port (0 is any that is free)"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where the page is."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def make_server(settings: PageSettings, desk: Desk | None = None) -> Any:
    """The web server; ``server.run(sockets=[...])`` runs it."""
    import uvicorn

    config = uvicorn.Config(
        create_app(settings, desk or Desk(settings.limit_s)),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=GRACE_S,
    )
    return uvicorn.Server(config)


def run(settings: PageSettings, listener: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again after its own shutdown: not an error
        signal.signal(number, signal.SIG_IGN)
    with suppress(KeyboardInterrupt):
        make_server(settings).run(sockets=[listener])
