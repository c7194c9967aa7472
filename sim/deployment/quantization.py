"""How a checkpoint's linear layers are stored, from the ``quantization_config`` of its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windtunnel.sim.deployment.model_spec import UnsupportedModel, WeightFormat


def weight_format(config: Mapping[str, Any], name: str) -> WeightFormat | None:
    """The WeightFormat of model ``name``, or None where the config quantises nothing.

    Raises UnsupportedModel for a method, a width or a mixture of precisions that is not modelled.
    """
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return None
    _refuse_mixed_precision(quantization, name)
    producer = quantization.get("producer") or {}
    method = str(quantization.get("quant_method") or producer.get("name") or "").lower()
    if method == "fp8":
        return _fp8(quantization)
    if method in ("awq", "gptq"):
        return _weight_only(method, quantization, name)
    if method == "compressed-tensors":
        return _compressed_tensors(quantization, name)
    if method == "modelopt" and quantization.get("quant_algo") == "FP8":
        return WeightFormat("fp8 (modelopt)", 8, gemm_dtype="fp8")
    algorithm = quantization.get("quant_algo")
    raise UnsupportedModel(
        f"{name}: quantisation {method or 'without quant_method'}{f' {algorithm}' if algorithm else ''} is not "
        "modelled yet; modelled: fp8, modelopt FP8, awq, gptq and compressed-tensors with 8-bit or 4-bit weights"
    )


def _fp8(quantization: Mapping[str, Any]) -> WeightFormat:
    block = quantization.get("weight_block_size")
    if block:
        return WeightFormat("fp8 (block scales)", 8, int(block[0]) * int(block[1]), 32, "fp8")
    return WeightFormat("fp8", 8, gemm_dtype="fp8")


def _weight_only(method: str, quantization: Mapping[str, Any], name: str) -> WeightFormat:
    bits: Any = quantization.get("bits", quantization.get("w_bit"))
    if bits not in (4, 8):
        raise UnsupportedModel(f"{name}: {method} with {bits} bits is not modelled; 4 and 8 are")
    group = int(quantization.get("group_size", quantization.get("q_group_size", 128)))
    scale_and_zero_bits = 16 + bits
    return WeightFormat(f"{method} {bits}-bit", bits, max(group, 0), scale_and_zero_bits)


def _compressed_tensors(quantization: Mapping[str, Any], name: str) -> WeightFormat:
    groups = list((quantization.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise UnsupportedModel(f"{name}: compressed-tensors with {len(groups)} groups is not modelled; one is")
    weights = groups[0].get("weights") or {}
    bits: Any = weights.get("num_bits")
    kind: Any = weights.get("type")
    if (bits, kind) not in ((8, "float"), (8, "int"), (4, "int")):
        raise UnsupportedModel(f"{name}: compressed-tensors with {bits}-bit {kind} weights is not modelled")
    group_size = max(int(weights.get("group_size") or 0), 0)
    zero_bits = 0 if weights.get("symmetric", True) else bits
    eight_bit_arithmetic = bits == 8 and bool(groups[0].get("input_activations"))
    gemm_dtype = {"float": "fp8", "int": "int8"}[kind] if eight_bit_arithmetic else "bf16"
    return WeightFormat(f"compressed-tensors {kind}{bits}", bits, group_size, 16 + zero_bits, gemm_dtype)


_KEPT_KEYS = ("modules_to_not_convert", "ignore", "exclude_modules")
_ALWAYS_HIGH_PRECISION = ("lm_head", "embed", "norm", "gate", "router")


def _refuse_mixed_precision(quantization: Mapping[str, Any], name: str) -> None:
    kept = next((quantization[key] for key in _KEPT_KEYS if quantization.get(key)), ())
    for module in kept:
        last = str(module).rstrip("$").replace("\\", "").removesuffix(".*").rsplit(".", 1)[-1]
        if not any(word in last for word in _ALWAYS_HIGH_PRECISION) or last in ("gate_proj", "gate_up_proj"):
            raise UnsupportedModel(f"{name}: quantisation that leaves {module} in high precision is not modelled yet")
