"""The live side of a validation and the settings that go with it: a server, a result that exists, or our own engine."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from windtunnel.calibrate.attribution import (
    engine_of,
)
from windtunnel.calibrate.live.client import ClientConfig, Progress, new_cache_salt, run_live
from windtunnel.calibrate.live.observed import ObservedRun, ServerFacts
from windtunnel.calibrate.live.observed_metrics import observed_from_records, observed_metrics
from windtunnel.calibrate.validation import Limit, with_requests
from windtunnel.sim import rng
from windtunnel.sim.metrics.words import count, plural
from windtunnel.sim.records import IntArray
from windtunnel.sim.workload import Workload, workload

if TYPE_CHECKING:
    from windtunnel.calibrate.live.http import HttpClient
    from windtunnel.calibrate.step_tables import StepTable
    from windtunnel.scenarios.load import Override
    from windtunnel.scenarios.resolve import Resolved
    from windtunnel.sim.engine.config import SchedulerConfig

Tell = Callable[[str], None]
NS_PER_S = 1_000_000_000
_CACHE_BYTES = 2**30
"""Of a real executor's KV cache, unless its size is given."""
_NUM_WARMUPS = 8
"""Requests that a real executor computes before its steps are timed for a fit: its first ones are slow."""
_PLACEHOLDER = {"num_requests": 1, "input": 1, "output": 1}
"""A workload for settings whose requests come from elsewhere."""
_ONLY_A_STEP = "constant:step_s=1s"


class ValidationError(ValueError):
    """What was asked for cannot be compared; the message says why and what to do."""


class ValidationInputUnreadable(ValidationError):
    """A file that belongs to a live run cannot be read."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Where the live run comes from, and what is made of it.  One of the first three is given."""

    endpoint: str | None = None
    """A server's address: it is loaded now."""
    bench: Path | None = None
    """A result that exists already."""
    executor: str | None = None
    """``torch`` or ``triton``: our own engine, in this process."""
    client: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``ClientConfig`` but for the address and the seed."""
    bench_run: int | None = None
    """Which run of the file, from 0."""
    log: Path | None = None
    """The server's log of its start."""
    metrics: Path | None = None
    """Its ``/metrics``, or Prometheus' JSON, saved."""
    clock: str = "wall"
    num_threads: int = 1
    repeats: int = 1
    """Live runs, one after the other."""
    as_planned: bool = False
    """Predict from what was planned, whatever the server says of itself."""
    recording: Path | None = None
    """Steps that were recorded in the server meanwhile."""
    limits: tuple[Limit, ...] = ()
    attributes: bool = True
    """Whether to look for what explains the error."""

    def __post_init__(self) -> None:
        given = [name for name in ("endpoint", "bench", "executor") if getattr(self, name) is not None]
        if len(given) != 1:
            told = " and ".join(given) if given else "none of them"
            raise ValidationError(
                f"give one of endpoint (a running server), bench (a result) and executor (torch or triton), got {told}"
            )
        if self.repeats < 1:
            raise ValidationError(f"repeats must be at least 1, got {self.repeats}")
        if self.bench is not None and self.repeats > 1:
            raise ValidationError("a result that exists cannot be repeated: leave repeats out")
        for name in ("log", "metrics", "bench_run"):
            if self.bench is None and getattr(self, name) is not None:
                raise ValidationError(f"{name} belongs to a result that exists: give bench too, or leave it out")


@dataclass(frozen=True, slots=True)
class Source:
    """What was given, and how to make settings from it."""

    scenario: str | Path | Mapping[str, Any] | None
    overrides: dict[str, Override]
    asked: Asked
    tell: Tell

    def resolve(self, more: Mapping[str, tuple[Any, str]] = {}, *, needs_workload: bool = True) -> Resolved:
        """Settings with ``more`` (value and source by key) in place of what was given."""
        from windtunnel.scenarios.load import Override, load_scenario
        from windtunnel.scenarios.resolve import resolve

        overrides = dict(self.overrides)
        if not needs_workload:
            overrides["workload"] = Override(dict(_PLACEHOLDER), "the requests come from elsewhere")
            for key in _workload_keys():
                overrides.pop(key, None)
        overrides |= {key: Override(*given) for key, given in more.items()}
        resolved = resolve(load_scenario(self.scenario, overrides))
        resolved.check_is_one_server("windtunnel validate")
        return replace(resolved, measures_saturation=False, horizon_ns=None)

    @property
    def says_workload(self) -> bool:
        """Whether requests are described anywhere."""
        return self.scenario is not None or any(key in self.overrides for key in ("workload", *_workload_keys()))


