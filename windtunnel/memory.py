"""The memory planner for programs: ``memory_plan`` for one deployment, ``memory_sweep`` for what-ifs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.memory_asked import Asked, Source
from windtunnel.memory_correction import check_correction, correction_of
from windtunnel.memory_rows import GpuPrice, write_csv, write_parquet
from windtunnel.memory_settings import (
    check_names,
    check_values,
    read_mean_tokens,
    serve_settings,
    shown_value,
)
from windtunnel.memory_truth import FormulaCheck, origins
from windtunnel.memory_values import MOST_PLANS, all_values, one_value
from windtunnel.sim.deployment.gpu import GpuSpec
from windtunnel.sim.deployment.memory import JudgedPlan, assumptions_of
from windtunnel.sim.deployment.memory_plan import DOES_NOT_START, OK, UNSAFE, MemoryPlan, Users
from windtunnel.sim.deployment.memory_request import MemoryRequest
from windtunnel.sim.deployment.model import ModelSpec
from windtunnel.sim.deployment.refusal import RefusedByVllm

if TYPE_CHECKING:
    import pandas as pd

    from windtunnel.reports.memory_first_screen import Cost
    from windtunnel.reports.memory_text import MemoryRow

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """One plan with everything that is said about it."""

    judged: JudgedPlan
    mean_tokens: int | None = None
    comparison: Mapping[str, tuple[float | None, float]] = field(default_factory=dict)
    """Where a real start-up was read: for each figure what it had, and what the formula says."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """What must not be overlooked: that the formula is wrong about the server, or that its start-up failed."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """What each figure is from: "measured", "measured blocks" (or tokens, bytes), "formula", "given", ..."""
    formula_check: FormulaCheck | None = None
    """Where a real start-up was read: whether its KV cache lies in the formula's interval."""
    learnt_bytes: int | None = None
    """What the real start-up had more for its KV cache than the formula says, if it tells that."""
    source: str = ""
    """The log or metrics that were read."""
    advice: str = ""
    """What to do where no remedy is known; empty for the usual words."""
    disagreements: tuple[str, ...] = ()
    """Figures of the real start-up's pool that contradict each other; nothing is learnt from it then."""
    price: GpuPrice | None = None
    """What a GPU costs, if that was said."""

    @property
    def verdict(self) -> str:
        """One of "ok", "unsafe" and "does_not_start"."""
        return self.judged.verdict

    @property
    def reason(self) -> str:
        """Why, in vLLM's words where it does not start."""
        return self.judged.reason

    @property
    def is_infeasible(self) -> bool:
        """Whether vLLM would not start."""
        return self.verdict == DOES_NOT_START

    @property
    def kv_cache_tokens(self) -> int:
        """The figure that vLLM logs as "GPU KV cache size"."""
        return self.judged.plan.kv_cache_tokens

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return self.judged.plan.num_gpu_blocks

    @property
    def max_concurrency(self) -> float:
        """Requests of max_model_len tokens that fit at once."""
        return self.judged.plan.max_concurrency

    @property
    def users(self) -> Users | None:
        """For requests of ``mean_tokens``, if they were given."""
        return None if self.mean_tokens is None else self.judged.plan.users(self.mean_tokens)

    @property
    def cost(self) -> Cost | None:
        """What all GPUs cost in an hour; None without a price."""
        request = self.judged.plan.request
        return None if self.price is None else self.price.of(request.gpu.name, request.num_gpus)

    @property
    def recommended(self) -> MemoryRequest:
        """The request, with the first remedy that is ok (or else starts) where it is not well."""
        request, remedies = self.judged.plan.request, self.judged.remedies
        chosen = next((remedy for remedy in remedies if remedy.verdict == OK), remedies[0] if remedies else None)
        return request if chosen is None else replace(request, **{chosen.flag: chosen.value})

    @property
    def serve_command(self) -> str:
        """The ``vllm serve`` line of what is recommended, with the environment that picks V0 where it was asked for."""
        from windtunnel.scenarios.deployments.write import serve_command

        request = self.recommended
        environment = "VLLM_USE_V1=0 " if request.uses_v0_engine else ""
        return environment + serve_command(serve_settings(request), version=request.version.name)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data: what ``windtunnel memory --json`` prints."""
        plan, request = self.judged.plan, self.judged.plan.request
        users = self.users
        return {
            "schema_version": SCHEMA_VERSION,
            "verdict": self.verdict,
            "reason": self.reason,
            "cause": self.judged.judgement.cause or None,
            "kv_cache_tokens": plan.kv_cache_tokens,
            "num_gpu_blocks": plan.num_gpu_blocks,
            "max_concurrency": plan.max_concurrency,
            "available_kv_cache_bytes": plan.available_kv_cache_bytes,
            "weights_bytes": plan.weights_bytes,
            "activation_bytes": plan.activation_bytes,
            "non_torch_bytes": plan.non_torch_bytes,
            "cudagraph_bytes": plan.cudagraph_bytes,
            "interval_90": dict(plan.interval_90._asdict()),
            "assumptions": list(self.assumptions),
            "source": plan.source,
            "origins": dict(self.origins),
            "cudagraph_inside_budget": plan.graphs_inside,
            "total_bytes": plan.total_bytes,
            "free_bytes": plan.free_bytes,
            "requested_bytes": plan.requested_bytes,
            "kv_cache_bytes": plan.kv_cache_bytes,
            "unexplained_bytes": plan.unexplained_bytes,
            "oom_margin_bytes": plan.margin_bytes,
            "kv_bytes_per_token": plan.kv_bytes_per_token,
            "block_size": plan.block_size,
            "max_state_sequences": plan.max_state_sequences,
            "num_cpu_blocks": plan.num_cpu_blocks,
            "host_memory": self.host_memory,
            "largest_max_model_len": plan.longest_request(),
            "equivalent_gpu_memory_utilization": None if plan.given_by else plan.equivalent_gpu_memory_utilization,
            "suggested_gpu_memory_utilization": None if plan.given_by else plan.suggested_gpu_memory_utilization,
            "is_extrapolated": plan.overheads.is_extrapolated,
            "stages": [dict(stage._asdict()) for stage in plan.stages],
            "model": request.model.name,
            "gpu": request.gpu.name,
            "num_gpus": request.num_gpus,
            "engine": request.version.name,
            "settings": self.settings,
            "sources": dict(plan.settings.sources),
            "serve_command": self.serve_command,
            "remedies": [dict(remedy._asdict()) for remedy in self.judged.remedies],
            "users": None if users is None else dict(users._asdict()),
            "comparison": {
                name: {"measured": measured, "formula": formula}
                for name, (measured, formula) in self.comparison.items()
            },
            "formula_check": None if self.formula_check is None else self.formula_check.to_dict(),
            **self.cost_keys,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }

    @property
    def cost_keys(self) -> dict[str, Any]:
        """Cost for ``to_dict``; nothing without a price."""
        if self.price is None:
            return {}
        return {"cost_per_hour": self.cost.per_hour if self.cost else None, "currency": self.price.currency}

    @property
    def host_memory(self) -> dict[str, int]:
        """Bytes of pinned host memory: for one GPU by kind, and of all GPUs."""
        from windtunnel.sim.deployment.host_memory import host_memory

        return asdict(host_memory(self.judged.plan))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the figures rest on, in sentences."""
        told = assumptions_of(self.judged.plan)
        measured = [name for name, origin in self.origins.items() if origin == "measured" and name.endswith("_bytes")]
        if not measured:
            return told
        return (f"Measured, so that no formula enters: {', '.join(measured)}.", *told)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the plan is made with, by vLLM's names."""
        settings, request = self.judged.plan.settings, self.judged.plan.request
        return {
            "tensor_parallel_size": request.tensor_parallel_size,
            "pipeline_parallel_size": request.pipeline_parallel_size,
            "data_parallel_size": request.data_parallel_size,
            "enable_expert_parallel": request.enable_expert_parallel,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "kv_cache_dtype": request.kv_cache_dtype,
            "block_size": settings.block_size,
            "enable_prefix_caching": settings.enable_prefix_caching,
            "enforce_eager": request.enforce_eager,
            "kv_cache_memory_bytes": request.kv_cache_memory_bytes,
            "num_gpu_blocks_override": request.num_gpu_blocks_override,
            "dtype": request.model.dtype,
            "usage_context": request.usage_context,
        }

    def text(self, *, explain: bool = False) -> str:
        """The plan as a table with its verdict and remedies; with ``explain`` every formula with its numbers."""
        from windtunnel.reports.memory_text import explanation, plan_text

        row = self.row
        return plan_text(row, self.cost) + (f"\n{explanation(row)}" if explain else "")

    def markdown(self, *, command: str = "") -> str:
        """The plan as Markdown, for issues and pull requests; ``command`` is the line that makes it again."""
        from windtunnel.reports.memory_markdown import render_plan_markdown

        return render_plan_markdown(self.row, version=_version(), cost=self.cost, command=command)

    def report(self, path: str | Path, *, command: str = "") -> None:
        """Write one self-contained HTML file with the waterfall.  Raises OSError if it cannot be written."""
        from windtunnel.reports.memory_html import write_plan_html

        write_plan_html(path, self.row, version=_version(), cost=self.cost, command=command)

    def rows(self) -> list[dict[str, Any]]:
        """One row of single values: what ``to_csv`` writes."""
        return [_flat_row(self)]

    def to_csv(self, path: str | Path) -> None:
        """Write ``rows`` as CSV.  Raises OutputError if it cannot be written."""
        write_csv(path, self.rows())

    def to_parquet(self, path: str | Path) -> None:
        """Write ``rows`` as Parquet.  Raises OutputError if it cannot be written."""
        write_parquet(path, self.rows())

    def profile(self) -> dict[str, Any]:
        """What a real start-up teaches about this deployment, for ``correction=`` of later plans.

        Raises ValueError if none was read, or one that says nothing of the formula or contradicts itself.
        """
        request = self.judged.plan.request
        if self.disagreements:
            raise ValueError(
                "nothing is learnt from a start-up whose figures of the KV cache disagree: "
                f"{'; '.join(self.disagreements)}  Give the whole log of one server, and its model and settings"
            )
        if self.learnt_bytes is None:
            raise ValueError(
                "there is no measured KV cache to learn from: give a log or metrics with the GiB, tokens or blocks of "
                "a pool that gpu_memory_utilization determined (--from-log, --from-metrics)"
            )
        learnt = correction_of(request, self.judged.plan, self.learnt_bytes, self.source)
        check_correction(learnt, request)
        return learnt

    @property
    def row(self) -> MemoryRow:
        """What reports are made of."""
        from windtunnel.reports.memory_text import CORRECTION_TOO_LARGE, NO_REMEDY, MemoryRow

        judged = self.judged
        usual = CORRECTION_TOO_LARGE if judged.judgement.cause == "overcorrected" else NO_REMEDY
        command = "" if self.is_infeasible and not judged.remedies else self.serve_command
        return MemoryRow(
            judged,
            self.assumptions,
            self.users,
            self.comparison,
            self.notes,
            command,
            self.origins,
            self.warnings,
            self.advice or usual,
        )


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One combination of a sweep: a report, or why vLLM refuses its settings."""

    values: Mapping[str, Any]
    report: MemoryReport | None
    error: str = ""

    @property
    def verdict(self) -> str:
        """That of the plan; "does_not_start" for settings that vLLM refuses."""
        return self.report.verdict if self.report else DOES_NOT_START

    def to_dict(self) -> dict[str, Any]:
        """The point as plain data."""
        if self.report is None:
            return {**self.values, "verdict": self.verdict, "reason": self.error}
        full = self.report.to_dict()
        users = full["users"]
        return {
            **self.values,
            **{key: full[key] for key in _POINT_KEYS},
            "planned_max_model_len": full["settings"]["max_model_len"],
            "real_users": None if users is None else users["real"],
            **self.report.cost_keys,
        }


_POINT_KEYS = (
    "verdict",
    "reason",
    "kv_cache_tokens",
    "num_gpu_blocks",
    "max_concurrency",
    "available_kv_cache_bytes",
    "oom_margin_bytes",
    "interval_90",
    "num_gpus",
)


@dataclass(frozen=True, slots=True)
class MemorySweep:
    """Plans along one or more settings."""

    axes: tuple[str, ...]
    """The settings that vary, in the order in which they were given."""
    points: tuple[SweepPoint, ...]
    notes: tuple[str, ...] = ()
    """Those of all plans; one that is not of every plan begins with its rows, which count from 1 as the points do."""
    warnings: tuple[str, ...] = ()
    """What must not be overlooked, as ``notes``."""

    @property
    def table(self) -> pd.DataFrame:
        """One row a point."""
        import pandas as pd

        return pd.DataFrame([point.to_dict() for point in self.points])

    @property
    def is_infeasible(self) -> bool:
        """Whether no point starts."""
        return all(point.verdict == DOES_NOT_START for point in self.points)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data: what ``windtunnel memory --json`` prints for several values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "axes": list(self.axes),
            "points": [point.to_dict() for point in self.points],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }

    def text(self) -> str:
        """A table of KV tokens, concurrency, margin and verdict."""
        from windtunnel.reports.memory_text import sweep_text

        return sweep_text(self.axes, [point.to_dict() for point in self.points], self.notes, self.warnings)

    @property
    def currency(self) -> str:
        """Of the costs; empty without a price."""
        prices = (point.report.price for point in self.points if point.report is not None)
        return next((price.currency for price in prices if price is not None), "")

    def report(self, path: str | Path, *, command: str = "") -> None:
        """Write one self-contained HTML file with the figures; ``command`` is the line that makes the sweep again.

        Raises OSError if it cannot be written.
        """
        from windtunnel.reports.memory_html import write_sweep_html

        points = [point.to_dict() for point in self.points]
        told = {"version": _version(), "currency": self.currency, "command": command}
        write_sweep_html(path, self.axes, points, self._best(), self.notes, self.warnings, **told)

    def markdown(self, *, command: str = "") -> str:
        """The sweep as Markdown, for issues and pull requests; ``command`` is the line that makes it again."""
        from windtunnel.reports.memory_html import sweep_title
        from windtunnel.reports.memory_markdown import render_sweep_markdown

        points = [point.to_dict() for point in self.points]
        told = {"version": _version(), "currency": self.currency, "command": command}
        title = sweep_title(self.axes, self._best())
        return render_sweep_markdown(self.axes, points, self.notes, self.warnings, title=title, **told)

    def rows(self) -> list[dict[str, Any]]:
        """One row of single values for each plan: what ``to_csv`` writes."""
        rows = [
            {**point.values, "verdict": point.verdict, "reason": point.error}
            if point.report is None
            else {**point.values, **_flat_row(point.report)}
            for point in self.points
        ]
        keys = dict.fromkeys(key for row in rows for key in row)
        return [{key: row.get(key) for key in keys} for row in rows]

    def to_csv(self, path: str | Path) -> None:
        """Write ``rows`` as CSV.  Raises OutputError if it cannot be written."""
        write_csv(path, self.rows())

    def to_parquet(self, path: str | Path) -> None:
        """Write ``rows`` as Parquet.  Raises OutputError if it cannot be written."""
        write_parquet(path, self.rows())

    def _best(self) -> MemoryRow | None:
        """The largest pool that is ok, else that is unsafe."""
        for verdict in (OK, UNSAFE):
            reports = [point.report for point in self.points if point.report and point.verdict == verdict]
            if reports:
                return max(reports, key=lambda report: report.kv_cache_tokens).row
        return None


# --- asking


def memory_plan(
    model: str | Path | Mapping[str, Any] | ModelSpec | None = None,
    gpu: str | GpuSpec | None = None,
    *,
    engine: str | None = None,
    gpu_memory_gib: float | str | None = None,
    mean_tokens: int | str | None = None,
    from_log: str | Path | None = None,
    from_metrics: str | Path | None = None,
    from_deployment: str | Path | None = None,
    correction: str | Path | Mapping[str, Any] | None = None,
    gpu_price: Any = None,
    currency: str | None = None,
    **settings: Any,
) -> MemoryReport:
    """The KV cache that vLLM finds for a model on a GPU, whether it starts, and what would help if not.

    ``model`` is a bundled name, the path of a ``config.json`` or what is in one as a dict, ``gpu`` a name (or
    ``gpu_memory_gib`` the total that its driver reports).  ``settings`` have vLLM's names: tensor_parallel_size,
    gpu_memory_utilization, max_model_len (also "auto"), max_num_seqs, max_num_batched_tokens, kv_cache_dtype, ...;
    numbers may be text as on its command line ("16k", "16GiB").  What is None is vLLM's default of the release
    ``engine``, "vllm-0.32" if None.

    ``from_log`` (what vLLM printed), ``from_metrics`` (its /metrics) and ``from_deployment`` (a command line, compose
    file, Helm values) fill in what is not given; a pool that was measured overrides the formula as long as no setting
    differs from the server's, and corrects it else.  ``correction`` is what ``MemoryReport.profile`` gave, or its file.

    ``gpu_price`` is what one GPU costs in an hour, a number or a table by name, in ``currency`` (USD if None).

    Raises ValueError for settings that are unknown, out of range or contradict each other, RefusedByVllm (a ValueError)
    for those that vLLM refuses whatever the memory; MemoryInputUnreadable for files; UnsupportedModel; TypeError for
    what is no value of a setting.
    """
    source = Source.read(from_log, from_metrics, from_deployment, correction)
    given = {"model": model, "gpu": gpu, "engine": engine, "gpu_memory_gib": gpu_memory_gib, **settings}
    given = {name: one_value(name, value) for name, value in given.items()}
    price = GpuPrice.read(gpu_price, currency)
    return _report(Asked.of(given, source), read_mean_tokens(one_value("mean_tokens", mean_tokens)), price)


def _report(
    asked: Asked, mean_tokens: int | None, price: GpuPrice | None, *, with_remedies: bool = True
) -> MemoryReport:
    judged = asked.judged(with_remedies=with_remedies)
    outside = (text for text in judged.plan.overheads.assumptions if text.startswith(_EXTRAPOLATED))
    return MemoryReport(
        judged,
        mean_tokens,
        asked.comparison,
        (*asked.notes, *outside),
        (*asked.warned(judged), *_too_long(mean_tokens, judged.plan)),
        origins(judged.plan, asked.measured_origins, asked.given),
        asked.formula_check,
        asked.learnt_bytes,
        asked.source,
        asked.advice,
        asked.disagreements,
        price,
    )


def _too_long(mean_tokens: int | None, plan: MemoryPlan) -> Iterator[str]:
    """That there are no requests of the length that is asked for."""
    longest = plan.settings.max_model_len
    if mean_tokens is not None and mean_tokens > longest:
        yield (
            f"--mean-tokens {mean_tokens:,} is more than max_model_len ({longest:,}): vLLM refuses such requests, so "
            f"that their number means nothing. Give at most {longest:,}"
            f"{', or a larger --max-model-len' if mean_tokens <= plan.request.model.max_model_len else ''}."
        )


_EXTRAPOLATED = "Not measured:"
"""How ``overheads`` begins the sentence on what lies outside of its start-ups."""


def memory_sweep(
    model: str | Path | Mapping[str, Any] | ModelSpec | Iterable[Any] | None = None,
    gpu: str | GpuSpec | Iterable[str | GpuSpec] | None = None,
    *,
    engine: str | Iterable[str] | None = None,
    gpu_memory_gib: Any = None,
    mean_tokens: int | str | None = None,
    from_log: str | Path | None = None,
    from_metrics: str | Path | None = None,
    from_deployment: str | Path | None = None,
    correction: str | Path | Mapping[str, Any] | None = None,
    gpu_price: Any = None,
    currency: str | None = None,
    **settings: Any,
) -> MemorySweep:
    """``memory_plan`` for every combination of the settings that have several values.

    Several values are any iterable (a set is sorted), or text such as "0.80:0.98:0.02" (first, last, step) or
    "auto,fp8".

    What vLLM refuses, such as a tensor_parallel_size that does not divide the heads, is a point that does not start.

    Raises ValueError, as ``memory_plan`` does, for a value that no release takes and for an unknown name, whichever
    combination they are in, for more than 2,000 combinations and for a setting without a value.
    """
    given = {"model": model, "gpu": gpu, "engine": engine, "gpu_memory_gib": gpu_memory_gib, **settings}
    check_names(given)
    values = {name: all_values(name, value) for name, value in given.items() if value is not None}
    check_values(values)
    axes = tuple(name for name, each in values.items() if len(each) > 1)
    if math.prod(len(each) for each in values.values()) > MOST_PLANS:
        raise ValueError(
            f"{math.prod(len(each) for each in values.values()):,} combinations of {', '.join(axes)} are more than "
            f"{MOST_PLANS:,}: take longer steps or fewer values"
        )
    source = Source.read(from_log, from_metrics, from_deployment, correction)
    tokens = read_mean_tokens(one_value("mean_tokens", mean_tokens))
    price = GpuPrice.read(gpu_price, currency)
    points = []
    for combination in product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        shown = {name: shown_value(chosen[name]) for name in axes}
        try:
            report = _report(Asked.of(chosen, source), tokens, price, with_remedies=False)
            points.append(SweepPoint(shown, report))
        except RefusedByVllm as error:
            points.append(SweepPoint(shown, None, str(error)))
    reports = [point.report for point in points]
    notes = _gathered([report.notes if report else None for report in reports])
    return MemorySweep(axes, tuple(points), notes, _gathered([each.warnings if each else None for each in reports]))


def _gathered(told: Sequence[Sequence[str] | None]) -> tuple[str, ...]:
    """What is told of each row (None where there is no plan), each sentence once, with its rows unless all have it."""
    from windtunnel.reports.memory_text import row_words

    rows: dict[str, list[int]] = {}
    for number, sentences in enumerate(told, 1):
        for sentence in sentences or ():
            rows.setdefault(sentence, []).append(number)
    planned = sum(sentences is not None for sentences in told)
    return tuple(
        sentence if len(numbers) == planned else f"{row_words(numbers)}: {sentence}"
        for sentence, numbers in rows.items()
    )


def _flat_row(report: MemoryReport) -> dict[str, Any]:
    """The figures and settings of a plan as single values."""
    full = report.to_dict()
    low, high = full["interval_90"]["low"], full["interval_90"]["high"]
    single = {key: value for key, value in full.items() if not isinstance(value, dict | list)}
    return {**single, "kv_cache_tokens_low": low, "kv_cache_tokens_high": high, **full["settings"]}


def _version() -> str:
    from windtunnel import __version__

    return __version__
