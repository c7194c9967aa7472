"""Any function that prices steps, as a ``FittedCost``: fitted to the prices of a designed grid of steps.

Kernel tables (``operators``), rooflines and transferred profiles take long to price a step, or need packages and
specs to do it.  A profile that was distilled from them is a small file, prices a step in a microsecond, never lets
more work cost less, and knows its domain.

Two errors are kept apart.  The *distillation error* is how far the profile is from the function, on shapes that were
left out.  The *source's error* is how far the function is from real steps; whoever gives the function has to know it.
The intervals of the profile hold both.  Its noise holds neither: a profile that is off is off in every step alike,
while noise is drawn anew for each.  It is the ``Scatter`` that real steps show around a fit of their own.
``Evidence.errors`` stays empty: no real step was compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.fit import Form, StepTimeFit
from windtunnel.calibrate.step_tables import StepTable
from windtunnel.sim.cost.features import REGIMES, regimes_of
from windtunnel.sim.cost.fitted import OUTSIDE, Domain, Evidence, FittedCost, NoiseBin
from windtunnel.sim.engine.plan import StepShape

_Array = NDArray[np.float64]

StepTimes = Callable[[Any], _Array]
"""Seconds of the steps of a StepShape of int64 arrays."""

MOST_PERCENT = 90.0
"""Largest 90th percentile of a source's error: beyond it the times say nothing."""
_NUM_RANDOM = 450
"""Random steps of each regime, besides the designed ones."""
_GRAPH_TOKENS = 512
"""The largest CUDA graph that vLLM captures by default."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest steps of a grid, under vLLM's names.

    Raises ValueError, naming the limit, unless all are whole numbers of at least 1, ``max_num_batched_tokens`` is at
    least 16 and ``num_kv_tokens`` holds a sequence of each seat.
    """

    max_num_seqs: int
    max_model_len: int
    """Context of one sequence, its new tokens included."""
    max_num_batched_tokens: int
    num_kv_tokens: int
    """Tokens that the KV cache holds, over all sequences."""

    def __post_init__(self) -> None:
        least = {"max_num_batched_tokens": 16, "num_kv_tokens": self.max_num_seqs}
        for name, value in asdict(self).items():
            if type(value) is not int or value < least.get(name, 1):
                raise ValueError(f"{name} must be a whole number of at least {least.get(name, 1)}, got {value!r}")

    @classmethod
    def of_domain(cls, domain: Domain) -> Limits:
        """Those of the steps that a profile holds for."""
        boxes = domain.boxes.values()

        def most(*names: str) -> int:
            return max(box[name][1] for box in boxes for name in names)

        seats = max(most("num_decode_seqs"), 1)
        kv_tokens = max(most("decode_context_tokens", "prefill_context_tokens"), seats)
        return cls(seats, kv_tokens, max(most("num_tokens"), 16), kv_tokens)

    def within(self, other: Limits) -> Limits:
        """The smaller of each."""
        return Limits(*(min(pair) for pair in zip(asdict(self).values(), asdict(other).values(), strict=True)))


