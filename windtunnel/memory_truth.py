"""A real start-up beside the formula: whether it can be true, what it replaces, and where the two are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from windtunnel.memory_inputs import Found
from windtunnel.memory_settings import is_setting, read_setting
from windtunnel.sim.deployment.gpu import GIB, GpuSpec, bundled_gpus, load_gpu
from windtunnel.sim.deployment.memory import JudgedPlan
from windtunnel.sim.deployment.memory_checks import Judgement, judge
from windtunnel.sim.deployment.memory_plan import DOES_NOT_START, OK, RESERVE_BYTES, UNSAFE, MemoryPlan, make_plan
from windtunnel.sim.deployment.memory_remedies import find_remedies
from windtunnel.sim.deployment.memory_request import MemoryRequest
from windtunnel.sim.deployment.model import ModelSpec, load_model
from windtunnel.sim.deployment.versions import profile

MEASURED, FORMULA, GIVEN = "measured", "formula", "given"
CORRECTED = "formula, corrected"
FROM_BLOCKS, FROM_TOKENS, FROM_BYTES = "measured blocks", "measured tokens", "measured bytes"
TAKEN = "taken"
"""Origins of a figure: read as such, computed by the formula, given by the user, derived from what was read, assumed
where the server's is not known."""

SAME_CARD = 0.05
"""Totals of one kind of card that drivers report are closer than that; kinds are further apart."""
SLACK = 1.02
"""Weights are counted from shapes; a pool beside them is impossible only if it is over by more than that."""


# --- whether it can be


def check_settings(found: Found) -> None:
    """Raise ValueError, with the place, for a setting that was read and is out of range."""
    for name, value in found.settings.items():
        if is_setting(name):
            try:
                read_setting(name, value)
            except ValueError as error:
                raise ValueError(f"{found.place(name)}: {error}") from None


def check_model(found: Found, wanted: str | ModelSpec | None) -> tuple[str, ...]:
    """Raise ValueError if a pool that was read is that of another model than ``wanted``; say if that is not known."""
    read = found.settings.get("model")
    if found.measured is None or wanted is None or read is None:
        return ()
    names = (read, wanted if isinstance(wanted, str) else wanted.name)
    if str(names[0]).casefold() == str(names[1]).casefold():
        return ()
    theirs, ours = _spec(read), _spec(wanted)
    if theirs is None or ours is None:
        return (f"{found.place('model')} is of the model {names[0]!r}, which is taken to be {names[1]}.",)
    if _memory_of(theirs) != _memory_of(ours):
        raise ValueError(
            f"{found.place('model')}: this server ran {names[0]}, and --model is {names[1]}, another model: its KV "
            "cache says nothing of that one. Leave --model out, or plan without --from-log and --from-metrics"
        )
    return ()


def _spec(model: str | ModelSpec) -> ModelSpec | None:
    if isinstance(model, ModelSpec):
        return model
    try:
        return load_model(model)
    except (ValueError, OSError):
        return None


def _memory_of(model: ModelSpec) -> tuple[int, int]:
    """What a model's memory follows from: two checkpoints of one architecture have both in common."""
    return model.weight_bytes(), model.kv_bytes_per_token(1, "auto")


def check_card(found: Found, named: str | GpuSpec | None, given_gib: Any) -> None:
    """Raise ValueError if a log tells another total than the card has that is named, or the total that is given."""
    total_gib = found.settings.get("gpu_memory_gib")
    if total_gib is None:
        _check_free(found, named, given_gib)
        return
    where, remedy = found.place("gpu_memory_gib"), "leave it out, or plan without the log"
    if given_gib is not None:
        given = _number(given_gib)
        if abs(given / total_gib - 1) > SAME_CARD:
            raise ValueError(
                f"{where}: the card has {total_gib:.2f} GiB, and --gpu-memory-gib is {given:g}, which must be within "
                f"{SAME_CARD:.0%} of it: {remedy}"
            )
        return
    if named is None:
        return
    card = named if isinstance(named, GpuSpec) else load_gpu(named)
    if abs(card.memory_bytes / GIB / total_gib - 1) > SAME_CARD:
        raise ValueError(
            f"{where}: the card has {total_gib:.2f} GiB, and --gpu {card.name} has {card.memory_bytes / GIB:.2f} GiB, "
            f"which must be within {SAME_CARD:.0%} of it. Name the server's card{_near(total_gib)}, or {remedy}"
        )


