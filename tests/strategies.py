"""Hypothesis strategies for engines and workloads, small enough that everything runs short."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.workload import Workload, workload


@st.composite
def scheduler_configs(draw: st.DrawFn, **fixed: Any) -> SchedulerConfig:
    """Engines with few blocks, seats and tokens, so that each of them is short now and then."""
    max_num_seqs = draw(st.integers(1, 12))
    max_model_len = draw(st.sampled_from([64, 128, 400]))
    chunked = draw(st.booleans())
    budget = draw(st.integers(max(max_num_seqs, 1 if chunked else max_model_len), 500))
    values: dict[str, Any] = {
        "block_size": draw(st.sampled_from([1, 4, 16])),
        "num_gpu_blocks": draw(st.integers(4, 120)),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 7, 30])),
        "long_prefill_token_threshold_adaptive": draw(st.booleans()),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.05, 0.3])),
        "free_blocks_to_front": draw(st.sampled_from([True, True, False])),
        "long_prefill_spares_lone_request": draw(st.sampled_from([True, True, False])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "max_num_active_seqs": draw(st.one_of(st.none(), st.integers(1, max_num_seqs))),
        "max_num_scheduled_tokens": draw(st.one_of(st.none(), st.integers(1, budget))) if chunked else None,
    }
    return SchedulerConfig(**{**values, **fixed})


@st.composite
def workloads(draw: st.DrawFn, config: SchedulerConfig, max_requests: int = 14) -> Workload:
    """Requests that fit the engine, some of which share the beginning of their tokens or come at the same instant.

    Streams: 0 and 1 are two prompts' beginnings, 2 continues 0 from token 20 on, as a longer common prefix would.
    """
    num = draw(st.integers(1, max_requests))
    most = min(config.max_model_len, config.num_kv_tokens)  # prompt + output - 1 must fit
    arrivals, prompts, outputs, declared, priorities, content = [0], [], [], [], [], []
    for _ in range(num):
        arrivals.append(arrivals[-1] + draw(st.sampled_from([0, 0, 1, 5, 10, 35, 400])) * 1_000_000)
        prompt = draw(st.integers(1, most - 1)) if most > 1 else 1
        output = draw(st.integers(1, max(1, min(most - prompt, 60))))
        prompts.append(prompt)
        outputs.append(output)
        declared.append(output + draw(st.integers(0, 3)))
        priorities.append(draw(st.integers(0, 3)))
        shared = draw(st.sampled_from(["", "", "0", "1", "02"]))
        end = draw(st.integers(1, prompt + output))
        content.append(
            {"": (), "0": ((0, end),), "1": ((1, end),), "02": ((0, min(20, end)), *(((2, end),) if end > 20 else ()))}[
                shared
            ]
        )
    return workload(
        arrivals[:-1],
        prompts,
        outputs,
        max_tokens=declared,
        priority=priorities,
        content=tuple(content),
        num_streams=3,
    )


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Step-indexed cases for ``windtunnel decisions``."""
    config = draw(scheduler_configs())
    requests = []
    step = 0
    for i in range(draw(st.integers(1, 14))):
        step += draw(st.sampled_from([0, 0, 1, 3, 20]))
        prompt = draw(st.integers(1, config.max_model_len - 1))
        request: dict[str, Any] = {
            "id": f"r{i:03d}",
            "arrival_step": step,
            "prompt_len": prompt,
            "seed": draw(st.integers(100, 104)),
            "output_len": draw(st.integers(1, 40)),
            "priority": draw(st.integers(0, 3)),
            "output_seed": draw(st.integers(200, 203)),
        }
        if draw(st.booleans()):
            request |= {"prefix_group": draw(st.integers(0, 1)), "prefix_len": draw(st.integers(0, prompt))}
        if draw(st.integers(0, 5)) == 0:
            request["cache_salt"] = draw(st.sampled_from(["x", "y"]))
        if draw(st.integers(0, 4)) == 0:
            request["abort_step"] = step + draw(st.integers(0, 25))
        requests.append(request)
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    fields["async_scheduling"] = draw(st.booleans())
    spec = {}
    if draw(st.booleans()):
        fields["num_speculative_tokens"] = draw(st.integers(0, 4))
        fields["spec_method"] = draw(st.sampled_from(["ngram", "eagle3", "draft_model"]))
        fields["pipeline_parallel_size"] = draw(st.sampled_from([1, 1, 2, 4]))
        fields["use_v2_model_runner"] = draw(st.booleans())
        spec = {
            "acceptance": draw(st.sampled_from([0.0, 0.6, 1.0])),
            "num_draft": draw(st.sampled_from(["full", "seeded"])),
        }
    return {"spec": spec, "name": "drawn", "config": fields, "requests": requests, "max_steps": 400}
