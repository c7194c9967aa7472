"""Reads a live run of a real vLLM server: what the client sent and saw, what the engine decided, and when.

A run is a folder, beside the folders of the server's other runs and the file ``engine_config.json``:

==================  ================================================================================================
file                what is read of it
==================  ================================================================================================
requests.jsonl      one line a request: ``id``, ``prompt_len``, ``out_len``, ``t_send`` (seconds from the run's begin),
                    ``chunk_t`` (seconds after ``t_send`` of each chunk) and ``chunk_n`` (tokens that had come by then,
                    where chunks hold several)
sched.jsonl.gz      one line a decision: ``det``, who computes how many tokens behind how many, and ``pre``, who was
                    preempted; and a line a request that was added, with ``arr``, when the API server had it
steps.csv           one line a step: when its decision began, and how long its parts took (``recorded_steps``)
run.json            ``mode``: ``open`` or ``closed`` loop, or ``cohorts``, bursts one after the other, which are read as
                    an open loop with the times at which they were sent
engine_config.json  the server's limits
==================  ================================================================================================

All instants are of one clock, in seconds from the begin of the run.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.recorded_steps import RecordedSteps, read_recorded_steps
from windtunnel.calibrate.step_tables import StepTable
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.records import Records
from windtunnel.sim.workload import Workload, workload

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]
NS_PER_S = 1_000_000_000
MODES = ("open", "closed", "cohorts")


class Spread(NamedTuple):
    """Mean, median and 95th percentile of one latency over the requests, in seconds."""

    mean_s: float
    p50_s: float
    p95_s: float


class RunFigures(NamedTuple):
    """What is compared of a run; latencies as ``vllm bench serve`` defines them."""

    makespan_s: float
    """From the first sending to the last token."""
    ttft: Spread
    tpot: Spread
    """Of the requests with more than one token: (last token - first token) / (tokens - 1)."""
    e2el: Spread
    num_preemptions: int
    num_steps: int


@dataclass(frozen=True, eq=False, slots=True)
class LiveRun:
    """One run, requests in the order in which they were sent."""

    path: Path
    config: SchedulerConfig
    is_closed_loop: bool
    labels: tuple[str, ...]
    send_s: _Floats
    """When the client sent each request."""
    arrival_s: _Floats
    """When the API server had it."""
    num_prompt_tokens: _Ints
    num_output_tokens: _Ints
    client_tokens_s: tuple[_Floats, ...]
    """Per request, when the client had each token."""
    engine_tokens_s: tuple[_Floats, ...]
    """Per request, when the step that made each token was over and the next decision could begin."""
    token_steps: tuple[_Ints, ...]
    """Per request, which step made each token, as a row of ``steps``."""
    first_steps: _Ints
    """The row of the first step that computed any of each request."""
    steps: RecordedSteps
    begin_s: _Floats
    """Per step, when its decision began."""
    engine_arrival_s: _Floats
    """When the engine took each request into its queue, which it does between two steps."""
    num_scheduled_tokens: tuple[tuple[tuple[int, int], ...], ...]
    """Per step, (request, tokens) of all that it computes, in the order of the decision."""
    over_s: _Floats
    """Per step, when it was over and the next decision could begin."""
    intervals_s: _Floats
    """From each decision to the next one; NaN where the engine ran empty in between, and for the last step."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def name(self) -> str:
        """Server and run."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def max_concurrency(self) -> int | None:
        """Requests that a closed-loop client kept under way at most; None in open loop."""
        if not self.is_closed_loop:
            return None
        ends = np.array([tokens[-1] for tokens in self.client_tokens_s])
        return int(max((np.sum((self.send_s <= at) & (ends > at))) for at in self.send_s))

    def workload(self) -> Workload:
        """What the client did: open loop with its sending times, or closed loop with its limit of requests."""
        limit = self.max_concurrency
        return self.workload_at(np.zeros(len(self)) if limit is not None else self.send_s, max_concurrency=limit)

    def workload_at(self, arrival_s: _Floats, *, max_concurrency: int | None = None) -> Workload:
        """The requests with other arrival times, such as those at the engine; they must be in that order."""
        return workload(
            np.rint(arrival_s * NS_PER_S).astype(np.int64),
            self.num_prompt_tokens,
            self.num_output_tokens,
            labels=self.labels,
            max_concurrency=max_concurrency,
            source=self.name,
        )

    def at_client(self) -> RunFigures:
        """What the client saw."""
        return self._figures(self.send_s, self.client_tokens_s)

    def at_engine(self) -> RunFigures:
        """The same from the API server's arrival to the end of the steps."""
        return self._figures(self.arrival_s, self.engine_tokens_s)

    def _figures(self, from_s: _Floats, tokens_s: Iterable[_Floats]) -> RunFigures:
        return run_figures(from_s, tokens_s, int(self.steps.columns["num_preempted"].sum()), int(self.steps.num_steps))


