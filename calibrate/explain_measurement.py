"""Checks of the measurement itself: whether the numbers describe the server, and what the client made or hid.

Each check takes the evidence and returns a finding, or None.  The thresholds are chosen so that no healthy run of a
random sweep trips one; ``docs/explain.md`` says why each is where it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from windtunnel.calibrate.explain_evidence import Evidence
from windtunnel.calibrate.explain_types import Finding, Severity
from windtunnel.calibrate.live.observed import NS_PER_S, Ending
from windtunnel.sim.metrics.stability import Verdict
from windtunnel.sim.metrics.words import count, digits, percent, plural, seconds, verb

FACTOR_OF_UNITS = 100.0
"""Two statements about one quantity that differ by this much differ in their unit."""
SOME = 0.01
"""Share of the requests from which on a fault is not a stray one."""
LEAST_TTFT_NS = 50_000
"""No server computes a token and sends it over HTTP in less than 50 microseconds."""
SPEEDS_S = (5e-5, 10.0)
"""Seconds per output token that exist; the fastest hardware known gives a user some 2,500 tokens a second (0.4 ms)."""
LEAST_CAP = 8
"""Fewer in flight than this stay at one number by chance."""
PLATEAU_SHARE = 0.3
"""Share of the sending time at exactly the largest number in flight from which on a limit is seen."""
HIDDEN_SHARE = 0.05
"""Wait at the client as a share of what a user waits from which on it is worth a finding."""
FEWER_IN_FLIGHT = 0.7
"""Requests in flight over those asked for, below which something holds them back."""
SHORT_RUN = 4
"""A closed loop needs this many requests for each place, or filling and emptying make up most of the run."""
WHOLE_PROMPT = 0.5
"""Share of the first requests whose whole prompts are cached from which on the cache was warm."""
FIRST_SENT = 8
"""How many requests sent first are looked at."""
UNSHARED_HITS = 0.15
"""Hit rate above what the workload shares from which on something else was shared."""
LONG_PROMPT_TOKENS = 8192
PROMPT_TOKENS_PER_ITL = 10_000
"""Prompt tokens in the time of one decode step that no deployment is known to compute: a decode step reads the weights
once, and arithmetic for some 300 (16 bit) to 600 (8 bit) tokens fits into that time; a mixture of experts, which reads
more weights than it computes with, has up to ten times as many."""
FEW_REQUESTS = 30
P99_REQUESTS = 100
RATE_OFF = 0.1
"""Deviation from the asked rate, beside three times that of a Poisson stream of so many requests, that is a fault."""
COLD_FACTOR = 3.0
COLD_S = 0.2
COLD_MOVES = 0.02
"""Change in mean or p99 TTFT by a first request that alone was slow from which on it is worth a remark."""


def clock(evidence: Evidence) -> Finding | None:
    """Times that run backwards: a first token after the last one, gaps below zero, sendings before they were due."""
    table = evidence.table
    if not evidence.has_requests:
        return None
    both = table.is_finished & (table.ttft_ns >= 0) & (table.e2el_ns >= 0)
    late_first = int((table.ttft_ns > table.e2el_ns + 1_000)[both].sum())
    early = table.is_finished & (table.due_ns >= 0) & (table.send_ns >= 0)
    early_sent = int((table.send_ns < table.due_ns - 1_000_000)[early].sum())
    row = np.repeat(np.arange(len(table)), np.diff(table.chunk_offsets))
    back = int(((np.diff(table.chunk_ns) < 0) & (row[1:] == row[:-1])).sum())
    total = late_first + early_sent + back
    if not total or (max(late_first, early_sent) <= 0.001 * len(table) and not back):
        return None
    told = [f"{late_first:,} first tokens after the last one"] if late_first else []
    told += [f"{early_sent:,} requests sent before they were due"] if early_sent else []
    told += [f"{back:,} tokens before the one ahead of them"] if back else []
    return Finding(
        "clock",
        Severity.INVALID,
        min(0.6, (late_first + early_sent) / len(table) + 0.1),
        "times run backwards",
        f"There are {', '.join(told)}, among {plural(len(table), 'request')}: clocks of several machines were mixed, "
        "or the columns are swapped.",
        "take all times of a request from one monotonic clock (Python: time.perf_counter) on the client",
        {"late_first_tokens": late_first, "sent_before_due": early_sent, "gaps_below_zero": back},
    )


def units(evidence: Evidence) -> Finding | None:
    """One quantity said twice with a factor of a hundred or more between, or a speed that does not exist."""
    for what, factor in _statements(evidence):
        if factor >= FACTOR_OF_UNITS or factor <= 1 / FACTOR_OF_UNITS:
            size = digits(factor, 3) if factor >= 1 else f"1/{digits(1 / factor, 3)}"
            return Finding(
                "units",
                Severity.INVALID,
                1.0,
                "units are mixed up (s, ms)",
                f"{what} by a factor of {size}: seconds and milliseconds were mixed up.",
                "export all times in one unit and name it in the column (ttft_s, ttft_ms)",
                {"factor": factor},
            )
    speed = evidence.percentile_s("tpot", 50.0)
    if speed is not None and speed < SPEEDS_S[0] and not_streamed(evidence) is not None:
        return None  # the time is that of an answer in one piece
    if speed is None or SPEEDS_S[0] <= speed <= SPEEDS_S[1] or speed == 0:
        return None
    return Finding(
        "units",
        Severity.INVALID,
        0.9,
        "units are mixed up (s, ms)",
        f"The median time per output token is {digits(speed)} s, which no server reaches (from {SPEEDS_S[0]:g} to "
        f"{SPEEDS_S[1]:g} s): seconds and milliseconds were mixed up, or tokens were not counted.",
        "export all times in one unit and name it in the column (ttft_s, ttft_ms)",
        {"median_tpot_s": speed},
    )


def _statements(evidence: Evidence) -> Iterator[tuple[str, float]]:
    """Pairs of statements about one quantity: what they are, and their ratio."""
    table, run = evidence.table, evidence.run
    duration = evidence.metrics.duration_s
    both = table.is_finished & (table.ttft_ns > 0) & (table.e2el_ns > 0)
    if both.any():
        yield "TTFT exceeds E2EL", max(float(np.median(table.ttft_ns[both] / table.e2el_ns[both])), 1.0)
        chunks = np.diff(table.chunk_offsets)
        with_end = np.flatnonzero(both & (chunks > 1))
        if len(with_end):
            last = table.chunk_ns[table.chunk_offsets[with_end + 1] - 1]
            yield "The last token's time and E2EL differ", float(np.median(last / table.e2el_ns[with_end]))
            first = table.ttft_ns[with_end]
            gap = (last - first) / np.maximum(table.e2el_ns[with_end] - first, 1)
            if np.median(table.e2el_ns[with_end] - first) > 1_000_000:
                yield "The sum of the gaps and E2EL less TTFT differ", float(np.median(gap)) or 1.0
    if run.duration_ns and run.makespan_ns:
        yield "Times of the requests and the stated duration differ", run.makespan_ns / run.duration_ns
    for name in ("ttft", "e2el"):
        mean = evidence.mean_s(name)
        if mean is not None and duration:
            yield f"Mean {name.upper()} exceeds the duration of the whole run", max(mean / duration, 1.0)
    whole, first_s, each = (evidence.mean_s(name) for name in ("e2el", "ttft", "tpot"))
    tokens = evidence.mean_output_tokens
    if whole and first_s is not None and each and tokens and tokens > 4 and whole > first_s:
        yield "Mean TPOT and (E2EL - TTFT) / (tokens - 1) differ", each * (tokens - 1) / (whole - first_s)
    number, asked = evidence.num_requests, evidence.limit
    if asked and evidence.in_flight and number and number >= SHORT_RUN * asked:
        fits = evidence.in_flight > asked or evidence.rate is None or evidence.finite_rate is None
        if fits:
            yield "Requests in flight (throughput x E2EL) and max_concurrency differ", evidence.in_flight / asked
    if evidence.has_requests:
        for name in ("ttft", "e2el") if not_streamed(evidence) is not None else ("ttft", "e2el", "itl"):
            said, ours = evidence.stated.get(f"mean_{name}_ms"), getattr(evidence.metrics, name).mean_ms
            if said and ours:
                yield f"The stated mean {name.upper()} and that of the single requests differ", said / ours


def contradiction(evidence: Evidence) -> Finding | None:
    """Aggregates that cannot all be true: more in flight than the client let in, or totals that do not divide."""
    stated, limit = evidence.stated, evidence.limit
    duration, flying = evidence.metrics.duration_s, evidence.in_flight
    if limit and flying and flying > 1.1 * limit and not evidence.num_failed:
        return Finding(
            "contradiction",
            Severity.INVALID,
            min(flying / limit - 1, 0.7),
            "the aggregates contradict each other",
            f"Throughput x mean E2EL is {count(flying)} requests in flight, but the client let in {limit:,} at most: "
            "one of the three is not what it is called.",
            "check what duration and latency count (warm-up, client queue, failed requests), or read the raw requests",
            {"in_flight": flying, "max_concurrency": limit},
        )
    for name in ("ttft", "e2el"):
        mean = evidence.mean_s(name)
        if mean is not None and duration and mean > 1.05 * duration:
            return Finding(
                "contradiction",
                Severity.INVALID,
                0.7,
                "the aggregates contradict each other",
                f"Mean {name.upper()} is {seconds(mean)}, the whole run took {seconds(duration)}.",
                "check the unit of both, and whether the duration is that of the same run",
                {f"mean_{name}_s": mean, "duration_s": duration},
            )
    for key, total in (("request_throughput", "completed"), ("output_throughput", "total_output_tokens")):
        rate, amount = stated.get(key), stated.get(total)
        if rate and amount and duration and abs(rate * duration / amount - 1) > 0.05:
            return Finding(
                "contradiction",
                Severity.INVALID,
                min(abs(rate * duration / amount - 1), 0.7),
                "the aggregates contradict each other",
                f"{total} / duration is {count(amount / duration)} a second, {key} says {count(rate)}.",
                "compute the rate from the totals; some tools leave ramp-up or failed requests out of one of them",
                {key: rate, total: amount, "duration_s": duration},
            )
    return None


def empty_streams(evidence: Evidence) -> Finding | None:
    """First tokens in no time, or answers without text: failed or empty streams that count as finished."""
    table = evidence.table
    if evidence.has_requests:
        known = table.is_finished & (table.ttft_ns >= 0)
        instant = known & (table.ttft_ns < LEAST_TTFT_NS)
        wanted = (table.num_output_tokens_asked < 0) | (table.num_output_tokens_asked > 1)
        typical = np.median(table.num_output_tokens[table.is_finished]) if table.is_finished.any() else 0
        empty = table.is_finished & (table.num_output_tokens >= 0) & (table.num_output_tokens <= 1) & wanted
        empty = empty if typical > 8 and empty.mean() >= 0.05 else table.is_finished & (table.num_output_tokens == 0)
        share, number = float((instant | empty).mean()), int((instant | empty).sum())
        if share < SOME or number < 2:
            return None
        told = f"{number:,} of {plural(len(table), 'request')} ({percent(share)}) {verb(number, 'has', 'have')} "
        told += "a first token within 50 µs or an answer of at most one token"
        evidence_of: dict[str, float | None] = {"num_empty": number, "share": share}
    else:
        median = evidence.metrics.ttft.median_ms
        if median is None or median * 1e6 >= LEAST_TTFT_NS:
            return None
        share = 0.5
        tokens = evidence.mean_output_tokens
        mean = evidence.metrics.ttft.mean_ms
        told = f"The median TTFT is {median:.2f} ms" + (f" (the mean {digits(mean)} ms)" if mean else "")
        told += f", with {digits(tokens)} output tokens per request" if tokens else ""
        evidence_of = {"median_ttft_ms": median, "output_tokens_per_request": tokens}
    return Finding(
        "empty_streams",
        Severity.INVALID,
        min(1.0, 0.5 + share),
        "failed or empty streams count as finished",
        f"{told}: at least as many answers were empty, failed or not streamed, so neither throughput nor latency "
        "(nor a cost per token) can be believed.",
        "look into the errors and the text of single answers (vllm bench serve --save-detailed), then measure again",
        evidence_of,
    )


def not_streamed(evidence: Evidence) -> Finding | None:
    """Answers of many tokens that came at once: there is no TTFT or ITL in such a run."""
    table = evidence.table
    known = table.is_finished & (table.ttft_ns >= 0) & (table.e2el_ns > 0) & (table.num_output_tokens > 8)
    if known.sum() < 5:
        return None
    ratio = table.ttft_ns[known] / table.e2el_ns[known]
    share = float(((ratio >= 0.995) & (ratio <= 1.005)).mean())  # a first token after the last is another fault
    if share < 0.5:
        return None
    return Finding(
        "not_streamed",
        Severity.INVALID,
        0.8 * share,
        "answers came in one piece",
        f"{percent(share)} of the answers with more than 8 tokens came all at once: the first token's time is that of "
        "the last, and TPOT and ITL are near 0.",
        'ask with "stream": true, and turn buffering off in proxies between (nginx: proxy_buffering off)',
        {"share": share},
    )


def failed(evidence: Evidence) -> Finding | None:
    """Requests that failed: they leave early, and the others have the server to themselves."""
    number, total = evidence.num_failed, evidence.num_requests
    if not number or not total:
        return None
    total = max(total, number + (evidence.metrics.completed or 0))
    share = number / total
    if share < SOME or number < 2:
        return None
    table, kinds = evidence.table, {}
    for ending in Ending:
        if ending not in (Ending.FINISHED, Ending.UNSENT, Ending.CUT_OFF):
            kinds[ending.name.lower()] = int((table.ending == ending).sum())
    kinds = {name: amount for name, amount in kinds.items() if amount}
    told = ", ".join(f"{amount:,} {name.replace('_', ' ')}" for name, amount in kinds.items())
    errors = sorted({text for text in table.errors if text})[:1]
    return Finding(
        "failed",
        Severity.INVALID if share >= 0.05 else Severity.MISLEADING,
        share,
        f"{percent(share)} of the requests failed",
        f"{number:,} of {plural(total, 'request')} failed{f' ({told})' if told else ''}"
        f"{f', for example with {errors[0][:120]!r}' if errors else ''}: latencies are those of the "
        f"{total - number:,} others, which had fewer beside them, and throughput counts less than was asked.",
        "find the errors' cause first (client timeout, server's limits, context length); lower the load if the server "
        "refuses",
        {"num_failed": number, "share": share, **kinds},
    )


def interrupted(evidence: Evidence) -> Finding | None:
    """Requests that the end of the run cut off: the long ones are missing."""
    if not evidence.has_requests:
        return None
    table = evidence.table
    number = int(((table.ending == Ending.CUT_OFF) | (table.ending == Ending.UNSENT)).sum())
    share = number / len(table)
    if share < 0.05:
        return None
    return Finding(
        "interrupted",
        Severity.WEAK,
        share,
        "the end of the run cut requests off",
        f"{number:,} of {plural(len(table), 'request')} ({percent(share)}) were unsent or in flight when the run "
        "ended: the slow ones among them are in no percentile.",
        "let the run go on until all are answered, or leave out what was sent in its last part",
        {"num_cut_off": number, "share": share},
    )


def warm_cache(evidence: Evidence) -> Finding | None:
    """Prompts found in the prefix cache that this run cannot have put there."""
    table = evidence.table
    cached = table.num_cached_tokens >= 0
    rows = evidence.timed[cached[evidence.timed]] if len(evidence.timed) else evidence.timed
    first = rows[:FIRST_SENT]
    block = evidence.run.server.block_size or 16
    long = table.num_prompt_tokens >= 4 * block
    whole = table.num_cached_tokens >= table.num_prompt_tokens - 2 * block
    if len(first) >= 4 and float((whole & long)[first].mean()) >= WHOLE_PROMPT:
        hits, asked = int(table.num_cached_tokens[first].sum()), int(table.num_prompt_tokens[first].sum())
        return _warm(
            f"Of the first {len(first)} requests' {asked:,} prompt tokens {hits:,} were cached, whole prompts at that: "
            "these were computed before the run began",
            1.0,
            {"first_hit_tokens": hits, "first_prompt_tokens": asked, "hit_rate": evidence.hit_rate},
        )
    everyone = rows[len(first) :]
    if len(everyone) >= FEW_REQUESTS and float((whole & long)[everyone].mean()) >= WHOLE_PROMPT:
        share = float((whole & long)[everyone].mean())
        return _warm(
            f"{percent(share)} of the prompts were in the cache from the first to the last block: the same prompts are "
            "sent again and again",
            share,
            {"share_whole_prompts_cached": share, "hit_rate": evidence.hit_rate},
        )
    expected, hit_rate = evidence.facts.shared_prefix_share, evidence.hit_rate
    if expected is not None and hit_rate is not None and hit_rate > expected + UNSHARED_HITS:
        return _warm(
            f"{percent(hit_rate)} of the prompt tokens were found in the prefix cache, the workload shares "
            f"{percent(expected)}",
            hit_rate - expected,
            {"hit_rate": hit_rate, "shared_prefix_share": expected},
        )
    return _instant_prefill(evidence)


def _instant_prefill(evidence: Evidence) -> Finding | None:
    """Prompts computed faster than the deployment can, or than any can beside its own decode steps."""
    prompt, ttft, itl = (
        evidence.mean_prompt_tokens,
        evidence.percentile_s("ttft", 50.0),
        evidence.percentile_s("itl", 50.0),
    )
    if prompt is None or not ttft:
        return None
    hit_rate = evidence.hit_rate if evidence.facts.shared_prefix_share is not None else None
    uncached = prompt * (1 - (evidence.facts.shared_prefix_share or hit_rate or 0.0))
    fastest = evidence.facts.max_prefill_tokens_per_s
    if fastest is not None and uncached / ttft > 1.2 * fastest:
        return _warm(
            f"A median TTFT of {seconds(ttft)} for prompts of {count(prompt)} tokens is {count(uncached / ttft)} "
            f"tokens a second, more than the {count(fastest)} that the deployment can compute at most",
            min(1.0, 1 - fastest * ttft / uncached),
            {"median_ttft_s": ttft, "mean_prompt_tokens": prompt, "max_prefill_tokens_per_s": fastest},
        )
    if fastest is None and itl and prompt >= LONG_PROMPT_TOKENS and ttft / itl < prompt / PROMPT_TOKENS_PER_ITL:
        return _warm(
            f"A median TTFT of {seconds(ttft)} for prompts of {count(prompt)} tokens is {digits(ttft / itl, 2)} decode "
            f"steps ({seconds(itl)} each): so long a prompt is not computed in that time",
            0.8,
            {"median_ttft_s": ttft, "median_itl_s": itl, "mean_prompt_tokens": prompt},
        )
    return None


def _warm(told: str, score: float, numbers: dict[str, float | None]) -> Finding:
    return Finding(
        "warm_cache",
        Severity.INVALID,
        score,
        "prompts were in the prefix cache already",
        f"{told} (an earlier run with the same seed, workers with one seed, or a data set that repeats): TTFT and "
        "throughput are those of cached prompts.",
        "use another --seed for every run and worker, restart the server between runs, or measure with "
        "--no-enable-prefix-caching",
        numbers,
    )


def client_cap(evidence: Evidence) -> Finding | None:
    """A number in flight that is never exceeded, and that nobody asked for."""
    level, limit = evidence.level, evidence.limit
    if level is None or evidence.has_sessions:
        return None
    asked = limit or evidence.rate or (evidence.is_spread and len(evidence.late_ns) and evidence.late_ns.mean() > 0)
    peak = int(level.level.max(initial=0))
    sent = evidence.table.send_ns[evidence.timed]
    if not asked or peak < LEAST_CAP or peak > 0.5 * len(sent) or (limit is not None and peak > 0.97 * limit):
        return None
    held = level.held_ns(int(sent.min()), int(sent.max()))
    share = float(held[level.level == peak].sum() / max(held.sum(), 1))
    share_near = float(held[level.level >= peak - 1].sum() / max(held.sum(), 1))
    if share < PLATEAU_SHARE and not (share >= PLATEAU_SHARE / 2 and share_near >= 2 * PLATEAU_SHARE):
        return None
    if evidence.finite_rate is not None and limit is None and not _follows_ends(evidence, evidence.finite_rate):
        return None
    wanted = f"{limit:,} were asked for" if limit else "requests were to come at their own times"
    return Finding(
        "client_cap",
        Severity.MISLEADING,
        max(share, share_near),
        f"the client never had more than {peak:,} requests in flight",
        f"{peak:,} requests were in flight for {percent(share)} of the time and never more, though {wanted}: the "
        "client, not the server, is the limit (connections of a pool or worker).",
        f"raise the client's limit of connections above {limit or peak:,} (one HTTP pool often has 100), or use more "
        "workers",
        {
            "peak_in_flight": peak,
            "share_of_time": share,
            "max_concurrency": limit,
            "request_rate": evidence.finite_rate,
        },
    )


def _follows_ends(evidence: Evidence, rate: float) -> bool:
    """Whether requests were sent when others ended, or more slowly than asked: constant times can be level, too."""
    sent, ended = evidence.table.send_ns[evidence.timed], np.sort(evidence.ended_ns[evidence.timed])
    before = np.searchsorted(ended, sent, "right")
    since = (sent - ended[np.maximum(before - 1, 0)])[before > 0]
    gap = float(sent[-1] - sent[0]) / max(len(sent) - 1, 1)
    return bool(len(since)) and (float(np.median(since)) <= 0.25 * gap or NS_PER_S / gap < 0.95 * rate)


def hidden_queue(evidence: Evidence) -> Finding | None:
    """Requests that waited at the client's limit though they were due: no latency has that wait in it."""
    limit, e2el = evidence.limit, evidence.mean_s("e2el")
    if not limit or not e2el:
        return None
    wait = _client_wait_s(evidence, limit)
    if wait is None or wait < HIDDEN_SHARE * (wait + e2el):
        return None
    ttft = evidence.mean_s("ttft")
    share = wait / (wait + e2el)
    shown = f"TTFT of {seconds(ttft)} and " if ttft is not None else ""
    rate = evidence.finite_rate
    at = f"at {count(rate)} requests/s " if rate else ""
    return Finding(
        "hidden_queue",
        Severity.MISLEADING,
        share,
        "the wait at the client's limit is hidden from TTFT and E2EL",
        f"With at most {limit:,} in flight, requests due {at}waited {seconds(wait)} on average before they were sent, "
        f"which the {shown}E2EL of {seconds(e2el)} leave out: users wait {seconds(wait + e2el)}, and the throughput of "
        f"{count(evidence.throughput)}/s is what {limit:,} places give.",
        "raise or drop --max-concurrency, or lower --request-rate; else add client_queue_time to TTFT and E2EL",
        {
            "client_wait_s": wait,
            "mean_ttft_s": ttft,
            "mean_e2el_s": e2el,
            "max_concurrency": limit,
            "request_rate": rate,
        },
    )


