"""Recorded start-ups of vLLM: which of them say enough to hold an estimate against, and what they say."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from windtunnel.sim.deployment import model as bundled
from windtunnel.sim.deployment.engine_args import engine_defaults
from windtunnel.sim.deployment.gpu import GIB, GpuSpec, load_gpu
from windtunnel.sim.deployment.kv_layout import KvLayout, kv_layout
from windtunnel.sim.deployment.memory_request import has_states
from windtunnel.sim.deployment.memory_rules import layout_rules, memory_rules
from windtunnel.sim.deployment.model_spec import ModelSpec
from windtunnel.sim.deployment.overheads import Setting
from windtunnel.sim.deployment.versions import VersionProfile, profile

STARTUPS_CSV = Path(__file__).with_name("data") / "startups.csv"

_CARDS = {
    "H100 80GB HBM3": "H100-SXM",
    "H100": "H100-SXM",
    "B300 SXM6": "B300",
    "A100-80GB": "A100-80GB-SXM",
    "A100 80GB": "A100-80GB-SXM",
    "RTX 4090": "RTX-4090",
    "(not stated; ~140 GiB card, H200-class)": "H200",
    "L40S/A40-class (44.39 GiB)": "L40S",
    "A10G/L4-class (22.06 GiB)": "A10G",
}
"""Cards of the table by the names of the recordings, where these are others."""

_FP8_MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
_FP8_DYNAMIC = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head", "re:.*linear_attn.*", "re:.*mlp.gate$", "re:.*shared_expert_gate.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "RedHatAI/Ministral-3-14B-Instruct-2512": ("mistralai/Ministral-3-14B-Instruct-2512", {"quant_method": "fp8"}),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8": ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", _FP8_MODELOPT),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", _FP8_MODELOPT),
    "RedHatAI/Qwen3.5-122B-A10B-FP8-dynamic": ("Qwen/Qwen3.5-122B-A10B", _FP8_DYNAMIC),
    "RedHatAI/Qwen3.5-35B-A3B-FP8-dynamic": ("Qwen/Qwen3.5-35B-A3B", _FP8_DYNAMIC),
    "RedHatAI/Qwen3-Coder-Next-FP8-dynamic": ("Qwen/Qwen3-Next-80B-A3B-Instruct", _FP8_DYNAMIC),
    "Qwen2.5-Math-1.5B": ("Qwen/Qwen2.5-1.5B-Instruct", {}),
}
"""Models that are not bundled, as the bundled ones that have their shapes, and how their matrices are stored.  Which
of these stay in high precision is not known, so the logged weights are taken for them."""


class Unusable(ValueError):
    """The recording does not say enough; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class StartUp:
    """One recorded start-up whose pool an estimate can be held against; bytes are those of one GPU."""

    row: int
    """Number in the file, from 0."""
    source: str
    family: str
    """Models of the same shapes, however they are quantised: what is left out together."""
    version: str
    setting: Setting
    layouts: KvLayout
    max_model_len: int
    num_replicas: int
    """Engines whose blocks are logged together."""
    requested_bytes: int
    weights_bytes: tuple[int, ...]
    """Of one GPU of each pipeline stage."""
    weights_logged: bool
    """Taken from the log because the checkpoint's own config is not bundled."""
    is_fitted: bool
    """What constants are fitted to: published releases that the log names."""
    logged_weights_bytes: float | None
    activation_bytes: float | None
    non_torch_bytes: float | None
    captured_graphs_bytes: float | None
    estimated_graphs_bytes: float | None
    available_bytes: float | None
    """For the KV cache, as logged."""
    tokens: int | None
    num_blocks: int | None

    @property
    def gpu(self) -> str:
        """The card."""
        return self.setting.gpu.name

    @property
    def pool_bytes(self) -> float:
        """The pool: as logged, or of as many blocks as were logged or hold the logged tokens."""
        if self.available_bytes is not None:
            return self.available_bytes
        return (self.blocks_of_pool + 0.5) * self.layouts.block_bytes[-1]

    @property
    def blocks_of_pool(self) -> float:
        """Blocks of one replica."""
        if self.num_blocks is not None:
            return self.num_blocks / self.num_replicas
        assert self.tokens is not None
        return self.tokens / self.layouts.block_size

    @property
    def overhead_bytes(self) -> float:
        """What pool and weights, as logged, leave of the budget: activations, non-torch memory, graphs inside of it."""
        weights = self.weights_bytes[-1] if self.logged_weights_bytes is None else self.logged_weights_bytes
        return self.requested_bytes - weights - self.pool_bytes

    @property
    def unexplained_bytes(self) -> float:
        """The same with the weights that a plan reckons with, so that their error is in it, too."""
        return self.requested_bytes - self.weights_bytes[-1] - self.pool_bytes

    def tokens_in(self, overhead_bytes: float) -> float:
        """Tokens (blocks, where only these were logged) that fit beside such overheads."""
        left = [math.floor(self.requested_bytes - weights - overhead_bytes) for weights in self.weights_bytes]
        blocks = self.layouts.num_blocks(left)
        if self.tokens is None:
            return blocks
        by_concurrency = memory_rules(self.setting.version).logs_by_concurrency
        return self.layouts.logged_tokens(blocks, self.max_model_len, by_concurrency=by_concurrency)

    @property
    def logged(self) -> float:
        """What ``tokens_in`` is compared with."""
        return self.tokens if self.tokens is not None else self.blocks_of_pool


