"""A naive scheduler by vLLM 0.32's rules, one request at a time: the oracle of the property tests.

It shares no code and no idea with the product's own: tokens are real ids, blocks are counted one by one, every
request is looked at in every step.  It agrees with all recorded cases (``test_golden.py`` checks that).  It is read
more often than run; keep it stupid.
"""
import bisect, zlib
from collections import OrderedDict, deque
from reference.tokens import expand_prompt, splitmix64, tok, unit

WAITING, RUNNING, PREEMPTED, DONE = "WAITING", "RUNNING", "PREEMPTED", "DONE"


class Blocks:
    """Free queue (front = next to be handed out), ref counts, prefix index."""

    def __init__(self, n, size, caching, to_front=True):
        self.n, self.size, self.caching, self.to_front = n, size, caching, to_front
        self.queue = OrderedDict((i, None) for i in range(1, n))   # block 0 is the null block
        self.ref = [0] * n
        self.key = [None] * n            # prefix key of a cached block
        self.index = {}                  # prefix key -> ordered set of block ids
        self.ids = {}                    # interning of chained keys

    def chain(self, parent, tokens, salt):
        k = (parent, tokens, salt)
        return self.ids.setdefault(k, len(self.ids) + 1)

    def lookup(self, key):
        s = self.index.get(key)
        return next(iter(s)) if s else None

    def take(self, n):
        out = []
        for _ in range(n):
            b, _ = self.queue.popitem(last=False)
            k = self.key[b]
            if k is not None:            # eviction
                s = self.index[k]
                s.pop(b)
                if not s:
                    del self.index[k]
                self.key[b] = None
            self.ref[b] = 1
            out.append(b)
        return out

    def touch(self, ids):
        for b in ids:
            if self.ref[b] == 0:
                del self.queue[b]
            self.ref[b] += 1

    def release(self, ids):              # ids in the order tail ... head
        front, back = [], []
        for b in ids:
            self.ref[b] -= 1
            if self.ref[b] == 0:
                (back if self.key[b] is not None or not self.to_front else front).append(b)
        for b in reversed(front):
            self.queue[b] = None
            self.queue.move_to_end(b, last=False)
        for b in back:
            self.queue[b] = None

    def register(self, b, key):
        self.key[b] = key
        self.index.setdefault(key, {})[b] = None


class Req:
    def __init__(self, i, d):
        self.i, self.id = i, d["id"]
        self.tokens = expand_prompt(d)
        self.prompt = len(self.tokens)
        self.max_tokens = d["output_len"]
        self.stop_at = d.get("stop_at", self.max_tokens)   # an end that only the model knows (EOS)
        self.prio = d.get("priority", 0)
        self.at = d.get("arrival_time", d.get("arrival_step", 0) + i * 1e-6)
        self.salt = d.get("cache_salt")
        self.out_seed = d.get("output_seed", 2_000_000 + i)
        self.status, self.computed, self.outs = WAITING, 0, 0
        self.drafts, self.inflight, self.stale, self.holders = 0, 0, 0, 0
        self.npre = 0
        self.blocks, self.ncached, self.keys = [], 0, []
        self.chunk = False
        self.not_before = 0
        self.emitted = self.acc = self.dr = 0

    @property
    def order(self):
        return (self.prio, self.at, self.id)


