"""Why a prediction is off: its ingredients, swapped one at a time for what was measured of the live run.

An ingredient is swapped twice: alone in the prediction, and last, when all others are at their measured values.  The
mean of both changes is what it is said to explain, which depends on no order of the ingredients.  What is left is what
none of them holds: the way through HTTP, the client, and whatever the simulation does not know.  It is looked at in the
simulation with everything at its measured value, so that slow steps are not taken for a slow way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windtunnel.calibrate.live.observed import NS_PER_S, FloatArray, ObservedRun
from windtunnel.calibrate.live.observed_metrics import observed_from_records, observed_metrics
from windtunnel.calibrate.step_tables import StepTable, recorded_step_table
from windtunnel.calibrate.validation import with_requests
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.metrics.agreement import Attribution, Effect, Headline
from windtunnel.sim.metrics.latency import peak_in_flight
from windtunnel.sim.metrics.words import count, digits, milliseconds, percent, plural, seconds
from windtunnel.sim.records import IntArray
from windtunnel.sim.simulate import serve
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload, workload

HEADLINES = (
    ("output_throughput", "output throughput", "tok/s"),
    ("makespan_s", "makespan", "s"),
    ("mean_ttft_ms", "mean TTFT", "ms"),
    ("mean_tpot_ms", "mean TPOT", "ms"),
    ("mean_e2el_ms", "mean E2EL", "ms"),
    ("preemptions", "preemptions", ""),
)
_LATE_NS = 1_000_000
"""Sending later than due by less is the client's own clock."""
_LEAST_FACTOR = 0.01
"""A factor on all step times that is nearer to 1 is not worth a line."""
_WORTH_TELLING = 0.1
"""Share of an error."""
_FEWEST_PAIRS = 10
_POOL = ("num_gpu_blocks", "block_size")


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated."""

    workload: Workload
    system: System

    def observed(self) -> ObservedRun:
        """The simulated run, measured as a live one is.  Raises as ``sim.simulate.serve``."""
        return observed_from_records(serve(self.workload, self.system), self.workload)


@dataclass(frozen=True, slots=True)
class Ingredient:
    """A part of a prediction that has another value in the live run."""

    name: str
    swap: str
    """From which value to which, in a sentence without its full stop; empty where both are about the same."""
    measured: Callable[[Setup], Setup]
    """Puts the measured value in."""
    is_inferred: bool = False
    order: IntArray | None = None
    """Rows of the workload in their new order, where swapping changes that."""


Told = Callable[[str], None]


class Attributed(NamedTuple):
    """What explains the error, and the simulation in which all of it is at its measured value."""

    attribution: Attribution
    as_measured: ObservedRun
    """With its requests in the order of the workload."""


def attribute(
    planned: Setup,
    ingredients: Sequence[Ingredient],
    live: Sequence[ObservedRun],
    *,
    unmeasured: Sequence[str] = (),
    infers_step_times: bool = True,
    tell: Told | None = None,
) -> Attributed:
    """What each ingredient explains of the difference between the prediction and the mean of the live runs.

    ``infers_step_times`` adds, where it matters, a factor on all step times that makes the mean TPOT the live one:
    what the step times would have to be if they were to blame for what is left.  ``tell`` hears what is simulated.
    Two simulations for each ingredient.  Raises as ``sim.simulate.serve`` does.
    """
    tell = tell or (lambda _: None)
    goal = _mean_headlines([headline_values(run) for run in live])
    found = list(ingredients)
    if infers_step_times:
        inferred = _step_factor(_with(planned, found), goal, tell)
        found += [] if inferred is None else [inferred]
    tell("everything as planned")
    as_planned = planned.observed()
    tell("everything as measured")
    as_measured = _with(planned, found).observed() if found else as_planned
    base, whole = headline_values(as_planned), headline_values(as_measured)
    shown = tuple(
        Headline(key, label, unit, goal[key], base[key], whole[key])
        for key, label, unit in HEADLINES
        if key in goal and key in base and key in whole
    )
    effects = tuple(_effect(planned, found, each, base, whole, shown, tell) for each in found)
    return Attributed(Attribution(shown, effects, tuple(unmeasured)), _in_order(as_measured, found))


def _in_order(run: ObservedRun, swapped: Sequence[Ingredient]) -> ObservedRun:
    """The run with its rows as they were before arrivals reordered them."""
    order = next((each.order for each in swapped if each.order is not None), None)
    return run if order is None else with_requests(run, np.argsort(order))


def headline_values(run: ObservedRun) -> dict[str, float]:
    """The metrics that are explained, those that the run has."""
    told = observed_metrics(run)
    flat = told.to_dict()
    values = {key: flat.get(key) for key, *_ in HEADLINES}
    values["makespan_s"] = told.duration_s if run.makespan_ns is None else run.makespan_ns / NS_PER_S
    return {key: float(value) for key, value in values.items() if value is not None}


def _mean_headlines(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    common = [key for key in each[0] if all(key in values for values in each)]
    return {key: sum(values[key] for values in each) / len(each) for key in common}


def _with(setup: Setup, ingredients: Sequence[Ingredient]) -> Setup:
    for ingredient in ingredients:
        setup = ingredient.measured(setup)
    return setup


def _effect(
    planned: Setup,
    all_of_them: Sequence[Ingredient],
    one: Ingredient,
    base: Mapping[str, float],
    whole: Mapping[str, float],
    shown: Sequence[Headline],
    tell: Told,
) -> Effect:
    others = [each for each in all_of_them if each is not one]
    tell(f"{one.name} as measured")
    alone = headline_values(one.measured(planned).observed()) if others else whole
    tell(f"all but {one.name} as measured")
    without = headline_values(_with(planned, others).observed()) if others else base

    def changes(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
        return {each.key: after.get(each.key, np.nan) - before.get(each.key, np.nan) for each in shown}

    return Effect(one.name, one.swap, changes(alone, base), changes(whole, without), one.is_inferred)


# --- arrivals


def arrivals_of(planned: Workload, run: ObservedRun) -> Ingredient | None:
    """When requests were really sent, in place of when they should be.

    None where that is not known of every request or is the same.
    """
    sent = run.requests.send_ns
    if len(sent) != len(planned) or bool((sent < 0).any()):
        return None
    due = np.where(run.requests.due_ns >= 0, run.requests.due_ns, sent)
    is_open = planned.max_concurrency is None and bool((planned.previous < 0).all())
    if is_open:
        due = planned.arrival_ns
    late = sent - due
    if not (np.abs(late) > _LATE_NS).any():
        return None
    said = f"{_late_words(late)}{_cap_words(run, late)}"
    order = np.argsort(sent, kind="stable")
    return Ingredient(
        "arrivals", said, lambda setup: replace(setup, workload=_sent_at(setup.workload, sent, order)), order=order
    )


def _late_words(late_ns: IntArray) -> str:
    mean, most = milliseconds(float(late_ns.mean()) / 1e6), milliseconds(float(late_ns.max()) / 1e6)
    return f"requests were sent {mean} after they were due on average, at most {most}"


def _cap_words(run: ObservedRun, late_ns: IntArray) -> str:
    cap = client_cap(run, late_ns)
    if cap is None:
        return ""
    return f": the client was capped, never more than {cap:,} in flight"


def client_cap(run: ObservedRun, late_ns: IntArray) -> int | None:
    """Requests in flight at which a client held further ones back; None if that is not why it sent late."""
    table = run.requests
    ends = np.maximum(table.e2el_ns, table.end_ns)
    held = late_ns > _LATE_NS
    if bool((ends < 0).any()) or held.mean() < 0.05:
        return None
    over = np.sort(table.send_ns + ends)
    order = np.argsort(table.send_ns, kind="stable")
    before = np.arange(len(order)) - np.searchsorted(over, table.send_ns[order] - _LATE_NS, side="right")
    peak = peak_in_flight(table.send_ns, table.send_ns + ends)
    near = before[held[order]] >= 0.9 * peak - 1
    return peak if near.mean() > 0.9 else None


def _sent_at(planned: Workload, sent_ns: IntArray, order: IntArray) -> Workload:
    """The requests at fixed times of sending, whatever they waited for."""
    content = planned.content
    return workload(
        sent_ns[order],
        planned.num_prompt_tokens[order],
        planned.num_output_tokens[order],
        max_tokens=planned.max_tokens[order],
        priority=planned.priority[order],
        content=None if content is None else tuple(content[row] for row in order.tolist()),
        num_streams=planned.num_streams,
        request_timeout_ns=planned.request_timeout_ns,
        tenant=None if planned.tenant is None else planned.tenant[order],
        tenants=planned.tenants,
        source=planned.source,
    )


# --- lengths


def lengths_of(planned: Workload, run: ObservedRun) -> Ingredient | None:
    """The tokens that prompts and answers really had; None if they are as asked, or not known."""
    table = run.requests
    if len(table) != len(planned):
        return None
    swaps = {}
    for name, asked, got in (
        ("num_prompt_tokens", planned.num_prompt_tokens, table.num_prompt_tokens),
        ("num_output_tokens", planned.num_output_tokens, table.num_output_tokens),
    ):
        known = table.is_finished & (got > 0)
        real = np.where(known, got, asked)
        if (real != asked).any():
            swaps[name] = (asked, real)
    if not swaps:
        return None
    words = {"num_prompt_tokens": "prompts", "num_output_tokens": "answers"}
    said = "; ".join(
        f"{words[name]} had {count(float(real.mean()))} tokens on average, {count(float(asked.mean()))} were asked for"
        for name, (asked, real) in swaps.items()
    )
    return Ingredient("lengths", said, lambda setup: replace(setup, workload=_with_lengths(setup.workload, swaps)))


def _with_lengths(planned: Workload, swaps: Mapping[str, tuple[IntArray, IntArray]]) -> Workload:
    """Applied before arrivals reorder the rows."""
    columns: dict[str, Any] = {name: real for name, (_, real) in swaps.items()}
    got = columns.get("num_output_tokens", planned.num_output_tokens)
    return replace(planned, **columns, max_tokens=np.maximum(planned.max_tokens, got))


# --- the engine


def engine_of(planned: SchedulerConfig, real: SchedulerConfig, *, formula: str = "plan") -> list[Ingredient]:
    """The server's KV pool and its other settings where they differ from the plan's; ``formula`` is who made the plan.

    The two are swapped apart: a pool that is sound with one may not be with the other's block size, so that this goes
    with the pool.
    """
    found = []
    pool = {name: getattr(real, name) for name in _POOL if getattr(real, name) != getattr(planned, name)}
    if pool:
        said = (
            f"the live server had {real.num_kv_tokens:,} KV tokens ({real.num_gpu_blocks:,} blocks of "
            f"{real.block_size}), the {formula} said {planned.num_kv_tokens:,}"
        )
        found.append(Ingredient("KV pool", said, lambda setup: _configured(setup, pool)))
    others = {
        item.name: getattr(real, item.name)
        for item in fields(SchedulerConfig)
        if item.name not in _POOL and getattr(real, item.name) != getattr(planned, item.name)
    }
    if others:
        told = ", ".join(
            f"{name} {_word(value)} (planned: {_word(getattr(planned, name))})" for name, value in others.items()
        )
        said = f"the live server had {told}"
        found.append(Ingredient("engine settings", said, lambda setup: _configured(setup, others)))
    return found


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _configured(setup: Setup, values: Mapping[str, Any]) -> Setup:
    system = setup.system
    return replace(setup, system=replace(system, config=replace(system.config, **values)))


# --- step times


class AdjustedCost:
    """Another cost model's step times, times a factor, plus a constant."""

    name = "adjusted"
    calibrated = False

    def __init__(self, base: CostModel, *, factor: float = 1.0, extra_s: float = 0.0) -> None:
        self.base = base
        self.factor = factor
        self.extra_s = extra_s

    def step_time_s(self, shape: StepShape) -> Any:
        """Seconds for one step."""
        return self.base.step_time_s(shape) * self.factor + self.extra_s

    def describe(self) -> dict[str, Any]:
        """As plain data."""
        return {"kind": self.name, "factor": self.factor, "extra_s": self.extra_s, "base": self.base.describe()}