def _client_wait_s(evidence: Evidence, limit: int) -> float | None:
    """Mean wait at the client, where arrivals are spread: as measured, else against the asked rate, else by totals."""
    stated = evidence.stated.get("mean_client_queue_time_ms")
    rate = evidence.finite_rate
    late = evidence.late_ns
    if len(late) and float(late.mean()) > 0:
        return float(late.mean()) / NS_PER_S if evidence.is_spread else None
    if stated and rate:
        return stated / 1e3
    if rate is None:
        return None
    if len(evidence.timed):
        sent = evidence.table.send_ns[evidence.timed]
        late_s = (sent - sent[0]) / NS_PER_S - np.arange(len(sent)) / rate
        noise = 2 * np.sqrt(len(sent)) / rate  # a Poisson stream is late or early by as much by chance
        return float(late_s.mean()) if late_s[-1] > noise and _is_full(evidence, limit) else None
    duration, number, e2el = evidence.metrics.duration_s, evidence.num_requests, evidence.mean_s("e2el")
    if not duration or not number or e2el is None or not _is_full(evidence, limit):
        return None
    return max((duration - e2el - number / rate) / 2, 0.0)


def _is_full(evidence: Evidence, limit: int) -> bool:
    return evidence.in_flight is not None and evidence.in_flight >= 0.8 * limit


