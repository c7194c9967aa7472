"""``windtunnel profiles``: which cost profiles there are, what one states of itself, and where two differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from windtunnel.cli.errors import EXIT_UNREADABLE
from windtunnel.cli.output import emit, note, warn
from windtunnel.cli.panels import PanelCommand
from windtunnel.sim.engine.plan import StepShape

if TYPE_CHECKING:
    from windtunnel.sim.cost.lookup import NamedProfile
    from windtunnel.sim.engine.protocols import CostModel

app = typer.Typer(
    name="profiles",
    help="""Cost profiles: list the bundled ones or those of a folder, show what one states, compare two.

    \b
    Examples:
      windtunnel profiles list --model llama-3.1-8b
      windtunnel profiles show measured.json
      windtunnel profiles diff measured.json llama-3.1-8b-h100-sxm-tp1-bf16
      windtunnel simulate chat-8b-h100 --profile measured.json
    """,
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Which = "NAME|FILE"
CONTEXT_TOKENS = 1024


def _decode(num_seqs: int, context: int) -> StepShape:
    return StepShape(num_seqs, num_seqs * context, 0, 0, 0, 0, num_seqs)


def _prefill(tokens: int) -> StepShape:
    return StepShape(0, 0, 1, tokens, 0, tokens * (tokens + 1) // 2, 1)


def _mixed(num_seqs: int, context: int, tokens: int) -> StepShape:
    decodes, chunk = _decode(num_seqs, context), _prefill(tokens)
    return StepShape(*(mine + other for mine, other in zip(decodes, chunk, strict=True)))


class _Step(NamedTuple):
    """A step that people can picture."""

    what: str
    shape: StepShape


EXAMPLES = (
    *(_Step(f"decode of {n:,} at {CONTEXT_TOKENS:,} tokens", _decode(n, CONTEXT_TOKENS)) for n in (1, 8, 64)),
    *(_Step(f"prefill of {n:,} tokens", _prefill(n)) for n in (512, 2048, 8192)),
)
GRID = (
    *(
        _Step(f"decode of {n:,} at {context:,} tokens", _decode(n, context))
        for n in (1, 8, 64, 256)
        for context in (256, 1024, 8192)
    ),
    *(_Step(f"prefill of {n:,} tokens", _prefill(n)) for n in (128, 512, 2048, 8192)),
    *(
        _Step(f"prefill of {tokens:,} + {n:,} decodes at {CONTEXT_TOKENS:,}", _mixed(n, CONTEXT_TOKENS, tokens))
        for n in (8, 64)
        for tokens in (512, 2048)
    ),
)
_SHOWN_DIFFERENCES = 3


# -- list


@app.command("list", cls=PanelCommand, short_help="List the bundled profiles, or those of a folder.")
def list_profiles(
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="FOLDER", help="The profiles in this folder.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Only of this model.", show_default=False)
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="NAME", help="Only of this GPU.", show_default=False)
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel-size", "--tp", metavar="N", min=1, help="Only of so many GPUs.", show_default=False
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """List the bundled profiles, or those of a folder, with the error that each states of a step's time.

    \b
    Examples:
      windtunnel profiles list
      windtunnel profiles list --model qwen3-32b --gpu h100
      windtunnel profiles list --dir profiles --json
    """
    rows = list(_bundled_rows() if directory is None else _rows_of(directory))
    wanted = [row for row in rows if _is_wanted(row, model, gpu, tp)]
    if as_json:
        emit(json.dumps(wanted, indent=2, ensure_ascii=False))
        return
    if not wanted:
        note(f"none of {len(rows):,} profiles is like that" if rows else f"no profile in {directory}")
        return
    from windtunnel.cli.dry_run import table

    emit("\n".join(table([_HEAD, *(_cells(row) for row in wanted)])))


_HEAD = (
    *("name", "model", "gpu", "tp", "dtype", "kv cache", "evidence"),
    *("decodes", "context", "tokens", "median error", "P90"),
)
"""Decodes, the context that they read together, and new tokens are those of the largest steps that it holds for."""


def _cells(row: Mapping[str, Any]) -> list[str]:
    keys = ("name", "model", "gpu", "tensor_parallel_size", "dtype", "kv_cache_dtype")
    plain = ["-" if row[key] is None else str(row[key]) for key in keys]
    plain.append(row["evidence"] if row["kind"] == "fitted" else f"{row['kind']}, {row['evidence']}")
    sizes = [f"{row['largest_steps'][key]:,}" if row["largest_steps"] else "-" for key in _SIZES]
    errors = [row[key] for key in ("p50_percent", "p90_percent")]
    unknown = "-" if row["statement"] is None else "not known"
    return [*plain, *sizes, *(unknown if value is None else f"{value:.1f} %" for value in errors)]


_SIZES = ("num_decode_seqs", "decode_context_tokens", "num_tokens")


def _bundled_rows() -> Iterator[dict[str, Any]]:
    from windtunnel.sim.cost.bundled import bundled_profiles

    for each in bundled_profiles():
        yield {
            "name": each.name,
            "kind": "fitted",
            "model": each.model,
            "gpu": each.gpu or each.device,
            "tensor_parallel_size": each.tensor_parallel_size,
            "dtype": each.dtype,
            "kv_cache_dtype": each.kv_cache_dtype,
            "evidence": each.evidence,
            "source": each.source,
            "statement": each.statement,
            "p50_percent": each.stated_error.get("p50_percent"),
            "p90_percent": each.stated_error.get("p90_percent"),
            "rests_on": each.stated_error.get("rests_on"),
            "largest_steps": dict(each.largest_steps),
            "checksum": each.checksum,
        }


def _rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """The profiles of a folder; files that are none are named on stderr."""
    from windtunnel.sim.cost.lookup import NamedProfile
    from windtunnel.sim.cost.profile import ProfileError, load_profile

    if not folder.is_dir():
        raise typer.BadParameter(
            f"{folder} is no folder: name one, or a single file with windtunnel profiles show", param_hint="--dir"
        )
    for path in sorted(folder.glob("*.json")):
        try:
            yield _row(NamedProfile(path.name, path, load_profile(path)))
        except (ProfileError, OSError, UnicodeDecodeError) as error:
            warn(f"left out: {error}")


def _row(profile: NamedProfile) -> dict[str, Any]:
    from windtunnel.sim.cost.evidence import evidence_of
    from windtunnel.sim.cost.statement import statement_of

    described = profile.cost.describe()
    provenance = described.get("provenance") or described
    stated = statement_of(described)
    return {
        "name": profile.name,
        "kind": profile.cost.name,
        **{key: provenance.get(key) for key in ("model", "gpu")},
        "tensor_parallel_size": provenance.get("tensor_parallel_size", provenance.get("tp")),
        **{key: provenance.get(key) for key in ("dtype", "kv_cache_dtype")},
        "evidence": evidence_of(described),
        "source": provenance.get("source") if profile.cost.calibrated else profile.cost.name,
        "statement": None if stated is None else stated.origin,
        "p50_percent": None if stated is None else stated.p50_percent,
        "p90_percent": None if stated is None else stated.p90_percent,
        "rests_on": None if stated is None else stated.rests_on or None,
        "largest_steps": _largest_steps(profile.cost),
        "checksum": _checksum(profile),
    }


def _largest_steps(cost: CostModel) -> dict[str, int]:
    from windtunnel.sim.cost.bundled import largest_steps
    from windtunnel.sim.cost.fitted import FittedCost

    return largest_steps(cost.evidence.domain) if isinstance(cost, FittedCost) else {}


def _checksum(profile: NamedProfile) -> str | None:
    """As the file states it; loading has checked it."""
    stated = json.loads(profile.path.read_text(encoding="utf-8")).get("checksum")
    return None if stated is None else str(stated)


def _is_wanted(row: Mapping[str, Any], model: str | None, gpu: str | None, tp: int | None) -> bool:
    from windtunnel.sim.deployment.gpu import load_gpu
    from windtunnel.sim.deployment.model import load_model

    return (
        (model is None or _same(load_model, model, row["model"]))
        and (gpu is None or _same(load_gpu, gpu, row["gpu"]))
        and (tp is None or str(row["tensor_parallel_size"]) == str(tp))
    )


def _same(load: Any, asked: str, there: str | None) -> bool:
    """Whether two names are those of one thing; unknown ones are compared as they are."""
    return there is not None and _known_name(load, asked) == _known_name(load, there)


def _known_name(load: Any, name: str) -> str:
    try:
        return str(load(name).name)
    except (OSError, ValueError):
        return name.casefold()


# -- show


@app.command("show", cls=PanelCommand, short_help="Show what a profile states of itself.")
def show(
    which: Annotated[
        str, typer.Argument(metavar=_Which, help="A bundled profile's name, or a file.", show_default=False)
    ],
    as_json: _Json = False,
) -> None:
    """Show where a profile comes from, its stated error, the box that it holds in, and a few step times.

    \b
    Examples:
      windtunnel profiles show llama-3.1-8b-h100-sxm-tp1-bf16
      windtunnel profiles show profile.json --json
    """
    profile = _load(which)
    told = profile.cost.describe()
    if as_json:
        from windtunnel.rundir import to_json

        emit(to_json(_as_plain(profile, told)))
        return
    parts = [_origin(profile, told), _errors(told), _noise(told), _domain(told), _examples(profile.cost)]
    emit("\n\n".join(part for part in parts if part))


def _load(which: str) -> NamedProfile:
    from windtunnel.sim.cost.lookup import load_named
    from windtunnel.sim.cost.profile import ProfileError

    try:
        return load_named(which)
    except ProfileError:
        raise
    except OSError as error:
        _stop(f"cannot read profile {which}: {error.strerror or error}")
    except UnicodeDecodeError as error:
        _stop(f"cannot read profile {which}: not UTF-8 text ({error.reason})")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=_Which) from None


def _stop(message: str) -> NoReturn:
    note(f"error: {message}")
    raise typer.Exit(EXIT_UNREADABLE)


def _as_plain(profile: NamedProfile, told: Mapping[str, Any]) -> dict[str, Any]:
    from windtunnel.sim.cost.statement import summary_keys

    examples = []
    for step in EXAMPLES:
        low_s, time_s, high_s = _priced(profile.cost, step.shape)
        examples.append(
            {
                "step": step.what,
                "shape": step.shape._asdict(),
                "step_s": time_s,
                "low_s": low_s,
                "high_s": high_s,
                "is_outside": _is_outside(profile.cost, step.shape),
            }
        )
    named = {"profile": profile.name, "path": str(profile.path), "checksum": _checksum(profile)}
    return {**named, **summary_keys(told), **told, "examples": examples}


def _priced(cost: CostModel, shape: StepShape) -> tuple[float | None, float, float | None]:
    """Lower end of what nine of ten such steps take, the step's time, and the upper end; no ends without an error."""
    from windtunnel.sim.cost.fitted import FittedCost

    time_s = float(cost.step_time_s(shape))
    low_s, high_s = cost.interval_s(shape) if isinstance(cost, FittedCost) else (None, None)
    return low_s, time_s, high_s


