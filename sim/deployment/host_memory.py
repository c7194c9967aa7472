"""What a deployment takes of its hosts' memory beside its GPUs': offloaded weights, swap space, offloaded KV blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windtunnel.sim.deployment.gpu import GIB
from windtunnel.sim.deployment.memory_plan import MemoryPlan, stage_weights
from windtunnel.sim.deployment.memory_request import MemoryRequest


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Pinned host memory in bytes, for one GPU (of the stage that takes most) and for all GPUs of the deployment.

    What Python, the loading of weights and the page cache take comes on top.
    """

    offloaded_weights_bytes: int
    """``--cpu-offload-gb``, as far as a GPU has weights; they are read over the bus in each step."""
    swap_bytes: int
    """``--swap-space`` (or the release's default) of the V0 engine; V1 takes none."""
    kv_offloading_bytes: int
    """``--kv-offloading-size`` over the ranks of an engine, for which vLLM gives it in all; blocks of the GPU's pool do
    not become more."""
    num_gpus: int
    total_bytes: int
    """Of all GPUs.  On several hosts each bears the part of its own."""

    @property
    def bytes_per_gpu(self) -> int:
        """All three for one GPU."""
        return self.offloaded_weights_bytes + self.swap_bytes + self.kv_offloading_bytes


def host_memory(plan: MemoryPlan) -> HostMemory:
    """The host memory of a plan.

    Source: vLLM's ``config/offload.py`` (for each GPU), ``config/cache.py`` (``kv_offloading_size`` is the sum over all
    ranks of an engine), as read in 0.32, and ``swap_space`` in 0.8.5 (for each GPU).
    """
    request = plan.request
    offloaded = [_offloaded(request, rank) for rank in range(request.pipeline_parallel_size)]
    swap = _swap(request)
    ranks = request.tensor_parallel_size * request.pipeline_parallel_size
    buffer = round((request.kv_offloading_gib or 0.0) * GIB)
    total = request.tensor_parallel_size * sum(offloaded) + ranks * swap + buffer
    return HostMemory(max(offloaded), swap, buffer // ranks, request.num_gpus, total * request.data_parallel_size)


def _offloaded(request: MemoryRequest, rank: int) -> int:
    if not request.cpu_offload_gib:
        return 0
    return stage_weights(replace(request, cpu_offload_gib=0.0), rank) - stage_weights(request, rank)


def _swap(request: MemoryRequest) -> int:
    if not request.runs_on_v0:
        return 0
    default = request.version.swap_space_gib or 0.0
    return round((default if request.swap_space_gib is None else request.swap_space_gib) * GIB)
