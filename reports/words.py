"""Numbers as people read them; the same everywhere in a report as in the sentences of the summary."""

from __future__ import annotations

from windtunnel.sim.metrics.words import (
    NOTHING,
    count,
    digits,
    milliseconds,
    nanoseconds,
    percent,
    plural,
    seconds,
    verb,
)

__all__ = ["NOTHING", "count", "digits", "milliseconds", "nanoseconds", "percent", "plural", "seconds", "verb"]
