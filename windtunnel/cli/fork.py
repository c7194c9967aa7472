"""``windtunnel fork``: what the next seconds of a running engine will bring."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.cli.errors import EXIT_UNREADABLE, exit_code
from windtunnel.cli.output import emit, note

if TYPE_CHECKING:
    from windtunnel.sim.engine.protocols import CostModel

_TIMEOUT_S = 600.0
_WORDS = {"true": True, "false": False, "none": None}


def fork(
    snapshot: Annotated[
        Path | None,
        typer.Argument(metavar="SNAPSHOT", help="A saved snapshot (.json), instead of --endpoint.", show_default=False),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", metavar="URL", help="A running windtunnel serve.", show_default=False),
    ] = None,
    horizon: Annotated[
        str, typer.Option("--horizon", metavar="TIME", help="How far to look ahead: 60s, 5min.")
    ] = "60s",
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--change",
            metavar="KEY=VALUE",
            help="Another limit from now on: max_num_seqs=64, num_gpu_blocks=2048, policy=priority … (repeatable). "
            "The future without it is shown beside.",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            metavar="RATE|none",
            help="What still arrives: so many requests/s like the recent ones, or none.",
            show_default="the recent rate",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="known|recent|max_tokens",
            help="How long the answers will be that are being written.",
            show_default="known, else recent",
        ),
    ] = None,
    num_futures: Annotated[
        int, typer.Option("--num-futures", metavar="N", min=1, max=32, help="Futures to draw; their mean is shown.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of what is drawn.")] = 0,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile", metavar="NAME|FILE", help="For a saved snapshot: what a step costs.", show_default=False
        ),
    ] = None,
    cost: Annotated[
        str | None,
        typer.Option(
            "--cost", metavar="COST", help="The same as text: constant:step_s=20ms or affine:…", show_default=False
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save-snapshot",
            metavar="FILE",
            help="With --endpoint: write the engine's state now to a file, and do nothing else.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="With --endpoint: wait for the horizon's end and show what happened beside."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate the next seconds of a running engine from its queues, progress and blocks, and with other limits.

    \b
    Examples:
      windtunnel fork --endpoint http://127.0.0.1:8000 --horizon 60s
      windtunnel fork --endpoint http://127.0.0.1:8000 --change max_num_seqs=64 --json
      windtunnel fork --endpoint http://127.0.0.1:8000 --horizon 30s --check
      windtunnel fork --endpoint http://127.0.0.1:8000 --save-snapshot now.json
      windtunnel fork now.json --profile measured.json --change num_gpu_blocks=4096
    """
    if (snapshot is None) == (endpoint is None):
        raise typer.BadParameter("give either a SNAPSHOT or --endpoint URL")
    if endpoint is None and (check or save is not None):
        raise typer.BadParameter("--check and --save-snapshot need --endpoint")
    asked = {
        "horizon_s": _horizon_s(horizon),
        "changes": dict(map(_change, change or ())),
        "seed": seed,
        "num_futures": num_futures,
        **({} if lengths is None else {"lengths": lengths}),
        **_arrivals(rate),
    }
    if endpoint is None:
        assert snapshot is not None, "one of them is given"
        found = _of_file(snapshot, asked, *_cost(profile, cost))
    elif profile is not None or cost is not None:
        raise typer.BadParameter("--profile and --cost are for saved snapshots: a server knows what its steps cost")
    elif save is not None:
        _save(endpoint, save)
        return
    else:
        found = _ask(endpoint, "/windtunnel/fork", asked)
        if check:
            found["observed"] = _observed(endpoint, found)
    emit(json.dumps(found, indent=2) if as_json else _text(found))


def _horizon_s(text: str) -> float:
    from windtunnel.scenarios.units import parse_duration_s

    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}", param_hint="--horizon") from error


def _change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise typer.BadParameter(f"{text!r} must be KEY=VALUE, as in max_num_seqs=64", param_hint="--change")
    return name.strip().replace("-", "_"), _value(value.strip())


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _arrivals(rate: str | None) -> dict[str, Any]:
    from windtunnel.scenarios.units import parse_rate

    if rate is None:
        return {}
    if rate.lower() == "none":
        return {"arrivals": "none"}
    try:
        per_s = parse_rate(rate)
    except ValueError as error:
        raise typer.BadParameter(f"{rate!r} {error}", param_hint="--rate") from error
    if math.isinf(per_s):
        raise typer.BadParameter(f"{rate!r} must be a finite number of requests per second", param_hint="--rate")
    return {"arrivals": "recent", "requests_per_s": per_s}


# -- a saved snapshot


def _cost(profile: str | None, cost: str | None) -> tuple[CostModel, str]:
    """What a step costs, and the name of that."""
    from windtunnel.sim.cost.lookup import load_named

    if (profile is None) == (cost is None):
        raise typer.BadParameter("a saved snapshot needs either --profile or --cost: what does a step cost?")
    if profile is not None:
        try:
            found = load_named(profile)
            return found.cost, found.name
        except (OSError, ValueError) as error:
            raise _unreadable(error, profile) from error
    assert cost is not None, "one of them is given"
    try:
        return _written_cost(cost), cost
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--cost") from error


