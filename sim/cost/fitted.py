"""A cost model whose parameters were fitted to measured steps, with its domain, its noise and its error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from windtunnel.sim.cost.features import REGIMES, Curve, regime_of, regimes_from, regimes_of
from windtunnel.sim.engine.plan import StepShape

if TYPE_CHECKING:
    from windtunnel.sim.records import StepTable

Box = Mapping[str, tuple[int, int]]
"""Smallest and largest value of each field of StepShape, and of ``num_tokens``."""


class OutsideDomain(ValueError):
    """A step is outside of what the model was fitted to, and extrapolation was refused."""


@dataclass(frozen=True, slots=True)
class FittedParameters:
    """Seconds of everything that a step's time adds up, all at least 0, so that more work never costs less.

    Raises ValueError, naming the parameter, for a value that is negative, infinite or of the wrong kind.
    """

    base_s: float
    """Of every step: scheduling, launches, the lm_head's and the layers' fixed parts."""
    tokens: Curve
    """Over the tokens of the batch, padded to a CUDA graph's size where there is one."""
    decode_seqs: Curve
    decode_context: Curve
    """Over the context that the decodes read."""
    prefill_s: float
    """Once, where the step holds a prompt chunk."""
    prefill_seq_s: float
    pair_s: float
    """Of a query-key pair of the chunks."""
    prefill_context_s: float
    """Of a cached token ahead of the chunks."""
    sampled_s: float
    mixed_s: float
    """Once, where the step holds decodes and chunks."""
    mixed_seq_s: float
    """Of each decode beside a chunk."""
    mixed_context_s: float = 0.0
    """Of a token of the decodes' context, where they lie beside a chunk: some kernels read it slower there."""
    eager_s: float = 0.0
    """Once, where the batch is larger than the largest CUDA graph."""
    graph_sizes: tuple[int, ...] = ()
    """Batch sizes that have a CUDA graph; empty: no padding."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith("_s"):
                _check_seconds(each.name, value, positive=each.name == "base_s")
            elif each.name == "graph_sizes":
                _check_sizes(value)
            elif not isinstance(value, Curve):
                raise ValueError(f"{each.name} must be a curve (knots and seconds), got {value!r}")

    def as_plain(self) -> dict[str, Any]:
        """As plain data for a file."""
        plain: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            plain[each.name] = value.as_plain() if isinstance(value, Curve) else value
        return {**plain, "graph_sizes": list(self.graph_sizes)}


@dataclass(frozen=True, slots=True)
class Domain:
    """The box of the measured steps, one for each regime that was measured.

    Raises ValueError for an unknown regime or field, or a box that is empty.
    """

    boxes: Mapping[str, Box]

    def __post_init__(self) -> None:
        if not self.boxes:
            raise ValueError("a domain needs the box of at least one regime")
        for regime, box in self.boxes.items():
            if regime not in REGIMES:
                raise ValueError(f"the domain's regimes are {', '.join(REGIMES)}, got {regime!r}")
            if sorted(box) != sorted(DOMAIN_FIELDS):
                raise ValueError(f"the domain of {regime} must hold {', '.join(DOMAIN_FIELDS)}, got {', '.join(box)}")
            for name, (low, high) in box.items():
                if not 0 <= low <= high:
                    raise ValueError(f"the domain of {regime} must have 0 <= low <= high, got {name} {low}, {high}")

    @classmethod
    def of(cls, shape: StepShape) -> Domain:
        """That of the steps of a shape of arrays."""
        values = _domain_values(shape)
        regimes = regimes_of(shape)
        boxes = {}
        for number, regime in enumerate(REGIMES):
            inside = regimes == number
            if inside.any():
                boxes[regime] = {
                    name: (int(value[inside].min()), int(value[inside].max())) for name, value in values.items()
                }
        return cls(boxes)

    def reasons(self, shape: StepShape) -> tuple[str, ...]:
        """Why a step (scalars only) is outside, one line each; empty for one that is inside."""
        regime = regime_of(shape)
        box = self.boxes.get(regime)
        if box is None:
            return (f"no {regime} step was measured",)
        values = {**shape._asdict(), "num_tokens": shape.num_tokens}
        return tuple(
            f"{name} {values[name]} is outside of {low} to {high}"
            for name, (low, high) in box.items()
            if not low <= values[name] <= high
        )

    def holds(self, shape: StepShape) -> bool:
        """Whether a step (scalars only) is inside: no ``reasons``, found faster."""
        box = self.boxes.get(regime_of(shape))
        if box is None:
            return False
        low, high = box["num_tokens"]
        if not low <= shape.num_tokens <= high:
            return False
        for name, value in zip(StepShape._fields, shape, strict=True):
            low, high = box[name]
            if not low <= value <= high:
                return False
        return True

    def outside(self, shape: StepShape) -> Any:
        """For each step of a shape of arrays whether it is outside."""
        return self.outside_as_known(_domain_values(shape))

    def outside_as_known(self, values: Mapping[str, Any]) -> Any:
        """The same by the fields that ``values`` holds, num_decode_seqs and num_prefill_seqs among them."""
        regimes = regimes_from(values["num_decode_seqs"], values["num_prefill_seqs"])
        inside = np.zeros(regimes.shape, bool)
        for number, regime in enumerate(REGIMES):
            box = self.boxes.get(regime)
            if box is not None:
                held = regimes == number
                for name, value in values.items():
                    held = held & (box[name][0] <= value) & (value <= box[name][1])
                inside |= held
        return ~inside


DOMAIN_FIELDS = (*StepShape._fields, "num_tokens")


LARGEST_SIGMA = 5.0
"""No profile of use has steps that scatter further; at a thousand, every factor of mean 1 would come out as 0."""

OUTSIDE = "outside"
"""In place of a regime: steps outside of the box of those that the model was fitted to."""


class NoiseBin(NamedTuple):
    """How measured steps scatter around the prediction, as shares of it, for a regime up to a size."""

    regime: str
    up_to_tokens: int
    """The bin's largest batch; the last bin of a regime holds all larger ones too."""
    sigma: float
    """Robust standard deviation (1.4826 times the median absolute deviation) of held-out steps."""
    low: float
    """Lower end of the 90 % interval: measured / predicted - 1, at least -1."""
    high: float
    num_steps: int
    """Held-out steps that it rests on."""


