"""Reading what a real vLLM said of its memory: start-up logs and metrics."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import REPO_ROOT
from hypothesis import assume, example, given
from hypothesis import strategies as st

from windtunnel.sim.deployment.metrics_text import parse_exposition, read_metrics
from windtunnel.sim.deployment.startup_log import ERROR_KINDS, StartupFacts, check, read_startup_log

GIB = 2**30

V0_04 = """
INFO 05-20 10:00:01 api_server.py:160] vLLM API server version 0.4.2
INFO 05-20 10:00:01 api_server.py:161] args: Namespace(host=None, model='deepseek-ai/deepseek-coder-6.7b-instruct', \
chat_template="it's {a, b}", gpu_memory_utilization=0.9, tensor_parallel_size=2, lora_modules=None, max_num_seqs=256)
INFO 05-20 10:00:01 llm_engine.py:100] Initializing an LLM engine (v0.4.2) with config: \
model='deepseek-ai/deepseek-coder-6.7b-instruct', speculative_config=None, tokenizer='x', dtype=torch.float16, \
max_seq_len=4096, download_dir=None, tensor_parallel_size=2, enforce_eager=False, kv_cache_dtype=auto, seed=0, \
served_model_name=m)
(RayWorkerWrapper pid=2211) INFO 05-20 10:00:30 model_runner.py:175] Loading model weights took 6.2892 GB
INFO 05-20 10:00:30 model_runner.py:175] Loading model weights took 6.2892 GB
INFO 05-20 10:00:35 distributed_gpu_executor.py:45] # GPU blocks: 507, # CPU blocks: 1024
"""
V0_064 = """
INFO 11-20 10:00:01 config.py:1136] Chunked prefill is enabled with max_num_batched_tokens=512.
INFO 11-20 10:00:01 llm_engine.py:249] Initializing an LLM engine (v0.6.4.post1) with config: model='m', \
tokenizer='m', max_seq_len=20000, tensor_parallel_size=1, pipeline_parallel_size=1, enforce_eager=True, seed=0)
INFO 11-20 10:00:30 model_runner.py:1072] Loading model weights took 14.9888 GB
INFO 11-20 10:00:35 worker.py:232] Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=15.43GiB \
peak_torch_memory=17.01GiB memory_usage_post_profile=15.43GiB non_torch_memory=0.40GiB kv_cache_size=3.81GiB \
gpu_memory_utilization=0.90
INFO 11-20 10:00:35 gpu_executor.py:113] # GPU blocks: 1952, # CPU blocks: 2048
INFO 11-20 10:00:35 gpu_executor.py:117] Maximum concurrency for 20000 tokens per request: 1.56x
"""
V0_08 = """
INFO 04-25 10:00:01 [llm_engine.py:240] Initializing a V0 LLM engine (v0.8.5) with config: model='m', \
max_seq_len=4096, tensor_parallel_size=1, enforce_eager=False, kv_cache_dtype=auto,  device_config=cuda
INFO 04-25 10:00:30 [model_runner.py:1140] Model loading took 7.5113 GiB and 3.479114 seconds
INFO 04-25 10:00:35 [worker.py:287] Memory profiling takes 1.73 seconds\r
INFO 04-25 10:00:35 [worker.py:287] the current vLLM instance can use total_gpu_memory (15.77GiB) x \
gpu_memory_utilization (0.90) = 14.20GiB\r
INFO 04-25 10:00:35 [worker.py:287] model weights take 7.51GiB; non_torch_memory takes 0.39GiB; PyTorch activation \
peak memory takes 2.53GiB; the rest of the memory reserved for KV Cache is 3.76GiB.
INFO 04-25 10:00:36 [executor_base.py:112] # cuda blocks: 1926, # CPU blocks: 2048
INFO 04-25 10:00:36 [executor_base.py:117] Maximum concurrency for 4096 tokens per request: 7.52x
INFO 04-25 10:00:50 [model_runner.py:1592] Graph capturing finished in 14 secs, took 0.27 GiB
"""
V1_019 = """
DEBUG 04-22 00:13:55 [platforms/__init__.py:85] Confirmed CUDA platform is available.
(APIServer pid=1) INFO 04-22 00:14:02 [entrypoints/utils.py:299]        █     █     █▄   ▄█
(APIServer pid=1) INFO 04-22 00:14:02 [entrypoints/utils.py:299]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.19.0
(APIServer pid=1) INFO 04-22 00:14:02 [entrypoints/utils.py:299]   █▄█▀ █     █     █     █  model   RedHatAI/M-w8a8
(APIServer pid=1) INFO 04-22 00:14:02 [entrypoints/utils.py:233] non-default args: {'model_tag': 'RedHatAI/M-w8a8', \
'model': 'RedHatAI/M-w8a8', 'max_model_len': 8192, 'tensor_parallel_size': 2, 'gpu_memory_utilization': 0.95, \
'enable_prefix_caching': False}
(APIServer pid=1) DEBUG 04-22 00:14:03 [engine/arg_utils.py:2232] Defaulting max_num_batched_tokens to 8192 for \
OPENAI_API_SERVER usage context.
(APIServer pid=1) DEBUG 04-22 00:14:03 [engine/arg_utils.py:2242] Defaulting max_num_seqs to 1024 for \
OPENAI_API_SERVER usage context.
(EngineCore pid=469) INFO 04-22 00:14:20 [v1/engine/core.py:105] Initializing a V1 LLM engine (v0.19.0) with config: \
model='RedHatAI/M-w8a8', speculative_config=SpeculativeConfig(model='draft', method='eagle'), dtype=torch.bfloat16, \
max_seq_len=8192, tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, \
decode_context_parallel_size=1, enforce_eager=False, kv_cache_dtype=auto, device_config=cuda, seed=0, \
enable_prefix_caching=False, compilation_config={'mode': <CompilationMode.VLLM_COMPILE: 3>, 'cudagraph_mode': \
<CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>}
(Worker pid=669) DEBUG 04-22 00:14:34 [v1/worker/gpu_worker.py:285] worker requested memory: 75.23GiB
(Worker_TP0 pid=668) INFO 04-22 00:14:50 [v1/worker/gpu_model_runner.py:4820] Model loading took 12.11 GiB memory \
and 9.1 seconds
(Worker_TP0 pid=668) INFO 04-22 00:15:12 [v1/worker/gpu_model_runner.py:5900] Estimated CUDA graph memory: \
1.60 GiB total
(Worker_TP0 pid=668) INFO 04-22 00:15:13 [v1/worker/gpu_worker.py:436] Available KV cache memory: 59.02 GiB
(Worker_TP0 pid=668) INFO 04-22 00:15:13 [v1/worker/gpu_worker.py:470] In v0.19, CUDA graph memory profiling will be \
enabled by default (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1), which more accurately accounts for CUDA graph memory \
during KV cache allocation. To try it now, set VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1 and increase \
--gpu-memory-utilization from 0.9500 to 0.9702 to maintain the same effective KV cache size.
(EngineCore pid=469) INFO 04-22 00:15:13 [v1/core/kv_cache_utils.py:1319] GPU KV cache size: 773,584 tokens
(EngineCore pid=469) INFO 04-22 00:15:13 [v1/core/kv_cache_utils.py:1324] Maximum concurrency for 8,192 tokens per \
request: 94.43x
Capturing CUDA graphs (decode, FULL): 100%|██████████| 51/51 [00:01<00:00, 32.90it/s](Worker_TP1 pid=669) INFO \
04-22 00:15:35 [v1/worker/gpu_worker.py:597] CUDA graph pool memory: 1.03 GiB (actual), 1.6 GiB (estimated), \
difference: 0.57 GiB (55.8%).
(Worker_TP0 pid=668) DEBUG 04-22 00:15:35 [v1/worker/gpu_worker.py:661] Free memory on device (77.66/79.19 GiB) on \
startup. Desired GPU memory utilization is (0.95, 75.23 GiB). Actual usage is 12.11 GiB for weight, 2.03 GiB for peak \
activation, 2.07 GiB for non-torch memory, and 1.03 GiB for CUDAGraph memory. Replace gpu_memory_utilization config \
with `--kv-cache-memory=62114097152` (57.85 GiB) to fit into requested memory, or `--kv-cache-memory=64720431104` \
(60.28 GiB) to fully utilize gpu memory. Current kv cache memory in use is 59.02 GiB.
(APIServer pid=1) DEBUG 04-22 00:15:40 [v1/metrics/loggers.py:273] Engine 000: vllm cache_config_info with \
initialization after num_gpu_blocks is: 48349
(APIServer pid=1) INFO:     Application startup complete.
"""
V1_032 = """
(APIServer pid=9) INFO 11-29 20:34:52 [api_utils.py:286] non-default args: {'model': 'm', \
'gpu_memory_utilization': 0.62, 'block_size': 16, 'compilation_config': CompilationConfig(mode=None, sizes=[1, 2]), \
'quantization': <Quant.FP8: 'fp8'>, 'max_model_len': -1}
(EngineCore pid=11) INFO 11-29 20:35:46 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', \
max_seq_len=131072, tensor_parallel_size=1, data_parallel_size=1, enforce_eager=False, \
kv_cache_dtype=fp8_e4m3, device_config=cuda, seed=0
(EngineCore pid=11) INFO 11-29 20:35:50 [gpu_model_runner.py:5150] Model loading took 30.05 GiB memory and 4.2 seconds
(EngineCore pid=11) INFO 11-29 20:36:00 [gpu_model_runner.py:6475] Estimated CUDA graph memory: 14.00 GiB total
(EngineCore pid=11) INFO 11-29 20:36:00 [gpu_worker.py:759] Available KV cache memory: 59.45 GiB
(EngineCore pid=11) INFO 11-29 20:36:00 [gpu_worker.py:774] CUDA graph memory profiling is enabled (default since \
v0.21.0). The current --gpu-memory-utilization=0.6200 is equivalent to --gpu-memory-utilization=0.5413 without CUDA \
graph memory profiling. To maintain the same effective KV cache size as before, increase --gpu-memory-utilization to \
0.6987. To disable, set VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0.
(EngineCore pid=11) INFO 11-29 20:36:00 [kv_cache_utils.py:2468] Auto-fit max_model_len: reduced from 131072 to 98304 \
to fit in available KV cache memory (59.44 GiB GPU)
(EngineCore pid=11) INFO 11-29 20:36:00 [kv_cache_utils.py:2327] GPU KV cache size: 245,840 tokens, Maximum \
concurrency for 98,304 tokens per request: 2.50x
(EngineCore pid=11) INFO 11-29 20:36:20 [gpu_worker.py:971] CUDA graph pool memory: 1.20 GiB (actual), 14.00 GiB \
(estimated), difference: 12.80 GiB (1066.7%).
(EngineCore pid=11) INFO 11-29 20:36:20 [gpu_worker.py:1034] Free memory on device (176.10/178.00 GiB) on startup. \
Desired GPU memory utilization is (0.62, 110.36 GiB). Actual usage is 30.91 GiB for consumed memory (weights + \
non-torch), 20.00 GiB for peak activation, and 1.20 GiB for CUDAGraph memory. Replace gpu_memory_utilization config \
with `--kv-cache-memory=62405000000` (58.12 GiB) to fit into requested memory, or `--kv-cache-memory=132993000000` \
(123.86 GiB) to fully utilize gpu memory. Current kv cache memory in use is 59.45 GiB.
"""
CPU_032 = """
(APIServer pid=15416) INFO 11-29 20:34:52 [api_utils.py:286] non-default args: {'model_tag': 'model', 'host': \
'127.0.0.1', 'port': 8177, 'model': 'model', 'max_model_len': 2048, 'enforce_eager': True, 'block_size': 32, \
'kv_cache_memory_bytes': 1073741824, 'num_gpu_blocks_override': 129, 'max_num_batched_tokens': 512, 'max_num_seqs': 32}
(EngineCore pid=15755) INFO 11-29 20:35:46 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: \
model='model', max_seq_len=2048, tensor_parallel_size=1, enforce_eager=True, kv_cache_dtype=auto, device_config=cpu
(EngineCore pid=15755) INFO 11-29 20:35:49 [cpu_worker.py:260] Explicitly set (1.0/23.54) GiB for KV cache on node 0.
(EngineCore pid=15755) INFO 11-29 20:35:49 [kv_cache_utils.py:2619] Overriding num_gpu_blocks=65536 with \
num_gpu_blocks_override=129
(EngineCore pid=15755) INFO 11-29 20:35:49 [kv_cache_utils.py:2327] CPU KV cache size: 4,128 tokens, Maximum \
concurrency for 2,048 tokens per request: 2.02x
"""
EXAMPLES = {"V0 0.4": V0_04, "V0 0.6.4": V0_064, "V0 0.8": V0_08, "V1 0.19": V1_019, "V1 0.32": V1_032, "CPU": CPU_032}


def read(text: str) -> StartupFacts:
    return read_startup_log(text, name="vllm.log")


def gib(value: float) -> int:
    return round(value * GIB)


def without_places(facts: StartupFacts) -> StartupFacts:
    """The facts without the lines they stand on, to compare texts that differ in those only."""
    errors = tuple(error._replace(line=0) for error in facts.errors)
    return replace(facts, lines={}, notes=(), errors=errors, pools=tuple(pool._replace(line=0) for pool in facts.pools))


# The formats of the releases.


def test_an_early_v0_log_gives_blocks_and_reads_its_gb_as_gib() -> None:
    facts = read(V0_04)
    assert (facts.vllm_version, facts.engine, facts.max_model_len, facts.tensor_parallel_size) == (
        "0.4.2",
        "V0",
        4096,
        2,
    )
    assert (facts.num_gpu_blocks, facts.num_cpu_blocks, facts.max_num_seqs) == (507, 1024, 256)
    assert facts.gpu_memory_utilization == 0.9
    assert facts.weights_bytes == gib(6.2892)
    assert [rank.process for rank in facts.ranks] == ["RayWorkerWrapper pid=2211", ""]
    assert facts.non_default_args["chat_template"] == "it's {a, b}"
    assert any("GB" in note for note in facts.notes)


def test_the_profile_of_0_6_4_gives_the_parts_with_the_weights_taken_out_of_the_peak() -> None:
    facts = read(V0_064)
    assert facts.total_memory_bytes == gib(23.58)
    assert facts.available_kv_cache_bytes == gib(3.81)
    assert facts.activation_bytes == gib(17.01) - gib(14.9888)
    assert (facts.num_gpu_blocks, facts.max_concurrency, facts.max_concurrency_tokens) == (1952, 1.56, 20000)
    assert (facts.gpu_memory_utilization, facts.max_num_batched_tokens, facts.enforce_eager) == (0.9, 512, True)


def test_the_sentences_of_v0_give_every_part() -> None:
    facts = read(V0_08)
    parts = (facts.weights_bytes, facts.non_torch_bytes, facts.activation_bytes, facts.available_kv_cache_bytes)
    assert parts == (gib(7.5113), gib(0.39), gib(2.53), gib(3.76))
    assert facts.requested_memory_bytes == gib(14.20)
    assert facts.cudagraph_actual_bytes == gib(0.27)
    assert (facts.num_gpu_blocks, facts.max_concurrency) == (1926, 7.52)


def test_a_v1_log_gives_settings_parts_and_pool() -> None:
    facts = read(V1_019)
    assert (facts.vllm_version, facts.engine, facts.model) == ("0.19.0", "V1", "RedHatAI/M-w8a8")
    assert (facts.max_model_len, facts.max_num_seqs, facts.max_num_batched_tokens) == (8192, 1024, 8192)
    assert (facts.tensor_parallel_size, facts.data_parallel_size, facts.enable_prefix_caching) == (2, 1, False)
    assert (facts.total_memory_bytes, facts.free_memory_bytes) == (gib(79.19), gib(77.66))
    assert (facts.requested_memory_bytes, facts.gpu_memory_utilization) == (gib(75.23), 0.95)
    parts = (facts.weights_bytes, facts.activation_bytes, facts.non_torch_bytes, facts.available_kv_cache_bytes)
    assert parts == (gib(12.11), gib(2.03), gib(2.07), gib(59.02))
    assert (facts.cudagraph_actual_bytes, facts.cudagraph_estimate_bytes) == (gib(1.03), gib(1.6))
    assert facts.cudagraph_estimate_applied is False
    assert facts.suggested_gpu_memory_utilization == 0.9702
    assert facts.suggested_kv_cache_memory_bytes == 62_114_097_152
    assert facts.suggested_kv_cache_memory_limit_bytes == 64_720_431_104
    assert (facts.kv_cache_tokens, facts.num_gpu_blocks, facts.max_concurrency) == (48_349 * 16, 48_349, 94.43)
    assert facts.started
    assert "Application startup complete" in V1_019.splitlines()[facts.lines["started"] - 1]
    assert not facts.errors


def test_a_worker_that_got_its_rank_late_and_one_behind_a_progress_bar_are_told_apart() -> None:
    ranks = {rank.process: rank for rank in read(V1_019).ranks}
    assert set(ranks) == {"Worker_TP0", "Worker_TP1"}
    assert ranks["Worker_TP1"].requested_memory_bytes == gib(75.23)
    assert ranks["Worker_TP1"].cudagraph_actual_bytes == gib(1.03)


def test_consumed_memory_is_split_and_the_estimate_of_the_graphs_is_not_activation() -> None:
    facts = read(V1_032)
    assert facts.cudagraph_estimate_applied is True
    assert facts.activation_bytes == gib(20.00) - gib(14.00)
    assert facts.consumed_bytes == gib(30.91)
    assert facts.non_torch_bytes == gib(30.91) - gib(30.05)
    assert (facts.equivalent_gpu_memory_utilization, facts.suggested_gpu_memory_utilization) == (0.5413, 0.6987)
    assert (facts.max_model_len, facts.auto_fit_max_model_len) == (98_304, 98_304)
    assert (facts.kv_cache_tokens, facts.max_concurrency, facts.kv_cache_dtype) == (245_840, 2.5, "fp8_e4m3")


def test_arguments_with_enums_and_objects_are_read() -> None:
    arguments = read(V1_032).non_default_args
    assert arguments["quantization"] == "Quant.FP8"
    assert arguments["compilation_config"] == "CompilationConfig(mode=None, sizes=[1, 2])"
    assert arguments["max_model_len"] == -1


def test_a_log_of_the_cpu_backend_gives_the_overridden_pool() -> None:
    facts = read(CPU_032)
    assert (facts.num_gpu_blocks, facts.profiled_num_gpu_blocks, facts.block_size) == (129, 65_536, 32)
    assert (facts.kv_cache_tokens, facts.max_concurrency) == (4128, 2.02)
    assert facts.kv_cache_memory_bytes == facts.available_kv_cache_bytes == GIB


@pytest.mark.parametrize("text", EXAMPLES.values(), ids=EXAMPLES)
def test_real_logs_do_not_contradict_themselves(text: str) -> None:
    assert check(read(text)) == []


@pytest.mark.parametrize("text", EXAMPLES.values(), ids=EXAMPLES)
def test_every_fact_names_a_line_that_has_it(text: str) -> None:
    facts = read(text)
    lines = text.split("\n")
    assert facts.lines
    for name, number in facts.lines.items():
        assert getattr(facts, name) is not None
        value = getattr(facts, name)
        if isinstance(value, int) and not isinstance(value, bool) and not name.endswith("_bytes"):
            assert str(value) in lines[number - 1].replace(",", ""), name


@pytest.mark.parametrize(
    ("line", "field", "expected"),
    [
        ("INFO worker.py:1] Loading model weights took 8.5107 GB", "weights_bytes", gib(8.5107)),
        ("Model loading took 0.2389 GB and 0.97 seconds", "weights_bytes", gib(0.2389)),
        ("non_torch_memory takes -0.05GiB;", "non_torch_bytes", gib(-0.05)),
        ("Available KV cache memory: -23.55 GiB", "available_kv_cache_bytes", gib(-23.55)),
        ("Current kv cache memory in use is 7010910208 bytes.", "available_kv_cache_bytes", 7_010_910_208),
        ("[kv_cache_utils.py:524] # GPU blocks: 27487", "num_gpu_blocks", 27_487),
        ("2 Engines: vllm cache_config_info with initialization after num_gpu_blocks is: 9000", "num_gpu_blocks", 4500),
        ("GPU + host KV cache size: 1,000 tokens, Maximum concurrency for", "kv_cache_tokens", 1000),
        ("vLLM server version 0.32.0+cpu, serving model a/b", "vllm_version", "0.32.0+cpu"),
        ("vLLM server version 0.32.0, serving model a/b", "model", "a/b"),
        (
            "Initial free memory 22.1 GiB, reserved 4.00GiB memory for KV Cache as specified by kv_cache_memory_bytes",
            "kv_cache_memory_bytes",
            4 * GIB,
        ),
        (
            "Initial free memory: 77.66 GiB; Requested memory: 0.95 (util), 75.23 GiB",
            "requested_memory_bytes",
            gib(75.23),
        ),
        (
            "Initial free memory: 77.66 GiB, free memory: 60.1 GiB, requested GPU memory: 71.27 GiB",
            "free_memory_bytes",
            gib(77.66),
        ),
        (
            "worker init memory snapshot: torch_peak=0.0GiB, free_memory=77.66GiB, total_memory=79.19GiB, cuda",
            "total_memory_bytes",
            gib(79.19),
        ),
        (
            "Memory profiling takes 3.02 seconds. Total non KV cache memory: 16.2GiB; torch peak memory increase: "
            "2.03GiB; non-torch forward increase memory: 2.07GiB; weights memory: 12.11GiB.",
            "activation_bytes",
            gib(2.03),
        ),
        (
            "Auto-fit max_model_len: full model context length 32768 fits in available GPU memory",
            "auto_fit_max_model_len",
            32_768,
        ),
        (
            "Setting attention block size to 528 tokens to ensure that attention page size is >= mamba page size.",
            "block_size",
            528,
        ),
        (
            "Capping cudagraph capture sizes from max 512 to 480 to fit Mamba cache blocks (483 blocks available).",
            "num_gpu_blocks",
            483,
        ),
    ],
)
def test_a_line_alone_is_read(line: str, field: str, expected: object) -> None:
    facts = read(line)
    assert getattr(facts, field) == expected
    assert facts.lines[field] == 1


@pytest.mark.parametrize(
    "line",
    [
        "Padding mamba page size by 0.76% to ensure that mamba page size and attention page size are exactly equal.",
        "Add 3 padding layers, may waste at most 10.00% KV cache memory",
        "kv cache group sizes (16, 16, 16)",
        "GPU KV cache size: 6,288 tokens\nMaximum concurrency for 8,192 tokens per request: 1.50x",
    ],
)
def test_layers_of_several_kinds_are_noticed(line: str) -> None:
    facts = read(f"Available KV cache memory: 1.0 GiB\n{line}")
    assert facts.is_hybrid
    assert len(facts.hybrid_hints) == 1


# Errors.


@pytest.mark.parametrize(
    ("line", "kind", "numbers"),
    [
        (
            "ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired GPU memory "
            "utilization (0.9, 19.84 GiB). Decrease GPU memory utilization or reduce",
            "free_memory_below_desired",
            {
                "free_bytes": gib(19.77),
                "total_bytes": gib(22.05),
                "gpu_memory_utilization": 0.9,
                "requested_bytes": gib(19.84),
            },
        ),
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
            "initializing the engine.",
            "no_available_memory",
            {},
        ),
        (
            "ValueError: To serve at least one request with the model's max seq len (1048576), (24.00 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (9.97 GiB). Based on the available memory, the "
            "estimated maximum model length is 435600. Try increasing `gpu_memory_utilization`",
            "max_model_len_exceeds_kv_cache",
            {
                "max_model_len": 1_048_576,
                "needed_bytes": 24 * GIB,
                "available_bytes": gib(9.97),
                "estimated_max_model_len": 435_600,
            },
        ),
        (
            "ValueError: To serve at least one request with the models's max seq len (4096), (2.00 GB KV cache is "
            "needed, which is larger than the available KV cache memory (1.50 GB). Try increasing",
            "max_model_len_exceeds_kv_cache",
            {"max_model_len": 4096, "needed_bytes": 2 * GIB, "available_bytes": gib(1.5)},
        ),
        (
            "ValueError: The model's max seq len (29000) is larger than the maximum number of tokens that can be "
            "stored in KV cache (23648). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`",
            "max_model_len_exceeds_kv_cache",
            {"max_model_len": 29_000, "kv_cache_tokens": 23_648},
        ),
        (
            "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (969). Each decode sequence",
            "mamba_blocks_exceeded",
            {"max_num_seqs": 1024, "num_gpu_blocks": 969},
        ),
        (
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try",
            "out_of_memory_sampler_warmup",
            {"num_requests": 1024},
        ),
        (
            "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (3).",
            "heads_not_divisible",
            {"num_attention_heads": 28, "tensor_parallel_size": 3},
        ),
        (
            "ValueError: User-specified max_model_len (65536) is greater than the derived max_model_len "
            "(max_position_embeddings=32768.0 or model_max_length=None in model's config.json).",
            "max_model_len_exceeds_model",
            {"max_model_len": 65_536, "derived_max_model_len": 32_768},
        ),
        (
            "ValueError: max_num_batched_tokens (2048) is smaller than max_model_len (4096). This effectively limits",
            "budget_below_max_model_len",
            {"max_num_batched_tokens": 2048, "max_model_len": 4096},
        ),
        (
            "ValueError: max_num_batched_tokens (128) must be greater than or equal to max_num_seqs (256).",
            "budget_below_max_num_seqs",
            {"max_num_batched_tokens": 128, "max_num_seqs": 256},
        ),
        ("ValueError: Cannot auto-fit max_model_len: not enough GPU memory available", "auto_fit_failed", {}),
        (
            "AssertionError: Error in memory profiling. Initial free memory 60.2 GiB, current free memory 61.7 GiB.",
            "memory_profiling_error",
            {"initial_free_bytes": gib(60.2), "current_free_bytes": gib(61.7)},
        ),
        (
            "ValueError: Available memory on node 0 (10.00/23.54 GiB) on kv cache allocation is less than requested "
            "memory for kv (16.0 GiB). Decrease",
            "host_memory_below_desired",
            {"free_bytes": 10 * GIB, "total_bytes": gib(23.54), "requested_bytes": 16 * GIB},
        ),
        ("RuntimeError: Engine core initialization failed. See root cause above.", "engine_core_failed", {}),
    ],
)
def test_an_error_is_classified_with_its_numbers(line: str, kind: str, numbers: dict[str, float]) -> None:
    facts = read(f"(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] {line}")
    assert [(error.kind, error.numbers, error.line) for error in facts.errors] == [(kind, numbers, 1)]
    assert kind in ERROR_KINDS
    assert not facts.started


TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 79.25 GiB "
    "of which 300.50 MiB is free."
)


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ("Starting to load model a/b...", "out_of_memory_weights"),
        ("Model loading took 60.1 GiB memory and 9 seconds", "out_of_memory_profiling"),
        ("GPU KV cache size: 1,000 tokens", "out_of_memory_kv_cache"),
        ("Capturing CUDA graphs (decode, FULL):  10%|█         | 5/51 [00:01<00:00]", "out_of_memory_graph_capture"),
        ("Application startup complete.", "out_of_memory_serving"),
    ],
)
def test_what_ran_out_of_memory_is_told_by_what_came_before(before: str, kind: str) -> None:
    error = read(f"(W pid=1) {before}\n(W pid=1) {TORCH}").errors[0]
    assert error.kind == kind
    assert error.numbers == {"tried_bytes": GIB // 2, "total_bytes": gib(79.25), "free_bytes": round(300.5 * 2**20)}


def test_an_error_that_three_tracebacks_repeat_is_one_and_hides_that_the_engine_failed() -> None:
    line = "ValueError: No available memory for the cache blocks. Try increasing"
    text = f"EngineCore failed to start.\n[rank0]: {line}\n(APIServer pid=1) {line}\nEngine core initialization failed."
    assert [(error.kind, error.line) for error in read(text).errors] == [("no_available_memory", 2)]


# What is wrapped around the messages.


def coloured(text: str) -> str:
    return "\n".join(
        line.replace(" INFO ", " \x1b[32mINFO\x1b[0m \x1b[90m").replace("(EngineCore", "\x1b[0;36m(EngineCore")
        + "\x1b[0;0m"
        for line in text.split("\n")
    )


def as_json(text: str, key: str) -> str:
    return "\n".join(
        json.dumps({"ts": "2026-01-01T00:00:00Z", key: line, "stream": "stderr"}) for line in text.split("\n")
    )


WRAPPINGS: dict[str, Callable[[str], str]] = {
    "colours": coloured,
    "colours without the escape": lambda text: coloured(text).replace("\x1b", ""),
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "compose": lambda text: "\n".join(f"vllm-1  | {line}" for line in text.split("\n")),
    "kubectl --prefix": lambda text: "\n".join(f"[pod/vllm-0/vllm] {line}" for line in text.split("\n")),
    "kubectl --timestamps": lambda text: "\n".join(
        f"2026-10-03T16:22:17.123456789Z {line}" for line in text.split("\n")
    ),
    "containerd": lambda text: "\n".join(f"2026-10-03T16:22:17.1Z stdout F {line}" for line in text.split("\n")),
    "docker json": lambda text: as_json(text, "log"),
    "json messages": lambda text: as_json(text, "message"),
    "json in json": lambda text: as_json(as_json(text, "message"), "log"),
    "coloured compose json": lambda text: "\n".join(
        f"a | {line}" for line in as_json(coloured(text), "log").split("\n")
    ),
}


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_wrappings_change_no_fact(wrap: Callable[[str], str], example: str) -> None:
    wrapped = read(wrap(example))
    plain = read(example)
    assert without_places(wrapped) == without_places(plain)
    assert wrapped.lines == plain.lines


def test_the_process_in_fields_of_vllms_own_json_is_the_rank() -> None:
    record = {
        "levelname": "INFO",
        "vllm_process_name": "Worker_TP1",
        "process": 7,
        "message": "Model loading took 2.5 GiB memory",
    }
    assert read(json.dumps(record)).ranks[0].process == "Worker_TP1"


def test_an_open_file_is_read_like_its_text(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(V1_019, encoding="utf-8")
    with path.open(encoding="utf-8") as file:
        assert read_startup_log(file, name="vllm.log") == read(V1_019)


def test_a_text_without_a_line_of_vllm_is_refused_with_what_was_looked_for() -> None:
    with pytest.raises(ValueError, match=r"my\.log: no line of vLLM's.*GPU KV cache size"):
        read_startup_log("INFO: hello\nversion 1.2.3\n", name="my.log")


# Several ranks, engines, start-ups.


def test_the_rank_with_the_least_kv_cache_counts_and_all_are_kept() -> None:
    text = (
        "(VllmWorker rank=0 pid=1) INFO Model loading took 10.30 GiB memory\n"
        "(VllmWorker rank=1 pid=2) INFO Model loading took 9.90 GiB memory\n"
        "(VllmWorker rank=0 pid=1) INFO Available KV cache memory: 14.26 GiB\n"
        "(VllmWorker rank=1 pid=2) INFO Available KV cache memory: 15.01 GiB\n"
        "INFO GPU KV cache size: 116,800 tokens\nINFO GPU KV cache size: 122,944 tokens"
    )
    facts = read(text)
    assert (facts.available_kv_cache_bytes, facts.weights_bytes) == (gib(14.26), gib(10.30))
    assert [rank.available_kv_cache_bytes for rank in facts.ranks] == [gib(14.26), gib(15.01)]
    assert [rank.process for rank in facts.ranks] == ["VllmWorker rank=0", "VllmWorker rank=1"]
    assert (facts.kv_cache_tokens, [pool.kv_cache_tokens for pool in facts.pools]) == (116_800, [116_800, 122_944])
    assert facts.lines["available_kv_cache_bytes"] == 3


def test_engines_of_a_data_parallel_server_are_one_start_up_and_the_sum_of_their_blocks_is_divided() -> None:
    engine = (
        "(EngineCore_DP{0} pid={0}) INFO Initializing a V1 LLM engine (v0.11.2) with config: model='m', "
        "data_parallel_size=2, seed=0,"
    )
    pool = "(EngineCore_DP{0} pid={0}) INFO GPU KV cache size: 16,000 tokens"
    blocks = (
        "(APIServer pid=9) INFO Engine 00{0}: vllm cache_config_info with initialization after num_gpu_blocks is: 2000"
    )
    facts = read("\n".join(line.format(rank) for line in (engine, pool, blocks) for rank in (0, 1)))
    assert (facts.num_startups, facts.data_parallel_size, len(facts.pools)) == (1, 2, 2)
    assert (facts.num_gpu_blocks, facts.kv_cache_tokens) == (1000, 16_000)
    assert any("sum of 2 engines" in note for note in facts.notes)


def test_of_several_start_ups_the_last_is_read_and_the_log_says_so() -> None:
    failed = V1_032 + "ValueError: No available memory for the cache blocks."
    facts = read(f"{failed}\n{V1_019}")
    assert without_places(replace(facts, num_startups=1)) == without_places(read(V1_019))
    assert facts.num_startups == 2
    first = len(failed.split("\n")) + 4
    assert facts.notes[0] == f"2 start-ups in it: the last, from line {first}, is read"
    assert "version 0.19.0" in f"{failed}\n{V1_019}".split("\n")[first - 1]


def test_lines_of_a_server_before_its_restart_do_not_count() -> None:
    tail = (
        "INFO Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 900 reqs, "
        "Waiting: 0 reqs"
    )
    facts = read(f"{tail}\n{CPU_032}")
    assert facts.serving is None
    assert facts.num_startups == 2


def test_of_several_containers_the_one_that_started_last_is_read() -> None:
    a, b = V1_019.split("\n"), CPU_032.split("\n")
    mixed = [f"a-1  | {line}" for line in a[:7]]
    for at in range(len(a)):
        mixed += [f"b-1  | {line}" for line in b[at : at + 1]] + [f"a-1  | {line}" for line in a[at + 7 : at + 8]]
    facts = read("\n".join(mixed))
    assert facts.notes[0] == "2 containers write to this log; read is b-1"
    assert facts.model == "model"


# The periodic lines.


def test_the_periodic_lines_of_v1_are_summed_up() -> None:
    text = (
        "Engine 000: Avg prompt throughput: 6102.8 tokens/s, Avg generation throughput: 1221.7 tokens/s, Running: 259 "
        "reqs, Waiting: 535 reqs, Deferred: 3 reqs, Preemptions: 4, GPU KV cache usage: 82.3%, Prefix cache hit rate: "
        "32.2%\n"
        "Engine 001: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 260 reqs, "
        "Waiting: 2 reqs, Preemptions: 5, GPU KV cache usage: 99.9%, Prefix cache hit rate: 40.0%, External prefix "
        "cache hit rate: 7.0%\n"
        "Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 2 reqs, Wai"
    )
    serving = read(text).serving
    assert serving is not None
    assert (serving.num_lines, serving.first_line, serving.last_line) == (2, 1, 2)
    assert (serving.max_running, serving.max_waiting, serving.max_kv_cache_usage_percent) == (260, 535, 99.9)
    assert (serving.num_preemptions, serving.prefix_cache_hit_rate_percent) == (9, 40.0)


def test_the_periodic_lines_of_v0_are_summed_up() -> None:
    text = (
        "Avg prompt throughput: 9.9 tokens/s, Avg generation throughput: 2.0 tokens/s, Running: 91 reqs, Swapped: 0 "
        "reqs, Pending: 7 reqs, GPU KV cache usage: 95.2%, CPU KV cache usage: 99.0%.\n"
        "Prefix cache hit rate: GPU: 12.50%, CPU: 0.00%\n"
        "WARNING Sequence group 1 is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache "
        "space. This can affect the end-to-end performance. total_num_cumulative_preemption=51"
    )
    serving = read(text).serving
    assert serving is not None
    assert (serving.max_running, serving.max_waiting, serving.max_kv_cache_usage_percent) == (91, 7, 95.2)
    assert (serving.num_preemptions, serving.prefix_cache_hit_rate_percent) == (51, 12.5)


# Contradictions.


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("4,128 tokens", "4,160 tokens", "4,160 tokens are not 129 blocks of 32"),
        ("request: 2.02x", "request: 1.02x", "1.02 requests of 2,048 tokens are not what 4,128 tokens hold (2.02)"),
    ],
)
def test_a_pool_that_does_not_add_up_is_named(old: str, new: str, complaint: str) -> None:
    found = check(read(CPU_032.replace(old, new)))
    assert len(found) == 1
    assert complaint in found[0]
    assert found[0].startswith("line ")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("(0.95, 75.23 GiB)", "(0.95, 71.23 GiB)", "71.23 GiB are not 0.95 of 79.19 GiB (75.23 GiB)"),
        ("12.11 GiB for weight", "13.11 GiB for weight", "the parts sum to 76.23 GiB, but 75.23 GiB were requested"),
    ],
)
def test_parts_that_do_not_add_up_are_named_with_their_rank(old: str, new: str, complaint: str) -> None:
    found = check(read(V1_019.replace(old, new)))
    assert any(complaint in sentence and sentence.startswith("Worker_TP0: ") for sentence in found)


def test_an_equivalent_utilization_that_is_not_the_estimate_is_named() -> None:
    found = check(read(V1_032.replace("=0.5413", "=0.5613")))
    assert len(found) == 1
    assert "0.5613 is not 0.62 less 14.00 of 178.00 GiB" in found[0]


def test_an_error_whose_numbers_do_not_explain_it_is_named() -> None:
    line = (
        "Free memory on device (30.00/40.00 GiB) on startup is less than desired GPU memory utilization "
        "(0.5, 20.00 GiB)."
    )
    assert check(read(line)) == ["line 1: 30.00 GiB free are not less than 20.00 GiB"]


def test_tokens_of_a_length_that_is_no_multiple_of_the_block_are_no_contradiction() -> None:
    # From 0.20 on: int(1000 / ceil(1001 / 16) * 1001) = int(15.873 * 1001)
    text = (
        "INFO non-default args: {'block_size': 16}\n# GPU blocks: 1000\nGPU KV cache size: 15,888 tokens\n"
        "Maximum concurrency for 1,001 tokens per request: 15.87x"
    )
    assert check(read(text)) == []


# Laws.

PREFIXES = st.sampled_from(
    [
        "",
        "(EngineCore pid=4) ",
        "(EngineCore_DP0 pid=4) ",
        "\x1b[0;36m(EngineCore pid=4)\x1b[0;0m ",
        "[rank0]: ",
        "vllm | ",
    ]
)
STAMPS = st.sampled_from(
    ["", "INFO 10-03 16:22:17 [gpu_worker.py:298] ", "2026-10-03T16:22:17Z ", "INFO 10-03 worker.py:9] "]
)
ENDS = st.sampled_from(["", "\r", "\x1b[0m", "   "])
HUNDREDTHS = st.integers(0, 10_000_000).map(lambda hundredths: hundredths / 100)


@given(
    sizes=st.tuples(*[HUNDREDTHS] * 5),
    counts=st.tuples(*[st.integers(1, 10**9)] * 3),
    concurrency=HUNDREDTHS,
    order=st.permutations(range(8)),
    around=st.lists(st.tuples(STAMPS, ENDS), min_size=8, max_size=8),
    prefix=PREFIXES,
    noise=st.lists(
        st.sampled_from(["", "INFO nothing", "█▄▀", "Traceback (most recent call last):", "{'a': 1"]), max_size=4
    ),
)
def test_what_is_written_is_read_in_any_order_behind_any_prefix(
    sizes: tuple[float, ...],
    counts: tuple[int, ...],
    concurrency: float,
    order: list[int],
    around: list[tuple[str, str]],
    prefix: str,
    noise: list[str],
) -> None:
    weights, available, graphs, estimate, requested = sizes
    tokens, length, blocks = counts
    messages = [
        f"Model loading took {weights:.2f} GiB memory and 1.5 seconds",
        f"Available KV cache memory: {available} GiB",
        f"Graph capturing finished in 7 secs, took {graphs:.2f} GiB",
        f"Estimated CUDA graph memory: {estimate:.2f} GiB total",
        f"worker requested memory: {requested}GiB",
        f"GPU KV cache size: {tokens:,} tokens",
        f"Maximum concurrency for {length:,} tokens per request: {concurrency:.2f}x",
        f"# GPU blocks: {blocks}, # CPU blocks: 2048",
    ]
    lines = [f"{prefix}{around[at][0]}{messages[at]}{around[at][1]}" for at in order]
    text = "\n".join([*noise, *lines])
    facts = read(text)
    assert facts.weights_bytes == gib(weights)
    assert facts.available_kv_cache_bytes == gib(available)
    assert facts.cudagraph_actual_bytes == gib(graphs)
    assert facts.cudagraph_estimate_bytes == gib(estimate)
    assert facts.requested_memory_bytes == gib(requested)
    assert (facts.kv_cache_tokens, facts.max_concurrency_tokens, facts.num_gpu_blocks) == (tokens, length, blocks)
    assert facts.max_concurrency == concurrency
    assert facts.lines["kv_cache_tokens"] == len(noise) + order.index(5) + 1
    assert len(facts.ranks) == 1


def plain_values() -> st.SearchStrategy[object]:
    atoms = (
        st.none()
        | st.booleans()
        | st.integers(-(10**12), 10**12)
        | st.text(max_size=20)
        | st.floats(allow_nan=False, allow_infinity=False)
    )
    return st.recursive(
        atoms,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    )


@given(st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,12}", fullmatch=True), plain_values(), min_size=1, max_size=5))
@example({"a": 'it\'s "here" {, \\', "b": {"c": [1.5, None]}})
def test_arguments_come_back_as_they_were_printed(arguments: dict[str, object]) -> None:
    assume(not any("\r" in repr(value) or "[" in str(value) for value in arguments.values() if isinstance(value, str)))
    assume(re.search(r"\[\d{1,3}(;\d{1,3})*m", repr(arguments)) is None)  # a colour that lost its escape
    assert read(f"INFO non-default args: {arguments!r}").non_default_args == arguments
    namespace = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    assert read(f"INFO args: Namespace({namespace})").non_default_args == arguments


@given(st.integers(0, 400), st.sampled_from(sorted(EXAMPLES)))
def test_a_log_that_is_cut_off_never_gives_other_figures(cut: int, name: str) -> None:
    """A line cut in the middle loses its figures; it does not change them."""
    whole = read(EXAMPLES[name])
    text = "\n".join(line[: max(0, len(line) - cut)] + " …" for line in EXAMPLES[name].split("\n"))
    try:
        part = read(text)
    except ValueError:
        return
    whole_ranks = {rank.process: rank for rank in whole.ranks}
    for rank in part.ranks:
        if rank.process in whole_ranks:
            for field in ("total_memory_bytes", "requested_memory_bytes", "available_kv_cache_bytes"):
                assert getattr(rank, field) in (None, getattr(whole_ranks[rank.process], field))
    assert part.kv_cache_tokens in (None, whole.kv_cache_tokens)
    assert part.tensor_parallel_size in (None, whole.tensor_parallel_size)
    assert part.non_default_args.items() <= whole.non_default_args.items()


PIECES = [piece for text in EXAMPLES.values() for piece in text.replace("\n", " ").split(" ")]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=60).map(" ".join))
@example("non-default args: {'a': " + "(" * 5000)
@example("non-default args: {'a': " + "-" * 10_000 + "1}")
@example("non-default args: {'a': " + "9" * 5000 + ", 'b': '\\N{bad}', 'c': {1: 2, **x}, [1]: 2}")
@example('{"log": ' + "[" * 3000 + "}")
@example('{"log": {"log": {"message": "Available KV cache memory: 1.0 GiB"}}}')
@example("Available KV cache memory: " + "9" * 4000 + " GiB\nGPU KV cache size: " + "9," * 4000 + "9 tokens")
@example("Initializing a V1 LLM engine (v1) with config: model=" + "a." * 9000 + "b, max_seq_len=-1, model=3,")
def test_no_text_raises_anything_but_value_error(text: str) -> None:
    try:
        facts = read(text)
    except ValueError:
        return
    check(facts)


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_value_error(data: bytes) -> None:
    for text in (data.decode("utf-8", "replace"), data.decode("latin-1")):
        for reader in (read_startup_log, read_metrics):
            with contextlib.suppress(ValueError):
                reader(text, name="x")


# Real start-ups and the document.


def test_the_lines_that_the_document_shows_are_read() -> None:
    text = (REPO_ROOT / "docs" / "memory-truth.md").read_text(encoding="utf-8")
    logs, metrics = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    for line in logs.strip().split("\n"):
        facts = read(line)
        assert facts.lines or facts.serving or facts.non_default_args, line
        assert check(facts) == [], line
    assert read_metrics(metrics, name="m").kv_cache_tokens == 4128


def test_the_figures_of_real_start_ups_survive_and_add_up(shared: Path) -> None:
    """Their figures in the sentences that vLLM writes: all are read back, and those of one rank sum to the request."""
    with (shared / "memory" / "startups.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["quality"] == "log"]
    complete = ("free_at_start_gib", "gpu_total_gib", "usable_gib", "weights_gib", "activation_gib", "non_torch_gib")
    num_checked = 0
    for row in rows:
        if row["pp"] not in ("", "1.0") or not all(row[key] for key in (*complete, "kv_avail_gib", "kv_tokens", "gmu")):
            continue
        facts = read(
            f"(Worker_TP0 pid=8) INFO [gpu_worker.py:1] Available KV cache memory: {row['kv_avail_gib']} GiB\n"
            f"(EngineCore pid=7) INFO [kv_cache_utils.py:1] GPU KV cache size: {float(row['kv_tokens']):,.0f} tokens\n"
            f"(Worker_TP0 pid=8) INFO [gpu_worker.py:1] Free memory on device ({row['free_at_start_gib']}/"
            f"{row['gpu_total_gib']} GiB) on startup. Desired GPU memory utilization is ({row['gmu']}, "
            f"{row['usable_gib']} GiB). Actual usage is {row['weights_gib']} GiB for weight, {row['activation_gib']} "
            f"GiB for peak activation, {row['non_torch_gib']} GiB for non-torch memory, "
            f"and 1.0 GiB for CUDAGraph memory."
        )
        assert facts.available_kv_cache_bytes == gib(float(row["kv_avail_gib"]))
        assert facts.kv_cache_tokens == float(row["kv_tokens"])
        assert facts.weights_bytes == gib(float(row["weights_gib"]))
        assert check(facts) == [], row["source"]
        num_checked += 1
    assert num_checked > 25


# Metrics.

METRICS = """
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="False",engine="0",\
gpu_memory_utilization="0.92",kv_cache_max_concurrency="2.015625",kv_cache_memory_bytes="1073741824",\
kv_cache_size_tokens="4128",num_cpu_blocks="None",num_gpu_blocks="129",num_gpu_blocks_override="129"} 1.0
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.953125
vllm:num_preemptions_total{engine="0",model_name="tiny"} 49.0
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 1e3
http_requests_total{handler="/v1/\\"completions\\"",method="POST"} 60.0 1795965485000
"""
INFO = 'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}",engine="{engine}"{more}}} 1\n'


def test_the_cache_config_and_the_counters_are_read() -> None:
    facts = read_metrics(METRICS, name="metrics.txt")
    assert (facts.num_gpu_blocks, facts.block_size, facts.kv_cache_tokens) == (129, 32, 4128)
    assert (facts.max_concurrency, facts.gpu_memory_utilization, facts.cache_dtype) == (2.015625, 0.92, "auto")
    assert (facts.enable_prefix_caching, facts.num_cpu_blocks, facts.num_gpu_blocks_override) == (False, None, 129)
    assert (facts.num_requests_running, facts.num_requests_waiting, facts.kv_cache_usage) == (3, 2, 0.953125)
    assert (facts.num_preemptions, facts.prefix_cache_queries_tokens, facts.model) == (49, 1000, "tiny")
    assert facts.lines["num_gpu_blocks"] == 4
    assert facts.notes == ()


def test_older_metrics_have_their_pool_counted_from_blocks() -> None:
    text = INFO.format(blocks=573, engine="", more=',swap_space_bytes="4294967296"') + "vllm:gpu_cache_usage_perc 0.5"
    facts = read_metrics(text, name="m")
    assert (facts.kv_cache_tokens, facts.kv_cache_usage) == (573 * 16, 0.5)
    assert facts.tokens_are_counted
    assert facts.notes == ()


@pytest.mark.parametrize(
    ("engine", "more", "releases"),
    [
        ("", ',swap_space_bytes="4294967296"', (None, "0.17")),
        ("0", ',swap_space="4"', ("0.9", "0.17")),
        ("0", "", ("0.9", "0.23")),
        ("0", ',kv_cache_size_tokens="9168"', ("0.24", None)),
    ],
)
def test_labels_tell_which_releases_a_server_can_be_of(
    engine: str, more: str, releases: tuple[str | None, str | None]
) -> None:
    facts = read_metrics(INFO.format(blocks=573, engine=engine, more=more), name="m")
    assert (facts.first_release, facts.last_release) == releases


def test_the_blocks_of_several_engines_are_their_sum() -> None:
    text = "".join(INFO.format(blocks=4000, engine=engine, more=',kv_cache_size_tokens="32000"') for engine in (0, 1))
    facts = read_metrics(text, name="m")
    assert [engine.num_gpu_blocks for engine in facts.engines] == [2000, 2000]
    assert facts.kv_cache_tokens == 32_000
    assert facts.notes == ("num_gpu_blocks is the sum of 2 engines; divided evenly",)


def test_the_tokens_of_a_label_count_before_those_of_the_blocks() -> None:
    """Which of them fits depends on the model, which metrics do not tell."""
    text = INFO.format(blocks=1000, engine=0, more=',kv_cache_size_tokens="15000"')
    facts = read_metrics(text, name="m")
    assert (facts.kv_cache_tokens, facts.num_gpu_blocks, facts.notes) == (15_000, 1000, ())


# --- two servers in one log


def _of(pid: int, text: str) -> str:
    return f"(EngineCore pid={pid}) INFO 03-02 10:00:01 [core.py:97] {text}\n"


def _start(pid: int) -> str:
    return _of(pid, "Initializing a V1 LLM engine (v0.19.0) with config: model='m', max_seq_len=8192")


def test_two_servers_that_write_in_turns_are_refused_with_their_processes() -> None:
    mixed = _start(9) + _start(19) + _of(9, "Available KV cache memory: 57.50 GiB")
    with pytest.raises(ValueError, match=r"x\.log, line 3: two servers .* EngineCore pid=9 and EngineCore pid=19"):
        read_startup_log(mixed + _of(19, "GPU KV cache size: 47,104 tokens"), name="x.log")


def test_a_server_that_started_again_is_read() -> None:
    first, second = (
        _start(pid) + _of(pid, f"GPU KV cache size: {tokens} tokens") for pid, tokens in ((9, 160), (19, 320))
    )
    assert read_startup_log(first + second, name="x").kv_cache_tokens == 320


def test_data_parallel_engines_and_workers_of_one_server_are_no_two_servers() -> None:
    engines = "".join(
        f"(EngineCore_DP{rank} pid={9 + rank}) INFO GPU KV cache size: {tokens} tokens\n"
        f"(VllmWorker rank=0 pid={20 + rank}) INFO Available KV cache memory: 2.00 GiB\n"
        for tokens in (320, 480)
        for rank in (0, 1)
    )
    assert read_startup_log(engines, name="x").kv_cache_tokens == 320


def series(blocks: int, instance: str, **more: str) -> dict[str, object]:
    labels = {"__name__": "vllm:cache_config_info", "block_size": "16", "num_gpu_blocks": str(blocks), "engine": "0"}
    return {"metric": labels | {"instance": instance} | more, "value": [1_757_000_000, "1"]}


def test_the_answer_of_prometheus_is_read_and_the_smallest_of_several_servers_counts() -> None:
    result = [series(500, "b:8000"), series(400, "a:8000"), {"metric": {}, "value": [0, "1"]}]
    answer = {"status": "success", "data": {"resultType": "vector", "result": result}}
    facts = read_metrics(json.dumps(answer), name="q.json")
    assert (facts.num_gpu_blocks, [engine.instance for engine in facts.engines]) == (400, ["b:8000", "a:8000"])
    assert any("no name" in note for note in facts.notes)


def test_the_last_value_of_a_range_counts() -> None:
    labels = {"__name__": "vllm:num_requests_running"}
    result = [{"metric": labels, "values": [[1, "72"], [2, "5"]]}]
    assert (
        read_metrics(json.dumps({"data": {"resultType": "matrix", "result": result}}), name="q").num_requests_running
        == 5
    )


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("up 1\n", "x: no series of vLLM"),
        ('vllm:a{b="c} 1\nup 1', r"x:1: .*is not a sample"),
        ("\nvllm:a one\nup 1", r"x:2: .*is not a sample"),
        (INFO.format(blocks="many", engine=0, more=""), "x:1: num_gpu_blocks='many' .* is not a whole number"),
        ('{"status": "error", "error": "bad_data: parse error"}', "x: Prometheus answered with an error: bad_data"),
        ('{"status": "success", "data": {"result": [{"metric": {}}]}}', "x: series 1 lacks"),
        ("{broken", "x: neither the text of /metrics nor JSON"),
        ('{"a": 1}', "x: JSON without a list of series"),
    ],
)
def test_metrics_that_cannot_be_read_say_where_and_why(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_metrics(text, name="x")


def test_a_last_line_that_was_cut_off_is_passed_over() -> None:
    assert "1 lines are not samples" in read_metrics(METRICS + "vllm:prompt_tokens_total{engi", name="m").notes[0]


@given(
    name=st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,20}", fullmatch=True),
    labels=st.dictionaries(
        st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True), st.text(max_size=12), max_size=4
    ),
    value=st.floats(allow_nan=False),
    stamp=st.sampled_from(["", " 1795965485000", ' # {trace_id="a"} 1 1.5']),
    comma=st.booleans(),
)
def test_every_sample_comes_back_as_it_was_exposed(
    name: str, labels: dict[str, str], value: float, stamp: str, comma: bool
) -> None:
    assume(not any("\r" in text for text in labels.values()))
    escaped = {key: text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for key, text in labels.items()}
    inner = ",".join(f'{key}="{text}"' for key, text in escaped.items()) + ("," if comma and labels else "")
    shown = {float("inf"): "+Inf", float("-inf"): "-Inf"}.get(value, repr(value))
    [sample] = parse_exposition(f"# TYPE {name} gauge\n{name}{{{inner}}} {shown}{stamp}", name="m")
    assert (sample.name, sample.labels, sample.value, sample.line) == (name, labels, value, 2)


def test_the_recorded_metrics_of_a_real_server_are_read(shared: Path) -> None:
    folder = shared / "live_vllm_cpu" / "data"
    for path in sorted(folder.glob("*/*/metrics_after.txt.gz")):
        config = json.loads((path.parents[1] / "engine_config.json").read_text(encoding="utf-8"))
        facts = read_metrics(gzip.decompress(path.read_bytes()).decode(), name=path.name)
        assert facts.num_gpu_blocks == config["num_gpu_blocks"]
        assert facts.block_size == config["block_size"]
        assert facts.kv_cache_tokens == config["num_gpu_blocks"] * config["block_size"]
        assert facts.max_concurrency == facts.kv_cache_tokens / config["max_model_len"]
        assert facts.enable_prefix_caching == config["prefix_caching"]
    preempted = folder / "QB2" / "e_preempt" / "metrics_after.txt.gz"
    assert read_metrics(gzip.decompress(preempted.read_bytes()).decode(), name="m").num_preemptions == 49