def few_in_flight(evidence: Evidence) -> Finding | None:
    """Fewer requests in flight than the closed loop was to hold: a limit that is not among the settings."""
    limit, number = evidence.limit, evidence.num_requests
    if (
        not limit
        or evidence.finite_rate is not None
        or (evidence.is_spread and len(evidence.late_ns))
        or evidence.has_sessions
    ):
        return None
    if number is not None and number < SHORT_RUN * limit:
        return None
    flying = evidence.in_flight
    by_speed = flying is None
    flying = evidence.decoding if flying is None else flying
    if flying is None or flying >= FEWER_IN_FLIGHT * limit or flying * FACTOR_OF_UNITS < limit:
        return None
    tokens, tpot = evidence.metrics.output_throughput, evidence.mean_s("tpot")
    how = (
        f"{count(tokens)} output tokens/s at {count(1 / tpot)} tokens/s for each user"
        if by_speed and tokens and tpot
        else f"{count(evidence.throughput)} requests/s at {seconds(evidence.mean_s('e2el') or 0.0)} each"
    )
    return Finding(
        "few_in_flight",
        Severity.MISLEADING,
        1 - flying / limit,
        f"{digits(flying)} requests were really in flight, not {limit:,}",
        f"{how} are {digits(flying)} requests in flight (Little's law), {percent(flying / limit)} of the {limit:,} "
        "asked for: a limit that was not meant to bind (KV pool, max_num_seqs or the client's connections) holds the "
        "rest back; the speed of a step is not the problem.",
        "look at the server's num_requests_running and num_requests_waiting: if the rest waits there, raise "
        f"--max-num-seqs towards {limit:,} or give it a larger KV pool; if it never arrives, raise the client's limit",
        {"in_flight": flying, "max_concurrency": limit, "output_throughput": tokens, "mean_tpot_s": tpot},
    )