class ErrorLine(NamedTuple):
    """Errors of held-out steps in one regime, in percent of the measured time."""

    regime: str
    num_steps: int
    num_shapes: int
    mape_percent: float
    """Mean absolute error."""
    p50_percent: float
    p90_percent: float
    p99_percent: float
    bias_percent: float
    """Sum of the predicted over sum of the measured times, less one: what throughput is wrong by."""
    covered_percent: float
    """Steps inside of their 90 % interval."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a fit rests on and how far off it is, on steps whose shape was left out."""

    domain: Domain
    noise: tuple[NoiseBin, ...]
    errors: tuple[ErrorLine, ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)
    """Corrections to the memory plan, measured on the same machine; empty if there are none."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Card, driver, versions, model, dtype, tensor parallelism, date and source, as far as they are known."""

    def __post_init__(self) -> None:
        if not self.noise:
            raise ValueError("a fitted model needs at least one bin of noise")
        for each in self.noise:
            _check_bin(each)


class FittedCost:
    """Seconds for a step as a sum of non-negative terms: see ``FittedParameters``.

    ``extrapolates`` says of each step whether it is outside of what was measured.  With ``refuse_outside``, such a
    step raises OutsideDomain instead of getting a price.
    """

    name: str = "fitted"
    calibrated: bool = True

    def __init__(self, parameters: FittedParameters, evidence: Evidence, *, refuse_outside: bool = False) -> None:
        self.parameters = parameters
        self.evidence = evidence
        self.refuse_outside = refuse_outside
        self._seconds_of_tokens = _graph_table(parameters)
        self._table = np.array(self._seconds_of_tokens)
        self._seconds_of_seqs: dict[int, float] = {}  # those that were asked for
        self._bins: dict[str, list[NoiseBin]] = {}
        for each in evidence.noise:
            self._bins.setdefault(each.regime, []).append(each)

    def step_time_s(self, shape: StepShape) -> Any:
        """Seconds for one step, or a float64 array for a shape of arrays; see CostModel.

        Raises OutsideDomain if ``refuse_outside`` and a step is outside of the domain.
        """
        if type(sum(shape)) is not int:
            return self._step_times_s(shape)
        if self.refuse_outside and (reasons := self.evidence.domain.reasons(shape)):
            raise OutsideDomain(f"this profile was not measured there: {'; '.join(reasons)}; {_REMEDY}")
        decodes, decode_context, prefills, prefill_tokens, prefill_context, pairs, sampled = shape
        own = self.parameters
        tokens, table = decodes + prefill_tokens, self._seconds_of_tokens
        graph_s = table[tokens] if tokens < len(table) else own.tokens.at(tokens) + own.eager_s
        time_s = own.base_s + graph_s
        seqs_s = self._seconds_of_seqs.get(decodes)
        if seqs_s is None:
            seqs_s = self._seconds_of_seqs[decodes] = own.decode_seqs.at(decodes)
        time_s = time_s + seqs_s + own.decode_context.at(decode_context)
        if not prefills:
            return time_s + sampled * own.sampled_s
        time_s = time_s + own.prefill_s + prefills * own.prefill_seq_s + pairs * own.pair_s
        time_s = time_s + prefill_context * own.prefill_context_s
        if decodes:
            time_s = time_s + own.mixed_s + decodes * own.mixed_seq_s + decode_context * own.mixed_context_s
        return time_s + sampled * own.sampled_s

    def _step_times_s(self, shape: StepShape) -> Any:
        """The same expressions in the same order, so that every element equals the scalar's to the bit."""
        if self.refuse_outside and np.any(self.evidence.domain.outside(shape)):
            raise OutsideDomain(f"this profile was not measured at some of the steps; {_REMEDY}")
        decodes, decode_context, prefills, prefill_tokens, prefill_context, pairs, sampled = np.broadcast_arrays(*shape)
        own = self.parameters
        tokens = decodes + prefill_tokens
        inside = tokens < len(self._table)
        in_graph_s = self._table[np.where(inside, tokens, 0)]
        time_s = own.base_s + np.where(inside, in_graph_s, own.tokens.at_all(tokens) + own.eager_s)
        time_s = time_s + own.decode_seqs.at_all(decodes) + own.decode_context.at_all(decode_context)
        filled = time_s + own.prefill_s + prefills * own.prefill_seq_s + pairs * own.pair_s
        filled = filled + prefill_context * own.prefill_context_s
        both = filled + own.mixed_s + decodes * own.mixed_seq_s + decode_context * own.mixed_context_s
        filled = np.where(decodes > 0, both, filled)
        return np.where(prefills > 0, filled, time_s) + sampled * own.sampled_s

    def extrapolates(self, shape: StepShape) -> Any:
        """Whether a step is outside of the measured domain (a bool), or which of many are (an array of bool)."""
        if type(sum(shape)) is int:
            return not self.evidence.domain.holds(shape)
        return self.evidence.domain.outside(shape)

    def noise_bin(self, shape: StepShape, *, outside: bool | None = None) -> NoiseBin:
        """How steps like this one scatter (scalars only); for a regime not measured the widest that is known.

        Outside of the domain (looked up unless told) it is the bin of extrapolated steps, if that is the wider one.
        """
        regime, tokens = regime_of(shape), shape.num_tokens
        own = self._bins.get(regime)
        if not own:
            return max(self.evidence.noise, key=_width)
        known = next((each for each in own if tokens <= each.up_to_tokens), own[-1])
        if self.extrapolates(shape) if outside is None else outside:
            return max([known, *self._bins.get(OUTSIDE, [])], key=_width)
        return known

    def sigma(self, shape: StepShape) -> float:
        """Standard deviation of a step's time as a share of the prediction (scalars only)."""
        return self.noise_bin(shape).sigma

    def interval_s(self, shape: StepShape) -> tuple[float, float]:
        """Bounds in seconds that hold nine of ten measured steps of this shape (scalars only); see NoiseBin.

        They hold for steps like those of the fit.  Outside of the domain (``extrapolates``) they are as wide as was
        seen where parts of the measured steps had to be extrapolated from the others; nothing vouches for more.
        """
        time_s, own = float(self.step_time_s(shape)), self.noise_bin(shape)
        return time_s * (1.0 + own.low), time_s * (1.0 + own.high)

    def describe(self) -> dict[str, Any]:
        """Error in a line, domain, noise, errors by regime, provenance and parameters, as plain data."""
        whole = next((line for line in self.evidence.errors if line.regime == "all"), None)
        stated = (
            "not stated"
            if whole is None
            else f"median {whole.p50_percent:.1f} %, nine of ten within {whole.p90_percent:.1f} %, on "
            f"{whole.num_steps} steps of shapes left out of the fit"
        )
        return {
            "name": self.name,
            "calibrated": self.calibrated,
            "error": stated,
            "domain": domain_as_plain(self.evidence.domain),
            "noise": [each._asdict() for each in self.evidence.noise],
            "errors": [each._asdict() for each in self.evidence.errors],
            "memory": dict(self.evidence.memory),
            "provenance": dict(self.evidence.provenance),
            "parameters": self.parameters.as_plain(),
        }


