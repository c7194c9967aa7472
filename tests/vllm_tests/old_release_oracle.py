"""The scheduler of an older vLLM release, driven step by step over a case without a model.

Scheduler, KV cache manager and request classes are those of the release that is imported as ``vllm``, unmodified.
Arguments that came and went between releases are given where a signature asks for them.  Synchronous, without
speculation, one stage.
"""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_tests.oracle import HERE, expand_prompt, tok

JsonDict = dict[str, Any]
MODEL = Path(HERE) / "model"
OUTPUT_SEED = 2_000_000
IDLE_STEPS = 4
"""An engine that neither computes nor expects anything is given up after so many steps."""


def make(cls: Callable[..., Any], given: JsonDict, if_required: JsonDict | None = None) -> Any:
    """An object of a class whose arguments differ between releases.

    ``given`` are passed where the class has them, ``if_required`` only where it has them without a default.
    """
    parameters = inspect.signature(cls).parameters
    required = [name for name in parameters if parameters[name].default is inspect.Parameter.empty]
    wanted = {name: value for name, value in given.items() if name in parameters}
    needed = {name: value for name, value in (if_required or {}).items() if name in required}
    return cls(**needed, **wanted)


class OldEngine:
    """The objects of one release that are made once: what its classes are called and where they lie."""

    def __init__(self) -> None:
        from transformers import AutoConfig

        # Releases register models that the installed transformers has meanwhile got itself.
        register = AutoConfig.register
        AutoConfig.register = staticmethod(lambda name, config, exist_ok=True: register(name, config, exist_ok=True))
        from vllm.platforms import current_platform

        # Decisions need neither kernels, which a source has not got, nor what the CPU asks of a configuration.
        cpu = type(current_platform)
        cpu.import_kernels = classmethod(lambda cls: None)
        cpu.check_and_update_config = classmethod(lambda cls, vllm_config: None)
        # Another process that looks at the model's class would not know of what is changed here.
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda function: function()
        self.model_configs: dict[int, Any] = {}

    def scheduler(self, config: JsonDict) -> tuple[Any, Any]:
        """(the release's scheduler for this config, the hash function of a request's blocks or None)."""
        from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        model_config = self._model_config(config["max_model_len"])
        options = {**config, "is_encoder_decoder": False, "async_scheduling": False}
        scheduler_config = make(SchedulerConfig, options)
        cache_config = make(
            CacheConfig,
            {name: config[name] for name in ("block_size", "enable_prefix_caching")},
            {"gpu_memory_utilization": 0.9, "swap_space": 0, "cache_dtype": "auto"},
        )
        parts = {
            "model_config": model_config,
            "scheduler_config": scheduler_config,
            "cache_config": cache_config,
        }
        vllm_config = make(VllmConfig, parts)
        _restore(scheduler_config, options, ("enable_chunked_prefill", "max_num_batched_tokens", "max_num_seqs"))
        _restore(scheduler_config, {"chunked_prefill_enabled": config["enable_chunked_prefill"]})
        _restore(scheduler_config, {"async_scheduling": False})
        _restore(cache_config, config, ("enable_prefix_caching", "block_size", "num_gpu_blocks"))
        scheduler = make(
            Scheduler,
            {
                **parts,
                "vllm_config": vllm_config,
                "kv_cache_config": _kv_cache_config(config),
                "block_size": config["block_size"],
                "hash_block_size": config["block_size"],
                "log_stats": True,
                "structured_output_manager": StructuredOutputManager(vllm_config),
            },
            {"lora_config": None},
        )
        return scheduler, _block_hasher(cache_config) if config["enable_prefix_caching"] else None

    def _model_config(self, max_model_len: int) -> Any:
        from vllm.config import ModelConfig

        if max_model_len not in self.model_configs:
            self.model_configs[max_model_len] = make(
                ModelConfig,
                {
                    "model": str(MODEL),
                    "tokenizer": str(MODEL),
                    "skip_tokenizer_init": True,
                    "dtype": "float16",
                    "seed": 0,
                    "max_model_len": max_model_len,
                },
                {"task": "auto", "tokenizer_mode": "auto", "trust_remote_code": False},
            )
        return self.model_configs[max_model_len]