def _check_free(found: Found, named: str | GpuSpec | None, given_gib: Any) -> None:
    """Raise ValueError if a log without the total tells more free memory than the card has that is named."""
    free_gib = found.settings.get("free_memory_gib")
    if free_gib is None or (named is None and given_gib is None):
        return
    card = load_gpu(named) if isinstance(named, str) else named
    if given_gib is not None:
        total_gib, what = _number(given_gib), "--gpu-memory-gib is"
    else:
        assert card is not None, "one of both is given"
        total_gib, what = card.memory_bytes / GIB, f"--gpu {card.name} has"
    if free_gib > total_gib:
        raise ValueError(
            f"{found.place('free_memory_gib')}: {free_gib:.2f} GiB of the card's memory are free, and {what} "
            f"{total_gib:.2f} GiB in all. Name the server's card{_near(free_gib)}, or plan without the log"
        )


def _number(given_gib: Any) -> float:
    """The total as given; not a number, of which nothing is said here, for what is read as none elsewhere."""
    try:
        return float(given_gib)
    except (TypeError, ValueError):
        return math.nan


def _near(total_gib: float) -> str:
    cards = [load_gpu(name) for name in bundled_gpus()]
    near = [card.name for card in cards if abs(card.memory_bytes / GIB / total_gib - 1) <= SAME_CARD]
    return f" ({', '.join(near[:4])})" if near else ""


def check_pool(found: Found, plan: MemoryPlan) -> None:
    """Raise ValueError for a measured KV cache that the card cannot hold, alone or beside the weights."""
    total, held, pool = plan.total_bytes, plan.weights_bytes, max(plan.kv_cache_bytes, plan.available_kv_cache_bytes)
    if origin_of_available(found, plan) == FORMULA:
        pool = plan.kv_cache_bytes
    figure = next((name for name in _POOL if found.facts.get(name) is not None), "available_kv_cache_bytes")
    told = f"{found.place(figure)}: a KV cache of {_gib(pool)} on each GPU{_counted(found, plan)}"
    card = f"does not fit the card: {plan.request.gpu.name} has {_gib(total)} in all"
    remedy = (
        "give the card, the model, the parallelism and the kv_cache_dtype of the server that was measured (--gpu, "
        "--model, -tp, --kv-cache-dtype), or plan without it"
    )
    if pool > total:
        raise ValueError(f"{told} {card}; {remedy}")
    if pool + held > SLACK * total:
        raise ValueError(f"{told} beside weights of {_gib(held)} {card}; {remedy}")


_POOL = ("available_kv_cache_bytes", "num_gpu_blocks", "kv_cache_tokens")


def _counted(found: Found, plan: MemoryPlan) -> str:
    if found.facts.get("available_kv_cache_bytes") is not None:
        return ""
    block = plan.layout.block_bytes[plan.stages.index(plan.tightest)]
    return f" ({plan.num_gpu_blocks:,} blocks of {block:,} bytes)"


LENGTH_IS_TAKEN = " (taken: the server's max_model_len is not known)"
TOO_LONG = ("max_model_len_exceeds_kv_cache", "budget_below_max_model_len")
"""Causes that a shorter max_model_len takes away."""


def refused_though_it_ran(found: Found, plan: MemoryPlan, *, length_is_taken: bool) -> Iterator[str]:
    """A sentence on a server that runs though the plan of it would not start; a guess of its length explains it."""
    judgement = judge(plan)
    if not _has_run(found) or judgement.verdict != DOES_NOT_START:
        return
    if length_is_taken and judgement.cause in TOO_LONG:
        return
    yield (
        f"By its rules the plan would not start, though this server did ({judgement.reason}): it had another "
        "model, release or options than this plan."
    )


def taken_length(found: Found, plan: MemoryPlan) -> str:
    """That max_model_len is not known, what is taken for it, and what it is at most, as a sentence."""
    length, longest = plan.settings.max_model_len, plan.longest_request()
    told = f"{_source(found)}: max_model_len is not in {found.called}: {length:,} is taken; give --max-model-len"
    if _has_run(found) and 0 < longest < length:
        return f"{told}.  The pool holds no request of more than {longest:,} tokens."
    return f"{told}."


