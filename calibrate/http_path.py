"""The way between client and engine, learned from live runs: before a request is queued, and behind each step.

Three parts, none of which is the engine's own:

- *in*: from the client's sending to the decision that could first see the request.  Observed where the engine was idle
  and so decided at once.  The first request of a run, which meets cold connections and caches, is a kind of its own.
- *turns*: an API server takes requests in one after the other.  Requests that are sent at once come a fixed time apart.
- *out*: from the end of a step to the chunk at the client, a constant and a part for each token that the step made;
  the first chunk, with the response's head, takes longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.live_runs import LiveRun

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class HttpPath:
    """See the module's docstring; all in seconds.  Raises ValueError where nothing was observed."""

    first_in_s: _Floats
    """Observed for the first request of each run."""
    in_s: _Floats
    """Observed for the others that found the engine idle."""
    server_in_s: _Floats
    """The part of it from the API server's arrival on, observed for all that found the engine idle."""
    turn_s: float
    """Between two requests of a burst."""
    out_s: float
    out_per_token_s: float
    """For each token of the same step."""
    first_out_s: float
    """What a request's first chunk takes on top."""

    def __post_init__(self) -> None:
        if not len(self.first_in_s) or not len(self.in_s):
            raise ValueError("no request found the engine idle: learn the path from a run that sends one at a time")

    @classmethod
    def of(cls, runs: Sequence[LiveRun]) -> HttpPath:
        """As the requests of these runs went it.  Raises ValueError if none but the first found an idle engine."""
        firsts, others, from_server = [], [], []
        for run in runs:
            way_in_s = run.begin_s[run.first_steps] - run.send_s
            idle = np.isnan(run.intervals_s[np.maximum(run.first_steps - 1, 0)]) & (run.first_steps > 0)
            firsts.append(way_in_s[0])
            others.append(way_in_s[idle])
            from_server.append((run.begin_s[run.first_steps] - run.arrival_s)[idle | (run.first_steps == 0)])
        return cls(
            np.array(firsts), np.concatenate(others), np.concatenate(from_server), _turn_s(runs), *_way_out(runs)
        )

    def at_engine(self, send_s: _Floats, rng: np.random.Generator) -> _Floats:
        """When requests sent at these times (in order) are in the engine's queue: draws from what was observed."""
        way_in_s: _Floats = rng.choice(self.in_s, len(send_s))
        way_in_s[:1] = rng.choice(self.first_in_s)
        arrival_s: _Floats = send_s + way_in_s
        for row in range(1, len(arrival_s)):  # each waits for its turn, in the order of sending
            arrival_s[row] = max(arrival_s[row], arrival_s[row - 1] + self.turn_s)
        return arrival_s

    def from_server(self, arrival_s: _Floats, rng: np.random.Generator) -> _Floats:
        """The same for requests that the API server had at these times."""
        queued_s: _Floats = np.maximum.accumulate(arrival_s + rng.choice(self.server_in_s, len(arrival_s)))
        return queued_s

    def at_client(self, tokens_s: Iterable[_Floats], steps: Sequence[_Ints]) -> tuple[_Floats, ...]:
        """When tokens are at the client that steps made at those times; ``steps`` says of each which step it was."""
        per_step = np.bincount(np.concatenate(steps))
        return tuple(
            made_s + self.out_s + self.out_per_token_s * per_step[rows] + self.first_out_s * (np.arange(len(rows)) == 0)
            for made_s, rows in zip(tokens_s, steps, strict=True)
        )

    def describe(self) -> dict[str, float]:
        """Its parts in milliseconds: medians of what is drawn, and the constants."""
        return {
            "first_in_ms": 1e3 * float(np.median(self.first_in_s)),
            "in_ms": 1e3 * float(np.median(self.in_s)),
            "server_in_ms": 1e3 * float(np.median(self.server_in_s)),
            "turn_ms": 1e3 * self.turn_s,
            "out_ms": 1e3 * self.out_s,
            "out_per_token_ms": 1e3 * self.out_per_token_s,
            "first_out_ms": 1e3 * self.first_out_s,
        }


def _way_out(runs: Sequence[LiveRun]) -> tuple[float, float, float]:
    """Least squares over all tokens: constant, for each token of the step, and for a first token."""
    late_s, per_step, is_first = [], [], []
    for run in runs:
        counts = np.bincount(np.concatenate(run.token_steps))
        for seen_s, made_s, rows in zip(run.client_tokens_s, run.engine_tokens_s, run.token_steps, strict=True):
            late_s.append(seen_s - made_s)
            per_step.append(counts[rows])
            is_first.append(np.arange(len(rows)) == 0)
    size = np.concatenate(per_step).astype(np.float64)
    columns = np.column_stack([np.ones(len(size)), size, np.concatenate(is_first)])
    found = np.linalg.lstsq(columns, np.concatenate(late_s), rcond=None)[0]
    return float(found[0]), float(found[1]), float(found[2])


def _turn_s(runs: Iterable[LiveRun]) -> float:
    """How far apart requests come to the engine's side that were all sent before the first of them had come; else 0."""
    span_s, num_turns = 0.0, 0
    for run in runs:
        burst = run.arrival_s[run.send_s < run.arrival_s[0]]
        if len(burst) > 1:
            span_s += float(burst.max() - burst.min())
            num_turns += len(burst) - 1
    return span_s / num_turns if num_turns else 0.0
