"""The answer of a run in a few sentences: did it keep up, what did clients see, what was scarce.

Facts only: what another setting would do, a run with that setting says.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from windtunnel.reports.economics import preemption_sentence
from windtunnel.reports.fleet import fleet_sentences
from windtunnel.reports.reasons import slow_tokens, waiting
from windtunnel.reports.text import measured_value
from windtunnel.reports.words import count, milliseconds, percent, plural, verb
from windtunnel.sim.metrics import SloResult, Summary, Verdict
from windtunnel.sim.metrics.slo import MOST_FAILED_PERCENT
from windtunnel.sim.metrics.summary import percent_word
from windtunnel.sim.records import Records

TONES = {
    Verdict.STABLE: "good",
    Verdict.BACKLOGGED: "note",
    Verdict.OVERLOADED: "bad",
    Verdict.STALLED: "bad",
    Verdict.SHEDDING: "bad",
    Verdict.TOO_SHORT: "note",
}


class Answer(NamedTuple):
    """A headline and the sentences below it."""

    headline: str
    sentences: tuple[str, ...]
    tone: str
    """good, note or bad: whether the headline is good news."""


def answer(records: Records, summary: Summary) -> Answer:
    """What a reader wants to know first."""
    missed = _missed(summary)
    sentences = (
        _peak(summary),
        _latencies(summary),
        _objectives(summary),
        *waiting(records, missed),
        slow_tokens(records, missed),
        _preemptions(records, summary),
        "" if summary.fleet is None else " ".join(fleet_sentences(summary.fleet)),
    )
    tone = "bad" if missed or _loses_many(summary) else TONES[summary.stability.verdict]
    return Answer(_headline(summary), tuple(sentence for sentence in sentences if sentence), tone)


def _missed(summary: Summary) -> list[SloResult]:
    return [result for result in summary.slo if not result.passed]


# --- headline


def _headline(summary: Summary) -> str:
    lost = unanswered(summary)
    if not lost or summary.stability.verdict is Verdict.SHEDDING:
        return _state(summary)
    return f"{lost} {_state(summary)}" if summary.completed else lost


def _num_unanswered(summary: Summary) -> int:
    """Requests that were refused, given up or lost; not those that a horizon cut off."""
    return summary.failed - summary.unfinished


def _loses_many(summary: Summary) -> bool:
    return _num_unanswered(summary) > MOST_FAILED_PERCENT / 100 * summary.num_prompts


def unanswered(summary: Summary) -> str:
    """Which share had no answer, of what was offered, and how much of it no load is to blame for; empty for few."""
    if not _loses_many(summary):
        return ""
    lost = 0 if summary.fleet is None else summary.fleet.num_lost_requests
    kinds = [
        word
        for word, number in (("refused", summary.rejected), ("given up by clients", summary.aborted), ("lost", lost))
        if number
    ]
    of = f"the {_offered(summary)} offered" if summary.request_rate else "the requests"
    share = percent(_num_unanswered(summary) / summary.num_prompts)
    return f"{share} of {of} were {' or '.join(kinds)}{_max_model_len(summary)}."


def _max_model_len(summary: Summary) -> str:
    if not summary.unservable:
        return ""
    if summary.unservable == _num_unanswered(summary):
        return ": their prompts do not fit max_model_len"
    return f": {percent(summary.unservable / summary.num_prompts)} because their prompts do not fit max_model_len"


def _state(summary: Summary) -> str:
    stability = summary.stability
    misses = _misses(summary)
    match stability.verdict:
        case Verdict.STABLE:
            return f"{_kept_up(summary)}, but it misses {misses}." if misses else f"Stable: {_kept_up(summary)}."
        case Verdict.BACKLOGGED:
            return f"{_backlog(summary)}{f', and it misses {misses}' if misses else ''}."
        case Verdict.OVERLOADED:
            return f"Overloaded: {_servable(summary)} come in, {count(stability.completion_rate)}/s get done."
        case Verdict.STALLED:
            return "Stalled: the queue's first request can never be scheduled."
        case Verdict.SHEDDING:
            text = f"It sheds load: {percent(summary.rejected / summary.num_prompts)} of the requests were refused"
            return f"{text}{_max_model_len(summary)}."
    return "Too short to say whether it keeps up."


def _misses(summary: Summary) -> str:
    missed = _missed(summary)
    if len(missed) == 1:
        return missed[0].slo.text
    if missed and len(missed) == len(summary.slo):
        return "both objectives" if len(missed) == 2 else f"all {len(missed)} objectives"
    return f"{len(missed)} of {len(summary.slo)} objectives" if missed else ""


def _offered(summary: Summary) -> str:
    return f"{count(summary.request_rate)} requests/s" if summary.request_rate else "all requests at once"


def _servable(summary: Summary) -> str:
    """The rate of the requests that can be served at all."""
    rate = summary.stability.offered_request_rate
    return f"{count(rate)} requests/s" if rate else "all requests at once"


def _clients(summary: Summary) -> str:
    return plural(summary.max_concurrency or 0, "client")


def _kept_up(summary: Summary) -> str:
    if summary.max_concurrency is None:
        others = "the others, " if summary.unservable and _loses_many(summary) else ""
        kept = f"it keeps up with {others}{_servable(summary)}"
    else:
        kept = f"{_clients(summary)} in a closed loop are served as fast as they ask"
    return f"{kept[0].upper()}{kept[1:]}" if _missed(summary) else kept


def _backlog(summary: Summary) -> str:
    stability = summary.stability
    if summary.request_rate is None and summary.max_concurrency is not None:
        return f"Backlogged: {_clients(summary)} ask for more at once than the engine can run"
    if summary.request_rate is None or stability.is_burst:
        many = plural(summary.num_prompts, "request")
        at_once = (
            "at once" if not stability.arrival_window_s else f"within {milliseconds(1000 * stability.arrival_window_s)}"
        )
        return f"One burst: {many} {at_once} took {milliseconds(1000 * summary.duration_s)}"
    if stability.has_peak:
        return "Backlogged: at the peak more came than it could serve"
    return f"Backlogged: {_servable(summary)} came in, and not without a queue"


# --- what clients saw, and what was lost


def _peak(summary: Summary) -> str:
    reason = summary.stability.reason
    return f"{reason[0].upper()}{reason[1:]}." if summary.stability.has_peak else ""


def _latencies(summary: Summary) -> str:
    if not summary.completed:
        return "No request finished."
    first, gap = summary.ttft, summary.itl
    high = summary.percentiles[-1] if summary.percentiles else None
    text = f"Half of the requests had their first token within {milliseconds(first.median_ms)}"
    if high is not None:
        text += f", {percent_word(high)} % within {milliseconds(first.percentile_ms(high))}"
    text += f", then a token every {milliseconds(gap.mean_ms)}" if gap.count else ""
    match summary.stability.verdict:
        case Verdict.OVERLOADED:
            return f"{text}. In a longer run these would be higher."
        case Verdict.TOO_SHORT:
            return f"{text}. In a longer run these would differ."
    return f"{text}."


def _objectives(summary: Summary) -> str:
    if not summary.slo:
        return ""
    missed = _missed(summary)
    if not missed:
        return {1: "The objective is kept.", 2: "Both objectives are kept."}.get(
            len(summary.slo), f"All {len(summary.slo)} objectives are kept."
        )
    listed = ", ".join(f"{result.slo.text} (measured {measured_value(result)}{_but(result)})" for result in missed)
    return f"{len(missed)} of {plural(len(summary.slo), 'objective')} missed: {listed}."


def _but(result: SloResult) -> str:
    """Why an objective counts as missed whose number looks kept."""
    looks_kept = result.measured is not None and result.slo.holds(result.measured)
    return f", but {result.note}" if looks_kept and result.note else ""


def _preemptions(records: Records, summary: Summary) -> str:
    stats = summary.preemption
    if not stats.num_preemptions:
        return "No request was preempted."
    twice = stats.recomputed_prefill_tokens
    text = (
        f"{plural(stats.num_preemptions, 'preemption')} hit {plural(stats.num_preempted_requests, 'request')}: "
        f"{plural(twice, 'token')} {verb(twice, 'was', 'were')} computed again, {percent(stats.recomputed_share)} of "
        f"all prefill work. {preemption_sentence(summary.economics)}"
    ).rstrip()
    fits = requests_that_fit(records)
    if fits and summary.load.num_running_peak > fits:
        text += (
            f" The KV cache holds about {plural(fits, 'request')} of full length; up to "
            f"{summary.load.num_running_peak:,} ran at once."
        )
    return text


def requests_that_fit(records: Records) -> int:
    """How many requests of mean final length (prompt and output) the KV cache of one replica holds."""
    table = records.requests
    served = table.first_token_ns >= 0
    if not served.any() or not records.replicas:
        return 0
    final_tokens = float(np.mean(table.num_prompt_tokens[served] + table.num_output_tokens[served]))
    return int(min(replica.num_usable_blocks * replica.block_size for replica in records.replicas) / final_tokens)