def _workload_keys() -> tuple[str, ...]:
    from windtunnel.scenarios.schema import SyntheticWorkload, TraceWorkload

    return tuple(dict.fromkeys((*SyntheticWorkload.model_fields, *TraceWorkload.model_fields)))


@dataclass(frozen=True, slots=True)
class Measured:
    """A live run, the settings that it is predicted with, and what is known to be otherwise."""

    live: tuple[ObservedRun, ...]
    resolved: Resolved
    served: SchedulerConfig | None
    """As the server has it; None where it is not known."""
    assumptions: list[str]
    steps: StepTable | None = None
    """Of the live run."""
    findings: tuple[str, ...] = ()
    whole: tuple[ObservedRun, ...] = ()
    """The live runs with the requests that failed, which are not in ``live``; empty if none did."""
    failures: tuple[str, ...] = ()
    """What became of these, in sentences."""


def measure(source: Source) -> Measured:
    """Run, or read, what was asked for.  Raises as ``windtunnel.validation.validate``."""
    if source.asked.endpoint is not None:
        return _measure_endpoint(source)
    return _read_bench(source) if source.asked.bench is not None else _measure_executor(source)


# --- what the server says


_CONFIG_KEYS = {
    "scheduler_config": {
        "async_scheduling": "async_scheduling",
        "enable_chunked_prefill": "enable_chunked_prefill",
        "long_prefill_token_threshold": "long_prefill_token_threshold",
        "policy": "scheduling_policy",
    },
    "cache_config": {"enable_prefix_caching": "enable_prefix_caching"},
}
"""Of vLLM's own config, where a server shows it."""
_OFTEN_UNTOLD = ("max_num_seqs", "max_num_batched_tokens", "async_scheduling")


def server_settings(facts: ServerFacts, source: str, *, block_size: int | None = None) -> dict[str, tuple[Any, str]]:
    """What a server says of itself, under the keys of a scenario, each with its source.

    ``block_size`` turns a pool that is known in tokens only into blocks.
    """
    size = facts.block_size or block_size
    blocks = facts.num_gpu_blocks
    if blocks is None and facts.kv_cache_tokens is not None and size:
        blocks = facts.kv_cache_tokens // size
    told: dict[str, Any] = {
        "num_gpu_blocks_override": blocks,
        "block_size": facts.block_size if facts.num_gpu_blocks == blocks else size,
        "max_num_seqs": facts.max_num_seqs,
        "max_num_batched_tokens": facts.max_num_batched_tokens,
        "max_model_len": facts.max_model_len,
        "enable_prefix_caching": facts.enable_prefix_caching,
        "data_parallel_size": facts.num_engines if (facts.num_engines or 1) > 1 else None,
    }
    for section, keys in _CONFIG_KEYS.items():
        shown = (facts.config or {}).get(section)
        if isinstance(shown, Mapping):
            told |= {key: shown[name] for name, key in keys.items() if isinstance(shown.get(name), bool | int | str)}
    return {key: (value, source) for key, value in told.items() if value is not None}


def _plans(source: Source, known: Mapping[str, tuple[Any, str]], needs_workload: bool, notes: list[str]) -> _Plans:
    """The settings as planned and as served; one of them may be impossible to make from what is given."""
    if not known:
        planned = source.resolve(needs_workload=needs_workload)
        notes.append("Nothing is known of the server: the settings are those that were planned.")
        return _Plans(planned, planned)
    if source.asked.as_planned:
        return _Plans(
            source.resolve(needs_workload=needs_workload), source.resolve(known, needs_workload=needs_workload)
        )
    served = source.resolve(known, needs_workload=needs_workload)
    alone = _or_none(lambda: source.resolve(needs_workload=needs_workload))
    notes.extend(_facts_used(served, alone, known))
    return _Plans(served, served)


