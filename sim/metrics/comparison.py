"""Runs held against each other: who is ahead and by how much, and where their curves cross.

A *variant* is a policy or a group of settings; all variants are run on one workload, at each value of an *axis* if
there is one.  Numbers are those of the runs' summaries, under the keys of the JSON summary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from math import exp, inf, isfinite, log
from typing import Any, Literal

from windtunnel.sim.metrics.replications import Interval, mean_interval, paired_difference
from windtunnel.sim.metrics.stability import MIN_RHO, Verdict

TIE = 0.01
"""Numbers that differ by no more than this share of the larger one are level: runs of one seed are not more exact."""
SMALLEST = 0.005
"""With replications: the share up to which two numbers are level, however sure it is that they differ."""
CAPACITY_TIE = 0.03
"""The same of capacities, which are known within about 3 % (``scenarios.saturation``)."""
MOST_FAILED = 0.01
"""Share of failed requests up to which a run's latencies are ranked: beyond, they are those of the lucky ones."""
WIDE_AXIS = 10
"""Ratio of the largest to the smallest position above which the axis is logarithmic."""
WIDE_METRIC = 50
"""The same of a metric's values."""
SAME_MEAN = 1.25
"""Ratio of the largest to the smallest mean length up to which only the spread of lengths is said to vary."""

DERIVED = ("failed_share", "capacity")
"""Numbers that are made of those of the summary: share of the requests that failed, and the saturation throughput."""
OFFERED = ("request_throughput", "output_throughput", "total_token_throughput", "duration")
"""Numbers that follow from what is offered where a run keeps up: what is left of them is how long the end took."""
GOODPUT = ("request_goodput", "goodput_share")
"""Numbers that fall with the length of an overloaded run, as its latencies rise; a failed request is never good."""
LOAD_AXES = ("request_rate", "rate_scale")
"""Settings of which more is more load."""

