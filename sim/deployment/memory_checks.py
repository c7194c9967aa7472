"""Whether vLLM starts with a plan, and if not, in its own words why not.

The checks are in the order in which vLLM meets them.  The words are those of the release, so that a user's search finds
them; memory that runs out at a step without a check of its own is PyTorch's ``CUDA out of memory``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from windtunnel.sim.deployment.gpu import GIB
from windtunnel.sim.deployment.memory_at_start import graph_spread
from windtunnel.sim.deployment.memory_plan import (
    DOES_NOT_START,
    OK,
    RESERVE_BYTES,
    UNSAFE,
    MemoryPlan,
    in_use,
)
from windtunnel.sim.deployment.profile_run import FLOAT32_BYTES, is_amd, sampler_bytes

UNKNOWN_ARCHITECTURE = "architecture_not_supported"
"""The cause where a release has no such model."""


class Judgement(NamedTuple):
    """A verdict with its cause."""

    verdict: str
    """ok, unsafe or does_not_start."""
    cause: str
    """A kind of error, as ``startup_log.ERROR_KINDS`` has them, UNKNOWN_ARCHITECTURE, or a kind of risk; empty if all
    is well."""
    error: str
    """What vLLM prints, as far as it can be told beforehand; empty if it starts."""
    why: str
    """What it comes from, with numbers."""

    @property
    def reason(self) -> str:
        """Both in one text."""
        return f"{self.error}  {self.why}" if self.error else self.why


def judge(plan: MemoryPlan, *, asks_architecture: bool = True) -> Judgement:
    """The first thing that stops the start, else what makes it unsafe, else that it is well.

    Without ``asks_architecture`` it does not matter whether the release has such a model.
    """
    first: tuple[_Check, ...] = (_architecture,) if asks_architecture else ()
    for check in (*first, *_CHECKS, *_RISKS):
        for found in check(plan):
            return found
    return Judgement(OK, "", "", _well(plan))


def starts(plan: MemoryPlan) -> bool:
    """Whether no check of the memory stops the start, safe or not."""
    return not any(found for check in _CHECKS for found in check(plan))


def _well(plan: MemoryPlan) -> str:
    length = plan.settings.max_model_len
    return (
        f"{plan.max_concurrency:.2f} requests of {length:,} tokens fit at once, and {gib(plan.margin_bytes)} of the "
        "card stay free."
    )


# --- what stops the start


def _architecture(plan: MemoryPlan) -> Iterator[Judgement]:
    """Releases that have no such model, be it not yet or no longer."""
    version, architecture = plan.request.version, plan.request.model.architecture
    since, until = version.architecture_since(architecture), version.architecture_until(architecture)
    if plan.source == "measured" or (since is None and until is None):
        return
    if until is not None:
        error = (
            f"Model architecture {architecture} was supported in vLLM until v{until}, and is not supported anymore. "
            "Please use an older version of vLLM if you want to use this model architecture."
        )
        yield Judgement(DOES_NOT_START, UNKNOWN_ARCHITECTURE, error, f"Take vllm-{until} or an earlier engine.")
        return
    yield Judgement(
        DOES_NOT_START,
        UNKNOWN_ARCHITECTURE,
        f"Model architectures ['{architecture}'] are not supported for now.",
        f"vLLM has it since {since}: take the engine vllm-{since} or a later one.  (With a later Transformers the "
        "release may run that library's own modules, whose memory is not planned.)",
    )


def _context(plan: MemoryPlan) -> Iterator[Judgement]:
    request, length, model = plan.request, plan.settings.max_model_len, plan.request.model
    if length <= model.max_model_len or request.allows_long_max_model_len:
        return
    yield Judgement(
        DOES_NOT_START,
        "max_model_len_exceeds_model",
        f"User-specified max_model_len ({length}) is greater than the derived max_model_len ({model.max_model_len}).",
        f"{model.name} is made for contexts of up to {model.max_model_len:,} tokens.",
    )


def _free_memory(plan: MemoryPlan) -> Iterator[Judgement]:
    at_best = plan.free_interval.high
    if plan.is_given or plan.source == "measured" or at_best >= plan.requested_bytes:
        return
    share, total = plan.settings.gpu_memory_utilization, plan.total_bytes
    known = (
        ""
        if plan.request.free_memory_bytes is not None
        else f" (an estimate: CUDA's context takes the rest; {gib(at_best)} at best)"
    )
    most = math.floor(plan.free_bytes / total * 1000) / 1000
    why = f"{gib(plan.free_bytes)} of {gib(total)} are free{known}: gpu_memory_utilization can be {most:g} at most."
    if plan.request.rules.checks_free_memory and not plan.request.runs_on_v0:
        error = (
            f"Free memory on device ({digits(plan.free_bytes)}/{digits(total)} GiB) on startup is less than desired "
            f"GPU memory utilization ({share:g}, {digits(plan.requested_bytes)} GiB). Decrease GPU memory utilization "
            "or reduce GPU memory used by other processes."
        )
        yield Judgement(DOES_NOT_START, "free_memory_below_desired", error, why)
    elif at_best < plan.requested_bytes + plan.graphs_outside_bytes - plan.activation_bytes:
        yield Judgement(DOES_NOT_START, "out_of_memory_kv_cache", _out_of("the KV cache is allocated"), why)


def _weights(plan: MemoryPlan) -> Iterator[Judgement]:
    most = max(stage.weights_bytes for stage in plan.stages)
    if plan.source == "measured" or most <= plan.free_interval.high:
        return
    yield Judgement(
        DOES_NOT_START,
        "out_of_memory_weights",
        _out_of("the weights are loaded"),
        f"The weights take {gib(most)} of each GPU, of which {gib(plan.free_bytes)} are free.",
    )


def _profile(plan: MemoryPlan) -> Iterator[Judgement]:
    needed = max(stage.weights_bytes for stage in plan.stages) + plan.activation_bytes + plan.non_torch_bytes
    if plan.source == "measured" or needed <= plan.free_interval.high:
        return
    yield Judgement(
        DOES_NOT_START,
        "out_of_memory_profiling",
        _out_of("the profile run computes max_num_batched_tokens tokens"),
        f"Weights, activation and non-torch memory take {gib(needed)}, of which {gib(plan.free_bytes)} are free.",
    )


def _nothing_left(plan: MemoryPlan) -> Iterator[Judgement]:
    """Before 0.20.1 V1 also asks for it where the number of blocks is given."""
    unchecked = plan.source == "num_gpu_blocks_override" and not plan.request.rules.checks_override
    by_memory = plan.source == "formula" or (unchecked and not plan.request.runs_on_v0)
    if not by_memory or plan.available_kv_cache_bytes > 0:
        return
    aside = (
        " (this flag also controls CPU memory reservation on the CPU backend, despite its name)"
        if plan.request.rules.mentions_cpu
        else ""
    )
    yield Judgement(
        DOES_NOT_START,
        "no_available_memory",
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
        f"engine{aside}.{guide(plan)}",
        f"{parts(plan)}: {gib(-plan.available_kv_cache_bytes)} too much.",
    )


def guide(plan: MemoryPlan) -> str:
    """The page that errors point to since 0.13."""
    if not plan.request.rules.names_guide:
        return ""
    return " See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."


def parts(plan: MemoryPlan) -> str:
    """The budget and what it is spent on, in words."""
    graphs = f" and CUDA graphs {gib(plan.cudagraph_bytes)}" if plan.graphs_inside and plan.cudagraph_bytes else ""
    join = "" if graphs else "and "
    return (
        f"Of the {gib(plan.requested_bytes)} that gpu_memory_utilization allows, the weights take "
        f"{gib(plan.weights_bytes)}, the activations {gib(plan.activation_bytes)}, {join}non-torch memory "
        f"{gib(plan.non_torch_bytes)}{graphs}"
    )


def _length(plan: MemoryPlan) -> Iterator[Judgement]:
    if plan.request.fits_length:
        if plan.largest_model_len() < 1:
            error = (
                "Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. Try "
                "increasing `gpu_memory_utilization`."
            )
            yield Judgement(DOES_NOT_START, "auto_fit_failed", error, f"{parts(plan)}.")
        return
    if plan.holds(plan.num_gpu_blocks):
        return
    needed, there, which = plan.blocks_needed(plan.settings.max_model_len), plan.num_gpu_blocks, "the pool has"
    null = ", the null block included" if plan.num_reserved_blocks else ""
    if plan.source == "num_gpu_blocks_override":
        which = "num_gpu_blocks_override gives"
        if not plan.request.rules.checks_override and not plan.request.runs_on_v0:
            there, which = plan.memory_blocks, "the memory holds, whatever num_gpu_blocks_override says,"
    why = f"One such request takes {needed:,} blocks{null}, and {which} {there:,}."
    yield Judgement(DOES_NOT_START, "max_model_len_exceeds_kv_cache", _too_long(plan), why)


def _too_long(plan: MemoryPlan) -> str:
    length, largest = plan.settings.max_model_len, plan.largest_model_len()
    if plan.request.runs_on_v0:
        most = plan.block_size * (plan.num_gpu_blocks // plan.request.pipeline_parallel_size)
        return (
            f"The model's max seq len ({length}) is larger than the maximum number of tokens that can be stored in KV "
            f"cache ({most}). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` "
            "when initializing the engine."
        )
    both = [
        (plan.layout.needed_bytes(length, place), plan.checked_bytes(plan.num_gpu_blocks, place))
        for place in range(len(plan.stages))
    ]
    needed, usable = max(both, key=lambda sizes: sizes[0] - sizes[1])
    estimate = ""
    if largest and plan.request.rules.names_largest_length:
        estimate = f"Based on the available memory, the estimated maximum model length is {largest}. "
    owner, aside = ("model's", " (which also controls CPU memory on the CPU backend)")
    if not plan.request.rules.mentions_cpu:
        owner, aside = "models's", ""  # as those releases spell it
    asked, there = _apart(needed, usable)
    return (
        f"To serve at least one request with the {owner} max seq len ({length}), ({asked} GiB KV cache is needed, "
        f"which is larger than the available KV cache memory ({there} GiB). {estimate}Try increasing "
        f"`gpu_memory_utilization`{aside} or decreasing `max_model_len` when initializing the engine.{guide(plan)}"
    )


def _states(plan: MemoryPlan) -> Iterator[Judgement]:
    most, seqs = plan.max_state_sequences, plan.settings.max_num_seqs
    if most is None or seqs <= most or plan.request.enforce_eager or not plan.request.rules.refuses_states:
        return
    yield Judgement(
        DOES_NOT_START,
        "mamba_blocks_exceeded",
        f"max_num_seqs ({seqs}) exceeds available Mamba cache blocks ({most}). Each decode sequence requires one Mamba "
        f"cache block, so CUDA graph capture cannot proceed. Please lower max_num_seqs to at most {most} or increase "
        "gpu_memory_utilization.",
        f"The pool has {most:,} blocks.",
    )


def _given_pool(plan: MemoryPlan) -> Iterator[Judgement]:
    if not plan.is_given or plan.source == "measured":
        return
    if plan.spent_bytes + plan.graphs_outside_bytes <= plan.free_interval.high:
        return
    yield Judgement(
        DOES_NOT_START,
        "out_of_memory_kv_cache",
        _out_of("the KV cache is allocated or CUDA graphs are captured"),
        f"A KV cache of {gib(plan.kv_cache_bytes)} ({plan.source}) and the rest sum up to "
        f"{gib(plan.spent_bytes + plan.graphs_outside_bytes)}, of which {gib(plan.free_bytes)} are free.",
    )


_Check = Callable[[MemoryPlan], Iterator[Judgement]]

_CHECKS: tuple[_Check, ...] = (
    _context,
    _free_memory,
    _weights,
    _profile,
    _nothing_left,
    _given_pool,
    _length,
    _states,
)


# --- what makes it unsafe


def _unsure_free_memory(plan: MemoryPlan) -> Iterator[Judgement]:
    """A share that is free on some start-ups of such cards and not on others."""
    free, asked = plan.free_interval, plan.requested_bytes
    checked = plan.request.rules.checks_free_memory and not plan.request.runs_on_v0
    if plan.is_given or plan.source == "measured" or free.low >= asked or not checked:
        return
    yield Judgement(
        UNSAFE,
        "free_memory_unsure",
        "",
        f"gpu_memory_utilization {plan.settings.gpu_memory_utilization:g} asks for {gib(asked)} of "
        f"{gib(plan.total_bytes)}, and {gib(free.low)} to {gib(free.high)} are free when vLLM begins (an estimate, "
        f"after {in_use(plan.request).source}): if it is less, it does not start.  --free-memory-gib tells what there "
        "is.",
    )


def _graphs_outside(plan: MemoryPlan) -> Iterator[Judgement]:
    if plan.margin_bytes >= plan.safe_margin_bytes or not plan.graphs_outside_bytes or plan.is_given:
        return
    if plan.source == "measured":
        return
    spread = graph_spread(amd=is_amd(plan.request.gpu)).captured_bytes
    beside, most = plan.free_interval.low - plan.requested_bytes, plan.cudagraph_bytes + spread
    cause, step = _exhausted_step(plan, beside, most)
    yield Judgement(
        UNSAFE,
        cause,
        "",
        f"CUDA graphs lie outside gpu_memory_utilization in {plan.request.version.label}: they take about "
        f"{gib(plan.cudagraph_bytes)} (one start-up in twenty {gib(most)} or more), and "
        f"{gib(plan.free_bytes - plan.requested_bytes)} are left on the card beside the budget, so {step} may run out "
        "of memory.",
    )


def _exhausted_step(plan: MemoryPlan, beside: int, graphs: int) -> tuple[str, str]:
    """Where memory would run out first, and the cause that it is.

    The budget's part for activations is free while graphs are captured.  After them V1 warms the sampler up on as many
    sequences as a step can have, with the logits of all of them (``compile_or_warm_up_model`` in ``gpu_worker.py``, as
    read in 0.8.0 to 0.25.1); other steps come with the load.
    """
    left = beside + plan.activation_bytes - graphs
    if left < 0:
        return "graphs_outside", "their capture"
    rows = min(plan.settings.max_num_seqs, plan.settings.max_num_batched_tokens)
    if left < sampler_bytes(plan.request.model, plan.request.version, rows) and not plan.request.runs_on_v0:
        return "sampler_warm_up", f"the warm-up of the sampler on {rows:,} sequences, which follows their capture,"
    return "graphs_outside", "a step with as many tokens as in the profile run"


def _small_margin(plan: MemoryPlan) -> Iterator[Judgement]:
    spread = plan.margin_spread_bytes
    if plan.margin_bytes >= plan.safe_margin_bytes:
        return
    what = (
        f"less than the {gib(spread)} by which {_uncertain(plan)} may be off"
        if spread > RESERVE_BYTES
        else f"less than the {RESERVE_BYTES / 2**20:.0f} MiB that vLLM keeps back when it suggests a pool"
    )
    yield Judgement(UNSAFE, "small_margin", "", f"Only {gib(plan.margin_bytes)} of the card stay free, {what}.")


def _uncertain(plan: MemoryPlan) -> str:
    """The estimates that the margin rests on."""
    parts = ["what is free at the start"] if plan.request.free_memory_bytes is None else []
    parts += ["the CUDA graphs"] if plan.cudagraph_bytes else []
    parts += ["the estimate of the other parts"] if plan.is_given else []
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def _overcorrected(plan: MemoryPlan) -> Iterator[Judgement]:
    """A correction learnt elsewhere that leaves less for the other parts than they can do with."""
    corrected = plan.request.correction_bytes
    if plan.source != "formula" or corrected <= 0:
        return
    parts = plan.consumed_bytes - plan.weights_bytes
    left, (least, why) = parts - min(corrected, parts), _least_parts(plan, parts)
    if left >= least:
        return
    capped = "; no more than all of it is given to the KV cache" if plan.overcorrection_bytes else ""
    yield Judgement(
        UNSAFE,
        "overcorrected",
        "",
        f"The correction of {corrected / GIB:+.2f} GiB leaves {gib(left)} of the budget for activations, non-torch "
        f"memory and graphs inside it, which take {gib(parts)} by the estimate and {gib(least)} at least ({why})"
        f"{capped}: it does not fit these settings.  Save one of a server that runs with them.",
    )


def _least_parts(plan: MemoryPlan, parts: int) -> tuple[int, str]:
    """What the parts of the budget beside weights and KV cache cannot do without, and why.

    The logits of all sequences of a step are there in the model's type and in float32, whatever else is.  Where the
    correction was learnt with other settings, nothing says that the estimate's own interval does not hold here.
    """
    settings, model = plan.settings, plan.request.model
    rows = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    each = model.dtype_bytes + (FLOAT32_BYTES if model.dtype_bytes < FLOAT32_BYTES else 0)
    logits, low = rows * model.vocab_size * each, parts + plan.overheads.error_bytes[0]
    if plan.request.correction_differs and low > logits:
        return low, "in nineteen starts of twenty"
    return logits, f"the logits of {rows:,} sequences alone"


def _endless_request(plan: MemoryPlan) -> Iterator[Judgement]:
    """A pool that passes the release's start-up check and does not hold one request of max_model_len.

    The check was of fewer blocks than such a request takes in releases to 0.11 for windows and chunks, and left the
    null block out only since 0.29; before 0.20.1 num_gpu_blocks_override was not asked at all.
    """
    length = plan.settings.max_model_len
    if plan.runs(length):
        return
    cause = "small_override" if plan.given_by == "num_gpu_blocks_override" else "request_exceeds_pool"
    there = "num_gpu_blocks_override gives" if cause == "small_override" else "the pool has"
    null = ", one of which is never used" if plan.num_null_blocks else ""
    longest = plan.longest_request()
    yield Judgement(
        UNSAFE,
        cause,
        "",
        f"A request of {length:,} tokens takes {plan.layout.blocks_of_request(length):,} blocks, and {there} "
        f"{plan.num_gpu_blocks:,}{null}: {plan.request.version.label} starts all the same, and such a request never "
        f"runs to its end.  {f'The longest that does has {longest:,} tokens' if longest else 'None does'}.",
    )


def _small_pool(plan: MemoryPlan) -> Iterator[Judgement]:
    low = plan.interval_blocks.low
    worst = replace(plan, num_gpu_blocks=low, interval_blocks=plan.interval_blocks._replace(high=low))
    if low == plan.num_gpu_blocks:
        return
    found = next((each for check in (_length, _states) for each in check(worst)), None)
    length = plan.settings.max_model_len
    if found is None and (plan.request.fits_length or worst.runs(length)):
        return
    needed = plan.blocks_needed(length) if found else plan.layout.blocks_of_request(length) + plan.num_null_blocks
    what = (
        f"max_num_seqs is {plan.settings.max_num_seqs:,}"
        if found and found.cause == "mamba_blocks_exceeded"
        else f"one request of {length:,} tokens takes {needed:,}"
    )
    then = "it may not start" if found else "such a request may never run to its end"
    yield Judgement(
        UNSAFE,
        "small_pool",
        "",
        f"The pool has {plan.num_gpu_blocks:,} blocks by the estimate, but one start in twenty has {low:,} or fewer, "
        f"and {what}: {then}.",
    )


_RISKS: tuple[_Check, ...] = (
    _unsure_free_memory,
    _graphs_outside,
    _small_margin,
    _overcorrected,
    _endless_request,
    _small_pool,
)


# --- words


def gib(num_bytes: int) -> str:
    """A size with its unit, two decimals as vLLM prints them."""
    return f"{digits(num_bytes)} GiB"


def digits(num_bytes: int) -> str:
    """GiB with up to two decimals, as vLLM's ``format_gib``."""
    return f"{round(num_bytes / GIB, 2)}"


def _apart(*sizes_bytes: int) -> list[str]:
    """Different sizes in GiB with as many decimals as it takes to tell them apart, two or more."""
    for places in range(2, 10):
        shown = [f"{size / GIB:.{places}f}" for size in sizes_bytes]
        if len(dict.fromkeys(shown)) == len(dict.fromkeys(sizes_bytes)):
            break
    return shown


def _out_of(when: str) -> str:
    return f"torch.OutOfMemoryError: CUDA out of memory (while {when})."
