"""Checks of the server: which of its limits binds, or whether more is offered than it can compute.

Requests that wait at a server wait for a seat (max_num_seqs), for KV blocks or for a share of the step's token budget.
Which of them it is says what to turn, but not whether turning helps: seats that are all taken in front of a GPU that
is busy anyway are a symptom.  So each finding is weighed with what twice as many requests at once, or a larger budget,
would gain, as read off the times between tokens.
"""

from __future__ import annotations

import math

from windtunnel.calibrate.explain_evidence import FULL_POOL, SEATS_TAKEN, Evidence, ServerWaiting
from windtunnel.calibrate.explain_types import Finding, Severity
from windtunnel.sim.metrics.stability import Verdict
from windtunnel.sim.metrics.words import count, digits, percent, plural, seconds

WAITING_SHARE = 0.05
"""Share of the time in the server that requests wait from which on the wait is worth a finding."""
MOST = 0.5
"""Share of the wait from which on a cause is the cause."""
SCARCE_POOL = 0.75
"""KV usage from which on a free seat that stays empty is put down to the pool: the next prompt may not fit."""
DEMAND_SHARE = 0.1
"""Share of the run in which what decodes must fill the pool for a finding from the requests alone."""
OVER_SHARE = 0.02
"""Share of it in which they would need more than the whole pool, so that some were preempted."""
WORTH_IT = 1.15
"""Gain in throughput by twice as many at once from which on more seats, or a larger pool, help."""
LOOP_PREEMPTIONS = 4.0
"""Preemptions per request from which on requests mostly preempt each other."""
LOOP_RECOMPUTED = 1.0
"""Recomputed tokens over useful ones from which on the same is said."""
SOME_PREEMPTIONS = 0.02
"""Preemptions per request from which on they are worth a finding."""
BUDGET_STEPS = 2.0
"""Steps that a prompt needs from which on the budget may be too small."""
FIXED_SHARE = 0.35
"""Time of a step without prompts over that of a full one from which on a larger budget gains: 1.5 times at least."""
BUDGET_TTFT_SHARE = 0.1
"""TTFT over E2EL from which on the time of prompts matters."""
ACHIEVED = 0.85
"""Achieved over offered rate below which a run without single requests is called overloaded."""
BURST_TTFT = (0.35, 0.6)
"""Mean TTFT over the duration if requests that all came at once are served one after the other: a half."""
UNBALANCED = 1.5
"""Most over mean running requests of the engines from which on the router is to blame."""
LONG_QUEUE = 0.5
"""Queue over E2EL, by the server's own counters, from which on the queue is the latency."""


def loop(evidence: Evidence) -> Finding | None:
    """Requests that preempt each other and start again, for ever or nearly so."""
    facts, number = evidence.facts, evidence.num_requests
    preemptions = evidence.run.counts.num_preemptions or 0
    each = preemptions / number if number else 0.0
    computed, again = facts.num_computed_tokens, facts.num_recomputed_tokens
    wasted = again / max(computed - again, 1) if computed and again is not None else 0.0
    if not facts.stalled and each < LOOP_PREEMPTIONS and not (wasted >= LOOP_RECOMPUTED and each >= 1):
        return None
    told = f"{plural(preemptions, 'preemption')} for {plural(number or 0, 'request')} ({digits(each)} each)"
    told += f", {count(1 + wasted)} times the useful tokens were computed" if wasted else ""
    told += "; the run stood still in the end" if facts.stalled else ""
    return Finding(
        "preempt_loop",
        Severity.LIMIT,
        1.0,
        "requests preempt each other and start again (preempt-resume loop)",
        f"{told}: a prompt is let in when its first chunk fits, is preempted for want of blocks, and begins again.",
        "--scheduler-reserve-full-isl (the default from vLLM 0.19 on, or a newer release), a --watermark of 0.02 to "
        "0.05, or fewer long requests at once (--max-num-seqs)",
        {"num_preemptions": preemptions, "per_request": each, "recomputed_per_useful_token": wasted},
    )


