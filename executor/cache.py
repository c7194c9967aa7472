"""The paged KV cache: per layer one tensor of keys and one of values, in blocks that the scheduler hands out."""

from __future__ import annotations

import math

import numpy as np
import torch

from windtunnel.executor.model_config import DecoderConfig


class PagedKvCache:
    """Keys and values [blocks, tokens of a block, KV heads, head size] of every layer of one rank."""

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """``num_blocks`` counts the null block 0, as ``num_gpu_blocks`` does.

        With ``dtype`` float8_e4m3fn keys are stored divided by ``k_scale``, values by ``v_scale``.

        Raises ValueError for sizes below 1 and scales that are not positive.
        """
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if not scale > 0.0:
                raise ValueError(f"{name} must be above 0, got {scale}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.k_scale = k_scale
        self.v_scale = v_scale
        self.num_bytes = num_blocks * block_bytes(config, block_size, dtype)
        shape = (num_blocks, block_size, config.local_num_key_value_heads, config.head_dim)
        layers = range(config.num_hidden_layers)
        # Zeros, because what is masked is still multiplied: garbage might be infinite.
        self.keys = [_zeros(shape, dtype, torch.device(device)) for _ in layers]
        self.values = [_zeros(shape, dtype, torch.device(device)) for _ in layers]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros.  On the CPU its pages take no memory until they are first written: numpy gets them from
    calloc, while torch would write all of them now."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * int(dtype.itemsize), np.uint8)).view(dtype).view(shape)


def block_bytes(config: DecoderConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block on one rank, all layers together."""
    per_token = 2 * config.local_num_key_value_heads * config.head_dim * int(dtype.itemsize)
    return config.num_hidden_layers * block_size * per_token