def disagreements(found: Found, plan: MemoryPlan, *, length_is_taken: bool) -> Iterator[str]:
    """Sentences on figures of one pool that do not go together for this model: nothing can be learnt from them."""
    yield from _blocks_beside_tokens(found, plan, length_is_taken)
    yield from _blocks_beside_bytes(found, plan)


def _blocks_beside_tokens(found: Found, plan: MemoryPlan, length_is_taken: bool) -> Iterator[str]:
    """Layers of one kind hold block_size tokens a block, or since 0.20.1 int(concurrency x max_model_len), which is
    less where that is no multiple of a block, yet more than half of it from a length of one block on."""
    tokens, blocks, size = found.facts.get("kv_cache_tokens"), found.facts.get("num_gpu_blocks"), plan.block_size
    if not tokens or not blocks or plan.layout.is_hybrid:
        return
    most = blocks * size
    is_likely, is_counted = most // 2 < tokens <= most, abs(tokens - plan.kv_cache_tokens) <= 1
    if not (tokens == most or (is_likely if length_is_taken else is_counted)):
        yield (
            f"{found.place('kv_cache_tokens')}: {tokens:,} tokens are not {blocks:,} blocks of {size}, and layers of "
            "one kind, which this model has, do not share blocks: the figures are of two servers, or the model, "
            "block_size, max_model_len or context parallelism is another."
        )


def _blocks_beside_bytes(found: Found, plan: MemoryPlan) -> Iterator[str]:
    available, measured = found.facts.get("available_kv_cache_bytes"), found.measured
    if available is None or measured is None or plan.request.num_gpu_blocks_override is not None:
        return
    if measured.num_gpu_blocks is None and measured.kv_cache_tokens is None:
        return
    block = plan.layout.block_bytes[plan.stages.index(plan.tightest)]
    counted = plan.num_gpu_blocks * block
    if abs(counted - available) > 0.02 * abs(available) + block + 0.01 * GIB:
        yield (
            f"The measured {plan.num_gpu_blocks:,} blocks of {block:,} bytes are {_gib(counted)}, not the "
            f"{_gib(available)} that {found.place('available_kv_cache_bytes')} tells: the server had another model, "
            "kv_cache_dtype, block_size or parallelism than this plan."
        )


# --- what it replaces

_PARTS = ("weights_bytes", "activation_bytes", "non_torch_bytes")


def measured_plan(request: MemoryRequest, found: Found, formula: MemoryPlan) -> MemoryPlan:
    """The plan with all that was measured in place of the formula's figures."""
    plan = make_plan(replace(request, measured=found.measured))
    facts = found.facts
    stages = list(plan.stages)
    if facts.get("weights_bytes") is not None:
        place = stages.index(plan.tightest)
        stages[place] = stages[place]._replace(weights_bytes=facts["weights_bytes"])
    changes = {name: facts[name] for name in _PARTS[1:] if facts.get(name) is not None}
    inside, graphs = measured_graphs(found, formula)
    if graphs is not None:
        changes["cudagraph_bytes"] = graphs
    overheads = replace(plan.overheads, cudagraph_inside=inside, **changes)
    return replace(plan, stages=tuple(stages), overheads=overheads)


def measured_graphs(found: Found, formula: MemoryPlan) -> tuple[bool, int | None]:
    """Whether CUDA graphs were in the budget, and their bytes if they were told: the estimate that was taken out of
    the budget, or what was captured beside it."""
    facts = found.facts
    applied = facts.get("cudagraph_estimate_applied")
    inside = formula.graphs_inside if applied is None else bool(applied)
    if not inside:
        return inside, facts.get("cudagraph_captured_bytes")
    estimate, share = facts.get("cudagraph_bytes"), facts.get("cudagraph_share")
    if estimate is None and share is not None:
        estimate = round(share * formula.total_bytes)
    return inside, estimate


