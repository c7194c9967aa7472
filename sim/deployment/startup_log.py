"""What a real vLLM said of its memory: the lines of its start-up, the errors that ended one, and its periodic lines.

The texts are those of the releases 0.2.7, 0.4.2, 0.5.4, 0.6.3 to 0.6.6, 0.7.3, 0.8.5, 0.9.2, 0.10.2, 0.11.2, 0.12.0,
0.14.1, 0.16.0, 0.18.1, 0.19.1, 0.20.2, 0.21.0, 0.24.0, 0.26.0, 0.28.0 and 0.32.0 (``worker/worker.py``,
``v1/worker/gpu_worker.py``, ``v1/core/kv_cache_utils.py``, ``v1/metrics/loggers.py`` and their forerunners), both
engines.  ``docs/memory-truth.md`` shows an example of each.

vLLM writes sizes as GiB with two decimals.  Where an old release writes GB it has divided by 2**30 all the same, so GB
is read as GiB here and a note says so.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, NamedTuple

from windtunnel.sim.deployment.gpu import GIB

ERROR_KINDS = {
    "free_memory_below_desired": "less memory is free on the device than gpu_memory_utilization asks for",
    "no_available_memory": "nothing is left for the KV cache",
    "max_model_len_exceeds_kv_cache": "one request of max_model_len tokens does not fit into the KV cache",
    "auto_fit_failed": "not even one token fits into the KV cache",
    "mamba_blocks_exceeded": "max_num_seqs is larger than the number of state blocks",
    "out_of_memory_weights": "out of memory while the weights were loaded",
    "out_of_memory_profiling": "out of memory in the profile run",
    "out_of_memory_kv_cache": "out of memory after the KV cache was sized, before or without graph capture",
    "out_of_memory_graph_capture": "out of memory while CUDA graphs were captured",
    "out_of_memory_sampler_warmup": "out of memory when the sampler was warmed up with max_num_seqs requests",
    "out_of_memory_serving": "out of memory after the start-up",
    "memory_profiling_error": "another process freed memory while vLLM measured",
    "heads_not_divisible": "tensor_parallel_size does not divide the number of attention heads",
    "max_model_len_exceeds_model": "max_model_len is larger than the model's context",
    "budget_below_max_num_seqs": "max_num_batched_tokens is smaller than max_num_seqs",
    "budget_below_max_model_len": "without chunked prefill max_num_batched_tokens is smaller than max_model_len",
    "host_memory_below_desired": "less host memory is free than the CPU backend's KV cache needs",
    "engine_core_failed": "the engine did not start, and the text does not say why",
}
"""Kinds of error that are told apart, each with what it means."""


class StartupError(NamedTuple):
    """An error in the log: its kind (a key of ERROR_KINDS), the numbers it names and the line it is on."""

    kind: str
    numbers: Mapping[str, float]
    """By name, with units in the names (``needed_bytes``, ``estimated_max_model_len``); empty if it names none."""
    line: int
    text: str
    """The message as logged, at most 500 characters."""


class PoolLine(NamedTuple):
    """One "KV cache size" line; each engine of a data-parallel server writes its own, old releases one a worker."""

    process: str
    kv_cache_tokens: int
    line: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one process said of its device, in bytes; None is not in the log (most lines come from rank 0 only)."""

    process: str
    """As logged: ``Worker_TP0``, ``Worker_DP1_TP0``, ``VllmWorker rank=1``, ``EngineCore``; empty for a bare line."""
    total_memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    requested_memory_bytes: int | None = None
    weights_bytes: int | None = None
    non_torch_bytes: int | None = None
    consumed_bytes: int | None = None
    activation_bytes: int | None = None
    cudagraph_actual_bytes: int | None = None
    cudagraph_estimate_bytes: int | None = None
    available_kv_cache_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    """The periodic lines in short.  Peaks are over all engines and lines."""

    num_lines: int
    first_line: int
    last_line: int
    max_running: int
    max_waiting: int
    max_kv_cache_usage_percent: float | None
    num_preemptions: int
    """The sum of V1's counts per interval, or V0's last cumulative count (which it logs every 50th time)."""
    prefix_cache_hit_rate_percent: float | None
    """Of the last line that has it."""