@dataclass(frozen=True, slots=True)
class SourceError:
    """How far priced steps are from real ones, in percent of the real time, and how that is known.

    Raises ValueError unless 0 <= p50_percent <= p90_percent <= 90 and ``rests_on`` says something.
    """

    p50_percent: float
    p90_percent: float
    rests_on: str
    """A sentence: which real steps were compared."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.p50_percent <= self.p90_percent <= MOST_PERCENT:
            raise ValueError(
                f"errors must have 0 <= p50_percent <= p90_percent <= {MOST_PERCENT:g}, got {self.p50_percent!r} and "
                f"{self.p90_percent!r}: times that are off by more are no basis for a profile"
            )
        if not self.rests_on.strip():
            raise ValueError("rests_on must say which real steps the error comes from, got nothing")


@dataclass(frozen=True, slots=True)
class Scatter:
    """How steps of one shape scatter around their mean, as shares of it, by regime: what noise draws.

    Raises ValueError for a share that is negative or not finite, or a ``rests_on`` that says nothing.
    """

    sigmas: Mapping[str, float]
    """Standard deviation by regime; regimes that are not named scatter as the widest of them."""
    rests_on: str
    """A clause that follows "scatter as": which real steps showed it."""

    def __post_init__(self) -> None:
        bad = {name: sigma for name, sigma in self.sigmas.items() if not 0.0 <= sigma < np.inf}
        if bad or not self.sigmas:
            raise ValueError(f"scatter is at least 0 and finite, for at least one regime, got {bad or self.sigmas!r}")
        if not self.rests_on.strip():
            raise ValueError("rests_on must say which real steps the scatter comes from, got nothing")

    @classmethod
    def of(cls, costs: Sequence[FittedCost], rests_on: str) -> Scatter:
        """That of fits to real steps: the mean of their sigmas by regime, weighed by the steps behind them."""
        bins = [each for cost in costs for each in cost.evidence.noise if each.regime != OUTSIDE]
        regimes = dict.fromkeys(each.regime for each in bins)
        return cls(
            {regime: _mean_sigma([each for each in bins if each.regime == regime]) for regime in regimes}, rests_on
        )

    @classmethod
    def carried(cls, cost: FittedCost) -> Scatter | None:
        """That of a profile for another one that is made of it; None where it knows none."""
        told = cost.evidence.provenance.get("scatter")
        if told is not None:
            return cls(told["sigmas"], told["rests_on"]) if told["sigmas"] else None
        return cls.of([cost], "the steps do that the profile was fitted to which it was made from")

    def sigma(self, regime: str) -> float:
        """Of steps of a regime."""
        return self.sigmas.get(regime, max(self.sigmas.values()))


def _mean_sigma(bins: Sequence[NoiseBin]) -> float:
    weights = [max(each.num_steps, 1) for each in bins]
    return round(float(np.average([each.sigma for each in bins], weights=weights)), 5)


def distil(
    step_times_s: StepTimes,
    limits: Limits,
    *,
    seed: int = 0,
    provenance: Mapping[str, Any],
    extra_error: SourceError | None = None,
    scatter: Scatter | None = None,
    otherwise: Otherwise | None = None,
) -> FittedCost:
    """The profile of ``step_times_s`` within ``limits``, with intervals that ``extra_error`` and ``otherwise`` widen.

    ``provenance`` gets ``stated_error``: the errors added up, and each of them; and ``scatter``, which is the noise.
    Without ``extra_error`` it states that no real step was compared, and the intervals hold the distillation's
    residuals alone.  Without ``scatter`` the profile has no noise.  The same arguments give the same profile.

    Raises ValueError for prices that are not positive and finite.
    """
    shapes = designed_shapes(limits, seed=seed)
    table = StepTable(shapes, np.asarray(step_times_s(shapes), np.float64))
    fitted = min((_fit(table, padded, seed) for padded in (False, True)), key=_middle)
    spread = None if otherwise is None else _Spread.of(table, otherwise)
    noise = tuple(_bin(each, extra_error, scatter, spread) for each in _by_size(fitted.evidence.noise))
    stated = {"stated_error": stated_error(fitted, extra_error, spread), "scatter": _told(scatter)}
    kept = {key: fitted.evidence.provenance[key] for key in ("form", "seed")}
    evidence = Evidence(
        fitted.evidence.domain, noise, provenance={**provenance, **stated, "num_priced_shapes": len(table), **kept}
    )
    return FittedCost(fitted.parameters, evidence)


def _fit(table: StepTable, padded: bool, seed: int) -> FittedCost:
    """As fine a form as there is: prices scatter not at all, so that nothing is gained by a plainer one."""
    form = Form(token_ratio=1.4, seq_ratio=2.0, context_ratio=2.0, padded=padded, mixed=True)
    return StepTimeFit(form=form, max_graph_tokens=_GRAPH_TOKENS, seed=seed).fit(table)


def _middle(cost: FittedCost) -> float:
    return cost.evidence.errors[0].mape_percent


class Otherwise(NamedTuple):
    """Other prices of the same steps that may as well be right, such as those of a host with other links."""

    step_times_s: tuple[StepTimes, ...]
    rests_on: str
    """A clause: what they differ by."""


class _Spread(NamedTuple):
    """The lowest and highest of other prices over the prices of the steps of a table."""

    regimes: NDArray[Any]
    tokens: NDArray[Any]
    lowest: _Array
    highest: _Array
    rests_on: str

    @classmethod
    def of(cls, table: StepTable, otherwise: Otherwise) -> _Spread:
        ratios = [np.asarray(price(table.shapes), np.float64) / table.step_s for price in otherwise.step_times_s]
        ratios.append(np.ones(len(table)))
        regimes, tokens = regimes_of(table.shapes), np.asarray(table.shapes.num_tokens)
        return cls(regimes, tokens, np.min(ratios, axis=0), np.max(ratios, axis=0), otherwise.rests_on)

    def percentile_error(self, percent: float) -> float:
        """Of the steps' errors in percent of the real time, were the worse of the other prices the right one."""
        errors = np.maximum(1.0 / self.lowest - 1.0, 1.0 - 1.0 / self.highest)
        return 100.0 * float(np.percentile(errors, percent))

    def ends(self, regime: str, above: int, up_to: float) -> tuple[float, float]:
        """The lowest and highest ratio of steps of a noise bin, but for the twentieth part at either end."""
        inside = (self.tokens > above) & (self.tokens <= up_to)
        if regime in REGIMES:
            inside &= self.regimes == REGIMES.index(regime)
        chosen = inside if inside.any() else np.ones(len(inside), bool)
        return float(np.percentile(self.lowest[chosen], 5)), float(np.percentile(self.highest[chosen], 95))


