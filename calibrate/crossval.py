"""Dividing measured steps by their shapes: all repeats of a shape stay together, so that no answer is known."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.step_tables import StepTable


def folds_by_shape(table: StepTable, num_folds: int, seed: int, division: int = 0) -> Iterator[NDArray[np.bool_]]:
    """For each of ``num_folds`` parts of the shapes, divided at random, the mask of its steps.

    Each ``division`` of a seed is another one.  Raises ValueError for fewer shapes than parts, or fewer than two parts.
    """
    ids = table.shape_ids
    num_shapes = int(ids.max()) + 1
    if not 2 <= num_folds <= num_shapes:
        raise ValueError(f"the number of parts must be between 2 and the {num_shapes} shapes, got {num_folds}")
    order = _generator(seed, division + 1 if division else 0).permutation(num_shapes)  # 1 is split_by_shape's
    part_of_shape = np.empty(num_shapes, np.int64)
    part_of_shape[order] = np.arange(num_shapes) % num_folds
    part = part_of_shape[ids]
    for number in range(num_folds):
        yield part == number


def split_by_shape(table: StepTable, share: float, seed: int) -> tuple[StepTable, StepTable]:
    """The steps of a random ``share`` of the shapes, and the rest.

    Raises ValueError unless both parts get a shape.
    """
    ids = table.shape_ids
    num_shapes = int(ids.max()) + 1
    num_first = round(share * num_shapes)
    if not 0 < num_first < num_shapes:
        raise ValueError(f"share must leave shapes on both sides, got {share!r} of {num_shapes}")
    first = np.zeros(num_shapes, bool)
    first[_generator(seed, 1).permutation(num_shapes)[:num_first]] = True
    return table.take(first[ids]), table.take(~first[ids])


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream,)))