@dataclass(frozen=True, slots=True)
class StartupFacts:
    """What the last start-up in a log says.  Sizes are bytes of one rank; None is not in the log.

    Of several ranks the one with the smallest KV cache is reported, since it decides the pool; ``ranks`` has them all.
    """

    name: str
    vllm_version: str | None = None
    engine: str | None = None
    """``V0`` or ``V1``."""
    model: str | None = None
    non_default_args: Mapping[str, Any] = field(default_factory=dict)
    """The ``non-default args`` or, to 0.9, ``Namespace``; enums and objects as text, what was cut off left out."""
    max_model_len: int | None = None
    """After auto-fit, where there is one."""
    auto_fit_max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    context_parallel_size: int | None = None
    """Decode (and prefill) context parallel ranks by which the logged tokens were multiplied."""
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool | None = None
    total_memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    """At start-up, before the weights are loaded."""
    requested_memory_bytes: int | None = None
    """gpu_memory_utilization of the total."""
    weights_bytes: int | None = None
    non_torch_bytes: int | None = None
    """As logged; from 0.28 on, which logs consumed memory instead, consumed less weights."""
    consumed_bytes: int | None = None
    """Weights and everything else that stays, as vLLM 0.28 and later log it."""
    activation_bytes: int | None = None
    """Peak of the profile run, without graphs (some releases add their estimate to the logged figure)."""
    cudagraph_actual_bytes: int | None = None
    cudagraph_estimate_bytes: int | None = None
    cudagraph_estimate_applied: bool | None = None
    """Whether the estimate was taken out of the KV cache (the default from 0.21 on)."""
    equivalent_gpu_memory_utilization: float | None = None
    """The one that gives the same KV cache without the estimate."""
    suggested_gpu_memory_utilization: float | None = None
    """The one that vLLM suggests to have the KV cache of before."""
    available_kv_cache_bytes: int | None = None
    """The minimum over the ranks in the log."""
    kv_cache_memory_bytes: int | None = None
    """``--kv-cache-memory-bytes``, which overrides gpu_memory_utilization."""
    suggested_kv_cache_memory_bytes: int | None = None
    """``--kv-cache-memory=N`` to fit into requested memory."""
    suggested_kv_cache_memory_limit_bytes: int | None = None
    """``--kv-cache-memory=N`` to use the device fully."""
    kv_cache_tokens: int | None = None
    """The minimum over ``pools``: the pool of one engine."""
    num_gpu_blocks: int | None = None
    """Of one engine, the null block included; the override where there is one."""
    profiled_num_gpu_blocks: int | None = None
    """What fits, where num_gpu_blocks_override replaced it."""
    num_cpu_blocks: int | None = None
    max_concurrency: float | None = None
    max_concurrency_tokens: int | None = None
    """The request length that max_concurrency is for."""
    is_hybrid: bool | None = None
    """True if a line speaks of several kinds of cache layers; never False, as no line says so."""
    hybrid_hints: tuple[str, ...] = ()
    started: bool = False
    """Whether the server came up."""
    errors: tuple[StartupError, ...] = ()
    serving: Serving | None = None
    ranks: tuple[RankMemory, ...] = ()
    pools: tuple[PoolLine, ...] = ()
    num_startups: int = 1
    notes: tuple[str, ...] = ()
    """What had to be chosen or assumed, in sentences."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """The line (from 1) that each field came from."""


def read_startup_log(text: str | Iterable[str], *, name: str) -> StartupFacts:
    """The facts of the last start-up in a log (text, or lines such as an open file); ``name`` is for messages.

    Colours, time stamps, process and container prefixes, CRLF, and JSON lines with the message in ``log``, ``message``
    and the like are understood.  Of several containers in one log the one that started last is read.

    Raises ValueError if no line is one of vLLM's.
    """
    runs: dict[str, _Run] = {}
    for line, container, message in _messages(text):
        run = runs.get(container)
        if run is None:
            run = runs[container] = _Run()
        run.read(line, message)
    runs = {container: run for container, run in runs.items() if run.has_facts}
    if not runs:
        raise ValueError(
            f"{name}: no line of vLLM's start-up in it; looked for texts such as 'Initializing a V1 LLM engine', "
            "'non-default args:', 'Available KV cache memory:', 'GPU KV cache size:', '# GPU blocks:', "
            "'Avg prompt throughput:' and vLLM's memory errors. Give the server's output from its first line on"
        )
    container = max(runs, key=lambda key: runs[key].started_at)
    facts = _Summary(runs[container]).facts(name)
    if len(runs) == 1:
        return facts
    note = f"{len(runs)} containers write to this log; read is {container or 'the one without a name'}"
    return replace(facts, notes=(note, *facts.notes))


def check(facts: StartupFacts) -> list[str]:
    """Sentences that say where a log contradicts itself by more than rounding allows; empty if it does not."""
    found = [*_check_pool(facts), *_check_concurrency(facts), *_check_graphs(facts), *_check_errors(facts)]
    for rank in facts.ranks:
        found += [*_check_requested(facts, rank), *_check_parts(facts, rank)]
    return found


# Lines.

_ANSI = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])"  # as sent to a terminal
    r"|(?:\^\[|#033|\\x1b|\\u001b|\\033)?\[\d{1,3}(?:;\d{1,3})*m"  # with the escape lost or spelled out
)
_CONTAINER = re.compile(r"\[pod/([^\]\s]{1,200})\] |([A-Za-z0-9][\w.-]{0,100}) +\| ")
_MESSAGE_KEYS = ("log", "message", "msg", "textPayload", "jsonPayload", "MESSAGE", "line", "body", "_raw")


def _messages(text: str | Iterable[str]) -> Iterator[tuple[int, str, str]]:
    """Line number, container and message of each line; one JSON line may hold several messages."""
    lines = (text,) if isinstance(text, str) else text
    number = 0
    for chunk in lines:
        for line in chunk.removesuffix("\n").split("\n"):
            number += 1
            plain = _plain(line)
            prefix = _CONTAINER.match(plain)
            container = (prefix[1] or prefix[2]) if prefix else ""
            for message in _unwrapped(plain[prefix.end() :] if prefix else plain):
                yield number, container, message


def _plain(line: str) -> str:
    if "[" in line:
        line = _ANSI.sub("", line)
    return line.replace("\r", " ")


def _unwrapped(line: str, depth: int = 0) -> Iterator[str]:
    start = line.find('{"')
    if start < 0 or depth > 3 or not line.rstrip().endswith("}"):
        yield line
        return
    try:
        record = json.loads(line[start:])
    except (ValueError, RecursionError):
        record = None
    message = _message_of(record)
    if message is None:
        yield line
        return
    for part in message.split("\n"):
        yield from _unwrapped(line[:start] + _process_of(record) + _plain(part), depth + 1)


def _message_of(record: object) -> str | None:
    if not isinstance(record, dict):
        return None
    for key in _MESSAGE_KEYS:
        value = record.get(key)
        if isinstance(value, dict):
            value = value.get("message")
        if isinstance(value, str):
            return value
    return None


def _process_of(record: Mapping[str, Any]) -> str:
    """The process that vLLM's own JSON logging names in fields of their own, as it prefixes other lines."""
    process = record.get("vllm_process_name") or record.get("processName")
    if not isinstance(process, str) or not process.isidentifier() or process == "MainProcess":
        return ""
    return f"({process} pid={record.get('process', 0)}) "


_PROCESS = re.compile(
    r"\(([A-Za-z]\w{0,60})(?: (rank=\d{1,6}))? pid=(\d{1,10})(?:, ip=[^)]{1,60})?\)|\[(rank\d{1,6})\]:"
)


def _process_before(text: str, end: int) -> _Process:
    """The last process prefix before a message; a progress bar without line end may stand before it."""
    prefixes = list(_PROCESS.finditer(text, 0, end))
    if not prefixes:
        return _Process("", "")
    name, rank, pid, torch_rank = prefixes[-1].groups()
    if torch_rank:
        return _Process(torch_rank, "")
    return _Process(f"{name} {rank}" if rank else name, pid)


def _has_digit(label: str) -> bool:
    return any(character.isdigit() for character in label)


# What the lines look like.  «…» is text that a line must contain, {field:kind} a value; a rule that starts with blanks
# continues the one before it.

_NUMBER = r"-?\d[\d,]{0,15}(?:\.\d{1,12})?"
_KINDS = {
    "gib": _NUMBER,
    "float": _NUMBER,
    "int": r"\d[\d,]{0,17}",
    "size": rf"{_NUMBER} ?(?:[KMG]iB|[KMG]B|bytes)",
    "word": r"[^\s,'\"]{1,300}",
}
_UNITS = {"K": 2**10, "M": 2**20, "G": GIB}

