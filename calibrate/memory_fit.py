"""Fits the constants of ``sim.deployment.overheads`` to recorded start-ups, and says how far off they are.

``python -m windtunnel.calibrate.memory_fit [startups.csv]`` writes ``overheads.json`` and prints the table of errors.

All constants are fitted together by robust least squares (soft L1) to what the logs say: the parts where they are
logged, else their sum.  Every model family weighs the same in each situation (release, card, parallelism), however
often it was started.  Weak priors hold what few start-ups speak of.  Errors are those of families left out of the fit.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from windtunnel.calibrate.startups import STARTUPS_CSV, StartUp, read_rows, usable
from windtunnel.sim.deployment import overheads
from windtunnel.sim.deployment.gpu import GIB, bundled_gpus
from windtunnel.sim.deployment.memory_plan import CONTEXT_BYTES, DISTRIBUTED_CONTEXT_BYTES
from windtunnel.sim.deployment.overheads import Constants, estimate_parts, kinds_of, shapes_of
from windtunnel.sim.deployment.profile_run import is_amd, release

_Array = NDArray[np.float64]

MIB = 2**20
COVERAGE = 0.9
"""Share of errors that an interval is to hold."""
_OUTLIER_GIB = 0.05
"""Residuals beyond this count less than their square."""
_RELIANCE = {"estimated": 0.1}
"""Estimates of graphs that releases before 0.20 only print: all are of one host, and twice those that count since."""
_PRIOR_WEIGHT = 0.05
"""A prior counts as a start-up whose residuals are this much smaller."""
_PRIORS_GIB: dict[str, float] = {
    "activation_bytes": 0.1,
    "hidden_copies_sampling": 1.0,
    "hidden_copies_mlp": 4.0,
    "cuda_single_old_bytes": 0.2,
    "cuda_single_bytes": 0.2,
    "cuda_several_old_bytes": 0.6,
    "cuda_several_bytes": 0.6,
    "cuda_doubling_bytes": 0.0,
    "amd_single_bytes": 0.6,
    "amd_several_bytes": 0.6,
    "replicas_bytes": (DISTRIBUTED_CONTEXT_BYTES - CONTEXT_BYTES) / GIB,
    "estimated_graphs_bytes": 0.3,
    "estimated_graphs_layer_bytes": 0.01,
    "captured_graphs_bytes": 0.3,
    "captured_graphs_layer_bytes": 0.01,
    "amd_captured_graphs_bytes": 3.0,
}
"""What a constant is without any start-up; GiB, or copies of the hidden states.  Scales, not measurements, but for
``replicas_bytes``: what several ranks take beside a CUDA context before vLLM begins to count, mostly for NCCL."""


class _Observation(NamedTuple):
    """One figure of a log and the estimate that it is compared with."""

    start_up: StartUp
    kind: str
    logged_bytes: float
    estimated: Callable[[overheads.Parts], float]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A start-up against the estimate of constants that were fitted without its family."""

    row: int
    source: str
    family: str
    version: str
    gpu: str
    kind: str
    situation: tuple[str, ...]
    """Family, card, release, parallelism: start-ups that share it are repeats."""
    logged: float
    """KV tokens; blocks where no tokens are logged."""
    predicted: float
    low: float
    high: float
    """The 90 % interval of it, from the errors on the other families."""
    residual_bytes: float
    """Logged overheads less the estimated ones, the error of the weights included."""
    weights_logged: bool
    num_replicas: int

    @property
    def error(self) -> float:
        """Relative error of the predicted pool; above 0 it is too large."""
        return self.predicted / self.logged - 1

    @property
    def covered(self) -> bool:
        """Whether the logged pool lies in the interval, to the rounding of logs (0.01 GiB)."""
        slack = 1e-4 * self.logged
        return self.low - slack <= self.logged <= self.high + slack


class Line(NamedTuple):
    """One line of the table of errors."""

    version: str
    gpu: str
    kind: str
    start_ups: int
    models: int
    median_error: float
    p90_error: float
    largest_error: float
    coverage: float


def fit(start_ups: Sequence[StartUp]) -> Constants:
    """The constants that fit these start-ups best."""
    names = [field.name for field in fields(Constants)]
    priors = np.array([_PRIORS_GIB[name] for name in names])
    observations = [seen for start_up in start_ups if start_up.is_fitted for seen in _observations(start_up)]
    shapes = [shapes_of(seen.start_up.setting) for seen in observations]
    weights = np.array(_weights(observations))

    def residuals(values: _Array) -> _Array:
        constants = _constants(names, values)
        off = [
            (seen.estimated(estimate_parts(shape, constants)) - seen.logged_bytes) / GIB
            for seen, shape in zip(observations, shapes, strict=True)
        ]
        return np.concatenate([weights * np.array(off), _PRIOR_WEIGHT * (values - priors)])

    found = least_squares(residuals, priors, loss="soft_l1", f_scale=_OUTLIER_GIB, x_scale=np.maximum(priors, 0.01))
    return _constants(names, found.x)


