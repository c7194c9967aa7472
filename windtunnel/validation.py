"""A prediction beside what really happened: ``validate`` measures, predicts and compares, a ``Validation`` says how."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.calibrate.attribution import (
    Ingredient,
    Setup,
    arrivals_of,
    attribute,
    causes_of,
    engine_of,
    lengths_of,
    recording_of,
    steps_of,
)
from windtunnel.calibrate.live.client import LATE_NOTE, late_note
from windtunnel.calibrate.live.observed import UNKNOWN, ObservedRun, ServerFacts
from windtunnel.calibrate.live.observed_metrics import observed_from_records, observed_metrics
from windtunnel.calibrate.validation import Limit, errors_of, overlays_of, parse_limits, with_limits
from windtunnel.rundir import check_can_write, to_json, writing
from windtunnel.sim.metrics.agreement import Agreement
from windtunnel.validation_inputs import (
    Asked,
    Measured,
    Source,
    Tell,
    ValidationError,
    ValidationInputUnreadable,
    measure,
)

if TYPE_CHECKING:
    from windtunnel.api import Run
    from windtunnel.reports.validation_context import ValidationContext
    from windtunnel.scenarios.load import Override
    from windtunnel.sim.engine.config import SchedulerConfig

RESULT_FILE = "validation.json"
_LIVE_FILE = re.compile(r"live-[0-9]+\.jsonl")


def validate(
    scenario: str | Path | Mapping[str, Any] | None = None,
    *,
    endpoint: str | None = None,
    bench: str | Path | None = None,
    executor: str | None = None,
    max_error: str | None = None,
    tell: Tell | None = None,
    **more: Any,
) -> Validation:
    """Compare a simulation with a live run of the same workload, and say how far off it is and why.

    Give one of ``endpoint`` (the address of a server, which is loaded now), ``bench`` (a result of a load generator)
    and ``executor`` ("torch" or "triton": our own engine, in this process).  ``max_error`` holds limits such as
    ``"throughput:2% ttft:mean<4%"``.  ``more`` are the other fields of ``Asked`` and, as for ``simulate``, keys of the
    scenario file.  ``tell`` hears what is being done.

    Raises ValidationError for what cannot be compared, ServerUnreachable, UnreadableResult, and what ``simulate`` does.

    >>> validate("chat-8b-h100", endpoint="http://127.0.0.1:8000", num_prompts=200).passed  # doctest: +SKIP
    """
    from windtunnel.scenarios.load import Override

    own = {name: more.pop(name) for item in fields(Asked) if (name := item.name) in more}
    for name in ("log", "metrics", "recording"):
        if own.get(name) is not None:
            own[name] = Path(own[name])
    asked = Asked(
        endpoint=endpoint,
        bench=None if bench is None else Path(bench),
        executor=executor,
        limits=() if max_error is None else _parsed_limits(max_error),
        **own,
    )
    overrides = {key: Override(value, f"{key}=") for key, value in more.items() if value is not None}
    return carry_out(scenario, overrides, asked, tell=tell)


def _parsed_limits(text: str) -> tuple[Limit, ...]:
    try:
        return parse_limits(text)
    except ValueError as error:
        raise ValidationError(f"max_error: {error}") from None


def carry_out(
    scenario: str | Path | Mapping[str, Any] | None,
    overrides: Mapping[str, Override],
    asked: Asked,
    *,
    tell: Tell | None = None,
) -> Validation:
    """What ``validate`` does once its arguments are known."""
    tell = tell or (lambda _: None)
    source = Source(scenario, dict(overrides), asked, tell)
    return _compared(source, measure(source))


# --- laying them side by side


def _compared(source: Source, measured: Measured) -> Validation:
    from windtunnel.api import execute

    asked, resolved = source.asked, measured.resolved
    source.tell("simulating")
    run = execute(resolved)
    predicted = observed_from_records(run.records, resolved.workload)
    source.tell("comparing")
    errors = errors_of(measured.live, predicted, seed=resolved.seed)
    try:
        errors = with_limits(errors, asked.limits)
    except ValueError as error:
        raise ValidationError(str(error)) from None
    attribution = None
    causes: list[str] = []
    if asked.attributes:
        planned = Setup(resolved.workload, resolved.system)
        ingredients, unmeasured = _ingredients(planned, measured, asked)
        attributed = attribute(
            planned,
            ingredients,
            measured.live,
            unmeasured=unmeasured,
            infers_step_times=measured.steps is None and asked.recording is None,
            tell=lambda text: source.tell(f"attribution: {text}"),
        )
        attribution = attributed.attribution
        causes = causes_of(attributed, measured.live[0], predicted)
    whole = measured.whole or measured.live
    failed = sum(int((~live.requests.is_finished).sum()) for live in whole)
    agreement = Agreement(
        errors,
        overlays_of(measured.live, predicted),
        len(measured.live),
        len(resolved.workload),
        failed,
        attribution,
        (
            *measured.failures,
            *causes,
            *measured.findings,
            *_findings_of(measured.live[0], predicted, measured.served, causes),
        ),
    )
    notes = [*measured.assumptions, *_notes_of(whole)]
    return Validation(whole, run, agreement, tuple(dict.fromkeys(notes)))


def _notes_of(live: Sequence[ObservedRun]) -> Iterator[str]:
    """Those of all runs; that the client sent late is told of the worst run only."""
    late = [run.send_report for run in live if run.send_report is not None and _notes_lateness(run)]
    if late:
        said = late_note(max(late, key=lambda report: report.late_p99_s))
        yield said if len(live) == 1 else f"In {len(late)} of {len(live)} live runs, here the worst: {said}"
    for run in live:
        yield from (note for note in run.notes if not note.startswith(LATE_NOTE))


def _notes_lateness(run: ObservedRun) -> bool:
    return any(note.startswith(LATE_NOTE) for note in run.notes)


def _ingredients(planned: Setup, measured: Measured, asked: Asked) -> tuple[list[Ingredient], list[str]]:
    """Those with another value in the live run, and why others have none."""
    live = measured.live[0]
    found: list[Ingredient] = []
    unmeasured = []
    is_served_over_a_wire = asked.executor is None
    if is_served_over_a_wire:
        lengths = lengths_of(planned.workload, live)
        why_not = None if lengths is None else _why_not_simulated(lengths.measured(planned))
        if why_not is not None:
            unmeasured.append(f"Lengths: those that the server counted cannot be simulated: {why_not}.")
            lengths = None
        found += [each for each in (lengths, arrivals_of(planned.workload, live)) if each]
        if not len(live.requests) or bool((live.requests.send_ns == UNKNOWN).any()):
            unmeasured.append("Arrivals: the live run does not say when each request was sent.")
    if measured.served is not None:
        found += engine_of(planned.system.config, measured.served)
    if measured.steps is not None:
        found += steps_of(planned, measured.steps)
    elif asked.recording is not None:
        found += _recording(planned, asked.recording)
    else:
        unmeasured.append(
            "Step times, the host's time between steps and scheduling decisions: no recording was given (--recording)."
        )
    return found, unmeasured


def _why_not_simulated(setup: Setup) -> str | None:
    """A server that counts wrongly may say more tokens than any of its requests can have."""
    from windtunnel.sim.simulate import RequestTooLarge, check_fits

    try:
        check_fits(setup.workload, setup.system.config)
    except RequestTooLarge as error:
        return str(error).rstrip(".")
    return None


def _recording(planned: Setup, path: Path) -> list[Ingredient]:
    if not path.exists():
        raise ValidationInputUnreadable(f"no recording at {path}: give a file of RecordingScheduler, or leave it out")
    return recording_of(planned, path)


def _findings_of(
    run: ObservedRun, predicted: ObservedRun, served: SchedulerConfig | None, causes: list[str]
) -> list[str]:
    """Those findings of ``windtunnel explain`` on the live run that make its numbers invalid, or misleading."""
    from windtunnel.calibrate.explain import Facts, Severity, explain

    facts = Facts(shared_prefix_share=observed_metrics(predicted).prefix_cache_hit_rate)
    if served is not None:
        facts = replace(
            facts,
            max_num_seqs=served.max_num_seqs,
            max_num_batched_tokens=served.max_num_batched_tokens,
            kv_cache_tokens=served.num_kv_tokens,
        )
    told = [kind for kind, words in _ALSO_TOLD.items() if any(words in cause for cause in causes)]
    findings = [each for each in explain(run, facts).findings if each.severity >= Severity.MISLEADING]
    return [each.sentence for each in findings if each.kind not in told]


_ALSO_TOLD = {"warm_cache": "live prefix cache", "client_cap": "client was capped"}
"""Findings that are left out where the comparison has said the same."""


# --- the result


class Validation:
    """A prediction beside live runs: errors, verdict and likely causes, as text, JSON, HTML and files."""

    def __init__(
        self, live: tuple[ObservedRun, ...], run: Run, agreement: Agreement, assumptions: tuple[str, ...]
    ) -> None:
        self.live = live
        """As measured, requests that failed included."""
        self.run = run
        """As simulated."""
        self.agreement = agreement
        self.assumptions = assumptions
        """What was taken for granted, and what live runs and files were noted for, in sentences."""

    @property
    def passed(self) -> bool | None:
        """Whether all limits were kept; None if none were given."""
        return self.agreement.passed

    @cached_property
    def context(self) -> ValidationContext:
        """What reports say besides the numbers."""
        from windtunnel.reports.validation_context import ValidationContext

        first = self.live[0]
        return ValidationContext(
            self.run.context, first.source, first.name, self.assumptions, _facts_rows(first.server)
        )

    def text(self) -> str:
        """Verdict, table of errors, causes and assumptions."""
        from windtunnel.reports.validation_text import render_text

        return render_text(self.agreement, self.context)

    def report(self, path: str | Path) -> None:
        """Write one HTML file with everything in it.  Raises OutputError if it cannot be written."""
        from windtunnel.reports.validation_html import write_html

        with writing(Path(path)):
            write_html(path, self.agreement, self.context)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the curves, as plain data."""
        agreement = self.agreement
        return {
            "windtunnel_version": self.run.resolved["windtunnel_version"],
            "passed": self.passed,
            "num_live_runs": agreement.num_live_runs,
            "num_requests": agreement.num_requests,
            "num_failed": agreement.num_failed,
            "errors": [error.to_dict() for error in agreement.errors],
            "causes": list(agreement.causes),
            "attribution": None if agreement.attribution is None else agreement.attribution.to_dict(),
            "assumptions": list(self.assumptions),
            "live": [{"source": run.source, "name": run.name, **observed_metrics(run).to_dict()} for run in self.live],
            "simulated": self.run.summary,
            "settings": self.run.resolved["settings"],
        }

    def save(self, folder: str | Path, *, force: bool = False) -> None:
        """Write the live runs (``live-1.jsonl`` …), the simulated one (``simulated``) and ``validation.json``.

        Live runs of an earlier validation in that folder are removed.

        Raises OutputError for a folder that holds other things (unless ``force``), or cannot be written.
        """
        from windtunnel.calibrate.live.observed_file import save_observed

        folder = Path(folder)
        check_folder(folder, force=force)
        with writing(folder / RESULT_FILE):
            for earlier in folder.glob("live-*.jsonl"):
                if _LIVE_FILE.fullmatch(earlier.name):
                    earlier.unlink()
            for number, run in enumerate(self.live, 1):
                save_observed(run, folder / f"live-{number}.jsonl")
            self.run.save(folder / "simulated", force=force)
            (folder / RESULT_FILE).write_text(to_json(self.to_dict()) + "\n", "utf-8")


def check_folder(folder: Path, *, force: bool = False) -> None:
    """Raise OutputError for a folder that holds something else than an earlier validation, or cannot be written."""
    check_can_write(folder, force=force or (folder / RESULT_FILE).is_file())


def _facts_rows(facts: ServerFacts) -> tuple[tuple[str, str], ...]:
    rows = []
    for name in facts.__slots__:
        value = getattr(facts, name)
        if value is not None and name != "config":
            shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
            rows.append((name, shown))
    return tuple(rows)