def run_figures(from_s: _Floats, tokens_s: Iterable[_Floats], num_preemptions: int, num_steps: int) -> RunFigures:
    """The figures of requests that were sent at ``from_s`` and got tokens at those times, in seconds."""
    all_tokens_s = tuple(tokens_s)
    first_s = np.array([tokens[0] for tokens in all_tokens_s])
    last_s = np.array([tokens[-1] for tokens in all_tokens_s])
    counts = np.array([len(tokens) for tokens in all_tokens_s])
    several = counts > 1
    tpot_s = (last_s - first_s)[several] / (counts[several] - 1)
    return RunFigures(
        makespan_s=float(last_s.max() - from_s.min()),
        ttft=_spread(first_s - from_s),
        tpot=_spread(tpot_s),
        e2el=_spread(last_s - from_s),
        num_preemptions=num_preemptions,
        num_steps=num_steps,
    )


def simulated_tokens_s(records: Records) -> tuple[tuple[_Floats, ...], tuple[_Ints, ...]]:
    """Of each request of a simulation of one engine: when its tokens' steps ended, in seconds, and which they were."""
    replica = records.replicas[0]
    rows: dict[int, list[_Ints]] = defaultdict(list)
    spans = replica.spans
    order = np.lexsort((spans.first_step, spans.request))
    for at in order.tolist():
        first, count = int(spans.first_step[at]), int(spans.count[at])
        rows[int(spans.request[at])].append(np.arange(first, first + count))
    end_s = replica.steps.end_ns / NS_PER_S
    steps = tuple(np.concatenate(rows[request]) for request in records.requests.request.tolist())
    return tuple(end_s[each] for each in steps), steps


def live_step_table(runs: Iterable[LiveRun]) -> StepTable:
    """The steps of several runs, each as long as from its decision to the next one.

    That holds the time in the executor and all that the host does between two steps.  Steps after which the engine ran
    empty are left out, since the pause is not theirs.
    """
    parts, times, names = [], [], []
    for run in runs:
        known = np.isfinite(run.intervals_s)
        parts.append([run.steps.columns[name][known] for name in StepShape._fields])
        times.append(run.intervals_s[known])
        names.append(run.name)
    columns: Any = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return StepTable(StepShape(*columns), np.concatenate(times), {"source": "recorded", "runs": names})


def read_live_run(folder: str | Path) -> LiveRun:
    """The run in that folder.

    Raises FileNotFoundError for a file that is missing and ValueError, with file and line, for one that cannot be read,
    a request that failed or did not get the tokens that it asked for, or files of different runs.
    """
    folder = Path(folder)
    sent = _sent(folder / "requests.jsonl")
    steps = read_recorded_steps(folder)
    config = read_engine_config(folder.parent / "engine_config.json")
    decisions, added = _decisions(folder / "sched.jsonl.gz", {line.label: row for row, line in enumerate(sent)})
    lacking = [line.label for row, line in enumerate(sent) if row not in added]
    if lacking:
        raise ValueError(f"{folder}: sched.jsonl.gz has no add event of request {lacking[0]!r}: of a different run?")
    token_steps, first_steps = _token_steps(folder, sent, decisions, added)
    begin_s = _first_begin_s(folder / "steps.csv") + steps.columns["begin_s"]
    intervals_s, ends_s = _intervals(folder, steps, begin_s, decisions)
    return LiveRun(
        path=folder,
        config=config,
        is_closed_loop=_is_closed_loop(folder / "run.json"),
        labels=tuple(line.label for line in sent),
        send_s=np.array([line.send_s for line in sent]),
        arrival_s=np.array([added[row].arrival_s for row in range(len(sent))]),
        num_prompt_tokens=np.array([line.num_prompt_tokens for line in sent]),
        num_output_tokens=np.array([line.num_output_tokens for line in sent]),
        client_tokens_s=tuple(line.tokens_s for line in sent),
        engine_tokens_s=tuple(ends_s[rows] for rows in token_steps),
        token_steps=token_steps,
        first_steps=first_steps,
        steps=steps,
        begin_s=begin_s,
        engine_arrival_s=np.array([added[row].added_s for row in range(len(sent))]),
        num_scheduled_tokens=tuple(
            tuple((request, num_tokens) for request, num_tokens, _ in decision.computed) for decision in decisions
        ),
        over_s=ends_s,
        intervals_s=intervals_s,
    )


