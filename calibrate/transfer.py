"""A profile of one card, model or split as one of another: scaled by roofline ratios, with wider intervals.

    python -m windtunnel.calibrate.transfer --evaluate

tries every kind of transfer on pairs of bundled profiles that are both known and writes ``data/transfer.json``, from
which ``transfer`` takes how much wider the intervals become.

The source's time of a step is divided into what reads the cache, what the chunks' query-key pairs take, all-reduces,
the host's part, and the rest.  Each part is scaled by the ratio of its rooflines (``RooflineCost.terms_s``): the
target's card is taken to be as far below its peaks as the source's was.  The host's part stays, all-reduces are the
roofline's own.  The scaled times are distilled again, so that more work never costs less.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibrate.distil import MOST_PERCENT, Limits, Scatter, SourceError, designed_shapes, distil
from windtunnel.sim.cost.bundled import BundledProfile, bundled_profiles
from windtunnel.sim.cost.fitted import FittedCost
from windtunnel.sim.cost.roofline import RooflineCost
from windtunnel.sim.deployment.gpu import GpuSpec, load_gpu
from windtunnel.sim.deployment.model import load_model
from windtunnel.sim.deployment.model_spec import ModelSpec
from windtunnel.sim.engine.plan import StepShape

_Array = NDArray[np.float64]

ERRORS_FILE = Path(__file__).with_name("data") / "transfer.json"

_HOST = ("host", "sequences")
_LOCAL = ("kernels", "gemm", "experts", "elementwise", "lm_head")
_LEAST_SHARE = 0.1
"""Of a step's rest that is at least the card's own: the host's part and all-reduces are taken off no further."""


class Deployment(NamedTuple):
    """What a profile is of; the model and the card as their specs or by name."""

    model: ModelSpec | str
    gpu: GpuSpec | str
    tensor_parallel_size: int = 1

    def roofline(self) -> RooflineCost:
        """Its roofline; raises as RooflineCost, load_model and load_gpu do."""
        model = load_model(self.model) if isinstance(self.model, str) else self.model
        gpu = load_gpu(self.gpu) if isinstance(self.gpu, str) else self.gpu
        return RooflineCost(model, gpu, self.tensor_parallel_size)


def transfer(
    cost: FittedCost,
    source: tuple[ModelSpec | str, GpuSpec | str, int],
    target: tuple[ModelSpec | str, GpuSpec | str, int],
    *,
    limits: Limits | None = None,
    seed: int = 0,
) -> FittedCost:
    """The profile ``cost`` of ``source`` as one of ``target``; both are (model, card, tensor parallelism).

    Its domain is that of the source, cut to the target model's longest context, or ``limits``.  Its intervals hold
    the source's stated error and the error that transfers of this kind showed where both ends were known.

    Raises ValueError for a model, card or split that has no roofline, for all-reduces that none describes (more than
    two cards on PCIe), and for a source without a stated error.
    """
    start, end = Deployment(*source).roofline(), Deployment(*target).roofline()
    _check_links(start, end)
    changed = changes(start, end)
    error = _error(cost, changed)
    own = Limits.of_domain(cost.evidence.domain)
    own = own.within(Limits(**{**_plain(own), "max_model_len": end.model.max_model_len}))
    origin = {key: value for key, value in cost.evidence.provenance.items() if key in _KEPT}
    provenance = {
        **origin,
        "source": "transferred",
        "statement": f"transferred from {_named(start)} to {_named(end)} by roofline ratios, not measured there",
        "model": end.model.name,
        "gpu": end.gpu.name,
        "tensor_parallel_size": end.tensor_parallel_size,
        "dtype": end.model.dtype,
        "transferred_from": {
            "model": start.model.name,
            "gpu": start.gpu.name,
            "tensor_parallel_size": start.tensor_parallel_size,
            "provenance": dict(cost.evidence.provenance),
        },
    }
    return distil(
        lambda shapes: transferred_s(cost, start, end, shapes),
        limits or own,
        seed=seed,
        provenance=provenance,
        extra_error=error,
        scatter=Scatter.carried(cost),
    )