def _constants(names: Sequence[str], values: _Array) -> Constants:
    scaled = {
        name: float(value) if name.startswith("hidden") else float(value) * GIB
        for name, value in zip(names, values, strict=True)
    }
    return Constants(**scaled)


def _observations(start_up: StartUp) -> list[_Observation]:
    found = []
    if start_up.activation_bytes is not None and start_up.non_torch_bytes is not None:
        found += [
            _Observation(start_up, "activation", start_up.activation_bytes, lambda parts: parts.activation_bytes),
            _Observation(start_up, "non_torch", start_up.non_torch_bytes, lambda parts: parts.non_torch_bytes),
        ]
        if start_up.setting.pipeline_parallel_size > 1:  # the first stage's are logged, the last one's are wanted
            found.clear()
    if not found:
        found.append(_Observation(start_up, "sum", start_up.overhead_bytes, lambda parts: parts.in_budget_bytes))
    return found + _graph_observations(start_up)


def _graph_observations(start_up: StartUp) -> list[_Observation]:
    """Captured graphs, where the log's figure is one: before 0.18 it is what the pool of the profile run left over."""
    found, version = [], release(start_up.setting.version)
    inside = overheads.graphs_inside(start_up.setting.gpu, start_up.setting.version)
    captured = start_up.captured_graphs_bytes
    if captured is not None and not inside and (version >= (0, 18) or is_amd(start_up.setting.gpu)):
        found.append(_Observation(start_up, "captured", captured, lambda parts: parts.cudagraph_bytes))
    if start_up.estimated_graphs_bytes is not None:
        estimated = start_up.estimated_graphs_bytes
        found.append(_Observation(start_up, "estimated", estimated, lambda parts: parts.estimated_graphs_bytes))
    return found


def _weights(observations: Sequence[_Observation]) -> list[float]:
    """Square roots of shares: a family counts once for each situation and kind of figure."""
    situations = [(seen.kind, *_situation(seen.start_up)) for seen in observations]
    repeats = Counter(situations)
    return [math.sqrt(_RELIANCE.get(place[0], 1.0) / repeats[place]) for place in situations]


def _situation(start_up: StartUp) -> tuple[str, ...]:
    setting = start_up.setting
    minor = ".".join(setting.version.release.split(".")[:2])
    sizes = (setting.tensor_parallel_size, setting.pipeline_parallel_size, start_up.num_replicas)
    return (start_up.family, start_up.gpu, minor, *map(str, sizes))


def evaluate(rows: Iterable[Mapping[str, str]]) -> list[Evaluation]:
    """Each usable start-up, predicted by constants that know nothing of its family.

    The interval of a start-up comes from the errors on all other families, each of them left out as well.
    """
    start_ups, _ = usable(rows)
    residuals = _left_out_residuals(start_ups, lambda start_up: start_up.family)
    return [_evaluation(start_up, residuals) for start_up in start_ups]


class _Residual(NamedTuple):
    start_up: StartUp
    estimated_bytes: float

    @property
    def residual_bytes(self) -> float:
        return self.start_up.unexplained_bytes - self.estimated_bytes

    @property
    def scaled(self) -> float:
        """In units of the root of the estimate, GiB."""
        return self.residual_bytes / GIB / math.sqrt(self.estimated_bytes / GIB)


def _left_out_residuals(start_ups: Sequence[StartUp], group: Callable[[StartUp], str]) -> dict[int, _Residual]:
    """Errors of the sum by row, each start-up estimated without its group."""
    found = {}
    for name in sorted({group(start_up) for start_up in start_ups}):
        constants = fit([start_up for start_up in start_ups if group(start_up) != name])
        for start_up in start_ups:
            if group(start_up) == name:
                found[start_up.row] = _Residual(
                    start_up, estimate_parts(shapes_of(start_up.setting), constants).in_budget_bytes
                )
    return found


def _evaluation(start_up: StartUp, residuals: Mapping[int, _Residual]) -> Evaluation:
    own = residuals[start_up.row]
    scale = error_scale([other for other in residuals.values() if other.start_up.family != start_up.family])
    low, high = overheads.error_interval(own.estimated_bytes, scale)
    return Evaluation(
        start_up.row,
        start_up.source,
        start_up.family,
        ".".join(start_up.version.split(".")[:2]),
        start_up.gpu,
        " and ".join(kinds_of(start_up.setting.model)) or "dense",
        _situation(start_up),
        start_up.logged,
        start_up.tokens_in(own.estimated_bytes),
        start_up.tokens_in(own.estimated_bytes + high),
        start_up.tokens_in(own.estimated_bytes + low),
        own.residual_bytes,
        start_up.weights_logged,
        start_up.num_replicas,
    )