class _Plans(NamedTuple):
    predicted: Resolved
    served: Resolved


def _or_none(make: Callable[[], Resolved]) -> Resolved | None:
    """None where what was given is not enough, or is not feasible, without what the server says."""
    try:
        return make()
    except ValueError:
        return None


def _facts_used(served: Resolved, planned: Resolved | None, known: Mapping[str, tuple[Any, str]]) -> Iterator[str]:
    sources = ", ".join(dict.fromkeys(where for _, where in known.values()))
    config = served.config
    said = (
        f"{config.num_kv_tokens:,} KV tokens ({config.num_gpu_blocks:,} blocks of {config.block_size}), max_num_seqs "
        f"{config.max_num_seqs:,}, max_num_batched_tokens {config.max_num_batched_tokens:,}"
    )
    yield f"Simulated as the server says it is ({sources}): {said}."
    for ingredient in () if planned is None else engine_of(planned.config, config):
        words = ingredient.swap[:1].upper() + ingredient.swap[1:]
        yield f"{words}. The server's word is used; --as-planned uses the plan."
    untold = [name for name in _OFTEN_UNTOLD if name not in known]
    if untold:
        told = ", ".join(f"{name} {_shown(getattr(config, name))}" for name in untold)
        yield f"The server does not say, so taken as planned: {told}."


def _shown(value: int | bool) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}"


# --- a server that runs


def _measure_endpoint(source: Source) -> Measured:
    asked, url = source.asked, source.asked.endpoint
    assert url is not None, "this is the way in of an endpoint"
    source.tell(f"asking {url} what it serves")
    client = _client_config(url, asked.client)
    facts, is_ours = _ask(client)
    notes: list[str] = []
    known = server_settings(facts, "the server")
    if is_ours:
        known.setdefault("async_scheduling", (False, "windtunnel serve decides steps one by one"))
    plans = _plans(source, known, True, notes)
    load = plans.predicted.workload
    _check_lengths(load, facts)
    live = []
    for number in range(asked.repeats):
        source.tell(f"live run {number + 1} of {asked.repeats}: {plural(len(load), 'request')}")
        salt: dict[str, Any] = {} if "cache_salt" in asked.client else {"cache_salt": _salt(client)}
        config = replace(client, seed=plans.predicted.seed, model=client.model or facts.model, **salt)
        live.append(run_live(load, config, on_progress=_Told(source.tell)))
        if live[-1].was_interrupted:
            raise KeyboardInterrupt
        _check_answered(live[-1], url)
    return _finished_only(Measured(tuple(live), plans.predicted, plans.served.config, notes))


class _Told:
    """Says every few seconds how far a live run is."""

    every_s = 10.0

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._last_s = monotonic()

    def __call__(self, progress: Progress) -> None:
        if monotonic() - self._last_s < self.every_s:
            return
        self._last_s = monotonic()
        if not progress.elapsed_s:
            self._tell("waiting for the answers to warm-up requests")
            return
        failed = f", {progress.num_failed:,} failed" if progress.num_failed else ""
        self._tell(
            f"{progress.elapsed_s:.0f} s: {progress.num_finished:,} of {plural(progress.num_requests, 'request')} "
            f"finished{failed}, {progress.num_in_flight:,} in flight"
        )


def _check_answered(run: ObservedRun, url: str) -> None:
    from windtunnel.calibrate.live.client import ServerUnreachable

    if not run.requests.is_finished.any():
        why = next((error for error in run.requests.errors if error), "no reason was given")
        raise ServerUnreachable(f"not one of {plural(len(run.requests), 'request')} was answered by {url}: {why}")


