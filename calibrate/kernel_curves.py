"""Times between the measured sizes of kernels: curves and planes that never fall, and what they are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.kernel_tables import KernelTableError, Rows

Floats = NDArray[np.float64]


def never_falling(seconds: Floats, axis: int = 0) -> Floats:
    """The middle between the running maximum and the running minimum from behind: the same where nothing falls."""
    highest = np.maximum.accumulate(seconds, axis=axis)
    lowest = np.flip(np.minimum.accumulate(np.flip(seconds, axis), axis=axis), axis)
    return (highest + lowest) / 2


class Line:
    """Seconds over one size: straight between measured sizes, never falling (``never_falling``), and 0 where it is 0.

    Below the smallest size its time holds, as a
    kernel has its fixed part.  Above the largest the curve goes on with its last slope, or (``cautious``) with the mean
    slope from 0 where that is steeper, so that a curve which happens to end flat does not promise work for nothing.
    """

    def __init__(
        self, sizes: Sequence[int] | NDArray[Any], seconds: Sequence[float] | NDArray[Any], *, cautious: bool = True
    ) -> None:
        self.sizes, places = np.unique(np.asarray(sizes, np.float64), return_inverse=True)
        sums, counts = np.bincount(places, np.asarray(seconds, np.float64)), np.bincount(places)
        self.seconds = never_falling(sums / counts)  # a size that was measured twice counts with its mean
        mean = self.seconds[-1] / self.sizes[-1]
        last = mean
        if len(self.sizes) > 1:
            last = (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
        self._slope = max(mean, last) if cautious else last

    def at(self, sizes: Any) -> Floats:
        """Seconds for each of ``sizes``."""
        sizes = np.asarray(sizes, np.float64)
        beyond = np.maximum(sizes - self.sizes[-1], 0.0) * self._slope
        return np.where(sizes > 0, np.interp(sizes, self.sizes, self.seconds) + beyond, 0.0)


class Plane:
    """Seconds over sequences and the context that they read together, never falling in either.

    Made of times for some batches of equally long sequences.  Along the context of one batch straight between measured
    ones; straight again between batches, at the same sum of contexts.

    ``by_mean``: between batches at the same mean context instead.  It still never falls with context, nor with
    sequences that are as long as the others; short ones beside long ones can make it less, which is what kernels do
    that take as long as their longest sequence.
    """

    def __init__(
        self, batches: NDArray[Any], contexts: NDArray[Any], seconds: Floats, *, by_mean: bool = False
    ) -> None:
        self.by_mean = by_mean
        self.batches = np.unique(batches).astype(np.float64)
        sizes = contexts if by_mean else batches * contexts
        self.contexts = np.unique(np.concatenate([[1.0], sizes.astype(np.float64)]))
        rows = [
            Line(contexts[batches == batch], seconds[batches == batch], cautious=False).at(
                self.contexts if by_mean else np.maximum(self.contexts / batch, 1.0)
            )
            for batch in self.batches
        ]
        self.seconds = never_falling(never_falling(np.array(rows), axis=0), axis=1)

    def at(self, batches: Any, contexts: Any) -> Floats:
        """Seconds for ``batches`` sequences that read ``contexts`` tokens in all; 0 where there are none."""
        batches, contexts = np.asarray(batches, np.float64), np.asarray(contexts, np.float64)
        if self.by_mean:
            contexts = contexts / np.maximum(batches, 1.0)
        low = np.clip(np.searchsorted(self.batches, batches, side="right") - 1, 0, max(len(self.batches) - 2, 0))
        high = np.minimum(low + 1, len(self.batches) - 1)
        span = self.batches[high] - self.batches[low]
        share = np.where(span > 0, (batches - self.batches[low]) / np.where(span > 0, span, 1.0), 0.0)
        share = np.maximum(share, 0.0)  # above the largest batch the last slope goes on
        low_s, high_s = self._along(low, contexts), self._along(high, contexts)
        return np.where(batches > 0, low_s + share * (high_s - low_s), 0.0)

    def _along(self, rows: NDArray[Any], contexts: Floats) -> Floats:
        if len(self.contexts) == 1:
            return np.asarray(self.seconds[rows, 0])
        low = np.clip(np.searchsorted(self.contexts, contexts, side="right") - 1, 0, len(self.contexts) - 2)
        width = self.contexts[low + 1] - self.contexts[low]
        share = np.maximum((contexts - self.contexts[low]) / width, 0.0)
        first, second = self.seconds[rows, low], self.seconds[rows, low + 1]
        return np.asarray(first + share * (second - first))


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Seconds of one layer's attention over prompt chunks: a sum that never falls in any of them.

    fixed + per chunk + per query token + per query-key pair + per token of prefix; a chunk counts at least
    ``least_rows`` queries against its prefix, as a kernel works on tiles of queries and a short chunk leaves most of
    the card idle.
    """

    fixed_s: float
    seq_s: float
    tokens: tuple[tuple[float, float], ...]
    """(from, seconds a token): slopes that add up from there on."""
    pairs: tuple[tuple[float, float], ...]
    prefix_s: float
    least_rows: int

    def at(self, num_seqs: Any, tokens: Any, prefix: Any, pairs: Any) -> Floats:
        """Seconds for ``num_seqs`` chunks of ``tokens`` in all behind ``prefix`` tokens in all; 0 without chunks."""
        num_seqs, tokens, prefix, pairs = (np.asarray(each, np.float64) for each in (num_seqs, tokens, prefix, pairs))
        pairs = np.maximum(pairs, self.least_rows * prefix)
        total = self.fixed_s + self.seq_s * num_seqs + self.prefix_s * prefix
        for start, slope_s in self.tokens:
            total = total + slope_s * np.maximum(tokens - start, 0.0)
        for start, slope_s in self.pairs:
            total = total + slope_s * np.maximum(pairs - start, 0.0)
        return np.where(num_seqs > 0, total, 0.0)