def _written_cost(text: str) -> CostModel:
    from windtunnel.scenarios.units import parse_duration_s, parse_spec
    from windtunnel.sim.cost.constant import AffineCost, ConstantCost

    spec = parse_spec(text, "kind")
    kind = spec.pop("kind")
    values = {name: parse_duration_s(str(value)) for name, value in spec.items()}
    if kind == "constant":
        return ConstantCost(**values)
    if kind == "affine":
        return AffineCost(**values)
    raise ValueError(f"{kind!r} is not one of constant, affine; a --profile says more")


def _of_file(path: Path, asked: Mapping[str, Any], cost: CostModel, cost_name: str) -> dict[str, Any]:
    from windtunnel.sim.engine.snapshot_json import from_json
    from windtunnel.sim.fork import Rate
    from windtunnel.sim.fork import fork as simulate

    try:
        taken = from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise _unreadable(error, str(path)) from error
    arrivals: Rate | None = None
    if asked.get("arrivals") == "recent" or ("arrivals" not in asked and len(taken.recent) > 1):
        arrivals = Rate(asked.get("requests_per_s"))
    options = {name: asked.get(name) for name in ("lengths", "seed", "num_futures")}
    try:
        forecast = simulate(taken, cost, asked["horizon_s"], arrivals, changes=asked["changes"], **options)  # type: ignore[arg-type]
        found = {**forecast.as_plain(), "cost": cost_name}
        if asked["changes"]:
            found["as_is"] = simulate(taken, cost, asked["horizon_s"], arrivals, **options).as_plain()["metrics"]  # type: ignore[arg-type]
    except ValueError as error:
        if exit_code(error) != 1:
            raise
        raise typer.BadParameter(str(error)) from error
    return found


def _unreadable(error: Exception, name: str) -> typer.Exit:
    text = f"{name}: {error.strerror or error}" if isinstance(error, OSError) else f"{name}: {error}"
    note(f"error: {text}")
    return typer.Exit(EXIT_UNREADABLE)


# -- a server


def _ask(endpoint: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The answer of the server.  Raises typer.BadParameter for what it refuses, typer.Exit if it is not there."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    if not endpoint.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{endpoint!r} must begin with http:// or https://", param_hint="--endpoint")
    data = None if body is None else json.dumps(body).encode()
    request = Request(endpoint.rstrip("/") + path, data, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found
    except HTTPError as error:
        raise typer.BadParameter(_refusal(error.read(), error.code)) from error
    except (OSError, ValueError) as error:
        raise _unreadable(ValueError(getattr(error, "reason", None) or error), endpoint) from error


def _refusal(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}; is it a windtunnel serve?"


def _save(endpoint: str, path: Path) -> None:
    found = _ask(endpoint, "/windtunnel/snapshot")
    try:
        path.write_text(json.dumps(found), encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}", param_hint="--save-snapshot") from error
    note(f"{found['num_running']} running and {found['num_waiting']} waiting requests are in {path}")


def _observed(endpoint: str, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What happened, once it has."""
    deadline_s = time.monotonic() + 10.0 * found["horizon_s"] + _TIMEOUT_S
    while True:
        try:
            window = _ask(endpoint, f"/windtunnel/window?begin_s={found['begin_s']!r}&end_s={found['end_s']!r}")
        except typer.BadParameter as error:
            if "must lie between" not in str(error) or time.monotonic() > deadline_s:
                raise
            time.sleep(min(0.5, found["horizon_s"] / 4))
        else:
            rows: list[dict[str, Any]] = window["metrics"]
            return rows


# -- as text


def _text(found: Mapping[str, Any]) -> str:
    from windtunnel.sim.cost.evidence import in_words

    heads = ["metric", "unit"]
    by_name = [{row["name"]: row["value"] for row in found.get(key, ())} for key in ("as_is", "observed")]
    as_is, observed = by_name
    if as_is:
        heads.append("as is")
    heads.append("changed" if found["changes"] else "forecast")
    if found["num_futures"] > 1:
        heads.append("5 % to 95 %")
    if observed:
        heads += ["observed", "error"]
    rows = [_row(row, found, as_is, observed) for row in found["metrics"]]
    lines = [
        f"next {found['horizon_s']:g} s of {found['num_live']} requests by {found['cost']}"
        f" ({in_words(found['evidence'])})",
        f"arrivals: {found['arrivals']}",
        f"lengths:  {found['lengths']}",
        *([f"changes:  {', '.join(f'{k}={v}' for k, v in found['changes'].items())}"] if found["changes"] else []),
        *(f"note: {text}" for text in found["notes"]),
        "",
    ]
    return "\n".join([*lines, *_table([heads, *rows])])


def _row(
    row: Mapping[str, Any], found: Mapping[str, Any], as_is: Mapping[str, Any], observed: Mapping[str, Any]
) -> list[str]:
    name, value = row["name"], row["value"]
    cells = [name, row["unit"], *([_number(as_is[name])] if as_is else []), _number(value)]
    if found["num_futures"] > 1:
        cells.append("-" if value is None else f"{_number(row['low'])} to {_number(row['high'])}")
    if observed:
        seen = observed[name]
        cells += [_number(seen), "-" if value is None or not seen else f"{100.0 * (value / seen - 1.0):+.1f} %"]
    return cells


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