def _finished_only(measured: Measured) -> Measured:
    """Requests that failed in any run are left out of all of them and of the prediction."""
    done = np.logical_and.reduce([run.requests.is_finished for run in measured.live])
    if done.all():
        return measured
    if not done.any():
        raise ValidationError(
            "no request was answered in every live run, so that there is nothing to compare: lower the load, or leave "
            "repeats out"
        )
    load, rows = _with_rows(measured.resolved.workload, np.flatnonzero(done), measured.live[0].requests.due_ns)
    return replace(
        measured,
        live=tuple(with_requests(run, rows) for run in measured.live),
        resolved=replace(measured.resolved, workload=load),
        whole=measured.live,
        failures=tuple(_failures(measured.live, len(rows))),
    )


def _failures(live: Sequence[ObservedRun], num_kept: int) -> Iterator[str]:
    failed = [run.requests.errors[row] for run in live for row in np.flatnonzero(~run.requests.is_finished).tolist()]
    number = sum(len(run.requests) for run in live)
    most, times = Counter(error or "no reason was given" for error in failed).most_common(1)[0]
    told = most if times == len(failed) else f"{times:,} with {most}"
    yield (
        f"{len(failed):,} of {plural(number, 'request')} failed ({told}). They are left out of the live runs and of "
        f"the simulation, which compare {plural(num_kept, 'request')}; what load they were on the server is not "
        "simulated."
    )


def _with_rows(load: Workload, rows: IntArray, due_ns: IntArray) -> tuple[Workload, IntArray]:
    """Those requests alone, and their rows in the order of the new workload.

    One that followed a request that is left out comes when it was due in the live run.
    """
    follows = load.previous[rows] >= 0
    is_orphan = follows & ~np.isin(load.previous[rows], rows)
    if is_orphan.any():
        order = np.argsort(np.where(follows, due_ns[rows], load.arrival_ns[rows]), kind="stable")
        rows, is_orphan = rows[order], is_orphan[order]
    number = np.full(len(load) + 1, -1, np.int64)
    number[rows] = np.arange(len(rows))
    picked = rows.tolist()
    kept = replace(
        load,
        arrival_ns=np.where(is_orphan, due_ns[rows], load.arrival_ns[rows]),
        num_prompt_tokens=load.num_prompt_tokens[rows],
        num_output_tokens=load.num_output_tokens[rows],
        max_tokens=load.max_tokens[rows],
        priority=load.priority[rows],
        previous=np.where(is_orphan, -1, number[load.previous[rows]]),
        think_ns=np.where(is_orphan, 0, load.think_ns[rows]),
        content=None if load.content is None else tuple(load.content[row] for row in picked),
        labels=None if load.labels is None else tuple(load.labels[row] for row in picked),
    )
    return kept, rows


def _client_config(url: str, fields_of_it: Mapping[str, Any]) -> ClientConfig:
    from windtunnel.calibrate.live.http import parse_address

    try:
        parse_address(url)
        return ClientConfig(url, **fields_of_it)
    except ValueError as error:
        raise ValidationError(str(error)) from None


def _salt(client: ClientConfig) -> str | None:
    """A new one, so that what an earlier run left in the prefix cache is not found; only vLLM takes it."""
    return new_cache_salt() if client.vllm_extensions else None


def _check_lengths(load: Workload, facts: ServerFacts) -> None:
    longest = int((load.num_prompt_tokens + load.num_output_tokens).max(initial=0))
    if facts.max_model_len is not None and longest > facts.max_model_len:
        raise ValidationError(
            f"the longest request has {longest:,} tokens, the server's max_model_len is {facts.max_model_len:,}: lower "
            "the workload's lengths (--input-len, --output-len)"
        )


def _ask(client: ClientConfig) -> tuple[ServerFacts, bool]:
    """Raises ServerUnreachable if the server takes the connection and never answers, or names no model."""
    from windtunnel.calibrate.live.client import ServerUnreachable

    limit_s = min(client.connect_timeout_s, client.max_seconds or client.connect_timeout_s)
    try:
        facts, is_ours = asyncio.run(_introduced(client, limit_s))
    except TimeoutError:
        raise ServerUnreachable(
            f"{client.url} does not answer: its model and metrics were not told within {limit_s:g} s: check that the "
            "server is ready"
        ) from None
    if facts.model is None and client.model is None:
        raise ServerUnreachable(f"{client.url} does not say which model it serves: check that the server runs there")
    return facts, is_ours