class Sim:
    def __init__(self, case):
        self.case, c = case, case["config"]
        g = c.get
        self.bs = c["block_size"]
        self.pool = Blocks(c["num_gpu_blocks"], self.bs, g("enable_prefix_caching", True), g("free_blocks_to_front", True))
        self.spares_lone = g("long_prefill_spares_lone_request", True)
        self.seats = c.get("max_num_active_seqs") or c["max_num_seqs"]
        self.input_cap = c["max_num_batched_tokens"]
        self.tok_cap = g("max_num_scheduled_tokens") or self.input_cap
        self.mml = c["max_model_len"]
        self.chunked = g("enable_chunked_prefill", True)
        self.thr, self.adaptive = g("long_prefill_token_threshold", 0), g("long_prefill_token_threshold_adaptive", False)
        self.prio = g("policy", "fcfs") == "priority"
        self.mark = int(g("watermark", 0.0) * c["num_gpu_blocks"])
        self.full = g("scheduler_reserve_full_isl", True)
        self.asy = bool(g("async_scheduling", False))
        self.k = g("num_speculative_tokens", 0)
        m = g("spec_method", "ngram") if self.k else None
        self.look = self.k if m in ("eagle", "eagle3", "mtp", "draft_model") else 0
        self.drop = m in ("eagle", "eagle3", "mtp")
        self.extra = 1 if m == "draft_model" else 0
        self.spec = case.get("spec", {})
        self.pp = g("pipeline_parallel_size", 1)
        v2 = g("use_v2_model_runner", False)
        self.depth = (self.pp + 1 if v2 else 2 if self.pp == 1 else self.pp) if self.asy else self.pp
        self.gap = self.pp if (self.asy and v2) else 0
        self.running, self.waiting, self.reqs = [], [], {}
        self.notify = False
        self.n = 0

    # ---- waiting queue
    def enqueue(self, r, front=False):
        if self.prio:
            bisect.insort(self.waiting, r, key=lambda x: x.order)
        elif front:
            self.waiting.insert(0, r)
        else:
            self.waiting.append(r)

    # ---- KV blocks
    def grow_keys(self, r):
        bs, p = self.bs, self.pool
        while (len(r.keys) + 1) * bs <= len(r.tokens):
            j = len(r.keys)
            r.keys.append(p.chain(r.keys[-1] if j else 0, tuple(r.tokens[j * bs:(j + 1) * bs]), r.salt if j == 0 else None))

    def hits(self, r):
        if not self.pool.caching:
            return []
        got = []
        for key in r.keys[:(len(r.tokens) - 1) // self.bs]:
            b = self.pool.lookup(key)
            if b is None:
                break
            got.append(b)
        if self.drop and got:
            got.pop()
        return got

    def cache_upto(self, r, ntok):
        if self.pool.caching:
            for j in range(r.ncached, ntok // self.bs):
                self.pool.register(r.blocks[j], r.keys[j])
            r.ncached = max(r.ncached, ntok // self.bs)

    def alloc(self, r, new, hit=(), admitting=False):
        """True when the slots for `new` tokens (plus lookahead) were given."""
        p, bs = self.pool, self.bs
        base = r.computed + len(hit) * bs
        revived = sum(p.ref[b] == 0 for b in hit)
        have = len(r.blocks) + len(hit)
        mark = self.mark if (admitting and self.running) else 0
        if admitting and self.full:
            need = -(-min(len(r.tokens), self.mml) // bs) - have
            if max(need, 0) + revived + mark > len(p.queue):
                return None
        need = max(-(-min(base + new + self.look, self.mml) // bs) - have, 0)
        if need + revived + mark > len(p.queue):
            return None
        if hit:
            p.touch(hit)
            r.blocks = list(hit)
            r.ncached = len(hit)
        got = p.take(need)
        r.blocks += got
        self.cache_upto(r, min(base + new, len(r.tokens)))
        return got

    def release(self, r):
        self.pool.release(r.blocks[::-1])
        r.blocks, r.ncached = [], 0

    def preempt(self, r):
        self.release(r)
        r.status, r.computed, r.drafts = PREEMPTED, 0, 0
        r.stale, r.holders = r.inflight, 0
        r.npre += 1
        self.enqueue(r, front=True)

    # ---- one schedule() call
    def schedule(self):
        self.n += 1
        budget, room = self.tok_cap, self.input_cap
        n_all = len(self.running) + len(self.waiting)
        thr = self.thr if n_all > 1 or (n_all and not self.spares_lone) else 0
        if thr and self.adaptive:
            thr = max(thr, room // n_all)
        sched, newblk, drafts, victims = OrderedDict(), {}, {}, []
        ran, fresh, resumed, hitlog, padded = [], [], [], {}, []
        prefill_in_batch = False
        i = 0
        while i < len(self.running) and budget > 0:
            r = self.running[i]
            if room <= self.extra:
                break
            if r.holders > 0 and r.computed + 2 - r.holders >= r.prompt + r.max_tokens:
                i += 1
                continue
            if self.n < r.not_before:
                i += 1
                continue
            want = len(r.tokens) + r.drafts + r.holders - r.computed
            if 0 < thr < want:
                want = thr
            want = min(want, budget, room - self.extra, self.mml - r.computed - 1)
            if want <= 0:
                i += 1
                continue
            got = self.alloc(r, want)
            while got is None:
                if self.prio:
                    v = max(self.running, key=lambda x: (x.prio, x.at))
                    at = self.running.index(v)
                    del self.running[at]
                    if at < i:
                        i -= 1
                    if v in ran:
                        ran.remove(v)
                        back = sched.pop(v.id)
                        budget += back
                        room += back + self.extra
                        newblk.pop(v.id)
                        drafts.pop(v.id, None)
                else:
                    v = self.running.pop()
                self.preempt(v)
                victims.append(v)
                if v is r:
                    break
                got = self.alloc(r, want)
            if got is None:
                break
            ran.append(r)
            prefill_in_batch |= r.chunk
            sched[r.id] = want
            newblk[r.id] = got
            budget -= want
            room -= want + self.extra
            i += 1
            if r.drafts:
                d = want + r.computed - len(r.tokens) - r.holders
                if d > 0:
                    drafts[r.id] = min(d, r.drafts)
                r.drafts = 0
        skipped = []
        while not victims and budget > 0 and self.waiting:
            if room <= self.extra or len(self.running) >= self.seats:
                break
            r = self.waiting[0]
            if r.stale:
                skipped.append(self.waiting.pop(0))
                continue
            cap = min(budget, room - self.extra)
            hit = self.hits(r)
            done = len(hit) * self.bs
            want, pad = len(r.tokens) - done, False
            if self.k and want == 1 and not prefill_in_batch and (ran or done) and done + 2 + self.k <= self.mml:
                if 1 + self.k > cap:
                    break
                want, pad = 1 + self.k, True
            if 0 < thr < want:
                want = thr
            if not self.chunked and want > cap:
                break
            want = min(want, cap)
            if self.alloc(r, want, hit, admitting=True) is None:
                break
            self.waiting.pop(0)
            self.running.append(r)
            (fresh if r.status == WAITING else resumed).append(r)
            r.status, r.computed = RUNNING, done
            hitlog[r.id] = done
            sched[r.id] = want
            newblk[r.id] = list(r.blocks)
            budget -= want
            room -= want + self.extra
            if pad:
                drafts[r.id] = self.k
                padded.append(r.id)
        for r in reversed(skipped):
            self.enqueue(r, front=True)
        # after the decision
        sampled = []
        for rid, w in sched.items():
            r = self.reqs[rid]
            r.computed += w
            r.inflight += w
            r.chunk = r.computed < len(r.tokens) + r.holders
            if not r.chunk:
                sampled.append(rid)
                if self.asy:
                    r.holders += 1 + drafts.get(rid, 0)
                    r.drafts = self.k
                    if self.gap:
                        r.not_before = self.n + self.gap
        self.notify = False
        log = {"n": self.n, "scheduled": dict(sched), "total": sum(sched.values()), "new": [r.id for r in fresh],
               "resumed": [r.id for r in resumed], "running": [r.id for r in ran], "preempted": [r.id for r in victims],
               "hit_tokens": {r.id: hitlog[r.id] for r in fresh + resumed}, "blocks": {k: v for k, v in newblk.items() if v},
               "free": len(self.pool.queue), "samples": sampled}
        if drafts:
            log["spec"] = drafts
        return (dict(sched), sampled, dict(drafts), set(padded), self.n), log

    # ---- one update_from_output() call, with the oracle's token source
    def update(self, step):
        sched, sampled, drafts, padded, n = step
        out, fin, accepted, alive, gone = {}, [], {}, set(sampled), []
        new = {}
        for rid in sched:                       # the model's answer
            if rid in alive:
                m = self.byid[rid]
                d, a = drafts.get(rid, 0), 0
                while rid not in padded and a < d and unit(m.out_seed, m.acc * 64 + a) < self.spec.get("acceptance", 0.6):
                    a += 1
                if d:
                    m.acc += 1
                    accepted[rid] = a
                new[rid] = [tok(m.out_seed, m.emitted + j) for j in range(a + 1)]
                m.emitted += a + 1
        for rid, w in sched.items():
            r = self.reqs.get(rid)
            if r is None:
                continue
            r.inflight -= w
            stale = r.stale > 0
            if stale:
                r.stale -= w
            ts = new.get(rid, [])
            if ts and drafts.get(rid) and not stale:
                rejected = drafts[rid] - (len(ts) - 1)
                if r.computed > 0:
                    r.computed -= rejected
                if r.holders > 0:
                    r.holders -= rejected
            before, stop, used = r.status, False, 0
            for t in ts:
                r.tokens.append(t)
                r.outs += 1
                used += 1
                if len(r.tokens) >= self.mml or r.outs >= r.stop_at:
                    stop = True
                    break
            self.grow_keys(r) if ts else None
            if ts and self.asy:
                if not stale:
                    r.holders -= used
                if before == RUNNING:
                    self.cache_upto(r, r.computed - r.holders)
            if ts:
                out[rid] = used
            if stop:
                fin.append([rid, "length"])
                gone.append((r, before))
                r.status = DONE
                self.release(r)
                del self.reqs[rid]
                self.notify = True
        for r, before in gone:
            (self.running if before == RUNNING else self.waiting).remove(r)
        upd = {"n": n, "out": out, "finished": fin}
        if accepted:
            upd["accepted"] = accepted
        if self.k and not self.asy and sched:
            nd = {}
            for rid in sched:
                m, d = self.byid[rid], self.k
                if self.spec.get("num_draft", "full") == "seeded":
                    d = splitmix64((m.out_seed << 20) + 7 * m.dr) % (self.k + 1)
                    m.dr += 1
                if rid in alive:
                    nd[rid] = d
                if rid in self.reqs:
                    m.drafts = 0 if m.chunk else d
            upd["drafts"] = nd
        return upd

    def abort(self, ids):
        for rid in ids:
            r = self.reqs.pop(rid, None)
            if r:
                (self.running if r.status == RUNNING else self.waiting).remove(r)
                r.status = DONE
                self.release(r)
                self.notify = True

    def state(self):
        live = list(self.reqs.values())
        q = list(self.pool.queue)
        st = {"computed": {r.id: r.computed for r in live}, "tokens": {r.id: len(r.tokens) for r in live},
              "nblk": {r.id: len(r.blocks) for r in live if r.blocks}, "running": [r.id for r in self.running],
              "waiting": [r.id for r in self.waiting], "free": len(q),
              "free_crc": zlib.crc32(",".join(map(str, q)).encode()), "cached_hashes": len(self.pool.index)}
        h = {r.id: r.holders for r in live if r.holders}
        if h:
            st["placeholders"] = h
        s = {r.id: r.stale for r in live if r.stale}
        if s:
            st["stale"] = s
        return st

    def run(self):
        arr = deque(sorted(((d.get("arrival_step", 0), i, d) for i, d in enumerate(self.case["requests"])), key=lambda x: x[:2]))
        ab = sorted((d["abort_step"], i, d["id"]) for i, d in enumerate(self.case["requests"]) if "abort_step" in d)
        self.byid = {}
        it, idle, q, depth = 0, 0, deque(), self.depth
        while True:
            came, gone = [], []
            while arr and arr[0][0] <= it:
                _, i, d = arr.popleft()
                r = Req(i, d)
                if self.pool.caching:
                    self.grow_keys(r)
                else:
                    self.grow_keys = lambda r: None
                self.reqs[r.id] = self.byid[r.id] = r
                self.enqueue(r)
                came.append(r.id)
            while ab and ab[0][0] <= it:
                gone.append(ab.pop(0)[2])
            if gone:
                self.abort(gone)
            work = bool(self.reqs) or self.notify
            if not work and not q:
                if not arr:
                    return
                it = max(it + 1, arr[0][0])
                continue
            line, prog = {"it": it}, False
            if came:
                line["arrived"] = came
            if gone:
                line["aborted"] = gone
            block = True
            if work:
                step, line["sched"] = self.schedule()
                prog = bool(step[0])
                q.appendleft(step)
                if len(q) < depth and (prog or bool(self.reqs) or self.notify):
                    block = False
            if block and q:
                step = q.pop()
                line["upd"] = self.update(step)
                prog = prog or bool(step[0])
            line["state"] = self.state()
            yield line
            it += 1
            idle = 0 if (prog or came or not self.reqs) else idle + 1
            if (idle >= 3 + depth and not arr and not ab) or it >= self.case.get("max_steps", 200_000):
                return
