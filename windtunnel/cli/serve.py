# ruff: noqa: ARG001 -- the flags are read from the context, all at once
"""``windtunnel serve``: an OpenAI-compatible server, simulated or real."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from windtunnel.cli import options
from windtunnel.cli.errors import EXIT_USAGE, usage_errors
from windtunnel.cli.output import note, warn
from windtunnel.cli.panels import flag

if TYPE_CHECKING:
    from windtunnel.executor.server.build import ServedModel, ServerSettings
    from windtunnel.scenarios.resolve import Resolved
    from windtunnel.sim.engine.protocols import CostModel

_SERVER, _DEPLOYMENT, _ENGINE = "Server", "Deployment", "Engine (vLLM's flags)"
_OF_THE_SERVER = (
    *("model_tag", "executor", "profile", "speed", "host", "port", "served_model_name", "num_threads"),
    *("disable_uvicorn_access_log", "default_output_tokens", "shadow"),
)
"""Parameters that are no keys of a scenario."""
_ONE_TOKEN = {"num_requests": 1, "input": 1, "output": 1}
"""The workload of the scenario that a server is: it comes from its clients, but every scenario has one."""
_KV_CACHE_BYTES = 2**30
"""KV cache of a real executor where neither blocks nor bytes nor a GPU say how large it is."""
_BLOCK_SIZE = 16
_OUTPUT_TOKENS = 256
"""Length of a made-up answer to a chat that sets no limit."""
_UNPRICED = "constant:step_s=1ms"
"""Stands where a scenario wants a price and nothing here is simulated; no step is ever priced by it."""


def serve(
    ctx: typer.Context,
    model_tag: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As --model; vllm serve has it here.", show_default=False)
    ] = None,
    executor: Annotated[
        str, flag(_SERVER, "--executor", metavar="sim|torch|triton", help="Who runs the steps; sim by default.")
    ] = "sim",
    profile: Annotated[
        str | None,
        flag(_SERVER, "--profile", metavar="NAME|FILE", help="Price steps by a bundled profile or a profile.json."),
    ] = None,
    cost: Annotated[
        str | None,
        flag(_SERVER, "--cost", metavar="COST", help="The same as text: constant:step_s=20ms; see simulate."),
    ] = None,
    shadow: Annotated[
        str | None,
        flag(
            _SERVER,
            "--shadow",
            metavar="NAME|FILE",
            help="While a model is computed: price each step by this profile beside it and tell the drift in /metrics.",
        ),
    ] = None,
    speed: Annotated[
        float, flag(_SERVER, "--speed", metavar="X", help="Simulated steps pass X times as fast; 1 by default.")
    ] = 1.0,
    default_output_tokens: Annotated[
        int,
        flag(
            _SERVER,
            "--default-output-tokens",
            metavar="N",
            help="Length of made-up answers to chats without max_tokens; 256 by default, 0 is the rest of the context.",
        ),
    ] = _OUTPUT_TOKENS,
    host: Annotated[
        str,
        flag(_SERVER, "--host", metavar="HOST", help="Address to listen on; 127.0.0.1 by default, 0.0.0.0 is all."),
    ] = "127.0.0.1",
    port: Annotated[
        int, flag(_SERVER, "--port", metavar="N", help="Port; 8000 by default, 0 takes a free one and says which.")
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        flag(_SERVER, "--served-model-name", metavar="NAME", help="What clients call the model. Repeatable."),
    ] = None,
    max_num_queued_reqs: Annotated[
        str | None,
        flag(_SERVER, "--max-num-queued-reqs", metavar="N", help="Most requests in the server; more get 503."),
    ] = None,
    max_num_queued_tokens: Annotated[
        str | None,
        flag(_SERVER, "--max-num-queued-tokens", metavar="N", help="Prompt tokens in prefill from which on it is 503."),
    ] = None,
    disable_uvicorn_access_log: Annotated[
        bool, flag(_SERVER, "--disable-uvicorn-access-log", help="No line for each HTTP request.")
    ] = False,
    seed: Annotated[
        str | None, flag(_SERVER, "--seed", metavar="N", help="Of random weights, made-up and sampled tokens.")
    ] = None,
    model: Annotated[
        str | None,
        flag(_DEPLOYMENT, "--model", metavar="NAME|PATH", help="Bundled model, a model's folder, or a config.json."),
    ] = None,
    gpu: Annotated[
        str | None, flag(_DEPLOYMENT, "--gpu", metavar="NAME", help="The GPU that is simulated (windtunnel gpus).")
    ] = None,
    tensor_parallel_size: Annotated[
        str | None,
        flag(_DEPLOYMENT, "--tensor-parallel-size", "--tp", "-tp", metavar="N", help="GPUs of the simulation."),
    ] = None,
    gpu_memory_utilization: Annotated[float | None, options.gpu_memory_utilization(_DEPLOYMENT)] = None,
    dtype: Annotated[str | None, options.dtype(_DEPLOYMENT)] = None,
    kv_cache_dtype: Annotated[str | None, options.kv_cache_dtype(_DEPLOYMENT)] = None,
    num_gpu_blocks_override: Annotated[str | None, options.num_gpu_blocks_override(_DEPLOYMENT)] = None,
    kv_cache_memory_bytes: Annotated[str | None, options.kv_cache_memory_bytes(_DEPLOYMENT)] = None,
    num_threads: Annotated[
        int | None,
        flag(_DEPLOYMENT, "--num-threads", metavar="N", help="Threads of --executor torch; all by default."),
    ] = None,
    max_num_seqs: Annotated[str | None, options.max_num_seqs(_ENGINE)] = None,
    max_num_batched_tokens: Annotated[str | None, options.max_num_batched_tokens(_ENGINE)] = None,
    max_model_len: Annotated[
        str | None,
        flag(
            _ENGINE,
            "--max-model-len",
            metavar="N|auto",
            help="Longest prompt plus output, in tokens; auto (or -1) is the longest that fits.",
        ),
    ] = None,
    block_size: Annotated[str | None, options.block_size(_ENGINE)] = None,
    enable_chunked_prefill: Annotated[bool | None, options.enable_chunked_prefill(_ENGINE)] = None,
    enable_prefix_caching: Annotated[bool | None, options.enable_prefix_caching(_ENGINE)] = None,
    long_prefill_token_threshold: Annotated[str | None, options.long_prefill_token_threshold(_ENGINE)] = None,
    scheduling_policy: Annotated[str | None, options.scheduling_policy(_ENGINE)] = None,
) -> None:
    """Serve a model to OpenAI clients: a mock of a deployment at its own pace, or a small real engine.

    Names, defaults and meaning of the flags are those of vllm serve, but the server listens on this machine only
    unless --host says otherwise.  Steps are decided one by one (no asynchronous scheduling).  POST
    /windtunnel/executor {"kind": "sim"} changes who runs the steps, in the middle of all requests.

    \b
    Examples:
      windtunnel serve --model llama-3.1-8b --gpu h100 --max-model-len 32k
      windtunnel serve --model llama-3.1-8b --gpu h100 --max-model-len 32k --speed 10 --port 0
      windtunnel serve --cost constant:step_s=20ms --num-gpu-blocks-override 4096 --max-model-len 8192
      windtunnel serve ./tiny-llama --executor torch
      windtunnel serve ./tiny-llama --executor torch --cost constant:step_s=5ms
    """
    missing = _missing_packages()
    if missing:
        note(f"error: serve needs {missing}: pip install 'windtunnel[server]'")
        raise typer.Exit(EXIT_USAGE)
    flags = {name: value for name, value in ctx.params.items() if name not in _OF_THE_SERVER and value is not None}
    flags["model"] = _one_model(model, model_tag)
    with usage_errors():
        of_server = _OfServer(executor, profile, speed, num_threads, default_output_tokens, shadow)
        served, settings = _plan(flags, of_server, served_model_name or [])
        _run(served, settings, host, port, access_log=not disable_uvicorn_access_log)


def _missing_packages() -> str:
    from importlib.util import find_spec

    packages = ("fastapi", "uvicorn", "prometheus_client")
    return ", ".join(package for package in packages if find_spec(package) is None)


def _one_model(flag: str | None, argument: str | None) -> str | None:
    if flag is not None and argument is not None and flag != argument:
        raise typer.BadParameter(f"MODEL is {argument!r}, but --model is {flag!r}: give one of them")
    return flag if argument is None else argument


class _OfServer(NamedTuple):
    """Flags that no scenario knows."""

    executor: str
    profile: str | None
    speed: float
    num_threads: int | None
    default_output_tokens: int
    shadow: str | None = None

    @property
    def is_real(self) -> bool:
        """Whether a model is computed from the first step on."""
        return self.executor != "sim"


def _plan(flags: Mapping[str, Any], of_server: _OfServer, names: list[str]) -> tuple[ServedModel, ServerSettings]:
    from windtunnel.executor.server.build import ServerSettings

    _check(of_server)
    served = _served_model(flags.get("model"), names)
    given, is_priced = _completed(flags, of_server, served)
    resolved = _resolved(given)
    for warning in resolved.warnings:
        warn(warning)
    _tell_of_what_has_no_effect(flags, of_server, is_priced=is_priced)
    settings = ServerSettings(
        resolved.config,
        resolved.cost if is_priced else None,
        of_server.executor,
        of_server.speed,
        int(resolved.seed),
        flags.get("dtype") or "auto",
        flags.get("kv_cache_dtype") or "auto",
        of_server.num_threads,
        resolved.system.max_num_queued_reqs,
        resolved.system.max_num_queued_tokens,
        of_server.default_output_tokens or None,
        _cache_fields(flags, of_server, resolved),
        _shadow(of_server.shadow),
    )
    return served, settings


def _shadow(name: str | None) -> CostModel | None:
    """The cost model that runs beside.  Raises typer.BadParameter for one that cannot be read."""
    from windtunnel.sim.cost.lookup import load_named

    try:
        return None if name is None else load_named(name).cost
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--shadow") from error


def _check(of_server: _OfServer) -> None:
    from windtunnel.executor.server.clock import MAX_SPEED
    from windtunnel.executor.server.executors import KINDS, unavailable_text, why_torch_is_missing

    executor = of_server.executor
    if executor not in KINDS:
        raise typer.BadParameter(f"{executor!r} is not one of {', '.join(KINDS)}", param_hint="--executor")
    if not 0 < of_server.speed <= MAX_SPEED:
        message = f"{of_server.speed:g} is not above 0 and at most {MAX_SPEED:g}"
        raise typer.BadParameter(message, param_hint="--speed")
    if of_server.num_threads is not None and of_server.num_threads < 1:
        message = f"{of_server.num_threads} is not at least 1; leave it out for all threads that torch takes by itself"
        raise typer.BadParameter(message, param_hint="--num-threads")
    if of_server.default_output_tokens < 0:
        message = f"{of_server.default_output_tokens} is below 0; 0 is the rest of the context"
        raise typer.BadParameter(message, param_hint="--default-output-tokens")
    missing = why_torch_is_missing() if of_server.is_real else None
    if missing is not None:
        raise typer.BadParameter(unavailable_text(executor, missing))


def _served_model(name: str | None, names: list[str]) -> ServedModel:
    from windtunnel.executor.server.build import ServedModel
    from windtunnel.sim.deployment.model import read_model_config

    if name is None:
        return ServedModel(tuple(names) or ("windtunnel",), "windtunnel")
    try:
        config, folder = read_model_config(name)
    except OSError as error:
        raise typer.BadParameter(f"cannot read model {name}: {error.strerror or error}") from error
    return ServedModel(tuple(names) or (name,), name, config, folder)


def _completed(flags: Mapping[str, Any], of_server: _OfServer, served: ServedModel) -> tuple[dict[str, Any], bool]:
    """The flags of the scenario that the server is, and whether they say what a step costs."""
    given = dict(flags)
    if of_server.profile is not None:
        if given.get("cost") is not None:
            raise typer.BadParameter("--profile and --cost both say what a step costs: give one of them")
        given["profile"] = of_server.profile
    says_price = any(given.get(key) is not None for key in ("cost", "profile", "gpu"))
    is_priced = not of_server.is_real or says_price
    if not is_priced:
        given["cost"] = _UNPRICED
    if _sizes_its_own_cache(flags, of_server):
        given["num_gpu_blocks_override"] = str(_num_real_blocks(given, of_server.executor, served))
        given.pop("kv_cache_memory_bytes", None)
    return given, is_priced


def _sizes_its_own_cache(flags: Mapping[str, Any], of_server: _OfServer) -> bool:
    """Whether the KV cache is that of this machine, not of a GPU that is simulated or of so many blocks."""
    return of_server.is_real and flags.get("gpu") is None and flags.get("num_gpu_blocks_override") is None


def _resolved(given: dict[str, Any]) -> Resolved:
    """Everything that a scenario says, with the longest context that fits for --max-model-len auto, as in vLLM."""
    from windtunnel.sim.deployment.memory import InfeasibleDeployment

    if not _is_auto(given.get("max_model_len")):
        return _resolve(given)
    given = {**given, "max_model_len": None}
    try:
        return _resolve(given)
    except InfeasibleDeployment as error:
        if error.largest_max_model_len < 1:
            raise
        return _resolve({**given, "max_model_len": str(error.largest_max_model_len)})


def _is_auto(max_model_len: str | None) -> bool:
    return max_model_len is not None and max_model_len.strip().lower() in ("auto", "-1")


def _resolve(given: Mapping[str, Any]) -> Resolved:
    from windtunnel.cli.simulate import overrides
    from windtunnel.scenarios.load import Override, load_scenario
    from windtunnel.scenarios.resolve import resolve

    workload = {key: Override(value, "the server's clients") for key, value in _ONE_TOKEN.items()}
    synchronous = {"async_scheduling": Override(False, "windtunnel serve decides steps one by one")}
    return resolve(load_scenario(None, {**overrides(given), **workload, **synchronous}))


def _cache_fields(flags: Mapping[str, Any], of_server: _OfServer, resolved: Resolved) -> dict[str, Any]:
    """What the flags and the memory plan say of the fields of vLLM's CacheConfig."""
    from windtunnel.scenarios.units import parse_count, parse_size_bytes

    override, size = flags.get("num_gpu_blocks_override"), flags.get("kv_cache_memory_bytes")
    if size is None and _sizes_its_own_cache(flags, of_server):
        size = _KV_CACHE_BYTES
    share = flags.get("gpu_memory_utilization")
    fields = {
        "user_specified_block_size": flags.get("block_size") is not None,
        "gpu_memory_utilization": resolved.version.gpu_memory_utilization if share is None else share,
        "num_gpu_blocks_override": None if override is None else parse_count(override),
        "kv_cache_memory_bytes": None if size is None else parse_size_bytes(size),
    }
    pool = resolved.kv_pool
    if pool is not None:
        fields |= {"kv_cache_size_tokens": pool.kv_cache_tokens, "kv_cache_max_concurrency": pool.max_concurrency}
    return fields