def judged(
    plan: MemoryPlan, found: Found, gap_bytes: int | None, *, length_is_taken: bool = False, with_remedies: bool = True
) -> JudgedPlan:
    """The measured plan with its verdict; remedies are planned by the formula with what it was off by.

    What the real start-up shows, that it failed or that it runs, is the verdict, whatever the formula makes of the
    parts that were not measured.
    """
    judgement = judge(plan)
    if found.failure is not None and judgement.verdict != DOES_NOT_START:
        why = "The plan itself sees room for it."
        return JudgedPlan(plan, Judgement(DOES_NOT_START, found.failure.kind, found.failure.sentence, why))
    if found.later_failure is not None:
        why = f"It started, and ran out of memory later.  {found.later_failure.sentence}"
        return JudgedPlan(plan, Judgement(UNSAFE, found.later_failure.kind, "", why))
    if _has_run(found):
        length = f"{plan.settings.max_model_len:,} tokens{LENGTH_IS_TAKEN if length_is_taken else ''}"
        fits = f"{plan.max_concurrency:.2f} requests of {length} fit at once."
        why = judgement.why if judgement.verdict == OK and not length_is_taken else fits
        return JudgedPlan(plan, Judgement(OK, "", "", f"{found.evidence}  {why}"))
    if not with_remedies:
        return JudgedPlan(plan, judgement)
    corrected = replace(plan.request, measured=None, correction_bytes=gap_bytes or 0)
    return JudgedPlan(plan, judgement, find_remedies(replace(plan, request=corrected), judgement))


def _has_run(found: Found) -> bool:
    """Whether something shows that the memory was enough, and nothing that it was not."""
    return bool(found.evidence) and found.failure is None and found.later_failure is None


def margin_is_measured(found: Found, plan: MemoryPlan) -> bool:
    """Whether what is left on the card follows from measured figures alone."""
    inside, graphs = measured_graphs(found, plan)
    return "free_memory_gib" in found.settings and not plan.is_given and (inside or graphs is not None)


def small_margin(found: Found, plan: MemoryPlan) -> tuple[str, ...]:
    """That a server that runs has little to spare, if the measured figures say so."""
    if not _has_run(found) or not margin_is_measured(found, plan) or plan.margin_bytes >= RESERVE_BYTES:
        return ()
    return (
        f"By the measured figures {_gib(plan.margin_bytes)} of the card stay free, less than the "
        f"{RESERVE_BYTES / 2**20:.0f} MiB that vLLM itself keeps back: a later step, or another process, may find no "
        "memory.",
    )


def gap(real: MemoryPlan, formula: MemoryPlan) -> int | None:
    """Bytes that a GPU of the measured server had more for its KV cache than the formula says; None where the pool's
    size was given, so that it says nothing of the formula."""
    request = real.request
    if request.kv_cache_memory_bytes is not None:
        return None
    measured = request.measured
    assert measured is not None, "only a measured plan is beside the formula"
    told = measured.available_bytes is not None or measured.profiled_num_gpu_blocks is not None
    if request.num_gpu_blocks_override is not None and not told:
        return None
    place = formula.stages.index(formula.tightest)
    return real.stages[place].available_bytes - formula.stages[place].available_bytes


UNKNOWN_CAUSE = (
    "The plan does not see why that start-up failed, so that it cannot say what is enough: lower max_num_seqs, "
    "max_num_batched_tokens or gpu_memory_utilization, or set enforce_eager, and read the new log."
)
UNKNOWN_LATER_CAUSE = (
    "The plan does not see why the memory ran out while it ran: lower gpu_memory_utilization, max_num_seqs or "
    "max_num_batched_tokens, or look for another process on the card."
)


# --- where figures are from


def origin_of_available(found: Found, plan: MemoryPlan) -> str:
    """What the bytes available for the KV cache are from."""
    measured = found.measured
    if measured is None or measured.available_bytes is not None:
        return MEASURED
    if plan.request.num_gpu_blocks_override is not None:
        return FORMULA if measured.profiled_num_gpu_blocks is None else FROM_BLOCKS
    return FROM_TOKENS if measured.num_gpu_blocks is None else FROM_BLOCKS


