"""How a checkpoint's linear layers are stored, from the ``quantization_config`` of its ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from windtunnel.sim.deployment.config_reader import ConfigReader
from windtunnel.sim.deployment.model_spec import UnsupportedModel, WeightFormat, check_whole


def weight_format(config: Mapping[str, Any], name: str) -> WeightFormat | None:
    """The WeightFormat of model ``name``, or None where the config quantises nothing.

    Raises UnsupportedModel for a method, a width or a mixture of precisions that is not modelled.
    """
    outer = ConfigReader(config, name)
    quantization = outer.table("quantization_config") or outer.table("compression_config")
    if not quantization:
        return None
    read = ConfigReader(quantization, f"{name}, quantisation")
    _refuse_mixed_precision(read, name)
    method = str(quantization.get("quant_method") or read.table("producer").get("name") or "").lower()
    if method == "fp8":
        return _fp8(read)
    if method in ("awq", "gptq"):
        return _weight_only(method, read, name)
    if method == "compressed-tensors":
        return _compressed_tensors(read, name)
    if method == "modelopt" and quantization.get("quant_algo") == "FP8":
        return WeightFormat("fp8 (modelopt)", 8, gemm_dtype="fp8")
    algorithm = quantization.get("quant_algo")
    raise UnsupportedModel(
        f"{name}: quantisation {method or 'without quant_method'}{f' {algorithm}' if algorithm else ''} is not "
        "modelled yet; modelled: fp8, modelopt FP8, awq, gptq and compressed-tensors with 8-bit or 4-bit weights"
    )


def _fp8(read: ConfigReader) -> WeightFormat:
    block = read.listed("weight_block_size")
    if block:
        size = math.prod(check_whole(read.name, "weight_block_size", side, 1) for side in block)
        return WeightFormat("fp8 (block scales)", 8, size, 32, "fp8")
    return WeightFormat("fp8", 8, gemm_dtype="fp8")


def _weight_only(method: str, read: ConfigReader, name: str) -> WeightFormat:
    bits = read.whole("bits", default=read.whole("w_bit", default=0, least=0), least=0)
    if bits not in (4, 8):
        raise UnsupportedModel(f"{name}: {method} with {bits or 'unstated'} bits is not modelled; 4 and 8 are")
    group = read.whole("group_size", default=read.whole("q_group_size", default=128, least=-1), least=-1)
    scale_and_zero_bits = 16 + bits
    return WeightFormat(f"{method} {bits}-bit", bits, max(group, 0), scale_and_zero_bits)


def _compressed_tensors(read: ConfigReader, name: str) -> WeightFormat:
    groups = read.table("config_groups")
    if len(groups) != 1:
        raise UnsupportedModel(f"{name}: compressed-tensors with {len(groups)} groups is not modelled; one is")
    group = ConfigReader(ConfigReader(groups, read.name).table(next(iter(groups))), read.name)
    weights = ConfigReader(group.table("weights"), f"{read.name}, weights")
    bits, kind = weights.whole("num_bits", default=0, least=0), str(weights.config.get("type"))
    if (bits, kind) not in ((8, "float"), (8, "int"), (4, "int")):
        raise UnsupportedModel(f"{name}: compressed-tensors with {bits}-bit {kind} weights is not modelled")
    group_size = max(weights.whole("group_size", default=0, least=-1), 0)
    zero_bits = 0 if weights.config.get("symmetric", True) else bits
    eight_bit_arithmetic = bits == 8 and bool(group.config.get("input_activations"))
    gemm_dtype = {"float": "fp8", "int": "int8"}[kind] if eight_bit_arithmetic else "bf16"
    return WeightFormat(f"compressed-tensors {kind}{bits}", bits, group_size, 16 + zero_bits, gemm_dtype)


_KEPT_KEYS = ("modules_to_not_convert", "ignore", "exclude_modules")
_ALWAYS_HIGH_PRECISION = ("lm_head", "embed", "norm", "gate", "router")


def _refuse_mixed_precision(read: ConfigReader, name: str) -> None:
    kept = next((modules for key in _KEPT_KEYS if (modules := read.listed(key))), ())
    for module in kept:
        last = str(module).rstrip("$").replace("\\", "").removesuffix(".*").rsplit(".", 1)[-1]
        if not any(word in last for word in _ALWAYS_HIGH_PRECISION) or last in ("gate_proj", "gate_up_proj"):
            raise UnsupportedModel(f"{name}: quantisation that leaves {module} in high precision is not modelled yet")
