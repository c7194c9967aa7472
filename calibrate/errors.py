"""How far predictions are from measured steps, by regime and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.step_tables import StepTable
from windtunnel.sim.cost.features import REGIMES, regimes_of
from windtunnel.sim.cost.fitted import ErrorLine

_Array = NDArray[np.float64]
_FEWEST_FOR_SIZES = 20
"""Steps of a regime from which on its small and large batches have lines of their own."""


def error_lines(table: StepTable, predicted_s: _Array, covered: NDArray[np.bool_]) -> tuple[ErrorLine, ...]:
    """A line for all steps, one for each regime that occurs, and for its smaller and larger batches.

    Small are batches of at most the regime's median of tokens.  ``covered`` says which steps lie in their interval.
    """
    regimes, tokens = regimes_of(table.shapes), table.shapes.num_tokens
    parts: list[tuple[str, Any]] = [("all", np.ones(len(table), bool))]
    for number, regime in enumerate(REGIMES):
        own = regimes == number
        if not own.any():
            continue
        parts.append((regime, own))
        small = own & (tokens <= np.median(tokens[own]))
        large = own & ~small
        if own.sum() >= _FEWEST_FOR_SIZES and large.any():
            parts += [(f"{regime}, small", small), (f"{regime}, large", large)]
    return tuple(_line(name, table.take(part), predicted_s[part], covered[part]) for name, part in parts)


def _line(name: str, table: StepTable, predicted_s: _Array, covered: NDArray[np.bool_]) -> ErrorLine:
    errors = 100.0 * np.abs(predicted_s / table.step_s - 1.0)
    middle, ninety, ninety_nine = (float(np.percentile(errors, share)) for share in (50, 90, 99))
    return ErrorLine(
        regime=name,
        num_steps=len(table),
        num_shapes=int(table.shape_ids.max()) + 1,
        mape_percent=float(errors.mean()),
        p50_percent=middle,
        p90_percent=ninety,
        p99_percent=ninety_nine,
        bias_percent=100.0 * float(predicted_s.sum() / table.step_s.sum() - 1.0),
        covered_percent=100.0 * float(covered.mean()),
    )


def error_table(lines: Sequence[ErrorLine]) -> str:
    """The lines as text, one row each, in percent."""
    heads = ("held out", "steps", "shapes", "MAPE %", "p50 %", "p90 %", "p99 %", "bias %", "in 90 % interval")
    rows = [
        (
            line.regime,
            f"{line.num_steps:,}",
            f"{line.num_shapes:,}",
            *(f"{value:.2f}" for value in line[3:7]),
            f"{line.bias_percent:+.2f}",
            f"{line.covered_percent:.1f} %",
        )
        for line in lines
    ]
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heads, *rows)
    )
