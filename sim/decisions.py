"""Replay of step-indexed cases: what the scheduler decides, step by step, in the format of recorded vLLM decisions.

A case gives a scheduler config and requests that arrive (and may be aborted) at iterations of the engine loop; no
model runs, and every request whose prefill is complete gets one token a step.  Token values come from a documented
hash, so prefix caching works on real token ids.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.keys import TokenKeys
from windtunnel.sim.engine.per_request import SpeculativePlan, make_scheduler
from windtunnel.sim.engine.plan import Speculated, StepPlan
from windtunnel.sim.engine.request import Request

JsonDict = dict[str, Any]

CONFIG_KEYS = frozenset(SchedulerConfig.__dataclass_fields__)
CASE_DEFAULTS: JsonDict = {
    "block_size": 16,
    "num_gpu_blocks": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 4096,
}
DEFAULT_MAX_STEPS = 200_000
MASK_64 = (1 << 64) - 1
VOCABULARY = 32_000
PREFIX_SEED = 1_000_000
OUTPUT_SEED = 2_000_000


class CaseError(ValueError):
    """A case that cannot be replayed, and why."""


def token_id(seed: int, index: int) -> int:
    """Token ``index`` of the stream ``seed``: a hash of both, mapped to 3 … 31,999."""
    return 3 + _mix(((seed & 0xFFFFFFFF) << 32) ^ (index & 0xFFFFFFFF)) % (VOCABULARY - 3)


def replay(case: Any) -> Iterator[JsonDict]:
    """The lines of a decision trace: a header, one line an iteration, a summary.

    Raises CaseError, naming the key or request, for a case that is malformed or asks for what is not modelled yet.
    """
    if not isinstance(case, dict):
        raise CaseError(f"a case must be an object with 'config' and 'requests', got {type(case).__name__}")
    return _Replay(case).lines()


class _Replay:
    """The engine loop over one case, in iterations instead of time."""

    def __init__(self, case: JsonDict) -> None:
        self.case = case
        self.config = _config(case)
        self.scheduler = make_scheduler(self.config)
        self.speculation = _Speculation(case)
        self.interned: dict[Hashable, int] = {}
        self.live: dict[str, Request] = {}
        self.byname: dict[str, Request] = {}
        self.arrivals = deque(_arrivals(case, self.config))
        self.aborts = deque(
            sorted((d["abort_step"], i, d["id"]) for i, d in enumerate(case["requests"]) if "abort_step" in d)
        )
        self.notify: list[str] = []  # finished or aborted since the last decision: the next one tells the worker
        self.num_decisions = 0
        self.under_way: deque[tuple[int, StepPlan, list[str]]] = (
            deque()
        )  # (decision, plan, who yields a token), newest first
        self.depth = self.config.max_steps_under_way
        self.totals = {"sched_tokens": 0, "preemptions": 0, "finished": 0, "hit_tokens": 0}
        self.most_preemptions = 0

    def lines(self) -> Iterator[JsonDict]:
        yield {"type": "header", "name": self.case.get("name", ""), "config": self.case["config"], "by": "windtunnel"}
        iteration, idle, end = 0, 0, "done"
        max_steps = self.case.get("max_steps", DEFAULT_MAX_STEPS)
        _check_whole("case", "max_steps", max_steps, 1)
        while True:
            line: JsonDict = {"it": iteration}
            came, gone = self._arrive(iteration), self._abort(iteration)
            if not self.live and not self.notify and not self.under_way:
                if not self.arrivals:
                    break
                iteration = max(iteration + 1, self.arrivals[0][0])
                continue
            if came:
                line["arrived"] = came
            if gone:
                line["aborted"] = gone
            progressed = self._step(line)
            line["state"] = self._state()
            yield line
            iteration += 1
            idle = 0 if progressed or came or not self.live else idle + 1
            if idle >= 3 + self.depth and not self.arrivals and not self.aborts:
                end = "stalled"
                break
            if iteration >= max_steps:
                end = "max_steps"
                break
        yield {
            "type": "summary",
            "end": end,
            "iterations": iteration,
            "steps": self.num_decisions,
            **self.totals,
            "unfinished": list(self.live),
            "max_preemptions_of_one_request": self.most_preemptions,
        }

    def _arrive(self, iteration: int) -> list[str]:
        came = []
        while self.arrivals and self.arrivals[0][0] <= iteration:
            _, index, spec = self.arrivals.popleft()
            request = self._request(index, spec)
            self.live[spec["id"]] = self.byname[spec["id"]] = request
            self.speculation.seed(request, spec.get("output_seed", OUTPUT_SEED + index))
            try:
                self.scheduler.add(request)
            except ValueError as error:
                raise CaseError(str(error)) from None
            came.append(spec["id"])
        return came

    def _abort(self, iteration: int) -> list[str]:
        gone = []
        while self.aborts and self.aborts[0][0] <= iteration:
            name = self.aborts.popleft()[2]
            gone.append(name)
            request = self.live.pop(name, None)
            if request is not None:
                self.scheduler.abort(request)
                self.notify.append(name)
        return gone

    def _request(self, index: int, spec: JsonDict) -> Request:
        prompt = _prompt_token(spec)
        num_prompt = len(spec["prompt_token_ids"]) if "prompt_token_ids" in spec else spec["prompt_len"]
        output_seed = spec.get("output_seed", OUTPUT_SEED + index)

        def token(position: int) -> int:
            return prompt(position) if position < num_prompt else token_id(output_seed, position - num_prompt)

        arrival_s = spec.get("arrival_time", spec.get("arrival_step", 0) + index * 1e-6)
        return Request(
            spec["id"],
            round(arrival_s * 1e9),
            num_prompt,
            spec["output_len"],
            priority=spec.get("priority", 0),
            keys=TokenKeys(token, self.config.block_size, self.interned, spec.get("cache_salt")),
        )

    def _step(self, line: JsonDict) -> bool:
        """One turn of the engine loop: a decision, an outcome, or both; whether anything was computed."""
        progressed, wait = False, True
        if self.live or self.notify:
            self.num_decisions += 1
            plan = self.scheduler.schedule(0)
            decision = line["sched"] = self._decision(plan)
            progressed = not plan.is_empty
            self.under_way.appendleft((self.num_decisions, plan, decision["samples"]))
            wait = len(self.under_way) == self.depth or not (progressed or self.live or self.notify)
        if wait and self.under_way:
            number, plan, samples = self.under_way.pop()
            line["upd"] = self._outcome(number, plan, samples)
            progressed = progressed or not plan.is_empty
        return progressed

    def _outcome(self, number: int, plan: StepPlan, samples: list[str]) -> JsonDict:
        alive = [name for name in samples if name in self.live]
        outcome: JsonDict = {"n": number}
        speculated = None
        if isinstance(plan, SpeculativePlan):
            speculated = self.speculation.verify(plan, drafts_next=not self.config.async_scheduling)
        finished = self.scheduler.commit(plan, 0, speculated)
        outcome["out"] = dict.fromkeys(alive, 1)
        if isinstance(plan, SpeculativePlan) and speculated is not None:
            outcome["out"] = {name: plan.num_kept[self.byname[name]] for name in alive}
            if speculated.num_accepted:
                outcome["accepted"] = {str(r.request_id): count for r, count in speculated.num_accepted.items()}
            if self.config.num_speculative_tokens and not self.config.async_scheduling and plan.chunks:
                proposed = {str(r.request_id): count for r, count in speculated.num_proposed.items()}
                outcome["drafts"] = {name: proposed[name] for name in samples}
        names = [str(request.request_id) for request in finished]
        for name in names:
            del self.live[name]
        self.notify += names
        self.totals["finished"] += len(names)
        outcome["finished"] = [[name, "length"] for name in names]
        return outcome

    def _decision(self, plan: StepPlan) -> JsonDict:
        scheduled = {str(r.request_id): n for r, n in self.scheduler.scheduled_tokens(plan).items()}
        admitted = {str(a.request.request_id): a for a in plan.admissions}
        late = {str(chunk.request.request_id) for chunk in plan.chunks if not chunk.samples}
        blocks = {str(r.request_id): [r.block_ids[-1]] for r in plan.grown}
        for chunk in plan.chunks:
            name, ids = str(chunk.request.request_id), chunk.request.block_ids
            given = list(ids) if name in admitted else ids[len(ids) - chunk.num_new_blocks :]
            if given:
                blocks[name] = given
        self.totals["sched_tokens"] += sum(scheduled.values())
        self.totals["preemptions"] += len(plan.preemptions)
        self.totals["hit_tokens"] += sum(a.num_cached_tokens for a in plan.admissions)
        for preemption in plan.preemptions:
            self.most_preemptions = max(self.most_preemptions, preemption.request.num_preemptions)
        decision: JsonDict = {
            "n": self.num_decisions,
            "scheduled": scheduled,
            "total": sum(scheduled.values()),
            "new": [name for name, a in admitted.items() if not a.resumed],
            "resumed": [name for name, a in admitted.items() if a.resumed],
            "running": [name for name in scheduled if name not in admitted],
            "preempted": [str(p.request.request_id) for p in plan.preemptions],
            "hit_tokens": {name: a.num_cached_tokens for name, a in admitted.items()},
            "blocks": {name: blocks[name] for name in scheduled if name in blocks},
            "free": self.scheduler.pool.num_free,
            "samples": [name for name in scheduled if name not in late],
        }
        if isinstance(plan, SpeculativePlan):
            if plan.num_drafts:
                decision["spec"] = {str(request.request_id): count for request, count in plan.num_drafts.items()}
            if plan.padded:
                decision["padded"] = sorted(str(request.request_id) for request in plan.padded)
        if self.notify:
            decision["notify_finished"] = sorted(self.notify)
            self.notify.clear()
        return decision

    def _state(self) -> JsonDict:
        scheduler = self.scheduler
        free = scheduler.pool.free_queue()
        return {
            "computed": {name: scheduler.num_computed_tokens(r) for name, r in self.live.items()},
            "tokens": {name: scheduler.num_tokens(r) for name, r in self.live.items()},
            "nblk": {name: len(r.block_ids) for name, r in self.live.items() if r.block_ids},
            "running": [str(r.request_id) for r in scheduler.running],
            "waiting": [str(r.request_id) for r in scheduler.waiting],
            "free": len(free),
            "free_crc": zlib.crc32(",".join(map(str, free)).encode()),
            "cached_hashes": scheduler.pool.num_keys,
        }


class _Speculation:
    """Who accepts how many drafts, and how many are proposed: both by the documented hash of a case."""

    def __init__(self, case: JsonDict) -> None:
        given = case.get("spec", {})
        self.acceptance = given.get("acceptance", 0.6)
        self.is_seeded = given.get("num_draft", "full") == "seeded"
        self.num_drafts = case["config"].get("num_speculative_tokens", 0)
        self._seeds: dict[Request, int] = {}
        self._num_verified: dict[Request, int] = {}
        self._num_proposed: dict[Request, int] = {}

    def seed(self, request: Request, seed: int) -> None:
        self._seeds[request] = seed
        self._num_verified[request] = self._num_proposed[request] = 0

    def verify(self, plan: SpeculativePlan, drafts_next: bool) -> Speculated:
        """How the plan's drafts fare, and what is proposed next."""
        accepted = {request: self._accept(plan, request) for request in plan.num_drafts}
        proposed = {chunk.request: self._draft(chunk.request) for chunk in plan.chunks} if drafts_next else {}
        return Speculated(accepted, proposed)

    def _accept(self, plan: SpeculativePlan, request: Request) -> int:
        turn, count = self._num_verified[request], 0
        self._num_verified[request] += 1
        if request in plan.padded:
            return 0
        while count < plan.num_drafts[request] and _unit(self._seeds[request], turn * 64 + count) < self.acceptance:
            count += 1
        return count

    def _draft(self, request: Request) -> int:
        if not self.is_seeded:
            return int(self.num_drafts)
        turn = self._num_proposed[request]
        self._num_proposed[request] += 1
        return _mix((self._seeds[request] << 20) + 7 * turn) % (int(self.num_drafts) + 1)


