"""What a cost model says of its own error, in words for every output that shows what it priced.

All of it is read from ``CostModel.describe()`` as plain data, so that a saved run says the same as a fresh one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from windtunnel.sim.cost.evidence import CARRIED_OVER, COMPOSED, evidence_of

_NOT_COMPARED = "no real steps were held against it"


class CostStatement(NamedTuple):
    """Where the step times of a profile come from, and how far off they are."""

    origin: str
    """Such as "composed from kernel tables, not measured end to end"."""
    p50_percent: float | None
    """Absolute error of a step's time: half of the steps are nearer.  None if that is not known."""
    p90_percent: float | None
    """Nine of ten steps are nearer."""
    rests_on: str
    """Against which steps that was measured; why it was not, where it is not known."""

    @property
    def error(self) -> str:
        """The error in a few words."""
        if self.p50_percent is None or self.p90_percent is None:
            return f"not known: {self.rests_on or _NOT_COMPARED}"
        return f"median {self.p50_percent:.1f} %, nine of ten within {self.p90_percent:.1f} %, against {self.rests_on}"

    def spread(self, step_s: float) -> str:
        """What that means for a step which was priced at ``step_s``: ``14.6 ms ± 0.4 ms, …``; empty if not known."""
        if self.p50_percent is None or self.p90_percent is None:
            return ""
        half_s, most_s = (step_s * percent / 100 for percent in (self.p50_percent, self.p90_percent))
        digits = _decimals(min(half_s, step_s))
        return (
            f"{1e3 * step_s:.{digits}f} ms, ± {1e3 * half_s:.{digits}f} ms for half of such steps and "
            f"± {1e3 * most_s:.{digits}f} ms for nine of ten"
        )


def statement_of(cost: Mapping[str, Any]) -> CostStatement | None:
    """What a described cost model states; None for an uncalibrated one.

    ``stated_error`` of the provenance goes first: it says how far off a profile is against real steps of a like case.
    Else it is the error on measured steps that the fit did not see.
    """
    if not cost.get("calibrated"):
        return None
    provenance = _table(cost.get("provenance"))
    origin = str(provenance.get("statement") or _ORIGINS.get(str(provenance.get("source")), "fitted to measured steps"))
    if provenance.get(CARRIED_OVER):
        origin = f"{origin.strip().rstrip('.')}, carried over to another deployment"
    stated = _table(provenance.get("stated_error"))
    p50, p90 = _percent(stated.get("p50_percent")), _percent(stated.get("p90_percent"))
    if p50 is not None and p90 is not None:
        return CostStatement(_inside(origin), p50, p90, _inside(str(stated.get("rests_on") or "real steps")))
    if stated or evidence_of(cost) == COMPOSED:
        return CostStatement(_inside(origin), None, None, _inside(str(stated.get("rests_on") or "")))
    whole = next((line for line in _tables(cost.get("errors")) if line.get("regime") == "all"), {})
    p50, p90 = _percent(whole.get("p50_percent")), _percent(whole.get("p90_percent"))
    if p50 is None or p90 is None:
        return CostStatement(_inside(origin), None, None, "")
    return CostStatement(
        _inside(origin), p50, p90, f"{whole.get('num_steps', 0):,} measured steps of shapes left out of the fit"
    )


def sentences(
    cost: Mapping[str, Any], median_step_s: float | None = None, *, has_noise: bool = False
) -> tuple[str, ...]:
    """What an output says of a profile, one sentence after the other; nothing of an uncalibrated cost model.

    ``median_step_s`` is the length of a typical step of the run, for what the error means there.
    """
    statement = statement_of(cost)
    if statement is None:
        return ()
    said = [f"Step times: {statement.origin}.", _error_sentence(statement)]
    if median_step_s is not None and statement.p50_percent is not None:
        said.append(f"The median step of this run is {statement.spread(median_step_s)}.")
    if has_noise:
        said.append(noise_sentence(cost))
    return tuple(said)


def noise_sentence(cost: Mapping[str, Any]) -> str:
    """What the noise of a profile is, and what it is not."""
    scatter = _table(_table(cost.get("provenance")).get("scatter"))
    if not scatter:
        return "Steps scatter around that by what the profile states, with the same mean (noise)."
    if not scatter.get("sigmas"):
        return "The profile knows no scatter of its steps, so that noise adds nothing."
    return (
        f"Steps scatter around that, with the same mean, as {scatter.get('rests_on')} (noise); that the profile as a "
        "whole may be off is not in it."
    )


def _error_sentence(statement: CostStatement) -> str:
    return f"Their error{' is' if statement.p50_percent is None else ':'} {statement.error}."


def shown_name(metadata: Mapping[str, Any]) -> str:
    """What a run's cost model is called: its kind, and of a profile which one."""
    profile = metadata.get("cost_model_profile")
    return str(metadata["cost_model"]) if profile is None else f"profile {profile}"


def summary_keys(cost: Mapping[str, Any]) -> dict[str, Any]:
    """The same for the JSON summary, flat, with the grade of its evidence; None where nothing is stated."""
    statement = statement_of(cost)
    known = statement is not None and statement.p50_percent is not None
    return {
        "cost_model_evidence": evidence_of(cost),
        "cost_model_statement": None if statement is None else statement.origin,
        "step_time_error_p50_percent": statement.p50_percent if statement is not None else None,
        "step_time_error_p90_percent": statement.p90_percent if statement is not None else None,
        "step_time_error_rests_on": statement.rests_on if statement is not None and known else None,
    }


_ORIGINS = {
    "measured": "fitted to steps that were measured",
    "recorded": "fitted to steps that were recorded from a running engine",
    "composed": "composed from kernel tables, not measured end to end",
    "transferred": "carried over from another card or model, not measured",
}


def _inside(text: str) -> str:
    """A sentence as a part of another one."""
    text = text.strip().rstrip(".")
    is_word = len(text) > 1 and text[0].isupper() and text[1].islower()
    first = text.split(" ", 1)[0]
    return text[0].lower() + text[1:] if is_word and first in _BEGINNINGS else text


_BEGINNINGS = frozenset({"Composed", "Carried", "Fitted", "Measured", "Recorded", "Transferred", "Scaled", "The", "A"})
"""First words of a statement that are no names, so that they lose their capital in the middle of a sentence."""


def _decimals(smallest_s: float) -> int:
    """Digits behind the point of milliseconds so that the smallest number is no zero."""
    for digits, limit_s in ((1, 1e-3), (2, 1e-5)):
        if smallest_s >= limit_s:
            return digits
    return 3


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _tables(value: object) -> list[Mapping[str, Any]]:
    return [_table(item) for item in value] if isinstance(value, list | tuple) else []


def _percent(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