def seats(evidence: Evidence) -> Finding | None:
    """All seats taken while requests wait and the pool has room."""
    waiting = evidence.waiting
    if waiting is None or waiting.waiting_mean <= 0:
        return _seats_without_gauges(evidence)
    share = _share(evidence, "seats")
    if share is None:
        share = _share_at_seats(evidence, waiting)
    usage = waiting.usage_while_waiting
    if share < MOST or waiting.waiting_share < WAITING_SHARE or (usage is not None and usage >= FULL_POOL + 0.05):
        return None
    cap = evidence.max_num_seqs or round(waiting.running_cap)
    gain = _gain(evidence, waiting.running_while_waiting / evidence.num_engines)
    most = waiting.waiting_mean + waiting.running_while_waiting
    room = f", with {percent(1 - usage)} of the KV pool free" if usage is not None else ""
    value = _more_seats(cap, usage, most)
    return Finding(
        "seats",
        Severity.LIMIT,
        _weighed(waiting.waiting_share, gain),
        f"max_num_seqs binds: {count(cap)} run, the others wait",
        f"{digits(waiting.waiting_mean)} requests waited on average ({percent(waiting.waiting_share)} of the time in "
        f"the server) while {digits(waiting.running_while_waiting)} ran{room}{_gain_told(gain, 'requests at once')}.",
        f"--max-num-seqs {value}",
        {
            "max_num_seqs": cap,
            "waiting_mean": waiting.waiting_mean,
            "running_while_waiting": waiting.running_while_waiting,
            "kv_usage_while_waiting": usage,
            "gain_of_doubling": gain,
        },
    )


def _seats_without_gauges(evidence: Evidence) -> Finding | None:
    """A known cap that as many run as, by Little's law or by the mean batch, and a TTFT that is all queue."""
    cap, ttft = evidence.max_num_seqs, evidence.mean_s("ttft")
    if cap is None:
        return None
    counts = evidence.run.counts
    batch = counts.generation_tokens / counts.num_steps if counts.generation_tokens and counts.num_steps else None
    running = batch * evidence.num_engines if batch is not None else evidence.decoding
    if running is not None and not 0.75 * cap <= running <= 1.1 * cap:
        return None
    flying, duration = evidence.in_flight, evidence.metrics.duration_s
    waits = flying is not None and running is not None and flying > cap * (1 + 4 * WAITING_SHARE)
    if not waits and not (_is_pure_queue(evidence) and (evidence.num_requests or 0) > 4 * cap):
        return None
    p99 = evidence.percentile_s("ttft", 99.0)
    tail = f", p99 {seconds(p99)}" if p99 is not None else ""
    half = f", about half of the {seconds(duration)} of the run" if _is_pure_queue(evidence) and duration else ""
    return Finding(
        "seats",
        Severity.LIMIT,
        0.9,
        f"max_num_seqs binds: {cap:,} run, the others wait",
        f"Mean TTFT is {seconds(ttft or 0.0)}{tail}{half}: nearly all of it is queue for one of {cap:,} seats"
        f"{f'; {digits(running)} requests decode at a time' if running is not None else ''}. What a model or a dtype "
        "costs cannot be seen behind such a queue.",
        f"--max-num-seqs {_power(2 * cap)} or more (as far as the KV pool goes), then compare again",
        {"max_num_seqs": cap, "running": running, "mean_ttft_s": ttft, "duration_s": duration},
    )


