"""Where decisions come from that are compared: simulations (with any scheduler), recorded runs, saved runs.

A recorded run brings its own requests: each comes when the decision that first saw it was made, and each step lasts
until the decision that followed it, so that a simulation of it decides at the recorded instants.
"""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.diff import MOST_WAITING_KEPT, Batch, Decision, Progress, QueueState
from windtunnel.calibrate.live_runs import read_engine_config
from windtunnel.calibrate.recorded_steps import RecordedSteps, read_recorded_steps
from windtunnel.executor.vllm_plugin.recording import UNKNOWN
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepPlan, StepResult, StepShape
from windtunnel.sim.engine.protocols import Executor, SchedulerProtocol
from windtunnel.sim.engine.request import Request
from windtunnel.sim.records import ReplicaRecords
from windtunnel.sim.simulate import serve
from windtunnel.sim.system import System
from windtunnel.sim.workload import Workload, workload

NS_PER_S = 1_000_000_000
Sink = Callable[[Decision], None]

# ------------------------------------------------------------------ simulations


def simulated(
    requests: Workload,
    system: System,
    *,
    scheduler: SchedulerProtocol | None = None,
    executor: Executor | None = None,
    horizon_ns: int | None = None,
) -> Iterator[Decision]:
    """The decisions of a simulation, as it goes; it goes no further than they are asked for.

    ``scheduler`` and ``executor`` take the place of those that the system makes.  Raises what ``sim.simulate.serve``
    raises, and ValueError for more than one replica.
    """
    if system.num_replicas != 1:
        raise ValueError(
            f"decisions are compared for one engine, the deployment has {system.num_replicas} replicas: "
            "set data_parallel_size to 1, with a load for one of them"
        )
    decider = scheduler or system.make_scheduler()

    def run(sink: Sink) -> None:
        tapped = _TappedSystem(
            **{name: getattr(system, name) for name in System.__dataclass_fields__},
            tapped=cast(SchedulerProtocol, _Tap(decider, sink)),
            executor=executor,
        )
        serve(requests, tapped, horizon_ns=horizon_ns)

    return _as_it_goes(run)


@dataclass(frozen=True, slots=True)
class _TappedSystem(System):
    """The system with its scheduler under observation."""

    tapped: SchedulerProtocol | None = None
    executor: Executor | None = None

    def make_scheduler(self) -> SchedulerProtocol:
        assert self.tapped is not None
        return self.tapped

    def make_executor(self, replica: int = 0) -> Executor:
        return self.executor or System.make_executor(self, replica)


class _Tap:
    """A scheduler whose every decision is told to ``sink``; in all else it is the one that decides."""

    def __init__(self, decider: SchedulerProtocol, sink: Sink) -> None:
        self._decider: Any = decider
        self._sink = sink
        self._number = 0
        self._before: QueueState | None = None
        self._preempted: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decider, name)

    def schedule(self, now_ns: int) -> StepPlan:
        before = self._queue()
        plan: StepPlan = self._decider.schedule(now_ns)
        self._preempted += [int(each.request.request_id) for each in plan.preemptions]
        if plan.is_empty:
            self._before = self._before or (before if plan.preemptions else None)
            return plan
        self._sink(self._decision(plan, now_ns, self._before or before))
        self._number += 1
        self._before, self._preempted = None, []
        return plan

    def _decision(self, plan: StepPlan, now_ns: int, before: QueueState) -> Decision:
        load = self._decider.load()
        preempted = tuple(sorted(self._preempted))
        return Decision(
            number=self._number,
            time_ns=now_ns,
            tokens=self._tokens(plan),
            admitted=tuple((int(each.request.request_id), each.num_cached_tokens) for each in plan.admissions),
            preempted=preempted,
            num_preempted=len(preempted),
            batch=Batch.of(plan.shape),
            shape=plan.shape,
            num_running=load.num_running,
            num_held_blocks=self._decider.config.num_usable_blocks - load.num_free_blocks,
            before=before,
        )

    def _tokens(self, plan: StepPlan) -> tuple[tuple[int, int], ...] | None:
        scheduled = getattr(self._decider, "scheduled_tokens", None)  # batches that run to completion have none
        if scheduled is None:
            return None
        return tuple((int(request.request_id), num_tokens) for request, num_tokens in scheduled(plan).items())

    def _queue(self) -> QueueState:
        load = self._decider.load()
        requests: Iterator[Request] = self._decider.requests()
        running = [self._progress(request) for request in islice(requests, load.num_running)]
        waiting = tuple(int(request.request_id) for request in islice(requests, MOST_WAITING_KEPT))
        return QueueState(tuple(running), waiting, load.num_waiting, load.num_free_blocks)

    def _progress(self, request: Request) -> Progress:
        computed = getattr(self._decider, "num_computed_tokens", None)
        num_computed = request.base if computed is None else computed(request)
        count = getattr(self._decider, "num_blocks", None)
        num_blocks = len(request.block_ids) if count is None else count(request)
        return Progress(int(request.request_id), num_computed, num_blocks)


