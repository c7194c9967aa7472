"""The KV block pool: who holds which block, which prefixes can be found, what is handed out next.

The free queue of vLLM 0.32 gives blocks from its front.  Released blocks that hold no full prefix go to the front,
the others to the end; so the queue is always a stack of blank blocks ahead of a queue of cached ones, and it is kept
as these two.

Most cached blocks can never be looked up again, because only their finished request knew their content.  They take
part in the order of the queue like all others, but need no entry in the index; the queue holds them as whole runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence


class BlockPool:
    """Blocks 1 … num_blocks - 1 (block 0 is the null block and is never handed out).

    Invariants, checked in tests:

    - every block is free or held, and held as often as requests list it;
    - the index knows exactly the blocks that were registered and not handed out since;
    - a held block is never handed out.
    """

    __slots__ = (
        "_blank",
        "_extra_holders",
        "_index",
        "_key_of",
        "_num_entries",
        "_queue",
        "_run_of",
        "caching",
        "num_blocks",
        "num_free_cached",
    )

    def __init__(self, num_blocks: int, caching: bool) -> None:
        self.num_blocks = num_blocks
        self.caching = caching
        self.num_free_cached = 0
        """Free blocks that hold a full prefix."""
        self._blank = list(range(num_blocks - 1, 0, -1))  # the next one out is the last
        # The cached free blocks: runs, each with the next one out last.  A findable block that was held again leaves
        # a stale entry behind; it is valid only in the run that _run_of names.
        self._queue: deque[tuple[list[int], bool]] = deque()  # (blocks, whether they are findable)
        self._run_of: dict[int, list[int]] = {}
        self._num_entries = 0
        self._key_of: dict[int, int] = {}
        self._index: dict[int, int | list[int]] = {}  # one block, or several that were computed twice, oldest first
        self._extra_holders: dict[int, int] = {}  # held blocks with more than one holder: holders less one

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._blank) + self.num_free_cached

    @property
    def num_keys(self) -> int:
        """Distinct prefixes that can be found."""
        return len(self._index)

    def free_queue(self) -> list[int]:
        """The free blocks in the order in which they would be handed out."""
        return [
            *reversed(self._blank),
            *(block for run, findable in self._queue for block in self._valid(run, findable)),
        ]

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` blocks; the caller has made sure that they are there.  What they held is forgotten."""
        blank = self._blank
        if count <= len(blank):
            cut = len(blank) - count
            taken = blank[cut:]
            del blank[cut:]
            taken.reverse()
            return taken
        taken = blank[::-1]
        blank.clear()
        self._take_cached(taken, count - len(taken))
        return taken

    def lookup(self, keys: Iterable[int]) -> list[int]:
        """The blocks that hold these prefixes, as far as they are known without a gap."""
        index, found = self._index, []
        for key in keys:
            block = index.get(key)
            if block is None:
                break
            found.append(block if isinstance(block, int) else block[0])
        return found

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """How many of these findable blocks nobody holds."""
        free = self._run_of
        return sum(block in free for block in blocks) if free else 0

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of these findable blocks; free ones leave the free queue."""
        run_of, extra = self._run_of, self._extra_holders
        for block in blocks:
            if block in run_of:
                del run_of[block]
                self.num_free_cached -= 1
            else:
                extra[block] = extra.get(block, 0) + 1

    def register(self, blocks: Iterable[int], keys: Iterable[int]) -> None:
        """Make held blocks findable under their keys."""
        index, key_of = self._index, self._key_of
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key
            known = index.setdefault(key, block)
            if known is not block:
                index[key] = [known, block] if isinstance(known, int) else [*known, block]

    def release(self, blocks: list[int], num_findable: int, num_cached: int) -> None:
        """Take one holder off a request's blocks.

        The first ``num_cached`` hold full prefixes, the first ``num_findable`` of these are in the index.  Blocks
        come back tail first: the blank ones to the front of the queue, the cached ones to its end.
        """
        if self._extra_holders:
            blocks, num_findable, num_cached = self._drop_holders(blocks, num_findable, num_cached)
        self._blank.extend(blocks[num_cached:] if num_cached else blocks)
        if not num_cached:
            return
        if num_cached > num_findable:
            self._queue.append((blocks[num_findable:num_cached], False))
        if num_findable:
            run = blocks[:num_findable]
            self._run_of.update(dict.fromkeys(run, run))
            self._queue.append((run, True))
        self.num_free_cached += num_cached
        self._num_entries += num_cached
        if self._num_entries > 2 * self.num_blocks:
            self._drop_stale()

    def _take_cached(self, taken: list[int], count: int) -> None:
        queue = self._queue
        self.num_free_cached -= count
        while count:
            run, findable = queue[0]
            size = len(run)
            if findable:
                count -= self._take_findable(run, taken, count)
            elif count < size:
                taken += run[: -count - 1 : -1]
                del run[-count:]
                count = 0
            else:
                taken += run[::-1]
                run.clear()
                count -= size
            self._num_entries -= size - len(run)
            if not run:
                queue.popleft()

    def _take_findable(self, run: list[int], taken: list[int], most: int) -> int:
        """Take up to ``most`` blocks from the run, skipping stale entries; returns how many it took."""
        run_of, before = self._run_of, len(taken)
        while run and len(taken) - before < most:
            block = run.pop()
            if run_of.get(block) is run:
                del run_of[block]
                self._forget(block)
                taken.append(block)
        return len(taken) - before

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block)
        known = self._index[key]
        if isinstance(known, int):
            del self._index[key]
        else:
            known.remove(block)
            if len(known) == 1:
                self._index[key] = known[0]

    def _drop_holders(self, blocks: list[int], num_findable: int, num_cached: int) -> tuple[list[int], int, int]:
        """The blocks that have no holder left, and how many of them are findable and cached."""
        extra, freed = self._extra_holders, []
        for block in blocks[:num_findable]:  # only what can be found can have other holders
            others = extra.get(block, 0)
            if others > 1:
                extra[block] = others - 1
            elif others:
                del extra[block]
            else:
                freed.append(block)
        num_kept = num_findable - len(freed)
        return freed + blocks[num_findable:], num_findable - num_kept, num_cached - num_kept

    def _drop_stale(self) -> None:
        queue: deque[tuple[list[int], bool]] = deque()
        for run, findable in self._queue:
            kept = run
            if findable:
                kept = [block for block in run if self._run_of.get(block) is run]
                self._run_of.update(dict.fromkeys(kept, kept))
            if kept:
                queue.append((kept, findable))
        self._queue = queue
        self._num_entries = self.num_free_cached

    def _valid(self, run: list[int], findable: bool) -> Iterator[int]:
        return (block for block in reversed(run) if not findable or self._run_of.get(block) is run)