def kv_pool(evidence: Evidence) -> Finding | None:
    """The KV pool is full while requests wait, or requests are preempted for want of blocks."""
    waiting, number = evidence.waiting, evidence.num_requests or 0
    preemptions = evidence.run.counts.num_preemptions or 0
    each = preemptions / number if number else 0.0
    share = _share(evidence, "kv_cache")
    if waiting is not None and share is None:
        usage = waiting.usage_while_waiting
        scarce = usage is not None and usage >= SCARCE_POOL
        full_seats = _share_at_seats(evidence, waiting) if evidence.max_num_seqs else 0.0
        share = 1.0 - full_seats if scarce else 0.0
        share = max(share, waiting.share_with_full_pool or 0.0) if (usage or 0.0) >= FULL_POOL + 0.05 else share
    waits = waiting is not None and (share or 0.0) >= MOST and waiting.waiting_share >= WAITING_SHARE
    peak = waiting.usage_peak if waiting is not None else None
    full = peak is None or peak >= FULL_POOL
    if not waits and not (preemptions >= 3 and each >= SOME_PREEMPTIONS and full):
        return _kv_pool_from_requests(evidence) if peak is None and share is None else None
    wait_share = waiting.waiting_share if waits and waiting is not None else 0.0
    gain = _gain(evidence, waiting.running_while_waiting / evidence.num_engines) if waiting is not None else None
    told = []
    if waits and waiting is not None:
        usage = waiting.usage_while_waiting
        told.append(
            f"{digits(waiting.waiting_mean)} requests waited on average ({percent(wait_share)} of the time in the "
            f"server) while {digits(waiting.running_while_waiting)} ran"
            + (f" and {percent(usage)} of the KV pool was in use" if usage is not None else "")
        )
    if preemptions:
        told.append(f"{plural(preemptions, 'preemption')} ({digits(each)} per request)")
    pool = evidence.kv_tokens
    size = f"The pool of {pool:,} tokens" if pool else "The KV pool"
    return Finding(
        "kv_pool",
        Severity.LIMIT,
        max(_weighed(wait_share, gain), min(0.3 + each, 0.95) if preemptions else 0.0),
        "the KV pool binds",
        f"{size} is too small for this load: {'; '.join(told)}{_gain_told(gain, 'requests at once')}.",
        _pool_knob(evidence, waiting, preemptions),
        {
            "kv_cache_tokens": pool,
            "num_preemptions": preemptions,
            "waiting_mean": waiting.waiting_mean if waiting else None,
            "kv_usage_while_waiting": waiting.usage_while_waiting if waiting else None,
            "kv_usage_peak": peak,
            "gain_of_doubling": gain,
        },
    )


def _kv_pool_from_requests(evidence: Evidence) -> Finding | None:
    """Without gauges: what the requests must have held, beside a pool whose size is known, or a counter's bound."""
    number, demand, pool = evidence.num_requests or 0, evidence.pool_demand, evidence.kv_tokens
    at_most = preemptions_at_most(evidence)
    counted = at_most or 0
    often = counted >= 3 and bool(number) and counted / number >= SOME_PREEMPTIONS
    if demand is None or pool is None:
        return _kv_pool_by_counter(evidence, counted) if often else None
    seats = evidence.max_num_seqs
    seats_bind = seats is not None and demand.decoding_while_full >= SEATS_TAKEN * seats
    waits = demand.waiting_share >= WAITING_SHARE and not seats_bind
    full = demand.full_share >= DEMAND_SHARE and waits
    told_apart = evidence.is_sharing_known or waits or often  # else prompts may just share blocks
    over = demand.over_share >= OVER_SHARE and at_most != 0 and told_apart
    if not full and not over:
        return None
    size, peak = pool * evidence.num_engines, demand.peak_tokens
    assumed = "" if evidence.is_sharing_known else " (which share nothing, as far as is known)"
    told = f"those that decode at once would hold {count(peak)} tokens at the peak"
    told += f", {digits(peak / size, 3)} times the pool, so that some were preempted" if over else ""
    told += f"; they fill {percent(FULL_POOL)} of it in {percent(demand.full_share)} of the run"
    told += f", and {percent(demand.waiting_share)} of the time in flight is a wait then" if full else ""
    told += f"; the server counts {plural(counted, 'preemption')} since it started" if counted else ""
    return Finding(
        "kv_pool",
        Severity.LIMIT,
        min(0.95, 0.55 + 0.4 * max(demand.full_share, demand.waiting_share)),
        "the KV pool binds",
        f"The pool of {size:,} tokens is too small for this load: by prompts and answers{assumed}, {told}.",
        _pool_knob(evidence, None, counted or int(over)),
        {
            "kv_cache_tokens": pool,
            "peak_demand_tokens": peak,
            "full_share": demand.full_share,
            "over_share": demand.over_share,
            "num_preemptions_at_most": at_most,
        },
    )