class _Abandoned(Exception):
    """Nobody wants to know how the simulation goes on."""


_BATCH = 32  # decisions handed over at once
_END = object()


def _as_it_goes(run: Callable[[Sink], None]) -> Iterator[Decision]:
    """What ``run`` tells its sink, while it runs in a thread of its own, never far ahead of the reader."""
    handed: Queue[Any] = Queue(maxsize=2)
    abandoned = threading.Event()

    def put(item: Any) -> None:
        while not abandoned.is_set():
            with suppress(Full):
                handed.put(item, timeout=0.1)
                return
        raise _Abandoned

    def work() -> None:
        told: list[Decision] = []

        def sink(decision: Decision) -> None:
            told.append(decision)
            if len(told) == _BATCH:
                put(told.copy())
                told.clear()

        outcome: Any = _END
        try:
            run(sink)
        except _Abandoned:
            return
        except BaseException as error:  # the reader raises it
            outcome = error
        with suppress(_Abandoned):
            put(told)
            put(outcome)

    thread = threading.Thread(target=work, name="windtunnel-diff", daemon=True)
    thread.start()
    try:
        while (item := handed.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield from item
    finally:
        abandoned.set()
        with suppress(Empty):
            while True:
                handed.get_nowait()
        thread.join()


# ------------------------------------------------------------------ recorded runs


@dataclass(frozen=True, eq=False, slots=True)
class Recording:
    """A recorded run of an engine, ready to be compared with a simulation of it."""

    name: str
    config: SchedulerConfig | None
    """The limits that it ran with; None if the recording does not tell them all."""
    workload: Workload | None
    """Its own requests, each at the decision that first saw it; None if it does not tell who they are."""
    decisions: tuple[Decision, ...]
    steps_ns: tuple[int, ...]
    """How long each step lasted, so that the next decision comes when it came."""
    is_whole: bool = True
    """Whether it goes on until every request is served, as far as it tells."""
    notes: tuple[str, ...] = ()

    def executor(self) -> Executor:
        """An executor whose steps last as recorded; beyond the recording each lasts as long as its last one."""
        return _RecordedTimes(self.steps_ns)


class _RecordedTimes:
    def __init__(self, steps_ns: Sequence[int]) -> None:
        self._steps_ns = steps_ns
        self._number = 0

    def execute(self, plan: StepPlan) -> StepResult:  # noqa: ARG002
        number = min(self._number, len(self._steps_ns) - 1)
        self._number += 1
        return StepResult(self._steps_ns[number])


def read_recording(path: str | Path) -> Recording:
    """A recorded run: the folder of a live run, or a file of the recorder (``executor.vllm_plugin``).

    Recordings with requests (a live run's ``sched.jsonl.gz``, a recorder with ``detail``) are compared request by
    request and bring their own workload; others by the shape of each step, and need the workload from elsewhere.

    Raises FileNotFoundError if there is none, ValueError, with file and line, for what cannot be read or holds
    no steps.
    """
    path = Path(path)
    steps = read_recorded_steps(path)
    if not steps.num_steps:
        raise ValueError(f"{path}: there are no steps in it: record the engine while it serves requests")
    config = _live_config(path) if path.is_dir() else _header_config(steps.header)
    lines = _live_lines(path, steps) if path.is_dir() else _detail_lines(path, steps)
    if lines is None:
        notes = ("the recording does not name its requests, so steps are compared by their shape", *steps.notes)
        return Recording(path.name, config, None, _shapes(steps, config), _step_times(steps), notes=notes)
    return _with_requests(path, steps, config, lines)


def _live_config(folder: Path) -> SchedulerConfig | None:
    path = folder.parent / "engine_config.json"
    return read_engine_config(path) if path.exists() else None


_HEADER_SETTINGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "num_gpu_blocks",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "long_prefill_token_threshold",
    "policy",
    "watermark",
    "scheduler_reserve_full_isl",
    "async_scheduling",
    "pipeline_parallel_size",
)


