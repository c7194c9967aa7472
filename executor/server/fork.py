"""Forks of a running server: the snapshot is taken by the engine's thread, the future simulated by another process.

A simulation in a thread of the server would share its interpreter with the engine, which then wakes up late; so there
is one worker process, started with the first fork.  It gets the snapshot, the cost model and the question, and is
nice to others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from windtunnel.executor.engine import Engine, RealExecutor
from windtunnel.executor.server.engine_loop import EngineDead, EngineLoop
from windtunnel.executor.server.history import engine_snapshot
from windtunnel.executor.server.protocol import ApiError, unavailable
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.engine.snapshot import Snapshot
from windtunnel.sim.engine.snapshot_json import to_json
from windtunnel.sim.fork import Rate, fork
from windtunnel.sim.metrics.window import UNITS, Seen, window_metrics
from windtunnel.sim.workload import Workload, workload

MAX_HORIZON_S = 3600.0
MAX_FUTURES = 32
MAX_STEPS = 500_000
"""Simulated steps of one fork, all futures together."""
MAX_ARRIVALS = 100_000
MAX_PENDING = 4
"""Forks that may be asked for at once; they are simulated one after the other."""
_NS_PER_S = 1_000_000_000


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Arrival(_Strict):
    """A request that will come."""

    at_s: float = Field(ge=0, le=MAX_HORIZON_S, allow_inf_nan=False)
    """Seconds from now."""
    prompt_tokens: int = Field(ge=1, le=10**9)
    output_tokens: int = Field(ge=1, le=10**9)
    max_tokens: int | None = Field(None, ge=1, le=10**9)
    priority: int = Field(0, ge=-(2**31), le=2**31)


class ForkRequest(_Strict):
    """``POST /windtunnel/fork``."""

    horizon_s: float = Field(gt=0, le=MAX_HORIZON_S, allow_inf_nan=False)
    changes: dict[str, int | float | bool | str | None] = Field(default_factory=dict)
    arrivals: Literal["recent", "none"] | list[Arrival] | None = Field(None, max_length=MAX_ARRIVALS)
    """``recent``: at the recent rate, or at ``requests_per_s``; by default that where requests came lately."""
    requests_per_s: float | None = Field(None, ge=0, allow_inf_nan=False)
    lengths: Literal["known", "recent", "max_tokens"] | None = None
    seed: int = Field(0, ge=0, lt=2**63)
    num_futures: int = Field(1, ge=1, le=MAX_FUTURES)


class Forks:
    """Answers questions about the future of one engine."""

    def __init__(self, loop: EngineLoop, cost: CostModel | None, shadow: CostModel | None = None) -> None:
        """``cost`` prices the steps of forks, ``shadow`` while a model is computed; without any there are no forks."""
        self._cost = cost
        self._shadow = shadow
        self._loop = loop
        self._workers: ProcessPoolExecutor | None = None
        self._num_pending = 0

    async def snapshot(self) -> dict[str, Any]:
        """The engine's state now, as plain data.  Raises ApiError if the engine is dead."""
        taken = await self._look()
        return await asyncio.to_thread(to_json, taken)

    async def fork(self, asked: ForkRequest) -> dict[str, Any]:
        """The forecast, as plain data.  Raises ApiError for a question that makes no sense or comes too often."""
        cost = self._price()
        if self._num_pending >= MAX_PENDING:
            raise unavailable(f"{self._num_pending} forks are being simulated: try again later")
        self._num_pending += 1
        try:
            taken = await self._look()
            future = asyncio.get_running_loop().run_in_executor(self._pool(), _simulate, taken, cost, asked)
            return await future
        except ValueError as error:
            raise ApiError(str(error)) from error
        except BrokenProcessPool as error:
            self.close()
            raise ApiError("the process that simulates forks ended; the next fork starts another", 500) from error
        finally:
            self._num_pending -= 1

    async def window(self, begin_s: float, end_s: float) -> dict[str, Any]:
        """What happened between two times of the engine's clock.  Raises ApiError for times that are not known."""

        def look(engine: Engine, now_ns: int) -> tuple[Seen, int, int]:
            return self._loop.history.seen(engine), self._loop.history.begin_ns(), now_ns

        try:
            seen, known_ns, now_ns = await self._loop.look(look)
            begin_ns, end_ns = round(begin_s * _NS_PER_S), round(end_s * _NS_PER_S)
            if begin_ns < known_ns or end_ns > now_ns:
                raise ValueError(
                    f"begin_s and end_s must lie between {known_ns / 1e9:.3f} and {now_ns / 1e9:.3f}, the times that "
                    f"are known, got {begin_s} and {end_s}"
                )
            metrics = window_metrics(seen, begin_ns, end_ns)
        except EngineDead as error:
            raise unavailable(str(error)) from error
        except (ValueError, OverflowError) as error:
            raise ApiError(str(error)) from error
        rows = [{"name": name, "unit": UNITS[name], "value": value} for name, value in metrics.items()]
        return {"begin_s": begin_s, "end_s": end_s, "metrics": rows}

    def close(self) -> None:
        """End the worker."""
        if self._workers is not None:
            self._workers.shutdown(wait=False, cancel_futures=True)
            self._workers = None

    def _price(self) -> CostModel:
        computes = isinstance(self._loop.engine.executor, RealExecutor)
        cost = self._shadow or self._cost if computes else self._cost or self._shadow
        if cost is None:
            raise ApiError(
                "nothing says what a step costs: start the server with --profile, --cost, --gpu or --shadow", 409
            )
        return cost

    async def _look(self) -> Snapshot:
        history = self._loop.history
        try:
            return await self._loop.look(lambda engine, now_ns: engine_snapshot(engine, now_ns, history))
        except EngineDead as error:
            raise unavailable(str(error)) from error

    def _pool(self) -> ProcessPoolExecutor:
        if self._workers is None:
            self._workers = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_be_nice)
        return self._workers


