"""A plan in words and rows: what its text, its Markdown and its page share.  All of it is read from plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from windtunnel.reports.words import NOTHING, count, digits, milliseconds, percent, plural
from windtunnel.sim.cost.evidence import in_words
from windtunnel.sim.metrics.slo import OPERATORS

Told = Mapping[str, Any]
GIB = 2**30
KINDS = {
    "does_not_fit": "does not fit",
    "unsafe": "unsafe start",
    "refused": "refused",
    "uncalibrated": "uncalibrated",
    "too_long": "with requests too long",
    "too_slow_alone": "too slow alone",
    "too_many": "too many replicas",
    "dearer_by_bound": "dearer by bound",
    "never_holds": "never holds",
}
"""Why a deployment is not the answer, in short."""


# --- numbers


def money(value: float | None, told: Told) -> str:
    """An amount in the plan's currency; cards where there are no prices."""
    if value is None:
        return NOTHING
    if not told["has_prices"]:
        return plural(round(value), "GPU")
    return f"{_amount(value)} {told['currency']}"


def _amount(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.2f}" if abs(value) >= 0.095 else digits(value, 2)


def measured(value: float | None, unit: str) -> str:
    """What was measured of an objective, in its unit."""
    if value is None:
        return NOTHING
    if unit == "ms":
        return milliseconds(value)
    return f"{digits(value, 4)} {unit}".strip()


def interval(told: Told | None, num_digits: int = 3) -> str:
    """``9.2 (8.7 to 9.7)``; without bounds where there is one replication."""
    if not told or told.get("mean") is None:
        return NOTHING
    low, high = told.get("low"), told.get("high")
    bounds = "" if low is None or high is None else f" ({digits(low, num_digits)} to {digits(high, num_digits)})"
    return f"{digits(told['mean'], num_digits)}{bounds}"


def size_of(row: Told, spare: int = 0) -> str:
    """``9 replicas of 4 x H100-SXM (TP 4)``, with spare ones ``9 + 1 replicas``."""
    number = row["num_replicas"]
    what = "replicas" if number is None else plural(number, "replica")
    if number is not None and spare:
        what = f"{number:,} + {spare:,} replicas"
    return f"{what} of {row['label']}"


def knobs_of(row: Told) -> str:
    """The engine's settings, in short."""
    return (
        f"max_num_seqs {row['max_num_seqs']:,}, max_num_batched_tokens {row['max_num_batched_tokens']:,}, "
        f"gpu_memory_utilization {row['gpu_memory_utilization']:g}"
    )


# --- the first screen


def title(told: Told) -> str:
    """What is planned."""
    demand = told["demand"]
    models = ", ".join(str(name) for name in told["asked"]["models"])
    return f"{models} at {count(demand['mean_rate'])} requests/s"


def headline(told: Told) -> str:
    """The answer in one sentence."""
    best = told["recommended"]
    if told["verdict"] == "nothing_fits":
        kinds = {each["kind"] for each in told["refused"]}
        return f"No deployment starts: {'nothing fits' if kinds & {'does_not_fit', 'unsafe'} else 'all are refused'}."
    if best is None:
        too_long = {each["kind"] for each in told["dropped"]} == {"too_long"}
        return f"No deployment keeps the objectives{': too many requests are refused' if too_long else ''}."
    number = best["num_replicas"] + told["spare_replicas"]
    cost = (
        f": {money(best['cost_per_hour'], told)} an hour"
        if told["has_prices"]
        else f": {plural(best['num_gpus'], 'GPU')}"
    )
    refused = f"; {percent(best['refused_share'])} of the requests are refused" if best["refused_share"] else ""
    doubts = f", in doubt: {', '.join(best['doubts'])}" if best["doubts"] else ""
    return f"{plural(number, 'replica')} of {best['label']}{cost}{refused}{doubts}."