class Extrapolated(NamedTuple):
    """How many of the steps that were simulated lie outside of what the profile was measured at."""

    num_steps: int
    num_outside: int
    time_share: float
    """Share of the time of all steps."""


def extrapolated(cost: object, tables: Iterable[StepTable]) -> Extrapolated:
    """Of these simulated steps; none of a cost model that is not fitted.

    Judged by decodes, their context, prefills and their tokens, which is what records keep.
    """
    num_steps, num_outside, time_ns, outside_ns = 0, 0, 0, 0
    if not isinstance(cost, FittedCost):
        return Extrapolated(0, 0, 0.0)
    for steps in tables:
        values = {name: np.asarray(getattr(steps, name)) for name in StepShape._fields[:4]}
        values["num_tokens"] = values["num_decode_seqs"] + values["prefill_tokens"]
        outside = cost.evidence.domain.outside_as_known(values)
        lasted_ns = np.asarray(steps.end_ns) - np.asarray(steps.start_ns)
        num_steps, num_outside = num_steps + len(outside), num_outside + int(outside.sum())
        time_ns, outside_ns = time_ns + int(lasted_ns.sum()), outside_ns + int(lasted_ns[outside].sum())
    return Extrapolated(num_steps, num_outside, outside_ns / max(time_ns, 1))