def _kv_pool_by_counter(evidence: Evidence, counted: int) -> Finding:
    number = evidence.num_requests or 1
    return Finding(
        "kv_pool",
        Severity.WEAK,
        min(0.3 + counted / number, 0.6),
        "the KV pool may bind: requests were preempted at some time",
        f"The server counts {plural(counted, 'preemption')} since it started, {digits(counted / number)} for each "
        "request of this run: how many of them fell into the run is not known.",
        "give a look at /metrics right before the run and one right after (a range query of Prometheus), or "
        "--kv-cache-tokens, and look again",
        {"num_preemptions_at_most": counted},
    )


def preemptions_at_most(evidence: Evidence) -> int | None:
    """Preemptions that the server counts since its start, where nothing says how many fell into the run."""
    counted = evidence.facts.counted_since_start
    if counted is None or evidence.run.counts.num_preemptions is not None:
        return None
    return counted.get("num_preemptions")


def _pool_knob(evidence: Evidence, waiting: ServerWaiting | None, preemptions: int) -> str:
    """A larger pool, and the concurrency that fits the one there is."""
    fits = waiting.running_while_waiting if waiting is not None and waiting.waiting_mean > 0 else None
    prompt, output, pool = evidence.mean_prompt_tokens, evidence.mean_output_tokens, evidence.kv_tokens
    if pool and prompt and output:
        fits = pool * evidence.num_engines / (prompt + output / 2)
    at_once = (
        f" or at most {max(round(fits), 1):,} requests at once (--max-concurrency, --max-num-seqs)" if fits else ""
    )
    guard = ", --watermark 0.02 against preemptions" if preemptions else ""
    return f"--gpu-memory-utilization up, --kv-cache-dtype fp8, more GPUs{at_once}{guard}"


def budget(evidence: Evidence) -> Finding | None:
    """Prompts that take many steps of which each costs nearly the same however few tokens it has."""
    tokens, prompt = evidence.budget, evidence.mean_prompt_tokens
    ttft, e2el, steps = evidence.mean_s("ttft"), evidence.mean_s("e2el"), evidence.short_and_full_step_s
    if tokens is None or prompt is None or ttft is None or not e2el or steps is None:
        return None
    hit_rate = evidence.hit_rate or 0.0
    num_steps = prompt * (1 - hit_rate) / tokens
    short, full = steps
    share, waiting = _share(evidence, "budget"), evidence.waiting
    wait_share = waiting.waiting_share if waiting is not None else 0.0
    waits = share is not None and share >= MOST and wait_share >= WAITING_SHARE
    if ttft < BUDGET_TTFT_SHARE * e2el or short < FIXED_SHARE * full:
        return None
    if not waits and (num_steps < BUDGET_STEPS or not _prompts_fill_steps(evidence, num_steps, full, ttft)):
        return None
    gain = min(full / max(full - short, 1e-9), 4.0)
    wanted = _power(min(max(4 * tokens, prompt), 16384))
    return Finding(
        "budget",
        Severity.LIMIT,
        min(0.95, max(ttft / e2el, wait_share) + 0.2),
        f"max_num_batched_tokens {tokens:,} binds: prompts take many small steps",
        f"A prompt of {count(prompt)} tokens takes {digits(num_steps, 2)} steps of {tokens:,}, and a step with prompts "
        f"({seconds(full)}) takes little longer than one without ({seconds(short)}): mean TTFT is {seconds(ttft)}, "
        f"{percent(ttft / e2el)} of E2EL. Larger steps compute prompts up to {digits(gain, 2)} times as fast.",
        f"--max-num-batched-tokens {wanted} (ITL rises in steps with prompts)",
        {
            "max_num_batched_tokens": tokens,
            "steps_per_prompt": num_steps,
            "short_step_s": short,
            "full_step_s": full,
            "mean_ttft_s": ttft,
        },
    )


