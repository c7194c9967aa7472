"""From what was given and read to a request, the plan of it, and what a real start-up says beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from windtunnel import memory_truth as truth
from windtunnel.memory_correction import (
    SPLITS,
    check_corrected,
    check_correction,
    less_sure,
    other_settings,
    read_correction,
)
from windtunnel.memory_inputs import Found, read_deployment_settings, read_log_settings, read_metrics_settings
from windtunnel.memory_settings import check_names, check_refused, request_of
from windtunnel.memory_truth import FormulaCheck
from windtunnel.sim.deployment.gpu import GIB
from windtunnel.sim.deployment.memory import JudgedPlan, plan_memory
from windtunnel.sim.deployment.memory_checks import judge
from windtunnel.sim.deployment.memory_plan import DOES_NOT_START, ESTIMATE_SETTINGS, MemoryPlan, make_plan
from windtunnel.sim.deployment.memory_request import MemoryRequest
from windtunnel.sim.deployment.model import UnsupportedModel, load_model


@dataclass(frozen=True, slots=True)
class Source:
    """What was read, once for all plans of a sweep."""

    found: Found = field(default_factory=Found)
    correction: Mapping[str, Any] | None = None
    deployed_model: str | None = None

    @staticmethod
    def read(
        from_log: str | Path | None,
        from_metrics: str | Path | None,
        from_deployment: str | Path | None,
        correction: str | Path | Mapping[str, Any] | None,
    ) -> Source:
        """Read them all.  Raises MemoryInputUnreadable, and ValueError for what cannot be or excludes each other."""
        if from_log is not None and from_metrics is not None:
            raise ValueError("--from-log and --from-metrics both tell the pool: give one of them")
        deployed = Found() if from_deployment is None else read_deployment_settings(from_deployment)
        real = Found()
        if from_log is not None:
            real = read_log_settings(from_log)
        if from_metrics is not None:
            real = read_metrics_settings(from_metrics)
        learnt = None if correction is None else read_correction(correction)
        if learnt is not None and real.measured is not None:
            raise ValueError("a correction and a measured pool exclude each other: give one of them")
        truth.check_settings(real)
        return Source(deployed.under(real), learnt, deployed.settings.get("model"))


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and what a real start-up says beside it."""

    request: MemoryRequest
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings that were given, not read."""
    found: Found = field(default_factory=Found)
    formula: MemoryPlan | None = None
    """The measured server by the formula, where a pool was read."""
    real: MemoryPlan | None = None
    """The measured server as it was; None for a plan with other settings."""
    formula_check: FormulaCheck | None = None
    learnt_bytes: int | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    disagreements: tuple[str, ...] = ()
    """Why nothing is learnt from the pool that was read: its figures contradict each other."""

    @staticmethod
    def of(given: Mapping[str, Any], source: Source) -> Asked:
        """What is asked for with these settings, those that were read below them.

        Raises ValueError for settings that are unknown, out of range or contradict each other or the real start-up,
        and for a real start-up that cannot have been.
        """
        check_names(given)
        own = {name: value for name, value in given.items() if value is not None}
        found, told = _checked(source, own)
        request, named = _request({**found.taken, **found.settings, **own}, found, own)
        notes = (*found.notes, *told, *named)
        if source.correction is not None:
            asked = _corrected(request, own, source.correction, notes)
        elif found.measured is None:
            asked = Asked(request, own, found, notes=notes)
        else:
            asked = _beside(request, own, found, notes)
        return replace(asked, warnings=(*found.warnings, *asked.warnings))

    def judged(self, *, with_remedies: bool = True) -> JudgedPlan:
        """The plan with its verdict and, ``with_remedies``, what would help."""
        if self.real is None:
            return plan_memory(self.request, with_remedies=with_remedies)
        return truth.judged(
            self.real,
            self.found,
            self.learnt_bytes,
            length_is_taken=self.length_is_taken,
            with_remedies=with_remedies,
        )

    @property
    def length_is_taken(self) -> bool:
        """Whether the max_model_len of a server that was measured is neither read nor given."""
        return self.found.measured is not None and not {"max_model_len"} & {*self.found.settings, *self.given}

    def warned(self, judged: JudgedPlan) -> tuple[str, ...]:
        """All warnings of a plan; what its reason says already is not said again."""
        failure = self.found.failure
        if failure is None or failure.sentence in judged.reason:
            return self.warnings
        if failure.text.rstrip(" .") in judged.reason:
            return (f"The start-up that was read failed just so ({failure.place}).", *self.warnings)
        return (f"The start-up that was read failed.  {failure.sentence}", *self.warnings)

    @property
    def advice(self) -> str:
        """What to do where no remedy is known; empty for the usual words."""
        if self.real is None:
            return ""
        if self.found.failure is None:
            return "" if self.found.later_failure is None else truth.UNKNOWN_LATER_CAUSE
        return "" if judge(self.real).verdict == DOES_NOT_START else truth.UNKNOWN_CAUSE

    @property
    def source(self) -> str:
        """The log or metrics that were read."""
        return self.found.measured.source if self.found.measured else ""

    @property
    def comparison(self) -> dict[str, tuple[float | None, float]]:
        """For each figure of the real start-up its value and the formula's; empty for a plan with other settings."""
        if self.real is None or self.formula is None:
            return {}
        return truth.compare(self.found, self.real, self.formula)

    @property
    def measured_origins(self) -> dict[str, str]:
        """What the figures of a measured plan are from; empty for a plan by the formula."""
        origins = {}
        if self.real is not None and self.formula is not None:
            origins = truth.measured_origins(self.found, self.real, self.formula, length_is_taken=self.length_is_taken)
        for name, setting in (("total_bytes", "gpu_memory_gib"), ("free_bytes", "free_memory_gib")):
            if setting in self.found.settings and setting not in self.given:
                origins[name] = truth.MEASURED
        return origins