def measured_origins(
    found: Found, plan: MemoryPlan, formula: MemoryPlan, *, length_is_taken: bool = False
) -> dict[str, str]:
    """For each figure of a measured plan what it is from."""
    facts, measured = found.facts, found.measured
    assert measured is not None, "only a measured plan has measured origins"
    origins = {name: MEASURED if facts.get(name) is not None else FORMULA for name in _PARTS}
    _, graphs = measured_graphs(found, formula)
    origins["cudagraph_bytes"] = FORMULA if graphs is None else MEASURED
    origins["available_kv_cache_bytes"] = origin_of_available(found, plan)
    origins["oom_margin_bytes"] = MEASURED if margin_is_measured(found, plan) else FORMULA
    if measured.num_gpu_blocks is not None:
        origins["num_gpu_blocks"] = MEASURED
    else:
        origins["num_gpu_blocks"] = FROM_BYTES if measured.kv_cache_tokens is None else FROM_TOKENS
    pool = FROM_BYTES if origins["num_gpu_blocks"] == FROM_BYTES else FROM_BLOCKS
    tokens, concurrency = facts.get("kv_cache_tokens"), facts.get("max_concurrency")
    origins["kv_cache_tokens"] = MEASURED if tokens == plan.kv_cache_tokens else pool
    is_logged = concurrency is not None and round(plan.max_concurrency, 2) == round(concurrency, 2)
    origins["max_concurrency"] = MEASURED if is_logged else pool
    if length_is_taken:
        origins["max_model_len"] = TAKEN
    return origins


def origins(plan: MemoryPlan, measured: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, str]:
    """What each figure of a plan is from: ``measured`` where it is there, else what was given, else the formula."""
    table = f"table of GPUs ({plan.request.gpu.memory_source})"
    made = {
        "total_bytes": GIVEN if "gpu_memory_gib" in given else table,
        "free_bytes": GIVEN if "free_memory_gib" in given else FORMULA,
        "requested_bytes": FORMULA,
        **dict.fromkeys((*_PARTS, "cudagraph_bytes", "available_kv_cache_bytes"), FORMULA),
        **dict.fromkeys(("num_gpu_blocks", "kv_cache_tokens", "max_concurrency", "oom_margin_bytes"), FORMULA),
    }
    if plan.source == "kv_cache_memory_bytes":
        made["available_kv_cache_bytes"] = GIVEN
    if plan.source == "num_gpu_blocks_override":
        made["num_gpu_blocks"] = GIVEN
    if plan.source == FORMULA and plan.request.correction_bytes:
        made["available_kv_cache_bytes"] = CORRECTED
    return {**made, **measured}


# --- beside the formula


def compare(found: Found, real: MemoryPlan, formula: MemoryPlan) -> dict[str, tuple[float | None, float]]:
    """For each figure that was measured, or follows from what was, its value and the formula's."""
    figures: dict[str, Any] = {name: found.facts.get(name) for name in _PARTS}
    inside, graphs = measured_graphs(found, formula)
    figures["cudagraph_bytes"] = graphs if inside == formula.graphs_inside else None
    if origin_of_available(found, real) != FORMULA:
        figures["available_kv_cache_bytes"] = real.available_kv_cache_bytes
    for name in ("num_gpu_blocks", "kv_cache_tokens"):
        figures[name] = found.facts.get(name)
    length = found.facts.get("max_concurrency_tokens")
    if length in (None, real.settings.max_model_len):
        figures["max_concurrency"] = found.facts.get("max_concurrency")
    return {name: (float(value), float(getattr(formula, name))) for name, value in figures.items() if value is not None}


@dataclass(frozen=True, slots=True)
class FormulaCheck:
    """The measured KV cache beside the formula's 90 % interval; bytes that are available on one GPU."""

    measured_bytes: int
    formula_bytes: int
    low_bytes: int
    high_bytes: int
    candidates: tuple[str, ...]
    """What the difference may come from; empty where there is none to speak of."""

    @property
    def is_within(self) -> bool:
        """Whether the measurement lies in the interval."""
        return self.low_bytes <= self.measured_bytes <= self.high_bytes

    @property
    def sentence(self) -> str:
        """The difference in words; empty where the measurement is as expected."""
        if self.is_within:
            return ""
        off = f" ({100 * (self.formula_bytes / self.measured_bytes - 1):+.1f} %)" if self.measured_bytes > 0 else ""
        causes = "; ".join(f"({number}) {text}" for number, text in enumerate(self.candidates, 1))
        return (
            f"The formula does not fit this server: it says {_gib(self.formula_bytes)} for the KV cache{off}, in "
            f"nine starts of ten {_gib(self.low_bytes)} to {_gib(self.high_bytes)}, and {_gib(self.measured_bytes)} "
            f"were measured.  The measurement counts; find the reason before you plan changes.  Candidates: {causes}."
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "is_within_interval": self.is_within,
            "measured_bytes": self.measured_bytes,
            "formula_bytes": self.formula_bytes,
            "low_bytes": self.low_bytes,
            "high_bytes": self.high_bytes,
            "candidates": list(self.candidates),
        }