def steps_of(planned: Setup, table: StepTable, *, host_s: float | None = None) -> list[Ingredient]:
    """Recorded step times in place of the cost model's, and the host's time beside them if that is told apart."""
    cost = recorded_cost(table, planned.system.cost)
    priced_s = np.array([float(planned.system.cost.step_time_s(shape)) for shape in table.rows()])
    factor = float(table.step_s.sum() / priced_s.sum())
    said = (
        f"a recorded step took {seconds(float(table.step_s.mean()))} on average, the cost model says "
        f"{seconds(float(priced_s.mean()))} of the same steps ({digits(factor)} "
        f"times as long, over {plural(len(table), 'step')})"
    )
    if abs(factor - 1) < _LEAST_FACTOR:
        said = ""
    found = [Ingredient("step times", said, lambda setup: _priced(setup, cost))]
    if host_s is not None:
        said = f"the host took {seconds(host_s)} beside each step, which the cost model leaves out"
        found.append(
            Ingredient(
                "host overhead", said, lambda setup: _priced(setup, AdjustedCost(setup.system.cost, extra_s=host_s))
            )
        )
    return found


def recording_of(planned: Setup, path: Path) -> list[Ingredient]:
    """The ingredients of a recording of ``RecordingScheduler``, or of the folder of a live run.

    The host's time between steps is an ingredient of its own where the cost model says that it holds none.  Raises
    StepTableError for what is no recording.
    """
    provenance = planned.system.cost.describe().get("provenance")
    leaves_out_host = isinstance(provenance, Mapping) and provenance.get("includes_host") is False
    with_host = recorded_step_table([path], include_host=True)
    if not leaves_out_host:
        return steps_of(planned, with_host)
    alone = recorded_step_table([path], include_host=False)
    return steps_of(planned, alone, host_s=float((with_host.step_s - alone.step_s).mean()))


