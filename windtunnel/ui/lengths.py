"""Distributions of lengths under one slider: their mean is moved, and their shape stays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_FEW_TOKENS = ("min", "minimum")
"""A smallest length stays where it is."""
_NO_TOKENS = ("sigma", "range_ratio")
"""Numbers of a distribution that are no tokens."""
_NUM_DRAWN = 20_000


def nominal_mean(spec: int | Mapping[str, Any]) -> int:
    """Mean tokens of a length, in whole tokens: that of its description, else that of its draws.

    Raises ValueError for a description that is none.
    """
    from windtunnel.scenarios.workloads.lengths import lengths_from

    if isinstance(spec, int):
        return spec
    lengths = lengths_from(dict(spec), "lengths")
    stated = getattr(lengths, "mean", None)
    if isinstance(stated, int | float):
        return max(1, round(stated))
    values = getattr(lengths, "values", None)
    drawn = np.array(values) if values is not None else lengths.sample(np.random.default_rng(0), _NUM_DRAWN)
    return max(1, round(float(drawn.mean())))


def scaled_to(spec: int | Mapping[str, Any], mean: float) -> int | dict[str, Any]:
    """The same distribution, all its tokens stretched so that its mean is ``mean``; the smallest length stays."""
    if isinstance(spec, int):
        return max(1, round(mean))
    factor = mean / nominal_mean(spec)
    return {key: value if key in _NO_TOKENS else _stretched(key, value, factor) for key, value in spec.items()}


def _stretched(key: str, value: Any, factor: float) -> Any:
    if isinstance(value, bool):
        return value
    if key in _FEW_TOKENS:
        return max(1, min(value, round(value * factor)))
    if isinstance(value, int):
        return max(1, round(value * factor))
    if isinstance(value, float):
        return max(1.0, value * factor)
    if isinstance(value, Mapping):
        return {name: _stretched(name, tokens, factor) for name, tokens in value.items()}
    if isinstance(value, list) and key == "quantiles":
        return [[share, _stretched("", tokens, factor)] for share, tokens in value]
    if isinstance(value, list):
        return [_stretched("", tokens, factor) for tokens in value]
    return value