def late_sends(evidence: Evidence) -> Finding | None:
    """A client that could not keep its own times: coordinated omission, or a machine too slow for the rate."""
    if evidence.limit or not len(evidence.late_ns):
        return None
    late_s, e2el = float(evidence.late_ns.mean()) / NS_PER_S, evidence.mean_s("e2el")
    ttft = evidence.mean_s("ttft") or e2el
    if not e2el or not ttft or late_s < 0.005 or (late_s < 0.1 * ttft and late_s < HIDDEN_SHARE * e2el):
        return None
    worst = float(np.percentile(evidence.late_ns, 99)) / NS_PER_S
    matters = late_s >= 0.25 * ttft or late_s >= HIDDEN_SHARE * e2el
    return Finding(
        "late_sends",
        Severity.MISLEADING if matters else Severity.WEAK,
        min(1.0, late_s / (late_s + e2el) + 0.1),
        "the client sent later than it was to (coordinated omission)",
        f"Requests left {seconds(late_s)} late on average (p99 {seconds(worst)}), beside a TTFT of {seconds(ttft)}: "
        "the load was lower than asked exactly when the server was slow, and latencies count from the late sending.",
        "use more client processes or a lower rate, and count latencies from when a request was due",
        {"mean_late_s": late_s, "p99_late_s": worst, "mean_ttft_s": ttft},
    )


