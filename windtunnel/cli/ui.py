"""``windtunnel ui``: a local page of knobs that shows at once what they change."""

from __future__ import annotations

from typing import Annotated

import typer

from windtunnel.cli.errors import EXIT_USAGE
from windtunnel.cli.output import note, warn

_DEFAULT_PORT = 8765
_SHORTEST_S, _LONGEST_S = 0.1, 600.0


def ui(
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="SCENARIO",
            help="What to begin with: a scenario file, or the name of a bundled one (windtunnel scenarios).",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", help="Port; 0 is any that is free.")] = _DEFAULT_PORT,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Let other machines ask: anybody who reaches the address can.")
    ] = False,
    host_name: Annotated[
        list[str] | None,
        typer.Option(
            "--host-name",
            metavar="NAME",
            help="With --allow-remote, a name under which the page is reached, beside its addresses. Repeatable.",
            show_default=False,
        ),
    ] = None,
    max_seconds: Annotated[
        float, typer.Option("--max-seconds", metavar="S", help="Longest that an answer may take to compute.")
    ] = 10.0,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = False,
) -> None:
    """Show a page of knobs on this machine: memory plan, latencies and throughput follow while a slider moves.

    The page needs no network and is served to this machine only, in one process that computes in another.  It needs the
    extra server.

    \b
    Examples:
      windtunnel ui
      windtunnel ui my-scenario.toml --open
      windtunnel ui chat-8b-h100 --port 0
    """
    missing = _missing()
    if missing:
        note(f"error: ui needs {missing}: pip install 'windtunnel[server]'")
        raise typer.Exit(EXIT_USAGE)
    from windtunnel import __version__
    from windtunnel.ui.app import PageSettings
    from windtunnel.ui.question import presets
    from windtunnel.ui.server import is_loopback, listen, run, url_of

    if not is_loopback(host) and not allow_remote:
        raise typer.BadParameter(
            f"{host} can be reached from other machines, and the page asks nobody for a password: leave it out, or add "
            "--allow-remote",
            param_hint="--host",
        )
    if not _SHORTEST_S <= max_seconds <= _LONGEST_S:
        raise typer.BadParameter(
            f"{max_seconds:g} must be from {_SHORTEST_S:g} to {_LONGEST_S:g}", param_hint="--max-seconds"
        )
    settings = PageSettings(
        presets(scenario), __version__, max_seconds, is_open=allow_remote, host_names=tuple(host_name or ())
    )
    with listen(host, port) as listener:
        if allow_remote and not is_loopback(host):
            warn("the page is open to everybody who reaches this address")
        note(f"What-if page on {url_of(listener)} (Ctrl-C ends it)")
        if open_browser:
            import webbrowser

            webbrowser.open(url_of(listener))
        run(settings, listener)


def _missing() -> str:
    """Which packages are missing, in words; nothing if none is."""
    from importlib.util import find_spec

    return " and ".join(name for name in ("starlette", "uvicorn") if find_spec(name) is None)
