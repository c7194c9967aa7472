"""Simulations from Python: ``simulate`` a scenario, look at the ``Run``, save it and load it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from windtunnel import __version__
from windtunnel.rundir import (
    RecordsFormat,
    RunUnreadable,
    SavedRun,
    read_run,
    replica_columns,
    request_columns,
    write_run,
    writing,
)
from windtunnel.sim.records import Records

if TYPE_CHECKING:
    import pandas as pd

    from windtunnel.reports.context import ReportContext
    from windtunnel.reports.perfetto import TraceStats
    from windtunnel.scenarios.resolve import Resolved
    from windtunnel.scenarios.schema import Scenario
    from windtunnel.sim.metrics import Summary
    from windtunnel.sim.metrics.economics import Rates
    from windtunnel.sim.workload import Workload

Progress = Callable[[int, int], None]
NS_PER_S = 1_000_000_000


def simulate(
    scenario: str | Path | Mapping[str, Any] | Scenario | None = None,
    *,
    seed: int | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> Run:
    """Simulate a scenario and return what happened.

    ``scenario`` is a path, the name of a bundled scenario, a dict with the sections of a scenario file, or None when
    ``overrides`` say it all.  ``overrides`` are keys of the scenario file (``max_num_seqs=64``, ``trace="a.csv"``) or
    whole sections (``cost={"kind": "constant", "step_s": "10ms"}``, ``slo={"objectives": ["ttft:p99<500ms"]}``); they
    win over the file.  ``profile="NAME"`` or ``profile="FILE"`` is short for a cost of that kind (``profiles()`` lists
    the bundled ones), and ``noise=True`` lets steps scatter by what the profile states.  ``progress(done, total)`` is
    called now and then with the number of finished requests.

    The same scenario and seed give the same run, to the nanosecond.

    Raises ScenarioError, TraceError, InfeasibleDeployment or RequestTooLarge as ``scenarios.resolve.resolve`` does.

    >>> run = simulate("chat-8b-h100", seed=1, max_num_seqs=64)  # doctest: +SKIP
    >>> run.requests.ttft_s.quantile(0.99)  # doctest: +SKIP
    """
    from windtunnel.scenarios.load import Override, load_scenario
    from windtunnel.scenarios.resolve import resolve

    given = {"seed": seed, **overrides}
    loaded = load_scenario(
        scenario, {key: Override(value, f"{key}=") for key, value in given.items() if value is not None}
    )
    return execute(resolve(loaded), progress=progress)


def profiles() -> pd.DataFrame:
    """The bundled profiles, one row each: name, model, gpu, tensor_parallel_size, dtype, evidence, stated error.

    >>> wt.simulate("chat-8b-h100", profile=wt.profiles().name[0])  # doctest: +SKIP
    """
    import pandas as pd

    from windtunnel.sim.cost.bundled import bundled_profiles

    columns = (
        *("name", "model", "gpu", "tensor_parallel_size", "dtype", "kv_cache_dtype", "evidence", "source", "statement"),
        *("p50_percent", "p90_percent"),
    )
    rows = [
        {key: each.stated_error.get(key) if key.endswith("_percent") else getattr(each, key) for key in columns}
        for each in bundled_profiles()
    ]
    return pd.DataFrame(rows, columns=list(columns))


def execute(resolved: Resolved, *, progress: Progress | None = None) -> Run:
    """Run a resolved scenario; what ``simulate`` does once every setting is known."""
    from windtunnel.scenarios.gateway import tenants_alone
    from windtunnel.scenarios.saturation import saturation_request_throughput
    from windtunnel.sim.cost.fitted import extrapolation_warning
    from windtunnel.sim.fleet.fleet import replicas_by_cost
    from windtunnel.sim.simulate import serve

    workload, system = resolved.workload, resolved.served
    records = serve(workload, system, horizon_ns=resolved.horizon_ns, progress=progress)
    saturation = saturation_request_throughput(workload, system) if resolved.measures_saturation else None
    described = resolved.describe()
    alone = tenants_alone(workload, system, resolved.horizon_ns) if resolved.measures_tenants_alone else None
    if alone is not None:
        described["tenants_alone"] = alone
    for cost, replicas in replicas_by_cost(records, system):
        extrapolated = extrapolation_warning(cost, (replica.steps for replica in replicas))
        if extrapolated is not None:
            described["warnings"].append(extrapolated)
    return Run(records, workload, {"windtunnel_version": __version__, **described}, saturation)


def load_run(folder: str | Path) -> Run:
    """The run that ``Run.save`` or ``windtunnel simulate -o`` wrote into this folder.

    Raises RunUnreadable if it holds no run or a damaged one.
    """
    saved = read_run(Path(folder))
    saturation = saved.resolved.pop("saturation_request_throughput", None)
    run = Run(saved.records, saved.workload, saved.resolved, saturation)
    _check_is_whole(run, Path(folder))
    return run


def _check_is_whole(run: Run, folder: Path) -> None:
    """Raise RunUnreadable if the settings lack what reports are made from."""
    from windtunnel.sim.metrics import parse_slos

    try:
        asked, context = run.resolved["objectives"], run.context
        parse_slos(asked["slo"] or [])
        texts = [context.engine, context.cost_model, *context.notes, *context.warnings]
        kinds = (asked["percentiles"], run.resolved["metadata"], run.resolved["workload"])
        is_whole = all(isinstance(text, str) for text in texts) and isinstance(kinds[0], list)
        if not is_whole or not all(isinstance(kind, dict) for kind in kinds[1:]):
            raise TypeError("a setting has another type than this version writes")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RunUnreadable(
            f"the run in {folder} cannot be read ({error!r}): it was changed or comes from another version; simulate "
            "it again"
        ) from error


class Run:
    """What a simulation left behind: the records, and tables, summary and reports made from them."""

    def __init__(
        self,
        records: Records,
        workload: Workload,
        resolved: dict[str, Any],
        saturation_request_throughput: float | None = None,
    ) -> None:
        self.records = records
        """Everything that was measured, in whole nanoseconds."""
        self.workload = workload
        self.resolved = resolved
        """Every setting with its source, the seed and the version, as plain data."""
        self.saturation_request_throughput = saturation_request_throughput
        """Requests per second that the engine can do at most; None if that was not measured."""

    @cached_property
    def statistics(self) -> Summary:
        """The summary as an object, with more in it than ``summary``."""
        from windtunnel.sim.metrics import summarize

        asked = self.resolved["objectives"]
        return summarize(
            self.records,
            self.workload,
            slo=asked["slo"] or None,
            goodput=asked["goodput"],
            saturation_request_throughput=self.saturation_request_throughput,
            percentiles=asked["percentiles"],
            tenant_weights=self._tenant_weights(),
            tenants_alone=self.resolved.get("tenants_alone"),
            rates=self._rates,
            currency=self.resolved.get("rates", {}).get("currency", ""),
        )

    @cached_property
    def _rates(self) -> Rates:
        """Price and power of a replica's GPUs; runs of before know neither."""
        from windtunnel.sim.metrics.economics import Rates

        told, hardware = self.resolved.get("rates"), self.resolved["hardware"]
        if told is None:
            return Rates(hardware["tensor_parallel_size"] * hardware.get("pipeline_parallel_size", 1))
        return Rates(**{key: value for key, value in told.items() if key != "currency"})

    def _tenant_weights(self) -> dict[str, float]:
        tenants = (self.resolved.get("gateway") or {}).get("tenants", {})
        return {name: tenant["weight"] for name, tenant in tenants.items()}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The summary under the keys of ``vllm bench serve``'s result, then ours."""
        return self.statistics.to_dict(metadata=self.resolved["metadata"])

    @property
    def slo_passed(self) -> bool | None:
        """Whether every objective was kept; None if none was set."""
        return self.statistics.slo_passed

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row a request: its name in the trace, its columns in nanoseconds, and four latencies in seconds.

        ``ttft_s``, ``tpot_s``, ``e2el_s`` and ``queue_s`` are NaN where the request did not get so far; ``tpot_s`` is
        NaN for a single output token, which has none.  docs/run-folder.md describes every column.
        """
        return _frame(request_columns(self.records, self.workload))

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row a step."""
        return _frame(replica_columns(self.records, "steps"))

    @cached_property
    def spans(self) -> pd.DataFrame:
        """Runs of tokens: one token at the end of each of ``count`` steps from ``first_step`` on."""
        return _frame(replica_columns(self.records, "spans"))

    @cached_property
    def preemptions(self) -> pd.DataFrame:
        """One row a preemption."""
        return _frame(replica_columns(self.records, "preemptions"))

    @cached_property
    def evictions(self) -> pd.DataFrame:
        """Who lost what for whom: one row a preemption of any replica, in order of time.

        As ``preemptions``, with how often the victim had been preempted by then (``number``) and the share of the KV
        blocks in use right before and after.
        """
        from dataclasses import fields

        from windtunnel.sim.metrics.economics import eviction_log

        log = eviction_log(self.records)
        return _frame({field.name: getattr(log, field.name) for field in fields(log)})

    @cached_property
    def drafts(self) -> pd.DataFrame:
        """One row a position of a draft: how often it was verified and how often it held."""
        return _frame(replica_columns(self.records, "drafts"))

    def save(self, folder: str | Path, *, force: bool = False, records_format: RecordsFormat = "parquet") -> None:
        """Write the run into a folder that ``load_run`` and ``windtunnel report`` read; its tables as Parquet or CSV.

        An earlier run there is replaced; ``force`` writes into a folder that holds other things, too.  Raises
        OutputError if it cannot be written.
        """
        resolved = {**self.resolved, "saturation_request_throughput": self.saturation_request_throughput}
        saved = SavedRun(self.workload, self.records, self.summary, resolved)
        write_run(Path(folder), saved, force=force, records_format=records_format)

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """As ``load_run``."""
        return load_run(folder)

    @cached_property
    def context(self) -> ReportContext:
        """What reports say besides the numbers: what was simulated, with which settings, from where."""
        from windtunnel.reports.context import ReportContext, ResolvedValue
        from windtunnel.sim.cost.evidence import evidence_of_run
        from windtunnel.sim.cost.statement import sentences, shown_name

        told, hardware = self.resolved, self.resolved["hardware"]
        return ReportContext(
            title=told["scenario"]["name"],
            model=hardware["model"] or "",
            gpu=_gpus(told),
            engine=told["engine"],
            cost_model=shown_name(told["metadata"]),
            evidence=evidence_of_run(told),
            cost=told["cost"],
            calibrated_by=sentences(
                told["cost"], self._median_step_s(), has_noise=bool(told["metadata"].get("step_time_noise"))
            ),
            resolved=tuple(ResolvedValue(**entry) for entry in told["settings"]),
            seed=told["seed"],
            version=told["windtunnel_version"],
            workload=told["workload"],
            notes=tuple(told["notes"]),
            warnings=tuple(told["warnings"]),
            labels=self.workload.labels,
            tenants=self.workload.tenants,
            tenant=self.workload.tenant,
        )

    def _median_step_s(self) -> float | None:
        """Length of the median step of all replicas; None if there was none."""
        lasted_ns = np.concatenate(
            [np.zeros(0), *(replica.steps.end_ns - replica.steps.start_ns for replica in self.records.replicas)]
        )
        return float(np.median(lasted_ns)) / NS_PER_S if len(lasted_ns) else None

    def text(self) -> str:
        """The summary as a table: that of ``vllm bench serve``, row by row, then what that does not show."""
        from windtunnel.reports.text import render_text

        return render_text(self.statistics, self.context)

    def markdown(self) -> str:
        """The summary as Markdown, for issues and pull requests."""
        from windtunnel.markdown import render_markdown

        return render_markdown(self.records, self.statistics, self.context)

    def report(self, path: str | Path) -> None:
        """Write one HTML file that shows what happened; it needs nothing else and works offline.

        Folders that are missing are made.  Raises OutputError if it cannot be written.
        """
        from windtunnel.reports.html import write_html

        with writing(Path(path)):
            write_html(path, self.records, self.statistics, self.context)

    def trace(
        self, path: str | Path, *, start_s: float = 0.0, end_s: float | None = None, limit: int | None = None
    ) -> TraceStats:
        """Write the run, or a part of it, as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

        ``limit`` is the largest number of steps and of requests; the answer says what was left out.  Folders that are
        missing are made.  Raises ValueError for a part that is empty, OutputError if the file cannot be written.
        """
        from windtunnel.reports.perfetto import write_trace

        with writing(Path(path)):
            return write_trace(path, self.records, self.context, start_s=start_s, end_s=end_s, limit=limit)

    def __repr__(self) -> str:
        name = self.resolved["scenario"]["name"]
        return f"<Run {name}: {self.statistics.completed:,} of {len(self.records.requests):,} requests finished>"


def _gpus(told: Mapping[str, Any]) -> str:
    """Kind and number of the GPUs (that there are at the start), of each pool of a fleet."""
    hardware = told["hardware"]
    found: dict[str | None, int] = {}
    for pool in told.get("fleet", {}).get("pools", {}).values():
        found[pool["gpu"]] = found.get(pool["gpu"], 0) + pool["replicas"] * pool["gpus_per_replica"]
    found = found or {hardware["gpu"]: hardware["num_gpus"]}
    return ", ".join(f"{count} x {name}" for name, count in found.items() if name)


def _frame(columns: Mapping[str, Any]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(dict(columns))