async def _introduced(client: ClientConfig, limit_s: float) -> tuple[ServerFacts, bool]:
    """What the server says, and whether it is one of ours."""
    from windtunnel.calibrate.live.http import HttpClient, parse_address
    from windtunnel.calibrate.live.metrics import read_server

    headers = {"User-Agent": "windtunnel", "Accept": "*/*", **client.headers}
    if client.api_key is not None:
        headers["Authorization"] = f"Bearer {client.api_key}"
    http = HttpClient(parse_address(client.url), headers, client.connect_timeout_s)
    try:
        async with asyncio.timeout(limit_s):
            introduction = await read_server(http, client.model, timeout_s=2 * limit_s)
            return introduction.facts, await _is_ours(http, 2 * limit_s)
    finally:
        http.close()


async def _is_ours(http: HttpClient, timeout_s: float) -> bool:
    try:
        status, _, _ = await http.get("/windtunnel/executor", timeout_s=timeout_s)
    except (OSError, ValueError):
        return False
    return status == 200


# --- a result that exists


def _read_bench(source: Source) -> Measured:
    from windtunnel.calibrate.live.imports import read_result

    asked = source.asked
    assert asked.bench is not None, "this is the way in of a result"
    source.tell(f"reading {asked.bench}")
    run = read_result(asked.bench, run=asked.bench_run)
    notes: list[str] = [*run.notes]
    run, known = _with_files(run, asked, notes)
    if len(run.requests):
        run, load = _replayed(run, _seed_of(source), notes)
        plans = _plans(source, known, False, notes)
    else:
        plans = _plans(source, known, source.says_workload, notes)
        load = plans.predicted.workload if source.says_workload else _assumed(run, plans.predicted.seed, notes)
        if source.says_workload:
            notes.append("The result holds no single requests: those of the scenario are simulated in their place.")
    from windtunnel.sim.simulate import check_fits

    check_fits(load, plans.predicted.config)
    entries = tuple(entry for entry in plans.predicted.entries if entry.section != "workload" or source.says_workload)
    resolved = replace(plans.predicted, workload=load, entries=entries)
    return Measured((run,), resolved, plans.served.config, notes)


def _seed_of(source: Source) -> int:
    given = source.overrides.get("seed")
    return int(given.value) if given is not None else 0


def _with_files(run: ObservedRun, asked: Asked, notes: list[str]) -> tuple[ObservedRun, dict[str, tuple[Any, str]]]:
    """The run with what saved metrics and a log say of its server."""
    from windtunnel.calibrate.live.metrics import add_saved_metrics

    known: dict[str, tuple[Any, str]] = {}
    if asked.log is not None:
        known |= _log_settings(asked.log, notes)
    if asked.metrics is not None:
        text = _text(asked.metrics)
        try:
            run = add_saved_metrics(run, text, name=str(asked.metrics))
        except ValueError as error:
            raise ValidationInputUnreadable(str(error)) from None
    where = run.name if asked.metrics is None else str(asked.metrics)
    return run, known | server_settings(run.server, where)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValidationInputUnreadable(f"{path}: not UTF-8 text ({error.reason}): save it as UTF-8") from None


def _log_settings(path: Path, notes: list[str]) -> dict[str, tuple[Any, str]]:
    from windtunnel.sim.deployment.startup_log import read_startup_log

    with path.open(encoding="utf-8", errors="replace") as file:
        try:
            found = read_startup_log(file, name=str(path))
        except ValueError as error:
            raise ValidationInputUnreadable(str(error)) from None
    notes.extend(found.notes)
    facts = ServerFacts(
        max_model_len=found.max_model_len,
        num_gpu_blocks=found.num_gpu_blocks,
        block_size=found.block_size,
        kv_cache_tokens=found.kv_cache_tokens,
        enable_prefix_caching=found.enable_prefix_caching,
        num_engines=found.data_parallel_size,
        max_num_seqs=found.max_num_seqs,
        max_num_batched_tokens=found.max_num_batched_tokens,
    )
    return server_settings(facts, str(path), block_size=16)


