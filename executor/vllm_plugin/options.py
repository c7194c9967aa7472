"""What ``--additional-config '{"windtunnel": {...}}'`` may say to the simulated executor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from windtunnel.executor.vllm_plugin.section import Section
from windtunnel.sim.cost.constant import AffineCost, ConstantCost
from windtunnel.sim.cost.profile import load_profile
from windtunnel.sim.cost.roofline import RooflineCost, RooflineFactors
from windtunnel.sim.deployment.gpu import GpuSpec, load_gpu
from windtunnel.sim.deployment.model_spec import ModelSpec
from windtunnel.sim.engine.protocols import CostModel

SECTION = Section("windtunnel")
PACES = ("wall", "virtual")
COST_KINDS = ("roofline", "constant", "affine", "profile")
_KEYS_OF_COST = {
    "roofline": tuple(item.name for item in fields(RooflineFactors)),
    "constant": ("step_s",),
    "affine": ("base_s", "token_s", "seq_s", "decode_context_s", "prefill_pair_s"),
    "profile": ("path",),
}
_NEEDED_OF_COST = {"roofline": (), "constant": ("step_s",), "affine": ("base_s",), "profile": ("path",)}


@dataclass(frozen=True, slots=True)
class SimOptions:
    """How the simulated executor prices steps, lets time pass and sizes the KV cache.

    Raises ValueError, naming the key, its value and the allowed range.
    """

    cost: Mapping[str, Any] = field(default_factory=lambda: {"kind": "roofline"})
    """The cost model: ``kind`` (roofline, constant, affine, profile) and its parameters, times in seconds."""
    gpu: str | None = None
    """The card to be simulated: what the roofline prices and the memory plan fills."""
    model: str | None = None
    """The model to be priced where that is not the one that is served: a bundled name or a config.json."""
    num_gpu_blocks: int | None = None
    """KV blocks, the null block included; by default the memory plan's for ``gpu``."""
    pace: str = "wall"
    """``wall``: a step lasts as long as it takes, divided by ``speed``; ``virtual``: inside VirtualClock, no time."""
    speed: float = 1.0
    """Simulated seconds in one second of the wall clock."""
    async_scheduling: bool | None = None
    """Overrides vLLM's setting, which its CPU platform turns off; None leaves it."""
    step_log: str | None = None
    """File to which a line of JSON is written for each step."""

    def __post_init__(self) -> None:
        SECTION.check("cost", self.cost, isinstance(self.cost, Mapping), 'an object such as {"kind": "constant", ...}')
        for key in ("gpu", "model", "step_log"):
            value = getattr(self, key)
            SECTION.check(key, value, value is None or (isinstance(value, str) and value != ""), "a string")
        SECTION.check(
            "num_gpu_blocks", self.num_gpu_blocks, _is_whole(self.num_gpu_blocks, 2), "a whole number of at least 2"
        )
        SECTION.check("pace", self.pace, self.pace in PACES, f"one of {', '.join(PACES)}")
        SECTION.check("speed", self.speed, _is_number(self.speed) and self.speed > 0, "a finite number above 0")
        if self.pace == "virtual" and self.speed != 1.0:
            raise ValueError(
                f"{SECTION.named('speed')} has no effect in virtual time, got {self.speed!r}: leave it out"
            )
        value = self.async_scheduling
        SECTION.check("async_scheduling", value, value is None or isinstance(value, bool), "true or false")
        _check_cost(self.cost)

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> SimOptions:
        """The options in vLLM's ``additional_config``; all defaults where there are none.

        Raises ValueError for an unknown key.
        """
        return cls(**SECTION.read(additional_config, [item.name for item in fields(cls)]))

    @property
    def needs_model(self) -> bool:
        """Whether the cost model depends on the model's shape."""
        return bool(self.cost.get("kind", "roofline") == "roofline")

    def gpu_spec(self, needed_for: str) -> GpuSpec:
        """The card.  Raises ValueError, saying what it is needed for, if none or an unknown one is named."""
        if self.gpu is None:
            raise ValueError(
                f'{SECTION.named("gpu")} is missing, {needed_for} needs it: add "gpu": "H100" (or another card)'
            )
        try:
            return load_gpu(self.gpu)
        except ValueError as error:
            raise ValueError(f"{SECTION.named('gpu')}: {error}") from error

    def make_cost(self, model: ModelSpec | None, tensor_parallel_size: int, kv_cache_dtype: str) -> CostModel:
        """The cost model; ``model`` may be None unless ``needs_model``."""
        kind = self.cost.get("kind", "roofline")
        parameters = {key: value for key, value in self.cost.items() if key != "kind"}
        try:
            if kind == "constant":
                return ConstantCost(**parameters)
            if kind == "affine":
                return AffineCost(**parameters)
            if kind == "profile":
                return load_profile(parameters["path"])
            assert model is not None, "the caller gives a model if needs_model"
            factors = RooflineFactors(**parameters)
        except (OSError, ValueError) as error:
            raise ValueError(f"{SECTION.named('cost')}: {error}") from error
        gpu = self.gpu_spec("the roofline")
        return RooflineCost(model, gpu, tensor_parallel_size, kv_cache_dtype=kv_cache_dtype, factors=factors)


def _check_cost(cost: Mapping[str, Any]) -> None:
    kind = cost.get("kind", "roofline")
    SECTION.check("cost.kind", kind, kind in COST_KINDS, f"one of {', '.join(COST_KINDS)}")
    allowed = _KEYS_OF_COST[kind]
    unknown = [key for key in cost if key not in (*allowed, "kind")]
    if unknown:
        raise ValueError(
            f"{SECTION.named('cost')} has unknown {', '.join(unknown)}: {kind} allows {', '.join(allowed)}"
        )
    missing = [key for key in _NEEDED_OF_COST[kind] if key not in cost]
    if missing:
        raise ValueError(f"{SECTION.named('cost')} lacks {', '.join(missing)}, which {kind} needs")
    for key, value in cost.items():
        if key == "path":
            SECTION.check("cost.path", value, isinstance(value, str), "a path")
        elif key != "kind":
            SECTION.check(f"cost.{key}", value, _is_number(value), "a finite number")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object, least: int) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least)
