"""What handing KV caches from prefill to decode replicas took: waits, copies, and how busy the links were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from windtunnel.sim.fleet.records import TransferTable
from windtunnel.sim.metrics.load import ratio
from windtunnel.sim.metrics.sample import LatencyStats, latency_stats, sample
from windtunnel.sim.records import IntArray, Records


@dataclass(frozen=True, slots=True)
class TransferStats:
    """All transfers of a run that came to their end."""

    num_transfers: int
    num_bytes: int
    """Over one link each (that of one GPU)."""
    mean_bytes: float | None
    seat_wait: LatencyStats
    """From the end of the prefill until a decode replica had a seat and blocks for the prompt."""
    link_wait: LatencyStats
    """From then until the links were free."""
    copy: LatencyStats
    """The copy itself, its latency included."""
    hand_over: LatencyStats
    """All of it: from the end of the prefill until the cache was there.  So long the prefill replica keeps its blocks.
    """
    busiest_link_share: float | None
    """Share of the time in which the busiest replica's link was copying, in either direction."""


def transfer_stats(records: Records, start_ns: int, end_ns: int, percentiles: Sequence[float]) -> TransferStats | None:
    """The transfers of a run between two times; None where no cache was to be handed over."""
    table = None if records.fleet is None else records.fleet.transfers
    if table is None:
        return None
    done = table.end_ns >= 0
    num_bytes = int(table.num_bytes[done].sum())

    def spent(first_ns: IntArray, last_ns: IntArray) -> LatencyStats:
        return latency_stats(sample((last_ns - first_ns)[done]), percentiles)

    return TransferStats(
        num_transfers=int(done.sum()),
        num_bytes=num_bytes,
        mean_bytes=ratio(num_bytes, int(done.sum())),
        seat_wait=spent(table.prefilled_ns, table.asked_ns),
        link_wait=spent(table.asked_ns, table.start_ns),
        copy=spent(table.start_ns, table.end_ns),
        hand_over=spent(table.prefilled_ns, table.end_ns),
        busiest_link_share=_busiest(table, len(records.replicas), start_ns, end_ns),
    )


def _busiest(table: TransferTable, num_replicas: int, start_ns: int, end_ns: int) -> float | None:
    last_ns = np.where(table.end_ns < 0, end_ns, table.end_ns)
    lasted = (np.minimum(last_ns, end_ns) - np.maximum(table.start_ns, start_ns)).clip(min=0)
    busy = [
        float(np.bincount(ends, lasted, minlength=num_replicas).max(initial=0.0))
        for ends in (table.sender, table.receiver)
    ]
    return ratio(max(busy), end_ns - start_ns)
