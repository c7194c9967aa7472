"""How much stands behind a cost model's step times, in three grades that every output tells apart.

Read from ``CostModel.describe()`` as plain data, never from the name of a profile, so that a saved run says the same as
a fresh one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MEASURED = "measured"
"""Fitted to whole steps that were measured or recorded on that card with that model."""
COMPOSED = "composed"
"""Fitted to steps that were put together: from tables of kernels, or carried over from another card or model."""
UNCALIBRATED = "uncalibrated"
"""Not fitted: a formula over datasheet peaks, or numbers that were given."""
GRADES = (MEASURED, COMPOSED, UNCALIBRATED)
"""From what says most of real steps to what says least."""

CARRIED_OVER = "carried_over"
"""Key of a provenance that says why a profile is used for something else than it was made for."""
_NOT_MEASURED = ("composed", "transferred")
"""Sources of profiles of which no whole step was measured on their own card with their own model."""
_WORDS = {MEASURED: "measured", COMPOSED: "composed, not measured", UNCALIBRATED: "uncalibrated"}


def evidence_of(cost: Mapping[str, Any]) -> str:
    """The grade of a described cost model."""
    if not cost.get("calibrated"):
        return UNCALIBRATED
    return evidence_of_provenance(_table(cost.get("provenance")))


def evidence_of_provenance(provenance: Mapping[str, Any]) -> str:
    """The grade of a fitted profile; ``windtunnel fit`` takes measured steps, so that other sources are measured."""
    is_composed = provenance.get("source") in _NOT_MEASURED or bool(provenance.get(CARRIED_OVER))
    return COMPOSED if is_composed else MEASURED


def evidence_of_run(described: Mapping[str, Any]) -> str:
    """The grade of a run's step times, from its settings as ``Resolved.describe`` has them.

    A run that was saved without it is told by what its cost model says of itself.
    """
    told = _table(described.get("metadata")).get("cost_model_evidence")
    return str(told) if told in GRADES else evidence_of(_table(described.get("cost")))


def evidence_of_summary(summary: Mapping[str, Any]) -> str:
    """The same from a run's flat summary; one without it is not taken to be measured."""
    told = summary.get("cost_model_evidence")
    if told in GRADES:
        return str(told)
    return COMPOSED if summary.get("cost_model_calibrated") else UNCALIBRATED


def different(grades: Iterable[str]) -> str:
    """What to know of things whose grades differ, as the beginning of a sentence; empty where they do not."""
    known = set(grades)
    found = [grade for grade in GRADES if grade in known]
    kinds = "; ".join(map(in_words, found))
    return f"Step times rest on different evidence ({kinds})" if len(found) > 1 else ""


def weakest(grades: Iterable[str]) -> str:
    """What can be said of all of them together; uncalibrated if there are none.

    Raises ValueError for what is no grade.
    """
    return GRADES[max(map(GRADES.index, grades), default=len(GRADES) - 1)]


def in_words(grade: str) -> str:
    """As badges and lines of text say it: ``measured``, ``composed, not measured`` or ``uncalibrated``.

    Raises ValueError for what is no grade.
    """
    if grade not in _WORDS:
        raise ValueError(f"evidence must be one of {', '.join(GRADES)}, got {grade!r}")
    return _WORDS[grade]


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
