"""What a card's compute capability decides: the model's type, and what vLLM refuses on it.

Cards without a known capability (AMD's, and those that are given by their memory alone) are not checked.  Sources:
``supported_dtypes`` and ``check_if_supports_dtype`` in ``vllm/platforms/cuda.py`` (before 0.9.1
``_check_if_gpu_supports_dtype`` in ``v1/worker/gpu_worker.py``), ``_get_and_verify_dtype`` in ``config/model.py``,
``get_min_capability`` of each method in ``model_executor/layers/quantization``, and ``v1/attention/backends/
triton_attn.py``; the releases that were read are named beside each rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from windtunnel.sim.deployment.gpu import GpuSpec
from windtunnel.sim.deployment.memory_request import MemoryRequest
from windtunnel.sim.deployment.model_spec import ModelSpec
from windtunnel.sim.deployment.refusal import RefusedByVllm
from windtunnel.sim.deployment.versions import VersionProfile
from windtunnel.sim.deployment.weights import WeightFormat

AMPERE, ADA = (8, 0), (8, 9)
"""The first with bfloat16, and the first with fp8."""
_FALLS_BACK_SINCE = "0.9.1"
"""dtype "auto" gives way to float16 on cards without bfloat16; before, such a start was refused."""
_CHECKS_FP8_CACHE_SINCE = "0.24.0"
"""The Triton backend, the only one left below Ampere, refuses an fp8 cache in words (read in 0.24 to 0.32; in 0.21 it
does not)."""


def on_card(model: ModelSpec, gpu: GpuSpec, version: VersionProfile) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model in the type that dtype "auto" runs it in on this card, and a sentence where that is another one."""
    capability = gpu.compute_capability
    if capability is None or capability >= AMPERE or model.dtype != "bfloat16":
        return model, ()
    if not version.is_at_least(_FALLS_BACK_SINCE):
        return model, ()
    told = f"{gpu.name} has no bfloat16 (compute capability {_text(capability)}): vLLM falls back to float16."
    return replace(model, dtype="float16"), (told,)


def check_card(request: MemoryRequest) -> None:
    """Raise RefusedByVllm for what vLLM refuses on this card, whatever the memory."""
    capability, gpu = request.gpu.compute_capability, request.gpu
    if capability is None:
        return
    if request.model.dtype == "bfloat16" and capability < AMPERE:
        raise RefusedByVllm(
            "Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your "
            f"{gpu.name} GPU has compute capability {_text(capability)}. You can use float16 instead by explicitly "
            "setting the `dtype` flag in CLI, for example: --dtype=half."
        )
    for form in _formats(request.model):
        _check_format(form, capability, request.version)
    _check_cache(request, capability)


def card_notes(request: MemoryRequest) -> Iterator[str]:
    """Sentences on what is not refused, and not certain either."""
    capability = request.gpu.compute_capability
    if capability is None:
        return
    if capability < AMPERE and request.runs_on_v0 and not request.uses_v0_engine:
        yield (
            f"{request.version.label} runs cards below compute capability 8.0, such as {request.gpu.name}, on its V0 "
            "engine, which is planned."
        )
    if not _keeps_fp8(request) or capability >= ADA:
        return
    yield (
        f"{request.gpu.name} has no fp8 units (compute capability {_text(capability)}): an fp8 KV cache needs the "
        "FlashInfer backend there; the Triton backend does not take it."
    )


def _text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _number(capability: tuple[int, int]) -> int:
    return 10 * capability[0] + capability[1]


def _formats(model: ModelSpec) -> list[WeightFormat]:
    """The quantised formats of a checkpoint, each once."""
    found = [model.weight_format, *(rule.format for rule in model.format_rules), model.head_format]
    return list(dict.fromkeys(form for form in found if form is not None))


class _Least(NamedTuple):
    """The least capability of a kind of format, by release."""

    prefix: str
    method: str
    by_release: tuple[tuple[str, int], ...]
    """(release from which it holds, capability), the oldest first."""


_READ = (
    _Least("fp8 (modelopt", "modelopt", (("0.8.0", 89), ("0.28.0", 80))),
    _Least("fp8", "fp8", (("0.8.0", 80), ("0.14.0", 75))),
    _Least("awq", "awq", (("0.8.0", 75),)),
    _Least("mxfp4", "mxfp4", (("0.8.0", 80),)),
    _Least("mxfp8", "modelopt_mxfp8", (("0.8.0", 100), ("0.20.0", 80))),
    _Least("nvfp4", "nvfp4", (("0.8.0", 80), ("0.14.0", 75))),
    _Least("compressed-tensors float8", "compressed-tensors", (("0.8.0", 80), ("0.16.0", 75))),
    _Least("compressed-tensors int8", "compressed-tensors", (("0.8.0", 75),)),
    _Least("compressed-tensors int4", "compressed-tensors", (("0.8.0", 80), ("0.12.0", 75))),
)
"""As read in 0.8.5, 0.9.2, 0.10.2, 0.11.2, 0.12.0, 0.14.1, 0.16.0, 0.18.1, 0.19.1, 0.20.2, 0.21.0, 0.24.0, 0.26.0,
0.28.0 and 0.32.0; a change holds from the first of them that has it.  GPTQ and bitsandbytes run on every card."""


def _check_format(form: WeightFormat, capability: tuple[int, int], version: VersionProfile) -> None:
    rule = next((each for each in _READ if form.name.startswith(each.prefix)), None)
    if rule is None:
        return
    least = [needed for since, needed in rule.by_release if version.is_at_least(since)][-1]
    if _number(capability) < least:
        raise RefusedByVllm(
            f"The quantization method {rule.method} is not supported for the current GPU. Minimum capability: {least}. "
            f"Current capability: {_number(capability)}.  (The weights are {form.name}; {version.label}.)"
        )


def _keeps_fp8(request: MemoryRequest) -> bool:
    own = request.model.kv_cache_dtype if request.kv_cache_dtype == "auto" else request.kv_cache_dtype
    return own.startswith("fp8")


def _check_cache(request: MemoryRequest, capability: tuple[int, int]) -> None:
    if capability >= AMPERE or request.runs_on_v0 or not request.version.is_at_least(_CHECKS_FP8_CACHE_SINCE):
        return
    gpu = request.gpu.name
    if _keeps_fp8(request):
        raise RefusedByVllm(
            f"FP8 KV cache is not supported by the Triton attention backend on {gpu} (compute capability "
            f"{_text(capability)}); native FP8 (fp8e4nv) requires SM89+. Re-run with --kv-cache-dtype float16."
        )
    if request.kv_cache_dtype == "bfloat16":
        raise RefusedByVllm(
            f"bfloat16 KV cache is not supported on {gpu} (compute capability {_text(capability)}); bfloat16 requires "
            "SM80+. Re-run with --kv-cache-dtype float16."
        )
