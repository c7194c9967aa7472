"""What a report must say besides the numbers: what was simulated, with which settings, from where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from windtunnel.sim.cost.evidence import UNCALIBRATED, in_words
from windtunnel.sim.records import IntArray


class ResolvedValue(NamedTuple):
    """One setting as the run used it."""

    section: str
    key: str
    value: Any
    source: str
    """Where the value comes from: a file and line, a flag, a default of some version, a formula."""


@dataclass(frozen=True, slots=True)
class ReportContext:
    """Names and origins that the records do not hold.  Empty texts and lists are left out of reports."""

    title: str = "Simulated run"
    model: str = ""
    gpu: str = ""
    """Kind and number of GPUs."""
    engine: str = ""
    """The engine and the version whose behaviour was simulated, such as ``vLLM 0.32``."""
    cost_model: str = ""
    evidence: str = UNCALIBRATED
    """What stands behind the step times (``windtunnel.sim.cost.evidence``), which every output says: ``measured``,
    ``composed`` or ``uncalibrated``."""
    cost: Mapping[str, Any] = field(default_factory=dict)
    """What the cost model says of itself (``CostModel.describe``)."""
    calibrated_by: tuple[str, ...] = ()
    """Where step times of profiles come from and how far off they are, in sentences; empty where they are not."""
    resolved: tuple[ResolvedValue, ...] = ()
    """All settings, in the order in which they are to be shown."""
    seed: int | None = None
    version: str = ""
    """Of windtunnel."""
    workload: Mapping[str, Any] = field(default_factory=dict)
    """What was asked: source, number of requests, lengths, rate."""
    notes: tuple[str, ...] = ()
    """What was decided on the way (unit of time, rows left out), in sentences."""
    warnings: tuple[str, ...] = ()
    """What a reader must know before believing the numbers, besides the summary's own."""
    labels: tuple[str, ...] | None = None
    """Names of the requests, by row; None calls them by number."""

    tenants: tuple[str, ...] = ()
    """Names of the tenants."""
    tenant: IntArray | None = None
    """Per row the place of its tenant in ``tenants``; None where there are none."""

    def __post_init__(self) -> None:
        in_words(self.evidence)

    @property
    def calibrated(self) -> bool:
        """Whether step times are those of fitted profiles, be they measured or composed."""
        return self.evidence != UNCALIBRATED

    @property
    def calibration(self) -> str:
        """``measured``, ``composed, not measured`` or ``uncalibrated``."""
        return in_words(self.evidence)

    def label(self, row: int) -> str:
        """The name of a request."""
        return f"#{row}" if self.labels is None else self.labels[row]