def _replayed(run: ObservedRun, seed: int, notes: list[str]) -> tuple[ObservedRun, Workload]:
    """The requests that a result holds, as they were due, and the run with these alone, in their order."""
    table = run.requests
    usable = table.is_finished & (table.num_prompt_tokens > 0) & (table.num_output_tokens > 0)
    if not usable.any():
        raise ValidationError(
            f"{run.name}: no request in it is finished and has its lengths: save the result with every request "
            "(vllm bench serve --save-result --save-detailed)"
        )
    if not usable.all():
        notes.append(
            f"{int((~usable).sum()):,} of {len(table):,} requests are left out, in the simulation too: they failed, or "
            "their lengths are not known. What load they were on the server is not simulated."
        )
    arrival_ns = _arrivals(run, seed, notes)
    rows = np.flatnonzero(usable)
    rows = rows[np.argsort(arrival_ns[rows], kind="stable")]
    kept = with_requests(run, rows)
    load = workload(
        arrival_ns[rows],
        kept.requests.num_prompt_tokens,
        kept.requests.num_output_tokens,
        max_concurrency=run.max_concurrency,
        labels=kept.requests.labels,
        source=run.name,
    )
    notes.append("Prompts are taken to have nothing in common: the result does not say what they hold.")
    return kept, load


def _arrivals(run: ObservedRun, seed: int, notes: list[str]) -> Any:
    """When the requests were due, from the result; drawn from its rate where it does not have that."""
    table = run.requests
    due = np.where(table.due_ns >= 0, table.due_ns, table.send_ns)
    if not (due[table.is_finished] < 0).any():
        return np.maximum(due, 0)
    return _drawn_arrivals(run, len(table), seed, notes)


def _drawn_arrivals(run: ObservedRun, num_requests: int, seed: int, notes: list[str]) -> Any:
    rate = run.request_rate
    if rate is None and run.max_concurrency is not None:
        rate = math.inf
    if rate is None or rate <= 0:
        raise ValidationError(
            f"{run.name}: it says neither when requests were sent nor at which rate: save it with every request "
            "(vllm bench serve --save-result --save-detailed), or describe the workload (--num-prompts, --input-len, "
            "--output-len, --request-rate)"
        )
    if math.isinf(rate):
        limit = "" if run.max_concurrency is None else f", {run.max_concurrency:,} in flight at most"
        notes.append(
            f"When requests were sent is not known: all are taken to be due at once{limit}, as the rate is inf."
        )
        return np.zeros(num_requests, np.int64)
    notes.append(
        f"When requests were sent is not known: arrivals are drawn (Poisson, {count(rate)} requests/s, seed {seed}), "
        "so that single waits are not those of the live run."
    )
    gaps_s = rng.stream(seed, "validation", "arrivals").exponential(1 / rate, num_requests)
    return np.rint(np.cumsum(gaps_s) * NS_PER_S).astype(np.int64)


def _assumed(run: ObservedRun, seed: int, notes: list[str]) -> Workload:
    """Requests that come to a result's aggregates: all of the mean lengths."""
    told = observed_metrics(run)
    number, inputs, outputs = told.completed or told.num_prompts, told.total_input_tokens, told.total_output_tokens
    if not number or not inputs or not outputs:
        raise ValidationError(
            f"{run.name}: it holds no single requests, and not the number of requests and tokens either: save it with "
            "every request (vllm bench serve --save-result --save-detailed), or describe the workload (--num-prompts, "
            "--input-len, --output-len, --request-rate)"
        )
    prompt, output = max(1, round(inputs / number)), max(1, round(outputs / number))
    notes.append(
        f"The result holds no single requests: every prompt is taken to have {prompt:,} tokens and every answer "
        f"{output:,}, the means. Distributions cannot be compared beyond what the result states; describe the workload "
        "(--input-len, --output-len) if its lengths varied."
    )
    arrival_ns = _drawn_arrivals(run, number, seed, notes)
    lengths = (np.full(number, prompt), np.full(number, output))
    return workload(arrival_ns, *lengths, max_concurrency=run.max_concurrency, source=run.name)