def read_rows(path: Path = STARTUPS_CSV) -> list[dict[str, str]]:
    """The rows of a file of start-ups, as they are."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def usable(rows: Iterable[Mapping[str, str]]) -> tuple[list[StartUp], dict[int, str]]:
    """The start-ups that say enough, and why the others do not, by row."""
    found, reasons = [], {}
    for number, row in enumerate(rows):
        try:
            found.append(start_up(number, row))
        except Unusable as reason:
            reasons[number] = str(reason)
    return found, reasons


def start_up(number: int, row: Mapping[str, str]) -> StartUp:
    """One row, understood.  Raises Unusable for what is missing."""
    model, exact = _model(row)
    version = _version(row)
    total = _number(row, "gpu_total_gib")
    gpu = _card(row["gpu"], total)
    size, stages = (int(_number(row, key) or 1) for key in ("tp", "pp"))
    replicas = int(_number(row, "dp") or 1)
    share = _utilization(row)
    rules = profile(version)
    length = int(_number(row, "max_model_len") or model.max_model_len)
    settings = engine_defaults(
        gpu,
        model=model,
        max_model_len=length,
        version=rules,
        max_num_seqs=_whole(row, "max_num_seqs"),
        max_num_batched_tokens=_budget(rules, row, length),
    )
    tokens, blocks, available = _whole(row, "kv_tokens"), _whole(row, "gpu_blocks"), _bytes(row, "kv_avail_gib")
    if tokens is None and blocks is None and (available is None or available <= 0):
        raise Unusable("the pool is not logged")
    layout = kv_layout(
        model,
        tensor_parallel_size=size,
        pipeline_parallel_size=stages,
        kv_cache_dtype=row["kv_dtype"] or "auto",
        block_size=_whole(row, "block_size") or 16,
        max_concurrent_batches=1,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_prefix_caching=_caches_prefixes(rules, model, row),
        rules=layout_rules(rules, model.architecture, v0=_is_v0(row)),
    )
    if tokens is None and blocks is None and available is not None:
        blocks = layout.num_blocks(int(available)) * replicas
    logged_weights = _bytes(row, "weights_gib")
    if not exact and logged_weights is None:
        raise Unusable("the checkpoint's config is not bundled and its weights are not logged")
    usable_bytes = _bytes(row, "usable_gib")
    return StartUp(
        row=number,
        source=row["source"],
        family=_family(model),
        version=version,
        setting=Setting(
            model,
            gpu,
            rules,
            size,
            stages,
            settings.max_num_batched_tokens,
            settings.max_num_seqs,
            row["enforce_eager"] == "True",
            row["kv_dtype"] or "auto",
            replicas,
            _spreads_experts(row, replicas),
        ),
        layouts=layout,
        max_model_len=length,
        num_replicas=replicas,
        requested_bytes=math.ceil(usable_bytes or gpu.memory_bytes * share),
        weights_bytes=_weights(model, size, stages, replicas, row) if exact else (round(logged_weights or 0),) * stages,
        weights_logged=not exact,
        is_fitted=bool(row["vllm_version"]) and "dev" not in row["vllm_version"],
        logged_weights_bytes=logged_weights if stages == 1 else None,
        activation_bytes=_bytes(row, "activation_gib"),
        non_torch_bytes=_bytes(row, "non_torch_gib"),
        captured_graphs_bytes=_bytes(row, "cudagraph_gib"),
        estimated_graphs_bytes=_bytes(row, "cudagraph_est_gib"),
        available_bytes=available if stages == 1 else None,
        tokens=tokens,
        num_blocks=blocks if tokens is None else None,
    )


def _model(row: Mapping[str, str]) -> tuple[ModelSpec, bool]:
    """The model, and whether its checkpoint's own config is known."""
    name, dtype = row["model"], row["dtype"] or "auto"
    if not name:
        raise Unusable("the model is not named")
    shapes, quantization = _SHAPES.get(name, (name, {}))
    if row["quant"] == "fp8" and name.startswith("meta-llama"):
        quantization = {"quant_method": "fp8"}
    try:
        known = bundled.load_model(shapes)
    except ValueError:
        raise Unusable(f"the model {name} is not bundled") from None
    config = dict(_configs()[known.name])
    if quantization:
        config["quantization_config"] = quantization
    return bundled.model_from_config(config, known.name, dtype=dtype), name not in _SHAPES


