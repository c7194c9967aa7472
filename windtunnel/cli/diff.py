"""``windtunnel diff``: where two engines first decide differently."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from windtunnel.cli.output import emit, note, warn
from windtunnel.cli.simulate import overrides, simulate

if TYPE_CHECKING:
    from windtunnel.calibrate.diff import Decision, Side
    from windtunnel.calibrate.diff_sources import Recording
    from windtunnel.scenarios.load import Override
    from windtunnel.scenarios.resolve import Resolved
    from windtunnel.sim.engine.config import SchedulerConfig
    from windtunnel.sim.engine.protocols import Executor, SchedulerProtocol
    from windtunnel.sim.system import System
    from windtunnel.sim.workload import Workload

EXIT_DIFFERS = 5
"""Exit code where a step is decided differently."""
VLLM = "vllm"
_WHAT, _OUTPUT = "What is compared", "Output"
_PANELS = ("Deployment", "Engine (vLLM's flags)", "Workload")
_OWN = ("scenario", "against", "by", "max_steps", "all_steps", "as_json", "quiet")
_RUN_FLAGS = ("cost", "profile", "noise", "seed", "horizon")


def _option(panel: str, *names: str, metavar: str | None = None, help: str) -> Any:  # noqa: A002 -- typer's word
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, show_default=False)


def _with_flags_of_simulate(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of ``simulate`` that say what runs; it reads them from its context."""
    hints, own_hints = (get_type_hints(each, include_extras=True) for each in (simulate, function))
    own = [
        parameter.replace(annotation=own_hints[name])
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    taken = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(simulate).parameters.items()
        if name in _RUN_FLAGS or _panel(hints[name]) in _PANELS
    ]
    function.__signature__ = inspect.Signature([*own, *taken])  # type: ignore[attr-defined]
    function.__annotations__ = {each.name: each.annotation for each in (*own, *taken)}
    return function


def _panel(hint: Any) -> str | None:
    details = getattr(hint, "__metadata__", ())
    return getattr(details[0], "rich_help_panel", None) if details else None


