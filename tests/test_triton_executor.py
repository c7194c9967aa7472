"""The GPU executor's own logic - graphs, padding, staging, timing - on the CPU as its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import VOCAB, TinyEngine, tiny_config, tiny_decoder, tiny_executor

from windtunnel.executor.all_reduce import AllReduceTable, measure, step_all_reduce_s
from windtunnel.executor.cache import PagedKvCache
from windtunnel.executor.devices import GpuMissing, HostDevice, require_gpu
from windtunnel.executor.graphs import capture_sizes
from windtunnel.executor.model import Decoder
from windtunnel.executor.model_config import DecoderConfig
from windtunnel.executor.reference import TorchOps
from windtunnel.executor.sampling import SamplingParams
from windtunnel.executor.staging import ALIGNMENT, Spec, Staging
from windtunnel.executor.triton_executor import TritonExecutor
from windtunnel.executor.weights import random_weights
from windtunnel.sim.engine.config import SchedulerConfig

MODEL = tiny_decoder()
ROOMY = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=96, block_size=4, num_gpu_blocks=512)
TIGHT = replace(ROOMY, num_gpu_blocks=26, max_num_batched_tokens=24)


class RecordingDevice(HostDevice):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.num_replays: dict[int, int] = {}
        self.num_recorded = 0
        self.taken_bytes = 0

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.num_recorded += 1
        self.taken_bytes += 1000
        replay = super().record(compute)

        def noted() -> torch.Tensor:
            out = replay()
            self.num_replays[len(out)] = self.num_replays.get(len(out), 0) + 1
            return out

        return noted

    def used_bytes(self) -> int:
        return self.taken_bytes


def executor(config: SchedulerConfig = ROOMY, model: Decoder = MODEL, **options: object) -> TritonExecutor:
    cache = PagedKvCache(model.config, config.num_gpu_blocks, config.block_size)
    options = {"device": RecordingDevice(), "max_num_seqs": config.max_num_seqs, **options}
    return TritonExecutor(model, cache, **options)


def prompts(seed: int, count: int, shared: int = 0, longest: int = 40) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    head = draw.integers(0, VOCAB, shared).tolist()
    return [head + draw.integers(0, VOCAB, draw.integers(1, longest - shared + 1)).tolist() for _ in range(count)]


def answers(
    config: SchedulerConfig, work: list[list[int]], params: list[SamplingParams], under_test
) -> list[list[int]]:
    engine = TinyEngine(config, under_test)
    under_test.adopt(engine)
    requests = [engine.add(prompt, its) for prompt, its in zip(work, params, strict=True)]
    engine.run()
    return [engine.answer(request) for request in requests]


def greedy(count: int, max_tokens: int = 12) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=max_tokens, temperature=0.0)] * count


# -- the same answers as the torch executor


@pytest.mark.parametrize("config", [ROOMY, TIGHT, replace(ROOMY, long_prefill_token_threshold=3)])
@pytest.mark.parametrize("use_graphs", [True, False])
def test_answers_are_those_of_the_torch_executor(config, use_graphs):
    work = prompts(1, 7, shared=9)
    params = [SamplingParams(max_tokens=8 + 3 * i, temperature=0.7 * (i % 2), top_p=0.9, seed=i) for i in range(7)]
    expected = answers(config, work, params, tiny_executor(config, MODEL))
    assert answers(config, work, params, executor(config, use_graphs=use_graphs)) == expected


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=4, unique=True).map(sorted),
    count=st.integers(1, 10),
)
def test_answers_do_not_depend_on_the_captured_sizes(seed, sizes, count):
    work = prompts(seed, count)
    eager = answers(ROOMY, work, greedy(count, 6), executor(use_graphs=False))
    assert answers(ROOMY, work, greedy(count, 6), executor(capture_sizes=sizes)) == eager


def test_an_fp8_cache_and_lone_prefills_of_one_token_go_through_graphs_too():
    work = [[5], [6], [7, 8, 9]]
    config = replace(ROOMY, enable_prefix_caching=False)
    found = []
    for options in ({"use_graphs": False}, {"use_graphs": True}):
        cache = PagedKvCache(MODEL.config, config.num_gpu_blocks, config.block_size, dtype=torch.float8_e4m3fn)
        under_test = TritonExecutor(MODEL, cache, device=HostDevice(), max_num_seqs=16, **options)
        found.append(answers(config, work, greedy(3), under_test))
    assert found[0] == found[1]


# -- graphs


def test_captured_sizes_are_those_of_vllm():
    assert capture_sizes(1) == (1,)
    assert capture_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert capture_sizes(256)[-3:] == (240, 248, 256)
    assert capture_sizes(300)[-4:] == (256, 272, 288, 300)
    assert capture_sizes(4096)[-2:] == (496, 512)
    assert len(capture_sizes(512)) == 51
    with pytest.raises(ValueError, match="max_num_seqs must be at least 1, got 0"):
        capture_sizes(0)


def test_decodes_are_padded_to_the_next_captured_size_and_the_padding_is_told():
    device = RecordingDevice()
    under_test = executor(capture_sizes=[2, 4], device=device)
    engine = TinyEngine(ROOMY, under_test)
    under_test.adopt(engine)
    for prompt in prompts(3, 3):
        engine.add(prompt, SamplingParams(max_tokens=4, temperature=0.0))
    engine.step()
    assert not under_test.last_device_timing.is_graph, "prefills are launched one by one"
    assert under_test.last_device_timing.num_padded_tokens == 0
    engine.step()
    timing = under_test.last_device_timing
    assert (timing.is_graph, timing.num_tokens, timing.num_padded_tokens) == (True, 3, 1)
    assert device.num_replays == {4: 1}


def test_batches_beyond_the_largest_captured_size_are_launched_one_by_one():
    device = RecordingDevice()
    under_test = executor(capture_sizes=[2], device=device)
    answers(ROOMY, prompts(4, 5), greedy(5), under_test)
    assert not device.num_replays
    assert not under_test.last_device_timing.is_graph


def test_padding_rows_leave_the_cache_as_it_is():
    under_test = executor(capture_sizes=[8])
    assert all(not keys.any() for keys in under_test.cache.keys), "capturing stored nothing"
    answers(ROOMY, [[1, 2, 3]], greedy(1), under_test)
    before = [tensor.clone() for tensor in (*under_test.cache.keys, *under_test.cache.values)]
    used = {int(block) for keys in under_test.cache.keys for block in keys.flatten(1).any(dim=1).nonzero()}
    assert 0 not in used, "nothing is stored in the null block"
    assert len(used) == -(-14 // ROOMY.block_size), "14 tokens were computed"
    assert all(torch.isfinite(tensor).all() for tensor in before)


def test_graphs_are_captured_at_start_or_when_they_are_first_needed():
    at_start, lazily = RecordingDevice(), RecordingDevice()
    assert executor(capture_sizes=[1, 2, 4], device=at_start).captured_sizes == (1, 2, 4)
    assert at_start.num_recorded == 3
    lazy = executor(capture_sizes=[1, 2, 4], device=lazily, capture_at_start=False)
    assert lazy.captured_sizes == ()
    answers(ROOMY, [[1, 2, 3]], greedy(1), lazy)
    assert lazy.captured_sizes == (1,)


def test_memory_of_graphs_and_inputs_is_told():
    without = executor(use_graphs=False).workspace_bytes
    one, two = (executor(capture_sizes=sizes).workspace_bytes for sizes in ([4], [2, 4]))
    assert without < one, "inputs of graphs count"
    assert two - one == 1000, "what a graph takes on the device counts"


@pytest.mark.parametrize("sizes", [[], [0, 1], [4, 2], [2, 2]])
def test_sizes_that_do_not_rise_are_refused(sizes):
    with pytest.raises(ValueError, match="must rise from at least 1"):
        executor(capture_sizes=sizes)


# -- timing


def test_the_parts_of_a_step_fit_into_it():
    under_test = executor()
    engine = TinyEngine(ROOMY, under_test)
    under_test.adopt(engine)
    for prompt in prompts(5, 4):
        engine.add(prompt, SamplingParams(max_tokens=3, temperature=0.0))
    for _ in range(3):
        engine.step()
        timing = under_test.last_device_timing
        assert min(timing.host_build_ns, timing.copy_ns, timing.device_ns) > 0
        assert timing.host_build_ns + timing.copy_ns + timing.device_ns <= timing.total_ns
        assert timing.total_ns == under_test.last_timing.step_ns
        assert timing.host_overhead_ns == timing.total_ns - timing.device_ns


def test_operations_are_timed_on_request_and_the_answers_stay_the_same():
    work = prompts(6, 3)
    expected = answers(ROOMY, work, greedy(3), executor())
    under_test = executor()
    engine = TinyEngine(ROOMY, under_test)
    under_test.adopt(engine)
    requests = [engine.add(prompt, SamplingParams(max_tokens=12, temperature=0.0)) for prompt in work]
    with under_test.timing_ops():
        engine.run()
    assert [engine.answer(request) for request in requests] == expected
    timings = {timing.name: timing for timing in under_test.last_op_timings}
    layers = MODEL.config.num_hidden_layers
    assert timings["attention"].num_calls == timings["rope_and_store"].num_calls == layers
    assert timings["add_rms_norm"].num_calls == 2 * layers
    assert timings["linear 64 -> 224"].num_calls == layers, "gate and up in one"
    assert timings["linear 64 -> 512"].num_calls == timings["sample"].num_calls == 1
    assert sum(timing.device_ns for timing in timings.values()) <= under_test.last_device_timing.device_ns
    assert isinstance(MODEL.ops, TorchOps), "the model is as before"


# -- inputs


def test_all_arrays_are_sent_in_one_copy_and_lie_aligned():
    staging = Staging(HostDevice(), 64)
    arrays = [
        np.arange(5),
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.zeros((0,), np.float32),
        np.ones(3, np.float32),
    ]
    places = staging.places([Spec(array.shape, array.dtype) for array in arrays])
    for place, array in zip(places.host, arrays, strict=True):
        place[...] = array
    staging.send(places.num_bytes)
    for tensor, array in zip(places.device, arrays, strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.storage_offset() * tensor.itemsize % ALIGNMENT == 0


# -- refusals


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_what_is_missing_and_what_to_do():
    cache = PagedKvCache(MODEL.config, 8, 16)
    with pytest.raises(GpuMissing, match=r"needs a GPU, but torch .*--executor torch runs on a CPU"):
        TritonExecutor(MODEL, cache)
    with pytest.raises(GpuMissing):
        require_gpu()


# -- tensor parallelism


def test_one_rank_of_a_shared_model_can_be_run_by_itself():
    config = DecoderConfig.from_hf(tiny_config()).shard(2)
    share = Decoder(config, random_weights(config), TorchOps())
    under_test = executor(model=share)
    assert under_test.cache.keys[0].shape[2] == 1, "one of two KV heads"
    answers(ROOMY, prompts(7, 3), greedy(3), under_test)
    with under_test.timing_ops():
        answers(ROOMY, prompts(7, 1), greedy(1), under_test)
    assert "linear 64 -> 112" in {timing.name for timing in under_test.last_op_timings}, "half of gate and up"


TABLE = AllReduceTable("made up for tests", {2: ((1024, 1e-5), (3072, 3e-5)), 4: ((1024, 2e-5),)})


def test_all_reduce_times_are_interpolated_between_measured_sizes(tmp_path):
    TABLE.write(tmp_path / "table.json")
    table = AllReduceTable.read(tmp_path / "table.json")
    assert table == TABLE
    assert table.seconds(2048, 2) == pytest.approx(2e-5)
    assert table.seconds(1, 2) == 1e-5
    assert table.seconds(5, 1) == table.seconds(0, 4) == 0.0
    config = DecoderConfig.from_hf(tiny_config()).shard(2)
    assert step_all_reduce_s(table, config, 16) == pytest.approx(2 * 2 * table.seconds(16 * 64 * 2, 2))
    with pytest.raises(ValueError, match="knows 2, 4 ranks, not 8"):
        table.seconds(1024, 8)
    with pytest.raises(ValueError, match="larger than the table's largest"):
        table.seconds(4096, 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "not an all-reduce table"),
        ("{", "not an all-reduce table"),
        ('{"points": {}}', "lacks 'source'"),
        ('{"source": " ", "points": {"2": [[1, 1.0]]}}', "must name its source"),
        ('{"source": "x", "points": {"2": [[2, 1.0], [2, 1.0]]}}', "bytes must rise"),
        ('{"source": "x", "points": {"2": [[2, 0.0]]}}', "must be above 0"),
        ('{"source": "x", "points": {"1": [[2, 1.0]]}}', "at least 2 ranks"),
        ('{"source": "x", "points": {}}', "at least one number of ranks"),
    ],
)
def test_a_bad_all_reduce_table_is_refused_by_name(tmp_path, text, told):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=told) as raised:
        AllReduceTable.read(path)
    assert str(path) in str(raised.value)


@pytest.mark.slow
def test_all_reduces_are_measured_between_processes():
    table = measure(2, [64, 1 << 16], backend="gloo")
    assert [num_bytes for num_bytes, _ in table.points[2]] == [64, 1 << 16]
    assert "2 processes on a CPU" in table.source
    assert 0 < table.seconds(64, 2) < 10


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are several GPUs")
def test_measuring_without_enough_gpus_asks_for_a_table():
    with pytest.raises(ValueError, match="give a table of measurements instead"):
        measure(2, [64])
