"""Rotary position embeddings: the frequencies that a config.json asks for, and the table that a model reads.

Sources: Su et al., "RoFormer" (2021); Chen et al., "Position Interpolation" (2023) for linear scaling; the Llama 3.1
release for ``llama3``; Peng et al., "YaRN" (2023).  Values agree with those of Hugging Face's transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.executor.model_files import ModelFileError, flag, number, number_or_none, section, whole

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn into angles; names are those of Hugging Face's ``rope_parameters``.

    Raises ValueError for a type that is not one of ``ROPE_TYPES`` and for missing or senseless parameters.
    """

    rope_theta: float = 10_000.0
    """Base of the geometric series of wavelengths."""
    rope_type: str = "default"
    factor: float = 1.0
    """How many times longer than in training a sequence may be."""
    low_freq_factor: float = 1.0
    """llama3: waves longer than original_max_position_embeddings / this are slowed down by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: waves shorter than original_max_position_embeddings / this stay as they are."""
    original_max_position_embeddings: int = 0
    """Longest sequence in training (llama3, yarn)."""
    beta_fast: float = 32.0
    """yarn: waves that turn more often than this within that length stay as they are."""
    beta_slow: float = 1.0
    """yarn: waves that turn less often than this are slowed down by the whole factor."""
    attention_factor: float = 1.0
    """yarn: sines and cosines are multiplied by this."""
    truncate: bool = True
    """yarn: round the ends of the ramp between the two to whole dimensions."""

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope scaling {self.rope_type!r} is not supported: use a model with one of {', '.join(ROPE_TYPES)}"
            )
        if not 1.0 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta must be a finite number above 1, got {self.rope_theta}")
        if not 1.0 <= self.factor < math.inf:
            raise ValueError(f"the factor of rope scaling must be a finite number of at least 1, got {self.factor}")
        if self.rope_type in ("llama3", "yarn") and self.original_max_position_embeddings < 1:
            raise ValueError(
                f"original_max_position_embeddings must be at least 1 for rope scaling {self.rope_type!r}, "
                f"got {self.original_max_position_embeddings}"
            )
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be above low_freq_factor ({self.low_freq_factor})"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """From a config.json: ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` as transformers 5 writes it.

        Raises ValueError as the class, and for parameters that are missing.
        """
        given = {**section(config, "rope_scaling"), **section(config, "rope_parameters")}
        kind = str(given.get("rope_type", given.get("type", "default")))
        theta = _theta(given, config)
        missing = [key for key in _KEYS.get(kind, ()) if given.get(key) is None]
        if missing:
            raise ModelFileError(f"rope scaling {kind!r} lacks {', '.join(missing)}: give a complete config.json")
        if kind == "default" or kind not in ROPE_TYPES:
            return cls(theta, kind)
        if kind == "yarn":
            return cls._yarn(theta, given, whole(config, "max_position_embeddings", 1))
        factor = number(given, "factor", least=1.0)
        if kind == "linear":
            return cls(theta, kind, factor)
        low, high = number(given, "low_freq_factor", above=0.0), number(given, "high_freq_factor", above=0.0)
        return cls(theta, kind, factor, low, high, whole(given, "original_max_position_embeddings"))

    @classmethod
    def _yarn(cls, theta: float, given: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
        factor = number(given, "factor", least=1.0)
        attention = number_or_none(given, "attention_factor", above=0.0)
        if attention is None:
            mscale, mscale_all_dim = (number_or_none(given, key, least=0.0) for key in ("mscale", "mscale_all_dim"))
            if mscale and mscale_all_dim:
                attention = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
            else:
                attention = _mscale(factor, 1.0)
        return cls(
            theta,
            "yarn",
            factor,
            original_max_position_embeddings=whole(given, "original_max_position_embeddings", max_position_embeddings),
            beta_fast=number_or_none(given, "beta_fast", least=0.0) or 32.0,
            beta_slow=number_or_none(given, "beta_slow", least=0.0) or 1.0,
            attention_factor=attention,
            truncate=flag(given, "truncate", True),
        )

    def max_positions(self, max_position_embeddings: int) -> int:
        """Longest sequence that a model with that ``max_position_embeddings`` may see, as vLLM derives it."""
        if self.rope_type == "yarn":
            return int(self.original_max_position_embeddings * self.factor)
        if self.rope_type == "linear":
            return int(max_position_embeddings * self.factor)
        return max_position_embeddings

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float64]:
        """[head_dim / 2] radians by which each pair of elements turns from one position to the next."""
        plain = self.rope_theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.rope_type == "linear":
            return plain / self.factor
        if self.rope_type == "llama3":
            return self._blend(plain, self._llama3_share(plain))
        if self.rope_type == "yarn":
            return self._blend(plain, self._yarn_share(head_dim))
        return plain

    def cos_sin(self, num_positions: int, head_dim: int) -> NDArray[np.float32]:
        """[num_positions, head_dim]: for each position head_dim / 2 cosines, then as many sines."""
        angles = np.outer(np.arange(num_positions), self.inverse_frequencies(head_dim))
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * self.attention_factor
        return table.astype(np.float32)

    def _blend(self, plain: NDArray[np.float64], kept: NDArray[np.float64]) -> NDArray[np.float64]:
        """Frequencies of which the share ``kept`` stays and the rest is divided by the factor."""
        return plain * kept + plain / self.factor * (1.0 - kept)

    def _llama3_share(self, plain: NDArray[np.float64]) -> NDArray[np.float64]:
        turns = self.original_max_position_embeddings * plain / (2.0 * math.pi)
        return np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)

    def _yarn_share(self, head_dim: int) -> NDArray[np.float64]:
        low, high = (self._dimension_of(turns, head_dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, head_dim - 1.0)
        high += 0.001 * (low == high)
        slowed = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
        return np.asarray(1.0 - slowed, dtype=np.float64)

    def _dimension_of(self, num_turns: float, head_dim: int) -> float:
        """The pair of elements that turns that often within the original length."""
        length = self.original_max_position_embeddings / (num_turns * 2.0 * math.pi)
        return head_dim * math.log(length) / (2.0 * math.log(self.rope_theta))


def _theta(given: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    for source in (given, config):
        if source.get("rope_theta") is not None:
            return number(source, "rope_theta", above=1.0)
    return 10_000.0


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
