"""RoPE and the store into the paged cache in Triton, against float64 and torch's own float8."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.closeness import DEVICE, FLOATS, assert_as_exact_as_torch, randn
from windtunnel.executor.kernels.rope_store import rope_and_store

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def angles(num_positions: int, head_size: int) -> torch.Tensor:
    """[positions, D / 2] float64."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_size, 2, dtype=torch.float64, device=DEVICE) / head_size)
    return torch.arange(num_positions, dtype=torch.float64, device=DEVICE)[:, None] * frequencies


def table(num_positions: int, head_size: int) -> torch.Tensor:
    turned = angles(num_positions, head_size)
    return torch.cat([turned.cos(), turned.sin()], dim=1).float()


def rotated(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [T, heads, D] by the table, computed in ``dtype``."""
    cos, sin = cos_sin.to(dtype)[positions].unsqueeze(1).chunk(2, dim=-1)
    a, b = x.to(dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def assert_rotated(out: torch.Tensor, x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    torchs = rotated(x, cos_sin, positions, torch.float32).to(x.dtype)
    assert_as_exact_as_torch(out, torchs, rotated(x, cos_sin, positions, torch.float64))


def caches(
    num_blocks: int, block_size: int, num_heads: int, head_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, full of a mark that no result equals."""
    keys, values = (
        torch.full((num_blocks, block_size, num_heads, head_size), 77.0, device=DEVICE).to(dtype) for _ in range(2)
    )
    return keys, values


def check(
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    block_size: int = 32,
    seed: int = 0,
) -> None:
    """Slices of a fused q, k, v; slots in random order, every third token without one."""
    num_blocks = 2 + num_tokens // block_size
    gen = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 500, (num_tokens,), generator=gen).to(DEVICE)
    slots = torch.randperm(num_blocks * block_size, generator=gen)[:num_tokens].to(DEVICE)
    slots[2::3] = -1
    cos_sin = table(500, head_size)
    fused = randn(num_tokens, (num_q_heads + 2 * num_kv_heads) * head_size, dtype=dtype, seed=seed)
    before = fused.clone()
    sizes = [num_q_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size]
    q, k, v = (part.unflatten(1, (-1, head_size)) for part in fused.split(sizes, dim=1))
    old_q, old_k, old_v = (part.unflatten(1, (-1, head_size)) for part in before.split(sizes, dim=1))
    key_cache, value_cache = caches(num_blocks, block_size, num_kv_heads, head_size, dtype)

    out = rope_and_store(q, k, v, cos_sin, positions, slots, key_cache, value_cache)

    assert_rotated(out, old_q, cos_sin, positions)
    assert torch.equal(k, old_k)
    assert torch.equal(v, old_v)
    stored = slots >= 0
    flat_keys, flat_values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    assert_rotated(flat_keys[slots[stored]], old_k[stored], cos_sin, positions[stored])
    assert torch.equal(flat_values[slots[stored]], old_v[stored])
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool, device=DEVICE)
    untouched[slots[stored]] = False
    assert bool((flat_keys[untouched] == 77.0).all())
    assert bool((flat_values[untouched] == 77.0).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("heads", [(4, 2, 64), (14, 2, 64), (28, 4, 128), (3, 3, 80), (1, 1, 2), (40, 40, 128)])
def test_q_is_rotated_and_k_and_v_are_stored(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(5, *heads, dtype)


@settings(max_examples=10)
@given(
    num_tokens=st.integers(0, 9),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    half=st.integers(1, 40),
    dtype=st.sampled_from(FLOATS),
    block_size=st.sampled_from([1, 8, 16, 24]),
    seed=st.integers(0, 99),
)
def test_any_shape(
    num_tokens: int, num_kv_heads: int, group: int, half: int, dtype: torch.dtype, block_size: int, seed: int
) -> None:
    check(num_tokens, group * num_kv_heads, num_kv_heads, 2 * half, dtype, block_size, seed)


@pytest.mark.parametrize("dtype", FLOATS)
def test_an_fp8_cache_gets_what_torch_would_round_and_saturate(dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 3, 250], device=DEVICE)
    slots = torch.tensor([9, 0, 31], device=DEVICE)
    q, k, v = (randn(3, heads, 64, dtype=dtype, seed=seed, scale=40.0) for seed, heads in enumerate((4, 2, 2)))
    cos_sin = table(300, 64)
    wide, narrow = caches(2, 16, 2, 64, dtype), caches(2, 16, 2, 64, FP8)
    rope_and_store(q.clone(), k, v, cos_sin, positions, slots, *wide)
    rope_and_store(q, k, v, cos_sin, positions, slots, *narrow, k_scale=0.3, v_scale=0.05)
    for full, eight, scale in zip(wide, narrow, (0.3, 0.05), strict=True):
        wanted = (full.flatten(0, 1)[slots].float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        found = eight.flatten(0, 1)[slots]
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        assert bool((wanted.float().abs() == FP8_MAX).any()), "some must saturate"


def stored_as_fp8(values: torch.Tensor) -> torch.Tensor:
    """Each number by way of the value cache; values are a multiple of 128 in number."""
    v = values.reshape(-1, 4, 32)
    num_tokens = v.shape[0]
    key_cache, value_cache = caches(1, num_tokens, 4, 32, FP8)
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE)
    slots = torch.arange(num_tokens, device=DEVICE)
    rope_and_store(torch.zeros_like(v), torch.zeros_like(v), v, table(1, 32), zeros, slots, key_cache, value_cache)
    return value_cache.flatten()


def every_fp8_neighbourhood() -> torch.Tensor:
    """All float8 numbers, the middles between them, and the float32 numbers next to both."""
    codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(FP8).float()
    middles = (codes[1:] + codes[:-1]) / 2
    marks = torch.cat([codes, middles, torch.tensor([448.0, 464.0, 465.0, 1e9, 3e38, torch.inf, 1e-30, 1e-45])])
    near = torch.cat([marks, marks.nextafter(torch.tensor(torch.inf)), marks.nextafter(torch.tensor(0.0))])
    both = torch.cat([near, -near])
    return torch.cat([both, torch.zeros(-both.numel() % 128)]).to(DEVICE)


def test_every_float8_and_what_lies_between_is_rounded_to_nearest_even() -> None:
    values = every_fp8_neighbourhood()
    wanted = values.clamp(-FP8_MAX, FP8_MAX).to(FP8)
    assert torch.equal(stored_as_fp8(values).view(torch.uint8), wanted.view(torch.uint8))


def test_what_is_not_a_number_stays_so_in_float8() -> None:
    values = torch.full((128,), torch.nan, device=DEVICE)
    values[1::2] = -values[1::2]
    assert bool(stored_as_fp8(values).float().isnan().all())


def test_a_cache_of_more_than_2_to_the_31_elements_is_reached() -> None:
    num_blocks, block_size, heads, size = 70_000, 16, 16, 128  # 2.29e9 elements; only the touched pages are real
    shape = (num_blocks, block_size, heads, size)
    key_cache, value_cache = (torch.empty(shape, dtype=FP8, device=DEVICE) for _ in range(2))
    k, v = randn(1, heads, size), randn(1, heads, size, seed=1)
    slot = torch.tensor([num_blocks * block_size - 1], device=DEVICE)
    position = torch.tensor([0], device=DEVICE)
    rope_and_store(randn(1, 16, size, seed=2), k, v, table(1, size), position, slot, key_cache, value_cache)
    assert torch.equal(key_cache[-1, -1].float(), k[0].to(FP8).float())
    assert torch.equal(value_cache[-1, -1].float(), v[0].to(FP8).float())


def test_caches_may_be_laid_out_side_by_side() -> None:
    both = torch.zeros(3, 2, 16, 2, 8, device=DEVICE)  # blocks of keys and values in turn
    q, k, v = randn(2, 2, 8), randn(2, 2, 8, seed=1), randn(2, 2, 8, seed=2)
    positions, slots = torch.tensor([0, 0], device=DEVICE), torch.tensor([17, 40], device=DEVICE)
    rope_and_store(q, k, v, table(1, 8), positions, slots, both[:, 0], both[:, 1])
    assert torch.equal(both[1, 0, 1], k[0])
    assert torch.equal(both[2, 0, 8], k[1])
    assert torch.equal(both[1, 1, 1], v[0])
    assert torch.equal(both[2, 1, 8], v[1])
    assert both.count_nonzero() == k.numel() + v.numel()


def arguments(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    key_cache, value_cache = caches(1, 16, 2, 8, torch.float32)
    numbers = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    right = {"q": randn(3, 4, 8), "k": randn(3, 2, 8), "v": randn(3, 2, 8), "cos_sin": table(4, 8)}
    right |= {"positions": numbers, "slots": numbers.clone(), "key_cache": key_cache, "value_cache": value_cache}
    return right | {name: tensor.to(DEVICE) for name, tensor in changed.items()}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": torch.zeros(3, 2, 6)}, "with an even D are expected"),
        ({"v": torch.zeros(3, 1, 8)}, "with an even D are expected"),
        ({"v": torch.zeros(3, 2, 8, dtype=torch.float16)}, "must be of one type"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, r"slots is .* int64 is expected"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, r"positions is .* int64 is expected"),
        ({"cos_sin": torch.zeros(4, 6)}, r"\[positions, 8\] float32 is expected"),
        ({"key_cache": torch.zeros(1, 16, 2, 4)}, r"key_cache is .*\[N, S, 2, 8\] is expected"),
        ({"value_cache": torch.zeros(1, 16, 2, 8).half()}, "value_cache holds .*both caches alike"),
        ({"value_cache": torch.zeros(2, 16, 2, 8)}, "as many blocks"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_and_store(**arguments(**changed))
