"""Fits ``FittedCost`` to a table of measured steps, and says how far off it is on steps whose shape was left out.

The parameters are those of a robust, relative, non-negative least-squares fit (``calibrate.robust``), in which a shape
that was repeated n times weighs as sqrt(n) steps.  How finely the curves bend, whether batches are padded to CUDA
graphs and whether mixed steps cost extra is chosen by cross-validation over shapes, for several random divisions of
them; the model is the mean of the fits chosen so (a mean of non-negative sums is one too), which depends less on which
shapes happened to be measured than any of them.  A fit that is much further from the steps it was fitted to than from
those it had not seen is left out of the mean: see ``StepTimeFit.fit``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.crossval import folds_by_shape
from windtunnel.calibrate.errors import error_lines, far_off
from windtunnel.calibrate.robust import scatter, solve
from windtunnel.calibrate.step_tables import StepTable, StepTableError
from windtunnel.sim.cost.features import REGIMES, Curve, graph_sizes, regimes_of
from windtunnel.sim.cost.fitted import OUTSIDE, Domain, Evidence, FittedCost, FittedParameters, NoiseBin

_Array = NDArray[np.float64]

COVERAGE = 0.9
"""Share of measured steps that an interval is to hold."""
FEWEST_SHAPES = 10
_RIDGE = 1e-4
"""Holds terms apart that the table cannot tell apart; in units of the scaled columns."""
_BASE_RIDGE = 1e-6
"""The same of the constant: what data leave open between it and the curves is paid by every step."""
_STEP_RIDGE = 1e-2
"""The same of what is paid once (chunks, mixed, no graph): where data are silent, time grows with tokens instead."""
_PAID_ONCE = ("prefill_s", "mixed_s", "eager_s", "prefill_seq_s", "mixed_seq_s")
_FOLDS = 5
_DIVISIONS = 3
"""Random divisions of the shapes into folds, each of which chooses a form of its own."""
_GAIN = 0.02
"""Share by which a finer form must lower the cross-validated error to be chosen."""
_CAPPED_ERROR = 0.15
"""A held-out error counts at most this much when forms are compared."""
_MOST_TIMES_HELD_OUT, _MOST_MORE = 2.0, 0.05
"""A model is broken if a regime's median error is more than so many times that of held-out steps, and so much more."""
_FEWEST_IN_BIN = 40
"""Held-out steps that a bin of noise needs to be halved."""
_FEWEST_SHAPES_IN_BIN = 10
"""Held-out shapes that a bin of noise needs for quantiles of its own."""


@dataclass(frozen=True, slots=True)
class Form:
    """How finely the model bends: knots of a curve are so many times apart, None is a straight line."""

    token_ratio: float | None = None
    seq_ratio: float | None = None
    context_ratio: float | None = None
    padded: bool = False
    mixed: bool = False


_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "token_ratio": (None, 4.0, 2.0, 1.4),
    "mixed": (False, True),
    "seq_ratio": (None, 4.0, 2.0),
    "context_ratio": (None, 4.0, 2.0),
    "padded": (False, True),
}

Progress = Callable[[int, int], None]


