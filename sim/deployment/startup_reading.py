"""Collects what the lines of one container say, one start-up after another."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from windtunnel.sim.deployment.python_values import list_items, literal
from windtunnel.sim.deployment.startup_facts import Serving, StartupError
from windtunnel.sim.deployment.startup_formats import (
    ERROR_RULES,
    HYBRID_HINTS,
    PHASES,
    RANK_RULES,
    RUN_RULES,
    Rule,
    Value,
    make_rule,
    rule_lines,
    values_of,
)
from windtunnel.sim.deployment.startup_lines import Process, has_digit, process_before


class Seen(NamedTuple):
    """A value with its line, the process that wrote it, and how exactly it is given."""

    value: Any
    line: int
    process: Process
    decimals: int


SeenFacts = dict[str, list[Seen]]


class StartupRun:
    """Collects what the lines of one container say, and starts anew with each start-up."""

    def __init__(self) -> None:
        self.num_startups = 0
        self.pids: dict[str, list[str]] = {}
        """By the name of a process, those that had it, in order; of all start-ups."""
        self._clear()

    def _clear(self) -> None:
        self.started_at = 0
        self.stage = 0
        self.stage_processes: set[str] = set()
        self.rank_facts: SeenFacts = {}
        self.run_facts: SeenFacts = {}
        self.args: dict[str, Any] = {}
        self.args_line = 0
        self.pools: list[Seen] = []
        self.engine_blocks: dict[str, tuple[int, int, int]] = {}
        self.hints: dict[str, None] = {}
        self.errors: dict[tuple[str, tuple[tuple[str, float], ...]], StartupError] = {}
        self.oom_kind = "out_of_memory_weights"
        self.ready_line = 0
        self.serving = _ServingLines()
        self.process_of_pid: dict[str, str] = {}
        self.notes: dict[str, None] = {}
        self.in_turns: tuple[int, str, str, str] | None = None
        """The line of a process whose successor wrote before it, the name of both, its pid and the successor's."""

    @property
    def has_facts(self) -> bool:
        """Whether any line was one of vLLM's."""
        return bool(self.stage or self.run_facts or self._has_served_or_failed())

    @property
    def started_line(self) -> int:
        """The line that first says that the server came up; 0 if none does."""
        return min((line for line in (self.ready_line, self.serving.first_line) if line), default=0)

    def _has_served_or_failed(self) -> bool:
        return bool(self.rank_facts or self.pools or self.serving.num_lines or self.errors or self.engine_blocks)

    def read(self, line: int, text: str) -> None:
        """Do what the line is for; most are for nothing."""
        matters = False
        for anchor, actions in line_actions():
            if anchor in text:
                matters = True
                for act in actions:
                    act(self, line, text)
        if matters:
            self._note_pid(line, process_before(text, len(text)))

    def _note_pid(self, line: int, process: Process) -> None:
        """A process has one name in its server: if two of one name write in turns, two servers share the log.

        (Workers of one name can be several in one server.  After a restart the former server writes no more.)
        """
        if not process.pid or not process.label.startswith(_ONE_PER_SERVER):
            return
        pids = self.pids.setdefault(process.label, [])
        if process.pid in pids[:-1]:
            self.in_turns = self.in_turns or (line, process.label, process.pid, pids[-1])
        elif process.pid not in pids:
            pids.append(process.pid)

    def begin_stage(self, stage: int, process: Process, line: int) -> None:
        """A start-up names its version, its arguments and its engine, in this order; what comes again begins anew.

        The engines of a data-parallel server each name theirs, under names of their own.
        """
        is_again = stage < self.stage or (stage == self.stage and process.label in self.stage_processes)
        if is_again or (not self.stage and self._has_served_or_failed()):
            num_startups = max(1, self.num_startups)
            self._clear()
            self.num_startups = num_startups
        if not self.stage:
            self.num_startups += 1
            self.started_at = line
        if stage != self.stage:
            self.stage_processes = set()
        self.stage = stage
        self.stage_processes.add(process.label)

    def see(self, facts: SeenFacts, value: Value, line: int, process: Process) -> None:
        """Keep a value."""
        facts.setdefault(value.name, []).append(Seen(value.value, line, process, value.decimals))
        if process.pid and has_digit(process.label):
            self.process_of_pid[process.pid] = process.label
        self.touch(line)

    def touch(self, line: int) -> None:
        """The start-up began here at the latest."""
        self.started_at = self.started_at or line


_ONE_PER_SERVER = ("APIServer", "EngineCore")
_Action = Callable[[StartupRun, int, str], None]


