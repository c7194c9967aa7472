"""Workloads for a small server: those that are learned from, and the others that are predicted.

Lengths are log-normal, as those of chats are: prompts around 180 tokens, answers around 60.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from windtunnel.sim import rng
from windtunnel.sim.workload import Workload, workload

_Ints = NDArray[np.int64]
SEED = 7
PREFIX_TOKENS = 512


def sequential(num_requests: int) -> Workload:
    """One after the other, in twelve shapes: the engine is idle before each."""
    shapes = [(32, 24), (128, 64), (512, 24), (1024, 64), (64, 48), (256, 32)]
    rows = [shapes[row % len(shapes)] for row in range(num_requests)]
    return _at_once(np.array([row[0] for row in rows]), np.array([row[1] for row in rows]), max_concurrency=1)


def closed_loop(num_requests: int, max_concurrency: int = 8) -> Workload:
    """So many at a time; every second answer is five times as long as the others."""
    output = np.where(np.arange(num_requests) % 2, 200, 40)
    return _at_once(np.full(num_requests, 256), output, max_concurrency=max_concurrency)


def burst(num_requests: int) -> Workload:
    """All at once."""
    return _at_once(*_chat_lengths("burst", num_requests))


def poisson(name: str, num_requests: int, rate_per_s: float) -> Workload:
    """Chats that come at random."""
    return workload(_arrivals_ns(name, num_requests, rate_per_s), *_chat_lengths(name, num_requests))


def long_answers(num_requests: int) -> Workload:
    """Answers about as long as their prompts, 50 ms apart: too much for a small KV pool."""
    prompt = _log_normal("long prompts", num_requests, 160, 0.5, 32, 400)
    output = _log_normal("long answers", num_requests, 160, 0.4, 40, 400)
    return workload(np.arange(num_requests) * 50_000_000, prompt, output)


def shared_prefixes(num_requests: int, rate_per_s: float, num_prefixes: int = 20) -> Workload:
    """Prompts that begin with one of several texts of 512 tokens, the first of them the most often (Zipf's law)."""
    name = "shared prefixes"
    weights = 1.0 / np.arange(1, num_prefixes + 1)
    streams = rng.stream(SEED, name, "prefix").choice(num_prefixes, num_requests, p=weights / weights.sum())
    own = rng.stream(SEED, name, "own").integers(32, 160, num_requests)
    output = _log_normal(name, num_requests, 60, 0.7, 8, 256)
    return workload(
        _arrivals_ns(name, num_requests, rate_per_s),
        PREFIX_TOKENS + own,
        output,
        content=tuple(((int(stream), PREFIX_TOKENS),) for stream in streams),
        num_streams=num_prefixes,
    )


def _at_once(prompt: _Ints, output: _Ints, max_concurrency: int | None = None) -> Workload:
    return workload(np.zeros(len(prompt), np.int64), prompt, output, max_concurrency=max_concurrency)


def _chat_lengths(name: str, num_requests: int) -> tuple[_Ints, _Ints]:
    prompt = _log_normal(f"{name} prompts", num_requests, 180, 0.8, 16, 1024)
    return prompt, _log_normal(f"{name} answers", num_requests, 60, 0.7, 8, 256)


def _arrivals_ns(name: str, num_requests: int, rate_per_s: float) -> _Ints:
    gaps_s = rng.stream(SEED, name, "arrivals").exponential(1.0 / rate_per_s, num_requests)
    arrivals: _Ints = np.rint(1e9 * (np.cumsum(gaps_s) - gaps_s[0])).astype(np.int64)
    return arrivals


def _log_normal(name: str, num: int, median: float, sigma: float, low: int, high: int) -> _Ints:
    drawn = rng.stream(SEED, name, "length").lognormal(np.log(median), sigma, num)
    return np.clip(np.rint(drawn), low, high).astype(np.int64)