class StepTimeFit:
    """``StepTimeFit().fit(table)`` is a ``FittedCost``.

    ``form`` fixes what cross-validation would choose.  Batches of up to ``max_graph_tokens`` tokens may be padded to
    vLLM's CUDA graph sizes (512 is the largest that vLLM captures by default; 0: never, as with ``--enforce-eager``).
    The same table and ``seed`` give the same model.
    """

    def __init__(self, *, form: Form | None = None, max_graph_tokens: int = 512, seed: int = 0) -> None:
        if max_graph_tokens < 0:
            raise ValueError(f"max_graph_tokens must be at least 0 (0: no CUDA graphs), got {max_graph_tokens}")
        self.form = form
        self.max_graph_tokens = max_graph_tokens
        self.seed = seed

    def fit(
        self,
        table: StepTable,
        *,
        provenance: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> FittedCost:
        """The model of ``table``, with the errors, noise and intervals of its held-out shapes.

        ``provenance`` is added to the table's own; ``progress`` hears (forms tried, forms at most).
        No model is taken on trust: one whose median error on its own steps, in some regime, is more than twice that of
        steps left out and five percentage points is left out of the mean, and named by the provenance.

        Raises StepTableError for a table of fewer than 10 shapes, as none could be held out, and if no model is left.
        """
        num_shapes = int(table.shape_ids.max()) + 1
        if num_shapes < FEWEST_SHAPES:
            raise StepTableError(
                f"a fit needs steps of at least {FEWEST_SHAPES} different shapes, got {num_shapes}: measure more"
            )
        members = [self._member(table, *each) for each in enumerate(self._forms(table, progress))]
        sound = [each for each in members if _follows(table, each.parameters, each.held_out_s)]
        if not sound:
            raise StepTableError(_broken(table, members[0].parameters, members[0].held_out_s))
        parameters = _mean_parameters([each.parameters for each in sound])
        predicted_s, outside = _held_out_by_all(sound)
        if not _follows(table, parameters, predicted_s):
            raise StepTableError(_broken(table, parameters, predicted_s))
        forms = [each.form for each in sound]
        left_out = [asdict(each.form) for each in members if each not in sound]
        noise = _noise(table, predicted_s, outside)
        domain = Domain.of(table.shapes)
        rough = FittedCost(parameters, Evidence(domain, noise))
        evidence = Evidence(
            domain=domain,
            noise=noise,
            errors=error_lines(table, predicted_s, _covered(rough, table, predicted_s, outside)),
            provenance={
                **table.provenance,
                **(provenance or {}),
                "num_steps": len(table),
                "num_shapes": num_shapes,
                "form": asdict(forms[0]),
                **({"other_forms": [asdict(form) for form in forms[1:]]} if len(forms) > 1 else {}),
                **({"left_out_forms": left_out} if left_out else {}),
                **({"far_off_steps": far} if (far := far_off(table, predicted_s)) else {}),
                "seed": self.seed,
            },
        )
        return FittedCost(parameters, evidence)

    def _forms(self, table: StepTable, progress: Progress | None) -> tuple[Form, ...]:
        """What each division of the shapes chooses; all pad alike, or their mean would be no model of this kind."""
        if self.form is not None:
            return (self.form,)
        most = (_DIVISIONS + 1) * sum(len(values) - 1 for values in _CHOICES.values())
        tried = _Tried(most, progress)
        forms = [self._choose(table, 0, Form(), tried, tuple(_CHOICES), rounds=2)]
        unpadded = tuple(name for name in _CHOICES if name != "padded")
        for division in range(1, _DIVISIONS):
            start = Form(padded=forms[0].padded)
            forms.append(self._choose(table, division, start, tried, unpadded, rounds=1))
        return tuple(forms)

    def _choose(
        self, table: StepTable, division: int, start: Form, tried: _Tried, names: Sequence[str], rounds: int
    ) -> Form:
        """From ``start`` on, one choice after the other, as long as it pays; so many times around."""
        best, scores = start, {start: self._score(table, start, division)}
        for _ in range(rounds):
            for name in names:
                for value in _CHOICES[name]:
                    form = replace(best, **{name: value})
                    if form.padded and not self.max_graph_tokens:
                        continue
                    if form not in scores:
                        scores[form] = self._score(table, form, division)
                        tried.one_more()
                    if scores[form] < scores[best] * (1.0 - _GAIN):
                        best = form
        return best

    def _score(self, table: StepTable, form: Form, division: int) -> float:
        errors = np.abs(self._held_out(table, form, division)[0] / table.step_s - 1.0)
        return float(np.average(np.minimum(errors, _CAPPED_ERROR), weights=_repeat_weights(table)))

    def _member(self, table: StepTable, division: int, form: Form) -> _Member:
        return _Member(form, self._parameters(table, form), *self._held_out(table, form, division))

    def _held_out(self, table: StepTable, form: Form, division: int) -> tuple[_Array, NDArray[np.bool_]]:
        """Every step's time as a model predicts it that has not seen its shape, and whether it had to extrapolate."""
        predicted_s, outside = np.empty(len(table)), np.empty(len(table), bool)
        for held_out in folds_by_shape(table, _FOLDS, self.seed, division):
            seen, asked = table.take(~held_out), table.take(held_out).shapes
            predicted_s[held_out] = _priced(self._parameters(seen, form), asked)
            outside[held_out] = Domain.of(seen.shapes).outside(asked)
        return predicted_s, outside

    def _parameters(self, table: StepTable, form: Form) -> FittedParameters:
        terms = _Terms.of(table.shapes, form, self.max_graph_tokens)
        regimes = regimes_of(table.shapes)
        return terms.parameters(solve(terms.columns, table.step_s, regimes, _repeat_weights(table), terms.ridge))


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """What one division of the shapes came to."""

    form: Form
    parameters: FittedParameters
    held_out_s: _Array
    """Each step's time as predicted by a model that has not seen its shape."""
    outside: NDArray[np.bool_]
    """Where that model had to extrapolate."""


def _held_out_by_all(members: Sequence[_Member]) -> tuple[_Array, NDArray[np.bool_]]:
    """The mean of what the divisions' models predict, none of which has seen the step's shape.

    A step counts as extrapolated if half of them had to.
    """
    predicted_s = np.mean([each.held_out_s for each in members], axis=0)
    return predicted_s, np.mean([each.outside for each in members], axis=0) >= 0.5


def _follows(table: StepTable, parameters: FittedParameters, held_out_s: _Array) -> bool:
    """Whether a model is about as near to the steps it was fitted to as its like were to steps not seen."""
    return all(
        own <= _MOST_TIMES_HELD_OUT * held_out + _MOST_MORE
        for own, held_out in _medians(table, parameters, held_out_s).values()
    )


def _broken(table: StepTable, parameters: FittedParameters, held_out_s: _Array) -> str:
    told = "; ".join(
        f"{regime} {own:.1%} and {held_out:.1%}"
        for regime, (own, held_out) in _medians(table, parameters, held_out_s).items()
    )
    return (
        "the fit misses the steps it was fitted to by more than those left out (median errors on fitted steps and on "
        f"steps left out: {told}): these times do not hang on the shape in a way that can be fitted; look at the "
        "table's slowest and fastest steps, or measure again"
    )


def _medians(table: StepTable, parameters: FittedParameters, held_out_s: _Array) -> dict[str, tuple[float, float]]:
    """By regime the median errors of the model's own steps and of steps left out, as shares."""
    own, held_out = (np.abs(each / table.step_s - 1.0) for each in (_priced(parameters, table.shapes), held_out_s))
    regimes = regimes_of(table.shapes)
    return {
        regime: (float(np.median(own[regimes == number])), float(np.median(held_out[regimes == number])))
        for number, regime in enumerate(REGIMES)
        if (regimes == number).any()
    }


@dataclass
class _Tried:
    """Counts forms for whoever shows the progress."""

    most: int
    progress: Progress | None
    number: int = 0

    def one_more(self) -> None:
        self.number += 1
        if self.progress is not None:
            self.progress(min(self.number, self.most), self.most)


class _Terms(NamedTuple):
    """The columns of the linear problem, and what their coefficients mean."""

    columns: _Array
    knots: Mapping[str, tuple[int, ...]]
    sizes: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, shape: Any, form: Form, max_graph_tokens: int) -> _Terms:
        tokens, sizes = np.asarray(shape.num_tokens), graph_sizes(max_graph_tokens) if form.padded else ()
        padded = _padded(tokens, sizes)
        amounts = {
            "tokens": (padded, form.token_ratio),
            "decode_seqs": (shape.num_decode_seqs, form.seq_ratio),
            "decode_context": (shape.decode_context_tokens, form.context_ratio),
        }
        knots = {name: _knots(amount, ratio) for name, (amount, ratio) in amounts.items()}
        prefills, decodes = shape.num_prefill_seqs > 0, shape.num_decode_seqs > 0
        plain = {
            "base_s": np.ones(len(tokens)),
            "prefill_s": prefills,
            "prefill_seq_s": shape.num_prefill_seqs,
            "pair_s": shape.prefill_pairs,
            "prefill_context_s": shape.prefill_context_tokens,
            "sampled_s": shape.num_sampled,
            "mixed_s": prefills & decodes & form.mixed,
            "mixed_seq_s": np.where(prefills & form.mixed, shape.num_decode_seqs, 0),
            "mixed_context_s": np.where(prefills & decodes & form.mixed, shape.decode_context_tokens, 0),
            "eager_s": tokens > sizes[-1] if sizes else np.zeros(len(tokens)),
        }
        ramps = [ramp for name, (amount, _) in amounts.items() for ramp in _ramps(amount, knots[name])]
        columns = np.column_stack([*(np.asarray(column, np.float64) for column in plain.values()), *ramps])
        return cls(columns, knots, sizes, tuple(plain))

    @property
    def ridge(self) -> _Array:
        """How strongly each coefficient is held at 0."""
        strength = np.full(self.columns.shape[1], _RIDGE)
        strength[self.names.index("base_s")] = _BASE_RIDGE
        strength[[self.names.index(name) for name in _PAID_ONCE]] = _STEP_RIDGE
        return strength

    def parameters(self, coefficients: _Array) -> FittedParameters:
        """What the coefficients of the columns come to."""
        values: dict[str, Any] = dict(zip(self.names, map(float, coefficients), strict=False))
        slopes = iter(coefficients[len(self.names) :])
        for name, knots in self.knots.items():
            seconds = [0.0]
            for low, high in pairwise(knots):
                seconds.append(seconds[-1] + float(next(slopes)) * (high - low))
            values[name] = Curve(knots, seconds)
        values["base_s"] = max(values["base_s"], 1e-9)  # a table may leave nothing to the constant, a step takes time
        return FittedParameters(**values, graph_sizes=self.sizes)


