"""From chains of block hashes to shared streams.

A hash id names a block *and all that comes before it*, so a chain of ids is a path in a tree: equal ids behind
different parents are different content.  Nodes on the path of one request only are its own and need no stream; a
node whose parent is shared by the same chain alone continues its parent's stream.  So a request has one segment
for every place where other requests leave its path.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from windtunnel.scenarios.workloads.rows import Content
from windtunnel.sim.workload import IntArray, Segment


def shared_content(
    chains: Sequence[Sequence[Hashable]], chunk_tokens: int, num_prompt_tokens: IntArray
) -> tuple[Content | None, int]:
    """Content and number of streams of requests whose prompts are chains of blocks of ``chunk_tokens`` tokens.

    The last block of a chain may be cut short by the end of the prompt; tokens behind the chain are the request's
    own.  (None, 0) if no two requests share a block.
    """
    nodes, parents = _walk(chains)
    counts = np.bincount(nodes, minlength=len(parents))
    streams, num_streams = _streams(parents, counts)
    if not num_streams:
        return None, 0
    lengths = np.fromiter(map(len, chains), np.int64, len(chains))
    return _segments(streams[nodes], lengths, chunk_tokens, num_prompt_tokens), num_streams


def _walk(chains: Sequence[Sequence[Hashable]]) -> tuple[IntArray, IntArray]:
    """The nodes of all chains one after the other, and the parent of each node (-1 for a root)."""
    numbers: dict[tuple[int, Hashable], int] = {}
    parents: list[int] = []
    nodes: list[int] = []
    for chain in chains:
        node = -1
        for hash_id in chain:
            key = (node, hash_id)
            child = numbers.get(key)
            if child is None:
                child = numbers[key] = len(parents)
                parents.append(node)
            node = child
            nodes.append(node)
    return np.array(nodes, np.int64), np.array(parents, np.int64)


def _streams(parents: IntArray, counts: IntArray) -> tuple[IntArray, int]:
    """The stream of each node, -1 for nodes of one request only, and how many there are."""
    shared = counts > 1
    with_parent = shared & (parents >= 0)
    num_children = np.bincount(parents[with_parent], minlength=len(parents))
    streams = np.full(len(parents), -1, np.int64)
    num_streams = 0
    for node in np.flatnonzero(shared).tolist():
        parent = parents[node]
        if parent >= 0 and num_children[parent] == 1:
            streams[node] = streams[parent]
        else:
            streams[node] = num_streams
            num_streams += 1
    return streams, num_streams


def _segments(streams: IntArray, lengths: IntArray, chunk_tokens: int, num_prompt_tokens: IntArray) -> Content:
    rows = np.repeat(np.arange(len(lengths)), lengths)
    first = np.cumsum(lengths) - lengths
    ends = np.minimum((np.arange(len(rows)) - first[rows] + 1) * chunk_tokens, num_prompt_tokens[rows])
    last = np.ones(len(rows), np.bool_)
    last[:-1] = (streams[1:] != streams[:-1]) | (rows[1:] != rows[:-1])
    picked = np.flatnonzero(last & (streams >= 0))
    content: list[tuple[Segment, ...]] = [()] * len(lengths)
    for row, stream, end in zip(rows[picked].tolist(), streams[picked].tolist(), ends[picked].tolist(), strict=True):
        content[row] += ((stream, end),)
    return tuple(content)
