"""Cost models of a few numbers: for tests, for what-if questions and for replaying someone else's model."""

from __future__ import annotations

from typing import Any

import numpy as np

from windtunnel.sim.engine.plan import StepShape


class ConstantCost:
    """Every step takes ``step_s`` seconds.  Raises ValueError unless that is positive and finite."""

    name: str = "constant"
    calibrated: bool = False

    def __init__(self, step_s: float) -> None:
        self.step_s = _seconds("step_s", step_s, positive=True)

    def step_time_s(self, shape: StepShape) -> Any:
        """``step_s``, or as many of them as the shape holds steps."""
        if type(sum(shape)) is int:
            return self.step_s
        return np.full(np.broadcast_shapes(*map(np.shape, shape)), self.step_s)

    def describe(self) -> dict[str, Any]:
        """The one parameter."""
        return {"name": self.name, "calibrated": self.calibrated, "step_s": self.step_s, "error": "not stated: given"}


class AffineCost:
    """base_s + token_s * tokens + seq_s * sequences + decode_context_s * context + prefill_pair_s * pairs.

    Tokens and sequences are those of the whole batch, decodes and chunks; context is what the decodes read.
    Raises ValueError for a negative or infinite coefficient, or a base that is not positive.
    """

    name: str = "affine"
    calibrated: bool = False

    def __init__(
        self,
        base_s: float,
        token_s: float = 0.0,
        seq_s: float = 0.0,
        decode_context_s: float = 0.0,
        prefill_pair_s: float = 0.0,
    ) -> None:
        self.base_s = _seconds("base_s", base_s, positive=True)
        self.token_s = _seconds("token_s", token_s)
        self.seq_s = _seconds("seq_s", seq_s)
        self.decode_context_s = _seconds("decode_context_s", decode_context_s)
        self.prefill_pair_s = _seconds("prefill_pair_s", prefill_pair_s)

    def step_time_s(self, shape: StepShape) -> Any:
        """Seconds for one step, or a float64 array for a shape of arrays; see CostModel."""
        decodes, decode_context, prefills, prefill_tokens, _, pairs, _ = shape
        return (
            self.base_s
            + self.token_s * (decodes + prefill_tokens)
            + self.seq_s * (decodes + prefills)
            + self.decode_context_s * decode_context
            + self.prefill_pair_s * pairs
        )

    def describe(self) -> dict[str, Any]:
        """The coefficients, in seconds."""
        return {
            "name": self.name,
            "calibrated": self.calibrated,
            "base_s": self.base_s,
            "token_s": self.token_s,
            "seq_s": self.seq_s,
            "decode_context_s": self.decode_context_s,
            "prefill_pair_s": self.prefill_pair_s,
            "error": "not stated: given",
        }


def _seconds(name: str, value: float, *, positive: bool = False) -> float:
    if not (value > 0.0 if positive else value >= 0.0) or value == float("inf"):
        raise ValueError(f"{name} must be {'above' if positive else 'at least'} 0 and finite, got {value!r}")
    return float(value)