def error_scale(residuals: Sequence[_Residual]) -> tuple[float, float]:
    """The interval that holds ``COVERAGE`` of these errors, for an estimate of 1 GiB; it grows with the root.

    A family weighs as the root of the number of its situations: between one vote for each family and one for each
    situation.
    """
    situations = [_situation(residual.start_up) for residual in residuals]
    repeats = Counter(situations)
    of_family = Counter(situation[0] for situation in repeats)
    weights = np.array([1 / repeats[place] / math.sqrt(of_family[place[0]]) for place in situations])
    scaled = np.array([residual.scaled for residual in residuals])
    order = np.argsort(scaled, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    low, high = (
        float(scaled[order][np.searchsorted(reached, share)]) for share in ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2)
    )
    return min(low, 0.0), max(high, 0.0)


def table(evaluations: Sequence[Evaluation]) -> list[Line]:
    """Errors by release, card and kind of model, then over all start-ups, and over one of each situation."""
    groups: dict[tuple[str, str, str], list[Evaluation]] = {}
    for found in sorted(evaluations, key=lambda found: (_minor(found.version), found.gpu, found.kind)):
        groups.setdefault((found.version, found.gpu, found.kind), []).append(found)
    lines = [_line(*names, members) for names, members in groups.items()]
    once = list({found.situation: found for found in reversed(evaluations)}.values())
    return [*lines, _line("all", "", "", evaluations), _line("all", "each situation once", "", once)]


def _minor(version: str) -> int:
    return int(version.rsplit(".", 1)[1])


def _line(version: str, gpu: str, kind: str, members: Sequence[Evaluation]) -> Line:
    errors = np.array([abs(member.error) for member in members])
    return Line(
        version,
        gpu,
        kind,
        len(members),
        len({member.family for member in members}),
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
        float(errors.max()),
        sum(member.covered for member in members) / len(members),
    )


def fitted_data(rows: Iterable[Mapping[str, str]]) -> dict[str, object]:
    """What ``overheads.json`` holds: constants, the scale of errors and what they were fitted to."""
    start_ups, _ = usable(rows)
    used = [start_up for start_up in start_ups if start_up.is_fitted]
    releases = sorted(release(start_up.setting.version) for start_up in used)
    low, high = error_scale(list(_left_out_residuals(start_ups, lambda start_up: start_up.family).values()))
    nvidia = {start_up.setting.tensor_parallel_size for start_up in used if not is_amd(start_up.setting.gpu)}
    replicas = {start_up.num_replicas for start_up in used if start_up.setting.shares_experts}
    kinds = {kind for start_up in used for kind in kinds_of(start_up.setting.model)}
    return {
        "about": "Fitted by calibrate/memory_fit.py to calibrate/data/startups.csv.  Bytes, and copies of the hidden "
        "states; error_scale is the 90 % interval of errors on models left out, for an estimate of 1 GiB.",
        "constants": {name: _rounded(name, value) for name, value in asdict(fit(start_ups)).items()},
        "measured": {
            "start_ups": len(used),
            "models": len({start_up.family for start_up in used}),
            "gpus": sorted({start_up.gpu for start_up in used} & set(bundled_gpus())),
            "oldest": releases[0],
            "newest": releases[-1],
            "tensor_parallel_sizes": sorted(nvidia),
            "data_parallel_sizes": sorted(replicas),
            "kinds": sorted(kinds),
            "error_scale": [round(low, 3), round(high, 3)],
        },
    }


def _rounded(name: str, value: float) -> float:
    """To whole MiB: what a fit on another machine gives as well."""
    return round(value, 2) if name.startswith("hidden") else round(value / MIB) * MIB


def _shown(line: Line) -> str:
    shares = (line.median_error, line.p90_error, line.largest_error, line.coverage)
    figures = "".join(f"{100 * share:>9.2f}" for share in shares)
    return f"{line.version:<10}{line.gpu:<26}{line.kind:<22}{line.start_ups:>5}{line.models:>8}{figures}"


def main(arguments: Sequence[str]) -> None:
    """Fit to the file given (or the one that comes along), write ``overheads.json``, print the table of errors."""
    rows = read_rows(Path(arguments[0]) if arguments else STARTUPS_CSV)
    text = json.dumps(fitted_data(rows), indent=2)
    Path(overheads.__file__).with_name("overheads.json").write_text(text + "\n", encoding="utf-8")
    heads = "".join(f"{head:>9}" for head in ("median %", "p90 %", "max %", "cover %"))
    print(f"{'release':<10}{'card':<26}{'kind':<22}{'n':>5}{'models':>8}{heads}")
    for line in table(evaluate(rows)):
        print(_shown(line))
    _, reasons = usable(rows)
    print(f"\n{len(reasons)} of {len(rows)} start-ups say too little:")
    for reason, count in Counter(reasons.values()).most_common():
        print(f"{count:>5}  {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