class _Sized(NamedTuple):
    """A noise bin and the tokens that it holds."""

    bin: NoiseBin
    above: int
    up_to: float


def _by_size(bins: Sequence[NoiseBin]) -> Iterator[_Sized]:
    """The last bin of a regime holds all larger steps too."""
    for number, each in enumerate(bins):
        before = bins[number - 1] if number and bins[number - 1].regime == each.regime else None
        is_last = number + 1 == len(bins) or bins[number + 1].regime != each.regime
        yield _Sized(each, 0 if before is None else before.up_to_tokens, np.inf if is_last else each.up_to_tokens)


def _bin(sized: _Sized, error: SourceError | None, scatter: Scatter | None, spread: _Spread | None) -> NoiseBin:
    each = widened(sized.bin, error)
    lowest, highest = (1.0, 1.0) if spread is None else spread.ends(each.regime, sized.above, sized.up_to)
    return each._replace(
        sigma=0.0 if scatter is None else scatter.sigma(each.regime),
        low=(1.0 + each.low) * lowest - 1.0,
        high=(1.0 + each.high) * highest - 1.0,
    )


def widened(each: NoiseBin, error: SourceError | None) -> NoiseBin:
    """The bin of the profile around the function, with an interval that holds real steps which the function misses.

    Both errors count in full, as if they always went the same way, so that the interval is never too narrow for
    either.  It rests on no real step of this card.
    """
    if error is None:
        return each._replace(num_steps=0)
    share = error.p90_percent / 100.0
    return each._replace(
        low=(1.0 + each.low) / (1.0 + share) - 1.0, high=(1.0 + each.high) / (1.0 - share) - 1.0, num_steps=0
    )


def stated_error(fitted: FittedCost, error: SourceError | None, spread: _Spread | None = None) -> dict[str, Any]:
    """What a distilled profile states, from the fit to the prices, the source's error and other prices' spread.

    Not known where other prices lie so far off that an error of over 90 % would have to be stated.
    """
    distillation = {
        line.regime: {"p50_percent": round(line.p50_percent, 2), "p90_percent": round(line.p90_percent, 2)}
        for line in fitted.evidence.errors
    }
    rest: dict[str, Any] = {
        "distillation": {"against": "the prices that it was distilled from, not real steps", **distillation}
    }
    if error is None:
        return {"p50_percent": None, "p90_percent": None, "rests_on": "no real step was compared", **rest}
    parts = [(error.p50_percent, error.p90_percent), tuple(distillation["all"].values())]
    rest["source"] = {"p50_percent": round(error.p50_percent, 2), "p90_percent": round(error.p90_percent, 2)}
    rests_on = error.rests_on
    if spread is not None:
        parts.append((spread.percentile_error(50.0), spread.percentile_error(90.0)))
        rest["otherwise"] = {
            "p50_percent": round(parts[-1][0], 1),
            "p90_percent": round(parts[-1][1], 1),
            "rests_on": spread.rests_on,
        }
        rests_on = f"{rests_on}; and {spread.rests_on}"
    p50, p90 = (sum(part[place] for part in parts) for place in range(2))
    if p90 > MOST_PERCENT:
        return {"p50_percent": None, "p90_percent": None, "rests_on": _too_far(spread), **rest}
    return {"p50_percent": round(p50, 1), "p90_percent": round(p90, 1), "rests_on": rests_on, **rest}


def _too_far(spread: _Spread | None) -> str:
    if spread is None:
        return f"its parts add up to more than {MOST_PERCENT:g} %"
    least, most = float(np.percentile(spread.lowest, 10)), float(np.percentile(spread.highest, 90))
    return f"{spread.rests_on}, with which steps take from {least:.2g} to {most:.2g} times as long"


def _told(scatter: Scatter | None) -> dict[str, Any]:
    if scatter is None:
        return {"sigmas": {}, "rests_on": "not known, so there is no noise"}
    return {"sigmas": dict(scatter.sigmas), "rests_on": scatter.rests_on}


# --- the grid


