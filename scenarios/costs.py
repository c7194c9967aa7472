"""What prices the steps of a scenario: the cost model that it asks for, or the best one that is known for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from windtunnel.scenarios.engine import Hardware
from windtunnel.scenarios.errors import ScenarioUnreadable
from windtunnel.scenarios.ledger import Ledger
from windtunnel.scenarios.schema import AffineCost, AutoCost, ConstantCost, Cost, ProfileCost
from windtunnel.sim.cost import constant, statement
from windtunnel.sim.cost.bundled import BundledProfile, bundled_profiles, find_bundled, load_bundled
from windtunnel.sim.cost.fitted import FittedCost
from windtunnel.sim.cost.profile import load_profile
from windtunnel.sim.cost.roofline import RooflineCost, RooflineFactors
from windtunnel.sim.deployment.gpu import load_gpu
from windtunnel.sim.deployment.model import ModelSpec, load_model
from windtunnel.sim.engine.protocols import CostModel

_TELLS_PROFILES = "windtunnel profiles list"


@dataclass(frozen=True, slots=True)
class ChosenCost:
    """A cost model and how it is to be used."""

    model: CostModel
    profile: str | None = None
    """Name of the bundled profile, or path of the file, that it was read from."""
    is_noisy: bool = False


def make_cost(ledger: Ledger, hardware: Hardware) -> ChosenCost:
    """The cost model of the scenario's [cost]; what was chosen by default, and why, becomes a setting and a note.

    Raises ScenarioError for a profile of another tensor parallelism, for noise or a domain asked of a model that has
    none and for a bundled profile that there is not; ProfileError and ScenarioUnreadable for files.
    """
    spec = ledger.loaded.scenario.cost
    for key, value in spec.model_dump(exclude_none=True).items():
        ledger.note("cost", key, value)
    return ledger.attempt("cost", tuple(type(spec).model_fields), lambda: _make(ledger, spec, hardware))


def _make(ledger: Ledger, spec: Cost, hardware: Hardware) -> ChosenCost:
    match spec:
        case AutoCost():
            return _auto(ledger, spec, hardware)
        case ProfileCost():
            return _given_profile(ledger, spec, hardware)
        case ConstantCost():
            return ChosenCost(constant.ConstantCost(step_s=spec.step_s))
        case AffineCost():
            return ChosenCost(constant.AffineCost(**spec.model_dump(exclude={"kind"}, exclude_none=True)))
    factors = RooflineFactors(**spec.model_dump(exclude={"kind"}, exclude_none=True))
    return ChosenCost(_roofline(ledger, hardware, factors))


def _roofline(ledger: Ledger, hardware: Hardware, factors: RooflineFactors) -> RooflineCost:
    assert hardware.model is not None, "read_hardware asks for it"
    assert hardware.gpu is not None, "read_hardware asks for it"
    size = hardware.tensor_parallel_size
    return RooflineCost(hardware.model, hardware.gpu, size, kv_cache_dtype=_kv_cache_dtype(ledger), factors=factors)


def _kv_cache_dtype(ledger: Ledger) -> str:
    return ledger.loaded.scenario.deployment.kv_cache_dtype or "auto"


# -- the default: a bundled profile, else the roofline


def _auto(ledger: Ledger, spec: AutoCost, hardware: Hardware) -> ChosenCost:
    case, found = _case(ledger, hardware), _bundled_for(ledger, hardware)
    if found is None:
        reason = f"no bundled profile for {case}{_nearest(hardware)}"
        if spec.noise or spec.refuse_outside:
            asked = "noise" if spec.noise else "refuse_outside"
            raise ValueError(
                f"{asked} needs a profile, and there is {reason}: give one (--profile NAME|FILE; {_TELLS_PROFILES}), "
                f"or leave {asked} out"
            )
        ledger.note("cost", "cost_model", "roofline", reason)
        ledger.notes.append(f"Step times come from the roofline, uncalibrated: {reason} ({_TELLS_PROFILES}).")
        return ChosenCost(_roofline(ledger, hardware, RooflineFactors()))
    ledger.note("cost", "cost_model", f"profile {found.name}", f"bundled for {case}")
    return _of_profile(ledger, found.load(), found.name, spec)


def _bundled_for(ledger: Ledger, hardware: Hardware) -> BundledProfile | None:
    model, gpu = hardware.model, hardware.gpu
    assert model is not None, "read_hardware asks for it"
    assert gpu is not None, "read_hardware asks for it"
    name = _profiled_model(model)
    if name is None:
        return None
    kv_dtype = _plain_kv_dtype(_kv_cache_dtype(ledger), model.dtype)
    return find_bundled(name, gpu.name, hardware.tensor_parallel_size, model.dtype, kv_dtype)


def _profiled_model(model: ModelSpec) -> str | None:
    """The model of bundled profiles that has the shapes of this one, whatever a config.json is called."""
    names = dict.fromkeys(each.model for each in bundled_profiles())
    return next((name for name in names if _has_shapes_of(name, model)), None)


def _has_shapes_of(name: str, model: ModelSpec) -> bool:
    try:
        known = load_model(name)
    except (OSError, ValueError):
        return False
    kept = ("name", "dtype", "max_model_len", "max_position_embeddings")
    return replace(known, **{key: getattr(model, key) for key in kept}) == model


def _plain_kv_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """One name for each type: auto where it is the model's own, fp8 for vLLM's default form of it."""
    return {dtype: "auto", "fp8_e4m3": "fp8"}.get(kv_cache_dtype, kv_cache_dtype)


def _case(ledger: Ledger, hardware: Hardware) -> str:
    model, gpu = hardware.model, hardware.gpu
    kv_dtype = _kv_cache_dtype(ledger)
    parts = [
        " on ".join(part.name for part in (model, gpu) if part is not None),
        f"tensor_parallel_size {hardware.tensor_parallel_size}",
        model.dtype if model is not None else "",
        "" if kv_dtype == "auto" else f"kv_cache_dtype {kv_dtype}",
    ]
    return ", ".join(part for part in parts if part)


def _nearest(hardware: Hardware) -> str:
    """What else there is of this model on this card, or of this model at all."""
    model, gpu = hardware.model, hardware.gpu
    name = None if model is None else _profiled_model(model)
    of_model = [each for each in bundled_profiles() if each.model == name]
    on_gpu = [each for each in of_model if gpu is not None and each.gpu == gpu.name]
    if on_gpu:
        sizes = sorted({each.tensor_parallel_size for each in on_gpu})
        return f"; there is one for tensor_parallel_size {', '.join(map(str, sizes))}"
    gpus = list(dict.fromkeys(each.gpu or each.device for each in of_model))
    return f"; there is one on {', '.join(gpus)}" if gpus else ""


# -- a profile that was named


def _given_profile(ledger: Ledger, spec: ProfileCost, hardware: Hardware) -> ChosenCost:
    if spec.path is not None:
        return _of_profile(ledger, _read(ledger, spec.path), spec.path, spec, hardware)
    assert spec.name is not None, "the schema asks for it"
    return _of_profile(ledger, load_bundled(spec.name), spec.name, spec, hardware)


def _read(ledger: Ledger, name: str) -> CostModel:
    path = ledger.loaded.path_of("cost", "path", name)
    try:
        return load_profile(path)
    except OSError as error:
        raise ScenarioUnreadable(f"cannot read profile {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ScenarioUnreadable(f"cannot read profile {path}: not UTF-8 text ({error.reason})") from error


def _of_profile(
    ledger: Ledger, cost: CostModel, name: str, spec: AutoCost | ProfileCost, hardware: Hardware | None = None
) -> ChosenCost:
    """A profile as the scenario wants it used; one that was named is held against the ``hardware``."""
    if not isinstance(cost, FittedCost):
        for key in ("noise", "refuse_outside"):
            if getattr(spec, key):
                raise ValueError(
                    f"{key} needs a fitted profile, and {name} is of the kind {cost.name}, which knows neither noise "
                    f"nor domain: leave {key} out"
                )
        return ChosenCost(cost, name)
    if hardware is not None:
        _check_is_of(ledger, cost.evidence.provenance, name, hardware)
    stated = statement.statement_of(cost.describe())
    assert stated is not None, "a fitted model is calibrated"
    ledger.notes.append(f"Step times come from the profile {name}: {stated.origin}; error {stated.error}.")
    if spec.noise and cost.evidence.provenance.get("source") in ("composed", "transferred"):
        ledger.notes.append(
            f"The noise of {name} is how far such profiles lie from real steps, not how a step scatters that is "
            "repeated: no step of it was measured."
        )
    if spec.refuse_outside:
        cost = FittedCost(cost.parameters, cost.evidence, refuse_outside=True)
    return ChosenCost(cost, name, bool(spec.noise))


def _check_is_of(ledger: Ledger, provenance: Mapping[str, Any], name: str, hardware: Hardware) -> None:
    """Warn of a profile of something else; refuse one of another tensor parallelism, which is never meant."""
    made_for, size = _tensor_parallel_size(provenance), hardware.tensor_parallel_size
    if made_for is not None and made_for != size:
        raise ledger.blame(
            f"the profile {name} is one of tensor_parallel_size {made_for}, the scenario has {size}: set "
            f"tensor_parallel_size = {made_for} (--tensor-parallel-size {made_for}), or give a profile for {size} "
            f"({_TELLS_PROFILES})",
            "cost",
            *ProfileCost.model_fields,
        )
    differing = list(_differing(provenance, hardware, _kv_cache_dtype(ledger)))
    if differing:
        ledger.warnings.append(
            f"the profile {name} was made for something else, so that its step times and its stated error do not hold "
            f"here: {'; '.join(differing)}"
        )


def _tensor_parallel_size(provenance: Mapping[str, Any]) -> int | None:
    """As the profile states it; what is no whole number says nothing."""
    stated = provenance.get("tensor_parallel_size", provenance.get("tp"))
    if isinstance(stated, int) and not isinstance(stated, bool):
        return stated
    return int(stated) if isinstance(stated, str) and stated.strip().isdecimal() else None


def _differing(provenance: Mapping[str, Any], hardware: Hardware, kv_cache_dtype: str) -> Iterator[str]:
    model, gpu = hardware.model, hardware.gpu
    of_model, of_gpu, dtype = (_text(provenance.get(key)) for key in ("model", "gpu", "dtype"))
    if of_model and model is not None and not _names_model(of_model, model):
        yield f"model {of_model}, the scenario has {model.name}"
    if of_gpu and gpu is not None and not _names_gpu(of_gpu, gpu.name):
        yield f"gpu {of_gpu}, the scenario has {gpu.name}"
    if dtype and dtype != "auto" and model is not None and _DTYPES.get(dtype, dtype) != model.dtype:
        yield f"dtype {dtype}, the scenario has {model.dtype}"
    of_cache = _text(provenance.get("kv_cache_dtype"))
    if of_cache and model is not None:
        there, here = (_plain_kv_dtype(each, model.dtype) for each in (of_cache, kv_cache_dtype))
        if there != here:
            yield f"kv_cache_dtype {there}, the scenario has {here}"


_DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""


def _names_model(text: str, model: ModelSpec) -> bool:
    """Whether text of people's own is a name of that model, or of one of its shapes."""
    alike = (text.casefold(), text.rpartition("/")[2].casefold())
    return (
        alike[0] == model.name.casefold()
        or alike[1] == model.name.rpartition("/")[2].casefold()
        or (_has_shapes_of(text, model))
    )


def _names_gpu(text: str, name: str) -> bool:
    try:
        return load_gpu(text).name == name
    except ValueError:
        return False
