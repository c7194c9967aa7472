"""What pools carry: a call of a function, and what came of it."""

from __future__ import annotations

import pickle
import time
import traceback
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from windtunnel.workers.errors import JobFailed
from windtunnel.workers.jobs import load_function, result_text

MAX_ATTEMPTS = 3
"""So often a call is given to a process; if all of them die of it, it is the call's fault."""
LOST = "a result is awaited that nobody works for: its call was lost to an error before"


class Outcome(NamedTuple):
    """What came of a call: a value, or an error with the text of its traceback."""

    value: Any
    error: BaseException | None
    traceback: str
    elapsed_s: float


class Receiver(Protocol):
    """Who asked for calls."""

    is_open: bool
    """Whether outcomes are still wanted."""

    def deliver(self, number: int, outcome: Outcome) -> None:
        """Take what came of the call with that number."""


@dataclass(slots=True)
class Call:
    """One call on its way through a pool."""

    receiver: Receiver
    number: int
    function: str
    argument: Any
    as_text: bool
    """Whether the value is the JSON of what the function returns, or that itself."""
    num_attempts: int = 0

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits for it."""
        return self.receiver.is_open

    def deliver(self, outcome: Outcome) -> None:
        """Hand over what came of it, unless nobody wants it any more."""
        if self.is_wanted:
            self.receiver.deliver(self.number, outcome)

    @property
    def work(self) -> tuple[str, Any, bool]:
        """What a process needs to know of it."""
        return self.function, self.argument, self.as_text

    def __str__(self) -> str:
        text = repr(self.argument)
        return f"{self.function} with {text if len(text) <= 200 else text[:197] + '...'}"


class Pool(Protocol):
    """Does calls.  What came of a call is delivered from within ``wait`` and ``poll``, in any order."""

    @property
    def has_room(self) -> bool:
        """Whether one more call can be begun at once."""

    def submit(self, call: Call) -> None:
        """Begin a call; asked for only where there is room."""

    def wait(self) -> None:
        """Until at least one call is delivered, or dropped because nobody wants it any more."""

    def poll(self) -> None:
        """Deliver what is there already."""

    def close(self) -> None:
        """Stop whatever runs, and give everything back."""


class RemoteTraceback(Exception):
    """Where in another process an error arose; the cause of that error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def perform(function: str, argument: Any, as_text: bool) -> Outcome:
    """Do a call; whatever it raises becomes its outcome."""
    began_s = time.perf_counter()
    try:
        value = result_text(function, argument) if as_text else load_function(function)(argument)
    except (Exception, KeyboardInterrupt) as error:
        return Outcome(None, error, traceback.format_exc(), time.perf_counter() - began_s)
    except BaseException as error:  # SystemExit would end, without a word, who asked for the call
        failed = JobFailed(f"{function} raised {type(error).__name__}: {error}")
        return Outcome(None, failed, traceback.format_exc(), time.perf_counter() - began_s)
    return Outcome(value, None, "", time.perf_counter() - began_s)


def packed(outcome: Outcome) -> bytes:
    """The outcome for another process; an error or a value that cannot be carried there becomes a JobFailed."""
    try:
        data = pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL)
        if outcome.error is not None:
            pickle.loads(data)  # an exception with arguments of its own may be packed and never unpacked
    except Exception as error:
        told = outcome.error if outcome.error is not None else error
        message = f"{type(told).__name__}: {told}"
        return pickle.dumps(Outcome(None, JobFailed(message), outcome.traceback, outcome.elapsed_s))
    return data


def unpacked(data: bytes) -> Outcome:
    """What another process answers; a JobFailed where this process cannot read it, as where its code is another."""
    try:
        outcome: Outcome = pickle.loads(data)
    except Exception as error:
        told = JobFailed(f"what a worker answered cannot be read here: {type(error).__name__}: {error}")
        return Outcome(None, told, "", 0.0)
    return outcome
