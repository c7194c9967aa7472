"""The commands that list what windtunnel knows: ``scenarios``, ``models``, ``gpus`` and ``schema``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from windtunnel.cli.output import emit

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_ONLY_JSON = ("other_names",)
"""Columns that would make a table too wide for a terminal."""
GIB = 2**30


def scenarios(as_json: _Json = False) -> None:
    """List the scenarios that come with windtunnel; each runs by its name.

    \b
    Examples:
      windtunnel scenarios
      windtunnel simulate chat-8b-h100
    """
    from windtunnel.scenarios.load import bundled_scenarios

    _list([{"name": name, "description": text} for name, text in bundled_scenarios().items()], as_json)


def models(as_json: _Json = False) -> None:
    """List the bundled models.  Another one works by the path of its config.json if its architecture is modelled:
    Llama, Mistral, Granite, Phi-3, Qwen 2, 2.5 and 3 and their mixtures of experts, Mixtral, OPT.  --json adds the
    other names that each answers to.

    \b
    Examples:
      windtunnel models
      windtunnel simulate chat-8b-h100 --model qwen2.5-7b
      windtunnel simulate chat-8b-h100 --model ./my-model/config.json
    """
    from windtunnel.sim.deployment.model import bundled_models, load_model, other_names

    _list([_model_row(load_model(name), other_names(name)) for name in bundled_models()], as_json)


def _model_row(model: Any, others: list[str]) -> dict[str, Any]:
    return {
        "name": model.name,
        "short_name": _shorter(model.name, others),
        "other_names": others,
        "parameters_billion": round(model.num_parameters / 1e9, 2),
        "weights_gib": round(model.weight_bytes() / GIB, 2),
        "kv_bytes_per_token": model.kv_bytes_per_token(),
        "max_model_len": model.max_model_len,
    }


def _shorter(name: str, others: Iterable[str]) -> str | None:
    """The shortest of the other names if it is shorter, else None; names work in any case."""
    return min((other for other in others if len(other) < len(name)), key=len, default=None)


def gpus(as_json: _Json = False) -> None:
    """List the known GPUs with the figures of their data sheets (dense, without sparsity).  --json adds the other
    names that each answers to.

    \b
    Examples:
      windtunnel gpus
      windtunnel simulate chat-8b-h100 --gpu l40s
    """
    from windtunnel.sim.deployment.gpu import bundled_gpus, load_gpu

    _list([_gpu_row(load_gpu(name)) for name in bundled_gpus()], as_json)


def _gpu_row(gpu: Any) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "short_name": _shorter(gpu.name, gpu.aliases),
        "other_names": list(gpu.aliases),
        "memory_gib": round(gpu.memory_bytes / GIB, 2),
        "bandwidth_gb_per_s": round(gpu.hbm_bandwidth_bytes_per_s / 1e9),
        "bf16_tflops": round(gpu.bf16_flops_per_s / 1e12, 1),
        "fp8_tflops": None if gpu.fp8_flops_per_s is None else round(gpu.fp8_flops_per_s / 1e12, 1),
        "source": gpu.source,
    }


def schema(
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print tables for people instead.")] = False,
) -> None:
    """Print every key of a scenario file with its range and meaning: as JSON Schema, for editors that complete and
    check TOML, or as Markdown tables.

    \b
    Examples:
      windtunnel schema > windtunnel.schema.json
      windtunnel schema --markdown
    """
    from windtunnel.rundir import to_json
    from windtunnel.scenarios.json_schema import json_schema, markdown

    emit(markdown() if as_markdown else to_json(json_schema()))


def _list(rows: list[dict[str, Any]], as_json: bool) -> None:
    import json

    from windtunnel.cli.dry_run import show, table

    if as_json:
        emit(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    header = [key for key in rows[0] if key not in _ONLY_JSON] if rows else []
    cells = [[show(row[key]) if row[key] is not None else "-" for key in header] for row in rows]
    emit("\n".join(table([header, *cells])))
