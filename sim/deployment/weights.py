"""Weights one by one: their shape, how tensor and expert parallelism share them out, and how they are stored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple


class Split(NamedTuple):
    """How vLLM spreads one replica's weights over GPUs.

    Heads and MLP columns are split ``tensor_parallel_size`` ways.  Experts are split like MLP columns, over the
    ranks of all ``data_parallel_size`` engines together, or with ``expert_parallel`` handed out whole.
    """

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel: bool = False

    @property
    def expert_ranks(self) -> int:
        """GPUs that share the experts."""
        return self.tensor_parallel_size * self.data_parallel_size


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix is stored: ``bits`` a weight, and the scales that go with it.

    ``group_overhead_bits`` (scale and zero point) come with every ``group_size`` weights.  ``channel_bits`` come with
    every output row, which shows only for narrow matrices.  ``block`` (rows, columns) is one scale of
    ``group_overhead_bits`` for each such tile, counted in whole tiles.
    """

    name: str
    bits: int
    group_size: int = 0
    group_overhead_bits: int = 0
    gemm_dtype: str = "bf16"
    """Arithmetic of the matrix products: "bf16", "fp8" or "int8"; weight-only formats compute in bf16."""
    channel_bits: int = 0
    block: tuple[int, int] = (0, 0)
    pads_experts_to: tuple[int, int] = (0, 0)
    """Multiples that a kernel wants of an expert's (width, hidden size) on one GPU; 0 for none."""
    order_bits: int = 0
    """Of each input row: the order of the groups (GPTQ with desc_act)."""
    overhead_bytes: int = 0
    """Of each matrix: scales of the whole tensor."""

    def __post_init__(self) -> None:
        for field in ("block", "pads_experts_to"):  # lists where they were read from JSON
            object.__setattr__(self, field, tuple(getattr(self, field)))

    def num_bytes(self, num_weights: int) -> int:
        """Bytes that ``num_weights`` take, rounded up; scales of rows and tensors (below 0.1 %) are left out."""
        overhead = num_weights // self.group_size * self.group_overhead_bits if self.group_size else 0
        return -(-(num_weights * self.bits + overhead) // 8)

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of one matrix with all its scales."""
        bits = outputs * inputs * self.bits + outputs * self.channel_bits + inputs * self.order_bits
        if self.block[0]:
            bits += -(-outputs // self.block[0]) * -(-inputs // self.block[1]) * self.group_overhead_bits
        elif self.group_size:
            bits += outputs * -(-inputs // self.group_size) * self.group_overhead_bits
        return -(-bits // 8) + self.overhead_bytes


@dataclass(frozen=True, slots=True)
class FormatRule:
    """Which modules are stored in ``format`` (None: in the model's own dtype) instead of the usual one."""

    format: WeightFormat | None = None
    modules: frozenset[str] = frozenset()
    """Names of modules, such as "layers.3.mlp.down_proj", or of what holds them ("layers.3.mlp")."""
    patterns: tuple[str, ...] = ()
    """Regular expressions that match a name from its beginning, under one of the prefixes that checkpoints use."""

    def matches(self, module: str) -> bool:
        """Whether the rule is for ``module`` ("layers.3.mlp.down_proj"); what follows a colon does not count."""
        module = module.partition(":")[0]
        name = module
        while name:
            if name in self.modules:
                return True
            name = name.rpartition(".")[0]
        if not self.patterns:
            return False
        pattern = _compiled(self.patterns)
        return any(pattern.match(prefix + module) for prefix in _PREFIXES)


_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "backbone.", "")


class Parameter(NamedTuple):
    """One matrix or vector of a model, ``copies`` times where there are as many experts."""

    module: str
    """Its name in the layer, as checkpoints spell it."""
    outputs: int
    inputs: int = 1
    split: str = ""
    """Side that is shared out, "outputs" or "inputs"; "" is held by every GPU."""
    units: int = 0
    """What the split side consists of (heads, groups); 0 for single rows.  Fewer units than GPUs are replicated."""
    copies: int = 0
    """Experts, each with this matrix; 0 for a part that is no expert."""
    element_bytes: int = 0
    """Bytes of an element, whatever the model's dtype; 0 follows the model."""
    linear: bool = True
    """A matrix that quantisation may store in fewer bits."""
    keeps_copy: bool = False
    """Quantised, it is kept a second time in the model's dtype."""
    in_checkpoint: bool = True
    """False for what only the engine holds, such as a projection it keeps twice."""

    def local_shape(self, split: Split) -> tuple[int, int, int]:
        """Outputs, inputs and copies on one GPU, the fullest.

        Raises ValueError if the split side does not divide evenly.
        """
        ranks, copies = split.tensor_parallel_size, self.copies or 1
        if self.copies:
            ranks = split.expert_ranks
            if split.expert_parallel:
                return self.outputs, self.inputs, -(-self.copies // ranks)
        if self.split == "outputs":
            return self._share(self.outputs, ranks), self.inputs, copies
        if self.split == "inputs":
            return self.outputs, self._share(self.inputs, ranks), copies
        return self.outputs, self.inputs, copies

    @property
    def unit_count(self) -> int:
        """Units of the split side, 0 where none is split."""
        side = {"outputs": self.outputs, "inputs": self.inputs}.get(self.split, 0)
        return self.units or side

    def splits_into(self, ranks: int) -> bool:
        """Whether that many GPUs can share it out evenly or, with fewer heads or groups than GPUs, hold copies."""
        units = self.unit_count
        return units % ranks == 0 or (self.units > 0 and ranks % units == 0)

    def _share(self, side: int, ranks: int) -> int:
        if not self.splits_into(ranks):
            raise ValueError(f"{self.module}: {self.unit_count} cannot be divided by {ranks}")
        return max(self.unit_count // ranks, 1) * (side // self.unit_count)

    @property
    def num_elements(self) -> int:
        """Elements of all copies."""
        return self.outputs * self.inputs * (self.copies or 1)

    def num_bytes(self, split: Split, dtype_bytes: int, form: WeightFormat | None) -> int:
        """Bytes on one GPU, stored in ``form`` if it is a matrix, else in its own or the model's dtype."""
        outputs, inputs, copies = self.local_shape(split)
        if self.linear and form is not None:
            if self.copies:
                outputs, inputs = self._padded(outputs, inputs, form)
            again = outputs * inputs * dtype_bytes if self.keeps_copy else 0
            return copies * (form.matrix_bytes(outputs, inputs) + again)
        return copies * outputs * inputs * (self.element_bytes or dtype_bytes)

    def _padded(self, outputs: int, inputs: int, form: WeightFormat) -> tuple[int, int]:
        width, hidden = form.pads_experts_to
        if self.split == "inputs":
            return _up(outputs, hidden), _up(inputs, width)
        return _up(outputs, width), _up(inputs, hidden)


def format_of(module: str, default: WeightFormat | None, rules: tuple[FormatRule, ...]) -> WeightFormat | None:
    """How ``module`` is stored: as the first rule that matches its name says, else as ``default``."""
    return next((rule.format for rule in rules if rule.matches(module)), default)


@cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple if multiple else value
