"""What ``--dry-run`` prints: every setting with its source, and the memory plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from windtunnel.scenarios.resolve import Resolved
from windtunnel.scenarios.workloads.describe import describe
from windtunnel.sim.deployment.memory import KvPool

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
    kind = "calibrated" if resolved.cost.calibrated else "NOT calibrated: compare before you rely on absolute times"
    return f"cost model: {resolved.cost.name} ({kind})"


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
