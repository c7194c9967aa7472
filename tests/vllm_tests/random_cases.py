"""Random engines and workloads for the differential test: every feature that a case can ask for, small pools."""

from __future__ import annotations

import random
from typing import Any

Case = dict[str, Any]


def random_case(seed: int) -> Case:
    """The case of this seed; the same seed gives the same case."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 8, 16, 16, 32])
    max_model_len = rng.choice([128, 256, 512, 1024])
    longest_prompt = rng.choice([8, 40, 150, max_model_len // 3])
    longest_output = rng.choice([3, 10, 60, max_model_len // 4])
    max_num_seqs = rng.choice([1, 2, 4, 8, 16, 32])
    chunked = rng.random() < 0.85
    budget = max(max_num_seqs, rng.choice([16, 64, 128, 256])) if chunked else max_model_len
    largest = -(-(min(longest_prompt, max_model_len) + longest_output) // block_size)
    config: dict[str, Any] = {
        "block_size": block_size,
        "num_gpu_blocks": 2 + int(largest * rng.choice([1.05, 1.5, 2.5, 6])),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": rng.random() < 0.7,
        "long_prefill_token_threshold": rng.choice([0, 0, 0, 5, 16, 64]),
        "long_prefill_token_threshold_adaptive": rng.random() < 0.3,
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "watermark": rng.choice([0.0, 0.0, 0.05, 0.2]),
        "scheduler_reserve_full_isl": rng.random() < 0.8,
        "async_scheduling": rng.random() < 0.5,
    }
    if rng.random() < 0.15:
        config["max_num_active_seqs"] = max(1, max_num_seqs // 2)
    if rng.random() < 0.15 and chunked:
        config["max_num_scheduled_tokens"] = max(1, budget * 3 // 4)
    if rng.random() < 0.25:
        config["pipeline_parallel_size"] = rng.choice([2, 3, 4])
    # vLLM never combines pipeline parallelism and async scheduling under its first model runner.
    pipelined_async = config["async_scheduling"] and config.get("pipeline_parallel_size", 1) > 1
    if config["async_scheduling"] and (pipelined_async or rng.random() < 0.4):
        config["use_v2_model_runner"] = True
    case: Case = {
        "name": f"random_{seed}",
        "config": config,
        "requests": _requests(rng, config, longest_prompt, longest_output),
        "max_steps": 20_000,
    }
    if rng.random() < 0.25:
        case["spec"] = _speculation(rng, config)
    return case


def _speculation(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    config["num_speculative_tokens"] = rng.choice([1, 2, 4])
    config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], 16)
    if config["async_scheduling"]:  # there the drafts are placeholders of a fixed number
        config["spec_method"] = rng.choice(["eagle3", "draft_model"])
        return {"acceptance": rng.choice([0.0, 0.5, 1.0]), "num_draft": "full"}
    config["spec_method"] = rng.choice(["ngram", "eagle3", "draft_model"])
    return {"acceptance": rng.choice([0.0, 0.5, 1.0]), "num_draft": rng.choice(["full", "seeded"])}


def _requests(
    rng: random.Random, config: dict[str, Any], longest_prompt: int, longest_output: int
) -> list[dict[str, Any]]:
    gaps = rng.choice([[0], [0, 0, 1], [0, 1, 2, 5], [3, 10, 40]])
    num_groups, longest_prefix = rng.choice([0, 2, 5]), rng.choice([16, 64, 128])
    identical, aborting = rng.choice([0, 0, 0.4]), rng.choice([0, 0, 0.2])
    by_priority = config["policy"] == "priority"
    requests: list[dict[str, Any]] = []
    step = 0
    for index in range(rng.choice([20, 40, 80])):
        step += rng.choice(gaps)
        request: dict[str, Any] = {
            "id": f"r{index:03d}",
            "arrival_step": step,
            "prompt_len": rng.randint(1, min(longest_prompt, config["max_model_len"] - 1)),
            "seed": 1000 * index + 7,
            "output_len": rng.randint(1, longest_output),
        }
        if num_groups and rng.random() < 0.8:
            request["prefix_group"] = rng.randrange(num_groups)
            request["prefix_len"] = min(request["prompt_len"], rng.choice([longest_prefix // 4, longest_prefix]))
        if requests and rng.random() < identical:
            model = rng.choice(requests)
            for key in ("prompt_len", "seed", "prefix_group", "prefix_len"):
                request.pop(key, None)
                if key in model:
                    request[key] = model[key]
            request["output_seed"] = 2_000_000 + requests.index(model)
        if by_priority:
            request["priority"] = rng.randrange(4)
        if rng.random() < 0.1:
            request["cache_salt"] = rng.choice(["a", "b"])
        if rng.random() < aborting:
            request["abort_step"] = step + rng.randint(0, 40)
        requests.append(request)
    return requests