class OldRun:
    """One case under the scheduler of the release: the lines of its decisions, in the format of ``oracle.Run``."""

    def __init__(self, engine: OldEngine, case: JsonDict) -> None:
        self.scheduler, self.block_hasher = engine.scheduler(case["config"])
        self.max_steps = case["max_steps"]
        requests = list(enumerate(case["requests"]))
        self.arrivals = deque(sorted(requests, key=lambda entry: (entry[1]["arrival_step"], entry[0])))
        self.aborts = deque(sorted((r["abort_step"], index, r["id"]) for index, r in requests if "abort_step" in r))
        self.output_seed = {r["id"]: r.get("output_seed", OUTPUT_SEED + index) for index, r in requests}
        self.num_sampled = dict.fromkeys(self.output_seed, 0)
        self.preempted: list[str] = []
        self._watch_preemptions()

    def lines(self) -> Iterator[JsonDict]:
        """One line for each step of the engine."""
        iteration = idle = 0
        while iteration < self.max_steps:
            came = self._arrive(iteration)
            self._abort(iteration)
            if not self.scheduler.has_requests():
                if not self.arrivals:
                    break
                iteration = max(iteration + 1, self.arrivals[0][1]["arrival_step"])
                continue
            decision = self._step()
            yield {"it": iteration, "sched": decision, "state": self._state()}
            iteration += 1
            busy = decision["scheduled"] or came or not self.scheduler.has_unfinished_requests()
            idle = 0 if busy else idle + 1
            if idle >= IDLE_STEPS and not self.arrivals and not self.aborts:
                break

    def _arrive(self, iteration: int) -> bool:
        came = False
        while self.arrivals and self.arrivals[0][1]["arrival_step"] <= iteration:
            self.scheduler.add_request(self._request(*self.arrivals.popleft()))
            came = True
        return came

    def _abort(self, iteration: int) -> None:
        from vllm.v1.request import RequestStatus

        while self.aborts and self.aborts[0][0] <= iteration:
            name = self.aborts.popleft()[2]
            if name in self.scheduler.requests:
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _request(self, index: int, spec: JsonDict) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        return make(
            Request,
            {
                "request_id": spec["id"],
                "prompt_token_ids": expand_prompt(spec),
                "sampling_params": SamplingParams(max_tokens=spec["output_len"], ignore_eos=True, temperature=0.0),
                "arrival_time": spec["arrival_step"] + index * 1e-6,
                "priority": spec.get("priority", 0),
                "cache_salt": spec.get("cache_salt"),
                "block_hasher": self.block_hasher,
            },
            {
                "eos_token_id": 2,
                **dict.fromkeys(("prompt", "pooling_params", "lora_request")),
                **dict.fromkeys(("multi_modal_inputs", "multi_modal_hashes", "multi_modal_placeholders")),
            },
        )

    def _step(self) -> JsonDict:
        """A decision and its outcome: a token for each request whose prompt is computed."""
        self.preempted.clear()
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        samples = [
            name
            for name in output.num_scheduled_tokens
            if requests[name].num_computed_tokens >= requests[name].num_tokens
        ]
        decision = {
            "scheduled": dict(output.num_scheduled_tokens),
            "total": output.total_num_scheduled_tokens,
            "new": [new.req_id for new in output.scheduled_new_reqs],
            "preempted": list(self.preempted),
            "samples": samples,
            "free": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }
        self.scheduler.update_from_output(output, self._model_output(list(output.num_scheduled_tokens), samples))
        return decision

    def _model_output(self, names: list[str], samples: list[str]) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        sampled: list[Any] = [[self._next_token(name)] if name in samples else [] for name in names]
        if _takes_arrays(ModelRunnerOutput):
            import numpy as np

            sampled = [np.array(tokens, dtype=np.int64) for tokens in sampled]
        return make(
            ModelRunnerOutput,
            {
                "req_ids": names,
                "req_id_to_index": {name: index for index, name in enumerate(names)},
                "sampled_token_ids": sampled,
            },
            {"spec_token_ids": None, "logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": []},
        )

    def _next_token(self, name: str) -> int:
        self.num_sampled[name] += 1
        return tok(self.output_seed[name], self.num_sampled[name] - 1)

    def _state(self) -> JsonDict:
        live = self.scheduler.requests.values()
        pool = self.scheduler.kv_cache_manager.block_pool
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        tables = _block_tables(self.scheduler.kv_cache_manager)
        return {
            "computed": {request.request_id: request.num_computed_tokens for request in live},
            "tokens": {request.request_id: request.num_tokens for request in live},
            "nblk": {name: len(blocks) for name, blocks in tables.items() if blocks},
            "running": [request.request_id for request in self.scheduler.running],
            "waiting": [request.request_id for request in self.scheduler.waiting],
            "free": len(free),
            "free_crc": zlib.crc32(",".join(map(str, free)).encode()),
            "cached_hashes": len(pool.cached_block_hash_to_block),
        }

    def _watch_preemptions(self) -> None:
        """Note who loses the blocks while running: no two releases preempt in the same function, all free there."""
        manager = self.scheduler.kv_cache_manager
        free = manager.free

        def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.status.name == "RUNNING":
                self.preempted.append(request.request_id)
            return free(request, *args, **kwargs)

        manager.free = watched


def _restore(target: Any, values: JsonDict, names: tuple[str, ...] = ()) -> None:
    """Set again what the case asks for, where vLLM's own checks have changed it."""
    for name in names or values:
        if hasattr(target, name):
            setattr(target, name, values[name])


def _kv_cache_config(config: JsonDict) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    shape = {"block_size": config["block_size"], "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    spec = make(FullAttentionSpec, shape, {"use_mla": False, "sliding_window": None})
    return make(
        KVCacheConfig,
        {"num_blocks": config["num_gpu_blocks"], "kv_cache_groups": [KVCacheGroupSpec(["layer"], spec)]},
        {"kv_cache_tensors": [], "tensors": {}},
    )


def _block_hasher(cache_config: Any) -> Any:
    """What gives a request the hashes of its blocks, where requests have them; before, the manager computes them."""
    from vllm.v1.core import kv_cache_utils

    if not hasattr(kv_cache_utils, "get_request_block_hasher"):
        return None
    try:
        from vllm.utils.hashing import get_hash_fn_by_name
    except ImportError:
        from vllm.utils import get_hash_fn_by_name
    hash_function = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
    kv_cache_utils.init_none_hash(hash_function)
    return kv_cache_utils.get_request_block_hasher(cache_config.block_size, hash_function)


def _takes_arrays(output_class: Any) -> bool:
    """Whether sampled tokens are arrays, as in 0.11.1 and 0.11.2, instead of lists."""
    types = {field.name: str(field.type) for field in dataclasses.fields(output_class)}
    return "ndarray" in types["sampled_token_ids"]


def _block_tables(manager: Any) -> Any:
    """Blocks by request; they moved from the manager into a part of it, and on into a part of that."""
    if hasattr(manager, "coordinator"):
        return manager.coordinator.single_type_managers[0].req_to_blocks
    if hasattr(manager, "single_type_manager"):
        return manager.single_type_manager.req_to_blocks
    return manager.req_to_blocks