def _prompts_fill_steps(evidence: Evidence, num_steps: float, full_s: float, ttft_s: float) -> bool:
    """Whether the steps of the own prompt are most of the TTFT, and nobody waits for a seat or for blocks."""
    waiting = evidence.waiting
    if waiting is not None and waiting.waiting_share >= WAITING_SHARE and (_share(evidence, "budget") or 0.0) < MOST:
        other = max(_share(evidence, "seats") or 0.0, _share(evidence, "kv_cache") or 0.0)
        if other >= MOST or _share_at_seats(evidence, waiting) >= MOST:
            return False
    return num_steps * full_s >= 0.5 * ttft_s or waiting is None or waiting.waiting_share >= WAITING_SHARE


def overload(evidence: Evidence) -> Finding | None:
    """More offered than can be served: the queue grew for as long as requests came."""
    verdict, rate = evidence.stability, evidence.finite_rate
    if verdict is not None and not (evidence.limit and not evidence.is_spread):
        if verdict.verdict is Verdict.OVERLOADED or verdict.has_peak:
            return _overload_seen(evidence)
        return None
    return _overload_by_totals(evidence, rate) if rate is not None and not evidence.limit else None


def _overload_seen(evidence: Evidence) -> Finding | None:
    verdict, waiting = evidence.stability, evidence.waiting
    if verdict is None:
        return None
    offered = verdict.offered_request_rate
    done = max(verdict.completion_rate or 0.0, evidence.throughput or 0.0) or None
    rho = offered / done if offered and done else None
    gain = _gain(evidence, waiting.running_while_waiting / evidence.num_engines) if waiting is not None else None
    compute = gain is None or gain < WORTH_IT
    is_peak = verdict.verdict is not Verdict.OVERLOADED
    usage = waiting.usage_while_waiting if waiting is not None else None
    return Finding(
        "overload",
        Severity.LIMIT,
        0.45 if is_peak else 0.7 if compute else 0.6,
        "a peak offers more than can be served" if is_peak else "more is offered than can be served",
        f"{verdict.reason[:1].upper()}{verdict.reason[1:]}."
        + (f" Over the whole run {count(done)}/s finished: rho is {digits(rho)}." if rho and not is_peak else "")
        + (
            " Twice as many requests at once would hardly raise throughput: compute is used up."
            if gain and compute
            else ""
        ),
        f"offer at most {count(0.85 * done)} requests/s to this server, or add replicas"
        if done and not is_peak
        else "add replicas for the peak, or let a queue stand there",
        {
            "offered_requests_per_s": offered,
            "finished_requests_per_s": done,
            "rho": rho,
            "queue_at_last_arrival": verdict.queue_at_last_arrival,
            "gain_of_doubling": gain,
            "kv_usage_while_waiting": usage,
        },
    )


def _overload_by_totals(evidence: Evidence, rate: float) -> Finding | None:
    duration, number, done = evidence.metrics.duration_s, evidence.num_requests, evidence.throughput
    e2el, ttft = evidence.mean_s("e2el"), evidence.mean_s("ttft")
    if not duration or not number or not done or done >= ACHIEVED * rate or number < 100:
        return None
    window = number / rate
    queue = (duration - window) / 2
    if ttft is not None and e2el is not None and ttft < 0.2 * e2el:
        return None  # the run is short beside its answers: nobody waits
    mean = f"; (duration - sending time) / 2 = {seconds(queue)} is the mean wait of a queue that grows steadily"
    seen = f", mean E2EL is {seconds(e2el)}" if e2el is not None else ""
    return Finding(
        "overload",
        Severity.LIMIT,
        0.7,
        "more is offered than can be served",
        f"{count(rate)} requests/s were offered for {seconds(window)} and {count(done)}/s served over "
        f"{seconds(duration)} (rho {digits(rate / done)}){mean}{seen}: latencies say how long the run was.",
        f"offer at most {count(0.85 * done)} requests/s to this server, or add replicas",
        {"offered_requests_per_s": rate, "finished_requests_per_s": done, "rho": rate / done, "queue_wait_s": queue},
    )