def tone(told: Told) -> str:
    """good, note or bad: a warning, requests that are refused, or a replica whose failure the rest does not bear."""
    best = told["recommended"]
    if best is None:
        return "bad"
    down, crash = best["one_down"], best["crash"]
    is_fragile = down is None or down["num_held"] < down["num_replications"] or crash is None or not crash["holds"]
    return "note" if told["warnings"] or best["refused_share"] or is_fragile else "good"


def first_sentences(told: Told) -> Iterator[str]:
    """Answer, cost and risk, for who reads no further."""
    best = told["recommended"]
    if best is None:
        yield from _why_nothing(told)
        return
    yield from _cost_sentence(told, best)
    yield _holds_sentence(best)
    yield _binds_sentence(best)
    yield _room_sentence(told, best)
    yield from _failure_sentence(told, best)
    yield from _equal_sentence(told)
    yield from _level_sentence(best)
    yield from _noise_sentence(told, best)


def _why_nothing(told: Told) -> Iterator[str]:
    nearest = told["nearest"]
    if nearest is not None:
        missed = " and ".join(
            f"{each['text']} ({measured(each['measured'], each['unit'])})" for each in nearest["missed"]
        )
        yield f"Nearest is {nearest['label']}, which misses {missed}."
    yield from dict.fromkeys(_sentence(each["reason"]) for each in told["dropped"] if each["kind"] == "too_long")
    reasons: dict[str, int] = {}
    for each in (*told["refused"], *told["dropped"]):
        if each.get("is_whole", True):
            reasons[KINDS[each["kind"]]] = reasons.get(KINDS[each["kind"]], 0) + 1
    if reasons:
        yield f"Of what was looked at: {', '.join(f'{number} {kind}' for kind, number in reasons.items())}."


def _cost_sentence(told: Told, best: Told) -> Iterator[str]:
    bill = best["bill"]
    if told["has_prices"]:
        yield (
            f"{money(bill['per_month'], told)} a month (730 h). A million tokens cost "
            f"{money(bill['per_million_input_tokens'], told)} of input, "
            f"{money(bill['per_million_output_tokens'], told)} of output, {money(bill['per_million_tokens'], told)} "
            "blended, at the mean load."
        )
    if bill["watts"] is not None:
        yield (
            f"It draws {bill['watts'] / 1000:,.1f} kW on average: {bill['kwh_per_month']:,.0f} kWh a month, "
            f"{digits(bill['wh_per_million_tokens'], 3)} Wh for a million tokens."
        )


def _holds_sentence(best: Told) -> str:
    rows = best["objectives_over_replications"]
    shown = ", ".join(f"{row['text']}: {spread(row)}" for row in rows)
    refused = f", {percent(best['refused_share'])} of the requests refused" if best["refused_share"] else ""
    return f"All objectives held in {plural(rows[0]['num'], 'simulation')} of the whole fleet ({shown}{refused})."


def spread(row: Told) -> str:
    """A value and what it was in other replications."""
    low, high = row["low"], row["high"]
    if low is None or high is None or measured(low, row["unit"]) == measured(high, row["unit"]):
        return measured(row["measured"], row["unit"])
    return f"{measured(low, row['unit'])} to {measured(high, row['unit'])}"


def _binds_sentence(best: Told) -> str:
    return f"At the most that it carries, what binds is {best['binding']}: {best['binding_meaning']}."


def _room_sentence(told: Told, best: Told) -> str:
    room, demand = best["headroom"], told["demand"]
    worst, spare = best["worst"], told["spare_replicas"]
    it = f"Without {_the_spare(spare)} it" if spare else "It"
    nearest = f" (nearest now: {worst})" if worst and len(told["asked"]["objectives"]) > 1 else ""
    until = "before it cannot keep up" if best["is_full_first"] else f"before it misses an objective{nearest}"
    text = f"{it} carries {interval(room)} times this load {until}"
    if not demand["peak_rates"]:
        return f"{text}."
    return (
        f"{text}; the load's busiest {_window(demand)} is {digits(demand['peak_to_mean'], 3)} times its mean "
        f"({count(demand['peak_rate'])} against {count(demand['mean_rate'])} requests/s)."
    )