def recorded_cost(table: StepTable, planned: CostModel) -> CostModel:
    """A cost model fitted to the steps; of too few shapes for a fit, ``planned`` times the factor that fits best."""
    from windtunnel.calibrate.fit import FEWEST_SHAPES, Form, StepTimeFit

    if int(table.shape_ids.max()) + 1 >= FEWEST_SHAPES:
        return StepTimeFit(form=Form(token_ratio=2.0, seq_ratio=4.0, context_ratio=4.0, mixed=True)).fit(table)
    priced_s = sum(float(planned.step_time_s(shape)) for shape in table.rows())
    return AdjustedCost(planned, factor=float(table.step_s.sum()) / priced_s)


def _priced(setup: Setup, cost: CostModel) -> Setup:
    return replace(setup, system=replace(setup.system, cost=cost, noise_seed=None))


def _step_factor(measured: Setup, goal: Mapping[str, float], tell: Told) -> Ingredient | None:
    """The factor on all step times with which the mean TPOT is the live one; None if it is 1 or cannot be told."""
    wanted = goal.get("mean_tpot_ms")
    if not wanted:
        return None
    factor, told = 1.0, 0.0
    for _ in range(3):
        tell(f"step times times {digits(factor, 4)}")
        told = headline_values(_scaled(measured, factor).observed()).get("mean_tpot_ms", 0.0)
        if told <= 0:
            return None
        factor = float(np.clip(factor * wanted / told, 0.05, 20.0))
        if abs(wanted / told - 1) < 0.001:
            break
    if abs(factor - 1) < _LEAST_FACTOR:
        return None
    said = f"steps that take {digits(factor, 4)} times as long would give the live mean TPOT"
    return Ingredient("step times (inferred)", said, lambda setup: _scaled(setup, factor), is_inferred=True)


