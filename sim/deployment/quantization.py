"""How a checkpoint's linear layers are stored, from the ``quantization_config`` of its ``config.json``."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from windtunnel.sim.deployment.config_reader import ConfigReader
from windtunnel.sim.deployment.model_spec import UnsupportedModel, check_whole
from windtunnel.sim.deployment.weights import FormatRule, WeightFormat


class Storage(NamedTuple):
    """How a checkpoint stores its matrices and asks for its KV cache."""

    format: WeightFormat | None = None
    """Of every linear layer that no rule names."""
    rules: tuple[FormatRule, ...] = ()
    kv_cache_dtype: str = ""
    """What "auto" means for the KV cache; "" is the model's dtype."""
    head_format: WeightFormat | None = None
    """Of lm_head; None where it keeps the model's dtype, as in most checkpoints."""


def storage(config: Mapping[str, Any], name: str) -> Storage:
    """How model ``name`` is stored; an empty Storage where the config quantises nothing.

    Raises UnsupportedModel for a method or a width whose bytes are not known.
    """
    outer = ConfigReader(config, name)
    quantization = outer.table("quantization_config") or outer.table("compression_config")
    if not quantization:
        return Storage()
    read = ConfigReader(quantization, f"{name}, quantisation")
    method = str(quantization.get("quant_method") or read.table("producer").get("name") or "").lower()
    if method in _METHODS:
        return _METHODS[method](read, name)
    if method.startswith("modelopt"):
        return _modelopt(read, name)
    raise UnsupportedModel(
        f"{name}: quantisation {method or 'without quant_method'} is not modelled, so its weights would be a guess; "
        f"modelled: {', '.join(_METHODS)} and modelopt"
    )


def _kept(keys: Sequence[str], read: ConfigReader, *, wildcard: bool = False) -> tuple[FormatRule, ...]:
    """A rule for the modules that stay in high precision; none where they never are quantised anyway."""
    listed = next((modules for key in keys if (modules := read.listed(key))), ())
    return _rules([str(module) for module in listed if not _never_quantised(str(module))], None, wildcard)


_NEVER_QUANTISED = ("lm_head", "embed", "norm", "gate", "router", "bias", "vision", "visual", "audio", "mtp", "scale")
_MATRICES = ("gate_proj", "gate_up_proj")


def _never_quantised(module: str) -> bool:
    """Whether the name can only mean something that is counted in the model's dtype in any case."""
    last = module.rstrip("$").replace("\\", "").removesuffix("*").rstrip(".").rsplit(".", 1)[-1]
    return any(word in last for word in _NEVER_QUANTISED) and last not in _MATRICES


def _rules(names: Iterable[str], form: WeightFormat | None, wildcard: bool = False) -> tuple[FormatRule, ...]:
    """A rule that stores the named modules in ``form``; () for no names.

    A name is a module of one layer, "re:" and a regular expression, a shell pattern where ``wildcard``, or a part of
    a name that means every layer ("self_attn").
    """
    modules, patterns = [], []
    for name in names:
        if name.startswith("re:"):
            patterns.append(name[3:])
        elif any(word in name for word in ("visual", "vision", "audio", "mtp.")):
            continue
        elif wildcard and (held := _WHOLE_MODULE.fullmatch(name)) is not None:
            modules.append(_spelling(held[1]))
        elif wildcard and any(letter in name for letter in "*?["):
            patterns.append(fnmatch.translate(name))
        elif (place := _LAYER.search(name)) is not None:
            modules.append(_spelling(place[0].lstrip(".")))
        else:
            word = re.escape(name.strip("*.")).replace(r"\*", ".*")
            patterns.append(rf".*(?<![^.]){word}(?![^.])")
    _check_patterns(patterns)
    if not modules and not patterns:
        return ()
    return (FormatRule(form, frozenset(modules), tuple(_spelling(pattern) for pattern in patterns)),)


_WHOLE_MODULE = re.compile(r"(?:[\w.]*\.)?(layers\.(?:0|\d+(?:\.\w+)+))\.?\*")
"""A shell pattern for all of one module, such as "model.layers.3.self_attn*" (but "layers.1*" is layer 10, too)."""
_LAYER = re.compile(r"(?:^|\.)layers\.\d+(\..*)?$")
_SPELLINGS = {
    "block_sparse_moe": "mlp",
    "feed_forward": "mlp",
    "ffn.": "mlp.",
    ".attn.": ".self_attn.",
    ".w1": ".gate_proj",
    ".w2": ".down_proj",
    ".w3": ".up_proj",
}


def _spelling(name: str) -> str:
    """The name as ``layers`` spells it."""
    for theirs, ours in _SPELLINGS.items():
        name = name.replace(theirs, ours)
    return name


