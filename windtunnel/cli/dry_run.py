"""What ``--dry-run`` prints: every setting with its source, and the memory plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from windtunnel.scenarios.resolve import Resolved
from windtunnel.scenarios.workloads.describe import describe
from windtunnel.sim.cost.evidence import in_words
from windtunnel.sim.cost.fitted import FittedCost
from windtunnel.sim.cost.statement import sentences, shown_name, statement_of
from windtunnel.sim.deployment.memory import KvPool
from windtunnel.sim.engine.plan import StepShape
from windtunnel.sim.engine.protocols import CostModel

GIB = 2**30
_WIDEST_VALUE = 44


def plan_text(resolved: Resolved, *, with_notes: bool = True) -> str:
    """The plan as aligned text; the same input gives the same text."""
    parts = [f"scenario: {resolved.scenario.name}", _settings(resolved), _memory(resolved), _cost(resolved)]
    parts.append(_workload(resolved))
    parts += [f"warning: {text}" for text in resolved.warnings]
    parts += [f"note: {text}" for text in resolved.notes if with_notes]
    return "\n\n".join(part for part in parts if part)


def _settings(resolved: Resolved) -> str:
    rows = [(entry.section, entry.key, show(entry.value), entry.source) for entry in resolved.entries]
    lines, section = [], ""
    for row, line in zip(rows, table([row[1:] for row in rows]), strict=True):
        if row[0] != section:
            section = row[0]
            lines.append(f"[{section}]")
        lines.append(f"  {line}")
    return "\n".join(lines)


def _memory(resolved: Resolved) -> str:
    pool = resolved.kv_pool
    if pool is None:
        config = resolved.config
        return f"memory: not planned; {config.num_gpu_blocks:,} blocks of {config.block_size} tokens were given"
    lines = [
        f"memory of one GPU (of {resolved.tensor_parallel_size})",
        *(f"  {line}" for line in table(_memory_rows(pool))),
    ]
    return "\n".join([*lines, *(f"  - {text}" for text in pool.assumptions)])


def _memory_rows(pool: KvPool) -> list[tuple[str, str, str]]:
    return [
        ("total", _gib(pool.total_bytes), ""),
        ("usable", _gib(pool.requested_bytes), "gpu_memory_utilization of the total"),
        ("weights", _gib(pool.weights_bytes), ""),
        ("activations", _gib(pool.activation_bytes), "peak of the profile run"),
        ("CUDA context", _gib(pool.non_torch_bytes), "and communication buffers"),
        ("CUDA graphs", _gib(pool.cuda_graphs_bytes), ""),
        ("KV cache", _gib(pool.kv_bytes), f"{pool.kv_bytes_per_token:,} bytes a token; from {pool.source}"),
        ("KV blocks", f"{pool.num_gpu_blocks:,}", f"of {pool.block_size} tokens: {pool.kv_cache_tokens:,} tokens"),
        ("concurrency", f"{pool.max_concurrency:.2f}", "requests of max_model_len tokens at once"),
    ]


def _cost(resolved: Resolved) -> str:
    told = resolved.describe()
    name, cost = shown_name(told["metadata"]), told["cost"]
    grade = in_words(resolved.evidence)
    if not resolved.cost.calibrated:
        return f"cost model: {name} ({grade}: compare settings before you rely on absolute times)"
    lines = [f"cost model: {name} ({grade})"]
    lines += [f"  {text}" for text in sentences(cost, has_noise=resolved.system.noise_seed is not None)]
    return "\n".join([*lines, *_examples(resolved.cost, cost)])


_EXAMPLES = (
    ("a decode of 1 request, 1,024 tokens of context", StepShape(1, 1024, 0, 0, 0, 0, 1)),
    ("a decode of 64 requests, 1,024 tokens of context each", StepShape(64, 64 * 1024, 0, 0, 0, 0, 64)),
    ("a prompt of 2,048 tokens", StepShape(0, 0, 1, 2048, 0, 2048 * 2049 // 2, 1)),
)


def _examples(cost: CostModel, described: Mapping[str, Any]) -> Iterator[str]:
    """What the error means for steps that anybody can picture."""
    statement = statement_of(described)
    for what, shape in _EXAMPLES:
        if isinstance(cost, FittedCost) and cost.extrapolates(shape):
            yield f"  - {what}: outside of what the profile was measured at"
            continue
        step_s = float(cost.step_time_s(shape))
        spread = statement.spread(step_s) if statement is not None else ""
        yield f"  - {what}: {spread or f'{1e3 * step_s:.2f} ms'}"


def _workload(resolved: Resolved) -> str:
    facts = describe(resolved.workload)
    rows = [(key, show(value), "") for key, value in facts.items() if key != "notes" and value is not None]
    return "\n".join(["workload", *(f"  {line}" for line in table(rows))])


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with aligned columns, without trailing blanks."""
    widths = [min(max(map(len, column)), _WIDEST_VALUE) for column in zip(*rows, strict=True)]
    return ["  ".join(_padded(row, widths)).rstrip() for row in rows]


def _padded(row: Iterable[str], widths: Iterable[int]) -> Iterable[str]:
    return (cell.ljust(width) for cell, width in zip(row, widths, strict=True))


def show(value: Any) -> str:
    """A value as a person writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(show(item) for item in value)
    return str(value)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"