def _window(demand: Told) -> str:
    seconds = demand["peak_window_s"]
    return "minute" if seconds == 60 else f"{digits(seconds, 2)} s"


def _failure_sentence(told: Told, best: Told) -> Iterator[str]:
    down, extra = best["one_down"], best["redundant"]
    spare = told["spare_replicas"]
    cost = f", {money(extra['cost_per_hour'], told)} an hour" if told["has_prices"] else ""
    redundant = f" N+1 takes {plural(extra['num_replicas'], 'replica')}{cost}."
    if spare:
        redundant = ""
        yield (
            f"{plural(spare, 'spare replica')} included: {plural(best['num_replicas'], 'replica')} keep the objectives "
            "by themselves."
        )
    if down is None:
        yield f"There is one replica only: if it fails nothing is served.{redundant}"
    elif down["num_held"] == down["num_replications"]:
        yield f"With one replica down the objectives still hold.{redundant}"
    else:
        held = f" (held in {down['num_held']} of {down['num_replications']})" if down["num_held"] else ""
        missed = [row for row in down["objectives"] if row["text"] in down["missed"]]
        left = plural(down["num_replicas"], "replica")
        yield f"If one replica fails, {_what_gives(missed, down, left)}{held}.{redundant}"


def _what_gives(missed: Sequence[Told], case: Told, who: str) -> str:
    """Why objectives are missed: those beyond their limits, and, where that is it, a load that is too much."""
    beyond = ", ".join(f"{row['text']}: {_value(row)}" for row in missed if not _is_within(row))
    if case["overloaded"]:
        return f"{who} cannot keep up{_at_rho(case)}{f': {beyond}' if beyond else ''}"
    others = "; ".join(dict.fromkeys(row["note"] for row in missed if _is_within(row) and row["note"]))
    told = beyond or ", ".join(row["text"] for row in missed)
    return f"{who} {'misses' if who.startswith('1 ') else 'miss'} {told}{f' ({others})' if others else ''}"


def _at_rho(case: Told) -> str:
    """The load over what they can do at most, where that is known."""
    return "" if case["rho"] is None else f" (rho {percent(case['rho'])})"


def _value(row: Told) -> str:
    return spread(row) if "low" in row else measured(row["measured"], row["unit"])


def _is_within(row: Told) -> bool:
    """Whether the value alone, the worst over the replications, keeps the objective."""
    is_floor = row["operator"] in (">", ">=")
    value = row.get("low" if is_floor else "high", row["measured"])
    if value is None:
        return False
    return bool(OPERATORS[row["operator"]](value, row["limit"]))


def _equal_sentence(told: Told) -> Iterator[str]:
    if told["equal"]:
        best, spare = told["recommended"], told["spare_replicas"]
        listed = "; ".join(f"{_apart(best, row, spare)} ({money(row['cost_per_hour'], told)})" for row in told["equal"])
        yield f"Within noise of it: {listed}."


def _level_sentence(best: Told) -> Iterator[str]:
    """Settings that another seed may as well recommend."""
    if best["level_settings"]:
        listed = "; ".join(
            f"{_turned(best, each)} (takes {each['replicas_needed']['mean']:.2f})" for each in best["level_settings"]
        )
        yield (
            f"As good as these settings (which take {best['replicas_needed']['mean']:.2f} replicas), as far as "
            f"{best['replicas_needed']['num']} replications can tell: {listed}."
        )


def _turned(best: Told, row: Told) -> str:
    return ", ".join(f"{name} {row[name]:,}" for name in _KNOBS if row[name] != best[name])


_KNOBS = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")


def _apart(best: Told, row: Told, spare: int) -> str:
    """Another fleet, by what it has otherwise than the recommended one."""
    if row["label"] != best["label"]:
        return size_of(row, spare)
    number = row["num_replicas"]
    return f"{_turned(best, row)} with {'as many' if number == best['num_replicas'] else number} replicas"