Better = Literal["higher", "lower", ""]


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of the summary: what it is called, its unit, and which way is good."""

    key: str
    words: str
    """In a sentence: ``mean E2EL``."""
    unit: str
    """``ms``, ``s``, ``tok/s``, ``req/s``, ``%`` for what is a share in the summary, or nothing for a count."""
    better: Better
    """Empty where neither is good in itself."""

    @property
    def label(self) -> str:
        """In a table: ``Mean E2EL (ms)``."""
        name = f"{self.words[:1].upper()}{self.words[1:]}"
        return f"{name} ({self.unit})" if self.unit else name

    @property
    def is_latency(self) -> bool:
        """Whether it describes the length of the run, not the system, once the system is overloaded."""
        return self.unit == "ms"


_LATENCY_KEY = re.compile(r"(mean|median|std|p\d+(?:\.\d+)?)_(\w+)_ms")
_LATENCIES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "E2EL",
    "client_queue_time": "client queue time",
    "gateway_wait": "wait at the router",
    "e2el_including_client_queue": "E2EL incl. client queue",
    "itl_without_stalls": "ITL without own stalls",
    "itl_without_preemption": "ITL without preemptions",
}
_STATISTICS = {"std": "standard deviation of"}
_METRICS: dict[str, tuple[str, str, Better]] = {
    "completed": ("successful requests", "", "higher"),
    "failed": ("failed requests", "", "lower"),
    "duration": ("benchmark duration", "s", "lower"),
    "request_throughput": ("request throughput", "req/s", "higher"),
    "request_goodput": ("request goodput", "req/s", "higher"),
    "goodput_share": ("good requests", "%", "higher"),
    "output_throughput": ("output token throughput", "tok/s", "higher"),
    "total_token_throughput": ("total token throughput", "tok/s", "higher"),
    "max_output_tokens_per_s": ("peak output token throughput", "tok/s", "higher"),
    "offered_request_rate": ("offered request rate", "req/s", ""),
    "servable_request_rate": ("offered request rate within max_model_len", "req/s", ""),
    "utilisation": ("utilisation (rho)", "", ""),
    "busy_share": ("busy", "%", ""),
    "batch_size_mean": ("mean batch size", "", ""),
    "num_running_peak": ("peak running requests", "", ""),
    "num_waiting_mean": ("mean waiting requests", "", "lower"),
    "num_waiting_peak": ("peak waiting requests", "", "lower"),
    "num_steps": ("steps", "", ""),
    "kv_usage_mean": ("mean KV usage", "%", ""),
    "kv_usage_peak": ("peak KV usage", "%", ""),
    "preemptions": ("preemptions", "", "lower"),
    "num_preempted_requests": ("preempted requests", "", "lower"),
    "max_preemptions_per_request": ("most preemptions of one request", "", "lower"),
    "recomputed_prefill_tokens": ("recomputed prefill tokens", "", "lower"),
    "recomputed_prefill_share": ("recomputed share of prefill", "%", "lower"),
    "prefix_cache_hit_rate": ("prefix cache hit rate", "%", "higher"),
    "swapped_out_blocks": ("swapped out blocks", "", "lower"),
    "swapped_in_blocks": ("swapped in blocks", "", "lower"),
    "computed_tokens": ("computed tokens", "", ""),
    "useful_tokens": ("useful tokens", "", ""),
    "recomputed_tokens": ("recomputed tokens", "", "lower"),
    "padding_tokens": ("padding tokens", "", "lower"),
    "straggler_tokens": ("straggler tokens", "", "lower"),
    "rejected_draft_tokens": ("rejected draft tokens", "", "lower"),
    "abandoned_tokens": ("tokens abandoned by clients", "", "lower"),
    "wasted_token_share": ("wasted tokens", "%", "lower"),
    "slot_efficiency": ("tokens per slot and step", "", "higher"),
    "slots_mean": ("mean slots held", "", ""),
    "slot_throughput": ("slot throughput", "slots/s", ""),
    "mean_prefill_batch_size": ("mean prompts per batch", "", ""),
    "gpu_seconds": ("GPU time held", "GPU-s", "lower"),
    "busy_gpu_seconds": ("GPU time in which steps ran", "GPU-s", "lower"),
    "prefill_gpu_seconds": ("GPU time of prompt chunks", "GPU-s", ""),
    "decode_gpu_seconds": ("GPU time of decodes", "GPU-s", ""),
    "gpu_seconds_per_million_tokens": ("GPU time per million tokens", "GPU-s", "lower"),
    "cost_per_hour": ("cost per hour", "", "lower"),
    "run_cost": ("cost of the run", "", "lower"),
    "cost_per_request": ("cost per request", "", "lower"),
    "cost_per_million_tokens": ("cost per million tokens", "", "lower"),
    "cost_per_million_output_tokens": ("cost per million output tokens", "", "lower"),
    "input_cost_per_million_tokens": ("input cost per million tokens", "", "lower"),
    "output_cost_per_million_tokens": ("output cost per million tokens", "", "lower"),
    "energy_kwh": ("energy", "kWh", "lower"),
    "energy_kwh_per_million_tokens": ("energy per million tokens", "kWh", "lower"),
    "energy_joules_per_output_token": ("energy per output token", "J", "lower"),
    "lost_tokens": ("tokens lost to preemptions", "", "lower"),
    "recomputed_gpu_seconds": ("GPU time of recomputation", "GPU-s", "lower"),
    "recomputed_busy_share": ("recomputation's share of busy time", "%", "lower"),
    "recomputed_cost": ("cost of recomputation", "", "lower"),
    "preemption_share_of_p99_itl": ("preemptions' part in P99 ITL", "%", "lower"),
    "slow_gaps_stalled_share": ("stalls among gaps above P99", "%", ""),
    "slow_gaps_recomputing_share": ("recomputation among gaps above P99", "%", ""),
    "replica_hours": ("replica-hours", "", "lower"),
    "gpu_hours": ("GPU-hours", "", "lower"),
    "ready_replicas_mean": ("ready replicas, mean", "", ""),
    "ready_replicas_peak": ("ready replicas, peak", "", ""),
    "ready_replicas_min": ("ready replicas, fewest", "", ""),
    "request_imbalance": ("requests of the busiest replica over the mean", "", "lower"),
    "router_known_prefix_share": ("prompt tokens that the router thought cached", "%", ""),
    "waited_at_gateway": ("requests that waited at the router", "", "lower"),
    "crashes": ("crashes", "", ""),
    "lost_stays": ("times a request lost its replica", "", "lower"),
    "retried_requests": ("requests tried again", "", "lower"),
    "lost": ("requests lost with their replica", "", "lower"),
    "lost_output_tokens": ("output tokens lost with replicas", "", "lower"),
    "failed_share": ("failed", "%", "lower"),
    "capacity": ("capacity", "req/s", "higher"),
}
JAIN_KEY = "tenants_jain_index"
_TENANT_KEY = re.compile(
    r"tenant_(.+?)_((?:mean|median|std|p\d+(?:\.\d+)?)_(?:ttft|tpot|itl|e2el|queue_time)_ms"
    r"|token_share|fair_share_ratio|good_share|num_good_requests|request_throughput|output_throughput|ttft_slowdown"
    r"|slowdown|completed|rejected|aborted|unfinished|served_tokens|num_requests|num_preemptions|contended_s|weight)"
)
_TENANT_METRICS: dict[str, tuple[str, str, Better]] = {
    "token_share": ("share of the tokens", "%", ""),
    "fair_share_ratio": ("tokens over its fair part", "", "higher"),
    "good_share": ("good requests", "%", "higher"),
    "ttft_slowdown": ("TTFT over that alone", "", "lower"),
    "slowdown": ("E2EL over that alone", "", "lower"),
    "rejected": ("rejected requests", "", "lower"),
}


@cache
def metric(key: str) -> Metric:
    """What is known of a key of the summary; one that nothing is known of is called as it is written."""
    latency = _LATENCY_KEY.fullmatch(key)
    if latency is not None:
        statistic, name = latency.groups()
        words = f"{_STATISTICS.get(statistic, statistic)} {_LATENCIES.get(name, name.replace('_', ' '))}"
        return Metric(key, words.replace("p", "P", 1) if statistic.startswith("p") else words, "ms", "lower")
    of_tenant = _TENANT_KEY.fullmatch(key)
    if of_tenant is not None:
        tenant, own = of_tenant.groups()
        known = metric(own)
        words, unit, better = _TENANT_METRICS.get(own, (known.words, known.unit, known.better))
        return Metric(key, f"{tenant}: {words}", unit, better)
    if key == JAIN_KEY:
        return Metric(key, "Jain's index of tenants", "", "higher")
    words, unit, better = _METRICS.get(key, (key.replace("_", " "), "", ""))
    return Metric(key, words, unit, better)


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One run of a comparison."""

    variant: str
    place: int
    """Which value of the axis it was run at; 0 without an axis."""
    summary: Mapping[str, Any] | None
    """None if the deployment is infeasible, or vLLM would not start with these settings."""
    infeasible: str = ""
    """Why."""
    is_contradiction: bool = False
    """Whether it is the settings that vLLM refuses, not what the hardware holds."""
    replications: tuple[Mapping[str, Any], ...] = ()
    """Summaries with each of several seeds, in their order, of which ``summary`` has the means; empty for one run."""

    def values(self, key: str) -> list[float]:
        """The number in each replication; empty for one run, and where a replication has none."""
        each = [ComparedRun(self.variant, self.place, summary).number(key) for summary in self.replications]
        known = [value for value in each if value is not None]
        return known if len(known) == len(each) else []

    def interval(self, key: str) -> Interval | None:
        """The mean over replications with its interval; None for one run, and where a replication has none."""
        values = self.values(key)
        return mean_interval(values, CONFIDENCE) if values else None

    def number(self, key: str) -> float | None:
        """A number of the summary, or one of DERIVED; None where there is none, or no finite one.

        Where answers come as a whole there is no time between tokens: vLLM's definition makes the TPOT 0, which would
        win every comparison.
        """
        if "_tpot_" in key and self.summary is not None and self.summary.get("mean_itl_ms") is None:
            return None
        match key:
            case "failed_share":
                return self._ratio("failed", "num_prompts")
            case "capacity":
                can_be_served = self.number("servable_request_rate") is not None
                return self._ratio("servable_request_rate" if can_be_served else "offered_request_rate", "utilisation")
        value = None if self.summary is None else self.summary.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return float(value) if isfinite(value) else None

    def _ratio(self, part: str, whole: str) -> float | None:
        over, under = self.number(part), self.number(whole)
        return over / under if over is not None and under else None

    @property
    def verdict(self) -> str:
        """``stable``, ``overloaded`` … or ``infeasible`` or ``not possible``."""
        if self.summary is None:
            return "not possible" if self.is_contradiction else "infeasible"
        return str(self.summary.get("stability", "")).replace("_", " ")

    @property
    def is_excessive(self) -> bool:
        """Whether it was too short to show that more was offered than can be served."""
        return self.verdict == _TOO_SHORT and (self.number("utilisation") or 0.0) >= MIN_RHO

    @property
    def is_hopeless(self) -> bool:
        """Whether a longer run would show higher latencies: those that were measured describe its length."""
        return self.verdict in (Verdict.OVERLOADED, Verdict.STALLED) or self.is_excessive

    @property
    def serves_what_is_offered(self) -> bool:
        """Whether requests came at a rate of their own and none was left behind: its throughput is that rate."""
        if self.number("offered_request_rate") is None or self.number("max_concurrency") is not None:
            return False
        keeps_up = self.verdict in (Verdict.STABLE, _TOO_SHORT) and not self.is_excessive
        return keeps_up and (self.number("failed_share") or 0.0) <= MOST_FAILED


