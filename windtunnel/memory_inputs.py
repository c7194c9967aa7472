"""What a memory plan can be read from: a server's log, its metrics, a deployment as somebody wrote it down."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from windtunnel.sim.deployment.engine_args import ENGINE
from windtunnel.sim.deployment.gpu import GIB
from windtunnel.sim.deployment.memory_request import MeasuredPool

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from windtunnel.sim.deployment.metrics_text import MetricsFacts
    from windtunnel.sim.deployment.startup_log import StartupError, StartupFacts


class MemoryInputUnreadable(ValueError):
    """A log, dump of metrics, deployment or profile that cannot be read."""


class Failure(NamedTuple):
    """An error in a log: its kind, where it stands, and what it says."""

    kind: str
    place: str
    text: str

    @property
    def sentence(self) -> str:
        """All of it; it ends with one full stop."""
        return f"{self.place}: {self.text.rstrip(' .')}."


@dataclass(frozen=True, slots=True)
class Found:
    """What was read: settings by vLLM's names, the pool that was measured, and figures to compare with."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    measured: MeasuredPool | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Figures of a real start-up, by the names of the plan; None is not known."""
    failure: Failure | None = None
    """What ended the start-up."""
    later_failure: Failure | None = None
    """Memory that ran out once it had started."""
    evidence: str = ""
    """What shows that the memory was enough, as a sentence; empty if nothing does."""
    taken: Mapping[str, Any] = field(default_factory=dict)
    """Settings that are taken where neither what was read nor the user tells them."""
    taken_why: str = ""
    notes: tuple[str, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    """Where each setting and figure stands, in words ("vllm.log, line 12")."""
    warnings: tuple[str, ...] = ()
    """What keeps the server that was read from starting."""
    called: str = "what was read"
    """What the pool was read from, in words: "this log", "these metrics"."""

    def place(self, name: str) -> str:
        """Where a setting or figure was read."""
        return self.places.get(name) or (self.measured.source if self.measured else "what was read")

    def under(self, other: Found) -> Found:
        """Both together; what ``other`` says of a setting counts."""
        return Found(
            {**self.settings, **other.settings},
            other.measured or self.measured,
            {**self.facts, **other.facts},
            other.failure or self.failure,
            other.later_failure or self.later_failure,
            other.evidence or self.evidence,
            {**self.taken, **other.taken},
            other.taken_why or self.taken_why,
            (*self.notes, *other.notes),
            {**self.places, **other.places},
            (*self.warnings, *other.warnings),
            self.called if other.measured is None else other.called,
        )


# --- a deployment

_TAKEN = (
    "model",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "cpu_offload_gb",
    "kv_offloading_size",
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enforce_eager",
    "disable_hybrid_kv_cache_manager",
)
_MATTERS = (
    "quantization",
    "hf_overrides",
    "fully_sharded_loras",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "mamba_block_size",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "language_model_only",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "compilation_config",
)
"""Settings that change the memory in ways that are not planned."""


USE_V1_IS_0 = "VLLM_USE_V1=0"
"""Name of a setting that only a deployment's environment gives."""


def read_deployment_settings(source: str | Path) -> Found:
    """The settings of a ``vllm serve`` line, a compose file, Helm values, a manifest or a config file.

    Raises MemoryInputUnreadable for a file that is none of them, ValueError for values out of range.
    """
    from windtunnel.scenarios.deployments.errors import DeploymentUnreadable
    from windtunnel.scenarios.deployments.read import read_deployment

    try:
        found = read_deployment(source)
    except DeploymentUnreadable as error:
        raise MemoryInputUnreadable(str(error)) from None
    given = found.settings
    settings = {name: given[name] for name in _TAKEN if given.get(name) is not None}
    if given.get("swap_space") is not None:
        settings["swap_space"] = given["swap_space"] / GIB
    speculative = given.get("speculative_config") or {}
    if speculative.get("num_speculative_tokens"):
        settings["num_speculative_tokens"] = speculative["num_speculative_tokens"]
    if given.get("enable_lora"):
        settings |= {name: given[name] for name in ("enable_lora", "max_loras", "max_lora_rank") if name in given}
    settings["usage_context"] = found.usage_context
    if found.engine_version:
        settings["engine"] = found.engine_version
    if found.gpu:
        settings["gpu"] = found.gpu
    if found.asks_for_v0:
        settings[USE_V1_IS_0] = True
    places = dict.fromkeys(settings, "the deployment")
    left_out = [name for name in _MATTERS if given.get(name)]
    notes = [note for note in found.notes if note not in (*found.refusals, found.asks_for_v0)]
    if speculative:
        notes.append("The weights of a drafter are not counted.")
    if left_out:
        notes.append(f"Not planned, though it changes the memory: {', '.join(left_out)}.")
    notes += (text for text in found.unknown if text not in found.refusals)
    return Found(settings, notes=tuple(notes), places=places, warnings=found.refusals)


# --- a log

_FROM_LOG = {
    "model": "model",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "kv_cache_dtype": "kv_cache_dtype",
    "block_size": "block_size",
    "enforce_eager": "enforce_eager",
    "enable_prefix_caching": "enable_prefix_caching",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
}
_COMPARED = {
    "weights_bytes": "weights_bytes",
    "activation_bytes": "activation_bytes",
    "non_torch_bytes": "non_torch_bytes",
    "available_kv_cache_bytes": "available_kv_cache_bytes",
    "num_gpu_blocks": "num_gpu_blocks",
    "kv_cache_tokens": "kv_cache_tokens",
    "max_concurrency": "max_concurrency",
}


def read_log_settings(path: str | Path) -> Found:
    """The settings and the pool of the last start-up in a log.

    Raises MemoryInputUnreadable for a file that cannot be read or holds no line of vLLM's; ValueError for a size that
    no card has.
    """
    from windtunnel.sim.deployment.startup_log import check, read_startup_log

    try:
        facts = read_startup_log(_pieces(path), name=str(path))
    except ValueError as error:
        raise MemoryInputUnreadable(str(error)) from None
    _check_sizes(facts)
    settings = _arguments(facts)
    for name, attribute in _FROM_LOG.items():
        value = getattr(facts, attribute)
        if value is not None:
            settings[name] = value
    if facts.max_model_len is None and facts.max_concurrency_tokens:
        settings["max_model_len"] = facts.max_concurrency_tokens
    notes = list(facts.notes)
    if (total := _total_bytes(facts)) is not None:
        settings["gpu_memory_gib"] = total / GIB
    if facts.free_memory_bytes is not None:
        free = facts.free_memory_bytes
        settings["free_memory_gib"] = (free if total is None else min(free, total)) / GIB
    if facts.vllm_version:
        settings |= _engine(facts.vllm_version, notes)
    if facts.engine == "V0":
        settings["v0"] = True
    notes += [f"{path} contradicts itself: {told}" for told in check(facts)]
    failed = facts.errors[-1] if facts.errors and not facts.started else None
    later = next((error for error in facts.errors if facts.started and error.kind == _SERVING_OOM), None)
    told = [error for error in facts.errors if error not in (failed, later)]
    notes += [f"{path}, line {error.line}: {error.text}" for error in told]
    if facts.profiled_num_gpu_blocks is not None and facts.num_gpu_blocks is not None:
        settings.setdefault("num_gpu_blocks_override", facts.num_gpu_blocks)
    settings |= _block_size(facts, settings, notes)
    places = _places(facts, settings)
    about: dict[str, Any] = {
        "failure": _failure(facts, failed),
        "later_failure": _failure(facts, later),
        "evidence": _evidence(facts),
        "taken": {} if facts.vllm_version else {"engine": ENGINE},
        "taken_why": f"{path} does not tell the release of vLLM",
        "called": "this log",
    }
    measured = MeasuredPool(
        str(path),
        facts.available_kv_cache_bytes,
        facts.num_gpu_blocks,
        facts.kv_cache_tokens,
        facts.max_concurrency_tokens or facts.max_model_len,
        facts.profiled_num_gpu_blocks,
    )
    known = (measured.available_bytes, measured.num_gpu_blocks, measured.kv_cache_tokens)
    if all(value is None for value in known):
        notes.append(f"{path} does not tell the KV cache: it is that of the formula")
        return Found(settings, notes=tuple(notes), places=places, **about)
    return Found(settings, measured, _figures(facts), notes=tuple(notes), places=places, **about)


_SERVING_OOM = "out_of_memory_serving"


def _failure(facts: StartupFacts, error: StartupError | None) -> Failure | None:
    return None if error is None else Failure(error.kind, f"{facts.name}, line {error.line}", error.text)


def _evidence(facts: StartupFacts) -> str:
    """What a log shows of a start-up that went well; empty if it failed, or ends before that is known."""
    if facts.errors and not facts.started:
        return ""
    shown = []
    if facts.cudagraph_actual_bytes is not None:
        shown.append(f"CUDA graphs captured (line {facts.lines['cudagraph_actual_bytes']})")
    if facts.started:
        served = facts.serving is not None and facts.serving.max_running > 0
        shown.append(f"{'requests running' if served else 'the server up'} (line {facts.lines['started']})")
    return f"{facts.name} shows {' and '.join(shown)}." if shown else ""


_LONGER_BLOCKS = (32, 64, 128, 256)


def _block_size(facts: StartupFacts, settings: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The block size that tokens and blocks tell, where no line states it; that of models with one kind of layers."""
    tokens, blocks = facts.kv_cache_tokens, facts.num_gpu_blocks
    if "block_size" in settings or facts.is_hybrid or not tokens or not blocks:
        return {}
    for size in _LONGER_BLOCKS:
        if tokens == blocks * size:
            notes.append(
                f"{facts.name}: {tokens:,} tokens are {blocks:,} blocks of {size}, the block_size that is taken"
            )
            return {"block_size": size}
    return {}


def _figures(facts: StartupFacts) -> dict[str, Any]:
    """What is compared with the plan; of the graphs what is taken out of the budget, and what was captured."""
    figures = {name: getattr(facts, attribute) for name, attribute in _COMPARED.items()}
    figures["max_concurrency_tokens"] = facts.max_concurrency_tokens
    figures["cudagraph_estimate_applied"] = facts.cudagraph_estimate_applied
    figures["cudagraph_captured_bytes"] = facts.cudagraph_actual_bytes
    figures["cudagraph_bytes"] = facts.cudagraph_estimate_bytes
    share, equivalent = facts.gpu_memory_utilization, facts.equivalent_gpu_memory_utilization
    if facts.cudagraph_estimate_bytes is None and share is not None and equivalent is not None:
        figures["cudagraph_share"] = share - equivalent
    return figures


def _places(facts: StartupFacts, settings: Mapping[str, Any]) -> dict[str, str]:
    fields = {name: name for name in (*settings, *_COMPARED)}
    fields |= {"gpu_memory_gib": "total_memory_bytes", "free_memory_gib": "free_memory_bytes", "v0": "engine"}
    fields |= {"engine": "vllm_version", "cudagraph_bytes": "cudagraph_estimate_bytes"}
    if facts.max_model_len is None:
        fields["max_model_len"] = "max_concurrency_tokens"
    lines = {name: facts.lines.get(field) for name, field in fields.items()}
    return {name: f"{facts.name}, line {line}" if line else facts.name for name, line in lines.items()}


LARGEST_BYTES = 16_384 * GIB
"""No device has more."""
_SIGNED = ("available_kv_cache_bytes", "activation_bytes", "non_torch_bytes", "suggested_kv_cache_memory_bytes")
"""vLLM prints what is left even if it is less than nothing, and small parts are differences of rounded figures."""


def _check_sizes(facts: StartupFacts) -> None:
    """Raise ValueError for a size that is no size of a device's memory."""
    for name, line in facts.lines.items():
        value = getattr(facts, name)
        if not name.endswith("_bytes") or value is None:
            continue
        least = -LARGEST_BYTES if name in _SIGNED else 0
        if not least <= value <= LARGEST_BYTES:
            raise ValueError(
                f"{facts.name}, line {line}: {name} is {value / GIB:,.2f} GiB, which must lie between "
                f"{least / GIB:,.0f} and {LARGEST_BYTES / GIB:,.0f} GiB; mend that line of the log or leave it out"
            )
    _check_free(facts)
    _check_some_pool(facts)


def _check_free(facts: StartupFacts) -> None:
    """Raise ValueError if more is free than there is."""
    free, total = facts.free_memory_bytes, facts.total_memory_bytes
    if free is not None and total is not None and free > total:
        raise ValueError(
            f"{facts.name}, line {facts.lines['free_memory_bytes']}: {free / GIB:,.2f} GiB of memory are free, which "
            f"is more than the card has in all ({total / GIB:,.2f} GiB, line {facts.lines['total_memory_bytes']}); "
            "mend that line of the log or leave it out"
        )


def _check_some_pool(facts: StartupFacts) -> None:
    """Raise ValueError for blocks or tokens in memory that was not there: vLLM makes no cache of it."""
    available = facts.available_kv_cache_bytes
    counted = next((name for name in ("kv_cache_tokens", "num_gpu_blocks") if getattr(facts, name)), None)
    if available is None or available >= 0 or counted is None:
        return
    raise ValueError(
        f"{facts.name}, line {facts.lines['available_kv_cache_bytes']}: {available / GIB:,.2f} GiB are available for "
        f"the KV cache, and line {facts.lines[counted]} tells {getattr(facts, counted):,} "
        f"{'tokens' if counted == 'kv_cache_tokens' else 'blocks'} of it: these are lines of two start-ups, or one was "
        "changed; give the whole log of one"
    )


def _total_bytes(facts: StartupFacts) -> float | None:
    """The card's memory: as logged with two decimals, or the one among those that round to it which also gives the
    logged budget (ceil(total x gpu_memory_utilization)) when rounded."""
    total, requested, share = facts.total_memory_bytes, facts.requested_memory_bytes, facts.gpu_memory_utilization
    if total is None or requested is None or not share:
        return total
    half = 0.005 * GIB
    low, high = max(total - half, (requested - half) / share), min(total + half, (requested + half) / share)
    is_given = f"{math.ceil(total * share) / GIB:.2f}" == f"{requested / GIB:.2f}"
    return total if is_given or low >= high else (low + high) / 2


def _arguments(facts: StartupFacts) -> dict[str, Any]:
    """Settings that only the logged arguments tell."""
    names = (
        "enable_expert_parallel",
        "num_gpu_blocks_override",
        "cpu_offload_gb",
        "kv_offloading_size",
        "swap_space",
        "dtype",
    )
    given = {name: facts.non_default_args[name] for name in names if facts.non_default_args.get(name) is not None}
    dtype = given.get("dtype")
    if dtype is not None:
        given["dtype"] = str(dtype).removeprefix("torch.")
    return given


def _engine(version: str, notes: list[str]) -> dict[str, Any]:
    """The release, if it is a known one; a vendor's build counts as what it was built from."""
    from windtunnel.sim.deployment.versions import profile

    plain = version.split("+")[0]
    for name in (plain, ".".join(plain.split(".")[:2])):
        try:
            return {"engine": profile(name).name}
        except ValueError:
            continue
    notes.append(f"vLLM {version} is no release that is known; give --engine")
    return {}


# --- metrics


def read_metrics_settings(source: str | Path) -> Found:
    """The pool in ``/metrics`` or in Prometheus' JSON: a file, or the address of either (http or https).

    Raises MemoryInputUnreadable for what cannot be read or holds no metrics of vLLM's.
    """
    from windtunnel.sim.deployment.metrics_text import read_metrics

    path = str(source)
    try:
        facts = read_metrics(_fetched(path) if "://" in path else _text(path), name=path)
    except ValueError as error:
        raise MemoryInputUnreadable(str(error)) from None
    if facts.num_gpu_blocks is None and facts.kv_cache_tokens is None:
        raise MemoryInputUnreadable(f"{path}: no vllm:cache_config_info with the number of blocks in it")
    named = {
        "block_size": facts.block_size,
        "gpu_memory_utilization": facts.gpu_memory_utilization,
        "kv_cache_memory_bytes": facts.kv_cache_memory_bytes,
        "kv_cache_dtype": facts.cache_dtype,
        "enable_prefix_caching": facts.enable_prefix_caching,
        "num_gpu_blocks_override": facts.num_gpu_blocks_override,
        "max_model_len": _length_of(facts),
        "model": facts.model,
    }
    settings = {name: value for name, value in named.items() if value is not None}
    tokens = None if facts.tokens_are_counted else facts.kv_cache_tokens
    figures: dict[str, Any] = {"num_gpu_blocks": facts.num_gpu_blocks, "kv_cache_tokens": tokens}
    figures |= {"max_concurrency": facts.max_concurrency, "max_concurrency_tokens": _length_of(facts)}
    measured = MeasuredPool(path, None, facts.num_gpu_blocks, tokens, _length_of(facts))
    lines = {name: facts.lines.get("cache_dtype" if name == "kv_cache_dtype" else name) for name in (*named, *figures)}
    places = {name: f"{path}, line {line}" if line else path for name, line in lines.items()}
    return Found(
        settings,
        measured,
        figures,
        evidence=f"{path} has the metrics of a server that runs.",
        taken={"engine": f"vllm-{facts.last_release}" if facts.last_release else ENGINE},
        taken_why=f"{path} does not tell the release of vLLM, though its labels are those of {_span(facts)}",
        notes=facts.notes,
        places=places,
        called="these metrics",
    )


def _span(facts: MetricsFacts) -> str:
    first, last = facts.first_release, facts.last_release
    if last is None:
        return f"{first} and later"
    return f"{first} to {last}" if first else f"{last} and earlier"


def _length_of(facts: MetricsFacts) -> int | None:
    """The max_model_len behind kv_cache_size_tokens = int(kv_cache_max_concurrency x max_model_len), which 0.24 and
    later have; None where no length gives just that."""
    tokens, concurrency = facts.kv_cache_tokens, facts.max_concurrency
    if not tokens or not concurrency or concurrency < 1:
        return None
    nearest = round(tokens / concurrency)
    fitting = (length for length in (nearest, nearest + 1) if int(concurrency * length) == tokens)
    return next(fitting, None)


TIMEOUT_S = 10.0
"""For the whole answer of a server."""
LARGEST_ANSWER_BYTES = 64 * 2**20


def _fetched(address: str) -> str:
    """The text at an http address; ValueError says why there is none.

    It is fetched beside, since a server that sends a little again and again keeps every time limit of its connection.
    """
    import threading

    if address.partition("://")[0].casefold() not in ("http", "https"):
        raise ValueError(f"{address}: must begin with http:// or https://, or be the name of a file")
    answers: list[str | ValueError] = []
    fetching = threading.Thread(target=_fetch_into, args=(answers, address, TIMEOUT_S), daemon=True)
    fetching.start()
    fetching.join(TIMEOUT_S)
    answer = answers[0] if answers else _unanswered(address, TIMEOUT_S)
    if isinstance(answer, ValueError):
        raise answer
    return answer


_WHERE = "give the address of a running server, such as http://HOST:8000/metrics, or a file with its text"


def _unanswered(address: str, timeout_s: float) -> ValueError:
    return ValueError(f"{address}: no whole answer within {timeout_s:g} s; {_WHERE}")


def _fetch_into(answers: list[str | ValueError], address: str, timeout_s: float) -> None:
    try:
        answers.append(_answer(address, timeout_s))
    except ValueError as error:
        answers.append(error)


def _answer(address: str, timeout_s: float) -> str:
    import http.client
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(address, timeout=timeout_s) as answer:
            content = _body(answer, time.monotonic() + timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        raise ValueError(f"{address}: the server answered {error.code} ({error.reason}); {_WHERE}") from None
    except TimeoutError:
        raise _unanswered(address, timeout_s) from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise _unanswered(address, timeout_s) from None
        said = getattr(error.reason, "strerror", None) or str(error.reason)
        raise ValueError(f"{address}: cannot be reached ({said}); {_WHERE}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ValueError(f"{address}: cannot be read ({str(error) or type(error).__name__}); {_WHERE}") from None
    if len(content) > LARGEST_ANSWER_BYTES:
        raise ValueError(f"{address}: the answer is longer than {LARGEST_ANSWER_BYTES >> 20} MiB; {_WHERE}")
    return content.decode("utf-8", errors="replace")


def _body(answer: HTTPResponse, deadline_s: float) -> bytes:
    """What the server sends, up to a little more than the most; raises TimeoutError at the deadline."""
    pieces, size = [], 0
    while size <= LARGEST_ANSWER_BYTES and (piece := answer.read1(_PIECE)):
        pieces.append(piece)
        size += len(piece)
        if time.monotonic() > deadline_s:
            raise TimeoutError
    if answer.length:
        raise ValueError(f"it ended {answer.length:,} bytes early")
    return b"".join(pieces)


_PIECE = 2**16


def _pieces(path: str | Path) -> Iterator[str]:
    """The text of a file in pieces of whole lines, so that a large one need not be held at once."""
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            while piece := file.read(_PIECE):
                yield piece + file.readline()
    except OSError as error:
        raise MemoryInputUnreadable(f"{path}: {error.strerror}") from None


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise MemoryInputUnreadable(f"{path}: {error.strerror}") from None


__all__ = [
    "Found",
    "MemoryInputUnreadable",
    "read_deployment_settings",
    "read_log_settings",
    "read_metrics_settings",
]
