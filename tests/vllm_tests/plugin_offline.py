"""One workload through vLLM's LLM class under several schedulers, in this process; a line of JSON for each.

python -m vllm_tests.plugin_offline '{"model": ..., "schedulers": [null, "VllmScheduler"], "engine": {...}}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm_tests.plugin_help import PLUGIN, VOCAB


def prompts(num: int) -> list[list[int]]:
    """Prompts of 30 to 160 tokens; groups of three begin with the same 64, so that prefixes are shared."""
    return [
        [3 + (i // 3 * 131 + j * 17) % (VOCAB - 3) for j in range(64)][: 30 + i]
        + [3 + (i * 977 + j * 29) % (VOCAB - 3) for j in range(i * 37 % 97)]
        for i in range(num)
    ]


def misled_scheduler() -> type[Any]:
    """Our scheduler with a fault: every fourth block that a decode is given is told to the worker as block 1."""
    from windtunnel.executor.vllm_plugin.scheduler import VllmScheduler

    class Misled(VllmScheduler):
        def schedule(self, throttle_prefills: bool = False) -> Any:
            output = super().schedule(throttle_prefills)
            told = output.scheduled_cached_reqs.new_block_ids
            told[:] = [([1],) if blocks and blocks[0][-1] % 4 == 0 else blocks for blocks in told]
            return output

    return Misled


def run(task: dict[str, Any], scheduler: str | None) -> dict[str, Any]:
    """The answers and some of vLLM's own metrics."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    options: dict[str, Any] = {} if scheduler is None else {"scheduler_cls": f"{PLUGIN}.{scheduler}"}
    if scheduler == "misled":
        options = {"scheduler_cls": misled_scheduler()}
    llm = LLM(
        model=task["model"],
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        disable_log_stats=False,
        **options,
        **task["engine"],
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts(task["num_prompts"])]
    params = [
        SamplingParams(
            temperature=0,
            repetition_penalty=task["repetition"],  # above 1, greedy answers do not end in cycles
            max_tokens=20 + i * 7 % 50,
            stop_token_ids=list(range(3 + i % 9, VOCAB, 80)),
        )
        for i in range(len(asked))
    ]
    outputs = llm.generate(asked, params, use_tqdm=False)
    inner = llm.llm_engine.engine_core.engine_core.scheduler
    result = {
        "scheduler": type(inner).__name__,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "ends": [output.outputs[0].finish_reason for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "compared": getattr(inner, "num_compared", None),
        **{each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")},
    }
    del llm, inner
    cleanup_dist_env_and_memory()
    return result


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    for name in given["schedulers"]:
        print(json.dumps(run(given, name)), flush=True)