def _the_spare(number: int) -> str:
    return "the spare replica" if number == 1 else f"the {number:,} spare replicas"


def apart_sentence(told: Told) -> Iterator[str]:
    """The cheapest without a profile, where they were tried."""
    other, spare = told["uncalibrated_alternative"], told["spare_replicas"]
    if other is not None:
        yield (
            f"Uncalibrated, so kept apart: {size_of(other, spare)}, {money(other['cost_per_hour'], told)} an hour by "
            "the roofline. Measure it before you believe it."
        )


def _noise_sentence(told: Told, best: Told) -> Iterator[str]:
    low, high = best["size_within_noise"]["low"], best["size_within_noise"]["high"]
    if low != high:
        spare = told["spare_replicas"]
        safe = "" if high == best["num_replicas"] else f" {high + spare:,} in all is the safe choice."
        beside = f" beside {_the_spare(spare)}" if spare else ""
        yield (
            f"Other draws of the same load may ask for {low} to {high} replicas{beside}: a difference of that size is "
            f"noise.{safe}"
        )


# --- tables


def cost_heads(told: Told) -> tuple[str, str, str]:
    """Of the table of costs: beside what is recommended, one replica more, or, with spare ones, without them."""
    spare = told["spare_replicas"]
    return "What", "As recommended", f"Without {_the_spare(spare)}" if spare else "One replica more"


def cost_rows(told: Told) -> list[tuple[str, str, str]]:
    """What, as recommended, and as the third of ``cost_heads`` says."""
    best = told["recommended"]
    one, more = best["bill"], (best["needed_alone"] or best["redundant"])["bill"]
    rows = [("GPUs", f"{one['num_gpus']:,}", f"{more['num_gpus']:,}")]
    if told["has_prices"]:
        rows += [
            (name, money(one[key], told), money(more[key], told))
            for name, key in (
                ("an hour", "per_hour"),
                ("a month (730 h)", "per_month"),
                ("a million input tokens", "per_million_input_tokens"),
                ("a million output tokens", "per_million_output_tokens"),
                ("a million tokens, blended", "per_million_tokens"),
                ("a million output tokens, prompts free", "per_million_output_tokens_alone"),
            )
        ]
    if one["watts"] is not None:
        rows += [
            ("mean power", f"{one['watts'] / 1000:,.2f} kW", f"{more['watts'] / 1000:,.2f} kW"),
            ("energy a month", f"{one['kwh_per_month']:,.0f} kWh", f"{more['kwh_per_month']:,.0f} kWh"),
            (
                "energy for a million tokens",
                f"{digits(one['wh_per_million_tokens'], 3)} Wh",
                f"{digits(more['wh_per_million_tokens'], 3)} Wh",
            ),
        ]
    return rows


def candidate_heads(told: Told) -> list[str]:
    """Of the table of candidates."""
    cost = "Cost an hour" if told["has_prices"] else "GPUs"
    return ["Deployment", "Seats", "Budget", "Memory", "Replicas it takes", "Fleet", cost, "Binds", "Verdict"]


def candidate_cells(told: Told, row: Told) -> list[str]:
    """One candidate of that table."""
    if row["replicas_needed"] is None:
        missed = ", ".join(
            f"{each['text']} ({measured(each['measured'], each['unit'])})" for each in row["misses"] or ()
        )
        verdict = f"never holds{f': {missed}' if missed else ''}"
    else:
        verdict = "whole fleet held" if row["is_verified"] else "estimate"
    return [
        row["label"] + _evidence_beside(told, row),
        f"{row['max_num_seqs']:,}",
        f"{row['max_num_batched_tokens']:,}",
        f"{row['gpu_memory_utilization']:g}",
        interval(row["replicas_needed"]),
        _fleet_cell(row, told["spare_replicas"]),
        money(row["cost_per_hour"], told)
        if told["has_prices"]
        else (f"{row['num_gpus']:,}" if row["num_gpus"] else NOTHING),
        row["binding"] or NOTHING,
        verdict,
    ]