def designed_shapes(limits: Limits, *, seed: int = 0, num_random: int = _NUM_RANDOM) -> Any:
    """A StepShape of arrays: decodes, prompt chunks and both, by a grid and at random, evenly on a log scale.

    The contexts of the decodes of a step are alike; chunks are alike in the grid and of any length at random.
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(6,)))
    rows = [
        *_decode_grid(limits),
        *_prefill_grid(limits),
        *_mixed_grid(limits),
        *(row for _ in range(num_random) for row in _random_steps(limits, rng)),
    ]
    unique = list(dict.fromkeys(row for row in rows if _allowed(row, limits)))
    return StepShape(*np.array(unique, np.int64).T)


def _decode_grid(limits: Limits) -> Iterator[StepShape]:
    for seats, context in product(_spaced(1, limits.max_num_seqs, 2.0), _spaced(16, limits.max_model_len, 2.5)):
        yield _step(seats, context)


def _prefill_grid(limits: Limits) -> Iterator[StepShape]:
    tokens = _spaced(16, limits.max_num_batched_tokens, 1.6)
    for new, cached in product(tokens, (0, *_spaced(64, limits.max_model_len, 4.0))):
        yield _step(0, 0, _equal_chunks(1, new, cached))
    for new, count, cached in product(tokens, (2, 8, 32), (0, 1024)):
        yield _step(0, 0, _equal_chunks(count, new, cached))


def _mixed_grid(limits: Limits) -> Iterator[StepShape]:
    seats = _spaced(1, limits.max_num_seqs, 4.0)
    tokens = _spaced(16, limits.max_num_batched_tokens, 2.5)
    for decodes, new, context in product(seats, tokens, (256, 2048)):
        yield _step(decodes, context, _equal_chunks(1, new, 0))


def _random_steps(limits: Limits, rng: np.random.Generator) -> Iterator[StepShape]:
    """One of each regime."""
    yield _step(_drawn(rng, 1, limits.max_num_seqs), _drawn(rng, 1, limits.max_model_len))
    yield _step(0, 0, _random_chunks(limits, rng), int(rng.integers(0, 2)))
    decodes = _drawn(rng, 1, limits.max_num_seqs)
    yield _step(decodes, _drawn(rng, 1, limits.max_model_len), _random_chunks(limits, rng), int(rng.integers(0, 2)))


_Chunks = list[tuple[int, int]]
"""New and cached tokens of each."""


def _step(decodes: int, context: int, chunks: _Chunks | None = None, num_unfinished: int = 0) -> StepShape:
    """A step of so many decodes with ``context`` tokens each, and of chunks of which some do not end their prompt."""
    chunks = chunks or []
    return StepShape(
        num_decode_seqs=decodes,
        decode_context_tokens=decodes * context,
        num_prefill_seqs=len(chunks),
        prefill_tokens=sum(new for new, _ in chunks),
        prefill_context_tokens=sum(cached for _, cached in chunks),
        prefill_pairs=sum(new * cached + new * (new + 1) // 2 for new, cached in chunks),
        num_sampled=decodes + max(len(chunks) - num_unfinished, 0),
    )


def _equal_chunks(count: int, new: int, cached: int) -> _Chunks:
    return [(new // count, cached)] * count if new >= count else []


def _random_chunks(limits: Limits, rng: np.random.Generator) -> _Chunks:
    total = _drawn(rng, 1, limits.max_num_batched_tokens)
    count = min(_drawn(rng, 1, 16), limits.max_num_seqs, total)
    lengths = [int(new) for new in 1 + rng.multinomial(total - count, rng.dirichlet(np.ones(count)))]
    rooms = [limits.max_model_len - new if rng.random() < 0.5 else 0 for new in lengths]
    return [(new, _drawn(rng, 1, room) if room > 0 else 0) for new, room in zip(lengths, rooms, strict=True)]


def _allowed(row: StepShape, limits: Limits) -> bool:
    """Whether an engine within the limits could do it."""
    prompts = row.prefill_tokens + row.prefill_context_tokens
    return (
        0 < row.num_tokens <= limits.max_num_batched_tokens
        and row.num_decode_seqs + row.num_prefill_seqs <= limits.max_num_seqs
        and row.decode_context_tokens <= limits.max_model_len * row.num_decode_seqs
        and prompts <= limits.max_model_len * row.num_prefill_seqs
        and row.decode_context_tokens + prompts <= limits.num_kv_tokens
    )


def _spaced(first: int, last: int, ratio: float) -> list[int]:
    """Whole numbers about ``ratio`` times apart, both ends included."""
    if last <= first:
        return [last]
    count = max(2, round(float(np.log(last / first) / np.log(ratio))) + 1)
    return [int(value) for value in np.unique(np.rint(np.geomspace(first, last, count)))]


def _drawn(rng: np.random.Generator, first: int, last: int) -> int:
    """One at random, evenly on a log scale."""
    return min(last, int(np.exp(rng.uniform(np.log(first), np.log(last + 1)))))