@_with_flags_of_simulate
def diff(
    ctx: typer.Context,
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="SCENARIO",
            help="A scenario file, or the name of a bundled one (windtunnel scenarios). A recording that names its "
            "requests needs none.",
            show_default=False,
        ),
    ] = None,
    *,
    against: Annotated[
        str,
        _option(
            _WHAT,
            "--against",
            metavar="vllm|RECORDING|RUN_DIR|KEY=VALUE",
            help="The other side: the installed vLLM's own scheduler, a recording of a real engine, a saved run, or "
            "ours with these settings changed (several: separated by ';').",
        ),
    ],
    by: Annotated[
        str, _option(_WHAT, "--by", metavar="ours|vllm", help="Whose scheduler is the first side; ours by default.")
    ] = "ours",
    max_steps: Annotated[
        int | None,
        typer.Option(
            "--max-steps",
            metavar="N",
            min=1,
            help="Compare no more steps than that.",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    all_steps: Annotated[
        bool, _option(_WHAT, "--all", help="Go on after the first difference and list every step that differs.")
    ] = False,
    as_json: Annotated[bool, _option(_OUTPUT, "--json", help="Print JSON in place of the text.")] = False,
    quiet: Annotated[bool, _option(_OUTPUT, "--quiet", "-q", help="No remarks on stderr.")] = False,
    **flags: Any,  # noqa: ARG001 -- they are read from the context
) -> None:
    """Run the same requests past two schedulers and show the first step that they decide differently.

    Shown are both plans (who computes how many tokens, who is let in, who is preempted), the queue before the step, the
    time, and the likely reason.  The flags are those of windtunnel simulate.  A recording (the folder of a live run, or
    a file of the recorder) is compared at its own step times; one that names its requests also brings its requests and
    limits, which a scenario and flags change.

    Exit code 0: every step is the same; 5: one differs.

    \b
    Examples:
      windtunnel diff chat-8b-h100 --against vllm
      windtunnel diff chat-8b-h100 --against 'max_num_seqs=64'
      windtunnel diff --against steps.jsonl
      windtunnel diff --against steps.jsonl --num-gpu-blocks-override 1000 --all
      windtunnel diff chat-8b-h100 --against runs/yesterday
    """
    from windtunnel.calibrate.diff import compare
    from windtunnel.calibrate.diff_text import as_plain, as_text
    from windtunnel.rundir import to_json

    given = {name: value for name, value in ctx.params.items() if name not in _OWN}
    if by not in ("ours", VLLM):
        raise typer.BadParameter(f"{by!r} is neither ours nor {VLLM}", param_hint="--by")
    task = _task(scenario, overrides(given), against, by, quiet=quiet)
    limit = task.max_steps if max_steps is None else min(max_steps, task.max_steps or max_steps)
    compared = compare(task.left_decisions, task.right_decisions, max_steps=limit, all_steps=all_steps)
    sides = (task.left, task.right, task.labels)
    emit(to_json(as_plain(compared, *sides)) if as_json else as_text(compared, *sides))
    if compared.first is not None:
        raise typer.Exit(EXIT_DIFFERS)


@dataclass(frozen=True, slots=True)
class _Task:
    """Two streams of decisions about the same requests."""

    left: Side
    right: Side
    left_decisions: Iterator[Decision]
    right_decisions: Iterator[Decision]
    labels: tuple[str, ...] | None
    max_steps: int | None = None
    """Steps that there are to compare; None is all that are taken."""


def _task(scenario: str | None, given: Mapping[str, Override], against: str, by: str, *, quiet: bool) -> _Task:
    kind = _kind(against)
    if kind == "recording":
        return _against_recording(scenario, given, Path(against), by, quiet=quiet)
    resolved = _resolved(scenario, given, quiet=quiet)
    left = _decided(resolved.system, resolved.workload, by, horizon_ns=resolved.horizon_ns)
    left_side = _side(by, resolved.config)
    labels = resolved.workload.labels
    if kind == VLLM:
        right = _decided(resolved.system, resolved.workload, VLLM, horizon_ns=resolved.horizon_ns)
        return _Task(left_side, _side(VLLM, resolved.config), left, right, labels)
    if kind == "run":
        right_side, right = _saved_run(Path(against))
        return _Task(left_side, right_side, left, right, labels)
    other = _resolved(scenario, {**given, **_settings(against)}, quiet=True)
    right = _decided(other.system, other.workload, "ours", horizon_ns=other.horizon_ns)
    return _Task(left_side, _side("ours", other.config, against), left, right, labels)


def _kind(against: str) -> Literal["vllm", "run", "recording", "settings"]:
    """What the other side is.  Raises BadParameter for something that is nothing of it."""
    from windtunnel.rundir import RESOLVED_FILE

    path = Path(against)
    if against == VLLM:
        return "vllm"
    if path.is_dir() and (path / RESOLVED_FILE).is_file():
        return "run"
    if path.exists():
        return "recording"
    if "=" in against:
        return "settings"
    raise typer.BadParameter(
        f"{against!r} is neither {VLLM}, nor a file or folder that exists, nor KEY=VALUE", param_hint="--against"
    )


def _side(by: str, config: SchedulerConfig | None, changes: str = "") -> Side:
    from windtunnel.calibrate.diff import Side

    if by == VLLM:
        from windtunnel.executor.vllm_plugin.stepper import check_vllm

        return Side(f"vLLM {check_vllm()}'s scheduler", config)
    return Side("the changed one" if changes else "our scheduler", config, changes)


def _resolved(scenario: str | Mapping[str, Any] | None, given: Mapping[str, Override], *, quiet: bool) -> Resolved:
    from windtunnel.scenarios.load import load_scenario
    from windtunnel.scenarios.resolve import resolve

    resolved = resolve(load_scenario(scenario, dict(given)))
    resolved.check_is_one_server("windtunnel diff")
    if not quiet:
        for warning in resolved.warnings:
            warn(warning)
        for remark in resolved.notes:
            note(remark)
    return resolved


def _decided(
    system: System, workload: Workload, by: str, *, executor: Executor | None = None, horizon_ns: int | None = None
) -> Iterator[Decision]:
    from windtunnel.calibrate.diff_sources import simulated

    scheduler = _vllm_scheduler(system) if by == VLLM else None
    try:
        return simulated(workload, system, scheduler=scheduler, executor=executor, horizon_ns=horizon_ns)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _vllm_scheduler(system: System) -> SchedulerProtocol:
    from windtunnel.executor.vllm_plugin.stepper import VllmMissing, VllmStepper

    if system.batching is not None:
        raise typer.BadParameter("vLLM's scheduler batches continuously: leave the other policy out", param_hint=VLLM)
    try:
        return VllmStepper(system.config)
    except (VllmMissing, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=VLLM) from None


def _settings(text: str) -> dict[str, Override]:
    """``KEY=VALUE; KEY=VALUE``, by the names of a scenario file or of flags."""
    from windtunnel.comparison_plan import setting_key
    from windtunnel.scenarios.load import Override

    settings = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise typer.BadParameter(f"{part!r} must read KEY=VALUE", param_hint="--against")
        setting = _value(value.strip())
        key = setting_key(name.strip().lstrip("-").replace("-", "_"), setting)
        _check_key(key)
        settings[key] = Override(setting, f"--against {name.strip()}")
    return settings


def _check_key(key: str) -> None:
    """Raises BadParameter, with the nearest names, for what is no setting of a scenario."""
    from windtunnel.scenarios.errors import ScenarioError
    from windtunnel.scenarios.load import override_path

    try:
        override_path(key)
    except ScenarioError:
        near = _near_settings(key)
        meant = f"did you mean {' or '.join(near)}?" if near else "windtunnel schema --markdown lists all settings"
        raise typer.BadParameter(f"unknown setting {key!r}; {meant}", param_hint="--against") from None


def _near_settings(name: str) -> list[str]:
    """At most three settings that are spelt nearly so, or begin so."""
    from difflib import get_close_matches

    from windtunnel.scenarios.flags import KEY_OF_PARAMETER
    from windtunnel.scenarios.schema import SECTIONS

    fields = [key for models in SECTIONS.values() for model in models for key in model.model_fields]
    known = list(dict.fromkeys([*fields, *KEY_OF_PARAMETER]))
    alike = sorted((each for each in known if each.startswith(name)), key=len)
    return list(dict.fromkeys([*alike, *get_close_matches(name, known, n=3, cutoff=0.6)]))[:3]


def _value(text: str) -> Any:
    """A number, true or false, a list or a table as TOML writes them; text if it is none of these."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def _saved_run(folder: Path) -> tuple[Side, Iterator[Decision]]:
    from windtunnel.calibrate.diff import Side
    from windtunnel.calibrate.diff_sources import saved_decisions
    from windtunnel.rundir import read_run

    records = read_run(folder).records
    if len(records.replicas) != 1:
        raise typer.BadParameter(
            f"the run in {folder} has {len(records.replicas)} replicas: decisions are compared for one engine",
            param_hint="--against",
        )
    return Side("the saved run", source=str(folder)), saved_decisions(records.replicas[0])


# ------------------------------------------------------------------ recordings


def _against_recording(
    scenario: str | None, given: Mapping[str, Override], path: Path, by: str, *, quiet: bool
) -> _Task:
    from windtunnel.calibrate.diff import Side
    from windtunnel.calibrate.diff_sources import read_recording
    from windtunnel.rundir import RunUnreadable

    try:
        recording = read_recording(path)
    except (ValueError, FileNotFoundError) as error:
        raise RunUnreadable(str(error)) from None
    if not quiet:
        for remark in recording.notes:
            note(remark)
    start = scenario if scenario is not None else _scenario_of(recording)
    resolved = _resolved(start, given, quiet=quiet or scenario is None)
    workload = recording.workload
    if workload is None:
        workload = _from_first(resolved.workload)
    system = _plain(resolved.system)
    left = _decided(system, workload, by, executor=recording.executor(), horizon_ns=resolved.horizon_ns)
    right = Side("the recording", recording.config, str(path))
    max_steps = None if recording.is_whole else len(recording.decisions)
    return _Task(_side(by, system.config), right, left, iter(recording.decisions), workload.labels, max_steps)


_KEYS = {"policy": ("engine", "scheduling_policy"), "num_gpu_blocks": ("deployment", "num_gpu_blocks_override")}
_UNKEYED = ("num_speculative_tokens", "spec_method", "use_v2_model_runner")
_OF_RELEASES = ("free_blocks_to_front", "long_prefill_spares_lone_request")


def _scenario_of(recording: Recording) -> dict[str, Any]:
    """A scenario with the limits of a recorded engine, which flags may then change.

    Raises BadParameter if the recording does not tell who was asked what within which limits.
    """
    config = recording.config
    if config is None or recording.workload is None:
        lacks = "the engine's limits" if config is None else "its requests"
        raise typer.BadParameter(
            f"the recording does not tell {lacks}: name the scenario that was run", param_hint="SCENARIO"
        )
    tables: dict[str, dict[str, Any]] = {
        "deployment": {"pipeline_parallel_size": config.pipeline_parallel_size},
        "engine": {},
        "workload": {"num_requests": 1, "input": 1, "output": 1},
        "cost": {"kind": "constant", "step_s": "1ms"},
    }
    for name in config.__dataclass_fields__:
        if name in (*_UNKEYED, *_OF_RELEASES, "pipeline_parallel_size") or getattr(config, name) is None:
            continue
        section, key = _KEYS.get(name, ("engine", name))
        tables[section][key] = getattr(config, name)
    return {"schema_version": 1, "name": recording.name, **tables}


def _plain(system: System) -> System:
    """The engine alone: what stands before it has had its effect on a recording already."""
    return replace(system, max_num_queued_reqs=None, max_num_queued_tokens=None, noise_seed=None)


def _from_first(workload: Workload) -> Workload:
    """The same requests, the first of them at time 0: a recording counts from its first decision."""
    due = workload.previous < 0
    first_ns = int(workload.arrival_ns[due].min(initial=2**62))
    arrival_ns = workload.arrival_ns.copy()
    arrival_ns[due] -= first_ns
    return replace(workload, arrival_ns=arrival_ns)