def _evidence_beside(told: Told, row: Told) -> str:
    """What stands behind a candidate's step times, where it is not the same for all of them or is nothing."""
    is_alike = all(each["evidence"] == row["evidence"] for each in told["candidates"])
    return "" if is_alike and row["calibrated"] else f", {in_words(row['evidence'])}"


def _fleet_cell(row: Told, spare: int) -> str:
    number = row["num_replicas"]
    if number is None:
        return NOTHING
    return f"{number:,} + {spare:,}" if spare else f"{number:,}"


RUNNER_UP_HEADS = ("Fleet", "Knobs", "An hour", "Measured", "Verdict")


def runner_up_rows(told: Told) -> list[list[str]]:
    """Whole fleets beside the recommended one: deployment, knobs, cost, what comes of it."""
    best, spare = told["recommended"], told["spare_replicas"]
    verdicts = [(best, "recommended"), *((row, row["why_not"]) for row in told["runners_up"])]
    return [
        [
            size_of(row, spare),
            knobs_of(row),
            money(row["cost_per_hour"], told),
            _objectives(row),
            verdict,
        ]
        for row, verdict in verdicts
    ]


def _objectives(row: Told) -> str:
    return ", ".join(
        f"{':'.join(filter(None, (each['metric'], each['statistic'])))} {measured(each['measured'], each['unit'])}"
        for each in row["objectives"] or ()
    )


def room_rows(told: Told) -> list[tuple[str, str, str]]:
    """Head-room: what, how much, and what it is."""
    best, spare = told["recommended"], told["spare_replicas"]
    fleet = f"{plural(best['num_replicas'], 'replica')}, the spare left out" if spare else "whole fleet"
    rows = [
        (
            "load until an objective is missed",
            f"{interval(best['headroom'])} x",
            f"{fleet}, this workload faster and faster",
        ),
        (
            "requests/s of one replica",
            interval(best["rate_per_replica"]),
            "with this workload's bursts, within the objectives",
        ),
    ]
    if best["rho"] is not None:
        rows.append(("rho at the mean load", percent(best["rho"]), "mean rate over what the fleet can do at most"))
        rows.append(
            (f"rho in the busiest {_window(told['demand'])}", percent(best["peak_rho"]), "the same at the peak")
        )
    rows += [
        ("time in which steps run", percent(best["utilisation"]), "mean over replicas"),
        ("KV cache in use, peak", percent(best["kv_usage_peak"]), f"{best['num_kv_tokens']:,} tokens a replica"),
        ("requests at once, peak", f"{best['num_running_peak']:,}", f"of {best['max_num_seqs']:,} seats of a replica"),
        ("memory left on a card", f"{best['oom_margin_bytes'] / GIB:.1f} GiB", "once the KV cache is there"),
    ]
    rows += [
        (f"{row['text']}", f"{spread(row)}", f"{percent(row['strain'])} of what it allows")
        for row in best["objectives_over_replications"]
        if row["strain"] is not None
    ]
    return rows


