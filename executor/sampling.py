"""How the next token is chosen, and the randomness for it: a function of seed and position, never a stream."""

from __future__ import annotations

from dataclasses import dataclass

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one answer are chosen; names and defaults are those of the OpenAI API.

    Raises ValueError, naming the field, its value and the allowed range.
    """

    max_tokens: int = 16
    """Most output tokens."""
    temperature: float = 1.0
    """0 takes the most likely token; else logits are divided by it."""
    top_p: float = 1.0
    """Only the most likely tokens that have at least this probability together are drawn from."""
    seed: int = 0
    """Of the draws; the same seed and prompt give the same answer whatever else is in the batch."""
    ignore_eos: bool = False
    """Go on to ``max_tokens`` even if the model ends its answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the answer, besides the model's own."""
    min_tokens: int = 0
    """Output tokens before which nothing ends the answer."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be in [0, max_tokens = {self.max_tokens}], got {self.min_tokens}")
        if not 0.0 <= self.temperature <= 2.0:
            raise ValueError(f"temperature must be in [0, 2], got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that looks random, for the token at ``position`` of an answer with that ``seed``.

    It depends on nothing else, so that batching, chunking and preemption leave an answer as it is.  Source of the
    mixing constants: SplitMix64 (Steele, Lea, Flood 2014).
    """
    return (_mix(_mix(seed & _MASK) + position) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