def _scaled(setup: Setup, factor: float) -> Setup:
    return setup if factor == 1.0 else _priced(setup, AdjustedCost(setup.system.cost, factor=factor))


# --- in words


class _Cause(NamedTuple):
    weight: float
    """Share of all that is wrong that it takes away, from 0 to 1; what it adds to other errors does not count."""
    words: str


def causes_of(attributed: Attributed, live: ObservedRun, predicted: ObservedRun) -> list[str]:
    """What is likely to be behind the error, most of it first, in sentences with numbers."""
    attribution, as_measured = attributed
    found = [*_explained(attribution), *_left(attribution, live, as_measured)]
    ranked = [each.words for each in sorted(found, key=lambda each: -each.weight)]
    return [*ranked, *_opposed(attribution), *_prefix_suspicions(live, predicted)]


def _explained(attribution: Attribution) -> Iterator[_Cause]:
    wrong = [each for each in attribution.headlines if each.is_wrong]
    plain = [each for each in wrong if not attribution.has_opposing_effects(each)]
    for effect in attribution.effects:
        shares = [(attribution.explained(effect, each) or 0.0, each) for each in plain]
        told = [(share, each) for share, each in shares if share >= _WORTH_TELLING]
        if not told or not effect.swap:
            continue
        words = effect.swap[:1].upper() + effect.swap[1:]
        weight = sum(max(_taken_away(share), 0.0) for share, _ in shares) / len(wrong)
        yield _Cause(weight, f"{words}: this explains {_share_words(told)}.")


