"""The batching policy that a scenario asks for, speculation, and what they cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from windtunnel.scenarios.errors import ScenarioUnreadable
from windtunnel.scenarios.ledger import WINDTUNNEL_DEFAULT, Ledger
from windtunnel.scenarios.schema import (
    ContinuousBatching,
    DynamicBatching,
    Speculative,
    StaticBatching,
    SwapBatching,
)
from windtunnel.sim.cost.fitted import FittedCost
from windtunnel.sim.cost.roofline import RooflineCost, RooflineFactors
from windtunnel.sim.cost.swap import SwapCost
from windtunnel.sim.deployment.model import ModelSpec, UnsupportedModel, is_bundled, load_model
from windtunnel.sim.engine.batches import BatchExecution
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.dynamic import DynamicConfig
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.engine.static import StaticConfig
from windtunnel.sim.engine.swap import SwapConfig
from windtunnel.sim.speculation import Acceptance, DraftCost, Drafting, FixedDraftCost

if TYPE_CHECKING:
    from windtunnel.scenarios.engine import Hardware

NS_PER_S = 1_000_000_000
SWAP_SPACE_BYTES = 4 * 2**30
"""Default of vLLM V0's ``--swap-space`` (4 GiB per GPU)."""
PCIE_BYTES_PER_S = 25 * 10**9
"""About what large copies reach over PCIe 4.0 x16, whose peak is 32 GB/s each way."""

Policy = StaticConfig | DynamicConfig | SwapConfig


class Batching(NamedTuple):
    """The policy, None for continuous batching, and what its copies cost if it swaps."""

    policy: Policy | None
    swap_cost: SwapCost | None


def make_batching(ledger: Ledger, hardware: Hardware, config: SchedulerConfig) -> Batching:
    """The policy of the scenario's [batching].

    Raises ScenarioError for settings that contradict each other, ScenarioUnreadable for a file that cannot be read.
    """
    spec = ledger.loaded.scenario.batching
    for key, value in spec.model_dump(exclude_none=True).items():
        ledger.note("batching", key, value)
    keys = tuple(type(spec).model_fields)
    return ledger.attempt("batching", keys, lambda: _batching(ledger, hardware, config))


def _batching(ledger: Ledger, hardware: Hardware, config: SchedulerConfig) -> Batching:
    spec = ledger.loaded.scenario.batching
    match spec:
        case ContinuousBatching():
            policy = SwapConfig(0, "recompute", prefill_first=True) if spec.prefill_first else None
            if policy is not None:
                _tell_that_it_is_synchronous(ledger, hardware, "prefill_first")
            return Batching(policy, None)
        case StaticBatching():
            return Batching(_static(spec), None)
        case DynamicBatching():
            return Batching(_dynamic(ledger, spec), None)
    return _swap(ledger, spec, hardware, config)


def _static(spec: StaticBatching) -> StaticConfig:
    timeout_ns = None if spec.batch_timeout is None else round(spec.batch_timeout * NS_PER_S)
    return StaticConfig(spec.batch_size, timeout_ns, _execution(spec))


def _execution(spec: StaticBatching | DynamicBatching) -> BatchExecution:
    given = spec.model_dump(include={"kv_reserve", "answers", "max_prefill_tokens"}, exclude_none=True)
    return BatchExecution(**given)


_QUEUE_POLICY = ("max_queue_size", "default_timeout_microseconds", "timeout_action")


def _dynamic(ledger: Ledger, spec: DynamicBatching) -> DynamicConfig:
    given = spec.model_dump(exclude_none=True, exclude={"policy", "config", "kv_reserve", "answers"})
    given.pop("max_prefill_tokens", None)
    queue = {key: given.pop(key) for key in _QUEUE_POLICY if key in given}
    if "preferred_batch_size" in given:
        given["preferred_batch_size"] = tuple(given["preferred_batch_size"])
    if spec.config is not None:
        base = _pbtxt(ledger, spec.config)
    elif spec.max_batch_size is None:
        raise ValueError("dynamic batching needs max_batch_size, or a config.pbtxt that says it (config)")
    else:
        base = DynamicConfig(given["max_batch_size"])
    if queue:
        given["default_queue_policy"] = replace(base.default_queue_policy, **queue)
    return replace(base, **given, execution=_execution(spec))