def _is_outside(cost: CostModel, shape: StepShape) -> bool:
    from windtunnel.sim.cost.fitted import FittedCost

    return isinstance(cost, FittedCost) and bool(cost.extrapolates(shape))


def _origin(profile: NamedProfile, told: Mapping[str, Any]) -> str:
    from windtunnel.cli.dry_run import show as shown
    from windtunnel.sim.cost.evidence import evidence_of, in_words
    from windtunnel.sim.cost.statement import statement_of

    stated = statement_of(told)
    rows = [("kind", profile.cost.name), ("evidence", in_words(evidence_of(told)))]
    if stated is not None:
        rows += [("statement", stated.origin), ("stated error", stated.error)]
    else:
        rows.append(("error", str(told.get("error"))))
    hidden = ("statement", "stated_error", "name", "calibrated", "error", "factors", "factor_sources")
    facts = told.get("provenance", told)
    for key, value in facts.items():
        if key not in hidden and value is not None:
            rows += _facts(key, value) if key in _UNFOLDED and isinstance(value, Mapping) else [(key, shown(value))]
    rows += [("memory corrections", shown(told["memory"]))] if told.get("memory") else []
    checksum = _checksum(profile)
    rows += [("checksum", checksum)] if checksum is not None else []
    width = max(len(name) for name, _ in rows)
    return "\n".join([profile.name, *(line for name, value in rows for line in _wrapped(name, value, width))])