def _header_config(header: Mapping[str, Any]) -> SchedulerConfig | None:
    """The limits in a recorder's header; None if it lacks the pool, or if the engine speculated."""
    given = {name: header[name] for name in _HEADER_SETTINGS if header.get(name) is not None}
    if "num_gpu_blocks" not in given or "block_size" not in given or header.get("num_speculative_tokens"):
        return None
    return SchedulerConfig(**given)


def _shapes(steps: RecordedSteps, config: SchedulerConfig | None) -> tuple[Decision, ...]:
    columns = {name: column.tolist() for name, column in steps.columns.items()}
    decisions = []
    for row in range(steps.num_steps):
        shape = StepShape(*(columns[name][row] for name in StepShape._fields))
        free, preempted = columns["num_free_blocks"][row], columns["num_preempted"][row]
        held = None if config is None or free == UNKNOWN else config.num_usable_blocks - free
        decisions.append(
            Decision(
                number=row,
                time_ns=round(columns["begin_s"][row] * NS_PER_S),
                num_preempted=None if preempted == UNKNOWN else preempted,
                batch=Batch.of(shape),
                shape=shape,
                num_running=columns["num_running"][row],
                num_held_blocks=held,
            )
        )
    return tuple(decisions)


def _begins_ns(steps: RecordedSteps) -> NDArray[np.int64]:
    begins: NDArray[np.int64] = np.rint(steps.columns["begin_s"] * NS_PER_S).astype(np.int64)
    return begins


def _own_ends_ns(steps: RecordedSteps) -> NDArray[np.int64]:
    """When each step's tokens were booked; one that was decided ahead runs once the one before it is over."""
    columns = steps.columns
    decided_s = (columns["begin_s"] + columns["schedule_s"]).tolist()
    ends_s, end_s = [], 0.0
    for decided, step_s in zip(decided_s, columns["step_s"].tolist(), strict=True):
        end_s = max(decided, end_s) + step_s
        ends_s.append(end_s)
    ends: NDArray[np.int64] = np.rint((np.array(ends_s) + columns["update_s"]) * NS_PER_S).astype(np.int64)
    return ends


def _step_times(steps: RecordedSteps) -> tuple[int, ...]:
    """From each decision to the next one."""
    begins_ns = _begins_ns(steps)
    last_ns = max(int(_own_ends_ns(steps)[-1] - begins_ns[-1]), 1)
    return (*np.diff(begins_ns).clip(min=1).tolist(), last_ns)


# ------------------------------------------------------------------ recordings that name their requests


class _Line(NamedTuple):
    """A decision as it was recorded."""

    number: int
    computed: list[tuple[str, int, int]]
    """(request, tokens, computed before) in the order of the decision."""
    preempted: list[str]


class _Lines(NamedTuple):
    decisions: list[_Line]
    """Those that compute something."""
    added: dict[str, tuple[int, int]]
    """(when the engine queued it, ns after the first decision, tokens of its prompt) by request, in that order."""


def _live_lines(folder: Path, steps: RecordedSteps) -> _Lines:
    path = folder / "sched.jsonl.gz"
    decisions: list[_Line] = []
    added: dict[str, tuple[int, int]] = {}
    pending: list[str] = []
    first_s = _first_time_s(folder / "steps.csv")
    for given in _objects(path, _gzip_text(path)):
        if "det" in given:
            pending += [each[0] for each in given["pre"]]
            if given["det"]:
                decisions.append(_Line(given["i"], [tuple(each) for each in given["det"]], pending))
                pending = []
        elif given.get("ev") == "add":
            added[given["id"]] = (round((given["t"] - first_s) * NS_PER_S), given["prompt"])
    if [line.number for line in decisions] != steps.columns["step"].tolist():
        raise ValueError(f"{folder}: steps.csv and sched.jsonl.gz have different steps: they are of different runs")
    return _Lines(decisions, added)


def _first_time_s(path: Path) -> float:
    import csv

    with path.open(encoding="utf-8", newline="") as file:
        return float(next(csv.DictReader(file))["t"])


