"""The executors that a server can run its steps on, made when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.protocols import Executor

if TYPE_CHECKING:
    from windtunnel.executor.model_config import DecoderConfig

KINDS = ("sim", "torch", "triton")
"""Simulated; computed in plain torch on the CPU; computed by Triton kernels on a GPU."""

EXTRA = "pip install 'windtunnel[executor]'"


class ExecutorUnavailable(ValueError):
    """The server cannot run that executor; the message says why and what would help."""


class Executors:
    """One executor of each kind at most."""

    def __init__(self, makers: Mapping[str, Callable[[], Executor]], why_not: Mapping[str, str]) -> None:
        """``makers`` has the kinds that there are, ``why_not`` the reason for each that is missing."""
        self._makers = makers
        self._why_not = why_not
        self._made: dict[str, Executor] = {}

    @property
    def kinds(self) -> list[str]:
        """Those that there are."""
        return list(self._makers)

    def get(self, kind: str) -> Executor:
        """The executor of that kind; the first time this may take as long as loading a model.

        Raises ExecutorUnavailable if the server has none.
        """
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]

    def _make(self, kind: str) -> Executor:
        if kind not in self._makers:
            reason = self._why_not.get(kind, "there is no such kind")
            known = ", ".join(self.kinds)
            raise ExecutorUnavailable(f"executor {kind!r} is not available: {reason} (available: {known})")
        return self._makers[kind]()


def why_torch_is_missing() -> str | None:
    """What to do for executors that compute a model; None if torch is there."""
    from importlib.util import find_spec

    return None if find_spec("torch") else f"it needs torch, which is not installed: {EXTRA}"


def make_model_executor(
    kind: str,
    model: DecoderConfig,
    folder: Path | None,
    config: SchedulerConfig,
    *,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    seed: int = 0,
    num_threads: int | None = None,
) -> Executor:
    """A torch or Triton executor with a cache of ``config.num_gpu_blocks`` blocks.

    Weights are those of the folder if it has safetensors, else random by ``seed``.  ``num_threads`` is torch's on a
    CPU, all by default.

    Raises ExecutorUnavailable where packages or a GPU are missing, ValueError for a model that is not supported.
    """
    missing = why_torch_is_missing()
    if missing is not None:
        raise ExecutorUnavailable(f"executor {kind!r} is not available: {missing}")
    import torch

    from windtunnel.executor.cache import PagedKvCache
    from windtunnel.executor.model import Decoder
    from windtunnel.executor.weights import load_weights, random_weights

    device = _device(kind, torch)
    weights_dtype = _torch_dtype(torch, dtype, "float32" if kind == "torch" else model.dtype)
    cache_dtype = weights_dtype if kv_cache_dtype == "auto" else _torch_dtype(torch, kv_cache_dtype, "")
    if folder is not None and any(folder.glob("*.safetensors")):
        weights = load_weights(model, folder, dtype=weights_dtype, device=device)
    else:
        weights = random_weights(model, seed, dtype=weights_dtype, device=device)
    decoder = Decoder(model, weights, _ops(kind), max_model_len=config.max_model_len)
    cache = PagedKvCache(model, config.num_gpu_blocks, config.block_size, dtype=cache_dtype, device=device)
    executor = _executor(kind, decoder, cache, num_threads or torch.get_num_threads(), config.max_num_seqs)
    executor.check_config(config)
    made: Executor = executor
    return made


def _device(kind: str, torch: Any) -> str:
    if kind == "torch":
        return "cpu"
    if not torch.cuda.is_available():
        raise ExecutorUnavailable("executor 'triton' is not available: torch sees no GPU; --executor torch needs none")
    return "cuda"


def _ops(kind: str) -> Any:
    if kind == "torch":
        from windtunnel.executor.reference import TorchOps

        return TorchOps()
    try:
        from windtunnel.executor.kernels.ops import TritonOps
    except ImportError as error:
        raise ExecutorUnavailable(f"executor 'triton' is not available ({error}): {EXTRA}") from error
    return TritonOps()


def _executor(kind: str, decoder: Any, cache: Any, num_threads: int, max_num_seqs: int) -> Any:
    if kind == "torch":
        from windtunnel.executor.torch_executor import TorchExecutor

        return TorchExecutor(decoder, cache, num_threads=num_threads)
    from importlib import import_module

    try:
        module = import_module("windtunnel.executor.triton_executor")
    except ImportError as error:
        raise ExecutorUnavailable(f"executor 'triton' is not available ({error}): {EXTRA}") from error
    return module.TritonExecutor(decoder, cache, max_num_seqs=max_num_seqs)


_DTYPES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
}


def _torch_dtype(torch: Any, name: str, default: str) -> Any:
    name = default if name == "auto" else name
    if name not in _DTYPES:
        raise ValueError(f"dtype must be auto or one of {', '.join(_DTYPES)}, got {name!r}")
    return getattr(torch, _DTYPES[name])
