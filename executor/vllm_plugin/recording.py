"""The file in which the steps of a real vLLM are recorded: what is in it, and how it is written.

The first line is an object that says where the recording comes from; each further line is an object for one step, with
the fields of ``COLUMNS`` and, if details are recorded, those of ``StepDetail``.  Needs no vLLM.
"""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from windtunnel.sim.engine.plan import StepShape

FORMAT = "windtunnel-recorded-steps"
VERSION = 1
UNKNOWN = -1
"""Written for a number of blocks or preemptions that the scheduler does not tell."""


class StepTimes(NamedTuple):
    """Instants of a step on the engine core's monotonic clock, in ns since an arbitrary moment."""

    schedule_begin_ns: int
    schedule_end_ns: int
    execute_begin_ns: int
    """The decision goes to the executor."""
    execute_end_ns: int
    """The engine core has the tokens."""
    update_end_ns: int
    """The tokens are booked."""


class StepState(NamedTuple):
    """The scheduler right after the decision."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preempted: int
    """Preemptions by this decision, those by a reset of the prefix cache since the one before included."""


COLUMNS = ("step", *StepTimes._fields, *StepShape._fields, "num_drafts", *StepState._fields, "recorder_ns")
"""Fields of a line, all whole numbers: ``num_drafts`` are draft tokens that the step verifies, ``recorder_ns`` is the
time that recording took since the line before."""

_NUMBERS = "{" + ",".join(f'"{name}":%d' for name in COLUMNS)


class Added(NamedTuple):
    """A request as the scheduler queued it."""

    request_id: str
    num_prompt_tokens: int
    arrival_ns: int
    """When the API server had it, on the clock of the steps."""
    added_ns: int
    """When it was queued."""


class StepDetail(NamedTuple):
    """Who is in a step, for recordings that tell it; all of it as JSON has it."""

    requests: list[tuple[str, int, int]]
    """(id, tokens, tokens computed before) of each request, in the order of the decision."""
    preempted: list[str]
    """Requests that the decision preempted."""
    added: list[Added]
    """Requests queued since the line before."""


class StepComposer:
    """What a step computes, from vLLM's SchedulerOutput; to be shown every output once, in order.

    A request is prefilling until the tokens that it had when it was admitted (prompt, and output if it was preempted)
    are computed.  As in ``sim``, the verification of drafts counts as a chunk.
    """

    def __init__(self) -> None:
        self._prefill_ends: dict[str, int] = {}  # tokens to be computed, of those that are prefilling

    def shape(self, output: Any) -> StepShape:
        """The StepShape of the step."""
        for request_id in output.finished_req_ids:
            self._prefill_ends.pop(request_id, None)
        if self._prefill_ends or output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids:
            return self._mixed_shape(output, self._computed(output))
        num_seqs = len(output.num_scheduled_tokens)
        computed = output.scheduled_cached_reqs.num_computed_tokens
        if output.total_num_scheduled_tokens == num_seqs == len(computed):
            return StepShape(num_seqs, sum(computed) + num_seqs, 0, 0, 0, 0, num_seqs)
        return self._mixed_shape(output, self._computed(output))

    def _computed(self, output: Any) -> dict[str, int]:
        """Tokens of each request whose KV is there before the step."""
        cached = output.scheduled_cached_reqs
        computed: dict[str, int] = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in output.scheduled_new_reqs:
            self._prefill_ends[new.req_id] = _prefill_tokens(new)
            computed[new.req_id] = new.num_computed_tokens
        for request_id in cached.resumed_req_ids:
            self._prefill_ends[request_id] = len(cached.all_token_ids[request_id])
        return computed

    def _mixed_shape(self, output: Any, computed: dict[str, int]) -> StepShape:
        decodes = context = chunks = tokens = cached = pairs = sampled = 0
        ends, drafts = self._prefill_ends, output.scheduled_spec_decode_tokens
        for request_id, num in output.num_scheduled_tokens.items():
            before = computed[request_id]
            end = ends.get(request_id)
            if end is None and num == 1:
                decodes += 1
                context += before + 1
                sampled += 1
                continue
            chunks += 1
            tokens += num
            cached += before
            pairs += num * before + num * (num + 1) // 2
            if end is None or before + num >= end:
                sampled += 1 + len(drafts.get(request_id, ()))
                ends.pop(request_id, None)
        return StepShape(decodes, context, chunks, tokens, cached, pairs, sampled)


def step_requests(output: Any) -> list[tuple[str, int, int]]:
    """(id, tokens, tokens computed before) of each request in the step of this SchedulerOutput, in its order."""
    cached = output.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
    return [(request_id, num, before[request_id]) for request_id, num in output.num_scheduled_tokens.items()]


def num_drafts(output: Any) -> int:
    """Draft tokens that the step of this SchedulerOutput verifies."""
    return sum(map(len, output.scheduled_spec_decode_tokens.values()))


def _prefill_tokens(new: Any) -> int:
    known = getattr(new, "prefill_token_ids", None)
    if known is None:
        known = new.prompt_token_ids if new.prompt_token_ids is not None else new.prompt_embeds
    return len(known)


class StepLog:
    """Writes a recording: the header at once, steps through a buffer that is emptied every ``flush_steps`` steps.

    Raises FileExistsError rather than writing over a recording.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], flush_steps: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.num_steps = 0
        """Steps written so far."""
        self._flush_steps = flush_steps
        self._file = path.open("x", encoding="utf-8", newline="\n", buffering=1 << 20)
        self._file.write(json.dumps({"format": FORMAT, "version": VERSION, **header}) + "\n")
        self._file.flush()
        atexit.register(self.close)

    def write(
        self,
        times: StepTimes,
        shape: StepShape,
        num_drafts: int,
        state: StepState,
        recorder_ns: int,
        detail: StepDetail | None = None,
    ) -> None:
        """Append a step; its number follows from the order."""
        told = "" if detail is None else "," + json.dumps(detail._asdict(), separators=(",", ":"))[1:-1]
        numbers = _NUMBERS % (self.num_steps, *times, *shape, num_drafts, *state, recorder_ns)
        self._file.write(f"{numbers}{told}}}\n")
        self.num_steps += 1
        if self.num_steps % self._flush_steps == 0:
            self._file.flush()

    def flush(self) -> None:
        """Hand all that was written to the operating system."""
        if not self._file.closed:
            self._file.flush()

    def close(self, stopped: str | None = None) -> None:
        """End the recording, for the reason ``stopped`` if it ends before the engine does; again without effect."""
        if self._file.closed:
            return
        if stopped is not None:
            self._file.write(json.dumps({"stopped": stopped}) + "\n")
        self._file.close()
        atexit.unregister(self.close)


def clocks() -> dict[str, Any]:
    """Now: the date, and the monotonic clock of the steps beside the time of day, by which they can be joined."""
    unix_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
    date = datetime.fromtimestamp(unix_ns / 1e9, UTC).isoformat(timespec="seconds")
    return {"date": date, "unix_ns": unix_ns, "monotonic_ns": monotonic_ns}
