"""What the reports of a validation say besides its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from windtunnel.reports.context import ReportContext


@dataclass(frozen=True, slots=True)
class ValidationContext:
    """What was simulated, what was measured, and what was taken for granted."""

    simulated: ReportContext
    live_source: str
    """The tool that measured."""
    live_name: str
    """The address, or the file."""
    assumptions: tuple[str, ...] = ()
    """In sentences."""
    server_facts: tuple[tuple[str, str], ...] = ()
    """What the server says of itself: names and values."""
