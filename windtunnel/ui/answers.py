"""What the page shows of a question: the memory plan, then the simulation, then how far it is from saturation.

Everything comes from the same functions as ``windtunnel memory`` and ``windtunnel simulate``; what is kept between
questions (answers, saturation rates) only saves time.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from windtunnel.ui.errors import BadQuestion, complaint
from windtunnel.ui.knobs import MAX_REQUESTS
from windtunnel.ui.question import MARK, Question, load

if TYPE_CHECKING:
    from windtunnel.api import Run
    from windtunnel.scenarios.resolve import Resolved

T = TypeVar("T")
Part = dict[str, Any]
"""A piece of an answer, as the page takes it: plain data with the key "part" that says what it is."""
KEPT = 64
"""Answers that are kept, so that a slider that goes back shows at once what it showed before."""
SETTLE_S = 0.15
"""Pause before the saturation is measured: who goes on turning a knob does not wait for it."""
_FREE_OF_LOAD = ("request_rate", "rate_scale", "max_concurrency", "objectives", "gpu_hour")
"""Knobs that do not change what the engine can do at most."""


class OutOfTime(Exception):
    """A simulation took longer than an answer may."""

    def __init__(self, done: int, total: int) -> None:
        super().__init__(done, total)
        self.done, self.total = done, total


class Superseded(Exception):
    """Nobody waits for this answer any more."""


class Watch:
    """Says when a computation has to stop: at the limit, or when ``is_wanted`` turns false."""

    def __init__(self, limit_s: float, is_wanted: Callable[[], bool] = lambda: True) -> None:
        self.limit_s = limit_s
        self._start_s = time.monotonic()
        self._is_wanted = is_wanted

    def __call__(self, done: int = 0, total: int = 0) -> None:
        """Raise Superseded or OutOfTime; what a simulation takes as its ``progress``."""
        if not self._is_wanted():
            raise Superseded
        if time.monotonic() - self._start_s > self.limit_s:
            raise OutOfTime(done, total)

    @property
    def elapsed_ms(self) -> float:
        """Since the question came in."""
        return 1000 * (time.monotonic() - self._start_s)

    def rest(self) -> None:
        """Wait for a moment, in case that another question comes."""
        end_s = time.monotonic() + SETTLE_S
        while time.monotonic() < end_s:
            self()
            time.sleep(0.01)


class Kept(Generic[T]):
    """The latest results by key."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._results: OrderedDict[str, T] = OrderedDict()

    def get(self, key: str) -> T | None:
        """The result of that key, which is now the latest; None if it is not kept."""
        if key in self._results:
            self._results.move_to_end(key)
        return self._results.get(key)

    def put(self, key: str, result: T) -> T:
        """Keep it, in place of the oldest if there are too many."""
        self._results[key] = result
        if len(self._results) > self._most:
            self._results.popitem(last=False)
        return result


class Answers:
    """Answers questions, and remembers the latest."""

    def __init__(self) -> None:
        self._whole: Kept[list[Part]] = Kept()
        self._saturation: Kept[float | None] = Kept()

    def parts(self, question: Question, watch: Watch) -> Iterator[Part]:
        """The parts of an answer as they are ready: "memory", "run", "saturation", or an "error" that ends it.

        Raises Superseded when the watch says so; every other failure is a part.
        """
        kept = self._whole.get(question.key)
        if kept is not None:
            yield from ({**part, "ms": watch.elapsed_ms, "kept": True} for part in kept)
            return
        made: list[Part] = []
        for part in _failing_in_words(self._parts(question, watch), watch):
            part["ms"] = watch.elapsed_ms
            made.append(part)
            yield part
        if all(part["part"] != "error" for part in made):
            self._whole.put(question.key, made)

    def _parts(self, question: Question, watch: Watch) -> Iterator[Part]:
        from windtunnel.scenarios.resolve import resolve
        from windtunnel.ui.memory import memory_part
        from windtunnel.ui.shown import run_part, saturation_part, settings_part

        loaded = load(question)
        planned = memory_part(loaded)
        watch()
        if planned.is_infeasible:
            yield {"part": "memory", **settings_part(question, loaded, planned, None), **planned.shown}
            return
        resolved = resolve(loaded)
        _check_number(len(resolved.workload))
        yield {"part": "memory", **settings_part(question, loaded, planned, resolved), **planned.shown}
        run = _executed(resolved, watch)
        yield {"part": "run", **run_part(run, resolved)}
        if not resolved.measures_saturation:
            return
        key = question.without(*_FREE_OF_LOAD).key
        if self._saturation.get(key) is None:
            watch.rest()
            self._saturation.put(key, _saturation(resolved))
        yield {"part": "saturation", **saturation_part(run, resolved, self._saturation.get(key))}


def _check_number(num_requests: int) -> None:
    if num_requests > MAX_REQUESTS:
        raise BadQuestion(
            f"these are {num_requests:,} requests, and the page simulates at most {MAX_REQUESTS:,}: ask for fewer, or "
            "run windtunnel simulate",
            "num_requests",
        )


def _executed(resolved: Resolved, watch: Watch) -> Run:
    from windtunnel.api import execute

    return execute(replace(resolved, measures_saturation=False, measures_tenants_alone=False), progress=watch)


def _saturation(resolved: Resolved) -> float | None:
    from windtunnel.scenarios.saturation import saturation_request_throughput

    return saturation_request_throughput(resolved.workload, resolved.served)


# --- failures in words


def _failing_in_words(parts: Iterator[Part], watch: Watch) -> Iterator[Part]:
    """The parts, and a failure as the last of them."""
    from windtunnel.sim.deployment.memory import InfeasibleDeployment

    try:
        yield from parts
    except Superseded:
        raise
    except BadQuestion as error:
        yield complaint(str(error), error.place)
    except OutOfTime as error:
        yield _out_of_time(error, watch.limit_s)
    except InfeasibleDeployment as error:
        yield complaint(str(error), kind="infeasible")
    except (ValueError, OSError) as error:
        yield complaint(_without_mark(str(error)), _place(str(error)))
    except MemoryError:
        yield complaint("not enough memory for this: ask for fewer or shorter requests", "num_requests")
    except Exception as error:
        yield complaint(f"{type(error).__name__}: {error} (this is a bug in windtunnel)", kind="internal")


def _out_of_time(error: OutOfTime, limit_s: float) -> Part:
    done = f"{error.done:,} of {error.total:,} requests were done" if error.total else "it had not begun"
    return complaint(
        f"Stopped after {limit_s:g} s: {done}.  Ask for fewer requests or shorter answers, or run windtunnel simulate "
        "with the scenario below, which takes its time.",
        "num_requests",
        kind="out_of_time",
    )


_GIVEN = re.compile(rf"^(\w+){re.escape(MARK)}: ", re.MULTILINE)


def _place(message: str) -> str:
    """The knob that a complaint is about, where it says so."""
    found = _GIVEN.search(message)
    return found[1] if found else ""


def _without_mark(message: str) -> str:
    """The complaint without the place, which the page shows at the knob."""
    return _GIVEN.sub("", message)