_RANK_RULES = r"""
«total_gpu_memory (»{total_memory_bytes:gib}GiB\)
«x gpu_memory_utilization (»{rounded_utilization:float}\)
«x gpu_memory_utilization (»\S+\) = {requested_memory_bytes:gib}GiB
«model weights take» {weights_bytes:gib}GiB
«non_torch_memory takes» {non_torch_bytes:gib}GiB
«activation peak memory takes» {activation_bytes:gib}GiB
«reserved for KV Cache is» {available_kv_cache_bytes:gib}GiB
«Memory profiling results:».*?total_gpu_memory={total_memory_bytes:gib}GiB
«Memory profiling results:».*?peak_torch_memory={peak_torch_bytes:gib}GiB
«Memory profiling results:».*?non_torch_memory={non_torch_bytes:gib}GiB
«Memory profiling results:».*?kv_cache_size={available_kv_cache_bytes:gib}GiB
«Memory profiling results:».*?gpu_memory_utilization={rounded_utilization:float}
«Loading model weights took» {weights_bytes:gib} Gi?B
«Model loading took» {weights_bytes:gib} Gi?B
«Graph capturing finished» in \S+ secs, took {cudagraph_actual_bytes:gib} GiB
«Available KV cache memory:» {available_kv_cache_bytes:gib} GiB
«Free memory on device» (?:\S+ )?\({free_memory_bytes:gib}/{total_memory_bytes:gib} GiB\)
«esired GPU memory utilization» (?:is )?\({exact_utilization:float}, {requested_memory_bytes:gib} GiB\)
«Actual usage is» {weights_bytes:gib} GiB for weight
«Actual usage is» {consumed_bytes:gib} GiB for consumed memory
{logged_activation_bytes:gib} «GiB for peak activation»
{non_torch_bytes:gib} «GiB for non-torch memory»
{cudagraph_actual_bytes:gib} «GiB for CUDAGraph memory»
«--kv-cache-memory=»{suggested_kv_cache_memory_bytes:int}`(?: \([^)]+\))? to fit
«--kv-cache-memory=»{suggested_kv_cache_memory_limit_bytes:int}`(?: \([^)]+\))? to fully
«kv cache memory in use is» {available_kv_cache_bytes:size}
«CUDA graph pool memory:» {cudagraph_actual_bytes:gib} GiB \(actual\)
«CUDA graph pool memory:».*? {cudagraph_estimate_bytes:gib} GiB \(estimated\)
«Estimated CUDA graph memory:» {cudagraph_estimate_bytes:gib} GiB total
--gpu-memory-utilization={printed_utilization:float} is «equivalent to»
«equivalent to» (?:--gpu-memory-utilization=)?{equivalent_gpu_memory_utilization:float}
«equivalent to».*?increase (?:--gpu-memory-utilization )?to {suggested_gpu_memory_utilization:float}
«--gpu-memory-utilization from» {printed_utilization:float} to {suggested_gpu_memory_utilization:float}
Initial free memory {free_memory_bytes:gib} ?GiB, «reserved» {available_kv_cache_bytes:gib} ?GiB memory for KV Cache
«reserved» {kv_cache_memory_bytes:gib} ?GiB memory for KV Cache as specified
«worker requested memory:» {requested_memory_bytes:gib}GiB
«init memory snapshot:».*?free_memory={free_memory_bytes:gib}GiB
«init memory snapshot:».*?total_memory={total_memory_bytes:gib}GiB
«Initial free memory:» {free_memory_bytes:gib} GiB
«Initial free memory:».*?equested (?:GPU )?memory: (?:\S+ \(util\), )?{requested_memory_bytes:gib} GiB
«Total non KV cache memory:».*?torch peak memory increase: {activation_bytes:gib}GiB
«Total non KV cache memory:».*?non-torch forward increase memory: {non_torch_bytes:gib}GiB
«Total non KV cache memory:».*?total consumed \(from mem_get_info\): {consumed_bytes:gib}GiB
«Total non KV cache memory:».*?weights memory: {weights_bytes:gib}GiB
Explicitly set \({kv_cache_memory_bytes:gib}/\S+\) GiB «for KV cache on node»
(?:Explicitly|Auto) set \({available_kv_cache_bytes:gib}/{total_memory_bytes:gib}\) GiB «for KV cache on node»
«for KV cache on node».*?with {requested_memory_bytes:gib} GiB requested memory
«for KV cache on node».*?worker\. {consumed_bytes:gib} GiB memory was consumed
"""
"""What a worker writes of its device: V0, both engines, V1, V1 at level DEBUG, V1 on CPUs."""

_RUN_RULES = r"""
vLLM (?:API )?«server version» v?{vllm_version:word}
vLLM «server version» \S+, serving model {model:word}
[█▄▀]\s*« version »\s*{vllm_version:word}
[█▄▀]\s*« model »\s*{model:word}
«Starting to load model» {model:word}\.\.\.
«Using max model len» {max_model_len:int}
«hunked prefill is enabled» with max_num_batched_tokens={max_num_batched_tokens:int}
«Defaulting max_num_batched_tokens to» {max_num_batched_tokens:int} for
«Defaulting max_num_seqs to» {max_num_seqs:int} for
«Auto-fit max_model_len:» reduced from \d+ to {max_model_len:int} to fit
«Auto-fit max_model_len:» reduced from \d+ to {auto_fit_max_model_len:int} to fit
«Auto-fit max_model_len:» full model context length {auto_fit_max_model_len:int} fits
# (?!CPU )\w+« blocks: »{num_gpu_blocks:int}
« blocks: ».*?# CPU blocks: {num_cpu_blocks:int}
«Overriding num_gpu_blocks=»{profiled_num_gpu_blocks:int} with
«with num_gpu_blocks_override=»{override_num_gpu_blocks:int}
«Mamba cache blocks (»{state_blocks:int}
«Maximum concurrency for» {max_concurrency_tokens:int} tokens per request: {max_concurrency:float}x
«Setting attention block size to» {block_size:int} tokens
«the GPU KV cache size by» the (?:dcp|cp)_world_size {context_parallel_size:int}
"""
"""What one process writes for all."""