@cache
def line_actions() -> tuple[tuple[str, tuple[_Action, ...]], ...]:
    """What to do with a line that contains a text, in this order: a start-up begins before its figures are read."""
    actions: list[tuple[str, _Action]] = [(" version ", _mark_version)]
    actions += [("non-default args:", _read_args), ("args: Namespace(", _read_args), ("LLM engine", _read_engine)]
    actions += [(rule.anchor, _reads(rule, of_rank=True)) for rule in map(make_rule, rule_lines(RANK_RULES))]
    actions += [(rule.anchor, _reads(rule, of_rank=False)) for rule in map(make_rule, rule_lines(RUN_RULES))]
    for kind, _, template in (line.partition(": ") for line in rule_lines(ERROR_RULES)):
        rule = make_rule(template)
        actions.append((rule.anchor, _fails(kind, rule)))
    actions += [(anchor, _enters(kind)) for anchor, kind in PHASES.items()]
    actions += [(anchor, _hints(anchor)) for anchor in HYBRID_HINTS]
    actions += [("KV cache size:", _read_pool), ("num_gpu_blocks is: ", _read_engine_blocks)]
    actions += [("CUDA graph memory profiling", _read_estimate_applied), ("Application startup complete", _read_ready)]
    actions += [("Avg prompt throughput:", _read_serving), ("Prefix cache hit rate: GPU:", _read_v0_hit_rate)]
    actions += [("total_num_cumulative_preemption=", _read_v0_preemptions)]
    by_anchor: dict[str, list[_Action]] = {}
    for anchor, action in actions:
        by_anchor.setdefault(anchor, []).append(action)
    return tuple((anchor, tuple(acts)) for anchor, acts in by_anchor.items())


def _reads(rule: Rule, *, of_rank: bool) -> _Action:
    def act(run: StartupRun, line: int, text: str) -> None:
        match = rule.pattern.search(text)
        if match is None:
            return
        process = process_before(text, match.start())
        for value in values_of(match):
            run.see(run.rank_facts if of_rank else run.run_facts, value, line, process)
        if re.search(r"\d GB", match[0]):
            run.notes[f"line {line}: vLLM writes GB here but divides by 2**30: read as GiB"] = None

    return act


def _fails(kind: str, rule: Rule) -> _Action:
    def act(run: StartupRun, line: int, text: str) -> None:
        match = rule.pattern.search(text)
        if match is None:
            return
        numbers = {value.name: value.value for value in values_of(match)}
        known = run.oom_kind if kind == "out_of_memory" else kind
        error = StartupError(known, numbers, line, match[0][:500].strip())
        run.errors.setdefault((known, tuple(sorted(numbers.items()))), error)
        run.touch(line)

    return act


def _enters(oom_kind: str) -> _Action:
    def act(run: StartupRun, _line: int, _text: str) -> None:
        run.oom_kind = oom_kind

    return act


def _hints(hint: str) -> _Action:
    def act(run: StartupRun, _line: int, _text: str) -> None:
        run.hints[hint] = None

    return act


def _mark_version(run: StartupRun, line: int, text: str) -> None:
    match = re.search(r"vLLM (?:API )?server version|[█▄▀]\s+version\s", text)
    if match:
        run.begin_stage(1, process_before(text, match.start()), line)


def _read_args(run: StartupRun, line: int, text: str) -> None:
    match = re.search(r"non-default args: \{|args: Namespace\(", text)
    if match is None:
        return
    run.begin_stage(2, process_before(text, match.start()), line)
    for item in list_items(text[match.end() :]):
        key, separator, value = item.partition(":" if match[0].endswith("{") else "=")
        argument = key.strip().strip("'\"")
        if separator and argument.isidentifier():
            run.args[argument] = literal(value.strip())
    run.args_line = line


def _read_engine(run: StartupRun, line: int, text: str) -> None:
    match = re.search(
        r"Initializing an? (?:(V\d) )?LLM engine(?: \(v?([^)\s]{1,80})\))? with config: (.*)", text, re.DOTALL
    )
    if match is None:
        return
    process = process_before(text, match.start())
    run.begin_stage(3, process, line)
    engine, version, config = match.groups()
    settings = {"engine": engine or "V0", "vllm_version": version}
    for item in list_items(config):
        key, _, value = item.partition("=")
        if name := _CONFIG_FIELDS.get(key.strip()):
            settings[name] = literal(value.strip())
    for name, setting in settings.items():
        if fits_field(name, setting):
            run.see(run.run_facts, Value(name, setting, 0), line, process)