_UNFOLDED = ("tables", "transferred_from")
"""Facts that hold facts of their own, a line for each."""


def _facts(key: str, value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from windtunnel.cli.dry_run import show as shown

    yield key, ""
    for name, item in value.items():
        if isinstance(item, Mapping) and any(isinstance(each, Mapping) for each in item.values()):
            for inner, each in item.items():
                yield f"  {name} {inner}", shown(each)
        elif item is not None:
            yield f"  {name}", shown(item)


def _wrapped(name: str, value: str, width: int) -> Iterator[str]:
    from textwrap import wrap

    for number, line in enumerate(wrap(value, _VALUE_WIDTH) or [""]):
        yield f"  {name if not number else '':<{width}}  {line}".rstrip()


_VALUE_WIDTH = 96


def _errors(told: Mapping[str, Any]) -> str:
    lines = told.get("errors") or ()
    head = ("regime", "steps", "shapes", "median", "P90", "P99", "mean", "bias", "in 90 % interval")
    keys = ("p50_percent", "p90_percent", "p99_percent", "mape_percent", "bias_percent", "covered_percent")
    rows = [
        (line["regime"], f"{line['num_steps']:,}", f"{line['num_shapes']:,}", *(f"{line[key]:.1f} %" for key in keys))
        for line in lines
    ]
    return _titled("error on steps left out of the fit, by regime", head, rows)


def _noise(told: Mapping[str, Any]) -> str:
    rows = [
        (
            bin_["regime"],
            f"{bin_['up_to_tokens']:,}",
            f"{100 * bin_['sigma']:.1f} %",
            f"{100 * bin_['low']:+.1f} % to {100 * bin_['high']:+.1f} %",
            f"{bin_['num_steps']:,}",
        )
        for bin_ in told.get("noise") or ()
    ]
    return _titled("scatter", ("regime", "up to tokens", "sigma", "nine of ten", "steps"), rows)


def _domain(told: Mapping[str, Any]) -> str:
    boxes: Mapping[str, Mapping[str, Sequence[int]]] = told.get("domain") or {}
    fields = list(dict.fromkeys(name for box in boxes.values() for name in box))
    rows = [(name, *(f"{box[name][0]:,} to {box[name][1]:,}" for box in boxes.values())) for name in fields]
    return _titled("holds for steps of", ("", *boxes), rows)


def _examples(cost: CostModel) -> str:
    rows = []
    for step in EXAMPLES:
        low_s, time_s, high_s = _priced(cost, step.shape)
        spread = "" if low_s is None or high_s is None else f"nine of ten {_ms(low_s)} to {_ms(high_s)}"
        rows.append((step.what, _ms(time_s), spread, _OUTSIDE if _is_outside(cost, step.shape) else ""))
    return _titled("step times", ("", "", "", ""), rows)


_OUTSIDE = "outside of what was measured"


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:.2f} ms"