def check_formula(
    found: Found, real: MemoryPlan, formula: MemoryPlan, stated: Mapping[str, Any]
) -> FormulaCheck | None:
    """The measurement beside the interval; ``stated`` are the settings that were read or given.

    None where the size of the pool was given or its bytes are not known.
    """
    off = gap(real, formula)
    if off is None:
        return None
    place = formula.stages.index(formula.tightest)
    expected = formula.stages[place].available_bytes
    low, high = formula.overheads.error_bytes
    rounding = formula.layout.block_bytes[place]
    if found.facts.get("available_kv_cache_bytes") is not None:
        rounding = round(0.005 * GIB)
    made = FormulaCheck(expected + off, expected, expected - high - rounding, expected - low + rounding, ())
    if made.is_within:
        return made
    return replace(made, candidates=tuple(_candidates(found, real, formula, stated)))


def _candidates(found: Found, real: MemoryPlan, formula: MemoryPlan, stated: Mapping[str, Any]) -> Iterator[str]:
    """What is apart in the log itself first, then what nobody stated, then what no log states."""
    inside, graphs = measured_graphs(found, formula)
    for name, words in _REASONS.items():
        was = graphs if name == "cudagraph_bytes" else found.facts.get(name)
        expected = getattr(formula, name) if name != "cudagraph_bytes" or formula.graphs_inside else 0
        if was is None or (name == "cudagraph_bytes" and not inside):
            continue
        if abs(was - expected) > max(0.05 * expected, 0.1 * GIB):
            yield f"{words[0]} {_gib(was)}, by the formula {_gib(expected)}: {words[1]}"
    taken = {
        "model": formula.request.model.name,
        "engine": formula.request.version.label,
        **{name: getattr(formula.settings, name) for name in _TAKEN_SETTINGS},
        **{name: getattr(formula.request, name) for name in _TAKEN_OPTIONS},
    }
    unknown = [f"{name} ({value} is taken)" for name, value in taken.items() if name not in stated]
    if unknown:
        yield f"not stated by {_source(found)} or by you: {', '.join(unknown)}"
    if real.available_kv_cache_bytes < formula.available_kv_cache_bytes:
        yield "another process took memory of the GPU while vLLM measured, which then counts as its own"
    else:
        yield "another process freed memory of the GPU while vLLM measured"
    yield "another release, or flags and environment variables that the plan does not have (drafter, adapters, patches)"


_REASONS = {
    "weights_bytes": ("the weights took", "another checkpoint, quantisation or parallelism"),
    "cudagraph_bytes": ("vLLM's estimate of the CUDA graphs was", "its estimate can be far too high (see its log)"),
    "activation_bytes": ("the activation took", "another token budget, or encoder inputs"),
    "non_torch_bytes": ("memory outside of torch took", "other processes, or libraries for communication"),
}
_TAKEN_SETTINGS = ("gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs")
_TAKEN_OPTIONS = ("tensor_parallel_size", "kv_cache_dtype")


def _source(found: Found) -> str:
    return found.measured.source if found.measured else "what was read"


# --- settings that differ


def differences(found: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Settings that were given otherwise than the server had them."""
    both = (name for name in own if name in found)
    return [name for name in both if _differs(name, found[name], own[name])]


def _differs(name: str, theirs: Any, ours: Any) -> bool:
    if name == "engine":
        return _minor(str(theirs)) != _minor(str(ours))
    if name == "dtype":
        return "auto" not in (theirs, ours) and str(theirs) != str(ours)
    return is_setting(name) and read_setting(name, ours) != read_setting(name, theirs)


def _minor(engine: str) -> str:
    return ".".join(profile(engine).release.split(".")[:2])


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"