_TOO_SHORT = Verdict.TOO_SHORT.replace("_", " ")

CONFIDENCE = 0.95
"""Of the intervals over replications."""
_WORST_FIRST = (
    *(Verdict.STALLED, Verdict.OVERLOADED, Verdict.SHEDDING, Verdict.BACKLOGGED, Verdict.STABLE, Verdict.TOO_SHORT),
)
"""Too short is no verdict: it is told only where no replication has one."""


def replicated(variant: str, place: int, summaries: Sequence[Mapping[str, Any]]) -> ComparedRun:
    """One run of the summaries of several, with different seeds: their means, and the worst of their verdicts.

    An objective counts as kept if it is kept in all.
    """
    worst = min(summaries, key=lambda each: _WORST_FIRST.index(Verdict(each["stability"])))
    means = {key: _mean([each.get(key) for each in summaries]) for key in summaries[0]}
    of_all = {"slo_passed": _all_passed(summaries), "slo": _objectives_of_all(summaries)}
    merged = {**means, **of_all, **{key: worst[key] for key in _OF_THE_VERDICT if key in worst}}
    return ComparedRun(variant, place, merged, replications=tuple(summaries))


_OF_THE_VERDICT = ("stability", "stability_reason", "steady_state", "stability_numbers")


def _mean(values: Sequence[Any]) -> Any:
    """Their mean if all are numbers; what they all are if that is one thing, else the first."""
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return values[0] if None not in values else None
    return values[0] if all(value == values[0] for value in values) else sum(values) / len(values)