def _titled(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An aligned table below a line; nothing where there are no rows."""
    from windtunnel.cli.dry_run import table

    if not rows:
        return ""
    lines = table([head, *rows] if any(head) else list(rows))
    return "\n".join([title, *(f"  {line}" for line in lines)])


# -- diff


@app.command("diff", cls=PanelCommand, short_help="Compare two profiles.")
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A bundled profile's name, or a file.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    with_parameters: Annotated[
        bool, typer.Option("--parameters", help="Show the parameters of the fits that differ, too.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Compare two profiles: the step times that they predict on a common grid, and what they are of.

    \b
    Examples:
      windtunnel profiles diff measured.json llama-3.1-8b-h100-sxm-tp1-bf16
      windtunnel profiles diff measured.json tuned.json --parameters
      windtunnel profiles diff monday.json tuesday.json --json
    """
    profiles = (_load(first), _load(second))
    told = tuple(profile.cost.describe() for profile in profiles)
    whole_origins = _differing([_flat(each.get("provenance") or {}) for each in told])
    parameters = _differing([_flat(_parameters(each)) for each in told])
    steps = list(_steps(profiles))
    if as_json:
        from windtunnel.rundir import to_json

        emit(
            to_json(
                {
                    "profiles": [profile.name for profile in profiles],
                    "provenance": {key: list(pair) for key, pair in whole_origins.items()},
                    "parameters": {key: list(pair) for key, pair in parameters.items()},
                    "steps": steps,
                    "median_difference_percent": _median([step["difference_percent"] for step in steps]),
                }
            )
        )
        return
    origins = {key: pair for key, pair in whole_origins.items() if with_parameters or "." not in key}
    emit(_diff_text(profiles, origins, parameters if with_parameters else {}, steps))


def _parameters(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those of a fitted model; of another kind all that it states in numbers."""
    if "parameters" in told:
        return dict(told["parameters"])
    return {key: value for key, value in told.items() if key not in ("name", "calibrated", "error", "factor_sources")}


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and set(item) == {"knots", "seconds"}:
            flat[f"{prefix}{key}"] = item
        elif isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _differing(tables: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, Any]]:
    first, second = tables
    keys = dict.fromkeys((*first, *second))
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}


def _steps(profiles: Iterable[NamedProfile]) -> Iterator[dict[str, Any]]:
    first, second = (profile.cost for profile in profiles)
    for step in GRID:
        times_s = [float(cost.step_time_s(step.shape)) for cost in (first, second)]
        yield {
            "step": step.what,
            "shape": step.shape._asdict(),
            "step_s": times_s,
            "difference_percent": 100 * (times_s[1] / times_s[0] - 1),
            "is_outside": [_is_outside(cost, step.shape) for cost in (first, second)],
        }


def _median(values: Sequence[float]) -> float:
    from statistics import median

    return median(values)


def _diff_text(
    profiles: Sequence[NamedProfile],
    origins: Mapping[str, tuple[Any, Any]],
    parameters: Mapping[str, tuple[Any, Any]],
    steps: Sequence[Mapping[str, Any]],
) -> str:
    names = [f"A: {profiles[0].name}", f"B: {profiles[1].name}"]
    rows = _right_aligned([(step["step"], *_compared(step)) for step in steps])
    parts = ["\n".join(names), _titled("step times", ("", "A", "B", "B against A"), rows)]
    if any(any(step["is_outside"]) for step in steps):
        parts.append(f"* {_OUTSIDE}")
    parts += [
        _conclusion(steps),
        _titled("origin", ("", "A", "B"), [(key, *map(_short, pair)) for key, pair in origins.items()]),
        _titled(
            "parameters that differ, times in seconds",
            ("", "A", "B"),
            [(key, *map(_short, pair)) for key, pair in parameters.items()],
        ),
    ]
    return "\n\n".join(part for part in parts if part)


def _compared(step: Mapping[str, Any]) -> list[str]:
    times = [
        f"{_ms(time_s)}{'*' if out else ' '}" for time_s, out in zip(step["step_s"], step["is_outside"], strict=True)
    ]
    return [*times, f"{step['difference_percent']:+.1f} %"]


def _right_aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """All cells but the first of each row, which end below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [[row[0], *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))] for row in rows]


def _conclusion(steps: Sequence[Mapping[str, Any]]) -> str:
    by_size = sorted(steps, key=lambda step: -abs(step["difference_percent"]))
    if not by_size[0]["difference_percent"]:
        return "They predict the same step times."
    most = [step for step in by_size[:_SHOWN_DIFFERENCES] if step["difference_percent"]]
    middle = _median([abs(step["difference_percent"]) for step in steps])
    lines = [f"They differ by {middle:.1f} % in the median of these steps, and most at:"]
    return "\n".join([*lines, *(f"  {step['step']}: {step['difference_percent']:+.1f} %" for step in most)])


def _short(value: Any) -> str:
    """A value in a cell: numbers with four digits, a curve by where it ends."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return f"{len(value['knots'])} knots up to {1e3 * value['seconds'][-1]:.4g} ms at {value['knots'][-1]:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple) and len(value) > 3:
        return f"{len(value)} of them, {value[0]} to {value[-1]}"
    text = str(value)
    return text if len(text) <= _WIDEST_CELL else f"{text[: _WIDEST_CELL - 3]}..."


_WIDEST_CELL = 42
