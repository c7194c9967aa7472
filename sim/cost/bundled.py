"""The profiles that come with the package: which there are, and what each states of itself.

``profiles/index.json`` lists them, so that asking what there is opens no profile.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from windtunnel.sim.cost.evidence import evidence_of_provenance
from windtunnel.sim.cost.fitted import Domain, FittedCost
from windtunnel.sim.cost.profile import ProfileError, load_profile
from windtunnel.sim.deployment.gpu import load_gpu
from windtunnel.sim.deployment.model import load_model

PROFILES = Path(__file__).with_name("profiles")
INDEX = PROFILES / "index.json"
_SOURCES = ("measured", "recorded", "composed", "transferred")
"""From what says most of real steps to what says least."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class BundledProfile:
    """One line of the index: what the profile is of, and what it states of its error."""

    name: str
    model: str
    """The bundled model's name, or another one's own."""
    gpu: str | None
    """The card's name in the table of cards; None where it is none of them, such as a CPU."""
    device: str
    """The card or the processor, in words."""
    tensor_parallel_size: int
    dtype: str
    kv_cache_dtype: str
    source: str
    """"measured", "recorded", "composed" or "transferred"."""
    statement: str
    """A sentence for people."""
    stated_error: Mapping[str, Any]
    """``p50_percent``, ``p90_percent`` (None where they are not known) and ``rests_on``."""
    checksum: str
    largest_steps: Mapping[str, int] = field(default_factory=dict)
    """``num_decode_seqs``, ``decode_context_tokens`` and ``num_tokens`` of the largest steps that it holds for."""

    @property
    def path(self) -> Path:
        """The file."""
        return PROFILES / f"{self.name}.json"

    @property
    def evidence(self) -> str:
        """``measured`` or ``composed``; see ``windtunnel.sim.cost.evidence``."""
        return evidence_of_provenance({"source": self.source})

    def load(self) -> FittedCost:
        """The cost model; raises ProfileError if the file is damaged or of another kind, OSError if it is not there."""
        return _loaded(self.path)


def largest_steps(domain: Domain) -> dict[str, int]:
    """The most decodes, tokens of context that they read together, and new tokens of one step within a domain."""
    fields = ("num_decode_seqs", "decode_context_tokens", "num_tokens")
    return {field: max(box[field][1] for box in domain.boxes.values()) for field in fields}


@cache
def bundled_profiles() -> tuple[BundledProfile, ...]:
    """All of them, by name."""
    entries = json.loads(INDEX.read_text(encoding="utf-8"))["profiles"]
    return tuple(BundledProfile(**entry) for entry in entries)


def find_bundled(
    model_name: str,
    gpu_name: str,
    tensor_parallel_size: int,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
) -> BundledProfile | None:
    """The profile of that deployment, or None; names as ``load_model`` and ``load_gpu`` take them, also other names of
    a model.

    Where there are several, measured steps come before composed or transferred ones.  ``auto`` is the model's own
    type; a cache in the model's own type is the same by any name.
    """
    model, gpu = _model_name(model_name), _gpu_name(gpu_name)
    wanted = _DTYPES.get(dtype, dtype)
    found = [
        each
        for each in bundled_profiles()
        if gpu is not None
        and (each.model, each.gpu, each.tensor_parallel_size) == (model, gpu, tensor_parallel_size)
        and wanted in ("auto", each.dtype)
        and _same_cache(kv_cache_dtype, each)
    ]
    return min(found, key=lambda each: _SOURCES.index(each.source), default=None)


def load_bundled(name: str) -> FittedCost:
    """The cost model of that name; raises ValueError, naming the nearest, for one that there is not."""
    by_name = {each.name: each for each in bundled_profiles()}
    if name.casefold() in by_name:
        return by_name[name.casefold()].load()
    near = _near(name.casefold(), list(by_name))
    hint = f"nearest: {', '.join(near)}" if near else f"there are {len(by_name)}"
    raise ValueError(f"no bundled profile {name!r}; {hint} (windtunnel profiles list shows all)")


def _near(name: str, known: list[str]) -> list[str]:
    """Names that go on as this one does, else those that look most like it."""
    return [each for each in known if each.startswith(name)][:4] or difflib.get_close_matches(name, known, 3, 0.3)


@cache
def _loaded(path: Path) -> FittedCost:
    cost = load_profile(path)
    if not isinstance(cost, FittedCost):
        raise ProfileError(f"{path}: a bundled profile must be of kind {FittedCost.name}, got {cost.name}")
    return cost


def _model_name(name: str) -> str:
    """The bundled model's name, or the name itself."""
    try:
        return load_model(name).name
    except (ValueError, OSError):
        return name


def _gpu_name(name: str) -> str | None:
    try:
        return load_gpu(name).name
    except ValueError:
        return None


def _same_cache(kv_cache_dtype: str, each: BundledProfile) -> bool:
    own = ("auto", each.dtype)
    wanted = _DTYPES.get(kv_cache_dtype, kv_cache_dtype)
    return wanted in own if each.kv_cache_dtype in own else wanted == each.kv_cache_dtype