def rate_missed(evidence: Evidence) -> Finding | None:
    """A rate of sending that is not the one asked for, by more than a random stream explains."""
    rate, rows = evidence.finite_rate, evidence.timed
    if rate is None or evidence.limit or evidence.has_sessions or len(rows) < FEW_REQUESTS:
        return None
    sent = evidence.table.send_ns[rows]
    achieved = (len(rows) - 1) * NS_PER_S / max(int(sent[-1] - sent[0]), 1)
    off = achieved / rate - 1
    more = "more" if off > 0 else "less"
    if abs(off) < RATE_OFF + 3 / np.sqrt(len(rows)):
        return None
    return Finding(
        "rate_missed",
        Severity.MISLEADING,
        min(abs(off), 0.5),
        f"the client sent {count(achieved)} requests/s, not {count(rate)}",
        f"{plural(len(rows), 'request')} were sent at {count(achieved)}/s, {percent(abs(off))} {more} than the "
        f"{count(rate)}/s asked for: the result belongs to another load than its name says.",
        "read the load off the times of sending; use more client processes if it is too low",
        {"achieved_requests_per_s": achieved, "request_rate": rate},
    )


def other_load(evidence: Evidence) -> Finding | None:
    """More requests finished at the server than the client sent: somebody else used it."""
    finished, sent = evidence.run.counts.num_requests_finished, evidence.num_requests
    if not finished or not sent or finished <= 1.05 * sent + 2:
        return None
    return Finding(
        "other_load",
        Severity.MISLEADING,
        min(1.0, finished / sent - 1),
        "somebody else used the server, too",
        f"The server finished {finished:,} requests during the run, the client sent {sent:,}: "
        f"{finished - sent:,} came from elsewhere (n > 1 counts once for each answer).",
        "measure on a server that nobody else uses",
        {"num_requests_finished": finished, "num_sent": sent},
    )