def _detail_lines(path: Path, steps: RecordedSteps) -> _Lines | None:
    """The requests in a file of the recorder; None if it was written without them."""
    text = _gzip_text(path) if path.suffix == ".gz" else path.read_text(encoding="utf-8", errors="replace")
    decisions: list[_Line] = []
    added: dict[str, tuple[int, int]] = {}
    first_ns: int | None = None
    for given in islice(_objects(path, text, is_cut=True), 1, steps.num_steps + 1):
        if "requests" not in given or "step" not in given:
            return None
        first_ns = given["schedule_begin_ns"] if first_ns is None else first_ns
        decisions.append(_Line(given["step"], [tuple(each) for each in given["requests"]], given["preempted"]))
        added |= {request: (added_ns - first_ns, num) for request, num, _, added_ns in given["added"]}
    return _Lines(decisions, added)


def _gzip_text(path: Path) -> str:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from error


def _objects(path: Path, text: str, *, is_cut: bool = False) -> Iterator[dict[str, Any]]:
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError:
            if is_cut and number == len(lines):
                return
            raise ValueError(f"{path}, line {number}: not an object of JSON") from None


def _with_requests(path: Path, steps: RecordedSteps, config: SchedulerConfig | None, lines: _Lines) -> Recording:
    labels = sorted(lines.added, key=lambda label: lines.added[label][0])
    rows = {label: row for row, label in enumerate(labels)}
    for line in lines.decisions:
        strangers = [label for label, *_ in line.computed if label not in rows]
        if strangers:
            raise ValueError(
                f"{path}: step {line.number} computes request {strangers[0]!r}, of which it is not recorded when it "
                "was queued: record from the engine's first request on"
            )
    begins_ns = _begins_ns(steps)
    history = _History.of(lines, rows, begins_ns)
    depth = 1 if config is None else config.max_steps_under_way
    arrival_ns = begins_ns[np.minimum(history.seen_by, len(begins_ns) - 1)]
    num_unserved = int((history.num_outputs < 1).sum())
    notes = list(steps.notes)
    if num_unserved:
        notes.append(f"{num_unserved} requests got no token while it was recorded: it is compared as far as it goes")
    requests = workload(
        arrival_ns,
        np.array([lines.added[label][1] for label in labels]),
        np.maximum(history.num_outputs, 1),
        labels=tuple(labels),
        source=path.name,
    )
    base = _shapes(steps, config)
    decisions = tuple(
        each._replace(**told) for each, told in zip(base, history.decisions(lines, rows, config), strict=True)
    )
    steps_ns = history.steps_ns(steps, depth)
    return Recording(path.name, config, requests, decisions, steps_ns, not num_unserved, tuple(notes))


class _History(NamedTuple):
    """What follows from the decisions about each request, by its row."""

    seen_by: NDArray[np.int64]
    """The first decision that could see it."""
    num_outputs: NDArray[np.int64]
    last_step: NDArray[np.int64]
    """The step that made its last token; beyond the last step for those that got none."""

    @classmethod
    def of(cls, lines: _Lines, rows: Mapping[str, int], begins_ns: NDArray[np.int64]) -> _History:
        """A step yields a token of a request when it has then computed all the tokens that are known of it."""
        added_ns = np.array([lines.added[label][0] for label in rows], np.int64)
        known = [lines.added[label][1] for label in rows]
        prompts = list(known)
        last = [len(lines.decisions)] * len(known)
        for step, line in enumerate(lines.decisions):
            for label, num_tokens, before in line.computed:
                row = rows[label]
                if before + num_tokens >= known[row]:
                    known[row] += 1
                    last[row] = step
        first = _first_steps(lines, rows)
        seen_by = np.minimum(np.searchsorted(begins_ns, added_ns), first)
        outputs = np.array(known, np.int64) - np.array(prompts, np.int64)
        return cls(np.maximum.accumulate(seen_by), outputs, np.array(last, np.int64))

    def steps_ns(self, steps: RecordedSteps, depth: int) -> tuple[int, ...]:
        """How long steps last in a simulation that is to decide at the recorded instants.

        A step ends with the decision that waited for it, or, if nobody was left to decide for, at its own end.
        """
        begins_ns, own_ends_ns = _begins_ns(steps), _own_ends_ns(steps)
        num_steps = len(begins_ns)
        at = np.arange(num_steps)
        made_meanwhile = np.minimum(at + depth, np.maximum(np.searchsorted(begins_ns, own_ends_ns), at + 1))
        num_left = np.searchsorted(self.seen_by, made_meanwhile)  # those that come later found the engine empty
        num_left -= np.searchsorted(np.sort(self.last_step), at + depth)  # less those with nothing more to schedule
        durations, end_ns = [], 0
        begins, own_ends = begins_ns.tolist(), own_ends_ns.tolist()
        for step, begin_ns in enumerate(begins):
            start_ns = max(begin_ns, end_ns)
            follows = step + depth < num_steps
            end_ns = begins[step + depth] if follows else own_ends[step]
            if follows and num_left[step] <= 0:
                end_ns = min(end_ns, own_ends[step])
            end_ns = max(end_ns, start_ns + 1)
            durations.append(end_ns - start_ns)
        return tuple(durations)

    def decisions(
        self, lines: _Lines, rows: Mapping[str, int], config: SchedulerConfig | None
    ) -> Iterator[dict[str, Any]]:
        """What is known of each decision because its requests are: tokens, admissions, preemptions, the queue before.

        The queue is that of first come, first served, in which preempted requests go to the front.
        """
        queue = _RecordedQueue(config)
        num_seen = 0
        for step, line in enumerate(lines.decisions):
            while num_seen < len(self.seen_by) and self.seen_by[num_seen] <= step:
                queue.waiting.append(num_seen)
                num_seen += 1
            before = queue.state()
            preempted = [rows[label] for label in line.preempted]
            queue.put_back(preempted)
            computed = [(rows[label], num_tokens, cached) for label, num_tokens, cached in line.computed]
            admitted = tuple((row, cached) for row, _, cached in computed if row not in queue.running)
            for row, num_tokens, cached in computed:
                queue.compute(row, cached + num_tokens)
            for row, _, _ in computed:
                if self.last_step[row] == step:
                    queue.running.pop(row, None)
            yield {
                "tokens": tuple((row, num_tokens) for row, num_tokens, _ in computed),
                "admitted": admitted,
                "preempted": tuple(sorted(preempted)),
                "num_preempted": len(preempted),
                "before": before,
            }


