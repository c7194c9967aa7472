"""``optimize``: the settings with most goodput per dollar under the objectives, found, confirmed and explained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.optimizing.explain import Explainer
from windtunnel.optimizing.knobs import Knob
from windtunnel.optimizing.outputs import scenario_text, serve_line
from windtunnel.optimizing.question import DEFAULT_TRIALS, LOAD, Question, make_question
from windtunnel.optimizing.running import check_folder
from windtunnel.optimizing.search import Bench, Deployment, Found, Search, check_optuna
from windtunnel.reports.optimize_data import Confirmation, Optimized, Step, Tried, TunedKnob
from windtunnel.reports.values import plain
from windtunnel.rundir import to_json, writing
from windtunnel.sweeping.context import command_of, describe, report_context
from windtunnel.sweeping.plan import is_fixed
from windtunnel.sweeping.running import How, prepared
from windtunnel.sweeping.sweep import with_objectives
from windtunnel.workers import Done

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
Progress = Callable[[int], None]


def optimize(
    scenario: Any = None,
    tune: Mapping[str, Any] | None = None,
    *,
    wanted: str = "goodput_per_dollar",
    at: str = LOAD,
    trials: int | None = None,
    reps: int | None = None,
    seed: int | None = None,
    slo: str | Iterable[str] | None = None,
    goodput: str | Iterable[str] | None = None,
    jobs: int | None = None,
    ray: str | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **overrides: Any,
) -> Optimum:
    """Search the knobs of a deployment for goodput per dollar under the objectives, in far fewer runs than a grid.

    ``tune`` maps settings to their values, as ``sweep`` takes them: a list, ``"0.80:0.98:0.02"``, ``"2k,4k"``, or a
    range ``"0.8:0.98"``, ``"lograndom:16:512"``.  Without it the usual knobs are turned, as far as they exist for the
    model and card and step times are known.  ``wanted`` is goodput_per_dollar (per GPU-hour where the scenario has no
    price), goodput, cost, or any number of a run's summary, with + or - before it where neither way is good in itself.

    ``at`` "load" serves the scenario's own load: goodput is then bounded by what is asked for, and deployments that are
    level in it are told apart by what they cost, and then by their head-room, which is what is left of the limit of the
    tightest objective.  ``at`` "capacity" takes the largest rate that keeps the objectives as goodput.

    The scenario's settings and vLLM's defaults come first.  At most ``trials`` deployments are tried, each with up to
    ``reps`` seeds, the same for all.  The answer goes back to vLLM's default in all knobs that buy nothing beyond
    noise, and is confirmed on as many fresh seeds.  The same arguments give the same answer, however many processes
    (``jobs``) or Ray workers do the work.  In ``folder`` each run is kept at once; ``resume`` goes on from there.

    Raises ValueError for what cannot be read, ScenarioError and the like as ``simulate`` does, OptunaMissing without
    the extra ``optimize``, and OutputError for a folder.

    >>> found = optimize("memory-dial", gpu_price=1.5)  # doctest: +SKIP
    >>> print(found.serve_command)  # doctest: +SKIP
    """
    question = make_question(
        scenario,
        tune or {},
        wanted=wanted,
        at=at,
        trials=trials,
        reps=reps,
        seed=seed,
        overrides=with_objectives(overrides, slo, goodput),
    )
    check_optuna()
    if folder is not None:
        check_folder(Path(folder), resume=resume)
    tell = None if progress is None else _counter(progress)
    with prepared(jobs, ray=ray, folder=None if folder is None else Path(folder), resume=resume, tell=tell) as how:
        found = execute(question, how)
        if folder is not None:
            found.save(folder)
    return found


def _counter(progress: Progress) -> Callable[[Done], None]:
    done = 0

    def tell(one: Done) -> None:
        nonlocal done
        del one
        done += 1
        progress(done)

    return tell


def execute(question: Question, how: How) -> Optimum:
    """Search, make the answer simple, confirm it on fresh seeds, and explain it."""
    bench = Bench(question, how)
    found = Search(question, bench).run()
    num_search = bench.num_simulations
    explainer = Explainer(question, bench, found)
    confirmation: Confirmation | None = None
    winner: Deployment | None = None
    reset: dict[str, tuple[str, str]] = {}
    walk: tuple[Step, ...] = ()
    if found.best:
        confirmation, winner, reset = explainer.confirmed()
        walk = explainer.walk(winner)
    return Optimum(_gathered(question, found, winner, confirmation, reset, walk, num_search, bench.num_simulations))


def _gathered(
    question: Question,
    found: Found,
    winner: Deployment | None,
    confirmation: Confirmation | None,
    reset: Mapping[str, tuple[str, str]],
    walk: tuple[Step, ...],
    num_search: int,
    num_all: int,
) -> Optimized:
    tried = tuple(each.tried(question) for each in found.deployments)
    shown = winner or next((each for each in found.deployments if not each.point.infeasible), found.start)
    described = describe([shown.loaded])
    runs = [run for each in tried for run in each.point.runs]
    command, why = serve_line(winner.loaded) if winner is not None else ("", "")
    return Optimized(
        context=report_context(
            question.base.scenario.name, described, runs, [knob.key for knob in question.knobs], question.seeds
        ),
        description=question.base.scenario.description,
        target=question.target,
        at=question.at,
        objectives=tuple(slo.text for slo in question.objectives),
        is_priced=question.is_priced,
        currency=question.currency,
        has_limits=question.has_limits,
        knobs=tuple(_tuned(knob) for knob in question.knobs),
        were_knobs_given=question.were_knobs_given,
        tried=tried,
        start=next(each for each in tried if each.point.number == found.start.number),
        found=next((each for each in tried if found.best and each.point.number == found.best[0].number), None),
        nearest=_nearest(tried),
        confirmation=confirmation,
        reset=reset,
        walk=walk,
        importance=found.importance,
        seeds=question.seeds,
        num_rounds=found.num_rounds,
        stop=_stop_words(found),
        num_search=num_search,
        num_after=num_all - num_search,
        num_combinations=question.num_combinations,
        serve_command=command,
        why_no_command=why,
        scenario_toml="" if winner is None else scenario_text(winner.loaded),
        command=_command(question),
        overrides=question.common,
        notes=question.notes,
        is_fixed=is_fixed(question.base.scenario),
    )


def _stop_words(found: Found) -> str:
    """Why the search ended, and how many deployments were only held at the rate that they need."""
    number = sum(each.is_bound for each in found.deployments)
    if not number:
        return found.stop
    was = (
        "stays below what it needs to be the best, and was"
        if number == 1
        else ("stay below what they need to be the best, and were")
    )
    return f"{found.stop}; {number:,} of them {was} searched no further"


def _with_bounds(rows: Iterable[Mapping[str, Any]], found: Optimized) -> list[dict[str, Any]]:
    """Rows of trials, with what the target of a trial is below where that is all that is known of it."""
    bounds = {each.point.number: _upper_bound(found, each) for each in found.tried}
    return [
        {**row, "upper_bound": bounds[row["trial"]], "is_upper_bound": bounds[row["trial"]] is not None} for row in rows
    ]


def _upper_bound(found: Optimized, each: Tried) -> float | None:
    known = [run[f"{found.target.key}_below"] for run in each.point.runs if run.get("below_rate") is not None]
    return float(known[0]) if known else None


def _tuned(knob: Knob) -> TunedKnob:
    return TunedKnob(
        knob.key,
        knob.text,
        knob.num_values,
        "" if knob.own is None else plain(knob.own),
        "" if knob.default is None else plain(knob.default),
        knob.is_numeric,
        knob.is_log,
        tuple(value if isinstance(value, str) else plain(value) for value in knob.values),
    )


def _nearest(tried: tuple[Tried, ...]) -> Tried | None:
    """Of those that start, the one that misses the objectives by least."""
    started = [each for each in tried if not each.point.infeasible and each.in_space]
    return min(started, key=lambda each: (each.excess, each.point.is_unsafe, each.point.number), default=None)


def _command(question: Question) -> str:
    options = {
        "for": question.asked_for if question.asked_for != "goodput_per_dollar" else None,
        "at": question.at if question.at != LOAD else None,
        "trials": question.num_trials if question.num_trials != DEFAULT_TRIALS else None,
        "reps": question.reps,
        "seed": question.first_seed or None,
    }
    text = command_of(question.scenario, question.tuned, options, question.given)
    return text.replace("windtunnel sweep", "windtunnel optimize", 1).replace(" --vary ", " --tune ")


class Optimum:
    """What a search found: the answer, and reports made from it."""

    def __init__(self, optimized: Optimized) -> None:
        self.optimized = optimized
        """All of it, as reports read it."""

    @property
    def settings(self) -> dict[str, Any] | None:
        """The knobs' values of the answer; None if no deployment keeps the objectives."""
        winner = self.optimized.winner
        return None if winner is None else dict(winner.settings)

    @property
    def serve_command(self) -> str:
        """The ``vllm serve`` line of the answer; empty where there is none."""
        return self.optimized.serve_command

    @property
    def is_infeasible(self) -> bool:
        """Whether nothing that was tried starts."""
        return self.optimized.is_infeasible

    @property
    def slo_passed(self) -> bool | None:
        """Whether the answer keeps all objectives on fresh seeds; None if none were set."""
        return self.optimized.holds

    @property
    def warnings(self) -> tuple[str, ...]:
        """What must be known before the numbers are believed."""
        return self.optimized.context.warnings

    @property
    def trials(self) -> pd.DataFrame:
        """One row a deployment that was tried: its settings, what it came to, and why it got no more runs.

        One that could not be the best at capacity has no number, but an ``upper_bound`` of the target.
        """
        import pandas as pd

        from windtunnel.reports.optimize_table import trial_rows

        return pd.DataFrame(_with_bounds(trial_rows(self.optimized), self.optimized))

    @property
    def runs(self) -> pd.DataFrame:
        """One row a run of the search, with all of its numbers."""
        import pandas as pd

        from windtunnel.reports.optimize_table import run_rows

        return pd.DataFrame(list(run_rows(self.optimized)))

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, in a fixed order: what ``windtunnel optimize --json`` prints."""
        from windtunnel.reports.optimize_table import to_dict

        told = to_dict(self.optimized)
        return {"schema_version": SCHEMA_VERSION, **told, "trials": _with_bounds(told["trials"], self.optimized)}

    def text(self) -> str:
        """The answer, the walk to it, and a table of the best trials."""
        from windtunnel.reports.optimize_text import render_text

        return render_text(self.optimized)

    def markdown(self) -> str:
        """The same as Markdown, for issues and pull requests."""
        from windtunnel.reports.optimize_text import render_markdown

        return render_markdown(self.optimized)

    def report(self, path: str | Path) -> None:
        """Write one HTML file with the figures; it needs nothing else and works offline.  Raises OutputError."""
        from windtunnel.reports.optimize_html import write_html

        with writing(Path(path)):
            write_html(path, self.optimized)

    def to_csv(self, path: str | Path) -> None:
        """Write one row a run with all of its numbers.  Raises OutputError if it cannot be written."""
        self._write(path)

    def to_parquet(self, path: str | Path) -> None:
        """The same as Parquet; the name must end in .parquet or .pq.  Raises ValueError for another one."""
        if Path(path).suffix.lower() not in (".parquet", ".pq"):
            raise ValueError(f"{path} must end in .parquet or .pq")
        self._write(path)

    def _write(self, path: str | Path) -> None:
        from windtunnel.reports.optimize_table import run_rows
        from windtunnel.reports.sweep_table import write_table

        with writing(Path(path)):
            write_table(path, list(run_rows(self.optimized)))

    def save_scenario(self, path: str | Path) -> None:
        """Write the answer as a scenario file that ``windtunnel simulate`` runs.

        Raises ValueError without an answer, OutputError if it cannot be written.
        """
        from windtunnel.reports.files import atomic_writer

        if not self.optimized.scenario_toml:
            raise ValueError("no deployment keeps the objectives, so that there is no scenario to write")
        with writing(Path(path)), atomic_writer(path) as file:
            file.write(self.optimized.scenario_toml)

    def save(self, folder: str | Path) -> None:
        """Write everything into a folder: optimize.json, trials and runs as tables, reports, the answer as a scenario.

        The same runs give the same bytes, however often the search was stopped and resumed.  Raises OutputError.
        """
        from windtunnel.reports.files import atomic_writer
        from windtunnel.reports.optimize_table import trial_rows
        from windtunnel.reports.sweep_table import write_table

        place = Path(folder)
        self.to_csv(place / "runs.csv")
        self.to_parquet(place / "runs.parquet")
        with writing(place / "trials.csv"):
            write_table(place / "trials.csv", _with_bounds(trial_rows(self.optimized), self.optimized))
        self.report(place / "report.html")
        if self.optimized.scenario_toml:
            self.save_scenario(place / "scenario.toml")
        for name, text in (("report.md", self.markdown()), ("optimize.json", f"{to_json(self.to_dict())}\n")):
            with writing(place / name), atomic_writer(place / name) as file:
                file.write(text)

    def __repr__(self) -> str:
        told = "nothing keeps the objectives" if self.optimized.winner is None else self.optimized.winner.name
        return f"<Optimum of {self.optimized.context.title}: {told}; {len(self.optimized.tried):,} deployments tried>"
