"""What handing KV caches over took, as rows for text, Markdown and HTML, and in a sentence."""

from __future__ import annotations

from collections.abc import Iterator

from windtunnel.reports.words import count, milliseconds, percent
from windtunnel.sim.metrics.sample import LatencyStats
from windtunnel.sim.metrics.summary import percent_word
from windtunnel.sim.metrics.transfers import TransferStats

BUSY_LINK = 0.8
"""Share of the time from which on a link is said to be what requests wait for."""


def transfer_rows(of: TransferStats) -> Iterator[tuple[str, str]]:
    """Caches that went from prefill to decode replicas, and what that took."""
    yield "KV caches handed over", f"{of.num_transfers:,}"
    if of.mean_bytes is not None:
        yield "Mean size, over one GPU's link", f"{count(of.mean_bytes / 2**20)} MiB"
    for name, stats in (
        ("Wait for a seat and blocks", of.seat_wait),
        ("Wait for the link", of.link_wait),
        ("Copy", of.copy),
        ("Whole hand-over", of.hand_over),
    ):
        yield name, _mean_and_high(stats)
    yield "Busiest link", f"{percent(of.busiest_link_share)} of the time"


def transfer_sentences(of: TransferStats) -> Iterator[str]:
    """What requests wait for on their way, where it is worth a word."""
    total_ms, seat_ms, link_ms = of.hand_over.mean_ms, of.seat_wait.mean_ms, of.link_wait.mean_ms
    if total_ms is None or seat_ms is None or link_ms is None:
        return
    yield (
        f"From the end of its prefill a prompt's cache took {milliseconds(total_ms)} on average to be at a decode "
        "replica, and so long its blocks stayed at the prefill replica."
    )
    if seat_ms > total_ms / 2 and seat_ms > 10:
        yield "Most of that was waiting for a seat or for blocks there: decode replicas are what is short."
    elif of.busiest_link_share is not None and of.busiest_link_share > BUSY_LINK:
        yield "The busiest link copied nearly all the time: the network is what is short."


def _mean_and_high(stats: LatencyStats) -> str:
    if not stats.percentiles_ms:
        return f"mean {milliseconds(stats.mean_ms)}"
    level, value = stats.percentiles_ms[-1]
    return f"mean {milliseconds(stats.mean_ms)}, P{percent_word(level)} {milliseconds(value)}"