def _tell_of_what_has_no_effect(flags: Mapping[str, Any], of_server: _OfServer, *, is_priced: bool) -> None:
    """Say which flags do nothing, or nothing before another executor is swapped in."""
    executor, has_gpu = of_server.executor, flags.get("gpu") is not None
    if of_server.is_real:
        later = "it is for simulated steps, once they are swapped in" if is_priced else "it is for simulated steps"
        if of_server.speed != 1:
            warn(f"--speed {of_server.speed:g} has no effect on the {executor} executor: {later}")
        if flags.get("tensor_parallel_size") not in (None, "1"):
            size = flags["tensor_parallel_size"]
            scope = "it is for the simulated deployment" if has_gpu else "leave it out"
            warn(
                f"--tensor-parallel-size {size} has no effect on the {executor} executor, which has one device: {scope}"
            )
        if flags.get("gpu_memory_utilization") is not None and not has_gpu:
            warn("--gpu-memory-utilization has no effect without --gpu: --kv-cache-memory-bytes sizes the cache")
    elif of_server.shadow is not None:
        warn("--shadow has no effect on simulated steps: it is for --executor torch or triton, once one is swapped in")
    if of_server.num_threads is not None and executor == "triton":
        warn("--num-threads has no effect on the triton executor: it is for --executor torch")


