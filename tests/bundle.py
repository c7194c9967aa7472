"""Builders of profiles, and of a bundle of them in a temporary folder in place of the real one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from windtunnel.sim.cost import bundled
from windtunnel.sim.cost.features import REGIMES, Curve
from windtunnel.sim.cost.fitted import Domain, ErrorLine, Evidence, FittedCost, FittedParameters, NoiseBin
from windtunnel.sim.cost.profile import save_profile
from windtunnel.sim.engine.plan import StepShape

MODEL, GPU = "meta-llama/Llama-3.1-8B-Instruct", "H100-SXM"
COMPOSED = "composed from kernel tables, not measured end to end"
RESTS_ON = "real vLLM steps of another model"
STATED = {"p50_percent": 4.2, "p90_percent": 11.3, "rests_on": RESTS_ON}
FIT_ERROR = ErrorLine("all", 400, 80, 1.5, 1.25, 3.5, 9.0, -0.1, 91.0)


def provenance(**changes: Any) -> dict[str, Any]:
    """Of a profile for MODEL on one GPU; a change to None takes a key out."""
    plain = {
        "source": "composed",
        "statement": COMPOSED,
        "model": MODEL,
        "gpu": GPU,
        "tensor_parallel_size": 1,
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "stated_error": STATED,
        **changes,
    }
    return {key: value for key, value in plain.items() if value is not None}


def fitted(*, base_s: float = 5e-3, sigma: float = 0.1, largest: int = 1_000_000_000, **origin: Any) -> FittedCost:
    """A profile of plain numbers that holds for steps up to ``largest`` in everything."""
    parameters = FittedParameters(
        base_s=base_s,
        tokens=Curve.linear(2e-5, 8192),
        decode_seqs=Curve.linear(1e-6, 256),
        decode_context=Curve.linear(1e-9, 1_000_000),
        prefill_s=1e-4,
        prefill_seq_s=1e-5,
        pair_s=1e-11,
        prefill_context_s=1e-9,
        sampled_s=1e-6,
        mixed_s=1e-5,
        mixed_seq_s=1e-7,
    )
    box = dict.fromkeys((*StepShape._fields, "num_tokens"), (0, largest))
    noise = tuple(NoiseBin(regime, 16384, sigma, -2 * sigma, 2 * sigma, 100) for regime in REGIMES)
    domain = Domain(dict.fromkeys(REGIMES, box))
    return FittedCost(parameters, Evidence(domain, noise, (FIT_ERROR,), provenance=provenance(**origin)))


def bundle(folder: Path, monkeypatch: pytest.MonkeyPatch, profiles: Iterable[tuple[str, FittedCost]]) -> None:
    """Let these be the bundled profiles, under these names, for the rest of the test."""
    entries = [_entry(folder, name, cost) for name, cost in profiles]
    index = folder / "index.json"
    index.write_text(json.dumps({"profiles": entries}))
    listed = tuple(bundled.BundledProfile(**entry) for entry in entries)
    monkeypatch.setattr(bundled, "PROFILES", folder)
    monkeypatch.setattr(bundled, "INDEX", index)
    for module in _WHO_ASK:
        monkeypatch.setattr(module, lambda: listed)


_WHO_ASK = (
    "windtunnel.sim.cost.bundled.bundled_profiles",
    "windtunnel.sim.cost.lookup.bundled_profiles",
    "windtunnel.scenarios.costs.bundled_profiles",
)


def _entry(folder: Path, name: str, cost: FittedCost) -> dict[str, Any]:
    path = folder / f"{name}.json"
    save_profile(cost, path)
    origin = cost.evidence.provenance
    known: dict[str, Any] = {
        **{key: origin.get(key) for key in ("model", "gpu", "tensor_parallel_size", "dtype", "kv_cache_dtype")},
        **{key: origin.get(key) for key in ("source", "statement", "stated_error")},
        "name": name,
        "device": origin.get("gpu"),
        "largest_steps": bundled.largest_steps(cost.evidence.domain),
        "checksum": json.loads(path.read_text())["checksum"],
    }
    return {each.name: known[each.name] for each in fields(bundled.BundledProfile)}
