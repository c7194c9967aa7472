"""A memory plan as text: the table, every formula with its numbers, and the table of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from windtunnel.reports.values import plain
from windtunnel.reports.words import NOTHING, digits
from windtunnel.sim.deployment.gpu import GIB
from windtunnel.sim.deployment.host_memory import host_memory
from windtunnel.sim.deployment.memory import JudgedPlan
from windtunnel.sim.deployment.memory_checks import UNKNOWN_ARCHITECTURE
from windtunnel.sim.deployment.memory_plan import DOES_NOT_START, OK, UNSAFE, MemoryPlan, Users
from windtunnel.sim.deployment.memory_remedies import Remedy

if TYPE_CHECKING:
    from windtunnel.reports.memory_first_screen import Cost

WIDTH = 100
VERDICT_WORDS = {OK: "ok", UNSAFE: "unsafe", DOES_NOT_START: "does not start"}

NO_REMEDY = (
    "No change of one flag alone helps: free memory on the card, change several flags, or take a GPU with more memory "
    "or a smaller or quantised model."
)

CORRECTION_TOO_LARGE = (
    "No flag mends a correction that does not fit: leave --correction out, or save one of such a server."
)

Row = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One plan with all that is said about it."""

    judged: JudgedPlan
    assumptions: tuple[str, ...]
    users: Users | None = None
    comparison: Mapping[str, tuple[float | None, float]] = field(default_factory=dict)
    """Figures of a real start-up and those of the formula."""
    notes: tuple[str, ...] = ()
    serve_command: str = ""
    """The command line of what is recommended."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """What each figure is from, in words: "measured", "measured blocks", "formula", "given"."""
    warnings: tuple[str, ...] = ()
    """What must be read before the figures."""
    advice: str = NO_REMEDY
    """What is said where it is not well and no remedy is known."""

    @property
    def plan(self) -> MemoryPlan:
        """The plan itself."""
        return self.judged.plan

    def origin(self, name: str) -> str:
        """What a figure is from; the formula is named only beside what was measured."""
        origin = self.origins.get(name, "formula")
        return "" if origin == "formula" and self.plan.source != "measured" else origin

    @property
    def title(self) -> str:
        """What runs on what."""
        request = self.plan.request
        return f"{request.model.name} on {request.num_gpus} x {request.gpu.name}, {request.version.label}{v0(self)}"


def v0(row: MemoryRow) -> str:
    """That it is the older engine, if it is."""
    return " (V0 engine)" if row.plan.request.runs_on_v0 else ""


def plan_text(row: MemoryRow, cost: Cost | None = None) -> str:
    """The plan as aligned text, with what its GPUs cost if that is known; the same plan gives the same text."""
    parts = [f"{row.title}: {verdict_words(row)}\n{_wrapped(row.judged.reason)}"]
    parts += [_wrapped(f"WARNING: {warning}") for warning in row.warnings]
    parts.append(_titled(_heading(row.plan), budget_rows(row)))
    parts.append(_titled("KV cache", pool_rows(row)))
    on_host = host_rows(row.plan)
    if on_host:
        parts.append(_titled("Host memory", on_host))
    if row.users is not None:
        parts.append(_titled(f"Requests of {row.users.mean_tokens:,} tokens", users_rows(row.users, row.plan)))
    if cost is not None:
        parts.append(_titled("Cost", [("per hour", cost.words(), _gpus(row.plan))]))
    if row.comparison:
        parts.append(_comparison(row))
    if row.judged.remedies:
        parts.append(_remedies(row.judged.remedies))
    elif row.judged.verdict != OK and row.judged.judgement.cause != UNKNOWN_ARCHITECTURE:
        parts.append(_wrapped(row.advice))
    if row.serve_command:
        parts.append(row.serve_command)
    parts += [f"note: {note}" for note in row.notes]
    return "\n\n".join(parts)


def _gpus(plan: MemoryPlan) -> str:
    return f"{plan.request.num_gpus:,} x {plan.request.gpu.name}"


def verdict_words(row: MemoryRow) -> str:
    """The verdict, and that there is a warning to read."""
    return f"{VERDICT_WORDS[row.judged.verdict]}{', with a warning' if row.warnings else ''}"


def _heading(plan: MemoryPlan) -> str:
    request = plan.request
    split = [
        f"{name} {size}"
        for name, size in (
            ("TP", request.tensor_parallel_size),
            ("PP", request.pipeline_parallel_size),
            ("DP", request.data_parallel_size),
        )
        if size > 1
    ]
    rank = " (the tightest stage)" if len(plan.stages) > 1 else ""
    return f"Memory of one GPU{', ' + ', '.join(split) if split else ''}{rank}"


def budget_rows(row: MemoryRow) -> list[Row]:
    """What the card's memory goes to: name, size, remark.

    Weights, activation, non-torch memory, CUDA graphs inside the budget, what is unexplained and what is available for
    the KV cache sum up to what is requested.
    """
    plan = row.plan
    share = plan.settings.gpu_memory_utilization
    given = row.origins.get("free_bytes", "formula").replace("formula", "estimated")
    rows = [
        ("total", size(plan.total_bytes), plan.request.gpu.memory_source),
        ("free at the start", size(plan.free_bytes), given),
        ("requested", size(plan.requested_bytes), f"gpu_memory_utilization {share:g} of the total"),
        ("weights", size(plan.weights_bytes), _joined(row.origin("weights_bytes"), "with rotary tables")),
        (
            "activation",
            size(plan.activation_bytes),
            _joined(row.origin("activation_bytes"), f"profile run of {plan.settings.max_num_batched_tokens:,} tokens"),
        ),
        (
            "non-torch",
            size(plan.non_torch_bytes),
            _joined(row.origin("non_torch_bytes"), "CUDA libraries, communication"),
        ),
        ("CUDA graphs", size(plan.cudagraph_bytes), _joined(row.origin("cudagraph_bytes"), _where_graphs(plan))),
        ("available for KV", size(plan.available_kv_cache_bytes), _origin(row)),
        ("KV cache", size(plan.kv_cache_bytes), f"{plan.num_gpu_blocks:,} whole blocks"),
        ("left on the card", *_left(row)),
    ]
    if plan.unexplained_bytes:
        rows.insert(7, ("unexplained", size(plan.unexplained_bytes), unexplained_words(plan)))
    if plan.given_by:
        rows[2] = ("requested", NOTHING, f"{plan.given_by} takes its place")
    return rows


def _left(row: MemoryRow) -> tuple[str, str]:
    """What is left on the card; nothing that the estimates deny a server that runs."""
    plan = row.plan
    if plan.margin_bytes < 0 and plan.source == "measured" and row.judged.verdict == OK:
        return NOTHING, f"not known: by the estimates {size(-plan.margin_bytes)} too little, but it runs"
    return size(plan.margin_bytes), "once graphs are captured"


def _joined(*texts: str) -> str:
    return ", ".join(filter(None, texts))


def unexplained_words(plan: MemoryPlan) -> str:
    """Why the parts do not sum up to the budget."""
    if plan.source != "measured":
        return "the correction, with the other sign"
    if plan.unexplained_bytes < 0:
        return "requested less all other parts, which are too many"
    return "requested less all other parts: no figure explains it"


def _where_graphs(plan: MemoryPlan) -> str:
    if not plan.cudagraph_bytes:
        return "none (enforce_eager)" if plan.request.enforce_eager else "none"
    where = "inside" if plan.graphs_inside else "OUTSIDE"
    return f"{where} the budget in {plan.request.version.label}"


def _origin(row: MemoryRow) -> str:
    """What is available for the KV cache is from."""
    plan, origin = row.plan, row.origin("available_kv_cache_bytes")
    if plan.source == "measured" and plan.request.measured is not None:
        if origin == "formula":
            return "formula: what was measured does not tell"
        return f"{'measured' if origin == 'measured' else f'from the {origin}'}: {plan.request.measured.source}"
    if plan.source == "kv_cache_memory_bytes":
        return "given: kv_cache_memory_bytes"
    if plan.source == "num_gpu_blocks_override":
        return f"formula: {plan.memory_blocks:,} blocks; num_gpu_blocks_override makes it {plan.num_gpu_blocks:,}"
    corrected = plan.request.correction_bytes
    return f"requested less the above{f', corrected by {corrected / GIB:+.2f} GiB' if corrected else ''}"


def pool_rows(row: MemoryRow) -> list[Row]:
    """The pool as vLLM logs it."""
    plan = row.plan
    low, high = plan.interval_90
    length = plan.settings.max_model_len
    interval = f"{low:,} to {high:,} in nine starts of ten" if low != high else ""
    per_token = f"{plan.kv_bytes_per_token:,} bytes a token and GPU"
    rows = [
        (
            "num_gpu_blocks",
            f"{plan.num_gpu_blocks:,}",
            _joined(_from(row, "num_gpu_blocks"), _blocks_remark(plan)),
        ),
        (
            "GPU KV cache size",
            f"{plan.kv_cache_tokens:,} tokens",
            _joined(_from(row, "kv_cache_tokens"), interval or per_token),
        ),
        (
            "Maximum concurrency",
            f"{plan.max_concurrency:.2f}x",
            _joined(_from(row, "max_concurrency"), f"for {length:,} tokens per request{_taken(row)}"),
        ),
    ]
    if interval:
        rows.append(("KV of a token", f"{plan.kv_bytes_per_token:,} bytes", "on each GPU, in the layers that it holds"))
    if plan.layout.is_hybrid:
        rows.append(("groups of layers", str(len(plan.layout.groups)), _groups(plan)))
    if plan.max_state_sequences is not None:
        rows.append(("state blocks", f"{plan.max_state_sequences:,}", _states_remark(plan)))
    if plan.num_cpu_blocks is not None:
        rows.append(("num_cpu_blocks", f"{plan.num_cpu_blocks:,}", "swap space of V0"))
    if plan.equivalent_gpu_memory_utilization is not None and plan.given_by is None:
        rows.append(
            ("equivalent to", f"{plan.equivalent_gpu_memory_utilization:.4f}", "gpu_memory_utilization without graphs")
        )
    if plan.request.data_parallel_size > 1:
        rows.append(("replicas", str(plan.request.data_parallel_size), "each with a pool like this"))
    return rows


def _taken(row: MemoryRow) -> str:
    """That max_model_len is a guess, if it is one."""
    return ", which is taken: max_model_len is not known" if row.origins.get("max_model_len") == "taken" else ""


def _blocks_remark(plan: MemoryPlan) -> str:
    """Tokens of a block, and whether one of them is never used."""
    return f"of {plan.block_size:,} tokens{', the null block included' if plan.num_null_blocks else ''}"


def _states_remark(plan: MemoryPlan) -> str:
    """Whether the release refuses more sequences than blocks for their states."""
    if plan.request.rules.refuses_states:
        return "max_num_seqs cannot be more"
    return "a running sequence takes at least one; this release does not compare max_num_seqs"


def _from(row: MemoryRow, name: str) -> str:
    """What a figure of the pool is from, in a plan that was measured."""
    origin = row.origin(name)
    return f"from the {origin}" if origin.startswith("measured ") else origin


def _groups(plan: MemoryPlan) -> str:
    kinds: dict[str, int] = {}
    for group in plan.layout.groups:
        kinds[group.kind] = kinds.get(group.kind, 0) + group.num_layers
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def host_rows(plan: MemoryPlan) -> list[Row]:
    """Host memory for one GPU, part by part, and for all; none where nothing is kept there."""
    held = host_memory(plan)
    request = plan.request
    rows = [
        ("offloaded weights", held.offloaded_weights_bytes, "cpu_offload_gb; off the card, read in each step"),
        ("swap space", held.swap_bytes, "of the V0 engine"),
        ("offloaded KV", held.kv_offloading_bytes, "kv_offloading_size over the ranks of an engine"),
    ]
    found = [(name, size(num_bytes), remark) for name, num_bytes, remark in rows if num_bytes]
    if request.swap_space_gib and not held.swap_bytes:
        found.append(("swap space", size(0), f"V1 takes none of the {request.swap_space_gib:g} GiB of swap_space"))
    if held.total_bytes:
        node = f"for {held.num_gpus} GPUs: what a node with all of them needs" if held.num_gpus > 1 else "on the node"
        found += [("each GPU", size(held.bytes_per_gpu), ""), ("in all", size(held.total_bytes), node)]
    return found


def users_rows(users: Users, plan: MemoryPlan) -> list[Row]:
    """How many requests of that length there is memory for."""
    one = f"{users.bytes_per_user / 2**20:,.1f} MiB"
    capped = "" if users.running >= int(users.real) else f"max_num_seqs {plan.settings.max_num_seqs:,} caps it"
    return [
        ("KV of one request", one, f"{users.bytes_per_user:,} bytes on each GPU"),
        ("ideal", f"{users.ideal:,.1f}", "if all memory but the weights held KV"),
        ("real", f"{users.real:,.1f}", "in this pool; blocks are taken as tokens come, not max_model_len ahead"),
        ("running at once", f"{users.running:,}", capped),
    ]


COMPARED = {
    "weights_bytes": "weights",
    "activation_bytes": "activation",
    "non_torch_bytes": "non-torch",
    "cudagraph_bytes": "CUDA graphs",
    "available_kv_cache_bytes": "available for KV",
    "num_gpu_blocks": "num_gpu_blocks",
    "kv_cache_tokens": "KV tokens",
    "max_concurrency": "concurrency",
}


def comparison_rows(row: MemoryRow) -> list[tuple[str, str, str, str]]:
    """Figure, measured, formula, difference."""
    rows = []
    for name, (measured, formula) in row.comparison.items():
        if measured is None:
            continue
        is_size = name.endswith("_bytes")
        show = (lambda value: size(round(value))) if is_size else _number
        if is_size:
            apart = f"{round((formula - measured) / GIB, 2) + 0.0:+.2f} GiB"
        else:
            apart = f"{100 * (formula / measured - 1):+.2f} %" if measured else NOTHING
        rows.append((COMPARED.get(name, name), show(measured), show(formula), apart))
    return rows


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def _comparison(row: MemoryRow) -> str:
    rows = [("", "measured", "formula", "formula off by"), *comparison_rows(row)]
    return "\n".join(["Beside the real start-up", *(f"  {line}" for line in _aligned(rows))])


def remedy_rows(remedies: Iterable[Remedy]) -> list[tuple[str, str, str, str]]:
    """What to change, the verdict with it, KV tokens, and what it costs."""
    return [
        (remedy.text, VERDICT_WORDS[remedy.verdict], f"{remedy.kv_cache_tokens:,} tokens", remedy.cost)
        for remedy in remedies
    ]


def _remedies(remedies: Sequence[Remedy]) -> str:
    return "\n".join(["Each of these alone would help", *(f"  {line}" for line in _aligned(remedy_rows(remedies)))])


# --- every formula


def explanation(row: MemoryRow) -> str:
    """Each step of the plan with its numbers, each setting with its source, each assumption."""
    lines = ["", "How it comes about", *(f"  {step}" for step in steps(row.plan))]
    lines += ["", "Settings", *(f"  {line}" for line in _aligned(setting_rows(row.plan)))]
    lines += ["", "Assumptions"]
    for text in row.assumptions:
        lines += wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return "\n".join(lines)


def steps(plan: MemoryPlan) -> Iterator[str]:
    """The arithmetic, one line a step."""
    share = plan.settings.gpu_memory_utilization
    yield f"requested = ceil(total x gpu_memory_utilization) = ceil({plan.total_bytes:,} x {share:g})"
    yield f"          = {plan.requested_bytes:,} bytes ({size(plan.requested_bytes)})"
    if plan.source == "formula":
        graphs = f" - {plan.cudagraph_bytes:,} (CUDA graphs)" if plan.graphs_inside else ""
        corrected = plan.request.correction_bytes
        more = f" {'+' if corrected > 0 else '-'} {abs(corrected):,} (correction)" if corrected else ""
        yield "available = requested - weights - activation - non-torch" + (
            " - CUDA graphs" if plan.graphs_inside else ""
        )
        yield (
            f"          = {plan.requested_bytes:,} - {plan.weights_bytes:,} - {plan.activation_bytes:,} - "
            f"{plan.non_torch_bytes:,}{graphs}{more}"
        )
        yield f"          = {plan.available_kv_cache_bytes:,} bytes ({size(plan.available_kv_cache_bytes)})"
    elif plan.source == "num_gpu_blocks_override":
        yield f"available = {plan.available_kv_cache_bytes:,} bytes (formula; num_gpu_blocks_override takes its place)"
    else:
        yield f"available = {plan.available_kv_cache_bytes:,} bytes ({plan.source})"
    if plan.source == "measured" and plan.unexplained_bytes:
        yield (
            "unexplained = requested - weights - activation - non-torch"
            + (" - CUDA graphs" if plan.graphs_inside else "")
            + f" - available = {plan.unexplained_bytes:,} bytes"
        )
    yield from _block_steps(plan)
    yield from _request_steps(plan)
    outside = f" - {plan.graphs_outside_bytes:,} (CUDA graphs outside)" if plan.graphs_outside_bytes else ""
    spent = f"{plan.free_bytes:,} (free) - {plan.spent_bytes:,} (spent){outside}"
    yield f"left on the card = {spent} = {plan.margin_bytes:,}"


def _block_steps(plan: MemoryPlan) -> Iterator[str]:
    for place, (stage, block) in enumerate(zip(plan.stages, plan.layout.block_bytes, strict=True)):
        name = f" of stage {place}" if len(plan.stages) > 1 else ""
        if plan.layout.is_hybrid or len(plan.stages) > 1:
            yield f"bytes of a block{name} = {block:,} (largest of {len(plan.layout.groups)} groups)"
        else:
            yield f"bytes of a block = {plan.block_size} tokens x {block // plan.block_size:,} bytes = {block:,}"
        if plan.source in ("formula", "kv_cache_memory_bytes"):
            yield f"blocks{name} = {stage.available_bytes:,} // {block:,} = {stage.num_blocks:,}"
    yield f"num_gpu_blocks = {plan.num_gpu_blocks:,}" + (", the least of all stages" if len(plan.stages) > 1 else "")


def _request_steps(plan: MemoryPlan) -> Iterator[str]:
    """Blocks of one request, concurrency, tokens and the check, as the release has them."""
    length, blocks, rules = plan.settings.max_model_len, plan.num_gpu_blocks, plan.request.rules
    by_blocks = rules.concurrency_by_blocks and not plan.request.runs_on_v0
    if by_blocks:
        needed = plan.layout.blocks_of_request(length)
        yield f"blocks of a request of {length:,} tokens = {needed:,}"
        yield f"concurrency = {blocks:,} / {needed:,} = {plan.max_concurrency:.4f}"
    else:
        yield f"concurrency = {blocks:,} x {plan.block_size} / {length:,} tokens = {plan.max_concurrency:.4f}"
    tokens = f"{plan.kv_cache_tokens:,} tokens"
    if rules.logs_by_concurrency:
        yield f"GPU KV cache size = int(concurrency x {length:,}) = {tokens}"
    elif plan.layout.is_hybrid:
        yield f"GPU KV cache size = {blocks:,} // {len(plan.layout.groups)} groups x tokens of a block = {tokens}"
    else:
        yield f"GPU KV cache size = {blocks:,} x {plan.block_size} = {tokens}"
    yield f"start-up check: {_check(plan)}: {'yes' if plan.holds(blocks) else 'no'}"


def _check(plan: MemoryPlan) -> str:
    """What the start-up check compares, in blocks; by the bytes of layers where those differ."""
    blocks, spare = plan.num_gpu_blocks, plan.num_reserved_blocks
    there = blocks
    if plan.source == "num_gpu_blocks_override" and not (plan.request.rules.checks_override or plan.request.runs_on_v0):
        there = plan.memory_blocks
    needed = plan.blocks_needed(plan.settings.max_model_len)
    return f"{needed - spare:,} + {spare} (null block) <= {there:,}" if spare else f"{needed:,} <= {there:,}"


def setting_rows(plan: MemoryPlan) -> list[Row]:
    """Settings, values and where they come from."""
    sources = plan.settings.sources
    values = {name: getattr(plan.settings, name) for name in sources if hasattr(plan.settings, name)}
    rows = [(name, plain(value), sources[name]) for name, value in values.items()]
    rows.append(("kv_cache_dtype", plan.request.kv_cache_dtype, ""))
    rows.append(("dtype", plan.request.model.dtype, ""))
    return rows


# --- a sweep


def sweep_text(
    axes: Sequence[str], dicts: Sequence[Mapping[str, Any]], notes: Sequence[str], warnings: Sequence[str] = ()
) -> str:
    """A table, one line a combination (as plain data), and below why some do not start or are unsafe."""
    with_users = any(made.get("real_users") is not None for made in dicts)
    heads = ["row", *map(short, axes), "GPUs", "KV tokens", "90 % interval", "concurrency", "left", "verdict"]
    heads += ["users"] if with_users else []
    has_cost = any(made.get("cost_per_hour") is not None for made in dicts)
    heads += ["cost per hour"] if has_cost else []
    rows = [
        [
            str(number),
            *(axis_cell(made, axis) for axis in axes),
            *sweep_cells(made, with_users=with_users),
            *([_hourly(made)] if has_cost else []),
        ]
        for number, made in enumerate(dicts, 1)
    ]
    lines = _aligned([heads, *rows])
    for title, verdict in (("Why some do not start", DOES_NOT_START), ("Why some are unsafe", UNSAFE)):
        reasons = reasons_of(dicts, verdict)
        if reasons:
            lines += ["", title, *_listed(reasons)]
    told = [_wrapped(f"WARNING: {warning}") for warning in warnings] + [f"note: {note}" for note in notes]
    lines += [f"\n{text}" for text in told[:MOST_NOTES]]
    if len(told) > MOST_NOTES:
        lines.append(f"\n({len(told) - MOST_NOTES} more notes: --json has all)")
    return "\n".join(lines)


def _hourly(made: Mapping[str, Any]) -> str:
    cost = made.get("cost_per_hour")
    return NOTHING if cost is None else f"{digits(cost)} {made['currency']}"


def reasons_of(dicts: Sequence[Mapping[str, Any]], verdict: str) -> list[str]:
    """Why combinations have that verdict, each reason with the rows that it is about."""
    rows: dict[str, list[int]] = {}
    for number, made in enumerate(dicts, 1):
        if made["verdict"] == verdict:
            rows.setdefault(made["reason"], []).append(number)
    return [f"{row_words(numbers)}: {reason}" for reason, numbers in rows.items()]


def row_words(numbers: Sequence[int]) -> str:
    """Numbers of rows, in order, in words: "rows 1-3, 7"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    told = ", ".join("-".join(map(str, span)) for span in spans)
    return f"row{'s' if len(numbers) > 1 else ''} {told}"


