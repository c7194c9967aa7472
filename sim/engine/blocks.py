"""The KV block pool: who holds which block, which prefixes can be found, what is handed out next.

The free queue of vLLM 0.32 gives blocks from its front.  Released blocks that hold no full prefix go to the front,
the others to the end; so the queue is always a stack of blank blocks ahead of a queue of cached ones, and it is kept
as these two.  Before vLLM 0.24 all released blocks went to the end; then the stack only holds those that were never
used, and the queue has runs of blank blocks, too.

Most cached blocks can never be looked up again, because only their finished request knew their content.  They take
part in the order of the queue like all others, but need no entry in the index; the queue holds them as whole runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_BLANK, _CACHED, _FINDABLE = range(3)
"""Kinds of runs: without a full prefix, with one that nobody can look for, with one that is in the index."""


class PoolState(NamedTuple):
    """All that a pool knows, as plain data."""

    num_blocks: int
    num_ids: int
    """Block numbers are below it; more than ``num_blocks`` where blocks were withdrawn."""
    caching: bool
    unhashed_first: bool
    blank: Sequence[int]
    """The stack ahead of the queue; the next one out is the last."""
    runs: Sequence[tuple[int, Sequence[int]]]
    """The queue: (kind, blocks) of each run, the next one out last; 0 is blank, 1 cached, 2 cached and in the index."""
    keys: Sequence[tuple[int, int]]
    """(block, key) of the blocks in the index, in the order in which they were registered."""
    extra_holders: Sequence[tuple[int, int]]
    """(block, holders less one) of the blocks with more than one holder."""


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
        "_num_blank_queued",
        "_num_entries",
        "_num_ids",
        "_num_queued",
        "_queue",
        "_run_of",
        "caching",
        "num_blocks",
        "unhashed_first",
    )

    def __init__(self, num_blocks: int, caching: bool, *, unhashed_first: bool = True) -> None:
        self.num_blocks = num_blocks
        self.caching = caching
        self.unhashed_first = unhashed_first
        """Whether released blocks without a full prefix go to the front of the free queue (since vLLM 0.24)."""
        self._blank = list(range(num_blocks - 1, 0, -1))  # the next one out is the last
        self._num_ids = num_blocks  # numbers that blocks have ever had
        # The other free blocks: runs, each with the next one out last.  A findable block that was held again leaves
        # a stale entry behind; it is valid only in the run that _run_of names.
        self._queue: deque[tuple[list[int], int]] = deque()  # (blocks, their kind)
        self._num_queued = 0  # without stale entries
        self._num_blank_queued = 0
        self._run_of: dict[int, list[int]] = {}
        self._num_entries = 0
        self._key_of: dict[int, int] = {}
        self._index: dict[int, int | list[int]] = {}  # one block, or several that were computed twice, oldest first
        self._extra_holders: dict[int, int] = {}  # held blocks with more than one holder: holders less one

    @classmethod
    def from_state(cls, state: PoolState) -> BlockPool:
        """A pool that goes on as the one would whose ``state`` it is."""
        pool = cls(state.num_blocks, state.caching, unhashed_first=state.unhashed_first)
        pool._num_ids = state.num_ids
        pool._blank = list(state.blank)
        for kind, blocks in state.runs:
            run = list(blocks)
            pool._queue.append((run, kind))
            pool._num_queued += len(run)
            if kind == _BLANK:
                pool._num_blank_queued += len(run)
            elif kind == _FINDABLE:
                pool._run_of.update(dict.fromkeys(run, run))
        pool._num_entries = pool._num_queued
        for block, key in state.keys:
            pool.register((block,), (key,))
        pool._extra_holders = dict(state.extra_holders)
        return pool

    def state(self) -> PoolState:
        """A copy of all that it knows."""
        runs = [(kind, list(self._valid(run, kind))[::-1]) for run, kind in self._queue]
        return PoolState(
            self.num_blocks,
            self._num_ids,
            self.caching,
            self.unhashed_first,
            self._blank.copy(),
            [(kind, run) for kind, run in runs if run],
            list(self._key_of.items()),
            list(self._extra_holders.items()),
        )

    def extend(self, count: int) -> None:
        """Add ``count`` new blocks, which are handed out after the blank ones that are there."""
        self._blank[:0] = range(self._num_ids + count - 1, self._num_ids - 1, -1)
        self._num_ids += count
        self.num_blocks += count

    def withdraw(self, count: int) -> None:
        """Take ``count`` free blocks out for good, in the order in which they would be handed out.

        The numbers of those that stay remain what they are.
        """
        self.take(count)
        self.num_blocks -= count

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._blank) + self._num_queued

    @property
    def num_free_cached(self) -> int:
        """Free blocks that hold a full prefix."""
        return self._num_queued - self._num_blank_queued

    def counts(self) -> tuple[int, int]:
        """``num_free`` and ``num_free_cached`` in one go."""
        num_queued = self._num_queued
        return len(self._blank) + num_queued, num_queued - self._num_blank_queued

    @property
    def num_keys(self) -> int:
        """Distinct prefixes that can be found."""
        return len(self._index)

    def free_queue(self) -> list[int]:
        """The free blocks in the order in which they would be handed out."""
        return [
            *reversed(self._blank),
            *(block for run, kind in self._queue for block in self._valid(run, kind)),
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
        taken = []
        if blank:
            taken = blank[::-1]
            blank.clear()
        self._take_queued(taken, count - len(taken))
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
                self._num_queued -= 1
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
        come back tail first: the blank ones to the front of the queue (or with the others), the cached ones to its
        end.
        """
        if self._extra_holders:
            blocks, num_findable, num_cached = self._drop_holders(blocks, num_findable, num_cached)
        if self.unhashed_first:
            self._blank.extend(blocks[num_cached:] if num_cached else blocks)
        elif num_cached < len(blocks):
            self._queue_blank(blocks[num_cached:])
        if not num_cached:
            return
        if num_cached > num_findable:
            self._queue.append((blocks[num_findable:num_cached], _CACHED))
        if num_findable:
            run = blocks[:num_findable]
            self._run_of.update(dict.fromkeys(run, run))
            self._queue.append((run, _FINDABLE))
        self._num_queued += num_cached
        self._num_entries += num_cached
        if self._num_entries > 2 * self.num_blocks:
            self._drop_stale()

    def _queue_blank(self, run: list[int]) -> None:
        self._queue.append((run, _BLANK))
        self._num_blank_queued += len(run)
        self._num_queued += len(run)
        self._num_entries += len(run)

    def _take_queued(self, taken: list[int], count: int) -> None:
        queue = self._queue
        self._num_queued -= count
        while count:
            run, kind = queue[0]
            size = len(run)
            if kind == _FINDABLE:
                count -= self._take_findable(run, taken, count)
            elif count < size:
                taken += run[: -count - 1 : -1]
                del run[-count:]
                count = 0
            else:
                taken += run[::-1]
                run.clear()
                count -= size
            num_gone = size - len(run)
            self._num_entries -= num_gone
            if kind == _BLANK:
                self._num_blank_queued -= num_gone
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
        queue: deque[tuple[list[int], int]] = deque()
        for run, kind in self._queue:
            kept = run
            if kind == _FINDABLE:
                kept = [block for block in run if self._run_of.get(block) is run]
                self._run_of.update(dict.fromkeys(kept, kept))
            if kept:
                queue.append((kept, kind))
        self._queue = queue
        self._num_entries = self._num_queued

    def _valid(self, run: list[int], kind: int) -> Iterator[int]:
        return (block for block in reversed(run) if kind != _FINDABLE or self._run_of.get(block) is run)
