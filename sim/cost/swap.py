"""What it costs to copy KV blocks between GPU and CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.sim.deployment.model_spec import ModelSpec


class SwapCost:
    """Seconds for copies of KV blocks: their bytes over the link's bandwidth, one after the other.

    vLLM's V0 engine copied before it computed, so a step takes that much longer.  Large copies are assumed; many small
    ones reach less of the link (``bytes_per_s`` is what is reached, not what the slot is rated for).

    Raises ValueError for a number that is not positive and finite.
    """

    def __init__(self, block_bytes: int, bytes_per_s: float) -> None:
        """``block_bytes`` of one GPU, and the bandwidth of its own link, each way."""
        for name, value in (("block_bytes", block_bytes), ("bytes_per_s", bytes_per_s)):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be above 0 and finite, got {value!r}")
        self.block_bytes = block_bytes
        self.bytes_per_s = bytes_per_s

    @classmethod
    def of_model(
        cls,
        model: ModelSpec,
        bytes_per_s: float,
        *,
        block_size: int = 16,
        tensor_parallel_size: int = 1,
        kv_cache_dtype: str = "auto",
    ) -> SwapCost:
        """For a model's KV cache; every GPU copies its own part over its own link."""
        return cls(block_size * model.kv_bytes_per_token(tensor_parallel_size, kv_cache_dtype), bytes_per_s)

    def num_cpu_blocks(self, swap_space_bytes: int) -> int:
        """Blocks that fit into the CPU memory that each GPU may use (vLLM's ``--swap-space`` is in GiB)."""
        return swap_space_bytes // self.block_bytes

    def copy_time_s(self, num_blocks: int) -> float:
        """Seconds to copy so many blocks one way."""
        return num_blocks * self.block_bytes / self.bytes_per_s

    def describe(self) -> dict[str, Any]:
        """The parameters."""
        return {"block_bytes": self.block_bytes, "bytes_per_s": self.bytes_per_s, "error": "not stated: given"}