def _first_steps(lines: _Lines, rows: Mapping[str, int]) -> NDArray[np.int64]:
    first = np.full(len(rows), len(lines.decisions), np.int64)
    for step, line in reversed(list(enumerate(lines.decisions))):
        for label, *_ in line.computed:
            first[rows[label]] = step
    return first


class _RecordedQueue:
    """Who runs and who waits, rebuilt from the decisions."""

    def __init__(self, config: SchedulerConfig | None) -> None:
        self.running: dict[int, int] = {}  # computed tokens by row, in the order of admission
        self.waiting: list[int] = []
        self._config = None if config is None or config.enable_prefix_caching else config

    def state(self) -> QueueState:
        """The queue now; blocks follow from the tokens where none of them can be shared."""
        config, num_free = self._config, None
        if config is None:
            running = tuple(Progress(row, computed, None) for row, computed in self.running.items())
        else:
            size = config.block_size
            running = tuple(Progress(row, computed, -(-computed // size)) for row, computed in self.running.items())
            num_free = config.num_usable_blocks - sum(each.num_blocks or 0 for each in running)
        return QueueState(running, tuple(self.waiting[:MOST_WAITING_KEPT]), len(self.waiting), num_free)

    def put_back(self, preempted: Iterable[int]) -> None:
        lost = set(preempted)
        self.waiting[:0] = [row for row in self.running if row in lost]
        for row in lost:
            self.running.pop(row, None)

    def compute(self, row: int, num_computed: int) -> None:
        if row not in self.running and row in self.waiting:
            self.waiting.remove(row)
        self.running[row] = num_computed


# ------------------------------------------------------------------ saved runs


def saved_decisions(records: ReplicaRecords) -> Iterator[Decision]:
    """The decisions of a run that was saved, as far as its tables tell: numbers of each batch, and who was preempted.

    The preemptions of decisions that computed nothing belong to the step after them.
    """
    steps, preemptions = records.steps, records.preemptions
    preempted: dict[int, list[int]] = {}
    for step, request in zip(preemptions.step.tolist(), preemptions.request.tolist(), strict=True):
        preempted.setdefault(step, []).append(request)
    columns = [getattr(steps, name).tolist() for name in Batch._fields]
    others = (steps.start_ns.tolist(), steps.num_running.tolist(), steps.num_free_blocks.tolist())
    rows = zip(zip(*columns, strict=True), *others, strict=True)
    for number, (batch, start_ns, num_running, num_free) in enumerate(rows):
        lost = tuple(sorted(preempted.get(number, ())))
        yield Decision(
            number=number,
            time_ns=start_ns,
            preempted=lost,
            num_preempted=len(lost),
            batch=Batch(*batch),
            num_running=num_running,
            num_held_blocks=records.num_usable_blocks - num_free,
        )
