"""The settings that play a part: their ranges, and their values from text or from Python."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from windtunnel.scenarios.deployments.errors import DeploymentError
from windtunnel.scenarios.deployments.options import Option
from windtunnel.sim.deployment.kv_dtypes import KV_DTYPE_SINCE

GIB = 2**30
_DTYPES = ("auto", "bfloat16", "float", "float16", "float32", "half")
_MAMBA_DTYPES = ("auto", "bfloat16", "float16", "float32")


class Setting(NamedTuple):
    """One setting that a plan or a simulation looks at, under vLLM's name."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    choices: tuple[Any, ...] = ()
    also: tuple[Any, ...] = ()
    """Values outside the range that have a meaning of their own."""
    default: Any = None
    """What vLLM takes in every release from 0.8 to 0.32 that has the option, on every device; None if that differs."""
    unit: str = ""
    """gib: vLLM reads a number of GiB.  bytes: a number of bytes.  share: a part of 1."""


_FROM_1 = Setting(low=1)
_FROM_0 = Setting(low=0)
_PARALLEL = Setting(low=1, default=1)
_SWITCH = Setting(default=False)

SETTINGS: dict[str, Setting] = {
    "model": Setting(),
    "tensor_parallel_size": _PARALLEL,
    "pipeline_parallel_size": _PARALLEL,
    "data_parallel_size": _PARALLEL,
    "data_parallel_size_local": _FROM_0,
    "decode_context_parallel_size": _PARALLEL,
    "prefill_context_parallel_size": _PARALLEL,
    "enable_expert_parallel": _SWITCH,
    "gpu_memory_utilization": Setting(low=0, high=1, low_open=True, unit="share"),
    "kv_cache_memory_bytes": Setting(low=1, unit="bytes"),
    "num_gpu_blocks_override": Setting(low=2),
    "swap_space": Setting(low=0, unit="gib"),
    "cpu_offload_gb": Setting(low=0, default=0.0, unit="gib"),
    "kv_offloading_size": Setting(low=0, unit="gib"),
    "dtype": Setting(choices=_DTYPES, default="auto"),
    "quantization": Setting(),
    "kv_cache_dtype": Setting(choices=tuple(KV_DTYPE_SINCE), default="auto"),
    "kv_cache_dtype_skip_layers": Setting(),
    "block_size": _FROM_1,
    "max_model_len": Setting(low=1, also=(-1,)),
    "max_num_seqs": _FROM_1,
    "max_num_active_seqs": _FROM_1,
    "max_num_batched_tokens": _FROM_1,
    "max_num_scheduled_tokens": _FROM_1,
    "max_num_queued_reqs": _FROM_0,
    "max_num_queued_tokens": _FROM_0,
    "enable_chunked_prefill": Setting(),
    "enable_prefix_caching": Setting(),
    "long_prefill_token_threshold": Setting(low=0, default=0),
    "long_prefill_token_threshold_adaptive": _SWITCH,
    "scheduling_policy": Setting(choices=("fcfs", "priority"), default="fcfs"),
    "scheduler_reserve_full_isl": Setting(),
    "watermark": Setting(low=0, high=1, high_open=True, default=0.0, unit="share"),
    "async_scheduling": Setting(),
    "performance_mode": Setting(choices=("balanced", "interactivity", "throughput"), default="balanced"),
    "enforce_eager": _SWITCH,
    "compilation_config": Setting(),
    "optimization_level": Setting(),
    "cudagraph_capture_sizes": Setting(),
    "max_cudagraph_capture_size": _FROM_0,
    "attention_backend": Setting(),
    "speculative_config": Setting(),
    "hf_overrides": Setting(),
    "enable_lora": _SWITCH,
    "max_loras": Setting(low=1, default=1),
    "max_lora_rank": Setting(choices=(1, 8, 16, 32, 64, 128, 256, 320, 512), default=16),
    "fully_sharded_loras": _SWITCH,
    "limit_mm_per_prompt": Setting(),
    "language_model_only": _SWITCH,
    "disable_sliding_window": _SWITCH,
    "disable_hybrid_kv_cache_manager": Setting(),
    "mamba_block_size": _FROM_1,
    "mamba_cache_dtype": Setting(choices=_MAMBA_DTYPES, default="auto"),
    "mamba_ssm_cache_dtype": Setting(choices=_MAMBA_DTYPES, default="auto"),
    "mamba_cache_mode": Setting(),
}
"""Keys are vLLM's; values are vLLM's but for ``swap_space``, which is in bytes as in a scenario."""

SPECULATIVE_KEYS = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
}
"""Options that give one key of ``speculative_config`` (0.32, and those before 0.8.3)."""


class _Wrong(ValueError):
    """What a value must be, and the remedy."""


def from_text(option: Option, text: str, source: str, written: str) -> Any:
    """The value that vLLM's parser makes of ``text``; None where that says "not given".

    ``source`` (FILE:LINE) and ``written`` (the flag or key as given) are for the error.  Raises DeploymentError.
    """
    if option.takes_none and text in ("", "None"):
        return None
    try:
        value = _READERS[option.type](text)
        return _checked(option, value)
    except _Wrong as wrong:
        raise complaint(source, written, text, f"{wrong}{_unit_remedy(option, text)}") from None