_CONFIG_FIELDS = {
    "model": "model",
    "max_seq_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "decode_context_parallel_size": "context_parallel_size",
    "enforce_eager": "enforce_eager",
    "kv_cache_dtype": "kv_cache_dtype",
    "enable_prefix_caching": "enable_prefix_caching",
}
_TEXTS = ("engine", "vllm_version", "model", "kv_cache_dtype")
_FLAGS = ("enforce_eager", "enable_prefix_caching")


def fits_field(name: str, value: object) -> bool:
    """Whether the value is of the field's type; a size or length below one stands for "auto"."""
    if name in _TEXTS:
        return isinstance(value, str)
    if name in _FLAGS:
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return name == "gpu_memory_utilization" or (isinstance(value, int) and value > 0)


def _read_pool(run: StartupRun, line: int, text: str) -> None:
    match = re.search(r"KV cache size: (\d[\d,]{0,17}) tokens", text)
    if match:
        process = process_before(text, match.start())
        run.pools.append(Seen(int(match[1].replace(",", "")), line, process, 99))
        run.touch(line)


def _read_engine_blocks(run: StartupRun, line: int, text: str) -> None:
    """By engine: number of engines that the count is the sum of (0: as many as there are such lines), count, line."""
    match = re.search(r"(?:(\d{1,5}) Engines|Engine (\d{1,5})): vllm .{1,80}num_gpu_blocks is: (\d{1,18})", text)
    if match:
        engines, engine, blocks = match.groups()
        run.engine_blocks[engine or "all"] = (int(engines or 0), int(blocks), line)
        run.touch(line)


def _read_estimate_applied(run: StartupRun, line: int, text: str) -> None:
    match = re.search(r"CUDA graph memory profiling (is enabled|is disabled|will be enabled)", text)
    if match:
        applied = Value("cudagraph_estimate_applied", match[1] == "is enabled", 0)
        run.see(run.run_facts, applied, line, process_before(text, match.start()))


def _read_ready(run: StartupRun, line: int, _text: str) -> None:
    run.ready_line = run.ready_line or line


class _ServingLines:
    """The periodic lines so far."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.first_line = 0
        self.last_line = 0
        self.max_running = 0
        self.max_waiting = 0
        self.max_usage: float | None = None
        self.preemptions = 0
        self.cumulative_preemptions = 0
        self.hit_rate: float | None = None

    def summary(self) -> Serving | None:
        if not self.num_lines:
            return None
        return Serving(
            num_lines=self.num_lines,
            first_line=self.first_line,
            last_line=self.last_line,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_kv_cache_usage_percent=self.max_usage,
            num_preemptions=max(self.preemptions, self.cumulative_preemptions),
            prefix_cache_hit_rate_percent=self.hit_rate,
        )


_PERIODIC = re.compile(r"Running: (\d{1,12}) reqs, (?:Swapped: \d{1,12} reqs, )?(?:Waiting|Pending): (\d{1,12}) reqs")
_USAGE = re.compile(r"KV cache usage: (\d{1,6}(?:\.\d{1,6})?)%")
_PREEMPTIONS = re.compile(r"Preemptions: (\d{1,12})")
_HIT_RATE = re.compile(r"Prefix cache hit rate: (?:GPU: )?(\d{1,6}(?:\.\d{1,6})?)%")


def _read_serving(run: StartupRun, line: int, text: str) -> None:
    counts = _PERIODIC.search(text)
    if counts is None:
        return
    serving = run.serving
    serving.num_lines += 1
    serving.first_line = serving.first_line or line
    serving.last_line = line
    serving.max_running = max(serving.max_running, int(counts[1]))
    serving.max_waiting = max(serving.max_waiting, int(counts[2]))
    if usage := _USAGE.search(text):
        serving.max_usage = max(serving.max_usage or 0.0, float(usage[1]))
    if preemptions := _PREEMPTIONS.search(text):
        serving.preemptions += int(preemptions[1])
    if hit_rate := _HIT_RATE.search(text):
        serving.hit_rate = float(hit_rate[1])
    run.oom_kind = "out_of_memory_serving"
    run.touch(line)


def _read_v0_hit_rate(run: StartupRun, _line: int, text: str) -> None:
    if hit_rate := _HIT_RATE.search(text):
        run.serving.hit_rate = float(hit_rate[1])


def _read_v0_preemptions(run: StartupRun, _line: int, text: str) -> None:
    if match := re.search(r"total_num_cumulative_preemption=(\d{1,12})", text):
        run.serving.cumulative_preemptions = max(run.serving.cumulative_preemptions, int(match[1]))