def _mean_parameters(each: Sequence[FittedParameters]) -> FittedParameters:
    """Prices every shape within the curves' knots at the mean of what ``each`` price it at; all pad alike."""
    mean: dict[str, Any] = {"graph_sizes": each[0].graph_sizes}
    for name in (field.name for field in fields(FittedParameters) if field.name not in mean):
        values = [getattr(parameters, name) for parameters in each]
        mean[name] = Curve.mean(values) if isinstance(values[0], Curve) else sum(values) / len(values)
    return FittedParameters(**mean)


def _padded(tokens: NDArray[np.int64], sizes: tuple[int, ...]) -> NDArray[np.int64]:
    if not sizes:
        return tokens
    known = np.array(sizes)
    place = np.minimum(np.searchsorted(known, tokens), len(known) - 1)
    return np.where(tokens <= known[-1], known[place], tokens)


def _knots(amounts: NDArray[np.int64], ratio: float | None) -> tuple[int, ...]:
    """0, then measured amounts that are at least ``ratio`` times apart, and the largest: no piece is without data."""
    present = [int(amount) for amount in np.unique(amounts) if amount > 0]
    if not present:
        return (0, 1)
    if ratio is None:
        return (0, present[-1])
    knots = [0]
    for amount in present:
        if amount >= ratio * knots[-1] and amount * ratio <= present[-1]:
            knots.append(amount)
    return (*knots, present[-1])