def _pbtxt(ledger: Ledger, name: str) -> DynamicConfig:
    from windtunnel.sim.deployment.triton_config import PbtxtError, from_pbtxt

    path = ledger.loaded.path_of("batching", "config", name)
    try:
        imported = from_pbtxt(_text(path, "config"))
    except PbtxtError as error:
        raise ScenarioUnreadable(f"{path}: {error}") from error
    ledger.note("batching", "config.pbtxt", _told(imported.config), str(path))
    if imported.ignored:
        ledger.notes.append(f"{path}: plays no part here: {', '.join(imported.ignored)}.")
    return imported.config


def _told(config: DynamicConfig) -> str:
    sizes = "/".join(map(str, config.preferred_batch_size)) or "none"
    return (
        f"max_batch_size {config.max_batch_size}, preferred_batch_size {sizes}, max_queue_delay_microseconds "
        f"{config.max_queue_delay_microseconds}, instance_count {config.instance_count}"
    )


def _text(path: Path, what: str) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else f"not UTF-8 text ({error.reason})"
        raise ScenarioUnreadable(f"cannot read {what} {path}: {reason}") from error


def _swap(ledger: Ledger, spec: SwapBatching, hardware: Hardware, config: SchedulerConfig) -> Batching:
    block_bytes = spec.block_bytes
    if block_bytes is None:
        if hardware.model is None:
            raise ValueError("swapping copies KV blocks: give a model, or block_bytes, so that their size is known")
        kv_dtype = ledger.loaded.scenario.deployment.kv_cache_dtype or "auto"
        block_bytes = config.block_size * hardware.model.kv_bytes_per_token(hardware.tensor_parallel_size, kv_dtype)
        ledger.note("batching", "block_bytes", block_bytes, "model config")
    bytes_per_s = spec.pcie_bandwidth
    if bytes_per_s is None:
        bytes_per_s = PCIE_BYTES_PER_S
        ledger.note("batching", "pcie_bandwidth", bytes_per_s, f"{WINDTUNNEL_DEFAULT}: large copies over PCIe 4.0 x16")
    cost = SwapCost(block_bytes, bytes_per_s)
    _tell_that_it_is_synchronous(ledger, hardware, "swapping")
    num_blocks = spec.num_cpu_blocks
    if num_blocks is not None and spec.swap_space is not None:
        raise ValueError("swap_space and num_cpu_blocks say the same thing twice: leave one out")
    if num_blocks is None:
        space_bytes = spec.swap_space
        if space_bytes is None:
            space_bytes = SWAP_SPACE_BYTES
            ledger.note("batching", "swap_space", space_bytes, "vLLM V0 default (4 GiB per GPU)")
        num_blocks = cost.num_cpu_blocks(space_bytes)
    return Batching(SwapConfig(num_blocks, "swap", prefill_first=bool(spec.prefill_first)), cost)


def _tell_that_it_is_synchronous(ledger: Ledger, hardware: Hardware, policy: str) -> None:
    """Else a comparison with continuous batching, which is not by default, would measure that difference."""
    if (
        hardware.gpu is not None
        and hardware.version.async_scheduling
        and ledger.loaded.scenario.engine.async_scheduling is None
    ):
        ledger.warnings.append(
            f"{policy} is simulated with synchronous scheduling, continuous batching by default with asynchronous: to "
            "compare the two policies alone, set async_scheduling = false for both"
        )


# -- speculation