def burst(evidence: Evidence) -> Finding | None:
    """All requests at once without a limit: TTFT is the place in the queue."""
    ttft, duration, number = evidence.mean_s("ttft"), evidence.metrics.duration_s, evidence.num_requests or 0
    if evidence.limit or ttft is None or not duration or number < 2:
        return None
    at_once = evidence.rate == math.inf or (evidence.stability is not None and evidence.stability.is_burst)
    if not at_once or ttft < 0.1 * duration:
        return None
    return Finding(
        "burst",
        Severity.LIMIT,
        0.3,
        "all requests came at once: TTFT is the place in the queue",
        f"{number:,} requests came at once and were worked off in {seconds(duration)}; mean TTFT is {seconds(ttft)} "
        f"({percent(ttft / duration)} of that). Throughput is that of a full server, latencies are those of one burst.",
        "--request-rate below the throughput, or --max-concurrency, to measure latencies",
        {"mean_ttft_s": ttft, "duration_s": duration, "num_requests": number},
    )


def batch_cap(evidence: Evidence) -> Finding | None:
    """A queue that is the latency, though computing takes no time: the batch is at its largest (Triton)."""
    facts, e2el = evidence.facts, evidence.mean_s("e2el")
    if facts.queue_s is None or not e2el or facts.queue_s < LONG_QUEUE * e2el:
        return None
    batch = facts.mean_batch_size
    at_cap = batch is not None and batch > 1.5 and abs(batch - round(batch)) <= 0.01 * batch
    if facts.compute_s is not None and facts.compute_s > 0.2 * facts.queue_s and not at_cap:
        return None
    cap = round(batch) if batch is not None and at_cap else None
    flying = evidence.in_flight
    computed = f", computing {seconds(facts.compute_s)}" if facts.compute_s is not None else ""
    size = (
        f" Every execution holds {cap} requests ({digits(batch, 4)} on average), so that is the cap."
        if cap and batch
        else ""
    )
    held = f" {count(evidence.throughput)}/s x {seconds(e2el)} = {digits(flying, 4)} in flight." if flying else ""
    ideal = f"max_batch_size above {cap} (and dynamic_batching), or {cap} to {4 * cap} requests at once" if cap else ""
    return Finding(
        "batch_cap",
        Severity.LIMIT,
        facts.queue_s / e2el,
        f"the batch is at its cap of {cap}" if cap else "the latency is queue, not computing",
        f"The queue takes {seconds(facts.queue_s)} of {seconds(e2el)} ({percent(facts.queue_s / e2el)}){computed}."
        f"{size}{held} More clients only lengthen the queue.",
        ideal or "a larger batch (max_batch_size, --max-num-seqs), more instances, or fewer requests at once",
        {"queue_s": facts.queue_s, "compute_s": facts.compute_s, "mean_batch_size": batch, "in_flight": flying},
    )


def router(evidence: Evidence) -> Finding | None:
    """Engines with very different loads while requests wait at one of them."""
    running, waiting = evidence.facts.running_by_engine, evidence.facts.waiting_by_engine
    if len(running) < 2 or sum(running) <= 0 or len(waiting) != len(running):
        return None
    loads = [one + other for one, other in zip(running, waiting, strict=True)]
    mean = sum(loads) / len(loads)
    worst = loads.index(max(loads))
    if loads[worst] < UNBALANCED * mean or sum(waiting) < WAITING_SHARE * sum(loads):
        return None
    return Finding(
        "router",
        Severity.LIMIT,
        min(0.95, 0.5 + 0.2 * loads[worst] / mean),
        "the router loads the engines unequally",
        f"Engine {worst} had {digits(loads[worst])} requests on average ({digits(waiting[worst])} of them waiting), "
        f"the mean of {len(loads)} is {digits(mean)}: others idle while they wait there.",
        "route by load (least requests) instead of by turns or by session; check what pins users to an engine",
        {"running_by_engine": list(running), "waiting_by_engine": list(waiting)},
    )