_KEPT = ("engine", "kv_cache_dtype", "clock", "tables", "licence")


def transferred_s(cost: FittedCost, start: RooflineCost, end: RooflineCost, shapes: Any) -> _Array:
    """Seconds of the steps of a StepShape of arrays on the deployment of ``end``, as the module says."""
    return _scaled(_parts(cost, shapes), _terms(start, shapes), _terms(end, shapes))


class _Parts(NamedTuple):
    """A step's time as the source's profile divides it."""

    rest_s: _Array
    cache_s: _Array
    pairs_s: _Array


def _parts(cost: FittedCost, shapes: Any) -> _Parts:
    """By leaving out first the pairs, then the context as well."""
    free = FittedCost(cost.parameters, cost.evidence)  # one that refuses nothing
    nothing = np.zeros_like(shapes.num_sampled)
    no_pairs = shapes._replace(prefill_pairs=nothing)
    bare = no_pairs._replace(decode_context_tokens=nothing, prefill_context_tokens=nothing)
    whole_s, no_pairs_s, bare_s = (np.asarray(free.step_time_s(each), np.float64) for each in (shapes, no_pairs, bare))
    return _Parts(bare_s, no_pairs_s - bare_s, whole_s - no_pairs_s)


class _Rooflines(NamedTuple):
    """The parts of a deployment's roofline that are scaled by a ratio of their own."""

    host_s: _Array
    local_s: _Array
    all_reduce_s: _Array
    context_token_s: float
    pair_s: float


def _terms(roofline: RooflineCost, shapes: Any) -> _Rooflines:
    rows = [roofline.terms_s(StepShape(*map(int, row))) for row in zip(*shapes, strict=True)]
    return _Rooflines(
        np.array([sum(row[name] for name in _HOST) for row in rows]),
        np.array([sum(row[name] for name in _LOCAL) for row in rows]),
        np.array([row["all_reduce"] for row in rows]),
        roofline.terms_s(StepShape(1, 1, 0, 0, 0, 0, 1))["decode_attention"],
        roofline.terms_s(StepShape(0, 0, 1, 1, 0, 1, 1))["prefill_attention"],
    )


def _scaled(parts: _Parts, start: _Rooflines, end: _Rooflines) -> _Array:
    """The host's part and all-reduces are known of neither end: taken from the roofline, they change by difference."""
    fixed_s = np.minimum(start.host_s + start.all_reduce_s, (1.0 - _LEAST_SHARE) * parts.rest_s)
    kept = fixed_s / (start.host_s + start.all_reduce_s)
    rest_s = (parts.rest_s - fixed_s) * end.local_s / start.local_s + kept * (end.host_s + end.all_reduce_s)
    cache_s = parts.cache_s * (end.context_token_s / start.context_token_s)
    return np.asarray(rest_s + cache_s + parts.pairs_s * (end.pair_s / start.pair_s), np.float64)


def changes(start: RooflineCost, end: RooflineCost) -> str:
    """What a transfer changes: "gpu", "gpu+model", … or "nothing"."""
    pairs = {
        "gpu": start.gpu != end.gpu,
        "model": start.model != end.model,
        "tensor_parallel_size": start.tensor_parallel_size != end.tensor_parallel_size,
    }
    return "+".join(name for name, differs in pairs.items() if differs) or "nothing"


def _check_links(start: RooflineCost, end: RooflineCost) -> None:
    for each in (start, end):
        if _is_congested(each) and changes(start, end) != "nothing":
            raise ValueError(
                f"{_named(each)}: more than two cards on {each.gpu.link} wait for each other in a way that no "
                "roofline describes: measure that deployment, or take a bundled profile of it"
            )


def _is_congested(roofline: RooflineCost) -> bool:
    """Whether all-reduces take far longer than their roofline has it: those of 8 L40S do, those of 2 do not."""
    return roofline.tensor_parallel_size > 2 and roofline.gpu.link.startswith("PCIe")