def from_python(option: Option, value: Any, source: str, written: str) -> Any:
    """The value of a keyword argument; text is read as on the command line.  Raises DeploymentError."""
    if value is None:
        return None
    if isinstance(value, str) and option.takes_values and option.kind != "list":
        return from_text(option, value.removeprefix("torch."), source, written)
    try:
        return _checked(option, _of_type(option, value))
    except _Wrong as wrong:
        raise complaint(source, written, value, f"{wrong}{_unit_remedy(option, str(value))}") from None


def complaint(source: str, written: str, value: Any, requirement: str) -> DeploymentError:
    """An error of the form FILE:LINE: KEY = VALUE must be …; remedy."""
    shown = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return DeploymentError(f"{source or 'command line'}: {written} = {shown} {requirement}")


def _checked(option: Option, value: Any) -> Any:
    setting = SETTINGS.get(option.key)
    if setting is None or value is None:
        return value
    if setting.choices and value not in setting.choices:
        raise _Wrong(f"must be one of {', '.join(map(str, setting.choices))}")
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value not in setting.also:
        _check_range(setting, value)
    return round(value * GIB) if option.key == "swap_space" else value


def _check_range(setting: Setting, value: float) -> None:
    above = value > setting.low if setting.low_open else value >= setting.low
    below = value < setting.high if setting.high_open else value <= setting.high
    if above and below and math.isfinite(value):
        return
    words = []
    if setting.low > -math.inf:
        words.append(f"{'above' if setting.low_open else 'at least'} {setting.low:g}")
    if setting.high < math.inf:
        words.append(f"{'below' if setting.high_open else 'at most'} {setting.high:g}")
    also = f", or {setting.also[0]} for the longest that fits" if setting.also else ""
    raise _Wrong(f"must be {' and '.join(words) or 'a finite number'}{also}")


def _of_type(option: Option, value: Any) -> Any:
    if not option.takes_values:
        if not isinstance(value, bool):
            raise _Wrong("must be True or False")
        return value
    if option.kind == "list":
        return list(value) if isinstance(value, (list, tuple)) else [value]
    if option.type in ("int", "count", "count_or_auto"):
        if isinstance(value, bool) or not isinstance(value, int):
            raise _Wrong("must be a whole number")
        return value
    if option.type == "float":
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _Wrong("must be a number")
        return float(value)
    if option.key == "optimization_level":
        return str(value)
    if option.key in SETTINGS and option.type == "text" and not isinstance(value, str):
        raise _Wrong("must be text")
    return value


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _Wrong(f"must be a whole number{_suffix_remedy(text)}") from None


def _suffix_remedy(text: str) -> str:
    try:
        return f"; this flag takes no suffix: write {_count(text)}"
    except _Wrong:
        return f": write {int(float(text))}" if re.fullmatch(r"\d+\.0*", text) else ""


def _count(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if match is None:
        try:
            return int(text)
        except ValueError:
            raise _Wrong("must be a whole number such as 8192, 8k (8,000) or 8K (8,192)") from None
    number, suffix = match.groups()
    power = "kmgt".index(suffix.lower()) + 1
    if suffix.islower():
        return int(float(number) * 10 ** (3 * power))
    if "." in number:
        raise _Wrong(f"must be whole before an upper-case suffix: write {number}{suffix.lower()} or the full number")
    return int(number) << 10 * power


def _count_or_auto(text: str) -> int:
    return -1 if text.strip().lower() in ("-1", "auto") else _count(text)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _Wrong("must be a number") from None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Wrong(f"is no valid JSON ({error}): put it in single quotes so that the shell leaves it alone") from None


def _config(text: str) -> Any:
    """JSON in which numbers outside strings may have suffixes (``_expand_json_human_readable_numbers``, 0.32)."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
    for at in range(0, len(parts), 2):
        parts[at] = re.sub(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b", lambda match: str(_count(match[0])), parts[at])
    return _json("".join(parts))


def _text_or_json(text: str) -> Any:
    return _json(text) if re.match(r"(?s)^\s*{.*}\s*$", text) else text


_READERS: dict[str, Callable[[str], Any]] = {
    "text": str,
    "int": _int,
    "float": _float,
    "count": _count,
    "count_or_auto": _count_or_auto,
    "json": _json,
    "config": _config,
    "text_or_json": _text_or_json,
}

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]i?)B?\s*", re.IGNORECASE)


def _unit_remedy(option: Option, text: str) -> str:
    """What to write instead, where a unit is the mistake."""
    unit = SETTINGS[option.key].unit if option.key in SETTINGS else ""
    match = _SIZE.fullmatch(text)
    if unit == "share":
        return _share_remedy(text)
    if not unit or match is None:
        return ""
    number, prefix = float(match[1]), match[2]
    binary = prefix.lower().endswith("i")
    size = number * (1024 if binary else 1000) ** ("kmgt".index(prefix[0].lower()) + 1)
    if unit == "gib":
        exact = "" if binary else f" ({text.strip()} are {size / GIB:.4g} GiB)"
        return f"; vLLM reads GiB without a unit{exact}: write {size / GIB:.4g}"
    return (
        f"; vLLM reads bytes, where 1g is 10**9 and 1G is 2**30: write {size:.0f} for {text.strip()}, "
        "and mind that GB and GiB differ by 7 %"
    )


def _share_remedy(text: str) -> str:
    number = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%?\s*", text)
    if number and 1 < float(number[1]) <= 100:
        return f"; it is a share of the whole: write {float(number[1]) / 100:g}"
    return "; it is a share of the whole, such as 0.9"