_ERROR_RULES = r"""
free_memory_below_desired: Free memory on device (?:\S+ )?\({free_bytes:gib}/{total_bytes:gib} GiB\)
  «on startup is less than» .*?\({gpu_memory_utilization:float}, {requested_bytes:gib} GiB\)
no_available_memory: «No available memory for the cache blocks».*
max_model_len_exceeds_kv_cache: max seq len \({max_model_len:int}\),? \(?{needed_bytes:gib} Gi?B «KV cache is needed»,
  which is larger than the available KV cache memory \({available_bytes:gib} Gi?B\)(?:.*?estimated maximum model
  length is {estimated_max_model_len:int})?
max_model_len_exceeds_kv_cache: max seq len \({max_model_len:int}\) is larger than the maximum number of tokens that
  «can be stored in KV cache» \({kv_cache_tokens:int}\)
auto_fit_failed: «Cannot auto-fit max_model_len».*
mamba_blocks_exceeded: max_num_seqs \({max_num_seqs:int}\) «exceeds available Mamba cache» blocks
  \({num_gpu_blocks:int}\)
out_of_memory_sampler_warmup: «out of memory occurred when warming up» \w+ with (?:{num_requests:int} dummy requests)?.*
out_of_memory_weights: «Failed to load model - not enough GPU memory».*
out_of_memory: «out of memory. Tried to allocate» {tried_bytes:size}\.(?: GPU \d+ has a total capacity of
  {total_bytes:size} of which {free_bytes:size} is free)?
memory_profiling_error: «Error in memory profiling»\.(?: Initial free memory {initial_free_bytes:gib} GiB, current free
  memory {current_free_bytes:gib} GiB)?
heads_not_divisible: attention heads \({num_attention_heads:int}\) must be «divisible by tensor parallel size»
  \({tensor_parallel_size:int}\)
max_model_len_exceeds_model: max_model_len \({max_model_len:int}\) is «greater than the derived max_model_len»
  \([^=)]*={derived_max_model_len:float}
budget_below_max_num_seqs: max_num_batched_tokens \({max_num_batched_tokens:int}\) must be greater
  «than or equal to max_num_seqs» \({max_num_seqs:int}\)
budget_below_max_model_len: max_num_batched_tokens \({max_num_batched_tokens:int}\) «is smaller than max_model_len»
  \({max_model_len:int}\)
host_memory_below_desired: memory on node \d+ \({free_bytes:gib}/{total_bytes:gib} GiB\)
  «on kv cache allocation is less» than requested memory for kv \({requested_bytes:gib}
engine_core_failed: «Engine core initialization failed».*
engine_core_failed: «EngineCore failed to start».*
"""
_HYBRID_HINTS = (
    "attention page size is >= mamba page size",
    "Padding mamba page size",
    "Mamba cache blocks",
    "Hybrid or mamba-based model detected",
    "kv cache group sizes",
    "padding layers, may waste at most",
    "for hybrid models",
    "for this hybrid model",
)
_PHASES = {
    "Starting to load model": "out_of_memory_weights",
    "Model loading took": "out_of_memory_profiling",
    "Loading model weights took": "out_of_memory_profiling",
    "KV cache size:": "out_of_memory_kv_cache",
    " blocks: ": "out_of_memory_kv_cache",
    "apturing cudagraphs for decoding": "out_of_memory_graph_capture",
    "Capturing CUDA graph": "out_of_memory_graph_capture",
    "Graph capturing finished": "out_of_memory_kv_cache",
    "Application startup complete": "out_of_memory_serving",
}
"""What an out-of-memory error means after each of these."""


class _Rule(NamedTuple):
    anchor: str
    pattern: re.Pattern[str]


def _lines(grammar: str) -> list[str]:
    return grammar.replace("\n  ", " ").strip("\n").split("\n")


def _rule(line: str) -> _Rule:
    before, _, rest = line.partition("«")
    anchor, _, after = rest.partition("»")
    template = f"{before}{re.escape(anchor)}{after}"
    return _Rule(anchor, re.compile(re.sub(r"\{(\w+):(\w+)\}", _group, template)))


def _group(part: re.Match[str]) -> str:
    return f"(?P<{part[1]}__{part[2]}>{_KINDS[part[2]]})"


class _Value(NamedTuple):
    name: str
    value: Any
    decimals: int
    """How exactly it is given; whole bytes are exact."""


def _values(match: re.Match[str]) -> Iterator[_Value]:
    for key, text in match.groupdict().items():
        if text is not None:
            name, _, kind = key.rpartition("__")
            yield _value(name, kind, text)


def _value(name: str, kind: str, text: str) -> _Value:
    if kind == "word":
        return _Value(name, text, 0)
    number = text.replace(",", "")
    if kind == "int":
        return _Value(name, int(number), 99)
    if kind == "size":
        return _size(name, number)
    decimals = max(2, len(number.partition(".")[2]))  # releases that round to two decimals drop zeros at the end
    return _Value(name, round(float(number) * GIB) if kind == "gib" else float(number), decimals)


def _size(name: str, text: str) -> _Value:
    unit = text.lstrip("-0123456789.").strip()
    number = text[: len(text) - len(unit)].strip()
    if unit == "bytes":
        return _Value(name, round(float(number)), 99)
    return _Value(name, round(float(number) * _UNITS[unit[0]]), 2)


# One start-up after another.


class _Process(NamedTuple):
    label: str
    pid: str


class _Seen(NamedTuple):
    value: Any
    line: int
    process: _Process
    decimals: int


_Facts = dict[str, list[_Seen]]


class _Run:
    """Collects what the lines of one container say, and starts anew with each start-up."""

    def __init__(self) -> None:
        self.num_startups = 0
        self._clear()

    def _clear(self) -> None:
        self.started_at = 0
        self.stage = 0
        self.stage_processes: set[str] = set()
        self.rank_facts: _Facts = {}
        self.run_facts: _Facts = {}
        self.args: dict[str, Any] = {}
        self.args_line = 0
        self.pools: list[_Seen] = []
        self.engine_blocks: dict[str, tuple[int, int, int]] = {}
        self.hints: dict[str, None] = {}
        self.errors: dict[tuple[str, tuple[tuple[str, float], ...]], StartupError] = {}
        self.oom_kind = "out_of_memory_weights"
        self.started = False
        self.serving = _ServingLines()
        self.process_of_pid: dict[str, str] = {}
        self.notes: dict[str, None] = {}

    @property
    def has_facts(self) -> bool:
        return bool(self.stage or self.run_facts or self._has_served_or_failed())

    def _has_served_or_failed(self) -> bool:
        return bool(self.rank_facts or self.pools or self.serving.num_lines or self.errors or self.engine_blocks)

    def read(self, line: int, text: str) -> None:
        for anchor, actions in _actions():
            if anchor in text:
                for act in actions:
                    act(self, line, text)

    def begin_stage(self, stage: int, process: _Process, line: int) -> None:
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

    def see(self, facts: _Facts, value: _Value, line: int, process: _Process) -> None:
        facts.setdefault(value.name, []).append(_Seen(value.value, line, process, value.decimals))
        if process.pid and _has_digit(process.label):
            self.process_of_pid[process.pid] = process.label
        self.touch(line)

    def touch(self, line: int) -> None:
        self.started_at = self.started_at or line


