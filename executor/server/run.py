"""Runs the server until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from windtunnel.executor.server.app import create_app
from windtunnel.executor.server.frontend import Frontend

GRACE_S = 5
"""Wall time that open requests get to end after SIGTERM or Ctrl-C; then they are told that nothing more will come."""
_LAST_WORDS_S = 2
"""Wall time for telling them, before their connections are cut."""
_SWITCH_INTERVAL_S = 0.0005  # at the end of a step the engine should not have to wait for the web server


class AddressUnavailable(ValueError):
    """The server cannot listen there."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any that is free.  Raises AddressUnavailable."""
    if not 0 <= port <= 65535:
        raise AddressUnavailable(f"cannot listen on {host}:{port}: a --port is at most 65535 (0 is any that is free)")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        raise AddressUnavailable(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}; choose another --port (0 is "
            "any that is free) or --host"
        ) from error
    return listener


def address_of(listener: socket.socket) -> str:
    """Its address as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(frontend: Frontend, version: str, *, access_log: bool = False, grace_s: float = GRACE_S) -> Any:
    """The web server around a frontend; ``server.run(sockets=[...])`` runs it."""
    import uvicorn

    class Server(uvicorn.Server):
        """Ends what is open before connections are cut."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            ending = asyncio.get_running_loop().call_later(
                grace_s, frontend.loop.end_jobs, "the server is shutting down: the answer ends here"
            )
            try:
                await super().shutdown(sockets)
            finally:
                ending.cancel()
                for connection in list(self.server_state.connections):  # of clients that do not read
                    connection.transport.abort()
                await asyncio.sleep(0)

    config = uvicorn.Config(
        create_app(frontend, version),
        log_config=None,
        access_log=access_log,
        timeout_graceful_shutdown=math.ceil(grace_s + _LAST_WORDS_S),
        server_header=False,
    )
    return Server(config)


def run_server(frontend: Frontend, listener: socket.socket, version: str, *, access_log: bool = True) -> None:
    """Serve until SIGTERM or SIGINT; returns after a graceful end."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stderr)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    server = make_server(frontend, version, access_log=access_log)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again after its own shutdown: not an error
        signal.signal(number, signal.SIG_IGN)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
