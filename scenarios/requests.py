"""The workload that a scenario asks for: read from a trace or drawn from distributions, and checked."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from windtunnel.scenarios.errors import NothingToServe, ScenarioUnreadable
from windtunnel.scenarios.ledger import Ledger
from windtunnel.scenarios.schema import SyntheticWorkload, TraceWorkload
from windtunnel.sim.workload import Workload

if TYPE_CHECKING:
    from windtunnel.scenarios.workloads.arrivals import Arrivals
    from windtunnel.scenarios.workloads.lengths import Lengths
    from windtunnel.sim.deployment.model import ModelSpec

DEFAULT_NUM_PROMPTS = 1000
NS_PER_S = 1_000_000_000
BENCH_DEFAULT = "vllm bench serve default"
_READER_ARGUMENTS = {"start": "start_s", "duration": "duration_s"}
"""Keys of a trace workload that read_trace calls by another name."""


def make_workload(ledger: Ledger, seed: int) -> Workload:
    """The requests of the scenario; the same seed draws the same ones.

    Raises ScenarioError for a description that is none, TraceError and ScenarioUnreadable for a file.
    """
    spec = ledger.loaded.scenario.workload
    for key, value in spec.model_dump(exclude_none=True).items():
        ledger.note("workload", key, value)
    workload = _read(ledger, spec) if isinstance(spec, TraceWorkload) else _draw(ledger, spec, seed)
    if spec.request_timeout is None:
        return workload
    return replace(workload, request_timeout_ns=max(1, round(spec.request_timeout * NS_PER_S)))


def _read(ledger: Ledger, spec: TraceWorkload) -> Workload:
    from windtunnel.scenarios.workloads.trace import read_trace

    path = ledger.loaded.path_of("workload", "trace", spec.trace)
    given = spec.model_dump(exclude={"trace", "max_concurrency", "request_timeout"}, exclude_none=True)
    options: dict[str, Any] = {_READER_ARGUMENTS.get(key, key): value for key, value in given.items()}
    try:
        workload = ledger.attempt("workload", tuple(given), lambda: read_trace(path, **options))
    except OSError as error:
        raise ScenarioUnreadable(f"cannot read trace {path}: {error.strerror or error}") from error
    return workload if spec.max_concurrency is None else replace(workload, max_concurrency=spec.max_concurrency)


def _draw(ledger: Ledger, spec: SyntheticWorkload, seed: int) -> Workload:
    from windtunnel.scenarios.workloads.synthetic import prefixes_from, sessions_from, synthetic_workload

    prefixes, sessions = spec.prefixes, spec.sessions
    arrivals = _arrivals(ledger, spec)
    prompt, output = _lengths(ledger, "input", spec.input), _lengths(ledger, "output", spec.output)
    checked_prefixes = (
        None if prefixes is None else ledger.attempt("workload", "prefixes", lambda: prefixes_from(prefixes))
    )
    checked_sessions = (
        None if sessions is None else ledger.attempt("workload", "sessions", lambda: sessions_from(sessions))
    )
    priorities = _priorities(ledger, spec.priorities)
    num_requests = _num_requests(ledger, spec)
    return ledger.attempt(
        "workload",
        ("num_requests", "sessions", "max_tokens", "priorities", "request_rate", "tenants"),
        lambda: synthetic_workload(
            num_requests,
            arrivals,
            prompt,
            output,
            seed=seed,
            prefixes=checked_prefixes,
            sessions=checked_sessions,
            max_concurrency=spec.max_concurrency,
            max_tokens=spec.max_tokens,
            priorities=priorities,
            tenants=spec.tenants,
        ),
    )


def _num_requests(ledger: Ledger, spec: SyntheticWorkload) -> int | None:
    """As given; without a number of sessions either, vLLM's default."""
    if spec.num_requests is not None or (spec.sessions or {}).get("num_sessions") is not None:
        return spec.num_requests
    ledger.note("workload", "num_requests", DEFAULT_NUM_PROMPTS, BENCH_DEFAULT)
    return DEFAULT_NUM_PROMPTS


def _lengths(ledger: Ledger, key: str, spec: int | dict[str, Any]) -> Lengths:
    from windtunnel.scenarios.workloads.lengths import lengths_from

    return ledger.attempt("workload", key, lambda: lengths_from(spec, key))


def _arrivals(ledger: Ledger, spec: SyntheticWorkload) -> Arrivals:
    from windtunnel.scenarios.workloads.arrivals import Gamma, arrivals_from

    arrival = spec.arrival
    if arrival is not None:
        for key in ("request_rate", "burstiness"):
            if getattr(spec, key) is not None:
                raise ledger.blame(f"{key} and arrival say the same thing twice: leave one out", "workload", key)
        return ledger.attempt("workload", "arrival", lambda: arrivals_from(arrival, "arrival"))
    rate = math.inf if spec.request_rate is None else spec.request_rate
    burstiness = 1.0 if spec.burstiness is None else spec.burstiness
    for key, value in (("request_rate", rate), ("burstiness", burstiness)):
        if getattr(spec, key) is None:
            ledger.note("workload", key, value, BENCH_DEFAULT)
    return Gamma(rate, burstiness, rescale=True)


def _priorities(ledger: Ledger, given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    try:
        return {int(priority): weight for priority, weight in given.items()}
    except ValueError:
        message = f"priorities must be whole numbers with a weight each, got {', '.join(given)}"
        raise ledger.blame(message, "workload", "priorities") from None


def check_lengths(ledger: Ledger, workload: Workload, max_model_len: int, model: ModelSpec | None) -> None:
    """Say what max_model_len will do to the requests; refuse to run when it leaves none."""
    refused = int((workload.num_prompt_tokens >= max_model_len).sum())
    if refused:
        _tell_refused(ledger, workload, max_model_len, refused, model)
    total = workload.num_prompt_tokens + workload.num_output_tokens
    cut = total[(total > max_model_len) & (workload.num_prompt_tokens < max_model_len)]
    if len(cut):
        longest = int(cut.max())
        ledger.warnings.append(
            f"{len(cut):,} of {len(workload):,} requests reach max_model_len ({max_model_len:,}) before their output "
            f"ends and are cut there, as vLLM does (longest: {longest:,}): {_how_to_serve(longest, model)} to serve "
            "them whole"
        )


def _tell_refused(
    ledger: Ledger, workload: Workload, max_model_len: int, refused: int, model: ModelSpec | None
) -> None:
    longest = int(workload.num_prompt_tokens.max())
    which = f"have max_model_len ({max_model_len:,}) tokens or more"
    remedy = _how_to_serve(longest + 1, model)
    if refused == len(workload):
        error = ledger.blame(
            f"all {refused:,} prompts {which}, so vLLM refuses every one (longest: {longest:,}): {remedy}, or shorten "
            "the prompts",
            "engine",
            "max_model_len",
        )
        raise NothingToServe(str(error))
    ledger.warnings.append(
        f"{refused:,} of {len(workload):,} prompts {which} and are rejected, as vLLM does (longest: {longest:,}): "
        f"{remedy} to serve them"
    )


def _how_to_serve(num_tokens: int, model: ModelSpec | None) -> str:
    """The remedy for a request of so many tokens: a longer max_model_len, as far as the model goes."""
    if model is None or num_tokens <= model.max_model_len:
        return f"raise max_model_len to {num_tokens:,}"
    return f"take a model with a longer context than {model.name} ({model.max_model_len:,} tokens)"