def _ramps(amounts: NDArray[np.int64], knots: tuple[int, ...]) -> list[_Array]:
    """For each piece between two knots how much of an amount lies in it; the last piece has no end.

    A piece that every step fills is left to the constant.
    """
    ends = (*knots[1:-1], np.inf)
    ramps = []
    for low, high in zip(knots[:-1], ends, strict=True):
        filled = amounts.min() >= high
        ramps.append(np.zeros(len(amounts)) if filled else np.clip(amounts.astype(np.float64), low, high) - low)
    return ramps


def _repeat_weights(table: StepTable) -> _Array:
    ids = table.shape_ids
    return np.asarray(1.0 / np.sqrt(np.bincount(ids)[ids]), np.float64)


def _priced(parameters: FittedParameters, shapes: Any) -> _Array:
    silent = NoiseBin("decode", 0, 0.0, 0.0, 0.0, 0)
    return np.asarray(FittedCost(parameters, Evidence(Domain.of(shapes), (silent,))).step_time_s(shapes), np.float64)


def _noise(table: StepTable, predicted_s: _Array, outside: NDArray[np.bool_]) -> tuple[NoiseBin, ...]:
    """Scatter of the held-out steps by regime and, where there are enough, by halves of the batch size.

    Steps that had to be extrapolated make a bin of their own besides.  A bin of too few shapes cannot know its tails:
    it takes the quantiles of all bins, in units of its own scatter, which is then at least that of all steps.
    """
    residuals, ids = table.step_s / predicted_s - 1.0, table.shape_ids
    regimes, tokens = regimes_of(table.shapes), table.shapes.num_tokens
    parts = [
        (regime, part)
        for number, regime in enumerate(REGIMES)
        for part in _halves((regimes == number).nonzero()[0], tokens)
        if len(part)
    ]
    if outside.any():
        parts.append((OUTSIDE, outside.nonzero()[0]))
    scores = np.concatenate([residuals[part] / scatter(residuals[part]) for _, part in parts])
    pooled, least = _conformal(scores), scatter(residuals)
    bins = []
    for regime, part in parts:
        sigma = scatter(residuals[part])
        if len(np.unique(ids[part])) >= _FEWEST_SHAPES_IN_BIN:
            low, high = _conformal(residuals[part])
        else:
            sigma = max(sigma, least)
            low, high = pooled[0] * sigma, pooled[1] * sigma
        bins.append(NoiseBin(regime, int(tokens[part].max()), sigma, max(-1.0, low), max(-1.0, high), len(part)))
    return tuple(bins)