def risk_rows(told: Told) -> list[tuple[str, str]]:
    """What if: case and consequence."""
    best, rows = told["recommended"], []
    down = best["one_down"]
    if down is not None:
        values = ", ".join(f"{row['text']}: {spread(row)}" for row in down["objectives"])
        held = f"held in {down['num_held']} of {plural(down['num_replications'], 'simulation')}"
        rows.append((f"one replica down ({down['num_replicas']} left)", f"{held}{_too_much(down)}; {values}"))
    crash = best["crash"]
    if crash is not None:
        values = ", ".join(f"{row['text']}: {measured(row['measured'], row['unit'])}" for row in crash["objectives"])
        anew = f"{plural(crash['num_begun_anew'], 'request')} begun anew elsewhere"
        rows.append(
            (
                "one replica crashes in the busiest minute, for good",
                f"{_kept(crash)}; over the whole workload {values}; {anew}",
            )
        )
    slower, spare = best["slower"], told["spare_replicas"]
    without = f", without {_the_spare(spare)}" if spare else ""
    if slower is not None:
        values = ", ".join(f"{row['text']}: {measured(row['measured'], row['unit'])}" for row in slower["objectives"])
        takes = (
            ""
            if slower["holds"] or slower["num_replicas"] is None
            else (
                f"; it then takes about {plural(slower['num_replicas'] + told['spare_replicas'], 'replica')}, "
                f"{money(slower['cost_per_hour'], told)} an hour"
            )
        )
        rows.append(
            (
                f"every step {slower['percent']:.1f} % longer (the profile's error, nine steps of ten){without}",
                f"{_kept(slower)}: {values}{takes}",
            )
        )
    for row in best["fewer"]:
        missed = [each for each in row["objectives"] if not each["passed"]]
        if not row["holds"]:
            case = f"{plural(row['num_replicas'], 'replica')} in all"
            rows.append((case, _what_gives(missed, row, "they" if row["num_replicas"] > 1 else "it")))
    worst = (best["fleet"] or {}).get("worst_minute_ms") or {}
    if worst.get("ttft") is not None:
        rows.append(
            (
                f"in the worst minute{without}",
                f"TTFT p99 {milliseconds(worst['ttft'])}, E2EL p99 {milliseconds(worst['e2el'])}",
            )
        )
    return rows


def _kept(case: Told) -> str:
    """What became of the objectives in a case, over which their values are told."""
    if case["holds"]:
        return "still holds"
    return f"misses{_too_much(case)}" if any(not row["passed"] for row in case["objectives"]) else _too_much(case)[2:]


def _too_much(case: Told) -> str:
    if not case["overloaded"]:
        return ""
    return f", cannot keep up{_at_rho(case)}"


def peak_rows(told: Told) -> list[tuple[str, str]]:
    """Peak against mean."""
    demand, best = told["demand"], told["recommended"]
    rows = [("mean", f"{count(demand['mean_rate'])} requests/s")]
    rows += [(f"busiest {window} s", f"{count(rate)} requests/s") for window, rate in demand["peak_rates"].items()]
    rows.append(
        ("gaps between arrivals", f"coefficient of variation {digits(demand['burstiness_cv'], 3)} (1 is Poisson)")
    )
    if best is not None:
        at = best["peak_and_mean"]
        if at["replicas_to_keep_up_with_mean"] is not None:
            rows.append(
                (
                    "replicas to keep up, whatever the latency",
                    f"{digits(at['replicas_to_keep_up_with_mean'], 3)} at the mean, "
                    f"{digits(at['replicas_to_keep_up_with_peak'], 3)} in the busiest {_window(demand)}",
                )
            )
        rows.append(
            ("replicas to keep the objectives", f"{interval(best['replicas_needed'])}, so {best['num_replicas']}")
        )
    return rows


def growth_rows(told: Told) -> list[list[str]]:
    """Month, load, replicas, cards, cost, and what is cheaper then."""
    growth = told["growth"]
    return [
        [
            f"{row['month']}",
            f"{row['load']:,.2f} x",
            f"over {growth['most_replicas']:,}" if row["num_replicas"] is None else f"{row['num_replicas']:,}",
            NOTHING if row["num_gpus"] is None else f"{row['num_gpus']:,}",
            money(row["cost"], told),
            row["cheapest"] or "",
        ]
        for row in growth["rows"]
    ]


def growth_sentence(told: Told) -> str:
    """How long today's fleet suffices."""
    growth = told["growth"]
    months = growth["months_until_full"]
    rate = f"{growth_rate(told)} a month"
    if months is None:
        return f"At {rate} this fleet suffices for all {growth['num_months']} months."
    until = "is full within the first month" if months == 0 else f"suffices for {plural(months, 'month')}"
    beyond = [row["month"] for row in growth["rows"] if row["num_replicas"] is None]
    most = f" From month {beyond[0]} on it takes more than {growth['most_replicas']:,} replicas." if beyond else ""
    return f"At {rate} this fleet {until}.{most}"