def extrapolation_warning(cost: object, tables: Iterable[StepTable]) -> str | None:
    """What to tell whoever reads the results of these simulated steps; None if all of them were like measured ones."""
    num_steps, num_outside, time_share = extrapolated(cost, tables)
    if not num_outside:
        return None
    return (
        f"{num_outside:,} of {num_steps:,} steps ({time_share:.0%} of the time) lie outside of what "
        "the profile was measured at: their times are extrapolated, and the profile's stated error does not cover them"
    )


def _width(each: NoiseBin) -> float:
    return each.high - each.low


_REMEDY = "measure such steps and fit again, or load the profile without refuse_outside"


def domain_as_plain(domain: Domain) -> dict[str, dict[str, list[int]]]:
    """A domain as plain data: regime, then field, then [low, high]."""
    return {regime: {name: list(span) for name, span in box.items()} for regime, box in domain.boxes.items()}


def _graph_table(parameters: FittedParameters) -> list[float]:
    """Seconds of 0, 1, 2, … tokens up to the largest CUDA graph, each padded to the next size that has one."""
    if not parameters.graph_sizes:
        return [0.0]
    table, begin = [0.0], 1
    for size in parameters.graph_sizes:
        table += [parameters.tokens.at(size)] * (size + 1 - begin)
        begin = size + 1
    return table


def _domain_values(shape: StepShape) -> dict[str, Any]:
    arrays = np.broadcast_arrays(*shape)
    values = dict(zip(StepShape._fields, arrays, strict=True))
    return {**values, "num_tokens": values["num_decode_seqs"] + values["prefill_tokens"]}


def _check_seconds(name: str, value: object, *, positive: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number of seconds, got {value!r}")
    if not (value > 0.0 if positive else value >= 0.0) or not math.isfinite(value):
        raise ValueError(f"{name} must be {'above' if positive else 'at least'} 0 and finite, got {value!r}")


def _check_sizes(sizes: Sequence[object]) -> None:
    previous = 0
    for size in sizes:
        if type(size) is not int or size <= previous:
            raise ValueError(f"graph_sizes must be whole numbers that rise from 1, got {size!r} behind {previous}")
        previous = size


def _check_bin(each: NoiseBin) -> None:
    if each.regime not in (*REGIMES, OUTSIDE):
        raise ValueError(
            f"the regime of a noise bin must be one of {', '.join(REGIMES)}, {OUTSIDE}, got {each.regime!r}"
        )
    numbers = (each.sigma, each.low, each.high)
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in numbers):
        raise ValueError(f"sigma, low and high of a noise bin must be numbers, got {numbers!r}")
    if not (0.0 <= each.sigma < math.inf and -1.0 <= each.low <= each.high < math.inf):
        raise ValueError(f"a noise bin must have sigma >= 0 and -1 <= low <= high, all finite, got {numbers!r}")
    if each.sigma > LARGEST_SIGMA:
        raise ValueError(
            f"the sigma of a noise bin must be at most {LARGEST_SIGMA:g}, got {each.sigma!r}: it is the standard "
            "deviation of a step's time as a share of the prediction, such as 0.02; fit the profile again"
        )
