"""Records the steps of a real vLLM: what each one computes and how long it takes.

    vllm serve MODEL --scheduler-cls windtunnel.executor.vllm_plugin.recorder.RecordingScheduler \
        --additional-config '{"windtunnel_recorder": {"directory": "steps"}}'

The scheduler that decides is vLLM's own, or another that is named; this one only looks on.  Written for vLLM 0.32.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from windtunnel.executor.vllm_plugin.recording import (
    UNKNOWN,
    Added,
    StepComposer,
    StepDetail,
    StepLog,
    StepState,
    StepTimes,
    clocks,
    num_drafts,
    step_requests,
)
from windtunnel.executor.vllm_plugin.section import Section

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's own, which has the handlers

SECTION = Section("windtunnel_recorder")


@dataclass(frozen=True, slots=True)
class RecorderOptions:
    """Where and how often is written, and whose decisions are recorded.

    Raises ValueError, naming the key, its value and the allowed range.
    """

    directory: str = "recorded_steps"
    """Folder for the recordings, one file for each engine core; made if missing."""
    flush_steps: int = 64
    """The file is brought up to date after this many steps, and whenever the engine runs out of requests."""
    scheduler: str | None = None
    """The scheduler that decides, as ``module.Class``; None is the one vLLM would take by itself."""
    detail: bool = False
    """Whether each step also names its requests, those it preempted, and those queued since the step before."""

    def __post_init__(self) -> None:
        SECTION.check("directory", self.directory, _is_text(self.directory), "a path")
        SECTION.check("flush_steps", self.flush_steps, _is_count(self.flush_steps), "a whole number of at least 1")
        is_path = self.scheduler is None or (_is_text(self.scheduler) and "." in self.scheduler.strip("."))
        SECTION.check("scheduler", self.scheduler, is_path, "a class as module.Class, or left out for vLLM's own")
        SECTION.check("detail", self.detail, isinstance(self.detail, bool), "true or false")

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> RecorderOptions:
        """The options in vLLM's ``additional_config``; all defaults where there are none.

        Raises ValueError for an unknown key.
        """
        return cls(**SECTION.read(additional_config, [item.name for item in fields(cls)]))


class _Decided(NamedTuple):
    """A decision whose tokens are not there yet."""

    output: Any
    begin_ns: int
    end_ns: int
    handed_over_ns: int
    state: StepState


class RecordingScheduler:
    """A scheduler of vLLM that also writes a line for each step that computes something.

    The instance is of a class that derives from this one and from the scheduler that decides.  If recording fails, it
    ends with a message in the log and in the file; serving goes on.  Raises ValueError at the start for wrong options.
    """

    def __new__(cls, vllm_config: Any, *_: Any, **__: Any) -> RecordingScheduler:
        """An instance whose decisions are those of the scheduler that the options name."""
        if cls is not RecordingScheduler:
            return super().__new__(cls)
        base = _scheduler_class(vllm_config)
        return super().__new__(type(f"Recording{base.__name__}", (cls, base), {"__module__": __name__}))

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]  # the deciding class, see __new__
        options = RecorderOptions.from_additional_config(vllm_config.additional_config)
        kv_cache_config = args[0] if args else kwargs.get("kv_cache_config")
        header = {**clocks(), **provenance(vllm_config, kv_cache_config), "scheduler": _path(type(self).__mro__[2])}
        path = Path(options.directory) / _file_name(header)
        self.step_log: StepLog | None = StepLog(path, header, options.flush_steps)
        """Where steps are written; None when recording has ended."""
        self._composer = StepComposer()
        self._decided: deque[_Decided] = deque()
        self._recorder_ns = 0  # spent on recording since the last line
        self._added: list[Added] | None = [] if options.detail else None  # since the last line
        logger.info("windtunnel records the steps of this engine to %s", path)

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Queue a request, and note when."""
        answer = super().add_request(request, *args, **kwargs)  # type: ignore[misc]
        if self._added is not None and self.step_log is not None:
            begin_ns = time.monotonic_ns()
            try:
                self._added.append(_added(request, begin_ns))
            except Exception as error:  # whatever it is, serving goes on
                self._stop(error)
            self._recorder_ns += time.monotonic_ns() - begin_ns
        return answer

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """The decision of the scheduler, and when it was made."""
        begin_ns = time.monotonic_ns()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        end_ns = time.monotonic_ns()
        if self.step_log is None:
            return output
        try:
            state = _state(self, output)
        except Exception as error:  # whatever it is, serving goes on
            self._stop(error)
            return output
        handed_over_ns = time.monotonic_ns()
        self._recorder_ns += handed_over_ns - end_ns
        self._decided.append(_Decided(output, begin_ns, end_ns, handed_over_ns, state))
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Book the tokens of a step, and write its line."""
        begin_ns = time.monotonic_ns()
        answers = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        end_ns = time.monotonic_ns()
        if self.step_log is None:
            return answers
        try:
            self._write(self.step_log, scheduler_output, begin_ns, end_ns)
        except Exception as error:  # whatever it is, serving goes on
            self._stop(error)
        self._recorder_ns += time.monotonic_ns() - end_ns
        return answers

    def _write(self, log: StepLog, output: Any, begin_ns: int, end_ns: int) -> None:
        decided = self._decided.popleft()
        while decided.output is not output:  # a step that was given up has no time, but its requests began
            self._composer.shape(decided.output)
            decided = self._decided.popleft()
        shape = self._composer.shape(output)
        if output.total_num_scheduled_tokens:
            times = StepTimes(decided.begin_ns, decided.end_ns, decided.handed_over_ns, begin_ns, end_ns)
            log.write(times, shape, num_drafts(output), decided.state, self._recorder_ns, self._detail(output))
            self._recorder_ns = 0
        if not any(_counts(self)):
            log.flush()

    def _detail(self, output: Any) -> StepDetail | None:
        if self._added is None:
            return None
        added, self._added = self._added, []
        return StepDetail(step_requests(output), sorted(getattr(output, "preempted_req_ids", None) or ()), added)

    def _stop(self, error: Exception) -> None:
        cause = f"{type(error).__name__}: {error}"
        logger.exception("windtunnel stops recording steps, serving goes on: %s", cause)
        self._end(cause)

    def shutdown(self) -> None:
        """End the recording, and the scheduler."""
        self._end(None)
        super().shutdown()  # type: ignore[misc]

    def _end(self, stopped: str | None) -> None:
        log, self.step_log = self.step_log, None
        self._decided.clear()
        if log is None:
            return
        try:
            log.close(stopped)
        except OSError:
            logger.exception("windtunnel could not write all of %s", log.path)


def _scheduler_class(vllm_config: Any) -> type[Any]:
    options = RecorderOptions.from_additional_config(vllm_config.additional_config)
    if options.scheduler is None:
        config = copy(vllm_config.scheduler_config)
        config.scheduler_cls = None
        own: type[Any] = config.get_scheduler_cls()
        return own
    module, _, name = options.scheduler.rpartition(".")
    try:
        chosen: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{SECTION.named('scheduler')} {options.scheduler!r} cannot be imported: {error}") from error
    is_scheduler = isinstance(chosen, type) and hasattr(chosen, "schedule") and hasattr(chosen, "update_from_output")
    SECTION.check("scheduler", options.scheduler, is_scheduler, "a scheduler class of vLLM's interface")
    kind: type[Any] = chosen
    if issubclass(kind, RecordingScheduler):
        raise ValueError(
            f"{SECTION.named('scheduler')} {options.scheduler!r} is the recorder itself: name the one that decides"
        )
    return kind


# ------------------------------------------------------------------ what the scheduler tells


def _added(request: Any, now_ns: int) -> Added:
    """The request, with its arrival, which vLLM has by the time of day, on the clock of the steps."""
    arrival_ns = round(request.arrival_time * 1e9) - time.time_ns() + now_ns
    return Added(request.request_id, request.num_prompt_tokens, arrival_ns, now_ns)


def _state(scheduler: Any, output: Any) -> StepState:
    running, waiting = _counts(scheduler)
    preempted = getattr(output, "preempted_req_ids", None)
    return StepState(running, waiting, _free_blocks(scheduler), UNKNOWN if preempted is None else len(preempted))


def _counts(scheduler: Any) -> tuple[int, int]:
    """Running and waiting requests; releases before 0.32 have no method that tells both."""
    ask = getattr(scheduler, "get_request_counts", None)
    running, waiting = (len(scheduler.running), len(scheduler.waiting)) if ask is None else ask()
    return running, waiting


def _free_blocks(scheduler: Any) -> int:
    manager = getattr(scheduler, "kv_cache_manager", None)
    if manager is not None:
        return int(manager.block_pool.get_num_free_blocks())
    engine = getattr(scheduler, "engine", None)  # ours
    return UNKNOWN if engine is None else int(engine.pool.num_free)


# ------------------------------------------------------------------ where a recording comes from

_SETTINGS = {
    "model": "model_config.model",
    "architectures": "model_config.hf_config.architectures",
    "dtype": "model_config.dtype",
    "quantization": "model_config.quantization",
    "max_model_len": "model_config.max_model_len",
    "enforce_eager": "model_config.enforce_eager",
    "load_format": "load_config.load_format",
    "kv_cache_dtype": "cache_config.cache_dtype",
    "block_size": "cache_config.block_size",
    "enable_prefix_caching": "cache_config.enable_prefix_caching",
    "gpu_memory_utilization": "cache_config.gpu_memory_utilization",
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "pipeline_parallel_size": "parallel_config.pipeline_parallel_size",
    "data_parallel_size": "parallel_config.data_parallel_size",
    "data_parallel_rank": "parallel_config.data_parallel_index",
    "enable_expert_parallel": "parallel_config.enable_expert_parallel",
    "distributed_executor_backend": "parallel_config.distributed_executor_backend",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "enable_chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "long_prefill_token_threshold": "scheduler_config.long_prefill_token_threshold",
    "async_scheduling": "scheduler_config.async_scheduling",
    "policy": "scheduler_config.policy",
    "watermark": "scheduler_config.watermark",
    "scheduler_reserve_full_isl": "scheduler_config.scheduler_reserve_full_isl",
    "speculative_method": "speculative_config.method",
    "num_speculative_tokens": "speculative_config.num_speculative_tokens",
    "cudagraph_mode": "compilation_config.cudagraph_mode",
    "cudagraph_capture_sizes": "compilation_config.cudagraph_capture_sizes",
}
"""Names in the header, and where vLLM's configuration has them; None is written where a release has not."""