def _be_nice() -> None:
    with suppress(AttributeError, OSError):
        os.nice(10)


def _simulate(taken: Snapshot, cost: CostModel, asked: ForkRequest) -> dict[str, Any]:
    """In the worker: the forecast, and where limits change the one without that, too."""
    arrivals = _arrivals(asked, taken)

    def forecast(changes: Mapping[str, Any]) -> dict[str, Any]:
        return fork(
            taken,
            cost,
            asked.horizon_s,
            arrivals,
            changes=changes,
            lengths=asked.lengths,
            seed=asked.seed,
            num_futures=asked.num_futures,
            max_num_steps=MAX_STEPS,
        ).as_plain()

    found = forecast(asked.changes)
    if asked.changes:
        found["as_is"] = forecast({})["metrics"]
    return found


def _arrivals(asked: ForkRequest, taken: Snapshot) -> Workload | Rate | None:
    given = asked.arrivals
    if isinstance(given, list):
        if asked.requests_per_s is not None:
            raise ValueError("arrivals are listed and requests_per_s is given: give one of them")
        return listed_arrivals([each.model_dump() for each in given])
    if given is None and asked.requests_per_s is None and len(taken.recent) < 2:
        return None
    if given == "none":
        if asked.requests_per_s:
            raise ValueError('arrivals are "none", but requests_per_s is given: give one of them')
        return None
    per_s = asked.requests_per_s
    if per_s is not None and per_s * asked.horizon_s * asked.num_futures > MAX_ARRIVALS:
        raise ValueError(
            f"{per_s:g} requests/s for {asked.horizon_s:g} s in {asked.num_futures} futures are more than "
            f"{MAX_ARRIVALS:,} requests: ask for less of one of them"
        )
    return Rate(per_s)


def listed_arrivals(rows: list[Mapping[str, Any]] | list[dict[str, Any]]) -> Workload:
    """A workload of ``Arrival`` rows, in the order of time.  Raises ValueError as Workload does."""
    ordered = sorted(rows, key=lambda row: row["at_s"])
    outputs = np.array([row["output_tokens"] for row in ordered], np.int64)
    limits = [row.get("max_tokens") for row in ordered]
    return workload(
        [round(row["at_s"] * _NS_PER_S) for row in ordered],
        [row["prompt_tokens"] for row in ordered],
        outputs,
        max_tokens=[int(own) if limit is None else limit for own, limit in zip(outputs, limits, strict=True)],
        priority=[row.get("priority", 0) for row in ordered],
    )
