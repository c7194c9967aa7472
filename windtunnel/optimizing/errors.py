"""What can go wrong with a search, apart from what simulations raise."""

from __future__ import annotations


class OptunaMissing(RuntimeError):
    """The search needs optuna, which is an extra."""

    def __init__(self) -> None:
        super().__init__("optimize needs optuna, which is not installed: pip install 'windtunnel[optimize]'")
