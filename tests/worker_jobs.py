"""Functions for jobs in tests: importable by workers without pytest."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def square(number: float) -> dict[str, float]:
    return {"squared": number * number}


def slow_square(argument: list[float]) -> dict[str, float]:
    """Of the first number, after the second's seconds."""
    time.sleep(argument[1])
    return {"squared": argument[0] * argument[0]}


def fail_for(argument: list[int]) -> int:
    """The first number, unless it is in the others."""
    if argument[0] in argument[1:]:
        raise ValueError(f"{argument[0]} is refused")
    return argument[0]


class Awkward(Exception):
    """Can be pickled and not unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def awkward(argument: Any) -> None:
    raise Awkward("this", "that")


def die(argument: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(argument: list[str]) -> str:
    """Dies if the file of that name is not there yet, and makes it."""
    mark = Path(argument[0])
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done the second time"


def process(argument: Any) -> int:
    time.sleep(0.05)
    return os.getpid()


def note_and_square(argument: list[Any]) -> int:
    """Adds a line to a file for each time that it is really called."""
    with open(argument[0], "a", encoding="utf-8") as file:
        file.write(f"{argument[1]}\n")
    return int(argument[1]) ** 2


def threads(argument: Any) -> str | None:
    return os.environ.get("OMP_NUM_THREADS")


def loaded(argument: Any) -> list[str]:
    """What this process, which runs no tests, need not have."""
    return [name for name in ("pytest", "numpy") if name in sys.modules]


def not_a_number(argument: Any) -> dict[str, float]:
    return {"x": float("nan")}


def chatty(argument: int) -> str:
    return "x" * argument


def slow_fail(argument: list[Any]) -> None:
    time.sleep(argument[0])
    raise ValueError(argument[1])


def infeasible(argument: Any) -> None:
    from windtunnel.sim.deployment.memory import InfeasibleDeployment

    raise InfeasibleDeployment("too large", 4096, 2)


def leave(argument: Any) -> None:
    sys.exit(3)


def say(argument: Any) -> Any:
    """Writes on whatever is descriptor 1 and 2 of this process, as a library in C would."""
    for number in (1, 2):
        os.write(number, b"something\n" * 100)
    return argument


def serve_never(connection: Any) -> None:
    """In place of ``worker.serve``: a process that hangs while it starts."""
    time.sleep(600)


def serve_and_die_holding_on(connection: Any) -> None:
    """In place of ``worker.serve``: it dies, and a process that it left behind still holds its pipe."""
    connection.send_bytes(b"ready")
    if not os.fork():
        time.sleep(20)
        os._exit(0)
    os._exit(7)


def serve_nonsense(connection: Any) -> None:
    """In place of ``worker.serve``: an answer that cannot be read, as from another version of the code."""
    connection.send_bytes(b"ready")
    while True:
        connection.recv_bytes()
        connection.send_bytes(b"cno_such_module\nNoSuchClass\n.")