def _unit(seed: int, index: int) -> float:
    """A number in [0, 1) from the stream ``seed``."""
    return float(_mix(((seed & 0xFFFFFFFF) << 32) ^ (index & 0xFFFFFFFF) ^ (0xA5 << 56)) >> 11) / float(1 << 53)


def _mix(x: int) -> int:
    """splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014."""
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)


def _config(case: JsonDict) -> SchedulerConfig:
    if not isinstance(case.get("config"), dict):
        raise CaseError("a case needs an object 'config'")
    given = dict(case["config"])
    unknown = sorted(set(given) - CONFIG_KEYS)
    if unknown:
        raise CaseError(f"config has an unknown key {unknown[0]!r}; known are {', '.join(sorted(CONFIG_KEYS))}")
    for key, value in given.items():
        _check_setting(key, value)
    values = {**CASE_DEFAULTS, **{k: v for k, v in given.items() if k in CONFIG_KEYS and v is not None}}
    try:
        return SchedulerConfig(**values)
    except (TypeError, ValueError) as error:
        raise CaseError(f"config: {error}") from None


def _check_setting(key: str, value: Any) -> None:
    """A value of the type of the field's default; numbers for shares, whole numbers for what is None by default."""
    default = SchedulerConfig.__dataclass_fields__[key].default
    kind: Any = int if default is None else int | float if isinstance(default, float) else type(default)
    if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        name = (
            "a number"
            if isinstance(default, float)
            else {bool: "true or false", str: "text"}.get(kind, "a whole number")
        )
        raise CaseError(f"config.{key} must be {name}, got {value!r}")