_Action = Callable[[_Run, int, str], None]


@cache
def _actions() -> tuple[tuple[str, tuple[_Action, ...]], ...]:
    """What to do with a line that contains a text, in this order: a start-up begins before its figures are read."""
    actions: list[tuple[str, _Action]] = [(" version ", _mark_version)]
    actions += [("non-default args:", _read_args), ("args: Namespace(", _read_args), ("LLM engine", _read_engine)]
    actions += [(rule.anchor, _reads(rule, of_rank=True)) for rule in map(_rule, _lines(_RANK_RULES))]
    actions += [(rule.anchor, _reads(rule, of_rank=False)) for rule in map(_rule, _lines(_RUN_RULES))]
    for kind, _, template in (line.partition(": ") for line in _lines(_ERROR_RULES)):
        rule = _rule(template)
        actions.append((rule.anchor, _fails(kind, rule)))
    actions += [(anchor, _enters(kind)) for anchor, kind in _PHASES.items()]
    actions += [(anchor, _hints(anchor)) for anchor in _HYBRID_HINTS]
    actions += [("KV cache size:", _read_pool), ("num_gpu_blocks is: ", _read_engine_blocks)]
    actions += [("CUDA graph memory profiling", _read_estimate_applied), ("Application startup complete", _read_ready)]
    actions += [("Avg prompt throughput:", _read_serving), ("Prefix cache hit rate: GPU:", _read_v0_hit_rate)]
    actions += [("total_num_cumulative_preemption=", _read_v0_preemptions)]
    by_anchor: dict[str, list[_Action]] = {}
    for anchor, action in actions:
        by_anchor.setdefault(anchor, []).append(action)
    return tuple((anchor, tuple(acts)) for anchor, acts in by_anchor.items())


def _reads(rule: _Rule, *, of_rank: bool) -> _Action:
    def act(run: _Run, line: int, text: str) -> None:
        match = rule.pattern.search(text)
        if match is None:
            return
        process = _process_before(text, match.start())
        for value in _values(match):
            run.see(run.rank_facts if of_rank else run.run_facts, value, line, process)
        if re.search(r"\d GB", match[0]):
            run.notes[f"line {line}: vLLM writes GB here but divides by 2**30: read as GiB"] = None

    return act


def _fails(kind: str, rule: _Rule) -> _Action:
    def act(run: _Run, line: int, text: str) -> None:
        match = rule.pattern.search(text)
        if match is None:
            return
        numbers = {value.name: value.value for value in _values(match)}
        known = run.oom_kind if kind == "out_of_memory" else kind
        error = StartupError(known, numbers, line, match[0][:500].strip())
        run.errors.setdefault((known, tuple(sorted(numbers.items()))), error)
        run.touch(line)

    return act


def _enters(oom_kind: str) -> _Action:
    def act(run: _Run, _line: int, _text: str) -> None:
        run.oom_kind = oom_kind

    return act


def _hints(hint: str) -> _Action:
    def act(run: _Run, _line: int, _text: str) -> None:
        run.hints[hint] = None

    return act


def _mark_version(run: _Run, line: int, text: str) -> None:
    match = re.search(r"vLLM (?:API )?server version|[█▄▀]\s+version\s", text)
    if match:
        run.begin_stage(1, _process_before(text, match.start()), line)


def _read_args(run: _Run, line: int, text: str) -> None:
    match = re.search(r"non-default args: \{|args: Namespace\(", text)
    if match is None:
        return
    run.begin_stage(2, _process_before(text, match.start()), line)
    for item in _items(text[match.end() :]):
        key, separator, value = item.partition(":" if match[0].endswith("{") else "=")
        argument = key.strip().strip("'\"")
        if separator and argument.isidentifier():
            run.args[argument] = _literal(value.strip())
    run.args_line = line


def _read_engine(run: _Run, line: int, text: str) -> None:
    match = re.search(
        r"Initializing an? (?:(V\d) )?LLM engine(?: \(v?([^)\s]{1,80})\))? with config: (.*)", text, re.DOTALL
    )
    if match is None:
        return
    process = _process_before(text, match.start())
    run.begin_stage(3, process, line)
    engine, version, config = match.groups()
    settings = {"engine": engine or "V0", "vllm_version": version}
    for item in _items(config):
        key, _, value = item.partition("=")
        if name := _CONFIG_FIELDS.get(key.strip()):
            settings[name] = _literal(value.strip())
    for name, setting in settings.items():
        if _fits(name, setting):
            run.see(run.run_facts, _Value(name, setting, 0), line, process)


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


def _fits(name: str, value: object) -> bool:
    """Whether the value is of the field's type; a size or length below one stands for "auto"."""
    if name in _TEXTS:
        return isinstance(value, str)
    if name in _FLAGS:
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return name == "gpu_memory_utilization" or (isinstance(value, int) and value > 0)


def _read_pool(run: _Run, line: int, text: str) -> None:
    match = re.search(r"KV cache size: (\d[\d,]{0,17}) tokens", text)
    if match:
        process = _process_before(text, match.start())
        run.pools.append(_Seen(int(match[1].replace(",", "")), line, process, 99))
        run.touch(line)


def _read_engine_blocks(run: _Run, line: int, text: str) -> None:
    """By engine: number of engines that the count is the sum of (0: as many as there are such lines), count, line."""
    match = re.search(r"(?:(\d{1,5}) Engines|Engine (\d{1,5})): vllm .{1,80}num_gpu_blocks is: (\d{1,18})", text)
    if match:
        engines, engine, blocks = match.groups()
        run.engine_blocks[engine or "all"] = (int(engines or 0), int(blocks), line)
        run.touch(line)