def _named(roofline: RooflineCost) -> str:
    return f"{roofline.model.name} on {roofline.tensor_parallel_size} x {roofline.gpu.name}"


def _plain(limits: Limits) -> dict[str, int]:
    return {name: getattr(limits, name) for name in Limits.__slots__}


def _error(cost: FittedCost, changed: str) -> SourceError:
    """The source's stated error and the transfer's, added up: as if they always went the same way."""
    stated = cost.evidence.provenance.get("stated_error") or {}
    whole = next((line for line in cost.evidence.errors if line.regime == "all"), None)
    middle, ninety = stated.get("p50_percent"), stated.get("p90_percent")
    if middle is None and whole is not None:
        middle, ninety = whole.p50_percent, whole.p90_percent
    if middle is None or ninety is None:
        raise ValueError(
            "the profile to transfer states no error against real steps, so that the result could not either: "
            "measure it, or give it provenance stated_error {p50_percent, p90_percent, rests_on}"
        )
    rests_on = str(stated.get("rests_on") or "held-out steps of the profile's own table")
    if changed == "nothing":
        return SourceError(float(middle), float(ninety), rests_on)
    row = transfer_errors()[changed]
    return SourceError(
        min(float(middle) + row.p50_percent, MOST_PERCENT),
        min(float(ninety) + row.p90_percent, MOST_PERCENT),
        f"the source profile's own ({rests_on}), and {row.num_pairs} transfers of {changed.replace('+', ' and ')} "
        "between bundled profiles, each compared with the profile of its target",
    )


# --- how far transfers are off


class TransferError(NamedTuple):
    """Transfers of one kind between profiles that are both known, in percent of the target profile's times."""

    changed: str
    num_pairs: int
    p50_percent: float
    """Of all steps of all pairs."""
    p90_percent: float
    bias_percent: float
    """Mean over the pairs of summed transferred over summed known times, less one."""
    worst_pair_percent: float
    """The largest median error of a pair."""
    worst_pair: str


@cache
def transfer_errors(part: str = "errors", path: Path = ERRORS_FILE) -> Mapping[str, TransferError]:
    """The table that ``--evaluate`` wrote, by what was changed; ``part`` may be ``on_real_steps``."""
    rows = json.loads(path.read_text(encoding="utf-8"))[part]
    return {row["changed"]: TransferError(**row) for row in rows}


def evaluate(profiles: Iterable[BundledProfile] | None = None, *, num_random: int = 60) -> tuple[TransferError, ...]:
    """Every ordered pair of profiles of bf16 models that have a roofline, one transferred to the other.

    Compared on steps that lie in both domains.
    """
    known = [_known(each, num_random) for each in (bundled_profiles() if profiles is None else profiles)]
    found: dict[str, list[_Pair]] = {}
    for start, end in permutations([each for each in known if each is not None], 2):
        changed = changes(start.roofline, end.roofline)
        if changed != "nothing" and (pair := _pair(start, end)) is not None:
            found.setdefault(changed, []).append(pair)
    return tuple(_summary(changed, found[changed]) for changed in sorted(found))


def evaluate_on_real_steps(
    profiles: Iterable[BundledProfile] | None = None, *, num_random: int = 60
) -> tuple[TransferError, ...]:
    """Composed profiles transferred to a card whose profile was fitted to real steps, by both cards.

    What is compared with the real card's profile is wrong by the composition and by the transfer.
    """
    known = [_known(each, num_random) for each in (bundled_profiles() if profiles is None else profiles)]
    found: dict[str, list[_Pair]] = {}
    for start, end in permutations([each for each in known if each is not None], 2):
        if start.is_real or not end.is_real or changes(start.roofline, end.roofline) != "gpu":
            continue
        if (pair := _pair(start, end)) is not None:
            found.setdefault(f"{start.roofline.gpu.name} to {end.roofline.gpu.name}", []).append(pair)
    return tuple(_summary(changed, found[changed]) for changed in sorted(found))