def _halves(rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    if len(rows) < 2 * _FEWEST_IN_BIN:
        return (rows,)
    small = tokens[rows] <= np.median(tokens[rows])
    halves = rows[small], rows[~small]
    return halves if min(map(len, halves)) >= _FEWEST_IN_BIN else (rows,)


def _conformal(residuals: _Array) -> tuple[float, float]:
    """Ends of the interval that holds a new residual with probability COVERAGE, were they exchangeable.

    The k-th smallest and largest of n, k = floor((n + 1) * (1 - COVERAGE) / 2) (split conformal prediction with both
    tails: Vovk, Gammerman and Shafer 2005); the extremes where n is too small for that.
    """
    ordered = np.sort(residuals)
    place = max(int((len(ordered) + 1) * (1.0 - COVERAGE) / 2.0 + 1e-9) - 1, 0)
    return float(ordered[place]), float(ordered[len(ordered) - 1 - place])


def _covered(cost: FittedCost, table: StepTable, predicted_s: _Array, outside: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which steps lie within the interval around their held-out prediction."""
    held = np.empty(len(table), bool)
    for row, shape in enumerate(table.rows()):
        own = cost.noise_bin(shape, outside=bool(outside[row]))
        held[row] = own.low <= table.step_s[row] / predicted_s[row] - 1.0 <= own.high
    return held