# --- our own engine


def _measure_executor(source: Source) -> Measured:
    asked = source.asked
    kind = asked.executor or ""
    _check_executor(asked)
    is_priced = any(key in source.overrides for key in ("cost", "profile", "gpu")) or source.scenario is not None
    more: dict[str, tuple[Any, str]] = {"async_scheduling": (False, "the executor takes steps one by one")}
    if not is_priced:
        more["cost"] = (_ONLY_A_STEP, "until steps are measured")
    if source.scenario is None and "num_gpu_blocks_override" not in source.overrides:
        more["num_gpu_blocks_override"] = (_cache_blocks(source, more), "a KV cache of at most 1 GiB")
    resolved = source.resolve(more)
    notes = [
        f"Time is the simulation's and passes by what steps took ({asked.clock} clock): there is no HTTP and no client."
    ]
    executor = _made_executor(source, resolved)
    try:
        if not is_priced:
            resolved = _calibrated(source, resolved, executor, notes)
        runs, steps = [], []
        for number in range(asked.repeats):
            source.tell(f"live run {number + 1} of {asked.repeats} on the {kind} executor")
            run, own = _run_on(executor, resolved.workload, resolved)
            runs.append(run)
            steps.append(own)
    finally:
        executor.close()
    findings = (_decisions(resolved, runs[0], steps[0]),)
    return Measured(tuple(runs), resolved, resolved.config, notes, _table(steps[0]), findings)


def _check_executor(asked: Asked) -> None:
    from windtunnel.executor.server.executors import unavailable_text, why_torch_is_missing, why_triton_is_missing

    kind = asked.executor or ""
    if kind not in ("torch", "triton"):
        raise ValidationError(f"executor must be torch or triton, got {kind!r}")
    missing = why_torch_is_missing() if kind == "torch" else why_triton_is_missing()
    if missing is not None:
        raise ValidationError(unavailable_text(kind, missing))
    if asked.clock not in ("wall", "cpu"):
        raise ValidationError(f"clock must be wall or cpu, got {asked.clock!r}")
    if asked.clock == "cpu" and kind == "triton":
        raise ValidationError("the clock cpu is for --executor torch: a GPU's work does not show in it")


def _served_model(source: Source) -> Any:
    from windtunnel.executor.server.build import ServedModel
    from windtunnel.scenarios.load import load_scenario
    from windtunnel.sim.deployment.model import read_model_config

    loaded = load_scenario(source.scenario, source.overrides)
    name = loaded.scenario.deployment.model
    if name is None:
        raise ValidationError("an executor computes a model: give one (--model FOLDER)")
    path = loaded.path_of("deployment", "model", name)
    name = str(path) if path.exists() else name
    config, folder = read_model_config(name)
    return ServedModel((name,), name, config, folder)


def _made_executor(source: Source, resolved: Resolved) -> Any:
    from windtunnel.executor.server.build import decoder_config
    from windtunnel.executor.server.executors import ModelExecutors, unavailable_text

    asked, kind = source.asked, source.asked.executor or ""
    served = _served_model(source)
    deployment = resolved.scenario.deployment
    try:
        makers = ModelExecutors(
            decoder_config(served),
            served.folder,
            resolved.config,
            dtype=deployment.dtype or "auto",
            kv_cache_dtype=deployment.kv_cache_dtype or "auto",
            seed=resolved.seed,
            num_threads=asked.num_threads,
            clock=asked.clock,
        )
        missing = makers.why_not(kind)
        if missing is not None:
            raise ValueError(missing)
        return makers.make(kind)
    except ValueError as error:
        raise ValidationError(unavailable_text(kind, str(error))) from error


