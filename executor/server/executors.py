"""The executors that a server can run its steps on, made when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.executor.server.memory import free_host_bytes, need, why_too_large
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.protocols import Executor

if TYPE_CHECKING:
    from windtunnel.executor.model_config import DecoderConfig

KINDS = ("sim", "torch", "triton")
"""Simulated; computed in plain torch on the CPU; computed by Triton kernels on a GPU."""

EXTRA = "pip install 'windtunnel[executor]'"

WhyNot = Callable[[], str | None]
"""Looks whether an executor could be made now; what is missing and what to do, or None."""


class ExecutorUnavailable(ValueError):
    """The server cannot run that executor; the message says why and what would help."""


class Executors:
    """One executor of each kind at most."""

    def __init__(self, makers: Mapping[str, Callable[[], Executor]], why_not: Mapping[str, WhyNot]) -> None:
        """``makers`` makes each kind; those in ``why_not`` may be impossible."""
        self._makers = makers
        self._why_not = why_not
        self._made: dict[str, Executor] = {}

    def kinds(self) -> list[str]:
        """Those that can run.  Like ``unavailable`` this may take seconds: it may have to import torch."""
        return [kind for kind in self._makers if self._reason(kind) is None]

    def unavailable(self) -> dict[str, str]:
        """The other kinds, each with what is missing and what to do."""
        reasons = {kind: self._reason(kind) for kind in self._makers}
        return {kind: reason for kind, reason in reasons.items() if reason is not None}

    def get(self, kind: str) -> Executor:
        """The executor of that kind; the first time this may take as long as loading a model.

        Raises ExecutorUnavailable if the server has none.
        """
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]

    def _make(self, kind: str) -> Executor:
        reason = self._reason(kind) if kind in self._makers else f"there is no such kind, only {', '.join(KINDS)}"
        if reason is not None:
            raise ExecutorUnavailable(unavailable_text(kind, reason))
        try:
            return self._makers[kind]()
        except (OSError, ValueError) as error:
            raise ExecutorUnavailable(unavailable_text(kind, str(error))) from error
        except (MemoryError, RuntimeError) as error:  # free when it was looked at, taken since
            if not _is_out_of_memory(error):
                raise
            remedy = "start the server with a smaller --num-gpu-blocks-override"
            raise ExecutorUnavailable(unavailable_text(kind, f"there is not enough memory; {remedy}")) from error

    def _reason(self, kind: str) -> str | None:
        look = self._why_not.get(kind)
        return None if look is None or kind in self._made else look()


def unavailable_text(kind: str, reason: str) -> str:
    """How a refusal of an executor reads, whoever refuses it."""
    return f"executor {kind[:40]!r} is not available: {reason}"


def weights_source(executor: Executor) -> str | None:
    """Where the weights of an executor come from: a folder, or a seed; None if it has none."""
    source = getattr(getattr(getattr(executor, "model", None), "weights", None), "source", None)
    return None if source is None else str(source)


def why_torch_is_missing() -> str | None:
    """What to do for executors that compute a model; None if torch is there."""
    from importlib.util import find_spec

    return None if find_spec("torch") else f"it needs torch, which is not installed: {EXTRA}"


def why_triton_is_missing() -> str | None:
    """What to do for Triton's kernels; None if torch, Triton and a GPU are there."""
    from importlib.util import find_spec

    missing = why_torch_is_missing()
    if missing is not None:
        return missing
    if find_spec("triton") is None:
        return f"it needs triton, which is not installed: {EXTRA}"
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU; --executor torch needs none"


class ModelExecutors:
    """Makes the executors that compute one model, with a cache of ``config.num_gpu_blocks`` blocks.

    Weights are those of the folder if it has any, else random by ``seed``.
    """

    def __init__(
        self,
        model: DecoderConfig,
        folder: Path | None,
        config: SchedulerConfig,
        *,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        seed: int = 0,
        num_threads: int | None = None,
        clock: str = "wall",
    ) -> None:
        """``num_threads`` is torch's on a CPU, all by default; ``clock`` times steps there, see ``TorchExecutor``."""
        self._model = model
        self._folder = folder
        self._config = config
        self._dtype = dtype
        self._kv_cache_dtype = kv_cache_dtype
        self._seed = seed
        self._num_threads = num_threads
        self._clock = clock

    def why_not(self, kind: str) -> str | None:
        """What "torch" or "triton" lacks here and what to do; None if it can be made now."""
        missing = why_torch_is_missing() if kind == "torch" else why_triton_is_missing()
        if missing is not None:
            return missing
        try:
            self._model.check_max_model_len(self._config.max_model_len)
            weights_dtype, cache_dtype = self._dtypes(kind)
        except ValueError as error:
            return str(error)
        needed = need(self._model, self._config.block_size, int(weights_dtype.itemsize), int(cache_dtype.itemsize))
        if kind == "torch":
            return why_too_large(needed, self._config, free_host_bytes(), "host")
        import torch

        return why_too_large(needed, self._config, torch.cuda.mem_get_info()[0], "GPU")

    def make(self, kind: str) -> Executor:
        """The executor, which ``why_not`` had nothing against.

        Raises ValueError for weights that do not fit the model, and what torch raises where memory is short.
        """
        import torch

        from windtunnel.executor.cache import PagedKvCache
        from windtunnel.executor.model import Decoder
        from windtunnel.executor.weights import weights_of

        config, device = self._config, "cpu" if kind == "torch" else "cuda"
        weights_dtype, cache_dtype = self._dtypes(kind)
        weights = weights_of(self._model, self._folder, self._seed, dtype=weights_dtype, device=device)
        decoder = Decoder(self._model, weights, _ops(kind), max_model_len=config.max_model_len)
        cache = PagedKvCache(self._model, config.num_gpu_blocks, config.block_size, dtype=cache_dtype, device=device)
        num_threads = torch.get_num_threads() if self._num_threads is None else self._num_threads
        executor = _executor(kind, decoder, cache, config.max_num_seqs, num_threads=num_threads, clock=self._clock)
        executor.check_config(config)
        made: Executor = executor
        return made

    def _dtypes(self, kind: str) -> tuple[Any, Any]:
        """Of weights and cache."""
        weights = _torch_dtype("dtype", self._dtype, "float32" if kind == "torch" else self._model.dtype)
        if self._kv_cache_dtype == "auto":
            return weights, weights
        return weights, _torch_dtype("kv_cache_dtype", self._kv_cache_dtype, "")


def _ops(kind: str) -> Any:
    if kind == "torch":
        from windtunnel.executor.reference import TorchOps

        return TorchOps()
    from windtunnel.executor.kernels.ops import TritonOps

    return TritonOps()


def _executor(kind: str, decoder: Any, cache: Any, max_num_seqs: int, *, num_threads: int, clock: str) -> Any:
    if kind == "torch":
        from windtunnel.executor.torch_executor import TorchExecutor

        return TorchExecutor(decoder, cache, num_threads=num_threads, clock=clock)
    from windtunnel.executor.triton_executor import TritonExecutor

    return TritonExecutor(decoder, cache, max_num_seqs=max_num_seqs)


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether something could not be allocated; torch on the CPU has no error of its own for that."""
    if isinstance(error, MemoryError):
        return True
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


_DTYPES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
}


def _torch_dtype(key: str, name: str, default: str) -> Any:
    import torch

    name = default if name == "auto" else name
    if name not in _DTYPES:
        raise ValueError(f"{key} must be auto or one of {', '.join(_DTYPES)}, got {name!r}")
    return getattr(torch, _DTYPES[name])
