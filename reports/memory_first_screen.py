"""What a reader of a memory plan wants first: the answer, what it costs and what the risk is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windtunnel.reports.memory_text import VERDICT_WORDS, MemoryRow, short, size
from windtunnel.reports.values import plain
from windtunnel.reports.words import NOTHING, digits, plural
from windtunnel.sim.deployment.memory_plan import DOES_NOT_START, OK, UNSAFE

NO_PRICE = "no price was given (--gpu-price)"


@dataclass(frozen=True, slots=True)
class Card:
    """One of the few numbers at the top."""

    name: str
    value: str
    more: str


@dataclass(frozen=True, slots=True)
class Cost:
    """What the GPUs of a plan cost, by the price that was given for one."""

    per_hour: float
    currency: str

    def words(self, amount: float | None = None) -> str:
        """An amount, or that of an hour, with its currency."""
        return f"{digits(self.per_hour if amount is None else amount)} {self.currency}".rstrip()


def headline(row: MemoryRow) -> str:
    """The answer in a sentence."""
    plan, verdict = row.plan, row.judged.verdict
    if verdict == DOES_NOT_START:
        return "vLLM does not start like this."
    tokens = f"{plan.kv_cache_tokens:,} tokens fit the KV cache"
    if verdict == UNSAFE:
        return f"{tokens}, but it is unsafe."
    return f"{tokens}, with a warning." if row.warnings else f"{tokens}."


def plan_cards(row: MemoryRow, cost: Cost | None = None) -> Iterator[Card]:
    """Answer, cost and risk of one plan."""
    plan, request, verdict = row.plan, row.plan.request, row.judged.verdict
    low, high = plan.interval_90
    spread = f"tokens; {low:,} to {high:,} in nine starts of ten" if low != high else "tokens"
    gpus = f"{request.num_gpus:,} x {request.gpu.name}"
    if verdict == DOES_NOT_START:
        helps = f"{plural(len(row.judged.remedies), 'change')} would help" if row.judged.remedies else "see below"
        yield Card("KV cache", NOTHING, "it does not start")
        yield Card("Cost", gpus, NO_PRICE if cost is None else f"{cost.words()} per hour")
        yield Card("Risk", VERDICT_WORDS[verdict], helps)
        return
    yield Card("KV cache", f"{plan.kv_cache_tokens:,}", spread)
    each, of = plan.max_concurrency, f"of {plan.settings.max_model_len:,} tokens each (max_model_len)"
    if row.users is not None:
        each, of = row.users.running, f"of {row.users.mean_tokens:,} tokens each"
    yield Card("Requests at once", f"{each:,}" if isinstance(each, int) else f"{each:,.1f}", of)
    yield Card("Cost", gpus, NO_PRICE if cost is None else _cost_words(cost, float(each)))
    yield Card("Risk", VERDICT_WORDS[verdict], _left(row))


def _cost_words(cost: Cost, requests: float) -> str:
    each = f", {cost.words(cost.per_hour / requests)} for each of those requests" if requests >= 1 else ""
    return f"{cost.words()} per hour{each}"


def _left(row: MemoryRow) -> str:
    """What is left on the card, and by how much that may be too high."""
    plan = row.plan
    if plan.margin_bytes < 0:
        return "by the estimates nothing is left, but it runs"
    off = plan.margin_spread_bytes
    return f"{size(plan.margin_bytes)} stay free{f', or up to {size(off)} less' if off else ''}"


def sweep_cards(axes: Sequence[str], points: Sequence[Mapping[str, Any]], currency: str = "") -> Iterator[Card]:
    """Answer, cost and risk of many plans."""
    ok = [point for point in points if point["verdict"] == OK]
    unsafe = sum(point["verdict"] == UNSAFE for point in points)
    rest = len(points) - len(ok) - unsafe
    if ok:
        largest = max(ok, key=lambda point: point["kv_cache_tokens"])
        yield Card("Most KV tokens", f"{largest['kv_cache_tokens']:,}", point_words(axes, largest))
        least = cheapest(ok)
        gpus = plural(least["num_gpus"], "GPU")
        if least.get("cost_per_hour") is not None:
            hourly = Cost(least["cost_per_hour"], currency)
            yield Card("Cheapest that is ok", f"{hourly.words()} per hour", f"{gpus}, {point_words(axes, least)}")
        else:
            yield Card("Fewest GPUs that are ok", gpus, f"{point_words(axes, least)}; {NO_PRICE}")
        tightest = min(ok, key=lambda point: point["oom_margin_bytes"])
        yield Card("Risk: least left of the ok", size(tightest["oom_margin_bytes"]), point_words(axes, tightest))
    yield Card("Plans", f"{len(ok):,} ok", f"{unsafe:,} unsafe, {rest:,} do not start")


def hourly(point: Mapping[str, Any], currency: str) -> str:
    """What a plan of a sweep costs in an hour."""
    cost = point.get("cost_per_hour")
    return NOTHING if cost is None else Cost(cost, currency).words()


def cheapest(points: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The plan that costs least, of those that cost the same the one with the largest KV cache."""
    return min(points, key=lambda point: (price(point), -point["kv_cache_tokens"]))


def price(point: Mapping[str, Any]) -> float:
    """What a plan costs in an hour; its GPUs where no price was given."""
    cost = point.get("cost_per_hour")
    return float(point["num_gpus"]) if cost is None else float(cost)


def point_words(axes: Sequence[str], point: Mapping[str, Any]) -> str:
    """The settings of one plan of a sweep."""
    return ", ".join(f"{short(axis)} {plain(point[axis])}" for axis in axes)