def make_drafting(ledger: Ledger, hardware: Hardware, cost: CostModel, seed: int) -> Drafting | None:
    """How the drafts of the scenario's [speculative] fare and what they cost; None without speculation.

    Raises ScenarioError for settings that lack something, ScenarioUnreadable for a file that cannot be read.
    """
    spec = ledger.loaded.scenario.speculative
    if spec is None or spec.num_speculative_tokens == 0:
        return None
    keys = ("acceptance", *_SAY_ACCEPTANCE, "num_speculative_tokens", "draft_model", "draft_s", "method")
    ledger.attempt("speculative", keys, lambda: _check_is_complete(spec))
    if spec.ignored:
        ledger.notes.append(f"Speculation: plays no part here: {', '.join(spec.ignored)}.")
    acceptance = ledger.attempt("speculative", keys, lambda: _acceptance(ledger, spec))
    drafter = ledger.attempt("speculative", keys, lambda: _draft_cost(ledger, spec, hardware, cost))
    ledger.note("speculative", "mean_acceptance_length", round(acceptance.mean_length, 4), "acceptance")
    assert spec.num_speculative_tokens is not None, "_check_is_complete asks for it"
    return Drafting(acceptance, spec.num_speculative_tokens, drafter, seed)


_SAY_ACCEPTANCE = ("synthetic_acceptance_rates", "synthetic_acceptance_length")
"""vLLM's names for what is called acceptance here."""


def _check_is_complete(spec: Speculative) -> None:
    """Raise ValueError for what is missing or said twice."""
    if spec.method is None:
        raise ValueError("speculation needs to know who drafts: give a method, such as eagle3, mtp or ngram")
    if spec.num_speculative_tokens is None:
        raise ValueError(
            "speculation needs num_speculative_tokens, the tokens drafted for each request and step, such as 3 "
            "(0 is no speculation)"
        )
    given = [key for key in ("acceptance", *_SAY_ACCEPTANCE) if getattr(spec, key) is not None]
    if not given:
        raise ValueError(
            "speculation needs to know how many drafts hold: give acceptance, such as 0.7 (each draft token holds with "
            "that probability if those before it did) or the rates per position of your own server "
            "(spec_decode_per_position_acceptance_rates of vllm bench serve)"
        )
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} say the same thing twice: leave all but one out")


def _acceptance(ledger: Ledger, spec: Speculative) -> Acceptance:
    given, num_tokens = spec.acceptance, spec.num_speculative_tokens
    assert num_tokens is not None, "_check_is_complete asks for it"
    if spec.synthetic_acceptance_length is not None:
        return Acceptance.of_length(spec.synthetic_acceptance_length, num_tokens)
    if spec.synthetic_acceptance_rates is not None:
        return _per_position(spec.synthetic_acceptance_rates, num_tokens, "synthetic_acceptance_rates")
    if isinstance(given, str):
        return _recorded(ledger.loaded.path_of("speculative", "acceptance", given), num_tokens)
    if isinstance(given, float):
        return Acceptance.fixed(given, num_tokens)
    assert given is not None, "_check_is_complete asks for it"
    return _per_position(given, num_tokens, "acceptance")


def _per_position(rates: list[float], num_tokens: int, where: str) -> Acceptance:
    if len(rates) < num_tokens:
        raise ValueError(
            f"{where} has {len(rates)} rates, one for each position of a draft is needed and num_speculative_tokens is "
            f"{num_tokens}"
        )
    return Acceptance(tuple(rates[:num_tokens]))


_RATES_KEY = "spec_decode_per_position_acceptance_rates"


