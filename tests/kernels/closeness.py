"""How right a kernel is: its error against float64, beside that of torch in the kernel's own type."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def assert_as_exact_as_torch(
    ours: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor, factor: float = 1.5
) -> None:
    """Our largest error is at most ``factor`` times torch's, plus what a few float32 operations cost.

    A result that is rounded once, to nearest, is never worse than any other of its type; one that is cut off is.
    """
    assert ours.shape == torchs.shape == exact.shape
    assert ours.dtype == torchs.dtype
    assert exact.dtype == torch.float64
    if not exact.numel():
        return
    error, allowed = ((result.double() - exact).abs().max().item() for result in (ours, torchs))
    noise = 4 * torch.finfo(torch.float32).eps * exact.abs().max().item()
    assert error <= factor * allowed + noise, f"error {error:.3g}, torch's is {allowed:.3g}, noise {noise:.3g}"


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers, the same on every machine and device."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).to(DEVICE)