@cache
def _configs() -> dict[str, dict[str, Any]]:
    path = Path(bundled.__file__).with_name("models.json")
    return {entry["id"]: entry["config"] for entry in json.loads(path.read_text(encoding="utf-8"))["models"]}


def _family(model: ModelSpec) -> str:
    return f"{model.architecture} {model.num_layers}x{model.hidden_size} {model.num_experts}"


_V0_PROFILE = "vllm-0.8"
"""For logs that name activations, non-torch memory and graphs on NVIDIA cards but no version: that line is of 0.6.5 to
0.10."""


def _version(row: Mapping[str, str]) -> str:
    release = re.match(r"0\.(\d+)(?:\.\d+(?:\.post\d+)?)?", row["vllm_version"])
    if release is None:
        if row["activation_gib"] and row["non_torch_gib"]:
            return _V0_PROFILE
        raise Unusable("the version is not logged")
    if int(release[1]) < 8:
        raise Unusable(f"vLLM {row['vllm_version']} is older than 0.8")
    return _published(f"vllm-{release[0]}") or f"vllm-0.{release[1]}"


def _published(name: str) -> str | None:
    """The name, if there is such a release; a build from between two has the rules of its minor version's last."""
    try:
        return profile(name).name
    except ValueError:
        return None


def _is_v0(row: Mapping[str, str]) -> bool:
    """Whether the V0 engine wrote the log, by what ``_version`` goes by."""
    return not row["vllm_version"]


def _caches_prefixes(rules: VersionProfile, model: ModelSpec, row: Mapping[str, str]) -> bool:
    """As logged, else the default of the release."""
    if row["prefix_caching"]:
        return row["prefix_caching"] == "True"
    return memory_rules(rules).caches_states or not has_states(model)


def _budget(rules: VersionProfile, row: Mapping[str, str], max_model_len: int) -> int | None:
    """The token budget that was given; the V0 engine's default for logs of it."""
    given = _whole(row, "max_num_batched_tokens")
    if given is None and _is_v0(row) and rules.v0 is not None:
        return rules.v0.max_num_batched_tokens(max_model_len)
    return given


def _card(name: str, total_gib: float | None) -> GpuSpec:
    """The card of the table, with the total that was logged; any other card by its name and total."""
    try:
        card = load_gpu(_CARDS.get(name, name))
    except ValueError:
        if total_gib is None:
            raise Unusable("the card's memory is not given") from None
        card = replace(load_gpu("rtx-3090"), name=name or "not named")  # only name and memory count here
    return card if total_gib is None else replace(card, memory_bytes=round(total_gib * GIB))


def _utilization(row: Mapping[str, str]) -> float:
    """As the recorded arguments have it, where they are noted; else the column."""
    noted = re.search(r"gpu-memory-utilization: ([\d.]+)", row["note"])
    share = float(noted[1]) if noted else _number(row, "gmu")
    if share is None:
        if "gmu default" in row["note"] and row["vllm_version"]:
            return 0.9
        raise Unusable("gpu_memory_utilization is not given")
    return share


def _weights(model: ModelSpec, size: int, stages: int, replicas: int, row: Mapping[str, str]) -> tuple[int, ...]:
    """Of each stage."""
    return tuple(
        model.weight_bytes(
            size,
            pipeline_parallel_size=stages,
            pipeline_rank=rank,
            data_parallel_size=replicas,
            expert_parallel=_spreads_experts(row, replicas),
        )
        + model.rotary_cache_bytes()
        for rank in range(stages)
    )


def _spreads_experts(row: Mapping[str, str], replicas: int) -> bool:
    """Whether replicas hold whole experts: where the recording's name says so."""
    return replicas > 1 and "_ep" in row["source"].rsplit("/", 1)[-1]


def _number(row: Mapping[str, str], key: str) -> float | None:
    return float(row[key]) if row[key] else None


def _whole(row: Mapping[str, str], key: str) -> int | None:
    number = _number(row, key)
    return None if number is None else int(number)


def _bytes(row: Mapping[str, str], key: str) -> float | None:
    number = _number(row, key)
    return None if number is None else number * GIB