def _check_patterns(patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(f"(?:{pattern})")
        except re.error as error:
            raise ValueError(f"the quantisation's pattern {pattern!r:.60} is no regular expression: {error}") from None


def _fp8(read: ConfigReader, name: str) -> Storage:
    del name
    rules = _kept(("modules_to_not_convert", "ignored_layers"), read)
    block = read.listed("weight_block_size")
    if block:
        return Storage(_block_format("fp8 (block scales)", block, read.name), rules)
    return Storage(WeightFormat("fp8", 8, gemm_dtype="fp8"), rules)


def _block_format(title: str, block: Sequence[Any], where: str) -> WeightFormat:
    if len(block) != 2:
        raise ValueError(f"{where}: weight_block_size must name rows and columns, got {list(block)!r:.60}")
    rows, columns = (check_whole(where, "weight_block_size", side, 1) for side in block)
    return WeightFormat(title, 8, rows * columns, 32, "fp8", block=(rows, columns))


def _awq(read: ConfigReader, name: str) -> Storage:
    return _weight_only("awq", read, name)


def _gptq(read: ConfigReader, name: str) -> Storage:
    return _weight_only("gptq", read, name)


def _weight_only(method: str, read: ConfigReader, name: str) -> Storage:
    bits = read.whole("bits", default=read.whole("w_bit", default=0, least=0), least=0)
    if bits not in (4, 8):
        raise UnsupportedModel(f"{name}: {method} with {bits or 'unstated'} bits is not modelled; 4 and 8 are")
    group = read.whole("group_size", default=read.whole("q_group_size", default=128, least=-1), least=-1)
    form = WeightFormat(f"{method} {bits}-bit", bits, max(group, 0), 16 + bits)  # scale and zero point
    if group <= 0:
        form = replace(form, channel_bits=16 + bits)
    if read.config.get("desc_act"):
        form = replace(form, order_bits=64)  # the order and its inverse, in int32
    return Storage(form, _kept(("modules_to_not_convert",), read))


def _bitsandbytes(read: ConfigReader, name: str) -> Storage:
    rules = _kept(("llm_int8_skip_modules",), read)
    if read.config.get("load_in_4bit"):
        kind = str(read.config.get("bnb_4bit_quant_type") or "fp4")
        return Storage(WeightFormat(f"bitsandbytes {kind}", 4, 64, 32), rules)  # vLLM unpacks nested scales to float32
    if read.config.get("load_in_8bit"):
        return Storage(WeightFormat("bitsandbytes int8", 8, channel_bits=32), rules)
    raise UnsupportedModel(f"{name}: bitsandbytes needs load_in_4bit or load_in_8bit to say how weights are stored")


MXFP4 = WeightFormat("mxfp4", 4, 32, 8, pads_experts_to=(128, 256))
"""Four bits a weight and an eight-bit exponent for 32 of them.  vLLM's Marlin and TRT-LLM kernels want an expert's
width on one GPU as a multiple of 128 and the hidden size as one of 256 (``oracle/mxfp4.py``)."""


def _mxfp4(read: ConfigReader, name: str) -> Storage:
    """gpt-oss: only the experts are quantised, whatever the list of modules says."""
    del read, name
    return Storage(None, (FormatRule(MXFP4, patterns=(r".*\.experts\.",)),))


def _compressed_tensors(read: ConfigReader, name: str) -> Storage:
    groups = read.table("config_groups")
    if not groups:
        raise UnsupportedModel(f"{name}: compressed-tensors without config_groups does not say how weights are stored")
    reader = ConfigReader(groups, read.name)
    usual: list[WeightFormat] = []
    named: tuple[FormatRule, ...] = ()
    for key in groups:
        group = ConfigReader(reader.table(key), read.name)
        form = _compressed_format(group, name)
        targets = [str(target) for target in group.listed("targets")] or ["Linear"]
        others = [target for target in targets if target != "Linear"]
        named += _rules(others, form)
        usual += [form] if len(others) < len(targets) else []
    if len(usual) > 1:
        raise UnsupportedModel(f"{name}: compressed-tensors with {len(usual)} groups for Linear is not modelled")
    kv_dtype = "fp8" if read.config.get("kv_cache_scheme") else ""
    return Storage(usual[0] if usual else None, (*_kept(("ignore",), read), *named), kv_dtype)


def _compressed_format(group: ConfigReader, name: str) -> WeightFormat:
    weights = ConfigReader(group.table("weights"), f"{group.name}, weights")
    bits, kind = weights.whole("num_bits", default=0, least=0), str(weights.config.get("type"))
    group_size = max(weights.whole("group_size", default=0, least=-1), 0)
    if (bits, kind) == (4, "float"):
        packing = str(group.config.get("format") or "")
        return replace(MXFP4, pads_experts_to=(0, 0)) if "mxfp4" in packing or group_size == 32 else NVFP4
    if (bits, kind) not in ((8, "float"), (8, "int"), (4, "int")):
        raise UnsupportedModel(f"{name}: compressed-tensors with {bits}-bit {kind} weights is not modelled")
    zero_bits = 0 if weights.config.get("symmetric", True) else bits
    eight_bit_arithmetic = bits == 8 and bool(group.config.get("input_activations"))
    gemm_dtype = {"float": "fp8", "int": "int8"}[kind] if eight_bit_arithmetic else "bf16"
    title = f"compressed-tensors {kind}{bits}"
    if weights.config.get("strategy") == "block":
        return replace(_block_format(title, weights.listed("block_structure"), weights.name), gemm_dtype=gemm_dtype)
    if group_size:
        order_bits = 32 if weights.config.get("actorder") in ("group", True) else 0
        return WeightFormat(title, bits, group_size, 16 + zero_bits, gemm_dtype, order_bits=order_bits)
    channel_bits = 32 if weights.config.get("strategy") == "channel" else 0
    return WeightFormat(title, bits, 0, 16 + zero_bits, gemm_dtype, channel_bits=channel_bits)


NVFP4 = WeightFormat("nvfp4", 4, 16, 8, overhead_bytes=8)
"""Four bits a weight, an fp8 scale for 16 of them, and two float32 scales a matrix."""

_MODELOPT = {
    "FP8": WeightFormat("fp8 (modelopt)", 8, gemm_dtype="fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat("fp8 (modelopt, channels)", 8, gemm_dtype="fp8", channel_bits=32),
    "FP8_PB_WO": WeightFormat("fp8 (modelopt, blocks)", 8, 128 * 128, 32, "fp8", block=(128, 128)),
    "NVFP4": NVFP4,
    "NVFP4_AWQ": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "MXFP8": WeightFormat("mxfp8", 8, 32, 8, "fp8"),
}


def _modelopt(read: ConfigReader, name: str) -> Storage:
    """ModelOpt: quantises every linear layer and lm_head but those that are excluded."""
    inner = read.table("quantization") or read.config
    reader = ConfigReader(inner, read.name)
    algorithm = str(inner.get("quant_algo") or "")
    kv_dtype = _modelopt_kv_dtype(inner, name)
    excluded = ("exclude_modules", "ignore")
    kept = _kept(excluded, reader, wildcard=True)
    if algorithm == "MIXED_PRECISION":
        head = read.table("quantized_layers").get("lm_head") or reader.table("quantized_layers").get("lm_head")
        head_format = _modelopt_format(_algorithm(head), name) if head else None
        return Storage(None, (*kept, *_mixed(reader, name)), kv_dtype, head_format)
    form = _modelopt_format(algorithm, name)
    names = [str(module) for key in excluded for module in reader.listed(key)]
    keeps_head = any(fnmatch.fnmatchcase(head, module) for head in _HEADS for module in names)
    return Storage(form, kept, kv_dtype, None if keeps_head else form)


_HEADS = ("lm_head", "language_model.lm_head")


def _algorithm(how: object) -> str:
    return str(how.get("quant_algo")) if isinstance(how, Mapping) else str(how)


def _modelopt_format(algorithm: str, name: str) -> WeightFormat:
    if algorithm not in _MODELOPT:
        raise UnsupportedModel(
            f"{name}: quantisation modelopt {algorithm or 'without quant_algo'} is not modelled; "
            f"modelled: {', '.join(_MODELOPT)} and MIXED_PRECISION"
        )
    return _MODELOPT[algorithm]


def _mixed(read: ConfigReader, name: str) -> Iterable[FormatRule]:
    layers = read.table("quantized_layers")
    if not layers:
        raise UnsupportedModel(f"{name}: modelopt MIXED_PRECISION without quantized_layers does not say what is how")
    by_algorithm: dict[str, list[str]] = {}
    for module, how in layers.items():
        if "experts." in module and not re.search(r"experts\.0(\.|$)", module):
            continue  # all experts of a layer are stored alike; the first stands for them
        by_algorithm.setdefault(_algorithm(how), []).append(str(module))
    for algorithm, modules in by_algorithm.items():
        yield from _rules(modules, _modelopt_format(algorithm, name), wildcard=True)


def _modelopt_kv_dtype(inner: Mapping[str, Any], name: str) -> str:
    """As vLLM's ``get_kv_cache_quant_algo_string``."""
    wanted = inner.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo")
    if isinstance(wanted, Mapping):
        bits = wanted.get("num_bits")
        wanted = {8: "fp8", 4: "nvfp4"}.get(bits) if isinstance(bits, int) else None
    if not wanted or str(wanted).lower() == "none":
        return ""
    if str(wanted).lower() != "fp8":
        raise UnsupportedModel(f"{name}: a KV cache in {wanted!s:.20} is not modelled; fp8 is")
    return "fp8"


_METHODS = {
    "fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}
