"""What was validated against what: reports/published/validation.html, validation.json and the README's table.

    python -m benchmarks.validation_page [--folder reports/published] [--readme [README.md]]

Gathers what other benchmarks wrote into the folder (live runs, forks, schedulers and layouts of vLLM's releases, step
times, public runs on GPUs) and judges the memory planner anew.  A row is there only if its measurement is; what is
missing is named.  With ``--readme`` the table between the two markers of that file is replaced.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel import __version__
from windtunnel.calibrate.memory_fit import Evaluation, evaluate
from windtunnel.calibrate.startups import read_rows
from windtunnel.reports.files import atomic_writer
from windtunnel.reports.validation_page import write_validation_page
from windtunnel.reports.words import plural

Plain = Mapping[str, Any]

FOLDER = Path("reports/published")
BEGIN, END = "<!-- validation table: begin -->", "<!-- validation table: end -->"
LATENCIES = ("TTFT", "TPOT", "E2EL", "ITL")
INPUTS = (
    "live_vllm_cpu",
    "calibration",
    "cpu_end_to_end",
    "fork",
    "fork_near_saturation",
    "differential",
    "older-releases",
    "older-memory",
    "kernels_composed",
    "validation_4090",
)
"""Names of the files, without ``.json``."""
PACED, BARE = "vLLM on CPU, paced", "vLLM on CPU, bare"
RECORDED_PACED, RECORDED_BARE = "recorded vLLM, paced", "recorded vLLM, bare"
TORCH, PUBLIC = "own torch engine", "public GPU runs"
FORK_FIGURES = ("ttft_mean_ms", "tpot_mean_ms", "e2el_mean_ms", "request_throughput", "running_mean", "kv_usage_mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--readme", type=Path, nargs="?", const=Path("README.md"), help="the file whose table to renew")
    given = parser.parse_args()
    inputs = {name: found for name in INPUTS if (found := _json_of(given.folder / f"{name}.json")) is not None}
    dates = {name: _date_of(given.folder / f"{name}.json") for name in inputs}
    dates["memory"] = _date_of(given.folder / "memory.html")
    content = shortened(gathered(inputs, evaluate(read_rows()), dates))
    with atomic_writer(given.folder / "validation.json") as file:
        file.write(json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n")
    write_validation_page(given.folder / "validation.html", content, version=__version__)
    print(f"wrote {given.folder / 'validation.html'} and .json")
    print("\n".join(readme_table(content["rows"])))
    if given.readme is not None:
        renew_table(given.readme, content["rows"])
        print(f"renewed the table of {given.readme}")
    for name in content["missing"]:
        print(f"not shown: {name}.json was not at hand")


def _json_of(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _date_of(path: Path) -> str:
    """The day on which the file was last committed; if it has changed since, or never was, that of the file itself."""
    changed = _git("status", "--porcelain", "--", str(path))
    committed = _git("log", "-1", "--format=%cs", "--", str(path))
    if committed and not changed:
        return committed
    return f"{datetime.fromtimestamp(path.stat().st_mtime, UTC):%Y-%m-%d}" if path.is_file() else ""


def _git(*words: str) -> str:
    try:
        return subprocess.run(("git", *words), capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


# ------------------------------------------------------------------ everything


def gathered(inputs: Mapping[str, Any], evaluations: Sequence[Evaluation], dates: Mapping[str, str]) -> dict[str, Any]:
    """The content of the page, as plain data: rows of the table, and what the figures are drawn from.

    ``inputs``: what each file holds, by its name in ``INPUTS``; a name may be absent.  ``dates``: the day of each file
    that does not state its own.
    """
    points = list(_points(inputs))
    decisions = list(_decisions(inputs))
    return {
        "windtunnel": __version__,
        "rows": list(_rows(inputs, points, decisions, evaluations, dates)),
        "points": points,
        "live_notes": [line for study in _live_studies(inputs) for line in study.get("notes", ()) if line],
        "decisions": decisions,
        "forks": [_fork_of(inputs[name], name) for name in ("fork", "fork_near_saturation") if name in inputs],
        "steps": list(_step_errors(inputs)),
        "memory": _memory(evaluations) if evaluations else None,
        "profiles": _profiles(inputs),
        "public_about": _public_about(inputs),
        "missing": [name for name in INPUTS if name not in inputs],
    }


def shortened(content: Any) -> Any:
    """The same with five significant digits, and None for what is no number."""
    if isinstance(content, float):
        return float(f"{content:.5g}") if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: shortened(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [shortened(value) for value in content]
    return content


# ------------------------------------------------------------------ figures of runs


def _points(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every figure of a run that was predicted and measured."""
    for study in _live_studies(inputs):
        apart = study["num_repeats"] > 1
        for row in study["rows"]:
            spread = _share(row["live_spread"], row["live"]) if apart else None
            yield _point(_group_of(study), row["workload"], row["figure"], row, 1.0, spread)
    recorded = (inputs.get("calibration") or {}).get("live") or {}
    for name, group in (("paced", RECORDED_PACED), ("bare", RECORDED_BARE)):
        for line in (recorded.get(name) or {}).get("lines", ()):
            if line["where"] == "client":
                yield _point(group, line["run"], line["figure"], line, 1.0, None)
    torch = inputs.get("cpu_end_to_end") or {}
    for row in torch.get("comparison", ()):
        scale = 1e-3 if row["unit"] == "ms" else 1.0
        line = {**row, "live": row["live_median"], "is_broken": _is_broken(row)}
        yield _point(
            TORCH, f"Poisson at {100 * torch['load']:.0f} %", row["metric"], line, scale, row["live_spread_percent"]
        )
    for run in (inputs.get("validation_4090") or {}).get("runs", ()):
        for line in run["predictions"][0]["figures"]:
            figure, _, unit = line["figure"].partition(", ")
            yield _point(PUBLIC, run["name"], figure, line, 1e-3 if unit == "ms" else 1.0, None)