def short_answers(evidence: Evidence) -> Finding | None:
    """Answers that ended long before the length that was asked for."""
    table = evidence.table
    known = table.is_finished & (table.num_output_tokens_asked > 1) & (table.num_output_tokens > 0)
    if known.sum() < 5:
        return None
    got, asked = int(table.num_output_tokens[known].sum()), int(table.num_output_tokens_asked[known].sum())
    if got >= 0.9 * asked:
        return None
    return Finding(
        "short_answers",
        Severity.WEAK,
        1 - got / asked,
        "answers are shorter than asked",
        f"Answers have {percent(got / asked)} of the tokens asked for ({got:,} of {asked:,}): the load is lighter than "
        "its description says.",
        'send "ignore_eos": true (vllm bench serve --ignore-eos), or describe the load by the lengths that came',
        {"output_tokens": got, "output_tokens_asked": asked},
    )


def chunks(evidence: Evidence) -> Finding | None:
    """Chunks that hold several tokens, so that ITL is not the time between tokens."""
    table = evidence.table
    number = np.diff(table.chunk_offsets)
    known = table.is_finished & (number > 1) & (table.num_output_tokens > 8)
    if known.sum() < 5:
        return None
    each = float(table.num_output_tokens[known].sum() / number[known].sum())
    if each < 1.15:
        return None
    return Finding(
        "chunks",
        Severity.WEAK,
        min(1.0, 0.3 * (each - 1)),
        "a chunk holds several tokens",
        f"A chunk holds {digits(each)} tokens on average (stream_interval, speculative decoding, a proxy, or a client "
        "that falls behind): ITL is the time between chunks.",
        "compare TPOT instead of ITL; for ITL by token use --stream-interval 1",
        {"tokens_per_chunk": each},
    )


