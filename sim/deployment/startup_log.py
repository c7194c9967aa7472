"""What a real vLLM said of its memory: the lines of its start-up, the errors that ended one, and its periodic lines.

The texts are those of the releases 0.2.7, 0.4.2, 0.5.4, 0.6.3 to 0.6.6, 0.7.3, 0.8.5, 0.9.2, 0.10.2, 0.11.2, 0.12.0,
0.14.1, 0.16.0, 0.18.1, 0.19.1, 0.20.2, 0.21.0, 0.24.0, 0.26.0, 0.28.0 and 0.32.0 (``worker/worker.py``,
``v1/worker/gpu_worker.py``, ``v1/core/kv_cache_utils.py``, ``v1/metrics/loggers.py`` and their forerunners), both
engines.  ``docs/memory-truth.md`` shows an example of each.

vLLM writes sizes as GiB with two decimals.  Where an old release writes GB it has divided by 2**30 all the same, so GB
is read as GiB here and a note says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from windtunnel.sim.deployment.startup_checks import check
from windtunnel.sim.deployment.startup_facts import (
    ERROR_KINDS,
    PoolLine,
    RankMemory,
    Serving,
    StartupError,
    StartupFacts,
)
from windtunnel.sim.deployment.startup_lines import messages
from windtunnel.sim.deployment.startup_reading import StartupRun, line_actions
from windtunnel.sim.deployment.startup_summary import Summary

__all__ = [
    "ERROR_KINDS",
    "PoolLine",
    "RankMemory",
    "Serving",
    "StartupError",
    "StartupFacts",
    "check",
    "read_startup_log",
]


def read_startup_log(text: str | Iterable[str], *, name: str) -> StartupFacts:
    """The facts of the last start-up in a log (text, or lines such as an open file); ``name`` is for messages.

    Colours, time stamps, process and container prefixes, CRLF, and JSON lines with the message in ``log``, ``message``
    and the like are understood.  Of several containers in one log the one that started last is read.

    Raises ValueError if no line is one of vLLM's, and if two servers write to it in turns.
    """
    runs: dict[str, StartupRun] = {}
    for line, container, message in messages(text, _anchors()):
        run = runs.get(container)
        if run is None:
            run = runs[container] = StartupRun()
        run.read(line, message)
    runs = {container: run for container, run in runs.items() if run.has_facts}
    if not runs:
        raise ValueError(
            f"{name}: no line of vLLM's start-up in it; looked for texts such as 'Initializing a V1 LLM engine', "
            "'non-default args:', 'Available KV cache memory:', 'GPU KV cache size:', '# GPU blocks:', "
            "'Avg prompt throughput:' and vLLM's memory errors. Give the server's output from its first line on"
        )
    container = max(runs, key=lambda key: runs[key].started_at)
    _check_is_of_one_server(runs[container], name)
    facts = Summary(runs[container]).facts(name)
    if len(runs) == 1:
        return facts
    note = f"{len(runs)} containers write to this log; read is {container or 'the one without a name'}"
    return replace(facts, notes=(note, *facts.notes))


def _check_is_of_one_server(run: StartupRun, name: str) -> None:
    """Raise ValueError if two servers share the lines: figures of both would be taken for one's."""
    if run.in_turns is not None:
        line, label, pid, other = run.in_turns
        raise ValueError(
            f"{name}, line {line}: two servers write to this log in turns, {label} pid={pid} and {label} pid={other}, "
            "so that their figures cannot be told apart; give the log of one of them, or the lines of its processes"
        )


@cache
def _anchors() -> tuple[str, ...]:
    """What some line of every kind that is read contains, be it within JSON, where some characters are escaped."""
    texts = [anchor for anchor, _ in line_actions() if anchor not in _COMMON_ANCHORS]
    plain = (max(re.split(r"[^\w :.,()#=-]", text), key=len) for text in texts)
    return tuple(dict.fromkeys((*plain, *_INSTEAD_OF_COMMON, *_COLOURS)))


_COMMON_ANCHORS = (" version ", " model ")
_INSTEAD_OF_COMMON = ("█", "▄", "▀", "\\u258", "server version")
"""What lines with those words have beside them."""
_COLOURS = ("\x1b", "^[[", "#033", "\\x1b", "\\u001b", "\\033", "[0m", "[39m")