def _recorded(path: Path, num_tokens: int) -> Acceptance:
    """From a result of ``vllm bench serve``, a JSON list, or one number of accepted tokens a line."""
    text = _text(path, "acceptance")
    try:
        data: Any = json.loads(text)
    except RecursionError:
        raise ScenarioUnreadable(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError:
        data = None
    if not isinstance(data, (dict, list)):
        data = [_whole(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    try:
        return _of_result(data, num_tokens) if isinstance(data, dict) else _of_counts(data, num_tokens)
    except ValueError as error:
        raise ScenarioUnreadable(f"{path}: {error}") from error


def _of_result(result: dict[str, Any], num_tokens: int) -> Acceptance:
    rates = result.get(_RATES_KEY)
    if not isinstance(rates, list):
        raise ValueError(f"has no list {_RATES_KEY}: vllm bench serve writes it if the server speculates")
    if not all(isinstance(rate, (int, float)) and not isinstance(rate, bool) for rate in rates):
        raise ValueError(f"{_RATES_KEY} must hold numbers between 0 and 1")
    return _per_position(rates, num_tokens, _RATES_KEY)


def _of_counts(counts: list[Any], num_tokens: int) -> Acceptance:
    if not all(isinstance(count, int) and not isinstance(count, bool) for count in counts):
        raise ValueError("must hold whole numbers: how many tokens of each draft were accepted")
    return Acceptance.recorded(counts, num_tokens)


def _whole(path: Path, number: int, line: str) -> int:
    try:
        return int(line)
    except ValueError:
        raise ScenarioUnreadable(
            f"{path}:{number}: {line.strip()[:40]!r} is no whole number of accepted tokens"
        ) from None


def _draft_cost(
    ledger: Ledger, spec: Speculative, hardware: Hardware, cost: CostModel
) -> DraftCost | FixedDraftCost | None:
    assert spec.num_speculative_tokens is not None, "_check_is_complete asks for it"
    if spec.draft_s is not None:
        return FixedDraftCost(spec.draft_s)
    if spec.method == "ngram":
        return None
    if not isinstance(cost, RooflineCost | FittedCost) or hardware.model is None or hardware.gpu is None:
        ledger.warnings.append(
            f"what drafting with {spec.method} costs is not known under the cost model {cost.name}, so it is taken to "
            "be free: give draft_s, the time that it adds to a step"
        )
        return None
    drafter = _drafter(ledger, spec, hardware.model)
    if isinstance(cost, FittedCost):
        ledger.notes.append("What drafting costs comes from the roofline, uncalibrated: the profile knows no drafter.")
    factors = cost.factors if isinstance(cost, RooflineCost) else RooflineFactors()
    own = RooflineCost(
        drafter,
        hardware.gpu,
        hardware.tensor_parallel_size,
        kv_cache_dtype=ledger.loaded.scenario.deployment.kv_cache_dtype or "auto",
        factors=replace(factors, host_s=0.0),
    )
    return DraftCost(own, spec.num_speculative_tokens)


def _drafter(ledger: Ledger, spec: Speculative, model: ModelSpec) -> ModelSpec:
    """The model that drafts: the one named, or one layer of the model itself, as the heads of eagle and mtp have."""
    if spec.draft_model is not None:
        path = ledger.loaded.path_of("speculative", "draft_model", spec.draft_model)
        if path.exists() or spec.method == "draft_model" or is_bundled(spec.draft_model):
            return _named(path, ledger.loaded.model_of("speculative", "draft_model", spec.draft_model))
        ledger.notes.append(f"Of the drafter {spec.draft_model} only the name is known.")
    elif spec.method == "draft_model":
        raise ValueError("method draft_model needs to know the model that drafts: give draft_model")
    ledger.notes.append(f"Drafting with {spec.method} is priced as one layer and the head of {model.name} a token.")
    return replace(model, num_layers=1, num_moe_layers=min(1, model.num_moe_layers))


def _named(path: Path, name: str) -> ModelSpec:
    try:
        return load_model(name)
    except OSError as error:
        raise ScenarioUnreadable(f"cannot read model {path}: {error.strerror or error}") from error
    except UnsupportedModel:
        raise
    except ValueError as error:
        raise (ScenarioUnreadable(str(error)) if path.exists() else error) from None