def _listed(reasons: Sequence[str]) -> Iterator[str]:
    for reason in reasons[:MOST_REASONS]:
        yield from wrap(reason, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    if len(reasons) > MOST_REASONS:
        yield f"  ({len(reasons) - MOST_REASONS} more: --json has all)"


MOST_REASONS = 3
"""Of one verdict."""
MOST_NOTES = 8
_SHORT = {
    "tensor_parallel_size": "TP",
    "pipeline_parallel_size": "PP",
    "data_parallel_size": "DP",
    "gpu_memory_utilization": "utilization",
    "kv_cache_dtype": "KV",
    "max_num_batched_tokens": "budget",
}


def short(name: str) -> str:
    """A setting's name where there is little room."""
    return _SHORT.get(name, name)


def axis_cell(made: Mapping[str, Any], axis: str) -> str:
    """A setting as it was given; of a max_model_len that is fitted ("auto", -1) also what came of it."""
    value, planned = made[axis], made.get("planned_max_model_len")
    if axis != "max_model_len" or planned is None or value == planned:
        return plain(value)
    return f"{'auto' if value == -1 else plain(value)} = {planned:,}"


def sweep_cells(made: Mapping[str, Any], *, with_users: bool = False) -> list[str]:
    """The figures of one combination."""
    verdict = VERDICT_WORDS[made["verdict"]]
    if "kv_cache_tokens" not in made:
        return [NOTHING] * 5 + [verdict] + ([NOTHING] if with_users else [])
    interval = made["interval_90"]
    low, high = interval["low"], interval["high"]
    cells = [
        f"{made['num_gpus']:,}",
        f"{made['kv_cache_tokens']:,}",
        f"{low:,} to {high:,}" if low != high else NOTHING,
        f"{made['max_concurrency']:,.2f}",
        NOTHING if made["verdict"] == DOES_NOT_START else size(made["oom_margin_bytes"]),
        verdict,
    ]
    users = made.get("real_users")
    return [*cells, f"{users:,.1f}" if users is not None else NOTHING] if with_users else cells


# --- pieces


def size(num_bytes: int) -> str:
    """GiB with two decimals."""
    return f"{num_bytes / GIB:,.2f} GiB"


def _titled(title: str, rows: Sequence[Row]) -> str:
    width = max(len(row[1]) for row in rows)
    lined = [(name, value.rjust(width), remark) for name, value, remark in rows]
    return "\n".join([title, *(f"  {line}" for line in _aligned(lined))])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _wrapped(text: str) -> str:
    return "\n".join(wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))