def _num_real_blocks(given: Mapping[str, Any], executor: str, served: ServedModel) -> int:
    """Blocks of a real executor's cache: as many as its memory holds, and no more than the seats can ever use."""
    from windtunnel.executor.server.build import decoder_config
    from windtunnel.executor.server.executors import unavailable_text
    from windtunnel.scenarios.units import parse_count, parse_size_bytes

    try:
        model = decoder_config(served)
    except ValueError as error:
        raise typer.BadParameter(unavailable_text(executor, str(error))) from error
    size = parse_count(given.get("block_size") or _BLOCK_SIZE)
    asked = given.get("max_model_len")
    max_model_len = model.max_model_len if asked is None or _is_auto(asked) else parse_count(asked)
    element_bytes = _element_bytes(given, "float32" if executor == "torch" else model.dtype)
    token_bytes = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * element_bytes
    memory_bytes = parse_size_bytes(given.get("kv_cache_memory_bytes") or _KV_CACHE_BYTES)
    most_useful = parse_count(given.get("max_num_seqs") or 128) * -(-max_model_len // size) + 1
    return int(max(2, min(memory_bytes // (token_bytes * size), most_useful)))


def _element_bytes(given: Mapping[str, Any], default: str) -> int:
    """Bytes of a number in the cache, which is of the weights' type unless told otherwise."""
    for key in ("kv_cache_dtype", "dtype"):
        name = str(given.get(key) or "auto")
        if name != "auto":
            break
    else:
        name = default
    if name.startswith("fp8"):
        return 1
    return 2 if name in ("half", "float16", "bfloat16") else 4


def _run(served: ServedModel, settings: ServerSettings, host: str, port: int, *, access_log: bool) -> None:
    from windtunnel import __version__
    from windtunnel.executor.server.build import make_frontend
    from windtunnel.executor.server.run import address_of, listen, run_server

    with listen(host, port) as listener:
        frontend = make_frontend(served, settings)
        _tell(frontend, settings)
        note(f"Starting windtunnel API server on {address_of(listener)}")
        run_server(frontend, listener, __version__, access_log=access_log)


def _tell(frontend: Any, settings: ServerSettings) -> None:
    from windtunnel.executor.server.executors import weights_source
    from windtunnel.sim.cost.evidence import evidence_of, in_words
    from windtunnel.sim.cost.statement import sentences

    scheduler, cost = settings.scheduler, settings.cost
    tokens = "its own tokenizer" if frontend.tokenizer.has_real_vocabulary else "bytes as tokens"
    note(f"Model {frontend.model_name}, {frontend.tokenizer.vocab_size:,} token ids, {tokens}")
    device = "CPU" if settings.executor == "torch" else "GPU"
    num_tokens = settings.cache.get("kv_cache_size_tokens", scheduler.num_gpu_blocks * scheduler.block_size)
    note(
        f"{device} KV cache size: {num_tokens:,} tokens "
        f"({scheduler.num_gpu_blocks:,} blocks of {scheduler.block_size}), max_model_len {scheduler.max_model_len:,}"
    )
    if settings.executor == "sim" and cost is not None:
        grade = in_words(evidence_of(cost.describe()))
        note(f"Steps are simulated by {cost.name} ({grade}), {settings.speed:g} times as fast; the text is made up")
        for sentence in sentences(cost.describe()):
            note(sentence)
    else:
        note(f"Weights: {weights_source(frontend.loop.engine.executor)}")
        note(f"Steps are computed by the {settings.executor} executor")
