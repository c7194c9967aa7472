"""Decisions compared, step by step, with those that real vLLM 0.32 took on the same cases."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.scheduler import Sim as ReferenceScheduler

from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.decisions import CaseError, replay
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.simulate import run
from windtunnel.sim.workload import workload

pytestmark = pytest.mark.golden

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted((GOLDEN / "cases").glob("*.json"))
FIELDS = {
    "sched": (
        *("n", "scheduled", "total", "new", "resumed", "running", "preempted", "hit_tokens", "blocks", "free"),
        *("samples", "notify_finished", "spec", "padded"),
    ),
    "upd": ("n", "out", "finished", "accepted", "drafts"),
    "state": ("computed", "tokens", "nblk", "running", "waiting", "free", "free_crc", "cached_hashes"),
}
RecordProperty = Any


def load(path: Path) -> dict[str, Any]:
    case: dict[str, Any] = json.loads(path.read_text())
    return case


def recorded(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def compared(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fields that must be equal, with the order of the scheduled requests made visible."""
    return [
        {
            "it": line["it"],
            "arrived": line.get("arrived"),
            "aborted": line.get("aborted"),
            "order": list(line["sched"]["scheduled"]) if "sched" in line else None,
            **{part: {name: line[part].get(name) for name in names} for part, names in FIELDS.items() if part in line},
        }
        for line in lines
        if "it" in line
    ]


def assert_equal_step_by_step(want: list[dict[str, Any]], got: list[dict[str, Any]]) -> None:
    for expected, actual in zip(want, got, strict=False):
        assert expected == actual, f"iteration {expected['it']}"
    assert len(want) == len(got)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_decisions_equal_those_of_real_vllm(path: Path, record_property: RecordProperty) -> None:
    lines = json.loads(json.dumps(list(replay(load(path)))))
    want = recorded(GOLDEN / "decisions" / f"{path.stem}.jsonl.gz")
    assert_equal_step_by_step(compared(want), compared(lines))
    summary = {key: value for key, value in want[-1].items() if key != "query_tokens"}  # that one was never counted
    assert summary == lines[-1]
    record_property("golden_steps", len(want) - 2)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_reference_scheduler_agrees_with_real_vllm(path: Path) -> None:
    case = load(path)
    got = json.loads(json.dumps(list(ReferenceScheduler(case).run())))
    unsaid = ("notify_finished", "padded")  # the reference does not write these
    want = recorded(GOLDEN / "decisions" / f"{path.stem}.jsonl.gz")[1:-1]
    for line in want:
        for name in unsaid:
            line.get("sched", {}).pop(name, None)
    assert_equal_step_by_step(compared(want), compared(got))


@pytest.mark.parametrize(("caching", "num_recomputed"), [(True, 338_578), (False, 458_898)])
def test_totals_under_pressure_equal_those_of_real_vllm(caching: bool, num_recomputed: int) -> None:
    """1,000 requests of 512 + 512 tokens, one every 100 ms, on 2,000 blocks, with steps of 10 ms.

    The real scheduler preempted 700 times; mean TTFT was 11.271 s and mean E2EL 17.474 s.
    """
    config = SchedulerConfig(
        num_gpu_blocks=2001, max_num_seqs=256, max_num_batched_tokens=8192, enable_prefix_caching=caching
    )
    length = np.full(1000, 512)
    records = run(workload(np.arange(1000) * 100_000_000, length, length), config, ConstantCost(step_s=0.01))
    requests = records.requests
    assert requests.num_preemptions.sum() == len(records.replicas[0].preemptions) == 700
    assert requests.num_recomputed_tokens.sum() == num_recomputed
    assert round(float((requests.first_token_ns - requests.arrival_ns).mean() / 1e9), 3) == 11.271
    assert round(float((requests.finish_ns - requests.arrival_ns).mean() / 1e9), 3) == 17.474
    assert len(records.replicas[0].steps) == 12_952  # and one empty decision after the last finish
    # 512,000 tokens in 129.52 s.  The recorded figure, 3,953.4 tokens/s, divides by one step less (129.51 s).
    assert round(512_000 / (records.end_ns / 1e9), 1) == 3953.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"spec_method": "medusa"}}, "spec_method must be one of"),
        ({"config": {"blok_size": 16}}, "unknown key 'blok_size'"),
        ({"config": {"max_num_seqs": 512, "max_num_batched_tokens": 256}}, "must be at least max_num_seqs"),
        ({"config": {"max_num_seqs": 1.5}}, "config.max_num_seqs must be a whole number, got 1.5"),
        ({"config": {"enable_prefix_caching": "x"}}, "config.enable_prefix_caching must be true or false, got 'x'"),
        ({"config": {"watermark": True}}, "config.watermark must be a number, got True"),
        ({"requests": [{"id": "a", "prompt_len": 1, "output_len": 1, "abort_stp": 3}]}, "unknown key 'abort_stp'"),
        ({"requests": [{"id": "a", "prompt_len": 1, "output_len": 1, "seed": None}]}, "seed must be a whole number"),
        ({"requests": [{"id": "a", "prompt_token_ids": [[1]], "output_len": 1}]}, "prompt_token_ids must be a list"),
        ({"requests": [{"id": "a", "prompt_len": 1, "output_len": 1, "cache_salt": []}]}, "cache_salt must be text"),
        ({"max_steps": "x"}, "max_steps must be a whole number"),
        ({"requests": None}, "needs a list 'requests'"),
        ({"requests": [{"id": "a", "prompt_len": -1, "output_len": 1}]}, r"requests\[0\] \(a\): prompt_len"),
        ({"requests": [{"id": "a", "prompt_len": 1, "output_len": 1}] * 2}, "used twice"),
        ({"requests": [{"id": "a", "prompt_len": 5000, "output_len": 1}]}, "leaves no room for an answer"),
    ],
)
def test_a_malformed_case_is_refused_with_its_place(change: dict[str, Any], message: str) -> None:
    case = {"config": {}, "requests": [], **change}
    with pytest.raises(CaseError, match=message):
        list(replay(case))
