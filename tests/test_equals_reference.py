"""The product's scheduler against the naive one: the same decisions, nanoseconds and block ids on drawn cases."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from reference import scheduler as reference
from strategies import cases, scheduler_configs, workloads

from windtunnel.sim.cost.constant import AffineCost
from windtunnel.sim.decisions import replay, token_id
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepPlan, StepResult, StepShape
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.records import Records
from windtunnel.sim.replica import RETRY_NS
from windtunnel.sim.simulate import run
from windtunnel.sim.simulated import SimExecutor
from windtunnel.sim.workload import Workload

COSTS = st.sampled_from(
    [
        AffineCost(base_s=5e-3, token_s=0.0, seq_s=0.0, decode_context_s=0.0, prefill_pair_s=0.0),
        AffineCost(base_s=3e-3, token_s=1.7e-5, seq_s=1e-5, decode_context_s=4e-7, prefill_pair_s=1e-8),
    ]
)
"""The first makes steps end at the very instants at which requests arrive."""


# A request that preempts itself for ever, next to one that comes and goes: steps in which nothing is computed.
SELF_PREEMPTION: dict[str, Any] = {
    "config": {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 31,
        "max_model_len": 64,
        "block_size": 1,
        "num_gpu_blocks": 32,
        "enable_prefix_caching": False,
        "long_prefill_token_threshold": 30,
        "scheduler_reserve_full_isl": False,
    },
    "requests": [
        {"id": "r000", "arrival_step": 0, "prompt_len": 31, "output_len": 2, "abort_step": 22},
        {"id": "r001", "arrival_step": 20, "prompt_len": 1, "output_len": 3},
    ],
    "max_steps": 400,
}


@given(cases())
@example(SELF_PREEMPTION)
def test_replayed_decisions_equal_the_reference(case: dict[str, Any]) -> None:
    got = [line for line in json.loads(json.dumps(list(replay(case)))) if "it" in line]
    want = json.loads(json.dumps(list(reference.Sim(case).run())))
    for expected, actual in zip(want, got, strict=True):
        for name in ("placeholders", "stale"):  # bookkeeping of vLLM's own that decisions only show the effect of
            expected["state"].pop(name, None)
        if "sched" in expected:
            actual["sched"].pop("notify_finished", None)
            actual["sched"].pop("padded", None)
            assert list(expected["sched"]["scheduled"]) == list(actual["sched"]["scheduled"])
        assert expected == actual


@given(st.data())
def test_a_simulated_run_equals_the_reference(data: st.DataObject) -> None:
    config = data.draw(scheduler_configs(async_scheduling=data.draw(st.booleans())))
    work = data.draw(workloads(config))
    cost = data.draw(COSTS)
    executor = Recorder(cost)
    records = run(work, config, cost, executor=executor, horizon_ns=HORIZON_NS)
    want = NaiveRun(work, config, cost)
    want.serve()
    if records.stalled and len(executor.plans) < len(
        want.plans
    ):  # it gave up what only preempts; the reference does not
        assert executor.plans == want.plans[: len(executor.plans)]
        return
    assert executor.plans == want.plans
    assert token_times(records) == want.token_ns
    assert dict(enumerate(records.requests.num_preemptions.tolist())) == want.preemptions
    assert dict(enumerate(records.requests.num_recomputed_tokens.tolist())) == want.recomputed


HORIZON_NS = 4_000_000_000
"""Some drawn engines livelock as vLLM would (a request that outgrows what others leave); all runs stop here."""


class Recorder(SimExecutor):
    """Notes what each step was decided to be."""

    def __init__(self, cost: CostModel) -> None:
        super().__init__(cost)
        self.plans: list[dict[str, Any]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        admitted = {admission.request for admission in plan.admissions}
        blocks = {request.request_id: [request.block_ids[-1]] for request in plan.grown}
        for chunk in plan.chunks:
            ids = chunk.request.block_ids
            new = ids if chunk.request in admitted else ids[len(ids) - chunk.num_new_blocks :]
            if new:
                blocks[chunk.request.request_id] = list(new)
        result = super().execute(plan)
        self.plans.append(
            {
                "shape": plan.shape,
                "chunks": {c.request.request_id: c.num_tokens for c in plan.chunks},
                "blocks": blocks,
                "admitted": [(a.request.request_id, a.num_cached_tokens, a.resumed) for a in plan.admissions],
                "step_ns": result.step_ns,
            }
        )
        return result


class NaiveRun:
    """The reference scheduler on a clock: one request, one token, one step at a time."""

    def __init__(self, work: Workload, config: SchedulerConfig, cost: CostModel) -> None:
        fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
        self.sim = reference.Sim({"config": fields, "requests": []})
        self.sim.byid = {}
        self.work, self.cost = work, cost
        self.plans: list[dict[str, Any]] = []
        self.token_ns: dict[int, list[int]] = {row: [] for row in range(len(work))}
        self.preemptions = dict.fromkeys(range(len(work)), 0)
        self.recomputed = dict.fromkeys(range(len(work)), 0)
        self.high_water: dict[int, int] = {}
        self.depth = 2 if config.async_scheduling else 1
        self.decoding: set[int] = set()

    def serve(self) -> None:
        """vLLM's engine loop with a queue of batches, in simulated time."""
        now = free = row = 0
        arrivals, depth, sim = self.work.arrival_ns.tolist(), self.depth, self.sim
        queue: list[tuple[Any, int]] = []
        while now < HORIZON_NS:
            while row < len(arrivals) and arrivals[row] <= now:
                self._arrive(row)
                row += 1
            computed = False
            if sim.reqs:
                before = {r.id: r.computed for r in sim.reqs.values()}
                step, log = sim.schedule()
                self._note_preemptions(log, before)
                computed = bool(step[0])
                if computed:
                    decoding = set(self.decoding)
                    shape = self._shape(log, before)
                    step_ns = max(1, round(self.cost.step_time_s(shape) * 1e9))
                    self._note_plan(log, shape, step_ns, decoding)
                    free = max(now, free) + step_ns
                elif not log["preempted"] and not any(s[0] for s, _ in queue):
                    if row == len(arrivals):
                        return
                    queue.clear()
                    now = max(now, arrivals[row])
                    continue
                queue.append((step, free))
                if len(queue) < depth:
                    now += 0 if computed else RETRY_NS
                    continue
            elif not queue:
                if row == len(arrivals):
                    return
                now = arrivals[row]
                continue
            num_known = len(sim.reqs)  # vLLM takes in what came meanwhile at the start of the next turn only
            step, end = queue.pop(0)
            if step[0]:
                now = end
                if now >= HORIZON_NS:
                    return
                for name, count in sim.update(step)["out"].items():
                    self.token_ns[name] += [now] * count
            if not computed and num_known:
                now += RETRY_NS

    def _arrive(self, row: int) -> None:
        w = self.work
        assert w.content is not None
        total = int(w.num_prompt_tokens[row] + w.max_tokens[row]) + 1  # a token may come after the last
        tokens = [token_id(1000 + row, i) for i in range(total)]
        start = 0
        for stream, end in w.content[row]:
            tokens[start:end] = [token_id(stream, i) for i in range(start, end)]
            start = end
        prompt = int(w.num_prompt_tokens[row])
        request = reference.Req(
            row,
            {
                "id": row,
                "prompt_token_ids": tokens[:prompt],
                "output_len": int(w.max_tokens[row]),
                "stop_at": int(w.num_output_tokens[row]),
                "priority": int(w.priority[row]),
                "arrival_time": int(w.arrival_ns[row]),
                "output_seed": lambda i: tokens[prompt + i],
            },
        )
        if self.sim.pool.caching:
            self.sim.grow_keys(request)
        else:
            self.sim.grow_keys = lambda _: None
        self.sim.reqs[row] = self.sim.byid[row] = request
        self.sim.enqueue(request)

    def _note_preemptions(self, log: dict[str, Any], before: dict[int, int]) -> None:
        for name in log["preempted"]:
            self.preemptions[name] += 1
            self.decoding.discard(name)
            self.high_water[name] = max(self.high_water.get(name, 0), before[name])

    def _shape(self, log: dict[str, Any], before: dict[int, int]) -> StepShape:
        decodes = context = chunks = tokens = cached = pairs = 0
        for name, n in log["scheduled"].items():
            done = self._done(log, before, name)
            if name in self.decoding:
                decodes += 1
                context += done + 1
            else:
                chunks += 1
                tokens += n
                cached += done
                pairs += sum(done + i + 1 for i in range(n))
                self.recomputed[name] += max(0, min(self.high_water.get(name, 0), done + n) - done)
        self.decoding.update(log["samples"])
        return StepShape(decodes, context, chunks, tokens, cached, pairs, len(log["samples"]))

    def _note_plan(self, log: dict[str, Any], shape: StepShape, step_ns: int, decoding: set[int]) -> None:
        resumed = set(log["resumed"])
        self.plans.append(
            {
                "shape": shape,
                "chunks": {name: n for name, n in log["scheduled"].items() if name not in decoding},
                "blocks": log["blocks"],
                "admitted": [
                    (n, log["hit_tokens"][n], n in resumed) for n in log["scheduled"] if n in log["hit_tokens"]
                ],
                "step_ns": step_ns,
            }
        )

    @staticmethod
    def _done(log: dict[str, Any], before: dict[int, int], name: int) -> int:
        done: int = log["hit_tokens"].get(name, before[name])
        return done


def token_times(records: Records) -> dict[int, list[int]]:
    """When each request got its tokens, from the spans."""
    (replica,) = records.replicas
    times: dict[int, list[int]] = {row: [] for row in range(len(records.requests))}
    for row, first, count in zip(replica.spans.request, replica.spans.first_step, replica.spans.count, strict=True):
        times[int(row)] += replica.steps.end_ns[first : first + count].tolist()
    return times