_TOKEN_KNOTS = (0.0, 128.0, 512.0)
_PAIR_KNOTS = (0.0, 2e5, 2e6, 2e7)
_LEAST_ROWS = (0, 64, 128, 192, 256, 384, 512)
TILE_ROWS = 128
"""Queries of a tile in the attention kernels of FlashAttention and FlashInfer."""


def fit_prefill(num_seqs: Any, tokens: Any, prefix: Any, seconds: Floats) -> PrefillCurve:
    """The PrefillCurve nearest to measured calls of equally long chunks (``tokens`` and ``prefix`` of each).

    Least squares of relative errors with coefficients of at least 0; ``least_rows`` is the best of some, or a tile's
    128 where no call had a prefix.
    """
    num_seqs, tokens, prefix = (np.asarray(each, np.float64) for each in (num_seqs, tokens, prefix))
    pairs = num_seqs * (tokens * prefix + tokens * (tokens + 1) / 2)
    rows = _LEAST_ROWS if (prefix > 0).any() else (TILE_ROWS,)
    fits = [_fit_prefill(num_seqs, num_seqs * tokens, num_seqs * prefix, pairs, seconds, least) for least in rows]
    return min(fits, key=lambda fit: fit[0])[1]


def _fit_prefill(
    num_seqs: Floats, tokens: Floats, prefix: Floats, pairs: Floats, seconds: Floats, least_rows: int
) -> tuple[float, PrefillCurve]:
    from scipy.optimize import nnls

    counted = np.maximum(pairs, least_rows * prefix)
    one_count = len(np.unique(num_seqs)) == 1
    columns = [
        np.ones_like(seconds),
        np.zeros_like(seconds) if one_count else num_seqs,
        prefix,
        *(np.maximum(tokens - knot, 0.0) for knot in _TOKEN_KNOTS),
        *(np.maximum(counted - knot, 0.0) for knot in _PAIR_KNOTS),
    ]
    design = np.stack(columns, axis=1) / seconds[:, None]
    scale = np.where(design.any(axis=0), np.abs(design).max(axis=0), 1.0)
    weights = nnls(design / scale, np.ones(len(seconds)))[0] / scale
    error = float(np.abs(design @ weights - 1.0).mean())
    slopes = weights[3:].tolist()
    return error, PrefillCurve(
        float(weights[0]),
        float(weights[1]),
        tuple(zip(_TOKEN_KNOTS, slopes[: len(_TOKEN_KNOTS)], strict=True)),
        tuple(zip(_PAIR_KNOTS, slopes[len(_TOKEN_KNOTS) :], strict=True)),
        float(weights[2]),
        least_rows,
    )