def growth_rate(told: Told) -> str:
    """What the load grows by in a month: ``+5 %``."""
    share = told["growth"]["per_month"]
    return f"{'-' if share < 0 else '+'}{digits(100 * abs(share), 2)} %"


def pruned_rows(told: Told) -> list[tuple[str, str, str]]:
    """What is not the answer, and why: deployments, kind, reason; those of one reason together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in told["refused"]:
        some = "" if each["is_whole"] else f" with {plural(len(each['knobs']), 'setting')} of the knobs"
        groups.setdefault((KINDS[each["kind"]], " ".join(each["reason"].split())), []).append(each["label"] + some)
    for each in told["dropped"]:
        bound = f" (at least {money(each['bound'], told)} an hour)" if each["bound"] is not None else ""
        groups.setdefault((KINDS[each["kind"]], each["reason"] + bound), []).append(each["label"])
    return [("; ".join(labels), kind, _sentence(reason)) for (kind, reason), labels in groups.items()]


def _sentence(text: str) -> str:
    """With a capital and a full stop, whatever it came with."""
    ended = text if text.endswith((".", "!", ")")) else f"{text}."
    return ended[:1].upper() + ended[1:]


def effectless_rows(told: Told) -> list[tuple[str, str]]:
    """Values of knobs that change nothing, grouped: what, and why."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for each in told["without_effect"]:
        groups.setdefault((each["label"], each["knob"], each["reason"]), []).append(f"{each['value']:,g}")
    return [(f"{label}: {knob} {', '.join(values)}", reason) for (label, knob, reason), values in groups.items()]


def asked_rows(told: Told) -> list[tuple[str, str]]:
    """What was asked."""
    asked, demand = told["asked"], told["demand"]
    prices = ", ".join(_offer_words(each, told) for each in asked["gpus"])
    rows = [
        ("Model", ", ".join(asked["models"])),
        ("Workload", f"{demand['source']}: {demand['num_requests']:,} requests over {_span(demand['span_s'])}"),
        (
            "Lengths",
            f"{count(demand['mean_prompt_tokens'])} tokens in, {count(demand['mean_output_tokens'])} out on average, "
            f"longest {demand['longest_tokens']:,} together",
        ),
        ("Objectives", ", ".join(asked["objectives"])),
    ]
    if asked["goodput"]:
        rows.append(("A good request", asked["goodput"]))
    rows.append(("GPUs to choose from", prices))
    rows += [(key, str(value)) for key, value in asked["fixed"].items()]
    if asked["router"]:
        rows.append(("Router", f"{asked['router']} (replicas behind one address)"))
    rows.append(("Engine", asked["engine"]))
    return rows


def _offer_words(offer: Told, told: Told) -> str:
    """A card with its price and its power, where they were given."""
    price = "" if offer["price_per_hour"] is None else f" {money(offer['price_per_hour'], told)} an hour"
    power = "" if offer["busy_watts"] is None else f", {offer['busy_watts']:g} W busy"
    if offer["idle_watts"] is not None:
        power += f" and {offer['idle_watts']:g} W idle"
    return f"{offer['gpu']}{price}{power}"


def _span(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.1f} s"


def how_sentences(told: Told) -> list[str]:
    """How the answer came about."""
    search = told["search"]
    return [
        "The memory plan says what starts; requests served one at a time say what is too slow at any load; the most "
        "that a replica can do bounds how many it takes at least.",
        "How many replicas a deployment takes is found on one replica's share of the requests (as if all took turns), "
        f"in at least {search['requests_per_simulation']:,} requests a simulation, bracketed to "
        f"{100 * search['tolerance']:.0f} %; intervals are 95 % (Student's t) over "
        f"{plural(search['replications'], 'replication')} with the same requests for every candidate.",
        "The cheapest few are then simulated as whole fleets behind their router, over the whole workload; further "
        "replications of a trace have its requests in another order within each minute.",
        f"{search['num_simulations']:,} simulations of {search['num_requests']:,} requests in all, seed "
        f"{search['seed']}.",
    ]
