"""Which blocks hold keys and values that this executor has really computed, and of which tokens.

The scheduler's prefix index is not enough to know that.  Steps may have been simulated meanwhile; and a block counts
as cached from the moment its step is decided, even if that step then takes it back before it is computed (vLLM's own
rule, which the scheduler follows).  So a prefix hit is trusted only where this record agrees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from windtunnel.executor.batch import Grant
from windtunnel.sim.engine.plan import StepPlan
from windtunnel.sim.engine.request import Request


class Residency:
    """The key (``sim.engine.keys``) of each block that is full of computed tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._key_of: dict[int, int] = {}

    def clear(self) -> None:
        """Nothing counts as computed."""
        self._key_of.clear()

    def note(self, grants: Iterable[Grant]) -> None:
        """These grants are computed: the blocks that they begin or fill hold something else from now on."""
        size = self._block_size
        for request, num_tokens, computed, _ in grants:
            offset = computed % size
            if offset == 0 or offset + num_tokens >= size:
                self._write(request, computed, computed + num_tokens)

    def missing_hits(self, plan: StepPlan, grants: Sequence[Grant]) -> list[Grant]:
        """What must be computed before the step: prefix hits of its admissions that nobody has computed.

        A hit on a block that the step itself fills is fine, because every layer stores all keys before it reads any.
        """
        found: list[Grant] = []
        for admission in plan.admissions:
            request, num_tokens = admission.request, admission.num_cached_tokens
            if not num_tokens:
                continue
            absent = self._absent(request, num_tokens)
            if absent and (later := set(absent) - self._filled_by(grants, request)):
                # Of the blocks that the step fills, those ahead of a lost one are needed now.
                runs = self._runs(request, [block for block in absent if block <= max(later)], num_tokens)
                self.note(runs)
                found += runs
        return found

    def missing(self, request: Request, num_tokens: int) -> list[Grant]:
        """What must be computed so that the request's first ``num_tokens`` tokens are in its blocks; notes it."""
        found = self._runs(request, self._absent(request, num_tokens), num_tokens)
        self.note(found)
        return found

    def _absent(self, request: Request, num_tokens: int) -> list[int]:
        """Places in the request's list of the blocks that do not hold its tokens; a part of a block never does."""
        num_full, is_cut = divmod(num_tokens, self._block_size)
        absent = list(range(num_full))
        if request.keys is not None:
            keys, blocks = request.keys.between(0, num_full), request.block_ids
            absent = [j for j in absent if self._key_of.get(blocks[j]) != keys[j]]
        return [*absent, num_full] if is_cut else absent

    def _filled_by(self, grants: Sequence[Grant], request: Request) -> set[int]:
        """Places in the request's list of blocks that the step fills with just what the request expects there."""
        size, keys = self._block_size, request.keys
        if keys is None:
            return set()
        place_of = {block: j for j, block in enumerate(request.block_ids)}
        filled = set()
        for other, num_tokens, computed, _ in grants:
            if other is request or other.keys is None:
                continue
            for j in range(computed // size, (computed + num_tokens) // size):
                place = place_of.get(other.block_ids[j])
                if place is not None and keys.between(place, place + 1)[0] == other.keys.between(j, j + 1)[0]:
                    filled.add(place)
        return filled

    def _runs(self, request: Request, absent: list[int], num_tokens: int) -> list[Grant]:
        """Grants for these blocks, neighbours in one."""
        size = self._block_size
        runs: list[list[int]] = []  # [first block, block behind the last]
        for block in absent:
            if runs and runs[-1][1] == block:
                runs[-1][1] += 1
            else:
                runs.append([block, block + 1])
        return [
            Grant(request, min(behind * size, num_tokens) - first * size, first * size, False) for first, behind in runs
        ]

    def _write(self, request: Request, begin: int, end: int) -> None:
        size, blocks, keys = self._block_size, request.block_ids, request.keys
        first, num_full = begin // size, end // size
        for j in range(first, -(-end // size)):
            self._key_of.pop(blocks[j], None)
        if keys is not None and num_full > first:
            self._key_of.update(zip(blocks[first:num_full], keys.between(first, num_full), strict=True))