def few_requests(evidence: Evidence) -> Finding | None:
    """Percentiles of too few requests."""
    completed = evidence.metrics.completed
    if completed is None or completed >= P99_REQUESTS:
        return None
    return Finding(
        "few_requests",
        Severity.WEAK,
        0.6 if completed < FEW_REQUESTS else 0.2,
        f"only {plural(completed, 'finished request')}",
        f"With {plural(completed, 'finished request')} the 99th percentile is nearly the largest value"
        + (", and the mean is one draw of chance." if completed < FEW_REQUESTS else "."),
        f"send at least {10 * P99_REQUESTS:,} requests (ten beyond the 99th percentile), or quote the median only",
        {"completed": completed},
    )


def short_run(evidence: Evidence) -> Finding | None:
    """A run that ended before the system reached its usual state."""
    limit, number = evidence.limit, evidence.num_requests
    closed = limit is not None and evidence.finite_rate is None and not (evidence.is_spread and len(evidence.late_ns))
    if limit and closed:
        flying = evidence.metrics.peak_concurrent_requests or limit
        if number is None or number >= SHORT_RUN * min(limit, flying):
            return None
        return Finding(
            "short_run",
            Severity.WEAK,
            0.4,
            "the run is short",
            f"{plural(number, 'request')} for {limit:,} in flight {verb(number, 'is', 'are')} "
            f"{_rounds(number / limit)}: filling and "
            "emptying make up much of the run.",
            f"send at least {5 * limit:,} requests (--num-prompts)",
            {"num_requests": number, "max_concurrency": limit},
        )
    verdict = evidence.stability
    if verdict is None or verdict.verdict is not Verdict.TOO_SHORT or (number or 0) < FEW_REQUESTS:
        return None
    return Finding(
        "short_run",
        Severity.WEAK,
        0.4,
        "the run is short",
        f"{verdict.reason[:1].upper()}{verdict.reason[1:]}.",
        "send several times as many requests at the same rate (--num-prompts)",
        {"arrival_window_s": verdict.arrival_window_s, "stay_ratio": verdict.stay_ratio},
    )