class GemmTable:
    """Times of matrix products of any size, from those of the measured ones.

    For a weight (n, k) that was not measured, the efficiency of the four measured ones around it is interpolated over
    the logarithms of n and k: their time as a multiple of the longer of reading all bytes at ``bandwidth`` and
    computing at ``flops_per_s``.  Outside of the measured sizes the nearest one's efficiency holds.

    ``cold``: no product is faster than reading its weight at the best rate seen for weights of at least
    ``COLD_BYTES``, which no L2 cache holds; a table measured in a loop reads smaller ones from there.
    """

    def __init__(
        self, rows: Rows, *, bandwidth_bytes_per_s: float, flops_per_s: float, weight_bytes: float, cold: bool = True
    ) -> None:
        self.rows = rows
        self._bandwidth, self._flops, self._weight_bytes = bandwidth_bytes_per_s, flops_per_s, weight_bytes
        self._widths, self._depths = np.unique(rows["n"]), np.unique(rows["k"])
        self.sizes = np.unique(rows["m"])
        places = tuple(
            np.searchsorted(values, rows[name])
            for name, values in (("n", self._widths), ("k", self._depths), ("m", self.sizes))
        )
        self._seconds = np.full((len(self._widths), len(self._depths), len(self.sizes)), np.nan)
        self._seconds[places] = rows.seconds
        self.stream_bytes_per_s = self._stream_rate() if cold else None

    def curve(self, n: int, k: int) -> Line:
        """Seconds over the rows m of a product with a weight of ``n`` columns and depth ``k``."""
        ratio = np.zeros(len(self.sizes))
        total = np.zeros(len(self.sizes))
        for row, row_share in _around(self._widths, n):
            for depth, depth_share in _around(self._depths, k):
                measured = self._seconds[row, depth]
                share = row_share * depth_share * np.isfinite(measured)
                ideal = self._ideal_s(int(self._widths[row]), int(self._depths[depth]))
                ratio += np.where(share > 0, share * np.log(np.where(np.isfinite(measured), measured, 1.0) / ideal), 0)
                total += share
        if not total.any():
            raise KernelTableError(f"{self.rows.name}: no matrix product near n = {n}, k = {k}")
        known = total > 0
        seconds = np.exp(ratio[known] / total[known]) * self._ideal_s(n, k)[known]
        if self.stream_bytes_per_s is not None:
            seconds = np.maximum(seconds, n * k * self._weight_bytes / self.stream_bytes_per_s)
        return Line(self.sizes[known], seconds)

    def distance(self, n: int, k: int) -> float:
        """How far the nearest measured weight is: the larger of the ratios of n and k, 1 where it was measured."""
        return max(_ratio(self._widths, n), _ratio(self._depths, k))

    def _ideal_s(self, n: int, k: int) -> Floats:
        m = self.sizes.astype(np.float64)
        moved = n * k * self._weight_bytes + 2.0 * m * (n + k)  # activations in bf16
        return np.maximum(moved / self._bandwidth, 2.0 * m * n * k / self._flops)

    def _stream_rate(self) -> float | None:
        held = np.multiply.outer(self._widths, self._depths) * self._weight_bytes
        large = held >= COLD_BYTES
        if not large.any():
            return None
        few = self._seconds[:, :, self.sizes <= _STREAM_ROWS][large]
        return float((held[large][:, None] / np.where(np.isfinite(few), few, np.inf)).max())


COLD_BYTES = 512 * 2**20
"""Weights of this size and more come from memory, whatever a loop keeps in the L2 cache (at most 126 MB on B300)."""
_STREAM_ROWS = 64


def _around(values: NDArray[Any], wanted: int) -> list[tuple[int, float]]:
    """The places of the neighbours of ``wanted`` with their shares, over logarithms."""
    place = int(np.searchsorted(values, wanted))
    if place == len(values):
        return [(place - 1, 1.0)]
    if values[place] == wanted or place == 0:
        return [(place, 1.0)]
    low, high = np.log(values[place - 1]), np.log(values[place])
    share = float((np.log(wanted) - low) / (high - low))
    return [(place - 1, 1.0 - share), (place, share)]


def _ratio(values: NDArray[Any], wanted: int) -> float:
    ratios = values / wanted
    return float(np.maximum(ratios, 1.0 / ratios).min())


