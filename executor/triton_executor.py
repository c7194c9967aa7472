"""The executor on a GPU: Triton's kernels, CUDA graphs for decodes, one copy in and one copy out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray

from windtunnel.executor.all_reduce import AllReduceTable
from windtunnel.executor.batch import StepBatch
from windtunnel.executor.batch_builder import HostBatch
from windtunnel.executor.cache import PagedKvCache
from windtunnel.executor.devices import CudaDevice, Device
from windtunnel.executor.graphs import GraphRunner
from windtunnel.executor.graphs import capture_sizes as default_capture_sizes
from windtunnel.executor.model import Decoder
from windtunnel.executor.model_executor import ModelExecutor
from windtunnel.executor.staging import Spec, Staging
from windtunnel.executor.timing import DeviceTiming, OpTiming, TimedOps, timed_ops
from windtunnel.sim.engine.plan import StepPlan, StepResult

_FIRST_STAGING_BYTES = 1 << 20


class TritonExecutor(ModelExecutor):
    """Computes steps on a GPU.

    Steps of decodes only are replayed from CUDA graphs, padded to the next captured size; all others are launched
    operation by operation.  ``step_ns`` is wall time until the sampled tokens are on the host.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedKvCache,
        *,
        max_num_seqs: int = 256,
        use_graphs: bool = True,
        capture_sizes: Sequence[int] | None = None,
        capture_at_start: bool = True,
        max_catch_up_tokens: int = 2048,
        all_reduce: AllReduceTable | None = None,
        device: Device | None = None,
    ) -> None:
        """``capture_sizes`` are the batch sizes with a graph, by default those that batches of up to ``max_num_seqs``
        need (``graphs.capture_sizes``).  They are captured at once, or each when it is first needed: then the first
        step of a size takes as long as its capture.  ``device`` is the GPU unless another one is given.

        Raises GpuMissing without a GPU, and ValueError for a model or a cache that is not on the device.
        """
        device = CudaDevice() if device is None else device
        if model.device.type != device.torch_device.type:
            raise ValueError(f"the model is on {model.device}, but this executor computes on {device.torch_device}")
        super().__init__(model, cache, max_catch_up_tokens=max_catch_up_tokens, all_reduce=all_reduce)
        self.last_device_timing: DeviceTiming | None = None
        """Of the latest step."""
        self.last_op_timings: list[OpTiming] = []
        """Of the latest step within ``timing_ops``."""
        self._device = device
        self._staging = Staging(device, _FIRST_STAGING_BYTES)
        self._tokens = device.staging(8 * max(max_num_seqs, 1)).view(torch.int64)
        self._timed: TimedOps | None = None
        self._graphs: GraphRunner | None = None
        if use_graphs:
            with torch.inference_mode():
                sizes = default_capture_sizes(max_num_seqs) if capture_sizes is None else capture_sizes
                self._graphs = GraphRunner(model, cache, device, sizes)
                if capture_at_start:
                    self._graphs.record_all()

    @property
    def workspace_bytes(self) -> int:
        """Device memory for graphs and inputs, which a deployment needs besides weights and cache."""
        return self._staging.num_bytes + (self._graphs.workspace_bytes if self._graphs else 0)

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Batch sizes whose graphs are ready."""
        return self._graphs.recorded_sizes if self._graphs else ()

    @contextmanager
    def timing_ops(self) -> Iterator[None]:
        """Time each operation of the steps that run meanwhile, back to back on the device.

        They run without graphs, and the device is held up until their launches are queued: their ``step_ns`` says
        nothing, their ``device_ns`` does.
        """
        with timed_ops(self.model, self._device) as timed:
            self._timed = timed
            try:
                yield
            finally:
                self._timed = None

    def execute(self, plan: StepPlan) -> StepResult:
        """See ``ModelExecutor``."""
        before = self.last_timing
        result = super().execute(plan)
        timing, device_timing = self.last_timing, self.last_device_timing
        if timing is not None and timing is not before and device_timing is not None:
            host_build_ns = timing.build_ns + device_timing.host_build_ns
            total_ns = result.step_ns - timing.all_reduce_ns
            self.last_device_timing = device_timing._replace(host_build_ns=host_build_ns, total_ns=total_ns)
        return result

    def close(self) -> None:
        """Let the engine, the cache and the graphs go; the executor cannot be used afterwards."""
        super().close()
        self._graphs = None

    def _compute(self, host: HostBatch) -> tuple[list[int], int]:
        size = self._graphs.size_for(host) if self._graphs and self._timed is None else None
        with torch.inference_mode():
            tokens, timing = self._launch(host) if size is None else self._replay(host, size)
        self.last_device_timing = timing
        self._num_padded_tokens = timing.num_padded_tokens
        if self._timed is not None:
            self.last_op_timings = self._timed.timings()
        return tokens, timing.copy_ns + timing.device_ns

    def _replay(self, host: HostBatch, size: int) -> tuple[list[int], DeviceTiming]:
        """A step of decodes by its graph."""
        graphs, num_tokens = self._graphs, len(host.token_ids)
        assert graphs is not None
        graphs.record(size)
        begin_ns = self._now_ns()
        graphs.lay_out(host, size)
        host_build_ns = self._now_ns() - begin_ns
        begin = self._device.mark()
        graphs.send(host, size)
        copied = self._device.mark()
        sampled = graphs.replay(size)
        computed = self._device.mark()
        every = self._fetch(sampled[:num_tokens], computed)
        tokens = [every[row] for row in host.sample_rows.tolist()]
        timing = self._timing(host_build_ns, (begin, copied, computed), num_tokens)
        return tokens, timing._replace(num_padded_tokens=size - num_tokens, is_graph=True)

    def _launch(self, host: HostBatch) -> tuple[list[int], DeviceTiming]:
        """Any step, operation by operation."""
        num_tokens = len(host.token_ids)
        begin_ns = self._now_ns()
        arrays: list[NDArray[Any]] = [*host[:7], host.temperature, host.top_p, host.uniforms]
        places = self._staging.places([Spec(array.shape, array.dtype) for array in arrays])
        for place, array in zip(places.host, arrays, strict=True):
            place[...] = array
        host_build_ns = self._now_ns() - begin_ns
        if self._timed is not None:
            self._device.hold_up()
        begin = self._device.mark()
        self._staging.send(places.num_bytes)
        copied = self._device.mark()
        *inputs, temperature, top_p, uniforms = places.device
        batch = StepBatch(*inputs, host.num_decode_seqs, host.max_query_len, host.max_context_len)  # type: ignore[call-arg]
        logits = self.model.forward(batch, self.cache)
        sampled = self.model.ops.sample(logits, temperature, top_p, uniforms) if host.sampled else None
        computed = self._device.mark()
        if sampled is None:
            self._device.wait(computed)
        tokens = [] if sampled is None else self._fetch(sampled, computed)
        return tokens, self._timing(host_build_ns, (begin, copied, computed), num_tokens)

    def _fetch(self, sampled: torch.Tensor, computed: Any) -> list[int]:
        """Bring tokens to the host, and wait for them."""
        count = sampled.shape[0]
        if count > self._tokens.shape[0]:
            self._device.wait(computed)
            self._tokens = self._device.staging(16 * count).view(torch.int64)
        self._tokens[:count].copy_(sampled, non_blocking=True)
        self._device.wait(self._device.mark())
        tokens: list[int] = self._tokens[:count].tolist()
        return tokens

    def _timing(self, host_build_ns: int, marks: tuple[Any, Any, Any], num_tokens: int) -> DeviceTiming:
        """Of a step without a graph; the total is known at the end of the step only."""
        begin, copied, computed = marks
        return DeviceTiming(
            host_build_ns=host_build_ns,
            copy_ns=self._device.ns_between(begin, copied),
            device_ns=self._device.ns_between(copied, computed),
            total_ns=0,
            num_tokens=num_tokens,
            num_padded_tokens=0,
            is_graph=False,
        )
