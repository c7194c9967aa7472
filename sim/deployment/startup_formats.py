"""What the lines of a start-up look like, release by release, and the values in them.

In a rule «…» is text that a line must contain, {field:kind} a value; one that starts with blanks continues the one
before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from windtunnel.sim.deployment.gpu import GIB

_NUMBER = r"-?\d[\d,]{0,15}(?:\.\d{1,12})?"
_KINDS = {
    "gib": _NUMBER,
    "float": _NUMBER,
    "int": r"\d[\d,]{0,17}",
    "size": rf"{_NUMBER} ?(?:[KMG]iB|[KMG]B|bytes)",
    "word": r"[^\s,'\"]{1,300}",
}
_UNITS = {"K": 2**10, "M": 2**20, "G": GIB}

RANK_RULES = r"""
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

RUN_RULES = r"""
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

ERROR_RULES = r"""
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
HYBRID_HINTS = (
    "attention page size is >= mamba page size",
    "Padding mamba page size",
    "Mamba cache blocks",
    "Hybrid or mamba-based model detected",
    "kv cache group sizes",
    "padding layers, may waste at most",
    "for hybrid models",
    "for this hybrid model",
)
PHASES = {
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


class Rule(NamedTuple):
    """A kind of line: the text that it contains, and what it looks like."""

    anchor: str
    pattern: re.Pattern[str]


def rule_lines(grammar: str) -> list[str]:
    """The rules of a text, one each."""
    return grammar.replace("\n  ", " ").strip("\n").split("\n")


def make_rule(line: str) -> Rule:
    """The rule that a line of the texts above stands for."""
    before, _, rest = line.partition("«")
    anchor, _, after = rest.partition("»")
    template = f"{before}{re.escape(anchor)}{after}"
    return Rule(anchor, re.compile(re.sub(r"\{(\w+):(\w+)\}", _group, template)))


def _group(part: re.Match[str]) -> str:
    return f"(?P<{part[1]}__{part[2]}>{_KINDS[part[2]]})"


class Value(NamedTuple):
    """A value in a line, by the name of the field it is for; sizes are bytes."""

    name: str
    value: Any
    decimals: int
    """How exactly it is given; whole bytes are exact."""


def values_of(match: re.Match[str]) -> Iterator[Value]:
    """The values in a line that a rule matches."""
    for key, text in match.groupdict().items():
        if text is not None:
            name, _, kind = key.rpartition("__")
            yield _value(name, kind, text)


def _value(name: str, kind: str, text: str) -> Value:
    if kind == "word":
        return Value(name, text, 0)
    number = text.replace(",", "")
    if kind == "int":
        return Value(name, int(number), 99)
    if kind == "size":
        return _size(name, number)
    decimals = max(2, len(number.partition(".")[2]))  # releases that round to two decimals drop zeros at the end
    return Value(name, round(float(number) * GIB) if kind == "gib" else float(number), decimals)


def _size(name: str, text: str) -> Value:
    unit = text.lstrip("-0123456789.").strip()
    number = text[: len(text) - len(unit)].strip()
    if unit == "bytes":
        return Value(name, round(float(number)), 99)
    return Value(name, round(float(number) * _UNITS[unit[0]]), 2)