def cold_decodes(rows: Rows, kv_bytes_per_token: float) -> Rows:
    """Decode attention whose cache is read from memory, as in a step, where the weights have passed in between.

    A table measured in a loop reads caches that fit the second-level cache from there.  So no call is faster than the
    same batch with one token of context and its cache at the rate at which more context was read, the median among
    caches of at least ``COLD_KV_BYTES``.  Each batch is continued at that rate to the largest sum of contexts.
    """
    batch, context = rows["batch"].astype(np.float64), rows["context"].astype(np.float64)
    rate = _cold_rate(rows, kv_bytes_per_token)
    if rate is None:
        return rows
    columns, seconds = [], []
    most = float((batch * context).max())
    for size in rows.values("batch"):
        own = batch == size
        order = np.argsort(context[own])
        contexts, measured = context[own][order], rows.seconds[own][order]
        read_s = size * contexts * kv_bytes_per_token / rate
        cold = np.maximum(measured, measured[0] + read_s - read_s[0])
        longest = np.ceil(most / size)
        if contexts[-1] < longest:
            contexts = np.append(contexts, longest)
            cold = np.append(cold, cold[-1] + size * longest * kv_bytes_per_token / rate - read_s[-1])
        columns.append(np.stack([np.full(len(contexts), size), contexts], axis=1))
        seconds.append(cold)
    sizes = np.concatenate(columns).astype(np.int64)
    return Rows({"batch": sizes[:, 0], "context": sizes[:, 1]}, np.concatenate(seconds), f"{rows.source}, cold")


COLD_KV_BYTES = 256 * 2**20


def _cold_rate(rows: Rows, kv_bytes_per_token: float) -> float | None:
    """The median rate between neighbouring contexts of one batch, both beyond any second-level cache."""
    rates = []
    for size in rows.values("batch"):
        own = rows["batch"] == size
        order = np.argsort(rows["context"][own])
        held = size * rows["context"][own][order] * kv_bytes_per_token
        seconds = rows.seconds[own][order]
        for low, high in zip(range(len(held) - 1), range(1, len(held)), strict=True):
            if held[low] >= COLD_KV_BYTES and seconds[high] > seconds[low]:
                rates.append((held[high] - held[low]) / (seconds[high] - seconds[low]))
    return float(np.median(rates)) if rates else None


def rows_of_heads(
    tables: Mapping[str, Rows], kv_dtype: str, sizes: tuple[str, str], heads: tuple[int, int, int]
) -> Rows:
    """The rows of ``tables[kv_dtype]`` for (query heads, KV heads, head_dim); between two numbers of query heads where
    that was not measured, at the sizes that both have.

    Raises KernelTableError where there are none.
    """
    num_heads, num_kv_heads, head_dim = heads
    rows = tables.get(kv_dtype)
    if rows is None:
        raise KernelTableError(
            f"no attention with a cache of {kv_dtype}; the tables have {', '.join(tables) or 'none'}"
        )
    like = rows.where(num_kv_heads=num_kv_heads, head_dim=head_dim)
    if like is None:
        raise KernelTableError(f"{rows.name}: no attention of {num_kv_heads} KV heads of {head_dim}")
    exact = like.where(num_heads=num_heads)
    if exact is not None:
        return exact
    known = [each for each in like.values("num_heads") if each % num_kv_heads == 0]
    below, above = ([each for each in known if (each < num_heads) == less] for less in (True, False))
    if not below or not above:
        raise KernelTableError(f"{rows.name}: {num_heads} query heads are outside of the measured {known}")
    return _between(like, sizes, max(below), min(above), num_heads)


def _between(rows: Rows, sizes: tuple[str, str], low: int, high: int, wanted: int) -> Rows:
    parts = []
    for heads in (low, high):
        part = rows.take(rows["num_heads"] == heads)
        keys = [tuple(key) for key in np.stack([part[size] for size in sizes], axis=1).tolist()]
        parts.append(dict(zip(keys, part.seconds.tolist(), strict=True)))
    both = sorted(parts[0].keys() & parts[1].keys())
    share = (wanted - low) / (high - low)
    seconds = np.array([(1.0 - share) * parts[0][key] + share * parts[1][key] for key in both])
    columns = {size: np.array([key[place] for key in both], np.int64) for place, size in enumerate(sizes)}
    return Rows(columns, seconds, f"{rows.source}, between {low} and {high} query heads")