def swapped(evidence: Evidence) -> Finding | None:
    """Requests or blocks swapped out to the CPU (vLLM before V1, and simulated swapping)."""
    series, blocks = evidence.run.series, evidence.facts.num_swapped_out_blocks or 0
    known = series.num_swapped[series.num_swapped == series.num_swapped] if series is not None else []
    peak = float(max(known, default=0.0))
    if not peak and not blocks:
        return None
    told = (
        f"Up to {count(peak)} requests were swapped out at a time" if peak else f"{blocks:,} KV blocks were swapped out"
    )
    return Finding(
        "swapped",
        Severity.LIMIT,
        0.5,
        "requests are swapped out to the CPU",
        f"{told} swapped out: the KV pool is too small for what runs at once, and swapped requests stand still.",
        "a larger KV pool (--gpu-memory-utilization, more GPUs) or fewer at once (--max-num-seqs); vLLM's V1 engine "
        "recomputes instead",
        {"num_swapped_peak": peak, "num_swapped_out_blocks": blocks},
    )


def _share(evidence: Evidence, cause: str) -> float | None:
    """Share of the queueing that has this cause, where a simulation says so."""
    shares = evidence.facts.wait_shares
    return None if shares is None else shares.get(cause, 0.0)


def _share_at_seats(evidence: Evidence, waiting: ServerWaiting) -> float:
    """Share of the waiting in which all seats were taken; without their number, in which as many ran as most often."""
    cap = evidence.max_num_seqs
    if cap is None:
        is_flat = waiting.running_cap >= 0.97 * waiting.running_peak
        return waiting.share_at_cap if is_flat else 0.0
    at_cap = abs(waiting.running_cap - cap) <= (1 - SEATS_TAKEN) * cap
    return waiting.share_at_cap if at_cap else 1.0 if waiting.running_while_waiting >= SEATS_TAKEN * cap else 0.0


def _gain(evidence: Evidence, num_seqs: float) -> float | None:
    """Throughput gained by twice as many at once, from the times between tokens."""
    curve = evidence.step_curve
    return None if curve is None or num_seqs <= 0 else curve.doubling_gain(num_seqs)


def _weighed(waiting_share: float, gain: float | None) -> float:
    """Importance of a limit that makes requests wait: more if loosening it helps, little if it does not."""
    worth = 0.5 if gain is not None and gain < WORTH_IT else 0.75
    return min(0.95, worth + 0.2 * waiting_share)


def _gain_told(gain: float | None, of_what: str) -> str:
    if gain is None:
        return ""
    if gain < WORTH_IT:
        return f"; but twice as many {of_what} would give only {digits(gain, 3)} times the tokens a second"
    return f"; twice as many {of_what} would give up to {digits(gain, 3)} times the tokens a second"


def _more_seats(cap: float, usage: float | None, wanted: float) -> str:
    """As many seats as the load would use, and as the pool holds."""
    most = cap / usage if usage else math.inf
    target = min(most, max(wanted, 2 * cap))
    return f"{max(round(target), round(cap) + 1):,}".replace(",", "") if target < math.inf else f"{round(2 * cap)}"


def _power(value: float) -> int:
    """The next power of two."""
    return 1 << max(math.ceil(math.log2(max(value, 1))), 0)


def _is_pure_queue(evidence: Evidence) -> bool:
    """Whether mean TTFT is about half of the run, as it is when all came at once and are served in turn."""
    ttft, duration = evidence.mean_s("ttft"), evidence.metrics.duration_s
    return bool(
        ttft and duration and evidence.finite_rate is None and BURST_TTFT[0] <= ttft / duration <= BURST_TTFT[1]
    )


CHECKS = (loop, seats, kv_pool, budget, overload, burst, batch_cap, router, swapped)