def _arrivals(case: JsonDict, config: SchedulerConfig) -> list[tuple[int, int, JsonDict]]:
    requests = case.get("requests")
    if not isinstance(requests, list):
        raise CaseError("a case needs a list 'requests'")
    seen: set[str] = set()
    for index, spec in enumerate(requests):
        _check_request(index, spec, seen, config.max_model_len)
    return sorted(((d.get("arrival_step", 0), i, d) for i, d in enumerate(requests)), key=lambda item: item[:2])


WHOLE_NUMBERS = {  # key of a request -> least value
    "prompt_len": 1,
    "output_len": 1,
    "arrival_step": 0,
    "abort_step": 0,
    "prefix_len": 0,
    "prefix_group": None,
    "priority": None,
    "seed": None,
    "output_seed": None,
}
OTHER_KEYS = ("id", "arrival_time", "cache_salt", "prompt_token_ids")


def _check_request(index: int, spec: Any, seen: set[str], max_model_len: int) -> None:
    if not isinstance(spec, dict) or not isinstance(spec.get("id"), str):
        raise CaseError(f"requests[{index}] needs a string 'id'")
    where = f"requests[{index}] ({spec['id']})"
    if spec["id"] in seen:
        raise CaseError(f"requests[{index}]: id {spec['id']!r} is used twice")
    seen.add(spec["id"])
    unknown = sorted(set(spec) - set(WHOLE_NUMBERS) - set(OTHER_KEYS))
    if unknown:
        known = ", ".join(sorted((*WHOLE_NUMBERS, *OTHER_KEYS)))
        raise CaseError(f"{where} has an unknown key {unknown[0]!r}; known are {known}")
    for name, least in WHOLE_NUMBERS.items():
        if name in spec or name == "output_len":
            _check_whole(where, name, spec.get(name), least)
    if not isinstance(spec.get("arrival_time", 0), int | float) or isinstance(spec.get("arrival_time"), bool):
        raise CaseError(f"{where}: arrival_time must be a number of seconds, got {spec['arrival_time']!r}")
    if not isinstance(spec.get("cache_salt"), str | None):
        raise CaseError(f"{where}: cache_salt must be text, got {spec['cache_salt']!r}")
    num_prompt = _num_prompt_tokens(where, spec)
    if num_prompt >= max_model_len:
        raise CaseError(
            f"{where}: a prompt of {num_prompt} tokens leaves no room for an answer within max_model_len "
            f"({max_model_len}): shorten it or raise max_model_len"
        )


def _check_whole(where: str, name: str, value: Any, least: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        limit = "" if least is None else f" from {least}"
        raise CaseError(f"{where}: {name} must be a whole number{limit}, got {value!r}")


def _num_prompt_tokens(where: str, spec: JsonDict) -> int:
    if "prompt_token_ids" not in spec:
        _check_whole(where, "prompt_len (or a list prompt_token_ids)", spec.get("prompt_len"), 1)
        return int(spec["prompt_len"])
    ids = spec["prompt_token_ids"]
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise CaseError(f"{where}: prompt_token_ids must be a list of at least one whole number")
    return len(ids)


def _prompt_token(spec: JsonDict) -> Callable[[int], int]:
    if "prompt_token_ids" in spec:
        tokens: list[int] = spec["prompt_token_ids"]
        return tokens.__getitem__
    prefix_len, group, seed = spec.get("prefix_len", 0), spec.get("prefix_group", 0), spec.get("seed", 0)
    return lambda i: token_id(PREFIX_SEED + group, i) if i < prefix_len else token_id(seed, i)