def _checked(source: Source, own: Mapping[str, Any]) -> tuple[Found, tuple[str, ...]]:
    """What was read, once it does not contradict what is given, and what had to be assumed."""
    found = source.found
    wanted = own.get("model") or source.deployed_model
    told = truth.check_model(found, wanted)
    truth.check_card(found, own.get("gpu") or found.settings.get("gpu"), own.get("gpu_memory_gib"))
    if found.settings.get("v0") and "engine" not in found.settings and "engine" not in own:
        told += (f"{found.place('v0')} is of the V0 engine, of a release that is not known: {_V0_ENGINE} is taken.",)
        found = replace(found, settings={**found.settings, "engine": _V0_ENGINE})
    elif found.taken and "engine" not in found.settings and "engine" not in own:
        told += (f"{found.taken_why}: {found.taken['engine']} is taken; give --engine.",)
    return found, told


_V0_ENGINE = "vllm-0.8"
"""The oldest release that is known; it still has V0."""


def _request(
    settings: Mapping[str, Any], found: Found, own: Mapping[str, Any]
) -> tuple[MemoryRequest, tuple[str, ...]]:
    """The request, its card's total labelled with what it was read from."""
    if "model" in settings and "model" not in own:
        _check_known(settings["model"], found)
    request, notes = request_of(settings)
    if found.measured is None:
        check_refused(request)
    if "gpu_memory_gib" in found.settings and "gpu_memory_gib" not in own:
        request = replace(request, gpu=replace(request.gpu, memory_source=found.place("gpu_memory_gib")))
    return request, notes


def _check_known(model: str, found: Found) -> None:
    """Raise ValueError for a model that was read and is not known, with the remedy."""
    try:
        load_model(model)
    except UnsupportedModel:
        raise
    except ValueError as error:
        raise ValueError(f"{found.place('model')}: {error}; give --model NAME or the path of its config.json") from None


def _corrected(
    request: MemoryRequest, own: Mapping[str, Any], learnt: Mapping[str, Any], notes: tuple[str, ...]
) -> Asked:
    check_correction(learnt, request)
    request = replace(request, correction_bytes=learnt["correction_bytes"])
    request = replace(request, correction_differs=less_sure(learnt, make_plan(request)))
    plan = make_plan(request)
    check_corrected(plan)
    return Asked(request, own, notes=(*notes, *other_settings(learnt, plan)))


def _beside(request: MemoryRequest, own: Mapping[str, Any], found: Found, notes: tuple[str, ...]) -> Asked:
    """The measured pool itself, or the formula corrected by it where a setting is not as the server had it."""
    differs = truth.differences(found.settings, own)
    as_it_was = request if not differs else _request({**found.taken, **own, **found.settings}, found, own)[0]
    formula = make_plan(as_it_was)
    real = truth.measured_plan(as_it_was, found, formula)
    truth.check_pool(found, real)
    stated = {**found.settings, **own}
    is_taken = "max_model_len" not in stated
    notes += (truth.taken_length(found, real),) if is_taken else ()
    check = truth.check_formula(found, real, formula, stated)
    disagreeing = tuple(truth.disagreements(found, real, length_is_taken=is_taken))
    gap = None if disagreeing else truth.gap(real, formula)
    sentence = check.sentence if check else ""
    refused = truth.refused_though_it_ran(found, real, length_is_taken=is_taken)
    warnings = (*((sentence,) if sentence else ()), *refused, *disagreeing)
    if not differs:
        request = replace(request, measured=found.measured)
        notes += truth.small_margin(found, real)
        length = found.facts.get("max_concurrency_tokens")
        if length not in (None, real.settings.max_model_len):
            notes += (
                f"The measured concurrency is for {length:,} tokens a request, not for "
                f"{real.settings.max_model_len:,}: it is not compared.",
            )
        return Asked(request, own, found, formula, real, check, gap, warnings, notes, disagreeing)
    moved = [name for name in differs if name in SPLITS]
    learnt = None if moved else gap
    why = "its parallelism was another" if moved else "its KV cache was given"
    how = (
        f"which that server says nothing of, as {'its figures disagree' if disagreeing else why}"
        if learnt is None
        else f"corrected by {learnt / GIB:+.2f} GiB, by which that server's KV cache differed from it"
    )
    told = f"What if: not as the measured server had it: {', '.join(differs)}.  The formula is used, {how}."
    differing = tuple(name for name in differs if name in ESTIMATE_SETTINGS)
    request = replace(request, correction_bytes=learnt or 0, correction_differs=differing)
    check_corrected(make_plan(request))
    return Asked(request, own, found, None, None, check, gap, warnings, (*notes, told), disagreeing)