def _read_estimate_applied(run: _Run, line: int, text: str) -> None:
    match = re.search(r"CUDA graph memory profiling (is enabled|is disabled|will be enabled)", text)
    if match:
        applied = _Value("cudagraph_estimate_applied", match[1] == "is enabled", 0)
        run.see(run.run_facts, applied, line, _process_before(text, match.start()))


def _read_ready(run: _Run, _line: int, _text: str) -> None:
    run.started = True


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


def _read_serving(run: _Run, line: int, text: str) -> None:
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
    run.started = True
    run.touch(line)


def _read_v0_hit_rate(run: _Run, _line: int, text: str) -> None:
    if hit_rate := _HIT_RATE.search(text):
        run.serving.hit_rate = float(hit_rate[1])


def _read_v0_preemptions(run: _Run, _line: int, text: str) -> None:
    if match := re.search(r"total_num_cumulative_preemption=(\d{1,12})", text):
        run.serving.cumulative_preemptions = max(run.serving.cumulative_preemptions, int(match[1]))


# Python values in a log.

_TOKEN = re.compile(
    r"'[^'\\]*(?:\\.[^'\\]*)*'" r'|"[^"\\]*(?:\\.[^"\\]*)*"' r"|[\[({]|[\])}]|,|[^'\"\[\](){},]+|['\"]", re.DOTALL
)
_OBJECT = re.compile(r"'[^'\\]*(?:\\.[^'\\]*)*'" r'|"[^"\\]*(?:\\.[^"\\]*)*"' r"|<([\w.]+)(?:[ :][^<>]*)?>", re.DOTALL)
_LONGEST_VALUE = 20_000


def _items(text: str) -> Iterator[str]:
    """The comma-separated items up to the bracket that closes the list; one that was cut off is left out."""
    depth = 0
    item: list[str] = []
    for token in _TOKEN.finditer(text):
        part = token[0]
        if part in "'\"":
            return
        if part in "])}":
            depth -= 1
            if depth < 0:
                yield "".join(item)
                return
        elif part in "[({":
            depth += 1
        if part == "," and not depth:
            yield "".join(item)
            item = []
        else:
            item.append(part)


