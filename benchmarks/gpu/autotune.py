"""Which tiles of the attention kernels are fastest on this card: what it finds belongs into their ``config``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.points import NO_TIME
from benchmarks.kernels.common import Bench, Heads, default_bench
from windtunnel.executor.kernels.attention_common import Config

_NUM_COMPILERS = 8


class Candidate(NamedTuple):
    """A kernel ("decode" or "prefill"), how it is launched, and a shape: sequences, new tokens, context of each."""

    kernel: str
    choice: Config
    shape: tuple[int, int, int]
    splits: int | None = None
    """None lets the kernel choose."""


def candidates(bench: Bench) -> list[Candidate]:
    """What is tried."""
    group = bench.heads.num_query // bench.heads.num_kv
    block_m = max(16, 1 << (group - 1).bit_length())
    if bench.tiny:
        return [
            Candidate("decode", Config(block_m, 16, 4, 2), (2, 1, 40)),
            Candidate("prefill", Config(16, 16, 4, 2), (1, 9, 30)),
        ]
    decode = [
        Candidate("decode", Config(block_m, tile, warps, stages), shape)
        for tile in (32, 64, 128)
        for warps in (4, 8)
        for stages in (3, 5, 7)
        for shape in ((64, 1, 2048), (8, 1, 32768))
    ]
    prefill = [
        Candidate("prefill", Config(rows, tile, warps, stages), (1, 4096, 4096))
        for rows, tiles, all_warps in ((128, (32, 64, 128), (4, 8)), (64, (64, 128), (4,)))
        for tile in tiles
        for warps in all_warps
        for stages in (2, 3, 4)
    ]
    return prefill + decode


def probe(bench: Bench, more: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Seconds of each candidate, or why it cannot run; then, for the best of decode, of numbers of splits."""
    tried = candidates(bench)
    if bench.place.type == "cuda":
        _compile_all(tried)
    best: dict[tuple[int, int, int], tuple[float, Candidate]] = {}
    for candidate in tried:
        told = _try(bench, candidate) if more() else _told(candidate) | {"skipped": NO_TIME}
        yield told
        seconds = told.get("median_s")
        if seconds is not None and candidate.kernel == "decode":
            best[candidate.shape] = min(best.get(candidate.shape, (seconds, candidate)), (seconds, candidate))
    for _, candidate in best.values():
        for splits in (1, 2) if bench.tiny else (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64):
            split = candidate._replace(splits=splits)
            yield _try(bench, split) if more() else _told(split) | {"skipped": NO_TIME}


def best_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest candidate of each kernel and shape, where the kernel chooses the splits."""
    fastest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if "median_s" in row and row["splits"] is None:
            key = (row["kernel"], str(row["shape"]))
            fastest[key] = min(fastest.get(key, row), row, key=lambda told: told["median_s"])
    return list(fastest.values())


def _told(candidate: Candidate) -> dict[str, Any]:
    return {
        "kernel": candidate.kernel,
        **candidate.choice._asdict(),
        "shape": list(candidate.shape),
        "splits": candidate.splits,
    }


def _try(bench: Bench, candidate: Candidate) -> dict[str, Any]:
    told = _told(candidate)
    try:
        return told | bench.time([_call(bench, candidate)])._asdict()
    except Exception as error:  # too much shared memory, say: others may still run
        return told | {"failed": f"{type(error).__name__}: {error}"[:300]}


def _call(bench: Bench, candidate: Candidate) -> Callable[[], object]:
    from windtunnel.executor.kernels.attention_decode import decode
    from windtunnel.executor.kernels.attention_prefill import prefill

    heads: Heads = bench.heads
    num_seqs, num_new, context = candidate.shape
    batch, num_blocks = bench.batch([num_new] * num_seqs, [context] * num_seqs)
    keys, values = bench.kv_cache(num_blocks), bench.kv_cache(num_blocks)
    q = bench.normal(num_seqs * num_new, heads.num_query, heads.size)
    out = torch.empty_like(q)
    scale, tables, contexts = heads.size**-0.5, batch.block_tables, batch.context_lens
    how: dict[str, Any] = {"choice": candidate.choice, "splits": candidate.splits}
    if candidate.kernel == "decode":
        return lambda: decode(out, q, keys, values, tables, contexts, context, scale, **how)
    starts = batch.query_starts
    return lambda: prefill(out, q, keys, values, tables, contexts, starts, num_new, context, scale, **how)


def _compile_all(tried: Sequence[Candidate]) -> None:
    """Fill Triton's cache on disk from several processes, since one would take minutes."""
    small = {
        candidate._replace(shape=(1, 1, 512) if candidate.kernel == "decode" else (1, 512, 512), splits=splits)
        for candidate in tried
        for splits in ((1, 2) if candidate.kernel == "decode" else (1,))
    }
    ordered = sorted(small, key=str)
    shares = [ordered[i::_NUM_COMPILERS] for i in range(_NUM_COMPILERS)]
    try:
        with ProcessPoolExecutor(_NUM_COMPILERS, mp_context=get_context("spawn")) as pool:
            list(pool.map(_compile, shares))
    except (BrokenExecutor, OSError) as error:  # then each is compiled when it is tried
        print(f"  not compiled ahead: {error}")


def _compile(share: Sequence[Candidate]) -> None:
    bench = default_bench()
    for candidate in share:
        try:
            _call(bench, candidate)()
        except Exception:  # told when it is tried
            continue