def _rounds(number: float) -> str:
    told = digits(number, 2)
    return f"{told} round" if told == "1" else f"{told} rounds"


def cold_start(evidence: Evidence) -> Finding | None:
    """First requests that met a server which was still compiling or loading: no warm-up."""
    table = evidence.table
    rows = evidence.timed
    rows = rows[table.is_finished[rows] & (table.ttft_ns[rows] >= 0)] if len(rows) else rows
    if len(rows) < FEW_REQUESTS:
        return None
    sent, first = table.send_ns[rows], (table.send_ns + table.ttft_ns)[rows]
    begin = int(first.min())
    early = sent < begin
    if not early.any():
        return None
    later = sent >= int(evidence.ended_ns[rows[early]].max())
    if later.sum() < FEW_REQUESTS // 2 or early.sum() > 0.5 * len(rows):
        return None
    waited_s = float(begin - sent.min()) / NS_PER_S
    shortest_early = table.num_prompt_tokens[rows][early].min()
    similar = later & (table.num_prompt_tokens[rows] >= shortest_early)
    usual = table.ttft_ns[rows][similar] / NS_PER_S
    if len(usual) < 5 or waited_s < COLD_S:
        return None
    together = table.num_prompt_tokens[rows][sent <= sent.min() + float(np.median(usual)) * NS_PER_S].sum()
    prompts = max(float(together / max(table.num_prompt_tokens[rows][similar].mean(), 1)), 1.0)
    if waited_s < COLD_FACTOR * prompts * float(np.percentile(usual, 90)):
        return None
    ttft = table.ttft_ns[rows]
    moved = float(ttft.mean() / ttft[~early].mean() - 1)
    return Finding(
        "cold_start",
        Severity.MISLEADING if moved >= 0.1 else Severity.WEAK,
        min(1.0, moved),
        "the warm-up is in the numbers",
        f"The first token of the run came after {seconds(waited_s)}, those of later requests after "
        f"{seconds(float(np.median(usual)))} (median): the server was still compiling or loading. Its "
        f"{plural(int(early.sum()), 'first request')} raise mean TTFT by {percent(moved)}.",
        "send warm-up requests before the run (vllm bench serve --num-warmups) and leave them out",
        {"first_token_s": waited_s, "usual_ttft_s": float(np.median(usual)), "num_early": int(early.sum())},
    )


def cold_first_request(evidence: Evidence) -> str | None:
    """A remark on a first request that alone took far longer than the others, where that moves mean or p99."""
    table, rows = evidence.table, evidence.timed
    rows = rows[table.is_finished[rows] & (table.ttft_ns[rows] >= 0)] if len(rows) else rows
    if len(rows) < FEW_REQUESTS or cold_start(evidence) is not None:
        return None
    ttft, prompts = table.ttft_ns[rows] / NS_PER_S, table.num_prompt_tokens[rows]
    others = ttft[1:]
    usual = float(np.percentile(others, 99)) * max(float(prompts[0] / max(prompts[1:].mean(), 1)), 1.0)
    if ttft[0] < COLD_S or ttft[0] < COLD_FACTOR * usual:
        return None
    mean = float(ttft.mean() / max(others.mean(), 1e-9) - 1)
    tail = float(np.percentile(ttft, 99) / max(np.percentile(others, 99), 1e-9) - 1)
    if max(mean, tail) <= COLD_MOVES:
        return None
    return (
        f"The first request waited {seconds(float(ttft[0]))} for its first token, 99 % of the others at most "
        f"{seconds(float(np.percentile(others, 99)))}: a cold start, which raises mean TTFT by {percent(mean)} and p99 "
        f"by {percent(tail)}. Send warm-up requests before the run (vllm bench serve --num-warmups)."
    )


CHECKS = (
    clock,
    units,
    contradiction,
    empty_streams,
    not_streamed,
    failed,
    interrupted,
    warm_cache,
    client_cap,
    hidden_queue,
    few_in_flight,
    late_sends,
    rate_missed,
    other_load,
    short_answers,
    chunks,
    few_requests,
    short_run,
    cold_start,
)