def _literal(text: str) -> Any:
    """A Python value; enums, classes and calls in it become their text, and so does what cannot be read."""
    if len(text) > _LONGEST_VALUE:
        return text
    source = _OBJECT.sub(lambda part: repr(part[1]) if part[1] else part[0], text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in a template is no concern of ours
            return _of_node(ast.parse(source, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def _of_node(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Dict):
        return {
            _hashable(_of_node(key)): _of_node(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    if isinstance(node, ast.Tuple):
        return tuple(_of_node(part) for part in node.elts)
    if isinstance(node, ast.List | ast.Set):
        return [_of_node(part) for part in node.elts]
    if isinstance(node, ast.UnaryOp | ast.BinOp):
        return ast.literal_eval(node)
    return ast.unparse(node)


def _hashable(key: Any) -> Any:
    return key if isinstance(key, str | int | float | bool | None) else repr(key)


# From what was seen to facts.

_RANK_FIELDS = tuple(entry.name for entry in fields(RankMemory) if entry.name != "process")
_LARGEST_OF_RANKS = ("weights_bytes", "non_torch_bytes", "consumed_bytes", "activation_bytes", "cudagraph_actual_bytes")
_RANK_NUMBERS = (
    "equivalent_gpu_memory_utilization",
    "suggested_gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "suggested_kv_cache_memory_bytes",
    "suggested_kv_cache_memory_limit_bytes",
)
_SETTINGS = (
    "vllm_version",
    "engine",
    "model",
    "max_model_len",
    "auto_fit_max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "context_parallel_size",
    "kv_cache_dtype",
    "block_size",
    "enforce_eager",
    "enable_prefix_caching",
    "cudagraph_estimate_applied",
)
_ROUNDING_BYTES = round(0.005 * GIB)
"""Half of the last of two decimals."""

_RankValues = dict[str, _Seen]


class _Summary:
    """Turns what was seen of one start-up into facts and the lines they came from."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.values: dict[str, Any] = {}
        self.lines: dict[str, int] = {}
        self.notes = list(run.notes)

    def facts(self, name: str) -> StartupFacts:
        run = self.run
        self._settings()
        self._pool()
        ranks = self._ranks()
        self._memory(ranks)
        if run.num_startups > 1:
            self.notes.insert(0, f"{run.num_startups} start-ups in it: the last, from line {run.started_at}, is read")
        return StartupFacts(
            name=name,
            non_default_args=run.args,
            hybrid_hints=(hints := (*run.hints, *self._hybrid_figures())),
            is_hybrid=True if hints else None,
            started=run.started,
            errors=self._errors(),
            serving=run.serving.summary(),
            ranks=tuple(RankMemory(process, **_known(values)) for process, values in ranks.items()),
            pools=tuple(PoolLine(self._label(pool.process), pool.value, pool.line) for pool in run.pools),
            num_startups=max(1, run.num_startups),
            notes=tuple(self.notes),
            lines=self.lines,
            **self.values,
        )

    def _put(self, name: str, seen: _Seen) -> None:
        self.values[name] = seen.value
        self.lines[name] = seen.line

    def _argument(self, name: str) -> _Seen | None:
        value = self.run.args.get(name)
        return _Seen(value, self.run.args_line, _Process("", ""), 0) if _fits(name, value) else None

    def _last(self, facts: _Facts, name: str) -> _Seen | None:
        seen = facts.get(name)
        return seen[-1] if seen else None

    def _settings(self) -> None:
        for name in _SETTINGS:
            if seen := self._last(self.run.run_facts, name) or self._argument(name):
                self._put(name, seen)
        tag = self.run.args.get("model_tag")
        if "model" not in self.values and isinstance(tag, str):
            self._put("model", _Seen(tag, self.run.args_line, _Process("", ""), 0))
        if seen := self._utilization():
            self._put("gpu_memory_utilization", seen)
        if seen := self._last(self.run.run_facts, "engine") or self._engine():
            self._put("engine", seen)

    def _utilization(self) -> _Seen | None:
        """The argument, or the figure that is printed with most decimals."""
        sources = ("exact_utilization", "printed_utilization", "rounded_utilization")
        printed = (self._last(self.run.rank_facts, source) for source in sources)
        return self._argument("gpu_memory_utilization") or next(filter(None, printed), None)

    def _engine(self) -> _Seen | None:
        """From lines that only one of the engines writes."""
        run = self.run
        if seen := self._last(run.rank_facts, "rounded_utilization"):
            return seen._replace(value="V0")
        if run.pools:
            return run.pools[-1]._replace(value="V1")
        if seen := self._last(run.run_facts, "num_cpu_blocks"):
            return seen._replace(value="V0")
        of_core = [seen for values in run.rank_facts.values() for seen in values if "EngineCore" in seen.process.label]
        return of_core[0]._replace(value="V1") if of_core else None

    def _pool(self) -> None:
        run = self.run
        if run.pools:
            self._put("kv_cache_tokens", min(run.pools, key=_amount))
        if concurrencies := run.run_facts.get("max_concurrency"):
            least = min(range(len(concurrencies)), key=lambda index: _amount(concurrencies[index]))
            self._put("max_concurrency", concurrencies[least])
            self._put("max_concurrency_tokens", run.run_facts["max_concurrency_tokens"][least])
        for name in ("num_cpu_blocks", "profiled_num_gpu_blocks"):
            if seen := run.run_facts.get(name):
                self._put(name, min(seen, key=_amount))
        if blocks := self._blocks():
            self._put("num_gpu_blocks", blocks)

    def _hybrid_figures(self) -> Iterator[str]:
        """Layers of one kind hold at most tokens / length requests, whatever the release; layers of several hold more.

        (From 0.20 on the tokens are concurrency x length, so that this does not show.)
        """
        tokens, concurrency = self.values.get("kv_cache_tokens"), self.values.get("max_concurrency")
        length = self.values.get("max_concurrency_tokens")
        if tokens is not None and concurrency is not None and length and concurrency > tokens / length + 0.0051:
            yield f"a maximum concurrency of {concurrency:.2f} where one kind of layers holds {tokens / length:.2f}"

    def _blocks(self) -> _Seen | None:
        """The override, else the logged count (the least, if workers log theirs), else the state blocks."""
        for name in ("override_num_gpu_blocks", "num_gpu_blocks"):
            if seen := self.run.run_facts.get(name):
                return min(seen, key=_amount)
        if self.run.engine_blocks:
            return self._blocks_of_engines()
        return self._last(self.run.run_facts, "state_blocks")

    def _blocks_of_engines(self) -> _Seen:
        """A server with several engines logs the sum of their blocks, once for each of them."""
        lines = list(self.run.engine_blocks.values())
        told, blocks, line = min(lines, key=lambda entry: entry[1])
        is_sum = len({count for _, count, _ in lines}) == 1
        engines = told or (len(lines) if is_sum else 1)
        if engines > 1:
            self.notes.append(f"line {line}: {blocks:,} blocks are the sum of {engines} engines; divided evenly")
        return _Seen(blocks // engines, line, _Process("", ""), 99)

    def _label(self, process: _Process) -> str:
        """Workers have their rank in their name only after they have written their first lines."""
        label = self.run.process_of_pid.get(process.pid, process.label)
        needs_pid = process.pid and "orker" in label and not _has_digit(label)
        return f"{label} pid={process.pid}" if needs_pid else label

    def _ranks(self) -> dict[str, _RankValues]:
        """What each process said, in order of appearance; of equal precision the later figure counts."""
        ranks: dict[str, _RankValues] = {}
        for name, figures in self.run.rank_facts.items():
            for seen in figures:
                values = ranks.setdefault(self._label(seen.process), {})
                if name not in values or seen.decimals >= values[name].decimals:
                    values[name] = seen
        for values in ranks.values():
            self._activation_of_peak(values)
            self._net_activation(values)
            _non_torch_of_consumed(values)
        of_devices = {process: values for process, values in ranks.items() if _known(values)}
        return dict(sorted(of_devices.items(), key=lambda rank: min(seen.line for seen in rank[1].values())))

    def _activation_of_peak(self, values: _RankValues) -> None:
        """vLLM 0.6.3 and 0.6.4 log torch's peak, weights included."""
        if "activation_bytes" not in values and {"peak_torch_bytes", "weights_bytes"} <= values.keys():
            peak = values["peak_torch_bytes"]
            values["activation_bytes"] = peak._replace(value=peak.value - values["weights_bytes"].value)
            self.notes.append(f"line {peak.line}: activation is the torch peak less the weights")

    def _net_activation(self, values: _RankValues) -> None:
        """Releases differ in whether the logged activation has the graphs' estimate in it; the sum of parts tells."""
        logged, estimate = values.get("logged_activation_bytes"), values.get("cudagraph_estimate_bytes")
        if logged is None or "activation_bytes" in values:
            return
        values["activation_bytes"] = logged
        applied = self._last(self.run.run_facts, "cudagraph_estimate_applied")
        if estimate is None or applied is None or not applied.value:
            return
        requested, available = values.get("requested_memory_bytes"), values.get("available_kv_cache_bytes")
        fixed = _fixed_bytes({name: seen.value for name, seen in values.items()})
        if requested is None or available is None or fixed is None:
            self.notes.append(f"line {logged.line}: the logged activation may include the estimate of the graphs")
            return
        rest = requested.value - available.value - fixed - logged.value
        if abs(rest) < abs(rest - estimate.value):
            values["activation_bytes"] = logged._replace(value=logged.value - estimate.value)
            self.notes.append(f"line {logged.line}: activation is the logged one less the estimate of the graphs")

    def _memory(self, ranks: dict[str, _RankValues]) -> None:
        """Figures of the rank with the least KV cache; what that one does not say, of the rank that uses most."""
        with_pool = [values for values in ranks.values() if "available_kv_cache_bytes" in values]
        binding = min(with_pool, key=lambda values: _amount(values["available_kv_cache_bytes"]), default={})
        for name in _RANK_FIELDS:
            figures = [values[name] for values in ranks.values() if name in values]
            if name in binding:
                self._put(name, binding[name])
            elif figures:
                self._put(name, (max if name in _LARGEST_OF_RANKS else min)(figures, key=_amount))
        for name in _RANK_NUMBERS:
            if seen := self.run.rank_facts.get(name):
                self._put(name, min(seen, key=_amount))
        if argument := self._argument("kv_cache_memory_bytes"):
            self._put("kv_cache_memory_bytes", argument)

    def _errors(self) -> tuple[StartupError, ...]:
        """In order; that the engine failed is news only if nothing says why."""
        errors = sorted(self.run.errors.values(), key=lambda error: error.line)
        named = [error for error in errors if error.kind != "engine_core_failed"]
        return tuple(named or errors[:1])


def _amount(seen: _Seen) -> float:
    return float(seen.value)


def _known(values: _RankValues) -> dict[str, int]:
    return {name: values[name].value for name in _RANK_FIELDS if name in values}


def _non_torch_of_consumed(values: _RankValues) -> None:
    if "non_torch_bytes" not in values and {"consumed_bytes", "weights_bytes"} <= values.keys():
        consumed = values["consumed_bytes"]
        values["non_torch_bytes"] = consumed._replace(value=consumed.value - values["weights_bytes"].value)


def _fixed_bytes(values: Mapping[str, int | None]) -> int | None:
    """Weights and all else that stays on the device, as far as the log has it."""
    consumed, weights, non_torch = (values.get(key) for key in ("consumed_bytes", "weights_bytes", "non_torch_bytes"))
    if consumed is not None:
        return consumed
    return None if weights is None or non_torch is None else weights + non_torch


# Contradictions.


def _check_pool(facts: StartupFacts) -> Iterator[str]:
    """Tokens are blocks x block_size, or (from 0.20 on) the largest concurrency times max_model_len."""
    tokens, blocks, size = facts.kv_cache_tokens, facts.num_gpu_blocks, facts.block_size
    if tokens is None or blocks is None or size is None or facts.is_hybrid:
        return
    tokens_of_block = size * (facts.context_parallel_size or 1)
    expected = {blocks * tokens_of_block}
    if length := facts.max_concurrency_tokens:
        whole = int(blocks / math.ceil(length / tokens_of_block) * length)
        expected |= {whole - 1, whole, whole + 1}
    if tokens not in expected:
        yield f"{_at(facts, 'kv_cache_tokens')}: {tokens:,} tokens are not {blocks:,} blocks of {tokens_of_block}"


def _check_concurrency(facts: StartupFacts) -> Iterator[str]:
    """A request takes whole blocks, so up to one block more than its length, but no more than that."""
    tokens, concurrency, length = facts.kv_cache_tokens, facts.max_concurrency, facts.max_concurrency_tokens
    if tokens is None or concurrency is None or not length or facts.is_hybrid:
        return
    tokens_of_block = (facts.block_size or length) * (facts.context_parallel_size or 1)
    if concurrency < tokens / (length + tokens_of_block) - 0.0051:
        yield (
            f"{_at(facts, 'max_concurrency')}: {concurrency:.2f} requests of {length:,} tokens are not what "
            f"{tokens:,} tokens hold ({tokens / length:.2f})"
        )


def _check_requested(facts: StartupFacts, rank: RankMemory) -> Iterator[str]:
    total, requested, share = rank.total_memory_bytes, rank.requested_memory_bytes, facts.gpu_memory_utilization
    if total is None or requested is None or share is None:
        return
    is_rounded = facts.engine == "V0" and "gpu_memory_utilization" not in facts.non_default_args
    allowed = total * (0.005 if is_rounded else 0.00005) + _ROUNDING_BYTES * (1 + share) + 1
    if abs(total * share - requested) > allowed:
        yield f"{_of(rank)}{_gib(requested)} GiB are not {share:g} of {_gib(total)} GiB ({_gib(total * share)} GiB)"


def _check_parts(facts: StartupFacts, rank: RankMemory) -> Iterator[str]:
    """Weights, non-torch, activation, the KV cache and, where it is applied, the estimate of the graphs."""
    requested, available, activation = (
        rank.requested_memory_bytes,
        rank.available_kv_cache_bytes,
        rank.activation_bytes,
    )
    fixed = _fixed_bytes({"consumed_bytes": rank.consumed_bytes, **_weights_and_non_torch(rank)})
    if requested is None or available is None or activation is None or fixed is None or facts.kv_cache_memory_bytes:
        return
    estimate = rank.cudagraph_estimate_bytes or 0
    applied = facts.cudagraph_estimate_applied
    possible = [estimate] if applied else [0] if applied is False else [0, estimate]
    rest = requested - fixed - activation - available
    if min(abs(rest - graphs) for graphs in possible) > 7 * _ROUNDING_BYTES:
        parts = fixed + activation + available + possible[-1]
        yield f"{_of(rank)}the parts sum to {_gib(parts)} GiB, but {_gib(requested)} GiB were requested"


def _weights_and_non_torch(rank: RankMemory) -> dict[str, int | None]:
    return {"weights_bytes": rank.weights_bytes, "non_torch_bytes": rank.non_torch_bytes}


def _check_graphs(facts: StartupFacts) -> Iterator[str]:
    """The equivalent utilization is the one given less the estimate's share of the device."""
    share, equivalent = facts.gpu_memory_utilization, facts.equivalent_gpu_memory_utilization
    estimate, total = facts.cudagraph_estimate_bytes, facts.total_memory_bytes
    if share is None or equivalent is None or estimate is None or not total or total < 0:
        return
    allowed = 0.0001 + (1 + estimate / total) * _ROUNDING_BYTES / total
    if abs(share - equivalent - estimate / total) > allowed:
        yield (
            f"{_at(facts, 'equivalent_gpu_memory_utilization')}: {equivalent:g} is not {share:g} less "
            f"{_gib(estimate)} of {_gib(total)} GiB for the graphs"
        )


def _check_errors(facts: StartupFacts) -> Iterator[str]:
    for error in facts.errors:
        numbers = error.numbers
        if error.kind == "free_memory_below_desired":
            free, requested = numbers["free_bytes"], numbers["requested_bytes"]
            if free > requested + 2 * _ROUNDING_BYTES:
                yield f"line {error.line}: {_gib(free)} GiB free are not less than {_gib(requested)} GiB"
        elif error.kind == "max_model_len_exceeds_kv_cache" and "needed_bytes" in numbers:
            needed, available = numbers["needed_bytes"], numbers["available_bytes"]
            if needed < available - 2 * _ROUNDING_BYTES:
                yield f"line {error.line}: {_gib(needed)} GiB needed are not more than {_gib(available)} GiB available"
        if facts.started and error.kind != "out_of_memory_serving":
            yield f"line {error.line}: {error.kind}, but the server came up"


def _at(facts: StartupFacts, name: str) -> str:
    return f"line {facts.lines[name]}"


def _of(rank: RankMemory) -> str:
    return f"{rank.process}: " if rank.process else ""


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"