def _point(group: str, run: str, figure: str, line: Plain, scale: float, spread: float | None) -> dict[str, Any]:
    return {
        "group": group,
        "run": run,
        "figure": figure,
        "live": scale * line["live"],
        "predicted": scale * line["predicted"],
        "error_percent": line["error_percent"],
        "limit_percent": line.get("limit_percent"),
        "is_broken": bool(line.get("is_broken", False)),
        "live_spread_percent": spread,
    }


def _is_broken(row: Plain) -> bool:
    return row["limit_percent"] is not None and not abs(row["error_percent"]) <= row["limit_percent"]


def _share(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else 0.0


def _live_studies(inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    studies = (inputs.get("live_vllm_cpu") or {}).get("studies", {})
    return [{**study, "name": name} for name, study in studies.items()]


def _group_of(study: Plain) -> str:
    return PACED if study["pace"] is not None else BARE


def _decisions(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Steps of live runs that our scheduler was led through."""
    for study in _live_studies(inputs):
        for each in study["decisions"]:
            yield _decided(_group_of(study), each, each["num_steps"] - each["num_same"])
    recorded = (inputs.get("calibration") or {}).get("live") or {}
    for name, group in (("paced", RECORDED_PACED), ("bare", RECORDED_BARE)):
        for each in (recorded.get(name) or {}).get("decisions", ()):
            yield _decided(group, each, 0 if each["first_difference"] is None else None)


def _decided(group: str, each: Plain, different: int | None) -> dict[str, Any]:
    keys = ("run", "num_steps", "num_preemptions", "first_difference")
    return {"group": group, **{key: each[key] for key in keys}, "num_different": different}


# ------------------------------------------------------------------ forks, steps, memory


def _fork_of(fork: Plain, name: str) -> dict[str, Any]:
    """Errors of each moment's forks, with lengths known and unknown."""
    return {
        "name": name,
        "load": fork["load"],
        "horizon_s": fork["horizon_s"],
        "num_futures": fork["num_futures"],
        "num_exact": sum(moment["is_exact_with_true_step_times"] for moment in fork["moments"]),
        "moments": [
            {
                "time_s": moment["time_s"],
                "errors": {
                    line["name"]: [line["known"]["error_percent"], line["unknown"]["error_percent"]]
                    for line in moment["metrics"]
                    if line["name"] in FORK_FIGURES
                },
            }
            for moment in fork["moments"]
        ],
    }


def _step_errors(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Errors of whole steps on B300: fitted (shapes left out) and composed from kernels."""
    for size in (inputs.get("calibration") or {}).get("b300") or ():
        if isinstance(size, Mapping):
            middle = {key: _middle(size["divisions"], key) for key in ("median_percent", "p90_percent")}
            yield _step_line("fitted to other shapes", size["tensor_parallel_size"], size["num_steps_in_table"], middle)
    by_size = (inputs.get("kernels_composed") or {}).get("real_steps", {}).get("by_size", {})
    for size, each in by_size.items():
        for key, how in (("host_of_other_sizes", "composed, with host"), ("kernels_only", "composed, kernels only")):
            if key in each:
                yield _step_line(how, int(size), each[key]["all"]["num_steps"], each[key]["all"])


def _step_line(how: str, size: int, num_steps: int, errors: Plain) -> dict[str, Any]:
    kept = {key: errors[key] for key in ("median_percent", "p90_percent")}
    return {"how": how, "tensor_parallel_size": size, "num_steps": num_steps, **kept}


def _middle(divisions: Sequence[Plain], key: str) -> float:
    return float(np.median([each[key] for each in divisions]))


def _memory(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    errors = np.array([100.0 * evaluation.error for evaluation in evaluations])
    return {
        "num_start_ups": len(evaluations),
        "num_families": len({evaluation.family for evaluation in evaluations}),
        "releases": sorted({each.version.removeprefix("vllm-") for each in evaluations}, key=_release),
        "median_percent": float(np.median(np.abs(errors))),
        "p90_percent": float(np.percentile(np.abs(errors), 90)),
        "worst_percent": float(np.abs(errors).max()),
        "covered_percent": float(100.0 * np.mean([evaluation.covered for evaluation in evaluations])),
        "logged": [float(evaluation.logged) for evaluation in evaluations],
        "planned": [float(evaluation.predicted) for evaluation in evaluations],
        "cards": [f"{evaluation.gpu}, {evaluation.version}" for evaluation in evaluations],
    }


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _profiles(inputs: Mapping[str, Any]) -> dict[str, int]:
    """How many bundled profiles there are, by what their step times come from."""
    profiles = ((inputs.get("calibration") or {}).get("bundled") or {}).get("profiles", ())
    sources = [profile["source"] for profile in profiles]
    return {source: sources.count(source) for source in sorted(set(sources))}


def _public_about(inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What else was predicted of the public runs, with one ingredient changed: mean errors, and if it is hindsight."""
    return [
        {
            "run": run["name"],
            "label": each["label"],
            "about": each["about"],
            "is_hindsight": each["is_hindsight"],
            "num_preemptions": each["num_preemptions"],
            "errors": {
                line["figure"].partition(",")[0]: line["error_percent"]
                for line in each["figures"]
                if " mean" in line["figure"] or line["figure"].startswith("makespan")
            },
        }
        for run in (inputs.get("validation_4090") or {}).get("runs", ())
        for each in run["predictions"]
    ]


# ------------------------------------------------------------------ the table


def _rows(
    inputs: Mapping[str, Any],
    points: Sequence[Plain],
    decisions: Sequence[Plain],
    evaluations: Sequence[Evaluation],
    dates: Mapping[str, str],
) -> Iterator[dict[str, Any]]:
    yield from _scheduler_row(inputs, dates)
    if decisions:
        yield _live_decisions_row(inputs, decisions, dates)
    for study in _live_studies(inputs):
        name = "paced steps" if study["pace"] is not None else "bare CPU steps"
        truth = study["versions"].split(",")[0]
        runs = plural(_num_runs(points, _group_of(study)) * study["num_repeats"], "run")
        made = _runs_row(points, _group_of(study), f"live server, {name}", f"{truth} on CPU", study["date"][:10], runs)
        yield {**made, "decisions": _same(decisions, _group_of(study)), "source": "live_vllm_cpu.json"}
    for group, name in ((RECORDED_PACED, "paced steps"), (RECORDED_BARE, "bare CPU steps")):
        if _num_runs(points, group):
            runs = plural(_num_runs(points, group), "run")
            made = _runs_row(
                points, group, f"recorded server, {name}", "vLLM 0.32.0 on CPU", dates["calibration"], runs
            )
            yield {**made, "decisions": _same(decisions, group), "source": "calibration.json"}
    if "cpu_end_to_end" in inputs:
        yield _torch_row(inputs["cpu_end_to_end"], points)
    if forks := [inputs[name] for name in ("fork", "fork_near_saturation") if name in inputs]:
        yield _forks_row(forks)
    yield from _steps_rows(inputs, dates)
    public = inputs.get("validation_4090") or {}
    for run in public.get("runs", ()):
        yield _public_row(run, points, public["engine"], dates["validation_4090"])
    if evaluations:
        yield _memory_row(_memory(evaluations), dates.get("memory", ""))
    if "older-memory" in inputs:
        yield _older_memory_row(inputs["older-memory"], dates["older-memory"])


def _row(subject: str, truth: str, when: str, num: str, compared: str, error: str, **more: Any) -> dict[str, Any]:
    made = {"subject": subject, "truth": truth, "when": when, "n": num, "compared": compared, "error": error}
    return {**made, "spread": "", "decisions": "", "source": "", "in_readme": True, **more}


def _scheduler_row(inputs: Mapping[str, Any], dates: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    own, older = inputs.get("differential"), inputs.get("older-releases")
    if own is None and older is None:
        return
    steps = (own or {}).get("steps", 0) + (older or {}).get("steps", 0)
    different = len((own or {}).get("differences", ())) + (older or {}).get("different", 0)
    truths = [
        f"vLLM {own['vllm'].removesuffix('.0')}" if own else "",
        f"{older['num_releases']} older" if older else "",
    ]
    when = max(dates[name] for name in ("differential", "older-releases") if name in inputs)
    told = "none differs" if not different else f"{different} cases differ"
    named = (older or {}).get("different_by_rules_not_reproduced", 0)
    by_rules = f"; {named} cases by named rules" if named else ""
    yield _row(
        "scheduler, random cases",
        " and ".join(filter(None, truths)),
        when,
        f"{steps:,} steps",
        "tokens, blocks, preemptions and order of each step",
        told + by_rules,
        source=", ".join(f"{name}.json" for name in ("differential", "older-releases") if name in inputs),
    )


def _live_decisions_row(
    inputs: Mapping[str, Any], decisions: Sequence[Plain], dates: Mapping[str, str]
) -> dict[str, Any]:
    steps = sum(each["num_steps"] for each in decisions)
    broken = [each for each in decisions if each["first_difference"] is not None]
    told = "none differs" if not broken else f"{len(broken)} of {len(decisions)} runs differ"
    days = [study["date"][:10] for study in _live_studies(inputs)] + [dates.get("calibration", "")]
    return _row(
        "scheduler, live servers' steps",
        "vLLM 0.32.0 on CPU",
        max(days),
        f"{steps:,} steps",
        f"requests and tokens of each step of {len(decisions)} runs, their step times fed back",
        told,
        source=", ".join(f"{name}.json" for name in ("live_vllm_cpu", "calibration") if name in inputs),
    )


def _runs_row(points: Sequence[Plain], group: str, subject: str, truth: str, when: str, num: str) -> dict[str, Any]:
    own = [point for point in points if point["group"] == group]
    return _row(subject, truth, when, num, _compared(own), _worst_text(own), spread=_spread_text(own))


def _compared(own: Sequence[Plain]) -> str:
    names = [name for name in LATENCIES if any(point["figure"].startswith(name) for point in own)]
    others = [name for name in ("throughput", "makespan", "preemptions") if any(name in p["figure"] for p in own)]
    return ", ".join([*others, *names])


def _worst_text(own: Sequence[Plain]) -> str:
    """The largest errors of the makespan, of mean latencies and of their 95th percentiles."""
    parts = {
        "makespan": [point for point in own if point["figure"] == "makespan"],
        "means": [point for point in own if _is_latency(point, "mean")],
        "p95": [point for point in own if _is_latency(point, "p95")],
    }
    return ", ".join(f"{name} {_worst(some):.1f} %" for name, some in parts.items() if some)


def _worst(points: Sequence[Plain]) -> float:
    return max(abs(float(point["error_percent"])) for point in points)


def _is_latency(point: Plain, statistic: str) -> bool:
    name, _, rest = point["figure"].partition(" ")
    return name in LATENCIES and rest == statistic


def _spread_text(own: Sequence[Plain]) -> str:
    spreads = [p["live_spread_percent"] for p in own if _is_latency(p, "mean") and p["live_spread_percent"] is not None]
    return f"{max(spreads):.1f} %" if spreads else ""


def _num_runs(points: Sequence[Plain], group: str) -> int:
    return len({point["run"] for point in points if point["group"] == group})


def _same(decisions: Sequence[Plain], group: str) -> str:
    own = [each for each in decisions if each["group"] == group]
    if not own:
        return ""
    if any(each["first_difference"] is not None for each in own):
        return f"{sum(each['first_difference'] is not None for each in own)} of {len(own)} runs differ"
    return f"same in {sum(each['num_steps'] for each in own):,} steps"


def _torch_row(found: Plain, points: Sequence[Plain]) -> dict[str, Any]:
    num, when = plural(len(found["live_s"]), "run"), found["machine"]["date"][:10]
    made = _runs_row(points, TORCH, "own engine", "torch on CPU", when, num)
    exact = "same to the nanosecond" if found["is_replayed_exactly"] else "not reproduced"
    return {**made, "decisions": exact, "source": "cpu_end_to_end.json"}


def _forks_row(forks: Sequence[Plain]) -> dict[str, Any]:
    moments = [moment for fork in forks for moment in fork["moments"]]
    known, drawn = (_within(_mean_errors(moments, kind)) for kind in ("known", "unknown"))
    exact = sum(moment["is_exact_with_true_step_times"] for moment in moments)
    horizons = " or ".join(f"{each:g} s" for each in sorted({fork["horizon_s"] for fork in forks}))
    return _row(
        f"forks, the next {horizons}",
        "own torch engine",
        max(fork["machine"]["date"][:10] for fork in forks),
        f"{len(moments)} moments",
        f"mean TTFT, TPOT, E2EL of what follows, its requests known; with a drawn load {drawn}",
        f"means: {known}",
        decisions=f"{exact} of {len(moments)} exact with true step times",
        source="fork.json" if len(forks) == 1 else "fork.json, fork_near_saturation.json",
    )


def _mean_errors(moments: Sequence[Plain], kind: str) -> list[float]:
    return [
        abs(line[kind]["error_percent"])
        for moment in moments
        for line in moment["metrics"]
        if line["name"] in ("ttft_mean_ms", "tpot_mean_ms", "e2el_mean_ms")
    ]


def _within(errors: Sequence[float]) -> str:
    return f"half within {np.median(errors):.0f} %, all {max(errors):.0f} %"


def _steps_rows(inputs: Mapping[str, Any], dates: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for fitted, subject, source in (
        (True, "steps, fitted", "calibration"),
        (False, "steps composed from kernels", "kernels_composed"),
    ):
        hows = ("fitted to other shapes",) if fitted else ("composed, with host",)
        own = [line for line in _step_errors(inputs) if line["how"] in hows]
        if own:
            median, p90 = (max(line[key] for line in own) for key in ("median_percent", "p90_percent"))
            yield _row(
                subject,
                f"vLLM 0.20, B300, TP {own[0]['tensor_parallel_size']} to {own[-1]['tensor_parallel_size']}",
                dates[source],
                f"{sum(line['num_steps'] for line in own):,} steps",
                "time of whole steps, shapes left out" if fitted else "time of whole steps, host from the other TPs",
                f"median {median:.1f} %, p90 {p90:.1f} %",
                source=f"{source}.json",
            )


def _public_row(run: Plain, points: Sequence[Plain], engine: str, when: str) -> dict[str, Any]:
    own = [point for point in points if point["run"] == run["name"]]
    return _row(
        "public GPU run",
        f"{engine.replace('vllm-', 'vLLM ')}, {run['name']}",
        when,
        "1 run",
        _compared(own),
        _worst_text(own),
        source="validation_4090.json",
    )


def _memory_row(memory: Plain, when: str) -> dict[str, Any]:
    return _row(
        "KV tokens of memory plan",
        f"logs of vLLM {memory['releases'][0]} to {memory['releases'][-1]}",
        when,
        f"{memory['num_start_ups']} start-ups",
        f"KV tokens, constants fitted without the family of models; {memory['num_families']} families",
        f"median {memory['median_percent']:.2f} %, p90 {memory['p90_percent']:.2f} %, worst "
        f"{memory['worst_percent']:.0f} %",
        source="memory.html",
    )


def _older_memory_row(found: Plain, when: str) -> dict[str, Any]:
    different, named = found["different"], found["different_by_rules_not_reproduced"]
    return _row(
        "KV cache layout",
        f"{found['num_releases']} releases of vLLM",
        when,
        f"{found['cases']:,} cases",
        "groups, blocks and refusals for given memory",
        f"{different or 'none'} differ{'' if different else 's'}"
        + (f"; {named} by rules that are named and not reproduced" if named else ""),
        source="older-memory.json",
        in_readme=False,
    )


# ------------------------------------------------------------------ README

_README: tuple[tuple[str, Callable[[Plain], str]], ...] = (
    ("what", lambda row: str(row["subject"])),
    ("beside", lambda row: str(row["truth"])),
    ("when", lambda row: str(row["when"])),
    ("n", lambda row: str(row["n"])),
    ("worst error", lambda row: str(row["error"])),
    ("live spread", lambda row: str(row["spread"])),
)


def readme_table(rows: Sequence[Plain]) -> Iterator[str]:
    """Lines of Markdown: the rows that belong there."""
    yield f"| {' | '.join(name for name, _ in _README)} |"
    yield "|---|---|---|--:|---|--:|"
    for row in rows:
        if row["in_readme"]:
            yield f"| {' | '.join(text(row) for _, text in _README)} |"


def renew_table(path: Path, rows: Sequence[Plain]) -> None:
    """Put the rows between the markers of the file.

    Raises ValueError if it does not hold both markers, once each and in order.
    """
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{path} has no place for the table: write '{BEGIN}' and '{END}' on lines of their own, once")
    table = "\n".join(readme_table(rows))
    with atomic_writer(path) as file:
        file.write(f"{head}{BEGIN}\n{table}\n{END}{tail}")


if __name__ == "__main__":
    main()
