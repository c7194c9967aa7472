"""The block pool against a free list that is kept block by block, in both orders of release."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from windtunnel.sim.engine.blocks import BlockPool


class NaiveFreeList:
    """Block by block: the free ids in order, what each block holds, and by how many it is held."""

    def __init__(self, num_blocks: int, unhashed_first: bool) -> None:
        self.free = list(range(1, num_blocks))
        self.unhashed_first = unhashed_first
        self.cached: set[int] = set()
        self.key_of: dict[int, int] = {}
        self.holders: dict[int, int] = {}

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.cached.discard(block)
            self.key_of.pop(block, None)
            self.holders[block] = 1
        return taken

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.free:
                self.free.remove(block)
            self.holders[block] = self.holders.get(block, 0) + 1

    def release(self, blocks: list[int], num_cached: int) -> None:
        self.cached.update(blocks[:num_cached])
        front, end = [], []
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                del self.holders[block]
                (end if block in self.cached or not self.unhashed_first else front).append(block)
        self.free = front + self.free + end


class PoolAgainstList(RuleBasedStateMachine):
    """Requests that take blocks, publish some, share those of others and give all back."""

    unhashed_first = True

    @initialize(num_blocks=st.integers(2, 40))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, caching=True, unhashed_first=self.unhashed_first)
        self.naive = NaiveFreeList(num_blocks, self.unhashed_first)
        self.requests: list[tuple[list[int], int]] = []  # blocks, and how many of them can be found
        self.next_key = 0

    @rule(count=st.integers(1, 8), num_findable=st.integers(0, 8), num_hits=st.integers(0, 4), of=st.integers(0, 30))
    def admit(self, count: int, num_findable: int, num_hits: int, of: int) -> None:
        found = sorted(self.naive.key_of)
        hits = found[of % len(found) :][:num_hits] if found else []
        count = min(count, self.pool.num_free - self.pool.num_free_among(hits))
        if not hits and not count:
            return
        keys = [self.naive.key_of[block] for block in hits]
        assert self.pool.lookup(keys) == hits
        self.pool.hold(hits)
        self.naive.hold(hits)
        taken = self.pool.take(count) if count else []
        assert taken == self.naive.take(count)
        new = taken[: min(num_findable, count)]
        keys = list(range(self.next_key, self.next_key + len(new)))
        self.next_key += len(new)
        self.pool.register(new, keys)
        self.naive.key_of.update(zip(new, keys, strict=True))
        self.requests.append((hits + taken, len(hits) + len(new)))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 30), num_more_cached=st.integers(0, 8))
    def give_back(self, which: int, num_more_cached: int) -> None:
        blocks, num_findable = self.requests.pop(which % len(self.requests))
        num_cached = min(num_findable + num_more_cached, len(blocks))
        self.naive.release(blocks, num_cached)
        self.pool.release(list(blocks), num_findable, num_cached)

    @invariant()
    def same_queue(self) -> None:
        assert self.pool.free_queue() == self.naive.free
        assert self.pool.num_free == len(self.naive.free)
        assert self.pool.num_free_cached == sum(block in self.naive.cached for block in self.naive.free)
        assert self.pool.num_keys == len(self.naive.key_of)


class AppendingPoolAgainstList(PoolAgainstList):
    """The same for the order before vLLM 0.24."""

    unhashed_first = False


@pytest.mark.parametrize("machine", [PoolAgainstList, AppendingPoolAgainstList])
def test_the_pool_hands_out_what_a_list_of_single_blocks_would(machine: type[PoolAgainstList]) -> None:
    run_state_machine_as_test(machine)  # type: ignore[no-untyped-call]


def released(unhashed_first: bool) -> BlockPool:
    """Seven blocks: request a leaves 1 and 2 with full prefixes and 3 without; b leaves 4 and 5 likewise, 6 without."""
    pool = BlockPool(8, caching=True, unhashed_first=unhashed_first)
    a, b = pool.take(3), pool.take(3)
    pool.release(a, 0, 2)
    pool.release(b, 0, 2)
    return pool


def test_blocks_without_a_full_prefix_are_reused_first_since_0_24() -> None:
    assert released(unhashed_first=True).free_queue() == [6, 3, 7, 2, 1, 5, 4]


def test_before_0_24_all_blocks_were_reused_in_the_order_of_their_release() -> None:
    assert released(unhashed_first=False).free_queue() == [7, 3, 2, 1, 6, 5, 4]


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=30), unhashed_first=st.booleans())
def test_without_caching_every_block_comes_back(counts: list[int], unhashed_first: bool) -> None:
    pool = BlockPool(30, caching=False, unhashed_first=unhashed_first)
    for count in counts:
        pool.release(pool.take(count), 0, 0)
        assert pool.num_free == 29
        assert sorted(pool.free_queue()) == list(range(1, 30))
        assert pool.num_free_cached == 0
