"""The commands that list what windtunnel knows: ``scenarios``, ``models``, ``gpus`` and ``schema``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from windtunnel.cli.output import emit

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
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
    """List the bundled models.  Any other model of a known architecture works by the path of its config.json.

    \b
    Examples:
      windtunnel models
      windtunnel simulate chat-8b-h100 --model ./my-model/config.json
    """
    from windtunnel.sim.deployment.model import bundled_models, load_model

    _list([_model_row(load_model(name)) for name in bundled_models()], as_json)


def _model_row(model: Any) -> dict[str, Any]:
    return {
        "name": model.name,
        "parameters_billion": round(model.num_parameters / 1e9, 2),
        "weights_gib": round(model.weight_bytes() / GIB, 2),
        "kv_bytes_per_token": model.kv_bytes_per_token(),
        "max_model_len": model.max_model_len,
    }


def gpus(as_json: _Json = False) -> None:
    """List the known GPUs with the figures of their data sheets (dense, without sparsity).

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
        "memory_gib": round(gpu.memory_bytes / GIB, 2),
        "bandwidth_gb_per_s": round(gpu.hbm_bandwidth_bytes_per_s / 1e9),
        "bf16_tflops": round(gpu.bf16_flops_per_s / 1e12, 1),
        "fp8_tflops": None if gpu.fp8_flops_per_s is None else round(gpu.fp8_flops_per_s / 1e12, 1),
        "source": gpu.source,
    }


def schema() -> None:
    """Print the JSON Schema of scenario files, for editors that complete and check TOML.

    \b
    Example:
      windtunnel schema > windtunnel.schema.json
    """
    from windtunnel.rundir import to_json
    from windtunnel.scenarios.schema import json_schema

    emit(to_json(json_schema()))


def _list(rows: list[dict[str, Any]], as_json: bool) -> None:
    import json

    from windtunnel.cli.plan import show, table

    if as_json:
        emit(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    header = list(rows[0]) if rows else []
    cells = [[show(value) if value is not None else "-" for value in row.values()] for row in rows]
    emit("\n".join(table([header, *cells])))
