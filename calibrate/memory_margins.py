"""How far CUDA graphs went beyond their estimate, from recorded start-ups: the part "graphs" of ``margins.json``.

``python -m windtunnel.calibrate.memory_margins [startups.csv]`` writes it, and what it is from.

A plan's graphs are an estimate.  Where a release captures them beside its budget, what counts is by how much the real
ones exceed that of a fit that does not know the model; where it takes its own estimate out of the budget, by how much
they exceed that one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.calibrate.memory_fit import fit
from windtunnel.calibrate.startups import STARTUPS_CSV, StartUp, read_rows, usable
from windtunnel.sim.deployment import memory_at_start
from windtunnel.sim.deployment.gpu import GIB
from windtunnel.sim.deployment.overheads import estimate_parts, graphs_inside, shapes_of
from windtunnel.sim.deployment.profile_run import is_amd, release

SHARE = 0.95
"""Of start-ups whose graphs take no more than their estimate and this."""


def graph_margins(rows: Iterable[Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """By maker: the quantiles in GiB, and the start-ups and models behind them.

    No start-up on an AMD card told its own estimate beside what it captured: that figure is then the other maker's.
    """
    start_ups, _ = usable(rows)
    found = {}
    for name, amd in (("nvidia", False), ("amd", True)):
        own = [start_up for start_up in start_ups if is_amd(start_up.setting.gpu) == amd]
        beside = [start_up for start_up in own if _captures_beside(start_up)]
        told = [each for each in start_ups if each.estimated_graphs_bytes is not None and _captures_beside(each)]
        both = [start_up for start_up in told if start_up in beside]
        captured = _quantile([off for family in _families(beside) for off in _left_out(start_ups, beside, family)])
        estimate = _quantile(
            [_captured(start_up) - float(start_up.estimated_graphs_bytes or 0) for start_up in both or told]
        )
        found[name] = {
            "captured_gib": captured,
            "captured_start_ups": len(beside),
            "captured_models": len(_families(beside)),
            "estimate_gib": estimate,
            "estimate_start_ups": len(both),
            "estimate_models": len(_families(both)),
        }
    return found


def _captures_beside(start_up: StartUp) -> bool:
    """Whether the log tells graphs that were captured outside the budget; before 0.18 CUDA's tell another thing."""
    gpu, version = start_up.setting.gpu, start_up.setting.version
    told = start_up.captured_graphs_bytes is not None and not graphs_inside(gpu, version)
    return told and (is_amd(gpu) or release(version) >= (0, 18))


def _captured(start_up: StartUp) -> float:
    return float(start_up.captured_graphs_bytes or 0)


def _families(start_ups: Sequence[StartUp]) -> list[str]:
    return sorted({start_up.family for start_up in start_ups})


def _left_out(all_of_them: Sequence[StartUp], beside: Sequence[StartUp], family: str) -> list[float]:
    constants = fit([start_up for start_up in all_of_them if start_up.family != family])
    estimated = {
        each.row: estimate_parts(shapes_of(each.setting), constants).captured_graphs_bytes
        for each in beside
        if each.family == family
    }
    return [_captured(each) - estimated[each.row] for each in beside if each.row in estimated]


def _quantile(offs: Sequence[float]) -> float:
    return round(max(float(np.quantile(np.array(offs) / GIB, SHARE)), 0.0), 2) if offs else 0.0


def main(arguments: Sequence[str]) -> None:
    """Write the part of ``margins.json`` that is from the file given (or the one that comes along)."""
    path = Path(memory_at_start.__file__).with_name("margins.json")
    text = path.read_text(encoding="utf-8")
    margins = graph_margins(read_rows(Path(arguments[0]) if arguments else STARTUPS_CSV))
    head = text[: text.index('  "graphs": ')]
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in margins.items())
    path.write_text(f'{head}  "graphs": {{\n{rows}\n  }}\n}}\n', encoding="utf-8")
    print(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
