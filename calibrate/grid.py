"""Which steps are measured: a grid of step compositions over all that the time of a step depends on.

A composition says what each sequence of the batch computes.  The grid has every kind that a scheduler decides
(``KINDS``), log-spaced in batch, context and chunk, and drawn ones in between; all of them fit the engine's limits and
its KV pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np

from windtunnel.sim.cost.features import graph_sizes
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepShape

KINDS = {
    "decode": "decodes only: batch x context",
    "off_graph": "decodes only, of a number for which vLLM captures no CUDA graph",
    "skewed": "decodes only, most of the context in one sequence: the same sums as a step of kind decode",
    "prefill": "one chunk behind a cached prefix",
    "chunks": "several chunks, of equal and of very different sizes",
    "mixed": "decodes and a chunk",
    "drawn": "decodes and chunks at random",
}
"""Kinds of steps and what they are."""

_T = TypeVar("_T")

_JITTER = 0.25
"""Share by which contexts of one step scatter around their mean, so that sizes of tiles and blocks do not line up."""
_SKEWED_SHORT = 0.25
"""Context of the short sequences of a skewed step, as a share of the mean."""
_LEAST_CONTEXT = 16


class SequenceWork(NamedTuple):
    """What one sequence computes in a step."""

    num_new_tokens: int
    num_cached_tokens: int
    """Tokens ahead of the new ones whose keys and values are in the cache."""
    samples: bool = True
    """Whether the step yields a token for it; no for a chunk that does not end its prompt."""

    @property
    def num_tokens(self) -> int:
        """All tokens that lie in the cache after the step."""
        return self.num_new_tokens + self.num_cached_tokens

    @property
    def is_decode(self) -> bool:
        """One new token behind others; a lone first token is a prompt."""
        return self.num_new_tokens == 1 and self.num_cached_tokens > 0


@dataclass(frozen=True, slots=True)
class Composition:
    """A step: its kind and what each of its sequences computes, decodes first.

    Raises ValueError for no sequences, and for work without new tokens or with a negative prefix.
    """

    kind: str
    sequences: tuple[SequenceWork, ...]

    def __post_init__(self) -> None:
        if not self.sequences:
            raise ValueError("a composition needs at least one sequence")
        for work in self.sequences:
            if work.num_new_tokens < 1 or work.num_cached_tokens < 0:
                raise ValueError(
                    f"a sequence computes at least 1 new token behind at least 0 cached ones, got "
                    f"{work.num_new_tokens} behind {work.num_cached_tokens}"
                )

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(work.num_new_tokens for work in self.sequences)

    @property
    def shape(self) -> StepShape:
        """The StepShape of the step."""
        decodes = [work for work in self.sequences if work.is_decode]
        chunks = [work for work in self.sequences if not work.is_decode]
        return StepShape(
            num_decode_seqs=len(decodes),
            decode_context_tokens=sum(work.num_tokens for work in decodes),
            num_prefill_seqs=len(chunks),
            prefill_tokens=sum(work.num_new_tokens for work in chunks),
            prefill_context_tokens=sum(work.num_cached_tokens for work in chunks),
            prefill_pairs=sum(
                work.num_new_tokens * work.num_cached_tokens + work.num_new_tokens * (work.num_new_tokens + 1) // 2
                for work in chunks
            ),
            num_sampled=sum(work.samples for work in self.sequences),
        )

    def num_blocks(self, block_size: int) -> int:
        """KV blocks that its sequences take."""
        return sum(-(-work.num_tokens // block_size) for work in self.sequences)

    def fits(self, config: SchedulerConfig) -> bool:
        """Whether an engine of that configuration could run the step."""
        return (
            len(self.sequences) <= config.max_num_seqs
            and self.num_tokens <= config.max_num_batched_tokens
            and max(work.num_tokens for work in self.sequences) <= config.max_model_len
            and self.num_blocks(config.block_size) <= config.num_gpu_blocks - 1
        )


class _Density(NamedTuple):
    """How many values of each quantity a grid has."""

    batches: int
    contexts: int
    off_graph: int
    skewed: int
    chunks: int
    prefixes: int
    several: int
    mixed: int
    drawn: int


SIZES = {
    "small": _Density(batches=4, contexts=3, off_graph=3, skewed=3, chunks=4, prefixes=2, several=2, mixed=2, drawn=12),
    "default": _Density(
        batches=6, contexts=4, off_graph=5, skewed=6, chunks=6, prefixes=3, several=3, mixed=3, drawn=30
    ),
    "full": _Density(
        batches=10, contexts=6, off_graph=10, skewed=12, chunks=10, prefixes=5, several=4, mixed=4, drawn=80
    ),
}
"""Sizes of grids, by name."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Steps to be measured, and the limits that they keep."""

    config: SchedulerConfig
    points: tuple[Composition, ...]
    size: str
    seed: int

    def kinds(self) -> dict[str, int]:
        """How many points there are of each kind, in the order of ``KINDS``."""
        counts = {kind: sum(point.kind == kind for point in self.points) for kind in KINDS}
        return {kind: count for kind, count in counts.items() if count}