def _all_passed(summaries: Sequence[Mapping[str, Any]]) -> bool | None:
    passed = [each.get("slo_passed") for each in summaries]
    return None if None in passed else all(passed)


def _objectives_of_all(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_objective = zip(*(each.get("slo") or [] for each in summaries), strict=True)
    return [
        {
            **results[0],
            "measured": _mean([result["measured"] for result in results]),
            "passed": all(result["passed"] for result in results),
        }
        for results in by_objective
    ]


@dataclass(frozen=True, slots=True)
class Difference:
    """By how much a number differs between two runs of several replications, seed against seed."""

    key: str
    absolute: Interval
    """The other's less the base's."""
    share: Interval | None
    """The ratio of the means, less 1; None unless the base's values are above 0 and the other's not below.

    Its interval is that of a ratio estimator (Cochran, "Sampling Techniques", 1977, ch. 6): what is left of each pair
    once the base's value is multiplied by the ratio, over the base's mean.
    """

    @property
    def is_noise(self) -> bool:
        """Whether no difference at all is within the interval: that of the share, where there is one."""
        return not (self.share or self.absolute).excludes(0.0)

    @property
    def is_level(self) -> bool:
        """Whether the two are level: the difference is noise, or too small to matter."""
        return self.is_noise or (self.share is not None and abs(self.share.mean) <= SMALLEST)


def difference(key: str, base: ComparedRun, other: ComparedRun) -> Difference | None:
    """How a number of ``other`` differs from that of ``base``; None unless both have it in the same replications."""
    before, after = base.values(key), other.values(key)
    if len(before) < 2 or len(before) != len(after):
        return None
    return Difference(key, paired_difference(before, after, CONFIDENCE), _share_of_change(before, after))


def _share_of_change(before: Sequence[float], after: Sequence[float]) -> Interval | None:
    if min(before) <= 0 or min(after) < 0:
        return None
    unit = sum(before) / len(before)
    ratio = sum(after) / len(after) / unit
    rest = [(second - ratio * first) / unit + ratio - 1 for first, second in zip(before, after, strict=True)]
    found = mean_interval(rest, CONFIDENCE)
    return replace(found, mean=ratio - 1)


@dataclass(frozen=True, slots=True)
class ComparisonAxis:
    """What is varied beside the variants."""

    key: str
    """The setting."""
    values: tuple[str, ...]
    """Its values as people write them, in the order in which they were given."""
    label: str
    """What the positions are."""
    positions: tuple[float, ...] | None = None
    """Where each value stands on a numeric axis; None where the values are mere categories."""

    @property
    def order(self) -> list[int]:
        """Places in the order of their positions, without those at infinity; all as given, for categories."""
        if self.positions is None:
            return list(range(len(self.values)))
        finite = [place for place, position in enumerate(self.positions) if isfinite(position)]
        return sorted(finite, key=self.positions.__getitem__)

    @property
    def is_log(self) -> bool:
        """Whether positions are spread over more than a decade."""
        return self.positions is not None and is_wide([self.positions[place] for place in self.order], WIDE_AXIS)


def numeric_axis(key: str, values: Sequence[str], numbers: Sequence[Any]) -> ComparisonAxis:
    """An axis whose values are numbers; of categories if one of them is none or two are equal."""
    are_numbers = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
    if not are_numbers or len(set(numbers)) < len(numbers):
        return ComparisonAxis(key, tuple(values), key)
    return ComparisonAxis(key, tuple(values), key, tuple(float(number) for number in numbers))


def length_axis(
    key: str, values: Sequence[str], of: str, lengths: Sequence[tuple[float, float] | None]
) -> ComparisonAxis:
    """An axis whose values are distributions of lengths; ``lengths`` are the measured means and standard deviations.

    A value stands at its coefficient of variation if the means are about equal, else at its mean.
    """
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths) or any(mean <= 0 for mean, _ in known):
        return ComparisonAxis(key, tuple(values), key)
    means = [mean for mean, _ in known]
    if max(means) <= SAME_MEAN * min(means):
        label, positions = f"spread of {of} lengths (CV)", tuple(deviation / mean for mean, deviation in known)
    else:
        label, positions = f"mean {of} length (tokens)", tuple(means)
    if len(set(positions)) < len(positions):
        return ComparisonAxis(key, tuple(values), key)
    return ComparisonAxis(key, tuple(values), label, positions)