def _cache_blocks(source: Source, more: Mapping[str, tuple[Any, str]]) -> int:
    """As many as all seats can use, in at most 1 GiB."""
    from windtunnel.executor.server.build import decoder_config

    model = decoder_config(_served_model(source))
    config = source.resolve({**more, "num_gpu_blocks_override": (2**20, "to see the other settings")}).config
    token_bytes = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * 4
    useful = config.max_num_seqs * -(-config.max_model_len // config.block_size) + 1
    return int(max(2, min(useful, _CACHE_BYTES // (token_bytes * config.block_size))))


def _calibrated(source: Source, resolved: Resolved, executor: Any, notes: list[str]) -> Resolved:
    """Step times fitted to the steps of another workload of the same kind, so that none of the run's own is used."""
    from windtunnel.calibrate.attribution import recorded_cost

    seed = resolved.seed + 1
    other = source.resolve(
        {
            "seed": (seed, "for step times"),
            "cost": (_ONLY_A_STEP, "until steps are measured"),
            "async_scheduling": (False, "the executor takes steps one by one"),
            "num_gpu_blocks_override": (resolved.config.num_gpu_blocks, "as the run itself"),
        }
    )
    source.tell("a first run, for step times")
    _run_on(executor, _first_requests(other.workload, _NUM_WARMUPS), other)
    _, steps = _run_on(executor, other.workload, other)
    cost = recorded_cost(_table(steps), resolved.cost)
    notes.append(
        f"No cost model was given: step times are fitted to {plural(len(steps), 'step')} of a run before, whose "
        f"requests were drawn with seed {seed}."
    )
    entries = tuple(entry for entry in resolved.entries if entry.section != "cost")
    return replace(resolved, system=replace(resolved.system, cost=cost), entries=entries)


def _first_requests(load: Workload, number: int) -> Workload:
    columns: dict[str, Any] = {
        name: getattr(load, name)[:number]
        for name in (
            *("arrival_ns", "num_prompt_tokens", "num_output_tokens", "max_tokens", "priority", "previous", "think_ns"),
            *(("content",) if load.content is not None else ()),
            *(("labels",) if load.labels is not None else ()),
        )
    }
    return replace(load, **columns)


def _run_on(executor: Any, load: Workload, resolved: Resolved) -> tuple[ObservedRun, list[Any]]:
    from windtunnel.executor.real_steps import run_live as run_steps

    done = run_steps(load, resolved.config, executor, seed=resolved.seed)
    run = observed_from_records(done.records, load)
    return replace(run, source="windtunnel executor", name="our own engine"), done.steps


def _table(steps: Sequence[Any]) -> StepTable:
    from windtunnel.calibrate.step_tables import StepTable
    from windtunnel.sim.engine.plan import StepShape

    columns: Any = [np.array(column, np.int64) for column in zip(*(step.shape for step in steps), strict=True)]
    seconds_of = np.array([step.step_ns for step in steps], np.float64) / NS_PER_S
    return StepTable(StepShape(*columns), seconds_of, {"source": "measured"})


def _decisions(resolved: Resolved, live: ObservedRun, steps: Sequence[Any]) -> str:
    """Whether a simulation whose steps last as long as the live ones decides the same."""
    from windtunnel.sim.replay import ReplayExecutor
    from windtunnel.sim.simulate import run

    replay = ReplayExecutor(steps, lenient=True)
    try:
        records = run(resolved.workload, resolved.config, resolved.cost, executor=replay)
    except ValueError as error:
        return f"With the live step times fed back the simulation decides otherwise: {error}."
    if replay.num_diverged or replay.num_left:
        return f"With the live step times fed back decisions differ: {replay.first_divergence}."
    same = observed_from_records(records, resolved.workload).requests.e2el_ns.tolist() == live.requests.e2el_ns.tolist()
    exact = ", and every token comes at the same nanosecond" if same else ""
    return f"With the live step times fed back all {len(steps):,} steps are decided alike{exact}."