def provenance(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Versions, device, model and settings of an engine, as plain data.  No addresses, keys or environment."""
    settings = {name: _plain(_at(vllm_config, path)) for name, path in _SETTINGS.items()}
    if settings["data_parallel_rank"] is None:
        settings["data_parallel_rank"] = _plain(_at(vllm_config, "parallel_config.data_parallel_rank")) or 0
    return {
        "vllm": _vllm_version(),
        "windtunnel": _version("windtunnel"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": _device_name(),
        "num_cpus": os.cpu_count(),
        **settings,
        "num_gpu_blocks": getattr(kv_cache_config, "num_blocks", None),
    }


def _file_name(header: Mapping[str, Any]) -> str:
    moment = header["date"].split("+")[0].replace("-", "").replace(":", "")
    return f"steps-{moment}Z-dp{header['data_parallel_rank']}-{os.getpid()}-{header['monotonic_ns'] % 10**9:09d}.jsonl"


def _at(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name, None)
    return root


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, type):
        return _path(value)
    return str(getattr(value, "name", value)).removeprefix("torch.")


def _path(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _vllm_version() -> str | None:
    module = sys.modules.get("vllm")  # there whenever an engine is
    return getattr(module, "__version__", None)


def _device_name() -> str | None:
    """The card's name as vLLM has it, the processor's where there is none."""
    try:
        current = import_module("vllm.platforms").current_platform
        name = str(current.get_device_name())
    except (ImportError, AttributeError, NotImplementedError, RuntimeError):
        return platform.processor() or None
    return f"{name}: {_processor()}" if name == "cpu" else name


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# ------------------------------------------------------------------ checks


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""