def is_wide(values: Sequence[float], ratio: float) -> bool:
    """Whether all are positive and the largest is more than ``ratio`` times the smallest."""
    return bool(values) and min(values) > 0 and max(values) > ratio * min(values)


def are_level(first: float, second: float, tie: float = TIE) -> bool:
    """Whether two numbers differ by no more than chance and rounding may make them."""
    return abs(first - second) <= tie * max(abs(first), abs(second))


def tie_of(key: str) -> float:
    """The share of a metric up to which two values are level."""
    return CAPACITY_TIE if key == "capacity" else TIE


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """All runs of a comparison."""

    variants: tuple[str, ...]
    axis: ComparisonAxis | None
    runs: tuple[ComparedRun, ...]
    """By place, and there by variant."""
    metrics: tuple[str, ...]
    """Keys of the summary that the answer, the curves and their crossings are about."""
    baseline: str
    """The variant that changes are counted from."""

    @property
    def places(self) -> range:
        """Values of the axis by number; one without an axis."""
        return range(1 if self.axis is None else len(self.axis.values))

    def run(self, variant: str, place: int = 0) -> ComparedRun:
        """The run of a variant at a value of the axis."""
        return self.runs[place * len(self.variants) + self.variants.index(variant)]

    def change(self, run: ComparedRun, key: str) -> float | None:
        """By which share a number differs from the baseline's at the same place; None where that says nothing."""
        base = self.run(self.baseline, run.place)
        own, other = run.number(key), base.number(key)
        if run.variant == self.baseline or own is None or other is None or both_are_offered(key, run, base):
            return None
        return 0.0 if own == other else (own - other) / abs(other) if other else None

    def difference(self, run: ComparedRun, key: str) -> Difference | None:
        """How a number differs from the baseline's at the same place, with its interval; None without replications."""
        base = self.run(self.baseline, run.place)
        if run.variant == self.baseline or both_are_offered(key, run, base):
            return None
        return difference(key, base, run)

    @property
    def num_replications(self) -> int:
        """Runs behind each number; 1 without replications."""
        return max((len(run.replications) for run in self.runs), default=0) or 1

    def is_doubtful(self, run: ComparedRun) -> bool:
        """Whether its latencies are not to be ranked: it was overloaded, or more than a few requests failed.

        Requests that no variant could ever serve at this place (``unservable``) are not counted against one, where
        there are others: alone, or along an axis of max_model_len, it is held against those at other places.
        """
        if run.is_hopeless:
            return True
        failed, num_prompts = run.number("failed"), run.number("num_prompts")
        if not failed or not num_prompts:
            return False
        is_own_doing = len(self.variants) == 1 or (self.axis is not None and self.axis.key == "max_model_len")
        mine = self.runs if is_own_doing else [self.run(name, run.place) for name in self.variants]
        nobodys = min(each.number("unservable") or 0.0 for each in mine if each.summary is not None)
        return failed - nobodys > MOST_FAILED * (num_prompts - nobodys)

    def keeps_up(self, run: ComparedRun) -> bool:
        """Whether it ran, was not overloaded, and refused hardly anybody."""
        return run.summary is not None and not self.is_doubtful(run) and run.verdict != Verdict.SHEDDING

    def judges(self, key: str, run: ComparedRun) -> bool:
        """Whether this number of the run may be ranked: of an overloaded one neither latencies nor goodput may."""
        if key in GOODPUT:
            return not run.is_hopeless
        return not (metric(key).is_latency and self.is_doubtful(run))

    def numbers(self, key: str) -> list[float]:
        """All values of a metric."""
        return [number for run in self.runs if (number := run.number(key)) is not None]

    def is_log(self, key: str) -> bool:
        """Whether the values of a metric along the axis are so far apart that ratios say more than differences."""
        places = self.places if self.axis is None else self.axis.order
        return is_wide(
            [number for run in self.runs if run.place in places and (number := run.number(key)) is not None],
            WIDE_METRIC,
        )

    def relations(self) -> Iterator[Relation]:
        """What holds between each two variants, metric by metric."""
        for key in self.metrics:
            for first, second in combinations(self.variants, 2):
                yield relate(self, key, first, second)

    def in_order(self, key: str, place: int = 0) -> list[ComparedRun]:
        """The runs at this place that have this number, best first; those that cannot lead last."""
        return self._best_first(key, [run for run in self.runs if run.place == place])

    def leaders(self, key: str, place: int = 0) -> list[ComparedRun]:
        """The best run at this place and those that are level with it; none if no run can lead."""
        return self._level_with_first(key, self.in_order(key, place))

    def along(self, key: str, variant: str) -> list[ComparedRun]:
        """The runs of a variant that have this number, best first; those that cannot lead last."""
        return self._best_first(key, [run for run in self.runs if run.variant == variant])

    def best_along(self, key: str, variant: str) -> list[ComparedRun]:
        """Its best run and those that are level with it; none if no run can lead."""
        return self._level_with_first(key, self.along(key, variant))

    def is_offered(self, key: str, place: int) -> bool:
        """Whether this number says nothing here: all variants serve what is offered."""
        here = [run for run in self.runs if run.place == place and run.summary is not None]
        return key in OFFERED and bool(here) and all(run.serves_what_is_offered for run in here)

    def _best_first(self, key: str, runs: Sequence[ComparedRun]) -> list[ComparedRun]:
        sign = 1 if metric(key).better == "lower" else -1
        known = [run for run in runs if run.number(key) is not None]
        return sorted(known, key=lambda run: (not self.judges(key, run), sign * (run.number(key) or 0.0)))

    def _level_with_first(self, key: str, order: Sequence[ComparedRun]) -> list[ComparedRun]:
        if not order or not self.judges(key, order[0]):
            return []
        return [run for run in order if self.judges(key, run) and are_tied(key, order[0], run)]