def read_engine_config(path: str | Path) -> SchedulerConfig:
    """The limits that a server started with, as our scheduler takes them.

    Raises FileNotFoundError if there is no such file and ValueError for one that lacks a setting, has one of another
    kind, or has one that this release does not know how to follow (another policy than FCFS).
    """
    path = Path(path)
    given = _object(path)
    kinds = (
        ("num_gpu_blocks", int),
        ("block_size", int),
        ("max_num_seqs", int),
        ("max_num_scheduled_tokens", int),
        ("max_model_len", int),
        ("prefix_caching", bool),
        ("chunked_prefill", bool),
        ("reserve_full_isl", bool),
        ("async_scheduling", bool),
    )
    for name, kind in kinds:
        if type(given.get(name)) is not kind:
            wanted = "a whole number" if kind is int else "true or false"
            raise ValueError(f"{path}: {name} must be {wanted}, got {given.get(name)!r}")
    policy = str(given.get("policy", "fcfs")).rpartition(".")[2].lower()
    watermark = given.get("watermark", 0.0)
    if isinstance(watermark, bool) or not isinstance(watermark, int | float):
        raise ValueError(f"{path}: watermark must be a number, got {watermark!r}")
    try:
        return SchedulerConfig(
            max_num_seqs=given["max_num_seqs"],
            max_num_batched_tokens=given["max_num_scheduled_tokens"],
            max_model_len=given["max_model_len"],
            block_size=given["block_size"],
            num_gpu_blocks=given["num_gpu_blocks"],
            enable_chunked_prefill=given["chunked_prefill"],
            enable_prefix_caching=given["prefix_caching"],
            policy=policy,
            watermark=float(watermark),
            scheduler_reserve_full_isl=given["reserve_full_isl"],
            async_scheduling=given["async_scheduling"],
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


# ------------------------------------------------------------------ the client's side


class _Sent(NamedTuple):
    label: str
    send_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    tokens_s: _Floats


def _sent(path: Path) -> list[_Sent]:
    with path.open(encoding="utf-8") as file:
        lines = [_sent_line(f"{path}, line {number}", line) for number, line in enumerate(file, 1)]
    if not lines:
        raise ValueError(f"{path}: no requests in it")
    if len({line.label for line in lines}) < len(lines):
        raise ValueError(f"{path}: two requests have the same id: give the file of one run")
    return sorted(lines, key=lambda line: line.send_s)


def _sent_line(where: str, line: str) -> _Sent:
    given = _json_object(where, line)
    if given.get("error"):
        raise ValueError(f"{where}: request {given.get('id')!r} failed ({given['error']}): leave failed runs out")
    try:
        label, prompt, output = str(given["id"]), given["prompt_len"], given["out_len"]
        send_s, chunks_s = float(given["t_send"]), np.array(given["chunk_t"], np.float64)
        counts = np.array(given.get("chunk_n") or np.arange(1, len(chunks_s) + 1), np.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {type(error).__name__} {error} in {line.strip()[:80]!r}") from None
    for name, value in (("prompt_len", prompt), ("out_len", output)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{where}: {name} must be a whole number of at least 1, got {value!r}")
    if chunks_s.ndim != 1 or counts.shape != chunks_s.shape or (np.diff(counts, prepend=0) < 0).any():
        raise ValueError(f"{where}: chunk_n must count the tokens of chunk_t's chunks, and never fall")
    if not len(counts) or counts[-1] != output:
        got = int(counts[-1]) if len(counts) else 0
        raise ValueError(f"{where}: request {label!r} asked for {output} tokens and got {got}: leave failed runs out")
    if not np.isfinite(chunks_s).all() or chunks_s[0] < 0 or (np.diff(chunks_s) < 0).any():
        raise ValueError(f"{where}: chunk_t must be seconds after t_send that never fall")
    return _Sent(label, send_s, prompt, output, np.repeat(send_s + chunks_s, np.diff(counts, prepend=0)))


# ------------------------------------------------------------------ the engine's side


class _Added(NamedTuple):
    arrival_s: float
    added_s: float
    num_prompt_tokens: int


class _Decision(NamedTuple):
    number: int
    computed: tuple[tuple[int, int, int], ...]
    """(request, tokens, computed before) of each."""


def _decisions(path: Path, rows: Mapping[str, int]) -> tuple[list[_Decision], dict[int, _Added]]:
    """The decisions that compute something, and the requests that were added, by their rows."""
    decisions, added = [], {}
    for number, line in enumerate(_gzip_lines(path), 1):
        where = f"{path}, line {number}"
        given = _json_object(where, line)
        try:
            if given.get("det"):
                computed = tuple((rows[label], tokens, before) for label, tokens, before in given["det"])
                decisions.append(_Decision(given["i"], computed))
            elif given.get("ev") == "add":
                added[rows[given["id"]]] = _Added(float(given["arr"]), float(given["t"]), int(given["prompt"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: {type(error).__name__} {error} in {line.strip()[:80]!r}") from None
    return decisions, added


def _gzip_lines(path: Path) -> list[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.readlines()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from error


def _token_steps(
    folder: Path, sent: list[_Sent], decisions: list[_Decision], added: Mapping[int, _Added]
) -> tuple[tuple[_Ints, ...], _Ints]:
    """Which steps made each request's tokens, and which was the first that computed any of it.

    A step yields a token of a request when it has then computed all the tokens that are known of it.
    """
    known = [added[row].num_prompt_tokens for row in range(len(sent))]
    made: list[list[int]] = [[] for _ in sent]
    first = [-1] * len(sent)
    for row, decision in enumerate(decisions):
        for request, num_tokens, before in decision.computed:
            if first[request] < 0:
                first[request] = row
            if before + num_tokens >= known[request]:
                known[request] += 1
                made[request].append(row)
    for line, steps in zip(sent, made, strict=True):
        if len(steps) != line.num_output_tokens:
            raise ValueError(
                f"{folder}: request {line.label!r} has {line.num_output_tokens} tokens in requests.jsonl and "
                f"{len(steps)} in sched.jsonl.gz: the files are of different runs, or one was cut off"
            )
    return tuple(np.array(steps, np.int64) for steps in made), np.array(first, np.int64)


def _intervals(
    folder: Path, steps: RecordedSteps, begin_s: _Floats, decisions: list[_Decision]
) -> tuple[_Floats, _Floats]:
    """From each decision to the next, NaN where the engine ran empty; and when each step was over, host work included.

    A step without a successor ends with its update, plus what the host needs between two steps in the median.
    """
    if [decision.number for decision in decisions] != steps.columns["step"].tolist():
        raise ValueError(f"{folder}: steps.csv and sched.jsonl.gz have different steps: they are of different runs")
    columns = steps.columns
    updated_s = begin_s + columns["schedule_s"] + columns["step_s"] + columns["update_s"]
    intervals_s = np.append(np.diff(begin_s), np.nan)
    sets = [{request for request, *_ in decision.computed} for decision in decisions]
    goes_on = [not now.isdisjoint(then) for now, then in pairwise(sets)]
    intervals_s[~np.array([*goes_on, False])] = np.nan
    pause_s = float(np.nanmedian(begin_s + intervals_s - updated_s)) if any(goes_on) else 0.0
    ends_s = np.where(np.isfinite(intervals_s), begin_s + intervals_s, updated_s + pause_s)
    return intervals_s, ends_s


def _first_begin_s(path: Path) -> float:
    """When the first decision began, from the run's begin; ``recorded_steps`` counts from it."""
    import csv

    with path.open(encoding="utf-8", newline="") as file:
        return float(next(csv.DictReader(file))["t"])


def _is_closed_loop(path: Path) -> bool:
    mode = _object(path).get("mode")
    if mode not in MODES:
        raise ValueError(f"{path}: mode must be one of {', '.join(MODES)}, got {mode!r}")
    return bool(mode == "closed")


def _object(path: Path) -> dict[str, Any]:
    return _json_object(str(path), path.read_text(encoding="utf-8"))


def _json_object(where: str, text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ValueError(f"{where}: not an object of JSON")
    return given


def _spread(values_s: _Floats) -> Spread:
    if not len(values_s):
        return Spread(float("nan"), float("nan"), float("nan"))
    return Spread(float(values_s.mean()), float(np.percentile(values_s, 50)), float(np.percentile(values_s, 95)))