class _Known(NamedTuple):
    """A profile, and its roofline, on the shapes that all are compared on."""

    name: str
    is_real: bool
    """Whether it was fitted to real steps."""
    roofline: RooflineCost
    parts: _Parts
    terms: _Rooflines
    inside: NDArray[np.bool_]


class _Pair(NamedTuple):
    name: str
    errors_percent: _Array
    bias_percent: float


@cache
def _shapes_to_compare(num_random: int) -> Any:
    return designed_shapes(Limits(256, 16384, 8192, 400_000), seed=1, num_random=num_random)


def _known(profile: BundledProfile, num_random: int) -> _Known | None:
    if profile.gpu is None or profile.source == "transferred":
        return None
    try:
        roofline = Deployment(profile.model, profile.gpu, profile.tensor_parallel_size).roofline()
    except ValueError:
        return None  # no roofline: a CPU, or a model in float32
    if _is_congested(roofline):
        return None
    shapes, cost = _shapes_to_compare(num_random), profile.load()
    inside = ~np.asarray(cost.extrapolates(shapes))
    is_real = profile.source in ("measured", "recorded")
    return _Known(profile.name, is_real, roofline, _parts(cost, shapes), _terms(roofline, shapes), inside)


def _pair(start: _Known, end: _Known) -> _Pair | None:
    both = start.inside & end.inside
    if not both.any():
        return None
    guess_s = _scaled(start.parts, start.terms, end.terms)[both]
    known_s = sum(end.parts, np.zeros(len(both)))[both]
    errors = 100.0 * np.abs(guess_s / known_s - 1.0)
    return _Pair(f"{start.name} to {end.name}", errors, 100.0 * float(guess_s.sum() / known_s.sum() - 1.0))


def _summary(changed: str, pairs: list[_Pair]) -> TransferError:
    errors = np.concatenate([pair.errors_percent for pair in pairs])
    worst = max(pairs, key=lambda pair: float(np.median(pair.errors_percent)))
    return TransferError(
        changed,
        len(pairs),
        round(float(np.median(errors)), 1),
        round(float(np.percentile(errors, 90)), 1),
        round(float(np.mean([pair.bias_percent for pair in pairs])), 1),
        round(float(np.median(worst.errors_percent)), 1),
        worst.name,
    )


def _rows(errors: Iterable[TransferError]) -> Iterator[str]:
    yield f"{'changed':40}  {'pairs':>5}  {'p50 %':>6}  {'p90 %':>6}  {'bias %':>6}  worst pair"
    for row in errors:
        yield (
            f"{row.changed:40}  {row.num_pairs:>5}  {row.p50_percent:6.1f}  {row.p90_percent:6.1f}  "
            f"{row.bias_percent:+6.1f}  {row.worst_pair_percent:.1f} % ({row.worst_pair})"
        )


def markdown_table(errors: Iterable[TransferError]) -> str:
    """The table as docs/bundled-profiles.md has it."""
    heads = ["| changed | pairs | median error | nine of ten within | mean bias | worst pair's median |"]
    rows = (
        f"| {row.changed.replace('+', ', ').replace('_', ' ')} | {row.num_pairs:,} | {row.p50_percent} % | "
        f"{row.p90_percent} % | {row.bias_percent:+} % | {row.worst_pair_percent} % |"
        for row in errors
    )
    return "\n".join([*heads, "|---|---|---|---|---|---|", *rows])


def main(arguments: list[str] | None = None) -> None:
    """Evaluate transfers between the bundled profiles, print the table, and write it where ``transfer`` reads it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", action="store_true", required=True, help="try transfers between known ends")
    parser.add_argument("--output", type=Path, default=ERRORS_FILE)
    given = parser.parse_args(arguments)
    errors, real = evaluate(), evaluate_on_real_steps()
    print("\n".join(_rows((*errors, *real))))
    table = {
        "about": "Errors of transfers between bundled profiles; python -m windtunnel.calibrate.transfer --evaluate",
        "errors": [row._asdict() for row in errors],
        "on_real_steps": [row._asdict() for row in real],
    }
    given.output.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
