"""From what was seen of one start-up to its facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from windtunnel.sim.deployment.gpu import GIB
from windtunnel.sim.deployment.startup_facts import PoolLine, RankMemory, StartupError, StartupFacts
from windtunnel.sim.deployment.startup_lines import Process, has_digit
from windtunnel.sim.deployment.startup_reading import Seen, SeenFacts, StartupRun, fits_field

_RANK_FIELDS = tuple(entry.name for entry in fields(RankMemory) if entry.name != "process")
_LARGEST_OF_RANKS = ("weights_bytes", "non_torch_bytes", "consumed_bytes", "activation_bytes", "cudagraph_actual_bytes")
_RANK_NUMBERS = (
    "equivalent_gpu_memory_utilization",
    "suggested_gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "suggested_kv_cache_memory_bytes",
    "suggested_kv_cache_memory_limit_bytes",
)
_SETTINGS = (
    "vllm_version",
    "engine",
    "model",
    "max_model_len",
    "auto_fit_max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "context_parallel_size",
    "kv_cache_dtype",
    "block_size",
    "enforce_eager",
    "enable_prefix_caching",
    "cudagraph_estimate_applied",
)
ROUNDING_BYTES = round(0.005 * GIB)
"""Half of the last of two decimals."""

_RankValues = dict[str, Seen]


class Summary:
    """Turns what was seen of one start-up into facts and the lines they came from."""

    def __init__(self, run: StartupRun) -> None:
        self.run = run
        self.values: dict[str, Any] = {}
        self.lines: dict[str, int] = {}
        self.notes = list(run.notes)

    def facts(self, name: str) -> StartupFacts:
        """The facts; ``name`` is that of the log."""
        run = self.run
        self._settings()
        self._pool()
        ranks = self._ranks()
        self._memory(ranks)
        if run.started_line:
            self.lines["started"] = run.started_line
        if run.num_startups > 1:
            self.notes.insert(0, f"{run.num_startups} start-ups in it: the last, from line {run.started_at}, is read")
        return StartupFacts(
            name=name,
            non_default_args=run.args,
            hybrid_hints=(hints := (*run.hints, *self._hybrid_figures())),
            is_hybrid=True if hints else None,
            started=bool(run.started_line),
            errors=self._errors(),
            serving=run.serving.summary(),
            ranks=tuple(RankMemory(process, **_known(values)) for process, values in ranks.items()),
            pools=tuple(PoolLine(self._label(pool.process), pool.value, pool.line) for pool in run.pools),
            num_startups=max(1, run.num_startups),
            notes=tuple(self.notes),
            lines=self.lines,
            **self.values,
        )

    def _put(self, name: str, seen: Seen) -> None:
        self.values[name] = seen.value
        self.lines[name] = seen.line

    def _argument(self, name: str) -> Seen | None:
        value = self.run.args.get(name)
        return Seen(value, self.run.args_line, Process("", ""), 0) if fits_field(name, value) else None

    def _last(self, facts: SeenFacts, name: str) -> Seen | None:
        seen = facts.get(name)
        return seen[-1] if seen else None

    def _settings(self) -> None:
        for name in _SETTINGS:
            if seen := self._last(self.run.run_facts, name) or self._argument(name):
                self._put(name, seen)
        tag = self.run.args.get("model_tag")
        if "model" not in self.values and isinstance(tag, str):
            self._put("model", Seen(tag, self.run.args_line, Process("", ""), 0))
        if seen := self._utilization():
            self._put("gpu_memory_utilization", seen)
        if seen := self._last(self.run.run_facts, "engine") or self._engine():
            self._put("engine", seen)

    def _utilization(self) -> Seen | None:
        """The argument, or the figure that is printed with most decimals."""
        sources = ("exact_utilization", "printed_utilization", "rounded_utilization")
        printed = (self._last(self.run.rank_facts, source) for source in sources)
        return self._argument("gpu_memory_utilization") or next(filter(None, printed), None)

    def _engine(self) -> Seen | None:
        """From lines that only one of the engines writes."""
        run = self.run
        if seen := self._last(run.rank_facts, "rounded_utilization"):
            return seen._replace(value="V0")
        if run.pools:
            return run.pools[-1]._replace(value="V1")
        if seen := self._last(run.run_facts, "num_cpu_blocks"):
            return seen._replace(value="V0")
        of_core = [seen for values in run.rank_facts.values() for seen in values if "EngineCore" in seen.process.label]
        return of_core[0]._replace(value="V1") if of_core else None

    def _pool(self) -> None:
        run = self.run
        if run.pools:
            self._put("kv_cache_tokens", min(run.pools, key=_amount))
        if concurrencies := run.run_facts.get("max_concurrency"):
            least = min(range(len(concurrencies)), key=lambda index: _amount(concurrencies[index]))
            self._put("max_concurrency", concurrencies[least])
            self._put("max_concurrency_tokens", run.run_facts["max_concurrency_tokens"][least])
        for name in ("num_cpu_blocks", "profiled_num_gpu_blocks"):
            if seen := run.run_facts.get(name):
                self._put(name, min(seen, key=_amount))
        if blocks := self._blocks():
            self._put("num_gpu_blocks", blocks)

    def _hybrid_figures(self) -> Iterator[str]:
        """Layers of one kind hold at most tokens / length requests, whatever the release; layers of several hold more.

        (From 0.20 on the tokens are concurrency x length, so that this does not show.)
        """
        tokens, concurrency = self.values.get("kv_cache_tokens"), self.values.get("max_concurrency")
        length = self.values.get("max_concurrency_tokens")
        if tokens is not None and concurrency is not None and length and concurrency > tokens / length + 0.0051:
            yield f"a maximum concurrency of {concurrency:.2f} where one kind of layers holds {tokens / length:.2f}"

    def _blocks(self) -> Seen | None:
        """The override, else the logged count (the least, if workers log theirs), else the state blocks."""
        for name in ("override_num_gpu_blocks", "num_gpu_blocks"):
            if seen := self.run.run_facts.get(name):
                return min(seen, key=_amount)
        if self.run.engine_blocks:
            return self._blocks_of_engines()
        return self._last(self.run.run_facts, "state_blocks")

    def _blocks_of_engines(self) -> Seen:
        """A server with several engines logs the sum of their blocks, once for each of them."""
        lines = list(self.run.engine_blocks.values())
        told, blocks, line = min(lines, key=lambda entry: entry[1])
        is_sum = len({count for _, count, _ in lines}) == 1
        engines = told or (len(lines) if is_sum else 1)
        if engines > 1:
            self.notes.append(f"line {line}: {blocks:,} blocks are the sum of {engines} engines; divided evenly")
        return Seen(blocks // engines, line, Process("", ""), 99)

    def _label(self, process: Process) -> str:
        """Workers have their rank in their name only after they have written their first lines."""
        label = self.run.process_of_pid.get(process.pid, process.label)
        needs_pid = process.pid and "orker" in label and not has_digit(label)
        return f"{label} pid={process.pid}" if needs_pid else label

    def _ranks(self) -> dict[str, _RankValues]:
        """What each process said, in order of appearance; of equal precision the later figure counts."""
        ranks: dict[str, _RankValues] = {}
        for name, figures in self.run.rank_facts.items():
            for seen in figures:
                values = ranks.setdefault(self._label(seen.process), {})
                if name not in values or seen.decimals >= values[name].decimals:
                    values[name] = seen
        for values in ranks.values():
            self._activation_of_peak(values)
            self._net_activation(values)
            _non_torch_of_consumed(values)
        of_devices = {process: values for process, values in ranks.items() if _known(values)}
        return dict(sorted(of_devices.items(), key=lambda rank: min(seen.line for seen in rank[1].values())))

    def _activation_of_peak(self, values: _RankValues) -> None:
        """vLLM 0.6.3 and 0.6.4 log torch's peak, weights included."""
        if "activation_bytes" not in values and {"peak_torch_bytes", "weights_bytes"} <= values.keys():
            peak = values["peak_torch_bytes"]
            values["activation_bytes"] = peak._replace(value=peak.value - values["weights_bytes"].value)
            self.notes.append(f"line {peak.line}: activation is the torch peak less the weights")

    def _net_activation(self, values: _RankValues) -> None:
        """Releases differ in whether the logged activation has the graphs' estimate in it; the sum of parts tells."""
        logged, estimate = values.get("logged_activation_bytes"), values.get("cudagraph_estimate_bytes")
        if logged is None or "activation_bytes" in values:
            return
        values["activation_bytes"] = logged
        applied = self._last(self.run.run_facts, "cudagraph_estimate_applied")
        if estimate is None or applied is None or not applied.value:
            return
        requested, available = values.get("requested_memory_bytes"), values.get("available_kv_cache_bytes")
        fixed = fixed_bytes({name: seen.value for name, seen in values.items()})
        if requested is None or available is None or fixed is None:
            self.notes.append(f"line {logged.line}: the logged activation may include the estimate of the graphs")
            return
        rest = requested.value - available.value - fixed - logged.value
        if abs(rest) < abs(rest - estimate.value):
            values["activation_bytes"] = logged._replace(value=logged.value - estimate.value)
            self.notes.append(f"line {logged.line}: activation is the logged one less the estimate of the graphs")

    def _memory(self, ranks: dict[str, _RankValues]) -> None:
        """Figures of the rank with the least KV cache; what that one does not say, of the rank that uses most."""
        with_pool = [values for values in ranks.values() if "available_kv_cache_bytes" in values]
        binding = min(with_pool, key=lambda values: _amount(values["available_kv_cache_bytes"]), default={})
        for name in _RANK_FIELDS:
            figures = [values[name] for values in ranks.values() if name in values]
            if name in binding:
                self._put(name, binding[name])
            elif figures:
                self._put(name, (max if name in _LARGEST_OF_RANKS else min)(figures, key=_amount))
        for name in _RANK_NUMBERS:
            if seen := self.run.rank_facts.get(name):
                self._put(name, min(seen, key=_amount))
        if argument := self._argument("kv_cache_memory_bytes"):
            self._put("kv_cache_memory_bytes", argument)

    def _errors(self) -> tuple[StartupError, ...]:
        """In order; that the engine failed is news only if nothing says why."""
        errors = sorted(self.run.errors.values(), key=lambda error: error.line)
        named = [error for error in errors if error.kind != "engine_core_failed"]
        return tuple(named or errors[:1])


def _amount(seen: Seen) -> float:
    return float(seen.value)


def _known(values: _RankValues) -> dict[str, int]:
    return {name: values[name].value for name in _RANK_FIELDS if name in values}


def _non_torch_of_consumed(values: _RankValues) -> None:
    if "non_torch_bytes" not in values and {"consumed_bytes", "weights_bytes"} <= values.keys():
        consumed = values["consumed_bytes"]
        values["non_torch_bytes"] = consumed._replace(value=consumed.value - values["weights_bytes"].value)


def fixed_bytes(values: Mapping[str, int | None]) -> int | None:
    """Weights and all else that stays on the device, as far as the log has it."""
    consumed, weights, non_torch = (values.get(key) for key in ("consumed_bytes", "weights_bytes", "non_torch_bytes"))
    if consumed is not None:
        return consumed
    return None if weights is None or non_torch is None else weights + non_torch