def _taken_away(share: float) -> float:
    """By how much an error gets smaller: one that is overshot is wrong on the other side."""
    return 1.0 - abs(1.0 - share)


def _opposed(attribution: Attribution) -> Iterator[str]:
    """Errors that are the small difference of large effects."""
    for headline in attribution.headlines:
        if not headline.is_wrong or not headline.live or not attribution.has_opposing_effects(headline):
            continue
        changes = {each.ingredient: 100 * each.change(headline.key) / headline.live for each in attribution.effects}
        down, up = min(changes, key=changes.__getitem__), max(changes, key=changes.__getitem__)
        if changes[down] < 0 < changes[up]:
            yield (
                f"The error in {headline.label} is the small rest of two large opposite effects: {down} "
                f"({changes[down]:+.1f} points) and {up} ({changes[up]:+.1f} points)."
            )


def _share_words(told: Sequence[tuple[float, Headline]]) -> str:
    """``83 % of the error in mean TTFT``, ``90 % to 100 % of the errors in makespan and mean E2EL``."""
    shares = sorted({percent(min(share, 1.0)): min(share, 1.0) for share, _ in told}.items(), key=lambda each: each[1])
    span = shares[0][0] if len(shares) == 1 else f"{shares[0][0]} to {shares[-1][0]}"
    labels = [each.label for _, each in told]
    named = labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"
    return f"{span} of the error{'s' if len(labels) > 1 else ''} in {named}"


def _prefix_suspicions(live: ObservedRun, predicted: ObservedRun) -> Iterator[str]:
    theirs = observed_metrics(live).prefix_cache_hit_rate
    ours = observed_metrics(predicted).prefix_cache_hit_rate
    if theirs is None or ours is None or abs(theirs - ours) < 0.02:
        return
    if theirs > ours:
        yield (
            f"{percent(theirs)} of the prompt tokens were found in the live prefix cache, {percent(ours)} in the "
            "simulated one: the cache was warm from an earlier run, or prompts share more than the workload says."
        )
    else:
        yield (
            f"{percent(theirs)} of the prompt tokens were found in the live prefix cache, {percent(ours)} in the "
            "simulated one: blocks were evicted that are kept here, or requests shared less than the workload says."
        )


def _left(attribution: Attribution, live: ObservedRun, as_measured: ObservedRun) -> Iterator[_Cause]:
    """First tokens that are late even with everything measured: on their way if by about the same in all requests."""
    headline = next((each for each in attribution.headlines if each.key == "mean_ttft_ms"), None)
    if headline is None or not headline.is_wrong:
        return
    rest = (headline.live - headline.measured) / (headline.live - headline.predicted)
    late_ms = _first_tokens_late_ms(live, as_measured)
    if rest <= 0.5 or late_ms is None:
        return
    low, middle, high = np.percentile(late_ms, [25, 50, 75]).tolist()
    if middle <= 0.02 * headline.live:
        return
    number = sum(each.is_wrong for each in attribution.headlines)
    said = (
        f"First tokens came {milliseconds(middle)} later in the median request than simulated with everything at its "
        f"measured value, and between {milliseconds(low)} and {milliseconds(high)} later in half of them"
    )
    share = f"{percent(min(rest, 1.0))} of the error in mean TTFT"
    if high - low < 0.8 * middle:
        why = "whatever the queue: the way through HTTP, tokenizing and the client, which is not simulated"
    else:
        why = "so not by about the same in all: more than the way through HTTP, and nothing measured tells what"
    yield _Cause(max(_taken_away(rest), 0.0) / number, f"{said}, {why}; this is {share}.")


def _first_tokens_late_ms(live: ObservedRun, simulated: ObservedRun) -> FloatArray | None:
    """By request; None of too few of them."""
    theirs, ours = live.requests, simulated.requests
    if len(theirs) != len(ours):
        return None
    known = theirs.is_finished & ours.is_finished & (theirs.ttft_ns > 0) & (ours.ttft_ns > 0)
    if int(known.sum()) < _FEWEST_PAIRS:
        return None
    late_ms: FloatArray = (theirs.ttft_ns - ours.ttft_ns)[known] / 1e6
    return late_ms
