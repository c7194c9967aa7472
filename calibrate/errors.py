"""How far predictions are from measured steps, by regime and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.robust import hopeless
from windtunnel.calibrate.step_tables import StepTable
from windtunnel.sim.cost.features import REGIMES, regimes_of
from windtunnel.sim.cost.fitted import ErrorLine

_Array = NDArray[np.float64]
_WORTH_TELLING_PERCENT = 0.5
_FEWEST_FOR_SIZES = 20
"""Steps of a regime from which on its small and large batches have lines of their own."""


def error_lines(table: StepTable, predicted_s: _Array, covered: NDArray[np.bool_]) -> tuple[ErrorLine, ...]:
    """A line for all steps, one for each regime that occurs, and for its smaller and larger batches.

    Small are batches of at most the regime's median of tokens.  ``covered`` says which steps lie in their interval.
    """
    return tuple(_line(name, table.take(part), predicted_s[part], covered[part]) for name, part in _parts(table))


def _parts(table: StepTable) -> list[tuple[str, Any]]:
    """What has a line of its own: its name and which steps."""
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
    return parts


def far_off(table: StepTable, predicted_s: _Array) -> dict[str, dict[str, Any]]:
    """For each line of ``error_lines`` with steps that no model could follow, their number and the bias without them.

    These are steps beyond ten robust standard deviations of their regime, such as one of 800 ms among ones of 9 ms:
    the sum of the times, and so the bias, may be mostly theirs.
    """
    lost = hopeless(np.log(table.step_s / predicted_s), regimes_of(table.shapes))
    return {
        name: {
            "num_steps": int((part & lost).sum()),
            "bias_percent_without": _bias_percent(table.step_s[part & ~lost], predicted_s[part & ~lost]),
        }
        for name, part in _parts(table)
        if (part & lost).any() and (part & ~lost).any()
    }


def far_off_text(lines: Sequence[ErrorLine], far: Mapping[str, Mapping[str, Any]]) -> str:
    """A sentence for each line whose bias is mostly due to steps that ``far_off`` counts; empty if there is none."""
    sentences = []
    for line in lines:
        if line.regime not in far:
            continue
        number, bias = far[line.regime]["num_steps"], far[line.regime]["bias_percent_without"]
        if 2 * abs(bias) < abs(line.bias_percent) and abs(bias - line.bias_percent) >= _WORTH_TELLING_PERCENT:
            steps = "1 step is" if number == 1 else f"{number:,} steps are"
            sentences.append(
                f"{line.regime}: {steps} beyond ten robust standard deviations; without "
                f"{'it' if number == 1 else 'them'} the bias is {bias:+.2f} %"
            )
    return "\n".join(sentences)


def _bias_percent(step_s: _Array, predicted_s: _Array) -> float:
    return 100.0 * float(predicted_s.sum() / step_s.sum() - 1.0)


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
        bias_percent=_bias_percent(table.step_s, predicted_s),
        covered_percent=100.0 * float(covered.mean()),
    )


def error_table(lines: Sequence[ErrorLine], heading: str = "held out") -> str:
    """The lines as text, one row each, in percent; ``heading`` says which steps they are."""
    heads = (heading, "steps", "shapes", "MAPE %", "p50 %", "p90 %", "p99 %", "bias %", "in 90 % interval")
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