def both_are_offered(key: str, first: ComparedRun, second: ComparedRun) -> bool:
    """Whether both runs serve what is offered, and this number follows from that.

    So does the goodput, if the same share of equally many requests a second is good.
    """
    if not (first.serves_what_is_offered and second.serves_what_is_offered):
        return False
    if key != "request_goodput":
        return key in OFFERED
    pairs = ((first.number(name) or 0.0, second.number(name) or 0.0) for name in _BEHIND_GOODPUT)
    return all(are_level(*pair) for pair in pairs)


_BEHIND_GOODPUT = ("goodput_share", "offered_request_rate")


def are_tied(key: str, first: ComparedRun, second: ComparedRun) -> bool:
    """Whether two runs are level in a number that both have."""
    if both_are_offered(key, first, second):
        return True
    found = difference(key, first, second)
    if found is not None:
        return found.is_level
    return are_level(first.number(key) or 0.0, second.number(key) or 0.0, tie_of(key))


def with_capacity(runs: ComparedRuns) -> tuple[str, ...]:
    """The metrics, and behind the first that only shows what is offered the capacity, if all runs have one."""
    keys = runs.metrics
    first = next((k for k, key in enumerate(keys) if key in OFFERED), None)
    ran = [run for run in runs.runs if run.summary is not None]
    if first is None or "capacity" in keys or any(run.number("capacity") is None for run in ran):
        return keys
    served = [run for run in ran if run.serves_what_is_offered]
    if len(runs.variants) == 1:
        is_wanted = len(served) > 1 and runs.axis is not None and runs.axis.key not in LOAD_AXES
    else:
        is_wanted = any(sum(run.place == place for run in served) > 1 for place in runs.places)
    return (*keys[: first + 1], "capacity", *keys[first + 1 :]) if is_wanted else keys


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where the curves of two variants cross."""

    metric: str
    first: str
    second: str
    at: float
    """Position on the axis, interpolated along the lines between runs (of logarithms where these are wide)."""
    between: tuple[float, float]
    """Positions of the nearest runs in which one was clearly ahead: the one before, the other after."""
    value: float
    """Of the metric there."""
    ahead_before: str
    ahead_after: str
    advantage_before: float
    """Largest ratio by which the one is ahead between the crossing before and this; infinite over a zero.  Latencies of
    runs that cannot lead are left out; 1 where nothing is left."""
    advantage_after: float
    """The same of the other, up to the next crossing."""
    is_hopeless: bool
    """Whether it is a latency and a run next to it was overloaded or lost requests: then the place is doubtful."""


@dataclass(frozen=True, slots=True)
class Relation:
    """How two variants stand to each other in one metric, along the axis."""

    metric: str
    first: str
    second: str
    crossings: tuple[Crossing, ...]
    ahead: str | None
    """The one that is ahead wherever they are not level; None if each is somewhere, or neither anywhere."""
    advantages: tuple[float, float] | None
    """Smallest and largest ratio by which it is ahead (higher over lower value), of runs that can both lead; None
    without one, or at zeros."""
    num_compared: int
    """Places at which the two can be ranked."""
    num_level: int
    num_undecided: int
    """Places at which both have a number, but a latency of a run that cannot lead would lead, or both are such runs."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """Numbers of two variants at one place."""

    x: float
    first: float
    second: float
    num_doubtful: int
    """Of the two, those whose number is not to be ranked."""
    is_tie: bool

    @property
    def sign(self) -> int:
        """Which is the larger; 0 if they are level."""
        return 0 if self.is_tie else 1 if self.first > self.second else -1

    @property
    def ratio(self) -> float:
        """Of the larger to the smaller; 1 if they are level or cannot both be ranked, infinite if one is 0 or below."""
        low, high = sorted((self.first, self.second))
        return 1.0 if not self.sign or self.num_doubtful else high / low if low > 0 else inf


def relate(compared: ComparedRuns, key: str, first: str, second: str) -> Relation:
    """Compare two variants in one metric.

    They cross where one is clearly ahead in one run and the other in the next that is not level.  ``ahead`` is better,
    or larger where neither is good in itself.  A latency of a run that cannot lead only ever loses.
    """
    known = list(_pairs(compared, key, first, second))
    pairs = [pair for pair in known if pair is not None]
    judged = [pair for pair in pairs if pair.num_doubtful < 2]
    signs = {pair.sign for pair in judged} - {0}
    is_numeric = compared.axis is not None and compared.axis.positions is not None
    crossings = tuple(_crossings(compared, key, first, second, pairs)) if is_numeric else ()
    ahead = _ahead(key, first, second, signs.pop()) if len(signs) == 1 else None
    num_level = sum(pair.sign == 0 for pair in judged)
    num_undecided = len(known) - len(judged)
    return Relation(
        key, first, second, crossings, ahead, _advantages(judged, ahead), len(judged), num_level, num_undecided
    )


def _pairs(compared: ComparedRuns, key: str, first: str, second: str) -> Iterator[_Pair | None]:
    """None for a place where one that cannot lead would."""
    axis = compared.axis
    for place in [0] if axis is None else axis.order:
        runs = compared.run(first, place), compared.run(second, place)
        one, other = runs[0].number(key), runs[1].number(key)
        if one is None or other is None:
            continue
        doubtful = [run for run in runs if not compared.judges(key, run)]
        is_tie = are_tied(key, *runs)
        ahead = _ahead(key, first, second, 1 if one > other else -1)
        if len(doubtful) == 1 and not is_tie and doubtful[0].variant == ahead:
            yield None
            continue
        x = float(place) if axis is None or axis.positions is None else axis.positions[place]
        yield _Pair(x, one, other, len(doubtful), is_tie)


def _ahead(key: str, first: str, second: str, sign: int) -> str:
    return first if (sign > 0) != (metric(key).better == "lower") else second


def _advantages(pairs: Sequence[_Pair], ahead: str | None) -> tuple[float, float] | None:
    ratios = [pair.ratio for pair in pairs if not pair.num_doubtful]
    return None if ahead is None or inf in ratios or not ratios else (min(ratios), max(ratios))


def _crossings(compared: ComparedRuns, key: str, first: str, second: str, pairs: Sequence[_Pair]) -> Iterator[Crossing]:
    clear = [k for k, pair in enumerate(pairs) if pair.sign]
    turns = [(k, m) for k, m in pairwise(clear) if pairs[k].sign != pairs[m].sign]
    bounds = [0, *(m for _, m in turns), len(pairs)]
    log_x, log_y = compared.axis is not None and compared.axis.is_log, compared.is_log(key)
    for number, (before, after) in enumerate(turns):
        part = pairs[before : after + 1]
        at, value = _intersection(part, log_x=log_x, log_y=log_y)
        yield Crossing(
            metric=key,
            first=first,
            second=second,
            at=at,
            between=(part[0].x, part[-1].x),
            value=value,
            ahead_before=_ahead(key, first, second, part[0].sign),
            ahead_after=_ahead(key, first, second, part[-1].sign),
            advantage_before=max(pair.ratio for pair in pairs[bounds[number] : before + 1]),
            advantage_after=max(pair.ratio for pair in pairs[after : bounds[number + 2]] if pair.sign == part[-1].sign),
            is_hopeless=any(pair.num_doubtful for pair in part),
        )


def _intersection(pairs: Sequence[_Pair], *, log_x: bool, log_y: bool) -> tuple[float, float]:
    """Where two broken lines first meet, of which one begins above the other and ends below it."""
    place, height = (log if log_x else float), (log if log_y else float)
    for left, right in pairwise(pairs):
        gap, next_gap = (height(pair.first) - height(pair.second) for pair in (left, right))
        if gap * pairs[0].sign > 0 and next_gap * pairs[0].sign > 0:
            continue
        part = gap / (gap - next_gap) if gap != next_gap else 0.0
        x = place(left.x) + part * (place(right.x) - place(left.x))
        y = height(left.first) + part * (height(right.first) - height(left.first))
        return exp(x) if log_x else x, exp(y) if log_y else y
    raise AssertionError("the lines end on opposite sides, so they meet")