def make_grid(config: SchedulerConfig, size: str = "default", seed: int = 0) -> Grid:
    """The grid of that size (``SIZES``) for an engine of that configuration; the same arguments give the same grid.

    Kinds for which the limits leave no room (several chunks with one seat, say) are absent.  Raises ValueError for an
    unknown size, a negative seed, and for limits so tight that nothing fits.
    """
    if size not in SIZES:
        raise ValueError(f"the grid must be one of {', '.join(SIZES)}, got {size!r}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    designer = _Designer(config, SIZES[size], np.random.default_rng(np.random.SeedSequence([seed, 0])))
    found = {point.sequences: point for point in reversed(list(designer.points())) if point.fits(config)}
    points = tuple(reversed(found.values()))  # of equal ones the first
    if not points:
        raise ValueError(
            f"no step fits max_model_len {config.max_model_len}, max_num_batched_tokens "
            f"{config.max_num_batched_tokens} and {config.num_gpu_blocks} KV blocks of {config.block_size}: raise them"
        )
    return Grid(config, points, size, seed)


class _Designer:
    """Lays out the points of a grid."""

    def __init__(self, config: SchedulerConfig, density: _Density, draw: np.random.Generator) -> None:
        self._config = config
        self._density = density
        self._draw = draw
        self._most_seqs = min(config.max_num_seqs, config.max_num_batched_tokens, config.num_gpu_blocks - 1)
        self._most_context = min(config.max_model_len, (config.num_gpu_blocks - 1) * config.block_size)
        self._most_chunk = min(config.max_num_batched_tokens, self._most_context)

    def points(self) -> Iterator[Composition]:
        """All of them, some perhaps twice, some too large."""
        yield from self._decodes()
        yield from self._off_graph()
        yield from self._skewed()
        yield from self._prefills()
        yield from self._several_chunks()
        yield from self._mixed()
        yield from self._drawn()

    def _decodes(self) -> Iterator[Composition]:
        batches = log_spaced(1, self._most_seqs, self._density.batches)
        for batch, context in product(batches, self._contexts(self._density.contexts)):
            yield from self._batch("decode", batch, context)

    def _off_graph(self) -> Iterator[Composition]:
        graphs = set(graph_sizes(max(self._most_seqs, 1)))
        between = [batch for batch in range(1, self._most_seqs + 1) if batch not in graphs]
        contexts = self._contexts(3)
        for index, batch in enumerate(_spread(between, self._density.off_graph)):
            yield from self._batch("off_graph", batch, contexts[index % min(2, len(contexts))])

    def _skewed(self) -> Iterator[Composition]:
        """Pairs with the same sums: alike contexts, and one long one among short ones."""
        batches = [batch for batch in log_spaced(2, self._most_seqs, self._density.batches) if batch > 1]
        contexts = self._contexts(self._density.contexts)[1:]
        for batch, context in _spread(list(product(batches, contexts)), self._density.skewed):
            short = max(2, int(context * _SKEWED_SHORT))
            mean = min(context, short + (self._most_context - short) // batch)
            long = batch * mean - (batch - 1) * short
            yield Composition("decode", _decodes([mean] * batch))
            yield Composition("skewed", _decodes([long, *[short] * (batch - 1)]))

    def _prefills(self) -> Iterator[Composition]:
        for chunk in log_spaced(min(_LEAST_CONTEXT, self._most_chunk), self._most_chunk, self._density.chunks):
            room = self._most_context - chunk
            for prefix in [0, *log_spaced(4 * _LEAST_CONTEXT, room, self._density.prefixes)]:
                if prefix <= room:
                    yield Composition("prefill", (self._chunk(chunk, prefix),))

    def _several_chunks(self) -> Iterator[Composition]:
        counts = [count for count in log_spaced(2, self._most_seqs, self._density.several) if count > 1]
        totals = log_spaced(4 * _LEAST_CONTEXT, self._config.max_num_batched_tokens, self._density.several)
        for count, total in product(counts, totals):
            if total < 2 * count:
                continue
            for prefix in (0, 8 * _LEAST_CONTEXT):
                yield Composition("chunks", self._chunks(_evenly(total, count), prefix))
            uneven = [*[2] * (count - 1), total - 2 * (count - 1)]
            yield Composition("chunks", self._chunks(uneven, 0))

    def _mixed(self) -> Iterator[Composition]:
        many = self._most_seqs - 1
        if many < 1:
            return
        contexts = self._contexts(3)
        ends = dict.fromkeys((contexts[0], contexts[-1]))
        for batch, context in product(log_spaced(1, many, self._density.mixed), ends):
            decodes = self._fitting(batch, context)
            room = self._config.max_num_batched_tokens - len(decodes)
            for chunk in log_spaced(_LEAST_CONTEXT, min(room, self._most_chunk), self._density.mixed):
                for prefix in (0, 16 * _LEAST_CONTEXT):
                    yield Composition("mixed", (*decodes, self._chunk(chunk, prefix)))

    def _drawn(self) -> Iterator[Composition]:
        """Steps such as a scheduler decides at random, as many as fit out of three times as many tries."""
        found = 0
        for _ in range(3 * self._density.drawn):
            if found == self._density.drawn:
                return
            point = self._draw_one()
            if point is not None and point.fits(self._config):
                found += 1
                yield point

    def _draw_one(self) -> Composition | None:
        batch = self._log_uniform(1, self._most_seqs) - int(self._draw.random() < 0.2)
        num_chunks = min(int(self._draw.integers(0, 4)), self._most_seqs - batch)
        decodes = self._fitting(batch, self._log_uniform(_LEAST_CONTEXT, self._most_context)) if batch > 0 else ()
        room = self._config.max_num_batched_tokens - len(decodes)
        chunks = []
        for _ in range(num_chunks):
            if room < 2:
                break
            chunk = self._log_uniform(2, min(room, self._most_chunk))
            prefix = self._log_uniform(1, self._most_context - chunk) if self._draw.random() < 0.5 else 0
            chunks.append(self._chunk(chunk, min(prefix, self._most_context - chunk)))
            room -= chunk
        works = (*decodes, *chunks)
        return Composition("drawn", works) if works else None

    def _batch(self, kind: str, batch: int, context: int) -> Iterator[Composition]:
        works = self._fitting(batch, context)
        if len(works) == batch:
            yield Composition(kind, works)

    def _fitting(self, batch: int, context: int) -> tuple[SequenceWork, ...]:
        """Decodes around that context, or around the longest with which they fit the pool; none if none does."""
        size, usable = self._config.block_size, self._config.num_gpu_blocks - 1
        longest = usable // batch * size
        if longest < 2:
            return ()
        mean = min(context, longest)
        spread = min(_JITTER * mean, longest - mean, self._config.max_model_len - mean)
        contexts = self._draw.uniform(mean - spread, mean + spread, batch)
        return _decodes([max(2, round(each)) for each in contexts])

    def _contexts(self, count: int) -> list[int]:
        return log_spaced(min(_LEAST_CONTEXT, self._most_context), self._most_context, count)

    def _chunks(self, sizes: Sequence[int], prefix: int) -> tuple[SequenceWork, ...]:
        return tuple(self._chunk(size, prefix) for size in sizes)

    def _chunk(self, num_tokens: int, prefix: int) -> SequenceWork:
        """A chunk; one of three does not end its prompt, as where the budget cuts it."""
        return SequenceWork(num_tokens, prefix, samples=bool(self._draw.random() < 2 / 3))

    def _log_uniform(self, least: int, most: int) -> int:
        if most <= least:
            return max(most, 0)
        return round(float(np.exp(self._draw.uniform(np.log(least), np.log(most)))))


def log_spaced(least: int, most: int, count: int) -> list[int]:
    """Whole numbers from ``least`` to ``most``, both included, each about as many times the one before.

    Fewer than ``count`` where there are not so many; none if ``most`` is below ``least``.
    """
    if most < least or count < 1:
        return []
    values = np.geomspace(max(least, 1), max(most, 1), count) if count > 1 else np.array([float(most)])
    return sorted({round(value) for value in values.tolist()})


def _decodes(contexts: Iterable[int]) -> tuple[SequenceWork, ...]:
    """Decodes whose context, own new token included, is that long."""
    return tuple(SequenceWork(1, context - 1) for context in contexts)


def _evenly(total: int, count: int) -> list[int]:
    return [total // count + (index < total % count) for index in range(count)]


def _spread(values: Sequence[_T], count: int) -> list[_T]:
    """``count`` of the values, evenly over all, or all."""
    if len(values) <= count:
        return list(values)
    return [values[round(index)] for index in np.linspace(0, len(values) - 1, count)]
